// bench_matmul.c: the matrix products of one training step (qkv, attention projection, both MLP products of every layer, and
// the head; forward, input gradient, weight gradient) at the best rate of the library: the time that a trainer would need
// if it did nothing else. Calls oneDNN by itself (matmul, inner_product and sgemm; row-major and the layouts that the
// library prefers) and shows llmc/cpu/blas.h and OpenBLAS beside it. Does not train, and checks no values.
//
//   build/bench_matmul [fp32|bf16] [a|b|c|C] [--json]      default: everything
//   a: GPT-2 124M, 4 x 64 tokens   b: the same, 4 x 256   c: 6 layers of 384, 8 x 256, V 50257   C: the same, V 256
//
// library: the fastest of all, operands already in the layout it likes (reorders are not counted, so nobody can be faster
// by much). row-major: the fastest that takes and gives row-major matrices, as a trainer has them. Medians of interleaved
// runs; a variant that is 25 % slower than the best in its first run gets no more.
#include "llmc/base.h"     // base_alloc_raw, clock_ms
#include "llmc/cpu/blas.h" // blas_matmul
#include <dlfcn.h>         // dlopen
#include <omp.h>           // omp_get_max_threads

enum { VARIANTS = 7, RUNS = 64, FORWARD = 0, INPUT = 1, WEIGHT = 2, FORMS = 3, PRODUCTS = 5 };
static const char *const form_names[FORMS] = {"forward", "input", "weight"};
static const double budget_ms = 120; // per variant; at least three runs

typedef struct {
    char key;
    const char *name;
    int64_t N, C, V, layers;
} Config;

static const Config configs[] = {{'a', "GPT-2 124M, B=4 T=64", 256, 768, 50257, 12},
                                 {'b', "GPT-2 124M, B=4 T=256", 1024, 768, 50257, 12},
                                 {'c', "6 layers C=384 V=50257, B=8 T=256", 2048, 384, 50257, 6},
                                 {'C', "6 layers C=384 V=256, B=8 T=256", 2048, 384, 256, 6}};

// One product out (N, OC) = in (N, IC) x weight (OC, IC)^T, its two gradients, and their operands' types.
typedef struct {
    const char *name;
    int64_t N, IC, OC, count;
    Dtype dtype, out_dtype; // of the operands; of the result of the form at hand
    int form;
    void *x, *w, *y; // (N, IC), (OC, IC), (N, OC): large enough for padded layouts and for fp32
} Product;

typedef struct {
    char name[64];
    bool row_major, ours;
    void (*run)(const void *closure);
    const void *closure;
    double times_ms[RUNS];
    int runs;
} Variant;

static int compare_doubles(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median_ms(Variant *variant) {
    qsort(variant->times_ms, (size_t)variant->runs, sizeof(double), compare_doubles);
    return variant->times_ms[variant->runs / 2];
}

static void variant_run(Variant *variant) {
    const double start = clock_ms();
    variant->run(variant->closure);
    if (variant->runs < RUNS) variant->times_ms[variant->runs++] = clock_ms() - start;
}

// Warm-up and first run of each, then rounds over the ones that are not far behind.
static void measure(Variant *variants, int count) {
    double best = 1e30;
    for (int i = 0; i < count; i++) {
        variants[i].run(variants[i].closure);
        variant_run(&variants[i]);
        best = fmin(best, variants[i].times_ms[0]);
    }
    const double first = best;
    for (int round = 0; round < RUNS - 1 && (round < 3 || round * first < budget_ms); round++) {
        for (int i = 0; i < count; i++) {
            if (variants[i].ours || variants[i].times_ms[0] < 1.25 * best) variant_run(&variants[i]);
        }
    }
}

// ----------------------------------------------------------------------------
// blas.h and OpenBLAS

typedef struct {
    BlasState *state;
    Product product;
} Ours;

static void run_ours(const void *closure) {
    const Ours *ours = closure;
    const Product *p = &ours->product;
    const Buffer x = buffer_of(p->x, p->form == INPUT ? p->out_dtype : p->dtype), w = buffer_of(p->w, p->form == WEIGHT ? p->out_dtype : p->dtype);
    const Buffer y = buffer_of(p->y, p->form == FORWARD ? p->out_dtype : p->dtype), none = {0};
    if (p->form == FORWARD) blas_matmul(ours->state, BLAS_NT, y, x, w, none, false, p->N, p->OC, p->IC);
    if (p->form == INPUT) blas_matmul(ours->state, BLAS_NN, x, y, w, none, false, p->N, p->IC, p->OC);
    if (p->form == WEIGHT) blas_matmul(ours->state, BLAS_TN, w, y, x, none, false, p->OC, p->IC, p->N);
}

// cblas.h's enumerations, which every CBLAS shares: row-major 101, plain 111, transposed 112.
typedef void (*Sgemm)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda, const float *b, int ldb,
                      float beta, float *c, int ldc);
