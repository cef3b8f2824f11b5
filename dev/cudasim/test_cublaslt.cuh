// test_cublaslt.cuh: the simulated cuBLASLt: every epilogue, transpose and type against plain loops in double precision, through every algorithm
// that the heuristic offers; and what the library must refuse.
#ifndef CUDASIM_TEST_CUBLASLT_CUH
#define CUDASIM_TEST_CUBLASLT_CUH

#include "dev/cudasim/test_sim.cuh" // to_device
#include <cublasLt.h>               // cublasLtMatmul
#include <cuda_fp8.h>               // __nv_fp8_e4m3

static inline void need_blas(cublasStatus_t status, const char *call) {
    if (status == CUBLAS_STATUS_SUCCESS) return;
    printf("FAILED: %s: %s\n", call, cublasLtGetStatusName(status));
    exit(1);
}
#define NEED_BLAS(call) need_blas(call, #call)

// Column-major matrix (rows, columns) with leading dimension ld; values in the storage type.
struct Matrix {
    cudaDataType type;
    int rows, columns, ld;
    std::vector<double> values; // (columns, ld)
    void *device;
    double at(int i, int j) const { return values[(size_t)(j * ld + i)]; }
};

static size_t type_bytes(cudaDataType type) { return type == CUDA_R_32F ? 4 : type == CUDA_R_16BF ? 2 : 1; }
static double rounded(double x, cudaDataType type) {
    if (type == CUDA_R_16BF) return __bfloat162float(__float2bfloat16((float)x));
    if (type == CUDA_R_8F_E4M3) return float(__nv_fp8_e4m3((float)x));
    if (type == CUDA_R_8F_E5M2) return float(__nv_fp8_e5m2((float)x));
    return (float)x;
}
static void *upload(const std::vector<double> &values, cudaDataType type) {
    std::vector<char> bytes(values.size() * type_bytes(type));
    for (size_t i = 0; i < values.size(); i++) {
        const float x = (float)values[i];
        if (type == CUDA_R_32F) ((float *)bytes.data())[i] = x;
        if (type == CUDA_R_16BF) ((bf16 *)bytes.data())[i] = __float2bfloat16(x);
        if (type == CUDA_R_8F_E4M3) ((__nv_fp8_e4m3 *)bytes.data())[i] = __nv_fp8_e4m3(x);
        if (type == CUDA_R_8F_E5M2) ((__nv_fp8_e5m2 *)bytes.data())[i] = __nv_fp8_e5m2(x);
    }
    return to_device(bytes);
}
static std::vector<double> download(const void *device, size_t n, cudaDataType type) {
    const std::vector<char> bytes = to_host((const char *)device, n * type_bytes(type));
    std::vector<double> values(n);
    for (size_t i = 0; i < n; i++) {
        if (type == CUDA_R_32F) values[i] = ((const float *)bytes.data())[i];
        if (type == CUDA_R_16BF) values[i] = __bfloat162float(((const bf16 *)bytes.data())[i]);
        if (type == CUDA_R_8F_E4M3) values[i] = float(((const __nv_fp8_e4m3 *)bytes.data())[i]);
    }
    return values;
}
static Matrix matrix(cudaDataType type, int rows, int columns, int ld, uint64_t stream) {
    Matrix m = {type, rows, columns, ld, std::vector<double>((size_t)(ld * columns)), nullptr};
    for (size_t i = 0; i < m.values.size(); i++) m.values[i] = rounded(test_uniform(stream, i), type);
    m.device = upload(m.values, type);
    return m;
}

