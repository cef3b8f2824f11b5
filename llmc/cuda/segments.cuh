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

// Visits every gridDim.x-th tile from blockIdx.x on. All threads of the block walk alike; the list stays in the first-level cache.
struct SegmentWalk {
    const Segment *segment, *end; // the one that holds the tile, one past the last
    int64_t inside;               // tiles of the segment before this one; may be past its end
    int64_t begin, stop;          // of the segment, elements
    bool decay;
};

static __device__ __forceinline__ int64_t segment_tiles(const SegmentWalk &walk) {
    return (walk.stop + SEGMENT_TILE - 1) / SEGMENT_TILE - walk.begin / SEGMENT_TILE;
}

static __device__ __forceinline__ void segment_read(SegmentWalk &walk) {
    if (walk.segment == walk.end) return;
    walk.begin = walk.segment->begin;
    walk.stop = walk.begin + walk.segment->count;
    walk.decay = walk.segment->decay;
}

// To the segment that holds the tile; false: there is none.
static __device__ __forceinline__ bool segment_find(SegmentWalk &walk) {
    while (walk.segment != walk.end) {
        const int64_t tiles = walk.stop > walk.begin ? segment_tiles(walk) : 0;
        if (walk.inside < tiles) return true;
        walk.inside -= tiles;
        walk.segment++;
        segment_read(walk);
    }
    return false;
}

static __device__ __forceinline__ SegmentWalk segment_walk(const Segment *segments, int64_t count) {
    SegmentWalk walk = {segments, segments + count, (int64_t)blockIdx.x, 0, 0, false};
    segment_read(walk);
    return walk;
}

// This thread's first element of the tile; of its 8, those from walk.begin to walk.stop-1 are the segment's.
static __device__ __forceinline__ int64_t segment_first(const SegmentWalk &walk) {
    return (walk.begin / SEGMENT_TILE + walk.inside) * SEGMENT_TILE + (int64_t)threadIdx.x * UNIT;
}

#endif
