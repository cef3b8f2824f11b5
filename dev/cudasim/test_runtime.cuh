// test_runtime.cuh: the simulated runtime: errors, limits, pointers, copies, streams, events and graphs behave as CUDA's documentation says. Faults
// that must end the process are in planted/.
#ifndef CUDASIM_TEST_RUNTIME_CUH
#define CUDASIM_TEST_RUNTIME_CUH

#include "dev/cudasim/test_sim.cuh" // start
#include <functional>               // std::function

__global__ void __launch_bounds__(64) bounded_kernel(float *p) { p[threadIdx.x] = 1; }
template <int THREADS> __global__ void __launch_bounds__(THREADS, 2) bounded_template(float *p) { p[threadIdx.x] = 1; }

static void test_limits() {
    float *p = device_new<float>(1024);
    check(start(nullptr, 1, 1056, 0, set_kernel, p, 1, 1) == cudaErrorInvalidConfiguration, "1056 threads");
    check(cudaPeekAtLastError() == cudaErrorInvalidConfiguration, "peek keeps the error");
    check(cudaGetLastError() == cudaErrorInvalidConfiguration && cudaGetLastError() == cudaSuccess, "get takes it");
    check(start(nullptr, dim3(1, 65536), 32, 0, set_kernel, p, 1, 1) == cudaErrorInvalidConfiguration, "grid of 65536 in y");
    check(start(nullptr, dim3(1, 1, 0), 32, 0, set_kernel, p, 1, 1) == cudaErrorInvalidConfiguration, "an empty grid");
    check(start(nullptr, 1, dim3(1, 1, 65), 0, set_kernel, p, 1, 1) == cudaErrorInvalidConfiguration, "65 threads in z");
    check(start(nullptr, 1, 64, 0, bounded_kernel, p) == cudaSuccess, "as many threads as launch bounds allow");
    check(start(nullptr, 1, 65, 0, bounded_kernel, p) == cudaErrorLaunchFailure, "more threads than launch bounds allow");
    check(start(nullptr, 1, 256, 0, bounded_template<256>, p) == cudaSuccess, "a template's launch bounds");
    check(start(nullptr, 1, 288, 0, bounded_template<256>, p) == cudaErrorLaunchFailure, "more than a template's launch bounds");
    check(start(nullptr, 1, 32, 49152, set_kernel, p, 1, 1) == cudaSuccess, "48 KiB of shared memory");
    check(start(nullptr, 1, 32, 49153, set_kernel, p, 1, 1) == cudaErrorInvalidValue, "more than 48 KiB without asking");
    check(cudaFuncSetAttribute((const void *)set_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 232449) == cudaErrorInvalidValue,
          "more than 227 KiB");
    check(cudaFuncSetAttribute((const void *)set_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 232448) == cudaSuccess, "227 KiB");
    check(start(nullptr, 1, 32, 232448, set_kernel, p, 1, 1) == cudaSuccess, "launch with 227 KiB");
    cudaFuncAttributes attributes;
    NEED(cudaFuncGetAttributes(&attributes, (const void *)bounded_kernel));
    check(attributes.maxThreadsPerBlock == 64, "attributes know the launch bounds");
    cudaDeviceProp properties;
    int sms = 0, count = 0;
    NEED(cudaGetDeviceProperties(&properties, 0));
    NEED(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    NEED(cudaGetDeviceCount(&count));
    check(sms == properties.multiProcessorCount && (sms == 132 || getenv("SIMCU_SMS") != nullptr), "132 SMs");
    check(properties.major == 9 && properties.sharedMemPerBlockOptin == 232448, "properties");
    check(cudaSetDevice(count) == cudaErrorInvalidDevice && cudaSetDevice(-1) == cudaErrorInvalidDevice && cudaSetDevice(0) == cudaSuccess,
          "devices");
    (void)cudaGetLastError();
    NEED(cudaDeviceSynchronize());
    NEED(cudaFree(p));
}

static void test_pointers() {
    cudaPointerAttributes a;
    float *device = device_new<float>(10), *pinned = pinned_new<float>(10), plain[10];
    NEED(cudaPointerGetAttributes(&a, device + 9));
    check(a.type == cudaMemoryTypeDevice && a.devicePointer == device + 9, "device pointer");
    NEED(cudaPointerGetAttributes(&a, pinned + 1));
    check(a.type == cudaMemoryTypeHost && a.hostPointer == pinned + 1, "pinned pointer");
    NEED(cudaPointerGetAttributes(&a, plain));
    check(a.type == cudaMemoryTypeUnregistered, "plain pointer");
    NEED(cudaHostRegister(plain, sizeof plain, 0));
    NEED(cudaPointerGetAttributes(&a, plain));
    check(a.type == cudaMemoryTypeHost, "registered pointer");
    check(cudaHostRegister(plain, sizeof plain, 0) == cudaErrorHostMemoryAlreadyRegistered, "registered twice");
    NEED(cudaHostUnregister(plain));
    check(cudaHostUnregister(plain) == cudaErrorHostMemoryNotRegistered, "unregistered twice");
    size_t before, after, total;
    NEED(cudaMemGetInfo(&before, &total));
    NEED(cudaFree(device));
    NEED(cudaMemGetInfo(&after, &total));
    check(after > before && total >= after, "freed memory is free");
    NEED(cudaPointerGetAttributes(&a, device));
    check(a.type == cudaMemoryTypeUnregistered, "freed pointer");
    void *huge = nullptr;
    check(cudaMalloc(&huge, total + 1) == cudaErrorMemoryAllocation && huge == nullptr, "more memory than there is");
    check(cudaFree(nullptr) == cudaSuccess && cudaFreeHost(nullptr) == cudaSuccess, "freeing nothing");
    (void)cudaGetLastError();
    NEED(cudaFreeHost(pinned));
}

static void test_copies() {
    cudaStream_t s = stream_open();
    float *d = device_new<float>(4), *pinned = pinned_new<float>(4), plain[4] = {1, 2, 3, 4};
    NEED(cudaMemcpyAsync(d, plain, sizeof plain, cudaMemcpyHostToDevice, s));
    plain[0] = 9; // pageable: it was read at the call
    float back[4] = {};
    NEED(cudaMemcpyAsync(back, d, sizeof back, cudaMemcpyDeviceToHost, s)); // pageable: complete at once
    check(back[0] == 1 && back[3] == 4, "pageable copies: %g %g", back[0], back[3]);
    NEED(start(s, 1, 32, 0, set_kernel, d, 7, 4));
    pinned[0] = 5;
    NEED(cudaMemcpyAsync(pinned, d, sizeof back, cudaMemcpyDeviceToHost, s));
    if (!streams_eager()) check(pinned[0] != pinned[0], "a pinned target holds NaN until the copy: %g", pinned[0]);
    NEED(cudaStreamSynchronize(s));
    check(pinned[0] == 7, "a pinned target after the wait: %g", pinned[0]);
    pinned[0] = 8;
    NEED(cudaMemcpyAsync(d, pinned, sizeof back, cudaMemcpyHostToDevice, s)); // down and up through one pinned buffer, in order
    NEED(start(s, 1, 32, 0, add_kernel, d, 1, 4));
    NEED(cudaMemcpyAsync(pinned, d, sizeof back, cudaMemcpyDeviceToHost, s));
    NEED(cudaMemcpyAsync(d + 1, pinned, 4, cudaMemcpyHostToDevice, s));
    NEED(cudaMemcpyAsync(d + 2, d, 4, cudaMemcpyDeviceToDevice, s));
    NEED(cudaMemsetAsync(d + 3, 0, 4, s));
    NEED(cudaStreamSynchronize(s));
    NEED(cudaMemcpyAsync(back, d, sizeof back, cudaMemcpyDefault, s));
    check(back[0] == 9 && back[1] == 9 && back[2] == 9 && back[3] == 0, "copies in order: %g %g %g %g", back[0], back[1], back[2], back[3]);
    check(cudaMemcpy(d, plain, 4, cudaMemcpyDeviceToDevice) == cudaErrorInvalidValue, "kind against a host address");
    check(cudaMemcpyAsync(plain, plain + 1, 4, cudaMemcpyHostToDevice, s) == cudaErrorInvalidValue, "kind against two host addresses");
    check(cudaMemcpyAsync(d, plain, 4, (cudaMemcpyKind)9, s) == cudaErrorInvalidMemcpyDirection, "no kind");
    check(cudaMemsetAsync(plain, 0, 4, s) == cudaErrorInvalidValue, "memset of host memory");
    (void)cudaGetLastError();
    NEED(cudaFree(d));
    NEED(cudaFreeHost(pinned));
    NEED(cudaStreamDestroy(s));
}

// The race checker keeps the shadow of device memory in pieces; this range passes from one to the next.
static void test_large_buffer() {
    constexpr size_t floats = 5 << 20;
    float *d = device_new<float>(floats), back = 1;
    NEED(cudaMemset(d, 0, floats * sizeof(float)));
    NEED(start(nullptr, 1024, 64, 0, set_kernel, d, 3, 1 << 16));
    NEED(cudaMemcpy(&back, d + floats - 1, sizeof back, cudaMemcpyDeviceToHost));
    check(back == 0, "a large buffer: %g", back);
    NEED(cudaFree(d));
}

static void count_call(void *number) { ++*(int *)number; }

static void test_streams() {
    int least, greatest, priority = 1, calls = 0;
    NEED(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    cudaStream_t a = stream_open(), b, blocking;
    NEED(cudaStreamCreateWithPriority(&b, cudaStreamNonBlocking, greatest - 3));
    NEED(cudaStreamGetPriority(b, &priority));
    check(priority == greatest && greatest < least, "priority %d", priority);
    NEED(cudaStreamCreate(&blocking));
    float *d = device_new<float>(64), *e = device_new<float>(64);
    cudaEvent_t ready = event_open(), first = event_open(cudaEventDefault), last = event_open(cudaEventDefault);
    for (int round = 0; round < 5; round++) { // the same events again and again
        NEED(cudaEventRecord(first, a));
        NEED(start(a, 2, 32, 0, set_kernel, d, (float)round, 64));
        NEED(cudaEventRecord(ready, a));
        NEED(cudaStreamWaitEvent(b, ready, 0));
        NEED(start(b, 2, 32, 0, set_kernel, e, 1, 64));
        NEED(start(b, 2, 32, 0, join_kernel, e, d, 64));
        NEED(cudaEventRecord(last, b));
        NEED(cudaStreamWaitEvent(a, last, 0));
        NEED(start(a, 2, 32, 0, join_kernel, d, e, 64));
        NEED(cudaLaunchHostFunc(a, count_call, &calls));
    }
    if (!streams_eager()) check(cudaEventQuery(last) == cudaErrorNotReady && cudaGetLastError() == cudaErrorNotReady, "nothing ran yet");
    float ms = -1;
    NEED(cudaEventSynchronize(last));
    check(cudaEventQuery(last) == cudaSuccess, "the event after its wait");
    NEED(cudaEventElapsedTime(&ms, first, last));
    check(ms > 0, "elapsed %g ms", ms);
    while (cudaStreamQuery(a) == cudaErrorNotReady) {
    } // asking makes progress
    (void)cudaGetLastError();
    check(calls == 5, "host function: %d calls", calls);
    check(to_host(d, 64)[63] == 4 + 5, "streams through events: %g", to_host(d, 64)[63]);
    check(cudaEventElapsedTime(&ms, first, ready) == cudaErrorInvalidResourceHandle, "an event without timing");
    cudaEvent_t never = event_open(cudaEventDefault);
    NEED(cudaStreamWaitEvent(a, never, 0)); // not recorded: no wait
    check(cudaEventQuery(never) == cudaSuccess, "an event that was never recorded is done");
    check(cudaEventElapsedTime(&ms, first, never) == cudaErrorInvalidResourceHandle, "elapsed to an event that was never recorded");
    // the legacy stream is ordered with blocking streams
    NEED(start(blocking, 2, 32, 0, set_kernel, d, 3, 64));
    NEED(start(nullptr, 2, 32, 0, add_kernel, d, 1, 64));
    NEED(cudaMemcpyAsync(e, d, 256, cudaMemcpyDeviceToDevice, nullptr));
    NEED(start(blocking, 2, 32, 0, set_kernel, d, 9, 64)); // after the copy
    NEED(cudaDeviceSynchronize());
    check(to_host(e, 64)[0] == 4 && to_host(d, 64)[0] == 9, "legacy stream: %g %g", to_host(e, 64)[0], to_host(d, 64)[0]);
    (void)cudaGetLastError();
    NEED(start(b, 2, 32, 0, set_kernel, d, 6, 64));
    NEED(cudaStreamDestroy(b)); // what it holds still runs
    NEED(cudaStreamDestroy(a));
    NEED(cudaStreamDestroy(blocking));
    check(to_host(d, 64)[1] == 6, "work of a destroyed stream");
    for (cudaEvent_t event : {ready, first, last, never}) NEED(cudaEventDestroy(event));
    NEED(cudaFree(d));
    NEED(cudaFree(e));
}

// Relaxed: other streams go on, memory may be had; but the stream that is captured is still not asked, waited for or given what a graph cannot
// hold.
static void test_relaxed_capture(cudaStream_t a, cudaStream_t b, cudaEvent_t event, float *d, float *e) {
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    float host[32] = {};
    void *p = nullptr;
    NEED(cudaMemset(d, 0, 128));
    NEED(cudaMemset(e, 0, 128));
    NEED(cudaDeviceSynchronize());
    NEED(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
    NEED(start(a, 1, 32, 0, add_kernel, d, 1, 32));
    NEED(cudaMalloc(&p, 4));
    NEED(start(b, 1, 32, 0, add_kernel, e, 5, 32));
    NEED(cudaEventRecord(event, b));
    while (cudaEventQuery(event) == cudaErrorNotReady) {
    } // another stream's
    NEED(cudaStreamSynchronize(b));
    NEED(cudaMemsetAsync(e, 0, 64, a));
    NEED(cudaStreamEndCapture(a, &graph));
    NEED(cudaGraphInstantiate(&executable, graph, 0));
    NEED(cudaGraphDestroy(graph));
    check(to_host(d, 32)[0] == 0 && to_host(e, 32)[0] == 5, "the stream beside it has run, what was captured has not");
    NEED(cudaGraphLaunch(executable, a));
    NEED(cudaGraphExecDestroy(executable)); // what is launched still runs
    NEED(cudaStreamSynchronize(a));
    check(to_host(d, 32)[0] == 1 && to_host(e, 32)[15] == 0 && to_host(e, 32)[16] == 5, "the graph has run once");
    const struct {
        const char *what;
        std::function<cudaError_t()> call;
    } refused[] = {
        {"cudaStreamQuery", [&] { return cudaStreamQuery(a); }},
        {"cudaStreamSynchronize", [&] { return cudaStreamSynchronize(a); }},
        {"cudaDeviceSynchronize", [&] { return cudaDeviceSynchronize(); }},
        {"a copy from pageable memory", [&] { return cudaMemcpyAsync(d, host, 128, cudaMemcpyHostToDevice, a); }},
        {"a copy to pageable memory", [&] { return cudaMemcpyAsync(host, d, 128, cudaMemcpyDeviceToHost, a); }},
        {"cudaMallocAsync", [&] { return cudaMallocAsync(&p, 4, a); }},
        {"cudaFreeAsync", [&] { return cudaFreeAsync(p, a); }},
    };
    for (const auto &one : refused) {
        NEED(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
        check(one.call() == cudaErrorStreamCaptureUnsupported, "%s in a relaxed capture", one.what);
        check(cudaStreamEndCapture(a, &graph) == cudaErrorStreamCaptureInvalidated, "%s ends it", one.what);
    }
    NEED(cudaStreamBeginCapture(a, cudaStreamCaptureModeRelaxed));
    NEED(cudaEventRecord(event, a));
    check(cudaEventQuery(event) == cudaErrorCapturedEvent, "an event of the capture");
    NEED(cudaStreamEndCapture(a, &graph));
    NEED(cudaGraphDestroy(graph));
    (void)cudaGetLastError();
    NEED(cudaFree(p));
    NEED(cudaDeviceSynchronize());
}

static void test_graphs() {
    cudaStream_t a = stream_open(), b = stream_open();
    cudaEvent_t fork = event_open(), joined = event_open();
    float *d = device_new<float>(32), *e = device_new<float>(32), *pinned = pinned_new<float>(32);
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    NEED(cudaMemset(d, 0, 128));
    NEED(cudaDeviceSynchronize());
    NEED(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    NEED(cudaMemcpyAsync(e, pinned, 128, cudaMemcpyHostToDevice, a));
    NEED(cudaEventRecord(fork, a));
    NEED(cudaStreamWaitEvent(b, fork, 0));
    NEED(start(b, 1, 32, 0, add_kernel, e, 1, 32));
    NEED(start(a, 1, 32, 0, add_kernel, d, 10, 32));
    NEED(cudaEventRecord(joined, b));
    NEED(cudaStreamWaitEvent(a, joined, 0));
    NEED(start(a, 1, 32, 0, join_kernel, d, e, 32));
    cudaStreamCaptureStatus status;
    NEED(cudaStreamIsCapturing(b, &status));
    check(status == cudaStreamCaptureStatusActive, "the other stream is captured, too");
    NEED(cudaStreamEndCapture(a, &graph));
    size_t nodes = 0;
    NEED(cudaGraphGetNodes(graph, nullptr, &nodes));
    check(nodes == 4, "%zu nodes", nodes);
    NEED(cudaGraphInstantiate(&executable, graph, 0));
    NEED(cudaGraphDestroy(graph));
    check(to_host(d, 32)[0] == 0, "capturing runs nothing");
    float want = 0;
    for (int step = 0; step < 3; step++) {
        for (int i = 0; i < 32; i++) pinned[i] = (float)step; // read at the launch's turn
        NEED(cudaGraphLaunch(executable, a));
        NEED(cudaStreamSynchronize(a));
        want += 10 + (float)step + 1;
    }
    check(to_host(d, 32)[31] == want, "three launches: %g, wanted %g", to_host(d, 32)[31], want);
    NEED(cudaGraphLaunch(executable, a)); // twice without a wait between
    NEED(cudaGraphLaunch(executable, a));
    check(to_host(d, 32)[31] == want + 26, "two launches in a row: %g, wanted %g", to_host(d, 32)[31], want + 26);
    NEED(cudaGraphExecDestroy(executable));
    // what a capture does not allow ends it
    void *p;
    NEED(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    check(cudaMalloc(&p, 4) == cudaErrorStreamCaptureUnsupported, "cudaMalloc in a capture");
    check(cudaStreamEndCapture(a, &graph) == cudaErrorStreamCaptureInvalidated && graph == nullptr, "the capture is invalid");
    NEED(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    check(cudaStreamSynchronize(a) == cudaErrorStreamCaptureUnsupported, "waiting in a capture");
    check(cudaStreamEndCapture(a, &graph) == cudaErrorStreamCaptureInvalidated, "that capture, too");
    NEED(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    NEED(cudaEventRecord(fork, a));
    NEED(cudaStreamWaitEvent(b, fork, 0));
    NEED(start(b, 1, 32, 0, add_kernel, e, 1, 32));
    check(cudaStreamEndCapture(a, &graph) == cudaErrorStreamCaptureUnjoined, "a stream that was not joined");
    check(cudaStreamBeginCapture(nullptr, cudaStreamCaptureModeGlobal) == cudaErrorStreamCaptureUnsupported, "capture of the legacy stream");
    NEED(cudaEventRecord(joined, b));
    NEED(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    check(cudaEventQuery(joined) == cudaErrorStreamCaptureUnsupported, "cudaEventQuery in a capture");
    check(cudaStreamEndCapture(a, &graph) == cudaErrorStreamCaptureInvalidated, "cudaEventQuery ends it");
    NEED(cudaStreamBeginCapture(a, cudaStreamCaptureModeGlobal));
    check(cudaStreamWaitEvent(a, joined, 0) == cudaErrorStreamCaptureIsolation, "an event from outside");
    check(cudaStreamEndCapture(a, &graph) == cudaErrorStreamCaptureInvalidated, "invalid after it");
    (void)cudaGetLastError();
    NEED(cudaDeviceSynchronize());
    test_relaxed_capture(a, b, joined, d, e);
    for (cudaEvent_t event : {fork, joined}) NEED(cudaEventDestroy(event));
    for (cudaStream_t stream : {a, b}) NEED(cudaStreamDestroy(stream));
    NEED(cudaFree(d));
    NEED(cudaFree(e));
    NEED(cudaFreeHost(pinned));
}

static void test_runtime() {
    test_limits();
    test_pointers();
    test_copies();
    test_large_buffer();
    test_streams();
    test_graphs();
}

#endif
