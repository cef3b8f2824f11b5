// comm_reduce.h: the sum (or maximum) of several ranks' arrays. The order of the sum is the order of
// the arrays, for every element by itself, so the bits do not depend on where an array is cut or which rank sums which part.
#ifndef LLMC_COMM_REDUCE_H
#define LLMC_COMM_REDUCE_H

#include "llmc/base.h"       // min_i64
#include "llmc/comm_types.h" // CommType, CommReduce
#include "llmc/precision.h"  // Dtype, bf16_to_f32

static inline CommType comm_type_of(Dtype dtype) { return dtype == DTYPE_BF16 ? COMM_BF16 : COMM_F32; } // F32 or BF16

enum { COMM_BLOCK = 2048, COMM_PARALLEL = 1 << 18 }; // elements: of a sum that stays in the first-level cache; worth several threads

#define COMM_ACCUMULATE_(name, wide, narrow, widen)                                                                                                \
    static inline void name(wide *restrict sum, const narrow *restrict x, int64_t n, bool first, CommReduce how) {                                 \
        if (first) {                                                                                                                               \
            for (int64_t i = 0; i < n; i++) sum[i] = widen(x[i]);                                                                                  \
        } else if (how == COMM_SUM) {                                                                                                              \
            for (int64_t i = 0; i < n; i++) sum[i] += widen(x[i]);                                                                                 \
        } else {                                                                                                                                   \
            for (int64_t i = 0; i < n; i++) sum[i] = widen(x[i]) > sum[i] || widen(x[i]) != widen(x[i]) ? widen(x[i]) : sum[i];                    \
        }                                                                                                                                          \
    }
COMM_ACCUMULATE_(comm_accumulate_f32_, float, float, )
COMM_ACCUMULATE_(comm_accumulate_bf16_, float, uint16_t, bf16_to_f32)
COMM_ACCUMULATE_(comm_accumulate_f64_, double, double, )
#undef COMM_ACCUMULATE_

static inline void comm_accumulate_i64_(int64_t *restrict sum, const int64_t *restrict x, int64_t n, bool first, CommReduce how) {
    for (int64_t i = 0; i < n; i++) {
        if (first)
            sum[i] = x[i];
        else if (how == COMM_SUM)
            sum[i] = (int64_t)((uint64_t)sum[i] + (uint64_t)x[i]);
        else
            sum[i] = max_i64(sum[i], x[i]);
    }
}

// to[j][i] = reduction of from[0][i], from[1][i], ... in this order, for begin <= i < begin+n and every j. An array may be in both lists.
// BF16 is summed in fp32 and rounded once; its result may be kept as F32.
static inline void comm_reduce(void *const *to, int to_count, CommType to_type, const void *const *from, int from_count, CommType type,
                               int64_t begin, int64_t n, CommReduce how) {
    const size_t bytes = comm_type_bytes(type), to_bytes = comm_type_bytes(to_type);
#pragma omp parallel for schedule(static) if (n >= COMM_PARALLEL)
    for (int64_t b = 0; b < n; b += COMM_BLOCK) {
        union {
            float f32[COMM_BLOCK];
            double f64[COMM_BLOCK];
            int64_t i64[COMM_BLOCK];
        } sum;
        uint16_t rounded[COMM_BLOCK];
        const int64_t m = min_i64(COMM_BLOCK, n - b);
        for (int k = 0; k < from_count; k++) {
            const void *x = (const char *)from[k] + (size_t)(begin + b) * bytes;
            if (type == COMM_F32)
                comm_accumulate_f32_(sum.f32, x, m, k == 0, how);
            else if (type == COMM_BF16)
                comm_accumulate_bf16_(sum.f32, x, m, k == 0, how);
            else if (type == COMM_F64)
                comm_accumulate_f64_(sum.f64, x, m, k == 0, how);
            else
                comm_accumulate_i64_(sum.i64, x, m, k == 0, how);
        }
        const void *result = &sum;
        if (to_type == COMM_BF16) {
            for (int64_t i = 0; i < m; i++) rounded[i] = bf16_from_f32(sum.f32[i]);
            result = rounded;
        }
        for (int j = 0; j < to_count; j++) memcpy((char *)to[j] + (size_t)(begin + b) * to_bytes, result, (size_t)m * to_bytes);
    }
}

#endif
