// sort.cuh: stable sort of token indices by a small integer key (a token id, a position) on the CUDA device: a radix sort, 8 bits at a time from
// the lowest. It knows neither ids nor embeddings; keys outside their range come last. Integer arithmetic only: no order of threads shows in the
// result.
//
// A pass is three kernels: every block counts the digits of its tile of SORT_TILE keys, one block turns the counts into first places, every block
// moves its keys. 20 bytes of memory traffic per key and pass (the first pass reads the keys where they come from); microseconds beside the sums it
// serves.
#ifndef LLMC_CUDA_SORT_CUH
#define LLMC_CUDA_SORT_CUH

#include "llmc/cuda/launch.cuh" // launch
#include "llmc/cuda/scratch.h"  // SORT_BINS, SORT_TILE, scratch_sort_blocks

enum {
    SORT_BITS = 8, // of a pass
    SORT_WARPS = SORT_BINS / 32,
};
static_assert(SORT_BINS == 1 << SORT_BITS, "a bin for each value");

struct Sorted {
    const int32_t *keys, *tokens; // (N): keys ascending; tokens of one key ascending
};

// Keys of a pass: those of the pass before, or (keys == nullptr) raw[i] - begin of token i, `range` where that is outside 0 .. range-1.
struct SortInput {
    const int32_t *keys, *tokens; // (N)
    const int32_t *raw;           // (N)
    int64_t begin;
    int32_t range;
};

static __device__ __forceinline__ int32_t sort_key(const SortInput &in, int64_t i) {
    if (in.keys != nullptr) return in.keys[i];
    const int64_t key = in.raw[i] - in.begin;
    return key >= 0 && key < in.range ? (int32_t)key : in.range;
}

// Lanes of the warp with this lane's bin; bin < 0: none. All 32 lanes call it together.
static __device__ __forceinline__ unsigned sort_peers(int bin) {
    unsigned peers = __ballot_sync(0xffffffffu, bin >= 0);
#pragma unroll
    for (int bit = 0; bit < SORT_BITS; bit++) {
        const unsigned ones = __ballot_sync(0xffffffffu, bin >> bit & 1);
        peers &= bin >> bit & 1 ? ones : ~ones;
    }
    return bin >= 0 ? peers : 0;
}

// at (SORT_BINS) of this warp += keys of each bin among the warp's. One lane of those with the same bin adds.
static __device__ __forceinline__ void sort_count(int *at, const SortInput &in, int64_t first, int64_t N, int shift) {
    const int lane = (int)threadIdx.x % 32;
    for (int round = 0; round < SORT_ROUNDS; round++) {
        const int64_t i = first + round * 32 + lane;
        const int bin = i < N ? sort_key(in, i) >> shift & (SORT_BINS - 1) : -1;
        const unsigned peers = sort_peers(bin);
        if (peers != 0 && lane == __ffs((int)peers) - 1) at[bin] += __popc(peers);
        __syncwarp();
    }
}

// The first key of this warp's part of the block's tile.
static __device__ __forceinline__ int64_t sort_first() {
    return blockIdx.x * (int64_t)SORT_TILE + (int64_t)(threadIdx.x / 32) * (SORT_ROUNDS * 32);
}

// counts (blocks, SORT_BINS) = keys of each bin in each tile. Grid: a block per tile. Shared: 8 KiB; 30 registers, as in the others.
__global__ void __launch_bounds__(SORT_BINS) sort_count_kernel(int32_t *counts, SortInput in, int64_t N, int shift) {
    __shared__ int at[SORT_WARPS][SORT_BINS];
    const int bin = (int)threadIdx.x;
    for (int warp = 0; warp < SORT_WARPS; warp++) at[warp][bin] = 0;
    __syncthreads(); // all counts are zero
    sort_count(at[threadIdx.x / 32], in, sort_first(), N, shift);
    __syncthreads(); // all warps have counted
    int sum = 0;
    for (int warp = 0; warp < SORT_WARPS; warp++) sum += at[warp][bin];
    counts[blockIdx.x * (int64_t)SORT_BINS + bin] = sum;
}

