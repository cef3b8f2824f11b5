// norm.cuh: residual + dropout + layernorm or rmsnorm, fused: forward and backward, on the CUDA device; the residual alone. Any C, any N.
//
// A row stays in registers, as it is stored, from its only load to its only store: a warp has a row up to 1024 channels, a block one up to 16384.
// Longer rows, and rows that cannot be moved as packs (block.cuh), are walked several times by a block. Statistics in fp32, the variance around the
// mean.
#ifndef LLMC_CUDA_NORM_CUH
#define LLMC_CUDA_NORM_CUH

#include "llmc/cuda/dropout.cuh" // DropoutDraw, dropout_mask
#include "llmc/cuda/reduce.cuh"  // warp_sum, block_sum, columns_*
#include "llmc/cuda/scratch.h"   // NORM_SHORT_C, NORM_LONG_C, ScratchNorm

enum {
    NORM_ROWS = 4,           // forward: warps of a block that have a row each
    NORM_THREADS = 512,      // most of a block that has one row
    NORM_LOOP_THREADS = 256, // of a block that walks a row
    NORM_WARP_C = 1024,      // longest row of a warp: 4 units of 8 channels per lane
    NORM_PER_SM = 1 << 16,   // blocks of a kernel whose blocks have one row each: in effect as many as there are rows
};

// Over the row that a warp or a block has in its registers.
template <bool WARP, class T> static __device__ __forceinline__ T norm_row_sum(T value, T *shared32) {
    if constexpr (WARP) {
        return warp_sum(value);
    } else {
        return block_sum(value, shared32);
    }
}

// x = in + dropout(branch), rounded to T so that the statistics see what backward will see
template <class T>
static __device__ __forceinline__ Unit<T> norm_residual(const Unit<T> &in, const Unit<T> &branch, const DropoutDraw &draw, int32_t index,
                                                        int64_t c) {
    float x[UNIT];
    if (draw.token_index != nullptr) {
        float mask[UNIT];
        dropout_mask(mask, draw, index, c);
#pragma unroll
        for (int i = 0; i < UNIT; i++) x[i] = fmaf(branch[i], mask[i], in[i]);
    } else {
#pragma unroll
        for (int i = 0; i < UNIT; i++) x[i] = in[i] + branch[i];
    }
    return Unit<T>::of(x);
}

static __device__ __forceinline__ int32_t norm_token(const DropoutDraw &draw, int64_t n) {
    return draw.token_index != nullptr ? draw.token_index[n] : 0;
}

template <class T> struct NormForward {
    T *out;                 // (N, C)
    float *mean, *rstd;     // (N); mean may be nullptr
    T *sum;                 // (N, C)
    const T *in, *branch;   // (N, C); branch may be nullptr
    const T *weight, *bias; // (C); bias may be nullptr
    DropoutDraw draw;
    float eps;
    bool centred, packed;
    int64_t N, C;
};

// (x - mean) * rstd * weight + bias of eight channels
template <class T>
static __device__ __forceinline__ void norm_output(const NormForward<T> &p, T *out, const Unit<T> &x, float mean, float rstd, int64_t c) {
    const Unit<T> weight = unit_load(p.weight, c, p.C, p.packed);
    Unit<T> bias = {};
    float y[UNIT];
    if (p.bias != nullptr) bias = unit_load(p.bias, c, p.C, p.packed);
#pragma unroll
    for (int i = 0; i < UNIT; i++) y[i] = (x[i] - mean) * rstd * weight[i] + bias[i];
    unit_store(out, c, p.C, p.packed, Unit<T>::of(y));
}

// Sums over eight channels of x, which is zero past the row's end, and of (x - mean)^2, which is not.
template <class T> static __device__ __forceinline__ float norm_sum(const Unit<T> &x) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < UNIT; i++) sum += x[i];
    return sum;
}
template <class T> static __device__ __forceinline__ float norm_squares(const Unit<T> &x, float mean, int64_t c, int64_t C) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < UNIT; i++) sum += c + i < C ? (x[i] - mean) * (x[i] - mean) : 0.0f;
    return sum;
}

