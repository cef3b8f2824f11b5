// blas.h: the matrix product of the CPU device, behind one function. USE_DNNL takes oneDNN, USE_OPENBLAS cblas_sgemm (bf16
// through fp32 blocks), neither a plain blocked loop, which is always compiled because the tests compare against it.
// Operands are row-major, their rows may be apart (Buffer.row); accumulation is fp32; the same call gives the same bits at a fixed number of
// threads.
#ifndef LLMC_CPU_BLAS_H
#define LLMC_CPU_BLAS_H

#include "llmc/base.h"     // base_alloc, min_i64
#include "llmc/cpu/math.h" // cpu_to_bf16
#include "llmc/device.h"   // Buffer, buffer_row
#if defined(USE_DNNL)
#include "llmc/cpu/onednn.h" // onednn_product
#elif defined(USE_OPENBLAS)
#include <cblas.h> // cblas_sgemm
#include <omp.h>   // omp_get_max_threads
void openblas_set_num_threads(int threads);
#endif

// C (M, N) = A x B, the sum over K. The letters say which operand is stored transposed:
typedef enum {
    BLAS_NT, // A (M, K), B (N, K): forward, in x weight^T
    BLAS_NN, // A (M, K), B (K, N): input gradient, dout x weight
    BLAS_TN, // A (K, M), B (K, N): weight gradient, dout^T x in
} BlasForm;

// Blocks of the conversion to fp32: large enough that converting costs a few percent of the product.
enum { BLAS_BLOCK_M = 512, BLAS_BLOCK_N = 1024, BLAS_BLOCK_K = 1024 };

typedef struct {
#if defined(USE_DNNL)
    OnednnState onednn;
#endif
    float *blocks; // fp32 copies of a block of A, of B and of C
} BlasState;

static inline BlasState blas_create(void) {
    BlasState state = {0};
#if defined(USE_DNNL)
    state.onednn = onednn_create();
#elif defined(USE_OPENBLAS)
    openblas_set_num_threads(omp_get_max_threads());
#endif
    const size_t elements = (size_t)BLAS_BLOCK_M * BLAS_BLOCK_K + (size_t)BLAS_BLOCK_K * BLAS_BLOCK_N + (size_t)BLAS_BLOCK_M * BLAS_BLOCK_N;
    state.blocks = base_alloc(elements * sizeof(float));
    return state;
}

static inline void blas_destroy(BlasState *state) {
#if defined(USE_DNNL)
    onednn_destroy(&state->onednn);
#endif
    free(state->blocks);
    *state = (BlasState){0};
}

static inline float blas_load_(Buffer buffer, int64_t at) {
    return buffer.dtype == DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)buffer.data)[at]) : ((const float *)buffer.data)[at];
}

// Elements from row to row of the operands as they lie in memory.
typedef struct {
    int64_t a, b, c;
} BlasRows;

static inline BlasRows blas_rows_(BlasForm form, Buffer C, Buffer A, Buffer B, int64_t M, int64_t N, int64_t K) {
    return (BlasRows){buffer_row(A, form == BLAS_TN ? M : K), buffer_row(B, form == BLAS_NT ? K : N), buffer_row(C, N)};
}

// ----------------------------------------------------------------------------
// The plain loop. A tile of C belongs to one thread; blocks of A and B are converted to fp32 in its stack (160 KB, inside
// the second-level cache), then 4 x 64 elements of C stay in registers over a block of K.

typedef float BlasVector __attribute__((vector_size(64), may_alias)); // 16 floats; narrower machines use several registers
enum { BLAS_TILE_M = 96, BLAS_TILE_N = 128, BLAS_TILE_K = 128, BLAS_MICRO_M = 4, BLAS_MICRO_N = 4, BLAS_LANES = 16 };

