// test_attention.cuh: attention of the CUDA device against the CPU device: documents of all lengths around the tiles' edges, grouped heads, head
// sizes, extreme scores, both ways to number blocks, the same bits twice. What attention means is tested by dev/test/test_attention.c.
//
// Bounds. The CPU device computes in fp32 also when it stores bf16, so that its error in bf16 is the rounding of what it stores: the unit of
// compare(). The CUDA device rounds P and dS to bf16 as well: the error of an output may be twice that, that of dq, dk and dv, which
// round both on their way, three times.
#ifndef TEST_CUDA_TEST_ATTENTION_CUH
#define TEST_CUDA_TEST_ATTENTION_CUH

#include "dev/test/cuda/compare.cuh"     // Compare
#include "llmc/cuda/attention_place.cuh" // cuda_attention_supports
#include <algorithm>                     // std::max

// One call of both devices.
struct AttentionCase {
    AttentionShape shape;
    Dtype dtype;
    std::vector<int32_t> cu; // (documents+1)
    Packing packing[2];
    int64_t N, QKV, OUT; // tokens; elements of a token
    Both qkv, out, lse;
    double largest; // |lse|
};

static AttentionCase attention_create(Compare *t, const std::vector<int> &lengths, AttentionShape shape, Dtype dtype, double scale) {
    AttentionCase c = {shape, dtype, {0}, {}, 0, (shape.heads + 2 * shape.kv_heads) * shape.head_size, shape.heads * shape.head_size,
                       {},    {},    {},  0};
    int64_t longest = 0;
    for (int length : lengths) c.cu.push_back(c.cu.back() + length), longest = std::max(longest, (int64_t)length);
    c.N = c.cu.back();
    const Both cu = both_ints(t, c.cu);
    for (int w = 0; w < 2; w++) c.packing[w] = {cu[w], (int64_t)lengths.size(), c.N, longest};
    c.qkv = both_random(t, c.N * c.QKV, dtype, 0, scale);
    return c;
}

static void attention_same(Compare *t, const char *what, const Both &a, const Both &b) {
    const std::vector<float> x = compare_read(t, 1, a[1], a.n), y = compare_read(t, 1, b[1], b.n);
    compare_record(t, what, x.empty() || memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0 ? 0 : 1, 0);
}

// The first query of a document sees one key: out is that key's value, bit for bit, and lse their score.
static void attention_first_rows(Compare *t, const AttentionCase *c) {
    const int64_t HS = c->shape.head_size, NH = c->shape.heads, NKV = c->shape.kv_heads;
    const std::vector<float> qkv = compare_read(t, 1, c->qkv[1], c->qkv.n), out = compare_read(t, 1, c->out[1], c->out.n);
    const std::vector<float> lse = compare_read(t, 1, c->lse[1], c->lse.n);
    int64_t wrong = 0;
    double worst = 0;
    for (size_t s = 0; s + 1 < c->cu.size(); s++) {
        if (c->cu[s] == c->cu[s + 1]) continue;
        const int64_t token = c->cu[s];
        for (int64_t head = 0; head < NH; head++) {
            const float *q = &qkv[token * c->QKV + head * HS], *k = &qkv[token * c->QKV + (NH + head / (NH / NKV)) * HS], *v = k + NKV * HS;
            double score = 0, size = 0;
            for (int64_t d = 0; d < HS; d++) {
                score += (double)q[d] * k[d], size += fabs((double)q[d] * k[d]);
                wrong += !(out[token * c->OUT + head * HS + d] == v[d]);
            }
            const double error = fabs(lse[head * c->N + token] * sqrt((double)HS) - score) / size;
            worst = error <= worst ? worst : error; // NaN stays
        }
    }
    compare_record(t, "attention out of single keys, wrong values", (double)wrong, 0);
    compare_record(t, "attention lse of single keys", worst, 3e-7);
}

static void attention_forward_case(Compare *t, AttentionCase *c) {
    c->out = both_output(t, c->N * c->OUT, c->dtype), c->lse = both_output(t, c->N * c->shape.heads, DTYPE_F32);
    const Both out = both_output(t, c->out.n, c->dtype), lse = both_output(t, c->lse.n, DTYPE_F32);
    on_both(t, [&](Device *d, int w) { d->attention_forward(d, c->out[w], c->lse[w], c->qkv[w], &c->packing[w], c->shape); });
    for (float value : compare_read(t, 0, c->lse[0], c->lse.n)) c->largest = std::max(c->largest, fabs((double)value));
    compare(t, "attention out", c->out, 2e-6 + 0x1p-23 * c->largest);
    compare(t, "attention lse", c->lse, 1e-6);
    attention_first_rows(t, c);
    Device *cuda = t->device[1];
    cuda->attention_forward(cuda, out[1], lse[1], c->qkv[1], &c->packing[1], c->shape);
    attention_same(t, "attention out, twice", c->out, out);
    attention_same(t, "attention lse, twice", c->lse, lse);
}

