// classifier.h: softmax + cross-entropy + gradient of the logits on the CPU: in one op, and in two with an exchange between
// them for a vocabulary divided over ranks (the exchange is the caller's); and the sum of losses.
// A row of logits is read from memory once: exponentials are taken block by block against a running offset instead of the
// row's maximum, which would need a walk of its own. Rows of logits and dlogits may be apart (Buffer.row). NaN and infinite logits make the loss of
// their row NaN or infinite.
#ifndef LLMC_CPU_CLASSIFIER_H
#define LLMC_CPU_CLASSIFIER_H

#include "llmc/cpu/block.h" // cpu_block_in, CPU_SCRATCH
#include "llmc/cpu/math.h"  // cpu_exp
#include <math.h>           // log, INFINITY

// exp(x - offset) stays below e^40 and a sum of it over any vocabulary below 1e38: room before the offset must move.
#define CPU_CLASSIFIER_ROOM_ 40.0f

// The largest of n > 0 numbers that are not NaN.
static inline float cpu_classifier_highest_(const float *x, int64_t n) {
    float lane[CPU_LANES];
    const int64_t whole = n / CPU_LANES * CPU_LANES;
    for (int k = 0; k < CPU_LANES; k++) lane[k] = -INFINITY;
    for (int64_t i = 0; i < whole; i += CPU_LANES) {
#pragma omp simd
        for (int k = 0; k < CPU_LANES; k++) lane[k] = x[i + k] > lane[k] ? x[i + k] : lane[k];
    }
    for (int64_t i = whole; i < n; i++) lane[i - whole] = x[i] > lane[i - whole] ? x[i] : lane[i - whole];
    float highest = lane[0];
    for (int k = 1; k < CPU_LANES; k++) highest = lane[k] > highest ? lane[k] : highest;
    return highest;
}

typedef struct {
    double sum;    // of exp(logit - offset)
    float offset;  // within CPU_CLASSIFIER_ROOM_ of the largest logit
    float largest; // logit
} CpuClassifierRow_;

// One row of V > 0 logits, starting at element `row`. Where `store` is not NULL, exp(logit - offset) is left there (it may be
// the logits themselves).
static inline CpuClassifierRow_ cpu_classifier_exponentials_(Buffer logits, int64_t row, int64_t V, float *store) {
    CPU_SCRATCH(scratch);
    double total = 0;
    float shift = 0, largest = -INFINITY;
    for (int64_t v = 0; v < V; v += CPU_BLOCK) {
        const int64_t width = min_i64(CPU_BLOCK, V - v);
        const float *x = cpu_block_in(logits, row + v, width, scratch);
        const float highest = cpu_classifier_highest_(x, width);
        if (v == 0) shift = highest;
        if (highest > largest) largest = highest;
        if (highest - shift > CPU_CLASSIFIER_ROOM_) { // rare: what lies behind is rescaled
            const float factor = cpu_exp(shift - highest);
            total *= (double)factor;
            for (int64_t i = 0; store != NULL && i < v; i++) store[i] *= factor;
            shift = highest;
        }
        float sum = 0;
        if (store != NULL) {
            float *to = store + v;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < width; i++) {
                const float e = cpu_exp(x[i] - shift);
                to[i] = e;
                sum += e;
            }
        } else {
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < width; i++) sum += cpu_exp(x[i] - shift);
        }
        total += (double)sum;
    }
    return (CpuClassifierRow_){total, shift, largest};
}

// Loss and gradient of a token without a target.
static inline void cpu_classifier_masked_(Buffer losses, Buffer dlogits, int64_t n, int64_t V) {
    ((float *)losses.data)[n] = 0.0f;
    if (dlogits.data != NULL) memset(buffer_at(dlogits, n * buffer_row(dlogits, V)).data, 0, (size_t)V * dtype_bytes(dlogits.dtype));
}

static inline float cpu_classifier_at_(Buffer buffer, int64_t at) {
    return buffer.dtype == DTYPE_F32 ? ((const float *)buffer.data)[at] : bf16_to_f32(((const uint16_t *)buffer.data)[at]);
}

// Row n of dlogits = exp(logit - offset) * scale, less dloss at the target, a column of this row or of another rank's.
// `kept`: dlogits (F32) holds the exponentials already.
static inline void cpu_classifier_gradient_(Buffer dlogits, Buffer logits, bool kept, int64_t n, int64_t V, float offset, float scale,
                                            int64_t target, float dloss) {
    CPU_SCRATCH(scratch_in);
    CPU_SCRATCH(scratch_out);
    const int64_t row = n * buffer_row(logits, V), drow = n * buffer_row(dlogits, V);
    for (int64_t v = 0; v < V; v += CPU_BLOCK) {
        const int64_t width = min_i64(CPU_BLOCK, V - v);
        float *to = cpu_block_out(dlogits, drow + v, scratch_out);
        if (kept) {
#pragma omp simd
            for (int64_t i = 0; i < width; i++) to[i] *= scale;
        } else {
            const float *x = cpu_block_in(logits, row + v, width, scratch_in);
#pragma omp simd
            for (int64_t i = 0; i < width; i++) to[i] = cpu_exp(x[i] - offset) * scale;
        }
        if (v <= target && target < v + width) to[target - v] -= dloss;
        cpu_block_store(dlogits, drow + v, width, to);
    }
}

