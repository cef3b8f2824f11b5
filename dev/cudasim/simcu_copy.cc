// simcu_copy.cc: allocation, copies and fills as the CUDA runtime has them, with its promises to the host and no more. Ownership is in
// simcu_memory.cc.
//
// Copies to the device: pageable memory is read at the call, pinned memory when the copy's turn comes; if the host has changed it by then, that is
// a fault and ends the process. Copies to the host: pageable memory is complete when the call returns; pinned memory holds 0xff from the call until
// the copy's turn, so that a host that reads too early sees NaN.
#include "simcu_stream.h" // push
#include <algorithm>      // std::find
#include <cstdlib>        // free
#include <cstring>        // memcpy

namespace simcu {
namespace {

enum class Side { DEVICE, PINNED, PAGEABLE };

Side side_of(const void *pointer) {
    const Allocation *a = memory_find(pointer);
    if (a != nullptr && (a->live || a->kind == MemoryKind::DEVICE)) return a->kind == MemoryKind::DEVICE ? Side::DEVICE : Side::PINNED;
    return in_device_arena(pointer) ? Side::DEVICE : Side::PAGEABLE;
}

uint64_t fingerprint(const void *data, size_t bytes) {
    uint64_t h = 0x9E3779B97F4A7C15ull;
    const char *p = (const char *)data;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        uint64_t word;
        memcpy(&word, p, 8);
        h = (h ^ word) * 0xff51afd7ed558ccdull;
        h ^= h >> 32;
    }
    for (; bytes > 0; bytes--, p++) h = (h ^ (unsigned char)*p) * 0xff51afd7ed558ccdull;
    return h;
}

// Pinned ranges that queued copies will read or write. A copy that reads what an earlier one writes has nothing to compare with.
struct Pending {
    const char *begin, *end;
    bool write;
    uint64_t number;
};
std::vector<Pending> &pending = *new std::vector<Pending>;
uint64_t pending_number;

uint64_t pending_add(const void *p, size_t bytes, bool write) {
    pending.push_back({(const char *)p, (const char *)p + bytes, write, ++pending_number});
    return pending_number;
}
void pending_remove(uint64_t number) {
    pending.erase(std::find_if(pending.begin(), pending.end(), [=](const Pending &p) { return p.number == number; }));
}
bool pending_overlaps(const void *p, size_t bytes, bool only_writes) {
    for (const Pending &x : pending)
        if ((const char *)p < x.end && (const char *)p + bytes > x.begin && (x.write || !only_writes)) return true;
    return false;
}

void transfer(void *to, const void *from, size_t bytes, const char *call) {
    range_note(from, bytes, false, call);
    range_note(to, bytes, true, call);
    memmove(to, from, bytes);
    advance_clock((double)bytes / 50);
}

cudaError_t copy_from_pageable(void *to, const void *from, size_t bytes, cudaStream_t stream, const char *call) {
    const auto staged = std::make_shared<std::vector<char>>((const char *)from, (const char *)from + bytes);
    return enqueue(stream, call, [=] {
        transfer(to, staged->data(), bytes, call);
        return true;
    });
}

cudaError_t copy_from_pinned(void *to, const void *from, size_t bytes, cudaStream_t stream, const char *call) {
    if (stream_of(stream)->capture != nullptr || pending_overlaps(from, bytes, true)) {
        return enqueue(stream, call, [=] {
            transfer(to, from, bytes, call);
            return true;
        });
    }
    const uint64_t expected = fingerprint(from, bytes), number = pending_add(from, bytes, false);
    return enqueue(stream, call, [=] {
        if (fingerprint(from, bytes) != expected)
            fail(nullptr, 0, "%s: the host changed a pinned buffer between the call and the copy%s: wait for the copy first", call,
                 memory_describe(from).c_str());
        pending_remove(number);
        transfer(to, from, bytes, call);
        return true;
    });
}

cudaError_t copy_to_pinned(void *to, const void *from, size_t bytes, cudaStream_t stream, const char *call) {
    if (stream_of(stream)->capture != nullptr) {
        return enqueue(stream, call, [=] {
            transfer(to, from, bytes, call);
            return true;
        });
    }
    if (!pending_overlaps(to, bytes, false)) memset(to, 0xff, bytes);
    const uint64_t number = pending_add(to, bytes, true);
    return enqueue(stream, call, [=] {
        pending_remove(number);
        transfer(to, from, bytes, call);
        return true;
    });
}

bool kind_fits(Side to, Side from, cudaMemcpyKind kind) {
    switch (kind) {
    case cudaMemcpyHostToDevice: return to == Side::DEVICE && from != Side::DEVICE;
    case cudaMemcpyDeviceToHost: return to != Side::DEVICE && from == Side::DEVICE;
    case cudaMemcpyDeviceToDevice: return to != Side::PAGEABLE && from != Side::PAGEABLE;
    case cudaMemcpyHostToHost: return to != Side::DEVICE && from != Side::DEVICE;
    default: return kind == cudaMemcpyDefault;
    }
}

// async: returns as soon as the promises to the host allow it.
cudaError_t copy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream, bool async, const char *call) {
    if (kind < cudaMemcpyHostToHost || kind > cudaMemcpyDefault) return set_error(cudaErrorInvalidMemcpyDirection);
    if (bytes == 0) return cudaSuccess;
    const Side target = side_of(to), source = side_of(from);
    if (!kind_fits(target, source, kind)) {
        note("%s: kind %d does not fit the addresses%s%s", call, (int)kind, memory_describe(to).c_str(), memory_describe(from).c_str());
        return set_error(cudaErrorInvalidValue);
    }
    const bool pageable = target == Side::PAGEABLE || source == Side::PAGEABLE;
    if (!async || pageable) {
        cudaError_t allowed = refused_by_capture(stream_of(stream), "a copy from or to pageable memory");
        if (allowed == cudaSuccess && !async) allowed = forbidden_in_capture(call);
        if (allowed != cudaSuccess) return allowed;
    }
    cudaError_t result;
    if (target == Side::DEVICE && source == Side::PAGEABLE)
        result = copy_from_pageable(to, from, bytes, stream, call);
    else if (target == Side::DEVICE && source == Side::PINNED)
        result = copy_from_pinned(to, from, bytes, stream, call);
    else if (target == Side::PINNED && source == Side::DEVICE)
        result = copy_to_pinned(to, from, bytes, stream, call);
    else
        result = enqueue(stream, call, [=] { return transfer(to, from, bytes, call), true; });
    if (result != cudaSuccess) return result;
    const bool to_host = target != Side::DEVICE, device_only = target == Side::DEVICE && source == Side::DEVICE;
    const bool complete =
        async ? target == Side::PAGEABLE || (to_host && source != Side::DEVICE) : to_host || (source == Side::PINNED && !device_only);
    if (!complete) return result;
    Stream *s = stream_of(stream);
    wait_until(call, [s] { return stream_idle(s); });
    race_host_waited(s->id);
    return result;
}

