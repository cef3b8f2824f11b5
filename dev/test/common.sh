# shellcheck shell=bash
# What the scripts that start the trainer on several ranks share. To be sourced from the repository's root; not a test itself.
train=${TRAIN:-./train_gpt}
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
# Open MPI: as root, more ranks than cores, no waiting at full speed, no system call that containers forbid
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1
export OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1
passed=0 failed=0
ok() {
    passed=$((passed + 1))
    echo "  ok: $1"
}
bad() {
    failed=$((failed + 1))
    echo "FAILED: $1"
}
verdict() { if [ "$1" -eq 0 ]; then ok "$2"; else bad "$2"; fi; }
# Ends the script.
tally() {
    echo "$passed passed, $failed failed"
    [ $failed -eq 0 ] && [ $passed -gt 0 ]
}
need_ranks() {
    command -v mpirun >/dev/null && make -s -n banner | grep -q 'MPI yes' && return
    echo "no MPI: one rank only"
    exit 77
}

# CUDA's headers, for the simulated device: without them the script is skipped, or fails with NEED_CUDA=1.
need_cuda() {
    local cuda=${CUDA:-/usr/local/cuda}
    [ ! -e "$cuda/include/cuda_runtime.h" ] || return 0
    echo "no CUDA toolkit in $cuda: the CUDA device cannot be simulated"
    [ "${NEED_CUDA:-0}" = 1 ] && exit 1
    exit 77
}

# From now on AddressSanitizer does not report what Open MPI leaves behind.
leaks_of_mpi() {
    printf 'leak:lib%s\n' mpi open-pal open-rte pmix event hwloc >"$dir/suppressions"
    printf 'leak:mca_\n' >>"$dir/suppressions"
    export LSAN_OPTIONS=suppressions=$dir/suppressions:print_suppressions=0 ASAN_OPTIONS=fast_unwind_on_malloc=0
}

# ranks N COMMAND...: on N ranks; output in $dir/stdout and $dir/stderr
ranks() {
    local count=$1
    shift
    timeout --kill-after=5 120 mpirun -np "$count" --oversubscribe --bind-to none "$@" >"$dir/stdout" 2>"$dir/stderr" </dev/null
}
# field OUT NAME [FROM]: the values of a field of the log's records, from step FROM on
field() { sed -nE "s/.*\"step\":([0-9]+),.*\"$2\":([-0-9.e+]+).*/\1 \2/p" "$1/log.jsonl" | awk -v from="${3:-0}" '$1 >= from { print $2 }'; }
# What of the step records must agree bit by bit, as text.
facts() { grep '"loss":' "$1/log.jsonl" | sed -E 's/"ms":[^,]*,"tok_per_s":[^,]*,"mfu":[^,}]*//'; }
# Largest relative difference of two lists of numbers; fails above a bound, on another count, on none, and on what is no number.
close() {
    paste -d' ' <(echo "$1") <(echo "$2") | awk -v bound="$3" '
        NF != 2 || $1 !~ /^[-0-9]/ || $2 !~ /^[-0-9]/ { bad = 1 }
        { d = $1 - $2; if (d < 0) d = -d; s = $2 < 0 ? -$2 : $2; e = d / (s > 1e-30 ? s : 1e-30); if (e > worst) worst = e }
        END { print worst + 0; exit bad || NR == 0 || worst > bound }'
}