// to (rows, row_length) = from[i * row_stride + j * column_stride] for i < rows_used, j < columns_used; zero elsewhere
static inline void blas_pack_(float *to, int64_t row_length, int64_t rows, Buffer from, int64_t row_stride, int64_t column_stride,
                              int64_t rows_used, int64_t columns_used) {
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = i < rows_used ? columns_used : 0; j < row_length; j++) to[i * row_length + j] = 0.0f;
    }
    if (column_stride == 1) {
        for (int64_t i = 0; i < rows_used; i++) {
            const Buffer row = buffer_at(from, i * row_stride);
            float *to_row = to + i * row_length;
            if (row.dtype == DTYPE_BF16) {
                const uint16_t *values = row.data;
                for (int64_t j = 0; j < columns_used; j++) to_row[j] = bf16_to_f32(values[j]);
            } else {
                memcpy(to_row, row.data, (size_t)columns_used * sizeof(float));
            }
        }
    } else {
        // A transposition: 16 columns at a time, so that reads and writes both stay inside cache lines.
        for (int64_t j0 = 0; j0 < columns_used; j0 += BLAS_LANES) {
            const int64_t j1 = min_i64(j0 + BLAS_LANES, columns_used);
            for (int64_t i = 0; i < rows_used; i++) {
                for (int64_t j = j0; j < j1; j++) to[i * row_length + j] = blas_load_(from, i * row_stride + j * column_stride);
            }
        }
    }
}

// c (96, 128) += a (96, 128) x b (128, 128)
static inline void blas_tile_(float *c, const float *a, const float *b, int64_t rows) {
    for (int64_t i = 0; i < rows; i += BLAS_MICRO_M) {
        for (int64_t j = 0; j < BLAS_TILE_N; j += BLAS_MICRO_N * BLAS_LANES) {
            BlasVector sum[BLAS_MICRO_M][BLAS_MICRO_N];
            for (int m = 0; m < BLAS_MICRO_M; m++) {
                for (int n = 0; n < BLAS_MICRO_N; n++) sum[m][n] = *(BlasVector *)(c + (i + m) * BLAS_TILE_N + j + n * BLAS_LANES);
            }
            for (int64_t k = 0; k < BLAS_TILE_K; k++) {
                const float *row = b + k * BLAS_TILE_N + j;
                for (int m = 0; m < BLAS_MICRO_M; m++) {
                    for (int n = 0; n < BLAS_MICRO_N; n++) {
                        sum[m][n] += a[(i + m) * BLAS_TILE_K + k] * *(const BlasVector *)(row + n * BLAS_LANES);
                    }
                }
            }
            for (int m = 0; m < BLAS_MICRO_M; m++) {
                for (int n = 0; n < BLAS_MICRO_N; n++) *(BlasVector *)(c + (i + m) * BLAS_TILE_N + j + n * BLAS_LANES) = sum[m][n];
            }
        }
    }
}

// Any mix of F32 and BF16. bias (N) and accumulate exclude each other.
static inline void blas_matmul_plain(BlasForm form, Buffer C, Buffer A, Buffer B, Buffer bias, bool accumulate, int64_t M, int64_t N, int64_t K) {
    const BlasRows rows_of = blas_rows_(form, C, A, B, M, N, K);
    const int64_t a_row = form == BLAS_TN ? 1 : rows_of.a, a_column = form == BLAS_TN ? rows_of.a : 1;
    const int64_t b_row = form == BLAS_NT ? 1 : rows_of.b, b_column = form == BLAS_NT ? rows_of.b : 1;
    const int64_t tiles_m = ceil_div(M, BLAS_TILE_M), tiles_n = ceil_div(N, BLAS_TILE_N);
#pragma omp parallel for schedule(static)
    for (int64_t tile = 0; tile < tiles_m * tiles_n; tile++) {
        _Alignas(64) float a[BLAS_TILE_M * BLAS_TILE_K], b[BLAS_TILE_K * BLAS_TILE_N], c[BLAS_TILE_M * BLAS_TILE_N];
        const int64_t i0 = tile % tiles_m * BLAS_TILE_M, j0 = tile / tiles_m * BLAS_TILE_N;
        const int64_t rows = min_i64(BLAS_TILE_M, M - i0), columns = min_i64(BLAS_TILE_N, N - j0);
        memset(c, 0, sizeof c);
        for (int64_t k0 = 0; k0 < K; k0 += BLAS_TILE_K) {
            const int64_t depth = min_i64(BLAS_TILE_K, K - k0);
            blas_pack_(a, BLAS_TILE_K, BLAS_TILE_M, buffer_at(A, i0 * a_row + k0 * a_column), a_row, a_column, rows, depth);
            blas_pack_(b, BLAS_TILE_N, BLAS_TILE_K, buffer_at(B, k0 * b_row + j0 * b_column), b_row, b_column, depth, columns);
            blas_tile_(c, a, b, rows);
        }
        for (int64_t i = 0; i < rows; i++) {
            const Buffer to = buffer_at(C, (i0 + i) * rows_of.c + j0);
            for (int64_t j = 0; j < columns; j++) {
                float value = c[i * BLAS_TILE_N + j];
                if (bias.data != NULL) value += blas_load_(bias, j0 + j);
                if (accumulate) value += blas_load_(to, j);
                if (to.dtype == DTYPE_BF16) {
                    ((uint16_t *)to.data)[j] = cpu_to_bf16(value);
                } else {
                    ((float *)to.data)[j] = value;
                }
            }
        }
    }
}

