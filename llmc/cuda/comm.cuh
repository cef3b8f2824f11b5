// comm.cuh: communication of the CUDA device: fills the table of llmc/comm_device.h with NCCL. Every group and every link between neighbours of a
// pipe has a communicator and a stream of its own; events order them with the compute stream. comm.h decides what comes here, counts, waits and
// watches.
//
// Order of sums. BF16, and the maximum of floating point (NCCL's may lose NaN), are exchanged (all-to-all), then reduced by a kernel in the order
// of ranks, in fp32: the bits that comm.h promises. Sums of F32 and F64 are NCCL's: the same on every rank, but in an order of its own.
#ifndef LLMC_CUDA_COMM_CUH
#define LLMC_CUDA_COMM_CUH

#include "llmc/comm_device.h"         // CommDevice, CommCall
#include "llmc/cuda/comm_kernels.cuh" // cuda_comm_sum
#include "llmc/cuda/memory.cuh"       // cuda_out_of_memory
#include "llmc/cuda/nccl.cuh"         // NcclGroup, nccl_settled

// One started operation.
struct CudaTicket {
    CudaTicket *next; // of its group's, or spare
    NcclGroup *group;
    CommCall call;
    cudaEvent_t ready;   // on the compute stream: where it was at the start
    cudaEvent_t done;    // on the group's stream: the end
    cudaEvent_t reached; // on the compute stream: just before it waits for the end
    bool begun;          // the group's stream waits for ready
    bool whole;          // the last piece was enqueued, though NCCL may still be at it
    bool issued;         // done is enqueued
    int64_t at;          // of a reduction in the order of ranks: elements of each part that are over
    bool exchanged;      // of the piece there: the parts
};

// Memory from comm_alloc.
struct CudaRange {
    CudaRange *next;
    char *base;
    size_t bytes;
    bool nccl; // from ncclMemAlloc
};

struct CudaComm {
    CudaDevice *device;
    NcclErrors errors;
    NcclGroup *whole;     // all ranks; nullptr when there is one
    NcclGroup *groups;    // a list
    CudaTicket *spare;    // a list
    CudaRange *ranges;    // a list
    size_t scratch_bytes; // of a group that reduces in the order of ranks
};

static CudaComm *cuda_comm_of_(void *state) { return (CudaComm *)state; }

// ----------------------------------------------------------------------------
// Memory

static void *cuda_comm_alloc(void *state, size_t bytes) {
    CudaComm *c = cuda_comm_of_(state);
    CudaRange *range = new CudaRange();
    void *base = nullptr;
    range->bytes = bytes + 64; // a pointer behind the last element is inside, too
    bool good;
#ifdef USE_NCCL
    range->nccl = c->whole != nullptr;
    if (range->nccl)
        good = ncclMemAlloc(&base, range->bytes) == ncclSuccess;
    else
#endif
        good = cudaMalloc(&base, range->bytes) == cudaSuccess;
    if (!good) cuda_out_of_memory(range->bytes);
    range->base = (char *)base;
    range->next = c->ranges;
    c->ranges = range;
    cuda_check(cudaMemsetAsync(base, 0, range->bytes, c->device->compute), "cudaMemsetAsync");
    return base;
}

static void cuda_comm_release(void *state, void *pointer) {
    CudaComm *c = cuda_comm_of_(state);
    cuda_wait(c->device, c->device->compute);
    for (CudaRange **at = &c->ranges; *at != nullptr; at = &(*at)->next) {
        CudaRange *range = *at;
        if (range->base != pointer) continue;
        *at = range->next;
#ifdef USE_NCCL
        if (range->nccl)
            (void)nccl_good(&c->errors, ncclMemFree(pointer), "ncclMemFree");
        else
#endif
            cuda_check(cudaFree(pointer), "cudaFree");
        delete range;
        return;
    }
    cuda_check(cudaFree(pointer), "cudaFree"); // not from comm_alloc
}

static bool cuda_comm_owns(void *state, const void *pointer) {
    for (const CudaRange *range = cuda_comm_of_(state)->ranges; range != nullptr; range = range->next) {
        if ((const char *)pointer >= range->base && (const char *)pointer < range->base + range->bytes) return true;
    }
    cudaPointerAttributes attributes;
    cuda_check(cudaPointerGetAttributes(&attributes, pointer), "cudaPointerGetAttributes");
    return attributes.type == cudaMemoryTypeDevice;
}

