// comm.h: communication among the ranks of a job: collectives and messages on groups, asynchronous, with results that do not depend on
// timing. MPI moves what leaves a host; on one host ranks read and write each other's memory where it comes from comm_alloc. Without
// MPI, or without a launcher, there is one rank, and everything works on it. Knows no tensors or mesh, and of a device only a table of functions.
//
//     Comm *comm = comm_init(&argc, &argv);
//     CommGroup *dp = comm_group(comm, members, count, "dp");          // every member, with the same list
//     CommHandle reduction = comm_all_reduce_start(dp, grad, n, COMM_F32, COMM_SUM);
//     ... compute, calling comm_progress(comm) now and then ...
//     comm_wait(&reduction);                                           // now grad holds the sum
//     comm_finish(comm);
//
// Rules. All members of a group start the same collectives on it in the same order, with the same counts; groups are independent of each
// other. Between start and wait an output is neither read nor written, an input not written. Every handle is waited for (or tested
// until true). Only the main thread calls these functions.
//
// Order of reduction. Element i of a sum is x0[i] + x1[i] + ... in the order of ranks in the group, in the type's own arithmetic (BF16
// in fp32, rounded once), computed by one rank and copied to the others. So all ranks get the same bits, whatever the bucket
// size, the overlap, the kind of memory or the number of hosts. It costs what a ring costs: everyone reads and sends (N-1)/N of a buffer twice.
//
// Bytes. counts[kind].bytes adds elements * element size of the local input (all_reduce, reduce_scatter, broadcast, all_to_all, send) or
// the local output (all_gather, recv); barrier 0. Groups of one rank count nothing. With N ranks a rank sends (N-1)/N of the bytes for
// reduce_scatter, all_gather and all_to_all, and twice that for all_reduce: with g and p the bytes of gradients and parameters, DDP
// counts all_reduce g (moves 2g), ZeRO-1 reduce_scatter g and all_gather p (moves g + p), in units of (N-1)/N.
//
// Waiting is a loop over MPI_Test and sched_yield that advances every started operation. No call blocks inside MPI, apart from
// comm_init, comm_group, comm_alloc, comm_release and comm_finish, which want nothing in flight. A watchdog ends a job that cannot go on, with
// CODE_COMM: soon when a process of this host is stopped, frozen or dead, or when all ranks wait; otherwise after comm_watchdog's limit (see
// comm_core.h). A process that dies is also seen by the launcher, on any host; one that is stopped on another host by its neighbours there.
//
// Device memory (comm_set_device; comm_device.h says how) goes the device's way, everything else stays here; an operation's buffers are of one
// kind, the same on all ranks. comm_wait then lets the device's compute queue wait, not the host: ops that follow see the result, and reading it on
// the host waits by itself (comm_poll_ keeps the rest going). Messages go round a comm_pipe. Sums of F32 and F64 are in the device's own order, the
// rest as above.
//
// Late completion (comm_late, or TRAIN_GPT_COMM_LATE=seed): outputs hold NaN from start to wait and results are delivered by the wait; an
// input or output that was written meanwhile ends the job; progress and tests are refused at random; sends complete only when received.
// For tests also: TRAIN_GPT_COMM_WINDOW=off (messages only), TRAIN_GPT_COMM_HOSTS=N (takes the ranks of a host for N hosts').
#ifndef LLMC_COMM_H
#define LLMC_COMM_H

#include "llmc/comm_wait.h" // CommHandle, comm_wait, comm_test, comm_progress
#include <sys/statvfs.h>    // statvfs

// ----------------------------------------------------------------------------
// Starting. Counts are elements. The plain names start and wait.

static inline CommOp *comm_new_(CommGroup *group, CommKind kind, void *out, const void *in, int64_t count, CommType type) {
    Comm *comm = group->comm;
    CommOp *op = comm->spare_count > 0 ? comm->spare[--comm->spare_count] : base_new(1, sizeof *op);
    CommOp fresh = {.group = group, .kind = kind, .out = out, .in = in, .count = count, .type = type, .out_type = type};
    fresh.from = base_grow(op->from, (size_t)group->size, sizeof *op->from); // kept from use to use
    fresh.to = base_grow(op->to, (size_t)group->size, sizeof *op->to);
    fresh.scratch = op->scratch, fresh.scratch_bytes = op->scratch_bytes;
#ifdef USE_MPI
    fresh.requests = op->requests, fresh.request_room = op->request_room;
#endif
    free(op->in_counts);
    free(op->out_counts);
    *op = fresh;
    return op;
}

