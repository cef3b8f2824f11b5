// embedding.cuh: look-up of token and position vectors with dropout, forward and backward, on the CUDA device, for the whole vocabulary or a range
// of it.
//
// Backward adds without atomics, in an order that depends on the tokens alone: the tokens are sorted by id (sort.cuh), and each id's rows are
// summed in token order. The sorted list is cut into chunks of equal length, a warp sums a chunk, and what a cut divides is put together in the
// order of the chunks: one id that fills a batch is shared by as many warps as many ids are. Positions are ids of their own table.
#ifndef LLMC_CUDA_EMBEDDING_CUH
#define LLMC_CUDA_EMBEDDING_CUH

#include "llmc/cuda/block.cuh"   // Unit, unit_load
#include "llmc/cuda/dropout.cuh" // dropout_draw, dropout_mask
#include "llmc/cuda/launch.cuh"  // launch, launch_blocks
#include "llmc/cuda/sort.cuh"    // sort_tokens

enum {
    EMBEDDING_THREADS = 256,
    EMBEDDING_WARPS = EMBEDDING_THREADS / 32,
    EMBEDDING_SLICE = 32 * UNIT, // channels of a warp; a lane has a unit
    EMBEDDING_ROWS = 4,          // rows that a warp loads at once
};

// The dropout of channels c .. c+7 of token n.
static __device__ __forceinline__ void embedding_drop(float (&value)[UNIT], const DropoutDraw &draw, int64_t n, int64_t c) {
    if (draw.token_index == nullptr) return;
    float mask[UNIT];
    dropout_mask(mask, draw, draw.token_index[n], c);
#pragma unroll
    for (int k = 0; k < UNIT; k++) value[k] *= mask[k];
}

// value (8) += channels c .. c+7 of a row (C)
template <bool PACKED, class T> static __device__ __forceinline__ void embedding_add(float (&value)[UNIT], const T *row, int64_t c, int64_t C) {
    const Unit<T> unit = unit_load(row, c, C, PACKED);
#pragma unroll
    for (int k = 0; k < UNIT; k++) value[k] += unit[k];
}

// channels c .. c+7 of a row (C) = value (8)
template <bool PACKED, class T> static __device__ __forceinline__ void embedding_store(T *row, const float (&value)[UNIT], int64_t c, int64_t C) {
    unit_store(row, c, C, PACKED, Unit<T>::of(value));
}

// ----------------------------------------------------------------------------
// Forward

// out (N, C) = dropout(wte[ids] + wpe[positions]); wpe (positions, C) may be absent. A warp takes a token, a lane 8 channels at a time; grid:
// strides over the tokens. No shared memory; 40 registers. Bytes per element in bf16: 2 read of wte, 2 of wpe (mostly from the L2 cache), 2
// written. Expected share of HBM bandwidth 85%; not measured on a device yet.
template <class T, bool PACKED>
__global__ void __launch_bounds__(EMBEDDING_THREADS)
    embedding_forward_kernel(T *out, const int32_t *ids, const int32_t *positions, const T *wte, const T *wpe, DropoutDraw dropout, int64_t N,
                             int64_t C, int64_t vocab_begin, int64_t V) {
    const int lane = (int)threadIdx.x % 32;
    for (int64_t n = blockIdx.x * (int64_t)EMBEDDING_WARPS + threadIdx.x / 32; n < N; n += (int64_t)gridDim.x * EMBEDDING_WARPS) {
        const int64_t id = ids[n] - vocab_begin;
        const T *token = id >= 0 && id < V ? wte + id * C : nullptr, *place = wpe != nullptr ? wpe + positions[n] * C : nullptr;
#pragma unroll PACKED ? 2 : 1
        for (int64_t c = lane * UNIT; c < C; c += EMBEDDING_SLICE) {
            float value[UNIT] = {0};
            if (token != nullptr) embedding_add<PACKED>(value, token, c, C);
            if (place != nullptr) embedding_add<PACKED>(value, place, c, C);
            embedding_drop(value, dropout, n, c);
            embedding_store<PACKED>(out + n * C, value, c, C);
        }
    }
}

template <class T>
static void embedding_forward_(CudaDevice *device, Buffer out, Buffer ids, Buffer positions, Buffer wte, Buffer wpe, const Dropout *dropout,
                               int64_t N, int64_t C, int64_t vocab_begin, int64_t V) {
    const bool packed = units_packed(C, out, wte, wpe);
    launch(device, device->compute, {launch_blocks(device, N, EMBEDDING_WARPS, 16), EMBEDDING_THREADS},
           packed ? embedding_forward_kernel<T, true> : embedding_forward_kernel<T, false>, (T *)out.data, (const int32_t *)ids.data,
           (const int32_t *)positions.data, (const T *)wte.data, (const T *)wpe.data, dropout_draw(dropout), N, C, vocab_begin, V);
}

