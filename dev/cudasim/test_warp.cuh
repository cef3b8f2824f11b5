// test_warp.cuh: instructions that a warp or a block shares, on the simulated device: fragments of mma.sync and ldmatrix against a plain product,
// cp.async, shuffles, votes, reductions, barriers, atomics. Faults are in planted/.
#ifndef CUDASIM_TEST_WARP_CUH
#define CUDASIM_TEST_WARP_CUH

#include "dev/cudasim/test_sim.cuh" // start

// D (16, 8) = A (16, 16) B (16, 8): A by ldmatrix, B (kept as (16, 8)) by ldmatrix.trans; the fragments' layout is written out here once more.
__global__ void mma_kernel(float *D, const bf16 *A, const bf16 *B) {
    __shared__ __align__(16) bf16 a[16 * 16], b[16 * 16];
    const int lane = (int)threadIdx.x;
    for (int i = lane; i < 256; i += 32) a[i] = A[i], b[i] = B[i / 16 * 8 + i % 8]; // b's right half is not used
    __syncthreads();
    uint32_t ra[4], rb[4];
    ldmatrix_x4(ra, a + lane % 16 * 16 + lane / 16 * 8);
    ldmatrix_x4_trans(rb, b + lane % 16 * 16 + lane / 16 * 8);
    float d[4] = {0, 0, 0, 0};
    mma_16816_bf16(d, ra, rb[0], rb[1]);
    const int row = lane / 4, column = lane % 4 * 2;
    D[row * 8 + column] = d[0], D[row * 8 + column + 1] = d[1];
    D[(row + 8) * 8 + column] = d[2], D[(row + 8) * 8 + column + 1] = d[3];
}
// The same with A's fragment loaded element by element, as the PTX ISA describes it.
__global__ void mma_plain_kernel(float *D, const bf16 *A, const bf16 *B) {
    const int lane = (int)threadIdx.x, g = lane / 4, t = lane % 4 * 2;
    uint32_t ra[4], rb[2];
    bf16 pair[2];
    for (int r = 0; r < 4; r++) {
        for (int e = 0; e < 2; e++) pair[e] = A[(g + (r % 2) * 8) * 16 + t + e + r / 2 * 8];
        memcpy(&ra[r], pair, 4);
    }
    for (int r = 0; r < 2; r++) {
        for (int e = 0; e < 2; e++) pair[e] = B[(t + e + r * 8) * 8 + g];
        memcpy(&rb[r], pair, 4);
    }
    float d[4] = {1, 1, 1, 1}; // is added to
    mma_16816_bf16(d, ra, rb[0], rb[1]);
    for (int e = 0; e < 4; e++) D[(g + e / 2 * 8) * 8 + t + e % 2] = d[e] - 1;
}

static void test_mma() {
    std::vector<bf16> A(256), B(128);
    for (size_t i = 0; i < 256; i++) A[i] = __float2bfloat16((float)test_uniform(1, i));
    for (size_t i = 0; i < 128; i++) B[i] = __float2bfloat16((float)test_uniform(2, i));
    bf16 *a = to_device(A), *b = to_device(B);
    float *d = device_new<float>(128);
    for (int plain = 0; plain < 2; plain++) {
        NEED(start(nullptr, 1, 32, 0, plain ? mma_plain_kernel : mma_kernel, d, a, b));
        const std::vector<float> D = to_host(d, 128);
        double worst = 0;
        for (int i = 0; i < 16; i++) {
            for (int j = 0; j < 8; j++) {
                double sum = 0;
                for (int k = 0; k < 16; k++) sum += (double)__bfloat162float(A[(size_t)(i * 16 + k)]) * __bfloat162float(B[(size_t)(k * 8 + j)]);
                const double error = fabs(D[(size_t)(i * 8 + j)] - sum);
                if (!(error <= worst)) worst = error;
            }
        }
        check_error(worst, 1e-5, plain ? "mma.sync, fragments by hand" : "mma.sync, fragments by ldmatrix");
    }
    NEED(cudaFree(a));
    NEED(cudaFree(b));
    NEED(cudaFree(d));
}

// out (2, 64) = in, in two pieces by cp.async: the second is still under way when the first is read; of the last 4 floats only 2 are read.
__global__ void copy_kernel(float *out, const float *in) {
    DYN_SHARED(float, s);
    const int i = (int)threadIdx.x;
    for (int piece = 0; piece < 2; piece++) {
        if (i < 16) cp_async16(s + piece * 64 + i * 4, in + piece * 64 + i * 4, piece == 1 && i == 15 ? 8 : 16);
        cp_async_commit();
    }
    cp_async_wait<1>();
    __syncthreads();
    out[i] = s[i];
    cp_async_wait<0>();
    __syncthreads();
    out[64 + i] = s[64 + i];
}

