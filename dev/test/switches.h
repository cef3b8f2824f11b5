// switches.h: small models with every combination of the configuration's switches, for tests that must hold for all of them. Widths whose
// products are no multiples of the arenas' alignment, so that gaps would show.
#ifndef DEV_TEST_SWITCHES_H
#define DEV_TEST_SWITCHES_H

#include "llmc/model.h" // ModelConfig

enum { SWITCHES = 3 * 64 }; // combinations

static ModelConfig switches_config(int bits) {
    return (ModelConfig){.layers = 5,
                         .channels = 36,
                         .heads = 4,
                         .kv_heads = bits & 1 ? 2 : 4,
                         .head_size = 9,
                         .ffn = 88,
                         .vocab = 101,
                         .max_seq = 17,
                         .norm = bits >> 1 & 1,
                         .position = bits >> 2 & 1,
                         .activation = bits >> 3 & 1,
                         .tied = bits >> 4 & 1,
                         .qk_norm = bits >> 5 & 1,
                         .bias = bits >> 6,
                         .norm_eps = 1e-5,
                         .rope_theta = 1e4};
}

#endif
