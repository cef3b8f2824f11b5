// test_embedding.c: embedding look-up and its gradient against double precision, with dropout, repeated ids, tables without
// positions; untouched rows stay as they are; bits do not depend on threads; the shares of a divided vocabulary add up to the
// whole, bit by bit.
#include "dev/test/ops.h"       // ops_random, ops_compare
#include "llmc/cpu/embedding.h" // cpu_embedding_forward, cpu_embedding_backward
#include <math.h>               // fabs

typedef struct {
    OpsWorst out, dwte, dwpe;
    bool untouched;
} Worst;

static void one_case(Worst *worst, Dtype dtype, bool learned, double drop, int64_t N, int64_t C, int64_t V) {
    const int64_t P = N + 3; // positions
    Buffer ids = ops_random_ids(N, V, 1), positions = ops_random_ids(N, P, 2), wte = ops_random(V * C, dtype, 3, 0, 1),
           wpe = ops_random(P * C, dtype, 4, 0, 1), out = ops_new(N * C, dtype), dout = ops_random(N * C, dtype, 5, 0, 1),
           dwte = ops_random(V * C, DTYPE_F32, 6, 0, 1), dwpe = ops_random(P * C, DTYPE_F32, 7, 0, 1), old = ops_copy(dwte, V * C);
    const Dropout dropout = {&(uint64_t){21}, 0xffffff, rng_dropout_threshold(drop), ops_counting(N, 50)};
    const Buffer none = {0};
    const int32_t *id = ids.data, *position = positions.data;
    double *want = base_new((size_t)(N * C), 8), *want_dwte = ops_doubles(dwte, V * C), *want_dwpe = ops_doubles(dwpe, P * C);
    bool *used = base_new((size_t)V, sizeof *used);
    for (int64_t n = 0; n < N; n++) {
        used[id[n]] = true;
        for (int64_t c = 0; c < C; c++) {
            const double mask = ops_mask(&dropout, n, c), d = ops_at(dout, n * C + c) * mask;
            want[n * C + c] = (ops_at(wte, id[n] * C + c) + (learned ? ops_at(wpe, position[n] * C + c) : 0)) * mask;
            want_dwte[id[n] * C + c] += d;
            if (learned) want_dwpe[position[n] * C + c] += d;
        }
    }
    cpu_embedding_forward(NULL, out, ids, learned ? positions : none, wte, learned ? wpe : none, &dropout, N, C, 0, V);
    cpu_embedding_backward(NULL, dwte, learned ? dwpe : none, dout, ids, learned ? positions : none, &dropout, N, C, 0, V, P);
    ops_compare(&worst->out, out, want, N * C);
    ops_compare(&worst->dwte, dwte, want_dwte, V * C);
    ops_compare(&worst->dwpe, dwpe, want_dwpe, P * C);
    for (int64_t v = 0; v < V; v++) {
        if (!used[v] && !ops_same_bits(buffer_at(dwte, v * C), buffer_at(old, v * C), C)) worst->untouched = false;
    }
    free(ids.data), free(positions.data), free(wte.data), free(wpe.data), free(out.data), free(dout.data), free(dwte.data), free(dwpe.data);
    free(old.data), free(dropout.token_index.data), free(want), free(want_dwte), free(want_dwpe), free(used);
}

// Elements of a that are not the same number as in b; NaN differs from everything.
static int64_t different(Buffer a, Buffer b, int64_t n) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) count += !(ops_at(a, i) == ops_at(b, i));
    return count;
}

