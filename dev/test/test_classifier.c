// test_classifier.c: cross-entropy and the gradient of logits against double precision and finite differences; masked
// tokens, logits of any size, NaN, all storage types in place and apart; the vocabulary divided over ranks; the sum of losses.
#include "dev/test/ops.h"        // ops_random, ops_compare
#include "llmc/cpu/classifier.h" // cpu_cross_entropy*, cpu_loss_sum
#include <math.h>                // exp, log

static double reference_loss(const double *x, int64_t V, int64_t target) {
    double highest = x[0], sum = 0;
    for (int64_t v = 1; v < V; v++) highest = x[v] > highest ? x[v] : highest;
    for (int64_t v = 0; v < V; v++) sum += exp(x[v] - highest);
    return log(sum) + highest - x[target];
}

typedef struct {
    OpsWorst losses, dlogits;
    bool same_without_gradient;
} Worst;

enum { FORM_IN_PLACE, FORM_APART, FORM_OTHER_TYPE, FORMS };

// Logits of row n: scale * uniform + slope * column.
static void one_case(Worst *worst, Dtype dtype, int form, double scale, double slope, bool masked, int64_t N, int64_t V) {
    Buffer logits = ops_new(N * V, dtype), targets = ops_random_ids(N, V, 2), losses = ops_new(N, DTYPE_F32), only = ops_new(N, DTYPE_F32);
    for (int64_t i = 0; i < N * V; i++) ops_set(logits, i, scale * test_uniform(1, (uint64_t)i) + slope * (double)(i % V));
    if (masked) {
        for (int64_t n = 0; n < N; n += 2) ((int32_t *)targets.data)[n] = -1;
    }
    const double dloss = 0.03;
    double *x = ops_doubles(logits, N * V), *want = base_new((size_t)N, 8), *want_d = base_new((size_t)(N * V), 8);
    for (int64_t n = 0; n < N; n++) {
        const int64_t target = ((int32_t *)targets.data)[n];
        if (target < 0) continue;
        want[n] = reference_loss(x + n * V, V, target);
        const double lse = want[n] + x[n * V + target];
        for (int64_t v = 0; v < V; v++) want_d[n * V + v] = (exp(x[n * V + v] - lse) - (v == target)) * dloss;
    }
    const Dtype other = dtype == DTYPE_F32 ? DTYPE_BF16 : DTYPE_F32;
    Buffer dlogits = form == FORM_IN_PLACE ? logits : ops_random(N * V, form == FORM_APART ? dtype : other, 3, 9, 1);
    cpu_cross_entropy(NULL, only, (Buffer){0}, logits, targets, &dloss, N, V);
    cpu_cross_entropy(NULL, losses, dlogits, logits, targets, &dloss, N, V);
    if (!ops_same_bits(only, losses, N)) worst->same_without_gradient = false;
    ops_compare(&worst->losses, losses, want, N);
    ops_compare(&worst->dlogits, dlogits, want_d, N * V);
    if (form != FORM_IN_PLACE) free(dlogits.data);
    free(logits.data), free(targets.data), free(losses.data), free(only.data), free(x), free(want), free(want_d);
}

static void test_reference(void) {
    static const int64_t sizes[][2] = {{1, 1}, {7, 2}, {7, 131}, {8, 257}, {1, 2500}, {0, 131}};
    Worst worst = {.same_without_gradient = true};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (int form = 0; form < FORMS; form++) {
            for (int variant = 0; variant < 4; variant++) {
                if (sizes[s][0] == 1 && (variant & 2)) continue;
                one_case(&worst, variant & 1 ? DTYPE_BF16 : DTYPE_F32, form, 3, 0, variant & 2, sizes[s][0], sizes[s][1]);
            }
        }
    }
    printf("cross-entropy\n");
    ops_report(&worst.losses, 1e-6, "losses");
    ops_report(&worst.dlogits, 1e-6, "dlogits");
    check(worst.same_without_gradient, "losses without dlogits have the same bits");

    Worst large = {.same_without_gradient = true};
    for (int form = 0; form < FORMS; form++) {
        one_case(&large, DTYPE_F32, form, 20000, 0, false, 8, 257);
        one_case(&large, DTYPE_F32, form, 1, 0.1, false, 1, 2500);      // rises: the running offset moves by 100 a block
        one_case(&large, DTYPE_F32, form, 1, -0.1, false, 1, 2500);     // falls
        one_case(&large, DTYPE_F32, form, 0.01, 0.035, false, 1, 2500); // rises, but less than the offset has room for
    }
    ops_report(&large.losses, 1e-6, "losses of logits up to 20000, rising, falling");
    ops_report(&large.dlogits, 2e-6, "dlogits of logits up to 20000, rising, falling");
    check(large.same_without_gradient, "losses without dlogits have the same bits");
}

