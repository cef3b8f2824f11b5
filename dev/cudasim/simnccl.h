// simnccl.h: communicators of the simulated NCCL and its messages over MPI, for simnccl.cc (communicators) and simnccl_ops.cc (operations).
#pragma once
#include "simcu_rt.h" // enqueue, range_note
#include <chrono>     // std::chrono::steady_clock
#include <deque>      // std::deque
#include <memory>     // std::unique_ptr
#include <mpi.h>      // MPI_Request
#include <nccl.h>     // ncclResult_t

namespace simcu::nccl {

enum Channel { COLLECTIVE, MESSAGE, SPLIT, SPLIT_REPLY, MEET, MEET_REPLY, CHANNELS }; // a tag of MPI is context * CHANNELS + channel

// Bytes under way to another process. All waiting is polling.
struct Outgoing {
    std::vector<char> bytes;
    MPI_Request request;
};
void send_bytes(std::deque<Outgoing> *list, int world_rank, int context, Channel channel, std::vector<char> bytes, bool synchronous);
bool all_sent(std::deque<Outgoing> *list); // forgets those that are done
bool receive_bytes(int world_rank, int context, Channel channel,
                   std::vector<char> *bytes); // false: nothing there yet. world_rank may be MPI_ANY_SOURCE

// What a rank does to become a member: sends who it is, waits for the list of members.
struct Setup {
    bool started = false;
    std::function<bool()> advance; // true when done
    std::function<std::string()> waits_for;
    std::deque<Outgoing> out;
    int polls = 0; // without success, since `began`
    std::chrono::steady_clock::time_point began;
};

} // namespace simcu::nccl

struct ncclComm {
    int rank = 0, size = 0, context = 0;
    std::vector<int> world; // ranks of MPI_COMM_WORLD
    bool blocking = true, aborted = false, finalized = false;
    ncclResult_t state = ncclInProgress;
    uint64_t issued = 0, done = 0;                   // operations: they run in the order of issue, whatever their streams
    std::unique_ptr<simcu::nccl::Setup> setup;       // nullptr: member
    std::vector<std::function<ncclResult_t()>> held; // a non-blocking communicator's operations that wait for a poll
    bool used = false;
    ncclComm *parent = nullptr, *child = nullptr; // of a split under way: both are busy
    int registrations = 0;
};

namespace simcu::nccl {

ncclResult_t refuse(ncclResult_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));
ncclResult_t ready(ncclComm_t comm, const char *call); // may operations be given to it?
void poll(ncclComm_t comm);
void wait_setups(const std::vector<ncclComm_t> &comms, const char *call);
bool in_group();
void group_setup(ncclComm_t comm); // waited for by ncclGroupEnd
bool is_device(const void *pointer, size_t bytes);

} // namespace simcu::nccl
