// bench_cuda.cu: time of every op of the CUDA device at the sizes of GPT-2 124M, GPT-2 1558M and Llama 3 8B, as share of a ceiling that is measured
// in the same run: a large bf16 matrix product, or a copy inside the device's memory. Calls the ops through the device table alone; an op that the
// table lacks is listed as missing. Does not train, and checks no values (test_gpt.cu does).
//
// usage: bench_cuda [--tiny] [--only WORD] [--json FILE]
//   --tiny   sizes for the simulated device, where times mean nothing
//   --only   rows whose model, op or shape contains WORD
//   --json   one JSON object per line: the device first, then the rows
//
// Times are medians of single runs between events, after a warm-up in which cuBLASLt's algorithms are chosen; before each run the cache is
// overwritten. Bytes and operations are those that the op cannot avoid, so a share is a lower bound of the hardware's use.
#include "llmc/cuda/cuda.cuh" // CudaDevice, cuda_of, cuda_check
#include "llmc/cuda/device.h" // device_cuda
#include "llmc/rng.h"         // rng_mix, rng_dropout_threshold
#include <algorithm>          // std::sort
#include <cstdio>             // printf
#include <cstring>            // strcmp, strstr
#include <string>             // std::string
#include <vector>             // std::vector

struct BenchModel {
    const char *name;
    int64_t N, T, C, NH, NKV, HS, FF, V;
    bool llama; // rmsnorm, rope, swiglu, no biases; otherwise layernorm, learned positions, gelu, biases
};
static const BenchModel bench_models[] = {
    {"gpt2-124m", 32768, 1024, 768, 12, 12, 64, 3072, 50257, false},
    {"gpt2-1558m", 16384, 1024, 1600, 25, 25, 64, 6400, 50257, false},
    {"llama3-8b", 8192, 8192, 4096, 32, 8, 128, 14336, 128256, true},
};
static const BenchModel bench_tiny_models[] = {
    {"tiny-gpt2", 64, 32, 32, 2, 2, 16, 64, 101, false},
    {"tiny-llama", 64, 64, 64, 4, 2, 16, 96, 101, true},
};

struct Bench {
    Device device;
    const BenchModel *model;
    cudaEvent_t start, stop;
    std::vector<void *> owned; // buffers of the running op
    void *flush;               // overwritten before each run
    size_t flush_bytes;
    double matmul_flops, copy_bytes; // ceilings, per second; 0 = not known
    bool tiny;
    const char *only;
    FILE *json;
    std::string missing;
    int64_t rows;
};

// ----------------------------------------------------------------------------
// Buffers.

static void *bench_alloc(Bench *b, size_t bytes) {
    b->owned.push_back(b->device.alloc(&b->device, bytes));
    return b->owned.back();
}
static void bench_release(Bench *b) {
    for (void *pointer : b->owned) b->device.release(&b->device, pointer);
    b->owned.clear();
}

// A block of random values, repeated: constant data would let the clock rise.
static Buffer bench_random(Bench *b, int64_t n, Dtype dtype, float scale) {
    constexpr int64_t BLOCK = 1 << 16;
    const int64_t block = n < BLOCK ? n : BLOCK;
    const size_t bytes = (size_t)n * dtype_bytes(dtype);
    const Buffer buffer = buffer_of(bench_alloc(b, bytes), dtype);
    std::vector<float> wide((size_t)block);
    std::vector<uint16_t> narrow((size_t)block);
    for (int64_t i = 0; i < block; i++) {
        wide[(size_t)i] = scale * ((float)(rng_mix((uint64_t)i) >> 40) * 0x1p-23f - 1.0f);
        narrow[(size_t)i] = bf16_from_f32(wide[(size_t)i]);
    }
    size_t done = (size_t)block * dtype_bytes(dtype);
    b->device.copy_in(&b->device, buffer.data, dtype == DTYPE_BF16 ? (const void *)narrow.data() : wide.data(), done);
    for (size_t part; done < bytes; done += part) {
        part = done < bytes - done ? done : bytes - done;
        cuda_check(cudaMemcpyAsync((char *)buffer.data + done, buffer.data, part, cudaMemcpyDeviceToDevice, cuda_of(&b->device)->compute), "copy");
    }
    return buffer;
}

