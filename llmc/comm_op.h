// comm_op.h: how one started operation advances, without ever blocking. Users include comm.h, which explains the whole.
//
//   in one process        LOCAL
//   in shared memory      ACQUIRE (a slot) -> POSTED (wait until all have come) -> WORK -> DONE (wait until nobody needs my memory)
//   by messages           MESSAGES, in rounds; after POSTED where the group shares a host but some buffer is plain memory
//   on a device           ON_DEVICE, until all of it is in the device's hands (comm_wait.h follows it further)
#ifndef LLMC_COMM_OP_H
#define LLMC_COMM_OP_H

#include "llmc/comm_core.h" // Comm, CommGroup, CommOp

static inline bool comm_reduces_(CommKind kind) { return kind == COMM_ALL_REDUCE || kind == COMM_REDUCE_SCATTER; }

static inline void comm_copy_(void *to, const void *from, size_t bytes) {
    if (to == from || bytes == 0) return;
    const size_t piece = (size_t)1 << 20;
#pragma omp parallel for schedule(static) if (bytes >= 4 * piece)
    for (size_t b = 0; b < bytes; b += piece) memcpy((char *)to + b, (const char *)from + b, bytes - b < piece ? bytes - b : piece);
}

// How the device knows an operation.
static inline CommCall comm_call_(const CommOp *op) {
    const bool pair = op->kind == COMM_SEND || op->kind == COMM_RECV;
    return (CommCall){.kind = op->kind,
                      .type = op->type,
                      .out_type = op->out_type,
                      .how = op->how,
                      .out = op->out,
                      .in = op->in,
                      .count = op->count,
                      .in_counts = op->in_counts,
                      .out_counts = op->out_counts,
                      .peer = pair ? op->kind == COMM_SEND : op->peer}; // rank 0 of a link sends
}

static inline void comm_start_device_(CommOp *op) {
    const CommGroup *group = op->group;
    Comm *comm = group->comm;
    const bool send = op->kind == COMM_SEND, receive = op->kind == COMM_RECV;
    const int neighbour = (group->rank + (send ? group->step : -group->step) + group->size) % group->size;
    if ((send || receive) && (group->step == 0 || op->peer != neighbour || op->tag != 0)) {
        comm_abort(comm, CODE_COMM, "%s on %s, rank %d, tag %d: device memory travels in groups of comm_pipe, to the next rank, with tag 0",
                   comm_kind_names[op->kind], group->name, op->peer, op->tag);
    }
    const CommCall call = comm_call_(op);
    op->ticket = comm->device.start(comm->device.state, send ? group->link_out : receive ? group->link_in : group->device, &call);
    op->stage = COMM_ON_DEVICE;
}

static inline void comm_local_(CommOp *op) {
    op->stage = COMM_COMPLETE;
    if (op->on_device) {
        const CommDevice *device = &op->group->comm->device;
        const CommCall call = comm_call_(op);
        device->local(device->state, &call);
        return;
    }
    const void *const from[1] = {op->in};
    void *const to[1] = {op->out};
    if (op->kind == COMM_REDUCE_SCATTER && op->in != op->out) comm_reduce(to, 1, op->out_type, from, 1, op->type, 0, op->count, op->how);
    if (op->kind == COMM_ALL_GATHER || op->kind == COMM_ALL_TO_ALL) comm_copy_(op->out, op->in, op->in_bytes);
}

// Have all members reached `value` in this counter of their slot? posted orders what is read after it, done what is overwritten.
static inline bool comm_reached_(CommOp *op, bool done, uint64_t value) {
    CommGroup *group = op->group;
    for (int k = 0; k < group->size; k++) {
        CommSlot *slot = &group->slots[k][op->sequence % COMM_SLOTS];
        if (atomic_load_explicit(done ? &slot->done : &slot->posted, memory_order_acquire) >= value) continue;
        if (group->comm->awaited == op) atomic_store_explicit(&group->comm->watch.missing, group->members[k], memory_order_relaxed);
        return false;
    }
    if (group->comm->awaited == op) atomic_store_explicit(&group->comm->watch.missing, -1, memory_order_relaxed);
    return true;
}

static inline CommSlot *comm_slot_(CommOp *op, int k) { return &op->group->slots[k][op->sequence % COMM_SLOTS]; }

static inline void comm_set_done_(CommOp *op) {
    atomic_store_explicit(&comm_slot_(op, op->group->rank)->done, op->sequence + 1, memory_order_release);
}

