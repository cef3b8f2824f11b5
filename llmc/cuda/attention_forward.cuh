// attention_forward.cuh: the forward pass of attention in bf16 on tensor cores (Dao 2023, FlashAttention-2): online softmax over tiles of keys, the
// scores and their exponentials stay in registers. Knows nothing of the host.
#ifndef LLMC_CUDA_ATTENTION_FORWARD_CUH
#define LLMC_CUDA_ATTENTION_FORWARD_CUH

#include "llmc/cuda/attention_place.cuh" // AttentionCall, attention_place
#include "llmc/cuda/attention_tile.cuh"  // attention_load, attention_dot, attention_add, attention_store

static constexpr float ATTENTION_LN2 = 0.69314718055994530942f; // natural logarithm of 2

// Tile: 128 queries x 64 keys (32 keys at head sizes above 96), four warps of 32 queries. A warp of 32 rows uses a fragment of k or v that it reads
// from shared memory for two products of 16 rows: 128 bytes per mma instruction instead of 256, which would hold mma.sync below its rate. The 128
// sums and 32..64 scores of a thread then allow two blocks per SM (eight warps); narrower tiles of keys where the sums take 128 registers, so that
// nothing spills. q stays in registers as fragments up to head size 64, and is read again for each tile of keys above.
template <int HD> struct AttentionForward {
    static constexpr int MT = 2, QUERIES = 64 * MT, KEYS = HD <= 96 ? 64 : 32, NT = KEYS / 8;
    static constexpr bool KEEP = HD <= 64;
    static constexpr int STAGE = 2 * KEYS * attention_stride(HD); // elements: keys, values
    static constexpr size_t SHARED_BYTES = (QUERIES * attention_stride(HD) + 2 * STAGE) * sizeof(bf16);
};

// Of a warp's 16*MT queries: each lane has two rows per m, and of the sums its own columns' share.
template <int HD, int MT> struct AttentionState {
    float sum[MT][HD / 8][4];
    float top[MT][2], total[MT][2]; // largest score, and sum of exp2(scale2*(score - top))
};

// s (16*MT, 8*NT), scores, become exp2(scale2*score - scale2*top); what was summed before is brought to the new top. Where `edge`, query i of the
// warp sees keys 0 .. visible+i of the tile, one at least.
template <int HD, int MT, int NT>
static __device__ __forceinline__ void attention_softmax(AttentionState<HD, MT> &state, float (&s)[MT][NT][4], bool edge, int visible,
                                                         float scale2) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int last = visible + m * 16 + h * 8 + lane / 4 - lane % 4 * 2;
            float top = state.top[m][h], total = 0.0f;
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    if (edge && n * 8 + e % 2 > last) s[m][n][e] = -INFINITY;
                    top = fmaxf(top, s[m][n][e]);
                }
            }
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1)); // four lanes share a row
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
            const float factor = exp2_fast((state.top[m][h] - top) * scale2), shift = top * scale2;
#pragma unroll
            for (int n = 0; n < NT; n++) {
#pragma unroll
                for (int e = 2 * h; e < 2 * h + 2; e++) {
                    s[m][n][e] = exp2_fast(fmaf(s[m][n][e], scale2, -shift));
                    total += s[m][n][e];
                }
            }
            state.top[m][h] = top;
            state.total[m][h] = state.total[m][h] * factor + total;
#pragma unroll
            for (int d = 0; d < HD / 8; d++) state.sum[m][d][2 * h] *= factor, state.sum[m][d][2 * h + 1] *= factor;
        }
    }
}

