#!/usr/bin/env bash
# The trainer on the simulated CUDA device (make sim) against the CPU device: losses, norms and gradients of the same runs, on one rank and on layouts of
# several, in fp32 and bf16; checkpoints that move between the two devices; checkpoints that are copied while training goes on; the same bits from
# every order of streams, and with --graph on; stops. Skipped without a CUDA toolkit, unless NEED_CUDA=1.
#
# usage: train_cuda.sh [--quick|--refused|--moves|--saves|--graphs|--checked]   only a few of the runs; only what is refused; only checkpoints and
# stops; of these only those that are written while training goes on; only --graph on; only short runs of a small model under AddressSanitizer and the
# race checker
set -uo pipefail
cd "$(dirname "$0")/../.."
quick=${1:-}
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
need_ranks
need_cuda
sim=${SIM:-./train_gptcu_sim}
export SIMCU_SMS=${SIMCU_SMS:-8} # of a small device: its grids take less time
make -s train_gpt build/make_tokens build/compare_grads "${sim#./}" || exit 1
build/make_tokens "$dir/train.bin" 6000 101 3 || exit 1

common=(--vocab 101 --seq 24 --micro-batch 2 --global-batch 8 --lr 3e-3 --schedule constant --steps 4 --save-every 0 --train "$dir/train.bin" --val "$dir/train.bin"
    --val-batches 2)
declare -A model=(
    [gpt2]="--layers 4 --channels 64 --heads 4 --dropout 0.1"
    [llama]="--layers 4 --channels 64 --heads 4 --kv-heads 2 --norm rmsnorm --position rope --activation swiglu --bias off --tied off --qk-norm on"
)
# losses OUT, norms OUT: of the steps; then the validation
losses() { field "$1" loss; sed -nE 's/.*"val_loss":([-0-9.e+]+).*/\1/p' "$1/log.jsonl"; }

# run RANKS OUT PROGRAM FLAG...
run() {
    local count=$1 out=$2 program=$3
    shift 3
    rm -rf "$out" "$out.grads"
    ranks "$count" "$program" "${common[@]}" --out "$out" --dump-grads "$out.grads" "$@" && return 0
    bad "$count ranks $program $*: exit $?: $(grep -h 'train_gpt:\|simcu\|ERROR' "$dir/stderr" | head -3)"
    return 1
}
# same NAME RANKS MODEL FLAG...: the simulated device agrees with one rank of the CPU
same() {
    local name=$1 count=$2 kind=$3 loss norm grads
    shift 3
    # shellcheck disable=SC2086
    run "$count" "$dir/sim" "$sim" ${model[$kind]} "$@" || return
    loss=$(close "$(losses "$dir/sim")" "$(losses "$dir/$kind")" 1e-5) && norm=$(close "$(field "$dir/sim" grad_norm)" "$(field "$dir/$kind" grad_norm)" 2e-5) &&
        grads=$(build/compare_grads "$dir/sim.grads/grads.safetensors" "$dir/$kind.grads/grads.safetensors" 1e-5 | tail -n 1)
    verdict $? "$kind $name: losses $loss, norms $norm; $grads"
}

# refused before anything is allocated
# refused WORDS FLAG...
refused() {
    local words=$1 status
    shift
    "$sim" "${common[@]}" "$@" >"$dir/stdout" 2>"$dir/stderr" </dev/null
    status=$?
    [ $status -eq 2 ] && [ "$(wc -l <"$dir/stderr")" -eq 1 ] && grep -q "$words" "$dir/stderr"
    verdict $? "refused: $* ($(cut -c1-100 "$dir/stderr"))"
}
refused 'multiple of 16' --layers 1 --channels 40 --heads 5 --precision bf16
refused 'multiple of 16' --layers 1 --channels 40 --heads 5 --precision bf16 --dry-run
refused 'on a device' --layers 100 --channels 65536 --heads 512
refused "graph.*pack varlen" --graph on --pack varlen --eot 0 --dry-run
refused "graph.*pack fit" --graph on --pack fit --eot 0
refused "graph.*tp 2" --graph on --tp 2 --world 2 --dry-run
refused "graph.*zero 2" --graph on --zero 2 --dry-run
refused "graph.*zero 3" --graph on --zero 3
refused "graph.*cpu" --graph on --device cpu
[ "$quick" != --refused ] || { tally && exit 0 || exit 1; }

