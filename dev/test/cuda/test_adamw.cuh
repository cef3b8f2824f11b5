// test_adamw.cuh: the decision of a step and AdamW on the CUDA device against the CPU device: steps in a row through grad_squares, step_decide and
// adamw, over segments that begin anywhere with and without decay; gaps and skipped steps to the bit; gradients that are not finite.
//
// Tolerances. The same fp32 operations as on the CPU, contracted differently, and factors from expm1 where the CPU has pow: 1e-6 of the largest
// weight or moment after ten steps. A bf16 parameter is its master rounded once: compared to the bit.
#ifndef TEST_CUDA_TEST_ADAMW_CUH
#define TEST_CUDA_TEST_ADAMW_CUH

#include "dev/test/cuda/compare.cuh"    // Compare
#include "dev/test/cuda/step_state.cuh" // both_state, both_segments

static const std::vector<Segment> adamw_segments = {{0, 5, true},        {5, 100, false}, {200, 1, true},    {256, 2048, true},
                                                    {3001, 4099, false}, {8000, 0, true}, {9000, 2500, true}};
enum { ADAMW_N = 12000 };

// An optimizer on both devices. The CPU has no master: its param is fp32 and stands for the master too.
struct AdamWBuffers {
    Both param, master, m, v, grad; // (skip + ADAMW_N)
};

static AdamWBuffers adamw_buffers(Compare *t, Dtype dtype, int64_t skip) {
    const int64_t n = skip + ADAMW_N;
    AdamWBuffers b;
    b.param = both_random(t, n, dtype, 0, 1);
    b.master = dtype == DTYPE_BF16 ? both_values(t, compare_read(t, 1, b.param[1], n), DTYPE_F32) : both_absent();
    b.master.at[0].data = nullptr;
    b.m = both_random(t, n, DTYPE_F32, 0, 0.1), b.v = both_random(t, n, DTYPE_F32, 0.02, 0.01), b.grad = both_output(t, n, DTYPE_F32);
    return b;
}

static std::vector<std::vector<float>> adamw_read(Compare *t, const AdamWBuffers &b) {
    std::vector<std::vector<float>> all;
    for (const Both *both : {&b.param, &b.master, &b.m, &b.v}) all.push_back(compare_read(t, 1, both->at[1], both->n));
    return all;
}

// Of the CUDA device: elements of gaps have the same bits in both; `everywhere`: all elements.
static bool adamw_same(const std::vector<std::vector<float>> &a, const std::vector<std::vector<float>> &b, int64_t skip, bool everywhere) {
    std::vector<bool> kept((size_t)(skip + ADAMW_N), true);
    for (const Segment &segment : adamw_segments) {
        for (int64_t i = 0; i < segment.count && !everywhere; i++) kept[(size_t)(skip + segment.begin + i)] = false;
    }
    for (size_t k = 0; k < a.size(); k++) {
        for (size_t i = 0; i < a[k].size(); i++) {
            if (kept[i] && memcmp(&a[k][i], &b[k][i], sizeof(float)) != 0) return false;
        }
    }
    return true;
}

static BothState adamw_state(Compare *t, int64_t steps_before) {
    return both_state(t, {.loss_sum = 0,
                          .grad_squares = 0,
                          .grad_norm = 0,
                          .lr = 0.01,
                          .loss_scale = 8,
                          .dropout_key = 9,
                          .clip_coefficient = 0,
                          .skip = 0,
                          .optimizer_steps = steps_before});
}