// Both devices start from the CPU device's out (rounded) and lse.
static void attention_backward_case(Compare *t, const AttentionCase *c) {
    const int64_t q = c->shape.heads * c->shape.head_size, kv = c->shape.kv_heads * c->shape.head_size;
    const Both out = both_values(t, compare_read(t, 0, c->out[0], c->out.n), c->dtype), dout = both_random(t, c->out.n, c->dtype, 0, 1);
    const Both lse = both_values(t, compare_read(t, 0, c->lse[0], c->lse.n), DTYPE_F32);
    const Both dqkv = both_output(t, c->qkv.n, c->dtype), delta = both_output(t, lse.n, DTYPE_F32);
    const Both dqkv2 = both_output(t, c->qkv.n, c->dtype), delta2 = both_output(t, lse.n, DTYPE_F32);
    on_both(t,
            [&](Device *d, int w) { d->attention_backward(d, dqkv[w], delta[w], dout[w], out[w], c->qkv[w], lse[w], &c->packing[w], c->shape); });
    compare(t, "attention delta", delta, 2e-6);
    const std::vector<float> want = compare_read(t, 0, dqkv[0], dqkv.n), have = compare_read(t, 1, dqkv[1], dqkv.n);
    const struct {
        const char *name;
        int64_t begin, end;
    } parts[] = {{"attention dq", 0, q}, {"attention dk", q, q + kv}, {"attention dv", q + kv, q + 2 * kv}};
    for (const auto &part : parts) {
        std::vector<float> wanted, had;
        for (int64_t token = 0; token < c->N; token++) {
            wanted.insert(wanted.end(), &want[token * c->QKV] + part.begin, &want[token * c->QKV] + part.end);
            had.insert(had.end(), &have[token * c->QKV] + part.begin, &have[token * c->QKV] + part.end);
        }
        compare_values(t, part.name, wanted, had, c->dtype, 4e-6 + 0x1p-23 * c->largest, 3);
    }
    Device *cuda = t->device[1];
    cuda->attention_backward(cuda, dqkv2[1], delta2[1], dout[1], out[1], c->qkv[1], lse[1], &c->packing[1], c->shape);
    attention_same(t, "attention dqkv, twice", dqkv, dqkv2);
}

// scale 1.7: scores of a standard deviation of about one
static void attention_case(Compare *t, const std::vector<int> &lengths, AttentionShape shape, Dtype dtype, double scale = 1.7) {
    std::string text;
    for (size_t i = 0; i < lengths.size() && i < 8; i++) text += (i == 0 ? "" : " ") + std::to_string(lengths[i]);
    compare_case(t, "%s, %zu documents of %s.., heads %lld/%lld of %lld, scale %g", dtype_names[dtype], lengths.size(), text.c_str(),
                 (long long)shape.heads, (long long)shape.kv_heads, (long long)shape.head_size, scale);
    AttentionCase c = attention_create(t, lengths, shape, dtype, scale);
    attention_forward_case(t, &c);
    attention_backward_case(t, &c);
    compare_release(t);
}

// What the host may ask for.
static void attention_supported(Compare *t) {
    compare_case(t, "supports");
    int64_t wrong = 0;
    for (int64_t size = 0; size <= 144; size++) {
        wrong += cuda_attention_supports(DTYPE_F32, {4, 2, size}) != (size >= 1 && size <= 128);
        wrong += cuda_attention_supports(DTYPE_BF16, {4, 2, size}) != (size >= 16 && size <= 128 && size % 16 == 0);
    }
    wrong += cuda_attention_supports(DTYPE_BF16, {4, 3, 64}) || cuda_attention_supports(DTYPE_BF16, {4, 0, 64}) ||
             cuda_attention_supports(DTYPE_BF16, {0, 1, 64});
    compare_record(t, "attention shapes supported, wrong answers", (double)wrong, 0);
}

// The least that passes through every kernel's loop and edges, and through both ways to number blocks: for slow forms of the simulated device.
static void test_attention_small(Compare *t) {
    attention_supported(t);
    for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) attention_case(t, {3, 130}, {4, 2, 48}, dtype);
    std::vector<int> ragged(40, 0);
    ragged[3] = 70, ragged[10] = 1, ragged[39] = 2;
    attention_case(t, ragged, {1, 1, 5}, DTYPE_F32);
}

static void test_attention(Compare *t) {
    const std::vector<int> mixed = {17, 0, 64, 1, 65, 130};
    for (int size : {16, 48, 64, 80, 128}) attention_case(t, mixed, {2, 1, size}, DTYPE_BF16);
    for (int size : {1, 5, 24, 64, 128}) attention_case(t, mixed, {2, 1, size}, DTYPE_F32);
    std::vector<int> ragged(1100, 0); // blocks are searched, in three rounds; elsewhere they are listed
    for (size_t i = 0; i < ragged.size(); i += 19) ragged[i] = 1 + i % 3;
    ragged[3] = 200, ragged[700] = 129, ragged[1099] = 65;
    for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) {
        for (AttentionShape shape : {AttentionShape{1, 1, 32}, {4, 2, 32}, {6, 1, 32}, {3, 3, 32}}) attention_case(t, {33, 70}, shape, dtype);
        attention_case(t, ragged, {2, 1, 16}, dtype);
        attention_case(t, {300}, {1, 1, 64}, dtype);
        attention_case(t, {0}, {1, 1, 64}, dtype);
        attention_case(t, {}, {1, 1, 64}, dtype);
        attention_case(t, {40, 150}, {2, 2, 64}, dtype, 60); // scores of some thousand
    }
}

#endif