typedef struct {
    Sgemm sgemm;
    Product product;
} OpenBlas;

static void run_openblas(const void *closure) {
    const OpenBlas *open = closure;
    const Product *p = &open->product;
    const int N = (int)p->N, IC = (int)p->IC, OC = (int)p->OC;
    if (p->form == FORWARD) open->sgemm(101, 111, 112, N, OC, IC, 1, p->x, IC, p->w, IC, 0, p->y, OC);
    if (p->form == INPUT) open->sgemm(101, 111, 111, N, IC, OC, 1, p->y, OC, p->w, IC, 0, p->x, IC);
    if (p->form == WEIGHT) open->sgemm(101, 112, 111, OC, IC, N, 1, p->y, OC, p->x, IC, 0, p->w, IC);
}

// ----------------------------------------------------------------------------
// oneDNN

#ifdef USE_DNNL
typedef struct {
    dnnl_stream_t stream;
    dnnl_primitive_t primitive;
    dnnl_exec_arg_t arguments[4]; // the last is the scratchpad
    void *scratch;
} Direct;

static void run_direct(const void *closure) {
    const Direct *direct = closure;
    onednn_check(dnnl_primitive_execute(direct->primitive, direct->stream, 4, direct->arguments), "execute");
}

static void run_sgemm(const void *closure) {
    const Product *p = closure;
    if (p->form == FORWARD) onednn_check(dnnl_sgemm('N', 'T', p->N, p->OC, p->IC, 1, p->x, p->IC, p->w, p->IC, 0, p->y, p->OC), "sgemm");
    if (p->form == INPUT) onednn_check(dnnl_sgemm('N', 'N', p->N, p->IC, p->OC, 1, p->y, p->OC, p->w, p->IC, 0, p->x, p->IC), "sgemm");
    if (p->form == WEIGHT) onednn_check(dnnl_sgemm('T', 'N', p->OC, p->IC, p->N, 1, p->y, p->OC, p->x, p->IC, 0, p->w, p->IC), "sgemm");
}

static void direct_destroy(Direct *direct) {
    if (direct->primitive == NULL) return;
    for (int i = 0; i < 4; i++) dnnl_memory_destroy(direct->arguments[i].memory);
    dnnl_primitive_destroy(direct->primitive);
    free(direct->scratch);
}

// Takes the descriptor over. what[], arg[], data[]: the three operands' queries, execution arguments and memory.
static bool direct_create(Direct *direct, dnnl_engine_t engine, dnnl_stream_t stream, dnnl_primitive_desc_t desc, const dnnl_query_t what[3],
                          const int arg[3], void *const data[3], char name[64], const char *kind) {
    *direct = (Direct){.stream = stream};
    if (desc == NULL || strstr(onednn_implementation(desc), "ref") != NULL) {
        if (desc != NULL) dnnl_primitive_desc_destroy(desc);
        return false;
    }
    snprintf(name, 64, "%s %s", kind, onednn_implementation(desc));
    onednn_check(dnnl_primitive_create(&direct->primitive, desc), "primitive");
    for (int i = 0; i < 3; i++) {
        direct->arguments[i] = (dnnl_exec_arg_t){arg[i], onednn_memory(engine, dnnl_primitive_desc_query_md(desc, what[i], 0), data[i])};
    }
    OnednnDescPointer scratch = dnnl_primitive_desc_query_md(desc, dnnl_query_scratchpad_md, 0);
    direct->scratch = base_alloc(dnnl_memory_desc_get_size(scratch));
    direct->arguments[3] = (dnnl_exec_arg_t){DNNL_ARG_SCRATCHPAD, onednn_memory(engine, scratch, direct->scratch)};
    dnnl_primitive_desc_destroy(desc);
    return true;
}

