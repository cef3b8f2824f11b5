// onednn.h: matrix products through oneDNN's C API, versions 2 and 3: descriptors, choice of implementation, and a small
// table of ready primitives. Knows row-major and transposed operands only; nothing is reordered or kept in a blocked
// layout, because weights change every step. Included by blas.h, and by the benchmark for the differences of the versions.
#ifndef LLMC_CPU_ONEDNN_H
#define LLMC_CPU_ONEDNN_H

#include "llmc/base.h"      // die, base_alloc
#include "llmc/precision.h" // Dtype
#include <dnnl.h>           // dnnl_primitive_execute, DNNL_VERSION_MAJOR

static inline void onednn_check(dnnl_status_t status, const char *what) {
    if (status != dnnl_success) die(1, "oneDNN: %s failed with status %d", what, (int)status);
}

// ----------------------------------------------------------------------------
// Descriptors: a struct that is passed by address in version 2, a handle in version 3.

typedef dnnl_memory_desc_t OnednnDesc;
#if DNNL_VERSION_MAJOR >= 3
typedef const_dnnl_memory_desc_t OnednnDescPointer;
static inline OnednnDescPointer onednn_pointer(const OnednnDesc *desc) { return *desc; }
static inline void onednn_desc_destroy(OnednnDesc *desc) { dnnl_memory_desc_destroy(*desc); }
#else
typedef const dnnl_memory_desc_t *OnednnDescPointer;
static inline OnednnDescPointer onednn_pointer(const OnednnDesc *desc) { return desc; }
static inline void onednn_desc_destroy(OnednnDesc *desc) { (void)desc; }
#endif

static inline dnnl_data_type_t onednn_dtype(Dtype dtype) { return dtype == DTYPE_BF16 ? dnnl_bf16 : dnnl_f32; }

// A matrix (rows, columns) with a stride of one in one direction and `leading` in the other; leading 0 = any layout.
static inline OnednnDesc onednn_desc(int64_t rows, int64_t columns, Dtype dtype, int64_t leading, bool transposed) {
    const dnnl_dims_t dims = {rows, columns}, strides = {transposed ? 1 : leading, transposed ? leading : 1};
    OnednnDesc desc;
#if DNNL_VERSION_MAJOR >= 3
    onednn_check(leading > 0 ? dnnl_memory_desc_create_with_strides(&desc, 2, dims, onednn_dtype(dtype), strides)
                             : dnnl_memory_desc_create_with_tag(&desc, 2, dims, onednn_dtype(dtype), dnnl_format_tag_any),
                 "memory descriptor");
#else
    onednn_check(leading > 0 ? dnnl_memory_desc_init_by_strides(&desc, 2, dims, onednn_dtype(dtype), strides)
                             : dnnl_memory_desc_init_by_tag(&desc, 2, dims, onednn_dtype(dtype), dnnl_format_tag_any),
                 "memory descriptor");
#endif
    return desc;
}

static inline const char *onednn_implementation(const_dnnl_primitive_desc_t desc) {
    const char *name = "";
    onednn_check(dnnl_primitive_desc_query(desc, dnnl_query_impl_info_str, 0, (void *)&name), "implementation name");
    return name;
}

// The matmul c = a x b (+ bias) (+ c) whose implementation's name contains `wanted`, or the library's first choice when
// wanted is NULL; NULL when there is none. The caller gives the scratchpad, so that execution never allocates.
static inline dnnl_primitive_desc_t onednn_matmul(dnnl_engine_t engine, const OnednnDesc *a, const OnednnDesc *b, const OnednnDesc *bias,
                                                  const OnednnDesc *c, bool accumulate, const char *wanted) {
    dnnl_primitive_attr_t attr;
    onednn_check(dnnl_primitive_attr_create(&attr), "attributes");
    onednn_check(dnnl_primitive_attr_set_scratchpad_mode(attr, dnnl_scratchpad_mode_user), "scratchpad mode");
    dnnl_post_ops_t post_ops;
    onednn_check(dnnl_post_ops_create(&post_ops), "post-ops");
#if DNNL_VERSION_MAJOR >= 3
    if (accumulate) onednn_check(dnnl_post_ops_append_sum(post_ops, 1.0f, 0, dnnl_data_type_undef), "sum");
#else
    if (accumulate) onednn_check(dnnl_post_ops_append_sum(post_ops, 1.0f), "sum");
#endif
    onednn_check(dnnl_primitive_attr_set_post_ops(attr, post_ops), "set post-ops");

    dnnl_primitive_desc_t found = NULL;
    OnednnDescPointer bias_pointer = bias != NULL ? onednn_pointer(bias) : NULL;
#if DNNL_VERSION_MAJOR >= 3
    dnnl_status_t status =
        dnnl_matmul_primitive_desc_create(&found, engine, onednn_pointer(a), onednn_pointer(b), bias_pointer, onednn_pointer(c), attr);
    if (status != dnnl_success) found = NULL;
    while (found != NULL && wanted != NULL && strstr(onednn_implementation(found), wanted) == NULL) {
        if (dnnl_primitive_desc_next_impl(found) != dnnl_success) {
            dnnl_primitive_desc_destroy(found);
            found = NULL;
        }
    }
#else
    dnnl_matmul_desc_t operation;
    dnnl_primitive_desc_iterator_t iterator;
    if (dnnl_matmul_desc_init(&operation, onednn_pointer(a), onednn_pointer(b), bias_pointer, onednn_pointer(c)) == dnnl_success &&
        dnnl_primitive_desc_iterator_create(&iterator, &operation, attr, engine, NULL) == dnnl_success) {
        do {
            found = dnnl_primitive_desc_iterator_fetch(iterator);
            if (found == NULL || wanted == NULL || strstr(onednn_implementation(found), wanted) != NULL) break;
            dnnl_primitive_desc_destroy(found);
            found = NULL;
        } while (dnnl_primitive_desc_iterator_next(iterator) == dnnl_success);
        dnnl_primitive_desc_iterator_destroy(iterator);
    }
#endif
    dnnl_post_ops_destroy(post_ops);
    dnnl_primitive_attr_destroy(attr);
    return found;
}

