// test_norm.c: residual + dropout + norm, forward and backward, and dropout_backward against double precision, finite
// differences and the definition of the mask; residual_forward against the sum that the norm writes.
#include "dev/test/ops.h"  // ops_random, ops_compare
#include "llmc/cpu/norm.h" // cpu_norm_*, cpu_residual_forward
#include <math.h>          // sqrt

static const int kinds[] = {NORM_LAYERNORM, NORM_RMSNORM};
static const Dtype dtypes[] = {DTYPE_F32, DTYPE_BF16};

// out, mean, rstd = of x, in double
static void reference_forward(double *out, double *mean, double *rstd, const double *x, const double *w, const double *b, int kind, double eps,
                              int64_t N, int64_t C) {
    for (int64_t n = 0; n < N; n++) {
        const double *row = x + n * C;
        double m = 0, square = 0;
        for (int64_t c = 0; c < C; c++) m += row[c] / (double)C;
        if (kind == NORM_RMSNORM) m = 0;
        for (int64_t c = 0; c < C; c++) square += (row[c] - m) * (row[c] - m) / (double)C;
        mean[n] = m;
        rstd[n] = 1 / sqrt(square + eps);
        for (int64_t c = 0; c < C; c++) out[n * C + c] = (row[c] - m) * rstd[n] * w[c] + (b != NULL ? b[c] : 0);
    }
}

static void reference_backward(double *dx, double *dw, double *db, const double *dout, const double *x, const double *w, int kind, double eps,
                               int64_t N, int64_t C) {
    double *out = base_new((size_t)(N * C), 8), *mean = base_new((size_t)N, 8), *rstd = base_new((size_t)N, 8);
    reference_forward(out, mean, rstd, x, w, NULL, kind, eps, N, C);
    for (int64_t n = 0; n < N; n++) {
        double c1 = 0, c2 = 0;
        for (int64_t c = 0; c < C; c++) {
            const double d = dout[n * C + c], xhat = (x[n * C + c] - mean[n]) * rstd[n];
            dw[c] += d * xhat;
            db[c] += d;
            c1 += d * w[c] / (double)C;
            c2 += d * w[c] * xhat / (double)C;
        }
        if (kind == NORM_RMSNORM) c1 = 0;
        for (int64_t c = 0; c < C; c++) {
            const double xhat = (x[n * C + c] - mean[n]) * rstd[n];
            dx[n * C + c] += rstd[n] * (dout[n * C + c] * w[c] - c1 - xhat * c2);
        }
    }
    free(out), free(mean), free(rstd);
}

typedef struct {
    OpsWorst sum, out, mean, rstd;
} ForwardWorst;

static void forward_case(ForwardWorst *worst, int kind, Dtype dtype, bool branched, bool biased, double drop, double centre, int64_t N, int64_t C) {
    Buffer in = ops_random(N * C, dtype, 1, centre, 1), branch = ops_random(N * C, dtype, 2, 0, 1), weight = ops_random(C, dtype, 3, 1, 0.5),
           bias = ops_random(C, dtype, 4, 0, 1), out = ops_new(N * C, dtype), sum = ops_new(N * C, dtype), mean = ops_new(N, DTYPE_F32),
           rstd = ops_new(N, DTYPE_F32);
    const Dropout dropout = {&(uint64_t){11}, 3, rng_dropout_threshold(drop), ops_counting(N, 100)};
    const Buffer none = {0};
    cpu_norm_forward(NULL, out, mean, rstd, branched ? sum : none, in, branched ? branch : none, weight, biased ? bias : none, &dropout, kind, 1e-5,
                     N, C);
    double *x = ops_doubles(in, N * C), *w = ops_doubles(weight, C), *b = ops_doubles(bias, C);
    if (branched) {
        for (int64_t i = 0; i < N * C; i++) x[i] += ops_at(branch, i) * ops_mask(&dropout, i / C, i % C);
        ops_compare(&worst->sum, sum, x, N * C);
        free(x);
        x = ops_doubles(sum, N * C); // what is normalised is what was stored
    }
    double *want = base_new((size_t)(N * C), 8), *want_mean = base_new((size_t)N, 8), *want_rstd = base_new((size_t)N, 8);
    reference_forward(want, want_mean, want_rstd, x, w, biased ? b : NULL, kind, 1e-5, N, C);
    ops_compare(&worst->out, out, want, N * C);
    ops_compare(&worst->mean, mean, want_mean, N);
    ops_compare(&worst->rstd, rstd, want_rstd, N);
    free(in.data), free(branch.data), free(weight.data), free(bias.data), free(out.data), free(sum.data), free(mean.data), free(rstd.data);
    free(dropout.token_index.data), free(x), free(w), free(b), free(want), free(want_mean), free(want_rstd);
}

