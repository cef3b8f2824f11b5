#!/usr/bin/env bash
# Data-parallel ranks under mpirun: losses, norms and full gradients of any number of ranks are those of one, within 1e-5; the same
# run twice has the same bits; checkpoints go from any number of ranks to any other; errors and signals end the whole job.
set -uo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=dev/test/common.sh
. dev/test/common.sh
need_ranks
make -s build/make_tokens build/compare_grads "${train#./}" || exit 1

build/make_tokens "$dir/train.bin" 6000 300 3 && build/make_tokens "$dir/val.bin" 3000 300 4 || exit 1
common=(--layers 2 --channels 64 --heads 4 --vocab 300 --eot 299 --seq 32 --micro-batch 1 --global-batch 8 --steps 5 --lr 1e-3
    --train "$dir/train.bin" --val "$dir/val.bin" --val-batches 8 --log-samples on --keep 100 --watchdog 30)

# run RANKS OUT FLAG...
run() { ranks "$1" "$train" "${common[@]}" --out "$2" "${@:3}"; }
echo "ranks against one"
while IFS='|' read -r name flags; do
    # shellcheck disable=SC2086
    run 1 "$dir/$name.1" --dump-grads "$dir/$name.1/g" $flags || { bad "$name: one rank: $(tail -1 "$dir/stderr")"; continue; }
    for count in 2 4 8; do
        [ "$count" -eq 2 ] || [[ "$name" != bf16 ]] || continue
        out=$dir/$name.$count
        # shellcheck disable=SC2086
        run "$count" "$out" --dump-grads "$out/g" $flags || { bad "$name, $count ranks: $(tail -1 "$dir/stderr")"; continue; }
        bound=1e-5
        [ "$name" != bf16 ] || bound=2e-3
        for what in loss grad_norm val_loss; do
            close "$(field "$dir/$name.1" $what)" "$(field "$out" $what)" $bound >/dev/null || bad "$name, $count ranks: $what"
        done
        [ "$name" = bf16 ] || build/compare_grads "$dir/$name.1/g/grads.safetensors" "$out/g/grads.safetensors" 1e-5 >"$dir/compare"
        verdict $? "$name, $count ranks: losses, norms, gradients"
        [ "$(grep -o '"init_hash":"[0-9a-f]*"' "$out/log.jsonl")" = "$(grep -o '"init_hash":"[0-9a-f]*"' "$dir/$name.1/log.jsonl")" ] ||
            bad "$name, $count ranks: init hash"
        [ "$(field "$out" tokens)" = "$(field "$dir/$name.1" tokens)" ] || bad "$name, $count ranks: tokens of a step"
    done
done <<'END'
gpt2|--dropout 0.1
varlen|--pack varlen
fit|--pack fit --tied off
llama|--position rope --norm rmsnorm --activation swiglu --bias off --tied off --kv-heads 2 --qk-norm on
bf16|--precision bf16
END

echo "bits, counters, checkpoints"
run 4 "$dir/again" --dropout 0.1 && [ "$(facts "$dir/again")" = "$(facts "$dir/gpt2.4")" ]
verdict $? "the same run twice: every bit"
TRAIN_GPT_COMM_WINDOW=off run 4 "$dir/messages" --dropout 0.1 && [ "$(facts "$dir/messages")" = "$(facts "$dir/gpt2.4")" ]
verdict $? "messages instead of shared memory: every bit"
TRAIN_GPT_COMM_LATE=7 run 4 "$dir/late" --dropout 0.1 && [ "$(facts "$dir/late")" = "$(facts "$dir/gpt2.4")" ]
verdict $? "late completion: every bit (no wait is missing)"
# Gradients travel once per step, whatever the number of micro-batches: 4 bytes an element, padding included.
bytes=$(sed -nE 's/.*"grad_bytes":([0-9]+).*"comm":\{"all_reduce":\{"calls":[0-9]+,"bytes":([0-9]+).*/\1 \2/p' "$dir/again/log.jsonl")
awk -v b="$bytes" 'BEGIN { split(b, x, " "); extra = x[2] - 5 * x[1]; exit !(x[1] > 0 && extra >= 0 && extra < 1024) }'
verdict $? "bytes: one all-reduce of the gradients per step, and scalars ($bytes)"
run 4 "$dir/moved" --dropout 0.1 --save-every 1 --steps 5 --schedule constant &&
    cp -r "$dir/moved" "$dir/onto2" && rm -rf "$dir/onto2"/step_0000000[345] &&
    run 2 "$dir/onto2" --dropout 0.1 --save-every 1 --steps 5 --schedule constant --resume auto &&
    close "$(field "$dir/moved" loss)" "$(field "$dir/onto2" loss)" 1e-5
