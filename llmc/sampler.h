// sampler.h: the order of samples: a permutation of [0, n) for every epoch, computed and not stored, and the windows of a
// token set. The n-th sample ever is a pure function of (seed, n): never of ranks, micro-batch or what was read before.
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include "llmc/base.h"   // Error, fail
#include "llmc/rng.h"    // philox, rng_key, RNG_SHUFFLE
#include "llmc/tokens.h" // TokenSet

// ----------------------------------------------------------------------------
// Permutation: a Feistel network over the smallest 2*half_bits-bit domain that holds n, walked along its cycle until it
// lands inside [0, n) (Black & Rogaway, "Ciphers with arbitrary finite domains", 2002). The domain is less than 4n (n > 1),
// so fewer than 4 walks are expected.

enum { SAMPLER_ROUNDS_ = 8 };

typedef struct {
    uint64_t key;
    int64_t count; // n
    int half_bits;
    bool shuffle; // false: the identity
} Sampler;

static inline Sampler sampler_create(uint64_t seed, int64_t count, bool shuffle) {
    Sampler sampler = {.key = rng_key(seed, RNG_SHUFFLE), .count = count, .half_bits = 1, .shuffle = shuffle};
    while (sampler.half_bits < 31 && (int64_t)1 << (2 * sampler.half_bits) < count) sampler.half_bits++;
    return sampler;
}

// Which of [0, count) is the `index`-th of an epoch. Count is at most 2^62.
static inline int64_t sampler_index(const Sampler *sampler, int64_t epoch, int64_t index) {
    if (!sampler->shuffle) return index;
    const int bits = sampler->half_bits;
    const uint64_t mask = ((uint64_t)1 << bits) - 1;
    uint64_t x = (uint64_t)index;
    do {
        uint64_t left = x >> bits, right = x & mask;
        for (uint64_t round = 0; round < SAMPLER_ROUNDS_; round++) {
            const uint64_t mixed = left ^ (philox(sampler->key, right, (uint64_t)epoch * SAMPLER_ROUNDS_ + round).x[0] & mask);
            left = right;
            right = mixed;
        }
        x = left << bits | right;
    } while (x >= (uint64_t)sampler->count);
    return (int64_t)x;
}

// The sample after `position` samples were consumed.
static inline int64_t sampler_at(const Sampler *sampler, int64_t position) {
    return sampler_index(sampler, position / sampler->count, position % sampler->count);
}

// ----------------------------------------------------------------------------
// Windows: T tokens and their targets, so T+1 tokens, at stride T inside each file. A file shorter than T+1 has none.

typedef struct {
    const TokenSet *tokens;
    int64_t seq;    // T
    int64_t count;  // windows of all files
    int64_t *first; // (files + 1) index of each file's first window
} Windows;

static inline bool windows_create(Windows *windows, const TokenSet *tokens, int64_t seq, const char *flag, Error *error) {
    *windows = (Windows){.tokens = tokens, .seq = seq};
    const TokenFile *longest = &tokens->files[0];
    for (int64_t f = 0; f < tokens->count; f++) {
        const TokenFile *file = &tokens->files[f];
        if (file->tokens > longest->tokens) longest = file;
        windows->count += file->tokens > seq ? (file->tokens - 1) / seq : 0;
    }
    if (windows->count == 0) {
        return fail(error, CODE_INPUT,
                    "%s: too short: the longest file, %.300s, has %lld tokens, wanted %lld for one sequence and its target (smaller --seq?)", flag,
                    longest->path, (long long)longest->tokens, (long long)seq + 1);
    }
    windows->first = base_new((size_t)tokens->count + 1, sizeof(int64_t));
    for (int64_t f = 0; f < tokens->count; f++) {
        const int64_t held = tokens->files[f].tokens;
        windows->first[f + 1] = windows->first[f] + (held > seq ? (held - 1) / seq : 0);
    }
    return true;
}

static inline void windows_free(Windows *windows) {
    free(windows->first);
    *windows = (Windows){0};
}

// Position in the token set of the first token of window `index`.
static inline int64_t windows_position(const Windows *windows, int64_t index) {
    int64_t low = 0, high = windows->tokens->count;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (windows->first[middle] <= index) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return windows->tokens->files[low].start + (index - windows->first[low]) * windows->seq;
}

#endif