static void test_forward(void) {
    static const int64_t sizes[][2] = {{1, 1}, {7, 1}, {1, 80}, {7, 131}, {5, 768}, {3, 1027}, {2, 5000}, {0, 16}};
    ForwardWorst worst = {0};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (int variant = 0; variant < 32; variant++) {
            const bool branched = variant & 4, biased = variant & 8;
            // C = 1 has no variance: any rounding of the mean would be amplified by 1/sqrt(eps); it is tested without an offset
            forward_case(&worst, kinds[variant & 1], dtypes[variant >> 1 & 1], branched, biased, variant & 16 ? 0.25 : 0, sizes[s][1] > 1 ? 0.5 : 0,
                         sizes[s][0], sizes[s][1]);
        }
    }
    printf("forward\n");
    ops_report(&worst.sum, 2e-7, "sum");
    ops_report(&worst.out, 2e-6, "out");
    ops_report(&worst.mean, 1e-6, "mean");
    ops_report(&worst.rstd, 1e-6, "rstd");
}

typedef struct {
    OpsWorst dx, dweight, dbias;
} BackwardWorst;

static void backward_case(BackwardWorst *worst, int kind, Dtype dtype, bool biased, bool accumulate_x, bool accumulate_w, bool in_place, int64_t N,
                          int64_t C) {
    Buffer x = ops_random(N * C, dtype, 5, 0.3, 1), dout = ops_random(N * C, dtype, 6, 0, 1), weight = ops_random(C, dtype, 7, 1, 0.5),
           out = ops_new(N * C, dtype), mean = ops_new(N, DTYPE_F32), rstd = ops_new(N, DTYPE_F32), dx = ops_random(N * C, dtype, 8, 0, 1),
           dweight = ops_random(C, DTYPE_F32, 9, 0, 1), dbias = ops_random(C, DTYPE_F32, 10, 0, 1);
    double *xs = ops_doubles(x, N * C), *ds = ops_doubles(dout, N * C), *w = ops_doubles(weight, C), *want_dx = ops_doubles(dx, N * C),
           *want_dw = ops_doubles(dweight, C), *want_db = ops_doubles(dbias, C);
    if (!accumulate_x) memset(want_dx, 0, (size_t)(N * C) * 8);
    if (!accumulate_w) memset(want_dw, 0, (size_t)C * 8), memset(want_db, 0, (size_t)C * 8);
    cpu_norm_forward(NULL, out, kind == NORM_LAYERNORM ? mean : (Buffer){0}, rstd, (Buffer){0}, x, (Buffer){0}, weight, (Buffer){0}, NULL, kind,
                     1e-5, N, C);
    reference_backward(want_dx, want_dw, want_db, ds, xs, w, kind, 1e-5, N, C);
    Buffer to = in_place ? dout : dx;
    cpu_norm_backward(NULL, to, accumulate_x, dweight, biased ? dbias : (Buffer){0}, accumulate_w, dout, x,
                      kind == NORM_LAYERNORM ? mean : (Buffer){0}, rstd, weight, kind, N, C);
    ops_compare(&worst->dx, to, want_dx, N * C);
    ops_compare(&worst->dweight, dweight, want_dw, C);
    if (biased) ops_compare(&worst->dbias, dbias, want_db, C);
    free(x.data), free(dout.data), free(weight.data), free(out.data), free(mean.data), free(rstd.data), free(dx.data), free(dweight.data);
    free(dbias.data), free(xs), free(ds), free(w), free(want_dx), free(want_dw), free(want_db);
}

