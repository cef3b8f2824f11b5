// global_norm.h: the sum of squares of the gradient on the CPU. In double: the square of a small gradient does not
// vanish, that of a large one does not overflow, and the order of summation is the same for every number of threads.
#ifndef LLMC_CPU_GLOBAL_NORM_H
#define LLMC_CPU_GLOBAL_NORM_H

#include "llmc/cpu/segments.h" // cpu_segments_walk

enum {
    CPU_NORM_CHUNKS = 1024, // partial sums, whatever the size and the number of threads
    CPU_NORM_LANES_ = 32,   // partial sums of a run
};

static inline double cpu_grad_squares_run_(const float *grad, int64_t count) {
    double lane[CPU_NORM_LANES_] = {0};
    const int64_t whole = count / CPU_NORM_LANES_ * CPU_NORM_LANES_;
    for (int64_t i = 0; i < whole; i += CPU_NORM_LANES_) {
#pragma omp simd
        for (int k = 0; k < CPU_NORM_LANES_; k++) lane[k] += (double)grad[i + k] * (double)grad[i + k];
    }
    for (int64_t i = whole; i < count; i++) lane[i - whole] += (double)grad[i] * (double)grad[i];
    double sum = 0;
    for (int k = 0; k < CPU_NORM_LANES_; k++) sum += lane[k];
    return sum;
}

// state->grad_squares += sum of squares of the segments
static inline void cpu_grad_squares(Device *device, StepState *state, Buffer grad, const Segment *segments, int64_t count) {
    (void)device;
    const int64_t total = cpu_segments_total(segments, count);
    double partial[CPU_NORM_CHUNKS];
#pragma omp parallel for schedule(static)
    for (int64_t chunk = 0; chunk < CPU_NORM_CHUNKS; chunk++) {
        // total * chunk / chunks without overflow
        const int64_t each = total / CPU_NORM_CHUNKS, rest = total % CPU_NORM_CHUNKS;
        const int64_t from = each * chunk + rest * chunk / CPU_NORM_CHUNKS, to = each * (chunk + 1) + rest * (chunk + 1) / CPU_NORM_CHUNKS;
        CpuSegmentWalk walk = cpu_segments_walk(segments, from, to);
        Segment run;
        double sum = 0;
        while (cpu_segments_next(&walk, INT64_MAX, &run)) sum += cpu_grad_squares_run_((const float *)grad.data + run.begin, run.count);
        partial[chunk] = sum;
    }
    double sum = 0;
    for (int chunk = 0; chunk < CPU_NORM_CHUNKS; chunk++) sum += partial[chunk];
    state->grad_squares += sum;
}

#endif
