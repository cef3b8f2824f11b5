// train_gpt.cu: the CUDA device: gathers llmc/cuda/*.cuh into one unit and fills the device table (llmc/device.h) for the trainer, which stays C
// (train_gpt.c). Built by nvcc for GPUs, and by a C++ compiler for the simulated device (dev/cudasim).
#include "llmc/cuda/cast.cuh"   // cuda_cast, cuda_accumulate
#include "llmc/cuda/cuda.cuh"   // CudaDevice
#include "llmc/cuda/device.h"   // device_cuda
#include "llmc/cuda/dropout.cuh" // cuda_dropout_backward
#include "llmc/cuda/memory.cuh" // cuda_alloc, cuda_copy_*
#include "llmc/cuda/mlp.cuh"    // cuda_swiglu_*
#include "llmc/cuda/norm.cuh"   // cuda_norm_*, cuda_residual_forward
#include "llmc/cuda/rope.cuh"   // cuda_qk_*

// Opens device `ordinal` and fills the table.
Device device_cuda(int ordinal) {
    CudaDevice *c = new CudaDevice();
    c->ordinal = ordinal;
    cuda_check(cudaSetDevice(ordinal), "cudaSetDevice");
    cudaDeviceProp properties;
    cuda_check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
    c->sm_count = properties.multiProcessorCount;
    cuda_check(cudaStreamCreateWithFlags(&c->compute, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    Device device = {};
    device.name = "cuda";
    device.state = c;
    device.alloc = cuda_alloc;
    device.release = cuda_release;
    device.copy_in = cuda_copy_in;
    device.copy_out = cuda_copy_out;
    device.zero = cuda_zero;
    device.synchronize = cuda_synchronize;
    device.cast = cuda_cast;
    device.accumulate = cuda_accumulate;
    device.norm_forward = cuda_norm_forward;
    device.norm_backward = cuda_norm_backward;
    device.residual_forward = cuda_residual_forward;
    device.dropout_backward = cuda_dropout_backward;
    device.swiglu_forward = cuda_swiglu_forward;
    device.swiglu_backward = cuda_swiglu_backward;
    device.qk_forward = cuda_qk_forward;
    device.qk_backward = cuda_qk_backward;
    return device;
}

void device_cuda_close(Device *device) {
    CudaDevice *c = cuda_of(device);
    cuda_check(cudaStreamSynchronize(c->compute), "cudaStreamSynchronize");
    if (c->scratch != nullptr) cuda_check(cudaFree(c->scratch), "cudaFree");
    cuda_check(cudaStreamDestroy(c->compute), "cudaStreamDestroy");
    delete c;
    device->state = nullptr;
}
