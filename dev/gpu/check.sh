#!/usr/bin/env bash
# All that wants a GPU, in under 8 minutes, on a machine with one Hopper GPU, perhaps without MPI and without internet: layouts of the tensor-core
# instructions, every op and whole training steps against the CPU device, times of every op, training of GPT-2 124M and 1558M on random tokens, 124M also
# with CUDA graphs. Takes the programs of build/gpu (make gpu-binaries, on any machine) where they run, else builds them here. Every part has a time limit.
#
# usage: dev/gpu/check.sh [FILE]   writes FILE (dev/gpu/RESULTS.md): what was measured, nothing else
# exit code: 0 all parts passed or were skipped for the reason shown, 1 one failed or took too long, 2 usage, 3 no GPU
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 1
export LC_ALL=C
[ $# -le 1 ] || { echo "usage: dev/gpu/check.sh [FILE]" >&2; exit 2; }
results=${1:-dev/gpu/RESULTS.md}
if ! gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm --format=csv,noheader -i 0 2>/dev/null) || [ -z "$gpu" ]; then
    echo "check.sh: no GPU here (nvidia-smi finds none)"
    exit 3
fi

total_seconds=470
began=$(date +%s)
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
failed=0
: >"$work/parts"
: >"$work/tables"

# part NAME LIMIT COMMAND...: output to $work/NAME.txt; a row of the table of parts. LIMIT in seconds.
part() {
    local name=$1 limit=$2 status result started left
    shift 2
    started=$(date +%s)
    left=$((total_seconds - (started - began)))
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -lt 5 ]; then
        skip "$name" "no time left of $total_seconds s"
        failed=$((failed + 1))
        return 1
    fi
    timeout --kill-after=5 "$limit" "$@" >"$work/$name.txt" 2>&1 </dev/null
    status=$?
    case $status in
    0) result=passed ;;
    124 | 137) result="took more than $limit s" ;;
    *) result="failed (exit $status)" ;;
    esac
    row "$name" "$result" $(($(date +%s) - started))
    [ $status -eq 0 ] && return 0
    failed=$((failed + 1))
    tail -n 15 "$work/$name.txt" | sed 's/^/      | /'
    table "$name, the end of its output" <(tail -n 15 "$work/$name.txt")
    return 1
}
row() { # NAME RESULT SECONDS
    printf '%-16s %-32s %4s s\n' "$1" "$2" "$3"
    echo "| $1 | $2 | $3 |" >>"$work/parts"
}
skip() { row "$1" "skipped: $2" 0; }
table() { # TITLE FILE
    {
        printf '\n## %s\n\n```\n' "$1"
        cat "$2"
        echo '```'
    } >>"$work/tables"
}

# ---------------------------------------------------------------------------- programs

# Whether a program starts here: 126, 127 and signals come from the loader and the CPU, 6 from CUDA, everything else from the program.
starts() {
    [ -x "$1" ] || return 1
    timeout 20 "$@" >/dev/null 2>&1 </dev/null
    local status=$?
    [ $status -lt 124 ] && [ $status -ne 6 ]
}
bin=build/gpu
prebuilt=yes
for program in "test_fragments" "bench_cuda --help" "test_gptcu no-such-family" "make_tokens"; do
    # shellcheck disable=SC2086
    starts $bin/$program || prebuilt=no
done
if [ $prebuilt = no ]; then
    bin=$work/bin
    mkdir "$bin"
    programs="test_fragments bench_cuda test_gptcu build/make_tokens"
    grep -q '^train_gptcu:' Makefile && programs+=" train_gptcu"
    # shellcheck disable=SC2086
    part build 240 make -s -j "$(nproc)" NO_MPI=1 CUDA_ARCH=90a $programs &&
        for program in $programs; do cp "$program" "$bin/"; done
fi

# ---------------------------------------------------------------------------- parts

run_fragments() {
    [ -x "$bin/test_fragments" ] || { skip fragments "no program"; return; }
    part fragments 30 "$bin/test_fragments"
    table "Layouts of tensor-core instructions" "$work/fragments.txt"
}
run_ops() {
    [ -x "$bin/test_gptcu" ] || { skip ops "no program"; return; }
    part ops 140 "$bin/test_gptcu"
    table "Every op, and whole training steps, against the CPU device" <(sed -n '/^op and tensor/,$p' "$work/ops.txt")
}
run_bench() {
    [ -x "$bin/bench_cuda" ] || { skip bench "no program"; return; }
    part bench 120 env TRAIN_GPT_ALGORITHMS="$work/algorithms" "$bin/bench_cuda" --json "$work/bench.json"
    table "Times of ops" "$work/bench.txt"
    [ -s "$work/algorithms" ] || return
    awk 'NR > 1 && $16 > 0 { n[$10, $16]++ }
        END {
            name[160] = "GELU_AUX"; name[164] = "GELU_AUX_BIAS"; name[192] = "DGELU"; name[512] = "BGRADB"
            for (e in name) if (n[e, 1] + n[e, 2] > 0) printf "%-14s taken in %d shapes, not in %d\n", name[e], n[e, 1], n[e, 2]
        }' "$work/algorithms" >"$work/fusion.txt"
    table "Epilogues of cuBLASLt that won against the plain way" "$work/fusion.txt"
}

