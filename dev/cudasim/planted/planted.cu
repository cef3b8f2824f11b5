// planted.cu: faults that the simulated device must find, and the same programs without them. test.sh knows in which form each is found and what
// the message says.
//
// usage: planted NAME fault|good
#include "dev/cudasim/test_sim.cuh" // start
#include <cublasLt.h>               // cublasLtMatmul
#include <mpi.h>                    // MPI_Init
#include <nccl.h>                   // ncclAllReduce

// ---------------------------------------------------------------------------- kernels: FAULT or not

template <bool FAULT> __global__ void reverse_kernel(float *p) { // one block of 64: a barrier between write and read
    __shared__ float s[64];
    s[threadIdx.x] = 0;
    __syncthreads();
    s[threadIdx.x] = p[threadIdx.x];
    if (!FAULT) __syncthreads();
    p[threadIdx.x] = s[63 - threadIdx.x];
}
template <bool FAULT> __global__ void reuse_kernel(float *p) { // the barrier before shared memory is written again
    __shared__ float s[64];
    float sum = 0;
    for (int turn = 0; turn < 3; turn++) {
        s[threadIdx.x] = p[threadIdx.x] + (float)turn;
        __syncthreads();
        sum += s[63 - threadIdx.x];
        if (!FAULT) __syncthreads();
    }
    p[threadIdx.x] = sum;
}
template <bool FAULT> __global__ void warp_reverse_kernel(float *p) { // one warp: its lanes are not in step
    __shared__ float s[64];
    s[threadIdx.x] = 0;
    __syncwarp();
    s[threadIdx.x] = p[threadIdx.x];
    if (!FAULT) __syncwarp();
    p[threadIdx.x] = s[threadIdx.x ^ 31];
}
template <bool FAULT> __global__ void neighbour_kernel(float *p) { p[threadIdx.x + (FAULT ? 1 : 0)] = 1; }
template <bool FAULT> __global__ void dynamic_bounds_kernel(float *p) {
    DYN_SHARED(float, s);
    s[threadIdx.x + (FAULT ? 1 : 0)] = 1;
    __syncthreads();
    p[threadIdx.x] = s[threadIdx.x | 1];
}
template <bool FAULT> __global__ void static_bounds_kernel(float *p) {
    __shared__ float s[64];
    float *at = s; // UndefinedBehaviorSanitizer would see the index of an array
    at[threadIdx.x + (FAULT ? 1 : 0)] = 1;
    __syncthreads();
    p[threadIdx.x] = s[threadIdx.x | 1];
}
template <bool FAULT> __global__ void unwritten_kernel(float *p) {
    __shared__ float s[64];
    if (threadIdx.x < (FAULT ? 32 : 64)) s[threadIdx.x] = 1;
    __syncthreads();
    p[threadIdx.x] = s[63 - threadIdx.x];
}
template <bool FAULT> __global__ void divergent_barrier_kernel(float *p) {
    if (FAULT) {
        if (threadIdx.x < 32) {
            p[threadIdx.x] = 1;
            __syncthreads();
        } else {
            __syncthreads();
            p[threadIdx.x] = 1;
        }
    } else {
        __syncthreads();
        p[threadIdx.x] = 1;
    }
}
template <bool FAULT> __global__ void early_return_kernel(float *p) {
    if (FAULT && threadIdx.x >= 40) return;
    __syncthreads();
    p[threadIdx.x] = 1;
}
template <bool FAULT> __global__ void dead_lane_kernel(float *p) {
    if (FAULT && threadIdx.x % 32 == 0) return;
    p[threadIdx.x] = __shfl_xor_sync(~0u, 1.f, 1);
}
template <bool FAULT> __global__ void foreign_lane_kernel(float *p) {
    float v = 1;
    if (threadIdx.x % 32 < 16) v = __shfl_xor_sync(0xffffu, v, FAULT ? 16 : 8);
    p[threadIdx.x] = v;
}
template <bool FAULT> __global__ void wrong_mask_kernel(float *p) { p[threadIdx.x] = __shfl_xor_sync(FAULT ? 0xffffu : ~0u, 1.f, 1); }
template <bool FAULT> __global__ void divergent_warp_kernel(float *p) {
    float v = 1;
    if (FAULT && threadIdx.x % 2 == 0)
        v = __shfl_xor_sync(~0u, v, 2);
    else
        v = __shfl_xor_sync(~0u, v, 4);
    p[threadIdx.x] = v;
}
template <bool FAULT> __global__ void async_kernel(float *p) { // read before the wait
    __shared__ __align__(16) float s[256];
    cp_async16(s + threadIdx.x * 4, p + threadIdx.x * 4);
    cp_async_commit();
    if (!FAULT) cp_async_wait<0>();
    const float v = s[threadIdx.x * 4];
    cp_async_wait<0>();
    __syncthreads();
    p[threadIdx.x * 4] = v + 1;
}
template <bool FAULT> __global__ void async_group_kernel(float *p) { // a wait without a commit waits for nothing
    __shared__ __align__(16) float s[256];
    cp_async16(s + threadIdx.x * 4, p + threadIdx.x * 4);
    if (!FAULT) cp_async_commit();
    cp_async_wait<0>();
    const float v = s[threadIdx.x * 4];
    __syncthreads();
    p[threadIdx.x * 4] = v + 1;
}
template <bool FAULT> __global__ void async_align_kernel(float *p) {
    __shared__ __align__(16) float s[264];
    cp_async16(s + threadIdx.x * 4 + (FAULT ? 1 : 0), p + threadIdx.x * 4);
    cp_async_commit();
    cp_async_wait<0>();
    p[threadIdx.x * 4] = 1;
}
template <bool FAULT> __global__ void ldmatrix_kernel(float *p) {
    __shared__ __align__(16) bf16 s[33 * 16];
    for (int i = (int)threadIdx.x; i < 33 * 16; i += 64) s[i] = __float2bfloat16(1.f);
    __syncthreads();
    uint32_t r[4];
    ldmatrix_x4(r, s + threadIdx.x % 32 * 8 + (FAULT ? 4 : 0));
    p[threadIdx.x] = (float)(r[0] & 1);
}
template <bool FAULT> __global__ void one_sum_kernel(float *p) { // every block adds to one place
    if (threadIdx.x == 0) {
        if (FAULT)
            p[0] += 1;
        else
            atomicAdd(p, 1.f);
    }
}
template <bool FAULT> __global__ void wide_load_kernel(float *p) {
    if (threadIdx.x == 0) p[0] = reinterpret_cast<const float4 *>(p + (FAULT ? 1 : 4))->x;
}
template <bool FAULT> __global__ void deep_kernel(float *p) {
    volatile char big[FAULT ? 1 << 19 : 64];
    big[threadIdx.x % 64] = 1;
    p[threadIdx.x] = big[threadIdx.x % 64];
}
__global__ void plain_kernel(float *p) { p[threadIdx.x] = p[threadIdx.x] + 1; }

