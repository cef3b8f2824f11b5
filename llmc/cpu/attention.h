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

#include "llmc/base.h"     // ceil_div, round_up, min_i64, max_i64
#include "llmc/cpu/math.h" // cpu_exp, cpu_to_bf16
#include "llmc/device.h"   // Device, Buffer, Packing, AttentionShape
#include <float.h>         // FLT_MAX
#include <math.h>          // sqrt, logf, INFINITY
#include <omp.h>           // omp_get_max_threads

enum {
    ATTENTION_LANES_ = 16,                                    // floats of a vector; columns of tiles come in multiples
    ATTENTION_BLOCK_ = 64,                                    // keys (or queries) of a tile; also its row stride when transposed
    ATTENTION_MAX_HEAD_ = 128,                                // head size
    ATTENTION_TILE_ = ATTENTION_BLOCK_ * ATTENTION_MAX_HEAD_, // floats
    ATTENTION_SCRATCH_ = 252 * 1024 / (int)sizeof(float),     // floats on a thread's stack, backward pass
    ATTENTION_ROWS_ = 4,                                      // rows of a register tile
#ifdef __AVX512F__
    ATTENTION_COLUMNS_ = 4, // vectors of a register tile: 16 accumulators of the 32 registers
#else
    ATTENTION_COLUMNS_ = 1, // 4 accumulators of 64 bytes: 8 AVX2 registers of 16, 16 NEON registers of 32
#endif
};

// Sixteen floats; the compiler splits them for narrower machines.
typedef float AttentionVector_ __attribute__((vector_size(64), may_alias));
#define ATTENTION_INLINE_ static inline __attribute__((always_inline))

// Emits nothing, but keeps a loaded vector in its register. Without it gcc reads the vector from memory again in every
// multiply-add that uses it, and the loads then limit the products (87 instead of 115 GFLOP/s on a Zen 4 core).
#ifdef __AVX512F__
#define ATTENTION_KEEP_(vector) __asm__("" : "+v"(vector))
#else
#define ATTENTION_KEEP_(vector) (void)(vector)
#endif

// ----------------------------------------------------------------------------
// Register-blocked products

// out (4, 64) columns 0..16*vectors-1 = a (4, depth; rows `a_stride` apart) x b (depth, 64)
ATTENTION_INLINE_ void attention_dot_tile_(float *out, const float *a, int64_t a_stride, const float *b, int64_t depth, const int vectors) {
    AttentionVector_ sum[ATTENTION_ROWS_][ATTENTION_COLUMNS_];
#pragma GCC unroll 4
    for (int r = 0; r < ATTENTION_ROWS_; r++) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[r][v] = (AttentionVector_){0};
    }
    for (int64_t d = 0; d < depth; d++) {
        AttentionVector_ column[ATTENTION_COLUMNS_];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            column[v] = ((const AttentionVector_ *)(b + d * ATTENTION_BLOCK_))[v];
            ATTENTION_KEEP_(column[v]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < ATTENTION_ROWS_; r++) {
            const float x = a[r * a_stride + d];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[r][v] += x * column[v];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ATTENTION_ROWS_; r++) {
        AttentionVector_ *row = (AttentionVector_ *)(out + r * ATTENTION_BLOCK_);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) row[v] = sum[r][v];
    }
}

static inline void attention_dot_(float *out, const float *a, int64_t a_stride, const float *b, int64_t depth, int64_t vectors) {
    while (vectors > 0) {
        const int64_t now = min_i64(vectors, ATTENTION_COLUMNS_);
        switch (now) {
#if defined(__AVX512F__)
        case 4: attention_dot_tile_(out, a, a_stride, b, depth, 4); break;
        case 3: attention_dot_tile_(out, a, a_stride, b, depth, 3); break;
        case 2: attention_dot_tile_(out, a, a_stride, b, depth, 2); break;
#endif
        default: attention_dot_tile_(out, a, a_stride, b, depth, 1);
        }
        vectors -= now, out += now * ATTENTION_LANES_, b += now * ATTENTION_LANES_;
    }
}

// out (4, width) columns 0..16*vectors-1 = out * scale (4) + x (4, count) x y (count, width); x(r, t) lies at x[r*x_row + t*x_column]
ATTENTION_INLINE_ void attention_add_tile_(float *out, const float *scale, const float *x, const int x_row, const int x_column, const float *y,
                                           int64_t width, int64_t count, const int vectors) {
    AttentionVector_ sum[ATTENTION_ROWS_][ATTENTION_COLUMNS_];
#pragma GCC unroll 4
    for (int r = 0; r < ATTENTION_ROWS_; r++) {
        const AttentionVector_ *row = (const AttentionVector_ *)(out + r * width);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            sum[r][v] = row[v];
            if (scale != NULL) sum[r][v] *= scale[r];
        }
    }
    for (int64_t t = 0; t < count; t++) {
        AttentionVector_ row[ATTENTION_COLUMNS_];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            row[v] = ((const AttentionVector_ *)(y + t * width))[v];
            ATTENTION_KEEP_(row[v]);
        }
#pragma GCC unroll 4
        for (int r = 0; r < ATTENTION_ROWS_; r++) {
            const float weight = x[r * x_row + t * x_column];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sum[r][v] += weight * row[v];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ATTENTION_ROWS_; r++) {
        AttentionVector_ *row = (AttentionVector_ *)(out + r * width);
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) row[v] = sum[r][v];
    }
}

