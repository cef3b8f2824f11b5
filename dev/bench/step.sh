#!/usr/bin/env bash
# Time of a whole training step over the time of only its matrix products at the best library rate, both measured now, alternating.
# usage: dev/bench/step.sh [fp32|bf16|both] [configurations, default "a b c C"]      (make bench)
set -euo pipefail
cd "$(dirname "$0")/../.."
precisions=${1:-both}; [ "$precisions" = both ] && precisions="fp32 bf16"
configurations=${2:-a b c C}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
make -s train_gpt build/bench_matmul build/make_tokens
build/make_tokens "$work/wide.bin" 400000 50257
build/make_tokens "$work/narrow.bin" 400000 256
median() { sort -n | awk '{v[NR]=$1} END {print (NR%2) ? v[(NR+1)/2] : (v[NR/2]+v[NR/2+1])/2}'; }
echo "products: oneDNN's own loop over the step's products; row-major: operands as they lie in memory; any layout: operands already in the"
echo "library's favourite layout, whose conversion is not counted (weights and activations change every step, so no trainer can have that)"
printf '%-6s %-42s %9s %12s %7s %12s %7s %10s\n' type configuration "step ms" "row-major ms" ratio "any layout" ratio "tokens/s"
for precision in $precisions; do
  for c in $configurations; do
    case $c in
      a) what="124M, B=4 T=64"; flags="--model gpt2-124m --seq 64 --micro-batch 4 --train $work/wide.bin"; tokens=256; steps=14;;
      b) what="124M, B=4 T=256"; flags="--model gpt2-124m --seq 256 --micro-batch 4 --train $work/wide.bin"; tokens=1024; steps=7;;
      c) what="6 layers, C=384, V=50257, B=8 T=256"; flags="--layers 6 --channels 384 --heads 6 --vocab 50257 --seq 256 --micro-batch 8 --train $work/wide.bin"; tokens=2048; steps=9;;
      C) what="6 layers, C=384, V=256, B=8 T=256"; flags="--layers 6 --channels 384 --heads 6 --vocab 256 --seq 256 --micro-batch 8 --train $work/narrow.bin"; tokens=2048; steps=14;;
      *) echo "unknown configuration $c" >&2; exit 2;;
    esac
    # products, steps, products: what the machine does in between falls on both
    : > "$work/products"
    build/bench_matmul "$precision" "$c" --json >> "$work/products"
    rm -rf "$work/out"
    # shellcheck disable=SC2086
    ./train_gpt $flags --precision "$precision" --steps "$steps" --schedule constant --out "$work/out" --save-every 0 > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
    build/bench_matmul "$precision" "$c" --json >> "$work/products"
    field() { sed -n "s/.*\"step\": *true.*\"$1\": *\([0-9.]*\).*/\1/p" "$work/products" | sort -n | head -1; }
    plain=$(field row_major_ms) best=$(field library_ms)
    step=$(sed -n 's/^{"step":\([0-9]*\),.*"ms":\([0-9.]*\),.*/\1 \2/p' "$work/out/log.jsonl" | awk '$1>1 {print $2}' | median)
    awk -v p="$precision" -v w="($c) $what" -v s="$step" -v m="$plain" -v b="$best" -v n="$tokens" \
      'BEGIN {printf "%-6s %-42s %9.1f %12.1f %7.3f %12.1f %7.3f %10.0f\n", p, w, s, m, s/m, b, s/b, n*1000/s}'
  done
done