static void test_backward(void) {
    // C = 1 is left to test_extremes: its true dx is zero. The last size takes several tiles.
    static const int64_t sizes[][2] = {{1, 80}, {7, 131}, {33, 768}, {3, 1027}, {2, 5000}, {0, 16}, {130, 8200}};
    BackwardWorst worst = {0};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (int variant = 0; variant < 32; variant++) {
            if (sizes[s][1] == 8200 && variant != 0 && variant != 31) continue;
            backward_case(&worst, kinds[variant & 1], dtypes[variant >> 1 & 1], variant & 4, variant & 8, variant & 16, false, sizes[s][0],
                          sizes[s][1]);
        }
    }
    for (int variant = 0; variant < 4; variant++) {
        backward_case(&worst, kinds[variant & 1], dtypes[variant >> 1], true, false, false, true, 40, 131);
    }
    printf("backward, = and +=, in place\n");
    ops_report(&worst.dx, 2e-6, "dx");
    ops_report(&worst.dweight, 2e-6, "dweight");
    ops_report(&worst.dbias, 2e-6, "dbias");
}

// Loss = sum of dout * out, differentiated numerically in double.
static double loss_of(const double *x, const double *w, const double *b, const double *dout, int kind, int64_t N, int64_t C) {
    double out[512], mean[8], rstd[8], loss = 0;
    reference_forward(out, mean, rstd, x, w, b, kind, 1e-5, N, C);
    for (int64_t i = 0; i < N * C; i++) loss += out[i] * dout[i];
    return loss;
}

static double slope(double *at, double h, const double *x, const double *w, const double *b, const double *dout, int kind, int64_t N, int64_t C) {
    const double old = *at;
    *at = old + h;
    const double up = loss_of(x, w, b, dout, kind, N, C);
    *at = old - h;
    const double down = loss_of(x, w, b, dout, kind, N, C);
    *at = old;
    return (up - down) / (2 * h);
}

static void test_differences(void) {
    const int64_t N = 3, C = 37;
    OpsWorst dx_worst = {0}, dw_worst = {0}, db_worst = {0};
    for (int k = 0; k < 2; k++) {
        const int kind = kinds[k];
        Buffer x = ops_random(N * C, DTYPE_F32, 21, 0.3, 1), dout = ops_random(N * C, DTYPE_F32, 22, 0, 1),
               weight = ops_random(C, DTYPE_F32, 23, 1, 0.5), bias = ops_random(C, DTYPE_F32, 24, 0, 1), out = ops_new(N * C, DTYPE_F32),
               mean = ops_new(N, DTYPE_F32), rstd = ops_new(N, DTYPE_F32), dx = ops_new(N * C, DTYPE_F32), dweight = ops_new(C, DTYPE_F32),
               dbias = ops_new(C, DTYPE_F32);
        cpu_norm_forward(NULL, out, mean, rstd, (Buffer){0}, x, (Buffer){0}, weight, bias, NULL, kind, 1e-5, N, C);
        cpu_norm_backward(NULL, dx, false, dweight, dbias, false, dout, x, mean, rstd, weight, kind, N, C);
        double *xs = ops_doubles(x, N * C), *w = ops_doubles(weight, C), *b = ops_doubles(bias, C), *ds = ops_doubles(dout, N * C);
        double want_dx[512], want_dw[64], want_db[64];
        for (int64_t i = 0; i < N * C; i++) want_dx[i] = slope(xs + i, 1e-4, xs, w, b, ds, kind, N, C);
        for (int64_t i = 0; i < C; i++) want_dw[i] = slope(w + i, 1e-3, xs, w, b, ds, kind, N, C);
        for (int64_t i = 0; i < C; i++) want_db[i] = slope(b + i, 1e-3, xs, w, b, ds, kind, N, C);
        ops_compare(&dx_worst, dx, want_dx, N * C);
        ops_compare(&dw_worst, dweight, want_dw, C);
        ops_compare(&db_worst, dbias, want_db, C);
        free(x.data), free(dout.data), free(weight.data), free(bias.data), free(out.data), free(mean.data), free(rstd.data), free(dx.data);
        free(dweight.data), free(dbias.data), free(xs), free(w), free(b), free(ds);
    }
    printf("finite differences\n");
    ops_report(&dx_worst, 2e-6, "dx");
    ops_report(&dw_worst, 2e-6, "dweight");
    ops_report(&db_worst, 2e-6, "dbias");
}