ATTENTION_INLINE_ void attention_add_(float *out, const float *scale, const float *x, const int x_row, const int x_column, const float *y,
                                      int64_t width, int64_t count) {
    for (int64_t vectors = width / ATTENTION_LANES_; vectors > 0;) {
        const int64_t now = min_i64(vectors, ATTENTION_COLUMNS_);
        switch (now) {
#if defined(__AVX512F__)
        case 4: attention_add_tile_(out, scale, x, x_row, x_column, y, width, count, 4); break;
        case 3: attention_add_tile_(out, scale, x, x_row, x_column, y, width, count, 3); break;
        case 2: attention_add_tile_(out, scale, x, x_row, x_column, y, width, count, 2); break;
#endif
        default: attention_add_tile_(out, scale, x, x_row, x_column, y, width, count, 1);
        }
        vectors -= now, out += now * ATTENTION_LANES_, y += now * ATTENTION_LANES_;
    }
}

// The two orders of x that occur: scores whose rows are the summed index, and scores whose rows are the rows of out.
static inline void attention_add_columns_(float *out, const float *scale, const float *x, const float *y, int64_t width, int64_t count) {
    attention_add_(out, scale, x, 1, ATTENTION_BLOCK_, y, width, count);
}
static inline void attention_add_rows_(float *out, const float *x, const float *y, int64_t width, int64_t count) {
    attention_add_(out, NULL, x, ATTENTION_BLOCK_, 1, y, width, count);
}

// ----------------------------------------------------------------------------
// Tiles: copies between the operands and fp32 tiles. `at` is the element of the first row in the buffer.

// tile (round_up(rows, 4), width) = rows of `from` (HS columns, `stride` apart), zero outside
static inline void attention_load_(float *tile, int64_t width, Buffer from, int64_t at, int64_t stride, int64_t rows, int64_t HS) {
    for (int64_t i = 0; i < rows; i++) {
        float *restrict to = tile + i * width;
        if (from.dtype == DTYPE_BF16) {
            const uint16_t *restrict row = (const uint16_t *)from.data + at + i * stride;
#pragma omp simd
            for (int64_t d = 0; d < HS; d++) to[d] = bf16_to_f32(row[d]);
        } else {
            const float *restrict row = (const float *)from.data + at + i * stride;
#pragma omp simd
            for (int64_t d = 0; d < HS; d++) to[d] = row[d];
        }
        for (int64_t d = HS; d < width; d++) to[d] = 0.0f;
    }
    const int64_t padded = round_up(rows, ATTENTION_ROWS_);
    if (padded > rows) memset(tile + rows * width, 0, (size_t)((padded - rows) * width) * sizeof(float));
}

// rows of `to` = tile * scale * row_scale (rows, optional)
static inline void attention_store_(Buffer to, int64_t at, int64_t stride, const float *tile, int64_t width, int64_t rows, int64_t HS, float scale,
                                    const float *row_scale) {
    for (int64_t i = 0; i < rows; i++) {
        const float *restrict from = tile + i * width;
        const float factor = row_scale != NULL ? scale * row_scale[i] : scale;
        if (to.dtype == DTYPE_BF16) {
            uint16_t *restrict row = (uint16_t *)to.data + at + i * stride;
#pragma omp simd
            for (int64_t d = 0; d < HS; d++) row[d] = cpu_to_bf16(from[d] * factor);
        } else {
            float *restrict row = (float *)to.data + at + i * stride;
#pragma omp simd
            for (int64_t d = 0; d < HS; d++) row[d] = from[d] * factor;
        }
    }
}

// First or second halves of two vectors, interleaved: a0 b0 a1 b1 ...
#ifdef __clang__
#define ATTENTION_ZIP_LOW_(a, b) __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define ATTENTION_ZIP_HIGH_(a, b) __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#else
typedef int AttentionIndices_ __attribute__((vector_size(64)));
#define ATTENTION_ZIP_LOW_(a, b) __builtin_shuffle(a, b, (AttentionIndices_){0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23})
#define ATTENTION_ZIP_HIGH_(a, b) __builtin_shuffle(a, b, (AttentionIndices_){8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31})
#endif

// transposed (width, 64) columns 0..round_up(rows, 16)-1 = tile (rows, width)^T, zero outside. Squares of 16 x 16: interleaving rows
// i and i+8 of sixteen, four times over, transposes them.
static inline void attention_transpose_(float *transposed, const float *tile, int64_t width, int64_t rows) {
    for (int64_t i = 0; i < rows; i += ATTENTION_LANES_) {
        for (int64_t d = 0; d < width; d += ATTENTION_LANES_) {
            AttentionVector_ a[ATTENTION_LANES_], b[ATTENTION_LANES_];
#pragma GCC unroll 16
            for (int r = 0; r < 16; r++) a[r] = i + r < rows ? *(const AttentionVector_ *)(tile + (i + r) * width + d) : (AttentionVector_){0};
#pragma GCC unroll 2
            for (int round = 0; round < 2; round++) {
#pragma GCC unroll 8
                for (int r = 0; r < 8; r++) b[2 * r] = ATTENTION_ZIP_LOW_(a[r], a[r + 8]), b[2 * r + 1] = ATTENTION_ZIP_HIGH_(a[r], a[r + 8]);
#pragma GCC unroll 8
                for (int r = 0; r < 8; r++) a[2 * r] = ATTENTION_ZIP_LOW_(b[r], b[r + 8]), a[2 * r + 1] = ATTENTION_ZIP_HIGH_(b[r], b[r + 8]);
            }
#pragma GCC unroll 16
            for (int r = 0; r < 16; r++) *(AttentionVector_ *)(transposed + (d + r) * ATTENTION_BLOCK_ + i) = a[r];
        }
    }
}

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
            const Buffer sum = {sums.data + g * sums.head_stride + begin * sums.stride, DTYPE_F32};
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
