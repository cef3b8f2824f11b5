// model.h: the model's configuration, presets, and THE TENSOR TABLE: one row per parameter. Everything that iterates
// parameters (allocation, initialisation, optimizer, norms, checkpoints, counts) iterates this table; nothing else knows
// names or shapes. Knows nothing of memory or devices.
//
// The dimension legend, for all files:
//   B  sequences of a micro-batch      T   tokens of a sequence         N   tokens of a micro-batch (flat)
//   C  channels                        L   layers                       V   vocabulary, Vp padded
//   NH query heads                     NKV key/value heads              HS  channels of a head
//   FF hidden width of the MLP         QKV (NH + 2*NKV)*HS              E, K experts, experts per token
#ifndef LLMC_MODEL_H
#define LLMC_MODEL_H

#include "llmc/base.h"    // Error, fail, min_i64
#include "llmc/options.h" // Options, NORM_*, POSITION_*, ACTIVATION_*, BIAS_*
#include "llmc/rng.h"     // rng_normal_pair, rng_mix
#include "llmc/rope.h"    // RopeScaling

typedef struct {
    int64_t layers, channels, heads, kv_heads, head_size, ffn, vocab; // L C NH NKV HS FF V
    int64_t max_seq;                                                  // T; rows of the learned positions
    int norm, position, activation, bias;                             // NORM_*, POSITION_*, ACTIVATION_*, BIAS_*
    bool tied, qk_norm;
    double norm_eps, rope_theta, dropout;
    RopeScaling rope_scaling;
} ModelConfig;

static inline int64_t model_q_width(const ModelConfig *m) { return m->heads * m->head_size; }
static inline int64_t model_kv_width(const ModelConfig *m) { return m->kv_heads * m->head_size; }
static inline int64_t model_qkv_width(const ModelConfig *m) { return model_q_width(m) + 2 * model_kv_width(m); }
// Columns that the MLP's first matrix product writes: FF, or gate and up side by side.
static inline int64_t model_mlp_in_width(const ModelConfig *m) { return m->activation == ACTIVATION_SWIGLU ? 2 * m->ffn : m->ffn; }

// ----------------------------------------------------------------------------
// The tensor table

// What a tensor is, the same in every layer. A block's weights are reached by kind: weights[TENSOR_Q_WEIGHT].
// Order is memory order: q, k, v (and gate, up) stand next to each other, so that one matrix product reads them.
typedef enum {
    TENSOR_WTE,
    TENSOR_WPE,
    TENSOR_NORM1_WEIGHT,
    TENSOR_NORM1_BIAS,
    TENSOR_Q_WEIGHT,
    TENSOR_K_WEIGHT,
    TENSOR_V_WEIGHT,
    TENSOR_Q_BIAS,
    TENSOR_K_BIAS,
    TENSOR_V_BIAS,
    TENSOR_Q_NORM,
    TENSOR_K_NORM,
    TENSOR_O_WEIGHT,
    TENSOR_O_BIAS,
    TENSOR_NORM2_WEIGHT,
    TENSOR_NORM2_BIAS,
    TENSOR_FC_WEIGHT, // gelu
    TENSOR_FC_BIAS,
    TENSOR_PROJ_WEIGHT,
    TENSOR_PROJ_BIAS,
    TENSOR_GATE_WEIGHT, // swiglu
    TENSOR_UP_WEIGHT,
    TENSOR_GATE_BIAS,
    TENSOR_UP_BIAS,
    TENSOR_DOWN_WEIGHT,
    TENSOR_DOWN_BIAS,
    TENSOR_NORM_WEIGHT, // final norm
    TENSOR_NORM_BIAS,
    TENSOR_HEAD, // untied
    TENSOR_KINDS
} TensorKind;

// How tensor parallelism would cut a tensor: along rows (column-parallel layers: [out, in] split by out), along
// columns (row-parallel layers), or not at all (replicated).
typedef enum { SHARD_NONE, SHARD_ROWS, SHARD_COLUMNS } ShardKind;
typedef enum { INIT_NORMAL, INIT_ONES, INIT_ZEROS } InitKind;

