// bench_ops.c: bandwidth of the CPU ops that move memory rather than multiply matrices, at the shapes of GPT-2 124M, beside
// ceilings measured in the same run. GB/s counts the bytes an op must move, each once; medians over rounds.
// Usage: bench_ops [rounds]
#include "llmc/base.h"            // base_alloc, clock_ms
#include "llmc/cpu/adamw.h"       // cpu_adamw
#include "llmc/cpu/cast.h"        // cpu_cast
#include "llmc/cpu/classifier.h"  // cpu_cross_entropy
#include "llmc/cpu/embedding.h"   // cpu_embedding_forward
#include "llmc/cpu/global_norm.h" // cpu_grad_squares
#include "llmc/cpu/memory.h"      // cpu_zero
#include "llmc/cpu/mlp.h"         // cpu_swiglu_forward
#include "llmc/cpu/norm.h"        // cpu_norm_forward
#include "llmc/rng.h"             // philox
#include <stdlib.h>               // qsort

enum { MOST_ROUNDS = 101 };

typedef struct {
    double ms[MOST_ROUNDS];
    int rounds, wanted;
    double start;
} Timer;

static int compare(const void *a, const void *b) { return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b); }

static double median(Timer *timer) {
    qsort(timer->ms, (size_t)timer->rounds, sizeof timer->ms[0], compare);
    return timer->ms[timer->rounds / 2];
}

// for (Timer t = timer(rounds); running(&t);) op(); then report(): the first call is not timed.
static bool running(Timer *timer) {
    const double now = clock_ms();
    if (timer->rounds >= 0) timer->ms[timer->rounds] = now - timer->start;
    timer->rounds++;
    timer->start = clock_ms();
    return timer->rounds < timer->wanted;
}

static double report(Timer *timer, const char *what, double bytes, double ceiling) {
    const double ms = median(timer), rate = bytes / ms * 1e-6;
    printf("%-46s %9.3f ms (best %9.3f) %7.1f GB/s", what, ms, timer->ms[0], rate);
    if (ceiling > 0) printf("  %4.0f%% of the ceiling", 100 * rate / ceiling);
    printf("\n");
    fflush(stdout);
    return rate;
}

#define BENCH(what, bytes, ceiling, call)                                                                                                          \
    do {                                                                                                                                           \
        Timer timer = {.rounds = -1, .wanted = rounds};                                                                                            \
        while (running(&timer)) call;                                                                                                              \
        report(&timer, what, bytes, ceiling);                                                                                                      \
    } while (0)

static Buffer f32(int64_t n) { return buffer_of(cpu_alloc(NULL, (size_t)n * 4), DTYPE_F32); }

static Buffer random_f32(int64_t n, float scale) {
    Buffer buffer = f32(n);
    float *x = buffer.data;
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++) x[i] = scale * ((float)(rng_mix((uint64_t)i) >> 40) * 0x1p-23f - 1.0f);
    return buffer;
}

static Buffer bf16_of(Buffer from, int64_t n) {
    Buffer buffer = buffer_of(cpu_alloc(NULL, (size_t)n * 2), DTYPE_BF16);
    cpu_cast(NULL, buffer, from, n);
    return buffer;
}

static Buffer random_ids(int64_t n, int64_t limit) {
    Buffer buffer = buffer_of(cpu_alloc(NULL, (size_t)n * 4), DTYPE_I32);
    for (int64_t i = 0; i < n; i++) ((int32_t *)buffer.data)[i] = (int32_t)(rng_mix((uint64_t)i + 77) % (uint64_t)limit);
    return buffer;
}

static Buffer counting(int64_t n) {
    Buffer buffer = buffer_of(cpu_alloc(NULL, (size_t)n * 4), DTYPE_I32);
    for (int64_t i = 0; i < n; i++) ((int32_t *)buffer.data)[i] = (int32_t)i;
    return buffer;
}

static void triad(float *a, const float *b, const float *c, int64_t n) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) a[i] = b[i] + 3.0f * c[i];
}
static void update(float *a, const float *b, int64_t n) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) a[i] = 0.5f * a[i] + b[i];
}
// The traffic of AdamW without its arithmetic.
static void streams(float *w, float *m, float *v, const float *g, int64_t n) {
#pragma omp parallel for simd schedule(static)
    for (int64_t i = 0; i < n; i++) w[i] += g[i], m[i] += g[i], v[i] += g[i];
}
static float read_only(const float *a, int64_t n) {
    float sum = 0;
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (int64_t i = 0; i < n / 64; i++) {
        float part = 0;
#pragma omp simd reduction(+ : part)
        for (int k = 0; k < 64; k++) part += a[64 * i + k];
        sum += part;
    }
    return sum;
}