// Thread t of a row has the units t, t+threads, ... Grid: WARP: 4 rows per block of 4 warps; otherwise a row per block of up to 512 threads.
// Reads in and branch, writes sum and out: 8 bytes per channel in bf16, 4 without a branch; weight and bias come from the caches. Shared: 128
// bytes. 32 to 89 registers (64 for C 768, 57 for C 1032 to 8192). Not measured on a device yet; expected 85-90% of the memory bandwidth.
template <class T, int UNITS, bool WARP>
__global__ void __launch_bounds__(WARP ? NORM_ROWS * 32 : NORM_THREADS) norm_forward_kernel(NormForward<T> p) {
    __shared__ float shared[32];
    const int threads = WARP ? 32 : (int)blockDim.x, t = (int)threadIdx.x % threads, rows = WARP ? NORM_ROWS : 1;
    const int64_t C = p.C;
    for (int64_t n = (int64_t)blockIdx.x * rows + (int)threadIdx.x / threads; n < p.N; n += (int64_t)gridDim.x * rows) {
        Unit<T> x[UNITS];
#pragma unroll
        for (int u = 0; u < UNITS; u++) x[u] = unit_load(p.in + n * C, (int64_t)(t + u * threads) * UNIT, C, true);
        if (p.branch != nullptr) {
            Unit<T> branch[UNITS];
#pragma unroll
            for (int u = 0; u < UNITS; u++) branch[u] = unit_load(p.branch + n * C, (int64_t)(t + u * threads) * UNIT, C, true);
            const int32_t token = norm_token(p.draw, n);
#pragma unroll
            for (int u = 0; u < UNITS; u++) {
                const int64_t c = (int64_t)(t + u * threads) * UNIT;
                x[u] = norm_residual(x[u], branch[u], p.draw, token, c);
                unit_store(p.sum + n * C, c, C, true, x[u]);
            }
        }
        float mean = 0.0f, squares = 0.0f;
        if (p.centred) {
#pragma unroll
            for (int u = 0; u < UNITS; u++) mean += norm_sum(x[u]);
            mean = norm_row_sum<WARP>(mean, shared) / (float)C;
        }
#pragma unroll
        for (int u = 0; u < UNITS; u++) squares += norm_squares(x[u], mean, (int64_t)(t + u * threads) * UNIT, C);
        const float rstd = 1.0f / sqrtf(norm_row_sum<WARP>(squares, shared) / (float)C + p.eps);
        if (t == 0 && p.mean != nullptr) p.mean[n] = mean;
        if (t == 0) p.rstd[n] = rstd;
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const int64_t c = (int64_t)(t + u * threads) * UNIT;
            if (c < C) norm_output(p, p.out + n * C, x[u], mean, rstd, c);
        }
    }
}

// The same for any row: a block walks it three times; each thread reads back what it has written itself. Grid: a row per block of 256 threads.
template <class T> __global__ void __launch_bounds__(NORM_LOOP_THREADS) norm_forward_loop_kernel(NormForward<T> p) {
    __shared__ float shared[32];
    const int64_t C = p.C, begin = threadIdx.x * UNIT, step = NORM_LOOP_THREADS * UNIT;
    for (int64_t n = blockIdx.x; n < p.N; n += gridDim.x) {
        const T *in = p.in + n * C, *x = p.branch != nullptr ? p.sum + n * C : in;
        const int32_t token = norm_token(p.draw, n);
        float mean = 0.0f, squares = 0.0f;
        for (int64_t c = begin; c < C; c += step) {
            Unit<T> unit = unit_load(in, c, C, p.packed);
            if (p.branch != nullptr) {
                unit = norm_residual(unit, unit_load(p.branch + n * C, c, C, p.packed), p.draw, token, c);
                unit_store(p.sum + n * C, c, C, p.packed, unit);
            }
            mean += norm_sum(unit);
        }
        mean = block_sum(mean, shared) / (float)C;
        if (!p.centred) mean = 0.0f;
        for (int64_t c = begin; c < C; c += step) squares += norm_squares(unit_load(x, c, C, p.packed), mean, c, C);
        const float rstd = 1.0f / sqrtf(block_sum(squares, shared) / (float)C + p.eps);
        if (threadIdx.x == 0 && p.mean != nullptr) p.mean[n] = mean;
        if (threadIdx.x == 0) p.rstd[n] = rstd;
        for (int64_t c = begin; c < C; c += step) norm_output(p, p.out + n * C, unit_load(x, c, C, p.packed), mean, rstd, c);
    }
}

