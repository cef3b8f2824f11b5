// test_classifier.cuh: softmax + cross-entropy on the CUDA device against the CPU device: odd vocabularies, rows of any address, logits of any
// size, tokens without a target, gradients in place, the vocabulary divided over ranks against the undivided op, and the sum of losses.
//
// Tolerances. Losses are fp32 from a sum of exponentials in fp32: 2e-6 of the largest, of which the fast exponential of bf16 logits may take half
// on a GPU. Gradients in fp32 are a few roundings away from the CPU's: 2e-6 of the largest; 1e-5 where all
// columns of a rank are far below another rank's largest logit, for exp(-80) is as inexact as its argument. Gradients in bf16 are rounded once, as
// the reference is.
#ifndef TEST_CUDA_TEST_CLASSIFIER_CUH
#define TEST_CUDA_TEST_CLASSIFIER_CUH

#include "dev/test/cuda/compare.cuh"    // Compare
#include "dev/test/cuda/step_state.cuh" // both_state, compare_check

enum LogitsKind { LOGITS_RANDOM, LOGITS_RISING, LOGITS_HUGE, LOGITS_HOLES };
static const char *const logits_names[] = {"random", "rising", "huge", "with -inf"};

// (N, V); the first columns are finite
static std::vector<float> classifier_logits(Compare *t, LogitsKind kind, int64_t N, int64_t V) {
    std::vector<float> logits((size_t)(N * V));
    for (int64_t i = 0; i < N * V; i++) {
        const int64_t v = i % V;
        const double x = 4 * compare_uniform(t);
        logits[(size_t)i] = (float)(kind == LOGITS_RISING ? x + 0.05 * (double)v : kind == LOGITS_HUGE && v % 5 == 1 ? x * 1e30 : x);
        if (kind == LOGITS_HOLES && v % 3 == 2) logits[(size_t)i] = -INFINITY;
    }
    return logits;
}

// (N): one in three has none; never a column of -inf
static std::vector<int32_t> classifier_targets(Compare *t, int64_t N, int64_t V) {
    std::vector<int32_t> targets((size_t)N);
    for (int64_t n = 0; n < N; n++) {
        const int32_t v = (int32_t)std::min((double)(V - 1), floor((compare_uniform(t) + 1) / 2 * (double)V));
        targets[(size_t)n] = n % 3 == 1 ? -1 : v % 3 == 2 ? v - 1 : n == 0 ? (int32_t)(V - 1) / 3 * 3 : v;
    }
    return targets;
}

static void test_classifier_case(Compare *t, LogitsKind kind, Dtype dtype, Dtype ddtype, bool in_place, int64_t skip, int64_t N, int64_t V) {
    compare_case(t, "N %lld, V %lld, skip %lld, logits %s %s, dlogits %s%s", (long long)N, (long long)V, (long long)skip, logits_names[kind],
                 dtype_names[dtype], dtype_names[ddtype], in_place ? " in place" : "");
    std::vector<float> values((size_t)skip, 0.0f);
    const std::vector<float> rows = classifier_logits(t, kind, N, V);
    values.insert(values.end(), rows.begin(), rows.end());
    const Both logits = both_values(t, values, dtype), targets = both_ints(t, classifier_targets(t, N, V));
    const Both losses = both_output(t, N, DTYPE_F32), alone = both_output(t, N, DTYPE_F32);
    const Both dlogits = in_place ? logits : both_output(t, skip + N * V, ddtype);
    const BothScalar<double> dloss = both_scalar(t, 0.25);
    on_both(t, [&](Device *d, int w) {
        d->cross_entropy(d, alone[w], {}, buffer_at(logits[w], skip), targets[w], nullptr, N, V);
        if (!in_place) d->zero(d, dlogits[w].data, (size_t)skip * dtype_bytes(dlogits[w].dtype));
        d->cross_entropy(d, losses[w], buffer_at(dlogits[w], skip), buffer_at(logits[w], skip), targets[w], dloss[w], N, V);
    });
    compare(t, "cross_entropy losses", losses, 2e-6);
    compare(t, "cross_entropy dlogits", dlogits, 2e-6);
    compare(t, "cross_entropy losses, no gradient", alone, 2e-6);
    compare_release(t);
}

