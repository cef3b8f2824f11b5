// test_dropout.cuh: dropout's backward of the CUDA device against the CPU device; its mask against rng.h.
#ifndef TEST_CUDA_TEST_DROPOUT_CUH
#define TEST_CUDA_TEST_DROPOUT_CUH

#include "dev/test/cuda/compare.cuh" // Compare
#include "dev/test/cuda/same.cuh"    // both_shifted, both_tokens

static void dropout_backward_case_(Compare *t, int64_t N, int64_t C, int64_t skip, Dtype dtype, uint32_t threshold, bool in_place) {
    compare_case(t, "N %lld, C %lld, skip %lld, threshold %u, in place %d", (long long)N, (long long)C, (long long)skip, threshold, in_place);
    const Both in = both_shifted(both_random(t, N * C + skip, dtype, 0.5, 2), skip), token = both_tokens(t, N);
    const BothScalar<uint64_t> key = both_scalar<uint64_t>(t, 0xfedcba9876543210);
    const Both out = in_place ? in : both_shifted(both_output(t, N * C + skip, dtype), skip);
    on_both(t, [&](Device *d, int w) {
        const Dropout dropout = {key[w], 0xffffff, threshold, token[w]};
        d->dropout_backward(d, out[w], in[w], threshold < 65537 ? &dropout : nullptr, N, C);
    });
    compare(t, "dropout_backward", out, 0, 1);
    compare_release(t);
}

// Ones become the mask itself: forward's and backward's are that of rng.h, of this token, site and channel.
static void dropout_mask_case_(Compare *t, int64_t N, int64_t C) {
    const uint32_t threshold = 50000;
    compare_case(t, "mask N %lld, C %lld", (long long)N, (long long)C);
    const Both ones = both_values(t, std::vector<float>((size_t)(N * C), 1.0f), DTYPE_F32), zeros = both_random(t, N * C, DTYPE_F32, 0, 0);
    const Both token = both_tokens(t, N), forward = both_output(t, N * C, DTYPE_F32), backward = both_output(t, N * C, DTYPE_F32);
    Device *d = t->device[1];
    const uint64_t number = 77;
    const Dropout dropout = {both_scalar(t, number)[1], 5, threshold, token[1]};
    d->residual_forward(d, forward[1], zeros[1], ones[1], &dropout, N, C);
    d->dropout_backward(d, backward[1], ones[1], &dropout, N, C);
    std::vector<float> want((size_t)(N * C));
    std::vector<int32_t> index((size_t)N);
    t->device[0]->copy_out(t->device[0], index.data(), token[0].data, (size_t)N * sizeof(int32_t));
    for (int64_t n = 0; n < N; n++) {
        for (int64_t c = 0; c < C; c++) {
            uint16_t bits[8];
            rng_dropout_bits(number, dropout.site, (uint64_t)index[(size_t)n], (uint32_t)(c / 8), bits);
            want[(size_t)(n * C + c)] = bits[c % 8] < threshold ? 65536.0f / (float)threshold : 0.0f;
        }
    }
    t->device[0]->copy_in(t->device[0], forward[0].data, want.data(), want.size() * sizeof(float));
    t->device[0]->copy_in(t->device[0], backward[0].data, want.data(), want.size() * sizeof(float));
    compare(t, "dropout mask of forward", forward, 0);
    compare(t, "dropout mask of backward", backward, 0);
    compare_release(t);
}

static void test_dropout(Compare *t) {
    const int64_t sizes[][3] = {{1, 1, 0}, {3, 8, 0}, {3, 64, 1}, {5, 37, 0}, {2, 2056, 0}, {2, 1029, 0}, {17000, 2, 0}, {0, 64, 0}};
    for (const int64_t(&size)[3] : sizes) {
        for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) {
            for (uint32_t threshold : {58982u, 16384u, 0u, 65536u, 65537u}) { // the last two: no dropout, and no Dropout at all
                if (size[0] < 1000 || threshold == 58982)
                    dropout_backward_case_(t, size[0], size[1], size[2], dtype, threshold, threshold % 4 != 0);
            }
        }
    }
    dropout_mask_case_(t, 300, 37);
    dropout_mask_case_(t, 9, 1600);
}

#endif