// Threads of a block that has a row of C channels, with this many units per thread.
static_assert(UNIT == 8, "scratch.h counts units");

template <class T> static inline void norm_forward_(CudaDevice *device, const NormForward<T> &p) {
    const auto rows_of_warps = [&](void (*kernel)(NormForward<T>)) {
        launch(device, device->compute, {launch_blocks(device, p.N, NORM_ROWS, NORM_PER_SM), NORM_ROWS * 32}, kernel, p);
    };
    const auto row_of_block = [&](void (*kernel)(NormForward<T>), unsigned threads) {
        launch(device, device->compute, {launch_blocks(device, p.N, 1, NORM_PER_SM), threads}, kernel, p);
    };
    if (!p.packed || p.C > NORM_LONG_C) {
        row_of_block(norm_forward_loop_kernel<T>, NORM_LOOP_THREADS);
    } else if (p.C > NORM_SHORT_C) {
        row_of_block(norm_forward_kernel<T, 4, false>, scratch_norm_threads(p.C, 4));
    } else if (p.C > NORM_WARP_C) {
        row_of_block(norm_forward_kernel<T, 2, false>, scratch_norm_threads(p.C, 2));
    } else if (p.C > NORM_WARP_C * 3 / 4) {
        rows_of_warps(norm_forward_kernel<T, 4, true>);
    } else if (p.C > NORM_WARP_C / 2) {
        rows_of_warps(norm_forward_kernel<T, 3, true>);
    } else if (p.C > NORM_WARP_C / 4) {
        rows_of_warps(norm_forward_kernel<T, 2, true>);
    } else {
        rows_of_warps(norm_forward_kernel<T, 1, true>);
    }
}

template <class T>
static inline NormForward<T> norm_forward_arguments_(Buffer out, Buffer mean, Buffer rstd, Buffer sum, Buffer in, Buffer branch, Buffer weight,
                                                     Buffer bias, const Dropout *dropout, int kind, double eps, int64_t N, int64_t C) {
    NormForward<T> p = {};
    p.out = (T *)out.data, p.mean = (float *)mean.data, p.rstd = (float *)rstd.data, p.sum = (T *)sum.data;
    p.in = (const T *)in.data, p.branch = (const T *)branch.data, p.weight = (const T *)weight.data, p.bias = (const T *)bias.data;
    p.draw = dropout_draw(dropout), p.eps = (float)eps, p.centred = kind == NORM_LAYERNORM;
    p.packed = units_packed(C, out, sum, in, branch, weight, bias), p.N = N, p.C = C;
    return p;
}

// sum (N, C) = x = in + dropout(branch), out (N, C) = (x - mean) * rstd * weight + bias, mean and rstd (N) =
static void cuda_norm_forward(Device *device, Buffer out, Buffer mean, Buffer rstd, Buffer sum, Buffer in, Buffer branch, Buffer weight,
                              Buffer bias, const Dropout *dropout, int kind, double eps, int64_t N, int64_t C) {
    if (in.dtype == DTYPE_F32) {
        norm_forward_(cuda_of(device), norm_forward_arguments_<float>(out, mean, rstd, sum, in, branch, weight, bias, dropout, kind, eps, N, C));
    } else {
        norm_forward_(cuda_of(device), norm_forward_arguments_<bf16>(out, mean, rstd, sum, in, branch, weight, bias, dropout, kind, eps, N, C));
    }
}

