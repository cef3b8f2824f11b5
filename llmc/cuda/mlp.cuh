// mlp.cuh: SwiGLU on the CUDA device (Shazeer 2020), and GELU (tanh form; Hendrycks & Gimpel 2016) for matrix products whose library has no
// epilogue for it.
#ifndef LLMC_CUDA_MLP_CUH
#define LLMC_CUDA_MLP_CUH

#include "llmc/cuda/block.cuh"  // Unit, unit_load
#include "llmc/cuda/launch.cuh" // launch, launch_blocks

enum { MLP_THREADS = 256, MLP_PER_SM = 16 };

// 1 / (1 + exp(-x)). For bf16 by the hardware's approximations, which are good to 20 bits: with exact division the kernels would be bound by
// arithmetic.
template <class T> static __device__ __forceinline__ float mlp_sigmoid(float x) {
    if constexpr (sizeof(T) == sizeof(float)) {
        return 1.0f / (1.0f + expf(-x));
    } else {
        return __fdividef(1.0f, 1.0f + __expf(-x));
    }
}

// out (N, FF) = gate * sigmoid(gate) * up, gate_up (N, 2*FF) = gate | up. Grid: a thread per unit of 8 of out, strides over the grid.
// Moves 6 bytes per element of out in bf16. 32 registers. Not measured on a device yet; expected 85% of the memory bandwidth.
template <class T>
__global__ void __launch_bounds__(MLP_THREADS) swiglu_forward_kernel(T *out, const T *gate_up, int64_t N, int64_t FF, bool packed) {
    const int64_t row_units = (FF + UNIT - 1) / UNIT;
    for (int64_t i = blockIdx.x * (int64_t)MLP_THREADS + threadIdx.x; i < N * row_units; i += (int64_t)gridDim.x * MLP_THREADS) {
        const UnitPlace at = unit_place(i, row_units);
        const T *row = gate_up + at.row * 2 * FF;
        const Unit<T> gate = unit_load(row, at.c, FF, packed), up = unit_load(row + FF, at.c, FF, packed);
        float value[UNIT];
#pragma unroll
        for (int k = 0; k < UNIT; k++) value[k] = gate[k] * mlp_sigmoid<T>(gate[k]) * up[k];
        unit_store(out + at.row * FF, at.c, FF, packed, Unit<T>::of(value));
    }
}

// dgate_up (N, 2*FF) =: dgate = dout * up * s * (1 + gate * (1 - s)), dup = dout * gate * s, s = sigmoid(gate). May be in place of gate_up.
// Grid as above. Moves 10 bytes per element of dout in bf16. 40 registers. Not measured on a device yet; expected 85%.
template <class T>
__global__ void __launch_bounds__(MLP_THREADS)
    swiglu_backward_kernel(T *dgate_up, const T *dout, const T *gate_up, int64_t N, int64_t FF, bool packed) {
    const int64_t row_units = (FF + UNIT - 1) / UNIT;
    for (int64_t i = blockIdx.x * (int64_t)MLP_THREADS + threadIdx.x; i < N * row_units; i += (int64_t)gridDim.x * MLP_THREADS) {
        const UnitPlace at = unit_place(i, row_units);
        const T *row = gate_up + at.row * 2 * FF;
        T *drow = dgate_up + at.row * 2 * FF;
        const Unit<T> gate = unit_load(row, at.c, FF, packed), up = unit_load(row + FF, at.c, FF, packed);
        const Unit<T> d = unit_load(dout + at.row * FF, at.c, FF, packed);
        float dgate[UNIT], dup[UNIT];
#pragma unroll
        for (int k = 0; k < UNIT; k++) {
            const float g = gate[k], s = mlp_sigmoid<T>(g);
            dgate[k] = d[k] * up[k] * s * (1.0f + g * (1.0f - s));
            dup[k] = d[k] * g * s;
        }
        unit_store(drow, at.c, FF, packed, Unit<T>::of(dgate));
        unit_store(drow + FF, at.c, FF, packed, Unit<T>::of(dup));
    }
}

static inline unsigned mlp_blocks_(const CudaDevice *device, int64_t N, int64_t C) {
    return launch_blocks(device, N * ((C + UNIT - 1) / UNIT), MLP_THREADS, MLP_PER_SM);
}

static void cuda_swiglu_forward(Device *device, Buffer out, Buffer gate_up, int64_t N, int64_t FF) {
    CudaDevice *c = cuda_of(device);
    const LaunchShape shape = {mlp_blocks_(c, N, FF), MLP_THREADS};
    const bool packed = units_packed(FF, out, gate_up);
    if (out.dtype == DTYPE_F32) {
        launch(c, c->compute, shape, swiglu_forward_kernel<float>, (float *)out.data, (const float *)gate_up.data, N, FF, packed);
    } else {
        launch(c, c->compute, shape, swiglu_forward_kernel<bf16>, (bf16 *)out.data, (const bf16 *)gate_up.data, N, FF, packed);
    }
}

