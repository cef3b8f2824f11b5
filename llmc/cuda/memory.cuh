// memory.cuh: memory of the CUDA device and copies to and from the host. Copies are ordered with the ops of the compute stream.
#ifndef LLMC_CUDA_MEMORY_CUH
#define LLMC_CUDA_MEMORY_CUH

#include "llmc/cuda/cuda.cuh" // cuda_of, cuda_check

[[noreturn]] static void cuda_out_of_memory(size_t bytes) {
    size_t left = 0, all = 0;
    (void)cudaGetLastError();
    (void)cudaMemGetInfo(&left, &all);
    fprintf(stderr, "train_gpt: out of device memory: wanted %zu bytes, %zu of %zu are free\n", bytes, left, all);
    fflush(stderr);
    _Exit(2); // CODE_USAGE
}

static void *cuda_alloc(Device *device, size_t bytes) {
    void *pointer = nullptr;
    if (bytes == 0) bytes = 1;
    if (cudaMalloc(&pointer, bytes) != cudaSuccess) cuda_out_of_memory(bytes);
    cuda_check(cudaMemsetAsync(pointer, 0, bytes, cuda_of(device)->compute), "cudaMemsetAsync");
    return pointer;
}

static void cuda_release(Device *device, void *pointer) {
    cuda_wait(cuda_of(device), cuda_of(device)->compute);
    cuda_check(cudaFree(pointer), "cudaFree");
}

// Copies of pageable memory. They start on an idle stream: CUDA itself would let the host wait for the stream without polling.
static void cuda_copy_(CudaDevice *device, void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    if (bytes == 0) return;
    cuda_wait(device, device->compute);
    cuda_check(cudaMemcpyAsync(to, from, bytes, kind, device->compute), "cudaMemcpyAsync");
    cuda_wait(device, device->compute); // the host may use its memory now
}

static void cuda_copy_in(Device *device, void *to_device, const void *from_host, size_t bytes) {
    cuda_copy_(cuda_of(device), to_device, from_host, bytes, cudaMemcpyHostToDevice);
}

static void cuda_copy_out(Device *device, void *to_host, const void *from_device, size_t bytes) {
    cuda_copy_(cuda_of(device), to_host, from_device, bytes, cudaMemcpyDeviceToHost);
}

static void cuda_zero(Device *device, void *pointer, size_t bytes) {
    if (bytes > 0) cuda_check(cudaMemsetAsync(pointer, 0, bytes, cuda_of(device)->compute), "cudaMemsetAsync");
}

static void cuda_synchronize(Device *device) { cuda_wait(cuda_of(device), cuda_of(device)->compute); }

#endif
