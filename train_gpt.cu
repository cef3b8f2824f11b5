// train_gpt.cu: the CUDA device: gathers llmc/cuda/*.cuh into one unit and fills the device table (llmc/device.h) for the trainer, which stays C
// (train_gpt.c). Built by nvcc for GPUs, and by a C++ compiler for the simulated device (dev/cudasim).
#include "llmc/cuda/cast.cuh"   // cuda_cast, cuda_accumulate
#include "llmc/cuda/comm.cuh"   // cuda_comm_table
#include "llmc/cuda/cuda.cuh"   // CudaDevice
#include "llmc/cuda/device.h"   // device_cuda
#include "llmc/cuda/memory.cuh" // cuda_alloc, cuda_copy_*

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
    return device;
}

void device_cuda_close(Device *device) {
    CudaDevice *c = cuda_of(device);
    cuda_check(cudaStreamSynchronize(c->compute), "cudaStreamSynchronize");
    cuda_comm_close(c);
    if (c->scratch != nullptr) cuda_check(cudaFree(c->scratch), "cudaFree");
    cuda_check(cudaStreamDestroy(c->compute), "cudaStreamDestroy");
    delete c;
    device->state = nullptr;
}

int device_cuda_ordinal(int local_rank, int local_size, int size) {
    int count = 0;
    if (size > 1) { // what the user has set stays
        // Streams share queues when there are more of them, and a message could stand behind one that waits for another rank.
        (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
        // A kernel that is loaded at its first launch may wait for the whole device, and with it for a message which that kernel's result would bring about.
        (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    }
    if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
#ifdef SIMCU
    return local_rank % (count > 0 ? count : 1); // simulated devices share the host anyway
#endif
    const bool assigned = count == 1 && getenv("CUDA_VISIBLE_DEVICES") != nullptr; // a launcher gives every rank its own; NCCL refuses the same one twice
    if (count >= local_size) return local_rank;
    if (assigned) return 0;
    fprintf(stderr, "train_gpt: --device cuda: %d ranks on this host, %d CUDA devices: wanted one for each rank\n", local_size, count);
    fflush(stderr);
    _Exit(2); // CODE_USAGE
}

CommDevice device_cuda_comm(Device *device) { return cuda_comm_table(cuda_of(device)); }
