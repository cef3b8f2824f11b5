// attention.h: packed causal attention of the CPU device, forward and backward, with grouped-query heads. Online softmax
// over blocks of 64 keys (Dao 2023, FlashAttention-2): the forward pass saves one log-sum-exp per row, the backward pass
// recomputes the probabilities, and nothing of size T x T exists. Knows nothing of positions (cpu/rope.h) or dropout.
//
// How it computes. Every piece of q, k, v and their gradients is first copied into a small fp32 tile (rows padded to a multiple
// of 16 channels), which also converts bf16 and avoids the cache conflicts of rows that are a power of two apart. Two
// register-blocked products do the work: attention_dot_ (rows x transposed tile = scores) and attention_add_ (scores x
// rows, added to a tile). The transposed operand is the one that a task keeps: q where a task owns queries, k and v where it owns
// keys. So nothing is transposed in an inner loop, and the softmax over keys runs down columns: no horizontal sums.
// On the diagonal, products stop at the causal boundary in steps of 4 rows and 16 columns.
//
// Same bits for every thread count: no sum is split between tasks, and the three ways to run the backward pass (below) perform
// the same operations in the same order.
#ifndef LLMC_CPU_ATTENTION_H
#define LLMC_CPU_ATTENTION_H

#include "llmc/base.h"               // ceil_div, round_up, min_i64, max_i64
#include "llmc/cpu/attention_tile.h" // attention_dot_, attention_add_*, attention_load_, attention_store_, attention_transpose_
#include "llmc/cpu/math.h"           // cpu_exp
#include "llmc/device.h"             // Device, Buffer, Packing, AttentionShape
#include <float.h>                   // FLT_MAX
#include <math.h>                    // sqrt, logf, INFINITY
#include <omp.h>                     // omp_get_max_threads

enum { ATTENTION_SCRATCH_ = 252 * 1024 / (int)sizeof(float) }; // floats on a thread's stack, backward pass

// ----------------------------------------------------------------------------
// One call's operands

typedef struct {
    Buffer out, lse, qkv, dout, dqkv, delta; // the last three in the backward pass
    const int32_t *cu_seqlens;
    int64_t documents, N, NH, NKV, HS, group; // group: query heads of a key/value head
    int64_t width;                            // HS rounded up to whole vectors
    int64_t qkv_stride, out_stride;           // elements between tokens
    float scale;                              // 1/sqrt(HS)
} AttentionCall_;

static inline AttentionCall_ attention_call_(const Packing *packing, AttentionShape shape) {
    const int64_t NH = shape.heads, NKV = shape.kv_heads, HS = shape.head_size;
    return (AttentionCall_){.cu_seqlens = packing->cu_seqlens.data,
                            .documents = packing->documents,
                            .N = packing->tokens,
                            .NH = NH,
                            .NKV = NKV,
                            .HS = HS,
                            .group = NH / NKV,
                            .width = round_up(HS, ATTENTION_LANES_),
                            .qkv_stride = (NH + 2 * NKV) * HS,
                            .out_stride = NH * HS,
                            .scale = (float)(1.0 / sqrt((double)HS))};
}

// Elements of qkv (and dqkv), and of out (and dout), where a head of a token begins.
static inline int64_t attention_q_at_(const AttentionCall_ *c, int64_t token, int64_t head) { return token * c->qkv_stride + head * c->HS; }
static inline int64_t attention_k_at_(const AttentionCall_ *c, int64_t token, int64_t kv) { return attention_q_at_(c, token, c->NH + kv); }
static inline int64_t attention_v_at_(const AttentionCall_ *c, int64_t token, int64_t kv) { return attention_q_at_(c, token, c->NH + c->NKV + kv); }
static inline int64_t attention_out_at_(const AttentionCall_ *c, int64_t token, int64_t head) { return token * c->out_stride + head * c->HS; }

// Tasks are numbered document by document, block by block, head by head. A thread meets rising numbers, so that a cursor
// that only moves forward finds the document of a task without a table.
typedef struct {
    int64_t document, first; // first: number of the document's first task
} AttentionCursor_;

