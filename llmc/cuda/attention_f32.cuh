// attention_f32.cuh: attention in fp32 for any head size up to 128: plain loops over tiles of 32 x 32 in shared memory, for runs and tests in fp32.
// No tensor cores and not tuned; nothing of size T x T exists. Knows nothing of the host.
//
// Every block owns 32 rows, queries or keys, and passes over tiles of the other kind. Four lanes share a row: lane part p of a row has its scores
// against columns p, p+4, ... of a tile and its sums' channels p, p+4, ...
#ifndef LLMC_CUDA_ATTENTION_F32_CUH
#define LLMC_CUDA_ATTENTION_F32_CUH

#include "llmc/cuda/attention_place.cuh" // AttentionCall, attention_place
#include "llmc/cuda/ptx.cuh"             // DYN_SHARED

enum {
    ATTENTION_F32_ROWS = 32,                       // of a tile
    ATTENTION_F32_STRIDE = ATTENTION_MAX_HEAD + 1, // odd: rows start in different banks
    ATTENTION_F32_TILE = ATTENTION_F32_ROWS * ATTENTION_F32_STRIDE,
    ATTENTION_F32_SCORES = ATTENTION_F32_ROWS / 4,   // of a lane and tile
    ATTENTION_F32_CHANNELS = ATTENTION_MAX_HEAD / 4, // of a lane
    ATTENTION_F32_SHARED = (4 * ATTENTION_F32_TILE + ATTENTION_F32_ROWS * (ATTENTION_F32_ROWS + 1)) * (int)sizeof(float),
};

// tile (32, head_size) = rows, `stride` apart; zero from row `count` on. The whole block calls.
static __device__ __forceinline__ void attention_f32_load(float *tile, const float *rows, int stride, int count, int head_size) {
    for (int row = threadIdx.x / 32; row < ATTENTION_F32_ROWS; row += ATTENTION_THREADS / 32) {
        for (int d = threadIdx.x % 32; d < head_size; d += 32) tile[row * ATTENTION_F32_STRIDE + d] = row < count ? rows[row * stride + d] : 0.0f;
    }
}

// s: the lane's scores of row (head_size) against the rows of a tile
static __device__ __forceinline__ void attention_f32_dot(float (&s)[ATTENTION_F32_SCORES], const float *row, const float *tile, int head_size) {
    const float *columns = tile + threadIdx.x % 4 * ATTENTION_F32_STRIDE;
#pragma unroll
    for (int j = 0; j < ATTENTION_F32_SCORES; j++) s[j] = 0.0f;
    for (int d = 0; d < head_size; d++) {
#pragma unroll
        for (int j = 0; j < ATTENTION_F32_SCORES; j++) s[j] += row[d] * columns[4 * j * ATTENTION_F32_STRIDE + d];
    }
}

// The row's four lanes exchange their scores: weights (32) = those of the row. Its lanes alone read it.
static __device__ __forceinline__ void attention_f32_share(float *weights, const float (&s)[ATTENTION_F32_SCORES]) {
    __syncwarp(); // they have read what is overwritten
#pragma unroll
    for (int j = 0; j < ATTENTION_F32_SCORES; j++) weights[threadIdx.x % 4 + 4 * j] = s[j];
    __syncwarp();
}

// sum, the lane's channels, += weights (32) x tile (32, head_size)
static __device__ __forceinline__ void attention_f32_add(float (&sum)[ATTENTION_F32_CHANNELS], const float *weights, const float *tile,
                                                         int head_size) {
    for (int j = 0; j < ATTENTION_F32_ROWS; j++) {
        const float weight = weights[j], *row = tile + j * ATTENTION_F32_STRIDE;
#pragma unroll
        for (int i = 0; i < ATTENTION_F32_CHANNELS; i++) {
            const int d = threadIdx.x % 4 + 4 * i;
            if (d < head_size) sum[i] += weight * row[d];
        }
    }
}

static __device__ __forceinline__ void attention_f32_store(float *row, const float (&sum)[ATTENTION_F32_CHANNELS], float factor, int head_size) {
#pragma unroll
    for (int i = 0; i < ATTENTION_F32_CHANNELS; i++) {
        const int d = threadIdx.x % 4 + 4 * i;
        if (d < head_size) row[d] = sum[i] * factor;
    }
}

