#!/usr/bin/env bash
# Tests of the simulated device: what it promises (test_sim.cu), in every form and in several orders of threads and streams, on 1 to 4 ranks; and planted
# faults (planted/planted.cu), each of which it must find, with the right message, while the same program without the fault passes.
#
# usage: dev/cudasim/test.sh [WORD]   only the tests and faults whose name contains WORD. Builds nothing: make sim-test
set -uo pipefail
cd "$(dirname "$0")/../.."
word=${1:-}
source dev/test/common.sh
export ASAN_OPTIONS=detect_leaks=0 SIMCU_TIMEOUT=60

# quiet NAME COMMAND...: exit code 0, and nothing that the simulator calls an error
quiet() {
    local name=$1
    shift
    [[ "$name" == *"$word"* ]] || return 0
    if timeout 100 "$@" >"$dir/out" 2>&1 </dev/null && ! grep -q 'simcu: error\|ERROR: AddressSanitizer\|FAILED' "$dir/out"; then
        ok "$name: $(grep ' passed, ' "$dir/out" | tail -n 1)"
    else
        bad "$name: exit $?"
        grep -v '^simcu: [^e]' "$dir/out" | head -n 12
    fi
}
# found FORM NAME TEXT [VARIABLE=VALUE...]: with the fault it fails and says TEXT (a regular expression), without it passes
found() {
    local form=$1 name=$2 text=$3 status ranks=()
    shift 3
    [[ "$name" == *"$word"* ]] || return 0
    [[ $name != nccl_* ]] || ranks=(mpirun -np 2 --oversubscribe --bind-to none)
    env "$@" timeout 60 "${ranks[@]}" "build/sim_planted$form" "$name" fault >"$dir/out" 2>&1 </dev/null
    status=$?
    if [ $status -ne 0 ] && [ $status -ne 124 ] && grep -q "$text" "$dir/out"; then
        ok "planted $name${form:+, form $form}: $(grep -m 1 -o "$text" "$dir/out")"
    else
        bad "planted $name${form:+, form $form}: exit $status, wanted a failure that says: $text"
        head -n 6 "$dir/out"
    fi
    quiet "planted $name without the fault${form:+, form $form}" env "$@" "${ranks[@]}" "build/sim_planted$form" "$name" good
}
every() { # NAME TEXT: in every form
    local form
    for form in "" _asan _race; do found "$form" "$@"; done
}

# --- what it promises
for form in "" _asan _race; do
    quiet "runtime and warps$form" "build/sim_test$form" r # runtime, warp
    quiet "cuBLASLt$form" env SIMCU_NOPROTECT=1 "build/sim_test$form" cublaslt
done
for orders in "SIMCU_SCHED=rev SIMCU_STREAMS=rev SIMCU_CPASYNC=late" "SIMCU_SEED=1 SIMCU_STREAMS=1" "SIMCU_SEED=2 SIMCU_STREAMS=2 SIMCU_SMS=2" \
    "SIMCU_SEED=3 SIMCU_STREAMS=eager SIMCU_CPASYNC=eager"; do
    for form in "" _race; do quiet "runtime and warps$form, $orders" env $orders "build/sim_test$form" r; done
done
quiet "NCCL, one process" build/sim_test nccl
for count in 1 2 3 4; do quiet "NCCL, $count ranks" mpirun -np $count --oversubscribe --bind-to none build/sim_test nccl; done
quiet "NCCL, 3 ranks, other orders" env SIMCU_SEED=5 SIMCU_STREAMS=5 mpirun -np 3 --oversubscribe --bind-to none build/sim_test nccl
quiet "NCCL, 2 ranks_race" mpirun -np 2 --oversubscribe --bind-to none build/sim_test_race nccl

