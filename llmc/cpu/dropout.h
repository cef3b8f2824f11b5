// dropout.h: the dropout mask of rng.h for a run of channels, many Philox counters side by side, and dropout's backward.
// Forward is fused into the ops that have a dropout (norm_forward, embedding_forward).
#ifndef LLMC_CPU_DROPOUT_H
#define LLMC_CPU_DROPOUT_H

#include "llmc/cpu/block.h" // cpu_block_in, CPU_SCRATCH
#include "llmc/device.h"    // Dropout
#include "llmc/rng.h"       // rng_dropout_bits: the definition

enum { CPU_DROPOUT_LANES_ = 16 };

// mask (n) = 0 for a dropped element, 65536/keep_threshold for a kept one: channels first .. first+n-1 of one token.
// first is a multiple of 8; writes up to the next multiple of 8 (mask has CPU_BLOCK elements).
static inline void cpu_dropout_mask(float *mask, const Dropout *dropout, int64_t token, int64_t first, int64_t n) {
    const float scale = 65536.0f / (float)dropout->keep_threshold;
    const uint32_t threshold = dropout->keep_threshold, key_low = (uint32_t)*dropout->key, key_high = (uint32_t)(*dropout->key >> 32);
    const uint32_t group = (uint32_t)(first / 8);
    const int64_t groups = ceil_div(n, 8);
    const uint64_t index = (uint64_t)((const int32_t *)dropout->token_index.data)[token];
    for (int64_t g = 0; g < groups; g += CPU_DROPOUT_LANES_) {
        // philox() of rng.h, a lane per group of 8 channels: the rounds outside, the lanes inside.
        uint32_t c0[CPU_DROPOUT_LANES_], c1[CPU_DROPOUT_LANES_], c2[CPU_DROPOUT_LANES_], c3[CPU_DROPOUT_LANES_];
        for (int i = 0; i < CPU_DROPOUT_LANES_; i++) {
            c0[i] = (uint32_t)index, c1[i] = (uint32_t)(index >> 32), c2[i] = group + (uint32_t)(g + i), c3[i] = dropout->site;
        }
        uint32_t k0 = key_low, k1 = key_high;
        for (int round = 0; round < 10; round++) {
#pragma omp simd
            for (int i = 0; i < CPU_DROPOUT_LANES_; i++) {
                const uint64_t p0 = (uint64_t)0xD2511F53u * c0[i], p1 = (uint64_t)0xCD9E8D57u * c2[i];
                c0[i] = (uint32_t)(p1 >> 32) ^ c1[i] ^ k0, c1[i] = (uint32_t)p1;
                c2[i] = (uint32_t)(p0 >> 32) ^ c3[i] ^ k1, c3[i] = (uint32_t)p0;
            }
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        const int64_t lanes = min_i64(CPU_DROPOUT_LANES_, groups - g);
        float *to = mask + 8 * g;
        for (int64_t i = 0; i < lanes; i++) {
            const uint32_t words[4] = {c0[i], c1[i], c2[i], c3[i]};
            for (int w = 0; w < 4; w++) {
                to[8 * i + 2 * w] = (words[w] & 0xffff) < threshold ? scale : 0.0f;
                to[8 * i + 2 * w + 1] = (words[w] >> 16) < threshold ? scale : 0.0f;
            }
        }
    }
}

// out (N, C) = in * mask; may be in place. Without dropout a copy.
static inline void cpu_dropout_backward(Device *device, Buffer out, Buffer in, const Dropout *dropout, int64_t N, int64_t C) {
    (void)device;
    const bool active = dropout_active(dropout);
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        CPU_SCRATCH(scratch_in);
        CPU_SCRATCH(scratch_out);
        CPU_SCRATCH(mask);
        for (int64_t c = 0; c < C; c += CPU_BLOCK) {
            const int64_t at = n * C + c, width = min_i64(CPU_BLOCK, C - c);
            const float *from = cpu_block_in(in, at, width, scratch_in);
            float *to = cpu_block_out(out, at, scratch_out);
            if (active) {
                cpu_dropout_mask(mask, dropout, n, c, width);
#pragma omp simd
                for (int64_t i = 0; i < width; i++) to[i] = from[i] * mask[i];
            } else {
#pragma omp simd
                for (int64_t i = 0; i < width; i++) to[i] = from[i];
            }
            cpu_block_store(out, at, width, to);
        }
    }
}

#endif
