// matmul.h: linear layers of the CPU device: the product (blas.h) with bias, GELU and their gradients around it. Signatures
// and meaning are those of llmc/device.h. The GELU passes read what the product has just written: at the sizes that a CPU
// trains it is still in the cache, so they are separate loops.
#ifndef LLMC_CPU_MATMUL_H
#define LLMC_CPU_MATMUL_H

#include "llmc/base.h"      // clock_ms, ceil_div
#include "llmc/cpu/blas.h"  // blas_matmul
#include "llmc/cpu/math.h"  // cpu_gelu
#include "llmc/cpu/state.h" // CpuState
#include "llmc/device.h"    // Device, Buffer

static inline BlasState *cpu_blas_(Device *device) { return &((CpuState *)device->state)->blas; }

// One loop per storage type, so that each is vector code; n elements in slices of a few KB.
enum { CPU_SLICE = 4096, CPU_BIAS_COLUMNS = 64, CPU_BIAS_ROWS = 32 };

// out (n) = gelu(in), both of one type
static inline void cpu_gelu_pass_(Buffer out, Buffer in, int64_t n) {
#pragma omp parallel for schedule(static)
    for (int64_t begin = 0; begin < n; begin += CPU_SLICE) {
        const int64_t end = min_i64(begin + CPU_SLICE, n);
        if (in.dtype == DTYPE_BF16) {
            const uint16_t *x = in.data;
            uint16_t *y = out.data;
#pragma omp simd
            for (int64_t i = begin; i < end; i++) y[i] = cpu_to_bf16(cpu_gelu(bf16_to_f32(x[i])));
        } else {
            const float *x = in.data;
            float *y = out.data;
#pragma omp simd
            for (int64_t i = begin; i < end; i++) y[i] = cpu_gelu(x[i]);
        }
    }
}

// gradient (n) *= gelu'(in)
static inline void cpu_gelu_derivative_pass_(Buffer gradient, Buffer in, int64_t n) {
#pragma omp parallel for schedule(static)
    for (int64_t begin = 0; begin < n; begin += CPU_SLICE) {
        const int64_t end = min_i64(begin + CPU_SLICE, n);
        if (in.dtype == DTYPE_BF16) {
            const uint16_t *x = in.data;
            uint16_t *g = gradient.data;
#pragma omp simd
            for (int64_t i = begin; i < end; i++) g[i] = cpu_to_bf16(bf16_to_f32(g[i]) * cpu_gelu_derivative(bf16_to_f32(x[i])));
        } else {
            const float *x = in.data;
            float *g = gradient.data;
#pragma omp simd
            for (int64_t i = begin; i < end; i++) g[i] *= cpu_gelu_derivative(x[i]);
        }
    }
}

// sums (columns) fp32 of `rows` rows of dout that are `stride` apart; columns <= CPU_BIAS_COLUMNS
static inline void cpu_column_sums_(float *sums, Buffer dout, int64_t stride, int64_t rows, int64_t columns) {
    for (int64_t j = 0; j < columns; j++) sums[j] = 0.0f;
    for (int64_t i = 0; i < rows; i++) {
        if (dout.dtype == DTYPE_BF16) {
            const uint16_t *row = (const uint16_t *)dout.data + i * stride;
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) sums[j] += bf16_to_f32(row[j]);
        } else {
            const float *row = (const float *)dout.data + i * stride;
#pragma omp simd
            for (int64_t j = 0; j < columns; j++) sums[j] += row[j];
        }
    }
}

