// test_adamw.c: the update against AdamW in double over several steps, padding and skipped steps to the bit; the gradient's
// sum of squares; the decision whether a step counts.
#include "dev/test/ops.h"         // ops_random, ops_compare
#include "llmc/cpu/adamw.h"       // cpu_adamw, cpu_step_decide
#include "llmc/cpu/global_norm.h" // cpu_grad_squares
#include <math.h>                 // sqrt, pow

enum { ELEMENTS = 5003 };

// Sorted, of all sizes, joined and with gaps; an empty one; the last ends with the buffer.
static const Segment segments[] = {
    {0, 1, true}, {32, 80, false}, {112, 17, true}, {160, 0, true}, {160, 1500, true}, {1700, 1030, false}, {2752, ELEMENTS - 2752, true}};
enum { SEGMENTS = sizeof segments / sizeof segments[0] };

static bool owned(int64_t i, bool *decay) {
    for (int s = 0; s < SEGMENTS; s++) {
        *decay = segments[s].decay;
        if (i >= segments[s].begin && i < segments[s].begin + segments[s].count) return true;
    }
    return false;
}

typedef struct {
    Buffer param, master, m, v, grad;
} Arenas;

// Padding holds a pattern that is no number, so that reading it shows as well as writing it.
static void pad(Buffer b) {
    bool decay;
    for (int64_t i = 0; i < ELEMENTS; i++) {
        if (owned(i, &decay)) continue;
        memset(buffer_at(b, i).data, 0xff, dtype_bytes(b.dtype));
    }
}

static Arenas arenas_new(Dtype dtype) {
    Arenas a = {.param = ops_random(ELEMENTS, dtype, 1, 0, 1),
                .m = ops_new(ELEMENTS, DTYPE_F32),
                .v = ops_new(ELEMENTS, DTYPE_F32),
                .grad = ops_new(ELEMENTS, DTYPE_F32)};
    if (dtype == DTYPE_BF16) a.master = ops_random(ELEMENTS, DTYPE_F32, 1, 0, 1), pad(a.master);
    pad(a.param), pad(a.m), pad(a.v), pad(a.grad);
    return a;
}

static void arenas_free(Arenas *a) { free(a->param.data), free(a->master.data), free(a->m.data), free(a->v.data), free(a->grad.data); }

static void fill_grad(Buffer grad, int64_t step) {
    bool decay;
    for (int64_t i = 0; i < ELEMENTS; i++) {
        if (owned(i, &decay)) ops_set(grad, i, test_uniform((uint64_t)(100 + step), (uint64_t)i) * pow(10, (double)(i % 7) - 5));
    }
}

static bool padding_kept(Buffer b) {
    bool decay, kept = true;
    const unsigned char pattern[4] = {0xff, 0xff, 0xff, 0xff};
    for (int64_t i = 0; b.data != NULL && i < ELEMENTS; i++) {
        if (!owned(i, &decay)) kept = kept && memcmp(buffer_at(b, i).data, pattern, dtype_bytes(b.dtype)) == 0;
    }
    return kept;
}

