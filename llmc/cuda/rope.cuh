// rope.cuh: what happens to q and k before attention on the CUDA device: RMSNorm per head (optional), then rotation of the halves by position
// (optional), forward and backward. The table of cosines and sines is filled by llmc/rope.h.
//
// A thread has eight pairs (i, i + HS/2) of a head, a unit of each half: the rotation needs no other thread. A group of 1, 2, 4 or 8 lanes has a
// head, a block a token: its heads go round the block's groups. An odd head size has an element without a
// partner, which no rotation moves.
#ifndef LLMC_CUDA_ROPE_CUH
#define LLMC_CUDA_ROPE_CUH

#include "llmc/cuda/reduce.cuh" // columns_finish_
#include "llmc/cuda/scratch.h"  // ROPE_KINDS, scratch_rope_blocks

enum { ROPE_THREADS = 128 };

struct RopeHeads {
    int q, kv, size; // heads of q, of k (and v); channels of a head
    int lanes;       // of a head: 1, 2, 4 or 8
    bool packed;
    int64_t N;
    const float *table;       // (positions, HS): cosines | sines; nullptr: no rotation
    const int32_t *positions; // (N)
};

// The pairs of one thread: elements c .. c+7 of the first half of a head and their partners, as they are stored, and as floats.
template <class T> struct RopeUnits { Unit<T> first, second; };
struct RopePairs {
    float first[UNIT], second[UNIT];
};

// Where the thread's i-th element of the first half lies, and whether it exists and has a partner, half a head further.
static __device__ __forceinline__ int rope_first(int c, int i, int size) { return c + i < size / 2 ? c + i : 2 * (size / 2); }
static __device__ __forceinline__ bool rope_exists(int c, int i, int size) { return c + i < size - size / 2; }
static __device__ __forceinline__ bool rope_paired(int c, int i, int size) { return c + i < size / 2; }

// head (HS)
template <class T> static __device__ __forceinline__ RopeUnits<T> rope_load(const T *head, int c, const RopeHeads &p) {
    if (p.packed) return {unit_load(head, c, p.size / 2, true), unit_load(head + p.size / 2, c, p.size / 2, true)};
    float first[UNIT], second[UNIT];
#pragma unroll
    for (int i = 0; i < UNIT; i++) {
        first[i] = rope_exists(c, i, p.size) ? to_float(head[rope_first(c, i, p.size)]) : 0.0f;
        second[i] = rope_paired(c, i, p.size) ? to_float(head[p.size / 2 + c + i]) : 0.0f;
    }
    return {Unit<T>::of(first), Unit<T>::of(second)};
}

template <class T> static __device__ __forceinline__ RopePairs rope_pairs(const RopeUnits<T> &units) {
    RopePairs pairs;
#pragma unroll
    for (int i = 0; i < UNIT; i++) pairs.first[i] = units.first[i], pairs.second[i] = units.second[i];
    return pairs;
}

template <class T> static __device__ __forceinline__ void rope_store(T *head, int c, const RopeHeads &p, const RopePairs &pairs) {
    if (p.packed) {
        unit_store(head, c, p.size / 2, true, Unit<T>::of(pairs.first));
        unit_store(head + p.size / 2, c, p.size / 2, true, Unit<T>::of(pairs.second));
    } else {
#pragma unroll
        for (int i = 0; i < UNIT; i++) {
            if (rope_exists(c, i, p.size)) head[rope_first(c, i, p.size)] = from_float<T>(pairs.first[i]);
            if (rope_paired(c, i, p.size)) head[p.size / 2 + c + i] = from_float<T>(pairs.second[i]);
        }
    }
}

// Cosines (first) and sines (second) of the thread's pairs; without a table those of angle 0.
static __device__ __forceinline__ RopePairs rope_angles(int c, const RopeHeads &p, int64_t token) {
    RopePairs angles;
    if (p.table != nullptr) {
        const float *row = p.table + (int64_t)p.positions[token] * p.size;
        const int half = p.size / 2;
        const Unit<float> cosines = unit_load(row, c, half, p.packed), sines = unit_load(row + half, c, half, p.packed);
#pragma unroll
        for (int i = 0; i < UNIT; i++) angles.first[i] = rope_paired(c, i, p.size) ? cosines[i] : 1.0f, angles.second[i] = sines[i];
    } else {
#pragma unroll
        for (int i = 0; i < UNIT; i++) angles.first[i] = 1.0f, angles.second[i] = 0.0f;
    }
    return angles;
}