static void test_differences(void) {
    enum { N = 3, V = 40 };
    Buffer logits = ops_random(N * V, DTYPE_F32, 5, 0, 2), dlogits = ops_new(N * V, DTYPE_F32), losses = ops_new(N, DTYPE_F32),
           targets = ops_random_ids(N, V, 6);
    double *x = ops_doubles(logits, N * V), want[N * V];
    for (int n = 0; n < N; n++) {
        const int target = ((int32_t *)targets.data)[n];
        for (int v = 0; v < V; v++) {
            double *at = &x[n * V + v], old = *at, h = 1e-5;
            *at = old + h;
            const double up = reference_loss(x + n * V, V, target);
            *at = old - h;
            const double down = reference_loss(x + n * V, V, target);
            *at = old;
            want[n * V + v] = 2.5 * (up - down) / (2 * h);
        }
    }
    cpu_cross_entropy(NULL, losses, dlogits, logits, targets, &(double){2.5}, N, V);
    OpsWorst worst = {0};
    ops_compare(&worst, dlogits, want, N * V);
    ops_report(&worst, 1e-6, "dlogits, finite differences");
    free(logits.data), free(dlogits.data), free(losses.data), free(targets.data), free(x);
}

static void test_not_finite(void) {
    enum { N = 5, V = 1500 };
    Buffer logits = ops_random(N * V, DTYPE_F32, 7, 0, 1), losses = ops_new(N, DTYPE_F32), targets = ops_random_ids(N, V, 8),
           dlogits = ops_new(N * V, DTYPE_F32);
    float *x = logits.data;
    const uint32_t odd_nan = 0x7fc00001; // a NaN whose payload reaches the low bits
    memcpy(&x[0 * V + 3], &odd_nan, 4);
    x[1 * V + V - 1] = NAN;
    x[2 * V + 1200] = INFINITY;
    x[3 * V + 5] = NAN, ((int32_t *)targets.data)[3] = -1; // masked: whatever it holds
    for (int gradient = 0; gradient < 2; gradient++) {
        cpu_cross_entropy(NULL, losses, gradient ? dlogits : (Buffer){0}, logits, targets, &(double){1}, N, V);
        const float *loss = losses.data;
        check(isnan(loss[0]) && isnan(loss[1]), "a NaN logit gives a NaN loss (%g, %g)", (double)loss[0], (double)loss[1]);
        check(!isfinite(loss[2]), "an infinite logit gives no finite loss (%g)", (double)loss[2]);
        check(loss[3] == 0 && isfinite(loss[4]), "masked and sound rows are not harmed");
    }
    bool zero = true;
    for (int v = 0; v < V; v++) zero = zero && ((float *)dlogits.data)[3 * V + v] == 0;
    check(zero, "dlogits of a masked token are zero");
    free(logits.data), free(losses.data), free(targets.data), free(dlogits.data);
}

static void test_threads(void) {
    const int64_t N = 33, V = 1300;
    Buffer logits = ops_random(N * V, DTYPE_F32, 9, 0, 3), targets = ops_random_ids(N, V, 10), first[3] = {{0}};
    const int most = omp_get_max_threads();
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        Buffer now[3] = {ops_new(N, DTYPE_F32), ops_new(N * V, DTYPE_F32), ops_new(N * V, DTYPE_BF16)};
        cpu_cross_entropy(NULL, now[0], now[1], logits, targets, &(double){0.1}, N, V);
        cpu_cross_entropy(NULL, now[0], now[2], logits, targets, &(double){0.1}, N, V);
        for (int i = 0; i < 3; i++) {
            if (threads == 1) first[i] = now[i];
            if (threads == 1) continue;
            check(ops_same_bits(first[i], now[i], i == 0 ? N : N * V), "output %d with %d threads differs from one", i, threads);
            free(now[i].data);
        }
    }
    omp_set_num_threads(most);
    for (int i = 0; i < 3; i++) free(first[i].data);
    free(logits.data), free(targets.data);
}

// ----------------------------------------------------------------------------
// Rows that are apart: the same bits as rows side by side, whatever lies between them, which stays.

