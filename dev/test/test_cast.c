// test_cast.c: every bf16 value, random fp32 bit patterns against precision.h, sizes around the block; accumulate; memory of the device.
#include "dev/test/ops.h"    // ops_new
#include "llmc/cpu/cast.h"   // cpu_cast, cpu_accumulate
#include "llmc/cpu/memory.h" // cpu_alloc

static void test_values(void) {
    enum { N = 65536, M = 300007 };
    Buffer narrow = ops_new(N, DTYPE_BF16), wide = ops_new(N, DTYPE_F32), again = ops_new(N, DTYPE_BF16);
    for (int i = 0; i < N; i++) ((uint16_t *)narrow.data)[i] = (uint16_t)i;
    cpu_cast(NULL, wide, narrow, N);
    int wrong = 0;
    for (int i = 0; i < N; i++) {
        const float want = bf16_to_f32((uint16_t)i);
        wrong += memcmp(&want, (float *)wide.data + i, 4) != 0;
    }
    check(wrong == 0, "widening: %d of all 65536 values are wrong", wrong);
    cpu_cast(NULL, again, wide, N);
    wrong = 0;
    for (int i = 0; i < N; i++) {
        const uint16_t bits = ((uint16_t *)again.data)[i];
        const bool nan = (i & 0x7f80) == 0x7f80 && (i & 0x7f);
        wrong += nan ? !isnan(bf16_to_f32(bits)) : bits != i;
    }
    check(wrong == 0, "there and back: %d of all 65536 values are wrong", wrong);

    Buffer random = ops_new(M, DTYPE_F32), rounded = ops_new(M, DTYPE_BF16);
    for (int64_t i = 0; i < M; i++) {
        uint32_t bits = (uint32_t)rng_mix((uint64_t)i);
        if (i % 3 == 0) bits = (bits & 0xffff0000) | 0x8000;     // ties
        if (i % 5 == 0) bits |= 0x7f800000;                      // NaN and infinity
        if (i % 7 == 0) bits = (bits & 0x8000ffff) | 0x7f7f0000; // around the largest finite value
        memcpy((float *)random.data + i, &bits, 4);
    }
    cpu_cast(NULL, rounded, random, M);
    wrong = 0;
    for (int64_t i = 0; i < M; i++) wrong += ((uint16_t *)rounded.data)[i] != bf16_from_f32(((float *)random.data)[i]);
    check(wrong == 0, "rounding: %d of %d bit patterns differ from bf16_from_f32", wrong, M);
    free(narrow.data), free(wide.data), free(again.data), free(random.data), free(rounded.data);
}

static void test_sizes(void) {
    static const int64_t sizes[] = {0, 1, 7, 131, 1023, 1024, 1025, 5000};
    static const Dtype dtypes[] = {DTYPE_F32, DTYPE_BF16};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (int pair = 0; pair < 4; pair++) {
            const int64_t n = sizes[s];
            const Dtype from_dtype = dtypes[pair & 1], to_dtype = dtypes[pair >> 1];
            Buffer from = ops_random(n, from_dtype, 1, 0, 1), to = ops_random(n + 1, to_dtype, 2, 5, 1);
            const double behind = ops_at(to, n);
            cpu_cast(NULL, to, from, n);
            bool right = ops_at(to, n) == behind;
            for (int64_t i = 0; i < n; i++) right = right && ops_at(to, i) == ops_round(to_dtype, ops_at(from, i));
            check(right, "cast of %lld elements, %s to %s", (long long)n, dtype_names[from_dtype], dtype_names[to_dtype]);
            free(from.data), free(to.data);
        }
    }
}

static void test_accumulate(void) {
    static const int64_t sizes[] = {0, 1, 7, 131, 1025, 50003};
    const int most = omp_get_max_threads();
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (int threads = 1; threads <= 3; threads++) {
            omp_set_num_threads(threads);
            const int64_t n = sizes[s];
            Buffer from = ops_random(n, DTYPE_F32, 1, 0, 1), to = ops_random(n + 1, DTYPE_F32, 2, 5, 1), old = ops_copy(to, n + 1);
            if (n > 7) ((float *)from.data)[6] = NAN;
            cpu_accumulate(NULL, to, from, n);
            bool right = ops_at(to, n) == ops_at(old, n);
            for (int64_t i = 0; i < n; i++) {
                const double want = ops_round(DTYPE_F32, ops_at(old, i) + ops_at(from, i));
                right = right && (isnan(want) ? isnan(ops_at(to, i)) : ops_at(to, i) == want);
            }
            check(right, "accumulate of %lld elements with %d threads is the rounded sum, and no more", (long long)n, threads);
            free(from.data), free(to.data), free(old.data);
        }
    }
    omp_set_num_threads(most);
}

static void test_memory(void) {
    static const size_t sizes[] = {0, 1, 63, 4096, ((size_t)2 << 20) - 1, (size_t)2 << 20, ((size_t)9 << 20) + 5};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        const size_t bytes = sizes[s];
        unsigned char *memory = cpu_alloc(NULL, bytes), *host = base_new(bytes, 1), *back = base_new(bytes, 1);
        bool zero = true;
        for (size_t i = 0; i < bytes; i++) zero = zero && memory[i] == 0;
        check(zero && (uintptr_t)memory % 64 == 0, "alloc(%zu) is zero and aligned", bytes);
        for (size_t i = 0; i < bytes; i++) host[i] = (unsigned char)(i * 7 + 1);
        cpu_copy_in(NULL, memory, host, bytes);
        cpu_synchronize(NULL);
        cpu_copy_out(NULL, back, memory, bytes);
        check(memcmp(host, back, bytes) == 0, "%zu bytes there and back", bytes);
        if (bytes > 2) {
            cpu_zero(NULL, memory + 1, bytes - 2);
            bool inner = true;
            for (size_t i = 1; i + 1 < bytes; i++) inner = inner && memory[i] == 0;
            check(inner && memory[0] == host[0] && memory[bytes - 1] == host[bytes - 1], "zero of %zu bytes, no more", bytes - 2);
        }
        cpu_release(NULL, memory);
        free(host), free(back);
    }
    cpu_release(NULL, NULL);
}

int main(void) {
    printf("cast, accumulate and memory\n");
    test_values();
    test_sizes();
    test_accumulate();
    test_memory();
    return test_end();
}
