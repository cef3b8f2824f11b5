// memory.h: memory of the CPU device: the host's. Every operation is complete when it returns.
#ifndef LLMC_CPU_MEMORY_H
#define LLMC_CPU_MEMORY_H

#include "llmc/base.h"   // base_alloc_raw
#include "llmc/device.h" // Device

// A piece is what one thread clears at a time: a huge page.
static inline void cpu_memory_zero_(void *pointer, size_t bytes) {
    const size_t piece = BASE_HUGE_BYTES, pieces = (bytes + piece - 1) / piece;
#pragma omp parallel for schedule(static) if (pieces > 1)
    for (size_t i = 0; i < pieces; i++) {
        const size_t at = i * piece;
        memset((char *)pointer + at, 0, bytes - at < piece ? bytes - at : piece);
    }
}

// Zeroed by all threads: the first touch of gigabytes is most of a start.
static inline void *cpu_alloc(Device *device, size_t bytes) {
    (void)device;
    void *pointer = base_alloc_raw(bytes);
    cpu_memory_zero_(pointer, bytes);
    return pointer;
}

static inline void cpu_release(Device *device, void *pointer) {
    (void)device;
    free(pointer);
}

static inline void cpu_copy_in(Device *device, void *to_device, const void *from_host, size_t bytes) {
    (void)device;
    if (bytes > 0) memcpy(to_device, from_host, bytes);
}

static inline void cpu_copy_out(Device *device, void *to_host, const void *from_device, size_t bytes) {
    (void)device;
    if (bytes > 0) memcpy(to_host, from_device, bytes);
}

static inline void cpu_zero(Device *device, void *pointer, size_t bytes) {
    (void)device;
    if (bytes > 0) cpu_memory_zero_(pointer, bytes);
}

static inline void cpu_synchronize(Device *device) { (void)device; }

static inline void cpu_copy_out_start(Device *device, int slot, void *to, const void *from_device, size_t bytes) {
    (void)slot;
    cpu_copy_out(device, to, from_device, bytes);
}

static inline void cpu_copy_out_finish(Device *device, int slot) { (void)device, (void)slot; }

static inline void cpu_snapshot_begin(Device *device) { (void)device; }

static inline void cpu_snapshot_copy(Device *device, void *to, const void *from_device, size_t bytes) {
    cpu_copy_out(device, to, from_device, bytes);
}

static inline void cpu_snapshot_fence(Device *device) { (void)device; }

static inline void cpu_snapshot_wait(Device *device) { (void)device; }

#endif