// Rows of logits and dlogits that are apart, with NaN between them, against the same values side by side.
static void test_classifier_rows(Compare *t, LogitsKind kind, Dtype dtype, Dtype ddtype, bool in_place, int64_t N, int64_t V, int64_t row) {
    compare_case(t, "N %lld, V %lld, rows %lld apart, logits %s %s, dlogits %s%s", (long long)N, (long long)V, (long long)row, logits_names[kind],
                 dtype_names[dtype], dtype_names[ddtype], in_place ? " in place" : "");
    const std::vector<float> rows = classifier_logits(t, kind, N, V);
    const Both logits = both_rows(t, rows, V, row, dtype), targets = both_ints(t, classifier_targets(t, N, V));
    const Both losses = both_output(t, N, DTYPE_F32), alone = both_output(t, N, DTYPE_F32);
    const Both dlogits = in_place ? logits : both_rows(t, std::vector<float>((size_t)(N * V), NAN), V, row + (row - V) % 3 * 8, ddtype);
    const BothScalar<double> dloss = both_scalar(t, 0.25);
    on_both(t, [&](Device *d, int w) {
        d->cross_entropy(d, alone[w], {}, logits[w], targets[w], nullptr, N, V);
        d->cross_entropy(d, losses[w], dlogits[w], logits[w], targets[w], dloss[w], N, V);
    });
    compare(t, "cross_entropy losses, rows apart", losses, 2e-6);
    compare(t, "cross_entropy losses, rows apart", alone, 2e-6);
    compare_rows(t, "cross_entropy dlogits, rows apart", dlogits, V, 2e-6);
    compare_release(t);
}

// Columns begin .. end-1 of rows (N, V).
static std::vector<float> classifier_columns_of(const std::vector<float> &rows, int64_t V, int64_t begin, int64_t end) {
    std::vector<float> part;
    for (size_t n = 0; n < rows.size() / (size_t)V; n++) {
        for (int64_t v = begin; v < end; v++) part.push_back(rows[n * (size_t)V + (size_t)v]);
    }
    return part;
}