static void cuda_comm_copy(void *state, void *to, const void *from, size_t bytes) {
    if (to == from || bytes == 0) return;
    cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, cuda_comm_of_(state)->device->compute), "cudaMemcpyAsync");
}

static void cuda_comm_fill(void *state, void *pointer, int value, size_t bytes) {
    cuda_check(cudaMemsetAsync(pointer, value, bytes, cuda_comm_of_(state)->device->compute), "cudaMemsetAsync");
}

static void cuda_comm_read(void *state, void *to_host, const void *from, size_t bytes) {
    cuda_read(cuda_comm_of_(state)->device, to_host, from, bytes);
}

// ----------------------------------------------------------------------------
// Groups

static NcclGroup *cuda_comm_group_(CudaComm *c, ncclComm_t comm, int rank, int size) {
    NcclGroup *group = new NcclGroup();
    group->comm = comm;
    group->rank = rank;
    group->size = size;
    group->following = c->groups;
    if (c->groups != nullptr) c->groups->before = group;
    c->groups = group;
    return group;
}

static void cuda_comm_id(void *state, char id[COMM_DEVICE_ID_BYTES]) { nccl_id(&cuda_comm_of_(state)->errors, id, COMM_DEVICE_ID_BYTES); }

static void *cuda_comm_open(void *state, const char id[COMM_DEVICE_ID_BYTES], int rank, int size) {
    CudaComm *c = cuda_comm_of_(state);
    ncclComm_t comm = nccl_open(&c->errors, id, rank, size);
    c->whole = comm != nullptr ? cuda_comm_group_(c, comm, rank, size) : nullptr;
    return c->whole;
}

static void *cuda_comm_split(void *state, int color, int key) {
    CudaComm *c = cuda_comm_of_(state);
    int rank = 0, size = 0;
    ncclComm_t comm = c->whole != nullptr ? nccl_split(&c->errors, c->whole->comm, color, key) : nullptr;
    if (comm == nullptr) return nullptr;
#ifdef USE_NCCL
    (void)nccl_good(&c->errors, ncclCommUserRank(comm, &rank), "ncclCommUserRank");
    (void)nccl_good(&c->errors, ncclCommCount(comm, &size), "ncclCommCount");
#endif
    return cuda_comm_group_(c, comm, rank, size);
}

static void cuda_comm_free(void *state, void *which) {
    CudaComm *c = cuda_comm_of_(state);
    NcclGroup *group = (NcclGroup *)which;
    nccl_close(&c->errors, group->comm);
    if (group->scratch != nullptr) cuda_check(cudaFree(group->scratch), "cudaFree");
    if (group->scratch != nullptr) c->device->comm_scratch_bytes -= group->scratch_bytes;
    if (group->stream != nullptr) cuda_check(cudaStreamDestroy(group->stream), "cudaStreamDestroy");
    if (group->before != nullptr) group->before->following = group->following;
    if (group->following != nullptr) group->following->before = group->before;
    if (c->groups == group) c->groups = group->following;
    if (c->whole == group) c->whole = nullptr;
    delete group;
}

// ----------------------------------------------------------------------------
// Operations

static size_t cuda_comm_bytes_(const CommCall *call) { return (size_t)call->count * comm_type_bytes(call->type); }

// In a group of one.
static void cuda_comm_local(void *state, const CommCall *call) {
    CudaComm *c = cuda_comm_of_(state);
    const size_t each = comm_type_bytes(call->type);
    if (call->kind == COMM_REDUCE_SCATTER && call->type != call->out_type) {
        cuda_comm_sum(c->device, c->device->compute, call->out, call->out_type, call->in, call->in, 0, call->type, 1, 0, call->count, call->how);
    } else if (call->kind != COMM_BROADCAST && call->kind != COMM_ALL_REDUCE) {
        cuda_comm_copy(state, call->out, call->in, call->in_counts != nullptr ? (size_t)call->in_counts[0] * each : cuda_comm_bytes_(call));
    }
}

#ifdef USE_NCCL
static bool cuda_comm_send_(CudaComm *c, NcclGroup *g, const void *data, size_t bytes, int to) {
    return bytes == 0 || nccl_good(&c->errors, ncclSend(data, bytes, ncclInt8, to, g->comm, g->stream), "ncclSend");
}
static bool cuda_comm_receive_(CudaComm *c, NcclGroup *g, void *data, size_t bytes, int from) {
    return bytes == 0 || nccl_good(&c->errors, ncclRecv(data, bytes, ncclInt8, from, g->comm, g->stream), "ncclRecv");
}

