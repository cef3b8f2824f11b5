// test_fragments.cu: where mma.sync, ldmatrix and cp.async put their elements, against the layouts that the simulated device (dev/cudasim) assumes.
// On a GPU it proves the simulator right or wrong; on the simulator it proves that this file and the simulator agree. Tests no op.
//
// usage: test_fragments        prints a line per instruction; exit code 1 when one differs
#include "llmc/cuda/launch.cuh" // launch
#include "llmc/cuda/ptx.cuh"    // mma_16816_bf16, ldmatrix_x4, cp_async16
#include "llmc/rng.h"           // rng_mix
#include <cstring>              // memcmp
#include <vector>               // std::vector

enum { WARP = 32, MMA_ROUNDS = 64 };

// out (32, 4): each lane's registers after it loaded row `lane` of shared memory (32, 8), whose element (r, c) is 8 r + c.
__global__ void __launch_bounds__(WARP) ldmatrix_kernel(uint32_t *out, bool transposed) {
    DYN_SHARED(uint16_t, rows); // (32, 8)
    for (int i = 0; i < 8; i++) rows[threadIdx.x * 8 + i] = (uint16_t)(threadIdx.x * 8 + i);
    __syncthreads();
    uint32_t r[4];
    if (transposed) {
        ldmatrix_x4_trans(r, rows + threadIdx.x * 8);
    } else {
        ldmatrix_x4(r, rows + threadIdx.x * 8);
    }
    for (int i = 0; i < 4; i++) out[threadIdx.x * 4 + i] = r[i];
}

// d (rounds, 32, 4) += a (rounds, 32, 4) x b (rounds, 32, 2): registers, lane by lane.
__global__ void __launch_bounds__(WARP) mma_kernel(float *d, const uint32_t *a, const uint32_t *b) {
    for (int round = 0; round < MMA_ROUNDS; round++) {
        const int at = round * WARP + (int)threadIdx.x;
        float sum[4];
        uint32_t left[4];
        for (int i = 0; i < 4; i++) sum[i] = d[at * 4 + i], left[i] = a[at * 4 + i];
        mma_16816_bf16(sum, left, b[at * 2], b[at * 2 + 1]);
        for (int i = 0; i < 4; i++) d[at * 4 + i] = sum[i];
    }
}

// out (32, 16 bytes): lane i copies i % 17 bytes of in (32, 16 bytes), in two groups of which the first is awaited alone.
__global__ void __launch_bounds__(WARP) copy_kernel(uint8_t *out, const uint8_t *in) {
    DYN_SHARED(uint8_t, rows); // (32, 16)
    const int lane = (int)threadIdx.x;
    if (lane < 16) cp_async16(rows + lane * 16, in + lane * 16, lane % 17);
    cp_async_commit();
    if (lane >= 16) cp_async16(rows + lane * 16, in + lane * 16, lane % 17);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();
    if (lane < 16)
        for (int i = 0; i < 16; i++) out[lane * 16 + i] = rows[lane * 16 + i];
    cp_async_wait<0>();
    __syncthreads();
    if (lane >= 16)
        for (int i = 0; i < 16; i++) out[lane * 16 + i] = rows[lane * 16 + i];
}

// ----------------------------------------------------------------------------

struct Fragments {
    CudaDevice device;
    int failed;
};

static void *fragments_alloc(size_t bytes) {
    void *pointer = nullptr;
    cuda_check(cudaMalloc(&pointer, bytes), "cudaMalloc");
    return pointer;
}
template <class T> static T *fragments_upload(Fragments *f, const std::vector<T> &host) {
    void *pointer = fragments_alloc(host.size() * sizeof(T));
    cuda_check(cudaMemcpyAsync(pointer, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice, f->device.compute), "cudaMemcpyAsync");
    cuda_check(cudaStreamSynchronize(f->device.compute), "cudaStreamSynchronize");
    return (T *)pointer;
}
// Reads a buffer back and frees it.
template <class T> static std::vector<T> fragments_take(Fragments *f, T *pointer, size_t count) {
    std::vector<T> host(count);
    cuda_check(cudaMemcpyAsync(host.data(), pointer, count * sizeof(T), cudaMemcpyDeviceToHost, f->device.compute), "cudaMemcpyAsync");
    cuda_check(cudaStreamSynchronize(f->device.compute), "cudaStreamSynchronize");
    cuda_check(cudaFree(pointer), "cudaFree");
    return host;
}
static void fragments_say(Fragments *f, const char *what, int64_t wrong, int64_t all) {
    printf("%-34s %lld of %lld elements differ%s\n", what, (long long)wrong, (long long)all, wrong != 0 ? "  FAILED" : "");
    f->failed += wrong != 0;
}

