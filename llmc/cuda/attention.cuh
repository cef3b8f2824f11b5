// attention.cuh: packed causal attention with grouped heads on the CUDA device: the ops. bf16 runs on tensor cores (attention_forward.cuh,
// attention_backward.cuh), fp32 does not (attention_f32.cuh). Knows nothing of positions or dropout.
#ifndef LLMC_CUDA_ATTENTION_CUH
#define LLMC_CUDA_ATTENTION_CUH

#include "llmc/cuda/attention_backward.cuh" // attention_delta_kernel, attention_keys_kernel, attention_queries_kernel
#include "llmc/cuda/attention_f32.cuh"      // attention_f32_*_kernel
#include "llmc/cuda/attention_forward.cuh"  // attention_forward_kernel
#include "llmc/cuda/attention_place.cuh"    // attention_call_, attention_grid_, attention_launch_, cuda_attention_supports

// Pieces of 16 bytes: in bf16 a token's row is a multiple of 32 bytes, so that all are aligned when the first is.
static void attention_check_(AttentionShape shape, Dtype dtype, uintptr_t addresses) {
    if (!cuda_attention_supports(dtype, shape)) cuda_fail("attention", "this head size or number of heads is not supported");
    if (dtype == DTYPE_BF16 && (addresses & 15) != 0) cuda_fail("attention", "a buffer is not aligned to 16 bytes");
}

template <int HD>
static void attention_forward_bf16_(CudaDevice *device, AttentionCall c, Buffer out, Buffer lse, Buffer qkv, const Packing *packing) {
    typedef AttentionForward<HD> F;
    const dim3 grid = attention_grid_(&c, packing, F::QUERIES, c.heads);
    attention_launch_<attention_forward_kernel<HD>>(device, grid, F::SHARED_BYTES, c, (bf16 *)out.data, (float *)lse.data, (const bf16 *)qkv.data);
}

// out (N, NH*HS) =; lse (NH, N) F32 = log of the sum of the exponentials of the scaled scores
static void cuda_attention_forward(Device *device, Buffer out, Buffer lse, Buffer qkv, const Packing *packing, AttentionShape shape) {
    CudaDevice *d = cuda_of(device);
    attention_check_(shape, qkv.dtype, (uintptr_t)out.data | (uintptr_t)qkv.data);
    AttentionCall c = attention_call_(packing, shape);
    if (qkv.dtype == DTYPE_F32) {
        const dim3 grid = attention_grid_(&c, packing, ATTENTION_F32_ROWS, c.heads);
        attention_launch_<attention_f32_forward_kernel>(d, grid, ATTENTION_F32_SHARED, c, (float *)out.data, (float *)lse.data,
                                                        (const float *)qkv.data);
    } else if (c.head_size <= 32) {
        attention_forward_bf16_<32>(d, c, out, lse, qkv, packing);
    } else if (c.head_size <= 64) {
        attention_forward_bf16_<64>(d, c, out, lse, qkv, packing);
    } else if (c.head_size <= 96) {
        attention_forward_bf16_<96>(d, c, out, lse, qkv, packing);
    } else {
        attention_forward_bf16_<128>(d, c, out, lse, qkv, packing);
    }
}

template <int HD>
static void attention_backward_bf16_(CudaDevice *device, AttentionCall c, Buffer dqkv, const float *delta, Buffer dout, Buffer qkv,
                                     const float *lse, const Packing *packing) {
    typedef AttentionKeys<HD> K;
    typedef AttentionQueries<HD> Q;
    bf16 *to = (bf16 *)dqkv.data;
    const bf16 *from = (const bf16 *)qkv.data, *gradient = (const bf16 *)dout.data;
    dim3 grid = attention_grid_(&c, packing, K::ROWS, c.kv_heads);
    attention_launch_<attention_keys_kernel<HD>>(device, grid, K::SHARED_BYTES, c, to, delta, gradient, from, lse);
    grid = attention_grid_(&c, packing, Q::ROWS, c.heads);
    attention_launch_<attention_queries_kernel<HD>>(device, grid, Q::SHARED_BYTES, c, to, delta, gradient, from, lse);
}

static void attention_backward_f32_(CudaDevice *device, AttentionCall c, Buffer dqkv, const float *delta, Buffer dout, Buffer qkv, const float *lse,
                                    const Packing *packing) {
    float *to = (float *)dqkv.data;
    const float *from = (const float *)qkv.data, *gradient = (const float *)dout.data;
    dim3 grid = attention_grid_(&c, packing, ATTENTION_F32_ROWS, c.kv_heads);
    attention_launch_<attention_f32_keys_kernel>(device, grid, ATTENTION_F32_SHARED, c, to, delta, gradient, from, lse);
    grid = attention_grid_(&c, packing, ATTENTION_F32_ROWS, c.heads);
    attention_launch_<attention_f32_queries_kernel>(device, grid, ATTENTION_F32_SHARED, c, to, delta, gradient, from, lse);
}

template <class T> static void attention_delta_(CudaDevice *device, AttentionCall c, float *delta, Buffer dout, Buffer out) {
    const unsigned blocks = launch_blocks(device, c.tokens * c.heads, ATTENTION_THREADS / 8, 16);
    launch(device, device->compute, {blocks, ATTENTION_THREADS}, attention_delta_kernel<T>, c, delta, (const T *)dout.data, (const T *)out.data);
}

// dqkv (N, QKV) =; delta (NH, N) F32 = row sums of dout*out
static void cuda_attention_backward(Device *device, Buffer dqkv, Buffer delta, Buffer dout, Buffer out, Buffer qkv, Buffer lse,
                                    const Packing *packing, AttentionShape shape) {
    CudaDevice *d = cuda_of(device);
    attention_check_(shape, qkv.dtype, (uintptr_t)dqkv.data | (uintptr_t)dout.data | (uintptr_t)out.data | (uintptr_t)qkv.data);
    const AttentionCall c = attention_call_(packing, shape);
    float *sums = (float *)delta.data;
    const float *rows = (const float *)lse.data;
    if (qkv.dtype == DTYPE_F32) {
        attention_delta_<float>(d, c, sums, dout, out);
        attention_backward_f32_(d, c, dqkv, sums, dout, qkv, rows, packing);
        return;
    }
    attention_delta_<bf16>(d, c, sums, dout, out);
    if (c.head_size <= 32) {
        attention_backward_bf16_<32>(d, c, dqkv, sums, dout, qkv, rows, packing);
    } else if (c.head_size <= 64) {
        attention_backward_bf16_<64>(d, c, dqkv, sums, dout, qkv, rows, packing);
    } else if (c.head_size <= 96) {
        attention_backward_bf16_<96>(d, c, dqkv, sums, dout, qkv, rows, packing);
    } else {
        attention_backward_bf16_<128>(d, c, dqkv, sums, dout, qkv, rows, packing);
    }
}

#endif
