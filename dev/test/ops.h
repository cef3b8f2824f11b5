// ops.h: what the tests of device ops share: buffers of exact size (so that AddressSanitizer sees a step outside), their
// random contents, and the comparison with a reference in double. No reference of any op.
#ifndef TEST_OPS_H
#define TEST_OPS_H

#include "dev/test/test.h"  // check_error, test_uniform
#include "llmc/base.h"      // base_new
#include "llmc/device.h"    // Buffer, Dropout
#include "llmc/precision.h" // bf16_from_f32
#include <omp.h>            // omp_set_num_threads

static Buffer ops_new(int64_t n, Dtype dtype) { return buffer_of(base_new((size_t)n, dtype_bytes(dtype)), dtype); }

static double ops_at(Buffer b, int64_t i) {
    return b.dtype == DTYPE_F32 ? (double)((float *)b.data)[i] : (double)bf16_to_f32(((uint16_t *)b.data)[i]);
}

static void ops_set(Buffer b, int64_t i, double value) {
    if (b.dtype == DTYPE_F32) ((float *)b.data)[i] = (float)value;
    if (b.dtype == DTYPE_BF16) ((uint16_t *)b.data)[i] = bf16_from_f32((float)value);
    if (b.dtype == DTYPE_I32) ((int32_t *)b.data)[i] = (int32_t)value;
}

// centre + scale * uniform(-1, 1), rounded to the storage type
static Buffer ops_random(int64_t n, Dtype dtype, uint64_t stream, double centre, double scale) {
    Buffer b = ops_new(n, dtype);
    for (int64_t i = 0; i < n; i++) ops_set(b, i, centre + scale * test_uniform(stream, (uint64_t)i));
    return b;
}

static Buffer ops_random_ids(int64_t n, int64_t limit, uint64_t stream) {
    Buffer b = ops_new(n, DTYPE_I32);
    for (int64_t i = 0; i < n; i++) ((int32_t *)b.data)[i] = (int32_t)(rng_mix(stream * 1000003 + (uint64_t)i) % (uint64_t)limit);
    return b;
}

static Buffer ops_counting(int64_t n, int32_t first) {
    Buffer b = ops_new(n, DTYPE_I32);
    for (int64_t i = 0; i < n; i++) ((int32_t *)b.data)[i] = first + (int32_t)i;
    return b;
}

static Buffer ops_copy(Buffer from, int64_t n) {
    Buffer b = ops_new(n, from.dtype);
    memcpy(b.data, from.data, (size_t)n * dtype_bytes(from.dtype));
    return b;
}

static double *ops_doubles(Buffer b, int64_t n) {
    double *x = base_new((size_t)n, sizeof *x);
    for (int64_t i = 0; i < n; i++) x[i] = ops_at(b, i);
    return x;
}

static bool ops_same_bits(Buffer a, Buffer b, int64_t n) { return memcmp(a.data, b.data, (size_t)n * dtype_bytes(a.dtype)) == 0; }

static double ops_round(Dtype dtype, double x) { return dtype == DTYPE_BF16 ? (double)bf16_to_f32(bf16_from_f32((float)x)) : (double)(float)x; }

// Worst errors of a group. fp32: largest difference over largest reference. bf16: that error in units of the error which the
// reference itself makes when it is rounded to bf16.
typedef struct {
    double f32, bf16;
} OpsWorst;

static void ops_worse(double *worst, double error) {
    if (!(error <= *worst)) *worst = error;
}

static void ops_compare(OpsWorst *worst, Buffer got, const double *want, int64_t n) {
    double difference = 0, rounding = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        ops_worse(&difference, fabs(ops_at(got, i) - want[i]));
        ops_worse(&rounding, fabs(ops_round(DTYPE_BF16, want[i]) - want[i]));
        ops_worse(&size, fabs(want[i]));
    }
    if (size == 0) size = 1;
    if (got.dtype == DTYPE_F32) ops_worse(&worst->f32, difference / size);
    if (got.dtype == DTYPE_BF16) ops_worse(&worst->bf16, difference / (rounding + 5e-6 * size));
}

static void ops_report(const OpsWorst *worst, double bound, const char *what) {
    char line[128];
    check_error(worst->f32, bound, what);
    snprintf(line, sizeof line, "%s, bf16 (in roundings)", what);
    if (worst->bf16 != 0) check_error(worst->bf16, 2.0, line);
}

// The definition of dropout, an element at a time.
static double ops_mask(const Dropout *dropout, int64_t n, int64_t c) {
    if (!dropout_active(dropout)) return 1.0;
    uint16_t bits[8];
    rng_dropout_bits(*dropout->key, dropout->site, (uint64_t)((int32_t *)dropout->token_index.data)[n], (uint32_t)(c / 8), bits);
    return bits[c % 8] < dropout->keep_threshold ? 65536.0 / (double)dropout->keep_threshold : 0.0;
}

#endif
