// norm.h: residual + dropout + layernorm or rmsnorm, fused: forward and backward, on the CPU; the residual alone. Any C, any N.
// Statistics: blocks summed in fp32 vector lanes, blocks in double; the variance is taken around the mean in a second walk
// over the row (which is in cache), so that a large common offset costs no digits.
// Results do not depend on the number of threads.
#ifndef LLMC_CPU_NORM_H
#define LLMC_CPU_NORM_H

#include "llmc/cpu/block.h"   // cpu_block_in, CPU_SCRATCH
#include "llmc/cpu/dropout.h" // cpu_dropout_mask
#include "llmc/device.h"      // NORM_LAYERNORM
#include <math.h>             // sqrt
#include <omp.h>              // omp_get_max_threads

// x = in + dropout(branch) of one row, stored to sum and read back, so that the statistics see what backward will see.
static inline void cpu_norm_residual_row_(Buffer sum, Buffer in, Buffer branch, const Dropout *dropout, int64_t n, int64_t C) {
    CPU_SCRATCH(scratch_in);
    CPU_SCRATCH(scratch_branch);
    CPU_SCRATCH(scratch_sum);
    CPU_SCRATCH(mask);
    const bool active = dropout_active(dropout);
    for (int64_t c = 0; c < C; c += CPU_BLOCK) {
        const int64_t at = n * C + c, width = min_i64(CPU_BLOCK, C - c);
        const float *a = cpu_block_in(in, at, width, scratch_in), *b = cpu_block_in(branch, at, width, scratch_branch);
        float *x = cpu_block_out(sum, at, scratch_sum);
        if (active) {
            cpu_dropout_mask(mask, dropout, n, c, width);
#pragma omp simd
            for (int64_t i = 0; i < width; i++) x[i] = a[i] + b[i] * mask[i];
        } else {
#pragma omp simd
            for (int64_t i = 0; i < width; i++) x[i] = a[i] + b[i];
        }
        cpu_block_store(sum, at, width, x);
    }
}

// out (N, C) = in + dropout(branch): the bits that cpu_norm_forward writes to sum
static inline void cpu_residual_forward(Device *device, Buffer out, Buffer in, Buffer branch, const Dropout *dropout, int64_t N, int64_t C) {
    (void)device;
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) cpu_norm_residual_row_(out, in, branch, dropout, n, C);
}

// Sum over a row of x, or of (x - shift)^2.
static inline double cpu_norm_row_sum_(Buffer x, float shift, bool square, int64_t n, int64_t C) {
    CPU_SCRATCH(scratch);
    double total = 0;
    for (int64_t c = 0; c < C; c += CPU_BLOCK) {
        const int64_t width = min_i64(CPU_BLOCK, C - c), whole = width / CPU_LANES * CPU_LANES;
        const float *from = cpu_block_in(x, n * C + c, width, scratch);
        float lane[CPU_LANES] = {0};
        if (square) {
            for (int64_t i = 0; i < whole; i += CPU_LANES) {
#pragma omp simd
                for (int k = 0; k < CPU_LANES; k++) lane[k] += (from[i + k] - shift) * (from[i + k] - shift);
            }
            for (int64_t i = whole; i < width; i++) lane[i - whole] += (from[i] - shift) * (from[i] - shift);
        } else {
            for (int64_t i = 0; i < whole; i += CPU_LANES) {
#pragma omp simd
                for (int k = 0; k < CPU_LANES; k++) lane[k] += from[i + k];
            }
            for (int64_t i = whole; i < width; i++) lane[i - whole] += from[i];
        }
        total += (double)cpu_lanes_sum(lane);
    }
    return total;
}

