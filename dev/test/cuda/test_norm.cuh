// test_norm.cuh: norm forward and backward, the residual alone and column sums of the CUDA device against the CPU device.
#ifndef TEST_CUDA_TEST_NORM_CUH
#define TEST_CUDA_TEST_NORM_CUH

#include "dev/test/cuda/compare.cuh" // Compare
#include "dev/test/cuda/same.cuh"    // compare_same, both_shifted, both_coarse, both_tokens
#include "llmc/cuda/cuda.cuh"        // CudaDevice
#include "llmc/cuda/reduce.cuh"      // cuda_column_sums_

struct NormShape {
    int64_t N, C, skip; // skip: elements before the first row: an address that is not aligned to 16 bytes
};
// A shape or more for every kernel, with rows that fill their threads and rows that do not.
static const NormShape norm_shapes[] = {
    {3, 8, 0},    {37, 256, 0}, {5, 264, 0},  {9, 512, 0},  {5, 768, 0},   {6, 1000, 0},  {4, 1024, 0},
    {3, 1032, 0}, {3, 1600, 0}, {2, 8192, 0}, {2, 8200, 0}, {1, 16384, 0}, {2, 16392, 0}, {3, 1, 0},
    {40, 37, 0},  {3, 1029, 0}, {2, 2055, 0}, {3, 64, 1},   {2, 1032, 1},  {1200, 16, 0}, {300, 1040, 0},
};

static void norm_forward_case_(Compare *t, NormShape shape, Dtype dtype, int kind, bool branch, bool bias, bool drops) {
    const int64_t N = shape.N, C = shape.C, n = N * C + shape.skip;
    compare_case(t, "forward N %lld, C %lld, skip %lld, kind %d, branch %d, bias %d, dropout %d", (long long)N, (long long)C, (long long)shape.skip,
                 kind, branch, bias, drops);
    // Coarse, so that the sum of in and branch, the latter doubled by dropout, is exact: what follows is that of one input.
    const Both in = both_shifted(both_coarse(t, n, dtype), shape.skip);
    const Both add = branch ? both_shifted(both_coarse(t, n, dtype), shape.skip) : both_absent();
    const Both weight = both_random(t, C, dtype, 1, 0.5), shift = bias ? both_random(t, C, dtype, 0, 0.5) : both_absent(),
               token = both_tokens(t, N);
    const Both out = both_shifted(both_output(t, n, dtype), shape.skip), rstd = both_output(t, N, DTYPE_F32);
    const Both mean = kind == NORM_LAYERNORM ? both_output(t, N, DTYPE_F32) : both_absent();
    const Both sum = branch ? both_shifted(both_output(t, n, dtype), shape.skip) : both_absent();
    const BothScalar<uint64_t> key = both_scalar<uint64_t>(t, 0x0123456789abcdef);
    on_both(t, [&](Device *d, int w) {
        const Dropout dropout = {key[w], 7, drops ? 32768u : 65536u, token[w]};
        d->norm_forward(d, out[w], mean[w], rstd[w], sum[w], in[w], add[w], weight[w], shift[w], &dropout, kind, 1e-5, N, C);
    });
    compare(t, "norm_forward out", out, 2e-6);
    compare(t, "norm_forward rstd", rstd, 1e-6);
    if (kind == NORM_LAYERNORM) compare(t, "norm_forward mean", mean, 1e-6);
    if (branch) {
        compare(t, "norm_forward sum", sum, 0);
        const Both alone = both_shifted(both_output(t, n, dtype), shape.skip);
        on_both(t, [&](Device *d, int w) {
            const Dropout dropout = {key[w], 7, drops ? 32768u : 65536u, token[w]};
            d->residual_forward(d, alone[w], in[w], add[w], &dropout, N, C);
        });
        compare(t, "residual_forward", alone, 0);
    }
    compare_release(t);
}

