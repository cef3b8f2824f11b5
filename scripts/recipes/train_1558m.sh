#!/usr/bin/env bash
# GPT-2 1558M on 32 billion tokens of web text (FineWeb-style token files with GPT-2's vocabulary), with the
# hyperparameters of GPT-3's model of this size (Brown et al. 2020, table 2.1: learning rate, batch of 1 M tokens).
#
# usage: scripts/recipes/train_1558m.sh [flags of train_gpt, which override these]
#   TRAIN, VAL: globs of token files, as data/fineweb.py writes them: TRAIN='data/out/fineweb_train_*.bin' VAL=data/out/fineweb_val.bin
#   OUT: where to write [runs/gpt2-1558m]
#
# Only --dry-run of this recipe has been run. The whole run is 3.14e20 floating-point operations. Estimates from that number, at
# 50 GFLOP/s sustained per CPU core and with perfect scaling: 2 cores 100 years, 16 cores 12 years, 64 cores 3 years. A model of
# this size wants GPUs, which this program does not drive yet; on CPUs, try the flags with --steps 5 --global-batch 2, or train
# something small (scripts/recipes/kjv.cfg).
set -euo pipefail
cd "$(dirname "$0")/../.."
data=()
[ -z "${TRAIN:-}" ] || data+=(--train "$TRAIN")
[ -z "${VAL:-}" ] || data+=(--val "$VAL")

# 1024 sequences x 1024 tokens = 1048576 tokens a step; 30518 steps = 32 B tokens
exec ./train_gpt --model gpt2-1558m --seq 1024 --micro-batch 2 --global-batch 1024 --steps 30518 \
    --lr 2e-4 --warmup 360 --schedule cosine --min-lr-frac 0.1 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --clip 1 \
    --precision bf16 --val-every 250 --val-batches 20 --save-every 1000 --keep 3 --resume auto \
    --out "${OUT:-runs/gpt2-1558m}" "${data[@]}" "$@"