// Device memory goes the device's way; a barrier has none.
static inline bool comm_on_device_(const CommOp *op) {
    Comm *comm = op->group->comm;
    const CommDevice *device = &comm->device;
    if (device->state == NULL) return false;
    const bool in = op->in != NULL && device->owns(device->state, op->in), out = op->out != NULL && device->owns(device->state, op->out);
    if (op->in != NULL && op->out != NULL && in != out) {
        comm_abort(comm, CODE_COMM, "%s on %s: the input is %s memory, the output %s memory", comm_kind_names[op->kind], op->group->name,
                   in ? "device" : "host", out ? "device" : "host");
    }
    return in || out;
}

// From here the operation moves by itself. counted_bytes: as defined above.
static inline CommHandle comm_start_(CommOp *op, size_t in_bytes, size_t out_bytes, size_t counted_bytes) {
    CommGroup *group = op->group;
    Comm *comm = group->comm;
    op->in_bytes = in_bytes, op->out_bytes = out_bytes;
    op->on_device = comm_on_device_(op);
    if (comm->late != 0) comm_late_begin_(op);
    const bool pair = op->kind == COMM_SEND || op->kind == COMM_RECV;
    if (group->size == 1) {
        if (pair) comm_abort(comm, CODE_COMM, "%s on %s, which has one rank", comm_kind_names[op->kind], group->name);
        op->stage = COMM_LOCAL;
    } else {
        group->counts[op->kind].calls++, comm->counts[op->kind].calls++;
        group->counts[op->kind].bytes += (int64_t)counted_bytes, comm->counts[op->kind].bytes += (int64_t)counted_bytes;
        if (op->on_device) {
            comm_start_device_(op);
        } else {
            if (!pair) op->sequence = group->started++;
            op->stage = COMM_ACQUIRE;
            if (pair || !group->shared) comm_start_messages_(op);
        }
    }
    comm->started++;
    if (comm->active_count == comm->active_room) {
        comm->active_room = 2 * comm->active_room + 16;
        comm->active = base_grow(comm->active, (size_t)comm->active_room, sizeof *comm->active);
    }
    comm->active[comm->active_count++] = op;
    comm_progress(comm);
    return op;
}

// buffer (count) = reduction over the ranks
static inline CommHandle comm_all_reduce_start(CommGroup *group, void *buffer, int64_t count, CommType type, CommReduce how) {
    CommOp *op = comm_new_(group, COMM_ALL_REDUCE, buffer, buffer, count, type);
    const size_t bytes = (size_t)count * comm_type_bytes(type);
    op->how = how;
    return comm_start_(op, bytes, bytes, bytes);
}

// out (count) = reduction over the ranks of part `rank` of in (ranks, count). out may be that part of in. out_type is type, or F32 for BF16.
static inline CommHandle comm_reduce_scatter_start(CommGroup *group, void *out, CommType out_type, const void *in, int64_t count, CommType type,
                                                   CommReduce how) {
    CommOp *op = comm_new_(group, COMM_REDUCE_SCATTER, out, in, count, type);
    const size_t bytes = (size_t)group->size * (size_t)count * comm_type_bytes(type);
    op->how = how, op->out_type = out_type;
    return comm_start_(op, bytes, (size_t)count * comm_type_bytes(out_type), bytes);
}

// out (ranks, count) = everyone's in (count). in may be part `rank` of out.
static inline CommHandle comm_all_gather_start(CommGroup *group, void *out, const void *in, int64_t count, CommType type) {
    const size_t bytes = (size_t)count * comm_type_bytes(type), out_bytes = (size_t)group->size * bytes;
    return comm_start_(comm_new_(group, COMM_ALL_GATHER, out, in, count, type), bytes, out_bytes, out_bytes);
}

