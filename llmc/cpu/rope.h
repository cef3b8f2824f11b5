// rope.h: what happens to q and k before attention on the CPU device: RMSNorm per head (optional), then rotation of the
// halves by position (optional), forward and backward. Memory-bound: one pass over the tokens, each head once through registers
// and L1. The table of cosines and sines is filled by llmc/rope.h.
#ifndef LLMC_CPU_ROPE_H
#define LLMC_CPU_ROPE_H

#include "llmc/base.h"     // ceil_div, min_i64, max_i64
#include "llmc/cpu/math.h" // cpu_to_bf16
#include "llmc/device.h"   // Device, Buffer, AttentionShape
#include <math.h>          // sqrtf

enum {
    ROPE_MAX_HEAD_ = 128, // head size
    // Gradients of the norms' weights are summed in this many runs of tokens, then over the runs in order: the number is fixed, so
    // that the bits do not depend on the number of threads.
    ROPE_RUNS_ = 64,
};

static inline void rope_load_(float *restrict head, Buffer from, int64_t at, int64_t HS) {
    if (from.dtype == DTYPE_BF16) {
        const uint16_t *restrict row = (const uint16_t *)from.data + at;
#pragma omp simd
        for (int64_t d = 0; d < HS; d++) head[d] = bf16_to_f32(row[d]);
    } else {
        memcpy(head, (const float *)from.data + at, (size_t)HS * sizeof(float));
    }
}

static inline void rope_store_(Buffer to, int64_t at, const float *restrict head, int64_t HS) {
    if (to.dtype == DTYPE_BF16) {
        uint16_t *restrict row = (uint16_t *)to.data + at;
#pragma omp simd
        for (int64_t d = 0; d < HS; d++) row[d] = cpu_to_bf16(head[d]);
    } else {
        memcpy((float *)to.data + at, head, (size_t)HS * sizeof(float));
    }
}

// Turns the pairs (head[i], head[i + HS/2]) by the angles of a table row; direction -1 turns back.
static inline void rope_rotate_(float *restrict head, const float *restrict row, float direction, int64_t HS) {
    const int64_t half = HS / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        const float cosine = row[i], sine = direction * row[half + i], x1 = head[i], x2 = head[half + i];
        head[i] = x1 * cosine - x2 * sine;
        head[half + i] = x2 * cosine + x1 * sine;
    }
}

static inline float rope_sum_squares_(const float *head, int64_t HS) {
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t d = 0; d < HS; d++) sum += head[d] * head[d];
    return sum;
}

static inline const float *rope_row_(Buffer rope, Buffer positions, int64_t token, int64_t HS) {
    return (const float *)rope.data + (int64_t)((const int32_t *)positions.data)[token] * HS;
}

static inline void cpu_qk_forward(Device *device, Buffer qkv_out, Buffer rstd, Buffer qkv_in, Buffer q_norm, Buffer k_norm, double eps, Buffer rope,
                                  Buffer positions, AttentionShape shape, int64_t N) {
    (void)device;
    const int64_t HS = shape.head_size, heads = shape.heads + shape.kv_heads, stride = (heads + shape.kv_heads) * HS;
    const bool normed = q_norm.data != NULL;
    float weights[2][ROPE_MAX_HEAD_];
    if (normed) rope_load_(weights[0], q_norm, 0, HS), rope_load_(weights[1], k_norm, 0, HS);
#pragma omp parallel for schedule(static)
    for (int64_t token = 0; token < N; token++) {
        const float *row = rope.data != NULL ? rope_row_(rope, positions, token, HS) : NULL;
        for (int64_t h = 0; h < heads; h++) {
            const int64_t at = token * stride + h * HS;
            float head[ROPE_MAX_HEAD_];
            rope_load_(head, qkv_in, at, HS);
            if (normed) {
                const float *weight = weights[h >= shape.heads];
                const float r = 1.0f / sqrtf(rope_sum_squares_(head, HS) / (float)HS + (float)eps);
                ((float *)rstd.data)[token * heads + h] = r;
#pragma omp simd
                for (int64_t d = 0; d < HS; d++) head[d] = head[d] * r * weight[d];
            }
            if (row != NULL) rope_rotate_(head, row, 1.0f, HS);
            rope_store_(qkv_out, at, head, HS);
        }
        if (qkv_out.data != qkv_in.data) {
            const int64_t at = token * stride + heads * HS;
            memcpy(buffer_at(qkv_out, at).data, buffer_at(qkv_in, at).data, (size_t)(shape.kv_heads * HS) * dtype_bytes(qkv_in.dtype));
        }
    }
}