// Turns the pairs by the angles; direction -1 turns them back.
static __device__ __forceinline__ void rope_rotate(RopePairs &x, const RopePairs &angles, float direction) {
#pragma unroll
    for (int i = 0; i < UNIT; i++) {
        const float cosine = angles.first[i], sine = direction * angles.second[i], x1 = x.first[i], x2 = x.second[i];
        x.first[i] = x1 * cosine - x2 * sine;
        x.second[i] = x2 * cosine + x1 * sine;
    }
}

// Sum over the lanes of a head, the same bits in each. All lanes of the warp call it.
static __device__ __forceinline__ float rope_head_sum(float value, int lanes) {
    for (int other = lanes / 2; other > 0; other /= 2) value += __shfl_xor_sync(0xffffffffu, value, other);
    return value;
}

template <class T> struct RopeForward {
    RopeHeads heads;
    T *out;                   // (N, QKV)
    const T *in;              // (N, QKV)
    float *rstd;              // (N, NH+NKV); nullptr: no norm
    const T *q_norm, *k_norm; // (HS)
    float eps;
};

// Grid: a token per block of 128 threads. Reads and writes q and k (4 bytes per channel in bf16; v too, when out is not in); table and weights come
// from the caches. 56 registers. Not measured on a device yet; expected 80% of the memory bandwidth.
template <class T, bool PACKED> __global__ void __launch_bounds__(ROPE_THREADS) qk_forward_kernel(RopeForward<T> p) {
    RopeHeads shape = p.heads;
    shape.packed = PACKED;
    const int lane = (int)threadIdx.x % shape.lanes, group = (int)threadIdx.x / shape.lanes, groups = ROPE_THREADS / shape.lanes, c = lane * UNIT;
    const int normed = shape.q + shape.kv, heads = normed + shape.kv, all = p.out == p.in ? normed : heads;
    for (int64_t n = blockIdx.x; n < shape.N; n += gridDim.x) {
        const RopePairs angles = rope_angles(c, shape, n);
        for (int first = 0; first < all; first += groups) { // the same for all threads: they meet in rope_head_sum
            const int h = first + group;
            const int64_t at = (n * heads + h) * shape.size;
            RopePairs x = {};
            if (h < all) x = rope_pairs(rope_load(p.in + at, c, shape));
            if (p.rstd != nullptr) {
                float squares = 0.0f;
#pragma unroll
                for (int i = 0; i < UNIT; i++) squares += x.first[i] * x.first[i] + x.second[i] * x.second[i];
                const float r = 1.0f / sqrtf(rope_head_sum(squares, shape.lanes) / (float)shape.size + p.eps);
                if (h < normed) {
                    const RopeUnits<T> weight = rope_load(h < shape.q ? p.q_norm : p.k_norm, c, shape);
#pragma unroll
                    for (int i = 0; i < UNIT; i++) x.first[i] *= r * weight.first[i], x.second[i] *= r * weight.second[i];
                    if (lane == 0) p.rstd[n * normed + h] = r;
                }
            }
            if (h < normed) rope_rotate(x, angles, 1.0f);
            if (h < all) rope_store(p.out + at, c, shape, x);
        }
    }
}

template <class T> struct RopeBackward {
    RopeHeads heads;
    T *dqkv;                  // (N, QKV)
    const T *in;              // (N, QKV)
    const float *rstd;        // (N, NH+NKV); nullptr: no norm
    const T *q_norm, *k_norm; // (HS)
    float *partial;           // (2, blocks, HS): dq_norm, dk_norm
};

// Of RMSNorm y = x * r * weight: dweight += dy * x * r, and dy becomes r * (weight * dy - x * r * mean(weight * dy * x * r)). dot: sum of the
// thread's weight * dy * x * r.
template <class T>
static __device__ __forceinline__ float rope_norm_dot(const RopePairs &dy, const RopeUnits<T> &x, const RopeUnits<T> &weight, float r) {
    float dot = 0.0f;
#pragma unroll
    for (int i = 0; i < UNIT; i++) dot += weight.first[i] * dy.first[i] * (x.first[i] * r) + weight.second[i] * dy.second[i] * (x.second[i] * r);
    return dot;
}
template <class T>
static __device__ __forceinline__ void rope_norm_backward(RopePairs &dy, RopePairs &dweight, const RopeUnits<T> &x, const RopeUnits<T> &weight,
                                                          float r, float mean) {
#pragma unroll
    for (int i = 0; i < UNIT; i++) {
        const float first = x.first[i] * r, second = x.second[i] * r;
        dweight.first[i] += dy.first[i] * first;
        dweight.second[i] += dy.second[i] * second;
        dy.first[i] = r * (weight.first[i] * dy.first[i] - first * mean);
        dy.second[i] = r * (weight.second[i] * dy.second[i] - second * mean);
    }
}

