// optimizer.h: the learning rate of a step, and the optimizer's settings from the flags.
#ifndef LLMC_OPTIMIZER_H
#define LLMC_OPTIMIZER_H

#include "llmc/options.h" // Options, SCHEDULE_*
#include "llmc/device.h"  // AdamW
#include <math.h>         // cos

// Learning rate of step n (from 1): linear warm-up over `warmup` steps to --lr, then the schedule, reaching
// min_lr_frac * lr at the last step.
static inline double learning_rate(const Options *o, int64_t step) {
    const double peak = o->lr, floor = o->lr * o->min_lr_frac;
    if (step <= o->warmup) return peak * (double)step / (double)o->warmup;
    const double span = (double)(o->steps - o->warmup);
    const double progress = span > 0 ? fmin((double)(step - o->warmup) / span, 1.0) : 1.0; // (0, 1]
    switch (o->schedule) {
    case SCHEDULE_COSINE: return floor + (peak - floor) * 0.5 * (1.0 + cos(3.141592653589793 * progress));
    case SCHEDULE_LINEAR: return peak + (floor - peak) * progress;
    case SCHEDULE_WSD: { // warm-up, stable, decay (Hu et al. 2024, MiniCPM)
        const double decay_steps = o->wsd_frac * (double)o->steps, left = (double)(o->steps - step);
        return left >= decay_steps || decay_steps <= 0 ? peak : floor + (peak - floor) * left / decay_steps;
    }
    default: return peak; // constant
    }
}

static inline AdamW optimizer_config(const Options *o) {
    return (AdamW){.beta1 = o->beta1, .beta2 = o->beta2, .eps = o->eps, .weight_decay = o->weight_decay};
}

#endif
