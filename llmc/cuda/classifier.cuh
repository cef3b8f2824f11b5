// classifier.cuh: softmax + cross-entropy + gradient of the logits on the CUDA device: in one op, and in two with an exchange between them for a
// vocabulary divided over ranks (the exchange is the caller's); and the sum of losses.
//
// A block works on a token. It walks the row twice: once for the largest logit and the sum of exponentials, which each thread keeps against a
// running largest of its own, and once, where a gradient is wanted, for the gradient; the second walk finds the row in the L2 cache. Bytes of HBM
// traffic per logit in bf16: 2 read, 2 written; half of that without a gradient. NaN and infinite logits make the loss of their row NaN or
// infinite, but for -inf, which is a probability of 0.
#ifndef LLMC_CUDA_CLASSIFIER_CUH
#define LLMC_CUDA_CLASSIFIER_CUH

#include "llmc/cuda/block.cuh"  // Unit, unit_load
#include "llmc/cuda/launch.cuh" // launch
#include "llmc/cuda/reduce.cuh" // block_max, block_sum, warp_max, warp_sum

enum {
    CLASSIFIER_THREADS = 512,
    CLASSIFIER_STEP = CLASSIFIER_THREADS * UNIT, // logits that a block takes at once
};

// Of a logit less the largest. Logits in bf16 are known to 3 digits: the fast form, whose error is below 1e-6 where the exponential is above 1e-4,
// is enough.
template <class T> static __device__ __forceinline__ float classifier_exp(float x);
template <> __device__ __forceinline__ float classifier_exp<float>(float x) { return expf(x); }
template <> __device__ __forceinline__ float classifier_exp<bf16>(float x) { return __expf(x); }

// A row (V) of any address as whole packs of 8 columns from `head` on, whose first is 16-byte aligned, and edges of less than 16 bytes on both
// sides. Rows as activations.h lays them out have no head, and logits and dlogits are aligned alike.
struct ClassifierColumns {
    int64_t head, end, V; // packs: head .. end-1
};
template <class T> static __device__ __forceinline__ ClassifierColumns classifier_columns(const T *row, int64_t V) {
    const int64_t head = min((int64_t)((16 - ((uintptr_t)row & 15)) % 16 / sizeof(T)), V);
    return {head, head + (V - head) / UNIT * UNIT, V};
}

// The column of the edges that is this thread's, -1: none. There are fewer than threads.
static __device__ __forceinline__ int64_t classifier_edge(const ClassifierColumns &columns) {
    const int64_t v = threadIdx.x < columns.head ? threadIdx.x : columns.end + threadIdx.x - columns.head;
    return v < columns.V ? v : -1;
}

// Elements from row to row of logits and of dlogits.
struct ClassifierRows {
    int64_t logits, dlogits;
};
static inline ClassifierRows classifier_rows(Buffer logits, Buffer dlogits, int64_t V) { return {buffer_row(logits, V), buffer_row(dlogits, V)}; }

struct ClassifierRow {
    float largest, sum; // logit; of exp(logit - largest), 0 where all logits are -inf
};

// The row with n more logits.
template <class T, int n> static __device__ __forceinline__ void classifier_take(ClassifierRow &r, const float (&x)[n]) {
    float highest = r.largest;
#pragma unroll
    for (int k = 0; k < n; k++) highest = fmaxf(highest, x[k]);
    if (highest > r.largest) { // seldom, once the row has been walked a little
        r.sum *= classifier_exp<T>(r.largest - highest);
        r.largest = highest;
    }
    const float offset = r.largest == -INFINITY ? 0.0f : r.largest; // -inf less -inf would be NaN
#pragma unroll
    for (int k = 0; k < n; k++) r.sum += classifier_exp<T>(x[k] - offset);
}

// Of a row (V), for every thread of the block, which calls it together. shared32: as in reduce.cuh.
template <class T> static __device__ __forceinline__ ClassifierRow classifier_row(const T *row, int64_t V, float *shared32) {
    const ClassifierColumns columns = classifier_columns(row, V);
    ClassifierRow r = {-INFINITY, 0};
#pragma unroll 2
    for (int64_t v = columns.head + (int64_t)threadIdx.x * UNIT; v < columns.end; v += CLASSIFIER_STEP) {
        const Unit<T> unit = unit_load(row + v, 0, UNIT, true);
        float x[UNIT];
#pragma unroll
        for (int k = 0; k < UNIT; k++) x[k] = unit[k];
        classifier_take<T>(r, x);
    }
    const int64_t edge = classifier_edge(columns);
    if (edge >= 0) {
        const float x[1] = {to_float(row[edge])};
        classifier_take<T>(r, x);
    }
    const float all = block_max(r.largest, shared32);
    const float share =
        r.largest == -INFINITY ? r.sum : r.sum * classifier_exp<T>(r.largest - all); // of nothing but -inf it is 0, with a NaN it is NaN
    return {all, block_sum(share, shared32)};
}

