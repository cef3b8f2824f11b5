// rope.h: the table of rotary position embeddings (Su et al. 2021), filled on the host for any device. The rotation itself is
// an op: cpu/rope.h.
#ifndef LLMC_ROPE_H
#define LLMC_ROPE_H

#include <math.h>   // pow, cos, sin
#include <stdint.h> // int64_t

// table (positions, HS) = cos (HS/2) | sin (HS/2) of position * theta^(-2i/HS). Angles are double: a float loses the
// fraction of a turn at positions in the tens of thousands.
static inline void rope_table_fill(float *table, int64_t positions, int64_t head_size, double theta) {
    const int64_t half = head_size / 2;
    for (int64_t i = 0; i < half; i++) {
        const double frequency = pow(theta, -2.0 * (double)i / (double)head_size);
        for (int64_t position = 0; position < positions; position++) {
            const double angle = (double)position * frequency;
            table[position * head_size + i] = (float)cos(angle);
            table[position * head_size + half + i] = (float)sin(angle);
        }
    }
}

#endif
