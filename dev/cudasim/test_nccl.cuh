// test_nccl.cuh: the simulated NCCL on as many ranks as there are (one without a launcher): every collective, type and reduction against plain
// sums, messages in groups, splits, communicators that do not block, several streams, graphs, aborts. What hangs is in planted/.
#ifndef CUDASIM_TEST_NCCL_CUH
#define CUDASIM_TEST_NCCL_CUH

#include "dev/cudasim/test_sim.cuh" // to_device
#include <mpi.h>                    // MPI_Bcast
#include <nccl.h>                   // ncclAllReduce

static inline void need_nccl(ncclResult_t result, const char *call) {
    if (result == ncclSuccess) return;
    printf("FAILED: %s: %s (%s)\n", call, ncclGetErrorString(result), ncclGetLastError(nullptr));
    exit(1);
}
#define NEED_NCCL(call) need_nccl(call, #call)

struct Ranks {
    int rank, size;
    bool mpi;
};
static Ranks ranks_open() {
    Ranks r = {0, 1, getenv("OMPI_COMM_WORLD_SIZE") != nullptr};
    if (!r.mpi) return r;
    MPI_Init(nullptr, nullptr);
    MPI_Comm_rank(MPI_COMM_WORLD, &r.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &r.size);
    return r;
}
static ncclUniqueId shared_id(const Ranks &r) {
    ncclUniqueId id;
    if (r.rank == 0) NEED_NCCL(ncclGetUniqueId(&id));
    if (r.mpi) MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    return id;
}

// Element i of rank r, small whole numbers: exact in every type, so are their sums.
static int element(int r, int64_t i) { return (int)((i * 7 + r * 3) % 11) - (r % 2 == 0 ? 0 : 4); }

template <class T> static T number(double x) { return (T)x; }
template <> bf16 number<bf16>(double x) { return __float2bfloat16((float)x); }
template <class T> static double value(T x) { return (double)x; }
template <> double value<bf16>(bf16 x) { return __bfloat162float(x); }

static double reduced(ncclRedOp_t op, int size, int64_t i, bool is_unsigned) {
    double r = 0;
    for (int k = 0; k < size; k++) {
        const double v = is_unsigned ? abs(element(k, i)) : element(k, i);
        if (k == 0)
            r = v;
        else
            r = op == ncclMax ? fmax(r, v) : op == ncclMin ? fmin(r, v) : r + v;
    }
    return op == ncclAvg ? r / size : r;
}

template <class T> static void test_collectives(ncclComm_t comm, const Ranks &g, ncclDataType_t type, cudaStream_t stream, bool is_unsigned) {
    const int64_t n = 37;
    const size_t all = (size_t)(n * g.size);
    std::vector<T> in(all);
    for (int64_t i = 0; i < n * g.size; i++) in[(size_t)i] = number<T>(is_unsigned ? abs(element(g.rank, i)) : element(g.rank, i));
    T *a = to_device(in), *b = device_new<T>(all);
    const auto want = [&](int64_t i, double w, const char *what, const std::vector<T> &got, int64_t at) {
        check(value(got[(size_t)at]) == value(number<T>(w)), "%s, type %d, element %lld of rank %d: %g, wanted %g", what, (int)type, (long long)i,
              g.rank, value(got[(size_t)at]), w);
    };
    const auto mine = [&](int r, int64_t i) { return (double)(is_unsigned ? abs(element(r, i)) : element(r, i)); };
    for (const ncclRedOp_t op : {ncclSum, ncclMax, ncclMin, ncclAvg}) {
        if (op == ncclAvg && (is_unsigned || std::is_integral<T>::value)) continue; // rounds towards zero; not used
        NEED_NCCL(ncclAllReduce(a, b, all, type, op, comm, stream));
        NEED_NCCL(ncclAllReduce(b, b, 0, type, op, comm, stream)); // of nothing
        NEED(cudaStreamSynchronize(stream));
        std::vector<T> got = to_host(b, all);
        for (int64_t i = 0; i < (int64_t)all; i++) want(i, reduced(op, g.size, i, is_unsigned), "all-reduce", got, i);
        NEED_NCCL(ncclReduceScatter(a, b, (size_t)n, type, op, comm, stream));
        NEED(cudaStreamSynchronize(stream));
        got = to_host(b, (size_t)n);
        for (int64_t i = 0; i < n; i++) want(i, reduced(op, g.size, g.rank * n + i, is_unsigned), "reduce-scatter", got, i);
    }
    const int root = g.size - 1;
    NEED_NCCL(ncclReduce(a, b, all, type, ncclSum, root, comm, stream));
    NEED(cudaStreamSynchronize(stream));
    std::vector<T> got = to_host(b, all);
    for (int64_t i = 0; g.rank == root && i < (int64_t)all; i++) want(i, reduced(ncclSum, g.size, i, is_unsigned), "reduce", got, i);
    NEED_NCCL(ncclAllGather(a, b, (size_t)n, type, comm, stream));
    NEED(cudaStreamSynchronize(stream));
    got = to_host(b, all);
    for (int64_t i = 0; i < (int64_t)all; i++) want(i, mine((int)(i / n), i % n), "all-gather", got, i);
    NEED_NCCL(ncclAlltoAll(a, b, (size_t)n, type, comm, stream));
    NEED(cudaStreamSynchronize(stream));
    got = to_host(b, all);
    for (int64_t i = 0; i < (int64_t)all; i++) want(i, mine((int)(i / n), g.rank * n + i % n), "all-to-all", got, i);
    NEED_NCCL(ncclBroadcast(a, b, all, type, root, comm, stream));
    NEED_NCCL(ncclAllReduce(a, a, all, type, ncclSum, comm, stream)); // in place
    NEED(cudaStreamSynchronize(stream));
    got = to_host(b, all);
    for (int64_t i = 0; i < (int64_t)all; i++) want(i, mine(root, i), "broadcast", got, i);
    got = to_host(a, all);
    for (int64_t i = 0; i < (int64_t)all; i++) want(i, reduced(ncclSum, g.size, i, is_unsigned), "all-reduce in place", got, i);
    NEED(cudaFree(a));
    NEED(cudaFree(b));
}

