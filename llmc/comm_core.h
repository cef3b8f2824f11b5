// comm_core.h: the state of communication (Comm, CommGroup, CommOp), how a job ends when a rank fails, and the watchdog.
// Users include comm.h, which explains the whole.
#ifndef LLMC_COMM_CORE_H
#define LLMC_COMM_CORE_H

#include "llmc/base.h"        // die, base_new
#include "llmc/comm_reduce.h" // CommType, CommReduce
#include <pthread.h>          // pthread_create, mutex
#include <sched.h>            // sched_yield
#include <signal.h>           // pthread_sigmask
#include <stdalign.h>         // alignas
#include <stdatomic.h>        // atomic_load_explicit
#ifdef USE_MPI
#include <mpi.h> // MPI_Isend, MPI_Win_allocate_shared
#endif

typedef enum {
    COMM_ALL_REDUCE,
    COMM_REDUCE_SCATTER,
    COMM_ALL_GATHER,
    COMM_BROADCAST,
    COMM_ALL_TO_ALL,
    COMM_SEND,
    COMM_RECV,
    COMM_BARRIER,
    COMM_KINDS
} CommKind;
static const char *const comm_kind_names[COMM_KINDS] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                                        "all_to_all", "send",           "recv",       "barrier"};

typedef struct {
    int64_t calls, bytes; // bytes as defined in comm.h
} CommCount;

enum {
    COMM_GROUPS_MAX = 24,    // of a rank, that communicate through shared memory; more work too, by messages
    COMM_SLOTS = 8,          // collectives of a group in flight; later ones queue
    COMM_INLINE_BYTES = 256, // smaller all-reduces travel in the slot
};

// What a rank shows the others of its host about one collective of one group. posted and done hold sequence numbers + 1, and only grow:
// slot s serves the collectives s, s + COMM_SLOTS, ... of the group.
typedef struct {
    alignas(64) _Atomic uint64_t posted; // the rank's input is there, and what follows says where
    int64_t segment, offset;             // in comm_alloc memory; segment -1: in plain memory, nobody else can read it
    alignas(64) _Atomic uint64_t done;   // the rank neither reads nor writes memory of others any more
    alignas(64) char data[COMM_INLINE_BYTES];
} CommSlot;

// Memory from comm_alloc.
typedef struct {
    bool used;
    size_t bytes; // of this rank
    char **base;  // (local_size) where each rank's part is in this process
#ifdef USE_MPI
    MPI_Win window;
#endif
} CommSegment;

typedef struct Comm Comm;
typedef struct CommGroup CommGroup;
typedef struct CommOp CommOp;

struct CommGroup {
    Comm *comm;
    char name[32];
    int index; // of the communicator's groups on this rank
    int size, rank;
    int *members;     // (size) world ranks
    bool shared;      // all members on this host, with slots:
    int *local;       // (size) local rank of a member
    CommSlot **slots; // (size) its COMM_SLOTS slots for this group
    uint64_t started; // collectives
    uint64_t opened;  // of these, those that have left POSTED
    CommCount counts[COMM_KINDS];
#ifdef USE_MPI
    MPI_Comm mpi;
#endif
};

typedef enum { COMM_ACQUIRE, COMM_POSTED, COMM_WORK, COMM_DONE, COMM_MESSAGES, COMM_LOCAL, COMM_COMPLETE } CommStage;

struct CommOp {
    CommGroup *group;
    CommKind kind;
    CommType type, out_type;
    CommReduce how;
    void *out;
    const void *in;
    int64_t count;                   // elements: of the buffer, or of one rank's part (reduce_scatter, all_gather, all_to_all)
    int64_t *in_counts, *out_counts; // (size) of all_to_allv, or NULL
    int peer, tag;                   // root, destination or source: rank in the group
    uint64_t sequence;               // collectives of the group before this one
    CommStage stage;
    int round;         // of messages
    int64_t at;        // work done
    const void **from; // (size) every rank's input
    void **to;         // (size) every rank's output
    char *scratch;
    size_t scratch_bytes;
#ifdef USE_MPI
    MPI_Request *requests;
    int request_count, request_room;
#endif
    // late completion: where the operation really works, and the user's buffers
    void *late_out, *user_out;
    void *late_in;
    const void *user_in;
    size_t out_bytes, in_bytes;
};

typedef struct {
    bool running;
    pthread_t thread;
    pthread_mutex_t lock; // of phase
    char phase[64];
    _Atomic int64_t step;
    _Atomic int64_t alive_ms; // last sign of progress
    _Atomic bool stop;
    double limit_ms;
    _Atomic(const CommGroup *) group; // what the main thread waits for; NULL: it computes
    _Atomic int kind;
    _Atomic int missing; // world rank that was last seen not to have come, or -1
} CommWatch;

