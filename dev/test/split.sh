#!/usr/bin/env bash
# How a global batch is cut into micro-batches does not matter: losses and gradient norms of the first steps, and step 1's gradients,
# agree to 1e-5. With packed documents the micro-batches hold different numbers of valid tokens: a mean of means would show.
set -uo pipefail
cd "$(dirname "$0")/../.."
train=${TRAIN:-./train_gpt}
make -s build/make_tokens build/compare_grads "${train#./}" || exit 1
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
passed=0 failed=0
build/make_tokens "$dir/train.bin" 20000 300 || exit 1

facts() { grep '"loss":' "$1/log.jsonl" | sed -E 's/.*"step":([0-9]+),"loss":([^,]*),"grad_norm":([^,]*),.*/\1 \2 \3/'; }
samples() { grep -o '"samples":\[[^]]*\]' "$1/log.jsonl"; }

# check NAME FLAG...: 4x1 against 2x2 and 1x4
check() {
    local name=$1 micro worst out
    shift
    for micro in 4 2 1; do
        out=$dir/${name}_$micro
        timeout 300 "$train" --layers 2 --channels 64 --heads 4 --vocab 300 --eot 299 --seq 128 --steps 5 --lr 1e-3 --train "$dir/train.bin" --log-samples on \
            --micro-batch $micro --global-batch 4 --out "$out" --dump-grads "$out" "$@" >"$dir/stdout" 2>"$dir/stderr" </dev/null || {
            failed=$((failed + 1))
            echo "FAILED: $name: exit $?: $(head -3 "$dir/stderr")"
            return
        }
        [ $micro -ne 4 ] || continue
        worst=$(paste -d ' ' <(facts "$dir/${name}_4") <(facts "$out") | awk '
            function error(a, b) { a -= b; if (a < 0) a = -a; return b > 0 ? a / b : 1 }
            NF != 6 || $1 != $4 || $2 !~ /^[0-9]/ || $3 !~ /^[0-9]/ { bad = 1 }
            { e = error($2, $5); if (e > worst) worst = e; e = error($3, $6); if (e > worst) worst = e }
            END { print NR == 5 && !bad ? worst : 1 }')
        if awk -v e="$worst" 'BEGIN { exit !(e <= 1e-5) }' && [ "$(samples "$out")" = "$(samples "$dir/${name}_4")" ] && [ -n "$(samples "$out")" ]; then
            passed=$((passed + 1))
            echo "  ok: $name, 4x1 and ${micro}x$((4 / micro)): worst error of loss and norm over 5 steps $worst, the same samples"
        else
            failed=$((failed + 1))
            echo "FAILED: $name, 4x1 and ${micro}x$((4 / micro)): error of loss or norm $worst, or other samples"
            paste <(facts "$dir/${name}_4") <(facts "$out")
        fi
        if build/compare_grads "$out/grads.safetensors" "$dir/${name}_4/grads.safetensors" 1e-5; then
            passed=$((passed + 1))
        else
            failed=$((failed + 1))
            echo "FAILED: $name, 4x1 and ${micro}x$((4 / micro)): gradients"
        fi
    done
}
check none
check varlen --pack varlen
check fit --pack fit
check dropout --dropout 0.2 --pack fit
check llama --norm rmsnorm --position rope --activation swiglu --bias off --tied off --qk-norm on --kv-heads 2 --pack varlen

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