// Matrix m holds rows 8m .. 8m+7; lane i gets the elements (i/4, 2(i%4)) and (i/4, 2(i%4)+1) of it, low half first, of the transpose when
// transposed.
static void test_ldmatrix(Fragments *f, bool transposed) {
    uint32_t *out = (uint32_t *)fragments_alloc(WARP * 16);
    launch(&f->device, f->device.compute, {1, WARP, WARP * 16}, ldmatrix_kernel, out, transposed);
    const std::vector<uint32_t> got = fragments_take(f, out, WARP * 4);
    int64_t wrong = 0;
    for (uint32_t lane = 0; lane < WARP; lane++) {
        for (uint32_t m = 0; m < 4; m++) {
            const uint32_t i = lane / 4, j = lane % 4 * 2;
            const uint32_t low = 64 * m + (transposed ? 8 * j + i : 8 * i + j), high = 64 * m + (transposed ? 8 * (j + 1) + i : 8 * i + j + 1);
            wrong += got[lane * 4 + m] != (low | high << 16);
        }
    }
    fragments_say(f, transposed ? "ldmatrix.x4.trans" : "ldmatrix.x4", wrong, WARP * 4);
}

static uint32_t fragments_pair(int low, int high) { return (uint32_t)bf16_from_f32((float)low) | (uint32_t)bf16_from_f32((float)high) << 16; }

// Small integers: every sum is exact, so one misplaced element shows.
static void test_mma(Fragments *f) {
    std::vector<uint32_t> a(MMA_ROUNDS * WARP * 4), b(MMA_ROUNDS * WARP * 2);
    std::vector<float> d(MMA_ROUNDS * WARP * 4), want(d.size());
    for (size_t round = 0; round < MMA_ROUNDS; round++) {
        int A[16][16], B[16][8], C[16][8];
        uint64_t number = round << 16;
        const auto draw = [&] { return (int)(rng_mix(++number) % 17) - 8; };
        for (auto &row : A)
            for (int &x : row) x = draw();
        for (auto &row : B)
            for (int &x : row) x = draw();
        for (auto &row : C)
            for (int &x : row) x = draw();
        for (size_t lane = 0; lane < WARP; lane++) {
            const size_t g = lane / 4, t = lane % 4 * 2, at = round * WARP + lane;
            for (size_t r = 0; r < 4; r++) { // rows g and g+8; columns t, t+1 and t+8, t+9
                const size_t row = g + r % 2 * 8, column = t + r / 2 * 8;
                a[at * 4 + r] = fragments_pair(A[row][column], A[row][column + 1]);
                const size_t i = g + r / 2 * 8, j = t + r % 2;
                int sum = C[i][j];
                for (size_t k = 0; k < 16; k++) sum += A[i][k] * B[k][j];
                d[at * 4 + r] = (float)C[i][j], want[at * 4 + r] = (float)sum;
            }
            for (size_t r = 0; r < 2; r++) b[at * 2 + r] = fragments_pair(B[t + r * 8][g], B[t + r * 8 + 1][g]);
        }
    }
    float *sums = fragments_upload(f, d);
    uint32_t *left = fragments_upload(f, a), *right = fragments_upload(f, b);
    launch(&f->device, f->device.compute, {1, WARP}, mma_kernel, sums, left, right);
    const std::vector<float> got = fragments_take(f, sums, d.size());
    cuda_check(cudaFree(left), "cudaFree");
    cuda_check(cudaFree(right), "cudaFree");
    int64_t wrong = 0;
    for (size_t i = 0; i < got.size(); i++) wrong += !(got[i] == want[i]);
    fragments_say(f, "mma.m16n8k16 bf16", wrong, (int64_t)got.size());
}

static void test_copy(Fragments *f) {
    std::vector<uint8_t> in(WARP * 16);
    for (size_t i = 0; i < in.size(); i++) in[i] = (uint8_t)(1 + i % 255);
    uint8_t *from = fragments_upload(f, in), *to = (uint8_t *)fragments_alloc(in.size());
    launch(&f->device, f->device.compute, {1, WARP, WARP * 16}, copy_kernel, to, from);
    const std::vector<uint8_t> got = fragments_take(f, to, in.size());
    cuda_check(cudaFree(from), "cudaFree");
    int64_t wrong = 0;
    for (size_t lane = 0; lane < WARP; lane++)
        for (size_t i = 0; i < 16; i++) wrong += got[lane * 16 + i] != (i < lane % 17 ? in[lane * 16 + i] : 0);
    fragments_say(f, "cp.async 16 bytes, rest zero", wrong, (int64_t)got.size());
}

int main() {
    Fragments f = {};
    cuda_check(cudaSetDevice(0), "cudaSetDevice");
    cuda_check(cudaStreamCreateWithFlags(&f.device.compute, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
    test_ldmatrix(&f, false);
    test_ldmatrix(&f, true);
    test_mma(&f);
    test_copy(&f);
    cuda_check(cudaStreamDestroy(f.device.compute), "cudaStreamDestroy");
    printf("%d of 4 instructions differ from dev/cudasim\n", f.failed);
    return f.failed != 0;
}