// Sums of the block's groups, to this block's row of partial (blocks, HS). shared (ROPE_THREADS * UNIT) is free again on return.
static __device__ __forceinline__ void rope_store_partial(float *partial, const RopePairs &own, const RopeHeads &shape, float *shared) {
    const int half = shape.size / 2, wide = shape.lanes * UNIT, groups = ROPE_THREADS / shape.lanes;
#pragma unroll
    for (int part = 0; part < 2; part++) {
#pragma unroll
        for (int i = 0; i < UNIT; i++) shared[threadIdx.x * UNIT + i] = part == 0 ? own.first[i] : own.second[i];
        __syncthreads();
        const int c = (int)threadIdx.x;
        const bool stores = part == 0 ? c < shape.size - half : c < half;
        if (stores) {
            float sum = 0.0f;
            for (int group = 0; group < groups; group++) sum += shared[group * wide + c];
            partial[(int64_t)blockIdx.x * shape.size + (part == 0 ? (c < half ? c : 2 * half) : half + c)] = sum;
        }
        __syncthreads(); // the other half may be written
    }
}

// Grid: a token per block of 128 threads; with a norm blocks for the whole device, which keep the weights' gradients in registers over their
// tokens. Reads and writes dqkv's q and k, reads q and k: 6 bytes per channel in bf16, 4 without a norm. Shared: 4 KiB. With a norm 122 registers:
// cosines and sines come from the cache for every head. Not measured on a device yet; expected 75% of the memory bandwidth.
template <class T, bool NORMED, bool PACKED>
__global__ void __launch_bounds__(ROPE_THREADS, PACKED ? ROPE_PER_SM : 1) qk_backward_kernel(RopeBackward<T> p) {
    __shared__ float shared[NORMED ? ROPE_THREADS * UNIT : 1];
    RopeHeads shape = p.heads;
    shape.packed = PACKED;
    const int lane = (int)threadIdx.x % shape.lanes, group = (int)threadIdx.x / shape.lanes, groups = ROPE_THREADS / shape.lanes, c = lane * UNIT;
    const int all = shape.q + shape.kv, heads = all + shape.kv;
    RopePairs dweight[ROPE_KINDS] = {};
    for (int64_t n = blockIdx.x; n < shape.N; n += gridDim.x) {
#pragma unroll
        for (int kind = 0; kind < (NORMED ? ROPE_KINDS : 1); kind++) {
            const int begin = kind == 0 ? 0 : shape.q, end = NORMED && kind == 0 ? shape.q : all;
            for (int first = begin; first < end; first += groups) { // the same for all threads: they meet in rope_head_sum
                const int h = first + group;
                const int64_t at = (n * heads + h) * shape.size;
                RopePairs d = {};
                if (h < end) d = rope_pairs(rope_load(p.dqkv + at, c, shape));
                rope_rotate(d, rope_angles(c, shape, n), -1.0f);
                if constexpr (NORMED) {
                    RopeUnits<T> x = {};
                    if (h < end) x = rope_load(p.in + at, c, shape);
                    const RopeUnits<T> weight = rope_load(kind == 0 ? p.q_norm : p.k_norm, c, shape);
                    const float r = h < end ? p.rstd[n * all + h] : 0.0f;
                    const float mean = rope_head_sum(rope_norm_dot(d, x, weight, r), shape.lanes) / (float)shape.size;
                    rope_norm_backward(d, dweight[kind], x, weight, r, mean);
                }
                if (h < end) rope_store(p.dqkv + at, c, shape, d);
            }
        }
    }
    if constexpr (NORMED) {
        rope_store_partial(p.partial, dweight[0], shape, shared);
        rope_store_partial(p.partial + (int64_t)gridDim.x * shape.size, dweight[1], shape, shared);
    }
}

template <class... Buffers>
static inline RopeHeads rope_heads_(AttentionShape shape, Buffer rope, Buffer positions, int64_t N, Buffers... buffers) {
    RopeHeads heads = {};
    heads.q = (int)shape.heads, heads.kv = (int)shape.kv_heads, heads.size = (int)shape.head_size, heads.N = N;
    heads.lanes = 1;
    while (heads.lanes * 2 * UNIT < heads.size) heads.lanes *= 2;
    heads.packed = heads.size % 2 == 0 && units_packed(heads.size / 2, buffers...);
    heads.table = (const float *)rope.data, heads.positions = (const int32_t *)positions.data;
    return heads;
}

