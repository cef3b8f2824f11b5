// test_matmul.c: the matrix product (llmc/cpu/blas.h) and the linear ops (llmc/cpu/matmul.h) against double precision and
// finite differences: every form, odd shapes, every mix of types, bias, accumulation, GELU and its extremes, repeatability.
// Outputs carry guard elements, because AddressSanitizer does not see what a library's generated code writes.
#include "dev/test/test.h"   // check, test_end, test_uniform
#include "llmc/cpu/matmul.h" // cpu_linear_forward, blas_matmul

// A line of the log for every group, with what was measured.
__attribute__((format(printf, 2, 3))) static void report(bool ok, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (ok) printf("  %s\n", text);
    check(ok, "%s", text);
}

// ----------------------------------------------------------------------------
// Buffers with a guard behind them

enum { GUARD = 80 };
static const float guard_value = 12352.0f; // exact in either type

static float get(Buffer buffer, int64_t i) {
    return buffer.dtype == DTYPE_BF16 ? bf16_to_f32(((uint16_t *)buffer.data)[i]) : ((float *)buffer.data)[i];
}
static void set(Buffer buffer, int64_t i, float value) {
    if (buffer.dtype == DTYPE_BF16) {
        ((uint16_t *)buffer.data)[i] = bf16_from_f32(value);
    } else {
        ((float *)buffer.data)[i] = value;
    }
}

// n random elements in [-1, 1), then the guard
static Buffer buffer_random(int64_t n, Dtype dtype, uint64_t key) {
    Buffer buffer = buffer_of(base_new((size_t)(n + GUARD), dtype_bytes(dtype)), dtype);
    for (int64_t i = 0; i < n; i++) set(buffer, i, (float)test_uniform(key, (uint64_t)i));
    for (int64_t i = n; i < n + GUARD; i++) set(buffer, i, guard_value);
    return buffer;
}
static bool guard_intact(Buffer buffer, int64_t n) {
    for (int64_t i = n; i < n + GUARD; i++) {
        if (get(buffer, i) != guard_value) return false;
    }
    return true;
}

// Error of a sum of products over its bound: half a unit in the last place of the output type, and a share of the sum of
// absolute products for fp32 accumulation. A NaN counts as infinite.
static double error_ratio(double got, double want, double absolute_sum, Dtype out) {
    const double bound = fabs(want) * (out == DTYPE_BF16 ? 0x1.02p-8 : 0x1p-23) + absolute_sum * 5e-7 + 1e-30;
    const double ratio = fabs(got - want) / bound;
    return ratio >= 0 ? ratio : INFINITY;
}

// ----------------------------------------------------------------------------
// The product

static const char *const form_names[] = {"NT", "NN", "TN"};

// Worst error ratio of C (M, N) against double, infinite when the guard was written to.
static double product_error(Buffer C, Buffer before, Buffer A, Buffer B, Buffer bias, bool accumulate, BlasForm form, int64_t M, int64_t N,
                            int64_t K) {
    double worst = guard_intact(C, M * N) ? 0.0 : INFINITY;
    for (int64_t i = 0; i < M; i++) {
        for (int64_t j = 0; j < N; j++) {
            double sum = accumulate ? get(before, i * N + j) : bias.data != NULL ? get(bias, j) : 0.0, absolute = fabs(sum);
            for (int64_t k = 0; k < K; k++) {
                const double a = get(A, form == BLAS_TN ? k * M + i : i * K + k), b = get(B, form == BLAS_NT ? j * K + k : k * N + j);
                sum += a * b, absolute += fabs(a * b);
            }
            worst = fmax(worst, error_ratio(get(C, i * N + j), sum, absolute, C.dtype));
        }
    }
    return worst;
}

typedef struct {
    Dtype a, b, c;
    bool bias, accumulate;
    const char *name;
} Mix;