// Units are what is gathered, freed and checkpointed together: 0 the embedding, 1..L the blocks, L+1 the final norm and head.
typedef struct {
    char name[48];
    TensorKind kind;
    int id;           // index in the table; also the key of its initial numbers
    int unit;         // 0, 1..L, L+1
    int rank;         // 1 or 2
    int64_t shape[2]; // global; [out, in] row-major, or [n, 1]
    int64_t elements;
    InitKind init;
    float init_std;
    bool decay;  // weight decay: matrices only
    bool joined; // follows the previous tensor without a gap in memory
    ShardKind shard;
} Tensor;

typedef struct {
    ModelConfig config;
    Tensor *tensors;
    int count;
    int units; // L + 2
} Model;

static inline int model_head_unit(const Model *model) { return (int)model->config.layers + 1; }

// The parameter that the head multiplies with.
static inline TensorKind model_head_kind(const ModelConfig *m) { return m->tied ? TENSOR_WTE : TENSOR_HEAD; }

typedef struct {
    TensorKind kind;
    const char *name; // without "h.N."
    int place;        // 0 embedding, 1 block, 2 head
    ShardKind shard;
    bool joined;
} TensorKindRow_;

static const TensorKindRow_ tensor_kind_rows_[TENSOR_KINDS] = {
    {TENSOR_WTE, "wte.weight", 0, SHARD_ROWS, false},
    {TENSOR_WPE, "wpe.weight", 0, SHARD_NONE, false},
    {TENSOR_NORM1_WEIGHT, "norm1.weight", 1, SHARD_NONE, false},
    {TENSOR_NORM1_BIAS, "norm1.bias", 1, SHARD_NONE, false},
    {TENSOR_Q_WEIGHT, "attn.q.weight", 1, SHARD_ROWS, false},
    {TENSOR_K_WEIGHT, "attn.k.weight", 1, SHARD_ROWS, true},
    {TENSOR_V_WEIGHT, "attn.v.weight", 1, SHARD_ROWS, true},
    {TENSOR_Q_BIAS, "attn.q.bias", 1, SHARD_ROWS, false},
    {TENSOR_K_BIAS, "attn.k.bias", 1, SHARD_ROWS, true},
    {TENSOR_V_BIAS, "attn.v.bias", 1, SHARD_ROWS, true},
    {TENSOR_Q_NORM, "attn.q_norm.weight", 1, SHARD_NONE, false},
    {TENSOR_K_NORM, "attn.k_norm.weight", 1, SHARD_NONE, false},
    {TENSOR_O_WEIGHT, "attn.o.weight", 1, SHARD_COLUMNS, false},
    {TENSOR_O_BIAS, "attn.o.bias", 1, SHARD_NONE, false},
    {TENSOR_NORM2_WEIGHT, "norm2.weight", 1, SHARD_NONE, false},
    {TENSOR_NORM2_BIAS, "norm2.bias", 1, SHARD_NONE, false},
    {TENSOR_FC_WEIGHT, "mlp.fc.weight", 1, SHARD_ROWS, false},
    {TENSOR_FC_BIAS, "mlp.fc.bias", 1, SHARD_ROWS, false},
    {TENSOR_PROJ_WEIGHT, "mlp.proj.weight", 1, SHARD_COLUMNS, false},
    {TENSOR_PROJ_BIAS, "mlp.proj.bias", 1, SHARD_NONE, false},
    {TENSOR_GATE_WEIGHT, "mlp.gate.weight", 1, SHARD_ROWS, false},
    {TENSOR_UP_WEIGHT, "mlp.up.weight", 1, SHARD_ROWS, true},
    {TENSOR_GATE_BIAS, "mlp.gate.bias", 1, SHARD_ROWS, false},
    {TENSOR_UP_BIAS, "mlp.up.bias", 1, SHARD_ROWS, true},
    {TENSOR_DOWN_WEIGHT, "mlp.down.weight", 1, SHARD_COLUMNS, false},
    {TENSOR_DOWN_BIAS, "mlp.down.bias", 1, SHARD_NONE, false},
    {TENSOR_NORM_WEIGHT, "norm.weight", 2, SHARD_NONE, false},
    {TENSOR_NORM_BIAS, "norm.bias", 2, SHARD_NONE, false},
    {TENSOR_HEAD, "head.weight", 2, SHARD_ROWS, false},
};