template <class Value> static Buffer bench_ints(Bench *b, int64_t n, Value value) {
    std::vector<int32_t> host((size_t)n);
    for (int64_t i = 0; i < n; i++) host[(size_t)i] = (int32_t)value(i);
    const Buffer buffer = buffer_of(bench_alloc(b, (size_t)n * 4), DTYPE_I32);
    b->device.copy_in(&b->device, buffer.data, host.data(), (size_t)n * 4);
    return buffer;
}

// ----------------------------------------------------------------------------
// Measurement.

template <class Run> static double bench_median_ms(Bench *b, Run run) {
    CudaDevice *c = cuda_of(&b->device);
    const size_t warmups = 2, least = b->tiny ? 1 : 7, most = b->tiny ? 1 : 25;
    std::vector<float> times;
    double total_ms = 0;
    for (size_t i = 0; i < warmups; i++) run();
    while (times.size() < least || (times.size() < most && total_ms < 40)) {
        float ms = 0;
        b->device.zero(&b->device, b->flush, b->flush_bytes);
        cuda_check(cudaEventRecord(b->start, c->compute), "cudaEventRecord");
        run();
        cuda_check(cudaEventRecord(b->stop, c->compute), "cudaEventRecord");
        cuda_check(cudaEventSynchronize(b->stop), "cudaEventSynchronize");
        cuda_check(cudaEventElapsedTime(&ms, b->start, b->stop), "cudaEventElapsedTime");
        times.push_back(ms), total_ms += ms;
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
}

enum BenchUnit { BENCH_FLOPS, BENCH_BYTES };

// Whether a row is wanted, and the table has its op.
static bool bench_wanted(Bench *b, const char *op, const std::string &shape, bool exists) {
    if (b->only != nullptr && strstr(b->model->name, b->only) == nullptr && strstr(op, b->only) == nullptr &&
        shape.find(b->only) == std::string::npos)
        return false;
    if (!exists && b->missing.find(std::string(" ") + op + ",") == std::string::npos) b->missing += std::string(" ") + op + ",";
    return exists;
}

// Logits or their gradients (N, V), their rows `row` elements apart.
static Buffer bench_logits(Bench *b, int64_t N, int64_t row, Dtype dtype) {
    Buffer logits = bench_random(b, N * row, dtype, 1);
    logits.row = row;
    return logits;
}

// A row of the table: `work` operations or bytes in a run.
template <class Run> static void bench_row(Bench *b, const char *op, const std::string &shape, BenchUnit unit, double work, Run run) {
    const double ms = bench_median_ms(b, run), rate = work / (ms * 1e-3), ceiling = unit == BENCH_FLOPS ? b->matmul_flops : b->copy_bytes;
    const double scale = unit == BENCH_FLOPS ? 1e-12 : 1e-9, share = ceiling > 0 ? rate / ceiling : 0;
    const char *name = unit == BENCH_FLOPS ? "TF/s" : "GB/s";
    printf("%-11s %-24s %-38s %9.4f %9.1f %s %5.1f %%\n", b->model->name, op, shape.c_str(), ms, rate * scale, name, 100 * share);
    fflush(stdout);
    if (b->json != nullptr)
        fprintf(b->json,
                "{\"model\": \"%s\", \"op\": \"%s\", \"shape\": \"%s\", \"ms\": %.6g, \"rate\": %.6g, \"unit\": \"%s\", \"share\": %.4f}\n",
                b->model->name, op, shape.c_str(), ms, rate * scale, name, share);
    b->rows++;
}

// "a x b x c what"
static std::string bench_shape(std::initializer_list<int64_t> sizes, const char *what = "") {
    std::string text;
    for (int64_t size : sizes) text += (text.empty() ? "" : " x ") + std::to_string(size);
    return *what == 0 ? text : text + " " + what;
}

// ----------------------------------------------------------------------------
// Linear layers.

struct BenchLinear {
    const char *what;
    int64_t N, IC, OC;
    bool bias, gelu_out, gelu_in;
    int64_t row; // elements from row to row of the output; 0: OC
};

static void bench_linear(Bench *b, const BenchLinear &l) {
    Device *d = &b->device;
    const double flops = 2.0 * (double)l.N * (double)l.IC * (double)l.OC;
    const Buffer none = {};
    const std::string shape = bench_shape({l.N, l.IC, l.OC}, l.what);
    if (bench_wanted(b, "linear_forward", shape, d->linear_forward != nullptr)) {
        const Buffer in = bench_random(b, l.N * l.IC, DTYPE_BF16, 1), weight = bench_random(b, l.OC * l.IC, DTYPE_BF16, 0.02f);
        const Buffer bias = l.bias ? bench_random(b, l.OC, DTYPE_BF16, 1) : none, out = bench_logits(b, l.N, l.row > 0 ? l.row : l.OC, DTYPE_BF16);
        const Buffer activated = l.gelu_out ? bench_random(b, l.N * l.OC, DTYPE_BF16, 1) : none;
        bench_row(b, "linear_forward", shape, BENCH_FLOPS, flops, [&] { d->linear_forward(d, out, activated, in, weight, bias, l.N, l.IC, l.OC); });
        bench_release(b);
    }
    if (bench_wanted(b, "linear_backward_input", shape, d->linear_backward_input != nullptr)) {
        const Buffer dout = bench_logits(b, l.N, l.row > 0 ? l.row : l.OC, DTYPE_BF16), weight = bench_random(b, l.OC * l.IC, DTYPE_BF16, 0.02f);
        const Buffer din = bench_random(b, l.N * l.IC, DTYPE_BF16, 1), gelu_in = l.gelu_in ? bench_random(b, l.N * l.IC, DTYPE_BF16, 1) : none;
        bench_row(b, "linear_backward_input", shape, BENCH_FLOPS, flops,
                  [&] { d->linear_backward_input(d, din, dout, weight, gelu_in, l.N, l.IC, l.OC); });
        bench_release(b);
    }
    if (bench_wanted(b, "linear_backward_weight", shape, d->linear_backward_weight != nullptr)) {
        const Buffer dout = bench_logits(b, l.N, l.row > 0 ? l.row : l.OC, DTYPE_BF16), in = bench_random(b, l.N * l.IC, DTYPE_BF16, 1);
        const Buffer dweight = bench_random(b, l.OC * l.IC, DTYPE_F32, 1), dbias = l.bias ? bench_random(b, l.OC, DTYPE_F32, 1) : none;
        bench_row(b, "linear_backward_weight", shape, BENCH_FLOPS, flops,
                  [&] { d->linear_backward_weight(d, dweight, dbias, true, dout, in, l.N, l.IC, l.OC); });
        bench_release(b);
    }
}

// Tokens of a chunk of the head, as train_gpt takes them: about 256 MiB of F32 logits.
static int64_t bench_head_tokens(const BenchModel *m) {
    const int64_t limit = ((int64_t)1 << 26) / ((m->V + 63) / 64 * 64) / 64 * 64;
    return m->N < limit ? m->N : limit;
}

static void bench_linears(Bench *b) {
    const BenchModel *m = b->model;
    const bool bias = !m->llama;
    const int64_t Q = m->NH * m->HS, QKV = Q + 2 * m->NKV * m->HS, H = bench_head_tokens(m);
    bench_linear(b, {"qkv", m->N, m->C, QKV, bias, false, false, 0});
    bench_linear(b, {"attention out", m->N, Q, m->C, bias, false, false, 0});
    if (m->llama) {
        bench_linear(b, {"gate, up", m->N, m->C, 2 * m->FF, false, false, false, 0});
        bench_linear(b, {"down", m->N, m->FF, m->C, false, false, false, 0});
    } else {
        bench_linear(b, {"mlp fc", m->N, m->C, m->FF, true, true, false, 0});
        bench_linear(b, {"mlp proj", m->N, m->FF, m->C, true, false, true, 0});
    }
    const int64_t row = (m->V + 63) / 64 * 64; // as activations.h lays logits out
    bench_linear(b, {"head", H, m->C, m->V, false, false, false, row});
    if (m->V % 64 == 0) return;
    bench_linear(b, {"head, vocabulary of 64s", H, m->C, row, false, false, false, 0});
    bench_linear(b, {"head, rows side by side", H, m->C, m->V, false, false, false, 0});
}

// ----------------------------------------------------------------------------
// Everything else is bound by memory, but for attention.

static void bench_norms(Bench *b) {
    const BenchModel *m = b->model;
    Device *d = &b->device;
    const int64_t n = m->N * m->C;
    const int kind = m->llama ? NORM_RMSNORM : NORM_LAYERNORM;
    const std::string shape = bench_shape({m->N, m->C}, m->llama ? "rmsnorm" : "layernorm");
    const Buffer none = {};
    const auto vector = [&](Dtype dtype) { return bench_random(b, m->C, dtype, 1); };
    const auto rows = [&] { return bench_random(b, m->N, DTYPE_F32, 1); };
    const auto matrix = [&] { return bench_random(b, n, DTYPE_BF16, 1); };
    if (bench_wanted(b, "norm_forward", shape, d->norm_forward != nullptr)) {
        const Buffer out = matrix(), mean = rows(), rstd = rows(), sum = matrix(), in = matrix(), branch = matrix(), weight = vector(DTYPE_BF16);
        const Buffer bias = m->llama ? none : vector(DTYPE_BF16);
        bench_row(b, "norm_forward", shape, BENCH_BYTES, 8.0 * (double)n,
                  [&] { d->norm_forward(d, out, mean, rstd, sum, in, branch, weight, bias, nullptr, kind, 1e-5, m->N, m->C); });
        bench_release(b);
    }
    if (bench_wanted(b, "norm_backward", shape, d->norm_backward != nullptr)) {
        const Buffer dx = matrix(), dweight = vector(DTYPE_F32), dbias = m->llama ? none : vector(DTYPE_F32), dout = matrix(), x = matrix();
        const Buffer mean = rows(), rstd = rows(), weight = vector(DTYPE_BF16);
        bench_row(b, "norm_backward", shape, BENCH_BYTES, 8.0 * (double)n,
                  [&] { d->norm_backward(d, dx, true, dweight, dbias, true, dout, x, mean, rstd, weight, kind, m->N, m->C); });
        bench_release(b);
    }
    if (bench_wanted(b, "residual_forward", shape, d->residual_forward != nullptr)) {
        const Buffer out = matrix(), in = matrix(), branch = matrix();
        bench_row(b, "residual_forward", bench_shape({m->N, m->C}), BENCH_BYTES, 6.0 * (double)n,
                  [&] { d->residual_forward(d, out, in, branch, nullptr, m->N, m->C); });
        bench_release(b);
    }
    if (bench_wanted(b, "dropout_backward", shape, d->dropout_backward != nullptr)) {
        const uint64_t *key = (const uint64_t *)bench_alloc(b, sizeof *key); // of zeros
        const Dropout dropout = {key, 0, rng_dropout_threshold(0.1), bench_ints(b, m->N, [](int64_t i) { return i; })};
        const Buffer out = matrix(), in = matrix();
        bench_row(b, "dropout_backward", bench_shape({m->N, m->C}), BENCH_BYTES, 4.0 * (double)n,
                  [&] { d->dropout_backward(d, out, in, &dropout, m->N, m->C); });
        bench_release(b);
    }
}

static void bench_swiglu(Bench *b) {
    const BenchModel *m = b->model;
    Device *d = &b->device;
    const int64_t n = m->N * m->FF;
    const std::string shape = bench_shape({m->N, m->FF});
    if (bench_wanted(b, "swiglu_forward", shape, d->swiglu_forward != nullptr)) {
        const Buffer out = bench_random(b, n, DTYPE_BF16, 1), gate_up = bench_random(b, 2 * n, DTYPE_BF16, 1);
        bench_row(b, "swiglu_forward", shape, BENCH_BYTES, 6.0 * (double)n, [&] { d->swiglu_forward(d, out, gate_up, m->N, m->FF); });
        bench_release(b);
    }
    if (bench_wanted(b, "swiglu_backward", shape, d->swiglu_backward != nullptr)) {
        const Buffer dgate_up = bench_random(b, 2 * n, DTYPE_BF16, 1), dout = bench_random(b, n, DTYPE_BF16, 1);
        const Buffer gate_up = bench_random(b, 2 * n, DTYPE_BF16, 1);
        bench_row(b, "swiglu_backward", shape, BENCH_BYTES, 10.0 * (double)n, [&] { d->swiglu_backward(d, dgate_up, dout, gate_up, m->N, m->FF); });
        bench_release(b);
    }
}

static void bench_rope(Bench *b) {
    const BenchModel *m = b->model;
    Device *d = &b->device;
    const AttentionShape heads = {m->NH, m->NKV, m->HS};
    const int64_t QK = (m->NH + m->NKV) * m->HS, QKV = QK + m->NKV * m->HS, N = m->N, T = m->T;
    const std::string shape = bench_shape({N, m->NH, m->NKV, m->HS}, "rope, in place");
    const double bytes = 4.0 * (double)N * (double)QK;
    const Buffer none = {};
    const auto run = [&](const char *op, bool exists, bool forward) {
        if (!bench_wanted(b, op, shape, exists)) return;
        const Buffer qkv = bench_random(b, N * QKV, DTYPE_BF16, 1), rope = bench_random(b, T * m->HS, DTYPE_F32, 1);
        const Buffer positions = bench_ints(b, N, [T](int64_t i) { return i % T; });
        bench_row(b, op, shape, BENCH_BYTES, bytes, [&] {
            if (forward) {
                d->qk_forward(d, qkv, none, qkv, none, none, 1e-5, rope, positions, heads, N);
            } else {
                d->qk_backward(d, qkv, none, none, false, none, none, none, none, rope, positions, heads, N);
            }
        });
        bench_release(b);
    };
    run("qk_forward", d->qk_forward != nullptr, true);
    run("qk_backward", d->qk_backward != nullptr, false);
}

static void bench_attention(Bench *b) {
    const BenchModel *m = b->model;
    Device *d = &b->device;
    const AttentionShape heads = {m->NH, m->NKV, m->HS};
    const int64_t N = m->N, T = m->T, Q = m->NH * m->HS, QKV = Q + 2 * m->NKV * m->HS;
    const std::string shape = bench_shape({N / T, T, m->NH, m->NKV, m->HS}, "causal");
    // two products per pair of tokens and head forward, five backward; half of the pairs
    const double flops = 2.0 * 2.0 * (double)m->HS * (double)m->NH * (double)(N / T) * ((double)T * (double)(T + 1) / 2);
    const auto rows = [&] { return bench_random(b, m->NH * N, DTYPE_F32, 1); };
    const auto packing = [&] { return Packing{bench_ints(b, N / T + 1, [T](int64_t i) { return i * T; }), N / T, N, T}; };
    const bool forward = d->attention_forward != nullptr;
    if (bench_wanted(b, "attention_forward", shape, forward)) {
        const Packing packed = packing();
        const Buffer qkv = bench_random(b, N * QKV, DTYPE_BF16, 1), out = bench_random(b, N * Q, DTYPE_BF16, 1), lse = rows();
        bench_row(b, "attention_forward", shape, BENCH_FLOPS, flops, [&] { d->attention_forward(d, out, lse, qkv, &packed, heads); });
        bench_release(b);
    }
    if (bench_wanted(b, "attention_backward", shape, d->attention_backward != nullptr && forward)) {
        const Packing packed = packing();
        const Buffer qkv = bench_random(b, N * QKV, DTYPE_BF16, 1), out = bench_random(b, N * Q, DTYPE_BF16, 1), lse = rows(), delta = rows();
        const Buffer dqkv = bench_random(b, N * QKV, DTYPE_BF16, 1), dout = bench_random(b, N * Q, DTYPE_BF16, 1);
        d->attention_forward(d, out, lse, qkv, &packed, heads);
        bench_row(b, "attention_backward", shape, BENCH_FLOPS, 2.5 * flops,
                  [&] { d->attention_backward(d, dqkv, delta, dout, out, qkv, lse, &packed, heads); });
        bench_release(b);
    }
}

static void bench_embedding(Bench *b) {
    const BenchModel *m = b->model;
    Device *d = &b->device;
    const int64_t N = m->N, T = m->T, V = m->V;
    const Buffer none = {};
    const std::string shape = bench_shape({N, m->C, V});
    const auto ids = [&] { return bench_ints(b, N, [V](int64_t i) { return rng_mix((uint64_t)i) % (uint64_t)V; }); };
    const auto positions = [&] { return bench_ints(b, N, [T](int64_t i) { return i % T; }); };
    if (bench_wanted(b, "embedding_forward", shape, d->embedding_forward != nullptr)) {
        const Buffer out = bench_random(b, N * m->C, DTYPE_BF16, 1), id = ids(), position = positions(),
                     wte = bench_random(b, V * m->C, DTYPE_BF16, 1);
        const Buffer wpe = m->llama ? none : bench_random(b, T * m->C, DTYPE_BF16, 1);
        bench_row(b, "embedding_forward", shape, BENCH_BYTES, 4.0 * (double)(N * m->C),
                  [&] { d->embedding_forward(d, out, id, position, wte, wpe, nullptr, N, m->C, 0, V); });
        bench_release(b);
    }
    if (bench_wanted(b, "embedding_backward", shape, d->embedding_backward != nullptr)) {
        const Buffer dwte = bench_random(b, V * m->C, DTYPE_F32, 1), dwpe = m->llama ? none : bench_random(b, T * m->C, DTYPE_F32, 1);
        const Buffer dout = bench_random(b, N * m->C, DTYPE_BF16, 1), id = ids(), position = positions();
        bench_row(b, "embedding_backward", shape, BENCH_BYTES, 10.0 * (double)(N * m->C),
                  [&] { d->embedding_backward(d, dwte, dwpe, dout, id, position, nullptr, N, m->C, 0, V, T); });
        bench_release(b);
    }
}

static void bench_classifier(Bench *b) {
    const BenchModel *m = b->model;
    Device *d = &b->device;
    const int64_t N = bench_head_tokens(m), V = m->V, row = (V + 63) / 64 * 64;
    const std::string shape = bench_shape({N, V});
    if (bench_wanted(b, "cross_entropy", shape, d->cross_entropy != nullptr)) {
        const Buffer losses = bench_random(b, N, DTYPE_F32, 1), logits = bench_logits(b, N, row, DTYPE_BF16);
        const Buffer targets = bench_ints(b, N, [V](int64_t i) { return rng_mix((uint64_t)i) % (uint64_t)V; });
        double *dloss = (double *)bench_alloc(b, sizeof *dloss);
        const double scale = 1.0 / (double)N;
        d->copy_in(d, dloss, &scale, sizeof scale);
        bench_row(b, "cross_entropy", shape, BENCH_BYTES, 4.0 * (double)(N * V), // in place: later runs find smaller logits, in the same time
                  [&] { d->cross_entropy(d, losses, logits, logits, targets, dloss, N, V); });
        bench_release(b);
    }
    if (bench_wanted(b, "loss_sum", shape, d->loss_sum != nullptr)) {
        StepState *state = (StepState *)bench_alloc(b, sizeof *state);
        const Buffer losses = bench_random(b, m->N, DTYPE_F32, 1);
        bench_row(b, "loss_sum", bench_shape({m->N}), BENCH_BYTES, 4.0 * (double)m->N, [&] { d->loss_sum(d, state, losses, nullptr, m->N); });
        bench_release(b);
    }
}

// Parameters of the weights of a block and the embedding, at most 2^28.
static int64_t bench_parameters(const Bench *b) {
    const BenchModel *m = b->model;
    const int64_t block = m->C * (2 * m->NH + 2 * m->NKV) * m->HS + (m->llama ? 3 : 2) * m->C * m->FF, all = 12 * block + m->V * m->C;
    return all < (int64_t)1 << 28 ? all : (int64_t)1 << 28;
}

static void bench_optimizer(Bench *b) {
    Device *d = &b->device;
    const int64_t n = bench_parameters(b);
    const Segment segments[2] = {{0, n / 2, true}, {n / 2, n - n / 2, false}};
    const auto wide = [&] { return bench_random(b, n, DTYPE_F32, 1e-3f); };
    const std::string shape = bench_shape({n});
    if (bench_wanted(b, "grad_squares", shape, d->grad_squares != nullptr)) {
        StepState *state = (StepState *)bench_alloc(b, sizeof *state);
        const Buffer grad = wide();
        bench_row(b, "grad_squares", shape, BENCH_BYTES, 4.0 * (double)n, [&] { d->grad_squares(d, state, grad, segments, 2); });
        bench_release(b);
    }
    if (bench_wanted(b, "adamw", shape, d->adamw != nullptr)) {
        StepState host = {};
        host.lr = 1e-4, host.clip_coefficient = 1, host.optimizer_steps = 1;
        StepState *state = (StepState *)bench_alloc(b, sizeof *state);
        d->copy_in(d, state, &host, sizeof host);
        const Buffer param = bench_random(b, n, DTYPE_BF16, 1), master = wide(), m = wide(),
                     v = buffer_of(bench_alloc(b, (size_t)n * 4), DTYPE_F32), grad = wide();
        const AdamW config = {0.9, 0.95, 1e-8, 0.1, {}};
        bench_row(b, "adamw", shape, BENCH_BYTES, 30.0 * (double)n, [&] { d->adamw(d, state, param, master, m, v, grad, segments, 2, config); });
        bench_release(b);
    }
    if (bench_wanted(b, "cast", shape, d->cast != nullptr)) {
        const Buffer from = wide(), to = bench_random(b, n, DTYPE_BF16, 1);
        bench_row(b, "cast", shape + " F32 to BF16", BENCH_BYTES, 6.0 * (double)n, [&] { d->cast(d, to, from, n); });
        bench_release(b);
    }
    if (bench_wanted(b, "accumulate", shape, d->accumulate != nullptr)) {
        const Buffer to = wide(), from = wide();
        bench_row(b, "accumulate", shape, BENCH_BYTES, 12.0 * (double)n, [&] { d->accumulate(d, to, from, n); });
        bench_release(b);
    }
}

// ----------------------------------------------------------------------------

static void bench_ceilings(Bench *b) {
    Device *d = &b->device;
    const size_t bytes = b->tiny ? 1 << 20 : (size_t)1 << 30;
    void *from = bench_alloc(b, bytes), *to = bench_alloc(b, bytes);
    const double ms =
        bench_median_ms(b, [&] { cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, cuda_of(d)->compute), "cudaMemcpyAsync"); });
    bench_release(b);
    b->copy_bytes = 2.0 * (double)bytes / (ms * 1e-3);
    if (d->linear_forward != nullptr) {
        const int64_t n = (int64_t)cuda_of(d)->sm_count * (b->tiny ? 8 : 64); // 8448 on an H200
        const Buffer none = {}, out = bench_random(b, n * n, DTYPE_BF16, 1), in = bench_random(b, n * n, DTYPE_BF16, 1),
                     weight = bench_random(b, n * n, DTYPE_BF16, 1);
        const double product_ms = bench_median_ms(b, [&] { d->linear_forward(d, out, none, in, weight, none, n, n, n); });
        b->matmul_flops = 2.0 * (double)n * (double)n * (double)n / (product_ms * 1e-3);
        bench_release(b);
    }
    cudaDeviceProp properties;
    cuda_check(cudaGetDeviceProperties(&properties, cuda_of(d)->ordinal), "cudaGetDeviceProperties");
    printf("%s, %d multiprocessors; ceilings: bf16 product %.1f TF/s, copy %.0f GB/s (read and write counted)\n", properties.name,
           properties.multiProcessorCount, b->matmul_flops * 1e-12, b->copy_bytes * 1e-9);
    if (b->json != nullptr)
        fprintf(b->json, "{\"device\": \"%s\", \"multiprocessors\": %d, \"matmul_tf_per_s\": %.6g, \"copy_gb_per_s\": %.6g}\n", properties.name,
                properties.multiProcessorCount, b->matmul_flops * 1e-12, b->copy_bytes * 1e-9);
}

