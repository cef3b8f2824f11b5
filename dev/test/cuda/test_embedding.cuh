// test_embedding.cuh: embedding look-up and its gradient on the CUDA device against the CPU device: odd widths, addresses that are not aligned,
// parts of the vocabulary, tables without positions, dropout, ids that fill a batch, and the same bits every time.
//
// Tolerances. Forward adds two numbers and multiplies by a scale: the same operations as on the CPU, so bound 0. Backward sums the same rows in
// another association (a chunk at a time, the table's old value last): 4e-6 of the largest sum, nearly all of it the error of the CPU, which adds
// thousands of rows of a hot id one after another. dwte and dwpe are fp32 whatever dout is.
#ifndef TEST_CUDA_TEST_EMBEDDING_CUH
#define TEST_CUDA_TEST_EMBEDDING_CUH

#include "dev/test/cuda/compare.cuh" // Compare

struct EmbeddingCase {
    int64_t N, C, V, T;    // T: length of a sequence; positions 0 .. T-1 repeat
    int64_t begin, part;   // of the vocabulary that this rank holds
    int hot;               // of 16 tokens, how many have one id
    bool learned, dropout; // positions; dropout
    int64_t skip;          // elements that dout, out and the tables begin after an aligned address
};

static std::vector<int32_t> embedding_ids(Compare *t, const EmbeddingCase &c) {
    std::vector<int32_t> ids((size_t)c.N);
    for (int32_t &id : ids) {
        const bool hot = (int)((compare_uniform(t) + 1) * 8) < c.hot;
        id = (int32_t)(hot ? c.V / 2 : std::min((double)(c.V - 1), floor((compare_uniform(t) + 1) / 2 * (double)c.V)));
    }
    return ids;
}

static void test_embedding_case(Compare *t, const EmbeddingCase &c, Dtype dtype) {
    compare_case(t, "N %lld, C %lld, V %lld (%lld from %lld), T %lld, hot %d/16, positions %d, dropout %d, skip %lld, %s", (long long)c.N,
                 (long long)c.C, (long long)c.V, (long long)c.part, (long long)c.begin, (long long)c.T, c.hot, c.learned, c.dropout,
                 (long long)c.skip, dtype_names[dtype]);
    std::vector<int32_t> positions((size_t)c.N), indices((size_t)c.N);
    for (int64_t n = 0; n < c.N; n++) positions[(size_t)n] = (int32_t)(n % c.T), indices[(size_t)n] = (int32_t)(3 * n + 70000);
    const Both ids = both_ints(t, embedding_ids(t, c)), places = both_ints(t, positions), index = both_ints(t, indices), absent = both_absent();
    const Both wte = both_random(t, c.part * c.C + c.skip, dtype, 0, 1), wpe = both_random(t, c.T * c.C + c.skip, dtype, 0, 1);
    const Both dout = both_random(t, c.N * c.C + c.skip, dtype, 0.25, 1), out = both_output(t, c.N * c.C + c.skip, dtype);
    const Both dwte = both_random(t, c.part * c.C + c.skip, DTYPE_F32, 0, 1), dwpe = both_random(t, c.T * c.C + c.skip, DTYPE_F32, 0, 1);
    const BothScalar<uint64_t> key = both_scalar(t, rng_dropout_key(7, 3));
    const std::vector<float> old = compare_read(t, 1, dwte[1], dwte.n);
    std::vector<float> first;
    for (int round = 0; round < 2; round++) { // the second on the CUDA device alone: the same bits again
        for (int w = round; w < 2; w++) {
            Device *d = t->device[w];
            if (round == 1) d->copy_in(d, dwte[1].data, old.data(), old.size() * sizeof(float));
            const Dropout dropout = {key[w], 0xffffff, rng_dropout_threshold(0.2), index[w]};
            const Dropout *drop = c.dropout ? &dropout : nullptr;
            const Buffer none = absent[w];
            if (round == 0)
                d->embedding_forward(d, buffer_at(out[w], c.skip), ids[w], c.learned ? places[w] : none, buffer_at(wte[w], c.skip),
                                     c.learned ? buffer_at(wpe[w], c.skip) : none, drop, c.N, c.C, c.begin, c.part);
            d->embedding_backward(d, buffer_at(dwte[w], c.skip), c.learned && round == 0 ? buffer_at(dwpe[w], c.skip) : none,
                                  buffer_at(dout[w], c.skip), ids[w], c.learned ? places[w] : none, drop, c.N, c.C, c.begin, c.part, c.T);
        }
        if (round == 0) first = compare_read(t, 1, dwte[1], dwte.n);
    }
    const std::vector<float> again = compare_read(t, 1, dwte[1], dwte.n);
    compare_record(t, "embedding_backward again", memcmp(first.data(), again.data(), again.size() * sizeof(float)) != 0, 0);
    on_both(t, [&](Device *d, int w) { d->zero(d, out[w].data, (size_t)c.skip * dtype_bytes(out[w].dtype)); });
    compare(t, "embedding_forward out", out, 0, 1);
    compare(t, "embedding_backward dwte", dwte, 4e-6);
    compare(t, "embedding_backward dwpe", dwpe, 4e-6);
    compare_release(t);
}