# A checkpoint that is copied and written while training goes on holds what one holds that training waits for, in every order of streams.
tiny=(--vocab 101 --seq 16 --micro-batch 1 --global-batch 2 --layers 1 --channels 32 --heads 2 --lr 3e-3 --schedule constant --steps 3 --train "$dir/train.bin" --keep 9)
# saves NAME RANKS "SIMCU_STREAMS..." FLAG...: the first order saves every second step, the others every step
saves() {
    local name=$1 count=$2 orders=$3 every=2 order step differ closed=()
    shift 3
    rm -rf "$dir/waited"
    [ "$count" -gt 1 ] || closed=(env SIMCU_PROTECT=1) # the thread that writes must not read it
    ranks "$count" "${closed[@]}" "$sim" "${tiny[@]}" "$@" --out "$dir/waited" --save-every 1 --async-save off || bad "saves $name: exit $?: $(head -3 "$dir/stderr")"
    for order in $orders; do
        rm -rf "$dir/copied"
        SIMCU_STREAMS=$order ranks "$count" "$sim" "${tiny[@]}" "$@" --out "$dir/copied" --save-every $every
        differ=$?
        for ((step = every; step <= 3; step++)); do
            build/compare_checkpoints "$dir/copied/step_0000000$step" "$dir/waited/step_0000000$step" >"$dir/differ" 2>&1 || differ="step $step: $(cat "$dir/differ")"
            grep -q "\"optimizer_steps\": $step," "$dir/copied/step_0000000$step/manifest.json" || differ="step $step: updates"
        done
        [ "$differ" = 0 ] && [ "$(facts "$dir/copied")" = "$(facts "$dir/waited")" ] && grep -q '"event":"save","step":3,"saved_step":2,' "$dir/copied/log.jsonl"
        verdict $? "saves every $every, $name, SIMCU_STREAMS=$order: $differ different"
        every=1
    done
}
if [ "$quick" = --moves ] || [ "$quick" = --saves ] || [ "$quick" = "" ]; then
    make -s build/compare_checkpoints build/shim_io.so || exit 1
    saves "1 rank, bf16" 1 "fwd 3" --precision bf16
    saves "zero 1, bf16" 2 "rev" --precision bf16 --zero 1
    saves "zero 3" 2 "5" --zero 3
    # a disk that is full is told some steps later, not at the next save, and leaves what was there
    LD_PRELOAD="$PWD/build/shim_io.so" SHIM_PATH=step_00000005.tmp SHIM_CALL=write SHIM_AT=1 SHIM_ERROR=28 "$sim" "${tiny[@]}" --steps 10 --save-every 5 \
        --out "$dir/copied" --resume auto >"$dir/stdout" 2>"$dir/stderr" </dev/null
    status=$? last=$(field "$dir/copied" loss | wc -l)
    [ $status -eq 5 ] && grep -q '^train_gpt: .*step_00000005.tmp.*No space left' "$dir/stderr" && [ "$last" -ge 6 ] && [ "$last" -le 9 ] &&
        [ "$(ls -d "$dir"/copied/step_*)" = "$(printf "$dir/copied/step_0000000%d\n" 2 3)" ] && build/compare_checkpoints "$dir/copied/step_00000003" "$dir/waited/step_00000003" >/dev/null
    verdict $? "a write that fails: exit $status after step $last, $(head -1 "$dir/stderr" | sed 's/.*step_/step_/' | cut -c1-80), left: $(ls "$dir/copied" | grep step_ | tr '\n' ' ')"
fi
[ "$quick" != --saves ] || { tally && exit 0 || exit 1; }

# checked FORM: training, a validation and a checkpoint in that form, on one rank in bf16 and on two; the CPU goes on from there
checked() {
    local form=$1 apart sim=$sim$1
    # shellcheck disable=SC2086
    run 1 "$dir/sim16" "$sim" ${model[gpt2]} --precision bf16 && apart=$(close "$(losses "$dir/sim16")" "$(losses "$dir/cpu16")" 2e-3)
    verdict $? "form $form: gpt2 bf16, 1 rank: losses $apart"
    same "zero 2, form $form" 2 llama --zero 2
    # shellcheck disable=SC2086
    ranks 1 ./train_gpt "${common[@]}" ${model[llama]} --out "$dir/sim" --resume auto --steps 3 && [ "$(field "$dir/sim" loss | wc -l)" -eq 3 ]
    verdict $? "form $form: the CPU goes on from its checkpoint"
}
if [ "$quick" = --checked ]; then
    make -s "${sim#./}_asan" "${sim#./}_race" || exit 1
    common=(--vocab 101 --seq 11 --micro-batch 1 --global-batch 4 --lr 3e-3 --schedule constant --steps 2 --save-every 2 --train "$dir/train.bin"
        --val "$dir/train.bin" --val-batches 1)
    model=(
        [gpt2]="--layers 1 --channels 32 --heads 2 --dropout 0.1"
        [llama]="--layers 2 --channels 32 --heads 2 --kv-heads 1 --norm rmsnorm --position rope --activation swiglu --bias off --tied off --qk-norm on"
    )
    # shellcheck disable=SC2086
    run 1 "$dir/cpu16" ./train_gpt ${model[gpt2]} --precision bf16 && run 1 "$dir/llama" ./train_gpt ${model[llama]} || tally || exit 1
    export ASAN_OPTIONS=detect_leaks=0 SIMCU_PROTECT=1
    for form in _asan _race; do checked $form; done
    if tally; then exit 0; else exit 1; fi