static inline bool comm_inline_(const CommOp *op) { return op->kind == COMM_ALL_REDUCE && op->in_bytes <= COMM_INLINE_BYTES; }

// Tells the others where this rank's input is.
static inline void comm_publish_(CommOp *op) {
    const Comm *comm = op->group->comm;
    CommSlot *slot = comm_slot_(op, op->group->rank);
    const char *in = op->in;
    slot->segment = -1;
    for (int i = 0; i < comm->segment_count; i++) {
        const CommSegment *segment = &comm->segments[i];
        const char *base = segment->used ? segment->base[comm->local_rank] : NULL;
        if (base == NULL || in < base || in + op->in_bytes > base + segment->bytes || op->in_counts != NULL) continue;
        slot->segment = i;
        slot->offset = in - base;
    }
    if (comm_inline_(op)) memcpy(slot->data, in, op->in_bytes);
    atomic_store_explicit(&slot->posted, op->sequence + 1, memory_order_release);
}

// Finds everybody's input; false when one of those that are read is in plain memory. All members decide alike: they read the same slots.
static inline bool comm_map_(CommOp *op) {
    CommGroup *group = op->group;
    for (int k = 0; k < group->size; k++) {
        const CommSlot *slot = comm_slot_(op, k);
        op->from[k] = slot->data;
        if (comm_inline_(op) || op->kind == COMM_BARRIER || (op->kind == COMM_BROADCAST && k != op->peer)) continue;
        if (slot->segment < 0) return false;
        op->from[k] = group->comm->segments[slot->segment].base[group->local[k]] + slot->offset;
    }
    return true;
}

// A piece of the work in shared memory, of about so many elements. True when all is done.
static inline bool comm_work_(CommOp *op, int64_t budget) {
    const CommGroup *group = op->group;
    const size_t bytes = comm_type_bytes(op->type), part_bytes = (size_t)op->count * bytes;
    void *out[1] = {op->out};
    if (comm_inline_(op)) {
        comm_reduce(out, 1, op->type, op->from, group->size, op->type, 0, op->count, op->how);
        return true;
    }
    if (comm_reduces_(op->kind)) {
        // All-reduce: my slice of every rank's buffer is read and written by nobody else, so the sum goes straight to where all want it.
        const bool all = op->kind == COMM_ALL_REDUCE;
        const int64_t begin = all ? comm_slice_(op->count, group->size, group->rank) : 0;
        const int64_t end = all ? comm_slice_(op->count, group->size, group->rank + 1) : op->count;
        if (op->at == 0) {
            for (int k = 0; k < group->size; k++) {
                op->to[k] = (void *)(uintptr_t)op->from[k];
                if (!all) op->from[k] = (const char *)op->from[k] + (size_t)group->rank * part_bytes;
            }
        }
        const int64_t n = min_i64(budget, end - begin - op->at);
        comm_reduce(all ? op->to : out, all ? group->size : 1, op->out_type, op->from, group->size, op->type, begin + op->at, n, op->how);
        op->at += n;
        return op->at == end - begin;
    }
    if (op->kind == COMM_BROADCAST) {
        if (group->rank != op->peer) comm_copy_(op->out, op->from[op->peer], part_bytes);
        return true;
    }
    if (op->kind == COMM_BARRIER) return true;
    for (int64_t copied = 0; op->at < group->size && copied < budget; op->at++, copied += op->count) {
        const int k = (int)((group->rank + op->at) % group->size); // each starts elsewhere
        const char *from = (const char *)op->from[k] + (op->kind == COMM_ALL_TO_ALL ? (size_t)group->rank * part_bytes : 0);
        comm_copy_((char *)op->out + (size_t)k * part_bytes, from, part_bytes);
    }
    return op->at == group->size;
}

#ifdef USE_MPI
enum { COMM_MESSAGE_BYTES = 1 << 30, COMM_TAGS = 16384 }; // MPI counts in int; collectives use tags below COMM_TAGS, users' come after

static inline MPI_Request *comm_request_(CommOp *op) {
    if (op->request_count == op->request_room) {
        op->request_room = 2 * op->request_room + 8;
        op->requests = base_grow(op->requests, (size_t)op->request_room, sizeof *op->requests);
    }
    return &op->requests[op->request_count++];
}

static inline int comm_tag_(const CommOp *op) {
    const bool pair = op->kind == COMM_SEND || op->kind == COMM_RECV;
    return pair ? COMM_TAGS + op->tag : (int)(op->sequence % (COMM_TAGS / 2)) * 2 + op->round;
}