static void test_extremes(void) {
    enum { N = 6, C = 300 };
    Buffer x = ops_new(N * C, DTYPE_F32), weight = ops_random(C, DTYPE_F32, 31, 1, 0.5), out = ops_new(N * C, DTYPE_F32),
           mean = ops_new(N, DTYPE_F32), rstd = ops_new(N, DTYPE_F32), dout = ops_random(N * C, DTYPE_F32, 32, 0, 1),
           dx = ops_new(N * C, DTYPE_F32), dweight = ops_new(C, DTYPE_F32);
    float *row = x.data;
    for (int c = 0; c < C; c++) {
        row[c] = 0, row[C + c] = 0.1f, row[2 * C + c] = 20000, row[3 * C + c] = c % 2 ? 20000 : -20000;
        row[4 * C + c] = 1e4f + (float)c * 0.01f, row[5 * C + c] = 1;
    }
    row[5 * C + 17] = NAN;
    for (int k = 0; k < 2; k++) {
        cpu_norm_forward(NULL, out, mean, rstd, (Buffer){0}, x, (Buffer){0}, weight, (Buffer){0}, NULL, kinds[k], 1e-6, N, C);
        cpu_norm_backward(NULL, dx, false, dweight, (Buffer){0}, false, dout, x, mean, rstd, weight, kinds[k], N, C);
        bool finite = true, hidden = false;
        for (int i = 0; i < 5 * C; i++) finite = finite && isfinite(((float *)out.data)[i]) && isfinite(((float *)dx.data)[i]);
        for (int i = 5 * C; i < 6 * C; i++) hidden = hidden || !isnan(((float *)out.data)[i]) || !isnan(((float *)dx.data)[i]);
        check(finite, "kind %d: constant, large and offset rows stay finite", kinds[k]);
        check(!hidden, "kind %d: a NaN reaches its whole row", kinds[k]);
        check(((float *)rstd.data)[0] == 1000.0f, "kind %d: rstd of a zero row is 1/sqrt(eps), got %g", kinds[k], (double)((float *)rstd.data)[0]);
    }
    // A large offset: values 1e4 + 0.01 c lie 0.001 apart in fp32, the variance of what is stored must still be right.
    double *xs = ops_doubles(x, N * C), want[N * C], want_mean[N], want_rstd[N], ones[C];
    for (int c = 0; c < C; c++) ones[c] = 1;
    cpu_norm_forward(NULL, out, mean, rstd, (Buffer){0}, x, (Buffer){0}, weight, (Buffer){0}, NULL, NORM_LAYERNORM, 1e-6, N, C);
    reference_forward(want, want_mean, want_rstd, xs, ones, NULL, NORM_LAYERNORM, 1e-6, N, C);
    printf("extremes\n");
    check_error(fabs((double)((float *)rstd.data)[4] / want_rstd[4] - 1), 2e-5, "rstd of a row with a large offset");
    free(x.data), free(weight.data), free(out.data), free(mean.data), free(rstd.data), free(dout.data), free(dx.data), free(dweight.data), free(xs);

    const int64_t wide = 262144;
    ForwardWorst worst = {0};
    forward_case(&worst, NORM_LAYERNORM, DTYPE_F32, true, true, 0.5, 0.5, 1, wide);
    ops_report(&worst.out, 2e-6, "out at C = 262144");
}