fi

# --graph on changes no bit of losses, norms, gradients and checkpoints, and no count of kernels
small=(--vocab 101 --seq 12 --micro-batch 1 --lr 3e-3 --schedule constant --steps 3 --train "$dir/train.bin" --val "$dir/train.bin" --val-batches 1 --layers 2
    --channels 32 --heads 2 --dropout 0.1 --async-save off)
# graphs NAME LAUNCHES RANKS FLAG...: the run with graphs, in another order of threads and streams, against the run without. LAUNCHES of graphs: of each
# run of ops all but the first, which runs as it is
graphs() {
    local name=$1 launches=$2 count=$3 graph
    shift 3
    for graph in off on; do
        rm -rf "$dir/graph.$graph" "$dir/graph.$graph.grads"
        SIMCU_SEED=$([ $graph = off ] && echo 0 || echo "$count") SIMCU_STREAMS=$([ $graph = off ] && echo fwd || echo 7) ranks "$count" "$sim" "${small[@]}" \
            --out "$dir/graph.$graph" --dump-grads "$dir/graph.$graph.grads" --graph $graph "$@" && continue
        bad "$count ranks --graph $graph $*: exit $?: $(grep -h 'train_gpt:\|simcu\|ERROR' "$dir/stderr" | head -3)"
        return
    done
    graphs_same "$name" "$launches"
    [ "$(kernels "$dir/graph.on")" = "$(kernels "$dir/graph.off")" ]
    verdict $? "--graph on, $name: $(kernels "$dir/graph.on") kernels, without $(kernels "$dir/graph.off")"
}
kernels() { sed -nE 's/.*"kernel_launches":([0-9]+).*/\1/p' "$1/log.jsonl"; }
# graphs_same NAME LAUNCHES
graphs_same() {
    local launched
    launched=$(sed -nE 's/.*"event":"graphs".*"launched":([0-9]+).*/\1/p' "$dir/graph.on/log.jsonl" | tail -n 1)
    [ "$launched" = "$2" ] && [ "$(wc -l <<<"$(facts "$dir/graph.on")")" -eq 3 ] && [ "$(facts "$dir/graph.on")" = "$(facts "$dir/graph.off")" ] &&
        [ "$(losses "$dir/graph.on")" = "$(losses "$dir/graph.off")" ] && cmp -s "$dir/graph.on.grads/grads.safetensors" "$dir/graph.off.grads/grads.safetensors" &&
        (cd "$dir/graph.off" && for file in step_00000003/*.safetensors; do cmp -s "$file" "../graph.on/$file" || exit 1; done)
    verdict $? "--graph on, $1: the same bits, $launched launches of graphs, wanted $2"
}
if [ "$quick" = --graphs ] || [ "$quick" = "" ]; then
    # one rank, stopped after two steps and resumed; validation, samples and a trace in between
    looks=(--global-batch 3 --val-every 1 --sample-every 2 --sample-tokens 2 --save-every 1 --keep 3)
    ranks 1 "$sim" "${small[@]}" "${looks[@]}" --out "$dir/graph.off" --dump-grads "$dir/graph.off.grads" &&
        ranks 1 "$sim" "${small[@]}" "${looks[@]}" --out "$dir/graph.on" --dump-grads "$dir/graph.on.grads" --graph on --trace 1:2 --steps 2 &&
        ranks 1 "$sim" "${small[@]}" "${looks[@]}" --out "$dir/graph.on" --graph on --resume auto && graphs_same "1 rank, resumed" 3
    verdict $? "--graph on, 1 rank: $(ls "$dir/graph.on" | tr '\n' ' ')"
    graphs "pp 2" 8 2 --pp 2 --global-batch 2
    graphs "pp 2, zero bubble" 12 2 --pp 2 --pp-schedule zb --global-batch 2
    graphs "dp 2" 7 2 --global-batch 4
    graphs "zero 1, no overlap" 9 2 --zero 1 --global-batch 4 --overlap off
fi
[ "$quick" != --graphs ] || { tally && exit 0 || exit 1; }

for kind in gpt2 llama; do
    # shellcheck disable=SC2086
    run 1 "$dir/$kind" ./train_gpt ${model[$kind]} || tally || exit 1
    same "1 rank" 1 $kind
done
[ "$quick" = --moves ] || same "pp 2, interleaved" 2 gpt2 --pp 2 --pp-schedule interleaved --virtual-stages 2
if [ "$quick" = --quick ]; then tally && exit 0 || exit 1; fi
if [ "$quick" != --moves ]; then
    same "tp 2 sp" 2 llama --tp 2 --sp on
    same "zero 1" 2 gpt2 --zero 1
    same "zero 2" 2 llama --zero 2
    same "zero 3" 2 gpt2 --zero 3
    same "tp 2, pp 2, zero bubble" 4 llama --tp 2 --pp 2 --pp-schedule zb
    same "pp 2, dp 2, zero 3" 4 llama --pp 2 --zero 3
    same "dp 4, shards of 2" 4 gpt2 --zero 2 --shard-group 2

    # bf16: as far from fp32 as the CPU device is in bf16
    # shellcheck disable=SC2086
    for kind in gpt2 llama; do
        run 1 "$dir/cpu16" ./train_gpt ${model[$kind]} --precision bf16 && run 1 "$dir/sim16" "$sim" ${model[$kind]} --precision bf16 || continue
        apart=$(close "$(losses "$dir/sim16")" "$(losses "$dir/cpu16")" 2e-3) && norms=$(close "$(field "$dir/sim16" grad_norm)" "$(field "$dir/cpu16" grad_norm)" 2e-2)
        verdict $? "$kind bf16: losses $apart, norms $norms"
        cp -r "$dir/sim16" "$dir/sim16.$kind"
    done
    # shellcheck disable=SC2086
    run 2 "$dir/sim" "$sim" ${model[gpt2]} --precision bf16 --zero 2 --grad-reduce bf16 &&
        apart=$(close "$(losses "$dir/sim")" "$(losses "$dir/sim16.gpt2")" 2e-3)
    verdict $? "gpt2 bf16, zero 2, gradients travel in bf16: losses $apart"

    # every order of threads, streams and asynchronous copies gives the same bits; so do buckets, and communication that does not overlap
    # shellcheck disable=SC2086
    if run 2 "$dir/first" "$sim" ${model[llama]} --precision bf16 --zero 2; then
        for seed in 1 2; do
            SIMCU_SEED=$seed SIMCU_STREAMS=$seed SIMCU_CPASYNC=random run 2 "$dir/sim" "$sim" ${model[llama]} --precision bf16 --zero 2 && [ "$(facts "$dir/sim")" = "$(facts "$dir/first")" ]
            verdict $? "the same bits with SIMCU_SEED and SIMCU_STREAMS $seed"
        done
        run 2 "$dir/sim" "$sim" ${model[llama]} --precision bf16 --zero 2 --overlap off && [ "$(facts "$dir/sim")" = "$(facts "$dir/first")" ]
        verdict $? "the same bits without overlap"
    fi
fi

# checkpoints move between devices and layouts
# shellcheck disable=SC2086
{
    run 2 "$dir/moved" "$sim" ${model[llama]} --zero 1 --steps 2 --save-every 2 --async-save off &&
        ranks 1 ./train_gpt "${common[@]}" ${model[llama]} --out "$dir/moved" --resume auto --save-every 1 --steps 3 &&
        ranks 2 "$sim" "${common[@]}" ${model[llama]} --out "$dir/moved" --resume auto --save-every 1 --pp 2 &&
        apart=$(close "$(field "$dir/moved" loss; losses "$dir/moved" | tail -n 1)" "$(losses "$dir/llama")" 1e-5)
    verdict $? "2 steps on the simulated device, 1 on the CPU, 1 on the simulated device with --pp 2: losses $apart"
    grep -q '"kernel_launches":[1-9]' "$dir/moved/log.jsonl"
    verdict $? "the last record counts $(sed -nE 's/.*"kernel_launches":([0-9]+).*/\1/p' "$dir/moved/log.jsonl" | tail -n 1) kernels"
}

# a signal while the checkpoint of the step before is still copied or written: saved, exit 7
# shellcheck disable=SC2086
{
    rm -rf "$dir/stopped"
    "$sim" "${common[@]}" ${model[gpt2]} --out "$dir/stopped" --steps 1000 --save-every 1 --keep 1 >"$dir/stdout" 2>"$dir/stderr" </dev/null &
    job=$!
    for ((i = 0; i < 600; i++)); do
        [ "$(wc -l 2>/dev/null <"$dir/stopped/log.jsonl" || echo 0)" -ge 1 ] && break
        sleep 0.1
    done
    kill -USR1 $job
    wait $job
    status=$?
    [ $status -eq 7 ] && [ "$(ls -d "$dir"/stopped/step_* | wc -l)" -eq 1 ] && grep -q 'stopped by SIGUSR1' "$dir/stderr"
    verdict $? "SIGUSR1: exit $status, $(ls "$dir/stopped" | grep step_)"
}

tally
