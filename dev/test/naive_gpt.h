// naive_gpt.h: the whole model in double precision with plain loops: forward, backward and AdamW of every layout. An oracle
// for tests: nothing is fused, blocked, shared with the trainer's ops, or fast. It shares the tensor table and rng.h.
// Formulas: Vaswani et al. 2017 (attention), Ba et al. 2016 (layernorm), Zhang & Sennrich 2019 (rmsnorm), Hendrycks & Gimpel
// 2016 (gelu, tanh form), Shazeer 2020 (swiglu), Su et al. 2021 (rope), Loshchilov & Hutter 2019 (AdamW).
#ifndef DEV_TEST_NAIVE_GPT_H
#define DEV_TEST_NAIVE_GPT_H

#include "llmc/base.h"  // base_new
#include "llmc/model.h" // Model, Tensor, TENSOR_*
#include "llmc/rng.h"   // rng_dropout_bits
#include <math.h>       // exp, tanh, sqrt

// A micro-batch, as the trainer sees it.
typedef struct {
    int64_t tokens, documents;                // N
    const int32_t *ids, *targets, *positions; // (N); target < 0 = masked
    const int32_t *cu_seqlens;                // (documents+1)
    uint64_t dropout_key;                     // rng_dropout_key(seed, step)
    int64_t first_token;                      // index of token 0 in the step's global batch
} NaiveBatch;

typedef struct {
    double lr, beta1, beta2, eps, weight_decay, clip; // clip 0 = off
} NaiveAdamW;

// What a block's backward needs of its forward.
typedef struct {
    double *in, *norm1, *qkv_raw, *qkv, *attention, *mid, *norm2, *hidden, *activated; // rows of N tokens
} NaiveBlock;

typedef struct {
    Model model;
    int64_t *offset; // (tensors) in param, grad, m, v
    int64_t elements, updates;
    double *param, *grad, *adam_m, *adam_v; // (elements)
    int64_t capacity;                       // tokens that fit
    NaiveBlock *blocks;                     // (L)
    double *last, *last_norm;               // (N, C)
    double *logits, *losses;                // (N, V), (N)
} NaiveGpt;

static inline double *naive_rows_(const NaiveGpt *g, int64_t width) { return base_new((size_t)(g->capacity * width), sizeof(double)); }

static inline NaiveGpt naive_create(const ModelConfig *config, int64_t capacity) {
    NaiveGpt g = {.model = model_create(config), .capacity = capacity};
    const int64_t C = config->channels, QKV = model_qkv_width(config);
    g.offset = base_new((size_t)g.model.count, sizeof *g.offset);
    for (int i = 0; i < g.model.count; i++) {
        g.offset[i] = g.elements;
        g.elements += g.model.tensors[i].elements;
    }
    double **arenas[] = {&g.param, &g.grad, &g.adam_m, &g.adam_v};
    for (int i = 0; i < 4; i++) *arenas[i] = base_new((size_t)g.elements, sizeof(double));
    g.blocks = base_new((size_t)config->layers, sizeof *g.blocks);
    for (int64_t l = 0; l < config->layers; l++) {
        NaiveBlock *b = &g.blocks[l];
        double **residual[] = {&b->in, &b->norm1, &b->mid, &b->norm2};
        for (int i = 0; i < 4; i++) *residual[i] = naive_rows_(&g, C);
        b->qkv_raw = naive_rows_(&g, QKV);
        b->qkv = naive_rows_(&g, QKV);
        b->attention = naive_rows_(&g, model_q_width(config));
        b->hidden = naive_rows_(&g, model_mlp_in_width(config));
        b->activated = naive_rows_(&g, config->ffn);
    }
    g.last = naive_rows_(&g, C);
    g.last_norm = naive_rows_(&g, C);
    g.logits = naive_rows_(&g, config->vocab);
    g.losses = naive_rows_(&g, 1);
    return g;
}

