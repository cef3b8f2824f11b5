// simcublaslt.h: what the two halves of the simulated cuBLASLt share: simcublaslt.cc (objects, rules, heuristics) and simcublaslt_matmul.cc (the
// product). Nothing else includes it.
#pragma once
#include "simcu_rt.h" // enqueue, range_note
#include <cstdint>    // int64_t
#include <cublasLt.h> // cublasLtEpilogue_t, cudaDataType_t
#include <string>     // std::string

namespace simcu::lt {

enum { BIAS_IN = 4, BIAS_GRAD_OUT = 16, GELU = 32, GELU_GRAD = 64, AUX = 128, SUM_A = 256, SUM_B = 512 }; // bits of cublasLtEpilogue_t

struct Descriptor {
    int32_t compute, scale_type; // cublasComputeType_t, cudaDataType
    int32_t pointer_mode = CUBLASLT_POINTER_MODE_HOST, transpose_a = CUBLAS_OP_N, transpose_b = CUBLAS_OP_N, transpose_c = CUBLAS_OP_N;
    int32_t fill = CUBLAS_FILL_MODE_FULL, sm_count = 0;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    void *bias = nullptr, *aux = nullptr;
    int64_t bias_stride = 0, aux_ld = 0, aux_stride = 0;
    int32_t bias_type = -1, aux_type = -1;
    const float *a_scale = nullptr, *b_scale = nullptr, *c_scale = nullptr, *d_scale = nullptr;
    float *d_amax = nullptr;
    int32_t a_scale_mode = 0, b_scale_mode = 0, c_scale_mode = 0, d_scale_mode = 0; // cublasLtMatmulMatrixScale_t
    int8_t fast_accumulation = 0;
};

struct Layout {
    uint32_t type; // cudaDataType
    int32_t order = CUBLASLT_ORDER_COL;
    uint64_t rows, columns;
    int64_t ld;
    int32_t batch = 1;
    int64_t stride = 0; // elements between matrices of a batch
};

// What cublasLtMatmulAlgo_t holds.
struct Algorithm {
    uint32_t magic, signature; // of the types, transposes and epilogue that it was made for
    uint16_t id, splits;       // pieces of k
    uint32_t scheme;           // cublasLtReductionScheme_t
    uint32_t align[4];         // bytes that A, B, C and D must be aligned to
    uint64_t workspace_bytes;
};
static_assert(sizeof(Algorithm) <= sizeof(cublasLtMatmulAlgo_t), "Algorithm fits");

struct Problem {
    Descriptor d;
    Layout a, b, c, out;
    uint64_t m, n, k;
    const void *A, *B, *C;
    void *D;
    float alpha, beta;               // pointer mode host
    const float *alpha_at, *beta_at; // pointer mode device
    void *workspace;
    Algorithm algorithm;
};

inline size_t element_bytes(int type) { return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF || type == CUDA_R_16F ? 2 : 1; }
inline bool is_fp8(int type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
inline int core_of(uint32_t epilogue) { return epilogue == CUBLASLT_EPILOGUE_DEFAULT ? 0 : (int)epilogue; } // as bits
int bias_type_of(const Descriptor &d, const Layout &c, const Layout &out);
int aux_type_of(const Descriptor &d, const Layout &out);

void run(const Problem &problem); // when its turn in the stream comes

} // namespace simcu::lt