// buffer (count) = the root's
static inline CommHandle comm_broadcast_start(CommGroup *group, void *buffer, int64_t count, CommType type, int root) {
    CommOp *op = comm_new_(group, COMM_BROADCAST, buffer, buffer, count, type);
    const size_t bytes = (size_t)count * comm_type_bytes(type);
    op->peer = root;
    return comm_start_(op, bytes, group->rank == root ? 0 : bytes, bytes);
}

// out (ranks, count): part k = part `rank` of rank k's in (ranks, count)
static inline CommHandle comm_all_to_all_start(CommGroup *group, void *out, const void *in, int64_t count, CommType type) {
    const size_t bytes = (size_t)group->size * (size_t)count * comm_type_bytes(type);
    return comm_start_(comm_new_(group, COMM_ALL_TO_ALL, out, in, count, type), bytes, bytes, bytes);
}

// The same with parts of different sizes, one after the other: out_counts[k] elements from rank k, in_counts[k] to rank k. Always messages.
static inline CommHandle comm_all_to_allv_start(CommGroup *group, void *out, const int64_t *out_counts, const void *in, const int64_t *in_counts,
                                                CommType type) {
    CommOp *op = comm_new_(group, COMM_ALL_TO_ALL, out, in, 0, type);
    const size_t list_bytes = (size_t)group->size * sizeof(int64_t);
    size_t in_bytes = 0, out_bytes = 0;
    op->in_counts = memcpy(base_new(list_bytes, 1), in_counts, list_bytes);
    op->out_counts = memcpy(base_new(list_bytes, 1), out_counts, list_bytes);
    for (int k = 0; k < group->size; k++) {
        in_bytes += (size_t)in_counts[k] * comm_type_bytes(type);
        out_bytes += (size_t)out_counts[k] * comm_type_bytes(type);
    }
    return comm_start_(op, in_bytes, out_bytes, in_bytes);
}

// Messages between two ranks of a group: in the order of their starts for equal tags. tag: 0 to 16383.
static inline CommHandle comm_send_start(CommGroup *group, const void *in, int64_t count, CommType type, int to, int tag) {
    CommOp *op = comm_new_(group, COMM_SEND, NULL, in, count, type);
    const size_t bytes = (size_t)count * comm_type_bytes(type);
    op->peer = to, op->tag = tag;
    return comm_start_(op, bytes, 0, bytes);
}
static inline CommHandle comm_recv_start(CommGroup *group, void *out, int64_t count, CommType type, int from, int tag) {
    CommOp *op = comm_new_(group, COMM_RECV, out, NULL, count, type);
    const size_t bytes = (size_t)count * comm_type_bytes(type);
    op->peer = from, op->tag = tag;
    return comm_start_(op, 0, bytes, bytes);
}

static inline CommHandle comm_barrier_start(CommGroup *group) {
    return comm_start_(comm_new_(group, COMM_BARRIER, NULL, NULL, 0, COMM_BYTE), 0, 0, 0);
}

static inline void comm_all_reduce(CommGroup *group, void *buffer, int64_t count, CommType type, CommReduce how) {
    CommHandle handle = comm_all_reduce_start(group, buffer, count, type, how);
    comm_wait(&handle);
}
static inline void comm_reduce_scatter(CommGroup *group, void *out, CommType out_type, const void *in, int64_t count, CommType type,
                                       CommReduce how) {
    CommHandle handle = comm_reduce_scatter_start(group, out, out_type, in, count, type, how);
    comm_wait(&handle);
}
static inline void comm_all_gather(CommGroup *group, void *out, const void *in, int64_t count, CommType type) {
    CommHandle handle = comm_all_gather_start(group, out, in, count, type);
    comm_wait(&handle);
}
static inline void comm_broadcast(CommGroup *group, void *buffer, int64_t count, CommType type, int root) {
    CommHandle handle = comm_broadcast_start(group, buffer, count, type, root);
    comm_wait(&handle);
}
static inline void comm_all_to_all(CommGroup *group, void *out, const void *in, int64_t count, CommType type) {
    CommHandle handle = comm_all_to_all_start(group, out, in, count, type);
    comm_wait(&handle);
}
static inline void comm_all_to_allv(CommGroup *group, void *out, const int64_t *out_counts, const void *in, const int64_t *in_counts,
                                    CommType type) {
    CommHandle handle = comm_all_to_allv_start(group, out, out_counts, in, in_counts, type);
    comm_wait(&handle);
}
static inline void comm_send(CommGroup *group, const void *in, int64_t count, CommType type, int to, int tag) {
    CommHandle handle = comm_send_start(group, in, count, type, to, tag);
    comm_wait(&handle);
}
static inline void comm_recv(CommGroup *group, void *out, int64_t count, CommType type, int from, int tag) {
    CommHandle handle = comm_recv_start(group, out, count, type, from, tag);
    comm_wait(&handle);
}
static inline void comm_barrier(CommGroup *group) {
    CommHandle handle = comm_barrier_start(group);
    comm_wait(&handle);
}

