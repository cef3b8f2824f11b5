// marks.cuh: when the device passed points of the compute stream, by the host's clock: for traces (llmc/trace.h). Events with timing are kept and
// used again; an event costs the stream about a microsecond.
#ifndef LLMC_CUDA_MARKS_CUH
#define LLMC_CUDA_MARKS_CUH

#include "llmc/cuda/cuda.cuh" // cuda_of, cuda_check, cuda_wait_event
#include <ctime>              // clock_gettime

// CudaDevice.marks
struct CudaMarks {
    cudaEvent_t *events; // (room), of which the first `made` exist
    int64_t count, made, room;
};

static cudaEvent_t cuda_mark_event_(CudaMarks *marks, int64_t index) {
    if (index == marks->room) {
        marks->room = 2 * marks->room + 64;
        marks->events = (cudaEvent_t *)realloc(marks->events, (size_t)marks->room * sizeof *marks->events);
        if (marks->events == nullptr) cuda_fail("marks", "out of memory");
    }
    if (index == marks->made) cuda_check(cudaEventCreate(&marks->events[marks->made++]), "cudaEventCreate");
    return marks->events[index];
}

static int64_t cuda_mark(Device *device) {
    CudaDevice *c = cuda_of(device);
    if (c->marks == nullptr) c->marks = new CudaMarks();
    CudaMarks *marks = c->marks;
    cuda_check(cudaEventRecord(cuda_mark_event_(marks, marks->count), c->compute), "cudaEventRecord");
    return marks->count++;
}

// One more event ties the device's time to the host's: the host's clock is read as soon as it has passed, some 10 us late.
static void cuda_mark_times(Device *device, int64_t *ns, int64_t count) {
    CudaDevice *c = cuda_of(device);
    CudaMarks *marks = c->marks;
    if (marks == nullptr) return; // count is 0
    const cudaEvent_t last = cuda_mark_event_(marks, marks->count);
    cuda_check(cudaEventRecord(last, c->compute), "cudaEventRecord");
    cuda_wait_event(c, last);
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    for (int64_t i = 0; i < count && i < marks->count; i++) {
        float ms = 0;
        cuda_check(cudaEventElapsedTime(&ms, marks->events[i], last), "cudaEventElapsedTime");
        ns[i] = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec - (int64_t)((double)ms * 1e6);
    }
    marks->count = 0;
}

static void cuda_marks_close(CudaMarks *marks) {
    if (marks == nullptr) return;
    for (int64_t i = 0; i < marks->made; i++) cuda_check(cudaEventDestroy(marks->events[i]), "cudaEventDestroy");
    free(marks->events);
    delete marks;
}

#endif
