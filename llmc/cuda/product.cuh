// product.cuh: what a matrix product is, and a plain kernel for those that cuBLASLt (cublaslt.cuh) does not take. Knows no library.
#ifndef LLMC_CUDA_PRODUCT_CUH
#define LLMC_CUDA_PRODUCT_CUH

#include "llmc/cuda/launch.cuh" // launch

// Which operand is stored transposed: NT: left (M, K), right (N, K). NN: left (M, K), right (K, N). TN: left (K, M), right (K, N).
enum ProductForm { PRODUCT_NT, PRODUCT_NN, PRODUCT_TN };

// out (M, N) = or += left x right, then the epilogue. bias: added (N), or the bias gradient (M) =; aux (M, N): the input of GELU. Rows of out and
// left may be apart (Buffer.row).
struct Product {
    ProductForm form;
    Buffer out, left, right;
    int64_t M, N, K;
    bool accumulate;
    uint32_t epilogue; // cublasLtEpilogue_t
    Buffer bias, aux;
};

// Elements from row to row of left and of out as they lie in memory.
static inline int64_t product_left_row(const Product *p) { return buffer_row(p->left, p->form == PRODUCT_TN ? p->M : p->K); }
static inline int64_t product_out_row(const Product *p) { return buffer_row(p->out, p->N); }

enum { OWN_TILE = 32, OWN_ROWS = 8, OWN_THREADS = OWN_TILE * OWN_ROWS };

// A matrix by strides, in elements: element (row, column) is at row * row_stride + column * column_stride.
struct OwnMatrix {
    const void *data;
    int64_t row_stride, column_stride;
};

// shared (32, 33) = the tile of `matrix` (rows, columns) from (row, column) on, zero outside. Neighbouring threads read neighbouring addresses.
template <class T>
static __device__ void own_load_(float (*shared)[OWN_TILE + 1], OwnMatrix matrix, int64_t row, int64_t column, int64_t rows, int64_t columns) {
    const bool across = matrix.column_stride == 1;
    const int x = (int)threadIdx.x % OWN_TILE;
    for (int y = (int)threadIdx.x / OWN_TILE; y < OWN_TILE; y += OWN_ROWS) {
        const int i = across ? y : x, j = across ? x : y;
        const bool inside = row + i < rows && column + j < columns;
        const int64_t at = (row + i) * matrix.row_stride + (column + j) * matrix.column_stride;
        shared[i][j] = inside ? to_float(static_cast<const T *>(matrix.data)[at]) : 0.0f;
    }
}

// out (M, N; out_row elements from row to row) = or += left (M, K) x right (K, N); sums in fp32 in the order of k. For products that cuBLASLt does
// not take, so plain rather than fast. Tile 32 x 32 x 32, a block of 256 threads per tile, 4 results a thread. Grid: tiles, rows of tiles one after
// the other. 8.25 KiB of shared memory. Not measured on a device yet.
template <class Out, class In>
__global__ void __launch_bounds__(OWN_THREADS)
    own_product_kernel(Out *out, int64_t out_row, OwnMatrix left, OwnMatrix right, int64_t M, int64_t N, int64_t K, bool accumulate) {
    __shared__ float a[OWN_TILE][OWN_TILE + 1], b[OWN_TILE][OWN_TILE + 1];
    const int64_t across = (N + OWN_TILE - 1) / OWN_TILE;
    const int64_t row = (int64_t)blockIdx.x / across * OWN_TILE, column = (int64_t)blockIdx.x % across * OWN_TILE;
    const int x = (int)threadIdx.x % OWN_TILE, y = (int)threadIdx.x / OWN_TILE;
    float sum[OWN_TILE / OWN_ROWS] = {};
    for (int64_t k = 0; k < K; k += OWN_TILE) {
        own_load_<In>(a, left, row, k, M, K);
        own_load_<In>(b, right, k, column, K, N);
        __syncthreads();
        for (int i = 0; i < OWN_TILE; i++) {
#pragma unroll
            for (int r = 0; r < OWN_TILE / OWN_ROWS; r++) sum[r] += a[y + r * OWN_ROWS][i] * b[i][x];
        }
        __syncthreads(); // all have used the tiles
    }
    for (int r = 0; r < OWN_TILE / OWN_ROWS; r++) {
        const int64_t m = row + y + r * OWN_ROWS, n = column + x;
        if (m >= M || n >= N) continue;
        Out *to = out + m * out_row + n;
        *to = from_float<Out>(sum[r] + (accumulate ? to_float(*to) : 0.0f));
    }
}

template <class Out, class In> static void own_product_launch_(CudaDevice *c, const Product *p) {
    const int64_t row = product_left_row(p);
    const OwnMatrix left = p->form == PRODUCT_TN ? OwnMatrix{p->left.data, 1, row} : OwnMatrix{p->left.data, row, 1};
    const OwnMatrix right = p->form == PRODUCT_NT ? OwnMatrix{p->right.data, 1, p->K} : OwnMatrix{p->right.data, p->N, 1};
    const int64_t tiles = ((p->M + OWN_TILE - 1) / OWN_TILE) * ((p->N + OWN_TILE - 1) / OWN_TILE);
    launch(c, c->compute, {dim3((unsigned)tiles), OWN_THREADS}, own_product_kernel<Out, In>, (Out *)p->out.data, product_out_row(p), left, right,
           p->M, p->N, p->K, p->accumulate);
}

// Enqueues a product without its epilogue. Right for all sizes, addresses and mixtures of F32 and BF16.
static void own_product(CudaDevice *c, const Product *p) {
    const bool in_bf16 = p->left.dtype == DTYPE_BF16, out_bf16 = p->out.dtype == DTYPE_BF16;
    if (in_bf16) {
        out_bf16 ? own_product_launch_<bf16, bf16>(c, p) : own_product_launch_<float, bf16>(c, p);
    } else {
        out_bf16 ? own_product_launch_<bf16, float>(c, p) : own_product_launch_<float, float>(c, p);
    }
}

#endif
