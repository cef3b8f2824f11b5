// attention_tile.cuh: the bf16 tiles of attention on tensor cores: copies into shared memory, the two products, and the way out. Knows nothing of
// softmax, documents or heads.
//
// A tile is (rows, HD) in shared memory; its rows lie HD + 8 elements apart, an odd number of 16-byte pieces, so that the eight rows that ldmatrix
// reads at a time lie in different banks, and a thread's addresses differ from one base by constants. HD is the head size rounded up to 32, 64, 96
// or 128; what lies between the two is zero. Each of the four warps owns 16*MT consecutive rows of a product's left operand and result.
#ifndef LLMC_CUDA_ATTENTION_TILE_CUH
#define LLMC_CUDA_ATTENTION_TILE_CUH

#include "llmc/cuda/attention_place.cuh" // ATTENTION_THREADS
#include "llmc/cuda/ptx.cuh"             // mma_16816_bf16, ldmatrix_x4, cp_async16

static constexpr float ATTENTION_LOG2E = 1.44269504088896340736f; // exponentials are powers of two: exp(x) = exp2(x * log2(e))

static constexpr __host__ __device__ int attention_stride(int HD) { return HD + 8; }

// Starts to copy tile (ROWS, HD) from `rows`, whose rows (head_size) lie `stride` apart; zero from row `count` and column head_size on. The whole
// block calls.
template <int HD, int ROWS>
static __device__ __forceinline__ void attention_load(bf16 *tile, const bf16 *rows, int stride, int count, int head_size) {
    constexpr int across = HD % 128 == 0 ? 16 : HD % 64 == 0 ? 8 : 4, step = ATTENTION_THREADS / across; // threads on a row; rows at a time
    const int first = threadIdx.x / across, column = threadIdx.x % across * 8;
    bf16 *to = tile + first * attention_stride(HD) + column;
    const bf16 *from = rows + first * stride + column;
#pragma unroll
    for (int i = 0; i < ROWS / step; i++, to += step * attention_stride(HD), from += step * stride) {
#pragma unroll
        for (int j = 0; j < HD; j += 8 * across) cp_async16(to + j, from + j, i * step < count - first && j < head_size - column ? 16 : 0);
    }
}

// A warp's rows (16*MT, HD) of a tile as left operands: fragments in registers where KEEP, otherwise read from the tile at each use.
template <int HD, int MT, bool KEEP> struct AttentionRows {
    uint32_t kept[KEEP ? HD / 16 : 1][MT][4];
    const bf16 *at; // the lane's row

    __device__ __forceinline__ void read(uint32_t (&a)[MT][4], int k) const {
#pragma unroll
        for (int m = 0; m < MT; m++) ldmatrix_x4(a[m], at + m * 16 * attention_stride(HD) + k * 16);
    }
    __device__ __forceinline__ void open(const bf16 *rows) {
        const int lane = threadIdx.x % 32;
        at = rows + lane % 16 * attention_stride(HD) + lane / 16 * 8;
        if constexpr (KEEP) {
#pragma unroll
            for (int k = 0; k < HD / 16; k++) read(kept[k], k);
        }
    }
    __device__ __forceinline__ void get(uint32_t (&a)[MT][4], int k) const {
        if constexpr (KEEP) {
#pragma unroll
            for (int m = 0; m < MT; m++) {
#pragma unroll
                for (int r = 0; r < 4; r++) a[m][r] = kept[k][m][r];
            }
        } else {
            read(a, k);
        }
    }
};

// s (16*MT, 8*NT) = left (16*MT, HD) x tile (8*NT, HD)^T
template <int HD, int MT, int NT, bool KEEP>
static __device__ __forceinline__ void attention_dot(float (&s)[MT][NT][4], const AttentionRows<HD, MT, KEEP> &left, const bf16 *tile) {
    const int lane = threadIdx.x % 32;
    const bf16 *at = tile + (lane % 8 + lane / 16 * 8) * attention_stride(HD) + lane / 8 % 2 * 8;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int n = 0; n < NT; n++) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.0f;
    }
#pragma unroll
    for (int k = 0; k < HD / 16; k++) {
        uint32_t a[MT][4];
        left.get(a, k);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            uint32_t b[4];
            ldmatrix_x4(b, at + n * 8 * attention_stride(HD) + k * 16);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_16816_bf16(s[m][n], a[m], b[0], b[1]);
                mma_16816_bf16(s[m][n + 1], a[m], b[2], b[3]);
            }
        }
    }
}

static __device__ __forceinline__ uint32_t attention_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&pair);
}

// sum (16*MT, HD) += s (16*MT, 8*NT), rounded to bf16, x tile (8*NT, HD). A result's fragment is laid out as a left operand's is: s stays in its
// registers.
template <int HD, int MT, int NT>
static __device__ __forceinline__ void attention_add(float (&sum)[MT][HD / 8][4], const float (&s)[MT][NT][4], const bf16 *tile) {
    const int lane = threadIdx.x % 32;
    const bf16 *at = tile + lane % 16 * attention_stride(HD) + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < NT / 2; k++) {
        uint32_t a[MT][4];
#pragma unroll
        for (int m = 0; m < MT; m++) {
#pragma unroll
            for (int r = 0; r < 4; r++) a[m][r] = attention_pair(s[m][2 * k + r / 2][r % 2 * 2], s[m][2 * k + r / 2][r % 2 * 2 + 1]);
        }
#pragma unroll
        for (int d = 0; d < HD / 8; d += 2) {
            uint32_t b[4];
            ldmatrix_x4_trans(b, at + k * 16 * attention_stride(HD) + d * 8);
#pragma unroll
            for (int m = 0; m < MT; m++) {
                mma_16816_bf16(sum[m][d], a[m], b[0], b[1]);
                mma_16816_bf16(sum[m][d + 1], a[m], b[2], b[3]);
            }
        }
    }
}

// `to` (the first `count` of the rows, of head_size, `stride` apart) = sum (16*MT, HD) * factor, by way of the warp's rows of a tile, so that
// whole pieces of 16 bytes leave. The block has passed a barrier since these rows were last read. All lanes call.
template <int HD, int MT>
static __device__ __forceinline__ void attention_store(bf16 *to, int stride, int count, int head_size, bf16 *rows,
                                                       const float (&sum)[MT][HD / 8][4], float factor) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < MT; m++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            bf16 *row = rows + (m * 16 + h * 8 + lane / 4) * attention_stride(HD) + lane % 4 * 2;
#pragma unroll
            for (int d = 0; d < HD / 8; d++) {
                *reinterpret_cast<uint32_t *>(row + d * 8) = attention_pair(sum[m][d][2 * h] * factor, sum[m][d][2 * h + 1] * factor);
            }
        }
    }
    __syncwarp();
    const int pieces = head_size / 8, stored = min(count, 16 * MT) * pieces;
    for (int at = lane; at < stored; at += 32) {
        const int row = at / pieces, column = at % pieces * 8;
        *reinterpret_cast<Pack<bf16> *>(to + row * stride + column) =
            *reinterpret_cast<const Pack<bf16> *>(rows + row * attention_stride(HD) + column);
    }
}

#endif
