// block.h: rows of either storage type as blocks of floats, so that every kernel is written once, in fp32. An F32 buffer is
// used where it lies; a BF16 buffer goes through a scratch block of the caller that stays in the first-level cache.
// Rows are longer than a block: kernels walk them in steps of CPU_BLOCK. No loops over tokens and no threads here.
#ifndef LLMC_CPU_BLOCK_H
#define LLMC_CPU_BLOCK_H

#include "llmc/base.h"     // min_i64
#include "llmc/cpu/math.h" // cpu_to_bf16
#include "llmc/device.h"   // Buffer

enum { CPU_BLOCK = 1024 }; // elements; a multiple of 8 (channels per dropout draw), 4 KiB in fp32

// An uninitialised scratch block.
#define CPU_SCRATCH(name) _Alignas(64) float name[CPU_BLOCK]

// n elements from `at` on, to be read.
static inline const float *cpu_block_in(Buffer from, int64_t at, int64_t n, float *scratch) {
    if (from.dtype == DTYPE_F32) return (const float *)from.data + at;
    const uint16_t *bits = (const uint16_t *)from.data + at;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) scratch[i] = bf16_to_f32(bits[i]);
    return scratch;
}

// Where the block that starts at `at` is to be written; cpu_block_store(to, at, n, that) completes it.
static inline float *cpu_block_out(Buffer to, int64_t at, float *scratch) { return to.dtype == DTYPE_F32 ? (float *)to.data + at : scratch; }

static inline void cpu_block_store(Buffer to, int64_t at, int64_t n, const float *block) {
    if (to.dtype == DTYPE_F32) return; // written in place
    uint16_t *bits = (uint16_t *)to.data + at;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) bits[i] = cpu_to_bf16(block[i]);
}

// Sums over a block run in this many independent lanes: one order of summation for every compiler and vector width, short
// chains of rounding, and no waiting for the latency of an addition.
enum { CPU_LANES = 32 };

static inline float cpu_lanes_sum(const float lane[CPU_LANES]) {
    float half[CPU_LANES / 2];
    for (int k = 0; k < CPU_LANES / 2; k++) half[k] = lane[k] + lane[k + CPU_LANES / 2];
    for (int width = CPU_LANES / 4; width > 0; width /= 2) {
        for (int k = 0; k < width; k++) half[k] += half[k + width];
    }
    return half[0];
}

#endif