// Shares are side by side, or `apart` elements and more.
static void test_classifier_ranks(Compare *t, LogitsKind kind, Dtype dtype, int64_t N, int64_t V, int64_t R, int64_t apart = 0) {
    compare_case(t, "%lld ranks, N %lld, V %lld, logits %s %s, apart %lld", (long long)R, (long long)N, (long long)V, logits_names[kind],
                 dtype_names[dtype], (long long)apart);
    const std::vector<float> rows = classifier_logits(t, kind, N, V);
    const Both targets = both_ints(t, classifier_targets(t, N, V)), all = both_output(t, R * N * 3, DTYPE_F32);
    const Both logits = both_values(t, rows, dtype), losses = both_output(t, N, DTYPE_F32), dlogits = both_output(t, N * V, DTYPE_F32);
    const BothScalar<double> dloss = both_scalar(t, 0.25);
    std::vector<Both> part, part_losses, part_dlogits;
    std::vector<int64_t> begin;
    for (int64_t r = 0; r <= R; r++) begin.push_back(V * r * r / (R * R)); // unequal shares
    for (int64_t r = 0; r < R; r++) {
        const int64_t columns = begin[(size_t)r + 1] - begin[(size_t)r], row = columns + apart;
        part.push_back(both_rows(t, classifier_columns_of(rows, V, begin[(size_t)r], begin[(size_t)r + 1]), columns, row, dtype));
        part_losses.push_back(both_output(t, N, DTYPE_F32));
        const Both empty = both_rows(t, std::vector<float>((size_t)(N * columns), NAN), columns, row, DTYPE_F32);
        part_dlogits.push_back(r == 1 ? part.back() : empty); // rank 1 in place
    }
    on_both(t, [&](Device *d, int w) {
        d->cross_entropy(d, losses[w], dlogits[w], logits[w], targets[w], dloss[w], N, V);
        for (size_t r = 0; r < (size_t)R; r++) {
            d->cross_entropy_local(d, buffer_at(all[w], (int64_t)r * N * 3), part[r][w], targets[w], begin[r], N, begin[r + 1] - begin[r]);
        }
        for (size_t r = 0; r < (size_t)R; r++) {
            const Buffer to = r == 2 ? buffer_of(nullptr, DTYPE_F32) : part_dlogits[r][w]; // rank 2 without a gradient
            d->cross_entropy_merge(d, part_losses[r][w], to, part[r][w], all[w], R, targets[w], dloss[w], begin[r], N, begin[r + 1] - begin[r]);
        }
    });
    compare(t, "cross_entropy_local stats", all, 2e-6);
    const std::vector<float> whole = compare_read(t, 0, dlogits[0], dlogits.n);
    for (size_t r = 0; r < (size_t)R; r++) {
        compare(t, "cross_entropy_merge losses", part_losses[r], 2e-6);
        compare(t, "cross_entropy_merge losses, undivided", {{losses[0], part_losses[r][1]}, N}, 2e-6);
        compare_check(t, "cross_entropy_merge losses, same bits on all ranks",
                      compare_read(t, 1, part_losses[r][1], N) == compare_read(t, 1, part_losses[0][1], N));
        if (r == 2) continue;
        const int64_t columns = begin[r + 1] - begin[r];
        compare_rows(t, "cross_entropy_merge dlogits", part_dlogits[r], columns, 1e-5);
        // an exponent of some hundreds is a float whose last bit is 1e-5 of the probability
        compare_values(t, "cross_entropy_merge dlogits, undivided", classifier_columns_of(whole, V, begin[r], begin[r + 1]),
                       compare_read_rows(t, 1, part_dlogits[r], columns), part_dlogits[r][1].dtype, 4e-5);
    }
    compare_release(t);
}

// Rows whose loss is not finite on a GPU must say so; rows that begin with -inf are ordinary ones. (The CPU makes NaN of the latter too.)
static void test_classifier_infinite(Compare *t, Dtype dtype) {
    enum { N = 6, V = 1300, HALF = 700 };
    compare_case(t, "infinite logits, %s", dtype_names[dtype]);
    std::vector<float> rows(N * V, 1.0f);
    for (int v = 0; v < V; v++) {
        rows[0 * V + v] = -INFINITY;                                   // nothing else
        rows[1 * V + v] = v < 1100 ? -INFINITY : v == 1200 ? 2 : 0.0f; // many to begin with
    }
    rows[2 * V + 77] = INFINITY, rows[3 * V + 1000] = NAN, rows[4 * V + 5] = -INFINITY; // row 4: its target; row 5: all ones
    const Both logits = both_values(t, rows, dtype), targets = both_ints(t, {3, 1200, 5, 6, 5, 1299}), losses = both_output(t, N, DTYPE_F32);
    const Both low = both_values(t, classifier_columns_of(rows, V, 0, HALF), dtype),
               high = both_values(t, classifier_columns_of(rows, V, HALF, V), dtype);
    const Both all = both_output(t, 2 * N * 3, DTYPE_F32), merged = both_output(t, N, DTYPE_F32), dlogits = both_output(t, N * V, DTYPE_F32);
    Device *d = t->device[1];
    d->cross_entropy(d, losses[1], dlogits[1], logits[1], targets[1], both_scalar(t, 1.0)[1], N, V);
    d->cross_entropy_local(d, all[1], low[1], targets[1], 0, N, HALF);
    d->cross_entropy_local(d, buffer_at(all[1], N * 3), high[1], targets[1], HALF, N, V - HALF);
    d->cross_entropy_merge(d, merged[1], {}, low[1], all[1], 2, targets[1], nullptr, 0, N, HALF);
    const double want[N] = {NAN, log(1 + 199 * exp(-2.0)), NAN, NAN, INFINITY, log(1300.0)};
    for (const Both *which : {&losses, &merged}) {
        const std::vector<float> got = compare_read(t, 1, (*which)[1], N);
        for (int n = 0; n < N; n++) {
            const bool good = std::isfinite(want[n]) ? relative_error(got[(size_t)n], want[n]) < 2e-6 : !std::isfinite(got[(size_t)n]);
            compare_check(t, "cross_entropy losses of infinite logits", good);
        }
    }
    const std::vector<float> gradient = compare_read(t, 1, dlogits[1], N * V);
    compare_check(t, "cross_entropy dlogits of infinite logits", gradient[V] == 0 && fabs(gradient[V + 1200] + 1 - exp(-want[1])) < 2e-6);
    compare_release(t);
}