static bool direct_matmul(Direct *direct, dnnl_engine_t engine, dnnl_stream_t stream, const Product *p, bool any, const char *wanted,
                          char name[64]) {
    const int64_t M = p->form == WEIGHT ? p->OC : p->N, N = p->form == FORWARD ? p->OC : p->IC;
    const int64_t K = p->form == FORWARD ? p->IC : p->form == INPUT ? p->OC : p->N;
    OnednnDesc a = onednn_desc(M, K, p->dtype, any ? 0 : p->form == WEIGHT ? M : K, p->form == WEIGHT);
    OnednnDesc b = onednn_desc(K, N, p->dtype, any ? 0 : p->form == FORWARD ? K : N, p->form == FORWARD);
    OnednnDesc c = onednn_desc(M, N, p->out_dtype, N, false);
    const dnnl_query_t what[3] = {dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md};
    const int arg[3] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST};
    void *const data[3] = {p->form == FORWARD ? p->x : p->y, p->form == WEIGHT ? p->x : p->w,
                           p->form == FORWARD ? p->y
                           : p->form == INPUT ? p->x
                                              : p->w};
    dnnl_primitive_desc_t desc = onednn_matmul(engine, &a, &b, NULL, &c, false, wanted);
    onednn_desc_destroy(&a), onednn_desc_destroy(&b), onednn_desc_destroy(&c);
    return direct_create(direct, engine, stream, desc, what, arg, data, name, any ? "matmul, any layout" : "matmul");
}

static bool direct_inner_product(Direct *direct, dnnl_engine_t engine, dnnl_stream_t stream, const Product *p, bool any, char name[64]) {
    const Dtype types[3] = {p->form == INPUT ? p->out_dtype : p->dtype, p->form == WEIGHT ? p->out_dtype : p->dtype,
                            p->form == FORWARD ? p->out_dtype : p->dtype};
    // [0] the product itself, [1] the forward product that a gradient wants as a hint
    OnednnDesc x[2], w[2], y[2];
    for (int i = 0; i < 2; i++) {
        x[i] = onednn_desc(p->N, p->IC, i == 0 ? types[0] : p->dtype, any ? 0 : p->IC, false);
        w[i] = onednn_desc(p->OC, p->IC, i == 0 ? types[1] : p->dtype, any ? 0 : p->IC, false);
        y[i] = onednn_desc(p->N, p->OC, i == 0 ? types[2] : p->dtype, any ? 0 : p->OC, false);
    }
    dnnl_primitive_attr_t attr;
    onednn_check(dnnl_primitive_attr_create(&attr), "attributes");
    onednn_check(dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user), "scratchpad mode");
    dnnl_primitive_desc_t desc = NULL, hint = NULL;
    dnnl_status_t status = dnnl_success;
#if DNNL_VERSION_MAJOR >= 3
    if (p->form != FORWARD) {
        onednn_check(dnnl_inner_product_forward_primitive_desc_create(&hint, engine, dnnl_forward_training, x[1], w[1], NULL, y[1], attr), "hint");
    }
    if (p->form == FORWARD) {
        status = dnnl_inner_product_forward_primitive_desc_create(&desc, engine, dnnl_forward_training, x[0], w[0], NULL, y[0], attr);
    } else if (p->form == INPUT) {
        status = dnnl_inner_product_backward_data_primitive_desc_create(&desc, engine, x[0], w[0], y[0], hint, attr);
    } else {
        status = dnnl_inner_product_backward_weights_primitive_desc_create(&desc, engine, x[0], w[0], NULL, y[0], hint, attr);
    }