struct Comm {
    int rank, size;             // world
    int local_rank, local_size; // ranks of this host
    char host[64];
    bool mpi;      // MPI_Init was called
    bool window;   // shared memory is wanted
    uint64_t late; // seed of the late-completion mode; 0 = off
    uint64_t late_draws;
    CommGroup *world; // every rank
    CommGroup **groups;
    int group_count;
    CommSegment *segments;
    int segment_count;
    int *local_of;    // (size) local rank of a rank of the world, or -1 when it is on another host
    CommSlot **slots; // (local_size) COMM_GROUPS_MAX x COMM_SLOTS of each rank, or NULL
    CommOp **active;  // started and not completed, in this order
    int active_count, active_room;
    const CommOp *awaited; // by comm_wait
    CommOp **spare;        // finished, for reuse
    int spare_count, spare_room;
    int64_t started, waited; // operations
    CommCount counts[COMM_KINDS];
    CommWatch watch;
#ifdef USE_MPI
    MPI_Comm host_mpi;
#endif
};

// ----------------------------------------------------------------------------
// Failure

static inline void comm_abort(Comm *comm, int code, const char *format, ...) __attribute__((noreturn));
LLMC_PRINTF(3, 4)
// Prints one line that names rank and host, and ends the job with this exit code.
static inline void comm_abort(Comm *comm, int code, const char *format, ...) {
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "train_gpt: rank %d on %s: %s\n", comm->rank, comm->host, text); // one write, so that ranks do not mix
    fflush(stderr);
#ifdef USE_MPI
    if (comm->mpi) {
        signal(SIGALRM, SIG_DFL);
        alarm(5); // should MPI_Abort hang, the launcher sees a killed rank
        MPI_Abort(MPI_COMM_WORLD, code);
    }
#endif
    _exit(code); // not exit(): another thread may be the caller
}

#ifdef USE_MPI
static inline void comm_check_(Comm *comm, int result, const char *what) {
    if (result == MPI_SUCCESS) return;
    char text[MPI_MAX_ERROR_STRING + 1] = "";
    int length = 0;
    MPI_Error_string(result, text, &length);
    comm_abort(comm, CODE_COMM, "%s: %.*s", what, length, text);
}
#endif

// ----------------------------------------------------------------------------
// Watchdog

static inline void comm_alive_(Comm *comm) { atomic_store_explicit(&comm->watch.alive_ms, (int64_t)clock_ms(), memory_order_relaxed); }

// Where the run is, for messages; also a sign of life. phase is copied.
static inline void comm_heartbeat(Comm *comm, int64_t step, const char *phase) {
    pthread_mutex_lock(&comm->watch.lock);
    snprintf(comm->watch.phase, sizeof comm->watch.phase, "%s", phase);
    pthread_mutex_unlock(&comm->watch.lock);
    atomic_store(&comm->watch.step, step);
    comm_alive_(comm);
}

static inline void *comm_watch_(void *argument) {
    Comm *comm = argument;
    CommWatch *watch = &comm->watch;
    const double nap_ms = watch->limit_ms / 10 < 100 ? watch->limit_ms / 10 : 100;
    const struct timespec nap = {.tv_nsec = (long)(nap_ms * 1e6)};
    while (!atomic_load(&watch->stop)) {
        nanosleep(&nap, NULL);
        const double idle_ms = clock_ms() - (double)atomic_load(&watch->alive_ms);
        if (idle_ms <= watch->limit_ms || atomic_load(&watch->stop)) continue;
        char what[128] = "computation", who[48] = "", phase[64];
        const CommGroup *group = atomic_load(&watch->group);
        const int missing = atomic_load(&watch->missing);
        if (group != NULL) snprintf(what, sizeof what, "%s on %s (%d ranks)", comm_kind_names[atomic_load(&watch->kind)], group->name, group->size);
        if (group != NULL && missing >= 0) snprintf(who, sizeof who, " (rank %d has not come)", missing);
        pthread_mutex_lock(&watch->lock);
        memcpy(phase, watch->phase, sizeof phase);
        pthread_mutex_unlock(&watch->lock);
        comm_abort(comm, CODE_COMM, "step %lld, phase %s: no progress in %s for %.1f s%s", (long long)atomic_load(&watch->step), phase, what,
                   idle_ms * 1e-3, who);
    }
    return NULL;
}

// Ends the job when this rank shows no sign of life for so long: no heartbeat, no call of comm_progress, no operation started or
// advanced. 0 = never. Once per Comm.
static inline void comm_watchdog(Comm *comm, double seconds) {
    if (seconds <= 0 || comm->watch.running) return;
    comm->watch.limit_ms = seconds * 1e3;
    comm_alive_(comm);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // signals are the main thread's
    const int result = pthread_create(&comm->watch.thread, NULL, comm_watch_, comm);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result != 0) comm_abort(comm, CODE_COMM, "cannot start the watchdog: %s", strerror(result));
    comm->watch.running = true;
}

static inline void comm_watchdog_stop_(Comm *comm) {
    if (!comm->watch.running) return;
    atomic_store(&comm->watch.stop, true);
    pthread_join(comm->watch.thread, NULL);
    comm->watch.running = false;
}

#endif