// sum (N, C) = x = in + dropout(branch), out (N, C) = (x - mean) * rstd * weight + bias, mean and rstd (N) =
static inline void cpu_norm_forward(Device *device, Buffer out, Buffer mean, Buffer rstd, Buffer sum, Buffer in, Buffer branch, Buffer weight,
                                    Buffer bias, const Dropout *dropout, int kind, double eps, int64_t N, int64_t C) {
    (void)device;
    const Buffer x = branch.data != NULL ? sum : in;
    const bool centred = kind == NORM_LAYERNORM;
#pragma omp parallel for schedule(static)
    for (int64_t n = 0; n < N; n++) {
        CPU_SCRATCH(scratch_x);
        CPU_SCRATCH(scratch_weight);
        CPU_SCRATCH(scratch_bias);
        CPU_SCRATCH(scratch_out);
        if (branch.data != NULL) cpu_norm_residual_row_(sum, in, branch, dropout, n, C);
        const float m = centred ? (float)(cpu_norm_row_sum_(x, 0.0f, false, n, C) / (double)C) : 0.0f;
        const float r = (float)(1.0 / sqrt(cpu_norm_row_sum_(x, m, true, n, C) / (double)C + eps));
        if (mean.data != NULL) ((float *)mean.data)[n] = m;
        ((float *)rstd.data)[n] = r;
        for (int64_t c = 0; c < C; c += CPU_BLOCK) {
            const int64_t at = n * C + c, width = min_i64(CPU_BLOCK, C - c);
            const float *from = cpu_block_in(x, at, width, scratch_x), *w = cpu_block_in(weight, c, width, scratch_weight);
            float *to = cpu_block_out(out, at, scratch_out);
            if (bias.data != NULL) {
                const float *b = cpu_block_in(bias, c, width, scratch_bias);
#pragma omp simd
                for (int64_t i = 0; i < width; i++) to[i] = (from[i] - m) * r * w[i] + b[i];
            } else {
#pragma omp simd
                for (int64_t i = 0; i < width; i++) to[i] = (from[i] - m) * r * w[i];
            }
            cpu_block_store(out, at, width, to);
        }
    }
}

// ----------------------------------------------------------------------------
// Backward, with xhat = (x - mean) * rstd and d = dout * weight:
//   dx = rstd * (d - mean_C(d) - xhat * mean_C(d * xhat))      (rmsnorm: without mean_C(d))
//   dweight = sum_N dout * xhat, dbias = sum_N dout
// Tokens are taken in tiles that stay in the last-level cache. In a tile, first the threads share the columns and each
// walks all tokens for its columns (so weight gradients need no partial sums and have one order of summation), then they
// share the tokens for dx. Columns come first, so that dx may overwrite dout.

enum {
    CPU_NORM_TILE_BYTES_ = 8 << 20, // of dout and x together
    CPU_NORM_ROWS_ = 32,            // tokens summed in fp32 before they are added to the gradient
    CPU_NORM_COLUMNS_ = 256,        // most columns of a task
};

// dweight, dbias [c .. c+width) += over tokens first .. last-1
static inline void cpu_norm_backward_columns_(float *dweight, float *dbias, Buffer dout, Buffer x, const float *mean, const float *rstd,
                                              int64_t first, int64_t last, int64_t c, int64_t width, int64_t C) {
    _Alignas(64) float scratch_dout[CPU_NORM_COLUMNS_], scratch_x[CPU_NORM_COLUMNS_];
    _Alignas(64) float sum_weight[CPU_NORM_COLUMNS_], sum_bias[CPU_NORM_COLUMNS_];
    for (int64_t start = first; start < last; start += CPU_NORM_ROWS_) {
        const int64_t stop = min_i64(start + CPU_NORM_ROWS_, last);
        memset(sum_weight, 0, sizeof sum_weight);
        memset(sum_bias, 0, sizeof sum_bias);
        for (int64_t n = start; n < stop; n++) {
            const float m = mean != NULL ? mean[n] : 0.0f, r = rstd[n];
            const float *d = cpu_block_in(dout, n * C + c, width, scratch_dout), *from = cpu_block_in(x, n * C + c, width, scratch_x);
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                sum_weight[i] += d[i] * ((from[i] - m) * r);
                sum_bias[i] += d[i];
            }
        }
#pragma omp simd
        for (int64_t i = 0; i < width; i++) dweight[c + i] += sum_weight[i];
        if (dbias == NULL) continue;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) dbias[c + i] += sum_bias[i];
    }
}