// ----------------------------------------------------------------------------
// fp32 products of the library, and everything else through them: blocks of A and B become fp32, a block of C is summed in
// fp32 over all of K and then stored in its own type.

#if defined(USE_DNNL) || defined(USE_OPENBLAS)

// fp32 c (M, N) = or += a x b. False: the library cannot.
static inline bool blas_fp32_(BlasState *state, BlasForm form, float *c, const float *a, const float *b, BlasRows rows, bool accumulate, int64_t M,
                              int64_t N, int64_t K) {
#if defined(USE_DNNL)
    const OnednnKey key = {.a_transposed = form == BLAS_TN,
                           .b_transposed = form == BLAS_NT,
                           .accumulate = accumulate,
                           .M = M,
                           .N = N,
                           .K = K,
                           .a_row = rows.a,
                           .b_row = rows.b,
                           .c_row = rows.c};
    return onednn_product(&state->onednn, &key, c, a, b, NULL);
#else
    (void)state;
    cblas_sgemm(CblasRowMajor, form == BLAS_TN ? CblasTrans : CblasNoTrans, form == BLAS_NT ? CblasTrans : CblasNoTrans, (int)M, (int)N, (int)K,
                1.0f, a, (int)rows.a, b, (int)rows.b, accumulate ? 1.0f : 0.0f, c, (int)rows.c);
    return true;
#endif
}

#if defined(USE_OPENBLAS)
// Every row of c (M, N), row elements apart, = bias (N): sgemm then adds the product to it.
static inline void blas_fill_rows_(float *c, int64_t row, Buffer bias, int64_t M, int64_t N) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < M; i++) {
        for (int64_t j = 0; j < N; j++) c[i * row + j] = blas_load_(bias, j);
    }
}
#endif

// to (rows, columns) dense fp32 = the block of `from` whose rows are `stride` apart
static inline void blas_block_in_(float *to, Buffer from, int64_t stride, int64_t rows, int64_t columns) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const Buffer row = buffer_at(from, i * stride);
        for (int64_t j = 0; j < columns; j++) to[i * columns + j] = blas_load_(row, j);
    }
}

static inline void blas_block_out_(Buffer to, int64_t stride, const float *from, Buffer bias, bool accumulate, int64_t rows, int64_t columns) {
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const Buffer row = buffer_at(to, i * stride);
        for (int64_t j = 0; j < columns; j++) {
            float value = from[i * columns + j];
            if (bias.data != NULL) value += blas_load_(bias, j);
            if (accumulate) value += blas_load_(row, j);
            if (row.dtype == DTYPE_BF16) {
                ((uint16_t *)row.data)[j] = cpu_to_bf16(value);
            } else {
                ((float *)row.data)[j] = value;
            }
        }
    }
}

