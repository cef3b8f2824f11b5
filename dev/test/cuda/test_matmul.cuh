// test_matmul.cuh: linear layers of the CUDA device against the CPU device. Products of cuBLASLt, its epilogues, the kernels that stand in for
// them, and the plain kernel that takes what cuBLASLt does not (here: addresses that are not aligned to 16 bytes).
#ifndef TEST_CUDA_TEST_MATMUL_CUH
#define TEST_CUDA_TEST_MATMUL_CUH

#include "dev/test/cuda/compare.cuh" // Compare
#include "llmc/cuda/product.cuh"     // own_product
#include "llmc/cuda/reduce.cuh"      // cuda_column_sums_

// Sums of k products in fp32 in another order: some ulps of the largest result.
static constexpr double MATMUL_BOUND = 3e-6;
// GELU of a value that was rounded to bf16: its slope of up to 1.13 times the first rounding, then the second. In units of half an ulp of the
// largest value, not of the largest rounding that was seen: of few values that may be small by chance.
static constexpr double MATMUL_GELU_FACTOR = 2.2, MATMUL_HALF_ULP = 0x1p-9;
static double matmul_gelu_bound(Dtype dtype) { return dtype == DTYPE_BF16 ? MATMUL_HALF_ULP : MATMUL_BOUND; }

struct MatmulShape {
    int64_t N, IC, OC;
};
static const MatmulShape matmul_shapes[] = {{1, 1, 1},    {1, 16, 8},   {3, 5, 7},     {17, 8, 24}, {33, 64, 40},
                                            {40, 33, 65}, {37, 96, 66}, {70, 72, 128}, {9, 4, 1821}};

struct MatmulTypes {
    Dtype in, out;
};
static const MatmulTypes matmul_types[] = {{DTYPE_F32, DTYPE_F32}, {DTYPE_BF16, DTYPE_BF16}, {DTYPE_BF16, DTYPE_F32}};

static Both both_at(const Both &both, int64_t skip) { return {{buffer_at(both[0], skip), buffer_at(both[1], skip)}, both.n - skip}; }

static Both matmul_input_(Compare *t, int64_t n, int64_t skip, Dtype dtype, double scale) {
    return both_at(both_random(t, n + skip, dtype, 0, scale), skip);
}
static Both matmul_output_(Compare *t, int64_t n, int64_t skip, Dtype dtype) { return both_at(both_output(t, n + skip, dtype), skip); }

static void matmul_forward_(Compare *t, MatmulShape s, MatmulTypes types, int64_t skip) {
    for (int bias = 0; bias < 2; bias++) {
        for (int gelu = 0; gelu < 2; gelu++) {
            compare_case(t, "N %lld IC %lld OC %lld, %s to %s, skip %lld, bias %d, gelu %d", (long long)s.N, (long long)s.IC, (long long)s.OC,
                         dtype_names[types.in], dtype_names[types.out], (long long)skip, bias, gelu);
            const Both in = matmul_input_(t, s.N * s.IC, skip, types.in, 1), weight = matmul_input_(t, s.OC * s.IC, skip, types.in, 1);
            const Both b = bias ? matmul_input_(t, s.OC, skip, types.in, 2) : both_absent();
            const Both out = matmul_output_(t, s.N * s.OC, skip, types.out);
            const Both activated = gelu ? matmul_output_(t, s.N * s.OC, skip, types.out) : both_absent();
            on_both(t, [&](Device *d, int w) { d->linear_forward(d, out[w], activated[w], in[w], weight[w], b[w], s.N, s.IC, s.OC); });
            compare(t, "linear_forward out", out, MATMUL_BOUND);
            if (gelu) compare(t, "linear_forward gelu_out", activated, matmul_gelu_bound(types.out), MATMUL_GELU_FACTOR);
            compare_release(t);
        }
    }
}

