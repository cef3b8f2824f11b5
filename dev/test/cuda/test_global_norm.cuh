// test_global_norm.cuh: the sum of squares of the gradient on the CUDA device against the CPU device: segments that begin anywhere, gaps that must
// not count, many small tensors, more tiles than blocks, magnitudes whose squares leave fp32, and the same bits every time. In double: 1e-13, for
// the orders differ.
#ifndef TEST_CUDA_TEST_GLOBAL_NORM_CUH
#define TEST_CUDA_TEST_GLOBAL_NORM_CUH

#include "dev/test/cuda/compare.cuh"    // Compare
#include "dev/test/cuda/step_state.cuh" // both_state, both_segments

static void test_global_norm_case(Compare *t, const char *name, const std::vector<Segment> &segments, int64_t n, int64_t skip, double scale) {
    compare_case(t, "%s, skip %lld, scale %g", name, (long long)skip, scale);
    std::vector<float> values((size_t)(skip + n), NAN); // in gaps
    for (const Segment &segment : segments) {
        for (int64_t i = 0; i < segment.count; i++) values[(size_t)(skip + segment.begin + i)] = (float)(scale * compare_uniform(t));
    }
    const Both grad = both_values(t, values, DTYPE_F32);
    const BothSegments list = both_segments(t, segments);
    const StepState start = {.loss_sum = 1,
                             .grad_squares = 2 * scale * scale,
                             .grad_norm = 4,
                             .lr = 5,
                             .loss_scale = 8,
                             .dropout_key = 9,
                             .clip_coefficient = 6,
                             .skip = 0,
                             .optimizer_steps = 7};
    const BothState state = both_state(t, start), again = both_state(t, start);
    on_both(t, [&](Device *d, int w) {
        d->grad_squares(d, state.at[w], buffer_at(grad[w], skip), list.at[w], list.count);
        d->grad_squares(d, again.at[w], buffer_at(grad[w], skip), list.at[w], list.count);
    });
    const StepState want = state_read(t, state, 0), got = state_read(t, state, 1);
    compare_record(t, "grad_squares", relative_error(got.grad_squares, want.grad_squares), 1e-13);
    compare_check(t, "grad_squares again", got.grad_squares == state_read(t, again, 1).grad_squares);
    compare_check(t, "grad_squares leaves the rest",
                  got.loss_sum == 1 && got.grad_norm == 4 && got.lr == 5 && got.loss_scale == 8 && got.dropout_key == 9 &&
                      got.optimizer_steps == 7);
    compare_release(t);
}

static void test_global_norm(Compare *t) {
    const std::vector<Segment> mixed = {{0, 5, true},        {5, 100, false}, {200, 1, true},    {256, 2048, true},
                                        {3001, 4099, false}, {8000, 0, true}, {9000, 2500, true}};
    std::vector<Segment> small;
    for (int64_t i = 0; i < 600; i++) small.push_back({i * 9 + i % 2, 7, i % 3 == 0}); // more segments than blocks
    for (int64_t skip : {0, 1}) {
        for (double scale : {1.0, 1e30, 1e-30}) test_global_norm_case(t, "mixed segments", mixed, 11500, skip, scale);
    }
    test_global_norm_case(t, "one element", {{3, 1, true}}, 8, 0, 1);
    test_global_norm_case(t, "no segments", {}, 8, 0, 1);
    test_global_norm_case(t, "small segments", small, 600 * 9, 0, 1);
    test_global_norm_case(t, "large segments", {{8, 1000000, true}, {1000100, 150001, false}}, 1150200, 0, 1);
}

#endif
