// test_rope.c: RMSNorm per head and rotary positions of the CPU device against double precision, whose gradient is itself
// checked by finite differences; the table of angles; the same bits for every thread count.
#include "dev/test/test.h" // check, check_error, test_end, test_uniform
#include "llmc/base.h"     // base_new
#include "llmc/cpu/rope.h" // cpu_qk_forward, cpu_qk_backward
#include "llmc/rope.h"     // rope_table_fill
#include <omp.h>           // omp_set_num_threads

enum { POSITIONS = 1000 };
static const double eps = 1e-5;
static const RopeScaling unscaled = {0};

typedef struct {
    int64_t N, NH, NKV, HS, QKV, normed_heads;
    AttentionShape shape;
    Dtype dtype;
    bool norm, rope;
    Buffer in, out, dqkv, rstd, q_norm, k_norm, dq_norm, dk_norm, table, positions;
    double *x, *y, *dy, *dx, *weight, *dweight; // reference: (N, QKV) x 4, (2, HS) x 2
} Problem;

static double value_at(Buffer buffer, int64_t i) {
    return buffer.dtype == DTYPE_F32 ? (double)((float *)buffer.data)[i] : (double)bf16_to_f32(((uint16_t *)buffer.data)[i]);
}

static void set_value(Buffer buffer, int64_t i, double x) {
    if (buffer.dtype == DTYPE_F32) {
        ((float *)buffer.data)[i] = (float)x;
    } else {
        ((uint16_t *)buffer.data)[i] = bf16_from_f32((float)x);
    }
}

static Buffer new_buffer(int64_t n, Dtype dtype) { return buffer_of(base_new((size_t)n, dtype_bytes(dtype)), dtype); }

static Problem problem_create(int64_t N, int64_t NH, int64_t NKV, int64_t HS, Dtype dtype, bool norm, bool rope) {
    Problem p = {.N = N, .NH = NH, .NKV = NKV, .HS = HS, .QKV = (NH + 2 * NKV) * HS, .normed_heads = NH + NKV, .shape = {NH, NKV, HS}};
    p.dtype = dtype, p.norm = norm, p.rope = rope;
    p.in = new_buffer(N * p.QKV, dtype), p.out = new_buffer(N * p.QKV, dtype), p.dqkv = new_buffer(N * p.QKV, dtype);
    p.x = base_new((size_t)(N * p.QKV), 8), p.y = base_new((size_t)(N * p.QKV), 8), p.dy = base_new((size_t)(N * p.QKV), 8);
    p.dx = base_new((size_t)(N * p.QKV), 8), p.weight = base_new((size_t)(2 * HS), 8), p.dweight = base_new((size_t)(2 * HS), 8);
    for (int64_t i = 0; i < N * p.QKV; i++) {
        set_value(p.in, i, 3 * test_uniform(1, (uint64_t)i)), set_value(p.dqkv, i, test_uniform(2, (uint64_t)i)), set_value(p.out, i, NAN);
        p.x[i] = value_at(p.in, i), p.dy[i] = value_at(p.dqkv, i);
    }
    if (norm) {
        p.rstd = new_buffer(N * p.normed_heads, DTYPE_F32), p.q_norm = new_buffer(HS, dtype), p.k_norm = new_buffer(HS, dtype);
        p.dq_norm = new_buffer(HS, DTYPE_F32), p.dk_norm = new_buffer(HS, DTYPE_F32);
        for (int64_t d = 0; d < HS; d++) {
            set_value(p.q_norm, d, 1 + 0.5 * test_uniform(3, (uint64_t)d)), set_value(p.k_norm, d, 1 + 0.5 * test_uniform(4, (uint64_t)d));
            p.weight[d] = value_at(p.q_norm, d), p.weight[HS + d] = value_at(p.k_norm, d);
            set_value(p.dq_norm, d, (double)d), set_value(p.dk_norm, d, -(double)d);
        }
    }
    if (rope) {
        p.table = new_buffer(POSITIONS * HS, DTYPE_F32), p.positions = new_buffer(N, DTYPE_I32);
        rope_table_fill(p.table.data, POSITIONS, HS, 1e4, &unscaled);
        for (int64_t n = 0; n < N; n++) ((int32_t *)p.positions.data)[n] = (int32_t)((n * 977 + 3) % POSITIONS);
    }
    return p;
}

static void problem_free(Problem *p) {
    Buffer buffers[] = {p->in, p->out, p->dqkv, p->rstd, p->q_norm, p->k_norm, p->dq_norm, p->dk_norm, p->table, p->positions};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++) free(buffers[i].data);
    free(p->x), free(p->y), free(p->dy), free(p->dx), free(p->weight), free(p->dweight);
}

