// matmul.cuh: linear layers of the CUDA device: products by cuBLASLt (cublaslt.cuh) with bias, GELU and their gradients in its epilogues where it
// has them and they win, in kernels after it (mlp.cuh, reduce.cuh) where not. A plain kernel of our own takes the products that the library does
// not.
//
// The epilogues are for bf16. fp32 is there to be compared with the CPU: its GELU and its sums of columns are those of our kernels.
#ifndef LLMC_CUDA_MATMUL_CUH
#define LLMC_CUDA_MATMUL_CUH

#include "llmc/cuda/cast.cuh"     // cuda_accumulate
#include "llmc/cuda/cublaslt.cuh" // Product, product_enqueue, product_fuses
#include "llmc/cuda/launch.cuh"   // launch, launch_blocks
#include "llmc/cuda/memory.cuh"   // cuda_synchronize
#include "llmc/cuda/mlp.cuh"      // cuda_gelu_forward_, cuda_gelu_backward_
#include "llmc/cuda/reduce.cuh"   // cuda_column_sums_
#include "llmc/cuda/scratch.h"    // scratch_bias_bytes
#include "llmc/rng.h"             // rng_mix

// ----------------------------------------------------------------------------
// Kernels.

enum { BIAS_THREADS = 256 };

// out (M, N; `row` elements from row to row) = bias (N) in every row: a product that accumulates follows. Grid: strides over elements.
template <class Out, class Bias>
__global__ void __launch_bounds__(BIAS_THREADS) bias_rows_kernel(Out *out, int64_t row, const Bias *bias, int64_t M, int64_t N) {
    for (int64_t i = blockIdx.x * (int64_t)BIAS_THREADS + threadIdx.x; i < M * N; i += (int64_t)gridDim.x * BIAS_THREADS)
        out[i / N * row + i % N] = from_float<Out>(to_float(bias[i % N]));
}

// ----------------------------------------------------------------------------
// Products with and without the library.

// A product that cuBLASLt does not take; said once.
static void product_without_library_(CudaDevice *c, const Product *p) {
    CublasLt *lt = c->matmul;
    if (!lt->said_absent) {
        fprintf(stderr,
                "train_gpt: cuBLASLt has no algorithm for a product of %lld x %lld x %lld, %s to %s, aligned to %lld, %lld and %lld bytes: own "
                "kernel\n",
                (long long)p->M, (long long)p->N, (long long)p->K, dtype_names[p->left.dtype], dtype_names[p->out.dtype],
                (long long)product_align_(p->left), (long long)product_align_(p->right), (long long)product_align_(p->out));
        lt->said_absent = true;
    }
    own_product(c, p);
}

static void bias_rows_(CudaDevice *c, Buffer out, Buffer bias, int64_t M, int64_t N) {
    const LaunchShape shape = {launch_blocks(c, M * N, BIAS_THREADS, 8), BIAS_THREADS};
    const int64_t row = buffer_row(out, N);
    const bool out_bf16 = out.dtype == DTYPE_BF16, bias_bf16 = bias.dtype == DTYPE_BF16;
    if (out_bf16) {
        bias_bf16 ? launch(c, c->compute, shape, bias_rows_kernel<bf16, bf16>, (bf16 *)out.data, row, (const bf16 *)bias.data, M, N)
                  : launch(c, c->compute, shape, bias_rows_kernel<bf16, float>, (bf16 *)out.data, row, (const float *)bias.data, M, N);
    } else {
        bias_bf16 ? launch(c, c->compute, shape, bias_rows_kernel<float, bf16>, (float *)out.data, row, (const bf16 *)bias.data, M, N)
                  : launch(c, c->compute, shape, bias_rows_kernel<float, float>, (float *)out.data, row, (const float *)bias.data, M, N);
    }
}

// Enqueues p, whose epilogue is none or a bias. Without the epilogue the bias is what the product accumulates on.
static void product(CudaDevice *c, Product p) {
    if (p.bias.data != nullptr && (p.bias.dtype != p.out.dtype || !product_exists(c, &p))) { // cuBLASLt's bias has the type of its output
        bias_rows_(c, p.out, p.bias, p.M, p.N);
        p.bias = Buffer(), p.epilogue = CUBLASLT_EPILOGUE_DEFAULT, p.accumulate = true;
    }
    if (product_exists(c, &p)) {
        product_enqueue(c, &p);
    } else {
        product_without_library_(c, &p);
    }
}

