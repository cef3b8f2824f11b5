// gradients.h: the error of a tensor's gradient against a reference, as layouts and trainers are compared:
// |a-b| / max(|b|, 1e-3 * |g| * sqrt(n_tensor/n_total)), g the whole gradient of the reference.
#ifndef DEV_TEST_GRADIENTS_H
#define DEV_TEST_GRADIENTS_H

#include <math.h>   // sqrt, fmax
#include <stdint.h> // int64_t

// The part of a tensor's share of the global gradient that its error is measured against at least. Some gradients are zero in exact
// arithmetic (the key bias of GPT-2); what is computed for them is the rounding noise of terms of ordinary size that cancel, and is measured
// against a tenth of the share.
static inline double gradient_floor(double global_norm, double tensor_norm, int64_t n, int64_t n_total) {
    const double share = global_norm * sqrt((double)n / (double)n_total);
    return share * (tensor_norm <= 1e-5 * share ? 1e-1 : 1e-3);
}

static inline double gradient_norm(const float *values, int64_t n) {
    double squares = 0;
    for (int64_t i = 0; i < n; i++) squares += (double)values[i] * (double)values[i];
    return sqrt(squares);
}

// |a-b|; NaN stays NaN.
static inline double gradient_distance(const float *a, const float *b, int64_t n) {
    double squares = 0;
    for (int64_t i = 0; i < n; i++) {
        const double d = (double)a[i] - (double)b[i];
        squares += d * d;
    }
    return sqrt(squares);
}

static inline double gradient_error(const float *a, const float *b, int64_t n, double global_norm, int64_t n_total) {
    const double norm = gradient_norm(b, n);
    return gradient_distance(a, b, n) / fmax(norm, gradient_floor(global_norm, norm, n, n_total));
}

#endif