static double ceilings(int rounds, int64_t n, const char *name, double *read_rate) {
    Buffer a = random_f32(n, 1), b = random_f32(n, 1), c = random_f32(n, 1);
    Timer timer[3] = {{.rounds = -1, .wanted = rounds}, {.rounds = -1, .wanted = rounds}, {.rounds = -1, .wanted = rounds}};
    float sink = 0;
    while (running(&timer[0])) triad(a.data, b.data, c.data, n);
    while (running(&timer[1])) update(a.data, b.data, n);
    while (running(&timer[2])) sink += read_only(a.data, n);
    char what[128];
    snprintf(what, sizeof what, "%s: triad a = b + s*c (16 bytes)", name);
    const double t = report(&timer[0], what, 16.0 * (double)n, 0);
    snprintf(what, sizeof what, "%s: update a = s*a + b (12 bytes)", name);
    const double u = report(&timer[1], what, 12.0 * (double)n, 0);
    snprintf(what, sizeof what, "%s: read (4 bytes)", name);
    *read_rate = report(&timer[2], what, 4.0 * (double)n, 0);
    if (sink == 1.5f) printf("\n");
    free(a.data), free(b.data), free(c.data);
    return t > u ? t : u;
}

static void bench_norm(int rounds, int64_t N, int64_t C, Dtype dtype, double ceiling) {
    Buffer x = random_f32(N * C, 1), branch = random_f32(N * C, 1), out = f32(N * C), sum = f32(N * C), dout = random_f32(N * C, 1),
           dx = f32(N * C), weight = random_f32(C, 1), bias = random_f32(C, 1), dweight = f32(C), dbias = f32(C), mean = f32(N), rstd = f32(N);
    if (dtype == DTYPE_BF16) {
        Buffer *all[] = {&x, &branch, &out, &sum, &dout, &dx};
        for (int i = 0; i < 6; i++) *all[i] = bf16_of(*all[i], N * C);
        weight = bf16_of(weight, C), bias = bf16_of(bias, C);
    }
    const Dropout dropout = {&(uint64_t){1}, 2, rng_dropout_threshold(0.1), counting(N)};
    const double row = (double)(N * C) * (double)dtype_bytes(dtype);
    char what[128];
    snprintf(what, sizeof what, "norm_forward  %s N=%lld C=%lld", dtype_names[dtype], (long long)N, (long long)C);
    BENCH(what, 4 * row, ceiling, cpu_norm_forward(NULL, out, mean, rstd, sum, x, branch, weight, bias, NULL, NORM_LAYERNORM, 1e-5, N, C));
    snprintf(what, sizeof what, "norm_forward  %s dropout N=%lld C=%lld", dtype_names[dtype], (long long)N, (long long)C);
    BENCH(what, 4 * row, ceiling, cpu_norm_forward(NULL, out, mean, rstd, sum, x, branch, weight, bias, &dropout, NORM_LAYERNORM, 1e-5, N, C));
    snprintf(what, sizeof what, "norm_backward %s N=%lld C=%lld", dtype_names[dtype], (long long)N, (long long)C);
    BENCH(what, 4 * row, ceiling, cpu_norm_backward(NULL, dx, true, dweight, dbias, true, dout, sum, mean, rstd, weight, NORM_LAYERNORM, N, C));
}

static void bench_embedding(int rounds, int64_t N, int64_t C, int64_t V, double ceiling) {
    Buffer ids = random_ids(N, V), positions = counting(N), wte = random_f32(V * C, 1), wpe = random_f32(N * C, 1), out = random_f32(N * C, 1);
    char what[128];
    snprintf(what, sizeof what, "embedding_forward  N=%lld C=%lld V=%lld", (long long)N, (long long)C, (long long)V);
    BENCH(what, 12.0 * (double)(N * C), ceiling, cpu_embedding_forward(NULL, out, ids, positions, wte, wpe, NULL, N, C, 0, V));
    snprintf(what, sizeof what, "embedding_backward N=%lld C=%lld V=%lld", (long long)N, (long long)C, (long long)V);
    BENCH(what, 20.0 * (double)(N * C), ceiling, cpu_embedding_backward(NULL, wte, wpe, out, ids, positions, NULL, N, C, 0, V, N));
    free(wte.data);
}

static void divided(Buffer losses, Buffer dlogits, Buffer logits, Buffer stats, Buffer targets, const double *dloss, int64_t N, int64_t V) {
    cpu_cross_entropy_local(NULL, stats, logits, targets, 0, N, V);
    cpu_cross_entropy_merge(NULL, losses, dlogits, logits, stats, 1, targets, dloss, 0, N, V);
}

