#!/usr/bin/env bash
# Llama 2 7B on 2 trillion tokens, with the hyperparameters of its paper (Touvron et al. 2023, section 2.2: sequences of 4096, batches of
# 4 M tokens, learning rate 3e-4, 2000 steps of warm-up, cosine to a tenth), on one host of 8 ranks with 80 GB each.
#
# usage: scripts/launch_mpirun.sh --ranks 8 -- scripts/recipes/train_7b.sh [flags of train_gpt, which override these]
#        scripts/recipes/train_7b.sh --dry-run | --miniature        the plan of the whole run | 8 small ranks, on this machine
#   TRAIN, VAL: globs of token files (data/text.py --tokenizer): TRAIN='data/out/web_*.bin' VAL=data/out/web_val.bin
#   OUT: where to write [runs/llama2-7b]
#
# The layout: --zero 3, nothing else. A rank alone would need 113 GiB for parameters, gradients and optimizer state (18 bytes a parameter), an
# eighth of that is 14 GiB; activations of 2 sequences take 32 GiB. Tensor parallelism would have to sum activations in every layer, and a
# pipeline would idle; sharding only moves parameters, which are gathered while the block before computes. In exchange they travel in every
# micro-batch, so the largest micro-batch that fits is the best one, and gradients travel in bf16 (summed in fp32). --dry-run shows the bytes:
# 1.9 TiB a rank and step, inside the host. Where that is too slow: --zero 1 --micro-batch 1 fits in 65 GiB and sends 22 GiB.
#
# Only --dry-run and --miniature of this recipe have been run. The whole run is 8.6e22 floating-point operations; this program computes
# on CPUs so far. The miniature: the same 8 ranks and the same flags of the layout, on 4 layers of 256 channels.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/recipes/recipe.sh

# 1024 sequences x 4096 tokens = 4194304 tokens a step; 476837 steps = 2 T tokens
recipe_name=llama2-7b
recipe_ranks=8
recipe_flags=(--model llama2-7b --seq 4096 --micro-batch 2 --global-batch 1024 --steps 476837 --lr 3e-4 --warmup 2000 --schedule cosine
    --min-lr-frac 0.1 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --eps 1e-5 --clip 1 --precision bf16 --val-every 500 --val-batches 20
    --save-every 1000 --keep 3)
recipe_layout=(--zero 3 --grad-reduce bf16)
recipe_small=(--model llama-nano --tied off --seq 64 --micro-batch 1 --global-batch 16 --steps 20 --lr 1e-3 --warmup 2 --eps 1e-8)
recipe_run "$@"
