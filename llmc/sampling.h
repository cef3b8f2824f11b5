// sampling.h: chooses the next token from logits: temperature, top-k, top-p. Pure: the random number is an argument.
#ifndef LLMC_SAMPLING_H
#define LLMC_SAMPLING_H

#include "llmc/base.h" // base_new
#include <math.h>      // exp

typedef struct {
    double temperature; // 0: always the likeliest
    int64_t top_k;      // 0: off
    double top_p;       // 1: off
} SamplingConfig;

typedef struct {
    float logit;
    int32_t id;
} SamplingCandidate_;

// Likeliest first; equal logits by id, so that the order is defined.
static inline int sampling_compare_(const void *a, const void *b) {
    const SamplingCandidate_ *x = a, *y = b;
    if (x->logit != y->logit) return x->logit > y->logit ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

// Token for a uniform number in [0, 1). logits (V); non-finite logits are never chosen (0 when none is finite). top-k comes
// first, top-p (Holtzman et al. 2020) among what is left: the smallest set of likeliest tokens that holds the probability.
static inline int32_t sampling_choose(const float *logits, int64_t V, SamplingConfig config, double uniform) {
    SamplingCandidate_ *candidates = base_new((size_t)V, sizeof *candidates);
    int64_t count = 0;
    for (int64_t i = 0; i < V; i++) {
        if (isfinite(logits[i])) candidates[count++] = (SamplingCandidate_){logits[i], (int32_t)i};
    }
    int32_t chosen = 0;
    if (count > 0) {
        qsort(candidates, (size_t)count, sizeof *candidates, sampling_compare_);
        chosen = candidates[0].id;
        if (config.top_k > 0) count = min_i64(count, config.top_k);
        if (config.temperature > 0) {
            const double top = (double)candidates[0].logit;
            double total = 0, kept = 0, walked = 0;
            for (int64_t i = 0; i < count; i++) total += exp(((double)candidates[i].logit - top) / config.temperature);
            int64_t keep = 0;
            while (keep < count && (keep == 0 || kept < config.top_p * total)) {
                kept += exp(((double)candidates[keep++].logit - top) / config.temperature);
            }
            for (int64_t i = 0; i < keep; i++) {
                chosen = candidates[i].id;
                walked += exp(((double)candidates[i].logit - top) / config.temperature);
                if (uniform * kept < walked) break;
            }
        }
    }
    free(candidates);
    return chosen;
}

#endif
