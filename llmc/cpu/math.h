// math.h: scalar functions that compilers turn into vector code inside `omp simd` loops: exp, sigmoid, GELU, and loads and
// stores of either storage type. Branch-free, no table, no libm; NaN goes through.
#ifndef LLMC_CPU_MATH_H
#define LLMC_CPU_MATH_H

#include "llmc/precision.h" // bf16_to_f32
#include <stdint.h>         // uint32_t
#include <string.h>         // memcpy

static inline uint32_t cpu_bits_(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static inline float cpu_from_bits_(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// e^x to about 1 ulp for x in [-87.3, 88.3]; 0 below, about 2.4e38 (finite) above. Range reduction by ln 2, then a Taylor
// polynomial of degree 7 on |r| <= ln(2)/2 (truncation 5e-9 relative).
static inline float cpu_exp(float x) {
    const float high = 88.37f, low = -87.33f, magic = 12583039.0f; // 1.5 * 2^23 rounds to an integer; + 127, the exponent's bias
    float clamped = x > high ? high : x;
    clamped = clamped < low ? low : clamped;
    const float shifted = clamped * 1.44269504f + magic;
    const float n = shifted - magic;
    const float r = (clamped - n * 0.693145752f) - n * 1.42860677e-6f; // ln 2 in two parts
    float p = 1.98412698e-4f;
    p = p * r + 1.38888889e-3f;
    p = p * r + 8.33333333e-3f;
    p = p * r + 4.16666667e-2f;
    p = p * r + 1.66666667e-1f;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const float scaled = p * cpu_from_bits_(cpu_bits_(shifted) << 23); // times 2^n; a product, so that every NaN stays NaN
    return x < low ? 0.0f : scaled;
}

static inline float cpu_sigmoid(float x) { return 1.0f / (1.0f + cpu_exp(-x)); }

// GELU, tanh form: x/2 * (1 + tanh(u)) = x * sigmoid(2u), u = sqrt(2/pi) * (x + 0.044715 x^3).
// |x| is clamped where the cube could overflow; sigmoid is 0 or 1 long before.
static inline float cpu_gelu(float x) {
    const float c = x > 100.0f ? 100.0f : x < -100.0f ? -100.0f : x;
    return x * cpu_sigmoid(1.59576912f * (c + 0.044715f * c * c * c));
}
static inline float cpu_gelu_derivative(float x) {
    const float c = x > 100.0f ? 100.0f : x < -100.0f ? -100.0f : x;
    const float s = cpu_sigmoid(1.59576912f * (c + 0.044715f * c * c * c));
    return s + c * s * (1.0f - s) * 1.59576912f * (1.0f + 0.134145f * c * c);
}

// Branch-free bf16 rounding for vector loops (precision.h's bf16_from_f32 is the reference; equal for every input).
static inline uint16_t cpu_to_bf16(float value) {
    const uint32_t bits = cpu_bits_(value);
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16, quiet = (bits >> 16) | 0x40;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

#endif