// The rows of dense (N, V), `row` elements apart, NaN between them.
static Buffer rows_apart(Buffer dense, int64_t N, int64_t V, int64_t row) {
    Buffer apart = ops_new(N * row, dense.dtype);
    for (int64_t i = 0; i < N * row; i++) ops_set(apart, i, i % row < V ? ops_at(dense, i / row * V + i % row) : (double)NAN);
    apart.row = row;
    return apart;
}

// Elements that differ from dense (N, V), and elements between rows that were written.
static int64_t rows_differ(Buffer apart, Buffer dense, int64_t N, int64_t V) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < N * apart.row; i++) {
        const int64_t column = i % apart.row;
        const double got = ops_at(apart, i);
        wrong += column < V ? !(got == ops_at(dense, i / apart.row * V + column)) : !isnan(got);
    }
    return wrong;
}

static void test_rows(void) {
    static const int64_t sizes[][3] = {{7, 131, 192}, {4, 2501, 2560}, {3, 40, 41}};
    const double dloss = 0.1;
    for (int variant = 0; variant < 3 * 2 * FORMS; variant++) {
        const int64_t *size = sizes[variant % 3], N = size[0], V = size[1], row = size[2];
        const int form = variant / 3 % FORMS;
        const Dtype dtype = variant / 3 / FORMS ? DTYPE_BF16 : DTYPE_F32, other = dtype == DTYPE_F32 ? DTYPE_BF16 : DTYPE_F32;
        Buffer logits = ops_random(N * V, dtype, 21, 0, 4), targets = ops_random_ids(N, V, 22), apart = rows_apart(logits, N, V, row);
        ((int32_t *)targets.data)[N - 2] = -1;
        Buffer d = form == FORM_IN_PLACE ? logits : ops_random(N * V, form == FORM_APART ? dtype : other, 23, 9, 1);
        Buffer d_apart = form == FORM_IN_PLACE ? apart : rows_apart(d, N, V, row + 3);
        Buffer losses[2] = {ops_new(N, DTYPE_F32), ops_new(N, DTYPE_F32)}, stats[2] = {ops_new(N * 3, DTYPE_F32), ops_new(N * 3, DTYPE_F32)};
        const Buffer kept = ops_copy(logits, N * V);
        cpu_cross_entropy_local(NULL, stats[0], logits, targets, 0, N, V);
        cpu_cross_entropy_local(NULL, stats[1], apart, targets, 0, N, V);
        check(ops_same_bits(stats[0], stats[1], N * 3), "stats of rows %lld apart", (long long)row);
        cpu_cross_entropy(NULL, losses[0], d, logits, targets, &dloss, N, V);
        cpu_cross_entropy(NULL, losses[1], d_apart, apart, targets, &dloss, N, V);
        check(ops_same_bits(losses[0], losses[1], N), "losses of rows %lld apart", (long long)row);
        int64_t wrong = rows_differ(d_apart, d, N, V);
        check(wrong == 0, "dlogits of rows %lld apart: %lld differ", (long long)row, (long long)wrong);
        if (form != FORM_IN_PLACE) {
            cpu_cross_entropy_merge(NULL, losses[0], d, kept, stats[0], 1, targets, &dloss, 0, N, V);
            cpu_cross_entropy_merge(NULL, losses[1], d_apart, apart, stats[0], 1, targets, &dloss, 0, N, V);
            wrong = rows_differ(d_apart, d, N, V);
            check(wrong == 0 && ops_same_bits(losses[0], losses[1], N), "merged, rows %lld apart: %lld differ", (long long)row, (long long)wrong);
            free(d.data), free(d_apart.data);
        }
        free(logits.data), free(targets.data), free(apart.data), free(kept.data);
        for (int i = 0; i < 2; i++) free(losses[i].data), free(stats[i].data);
    }
    printf("rows apart: the bits of rows side by side\n");
}

// ----------------------------------------------------------------------------
// The vocabulary divided over R ranks: columns V*r/R .. V*(r+1)/R-1 are rank r's.

enum { MOST_RANKS = 4 };

