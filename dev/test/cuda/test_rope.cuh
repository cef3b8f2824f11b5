// test_rope.cuh: the norm per head and the rotation of q and k on the CUDA device against the CPU device.
#ifndef TEST_CUDA_TEST_ROPE_CUH
#define TEST_CUDA_TEST_ROPE_CUH

#include "dev/test/cuda/compare.cuh" // Compare
#include "dev/test/cuda/same.cuh"    // compare_same, both_shifted
#include "llmc/rope.h"               // rope_table_fill

struct RopeCase {
    int64_t heads, kv_heads, head_size, N, skip;
};
// A group of 1, 2, 4 and 8 lanes; idle lanes; more heads than groups; sizes that are not moved as packs, odd ones; tokens for all blocks; none.
static const RopeCase rope_cases[] = {
    {1, 1, 16, 5, 0},   {2, 1, 32, 5, 0}, {12, 12, 64, 3, 0}, {4, 2, 128, 3, 0}, {3, 1, 96, 5, 0},  {130, 10, 16, 2, 0},
    {20, 4, 128, 2, 0}, {3, 1, 10, 7, 0}, {2, 2, 33, 4, 0},   {1, 1, 1, 9, 0},   {2, 1, 126, 3, 0}, {5, 1, 7, 3, 0},
    {2, 1, 64, 3, 1},   {2, 1, 24, 3, 0}, {2, 1, 64, 75, 0},  {1, 1, 12, 70, 0}, {2, 1, 64, 0, 0},
};

struct RopeInputs {
    Both table, positions, q_norm, k_norm;
};
static RopeInputs rope_inputs_(Compare *t, RopeCase c, Dtype dtype, bool normed, bool rotated) {
    const int64_t places = 3000, HS = c.head_size;
    RopeInputs in = {both_absent(), both_absent(), both_absent(), both_absent()};
    if (rotated) {
        std::vector<float> table((size_t)(places * HS + 1)); // not written by an odd size: the last column
        std::vector<int32_t> positions((size_t)c.N);
        const RopeScaling unscaled = {};
        rope_table_fill(table.data(), places, HS, 10000, &unscaled);
        for (int32_t &position : positions) position = (int32_t)((compare_uniform(t) + 1) / 2 * (double)places);
        in.table = both_values(t, table, DTYPE_F32), in.positions = both_ints(t, positions);
    }
    if (normed) in.q_norm = both_random(t, HS, dtype, 1, 0.5), in.k_norm = both_random(t, HS, dtype, 1, 0.5);
    return in;
}

static void rope_forward_case_(Compare *t, RopeCase c, Dtype dtype, bool normed, bool rotated, bool in_place) {
    const AttentionShape shape = {c.heads, c.kv_heads, c.head_size};
    const int64_t all = c.heads + c.kv_heads, n = c.N * (all + c.kv_heads) * c.head_size + c.skip;
    const RopeInputs in = rope_inputs_(t, c, dtype, normed, rotated);
    const Both qkv = both_shifted(both_random(t, n, dtype, 0.1, 1), c.skip), rstd = normed ? both_output(t, c.N * all, DTYPE_F32) : both_absent();
    const Both out = in_place ? qkv : both_shifted(both_output(t, n, dtype), c.skip);
    on_both(t, [&](Device *d, int w) {
        d->qk_forward(d, out[w], rstd[w], qkv[w], in.q_norm[w], in.k_norm[w], 1e-5, in.table[w], in.positions[w], shape, c.N);
    });
    compare(t, "qk_forward", out, 1e-6);
    if (normed) compare(t, "qk_forward rstd", rstd, 1e-6);
    compare_release(t);
}