// out (N, C) = in + dropout(branch): the bits that norm_forward writes to sum. Grid: a thread per unit of 8, strides over the grid. Moves 6 bytes
// per element in bf16. 31 registers. Not measured on a device yet; expected 85% of the memory bandwidth.
template <class T>
__global__ void __launch_bounds__(DROPOUT_THREADS)
    residual_forward_kernel(T *out, const T *in, const T *branch, DropoutDraw draw, int64_t N, int64_t C, bool packed) {
    const int64_t row_units = (C + UNIT - 1) / UNIT;
    for (int64_t i = blockIdx.x * (int64_t)DROPOUT_THREADS + threadIdx.x; i < N * row_units; i += (int64_t)gridDim.x * DROPOUT_THREADS) {
        const UnitPlace at = unit_place(i, row_units);
        const Unit<T> from = unit_load(in + at.row * C, at.c, C, packed), add = unit_load(branch + at.row * C, at.c, C, packed);
        unit_store(out + at.row * C, at.c, C, packed, norm_residual(from, add, draw, norm_token(draw, at.row), at.c));
    }
}

template <class T>
static inline void residual_forward_(CudaDevice *device, Buffer out, Buffer in, Buffer branch, const Dropout *dropout, int64_t N, int64_t C) {
    launch(device, device->compute, {launch_blocks(device, N * ((C + UNIT - 1) / UNIT), DROPOUT_THREADS, 16), DROPOUT_THREADS},
           residual_forward_kernel<T>, (T *)out.data, (const T *)in.data, (const T *)branch.data, dropout_draw(dropout), N, C,
           units_packed(C, out, in, branch));
}

static void cuda_residual_forward(Device *device, Buffer out, Buffer in, Buffer branch, const Dropout *dropout, int64_t N, int64_t C) {
    if (in.dtype == DTYPE_F32) {
        residual_forward_<float>(cuda_of(device), out, in, branch, dropout, N, C);
    } else {
        residual_forward_<bf16>(cuda_of(device), out, in, branch, dropout, N, C);
    }
}

// ----------------------------------------------------------------------------
// Backward, with xhat = (x - mean) * rstd and d = dout * weight:
//   dx = rstd * (d - mean_C(d) - xhat * mean_C(d * xhat))      (rmsnorm: without mean_C(d))
//   dweight = sum_N dout * xhat, dbias = sum_N dout
// As many blocks as the device holds at once share the rows; a thread keeps the weight gradients of its columns in registers over all of its rows.
// Each block writes them to scratch in the end, and columns_finish_kernel adds the blocks. dx may overwrite dout.

static_assert((int)NORM_BACKWARD_WARPS == (int)COLUMNS_WARPS, "blocks add their warps' sums as those of columns do");

template <class T> struct NormBackward {
    T *dx;                   // (N, C)
    const T *dout, *x;       // (N, C)
    const T *weight;         // (C)
    const float *mean;       // (N), nullptr for rmsnorm
    const float *rstd;       // (N)
    float *partial;          // (2, blocks, C): dweight, dbias
    bool accumulate, packed; // dx +=
    int64_t N, C;
};

// (sum of d, sum of d * xhat) over eight channels
template <class T>
static __device__ __forceinline__ float2 norm_backward_sums(const Unit<T> &dout, const Unit<T> &x, const Unit<T> &weight, float m, float r) {
    float2 sums = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < UNIT; i++) {
        const float d = dout[i] * weight[i];
        sums.x += d;
        sums.y += d * ((x[i] - m) * r);
    }
    return sums;
}

// dx of eight channels, from the means over the row
template <class T>
static __device__ __forceinline__ Unit<T> norm_backward_dx(const Unit<T> &old, const Unit<T> &dout, const Unit<T> &x, const Unit<T> &weight,
                                                           float m, float r, float2 means) {
    float dx[UNIT];
#pragma unroll
    for (int i = 0; i < UNIT; i++) dx[i] = old[i] + r * (dout[i] * weight[i] - means.x - (x[i] - m) * r * means.y);
    return Unit<T>::of(dx);
}

