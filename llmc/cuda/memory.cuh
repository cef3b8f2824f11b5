// memory.cuh: memory of the CUDA device and copies to and from the host. Copies are ordered with the ops of the compute stream.
//
// Copies to the device go through a ring of pinned pieces: the host's bytes are copied there at once, so that the caller may change them, and the
// device fetches them when the compute stream gets there. The host waits only when the whole ring is still to be fetched. Copies to the host wait,
// but for those into pinned memory that are asked for early (copy_out_start, snapshot_copy).
#ifndef LLMC_CUDA_MEMORY_CUH
#define LLMC_CUDA_MEMORY_CUH

#include "llmc/cuda/cuda.cuh"  // cuda_of, cuda_check
#include "llmc/cuda/scratch.h" // COPY_PIECES, COPY_PIECE_BYTES
#include <cstring>             // memcpy, memset

[[noreturn]] static void cuda_out_of_memory(size_t bytes) {
    size_t left = 0, all = 0;
    (void)cudaGetLastError();
    (void)cudaMemGetInfo(&left, &all);
    fprintf(stderr, "train_gpt: out of device memory: wanted %zu bytes, %zu of %zu are free\n", bytes, left, all);
    fflush(stderr);
    _Exit(2); // CODE_USAGE
}

[[noreturn]] static void cuda_out_of_host_memory(size_t bytes) {
    fprintf(stderr,
            "train_gpt: out of host memory for the device's copies: wanted %zu bytes that are never paged out (--async-save off takes less)\n",
            bytes);
    fflush(stderr);
    _Exit(2); // CODE_USAGE
}

static void *cuda_alloc(Device *device, size_t bytes) {
    void *pointer = nullptr;
    if (bytes == 0) bytes = 1;
    if (cudaMalloc(&pointer, bytes) != cudaSuccess) cuda_out_of_memory(bytes);
    cuda_check(cudaMemsetAsync(pointer, 0, bytes, cuda_of(device)->compute), "cudaMemsetAsync");
    return pointer;
}

static void cuda_release(Device *device, void *pointer) {
    cuda_wait(cuda_of(device), cuda_of(device)->compute);
    cuda_check(cudaFree(pointer), "cudaFree");
}

// ----------------------------------------------------------------------------
// Copies to the device.

static constexpr size_t COPY_ALIGN = 64;

// CudaDevice.copies. Pieces are filled one after the other, many small copies in one; a piece is closed by an event when the next copy does not
// fit.
struct CudaCopies {
    char *pinned; // (COPY_PIECES, COPY_PIECE_BYTES)
    cudaEvent_t fetched[COPY_PIECES];
    bool closed[COPY_PIECES]; // the event was recorded, and not waited for yet
    int piece;                // that is being filled
    size_t used;              // bytes of it
};

static CudaCopies *cuda_copies_open() {
    CudaCopies *copies = new CudaCopies();
    cuda_check(cudaMallocHost((void **)&copies->pinned, COPY_PIECES * COPY_PIECE_BYTES), "cudaMallocHost");
    for (cudaEvent_t &event : copies->fetched) cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return copies;
}

// After the compute stream is idle.
static void cuda_copies_close(CudaCopies *copies) {
    for (cudaEvent_t event : copies->fetched) cuda_check(cudaEventDestroy(event), "cudaEventDestroy");
    cuda_check(cudaFreeHost(copies->pinned), "cudaFreeHost");
    delete copies;
}

// Closes the piece and takes the next, waiting for the device where it has not fetched that yet.
static void cuda_copies_turn_(CudaDevice *device) {
    CudaCopies *copies = device->copies;
    cuda_check(cudaEventRecord(copies->fetched[copies->piece], device->compute), "cudaEventRecord");
    copies->closed[copies->piece] = true;
    copies->piece = (copies->piece + 1) % COPY_PIECES;
    copies->used = 0;
    if (copies->closed[copies->piece]) cuda_wait_event(device, copies->fetched[copies->piece]);
    copies->closed[copies->piece] = false;
}