static void problem_run(Problem *p, bool accumulate) {
    cpu_qk_forward(NULL, p->out, p->rstd, p->in, p->q_norm, p->k_norm, eps, p->table, p->positions, p->shape, p->N);
    cpu_qk_backward(NULL, p->dqkv, p->dq_norm, p->dk_norm, accumulate, p->in, p->rstd, p->q_norm, p->k_norm, p->table, p->positions, p->shape,
                    p->N);
}

// Angle of a pair, from the definition (not from the table): position * theta^(-2i/HS).
static double angle_of(const Problem *p, int64_t n, int64_t i) {
    return (double)((int32_t *)p->positions.data)[n] * pow(1e4, -2.0 * (double)i / (double)p->HS);
}

static double reference_rstd(const Problem *p, const double *x) {
    double squares = 0;
    for (int64_t d = 0; d < p->HS; d++) squares += x[d] * x[d];
    return 1 / sqrt(squares / (double)p->HS + eps);
}

static void reference_forward(const Problem *p) {
    memcpy(p->y, p->x, (size_t)(p->N * p->QKV) * 8);
    for (int64_t n = 0; n < p->N; n++) {
        for (int64_t h = 0; h < p->normed_heads; h++) {
            const double *x = p->x + n * p->QKV + h * p->HS;
            double *y = p->y + n * p->QKV + h * p->HS;
            if (p->norm) {
                const double r = reference_rstd(p, x), *weight = p->weight + (h < p->NH ? 0 : p->HS);
                for (int64_t d = 0; d < p->HS; d++) y[d] = x[d] * r * weight[d];
            }
            for (int64_t i = 0; i < p->HS / 2 && p->rope; i++) { // rotate-half: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
                const double a = angle_of(p, n, i), x1 = y[i], x2 = y[p->HS / 2 + i];
                y[i] = x1 * cos(a) - x2 * sin(a), y[p->HS / 2 + i] = x2 * cos(a) + x1 * sin(a);
            }
        }
    }
}

static void reference_backward(const Problem *p) {
    memcpy(p->dx, p->dy, (size_t)(p->N * p->QKV) * 8);
    memset(p->dweight, 0, (size_t)(2 * p->HS) * 8);
    for (int64_t n = 0; n < p->N; n++) {
        for (int64_t h = 0; h < p->normed_heads; h++) {
            const double *x = p->x + n * p->QKV + h * p->HS;
            double *dx = p->dx + n * p->QKV + h * p->HS;
            for (int64_t i = 0; i < p->HS / 2 && p->rope; i++) {
                const double a = angle_of(p, n, i), d1 = dx[i], d2 = dx[p->HS / 2 + i];
                dx[i] = d1 * cos(a) + d2 * sin(a), dx[p->HS / 2 + i] = d2 * cos(a) - d1 * sin(a);
            }
            if (!p->norm) continue;
            const double r = reference_rstd(p, x), *weight = p->weight + (h < p->NH ? 0 : p->HS);
            double *dweight = p->dweight + (h < p->NH ? 0 : p->HS), dot = 0;
            for (int64_t d = 0; d < p->HS; d++) dot += dx[d] * weight[d] * x[d];
            for (int64_t d = 0; d < p->HS; d++) {
                dweight[d] += dx[d] * x[d] * r;
                dx[d] = r * weight[d] * dx[d] - r * r * r * x[d] * dot / (double)p->HS;
            }
        }
    }
}

static double reference_loss(const Problem *p) {
    double loss = 0;
    reference_forward(p);
    for (int64_t i = 0; i < p->N * p->QKV; i++) loss += p->dy[i] * p->y[i];
    return loss;
}

static double reference_slope(const Problem *p, double *at) {
    const double kept = *at, h = 1e-5;
    *at = kept + h;
    const double above = reference_loss(p);
    *at = kept - h;
    const double below = reference_loss(p);
    *at = kept;
    return (above - below) / (2 * h);
}

static void test_finite_differences(void) {
    printf("the reference's gradient against finite differences\n");
    Problem p = problem_create(5, 3, 1, 6, DTYPE_F32, true, true);
    reference_backward(&p);
    double worst = 0;
    for (int64_t i = 0; i < p.N * p.QKV; i++) worst = fmax(worst, fabs(reference_slope(&p, &p.x[i]) - p.dx[i]));
    check_error(worst, 1e-8, "input");
    worst = 0;
    for (int64_t i = 0; i < 2 * p.HS; i++) worst = fmax(worst, fabs(reference_slope(&p, &p.weight[i]) - p.dweight[i]));
    check_error(worst, 1e-8, "weights");
    problem_free(&p);
}