static void matmul_backward_input_(Compare *t, MatmulShape s, Dtype dtype, int64_t skip) {
    for (int gelu = 0; gelu < 2; gelu++) {
        compare_case(t, "N %lld IC %lld OC %lld, %s, skip %lld, gelu %d", (long long)s.N, (long long)s.IC, (long long)s.OC, dtype_names[dtype],
                     (long long)skip, gelu);
        const Both dout = matmul_input_(t, s.N * s.OC, skip, dtype, 1), weight = matmul_input_(t, s.OC * s.IC, skip, dtype, 1);
        const Both gelu_in = gelu ? matmul_input_(t, s.N * s.IC, skip, dtype, 3) : both_absent();
        const Both din = matmul_output_(t, s.N * s.IC, skip, dtype);
        on_both(t, [&](Device *d, int w) { d->linear_backward_input(d, din[w], dout[w], weight[w], gelu_in[w], s.N, s.IC, s.OC); });
        if (gelu) compare(t, "linear_backward_input gelu", din, matmul_gelu_bound(dtype), MATMUL_GELU_FACTOR);
        if (!gelu) compare(t, "linear_backward_input", din, MATMUL_BOUND);
        compare_release(t);
    }
}

static void matmul_backward_weight_(Compare *t, MatmulShape s, Dtype dtype, int64_t skip) {
    for (int bias = 0; bias < 2; bias++) {
        for (int accumulate = 0; accumulate < 2; accumulate++) {
            compare_case(t, "N %lld IC %lld OC %lld, %s, skip %lld, bias %d, accumulate %d", (long long)s.N, (long long)s.IC, (long long)s.OC,
                         dtype_names[dtype], (long long)skip, bias, accumulate);
            const Both dout = matmul_input_(t, s.N * s.OC, skip, dtype, 1), in = matmul_input_(t, s.N * s.IC, skip, dtype, 1);
            const auto gradient = [&](int64_t n) {
                return accumulate ? matmul_input_(t, n, skip, DTYPE_F32, 3) : matmul_output_(t, n, skip, DTYPE_F32);
            };
            const Both dweight = gradient(s.OC * s.IC), dbias = bias ? gradient(s.OC) : both_absent();
            // twice: the second finds the plans and must accumulate as the first, which timed them
            for (int call = 0; call < 2; call++)
                on_both(t, [&](Device *d, int w) {
                    d->linear_backward_weight(d, dweight[w], dbias[w], accumulate != 0, dout[w], in[w], s.N, s.IC, s.OC);
                });
            compare(t, "linear_backward_weight dweight", dweight, MATMUL_BOUND);
            if (bias) compare(t, "linear_backward_weight dbias", dbias, MATMUL_BOUND);
            compare_release(t);
        }
    }
}

// Plain products of good sizes and addresses are the library's: no kernel of ours starts.
static void matmul_library_(Compare *t) {
    const int64_t N = 32, IC = 48, OC = 64;
    const Buffer none = {};
    Device *d = t->device[1];
    for (const MatmulTypes &types : matmul_types) {
        compare_case(t, "%s to %s", dtype_names[types.in], dtype_names[types.out]);
        const Both in = both_random(t, N * IC, types.in, 0, 1), weight = both_random(t, OC * IC, types.in, 0, 1),
                   out = both_output(t, N * OC, types.out);
        const Both dout = both_random(t, N * OC, types.in, 0, 1), din = both_output(t, N * IC, types.in),
                   dweight = both_output(t, OC * IC, DTYPE_F32);
        const int64_t before = cuda_of(d)->launches;
        d->linear_forward(d, out[1], none, in[1], weight[1], none, N, IC, OC);
        d->linear_backward_input(d, din[1], dout[1], weight[1], none, N, IC, OC);
        d->linear_backward_weight(d, dweight[1], none, false, dout[1], in[1], N, IC, OC);
        compare_record(t, "linear, kernels beside the library's", (double)(cuda_of(d)->launches - before), 0);
        compare_release(t);
    }
}