typedef struct {
    int64_t begin, length; // tokens of the document
    int64_t block, head;   // block of 64 tokens
    int64_t blocks;        // of the document
} AttentionTask_;

static inline int64_t attention_blocks_(const AttentionCall_ *c, int64_t document) {
    return ceil_div((int64_t)c->cu_seqlens[document + 1] - c->cu_seqlens[document], ATTENTION_BLOCK_);
}

// whole: a task is a whole document (of a head), not a block of it
static inline AttentionTask_ attention_task_(const AttentionCall_ *c, AttentionCursor_ *cursor, int64_t number, int64_t heads, bool whole) {
    int64_t blocks = attention_blocks_(c, cursor->document);
    for (;;) {
        const int64_t tasks = whole ? heads : blocks * heads;
        if (number < cursor->first + tasks) break;
        cursor->first += tasks;
        blocks = attention_blocks_(c, ++cursor->document);
    }
    const int64_t begin = c->cu_seqlens[cursor->document], rest = number - cursor->first;
    return (AttentionTask_){
        .begin = begin, .length = c->cu_seqlens[cursor->document + 1] - begin, .block = rest / heads, .head = rest % heads, .blocks = blocks};
}

// ----------------------------------------------------------------------------
// Forward

// One step of the online softmax on score (keys, 64): becomes exp(scale*score - scale*maximum); updates maximum, sum (64) and
// gives the factor (64) of what was summed before. Column vector v holds keys 0..16v+15 where `diagonal`.
static inline void attention_softmax_(float *score, int64_t keys, int64_t vectors, bool diagonal, float scale, float *maximum, float *sum,
                                      float *factor) {
    for (int64_t v = 0; v < vectors; v++) {
        const int64_t column = v * ATTENTION_LANES_, count = diagonal ? min_i64(keys, column + ATTENTION_LANES_) : keys;
        float top[ATTENTION_LANES_], total[ATTENTION_LANES_];
        if (diagonal) {
            for (int64_t j = column + 1; j < count; j++) {
                for (int64_t i = column; i < j; i++) score[j * ATTENTION_BLOCK_ + i] = -INFINITY;
            }
        }
        memcpy(top, maximum + column, sizeof top);
        for (int64_t j = 0; j < count; j++) {
            const float *restrict row = score + j * ATTENTION_BLOCK_ + column;
#pragma omp simd
            for (int i = 0; i < ATTENTION_LANES_; i++) top[i] = row[i] > top[i] ? row[i] : top[i];
        }
        // top starts at -FLT_MAX, not -infinity, so that no difference below is infinity minus infinity.
#pragma omp simd
        for (int i = 0; i < ATTENTION_LANES_; i++) {
            factor[column + i] = cpu_exp(scale * (maximum[column + i] - top[i]));
            maximum[column + i] = top[i];
            top[i] *= scale;
            total[i] = 0.0f;
        }
        for (int64_t j = 0; j < count; j++) {
            float *restrict row = score + j * ATTENTION_BLOCK_ + column;
#pragma omp simd
            for (int i = 0; i < ATTENTION_LANES_; i++) {
                row[i] = cpu_exp(scale * row[i] - top[i]);
                total[i] += row[i];
            }
        }
#pragma omp simd
        for (int i = 0; i < ATTENTION_LANES_; i++) sum[column + i] = sum[column + i] * factor[column + i] + total[i];
    }
}

