// test_mlp.c: SwiGLU forward and backward against double precision and finite differences.
#include "dev/test/ops.h" // ops_random, ops_compare
#include "llmc/cpu/mlp.h" // cpu_swiglu_forward, cpu_swiglu_backward
#include <math.h>         // exp

static double silu(double x) { return x / (1 + exp(-x)); }

typedef struct {
    OpsWorst out, dgate_up, differences;
} Worst;

static void one_case(Worst *worst, Dtype dtype, bool in_place, double scale, int64_t N, int64_t FF) {
    Buffer gate_up = ops_random(N * 2 * FF, dtype, 1, 0, scale), dout = ops_random(N * FF, dtype, 2, 0, 1), out = ops_new(N * FF, dtype);
    double *want = base_new((size_t)(N * FF), 8), *exact = base_new((size_t)(2 * N * FF), 8), *numeric = base_new((size_t)(2 * N * FF), 8);
    for (int64_t n = 0; n < N; n++) {
        for (int64_t f = 0; f < FF; f++) {
            const int64_t at = n * 2 * FF + f;
            const double g = ops_at(gate_up, at), u = ops_at(gate_up, at + FF), d = ops_at(dout, n * FF + f), s = 1 / (1 + exp(-g)), h = 1e-5;
            want[n * FF + f] = silu(g) * u;
            exact[at] = d * u * (s + g * s * (1 - s));
            exact[at + FF] = d * silu(g);
            numeric[at] = d * u * (silu(g + h) - silu(g - h)) / (2 * h);
            numeric[at + FF] = d * silu(g) * ((u + h) - (u - h)) / (2 * h);
        }
    }
    cpu_swiglu_forward(NULL, out, gate_up, N, FF);
    Buffer to = in_place ? gate_up : ops_new(N * 2 * FF, dtype);
    cpu_swiglu_backward(NULL, to, dout, gate_up, N, FF);
    ops_compare(&worst->out, out, want, N * FF);
    ops_compare(&worst->dgate_up, to, exact, 2 * N * FF);
    if (dtype == DTYPE_F32) ops_compare(&worst->differences, to, numeric, 2 * N * FF);
    if (!in_place) free(to.data);
    free(gate_up.data), free(dout.data), free(out.data), free(want), free(exact), free(numeric);
}

static void test_extremes(void) {
    const float gates[] = {-20000, -88, -87, 0, 87, 88, 20000, NAN};
    enum { FF = 8 };
    Buffer gate_up = ops_new(2 * FF, DTYPE_F32), dout = ops_random(FF, DTYPE_F32, 0, 1, 0), out = ops_new(FF, DTYPE_F32),
           d = ops_new(2 * FF, DTYPE_F32);
    for (int i = 0; i < FF; i++) ((float *)gate_up.data)[i] = gates[i], ((float *)gate_up.data)[FF + i] = 1;
    cpu_swiglu_forward(NULL, out, gate_up, 1, FF);
    cpu_swiglu_backward(NULL, d, dout, gate_up, 1, FF);
    const float *y = out.data, *dy = d.data;
    for (int i = 0; i < FF - 1; i++) check(isfinite(y[i]) && isfinite(dy[i]) && isfinite(dy[FF + i]), "gate %g is finite", (double)gates[i]);
    check(fabsf(y[0]) < 1e-30f && y[6] == 20000 && y[3] == 0 && dy[3] == 0.5f && dy[6] == 1 && fabsf(dy[0]) < 1e-30f, "limits of silu");
    check(isnan(y[7]) && isnan(dy[7]) && isnan(dy[FF + 7]), "NaN goes through");
    free(gate_up.data), free(dout.data), free(out.data), free(d.data);
}

int main(void) {
    static const int64_t sizes[][2] = {{1, 1}, {7, 80}, {3, 131}, {2, 1027}, {1, 3000}, {0, 64}};
    static const Dtype dtypes[] = {DTYPE_F32, DTYPE_BF16};
    Worst worst = {0};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (int variant = 0; variant < 8; variant++) {
            one_case(&worst, dtypes[variant & 1], variant & 2, variant & 4 ? 12 : 2, sizes[s][0], sizes[s][1]);
        }
    }
    printf("swiglu\n");
    ops_report(&worst.out, 1e-6, "out");
    ops_report(&worst.dgate_up, 1e-6, "dgate_up");
    ops_report(&worst.differences, 1e-6, "dgate_up, finite differences");
    test_extremes();
    return test_end();
}