// Shape of a kind under a configuration; false when this configuration has no such tensor.
static inline bool model_kind_shape_(const ModelConfig *m, TensorKind kind, int64_t shape[2]) {
    const int64_t C = m->channels, FF = m->ffn, Q = model_q_width(m), KV = model_kv_width(m);
    const bool bias = m->bias == BIAS_ON, gelu = m->activation == ACTIVATION_GELU;
    const bool norm_bias = m->norm == NORM_LAYERNORM && bias;
#define SHAPE(condition, rows, columns) return shape[0] = (rows), shape[1] = (columns), (condition)
    switch (kind) {
    case TENSOR_WTE: SHAPE(true, m->vocab, C);
    case TENSOR_WPE: SHAPE(m->position == POSITION_LEARNED, m->max_seq, C);
    case TENSOR_NORM1_WEIGHT:
    case TENSOR_NORM2_WEIGHT:
    case TENSOR_NORM_WEIGHT: SHAPE(true, C, 0);
    case TENSOR_NORM1_BIAS:
    case TENSOR_NORM2_BIAS:
    case TENSOR_NORM_BIAS: SHAPE(norm_bias, C, 0);
    case TENSOR_Q_WEIGHT: SHAPE(true, Q, C);
    case TENSOR_K_WEIGHT:
    case TENSOR_V_WEIGHT: SHAPE(true, KV, C);
    case TENSOR_Q_BIAS: SHAPE(m->bias != BIAS_OFF, Q, 0);
    case TENSOR_K_BIAS:
    case TENSOR_V_BIAS: SHAPE(m->bias != BIAS_OFF, KV, 0);
    case TENSOR_Q_NORM:
    case TENSOR_K_NORM: SHAPE(m->qk_norm, m->head_size, 0);
    case TENSOR_O_WEIGHT: SHAPE(true, C, Q);
    case TENSOR_O_BIAS: SHAPE(bias, C, 0);
    case TENSOR_FC_WEIGHT: SHAPE(gelu, FF, C);
    case TENSOR_FC_BIAS: SHAPE(gelu && bias, FF, 0);
    case TENSOR_PROJ_WEIGHT: SHAPE(gelu, C, FF);
    case TENSOR_PROJ_BIAS: SHAPE(gelu && bias, C, 0);
    case TENSOR_GATE_WEIGHT:
    case TENSOR_UP_WEIGHT: SHAPE(!gelu, FF, C);
    case TENSOR_GATE_BIAS:
    case TENSOR_UP_BIAS: SHAPE(!gelu && bias, FF, 0);
    case TENSOR_DOWN_WEIGHT: SHAPE(!gelu, C, FF);
    case TENSOR_DOWN_BIAS: SHAPE(!gelu && bias, C, 0);
    case TENSOR_HEAD: SHAPE(!m->tied, m->vocab, C);
    case TENSOR_KINDS: break;
    }
#undef SHAPE
    return false;
}