// A call: what is asked for, and the objects for it.
struct Product {
    cublasLtHandle_t handle;
    cublasLtMatmulDesc_t descriptor;
    cublasLtMatrixLayout_t a, b, c, d;
    cublasLtMatmulPreference_t preference;
    void *workspace;
    size_t workspace_bytes;
};
template <class T> static cublasStatus_t describe(Product *p, cublasLtMatmulDescAttributes_t id, T value) {
    return cublasLtMatmulDescSetAttribute(p->descriptor, id, &value, sizeof value);
}
template <class T> static void prefer(Product *p, cublasLtMatmulPreferenceAttributes_t id, T value) {
    NEED_BLAS(cublasLtMatmulPreferenceSetAttribute(p->preference, id, &value, sizeof value));
}
static cublasLtMatrixLayout_t layout(const Matrix &m) {
    cublasLtMatrixLayout_t l;
    NEED_BLAS(cublasLtMatrixLayoutCreate(&l, m.type, (uint64_t)m.rows, (uint64_t)m.columns, m.ld));
    return l;
}
static Product product_open(const Matrix &a, const Matrix &b, const Matrix &c, const Matrix &d, bool ta, bool tb, cublasComputeType_t compute) {
    Product p = {};
    NEED_BLAS(cublasLtCreate(&p.handle));
    NEED_BLAS(cublasLtMatmulDescCreate(&p.descriptor, compute, CUDA_R_32F));
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)(ta ? CUBLAS_OP_T : CUBLAS_OP_N)));
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_TRANSB, (int32_t)(tb ? CUBLAS_OP_T : CUBLAS_OP_N)));
    p.a = layout(a), p.b = layout(b), p.c = layout(c), p.d = layout(d);
    NEED_BLAS(cublasLtMatmulPreferenceCreate(&p.preference));
    p.workspace_bytes = 1 << 20;
    p.workspace = device_new<char>(p.workspace_bytes);
    prefer(&p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)p.workspace_bytes);
    return p;
}
static void product_close(Product *p) {
    NEED_BLAS(cublasLtMatmulDescDestroy(p->descriptor));
    for (cublasLtMatrixLayout_t l : {p->a, p->b, p->c, p->d}) NEED_BLAS(cublasLtMatrixLayoutDestroy(l));
    NEED_BLAS(cublasLtMatmulPreferenceDestroy(p->preference));
    NEED_BLAS(cublasLtDestroy(p->handle));
    NEED(cudaFree(p->workspace));
}
static int heuristics(Product *p, cublasLtMatmulHeuristicResult_t *results, int wanted, cublasStatus_t *status = nullptr) {
    int found = 0;
    const cublasStatus_t s =
        cublasLtMatmulAlgoGetHeuristic(p->handle, p->descriptor, p->a, p->b, p->c, p->d, p->preference, wanted, results, &found);
    if (status != nullptr) *status = s;
    check((s == CUBLAS_STATUS_SUCCESS) == (found > 0), "status and count of the heuristic agree");
    return found;
}
static cublasStatus_t multiply(Product *p, const void *a, const void *b, const void *c, void *d, float alpha, float beta,
                               const cublasLtMatmulAlgo_t *algo, size_t workspace_bytes) {
    return cublasLtMatmul(p->handle, p->descriptor, &alpha, a, p->a, b, p->b, &beta, c, p->c, d, p->d, algo, p->workspace, workspace_bytes,
                          nullptr);
}

static double gelu_of(double x) { return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))); }
static double gelu_slope(double x) {
    const double h = 1e-5;
    return (gelu_of(x + h) - gelu_of(x - h)) / (2 * h);
}

