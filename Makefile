# train_gpt: `make` builds the trainer and the tokenizer, `make help` lists the rest.
# BLAS=dnnl|openblas|none chooses the matrix product (default: the first that is installed, in this order).
# NO_MPI=1 leaves MPI out, also where it is installed: one rank only. NO_NCCL=1 leaves NCCL out: one GPU only.

CC ?= gcc
CLANG ?= clang
BUILD := build
WARN := -Wall -Wextra -Wno-unused-function
# -ffast-math is forbidden: it makes isnan() false. These three only drop errno, traps and the ban on fused multiply-add.
FAST := -fno-math-errno -fno-trapping-math -ffp-contract=fast
ARCH ?= native
has = $(shell printf '\043include <$(1)>\nint main(void){return 0;}\n' | $(CC) -x c - -o /dev/null $(2) >/dev/null 2>&1 && echo yes)

X86 := $(shell $(CC) -mprefer-vector-width=512 -x c -E /dev/null >/dev/null 2>&1 && echo yes)
TUNE := -march=$(ARCH) $(if $(X86),-mprefer-vector-width=512)
CFLAGS ?= -O3 -g $(TUNE)
BASE_FLAGS := -std=c11 -D_GNU_SOURCE -I. $(WARN) $(FAST) -fopenmp
ifeq ($(CI),true)
BASE_FLAGS += -Werror
endif

HAVE_DNNL := $(call has,dnnl.h,-ldnnl)
HAVE_OPENBLAS := $(call has,cblas.h,-lopenblas)
HAVE_JSON := $(call has,jansson.h,-ljansson)
HAVE_XXH := $(call has,xxhash.h,)
BLAS ?= $(if $(HAVE_DNNL),dnnl,$(if $(HAVE_OPENBLAS),openblas,none))
BLAS_FLAGS_dnnl := -DUSE_DNNL
BLAS_LIBS_dnnl := -ldnnl
BLAS_FLAGS_openblas := -DUSE_OPENBLAS
BLAS_LIBS_openblas := -lopenblas
ifeq ($(filter $(BLAS),dnnl openblas none),)
$(error BLAS=$(BLAS): wanted dnnl, openblas or none)
endif
ifneq ($(HAVE_JSON)$(HAVE_XXH),yesyes)
ifeq ($(filter help clean,$(MAKECMDGOALS)),)
$(error jansson.h or xxhash.h is missing: run scripts/setup.sh (Debian: apt-get install libjansson-dev libxxhash-dev))
endif
endif
comma := ,
COMMIT := $(shell git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)
ifeq ($(filter-out 0,$(NO_MPI)),)
MPI_FLAGS := $(shell mpicc --showme:compile 2>/dev/null || pkg-config --cflags ompi-c 2>/dev/null)
MPI_LIBS := $(shell mpicc --showme:link 2>/dev/null || pkg-config --libs ompi-c 2>/dev/null)
HAVE_MPI := $(call has,mpi.h,$(MPI_FLAGS) $(MPI_LIBS))
endif
DEFINES := $(if $(HAVE_MPI),-DUSE_MPI $(patsubst -I%,-isystem %,$(MPI_FLAGS))) $(BLAS_FLAGS_$(BLAS)) -DBUILD_BLAS='"$(BLAS)"' -DBUILD_COMMIT='"$(COMMIT)"' -DXXH_INLINE_ALL
# as-needed: programs without ranks do not load MPI
LIBS := $(BLAS_LIBS_$(BLAS)) -ljansson -lm -lpthread $(if $(HAVE_MPI),-Wl$(comma)--as-needed $(MPI_LIBS))
COMPILE = $(CC) $(BASE_FLAGS) $(DEFINES) $(CFLAGS)
SANITIZE := -O1 -g $(TUNE) -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer

