#!/usr/bin/env bash
# What a GPU holds beside tensors: the memory plan of --dry-run against what runs on the simulated device have allocated in the end: workspace, scratch
# of kernels, parts of sums in the order of ranks. Skipped without a CUDA toolkit, unless NEED_CUDA=1.
set -uo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
need_ranks
need_cuda
sim=${SIM:-./train_gptcu_sim}
make -s build/make_tokens "${sim#./}" || exit 1
build/make_tokens "$dir/train.bin" 9000 101 3 || exit 1
unset TRAIN_GPT_COMM_SCRATCH

common=(--vocab 101 --lr 3e-3 --steps 1 --save-every 0 --train "$dir/train.bin")
workspace=$((32 << 20)) # the same everywhere: it must not hide the rest

# beside NAME RANKS FLAG...: planned against allocated, each less the workspace, within 5 %
beside() {
    local name=$1 count=$2 planned held
    shift 2
    "$sim" "${common[@]}" "$@" --dry-run --world "$count" >"$dir/plan" 2>"$dir/stderr" || bad "$name: no plan: $(cat "$dir/stderr")"
    # the largest stage; one column says bytes, several are rounded
    planned=$(sed -nE 's/.*workspace of kernels .* ([0-9]+) bytes$/\1/p' "$dir/plan")
    rm -rf "$dir/out"
    ranks "$count" "$sim" "${common[@]}" "$@" --out "$dir/out" || bad "$name: exit $?: $(grep -h 'train_gpt:\|simcu' "$dir/stderr" | head -3)"
    held=$(grep -o '"device_own_bytes":[0-9]*' "$dir/out/log.jsonl" | cut -d: -f2 | sort -n | tail -n 1)
    awk -v planned="${planned:-0}" -v held="${held:-0}" -v workspace=$workspace \
        'BEGIN { p = planned - workspace; h = held - workspace; exit !(p > 0 && h > 0 && p <= h * 1.05 && p >= h * 0.95) }'
    verdict $? "$name: planned ${planned:-nothing}, held ${held:-nothing}"
}
gpt2=(--layers 2 --channels 64 --heads 4)
llama=(--layers 2 --channels 96 --heads 3 --kv-heads 3 --norm rmsnorm --position rope --activation swiglu --bias off --tied off --qk-norm on)
batch=(--seq 128 --micro-batch 4 --global-batch 4)
beside "gpt2, fp32" 1 "${gpt2[@]}" "${batch[@]}"
beside "gpt2, bf16" 1 "${gpt2[@]}" "${batch[@]}" --precision bf16
beside "gpt2, odd width" 1 --layers 1 --channels 60 --heads 4 --seq 24 --micro-batch 2 --global-batch 2
beside "gpt2, narrow, many tokens" 1 --layers 1 --channels 8 --heads 1 --seq 256 --micro-batch 8 --global-batch 8
beside "llama, bf16, wide" 1 --layers 1 --channels 1024 --heads 16 --norm rmsnorm --position rope --activation swiglu --bias off --seq 16 --micro-batch 1 --global-batch 1 --precision bf16
beside "llama, qk-norm" 1 "${llama[@]}" --seq 32 --micro-batch 4 --global-batch 4
batch=(--seq 64 --micro-batch 2 --global-batch 4)
beside "llama, tp 3, sums in bf16" 3 --layers 1 --channels 96 --ffn 192 --heads 3 --norm rmsnorm --position rope --activation swiglu --bias off "${batch[@]}" --tp 3 --precision bf16
beside "gpt2, zero 2, gradients in bf16" 2 "${gpt2[@]}" "${batch[@]}" --zero 2 --precision bf16 --grad-reduce bf16
beside "gpt2, dp 4, shards of 2, gradients in bf16" 4 "${gpt2[@]}" "${batch[@]}" --global-batch 8 --zero 1 --shard-group 2 --precision bf16 --grad-reduce bf16

# A device with as much memory as the plan says holds the run; with a MiB less it is refused: nothing is counted twice. SIMCU_MEMORY_MB is whole MiB.
"$sim" "${common[@]}" "${gpt2[@]}" "${batch[@]}" --dry-run >"$dir/plan" 2>&1
planned=$(sed -nE 's/^ *on the device ([0-9.]+) MiB.*/\1/p' "$dir/plan")
fits=$(awk -v planned="${planned:-0}" 'BEGIN { n = int(planned); print n < planned ? n + 1 : n }')
SIMCU_MEMORY_MB=$fits ranks 1 "$sim" "${common[@]}" "${gpt2[@]}" "${batch[@]}"
verdict $? "a device of $fits MiB holds what is planned as ${planned:-nothing} MiB: $(head -c 200 "$dir/stderr" | head -1)"
SIMCU_MEMORY_MB=$((fits - 1)) ranks 1 "$sim" "${common[@]}" "${gpt2[@]}" "${batch[@]}"
[ $? -eq 2 ] && grep -q 'memory: this run needs' "$dir/stderr"
verdict $? "one of $((fits - 1)) MiB is refused: $(grep -h train_gpt: "$dir/stderr" | head -1)"

# Hosts: the pinned ring; NCCL is an estimate, and of several ranks only.
"$sim" "${common[@]}" "${gpt2[@]}" "${batch[@]}" --dry-run >"$dir/plan" && grep -q 'pinned for copies .*16777216 bytes' "$dir/plan" && ! grep -q NCCL "$dir/plan"
verdict $? "one rank: a ring of 16 MiB, no NCCL"
"$sim" "${common[@]}" "${gpt2[@]}" "${batch[@]}" --dry-run --world 2 --zero 1 >"$dir/plan" && grep -q 'NCCL, an estimate' "$dir/plan"
verdict $? "2 ranks: NCCL is estimated"
"$sim" "${common[@]}" "${gpt2[@]}" "${batch[@]}" --device cpu --dry-run >"$dir/plan" && ! grep -q 'NCCL\|pinned\|workspace of kernels' "$dir/plan"
verdict $? "the CPU holds nothing of the kind"

tally
