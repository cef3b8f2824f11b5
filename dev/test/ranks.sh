#!/usr/bin/env bash
# Data-parallel ranks under mpirun: losses, norms and full gradients of any number of ranks are those of one, within 1e-5; the same
# run twice has the same bits; checkpoints go from any number of ranks to any other; errors, signals and dead ranks end the whole job.
set -uo pipefail
cd "$(dirname "$0")/../.."
train=${TRAIN:-./train_gpt}
command -v mpirun >/dev/null || { echo "no mpirun: one rank only"; exit 77; }
make -s build/make_tokens build/compare_grads "${train#./}" || exit 1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1
export OMPI_MCA_btl=self,vader OMPI_MCA_btl_vader_single_copy_mechanism=none OMP_WAIT_POLICY=passive OMP_NUM_THREADS=1
passed=0 failed=0
ok() { passed=$((passed + 1)); echo "  ok: $1"; }
bad() { failed=$((failed + 1)); echo "FAILED: $1"; }
verdict() { if [ "$1" -eq 0 ]; then ok "$2"; else bad "$2"; fi; }

build/make_tokens "$dir/train.bin" 6000 300 3 && build/make_tokens "$dir/val.bin" 3000 300 4 || exit 1
common=(--layers 2 --channels 64 --heads 4 --vocab 300 --eot 299 --seq 32 --micro-batch 1 --global-batch 8 --steps 5 --lr 1e-3
    --train "$dir/train.bin" --val "$dir/val.bin" --val-batches 8 --log-samples on --keep 100 --watchdog 30)

# run RANKS OUT FLAG...
run() {
    local ranks=$1 out=$2
    shift 2
    timeout --kill-after=5 120 mpirun -np "$ranks" --bind-to none "$train" "${common[@]}" --out "$out" "$@" >"$dir/stdout" 2>"$dir/stderr" </dev/null
}
field() { sed -nE "s/.*\"$2\":([-0-9.e+]+).*/\1/p" "$1/log.jsonl"; }
# Largest relative difference of two lists of numbers; fails on another count, on none, and on what is no number.
close() {
    paste -d' ' <(echo "$1") <(echo "$2") | awk -v bound="$3" '
        NF != 2 || $1 !~ /^[-0-9]/ || $2 !~ /^[-0-9]/ { bad = 1 }
        { d = $1 - $2; if (d < 0) d = -d; s = $2 < 0 ? -$2 : $2; if (d > bound * (s > 1e-30 ? s : 1e-30)) bad = 1 }
        END { exit bad || NR == 0 }'
}

echo "ranks against one"
while IFS='|' read -r name flags; do
    # shellcheck disable=SC2086
    run 1 "$dir/$name.1" --dump-grads "$dir/$name.1/g" $flags || { bad "$name: one rank: $(tail -1 "$dir/stderr")"; continue; }
    for ranks in 2 4 8; do
        [ "$ranks" -eq 2 ] || [[ "$name" != bf16 ]] || continue
        out=$dir/$name.$ranks
        # shellcheck disable=SC2086
        run "$ranks" "$out" --dump-grads "$out/g" $flags || { bad "$name, $ranks ranks: $(tail -1 "$dir/stderr")"; continue; }
        bound=1e-5
        [ "$name" != bf16 ] || bound=2e-3
        for what in loss grad_norm val_loss; do
            close "$(field "$dir/$name.1" $what)" "$(field "$out" $what)" $bound || bad "$name, $ranks ranks: $what"
        done
        [ "$name" = bf16 ] || build/compare_grads "$dir/$name.1/g/grads.safetensors" "$out/g/grads.safetensors" 1e-5 >"$dir/compare"
        verdict $? "$name, $ranks ranks: losses, norms, gradients"
        [ "$(grep -o '"init_hash":"[0-9a-f]*"' "$out/log.jsonl")" = "$(grep -o '"init_hash":"[0-9a-f]*"' "$dir/$name.1/log.jsonl")" ] ||
            bad "$name, $ranks ranks: init hash"
        [ "$(field "$out" tokens)" = "$(field "$dir/$name.1" tokens)" ] || bad "$name, $ranks ranks: tokens of a step"
    done
done <<'END'
gpt2|--dropout 0.1
varlen|--pack varlen
fit|--pack fit --tied off
llama|--position rope --norm rmsnorm --activation swiglu --bias off --tied off --kv-heads 2 --qk-norm on
bf16|--precision bf16
END

echo "bits, counters, checkpoints"
facts() { grep '"loss":' "$1/log.jsonl" | sed -E 's/"ms":[^,]*,"tok_per_s":[^,]*,"mfu":[^,}]*//'; }
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

# a rank of a layout dies, or stops running: the job ends, a peer tells which rank, where, at which step and in what; nothing is left
wait_for_step() {
    local i
    for ((i = 0; i < 1000; i++)); do
        [ "$(wc -l 2>/dev/null <"$1/log.jsonl" || echo 0)" -ge 2 ] && break
        sleep 0.02
    done
}
lost() {
    local signal=$1 text=$2 codes=$3 began status launcher victim
    timeout 60 mpirun -np 4 --bind-to none "$train" "${common[@]}" "${big[@]}" --tp 2 --pp 2 --out "$dir/lost.$signal" >"$dir/stdout" 2>&1 </dev/null &
    launcher=$!
    wait_for_step "$dir/lost.$signal"
    began=$(date +%s)
    victim=$(pgrep -n -f "^$train .*--steps 100000")
    kill -"$signal" "$victim"
    wait $launcher
    status=$?
    sleep 0.5
    [[ " $codes " == *" $status "* ]] && [ $(($(date +%s) - began)) -lt 30 ] && grep -qE "step [0-9]+, phase training: rank [0-9] on .* $text" "$dir/stdout" &&
        ! pgrep -f "^$train .*--steps 100000" >/dev/null
    verdict $? "SIG$signal to a rank: exit $status after $(($(date +%s) - began)) s, none is left: $(grep -m 1 'no sign' "$dir/stdout" | cut -c1-150)"
}
big=(--layers 4 --channels 256 --seq 64 --steps 100000 --val-every 0 --save-every 0)
lost KILL 'has died' '137 6'
lost STOP 'is stopped, frozen or dead' 6

# a signal to the launcher: all ranks stop at the same step, saved, exit 7
timeout 60 mpirun -np 2 --bind-to none "$train" "${common[@]}" "${big[@]}" --out "$dir/stopped" >"$dir/stdout" 2>"$dir/stderr" </dev/null &
launcher=$!
wait_for_step "$dir/stopped"
pkill -USR1 -n -f "^$train .*--out $dir/stopped"
wait $launcher
status=$?
[ $status -eq 7 ] && [ "$(ls -d "$dir"/stopped/step_* | wc -l)" -eq 1 ]
verdict $? "SIGUSR1 to one rank: all stop, saved, exit $status"

echo "$passed passed, $failed failed"
[ $failed -eq 0 ] && [ $passed -gt 0 ]
