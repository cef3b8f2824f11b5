// activations.h: what forward keeps for backward, and the scratch of both, in one arena. One function lays it out, for
// --dry-run (base NULL) and for allocation alike. No data, no device calls.
//
// What forward keeps is in slots, one for each micro-batch (and chunk of layers) whose backward is still to come: schedule.h says how many. N is
// the tokens of a micro-batch at most; widths are this rank's (layout.local). With sequence parallelism the residual stream, and what norms save,
// hold this rank's S = N/tp tokens; matrix products and attention see all N. Without it S = N. D is the compute dtype.
#ifndef LLMC_ACTIVATIONS_H
#define LLMC_ACTIVATIONS_H

#include "llmc/device.h" // Buffer, buffer_of
#include "llmc/layout.h" // Layout
#include "llmc/model.h"  // ModelConfig

// Kept per block.
typedef struct {
    Buffer in;           // (S, C) D: the residual stream that enters the block
    Buffer mean1, rstd1; // (S) F32
    Buffer norm1;        // (N, C) D
    Buffer qkv_raw;      // (N, QKV) D: before qk-norm; the same memory as qkv when there is none
    Buffer qk_rstd;      // (N, NH+NKV) F32, with qk-norm
    Buffer qkv;          // (N, QKV) D: as attention reads it
    Buffer lse;          // (NH, N) F32
    Buffer att;          // (N, NH*HS) D
    Buffer mid;          // (S, C) D: residual stream between attention and MLP
    Buffer mean2, rstd2; // (S) F32
    Buffer norm2;        // (N, C) D
    Buffer fc;           // (N, FF or 2*FF) D: before the activation
    Buffer act;          // (N, FF) D: after it
} BlockActs;

// Kept per micro-batch and chunk of layers.
typedef struct {
    BlockActs *blocks; // (layers of the chunk); blocks[0].in is `embedding` or a received input
    Buffer embedding;  // (S, C) D: on the first stage
    Buffer last;       // (S, C) D: residual stream after the last block
    Buffer mean, rstd; // (S) F32 of the final norm; this and what follows on the last stage
    Buffer norm;       // (N, C) D: what the head reads
} ChunkActs;

// Gradients of a block's matrix products' outputs: scratch where the gradients of weights are made at once, else a stash that waits for them.
typedef struct {
    Buffer dmlp, datt_out; // (N, C) D: of the MLP's and the attention's output; absent where the residual stream's gradient serves
    Buffer dfc;            // (N, FF or 2*FF) D
    Buffer dqkv;           // (N, QKV) D
    Buffer norms[6];       // stash only, F32: gradients of norm1, norm2 (weight, bias: (C)), q_norm, k_norm ((HS))
} BlockGrads;

// Sizes that do not follow from the layout.
typedef struct {
    Dtype dtype;
    int64_t micro_batch, seq;              // B, T
    int slots, inputs, gradients, stashes; // of the schedule; stashes 0: weights' gradients are made at once
} ActivationShape;

typedef struct {
    int64_t capacity; // N at most
    ActivationShape shape;
    ChunkActs *slots;     // (slots)
    Buffer *inputs;       // (inputs) of (S, C) D: received from the stage before
    Buffer *gradients;    // (gradients) of (S, C) D: of the residual stream, walked from a chunk's last block to its first
    BlockGrads **stashes; // (stashes) of (layers)
    BlockGrads grads;     // scratch of a block
    Buffer branch;        // (N, C) D: output of attention or MLP, before it joins the residual stream
    Buffer losses;        // (N) F32
    // classifier, a chunk of tokens at a time; on the last stage
    int64_t chunk;    // tokens
    Buffer logits;    // (chunk, V; rows apart: activations_logits_row) D; then their gradients, in place
    Buffer stats;     // (chunk, 3) F32, with tensor parallelism, and
    Buffer all_stats; // (tp, chunk, 3) F32
    // gradients, backward only
    Buffer dnorm; // (N, C) D
    Buffer datt;  // (N, NH*HS) D
    Buffer delta; // (NH, N) F32
    Buffer dact;  // (N, FF) D: only swiglu
    // the batch
    Buffer ids, targets, positions, token_index; // (N) I32
    Buffer cu_seqlens;                           // (N+1) I32
    Buffer rope;                                 // (T, HS) F32: cos | sin
    // by purpose; their sum is the arena: activations that wait for backward, logits, messages between stages, everything else
    size_t kept_bytes, head_bytes, boundary_bytes, scratch_bytes;
} Activations;

typedef struct {
    char *base; // NULL: only count
    size_t used;
} ArenaCursor_;

