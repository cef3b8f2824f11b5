# train_gpt: `make` builds the trainer and the tokenizer, `make help` lists the rest.
# BLAS=dnnl|openblas|none chooses the matrix product (default: the first that is installed, in this order).
# NO_MPI=1 leaves MPI out, also where it is installed: one rank only.

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

HEADERS := $(wildcard llmc/*.h llmc/cpu/*.h dev/test/*.h)
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
	@echo "make headers      every header compiles alone; make CC=clang syntax: warnings of another compiler"
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

# Every header compiles alone.
headers:
	@mkdir -p $(BUILD)
	@for header in $(wildcard llmc/*.h llmc/cpu/*.h); do \
	  printf '#include "%s"\nint main(void){return 0;}\n' $$header > $(BUILD)/header.c; \
	  $(COMPILE) -O0 -fsyntax-only $(BUILD)/header.c || { echo "does not compile alone: $$header"; exit 1; }; done; \
	echo "headers: each compiles alone"

# Warnings of a compiler without its code: make CC=clang syntax
SYNTAX := $(addsuffix .syntax,$(wildcard train_gpt.c test_gpt.c data/*.c dev/*.c dev/test/*.c dev/bench/*.c dev/fuzz/*.c))
$(SYNTAX): %.syntax: %
	$(COMPILE) -fsyntax-only $<
syntax: $(SYNTAX)
	@echo "$(words $(SYNTAX)) files compile with $(CC)"

format:
	clang-format -i train_gpt.c test_gpt.c llmc/*.h llmc/cpu/*.h dev/*.c dev/test/*.[ch] dev/bench/*.c dev/fuzz/*.c data/*.c

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
	rm -rf $(BUILD) train_gpt train_gpt_asan tokenize tokenize_asan test_gpt test_gpt_asan

.PHONY: all help banner headers syntax $(SYNTAX) format unit unit-asan fuzzers schedules bench crash layouts-full mutants clean
