// same.cuh: whether two results of the CUDA device agree in every bit; inputs of particular kinds. Knows no op.
#ifndef TEST_CUDA_SAME_CUH
#define TEST_CUDA_SAME_CUH

#include "dev/test/cuda/compare.cuh" // Compare, compare_record

// One row of the table counts the elements (n) that differ: none may. Both buffers are CUDA's and of one dtype.
static inline void compare_same(Compare *t, const char *what, Buffer a, Buffer b, int64_t n) {
    const std::vector<float> first = compare_read(t, 1, a, n), second = compare_read(t, 1, b, n);
    int64_t differ = 0;
    for (size_t i = 0; i < first.size(); i++) differ += memcmp(&first[i], &second[i], sizeof(float)) != 0;
    compare_record(t, what, (double)differ, 0);
}

// All but the first `skip` elements: addresses that are not aligned to 16 bytes.
static inline Both both_shifted(Both both, int64_t skip) {
    for (Buffer &buffer : both.at) buffer = buffer_at(buffer, skip);
    both.n -= skip;
    return both;
}

// Multiples of 1/64 in (-1, 1): what bf16 can hold, their sums too.
static inline Both both_coarse(Compare *t, int64_t n, Dtype dtype) {
    std::vector<float> values((size_t)n);
    for (float &value : values) value = (float)trunc(64 * compare_uniform(t)) / 64;
    return both_values(t, values, dtype);
}

// Token indices in no order, beyond 16 bits.
static inline Both both_tokens(Compare *t, int64_t N) {
    std::vector<int32_t> values((size_t)N);
    for (int32_t &value : values) value = (int32_t)((compare_uniform(t) + 1) * 1e6);
    return both_ints(t, values);
}

#endif