// 64 queries of a head against all keys before them. score (keys, 64 queries).
static inline void attention_forward_task_(const AttentionCall_ *c, AttentionTask_ task) {
    _Alignas(64) float query[ATTENTION_TILE_], rows[ATTENTION_TILE_], value[ATTENTION_TILE_], out[ATTENTION_TILE_];
    _Alignas(64) float score[ATTENTION_BLOCK_ * ATTENTION_BLOCK_], maximum[ATTENTION_BLOCK_], sum[ATTENTION_BLOCK_], factor[ATTENTION_BLOCK_];
    const int64_t first = task.block * ATTENTION_BLOCK_, queries = min_i64(ATTENTION_BLOCK_, task.length - first), width = c->width;
    const int64_t vectors = ceil_div(queries, ATTENTION_LANES_), kv = task.head / c->group;
    attention_load_(rows, width, c->qkv, attention_q_at_(c, task.begin + first, task.head), c->qkv_stride, queries, c->HS);
    attention_transpose_(query, rows, width, queries);
    memset(out, 0, (size_t)(round_up(queries, ATTENTION_ROWS_) * width) * sizeof(float));
    for (int i = 0; i < ATTENTION_BLOCK_; i++) maximum[i] = -FLT_MAX, sum[i] = 0.0f;

    for (int64_t block = 0; block <= task.block; block++) {
        const int64_t token = task.begin + block * ATTENTION_BLOCK_;
        const bool diagonal = block == task.block;
        const int64_t keys = diagonal ? queries : ATTENTION_BLOCK_, padded = round_up(keys, ATTENTION_ROWS_);
        float *key = rows;
        attention_load_(key, width, c->qkv, attention_k_at_(c, token, kv), c->qkv_stride, keys, c->HS);
        attention_load_(value, width, c->qkv, attention_v_at_(c, token, kv), c->qkv_stride, keys, c->HS);
        const int64_t next = token + ATTENTION_BLOCK_, coming = diagonal ? 0 : min_i64(ATTENTION_BLOCK_, task.begin + first + queries - next);
        attention_prefetch_(c->qkv, attention_k_at_(c, next, kv), c->qkv_stride, coming, c->HS);
        attention_prefetch_(c->qkv, attention_v_at_(c, next, kv), c->qkv_stride, coming, c->HS);
        for (int64_t j = 0; j < keys; j += ATTENTION_ROWS_) {
            const int64_t skip = diagonal ? j / ATTENTION_LANES_ : 0, column = skip * ATTENTION_LANES_; // queries before these keys
            attention_dot_(score + j * ATTENTION_BLOCK_ + column, key + j * width, width, query + column, width, vectors - skip);
        }
        attention_softmax_(score, padded, vectors, diagonal, c->scale, maximum, sum, factor);
        for (int64_t i = 0; i < queries; i += ATTENTION_ROWS_) {
            const int64_t count = diagonal ? i + ATTENTION_ROWS_ : keys;
            attention_add_columns_(out + i * width, factor + i, score + i, value, width, count);
        }
    }

    float *lse = (float *)c->lse.data + task.head * c->N + task.begin + first;
    for (int64_t i = 0; i < queries; i++) {
        lse[i] = maximum[i] * c->scale + logf(sum[i]);
        sum[i] = 1.0f / sum[i];
    }
    attention_store_(c->out, attention_out_at_(c, task.begin + first, task.head), c->out_stride, out, width, queries, c->HS, 1.0f, sum);
}

static inline int64_t attention_task_count_(const AttentionCall_ *c, int64_t heads) {
    int64_t count = 0;
    for (int64_t s = 0; s < c->documents; s++) count += attention_blocks_(c, s) * heads;
    return count;
}

// Tasks taken at once by a thread: many tiny documents must not queue for the counter.
static inline int attention_chunk_(int64_t tasks) { return (int)max_i64(1, min_i64(16, tasks / (64 * (int64_t)omp_get_max_threads()))); }

// Heavy blocks (those with most keys) come first within a document, so that the last tasks to be taken are short.
static inline void cpu_attention_forward(Device *device, Buffer out, Buffer lse, Buffer qkv, const Packing *packing, AttentionShape shape) {
    (void)device;
    AttentionCall_ call = attention_call_(packing, shape);
    call.out = out, call.lse = lse, call.qkv = qkv;
    const int64_t tasks = attention_task_count_(&call, call.NH);
    const int chunk = attention_chunk_(tasks);
#pragma omp parallel
    {
        AttentionCursor_ cursor = {0};
#pragma omp for schedule(monotonic : dynamic, chunk)
        for (int64_t number = 0; number < tasks; number++) {
            AttentionTask_ task = attention_task_(&call, &cursor, number, call.NH, false);
            task.block = task.blocks - 1 - task.block;
            attention_forward_task_(&call, task);
        }
    }
}