template <class T>
static inline void qk_forward_(CudaDevice *device, const RopeHeads &heads, Buffer qkv_out, Buffer rstd, Buffer qkv_in, Buffer q_norm, Buffer k_norm,
                               double eps) {
    RopeForward<T> p = {};
    p.heads = heads, p.out = (T *)qkv_out.data, p.in = (const T *)qkv_in.data;
    p.rstd = q_norm.data != nullptr ? (float *)rstd.data : nullptr, p.q_norm = (const T *)q_norm.data, p.k_norm = (const T *)k_norm.data;
    p.eps = (float)eps;
    launch(device, device->compute, {launch_blocks(device, heads.N, 1, 1 << 16), ROPE_THREADS},
           heads.packed ? qk_forward_kernel<T, true> : qk_forward_kernel<T, false>, p);
}

// qkv_out (N, QKV) = q and k normed and rotated, v as it is; rstd (N, NH+NKV) =
static void cuda_qk_forward(Device *device, Buffer qkv_out, Buffer rstd, Buffer qkv_in, Buffer q_norm, Buffer k_norm, double eps, Buffer rope,
                            Buffer positions, AttentionShape shape, int64_t N) {
    const RopeHeads heads = rope_heads_(shape, rope, positions, N, rope, qkv_out, qkv_in, q_norm, k_norm);
    if (qkv_in.dtype == DTYPE_F32) {
        qk_forward_<float>(cuda_of(device), heads, qkv_out, rstd, qkv_in, q_norm, k_norm, eps);
    } else {
        qk_forward_<bf16>(cuda_of(device), heads, qkv_out, rstd, qkv_in, q_norm, k_norm, eps);
    }
}

template <class T>
static inline void qk_backward_(CudaDevice *device, const RopeHeads &heads, Buffer dqkv, float *dq_norm, float *dk_norm, bool accumulate,
                                Buffer qkv_in, Buffer rstd, Buffer q_norm, Buffer k_norm) {
    RopeBackward<T> p = {};
    p.heads = heads, p.dqkv = (T *)dqkv.data, p.in = (const T *)qkv_in.data, p.rstd = (const float *)rstd.data;
    p.q_norm = (const T *)q_norm.data, p.k_norm = (const T *)k_norm.data;
    if (q_norm.data == nullptr) {
        const auto kernel = heads.packed ? qk_backward_kernel<T, false, true> : qk_backward_kernel<T, false, false>;
        if (heads.table != nullptr) launch(device, device->compute, {launch_blocks(device, heads.N, 1, 1 << 16), ROPE_THREADS}, kernel, p);
        return;
    }
    const unsigned blocks = (unsigned)scratch_rope_blocks(device->sm_count, heads.N);
    p.partial = (float *)cuda_scratch(device, scratch_rope_bytes(device->sm_count, heads.N, heads.size));
    launch(device, device->compute, {blocks, ROPE_THREADS}, heads.packed ? qk_backward_kernel<T, true, true> : qk_backward_kernel<T, true, false>,
           p);
    columns_finish_(device, dq_norm, dk_norm, p.partial, blocks, heads.size, accumulate);
}

// dqkv (N, QKV): gradient of qkv_out becomes that of qkv_in; dq_norm, dk_norm (HS) = or +=
static void cuda_qk_backward(Device *device, Buffer dqkv, Buffer dq_norm, Buffer dk_norm, bool accumulate, Buffer qkv_in, Buffer rstd,
                             Buffer q_norm, Buffer k_norm, Buffer rope, Buffer positions, AttentionShape shape, int64_t N) {
    const RopeHeads heads = rope_heads_(shape, rope, positions, N, rope, dqkv, qkv_in, q_norm, k_norm);
    float *dq = (float *)dq_norm.data, *dk = (float *)dk_norm.data;
    if (dqkv.dtype == DTYPE_F32) {
        qk_backward_<float>(cuda_of(device), heads, dqkv, dq, dk, accumulate, qkv_in, rstd, q_norm, k_norm);
    } else {
        qk_backward_<bf16>(cuda_of(device), heads, dqkv, dq, dk, accumulate, qkv_in, rstd, q_norm, k_norm);
    }
}

#endif