static void test_loss_sum(Compare *t) {
    for (int64_t N : {0, 1, 7, 1024, 5003}) {
        compare_case(t, "N %lld", (long long)N);
        const Both losses = both_random(t, N, DTYPE_F32, 5, 4);
        const BothState state = both_state(t, {.loss_sum = 1.25,
                                               .grad_squares = 3,
                                               .grad_norm = 4,
                                               .lr = 5,
                                               .loss_scale = 8,
                                               .dropout_key = 9,
                                               .clip_coefficient = 6,
                                               .skip = 0,
                                               .optimizer_steps = 7});
        const BothScalar<double> half = both_scalar(t, 0.5);
        on_both(t, [&](Device *d, int w) {
            d->loss_sum(d, state.at[w], losses[w], half[w], N);
            d->loss_sum(d, state.at[w], losses[w], nullptr, N);
        });
        const StepState want = state_read(t, state, 0), got = state_read(t, state, 1);
        compare_record(t, "loss_sum", relative_error(got.loss_sum, want.loss_sum), 1e-14);
        compare_check(t, "loss_sum leaves the rest",
                      got.grad_squares == 3 && got.grad_norm == 4 && got.lr == 5 && got.loss_scale == 8 && got.dropout_key == 9 &&
                          got.clip_coefficient == 6 && got.optimizer_steps == 7);
        compare_release(t);
    }
}

static void test_classifier(Compare *t) {
    for (LogitsKind kind : {LOGITS_RANDOM, LOGITS_RISING, LOGITS_HUGE, LOGITS_HOLES}) {
        for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) {
            for (int64_t V : {1, 7, 8, 33, 4099, 4104}) test_classifier_case(t, kind, dtype, dtype, V % 2 == 1, V == 4104, 4, V);
        }
    }
    for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) {
        const Dtype other = dtype == DTYPE_F32 ? DTYPE_BF16 : DTYPE_F32;
        for (int64_t V : {5, 1000, 1037}) test_classifier_case(t, LOGITS_RANDOM, dtype, other, false, 0, 4, V);
        test_classifier_case(t, LOGITS_RANDOM, dtype, dtype, true, 0, 2, 9000); // several steps of the block
        test_classifier_case(t, LOGITS_RISING, dtype, dtype, true, 3, 2, 9001);
        for (int64_t R : {1, 2, 3}) {
            test_classifier_ranks(t, LOGITS_RANDOM, dtype, 4, 97, R);
            test_classifier_ranks(t, LOGITS_RISING, dtype, 4, 2000, R);
            test_classifier_ranks(t, LOGITS_HUGE, dtype, 3, 90, R);
            test_classifier_ranks(t, LOGITS_RANDOM, dtype, 4, 1301, R, R == 2 ? 3 : 64);
        }
        for (Dtype ddtype : {DTYPE_F32, DTYPE_BF16}) {
            test_classifier_rows(t, LOGITS_RANDOM, dtype, ddtype, dtype == ddtype, 4, 4099, 4160);
            test_classifier_rows(t, LOGITS_HOLES, dtype, ddtype, false, 4, 4099, 4160);
            test_classifier_rows(t, LOGITS_RISING, dtype, ddtype, false, 4, 33, 36); // not aligned
        }
        test_classifier_ranks(t, LOGITS_RANDOM, dtype, 2, 5000, 40); // more ranks than lanes
        test_classifier_infinite(t, dtype);
    }
    test_loss_sum(t);
}

#endif