// A step with fresh gradients; `bad`: one of them, or the loss.
enum AdamWFault { ADAMW_GOOD, ADAMW_GRADIENT_NAN, ADAMW_GRADIENT_INFINITE, ADAMW_LOSS_NAN };
static void adamw_step(Compare *t, const AdamWBuffers &b, const BothState &state, const BothSegments &list, int64_t skip, double clip, AdamW config,
                       AdamWFault fault) {
    std::vector<float> grad((size_t)(skip + ADAMW_N), NAN); // in gaps
    for (const Segment &segment : adamw_segments) {
        for (int64_t i = 0; i < segment.count; i++) grad[(size_t)(skip + segment.begin + i)] = (float)compare_uniform(t);
    }
    if (fault == ADAMW_GRADIENT_NAN || fault == ADAMW_GRADIENT_INFINITE) grad[(size_t)skip + 300] = fault == ADAMW_GRADIENT_NAN ? NAN : INFINITY;
    on_both(t, [&](Device *d, int w) {
        d->copy_in(d, b.grad[w].data, grad.data(), grad.size() * sizeof(float));
        const StepState old = state_read(t, state, w);
        state_write(t, state, w,
                    {.loss_sum = fault == ADAMW_LOSS_NAN ? NAN : 3.5,
                     .grad_squares = 0,
                     .grad_norm = NAN,
                     .lr = old.lr,
                     .loss_scale = 8,
                     .dropout_key = 9,
                     .clip_coefficient = NAN,
                     .skip = 5,
                     .optimizer_steps = old.optimizer_steps});
        d->grad_squares(d, state.at[w], buffer_at(b.grad[w], skip), list.at[w], list.count);
        d->step_decide(d, state.at[w], clip);
        d->adamw(d, state.at[w], buffer_at(b.param[w], skip), buffer_at(b.master[w], skip), buffer_at(b.m[w], skip), buffer_at(b.v[w], skip),
                 buffer_at(b.grad[w], skip), list.at[w], list.count, config);
    });
}

static void adamw_compare_state(Compare *t, const BothState &state) {
    const StepState want = state_read(t, state, 0), got = state_read(t, state, 1);
    if (!want.skip) {
        compare_record(t, "step_decide norm", relative_error(got.grad_norm, want.grad_norm), 1e-13);
        compare_record(t, "step_decide clip coefficient", relative_error(got.clip_coefficient, want.clip_coefficient), 1e-13);
    }
    compare_check(t, "step_decide skip and steps", got.skip == want.skip && got.optimizer_steps == want.optimizer_steps && got.lr == want.lr);
}

static void test_adamw_case(Compare *t, Dtype dtype, int64_t skip, int64_t steps_before, double clip, AdamW config) {
    compare_case(t, "%s, skip %lld, after %lld steps, clip %g, beta1 %g", dtype_names[dtype], (long long)skip, (long long)steps_before, clip,
                 config.beta1);
    const AdamWBuffers b = adamw_buffers(t, dtype, skip);
    const BothSegments list = both_segments(t, adamw_segments);
    const BothState state = adamw_state(t, steps_before);
    const std::vector<std::vector<float>> start = adamw_read(t, b);
    for (int step = 0; step < 10; step++) {
        const AdamWFault fault = step == 2 ? ADAMW_GRADIENT_NAN : step == 5 ? ADAMW_GRADIENT_INFINITE : step == 7 ? ADAMW_LOSS_NAN : ADAMW_GOOD;
        const std::vector<std::vector<float>> before = adamw_read(t, b);
        adamw_step(t, b, state, list, skip, clip, config, fault);
        adamw_compare_state(t, state);
        compare_check(t, "adamw skips a bad step, and no other", adamw_same(before, adamw_read(t, b), skip, true) == (fault != ADAMW_GOOD));
    }
    const std::vector<std::vector<float>> end = adamw_read(t, b);
    compare_check(t, "adamw leaves gaps", adamw_same(start, end, skip, false));
    compare(t, "adamw weights", {{b.param[0], dtype == DTYPE_BF16 ? b.master[1] : b.param[1]}, skip + ADAMW_N}, 1e-6);
    compare(t, "adamw m", b.m, 1e-6);
    compare(t, "adamw v", b.v, 1e-6);
    if (dtype == DTYPE_BF16) {
        bool same = true;
        for (size_t i = 0; i < end[0].size(); i++) same = same && end[0][i] == compare_round(DTYPE_BF16, end[1][i]);
        compare_check(t, "adamw bf16 parameter is its master rounded", same);
    }
    compare_release(t);
}

