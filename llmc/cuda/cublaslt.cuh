// cublaslt.cuh: matrix products by cuBLASLt: which algorithm runs for which product is asked, timed once and kept. Knows no op of the device table:
// those are in matmul.cuh; the file that keeps the choices from run to run is in algorithms.cuh.
//
// Row-major to column-major, once for all. Our out (M, N) = left x right is row-major; to cuBLASLt the same memory is a column-major (N x M)
// matrix, which is right^T x left^T. So cuBLASLt's A is our right, its B our left, its m = N, n = M, k = K, and a row-major (R, C) matrix is a
// column-major (C x R) one whose leading dimension is C. What is transposed:
//   form         left    right    A (right)           B (left)
//   PRODUCT_NT   (M, K)  (N, K)   K x N, transposed   K x M
//   PRODUCT_NN   (M, K)  (K, N)   N x K               K x M
//   PRODUCT_TN   (K, M)  (K, N)   N x K               M x K, transposed
// A bias runs along D's rows: our N. The bias gradient of PRODUCT_TN sums left over k: BGRADB, of length M.
#ifndef LLMC_CUDA_CUBLASLT_CUH
#define LLMC_CUDA_CUBLASLT_CUH

#include "llmc/cuda/algorithms.cuh" // AlgorithmFile, ProductKey
#include "llmc/cuda/cuda.cuh"       // CudaDevice, cuda_check
#include "llmc/cuda/memory.cuh"     // cuda_out_of_memory
#include "llmc/cuda/product.cuh"    // Product
#include "llmc/cuda/scratch.h"      // PRODUCT_WORKSPACE_BYTES
#include <cstdlib>                  // realloc
#include <cstring>                  // memcmp
#include <cublasLt.h>               // cublasLtMatmul

enum PlanState { PLAN_ABSENT, PLAN_READY }; // ABSENT: cuBLASLt has no algorithm

struct ProductPlan {
    ProductKey key;
    int64_t state;   // PlanState
    int64_t verdict; // Verdict
    float ms;        // of the chosen algorithm
    cublasLtMatmulDesc_t operation;
    cublasLtMatrixLayout_t right, left, out;
    cublasLtMatmulAlgo_t algorithm;
};

enum { PRODUCT_CANDIDATES = 16, PRODUCT_TIMED_RUNS = 3 };

// CudaDevice.matmul
struct CublasLt {
    cublasLtHandle_t handle;
    void *workspace; // PRODUCT_WORKSPACE_BYTES, 256-byte aligned
    cudaEvent_t start, stop;
    bool timed; // false: every time counts as equal, and the first candidate is taken
    ProductPlan **plans;
    int64_t count, capacity;
    bool said_untimed, said_absent; // lines that are printed once
    char device_name[256];
    AlgorithmFile file;
};

static inline void cublas_check(cublasStatus_t status, const char *call) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    char text[32];
    snprintf(text, sizeof text, "cuBLAS status %d", (int)status);
    cuda_fail(call, text);
}

static inline cudaDataType_t product_type_(int64_t dtype) { return dtype == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F; }

// Three classes keep the number of plans small: what cudaMalloc gives, what 16-byte loads need, and everything else by its true alignment.
static inline int64_t product_align_(Buffer buffer) {
    const uintptr_t address = (uintptr_t)buffer.data;
    if (address == 0 || address % 256 == 0) return address == 0 ? 0 : 256;
    return address % 16 == 0 ? 16 : (int64_t)(address & -address);
}

static inline ProductKey product_key_(const Product *p) {
    ProductKey key = {p->form, p->left.dtype, p->out.dtype, p->M, p->N, p->K, product_left_row(p), product_out_row(p), p->accumulate, p->epilogue,
                      {}};
    const Buffer buffers[5] = {p->right, p->left, p->out, p->bias, p->aux};
    for (int i = 0; i < 5; i++) key.align[i] = product_align_(buffers[i]);
    return key;
}

// ----------------------------------------------------------------------------
// Time of work on the compute stream.

// ms of run(), the best of a few after one that warms up. Waits for the device: only a shape's first use does that.
template <class Run> static float product_time_(CudaDevice *device, Run run) {
    CublasLt *lt = device->matmul;
    float best_ms = 1e30f;
    for (int i = 0; i <= PRODUCT_TIMED_RUNS; i++) {
        float ms = 0;
        cuda_check(cudaEventRecord(lt->start, device->compute), "cudaEventRecord");
        run();
        cuda_check(cudaEventRecord(lt->stop, device->compute), "cudaEventRecord");
        cuda_wait_event(device, lt->stop);
        cuda_check(cudaEventElapsedTime(&ms, lt->start, lt->stop), "cudaEventElapsedTime");
        if (i > 0 && ms < best_ms) best_ms = ms;
    }
    return lt->timed ? best_ms : 1.0f;
}