// out (N, C) = dropout(wte[ids] + wpe[positions]); wpe and dropout optional. wte (V, C) holds the ids from vocab_begin on; the vectors of other ids
// count as zero. out, wte and wpe have one dtype.
static void cuda_embedding_forward(Device *device, Buffer out, Buffer ids, Buffer positions, Buffer wte, Buffer wpe, const Dropout *dropout,
                                   int64_t N, int64_t C, int64_t vocab_begin, int64_t V) {
    if (out.dtype == DTYPE_BF16) {
        embedding_forward_<bf16>(cuda_of(device), out, ids, positions, wte, wpe, dropout, N, C, vocab_begin, V);
    } else {
        embedding_forward_<float>(cuda_of(device), out, ids, positions, wte, wpe, dropout, N, C, vocab_begin, V);
    }
}

// ----------------------------------------------------------------------------
// Backward

// A table's gradient: rows of dout summed by key. The runs of equal keys that end in another chunk than they begin in leave their sums here.
struct EmbeddingRuns {
    Sorted sorted;       // (N)
    float *heads;        // (chunks, C) of the run that goes on from the chunk before
    float *tails;        // (chunks, C) of the run that begins here and goes on in the next chunk
    int64_t N, C, chunk; // chunk: length, a multiple of 32
    int32_t range;       // keys from here on are skipped
};

// What a warp works on: a chunk and, within 256 channels, 8 of a lane.
struct EmbeddingTask {
    int64_t chunk, first, last; // sorted places first .. last-1
    int64_t c;                  // first channel
    bool exists;
};

static __device__ __forceinline__ EmbeddingTask embedding_task(const EmbeddingRuns &runs) {
    const int64_t slices = (runs.C + EMBEDDING_SLICE - 1) / EMBEDDING_SLICE, warp = blockIdx.x * (int64_t)EMBEDDING_WARPS + threadIdx.x / 32;
    const int64_t chunk = warp / slices, first = chunk * runs.chunk;
    return {chunk, first, min(first + runs.chunk, runs.N), (warp % slices) * EMBEDDING_SLICE + (int64_t)(threadIdx.x % 32) * UNIT, first < runs.N};
}

// dtable (range, C) or a divided run's place = or += sum (8) of a run of `key`. Keys ascend, so that equality tells the chunk's first and last run.
template <bool PACKED>
static __device__ __forceinline__ void embedding_finish(float *dtable, const EmbeddingRuns &runs, const EmbeddingTask &task, int32_t key,
                                                        int32_t before, int32_t after, float (&sum)[UNIT]) {
    if (key >= runs.range || task.c >= runs.C) return;
    if (key == before) {
        embedding_store<PACKED>(runs.heads + task.chunk * runs.C, sum, task.c, runs.C);
    } else if (key == after) {
        embedding_store<PACKED>(runs.tails + task.chunk * runs.C, sum, task.c, runs.C);
    } else {
        embedding_add<PACKED>(sum, dtable + key * runs.C, task.c, runs.C);
        embedding_store<PACKED>(dtable + key * runs.C, sum, task.c, runs.C);
    }
}

// The sums of the runs in a chunk: dtable (range, C) += those that lie in the chunk, heads and tails = the others. Grid: a warp per chunk and 256
// channels. No shared memory; 116 registers, mostly dropout's. Bytes per element of dout in bf16: 2 read; per row that occurs 8*C of dtable.
// Expected share of HBM bandwidth 70% (rows are at random places); not measured on a device yet.
template <class T, bool PACKED>
__global__ void __launch_bounds__(EMBEDDING_THREADS, 2)
    embedding_sum_kernel(float *dtable, EmbeddingRuns runs, const T *dout, DropoutDraw dropout) {
    const EmbeddingTask task = embedding_task(runs);
    if (!task.exists) return; // the whole warp
    const int lane = (int)threadIdx.x % 32;
    const int32_t before = task.first > 0 ? runs.sorted.keys[task.first - 1] : -1, after = task.last < runs.N ? runs.sorted.keys[task.last] : -1;
    int32_t run = runs.range; // the key of the rows in `sum`; none yet
    float sum[UNIT] = {0};
    for (int64_t i = task.first; i < task.last; i += 32) {
        const bool mine = i + lane < task.last;
        const int32_t my_key = mine ? runs.sorted.keys[i + lane] : runs.range, my_token = mine ? runs.sorted.tokens[i + lane] : 0;
        for (int r = 0; r < 32 && i + r < task.last; r += EMBEDDING_ROWS) {
            Unit<T> row[EMBEDDING_ROWS];
            int32_t key[EMBEDDING_ROWS];
            int32_t token[EMBEDDING_ROWS];
#pragma unroll
            for (int k = 0; k < EMBEDDING_ROWS; k++) {
                key[k] = __shfl_sync(0xffffffffu, my_key, r + k);
                token[k] = __shfl_sync(0xffffffffu, my_token, r + k);
                if (key[k] < runs.range) row[k] = unit_load(dout + (int64_t)token[k] * runs.C, task.c, runs.C, PACKED);
            }
#pragma unroll
            for (int k = 0; k < EMBEDDING_ROWS; k++) {
                if (key[k] != run) {
                    embedding_finish<PACKED>(dtable, runs, task, run, before, after, sum);
                    run = key[k];
#pragma unroll
                    for (int j = 0; j < UNIT; j++) sum[j] = 0;
                }
                if (key[k] >= runs.range || task.c >= runs.C) continue;
                float value[UNIT];
#pragma unroll
                for (int j = 0; j < UNIT; j++) value[j] = row[k][j];
                embedding_drop(value, dropout, token[k], task.c);
#pragma unroll
                for (int j = 0; j < UNIT; j++) sum[j] += value[j];
            }
        }
    }
    embedding_finish<PACKED>(dtable, runs, task, run, before, after, sum);
}