// Of eight channels: dweight += one row's, dbias += one row's.
template <class T>
static __device__ __forceinline__ void norm_backward_dweight(float (&dweight)[UNIT], const Unit<T> &dout, const Unit<T> &x, float m, float r) {
#pragma unroll
    for (int i = 0; i < UNIT; i++) dweight[i] += dout[i] * ((x[i] - m) * r);
}
template <class T> static __device__ __forceinline__ void norm_backward_dbias(float (&dbias)[UNIT], const Unit<T> &dout) {
#pragma unroll
    for (int i = 0; i < UNIT; i++) dbias[i] += dout[i];
}

static __device__ __forceinline__ float2 norm_means(float2 sums, bool centred, int64_t C) {
    const float2 means = {centred ? sums.x / (float)C : 0.0f, sums.y / (float)C};
    return means;
}

// dout and x of row n: the units t, t+threads, ...
template <class T, int UNITS>
static __device__ __forceinline__ void norm_load_rows(Unit<T> (&dout)[UNITS], Unit<T> (&x)[UNITS], const NormBackward<T> &p, int64_t n, int t,
                                                      int threads) {
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        const int64_t c = (int64_t)(t + u * threads) * UNIT;
        dout[u] = unit_load(p.dout + n * p.C, c, p.C, true);
        x[u] = unit_load(p.x + n * p.C, c, p.C, true);
    }
}

// This block's sums of the columns of unit u of each thread, which begin at c. WARP: the block's warps have the same columns.
template <bool WARP>
static __device__ __forceinline__ void norm_store_partial(float *partial, const float (&own)[UNIT], int64_t c, int u, float *shared, int64_t C) {
    float *row = partial + blockIdx.x * C;
    if constexpr (WARP) {
        const int column = u * COLUMNS_TILE + (int)threadIdx.x;
        const float sum = columns_block_sum(own, shared);
        if (column < C) row[column] = sum;
    } else {
        unit_store(row, c, C, true, Unit<float>::of(own));
    }
}

// Thread t of a row has the units t, t+threads, ...; the next row's loads are started before this row's sums, where registers allow (AHEAD).
// Grid: WARP: 2 blocks of 8 warps per SM; otherwise blocks of up to 512 threads, 512 threads per SM.
// Reads dout, x and (+=) dx, writes dx: 8 bytes per channel in bf16, 6 with `=`. Shared: 256 bytes, WARP: 8 KiB.
// 80 to 128 registers; rows above 8192 leave dbias to column_sums_kernel, or its sums would not fit (2 bytes more per channel). Not measured on a
// device yet; expected 75-80% of the memory bandwidth.
template <class T, int UNITS, bool WARP>
__global__ void __launch_bounds__(WARP ? COLUMNS_THREADS : NORM_THREADS, WARP ? NORM_BACKWARD_PER_SM : 1) norm_backward_kernel(NormBackward<T> p) {
    constexpr bool BIAS = UNITS < 4, AHEAD = sizeof(T) == 2 && UNITS < 3;
    __shared__ __align__(16) float shared[WARP ? COLUMNS_SHARED : 64];
    const int threads = WARP ? 32 : (int)blockDim.x, t = (int)threadIdx.x % threads, rows = WARP ? COLUMNS_WARPS : 1;
    const int64_t C = p.C, stride = (int64_t)gridDim.x * rows;
    float dweight[UNITS][UNIT] = {}, dbias[BIAS ? UNITS : 1][UNIT] = {};
    Unit<T> dout[UNITS], x[UNITS];
    int64_t n = (int64_t)blockIdx.x * rows + (int)threadIdx.x / threads;
    if (AHEAD && n < p.N) norm_load_rows(dout, x, p, n, t, threads);
    for (; n < p.N; n += stride) {
        if (!AHEAD) norm_load_rows(dout, x, p, n, t, threads);
        Unit<T> old[UNITS] = {}, next_dout[UNITS], next_x[UNITS];
        if (p.accumulate) {
#pragma unroll
            for (int u = 0; u < UNITS; u++) old[u] = unit_load(p.dx + n * C, (int64_t)(t + u * threads) * UNIT, C, true);
        }
        if (AHEAD && n + stride < p.N) norm_load_rows(next_dout, next_x, p, n + stride, t, threads);
        const float m = p.mean != nullptr ? p.mean[n] : 0.0f, r = p.rstd[n];
        float2 sums = {0.0f, 0.0f};
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const Unit<T> weight = unit_load(p.weight, (int64_t)(t + u * threads) * UNIT, C, true);
            const float2 add = norm_backward_sums(dout[u], x[u], weight, m, r);
            sums.x += add.x, sums.y += add.y;
            norm_backward_dweight(dweight[u], dout[u], x[u], m, r);
            if (BIAS) norm_backward_dbias(dbias[BIAS ? u : 0], dout[u]);
        }
        const float2 means = norm_means(norm_row_sum<WARP>(sums, reinterpret_cast<float2 *>(shared)), p.mean != nullptr, C);
#pragma unroll
        for (int u = 0; u < UNITS; u++) {
            const int64_t c = (int64_t)(t + u * threads) * UNIT;
            const Unit<T> weight = unit_load(p.weight, c, C, true);
            unit_forget(dout[u]);
            unit_forget(x[u]);
            unit_store(p.dx + n * C, c, C, true, norm_backward_dx(old[u], dout[u], x[u], weight, m, r, means));
            if (AHEAD) dout[u] = next_dout[u], x[u] = next_x[u];
        }
    }