// Is it a reduction that is exchanged and summed here?
static bool cuda_comm_ordered_(const CommCall *call) {
    if (call->kind != COMM_ALL_REDUCE && call->kind != COMM_REDUCE_SCATTER) return false;
    return call->type == COMM_BF16 || (call->how == COMM_MAX && call->type != COMM_I64);
}

// Elements of the buffer that rank k reduces: all its part, or the piece of it which starts at `at`.
struct CudaPiece {
    int64_t begin, n;
};
static CudaPiece cuda_comm_piece_(const CudaTicket *t, int k, int64_t most) {
    const CommCall *call = &t->call;
    const bool all = call->kind == COMM_ALL_REDUCE;
    const int64_t begin = (all ? comm_slice_(call->count, t->group->size, k) : k * call->count) + t->at;
    const int64_t end = all ? comm_slice_(call->count, t->group->size, k + 1) : (k + 1) * call->count;
    const int64_t n = end - begin < most ? end - begin : most;
    return {begin, n > 0 ? n : 0};
}

// The next half of a piece of a reduction in the order of ranks; true when that was the last. The memory for parts does not depend on the size of
// what is reduced, so nothing is allocated after the first.
static bool cuda_comm_reduce_step_(CudaComm *c, CudaTicket *t) {
    NcclGroup *g = t->group;
    const CommCall *call = &t->call;
    const size_t each = comm_type_bytes(call->type);
    const bool all = call->kind == COMM_ALL_REDUCE;
    if (g->scratch == nullptr) {
        const size_t least_bytes = (size_t)g->size * 512, tests_bytes = c->scratch_bytes > least_bytes ? c->scratch_bytes : least_bytes;
        g->scratch_bytes = c->scratch_bytes > 0 ? tests_bytes : scratch_reduce_bytes(g->size);
        cuda_check(cudaMallocAsync(&g->scratch, g->scratch_bytes, g->stream), "cudaMallocAsync (parts of a reduction)");
        c->device->comm_scratch_bytes += g->scratch_bytes;
    }
    const int64_t most = (int64_t)(g->scratch_bytes / ((size_t)g->size * each)) / 64 * 64;
    const CudaPiece own = cuda_comm_piece_(t, g->rank, most);
    const char *in = (const char *)call->in;
    char *parts = (char *)g->scratch, *out = (char *)call->out + (size_t)(all ? own.begin : t->at) * comm_type_bytes(call->out_type);
    bool good = true;
    if (!t->exchanged) {
        good = nccl_good(&c->errors, ncclGroupStart(), "ncclGroupStart");
        for (int i = 1; good && i < g->size; i++) {
            const int k = (g->rank + i) % g->size;
            const CudaPiece theirs = cuda_comm_piece_(t, k, most);
            good = cuda_comm_send_(c, g, in + (size_t)theirs.begin * each, (size_t)theirs.n * each, k) &&
                   cuda_comm_receive_(c, g, parts + (size_t)(k * most) * each, (size_t)own.n * each, k);
        }
        t->exchanged = nccl_good(&c->errors, ncclGroupEnd(), "ncclGroupEnd") && good;
        return false;
    }
    cuda_comm_sum(c->device, g->stream, out, call->out_type, in + (size_t)own.begin * each, parts, most, call->type, g->size, g->rank, own.n,
                  call->how);
    if (all) {
        good = nccl_good(&c->errors, ncclGroupStart(), "ncclGroupStart");
        for (int i = 1; good && i < g->size; i++) {
            const int k = (g->rank + i) % g->size;
            const CudaPiece theirs = cuda_comm_piece_(t, k, most);
            good = cuda_comm_send_(c, g, out, (size_t)own.n * each, k) &&
                   cuda_comm_receive_(c, g, (char *)call->out + (size_t)theirs.begin * each, (size_t)theirs.n * each, k);
        }
        (void)nccl_good(&c->errors, ncclGroupEnd(), "ncclGroupEnd");
    }
    t->at += most;
    t->exchanged = false;
    return t->at >= (all ? comm_slice_(call->count, g->size, 1) : call->count); // the first part is the longest
}

