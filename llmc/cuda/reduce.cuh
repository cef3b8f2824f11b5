// reduce.cuh: sums and maxima over a warp and over a block, and sums of columns over all tokens, without atomics: the order is fixed, so that the
// bits of a result depend on the values alone.
#ifndef LLMC_CUDA_REDUCE_CUH
#define LLMC_CUDA_REDUCE_CUH

#include "llmc/cuda/block.cuh"  // Unit, unit_load
#include "llmc/cuda/launch.cuh" // launch
#include "llmc/cuda/scratch.h"  // COLUMNS_TILE, scratch_column_parts
#include <cmath>                // INFINITY

// All 32 lanes call these together. A butterfly: addition commutes, so each lane computes the same bits.
static __device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
    return value;
}
static __device__ __forceinline__ double warp_sum(double value) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) value += __shfl_xor_sync(0xffffffffu, value, lanes);
    return value;
}
// two sums at once
static __device__ __forceinline__ float2 warp_sum(float2 value) {
    const float2 sum = {warp_sum(value.x), warp_sum(value.y)};
    return sum;
}
// A NaN is passed over unless all are NaN.
static __device__ __forceinline__ float warp_max(float value) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, lanes));
    return value;
}

// All threads of a block of whole warps call these together. shared32: a __shared__ array of 32 elements of the caller, free again on return.
template <class T> static __device__ __forceinline__ T block_sum(T value, T *shared32) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, warps = (int)blockDim.x / 32;
    value = warp_sum(value);
    if (lane == 0) shared32[warp] = value;
    __syncthreads();
    value = warp_sum(lane < warps ? shared32[lane] : T{});
    __syncthreads(); // shared32 may be written again
    return value;
}
static __device__ __forceinline__ float block_max(float value, float *shared32) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, warps = (int)blockDim.x / 32;
    value = warp_max(value);
    if (lane == 0) shared32[warp] = value;
    __syncthreads();
    value = warp_max(lane < warps ? shared32[lane] : -INFINITY);
    __syncthreads();
    return value;
}

// ----------------------------------------------------------------------------
// Sums of columns: blocks write partial sums (parts, C), then columns_finish_kernel adds the parts.

enum {
    COLUMNS_WARPS = 8,                             // of a block; they share the rows, and a warp's lanes share the columns, a unit each
    COLUMNS_THREADS = 32 * COLUMNS_WARPS,          // a thread per column of the tile, for the last step
    COLUMNS_SHARED = COLUMNS_WARPS * COLUMNS_TILE, // floats
    COLUMNS_FINISH_WARPS = 16,
};
static_assert(COLUMNS_TILE == 32 * UNIT && COLUMNS_ROWS == 8 * COLUMNS_WARPS, "a warp's lanes share a tile");

// Sum over the block's warps of `own`, the sums of a warp's rows in the columns of the lane's unit. Thread t gets that of column t of the tile.
// shared (COLUMNS_SHARED) is free again on return.
static __device__ __forceinline__ float columns_block_sum(const float (&own)[UNIT], float *shared) {
#pragma unroll
    for (int i = 0; i < UNIT; i++) shared[threadIdx.x * UNIT + i] = own[i];
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < COLUMNS_WARPS; warp++) sum += shared[warp * COLUMNS_TILE + (int)threadIdx.x];
    __syncthreads(); // shared may be written again
    return sum;
}

// partial (gridDim.y, C) = sums over the rows of each part; in (N, C; `row` elements from row to row). Grid: (tiles of COLUMNS_TILE columns,
// parts); warp w of part p takes the rows p*8+w, p*8+w+8*parts, ... Shared: 8 KiB. Reads 2 bytes per element in bf16. 45 registers. Not measured on
// a device yet; expected 85% of the memory bandwidth.
template <class T>
__global__ void __launch_bounds__(COLUMNS_THREADS) column_sums_kernel(float *partial, const T *in, int64_t row, int64_t N, int64_t C, bool packed) {
    __shared__ float shared[COLUMNS_SHARED];
    const int64_t tile = (int64_t)blockIdx.x * COLUMNS_TILE, c = tile + threadIdx.x % 32 * UNIT;
    float sum[UNIT] = {};
#pragma unroll 4
    for (int64_t n = (int64_t)blockIdx.y * COLUMNS_WARPS + threadIdx.x / 32; n < N; n += (int64_t)gridDim.y * COLUMNS_WARPS) {
        const Unit<T> unit = unit_load(in + n * row, c, C, packed);
#pragma unroll
        for (int i = 0; i < UNIT; i++) sum[i] += unit[i];
    }
    const float total = columns_block_sum(sum, shared);
    if (tile + threadIdx.x < C) partial[blockIdx.y * C + tile + threadIdx.x] = total;
}

// first (C) = or += sum over parts of partial[0]; second (C) likewise of partial[1], where the grid has a second row. partial (2, parts, C).
// Grid: (tiles of 32 columns, 1 or 2); each warp sums every 16th part, then the first warp adds the warps' sums. Shared: 2 KiB. A few microseconds.
template <int WARPS>
__global__ void __launch_bounds__(32 * WARPS)
    columns_finish_kernel(float *first, float *second, const float *partial, int64_t parts, int64_t C, bool accumulate) {
    __shared__ float shared[WARPS * 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int64_t c = (int64_t)blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (c < C) {
#pragma unroll 4
        for (int64_t part = warp; part < parts; part += WARPS) sum += partial[(blockIdx.y * parts + part) * C + c];
    }
    shared[threadIdx.x] = sum;
    __syncthreads(); // the first warp reads all
    if (warp == 0 && c < C) {
        float *out = blockIdx.y == 0 ? first : second;
        float total = accumulate ? out[c] : 0.0f;
        sum = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) sum += shared[w * 32 + lane];
        out[c] = total + sum;
    }
}

// second may be nullptr
static inline void columns_finish_(CudaDevice *device, float *first, float *second, const float *partial, int64_t parts, int64_t C,
                                   bool accumulate) {
    launch(device, device->compute, {dim3((unsigned)((C + 31) / 32), second != nullptr ? 2 : 1), 32 * COLUMNS_FINISH_WARPS},
           columns_finish_kernel<COLUMNS_FINISH_WARPS>, first, second, partial, parts, C, accumulate);
}

// Blocks of column_sums_kernel and its like for N rows of C columns.
static inline dim3 columns_grid_(const CudaDevice *device, int64_t N, int64_t C) {
    return dim3((unsigned)scratch_column_tiles(C), (unsigned)scratch_column_parts(device->sm_count, N, C));
}

// out (OC) F32 = or += column sums of in (N, OC; rows may be apart)
static inline void cuda_column_sums_(CudaDevice *device, Buffer out, bool accumulate, Buffer in, int64_t N, int64_t OC) {
    const dim3 grid = columns_grid_(device, N, OC);
    float *partial = (float *)cuda_scratch(device, scratch_column_bytes(device->sm_count, N, OC));
    const int64_t row = buffer_row(in, OC);
    const bool packed = units_packed(row, in); // sums of what lies behind a row are dropped
    if (in.dtype == DTYPE_F32) {
        launch(device, device->compute, {grid, COLUMNS_THREADS}, column_sums_kernel<float>, partial, (const float *)in.data, row, N, OC, packed);
    } else {
        launch(device, device->compute, {grid, COLUMNS_THREADS}, column_sums_kernel<bf16>, partial, (const bf16 *)in.data, row, N, OC, packed);
    }
    columns_finish_(device, (float *)out.data, nullptr, partial, grid.y, OC, accumulate);
}

#endif
