// test_embedding.c: embedding look-up and its gradient against double precision, with dropout, repeated ids, tables without
// positions; untouched rows stay as they are; bits do not depend on threads.
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
    const Dropout dropout = {21, 0xffffff, rng_dropout_threshold(drop), ops_counting(N, 50)};
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

static void test_threads(void) {
    const int64_t N = 150, C = 131, V = 11, P = 40;
    Buffer ids = ops_random_ids(N, V, 1), positions = ops_random_ids(N, P, 2), dout = ops_random(N * C, DTYPE_F32, 5, 0, 1), first = {0},
           first_place = {0};
    const Dropout dropout = {21, 0xffffff, rng_dropout_threshold(0.3), ops_counting(N, 0)};
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
    test_threads();
    return test_end();
}