// dtable (range, C) += the sums of the runs that begin in one chunk and end in another, in the order of the chunks. Grid: a warp per chunk and 256
// channels; the chunk in which a run begins does its work. No shared memory; 40 registers. Moves 4*C bytes per chunk that a run divided.
template <bool PACKED> __global__ void __launch_bounds__(EMBEDDING_THREADS) embedding_join_kernel(float *dtable, EmbeddingRuns runs) {
    const EmbeddingTask task = embedding_task(runs);
    if (!task.exists || task.last == runs.N) return; // the whole warp
    const int32_t *keys = runs.sorted.keys, key = keys[task.last - 1];
    const bool begins = key != keys[task.first] || task.first == 0 || keys[task.first - 1] != key;
    if (key >= runs.range || keys[task.last] != key || !begins) return; // the whole warp
    float sum[UNIT] = {0};
    if (task.c < runs.C) embedding_add<PACKED>(sum, runs.tails + task.chunk * runs.C, task.c, runs.C);
    int chunks = 32; // of the run, among the 32 that are looked at
    for (int64_t from = task.chunk + 1; chunks == 32; from += 32) {
        const int64_t first = (from + threadIdx.x % 32) * runs.chunk;
        const unsigned others = ~__ballot_sync(0xffffffffu, first < runs.N && keys[first] == key);
        chunks = others == 0 ? 32 : __ffs((int)others) - 1;
#pragma unroll 4
        for (int k = 0; k < chunks; k++) {
            if (task.c < runs.C) embedding_add<PACKED>(sum, runs.heads + (from + k) * runs.C, task.c, runs.C);
        }
    }
    if (task.c >= runs.C) return;
    embedding_add<PACKED>(sum, dtable + key * runs.C, task.c, runs.C);
    embedding_store<PACKED>(dtable + key * runs.C, sum, task.c, runs.C);
}

// dtable (range, C) += the rows of dout (N, C) whose raw (N) - begin is a row of it
template <class T>
static void embedding_rows_(CudaDevice *device, Buffer dtable, Buffer dout, const int32_t *raw, int64_t begin, int64_t range,
                            const DropoutDraw &dropout, int64_t N, int64_t C) {
    const int64_t chunk = scratch_embedding_chunk(N), chunks = (N + chunk - 1) / chunk, slices = (C + EMBEDDING_SLICE - 1) / EMBEDDING_SLICE;
    const size_t part_bytes = scratch_embedding_part_bytes(N, C);
    char *scratch = (char *)cuda_scratch(device, scratch_embedding_bytes(N, C));
    const Sorted sorted = sort_tokens(device, scratch + 2 * part_bytes, raw, begin, (int32_t)range, N);
    const EmbeddingRuns runs = {sorted, (float *)scratch, (float *)(scratch + part_bytes), N, C, chunk, (int32_t)range};
    const bool packed = units_packed(C, dtable, dout);
    const LaunchShape shape = {(unsigned)((chunks * slices + EMBEDDING_WARPS - 1) / EMBEDDING_WARPS), EMBEDDING_THREADS};
    launch(device, device->compute, shape, packed ? embedding_sum_kernel<T, true> : embedding_sum_kernel<T, false>, (float *)dtable.data, runs,
           (const T *)dout.data, dropout);
    launch(device, device->compute, shape, packed ? embedding_join_kernel<true> : embedding_join_kernel<false>, (float *)dtable.data, runs);
}

// dwte (V, C) F32 += for the ids from vocab_begin on, dwpe (max_positions, C) F32 += for all tokens (optional)
static void cuda_embedding_backward(Device *device, Buffer dwte, Buffer dwpe, Buffer dout, Buffer ids, Buffer positions, const Dropout *dropout,
                                    int64_t N, int64_t C, int64_t vocab_begin, int64_t V, int64_t max_positions) {
    if (N == 0) return;
    const DropoutDraw drop = dropout_draw(dropout);
    const auto rows = dout.dtype == DTYPE_BF16 ? embedding_rows_<bf16> : embedding_rows_<float>;
    rows(cuda_of(device), dwte, dout, (const int32_t *)ids.data, vocab_begin, V, drop, N, C);
    if (dwpe.data != nullptr) rows(cuda_of(device), dwpe, dout, (const int32_t *)positions.data, 0, max_positions, drop, N, C);
}

#endif