// Block: 32 queries of a head against all keys before them.
__global__ void __launch_bounds__(ATTENTION_THREADS) attention_f32_forward_kernel(AttentionCall c, float *out, float *lse, const float *qkv) {
    DYN_SHARED(float, shared);
    const AttentionPlace place = attention_place<ATTENTION_F32_ROWS>(c, c.heads, true);
    if (place.tile < 0) return; // the whole block
    float *query = shared, *key = query + ATTENTION_F32_TILE, *value = key + ATTENTION_F32_TILE;
    const int row = threadIdx.x / 4, first = place.tile * ATTENTION_F32_ROWS, token = first + row, kv = place.head / c.group;
    float *weights = value + ATTENTION_F32_TILE + row * (ATTENTION_F32_ROWS + 1);
    float sum[ATTENTION_F32_CHANNELS] = {}, top = -INFINITY, total = 0.0f;
    attention_f32_load(query, qkv + attention_q_at(c, place, first, place.head), c.qkv_stride, place.length - first, c.head_size);
    for (int begin = 0; begin <= first; begin += ATTENTION_F32_ROWS) {
        attention_f32_load(key, qkv + attention_k_at(c, place, begin, kv), c.qkv_stride, place.length - begin, c.head_size);
        attention_f32_load(value, qkv + attention_v_at(c, place, begin, kv), c.qkv_stride, place.length - begin, c.head_size);
        __syncthreads();
        float s[ATTENTION_F32_SCORES], before = top, added = 0.0f;
        attention_f32_dot(s, query + row * ATTENTION_F32_STRIDE, key, c.head_size);
        for (int j = 0; j < ATTENTION_F32_SCORES; j++) {
            if (begin + (int)threadIdx.x % 4 + 4 * j > token) s[j] = -INFINITY;
            top = fmaxf(top, s[j]);
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        const float factor = expf(c.scale * (before - top));
        for (int j = 0; j < ATTENTION_F32_SCORES; j++) added += s[j] = expf(c.scale * (s[j] - top));
        total = total * factor + added;
        for (int i = 0; i < ATTENTION_F32_CHANNELS; i++) sum[i] *= factor;
        attention_f32_share(weights, s);
        attention_f32_add(sum, weights, value, c.head_size);
        __syncthreads();
    }
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if (token >= place.length) return;
    attention_f32_store(out + attention_out_at(c, place, token, place.head), sum, 1.0f / total, c.head_size);
    if (threadIdx.x % 4 == 0) lse[attention_row_at(c, place, token, place.head)] = top * c.scale + logf(total);
}

// A score becomes P, and dP becomes dS; both are zero where the query does not see the key.
static __device__ __forceinline__ void attention_f32_gradient(float &score, float &gradient, bool seen, float scale, float lse, float delta) {
    score = seen ? expf(scale * score - lse) : 0.0f;
    gradient = score * (gradient - delta);
}

// Block: 32 keys of a kv head: dk and dv over the query heads of its group in order, all queries at or after the keys.
__global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_f32_keys_kernel(AttentionCall c, float *dqkv, const float *delta, const float *dout, const float *qkv, const float *lse) {
    DYN_SHARED(float, shared);
    const AttentionPlace place = attention_place<ATTENTION_F32_ROWS>(c, c.kv_heads, false);
    if (place.tile < 0) return; // the whole block
    float *key = shared, *value = key + ATTENTION_F32_TILE, *query = value + ATTENTION_F32_TILE, *gradient = query + ATTENTION_F32_TILE;
    const int row = threadIdx.x / 4, first = place.tile * ATTENTION_F32_ROWS, token = first + row;
    float *weights = gradient + ATTENTION_F32_TILE + row * (ATTENTION_F32_ROWS + 1);
    float dkey[ATTENTION_F32_CHANNELS] = {}, dvalue[ATTENTION_F32_CHANNELS] = {};
    attention_f32_load(key, qkv + attention_k_at(c, place, first, place.head), c.qkv_stride, place.length - first, c.head_size);
    attention_f32_load(value, qkv + attention_v_at(c, place, first, place.head), c.qkv_stride, place.length - first, c.head_size);
    for (int head = place.head * c.group; head < (place.head + 1) * c.group; head++) {
        for (int begin = first; begin < place.length; begin += ATTENTION_F32_ROWS) {
            attention_f32_load(query, qkv + attention_q_at(c, place, begin, head), c.qkv_stride, place.length - begin, c.head_size);
            attention_f32_load(gradient, dout + attention_out_at(c, place, begin, head), c.out_stride, place.length - begin, c.head_size);
            __syncthreads();
            float p[ATTENTION_F32_SCORES], ds[ATTENTION_F32_SCORES];
            attention_f32_dot(p, key + row * ATTENTION_F32_STRIDE, query, c.head_size);
            attention_f32_dot(ds, value + row * ATTENTION_F32_STRIDE, gradient, c.head_size);
            for (int j = 0; j < ATTENTION_F32_SCORES; j++) {
                const int other = begin + threadIdx.x % 4 + 4 * j;
                const bool seen = other >= token && other < place.length;
                const int64_t at = attention_row_at(c, place, seen ? other : begin, head);
                attention_f32_gradient(p[j], ds[j], seen, c.scale, lse[at], delta[at]);
            }
            attention_f32_share(weights, p);
            attention_f32_add(dvalue, weights, gradient, c.head_size);
            attention_f32_share(weights, ds);
            attention_f32_add(dkey, weights, query, c.head_size);
            __syncthreads();
        }
    }
    if (token >= place.length) return;
    attention_f32_store(dqkv + attention_k_at(c, place, token, place.head), dkey, c.scale, c.head_size);
    attention_f32_store(dqkv + attention_v_at(c, place, token, place.head), dvalue, 1.0f, c.head_size);
}

// Block: 32 queries of a head: dq over all keys before them.
__global__ void __launch_bounds__(ATTENTION_THREADS)
    attention_f32_queries_kernel(AttentionCall c, float *dqkv, const float *delta, const float *dout, const float *qkv, const float *lse) {
    DYN_SHARED(float, shared);
    const AttentionPlace place = attention_place<ATTENTION_F32_ROWS>(c, c.heads, true);
    if (place.tile < 0) return; // the whole block
    float *query = shared, *gradient = query + ATTENTION_F32_TILE, *key = gradient + ATTENTION_F32_TILE, *value = key + ATTENTION_F32_TILE;
    const int row = threadIdx.x / 4, first = place.tile * ATTENTION_F32_ROWS, token = first + row, kv = place.head / c.group;
    float *weights = value + ATTENTION_F32_TILE + row * (ATTENTION_F32_ROWS + 1);
    const int64_t at = attention_row_at(c, place, min(token, place.length - 1), place.head);
    float dquery[ATTENTION_F32_CHANNELS] = {};
    attention_f32_load(query, qkv + attention_q_at(c, place, first, place.head), c.qkv_stride, place.length - first, c.head_size);
    attention_f32_load(gradient, dout + attention_out_at(c, place, first, place.head), c.out_stride, place.length - first, c.head_size);
    for (int begin = 0; begin <= first; begin += ATTENTION_F32_ROWS) {
        attention_f32_load(key, qkv + attention_k_at(c, place, begin, kv), c.qkv_stride, place.length - begin, c.head_size);
        attention_f32_load(value, qkv + attention_v_at(c, place, begin, kv), c.qkv_stride, place.length - begin, c.head_size);
        __syncthreads();
        float p[ATTENTION_F32_SCORES], ds[ATTENTION_F32_SCORES];
        attention_f32_dot(p, query + row * ATTENTION_F32_STRIDE, key, c.head_size);
        attention_f32_dot(ds, gradient + row * ATTENTION_F32_STRIDE, value, c.head_size);
        for (int j = 0; j < ATTENTION_F32_SCORES; j++) {
            const int other = begin + threadIdx.x % 4 + 4 * j;
            attention_f32_gradient(p[j], ds[j], other <= token, c.scale, lse[at], delta[at]);
        }
        attention_f32_share(weights, ds);
        attention_f32_add(dquery, weights, key, c.head_size);
        __syncthreads();
    }
    if (token >= place.length) return;
    attention_f32_store(dqkv + attention_q_at(c, place, token, place.head), dquery, c.scale, c.head_size);
}

#endif
