// test_attention.c: attention of the CPU device against a naive one in double precision, whose gradient is itself checked by
// finite differences; document isolation, causality, the same bits for every thread count, extreme logits, empty documents.
#include "dev/test/test.h"      // check, check_error, test_end, test_uniform
#include "llmc/base.h"          // base_new
#include "llmc/cpu/attention.h" // cpu_attention_forward, cpu_attention_backward
#include <omp.h>                // omp_set_num_threads

enum { MOST_DOCUMENTS = 64 };

typedef struct {
    int64_t documents, N, NH, NKV, HS, QKV, OUT;
    int32_t cu[MOST_DOCUMENTS + 1];
    Packing packing;
    AttentionShape shape;
    Dtype dtype;
    Buffer qkv, dout, out, lse, dqkv, delta; // of the device
} Problem;

typedef struct {
    double *qkv, *dout, *out, *lse, *dqkv; // as in Problem
} Reference;

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

static void fill_nan(Buffer buffer, int64_t n) {
    for (int64_t i = 0; i < n; i++) set_value(buffer, i, NAN);
}

// lengths ends with -1. p must stay where it is: its packing points into it.
static void problem_create(Problem *p, const int *lengths, int64_t NH, int64_t NKV, int64_t HS, Dtype dtype) {
    *p = (Problem){.NH = NH, .NKV = NKV, .HS = HS, .QKV = (NH + 2 * NKV) * HS, .OUT = NH * HS, .shape = {NH, NKV, HS}, .dtype = dtype};
    int64_t longest = 0;
    for (; lengths[p->documents] >= 0; p->documents++) {
        p->N += lengths[p->documents];
        p->cu[p->documents + 1] = (int32_t)p->N;
        longest = max_i64(longest, lengths[p->documents]);
    }
    p->packing = (Packing){.cu_seqlens = buffer_of(p->cu, DTYPE_I32), .documents = p->documents, .tokens = p->N, .max_length = longest};
    p->qkv = new_buffer(p->N * p->QKV, dtype), p->dqkv = new_buffer(p->N * p->QKV, dtype);
    p->out = new_buffer(p->N * p->OUT, dtype), p->dout = new_buffer(p->N * p->OUT, dtype);
    p->lse = new_buffer(p->N * NH, DTYPE_F32), p->delta = new_buffer(p->N * NH, DTYPE_F32);
    // Scores of a standard deviation of about 1 to 2: the softmax is neither flat nor a maximum.
    for (int64_t i = 0; i < p->N * p->QKV; i++) set_value(p->qkv, i, 2.0 * test_uniform(1, (uint64_t)i));
    for (int64_t i = 0; i < p->N * p->OUT; i++) set_value(p->dout, i, test_uniform(2, (uint64_t)i));
}

static void problem_free(Problem *p) {
    Buffer buffers[] = {p->qkv, p->dqkv, p->out, p->dout, p->lse, p->delta};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++) free(buffers[i].data);
}

// Runs forward and backward into outputs that are NaN before: what is not written shows.
static void problem_run(Problem *p) {
    fill_nan(p->out, p->N * p->OUT), fill_nan(p->dqkv, p->N * p->QKV), fill_nan(p->lse, p->N * p->NH), fill_nan(p->delta, p->N * p->NH);
    cpu_attention_forward(NULL, p->out, p->lse, p->qkv, &p->packing, p->shape);
    cpu_attention_backward(NULL, p->dqkv, p->delta, p->dout, p->out, p->qkv, p->lse, &p->packing, p->shape);
}

// ----------------------------------------------------------------------------
// The reference