#else
    dnnl_inner_product_desc_t operation, forward;
    if (p->form != FORWARD) {
        onednn_check(dnnl_inner_product_forward_desc_init(&forward, dnnl_forward_training, &x[1], &w[1], NULL, &y[1]), "hint");
        onednn_check(dnnl_primitive_desc_create(&hint, &forward, attr, engine, NULL), "hint");
    }
    if (p->form == FORWARD) {
        status = dnnl_inner_product_forward_desc_init(&operation, dnnl_forward_training, &x[0], &w[0], NULL, &y[0]);
    } else if (p->form == INPUT) {
        status = dnnl_inner_product_backward_data_desc_init(&operation, &x[0], &w[0], &y[0]);
    } else {
        status = dnnl_inner_product_backward_weights_desc_init(&operation, &x[0], &w[0], NULL, &y[0]);
    }
    if (status == dnnl_success) status = dnnl_primitive_desc_create(&desc, &operation, attr, engine, hint);
#endif
    if (status != dnnl_success) desc = NULL;
    if (hint != NULL) dnnl_primitive_desc_destroy(hint);
    dnnl_primitive_attr_destroy(attr);
    for (int i = 0; i < 2; i++) onednn_desc_destroy(&x[i]), onednn_desc_destroy(&w[i]), onednn_desc_destroy(&y[i]);
    const dnnl_query_t what[3] = {p->form == INPUT ? dnnl_query_diff_src_md : dnnl_query_src_md,
                                  p->form == WEIGHT ? dnnl_query_diff_weights_md : dnnl_query_weights_md,
                                  p->form == FORWARD ? dnnl_query_dst_md : dnnl_query_diff_dst_md};
    const int arg[3] = {p->form == INPUT ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC, p->form == WEIGHT ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS,
                        p->form == FORWARD ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST};
    void *const data[3] = {p->x, p->w, p->y};
    return direct_create(direct, engine, stream, desc, what, arg, data, name, any ? "inner_product, any layout" : "inner_product");
}
#endif

// ----------------------------------------------------------------------------

// Small positive numbers in either type: no denormals, no overflow in a sum.
static void fill(void *data, size_t bytes) {
    uint16_t *halves = data;
    const int64_t count = (int64_t)(bytes / 2);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i++) halves[i] = (uint16_t)(0x3c00 + i * 7 % 97);
}

typedef struct {
    double library_ms, row_major_ms, ours_ms; // 0: not measured
    char library[64], row_major[64];
} Result;

static Result measure_product(BlasState *blas, const Product *p) {
    Result result = {0};
    Variant variants[VARIANTS] = {0};
    int count = 0;
    const Ours ours = {blas, *p};
    variants[count++] = (Variant){.name = "blas.h", .ours = true, .run = run_ours, .closure = &ours};
#ifdef USE_DNNL
    Direct direct[5] = {0};
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    onednn_check(dnnl_engine_create(&engine, dnnl_cpu, 0), "engine");
    onednn_check(dnnl_stream_create(&stream, engine, dnnl_stream_default_flags), "stream");
    for (int i = 0; i < 5; i++) {
        Variant *v = &variants[count];
        const bool any = i == 2 || i == 4;
        *v = (Variant){.row_major = !any, .run = run_direct, .closure = &direct[i]};
        const bool made = i < 3 ? direct_matmul(&direct[i], engine, stream, p, any, i == 1 ? "gemm:jit" : NULL, v->name)
                                : direct_inner_product(&direct[i], engine, stream, p, any, v->name);
        count += made;
    }
    if (p->dtype == DTYPE_F32) variants[count++] = (Variant){.name = "sgemm", .row_major = true, .run = run_sgemm, .closure = p};
#endif
    measure(variants, count);
    for (int i = 0; i < count; i++) {
        const double ms = median_ms(&variants[i]);
        if (variants[i].ours) {
            result.ours_ms = ms;
            continue;
        }
        if (result.library_ms == 0 || ms < result.library_ms) {
            result.library_ms = ms;
            memcpy(result.library, variants[i].name, sizeof result.library);
        }
        if (variants[i].row_major && (result.row_major_ms == 0 || ms < result.row_major_ms)) {
            result.row_major_ms = ms;
            memcpy(result.row_major, variants[i].name, sizeof result.row_major);
        }
    }
#ifdef USE_DNNL
    for (int i = 0; i < 5; i++) direct_destroy(&direct[i]);
    dnnl_stream_destroy(stream);
    dnnl_engine_destroy(engine);
#endif
    return result;
}

