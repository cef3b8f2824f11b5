// simcu_stream.cc: streams as queues that run when the host waits or asks. Knows no kernels: an operation is a function. Events are in
// simcu_event.cc.
//
// Order: what a stream holds runs in order; among streams the settings decide, with a seed of their own, one operation at a time. The legacy stream
// waits for every blocking stream's earlier operations, and they for its; non-blocking streams do not care. Nothing runs unless the host is in a
// call that waits (or asks: cudaStreamQuery, cudaEventQuery): a missing wait shows. SIMCU_STREAMS=eager runs everything at issue.
#include "simcu_stream.h" // Stream
#include <algorithm>      // std::find
#include <chrono>         // std::chrono::steady_clock
#include <cstdio>         // fprintf
#include <sched.h>        // sched_yield

namespace simcu {
namespace {

std::vector<Stream *> &streams = *new std::vector<Stream *>; // [0]: legacy
uint64_t issued;
int stream_ids;
double now_ns;

// Ordered behind an operation of the legacy stream or of a blocking one that has not run?
bool held_back(const Stream *s) {
    const uint64_t number = s->queue.front().number;
    if (s != streams[0]) return s->blocking && !streams[0]->queue.empty() && streams[0]->queue.front().number < number;
    for (const Stream *other : streams)
        if (other != s && other->blocking && !other->queue.empty() && other->queue.front().number < number) return true;
    return false;
}

std::vector<int> ordered_with(const Stream *s) {
    if (s != streams[0]) return s->blocking ? std::vector<int>{0} : std::vector<int>{};
    std::vector<int> ids;
    for (const Stream *other : streams)
        if (other->blocking) ids.push_back(other->id);
    return ids;
}

bool run_front(Stream *s) {
    Operation &operation = s->queue.front();
    race_operation(s->id, operation.host, ordered_with(s), operation.what, &operation.race_index);
    if (!operation.run()) return false;
    now_ns += 2000; // the least that anything takes
    s->queue.pop_front();
    if (s->destroyed && s->queue.empty()) {
        streams.erase(std::find(streams.begin(), streams.end(), s));
        delete s;
    }
    return true;
}

bool pending() {
    for (const Stream *s : streams)
        if (!s->queue.empty()) return true;
    return false;
}

[[noreturn]] void hang(const char *call, const std::function<std::string()> &waits_for) {
    fprintf(stderr, "simcu: error: hang: nothing moved for %d s; the host waits in %s", settings().timeout_s, call);
    if (waits_for) fprintf(stderr, " for %s", waits_for().c_str());
    for (const Stream *s : streams) {
        if (s->queue.empty()) continue;
        const Operation &front = s->queue.front();
        fprintf(stderr, "; stream %d is in %s", s->id, front.what);
        if (held_back(s))
            fprintf(stderr, " (behind the legacy stream or a blocking one)");
        else if (front.waits_for)
            fprintf(stderr, ", which waits for %s", front.waits_for().c_str());
        if (s->queue.size() > 1) fprintf(stderr, ", %zu more behind it", s->queue.size() - 1);
    }
    fprintf(stderr, "\n");
    end_process(EXIT_HANG);
}

} // namespace

// The host asks and asks: after the timeout, and many questions in a row, that is a hang, too.
void progress_asked(const char *call) {
    typedef std::chrono::steady_clock Time;
    static Time::time_point moved;
    static int idle;
    if (progress() || !pending()) {
        idle = 0;
        return;
    }
    if (idle++ == 0) moved = Time::now();
    if (idle > 1000 && Time::now() - moved > std::chrono::seconds(settings().timeout_s)) hang(call, {});
    sched_yield();
}

double clock_ns() { return now_ns; }
void advance_clock(double ns) { now_ns += ns; }

Stream *stream_new(bool blocking, unsigned flags, int priority) {
    Stream *s = new Stream;
    s->blocking = blocking, s->flags = flags, s->priority = priority, s->id = stream_ids++;
    streams.push_back(s);
    return s;
}
Stream *legacy_stream() {
    if (streams.empty()) (void)stream_new(true, cudaStreamDefault, 0);
    return streams[0];
}
bool stream_idle(const Stream *stream) { return stream->queue.empty(); }
void stream_delete_when_idle(Stream *s) {
    if (s->queue.empty()) {
        streams.erase(std::find(streams.begin(), streams.end(), s));
        delete s;
    } else {
        s->destroyed = true;
    }
}

Stream *stream_of(cudaStream_t handle) {
    Stream *legacy = legacy_stream();
    if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread) return legacy;
    Stream *s = (Stream *)handle;
    if (std::find(streams.begin(), streams.end(), s) == streams.end() || s->destroyed)
        fail(nullptr, 0, "a stream is used that does not exist or was destroyed");
    return s;
}

