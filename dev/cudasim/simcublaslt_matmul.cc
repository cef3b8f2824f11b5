// simcublaslt_matmul.cc: the product of the simulated cuBLASLt: packs both matrices as fp32, multiplies them in register tiles, applies the
// epilogue. The rules of what may be asked for are in simcublaslt.cc.
//
// An element is the sum over k in order, whatever its place in the matrix; an algorithm with several pieces of k adds the pieces' sums. The INPLACE
// scheme adds them in an order of its own every time, as atomics would.
#include "simcublaslt.h" // Problem
#include <algorithm>     // std::swap
#include <cmath>         // tanhf
#include <cstring>       // memcpy
#include <cuda_bf16.h>   // __nv_bfloat16
#include <cuda_fp16.h>   // __half
#include <cuda_fp8.h>    // __nv_fp8_e4m3
#include <vector>        // std::vector

namespace simcu::lt {
namespace {

float load(const void *p, size_t i, int type) {
    switch (type) {
    case CUDA_R_32F: return ((const float *)p)[i];
    case CUDA_R_16BF: {
        const uint32_t bits = (uint32_t)((const uint16_t *)p)[i] << 16;
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
    case CUDA_R_16F: return __half2float(((const __half *)p)[i]);
    case CUDA_R_8F_E4M3: return float(((const __nv_fp8_e4m3 *)p)[i]);
    default: return float(((const __nv_fp8_e5m2 *)p)[i]);
    }
}
void store(void *p, size_t i, int type, float value) {
    switch (type) {
    case CUDA_R_32F: ((float *)p)[i] = value; break;
    case CUDA_R_16BF: ((__nv_bfloat16 *)p)[i] = __float2bfloat16(value); break;
    case CUDA_R_16F: ((__half *)p)[i] = __float2half(value); break;
    case CUDA_R_8F_E4M3: ((__nv_fp8_e4m3 *)p)[i] = __nv_fp8_e4m3(value); break; // saturates
    default: ((__nv_fp8_e5m2 *)p)[i] = __nv_fp8_e5m2(value);
    }
}

float tf32(float x) { // round to nearest, ties away from zero, 10 bits of mantissa
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7f800000) != 0x7f800000) bits = (bits + 0x1000) & ~0x1fffu;
    memcpy(&x, &bits, 4);
    return x;
}
float through(float x, int compute) { // the inputs' rounding that the compute type allows
    switch (compute) {
    case CUBLAS_COMPUTE_32F_FAST_TF32: return tf32(x);
    case CUBLAS_COMPUTE_32F_FAST_16BF: return __bfloat162float(__float2bfloat16(x));
    case CUBLAS_COMPUTE_32F_FAST_16F: return __half2float(__float2half(x));
    default: return x;
    }
}

// tanh form (Hendrycks & Gimpel 2016)
const float gelu_scale = 0.7978845608f, gelu_cube = 0.044715f;
float gelu(float x) { return 0.5f * x * (1 + tanhf(gelu_scale * (x + gelu_cube * x * x * x))); }
float gelu_gradient(float x) {
    const float t = tanhf(gelu_scale * (x + gelu_cube * x * x * x));
    return 0.5f * (1 + t) + 0.5f * x * (1 - t * t) * gelu_scale * (1 + 3 * gelu_cube * x * x);
}

typedef float Vector __attribute__((vector_size(32), aligned(4)));
constexpr size_t MR = 16, NR = 6, KC = 512; // a tile's rows and columns; steps of k whose panels stay in the cache

// panel (ceil(count/width), k, width) of op(M) (count, k): zeros behind count
std::vector<float> pack(const char *M, int type, size_t count, size_t k, size_t count_stride, size_t k_stride, size_t width, int compute) {
    std::vector<float> panel((count + width - 1) / width * width * k);
    for (size_t i = 0; i < count; i++) {
        float *to = panel.data() + i / width * width * k + i % width;
        for (size_t p = 0; p < k; p++) to[p * width] = through(load(M, i * count_stride + p * k_stride, type), compute);
    }
    return panel;
}

// sum (columns, rows): column-major (n_pad, m_pad) += a x b over k steps [from, to)
void multiply(float *sum, const std::vector<float> &a, const std::vector<float> &b, size_t m, size_t n, size_t k, size_t from, size_t to) {
    const size_t m_pad = (m + MR - 1) / MR * MR;
    for (size_t begin = from; begin < to; begin += KC) {
        const size_t end = std::min(to, begin + KC);
        for (size_t j = 0; j < n; j += NR) {
            for (size_t i = 0; i < m; i += MR) {
                const float *pa = a.data() + i * k + begin * MR, *pb = b.data() + j * k + begin * NR;
                Vector acc[NR][2];
                for (size_t c = 0; c < NR; c++) memcpy(acc[c], sum + (j + c) * m_pad + i, MR * 4);
                for (size_t p = begin; p < end; p++, pa += MR, pb += NR) {
                    const Vector low = *(const Vector *)pa, high = *(const Vector *)(pa + 8);
#pragma GCC unroll 6
                    for (size_t c = 0; c < NR; c++) acc[c][0] += low * pb[c], acc[c][1] += high * pb[c];
                }
                for (size_t c = 0; c < NR; c++) memcpy(sum + (j + c) * m_pad + i, acc[c], MR * 4);
            }
        }
    }
}

size_t span_bytes(const Layout &l) {
    if (l.rows == 0 || l.columns == 0) return 0;
    return ((size_t)l.ld * (l.columns - 1) + l.rows + (size_t)(l.batch - 1) * (size_t)l.stride) * element_bytes((int)l.type);
}

void note_ranges(const Problem &p, float beta, int bits) {
    const uint64_t z = (uint64_t)p.out.batch - 1;
    range_note(p.A, span_bytes(p.a), false, "cublasLtMatmul, A");
    range_note(p.B, span_bytes(p.b), false, "cublasLtMatmul, B");
    if (beta != 0) range_note(p.C, span_bytes(p.c), false, "cublasLtMatmul, C");
    const size_t bias = element_bytes(bias_type_of(p.d, p.c, p.out));
    const uint64_t length = bits & SUM_B ? p.n : p.m;
    if (bits & (BIAS_IN | BIAS_GRAD_OUT | SUM_A | SUM_B))
        range_note(p.d.bias, (length + z * (uint64_t)p.d.bias_stride) * bias, !(bits & BIAS_IN), "cublasLtMatmul, bias");
    if (bits & AUX) {
        const uint64_t elements = (uint64_t)p.d.aux_ld * (p.n - 1) + p.m + z * (uint64_t)p.d.aux_stride;
        range_note(p.d.aux, elements * element_bytes(aux_type_of(p.d, p.out)), bits & GELU, "cublasLtMatmul, auxiliary matrix");
    }
    if (p.algorithm.workspace_bytes > 0) range_note(p.workspace, p.algorithm.workspace_bytes, true, "cublasLtMatmul, workspace");
    for (const float *scale : {p.d.a_scale, p.d.b_scale, p.d.c_scale, p.d.d_scale})
        if (scale != nullptr) range_note(scale, 4, false, "cublasLtMatmul, scale");
    if (p.d.d_amax != nullptr) range_note(p.d.d_amax, 4, true, "cublasLtMatmul, amax");
    range_note(p.D, span_bytes(p.out), true, "cublasLtMatmul, D");
}

// The pieces' sums, added; column-major (n_pad, m_pad).
std::vector<float> product(const Problem &p, const char *A, const char *B) {
    const size_t m_pad = (p.m + MR - 1) / MR * MR, n_pad = (p.n + NR - 1) / NR * NR;
    const bool ta = p.d.transpose_a != CUBLAS_OP_N, tb = p.d.transpose_b != CUBLAS_OP_N;
    const size_t lda = (size_t)p.a.ld, ldb = (size_t)p.b.ld;
    const std::vector<float> a = pack(A, (int)p.a.type, p.m, p.k, ta ? lda : 1, ta ? 1 : lda, MR, p.d.compute);
    const std::vector<float> b = pack(B, (int)p.b.type, p.n, p.k, tb ? 1 : ldb, tb ? ldb : 1, NR, p.d.compute);
    const size_t pieces = p.algorithm.splits;
    std::vector<size_t> order(pieces);
    for (size_t s = 0; s < pieces; s++) order[s] = s;
    if (p.algorithm.scheme == CUBLASLT_REDUCTION_SCHEME_INPLACE)
        for (size_t s = pieces; s > 1; s--) std::swap(order[s - 1], order[unordered64() % s]);
    std::vector<float> sum(m_pad * n_pad), piece;
    multiply(sum.data(), a, b, p.m, p.n, p.k, p.k * order[0] / pieces, p.k * (order[0] + 1) / pieces);
    for (size_t s = 1; s < pieces; s++) {
        piece.assign(m_pad * n_pad, 0);
        multiply(piece.data(), a, b, p.m, p.n, p.k, p.k * order[s] / pieces, p.k * (order[s] + 1) / pieces);
        for (size_t i = 0; i < sum.size(); i++) sum[i] += piece[i];
    }
    return sum;
}

// Sums of op(A) (m, k) or of op(B) (k, n) over k.
void bias_gradient_of_input(const Problem &p, const char *A, const char *B, void *bias, int bits) {
    const bool of_a = bits & SUM_A;
    const Layout &l = of_a ? p.a : p.b;
    const size_t ld = (size_t)l.ld, count = of_a ? p.m : p.n;
    const bool k_is_row = of_a ? p.d.transpose_a != CUBLAS_OP_N : p.d.transpose_b == CUBLAS_OP_N;
    for (size_t i = 0; i < count; i++) {
        float sum = 0;
        for (size_t k = 0; k < p.k; k++) sum += load(of_a ? A : B, k_is_row ? i * ld + k : k * ld + i, (int)l.type);
        store(bias, i, bias_type_of(p.d, p.c, p.out), sum);
    }
}

// D = epilogue(alpha * sum + beta * C) of one matrix of the batch; returns the largest |D| before its scale.
float epilogue(const Problem &p, const std::vector<float> &sum, const char *C, char *D, void *bias, void *aux, float alpha, float beta) {
    const int bits = core_of(p.d.epilogue), bias_type = bias_type_of(p.d, p.c, p.out), aux_type = aux_type_of(p.d, p.out);
    const size_t m_pad = (p.m + MR - 1) / MR * MR;
    const bool a_outer = p.d.a_scale_mode == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F, b_outer = a_outer;
    const float a_scale = p.d.a_scale != nullptr && !a_outer ? *p.d.a_scale : 1, b_scale = p.d.b_scale != nullptr && !b_outer ? *p.d.b_scale : 1;
    const float d_scale = p.d.d_scale != nullptr ? *p.d.d_scale : 1, c_scale = p.d.c_scale != nullptr ? *p.d.c_scale : 1;
    const float scale = alpha * a_scale * b_scale;
    std::vector<float> gradient(bits & BIAS_GRAD_OUT ? p.m : 0);
    float largest = 0;
    for (size_t j = 0; j < p.n; j++) {
        for (size_t i = 0; i < p.m; i++) {
            float value = sum[j * m_pad + i] * scale;
            if (a_outer) value *= p.d.a_scale[i] * p.d.b_scale[j];
            if (beta != 0) value += beta * c_scale * load(C, i + j * (size_t)p.c.ld, (int)p.c.type);
            if (bits & BIAS_IN) value += load(bias, i, bias_type);
            if (bits & GELU) {
                if (bits & AUX) store(aux, i + j * (size_t)p.d.aux_ld, aux_type, value);
                value = gelu(value);
            }
            if (bits & GELU_GRAD) value *= gelu_gradient(load(aux, i + j * (size_t)p.d.aux_ld, aux_type));
            if (bits & BIAS_GRAD_OUT) gradient[i] += value;
            largest = fmaxf(largest, fabsf(value));
            store(D, i + j * (size_t)p.out.ld, (int)p.out.type, value * d_scale);
        }
    }
    for (size_t i = 0; i < gradient.size(); i++) store(bias, i, bias_type, gradient[i]);
    return largest;
}

} // namespace

