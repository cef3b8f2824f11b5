// reference.h: what comparisons with a reference need: the error of a tensor, batches of a fixture, random configurations,
// parameters and batches. Used with recorded results (fixture.h) and with the double-precision model (naive_gpt.h).
#ifndef DEV_TEST_REFERENCE_H
#define DEV_TEST_REFERENCE_H

#include "dev/test/fixture.h"   // Fixture, fixture_data
#include "dev/test/naive_gpt.h" // NaiveBatch
#include "llmc/rng.h"           // philox, rng_normal, RNG_TEST

// Every fixture, in the order of dev/reference/make_fixtures.py.
static const char *const reference_fixtures[] = {"gpt2", "gpt2_odd", "llama", "qwen3", "qwen2", "gpt2_packed", "llama_packed"};
enum { REFERENCE_FIXTURES = sizeof reference_fixtures / sizeof reference_fixtures[0] };

static inline Fixture reference_open(int index) {
    char path[128];
    snprintf(path, sizeof path, "dev/fixtures/%s.safetensors", reference_fixtures[index]);
    return fixture_open(path);
}

// ----------------------------------------------------------------------------
// Errors. Anything that is not finite is an infinite error.

static inline double reference_norm(const double *x, int64_t n) {
    double squares = 0.0;
    for (int64_t i = 0; i < n; i++) squares += x[i] * x[i];
    return sqrt(squares);
}

// |a - b| / max(|b|, floor), L2 norms
static inline double reference_error(const double *a, const double *b, int64_t n, double floor) {
    double squares = 0.0;
    for (int64_t i = 0; i < n; i++) squares += (a[i] - b[i]) * (a[i] - b[i]);
    const double error = sqrt(squares) / fmax(reference_norm(b, n), floor);
    return squares == 0.0 ? 0.0 : isfinite(error) ? error : INFINITY;
}

// What a tensor's error is measured against at least: a part of its share of the global gradient's norm g (n of n_total
// parameters), 1e-3 of it in general. Some gradients are zero in exact arithmetic (a key bias that no rotation or norm follows
// shifts all scores of a query alike; a lone token's attention has nothing to choose): there the computed value is rounding noise
// of terms of ordinary size that cancel, and is measured against a tenth of the share. A reference computed in fp32 has such noise itself.
enum { REFERENCE_DOUBLE, REFERENCE_FLOAT };
static inline double reference_floor(double g, double tensor_norm, int64_t n, int64_t n_total, int reference) {
    const double share = g * sqrt((double)n / (double)n_total), noise = reference == REFERENCE_FLOAT ? 1e-5 : 1e-9;
    return share * (tensor_norm <= noise * share ? 1e-1 : 1e-3);
}

static inline double reference_difference(double a, double b) {
    const double error = fabs(a - b) / fabs(b);
    return isfinite(error) ? error : INFINITY;
}

// The worst of several errors and where it was.
typedef struct {
    double error;
    char name[80];
} Worst;

static inline void worst_add(Worst *worst, double error, const char *name) {
    if (error >= worst->error || worst->name[0] == '\0') {
        worst->error = error;
        snprintf(worst->name, sizeof worst->name, "%.79s", name);
    }
}

// ----------------------------------------------------------------------------
// Fixtures

static inline double *reference_doubles(const float *values, int64_t n) {
    double *copy = base_new((size_t)n, sizeof *copy);
    for (int64_t i = 0; i < n; i++) copy[i] = values[i];
    return copy;
}

// A float tensor of a fixture, in double; the caller frees it.
static inline double *reference_tensor(const Fixture *f, const char *kind, const char *name, int64_t n) {
    char full[96];
    snprintf(full, sizeof full, "%s%s", kind, name);
    return reference_doubles(fixture_data(f, full, FIXTURE_F32, n), n);
}

static inline NaiveBatch reference_batch(const Fixture *f, int64_t index) {
    const FixtureTensor tokens = fixture_tensor(f, "tokens"), bounds = fixture_tensor(f, "cu_seqlens");
    const int64_t N = tokens.elements / tokens.shape[0], documents = bounds.shape[1] - 1;
    const int32_t *targets = fixture_data(f, "targets", FIXTURE_I32, tokens.elements);
    const int32_t *positions = fixture_data(f, "positions", FIXTURE_I32, tokens.elements);
    return (NaiveBatch){.tokens = N,
                        .documents = documents,
                        .ids = (const int32_t *)tokens.data + index * N,
                        .targets = targets + index * N,
                        .positions = positions + index * N,
                        .cu_seqlens = (const int32_t *)bounds.data + index * (documents + 1)};
}

