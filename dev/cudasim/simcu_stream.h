// simcu_stream.h: streams, events and captures, for the files that implement them (simcu_stream.cc, simcu_event.cc, simcu_graph.cc, simcu_copy.cc).
#pragma once
#include "simcu_rt.h" // Operation
#include <deque>      // std::deque
#include <memory>     // std::shared_ptr

namespace simcu {

struct Capture;
struct Stream {
    std::deque<Operation> queue;
    bool blocking; // ordered with the legacy stream
    int id, priority;
    unsigned flags;
    bool destroyed = false; // goes when its queue is empty
    Capture *capture = nullptr;
};

struct Event {
    uint64_t issued = 0, done = 0; // records
    double time_ns = 0;
    bool timing = true;
    Capture *capture = nullptr; // the last record was captured there,
    int captured_index = 0;     // as this event
};

// What a stream does between begin and end of a capture. Every stream that takes part has a slot.
struct Node {
    enum Kind { RUN, RECORD, WAIT } kind;
    int slot, event;
    Operation operation;
};
struct Capture {
    cudaStreamCaptureMode mode;
    Stream *origin;
    std::vector<Stream *> members; // slot 0: the origin
    std::vector<Node> nodes;
    int events = 0;
    bool invalid = false;
};

Stream *stream_of(cudaStream_t stream); // fails when it was destroyed
Stream *legacy_stream();
Stream *stream_new(bool blocking, unsigned flags, int priority);
void stream_delete_when_idle(Stream *stream);
bool stream_idle(const Stream *stream);
void push(Stream *stream, Operation operation); // behind what is queued, whatever is captured
void push_record(Stream *stream, const std::shared_ptr<Event> &event);
void push_wait(Stream *stream, const std::shared_ptr<Event> &event);
cudaError_t capture_add(Stream *stream, Node::Kind kind, int event, Operation operation);
int capture_slot(const Capture *capture, const Stream *stream);
bool any_capture();
bool capture_exists(const Capture *capture);
cudaError_t refused_by_capture(Stream *stream, const char *call); // cudaSuccess, or the error where this stream is captured, in every mode

} // namespace simcu
