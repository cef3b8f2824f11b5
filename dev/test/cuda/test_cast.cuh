// test_cast.cuh: cast and accumulate of the CUDA device against the CPU device.
#ifndef TEST_CUDA_TEST_CAST_CUH
#define TEST_CUDA_TEST_CAST_CUH

#include "dev/test/cuda/compare.cuh" // Compare

static void test_cast(Compare *t) {
    for (int64_t n : {1, 7, 8, 4096, 5003}) {
        for (int64_t skip : {0, 1}) { // an address that is not aligned to 16 bytes
            for (Dtype from : {DTYPE_F32, DTYPE_BF16}) {
                for (Dtype to : {DTYPE_F32, DTYPE_BF16}) {
                    compare_case(t, "n %lld, skip %lld, %s to %s", (long long)n, (long long)skip, dtype_names[from], dtype_names[to]);
                    const Both in = both_random(t, n + skip, from, 0.5, 3), out = both_output(t, n, to);
                    on_both(t, [&](Device *d, int w) { d->cast(d, out[w], buffer_at(in[w], skip), n); });
                    compare(t, "cast", out, 0, 1);
                    compare_release(t);
                }
            }
        }
        compare_case(t, "n %lld", (long long)n);
        const Both sum = both_random(t, n, DTYPE_F32, 0, 1), add = both_random(t, n, DTYPE_F32, 0, 1);
        on_both(t, [&](Device *d, int w) { d->accumulate(d, sum[w], add[w], n); });
        compare(t, "accumulate", sum, 0);
        compare_release(t);
    }
}

#endif