// What one epilogue must give, in double precision. bias and aux: in or out.
struct Wanted {
    std::vector<double> d, bias, aux; // (n, m), (m or n), (n, m)
};
static Wanted wanted(const Matrix &a, const Matrix &b, const Matrix &c, const std::vector<double> &bias, const Matrix &aux, int m, int n, int k,
                     bool ta, bool tb, uint32_t epilogue, double alpha, double beta) {
    Wanted w = {std::vector<double>((size_t)(m * n)), bias, std::vector<double>((size_t)(m * n))};
    const auto A = [&](int i, int p) { return ta ? a.at(p, i) : a.at(i, p); };
    const auto B = [&](int p, int j) { return tb ? b.at(j, p) : b.at(p, j); };
    const bool gradient = epilogue == CUBLASLT_EPILOGUE_DGELU || epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD;
    if (epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD) w.bias.assign((size_t)m, 0);
    for (int j = 0; j < n; j++) {
        for (int i = 0; i < m; i++) {
            double sum = 0;
            for (int p = 0; p < k; p++) sum += A(i, p) * B(p, j);
            double value = alpha * sum + beta * c.at(i, j);
            if (epilogue == CUBLASLT_EPILOGUE_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_BIAS || epilogue == CUBLASLT_EPILOGUE_GELU_AUX_BIAS)
                value += bias[(size_t)i];
            w.aux[(size_t)(j * m + i)] = value;
            if (epilogue & CUBLASLT_EPILOGUE_GELU) value = gelu_of(value);
            if (gradient) value *= gelu_slope(aux.at(i, j));
            if (epilogue == CUBLASLT_EPILOGUE_DGELU_BGRAD) w.bias[(size_t)i] += value;
            w.d[(size_t)(j * m + i)] = value;
        }
    }
    if (epilogue == CUBLASLT_EPILOGUE_BGRADA || epilogue == CUBLASLT_EPILOGUE_BGRADB) {
        w.bias.assign((size_t)(epilogue == CUBLASLT_EPILOGUE_BGRADA ? m : n), 0);
        for (size_t i = 0; i < w.bias.size(); i++)
            for (int p = 0; p < k; p++) w.bias[i] += epilogue == CUBLASLT_EPILOGUE_BGRADA ? A((int)i, p) : B(p, (int)i);
    }
    return w;
}
// largest |got - want| over 1 + |want|
static double distance(const std::vector<double> &got, size_t got_ld, const std::vector<double> &want, size_t rows) {
    double worst = 0;
    for (size_t i = 0; i < want.size(); i++) {
        const double e = fabs(got[i / rows * got_ld + i % rows] - want[i]) / (1 + fabs(want[i]));
        if (!(e <= worst)) worst = e;
    }
    return worst;
}

// One combination, through all algorithms; returns the worst error and counts them.
static double try_epilogue(cudaDataType in, cudaDataType out, bool ta, bool tb, uint32_t epilogue, int m, int n, int k, int *algorithms) {
    const int pad = m % 8 == 0 ? 8 : 1;
    const Matrix a = matrix(in, ta ? k : m, ta ? m : k, (ta ? k : m) + pad, 1), b = matrix(in, tb ? n : k, tb ? k : n, (tb ? n : k) + pad, 2);
    const Matrix c = matrix(out, m, n, m + pad, 3), d = matrix(out, m, n, m + pad, 4), aux = matrix(out, m, n, (m + 7) / 8 * 8 + 8, 5);
    const bool of_columns = epilogue == CUBLASLT_EPILOGUE_BGRADB;
    const Matrix bias = matrix(out, of_columns ? n : m, 1, of_columns ? n : m, 6);
    const double alpha = 0.5, beta = 1;
    Product p = product_open(a, b, c, d, ta, tb, CUBLAS_COMPUTE_32F);
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue));
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias.device));
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, aux.device));
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)aux.ld));
    const Wanted w = wanted(a, b, c, bias.values, aux, m, n, k, ta, tb, epilogue, alpha, beta);
    cublasLtMatmulHeuristicResult_t results[16];
    const int found = heuristics(&p, results, 16);
    double worst = found > 0 ? 0 : NAN;
    for (int i = 0; i < found; i++, ++*algorithms) {
        NEED(cudaMemset(d.device, 0xff, d.values.size() * type_bytes(out)));
        NEED_BLAS(multiply(&p, a.device, b.device, c.device, d.device, (float)alpha, (float)beta, &results[i].algo, p.workspace_bytes));
        double e = distance(download(d.device, d.values.size(), out), (size_t)d.ld, w.d, (size_t)m);
        if (!(e <= worst)) worst = e;
        const bool writes_aux = (epilogue & 128) && (epilogue & CUBLASLT_EPILOGUE_GELU);
        e = writes_aux ? distance(download(aux.device, aux.values.size(), out), (size_t)aux.ld, w.aux, (size_t)m) : 0;
        if (!(e <= worst)) worst = e;
        e = distance(download(bias.device, bias.values.size(), out), w.bias.size(), w.bias, w.bias.size());
        if (!(e <= worst)) worst = e;
    }
    product_close(&p);
    for (const Matrix *x : {&a, &b, &c, &d, &aux, &bias}) NEED(cudaFree(x->device));
    return worst;
}