void run(const Problem &p) {
    if (p.m == 0 || p.n == 0) return;
    const float alpha = p.alpha_at != nullptr ? *p.alpha_at : p.alpha, beta = p.beta_at != nullptr ? *p.beta_at : p.beta;
    const int bits = core_of(p.d.epilogue);
    note_ranges(p, beta, bits);
    float largest = 0;
    for (int64_t z = 0; z < p.out.batch; z++) {
        const char *A = (const char *)p.A + z * p.a.stride * (int64_t)element_bytes((int)p.a.type);
        const char *B = (const char *)p.B + z * p.b.stride * (int64_t)element_bytes((int)p.b.type);
        const char *C = (const char *)p.C + z * p.c.stride * (int64_t)element_bytes((int)p.c.type);
        char *D = (char *)p.D + z * p.out.stride * (int64_t)element_bytes((int)p.out.type);
        char *bias = (char *)p.d.bias + z * p.d.bias_stride * (int64_t)element_bytes(bias_type_of(p.d, p.c, p.out));
        char *aux = (char *)p.d.aux + z * p.d.aux_stride * (int64_t)element_bytes(aux_type_of(p.d, p.out));
        if (bits & (SUM_A | SUM_B)) bias_gradient_of_input(p, A, B, bias, bits);
        largest = fmaxf(largest, epilogue(p, product(p, A, B), C, D, bias, aux, alpha, beta));
    }
    if (p.d.d_amax != nullptr) *p.d.d_amax = largest;
    // simulated time: 790 TFLOP/s, less for narrow accesses, more pieces cost their addition; the same in every run. SIMCU_TIMES:
    // drawn
    const double flops = 2.0 * (double)p.m * (double)p.n * (double)p.k * (double)p.out.batch;
    const double plain_ns = flops / 790e3 * (p.algorithm.align[0] < 16 ? 1.5 : 1) + 1000 * (p.algorithm.splits - 1);
    const uint64_t draw = ((uint64_t)settings().times * 131 + p.m * 31 + p.n * 37 + p.k * 41 + p.algorithm.id) * 0x9E3779B97F4A7C15ull;
    advance_clock(settings().times == 0 ? plain_ns : 1000 + (double)(draw >> 44));
}

} // namespace simcu::lt
