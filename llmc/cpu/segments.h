// segments.h: walks a range of the elements of a list of segments as if they lay end to end, so that threads can share
// them equally, whatever the sizes of the tensors. Padding between segments is never visited.
#ifndef LLMC_CPU_SEGMENTS_H
#define LLMC_CPU_SEGMENTS_H

#include "llmc/base.h"   // min_i64
#include "llmc/device.h" // Segment

static inline int64_t cpu_segments_total(const Segment *segments, int64_t count) {
    int64_t total = 0;
    for (int64_t i = 0; i < count; i++) total += segments[i].count;
    return total;
}

typedef struct {
    const Segment *segment; // the one that holds the next element
    int64_t inside;         // elements of it that are behind
    int64_t left;           // elements still to visit
} CpuSegmentWalk;

// The elements from .. to-1 of the segments laid end to end; 0 <= from <= to <= total.
static inline CpuSegmentWalk cpu_segments_walk(const Segment *segments, int64_t from, int64_t to) {
    CpuSegmentWalk walk = {segments, from, to - from};
    while (walk.left > 0 && walk.inside >= walk.segment->count) walk.inside -= walk.segment++->count;
    return walk;
}

// The next run that lies together in memory, at most `limit` elements; false at the end.
static inline bool cpu_segments_next(CpuSegmentWalk *walk, int64_t limit, Segment *run) {
    if (walk->left == 0) return false;
    while (walk->inside == walk->segment->count) walk->segment++, walk->inside = 0;
    const int64_t count = min_i64(min_i64(walk->left, limit), walk->segment->count - walk->inside);
    *run = (Segment){walk->segment->begin + walk->inside, count, walk->segment->decay};
    walk->inside += count;
    walk->left -= count;
    return true;
}

#endif
