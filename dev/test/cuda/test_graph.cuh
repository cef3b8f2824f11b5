// test_graph.cuh: runs of ops as CUDA graphs (llmc/cuda/graph.cuh): the same bits as without them, whatever lies in device memory at a launch; when
// a run is captured, captured anew and forgotten; kernels are counted as if there were no graphs.
#ifndef TEST_CUDA_TEST_GRAPH_CUH
#define TEST_CUDA_TEST_GRAPH_CUH

#include "dev/test/cuda/same.cuh"       // compare_same, both_tokens
#include "dev/test/cuda/step_state.cuh" // both_state, compare_check
#include "llmc/cuda/device.h"           // device_cuda

// A head as train_gpt.c has it: logits for `chunk` tokens at a time, their losses and gradients; dropout in front of it, the sum of losses behind.
struct GraphHead {
    enum { N = 40, C = 16, V = 24, CHUNK = 16 };
    Both in, branch, weight, bias, token, targets;       // inputs
    Both x, logits, dlogits, losses, dx, dweight, dbias; // outputs; dlogits is logits
    BothState state;
};

static GraphHead graph_head_(Compare *t) {
    GraphHead h = {};
    h.in = both_random(t, h.N * h.C, DTYPE_F32, 0, 1), h.branch = both_random(t, h.N * h.C, DTYPE_F32, 0, 1);
    h.weight = both_random(t, h.V * h.C, DTYPE_F32, 0, 1), h.bias = both_random(t, h.V, DTYPE_F32, 0, 1);
    h.token = both_tokens(t, h.N), h.targets = both_ints(t, std::vector<int32_t>(h.N, 0));
    h.x = both_output(t, h.N * h.C, DTYPE_F32), h.logits = both_output(t, h.CHUNK * h.V, DTYPE_F32), h.dlogits = h.logits;
    h.losses = both_output(t, h.N, DTYPE_F32), h.dx = both_output(t, h.N * h.C, DTYPE_F32);
    h.dweight = both_output(t, h.V * h.C, DTYPE_F32), h.dbias = both_output(t, h.V, DTYPE_F32);
    h.state = both_state(t, StepState());
    return h;
}

// What a step changes in device memory: everything that is not in a key.
static void graph_head_inputs_(Compare *t, const GraphHead &h, int step) {
    Device *d = t->device[1];
    std::vector<float> in((size_t)(h.N * h.C));
    std::vector<int32_t> targets((size_t)h.N);
    for (size_t i = 0; i < in.size(); i++) in[i] = (float)(rng_mix(i + 1000 * (uint64_t)step) >> 40) * 0x1p-23f - 1.0f;
    for (int n = 0; n < h.N; n++) targets[(size_t)n] = (n + step) % 5 == 0 ? -1 : (n * 7 + step) % h.V;
    d->copy_in(d, h.in[1].data, in.data(), in.size() * sizeof(float));
    d->copy_in(d, h.targets[1].data, targets.data(), targets.size() * sizeof(int32_t));
    const double scale = 0.5 / (step + 1);
    const uint64_t key = rng_dropout_key(5, (uint64_t)step);
    d->copy_in(d, &h.state.at[1]->loss_scale, &scale, sizeof scale);
    d->copy_in(d, &h.state.at[1]->dropout_key, &key, sizeof key);
}

static void graph_head_ops_(Device *d, const GraphHead &h, bool accumulate) {
    StepState *state = h.state.at[1];
    const Dropout dropout = {&state->dropout_key, 3, rng_dropout_threshold(0.3), h.token[1]};
    const Buffer none = {};
    d->residual_forward(d, h.x[1], h.in[1], h.branch[1], &dropout, h.N, h.C);
    for (int64_t n = 0; n < h.N; n += h.CHUNK) {
        const int64_t count = std::min<int64_t>(h.CHUNK, h.N - n);
        const Buffer x = buffer_at(h.x[1], n * h.C), losses = buffer_at(h.losses[1], n), targets = buffer_at(h.targets[1], n);
        d->linear_forward(d, h.logits[1], none, x, h.weight[1], h.bias[1], count, h.C, h.V);
        d->cross_entropy(d, losses, h.dlogits[1], h.logits[1], targets, &state->loss_scale, count, h.V);
        d->linear_backward_input(d, buffer_at(h.dx[1], n * h.C), h.dlogits[1], h.weight[1], none, count, h.C, h.V);
        d->linear_backward_weight(d, h.dweight[1], h.dbias[1], accumulate || n > 0, h.dlogits[1], x, count, h.C, h.V);
    }
    d->loss_sum(d, state, h.losses[1], &state->loss_scale, h.N);
}

// The ops by way of a graph, or as ever.
static void graph_head_run_(Device *d, const GraphHead &h, bool graphs, bool accumulate, int64_t key_end) {
    const GraphKey key = {{1, 2, 3, 4, 5, 6, accumulate, 0, 0, 0, 0, key_end}};
    if (graphs && d->graph_begin(d, &key)) return;
    graph_head_ops_(d, h, accumulate);
    d->graph_end(d);
}