static void test_products(BlasState *state) {
    static const int64_t shapes[][3] = {{1, 1, 1},    {1, 7, 80},    {7, 1, 131},    {80, 131, 1},  {131, 257, 80}, {257, 80, 131},
                                        {64, 96, 48}, {96, 128, 64}, {17, 257, 300}, {3, 200, 513}, {128, 33, 7}};
    static const Mix mixes[] = {
        {DTYPE_F32, DTYPE_F32, DTYPE_F32, false, false, "F32"},
        {DTYPE_F32, DTYPE_F32, DTYPE_F32, true, false, "F32 + bias"},
        {DTYPE_F32, DTYPE_F32, DTYPE_F32, false, true, "F32 +="},
        {DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, false, false, "BF16"},
        {DTYPE_BF16, DTYPE_BF16, DTYPE_BF16, true, false, "BF16 + bias"},
        {DTYPE_BF16, DTYPE_BF16, DTYPE_F32, false, false, "BF16 to F32"},
        {DTYPE_BF16, DTYPE_BF16, DTYPE_F32, true, false, "BF16 to F32 + bias"},
        {DTYPE_BF16, DTYPE_BF16, DTYPE_F32, false, true, "BF16 to F32 +="},
        {DTYPE_F32, DTYPE_BF16, DTYPE_F32, false, true, "F32 x BF16 +="},
        {DTYPE_F32, DTYPE_BF16, DTYPE_BF16, true, false, "F32 x BF16 to BF16 + bias"},
    };
    for (size_t m = 0; m < sizeof mixes / sizeof mixes[0]; m++) {
        const Mix mix = mixes[m];
        for (int form = BLAS_NT; form <= BLAS_TN; form++) {
            double worst[2] = {0, 0};
            for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
                const int64_t M = shapes[s][0], N = shapes[s][1], K = shapes[s][2];
                const Buffer A = buffer_random(M * K, mix.a, 1 + s), B = buffer_random(K * N, mix.b, 101 + s);
                const Buffer bias = mix.bias ? buffer_random(N, mix.a, 201 + s) : (Buffer){0};
                const Buffer before = buffer_random(M * N, mix.c, 301 + s);
                for (int plain = 0; plain < 2; plain++) {
                    const Buffer C = buffer_random(M * N, mix.c, 301 + s);
                    if (plain) {
                        blas_matmul_plain((BlasForm)form, C, A, B, bias, mix.accumulate, M, N, K);
                    } else {
                        blas_matmul(state, (BlasForm)form, C, A, B, bias, mix.accumulate, M, N, K);
                    }
                    worst[plain] = fmax(worst[plain], product_error(C, before, A, B, bias, mix.accumulate, (BlasForm)form, M, N, K));
                    free(C.data);
                }
                free(A.data), free(B.data), free(bias.data), free(before.data);
            }
            report(worst[0] <= 1.0 && worst[1] <= 1.0, "%s %-26s worst error / bound: %.3f, plain loop %.3f (bound 1)", form_names[form], mix.name,
                   worst[0], worst[1]);
        }
    }
}