// The vocabulary divided over R ranks. Ids stay below `limit`, so that with a small one the last shares have none.
static void divided_case(Dtype dtype, bool learned, double drop, int64_t N, int64_t C, int64_t V, int64_t R, int64_t limit) {
    const int64_t P = N + 3;
    const Buffer none = {0};
    Buffer ids = ops_random_ids(N, limit, 1), positions = ops_random_ids(N, P, 2), wte = ops_random(V * C, dtype, 3, 0, 1),
           wpe = ops_random(P * C, dtype, 4, 0, 1), whole = ops_new(N * C, dtype), places = ops_new(N * C, dtype),
           dout = ops_random(N * C, dtype, 5, 0, 1), dwte = ops_random(V * C, DTYPE_F32, 6, 0, 1), dwpe = ops_random(P * C, DTYPE_F32, 7, 0, 1),
           parts = ops_copy(dwte, V * C), old_dwpe = ops_copy(dwpe, P * C), sum = ops_new(N * C, dtype);
    const Dropout dropout = {&(uint64_t){21}, 5, rng_dropout_threshold(drop), ops_counting(N, 9)};
    const Buffer place = learned ? positions : none;
    cpu_embedding_forward(NULL, whole, ids, positions, wte, none, &dropout, N, C, 0, V);
    cpu_embedding_backward(NULL, dwte, learned ? dwpe : none, dout, ids, place, &dropout, N, C, 0, V, P);
    // What a rank without the token still has to write: dropout(wpe), or zero.
    for (int64_t i = 0; i < N * C && learned; i++) {
        ops_set(places, i, ops_at(wpe, (int64_t)((int32_t *)positions.data)[i / C] * C + i % C) * (double)(float)ops_mask(&dropout, i / C, i % C));
    }
    int64_t outside = 0, wrong_places = 0, wrong_both = 0, wrong_dwpe = 0;
    for (int64_t r = 0; r < R; r++) {
        const int64_t begin = V * r / R, count = V * (r + 1) / R - begin;
        // A table of the share's size: AddressSanitizer sees what is read or written beside it.
        Buffer table = ops_copy(buffer_at(wte, begin * C), count * C), gradient = ops_copy(buffer_at(parts, begin * C), count * C),
               out = ops_random(N * C, dtype, 8, 7, 1), both = ops_random(N * C, dtype, 8, 7, 1), both_whole = ops_new(N * C, dtype),
               dwpe_r = ops_copy(old_dwpe, P * C);
        cpu_embedding_forward(NULL, out, ids, place, table, none, &dropout, N, C, begin, count);
        cpu_embedding_forward(NULL, both, ids, place, table, learned ? wpe : none, &dropout, N, C, begin, count);
        cpu_embedding_forward(NULL, both_whole, ids, place, wte, learned ? wpe : none, &dropout, N, C, 0, V);
        cpu_embedding_backward(NULL, gradient, learned ? dwpe_r : none, dout, ids, place, &dropout, N, C, begin, count, P);
        memcpy(buffer_at(parts, begin * C).data, gradient.data, (size_t)(count * C) * sizeof(float));
        if (learned) wrong_dwpe += different(dwpe_r, dwpe, P * C);
        for (int64_t n = 0; n < N; n++) {
            const int64_t id = ((int32_t *)ids.data)[n];
            const bool ours = id >= begin && id < begin + count;
            if (ours) wrong_both += different(buffer_at(both, n * C), buffer_at(both_whole, n * C), C);
            if (!ours) wrong_places += different(buffer_at(both, n * C), buffer_at(places, n * C), C);
            for (int64_t c = 0; c < C && !ours; c++) outside += ops_at(out, n * C + c) != 0;
        }
        for (int64_t i = 0; i < N * C; i++) ops_set(sum, i, ops_at(sum, i) + ops_at(out, i));
        free(table.data), free(gradient.data), free(out.data), free(both.data), free(both_whole.data), free(dwpe_r.data);
    }
    char what[128];
    snprintf(what, sizeof what, "%s N=%lld C=%lld V=%lld R=%lld ids<%lld%s dropout %g", dtype_names[dtype], (long long)N, (long long)C,
             (long long)V, (long long)R, (long long)limit, learned ? " positions" : "", drop);
    check(different(sum, whole, N * C) == 0, "%s: the shares' sum differs from the whole in %lld elements", what,
          (long long)different(sum, whole, N * C));
    check(outside == 0, "%s: %lld elements of ids of other ranks are not zero", what, (long long)outside);
    check(wrong_places == 0, "%s: %lld elements of ids of other ranks are not dropout(wpe)", what, (long long)wrong_places);
    check(wrong_both == 0, "%s: %lld elements of own ids differ from the whole table's", what, (long long)wrong_both);
    check(ops_same_bits(parts, dwte, V * C), "%s: the shares' dwte differ from the whole's in %lld elements", what,
          (long long)different(parts, dwte, V * C));
    check(wrong_dwpe == 0, "%s: %lld elements of dwpe differ from the whole vocabulary's", what, (long long)wrong_dwpe);
    free(ids.data), free(positions.data), free(wte.data), free(wpe.data), free(whole.data), free(places.data), free(dout.data), free(dwte.data);
    free(dwpe.data), free(parts.data), free(old_dwpe.data), free(sum.data), free(dropout.token_index.data);
}

