#!/usr/bin/env bash
# Stopping and going on changes no bit: losses, gradient norms, learning rates and sample ids of a resumed run are those of a run in one
# piece, as text. Also: the same command twice, and validating, saving, sampling at every step.
set -uo pipefail
cd "$(dirname "$0")/../.."
train=${TRAIN:-./train_gpt}
make -s build/make_tokens "${train#./}" || exit 1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
passed=0 failed=0

# Three small files: 36 windows of 32 tokens, so that 12 steps of 4 cross files and an epoch.
for i in 1 2 3; do build/make_tokens "$dir/train_$i.bin" $((380 + i)) 300 "$i" || exit 1; done
build/make_tokens "$dir/val.bin" 2000 300 9 || exit 1
common=(--layers 2 --channels 64 --heads 4 --vocab 300 --eot 299 --seq 32 --micro-batch 4 --global-batch 4 --steps 12 --lr 1e-3 --warmup 3
    --train "$dir/train_*.bin" --val "$dir/val.bin" --val-batches 2 --log-samples on --keep 100)

# What must agree: step records without the clock.
facts() { grep '"loss":' "$1/log.jsonl" | sed -E 's/"ms":[^,]*,"tok_per_s":[^,]*,"mfu":[^,}]*//'; }

ok() {
    passed=$((passed + 1))
    echo "  ok: $1"
}
bad() {
    failed=$((failed + 1))
    echo "FAILED: $1"
}
# run CODE OUT FLAG...
run() {
    local code=$1 out=$2 status
    shift 2
    timeout 300 "$train" "${common[@]}" --out "$out" "$@" >"$dir/stdout" 2>"$dir/stderr" </dev/null
    status=$?
    [ $status -eq "$code" ] && return 0
    bad "$out $*: exit $status, wanted $code: $(head -3 "$dir/stderr")"
    return 1
}
same() {
    local count
    count=$(facts "$1" | wc -l)
    if [ "$count" -eq "$3" ] && [[ "$(facts "$1")" == *'"samples":['[0-9]* ]] && [ "$(facts "$1")" = "$(facts "$2")" ]; then
        ok "$4: $count steps, every bit"
    else
        bad "$4: $count steps; the first difference:"
        diff <(facts "$1") <(facts "$2") | head -4 | cut -c1-200
    fi
}
# Goes on from step $3 of a finished run, in a copy without the later checkpoints.
resume_from() {
    local whole=$1 copy=$2 step=$3
    shift 3
    cp -r "$whole" "$copy"
    local path
    for path in "$copy"/step_*; do [ "$((10#${path##*_}))" -le "$step" ] || rm -rf "$path"; done
    [ -d "$(printf '%s/step_%08d' "$copy" "$step")" ] || { bad "$whole holds no step $step"; return 1; }
    run 0 "$copy" --resume auto "$@"
}

while IFS='|' read -r name flags; do
    read -ra words <<<"$flags"
    whole=$dir/$name
    run 0 "$whole" --save-every 5 "${words[@]}" || continue
    for step in 5 10; do
        resume_from "$whole" "${whole}_$step" $step --save-every 5 "${words[@]}" && same "$whole" "${whole}_$step" 12 "$name, resumed from step $step"
    done
done <<'END'
shuffled|--shuffle on
in-order|--shuffle off
accumulated|--micro-batch 1
varlen|--pack varlen
fit|--pack fit --seq 64
bf16|--precision bf16
rounded|--precision bf16 --master none --dropout 0.1
dropout|--dropout 0.1 --micro-batch 2
llama|--norm rmsnorm --position rope --activation swiglu --bias off --tied off --qk-norm on --kv-heads 2
clipped|--clip 0.1
END

run 0 "$dir/again" --save-every 5 && same "$dir/shuffled" "$dir/again" 12 "the same command twice"

# fewer steps first, then more: needs a learning rate that does not depend on the total
run 0 "$dir/constant" --schedule constant && run 0 "$dir/extended" --schedule constant --steps 5 &&
    run 0 "$dir/extended" --schedule constant --resume auto && same "$dir/constant" "$dir/extended" 12 "5 steps, then 12"