__global__ void warp_kernel(int *out) { // out (12, 32)
    const int lane = (int)threadIdx.x;
    out[0 * 32 + lane] = __shfl_sync(~0u, lane * 3, (lane + 5) % 32);
    out[1 * 32 + lane] = __shfl_xor_sync(~0u, lane, 6);
    out[2 * 32 + lane] = __shfl_down_sync(~0u, lane, 4);
    out[3 * 32 + lane] = __shfl_up_sync(~0u, lane, 4);
    out[4 * 32 + lane] = __shfl_sync(~0u, lane, 2, 8);
    out[5 * 32 + lane] = (int)__ballot_sync(~0u, lane % 3 == 0);
    out[6 * 32 + lane] = __any_sync(~0u, lane == 31) * 2 + __all_sync(~0u, lane < 31);
    out[7 * 32 + lane] = __reduce_add_sync(~0u, lane);
    out[8 * 32 + lane] = __reduce_max_sync(~0u, lane * (lane % 2));
    out[9 * 32 + lane] = (int)__match_any_sync(~0u, lane % 4);
    if (lane < 16)
        out[10 * 32 + lane] = __shfl_xor_sync(0xffffu, lane, 1); // half a warp
    else
        out[10 * 32 + lane] = __shfl_xor_sync(0xffff0000u, lane, 2);
    __syncwarp();
    out[11 * 32 + lane] = out[10 * 32 + (lane ^ 1)];
}

static int warp_want(int row, int lane) {
    switch (row) {
    case 0: return (lane + 5) % 32 * 3;
    case 1: return lane ^ 6;
    case 2: return lane < 28 ? lane + 4 : lane;
    case 3: return lane >= 4 ? lane - 4 : lane;
    case 4: return lane / 8 * 8 + 2;
    case 5: return 0x49249249;
    case 6: return 2;
    case 7: return 496;
    case 8: return 31;
    case 9: return (int)(0x11111111u << lane % 4);
    case 10: return lane < 16 ? lane ^ 1 : lane ^ 2;
    default: return warp_want(10, lane ^ 1);
    }
}

__global__ void block_kernel(int *out, unsigned *sum, unsigned *largest) { // out (3, 96)
    const int i = (int)threadIdx.x;
    out[i] = __syncthreads_count(i % 3 == 0);
    out[96 + i] = __syncthreads_and(i < 95) * 2 + __syncthreads_and(i < 96);
    out[192 + i] = __syncthreads_or(i == 95) * 2 + __syncthreads_or(i == 96);
    atomicAdd(sum, (unsigned)i);
    atomicMax(largest, blockIdx.x * 1000 + (unsigned)i);
}

static void test_warp_shared() {
    int *w = device_new<int>(12 * 32);
    NEED(start(nullptr, 1, 32, 0, warp_kernel, w));
    const std::vector<int> got = to_host(w, 12 * 32);
    for (int i = 0; i < 12 * 32; i++)
        check(got[(size_t)i] == warp_want(i / 32, i % 32), "warp row %d, lane %d: %d", i / 32, i % 32, got[(size_t)i]);
    std::vector<float> in(128);
    for (size_t i = 0; i < 128; i++) in[i] = (float)i;
    float *from = to_device(in), *to = device_new<float>(128);
    NEED(start(nullptr, 1, 64, 512, copy_kernel, to, from));
    const std::vector<float> copied = to_host(to, 128);
    for (size_t i = 0; i < 128; i++) check(copied[i] == (i < 126 ? in[i] : 0), "cp.async: element %zu is %g", i, copied[i]);
    int *out = device_new<int>(288);
    unsigned *sum = to_device(std::vector<unsigned>(2, 0u));
    NEED(start(nullptr, 3, 96, 0, block_kernel, out, sum, sum + 1));
    const std::vector<int> blocks = to_host(out, 288);
    for (size_t i = 0; i < 96; i++) check(blocks[i] == 32 && blocks[96 + i] == 1 && blocks[192 + i] == 2, "barrier with a vote, thread %zu", i);
    const std::vector<unsigned> sums = to_host(sum, 2);
    check(sums[0] == 3 * 4560 && sums[1] == 2095, "atomics: %u %u", sums[0], sums[1]);
    for (void *p : {(void *)w, (void *)from, (void *)to, (void *)out, (void *)sum}) NEED(cudaFree(p));
}

static void test_warp() {
    test_mma();
    test_warp_shared();
}

#endif