static inline Buffer arena_take_(ArenaCursor_ *arena, int64_t elements, Dtype dtype) {
    Buffer buffer = buffer_of(arena->base == NULL ? NULL : arena->base + arena->used, dtype);
    arena->used += ((size_t)elements * dtype_bytes(dtype) + 63) / 64 * 64;
    return buffer;
}

// Elements from row to row of logits: a multiple of 64, so that each begins on a cache line whatever the vocabulary. GPT-2's of 50257
// columns, side by side, would keep matrix products and kernels from 16-byte loads. The columns behind V are never read.
static inline int64_t activations_logits_row(int64_t V) { return round_up(V, 64); }

// Tokens whose logits exist at once: about 256 MiB of them in F32, half of that in BF16; equal chunks, at least 64 tokens.
static inline int64_t activations_chunk(int64_t N, int64_t V) {
    const int64_t limit = max_i64(64, ((int64_t)1 << 26) / activations_logits_row(V));
    return min_i64(N, round_up(ceil_div(N, ceil_div(N, limit)), 64));
}

// Tokens of a micro-batch at most: B*T, for sequence parallelism rounded up to a multiple of tp.
static inline int64_t activations_capacity(const Layout *layout, int64_t micro_batch, int64_t seq) {
    return round_up(micro_batch * seq, layout->sp ? layout->mesh.tp : 1);
}

static inline void activations_block_(BlockActs *b, ArenaCursor_ *arena, const ModelConfig *m, Dtype D, int64_t N, int64_t S, bool first) {
    const int64_t C = m->channels, QKV = model_qkv_width(m);
    *b = (BlockActs){0};
    if (!first) b->in = arena_take_(arena, S * C, D);
    b->mean1 = arena_take_(arena, S, DTYPE_F32);
    b->rstd1 = arena_take_(arena, S, DTYPE_F32);
    b->norm1 = arena_take_(arena, N * C, D);
    b->qkv = arena_take_(arena, N * QKV, D);
    b->qkv_raw = m->qk_norm ? arena_take_(arena, N * QKV, D) : b->qkv;
    if (m->qk_norm) b->qk_rstd = arena_take_(arena, N * (m->heads + m->kv_heads), DTYPE_F32);
    b->lse = arena_take_(arena, N * m->heads, DTYPE_F32);
    b->att = arena_take_(arena, N * model_q_width(m), D);
    b->mid = arena_take_(arena, S * C, D);
    b->mean2 = arena_take_(arena, S, DTYPE_F32);
    b->rstd2 = arena_take_(arena, S, DTYPE_F32);
    b->norm2 = arena_take_(arena, N * C, D);
    b->fc = arena_take_(arena, N * model_mlp_in_width(m), D);
    b->act = arena_take_(arena, N * m->ffn, D);
}

static inline void activations_slot_(ChunkActs *slot, ArenaCursor_ *arena, const Layout *layout, Dtype D, int64_t N, int64_t S) {
    const int64_t C = layout->config.channels, layers = layout_slot_layers(layout);
    if (layout_has_embedding(layout)) slot->embedding = arena_take_(arena, S * C, D);
    for (int64_t l = 0; l < layers; l++) {
        BlockActs counted;
        activations_block_(arena->base != NULL ? &slot->blocks[l] : &counted, arena, &layout->local, D, N, S, l == 0);
    }
    slot->last = arena_take_(arena, S * C, D);
    if (!layout_has_head(layout)) return;
    slot->mean = arena_take_(arena, S, DTYPE_F32);
    slot->rstd = arena_take_(arena, S, DTYPE_F32);
    slot->norm = arena_take_(arena, N * C, D);
}

// whole: (N, C) gradients of branches have memory of their own. stash: it keeps the gradients of norms too.
static inline BlockGrads activations_grads_(ArenaCursor_ *arena, const ModelConfig *m, Dtype D, int64_t N, bool whole, bool stash) {
    const int64_t C = m->channels;
    BlockGrads g = {0};
    if (whole) g.dmlp = arena_take_(arena, N * C, D);
    if (whole) g.datt_out = stash ? arena_take_(arena, N * C, D) : g.dmlp;
    g.dfc = arena_take_(arena, N * model_mlp_in_width(m), D);
    g.dqkv = arena_take_(arena, N * model_qkv_width(m), D);
    for (int i = 0; stash && i < 6; i++) g.norms[i] = arena_take_(arena, i < 4 ? C : m->head_size, DTYPE_F32);
    return g;
}