HEADERS := $(wildcard llmc/*.h llmc/cpu/*.h llmc/cuda/*.h dev/test/*.h)
UNIT_TESTS := $(patsubst dev/test/%.c,$(BUILD)/%,$(wildcard dev/test/test_*.c))
FUZZERS := $(patsubst dev/fuzz/%.c,$(BUILD)/%,$(wildcard dev/fuzz/fuzz_*.c))
BENCHES := $(patsubst dev/bench/%.c,$(BUILD)/%,$(wildcard dev/bench/bench_*.c))

all: banner train_gpt tokenize

help:
	@echo "make              ./train_gpt and ./tokenize (BLAS=dnnl|openblas|none, NO_MPI=1, ARCH=native)"
	@echo "make test_gpt     the trainer against recorded results; make test_gpt_asan"
	@echo "make unit         build/test_*; make unit-asan: under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make fuzzers      build/fuzz_* (clang)"
	@echo "make schedules    docs/schedule_*.svg: timelines of the pipeline schedules"
	@echo "make crash        kills jobs, fails their disks, damages their checkpoints, hundreds of times"
	@echo "make layouts-full every legal layout of 1, 2, 4 and 8 ranks against one rank (hours)"
	@echo "make mutants      one-line faults, each of which must make a test fail"
	@echo "make bench_cuda   times of the CUDA device's ops; make gpu-binaries: what dev/gpu/check.sh runs on a machine with a GPU"
	@echo "make headers      every header compiles alone; make CC=clang syntax: warnings of another compiler"
	@echo "make train_gptcu  ./train_gptcu: the trainer for GPUs, by nvcc (CUDA_ARCH=\"80 90a\", NO_MPI=1, NO_NCCL=1); make test_gptcu: every op and whole steps on a GPU"
	@echo "make sim          ./test_gptcu_sim and ./train_gptcu_sim: the CUDA device simulated on the CPU (forms _asan, _race); needs CUDA's headers"
	@echo "make sim-test     tests of the simulated device itself (dev/cudasim)"
	@echo "make cuda-syntax  nvcc compiles and links it all without a warning; make cuda-headers: each header alone"
	@echo "make format       clang-format over the sources"
	@echo "make clean        removes what was built"
	@echo "scripts/test.sh   everything"

banner:
	@echo "matrix products: BLAS=$(BLAS) (oneDNN $(or $(HAVE_DNNL),no), OpenBLAS $(or $(HAVE_OPENBLAS),no)); jansson yes, xxHash yes; MPI $(or $(HAVE_MPI),no)"

train_gpt: train_gpt.c $(HEADERS) Makefile
	$(COMPILE) $< -o $@ $(LIBS)
tokenize: data/tokenize.c $(HEADERS) Makefile
	$(COMPILE) $< -o $@ $(LIBS)
test_gpt: test_gpt.c train_gpt.c $(HEADERS) Makefile
	$(COMPILE) $< -o $@ $(LIBS)
train_gpt_asan: train_gpt.c $(HEADERS) Makefile
	$(CC) $(BASE_FLAGS) $(DEFINES) $(SANITIZE) $< -o $@ $(LIBS)
test_gpt_asan: test_gpt.c train_gpt.c $(HEADERS) Makefile
	$(CC) $(BASE_FLAGS) $(DEFINES) $(SANITIZE) $< -o $@ $(LIBS)
tokenize_asan: data/tokenize.c $(HEADERS) Makefile
	$(CC) $(BASE_FLAGS) $(DEFINES) $(SANITIZE) $< -o $@ $(LIBS)

$(BUILD)/test_%: dev/test/test_%.c $(HEADERS) Makefile
	@mkdir -p $(BUILD)
	$(COMPILE) $< -o $@ $(LIBS)
$(BUILD)/test_%_asan: dev/test/test_%.c $(HEADERS) Makefile
	@mkdir -p $(BUILD)
	$(CC) $(BASE_FLAGS) $(DEFINES) $(SANITIZE) $< -o $@ $(LIBS)
# A data race ends it. OpenMP's own synchronisation is not seen: for tests that do not compute in parallel.
$(BUILD)/test_%_tsan: dev/test/test_%.c $(HEADERS) Makefile
	@mkdir -p $(BUILD)
	$(CC) $(BASE_FLAGS) $(DEFINES) -O1 -g $(TUNE) -fsanitize=thread $< -o $@ $(LIBS)
# Makes the k-th system call of a kind fail; preloaded by test_checkpoint into its children and by checkpoint_ranks.sh.
$(BUILD)/shim_io.so: dev/test/shim_io.c Makefile
	@mkdir -p $(BUILD)
	$(CC) -std=c11 -D_GNU_SOURCE $(WARN) -O1 -g -shared -fPIC $< -o $@ -ldl
$(BUILD)/test_checkpoint $(BUILD)/test_checkpoint_asan: | $(BUILD)/shim_io.so
$(BUILD)/test_layouts $(BUILD)/test_layouts_asan $(BUILD)/test_hf $(BUILD)/test_hf_asan: train_gpt.c
$(BUILD)/bench_%: dev/bench/bench_%.c $(HEADERS) Makefile
	@mkdir -p $(BUILD)
	$(COMPILE) $< -o $@ $(LIBS)
$(BUILD)/make_tokens: dev/bench/make_tokens.c $(HEADERS) Makefile
	@mkdir -p $(BUILD)
	$(COMPILE) $< -o $@ $(LIBS)
$(BUILD)/compare_%: dev/test/compare_%.c $(HEADERS) Makefile
	@mkdir -p $(BUILD)
	$(COMPILE) $< -o $@ $(LIBS)
$(BUILD)/peak_memory: dev/test/peak_memory.c $(HEADERS) Makefile
	@mkdir -p $(BUILD)
	$(COMPILE) $< -o $@ $(LIBS)
$(BUILD)/resave: dev/test/resave.c train_gpt.c $(HEADERS) Makefile
	@mkdir -p $(BUILD)
	$(COMPILE) $< -o $@ $(LIBS)
$(BUILD)/tokenizer_ids: dev/test/tokenizer_ids.c $(HEADERS) Makefile
	@mkdir -p $(BUILD)
	$(COMPILE) $< -o $@ $(LIBS)
$(BUILD)/plot_schedule: dev/plot_schedule.c $(HEADERS) Makefile
	@mkdir -p $(BUILD)
	$(COMPILE) $< -o $@ $(LIBS)
$(BUILD)/fuzz_%: dev/fuzz/fuzz_%.c $(HEADERS) Makefile
	@mkdir -p $(BUILD)
	$(CLANG) $(BASE_FLAGS) $(DEFINES) -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all $< -o $@ $(LIBS)

# ----------------------------------------------------------------------------
# The CUDA device: by nvcc for GPUs (make test_gptcu), by a C++ compiler for the simulated device (make sim; forms _asan and _race).
CUDA ?= $(firstword $(wildcard /usr/local/cuda /opt/cuda) /usr/local/cuda)
NVCC ?= $(CUDA)/bin/nvcc
CUDA_ARCH ?= 80 90a
CU_SOURCES := train_gpt.cu $(wildcard llmc/cuda/*.cuh llmc/cuda/*.h)
CU_TESTS := test_gpt.cu $(wildcard dev/test/cuda/*.cuh dev/test/cuda/*.h)
# without ranks there is nobody to communicate with
ifeq ($(filter-out 0,$(NO_NCCL)),)
HAVE_NCCL := $(if $(HAVE_MPI),$(call has,nccl.h,-I$(CUDA)/include))
endif
NCCL_DEFINE := $(if $(HAVE_NCCL),-DUSE_NCCL)
NVCC_FLAGS := $(NCCL_DEFINE) -std=c++17 -O3 -lineinfo -I. --threads 2 $(foreach a,$(CUDA_ARCH),-gencode arch=compute_$(a),code=sm_$(a)) -Xcompiler -Wall,-Wextra,-Wno-unused-function $(if $(filter true,$(CI)),-Werror all-warnings -Xcompiler -Werror)
# the simulator itself is never instrumented: it checks ranges and races by itself
SIM_HEADERS := $(wildcard dev/cudasim/*.h dev/cudasim/include/*.h)
SIM_NAMES := $(filter-out simcu_race $(if $(HAVE_NCCL),,simnccl simnccl_ops),$(patsubst dev/cudasim/%.cc,%,$(wildcard dev/cudasim/*.cc)))
SIM_FORMED := simcu_settings simcu_fiber simcu_launch simcu_memory # compiled for every form; the others serve all
SIM_INCLUDES := -I. -Idev/cudasim/include -isystem $(CUDA)/include -DOMPI_SKIP_MPICXX $(patsubst -I%,-isystem %,$(MPI_FLAGS))
SIM_WARN := -Wall -Wextra -Wno-enum-compare -Wno-unknown-pragmas -Wno-unused-parameter -Wno-unused-function $(if $(filter true,$(CI)),-Werror)
SIM_KERNELS := $(NCCL_DEFINE) -std=c++17 -g -x c++ -fno-strict-aliasing -fstack-clash-protection $(SIM_WARN) $(SIM_INCLUDES)
SIM_RUNTIME := -std=c++17 -O2 -g $(SIM_WARN) -Wno-cast-function-type $(SIM_INCLUDES)
SIM_fast := -O2
SIM_asan := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
SIM_race := -O1 -g1 -fsanitize=thread --param tsan-instrument-func-entry-exit=0
SIM_LINK_fast :=
SIM_LINK_asan := $(SIM_asan)
SIM_LINK_race :=
SIM_DEFINE_asan := -DSIMCU_ASAN
SIM_DEFINE_race := -DSIMCU_RACE
SIM_EXTRA_race := $(BUILD)/sim/simcu_race.race.o
sim_objects = $(foreach n,$(SIM_NAMES),$(BUILD)/sim/$(n)$(if $(filter $(n),$(SIM_FORMED)),.$(1)).o) $(SIM_EXTRA_$(1))

$(BUILD)/sim/%.o: dev/cudasim/%.cc $(SIM_HEADERS) Makefile
	@mkdir -p $(BUILD)/sim
	g++ $(SIM_RUNTIME) $(SIM_SPEED) -c $< -o $@
$(BUILD)/sim/simcublaslt_matmul.o: SIM_SPEED := -O3 $(TUNE)
define SIM_FORM
$(BUILD)/sim/%.$(1).o: dev/cudasim/%.cc $(SIM_HEADERS) Makefile
	@mkdir -p $(BUILD)/sim
	g++ $(SIM_RUNTIME) $(SIM_DEFINE_$(1)) -c $$< -o $$@
$(BUILD)/sim/%.cu.$(1).o: %.cu $(CU_SOURCES) $(CU_TESTS) $(SIM_HEADERS) Makefile
	@mkdir -p $(BUILD)/sim
	g++ $(SIM_KERNELS) $(SIM_$(1)) -c $$< -o $$@
endef
$(foreach form,fast asan race,$(eval $(call SIM_FORM,$(form))))
.SECONDARY:
# what test_gpt.cu links of C: the CPU device, the trainer
TEST_OBJECTS := $(BUILD)/cpu_device.o $(BUILD)/whole_step.o
$(TEST_OBJECTS): $(BUILD)/%.o: dev/test/cuda/%.c train_gpt.c $(HEADERS) $(wildcard dev/test/cuda/*.h) Makefile
	@mkdir -p $(BUILD)
	$(COMPILE) -c $< -o $@
SIM_LIBS := -Wl,-T,dev/cudasim/link.ld -rdynamic -fopenmp $(LIBS) $(if $(HAVE_MPI),$(MPI_LIBS))
define SIM_TEST
test_gptcu_sim$(2): $(BUILD)/sim/test_gpt.cu.$(1).o $(BUILD)/sim/train_gpt.cu.$(1).o $(TEST_OBJECTS) $(call sim_objects,$(1))
	g++ $(SIM_LINK_$(1)) $$^ $(SIM_LIBS) -o $$@
endef
$(eval $(call SIM_TEST,fast,))
$(eval $(call SIM_TEST,asan,_asan))
$(eval $(call SIM_TEST,race,_race))
# Tests of the simulated device itself, and faults that it must find (dev/cudasim/test.sh).
SIM_TESTS := $(wildcard dev/cudasim/*.cu dev/cudasim/*.cuh dev/cudasim/planted/*.cu)
define SIM_OWN
$(BUILD)/sim/$(3).$(1).o: dev/cudasim/$(4).cu $(SIM_TESTS) $(SIM_HEADERS) llmc/cuda/ptx.cuh dev/test/test.h Makefile
	@mkdir -p $(BUILD)/sim
	g++ $(SIM_KERNELS) $(SIM_$(1)) -c $$< -o $$@
$(BUILD)/sim_$(3)$(2): $(BUILD)/sim/$(3).$(1).o $(call sim_objects,$(1))
	g++ $(SIM_LINK_$(1)) $$^ $(SIM_LIBS) -o $$@
endef
$(foreach test,test:test_sim planted:planted/planted,$(foreach form,fast: asan:_asan race:_race,$(eval $(call SIM_OWN,$(word 1,$(subst :, ,$(form))),$(word 2,$(subst :, ,$(form))),$(word 1,$(subst :, ,$(test))),$(word 2,$(subst :, ,$(test)))))))
sim-tests: $(foreach form,_ _asan _race,$(BUILD)/sim_test$(form:_=) $(BUILD)/sim_planted$(form:_=))
sim-test: sim-tests
	dev/cudasim/test.sh
# The trainer itself: C, with --device cuda.
$(BUILD)/train_gpt.cuda.o: train_gpt.c $(HEADERS) Makefile
	@mkdir -p $(BUILD)
	$(COMPILE) -DUSE_CUDA -c $< -o $@
define SIM_TRAIN
train_gptcu_sim$(2): $(BUILD)/train_gpt.cuda.o $(BUILD)/sim/train_gpt.cu.$(1).o $(call sim_objects,$(1))
	g++ $(SIM_LINK_$(1)) $$^ $(SIM_LIBS) -o $$@
endef
$(eval $(call SIM_TRAIN,fast,))
$(eval $(call SIM_TRAIN,asan,_asan))
$(eval $(call SIM_TRAIN,race,_race))
# collectives on device memory, from C, on the simulated device (dev/test/comm_cuda.sh)
$(BUILD)/test_comm_cuda.o: dev/test/cuda/test_comm_cuda.c $(HEADERS) llmc/cuda/device.h Makefile
	@mkdir -p $(BUILD)
	$(COMPILE) -c $< -o $@
define SIM_COMM_TEST
$(BUILD)/sim/comm_device.$(1).o: dev/test/cuda/comm_device.cu $(CU_SOURCES) $(SIM_HEADERS) Makefile
	@mkdir -p $(BUILD)/sim
	g++ $(SIM_KERNELS) $(SIM_$(1)) -c $$< -o $$@
$(BUILD)/test_comm_cuda$(2): $(BUILD)/test_comm_cuda.o $(BUILD)/sim/comm_device.$(1).o $(call sim_objects,$(1))
	g++ $(SIM_LINK_$(1)) $$^ $(SIM_LIBS) -o $$@
endef
$(eval $(call SIM_COMM_TEST,fast,))
$(eval $(call SIM_COMM_TEST,asan,_asan))
$(eval $(call SIM_COMM_TEST,race,_race))
sim: test_gptcu_sim train_gptcu_sim
# By nvcc; the assembler's report of registers and spills is kept (dev/gpu/ptxas.sh).
CU_LINK = -Xcompiler -fopenmp $(filter-out -Wl%,$(LIBS)) -lcublasLt $(if $(HAVE_NCCL),-lnccl)
$(BUILD)/cuda/%.o $(BUILD)/cuda/%.ptxas.txt &: %.cu $(CU_SOURCES) $(CU_TESTS) Makefile
	@mkdir -p $(BUILD)/cuda
	$(NVCC) $(NVCC_FLAGS) -Xptxas -v -c $< -o $(BUILD)/cuda/$*.o 2>$(BUILD)/cuda/$*.ptxas.txt || { grep -v '^ptxas info\|^    [0-9]* bytes' $(BUILD)/cuda/$*.ptxas.txt; exit 1; }
	@grep 'warning' $(BUILD)/cuda/$*.ptxas.txt || true
need-nvcc:
	@command -v $(NVCC) >/dev/null || { echo "no nvcc at $(NVCC): install the CUDA toolkit, or say CUDA=DIRECTORY or NVCC=PATH (make sim wants only its headers)"; exit 1; }
$(BUILD)/cuda/train_gpt.o $(BUILD)/cuda/test_gpt.o: | need-nvcc
train_gptcu: $(BUILD)/cuda/train_gpt.o $(BUILD)/train_gpt.cuda.o
	$(NVCC) $(NVCC_FLAGS) $^ -o $@ $(CU_LINK)
test_gptcu: $(BUILD)/cuda/test_gpt.o $(BUILD)/cuda/train_gpt.o $(TEST_OBJECTS)
	$(NVCC) $(NVCC_FLAGS) $^ -o $@ $(CU_LINK)
# Everything compiles and links for every architecture without a warning; each kernel header compiles alone.
cuda-syntax:
	+@$(MAKE) -s CI=true train_gptcu test_gptcu && echo "cuda-syntax: compiled and linked for sm_$(subst $() $(),$(comma) sm_,$(strip $(CUDA_ARCH)))"
CU_ALONE := $(addsuffix .alone,$(wildcard llmc/cuda/*.cuh))
$(CU_ALONE): %.alone: %
	@g++ $(SIM_KERNELS) -Werror -fsyntax-only -include $< /dev/null || { echo "does not compile alone: $<"; exit 1; }
# So do the programs that only a GPU runs.
CU_PROGRAMS := dev/bench_cuda.cu.syntax dev/gpu/test_fragments.cu.syntax
$(CU_PROGRAMS): %.syntax: %
	g++ $(SIM_KERNELS) -Werror -fsyntax-only $<
cuda-headers: $(CU_ALONE) $(CU_PROGRAMS)
	@echo "cuda-headers: each of $(words $(CU_ALONE)) compiles alone"

# Time of every op at real sizes (dev/bench_cuda.cu); layouts of the tensor-core instructions (dev/gpu/test_fragments.cu).
bench_cuda: dev/bench_cuda.cu $(CU_SOURCES) Makefile
	$(NVCC) $(NVCC_FLAGS) $< train_gpt.cu -o $@ $(CU_LINK)
test_fragments: dev/gpu/test_fragments.cu $(CU_SOURCES) Makefile
	$(NVCC) $(NVCC_FLAGS) $< -o $@
$(BUILD)/sim/bench_cuda.cu.fast.o: dev/bench_cuda.cu
$(BUILD)/sim/test_fragments.cu.fast.o: dev/gpu/test_fragments.cu
$(BUILD)/sim/bench_cuda.cu.fast.o $(BUILD)/sim/test_fragments.cu.fast.o: $(CU_SOURCES) dev/cudasim/simcu.h Makefile
	@mkdir -p $(@D)
	g++ $(SIM_KERNELS) $(SIM_fast) -c $(filter dev/%.cu,$^) -o $@
bench_cuda_sim: $(BUILD)/sim/bench_cuda.cu.fast.o $(BUILD)/sim/train_gpt.cu.fast.o $(call sim_objects,fast)
	g++ $^ $(SIM_LIBS) -o $@
test_fragments_sim: $(BUILD)/sim/test_fragments.cu.fast.o $(call sim_objects,fast)
	g++ $^ $(SIM_LIBS) -o $@

# What dev/gpu/check.sh runs, for another machine with a Hopper GPU, in build/gpu.
gpu-binaries:
	CUDA=$(CUDA) NVCC=$(NVCC) dev/gpu/build.sh

# Every header compiles alone.
headers:
	@mkdir -p $(BUILD)
	@for header in $(wildcard llmc/*.h llmc/cpu/*.h); do \
	  printf '#include "%s"\nint main(void){return 0;}\n' $$header > $(BUILD)/header.c; \
	  $(COMPILE) -O0 -fsyntax-only $(BUILD)/header.c || { echo "does not compile alone: $$header"; exit 1; }; done; \
	echo "headers: each compiles alone"

# Warnings of a compiler without its code: make CC=clang syntax
SYNTAX := $(addsuffix .syntax,$(wildcard train_gpt.c test_gpt.c data/*.c dev/*.c dev/test/*.c dev/test/cuda/*.c dev/bench/*.c dev/fuzz/*.c))
$(SYNTAX): %.syntax: %
	$(COMPILE) -fsyntax-only $<
syntax: $(SYNTAX)
	@echo "$(words $(SYNTAX)) files compile with $(CC)"

CU_FORMAT := $(shell find train_gpt.cu test_gpt.cu llmc/cuda dev -name '*.cu' -o -name '*.cuh' -o -name '*.cc' -o -path 'llmc/cuda/*.h' -o -path 'dev/cudasim/*.h' -o -path 'dev/test/cuda/*.[ch]')
format:
	clang-format -i train_gpt.c test_gpt.c llmc/*.h llmc/cpu/*.h dev/*.c dev/test/*.[ch] dev/bench/*.c dev/fuzz/*.c data/*.c $(CU_FORMAT)

unit: $(UNIT_TESTS)
unit-asan: $(addsuffix _asan,$(UNIT_TESTS))
fuzzers: $(FUZZERS)

# The timelines of the four pipeline schedules.
schedules: $(BUILD)/plot_schedule
	$< gpipe 4 8 1 > docs/schedule_gpipe.svg
	$< 1f1b 4 8 1 > docs/schedule_1f1b.svg
	$< interleaved 4 8 2 > docs/schedule_interleaved.svg
	$< zb 4 8 1 > docs/schedule_zb.svg

# Step time over the time of its matrix products (dev/bench/step.sh); run it on a quiet machine.
bench: train_gpt
	dev/bench/step.sh

# Hundreds of kills, failing disks and damaged checkpoints; minutes.
crash: train_gpt
	dev/test/crash.sh --long

# Every legal layout on 1 to 8 ranks; the covering lists, dev/test/layouts.sh alone, are part of scripts/test.sh.
layouts-full: $(BUILD)/test_layouts
	dev/test/layouts.sh --full

# One-line faults, each of which must make its test fail (dev/mutants).
mutants:
	python3 dev/mutants/run.py

clean:
	rm -rf $(BUILD) train_gptcu test_gptcu bench_cuda test_fragments *_sim *_sim_asan *_sim_race train_gpt train_gpt_asan tokenize tokenize_asan test_gpt test_gpt_asan

.PHONY: need-nvcc sim sim-tests sim-test cuda-syntax cuda-headers $(CU_ALONE) $(CU_PROGRAMS) gpu-binaries all help banner headers syntax $(SYNTAX) format unit unit-asan fuzzers schedules bench crash layouts-full mutants clean