// ----------------------------------------------------------------------------
// Memory

// Calls that block inside MPI advance nothing: a rank that waits for this one's part of an operation would never come to the call.
static inline void comm_check_idle_(Comm *comm, const char *call) {
    if (comm->active_count > 0) comm_abort(comm, CODE_COMM, "%s with %d operations in flight", call, comm->active_count);
    comm_land_(comm);
}

#ifdef USE_MPI
// Is there room in shared memory for what all ranks of this host want? Memory beyond it would be a bus error at its first touch.
static inline bool comm_room_(Comm *comm, size_t bytes) {
    unsigned long long total = bytes + 8192;
    comm_check_(comm, MPI_Allreduce(MPI_IN_PLACE, &total, 1, MPI_UNSIGNED_LONG_LONG, MPI_SUM, comm->host_mpi), "MPI_Allreduce");
    struct statvfs shm;
    int room = statvfs("/dev/shm", &shm) != 0 || (unsigned long long)shm.f_bavail * shm.f_frsize > total + (total >> 5);
    comm_check_(comm, MPI_Allreduce(MPI_IN_PLACE, &room, 1, MPI_INT, MPI_MIN, comm->host_mpi), "MPI_Allreduce");
    return room != 0;
}

// Adds a segment; false, on all ranks of the host alike, when it cannot be had.
static inline bool comm_segment_(Comm *comm, size_t bytes, char **own) {
    if (!comm_room_(comm, bytes)) return false;
    MPI_Info info;
    MPI_Win window = MPI_WIN_NULL;
    void *base = NULL;
    comm_check_(comm, MPI_Info_create(&info), "MPI_Info_create");
    comm_check_(comm, MPI_Info_set(info, "alloc_shared_noncontig", "true"), "MPI_Info_set"); // each rank's part on its own pages
    int ok = MPI_Win_allocate_shared((MPI_Aint)bytes + 64, 1, info, comm->host_mpi, &base, &window) == MPI_SUCCESS;
    MPI_Info_free(&info);
    comm_check_(comm, MPI_Allreduce(MPI_IN_PLACE, &ok, 1, MPI_INT, MPI_MIN, comm->host_mpi), "MPI_Allreduce");
    if (!ok) return false;
    int at = 0;
    while (at < comm->segment_count && comm->segments[at].used) at++;
    if (at == comm->segment_count) comm->segments = base_grow(comm->segments, (size_t)++comm->segment_count, sizeof *comm->segments);
    CommSegment *segment = &comm->segments[at];
    *segment = (CommSegment){.used = true, .bytes = bytes, .window = window, .base = base_new((size_t)comm->local_size, sizeof *segment->base)};
    for (int k = 0; k < comm->local_size; k++) {
        MPI_Aint size;
        int unit;
        comm_check_(comm, MPI_Win_shared_query(window, k, &size, &unit, &base), "MPI_Win_shared_query");
        segment->base[k] = (char *)(((uintptr_t)base + 63) / 64 * 64); // parts start alike in every process: pages are larger than 64
    }
    *own = segment->base[comm->local_rank];
    memset(*own, 0, bytes); // now: the pages come from the owner's memory node, and count before the next segment looks for room
    comm_check_(comm, MPI_Barrier(comm->host_mpi), "MPI_Barrier");
    return true;
}
#endif

