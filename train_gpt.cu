// train_gpt.cu: the CUDA device: gathers llmc/cuda/*.cuh into one unit and fills the device table (llmc/device.h) for the trainer, which stays C
// (train_gpt.c). Built by nvcc for GPUs, and by a C++ compiler for the simulated device (dev/cudasim).
#include "llmc/cuda/adamw.cuh"       // cuda_adamw, cuda_step_decide
#include "llmc/cuda/attention.cuh"   // cuda_attention_*
#include "llmc/cuda/cast.cuh"        // cuda_cast, cuda_accumulate
#include "llmc/cuda/classifier.cuh"  // cuda_cross_entropy*, cuda_loss_sum
#include "llmc/cuda/comm.cuh"        // cuda_comm_table
#include "llmc/cuda/cuda.cuh"        // CudaDevice
#include "llmc/cuda/device.h"        // device_cuda
#include "llmc/cuda/dropout.cuh"     // cuda_dropout_backward
#include "llmc/cuda/embedding.cuh"   // cuda_embedding_*
#include "llmc/cuda/global_norm.cuh" // cuda_grad_squares
#include "llmc/cuda/graph.cuh"       // cuda_graph_*
#include "llmc/cuda/marks.cuh"       // cuda_mark
#include "llmc/cuda/matmul.cuh"      // cuda_linear_*, cuda_matmul_rate, cublaslt_open
#include "llmc/cuda/memory.cuh"      // cuda_alloc, cuda_copy_*
#include "llmc/cuda/mlp.cuh"         // cuda_swiglu_*
#include "llmc/cuda/norm.cuh"        // cuda_norm_*, cuda_residual_forward
#include "llmc/cuda/rope.cuh"        // cuda_qk_*
#include "llmc/cuda/scratch.h"       // PRODUCT_WORKSPACE_BYTES
#include "llmc/gpus.h"               // gpus_peak_flops

static size_t cuda_own_bytes(Device *device) {
    const CudaDevice *c = cuda_of(device);
    return PRODUCT_WORKSPACE_BYTES + c->scratch_bytes + c->comm_scratch_bytes;
}

static double cuda_free_bytes(Device *) {
    size_t left = 0, all = 0;
    cuda_check(cudaMemGetInfo(&left, &all), "cudaMemGetInfo");
    return (double)left;
}

static double cuda_peak_flops(Device *device, Dtype dtype) { return gpus_peak_flops(device->model, dtype); }

static int64_t cuda_kernel_launches(Device *device) { return cuda_of(device)->launches; }

static void cuda_close(Device *device) {
    CudaDevice *c = cuda_of(device);
    cuda_wait(c, c->compute);
    cuda_wait(c, c->snapshot);
    cuda_comm_close(c);
    cuda_graphs_close(c->graphs);
    cublaslt_close(c->matmul);
    cuda_copies_close(c->copies);
    cuda_marks_close(c->marks);
    if (c->scratch != nullptr) cuda_check(cudaFree(c->scratch), "cudaFree");
    for (cudaEvent_t event : c->read) cuda_check(cudaEventDestroy(event), "cudaEventDestroy");
    cuda_check(cudaEventDestroy(c->snapshot_order), "cudaEventDestroy");
    cuda_check(cudaStreamDestroy(c->snapshot), "cudaStreamDestroy");
    cuda_check(cudaStreamDestroy(c->compute), "cudaStreamDestroy");
    delete c;
    device->state = nullptr;
}

