// attention.cuh: packed causal attention with grouped heads on the CUDA device: the ops. bf16 runs on tensor cores (attention_forward.cuh,
// attention_backward.cuh), fp32 does not (attention_f32.cuh). Knows nothing of positions or dropout.
#ifndef LLMC_CUDA_ATTENTION_CUH
#define LLMC_CUDA_ATTENTION_CUH

#include "llmc/cuda/attention_f32.cuh"     // attention_f32_*_kernel
#include "llmc/cuda/attention_forward.cuh" // attention_forward_kernel
#include "llmc/cuda/attention_place.cuh"   // attention_call_, attention_grid_, attention_launch_

// Whether attention of this shape exists: any head size up to 128 in fp32, multiples of 16 in bf16.
static bool cuda_attention_supports(Dtype dtype, AttentionShape shape) {
    const int64_t size = shape.head_size;
    if (shape.heads < 1 || shape.kv_heads < 1 || shape.heads % shape.kv_heads != 0 || size < 1 || size > ATTENTION_MAX_HEAD) return false;
    return dtype == DTYPE_F32 || (dtype == DTYPE_BF16 && size % 16 == 0);
}

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

#endif
