// test.h: what every test program shares: counted checks, the closing line, error of a tensor, the order-independent
// pseudo-random fill. NaN fails every comparison.
#ifndef TEST_H
#define TEST_H

#include "llmc/rng.h" // philox
#include <math.h>     // sqrt, isfinite
#include <stdarg.h>   // va_list
#include <stdbool.h>  // bool
#include <stdint.h>   // int64_t
#include <stdio.h>    // printf

static int passed_, failed_;

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
static void
check(bool ok, const char *format, ...) {
    va_list arguments;
    ok ? passed_++ : failed_++;
    if (ok) return;
    printf("FAILED: ");
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
}

// A measured error against its bound; prints both, so that a log shows how close it was.
static void check_error(double error, double bound, const char *what) {
    const bool ok = error <= bound; // false for NaN
    printf("  %-56s error %9.3g  bound %9.3g  %s\n", what, error, bound, ok ? "ok" : "FAILED");
    check(ok, "%s: error %g, bound %g", what, error, bound);
}

static int test_end(void) {
    printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ > 0 || passed_ == 0;
}

// Relative L2 error of a against the reference b; 0 against 0 is 0; NaN stays NaN.
static double relative_error(const float *a, const double *b, int64_t n) {
    double difference = 0, size = 0;
    for (int64_t i = 0; i < n; i++) {
        const double e = (double)a[i] - b[i];
        difference += e * e;
        size += b[i] * b[i];
    }
    if (size == 0) return sqrt(difference);
    return sqrt(difference / size);
}

// Number `index` of stream `stream`, uniform in [-1, 1).
static double test_uniform(uint64_t stream, uint64_t index) {
    const Philox r = philox(rng_key(1, RNG_TEST), index, stream);
    return (double)r.x[0] / 2147483648.0 - 1.0;
}

#endif
