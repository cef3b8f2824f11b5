// bench_attention.c: GFLOP/s of attention on the CPU device, forward and backward, next to the rate of fused multiply-adds
// measured in the same run. Counts what the causal half needs: 2 products forward, 5 backward (recomputed ones count once).
// Prints the fastest run (the one least disturbed by other programs) and the median.
// usage: bench_attention [seconds per case, default 0.3]
#include "llmc/base.h"          // base_alloc, clock_ms
#include "llmc/cpu/attention.h" // cpu_attention_forward, cpu_attention_backward
#include "llmc/rng.h"           // philox

typedef struct {
    int64_t B, T, NH, NKV, HS;
} Case;

// With one thread: the time of this process on the processor, which other programs hardly disturb; otherwise wall time.
static double time_ms(void) {
    if (omp_get_max_threads() > 1) return clock_ms();
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

// Rate of independent fused multiply-adds on registers, all threads: 12 chains hide the latency of one.
static double peak_gflops(void) {
    enum { CHAINS = 12, ROUNDS = 200000 };
    double best = 0;
    for (int attempt = 0; attempt < 60; attempt++) {
        int threads = 1;
        const double start = time_ms();
        float sink = 0;
#pragma omp parallel reduction(+ : sink)
        {
#pragma omp single
            threads = omp_get_num_threads();
            AttentionVector_ chain[CHAINS];
            for (int c = 0; c < CHAINS; c++) chain[c] = (AttentionVector_){0} + (float)c;
            AttentionVector_ a = (AttentionVector_){0} + 0.5f, b = (AttentionVector_){0} + 0.25f;
            for (int i = 0; i < ROUNDS; i++) {
#pragma GCC unroll 12
                for (int c = 0; c < CHAINS; c++) chain[c] = chain[c] * a + b;
            }
            for (int c = 0; c < CHAINS; c++) sink += chain[c][0];
        }
        const double gflops = 2.0 * 16 * CHAINS * (double)ROUNDS * threads / (time_ms() - start) * 1e-6;
        if (gflops > best && sink != 1.25f) best = gflops;
    }
    return best;
}

static void fill(Buffer buffer, int64_t n, uint64_t key) {
    for (int64_t i = 0; i < n; i++) {
        const float x = rng_uniform(philox(key, (uint64_t)i, 0).x[0]) * 2 - 1;
        if (buffer.dtype == DTYPE_F32) {
            ((float *)buffer.data)[i] = x;
        } else {
            ((uint16_t *)buffer.data)[i] = bf16_from_f32(x);
        }
    }
}

static int compare_double(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void run(Case c, Dtype dtype, double peak, double seconds) {
    const int64_t N = c.B * c.T, QKV = (c.NH + 2 * c.NKV) * c.HS, OUT = c.NH * c.HS;
    const size_t bytes = dtype_bytes(dtype);
    Buffer qkv = buffer_of(base_alloc((size_t)(N * QKV) * bytes), dtype), dqkv = buffer_of(base_alloc((size_t)(N * QKV) * bytes), dtype);
    Buffer out = buffer_of(base_alloc((size_t)(N * OUT) * bytes), dtype), dout = buffer_of(base_alloc((size_t)(N * OUT) * bytes), dtype);
    Buffer lse = buffer_of(base_alloc((size_t)(N * c.NH) * 4), DTYPE_F32), delta = buffer_of(base_alloc((size_t)(N * c.NH) * 4), DTYPE_F32);
    int32_t *cu = base_new((size_t)c.B + 1, sizeof *cu);
    for (int64_t b = 0; b <= c.B; b++) cu[b] = (int32_t)(b * c.T);
    fill(qkv, N * QKV, 1), fill(dout, N * OUT, 2);
    const Packing packing = {.cu_seqlens = buffer_of(cu, DTYPE_I32), .documents = c.B, .tokens = N, .max_length = c.T};
    const AttentionShape shape = {c.NH, c.NKV, c.HS};
    enum { MOST = 1000 };
    double forward[MOST], backward[MOST], both[MOST];
    int count = 0;
    const double end = time_ms() + seconds * 1e3;
    while (count < MOST && (count < 2 || time_ms() < end)) {
        const double t0 = time_ms();
        cpu_attention_forward(NULL, out, lse, qkv, &packing, shape);
        const double t1 = time_ms();
        cpu_attention_backward(NULL, dqkv, delta, dout, out, qkv, lse, &packing, shape);
        const double t2 = time_ms();
        forward[count] = t1 - t0, backward[count] = t2 - t1, both[count] = t2 - t0, count++;
    }
    qsort(forward, (size_t)count, sizeof(double), compare_double);
    qsort(backward, (size_t)count, sizeof(double), compare_double);
    qsort(both, (size_t)count, sizeof(double), compare_double);
    const double product = 2.0 * (double)c.HS * (double)(c.B * c.NH) * (double)(c.T * (c.T + 1) / 2) * 1e-6; // MFLOP: over ms gives GFLOP/s
    printf("B %-2lld T %-5lld NH %-3lld NKV %-3lld HS %-4lld %-5s", (long long)c.B, (long long)c.T, (long long)c.NH, (long long)c.NKV,
           (long long)c.HS, dtype_names[dtype]);
    for (int i = 0; i < 2; i++) {
        const int at = i == 0 ? 0 : count / 2;
        const double f = 2 * product / forward[at], b = 5 * product / backward[at], all = 7 * product / both[at];
        printf("%s forward %6.1f (%2.0f%%) backward %6.1f (%2.0f%%) both %6.1f (%2.0f%%) %8.3f ms", i == 0 ? " best:" : "; median:", f,
               100 * f / peak, b, 100 * b / peak, all, 100 * all / peak, both[at]);
    }
    printf("\n");
    free(qkv.data), free(dqkv.data), free(out.data), free(dout.data), free(lse.data), free(delta.data), free(cu);
}

int main(int argc, char **argv) {
    const double seconds = argc > 1 ? atof(argv[1]) : 0.3;
    const double peak = peak_gflops();
    printf("%d threads, fused multiply-add peak %.1f GFLOP/s; rates in GFLOP/s of the causal half\n", omp_get_max_threads(), peak);
    const Case cases[] = {{4, 64, 12, 12, 64}, {4, 256, 12, 12, 64}, {8, 256, 6, 6, 64}, {1, 1024, 12, 12, 64}, {1, 4096, 32, 8, 128}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        run(cases[i], DTYPE_F32, peak, seconds);
        run(cases[i], DTYPE_BF16, peak, seconds);
    }
    return 0;
}
