// adamw.cuh: the decision whether a step counts, and AdamW with clipping and the cast to bf16 in one walk, on the CUDA device. What an update
// depends on (lr, clip coefficient, skip, number of updates) is read from the step's state in device memory: the host waits for nothing. The walk
// is bound by memory: 28 bytes per parameter in fp32, 30 with bf16 parameters and fp32 masters, 24 without masters.
#ifndef LLMC_CUDA_ADAMW_CUH
#define LLMC_CUDA_ADAMW_CUH

#include "llmc/cuda/block.cuh"    // Unit, unit_load
#include "llmc/cuda/launch.cuh"   // launch
#include "llmc/cuda/segments.cuh" // segment_walk
#include "llmc/rng.h"             // rng_round_bits, rng_round_bf16
#include <math.h>                 // isfinite, log, expm1

enum { ADAMW_BLOCKS = 3 }; // on a multiprocessor

// Grid: one thread; a few microseconds.
__global__ void __launch_bounds__(32) step_decide_kernel(StepState *state, double clip) {
    if (threadIdx.x > 0) return;
    const double norm = sqrt(state->grad_squares), coefficient = clip / (norm + 1e-6);
    const bool skip = !isfinite(state->loss_sum) || !isfinite(norm);
    state->grad_norm = norm;
    state->skip = skip;
    state->clip_coefficient = clip > 0 && coefficient < 1.0 ? coefficient : 1.0;
    if (!skip) state->optimizer_steps++;
}

// From loss_sum and grad_squares: grad_norm, clip_coefficient (clip 0 = off), skip; advances optimizer_steps unless skipped.
static void cuda_step_decide(Device *device, StepState *state, double clip) {
    CudaDevice *c = cuda_of(device);
    launch(c, c->compute, {1, 32}, step_decide_kernel, state, clip);
}

// AdamW's constants, as kernels take them.
struct AdamWConfig {
    float beta1, beta2, one_minus_beta1, one_minus_beta2, eps;
    double log_beta1, log_beta2, weight_decay;
    Rounding rounding;
};

// The factors of one update that depend on the step: p -= lr*wd*p; m, v moments of clip*g; p -= lr * (m/bc1) / (sqrt(v/bc2) + eps).
struct AdamWFactors {
    float clip;
    float decay;     // lr * weight_decay
    float step_size; // lr / bc1
    float root;      // 1 / sqrt(bc2)
};

// In double: 1 - beta^steps of a step late in a run would otherwise round to the wrong float.
static __device__ __forceinline__ AdamWFactors adamw_factors(const StepState *state, const AdamWConfig &config) {
    const double steps = (double)state->optimizer_steps, lr = state->lr;
    return {(float)state->clip_coefficient, (float)(lr * config.weight_decay), (float)(lr / -expm1(steps * config.log_beta1)),
            (float)(1.0 / sqrt(-expm1(steps * config.log_beta2)))};
}

static __device__ __forceinline__ void adamw_update(float &w, float &m, float &v, float g, float decay, const AdamWFactors &f,
                                                    const AdamWConfig &config) {
    const float gradient = f.clip * g;
    m = config.beta1 * m + config.one_minus_beta1 * gradient;
    v = config.beta2 * v + config.one_minus_beta2 * gradient * gradient;
    w -= decay * w + f.step_size * m / (sqrtf(v) * f.root + config.eps); // 1 - decay would round most of decay away
}

// How the new parameters are stored.
enum AdamWForm { ADAMW_F32, ADAMW_MASTER, ADAMW_RANDOM }; // as they are; rounded, beside an fp32 master; rounded at random, there is no master

static __device__ __forceinline__ bf16 adamw_round(float value, uint16_t random) {
    return __ushort_as_bfloat16(rng_round_bf16(__float_as_uint(value), random));
}

// Eight neighbours, 16-byte aligned in all buffers; place: in the unit, a multiple of eight.
template <AdamWForm FORM, class T>
static __device__ __forceinline__ void adamw_update_unit(T *param, float *master, float *m, float *v, const float *grad, int64_t place, float decay,
                                                         const AdamWFactors &factors, const AdamWConfig &config) {
    const Unit<float> mean = unit_load(m, 0, UNIT, true), square = unit_load(v, 0, UNIT, true), g = unit_load(grad, 0, UNIT, true);
    float new_weight[UNIT], new_mean[UNIT], new_square[UNIT];
    if (FORM == ADAMW_RANDOM) {
        const Unit<T> weight = unit_load(param, 0, UNIT, true);
#pragma unroll
        for (int k = 0; k < UNIT; k++) new_weight[k] = weight[k];
    } else {
        const Unit<float> weight = unit_load(master, 0, UNIT, true);
#pragma unroll
        for (int k = 0; k < UNIT; k++) new_weight[k] = weight[k];
    }
#pragma unroll
    for (int k = 0; k < UNIT; k++) {
        new_mean[k] = mean[k], new_square[k] = square[k];
        adamw_update(new_weight[k], new_mean[k], new_square[k], g[k], decay, factors, config);
    }
    unit_store(m, 0, UNIT, true, Unit<float>::of(new_mean));
    unit_store(v, 0, UNIT, true, Unit<float>::of(new_square));
    if (FORM != ADAMW_RANDOM) unit_store(master, 0, UNIT, true, Unit<float>::of(new_weight));
    if (FORM == ADAMW_MASTER) unit_store(param, 0, UNIT, true, Unit<T>::of(new_weight));
    if (FORM == ADAMW_RANDOM) {
        uint16_t random[UNIT];
        rng_round_bits(config.rounding.key, config.rounding.unit, (uint64_t)place / UNIT, random);
#pragma unroll
        for (int k = 0; k < UNIT; k++) new_weight[k] = to_float(adamw_round(new_weight[k], random[k]));
        unit_store(param, 0, UNIT, true, Unit<T>::of(new_weight)); // exact
    }
}