static void reference_forward(const Problem *p, Reference *r) {
    double *probability = base_new((size_t)p->packing.max_length, sizeof(double));
    for (int64_t s = 0; s < p->documents; s++) {
        for (int64_t h = 0; h < p->NH; h++) {
            const int64_t kv = p->NH + h / (p->NH / p->NKV);
            for (int64_t i = p->cu[s]; i < p->cu[s + 1]; i++) {
                const double *q = r->qkv + i * p->QKV + h * p->HS;
                double top = -INFINITY, sum = 0;
                for (int64_t j = p->cu[s]; j <= i; j++) {
                    const double *k = r->qkv + j * p->QKV + kv * p->HS;
                    double score = 0;
#pragma omp simd reduction(+ : score)
                    for (int64_t d = 0; d < p->HS; d++) score += q[d] * k[d];
                    score /= sqrt((double)p->HS);
                    probability[j - p->cu[s]] = score;
                    top = score > top ? score : top;
                }
                for (int64_t j = 0; j <= i - p->cu[s]; j++) sum += exp(probability[j] - top);
                r->lse[h * p->N + i] = top + log(sum);
                double *out = r->out + i * p->OUT + h * p->HS;
                for (int64_t d = 0; d < p->HS; d++) out[d] = 0;
                for (int64_t j = p->cu[s]; j <= i; j++) {
                    const double *v = r->qkv + j * p->QKV + (kv + p->NKV) * p->HS, weight = exp(probability[j - p->cu[s]] - top) / sum;
#pragma omp simd
                    for (int64_t d = 0; d < p->HS; d++) out[d] += weight * v[d];
                }
            }
        }
    }
    free(probability);
}

// out of the reference may have been rounded to bf16 in between, as the device's is.
static void reference_backward(const Problem *p, Reference *r) {
    const double scale = 1 / sqrt((double)p->HS);
    memset(r->dqkv, 0, (size_t)(p->N * p->QKV) * sizeof(double));
    for (int64_t s = 0; s < p->documents; s++) {
        for (int64_t h = 0; h < p->NH; h++) {
            const int64_t kv = p->NH + h / (p->NH / p->NKV);
            for (int64_t i = p->cu[s]; i < p->cu[s + 1]; i++) {
                const double *q = r->qkv + i * p->QKV + h * p->HS, *out = r->out + i * p->OUT + h * p->HS;
                const double *dout = r->dout + i * p->OUT + h * p->HS;
                double *dq = r->dqkv + i * p->QKV + h * p->HS, delta = 0;
                for (int64_t d = 0; d < p->HS; d++) delta += dout[d] * out[d];
                for (int64_t j = p->cu[s]; j <= i; j++) {
                    const double *k = r->qkv + j * p->QKV + kv * p->HS, *v = k + p->NKV * p->HS;
                    double *dk = r->dqkv + j * p->QKV + kv * p->HS, *dv = dk + p->NKV * p->HS, score = 0, dweight = 0;
#pragma omp simd reduction(+ : score, dweight)
                    for (int64_t d = 0; d < p->HS; d++) score += q[d] * k[d], dweight += dout[d] * v[d];
                    const double weight = exp(score * scale - r->lse[h * p->N + i]), dscore = weight * (dweight - delta) * scale;
#pragma omp simd
                    for (int64_t d = 0; d < p->HS; d++) {
                        dv[d] += weight * dout[d];
                        dq[d] += dscore * k[d];
                        dk[d] += dscore * q[d];
                    }
                }
            }
        }
    }
}

static void reference_create(const Problem *p, Reference *r) {
    r->qkv = base_new((size_t)(p->N * p->QKV), sizeof(double)), r->dqkv = base_new((size_t)(p->N * p->QKV), sizeof(double));
    r->out = base_new((size_t)(p->N * p->OUT), sizeof(double)), r->dout = base_new((size_t)(p->N * p->OUT), sizeof(double));
    r->lse = base_new((size_t)(p->N * p->NH), sizeof(double));
    for (int64_t i = 0; i < p->N * p->QKV; i++) r->qkv[i] = value_at(p->qkv, i);
    for (int64_t i = 0; i < p->N * p->OUT; i++) r->dout[i] = value_at(p->dout, i);
}

static void reference_free(Reference *r) { free(r->qkv), free(r->dqkv), free(r->out), free(r->dout), free(r->lse); }

// ----------------------------------------------------------------------------
// Comparison

enum { PART_OUT, PART_LSE, PART_DQ, PART_DK, PART_DV, PARTS };
static const char *const part_names[PARTS] = {"out", "lse", "dq", "dk", "dv"};

typedef struct {
    double error[PARTS];
} Errors;

static double rounded(double x) { return (double)bf16_from_f32((float)x) == 0 ? 0 : (double)bf16_to_f32(bf16_from_f32((float)x)); }

