// comm_wait.h: advancing what was started, waiting for it, late completion, and how the host waits for a device without losing sight of the other
// ranks. Users include comm.h, which explains the whole.
#ifndef LLMC_COMM_WAIT_H
#define LLMC_COMM_WAIT_H

#include "llmc/comm_op.h" // CommOp, comm_advance_
#include "llmc/rng.h"     // philox

typedef CommOp *CommHandle; // NULL: nothing to wait for

enum {
    COMM_PROGRESS = 1 << 18, // elements that one comm_progress works on, per operation
    COMM_DEVICE_CHECK_MS = 10,
};

// ----------------------------------------------------------------------------
// Operations of the device that the compute queue waits for: in flight until they are seen to be complete

static inline void comm_spare_(Comm *comm, CommOp *op) {
    for (int i = 0; i < comm->late_block_count; i++) {
        if (comm->late_blocks[i].user == op) comm->late_blocks[i].user = NULL;
    }
    if (comm->spare_count == comm->spare_room) {
        comm->spare_room = 2 * comm->spare_room + 16;
        comm->spare = base_grow(comm->spare, (size_t)comm->spare_room, sizeof *comm->spare);
    }
    comm->spare[comm->spare_count++] = op;
}

static inline void comm_fly_(Comm *comm, CommOp *op) {
    if (comm->flying_count == comm->flying_room) {
        comm->flying_room = 2 * comm->flying_room + 16;
        comm->flying = base_grow(comm->flying, (size_t)comm->flying_room, sizeof *comm->flying);
    }
    comm->flying[comm->flying_count++] = op;
}

// Ends the job when something of the device has failed.
static inline void comm_check_device_(Comm *comm) {
    const char *error = comm->device.error(comm->device.state);
    char place[128], text[256];
    if (error == NULL) return;
    snprintf(text, sizeof text, "%s", error);
    comm->device_failed = true;
    comm_abort(comm, CODE_COMM, "%s: %s", comm_place_(comm->watch.pulse, place), text);
}

// Gives back what has landed. True when something has.
static inline bool comm_advance_flying_(Comm *comm) {
    if (comm->device.state == NULL) return false;
    const double now_ms = clock_ms();
    if (now_ms - comm->device_checked_ms > COMM_DEVICE_CHECK_MS) {
        comm->device_checked_ms = now_ms;
        comm_check_device_(comm);
    }
    int landed = 0;
    while (landed < comm->flying_count && comm->device.done(comm->device.state, comm->flying[landed]->ticket)) {
        CommOp *op = comm->flying[landed++];
        comm->device.forget(comm->device.state, op->ticket);
        comm_spare_(comm, op);
    }
    if (landed == 0) return false;
    comm->flying_count -= landed;
    memmove(comm->flying, comm->flying + landed, (size_t)comm->flying_count * sizeof *comm->flying);
    return true;
}

// ----------------------------------------------------------------------------
// Advancing

// True when something moved.
static inline bool comm_advance_all_(Comm *comm, const CommOp *awaited) {
    bool moved = comm_advance_flying_(comm);
    int kept = 0;
    for (int i = 0; i < comm->active_count; i++) {
        CommOp *op = comm->active[i];
        if (comm->late != 0 && op != awaited && philox(rng_key(comm->late, RNG_TEST), comm->late_draws++, (uint64_t)comm->rank).x[0] % 2 == 0) {
            comm->active[kept++] = op; // refused
            continue;
        }
        if (comm_advance_(op, op == awaited ? INT64_MAX : COMM_PROGRESS)) moved = true;
        if (op->stage != COMM_COMPLETE) comm->active[kept++] = op;
    }
    comm->active_count = kept;
    if (moved) comm_alive_(comm);
    return moved;
}

// Advances what was started, without waiting; cheap when nothing can advance. Call it between ops. Also a sign of life.
static inline void comm_progress(Comm *comm) {
    comm_alive_(comm);
    (void)comm_advance_all_(comm, NULL); // what moved does not matter here
}