// Sums are taken in the order of ranks, in the type's own arithmetic: 1, 2^-24, 2^-24, ... and 2^24 show both.
static void test_order(ncclComm_t comm, const Ranks &g, cudaStream_t stream) {
    float mine = g.rank == 0 ? 16777216.f : 1.f, *d = to_device(std::vector<float>(1, mine));
    NEED_NCCL(ncclAllReduce(d, d, 1, ncclFloat32, ncclSum, comm, stream));
    NEED(cudaStreamSynchronize(stream));
    check(to_host(d, 1)[0] == 16777216.f, "sum in the order of ranks: %.9g", to_host(d, 1)[0]);
    NEED(cudaFree(d));
}

// A ring in a group, both directions; a message to oneself; two messages to one rank come in order.
static void test_messages(ncclComm_t comm, const Ranks &g, cudaStream_t stream) {
    const int after = (g.rank + 1) % g.size, before = (g.rank + g.size - 1) % g.size;
    float *out = to_device(std::vector<float>{(float)g.rank, (float)g.rank + 100}), *in = to_device(std::vector<float>(4, -1.f));
    NEED_NCCL(ncclGroupStart());
    NEED_NCCL(ncclSend(out, 1, ncclFloat32, after, comm, stream));
    NEED_NCCL(ncclRecv(in, 1, ncclFloat32, before, comm, stream));
    NEED_NCCL(ncclSend(out + 1, 1, ncclFloat32, after, comm, stream));
    NEED_NCCL(ncclRecv(in + 1, 1, ncclFloat32, before, comm, stream));
    NEED_NCCL(ncclRecv(in + 2, 2, ncclFloat32, after, comm, stream));
    NEED_NCCL(ncclSend(out, 2, ncclFloat32, before, comm, stream));
    NEED_NCCL(ncclGroupEnd());
    NEED(cudaStreamSynchronize(stream));
    const std::vector<float> got = to_host(in, 4);
    if (g.size > 2) { // with one or two ranks both neighbours are one, and order decides
        check(got[0] == before && got[1] == before + 100 && got[2] == after && got[3] == after + 100, "ring: %g %g %g %g", got[0], got[1], got[2],
              got[3]);
    } else {
        check(got[0] == after && got[1] == after + 100 && got[2] == after && got[3] == after + 100, "ring: %g %g %g %g", got[0], got[1], got[2],
              got[3]);
    }
    if (g.size > 1) { // without a group: one sends, the other receives
        if (g.rank == 0) NEED_NCCL(ncclSend(out + 1, 1, ncclFloat32, 1, comm, stream));
        if (g.rank == 1) NEED_NCCL(ncclRecv(in, 1, ncclFloat32, 0, comm, stream));
        NEED(cudaStreamSynchronize(stream));
        if (g.rank == 1) check(to_host(in, 1)[0] == 100, "a message: %g", to_host(in, 1)[0]);
    }
    NEED(cudaFree(out));
    NEED(cudaFree(in));
}