// Of RMSNorm y = x * r * weight with r = (mean(x^2) + eps)^(-1/2): dweight += dy * x * r, and dy becomes
// dx = r * (weight * dy - x * r * mean(weight * dy * x * r)).
static inline void rope_norm_backward_(float *restrict dhead, float *restrict dweight, const float *restrict head, const float *restrict weight,
                                       float r, int64_t HS) {
    float dot = 0.0f;
#pragma omp simd reduction(+ : dot)
    for (int64_t d = 0; d < HS; d++) dot += weight[d] * dhead[d] * (head[d] * r);
    const float mean = dot / (float)HS;
#pragma omp simd
    for (int64_t d = 0; d < HS; d++) {
        const float normal = head[d] * r;
        dweight[d] += dhead[d] * normal;
        dhead[d] = r * (weight[d] * dhead[d] - normal * mean);
    }
}

static inline void cpu_qk_backward(Device *device, Buffer dqkv, Buffer dq_norm, Buffer dk_norm, bool accumulate, Buffer qkv_in, Buffer rstd,
                                   Buffer q_norm, Buffer k_norm, Buffer rope, Buffer positions, AttentionShape shape, int64_t N) {
    (void)device;
    const int64_t HS = shape.head_size, heads = shape.heads + shape.kv_heads, stride = (heads + shape.kv_heads) * HS;
    const bool normed = q_norm.data != NULL;
    if (!normed && rope.data == NULL) return;
    float weights[2][ROPE_MAX_HEAD_];
    if (normed) rope_load_(weights[0], q_norm, 0, HS), rope_load_(weights[1], k_norm, 0, HS);
    double partial[ROPE_RUNS_][2][ROPE_MAX_HEAD_] = {{{0}}}; // double: a run may be long, and its sum grows
    const int64_t run_tokens = max_i64(1, ceil_div(N, ROPE_RUNS_));
#pragma omp parallel for schedule(static)
    for (int64_t run = 0; run < ROPE_RUNS_; run++) {
        for (int64_t token = run * run_tokens; token < min_i64(N, (run + 1) * run_tokens); token++) {
            const float *row = rope.data != NULL ? rope_row_(rope, positions, token, HS) : NULL;
            float dweight[2][ROPE_MAX_HEAD_] = {{0}}; // of this token's heads
            for (int64_t h = 0; h < heads; h++) {
                const int64_t at = token * stride + h * HS;
                float head[ROPE_MAX_HEAD_], dhead[ROPE_MAX_HEAD_];
                rope_load_(dhead, dqkv, at, HS);
                if (row != NULL) rope_rotate_(dhead, row, -1.0f, HS);
                if (normed) {
                    const int kind = h >= shape.heads; // 0 q, 1 k
                    rope_load_(head, qkv_in, at, HS);
                    rope_norm_backward_(dhead, dweight[kind], head, weights[kind], ((const float *)rstd.data)[token * heads + h], HS);
                }
                rope_store_(dqkv, at, dhead, HS);
            }
            for (int kind = 0; kind < 2 && normed; kind++) {
                for (int64_t d = 0; d < HS; d++) partial[run][kind][d] += (double)dweight[kind][d];
            }
        }
    }
    for (int kind = 0; kind < 2 && normed; kind++) {
        float *restrict gradient = kind == 0 ? dq_norm.data : dk_norm.data;
        for (int64_t d = 0; d < HS; d++) {
            double sum = 0;
            for (int run = 0; run < ROPE_RUNS_; run++) sum += partial[run][kind][d];
            gradient[d] = (accumulate ? gradient[d] : 0.0f) + (float)sum;
        }
    }
}

#endif
