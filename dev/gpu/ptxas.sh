#!/usr/bin/env bash
# Registers, spills and static shared memory of every kernel of train_gpt.cu, as the assembler reports them for each architecture. Fails when a kernel that
# decides the speed spills registers into memory.
# Needs nvcc, no GPU.
#
# usage: dev/gpu/ptxas.sh   (make: NVCC, CUDA_ARCH)
# exit code: 0 no spills in the kernels below, 1 spills or the build failed, 77 no nvcc
set -uo pipefail
cd "$(dirname "$0")/../.."
hot='attention|cross_entropy|norm|adamw' # names of kernels that must not spill
nvcc=${NVCC:-${CUDA:-/usr/local/cuda}/bin/nvcc}
command -v "$nvcc" >/dev/null || { echo "ptxas.sh: no nvcc"; exit 77; }
make -s build/cuda/train_gpt.ptxas.txt || exit 1
names=$(command -v c++filt || echo cat)
grep -E 'Compiling entry|bytes spill|Used [0-9]+ registers' build/cuda/train_gpt.ptxas.txt | "$names" | awk -v hot="$hot" '
    /Compiling entry/ {
        at = index($0, "\047")
        name = substr($0, at + 1)
        arch = name
        sub(/^.*\047 for \047/, "", arch); sub(/\047.*$/, "", arch)
        sub(/\047 for \047.*$/, "", name); sub(/^void /, "", name); sub(/\(.*$/, "", name)
    }
    /bytes spill/ {
        stores = loads = 0
        for (i = 1; i <= NF; i++) if ($i == "spill") { if ($(i + 1) ~ /^stores/) stores = $(i - 2); else loads = $(i - 2) }
    }
    /Used [0-9]+ registers/ {
        registers = shared = 0
        for (i = 1; i <= NF; i++) { if ($i == "Used") registers = $(i + 1); if ($(i + 1) == "bytes" && $(i + 2) ~ /^smem/) shared = $i }
        bad = stores + loads > 0 && name ~ hot
        printf "%-8s %3d registers %6d bytes spilled %6d bytes shared  %s%s\n", arch, registers, stores + loads, shared, name, bad ? "  SPILLS" : ""
        kernels++; failed += bad
    }
    END {
        printf "%d kernels, %d of them (%s) spill\n", kernels, failed, hot
        exit failed > 0 || kernels == 0
    }'
