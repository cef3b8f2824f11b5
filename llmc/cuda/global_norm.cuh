// global_norm.cuh: the sum of squares of the gradient on the CUDA device. In double: the square of a small gradient does not vanish, that of a
// large one does not overflow. The order of summation depends on the segments alone: the same bits on every device. The sum stays in device memory.
#ifndef LLMC_CUDA_GLOBAL_NORM_CUH
#define LLMC_CUDA_GLOBAL_NORM_CUH

#include "llmc/cuda/block.cuh"    // Unit, unit_load
#include "llmc/cuda/launch.cuh"   // launch
#include "llmc/cuda/reduce.cuh"   // block_sum
#include "llmc/cuda/scratch.h"    // NORM_PARTS, scratch_squares_bytes
#include "llmc/cuda/segments.cuh" // segment_walk

// parts (NORM_PARTS) = sums of squares of every NORM_PARTS-th tile of grad. Grid: NORM_PARTS blocks; tiles of 2048 elements. Shared: 256 bytes; 32
// registers. Bytes per element: 4 read. Expected share of HBM bandwidth 88%; not measured on a device yet.
__global__ void __launch_bounds__(SEGMENT_THREADS)
    grad_squares_kernel(double *parts, const float *grad, bool aligned, const Segment *segments, int64_t count) {
    __shared__ double shared32[32];
    if (segment_idle(segments, count)) { // the whole block
        if (threadIdx.x == 0) parts[blockIdx.x] = 0;
        return;
    }
    double sum = 0;
    for (SegmentWalk walk = segment_walk(segments, count); segment_find(walk); walk.tile += NORM_PARTS) {
        const int64_t first = walk.first + (int64_t)threadIdx.x * UNIT;
        if (aligned && first >= walk.begin && first + UNIT <= walk.stop) {
            const Unit<float> g = unit_load(grad + first, 0, UNIT, true);
#pragma unroll
            for (int k = 0; k < UNIT; k++) sum += (double)g[k] * (double)g[k];
        } else {
            for (int64_t i = max(first, walk.begin); i < min(first + UNIT, walk.stop); i++) sum += (double)grad[i] * (double)grad[i];
        }
    }
    sum = block_sum(sum, shared32);
    if (threadIdx.x == 0) parts[blockIdx.x] = sum;
}

// state->grad_squares += the sum of parts (NORM_PARTS). Grid: one block.
__global__ void __launch_bounds__(NORM_PARTS) grad_squares_join_kernel(StepState *state, const double *parts) {
    __shared__ double shared32[32];
    const double sum = block_sum(parts[threadIdx.x], shared32);
    if (threadIdx.x == 0) state->grad_squares += sum;
}

// state->grad_squares += sum of squares of the segments
static void cuda_grad_squares(Device *device, StepState *state, Buffer grad, const Segment *segments, int64_t count) {
    if (count == 0) return;
    CudaDevice *c = cuda_of(device);
    double *parts = (double *)cuda_scratch(c, scratch_squares_bytes());
    launch(c, c->compute, {NORM_PARTS, SEGMENT_THREADS}, grad_squares_kernel, parts, (const float *)grad.data, ((uintptr_t)grad.data & 15) == 0,
           segments, count);
    launch(c, c->compute, {1, NORM_PARTS}, grad_squares_join_kernel, state, (const double *)parts);
}

#endif
