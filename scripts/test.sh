#!/usr/bin/env bash
# Builds and tests everything; says what it does and how long each part took. Goes on after a failure, ends with
# "N passed, N failed" (parts), and exits 1 when any failed.
#
# usage: scripts/test.sh [--only WORD]   parts whose name contains WORD
#   FUZZ_SECONDS=N   time of each fuzzer (default 10)
#   NEED_CUDA=1      a missing CUDA toolkit is a failure; otherwise what needs it is skipped
set -uo pipefail
cd "$(dirname "$0")/.."
export CI=true # warnings are errors
export LC_ALL=C

only=
if [ "${1:-}" = --only ] && [ $# -eq 2 ]; then
    only=$2
elif [ $# -gt 0 ]; then
    echo "usage: scripts/test.sh [--only WORD]" >&2
    exit 2
fi

jobs=$(nproc)
fuzz_seconds=${FUZZ_SECONDS:-10}
logs=build/logs
mkdir -p $logs
passed=0 failed=0 skipped=0 heading=
began=$(date +%s)

# part NAME COMMAND...: runs it, shows its last line, or much more when it fails. Exit code 77: it could not run here, and said why.
part() {
    local name=$1 log status started took
    shift
    [[ "$name" == *"$only"* ]] || return 0
    [ -z "$heading" ] || printf '\n== %s (%ds so far)\n' "$heading" $(($(date +%s) - began))
    heading=
    log=$logs/${name//[^a-zA-Z0-9_.-]/_}.txt
    started=$(date +%s.%N)
    timeout --kill-after=10 1200 "$@" >"$log" 2>&1 </dev/null
    status=$?
    took=$(awk -v a="$started" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }')
    case $status in
    0)
        passed=$((passed + 1))
        printf 'ok    %6ss  %-36s %s\n' "$took" "$name" "$(tail -n 1 "$log" | cut -c1-90)"
        ;;
    77)
        skipped=$((skipped + 1))
        printf 'SKIP  %6ss  %-36s %s\n' "$took" "$name" "$(tail -n 1 "$log" | cut -c1-90)"
        ;;
    *)
        failed=$((failed + 1))
        printf 'FAIL  %6ss  %-36s exit %d, log: %s\n' "$took" "$name" "$status" "$log"
        { grep -n 'FAILED\|error:\|ERROR' "$log" | head -20; echo "..."; tail -n 25 "$log"; } | sed 's/^/      | /'
        ;;
    esac
}
heading() { heading=$1; } # shown with its first part