verdict $? "saved by 4 ranks, resumed by 2: losses"

run 1 "$dir/val1" --global-batch 12 --val-batches 4 --val-every 2 && run 3 "$dir/val3" --global-batch 12 --val-batches 4 --val-every 2 &&
    close "$(field "$dir/val1" val_loss)" "$(field "$dir/val3" val_loss)" 1e-5
verdict $? "4 micro-batches of validation are the same ones on 3 ranks"

echo "endings"
# expect CODE RANKS PATTERN FLAG...: exit code, exactly one line of ours on stderr
expect() {
    local code=$1 ranks=$2 pattern=$3 status lines
    shift 3
    run "$ranks" "$dir/end" "$@"
    status=$?
    lines=$(grep -c '^train_gpt' "$dir/stderr")
    [ $status -eq "$code" ] && [ "$lines" -eq 1 ] && grep -qE -- "$pattern" "$dir/stderr"
    verdict $? "exit $code, one line: $pattern (got $status, $lines)"
}
expect 2 4 '--bogus' --bogus 1
expect 2 4 '--global-batch' --global-batch 6
expect 3 4 'none.bin' --train "$dir/none.bin"
expect 2 3 '--global-batch.*3' --global-batch 8
expect 4 2 'not finite' --lr 1e3 --clip 0 --steps 200 --bad-steps 2 --eps 1e-30 --schedule constant
rm -rf "$dir/end"

# Until a run has logged two steps.
wait_for_step() {
    local i
    for ((i = 0; i < 1000; i++)); do
        [ "$(wc -l 2>/dev/null <"$1/log.jsonl" || echo 0)" -ge 2 ] && break
        sleep 0.02
    done
}
big=(--layers 4 --channels 256 --seq 64 --steps 100000 --val-every 0 --save-every 0)

# a signal to the launcher: all ranks stop at the same step, saved, exit 7
timeout 60 mpirun -np 2 --bind-to none "$train" "${common[@]}" "${big[@]}" --out "$dir/stopped" >"$dir/stdout" 2>"$dir/stderr" </dev/null &
launcher=$!
wait_for_step "$dir/stopped"
pkill -USR1 -n -f "^$train .*--out $dir/stopped"
wait $launcher
status=$?
[ $status -eq 7 ] && [ "$(ls -d "$dir"/stopped/step_* | wc -l)" -eq 1 ] && grep -q "stopped by SIGUSR1" "$dir/stderr"
verdict $? "SIGUSR1 to one rank: all stop, saved, exit $status"


# a signal during a validation: the run stops at the step it has done
timeout 60 mpirun -np 2 --bind-to none "$train" "${common[@]}" "${big[@]}" --val-every 2 --val-batches 100000 --steps 6 --val "$dir/train.bin" --seq 2 \
    --out "$dir/looking" >"$dir/stdout" 2>"$dir/stderr" </dev/null &
launcher=$!
wait_for_step "$dir/looking"
sleep 0.5
pkill -USR1 -n -f "^$train .*--out $dir/looking"
wait $launcher
status=$?
[ $status -eq 7 ] && [ "$(ls "$dir/looking" | grep step_)" = step_00000002 ] && [ "$(field "$dir/looking" loss | wc -l)" -eq 2 ]
verdict $? "SIGUSR1 during a validation: exit $status, $(ls "$dir/looking" | grep step_ | tr '\n' ' ')"

tally
