// comm_kernels.cuh: the local half of a reduction whose parts were exchanged: sums (or maxima) of the parts of all ranks, in the order of ranks, in
// fp32 for bf16. Bound by memory: (R * bytes of a part + bytes of a result) per element, no reuse; expected at 85-90 % of the roofline, not
// measured on a device yet.
#ifndef LLMC_CUDA_COMM_KERNELS_CUH
#define LLMC_CUDA_COMM_KERNELS_CUH

#include "llmc/comm_types.h"    // CommType, CommReduce
#include "llmc/cuda/launch.cuh" // launch, launch_blocks

enum { COMM_SUM_THREADS = 256 };

// The value in which parts are added.
template <class T> struct CommWide { typedef float type; };
template <> struct CommWide<double> { typedef double type; };

static __device__ __forceinline__ float comm_widen(float x) { return x; }
static __device__ __forceinline__ float comm_widen(bf16 x) { return __bfloat162float(x); }
static __device__ __forceinline__ double comm_widen(double x) { return x; }
template <class To> static __device__ __forceinline__ To comm_narrow(float x) { return from_float<To>(x); }
template <class To> static __device__ __forceinline__ To comm_narrow(double x) { return x; }

// NaN wins over everything.
template <class Wide> static __device__ __forceinline__ void comm_join(Wide &sum, Wide x, bool maximum) {
    if (maximum)
        sum = x > sum || x != x ? x : sum;
    else
        sum += x;
}

// out (n) = reduction over k < R of part k: `own` (n) for k == rank, else others + k*stride (n). Grid: strides over groups of W neighbours, a
// thread each; W = 8: vectors of 16 bytes, where addresses and stride allow it.
template <int W, class In, class Out>
__global__ void __launch_bounds__(COMM_SUM_THREADS)
    comm_sum_kernel(Out *out, const In *own, const In *others, int64_t stride, int R, int rank, int64_t n, bool maximum) {
    typedef typename CommWide<In>::type Wide;
    const int64_t step = (int64_t)gridDim.x * COMM_SUM_THREADS;
    for (int64_t group = blockIdx.x * (int64_t)COMM_SUM_THREADS + threadIdx.x; group * W < n; group += step) {
        const int64_t i = group * W;
        Wide sum[W] = {};
        for (int k = 0; k < R; k++) {
            const In *part = (k == rank ? own : others + k * stride) + i;
            if constexpr (W > 1) {
#pragma unroll
                for (int j = 0; j < W; j += Pack<In>::size) {
                    const Pack<In> pack = *reinterpret_cast<const Pack<In> *>(part + j);
#pragma unroll
                    for (int m = 0; m < Pack<In>::size; m++) {
                        if (k == 0)
                            sum[j + m] = comm_widen(pack.at[m]);
                        else
                            comm_join<Wide>(sum[j + m], comm_widen(pack.at[m]), maximum);
                    }
                }
            } else if (k == 0) {
                sum[0] = comm_widen(*part);
            } else {
                comm_join<Wide>(sum[0], comm_widen(*part), maximum);
            }
        }
        if constexpr (W > 1) {
#pragma unroll
            for (int j = 0; j < W; j += Pack<Out>::size) {
                Pack<Out> pack;
#pragma unroll
                for (int m = 0; m < Pack<Out>::size; m++) pack.at[m] = comm_narrow<Out>(sum[j + m]);
                *reinterpret_cast<Pack<Out> *>(out + i + j) = pack;
            }
        } else {
            out[i] = comm_narrow<Out>(sum[0]);
        }
    }
}

template <class In, class Out>
static void comm_sum_launch_(CudaDevice *device, cudaStream_t stream, void *out, const void *own, const void *others, int64_t stride, int R,
                             int rank, int64_t n, bool maximum) {
    const bool aligned = (((uintptr_t)out | (uintptr_t)own | (uintptr_t)others | (uintptr_t)stride * sizeof(In)) & 15) == 0;
    const int64_t packed = aligned ? n / 8 * 8 : 0; // the rest one by one
    if (packed > 0)
        launch(device, stream, {launch_blocks(device, packed, 8 * COMM_SUM_THREADS, 8), COMM_SUM_THREADS}, comm_sum_kernel<8, In, Out>, (Out *)out,
               (const In *)own, (const In *)others, stride, R, rank, packed, maximum);
    if (packed < n)
        launch(device, stream, {launch_blocks(device, n - packed, COMM_SUM_THREADS, 8), COMM_SUM_THREADS}, comm_sum_kernel<1, In, Out>,
               (Out *)out + packed, (const In *)own + packed, (const In *)others + packed, stride, R, rank, n - packed, maximum);
}

// type: BF16 (out BF16 or F32), F32 or F64 (out alike). out may be own.
static void cuda_comm_sum(CudaDevice *device, cudaStream_t stream, void *out, CommType out_type, const void *own, const void *others,
                          int64_t stride, CommType type, int R, int rank, int64_t n, CommReduce how) {
    const bool maximum = how == COMM_MAX;
    if (type == COMM_F64)
        comm_sum_launch_<double, double>(device, stream, out, own, others, stride, R, rank, n, maximum);
    else if (type == COMM_F32)
        comm_sum_launch_<float, float>(device, stream, out, own, others, stride, R, rank, n, maximum);
    else if (out_type == COMM_F32)
        comm_sum_launch_<bf16, float>(device, stream, out, own, others, stride, R, rank, n, maximum);
    else
        comm_sum_launch_<bf16, bf16>(device, stream, out, own, others, stride, R, rank, n, maximum);
}

#endif