static inline void naive_free(NaiveGpt *g) {
    for (int64_t l = 0; l < g->model.config.layers; l++) {
        NaiveBlock *b = &g->blocks[l];
        double *rows[] = {b->in, b->norm1, b->qkv_raw, b->qkv, b->attention, b->mid, b->norm2, b->hidden, b->activated};
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) free(rows[i]);
    }
    void *all[] = {g->blocks, g->last, g->last_norm, g->logits, g->losses, g->param, g->grad, g->adam_m, g->adam_v, g->offset};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
    model_free(&g->model);
    *g = (NaiveGpt){0};
}

// Index in the table of a kind in a unit; -1 when the configuration has no such tensor.
static inline int naive_find_(const NaiveGpt *g, int64_t unit, TensorKind kind) {
    for (int i = 0; i < g->model.count; i++) {
        if (g->model.tensors[i].unit == unit && g->model.tensors[i].kind == kind) return i;
    }
    return -1;
}
static inline double *naive_weight_(const NaiveGpt *g, int64_t unit, TensorKind kind) {
    const int i = naive_find_(g, unit, kind);
    return i < 0 ? NULL : g->param + g->offset[i];
}
static inline double *naive_grad_(const NaiveGpt *g, int64_t unit, TensorKind kind) {
    const int i = naive_find_(g, unit, kind);
    return i < 0 ? NULL : g->grad + g->offset[i];
}

// ----------------------------------------------------------------------------
// Ops. A weight or bias that is NULL does not exist. Gradients of weights and of inputs are +=.

// out (N, OC) = in (N, IC) x weight (OC, IC)^T + bias (OC); rows of out are `stride` apart
static inline void naive_linear_(double *out, int64_t stride, const double *in, const double *weight, const double *bias, int64_t N, int64_t IC,
                                 int64_t OC) {
    for (int64_t n = 0; n < N; n++) {
        for (int64_t o = 0; o < OC; o++) {
            double sum = bias ? bias[o] : 0.0;
            for (int64_t i = 0; i < IC; i++) sum += in[n * IC + i] * weight[o * IC + i];
            out[n * stride + o] = sum;
        }
    }
}

static inline void naive_linear_backward_(double *din, double *dweight, double *dbias, const double *dout, int64_t stride, const double *in,
                                          const double *weight, int64_t N, int64_t IC, int64_t OC) {
    for (int64_t n = 0; n < N; n++) {
        for (int64_t o = 0; o < OC; o++) {
            const double d = dout[n * stride + o];
            if (dbias) dbias[o] += d;
            for (int64_t i = 0; i < IC; i++) {
                din[n * IC + i] += d * weight[o * IC + i];
                dweight[o * IC + i] += d * in[n * IC + i];
            }
        }
    }
}

// One row of a norm: (x - mean) * rstd * weight + bias, the mean being 0 for rmsnorm.
static inline void naive_norm_statistics_(double *mean, double *rstd, const double *x, int kind, double eps, int64_t C) {
    double sum = 0.0, squares = 0.0;
    for (int64_t c = 0; c < C; c++) sum += x[c];
    *mean = kind == NORM_LAYERNORM ? sum / (double)C : 0.0;
    for (int64_t c = 0; c < C; c++) squares += (x[c] - *mean) * (x[c] - *mean);
    *rstd = 1.0 / sqrt(squares / (double)C + eps);
}

static inline void naive_norm_row_(double *out, const double *x, const double *weight, const double *bias, int kind, double eps, int64_t C) {
    double mean, rstd;
    naive_norm_statistics_(&mean, &rstd, x, kind, eps, C);
    for (int64_t c = 0; c < C; c++) out[c] = (x[c] - mean) * rstd * weight[c] + (bias ? bias[c] : 0.0);
}