static void test_threads(Dtype dtype) {
    const int64_t N = 70, C = 1031;
    Buffer in = ops_random(N * C, dtype, 41, 0, 1), branch = ops_random(N * C, dtype, 42, 0, 1), weight = ops_random(C, dtype, 43, 1, 0.5),
           dout = ops_random(N * C, dtype, 44, 0, 1);
    const Dropout dropout = {&(uint64_t){12}, 4, rng_dropout_threshold(0.3), ops_counting(N, 0)};
    Buffer first[5] = {{0}};
    const int most = omp_get_max_threads();
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        Buffer out = ops_new(N * C, dtype), sum = ops_new(N * C, dtype), mean = ops_new(N, DTYPE_F32), rstd = ops_new(N, DTYPE_F32),
               dx = ops_new(N * C, dtype), dweight = ops_new(C, DTYPE_F32), dbias = ops_new(C, DTYPE_F32);
        cpu_norm_forward(NULL, out, mean, rstd, sum, in, branch, weight, (Buffer){0}, &dropout, NORM_LAYERNORM, 1e-5, N, C);
        cpu_norm_backward(NULL, dx, false, dweight, dbias, false, dout, sum, mean, rstd, weight, NORM_LAYERNORM, N, C);
        Buffer now[5] = {out, sum, dx, dweight, dbias};
        for (int i = 0; i < 5; i++) {
            if (threads == 1) first[i] = now[i];
            if (threads > 1) {
                check(ops_same_bits(first[i], now[i], i < 3 ? N * C : C), "%s: output %d with %d threads differs from one", dtype_names[dtype], i,
                      threads);
                free(now[i].data);
            }
        }
        free(mean.data), free(rstd.data);
    }
    omp_set_num_threads(most);
    for (int i = 0; i < 5; i++) free(first[i].data);
    free(in.data), free(branch.data), free(weight.data), free(dout.data), free(dropout.token_index.data);
}

// residual_forward is what norm_forward writes to `sum`, bit by bit, apart and in place.
static void test_residual(void) {
    static const int64_t sizes[][2] = {{1, 1}, {7, 131}, {5, 768}, {3, 1027}, {2, 5000}, {0, 16}};
    const int most = omp_get_max_threads();
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (int variant = 0; variant < 4; variant++) {
            const int64_t N = sizes[s][0], C = sizes[s][1];
            const Dtype dtype = dtypes[variant & 1];
            const double drop = variant & 2 ? 0.3 : 0;
            const Dropout dropout = {&(uint64_t){rng_dropout_key(3, 4)}, 6, rng_dropout_threshold(drop), ops_counting(N, 77)};
            Buffer in = ops_random(N * C, dtype, 51, 0, 1), branch = ops_random(N * C, dtype, 52, 0, 1), weight = ops_random(C, dtype, 53, 1, 0.5),
                   out = ops_new(N * C, dtype), sum = ops_new(N * C, dtype), rstd = ops_new(N, DTYPE_F32),
                   alone = ops_random(N * C, dtype, 54, 9, 1);
            cpu_norm_forward(NULL, out, (Buffer){0}, rstd, sum, in, branch, weight, (Buffer){0}, &dropout, NORM_RMSNORM, 1e-5, N, C);
            omp_set_num_threads(variant + 1);
            cpu_residual_forward(NULL, alone, in, branch, drop > 0 ? &dropout : NULL, N, C);
            check(ops_same_bits(alone, sum, N * C), "residual (%lld, %lld) %s, dropout %g: the norm's sum", (long long)N, (long long)C,
                  dtype_names[dtype], drop);
            cpu_residual_forward(NULL, in, in, branch, &dropout, N, C);
            check(ops_same_bits(in, sum, N * C), "residual (%lld, %lld) %s, dropout %g, in place", (long long)N, (long long)C, dtype_names[dtype],
                  drop);
            omp_set_num_threads(most);
            free(in.data), free(branch.data), free(weight.data), free(out.data), free(sum.data), free(rstd.data), free(alone.data);
            free(dropout.token_index.data);
        }
    }
}