// ----------------------------------------------------------------------------
// One product.

static cublasStatus_t product_call_(CudaDevice *device, const ProductPlan *plan, const cublasLtMatmulAlgo_t *algorithm, const Product *p) {
    CublasLt *lt = device->matmul;
    const float alpha = 1, beta = p->accumulate ? 1 : 0;
    if (p->bias.data != nullptr)
        cublas_check(cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p->bias.data, sizeof(void *)),
                     "bias pointer");
    if (p->aux.data != nullptr)
        cublas_check(cublasLtMatmulDescSetAttribute(plan->operation, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &p->aux.data, sizeof(void *)),
                     "aux pointer");
    return cublasLtMatmul(lt->handle, plan->operation, &alpha, p->right.data, plan->right, p->left.data, plan->left, &beta, p->out.data, plan->out,
                          p->out.data, plan->out, algorithm, lt->workspace, PRODUCT_WORKSPACE_BYTES, device->compute);
}

// A row-major matrix; row: elements from one to the next
static cublasLtMatrixLayout_t product_layout_(int64_t dtype, int64_t rows, int64_t columns, int64_t row) {
    cublasLtMatrixLayout_t layout;
    cublas_check(cublasLtMatrixLayoutCreate(&layout, product_type_(dtype), (uint64_t)columns, (uint64_t)rows, row), "cublasLtMatrixLayoutCreate");
    return layout;
}

// The descriptors of a product. The pointers are set before the heuristics are asked: they read the alignment of bias and aux off them.
static void product_describe_(ProductPlan *plan, const Product *p) {
    const cublasOperation_t right_op = p->form == PRODUCT_NT ? CUBLAS_OP_T : CUBLAS_OP_N,
                            left_op = p->form == PRODUCT_TN ? CUBLAS_OP_T : CUBLAS_OP_N;
    const int64_t aux_ld = p->N;
    // sums in fp32, never TF32
    cublas_check(cublasLtMatmulDescCreate(&plan->operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "cublasLtMatmulDescCreate");
    auto set = [&](cublasLtMatmulDescAttributes_t attribute, const void *value, size_t bytes) {
        cublas_check(cublasLtMatmulDescSetAttribute(plan->operation, attribute, value, bytes), "cublasLtMatmulDescSetAttribute");
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, &right_op, sizeof right_op);
    set(CUBLASLT_MATMUL_DESC_TRANSB, &left_op, sizeof left_op);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, &p->epilogue, sizeof p->epilogue);
    if (p->bias.data != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, &p->bias.data, sizeof(void *));
    if (p->aux.data != nullptr) {
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &p->aux.data, sizeof(void *));
        set(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &aux_ld, sizeof aux_ld);
    }
    const int64_t right_rows = p->form == PRODUCT_NT ? p->N : p->K, left_rows = p->form == PRODUCT_TN ? p->K : p->M;
    const int64_t right_columns = p->N + p->K - right_rows, left_columns = p->M + p->K - left_rows;
    plan->right = product_layout_(p->right.dtype, right_rows, right_columns, right_columns);
    plan->left = product_layout_(p->left.dtype, left_rows, left_columns, product_left_row(p));
    plan->out = product_layout_(p->out.dtype, p->M, p->N, product_out_row(p));
}

// Candidates, best guess first; the number of them.
static int product_candidates_(CublasLt *lt, const ProductPlan *plan, cublasLtMatmulHeuristicResult_t *candidates) {
    cublasLtMatmulPreference_t preference;
    cublas_check(cublasLtMatmulPreferenceCreate(&preference), "cublasLtMatmulPreferenceCreate");
    auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const void *value, size_t bytes) {
        cublas_check(cublasLtMatmulPreferenceSetAttribute(preference, attribute, value, bytes), "cublasLtMatmulPreferenceSetAttribute");
    };
    const uint64_t workspace = PRODUCT_WORKSPACE_BYTES;
    // Sums divided over k meet in fp32 in the workspace, in a fixed order. In place they would meet in the order in which blocks finish.
    const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    const uint32_t right = (uint32_t)plan->key.align[0], left = (uint32_t)plan->key.align[1], out = (uint32_t)plan->key.align[2];
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction, sizeof reduction);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &right, sizeof right);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &left, sizeof left);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &out, sizeof out);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &out, sizeof out);
    int found = 0;
    memset(candidates, 0, sizeof *candidates * PRODUCT_CANDIDATES);
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(lt->handle, plan->operation, plan->right, plan->left, plan->out, plan->out,
                                                                 preference, PRODUCT_CANDIDATES, candidates, &found);
    cublas_check(cublasLtMatmulPreferenceDestroy(preference), "cublasLtMatmulPreferenceDestroy");
    return status == CUBLAS_STATUS_SUCCESS ? found : 0; // anything else: not for this product
}

