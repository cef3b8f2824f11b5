// attention_backward.cuh: the backward pass of attention in bf16 on tensor cores. Knows nothing of the host.
//
// With P = exp(scale*q k^T - lse) and dS = P * (dout v^T - delta): dv = P^T dout, dk = scale * dS^T q, dq = scale * dS k (Dao et al. 2022, appendix
// B.2). Deterministic without atomics: every gradient has one block that sums it up in a fixed order.
//   keys     64 keys of a kv head: dk and dv, over the query heads of its group in order and all queries at or after the keys; 4 products
//   queries  64 queries of a head: dq, over all keys before them; 3 products
// The scores and dout v^T are computed twice: 7 products instead of the 5 of one pass that adds dq up with atomics (in an order that changes from
// run to run) or in as many copies as there are tiles of keys. In exchange nothing of dq passes through fp32 memory, and no dS through shared
// memory. By the yardstick's count, 10*HS operations for each visible pair of query and key, at most 5/7 of the rate of the products. Expected:
// 170-230 TFLOP/s on an H100 where that style reaches 238-322. Not measured on a device yet.
#ifndef LLMC_CUDA_ATTENTION_BACKWARD_CUH
#define LLMC_CUDA_ATTENTION_BACKWARD_CUH

#include "llmc/cuda/attention_place.cuh" // AttentionCall, attention_place
#include "llmc/cuda/attention_tile.cuh"  // attention_load, attention_dot, attention_add, attention_store, ATTENTION_LOG2E

// delta (heads, tokens) = row sums of dout*out. Grid strides over rows; eight lanes share one, neighbouring rows are neighbouring tokens. Reads
// 2*HS elements and writes 4 bytes per row, whole 128-byte lines at head size 64 and more: bound by memory, expected 85%. Not measured on a device
// yet.
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

// Tiles of a block's own rows (16*MT for each of four warps) x columns of a step: as large as 255 registers allow with two blocks per SM. Two sums
// (dk and dv) of 32 rows fit up to head size 64, one (dq) always.
template <int HD> struct AttentionKeys { // own: keys; steps: queries
    static constexpr int MT = HD <= 64 ? 2 : 1, ROWS = 64 * MT, COLUMNS = HD <= 64 ? 32 : HD <= 96 ? 64 : 48, NT = COLUMNS / 8;
    static constexpr int RESIDENT = ROWS * attention_stride(HD), STAGE = COLUMNS * attention_stride(HD); // elements of a tile
    static constexpr bool KEEP = HD <= 32;
    static constexpr size_t SHARED_BYTES = (2 * RESIDENT + 4 * STAGE) * sizeof(bf16) + 4 * COLUMNS * sizeof(float);
};
template <int HD> struct AttentionQueries { // own: queries; steps: keys
    static constexpr int MT = 2, ROWS = 64 * MT, COLUMNS = 32, NT = COLUMNS / 8;
    static constexpr int RESIDENT = ROWS * attention_stride(HD), STAGE = COLUMNS * attention_stride(HD);
    static constexpr bool KEEP = HD <= 64;
    static constexpr size_t SHARED_BYTES = (2 * RESIDENT + 4 * STAGE) * sizeof(bf16);
};

// p (16*MT keys, 8*NT queries), scores, become P. lse, of the step's queries. Where `edge`, key i of the warp is seen by queries hidden+i and
// later.
template <int MT, int NT>
static __device__ __forceinline__ void attention_probabilities(float (&p)[MT][NT][4], const float *lse, bool edge, int hidden, float scale2) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float2 pair = *reinterpret_cast<const float2 *>(lse + n * 8 + lane % 4 * 2);
#pragma unroll
        for (int m = 0; m < MT; m++) {
            const int seen = hidden + m * 16 + lane / 4 - lane % 4 * 2; // from this column on, less the lane's first
#pragma unroll
            for (int e = 0; e < 4; e++) {
                p[m][n][e] = exp2_fast(fmaf(p[m][n][e], scale2, -ATTENTION_LOG2E * (e % 2 == 0 ? pair.x : pair.y)));
                if (edge && n * 8 + e % 2 < seen + e / 2 * 8) p[m][n][e] = 0.0f;
            }
        }
    }
}

// ds (16*MT keys, 8*NT queries), of dP, becomes dS. delta, of the step's queries.
template <int MT, int NT>
static __device__ __forceinline__ void attention_score_gradients(float (&ds)[MT][NT][4], const float (&p)[MT][NT][4], const float *delta) {
#pragma unroll
    for (int n = 0; n < NT; n++) {
        const float2 pair = *reinterpret_cast<const float2 *>(delta + n * 8 + threadIdx.x % 4 * 2);
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int e = 0; e < 4; e++) ds[m][n][e] = p[m][n][e] * (ds[m][n][e] - (e % 2 == 0 ? pair.x : pair.y));
        }
    }
}