// ----------------------------------------------------------------------------
// Ready products. A run uses a handful of shapes; when more come than the table holds (ragged packing, sampling), the
// least recently used one makes room.

typedef struct {
    bool a_transposed, b_transposed, accumulate, has_bias;
    Dtype a, b, c, bias;
    int64_t M, N, K;
    int64_t a_row, b_row, c_row; // elements from row to row as they lie in memory
} OnednnKey;

typedef struct {
    OnednnKey key;
    uint64_t used;              // clock of the last use; 0 = free
    dnnl_primitive_t primitive; // NULL: the library has no fast implementation for this key
    dnnl_memory_t a, b, c, bias, scratch;
    size_t scratch_bytes;
} OnednnProduct;

enum { ONEDNN_PRODUCTS = 64 };

typedef struct {
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    OnednnProduct *products; // (ONEDNN_PRODUCTS)
    uint64_t clock;
    void *scratch; // the largest any product has asked for
    size_t scratch_bytes;
} OnednnState;

static inline OnednnState onednn_create(void) {
    OnednnState state = {.products = base_new(ONEDNN_PRODUCTS, sizeof *state.products)};
    onednn_check(dnnl_engine_create(&state.engine, dnnl_cpu, 0), "engine");
    onednn_check(dnnl_stream_create(&state.stream, state.engine, dnnl_stream_default_flags), "stream");
    return state;
}

static inline void onednn_product_destroy_(OnednnProduct *product) {
    if (product->primitive != NULL) {
        dnnl_memory_t memories[] = {product->a, product->b, product->c, product->bias, product->scratch};
        for (int i = 0; i < 5; i++) {
            if (memories[i] != NULL) dnnl_memory_destroy(memories[i]);
        }
        dnnl_primitive_destroy(product->primitive);
    }
    *product = (OnednnProduct){0};
}

static inline void onednn_destroy(OnednnState *state) {
    for (int i = 0; i < ONEDNN_PRODUCTS; i++) onednn_product_destroy_(&state->products[i]);
    dnnl_stream_destroy(state->stream);
    dnnl_engine_destroy(state->engine);
    free(state->products);
    free(state->scratch);
    *state = (OnednnState){0};
}

static inline dnnl_memory_t onednn_memory(dnnl_engine_t engine, OnednnDescPointer desc, void *data) {
    dnnl_memory_t memory;
    onednn_check(dnnl_memory_create(&memory, desc, engine, data), "memory");
    return memory;
}

// Which implementation: the library's first choice (a batch-reduce kernel that packs as it goes) is best for forward and
// input gradients; its packed gemm is 3 to 40 % faster for weight gradients, and where a row length is no multiple of the
// vector (a vocabulary of 50257). Chosen by shape, never by timing, which would change the bits from run to run.
// Measured with oneDNN 2.6 on Zen 4 (dev/bench/bench_matmul.c).
static inline bool onednn_wants_gemm_(const OnednnKey *key) {
    return key->a_transposed || key->N % 16 != 0 || (!key->b_transposed && key->K % 16 != 0);
}