// Block: 128 queries of a head against all keys before them, two stages of keys and values: the next one arrives while the current one is computed.
// Grid: attention_grid_. Shared memory 30, 54, 78, 68 KiB and registers 190, 244, 254, 247 for HD 32, 64, 96, 128 (sm_90a), no spills; two blocks
// per SM. Work: 4*HS operations for each visible pair of query and key, plus what is masked in the tiles on the diagonal (at T = 1024 6% with tiles
// of 64 keys, 3% with 32: a warp skips tiles after its last query). Bytes: q, k, v, out once, 2*(QKV + NH*HS) + 4*NH per token, as long as the keys
// and values of the blocks that run together stay in L2: bound by mma.sync; the exponentials take 60% of its time at head size 64, half of that at
// 128, on units of their own. Expected: 80-100% of the yardstick of this style (H100: 306-370 TFLOP/s). Not measured on a device yet.
template <int HD>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2) attention_forward_kernel(AttentionCall c, bf16 *out, float *lse, const bf16 *qkv) {
    typedef AttentionForward<HD> F;
    DYN_SHARED(bf16, shared);
    const AttentionPlace place = attention_place<F::QUERIES>(c, c.heads, true);
    if (place.tile < 0) return; // the whole block
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, kv = place.head / c.group;
    const int block_first = place.tile * F::QUERIES, first = block_first + warp * 16 * F::MT,
              last = min(block_first + F::QUERIES, place.length) - 1;
    const int tiles = last / F::KEYS + 1;
    bf16 *query = shared, *stages = shared + F::QUERIES * attention_stride(HD), *own = query + warp * 16 * F::MT * attention_stride(HD);
    const bf16 *from = qkv + attention_k_at(c, place, 0, kv); // keys of the next tile
    int left = place.length;
    const auto load = [&](int stage) {
        bf16 *key = stages + stage * F::STAGE;
        attention_load<HD, F::KEYS>(key, from, c.qkv_stride, left, c.head_size);
        attention_load<HD, F::KEYS>(key + F::STAGE / 2, from + c.kv_heads * c.head_size, c.qkv_stride, left, c.head_size);
        cp_async_commit();
        from += F::KEYS * c.qkv_stride, left -= F::KEYS;
    };
    attention_load<HD, F::QUERIES>(query, qkv + attention_q_at(c, place, block_first, place.head), c.qkv_stride, place.length - block_first,
                                   c.head_size);
    load(0);
    cp_async_wait<0>();
    __syncthreads();

    AttentionRows<HD, F::MT, F::KEEP> rows;
    rows.open(own);
    AttentionState<HD, F::MT> state = {};
#pragma unroll
    for (int m = 0; m < F::MT; m++) state.top[m][0] = state.top[m][1] = -INFINITY;
    for (int tile = 0; tile < tiles; tile++) {
        if (tile + 1 < tiles) load((tile + 1) % 2);
        const bf16 *key = stages + tile % 2 * F::STAGE;
        const int visible = first - tile * F::KEYS; // + i: the last key that query i of the warp sees
        if (first <= last && visible + 16 * F::MT > 0) {
            float s[F::MT][F::NT][4];
            attention_dot<HD, F::MT, F::NT>(s, rows, key);
            attention_softmax<HD, F::MT, F::NT>(state, s, visible < F::KEYS - 1, visible, c.scale2);
            attention_add<HD, F::MT, F::NT>(state.sum, s, key + F::STAGE / 2);
        }
        cp_async_wait<0>();
        __syncthreads();
    }

#pragma unroll
    for (int m = 0; m < F::MT; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float total = state.total[m][h];
            total += __shfl_xor_sync(0xffffffffu, total, 1);
            total += __shfl_xor_sync(0xffffffffu, total, 2);
            const float factor = 1.0f / total;
#pragma unroll
            for (int d = 0; d < HD / 8; d++) state.sum[m][d][2 * h] *= factor, state.sum[m][d][2 * h + 1] *= factor;
            const int token = first + m * 16 + h * 8 + lane / 4;
            if (lane % 4 == 0 && token <= last) {
                lse[attention_row_at(c, place, token, place.head)] = ATTENTION_LN2 * (state.top[m][h] * c.scale2 + log2f(total));
            }
        }
    }
    attention_store<HD, F::MT>(out + attention_out_at(c, place, first, place.head), c.out_stride, last + 1 - first, c.head_size, own, state.sum,
                               1.0f);
}

#endif