// Relative L2 error; also of the reference rounded to bf16 when `limit` is wanted.
static double buffer_error(Buffer got, const double *want, int64_t n, double *limit) {
    double difference = 0, rounding = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        const double e = value_at(got, i) - want[i], r = (double)bf16_to_f32(bf16_from_f32((float)want[i])) - want[i];
        difference += e * e, rounding += r * r, size += want[i] * want[i];
    }
    if (limit != NULL) *limit = 2 * sqrt(rounding / size);
    return sqrt(difference / size);
}

static void test_against_reference(void) {
    static const int64_t sizes[] = {2, 16, 20, 64, 80, 96, 128}, heads[][2] = {{1, 1}, {5, 1}, {6, 2}, {6, 3}}, tokens[] = {1, 7, 65, 257};
    for (int dtype = DTYPE_F32; dtype <= DTYPE_BF16; dtype++) {
        double forward = 0, backward = 0, weights = 0; // errors over their bounds
        for (int c = 0; c < 7 * 4 * 3; c++) {
            const int64_t HS = sizes[c % 7], *pair = heads[c / 7 % 4], N = tokens[(c + c / 7) % 4];
            const bool norm = c / 28 != 1, rope = c / 28 != 2;
            Problem p = problem_create(N, pair[0], pair[1], HS, (Dtype)dtype, norm, rope);
            reference_forward(&p), reference_backward(&p);
            const bool accumulate = c % 2;
            problem_run(&p, accumulate);
            double limit;
            double error = buffer_error(p.out, p.y, N * p.QKV, &limit);
            forward = fmax(forward, error / (dtype == DTYPE_F32 ? 1e-5 : limit));
            check(isfinite(error), "case %d: forward is not finite", c);
            error = buffer_error(p.dqkv, p.dx, N * p.QKV, &limit);
            backward = fmax(backward, error / (dtype == DTYPE_F32 ? 1e-5 : limit));
            check(isfinite(error), "case %d: backward is not finite", c);
            for (int kind = 0; kind < 2 && norm; kind++) {
                for (int64_t d = 0; d < HS && accumulate; d++) p.dweight[kind * HS + d] += (double)(kind ? -d : d);
                error = buffer_error(kind ? p.dk_norm : p.dq_norm, p.dweight + kind * HS, HS, NULL);
                weights = fmax(weights, error / 1e-5);
                check(isfinite(error), "case %d: a gradient of weights is not finite", c);
            }
            for (int64_t n = 0; n < N; n++) {
                const int64_t at = n * p.QKV + p.normed_heads * HS;
                const size_t bytes = (size_t)(p.NKV * HS) * dtype_bytes((Dtype)dtype);
                if (memcmp(buffer_at(p.out, at).data, buffer_at(p.in, at).data, bytes) == 0) continue;
                check(false, "case %d: v of token %d is not copied", c, (int)n);
            }
            problem_free(&p);
        }
        printf("against double precision, %s (error / bound; fp32 1e-5, bf16 twice the rounding of the reference)\n", dtype_names[dtype]);
        check_error(forward, 1, "forward");
        check_error(backward, 1, "backward");
        check_error(weights, 1, "gradients of weights (fp32)");
    }
}

static void test_in_place(void) {
    printf("in place without qk-norm; nothing to do without both; no tokens\n");
    Problem a = problem_create(33, 4, 2, 48, DTYPE_F32, false, true), b = problem_create(33, 4, 2, 48, DTYPE_F32, false, true);
    problem_run(&a, false);
    free(b.out.data);
    b.out = b.in;
    problem_run(&b, false);
    check(memcmp(a.out.data, b.in.data, (size_t)(a.N * a.QKV) * 4) == 0, "in place differs from out of place");
    b.out.data = NULL;
    problem_free(&a), problem_free(&b);
    a = problem_create(33, 4, 2, 48, DTYPE_BF16, false, false);
    problem_run(&a, false);
    check(memcmp(a.out.data, a.in.data, (size_t)(a.N * a.QKV) * 2) == 0, "without norm and rope the input is not copied");
    check(buffer_error(a.dqkv, a.dy, a.N * a.QKV, NULL) == 0, "without norm and rope the gradient changes");
    problem_free(&a);
    a = problem_create(0, 4, 2, 16, DTYPE_F32, true, true);
    problem_run(&a, false);
    bool zero = true;
    for (int64_t d = 0; d < 16; d++) zero = zero && value_at(a.dq_norm, d) == 0 && value_at(a.dk_norm, d) == 0;
    check(zero, "no tokens: a gradient is not zero");
    problem_free(&a);
}