// dx and dout are different rows.
static inline void naive_norm_row_backward_(double *dx, double *dweight, double *dbias, const double *dout, const double *x, const double *weight,
                                            int kind, double eps, int64_t C) {
    double mean, rstd, mean_d = 0.0, mean_dx = 0.0;
    naive_norm_statistics_(&mean, &rstd, x, kind, eps, C);
    for (int64_t c = 0; c < C; c++) {
        const double normal = (x[c] - mean) * rstd, d = dout[c] * weight[c];
        mean_d += kind == NORM_LAYERNORM ? d / (double)C : 0.0; // rmsnorm subtracts no mean, so none comes back
        mean_dx += d * normal / (double)C;
        dweight[c] += dout[c] * normal;
        if (dbias) dbias[c] += dout[c];
    }
    for (int64_t c = 0; c < C; c++) dx[c] += rstd * (dout[c] * weight[c] - mean_d - (x[c] - mean) * rstd * mean_dx);
}

static inline void naive_norm_(const NaiveGpt *g, double *out, const double *x, int64_t unit, TensorKind weight, TensorKind bias, int64_t N) {
    const ModelConfig *m = &g->model.config;
    for (int64_t n = 0; n < N; n++) {
        naive_norm_row_(out + n * m->channels, x + n * m->channels, naive_weight_(g, unit, weight), naive_weight_(g, unit, bias), m->norm,
                        m->norm_eps, m->channels);
    }
}

static inline void naive_norm_backward_(NaiveGpt *g, double *dx, const double *dout, const double *x, int64_t unit, TensorKind weight,
                                        TensorKind bias, int64_t N) {
    const ModelConfig *m = &g->model.config;
    for (int64_t n = 0; n < N; n++) {
        naive_norm_row_backward_(dx + n * m->channels, naive_grad_(g, unit, weight), naive_grad_(g, unit, bias), dout + n * m->channels,
                                 x + n * m->channels, naive_weight_(g, unit, weight), m->norm, m->norm_eps, m->channels);
    }
}

// x (N, C) *= mask and scale of the dropout at `site`; its own backward.
static inline void naive_dropout_(const NaiveGpt *g, double *x, const NaiveBatch *batch, uint32_t site) {
    const int64_t C = g->model.config.channels;
    const uint32_t threshold = rng_dropout_threshold(g->model.config.dropout);
    for (int64_t n = 0; n < batch->tokens; n++) {
        for (int64_t c = 0; c < C; c++) {
            uint16_t bits[8];
            rng_dropout_bits(batch->dropout_key, site, (uint64_t)(batch->first_token + n), (uint32_t)(c / 8), bits);
            x[n * C + c] *= bits[c % 8] < threshold ? 65536.0 / threshold : 0.0;
        }
    }
}
#define NAIVE_SITE_EMBEDDING 0xffffffu

// One head of a token, in place: the pair (i, i + HS/2) turns by position * theta^(-2i/HS); sign -1 turns back.
static inline void naive_rope_(double *head, int64_t position, double theta, double sign, int64_t HS) {
    for (int64_t i = 0; i < HS / 2; i++) {
        const double angle = (double)position * pow(theta, -2.0 * (double)i / (double)HS);
        const double c = cos(angle), s = sign * sin(angle), a = head[i], b = head[i + HS / 2];
        head[i] = a * c - b * s;
        head[i + HS / 2] = b * c + a * s;
    }
}

// Probabilities of query `t` over the keys first..t of its document, for query head h.
static inline void naive_probabilities_(double *p, const double *qkv, const ModelConfig *m, int64_t h, int64_t first, int64_t t) {
    const int64_t HS = m->head_size, QKV = model_qkv_width(m), kv = h / (m->heads / m->kv_heads);
    const double *q = qkv + t * QKV + h * HS;
    double largest = -INFINITY, sum = 0.0;
    for (int64_t s = first; s <= t; s++) {
        const double *k = qkv + s * QKV + (m->heads + kv) * HS;
        double dot = 0.0;
        for (int64_t i = 0; i < HS; i++) dot += q[i] * k[i];
        p[s - first] = dot / sqrt((double)HS);
        largest = fmax(largest, p[s - first]);
    }
    for (int64_t s = first; s <= t; s++) sum += p[s - first] = exp(p[s - first] - largest);
    for (int64_t s = first; s <= t; s++) p[s - first] /= sum;
}

