// ptx.cuh: all inline PTX, a wrapper per instruction. The simulated device (dev/cudasim) has host definitions with the same names. Nothing else
// depends on which of the two compiles the program.
#ifndef LLMC_CUDA_PTX_CUH
#define LLMC_CUDA_PTX_CUH

#include <cstdint>        // uint32_t
#include <cuda_bf16.h>    // __nv_bfloat16
#include <cuda_runtime.h> // __device__

#ifdef SIMCU
#include <simcu_ptx.h> // the same wrappers, on the host
#else

// Dynamic shared memory of the block, as an array of T.
#define DYN_SHARED(T, name)                                                                                                                        \
    extern __shared__ __align__(1024) unsigned char dyn_shared_[];                                                                                 \
    T *name = reinterpret_cast<T *>(dyn_shared_)

static __device__ __forceinline__ uint32_t smem_u32(const void *p) { return (uint32_t)__cvta_generic_to_shared(p); }

// No instruction: the compiler must take the word for a new value, and so keeps nothing in registers that it has computed from the old one.
static __device__ __forceinline__ void forget(uint32_t &word) { asm volatile("" : "+r"(word)); }

// d (16x8) += a (16x16, row-major) x b (16x8, column-major); bf16 in, fp32 sums. A warp's fragments as in the PTX ISA, "mma.m16n8k16".
static __device__ __forceinline__ void mma_16816_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i%8 of matrix i/8. trans: each is transposed.
static __device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_u32(row))
                 : "memory");
}
static __device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void *row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(smem_u32(row))
                 : "memory");
}

// Asynchronous copy of 16 bytes from global to shared memory; of them src_bytes are read, the rest becomes zero.
static __device__ __forceinline__ void cp_async16(void *to, const void *from, int src_bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(smem_u32(to)), "l"(from), "r"(src_bytes) : "memory");
}
// The same for 4 bytes, at any address that is a multiple of 4.
static __device__ __forceinline__ void cp_async4(void *to, const void *from, int src_bytes = 4) {
    asm volatile("cp.async.ca.shared.global [%0],[%1],4,%2;" ::"r"(smem_u32(to)), "l"(from), "r"(src_bytes) : "memory");
}
static __device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the newest KEEP groups have arrived; other threads see them after a barrier.
template <int KEEP> static __device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(KEEP) : "memory"); }

// 2^x, relative error below 2^-22; results below 2^-126 are zero.
static __device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
    return y;
}

#endif
#endif