static void test_table(void) {
    printf("the table of angles\n");
    enum { FAR = 131072, HS = 128 };
    float *table = base_new((size_t)FAR * HS, sizeof *table);
    rope_table_fill(table, FAR, HS, 5e5, &unscaled);
    double worst = 0;
    for (int64_t position = 0; position < FAR; position += position < 100 ? 1 : 3001) {
        for (int64_t i = 0; i < HS / 2; i++) {
            const long double angle = (long double)position * powl(5e5L, -2.0L * (long double)i / HS);
            worst = fmax(worst, fabs((double)((long double)table[position * HS + i] - cosl(angle))));
            worst = fmax(worst, fabs((double)((long double)table[position * HS + HS / 2 + i] - sinl(angle))));
        }
    }
    check_error(worst, 6.1e-8, "to position 131071, theta 5e5"); // half a step of a float below 1
    check(table[0] == 1 && table[HS / 2] == 0, "position 0 is not the identity");
    free(table);
}

// Llama 3's scaling, by the wavelengths in which it was published: with those of Llama 3.1 (theta 5e5), and where all three kinds are common.
static void test_scaling(void) {
    printf("scaled frequencies\n");
    enum { FAR = 40000, HS = 128 };
    static const RopeScaling cases[] = {{8, 1, 4, 8192}, {32, 1, 4, 8192}, {3, 2, 40, 1000}};
    const long double turn = 2 * acosl(-1.0L);
    for (int k = 0; k < 3; k++) {
        const RopeScaling *s = &cases[k];
        float *table = base_new((size_t)FAR * HS, sizeof *table);
        rope_table_fill(table, FAR, HS, 5e5, s);
        double worst = 0;
        int kinds[3] = {0};
        for (int64_t i = 0; i < HS / 2; i++) {
            const long double frequency = powl(5e5L, -2.0L * (long double)i / HS), wave = turn / frequency, first = (long double)s->original_seq;
            const int kind = wave > first / s->low_freq_factor ? 0 : wave < first / s->high_freq_factor ? 2 : 1;
            const long double smooth = (first / wave - s->low_freq_factor) / ((long double)s->high_freq_factor - s->low_freq_factor);
            const long double scaled = kind == 0   ? frequency / s->factor
                                       : kind == 2 ? frequency
                                                   : (1 - smooth) * frequency / s->factor + smooth * frequency;
            kinds[kind]++;
            for (int64_t position = 0; position < FAR; position += position < 100 ? 1 : 997) {
                worst = fmax(worst, fabs((double)((long double)table[position * HS + i] - cosl((long double)position * scaled))));
                worst = fmax(worst, fabs((double)((long double)table[position * HS + HS / 2 + i] - sinl((long double)position * scaled))));
            }
        }
        char label[64];
        snprintf(label, sizeof label, "factor %g: %d divided, %d mixed, %d kept", s->factor, kinds[0], kinds[1], kinds[2]);
        check_error(worst, 6.1e-8, label);
        check(kinds[0] > 5 && kinds[1] > 2 && kinds[2] > 5, "%s: too few of a kind", label);
        free(table);
    }
}

static void test_threads(void) {
    printf("the same bits for 1, 2, 3 and 7 threads, and again\n");
    const int threads[] = {1, 2, 3, 7, 7}, before = omp_get_max_threads();
    for (int dtype = DTYPE_F32; dtype <= DTYPE_BF16; dtype++) {
        Problem p[5];
        for (int t = 0; t < 5; t++) {
            omp_set_num_threads(threads[t]);
            p[t] = problem_create(301, 6, 2, 40, (Dtype)dtype, true, true);
            problem_run(&p[t], true);
            const size_t bytes = (size_t)(p[t].N * p[t].QKV) * dtype_bytes((Dtype)dtype);
            check(memcmp(p[0].out.data, p[t].out.data, bytes) == 0 && memcmp(p[0].dqkv.data, p[t].dqkv.data, bytes) == 0 &&
                      memcmp(p[0].dq_norm.data, p[t].dq_norm.data, 160) == 0 && memcmp(p[0].dk_norm.data, p[t].dk_norm.data, 160) == 0 &&
                      memcmp(p[0].rstd.data, p[t].rstd.data, (size_t)(p[t].N * 8) * 4) == 0,
                  "%s: %d threads", dtype_names[dtype], threads[t]);
        }
        for (int t = 0; t < 5; t++) problem_free(&p[t]);
    }
    omp_set_num_threads(before);
}

int main(void) {
    test_table();
    test_scaling();
    test_finite_differences();
    test_against_reference();
    test_in_place();
    test_threads();
    return test_end();
}