// L2 error over columns [from, to) of the rows of an array, relative to the reference there, but to no less than a tenth of the
// root mean square of the whole: documents of one token have dq = dk = 0, and the rounding noise of a zero must not decide.
static double columns_error(Buffer got, const double *want, int64_t rows, int64_t width, int64_t from, int64_t to, bool round_want,
                            const double *exact) {
    double difference = 0, size = 0, whole = 0;
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t c = 0; c < width; c++) {
            const double b = exact[i * width + c], a = round_want ? rounded(want[i * width + c]) : value_at(got, i * width + c);
            whole += b * b;
            if (c < from || c >= to) continue;
            difference += (a - b) * (a - b);
            size += b * b;
        }
    }
    const double floor = 0.01 * whole * (double)(to - from) / (double)width;
    return size == 0 && whole == 0 ? sqrt(difference) : sqrt(difference / (size > floor ? size : floor));
}

// Errors of the device against the exact reference, or (round_want) of `other`, rounded to bf16, against it.
static Errors compare(const Problem *p, const Reference *exact, const Reference *other, bool round_want) {
    const int64_t q = p->NH * p->HS, k = q + p->NKV * p->HS;
    Errors e;
    e.error[PART_OUT] = columns_error(p->out, other->out, p->N, p->OUT, 0, p->OUT, round_want, exact->out);
    e.error[PART_LSE] = columns_error(p->lse, other->lse, 1, p->NH * p->N, 0, p->NH * p->N, false, exact->lse);
    e.error[PART_DQ] = columns_error(p->dqkv, other->dqkv, p->N, p->QKV, 0, q, round_want, exact->dqkv);
    e.error[PART_DK] = columns_error(p->dqkv, other->dqkv, p->N, p->QKV, q, k, round_want, exact->dqkv);
    e.error[PART_DV] = columns_error(p->dqkv, other->dqkv, p->N, p->QKV, k, p->QKV, round_want, exact->dqkv);
    return e;
}

// Worst error of each part, for fp32 itself, for bf16 as a multiple of the error of the rounded reference.
static void compare_case(const int *lengths, int64_t NH, int64_t NKV, int64_t HS, Dtype dtype, Errors *worst) {
    Problem p;
    Reference r;
    problem_create(&p, lengths, NH, NKV, HS, dtype);
    reference_create(&p, &r);
    problem_run(&p);
    reference_forward(&p, &r);
    reference_backward(&p, &r);
    Errors e = compare(&p, &r, &r, false);
    if (dtype == DTYPE_BF16) {
        Reference half;
        reference_create(&p, &half);
        reference_forward(&p, &half);
        for (int64_t i = 0; i < p.N * p.OUT; i++) half.out[i] = rounded(half.out[i]);
        reference_backward(&p, &half);
        const Errors allowed = compare(&p, &r, &half, true);
        for (int part = 0; part < PARTS; part++) {
            if (part != PART_LSE) e.error[part] /= allowed.error[part] > 1e-4 ? allowed.error[part] : 1e-4;
        }
        reference_free(&half);
    }
    for (int part = 0; part < PARTS; part++) {
        if (!(e.error[part] <= worst->error[part])) worst->error[part] = e.error[part]; // NaN stays
    }
    reference_free(&r), problem_free(&p);
}

static const int *const packings[] = {
    (const int[]){1, -1},
    (const int[]){7, -1},
    (const int[]){64, -1},
    (const int[]){65, -1},
    (const int[]){257, -1},
    (const int[]){1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1},
    (const int[]){0, 5, 0, 0, 130, 0, -1},
    (const int[]){2, 200, 1, 3, 17, 0, 33, -1},
};
enum { PACKINGS = sizeof packings / sizeof packings[0] };

static void test_against_reference(void) {
    static const int64_t sizes[] = {1, 16, 17, 20, 64, 80, 96, 128}, heads[][2] = {{1, 1}, {5, 1}, {6, 2}, {6, 3}, {5, 5}};
    for (int dtype = DTYPE_F32; dtype <= DTYPE_BF16; dtype++) {
        printf("against double precision, %s%s\n", dtype_names[dtype], dtype == DTYPE_BF16 ? " (error / error of the rounded reference)" : "");
        Errors worst = {{0}};
        for (int i = 0; i < 8; i++) {
            for (int j = 0; j < PACKINGS; j++) {
                const int64_t *pair = heads[(3 * i + j) % 5];
                compare_case(packings[j], pair[0], pair[1], sizes[i], (Dtype)dtype, &worst);
            }
        }
        for (int part = 0; part < PARTS; part++) {
            check_error(worst.error[part], dtype == DTYPE_F32 || part == PART_LSE ? 1e-5 : 2.0, part_names[part]);
        }
    }
}