// Every id has as many tokens as a chunk has places, and the table is zero: the rows of an id are then added one after another, as on the CPU. They
// are of all magnitudes: only token order gives the CPU's bits. Ids far apart take several passes of the sort, tokens of an id lie in several of
// its tiles.
static void test_embedding_order(Compare *t, int64_t each, int64_t stride) {
    const int64_t N = each * each, V = each * stride, C = 3;
    compare_case(t, "%lld tokens in order, V %lld", (long long)N, (long long)V);
    std::vector<int32_t> ids((size_t)N);
    for (int64_t n = 0; n < N; n++) ids[(size_t)n] = (int32_t)((n * 5 + n / each) % each * stride);
    std::vector<float> rows((size_t)(N * C));
    for (float &value : rows) value = (float)(compare_uniform(t) * pow(10, 4 * compare_uniform(t)));
    const Both token = both_ints(t, ids), dout = both_values(t, rows, DTYPE_F32),
               dwte = both_values(t, std::vector<float>((size_t)(V * C)), DTYPE_F32);
    on_both(t, [&](Device *d, int w) {
        const Buffer none = buffer_of(nullptr, DTYPE_F32);
        d->embedding_backward(d, dwte[w], none, dout[w], token[w], none, nullptr, N, C, 0, V, 1);
    });
    compare(t, "embedding_backward dwte, token order", dwte, 0);
    compare_release(t);
}

static void test_embedding(Compare *t) {
    static const EmbeddingCase cases[] = {
        {1, 1, 1, 1, 0, 1, 0, true, false, 0},
        {33, 7, 5, 9, 0, 5, 0, true, true, 0},
        {64, 16, 40, 16, 0, 40, 0, true, true, 0},
        {65, 16, 300, 65, 0, 300, 4, true, true, 1},
        {100, 24, 50, 25, 10, 20, 0, true, true, 0},
        {100, 24, 50, 25, 40, 10, 0, false, false, 0},
        {96, 264, 3, 8, 0, 3, 0, true, false, 0},
        {1025, 8, 1000, 500, 0, 1000, 12, true, true, 0},
        {1100, 8, 70000, 1, 0, 70000, 15, true, false, 0},
        {2111, 9, 300, 211, 100, 150, 8, true, true, 0},
        {4300, 8, 17, 4300, 0, 17, 16, true, false, 0},
        {50, 32, 100, 50, 90, 10, 0, false, false, 0},
    };
    for (const EmbeddingCase &c : cases) {
        for (Dtype dtype : {DTYPE_F32, DTYPE_BF16}) test_embedding_case(t, c, dtype);
    }
    test_embedding_order(t, 32, 1);
    test_embedding_order(t, 64, 300);
    on_both(t, [&](Device *d, int) { // no tokens: nothing is read or written
        const Buffer none = buffer_of(nullptr, DTYPE_F32);
        d->embedding_forward(d, none, none, none, none, none, nullptr, 0, 8, 0, 4);
        d->embedding_backward(d, none, none, none, none, none, nullptr, 0, 8, 0, 4, 1);
    });
}

#endif
