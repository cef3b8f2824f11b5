// segments.cuh: the elements of a list of segments as tiles, so that blocks can share them whatever the sizes of the tensors. The list is device
// memory, as are the buffers it describes: nothing of it is known on the host but its length. Padding between segments is never visited.
//
// Tiles begin at multiples of SEGMENT_TILE elements of the flat buffer, not of the segment: packs within them are aligned wherever a segment
// begins.
#ifndef LLMC_CUDA_SEGMENTS_CUH
#define LLMC_CUDA_SEGMENTS_CUH

#include "llmc/cuda/block.cuh" // UNIT
#include "llmc/device.h"       // Segment

enum {
    SEGMENT_THREADS = 256,
    SEGMENT_TILE = SEGMENT_THREADS * UNIT, // elements; a thread has a unit
};

// Visits every gridDim.x-th tile from blockIdx.x on. The list is looked at in windows of 32 segments, one for each lane.
struct SegmentWalk {
    const Segment *window; // its first segment
    int64_t left;          // segments from there on
    int64_t tile;          // to visit, counted from the window's first
    int64_t tiles;         // of the window, up to this lane's segment and with it
    // the segment that holds the tile
    int64_t begin, stop; // elements
    int64_t first;       // element of the tile, may lie before begin
    bool decay;
};

// Tiles in which elements begin .. stop-1 lie.
static __device__ __forceinline__ int64_t segment_tiles(int64_t begin, int64_t stop) {
    return stop > begin ? (stop + SEGMENT_TILE - 1) / SEGMENT_TILE - begin / SEGMENT_TILE : 0;
}

// Whether this block has no tile to visit, found without a collective: sorted segments that do not overlap share a tile with the next at most, so
// that there are no more tiles than between both ends and one for each segment. False says nothing.
static __device__ __forceinline__ bool segment_idle(const Segment *segments, int64_t count) {
    const int64_t stop = segments[count - 1].begin + segments[count - 1].count;
    return (int64_t)blockIdx.x >= segment_tiles(segments[0].begin, stop) + count - 1;
}

// All threads of the block call the functions that follow together.
static __device__ __forceinline__ void segment_window(SegmentWalk &walk) {
    const int lane = (int)threadIdx.x % 32;
    walk.tiles = lane < walk.left ? segment_tiles(walk.window[lane].begin, walk.window[lane].begin + walk.window[lane].count) : 0;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) { // inclusive sums over the lanes
        const int64_t lower = __shfl_up_sync(0xffffffffu, walk.tiles, distance);
        if (lane >= distance) walk.tiles += lower;
    }
}

static __device__ __forceinline__ SegmentWalk segment_walk(const Segment *segments, int64_t count) {
    SegmentWalk walk = {segments, count, (int64_t)blockIdx.x, 0, 0, 0, 0, false};
    segment_window(walk);
    return walk;
}

// To the segment that holds walk.tile; false: there is none.
static __device__ __forceinline__ bool segment_find(SegmentWalk &walk) {
    unsigned lanes = __ballot_sync(0xffffffffu, walk.tile < walk.tiles);
    while (lanes == 0 && walk.left > 32) {
        walk.tile -= __shfl_sync(0xffffffffu, walk.tiles, 31);
        walk.window += 32;
        walk.left -= 32;
        segment_window(walk);
        lanes = __ballot_sync(0xffffffffu, walk.tile < walk.tiles);
    }
    if (lanes == 0) return false;
    const int lane = __ffs((int)lanes) - 1;
    walk.begin = walk.window[lane].begin;
    walk.stop = walk.begin + walk.window[lane].count;
    walk.decay = walk.window[lane].decay;
    const int64_t before = __shfl_sync(0xffffffffu, walk.tiles, lane) - segment_tiles(walk.begin, walk.stop);
    walk.first = (walk.begin / SEGMENT_TILE + walk.tile - before) * SEGMENT_TILE;
    return true;
}

#endif