// The plain kernel in every form and mixture of types, which the library may leave it none of.
static void matmul_own_(Compare *t, MatmulShape s, Dtype in, Dtype out, int64_t skip) {
    const Buffer none = {};
    for (ProductForm form : {PRODUCT_NT, PRODUCT_NN, PRODUCT_TN}) {
        for (int accumulate = 0; accumulate < (form == PRODUCT_TN ? 2 : 1); accumulate++) {
            compare_case(t, "M %lld N %lld K %lld, form %d, %s to %s, skip %lld, accumulate %d", (long long)s.N, (long long)s.OC, (long long)s.IC,
                         form, dtype_names[in], dtype_names[out], (long long)skip, accumulate);
            const int64_t M = s.N, N = s.OC, K = s.IC;
            const Both left = matmul_input_(t, M * K, skip, in, 1), right = matmul_input_(t, K * N, skip, in, 1);
            const Both result = accumulate ? matmul_input_(t, M * N, skip, out, 3) : matmul_output_(t, M * N, skip, out);
            Device *cpu = t->device[0];
            if (form == PRODUCT_NT) cpu->linear_forward(cpu, result[0], none, left[0], right[0], none, M, K, N);
            if (form == PRODUCT_NN) cpu->linear_backward_input(cpu, result[0], left[0], right[0], none, M, N, K);
            if (form == PRODUCT_TN) cpu->linear_backward_weight(cpu, result[0], none, accumulate != 0, left[0], right[0], K, N, M);
            const Product product = {form, result[1], left[1], right[1], M, N, K, accumulate != 0, 0, none, none};
            own_product(cuda_of(t->device[1]), &product);
            compare(t, "own_product", result, MATMUL_BOUND);
            compare_release(t);
        }
    }
}

// Rows of outputs and of gradients of outputs that are apart: NaN lies between them.
static std::vector<float> matmul_random_values_(Compare *t, int64_t n) {
    std::vector<float> values((size_t)n);
    for (float &value : values) value = (float)compare_uniform(t);
    return values;
}

static void matmul_rows_(Compare *t, MatmulShape s, int64_t row, MatmulTypes types) {
    const Buffer none = {};
    const std::vector<float> nothing((size_t)(s.N * s.OC), NAN);
    for (int bias = 0; bias < 2; bias++) {
        compare_case(t, "N %lld IC %lld OC %lld, rows %lld apart, %s to %s, bias %d", (long long)s.N, (long long)s.IC, (long long)s.OC,
                     (long long)row, dtype_names[types.in], dtype_names[types.out], bias);
        const Both in = matmul_input_(t, s.N * s.IC, 0, types.in, 1), weight = matmul_input_(t, s.OC * s.IC, 0, types.in, 1);
        const Both b = bias ? matmul_input_(t, s.OC, 0, types.in, 2) : both_absent();
        const Both out = both_rows(t, nothing, s.OC, row, types.out);
        on_both(t, [&](Device *d, int w) { d->linear_forward(d, out[w], none, in[w], weight[w], b[w], s.N, s.IC, s.OC); });
        compare_rows(t, "linear_forward out, rows apart", out, s.OC, MATMUL_BOUND);
        compare_release(t);
    }
    if (types.out != types.in) return;
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        compare_case(t, "N %lld IC %lld OC %lld, rows %lld apart, %s, accumulate %d", (long long)s.N, (long long)s.IC, (long long)s.OC,
                     (long long)row, dtype_names[types.in], accumulate);
        const Both dout = both_rows(t, matmul_random_values_(t, s.N * s.OC), s.OC, row, types.in);
        const Both in = matmul_input_(t, s.N * s.IC, 0, types.in, 1), weight = matmul_input_(t, s.OC * s.IC, 0, types.in, 1);
        const Both din = matmul_output_(t, s.N * s.IC, 0, types.in);
        const Both dweight = accumulate ? both_random(t, s.OC * s.IC, DTYPE_F32, 0, 3) : both_output(t, s.OC * s.IC, DTYPE_F32);
        const Both dbias = accumulate ? both_random(t, s.OC, DTYPE_F32, 0, 3) : both_output(t, s.OC, DTYPE_F32);
        const Both alone = both_output(t, s.OC * s.IC, DTYPE_F32);
        on_both(t, [&](Device *d, int w) {
            d->linear_backward_input(d, din[w], dout[w], weight[w], none, s.N, s.IC, s.OC);
            d->linear_backward_weight(d, dweight[w], dbias[w], accumulate != 0, dout[w], in[w], s.N, s.IC, s.OC);
            d->linear_backward_weight(d, alone[w], none, false, dout[w], in[w], s.N, s.IC, s.OC); // without the sums' epilogue
        });
        compare(t, "linear_backward_input, rows apart", din, MATMUL_BOUND);
        compare(t, "linear_backward_weight dweight, rows apart", dweight, MATMUL_BOUND);
        compare(t, "linear_backward_weight dweight, rows apart", alone, MATMUL_BOUND);
        compare(t, "linear_backward_weight dbias, rows apart", dbias, MATMUL_BOUND);
        compare_release(t);
    }
    compare_case(t, "N %lld OC %lld, rows %lld apart, %s", (long long)s.N, (long long)s.OC, (long long)row, dtype_names[types.in]);
    const Both in = both_rows(t, matmul_random_values_(t, s.N * s.OC), s.OC, row, types.in), sums = both_output(t, s.OC, DTYPE_F32);
    const Both other = matmul_input_(t, s.N * s.IC, 0, types.in, 1), dweight = both_output(t, s.OC * s.IC, DTYPE_F32);
    t->device[0]->linear_backward_weight(t->device[0], dweight[0], sums[0], false, in[0], other[0], s.N, s.IC, s.OC);
    cuda_column_sums_(cuda_of(t->device[1]), sums[1], false, in[1], s.N, s.OC); // our kernel, also where the epilogue wins
    compare(t, "sums of columns, rows apart", sums, MATMUL_BOUND);
    compare_release(t);
}

