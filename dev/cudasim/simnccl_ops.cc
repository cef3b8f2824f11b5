// simnccl_ops.cc: collectives, messages and groups of the simulated NCCL. Every rank sends its part to whoever needs it; who receives reduces
// locally, in the order of ranks (bf16, fp16 and fp8 in fp32, rounded once), so that all ranks get the same bits. Rings, trees and their speed are
// not simulated.
//
// Messages move while a host waits for a stream or an event, or asks for one; not in between. Operations of a communicator run in the order of
// issue, also on different streams. A send is complete when its receive has begun: what deadlocks without buffers deadlocks here, and after
// SIMCU_TIMEOUT seconds one line says who waits for whom. Ranks that disagree about an operation end the job with a line that names both.
#include "simnccl.h"   // ncclComm
#include <cstring>     // memcpy
#include <cuda_bf16.h> // __nv_bfloat16
#include <cuda_fp16.h> // __half
#include <cuda_fp8.h>  // __nv_fp8_e4m3

namespace simcu::nccl {
namespace {

enum Kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, REDUCE, ALL_TO_ALL, GATHER, SCATTER, SEND, RECEIVE };
const char *const kind_names[] = {"ncclAllReduce", "ncclReduceScatter", "ncclAllGather", "ncclBroadcast", "ncclReduce",
                                  "ncclAlltoAll",  "ncclGather",        "ncclScatter",   "ncclSend",      "ncclRecv"};

struct Call {
    Kind kind;
    const void *in;
    void *out;
    uint64_t count; // elements, as the caller gave it
    ncclDataType_t type;
    ncclRedOp_t reduction;
    int peer; // root, or the other end of a message
    ncclComm_t comm;
    cudaStream_t stream;
    size_t bytes() const;
};
struct Header { // in front of what is sent
    uint32_t kind, type;
    uint64_t count;
    uint32_t reduction;
    int32_t peer;
};

size_t type_bytes(ncclDataType_t type) {
    switch (type) {
    case ncclInt8:
    case ncclUint8:
    case ncclFloat8e4m3:
    case ncclFloat8e5m2: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    default: return 8;
    }
}
size_t Call::bytes() const { return count * type_bytes(type); }
bool reduces(Kind kind) { return kind == ALL_REDUCE || kind == REDUCE_SCATTER || kind == REDUCE; }
bool rooted(Kind kind) { return kind == BROADCAST || kind == REDUCE || kind == GATHER || kind == SCATTER; }

// ---------------------------------------------------------------------------- reductions

template <class Number> Number plus(Number a, Number b) {
    if constexpr (std::is_integral<Number>::value)
        return Number((uint64_t)a + (uint64_t)b); // wraps
    else
        return a + b;
}
template <class Storage, class Number> void reduce_as(void *out, const std::vector<const char *> &parts, size_t count, ncclRedOp_t op) {
    for (size_t i = 0; i < count; i++) {
        Number r = Number(((const Storage *)parts[0])[i]);
        for (size_t k = 1; k < parts.size(); k++) {
            const Number v = Number(((const Storage *)parts[k])[i]);
            if (op == ncclMax)
                r = v > r ? v : r;
            else if (op == ncclMin)
                r = v < r ? v : r;
            else if (op == ncclProd)
                r = r * v;
            else
                r = r + v;
        }
        if (op == ncclAvg) r = r / Number(parts.size());
        ((Storage *)out)[i] = Storage(r);
    }
}
void reduce(void *out, const std::vector<const char *> &parts, size_t count, ncclDataType_t type, ncclRedOp_t op) {
    switch (type) {
    case ncclInt8: reduce_as<int8_t, int8_t>(out, parts, count, op); break;
    case ncclUint8: reduce_as<uint8_t, uint8_t>(out, parts, count, op); break;
    case ncclInt32: reduce_as<int32_t, int32_t>(out, parts, count, op); break;
    case ncclUint32: reduce_as<uint32_t, uint32_t>(out, parts, count, op); break;
    case ncclInt64: reduce_as<int64_t, int64_t>(out, parts, count, op); break;
    case ncclUint64: reduce_as<uint64_t, uint64_t>(out, parts, count, op); break;
    case ncclFloat16: reduce_as<__half, float>(out, parts, count, op); break;
    case ncclBfloat16: reduce_as<__nv_bfloat16, float>(out, parts, count, op); break;
    case ncclFloat32: reduce_as<float, float>(out, parts, count, op); break;
    case ncclFloat64: reduce_as<double, double>(out, parts, count, op); break;
    case ncclFloat8e4m3: reduce_as<__nv_fp8_e4m3, float>(out, parts, count, op); break;
    default: reduce_as<__nv_fp8_e5m2, float>(out, parts, count, op);
    }
}

// ---------------------------------------------------------------------------- one operation

// Parts that come from others, and those that are on their way to them. A group of messages is one exchange.
struct Exchange {
    std::deque<uint64_t> turns; // of its launches that are in streams
    bool started = false;
    std::deque<Outgoing> out;
    std::vector<std::vector<char>> parts; // of each rank, with its header; empty: not here yet
};

std::vector<char> with_header(const Call &c, const void *data, size_t bytes) {
    const Header header = {(uint32_t)c.kind, (uint32_t)c.type, c.count, reduces(c.kind) ? (uint32_t)c.reduction : 0, rooted(c.kind) ? c.peer : -1};
    std::vector<char> message(sizeof header + bytes);
    memcpy(message.data(), &header, sizeof header);
    if (bytes > 0) memcpy(message.data() + sizeof header, data, bytes);
    return message;
}

std::string describe(const Header &h) {
    std::string text =
        std::string(h.kind <= RECEIVE ? kind_names[h.kind] : "?") + " of " + std::to_string(h.count) + " x type " + std::to_string(h.type);
    if (h.peer >= 0) text += ", root " + std::to_string(h.peer);
    if (reduces((Kind)h.kind)) text += ", reduction " + std::to_string(h.reduction);
    return text;
}

void check_header(const Call &c, int from, const std::vector<char> &message) {
    Header theirs, mine;
    memcpy(&theirs, message.data(), sizeof theirs);
    memcpy(&mine, with_header(c, nullptr, 0).data(), sizeof mine);
    if (c.kind == RECEIVE) mine.kind = SEND;
    const bool same = theirs.kind == mine.kind && theirs.count * type_bytes((ncclDataType_t)theirs.type) == mine.count * type_bytes(c.type) &&
                      theirs.reduction == mine.reduction && theirs.peer == mine.peer && (c.kind == RECEIVE || theirs.type == mine.type);
    if (!same)
        fail(nullptr, 0, "NCCL: ranks disagree: rank %d calls %s, rank %d calls %s", c.comm->rank, describe(mine).c_str(), from,
             describe(theirs).c_str());
}

// Does rank `to` need something of rank `from` in this operation?
bool sends(const Call &c, int from, int to) {
    switch (c.kind) {
    case BROADCAST:
    case SCATTER: return from == c.peer;
    case REDUCE:
    case GATHER: return to == c.peer;
    default: return true;
    }
}
// Which part of its input a rank sends to another: offset in parts of c.count.
size_t part_for(const Call &c, int to) {
    return c.kind == REDUCE_SCATTER || c.kind == ALL_TO_ALL || c.kind == SCATTER ? (size_t)to * c.bytes() : 0;
}
size_t in_bytes(const Call &c) {
    const bool many = c.kind == REDUCE_SCATTER || c.kind == ALL_TO_ALL || (c.kind == SCATTER && c.comm->rank == c.peer);
    const bool none = (c.kind == BROADCAST || c.kind == SCATTER) && c.comm->rank != c.peer;
    return none ? 0 : c.bytes() * (many ? (size_t)c.comm->size : 1);
}
size_t out_bytes(const Call &c) {
    const bool many = c.kind == ALL_GATHER || c.kind == ALL_TO_ALL || (c.kind == GATHER && c.comm->rank == c.peer);
    const bool none = (c.kind == REDUCE || c.kind == GATHER) && c.comm->rank != c.peer;
    return none ? 0 : c.bytes() * (many ? (size_t)c.comm->size : 1);
}

void start(const Call &c, Exchange *e) {
    const char *in = (const char *)c.in;
    range_note(in, in_bytes(c), false, kind_names[c.kind]);
    e->parts.assign((size_t)c.comm->size, {});
    for (int to = 0; to < c.comm->size; to++) {
        if (!sends(c, c.comm->rank, to)) continue;
        std::vector<char> message = with_header(c, in + part_for(c, to), c.bytes());
        if (to == c.comm->rank)
            e->parts[(size_t)to] = std::move(message);
        else
            send_bytes(&e->out, c.comm->world[(size_t)to], c.comm->context, COLLECTIVE, std::move(message), false);
    }
}

bool all_here(const Call &c, Exchange *e) {
    bool all = true;
    for (int from = 0; from < c.comm->size; from++) {
        std::vector<char> &part = e->parts[(size_t)from];
        if (!part.empty() || !sends(c, from, c.comm->rank)) continue;
        if (receive_bytes(c.comm->world[(size_t)from], c.comm->context, COLLECTIVE, &part))
            check_header(c, from, part);
        else
            all = false;
    }
    return all_sent(&e->out) && all;
}

void finish(const Call &c, const Exchange &e) {
    if (c.count == 0 || out_bytes(c) == 0) return;
    range_note(c.out, out_bytes(c), true, kind_names[c.kind]);
    std::vector<const char *> parts;
    for (const std::vector<char> &part : e.parts)
        if (!part.empty()) parts.push_back(part.data() + sizeof(Header));
    if (reduces(c.kind)) {
        reduce(c.out, parts, c.count, c.type, c.reduction);
        return;
    }
    for (size_t i = 0; i < parts.size(); i++) memcpy((char *)c.out + i * c.bytes(), parts[i], c.bytes());
}

std::string missing(const Call &c, const Exchange &e) {
    std::string text = "rank " + std::to_string(c.comm->rank) + " of " + std::to_string(c.comm->size) + " (operation " +
                       std::to_string(c.comm->done + 1) + " of the communicator, " + std::to_string(c.bytes()) + " bytes) for rank(s)";
    for (int from = 0; from < c.comm->size; from++)
        if (e.started && e.parts[(size_t)from].empty() && sends(c, from, c.comm->rank)) text += " " + std::to_string(from);
    return e.started ? text : text + ": its turn, another operation of the communicator comes first";
}

// Runs in the communicator's order. Its place in it is taken when the operation enters a stream: every launch of a graph takes a new one.
template <class Run> bool in_turn(ncclComm_t comm, Exchange *e, Run run) {
    if (!comm->aborted) {
        if (comm->done != e->turns.front()) return false;
        race_event(comm, false); // after the communicator's operations before, also of other streams
        if (!run()) return false;
        race_event(comm, true);
    }
    static std::deque<Outgoing> &abandoned = *new std::deque<Outgoing>; // MPI may still read them
    for (Outgoing &o : e->out) abandoned.push_back(std::move(o));
    e->turns.pop_front();
    e->started = false, e->parts.clear(), e->out.clear();
    comm->done++;
    return true;
}

ncclResult_t issue(const Call &c) {
    const auto e = std::make_shared<Exchange>();
    const cudaError_t result = enqueue(
        c.stream, kind_names[c.kind],
        [=] {
            return in_turn(c.comm, e.get(), [&] {
                if (!e->started) start(c, e.get());
                e->started = true;
                if (!all_here(c, e.get())) return false;
                finish(c, *e);
                return true;
            });
        },
        [=] { return missing(c, *e); }, [=] { e->turns.push_back(c.comm->issued++); });
    return result == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

// ---------------------------------------------------------------------------- messages

void start_messages(const std::vector<Call> &calls, Exchange *e) {
    e->parts.assign(calls.size(), {});
    for (const Call &c : calls) {
        if (c.kind != SEND) continue;
        range_note(c.in, c.bytes(), false, "ncclSend");
        std::vector<char> message = with_header(c, c.in, c.bytes());
        if (c.peer != c.comm->rank) {
            send_bytes(&e->out, c.comm->world[(size_t)c.peer], c.comm->context, MESSAGE, std::move(message), true);
            continue;
        }
        for (size_t i = 0; i < calls.size(); i++) { // to itself: the first receive that has nothing yet
            if (calls[i].kind != RECEIVE || calls[i].peer != c.peer || !e->parts[i].empty()) continue;
            check_header(calls[i], c.peer, message);
            e->parts[i] = std::move(message);
            break;
        }
    }
}

bool messages_here(const std::vector<Call> &calls, Exchange *e) {
    bool all = true;
    std::vector<bool> waiting((size_t)calls[0].comm->size); // messages of a peer come in order
    for (size_t i = 0; i < calls.size(); i++) {
        const Call &c = calls[i];
        if (c.kind != RECEIVE || !e->parts[i].empty()) continue;
        if (c.peer != c.comm->rank && !waiting[(size_t)c.peer] &&
            receive_bytes(c.comm->world[(size_t)c.peer], c.comm->context, MESSAGE, &e->parts[i])) {
            check_header(c, c.peer, e->parts[i]);
            continue;
        }
        waiting[(size_t)c.peer] = true, all = false;
    }
    return all_sent(&e->out) && all;
}

void finish_messages(const std::vector<Call> &calls, const Exchange &e) {
    for (size_t i = 0; i < calls.size(); i++) {
        const Call &c = calls[i];
        if (c.kind != RECEIVE) continue;
        range_note(c.out, c.bytes(), true, "ncclRecv");
        if (c.bytes() > 0) memcpy(c.out, e.parts[i].data() + sizeof(Header), c.bytes());
    }
}

std::string missing_messages(const std::vector<Call> &calls, const Exchange &e) {
    std::string text = "rank " + std::to_string(calls[0].comm->rank) + " of " + std::to_string(calls[0].comm->size) + " for";
    for (size_t i = 0; i < calls.size(); i++) {
        if (calls[i].kind == RECEIVE && (!e.started || e.parts[i].empty()))
            text += " " + std::to_string(calls[i].bytes()) + " bytes from rank " + std::to_string(calls[i].peer) + ",";
        if (calls[i].kind == SEND && !e.out.empty())
            text += " rank " + std::to_string(calls[i].peer) + " to receive " + std::to_string(calls[i].bytes()) + " bytes,";
    }
    text.pop_back();
    return text;
}

ncclResult_t issue_messages(const std::vector<Call> &calls) {
    const auto e = std::make_shared<Exchange>();
    ncclComm_t comm = calls[0].comm;
    const cudaError_t result = enqueue(
        calls[0].stream, calls.size() > 1 ? "ncclSend/ncclRecv group" : kind_names[calls[0].kind],
        [=] {
            return in_turn(comm, e.get(), [&] {
                if (!e->started) start_messages(calls, e.get());
                e->started = true;
                if (!messages_here(calls, e.get())) return false;
                finish_messages(calls, *e);
                return true;
            });
        },
        [=] { return missing_messages(calls, *e); }, [=] { e->turns.push_back(comm->issued++); });
    return result == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError;
}

// ---------------------------------------------------------------------------- groups

int depth;
std::vector<Call> &group = *new std::vector<Call>;
std::vector<ncclComm_t> &group_setups = *new std::vector<ncclComm_t>;

// A non-blocking communicator's first operations wait for a poll, as the real one's do for its connections.
ncclResult_t give(ncclComm_t comm, std::function<ncclResult_t()> issue_it) {
    if (comm->blocking || comm->used) return issue_it();
    comm->held.push_back(std::move(issue_it));
    comm->state = ncclInProgress;
    return ncclInProgress;
}

ncclResult_t flush_group() {
    std::vector<Call> calls;
    calls.swap(group);
    ncclResult_t result = ncclSuccess;
    std::vector<ncclComm_t> used;
    while (!calls.empty()) { // by communicator: its messages as one operation, its collectives in order
        ncclComm_t comm = calls[0].comm;
        std::vector<Call> messages, rest;
        for (const Call &c : calls) {
            if (c.comm != comm)
                rest.push_back(c);
            else if (c.kind >= SEND)
                messages.push_back(c);
            else if (const ncclResult_t r = give(comm, [c] { return issue(c); }); r != ncclSuccess)
                result = r;
        }
        if (!messages.empty())
            if (const ncclResult_t r = give(comm, [messages] { return issue_messages(messages); }); r != ncclSuccess) result = r;
        used.push_back(comm);
        calls.swap(rest);
    }
    for (ncclComm_t comm : used) comm->used = true;
    return result;
}

bool overlap_badly(const Call &c) { // not the same and not apart
    if (c.kind == ALL_GATHER || c.kind == REDUCE_SCATTER || c.kind == GATHER || c.kind == SCATTER || in_bytes(c) == 0 || out_bytes(c) == 0)
        return false;
    const char *in = (const char *)c.in, *out = (const char *)c.out;
    return in != out && in < out + out_bytes(c) && out < in + in_bytes(c);
}

ncclResult_t operation(const Call &c) {
    const char *name = kind_names[c.kind];
    const ncclResult_t usable = ready(c.comm, name);
    if (usable != ncclSuccess) return usable;
    if ((int)c.type < 0 || (int)c.type >= ncclNumTypes) return refuse(ncclInvalidArgument, "%s: type %d", name, (int)c.type);
    if (reduces(c.kind) && (int)c.reduction >= ncclNumOps) return refuse(ncclInvalidArgument, "%s: reduction %d", name, (int)c.reduction);
    if (c.peer < 0 || c.peer >= c.comm->size) return refuse(ncclInvalidArgument, "%s: root or peer %d of %d ranks", name, c.peer, c.comm->size);
    const size_t in = c.kind == RECEIVE ? 0 : in_bytes(c), out = c.kind == SEND ? 0 : out_bytes(c);
    if (in > 0 && !is_device(c.in, in))
        return refuse(ncclInvalidArgument, "%s: the input (%zu bytes at %p) is not in one device buffer", name, in, c.in);
    if (out > 0 && !is_device(c.out, out))
        return refuse(ncclInvalidArgument, "%s: the output (%zu bytes at %p) is not in one device buffer", name, out, c.out);
    if (c.kind < SEND && overlap_badly(c)) return refuse(ncclInvalidArgument, "%s: input and output overlap", name);
    group.push_back(c);
    return depth > 0 ? ncclSuccess : flush_group();
}

} // namespace

bool in_group() { return depth > 0; }
void group_setup(ncclComm_t comm) { group_setups.push_back(comm); }

} // namespace simcu::nccl

