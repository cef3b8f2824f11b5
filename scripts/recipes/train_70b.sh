#!/usr/bin/env bash
# Llama 2 70B on 2 trillion tokens, with the hyperparameters of its paper (Touvron et al. 2023, section 2.2: sequences of 4096, batches of
# 4 M tokens, learning rate 1.5e-4, 2000 steps of warm-up, cosine to a tenth), on 8 hosts of 8 ranks with 80 GB each.
#
# usage: scripts/launch_mpirun.sh --hosts FILE --per-host 8 -- scripts/recipes/train_70b.sh [flags of train_gpt, which override these]
#        sbatch --nodes=8 scripts/launch_slurm.sh scripts/recipes/train_70b.sh
#        scripts/recipes/train_70b.sh --dry-run | --miniature        the plan of the whole run | 8 small ranks, on this machine
#   TRAIN, VAL: globs of token files (data/text.py --tokenizer): TRAIN='/data/web_*.bin' VAL=/data/web_val.bin
#   OUT: where to write, seen by all hosts [runs/llama2-70b]
#   RANKS: for --dry-run [64]; more hosts are more data-parallel replicas, as long as --global-batch divides
#
# The layout, from the inside out; ranks of a host are neighbours, and --tp counts first:
#   --tp 8 --sp on   the 8 ranks of a host share every layer: they exchange activations in each (2.5 TiB a rank and step, each way), which only the
#                    links inside a host carry. 64 heads, 8 key/value heads and 28672 hidden channels all divide by 8. --sp divides what
#                    tensor parallelism alone would keep 8 times: residual stream and saved inputs of norms.
#   --pp 4           4 hosts hold 20 layers each. Between stages only the residual stream of a micro-batch travels, an eighth of it per rank.
#   --pp-schedule 1f1b   512 micro-batches are so many more than 4 stages that they idle 0.6% of the time: nothing is left to gain by
#                    --pp-schedule interleaved or zb, which cost messages or memory.
#   dp 2, --zero 1   what is left is data parallel, and crosses hosts once a step. ZeRO 1 divides the optimizer state over it. ZeRO 2 or 3 would
#                    reduce gradients in each of the 512 micro-batches instead of once.
# The first stage is the fullest, with 4 micro-batches under way: 44 GiB.
#
# Only --dry-run and --miniature of this recipe have been run. The whole run is 8.6e23 floating-point operations; this program computes
# on CPUs so far. The miniature: 8 ranks = tp 2 x pp 2 x dp 2 instead of 8 x 4 x 2, on 4 layers of 256 channels.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/recipes/recipe.sh

# 1024 sequences x 4096 tokens = 4194304 tokens a step; 476837 steps = 2 T tokens
recipe_name=llama2-70b
recipe_ranks=64
recipe_flags=(--model llama2-70b --seq 4096 --micro-batch 1 --global-batch 1024 --steps 476837 --lr 1.5e-4 --warmup 2000 --schedule cosine
    --min-lr-frac 0.1 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --eps 1e-5 --clip 1 --precision bf16 --val-every 500 --val-batches 20
    --save-every 500 --keep 3)
recipe_layout=(--tp 8 --sp on --pp 4 --pp-schedule 1f1b --zero 1)
recipe_small=(--tp 2 --pp 2 --model llama-nano --tied off --seq 64 --global-batch 16 --steps 20 --lr 1e-3 --warmup 2 --eps 1e-8)
recipe_run "$@"