# NAME LIMIT STEPS MEGABYTES FLAGS...: training on random tokens; medians of the steps behind the first five.
run_train() {
    local name=$1 limit=$2 steps=$3 megabytes=$4 memory out=$work/$1
    shift 4
    [ -x "$bin/train_gptcu" ] || { skip "$name" "there is no train_gptcu"; return; }
    [ -s "$work/tokens.bin" ] || { skip "$name" "no tokens: make_tokens failed"; return; }
    memory=$(nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits -i 0)
    [ "${memory:-0}" -ge "$megabytes" ] || { skip "$name" "wants $megabytes MiB of device memory, $memory are free"; return; }
    part "$name" "$limit" "$bin/train_gptcu" --device cuda --train "$work/tokens.bin" --seq 1024 --precision bf16 --steps "$steps" --save-every 0 --trace 11:14 --out "$out" "$@"
    [ -s "$out/log.jsonl" ] || return
    {
        echo "train_gptcu --device cuda --seq 1024 --precision bf16 $*"
        sed -n 's/^{"step":\([0-9]*\),.*/\1 &/p' "$out/log.jsonl" | awk '
            function field(name,  at) { at = match($0, "\"" name "\":[-0-9.e+]+"); return at ? substr($0, at + length(name) + 3, RLENGTH - length(name) - 3) : "null" }
            $1 == 1 { printf "loss of step 1: %s\n", field("loss") }
            { last = $1; loss = field("loss") }
            $1 > 5 { ms[++n] = field("ms") + 0; tokens[n] = field("tok_per_s") + 0; mfu[n] = field("mfu") + 0 }
            function median(v, n,  i, j, t) { for (i = 2; i <= n; i++) { t = v[i]; for (j = i - 1; j > 0 && v[j] > t; j--) v[j + 1] = v[j]; v[j + 1] = t } return v[int((n + 1) / 2)] }
            END {
                printf "loss of step %d: %s\n", last, loss
                if (n > 0) printf "median of %d steps: %.1f ms, %.0f tokens/s, MFU %.3f\n", n, median(ms, n), median(tokens, n), median(mfu, n)
            }'
        tr '\r' '\n' <"$work/$name.txt" | grep '^ms a step\|^memory, MB'
    } >"$work/$name-summary.txt"
    cat "$work/$name-summary.txt"
    table "Training: $name" "$work/$name-summary.txt"
}

# Small micro-batches, where launches count most, without and with --graph on: the same losses, and how much faster.
run_graphs() {
    local graph files=()
    for graph in off on; do
        TRAIN_GPT_ALGORITHMS="$work/algorithms-graph" \
            run_train "graph-$graph" 40 25 8000 --model gpt2-124m --micro-batch 2 --global-batch 32 --graph $graph
        [ -s "$work/graph-$graph-summary.txt" ] || return
        files+=("$work/graph-$graph-summary.txt")
    done
    {
        awk '/^median/ { for (i = 2; i <= NF; i++) if ($i ~ /^tokens/) rate[FILENAME] = $(i - 1) }
            END { if (rate[ARGV[1]] > 0) printf "tokens/s with --graph on over those without: %.3f\n", rate[ARGV[2]] / rate[ARGV[1]] }' "${files[@]}"
        if [ "$(grep '^loss' "${files[0]}")" = "$(grep '^loss' "${files[1]}")" ]; then echo "the same losses"; else echo "FAILED: other losses"; fi
    } >"$work/graphs.txt"
    cat "$work/graphs.txt"
    ! grep -q FAILED "$work/graphs.txt" || failed=$((failed + 1))
    table "CUDA graphs" "$work/graphs.txt"
}

run_fragments
run_ops
run_bench
[ ! -x "$bin/make_tokens" ] || "$bin/make_tokens" "$work/tokens.bin" 8000000 50257 >/dev/null 2>&1
run_train train-124m 70 40 20000 --model gpt2-124m --micro-batch 32 --global-batch 32
run_train train-1558m 90 16 60000 --model gpt2-1558m --micro-batch 16 --global-batch 16
run_graphs

{
    echo "# Results on a GPU"
    echo
    echo "Written by dev/gpu/check.sh; every number was measured by that run."
    echo
    echo "| | |"
    echo "|---|---|"
    echo "| date | $(date -u '+%Y-%m-%d %H:%M UTC') |"
    echo "| commit | $(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)$(git diff --quiet HEAD 2>/dev/null || echo ', with changes') |"
    echo "| device, driver, memory, highest clock | $gpu |"
    echo "| programs | $([ $prebuilt = yes ] && echo 'built beforehand (make gpu-binaries)' || echo 'built there') |"
    echo
    echo "| part | result | seconds |"
    echo "|---|---|---|"
    cat "$work/parts" "$work/tables"
} >"$results" || { echo "check.sh: cannot write $results" >&2; exit 1; }
echo "wrote $results; $failed parts failed, $(($(date +%s) - began)) s"
[ $failed -eq 0 ]
