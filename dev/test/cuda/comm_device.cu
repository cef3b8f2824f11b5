// comm_device.cu: a CUDA device that can only remember, copy, add and communicate, for test_comm_cuda: compiled in a fraction of the time of
// train_gpt.cu, which has the rest. Every simulated device is this one's rank.
#include "llmc/cuda/cast.cuh"   // cuda_cast, cuda_accumulate
#include "llmc/cuda/comm.cuh"   // cuda_comm_table
#include "llmc/cuda/device.h"   // device_cuda
#include "llmc/cuda/memory.cuh" // cuda_alloc, cuda_copy_*

static void comm_device_close(Device *device) {
    CudaDevice *c = cuda_of(device);
    cuda_wait(c, c->compute);
    cuda_comm_close(c);
    cuda_copies_close(c->copies);
    cuda_check(cudaStreamDestroy(c->compute), "cudaStreamDestroy");
    delete c;
    device->state = nullptr;
}

int device_cuda_ordinal(int local_rank, int, int, char *, size_t) { return local_rank; }

Device device_cuda(int ordinal) {
    CudaDevice *c = new CudaDevice();
    c->ordinal = ordinal;
    c->sm_count = 4;
    cuda_check(cudaSetDevice(ordinal), "cudaSetDevice");
    cuda_check(cudaStreamCreateWithFlags(&c->compute, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    c->copies = cuda_copies_open();
    Device device = {};
    device.name = "cuda";
    device.state = c;
    device.close = comm_device_close;
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

CommDevice device_cuda_comm(Device *device) { return cuda_comm_table(cuda_of(device)); }