// Products that span several blocks of the fp32 conversion, and one with the table of ready products overflowing.
static void test_blocks(BlasState *state) {
    const int64_t M = 523, N = 1031, K = 1030;
    for (int run = 0; run < 6; run++) {
        const int form = run % 3; // BLAS_NT, BLAS_NN, BLAS_TN
        const Buffer A = buffer_random(M * K, run < 3 ? DTYPE_BF16 : DTYPE_F32, 11), B = buffer_random(K * N, DTYPE_BF16, 12);
        const Buffer C = buffer_random(M * N, DTYPE_F32, 13), plain = buffer_random(M * N, DTYPE_F32, 13);
        blas_matmul(state, (BlasForm)form, C, A, B, (Buffer){0}, true, M, N, K);
        blas_matmul_plain((BlasForm)form, plain, A, B, (Buffer){0}, true, M, N, K);
        double worst = guard_intact(C, M * N) ? 0.0 : INFINITY;
        for (int64_t i = 0; i < M * N; i++) worst = fmax(worst, error_ratio(get(C, i), get(plain, i), 0.35 * (double)K, DTYPE_F32));
        report(worst <= 1.0, "%s %s x BF16 to F32 += of %d x %d x %d against the plain loop: worst error / bound %.3f (bound 1)", form_names[form],
               dtype_names[A.dtype], (int)M, (int)N, (int)K, worst);
        free(A.data), free(B.data), free(C.data), free(plain.data);
    }
    double worst = 0;
    for (int round = 0; round < 2; round++) {
        for (int64_t rows = 1; rows <= 100; rows++) {
            const Buffer A = buffer_random(rows * 8, DTYPE_F32, 21), B = buffer_random(8 * 5, DTYPE_F32, 22),
                         C = buffer_random(rows * 5, DTYPE_F32, 23);
            blas_matmul(state, BLAS_NT, C, A, B, (Buffer){0}, false, rows, 5, 8);
            worst = fmax(worst, product_error(C, C, A, B, (Buffer){0}, false, BLAS_NT, rows, 5, 8));
            free(A.data), free(B.data), free(C.data);
        }
    }
    report(worst <= 1.0, "100 shapes in turn, twice: worst error / bound %.3f (bound 1)", worst);
}

static void test_empty(Device *device) {
    const Buffer in = buffer_random(8, DTYPE_F32, 1), weight = buffer_random(8, DTYPE_F32, 2), bias = buffer_random(4, DTYPE_F32, 3);
    const Buffer out = buffer_random(8, DTYPE_F32, 4), dbias = buffer_random(4, DTYPE_F32, 5), none = {0};
    cpu_linear_forward(device, out, out, in, weight, bias, 0, 2, 4);
    cpu_linear_backward_input(device, out, in, weight, out, 0, 2, 4);
    cpu_linear_backward_weight(device, out, dbias, true, in, in, 0, 2, 4);
    bool same = true;
    const Buffer fresh = buffer_random(8, DTYPE_F32, 4), fresh_bias = buffer_random(4, DTYPE_F32, 5);
    for (int i = 0; i < 8; i++) same = same && get(out, i) == get(fresh, i);
    for (int i = 0; i < 4; i++) same = same && get(dbias, i) == get(fresh_bias, i);
    report(same, "no tokens: outputs and accumulated gradients are untouched");
    cpu_linear_backward_weight(device, out, dbias, false, in, in, 0, 2, 4);
    bool zero = true;
    for (int i = 0; i < 8; i++) zero = zero && get(out, i) == 0.0f;
    for (int i = 0; i < 4; i++) zero = zero && get(dbias, i) == 0.0f;
    report(zero, "no tokens, not accumulated: gradients are zero");
    cpu_linear_forward(device, out, none, in, weight, bias, 2, 0, 4);
    bool biased = true;
    for (int i = 0; i < 8; i++) biased = biased && get(out, i) == get(bias, i % 4);
    report(biased, "no input channels: out is the bias");
    free(in.data), free(weight.data), free(bias.data), free(out.data), free(dbias.data), free(fresh.data), free(fresh_bias.data);
}

// ----------------------------------------------------------------------------
// The linear ops

static double gelu(double x) { return 0.5 * x * (1.0 + tanh(sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x))); }
static double gelu_derivative(double x) {
    const double s = sqrt(2.0 / 3.14159265358979323846), t = tanh(s * (x + 0.044715 * x * x * x));
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * s * (1.0 + 3.0 * 0.044715 * x * x);
}