static CudaDevice *cuda_open(int ordinal, char *model, size_t model_bytes) {
    CudaDevice *c = new CudaDevice();
    c->ordinal = ordinal;
    cuda_check(cudaSetDevice(ordinal), "cudaSetDevice");
    cudaDeviceProp properties;
    cuda_check(cudaGetDeviceProperties(&properties, ordinal), "cudaGetDeviceProperties");
    snprintf(model, model_bytes, "%.*s", (int)model_bytes - 1, properties.name);
    c->sm_count = properties.multiProcessorCount;
    cuda_check(cudaStreamCreateWithFlags(&c->compute, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    for (cudaEvent_t &event : c->read) cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    cuda_check(cudaStreamCreateWithFlags(&c->snapshot, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    cuda_check(cudaEventCreateWithFlags(&c->snapshot_order, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    c->copies = cuda_copies_open();
    c->graphs = cuda_graphs_open();
    c->matmul = cublaslt_open(c);
    return c;
}

static void cuda_fill_memory(Device *device) {
    device->close = cuda_close;
    device->matmul_rate = cuda_matmul_rate;
    device->peak_flops = cuda_peak_flops;
    device->own_bytes = cuda_own_bytes;
    device->free_bytes = cuda_free_bytes;
    device->kernel_launches = cuda_kernel_launches;
    device->graph_begin = cuda_graph_begin;
    device->graph_end = cuda_graph_end;
    device->graph_counts = cuda_graph_counts;
    device->alloc = cuda_alloc;
    device->release = cuda_release;
    device->copy_in = cuda_copy_in;
    device->copy_out = cuda_copy_out;
    device->zero = cuda_zero;
    device->synchronize = cuda_synchronize;
    device->host_alloc = cuda_host_alloc;
    device->host_release = cuda_host_release;
    device->copy_out_start = cuda_copy_out_start;
    device->copy_out_finish = cuda_copy_out_finish;
    device->mark = cuda_mark;
    device->mark_times = cuda_mark_times;
    device->snapshot_begin = cuda_snapshot_begin;
    device->snapshot_copy = cuda_snapshot_copy;
    device->snapshot_fence = cuda_snapshot_fence;
    device->snapshot_wait = cuda_snapshot_wait;
}

static void cuda_fill_ops(Device *device) {
    device->cast = cuda_cast;
    device->accumulate = cuda_accumulate;
    device->embedding_forward = cuda_embedding_forward;
    device->embedding_backward = cuda_embedding_backward;
    device->norm_forward = cuda_norm_forward;
    device->norm_backward = cuda_norm_backward;
    device->residual_forward = cuda_residual_forward;
    device->dropout_backward = cuda_dropout_backward;
    device->linear_forward = cuda_linear_forward;
    device->linear_backward_input = cuda_linear_backward_input;
    device->linear_backward_weight = cuda_linear_backward_weight;
    device->swiglu_forward = cuda_swiglu_forward;
    device->swiglu_backward = cuda_swiglu_backward;
    device->qk_forward = cuda_qk_forward;
    device->qk_backward = cuda_qk_backward;
    device->attention_forward = cuda_attention_forward;
    device->attention_backward = cuda_attention_backward;
    device->cross_entropy = cuda_cross_entropy;
    device->cross_entropy_local = cuda_cross_entropy_local;
    device->cross_entropy_merge = cuda_cross_entropy_merge;
    device->loss_sum = cuda_loss_sum;
    device->grad_squares = cuda_grad_squares;
    device->step_decide = cuda_step_decide;
    device->adamw = cuda_adamw;
}

bool device_cuda_computes(Dtype dtype, AttentionShape shape) { return cuda_attention_supports(dtype, shape); }

Device device_cuda(int ordinal) {
    Device device = {};
    device.name = "cuda";
    device.state = cuda_open(ordinal, device.model, sizeof device.model);
    cuda_fill_memory(&device);
    cuda_fill_ops(&device);
    return device;
}

void device_cuda_keep_choices(Device *device, const char *path) { cublaslt_keep(cuda_of(device)->matmul, path); }

int device_cuda_ordinal(int local_rank, int local_size, int size, char *why, size_t why_bytes) {
    int count = 0;
    if (size > 1) { // what the user has set stays
        // Streams share queues when there are more of them, and a message could stand behind one that waits for another rank.
        (void)setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
        // A kernel that is loaded at its first launch may wait for the whole device, and so for a message which its own result would bring about.
        (void)setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    }
    const cudaError_t result = cudaGetDeviceCount(&count);
    if (result != cudaSuccess || count == 0) {
        snprintf(why, why_bytes, "no device: %s", result != cudaSuccess ? cudaGetErrorString(result) : "CUDA sees none");
        return -1;
    }
#ifdef SIMCU
    return local_rank % count; // simulated devices share the host anyway
#endif
    const bool assigned =
        count == 1 && getenv("CUDA_VISIBLE_DEVICES") != nullptr; // a launcher gives every rank its own; NCCL refuses the same one twice
    if (count >= local_size) return local_rank;
    if (assigned) return 0;
    snprintf(why, why_bytes, "%d ranks on this host, %d device%s: wanted one for each rank", local_size, count, count == 1 ? "" : "s");
    return -1;
}

CommDevice device_cuda_comm(Device *device) { return cuda_comm_table(cuda_of(device)); }