static void bench_classifier(int rounds, int64_t N, int64_t V, double ceiling, double read_ceiling) {
    Buffer logits = random_f32(N * V, 4), losses = f32(N), targets = random_ids(N, V), narrow = bf16_of(logits, N * V);
    const double dloss = 1e-3;
    char what[128];
    snprintf(what, sizeof what, "cross_entropy F32 loss only N=%lld V=%lld", (long long)N, (long long)V);
    BENCH(what, 4.0 * (double)(N * V), read_ceiling, cpu_cross_entropy(NULL, losses, (Buffer){0}, logits, targets, &dloss, N, V));
    snprintf(what, sizeof what, "cross_entropy F32 -> BF16 N=%lld V=%lld", (long long)N, (long long)V);
    BENCH(what, 6.0 * (double)(N * V), ceiling, cpu_cross_entropy(NULL, losses, narrow, logits, targets, &dloss, N, V));
    snprintf(what, sizeof what, "cross_entropy F32 in place N=%lld V=%lld", (long long)N, (long long)V);
    BENCH(what, 8.0 * (double)(N * V), ceiling, cpu_cross_entropy(NULL, losses, logits, logits, targets, &dloss, N, V));
    // The two ops of a divided vocabulary, together, on this rank's share of V columns.
    Buffer stats = f32(N * 3);
    snprintf(what, sizeof what, "  local + merge F32 -> BF16 N=%lld V=%lld", (long long)N, (long long)V);
    BENCH(what, 10.0 * (double)(N * V), ceiling, divided(losses, narrow, logits, stats, targets, &dloss, N, V));
    snprintf(what, sizeof what, "  local + merge F32 in place N=%lld V=%lld", (long long)N, (long long)V);
    BENCH(what, 12.0 * (double)(N * V), ceiling, divided(losses, logits, logits, stats, targets, &dloss, N, V));
    free(logits.data), free(narrow.data);
}

int main(int count, char **arguments) {
    int rounds = count > 1 ? atoi(arguments[1]) : 7;
    rounds = rounds < 1 ? 1 : rounds > MOST_ROUNDS ? MOST_ROUNDS : rounds;
    printf("%d threads, %d rounds\n", omp_get_max_threads(), rounds);
    const int64_t P = 124439808, N = 1024, C = 768, V = 50257;
    double read_memory, read_cache;
    const double memory = ceilings(rounds, P / 2, "memory", &read_memory), cache = ceilings(rounds, N * C, "3 x 3 MB", &read_cache);

    Buffer param = random_f32(P, 1), grad = random_f32(P, 1), m = random_f32(P, 1), v = f32(P);
    const int64_t pieces = 148, piece = P / pieces / 32 * 32;
    Segment segments[148];
    for (int64_t i = 0; i < pieces; i++) segments[i] = (Segment){i * piece, piece, i % 2 == 0};
    const double elements = (double)(pieces * piece);
    StepState state = {.lr = 1e-4, .clip_coefficient = 0.5, .optimizer_steps = 10};
    const AdamW config = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1};
    BENCH("four streams read, three written back", 28.0 * (double)P, memory, streams(param.data, m.data, v.data, grad.data, P));
    BENCH("adamw F32 124M", 28 * elements, memory, cpu_adamw(NULL, &state, param, (Buffer){0}, m, v, grad, segments, pieces, config));
    BENCH("grad_squares 124M", 4 * elements, read_memory, cpu_grad_squares(NULL, &state, grad, segments, pieces));
    Buffer narrow = bf16_of(param, P);
    BENCH("adamw BF16 + master 124M", 30 * elements, memory, cpu_adamw(NULL, &state, narrow, param, m, v, grad, segments, pieces, config));
    BENCH("cast F32 -> BF16 124M (write-allocate counted)", 8.0 * (double)P, memory, cpu_cast(NULL, narrow, param, P));
    BENCH("cast BF16 -> F32 124M (write-allocate counted)", 10.0 * (double)P, memory, cpu_cast(NULL, param, narrow, P));
    BENCH("zero 124M (4 bytes)", 4.0 * (double)P, memory, cpu_zero(NULL, grad.data, (size_t)P * 4));
    BENCH("alloc + release 0.5 GB", 4.0 * (double)P, 0, cpu_release(NULL, cpu_alloc(NULL, (size_t)P * 4)));
    free(param.data), free(grad.data), free(m.data), free(v.data), free(narrow.data);

    bench_classifier(rounds, N, V, memory, read_memory);
    bench_classifier(3 * rounds, 4096, 257, cache, read_cache);
    rounds = rounds * 7 > MOST_ROUNDS ? MOST_ROUNDS : rounds * 7;
    bench_norm(rounds, N, C, DTYPE_F32, cache);
    bench_norm(rounds, 2048, 384, DTYPE_F32, cache);
    bench_norm(rounds, N, C, DTYPE_BF16, cache);
    bench_norm(rounds, 16384, C, DTYPE_F32, memory);
    bench_embedding(rounds, N, C, V, cache);
    bench_embedding(rounds, 2048, 384, 257, cache);
    const int64_t FF = 2048;
    Buffer gate_up = random_f32(N * 2 * FF, 3), out = random_f32(N * FF, 1), dgate_up = f32(N * 2 * FF);
    BENCH("swiglu_forward  F32 N=1024 FF=2048", 12.0 * (double)(N * FF), cache, cpu_swiglu_forward(NULL, out, gate_up, N, FF));
    BENCH("swiglu_backward F32 N=1024 FF=2048", 20.0 * (double)(N * FF), cache, cpu_swiglu_backward(NULL, dgate_up, out, gate_up, N, FF));
    const Dropout dropout = {&(uint64_t){1}, 2, rng_dropout_threshold(0.1), counting(N)};
    BENCH("dropout_backward F32 N=1024 C=768", 8.0 * (double)(N * C), cache, cpu_dropout_backward(NULL, dgate_up, gate_up, &dropout, N, C));
    return 0;
}
