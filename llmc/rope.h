// rope.h: the table of rotary position embeddings (Su et al. 2021), filled on the host for any device. The rotation itself is
// an op: cpu/rope.h.
#ifndef LLMC_ROPE_H
#define LLMC_ROPE_H

#include <math.h>   // pow, cos, sin, acos
#include <stdint.h> // int64_t

// How Llama 3.1 stretches the context that a model was first trained on: frequencies with fewer than low_freq_factor turns in it are divided
// by `factor`, those with more than high_freq_factor stay, in between the two are mixed.
typedef struct {
    double factor; // 0: frequencies are as they are
    double low_freq_factor, high_freq_factor;
    int64_t original_seq; // tokens of the first context
} RopeScaling;

static inline double rope_scaled_frequency_(double frequency, const RopeScaling *s) {
    if (s->factor == 0) return frequency;
    const double turns = (double)s->original_seq * frequency / (2 * acos(-1.0)); // in the first context
    if (turns < s->low_freq_factor) return frequency / s->factor;
    if (turns > s->high_freq_factor) return frequency;
    const double kept = (turns - s->low_freq_factor) / (s->high_freq_factor - s->low_freq_factor);
    return (1 - kept) * frequency / s->factor + kept * frequency;
}

// table (positions, HS) = cos (HS/2) | sin (HS/2) of position * theta^(-2i/HS), scaled. Angles are double: a float loses the
// fraction of a turn at positions in the tens of thousands.
static inline void rope_table_fill(float *table, int64_t positions, int64_t head_size, double theta, const RopeScaling *scaling) {
    const int64_t half = head_size / 2;
    for (int64_t i = 0; i < half; i++) {
        const double frequency = rope_scaled_frequency_(pow(theta, -2.0 * (double)i / (double)head_size), scaling);
        for (int64_t position = 0; position < positions; position++) {
            const double angle = (double)position * frequency;
            table[position * head_size + i] = (float)cos(angle);
            table[position * head_size + half + i] = (float)sin(angle);
        }
    }
}

#endif
