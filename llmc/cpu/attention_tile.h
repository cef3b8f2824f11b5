// attention_tile.h: the fp32 tiles of attention on the CPU device: two register-blocked products and the copies between tiles
// and operands, which also convert bf16. Vectors are the compiler's (sixteen floats, split where registers are narrower), so there
// is one source for every machine. Knows nothing of softmax, documents or threads: that is cpu/attention.h.
#ifndef LLMC_CPU_ATTENTION_TILE_H
#define LLMC_CPU_ATTENTION_TILE_H

#include "llmc/base.h"     // round_up, min_i64
#include "llmc/cpu/math.h" // cpu_to_bf16
#include "llmc/device.h"   // Buffer, buffer_at

enum {
    ATTENTION_LANES_ = 16,                                    // floats of a vector; columns of tiles come in multiples
    ATTENTION_BLOCK_ = 64,                                    // keys (or queries) of a tile; also its row stride when transposed
    ATTENTION_MAX_HEAD_ = 128,                                // head size
    ATTENTION_TILE_ = ATTENTION_BLOCK_ * ATTENTION_MAX_HEAD_, // floats
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
// The products stay functions of their own: inlined into the tasks, gcc runs out of registers and spills their operands.
#define ATTENTION_CALLED_ static __attribute__((noinline, unused))

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

ATTENTION_CALLED_ void attention_dot_(float *out, const float *a, int64_t a_stride, const float *b, int64_t depth, int64_t vectors) {
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
ATTENTION_CALLED_ void attention_add_columns_(float *out, const float *scale, const float *x, const float *y, int64_t width, int64_t count) {
    attention_add_(out, scale, x, 1, ATTENTION_BLOCK_, y, width, count);
}
ATTENTION_CALLED_ void attention_add_rows_(float *out, const float *x, const float *y, int64_t width, int64_t count) {
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

// Asks for rows that the next attention_load_ reads: they lie a token's width apart, where no hardware prefetcher follows.
static inline void attention_prefetch_(Buffer from, int64_t at, int64_t stride, int64_t rows, int64_t HS) {
    const int64_t row_bytes = HS * (int64_t)dtype_bytes(from.dtype);
    for (int64_t i = 0; i < rows; i++) {
        const char *row = buffer_at(from, at + i * stride).data;
        for (int64_t byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
    }
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

#endif
