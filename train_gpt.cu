// train_gpt.cu: the CUDA device: gathers llmc/cuda/*.cuh into one unit and fills the device table (llmc/device.h) for the trainer, which stays C
// (train_gpt.c). Built by nvcc for GPUs, and by a C++ compiler for the simulated device (dev/cudasim).
#include "llmc/cuda/attention.cuh" // cuda_attention_*
#include "llmc/cuda/cast.cuh"   // cuda_cast, cuda_accumulate
#include "llmc/cuda/cuda.cuh"   // CudaDevice
#include "llmc/cuda/device.h"   // device_cuda
#include "llmc/cuda/memory.cuh" // cuda_alloc, cuda_copy_*
#include "llmc/gpus.h"          // gpus_peak_flops

int device_cuda_count(char *why, size_t why_bytes) {
    int count = 0;
    const cudaError_t result = cudaGetDeviceCount(&count);
    snprintf(why, why_bytes, "%s", result == cudaSuccess ? "CUDA sees none" : cudaGetErrorString(result));
    return result == cudaSuccess ? count : 0;
}

static double cuda_free_bytes(Device *) {
    size_t left = 0, all = 0;
    cuda_check(cudaMemGetInfo(&left, &all), "cudaMemGetInfo");
    return (double)left;
}

static double cuda_peak_flops(Device *device, Dtype dtype) { return gpus_peak_flops(device->model, dtype); }

static int64_t cuda_kernel_launches(Device *device) { return cuda_of(device)->launches; }

static const char *cuda_refuses(Device *, Dtype dtype, AttentionShape shape) {
    if (cuda_attention_supports(dtype, shape)) return nullptr;
    return "in bf16 it computes attention for heads of a multiple of 16 channels, up to 128 (--head-size, --heads, or --precision fp32)";
}

static void cuda_close(Device *device) {
    CudaDevice *c = cuda_of(device);
    cuda_check(cudaStreamSynchronize(c->compute), "cudaStreamSynchronize");
    if (c->scratch != nullptr) cuda_check(cudaFree(c->scratch), "cudaFree");
    for (cudaEvent_t event : c->read) cuda_check(cudaEventDestroy(event), "cudaEventDestroy");
    cuda_check(cudaStreamDestroy(c->compute), "cudaStreamDestroy");
    delete c;
    device->state = nullptr;
}

// Opens device `ordinal` and fills the table.
Device device_cuda(int ordinal) {
    CudaDevice *c = new CudaDevice();
    c->ordinal = ordinal;
    cuda_check(cudaSetDevice(ordinal), "cudaSetDevice");
    cudaDeviceProp properties;
    cuda_check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
    c->sm_count = properties.multiProcessorCount;
    cuda_check(cudaStreamCreateWithFlags(&c->compute, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    for (cudaEvent_t &event : c->read) cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    Device device = {};
    device.name = "cuda";
    snprintf(device.model, sizeof device.model, "%s", properties.name);
    device.state = c;
    device.close = cuda_close;
    device.peak_flops = cuda_peak_flops;
    device.free_bytes = cuda_free_bytes;
    device.kernel_launches = cuda_kernel_launches;
    device.refuses = cuda_refuses;
    device.alloc = cuda_alloc;
    device.release = cuda_release;
    device.copy_in = cuda_copy_in;
    device.copy_out = cuda_copy_out;
    device.zero = cuda_zero;
    device.synchronize = cuda_synchronize;
    device.host_alloc = cuda_host_alloc;
    device.host_release = cuda_host_release;
    device.copy_out_start = cuda_copy_out_start;
    device.copy_out_finish = cuda_copy_out_finish;
    device.cast = cuda_cast;
    device.accumulate = cuda_accumulate;
    device.attention_forward = cuda_attention_forward;
    device.attention_backward = cuda_attention_backward;
    return device;
}
