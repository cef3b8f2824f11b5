// comm_core.h: the state of communication (Comm, CommGroup, CommOp), how a job ends when a rank fails, and the watchdog.
// Users include comm.h, which explains the whole.
#ifndef LLMC_COMM_CORE_H
#define LLMC_COMM_CORE_H

#include "llmc/base.h"        // die, base_new
#include "llmc/comm_device.h" // CommDevice, CommType, CommKind
#include "llmc/comm_reduce.h" // comm_reduce
#include <pthread.h>          // pthread_create
#include <sched.h>            // sched_yield
#include <signal.h>           // pthread_sigmask
#include <stdalign.h>         // alignas
#include <stdatomic.h>        // atomic_load_explicit
#ifdef USE_MPI
#include <mpi.h> // MPI_Isend, MPI_Win_allocate_shared
#endif

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

// What a rank shows the others of its host about itself.
typedef struct {
    alignas(64) _Atomic uint64_t beats; // grows as long as the process runs, whatever its main thread does
    alignas(64) _Atomic uint64_t signs; // signs of life of the main thread
    _Atomic bool left;                  // the process ends in order
    _Atomic int64_t pid;
    _Atomic int64_t step;
    _Atomic bool waiting;      // the main thread is in comm_wait, with nothing to do
    _Atomic uint64_t phase[8]; // text
} CommPulse;

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
    // on a device: the group's, and of a pipe (comm_pipe) the links to the next rank and from the one before; NULL: none
    void *device, *link_out, *link_in;
    int step; // of a pipe: 1 or -1; otherwise 0
    CommCount counts[COMM_KINDS];
#ifdef USE_MPI
    MPI_Comm mpi;
#endif
};

typedef enum { COMM_ACQUIRE, COMM_POSTED, COMM_WORK, COMM_DONE, COMM_MESSAGES, COMM_LOCAL, COMM_ON_DEVICE, COMM_COMPLETE } CommStage;

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
    bool on_device;    // its buffers are
    void *ticket;      // of the device; NULL: none
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

// Device memory for late completion: kept until the end, because giving it back would wait for the device.
typedef struct {
    void *data;
    size_t bytes;
    const CommOp *user; // NULL: free
} CommLateBlock;

// How long a rank has shown nothing, in time that this process ran.
typedef struct {
    uint64_t beats, signs; // as last seen
    double silent_ms;      // since beats grew
    double quiet_ms;       // since signs grew
    double waited_ms;      // the part of it at the end in which the main thread waited
    bool exists;           // a process with its pid was seen at the beginning (not where ranks have their own name spaces)
} CommSeen;