static inline NaiveAdamW reference_optimizer(const Fixture *f) {
    return (NaiveAdamW){.lr = fixture_number(f, "lr"),
                        .beta1 = fixture_number(f, "beta1"),
                        .beta2 = fixture_number(f, "beta2"),
                        .eps = fixture_number(f, "eps"),
                        .weight_decay = fixture_number(f, "weight_decay"),
                        .clip = fixture_number(f, "clip")};
}

static inline int64_t reference_valid(const NaiveBatch *batch) {
    int64_t valid = 0;
    for (int64_t n = 0; n < batch->tokens; n++) valid += batch->targets[n] >= 0;
    return valid;
}

// ----------------------------------------------------------------------------
// Random configurations: a pure function of (seed, index)

typedef struct {
    uint64_t key, counter;
} Draw;

static inline Draw draw_create(uint64_t seed, uint64_t index) { return (Draw){.key = rng_mix(rng_key(seed, RNG_TEST) ^ rng_mix(index))}; }
// low, low+step, ... up to high
static inline int64_t draw_between(Draw *draw, int64_t low, int64_t high, int64_t step) {
    return low + step * (int64_t)(philox(draw->key, draw->counter++, 0).x[0] % (uint32_t)((high - low) / step + 1));
}

// Every switch and odd sizes; head sizes are multiples of head_step (even).
static inline ModelConfig reference_random_config(Draw *draw, int64_t head_step) {
    ModelConfig m = {.layers = draw_between(draw, 1, 3, 1), .channels = draw_between(draw, 8, 50, 1), .kv_heads = draw_between(draw, 1, 3, 1)};
    m.heads = m.kv_heads * draw_between(draw, 1, 3, 1);
    m.head_size = draw_between(draw, head_step, max_i64(18, head_step), head_step);
    m.ffn = draw_between(draw, 5, 70, 1);
    m.vocab = draw_between(draw, 2, 150, 1);
    m.max_seq = draw_between(draw, 1, 24, 1);
    m.norm = (int)draw_between(draw, NORM_LAYERNORM, NORM_RMSNORM, 1);
    m.position = (int)draw_between(draw, POSITION_LEARNED, POSITION_ROPE, 1);
    m.activation = (int)draw_between(draw, ACTIVATION_GELU, ACTIVATION_SWIGLU, 1);
    m.bias = (int)draw_between(draw, BIAS_OFF, BIAS_QKV, 1);
    m.tied = draw_between(draw, 0, 1, 1) == 1;
    m.qk_norm = draw_between(draw, 0, 1, 1) == 1;
    m.norm_eps = draw_between(draw, 0, 1, 1) ? 1e-5 : 1e-2;
    m.rope_theta = draw_between(draw, 0, 1, 1) ? 1e4 : 50.0;
    m.dropout = draw_between(draw, 0, 2, 1) ? 0.0 : 0.2;
    return m;
}

static inline void reference_describe(const ModelConfig *m, char *text, size_t size) {
    static const char *const bias[] = {"off", "on", "qkv"};
    snprintf(text, size, "L%d C%d NH%d/%d HS%d FF%d V%d T%d %s %s %s bias-%s%s%s%s", (int)m->layers, (int)m->channels, (int)m->heads,
             (int)m->kv_heads, (int)m->head_size, (int)m->ffn, (int)m->vocab, (int)m->max_seq, m->norm == NORM_RMSNORM ? "rms" : "layer",
             m->position == POSITION_ROPE ? "rope" : "learned", m->activation == ACTIVATION_SWIGLU ? "swiglu" : "gelu", bias[m->bias],
             m->tied ? " tied" : "", m->qk_norm ? " qk-norm" : "", m->dropout > 0 ? " dropout" : "");
}