// What the watchdog tells when this wait does not end. op NULL: nothing is waited for.
static inline void comm_watch_op_(Comm *comm, const CommOp *op) {
    CommWatch *watch = &comm->watch;
    if (op != NULL) {
        atomic_store(&watch->missing, op->kind == COMM_SEND || op->kind == COMM_RECV ? op->group->members[op->peer] : -1);
        atomic_store(&watch->kind, (int)op->kind);
    }
    atomic_store(&watch->group, op != NULL ? op->group : NULL);
}

// A device calls it while the host waits for it (CommPoll): the rest goes on, and errors and lost ranks are seen. The host counts as waiting for
// other ranks only while the compute queue stands at an operation of theirs; otherwise the device computes, for as long as it likes.
static inline void comm_poll_(void *argument, bool waiting) {
    Comm *comm = argument;
    const bool moved = waiting && comm_advance_all_(comm, NULL);
    const CommOp *first = waiting && !moved && comm->flying_count > 0 ? comm->flying[0] : NULL;
    if (first != NULL && !comm->device.blocks(comm->device.state, first->ticket)) first = NULL;
    comm_watch_op_(comm, first);
    comm_waiting_(comm, first != NULL);
}

// Waits until nothing is in flight on the device.
static inline void comm_land_(Comm *comm) {
    while (comm->flying_count > 0) {
        comm_poll_(comm, true);
        if (comm->flying_count > 0) sched_yield();
    }
    comm_poll_(comm, false);
}

// ----------------------------------------------------------------------------
// Late completion: the operation works on copies

static inline void *comm_late_alloc_(CommOp *op, size_t bytes) {
    Comm *comm = op->group->comm;
    if (!op->on_device) return base_alloc_raw(bytes);
    int at = 0;
    while (at < comm->late_block_count && (comm->late_blocks[at].user != NULL || comm->late_blocks[at].bytes < bytes)) at++;
    if (at == comm->late_block_count) {
        comm->late_blocks = base_grow(comm->late_blocks, (size_t)++comm->late_block_count, sizeof *comm->late_blocks);
        comm->late_blocks[at] = (CommLateBlock){.data = comm->device.alloc(comm->device.state, 2 * bytes + 1), .bytes = 2 * bytes};
    }
    comm->late_blocks[at].user = op;
    return comm->late_blocks[at].data;
}

static inline void comm_late_copy_(const CommOp *op, void *to, const void *from, size_t bytes) {
    const CommDevice *device = &op->group->comm->device;
    if (bytes == 0) return;
    if (op->on_device)
        device->copy(device->state, to, from, bytes);
    else
        memcpy(to, from, bytes);
}

static inline void comm_late_fill_(const CommOp *op, void *pointer, size_t bytes) {
    const CommDevice *device = &op->group->comm->device;
    if (bytes == 0) return;
    if (op->on_device)
        device->fill(device->state, pointer, 0xff, bytes);
    else
        memset(pointer, 0xff, bytes);
}

// Puts copies in the place of the user's buffers, in one buffer where the user's is one.
static inline void comm_late_begin_(CommOp *op) {
    const bool one_buffer = op->kind == COMM_ALL_REDUCE || (op->kind == COMM_BROADCAST && op->out_bytes > 0);
    const char *in = op->in, *out = op->out;
    op->user_in = op->in, op->user_out = op->out;
    op->late_in = comm_late_alloc_(op, op->in_bytes), op->late_out = comm_late_alloc_(op, op->out_bytes);
    comm_late_copy_(op, op->late_in, op->in, op->in_bytes);
    if (one_buffer) comm_late_copy_(op, op->late_out, op->late_in, op->in_bytes);
    comm_late_fill_(op, op->out, op->out_bytes);
    // The input of an all-gather may be read until the wait, also where it lies in the output.
    if (op->kind == COMM_ALL_GATHER && in >= out && in < out + op->out_bytes)
        comm_late_copy_(op, (char *)op->out + (in - out), op->late_in, op->in_bytes);
    op->in = one_buffer ? op->late_out : op->late_in;
    op->out = op->out_bytes > 0 ? op->late_out : op->late_in; // a root's broadcast sends from `out`
}