#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        norm_store_partial<WARP>(p.partial, dweight[u], (int64_t)(t + u * threads) * UNIT, u, shared, C);
        if (BIAS) norm_store_partial<WARP>(p.partial + gridDim.x * C, dbias[BIAS ? u : 0], (int64_t)(t + u * threads) * UNIT, u, shared, C);
    }
}

// The two passes for any row. First the columns, so that dx may overwrite dout: partial (parts, C) as in column_sums_kernel, its grid too.
template <class T> __global__ void __launch_bounds__(COLUMNS_THREADS) norm_backward_columns_kernel(NormBackward<T> p) {
    __shared__ float shared[COLUMNS_SHARED];
    const int64_t C = p.C, tile = (int64_t)blockIdx.x * COLUMNS_TILE, c = tile + threadIdx.x % 32 * UNIT;
    float dweight[UNIT] = {};
    for (int64_t n = (int64_t)blockIdx.y * COLUMNS_WARPS + threadIdx.x / 32; n < p.N; n += (int64_t)gridDim.y * COLUMNS_WARPS) {
        const Unit<T> dout = unit_load(p.dout + n * C, c, C, p.packed), x = unit_load(p.x + n * C, c, C, p.packed);
        norm_backward_dweight(dweight, dout, x, p.mean != nullptr ? p.mean[n] : 0.0f, p.rstd[n]);
    }
    const float total = columns_block_sum(dweight, shared);
    if (tile + threadIdx.x < C) p.partial[blockIdx.y * C + tile + threadIdx.x] = total;
}

// Then dx; a block walks its row twice. Grid: a row per block of 256 threads.
template <class T> __global__ void __launch_bounds__(NORM_LOOP_THREADS) norm_backward_rows_kernel(NormBackward<T> p) {
    __shared__ float2 shared[32];
    const int64_t C = p.C, begin = threadIdx.x * UNIT, step = NORM_LOOP_THREADS * UNIT;
    for (int64_t n = blockIdx.x; n < p.N; n += gridDim.x) {
        const T *dout = p.dout + n * C, *x = p.x + n * C;
        T *dx = p.dx + n * C;
        const float m = p.mean != nullptr ? p.mean[n] : 0.0f, r = p.rstd[n];
        float2 sums = {0.0f, 0.0f};
        for (int64_t c = begin; c < C; c += step) {
            const Unit<T> d = unit_load(dout, c, C, p.packed), from = unit_load(x, c, C, p.packed), weight = unit_load(p.weight, c, C, p.packed);
            const float2 add = norm_backward_sums(d, from, weight, m, r);
            sums.x += add.x, sums.y += add.y;
        }
        const float2 means = norm_means(block_sum(sums, shared), p.mean != nullptr, C);
        for (int64_t c = begin; c < C; c += step) {
            const Unit<T> d = unit_load(dout, c, C, p.packed), from = unit_load(x, c, C, p.packed), weight = unit_load(p.weight, c, C, p.packed);
            Unit<T> old = {};
            if (p.accumulate) old = unit_load(dx, c, C, p.packed);
            unit_store(dx, c, C, p.packed, norm_backward_dx(old, d, from, weight, m, r, means));
        }
    }
}