// Value of an element, exact in float: large enough that every path matters.
static inline float reference_random_value(const Tensor *tensor, uint64_t key, int64_t index) {
    const float normal = rng_normal(key, (uint64_t)tensor->id, (uint64_t)index);
    return tensor->init == INIT_ONES ? 1.0f + 0.2f * normal : (tensor->rank == 2 ? 0.15f : 0.1f) * normal;
}

// Arrays of a random batch of B rows of T tokens; batch points into them.
typedef struct {
    int32_t *ids, *targets, *positions, *cu_seqlens;
    NaiveBatch batch;
} RandomBatch;

// Documents end at every row's end and, if packed, also at random places; about one target in six is masked.
static inline RandomBatch reference_random_batch(Draw *draw, const ModelConfig *m, int64_t B, int64_t T, bool packed, int64_t first_token) {
    const int64_t N = B * T;
    RandomBatch r;
    r.ids = base_new((size_t)N, sizeof(int32_t));
    r.targets = base_new((size_t)N, sizeof(int32_t));
    r.positions = base_new((size_t)N, sizeof(int32_t));
    r.cu_seqlens = base_new((size_t)N + 1, sizeof(int32_t));
    int64_t documents = 0;
    for (int64_t n = 0; n < N; n++) {
        const bool starts = n % T == 0 || (packed && draw_between(draw, 0, 4, 1) == 0);
        r.positions[n] = starts ? 0 : r.positions[n - 1] + 1;
        if (starts) r.cu_seqlens[documents++] = (int32_t)n;
        r.ids[n] = (int32_t)draw_between(draw, 0, m->vocab - 1, 1);
        r.targets[n] = draw_between(draw, 0, 5, 1) == 0 ? -1 : (int32_t)draw_between(draw, 0, m->vocab - 1, 1);
    }
    if (first_token == 0) r.targets[0] = 0; // a step has at least one valid token
    r.cu_seqlens[documents] = (int32_t)N;
    r.batch = (NaiveBatch){.tokens = N,
                           .documents = documents,
                           .ids = r.ids,
                           .targets = r.targets,
                           .positions = r.positions,
                           .cu_seqlens = r.cu_seqlens,
                           .dropout_key = rng_dropout_key(draw->key, 1),
                           .first_token = first_token};
    return r;
}

static inline void reference_random_batch_free(RandomBatch *r) {
    free(r->ids);
    free(r->targets);
    free(r->positions);
    free(r->cu_seqlens);
    *r = (RandomBatch){0};
}

// A random run: its batches are drawn one after the other.
enum { RANDOM_MICROS = 3 };
typedef struct {
    Draw draw;
    ModelConfig config;
    int64_t B, T, room; // rows of a micro-batch, tokens of a row; further rows that the trainer has room for
    int64_t chunk;      // tokens whose logits exist at once; 0: the trainer's choice
    int micros;         // per step, up to RANDOM_MICROS
    bool packed;
    bool last_masked; // a step's last micro-batch has no target, unless it is the first
} RandomCase;

static inline RandomCase reference_random_case(uint64_t index, int64_t head_step) {
    RandomCase c = {.draw = draw_create(2, index)};
    c.config = reference_random_config(&c.draw, head_step);
    c.B = draw_between(&c.draw, 1, 5, 1), c.T = draw_between(&c.draw, 1, c.config.max_seq, 1), c.room = draw_between(&c.draw, 0, 2, 1);
    c.packed = draw_between(&c.draw, 0, 1, 1) == 1, c.last_masked = draw_between(&c.draw, 0, 3, 1) == 0;
    c.micros = (int)draw_between(&c.draw, 1, RANDOM_MICROS, 1);
    if (draw_between(&c.draw, 0, 1, 1) == 1) c.chunk = draw_between(&c.draw, 1, 20, 1);
    return c;
}

// The micro-batches of the next step, number `step` (from 0), into random (micros).
static inline void reference_random_step(RandomCase *c, int step, RandomBatch *random) {
    for (int i = 0; i < c->micros; i++) {
        random[i] = reference_random_batch(&c->draw, &c->config, c->B, c->T, c->packed, i * c->B * c->T);
        random[i].batch.dropout_key = rng_dropout_key(c->draw.key, (uint64_t)step + 1);
        if (i == 0 || i < c->micros - 1 || !c->last_masked) continue;
        for (int64_t n = 0; n < c->B * c->T; n++) random[i].targets[n] = -1;
    }
}

#endif
