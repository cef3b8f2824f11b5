// block.cuh: eight neighbouring elements of a row of either storage type, as floats: the unit that a thread of a memory-bound kernel works on (and
// the channels of one draw of dropout). No kernels, no ops.
//
// Rows whose elements are a multiple of eight and whose buffers are 16-byte aligned are moved as packs; all others element by element.
#ifndef LLMC_CUDA_BLOCK_CUH
#define LLMC_CUDA_BLOCK_CUH

#include "llmc/cuda/cuda.cuh" // Pack, to_float, from_float
#include "llmc/cuda/ptx.cuh"  // forget
#include <cstring>            // memcpy

enum { UNIT = 8 }; // elements

// Eight elements as they are stored, in whole registers: two of them to a register in bf16, the first in the lower half.
template <class T> struct Unit;
template <> struct Unit<float> {
    static constexpr int packs = 2;
    Pack<uint32_t> pack[packs];
    __device__ __forceinline__ float operator[](int i) const { return __uint_as_float(pack[i / 4].at[i % 4]); }
    static __device__ __forceinline__ Unit of(const float (&value)[UNIT]) {
        Unit unit;
#pragma unroll
        for (int i = 0; i < UNIT; i++) unit.pack[i / 4].at[i % 4] = __float_as_uint(value[i]);
        return unit;
    }
};
template <> struct Unit<bf16> {
    static constexpr int packs = 1;
    Pack<uint32_t> pack[packs];
    __device__ __forceinline__ float operator[](int i) const {
        const uint32_t two = pack[0].at[i / 2];
        return __uint_as_float(i % 2 == 0 ? two << 16 : two & 0xffff0000u);
    }
    static __device__ __forceinline__ Unit of(const float (&value)[UNIT]) {
        Unit unit;
#pragma unroll
        for (int i = 0; i < UNIT; i += 2) {
            const __nv_bfloat162 two = __floats2bfloat162_rn(value[i], value[i + 1]);
            memcpy(&unit.pack[0].at[i / 2], &two, sizeof two);
        }
        return unit;
    }
};

// Elements c .. c+7 of a row (C), c a multiple of 8; those past its end are zero.
template <class T> static __device__ __forceinline__ Unit<T> unit_load(const T *row, int64_t c, int64_t C, bool packed) {
    if (packed) {
        Unit<T> unit = {};
        if (c < C) {
#pragma unroll
            for (int k = 0; k < Unit<T>::packs; k++) unit.pack[k] = reinterpret_cast<const Pack<uint32_t> *>(row + c)[k];
        }
        return unit;
    }
    float value[UNIT];
#pragma unroll
    for (int i = 0; i < UNIT; i++) value[i] = c + i < C ? to_float(row[c + i]) : 0.0f;
    return Unit<T>::of(value);
}

// Those past the row's end are not stored.
template <class T> static __device__ __forceinline__ void unit_store(T *row, int64_t c, int64_t C, bool packed, const Unit<T> &unit) {
    if (packed) {
        if (c >= C) return;
#pragma unroll
        for (int k = 0; k < Unit<T>::packs; k++) reinterpret_cast<Pack<uint32_t> *>(row + c)[k] = unit.pack[k];
    } else {
#pragma unroll
        for (int i = 0; i < UNIT; i++) {
            if (c + i < C) row[c + i] = from_float<T>(unit[i]);
        }
    }
}

// For a unit that is used again much later: converting it anew is cheaper than eight registers for its floats in the meantime.
template <class T> static __device__ __forceinline__ void unit_forget(Unit<T> &unit) {
#pragma unroll
    for (int k = 0; k < Unit<T>::packs; k++) {
#pragma unroll
        for (int i = 0; i < Pack<uint32_t>::size; i++) forget(unit.pack[k].at[i]);
    }
}

// A thread's place among the units of a matrix (rows, C), counted row by row.
struct UnitPlace {
    int64_t row, c;
};
static __device__ __forceinline__ UnitPlace unit_place(int64_t unit, int64_t row_units) {
    int64_t row;
    if ((unit | row_units) >> 32 == 0) {
        row = (uint32_t)unit / (uint32_t)row_units; // a division of 64 bits takes four times as long
    } else {
        row = unit / row_units;
    }
    return {row, (unit - row * row_units) * UNIT};
}

// Whether rows of C elements can be moved as packs: all of their addresses are multiples of 16 bytes. Absent buffers do not matter.
template <class... Buffers> static inline bool units_packed(int64_t C, Buffers... buffers) {
    return C % UNIT == 0 && (((uintptr_t)buffers.data | ...) & 15) == 0;
}

#endif