# --- planted faults
found _race missing_barrier "race: .*of 4 bytes .*static shared memory"
found _race missing_barrier "no barrier between" SIMCU_SEED=4
found _race missing_second_barrier "no barrier between"
found _race missing_syncwarp "no barrier between"
found "" global_bounds "something wrote 0 bytes behind the end of a device buffer of 256 bytes"
found _asan global_bounds "heap-buffer-overflow"
found _race global_bounds "out of bounds: write of 4 bytes .*256 bytes into a device buffer of 256 bytes"
found _asan dynamic_bounds "heap-buffer-overflow"
found _race dynamic_bounds "out of bounds: write of 4 bytes .*dynamic shared memory, 256 of 256"
found _asan static_bounds "insufficient space for an object of type"
found _race unwritten_shared "uninitialised memory: read of 4 bytes .*static shared memory"
found _race unwritten_global "uninitialised memory: read of 4 bytes .* into a device buffer of 256 bytes"
found "" unwritten_global "FAILED: NaN"
every divergent_barrier "divergent barrier: other threads of the block wait at"
every early_return "thread 40 exits the kernel while 40 others wait for it in __syncthreads"
found "" early_return "__syncthreads after 24 threads of the block have exited" SIMCU_SCHED=rev
every dead_lane "names lanes 00000001 that have already exited"
found "" dead_lane "thread 32 exits the kernel while its warp waits for it in __shfl_sync" SIMCU_SCHED=rev
every foreign_lane "shuffle: lane 0 reads lane 16, which is not in mask 0000ffff"
every wrong_mask "the calling lane 16 is not in its mask 0000ffff"
every divergent_warp "divergent warp: lane 1 reached __shfl_sync while other lanes wait in __shfl_sync at"
found _race async_unwaited "an asynchronous copy (cp.async) that it has not waited for" SIMCU_CPASYNC=eager
found _race async_uncommitted "an asynchronous copy (cp.async) that it has not waited for"
every async_misaligned "cp.async: an address is not aligned to 16 bytes"
every ldmatrix_misaligned "ldmatrix: the row address of lane 0 is not 16-byte aligned"
found _race one_sum "race: .*4 bytes"
found _asan wide_misaligned "misaligned address"
found "" deep_stack "the stack of a thread overflows"
found _race missing_event_wait "not ordered before this .* (missing event wait?)"
every pinned_reuse "the host changed a pinned buffer between the call and the copy"
every double_free "cudaFree: double free of a device buffer of 256 bytes"
every free_middle "is not the begin of a device buffer (4 bytes into a device buffer of 256 bytes)"
found _asan use_after_free "heap-use-after-free"
found _race use_after_free "use after free: read of 4 bytes .*(0 bytes into a device buffer of 256 bytes, freed"
every copy_after_free "use after free: cudaMemcpy reads 256 bytes"
every copy_bounds "out of bounds: cudaMemcpy reads 260 bytes (0 bytes into a device buffer of 256 bytes)"
every launch_threads "a block of 2048 x 1 x 1 threads: wanted 1 to 1024"
every launch_shared "50000 bytes of dynamic shared memory, 49152 are allowed"
found "" host_touch "host code touches device memory at .*12 bytes into a device buffer of 256 bytes"
found _race host_touch "host code touches device memory: write of 4 bytes"
every stream_gone "a stream is used that does not exist or was destroyed"
found _race workspace_shared "race: write of .* bytes .*"
found "" nccl_absent "nothing moved for 2 s; the host waits in cudaStreamSynchronize; stream 1 is in ncclAllReduce, which waits for rank 0 of 2 .* for rank(s) 1" SIMCU_TIMEOUT=2
found "" nccl_disagree "ranks disagree: rank [01] calls ncclAllReduce of"
found "" nccl_both_send "stream 1 is in ncclSend, which waits for .* to receive 256 bytes" SIMCU_TIMEOUT=2
found "" nccl_polled "a communicator of NCCL is not complete after 2 s: it waits for rank(s) 1" SIMCU_TIMEOUT=2
# what repeats a failure is printed with it
found "" divergent_barrier "replay: SIMCU_SEED=7 SIMCU_STREAMS=9 SIMCU_CPASYNC=late" SIMCU_SEED=7 SIMCU_STREAMS=9 SIMCU_CPASYNC=late
tally
