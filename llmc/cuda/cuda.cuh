// cuda.cuh: what the families of kernels share on the host: checks, the state of the CUDA device, its scratch memory. No kernels, no ops.
//
// Every op is enqueued on the compute stream and returns at once. Copies to and from the host are in memory.cuh.
#ifndef LLMC_CUDA_CUDA_CUH
#define LLMC_CUDA_CUDA_CUH

#include "llmc/comm_device.h" // CommPoll
#include "llmc/device.h"      // Device, Buffer
#include "llmc/precision.h"   // Dtype
#include <cstdint>            // int64_t
#include <cstdio>             // fprintf
#include <cstdlib>            // _Exit
#include <cuda_bf16.h>        // __nv_bfloat16
#include <cuda_runtime.h>     // cudaStream_t, cudaError_t
#include <sched.h>            // sched_yield

typedef __nv_bfloat16 bf16;

// A call into CUDA that fails ends the process: memory of the device may hold anything after it.
[[noreturn]] static inline void cuda_fail(const char *call, const char *what) {
    fprintf(stderr, "train_gpt: CUDA: %s: %s\n", call, what);
    fflush(stderr);
    _Exit(6); // CODE_COMM: a device is lost, as a rank is
}
static inline void cuda_check(cudaError_t result, const char *call) {
    if (result != cudaSuccess) cuda_fail(call, cudaGetErrorString(result));
}

// Device.state of the CUDA device.
struct CudaDevice {
    int ordinal;                    // CUDA's number of the device
    int sm_count;                   // streaming multiprocessors
    cudaStream_t compute;           // every op
    void *scratch;                  // of one op at a time, on the compute stream
    size_t scratch_bytes;           // grows to the most that any op has asked for
    size_t comm_scratch_bytes;      // of groups that reduce in the order of ranks
    cudaEvent_t read[DEVICE_SLOTS]; // of copies to the host
    cudaStream_t snapshot;          // copies for a save
    cudaEvent_t snapshot_order;     // between the two streams: the last op before the copies, then the last copy
    bool snapshot_open;             // copies were enqueued that the compute stream does not wait for yet
    int64_t launches;               // kernels started
    struct CublasLt *matmul;        // llmc/cuda/matmul.cuh
    struct CudaCopies *copies;      // llmc/cuda/memory.cuh
    struct CudaMarks *marks;        // llmc/cuda/marks.cuh; nullptr until the first
    struct CudaGraphs *graphs;      // llmc/cuda/graph.cuh
    bool capturing;                 // what the compute stream is given goes into a graph and does not run
    int64_t captured;               // kernels that went there
    int64_t scratch_moves;          // addresses that scratch has had
    struct CudaComm *comm;          // llmc/cuda/comm.cuh
    CommPoll poll;                  // called while the host waits; nullptr: nothing to do meanwhile
    void *poll_argument;
};

static inline CudaDevice *cuda_of(Device *device) { return (CudaDevice *)device->state; }

// What a graph would freeze, or cannot hold.
static inline void cuda_not_captured(const CudaDevice *device, const char *call) {
    if (device->capturing) cuda_fail(call, "not while ops are captured as a graph");
}

static inline bool cuda_event_done(cudaEvent_t event) {
    const cudaError_t state = cudaEventQuery(event);
    if (state != cudaErrorNotReady) cuda_check(state, "cudaEventQuery");
    return state == cudaSuccess;
}

// The host waits for what was enqueued on a stream, or for an event: the only ways to do it, because what the device waits for may be another
// rank's. Meanwhile communication goes on, and a rank that is lost is seen.
template <class Query> static inline void cuda_poll_(CudaDevice *device, Query query) {
    bool polled = false;
    for (; device->poll != nullptr; polled = true) {
        if (query() != cudaErrorNotReady) break; // an error is told by the caller
        device->poll(device->poll_argument, true);
        sched_yield();
    }
    if (polled) device->poll(device->poll_argument, false);
}
static inline void cuda_wait(CudaDevice *device, cudaStream_t stream) {
    cuda_poll_(device, [=] { return cudaStreamQuery(stream); });
    cuda_check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}
static inline void cuda_wait_event(CudaDevice *device, cudaEvent_t event) {
    cuda_poll_(device, [=] { return cudaEventQuery(event); });
    cuda_check(cudaEventSynchronize(event), "cudaEventSynchronize");
}

// Memory for one op's partial results, 256-byte aligned, valid until the next call. Grows in a run's first step only, on the compute stream:
// cudaFree would wait for all streams, also for messages that come only after this rank has gone on.
static inline void *cuda_scratch(CudaDevice *device, size_t bytes) {
    if (bytes > device->scratch_bytes) {
        cuda_not_captured(device, "scratch memory grows");
        if (device->scratch != nullptr) cuda_check(cudaFreeAsync(device->scratch, device->compute), "cudaFreeAsync");
        cuda_check(cudaMallocAsync(&device->scratch, bytes, device->compute), "cudaMallocAsync (scratch)");
        device->scratch_bytes = bytes;
        device->scratch_moves++;
    }
    return device->scratch;
}

// ----------------------------------------------------------------------------
// Storage types in kernels: arithmetic is always in float.

static __device__ __forceinline__ float to_float(float x) { return x; }
static __device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
template <class T> static __device__ __forceinline__ T from_float(float x);
template <> __device__ __forceinline__ float from_float<float>(float x) { return x; }
template <> __device__ __forceinline__ bf16 from_float<bf16>(float x) { return __float2bfloat16(x); }

// 16 bytes of T, loaded and stored at once; a pointer to it must be 16-byte aligned.
template <class T> struct alignas(16) Pack {
    static constexpr int size = 16 / sizeof(T);
    T at[size];
};

#endif