// dlogits (V) = exp(logit - largest) * scale, less dloss at the target, a column of this row or of another rank's. May be in place: a thread writes
// where it alone reads, and all have passed a barrier since others read there.
template <class T, class D>
static __device__ __forceinline__ void classifier_gradient(D *dlogits, const T *row, int64_t V, float largest, float scale, int64_t target,
                                                           float dloss) {
    const ClassifierColumns columns = classifier_columns(row, V);
    const bool aligned = ((uintptr_t)(dlogits + columns.head) & 15) == 0; // not always where logits are: another dtype
#pragma unroll 2
    for (int64_t v = columns.head + (int64_t)threadIdx.x * UNIT; v < columns.end; v += CLASSIFIER_STEP) {
        const Unit<T> x = unit_load(row + v, 0, UNIT, true);
        float out[UNIT];
#pragma unroll
        for (int k = 0; k < UNIT; k++) out[k] = classifier_exp<T>(x[k] - largest) * scale - (v + k == target ? dloss : 0.0f);
        unit_store(dlogits + v, 0, UNIT, aligned, Unit<D>::of(out));
    }
    const int64_t edge = classifier_edge(columns);
    if (edge >= 0) dlogits[edge] = from_float<D>(classifier_exp<T>(to_float(row[edge]) - largest) * scale - (edge == target ? dloss : 0.0f));
}

// Loss and gradient of a token without a target.
template <class D> static __device__ __forceinline__ void classifier_masked(float *loss, D *dlogits, int64_t V) {
    if (threadIdx.x == 0) *loss = 0.0f;
    if (dlogits == nullptr) return;
    const ClassifierColumns columns = classifier_columns(dlogits, V);
    const Unit<D> zeros = {};
    for (int64_t v = columns.head + (int64_t)threadIdx.x * UNIT; v < columns.end; v += CLASSIFIER_STEP) {
        unit_store(dlogits + v, 0, UNIT, true, zeros);
    }
    const int64_t edge = classifier_edge(columns);
    if (edge >= 0) dlogits[edge] = from_float<D>(0.0f);
}

// losses (N) =; dlogits (N, V), or nullptr. Grid: a block per token. Shared: 128 bytes; 40 registers. Expected share of HBM bandwidth 80%; not
// measured on a device yet.
template <class T, class D>
__global__ void __launch_bounds__(CLASSIFIER_THREADS, 3)
    cross_entropy_kernel(float *losses, D *dlogits, const T *logits, ClassifierRows rows, const int32_t *targets, const double *dloss, int64_t V) {
    __shared__ float shared32[32];
    const int64_t n = blockIdx.x, target = targets[n];
    const T *row = logits + n * rows.logits;
    D *drow = dlogits != nullptr ? dlogits + n * rows.dlogits : nullptr;
    if (target < 0) { // the whole block
        classifier_masked(losses + n, drow, V);
        return;
    }
    const float target_logit = threadIdx.x == 0 ? to_float(row[target]) : 0.0f; // before the gradient takes its place
    const ClassifierRow r = classifier_row(row, V, shared32);
    if (threadIdx.x == 0) losses[n] = (float)(log((double)r.sum) + ((double)r.largest - (double)target_logit));
    if (drow == nullptr) return; // the whole block
    const float scale = (float)*dloss;
    classifier_gradient<T, D>(drow, row, V, r.largest, scale / r.sum, target, scale);
}

// ----------------------------------------------------------------------------
// The vocabulary divided over ranks: a rank holds the columns vocab_begin .. vocab_begin+V-1 of the logits.

struct ClassifierStats {
    float largest, sum, target; // logit; of exp(logit - largest); logit of the target, 0 when it is another rank's
};
static_assert(sizeof(ClassifierStats) == 3 * sizeof(float), "stats are (N, 3)");

