#!/usr/bin/env bash
# Communication of device memory on the simulated CUDA device: test_comm_cuda on 1 to 4 ranks, with several orders of streams, in many pieces, with late
# completion, on pretended hosts, under AddressSanitizer and the race checker; built without NCCL and without MPI; then jobs that lose, stop or stall a rank,
# which must end soon, with the message and the exit code. Skipped without a CUDA toolkit, unless NEED_CUDA=1.
#
# usage: comm_cuda.sh [--quick|--ends|--race|--only PART RANKS [FORM]]   only the first runs, up to the first failure; only the jobs that must end; only the
# race checker; only a part of test_comm_cuda (world, groups, overlap, pipes, late), on so many ranks, in the plain form or the one named (asan, race)
set -uo pipefail
cd "$(dirname "$0")/../.."
part=${1:-}
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
need_ranks
cuda=${CUDA:-/usr/local/cuda}
if [ ! -e "$cuda/include/cuda_runtime.h" ] || [ ! -e "$cuda/include/nccl.h" ] && [ ! -e /usr/include/nccl.h ]; then
    echo "no CUDA toolkit with NCCL in $cuda: device memory cannot be communicated here"
    [ "${NEED_CUDA:-0}" = 1 ] && exit 1
    exit 77
fi
test=build/test_comm_cuda
export TRAIN_GPT_COMM_SCRATCH=65536 # the simulator pays for every page that a device has
make -s $test || exit 1

limit=300 # seconds of a job that must pass, on a machine of its own
# shellcheck source=dev/test/common_jobs.sh
. dev/test/common_jobs.sh

if [ "$part" = --only ]; then
    form=${test}${4:+_$4}
    make -s "$form" || exit 1
    good "$2" "$3" env TRAIN_GPT_COMM_SCRATCH=6000 "$form" only "$2"
    tally
    exit
fi
if [ "$part" = "" ] || [ "$part" = --quick ]; then
    for ranks in 1 2 3 4; do good "device memory" $ranks $test; done
    good "many pieces" 3 env TRAIN_GPT_COMM_SCRATCH=6000 $test
    good "late completion" 3 env TRAIN_GPT_COMM_LATE=7 $test
fi
if [ "$part" = "" ]; then
    for streams in fwd rev 5; do good "streams $streams" 3 env SIMCU_STREAMS=$streams $test; done
    good "threads reversed" 2 env SIMCU_SCHED=rev $test
    good "threads at random" 2 env SIMCU_SEED=3 $test
    good "two hosts" 4 env TRAIN_GPT_COMM_HOSTS=2 $test
    good "many pieces, late completion" 4 env TRAIN_GPT_COMM_SCRATCH=6000 TRAIN_GPT_COMM_LATE=8 $test

    make -s NO_MPI=1 BUILD=build/no_mpi build/no_mpi/test_comm_cuda || exit 1
    build/no_mpi/test_comm_cuda >"$dir/log" 2>&1 && ok "built without MPI: $(tail -n 1 "$dir/log")" || bad "built without MPI"
    make -s NO_NCCL=1 BUILD=build/no_nccl build/no_nccl/test_comm_cuda || exit 1
    good "built without NCCL" 1 build/no_nccl/test_comm_cuda
    run 40 2 build/no_nccl/test_comm_cuda
    ends "built without NCCL" 6 'rank [01] on .*: step 0, phase start: this program was built without NCCL: one rank only'

    make -s ${test}_asan || exit 1
    leaks_of_mpi
    good "AddressSanitizer" 1 ${test}_asan
    good "AddressSanitizer" 3 ${test}_asan
    good "AddressSanitizer, many pieces, late completion" 2 env TRAIN_GPT_COMM_SCRATCH=6000 TRAIN_GPT_COMM_LATE=9 ${test}_asan
fi
if [ "$part" = "" ] || [ "$part" = --race ]; then
    make -s ${test}_race || exit 1
    for ranks in 1 2 3; do good "race checker" $ranks ${test}_race; done
    good "race checker, many pieces" 2 env TRAIN_GPT_COMM_SCRATCH=6000 SIMCU_STREAMS=11 ${test}_race
    run 40 2 ${test}_race race
    ends "a missing wait, race checker" 97 'race: .* of 4000 bytes\|race: .* of 4 bytes'
fi
if [ "$part" = "" ] || [ "$part" = --ends ]; then
    run 40 3 $test die
    ends "a rank that exits" 4 'planted'
    run 40 3 $test kill
    died='rank [0-9]* on .*: step 17, phase backward: rank 1 on .* has died: no sign of its process for 0.* s, since step 17, phase backward'
    ends "a rank that is killed" "137 6" "$died"
    (
        for _ in $(seq 100); do
            [ -s "$dir/pid" ] && exec kill -9 "$(cat "$dir/pid")"
            sleep 0.1
        done
    ) &
    run 40 3 $test hold "$dir/pid"
    wait
    ends "a rank that is killed from outside" "137 6" "$died"
    run 40 3 $test stall
    ends "a rank that is stopped" 6 'rank 1 on .* is stopped, frozen or dead: no sign of its process for 1.* s, since step 17, phase backward'
    run 40 3 $test ring
    ends "ranks that wait for one another" 6 'step 17, phase backward: all ranks wait: no progress in recv on pipe (3 ranks) for 1.* s (rank [0-9] has not come)'
    run 40 2 $test mixed
    ends "host and device memory in one operation" 6 'all_gather on world: the input is host memory, the output device memory'
    run 40 2 $test peer
    ends "a message outside a pipe" 6 'send on world, rank [01], tag 0: device memory travels in groups of comm_pipe'
    run 40 2 $test changed
    ends "a buffer that is written in flight" 6 'all_gather on world: a buffer was written between start and wait'
    run 40 2 $test leak
    ends "an operation that nobody waits for" 6 '1 operations were started and never waited for'
fi

tally