static inline void comm_send_(CommOp *op, const void *data, size_t bytes, int to) {
    Comm *comm = op->group->comm;
    for (size_t b = 0; b < bytes; b += COMM_MESSAGE_BYTES) {
        const int n = (int)(bytes - b < COMM_MESSAGE_BYTES ? bytes - b : COMM_MESSAGE_BYTES);
        // Late mode takes away the eager buffers, in which a deadlock could hide.
        const int result = comm->late ? MPI_Issend((const char *)data + b, n, MPI_BYTE, to, comm_tag_(op), op->group->mpi, comm_request_(op))
                                      : MPI_Isend((const char *)data + b, n, MPI_BYTE, to, comm_tag_(op), op->group->mpi, comm_request_(op));
        comm_check_(comm, result, "MPI_Isend");
    }
}

static inline void comm_receive_(CommOp *op, void *data, size_t bytes, int from) {
    for (size_t b = 0; b < bytes; b += COMM_MESSAGE_BYTES) {
        const int n = (int)(bytes - b < COMM_MESSAGE_BYTES ? bytes - b : COMM_MESSAGE_BYTES);
        comm_check_(op->group->comm, MPI_Irecv((char *)data + b, n, MPI_BYTE, from, comm_tag_(op), op->group->mpi, comm_request_(op)), "MPI_Irecv");
    }
}

// First round of reductions: everyone gets the others' parts of the slice that it sums, after each other in scratch.
static inline void comm_exchange_slices_(CommOp *op) {
    const CommGroup *group = op->group;
    const size_t bytes = comm_type_bytes(op->type);
    const bool all = op->kind == COMM_ALL_REDUCE;
    const int64_t mine = all ? comm_slice_(op->count, group->size, group->rank + 1) - comm_slice_(op->count, group->size, group->rank) : op->count;
    const size_t slice_bytes = (size_t)mine * bytes, wanted = slice_bytes * (size_t)group->size;
    if (wanted > op->scratch_bytes) {
        free(op->scratch);
        op->scratch = base_alloc_raw(wanted);
        op->scratch_bytes = wanted;
    }
    for (int i = 0; i < group->size; i++) {
        const int k = (group->rank + i) % group->size;
        const int64_t begin = all ? comm_slice_(op->count, group->size, k) : k * op->count;
        const int64_t end = all ? comm_slice_(op->count, group->size, k + 1) : begin + op->count;
        const char *part = (const char *)op->in + (size_t)begin * bytes;
        op->from[k] = k == group->rank ? part : op->scratch + (size_t)k * slice_bytes;
        if (k == group->rank) continue;
        comm_receive_(op, (void *)(uintptr_t)op->from[k], slice_bytes, k);
        comm_send_(op, part, (size_t)(end - begin) * bytes, k);
    }
}

// Second round: sums in rank order; all-reduce sends the sums round.
static inline void comm_sum_slices_(CommOp *op) {
    const CommGroup *group = op->group;
    const size_t bytes = comm_type_bytes(op->type);
    const bool all = op->kind == COMM_ALL_REDUCE;
    const int64_t begin = all ? comm_slice_(op->count, group->size, group->rank) : 0;
    const int64_t mine = all ? comm_slice_(op->count, group->size, group->rank + 1) - begin : op->count;
    void *out[1] = {(char *)op->out + (size_t)begin * bytes};
    comm_reduce(out, 1, op->out_type, op->from, group->size, op->type, 0, mine, op->how);
    for (int i = 1; all && i < group->size; i++) {
        const int k = (group->rank + i) % group->size;
        const int64_t from = comm_slice_(op->count, group->size, k), to = comm_slice_(op->count, group->size, k + 1);
        comm_receive_(op, (char *)op->out + (size_t)from * bytes, (size_t)(to - from) * bytes, k);
        comm_send_(op, out[0], (size_t)mine * bytes, k);
    }
}