static void test_epilogues() {
    static const struct {
        uint32_t epilogue;
        const char *name;
    } epilogues[] = {{CUBLASLT_EPILOGUE_DEFAULT, "none"},      {CUBLASLT_EPILOGUE_BIAS, "BIAS"},
                     {CUBLASLT_EPILOGUE_GELU, "GELU"},         {CUBLASLT_EPILOGUE_GELU_BIAS, "GELU_BIAS"},
                     {CUBLASLT_EPILOGUE_GELU_AUX, "GELU_AUX"}, {CUBLASLT_EPILOGUE_GELU_AUX_BIAS, "GELU_AUX_BIAS"},
                     {CUBLASLT_EPILOGUE_DGELU, "DGELU"},       {CUBLASLT_EPILOGUE_DGELU_BGRAD, "DGELU_BGRAD"},
                     {CUBLASLT_EPILOGUE_BGRADA, "BGRADA"},     {CUBLASLT_EPILOGUE_BGRADB, "BGRADB"}};
    static const struct {
        cudaDataType in, out;
        double bound; // rounding of D
    } types[] = {{CUDA_R_32F, CUDA_R_32F, 1e-5}, {CUDA_R_16BF, CUDA_R_32F, 1e-5}, {CUDA_R_16BF, CUDA_R_16BF, 5e-3}};
    for (const auto &e : epilogues) {
        for (const auto &t : types) {
            int algorithms = 0;
            double worst = 0;
            for (int form = 0; form < 4; form++) {
                for (const int m : {24, 7}) {
                    const double error = try_epilogue(t.in, t.out, form & 1, form & 2, e.epilogue, m, 21, 70, &algorithms);
                    if (!(error <= worst)) worst = error;
                }
            }
            char what[100];
            snprintf(what, sizeof what, "epilogue %s, type %d to %d, %d algorithms", e.name, (int)t.in, (int)t.out, algorithms);
            check_error(worst, t.bound, what);
            check(algorithms >= 4 * 2 * 5, "%d algorithms", algorithms);
        }
    }
}