// stats (N) =. Grid: a block per token. Shared: 128 bytes; 40 registers. Bytes per logit in bf16: 2 read. Expected share of HBM bandwidth 85%; not
// measured on a device yet.
template <class T>
__global__ void __launch_bounds__(CLASSIFIER_THREADS, 3) cross_entropy_local_kernel(ClassifierStats *stats, const T *logits, int64_t logits_row,
                                                                                    const int32_t *targets, int64_t vocab_begin, int64_t V) {
    __shared__ float shared32[32];
    const int64_t n = blockIdx.x, target = targets[n], column = target - vocab_begin;
    const T *row = logits + n * logits_row;
    if (target < 0) { // the whole block
        if (threadIdx.x == 0) stats[n] = {0, 0, 0};
        return;
    }
    const ClassifierRow r = classifier_row(row, V, shared32);
    if (threadIdx.x == 0) stats[n] = {r.largest, r.sum, column >= 0 && column < V ? to_float(row[column]) : 0.0f};
}

// What the ranks know together of a token.
struct ClassifierMerge {
    float largest, target;
    double sum;
};

// From all (R, N), for every lane of the warp, which calls it together; the same bits on every rank: the same values are added in the same order.
static __device__ __forceinline__ ClassifierMerge classifier_merge(const ClassifierStats *all, int64_t R, int64_t N, int64_t n) {
    const int lane = (int)threadIdx.x % 32;
    float largest = -INFINITY;
    double sum = 0, target = 0; // one rank's logit, and zeros
    for (int64_t r = lane; r < R; r += 32) largest = fmaxf(largest, all[r * N + n].largest);
    largest = warp_max(largest);
    for (int64_t r = lane; r < R; r += 32) {
        const ClassifierStats s = all[r * N + n];
        sum += s.largest == -INFINITY ? (double)s.sum : (double)s.sum * exp((double)s.largest - (double)largest);
        target += (double)s.target;
    }
    return {largest, (float)warp_sum(target), warp_sum(sum)};
}

// losses (N) =; dlogits (N, V), or nullptr. Grid: a block per token. Shared: 8 bytes; 40 registers. Bytes per logit in bf16: 2 read, 2 written;
// nothing is read without a gradient. Expected share of HBM bandwidth 85%; not measured on a device yet.
template <class T, class D>
__global__ void __launch_bounds__(CLASSIFIER_THREADS, 3)
    cross_entropy_merge_kernel(float *losses, D *dlogits, const T *logits, ClassifierRows rows, const ClassifierStats *all, int64_t R,
                               const int32_t *targets, const double *dloss, int64_t vocab_begin, int64_t N, int64_t V) {
    __shared__ float shared_largest, shared_scale;
    const int64_t n = blockIdx.x, target = targets[n];
    D *drow = dlogits != nullptr ? dlogits + n * rows.dlogits : nullptr;
    if (target < 0) { // the whole block
        classifier_masked(losses + n, drow, V);
        return;
    }
    if (threadIdx.x < 32) {
        const ClassifierMerge m = classifier_merge(all, R, N, n);
        if (threadIdx.x == 0) {
            losses[n] = (float)(log(m.sum) + ((double)m.largest - (double)m.target));
            shared_largest = m.largest;
            if (drow != nullptr) shared_scale = (float)(*dloss / m.sum);
        }
    }
    __syncthreads();
    if (drow != nullptr)
        classifier_gradient<T, D>(drow, logits + n * rows.logits, V, shared_largest, shared_scale, target - vocab_begin, (float)*dloss);
}

// ----------------------------------------------------------------------------
// Host

template <class T, class D>
static void cross_entropy_(CudaDevice *device, Buffer losses, Buffer dlogits, Buffer logits, Buffer targets, const double *dloss, int64_t N,
                           int64_t V) {
    launch(device, device->compute, {(unsigned)N, CLASSIFIER_THREADS}, cross_entropy_kernel<T, D>, (float *)losses.data, (D *)dlogits.data,
           (const T *)logits.data, classifier_rows(logits, dlogits, V), (const int32_t *)targets.data, dloss, V);
}