cudaError_t fill(void *to, int value, size_t bytes, cudaStream_t stream, const char *call) {
    if (bytes == 0) return cudaSuccess;
    if (side_of(to) == Side::PAGEABLE) {
        note("%s: %p is not device memory", call, to);
        return set_error(cudaErrorInvalidValue);
    }
    return enqueue(stream, call, [=] {
        range_note(to, bytes, true, call);
        memset(to, value, bytes);
        return true;
    });
}

} // namespace

cudaError_t symbol_copy(void *to, const void *from, size_t bytes) {
    const cudaError_t result = device_synchronize("cudaMemcpyToSymbol");
    memcpy(to, from, bytes);
    return result;
}

} // namespace simcu

using namespace simcu;
extern "C" {

cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    const cudaError_t allowed = forbidden_in_capture("cudaMalloc");
    if (allowed != cudaSuccess) return allowed;
    *pointer = nullptr;
    if (bytes == 0) return cudaSuccess;
    *pointer = device_alloc(bytes);
    return *pointer != nullptr ? cudaSuccess : set_error(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *pointer) {
    if (pointer == nullptr) return cudaSuccess;
    const cudaError_t allowed = forbidden_in_capture("cudaFree");
    if (allowed != cudaSuccess) return allowed;
    device_open();
    (void)device_synchronize("cudaFree");
    memory_free(pointer, MemoryKind::DEVICE, "cudaFree");
    device_close();
    return cudaSuccess;
}
// The memory is there at once; it goes in its turn. Graphs that allocate are not simulated.
cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream) {
    const cudaError_t allowed = refused_by_capture(stream_of(stream), "cudaMallocAsync");
    return allowed != cudaSuccess ? allowed : cudaMalloc(pointer, bytes);
}
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) {
    const cudaError_t allowed = refused_by_capture(stream_of(stream), "cudaFreeAsync");
    if (allowed != cudaSuccess || pointer == nullptr) return allowed;
    return enqueue(stream, "cudaFreeAsync", [=] { return memory_free(pointer, MemoryKind::DEVICE, "cudaFreeAsync"), true; });
}
cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
    if (flags & ~(unsigned)(cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined)) return set_error(cudaErrorInvalidValue);
    *pointer = bytes > 0 ? pinned_alloc(bytes) : nullptr;
    return bytes == 0 || *pointer != nullptr ? cudaSuccess : set_error(cudaErrorMemoryAllocation);
}
cudaError_t cudaMallocHost(void **pointer, size_t bytes) { return cudaHostAlloc(pointer, bytes, cudaHostAllocDefault); }
cudaError_t cudaFreeHost(void *pointer) {
    if (pointer == nullptr) return cudaSuccess;
    (void)device_synchronize("cudaFreeHost");
    memory_free(pointer, MemoryKind::PINNED, "cudaFreeHost");
    return cudaSuccess;
}
cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned) {
    if (pointer == nullptr || bytes == 0) return set_error(cudaErrorInvalidValue);
    const Allocation *a = memory_find(pointer);
    if (a != nullptr && a->live) return set_error(cudaErrorHostMemoryAlreadyRegistered);
    host_register(pointer, bytes);
    return cudaSuccess;
}
cudaError_t cudaHostUnregister(void *pointer) {
    const Allocation *a = memory_find(pointer);
    if (a == nullptr || !a->live || a->begin != pointer || a->kind != MemoryKind::REGISTERED) return set_error(cudaErrorHostMemoryNotRegistered);
    (void)device_synchronize("cudaHostUnregister");
    memory_free(pointer, MemoryKind::REGISTERED, "cudaHostUnregister");
    return cudaSuccess;
}
cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned) {
    if (side_of(host) != Side::PINNED) return set_error(cudaErrorInvalidValue);
    *device = host;
    return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    *total = settings().memory_bytes;
    *free_bytes = *total - memory_used_bytes();
    return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *attributes, const void *pointer) {
    const Allocation *a = memory_find(pointer);
    *attributes = {};
    attributes->type = cudaMemoryTypeUnregistered, attributes->device = -2;
    attributes->hostPointer = (void *)pointer;
    if (a == nullptr || !a->live) return cudaSuccess;
    const bool device = a->kind == MemoryKind::DEVICE;
    attributes->type = device ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->device = a->device;
    attributes->devicePointer = (void *)pointer;
    attributes->hostPointer = device ? nullptr : (void *)pointer;
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
    return copy(to, from, bytes, kind, stream, true, "cudaMemcpyAsync");
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    return copy(to, from, bytes, kind, nullptr, false, "cudaMemcpy");
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
    if (width > to_pitch || width > from_pitch) return set_error(cudaErrorInvalidPitchValue);
    for (size_t row = 0; row < height; row++) {
        const cudaError_t result =
            copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind, stream, true, "cudaMemcpy2DAsync");
        if (result != cudaSuccess) return result;
    }
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) { return fill(to, value, bytes, stream, "cudaMemsetAsync"); }
cudaError_t cudaMemset(void *to, int value, size_t bytes) { return fill(to, value, bytes, nullptr, "cudaMemset"); }
}