static void settle(ncclComm_t comm) {
    ncclResult_t state = ncclInProgress;
    while (state == ncclInProgress) NEED_NCCL(ncclCommGetAsyncError(comm, &state));
    check(state == ncclSuccess, "state of a communicator: %d", (int)state);
}

// blocking = 0: nothing is ready before it was polled, not even the first operation.
static void test_nonblocking(const Ranks &g, cudaStream_t stream) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclComm_t comm = nullptr, half = nullptr;
    const ncclUniqueId id = shared_id(g);
    check(ncclCommInitRankConfig(&comm, g.size, id, g.rank, &config) == ncclInProgress && comm != nullptr, "init returns at once");
    int count = 0;
    check(ncclCommCount(comm, &count) == ncclInvalidArgument, "not usable before it was polled");
    settle(comm);
    NEED_NCCL(ncclCommCount(comm, &count));
    check(count == g.size, "%d ranks", count);
    float *d = to_device(std::vector<float>(1, 1.f));
    const ncclResult_t first = ncclAllReduce(d, d, 1, ncclFloat32, ncclSum, comm, stream);
    check(first == ncclInProgress, "the first operation is in progress: %d", (int)first);
    settle(comm);
    NEED_NCCL(ncclAllReduce(d, d, 1, ncclFloat32, ncclSum, comm, stream));
    NEED(cudaStreamSynchronize(stream));
    check(to_host(d, 1)[0] == (float)(g.size * g.size), "sum of sums: %g", to_host(d, 1)[0]);
    // the odd ranks, in reverse order; the last rank belongs to no part
    const bool alone = g.size > 2 && g.rank == g.size - 1;
    const ncclResult_t split = ncclCommSplit(comm, alone ? NCCL_SPLIT_NOCOLOR : g.rank % 2, -g.rank, &half, &config);
    check(split == ncclInProgress || split == ncclSuccess, "split: %d", (int)split);
    settle(comm);
    check((half == nullptr) == alone, "no communicator without a colour");
    if (half != nullptr) {
        settle(half);
        int rank = -1, members = 0, want = 0, behind = 0;
        NEED_NCCL(ncclCommUserRank(half, &rank));
        NEED_NCCL(ncclCommCount(half, &members));
        for (int r = 0; r < (g.size > 2 ? g.size - 1 : g.size); r++) want += r % 2 == g.rank % 2, behind += r % 2 == g.rank % 2 && r > g.rank;
        check(members == want && rank == behind, "part: rank %d of %d", rank, members);
        (void)ncclAllReduce(d, d, 1, ncclFloat32, ncclSum, half, stream);
        settle(half);
        NEED(cudaStreamSynchronize(stream));
        check(to_host(d, 1)[0] == (float)(g.size * g.size * members), "sum over the part: %g", to_host(d, 1)[0]);
        NEED_NCCL(ncclCommDestroy(half));
    }
    const ncclResult_t finalized = ncclCommFinalize(comm);
    check(finalized == ncclInProgress || finalized == ncclSuccess, "finalize: %d", (int)finalized);
    check(ncclAllReduce(d, d, 1, ncclFloat32, ncclSum, comm, stream) == ncclInvalidUsage, "an operation after finalize");
    settle(comm);
    NEED_NCCL(ncclCommDestroy(comm));
    NEED(cudaFree(d));
}

