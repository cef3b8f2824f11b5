// simcu_ptx.h: the wrappers of llmc/cuda/ptx.cuh, with the same names and signatures, on the CPU. What they mean is said there; the work is done in
// simcu_ptx.cc, simcu_sync.cc and simcu_hopper.cc.
#pragma once
#include <cuda_runtime.h>
namespace simcu {
struct MmaSlot {
    float *d;
    const uint32_t *a;
    uint32_t b[2];
};
void mma_16816_done(void **s, unsigned mask, const char *f, int l);
struct LdmSlot {
    uint32_t *r;
    const void *row;
};
template <bool TRANS> void ldmatrix_done(void **s, unsigned mask, const char *f, int l);
extern template void ldmatrix_done<false>(void **, unsigned, const char *, int);
extern template void ldmatrix_done<true>(void **, unsigned, const char *, int);
} // namespace simcu
inline void forget(uint32_t &) {}
inline void mma_16816_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, SIMCU_AT) {
    simcu::MmaSlot s{d, a, {b0, b1}};
    simcu::warp_collective(~0u, "mma.sync", &s, simcu::mma_16816_done, SIMCU_HERE);
}
inline void ldmatrix_x4(uint32_t (&r)[4], const void *row, SIMCU_AT) {
    simcu::LdmSlot s{r, row};
    simcu::warp_collective(~0u, "ldmatrix", &s, simcu::ldmatrix_done<false>, SIMCU_HERE);
}
inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row, SIMCU_AT) {
    simcu::LdmSlot s{r, row};
    simcu::warp_collective(~0u, "ldmatrix.trans", &s, simcu::ldmatrix_done<true>, SIMCU_HERE);
}
inline void cp_async16(void *dst, const void *src, int src_bytes = 16, SIMCU_AT) { simcu::cp_async(dst, src, 16, src_bytes, SIMCU_HERE); }
inline void cp_async4(void *dst, const void *src, int src_bytes = 4, SIMCU_AT) { simcu::cp_async(dst, src, 4, src_bytes, SIMCU_HERE); }
inline float exp2_fast(float x) { return exp2f(x); }
inline void cp_async_commit() { simcu::cp_async_commit(); }
template <int KEEP> void cp_async_wait() { simcu::cp_async_wait(KEEP); }

// ---- Hopper: mbarrier, TMA, wgmma
namespace simcu {
void mbar_init(uint64_t *bar, unsigned count, const char *, int);
void mbar_arrive(uint64_t *bar, unsigned tx, const char *, int);
void mbar_wait(uint64_t *bar, unsigned parity, const char *, int);
void tma_load_2d(void *dst, const void *map, int x, int y, uint64_t *bar, const char *, int);
void wgmma_n64(float *d, uint64_t da, uint64_t db, int scale_d, const char *, int);
void wgmma_fence(const char *, int);
void wgmma_commit(const char *, int);
void wgmma_wait(int keep, const char *, int);
} // namespace simcu
inline uint32_t smem_u32(const void *p) { return (uint32_t)((const char *)p - (const char *)simcu::dyn_smem()); } // base is 1024-byte aligned
inline void mbar_init(uint64_t *b, unsigned n, SIMCU_AT) { simcu::mbar_init(b, n, SIMCU_HERE); }
inline void mbar_fence_init() {}
inline void mbar_arrive(uint64_t *b, SIMCU_AT) { simcu::mbar_arrive(b, 0, SIMCU_HERE); }
inline void mbar_arrive_expect_tx(uint64_t *b, unsigned bytes, SIMCU_AT) { simcu::mbar_arrive(b, bytes, SIMCU_HERE); }
inline void mbar_wait(uint64_t *b, unsigned parity, SIMCU_AT) { simcu::mbar_wait(b, parity, SIMCU_HERE); }
inline void tma_load_2d(void *dst, const void *map, int x, int y, uint64_t *bar, SIMCU_AT) { simcu::tma_load_2d(dst, map, x, y, bar, SIMCU_HERE); }
inline void wgmma_fence(SIMCU_AT) { simcu::wgmma_fence(SIMCU_HERE); }
inline void wgmma_commit(SIMCU_AT) { simcu::wgmma_commit(SIMCU_HERE); }
template <int KEEP> void wgmma_wait(SIMCU_AT) { simcu::wgmma_wait(KEEP, SIMCU_HERE); }
inline void wgmma_m64n64k16_bf16(float (&d)[32], uint64_t da, uint64_t db, int scale_d, SIMCU_AT) {
    simcu::wgmma_n64(d, da, db, scale_d, SIMCU_HERE);
}