static double openblas_ms(Sgemm sgemm, const Product *p) {
    const OpenBlas open = {sgemm, *p};
    Variant variant = {.run = run_openblas, .closure = &open};
    measure(&variant, 1);
    return median_ms(&variant);
}

static void bench(const Config *config, Dtype dtype, bool json, BlasState *blas, Sgemm sgemm) {
    const int64_t N = config->N, C = config->C, V = config->V, L = config->layers;
    const char *precision = dtype == DTYPE_F32 ? "fp32" : "bf16";
    const Product shapes[PRODUCTS] = {{"qkv", N, C, 3 * C, L, dtype, dtype, 0, NULL, NULL, NULL},
                                      {"attn_o", N, C, C, L, dtype, dtype, 0, NULL, NULL, NULL},
                                      {"mlp_fc", N, C, 4 * C, L, dtype, dtype, 0, NULL, NULL, NULL},
                                      {"mlp_proj", N, 4 * C, C, L, dtype, dtype, 0, NULL, NULL, NULL},
                                      {"head", N, C, V, 1, dtype, dtype, 0, NULL, NULL, NULL}};
    // The library's layouts may pad each dimension to a block of 64.
    const size_t x_bytes = (size_t)(N + 64) * (size_t)(4 * C + 64) * 4, w_bytes = (size_t)(C + 64) * (size_t)((V > 4 * C ? V : 4 * C) + 64) * 4;
    const size_t y_bytes = (size_t)(N + 64) * (size_t)((V > 4 * C ? V : 4 * C) + 64) * 4;
    void *x = base_alloc_raw(x_bytes), *w = base_alloc_raw(w_bytes), *y = base_alloc_raw(y_bytes);
    Result results[PRODUCTS][FORMS];
    double open_ms[PRODUCTS][FORMS] = {{0}};
    double flops = 0, library = 0, row_major = 0, ours = 0, open = 0;
    if (!json) {
        printf("\n%s, %s (%c)\n%-9s %-8s %16s | %9s %6s | %9s %6s | %9s %6s | %9s %6s\n", config->name, precision, config->key, "product", "form",
               "N x IC x OC", "library", "GF/s", "row-major", "GF/s", "blas.h", "GF/s", "OpenBLAS", "GF/s");
    }
    // OpenBLAS comes after the others: its threads spin for a while after each call.
    for (int pass = 0; pass < (sgemm != NULL && dtype == DTYPE_F32 ? 2 : 1); pass++) {
        for (int i = 0; i < PRODUCTS; i++) {
            for (int form = 0; form < FORMS; form++) {
                Product p = shapes[i];
                p.form = form, p.x = x, p.w = w, p.y = y;
                p.out_dtype = form == WEIGHT || (i == PRODUCTS - 1 && form == FORWARD) ? DTYPE_F32 : dtype; // gradients and logits
                fill(x, x_bytes), fill(w, w_bytes), fill(y, y_bytes);
                if (pass == 0) {
                    results[i][form] = measure_product(blas, &p);
                } else {
                    open_ms[i][form] = openblas_ms(sgemm, &p);
                }
            }
        }
    }
    for (int i = 0; i < PRODUCTS; i++) {
        for (int form = 0; form < FORMS; form++) {
            const Product *p = &shapes[i];
            const Result *r = &results[i][form];
            const double flop = 2.0 * (double)p->N * (double)p->IC * (double)p->OC, o = open_ms[i][form], n = (double)p->count;
            flops += n * flop, library += n * r->library_ms, row_major += n * r->row_major_ms, ours += n * r->ours_ms, open += n * o;
            if (json) {
                printf(
                    "{\"config\": \"%c\", \"precision\": \"%s\", \"product\": \"%s\", \"form\": \"%s\", \"N\": %lld, \"IC\": %lld, \"OC\": %lld, "
                    "\"count\": %lld, \"library_ms\": %.4f, \"library\": \"%s\", \"row_major_ms\": %.4f, \"row_major\": \"%s\", \"blas_ms\": "
                    "%.4f, \"openblas_ms\": %.4f}\n",
                    config->key, precision, p->name, form_names[form], (long long)p->N, (long long)p->IC, (long long)p->OC, (long long)p->count,
                    r->library_ms, r->library, r->row_major_ms, r->row_major, r->ours_ms, o);
            } else {
                char size[40];
                snprintf(size, sizeof size, "%lldx%lldx%lld", (long long)p->N, (long long)p->IC, (long long)p->OC);
                const double rates[4] = {r->library_ms > 0 ? flop * 1e-6 / r->library_ms : 0,
                                         r->row_major_ms > 0 ? flop * 1e-6 / r->row_major_ms : 0, flop * 1e-6 / r->ours_ms,
                                         o > 0 ? flop * 1e-6 / o : 0};
                printf("%-9s %-8s %16s | %9.3f %6.1f | %9.3f %6.1f | %9.3f %6.1f | %9.3f %6.1f  %s; %s\n", p->name, form_names[form], size,
                       r->library_ms, rates[0], r->row_major_ms, rates[1], r->ours_ms, rates[2], o, rates[3], r->library, r->row_major);
            }
        }
    }
    if (json) {
        printf("{\"config\": \"%c\", \"precision\": \"%s\", \"step\": true, \"threads\": %d, \"gflop\": %.3f, \"library_ms\": %.3f, "
               "\"row_major_ms\": %.3f, \"blas_ms\": %.3f, \"openblas_ms\": %.3f}\n",
               config->key, precision, omp_get_max_threads(), flops * 1e-9, library, row_major, ours, open);
    } else {
        printf("step: %.1f GFLOP; library %.1f ms, row-major %.1f ms, blas.h %.1f ms (%.3f of library, %.3f of row-major), OpenBLAS %.1f ms\n",
               flops * 1e-9, library, row_major, ours, library > 0 ? ours / library : 0, row_major > 0 ? ours / row_major : 0, open);
    }
    fflush(stdout);
    free(x), free(w), free(y);
}