static void test_linear(Device *device, Dtype dtype, Dtype out_dtype, int64_t N, int64_t IC, int64_t OC) {
    const char *name = dtype == DTYPE_F32 ? "F32" : out_dtype == DTYPE_F32 ? "BF16 to F32" : "BF16";
    const Buffer in = buffer_random(N * IC, dtype, 31), weight = buffer_random(OC * IC, dtype, 32), bias = buffer_random(OC, dtype, 33);
    const Buffer dout = buffer_random(N * OC, dtype, 34), none = {0};
    const Buffer out = buffer_random(N * OC, out_dtype, 35), activated = buffer_random(N * OC, out_dtype, 36);
    const Buffer din = buffer_random(N * IC, dtype, 37), gelu_in = buffer_random(N * IC, dtype, 38), product = buffer_random(N * IC, dtype, 39);
    const Buffer dweight = buffer_random(OC * IC, DTYPE_F32, 40), dweight_before = buffer_random(OC * IC, DTYPE_F32, 40);
    const Buffer dbias = buffer_random(OC, DTYPE_F32, 41), dbias_before = buffer_random(OC, DTYPE_F32, 41);
    const double last_place = out_dtype == DTYPE_BF16 ? 0x1.02p-8 : 0x1p-24, din_place = dtype == DTYPE_BF16 ? 0x1.02p-8 : 0x1p-24;
    for (int64_t i = 0; i < N * IC; i++) set(gelu_in, i, 4.0f * get(gelu_in, i));

    cpu_linear_forward(device, out, activated, in, weight, bias, N, IC, OC);
    double worst = product_error(out, none, in, weight, bias, false, BLAS_NT, N, OC, IC),
           worst_gelu = guard_intact(activated, N * OC) ? 0 : INFINITY;
    for (int64_t i = 0; i < N * OC; i++) {
        const double want = gelu(get(out, i)),
                     error = fabs(get(activated, i) - want) / (1.1 * last_place * fabs(want) + 4e-7 * fmax(fabs(want), fabs(get(out, i))));
        worst_gelu = fmax(worst_gelu, error >= 0 || want == 0 ? (want == 0 ? 0 : error) : INFINITY);
    }
    report(worst <= 1.0 && worst_gelu <= 1.0, "%s linear_forward (%d, %d, %d): worst error / bound %.3f, gelu %.3f (bound 1)", name, (int)N,
           (int)IC, (int)OC, worst, worst_gelu);

    if (out_dtype == dtype) {
        cpu_linear_backward_input(device, product, dout, weight, none, N, IC, OC);
        cpu_linear_backward_input(device, din, dout, weight, gelu_in, N, IC, OC);
        worst = product_error(product, none, dout, weight, none, false, BLAS_NN, N, IC, OC);
        worst_gelu = guard_intact(din, N * IC) ? 0 : INFINITY;
        for (int64_t i = 0; i < N * IC; i++) {
            const double before = get(product, i), want = before * gelu_derivative(get(gelu_in, i));
            const double error = fabs(get(din, i) - want) / (1.1 * din_place * fabs(want) + 2e-6 * fabs(before) + 1e-30);
            worst_gelu = fmax(worst_gelu, error >= 0 ? error : INFINITY);
        }
        report(worst <= 1.0 && worst_gelu <= 1.0, "%s linear_backward_input: worst error / bound %.3f, gelu' %.3f (bound 1)", name, worst,
               worst_gelu);

        for (int accumulate = 0; accumulate < 2; accumulate++) {
            memcpy(dweight.data, dweight_before.data, (size_t)(OC * IC) * sizeof(float));
            memcpy(dbias.data, dbias_before.data, (size_t)OC * sizeof(float));
            cpu_linear_backward_weight(device, dweight, dbias, accumulate, dout, in, N, IC, OC);
            worst = product_error(dweight, dweight_before, dout, in, none, accumulate, BLAS_TN, OC, IC, N);
            double worst_bias = guard_intact(dbias, OC) ? 0 : INFINITY;
            for (int64_t j = 0; j < OC; j++) {
                double sum = accumulate ? get(dbias_before, j) : 0, absolute = fabs(sum);
                for (int64_t i = 0; i < N; i++) sum += get(dout, i * OC + j), absolute += fabs(get(dout, i * OC + j));
                worst_bias = fmax(worst_bias, error_ratio(get(dbias, j), sum, absolute, DTYPE_F32));
            }
            report(worst <= 1.0 && worst_bias <= 1.0, "%s linear_backward_weight %s: worst error / bound %.3f, dbias %.3f (bound 1)", name,
                   accumulate ? "+=" : "=", worst, worst_bias);
        }
        cpu_linear_backward_weight(device, dweight, none, false, dout, in, N, IC, OC);
        worst = product_error(dweight, none, dout, in, none, false, BLAS_TN, OC, IC, N);
        report(worst <= 1.0, "%s linear_backward_weight without bias: worst error / bound %.3f (bound 1)", name, worst);
    }
    const Buffer all[] = {in, weight, bias, dout, out, activated, din, gelu_in, product, dweight, dweight_before, dbias, dbias_before};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i].data);
}

