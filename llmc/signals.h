// signals.h: wishes to stop: SIGTERM, SIGUSR1, SIGINT, and the file OUT/stop. The trainer asks once per step, saves, and exits with
// CODE_PREEMPTED; nothing is decided here.
//
// Signals are blocked in every thread and taken by a thread of their own. A handler would run on the stack of a thread that
// computes, and oneDNN's generated kernels do not always keep a stack there: one signal in thirty was seen to end in a
// corrupted heap.
#ifndef LLMC_SIGNALS_H
#define LLMC_SIGNALS_H

#include "llmc/base.h" // Error, fail
#include <pthread.h>   // pthread_create, pthread_sigmask
#include <signal.h>    // sigwait
#include <stdatomic.h> // atomic_int

static atomic_int signals_stop_; // the program's only global: the number of the signal that asked, 0 = none

static inline void signals_set_(sigset_t *set) {
    sigemptyset(set);
    sigaddset(set, SIGTERM), sigaddset(set, SIGUSR1), sigaddset(set, SIGINT);
}

// Waits for signals; a second SIGINT kills.
static inline void *signals_thread_(void *unused) {
    sigset_t set;
    signals_set_(&set);
    for (int number; sigwait(&set, &number) == 0;) {
        const bool again = number == SIGINT && atomic_load(&signals_stop_) == SIGINT;
        atomic_store(&signals_stop_, number);
        if (!again) continue;
        signal(SIGINT, SIG_DFL);
        pthread_sigmask(SIG_UNBLOCK, &set, NULL);
        raise(SIGINT);
    }
    return unused;
}

// SIGTERM and SIGUSR1 (what batch systems send ahead of a time limit) ask to stop; so does SIGINT. Call it before any other
// thread exists: they inherit the mask.
static inline bool signals_block(Error *error) {
    sigset_t set;
    pthread_t thread;
    signals_set_(&set);
    int status = pthread_sigmask(SIG_BLOCK, &set, NULL);
    if (status == 0) status = pthread_create(&thread, NULL, signals_thread_, NULL);
    if (status == 0) status = pthread_detach(thread);
    return status == 0 || fail(error, CODE_IO, "cannot listen to signals: %s", strerror(status));
}

// Why a run should stop, and the words for it.
typedef enum { STOP_NONE, STOP_TERM, STOP_USR1, STOP_INT, STOP_FILE, STOP_FILE_STAYS, STOP_REASONS } StopReason;
static const char *const stop_reason_names[STOP_REASONS] = {
    NULL, "SIGTERM", "SIGUSR1", "SIGINT", "the file stop in --out", "the file stop in --out (which cannot be removed)"};

// What this process was asked. OUT/stop is removed when it is honoured, so that it stops one run only.
static inline StopReason signals_stop_requested(const char *out) {
    switch (atomic_load(&signals_stop_)) {
    case 0: break;
    case SIGTERM: return STOP_TERM;
    case SIGUSR1: return STOP_USR1;
    default: return STOP_INT;
    }
    if (out == NULL) return STOP_NONE;
    char path[4096 + 8];
    snprintf(path, sizeof path, "%s/stop", out);
    if (access(path, F_OK) != 0) return STOP_NONE;
    return unlink(path) == 0 ? STOP_FILE : STOP_FILE_STAYS;
}

#endif
