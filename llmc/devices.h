// devices.h: the devices that this program was built with, and the one that --device names. What a device does is in llmc/cpu and llmc/cuda.
#ifndef LLMC_DEVICES_H
#define LLMC_DEVICES_H

#include "llmc/base.h"    // Error, fail
#include "llmc/cpu/cpu.h" // device_cpu
#include "llmc/device.h"  // Device
#include "llmc/model.h"   // ModelConfig
#include "llmc/options.h" // DEVICE_CPU
#ifdef USE_CUDA
#include "llmc/cuda/device.h" // device_cuda, device_cuda_count
#endif

// Opens the device of this rank: on GPUs each of a host's ranks has one of its own. False with the flag that cannot be met.
static inline bool devices_open(Device *device, const Options *o, int local_rank, Error *error) {
    (void)local_rank, (void)error;
#ifdef USE_CUDA
    if (o->device == DEVICE_CUDA) {
        char why[256];
        const int count = device_cuda_count(why, sizeof why);
        if (count <= 0) return fail(error, CODE_USAGE, "--device cuda: no device: %s (--device cpu computes without)", why);
        if (local_rank >= count) {
            return fail(error, CODE_USAGE, "--device cuda: rank %d of this host, which has %d device%s: wanted at most one rank for each",
                        local_rank, count, count == 1 ? "" : "s");
        }
        *device = device_cuda(local_rank);
        return true;
    }
#endif
    (void)o;
    *device = device_cpu();
    return true;
}

// Whether the device can compute this model. `local`: widths of this rank.
static inline bool devices_check(Device *device, const ModelConfig *local, Dtype dtype, Error *error) {
    const char *why = device->refuses(device, dtype, (AttentionShape){local->heads, local->kv_heads, local->head_size});
    return why == NULL || fail(error, CODE_USAGE, "--device %s: %s", device->name, why);
}

#endif