// The plain kernel's rows that are apart: of out in the form of forward, of left in the others.
static void matmul_own_rows_(Compare *t, Dtype dtype) {
    const Buffer none = {};
    const int64_t M = 34, N = 37, K = 41, row = 67;
    for (ProductForm form : {PRODUCT_NT, PRODUCT_NN, PRODUCT_TN}) {
        compare_case(t, "M %lld N %lld K %lld, form %d, rows %lld apart, %s", (long long)M, (long long)N, (long long)K, form, (long long)row,
                     dtype_names[dtype]);
        const bool forward = form == PRODUCT_NT;
        const Both left =
            forward ? matmul_input_(t, M * K, 0, dtype, 1) : both_rows(t, matmul_random_values_(t, M * K), form == PRODUCT_TN ? M : K, row, dtype);
        const Both right = matmul_input_(t, K * N, 0, dtype, 1);
        const Both result = forward ? both_rows(t, std::vector<float>((size_t)(M * N), NAN), N, row, DTYPE_F32)
                                    : matmul_output_(t, M * N, 0, form == PRODUCT_TN ? DTYPE_F32 : dtype);
        Device *cpu = t->device[0];
        if (form == PRODUCT_NT) cpu->linear_forward(cpu, result[0], none, left[0], right[0], none, M, K, N);
        if (form == PRODUCT_NN) cpu->linear_backward_input(cpu, result[0], left[0], right[0], none, M, N, K);
        if (form == PRODUCT_TN) cpu->linear_backward_weight(cpu, result[0], none, false, left[0], right[0], K, N, M);
        const Product product = {form, result[1], left[1], right[1], M, N, K, false, 0, none, none};
        own_product(cuda_of(t->device[1]), &product);
        if (forward) compare_rows(t, "own_product, rows apart", result, N, MATMUL_BOUND);
        if (!forward) compare(t, "own_product, rows apart", result, MATMUL_BOUND);
        compare_release(t);
    }
}

