// comm_types.h: the words of communication: element types, reductions, operations. C and C++ share them; nothing here moves data.
#ifndef LLMC_COMM_TYPES_H
#define LLMC_COMM_TYPES_H

#include <stddef.h> // size_t
#include <stdint.h> // int64_t

typedef enum { COMM_F32, COMM_BF16, COMM_F64, COMM_I64, COMM_BYTE } CommType; // BYTE is moved, never summed
typedef enum { COMM_SUM, COMM_MAX } CommReduce;                               // the maximum of anything and NaN is NaN; I64 sums wrap

typedef enum {
    COMM_ALL_REDUCE,
    COMM_REDUCE_SCATTER,
    COMM_ALL_GATHER,
    COMM_BROADCAST,
    COMM_ALL_TO_ALL,
    COMM_SEND,
    COMM_RECV,
    COMM_BARRIER,
    COMM_KINDS
} CommKind;

static inline size_t comm_type_bytes(CommType type) { return type == COMM_F32 ? 4 : type == COMM_BF16 ? 2 : type == COMM_BYTE ? 1 : 8; }

// The slice of a buffer that member k sums: it begins here, of count elements, cut at cache lines.
static inline int64_t comm_slice_(int64_t count, int size, int k) {
    const int64_t each = ((count + size - 1) / size + 31) / 32 * 32;
    return k * each < count ? k * each : count;
}

#endif