// Five steps of two micro-batches, with and without graphs.
static void graph_same_(Compare *t) {
    compare_case(t, "five steps of two micro-batches");
    Device *d = t->device[1];
    const GraphHead with = graph_head_(t), without = graph_head_(t);
    for (const auto input : {&GraphHead::branch, &GraphHead::weight, &GraphHead::bias, &GraphHead::token}) {
        const Both &from = without.*input, &to = with.*input;
        std::vector<uint8_t> bytes((size_t)from.n * 4);
        d->copy_out(d, bytes.data(), from[1].data, bytes.size());
        d->copy_in(d, to[1].data, bytes.data(), bytes.size());
    }
    for (int step = 0; step < 5; step++) {
        int64_t launches[2];
        for (int graphs = 0; graphs < 2; graphs++) {
            const GraphHead &h = graphs ? with : without;
            const int64_t before = d->kernel_launches(d);
            graph_head_inputs_(t, h, step);
            for (int micro = 0; micro < 2; micro++) graph_head_run_(d, h, graphs, micro > 0, 0);
            launches[graphs] = d->kernel_launches(d) - before;
        }
        compare_record(t, "graphs: kernels more or less than without", fabs((double)(launches[1] - launches[0])), 0);
        for (const auto output : {&GraphHead::x, &GraphHead::losses, &GraphHead::dx, &GraphHead::dweight, &GraphHead::dbias})
            compare_same(t, "graphs: values that differ", (with.*output)[1], (without.*output)[1], (with.*output).n);
        const double sums[2] = {state_read(t, without.state, 1).loss_sum, state_read(t, with.state, 1).loss_sum};
        compare_check(t, "graphs: the sum of losses", sums[0] == sums[1] && sums[0] > 0);
        // The first step runs both keys as they are, the second captures them.
        const GraphCounts counts = d->graph_counts(d);
        compare_check(t, "graphs: when they are captured", counts.captured == (step > 0 ? 2 : 0) && counts.launched == 2 * step);
    }
    compare_release(t);
}

// Scratch gets another address: what was captured before it is captured anew, and gives what it gave.
static void graph_scratch_(Compare *t) {
    compare_case(t, "scratch moves");
    Device *d = t->device[1];
    const GraphHead h = graph_head_(t);
    graph_head_inputs_(t, h, 1);
    const int64_t N = 2000, OC = 3000, before = d->graph_counts(d).captured;
    for (int use = 0; use < 3; use++) graph_head_run_(d, h, true, false, 1);
    const std::vector<float> want = compare_read(t, 1, h.dbias[1], h.V);
    compare_check(t, "graphs: captured once", d->graph_counts(d).captured == before + 1);
    const Both dout = both_random(t, N * OC, DTYPE_F32, 0, 1), in = both_random(t, N, DTYPE_F32, 0, 1);
    const Both dweight = both_output(t, OC, DTYPE_F32), dbias = both_output(t, OC, DTYPE_F32);
    d->linear_backward_weight(d, dweight[1], dbias[1], false, dout[1], in[1], N, 1, OC); // more scratch than anything before
    for (int use = 0; use < 2; use++) {
        d->zero(d, h.dbias[1].data, (size_t)h.V * sizeof(float));
        graph_head_run_(d, h, true, false, 1);
        compare_check(t, "graphs: the same after scratch has moved", compare_read(t, 1, h.dbias[1], h.V) == want);
    }
    compare_check(t, "graphs: captured anew after scratch has moved", d->graph_counts(d).captured == before + 2);
    compare_release(t);
}

// sum (1) += one (1), by the graph of this number.
static void graph_add_(Device *d, Buffer sum, Buffer one, int64_t number) {
    const GraphKey key = {{7, number}};
    if (d->graph_begin(d, &key)) return;
    d->accumulate(d, sum, one, 1);
    d->graph_end(d);
}

// More runs than are kept: the one that was not used for longest is forgotten, the others are not.
static void graph_limit_(Compare *t) {
    enum { LIMIT = 64, MORE = 3 };
    compare_case(t, "%d runs", LIMIT + MORE);
    Device *d = t->device[1];
    const Both one = both_values(t, {1.0f}, DTYPE_F32), sum = both_values(t, {0.0f}, DTYPE_F32);
    const GraphCounts begin = d->graph_counts(d);
    auto captured = [&] { return d->graph_counts(d).captured - begin.captured; };
    auto launched = [&] { return d->graph_counts(d).launched - begin.launched; };
    for (int use = 0; use < 2; use++) {
        for (int64_t i = 0; i < LIMIT; i++) graph_add_(d, sum[1], one[1], i);
    }
    compare_check(t, "graphs: as many as are kept", captured() == LIMIT && launched() == LIMIT);
    graph_add_(d, sum[1], one[1], 0); // is no longer the oldest
    for (int64_t i = LIMIT; i < LIMIT + MORE; i++) graph_add_(d, sum[1], one[1], i);
    compare_check(t, "graphs: new ones run as they are", captured() == LIMIT && launched() == LIMIT + 1);
    for (int64_t i : {0, MORE + 1, LIMIT - 1}) graph_add_(d, sum[1], one[1], i);
    compare_check(t, "graphs: those that are kept", captured() == LIMIT && launched() == LIMIT + 4);
    graph_add_(d, sum[1], one[1], 1);
    compare_check(t, "graphs: a forgotten one runs as it is", captured() == LIMIT && launched() == LIMIT + 4);
    graph_add_(d, sum[1], one[1], 1);
    compare_check(t, "graphs: and is captured again", captured() == LIMIT + 1 && launched() == LIMIT + 5);
    const std::vector<float> total = compare_read(t, 1, sum[1], 1);
    compare_record(t, "graphs: ops that did not run once", fabs((double)total[0] - (2 * LIMIT + 1 + MORE + 3 + 2)), 0);
    compare_release(t);
}

static void test_graph(Compare *t) {
    Device fresh = device_cuda(0), *usual = t->device[1]; // nothing is captured yet, its scratch is small
    t->device[1] = &fresh;
    graph_same_(t);
    graph_scratch_(t);
    fresh.close(&fresh);
    fresh = device_cuda(0);
    graph_limit_(t);
    fresh.graph_end(&fresh); // of nothing
    compare_check(t, "graphs: nothing was begun", fresh.graph_counts(&fresh).captured > 0);
    fresh.close(&fresh);
    t->device[1] = usual;
}

#endif