typedef struct {
    bool running;
    pthread_t thread;
    CommPulse *pulse; // of this rank: `alone`, or in memory that the ranks of the host share
    CommPulse alone;
    CommSeen *seen;    // (local_size)
    CommPulse **leave; // (1) where exit() tells that this process ends in order; holds NULL after comm_finish
    _Atomic bool stop;
    _Atomic int64_t limit_ms;         // of the main thread; 0: no limit
    _Atomic int64_t silence_ms;       // of a process, and of all main threads together; 0: no limit
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
    int *local_of;      // (size) local rank of a rank of the world, or -1 when it is on another host
    CommSlot **slots;   // (local_size) COMM_GROUPS_MAX x COMM_SLOTS of each rank, or NULL
    CommPulse **pulses; // (local_size) of each rank, or NULL
    CommOp **active;    // started and not completed, in this order
    int active_count, active_room;
    const CommOp *awaited; // by comm_wait
    CommOp **spare;        // finished, for reuse
    int spare_count, spare_room;
    int64_t started, waited; // operations
    CommDevice device;       // state NULL: none
    double device_checked_ms;
    bool device_failed;
    CommOp **flying; // waited for by the compute queue, not yet seen to be complete, in the order of the waits
    int flying_count, flying_room;
    CommLateBlock *late_blocks;
    int late_block_count;
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
    atomic_store(&comm->watch.pulse->left, true); // others have nothing to add
#ifdef USE_MPI
    if (comm->mpi) {
        signal(SIGALRM, SIG_DFL);
        alarm(5);                                                        // should MPI_Abort hang, the launcher sees a killed rank
        if (comm->device_failed) comm->device.abort(comm->device.state); // by the main thread, which has seen it
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
// Watchdog: a thread on every rank of a job. It looks for
//   a process of this host that has died without exit() or does not run (stopped, frozen): it is gone, its beats are missing;
//   a job in which all ranks wait, each for another: seen when all are on this host;
//   a main thread without a sign of life, in a computation or in waiting: its own.
// The first two do not depend on what the ranks are doing, and need little patience (COMM_SILENCE_MS): no healthy rank looks like that, however
// long it computes, saves or verifies. The third is comm_watchdog's limit. Time is counted while this process runs: a job that was suspended as a
// whole goes on when it is woken.

enum { COMM_NAP_MS = 50, COMM_GONE_MS = 200, COMM_SILENCE_MS = 20000 };

static inline void comm_alive_(Comm *comm) {
    _Atomic uint64_t *signs = &comm->watch.pulse->signs; // only this thread writes it
    atomic_store_explicit(signs, atomic_load_explicit(signs, memory_order_relaxed) + 1, memory_order_relaxed);
}

// In comm_wait, and not at work there?
static inline void comm_waiting_(Comm *comm, bool waiting) { atomic_store_explicit(&comm->watch.pulse->waiting, waiting, memory_order_relaxed); }

// Where the run is, for messages; also a sign of life. phase is copied.
static inline void comm_heartbeat(Comm *comm, int64_t step, const char *phase) {
    CommPulse *pulse = comm->watch.pulse;
    uint64_t words[8] = {0};
    snprintf((char *)words, sizeof words, "%s", phase);
    for (int i = 0; i < 8; i++) atomic_store_explicit(&pulse->phase[i], words[i], memory_order_relaxed); // a reader may see parts of two
    atomic_store_explicit(&pulse->step, step, memory_order_relaxed);
    comm_alive_(comm);
}

// "step 17, phase backward"
static inline const char *comm_place_(const CommPulse *pulse, char text[128]) {
    uint64_t words[8];
    for (int i = 0; i < 8; i++) words[i] = atomic_load_explicit(&pulse->phase[i], memory_order_relaxed);
    snprintf(text, 128, "step %lld, phase %.*s", (long long)atomic_load_explicit(&pulse->step, memory_order_relaxed), (int)sizeof words - 1,
             (const char *)words);
    return text;
}

// Ends the job because of this rank's main thread.
static inline void comm_give_up_(Comm *comm, const char *prefix, double quiet_ms) {
    const CommWatch *watch = &comm->watch;
    char place[128], what[128] = "computation", who[48] = "";
    const CommGroup *group = atomic_load(&watch->group);
    const int missing = atomic_load(&watch->missing);
    if (group != NULL) snprintf(what, sizeof what, "%s on %s (%d ranks)", comm_kind_names[atomic_load(&watch->kind)], group->name, group->size);
    if (group != NULL && missing >= 0) snprintf(who, sizeof who, " (rank %d has not come)", missing);
    comm_abort(comm, CODE_COMM, "%s: %sno progress in %s for %.1f s%s", comm_place_(watch->pulse, place), prefix, what, quiet_ms * 1e-3, who);
}

// Ends the job because of the process of rank `local_rank` of this host.
static inline void comm_lost_(Comm *comm, int local_rank, const char *what, double silent_ms) {
    char here[128], there[128];
    int rank = 0;
    while (comm->local_of[rank] != local_rank) rank++;
    comm_abort(comm, CODE_COMM, "%s: rank %d on %s %s: no sign of its process for %.1f s, since %s", comm_place_(comm->watch.pulse, here), rank,
               comm->host, what, silent_ms * 1e-3, comm_place_(comm->pulses[local_rank], there));
}

static inline bool comm_exists_(const CommPulse *pulse) {
    return kill((pid_t)atomic_load_explicit(&pulse->pid, memory_order_relaxed), 0) == 0 || errno == EPERM;
}

static inline void comm_look_(Comm *comm, double elapsed_ms) {
    CommWatch *watch = &comm->watch;
    const double silence_ms = (double)atomic_load(&watch->silence_ms), limit_ms = (double)atomic_load(&watch->limit_ms);
    const double turn_ms = 50 * (comm->local_rank < 8 ? comm->local_rank : 8); // of ranks that see the same, one tells
    bool all_wait = comm->size > 1 && comm->local_size == comm->size && silence_ms > 0;
    for (int k = 0; k < comm->local_size; k++) {
        const bool own = k == comm->local_rank;
        const CommPulse *pulse = own ? watch->pulse : comm->pulses != NULL ? comm->pulses[k] : NULL;
        CommSeen *seen = &watch->seen[k];
        if (pulse == NULL) {
            all_wait = false;
            continue;
        }
        const uint64_t beats = atomic_load_explicit(&pulse->beats, memory_order_relaxed);
        const uint64_t signs = atomic_load_explicit(&pulse->signs, memory_order_relaxed);
        const bool silent = beats == seen->beats, quiet = signs == seen->signs;
        seen->silent_ms = silent ? seen->silent_ms + elapsed_ms : 0;
        seen->quiet_ms = quiet ? seen->quiet_ms + elapsed_ms : 0;
        seen->waited_ms = quiet && atomic_load_explicit(&pulse->waiting, memory_order_relaxed) ? seen->waited_ms + elapsed_ms : 0;
        seen->beats = beats, seen->signs = signs;
        all_wait = all_wait && seen->waited_ms > silence_ms + turn_ms;
        if (own || silence_ms == 0 || atomic_load(&pulse->left)) continue;
        const bool gone = silent && seen->exists && !comm_exists_(pulse);
        if (gone && seen->silent_ms > COMM_GONE_MS + turn_ms && !atomic_load(&pulse->left)) { // it may have told its end meanwhile
            comm_lost_(comm, k, "has died", seen->silent_ms);
        }
        if (seen->silent_ms > silence_ms + turn_ms) comm_lost_(comm, k, "is stopped, frozen or dead", seen->silent_ms);
    }
    const CommSeen *own = &watch->seen[comm->local_rank];
    if (all_wait) comm_give_up_(comm, "all ranks wait: ", own->waited_ms);
    if (limit_ms > 0 && own->quiet_ms > limit_ms) comm_give_up_(comm, "", own->quiet_ms);
}

static inline void *comm_watch_(void *argument) {
    Comm *comm = argument;
    CommWatch *watch = &comm->watch;
    double before_ms = clock_ms();
    while (!atomic_load(&watch->stop)) {
        const struct timespec nap = {.tv_nsec = COMM_NAP_MS * 1000000};
        nanosleep(&nap, NULL);
        atomic_fetch_add_explicit(&watch->pulse->beats, 1, memory_order_relaxed);
        const double now_ms = clock_ms(), elapsed_ms = now_ms - before_ms;
        before_ms = now_ms;
        if (!atomic_load(&watch->stop)) comm_look_(comm, elapsed_ms < 10 * COMM_NAP_MS ? elapsed_ms : 10 * COMM_NAP_MS);
    }
    return NULL;
}

static inline void comm_leave_(int status, void *leave) {
    (void)status;
    CommPulse *pulse = *(CommPulse **)leave;
    if (pulse != NULL) atomic_store(&pulse->left, true);
    free(leave);
}

// Starts the watchdog's thread. Processes are looked after from now on; the main thread when comm_watchdog says for how long.
static inline void comm_watch_start_(Comm *comm) {
    if (comm->watch.running) return;
    comm->watch.seen = base_new((size_t)comm->local_size, sizeof *comm->watch.seen);
    for (int k = 0; k < comm->local_size && comm->pulses != NULL; k++) comm->watch.seen[k].exists = comm_exists_(comm->pulses[k]);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // signals are the main thread's
    const int result = pthread_create(&comm->watch.thread, NULL, comm_watch_, comm);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (result != 0) comm_abort(comm, CODE_COMM, "cannot start the watchdog: %s", strerror(result));
    comm->watch.running = true;
}

// Ends the job when this rank's main thread shows no sign of life for so long: no heartbeat, no call of comm_progress, no operation started
// or advanced. A process that does not run, and ranks that all wait, are given COMM_SILENCE_MS at most. 0 turns all of it off.
static inline void comm_watchdog(Comm *comm, double seconds) {
    const int64_t limit_ms = seconds > 0 ? max_i64(1, (int64_t)(seconds * 1e3)) : 0;
    comm_alive_(comm);
    atomic_store(&comm->watch.limit_ms, limit_ms);
    atomic_store(&comm->watch.silence_ms, min_i64(limit_ms, COMM_SILENCE_MS));
    if (limit_ms > 0) comm_watch_start_(comm);
}

static inline void comm_watchdog_stop_(Comm *comm) {
    if (!comm->watch.running) return;
    atomic_store(&comm->watch.stop, true);
    pthread_join(comm->watch.thread, NULL);
    atomic_store(&comm->watch.pulse->left, true);
    if (comm->watch.leave != NULL) *comm->watch.leave = NULL;
    free(comm->watch.seen);
    comm->watch.running = false;
}

#endif