// One element, by itself.
template <AdamWForm FORM, class T>
static __device__ __forceinline__ void adamw_update_one(T &param, float *master, float &m, float &v, float grad, int64_t place, float decay,
                                                        const AdamWFactors &factors, const AdamWConfig &config) {
    float weight = FORM == ADAMW_RANDOM ? to_float(param) : *master;
    adamw_update(weight, m, v, grad, decay, factors, config);
    if (FORM != ADAMW_RANDOM) *master = weight;
    if (FORM == ADAMW_MASTER) param = from_float<T>(weight);
    if (FORM == ADAMW_RANDOM) {
        uint16_t random[UNIT];
        rng_round_bits(config.rounding.key, config.rounding.unit, (uint64_t)place / UNIT, random);
        param = from_float<T>(to_float(adamw_round(weight, random[place % UNIT]))); // exact
    }
}

// param (flat), master, m, v (flat) from grad (flat), all indexed by the segments; with T float, master is param itself; with ADAMW_RANDOM there is
// none. Grid: strides over tiles
// of 2048 elements of the segments. Shared: 16 bytes; 62 registers. Bytes per parameter: 16 read, 12 written, and 2 written in bf16. Expected share
// of HBM bandwidth 88%; not measured on a device yet.
template <AdamWForm FORM, class T>
__global__ void __launch_bounds__(SEGMENT_THREADS, ADAMW_BLOCKS)
    adamw_kernel(T *param, float *master, float *m, float *v, const float *grad, bool aligned, const StepState *state, const Segment *segments,
                 int64_t count, AdamWConfig config) {
    __shared__ AdamWFactors shared;
    if (state->skip) return;                   // the whole grid
    if (segment_idle(segments, count)) return; // the whole block
    if (threadIdx.x == 0) shared = adamw_factors(state, config);
    __syncthreads();
    const AdamWFactors factors = shared;
    for (SegmentWalk walk = segment_walk(segments, count); segment_find(walk); walk.tile += gridDim.x) {
        const int64_t first = walk.first + (int64_t)threadIdx.x * UNIT;
        const float decay = walk.decay ? factors.decay : 0.0f;
        if (aligned && first >= walk.begin && first + UNIT <= walk.stop) {
            float *const at = FORM == ADAMW_RANDOM ? nullptr : master + first;
            adamw_update_unit<FORM>(param + first, at, m + first, v + first, grad + first, config.rounding.first + first, decay, factors, config);
        } else {
            for (int64_t i = max(first, walk.begin); i < min(first + UNIT, walk.stop); i++) {
                float *const at = FORM == ADAMW_RANDOM ? nullptr : master + i;
                adamw_update_one<FORM>(param[i], at, m[i], v[i], grad[i], config.rounding.first + i, decay, factors, config);
            }
        }
    }
}

template <AdamWForm FORM, class T>
static void adamw_(CudaDevice *device, const StepState *state, Buffer param, Buffer master, Buffer m, Buffer v, Buffer grad,
                   const Segment *segments, int64_t count, const AdamWConfig &config) {
    const uintptr_t addresses = (uintptr_t)param.data | (uintptr_t)master.data | (uintptr_t)m.data | (uintptr_t)v.data | (uintptr_t)grad.data;
    launch(device, device->compute, {(unsigned)device->sm_count * ADAMW_BLOCKS, SEGMENT_THREADS}, adamw_kernel<FORM, T>, (T *)param.data,
           (float *)master.data, (float *)m.data, (float *)v.data, (const float *)grad.data, (addresses & 15) == 0, state, segments, count, config);
}

// AdamW (Loshchilov & Hutter 2019) on the elements of the segments; nothing when state->skip. param F32, BF16 with an F32 master, or BF16 that is
// rounded at random; m, v, grad F32.
static void cuda_adamw(Device *device, const StepState *state, Buffer param, Buffer master, Buffer m, Buffer v, Buffer grad,
                       const Segment *segments, int64_t count, AdamW config) {
    if (count == 0) return;
    const AdamWConfig c = {(float)config.beta1,         (float)config.beta2, (float)(1.0 - config.beta1),
                           (float)(1.0 - config.beta2), (float)config.eps,   log(config.beta1),
                           log(config.beta2),           config.weight_decay, config.rounding};
    const auto run = param.dtype == DTYPE_F32 ? adamw_<ADAMW_F32, float>
                     : master.data != nullptr ? adamw_<ADAMW_MASTER, bf16>
                                              : adamw_<ADAMW_RANDOM, bf16>;
    run(cuda_of(device), state, param, param.dtype == DTYPE_F32 ? param : master, m, v, grad, segments, count, c);
}

#endif