// Parts to and from everyone: all_gather and both forms of all_to_all.
static inline void comm_exchange_parts_(CommOp *op) {
    const CommGroup *group = op->group;
    const size_t bytes = comm_type_bytes(op->type);
    size_t in_at = 0, out_at = 0;
    for (int k = 0; k < group->size; k++) {
        const size_t in_bytes = bytes * (size_t)(op->in_counts ? op->in_counts[k] : op->count);
        const size_t out_bytes = bytes * (size_t)(op->out_counts ? op->out_counts[k] : op->count);
        const char *in = (const char *)op->in + in_at;
        char *out = (char *)op->out + out_at;
        if (k == group->rank) {
            comm_copy_(out, in, in_bytes);
        } else {
            comm_receive_(op, out, out_bytes, k);
            comm_send_(op, in, in_bytes, k);
        }
        if (op->kind == COMM_ALL_TO_ALL) in_at += in_bytes; // all_gather sends the same to all
        out_at += out_bytes;
    }
}

static inline void comm_start_messages_(CommOp *op) {
    CommGroup *group = op->group;
    op->request_count = op->round = 0;
    op->stage = COMM_MESSAGES;
    if (comm_reduces_(op->kind)) {
        comm_exchange_slices_(op);
    } else if (op->kind == COMM_SEND) {
        comm_send_(op, op->in, op->in_bytes, op->peer);
    } else if (op->kind == COMM_RECV) {
        comm_receive_(op, op->out, op->out_bytes, op->peer);
    } else if (op->kind == COMM_BROADCAST) {
        for (size_t b = 0; b < op->in_bytes; b += COMM_MESSAGE_BYTES) {
            const int n = (int)(op->in_bytes - b < COMM_MESSAGE_BYTES ? op->in_bytes - b : COMM_MESSAGE_BYTES);
            comm_check_(group->comm, MPI_Ibcast((char *)op->out + b, n, MPI_BYTE, op->peer, group->mpi, comm_request_(op)), "MPI_Ibcast");
        }
    } else if (op->kind == COMM_BARRIER) {
        comm_check_(group->comm, MPI_Ibarrier(group->mpi, comm_request_(op)), "MPI_Ibarrier");
    } else {
        comm_exchange_parts_(op);
    }
}

static inline bool comm_advance_messages_(CommOp *op) {
    int done = 0;
    comm_check_(op->group->comm, MPI_Testall(op->request_count, op->requests, &done, MPI_STATUSES_IGNORE), comm_kind_names[op->kind]);
    if (!done) return false;
    op->request_count = 0;
    if (comm_reduces_(op->kind) && op->round == 0) {
        op->round = 1;
        comm_sum_slices_(op);
        if (op->request_count > 0) return true;
    }
    op->stage = COMM_COMPLETE;
    return true;
}
#else
static inline void comm_start_messages_(CommOp *op) { comm_abort(op->group->comm, CODE_COMM, "%s: built without MPI", comm_kind_names[op->kind]); }
static inline bool comm_advance_messages_(CommOp *op) { return op->stage == COMM_COMPLETE; }
#endif

// One step forward if there is one. Work is cut at about `budget` elements. True when something moved.
static inline bool comm_advance_(CommOp *op, int64_t budget) {
    switch (op->stage) {
    case COMM_LOCAL: comm_local_(op); return true;
    case COMM_ACQUIRE:
        if (op->sequence >= COMM_SLOTS && !comm_reached_(op, true, op->sequence + 1 - COMM_SLOTS)) return false;
        comm_publish_(op);
        op->stage = COMM_POSTED;
        return true;
    case COMM_POSTED:
        // In the order of starts on every rank: MPI matches broadcasts by their order.
        if (op->group->opened != op->sequence || !comm_reached_(op, false, op->sequence + 1)) return false;
        op->group->opened++;
        if (comm_map_(op)) {
            op->stage = COMM_WORK;
        } else {
            comm_set_done_(op); // with the slot; messages do the rest
            comm_start_messages_(op);
        }
        return true;
    case COMM_WORK:
        if (!comm_work_(op, budget)) return true;
        comm_set_done_(op);
        // A small all-reduce and a barrier leave nothing that others read but the slot, which ACQUIRE protects.
        op->stage = comm_inline_(op) || op->kind == COMM_BARRIER ? COMM_COMPLETE : COMM_DONE;
        return true;
    case COMM_DONE:
        if (!comm_reached_(op, true, op->sequence + 1)) return false;
        op->stage = COMM_COMPLETE;
        return true;
    case COMM_MESSAGES: return comm_advance_messages_(op);
    case COMM_ON_DEVICE:
        if (!op->group->comm->device.issued(op->group->comm->device.state, op->ticket)) return false;
        op->stage = COMM_COMPLETE;
        return true;
    case COMM_COMPLETE: break;
    }
    return false;
}

#endif