// Two communicators on two streams, issued in different orders by the ranks; one operation in a graph, launched twice.
static void test_streams_and_graphs(ncclComm_t comm, const Ranks &g) {
    ncclComm_t other;
    NEED_NCCL(ncclCommSplit(comm, 0, g.rank, &other, nullptr));
    cudaStream_t s = stream_open(), t = stream_open();
    float *a = to_device(std::vector<float>(1, 1.f)), *b = to_device(std::vector<float>(1, 2.f));
    for (int turn = 0; turn < 2; turn++) {
        if ((turn + g.rank) % 2 == 0)
            NEED_NCCL(ncclAllReduce(a, a, 1, ncclFloat32, ncclSum, comm, s));
        else
            NEED_NCCL(ncclAllReduce(b, b, 1, ncclFloat32, ncclSum, other, t));
    }
    NEED(cudaStreamSynchronize(s));
    NEED(cudaStreamSynchronize(t));
    check(to_host(a, 1)[0] == g.size && to_host(b, 1)[0] == 2 * g.size, "two streams: %g %g", to_host(a, 1)[0], to_host(b, 1)[0]);
    NEED_NCCL(ncclAllReduce(a, a, 1, ncclFloat32, ncclSum, comm, s)); // one communicator on two streams: in the order of issue
    NEED_NCCL(ncclBroadcast(b, a, 1, ncclFloat32, 0, comm, t));
    NEED(cudaDeviceSynchronize());
    cudaGraph_t graph;
    cudaGraphExec_t executable;
    NEED(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
    NEED_NCCL(ncclAllReduce(b, b, 1, ncclFloat32, ncclSum, comm, s));
    NEED(cudaStreamEndCapture(s, &graph));
    NEED(cudaGraphInstantiate(&executable, graph, 0));
    NEED(cudaGraphLaunch(executable, s));
    NEED(cudaGraphLaunch(executable, s));
    NEED_NCCL(ncclAllReduce(b, b, 1, ncclFloat32, ncclSum, comm, s));
    NEED(cudaStreamSynchronize(s));
    check(to_host(b, 1)[0] == 2 * powf((float)g.size, 4), "an operation in a graph: %g", to_host(b, 1)[0]);
    NEED(cudaGraphExecDestroy(executable));
    NEED(cudaGraphDestroy(graph));
    // wrong arguments
    float host = 0;
    check(ncclAllReduce(&host, &host, 1, ncclFloat32, ncclSum, comm, s) == ncclInvalidArgument, "host memory");
    check(ncclBroadcast(a, a, 1, ncclFloat32, g.size, comm, s) == ncclInvalidArgument, "a root that is not there");
    check(ncclGroupEnd() == ncclInvalidUsage, "an end without a start");
    // registration, and memory for it
    void *window_memory = nullptr, *handle = nullptr;
    ncclWindow_t window;
    NEED_NCCL(ncclMemAlloc(&window_memory, 10000));
    NEED_NCCL(ncclCommRegister(comm, window_memory, 8192, &handle));
    NEED_NCCL(ncclCommDeregister(comm, handle));
    NEED_NCCL(ncclCommWindowRegister(comm, window_memory, 8192, &window, NCCL_WIN_COLL_SYMMETRIC));
    NEED_NCCL(ncclCommWindowDeregister(comm, window));
    check(ncclCommWindowRegister(comm, (char *)window_memory + 16, 4096, &window, 0) == ncclInvalidArgument, "a window in the middle of a page");
    NEED_NCCL(ncclMemFree(window_memory));
    // an abort ends what waits; with one rank there is nothing to wait for
    if (g.rank == 0 && g.size > 1) NEED_NCCL(ncclAllReduce(a, a, 1, ncclFloat32, ncclSum, other, t)); // the others never call it
    NEED_NCCL(ncclCommAbort(other));
    NEED(cudaDeviceSynchronize());
    NEED(cudaStreamDestroy(s));
    NEED(cudaStreamDestroy(t));
    NEED(cudaFree(a));
    NEED(cudaFree(b));
}

static void test_nccl() {
    const Ranks g = ranks_open();
    ncclComm_t comm;
    NEED_NCCL(ncclCommInitRank(&comm, g.size, shared_id(g), g.rank));
    cudaStream_t stream = stream_open();
    test_collectives<float>(comm, g, ncclFloat32, stream, false);
    test_collectives<bf16>(comm, g, ncclBfloat16, stream, false);
    test_collectives<double>(comm, g, ncclFloat64, stream, false);
    test_collectives<int64_t>(comm, g, ncclInt64, stream, false);
    test_collectives<uint8_t>(comm, g, ncclUint8, stream, true);
    test_order(comm, g, stream);
    test_messages(comm, g, stream);
    test_nonblocking(g, stream);
    test_streams_and_graphs(comm, g);
    NEED_NCCL(ncclCommDestroy(comm));
    NEED(cudaStreamDestroy(stream));
    if (g.mpi) MPI_Finalize();
}

#endif
