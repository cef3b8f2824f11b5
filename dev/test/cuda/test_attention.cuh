// test_attention.cuh: attention of the CUDA device against the CPU device: documents of all lengths around the tiles' edges, grouped heads, head
// sizes, extreme scores, the same bits twice. What attention means is tested by dev/test/test_attention.c.
#ifndef TEST_CUDA_TEST_ATTENTION_CUH
#define TEST_CUDA_TEST_ATTENTION_CUH

#include "dev/test/cuda/compare.cuh" // Compare
#include <algorithm>                 // std::max

// Documents of one call, on both devices.
struct AttentionDocuments {
    std::vector<int32_t> cu = {0};
    Packing packing[2];
};

static AttentionDocuments attention_documents(Compare *t, const std::vector<int> &lengths) {
    AttentionDocuments documents;
    int64_t longest = 0;
    for (int length : lengths) documents.cu.push_back(documents.cu.back() + length), longest = std::max(longest, (int64_t)length);
    const Both cu = both_ints(t, documents.cu);
    for (int w = 0; w < 2; w++) documents.packing[w] = {cu[w], (int64_t)lengths.size(), documents.cu.back(), longest};
    return documents;
}

// `bits` of two results of the CUDA device
static void attention_same(Compare *t, const char *what, const Both &a, const Both &b) {
    const std::vector<float> x = compare_read(t, 1, a[1], a.n), y = compare_read(t, 1, b[1], b.n);
    compare_record(t, what, memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0 ? 0 : 1, 0);
}

// Forward of both devices. scale 1: scores of a standard deviation of about one.
static void attention_case(Compare *t, const std::vector<int> &lengths, AttentionShape shape, Dtype dtype, double scale) {
    const AttentionDocuments documents = attention_documents(t, lengths);
    const int64_t N = documents.cu.back(), QKV = (shape.heads + 2 * shape.kv_heads) * shape.head_size, OUT = shape.heads * shape.head_size;
    const Both qkv = both_random(t, N * QKV, dtype, 0, 1.7 * scale);
    const Both out = both_output(t, N * OUT, dtype), lse = both_output(t, N * shape.heads, DTYPE_F32);
    const Both out2 = both_output(t, N * OUT, dtype), lse2 = both_output(t, N * shape.heads, DTYPE_F32);
    on_both(t, [&](Device *d, int w) { d->attention_forward(d, out[w], lse[w], qkv[w], &documents.packing[w], shape); });
    compare(t, "attention out", out, 2e-6);
    compare(t, "attention lse", lse, 1e-6);
    Device *cuda = t->device[1];
    cuda->attention_forward(cuda, out2[1], lse2[1], qkv[1], &documents.packing[1], shape);
    attention_same(t, "attention out, twice", out, out2);
    attention_same(t, "attention lse, twice", lse, lse2);
    compare_release(t);
}

static void attention_cases(Compare *t, const std::vector<int> &lengths, AttentionShape shape, Dtype dtype, double scale = 1) {
    std::string text;
    for (int length : lengths) text += (text.empty() ? "" : " ") + std::to_string(length);
    compare_case(t, "%s, documents %s, heads %lld/%lld of %lld, scale %g", dtype_names[dtype], text.c_str(), (long long)shape.heads,
                 (long long)shape.kv_heads, (long long)shape.head_size, scale);
    attention_case(t, lengths, shape, dtype, scale);
}

static void test_attention(Compare *t) {
    const std::vector<int> mixed = {17, 0, 64, 1, 65, 130};
    for (int size : {16, 48, 64, 80, 128}) attention_cases(t, mixed, {2, 1, size}, DTYPE_BF16);
    for (int size : {1, 5, 24, 64, 128}) attention_cases(t, mixed, {2, 1, size}, DTYPE_F32);
}

#endif