static void test_gelu_extremes(Device *device, Dtype dtype) {
    static const float values[] = {0.0f, 1e-30f, -1e-30f, 0.5f, -0.5f, 3.0f, -3.0f, 10.0f, -10.0f, 100.0f, -100.0f, 1e30f, -1e30f};
    enum { COUNT = sizeof values / sizeof values[0] };
    const Buffer in = buffer_random(COUNT + 1, dtype, 1), weight = buffer_random(1, dtype, 1), none = {0};
    const Buffer out = buffer_random(COUNT + 1, dtype, 1), activated = buffer_random(COUNT + 1, dtype, 1), din = buffer_random(COUNT + 1, dtype, 1);
    const Buffer ones = buffer_random(COUNT + 1, dtype, 1);
    for (int i = 0; i < COUNT; i++) set(in, i, values[i]);
    set(in, COUNT, NAN);
    for (int i = 0; i <= COUNT; i++) set(ones, i, 1.0f);
    set(weight, 0, 1.0f);
    cpu_linear_forward(device, out, activated, in, weight, none, COUNT + 1, 1, 1);
    cpu_linear_backward_input(device, din, ones, weight, in, COUNT + 1, 1, 1);
    double worst = 0, worst_derivative = 0;
    for (int i = 0; i < COUNT; i++) {
        const double x = get(in, i), large = fabs(x) > 50, want = large ? fmax(x, 0) : gelu(x), slope = large ? x > 0 : gelu_derivative(x);
        const double place = dtype == DTYPE_BF16 ? 0x1.1p-8 : 0x1p-21;
        const double error = fabs(get(activated, i) - want) / (place * fabs(want) + 1e-6 * fmin(fabs(x), 1)),
                     error_slope = fabs(get(din, i) - slope) / (place + 1e-6);
        if (x != 0) worst = fmax(worst, error >= 0 ? error : INFINITY);
        worst_derivative = fmax(worst_derivative, error_slope >= 0 ? error_slope : INFINITY);
    }
    report(worst <= 1.0 && worst_derivative <= 1.0 && get(activated, 0) == 0.0f,
           "%s GELU of 0, 1e-30 ... 1e30: worst error / bound %.3f, derivative %.3f (bound 1)", dtype_names[dtype], worst, worst_derivative);
    report(isnan(get(activated, COUNT)) && isnan(get(din, COUNT)), "%s GELU of NaN is NaN, and so is its gradient", dtype_names[dtype]);
    free(in.data), free(weight.data), free(out.data), free(activated.data), free(din.data), free(ones.data);
}

// ----------------------------------------------------------------------------
// Rows that are apart: NaN lies between them, is never read and never written.

static Buffer rows_apart(Buffer dense, int64_t rows, int64_t columns, int64_t row) {
    Buffer apart = buffer_random(rows * row, dense.dtype, 1);
    for (int64_t i = 0; i < rows * row; i++) set(apart, i, i % row < columns ? get(dense, i / row * columns + i % row) : (float)NAN);
    apart.row = row;
    return apart;
}

// The columns, into dense; false when something between the rows, or behind the last, was written.
static bool rows_together(Buffer dense, Buffer apart, int64_t rows, int64_t columns) {
    bool good = guard_intact(apart, rows * apart.row);
    for (int64_t i = 0; i < rows * apart.row; i++) {
        const int64_t column = i % apart.row;
        if (column < columns) set(dense, i / apart.row * columns + column, get(apart, i));
        good = good && (column < columns || isnan(get(apart, i)));
    }
    return good;
}