static void test_blas_rules() {
    const Matrix a = matrix(CUDA_R_16BF, 64, 64, 64, 1), b = matrix(CUDA_R_16BF, 64, 64, 64, 2), d = matrix(CUDA_R_32F, 64, 64, 64, 3);
    Product p = product_open(a, b, d, d, false, false, CUBLAS_COMPUTE_32F);
    cublasLtMatmulHeuristicResult_t r[16];
    cublasStatus_t status;
    const int all = heuristics(&p, r, 16);
    bool inplace = false, repeats = false, needs_workspace = false;
    uint64_t largest = 0;
    int largest_index = 0;
    for (int i = 0; i < all; i++) {
        int32_t scheme = -1;
        size_t written;
        NEED_BLAS(cublasLtMatmulAlgoConfigGetAttribute(&r[i].algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme, &written));
        inplace |= scheme == CUBLASLT_REDUCTION_SCHEME_INPLACE;
        needs_workspace |= r[i].workspaceSize > 0;
        if (r[i].workspaceSize > largest) largest = r[i].workspaceSize, largest_index = i;
        for (int k = 0; k < i; k++) repeats |= memcmp(&r[i].algo, &r[k].algo, sizeof r[i].algo) == 0;
    }
    check(all >= 5 && inplace && needs_workspace && !repeats, "%d different algorithms", all);
    check(heuristics(&p, r, 1) == 1, "one when one is asked for");
    prefer(&p, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    const int without = heuristics(&p, r, 16);
    check(without == all - 1, "without INPLACE: %d of %d", without, all);
    for (int i = 0; i < without; i++)
        if (r[i].workspaceSize == largest) largest_index = i;
    const cublasLtMatmulAlgo_t big = r[largest_index].algo;
    check(multiply(&p, a.device, b.device, d.device, d.device, 1, 0, &big, largest - 1) == CUBLAS_STATUS_INVALID_VALUE, "workspace one byte short");
    check(multiply(&p, a.device, b.device, d.device, d.device, 1, 0, &big, largest) == CUBLAS_STATUS_SUCCESS, "workspace just enough");
    prefer(&p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)0);
    for (int i = heuristics(&p, r, 16); i-- > 0;) check(r[i].workspaceSize == 0, "no workspace allowed");
    const cublasLtMatmulAlgo_t wide = r[0].algo;
    check(multiply(&p, (char *)a.device + 2, b.device, d.device, d.device, 1, 0, &wide, 0) == CUBLAS_STATUS_NOT_SUPPORTED,
          "A less aligned than promised");
    prefer(&p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)2);
    check(heuristics(&p, r, 1) == 1 && multiply(&p, a.device, b.device, d.device, d.device, 1, 0, &r[0].algo, 0) == CUBLAS_STATUS_SUCCESS,
          "A's promise of 2 bytes");
    check(describe(&p, CUBLASLT_MATMUL_DESC_EPILOGUE, (uint8_t)4) == CUBLAS_STATUS_INVALID_VALUE, "an attribute of the wrong size");
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)CUBLASLT_EPILOGUE_BIAS));
    check(multiply(&p, a.device, b.device, d.device, d.device, 1, 0, &wide, 0) == CUBLAS_STATUS_INVALID_VALUE, "bias without a pointer");
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, d.device));
    check(multiply(&p, a.device, b.device, d.device, d.device, 1, 0, &wide, 0) == CUBLAS_STATUS_NOT_SUPPORTED, "an algorithm for another epilogue");
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int32_t)CUDA_R_16BF));
    check(heuristics(&p, r, 1, &status) == 0 && status == CUBLAS_STATUS_INVALID_VALUE, "a bf16 bias for an fp32 D");
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)CUBLASLT_EPILOGUE_GELU_AUX));
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)68));
    check(heuristics(&p, r, 1, &status) == 0 && status == CUBLAS_STATUS_INVALID_VALUE, "aux leading dimension 68");
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, (int64_t)72));
    check(heuristics(&p, r, 1) == 1, "aux leading dimension 72");
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)CUBLASLT_EPILOGUE_RELU));
    check(heuristics(&p, r, 1, &status) == 0 && status == CUBLAS_STATUS_NOT_SUPPORTED, "an epilogue that is not simulated");
    product_close(&p);
    Matrix short_b = b;
    short_b.rows = 56;
    p = product_open(a, short_b, d, d, false, false, CUBLAS_COMPUTE_32F);
    check(heuristics(&p, r, 1, &status) == 0 && status == CUBLAS_STATUS_INVALID_VALUE, "k of A and B differ");
    product_close(&p);
    p = product_open(a, d, d, d, false, false, CUBLAS_COMPUTE_32F);
    check(heuristics(&p, r, 1, &status) == 0 && status == CUBLAS_STATUS_NOT_SUPPORTED, "types of A and B differ");
    product_close(&p);
    for (const Matrix *x : {&a, &b, &d}) NEED(cudaFree(x->device));
}

