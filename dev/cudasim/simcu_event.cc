// simcu_event.cc: events: marks in streams that other streams and the host wait for. Their times come from a simulated clock, so that a choice made
// by timing is the same in every run; they say nothing about speed.
#include "simcu_stream.h" // Event
#include <set>            // std::set

namespace simcu {
namespace {

typedef std::shared_ptr<Event> Handle; // what a cudaEvent_t points to; operations hold the event too
std::set<Handle *> &handles = *new std::set<Handle *>;

const Handle &event_of(cudaEvent_t event) {
    const auto at = handles.find((Handle *)event);
    if (at == handles.end()) fail(nullptr, 0, "an event is used that does not exist or was destroyed");
    return **at;
}

} // namespace

void push_record(Stream *stream, const std::shared_ptr<Event> &event) {
    const uint64_t number = ++event->issued;
    push(stream, {[event, number] {
                      event->done = number, event->time_ns = clock_ns();
                      race_event(event.get(), true);
                      return true;
                  },
                  "event record",
                  {},
                  {}});
}
void push_wait(Stream *stream, const std::shared_ptr<Event> &event) {
    const uint64_t number = event->issued; // of the last record so far
    push(stream, {[event, number] {
                      if (event->done < number) return false;
                      race_event(event.get(), false);
                      return true;
                  },
                  "event wait",
                  [] { return std::string("the event's record"); },
                  {}});
}

} // namespace simcu

using namespace simcu;
extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    if (flags & ~(unsigned)(cudaEventBlockingSync | cudaEventDisableTiming | cudaEventInterprocess)) return set_error(cudaErrorInvalidValue);
    Handle *handle = new Handle(new Event);
    (*handle)->timing = (flags & cudaEventDisableTiming) == 0;
    handles.insert(handle);
    *event = (cudaEvent_t)handle;
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    (void)event_of(event);
    handles.erase((Handle *)event);
    delete (Handle *)event;
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned) {
    const Handle &event = event_of(handle);
    Stream *s = stream_of(stream);
    if (s->capture != nullptr) {
        const int index = s->capture->events++;
        event->capture = s->capture, event->captured_index = index;
        return capture_add(s, Node::RECORD, index, {});
    }
    event->capture = nullptr;
    push_record(s, event);
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }

// An event that was never recorded is not waited for.
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
    const Handle &event = event_of(handle);
    Stream *s = stream_of(stream);
    if (event->capture != nullptr && capture_exists(event->capture)) {
        if (s->capture == nullptr) { // the stream joins the capture
            s->capture = event->capture;
            s->capture->members.push_back(s);
        }
        if (s->capture != event->capture) return set_error(cudaErrorStreamCaptureMerge);
        return capture_add(s, Node::WAIT, event->captured_index, {});
    }
    if (s->capture != nullptr) {
        note("cudaStreamWaitEvent: the event was recorded outside the capture");
        s->capture->invalid = true;
        return set_error(cudaErrorStreamCaptureIsolation);
    }
    push_wait(s, event);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
    const Handle event = event_of(handle);
    if (event->capture != nullptr) return set_error(cudaErrorCapturedEvent);
    const uint64_t number = event->issued;
    wait_until("cudaEventSynchronize", [=] { return event->done >= number; });
    race_host_event(event.get());
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
    const Handle &event = event_of(handle);
    if (event->capture != nullptr) return set_error(cudaErrorCapturedEvent);
    const cudaError_t allowed = forbidden_in_capture("cudaEventQuery");
    if (allowed != cudaSuccess) return allowed;
    if (event->done < event->issued) progress_asked("cudaEventQuery");
    if (event->done < event->issued) return set_error(cudaErrorNotReady);
    race_host_event(event.get());
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    const Handle &a = event_of(from), &b = event_of(to);
    if (!a->timing || !b->timing || a->issued == 0 || b->issued == 0) return set_error(cudaErrorInvalidResourceHandle);
    if (a->done < a->issued || b->done < b->issued) return set_error(cudaErrorNotReady);
    *ms = (float)((b->time_ns - a->time_ns) * 1e-6);
    return cudaSuccess;
}
}