// Initialisation as in GPT-2: normal(0, 0.02), projections into the residual stream scaled by 1/sqrt(2L) (Radford et
// al. 2019, section 2.3), gains one, biases zero.
static inline Tensor model_tensor_(const ModelConfig *m, const TensorKindRow_ *kind, int64_t layer, const int64_t shape[2]) {
    Tensor t = {.kind = kind->kind, .joined = kind->joined, .shard = kind->shard};
    if (kind->place == 1) {
        snprintf(t.name, sizeof t.name, "h.%lld.%s", (long long)layer, kind->name);
    } else {
        snprintf(t.name, sizeof t.name, "%s", kind->name);
    }
    t.unit = kind->place == 0 ? 0 : kind->place == 1 ? (int)layer + 1 : (int)m->layers + 1;
    t.rank = shape[1] > 0 ? 2 : 1;
    t.shape[0] = shape[0];
    t.shape[1] = shape[1] > 0 ? shape[1] : 1;
    t.elements = t.shape[0] * t.shape[1];
    t.decay = t.rank == 2;
    const bool gain = t.rank == 1 && strstr(kind->name, "norm") != NULL && strstr(kind->name, "weight") != NULL;
    t.init = t.rank == 2 ? INIT_NORMAL : gain ? INIT_ONES : INIT_ZEROS;
    const bool into_residual = kind->kind == TENSOR_O_WEIGHT || kind->kind == TENSOR_PROJ_WEIGHT || kind->kind == TENSOR_DOWN_WEIGHT;
    t.init_std = t.rank == 2 ? (into_residual ? (float)(0.02 / sqrt(2.0 * (double)m->layers)) : 0.02f) : 0.0f;
    return t;
}

// Builds the table of a checked configuration.
static inline Model model_create(const ModelConfig *config) {
    Model model = {.config = *config, .units = (int)config->layers + 2};
    model.tensors = base_new((size_t)(config->layers + 2) * TENSOR_KINDS, sizeof(Tensor));
    for (int place = 0; place < 3; place++) {
        for (int64_t layer = 0; layer < (place == 1 ? config->layers : 1); layer++) {
            for (int kind = 0; kind < TENSOR_KINDS; kind++) {
                int64_t shape[2];
                const TensorKindRow_ *row = &tensor_kind_rows_[kind];
                if (row->place != place || !model_kind_shape_(config, row->kind, shape)) continue;
                Tensor tensor = model_tensor_(config, row, layer, shape);
                tensor.id = model.count;
                model.tensors[model.count++] = tensor;
            }
        }
    }
    return model;
}

static inline void model_free(Model *model) {
    free(model->tensors);
    *model = (Model){0};
}

static inline int64_t model_parameters(const Model *model) {
    int64_t count = 0;
    for (int i = 0; i < model->count; i++) count += model->tensors[i].elements;
    return count;
}

// Floating-point operations of forward and backward per token: 6 per weight of every matrix product (the head also when
// tied; the embedding look-up none), and attention: 12*L*NH*HS*T, halved by the causal mask (PaLM, appendix B, counts the whole square).
static inline double model_flops_per_token(const Model *model, int64_t seq) {
    const ModelConfig *m = &model->config;
    double weights = m->tied ? (double)m->vocab * (double)m->channels : 0;
    for (int i = 0; i < model->count; i++) {
        const Tensor *t = &model->tensors[i];
        if (t->rank == 2 && t->kind != TENSOR_WTE && t->kind != TENSOR_WPE) weights += (double)t->elements;
    }
    return 6.0 * weights + 6.0 * (double)m->layers * (double)model_q_width(m) * (double)seq;
}

// Initial values of elements [begin, begin+count) of a tensor: a pure function of (seed, tensor, element), whatever the
// slice. key: rng_key(seed, RNG_INIT).
static inline void model_init_values(const Tensor *tensor, uint64_t key, int64_t begin, int64_t count, float *values) {
    if (tensor->init != INIT_NORMAL) {
        for (int64_t i = 0; i < count; i++) values[i] = tensor->init == INIT_ONES ? 1.0f : 0.0f;
        return;
    }
    for (int64_t i = begin; i < begin + count; i++) {
        float normal[2];
        rng_normal_pair(key, (uint64_t)tensor->id, (uint64_t)i / 2, normal);
        values[i - begin] = tensor->init_std * normal[i % 2];
        if (i % 2 == 0 && i + 1 < begin + count) values[++i - begin] = tensor->init_std * normal[1];
    }
}