static inline bool blas_converted_(BlasState *state, BlasForm form, Buffer C, Buffer A, Buffer B, Buffer bias, bool accumulate, int64_t M,
                                   int64_t N, int64_t K) {
    float *a = state->blocks, *b = a + (size_t)BLAS_BLOCK_M * BLAS_BLOCK_K, *c = b + (size_t)BLAS_BLOCK_K * BLAS_BLOCK_N;
    const BlasRows from = blas_rows_(form, C, A, B, M, N, K);
    for (int64_t j = 0; j < N; j += BLAS_BLOCK_N) {
        const int64_t columns = min_i64(BLAS_BLOCK_N, N - j);
        for (int64_t i = 0; i < M; i += BLAS_BLOCK_M) {
            const int64_t rows = min_i64(BLAS_BLOCK_M, M - i);
            for (int64_t k = 0; k < K; k += BLAS_BLOCK_K) {
                const int64_t depth = min_i64(BLAS_BLOCK_K, K - k);
                if (form == BLAS_TN) {
                    blas_block_in_(a, buffer_at(A, k * from.a + i), from.a, depth, rows);
                } else {
                    blas_block_in_(a, buffer_at(A, i * from.a + k), from.a, rows, depth);
                }
                if (form == BLAS_NT) {
                    blas_block_in_(b, buffer_at(B, j * from.b + k), from.b, columns, depth);
                } else {
                    blas_block_in_(b, buffer_at(B, k * from.b + j), from.b, depth, columns);
                }
                const BlasRows dense = {form == BLAS_TN ? rows : depth, form == BLAS_NT ? depth : columns, columns};
                if (!blas_fp32_(state, form, c, a, b, dense, k > 0, rows, columns, depth)) return false;
            }
            blas_block_out_(buffer_at(C, i * from.c + j), from.c, c, bias.data != NULL ? buffer_at(bias, j) : bias, accumulate, rows, columns);
        }
    }
    return true;
}

#endif

// ----------------------------------------------------------------------------
// C (M, N) = A x B + bias (N, optional), or C += A x B with accumulate (no bias then). Any mix of F32 and BF16; sums in fp32.
// Empty sizes are harmless: without K the product is zero.
static inline void blas_matmul(BlasState *state, BlasForm form, Buffer C, Buffer A, Buffer B, Buffer bias, bool accumulate, int64_t M, int64_t N,
                               int64_t K) {
    if (M <= 0 || N <= 0) return;
    if (K > 0) {
#if defined(USE_DNNL)
        const BlasRows rows = blas_rows_(form, C, A, B, M, N, K);
        const OnednnKey key = {.a_transposed = form == BLAS_TN,
                               .b_transposed = form == BLAS_NT,
                               .accumulate = accumulate,
                               .has_bias = bias.data != NULL,
                               .a = A.dtype,
                               .b = B.dtype,
                               .c = C.dtype,
                               .bias = bias.data != NULL ? bias.dtype : DTYPE_F32,
                               .M = M,
                               .N = N,
                               .K = K,
                               .a_row = rows.a,
                               .b_row = rows.b,
                               .c_row = rows.c};
        if (onednn_product(&state->onednn, &key, C.data, A.data, B.data, bias.data)) return;
        if (blas_converted_(state, form, C, A, B, bias, accumulate, M, N, K)) return;
#elif defined(USE_OPENBLAS)
        if (C.dtype == DTYPE_F32 && A.dtype == DTYPE_F32 && B.dtype == DTYPE_F32) {
            const BlasRows rows = blas_rows_(form, C, A, B, M, N, K);
            if (bias.data != NULL) blas_fill_rows_(C.data, rows.c, bias, M, N);
            if (blas_fp32_(state, form, C.data, A.data, B.data, rows, accumulate || bias.data != NULL, M, N, K)) return;
        }
        if (blas_converted_(state, form, C, A, B, bias, accumulate, M, N, K)) return;
#endif
    }
    (void)state;
    blas_matmul_plain(form, C, A, B, bias, accumulate, M, N, K);
}

#endif