// ----------------------------------------------------------------------------

static double reference_loss(const Problem *p, Reference *r) {
    double loss = 0;
    reference_forward(p, r);
    for (int64_t i = 0; i < p->N * p->OUT; i++) loss += r->dout[i] * r->out[i];
    return loss;
}

static void test_finite_differences(void) {
    printf("the reference's gradient against finite differences\n");
    Problem p;
    Reference r;
    problem_create(&p, (const int[]){4, 0, 1, 6, -1}, 4, 2, 3, DTYPE_F32);
    reference_create(&p, &r);
    reference_forward(&p, &r);
    reference_backward(&p, &r);
    double worst = 0;
    for (int64_t i = 0; i < p.N * p.QKV; i++) {
        const double kept = r.qkv[i], h = 1e-5;
        r.qkv[i] = kept + h;
        const double above = reference_loss(&p, &r);
        r.qkv[i] = kept - h;
        const double below = reference_loss(&p, &r), error = fabs((above - below) / (2 * h) - r.dqkv[i]);
        r.qkv[i] = kept;
        if (!(error <= worst)) worst = error;
    }
    check_error(worst, 1e-8, "largest difference");
    reference_free(&r), problem_free(&p);
}

static bool same(Buffer a, Buffer b, int64_t from, int64_t count) {
    return memcmp(buffer_at(a, from).data, buffer_at(b, from).data, (size_t)count * dtype_bytes(a.dtype)) == 0;
}

// Outputs of tokens [from, to) are the same bits in both problems.
static bool same_tokens(const Problem *a, const Problem *b, int64_t from, int64_t to, bool gradients) {
    bool ok = same(a->out, b->out, from * a->OUT, (to - from) * a->OUT);
    for (int64_t h = 0; h < a->NH; h++) ok = ok && same(a->lse, b->lse, h * a->N + from, to - from);
    return ok && (!gradients || same(a->dqkv, b->dqkv, from * a->QKV, (to - from) * a->QKV));
}

static void test_isolation(void) {
    printf("documents do not see each other; tokens do not see later ones\n");
    const int lengths[] = {70, 3, 0, 130, 1, -1};
    for (int dtype = DTYPE_F32; dtype <= DTYPE_BF16; dtype++) {
        for (int changed = 0; changed < 5; changed++) {
            Problem a, b;
            problem_create(&a, lengths, 4, 2, 20, (Dtype)dtype), problem_create(&b, lengths, 4, 2, 20, (Dtype)dtype);
            for (int64_t t = b.cu[changed]; t < b.cu[changed + 1]; t++) { // also NaN: multiplying by zero would not hide it
                for (int64_t c = 0; c < b.QKV; c++) set_value(b.qkv, t * b.QKV + c, c == 3 ? (double)NAN : 3.0);
                for (int64_t c = 0; c < b.OUT; c++) set_value(b.dout, t * b.OUT + c, -2.0);
            }
            problem_run(&a), problem_run(&b);
            for (int s = 0; s < 5; s++) {
                if (s == changed) continue;
                check(same_tokens(&a, &b, a.cu[s], a.cu[s + 1], true), "%s: document %d changes document %d", dtype_names[dtype], changed, s);
            }
            if (changed == 0) {
                check(!same_tokens(&a, &b, 0, 70, true), "%s: changing a document changes nothing in it", dtype_names[dtype]);
            }
            problem_free(&a), problem_free(&b);
        }
        for (int64_t from = 1; from < 130; from += 9) {
            Problem a, b;
            problem_create(&a, (const int[]){130, -1}, 2, 1, 33, (Dtype)dtype), problem_create(&b, (const int[]){130, -1}, 2, 1, 33, (Dtype)dtype);
            for (int64_t i = from * b.QKV; i < b.N * b.QKV; i++) set_value(b.qkv, i, 5.0);
            problem_run(&a), problem_run(&b);
            check(same_tokens(&a, &b, 0, from, false), "%s: tokens from %d on change earlier ones", dtype_names[dtype], (int)from);
            problem_free(&a), problem_free(&b);
        }
    }
}

static bool fuses(const Problem *p) {
    AttentionCall_ call = attention_call_(&p->packing, p->shape);
    call.dqkv = p->dqkv;
    return attention_fuses_(&call, p->packing.max_length);
}