// dx of token n
static inline void cpu_norm_backward_row_(Buffer dx, bool accumulate, Buffer dout, Buffer x, Buffer weight, float m, float r, bool centred,
                                          int64_t n, int64_t C) {
    CPU_SCRATCH(scratch_dout);
    CPU_SCRATCH(scratch_x);
    CPU_SCRATCH(scratch_weight);
    CPU_SCRATCH(scratch_dx);
    double total_d = 0, total_dx = 0;
    for (int64_t c = 0; c < C; c += CPU_BLOCK) {
        const int64_t at = n * C + c, width = min_i64(CPU_BLOCK, C - c);
        const float *d = cpu_block_in(dout, at, width, scratch_dout), *from = cpu_block_in(x, at, width, scratch_x);
        const float *w = cpu_block_in(weight, c, width, scratch_weight);
        float sum_d = 0, sum_dx = 0;
#pragma omp simd reduction(+ : sum_d, sum_dx)
        for (int64_t i = 0; i < width; i++) {
            const float dw = d[i] * w[i];
            sum_d += dw;
            sum_dx += dw * ((from[i] - m) * r);
        }
        total_d += (double)sum_d, total_dx += (double)sum_dx;
    }
    const float mean_d = centred ? (float)(total_d / (double)C) : 0.0f, mean_dx = (float)(total_dx / (double)C);
    for (int64_t c = 0; c < C; c += CPU_BLOCK) {
        const int64_t at = n * C + c, width = min_i64(CPU_BLOCK, C - c);
        const float *d = cpu_block_in(dout, at, width, scratch_dout), *from = cpu_block_in(x, at, width, scratch_x);
        const float *w = cpu_block_in(weight, c, width, scratch_weight);
        float *to = cpu_block_out(dx, at, scratch_dx);
        if (accumulate) {
            const float *old = cpu_block_in(dx, at, width, scratch_dx);
#pragma omp simd
            for (int64_t i = 0; i < width; i++) to[i] = old[i] + r * (d[i] * w[i] - mean_d - (from[i] - m) * r * mean_dx);
        } else {
#pragma omp simd
            for (int64_t i = 0; i < width; i++) to[i] = r * (d[i] * w[i] - mean_d - (from[i] - m) * r * mean_dx);
        }
        cpu_block_store(dx, at, width, to);
    }
}

static inline void cpu_norm_backward(Device *device, Buffer dx, bool accumulate_x, Buffer dweight, Buffer dbias, bool accumulate_w, Buffer dout,
                                     Buffer x, Buffer mean, Buffer rstd, Buffer weight, int kind, int64_t N, int64_t C) {
    (void)device;
    const bool centred = kind == NORM_LAYERNORM;
    const float *means = centred ? mean.data : NULL, *rstds = rstd.data;
    float *dw = dweight.data, *db = dbias.data;
    // The width of a task changes who sums a column, never the order of its terms.
    const int64_t share = round_up(ceil_div(C, omp_get_max_threads()), 16);
    const int64_t columns = min_i64(share, CPU_NORM_COLUMNS_), tasks = ceil_div(C, columns);
    const int64_t tile =
        max_i64(1, CPU_NORM_TILE_BYTES_ / (C * (int64_t)(dtype_bytes(dout.dtype) + dtype_bytes(x.dtype))) / CPU_NORM_ROWS_) * CPU_NORM_ROWS_;
#pragma omp parallel
    {
        if (!accumulate_w) {
#pragma omp for schedule(static) nowait
            for (int64_t task = 0; task < tasks; task++) {
                const int64_t c = task * columns, width = min_i64(columns, C - c);
                memset(dw + c, 0, (size_t)width * sizeof *dw);
                if (db != NULL) memset(db + c, 0, (size_t)width * sizeof *db);
            }
        }
        for (int64_t first = 0; first < N; first += tile) {
            const int64_t last = min_i64(first + tile, N);
#pragma omp for schedule(static)
            for (int64_t task = 0; task < tasks; task++) {
                const int64_t c = task * columns;
                cpu_norm_backward_columns_(dw, db, dout, x, means, rstds, first, last, c, min_i64(columns, C - c), C);
            }
            // No barrier after this: the next tile's columns read other tokens, and a column stays with its thread.
#pragma omp for schedule(static) nowait
            for (int64_t n = first; n < last; n++) {
                cpu_norm_backward_row_(dx, accumulate_x, dout, x, weight, centred ? means[n] : 0.0f, rstds[n], centred, n, C);
            }
        }
    }
}

#endif