c_files() {
    find train_gpt.c test_gpt.c train_gpt.cu test_gpt.cu llmc dev data \( -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' -o -name '*.cc' \) \
        -not -path 'data/out/*' | sort
}
check_format() {
    command -v clang-format >/dev/null || { echo "no clang-format"; return 77; }
    c_files | xargs clang-format --dry-run -Werror 2>&1 | sed -n 's/^\([^:]*\):.*-Wclang-format-violations.*/\1: run make format/p' | sort | uniq -c
    [ "${PIPESTATUS[1]}" -eq 0 ] && echo "$(c_files | wc -l) files"
}
check_python() {
    local files
    files=$(find scripts data dev -name '*.py' | sort)
    # compiled in memory: nothing is written beside the sources
    python3 -c 'import sys; [compile(open(f, encoding="utf-8").read(), f, "exec") for f in sys.argv[1:]]; print(len(sys.argv) - 1, "files")' $files
}
check_shell() {
    local file
    for file in $(find scripts data dev .ci -name '*.sh') .ci/run; do bash -n "$file" || return 1; done
    echo "$(find scripts data dev -name '*.sh' | wc -l) files"
}
clang_syntax() {
    command -v clang >/dev/null || { echo "no clang"; return 77; }
    make -s -j"$jobs" CC=clang syntax
}
# Runs a fuzzer for a while on a copy of its corpus; what breaks it is left in build/.
fuzz() {
    local name=$1 corpus=build/corpus_$1
    mkdir -p "$corpus"
    [ ! -d "dev/fuzz/corpus/$name" ] || cp -r "dev/fuzz/corpus/$name/." "$corpus/"
    "build/fuzz_$name" -max_total_time="$fuzz_seconds" -seed=1 -timeout=10 -rss_limit_mb=4096 -print_final_stats=0 -artifact_prefix="build/fuzz_${name}_" "$corpus"
}
# The flags of the recipes for one rank are checked without training; dev/test/recipes.sh runs the others.
check_recipes() {
    local recipe
    make -s build/make_tokens && build/make_tokens build/web.bin 1000000 50257 || return 1
    export TRAIN=build/web.bin VAL=build/web.bin OUT=build/recipe
    for recipe in scripts/recipes/train_*m.sh; do
        echo "$recipe"
        "$recipe" --dry-run || return 1
    done
}
quickstart() {
    local status=0
    QUICKSTART_OUT=build/quickstart_$$ scripts/quickstart.sh --smoke || status=$?
    rm -rf build/quickstart_$$
    [ $status -eq 0 ] && echo "set up, built, trained, plotted, sampled"
}
# with_cuda WHAT COMMAND...: where CUDA's compiler or headers are missing it says so and is skipped, or fails with NEED_CUDA=1.
with_cuda() {
    local cuda=${CUDA:-/usr/local/cuda} missing=
    [ -e "$cuda/include/cuda_runtime.h" ] && [ -e "$cuda/include/cublasLt.h" ] && [ -e "$cuda/include/nccl.h" ] || missing="headers in $cuda/include"
    [ "$1" != compiler ] || [ -x "${NVCC:-$cuda/bin/nvcc}" ] || missing="nvcc"
    shift
    [ -z "$missing" ] && { "$@"; return; }
    echo "no CUDA toolkit: $missing"
    [ "${NEED_CUDA:-}" = 1 ] && return 1
    return 77
}
# beside COMMAND...: all at the same time, each in one thread; then their output, one after the other. Fails when one of them does.
beside() {
    local logs command i=0 jobs=() status=0
    logs=$(mktemp -d)
    export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
    for command in "$@"; do
        bash -c "$command" >"$logs/$i" 2>&1 &
        jobs+=($!)
        i=$((i + 1))
    done
    for i in "${!jobs[@]}"; do
        wait "${jobs[$i]}" || { status=1; echo "FAILED: ${*:i+1:1}"; }
        cat "$logs/$i"
    done
    tail -qn 1 "$logs"/* | paste -sd ';' | sed 's/;/; /g'
    rm -rf "$logs"
    return $status
}
export -f quickstart with_cuda beside c_files check_format check_python check_shell clang_syntax fuzz check_recipes
export jobs fuzz_seconds
shell() { part "$1" bash -c "${*:2}"; }

unit_tests=$(cd dev/test && ls test_*.c | sed 's/\.c$//')
fuzzers=$(cd dev/fuzz 2>/dev/null && ls fuzz_*.c 2>/dev/null | sed 's/^fuzz_//; s/\.c$//')

heading "setup"
part setup scripts/setup.sh --test

heading "sources"
shell format check_format
shell python-syntax check_python
shell shell-syntax check_shell
part headers make -s headers
shell clang-warnings clang_syntax

heading "build, gcc, warnings are errors"
part build make -s -j"$jobs" all test_gpt unit
part build-asan make -s -j"$jobs" train_gpt_asan test_gpt_asan unit-asan
part build-fuzzers make -s -j"$jobs" fuzzers

heading "unit tests"
for test in $unit_tests; do part "$test" "build/$test"; done
part test_gpt ./test_gpt

heading "unit tests under AddressSanitizer and UndefinedBehaviorSanitizer"
for test in $unit_tests; do part "${test}_asan" "build/${test}_asan"; done
part test_gpt_asan ./test_gpt_asan

heading "the CUDA device, simulated on the CPU"
shell build-sim with_cuda headers make -s -j"$jobs" sim sim-tests {test,train}_gptcu_sim_{asan,race}
shell cuda-headers with_cuda headers make -s -j"$jobs" cuda-headers
shell sim-test with_cuda headers dev/cudasim/test.sh
shell test_gptcu_sim-orders with_cuda headers beside "'SIMCU_SEED=0 SIMCU_STREAMS=fwd ./test_gptcu_sim' 'SIMCU_SEED=1 SIMCU_STREAMS=1 SIMCU_SMS=3 ./test_gptcu_sim'"
# Device memory that is closed to the host is dear: the race form sees what C++ does, and the trainer's C code runs with it below.
shell test_gptcu_sim-protect with_cuda headers beside "'SIMCU_SEED=2 SIMCU_STREAMS=2 ./test_gptcu_sim' 'SIMCU_PROTECT=1 ./test_gptcu_sim memory cast'"
# slow forms: whole steps are short ones, under the race checker attention too
families=$(cd dev/test/cuda && ls test_*.cuh | sed 's/^test_//; s/\.cuh$//; s/^step$/step_small/' | tr '\n' ' ')
shell test_gptcu_sim_asan+race with_cuda headers \
    beside "'ASAN_OPTIONS=detect_leaks=0 ./test_gptcu_sim_asan $families' './test_gptcu_sim_race ${families/attention/attention_small}'"
shell train_gptcu_sim-checked with_cuda headers dev/test/train_cuda.sh --checked

heading "the CUDA device, compiled for GPUs"
shell cuda-syntax with_cuda compiler make -s -j"$jobs" cuda-syntax
shell ptxas with_cuda compiler dev/gpu/ptxas.sh

heading "threads under ThreadSanitizer"
part build-tsan make -s build/test_checkpoint_async_tsan
part test_checkpoint_async_tsan build/test_checkpoint_async_tsan

heading "matrix products with OpenBLAS and without a library"
for blas in openblas none; do
    part "build-$blas" make -s -j"$jobs" BLAS=$blas BUILD=build/$blas build/$blas/test_matmul
    part "test_matmul-$blas" build/$blas/test_matmul
done

heading "end to end"
shell recipes check_recipes
for script in dev/test/*.sh; do
    [[ "$script" == dev/test/common* ]] || part "$(basename "$script")" bash "$script"
done
part cli.sh_asan env TRAIN=./train_gpt_asan bash dev/test/cli.sh
part hf.sh_asan env TRAIN=./train_gpt_asan bash dev/test/hf.sh --one-rank
part split.sh_asan env TRAIN=./train_gpt_asan bash dev/test/split.sh
shell quickstart quickstart

heading "fuzzers, $fuzz_seconds s each"
for name in $fuzzers; do shell "fuzz_$name" fuzz "$name"; done

printf '\n%d parts skipped; %d minutes %d seconds\n' $skipped $((($(date +%s) - began) / 60)) $((($(date +%s) - began) % 60))
printf '%d passed, %d failed\n' $passed $failed
[ $failed -eq 0 ] && [ $passed -gt 0 ]