static inline void onednn_product_create_(OnednnState *state, OnednnProduct *product, const OnednnKey *key) {
    *product = (OnednnProduct){.key = *key};
    OnednnDesc a = onednn_desc(key->M, key->K, key->a, key->a_row, key->a_transposed);
    OnednnDesc b = onednn_desc(key->K, key->N, key->b, key->b_row, key->b_transposed);
    OnednnDesc bias = onednn_desc(1, key->N, key->bias, key->N, false);
    OnednnDesc c = onednn_desc(key->M, key->N, key->c, key->c_row, false);
    const OnednnDesc *with_bias = key->has_bias ? &bias : NULL;
    dnnl_primitive_desc_t desc = NULL;
    if (onednn_wants_gemm_(key)) desc = onednn_matmul(state->engine, &a, &b, with_bias, &c, key->accumulate, "gemm:jit");
    if (desc == NULL) desc = onednn_matmul(state->engine, &a, &b, with_bias, &c, key->accumulate, NULL);
    if (desc != NULL && strstr(onednn_implementation(desc), "ref") != NULL) {
        dnnl_primitive_desc_destroy(desc); // a scalar loop: blas.h's conversion to fp32 is far faster
        desc = NULL;
    }
    if (desc != NULL) {
        onednn_check(dnnl_primitive_create(&product->primitive, desc), "primitive");
        product->a = onednn_memory(state->engine, onednn_pointer(&a), DNNL_MEMORY_NONE);
        product->b = onednn_memory(state->engine, onednn_pointer(&b), DNNL_MEMORY_NONE);
        product->c = onednn_memory(state->engine, onednn_pointer(&c), DNNL_MEMORY_NONE);
        if (key->has_bias) product->bias = onednn_memory(state->engine, onednn_pointer(&bias), DNNL_MEMORY_NONE);
        OnednnDescPointer scratch = dnnl_primitive_desc_query_md(desc, dnnl_query_scratchpad_md, 0);
        product->scratch = onednn_memory(state->engine, scratch, DNNL_MEMORY_NONE);
        product->scratch_bytes = dnnl_memory_desc_get_size(scratch);
        if (product->scratch_bytes > state->scratch_bytes) {
            free(state->scratch);
            state->scratch = base_alloc(product->scratch_bytes);
            state->scratch_bytes = product->scratch_bytes;
        }
        dnnl_primitive_desc_destroy(desc);
    }
    onednn_desc_destroy(&a), onednn_desc_destroy(&b), onednn_desc_destroy(&bias), onednn_desc_destroy(&c);
}

static inline bool onednn_key_equal_(const OnednnKey *x, const OnednnKey *y) {
    return x->M == y->M && x->N == y->N && x->K == y->K && x->a_transposed == y->a_transposed && x->b_transposed == y->b_transposed &&
           x->accumulate == y->accumulate && x->has_bias == y->has_bias && x->a == y->a && x->b == y->b && x->c == y->c && x->bias == y->bias &&
           x->a_row == y->a_row && x->b_row == y->b_row && x->c_row == y->c_row;
}

static inline OnednnProduct *onednn_product_(OnednnState *state, const OnednnKey *key) {
    OnednnProduct *oldest = &state->products[0];
    for (int i = 0; i < ONEDNN_PRODUCTS; i++) {
        OnednnProduct *product = &state->products[i];
        if (product->used > 0 && onednn_key_equal_(&product->key, key)) return product;
        if (product->used < oldest->used) oldest = product;
    }
    onednn_product_destroy_(oldest);
    onednn_product_create_(state, oldest, key);
    return oldest;
}

// c (M, N) = or += a x b (+ bias (N)). False: oneDNN has nothing fast for these types on this processor; c is untouched.
static inline bool onednn_product(OnednnState *state, const OnednnKey *key, void *c, const void *a, const void *b, const void *bias) {
    OnednnProduct *product = onednn_product_(state, key);
    product->used = ++state->clock;
    if (product->primitive == NULL) return false;
    onednn_check(dnnl_memory_set_data_handle(product->a, (void *)a), "set a");
    onednn_check(dnnl_memory_set_data_handle(product->b, (void *)b), "set b");
    onednn_check(dnnl_memory_set_data_handle(product->c, c), "set c");
    onednn_check(dnnl_memory_set_data_handle(product->scratch, state->scratch), "set scratchpad");
    if (key->has_bias) onednn_check(dnnl_memory_set_data_handle(product->bias, (void *)bias), "set bias");
    const dnnl_exec_arg_t arguments[] = {{DNNL_ARG_SRC, product->a},
                                         {DNNL_ARG_WEIGHTS, product->b},
                                         {DNNL_ARG_DST, product->c},
                                         {DNNL_ARG_SCRATCHPAD, product->scratch},
                                         {DNNL_ARG_BIAS, product->bias}};
    onednn_check(dnnl_primitive_execute(product->primitive, state->stream, key->has_bias ? 5 : 4, arguments), "matmul");
    onednn_check(dnnl_stream_wait(state->stream), "wait");
    return true;
}

#endif
