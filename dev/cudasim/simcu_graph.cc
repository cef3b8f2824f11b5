// simcu_graph.cc: CUDA graphs: what streams were given between begin and end of a capture, launched as a whole as often as wanted. Graphs built
// node by node, updates and conditional nodes are not simulated.
//
// A graph keeps the order of every captured stream and the events between them; its launch plays them back on streams of its own.
#include "simcu_stream.h" // Capture
#include <algorithm>      // std::find

namespace simcu {
namespace {

std::vector<Capture *> &captures = *new std::vector<Capture *>;

struct Graph {
    std::vector<Node> nodes;
    int slots, events;
};
struct Executable {
    Graph graph;
    std::vector<Stream *> streams; // one per slot
    std::vector<std::shared_ptr<Event>> events;
    std::shared_ptr<Event> begin = std::make_shared<Event>();
    std::vector<std::shared_ptr<Event>> ends; // one per slot
};

// Every stream that joined must have been joined back: its last node is a record that another stream waits for.
bool all_joined(const Capture *capture) {
    for (size_t slot = 1; slot < capture->members.size(); slot++) {
        const Node *last = nullptr;
        for (const Node &node : capture->nodes)
            if (node.slot == (int)slot) last = &node;
        bool joined = false;
        for (const Node &node : capture->nodes)
            joined |=
                last != nullptr && last->kind == Node::RECORD && node.kind == Node::WAIT && node.slot != (int)slot && node.event == last->event;
        if (!joined) return false;
    }
    return true;
}

void end_capture(Capture *capture) {
    for (Stream *s : capture->members) s->capture = nullptr;
    captures.erase(std::find(captures.begin(), captures.end(), capture));
    delete capture;
}

} // namespace

bool any_capture() { return !captures.empty(); }
bool capture_exists(const Capture *capture) { return std::find(captures.begin(), captures.end(), capture) != captures.end(); }
int capture_slot(const Capture *capture, const Stream *stream) {
    return (int)(std::find(capture->members.begin(), capture->members.end(), stream) - capture->members.begin());
}
cudaError_t capture_add(Stream *stream, Node::Kind kind, int event, Operation operation) {
    Capture *capture = stream->capture;
    if (capture->invalid) return set_error(cudaErrorStreamCaptureInvalidated);
    capture->nodes.push_back({kind, capture_slot(capture, stream), event, std::move(operation)});
    return cudaSuccess;
}

cudaError_t refused_by_capture(Stream *stream, const char *call) {
    if (stream->capture == nullptr) return cudaSuccess;
    note("%s is not allowed on a stream that is captured", call);
    stream->capture->invalid = true;
    return set_error(cudaErrorStreamCaptureUnsupported);
}

cudaError_t forbidden_in_capture(const char *call, bool relaxed_too) {
    for (Capture *capture : captures) {
        if (capture->mode == cudaStreamCaptureModeRelaxed && !relaxed_too) continue;
        note("%s is not allowed while a stream is captured", call);
        capture->invalid = true;
        return set_error(cudaErrorStreamCaptureUnsupported);
    }
    return cudaSuccess;
}

} // namespace simcu

using namespace simcu;
extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode) {
    Stream *s = stream_of(stream);
    if (s == legacy_stream()) return set_error(cudaErrorStreamCaptureUnsupported);
    if (s->capture != nullptr) return set_error(cudaErrorIllegalState);
    Capture *capture = new Capture;
    capture->mode = mode, capture->origin = s, capture->members = {s};
    captures.push_back(capture);
    s->capture = capture;
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    *graph = nullptr;
    Capture *capture = stream_of(stream)->capture;
    if (capture == nullptr) return set_error(cudaErrorIllegalState);
    cudaError_t result = cudaSuccess;
    if (capture->origin != stream_of(stream))
        result = cudaErrorStreamCaptureUnmatched;
    else if (capture->invalid)
        result = cudaErrorStreamCaptureInvalidated;
    else if (!all_joined(capture))
        result = cudaErrorStreamCaptureUnjoined;
    if (result == cudaSuccess) *graph = (cudaGraph_t) new Graph{capture->nodes, (int)capture->members.size(), capture->events};
    end_capture(capture);
    return result == cudaSuccess ? result : set_error(result);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    const Capture *capture = stream_of(stream)->capture;
    *status = capture == nullptr ? cudaStreamCaptureStatusNone
              : capture->invalid ? cudaStreamCaptureStatusInvalidated
                                 : cudaStreamCaptureStatusActive;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long) {
    Executable *e = new Executable;
    e->graph = *(const Graph *)graph;
    (void)legacy_stream();
    for (int slot = 0; slot < e->graph.slots; slot++) {
        e->streams.push_back(stream_new(false, cudaStreamNonBlocking, 0));
        e->ends.push_back(std::make_shared<Event>());
    }
    for (int i = 0; i < e->graph.events; i++) e->events.push_back(std::make_shared<Event>());
    *executable = (cudaGraphExec_t)e;
    return cudaSuccess;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiate(executable, graph, flags);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    Executable *e = (Executable *)executable;
    Stream *s = stream_of(stream);
    if (s->capture != nullptr) {
        note("cudaGraphLaunch into a captured stream is not simulated");
        return set_error(cudaErrorNotSupported);
    }
    push_record(s, e->begin);
    for (Stream *slot : e->streams) push_wait(slot, e->begin);
    for (const Node &node : e->graph.nodes) {
        Stream *slot = e->streams[(size_t)node.slot];
        if (node.kind == Node::RUN)
            push(slot, node.operation);
        else if (node.kind == Node::RECORD)
            push_record(slot, e->events[(size_t)node.event]);
        else
            push_wait(slot, e->events[(size_t)node.event]);
    }
    for (size_t slot = 0; slot < e->streams.size(); slot++) {
        push_record(e->streams[slot], e->ends[slot]);
        push_wait(s, e->ends[slot]);
    }
    return cudaSuccess;
}

cudaError_t cudaGraphUpload(cudaGraphExec_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    if (nodes != nullptr) return set_error(cudaErrorNotSupported); // only their number
    *count = 0;
    for (const Node &node : ((const Graph *)graph)->nodes) *count += node.kind == Node::RUN;
    return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete (Graph *)graph;
    return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    Executable *e = (Executable *)executable;
    for (Stream *s : e->streams) stream_delete_when_idle(s);
    delete e;
    return cudaSuccess;
}
}