// ----------------------------------------------------------------------------
// Backward. With P = exp(scale*q k^T - lse) and dS = P * (dout v^T - delta): dv = P^T dout, dk = scale * dS^T q,
// dq = scale * dS k (Dao et al. 2022, appendix B.2). Two kinds of task:
//   keys     64 keys of a kv head: dk and dv, over all query heads of its group in order, all queries at or after the keys
//   queries  64 queries of a head: dq
// and a fused form, where one task runs over all keys of a document and adds dq up on the way: 5 products instead of 7. It is
// used when there are enough documents and kv heads for the threads. fp32 adds dq up in dqkv itself, bf16 in the stack's scratch,
// where a document is short enough.

// P, and dP -> dS, of one score row: columns 0..16*vectors-1, of which `seen` are visible.
ATTENTION_INLINE_ void attention_score_gradient_row_(float *restrict score, float *restrict gradient, int64_t vectors, int64_t seen, float scale,
                                                     float lse, float delta) {
    const int64_t columns = vectors * ATTENTION_LANES_;
    if (seen >= columns) {
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) {
            score[j] = cpu_exp(scale * score[j] - lse);
            gradient[j] = score[j] * (gradient[j] - delta);
        }
    } else {
#pragma omp simd
        for (int64_t j = 0; j < columns; j++) {
            const float p = cpu_exp(scale * score[j] - lse);
            score[j] = j < seen ? p : 0.0f;
            gradient[j] = j < seen ? p * (gradient[j] - delta) : 0.0f;
        }
    }
}

// dq of a document's heads while it is being added up: (tokens, HS) F32 per head of the group
typedef struct {
    float *data; // absent: this task does not compute dq
    int64_t stride, head_stride;
} AttentionSums_;

// Rows of queries taken at once by the tasks of keys: 32 for wide heads, so that all tiles fit the scratch.
static inline int64_t attention_query_rows_(int64_t width) { return width <= ATTENTION_MAX_HEAD_ / 2 ? ATTENTION_BLOCK_ : ATTENTION_BLOCK_ / 2; }
// Floats of scratch that attention_backward_keys_ takes.
static inline int64_t attention_backward_floats_(int64_t width) {
    return ATTENTION_BLOCK_ * width * 5 + attention_query_rows_(width) * (width * 3 + ATTENTION_BLOCK_ * 2);
}

