// precision.h: storage types and their conversion on the host. Arithmetic is always fp32 or wider; bf16 is storage.
#ifndef LLMC_PRECISION_H
#define LLMC_PRECISION_H

#include <stddef.h> // size_t
#include <stdint.h> // uint16_t
#include <string.h> // memcpy

typedef enum { DTYPE_F32, DTYPE_BF16, DTYPE_I32, DTYPE_COUNT } Dtype;

static const char *const dtype_names[DTYPE_COUNT] = {"F32", "BF16", "I32"}; // spelled as in safetensors

static inline size_t dtype_bytes(Dtype dtype) { return dtype == DTYPE_BF16 ? 2 : 4; }

static inline float bf16_to_f32(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

// Round to nearest even. NaN stays NaN (its quiet bit is set, so that truncation cannot make it an infinity).
static inline uint16_t bf16_from_f32(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return (bits & 0x7fffffff) > 0x7f800000 ? (uint16_t)((bits >> 16) | 0x40) : (uint16_t)rounded;
}

#endif
