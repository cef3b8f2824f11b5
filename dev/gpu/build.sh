#!/usr/bin/env bash
# Builds what dev/gpu/check.sh runs, for another machine with a Hopper GPU (sm_90a): into build/gpu, without MPI and BLAS, for any x86-64 CPU with AVX2;
# there only glibc, the driver and cuBLASLt are wanted. Works in a copy of the tree, because the flags differ from those of this tree's own build.
# train_gptcu is left out where the Makefile has no rule for it.
# usage: make gpu-binaries   (CUDA=directory, NVCC=compiler)
set -euo pipefail
cd "$(dirname "$0")/../.."
: "${CUDA:=/usr/local/cuda}" "${NVCC:=$CUDA/bin/nvcc}"
root=$PWD tree=$PWD/build/gpu_tree
rm -rf "$tree" build/gpu
mkdir -p "$tree/static" build/gpu
git ls-files -z -co --exclude-standard | while IFS= read -r -d '' file; do [ ! -f "$file" ] || printf '%s\0' "$file"; done |
    tar --null -T - -cf - | tar -xf - -C "$tree"
# a directory with nothing but archives, searched first, makes the linker take these instead of shared libraries
for library in libjansson.a libgomp.a; do
    path=$(gcc -print-file-name=$library)
    [ -f "$path" ] || { echo "build.sh: no $library; install it" >&2; exit 1; }
    ln -s "$path" "$tree/static/$library"
done
programs=(test_fragments bench_cuda test_gptcu build/make_tokens)
grep -q '^train_gptcu:' Makefile && programs+=(train_gptcu) || echo "build.sh: no rule for train_gptcu: left out"
export LIBRARY_PATH=$tree/static
make -s -C "$tree" NO_MPI=1 BLAS=none ARCH=x86-64-v3 CUDA_ARCH=90a \
    NVCC="$NVCC -L$tree/static -Xcompiler -static-libgcc,-static-libstdc++ -Xlinker -rpath,$CUDA/lib64" "${programs[@]}"
for program in "${programs[@]}"; do mv "$tree/$program" "build/gpu/"; done
rm -rf "$tree"
du -h "$root"/build/gpu/*