// 64 keys of a kv head: dk, dv and, with `sums`, their part of dq. score, gradient (queries, 64 keys).
static inline void attention_backward_keys_(const AttentionCall_ *c, AttentionTask_ task, AttentionSums_ sums, float *scratch) {
    const int64_t width = c->width, first = task.block * ATTENTION_BLOCK_, keys = min_i64(ATTENTION_BLOCK_, task.length - first);
    const int64_t rows = attention_query_rows_(width), tile = ATTENTION_BLOCK_ * width;
    float *key = scratch, *key_columns = key + tile, *value_columns = key_columns + tile, *dkey = value_columns + tile, *dvalue = dkey + tile;
    float *query = dvalue + tile, *dout = query + rows * width, *dquery = dout + rows * width;
    float *score = dquery + rows * width, *gradient = score + rows * ATTENTION_BLOCK_;
    float lse[ATTENTION_BLOCK_], delta[ATTENTION_BLOCK_];

    attention_load_(key, width, c->qkv, attention_v_at_(c, task.begin + first, task.head), c->qkv_stride, keys, c->HS);
    attention_transpose_(value_columns, key, width, keys);
    attention_load_(key, width, c->qkv, attention_k_at_(c, task.begin + first, task.head), c->qkv_stride, keys, c->HS);
    attention_transpose_(key_columns, key, width, keys);
    memset(dkey, 0, (size_t)(2 * tile) * sizeof(float));

    for (int64_t g = 0; g < c->group; g++) {
        const int64_t head = task.head * c->group + g;
        for (int64_t begin = first; begin < task.length; begin += rows) {
            const int64_t queries = min_i64(rows, task.length - begin), padded = round_up(queries, ATTENTION_ROWS_);
            const int64_t offset = begin - first, token = task.begin + begin; // query i sees keys 0..offset+i of the block
            attention_load_(query, width, c->qkv, attention_q_at_(c, token, head), c->qkv_stride, queries, c->HS);
            attention_load_(dout, width, c->dout, attention_out_at_(c, token, head), c->out_stride, queries, c->HS);
            const int64_t coming = min_i64(rows, task.length - begin - queries);
            attention_prefetch_(c->qkv, attention_q_at_(c, token + rows, head), c->qkv_stride, coming, c->HS);
            attention_prefetch_(c->dout, attention_out_at_(c, token + rows, head), c->out_stride, coming, c->HS);
            for (int64_t i = 0; i < padded; i++) { // a row of padding has P = exp(0 - infinity) = 0
                lse[i] = i < queries ? ((const float *)c->lse.data)[head * c->N + token + i] : INFINITY;
                delta[i] = i < queries ? ((const float *)c->delta.data)[head * c->N + token + i] : 0.0f;
            }
            for (int64_t i = 0; i < padded; i += ATTENTION_ROWS_) {
                const int64_t vectors = ceil_div(min_i64(keys, offset + i + ATTENTION_ROWS_), ATTENTION_LANES_);
                float *s = score + i * ATTENTION_BLOCK_, *ds = gradient + i * ATTENTION_BLOCK_;
                attention_dot_(s, query + i * width, width, key_columns, width, vectors);
                attention_dot_(ds, dout + i * width, width, value_columns, width, vectors);
                for (int64_t r = 0; r < ATTENTION_ROWS_; r++) {
                    attention_score_gradient_row_(s + r * ATTENTION_BLOCK_, ds + r * ATTENTION_BLOCK_, vectors, offset + i + r + 1, c->scale,
                                                  lse[i + r], delta[i + r]);
                }
            }
            for (int64_t j = 0; j < keys; j += ATTENTION_ROWS_) {
                const int64_t skip = max_i64(0, j - offset); // queries before these keys
                if (skip >= padded) break;
                const int64_t at = skip * ATTENTION_BLOCK_ + j;
                attention_add_columns_(dvalue + j * width, NULL, score + at, dout + skip * width, width, padded - skip);
                attention_add_columns_(dkey + j * width, NULL, gradient + at, query + skip * width, width, padded - skip);
            }
            if (sums.data == NULL) continue;
            const Buffer sum = buffer_of(sums.data + g * sums.head_stride + begin * sums.stride, DTYPE_F32);
            if (first == 0) {
                memset(dquery, 0, (size_t)(padded * width) * sizeof(float));
            } else {
                attention_load_(dquery, width, sum, 0, sums.stride, queries, c->HS);
            }
            for (int64_t i = 0; i < padded; i += ATTENTION_ROWS_) {
                const int64_t count = min_i64(round_up(keys, ATTENTION_ROWS_), offset + i + ATTENTION_ROWS_);
                attention_add_rows_(dquery + i * width, gradient + i * ATTENTION_BLOCK_, key, width, count);
            }
            if (offset < ATTENTION_BLOCK_) { // these are the last keys that the queries see
                attention_store_(c->dqkv, attention_q_at_(c, token, head), c->qkv_stride, dquery, width, queries, c->HS, c->scale, NULL);
            } else {
                attention_store_(sum, 0, sums.stride, dquery, width, queries, c->HS, 1.0f, NULL);
            }
        }
    }
    attention_store_(c->dqkv, attention_k_at_(c, task.begin + first, task.head), c->qkv_stride, dkey, width, keys, c->HS, c->scale, NULL);
    attention_store_(c->dqkv, attention_v_at_(c, task.begin + first, task.head), c->qkv_stride, dvalue, width, keys, c->HS, 1.0f, NULL);
}

