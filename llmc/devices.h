// devices.h: the devices that this program was built with: opens the one that --device names, and lets ranks communicate its memory. What a device
// does is in llmc/cpu and llmc/cuda.
#ifndef LLMC_DEVICES_H
#define LLMC_DEVICES_H

#include "llmc/base.h"    // Error, fail
#include "llmc/comm.h"    // Comm, comm_set_device
#include "llmc/cpu/cpu.h" // device_cpu
#include "llmc/device.h"  // Device
#include "llmc/model.h"   // ModelConfig
#include "llmc/options.h" // DEVICE_CUDA, PACK_NONE
#ifdef USE_CUDA
#include "llmc/cuda/device.h" // device_cuda, device_cuda_ordinal, device_cuda_comm, device_cuda_keep_choices
#include "llmc/files.h"       // path_join
#define DEVICES_BUILT "CUDA and CPU"

// What a GPU chooses by timing is kept beside the log, by each rank for itself: two that time the same product may disagree.
static inline void devices_keep_choices_(Device *device, const char *out, int rank) {
    char name[32] = "algorithms.txt";
    if (rank > 0) snprintf(name, sizeof name, "algorithms_%d.txt", rank);
    char *path = path_join(out, name);
    device_cuda_keep_choices(device, path);
    free(path);
}
#else
#define DEVICES_BUILT "CPU"
#endif

// Opens the device of this rank: on GPUs each of a host's ranks has one of its own. False with the reason why there is none.
static inline bool devices_open(Device *device, const Options *o, const Comm *comm, Error *error) {
#ifdef USE_CUDA
    if (o->device == DEVICE_CUDA) {
        char why[256];
        const int ordinal = device_cuda_ordinal(comm->local_rank, comm->local_size, comm->size, why, sizeof why);
        if (ordinal < 0) return fail(error, CODE_USAGE, "--device cuda: %s (--device cpu computes without)", why);
        *device = device_cuda(ordinal);
        if (o->out != NULL && !o->dry_run) devices_keep_choices_(device, o->out, comm->rank);
        return true;
    }
#endif
    (void)o, (void)comm, (void)error;
    *device = device_cpu();
    return true;
}

// Whether --graph can be: a graph holds the ops of a micro-batch, always the same ones, and nothing that the host must see to in between.
static inline bool devices_check_graph_(const Options *o, Error *error) {
    if (!o->graph) return true;
    if (o->device != DEVICE_CUDA) return fail(error, CODE_USAGE, "--graph on: --device cpu has no graphs (wanted --device cuda, or --graph off)");
    if (o->pack != PACK_NONE) {
        return fail(error, CODE_USAGE, "--graph on: with --pack %s no two batches have the same shape (wanted --pack none, or --graph off)",
                    o->pack == PACK_FIT ? "fit" : "varlen");
    }
    if (o->tp > 1) {
        return fail(error, CODE_USAGE, "--graph on: with --tp %lld ranks talk inside of every layer (wanted --tp 1, or --graph off)",
                    (long long)o->tp);
    }
    if (o->zero >= 2) {
        return fail(error, CODE_USAGE,
                    "--graph on: with --zero %lld ranks talk between layers in every micro-batch (wanted --zero 0 or 1, or --graph off)",
                    (long long)o->zero);
    }
    return true;
}

// Whether the device that --device names can compute this model; it need not be there. `local`: widths of a rank.
static inline bool devices_check(const Options *o, const ModelConfig *local, Error *error) {
#ifdef USE_CUDA
    const Dtype dtype = o->precision == PRECISION_BF16 ? DTYPE_BF16 : DTYPE_F32;
    if (o->device == DEVICE_CUDA && !device_cuda_computes(dtype, (AttentionShape){local->heads, local->kv_heads, local->head_size})) {
        return fail(
            error, CODE_USAGE,
            "--device cuda: in bf16 it computes attention for heads of a multiple of 16 channels, up to 128, got %lld (--head-size, --heads, or "
            "--precision fp32)",
            (long long)local->head_size);
    }
#endif
    (void)local;
    return devices_check_graph_(o, error);
}

// From now on comm_alloc gives the device's memory, and it can be communicated. By all ranks, before groups are made.
static inline void devices_join(Device *device, Comm *comm) {
    (void)comm;
#ifdef USE_CUDA
    if (device->on_host) return;
    const CommDevice table = device_cuda_comm(device);
    comm_set_device(comm, &table);
#endif
    (void)device;
}

// After groups and memory were given back, before the device is closed.
static inline void devices_leave(Device *device, Comm *comm) {
    if (!device->on_host) comm_set_device(comm, NULL);
}

#endif