// Runs both parts on every rank. `whole` (N, V) is the undivided logits; dlogits (N, V), optional, are put together from the ranks'.
// losses[r] are rank r's; stats (R, N, 3) is left to be looked at. form: as above; out of place the logits must keep their bits.
static void run_divided(Buffer *losses, Buffer dlogits, Buffer stats, Buffer whole, Buffer targets, int form, double dloss, int64_t R, int64_t N,
                        int64_t V) {
    Buffer logits[MOST_RANKS], kept[MOST_RANKS];
    const size_t bytes = dtype_bytes(whole.dtype);
    for (int64_t r = 0; r < R; r++) {
        const int64_t begin = V * r / R, count = V * (r + 1) / R - begin;
        logits[r] = ops_new(N * count, whole.dtype);
        for (int64_t n = 0; n < N; n++) {
            memcpy(buffer_at(logits[r], n * count).data, buffer_at(whole, n * V + begin).data, (size_t)count * bytes);
        }
        kept[r] = ops_copy(logits[r], N * count);
        Buffer own = ops_random(N * 3, DTYPE_F32, 4, 99, 1);
        cpu_cross_entropy_local(NULL, own, logits[r], targets, begin, N, count);
        check(ops_same_bits(logits[r], kept[r], N * count), "the local part leaves the logits alone");
        memcpy(buffer_at(stats, r * N * 3).data, own.data, (size_t)(N * 3) * sizeof(float)); // the gather
        free(own.data);
    }
    for (int64_t r = 0; r < R; r++) {
        const int64_t begin = V * r / R, count = V * (r + 1) / R - begin;
        const Dtype other = whole.dtype == DTYPE_F32 ? DTYPE_BF16 : DTYPE_F32;
        Buffer d = {0};
        if (dlogits.data != NULL && form == FORM_IN_PLACE) d = logits[r];
        if (dlogits.data != NULL && form != FORM_IN_PLACE) d = ops_random(N * count, form == FORM_APART ? whole.dtype : other, 3, 9, 1);
        cpu_cross_entropy_merge(NULL, losses[r], d, logits[r], stats, R, targets, &dloss, begin, N, count);
        for (int64_t n = 0; n < N && d.data != NULL; n++) {
            memcpy(buffer_at(dlogits, n * V + begin).data, buffer_at(d, n * count).data, (size_t)count * dtype_bytes(d.dtype));
        }
        if (d.data != logits[r].data) {
            check(ops_same_bits(logits[r], kept[r], N * count), "merging apart leaves the logits alone");
            free(d.data);
        }
        free(logits[r].data), free(kept[r].data);
    }
}

typedef struct {
    OpsWorst losses, dlogits, undivided; // against double precision; against cross_entropy (losses and dlogits)
    double largest, sum, target;         // stats: relative errors
    int64_t disagreements, without;      // ranks or runs whose losses have other bits
} DividedWorst;

static void stats_case(DividedWorst *worst, Buffer stats, const double *x, const int32_t *targets, int64_t R, int64_t N, int64_t V) {
    for (int64_t r = 0; r < R; r++) {
        const int64_t begin = V * r / R, end = V * (r + 1) / R;
        for (int64_t n = 0; n < N; n++) {
            double want[3] = {x[n * V + begin], 0, 0};
            for (int64_t v = begin; v < end; v++) want[0] = x[n * V + v] > want[0] ? x[n * V + v] : want[0];
            for (int64_t v = begin; v < end; v++) want[1] += exp(x[n * V + v] - want[0]);
            if (targets[n] >= begin && targets[n] < end) want[2] = x[n * V + targets[n]];
            const Buffer got = buffer_at(stats, (r * N + n) * 3);
            const double counts = targets[n] < 0 ? 0 : 1;
            ops_worse(&worst->largest, fabs(ops_at(got, 0) - counts * want[0]));
            ops_worse(&worst->sum, fabs(ops_at(got, 1) - counts * want[1]) / want[1]);
            ops_worse(&worst->target, fabs(ops_at(got, 2) - counts * want[2]));
        }
    }
}

