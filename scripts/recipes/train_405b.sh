#!/usr/bin/env bash
# Llama 3.1 405B: the first phase of its training (Grattafiori et al. 2024, section 3.4: sequences of 4096, batches of 4 M tokens, learning rate
# 8e-5, 8000 steps of warm-up, cosine over 1200000 steps to a hundredth), on 512 hosts of 8 ranks with 141 GB each.
#
# usage: sbatch --nodes=512 scripts/launch_slurm.sh scripts/recipes/train_405b.sh [flags of train_gpt, which override these]
#        scripts/launch_mpirun.sh --hosts FILE --per-host 8 -- scripts/recipes/train_405b.sh
#        scripts/recipes/train_405b.sh --dry-run | --miniature        the plan of the whole run | 8 small ranks, on this machine
#   TRAIN, VAL: globs of token files (data/text.py --tokenizer): TRAIN='/data/web_*.bin' VAL=/data/web_val.bin
#   OUT: where to write, seen by all hosts [runs/llama3-405b]
#   RANKS: for --dry-run [4096]: 128 for one replica; or 16384 with --global-batch 4096
#
# The layout, from the inside out; ranks of a host are neighbours, and --tp counts first:
#   --tp 8 --sp on   the 8 ranks of a host share every layer, and --sp the tokens between layers: 128 heads, 8 key/value heads and 53248 hidden
#                    channels divide by 8. More would leave the host in each layer.
#   --pp 16          a stage is 8 layers, 7 where the embedding is and 7 where the head is: 126 in all. One host holds a stage.
#   --pp-schedule interleaved --virtual-stages 4   with 32 micro-batches a replica, 16 stages of 1f1b idle 32% of the time; with 4 runs of 2 layers on
#                    each stage 10%. It costs 4 times the messages, which are small (4 GiB a rank and step), and memory: 75 GiB of activations
#                    instead of 56. zb idles 14% and keeps more still.
#   dp 32, --zero 1  what is left is data parallel; it talks once a step, 12 GiB of gradients and 6 GiB of parameters. ZeRO 1 makes master weights
#                    and optimizer state small (1 GiB instead of 36); ZeRO 2 or 3 would reduce gradients in every micro-batch.
# The first stage is the fullest: 95 GiB. With 80 GB a rank: --pp-schedule 1f1b --virtual-stages 1, 76 GiB.
#
# Only --dry-run and --miniature of this recipe have been run. 1200000 steps are 5 T tokens and 1.2e25 floating-point operations; this program
# computes on CPUs so far. The miniature: 8 ranks = tp 2 x pp 2 x dp 2 instead of 8 x 16 x 32, 4 chunks on each stage, on 8 layers of 64 channels.
set -euo pipefail
cd "$(dirname "$0")/../.."
. scripts/recipes/recipe.sh

# 1024 sequences x 4096 tokens = 4194304 tokens a step
recipe_name=llama3-405b
recipe_ranks=4096
recipe_flags=(--model llama3-405b --seq 4096 --micro-batch 1 --global-batch 1024 --steps 1200000 --lr 8e-5 --warmup 8000 --schedule cosine
    --min-lr-frac 0.01 --weight-decay 0.1 --beta1 0.9 --beta2 0.95 --clip 1 --precision bf16 --val-every 500 --val-batches 20
    --save-every 250 --keep 3)
recipe_layout=(--tp 8 --sp on --pp 16 --pp-schedule interleaved --virtual-stages 4 --zero 1)
recipe_small=(--tp 2 --pp 2 --model llama-nano --tied off --layers 8 --channels 64 --heads 8 --kv-heads 4 --seq 64 --global-batch 16 --steps 20
    --lr 1e-3 --warmup 2)
recipe_run "$@"