// counts (blocks, SORT_BINS): = place of the tile's first key of a bin in the sorted order. Grid: one block; a thread owns a bin. Shared: 1 KiB.
__global__ void __launch_bounds__(SORT_BINS) sort_place_kernel(int32_t *counts, int64_t blocks) {
    __shared__ int sums[SORT_BINS];
    const int bin = (int)threadIdx.x;
    int total = 0;
#pragma unroll 8
    for (int64_t block = 0; block < blocks; block++) total += counts[block * SORT_BINS + bin];
    sums[bin] = total;
    __syncthreads();
    for (int distance = 1; distance < SORT_BINS; distance *= 2) { // inclusive sums over the bins
        const int lower = bin >= distance ? sums[bin - distance] : 0;
        __syncthreads(); // all have read
        sums[bin] += lower;
        __syncthreads();
    }
    int place = sums[bin] - total;
#pragma unroll 8
    for (int64_t block = 0; block < blocks; block++) {
        const int count = counts[block * SORT_BINS + bin];
        counts[block * SORT_BINS + bin] = place;
        place += count;
    }
}

// to_keys, to_tokens (N) = the keys in the order of this pass's digit, equal digits in the order they came in. Grid: a block per tile. Shared: 8
// KiB.
__global__ void __launch_bounds__(SORT_BINS)
    sort_move_kernel(int32_t *to_keys, int32_t *to_tokens, const int32_t *places, SortInput in, int64_t N, int shift) {
    __shared__ int at[SORT_WARPS][SORT_BINS]; // counts, then the place of each warp's next key of a bin
    const int own = (int)threadIdx.x, lane = own % 32;
    for (int warp = 0; warp < SORT_WARPS; warp++) at[warp][own] = 0;
    __syncthreads();
    int *place = at[own / 32];
    const int64_t first = sort_first();
    sort_count(place, in, first, N, shift);
    __syncthreads(); // the counts are those of whole warps
    int next = places[blockIdx.x * (int64_t)SORT_BINS + own];
    for (int warp = 0; warp < SORT_WARPS; warp++) {
        const int count = at[warp][own];
        at[warp][own] = next;
        next += count;
    }
    __syncthreads(); // all places are known
    for (int round = 0; round < SORT_ROUNDS; round++) {
        const int64_t i = first + round * 32 + lane;
        const int32_t key = i < N ? sort_key(in, i) : 0;
        const int bin = i < N ? key >> shift & (SORT_BINS - 1) : -1;
        const unsigned peers = sort_peers(bin);
        if (peers != 0) {
            const int to = place[bin] + __popc(peers & ((1u << lane) - 1));
            to_keys[to] = key;
            to_tokens[to] = in.keys != nullptr ? in.tokens[i] : (int32_t)i;
        }
        __syncwarp(); // all have read their place
        if (peers != 0 && lane == __ffs((int)peers) - 1) place[bin] += __popc(peers);
        __syncwarp(); // the next round's places are known
    }
}

// The tokens 0 .. N-1 by raw[token] - begin (raw (N), device memory; N < 2^31), those outside 0 .. range-1 last with the key `range`. scratch:
// scratch_sort_bytes(N), 16-byte aligned; the result lies in it.
static Sorted sort_tokens(CudaDevice *device, void *scratch, const int32_t *raw, int64_t begin, int32_t range, int64_t N) {
    int32_t *keys[2] = {(int32_t *)scratch, (int32_t *)scratch + 2 * N}, *tokens[2] = {keys[0] + N, keys[1] + N}, *counts = keys[0] + 4 * N;
    const int64_t blocks = scratch_sort_blocks(N);
    const LaunchShape tiles = {(unsigned)blocks, SORT_BINS};
    SortInput in = {nullptr, nullptr, raw, begin, range};
    int to = 0;
    for (int shift = 0; shift == 0 || (shift < 31 && range >> shift != 0); shift += SORT_BITS, to ^= 1) {
        launch(device, device->compute, tiles, sort_count_kernel, counts, in, N, shift);
        launch(device, device->compute, {1, SORT_BINS}, sort_place_kernel, counts, blocks);
        launch(device, device->compute, tiles, sort_move_kernel, keys[to], tokens[to], (const int32_t *)counts, in, N, shift);
        in.keys = keys[to], in.tokens = tokens[to];
    }
    return {in.keys, in.tokens};
}

#endif