// Masked rows are free: threads take about this many rows when they are done with others.
static inline int64_t cpu_classifier_rows_at_once_(int64_t V) { return max_i64(1, 4096 / max_i64(V, 1)); }

// losses (N) F32 = -log softmax(logits)[target], 0 where target < 0; dlogits (N, V), optional: = (softmax - onehot) * *dloss,
// 0 where target < 0. dlogits may be logits itself when the dtypes agree.
static inline void cpu_cross_entropy(Device *device, Buffer losses, Buffer dlogits, Buffer logits, Buffer targets, const double *dloss, int64_t N,
                                     int64_t V) {
    (void)device;
    const int32_t *target = targets.data;
    // An fp32 dlogits keeps the exponentials of the first walk; bf16 would round them twice, so they are taken again.
    float *kept = dlogits.data != NULL && dlogits.dtype == DTYPE_F32 ? dlogits.data : NULL;
#pragma omp parallel for schedule(dynamic, cpu_classifier_rows_at_once_(V))
    for (int64_t n = 0; n < N; n++) {
        const int64_t row = n * buffer_row(logits, V);
        if (target[n] < 0) {
            cpu_classifier_masked_(losses, dlogits, n, V);
            continue;
        }
        const float target_logit = cpu_classifier_at_(logits, row + target[n]);
        const CpuClassifierRow_ r = cpu_classifier_exponentials_(logits, row, V, kept != NULL ? kept + n * buffer_row(dlogits, V) : NULL);
        ((float *)losses.data)[n] = (float)(log(r.sum) + ((double)r.offset - (double)target_logit));
        if (dlogits.data == NULL) continue;
        cpu_classifier_gradient_(dlogits, logits, kept != NULL, n, V, r.offset, (float)(*dloss / r.sum), target[n], (float)*dloss);
    }
}

// ----------------------------------------------------------------------------
// The vocabulary divided over ranks: a rank holds the columns vocab_begin .. vocab_begin+V-1 of the logits.

typedef struct {
    float largest, sum, target; // logit; of exp(logit - largest); logit of the target, 0 when it is another rank's
} CpuClassifierStats_;
_Static_assert(sizeof(CpuClassifierStats_) == 3 * sizeof(float), "stats are (N, 3)");

// stats (N, 3) F32 =, of this rank's columns; 0 where target < 0
static inline void cpu_cross_entropy_local(Device *device, Buffer stats, Buffer logits, Buffer targets, int64_t vocab_begin, int64_t N, int64_t V) {
    (void)device;
    CpuClassifierStats_ *stat = stats.data;
#pragma omp parallel for schedule(dynamic, cpu_classifier_rows_at_once_(V))
    for (int64_t n = 0; n < N; n++) {
        const int64_t row = n * buffer_row(logits, V), target = ((const int32_t *)targets.data)[n], column = target - vocab_begin;
        stat[n] = (CpuClassifierStats_){0};
        if (target < 0) continue;
        const CpuClassifierRow_ r = cpu_classifier_exponentials_(logits, row, V, NULL);
        stat[n].largest = r.largest;
        stat[n].sum = (float)(r.sum * exp((double)r.offset - (double)r.largest));
        if (column >= 0 && column < V) stat[n].target = cpu_classifier_at_(logits, row + column);
    }
}

// losses (N) F32 and dlogits (N, V, optional) as cpu_cross_entropy's, from all (R, N, 3): the stats of the ranks. Losses are
// computed from these alone, in rank order, so that every rank has the same bits.
static inline void cpu_cross_entropy_merge(Device *device, Buffer losses, Buffer dlogits, Buffer logits, Buffer all, int64_t R, Buffer targets,
                                           const double *dloss, int64_t vocab_begin, int64_t N, int64_t V) {
    (void)device;
    const CpuClassifierStats_ *stat = all.data;
#pragma omp parallel for schedule(dynamic, cpu_classifier_rows_at_once_(V))
    for (int64_t n = 0; n < N; n++) {
        const int64_t target = ((const int32_t *)targets.data)[n];
        if (target < 0) {
            cpu_classifier_masked_(losses, dlogits, n, V);
            continue;
        }
        float largest = -INFINITY;
        double sum = 0, target_logit = 0;
        for (int64_t r = 0; r < R; r++) {
            if (stat[r * N + n].largest > largest) largest = stat[r * N + n].largest;
        }
        for (int64_t r = 0; r < R; r++) {
            const CpuClassifierStats_ *s = &stat[r * N + n];
            sum += (double)s->sum * exp((double)s->largest - (double)largest);
            target_logit += (double)s->target;
        }
        ((float *)losses.data)[n] = (float)(log(sum) + ((double)largest - target_logit));
        if (dlogits.data == NULL) continue;
        cpu_classifier_gradient_(dlogits, logits, false, n, V, largest, (float)(*dloss / sum), target - vocab_begin, (float)*dloss);
    }
}

// state->loss_sum += *scale (NULL: 1) * sum of losses (N), in an order that depends on N only
static inline void cpu_loss_sum(Device *device, StepState *state, Buffer losses, const double *scale, int64_t N) {
    (void)device;
    const float *loss = losses.data;
    double lane[8] = {0};
    for (int64_t n = 0; n < N; n++) lane[n % 8] += (double)loss[n];
    state->loss_sum += (scale != NULL ? *scale : 1.0) * (((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7])));
}

#endif
