// rng.h: counter-based random numbers (Philox4x32-10; Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// SC 2011). A number is a pure function of its key and counter, never of the order of calls, so that initialisation and
// dropout are the same for every layout, thread count and device, and recomputation redraws the same mask.
#ifndef LLMC_RNG_H
#define LLMC_RNG_H

#include <math.h>   // sqrt, log, cos, sin
#include <stdint.h> // uint32_t

// Kernels call the same functions.
#ifdef __CUDACC__
#define RNG_FUNCTION static inline __host__ __device__
#else
#define RNG_FUNCTION static inline
#endif

typedef struct {
    uint32_t x[4];
} Philox;

// What a stream of numbers is for: part of the key, so that no two uses share numbers.
enum { RNG_INIT = 1, RNG_DROPOUT = 2, RNG_SAMPLE = 3, RNG_SHUFFLE = 4, RNG_TEST = 5, RNG_ROUND = 6 };

RNG_FUNCTION Philox philox(uint64_t key, uint64_t counter_low, uint64_t counter_high) {
    uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
    uint32_t c0 = (uint32_t)counter_low, c1 = (uint32_t)(counter_low >> 32);
    uint32_t c2 = (uint32_t)counter_high, c3 = (uint32_t)(counter_high >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1, c3 = (uint32_t)p0, c0 = n0, c2 = n2;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    const Philox result = {{c0, c1, c2, c3}};
    return result;
}

// splitmix64's finaliser: spreads a small integer (a seed) over 64 bits.
RNG_FUNCTION uint64_t rng_mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

static inline uint64_t rng_key(uint64_t seed, uint32_t use) { return rng_mix(seed * 8 + use); }

// (0, 1], 24 bits: never 0, so that its logarithm is finite.
static inline float rng_uniform(uint32_t bits) { return (float)((bits >> 8) + 1) * 0x1p-24f; }

// Standard normal numbers `2*pair` and `2*pair+1` of tensor `tensor_id` (Box-Muller).
static inline void rng_normal_pair(uint64_t key, uint64_t tensor_id, uint64_t pair, float normal[2]) {
    Philox r = philox(key, pair, tensor_id);
    double u = (double)rng_uniform(r.x[0]), angle = 6.283185307179586 * (double)rng_uniform(r.x[1]);
    double radius = sqrt(-2.0 * log(u)); // double: the same float from every libm
    normal[0] = (float)(radius * cos(angle));
    normal[1] = (float)(radius * sin(angle));
}
static inline float rng_normal(uint64_t key, uint64_t tensor_id, uint64_t element) {
    float normal[2];
    rng_normal_pair(key, tensor_id, element / 2, normal);
    return normal[element % 2];
}

// Dropout keeps an element when its 16 bits are below the threshold: an integer comparison, the same on all devices.
// One Philox call serves 8 consecutive channels. `site` names the place in the network (2*layer, 2*layer+1; embedding
// 0xffffff), `token` is the token's index in the global batch of the step.
static inline uint64_t rng_dropout_key(uint64_t seed, uint64_t step) { return rng_mix(rng_key(seed, RNG_DROPOUT) ^ rng_mix(step)); }
RNG_FUNCTION void rng_dropout_bits(uint64_t key, uint32_t site, uint64_t token, uint32_t channel_group, uint16_t bits[8]) {
    Philox r = philox(key, token, (uint64_t)site << 32 | channel_group);
    for (int i = 0; i < 4; i++) bits[2 * i] = (uint16_t)r.x[i], bits[2 * i + 1] = (uint16_t)(r.x[i] >> 16);
}
// Stochastic rounding of parameters to bf16 (Gupta et al. 2015): 16 random bits are added to those that are cut off, so that it rounds up as often
// as they are near the next number, and small updates add up in expectation. One Philox call serves 8 consecutive elements of a unit's tensors.
static inline uint64_t rng_round_key(uint64_t seed, uint64_t step) { return rng_mix(rng_key(seed, RNG_ROUND) ^ rng_mix(step)); }
RNG_FUNCTION void rng_round_bits(uint64_t key, uint64_t unit, uint64_t group, uint16_t bits[8]) {
    Philox r = philox(key, group, unit);
    for (int i = 0; i < 4; i++) bits[2 * i] = (uint16_t)r.x[i], bits[2 * i + 1] = (uint16_t)(r.x[i] >> 16);
}
// The bf16 of a float, both as their bits. Infinities and NaNs stay what they are.
RNG_FUNCTION uint16_t rng_round_bf16(uint32_t value, uint16_t random) {
    const uint32_t magnitude = value & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) return (uint16_t)(value >> 16 | (magnitude > 0x7f800000u ? 0x40u : 0u));
    return (uint16_t)((value + random) >> 16);
}
// Threshold of 65536 for a drop probability; an element is kept when bits < threshold, and scaled by 65536/threshold.
static inline uint32_t rng_dropout_threshold(double probability) { return (uint32_t)(65536.0 * (1.0 - probability) + 0.5); }

#endif