bool progress() {
    std::vector<Stream *> able;
    for (Stream *s : streams)
        if (!s->queue.empty() && !held_back(s)) able.push_back(s);
    if (able.empty()) return false;
    const size_t count = able.size();
    const Order order = settings().streams;
    const size_t first = order == Order::RANDOM ? stream_random64() % count : order == Order::REVERSE ? count - 1 : 0;
    device_open();
    bool moved = false;
    for (size_t i = 0; i < count && !moved; i++) moved = run_front(able[(first + i) % count]);
    device_close();
    return moved;
}

void wait_until(const char *call, const std::function<bool()> &done, const std::function<std::string()> &waits_for) {
    if (done()) return;
    typedef std::chrono::steady_clock Time;
    Time::time_point moved = Time::now();
    bool idle = false;
    device_open();
    while (!done()) {
        if (progress()) {
            idle = false;
            continue;
        }
        if (!pending() && !waits_for) fail(nullptr, 0, "%s: the host waits for work that was never issued", call);
        const Time::time_point now = Time::now();
        if (!idle) moved = now;
        idle = true;
        if (now - moved > std::chrono::seconds(settings().timeout_s)) hang(call, waits_for);
        sched_yield();
    }
    device_close();
}

void push(Stream *s, Operation operation) {
    operation.host = race_host_clock();
    operation.number = ++issued;
    operation.race_index = 0;
    if (operation.on_issue) operation.on_issue();
    s->queue.push_back(std::move(operation));
    if (settings().eager_streams) wait_until("a launch (eager)", [s] { return s->queue.empty(); });
}

cudaError_t enqueue(cudaStream_t handle, const char *what, std::function<bool()> run, std::function<std::string()> waits_for,
                    std::function<void()> on_issue) {
    Stream *s = stream_of(handle);
    Operation operation = {std::move(run), what, std::move(waits_for), std::move(on_issue)};
    if (s->capture != nullptr) return capture_add(s, Node::RUN, 0, std::move(operation));
    if (s->blocking && any_capture() && s == legacy_stream()) { // it would wait for the capturing stream, if that is a blocking one
        for (const Stream *other : streams)
            if (other->capture != nullptr && other->blocking) return other->capture->invalid = true, set_error(cudaErrorStreamCaptureImplicit);
    }
    push(s, std::move(operation));
    return cudaSuccess;
}

cudaError_t device_synchronize(const char *call) {
    wait_until(call, [] { return !pending(); });
    race_host_waited(-1);
    return cudaSuccess;
}

} // namespace simcu

using namespace simcu;
extern "C" {

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    if (flags != cudaStreamDefault && flags != cudaStreamNonBlocking) return set_error(cudaErrorInvalidValue);
    (void)legacy_stream(); // the first in the list
    *stream = (cudaStream_t)stream_new(flags == cudaStreamDefault, flags, std::max(-5, std::min(0, priority)));
    return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreateWithPriority(stream, flags, 0); }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, cudaStreamDefault, 0); }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = stream_of(stream)->priority;
    return cudaSuccess;
}
cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) {
    *flags = stream_of(stream)->flags;
    return cudaSuccess;
}
// Returns at once; the stream goes when what it holds has run.
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    Stream *s = stream_of(stream);
    if (s == legacy_stream()) return set_error(cudaErrorInvalidResourceHandle);
    if (s->capture != nullptr) s->capture->invalid = true;
    stream_delete_when_idle(s);
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    Stream *s = stream_of(stream);
    const cudaError_t allowed = refused_by_capture(s, "cudaStreamSynchronize");
    if (allowed != cudaSuccess) return allowed;
    wait_until("cudaStreamSynchronize", [s] { return s->queue.empty(); });
    race_host_waited(s->id);
    return cudaSuccess;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    Stream *s = stream_of(stream);
    const cudaError_t allowed = refused_by_capture(s, "cudaStreamQuery");
    if (allowed != cudaSuccess) return allowed;
    progress_asked("cudaStreamQuery");
    if (!s->queue.empty()) return set_error(cudaErrorNotReady);
    race_host_waited(s->id);
    return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
    const cudaError_t allowed = forbidden_in_capture("cudaDeviceSynchronize", true);
    if (allowed != cudaSuccess) return allowed;
    device_open();
    const cudaError_t result = device_synchronize("cudaDeviceSynchronize");
    memory_check_ends();
    device_close();
    return result;
}
// A function of the host, in its turn.
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    return enqueue(stream, "host function", [=] {
        function(data);
        return true;
    });
}
}
