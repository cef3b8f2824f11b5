// block.cuh: eight neighbouring elements of a row of either storage type, as floats: the unit that a thread of a memory-bound kernel works on (and
// the channels of one draw of dropout). No kernels, no ops.
//
// Rows whose elements are a multiple of eight and whose buffers are 16-byte aligned are moved as packs; all others element by element.
#ifndef LLMC_CUDA_BLOCK_CUH
#define LLMC_CUDA_BLOCK_CUH

#include "llmc/cuda/cuda.cuh" // Pack, to_float, from_float

enum { UNIT = 8 }; // elements

// Eight elements as they are stored: half the registers of floats in bf16.
template <class T> struct Unit {
    static constexpr int packs = UNIT / Pack<T>::size;
    Pack<T> pack[packs];
    __device__ __forceinline__ float operator[](int i) const { return to_float(pack[i / Pack<T>::size].at[i % Pack<T>::size]); }
    __device__ __forceinline__ void set(int i, float value) { pack[i / Pack<T>::size].at[i % Pack<T>::size] = from_float<T>(value); }
};

// Elements c .. c+7 of a row (C), c a multiple of 8; those past its end are zero.
template <class T> static __device__ __forceinline__ Unit<T> unit_load(const T *row, int64_t c, int64_t C, bool packed) {
    Unit<T> unit;
    if (packed) {
#pragma unroll
        for (int k = 0; k < Unit<T>::packs; k++) unit.pack[k] = c < C ? reinterpret_cast<const Pack<T> *>(row + c)[k] : Pack<T>{};
    } else {
#pragma unroll
        for (int i = 0; i < UNIT; i++) unit.set(i, c + i < C ? to_float(row[c + i]) : 0.0f);
    }
    return unit;
}

// Those past the row's end are not stored.
template <class T> static __device__ __forceinline__ void unit_store(T *row, int64_t c, int64_t C, bool packed, const Unit<T> &unit) {
    if (packed) {
        if (c >= C) return;
#pragma unroll
        for (int k = 0; k < Unit<T>::packs; k++) reinterpret_cast<Pack<T> *>(row + c)[k] = unit.pack[k];
    } else {
#pragma unroll
        for (int i = 0; i < UNIT; i++) {
            if (c + i < C) row[c + i] = from_float<T>(unit[i]);
        }
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