static inline void naive_attention_(double *out, const double *qkv, const NaiveBatch *batch, const ModelConfig *m) {
    const int64_t HS = m->head_size, QKV = model_qkv_width(m), Q = model_q_width(m), group = m->heads / m->kv_heads;
    double *p = base_new((size_t)batch->tokens, sizeof *p);
    for (int64_t d = 0; d < batch->documents; d++) {
        for (int64_t t = batch->cu_seqlens[d], first = t; t < batch->cu_seqlens[d + 1]; t++) {
            for (int64_t h = 0; h < m->heads; h++) {
                naive_probabilities_(p, qkv, m, h, first, t);
                for (int64_t i = 0; i < HS; i++) {
                    double sum = 0.0;
                    for (int64_t s = first; s <= t; s++) sum += p[s - first] * qkv[s * QKV + (m->heads + m->kv_heads + h / group) * HS + i];
                    out[t * Q + h * HS + i] = sum;
                }
            }
        }
    }
    free(p);
}

static inline void naive_attention_backward_(double *dqkv, const double *dout, const double *qkv, const NaiveBatch *batch, const ModelConfig *m) {
    const int64_t HS = m->head_size, QKV = model_qkv_width(m), Q = model_q_width(m), group = m->heads / m->kv_heads;
    const double scale = 1.0 / sqrt((double)HS);
    double *p = base_new((size_t)batch->tokens, sizeof *p), *dp = base_new((size_t)batch->tokens, sizeof *dp);
    for (int64_t d = 0; d < batch->documents; d++) {
        for (int64_t t = batch->cu_seqlens[d], first = t; t < batch->cu_seqlens[d + 1]; t++) {
            for (int64_t h = 0; h < m->heads; h++) {
                const int64_t q_at = t * QKV + h * HS, k_at = (m->heads + h / group) * HS, v_at = (m->heads + m->kv_heads + h / group) * HS;
                const double *dy = dout + t * Q + h * HS;
                double mean = 0.0; // of dp under p
                naive_probabilities_(p, qkv, m, h, first, t);
                for (int64_t s = first; s <= t; s++) {
                    dp[s - first] = 0.0;
                    for (int64_t i = 0; i < HS; i++) {
                        dp[s - first] += dy[i] * qkv[s * QKV + v_at + i];
                        dqkv[s * QKV + v_at + i] += p[s - first] * dy[i];
                    }
                    mean += p[s - first] * dp[s - first];
                }
                for (int64_t s = first; s <= t; s++) {
                    const double dscore = p[s - first] * (dp[s - first] - mean) * scale;
                    for (int64_t i = 0; i < HS; i++) {
                        dqkv[q_at + i] += dscore * qkv[s * QKV + k_at + i];
                        dqkv[s * QKV + k_at + i] += dscore * qkv[q_at + i];
                    }
                }
            }
        }
    }
    free(p);
    free(dp);
}

static inline double naive_gelu_(double x) { return 0.5 * x * (1.0 + tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x))); }
static inline double naive_gelu_derivative_(double x) {
    const double t = tanh(sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x));
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * sqrt(2.0 / M_PI) * (1.0 + 3.0 * 0.044715 * x * x);
}
static inline double naive_sigmoid_(double x) { return 1.0 / (1.0 + exp(-x)); }

// ----------------------------------------------------------------------------
// A block: mid = in + attention(norm1(in)), out = mid + mlp(norm2(mid))

