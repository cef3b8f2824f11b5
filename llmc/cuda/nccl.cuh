// nccl.cuh: communicators of NCCL, each with the one stream that its operations run on. All calls are non-blocking: a call that goes on in the
// background is asked for with nccl_settled, so that a peer that never comes does not hang the host. Knows no operations: those are in comm.cuh.
// Built without NCCL (NO_NCCL=1, or one rank only) there are none.
#ifndef LLMC_CUDA_NCCL_CUH
#define LLMC_CUDA_NCCL_CUH

#include "llmc/cuda/cuda.cuh" // CudaDevice, cuda_check
#include <cstdarg>            // va_list
#include <cstring>            // memcpy
#include <sched.h>            // sched_yield
#ifdef USE_NCCL
#include <nccl.h> // ncclCommInitRankConfig
#else
typedef struct ncclComm *ncclComm_t; // nothing makes one
#endif

struct CudaTicket;

// A group of ranks on the device.
struct NcclGroup {
    ncclComm_t comm;
    int rank, size;
    cudaStream_t stream;           // nullptr until the first operation
    void *scratch;                 // parts of a reduction in the order of ranks; nullptr until the first
    size_t scratch_bytes;          //
    CudaTicket *first, *last;      // started, not yet in the hands of the device
    NcclGroup *before, *following; // of all groups
};

// The first thing that failed; comm.h asks for it (CommDevice.error).
struct NcclErrors {
    char text[256];
};

__attribute__((format(printf, 2, 3))) static void nccl_note_(NcclErrors *errors, const char *format, ...) {
    if (errors->text[0] != '\0') return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(errors->text, sizeof errors->text, format, arguments);
    va_end(arguments);
}

#ifdef USE_NCCL
// False, with the error noted, when a call has failed; work in the background is none.
static bool nccl_good(NcclErrors *errors, ncclResult_t result, const char *call) {
    if (result == ncclSuccess || result == ncclInProgress) return true;
    nccl_note_(errors, "NCCL: %s: %s", call, ncclGetErrorString(result));
    return false;
}

// Has the communicator finished what its last call began? Notes what failed since, also what other ranks caused.
static bool nccl_settled(NcclErrors *errors, ncclComm_t comm) {
    ncclResult_t state = ncclInternalError;
    if (!nccl_good(errors, ncclCommGetAsyncError(comm, &state), "ncclCommGetAsyncError")) return false;
    return state == ncclSuccess || (nccl_good(errors, state, "in the background") && false);
}

// Waits until it has, or something has failed. The watchdog looks after ranks that do not come.
static void nccl_settle_(NcclErrors *errors, ncclComm_t comm) {
    while (!nccl_settled(errors, comm) && errors->text[0] == '\0') sched_yield();
}

static ncclConfig_t nccl_config_() {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    return config;
}

static void nccl_id(NcclErrors *errors, char *bytes, size_t room) {
    ncclUniqueId id;
    static_assert(sizeof id.internal == NCCL_UNIQUE_ID_BYTES, "an id is its bytes");
    if (room < sizeof id || !nccl_good(errors, ncclGetUniqueId(&id), "ncclGetUniqueId")) return;
    memcpy(bytes, &id, sizeof id);
}

// The communicator of all ranks.
static ncclComm_t nccl_open(NcclErrors *errors, const char *bytes, int rank, int size) {
    ncclUniqueId id;
    ncclComm_t comm = nullptr;
    ncclConfig_t config = nccl_config_();
    memcpy(&id, bytes, sizeof id);
    if (!nccl_good(errors, ncclCommInitRankConfig(&comm, size, id, rank, &config), "ncclCommInitRankConfig")) return nullptr;
    nccl_settle_(errors, comm);
    return comm;
}

// A part of it. nullptr for ranks without a color.
static ncclComm_t nccl_split(NcclErrors *errors, ncclComm_t whole, int color, int key) {
    ncclComm_t comm = nullptr;
    ncclConfig_t config = nccl_config_();
    if (!nccl_good(errors, ncclCommSplit(whole, color < 0 ? NCCL_SPLIT_NOCOLOR : color, key, &comm, &config), "ncclCommSplit")) return nullptr;
    nccl_settle_(errors, whole);
    if (color < 0 || errors->text[0] != '\0') return nullptr;
    nccl_settle_(errors, comm);
    return comm;
}

// Called by all its ranks, with nothing in flight.
static void nccl_close(NcclErrors *errors, ncclComm_t comm) {
    if (nccl_good(errors, ncclCommFinalize(comm), "ncclCommFinalize")) nccl_settle_(errors, comm);
    if (errors->text[0] == '\0') (void)nccl_good(errors, ncclCommDestroy(comm), "ncclCommDestroy");
}

static void nccl_abort(ncclComm_t comm) { (void)ncclCommAbort(comm); } // the job ends anyway
#else
static const char *const nccl_absent = "this program was built without NCCL: one rank only with --device cuda";
static bool nccl_settled(NcclErrors *, ncclComm_t) { return true; }
static void nccl_id(NcclErrors *errors, char *, size_t) { nccl_note_(errors, "%s", nccl_absent); }
static ncclComm_t nccl_open(NcclErrors *errors, const char *, int, int) {
    nccl_note_(errors, "%s", nccl_absent);
    return nullptr;
}
static ncclComm_t nccl_split(NcclErrors *errors, ncclComm_t, int, int) {
    nccl_note_(errors, "%s", nccl_absent);
    return nullptr;
}
static void nccl_close(NcclErrors *, ncclComm_t) {}
static void nccl_abort(ncclComm_t) {}
#endif

#endif