// ---------------------------------------------------------------------------- programs

typedef void (*Kernel)(float *);
static bool fault;

static float *ones(size_t n) { return to_device(std::vector<float>(n, 1.f)); }

// Runs one of two kernels on 64 threads; returns what it left.
static std::vector<float> run(Kernel good, Kernel bad, size_t elements = 64, unsigned blocks = 1, size_t shared_bytes = 0) {
    float *p = ones(elements);
    NEED(start(nullptr, blocks, 64, shared_bytes, fault ? bad : good, p));
    const std::vector<float> left = to_host(p, elements);
    NEED(cudaFree(p));
    return left;
}
#define RUN(name, ...) run(name<false>, name<true>, ##__VA_ARGS__)

static void event_wait() {
    cudaStream_t a = stream_open(), b = stream_open();
    cudaEvent_t ready = event_open();
    float *p = ones(64);
    NEED(start(a, 1, 64, 0, plain_kernel, p));
    NEED(cudaEventRecord(ready, a));
    if (!fault) NEED(cudaStreamWaitEvent(b, ready, 0));
    NEED(start(b, 1, 64, 0, plain_kernel, p));
    NEED(cudaDeviceSynchronize());
    NEED(cudaFree(p));
}
static void pinned_reuse() {
    cudaStream_t s = stream_open();
    float *p = ones(64), *host = pinned_new<float>(64);
    for (int turn = 0; turn < 2; turn++) {
        for (int i = 0; i < 64; i++) host[i] = (float)turn;
        NEED(cudaMemcpyAsync(p, host, 256, cudaMemcpyHostToDevice, s));
        if (!fault) NEED(cudaStreamSynchronize(s));
    }
    NEED(cudaDeviceSynchronize());
    NEED(cudaFree(p));
    NEED(cudaFreeHost(host));
}
static void double_free() {
    float *p = ones(64);
    NEED(cudaFree(p));
    if (fault) NEED(cudaFree(p));
}
static void free_middle() {
    float *p = ones(64);
    NEED(cudaFree(fault ? p + 1 : p));
}
static void use_after_free() {
    float *p = ones(64);
    NEED(start(nullptr, 1, 64, 0, plain_kernel, p));
    NEED(cudaDeviceSynchronize());
    NEED(cudaFree(p));
    if (!fault) return;
    NEED(start(nullptr, 1, 64, 0, plain_kernel, p));
    NEED(cudaDeviceSynchronize());
}
static void copy_after_free() {
    float *p = ones(64), host[64];
    if (fault) NEED(cudaFree(p));
    NEED(cudaMemcpy(host, p, 256, cudaMemcpyDeviceToHost));
    NEED(cudaFree(p));
}
static void copy_bounds() {
    float *p = ones(64), host[65];
    NEED(cudaMemcpy(host, p, fault ? 260 : 256, cudaMemcpyDeviceToHost));
    NEED(cudaFree(p));
}
static void read_unwritten() {
    float *p = device_new<float>(64);
    if (!fault) NEED(cudaMemset(p, 0, 256));
    NEED(start(nullptr, 1, 64, 0, plain_kernel, p));
    const float left = to_host(p, 64)[63];
    if (left != left) printf("FAILED: NaN\n"), exit(1);
    NEED(cudaFree(p));
}
static void launch_threads() {
    float *p = ones(64);
    NEED(start(nullptr, 1, fault ? 2048 : 64, 0, plain_kernel, p));
    NEED(cudaDeviceSynchronize());
}
static void launch_shared() {
    float *p = ones(64);
    NEED(start(nullptr, 1, 64, fault ? 50000 : 40000, plain_kernel, p));
    NEED(cudaDeviceSynchronize());
}
static void host_touch() {
    float *p = ones(64);
    NEED(cudaDeviceSynchronize());
    volatile float *at = p;
    if (fault) at[3] = 2;
}
static void stream_gone() {
    cudaStream_t s = stream_open();
    NEED(cudaStreamDestroy(s));
    float *p = ones(64);
    if (fault) (void)start(s, 1, 64, 0, plain_kernel, p);
}
// Products on two streams that share a workspace.
static void workspace_shared() {
    const uint64_t n = 64;
    float *a = ones(n * n), *d[2] = {ones(n * n), ones(n * n)};
    char *workspace = device_new<char>(1 << 20);
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t descriptor;
    cublasLtMatrixLayout_t layout;
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t results[8];
    int found = 0;
    const uint64_t room = 1 << 19;
    bool good = cublasLtCreate(&handle) == 0 && cublasLtMatmulDescCreate(&descriptor, CUBLAS_COMPUTE_32F, CUDA_R_32F) == 0;
    good = good && cublasLtMatrixLayoutCreate(&layout, CUDA_R_32F, n, n, (int64_t)n) == 0 && cublasLtMatmulPreferenceCreate(&preference) == 0;
    good = good && cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &room, sizeof room) == 0;
    good = good && cublasLtMatmulAlgoGetHeuristic(handle, descriptor, layout, layout, layout, layout, preference, 8, results, &found) == 0;
    if (!good) exit(1);
    int pick = 0;
    for (int i = 0; i < found; i++)
        if (results[i].workspaceSize > 0) pick = i;
    const float one = 1, zero = 0;
    for (int i = 0; i < 2; i++) {
        char *mine = workspace + (fault ? 0 : (size_t)i * room);
        if (cublasLtMatmul(handle, descriptor, &one, a, layout, a, layout, &zero, d[i], layout, d[i], layout, &results[pick].algo, mine, room,
                           stream_open()) != 0)
            exit(1);
    }
    NEED(cudaDeviceSynchronize());
}