// Logits as in one_case. Targets stay below `limit`, so that with a small one the last shares have none.
static void divided_case(DividedWorst *worst, Dtype dtype, int form, double scale, double slope, bool masked, int64_t R, int64_t N, int64_t V,
                         int64_t limit) {
    const Dtype other = dtype == DTYPE_F32 ? DTYPE_BF16 : DTYPE_F32, d_dtype = form == FORM_OTHER_TYPE ? other : dtype;
    Buffer logits = ops_new(N * V, dtype), targets = ops_random_ids(N, limit, 2), dlogits = ops_new(N * V, d_dtype),
           stats = ops_new(R * N * 3, DTYPE_F32), whole_losses = ops_new(N, DTYPE_F32), whole = ops_new(N * V, d_dtype), losses[MOST_RANKS],
           only[MOST_RANKS];
    for (int64_t i = 0; i < N * V; i++) ops_set(logits, i, scale * test_uniform(1, (uint64_t)i) + slope * (double)(i % V));
    for (int64_t n = 0; n < N && masked; n += 2) ((int32_t *)targets.data)[n] = -1;
    for (int64_t r = 0; r < R; r++) losses[r] = ops_new(N, DTYPE_F32), only[r] = ops_new(N, DTYPE_F32);
    const double dloss = 0.03;
    double *x = ops_doubles(logits, N * V), *want = base_new((size_t)N, 8), *want_d = base_new((size_t)(N * V), 8);
    for (int64_t n = 0; n < N; n++) {
        const int64_t target = ((int32_t *)targets.data)[n];
        if (target < 0) continue;
        want[n] = reference_loss(x + n * V, V, target);
        const double lse = want[n] + x[n * V + target];
        for (int64_t v = 0; v < V; v++) want_d[n * V + v] = (exp(x[n * V + v] - lse) - (v == target)) * dloss;
    }
    run_divided(only, (Buffer){0}, stats, logits, targets, form, dloss, R, N, V);
    run_divided(losses, dlogits, stats, logits, targets, form, dloss, R, N, V);
    stats_case(worst, stats, x, targets.data, R, N, V);
    for (int64_t r = 0; r < R; r++) {
        worst->disagreements += !ops_same_bits(losses[0], losses[r], N);
        worst->without += !ops_same_bits(losses[r], only[r], N);
    }
    ops_compare(&worst->losses, losses[0], want, N);
    ops_compare(&worst->dlogits, dlogits, want_d, N * V);
    cpu_cross_entropy(NULL, whole_losses, whole, logits, targets, &dloss, N, V);
    double *whole_losses_d = ops_doubles(whole_losses, N), *whole_d = ops_doubles(whole, N * V);
    ops_compare(&worst->undivided, losses[0], whole_losses_d, N);
    if (d_dtype == DTYPE_F32) ops_compare(&worst->undivided, dlogits, whole_d, N * V);
    for (int64_t r = 0; r < R; r++) free(losses[r].data), free(only[r].data);
    free(logits.data), free(targets.data), free(dlogits.data), free(stats.data), free(whole_losses.data), free(whole.data), free(x), free(want);
    free(want_d), free(whole_losses_d), free(whole_d);
}

static void report_divided(const DividedWorst *worst, double bound, double sum_bound) {
    ops_report(&worst->losses, 1e-6, "losses");
    ops_report(&worst->dlogits, bound, "dlogits");
    ops_report(&worst->undivided, bound, "losses and dlogits, from cross_entropy's");
    check_error(worst->largest, 0, "stats: largest logit");
    check_error(worst->sum, sum_bound, "stats: sum of exponentials");
    check_error(worst->target, 0, "stats: logit of the target");
    check(worst->disagreements == 0, "every rank has the same losses (%lld differ)", (long long)worst->disagreements);
    check(worst->without == 0, "losses without dlogits have the same bits (%lld differ)", (long long)worst->without);
}

static void test_divided(void) {
    static const int64_t sizes[][2] = {{8, 7}, {7, 131}, {8, 257}, {2, 4501}, {0, 131}};
    DividedWorst worst = {0};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const int64_t N = sizes[s][0], V = sizes[s][1];
        for (int64_t R = 1; R <= MOST_RANKS; R++) {
            for (int form = 0; form < FORMS; form++) {
                for (int variant = 0; variant < 8; variant++) {
                    divided_case(&worst, variant & 1 ? DTYPE_BF16 : DTYPE_F32, form, 3, 0, variant & 2, R, N, V, variant & 4 ? V / 4 : V);
                }
            }
        }
    }
    printf("cross-entropy of a divided vocabulary, 1 to %d ranks\n", MOST_RANKS);
    report_divided(&worst, 1e-6, 1e-6);

    // Shares whose largest logits lie far apart, so that only the common maximum keeps the exponentials finite.
    DividedWorst large = {0};
    for (int64_t R = 1; R <= MOST_RANKS; R++) {
        for (int form = 0; form < FORMS; form++) {
            divided_case(&large, DTYPE_F32, form, 20000, 0, false, R, 8, 257, 257);
            divided_case(&large, DTYPE_F32, form, 1, 0.1, false, R, 2, 2501, 2501);
            divided_case(&large, DTYPE_F32, form, 1, -0.1, false, R, 2, 2501, 600);
            divided_case(&large, DTYPE_F32, form, 0.01, 0.01, false, R, 2, 4501, 4501); // within the room of the running offset
        }
    }
    printf("logits up to 20000, rising, falling over the ranks\n");
    report_divided(&large, 2e-6, 5e-6);
}