static void cuda_swiglu_backward(Device *device, Buffer dgate_up, Buffer dout, Buffer gate_up, int64_t N, int64_t FF) {
    CudaDevice *c = cuda_of(device);
    const LaunchShape shape = {mlp_blocks_(c, N, FF), MLP_THREADS};
    const bool packed = units_packed(FF, dgate_up, dout, gate_up);
    if (dout.dtype == DTYPE_F32) {
        launch(c, c->compute, shape, swiglu_backward_kernel<float>, (float *)dgate_up.data, (const float *)dout.data, (const float *)gate_up.data,
               N, FF, packed);
    } else {
        launch(c, c->compute, shape, swiglu_backward_kernel<bf16>, (bf16 *)dgate_up.data, (const bf16 *)dout.data, (const bf16 *)gate_up.data, N,
               FF, packed);
    }
}

// ----------------------------------------------------------------------------
// GELU: x/2 * (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3). The cube may overflow where sigmoid is 0 or 1 long since; in
// the derivative its product with 0 would be NaN, so x is clamped.

static __device__ __forceinline__ float mlp_gelu_clamp(float x) { return x > 100.0f ? 100.0f : x < -100.0f ? -100.0f : x; }
template <class T> static __device__ __forceinline__ float mlp_gelu_sigmoid(float c) {
    return mlp_sigmoid<T>(1.59576912f * (c + 0.044715f * c * c * c));
}

// out (n) = gelu(in). Moves 4 bytes per element in bf16. 29 registers. Not measured on a device yet; expected 85%.
template <class T> __global__ void __launch_bounds__(MLP_THREADS) gelu_forward_kernel(T *out, const T *in, int64_t n, bool packed) {
    for (int64_t i = (blockIdx.x * (int64_t)MLP_THREADS + threadIdx.x) * UNIT; i < n; i += (int64_t)gridDim.x * MLP_THREADS * UNIT) {
        const Unit<T> x = unit_load(in, i, n, packed);
        float value[UNIT];
#pragma unroll
        for (int k = 0; k < UNIT; k++) value[k] = x[k] * mlp_gelu_sigmoid<T>(mlp_gelu_clamp(x[k]));
        unit_store(out, i, n, packed, Unit<T>::of(value));
    }
}

// din (n) *= gelu'(in). Moves 6 bytes per element in bf16. 31 registers. Not measured on a device yet; expected 85%.
template <class T> __global__ void __launch_bounds__(MLP_THREADS) gelu_backward_kernel(T *din, const T *in, int64_t n, bool packed) {
    for (int64_t i = (blockIdx.x * (int64_t)MLP_THREADS + threadIdx.x) * UNIT; i < n; i += (int64_t)gridDim.x * MLP_THREADS * UNIT) {
        const Unit<T> x = unit_load(in, i, n, packed), d = unit_load(din, i, n, packed);
        float value[UNIT];
#pragma unroll
        for (int k = 0; k < UNIT; k++) {
            const float c = mlp_gelu_clamp(x[k]), s = mlp_gelu_sigmoid<T>(c);
            value[k] = d[k] * (s + c * s * (1.0f - s) * 1.59576912f * (1.0f + 0.134145f * c * c));
        }
        unit_store(din, i, n, packed, Unit<T>::of(value));
    }
}

// out (n) = gelu(in), both of one type; may be in place
static inline void cuda_gelu_forward_(CudaDevice *device, Buffer out, Buffer in, int64_t n) {
    const LaunchShape shape = {mlp_blocks_(device, 1, n), MLP_THREADS};
    const bool packed = units_packed(n, out, in);
    if (in.dtype == DTYPE_F32) {
        launch(device, device->compute, shape, gelu_forward_kernel<float>, (float *)out.data, (const float *)in.data, n, packed);
    } else {
        launch(device, device->compute, shape, gelu_forward_kernel<bf16>, (bf16 *)out.data, (const bf16 *)in.data, n, packed);
    }
}

// din (n) *= gelu'(gelu_in (n)), both of one type
static inline void cuda_gelu_backward_(CudaDevice *device, Buffer din, Buffer gelu_in, int64_t n) {
    const LaunchShape shape = {mlp_blocks_(device, 1, n), MLP_THREADS};
    const bool packed = units_packed(n, din, gelu_in);
    if (din.dtype == DTYPE_F32) {
        launch(device, device->compute, shape, gelu_backward_kernel<float>, (float *)din.data, (const float *)gelu_in.data, n, packed);
    } else {
        launch(device, device->compute, shape, gelu_backward_kernel<bf16>, (bf16 *)din.data, (const bf16 *)gelu_in.data, n, packed);
    }
}

#endif
