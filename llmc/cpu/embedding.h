// embedding.h: look-up of token and position vectors with dropout, forward and backward, on the CPU, for the whole vocabulary
// or a range of it. Ids and positions are in range of the model: they were checked when they were read. Results do not depend
// on the number of threads.
#ifndef LLMC_CPU_EMBEDDING_H
#define LLMC_CPU_EMBEDDING_H

#include "llmc/cpu/block.h"   // cpu_block_in, CPU_SCRATCH
#include "llmc/cpu/dropout.h" // cpu_dropout_mask
#include <omp.h>              // omp_get_max_threads

// out (N, C) = dropout(wte[ids] + wpe[positions]); wpe and dropout optional. wte (V, C) holds the ids from vocab_begin on; the
// vectors of other ids count as zero.
static inline void cpu_embedding_forward(Device *device, Buffer out, Buffer ids, Buffer positions, Buffer wte, Buffer wpe, const Dropout *dropout,
                                         int64_t N, int64_t C, int64_t vocab_begin, int64_t V) {
    (void)device;
    const bool active = dropout_active(dropout);
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        CPU_SCRATCH(scratch_token);
        CPU_SCRATCH(scratch_position);
        CPU_SCRATCH(scratch_out);
        CPU_SCRATCH(mask);
        const int64_t id = ((const int32_t *)ids.data)[n] - vocab_begin;
        const bool ours = id >= 0 && id < V;
        if (!ours) memset(scratch_token, 0, (size_t)min_i64(C, CPU_BLOCK) * sizeof *scratch_token);
        for (int64_t c = 0; c < C; c += CPU_BLOCK) {
            const int64_t at = n * C + c, width = min_i64(CPU_BLOCK, C - c);
            const float *token = ours ? cpu_block_in(wte, id * C + c, width, scratch_token) : scratch_token;
            float *to = cpu_block_out(out, at, scratch_out);
            if (wpe.data != NULL) {
                const int64_t position = ((const int32_t *)positions.data)[n];
                const float *place = cpu_block_in(wpe, position * C + c, width, scratch_position);
#pragma omp simd
                for (int64_t i = 0; i < width; i++) to[i] = token[i] + place[i];
            } else {
#pragma omp simd
                for (int64_t i = 0; i < width; i++) to[i] = token[i];
            }
            if (active) {
                cpu_dropout_mask(mask, dropout, n, c, width);
#pragma omp simd
                for (int64_t i = 0; i < width; i++) to[i] *= mask[i];
            }
            cpu_block_store(out, at, width, to);
        }
    }
}

// dwte (V, C) F32 += for the ids from vocab_begin on, dwpe (positions, C) F32 += for all tokens (optional). The threads share
// the channels and each walks all tokens in order: no two threads meet in an element, a repeated id needs no care, and only
// rows that occur are touched.
static inline void cpu_embedding_backward(Device *device, Buffer dwte, Buffer dwpe, Buffer dout, Buffer ids, Buffer positions,
                                          const Dropout *dropout, int64_t N, int64_t C, int64_t vocab_begin, int64_t V, int64_t max_positions) {
    (void)device, (void)max_positions; // an implementation that sorts by position needs it
    const bool active = dropout_active(dropout);
    const int32_t *id = ids.data, *position = positions.data;
    // Slices of whole cache lines of fp32, which are also whole draws of dropout.
    const int64_t slice = min_i64(round_up(ceil_div(C, omp_get_max_threads()), 16), CPU_BLOCK);
#pragma omp parallel for schedule(static)
    for (int64_t c = 0; c < C; c += slice) {
        CPU_SCRATCH(scratch);
        CPU_SCRATCH(mask);
        const int64_t width = min_i64(slice, C - c);
        for (int64_t n = 0; n < N; n++) {
            const int64_t row = id[n] - vocab_begin;
            const bool ours = row >= 0 && row < V;
            if (!ours && dwpe.data == NULL) continue;
            const float *d = cpu_block_in(dout, n * C + c, width, scratch);
            if (active) {
                cpu_dropout_mask(mask, dropout, n, c, width);
#pragma omp simd
                for (int64_t i = 0; i < width; i++) scratch[i] = d[i] * mask[i];
                d = scratch;
            }
            const int64_t later = n + 2 < N ? id[n + 2] - vocab_begin : -1;
            if (later >= 0 && later < V) { // the rows of ids are at random places: no hardware prefetcher knows the next one
                const float *next = (const float *)dwte.data + later * C + c;
                for (int64_t i = 0; i < width; i += 16) __builtin_prefetch(next + i, 1);
            }
            if (ours) {
                float *to = (float *)dwte.data + row * C + c;
#pragma omp simd
                for (int64_t i = 0; i < width; i++) to[i] += d[i];
            }
            if (dwpe.data == NULL) continue;
            float *place = (float *)dwpe.data + position[n] * C + c;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) place[i] += d[i];
        }
    }
}

#endif