static void rope_backward_case_(Compare *t, RopeCase c, Dtype dtype, bool normed, bool rotated, bool accumulate) {
    const AttentionShape shape = {c.heads, c.kv_heads, c.head_size};
    const int64_t HS = c.head_size, all = c.heads + c.kv_heads, n = c.N * (all + c.kv_heads) * HS + c.skip;
    const RopeInputs in = rope_inputs_(t, c, dtype, normed, rotated);
    const Both qkv = both_shifted(both_random(t, n, dtype, 0.1, 1), c.skip), dqkv = both_shifted(both_random(t, n, dtype, 0, 1), c.skip);
    const Both rstd = normed ? both_random(t, c.N * all, DTYPE_F32, 1.2, 0.4) : both_absent();
    Both gradient[2] = {both_absent(), both_absent()};
    for (Both &g : gradient) {
        if (normed) g = accumulate ? both_random(t, HS, DTYPE_F32, 0, 1) : both_output(t, HS, DTYPE_F32);
    }
    on_both(t, [&](Device *d, int w) {
        d->qk_backward(d, dqkv[w], gradient[0][w], gradient[1][w], accumulate, qkv[w], rstd[w], in.q_norm[w], in.k_norm[w], in.table[w],
                       in.positions[w], shape, c.N);
    });
    compare(t, "qk_backward dqkv", dqkv, 1e-6);
    if (normed) compare(t, "qk_backward dq_norm", gradient[0], 1e-5); // sums over all tokens may cancel
    if (normed) compare(t, "qk_backward dk_norm", gradient[1], 1e-5);
    compare_release(t);
}

// The same call twice.
static void rope_twice_(Compare *t, RopeCase c, Dtype dtype) {
    const AttentionShape shape = {c.heads, c.kv_heads, c.head_size};
    const int64_t HS = c.head_size, all = c.heads + c.kv_heads, n = c.N * (all + c.kv_heads) * HS;
    compare_case(t, "twice HS %lld, %s", (long long)HS, dtype_names[dtype]);
    const RopeInputs in = rope_inputs_(t, c, dtype, true, true);
    const Both qkv = both_random(t, n, dtype, 0, 1), given = both_random(t, n, dtype, 0, 1), rstd = both_output(t, c.N * all, DTYPE_F32);
    Both out[2], dqkv[2], dq[2], dk[2];
    Device *d = t->device[1];
    for (int run = 0; run < 2; run++) {
        out[run] = both_output(t, n, dtype), dqkv[run] = both_output(t, n, dtype);
        dq[run] = both_output(t, HS, DTYPE_F32), dk[run] = both_output(t, HS, DTYPE_F32);
        d->cast(d, dqkv[run][1], given[1], n);
        d->qk_forward(d, out[run][1], rstd[1], qkv[1], in.q_norm[1], in.k_norm[1], 1e-5, in.table[1], in.positions[1], shape, c.N);
        d->qk_backward(d, dqkv[run][1], dq[run][1], dk[run][1], false, qkv[1], rstd[1], in.q_norm[1], in.k_norm[1], in.table[1], in.positions[1],
                       shape, c.N);
    }
    compare_same(t, "qk_forward twice", out[0][1], out[1][1], n);
    compare_same(t, "qk_backward dqkv twice", dqkv[0][1], dqkv[1][1], n);
    compare_same(t, "qk_backward dq_norm twice", dq[0][1], dq[1][1], HS);
    compare_same(t, "qk_backward dk_norm twice", dk[0][1], dk[1][1], HS);
    compare_release(t);
}

static void test_rope(Compare *t) {
    for (const RopeCase &c : rope_cases) {
        for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) {
            for (int mode = 0; mode < 4; mode++) { // neither only copies
                const bool normed = mode & 1, rotated = mode & 2;
                compare_case(t, "NH %lld, NKV %lld, HS %lld, N %lld, skip %lld, norm %d, rotation %d", (long long)c.heads, (long long)c.kv_heads,
                             (long long)c.head_size, (long long)c.N, (long long)c.skip, normed, rotated);
                rope_forward_case_(t, c, dtype, normed, rotated, false);
                if (!normed) rope_forward_case_(t, c, dtype, normed, rotated, true);
                rope_backward_case_(t, c, dtype, normed, rotated, c.heads % 2 == 0);
            }
        }
    }
    for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) {
        rope_twice_(t, {3, 2, 64, 70, 0}, dtype);
        rope_twice_(t, {3, 2, 9, 7, 0}, dtype);
    }
}

#endif
