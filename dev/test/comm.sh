#!/usr/bin/env bash
# Communication on several ranks: test_comm on 1 to 8, by messages only, on pretended hosts, with late completion, with little shared
# memory, under AddressSanitizer; then jobs that lose, stop or stall a rank, which must end soon, with the message and the exit code, and
# leave no process behind.
#
# usage: comm.sh [--quick|--ends]   only the first runs, up to the first failure; only the jobs that must end
set -uo pipefail
cd "$(dirname "$0")/../.."
part=${1:-}
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
need_ranks
make -s build/test_comm || exit 1

# shellcheck source=dev/test/common_jobs.sh
. dev/test/common_jobs.sh

if [ "$part" != --ends ]; then
    for ranks in 1 2 3 4; do good "shared memory" $ranks build/test_comm; done
    good "messages" 3 env TRAIN_GPT_COMM_WINDOW=off build/test_comm
    good "two hosts" 4 env TRAIN_GPT_COMM_HOSTS=2 build/test_comm
    good "late completion" 3 env TRAIN_GPT_COMM_LATE=7 build/test_comm
fi
if [ "$part" = "" ]; then
    good "shared memory" 8 build/test_comm
    good "late completion, messages" 4 env TRAIN_GPT_COMM_LATE=8 TRAIN_GPT_COMM_WINDOW=off build/test_comm
    # 24 MB of shared memory hold one of the two buffers: needs the right to mount.
    small='mount -t tmpfs -o size=24m none /dev/shm'
    if unshare -m bash -c "$small" 2>/dev/null; then
        unshare -m bash -c "$small && exec timeout 60 mpirun -np 2 --oversubscribe --bind-to none build/test_comm small" >"$dir/log" 2>&1 </dev/null
        code=$?
        [ $code -eq 0 ] && ok "little shared memory, 2 ranks: $(tail -n 1 "$dir/log")" || bad "little shared memory: exit $code"
    else
        echo "  skipped: little shared memory (cannot mount)"
    fi

    make -s NO_MPI=1 BUILD=build/no_mpi build/no_mpi/test_comm || exit 1
    build/no_mpi/test_comm >"$dir/log" 2>&1 && ok "built without MPI: $(tail -n 1 "$dir/log")" || bad "built without MPI"
    run 40 2 build/no_mpi/test_comm
    ends "built without MPI, under mpirun" 2 'built without MPI'

    make -s build/test_comm_asan || exit 1
    leaks_of_mpi
    good "AddressSanitizer" 2 build/test_comm_asan
    good "AddressSanitizer, messages" 3 env TRAIN_GPT_COMM_WINDOW=off build/test_comm_asan
    good "AddressSanitizer, late completion" 2 env TRAIN_GPT_COMM_LATE=9 build/test_comm_asan
fi
if [ "$part" != --quick ]; then
    run 40 3 build/test_comm die
    ends "a rank that exits" 4 'planted'
    run 40 3 build/test_comm kill
    died='rank [0-9]* on .*: step 17, phase backward: rank 1 on .* has died: no sign of its process for 0.* s, since step 17, phase backward'
    ends "a rank that is killed" "137 6" "$died"
    (
        for _ in $(seq 100); do
            [ -s "$dir/pid" ] && exec kill -9 "$(cat "$dir/pid")"
            sleep 0.1
        done
    ) &
    run 40 3 build/test_comm hold "$dir/pid"
    wait
    ends "a rank that is killed from outside" "137 6" "$died"
    run 40 3 build/test_comm stall
    stopped='rank [0-9]* on .*: step 17, phase backward: rank 1 on .* is stopped, frozen or dead: no sign of its process for 1.* s, since step 17, phase backward'
    ends "a rank that is stopped" 6 "$stopped"
    run 40 2 env TRAIN_GPT_COMM_WINDOW=off build/test_comm stall
    ends "a rank that is stopped, messages" 6 "$stopped"
    run 40 4 env TRAIN_GPT_COMM_HOSTS=2 build/test_comm stall
    ends "a rank that is stopped on another host" 6 "$stopped"
    run 40 2 env TRAIN_GPT_COMM_HOSTS=2 build/test_comm lone
    ends "a rank that is stopped, alone on its host" 6 'rank 0 on .*: step 17, phase backward: no progress in all_reduce on world (2 ranks) for 1.* s'
    run 40 3 build/test_comm ring
    ends "ranks that wait for one another" 6 'rank 0 on .*: step 17, phase backward: all ranks wait: no progress in recv on world (3 ranks) for 1.* s (rank 2 has not come)'
    run 40 2 build/test_comm compute
    ends "a rank that computes for ever" 6 'step 17, phase backward: no progress in computation for 1.* s'
    run 40 2 build/test_comm changed
    ends "a buffer that is written in flight" 6 'all_gather on world: a buffer was written between start and wait'
    run 40 2 build/test_comm leak
    ends "an operation that nobody waits for" 6 '1 operations were started and never waited for'
fi

tally