// Contribution of a slice to the init hash: the wrapping sum over elements of hash(tensor name, element index, bits).
static inline uint64_t model_hash_values(const Tensor *tensor, int64_t begin, int64_t count, const float *values) {
    uint64_t name = 0, sum = 0;
    for (const char *c = tensor->name; *c != '\0'; c++) name = rng_mix(name ^ (unsigned char)*c);
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], 4);
        sum += rng_mix(name + (uint64_t)(begin + i) * 0x9E3779B97F4A7C15ull + ((uint64_t)bits << 17));
    }
    return sum;
}

// ----------------------------------------------------------------------------
// Presets

typedef struct {
    const char *name;
    int64_t layers, channels, heads, kv_heads, head_size, ffn, vocab;
    int norm, position, activation, bias;
    bool tied, qk_norm;
    double norm_eps, rope_theta;
    int64_t max_seq; // context it was published with
    const char *about;
} ModelPreset;

#define GPT2_(name, L, C, NH, V, T, about)                                                                                                         \
    { name, L, C, NH, NH, (C) / (NH), 4 * (C), V, NORM_LAYERNORM, POSITION_LEARNED, ACTIVATION_GELU, BIAS_ON, true, false, 1e-5, 1e4, T, about }
#define LLAMA_(name, L, C, NH, NKV, HS, FF, V, tied, qk, eps, theta, T, about)                                                                     \
    { name, L, C, NH, NKV, HS, FF, V, NORM_RMSNORM, POSITION_ROPE, ACTIVATION_SWIGLU, BIAS_OFF, tied, qk, eps, theta, T, about }