// GELU's epilogues take its input with rows of a multiple of 8 elements.
static bool gelu_epilogue_legal_(Buffer out, Buffer aux, int64_t columns) {
    return out.dtype == DTYPE_BF16 && aux.dtype == DTYPE_BF16 && columns % 8 == 0 && product_align_(aux) >= 16;
}

// ----------------------------------------------------------------------------
// Ops of the table.

// out (N, OC; rows may be apart, without gelu_out) = in (N, IC) x weight (OC, IC)^T + bias (OC, optional); gelu_out (N, OC, optional) = gelu(out)
static void cuda_linear_forward(Device *device, Buffer out, Buffer gelu_out, Buffer in, Buffer weight, Buffer bias, int64_t N, int64_t IC,
                                int64_t OC) {
    CudaDevice *c = cuda_of(device);
    if (N == 0) return;
    Product plain = {PRODUCT_NT, out, in, weight, N, OC, IC, false, CUBLASLT_EPILOGUE_DEFAULT, bias, {}};
    if (bias.data != nullptr) plain.epilogue = CUBLASLT_EPILOGUE_BIAS;
    if (gelu_out.data == nullptr) {
        product(c, plain);
        return;
    }
    auto gelu = [&] { cuda_gelu_forward_(c, gelu_out, out, N * OC); };
    if (gelu_epilogue_legal_(gelu_out, out, OC) && (bias.data == nullptr || bias.dtype == DTYPE_BF16)) {
        Product fused = plain; // its output is gelu_out, its aux is out
        fused.out = gelu_out, fused.aux = out;
        fused.epilogue = bias.data != nullptr ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
        if (product_fuses(c, &fused, &plain, gelu)) {
            product_enqueue(c, &fused);
            return;
        }
    }
    product(c, plain);
    gelu();
}

// din (N, IC) = dout (N, OC; rows may be apart) x weight (OC, IC), times gelu'(gelu_in (N, IC)) when that is given
static void cuda_linear_backward_input(Device *device, Buffer din, Buffer dout, Buffer weight, Buffer gelu_in, int64_t N, int64_t IC, int64_t OC) {
    CudaDevice *c = cuda_of(device);
    if (N == 0) return;
    const Product plain = {PRODUCT_NN, din, dout, weight, N, IC, OC, false, CUBLASLT_EPILOGUE_DEFAULT, {}, {}};
    if (gelu_in.data == nullptr) {
        product(c, plain);
        return;
    }
    auto gelu = [&] { cuda_gelu_backward_(c, din, gelu_in, N * IC); };
    if (gelu_epilogue_legal_(din, gelu_in, IC)) {
        Product fused = plain;
        fused.aux = gelu_in, fused.epilogue = CUBLASLT_EPILOGUE_DGELU;
        if (product_fuses(c, &fused, &plain, gelu)) {
            product_enqueue(c, &fused);
            return;
        }
    }
    product(c, plain);
    gelu();
}

// Whether the weight gradient's product gives the bias gradient as well (BGRADB: in the type of dweight, F32; it never accumulates).
static bool bias_gradient_fuses_(CudaDevice *c, const Product *fused, const Product *plain, Buffer dout, int64_t N, int64_t OC) {
    if (dout.dtype != DTYPE_BF16 || OC * 4 > PRODUCT_WORKSPACE_BYTES) return false;
    const Buffer trial = buffer_of(c->matmul->workspace, DTYPE_F32); // not dbias: that may be a sum already
    return product_fuses(c, fused, plain, [&] { cuda_column_sums_(c, trial, false, dout, N, OC); });
}