// The buffer itself, or a copy of device memory, to be given back by comm_late_drop_.
static inline const char *comm_late_look_(const CommOp *op, const void *data, size_t bytes) {
    const CommDevice *device = &op->group->comm->device;
    if (!op->on_device || bytes == 0) return data;
    char *copy = base_alloc_raw(bytes);
    device->read(device->state, copy, data, bytes);
    return copy;
}
static inline void comm_late_drop_(const CommOp *op, const char *look, size_t bytes) {
    if (op->on_device && bytes > 0) free((void *)(uintptr_t)look);
}

// The bytes of in that out does not cover, compared with the copy taken at the start.
static inline bool comm_unchanged_(const CommOp *op, const char *in_now, const char *in_then, const char *out_now) {
    const char *in = op->user_in, *out = op->user_out;
    for (size_t i = 0; i < op->in_bytes; i++) {
        const bool covered = op->kind != COMM_ALL_GATHER && in + i >= out && in + i < out + op->out_bytes;
        if (!covered && in_now[i] != in_then[i]) return false;
    }
    for (size_t i = 0; i < op->out_bytes; i++) {
        const bool covered = op->kind == COMM_ALL_GATHER && out + i >= in && out + i < in + op->in_bytes;
        if (!covered && (unsigned char)out_now[i] != 0xff) return false;
    }
    return true;
}

// Delivers the result.
static inline void comm_late_end_(CommOp *op) {
    const char *in_now = comm_late_look_(op, op->user_in, op->in_bytes), *in_then = comm_late_look_(op, op->late_in, op->in_bytes);
    const char *out_now = comm_late_look_(op, op->user_out, op->out_bytes);
    const bool unchanged = comm_unchanged_(op, in_now, in_then, out_now);
    comm_late_drop_(op, in_now, op->in_bytes);
    comm_late_drop_(op, in_then, op->in_bytes);
    comm_late_drop_(op, out_now, op->out_bytes);
    if (!unchanged) {
        comm_abort(op->group->comm, CODE_COMM, "%s on %s: a buffer was written between start and wait", comm_kind_names[op->kind], op->group->name);
    }
    comm_late_copy_(op, op->user_out, op->late_out, op->out_bytes);
    if (op->on_device) return; // its blocks are free when it has landed
    free(op->late_out);
    free(op->late_in);
}

// ----------------------------------------------------------------------------
// Waiting

static inline void comm_deliver_(CommHandle *handle) {
    CommOp *op = *handle;
    Comm *comm = op->group->comm;
    if (op->ticket != NULL) comm->device.wait(comm->device.state, op->ticket);
    if (op->late_in != NULL) comm_late_end_(op);
    if (op->ticket != NULL)
        comm_fly_(comm, op);
    else
        comm_spare_(comm, op);
    comm->waited++;
    *handle = NULL;
}

// Completes the operation; the handle becomes NULL. On a device: lets the compute queue wait for it.
static inline void comm_wait(CommHandle *handle) {
    CommOp *op = *handle;
    if (op == NULL) return;
    Comm *comm = op->group->comm;
    comm_alive_(comm);
    comm->awaited = op;
    comm_watch_op_(comm, op);
    while (op->stage != COMM_COMPLETE) {
        comm_waiting_(comm, !comm_advance_all_(comm, op)); // what got ready for work is worked on in the next turn
        if (op->stage != COMM_COMPLETE) sched_yield();
    }
    comm_waiting_(comm, false);
    comm_watch_op_(comm, NULL);
    comm->awaited = NULL;
    comm_deliver_(handle);
}

// Like comm_wait when the operation is complete or completes now; otherwise false.
static inline bool comm_test(CommHandle *handle) {
    CommOp *op = *handle;
    if (op == NULL) return true;
    Comm *comm = op->group->comm;
    if (op->stage != COMM_COMPLETE || op->ticket != NULL) comm_progress(comm);
    if (op->stage != COMM_COMPLETE || (op->ticket != NULL && !comm->device.done(comm->device.state, op->ticket))) return false;
    comm_deliver_(handle);
    return true;
}

#endif
