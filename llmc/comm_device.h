// comm_device.h: what a device offers so that its memory can be communicated: a table of functions which comm_set_device (comm.h) is given.
// Operations on device memory go to the device, everything else stays with MPI. The CUDA device fills it in llmc/cuda/comm.cuh. For C and C++.
//
// How an operation runs. `start` marks where the compute queue is; the operation begins on a queue of its group when the compute queue has come
// there, so it reads what ops before it wrote and writes what ops before it no longer use. A start never blocks the host: operations of a group
// begin in the order of their starts, those of other groups go on meanwhile. `issued` moves it on and says whether all of it is in the hands of the
// device. Then `wait` lets the compute queue, not the host, wait for its end: ops enqueued later see the result.
#ifndef LLMC_COMM_DEVICE_H
#define LLMC_COMM_DEVICE_H

#include "llmc/comm_types.h" // CommKind, CommType, CommReduce
#include <stdbool.h>         // bool

enum { COMM_DEVICE_ID_BYTES = 128 }; // of what the first rank tells the others so that they find each other

// An operation, in the words of comm.h. The lists of counts live until the ticket is given back.
typedef struct {
    CommKind kind;
    CommType type, out_type;
    CommReduce how;
    void *out;                             // device memory
    const void *in;                        // device memory
    int64_t count;                         // elements: of the buffer, or of one rank's part (reduce_scatter, all_gather, all_to_all)
    const int64_t *in_counts, *out_counts; // (size) of all_to_allv, or NULL
    int peer;                              // root; of a message: rank in the link
} CommCall;

// Called again and again while the host waits for the device, with waiting = true; once more with false when that is over.
typedef void (*CommPoll)(void *argument, bool waiting);

typedef struct {
    void *state; // NULL: no device

    // --- memory (bytes). alloc: zeroed, 64-byte aligned, or the process ends; release waits for the compute queue
    void *(*alloc)(void *state, size_t bytes);
    void (*release)(void *state, void *pointer);
    bool (*owns)(void *state, const void *pointer); // is it device memory?
    // on the compute queue: to = from, both device memory; bytes = value; to (host) = from, after waiting for it
    void (*copy)(void *state, void *to, const void *from, size_t bytes);
    void (*fill)(void *state, void *pointer, int value, size_t bytes);
    void (*read)(void *state, void *to_host, const void *from, size_t bytes);

    // --- ranks. All ranks of the job call open, then split, in the same order, with nothing in flight
    void (*id)(void *state, char id[COMM_DEVICE_ID_BYTES]);                              // by the first rank
    void *(*open)(void *state, const char id[COMM_DEVICE_ID_BYTES], int rank, int size); // the group of all
    void *(*split)(void *state, int color, int key); // a group of those with the same color, in the order of keys; color -1: NULL, in none
    void (*free)(void *state, void *group);          // by all its ranks

    // --- operations
    void (*local)(void *state, const CommCall *call);               // in a group of one: on the compute queue
    void *(*start)(void *state, void *group, const CommCall *call); // returns a ticket
    bool (*issued)(void *state, void *ticket);
    void (*wait)(void *state, void *ticket);   // once issued
    bool (*done)(void *state, void *ticket);   // complete, once issued
    bool (*blocks)(void *state, void *ticket); // the compute queue stands at its wait
    void (*forget)(void *state, void *ticket); // once done

    // --- the rest
    void (*set_poll)(void *state, CommPoll poll, void *argument); // NULL: none
    const char *(*error)(void *state);                            // what failed since, or NULL
    void (*abort)(void *state);                                   // ends what runs on the device, after an error
} CommDevice;

#endif