// ---------------------------------------------------------------------------- two ranks

static ncclComm_t comm_open(int *rank) {
    int size;
    MPI_Init(nullptr, nullptr);
    MPI_Comm_rank(MPI_COMM_WORLD, rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    ncclUniqueId id = {};
    if (*rank == 0 && ncclGetUniqueId(&id) != ncclSuccess) exit(1);
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, MPI_COMM_WORLD);
    ncclComm_t comm;
    if (ncclCommInitRank(&comm, size, id, *rank) != ncclSuccess) exit(1);
    return comm;
}
static void comm_end(ncclComm_t comm, cudaStream_t s) {
    NEED(cudaStreamSynchronize(s));
    if (ncclCommDestroy(comm) != ncclSuccess) exit(1);
    MPI_Finalize();
}
static void nccl_absent() { // a rank that does not come
    int rank;
    ncclComm_t comm = comm_open(&rank);
    cudaStream_t s = stream_open();
    float *p = ones(64);
    if (!fault || rank == 0) (void)ncclAllReduce(p, p, 64, ncclFloat32, ncclSum, comm, s);
    comm_end(comm, s);
}
static void nccl_disagree() { // other counts
    int rank;
    ncclComm_t comm = comm_open(&rank);
    cudaStream_t s = stream_open();
    float *p = ones(64);
    (void)ncclAllReduce(p, p, fault && rank == 1 ? 32 : 64, ncclFloat32, ncclSum, comm, s);
    comm_end(comm, s);
}
static void nccl_both_send() { // both send first: without a group nobody receives
    int rank;
    ncclComm_t comm = comm_open(&rank);
    cudaStream_t s = stream_open();
    float *p = ones(64), *q = ones(64);
    if (!fault) (void)ncclGroupStart();
    (void)ncclSend(p, 64, ncclFloat32, 1 - rank, comm, s);
    (void)ncclRecv(q, 64, ncclFloat32, 1 - rank, comm, s);
    if (!fault) (void)ncclGroupEnd();
    comm_end(comm, s);
}

