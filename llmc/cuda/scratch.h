// scratch.h: memory that the CUDA device takes beside tensors, by formula: scratch of kernels, workspace of cuBLASLt, parts of sums in the order of
// ranks, pinned memory of the host. The host code of the kernels asks for what these functions say, and the memory plan (llmc/plan_device.h) adds
// them up, so that they cannot drift apart. C and C++; knows no CUDA and no op's work. sms: multiprocessors of the device.
#ifndef LLMC_CUDA_SCRATCH_H
#define LLMC_CUDA_SCRATCH_H

#include <stdbool.h> // bool
#include <stddef.h>  // size_t
#include <stdint.h>  // int64_t

static inline int64_t scratch_parts_(int64_t n, int64_t each, int64_t most) {
    const int64_t parts = (n + each - 1) / each;
    return parts < most ? parts : most;
}

// ----------------------------------------------------------------------------
// Sums of columns (reduce.cuh): parts of the rows, each of which leaves a row of partial sums.

enum {
    COLUMNS_TILE = 256, // columns of a block
    COLUMNS_PER_SM = 8, // blocks
    COLUMNS_ROWS = 64   // at least, of a part
};

static inline int64_t scratch_column_tiles(int64_t C) { return (C + COLUMNS_TILE - 1) / COLUMNS_TILE; }
static inline int64_t scratch_column_parts(int64_t sms, int64_t N, int64_t C) {
    const int64_t parts = scratch_parts_(N, COLUMNS_ROWS, sms * COLUMNS_PER_SM / scratch_column_tiles(C));
    return parts > 1 ? parts : 1;
}
static inline size_t scratch_column_bytes(int64_t sms, int64_t N, int64_t C) { return (size_t)(scratch_column_parts(sms, N, C) * C) * 4; }
// A fused bias gradient that is added to what is there.
static inline size_t scratch_bias_bytes(int64_t OC) { return (size_t)OC * 4; }

// ----------------------------------------------------------------------------
// norm backward (norm.cuh): how its blocks share the rows.

enum {
    NORM_SHORT_C = 8192,         // longest row of a block with 2 units of 8 channels per thread
    NORM_LONG_C = 16384,         // with 4
    NORM_BACKWARD_WARPS = 8,     // of a block whose warps have a row each
    NORM_BACKWARD_PER_SM = 2,    // such blocks: 128 registers per thread
    NORM_BACKWARD_THREADS = 512, // of an SM, in blocks that have a row each: 128 registers per thread
};

typedef struct {
    int units;        // of a lane or thread; 0: by columns, then by rows
    bool warp;        // a warp has a row, else a block
    int rows;         // of a block at a time
    unsigned threads; // of a block
    int per_sm;       // blocks
} ScratchNorm;

// Threads of a block that has a row of C channels, so many units of 8 in each.
static inline unsigned scratch_norm_threads(int64_t C, int units) { return (unsigned)((C / 8 + units * 32 - 1) / (units * 32) * 32); }

// packed: rows of whole 16 bytes. wide: fp32, whose long rows are too many for the registers.
static inline ScratchNorm scratch_norm_plan(int64_t C, bool packed, bool wide) {
    const int64_t lanes = (C + COLUMNS_TILE - 1) / COLUMNS_TILE; // units of a lane, if a warp has the row
    ScratchNorm plan = {0, false, 1, 0, 0};
    if (!packed || C > NORM_LONG_C || (wide && C > NORM_SHORT_C)) return plan;
    if (lanes <= (wide ? 2 : 3)) {
        const ScratchNorm warps = {(int)lanes, true, NORM_BACKWARD_WARPS, 32 * NORM_BACKWARD_WARPS, NORM_BACKWARD_PER_SM};
        return warps;
    }
    plan.units = C <= NORM_SHORT_C ? 2 : 4;
    plan.threads = scratch_norm_threads(C, plan.units);
    plan.per_sm = NORM_BACKWARD_THREADS / (int)plan.threads;
    return plan;
}
static inline int64_t scratch_norm_parts(int64_t sms, int64_t N, int64_t C, const ScratchNorm *plan) {
    return plan->units > 0 ? scratch_parts_(N, plan->rows, sms * plan->per_sm) : scratch_column_parts(sms, N, C);
}
// Partial sums of dweight and dbias.
static inline size_t scratch_norm_bytes(int64_t parts, int64_t C) { return (size_t)(2 * parts * C) * 4; }

// ----------------------------------------------------------------------------
// The others.

// Gradients of the weights of qk-norm (rope.cuh).
enum {
    ROPE_PER_SM = 4, // blocks
    ROPE_KINDS = 2   // q, k
};
static inline int64_t scratch_rope_blocks(int64_t sms, int64_t N) { return scratch_parts_(N, 1, sms * ROPE_PER_SM); }
static inline size_t scratch_rope_bytes(int64_t sms, int64_t N, int64_t HS) { return (size_t)(scratch_rope_blocks(sms, N) * ROPE_KINDS * HS) * 4; }

// Sorting tokens (sort.cuh).
enum {
    SORT_BINS = 256, // of a pass; also the threads of a block: a thread owns a bin
    SORT_ROUNDS = 8, // of 32 keys, one after another, in each warp
    SORT_TILE = SORT_BINS * SORT_ROUNDS
};
static inline int64_t scratch_sort_blocks(int64_t N) { return (N + SORT_TILE - 1) / SORT_TILE; }
static inline size_t scratch_sort_bytes(int64_t N) { return ((size_t)N * 4 + (size_t)scratch_sort_blocks(N) * SORT_BINS) * 4; }

// Embedding backward (embedding.cuh): about the square root: as many rows in a chunk as chunks in the longest run.
static inline int64_t scratch_embedding_chunk(int64_t N) {
    int64_t chunk = 32;
    while (chunk * chunk < N) chunk *= 2;
    return chunk;
}
static inline size_t scratch_embedding_part_bytes(int64_t N, int64_t C) {
    const int64_t chunk = scratch_embedding_chunk(N), chunks = (N + chunk - 1) / chunk;
    return ((size_t)chunks * (size_t)C * 4 + 255) / 256 * 256;
}
static inline size_t scratch_embedding_bytes(int64_t N, int64_t C) { return 2 * scratch_embedding_part_bytes(N, C) + scratch_sort_bytes(N); }

// The norm of the gradient (global_norm.cuh).
enum { NORM_PARTS = 512 }; // blocks, whatever the device: about four on each multiprocessor of a large one
static inline size_t scratch_squares_bytes(void) { return NORM_PARTS * sizeof(double); }

// cuBLASLt (cublaslt.cuh).
enum { PRODUCT_WORKSPACE_BYTES = 32 << 20 };

// Copies to the device (memory.cuh): pinned memory of the host.
enum { COPY_PIECES = 4 };
static const size_t COPY_PIECE_BYTES = (size_t)4 << 20;

// Parts of a sum in the order of ranks (comm.cuh), of a group that makes such sums: messages of 256 KiB use the wire well.
static inline size_t scratch_reduce_bytes(int64_t ranks) {
    const size_t bytes = (size_t)ranks * 256 * 1024, least_bytes = (size_t)16 << 20;
    return bytes > least_bytes ? bytes : least_bytes;
}

#endif
