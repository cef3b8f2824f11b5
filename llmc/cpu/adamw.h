// adamw.h: the decision whether a step counts, and AdamW with clipping and the cast to bf16 in one walk, on the CPU.
// The walk is bound by memory: 28 bytes per parameter in fp32, 30 with bf16 parameters and fp32 masters, 24 without masters.
#ifndef LLMC_CPU_ADAMW_H
#define LLMC_CPU_ADAMW_H

#include "llmc/cpu/block.h"    // cpu_block_in, CPU_SCRATCH
#include "llmc/cpu/segments.h" // cpu_segments_walk
#include <math.h>              // sqrt, sqrtf, pow, isfinite
#include "llmc/rng.h"          // rng_round_bits, rng_round_bf16
#include <omp.h>               // omp_get_num_threads
#include <string.h>            // memcpy

// From loss_sum and grad_squares: grad_norm, clip_coefficient (clip 0 = off), skip; advances optimizer_steps unless skipped.
static inline void cpu_step_decide(Device *device, StepState *state, double clip) {
    (void)device;
    state->grad_norm = sqrt(state->grad_squares);
    state->skip = !isfinite(state->loss_sum) || !isfinite(state->grad_norm);
    const double coefficient = clip / (state->grad_norm + 1e-6);
    state->clip_coefficient = clip > 0 && coefficient < 1.0 ? coefficient : 1.0;
    if (!state->skip) state->optimizer_steps++;
}

// The factors of one update, as floats: p -= lr*wd*p; m, v moments of clip*g; p -= lr * (m/bc1) / (sqrt(v/bc2) + eps).
typedef struct {
    float clip, beta1, beta2, one_minus_beta1, one_minus_beta2;
    float decay;     // lr * weight_decay
    float step_size; // lr / bc1
    float root;      // 1 / sqrt(bc2)
    float eps;
} CpuAdamW_;

static inline CpuAdamW_ cpu_adamw_factors_(const StepState *state, AdamW config) {
    const double steps = (double)state->optimizer_steps;
    return (CpuAdamW_){
        .clip = (float)state->clip_coefficient,
        .beta1 = (float)config.beta1,
        .beta2 = (float)config.beta2,
        .one_minus_beta1 = (float)(1.0 - config.beta1),
        .one_minus_beta2 = (float)(1.0 - config.beta2),
        .decay = (float)(state->lr * config.weight_decay),
        .step_size = (float)(state->lr / (1.0 - pow(config.beta1, steps))),
        .root = (float)(1.0 / sqrt(1.0 - pow(config.beta2, steps))),
        .eps = (float)config.eps,
    };
}

// One run of a segment: w, m, v (count) are updated from g.
static inline void cpu_adamw_run_(float *restrict w, float *restrict m, float *restrict v, const float *restrict g, int64_t count, float decay,
                                  CpuAdamW_ f) {
#pragma omp simd
    for (int64_t i = 0; i < count; i++) {
        const float gradient = f.clip * g[i];
        const float mean = f.beta1 * m[i] + f.one_minus_beta1 * gradient;
        const float square = f.beta2 * v[i] + f.one_minus_beta2 * gradient * gradient;
        m[i] = mean;
        v[i] = square;
        w[i] -= decay * w[i] + f.step_size * mean / (sqrtf(square) * f.root + f.eps); // 1 - decay would round most of decay away
    }
}

// n elements of param from `at` on = the block, rounded at random.
static inline void cpu_adamw_round_(Buffer param, int64_t at, int64_t n, const float *block, Rounding rounding) {
    uint16_t *out = (uint16_t *)param.data + at, random[8];
    for (int64_t i = 0, place = rounding.first + at; i < n; i++, place++) {
        if (i == 0 || place % 8 == 0) rng_round_bits(rounding.key, rounding.unit, (uint64_t)place / 8, random);
        uint32_t bits;
        memcpy(&bits, &block[i], sizeof bits);
        out[i] = rng_round_bf16(bits, random[place % 8]);
    }
}

// AdamW (Loshchilov & Hutter 2019) on the elements of the segments; nothing when state->skip. param F32, BF16 with an F32 master, or BF16 that is
// rounded at random; m, v, grad F32. One parallel region; the threads share the elements equally, across tensors.
static inline void cpu_adamw(Device *device, const StepState *state, Buffer param, Buffer master, Buffer m, Buffer v, Buffer grad,
                             const Segment *segments, int64_t count, AdamW config) {
    (void)device;
    if (state->skip) return;
    const CpuAdamW_ factors = cpu_adamw_factors_(state, config);
    const int64_t total = cpu_segments_total(segments, count);
    const Buffer weights = master.data != NULL ? master : param;
    const bool random = weights.dtype == DTYPE_BF16;
#pragma omp parallel
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t share = round_up(ceil_div(total, threads), 32); // whole cache lines, if the segments start on them
        const int64_t from = min_i64(share * thread, total), to = min_i64(from + share, total);
        CpuSegmentWalk walk = cpu_segments_walk(segments, from, to);
        Segment run;
        CPU_SCRATCH(scratch);
        while (cpu_segments_next(&walk, CPU_BLOCK, &run)) {
            float *w = random ? scratch : (float *)weights.data + run.begin;
            if (random) (void)cpu_block_in(weights, run.begin, run.count, scratch);
            cpu_adamw_run_(w, (float *)m.data + run.begin, (float *)v.data + run.begin, (const float *)grad.data + run.begin, run.count,
                           run.decay ? factors.decay : 0.0f, factors);
            if (master.data != NULL) cpu_block_store(param, run.begin, run.count, w);
            if (random) cpu_adamw_round_(param, run.begin, run.count, w, config.rounding);
        }
    }
}

#endif