// ----------------------------------------------------------------------------
// The choice.

// Where trials may write: an output that is overwritten is its own trial output; one that accumulates gets scratch of the same alignment, zeroed;
// null when there is no memory for it.
static void *product_trial_begin_(CudaDevice *device, const Product *p, Product *trial) {
    *trial = *p;
    if (!p->accumulate) return p->out.data;
    const size_t bytes = (size_t)(p->M * product_out_row(p)) * dtype_bytes(p->out.dtype), offset = (uintptr_t)p->out.data % 256;
    void *scratch = nullptr;
    if (cudaMallocAsync(&scratch, bytes + offset, device->compute) != cudaSuccess) { // in the stream's order: other streams need not be idle
        (void)cudaGetLastError();
        return nullptr;
    }
    cuda_check(cudaMemsetAsync(scratch, 0, bytes + offset, device->compute), "cudaMemsetAsync");
    trial->out.data = (char *)scratch + offset;
    return scratch;
}

static void product_trial_end_(CudaDevice *device, const Product *p, void *scratch) {
    if (p->accumulate && scratch != nullptr) cuda_check(cudaFreeAsync(scratch, device->compute), "cudaFreeAsync");
}

// Takes the fastest of the candidates that run.
static void product_choose_(CudaDevice *device, ProductPlan *plan, const Product *p, const cublasLtMatmulHeuristicResult_t *candidates, int count) {
    CublasLt *lt = device->matmul;
    Product trial;
    void *scratch = product_trial_begin_(device, p, &trial);
    if (scratch == nullptr && !lt->said_untimed) {
        fprintf(stderr, "train_gpt: cuBLASLt: no memory to time a product of %lld x %lld: took the first algorithm\n", (long long)p->M,
                (long long)p->N);
        lt->said_untimed = true;
    }
    for (int i = 0; i < count; i++) {
        const cublasLtMatmulAlgo_t *algorithm = &candidates[i].algo;
        if (candidates[i].state != CUBLAS_STATUS_SUCCESS) continue;
        if (scratch == nullptr) { // unproved, but the library's own first advice
            plan->state = PLAN_READY, plan->algorithm = *algorithm, plan->ms = 0;
            return;
        }
        if (product_call_(device, plan, algorithm, &trial) != CUBLAS_STATUS_SUCCESS) continue;
        const float ms = product_time_(device, [&] { cublas_check(product_call_(device, plan, algorithm, &trial), "cublasLtMatmul"); });
        if (plan->state == PLAN_READY && ms >= plan->ms) continue;
        plan->state = PLAN_READY, plan->algorithm = *algorithm, plan->ms = ms;
    }
    product_trial_end_(device, p, scratch);
}

static ProductPlan *product_plan_find_(const CublasLt *lt, const ProductKey *key) {
    for (int64_t i = 0; i < lt->count; i++)
        if (memcmp(&lt->plans[i]->key, key, sizeof *key) == 0) return lt->plans[i];
    return nullptr;
}

// A kept choice is taken when the library still offers it: bytes of the file never reach the library.
static bool product_recall_(CublasLt *lt, ProductPlan *plan, const cublasLtMatmulHeuristicResult_t *candidates, int count) {
    for (const AlgorithmEntry *e = nullptr; (e = algorithms_next(&lt->file, &plan->key, e)) != nullptr;) {
        for (int i = 0; i < count; i++) {
            if (candidates[i].state != CUBLAS_STATUS_SUCCESS || memcmp(candidates[i].algo.data, e->algorithm, sizeof e->algorithm) != 0) continue;
            plan->state = PLAN_READY, plan->verdict = e->verdict, plan->ms = e->ms, plan->algorithm = candidates[i].algo;
            return true;
        }
    }
    return false;
}

static void product_keep_(CublasLt *lt, const ProductPlan *plan) {
    if (plan->ms <= 0) return; // was not timed: no memory
    AlgorithmEntry entry = {plan->key, plan->verdict, plan->ms, {}};
    memcpy(entry.algorithm, plan->algorithm.data, sizeof entry.algorithm);
    algorithms_append(&lt->file, &entry);
}

