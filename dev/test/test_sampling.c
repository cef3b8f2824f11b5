// test_sampling.c: temperature, top-k and top-p against the probabilities they promise.
#include "llmc/sampling.h"
#include "dev/test/test.h"

int main(void) {
    printf("sampling: greedy, proportions, top-k, top-p, odd inputs\n");
    const float logits[5] = {1.0f, 3.0f, 2.0f, -INFINITY, 3.0f};
    const SamplingConfig greedy = {0, 0, 1}, plain = {1, 0, 1}, two = {1, 2, 1}, nucleus = {1, 0, 0.5}, cold = {0.01, 0, 1};
    for (int i = 0; i < 10; i++) check(sampling_choose(logits, 5, greedy, i / 10.0) == 1, "greedy takes the first of the likeliest");

    // The chosen token as a function of the uniform number has each token's probability as the length of its interval.
    const double total = exp(1.0) + 2 * exp(3.0) + exp(2.0);
    const double wanted[5] = {exp(1.0) / total, exp(3.0) / total, exp(2.0) / total, 0, exp(3.0) / total};
    int counts[5] = {0}, counts_two[5] = {0}, counts_nucleus[5] = {0}, counts_cold[5] = {0};
    enum { DRAWS = 100000 };
    for (int i = 0; i < DRAWS; i++) {
        const double uniform = (i + 0.5) / DRAWS;
        counts[sampling_choose(logits, 5, plain, uniform)]++;
        counts_two[sampling_choose(logits, 5, two, uniform)]++;
        counts_nucleus[sampling_choose(logits, 5, nucleus, uniform)]++;
        counts_cold[sampling_choose(logits, 5, cold, uniform)]++;
    }
    double worst = 0;
    for (int i = 0; i < 5; i++) worst = fmax(worst, fabs(counts[i] / (double)DRAWS - wanted[i]));
    check_error(worst, 2.0 / DRAWS, "share of each token at temperature 1");
    check(abs(counts_two[1] - DRAWS / 2) <= 1 && counts_two[1] + counts_two[4] == DRAWS, "top-k 2 keeps the two likeliest, equally likely");
    check(counts_nucleus[1] + counts_nucleus[4] == DRAWS && counts_nucleus[4] > 0, "top-p 0.5 needs both tokens of 0.39");
    const SamplingConfig narrow = {1, 0, 0.3};
    check(sampling_choose(logits, 5, narrow, 0.999) == 1, "top-p 0.3 keeps one token");
    check(counts_cold[1] + counts_cold[4] == DRAWS, "a cold temperature keeps the likeliest");

    const float bad[3] = {NAN, INFINITY, -INFINITY}, huge[2] = {20000.0f, -20000.0f};
    check(sampling_choose(bad, 3, plain, 0.5) == 0, "no finite logit: token 0");
    check(sampling_choose(huge, 2, plain, 0.999999) == 0, "extreme logits");
    const SamplingConfig wide = {1, 100, 1};
    check(sampling_choose(logits, 5, wide, 0.0) == 1, "top-k above the vocabulary");
    return test_end();
}