// bf16 parameters without a master, on both devices: the same random numbers on results that differ by contraction only, so nearly all are the same
// to the bit and the others are neighbours.
static void test_adamw_random(Compare *t, int64_t skip) {
    compare_case(t, "rounded at random, skip %lld", (long long)skip);
    AdamWBuffers b = adamw_buffers(t, DTYPE_BF16, skip);
    const int64_t n = skip + ADAMW_N;
    const std::vector<float> values = compare_read(t, 1, b.param[1], n);
    std::vector<uint16_t> bits((size_t)n);
    for (size_t i = 0; i < bits.size(); i++) bits[i] = bf16_from_f32(values[i]);
    b.param.at[0] = compare_buffer_(t, 0, bits.data(), n, DTYPE_BF16);
    b.master = both_absent();
    const BothSegments list = both_segments(t, adamw_segments);
    const BothState state = adamw_state(t, 3);
    const std::vector<float> start = compare_read(t, 1, b.param[1], n);
    for (int step = 0; step < 3; step++) {
        const AdamW config = {0.9, 0.95, 1e-8, 0.1, {rng_round_key(5, (uint64_t)step), 3, 1 << 20}};
        adamw_step(t, b, state, list, skip, 1.0, config, step == 1 ? ADAMW_LOSS_NAN : ADAMW_GOOD);
    }
    const std::vector<float> want = compare_read(t, 0, b.param[0], n), got = compare_read(t, 1, b.param[1], n);
    std::vector<bool> owned((size_t)n, false);
    for (const Segment &segment : adamw_segments) {
        for (int64_t i = 0; i < segment.count; i++) owned[(size_t)(skip + segment.begin + i)] = true;
    }
    double others = 0, apart = 0;
    bool gaps = true;
    for (size_t i = 0; i < got.size(); i++) {
        gaps = gaps && (owned[i] || memcmp(&got[i], &start[i], sizeof got[i]) == 0);
        others += got[i] != want[i];
        apart = fmax(apart, fabs((double)got[i] - want[i]) / (fabs(want[i]) + 1e-3));
    }
    compare_check(t, "adamw at random leaves gaps", gaps);
    compare_record(t, "adamw at random, share of neighbours", others / (double)n, 1e-3);
    compare_record(t, "adamw at random, distance", apart, 0x1p-7);
    compare(t, "adamw at random, m", b.m, 1e-6);
    compare(t, "adamw at random, v", b.v, 1e-6);
    compare_release(t);
}

// The decision by itself: clip off, norms around the threshold.
static void test_step_decide(Compare *t) {
    for (double squares : {0.0, 0.25, 0.999, 1.001, 1e12, (double)INFINITY, (double)NAN}) {
        for (double clip : {0.0, 1.0, 1e-3}) {
            compare_case(t, "squares %g, clip %g", squares, clip);
            const BothState state = both_state(t, {.loss_sum = 2,
                                                   .grad_squares = squares,
                                                   .grad_norm = -1,
                                                   .lr = 0.5,
                                                   .loss_scale = 8,
                                                   .dropout_key = 9,
                                                   .clip_coefficient = -1,
                                                   .skip = 7,
                                                   .optimizer_steps = 4});
            on_both(t, [&](Device *d, int w) { d->step_decide(d, state.at[w], clip); });
            adamw_compare_state(t, state);
            compare_release(t);
        }
    }
}

static void test_adamw(Compare *t) {
    const AdamW usual = {0.9, 0.95, 1e-8, 0.1, {}}, without = {0.0, 0.999, 1e-6, 0.0, {}};
    for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) {
        test_adamw_case(t, dtype, 0, 0, 1.0, usual);
        test_adamw_case(t, dtype, 1, 100000, 0.5, without);
        test_adamw_case(t, dtype, 8, 3, 0.0, usual);
    }
    for (int64_t skip : {0, 1, 8}) test_adamw_random(t, skip);
    test_step_decide(t);
}

#endif