// The plan of a product; the first use of a shape asks, times and waits.
static ProductPlan *product_plan(CudaDevice *device, const Product *p) {
    CublasLt *lt = device->matmul;
    const ProductKey key = product_key_(p);
    ProductPlan *plan = product_plan_find_(lt, &key);
    if (plan != nullptr) return plan;
    if (lt->count == lt->capacity) {
        lt->capacity = lt->capacity == 0 ? 64 : 2 * lt->capacity;
        lt->plans = (ProductPlan **)realloc(lt->plans, (size_t)lt->capacity * sizeof *lt->plans);
        if (lt->plans == nullptr) cuda_fail("realloc", "out of memory");
    }
    plan = new ProductPlan();
    lt->plans[lt->count++] = plan;
    plan->key = key;
    cublasLtMatmulHeuristicResult_t candidates[PRODUCT_CANDIDATES];
    product_describe_(plan, p);
    const int count = product_candidates_(lt, plan, candidates);
    if (product_recall_(lt, plan, candidates, count)) return plan;
    product_choose_(device, plan, p, candidates, count);
    const bool plain = p->epilogue == CUBLASLT_EPILOGUE_DEFAULT || p->epilogue == CUBLASLT_EPILOGUE_BIAS;
    if (plan->state == PLAN_READY && plain) product_keep_(lt, plan); // fused ones are kept with their verdict
    return plan;
}

// Whether cuBLASLt has the product.
static bool product_exists(CudaDevice *device, const Product *p) { return product_plan(device, p)->state == PLAN_READY; }

// Enqueues a product that exists.
static void product_enqueue(CudaDevice *device, const Product *p) {
    const ProductPlan *plan = product_plan(device, p);
    cublas_check(product_call_(device, plan, &plan->algorithm, p), "cublasLtMatmul");
}

// Whether `fused`, a product with an epilogue, beats `plain` with the kernel that after() enqueues.
template <class After> static bool product_fuses(CudaDevice *device, const Product *fused, const Product *plain, After after) {
    ProductPlan *plan = product_plan(device, fused);
    if (plan->state == PLAN_ABSENT) return false;
    if (plan->verdict == VERDICT_NONE) {
        const ProductPlan *rival = product_plan(device, plain);
        bool wins = true; // on a device whose times say nothing, so that it is tested there
        if (rival->state == PLAN_READY && device->matmul->timed) wins = plan->ms <= rival->ms + product_time_(device, after);
        plan->verdict = wins ? VERDICT_YES : VERDICT_NO;
        product_keep_(device->matmul, plan);
    }
    return plan->verdict == VERDICT_YES;
}

// ----------------------------------------------------------------------------
// The library.

// The file that keeps the choices: the user's, else the run's, `path` (null: none yet).
static void cublaslt_keep(CublasLt *lt, const char *path) {
    const char *users = getenv("TRAIN_GPT_ALGORITHMS");
    const bool own = users == nullptr || *users == 0;
    if (!own && path != nullptr) return; // is open already
    algorithms_open(&lt->file, own ? path : users, own, lt->device_name, cublasLtGetVersion());
}

static CublasLt *cublaslt_open(CudaDevice *device) {
    CublasLt *lt = new CublasLt();
    cublas_check(cublasLtCreate(&lt->handle), "cublasLtCreate");
    if (cudaMalloc(&lt->workspace, PRODUCT_WORKSPACE_BYTES) != cudaSuccess) cuda_out_of_memory(PRODUCT_WORKSPACE_BYTES);
    cuda_check(cudaEventCreate(&lt->start), "cudaEventCreate");
    cuda_check(cudaEventCreate(&lt->stop), "cudaEventCreate");
    cudaDeviceProp properties;
    cuda_check(cudaGetDeviceProperties(&properties, device->ordinal), "cudaGetDeviceProperties");
    lt->timed = strncmp(properties.name, "sim", 3) != 0; // times of the simulated device say nothing, and its bits must not depend on them
    snprintf(lt->device_name, sizeof lt->device_name, "%s", properties.name);
    cublaslt_keep(lt, nullptr);
    return lt;
}

static void cublaslt_close(CublasLt *lt) {
    for (int64_t i = 0; i < lt->count; i++) {
        ProductPlan *plan = lt->plans[i];
        cublas_check(cublasLtMatmulDescDestroy(plan->operation), "cublasLtMatmulDescDestroy");
        for (cublasLtMatrixLayout_t layout : {plan->right, plan->left, plan->out})
            cublas_check(cublasLtMatrixLayoutDestroy(layout), "cublasLtMatrixLayoutDestroy");
        delete plan;
    }
    free(lt->plans);
    algorithms_close(&lt->file);
    cuda_check(cudaEventDestroy(lt->start), "cudaEventDestroy");
    cuda_check(cudaEventDestroy(lt->stop), "cudaEventDestroy");
    cuda_check(cudaFree(lt->workspace), "cudaFree");
    cublas_check(cublasLtDestroy(lt->handle), "cublasLtDestroy");
    delete lt;
}

#endif