static void cuda_copy_in(Device *device, void *to_device, const void *from_host, size_t bytes) {
    CudaDevice *c = cuda_of(device);
    CudaCopies *copies = c->copies;
    cuda_not_captured(c, "copy to the device");
    for (size_t done = 0, part; done < bytes; done += part) {
        const size_t left = bytes - done;
        part = left < COPY_PIECE_BYTES ? left : COPY_PIECE_BYTES;
        if (part > COPY_PIECE_BYTES - copies->used) cuda_copies_turn_(c);
        char *staged = copies->pinned + (size_t)copies->piece * COPY_PIECE_BYTES + copies->used;
        memcpy(staged, (const char *)from_host + done, part);
        cuda_check(cudaMemcpyAsync((char *)to_device + done, staged, part, cudaMemcpyHostToDevice, c->compute), "cudaMemcpyAsync");
        copies->used += (part + COPY_ALIGN - 1) / COPY_ALIGN * COPY_ALIGN;
    }
}

// To pageable memory. It starts on an idle stream: CUDA itself would let the host wait for the stream without polling.
static void cuda_read(CudaDevice *device, void *to_host, const void *from_device, size_t bytes) {
    if (bytes == 0) return;
    cuda_wait(device, device->compute);
    cuda_check(cudaMemcpyAsync(to_host, from_device, bytes, cudaMemcpyDeviceToHost, device->compute), "cudaMemcpyAsync");
    cuda_wait(device, device->compute); // the host may use its memory now
}

static void cuda_copy_out(Device *device, void *to_host, const void *from_device, size_t bytes) {
    cuda_read(cuda_of(device), to_host, from_device, bytes);
}

static void cuda_zero(Device *device, void *pointer, size_t bytes) {
    if (bytes > 0) cuda_check(cudaMemsetAsync(pointer, 0, bytes, cuda_of(device)->compute), "cudaMemsetAsync");
}

static void *cuda_host_alloc(Device *, size_t bytes) {
    void *pointer = nullptr;
    if (cudaMallocHost(&pointer, bytes == 0 ? 1 : bytes) != cudaSuccess) cuda_out_of_host_memory(bytes);
    memset(pointer, 0, bytes);
    return pointer;
}

static void cuda_host_release(Device *, void *pointer) { cuda_check(cudaFreeHost(pointer), "cudaFreeHost"); }

static void cuda_copy_out_start(Device *device, int slot, void *to, const void *from_device, size_t bytes) {
    CudaDevice *c = cuda_of(device);
    cuda_not_captured(c, "copy to the host");
    cuda_check(cudaMemcpyAsync(to, from_device, bytes, cudaMemcpyDeviceToHost, c->compute), "cudaMemcpyAsync");
    cuda_check(cudaEventRecord(c->read[slot], c->compute), "cudaEventRecord");
}

static void cuda_copy_out_finish(Device *device, int slot) { cuda_wait_event(cuda_of(device), cuda_of(device)->read[slot]); }

// ----------------------------------------------------------------------------
// Copies for a save, on a stream of their own: the compute stream goes on until the fence.

static void cuda_snapshot_begin(Device *device) {
    CudaDevice *c = cuda_of(device);
    cuda_check(cudaEventRecord(c->snapshot_order, c->compute), "cudaEventRecord");
    cuda_check(cudaStreamWaitEvent(c->snapshot, c->snapshot_order, 0), "cudaStreamWaitEvent");
    c->snapshot_open = true;
}

static void cuda_snapshot_copy(Device *device, void *to, const void *from_device, size_t bytes) {
    if (bytes > 0) cuda_check(cudaMemcpyAsync(to, from_device, bytes, cudaMemcpyDeviceToHost, cuda_of(device)->snapshot), "cudaMemcpyAsync");
}

static void cuda_snapshot_fence(Device *device) {
    CudaDevice *c = cuda_of(device);
    if (!c->snapshot_open) return;
    cuda_check(cudaEventRecord(c->snapshot_order, c->snapshot), "cudaEventRecord");
    cuda_check(cudaStreamWaitEvent(c->compute, c->snapshot_order, 0), "cudaStreamWaitEvent");
    c->snapshot_open = false;
}

static void cuda_snapshot_wait(Device *device) { cuda_wait(cuda_of(device), cuda_of(device)->snapshot); }

static void cuda_synchronize(Device *device) { cuda_wait(cuda_of(device), cuda_of(device)->compute); }

#endif
