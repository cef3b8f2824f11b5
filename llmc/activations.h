// activations.h: what forward keeps for backward, and the scratch of both, in one arena. One function lays it out, for
// --dry-run (base NULL) and for allocation alike. No data, no device calls.
#ifndef LLMC_ACTIVATIONS_H
#define LLMC_ACTIVATIONS_H

#include "llmc/device.h" // Buffer
#include "llmc/model.h"  // ModelConfig

// Kept per block. N = tokens of a micro-batch at most; D = the compute dtype.
typedef struct {
    Buffer in;           // (N, C) D: the residual stream that enters the block
    Buffer mean1, rstd1; // (N) F32
    Buffer norm1;        // (N, C) D
    Buffer qkv_raw;      // (N, QKV) D: before qk-norm; the same memory as qkv when there is none
    Buffer qk_rstd;      // (N, NH+NKV) F32, with qk-norm
    Buffer qkv;          // (N, QKV) D: as attention reads it
    Buffer lse;          // (NH, N) F32
    Buffer att;          // (N, NH*HS) D
    Buffer mid;          // (N, C) D: residual stream between attention and MLP
    Buffer mean2, rstd2; // (N) F32
    Buffer norm2;        // (N, C) D
    Buffer fc;           // (N, FF or 2*FF) D: before the activation
    Buffer act;          // (N, FF) D: after it
} BlockActs;

typedef struct {
    int64_t capacity; // N at most
    Dtype dtype;
    BlockActs *blocks; // (L) host array
    Buffer branch;     // (N, C) D: output of attention or MLP, before it joins the residual stream
    Buffer last;       // (N, C) D: residual stream after the last block
    Buffer mean, rstd; // (N) F32 of the final norm
    Buffer norm;       // (N, C) D: what the head reads
    Buffer losses;     // (N) F32
    // classifier, a chunk of tokens at a time
    int64_t chunk;  // tokens
    Buffer logits;  // (chunk, V) F32
    Buffer dlogits; // (chunk, V) D; the memory of logits when D is F32
    // gradients, backward only
    Buffer dresidual; // (N, C) D: of the residual stream, walked from the last block to the first
    Buffer dbranch;   // (N, C) D: only with dropout
    Buffer dnorm;     // (N, C) D
    Buffer dqkv;      // (N, QKV) D
    Buffer datt;      // (N, NH*HS) D
    Buffer delta;     // (NH, N) F32
    Buffer dfc;       // (N, FF or 2*FF) D
    Buffer dact;      // (N, FF) D: only swiglu
    // the batch
    Buffer ids, targets, positions, token_index;  // (N) I32
    Buffer cu_seqlens;                            // (N+1) I32
    Buffer rope;                                  // (T, HS) F32: cos | sin
    size_t kept_bytes, head_bytes, scratch_bytes; // by purpose; their sum is the arena
} Activations;

typedef struct {
    char *base; // NULL: only count
    size_t used;
} ArenaCursor_;

static inline Buffer arena_take_(ArenaCursor_ *arena, int64_t elements, Dtype dtype) {
    Buffer buffer = {arena->base == NULL ? NULL : arena->base + arena->used, dtype};
    arena->used += ((size_t)elements * dtype_bytes(dtype) + 63) / 64 * 64;
    return buffer;
}

// Tokens whose logits exist at once: about 256 MiB of F32 logits, equal chunks, at least 64 tokens.
static inline int64_t activations_chunk(int64_t N, int64_t V) {
    const int64_t limit = max_i64(64, ((int64_t)1 << 26) / V);
    return min_i64(N, round_up(ceil_div(N, ceil_div(N, limit)), 64));
}

// Lays the arena out from `base` and returns its bytes; with base NULL only counts. blocks (L) is filled when not NULL.
static inline size_t activations_layout(Activations *a, BlockActs *blocks, void *base, const ModelConfig *m, Dtype dtype, int64_t B, int64_t T) {
    const int64_t N = B * T, C = m->channels, Q = model_q_width(m), QKV = model_qkv_width(m), MLP = model_mlp_in_width(m), FF = m->ffn;
    ArenaCursor_ arena = {base, 0};
    *a = (Activations){.capacity = N, .dtype = dtype, .blocks = blocks, .chunk = activations_chunk(N, m->vocab)};
    for (int64_t l = 0; l < m->layers; l++) {
        BlockActs b = {0};
        b.in = arena_take_(&arena, N * C, dtype);
        b.mean1 = arena_take_(&arena, N, DTYPE_F32);
        b.rstd1 = arena_take_(&arena, N, DTYPE_F32);
        b.norm1 = arena_take_(&arena, N * C, dtype);
        b.qkv = arena_take_(&arena, N * QKV, dtype);
        b.qkv_raw = m->qk_norm ? arena_take_(&arena, N * QKV, dtype) : b.qkv;
        if (m->qk_norm) b.qk_rstd = arena_take_(&arena, N * (m->heads + m->kv_heads), DTYPE_F32);
        b.lse = arena_take_(&arena, N * m->heads, DTYPE_F32);
        b.att = arena_take_(&arena, N * Q, dtype);
        b.mid = arena_take_(&arena, N * C, dtype);
        b.mean2 = arena_take_(&arena, N, DTYPE_F32);
        b.rstd2 = arena_take_(&arena, N, DTYPE_F32);
        b.norm2 = arena_take_(&arena, N * C, dtype);
        b.fc = arena_take_(&arena, N * MLP, dtype);
        b.act = arena_take_(&arena, N * FF, dtype);
        if (blocks != NULL) blocks[l] = b;
    }
    a->last = arena_take_(&arena, N * C, dtype);
    a->mean = arena_take_(&arena, N, DTYPE_F32);
    a->rstd = arena_take_(&arena, N, DTYPE_F32);
    a->norm = arena_take_(&arena, N * C, dtype);
    a->kept_bytes = arena.used;
    a->losses = arena_take_(&arena, N, DTYPE_F32);
    a->logits = arena_take_(&arena, a->chunk * m->vocab, DTYPE_F32);
    a->dlogits = dtype == DTYPE_F32 ? a->logits : arena_take_(&arena, a->chunk * m->vocab, dtype);
    a->head_bytes = arena.used - a->kept_bytes;
    a->branch = arena_take_(&arena, N * C, dtype);
    a->dresidual = arena_take_(&arena, N * C, dtype);
    if (m->dropout > 0) a->dbranch = arena_take_(&arena, N * C, dtype);
    a->dnorm = arena_take_(&arena, N * C, dtype);
    a->dqkv = arena_take_(&arena, N * QKV, dtype);
    a->datt = arena_take_(&arena, N * Q, dtype);
    a->delta = arena_take_(&arena, N * m->heads, DTYPE_F32);
    a->dfc = arena_take_(&arena, N * MLP, dtype);
    if (m->activation == ACTIVATION_SWIGLU) a->dact = arena_take_(&arena, N * FF, dtype);
    a->ids = arena_take_(&arena, N, DTYPE_I32);
    a->targets = arena_take_(&arena, N, DTYPE_I32);
    a->positions = arena_take_(&arena, N, DTYPE_I32);
    a->token_index = arena_take_(&arena, N, DTYPE_I32);
    a->cu_seqlens = arena_take_(&arena, N + 1, DTYPE_I32);
    if (m->position == POSITION_ROPE) a->rope = arena_take_(&arena, T * m->head_size, DTYPE_F32);
    a->scratch_bytes = arena.used - a->kept_bytes - a->head_bytes;
    return arena.used;
}

#endif
