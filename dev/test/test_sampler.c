// test_sampler.c: the permutation is one for every size and epoch, looks random, and windows cover files exactly.
#include "dev/test/token_files.h" // write_tokens, check
#include "llmc/sampler.h"         // the module

static void test_bijection(void) {
    const int64_t sizes[] = {1, 2, 3, 4, 5, 7, 16, 17, 1000, 1023, 1024, 1025, ((int64_t)1 << 20) + 1};
    unsigned char *seen = base_new((size_t)2 << 20, 1);
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const int64_t n = sizes[s];
        for (int64_t epoch = 0; epoch < (n < 2000 ? 20 : 1); epoch++) {
            for (int shuffle = 0; shuffle < 2; shuffle++) {
                const Sampler sampler = sampler_create(42, n, shuffle);
                memset(seen, 0, (size_t)n);
                int64_t wrong = 0;
                for (int64_t i = 0; i < n; i++) {
                    const int64_t x = sampler_index(&sampler, epoch, i);
                    if (x < 0 || x >= n || seen[x]++) wrong++;
                    if (!shuffle && x != i) wrong++;
                }
                check(wrong == 0, "n %lld, epoch %lld, shuffle %d: %lld wrong", (long long)n, (long long)epoch, shuffle, (long long)wrong);
            }
        }
    }
    free(seen);
    const Sampler huge = sampler_create(1, (int64_t)1 << 61, true);
    bool inside = true;
    for (int64_t i = 0; i < 1000; i++) {
        const int64_t x = sampler_index(&huge, INT64_MAX / 16, i);
        inside = inside && x >= 0 && x < huge.count;
    }
    check(inside, "2^61 samples");
    printf("bijection: 13 sizes, up to 20 epochs\n");
}

// Where element 0..n-1 lands over many epochs: chi-square per degree of freedom near 1.
static void test_uniform(void) {
    const int64_t sizes[] = {2, 3, 7, 50};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const int64_t n = sizes[s], epochs = 400 * n;
        const Sampler sampler = sampler_create(7, n, true);
        int64_t *hits = base_new((size_t)(n * n), sizeof *hits);
        for (int64_t e = 0; e < epochs; e++) {
            for (int64_t i = 0; i < n; i++) hits[i * n + sampler_index(&sampler, e, i)]++;
        }
        double chi = 0;
        for (int64_t i = 0; i < n * n; i++) chi += ((double)hits[i] - 400.0) * ((double)hits[i] - 400.0) / 400.0;
        const double per_degree = chi / (double)((n - 1) * (n - 1)), sd = sqrt(2.0 / (double)((n - 1) * (n - 1)));
        check(fabs(per_degree - 1) < 5 * sd, "n %lld: chi-square per degree %.3f", (long long)n, per_degree);
        printf("uniform: n %lld: chi-square per degree %.3f (bound 1 +- %.2f)\n", (long long)n, per_degree, 5 * sd);
        free(hits);
    }
    const int64_t n = 100000;
    const Sampler a = sampler_create(1, n, true), b = sampler_create(2, n, true);
    int64_t fixed = 0, same_epoch = 0, same_seed = 0, rising = 0;
    for (int64_t i = 0; i < n; i++) {
        const int64_t x = sampler_index(&a, 0, i);
        fixed += x == i;
        same_epoch += x == sampler_index(&a, 1, i);
        same_seed += x == sampler_index(&b, 0, i);
        rising += i > 0 && x > sampler_index(&a, 0, i - 1);
    }
    check(fixed < 10 && same_epoch < 10 && same_seed < 10, "fixed points %lld, as next epoch %lld, as other seed %lld", (long long)fixed,
          (long long)same_epoch, (long long)same_seed);
    check(llabs(rising - n / 2) < 5 * 100, "rises: %lld of %lld", (long long)rising, (long long)n);
    check(sampler_at(&a, n + 5) == sampler_index(&a, 1, 5) && sampler_at(&a, n - 1) == sampler_index(&a, 0, n - 1), "position -> (epoch, index)");
    printf("epochs and seeds: %lld, %lld, %lld coincidences of 100000 (about 1 expected), %lld rises\n", (long long)fixed, (long long)same_epoch,
           (long long)same_seed, (long long)rising);
}

static void test_windows(const TempDir *dir) {
    const int64_t T = 8, sizes[] = {0, 1, T, T + 1, 2 * T, 2 * T + 1, 0, 3 * T + 4}, wanted[] = {0, 0, 0, 1, 1, 2, 0, 3};
    int32_t ids[100] = {0};
    for (int f = 0; f < 8; f++) {
        char name[20];
        snprintf(name, sizeof name, "w%d.bin", f);
        write_tokens(dir, name, ids, sizes[f], 2);
    }
    TokenSet set = open_tokens(temp_path(dir, "w*.bin").text, 300);
    Windows windows = {0};
    Error error = {0};
    check(windows_create(&windows, &set, T, "--train", &error) && windows.count == 7, "windows: %lld", (long long)windows.count);
    int64_t w = 0;
    for (int f = 0; f < 8; f++) {
        for (int64_t k = 0; k < wanted[f]; k++, w++) {
            const int64_t position = windows_position(&windows, w);
            check(position == set.files[f].start + k * T, "window %lld: at %lld", (long long)w, (long long)position);
            check(tokens_file_at(&set, position) == &set.files[f], "window %lld: in file %d", (long long)w, f);
        }
    }
    windows_free(&windows);
    check(windows_create(&windows, &set, 1, "--train", &error) && windows.count == 7 + 8 + 15 + 16 + 27, "T = 1: %lld", (long long)windows.count);
    windows_free(&windows);
    check(!windows_create(&windows, &set, 28, "--train", &error) && error.code == CODE_INPUT &&
              strstr(error.text, "w7.bin, has 28 tokens, wanted 29"),
          "too short: %s", error.text);
    tokens_close(&set);
    printf("windows: files of 0, 1, T, T+1, 2T, 2T+1, 0, 3T+4 tokens\n");
}

int main(void) {
    TempDir dir = temp_create();
    test_bijection();
    test_uniform();
    test_windows(&dir);
    temp_remove(&dir);
    return finish();
}