// dweight (OC, IC) F32 = or += dout (N, OC; rows may be apart)^T x in (N, IC); dbias (OC) F32, optional: = or += column sums of dout
static void cuda_linear_backward_weight(Device *device, Buffer dweight, Buffer dbias, bool accumulate, Buffer dout, Buffer in, int64_t N,
                                        int64_t IC, int64_t OC) {
    CudaDevice *c = cuda_of(device);
    if (N == 0) {
        if (accumulate) return;
        cuda_check(cudaMemsetAsync(dweight.data, 0, (size_t)(OC * IC) * 4, c->compute), "cudaMemsetAsync");
        if (dbias.data != nullptr) cuda_check(cudaMemsetAsync(dbias.data, 0, (size_t)OC * 4, c->compute), "cudaMemsetAsync");
        return;
    }
    const Product plain = {PRODUCT_TN, dweight, dout, in, OC, IC, N, accumulate, CUBLASLT_EPILOGUE_DEFAULT, {}, {}};
    if (dbias.data != nullptr) {
        Product fused = plain;
        fused.epilogue = CUBLASLT_EPILOGUE_BGRADB;
        fused.bias = accumulate ? buffer_of(cuda_scratch(c, scratch_bias_bytes(OC)), DTYPE_F32) : dbias;
        if (bias_gradient_fuses_(c, &fused, &plain, dout, N, OC)) {
            if (accumulate) fused.bias.data = cuda_scratch(c, scratch_bias_bytes(OC)); // the trial may have moved it
            product_enqueue(c, &fused);
            if (accumulate) cuda_accumulate(device, dbias, fused.bias, OC);
            return;
        }
        cuda_column_sums_(c, dbias, accumulate, dout, N, OC);
    }
    product(c, plain);
}

// ----------------------------------------------------------------------------
// The rate of a large product.

// A square matrix of uniform values in (-1, 1): constant ones would let the clock rise. Null when there is no memory.
static void *rate_matrix_(Device *device, int64_t n, Dtype dtype) {
    constexpr int64_t SEED_ELEMENTS = 1 << 16;
    const size_t bytes = (size_t)(n * n) * dtype_bytes(dtype);
    const int64_t seed_elements = n * n < SEED_ELEMENTS ? n * n : SEED_ELEMENTS;
    void *matrix = nullptr;
    if (cudaMalloc(&matrix, bytes) != cudaSuccess) {
        (void)cudaGetLastError();
        return nullptr;
    }
    float *seed = new float[SEED_ELEMENTS];
    uint16_t *narrow = new uint16_t[SEED_ELEMENTS];
    for (int64_t i = 0; i < seed_elements; i++) {
        seed[i] = (float)(rng_mix((uint64_t)i) >> 40) * 0x1p-23f - 1.0f;
        narrow[i] = bf16_from_f32(seed[i]);
    }
    size_t done = (size_t)seed_elements * dtype_bytes(dtype);
    device->copy_in(device, matrix, dtype == DTYPE_BF16 ? (const void *)narrow : seed, done);
    for (size_t piece; done < bytes; done += piece) {
        piece = done < bytes - done ? done : bytes - done;
        cuda_check(cudaMemcpyAsync((char *)matrix + done, matrix, piece, cudaMemcpyDeviceToDevice, cuda_of(device)->compute), "cudaMemcpyAsync");
    }
    delete[] seed;
    delete[] narrow;
    return matrix;
}

// FLOP/s of a square product of 64 rows per multiprocessor (8448 on an H200), or half of that and so on where memory is short; of the smallest
// where times say nothing.
static double cuda_matmul_rate(Device *device, Dtype dtype) {
    CudaDevice *c = cuda_of(device);
    for (int64_t n = c->matmul->timed ? (int64_t)c->sm_count * 64 : 64; n >= 64; n /= 2) {
        void *matrix[3] = {rate_matrix_(device, n, dtype), rate_matrix_(device, n, dtype), rate_matrix_(device, n, dtype)};
        float ms = 0;
        if (matrix[0] != nullptr && matrix[1] != nullptr && matrix[2] != nullptr) {
            const Buffer left = buffer_of(matrix[0], dtype), right = buffer_of(matrix[1], dtype), out = buffer_of(matrix[2], dtype);
            const Product p = {PRODUCT_NT, out, left, right, n, n, n, false, CUBLASLT_EPILOGUE_DEFAULT, {}, {}};
            ms = product_time_(c, [&] { product(c, p); });
        }
        cuda_synchronize(device);
        for (void *pointer : matrix) cuda_check(cudaFree(pointer), "cudaFree");
        if (ms > 0) return 2.0 * (double)n * (double)n * (double)n / ((double)ms * 1e-3);
    }
    cuda_fail("matmul_rate", "no memory for three matrices of 64 x 64");
}

#endif