// A logit that is NaN or infinite on one rank reaches the losses of all and no other row.
static void test_divided_not_finite(void) {
    enum { N = 5, V = 3001, R = 3 };
    Buffer logits = ops_random(N * V, DTYPE_F32, 7, 0, 1), targets = ops_random_ids(N, V, 8), dlogits = ops_new(N * V, DTYPE_F32),
           stats = ops_new(R * N * 3, DTYPE_F32), losses[R];
    float *x = logits.data;
    x[0 * V + 3] = NAN;
    x[1 * V + V - 1] = NAN;
    x[2 * V + 1200] = INFINITY;
    x[3 * V + 5] = NAN, ((int32_t *)targets.data)[3] = -1; // masked: whatever it holds
    for (int r = 0; r < R; r++) losses[r] = ops_new(N, DTYPE_F32);
    run_divided(losses, dlogits, stats, logits, targets, FORM_APART, 1, R, N, V);
    for (int r = 0; r < R; r++) {
        const float *loss = losses[r].data;
        check(isnan(loss[0]) && isnan(loss[1]), "rank %d: a NaN logit gives a NaN loss (%g, %g)", r, (double)loss[0], (double)loss[1]);
        check(!isfinite(loss[2]), "rank %d: an infinite logit gives no finite loss (%g)", r, (double)loss[2]);
        check(loss[3] == 0 && isfinite(loss[4]), "rank %d: masked and sound rows are not harmed", r);
        free(losses[r].data);
    }
    bool zero = true, spoilt = true;
    for (int v = 0; v < V; v++) {
        zero = zero && ((float *)dlogits.data)[3 * V + v] == 0;
        spoilt = spoilt && isnan(((float *)dlogits.data)[0 * V + v]) && isnan(((float *)dlogits.data)[1 * V + v]);
    }
    check(zero, "dlogits of a masked token are zero on every rank");
    check(spoilt, "dlogits of a token with a NaN logit are NaN on every rank");
    free(logits.data), free(targets.data), free(dlogits.data), free(stats.data);
}

static void test_divided_threads(void) {
    const int64_t N = 33, V = 1301, R = 3;
    Buffer logits = ops_random(N * V, DTYPE_F32, 9, 0, 3), targets = ops_random_ids(N, V, 10), first = {0}, first_loss = {0};
    const int most = omp_get_max_threads();
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        Buffer dlogits = ops_new(N * V, DTYPE_F32), stats = ops_new(R * N * 3, DTYPE_F32), losses[MOST_RANKS];
        for (int r = 0; r < R; r++) losses[r] = ops_new(N, DTYPE_F32);
        run_divided(losses, dlogits, stats, logits, targets, FORM_APART, 0.1, R, N, V);
        if (threads == 1) first = ops_copy(dlogits, N * V), first_loss = ops_copy(losses[0], N);
        check(ops_same_bits(first, dlogits, N * V) && ops_same_bits(first_loss, losses[0], N), "divided: %d threads differ from one", threads);
        for (int r = 0; r < R; r++) free(losses[r].data);
        free(dlogits.data), free(stats.data);
    }
    omp_set_num_threads(most);
    free(first.data), free(first_loss.data), free(logits.data), free(targets.data);
}

static void test_loss_sum(void) {
    const int64_t N = 1003;
    Buffer losses = ops_random(N, DTYPE_F32, 11, 5, 5);
    StepState state = {.loss_sum = 1.25};
    double want = 1.25;
    for (int64_t n = 0; n < N; n++) want += 0.5 * ops_at(losses, n);
    cpu_loss_sum(NULL, &state, losses, &(double){0.5}, N);
    check_error(fabs(state.loss_sum / want - 1), 1e-14, "loss_sum");
    cpu_loss_sum(NULL, &state, losses, &(double){0.5}, 0);
    check_error(fabs(state.loss_sum / want - 1), 1e-14, "loss_sum of no tokens adds nothing");
    for (int64_t n = 0; n < N; n++) want += ops_at(losses, n);
    cpu_loss_sum(NULL, &state, losses, NULL, N);
    check_error(fabs(state.loss_sum / want - 1), 1e-14, "loss_sum without a scale");
    free(losses.data);
}

int main(void) {
    test_reference();
    test_differences();
    test_not_finite();
    test_threads();
    test_rows();
    test_divided();
    test_divided_not_finite();
    test_divided_threads();
    test_loss_sum();
    return test_end();
}
