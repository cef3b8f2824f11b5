// attention_backward.cuh: the backward pass of attention in bf16 on tensor cores. Knows nothing of the host.
//
// With P = exp(scale*q k^T - lse) and dS = P * (dout v^T - delta): dv = P^T dout, dk = scale * dS^T q, dq = scale * dS k (Dao et al. 2022, appendix
// B.2). Deterministic without atomics: every gradient has one block that sums it up in a fixed order.
//   keys     64 keys of a kv head: dk and dv, over the query heads of its group in order and all queries at or after the keys; 4 products
//   queries  64 queries of a head: dq, over all keys before them; 3 products
// The scores and dout v^T are computed twice: 7 products instead of the 5 of one pass that adds dq up with atomics.
#ifndef LLMC_CUDA_ATTENTION_BACKWARD_CUH
#define LLMC_CUDA_ATTENTION_BACKWARD_CUH

#include "llmc/cuda/attention_place.cuh" // AttentionCall, attention_place
#include "llmc/cuda/attention_tile.cuh"  // attention_load, attention_dot, attention_add, attention_store, ATTENTION_LOG2E

// delta (heads, tokens) = row sums of dout*out. Grid strides over rows; eight lanes share one, neighbouring rows are neighbouring tokens.
template <class T>
__global__ void __launch_bounds__(ATTENTION_THREADS) attention_delta_kernel(AttentionCall c, float *delta, const T *dout, const T *out) {
    const int64_t rows = c.tokens * c.heads, step = (int64_t)gridDim.x * (ATTENTION_THREADS / 8);
    // the whole block takes part in every round, so that every lane is there for the shuffles
    for (int64_t round = (int64_t)blockIdx.x * (ATTENTION_THREADS / 8); round < rows; round += step) {
        const int64_t row = round + threadIdx.x / 8;
        float sum = 0.0f;
        if (row < rows) {
            const int64_t at = row % c.tokens * c.out_stride + row / c.tokens * c.head_size;
            if constexpr (sizeof(T) == 2) {
                for (int d = threadIdx.x % 8 * 8; d < c.head_size; d += 64) {
                    const Pack<T> x = *reinterpret_cast<const Pack<T> *>(out + at + d), y = *reinterpret_cast<const Pack<T> *>(dout + at + d);
#pragma unroll
                    for (int i = 0; i < Pack<T>::size; i++) sum += to_float(x.at[i]) * to_float(y.at[i]);
                }
            } else {
                for (int d = threadIdx.x % 8; d < c.head_size; d += 8) sum += to_float(out[at + d]) * to_float(dout[at + d]);
            }
        }
        for (int lanes = 4; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
        if (row < rows && threadIdx.x % 8 == 0) delta[row] = sum;
    }
}

// Tile: 64 x 64, four warps of 16 rows. Two resident tiles, two stages of two tiles each.
template <int HD> struct AttentionBackward {
    static constexpr int ROWS = 64, NT = ROWS / 8, TILE = ROWS * attention_stride(HD); // TILE: elements
    static constexpr bool KEEP = HD <= 64;
    static constexpr size_t QUERIES_BYTES = 6 * TILE * sizeof(bf16), KEYS_BYTES = QUERIES_BYTES + 4 * ROWS * sizeof(float);
};

// Block: 64 keys of a kv head. Scores are computed transposed, (keys, queries), so that P^T and dS^T are left operands as they stand in registers.
template <int HD>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_keys_kernel(AttentionCall c, bf16 *dqkv, const float *delta, const bf16 *dout, const bf16 *qkv, const float *lse) {
    typedef AttentionBackward<HD> B;
    DYN_SHARED(bf16, shared);
    const AttentionPlace place = attention_place<B::ROWS>(c, c.kv_heads, false);
    if (place.tile < 0) return; // the whole block
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = place.tile * B::ROWS, own = warp * 16 * attention_stride(HD);
    const int tiles = (place.length + B::ROWS - 1) / B::ROWS - place.tile, steps = tiles * c.group; // of queries at or after the keys
    const float scale2 = c.scale * ATTENTION_LOG2E;
    bf16 *key = shared, *value = key + B::TILE, *stages = value + B::TILE;
    float *statistics = reinterpret_cast<float *>(stages + 4 * B::TILE); // (2, 2, 64) lse and delta of a stage
    const auto load = [&](int step) {
        bf16 *query = stages + step % 2 * 2 * B::TILE;
        const int head = place.head * c.group + step / tiles, token = first + step % tiles * B::ROWS, count = place.length - token;
        attention_load<HD, B::ROWS>(query, qkv + attention_q_at(c, place, token, head), c.qkv_stride, count, c.head_size);
        attention_load<HD, B::ROWS>(query + B::TILE, dout + attention_out_at(c, place, token, head), c.out_stride, count, c.head_size);
        const int row = threadIdx.x % B::ROWS;
        const float *from = (threadIdx.x < B::ROWS ? lse : delta) + attention_row_at(c, place, token, head);
        cp_async4(statistics + step % 2 * 2 * B::ROWS + threadIdx.x, row < count ? from + row : from, row < count ? 4 : 0);
        cp_async_commit();
    };
    attention_load<HD, B::ROWS>(key, qkv + attention_k_at(c, place, first, place.head), c.qkv_stride, place.length - first, c.head_size);
    attention_load<HD, B::ROWS>(value, qkv + attention_v_at(c, place, first, place.head), c.qkv_stride, place.length - first, c.head_size);
    load(0);
    cp_async_wait<0>();
    __syncthreads();

    AttentionRows<HD, 1, B::KEEP> keys, values;
    keys.open(key + own);
    values.open(value + own);
    float dkey[1][HD / 8][4] = {}, dvalue[1][HD / 8][4] = {};
    for (int step = 0; step < steps; step++) {
        if (step + 1 < steps) load(step + 1);
        const bf16 *query = stages + step % 2 * 2 * B::TILE;
        const float *row_lse = statistics + step % 2 * 2 * B::ROWS + lane % 4 * 2, *row_delta = row_lse + B::ROWS;
        const bool diagonal = step % tiles == 0;
        const int hidden = warp * 16 + lane / 4 -
                           lane % 4 * 2; // on the diagonal, the lane's first key is seen by queries from here on, less the lane's own offset
        float p[1][B::NT][4], ds[1][B::NT][4];
        attention_dot<HD, 1, B::NT>(p, keys, query);
#pragma unroll
        for (int n = 0; n < B::NT; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                p[0][n][e] = exp2_fast(fmaf(p[0][n][e], scale2, -ATTENTION_LOG2E * row_lse[n * 8 + e % 2]));
                if (diagonal && n * 8 + e % 2 < hidden + e / 2 * 8) p[0][n][e] = 0.0f;
            }
        }
        attention_add<HD, 1, B::NT>(dvalue, p, query + B::TILE);
        attention_dot<HD, 1, B::NT>(ds, values, query + B::TILE);
#pragma unroll
        for (int n = 0; n < B::NT; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) ds[0][n][e] = p[0][n][e] * (ds[0][n][e] - row_delta[n * 8 + e % 2]);
        }
        attention_add<HD, 1, B::NT>(dkey, ds, query);
        cp_async_wait<0>();
        __syncthreads();
    }
    const int token = first + warp * 16, count = place.length - token;
    const float scale[1][2] = {{c.scale, c.scale}}, one[1][2] = {{1.0f, 1.0f}};
    attention_store<HD, 1>(dqkv + attention_k_at(c, place, token, place.head), c.qkv_stride, count, c.head_size, key + own, dkey, scale);
    attention_store<HD, 1>(dqkv + attention_v_at(c, place, token, place.head), c.qkv_stride, count, c.head_size, value + own, dvalue, one);
}