// Zeroed memory, 64-byte aligned, that the other ranks of the host can reach: collectives on it need no copies. Called by all ranks of
// a host, in the same order; sizes may differ. Plain memory where shared memory is refused or too small: slower, equal in every bit. With a
// device: zeroed memory of the device.
static inline void *comm_alloc(Comm *comm, size_t bytes) {
    comm_check_idle_(comm, "comm_alloc");
    if (comm->device.state != NULL) return comm->device.alloc(comm->device.state, bytes);
#ifdef USE_MPI
    char *own = NULL;
    if (comm->window && comm->local_size > 1 && comm_segment_(comm, bytes, &own)) return own;
#endif
    return base_alloc(bytes);
}

// Called by all ranks of the host, in the same order. NULL is allowed where all pass it.
static inline void comm_release(Comm *comm, void *pointer) {
    comm_check_idle_(comm, "comm_release");
    for (int i = 0; i < comm->segment_count; i++) {
        CommSegment *segment = &comm->segments[i];
        if (!segment->used || segment->base[comm->local_rank] != pointer) continue;
#ifdef USE_MPI
        comm_check_(comm, MPI_Win_free(&segment->window), "MPI_Win_free");
#endif
        free(segment->base);
        segment->used = false;
        return;
    }
    if (comm->device.state != NULL && pointer != NULL && comm->device.owns(comm->device.state, pointer))
        comm->device.release(comm->device.state, pointer);
    else
        free(pointer);
}

// Is this memory that others reach? For messages and tests.
static inline bool comm_is_shared(const Comm *comm, const void *pointer) {
    for (int i = 0; i < comm->segment_count; i++) {
        const CommSegment *segment = &comm->segments[i];
        const char *base = segment->used ? segment->base[comm->local_rank] : NULL;
        if (base != NULL && (const char *)pointer >= base && (const char *)pointer < base + segment->bytes) return true;
    }
    return false;
}

// ----------------------------------------------------------------------------
// Groups, beginning and end