// dbias (OC) = or += column sums of dout (N, OC; rows may be apart). A thread owns whole blocks of columns and adds their rows in order: 32 at
// a time in fp32, the groups in double, so that the bits depend on nothing but the data.
static inline void cpu_bias_backward_(float *dbias, bool accumulate, Buffer dout, int64_t N, int64_t OC) {
    const int64_t stride = buffer_row(dout, OC);
#pragma omp parallel for schedule(static)
    for (int64_t j0 = 0; j0 < OC; j0 += CPU_BIAS_COLUMNS) {
        const int64_t columns = min_i64(CPU_BIAS_COLUMNS, OC - j0);
        double total[CPU_BIAS_COLUMNS] = {0};
        float sums[CPU_BIAS_COLUMNS];
        for (int64_t i0 = 0; i0 < N; i0 += CPU_BIAS_ROWS) {
            cpu_column_sums_(sums, buffer_at(dout, i0 * stride + j0), stride, min_i64(CPU_BIAS_ROWS, N - i0), columns);
            for (int64_t j = 0; j < columns; j++) total[j] += sums[j];
        }
        for (int64_t j = 0; j < columns; j++) dbias[j0 + j] = (float)(total[j] + (accumulate ? dbias[j0 + j] : 0.0));
    }
}

// out (N, OC; rows may be apart, without gelu_out) = in (N, IC) x weight (OC, IC)^T + bias (OC, optional); gelu_out (N, OC, optional) = gelu(out)
static inline void cpu_linear_forward(Device *device, Buffer out, Buffer gelu_out, Buffer in, Buffer weight, Buffer bias, int64_t N, int64_t IC,
                                      int64_t OC) {
    blas_matmul(cpu_blas_(device), BLAS_NT, out, in, weight, bias, false, N, OC, IC);
    if (gelu_out.data != NULL) cpu_gelu_pass_(gelu_out, out, N * OC);
}

// din (N, IC) = dout (N, OC; rows may be apart) x weight (OC, IC), times gelu'(gelu_in (N, IC)) when that is given
static inline void cpu_linear_backward_input(Device *device, Buffer din, Buffer dout, Buffer weight, Buffer gelu_in, int64_t N, int64_t IC,
                                             int64_t OC) {
    blas_matmul(cpu_blas_(device), BLAS_NN, din, dout, weight, (Buffer){0}, false, N, IC, OC);
    if (gelu_in.data != NULL) cpu_gelu_derivative_pass_(din, gelu_in, N * IC);
}

// dweight (OC, IC) F32 = or += dout^T x in; dbias (OC) F32, optional: = or += column sums of dout (N, OC; rows may be apart)
static inline void cpu_linear_backward_weight(Device *device, Buffer dweight, Buffer dbias, bool accumulate, Buffer dout, Buffer in, int64_t N,
                                              int64_t IC, int64_t OC) {
    if (dbias.data != NULL) cpu_bias_backward_(dbias.data, accumulate, dout, N, OC);
    blas_matmul(cpu_blas_(device), BLAS_TN, dweight, dout, in, (Buffer){0}, accumulate, OC, IC, N);
}

// FLOP/s of a product of 512 x 1024 x 1024, the best of a few after a warm-up. Runs outside the training loop: it allocates.
static inline double cpu_matmul_rate(Device *device, Dtype dtype) {
    const int64_t N = 512, C = 1024;
    const Buffer in = buffer_of(base_alloc((size_t)(N * C) * dtype_bytes(dtype)), dtype);
    const Buffer weight = buffer_of(base_alloc((size_t)(C * C) * dtype_bytes(dtype)), dtype);
    const Buffer out = buffer_of(base_alloc((size_t)(N * C) * dtype_bytes(dtype)), dtype);
    memset(in.data, 0x3c, (size_t)(N * C) * dtype_bytes(dtype)); // 0.0115 in either type: zeros would let the clock rise
    memset(weight.data, 0x3c, (size_t)(C * C) * dtype_bytes(dtype));
    double best_ms = 1e30;
    for (int run = 0; run < 6; run++) {
        const double start_ms = clock_ms();
        cpu_linear_forward(device, out, (Buffer){0}, in, weight, (Buffer){0}, N, C, C);
        const double ms = clock_ms() - start_ms;
        if (run > 0 && ms < best_ms) best_ms = ms;
    }
    free(in.data), free(weight.data), free(out.data);
    return 2.0 * (double)N * (double)C * (double)C / (best_ms * 1e-3);
}

#endif