// Block: 64*MT keys of a kv head. Scores are computed transposed, (keys, queries), so that P^T and dS^T are left operands as they stand in
// registers. Shared memory 30.5, 54.5, 79, 85.8 KiB and registers 212, 254, 246, 247 for HD 32, 64, 96, 128 (sm_90a), no spills; two blocks per SM.
template <int HD>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_keys_kernel(AttentionCall c, bf16 *dqkv, const float *delta, const bf16 *dout, const bf16 *qkv, const float *lse) {
    typedef AttentionKeys<HD> B;
    DYN_SHARED(bf16, shared);
    const AttentionPlace place = attention_place<B::ROWS>(c, c.kv_heads, false);
    if (place.tile < 0) return; // the whole block
    const int warp = threadIdx.x / 32, block_first = place.tile * B::ROWS, first = block_first + warp * 16 * B::MT;
    const int steps = (place.length - block_first + B::COLUMNS - 1) / B::COLUMNS * c.group; // of queries at or after the keys
    bf16 *key = shared, *value = key + B::RESIDENT, *stages = value + B::RESIDENT;
    float *statistics = reinterpret_cast<float *>(stages + 4 * B::STAGE); // (2, 2, COLUMNS) lse and delta of a stage
    int head = place.head * c.group, token = block_first;                 // of the next step: queries from there on
    const auto load = [&](int stage) {
        bf16 *query = stages + stage * 2 * B::STAGE;
        const int count = place.length - token;
        attention_load<HD, B::COLUMNS>(query, qkv + attention_q_at(c, place, token, head), c.qkv_stride, count, c.head_size);
        attention_load<HD, B::COLUMNS>(query + B::STAGE, dout + attention_out_at(c, place, token, head), c.out_stride, count, c.head_size);
        if (threadIdx.x < B::COLUMNS) {
            const int64_t at = attention_row_at(c, place, token, head) + threadIdx.x;
            const int bytes = (int)threadIdx.x < count ? 4 : 0;
            cp_async4(statistics + stage * 2 * B::COLUMNS + threadIdx.x, lse + at, bytes);
            cp_async4(statistics + (stage * 2 + 1) * B::COLUMNS + threadIdx.x, delta + at, bytes);
        }
        cp_async_commit();
        token += B::COLUMNS;
        if (token >= place.length) token = place.tile * B::ROWS, head++;
    };
    attention_load<HD, B::ROWS>(key, qkv + attention_k_at(c, place, block_first, place.head), c.qkv_stride, place.length - block_first,
                                c.head_size);
    attention_load<HD, B::ROWS>(value, qkv + attention_v_at(c, place, block_first, place.head), c.qkv_stride, place.length - block_first,
                                c.head_size);
    load(steps % 2);
    cp_async_wait<0>();
    __syncthreads();

    key += warp * 16 * B::MT * attention_stride(HD), value += warp * 16 * B::MT * attention_stride(HD); // the warp's own rows
    AttentionRows<HD, B::MT, B::KEEP> keys, values;
    keys.open(key), values.open(value);
    float dkey[B::MT][HD / 8][4] = {}, dvalue[B::MT][HD / 8][4] = {};
    int hidden = warp * 16 * B::MT;            // + i: the first query of the step that sees key i of the warp
    for (int left = steps; left > 0; left--) { // counted down: two registers fewer, which sm_80 needs
        const int next_hidden = first - token, stage = left % 2;
        if (left > 1) load(1 - stage);
        const bf16 *query = stages + stage * 2 * B::STAGE;
        const float *row_lse = statistics + stage * 2 * B::COLUMNS;
        if (first < place.length && hidden < B::COLUMNS) {
            float p[B::MT][B::NT][4], ds[B::MT][B::NT][4];
            attention_dot<HD, B::MT, B::NT>(p, keys, query);
            attention_dot<HD, B::MT, B::NT>(ds, values, query + B::STAGE);
            attention_probabilities<B::MT, B::NT>(p, row_lse, hidden + 16 * B::MT > 1, hidden, c.scale2);
            attention_add<HD, B::MT, B::NT>(dvalue, p, query + B::STAGE);
            attention_score_gradients<B::MT, B::NT>(ds, p, row_lse + B::COLUMNS);
            attention_add<HD, B::MT, B::NT>(dkey, ds, query);
        }
        cp_async_wait<0>();
        __syncthreads();
        hidden = next_hidden;
    }
    const int count = place.length - first;
    attention_store<HD, B::MT>(dqkv + attention_k_at(c, place, first, place.head), c.qkv_stride, count, c.head_size, key, dkey, c.scale);
    attention_store<HD, B::MT>(dqkv + attention_v_at(c, place, first, place.head), c.qkv_stride, count, c.head_size, value, dvalue, 1.0f);
}

// The lane's rows of a warp's 16*MT queries.
template <int MT> struct AttentionStatistics {
    float lse[MT][2], delta[MT][2]; // lse in powers of two
};