// q and k of every head: qk-norm, then rope; v as it is.
static inline void naive_qk_(const NaiveGpt *g, double *qkv, const double *raw, int64_t unit, const NaiveBatch *batch) {
    const ModelConfig *m = &g->model.config;
    const int64_t HS = m->head_size, QKV = model_qkv_width(m);
    memcpy(qkv, raw, (size_t)(batch->tokens * QKV) * sizeof *qkv);
    for (int64_t n = 0; n < batch->tokens; n++) {
        for (int64_t h = 0; h < m->heads + m->kv_heads; h++) {
            const int64_t at = n * QKV + h * HS;
            const double *gain = naive_weight_(g, unit, h < m->heads ? TENSOR_Q_NORM : TENSOR_K_NORM);
            if (gain) naive_norm_row_(qkv + at, raw + at, gain, NULL, NORM_RMSNORM, m->norm_eps, HS);
            if (m->position == POSITION_ROPE) naive_rope_(qkv + at, batch->positions[n], m->rope_theta, 1.0, HS);
        }
    }
}

// dqkv becomes the gradient of raw, in place.
static inline void naive_qk_backward_(NaiveGpt *g, double *dqkv, const double *raw, int64_t unit, const NaiveBatch *batch) {
    const ModelConfig *m = &g->model.config;
    const int64_t HS = m->head_size, QKV = model_qkv_width(m);
    double *dhead = base_new((size_t)HS, sizeof *dhead);
    for (int64_t n = 0; n < batch->tokens; n++) {
        for (int64_t h = 0; h < m->heads + m->kv_heads; h++) {
            const int64_t at = n * QKV + h * HS;
            const TensorKind kind = h < m->heads ? TENSOR_Q_NORM : TENSOR_K_NORM;
            if (m->position == POSITION_ROPE) naive_rope_(dqkv + at, batch->positions[n], m->rope_theta, -1.0, HS);
            if (!m->qk_norm) continue;
            memcpy(dhead, dqkv + at, (size_t)HS * sizeof *dhead);
            memset(dqkv + at, 0, (size_t)HS * sizeof *dhead);
            naive_norm_row_backward_(dqkv + at, naive_grad_(g, unit, kind), NULL, dhead, raw + at, naive_weight_(g, unit, kind), NORM_RMSNORM,
                                     m->norm_eps, HS);
        }
    }
    free(dhead);
}

static inline void naive_block_(NaiveGpt *g, double *out, int64_t layer, const NaiveBatch *batch) {
    const ModelConfig *m = &g->model.config;
    NaiveBlock *b = &g->blocks[layer];
    const int64_t N = batch->tokens, C = m->channels, Q = model_q_width(m), KV = model_kv_width(m), QKV = model_qkv_width(m), FF = m->ffn;
    const int64_t u = layer + 1;
#define W(kind) naive_weight_(g, u, kind)
    naive_norm_(g, b->norm1, b->in, u, TENSOR_NORM1_WEIGHT, TENSOR_NORM1_BIAS, N);
    naive_linear_(b->qkv_raw, QKV, b->norm1, W(TENSOR_Q_WEIGHT), W(TENSOR_Q_BIAS), N, C, Q);
    naive_linear_(b->qkv_raw + Q, QKV, b->norm1, W(TENSOR_K_WEIGHT), W(TENSOR_K_BIAS), N, C, KV);
    naive_linear_(b->qkv_raw + Q + KV, QKV, b->norm1, W(TENSOR_V_WEIGHT), W(TENSOR_V_BIAS), N, C, KV);
    naive_qk_(g, b->qkv, b->qkv_raw, u, batch);
    naive_attention_(b->attention, b->qkv, batch, m);
    naive_linear_(b->mid, C, b->attention, W(TENSOR_O_WEIGHT), W(TENSOR_O_BIAS), N, Q, C);
    if (m->dropout > 0) naive_dropout_(g, b->mid, batch, (uint32_t)(2 * layer));
    for (int64_t i = 0; i < N * C; i++) b->mid[i] += b->in[i];
    naive_norm_(g, b->norm2, b->mid, u, TENSOR_NORM2_WEIGHT, TENSOR_NORM2_BIAS, N);
    if (m->activation == ACTIVATION_GELU) {
        naive_linear_(b->hidden, FF, b->norm2, W(TENSOR_FC_WEIGHT), W(TENSOR_FC_BIAS), N, C, FF);
        for (int64_t i = 0; i < N * FF; i++) b->activated[i] = naive_gelu_(b->hidden[i]);
        naive_linear_(out, C, b->activated, W(TENSOR_PROJ_WEIGHT), W(TENSOR_PROJ_BIAS), N, FF, C);
    } else {
        naive_linear_(b->hidden, 2 * FF, b->norm2, W(TENSOR_GATE_WEIGHT), W(TENSOR_GATE_BIAS), N, C, FF);
        naive_linear_(b->hidden + FF, 2 * FF, b->norm2, W(TENSOR_UP_WEIGHT), W(TENSOR_UP_BIAS), N, C, FF);
        for (int64_t n = 0; n < N; n++) {
            const double *gate = b->hidden + n * 2 * FF, *up = gate + FF;
            for (int64_t i = 0; i < FF; i++) b->activated[n * FF + i] = gate[i] * naive_sigmoid_(gate[i]) * up[i];
        }
        naive_linear_(out, C, b->activated, W(TENSOR_DOWN_WEIGHT), W(TENSOR_DOWN_BIAS), N, FF, C);
    }
    if (m->dropout > 0) naive_dropout_(g, out, batch, (uint32_t)(2 * layer + 1));
    for (int64_t i = 0; i < N * C; i++) out[i] += b->mid[i];
#undef W
}