static void test_steps(Dtype dtype) {
    Arenas a = arenas_new(dtype);
    Buffer weights = dtype == DTYPE_F32 ? a.param : a.master;
    const AdamW config = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-4, .weight_decay = 0.1}; // eps large enough to be seen
    double *p = ops_doubles(weights, ELEMENTS), *m = ops_doubles(a.m, ELEMENTS), *v = ops_doubles(a.v, ELEMENTS);
    OpsWorst p_worst = {0}, m_worst = {0}, v_worst = {0};
    StepState state = {0};
    Buffer packed[3];
    for (int step = 1; step <= 5; step++) {
        fill_grad(a.grad, step);
        state.optimizer_steps = step, state.lr = 0.05 / step, state.clip_coefficient = step == 3 ? 0.25 : 1;
        cpu_adamw(NULL, &state, a.param, a.master, a.m, a.v, a.grad, segments, SEGMENTS, config);
        // As torch.optim.AdamW writes it: decay first, then the step with bias-corrected moments.
        int64_t count = 0;
        for (int i = 0; i < 3; i++) packed[i] = ops_new(ELEMENTS, DTYPE_F32);
        double *want[3] = {base_new(ELEMENTS, 8), base_new(ELEMENTS, 8), base_new(ELEMENTS, 8)};
        for (int64_t i = 0; i < ELEMENTS; i++) {
            bool decay;
            if (!owned(i, &decay)) continue;
            const double g = ops_at(a.grad, i) * state.clip_coefficient;
            if (decay) p[i] -= state.lr * config.weight_decay * p[i];
            m[i] = config.beta1 * m[i] + (1 - config.beta1) * g;
            v[i] = config.beta2 * v[i] + (1 - config.beta2) * g * g;
            const double denominator = sqrt(v[i]) / sqrt(1 - pow(config.beta2, step)) + config.eps;
            p[i] -= state.lr / (1 - pow(config.beta1, step)) * m[i] / denominator;
            want[0][count] = p[i], want[1][count] = m[i], want[2][count] = v[i];
            ops_set(packed[0], count, ops_at(weights, i)), ops_set(packed[1], count, ops_at(a.m, i)), ops_set(packed[2], count, ops_at(a.v, i));
            count++;
        }
        ops_compare(&p_worst, packed[0], want[0], count);
        ops_compare(&m_worst, packed[1], want[1], count);
        ops_compare(&v_worst, packed[2], want[2], count);
        for (int i = 0; i < 3; i++) free(packed[i].data), free(want[i]);
    }
    printf("adamw %s\n", dtype_names[dtype]);
    ops_report(&p_worst, 1e-6, "weights after each of 5 steps");
    ops_report(&m_worst, 1e-6, "first moment");
    ops_report(&v_worst, 1e-6, "second moment");
    check(padding_kept(a.param) && padding_kept(a.master) && padding_kept(a.m) && padding_kept(a.v), "%s: padding is untouched",
          dtype_names[dtype]);
    bool rounded = true, decay;
    for (int64_t i = 0; i < ELEMENTS; i++) {
        if (owned(i, &decay)) rounded = rounded && ops_at(a.param, i) == ops_round(dtype, ops_at(weights, i));
    }
    check(rounded, "%s: parameters are the rounded masters", dtype_names[dtype]);

    // A skipped step changes nothing.
    Arenas before = {ops_copy(a.param, ELEMENTS), ops_copy(weights, ELEMENTS), ops_copy(a.m, ELEMENTS), ops_copy(a.v, ELEMENTS), {0}};
    state.skip = 1;
    cpu_adamw(NULL, &state, a.param, a.master, a.m, a.v, a.grad, segments, SEGMENTS, config);
    check(ops_same_bits(before.param, a.param, ELEMENTS) && ops_same_bits(before.master, weights, ELEMENTS) &&
              ops_same_bits(before.m, a.m, ELEMENTS) && ops_same_bits(before.v, a.v, ELEMENTS),
          "%s: a skipped step leaves every bit", dtype_names[dtype]);
    arenas_free(&before), arenas_free(&a), free(p), free(m), free(v);
}

static void test_threads(Dtype dtype) {
    Arenas first = {0};
    double squares = 0; // of one thread
    const int most = omp_get_max_threads();
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        Arenas a = arenas_new(dtype);
        StepState state = {.lr = 0.01, .clip_coefficient = 0.7};
        for (int step = 1; step <= 3; step++) {
            fill_grad(a.grad, step);
            state.optimizer_steps = step;
            cpu_adamw(NULL, &state, a.param, a.master, a.m, a.v, a.grad, segments, SEGMENTS,
                      (AdamW){.beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.1});
        }
        StepState sums = {0};
        cpu_grad_squares(NULL, &sums, a.grad, segments, SEGMENTS);
        if (threads == 1) {
            first = a, squares = sums.grad_squares;
            continue;
        }
        check(ops_same_bits(first.param, a.param, ELEMENTS) && ops_same_bits(first.m, a.m, ELEMENTS) && ops_same_bits(first.v, a.v, ELEMENTS),
              "%s: update with %d threads differs from one", dtype_names[dtype], threads);
        check(sums.grad_squares == squares, "sum of squares with %d threads differs from one", threads);
        arenas_free(&a);
    }
    omp_set_num_threads(most);
    arenas_free(&first);
}

