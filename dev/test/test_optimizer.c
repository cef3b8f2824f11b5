// test_optimizer.c: the learning rate of every schedule at its corners.
#include "llmc/optimizer.h"
#include "dev/test/test.h"

static double rate(int schedule, int64_t warmup, int64_t steps, int64_t step) {
    Options o = {.lr = 1.0, .min_lr_frac = 0.1, .warmup = warmup, .steps = steps, .schedule = schedule, .wsd_frac = 0.2};
    return learning_rate(&o, step);
}

int main(void) {
    printf("optimizer: learning rate schedules\n");
    const int schedules[] = {SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_WSD, SCHEDULE_CONSTANT};
    for (int i = 0; i < 4; i++) {
        const int s = schedules[i];
        const double last = s == SCHEDULE_CONSTANT ? 1.0 : 0.1;
        check(fabs(rate(s, 10, 100, 1) - 0.1) < 1e-12, "schedule %d: first step of warm-up is lr/warmup", s);
        check(fabs(rate(s, 10, 100, 10) - 1.0) < 1e-12, "schedule %d: warm-up ends at the peak", s);
        check(fabs(rate(s, 10, 100, 100) - last) < 1e-12, "schedule %d: last step", s);
        check(fabs(rate(s, 0, 1, 1) - last) < 1e-12, "schedule %d: a single step", s);
        check(isfinite(rate(s, 200, 100, 100)) && rate(s, 200, 100, 100) == 0.5, "schedule %d: warm-up longer than the run", s);
        for (int64_t n = 11; n < 100; n++) {
            check(rate(s, 10, 100, n + 1) <= rate(s, 10, 100, n) + 1e-12, "schedule %d: never rises after warm-up (step %d)", s, (int)n);
        }
    }
    check(fabs(rate(SCHEDULE_COSINE, 10, 110, 60) - 0.55) < 1e-12, "cosine: half-way");
    check(fabs(rate(SCHEDULE_LINEAR, 10, 110, 60) - 0.55) < 1e-12, "linear: half-way");
    check(rate(SCHEDULE_WSD, 10, 100, 80) == 1.0 && fabs(rate(SCHEDULE_WSD, 10, 100, 90) - 0.55) < 1e-12, "wsd: stable to 80, half decayed at 90");
    const Options o = {.beta1 = 0.8, .beta2 = 0.9, .eps = 1e-3, .weight_decay = 0.25};
    const AdamW config = optimizer_config(&o);
    check(config.beta1 == 0.8 && config.beta2 == 0.9 && config.eps == 1e-3 && config.weight_decay == 0.25, "AdamW's settings are the flags'");
    return test_end();
}