// Block: 64 queries of a head.
template <int HD>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_queries_kernel(AttentionCall c, bf16 *dqkv, const float *delta, const bf16 *dout, const bf16 *qkv, const float *lse) {
    typedef AttentionBackward<HD> B;
    DYN_SHARED(bf16, shared);
    const AttentionPlace place = attention_place<B::ROWS>(c, c.heads, true);
    if (place.tile < 0) return; // the whole block
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv = place.head / c.group;
    const int first = place.tile * B::ROWS, token = first + warp * 16, own = warp * 16 * attention_stride(HD);
    const float scale2 = c.scale * ATTENTION_LOG2E;
    bf16 *query = shared, *gradient = query + B::TILE, *stages = gradient + B::TILE;
    const auto load = [&](int tile) {
        bf16 *key = stages + tile % 2 * 2 * B::TILE;
        const int begin = tile * B::ROWS, count = place.length - begin;
        attention_load<HD, B::ROWS>(key, qkv + attention_k_at(c, place, begin, kv), c.qkv_stride, count, c.head_size);
        attention_load<HD, B::ROWS>(key + B::TILE, qkv + attention_v_at(c, place, begin, kv), c.qkv_stride, count, c.head_size);
        cp_async_commit();
    };
    attention_load<HD, B::ROWS>(query, qkv + attention_q_at(c, place, first, place.head), c.qkv_stride, place.length - first, c.head_size);
    attention_load<HD, B::ROWS>(gradient, dout + attention_out_at(c, place, first, place.head), c.out_stride, place.length - first, c.head_size);
    load(0);
    float row_lse[2] = {}, row_delta[2] = {}; // of the lane's two queries
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = token + h * 8 + lane / 4;
        if (row >= place.length) continue;
        row_lse[h] = ATTENTION_LOG2E * lse[attention_row_at(c, place, row, place.head)];
        row_delta[h] = delta[attention_row_at(c, place, row, place.head)];
    }
    cp_async_wait<0>();
    __syncthreads();

    AttentionRows<HD, 1, B::KEEP> queries, gradients;
    queries.open(query + own);
    gradients.open(gradient + own);
    float dquery[1][HD / 8][4] = {};
    for (int tile = 0; tile <= place.tile; tile++) {
        if (tile < place.tile) load(tile + 1);
        const bf16 *key = stages + tile % 2 * 2 * B::TILE;
        const bool diagonal = tile == place.tile;
        const int last =
            warp * 16 + lane / 4 - lane % 4 * 2; // on the diagonal, the last key that the lane's first query sees, less the lane's own offset
        float s[1][B::NT][4], ds[1][B::NT][4];
        attention_dot<HD, 1, B::NT>(s, queries, key);
        attention_dot<HD, 1, B::NT>(ds, gradients, key + B::TILE);
#pragma unroll
        for (int n = 0; n < B::NT; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float p = exp2_fast(fmaf(s[0][n][e], scale2, -row_lse[e / 2]));
                const bool seen = !diagonal || n * 8 + e % 2 <= last + e / 2 * 8;
                ds[0][n][e] = seen ? p * (ds[0][n][e] - row_delta[e / 2]) : 0.0f;
            }
        }
        attention_add<HD, 1, B::NT>(dquery, ds, key);
        cp_async_wait<0>();
        __syncthreads();
    }
    const float scale[1][2] = {{c.scale, c.scale}};
    attention_store<HD, 1>(dqkv + attention_q_at(c, place, token, place.head), c.qkv_stride, place.length - token, c.head_size, query + own, dquery,
                           scale);
}

#endif