using namespace simcu;
using namespace simcu::nccl;
extern "C" {

ncclResult_t ncclGroupStart() {
    depth++;
    return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
    if (depth == 0) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--depth > 0) return ncclSuccess;
    std::vector<ncclComm_t> blocking;
    ncclResult_t result = ncclSuccess;
    for (ncclComm_t comm : group_setups) {
        if (comm->blocking)
            blocking.push_back(comm);
        else
            result = ncclInProgress;
    }
    group_setups.clear();
    if (!blocking.empty()) wait_setups(blocking, "ncclGroupEnd");
    const ncclResult_t flushed = flush_group();
    return flushed != ncclSuccess ? flushed : result;
}

ncclResult_t ncclAllReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return operation({ALL_REDUCE, in, out, count, type, op, 0, comm, stream});
}
ncclResult_t ncclReduceScatter(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
    return operation({REDUCE_SCATTER, in, out, count, type, op, 0, comm, stream});
}
ncclResult_t ncclAllGather(const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return operation({ALL_GATHER, in, out, count, type, ncclSum, 0, comm, stream});
}
ncclResult_t ncclBroadcast(const void *in, void *out, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return operation({BROADCAST, in, out, count, type, ncclSum, root, comm, stream});
}
ncclResult_t ncclBcast(void *buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}
ncclResult_t ncclReduce(const void *in, void *out, size_t count, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t comm,
                        cudaStream_t stream) {
    return operation({REDUCE, in, out, count, type, op, root, comm, stream});
}
ncclResult_t ncclAlltoAll(const void *in, void *out, size_t count, ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
    return operation({ALL_TO_ALL, in, out, count, type, ncclSum, 0, comm, stream});
}
ncclResult_t ncclGather(const void *in, void *out, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return operation({GATHER, in, out, count, type, ncclSum, root, comm, stream});
}
ncclResult_t ncclScatter(const void *in, void *out, size_t count, ncclDataType_t type, int root, ncclComm_t comm, cudaStream_t stream) {
    return operation({SCATTER, in, out, count, type, ncclSum, root, comm, stream});
}
ncclResult_t ncclSend(const void *in, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return operation({SEND, in, nullptr, count, type, ncclSum, peer, comm, stream});
}
ncclResult_t ncclRecv(void *out, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream) {
    return operation({RECEIVE, nullptr, out, count, type, ncclSum, peer, comm, stream});
}
}
