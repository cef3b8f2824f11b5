// cast.cuh: conversion between storage types, and the sum of two fp32 buffers, on the CUDA device. Both are bound by memory.
#ifndef LLMC_CUDA_CAST_CUH
#define LLMC_CUDA_CAST_CUH

#include "llmc/cuda/launch.cuh" // launch, launch_blocks

enum { CAST_THREADS = 256, CAST_EACH = CAST_THREADS * 8 };

// to (n) = from (n). Grid: strides over pieces of CAST_EACH elements; each thread takes 8 neighbours, where both are 16-byte aligned as packs.
template <class To, class From> __global__ void __launch_bounds__(CAST_THREADS) cast_kernel(To *to, const From *from, int64_t n, bool packed) {
    for (int64_t i = (blockIdx.x * (int64_t)CAST_THREADS + threadIdx.x) * 8; i < n; i += (int64_t)gridDim.x * CAST_EACH) {
        if (packed && i + 8 <= n) {
            float value[8];
#pragma unroll
            for (int k = 0; k < 8; k += Pack<From>::size) {
                const Pack<From> in = *reinterpret_cast<const Pack<From> *>(from + i + k);
#pragma unroll
                for (int j = 0; j < Pack<From>::size; j++) value[k + j] = to_float(in.at[j]);
            }
#pragma unroll
            for (int k = 0; k < 8; k += Pack<To>::size) {
                Pack<To> out;
#pragma unroll
                for (int j = 0; j < Pack<To>::size; j++) out.at[j] = from_float<To>(value[k + j]);
                *reinterpret_cast<Pack<To> *>(to + i + k) = out;
            }
        } else {
            for (int64_t k = i; k < n && k < i + 8; k++) to[k] = from_float<To>(to_float(from[k]));
        }
    }
}

template <class To, class From> static void cast_launch_(CudaDevice *device, Buffer to, Buffer from, int64_t n) {
    const bool packed = (((uintptr_t)to.data | (uintptr_t)from.data) & 15) == 0;
    launch(device, device->compute, {launch_blocks(device, n, CAST_EACH, 8), CAST_THREADS}, cast_kernel<To, From>, (To *)to.data,
           (const From *)from.data, n, packed);
}

// to (n) = from (n), any mix of F32 and BF16; rounds to nearest even
static void cuda_cast(Device *device, Buffer to, Buffer from, int64_t n) {
    CudaDevice *c = cuda_of(device);
    if (to.dtype == from.dtype) {
        if (n > 0)
            cuda_check(cudaMemcpyAsync(to.data, from.data, (size_t)n * dtype_bytes(to.dtype), cudaMemcpyDeviceToDevice, c->compute),
                       "cudaMemcpyAsync");
    } else if (to.dtype == DTYPE_F32) {
        cast_launch_<float, bf16>(c, to, from, n);
    } else {
        cast_launch_<bf16, float>(c, to, from, n);
    }
}

// to (n) += from (n)
__global__ void __launch_bounds__(CAST_THREADS) accumulate_kernel(float *to, const float *from, int64_t n) {
    for (int64_t i = blockIdx.x * (int64_t)CAST_THREADS + threadIdx.x; i < n; i += (int64_t)gridDim.x * CAST_THREADS) to[i] += from[i];
}

// to (n) += from (n), both F32
static void cuda_accumulate(Device *device, Buffer to, Buffer from, int64_t n) {
    CudaDevice *c = cuda_of(device);
    launch(c, c->compute, {launch_blocks(c, n, CAST_THREADS, 8), CAST_THREADS}, accumulate_kernel, (float *)to.data, (const float *)from.data, n);
}

#endif