static void norm_backward_case_(Compare *t, NormShape shape, Dtype dtype, int kind, bool bias, bool add_x, bool add_w, bool in_place) {
    const int64_t N = shape.N, C = shape.C, n = N * C + shape.skip;
    compare_case(t, "backward N %lld, C %lld, skip %lld, kind %d, bias %d, dx %s, dweight %s, in place %d", (long long)N, (long long)C,
                 (long long)shape.skip, kind, bias, add_x ? "+=" : "=", add_w ? "+=" : "=", in_place);
    const Both dout = both_shifted(both_random(t, n, dtype, 0.2, 1), shape.skip), x = both_shifted(both_random(t, n, dtype, 0.5, 1), shape.skip);
    const Both weight = both_random(t, C, dtype, 1, 0.5), rstd = both_random(t, N, DTYPE_F32, 1.5, 0.5);
    const Both mean = kind == NORM_LAYERNORM ? both_random(t, N, DTYPE_F32, 0.5, 0.2) : both_absent();
    const Both dx = in_place ? dout : both_shifted(add_x ? both_random(t, n, dtype, 0, 1) : both_output(t, n, dtype), shape.skip);
    const Both dweight = add_w ? both_random(t, C, DTYPE_F32, 0, 1) : both_output(t, C, DTYPE_F32);
    const Both dbias = !bias ? both_absent() : add_w ? both_random(t, C, DTYPE_F32, 0, 1) : both_output(t, C, DTYPE_F32);
    on_both(t, [&](Device *d, int w) {
        d->norm_backward(d, dx[w], add_x, dweight[w], dbias[w], add_w, dout[w], x[w], mean[w], rstd[w], weight[w], kind, N, C);
    });
    compare(t, "norm_backward dx", dx, 2e-6);
    compare(t, "norm_backward dweight", dweight, 2e-6);
    if (bias) compare(t, "norm_backward dbias", dbias, 2e-6);
    compare_release(t);
}

// The same call twice, and the residual alone against that of norm_forward with a scale that rounds.
static void norm_twice_(Compare *t, NormShape shape, Dtype dtype) {
    const int64_t N = shape.N, C = shape.C, n = N * C;
    compare_case(t, "twice N %lld, C %lld, %s", (long long)N, (long long)C, dtype_names[dtype]);
    const Both in = both_random(t, n, dtype, 0, 1), branch = both_random(t, n, dtype, 0, 1), weight = both_random(t, C, dtype, 1, 1);
    const Both token = both_tokens(t, N), mean = both_output(t, N, DTYPE_F32), rstd = both_output(t, N, DTYPE_F32),
               residual = both_output(t, n, dtype);
    const Dropout dropout = {both_scalar<uint64_t>(t, 99)[1], 3, 60000, token[1]};
    Device *d = t->device[1];
    Both out[2], sum[2], dx[2], dweight[2], dbias[2];
    for (int run = 0; run < 2; run++) {
        out[run] = both_output(t, n, dtype), sum[run] = both_output(t, n, dtype), dx[run] = both_output(t, n, dtype);
        dweight[run] = both_output(t, C, DTYPE_F32), dbias[run] = both_output(t, C, DTYPE_F32);
        d->norm_forward(d, out[run][1], mean[1], rstd[1], sum[run][1], in[1], branch[1], weight[1], both_absent()[1], &dropout, NORM_LAYERNORM,
                        1e-5, N, C);
        d->norm_backward(d, dx[run][1], false, dweight[run][1], dbias[run][1], false, out[run][1], sum[run][1], mean[1], rstd[1], weight[1],
                         NORM_LAYERNORM, N, C);
    }
    d->residual_forward(d, residual[1], in[1], branch[1], &dropout, N, C);
    compare_same(t, "norm_forward twice", out[0][1], out[1][1], n);
    compare_same(t, "norm_backward dx twice", dx[0][1], dx[1][1], n);
    compare_same(t, "norm_backward dweight twice", dweight[0][1], dweight[1][1], C);
    compare_same(t, "norm_backward dbias twice", dbias[0][1], dbias[1][1], C);
    compare_same(t, "residual_forward as norm_forward", residual[1], sum[0][1], n);
    compare_release(t);
}