static void test_rows(Device *device, Dtype dtype, Dtype out_dtype, int64_t N, int64_t IC, int64_t OC, int64_t row) {
    const Buffer in = buffer_random(N * IC, dtype, 91), weight = buffer_random(OC * IC, dtype, 92), bias = buffer_random(OC, dtype, 93), none = {0};
    const Buffer dout = buffer_random(N * OC, dtype, 94), din = buffer_random(N * IC, dtype, 95), out = buffer_random(N * OC, out_dtype, 96);
    const Buffer dweight = buffer_random(OC * IC, DTYPE_F32, 97), before = buffer_random(OC * IC, DTYPE_F32, 97),
                 dbias = buffer_random(OC, DTYPE_F32, 98);
    const Buffer out_apart = rows_apart(out, N, OC, row), dout_apart = rows_apart(dout, N, OC, row);
    double worst[5] = {0};
    for (int plain = 0; plain < 2; plain++) {
        for (int biased = 0; biased < 2; biased++) {
            if (plain) blas_matmul_plain(BLAS_NT, out_apart, in, weight, biased ? bias : none, false, N, OC, IC);
            if (!plain) cpu_linear_forward(device, out_apart, none, in, weight, biased ? bias : none, N, IC, OC);
            const bool good = rows_together(out, out_apart, N, OC);
            worst[0] = fmax(worst[0], good ? product_error(out, none, in, weight, biased ? bias : none, false, BLAS_NT, N, OC, IC) : INFINITY);
        }
        if (plain) blas_matmul_plain(BLAS_NN, din, dout_apart, weight, none, false, N, IC, OC);
        if (!plain) cpu_linear_backward_input(device, din, dout_apart, weight, none, N, IC, OC);
        worst[1] = fmax(worst[1], product_error(din, none, dout, weight, none, false, BLAS_NN, N, IC, OC));
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            memcpy(dweight.data, before.data, (size_t)(OC * IC) * sizeof(float));
            if (plain) blas_matmul_plain(BLAS_TN, dweight, dout_apart, in, none, accumulate, OC, IC, N);
            if (!plain) cpu_linear_backward_weight(device, dweight, dbias, accumulate, dout_apart, in, N, IC, OC);
            worst[2 + accumulate] = fmax(worst[2 + accumulate], product_error(dweight, before, dout, in, none, accumulate, BLAS_TN, OC, IC, N));
        }
    }
    for (int64_t j = 0; j < OC; j++) { // was written, then added to
        double sum = 0, absolute = 0;
        for (int64_t i = 0; i < N; i++) sum += 2 * (double)get(dout, i * OC + j), absolute += 2 * fabs((double)get(dout, i * OC + j));
        worst[4] = fmax(worst[4], error_ratio(get(dbias, j), sum, absolute, DTYPE_F32));
    }
    report(worst[0] <= 1 && worst[1] <= 1 && worst[2] <= 1 && worst[3] <= 1 && worst[4] <= 1,
           "%s to %s (%d, %d, %d), rows %d apart: worst error / bound: out %.3f, din %.3f, dweight %.3f, += %.3f, dbias %.3f (bound 1)",
           dtype_names[dtype], dtype_names[out_dtype], (int)N, (int)IC, (int)OC, (int)row, worst[0], worst[1], worst[2], worst[3], worst[4]);
    const Buffer all[] = {in, weight, bias, dout, din, out, dweight, before, dbias, out_apart, dout_apart};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i].data);
}

// ----------------------------------------------------------------------------
// Finite differences: loss = sum of r * (gelu(x w1^T + b1) w2^T + b2), in double, against the ops' gradients.

enum { FD_N = 5, FD_IN = 7, FD_HIDDEN = 11, FD_OUT = 6 };