static void test_divided(void) {
    static const int64_t sizes[][3] = {{60, 37, 101}, {9, 2100, 131}, {40, 16, 7}, {0, 16, 7}};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (int64_t R = 1; R <= 4; R++) {
            for (int variant = 0; variant < 16; variant++) {
                const int64_t V = sizes[s][2];
                divided_case(variant & 1 ? DTYPE_BF16 : DTYPE_F32, variant & 2, variant & 4 ? 0.25 : 0, sizes[s][0], sizes[s][1], V, R,
                             variant & 8 ? V / 4 : V);
            }
        }
    }
}

static void test_threads(void) {
    const int64_t N = 150, C = 131, V = 11, P = 40;
    Buffer ids = ops_random_ids(N, V, 1), positions = ops_random_ids(N, P, 2), dout = ops_random(N * C, DTYPE_F32, 5, 0, 1), first = {0},
           first_place = {0};
    const Dropout dropout = {&(uint64_t){21}, 0xffffff, rng_dropout_threshold(0.3), ops_counting(N, 0)};
    const int most = omp_get_max_threads();
    for (int threads = 1; threads <= 3; threads++) {
        omp_set_num_threads(threads);
        Buffer dwte = ops_new(V * C, DTYPE_F32), dwpe = ops_new(P * C, DTYPE_F32);
        cpu_embedding_backward(NULL, dwte, dwpe, dout, ids, positions, &dropout, N, C, 0, V, P);
        if (threads == 1) {
            first = dwte, first_place = dwpe;
            continue;
        }
        check(ops_same_bits(first, dwte, V * C) && ops_same_bits(first_place, dwpe, P * C), "%d threads differ from one", threads);
        free(dwte.data), free(dwpe.data);
    }
    omp_set_num_threads(most);
    free(ids.data), free(positions.data), free(dout.data), free(first.data), free(first_place.data), free(dropout.token_index.data);
}

int main(void) {
    static const int64_t sizes[][3] = {{1, 1, 1},    {7, 1, 131},   {7, 80, 131},   {40, 131, 257},
                                       {300, 24, 5}, {5, 768, 257}, {9, 2100, 131}, {0, 16, 7}};
    static const Dtype dtypes[] = {DTYPE_F32, DTYPE_BF16};
    Worst worst = {.untouched = true};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        for (int variant = 0; variant < 8; variant++) {
            one_case(&worst, dtypes[variant & 1], variant & 2, variant & 4 ? 0.25 : 0, sizes[s][0], sizes[s][1], sizes[s][2]);
        }
    }
    printf("embedding\n");
    ops_report(&worst.out, 2e-7, "out");
    ops_report(&worst.dwte, 1e-6, "dwte");
    ops_report(&worst.dwpe, 1e-6, "dwpe");
    check(worst.untouched, "rows of ids that do not occur keep their bits");
    test_divided();
    test_threads();
    return test_end();
}