// A common offset of a thousand times the spread: the variance is taken around the mean.
static void norm_offset_(Compare *t) {
    for (int64_t C : {200, 1024, 1600, 9000, 37}) {
        compare_case(t, "offset, C %lld", (long long)C);
        const int64_t N = 2;
        const Both in = both_random(t, N * C, DTYPE_F32, 1000, 1), weight = both_random(t, C, DTYPE_F32, 1, 0);
        const Both out = both_output(t, N * C, DTYPE_F32), mean = both_output(t, N, DTYPE_F32), rstd = both_output(t, N, DTYPE_F32),
                   none = both_absent();
        on_both(t, [&](Device *d, int w) {
            d->norm_forward(d, out[w], mean[w], rstd[w], none[w], in[w], none[w], weight[w], none[w], nullptr, NORM_LAYERNORM, 1e-5, N, C);
        });
        compare(t, "norm_forward offset rstd", rstd, 2e-6);
        compare(t, "norm_forward offset out", out, 3e-4); // the spacing of floats there is 6e-5
        compare_release(t);
    }
}

static void norm_columns_(Compare *t) {
    for (int64_t N : {0, 1, 70, 1500}) {
        for (int64_t C : {1, 8, 40, 300, 264}) {
            for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) {
                const bool add = (N + C) % 2 == 0;
                compare_case(t, "N %lld, C %lld, %s, %s", (long long)N, (long long)C, add ? "+=" : "=", dtype_names[dtype]);
                const Both in = both_random(t, N * C, dtype, 0.2, 1), old = both_random(t, C, DTYPE_F32, 0, 1);
                const Both got = both_output(t, C, DTYPE_F32);
                const std::vector<float> from = compare_read(t, 0, in[0], N * C), before = compare_read(t, 0, old[0], C);
                std::vector<float> want((size_t)C);
                for (int64_t c = 0; c < C; c++) {
                    double sum = add ? before[(size_t)c] : 0;
                    for (int64_t n = 0; n < N; n++) sum += from[(size_t)(n * C + c)];
                    want[(size_t)c] = (float)sum;
                }
                t->device[0]->copy_in(t->device[0], got[0].data, want.data(), (size_t)C * sizeof(float));
                t->device[1]->cast(t->device[1], got[1], old[1], C);
                cuda_column_sums_(cuda_of(t->device[1]), got[1], add, in[1], N, C);
                compare(t, "column_sums", got, 1e-6);
                compare_release(t);
            }
        }
    }
}

static void test_norm(Compare *t) {
    int turn = 0; // the switches take turns, each in its own rhythm
    for (const NormShape &shape : norm_shapes) {
        for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) {
            for (int kind : {NORM_LAYERNORM, NORM_RMSNORM}) {
                norm_forward_case_(t, shape, dtype, kind, true, turn % 3 != 0, turn % 2 == 0);
                if (shape.N < 100) norm_forward_case_(t, shape, dtype, kind, false, turn % 3 == 0, false);
                norm_backward_case_(t, shape, dtype, kind, turn % 3 != 0, turn % 2 == 0, turn % 5 < 2, turn % 7 == 0 && turn % 2 != 0);
                turn++;
            }
        }
    }
    for (int64_t C : {64, 1032, 16392, 37}) {
        norm_backward_case_(t, {5, C, 0}, DTYPE_F32, NORM_LAYERNORM, true, false, false, true);
        norm_backward_case_(t, {0, C, 0}, DTYPE_F32, NORM_LAYERNORM, true, false, C == 64, false);
    }
    for (NormShape shape : {NormShape{70, 96, 0}, NormShape{9, 1032, 0}, NormShape{70, 37, 0}}) {
        norm_twice_(t, shape, DTYPE_F32);
        norm_twice_(t, shape, DTYPE_BF16);
    }
    norm_offset_(t);
    norm_columns_(t);
}

#endif
