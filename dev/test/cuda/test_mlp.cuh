// test_mlp.cuh: SwiGLU of the CUDA device against the CPU device; GELU, which the CPU has inside its matrix products only, against double
// precision.
#ifndef TEST_CUDA_TEST_MLP_CUH
#define TEST_CUDA_TEST_MLP_CUH

#include "dev/test/cuda/compare.cuh" // Compare
#include "dev/test/cuda/same.cuh"    // both_shifted
#include "llmc/cuda/mlp.cuh"         // cuda_gelu_forward_, cuda_gelu_backward_

static void mlp_swiglu_case_(Compare *t, int64_t N, int64_t FF, int64_t skip, Dtype dtype, bool in_place, double scale) {
    compare_case(t, "N %lld, FF %lld, skip %lld, in place %d, scale %g", (long long)N, (long long)FF, (long long)skip, in_place, scale);
    const Both gate_up = both_shifted(both_random(t, N * 2 * FF + skip, dtype, 0, scale), skip);
    const Both dout = both_random(t, N * FF, dtype, 0, 1), out = both_output(t, N * FF, dtype);
    const Both dgate_up = in_place ? gate_up : both_shifted(both_output(t, N * 2 * FF + skip, dtype), skip);
    on_both(t, [&](Device *d, int w) {
        d->swiglu_forward(d, out[w], gate_up[w], N, FF);
        d->swiglu_backward(d, dgate_up[w], dout[w], gate_up[w], N, FF);
    });
    compare(t, "swiglu_forward", out, 1e-6);
    compare(t, "swiglu_backward", dgate_up, 1e-6);
    compare_release(t);
}

static double mlp_gelu_(double x) { return 0.5 * x * (1.0 + tanh(sqrt(2.0 / 3.14159265358979323846) * (x + 0.044715 * x * x * x))); }
static double mlp_gelu_derivative_(double x) {
    const double a = sqrt(2.0 / 3.14159265358979323846), h = tanh(a * (x + 0.044715 * x * x * x));
    return 0.5 * (1.0 + h) + 0.5 * x * (1.0 - h * h) * a * (1.0 + 3 * 0.044715 * x * x);
}

static void mlp_gelu_case_(Compare *t, int64_t n, int64_t skip, Dtype dtype, double scale) {
    compare_case(t, "n %lld, skip %lld, scale %g", (long long)n, (long long)skip, scale);
    const Both in = both_shifted(both_random(t, n + skip, dtype, 0, scale), skip), out = both_shifted(both_output(t, n + skip, dtype), skip);
    const Both din = both_shifted(both_random(t, n + skip, dtype, 0, 1), skip);
    const std::vector<float> x = compare_read(t, 0, in[0], n), d = compare_read(t, 0, din[0], n);
    std::vector<float> gelu((size_t)n), product((size_t)n);
    for (size_t i = 0; i < (size_t)n; i++) gelu[i] = (float)mlp_gelu_(x[i]), product[i] = (float)(d[i] * mlp_gelu_derivative_(x[i]));
    t->device[0]->copy_in(t->device[0], out[0].data, gelu.data(), (size_t)n * sizeof(float));
    t->device[0]->copy_in(t->device[0], din[0].data, product.data(), (size_t)n * sizeof(float));
    cuda_gelu_forward_(cuda_of(t->device[1]), out[1], in[1], n);
    cuda_gelu_backward_(cuda_of(t->device[1]), din[1], in[1], n);
    compare(t, "gelu_forward", out, 2e-6);
    compare(t, "gelu_backward", din, 4e-6);
    compare_release(t);
}

// Far from zero nothing overflows, and NaN goes through.
static void mlp_limits_(Compare *t, Dtype dtype) {
    const std::vector<float> in = {-1e30f, -20480, -88, 0, 88, 20480, 1e30f, NAN}, gelu = {0, 0, 0, 0, 88, 20480, 1e30f, NAN};
    const std::vector<float> derivative = {0, 0, 0, 0.5, 1, 1, 1, NAN};
    const int64_t n = (int64_t)in.size();
    std::vector<float> gate_up = in;
    gate_up.insert(gate_up.end(), in.size(), 1.0f);
    compare_case(t, "limits, %s", dtype_names[dtype]);
    const Both x = both_values(t, in, dtype), ones = both_values(t, std::vector<float>((size_t)n, 1.0f), dtype), out = both_output(t, n, dtype);
    const Both din = both_values(t, std::vector<float>((size_t)n, 1.0f), dtype), both = both_values(t, gate_up, dtype),
               silu = both_output(t, n, dtype);
    Device *d = t->device[1];
    cuda_gelu_forward_(cuda_of(d), out[1], x[1], n);
    cuda_gelu_backward_(cuda_of(d), din[1], x[1], n);
    d->swiglu_forward(d, silu[1], both[1], 1, n);
    d->swiglu_backward(d, both[1], ones[1], both[1], 1, n);
    const std::vector<float> got[4] = {compare_read(t, 1, out[1], n), compare_read(t, 1, silu[1], n), compare_read(t, 1, din[1], n),
                                       compare_read(t, 1, both[1], n)};
    for (int k = 0; k < 4; k++) {
        const std::vector<float> &want = k < 2 ? gelu : derivative;
        for (size_t i = 0; i < want.size(); i++) {
            const double error =
                std::isnan(want[i]) ? !std::isnan(got[k][i]) : fabs((double)got[k][i] / (want[i] == 0 ? 1 : want[i]) - (want[i] != 0));
            compare_record(t, "gelu and swiglu far from zero", error, 4e-3); // the spacing of bf16
        }
    }
    compare_release(t);
}

static void test_mlp(Compare *t) {
    const int64_t sizes[][2] = {{1, 1}, {7, 80}, {3, 131}, {2, 1027}, {5, 4096}, {0, 64}, {17000, 1}};
    for (const int64_t(&size)[2] : sizes) {
        for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) {
            for (int variant = 0; variant < 4; variant++) {
                mlp_swiglu_case_(t, size[0], size[1], size[1] == 80 ? variant : 0, dtype, variant % 2, variant < 2 ? 2 : 12);
            }
        }
    }
    for (int64_t n : {1, 8, 1000, 1003, 140000}) {
        for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) {
            mlp_gelu_case_(t, n, 0, dtype, 4);
            mlp_gelu_case_(t, n, n == 1000 ? 1 : 0, dtype, 15);
        }
    }
    mlp_limits_(t, DTYPE_F32);
    mlp_limits_(t, DTYPE_BF16);
}

#endif