// losses (N) F32 = -log softmax(logits)[target], 0 where target < 0; dlogits (N, V), optional: = (softmax - onehot) * *dloss, 0 where target < 0.
// logits and dlogits F32 or BF16, N < 2^31. dlogits may be logits itself when the dtypes agree.
static void cuda_cross_entropy(Device *device, Buffer losses, Buffer dlogits, Buffer logits, Buffer targets, const double *dloss, int64_t N,
                               int64_t V) {
    const bool narrow = dlogits.data != nullptr && dlogits.dtype == DTYPE_BF16;
    const auto run = logits.dtype == DTYPE_BF16 ? (narrow ? cross_entropy_<bf16, bf16> : cross_entropy_<bf16, float>)
                                                : (narrow ? cross_entropy_<float, bf16> : cross_entropy_<float, float>);
    run(cuda_of(device), losses, dlogits, logits, targets, dloss, N, V);
}

template <class T>
static void cross_entropy_local_(CudaDevice *device, Buffer stats, Buffer logits, Buffer targets, int64_t vocab_begin, int64_t N, int64_t V) {
    launch(device, device->compute, {(unsigned)N, CLASSIFIER_THREADS}, cross_entropy_local_kernel<T>, (ClassifierStats *)stats.data,
           (const T *)logits.data, buffer_row(logits, V), (const int32_t *)targets.data, vocab_begin, V);
}

// stats (N, 3) F32 =, of this rank's columns; 0 where target < 0
static void cuda_cross_entropy_local(Device *device, Buffer stats, Buffer logits, Buffer targets, int64_t vocab_begin, int64_t N, int64_t V) {
    const auto run = logits.dtype == DTYPE_BF16 ? cross_entropy_local_<bf16> : cross_entropy_local_<float>;
    run(cuda_of(device), stats, logits, targets, vocab_begin, N, V);
}

template <class T, class D>
static void cross_entropy_merge_(CudaDevice *device, Buffer losses, Buffer dlogits, Buffer logits, Buffer all, int64_t R, Buffer targets,
                                 const double *dloss, int64_t vocab_begin, int64_t N, int64_t V) {
    launch(device, device->compute, {(unsigned)N, CLASSIFIER_THREADS}, cross_entropy_merge_kernel<T, D>, (float *)losses.data, (D *)dlogits.data,
           (const T *)logits.data, classifier_rows(logits, dlogits, V), (const ClassifierStats *)all.data, R, (const int32_t *)targets.data, dloss,
           vocab_begin, N, V);
}

// losses (N) F32 and dlogits (N, V, optional) as cuda_cross_entropy's, from all (R, N, 3): the stats of the ranks
static void cuda_cross_entropy_merge(Device *device, Buffer losses, Buffer dlogits, Buffer logits, Buffer all, int64_t R, Buffer targets,
                                     const double *dloss, int64_t vocab_begin, int64_t N, int64_t V) {
    const bool narrow = dlogits.data != nullptr && dlogits.dtype == DTYPE_BF16;
    const auto run = logits.dtype == DTYPE_BF16 ? (narrow ? cross_entropy_merge_<bf16, bf16> : cross_entropy_merge_<bf16, float>)
                                                : (narrow ? cross_entropy_merge_<float, bf16> : cross_entropy_merge_<float, float>);
    run(cuda_of(device), losses, dlogits, logits, all, R, targets, dloss, vocab_begin, N, V);
}

// ----------------------------------------------------------------------------
// The sum of losses

enum { LOSS_SUM_THREADS = 1024 };

// state->loss_sum += *scale (nullptr: 1) * sum of losses (N): a thread adds every 1024th, then the threads are added in a fixed order. Grid: one
// block; N is the tokens of a micro-batch, a few microseconds. Shared: 256 bytes.
__global__ void __launch_bounds__(LOSS_SUM_THREADS) loss_sum_kernel(StepState *state, const float *losses, const double *scale, int64_t N) {
    __shared__ double shared32[32];
    double sum = 0;
#pragma unroll 4
    for (int64_t n = threadIdx.x; n < N; n += LOSS_SUM_THREADS) sum += (double)losses[n];
    sum = block_sum(sum, shared32);
    if (threadIdx.x == 0) state->loss_sum += (scale != nullptr ? *scale : 1.0) * sum;
}

static void cuda_loss_sum(Device *device, StepState *state, Buffer losses, const double *scale, int64_t N) {
    CudaDevice *c = cuda_of(device);
    launch(c, c->compute, {1, LOSS_SUM_THREADS}, loss_sum_kernel, state, (const float *)losses.data, scale, N);
}

#endif
