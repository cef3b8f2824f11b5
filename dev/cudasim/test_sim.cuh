// test_sim.cuh: what the tests of the simulated device share: checked calls, launching, buffers. Not a test.
#ifndef CUDASIM_TEST_SIM_CUH
#define CUDASIM_TEST_SIM_CUH

#include "dev/test/test.h"   // check, test_uniform
#include "llmc/cuda/ptx.cuh" // DYN_SHARED, mma_16816_bf16
#include <cstdlib>           // exit
#include <cuda_bf16.h>       // __nv_bfloat16
#include <cuda_runtime.h>    // cudaMalloc
#include <vector>            // std::vector

typedef __nv_bfloat16 bf16;

static inline void need(cudaError_t result, const char *call) {
    if (result == cudaSuccess) return;
    printf("FAILED: %s: %s\n", call, cudaGetErrorString(result));
    exit(1);
}
#define NEED(call) need(call, #call)

template <class... Parameters, class... Arguments>
static cudaError_t start(cudaStream_t stream, dim3 grid, dim3 threads, size_t shared_bytes, void (*kernel)(Parameters...), Arguments... arguments) {
    cudaLaunchConfig_t config = {};
    config.gridDim = grid, config.blockDim = threads, config.dynamicSmemBytes = shared_bytes, config.stream = stream;
    return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// (n) of T in device memory
template <class T> static T *device_new(size_t n) {
    void *p = nullptr;
    NEED(cudaMalloc(&p, n * sizeof(T)));
    return (T *)p;
}
template <class T> static T *to_device(const std::vector<T> &values) {
    T *p = device_new<T>(values.size());
    NEED(cudaMemcpy(p, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    NEED(cudaDeviceSynchronize());
    return p;
}
template <class T> static std::vector<T> to_host(const T *p, size_t n) {
    std::vector<T> values(n);
    NEED(cudaDeviceSynchronize());
    NEED(cudaMemcpy(values.data(), p, n * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
}
template <class T> static T *pinned_new(size_t n) {
    void *p = nullptr;
    NEED(cudaMallocHost(&p, n * sizeof(T)));
    return (T *)p;
}
static inline cudaStream_t stream_open() {
    cudaStream_t stream;
    NEED(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}
static inline cudaEvent_t event_open(unsigned flags = cudaEventDisableTiming) {
    cudaEvent_t event;
    NEED(cudaEventCreateWithFlags(&event, flags));
    return event;
}
static inline bool streams_eager() {
    const char *mode = getenv("SIMCU_STREAMS");
    return mode != nullptr && strcmp(mode, "eager") == 0;
}

// p (n) = value, += value
__global__ void set_kernel(float *p, float value, int n) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) p[i] = value;
}
__global__ void add_kernel(float *p, float value, int n) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) p[i] += value;
}
// to (n) += from (n)
__global__ void join_kernel(float *to, const float *from, int n) {
    const int i = (int)(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) to[i] += from[i];
}

#endif