static inline CommGroup *comm_group_host_(Comm *comm, const int *members, int count, const char *name) {
    int index = 0;
    while (index < comm->group_count && comm->groups[index] != NULL) index++;
    CommGroup *group = base_new(1, sizeof *group);
    if (index == comm->group_count) comm->groups = base_grow(comm->groups, (size_t)++comm->group_count, sizeof(CommGroup *));
    comm->groups[index] = group;
    *group = (CommGroup){.comm = comm, .index = index, .size = count, .rank = -1, .shared = count > 1 && comm->slots != NULL};
    snprintf(group->name, sizeof group->name, "%s", name);
    group->members = base_new((size_t)count, sizeof *group->members);
    group->local = base_new((size_t)count, sizeof *group->local);
    group->slots = base_new((size_t)count, sizeof *group->slots);
    for (int k = 0; k < count; k++) {
        group->members[k] = members[k];
        if (members[k] < 0 || members[k] >= comm->size || (k > 0 && members[k] <= members[k - 1])) {
            comm_abort(comm, CODE_COMM, "group %s: member %d is rank %d: wanted ascending ranks of %d", name, k, members[k], comm->size);
        }
        if (members[k] == comm->rank) group->rank = k;
        group->local[k] = comm->local_of[members[k]];
        if (group->local[k] < 0) group->shared = false;
    }
    if (group->rank < 0) comm_abort(comm, CODE_COMM, "group %s: does not hold this rank", name);
#ifdef USE_MPI
    if (count == 1) return group;
    MPI_Group all, some;
    comm_check_(comm, MPI_Comm_group(MPI_COMM_WORLD, &all), "MPI_Comm_group");
    comm_check_(comm, MPI_Group_incl(all, count, members, &some), "MPI_Group_incl");
    comm_check_(comm, MPI_Comm_create_group(MPI_COMM_WORLD, some, 0, &group->mpi), "MPI_Comm_create_group");
    comm_check_(comm, MPI_Comm_set_errhandler(group->mpi, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    MPI_Group_free(&all);
    MPI_Group_free(&some);
    // Ranks may have made different numbers of groups before: tell each other where the slots are.
    int *indices = base_new((size_t)count, sizeof *indices);
    comm_check_(comm, MPI_Allgather(&index, 1, MPI_INT, indices, 1, MPI_INT, group->mpi), "MPI_Allgather");
    for (int k = 0; k < count; k++) {
        if (indices[k] >= COMM_GROUPS_MAX) group->shared = false;
    }
    for (int k = 0; k < count && group->shared; k++) group->slots[k] = comm->slots[group->local[k]] + (ptrdiff_t)indices[k] * COMM_SLOTS;
    free(indices);
#endif
    return group;
}

// members: (count) ranks of the world, ascending, this one among them; the same list on each of them. NULL for no members. With a device every rank
// of the world makes its groups in the same order, also those of no members and of one.
static inline CommGroup *comm_group(Comm *comm, const int *members, int count, const char *name) {
    comm_check_idle_(comm, "comm_group");
    CommGroup *group = count > 0 ? comm_group_host_(comm, members, count, name) : NULL;
    if (comm->device.state == NULL || comm->size == 1) return group;
    void *device = comm->device.split(comm->device.state, count > 1 ? members[0] : -1, group != NULL ? group->rank : 0);
    comm_check_device_(comm);
    if (group != NULL) group->device = device;
    return group;
}

// Links are made in three turns, so that no rank has two in one: that of sender k in turn k % 2, the last of an odd ring in turn 2.
enum { COMM_LINK_TURNS = 3 };
static inline int comm_link_turn_(int sender, int size) { return size % 2 == 1 && sender == size - 1 ? 2 : sender % 2; }

// A group for messages round a ring in one direction: member k sends to k + step and receives from k - step (step 1 or -1). On a device every pair
// of neighbours has a communicator and a queue of its own, so that no message waits for one to or from another rank: a rank may wait for what it
// receives while what it sends is on its way, in any order of starts.
static inline CommGroup *comm_pipe(Comm *comm, const int *members, int count, int step, const char *name) {
    CommGroup *group = comm_group(comm, members, count, name);
    const int size = count, from = group != NULL ? (group->rank - step + size) % size : 0;
    if (group != NULL) group->step = step;
    for (int turn = 0; turn < COMM_LINK_TURNS && comm->device.state != NULL && comm->size > 1; turn++) {
        const bool sends = size > 1 && comm_link_turn_(group->rank, size) == turn, receives = size > 1 && comm_link_turn_(from, size) == turn;
        void *link = comm->device.split(comm->device.state, sends ? members[group->rank] : receives ? members[from] : -1, sends ? 0 : 1);
        comm_check_device_(comm);
        if (sends) group->link_out = link;
        if (receives) group->link_in = link;
    }
    return group;
}

// What the device has of a group.
static inline void comm_group_ground_(CommGroup *group) {
    const CommDevice *device = &group->comm->device;
    void **parts[] = {&group->device, &group->link_out, &group->link_in};
    for (int i = 0; i < 3; i++) {
        if (*parts[i] != NULL) device->free(device->state, *parts[i]);
        *parts[i] = NULL;
    }
}

// From now on device memory can be communicated and comm_alloc gives it; *device is copied. Called by all ranks, before groups are made. NULL: no
// more; after memory was released and before the device is closed. comm_finish does it too.
static inline void comm_set_device(Comm *comm, const CommDevice *device) {
    comm_check_idle_(comm, "comm_set_device");
    if (device == NULL) {
        if (comm->device.state == NULL) return;
        for (int i = comm->group_count - 1; i >= 0; i--) {
            if (comm->groups[i] != NULL) comm_group_ground_(comm->groups[i]);
        }
        for (int i = 0; i < comm->late_block_count; i++) comm->device.release(comm->device.state, comm->late_blocks[i].data);
        free(comm->late_blocks);
        comm->late_blocks = NULL, comm->late_block_count = 0;
        comm_check_device_(comm);
        comm->device.set_poll(comm->device.state, NULL, NULL);
        comm->device = (CommDevice){.state = NULL};
        return;
    }
    if (comm->device.state != NULL || comm->group_count > 1) comm_abort(comm, CODE_COMM, "comm_set_device after groups were made");
    comm->device = *device;
    comm->device.set_poll(comm->device.state, comm_poll_, comm);
    if (comm->size == 1) return;
    char id[COMM_DEVICE_ID_BYTES] = {0};
    if (comm->rank == 0) comm->device.id(comm->device.state, id);
    comm_check_device_(comm);
#ifdef USE_MPI
    comm_check_(comm, MPI_Bcast(id, (int)sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD), "MPI_Bcast");
#endif
    comm->world->device = comm->device.open(comm->device.state, id, comm->rank, comm->size);
    comm_check_device_(comm);
}

static inline void comm_group_release_(CommGroup *group) {
#ifdef USE_MPI
    if (group->size > 1) comm_check_(group->comm, MPI_Comm_free(&group->mpi), "MPI_Comm_free");
#endif
    group->comm->groups[group->index] = NULL;
    free(group->members);
    free(group->local);
    free(group->slots);
    free(group);
}

// Gives a group back, so that its place serves another. Called by all members, with nothing in flight on it. NULL is allowed.
static inline void comm_group_free(CommGroup *group) {
    if (group == NULL) return;
    comm_check_idle_(group->comm, "comm_group_free");
    comm_group_ground_(group);
#ifdef USE_MPI
    if (group->size > 1) comm_check_(group->comm, MPI_Barrier(group->mpi), "MPI_Barrier"); // now nobody looks at the slots
    if (group->size > 1 && group->shared) {
        memset((void *)(group->comm->slots[group->comm->local_rank] + (ptrdiff_t)group->index * COMM_SLOTS), 0, sizeof(CommSlot) * COMM_SLOTS);
    }
#endif
    comm_group_release_(group);
}

// Turns late completion on (seed > 0) or off, with nothing in flight.
static inline void comm_late(Comm *comm, uint64_t seed) { comm->late = seed; }

// Ranks that the launcher of this process started, or 0 without a launcher.
static inline long comm_launched_(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMI_FD", "PMIX_RANK"}; // mpirun; srun with PMI
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const char *value = getenv(names[i]);
        if (value != NULL) return i < 2 ? strtol(value, NULL, 10) : 1;
    }
    return 0;
}

#ifdef USE_MPI
static inline void comm_init_mpi_(Comm *comm, int *argc, char ***argv) {
    int level = 0;
    if (MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &level) != MPI_SUCCESS) die(CODE_COMM, "MPI_Init_thread failed");
    comm->mpi = true;
    comm_check_(comm, MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    comm_check_(comm, MPI_Comm_rank(MPI_COMM_WORLD, &comm->rank), "MPI_Comm_rank");
    comm_check_(comm, MPI_Comm_size(MPI_COMM_WORLD, &comm->size), "MPI_Comm_size");
    if (level < MPI_THREAD_FUNNELED) comm_abort(comm, CODE_COMM, "MPI offers thread level %d, wanted MPI_THREAD_FUNNELED", level);
    comm_check_(comm, MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, comm->rank, MPI_INFO_NULL, &comm->host_mpi), "MPI_Comm_split_type");
    const char *hosts = getenv("TRAIN_GPT_COMM_HOSTS");
    if (hosts != NULL && atoi(hosts) > 1) {
        MPI_Comm whole = comm->host_mpi;
        comm_check_(comm, MPI_Comm_split(whole, comm->rank % atoi(hosts), comm->rank, &comm->host_mpi), "MPI_Comm_split");
        MPI_Comm_free(&whole);
    }
    comm_check_(comm, MPI_Comm_set_errhandler(comm->host_mpi, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    comm_check_(comm, MPI_Comm_rank(comm->host_mpi, &comm->local_rank), "MPI_Comm_rank");
    comm_check_(comm, MPI_Comm_size(comm->host_mpi, &comm->local_size), "MPI_Comm_size");
}

static inline void comm_init_host_(Comm *comm) {
    int *locals = base_new((size_t)comm->local_size, sizeof *locals);
    comm_check_(comm, MPI_Allgather(&comm->rank, 1, MPI_INT, locals, 1, MPI_INT, comm->host_mpi), "MPI_Allgather");
    for (int k = 0; k < comm->local_size; k++) comm->local_of[locals[k]] = k;
    free(locals);
    char *pulse = NULL; // also without `window`: it carries no data
    if (comm->local_size > 1 && comm_segment_(comm, sizeof(CommPulse), &pulse)) {
        comm->pulses = base_new((size_t)comm->local_size, sizeof *comm->pulses);
        for (int k = 0; k < comm->local_size; k++) comm->pulses[k] = (CommPulse *)(void *)comm->segments[comm->segment_count - 1].base[k];
        comm->watch.pulse = comm->pulses[comm->local_rank];
        comm->watch.leave = base_new(1, sizeof *comm->watch.leave); // freed by exit(), which reads it
        *comm->watch.leave = comm->watch.pulse;
        if (on_exit(comm_leave_, comm->watch.leave) == 0) atomic_store(&comm->watch.pulse->pid, getpid()); // else nobody asks for it
    }
    void *own = comm_alloc(comm, sizeof(CommSlot) * COMM_GROUPS_MAX * COMM_SLOTS);
    if (!comm_is_shared(comm, own)) {
        comm_release(comm, own);
        return;
    }
    comm->slots = base_new((size_t)comm->local_size, sizeof *comm->slots);
    for (int k = 0; k < comm->local_size; k++) comm->slots[k] = (CommSlot *)(void *)comm->segments[comm->segment_count - 1].base[k];
}
#endif

// Joins the job that a launcher started, or makes a job of one rank. Ends the program when that fails.
static inline Comm *comm_init(int *argc, char ***argv) {
    Comm *comm = base_new(1, sizeof *comm);
    comm->size = comm->local_size = 1;
    comm->window = true;
    comm->watch.pulse = &comm->watch.alone;
    atomic_store(&comm->watch.missing, -1);
    atomic_store(&comm->watch.silence_ms, COMM_SILENCE_MS);
    if (gethostname(comm->host, sizeof comm->host) != 0) snprintf(comm->host, sizeof comm->host, "unknown");
    comm->host[sizeof comm->host - 1] = '\0';
    const char *window = getenv("TRAIN_GPT_COMM_WINDOW"), *late = getenv("TRAIN_GPT_COMM_LATE");
    if (window != NULL && strcmp(window, "off") == 0) comm->window = false;
    if (late != NULL) comm->late = strtoull(late, NULL, 10);
    const long launched = comm_launched_();
#ifdef USE_MPI
    if (launched > 0) comm_init_mpi_(comm, argc, argv);
#else
    (void)argc, (void)argv;
    if (launched > 1)
        die(CODE_USAGE, "a launcher started %ld ranks, but this program was built without MPI (make says so in its first line)", launched);
#endif
    comm->local_of = base_new((size_t)comm->size, sizeof *comm->local_of);
    for (int r = 0; r < comm->size; r++) comm->local_of[r] = r == comm->rank ? comm->local_rank : -1;
    int *everyone = base_new((size_t)comm->size, sizeof *everyone);
    for (int r = 0; r < comm->size; r++) everyone[r] = r;
#ifdef USE_MPI
    if (comm->mpi) comm_init_host_(comm);
#endif
    comm->world = comm_group(comm, everyone, comm->size, "world");
    free(everyone);
    comm_heartbeat(comm, 0, "start");
    if (comm->size > 1) comm_watch_start_(comm);
    return comm;
}

// Waits for all ranks and leaves. Memory from comm_alloc was released before.
static inline void comm_finish(Comm *comm) {
    if (comm->started != comm->waited) {
        comm_abort(comm, CODE_COMM, "%lld operations were started and never waited for", (long long)(comm->started - comm->waited));
    }
    comm_barrier(comm->world);
    comm_set_device(comm, NULL);
    comm_watchdog_stop_(comm);
    for (int i = 0; i < comm->group_count; i++) {
        if (comm->groups[i] != NULL) comm_group_release_(comm->groups[i]);
    }
    if (comm->slots != NULL) comm_release(comm, comm->slots[comm->local_rank]);
    if (comm->pulses != NULL) comm_release(comm, comm->pulses[comm->local_rank]);
    for (int i = 0; i < comm->spare_count; i++) {
        CommOp *op = comm->spare[i];
#ifdef USE_MPI
        free(op->requests);
#endif
        free(op->from);
        free(op->to);
        free(op->scratch);
        free(op->in_counts);
        free(op->out_counts);
        free(op);
    }
#ifdef USE_MPI
    if (comm->mpi) {
        MPI_Comm_free(&comm->host_mpi);
        MPI_Finalize();
    }
#endif
    free(comm->slots);
    free(comm->pulses);
    free(comm->segments);
    free(comm->local_of);
    free(comm->groups);
    free(comm->active);
    free(comm->spare);
    free(comm->flying);
    free(comm);
}

#endif
