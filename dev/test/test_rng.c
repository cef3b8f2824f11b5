// test_rng.c: Philox4x32-10 against the known answers of its authors' Random123, and the distributions drawn from it.
#include "dev/test/test.h" // check, test_end
#include "llmc/base.h"     // base_new
#include "llmc/rng.h"      // what is tested

static void check_philox_(uint64_t key, uint64_t low, uint64_t high, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const Philox r = philox(key, low, high);
    check(r.x[0] == a && r.x[1] == b && r.x[2] == c && r.x[3] == d, "philox(%llx): got %08x %08x %08x %08x, wanted %08x %08x %08x %08x",
          (unsigned long long)key, r.x[0], r.x[1], r.x[2], r.x[3], a, b, c, d);
}

static void test_known_answers(void) {
    check_philox_(0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8);
    check_philox_(UINT64_MAX, UINT64_MAX, UINT64_MAX, 0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd);
    // digits of pi: counter 243f6a88 85a308d3 13198a2e 03707344, key a4093822 299f31d0
    check_philox_(0x299f31d0a4093822u, 0x85a308d3243f6a88u, 0x0370734413198a2eu, 0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1);
    printf("philox: 3 known answers\n");
}

static void test_interval(void) {
    check(rng_uniform(0) == 0x1p-24f && rng_uniform(UINT32_MAX) == 1.0f && rng_uniform(255) == 0x1p-24f && rng_uniform(256) == 0x1p-23f,
          "ends of (0, 1]");
    printf("uniform: (0, 1], never 0\n");
}

static void test_normal(void) {
    enum { COUNT = 200000 };
    double sum = 0, squares = 0, cubes = 0, fourths = 0, lag = 0, previous = 0, beyond = 0;
    int bad = 0;
    for (int i = 0; i < COUNT; i++) {
        const double x = (double)rng_normal(rng_key(1337, RNG_INIT), 5, (uint64_t)i);
        bad += !isfinite(x);
        sum += x, squares += x * x, cubes += x * x * x, fourths += x * x * x * x, lag += x * previous, beyond += fabs(x) > 2;
        previous = x;
    }
    const double n = COUNT, five = 5 / sqrt(n); // five standard errors, the seed is fixed
    const double errors[] = {sum / n, squares / n - 1, cubes / n, fourths / n - 3, lag / n, beyond / n - 0.0455002639};
    const double bounds[] = {five, five * sqrt(2), five * sqrt(15), five * sqrt(96), five, five * 0.2084};
    static const char *const names[] = {"mean", "variance", "third moment", "fourth moment", "neighbours", "beyond 2"};
    for (int i = 0; i < 6; i++) {
        check(fabs(errors[i]) <= bounds[i], "normal: %s off by %.2e, bound %.2e", names[i], errors[i], bounds[i]);
        printf("normal: %-13s off by %8.1e, bound %.1e\n", names[i], errors[i], bounds[i]);
    }
    check(bad == 0, "%d numbers are not finite", bad);
    const float x = rng_normal(1, 2, 3);
    check(x == rng_normal(1, 2, 3) && x != rng_normal(2, 2, 3) && x != rng_normal(1, 3, 3) && x != rng_normal(1, 2, 4),
          "a function of key, tensor, element");
    check(rng_normal(1, 2, (uint64_t)1 << 40) != rng_normal(1, 2, 0), "elements beyond 2^32 differ");
    check(rng_normal(1, 2, ((uint64_t)1 << 33) + 6) != rng_normal(1, 2, 6), "the counter's high word counts");
}

static void test_keys(void) {
    // different uses and seeds give different keys: the first 1000 seeds times 8 uses
    enum { COUNT = 8000 };
    uint64_t *keys = base_new(COUNT, sizeof *keys);
    int same = 0;
    for (int i = 0; i < COUNT; i++) {
        keys[i] = rng_key((uint64_t)i / 8, (uint32_t)i % 8);
        for (int j = 0; j < i; j++) same += keys[j] == keys[i];
    }
    free(keys);
    check(same == 0, "%d of %d keys coincide", same, COUNT);
    check(rng_mix(0) == 0xe220a8397b1dcdafu, "splitmix64's first number: %llx", (unsigned long long)rng_mix(0));
    check(rng_dropout_key(1, 2) != rng_dropout_key(1, 3) && rng_dropout_key(1, 2) != rng_dropout_key(2, 2), "dropout keys by seed and step");
    printf("keys: %d of seeds and uses, all different\n", COUNT);
}

static void test_dropout(void) {
    check(rng_dropout_threshold(0) == 65536 && rng_dropout_threshold(0.5) == 32768 && rng_dropout_threshold(0.1) == 58982, "thresholds");
    const uint32_t threshold = rng_dropout_threshold(0.1);
    const uint64_t key = rng_dropout_key(1337, 7);
    int kept = 0, total = 0;
    for (uint64_t token = 0; token < 500; token++) {
        for (uint32_t group = 0; group < 50; group++) {
            uint16_t bits[8];
            rng_dropout_bits(key, 3, token, group, bits);
            for (int i = 0; i < 8; i++) kept += bits[i] < threshold, total++;
        }
    }
    const double error = (double)kept / total - 0.9, bound = 5 * sqrt(0.09 / total);
    check(fabs(error) <= bound, "kept share off by %.2e, bound %.2e", error, bound);
    uint16_t a[8], b[8];
    rng_dropout_bits(key, 3, 9, 1, a);
    const uint32_t sites[] = {3, 4, 3, 3}, groups[] = {1, 1, 2, 1};
    const uint64_t tokens[] = {9, 9, 9, 10};
    for (int i = 0; i < 4; i++) {
        rng_dropout_bits(key, sites[i], tokens[i], groups[i], b);
        check((memcmp(a, b, sizeof a) == 0) == (i == 0), "the mask is a function of site, token and channel (%d)", i);
    }
    // the 8 numbers are the 16-bit halves of one Philox call, low half first
    const Philox r = philox(key, 9, (uint64_t)3 << 32 | 1);
    for (int i = 0; i < 8; i++) check(a[i] == (uint16_t)(r.x[i / 2] >> (i % 2 * 16)), "half %d", i);
    printf("dropout: kept share off by %.1e, bound %.1e\n", error, bound);
}

int main(void) {
    test_known_answers();
    test_interval();
    test_normal();
    test_keys();
    test_dropout();
    return test_end();
}