// ds (16*MT queries, 8*NT keys), of dP, becomes dS, given the scores s. Where `edge`, query i of the warp sees keys 0 .. visible+i of the tile.
template <int MT, int NT>
static __device__ __forceinline__ void attention_row_gradients(float (&ds)[MT][NT][4], const float (&s)[MT][NT][4],
                                                               const AttentionStatistics<MT> &rows, bool edge, int visible, float scale2) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; m++) {
        const int last = visible + m * 16 + lane / 4 - lane % 4 * 2; // less the lane's first column
#pragma unroll
        for (int n = 0; n < NT; n++) {
#pragma unroll
            for (int e = 0; e < 4; e++) {
                ds[m][n][e] = exp2_fast(fmaf(s[m][n][e], scale2, -rows.lse[m][e / 2])) * (ds[m][n][e] - rows.delta[m][e / 2]);
                if (edge && n * 8 + e % 2 > last + e / 2 * 8) ds[m][n][e] = 0.0f;
            }
        }
    }
}

// Block: 128 queries of a head, against all keys before them. Shared memory 30, 54, 78, 102 KiB and registers 164, 246, 242, 254 for HD 32, 64, 96,
// 128 (sm_90a), no spills; two blocks per SM.
template <int HD>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_queries_kernel(AttentionCall c, bf16 *dqkv, const float *delta, const bf16 *dout, const bf16 *qkv, const float *lse) {
    typedef AttentionQueries<HD> B;
    DYN_SHARED(bf16, shared);
    const AttentionPlace place = attention_place<B::ROWS>(c, c.heads, true);
    if (place.tile < 0) return; // the whole block
    const int warp = threadIdx.x / 32, kv = place.head / c.group;
    const int block_first = place.tile * B::ROWS, first = block_first + warp * 16 * B::MT, last = min(block_first + B::ROWS, place.length) - 1;
    const int tiles = last / B::COLUMNS + 1;
    bf16 *query = shared, *gradient = query + B::RESIDENT, *stages = gradient + B::RESIDENT;
    const auto load = [&](int tile) {
        bf16 *key = stages + tile % 2 * 2 * B::STAGE;
        const int token = tile * B::COLUMNS, count = place.length - token;
        attention_load<HD, B::COLUMNS>(key, qkv + attention_k_at(c, place, token, kv), c.qkv_stride, count, c.head_size);
        attention_load<HD, B::COLUMNS>(key + B::STAGE, qkv + attention_v_at(c, place, token, kv), c.qkv_stride, count, c.head_size);
        cp_async_commit();
    };
    const int count = place.length - block_first;
    attention_load<HD, B::ROWS>(query, qkv + attention_q_at(c, place, block_first, place.head), c.qkv_stride, count, c.head_size);
    attention_load<HD, B::ROWS>(gradient, dout + attention_out_at(c, place, block_first, place.head), c.out_stride, count, c.head_size);
    load(0);
    AttentionStatistics<B::MT> rows;
#pragma unroll
    for (int i = 0; i < 2 * B::MT; i++) {
        const int64_t at = attention_row_at(c, place, min(first + i * 8 + (int)threadIdx.x % 32 / 4, last), place.head);
        rows.lse[i / 2][i % 2] = ATTENTION_LOG2E * lse[at], rows.delta[i / 2][i % 2] = delta[at];
    }
    cp_async_wait<0>();
    __syncthreads();

    query += warp * 16 * B::MT * attention_stride(HD), gradient += warp * 16 * B::MT * attention_stride(HD); // the warp's own rows
    AttentionRows<HD, B::MT, B::KEEP> queries, gradients;
    queries.open(query), gradients.open(gradient);
    float dquery[B::MT][HD / 8][4] = {};
    for (int tile = 0; tile < tiles; tile++) {
        if (tile + 1 < tiles) load(tile + 1);
        const bf16 *key = stages + tile % 2 * 2 * B::STAGE;
        const int visible = first - tile * B::COLUMNS; // + i: the last key that query i of the warp sees
        if (first <= last && visible + 16 * B::MT > 0) {
            float s[B::MT][B::NT][4], ds[B::MT][B::NT][4];
            attention_dot<HD, B::MT, B::NT>(s, queries, key);
            attention_dot<HD, B::MT, B::NT>(ds, gradients, key + B::STAGE);
            attention_row_gradients<B::MT, B::NT>(ds, s, rows, visible < B::COLUMNS - 1, visible, c.scale2);
            attention_add<HD, B::MT, B::NT>(dquery, ds, key);
        }
        cp_async_wait<0>();
        __syncthreads();
    }
    attention_store<HD, B::MT>(dqkv + attention_q_at(c, place, first, place.head), c.qkv_stride, last + 1 - first, c.head_size, query, dquery,
                               c.scale);
}

#endif