// d (N, C): gradient of the block's output on entry, of its input on return.
static inline void naive_block_backward_(NaiveGpt *g, double *d, int64_t layer, const NaiveBatch *batch) {
    const ModelConfig *m = &g->model.config;
    const NaiveBlock *b = &g->blocks[layer];
    const int64_t N = batch->tokens, C = m->channels, Q = model_q_width(m), KV = model_kv_width(m), QKV = model_qkv_width(m), FF = m->ffn;
    const int64_t u = layer + 1;
    double *dbranch = naive_rows_(g, C), *dnorm = naive_rows_(g, C), *dactivated = naive_rows_(g, FF), *dhidden = naive_rows_(g, 2 * FF);
    double *dattention = naive_rows_(g, Q), *dqkv = naive_rows_(g, QKV);
#define W(kind) naive_weight_(g, u, kind)
#define D(kind) naive_grad_(g, u, kind)
    // the MLP's branch; d itself passes along the residual
    memcpy(dbranch, d, (size_t)(N * C) * sizeof *d);
    if (m->dropout > 0) naive_dropout_(g, dbranch, batch, (uint32_t)(2 * layer + 1));
    if (m->activation == ACTIVATION_GELU) {
        naive_linear_backward_(dactivated, D(TENSOR_PROJ_WEIGHT), D(TENSOR_PROJ_BIAS), dbranch, C, b->activated, W(TENSOR_PROJ_WEIGHT), N, FF, C);
        for (int64_t i = 0; i < N * FF; i++) dhidden[i] = dactivated[i] * naive_gelu_derivative_(b->hidden[i]);
        naive_linear_backward_(dnorm, D(TENSOR_FC_WEIGHT), D(TENSOR_FC_BIAS), dhidden, FF, b->norm2, W(TENSOR_FC_WEIGHT), N, C, FF);
    } else {
        naive_linear_backward_(dactivated, D(TENSOR_DOWN_WEIGHT), D(TENSOR_DOWN_BIAS), dbranch, C, b->activated, W(TENSOR_DOWN_WEIGHT), N, FF, C);
        for (int64_t n = 0; n < N; n++) {
            for (int64_t i = 0; i < FF; i++) {
                const double gate = b->hidden[n * 2 * FF + i], up = b->hidden[n * 2 * FF + FF + i], s = naive_sigmoid_(gate);
                dhidden[n * 2 * FF + i] = dactivated[n * FF + i] * up * (s + gate * s * (1.0 - s));
                dhidden[n * 2 * FF + FF + i] = dactivated[n * FF + i] * gate * s;
            }
        }
        naive_linear_backward_(dnorm, D(TENSOR_GATE_WEIGHT), D(TENSOR_GATE_BIAS), dhidden, 2 * FF, b->norm2, W(TENSOR_GATE_WEIGHT), N, C, FF);
        naive_linear_backward_(dnorm, D(TENSOR_UP_WEIGHT), D(TENSOR_UP_BIAS), dhidden + FF, 2 * FF, b->norm2, W(TENSOR_UP_WEIGHT), N, C, FF);
    }
    naive_norm_backward_(g, d, dnorm, b->mid, u, TENSOR_NORM2_WEIGHT, TENSOR_NORM2_BIAS, N);
    // the attention's branch
    memcpy(dbranch, d, (size_t)(N * C) * sizeof *d);
    if (m->dropout > 0) naive_dropout_(g, dbranch, batch, (uint32_t)(2 * layer));
    naive_linear_backward_(dattention, D(TENSOR_O_WEIGHT), D(TENSOR_O_BIAS), dbranch, C, b->attention, W(TENSOR_O_WEIGHT), N, Q, C);
    naive_attention_backward_(dqkv, dattention, b->qkv, batch, m);
    naive_qk_backward_(g, dqkv, b->qkv_raw, u, batch);
    memset(dnorm, 0, (size_t)(N * C) * sizeof *dnorm);
    naive_linear_backward_(dnorm, D(TENSOR_Q_WEIGHT), D(TENSOR_Q_BIAS), dqkv, QKV, b->norm1, W(TENSOR_Q_WEIGHT), N, C, Q);
    naive_linear_backward_(dnorm, D(TENSOR_K_WEIGHT), D(TENSOR_K_BIAS), dqkv + Q, QKV, b->norm1, W(TENSOR_K_WEIGHT), N, C, KV);
    naive_linear_backward_(dnorm, D(TENSOR_V_WEIGHT), D(TENSOR_V_BIAS), dqkv + Q + KV, QKV, b->norm1, W(TENSOR_V_WEIGHT), N, C, KV);
    naive_norm_backward_(g, d, dnorm, b->in, u, TENSOR_NORM1_WEIGHT, TENSOR_NORM1_BIAS, N);
#undef W
#undef D
    double *all[] = {dbranch, dnorm, dactivated, dhidden, dattention, dqkv};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) free(all[i]);
}