static void cuda_comm_all_to_all_(CudaComm *c, const CudaTicket *t) {
    NcclGroup *g = t->group;
    const CommCall *call = &t->call;
    const size_t each = comm_type_bytes(call->type);
    size_t in_at = 0, out_at = 0;
    bool good = nccl_good(&c->errors, ncclGroupStart(), "ncclGroupStart");
    for (int k = 0; good && k < g->size; k++) {
        const size_t in_bytes = each * (size_t)(call->in_counts ? call->in_counts[k] : call->count);
        const size_t out_bytes = each * (size_t)(call->out_counts ? call->out_counts[k] : call->count);
        const char *in = (const char *)call->in + in_at;
        char *out = (char *)call->out + out_at;
        if (k != g->rank)
            good = cuda_comm_send_(c, g, in, in_bytes, k) && cuda_comm_receive_(c, g, out, out_bytes, k);
        else if (in_bytes > 0 && out != in)
            cuda_check(cudaMemcpyAsync(out, in, in_bytes, cudaMemcpyDeviceToDevice, g->stream), "cudaMemcpyAsync");
        in_at += in_bytes, out_at += out_bytes;
    }
    (void)nccl_good(&c->errors, ncclGroupEnd(), "ncclGroupEnd");
}

// Enqueues the next piece of an operation; true when that was the last.
static bool cuda_comm_step_(CudaComm *c, CudaTicket *t) {
    NcclGroup *g = t->group;
    const CommCall *call = &t->call;
    const size_t bytes = cuda_comm_bytes_(call), n = (size_t)call->count;
    const ncclDataType_t type = call->type == COMM_F32 ? ncclFloat32 : call->type == COMM_F64 ? ncclFloat64 : ncclInt64; // of reductions
    const ncclRedOp_t how = call->how == COMM_MAX ? ncclMax : ncclSum;
    ncclResult_t result = ncclSuccess;
    if (call->kind == COMM_ALL_TO_ALL) {
        cuda_comm_all_to_all_(c, t);
        return true;
    }
    if (n == 0) return true; // of all ranks alike
    if (cuda_comm_ordered_(call)) return cuda_comm_reduce_step_(c, t);
    switch (call->kind) {
    case COMM_ALL_REDUCE: result = ncclAllReduce(call->in, call->out, n, type, how, g->comm, g->stream); break;
    case COMM_REDUCE_SCATTER: result = ncclReduceScatter(call->in, call->out, n, type, how, g->comm, g->stream); break;
    case COMM_ALL_GATHER: result = ncclAllGather(call->in, call->out, bytes, ncclInt8, g->comm, g->stream); break;
    case COMM_BROADCAST: result = ncclBroadcast(call->in, call->out, bytes, ncclInt8, call->peer, g->comm, g->stream); break;
    case COMM_SEND: (void)cuda_comm_send_(c, g, call->in, bytes, call->peer); break;
    case COMM_RECV: (void)cuda_comm_receive_(c, g, call->out, bytes, call->peer); break;
    default: nccl_note_(&c->errors, "NCCL: operation %d is none of the device's", (int)call->kind);
    }
    (void)nccl_good(&c->errors, result, "collective");
    return true;
}

// Enqueues what can be enqueued: in the order of starts, each after NCCL is done with the call before.
static void cuda_comm_advance_(CudaComm *c, NcclGroup *g) {
    while (g->first != nullptr && nccl_settled(&c->errors, g->comm) && c->errors.text[0] == '\0') {
        CudaTicket *t = g->first;
        if (t->whole) {
            cuda_check(cudaEventRecord(t->done, g->stream), "cudaEventRecord");
            t->issued = true;
            g->first = t->next;
            if (g->first == nullptr) g->last = nullptr;
            continue;
        }
        if (!t->begun) cuda_check(cudaStreamWaitEvent(g->stream, t->ready, 0), "cudaStreamWaitEvent");
        t->begun = true;
        t->whole = cuda_comm_step_(c, t);
    }
}