static double mlp_loss(const double *x, const double *w1, const double *b1, const double *w2, const double *b2, const double *r) {
    double loss = 0;
    for (int n = 0; n < FD_N; n++) {
        double hidden[FD_HIDDEN];
        for (int h = 0; h < FD_HIDDEN; h++) {
            hidden[h] = b1[h];
            for (int i = 0; i < FD_IN; i++) hidden[h] += x[n * FD_IN + i] * w1[h * FD_IN + i];
        }
        for (int o = 0; o < FD_OUT; o++) {
            double out = b2[o];
            for (int h = 0; h < FD_HIDDEN; h++) out += gelu(hidden[h]) * w2[o * FD_HIDDEN + h];
            loss += r[n * FD_OUT + o] * out;
        }
    }
    return loss;
}

static void test_finite_differences(Device *device) {
    enum { X, W1, B1, W2, B2, R, PARTS };
    static const int64_t counts[PARTS] = {FD_N * FD_IN, FD_HIDDEN * FD_IN, FD_HIDDEN, FD_OUT * FD_HIDDEN, FD_OUT, FD_N * FD_OUT};
    static const char *const names[] = {"x", "w1", "b1", "w2", "b2"};
    Buffer part[PARTS], gradient[PARTS];
    double *values[PARTS];
    for (int p = 0; p < PARTS; p++) {
        part[p] = buffer_random(counts[p], DTYPE_F32, 50 + (uint64_t)p), gradient[p] = buffer_random(counts[p], DTYPE_F32, 60);
        values[p] = base_new((size_t)counts[p], sizeof(double));
        for (int64_t i = 0; i < counts[p]; i++) values[p][i] = get(part[p], i);
    }
    const Buffer pre = buffer_random(FD_N * FD_HIDDEN, DTYPE_F32, 70), hidden = buffer_random(FD_N * FD_HIDDEN, DTYPE_F32, 71);
    const Buffer dhidden = buffer_random(FD_N * FD_HIDDEN, DTYPE_F32, 72), none = {0};
    cpu_linear_forward(device, pre, hidden, part[X], part[W1], part[B1], FD_N, FD_IN, FD_HIDDEN);
    cpu_linear_backward_weight(device, gradient[W2], gradient[B2], false, part[R], hidden, FD_N, FD_HIDDEN, FD_OUT);
    cpu_linear_backward_input(device, dhidden, part[R], part[W2], pre, FD_N, FD_HIDDEN, FD_OUT);
    cpu_linear_backward_weight(device, gradient[W1], gradient[B1], false, dhidden, part[X], FD_N, FD_IN, FD_HIDDEN);
    cpu_linear_backward_input(device, gradient[X], dhidden, part[W1], none, FD_N, FD_IN, FD_HIDDEN);
    for (int p = 0; p < R; p++) {
        double worst = 0;
        for (int64_t i = 0; i < counts[p]; i++) {
            const double middle = values[p][i], h = 1e-4;
            values[p][i] = middle + h;
            const double above = mlp_loss(values[X], values[W1], values[B1], values[W2], values[B2], values[R]);
            values[p][i] = middle - h;
            const double below = mlp_loss(values[X], values[W1], values[B1], values[W2], values[B2], values[R]);
            values[p][i] = middle;
            const double error = fabs(get(gradient[p], i) - (above - below) / (2 * h));
            worst = fmax(worst, error >= 0 ? error : INFINITY);
        }
        report(worst <= 3e-6, "finite differences, gradient of %s: worst error %.2e (bound 3e-6)", names[p], worst);
    }
    for (int p = 0; p < PARTS; p++) free(part[p].data), free(gradient[p].data), free(values[p]);
    free(pre.data), free(hidden.data), free(dhidden.data);
}

// ----------------------------------------------------------------------------
// The same call gives the same bits: again, in another place of memory, and with a fresh state.