// fp8: transposed A by plain B only, scales of the inputs and of D, amax.
static void test_fp8() {
    const int n = 32;
    const Matrix a = matrix(CUDA_R_8F_E4M3, n, n, n, 1), b = matrix(CUDA_R_8F_E5M2, n, n, n, 2), c = matrix(CUDA_R_16BF, n, n, n, 3);
    const Matrix d = matrix(CUDA_R_8F_E4M3, n, n, n, 4), b2 = matrix(CUDA_R_8F_E5M2, n, n, n, 5);
    cublasLtMatmulHeuristicResult_t r[8];
    cublasStatus_t status;
    float *scales = to_device(std::vector<float>{0.25f, 4.f, 2.f, NAN});
    Product p = product_open(a, b, c, d, true, false, CUBLAS_COMPUTE_32F);
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, scales));
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, scales + 1));
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, scales + 2));
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, scales + 3));
    check(heuristics(&p, r, 8) >= 1, "fp8 has an algorithm");
    NEED_BLAS(multiply(&p, a.device, b.device, c.device, d.device, 1, 0, &r[0].algo, p.workspace_bytes));
    const Wanted w = wanted(a, b, c, {}, d, n, n, n, true, false, CUBLASLT_EPILOGUE_DEFAULT, 1, 0);
    const std::vector<double> got = download(d.device, d.values.size(), CUDA_R_8F_E4M3);
    double worst = 0, largest = 0;
    for (size_t i = 0; i < got.size(); i++) {
        const double e = fabs(got[i] - 2 * w.d[i]) / (0.05 + fabs(2 * w.d[i]));
        if (!(e <= worst)) worst = e;
        largest = fmax(largest, fabs(w.d[i]));
    }
    check_error(worst, 0.0625, "fp8 product with scales");
    check_error(fabs(to_host(scales, 4)[3] - largest) / largest, 1e-5, "amax of an fp8 D");
    NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)CUBLAS_OP_N));
    check(heuristics(&p, r, 8, &status) == 0 && status == CUBLAS_STATUS_NOT_SUPPORTED, "fp8: plain A");
    product_close(&p);
    p = product_open(b2, b, c, c, true, false, CUBLAS_COMPUTE_32F);
    check(heuristics(&p, r, 8, &status) == 0 && status == CUBLAS_STATUS_NOT_SUPPORTED, "fp8: E5M2 by E5M2");
    product_close(&p);
    for (const Matrix *x : {&a, &b, &c, &d, &b2}) NEED(cudaFree(x->device));
    NEED(cudaFree(scales));
}

// Batches, scalars on the device, TF32, sums in another order by the INPLACE scheme, a workspace that two streams share.
static void test_blas_forms() {
    const int n = 16, batch = 3;
    const Matrix a = matrix(CUDA_R_32F, n, n * batch, n, 1), b = matrix(CUDA_R_32F, n, n * batch, n, 2), d = matrix(CUDA_R_32F, n, n * batch, n, 3);
    Matrix one = a;
    one.columns = n;
    for (const bool tf32 : {false, true}) {
        Product p = product_open(one, one, one, one, false, false, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F);
        for (cublasLtMatrixLayout_t l : {p.a, p.b, p.c, p.d}) {
            const int32_t count = batch;
            const int64_t stride = n * n;
            NEED_BLAS(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
            NEED_BLAS(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
        }
        NEED_BLAS(describe(&p, CUBLASLT_MATMUL_DESC_POINTER_MODE, (int32_t)CUBLASLT_POINTER_MODE_DEVICE));
        float *scalars = to_device(std::vector<float>{2, 0});
        NEED_BLAS(cublasLtMatmul(p.handle, p.descriptor, scalars, a.device, p.a, b.device, p.b, scalars + 1, d.device, p.c, d.device, p.d, nullptr,
                                 nullptr, 0, nullptr));
        const std::vector<double> got = download(d.device, d.values.size(), CUDA_R_32F);
        double worst = 0;
        for (int z = 0; z < batch; z++) {
            for (int j = 0; j < n; j++) {
                for (int i = 0; i < n; i++) {
                    double sum = 0;
                    for (int k = 0; k < n; k++) sum += 2 * a.at(i, z * n + k) * b.at(k, z * n + j);
                    const double e = fabs(got[(size_t)((z * n + j) * n + i)] - sum) / (1 + fabs(sum));
                    if (!(e <= worst)) worst = e;
                }
            }
        }
        check_error(worst, tf32 ? 2e-3 : 1e-5, tf32 ? "batches, TF32" : "batches, scalars on the device");
        if (tf32) check(worst > 1e-5, "TF32 rounds its inputs: %g", worst);
        product_close(&p);
        NEED(cudaFree(scalars));
    }
    for (const Matrix *x : {&a, &b, &d}) NEED(cudaFree(x->device));
}

static void test_cublaslt() {
    test_epilogues();
    test_blas_rules();
    test_fp8();
    test_blas_forms();
}

#endif
