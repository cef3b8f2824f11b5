// memory.cuh: memory of the CUDA device and copies to and from the host. Copies are ordered with the ops of the compute stream.
#ifndef LLMC_CUDA_MEMORY_CUH
#define LLMC_CUDA_MEMORY_CUH

#include "llmc/cuda/cuda.cuh" // cuda_of, cuda_check
#include <cstring>            // memset

static void *cuda_alloc(Device *device, size_t bytes) {
    void *pointer = nullptr;
    if (bytes == 0) bytes = 1;
    const cudaError_t result = cudaMalloc(&pointer, bytes);
    if (result != cudaSuccess) {
        size_t left = 0, all = 0;
        (void)cudaGetLastError();
        (void)cudaMemGetInfo(&left, &all);
        fprintf(stderr, "train_gpt: out of device memory: wanted %zu bytes, %zu of %zu are free\n", bytes, left, all);
        fflush(stderr);
        _Exit(2); // CODE_USAGE
    }
    cuda_check(cudaMemsetAsync(pointer, 0, bytes, cuda_of(device)->compute), "cudaMemsetAsync");
    return pointer;
}

static void cuda_release(Device *device, void *pointer) {
    cuda_check(cudaStreamSynchronize(cuda_of(device)->compute), "cudaStreamSynchronize");
    cuda_check(cudaFree(pointer), "cudaFree");
}

static void cuda_copy_in(Device *device, void *to_device, const void *from_host, size_t bytes) {
    if (bytes == 0) return;
    cuda_check(cudaMemcpyAsync(to_device, from_host, bytes, cudaMemcpyHostToDevice, cuda_of(device)->compute), "cudaMemcpyAsync");
    cuda_check(cudaStreamSynchronize(cuda_of(device)->compute), "cudaStreamSynchronize"); // the host may change it now
}

static void cuda_copy_out(Device *device, void *to_host, const void *from_device, size_t bytes) {
    if (bytes == 0) return;
    cuda_check(cudaMemcpyAsync(to_host, from_device, bytes, cudaMemcpyDeviceToHost, cuda_of(device)->compute), "cudaMemcpyAsync");
    cuda_check(cudaStreamSynchronize(cuda_of(device)->compute), "cudaStreamSynchronize");
}

static void cuda_zero(Device *device, void *pointer, size_t bytes) {
    if (bytes > 0) cuda_check(cudaMemsetAsync(pointer, 0, bytes, cuda_of(device)->compute), "cudaMemsetAsync");
}

static void *cuda_host_alloc(Device *, size_t bytes) {
    void *pointer = nullptr;
    cuda_check(cudaMallocHost(&pointer, bytes == 0 ? 1 : bytes), "cudaMallocHost");
    memset(pointer, 0, bytes);
    return pointer;
}

static void cuda_host_release(Device *, void *pointer) { cuda_check(cudaFreeHost(pointer), "cudaFreeHost"); }

static void cuda_copy_out_start(Device *device, int slot, void *to, const void *from_device, size_t bytes) {
    CudaDevice *c = cuda_of(device);
    cuda_check(cudaMemcpyAsync(to, from_device, bytes, cudaMemcpyDeviceToHost, c->compute), "cudaMemcpyAsync");
    cuda_check(cudaEventRecord(c->read[slot], c->compute), "cudaEventRecord");
}

static void cuda_copy_out_finish(Device *device, int slot) { cuda_check(cudaEventSynchronize(cuda_of(device)->read[slot]), "cudaEventSynchronize"); }

static void cuda_synchronize(Device *device) { cuda_check(cudaStreamSynchronize(cuda_of(device)->compute), "cudaStreamSynchronize"); }

#endif