// ----------------------------------------------------------------------------
// The model

// The head's weights: the embedding's when tied.
static inline int64_t naive_head_unit_(const NaiveGpt *g) { return g->model.config.tied ? 0 : model_head_unit(&g->model); }

// Fills logits and losses (0 where masked); returns the sum of losses.
static inline double naive_forward(NaiveGpt *g, const NaiveBatch *batch) {
    const ModelConfig *m = &g->model.config;
    const int64_t N = batch->tokens, C = m->channels, V = m->vocab, L = m->layers;
    const double *wte = naive_weight_(g, 0, TENSOR_WTE), *wpe = naive_weight_(g, 0, TENSOR_WPE);
    double *x = L > 0 ? g->blocks[0].in : g->last;
    for (int64_t n = 0; n < N; n++) {
        for (int64_t c = 0; c < C; c++) x[n * C + c] = wte[batch->ids[n] * C + c] + (wpe ? wpe[batch->positions[n] * C + c] : 0.0);
    }
    if (m->dropout > 0) naive_dropout_(g, x, batch, NAIVE_SITE_EMBEDDING);
    for (int64_t l = 0; l < L; l++) naive_block_(g, l + 1 < L ? g->blocks[l + 1].in : g->last, l, batch);
    naive_norm_(g, g->last_norm, g->last, model_head_unit(&g->model), TENSOR_NORM_WEIGHT, TENSOR_NORM_BIAS, N);
    naive_linear_(g->logits, V, g->last_norm, naive_weight_(g, naive_head_unit_(g), model_head_kind(m)), NULL, N, C, V);
    double total = 0.0;
    for (int64_t n = 0; n < N; n++) {
        const double *row = g->logits + n * V;
        double largest = -INFINITY, sum = 0.0;
        for (int64_t v = 0; v < V; v++) largest = fmax(largest, row[v]);
        for (int64_t v = 0; v < V; v++) sum += exp(row[v] - largest);
        g->losses[n] = batch->targets[n] < 0 ? 0.0 : largest + log(sum) - row[batch->targets[n]];
        total += g->losses[n];
    }
    return total;
}