// 64 queries of a head: dq. score, gradient (keys, 64 queries).
static inline void attention_backward_queries_(const AttentionCall_ *c, AttentionTask_ task, float *scratch) {
    const int64_t width = c->width, first = task.block * ATTENTION_BLOCK_, queries = min_i64(ATTENTION_BLOCK_, task.length - first);
    const int64_t vectors = ceil_div(queries, ATTENTION_LANES_), kv = task.head / c->group, tile = ATTENTION_BLOCK_ * width;
    float *key = scratch, *value = key + tile, *query_columns = value + tile, *dout_columns = query_columns + tile;
    float *dquery = dout_columns + tile, *score = dquery + tile, *gradient = score + ATTENTION_BLOCK_ * ATTENTION_BLOCK_;
    float lse[ATTENTION_BLOCK_] = {0}, delta[ATTENTION_BLOCK_] = {0};
    const int64_t token = task.begin + first;

    attention_load_(key, width, c->qkv, attention_q_at_(c, token, task.head), c->qkv_stride, queries, c->HS);
    attention_transpose_(query_columns, key, width, queries);
    attention_load_(key, width, c->dout, attention_out_at_(c, token, task.head), c->out_stride, queries, c->HS);
    attention_transpose_(dout_columns, key, width, queries);
    memcpy(lse, (const float *)c->lse.data + task.head * c->N + token, (size_t)queries * sizeof(float));
    memcpy(delta, (const float *)c->delta.data + task.head * c->N + token, (size_t)queries * sizeof(float));
    memset(dquery, 0, (size_t)tile * sizeof(float));

    for (int64_t block = 0; block <= task.block; block++) {
        const bool diagonal = block == task.block;
        const int64_t keys = diagonal ? queries : ATTENTION_BLOCK_, at = task.begin + block * ATTENTION_BLOCK_;
        attention_load_(key, width, c->qkv, attention_k_at_(c, at, kv), c->qkv_stride, keys, c->HS);
        attention_load_(value, width, c->qkv, attention_v_at_(c, at, kv), c->qkv_stride, keys, c->HS);
        for (int64_t j = 0; j < keys; j += ATTENTION_ROWS_) {
            const int64_t column = diagonal ? j / ATTENTION_LANES_ * ATTENTION_LANES_ : 0, count = vectors - column / ATTENTION_LANES_;
            float *s = score + j * ATTENTION_BLOCK_, *ds = gradient + j * ATTENTION_BLOCK_;
            attention_dot_(s + column, key + j * width, width, query_columns + column, width, count);
            attention_dot_(ds + column, value + j * width, width, dout_columns + column, width, count);
            for (int64_t r = 0; r < ATTENTION_ROWS_; r++) {
                const int64_t visible = diagonal ? j + r : 0; // queries from here on see the key
                float *restrict sr = s + r * ATTENTION_BLOCK_, *restrict dsr = ds + r * ATTENTION_BLOCK_;
#pragma omp simd
                for (int64_t i = column; i < column + count * ATTENTION_LANES_; i++) {
                    const float p = cpu_exp(c->scale * sr[i] - lse[i]);
                    dsr[i] = i >= visible ? p * (dsr[i] - delta[i]) : 0.0f;
                }
            }
        }
        for (int64_t i = 0; i < queries; i += ATTENTION_ROWS_) {
            const int64_t count = diagonal ? i + ATTENTION_ROWS_ : keys;
            attention_add_columns_(dquery + i * width, NULL, gradient + i, key, width, count);
        }
    }
    attention_store_(c->dqkv, attention_q_at_(c, token, task.head), c->qkv_stride, dquery, width, queries, c->HS, c->scale, NULL);
}

// One document of a kv head, all of its keys in order.
static inline void attention_backward_fused_(const AttentionCall_ *c, AttentionTask_ task, float *scratch) {
    AttentionSums_ sums;
    if (c->dqkv.dtype == DTYPE_F32) {
        sums.data = (float *)c->dqkv.data + attention_q_at_(c, task.begin, task.head * c->group);
        sums.stride = c->qkv_stride, sums.head_stride = c->HS;
    } else {
        sums.data = scratch + attention_backward_floats_(c->width);
        sums.stride = c->width, sums.head_stride = task.length * c->width;
    }
    for (task.block = 0; task.block < task.blocks; task.block++) attention_backward_keys_(c, task, sums, scratch);
}