static void nccl_polled() { // a rank that does not come; the host polls instead of waiting
    int rank;
    ncclComm_t comm = comm_open(&rank), half = nullptr;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ncclResult_t state = ncclInProgress;
    if (!fault || rank == 0) {
        (void)ncclCommSplit(comm, 0, rank, &half, &config);
        while (state == ncclInProgress) (void)ncclCommGetAsyncError(half, &state);
    } else {
        while (cudaStreamQuery(nullptr) == cudaSuccess) {
        } // alive, elsewhere
    }
    MPI_Finalize();
}

struct Program {
    const char *name;
    void (*run)();
};
static const Program programs[] = {
    {"missing_barrier", [] { (void)RUN(reverse_kernel); }},
    {"missing_second_barrier", [] { (void)RUN(reuse_kernel); }},
    {"missing_syncwarp", [] { (void)RUN(warp_reverse_kernel); }},
    {"global_bounds", [] { (void)RUN(neighbour_kernel); }},
    {"dynamic_bounds", [] { (void)RUN(dynamic_bounds_kernel, 64, 1, 256); }},
    {"static_bounds", [] { (void)RUN(static_bounds_kernel); }},
    {"unwritten_shared", [] { (void)RUN(unwritten_kernel); }},
    {"unwritten_global", read_unwritten},
    {"divergent_barrier", [] { (void)RUN(divergent_barrier_kernel); }},
    {"early_return", [] { (void)RUN(early_return_kernel); }},
    {"dead_lane", [] { (void)RUN(dead_lane_kernel); }},
    {"foreign_lane", [] { (void)RUN(foreign_lane_kernel); }},
    {"wrong_mask", [] { (void)RUN(wrong_mask_kernel); }},
    {"divergent_warp", [] { (void)RUN(divergent_warp_kernel); }},
    {"async_unwaited", [] { (void)RUN(async_kernel, 256); }},
    {"async_uncommitted", [] { (void)RUN(async_group_kernel, 256); }},
    {"async_misaligned", [] { (void)RUN(async_align_kernel, 256); }},
    {"ldmatrix_misaligned", [] { (void)RUN(ldmatrix_kernel); }},
    {"one_sum", [] { (void)RUN(one_sum_kernel, 64, 4); }},
    {"wide_misaligned", [] { (void)RUN(wide_load_kernel); }},
    {"deep_stack", [] { (void)RUN(deep_kernel); }},
    {"missing_event_wait", event_wait},
    {"pinned_reuse", pinned_reuse},
    {"double_free", double_free},
    {"free_middle", free_middle},
    {"use_after_free", use_after_free},
    {"copy_after_free", copy_after_free},
    {"copy_bounds", copy_bounds},
    {"launch_threads", launch_threads},
    {"launch_shared", launch_shared},
    {"host_touch", host_touch},
    {"stream_gone", stream_gone},
    {"workspace_shared", workspace_shared},
    {"nccl_absent", nccl_absent},
    {"nccl_disagree", nccl_disagree},
    {"nccl_both_send", nccl_both_send},
    {"nccl_polled", nccl_polled},
};

int main(int argc, char **argv) {
    fault = argc == 3 && strcmp(argv[2], "fault") == 0;
    for (const Program &program : programs) {
        if (argc != 3 || strcmp(program.name, argv[1]) != 0) continue;
        program.run();
        printf("%s: finished\n", program.name);
        return 0;
    }
    fprintf(stderr, "usage: planted NAME fault|good\n");
    return 2;
}
