// cast.h: conversion between storage types, and the sum of two fp32 buffers, on the CPU.
#ifndef LLMC_CPU_CAST_H
#define LLMC_CPU_CAST_H

#include "llmc/cpu/block.h" // cpu_block_in, CPU_SCRATCH

// to (n) = from (n), any mix of F32 and BF16; rounds to nearest even
static inline void cpu_cast(Device *device, Buffer to, Buffer from, int64_t n) {
    (void)device;
#pragma omp parallel for schedule(static)
    for (int64_t at = 0; at < n; at += CPU_BLOCK) {
        CPU_SCRATCH(scratch);
        const int64_t width = min_i64(CPU_BLOCK, n - at);
        if (to.dtype == from.dtype) {
            memcpy(buffer_at(to, at).data, buffer_at(from, at).data, (size_t)width * dtype_bytes(to.dtype));
        } else if (to.dtype == DTYPE_F32) {
            cpu_block_in(from, at, width, (float *)to.data + at); // widens straight into its place
        } else {
            cpu_block_store(to, at, width, cpu_block_in(from, at, width, scratch));
        }
    }
}

// to (n) += from (n), both F32
static inline void cpu_accumulate(Device *device, Buffer to, Buffer from, int64_t n) {
    (void)device;
    float *sum = to.data;
    const float *add = from.data;
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) sum[i] += add[i];
}

#endif