// bf16 parameters without a master: every one becomes one of the two neighbours of the exact result, by the numbers of its place in the unit;
// updates of a tenth of what lies between two bf16 add up; neither threads nor shards change a bit.
static void test_random_rounding(void) {
    enum { N = 40000, CUT = 12344, FIRST = 4096 };
    const Segment all[] = {{0, N, false}}, after[] = {{0, N - CUT, false}};
    const AdamW config = {.beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .rounding = {.key = rng_round_key(3, 7), .unit = 2, .first = FIRST}};
    Buffer param[4], exact = ops_new(N, DTYPE_F32), grad = ops_new(N, DTYPE_F32), m[4], v[4];
    for (int k = 0; k < 4; k++) param[k] = ops_new(N, DTYPE_BF16), m[k] = ops_new(N, DTYPE_F32), v[k] = ops_new(N, DTYPE_F32);
    for (int64_t i = 0; i < N; i++) {
        const double value = i % 3 == 0 ? 1.0 : i % 3 == 1 ? -1.0 : 1.5; // 2^-7 between two bf16
        for (int k = 0; k < 4; k++) ops_set(param[k], i, value);
        ops_set(exact, i, value), ops_set(grad, i, 1.0);
    }
    const StepState state = {.lr = 0.1 * 0x1p-7, .clip_coefficient = 1, .optimizer_steps = 1};
    Buffer m_exact = ops_new(N, DTYPE_F32), v_exact = ops_new(N, DTYPE_F32), none = {0};
    cpu_adamw(NULL, &state, exact, none, m_exact, v_exact, grad, all, 1, config);
    cpu_adamw(NULL, &state, param[0], none, m[0], v[0], grad, all, 1, config);
    int64_t wrong = 0, moved = 0;
    double sum = 0;
    for (int64_t i = 0; i < N; i++) {
        const double got = ops_at(param[0], i), want = ops_at(exact, i);
        uint16_t random[8];
        rng_round_bits(config.rounding.key, 2, (uint64_t)(FIRST + i) / 8, random);
        const float value = (float)want;
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        wrong += got != (double)bf16_to_f32(rng_round_bf16(bits, random[(FIRST + i) % 8])) || !(fabs(got - want) < 0x1p-7);
        moved += got != (i % 3 == 0 ? 1.0 : i % 3 == 1 ? -1.0 : 1.5);
        sum += (got - want) * 0x1p7;
    }
    check(wrong == 0, "random rounding: %lld of %d are not the neighbour that their number names", (long long)wrong, N);
    // of variables that are 0.9 with probability 0.1, else -0.1 (standard deviation 0.3), and of twice the density below 1
    check(fabs(sum / N) < 5 * 0.3 / sqrt(N), "random rounding: the mean error is %g of the distance of two bf16", sum / N);
    check(moved > N / 12 && moved < N / 4, "random rounding: %lld of %d moved", (long long)moved, N);
    check(ops_same_bits(m[0], m_exact, N) && ops_same_bits(v[0], v_exact, N), "random rounding: moments are those of exact parameters");
    const int most = omp_get_max_threads();
    omp_set_num_threads(3);
    cpu_adamw(NULL, &state, param[1], none, m[1], v[1], grad, all, 1, config);
    omp_set_num_threads(most);
    check(ops_same_bits(param[0], param[1], N), "random rounding: three threads");
    AdamW second = config;
    const Segment before[] = {{0, CUT, false}};
    cpu_adamw(NULL, &state, param[2], none, m[2], v[2], grad, before, 1, config);
    second.rounding.first = FIRST + CUT;
    cpu_adamw(NULL, &state, buffer_at(param[2], CUT), none, buffer_at(m[2], CUT), buffer_at(v[2], CUT), buffer_at(grad, CUT), after, 1, second);
    check(ops_same_bits(param[0], param[2], N), "random rounding: two shards");
    second = config, second.rounding.key = rng_round_key(3, 8);
    cpu_adamw(NULL, &state, param[3], none, m[3], v[3], grad, all, 1, second);
    check(!ops_same_bits(param[0], param[3], N), "random rounding: another step draws other numbers");
    check(rng_round_bf16(0x7f800000u, 0xffff) == 0x7f80 && rng_round_bf16(0xff800000u, 1) == 0xff80 && (rng_round_bf16(0x7f800001u, 0) & 0x7f) != 0,
          "random rounding: infinities and NaN stay");
    check(rng_round_bf16(0x3f800000u, 0xffff) == 0x3f80 && rng_round_bf16(0xbf80ffffu, 1) == 0xbf81,
          "random rounding: a bf16 stays, away from zero");
    for (int k = 0; k < 4; k++) free(param[k].data), free(m[k].data), free(v[k].data);
    free(exact.data), free(grad.data), free(m_exact.data), free(v_exact.data);
}