// grad += scale * gradient of the sum of losses, of the batch that went forward last.
static inline void naive_backward(NaiveGpt *g, const NaiveBatch *batch, double scale) {
    const ModelConfig *m = &g->model.config;
    const int64_t N = batch->tokens, C = m->channels, V = m->vocab, head = naive_head_unit_(g);
    double *dlogits = naive_rows_(g, V), *dnorm = naive_rows_(g, C), *d = naive_rows_(g, C);
    for (int64_t n = 0; n < N; n++) {
        if (batch->targets[n] < 0) continue;
        const double *row = g->logits + n * V;
        const double log_sum = g->losses[n] + row[batch->targets[n]];
        for (int64_t v = 0; v < V; v++) dlogits[n * V + v] = scale * (exp(row[v] - log_sum) - (v == batch->targets[n]));
    }
    naive_linear_backward_(dnorm, naive_grad_(g, head, model_head_kind(m)), NULL, dlogits, V, g->last_norm,
                           naive_weight_(g, head, model_head_kind(m)), N, C, V);
    naive_norm_backward_(g, d, dnorm, g->last, model_head_unit(&g->model), TENSOR_NORM_WEIGHT, TENSOR_NORM_BIAS, N);
    for (int64_t l = m->layers - 1; l >= 0; l--) naive_block_backward_(g, d, l, batch);
    if (m->dropout > 0) naive_dropout_(g, d, batch, NAIVE_SITE_EMBEDDING);
    double *dwte = naive_grad_(g, 0, TENSOR_WTE), *dwpe = naive_grad_(g, 0, TENSOR_WPE);
    for (int64_t n = 0; n < N; n++) {
        for (int64_t c = 0; c < C; c++) {
            dwte[batch->ids[n] * C + c] += d[n * C + c];
            if (dwpe) dwpe[batch->positions[n] * C + c] += d[n * C + c];
        }
    }
    free(dlogits);
    free(dnorm);
    free(d);
}

static inline void naive_zero_grad(NaiveGpt *g) { memset(g->grad, 0, (size_t)g->elements * sizeof *g->grad); }

// Clips, updates, and returns the norm of the gradient before clipping.
static inline double naive_update(NaiveGpt *g, const NaiveAdamW *o) {
    double squares = 0.0;
    for (int64_t i = 0; i < g->elements; i++) squares += g->grad[i] * g->grad[i];
    const double norm = sqrt(squares), coefficient = o->clip > 0 ? fmin(1.0, o->clip / (norm + 1e-6)) : 1.0;
    const double t = (double)++g->updates;
    for (int tensor = 0; tensor < g->model.count; tensor++) {
        const double decay = g->model.tensors[tensor].decay ? o->weight_decay : 0.0;
        for (int64_t i = g->offset[tensor]; i < g->offset[tensor] + g->model.tensors[tensor].elements; i++) {
            const double grad = g->grad[i] * coefficient;
            g->adam_m[i] = o->beta1 * g->adam_m[i] + (1.0 - o->beta1) * grad;
            g->adam_v[i] = o->beta2 * g->adam_v[i] + (1.0 - o->beta2) * grad * grad;
            const double m_hat = g->adam_m[i] / (1.0 - pow(o->beta1, t)), v_hat = g->adam_v[i] / (1.0 - pow(o->beta2, t));
            g->param[i] -= o->lr * (m_hat / (sqrt(v_hat) + o->eps) + decay * g->param[i]);
        }
    }
    return norm;
}

#endif
