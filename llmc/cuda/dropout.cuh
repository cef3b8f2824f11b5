// dropout.cuh: the dropout mask of rng.h for eight channels of a token, and dropout's backward, on the CUDA device. Forward is fused into the ops
// that have a dropout (norm.cuh, embedding.cuh).
#ifndef LLMC_CUDA_DROPOUT_CUH
#define LLMC_CUDA_DROPOUT_CUH

#include "llmc/cuda/block.cuh"  // Unit, unit_load
#include "llmc/cuda/launch.cuh" // launch, launch_blocks
#include "llmc/rng.h"           // rng_dropout_bits

enum { DROPOUT_THREADS = 256 };

// Dropout as kernels take it.
struct DropoutDraw {
    const uint64_t *key; // one
    uint32_t site, keep_threshold;
    const int32_t *token_index; // (N); nullptr: nothing is dropped
    float scale;                // of what is kept
};

static inline DropoutDraw dropout_draw(const Dropout *dropout) {
    if (!dropout_active(dropout)) return DropoutDraw{};
    return {dropout->key, dropout->site, dropout->keep_threshold, (const int32_t *)dropout->token_index.data,
            65536.0f / (float)dropout->keep_threshold};
}

// mask (8) = 0 for a dropped element, the scale for a kept one: channels c .. c+7 (c a multiple of 8) of the token with this index in the global
// batch
static __device__ __forceinline__ void dropout_mask(float (&mask)[UNIT], const DropoutDraw &draw, int32_t index, int64_t c) {
    uint16_t bits[UNIT];
    rng_dropout_bits(__ldg(draw.key), draw.site, (uint64_t)index, (uint32_t)(c / UNIT), bits);
#pragma unroll
    for (int i = 0; i < UNIT; i++) mask[i] = bits[i] < draw.keep_threshold ? draw.scale : 0.0f;
}

// out (N, C) = in * mask. Grid: a thread per unit of 8, strides over the grid. Moves 4 bytes per element in bf16; about 10 integer instructions per
// element: bound by memory. 30 registers. Not measured on a device yet; expected 85% of the memory bandwidth.
template <class T>
__global__ void __launch_bounds__(DROPOUT_THREADS)
    dropout_backward_kernel(T *out, const T *in, DropoutDraw draw, int64_t N, int64_t C, bool packed) {
    const int64_t row_units = (C + UNIT - 1) / UNIT;
    for (int64_t i = blockIdx.x * (int64_t)DROPOUT_THREADS + threadIdx.x; i < N * row_units; i += (int64_t)gridDim.x * DROPOUT_THREADS) {
        const UnitPlace at = unit_place(i, row_units);
        Unit<T> unit = unit_load(in + at.row * C, at.c, C, packed);
        if (draw.token_index != nullptr) {
            float value[UNIT];
            dropout_mask(value, draw, draw.token_index[at.row], at.c);
#pragma unroll
            for (int k = 0; k < UNIT; k++) value[k] *= unit[k];
            unit = Unit<T>::of(value);
        }
        unit_store(out + at.row * C, at.c, C, packed, unit);
    }
}

template <class T> static inline void dropout_backward_(CudaDevice *device, Buffer out, Buffer in, const Dropout *dropout, int64_t N, int64_t C) {
    launch(device, device->compute, {launch_blocks(device, N * ((C + UNIT - 1) / UNIT), DROPOUT_THREADS, 16), DROPOUT_THREADS},
           dropout_backward_kernel<T>, (T *)out.data, (const T *)in.data, dropout_draw(dropout), N, C, units_packed(C, out, in));
}

// out (N, C) = in with dropout's mask and scale; may be in place. Without dropout a copy.
static void cuda_dropout_backward(Device *device, Buffer out, Buffer in, const Dropout *dropout, int64_t N, int64_t C) {
    if (in.dtype == DTYPE_F32) {
        dropout_backward_<float>(cuda_of(device), out, in, dropout, N, C);
    } else {
        dropout_backward_<bf16>(cuda_of(device), out, in, dropout, N, C);
    }
}

#endif