static void bench_run(Bench *b) {
    bench_ceilings(b);
    printf("%-11s %-24s %-38s %9s %9s      %s\n", "model", "op", "shape", "ms", "rate", "share of the ceiling");
    const size_t count = b->tiny ? sizeof bench_tiny_models / sizeof *bench_tiny_models : sizeof bench_models / sizeof *bench_models;
    for (size_t i = 0; i < count; i++) {
        b->model = b->tiny ? &bench_tiny_models[i] : &bench_models[i];
        bench_linears(b);
        bench_norms(b);
        if (b->model->llama) bench_swiglu(b);
        if (b->model->llama) bench_rope(b);
        bench_attention(b);
        bench_embedding(b);
        bench_classifier(b);
        bench_optimizer(b);
    }
    if (!b->missing.empty()) printf("missing from the device table:%s\n", b->missing.substr(0, b->missing.size() - 1).c_str());
    printf("%lld rows\n", (long long)b->rows);
}

int main(int argc, char **argv) {
    Bench b = {};
    const char *path = nullptr;
    for (int i = 1; i < argc; i++) {
        const bool value = i + 1 < argc;
        if (strcmp(argv[i], "--tiny") == 0) {
            b.tiny = true;
        } else if (strcmp(argv[i], "--only") == 0 && value) {
            b.only = argv[++i];
        } else if (strcmp(argv[i], "--json") == 0 && value) {
            path = argv[++i];
        } else {
            fprintf(stderr, "bench_cuda: '%s': wanted --tiny, --only WORD or --json FILE\n", argv[i]);
            return 2;
        }
    }
    if (path != nullptr && (b.json = fopen(path, "w")) == nullptr) {
        fprintf(stderr, "bench_cuda: cannot write %s\n", path);
        return 5;
    }
    b.device = device_cuda(0);
    b.flush_bytes = b.tiny ? 4096 : (size_t)128 << 20;
    b.flush = b.device.alloc(&b.device, b.flush_bytes);
    cuda_check(cudaEventCreate(&b.start), "cudaEventCreate");
    cuda_check(cudaEventCreate(&b.stop), "cudaEventCreate");
    bench_run(&b);
    b.device.release(&b.device, b.flush);
    b.device.close(&b.device);
    if (b.json != nullptr && fclose(b.json) != 0) {
        fprintf(stderr, "bench_cuda: cannot write %s\n", path);
        return 5;
    }
    return b.rows > 0 ? 0 : 1;
}