static void test_threads(void) {
    printf("the same bits for 1, 2, 3 and 7 threads, and again\n");
    const int threads[] = {1, 2, 3, 7, 7}, before = omp_get_max_threads();
    static const int64_t shapes[][3] = {{2, 1, 64}, {4, 4, 128}, {6, 2, 20}};
    const int *const lengths[] = {(const int[]){300, -1}, (const int[]){150, 1, 20, 0, 64, -1}, (const int[]){90, 90, 90, 90, -1}};
    int fused = 0, split = 0;
    for (int dtype = DTYPE_F32; dtype <= DTYPE_BF16; dtype++) {
        for (int c = 0; c < 9; c++) {
            const int64_t *shape = shapes[c % 3];
            Problem p[5];
            for (int t = 0; t < 5; t++) {
                problem_create(&p[t], lengths[c / 3], shape[0], shape[1], shape[2], (Dtype)dtype);
                omp_set_num_threads(threads[t]);
                fuses(&p[t]) ? fused++ : split++;
                problem_run(&p[t]);
                check(same_tokens(&p[0], &p[t], 0, p[0].N, true), "%s case %d: %d threads", dtype_names[dtype], c, threads[t]);
            }
            for (int t = 0; t < 5; t++) problem_free(&p[t]);
        }
    }
    omp_set_num_threads(before);
    check(fused > 20 && split > 20, "both ways of the backward pass run: %d fused, %d split", fused, split);
}

// q and k of +-50: scores are exact multiples of 625 between -20000 and 20000.
static void test_extremes(void) {
    printf("logits of +-20000\n");
    Problem p;
    Reference r;
    problem_create(&p, (const int[]){130, 1, 40, -1}, 2, 1, 64, DTYPE_F32);
    for (int64_t t = 0; t < p.N; t++) {
        for (int64_t h = 0; h < 3; h++) {
            for (int64_t d = 0; d < 64; d++) {
                const int64_t i = t * p.QKV + h * 64 + d;
                const double sign = t % 3 == 0 ? 1 : t % 3 == 1 ? -1 : test_uniform(3, (uint64_t)i) < 0 ? -1 : 1;
                set_value(p.qkv, i, 50 * sign);
            }
        }
    }
    reference_create(&p, &r);
    problem_run(&p);
    reference_forward(&p, &r);
    reference_backward(&p, &r);
    const Errors e = compare(&p, &r, &r, false);
    check_error(e.error[PART_OUT], 1e-5, "out");
    check_error(e.error[PART_LSE], 1e-6, "lse");
    // A log-sum-exp near 20000 is a float with steps of 1/512: probabilities are right to half of that.
    for (int part = PART_DQ; part < PARTS; part++) check_error(e.error[part], 2e-3, part_names[part]);
    reference_free(&r), problem_free(&p);
    for (int sign = -1; sign <= 1; sign += 2) { // all scores alike and huge
        problem_create(&p, (const int[]){70, -1}, 1, 1, 1, DTYPE_F32);
        for (int64_t t = 0; t < p.N; t++) set_value(p.qkv, t * 3, 200.0 * sign), set_value(p.qkv, t * 3 + 1, 100.0);
        reference_create(&p, &r);
        problem_run(&p);
        reference_forward(&p, &r);
        check_error(compare(&p, &r, &r, false).error[PART_OUT], 1e-5, sign < 0 ? "all -20000: out" : "all 20000: out");
        bool finite = true;
        for (int64_t i = 0; i < p.N * p.QKV; i++) finite = finite && isfinite(value_at(p.dqkv, i));
        check(finite, "all %d: a gradient is not finite", 20000 * sign);
        reference_free(&r), problem_free(&p);
    }
}

static void test_nothing(void) {
    printf("no tokens\n");
    Problem p;
    problem_create(&p, (const int[]){0, 0, 0, -1}, 2, 1, 16, DTYPE_F32);
    problem_run(&p);
    problem_free(&p);
    problem_create(&p, (const int[]){-1}, 2, 1, 16, DTYPE_BF16);
    problem_run(&p);
    problem_free(&p);
    check(true, "returned");
}

int main(void) {
    test_finite_differences();
    test_against_reference();
    test_isolation();
    test_threads();
    test_extremes();
    test_nothing();
    return test_end();
}