// Lays the arena out from `base` and returns its bytes; with base NULL only counts and touches no arrays.
static inline size_t activations_layout(Activations *a, void *base, const Layout *layout, const ActivationShape *shape) {
    const ModelConfig *m = &layout->local;
    const Dtype D = shape->dtype;
    const int64_t N = activations_capacity(layout, shape->micro_batch, shape->seq), S = layout_own_tokens(layout, N), C = m->channels;
    const bool split = shape->stashes > 0;
    ArenaCursor_ arena = {base, 0};
    a->capacity = N, a->shape = *shape, a->chunk = activations_chunk(N, m->vocab);
    for (int i = 0; i < shape->slots; i++) {
        ChunkActs counted = {0};
        if (base == NULL && i == 1) { // the others are like the first
            arena.used *= (size_t)shape->slots;
            break;
        }
        activations_slot_(base != NULL ? &a->slots[i] : &counted, &arena, layout, D, N, S);
    }
    const size_t slot_bytes = arena.used;
    for (int i = 0; i < shape->stashes; i++) {
        for (int64_t l = 0; l < layout_slot_layers(layout); l++) {
            const BlockGrads grads = activations_grads_(&arena, m, D, N, true, true);
            if (base != NULL) a->stashes[i][l] = grads;
        }
        if (base == NULL) {
            arena.used = slot_bytes + (arena.used - slot_bytes) * (size_t)shape->stashes;
            break;
        }
    }
    a->kept_bytes = arena.used;
    for (int i = 0; i < shape->inputs + shape->gradients; i++) {
        const Buffer buffer = arena_take_(&arena, S * C, D);
        if (base != NULL) *(i < shape->inputs ? &a->inputs[i] : &a->gradients[i - shape->inputs]) = buffer;
        if (base == NULL) {
            arena.used = a->kept_bytes + (arena.used - a->kept_bytes) * (size_t)(shape->inputs + shape->gradients);
            break;
        }
    }
    a->boundary_bytes = arena.used - a->kept_bytes;
    a->losses = arena_take_(&arena, N, DTYPE_F32);
    if (layout_has_head(layout)) {
        const int64_t row = activations_logits_row(m->vocab);
        a->logits = arena_take_(&arena, a->chunk * row, D), a->logits.row = row;
        if (layout->mesh.tp > 1) a->stats = arena_take_(&arena, a->chunk * 3, DTYPE_F32);
        if (layout->mesh.tp > 1) a->all_stats = arena_take_(&arena, layout->mesh.tp * a->chunk * 3, DTYPE_F32);
    }
    a->head_bytes = arena.used - a->kept_bytes - a->boundary_bytes;
    a->branch = arena_take_(&arena, N * C, D);
    if (!split) a->grads = activations_grads_(&arena, m, D, N, m->dropout > 0 || layout->sp, false);
    a->dnorm = arena_take_(&arena, N * C, D);
    a->datt = arena_take_(&arena, N * model_q_width(m), D);
    a->delta = arena_take_(&arena, N * m->heads, DTYPE_F32);
    if (m->activation == ACTIVATION_SWIGLU) a->dact = arena_take_(&arena, N * m->ffn, D);
    a->ids = arena_take_(&arena, N, DTYPE_I32);
    a->targets = arena_take_(&arena, N, DTYPE_I32);
    a->positions = arena_take_(&arena, N, DTYPE_I32);
    a->token_index = arena_take_(&arena, N, DTYPE_I32);
    a->cu_seqlens = arena_take_(&arena, N + 1, DTYPE_I32);
    if (m->position == POSITION_ROPE) a->rope = arena_take_(&arena, shape->seq * m->head_size, DTYPE_F32);
    a->scratch_bytes = arena.used - a->kept_bytes - a->boundary_bytes - a->head_bytes;
    return arena.used;
}

// The arrays that activations_layout fills when it has a base.
static inline void activations_create(Activations *a, const Layout *layout, const ActivationShape *shape) {
    const size_t layers = (size_t)layout_slot_layers(layout);
    *a = (Activations){0};
    a->slots = base_new((size_t)max_i64(shape->slots, 1), sizeof *a->slots);
    a->inputs = base_new((size_t)max_i64(shape->inputs, 1), sizeof *a->inputs);
    a->gradients = base_new((size_t)max_i64(shape->gradients, 1), sizeof *a->gradients);
    a->stashes = base_new((size_t)max_i64(shape->stashes, 1), sizeof *a->stashes);
    for (int i = 0; i < shape->slots; i++) a->slots[i].blocks = base_new(layers, sizeof *a->slots[i].blocks);
    for (int i = 0; i < shape->stashes; i++) a->stashes[i] = base_new(layers, sizeof *a->stashes[i]);
}

static inline void activations_free(Activations *a) {
    for (int i = 0; i < a->shape.slots; i++) free(a->slots[i].blocks);
    for (int i = 0; i < a->shape.stashes; i++) free(a->stashes[i]);
    free(a->slots);
    free(a->inputs);
    free(a->gradients);
    free(a->stashes);
    *a = (Activations){0};
}

#endif