int main(int argc, char **argv) {
    bool json = false, precisions[2] = {false, false};
    char wanted = 0;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) {
            json = true;
        } else if (strcmp(argv[i], "fp32") == 0) {
            precisions[0] = true;
        } else if (strcmp(argv[i], "bf16") == 0) {
            precisions[1] = true;
        } else if (strlen(argv[i]) == 1 && strchr("abcC", argv[i][0]) != NULL) {
            wanted = argv[i][0];
        } else {
            die(CODE_USAGE, "argument %s: wanted fp32, bf16, a, b, c, C or --json", argv[i]);
        }
    }
    if (!precisions[0] && !precisions[1]) precisions[0] = precisions[1] = true;
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    Sgemm sgemm = library != NULL ? (Sgemm)dlsym(library, "cblas_sgemm") : NULL;
    if (!json) {
#ifdef USE_DNNL
        const dnnl_version_t *version = dnnl_version();
        printf("oneDNN %d.%d.%d, %d threads; times in ms, medians\n", version->major, version->minor, version->patch, omp_get_max_threads());
#else
        printf("built without oneDNN (BLAS=%s): no library columns; %d threads; times in ms, medians\n", BUILD_BLAS, omp_get_max_threads());
#endif
        if (sgemm == NULL) printf("libopenblas.so.0 is not here: no OpenBLAS column\n");
    }
    BlasState blas = blas_create();
    for (int precision = 0; precision < 2; precision++) {
        for (size_t i = 0; precisions[precision] && i < sizeof configs / sizeof configs[0]; i++) {
            if (wanted == 0 || wanted == configs[i].key) bench(&configs[i], precision == 0 ? DTYPE_F32 : DTYPE_BF16, json, &blas, sgemm);
        }
    }
    blas_destroy(&blas);
    if (library != NULL) dlclose(library);
    return 0;
}