static void test_repeat(Device *device, Dtype dtype, int64_t N, int64_t IC, int64_t OC) {
    bool same = true;
    Buffer first[4] = {{0}};
    for (int run = 0; run < 6; run++) {
        CpuState *own = run % 3 == 2 ? cpu_state_create() : NULL;
        Device other = {.state = own != NULL ? own : device->state};
        const Buffer in = buffer_random(N * IC, dtype, 81), weight = buffer_random(OC * IC, dtype, 82), bias = buffer_random(OC, dtype, 83);
        const Buffer results[4] = {buffer_random(N * OC, dtype, 84), buffer_random(N * IC, dtype, 85), buffer_random(OC * IC, DTYPE_F32, 86),
                                   buffer_random(OC, DTYPE_F32, 87)};
        const int64_t counts[4] = {N * OC, N * IC, OC * IC, OC};
        cpu_linear_forward(&other, results[0], (Buffer){0}, in, weight, bias, N, IC, OC);
        cpu_linear_backward_input(&other, results[1], results[0], weight, in, N, IC, OC);
        cpu_linear_backward_weight(&other, results[2], results[3], true, results[0], in, N, IC, OC);
        for (int i = 0; i < 4; i++) {
            if (run > 0) same = same && memcmp(first[i].data, results[i].data, (size_t)counts[i] * dtype_bytes(results[i].dtype)) == 0;
            if (run > 0) free(results[i].data);
            if (run == 0) first[i] = results[i];
        }
        free(in.data), free(weight.data), free(bias.data);
        cpu_state_destroy(own);
    }
    for (int i = 0; i < 4; i++) free(first[i].data);
    report(same, "%s (%d, %d, %d): six runs of forward and backward give the same bits", dtype_names[dtype], (int)N, (int)IC, (int)OC);
}

int main(void) {
#ifdef USE_DNNL
    const dnnl_version_t *version = dnnl_version();
    printf("test_matmul: BLAS=%s, oneDNN %d.%d.%d\n", BUILD_BLAS, version->major, version->minor, version->patch);
#else
    printf("test_matmul: BLAS=%s\n", BUILD_BLAS);
#endif
    Device device = {.name = "cpu", .state = cpu_state_create()};
    BlasState *blas = &((CpuState *)device.state)->blas;
    test_products(blas);
    test_blocks(blas);
    test_empty(&device);
    test_linear(&device, DTYPE_F32, DTYPE_F32, 80, 131, 257);
    test_linear(&device, DTYPE_F32, DTYPE_F32, 257, 96, 64);
    test_linear(&device, DTYPE_BF16, DTYPE_BF16, 80, 131, 257);
    test_linear(&device, DTYPE_BF16, DTYPE_BF16, 257, 96, 64);
    test_linear(&device, DTYPE_BF16, DTYPE_F32, 7, 96, 257);
    test_rows(&device, DTYPE_F32, DTYPE_F32, 80, 131, 257, 320);
    test_rows(&device, DTYPE_F32, DTYPE_F32, 33, 64, 41, 43);
    test_rows(&device, DTYPE_BF16, DTYPE_BF16, 80, 131, 257, 320);
    test_rows(&device, DTYPE_BF16, DTYPE_F32, 80, 96, 257, 320);
    test_rows(&device, DTYPE_BF16, DTYPE_F32, 5, 16, 1031, 1088); // more columns than a block of the conversion
    test_gelu_extremes(&device, DTYPE_F32);
    test_gelu_extremes(&device, DTYPE_BF16);
    test_finite_differences(&device);
    test_repeat(&device, DTYPE_F32, 2048, 384, 384);
    test_repeat(&device, DTYPE_BF16, 2048, 384, 384);
    test_repeat(&device, DTYPE_F32, 256, 96, 1009);
    test_repeat(&device, DTYPE_BF16, 256, 96, 1009);
    const double rate = cpu_matmul_rate(&device, DTYPE_F32), rate_bf16 = cpu_matmul_rate(&device, DTYPE_BF16);
    report(rate > 1e8 && rate < 1e15 && rate_bf16 > 1e8 && rate_bf16 < 1e15, "matmul_rate: F32 %.1f GFLOP/s, BF16 %.1f GFLOP/s", rate * 1e-9,
           rate_bf16 * 1e-9);
    cpu_state_destroy(device.state);
    return test_end();
}
