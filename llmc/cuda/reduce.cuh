// reduce.cuh: sums and maxima over a warp and over a block. Every thread gets the result, and its bits depend on the
// values alone: the order is fixed. Nothing here adds across blocks.
#ifndef LLMC_CUDA_REDUCE_CUH
#define LLMC_CUDA_REDUCE_CUH

#include "llmc/cuda/cuda.cuh" // cuda_runtime.h
#include <cmath>              // INFINITY

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
    value = warp_sum(lane < warps ? shared32[lane] : (T)0);
    __syncthreads();
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

#endif