// The kernel of a plan; nullptr: there is none for these rows.
template <class T> static inline auto norm_backward_of_(const ScratchNorm &plan) -> void (*)(NormBackward<T>) {
    if (plan.units == 0) return nullptr;
    if (!plan.warp && plan.units == 2) return norm_backward_kernel<T, 2, false>;
    if (plan.units == 1) return norm_backward_kernel<T, 1, true>;
    if (plan.units == 2) return norm_backward_kernel<T, 2, true>;
    if constexpr (sizeof(T) == 2) return plan.warp ? norm_backward_kernel<T, 3, true> : norm_backward_kernel<T, 4, false>;
    return nullptr;
}

template <class T>
static inline void norm_backward_(CudaDevice *device, NormBackward<T> p, float *dweight, Buffer dbias, bool accumulate_w, Buffer dout) {
    const ScratchNorm plan = scratch_norm_plan(p.C, p.packed, sizeof(T) == 4);
    const auto kernel = norm_backward_of_<T>(plan);
    const bool bias = kernel != nullptr && (plan.warp || plan.units == 2); // the kernel sums dbias too
    if (!bias && dbias.data != nullptr) {                                  // first: dx may overwrite dout
        cuda_column_sums_(device, dbias, accumulate_w, dout, p.N, p.C);
        dbias.data = nullptr;
    }
    const int64_t parts = scratch_norm_parts(device->sm_count, p.N, p.C, &plan);
    p.partial = (float *)cuda_scratch(device, scratch_norm_bytes(parts, p.C));
    if (kernel != nullptr) {
        launch(device, device->compute, {(unsigned)parts, plan.threads}, kernel, p);
    } else {
        const dim3 grid = columns_grid_(device, p.N, p.C);
        launch(device, device->compute, {grid, COLUMNS_THREADS}, norm_backward_columns_kernel<T>, p);
        launch(device, device->compute, {launch_blocks(device, p.N, 1, NORM_PER_SM), NORM_LOOP_THREADS}, norm_backward_rows_kernel<T>, p);
    }
    columns_finish_(device, dweight, (float *)dbias.data, p.partial, parts, p.C, accumulate_w);
}

template <class T>
static inline NormBackward<T> norm_backward_arguments_(Buffer dx, bool accumulate, Buffer dout, Buffer x, Buffer mean, Buffer rstd, Buffer weight,
                                                       int kind, int64_t N, int64_t C) {
    NormBackward<T> p = {};
    p.dx = (T *)dx.data, p.dout = (const T *)dout.data, p.x = (const T *)x.data, p.weight = (const T *)weight.data;
    p.mean = kind == NORM_LAYERNORM ? (const float *)mean.data : nullptr, p.rstd = (const float *)rstd.data;
    p.accumulate = accumulate, p.packed = units_packed(C, dx, dout, x, weight), p.N = N, p.C = C;
    return p;
}

// dx (N, C) = or +=, dweight and dbias (C) = or +=; see the equations above
static void cuda_norm_backward(Device *device, Buffer dx, bool accumulate_x, Buffer dweight, Buffer dbias, bool accumulate_w, Buffer dout, Buffer x,
                               Buffer mean, Buffer rstd, Buffer weight, int kind, int64_t N, int64_t C) {
    if (x.dtype == DTYPE_F32) {
        norm_backward_(cuda_of(device), norm_backward_arguments_<float>(dx, accumulate_x, dout, x, mean, rstd, weight, kind, N, C),
                       (float *)dweight.data, dbias, accumulate_w, dout);
    } else {
        norm_backward_(cuda_of(device), norm_backward_arguments_<bf16>(dx, accumulate_x, dout, x, mean, rstd, weight, kind, N, C),
                       (float *)dweight.data, dbias, accumulate_w, dout);
    }
}

#endif