// Whether to fuse. Costs are in tiles of 64 x 64 per kv head. Fused: no thread works longer than an even share plus the longest
// document, nor (equal documents) than its number of tasks times that; otherwise 7/5 of an even share.
static inline bool attention_fuses_(const AttentionCall_ *c, int64_t max_length) {
    const int64_t sums = c->group * max_length * c->width;
    if (c->dqkv.dtype != DTYPE_F32 && attention_backward_floats_(c->width) + sums > ATTENTION_SCRATCH_) return false;
    const int64_t threads = omp_get_max_threads();
    double total = 0, longest = 0;
    for (int64_t s = 0; s < c->documents; s++) {
        const double blocks = (double)attention_blocks_(c, s), cost = blocks * (blocks + 1) / 2;
        total += cost * (double)c->NKV;
        longest = cost > longest ? cost : longest;
    }
    const double share = total / (double)threads, in_turn = longest * (double)ceil_div(c->documents * c->NKV, threads);
    return threads == 1 || share + longest <= 1.4 * share || in_turn <= 1.4 * share;
}

// delta (NH, N) = row sums of dout * out
static inline void attention_delta_token_(const AttentionCall_ *c, int64_t token) {
    for (int64_t head = 0; head < c->NH; head++) {
        const int64_t at = attention_out_at_(c, token, head);
        float sum = 0.0f;
        if (c->out.dtype == DTYPE_BF16) {
            const uint16_t *out = (const uint16_t *)c->out.data + at, *dout = (const uint16_t *)c->dout.data + at;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < c->HS; d++) sum += bf16_to_f32(out[d]) * bf16_to_f32(dout[d]);
        } else {
            const float *out = (const float *)c->out.data + at, *dout = (const float *)c->dout.data + at;
#pragma omp simd reduction(+ : sum)
            for (int64_t d = 0; d < c->HS; d++) sum += out[d] * dout[d];
        }
        ((float *)c->delta.data)[head * c->N + token] = sum;
    }
}

static inline void cpu_attention_backward(Device *device, Buffer dqkv, Buffer delta, Buffer dout, Buffer out, Buffer qkv, Buffer lse,
                                          const Packing *packing, AttentionShape shape) {
    (void)device;
    AttentionCall_ call = attention_call_(packing, shape);
    call.dqkv = dqkv, call.delta = delta, call.dout = dout, call.out = out, call.qkv = qkv, call.lse = lse;
    const bool fused = attention_fuses_(&call, packing->max_length);
    const int64_t key_tasks = fused ? call.documents * call.NKV : attention_task_count_(&call, call.NKV);
    const int64_t query_tasks = fused ? 0 : attention_task_count_(&call, call.NH);
    const int key_chunk = attention_chunk_(key_tasks), query_chunk = attention_chunk_(query_tasks);
#pragma omp parallel
    {
        _Alignas(64) float scratch[ATTENTION_SCRATCH_];
        AttentionCursor_ key_cursor = {0}, query_cursor = {0};
#pragma omp for schedule(static)
        for (int64_t token = 0; token < call.N; token++) attention_delta_token_(&call, token);
#pragma omp for schedule(monotonic : dynamic, key_chunk) nowait
        for (int64_t number = 0; number < key_tasks; number++) {
            const AttentionTask_ task = attention_task_(&call, &key_cursor, number, call.NKV, fused);
            if (fused) {
                attention_backward_fused_(&call, task, scratch);
            } else {
                attention_backward_keys_(&call, task, (AttentionSums_){0}, scratch);
            }
        }
#pragma omp for schedule(monotonic : dynamic, query_chunk)
        for (int64_t number = 0; number < query_tasks; number++) {
            AttentionTask_ task = attention_task_(&call, &query_cursor, number, call.NH, false);
            task.block = task.blocks - 1 - task.block;
            attention_backward_queries_(&call, task, scratch);
        }
    }
}

#endif