// The same call twice: the same bits.
static void matmul_determinism_(Compare *t) {
    const MatmulShape s = {70, 72, 128};
    compare_case(t, "N %lld IC %lld OC %lld", (long long)s.N, (long long)s.IC, (long long)s.OC);
    Device *d = t->device[1];
    const Buffer none = {};
    const Both in = both_random(t, s.N * s.IC, DTYPE_BF16, 0, 1), weight = both_random(t, s.OC * s.IC, DTYPE_BF16, 0, 1);
    const Both dout = both_random(t, s.N * s.OC, DTYPE_BF16, 0, 1);
    std::vector<float> first;
    for (int call = 0; call < 2; call++) {
        const Both out = both_output(t, s.N * s.OC, DTYPE_BF16), dweight = both_output(t, s.OC * s.IC, DTYPE_F32),
                   dbias = both_output(t, s.OC, DTYPE_F32);
        d->linear_forward(d, out[1], none, in[1], weight[1], none, s.N, s.IC, s.OC);
        d->linear_backward_weight(d, dweight[1], dbias[1], false, dout[1], in[1], s.N, s.IC, s.OC);
        std::vector<float> all = compare_read(t, 1, out[1], out.n);
        for (const Both &part : {dweight, dbias}) {
            const std::vector<float> values = compare_read(t, 1, part[1], part.n);
            all.insert(all.end(), values.begin(), values.end());
        }
        if (call == 0) first = all;
        compare_record(t, "linear, same bits twice", memcmp(first.data(), all.data(), all.size() * 4) != 0, 0);
    }
    compare_release(t);
}

// No tokens: outputs are empty, gradients of weights zero or unchanged.
static void matmul_empty_(Compare *t) {
    const Buffer none = {};
    for (int accumulate = 0; accumulate < 2; accumulate++) {
        compare_case(t, "no tokens, accumulate %d", accumulate);
        const Both dweight = accumulate ? both_random(t, 15, DTYPE_F32, 0, 1) : both_output(t, 15, DTYPE_F32);
        const Both dbias = accumulate ? both_random(t, 3, DTYPE_F32, 0, 1) : both_output(t, 3, DTYPE_F32);
        const Both some = both_random(t, 15, DTYPE_F32, 0, 1);
        on_both(t, [&](Device *d, int w) {
            d->linear_forward(d, some[w], none, some[w], some[w], none, 0, 5, 3);
            d->linear_backward_input(d, some[w], some[w], some[w], none, 0, 5, 3);
            d->linear_backward_weight(d, dweight[w], dbias[w], accumulate != 0, some[w], some[w], 0, 5, 3);
        });
        compare(t, "linear_backward_weight, no tokens", dweight, 0);
        compare(t, "linear_backward_weight, no tokens", dbias, 0);
        compare_release(t);
    }
}

static void test_matmul(Compare *t) {
    for (int64_t skip : {0, 1}) {
        for (const MatmulShape &shape : matmul_shapes) {
            if (skip > 0 && shape.N * shape.IC * shape.OC > 20000) continue; // the simulator is slow
            for (const MatmulTypes &types : matmul_types) matmul_forward_(t, shape, types, skip);
            for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) {
                matmul_backward_input_(t, shape, dtype, skip);
                matmul_backward_weight_(t, shape, dtype, skip);
            }
        }
    }
    for (Dtype in : {DTYPE_F32, DTYPE_BF16})
        for (Dtype out : {DTYPE_F32, DTYPE_BF16})
            for (int64_t skip : {0, 1}) matmul_own_(t, skip == 0 ? MatmulShape{33, 70, 65} : MatmulShape{5, 3, 40}, in, out, skip);
    for (const MatmulTypes &types : matmul_types) {
        matmul_rows_(t, {3, 5, 7}, 9, types);
        matmul_rows_(t, {33, 64, 40}, 64, types);
        matmul_rows_(t, {70, 72, 127}, 128, types);
        matmul_rows_(t, {9, 8, 821}, 832, types);
    }
    for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) matmul_own_rows_(t, dtype);
    matmul_library_(t);
    matmul_determinism_(t);
    matmul_empty_(t);
    compare_case(t, "fp32, bf16");
    for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) {
        const double rate = t->device[1]->matmul_rate(t->device[1], dtype);
        compare_record(t, "matmul_rate", rate > 0 && std::isfinite(rate) ? 0 : 1, 0);
    }
}

#endif