// The mask as forward applies it: 0 + dropout(1).
static Buffer forward_mask(const Dropout *dropout, int64_t N, int64_t C, double *frequency) {
    Buffer zeros = ops_new(N * C, DTYPE_F32), ones = ops_random(N * C, DTYPE_F32, 0, 1, 0), weight = ops_random(C, DTYPE_F32, 0, 1, 0),
           out = ops_new(N * C, DTYPE_F32), mask = ops_new(N * C, DTYPE_F32), rstd = ops_new(N, DTYPE_F32);
    cpu_norm_forward(NULL, out, (Buffer){0}, rstd, mask, zeros, ones, weight, (Buffer){0}, dropout, NORM_RMSNORM, 1e-5, N, C);
    *frequency = 0;
    for (int64_t i = 0; i < N * C; i++) *frequency += ((float *)mask.data)[i] != 0 ? 1.0 / (double)(N * C) : 0;
    free(zeros.data), free(ones.data), free(weight.data), free(out.data), free(rstd.data);
    return mask;
}

static void test_dropout(void) {
    const int64_t N = 64, C = 1300; // 83200 draws: deviation of the frequency 0.0014
    const uint64_t key = rng_dropout_key(5, 9), other = rng_dropout_key(5, 10);
    Dropout dropout = {&key, 7, rng_dropout_threshold(0.2), ops_counting(N, 1000)};
    double frequency, other_frequency;
    Buffer mask = forward_mask(&dropout, N, C, &frequency);
    printf("dropout\n");
    check_error(fabs(frequency - 0.8), 0.006, "frequency of kept elements at p = 0.2");
    bool defined = true;
    for (int64_t i = 0; i < N * C; i++) defined = defined && ((float *)mask.data)[i] == (float)ops_mask(&dropout, i / C, i % C);
    check(defined, "the mask is rng.h's");

    Buffer ones = ops_random(N * C, DTYPE_F32, 0, 1, 0), back = ops_new(N * C, DTYPE_F32);
    cpu_dropout_backward(NULL, back, ones, &dropout, N, C);
    check(ops_same_bits(mask, back, N * C), "backward's mask is forward's");
    cpu_dropout_backward(NULL, ones, ones, &dropout, N, C);
    check(ops_same_bits(mask, ones, N * C), "in place");
    Buffer narrow = ops_random(N * C, DTYPE_BF16, 0, 2, 0);
    cpu_dropout_backward(NULL, narrow, narrow, &dropout, N, C);
    check(ops_at(narrow, 0) == ops_round(DTYPE_BF16, 2 * (double)((float *)mask.data)[0]) &&
              ops_at(narrow, N * C - 1) == ops_round(DTYPE_BF16, 2 * (double)((float *)mask.data)[N * C - 1]),
          "bf16");
    cpu_dropout_backward(NULL, ones, back, NULL, N, C);
    check(ops_same_bits(ones, back, N * C), "no dropout is a copy");

    // The second half of the tokens as a micro-batch of its own.
    Dropout half = dropout;
    half.token_index = buffer_at(dropout.token_index, N / 2);
    Buffer part = forward_mask(&half, N / 2, C, &other_frequency);
    check(ops_same_bits(part, buffer_at(mask, N / 2 * C), N / 2 * C), "a token keeps its mask when the batch is split");
    free(part.data);

    // Another site, key or token is another, independent mask: both kept with probability 0.64.
    for (int change = 0; change < 3; change++) {
        Dropout changed = dropout;
        if (change == 0) changed.site++;
        if (change == 1) changed.key = &other;
        if (change == 2) changed.token_index = ops_counting(N, 1001);
        Buffer other = forward_mask(&changed, N, C, &other_frequency);
        double both = 0;
        for (int64_t i = 0; i < N * C; i++) both += ((float *)mask.data)[i] != 0 && ((float *)other.data)[i] != 0 ? 1.0 / (double)(N * C) : 0;
        static const char *const names[] = {"kept by both of two sites", "kept by both of two steps", "kept by both of two tokens"};
        check_error(fabs(both - 0.64), 0.008, names[change]);
        if (change == 2) free(changed.token_index.data);
        free(other.data);
    }
    free(mask.data), free(ones.data), free(back.data), free(narrow.data), free(dropout.token_index.data);
}

int main(void) {
    printf("norm and dropout\n");
    test_forward();
    test_backward();
    test_differences();
    test_extremes();
    test_threads(DTYPE_F32);
    test_threads(DTYPE_BF16);
    test_residual();
    test_dropout();
    return test_end();
}