static void test_squares(void) {
    Arenas a = arenas_new(DTYPE_F32);
    static const double scales[] = {1, 1e-25, 1e25}; // squares of the others leave the range of fp32
    double worst = 0;
    for (int s = 0; s < 3; s++) {
        StepState state = {.grad_squares = s == 0 ? 10 : 0};
        long double want = state.grad_squares;
        bool decay;
        for (int64_t i = 0; i < ELEMENTS; i++) {
            if (!owned(i, &decay)) continue;
            ops_set(a.grad, i, scales[s] * test_uniform(7, (uint64_t)i));
            want += (long double)ops_at(a.grad, i) * ops_at(a.grad, i);
        }
        cpu_grad_squares(NULL, &state, a.grad, segments, SEGMENTS);
        ops_worse(&worst, fabs((double)(state.grad_squares / want - 1)));
    }
    StepState state = {.grad_squares = 3};
    cpu_grad_squares(NULL, &state, a.grad, segments, 0);
    check(state.grad_squares == 3, "no segments add nothing");
    const Segment one[] = {{40, 3, false}}; // fewer elements than chunks
    double want = 3;
    for (int64_t i = 40; i < 43; i++) want += ops_at(a.grad, i) * ops_at(a.grad, i);
    cpu_grad_squares(NULL, &state, a.grad, one, 1);
    ops_worse(&worst, fabs(state.grad_squares / want - 1));
    // Enough elements that the chunks hold whole vectors, a gap inside a chunk.
    enum { LARGE = 200000 };
    const Segment two[] = {{0, 99990, true}, {100000, LARGE - 100000, false}};
    for (int s = 0; s < 3; s++) {
        Buffer large = ops_random(LARGE, DTYPE_F32, 8, 0, scales[s]);
        for (int64_t i = 99990; i < 100000; i++) ops_set(large, i, NAN);
        long double sum = 0;
        for (int64_t i = 0; i < LARGE; i++) sum += i >= 99990 && i < 100000 ? 0 : (long double)ops_at(large, i) * ops_at(large, i);
        state = (StepState){0};
        cpu_grad_squares(NULL, &state, large, two, 2);
        ops_worse(&worst, fabs((double)(state.grad_squares / sum - 1)));
        free(large.data);
    }
    printf("grad_squares\n");
    check_error(worst, 1e-14, "sum of squares, padding is NaN");
    arenas_free(&a);
}

static void test_decide(void) {
    StepState state = {.loss_sum = 2, .grad_squares = 16, .optimizer_steps = 4};
    cpu_step_decide(NULL, &state, 1.0);
    check(state.grad_norm == 4 && !state.skip && state.optimizer_steps == 5, "a sound step counts");
    check_error(fabs(state.clip_coefficient - 1 / 4.000001), 1e-15, "clip coefficient");
    cpu_step_decide(NULL, &state, 5.0);
    check(state.clip_coefficient == 1, "a norm below the limit is not scaled up");
    cpu_step_decide(NULL, &state, 0);
    check(state.clip_coefficient == 1 && state.optimizer_steps == 7, "clip 0 is off");
    const double bad[][2] = {{NAN, 1}, {INFINITY, 1}, {1, NAN}, {1, INFINITY}};
    for (int i = 0; i < 4; i++) {
        state.loss_sum = bad[i][0], state.grad_squares = bad[i][1];
        cpu_step_decide(NULL, &state, 1.0);
        check(state.skip == 1 && state.optimizer_steps == 7, "loss %g, squares %g: skipped", bad[i][0], bad[i][1]);
    }
    state.loss_sum = 1, state.grad_squares = 0;
    cpu_step_decide(NULL, &state, 1.0);
    check(state.skip == 0 && state.grad_norm == 0 && state.clip_coefficient == 1 && state.optimizer_steps == 8,
          "the flag is cleared by a sound step");
}

int main(void) {
    test_steps(DTYPE_F32);
    test_steps(DTYPE_BF16);
    test_threads(DTYPE_F32);
    test_threads(DTYPE_BF16);
    test_random_rounding();
    test_squares();
    test_decide();
    return test_end();
}