# a wish to stop: at the end of step 1, saved, exit 7, and the file is gone
mkdir "$dir/stopped"
touch "$dir/stopped/stop"
if run 7 "$dir/stopped" --save-every 5; then
    [ ! -e "$dir/stopped/stop" ] && ok "OUT/stop is removed" || bad "OUT/stop is still there"
    [ "$(facts "$dir/stopped" | wc -l)" -eq 1 ] && ok "OUT/stop stops after one step" || bad "OUT/stop: $(facts "$dir/stopped" | wc -l) steps"
    run 0 "$dir/stopped" --save-every 5 --resume auto && same "$dir/shuffled" "$dir/stopped" 12 "OUT/stop, resumed"
fi

# signals in the middle of a step: a bigger model, so that the signal comes in time
bigger=(--layers 4 --channels 256 --heads 4 --seq 64 --micro-batch 4 --global-batch 8 --steps 40)
if run 0 "$dir/calm" "${bigger[@]}"; then
    for signal in USR1 TERM INT; do
        out=$dir/signal_$signal
        # a subshell with job control: background jobs of a script would ignore SIGINT
        (
            set -m
            "$train" "${common[@]}" --out "$out" "${bigger[@]}" >"$dir/stdout" 2>"$dir/stderr" </dev/null &
            pid=$!
            for ((i = 0; i < 3000; i++)); do
                [ "$(cat "$out/log.jsonl" 2>/dev/null | wc -l)" -ge 3 ] && break
                sleep 0.01
            done
            kill -s $signal $pid
            wait $pid
        )
        status=$?
        done_steps=$(facts "$out" | wc -l)
        if [ $status -eq 7 ] && [ "$done_steps" -lt 40 ]; then
            ok "SIG$signal: exit 7 after step $done_steps"
            run 0 "$out" "${bigger[@]}" --resume auto && same "$dir/calm" "$out" 40 "SIG$signal, resumed"
        else
            bad "SIG$signal: exit $status after $done_steps steps"
        fi
    done
fi

# stopped at the last step: the next run validates, writes the last record, and only then is there nothing to do
mkdir "$dir/late"
touch "$dir/late/stop"
run 7 "$dir/late" --steps 1 && run 0 "$dir/late" --steps 1 --resume auto
if tail -n 1 "$dir/late/log.jsonl" | grep '"event":"end"' >/dev/null && grep '"val_loss"' "$dir/late/log.jsonl" >/dev/null; then
    ok "a run that was stopped at its last step is finished by the next"
else
    bad "a run that was stopped at its last step stays without its end"
fi

# a hail of signals while generated kernels run (more than 84 tokens, fp32)
(
    timeout 100 "$train" "${common[@]}" --out "$dir/hail" "${bigger[@]}" --steps 4000 >"$dir/stdout" 2>"$dir/stderr" </dev/null &
    pid=$!
    for ((i = 0; i < 1000; i++)); do
        [ "$(cat "$dir/hail/log.jsonl" 2>/dev/null | wc -l)" -ge 2 ] && break
        sleep 0.01
    done
    child=$(pgrep -P $pid)
    while kill -USR1 "$child" 2>/dev/null; do :; done
    wait $pid
)
status=$?
[ $status -eq 7 ] && ok "a hail of SIGUSR1: exit 7" || bad "a hail of SIGUSR1: exit $status"

# watching changes nothing
run 0 "$dir/watched" --val-every 1 --save-every 1 --sample-every 1 --sample-tokens 8 --dropout 0.1 && run 0 "$dir/alone" --val-every 0 --dropout 0.1 &&
    same "$dir/alone" "$dir/watched" 12 "validating, saving, sampling at every step"

# a log torn by a crash, and records beyond the checkpoint, are cut
if resume_from "$dir/shuffled" "$dir/torn" 5 --save-every 5 --steps 5; then
    cp "$dir/shuffled/log.jsonl" "$dir/torn/log.jsonl"
    printf '{"step":13,"lo' >>"$dir/torn/log.jsonl"
    run 0 "$dir/torn" --resume auto --save-every 5 && same "$dir/shuffled" "$dir/torn" 12 "a torn log"
fi

# a damaged newest checkpoint is passed over
cp -r "$dir/shuffled" "$dir/damaged"
for path in "$dir"/damaged/step_00000012/*.safetensors; do printf 'x' | dd of="$path" bs=1 seek=$(($(stat -c %s "$path") - 5)) conv=notrunc status=none; done
run 0 "$dir/damaged" --resume auto --save-every 5 && same "$dir/shuffled" "$dir/damaged" 12 "a damaged newest checkpoint"

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
