#!/usr/bin/env bash
# Checkpoints of several ranks: test_checkpoint_ranks on 1 to 8, by messages only, with late completion, under AddressSanitizer; failing
# and slow disks; a checkpoint that goes from job to job of other sizes; jobs that lose a rank while they save.
#
# usage: checkpoint_ranks.sh [--quick]   only some of the runs, up to the first failure
set -uo pipefail
cd "$(dirname "$0")/../.."
part=${1:-}
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
need_ranks
make -s build/test_checkpoint_ranks build/shim_io.so || exit 1
test=build/test_checkpoint_ranks

# good NAME RANKS COMMAND...
good() {
    local name=$1 ranks=$2 code started took
    shift 2
    started=$(date +%s.%N)
    timeout --kill-after=5 120 mpirun -np "$ranks" --oversubscribe --bind-to none "$@" >"$dir/log" 2>&1 </dev/null
    code=$?
    took=$(awk -v a="$started" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }')
    if [ $code -eq 0 ] && grep -q ' passed, 0 failed' "$dir/log"; then
        passed=$((passed + 1))
        echo "  ok: $name, $ranks ranks: $(tail -n 1 "$dir/log"), $took s"
    else
        failed=$((failed + 1))
        echo "FAILED: $name, $ranks ranks: exit $code"
        sed 's/^/    | /' "$dir/log" | head -30
        [ "$part" != --quick ] || exit 1
    fi
}

ranks=(1 2 4 8)
[ "$part" != --quick ] || ranks=(1 3)
for n in "${ranks[@]}"; do good "divisions" "$n" $test; done
good "failing disks" 3 env LD_PRELOAD=build/shim_io.so $test faults
good "a slow disk" 2 env LD_PRELOAD=build/shim_io.so $test slow
timeout --kill-after=5 40 mpirun -np 2 --oversubscribe --bind-to none env LD_PRELOAD=build/shim_io.so $test hang "$dir" >"$dir/log" 2>&1 </dev/null
code=$?
if [ $code -eq 6 ] && grep -q "rank 1" "$dir/log"; then
    passed=$((passed + 1))
    echo "  ok: a disk that hangs, 2 ranks: exit 6: $(grep -m 1 'rank 1' "$dir/log" | cut -c1-120)"
else
    failed=$((failed + 1))
    echo "FAILED: a disk that hangs: exit $code"
    sed 's/^/    | /' "$dir/log" | head
fi
if [ "$part" = "" ]; then
    good "messages" 3 env TRAIN_GPT_COMM_WINDOW=off $test
    good "late completion" 3 env TRAIN_GPT_COMM_LATE=7 $test
    mkdir "$dir/pass"
    for n in 1 8 2 4 3 1; do good "from job to job" "$n" $test pass "$dir/pass"; done
    mkdir "$dir/die"
    for k in 1 2 3 4 5 6; do
        timeout --kill-after=5 60 mpirun -np 3 --oversubscribe --bind-to none $test die "$dir/die" $((20 + RANDOM % 150)) >"$dir/log" 2>&1 </dev/null
        good "a rank was killed while all saved, time $k" 2 $test pass "$dir/die"
    done
    make -s build/test_checkpoint_ranks_asan || exit 1
    leaks_of_mpi
    good "AddressSanitizer" 3 build/test_checkpoint_ranks_asan
fi

tally