static CudaTicket *cuda_comm_ticket_(CudaComm *c) {
    CudaTicket *t = c->spare;
    if (t != nullptr) {
        c->spare = t->next;
        return t;
    }
    t = new CudaTicket();
    cudaEvent_t *events[] = {&t->ready, &t->done, &t->reached};
    for (cudaEvent_t *event : events) cuda_check(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return t;
}

static void *cuda_comm_start(void *state, void *group, const CommCall *call) {
    CudaComm *c = cuda_comm_of_(state);
    NcclGroup *g = (NcclGroup *)group;
    CudaTicket *t = cuda_comm_ticket_(c);
    t->next = nullptr;
    t->group = g;
    t->call = *call;
    t->begun = t->whole = t->issued = t->exchanged = false;
    t->at = 0;
    if (g->stream == nullptr) { // ahead of computation: other ranks wait for it
        cuda_check(cudaStreamCreateWithPriority(&g->stream, cudaStreamNonBlocking, -1), "cudaStreamCreateWithPriority");
    }
    cuda_check(cudaEventRecord(t->ready, c->device->compute), "cudaEventRecord");
    if (g->last != nullptr)
        g->last->next = t;
    else
        g->first = t;
    g->last = t;
    cuda_comm_advance_(c, g);
    return t;
}

static bool cuda_comm_issued(void *state, void *ticket) {
    CudaTicket *t = (CudaTicket *)ticket;
    if (!t->issued) cuda_comm_advance_(cuda_comm_of_(state), t->group);
    return t->issued;
}

static void cuda_comm_wait(void *state, void *ticket) {
    const CudaTicket *t = (const CudaTicket *)ticket;
    const cudaStream_t compute = cuda_comm_of_(state)->device->compute;
    cuda_check(cudaEventRecord(t->reached, compute), "cudaEventRecord");
    cuda_check(cudaStreamWaitEvent(compute, t->done, 0), "cudaStreamWaitEvent");
}

static bool cuda_comm_done(void *, void *ticket) { return cuda_event_done(((const CudaTicket *)ticket)->done); }

static bool cuda_comm_blocks(void *, void *ticket) {
    const CudaTicket *t = (const CudaTicket *)ticket;
    return cuda_event_done(t->reached) && !cuda_event_done(t->done);
}

static void cuda_comm_forget(void *state, void *ticket) {
    CudaTicket *t = (CudaTicket *)ticket;
    t->next = cuda_comm_of_(state)->spare;
    cuda_comm_of_(state)->spare = t;
}
#endif

// ----------------------------------------------------------------------------
// The rest

static void cuda_comm_set_poll(void *state, CommPoll poll, void *argument) {
    CudaDevice *device = cuda_comm_of_(state)->device;
    device->poll = poll;
    device->poll_argument = argument;
}

static const char *cuda_comm_error(void *state) {
    CudaComm *c = cuda_comm_of_(state);
    for (NcclGroup *g = c->groups; g != nullptr && c->errors.text[0] == '\0'; g = g->following) (void)nccl_settled(&c->errors, g->comm);
    return c->errors.text[0] != '\0' ? c->errors.text : nullptr;
}

static void cuda_comm_abort(void *state) {
    for (NcclGroup *g = cuda_comm_of_(state)->groups; g != nullptr; g = g->following) nccl_abort(g->comm);
}

// The table; its state lives until cuda_comm_close.
static CommDevice cuda_comm_table(CudaDevice *device) {
    const char *scratch = getenv("TRAIN_GPT_COMM_SCRATCH"); // bytes; for tests: many pieces
    CudaComm *c = device->comm != nullptr ? device->comm : new CudaComm();
    c->device = device;
    c->scratch_bytes = scratch != nullptr ? strtoull(scratch, nullptr, 10) : 0;
    device->comm = c;
    CommDevice table = {};
    table.state = c;
    table.alloc = cuda_comm_alloc;
    table.release = cuda_comm_release;
    table.owns = cuda_comm_owns;
    table.copy = cuda_comm_copy;
    table.fill = cuda_comm_fill;
    table.read = cuda_comm_read;
    table.id = cuda_comm_id;
    table.open = cuda_comm_open;
    table.split = cuda_comm_split;
    table.free = cuda_comm_free;
    table.local = cuda_comm_local;
#ifdef USE_NCCL
    table.start = cuda_comm_start;
    table.issued = cuda_comm_issued;
    table.wait = cuda_comm_wait;
    table.done = cuda_comm_done;
    table.blocks = cuda_comm_blocks;
    table.forget = cuda_comm_forget;
#endif
    table.set_poll = cuda_comm_set_poll;
    table.error = cuda_comm_error;
    table.abort = cuda_comm_abort;
    return table;
}

// After comm_set_device(comm, NULL) or comm_finish.
static void cuda_comm_close(CudaDevice *device) {
    CudaComm *c = device->comm;
    if (c == nullptr) return;
    while (c->spare != nullptr) {
        CudaTicket *t = c->spare;
        const cudaEvent_t events[] = {t->ready, t->done, t->reached};
        for (cudaEvent_t event : events) cuda_check(cudaEventDestroy(event), "cudaEventDestroy");
        c->spare = t->next;
        delete t;
    }
    delete c;
    device->comm = nullptr;
}

#endif