static const ModelPreset model_presets[] = {
    GPT2_("gpt-nano", 4, 128, 4, 257, 256, "0.9M with bytes: seconds on a laptop"),
    GPT2_("gpt-micro", 6, 384, 6, 257, 1024, "11M with bytes: minutes on a laptop"),
    LLAMA_("llama-nano", 4, 256, 8, 4, 32, 704, 257, true, false, 1e-5, 1e4, 1024, "3M with bytes"),
    GPT2_("gpt2-124m", 12, 768, 12, 50257, 1024, "GPT-2 small"),
    GPT2_("gpt2-355m", 24, 1024, 16, 50257, 1024, "GPT-2 medium"),
    GPT2_("gpt2-774m", 36, 1280, 20, 50257, 1024, "GPT-2 large"),
    GPT2_("gpt2-1558m", 48, 1600, 25, 50257, 1024, "GPT-2 XL"),
    LLAMA_("llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000, false, false, 1e-5, 1e4, 4096, "Llama 2 7B"),
    LLAMA_("llama2-70b", 80, 8192, 64, 8, 128, 28672, 32000, false, false, 1e-5, 1e4, 4096, "Llama 2 70B"),
    LLAMA_("llama3-8b", 32, 4096, 32, 8, 128, 14336, 128256, false, false, 1e-5, 5e5, 8192, "Llama 3 8B"),
    LLAMA_("llama3-70b", 80, 8192, 64, 8, 128, 28672, 128256, false, false, 1e-5, 5e5, 8192, "Llama 3 70B"),
    LLAMA_("llama3-405b", 126, 16384, 128, 8, 128, 53248, 128256, false, false, 1e-5, 5e5, 8192, "Llama 3.1 405B"),
    LLAMA_("mistral-7b", 32, 4096, 32, 8, 128, 14336, 32000, false, false, 1e-5, 1e4, 8192, "Mistral 7B v0.1 (full attention; no sliding window)"),
    LLAMA_("qwen3-0.6b", 28, 1024, 16, 8, 128, 3072, 151936, true, true, 1e-6, 1e6, 32768, "Qwen3 0.6B"),
    LLAMA_("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151936, false, true, 1e-6, 1e6, 32768, "Qwen3 8B"),
};
enum { MODEL_PRESET_COUNT = sizeof model_presets / sizeof model_presets[0] };

static inline const ModelPreset *model_preset_find(const char *name) {
    for (int i = 0; i < MODEL_PRESET_COUNT; i++) {
        if (strcmp(model_presets[i].name, name) == 0) return &model_presets[i];
    }
    return NULL;
}

// The first preset whose name begins so, as a hint; else "".
static inline const char *model_preset_begins_(const char *name) {
    for (int i = 0; i < MODEL_PRESET_COUNT; i++) {
        if (name[0] != '\0' && strncmp(model_presets[i].name, name, strlen(name)) == 0) return model_presets[i].name;
    }
    return "";
}

static inline ModelConfig model_preset_config_(const ModelPreset *p) {
    return (ModelConfig){.layers = p->layers,
                         .channels = p->channels,
                         .heads = p->heads,
                         .kv_heads = p->kv_heads,
                         .head_size = p->head_size,
                         .ffn = p->ffn,
                         .vocab = p->vocab,
                         .max_seq = p->max_seq,
                         .norm = p->norm,
                         .position = p->position,
                         .activation = p->activation,
                         .bias = p->bias,
                         .tied = p->tied,
                         .qk_norm = p->qk_norm,
                         .norm_eps = p->norm_eps,
                         .rope_theta = p->rope_theta};
}

static inline void model_list(FILE *file) {
    fprintf(file, "%-12s %9s %7s %9s %6s %9s %7s %7s  %s\n", "name", "params", "layers", "channels", "heads", "kv-heads", "ffn", "vocab", "");
    for (int i = 0; i < MODEL_PRESET_COUNT; i++) {
        const ModelPreset *p = &model_presets[i];
        ModelConfig config = model_preset_config_(p);
        Model model = model_create(&config);
        double millions = (double)model_parameters(&model) * 1e-6;
        char size[16];
        snprintf(size, sizeof size, millions < 1e3 ? "%.1fM" : "%.2fB", millions < 1e3 ? millions : millions * 1e-3);
        fprintf(file, "%-12s %9s %7lld %9lld %6lld %9lld %7lld %7lld  %s\n", p->name, size, (long long)p->layers, (long long)p->channels,
                (long long)p->heads, (long long)p->kv_heads, (long long)p->ffn, (long long)p->vocab, p->about);
        model_free(&model);
    }
}

// ----------------------------------------------------------------------------
// A configuration to start from: of --model config.json, or of the weights that a run goes on with.
typedef struct {
    bool known;
    bool fixed; // by weights: flags change only what they name (and are refused later where that differs)
    ModelConfig config;
    char name[256];         // where it comes from, for messages
    int64_t sliding_window; // tokens beyond which its attention would not see all; 0: none
} ModelShape;

// The configuration that the flags override. False: --model names none.
static inline bool model_base_(ModelConfig *m, const Options *o, const ModelShape *shape, Error *error) {
    if (shape != NULL && shape->known) {
        *m = shape->config;
    } else if (o->model != NULL) {
        const ModelPreset *preset = model_preset_find(o->model);
        if (preset == NULL) {
            const char *near = model_preset_begins_(o->model);
            return fail(error, CODE_USAGE, "--model: unknown preset '%.200s' (%s%s--model list shows them; or the path of a config.json)", o->model,
                        near, near[0] != '\0' ? " or another? " : "");
        }
        *m = model_preset_config_(preset);
    } else {
        *m = (ModelConfig){.layers = 12,
                           .channels = 768,
                           .norm = NORM_LAYERNORM,
                           .position = POSITION_LEARNED,
                           .activation = ACTIVATION_GELU,
                           .bias = BIAS_ON,
                           .tied = true,
                           .norm_eps = 1e-5,
                           .rope_theta = 1e4};
    }
    return true;
}

// What no configuration may be.
static inline bool model_check_(const ModelConfig *m, const Options *o, const char *name, Error *error) {
    if (m->head_size > 128) {
        return fail(error, CODE_USAGE, "--head-size: got %lld, wanted at most 128 (more --heads, or give --head-size)", (long long)m->head_size);
    }
    if (m->heads % m->kv_heads != 0) {
        return fail(error, CODE_USAGE, "--kv-heads: got %lld, wanted a divisor of --heads %lld", (long long)m->kv_heads, (long long)m->heads);
    }
    if (m->position == POSITION_ROPE && m->head_size % 2 != 0) {
        return fail(error, CODE_USAGE, "--head-size: got %lld, wanted an even number with --position rope", (long long)m->head_size);
    }
    if (m->position == POSITION_LEARNED && m->max_seq > 0 && o->seq > m->max_seq) {
        return fail(error, CODE_USAGE, "--seq: got %lld, wanted at most the %lld learned positions of %s (or --position rope)", (long long)o->seq,
                    (long long)m->max_seq, name);
    }
    return true;
}

// Options -> configuration, over that of a shape (NULL or not known: of --model). `data_vocab` is the vocabulary named by the token files
// (0 = they name none).
static inline bool model_configure_over(ModelConfig *m, const Options *o, const ModelShape *shape, int64_t data_vocab, Error *error) {
    const bool *given = o->given;
    const bool known = shape != NULL && shape->known, fixed = known && shape->fixed, based = known || o->model != NULL;
    if (!model_base_(m, o, shape, error)) return false;
    // A flag that changes a width resets what was derived from it, unless that is given too.
    const bool shape_given = !fixed && (given[OPTION_channels] || given[OPTION_heads]);
    if (given[OPTION_layers]) m->layers = o->layers;
    if (given[OPTION_channels]) m->channels = o->channels;
    if (given[OPTION_heads]) m->heads = o->heads;
    if (given[OPTION_activation]) m->activation = o->activation;
    if (given[OPTION_norm]) m->norm = o->norm;
    if (given[OPTION_norm_eps]) m->norm_eps = o->norm_eps;
    if (given[OPTION_position]) m->position = o->position;
    if (given[OPTION_rope_theta]) m->rope_theta = o->rope_theta;
    if (given[OPTION_bias]) m->bias = o->bias;
    if (given[OPTION_tied]) m->tied = o->tied;
    if (given[OPTION_qk_norm]) m->qk_norm = o->qk_norm;
    m->dropout = o->dropout;
    const int64_t C = m->channels;
    if (m->heads == 0) m->heads = max_i64(1, C / 64);
    if (given[OPTION_head_size]) {
        m->head_size = o->head_size;
    } else if (!based || shape_given) {
        if (C % m->heads != 0) {
            return fail(error, CODE_USAGE, "--heads: got %lld, wanted a divisor of --channels %lld (or give --head-size)", (long long)m->heads,
                        (long long)C);
        }
        m->head_size = C / m->heads;
    }
    if (given[OPTION_kv_heads]) {
        m->kv_heads = o->kv_heads;
    } else if (!based || (!fixed && given[OPTION_heads])) {
        m->kv_heads = m->heads;
    }
    if (given[OPTION_ffn]) {
        m->ffn = o->ffn;
    } else if (!based || (!fixed && (given[OPTION_channels] || given[OPTION_activation]))) {
        m->ffn = m->activation == ACTIVATION_SWIGLU ? round_up((8 * C + 2) / 3, 64) : 4 * C;
    }
    if (given[OPTION_vocab]) {
        m->vocab = o->vocab;
    } else if (data_vocab > 0 && !known) {
        m->vocab = data_vocab;
    } else if (!based) {
        m->vocab = 50257;
    }
    if (!model_check_(m, o, known ? shape->name : o->model, error)) return false;
    // Without a base the table of positions is as long as the sequences; a base keeps its published length.
    if (m->max_seq == 0) m->max_seq = o->seq;
    return true;
}

static inline bool model_configure(ModelConfig *m, const Options *o, int64_t data_vocab, Error *error) {
    return model_configure_over(m, o, NULL, data_vocab, error);
}

#endif
