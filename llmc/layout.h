// layout.h: which part of the model a rank holds, under tensor parallelism (Shoeybi et al. 2019), pipeline stages and sharding: the
// layers, the slice of every tensor, whose sum a gradient needs, and the groups of ranks. Pure arithmetic on (model, flags, world, rank):
// it serves allocation on this rank and --dry-run for any other.
//
// Tensor parallelism. Column-parallel layers (q, k, v, fc, gate, up, and the vocabulary of embedding and head) are cut along rows of [out, in],
// row-parallel ones (o, proj, down) along columns; the rest is replicated. Heads and FF divide evenly. With fewer k/v heads than ranks, a head
// is replicated on neighbours. The vocabulary is cut into shares that differ by a row at most: nothing is padded.
//
// Pipeline. Virtual stage c*P + s is chunk c of stage s. Unit 0 (embedding) is on the first stage, the final norm and head on the last; with a
// tied head the last stage holds unit 0 as well, and the two copies are updated alike.
//
// Shards. Data-parallel ranks form runs of --shard-group neighbours, which share what --zero shards; the same place of every run is a replica.
#ifndef LLMC_LAYOUT_H
#define LLMC_LAYOUT_H

#include "llmc/mesh.h"     // Mesh, mesh_members
#include "llmc/model.h"    // ModelConfig, Tensor
#include "llmc/options.h"  // Options
#include "llmc/schedule.h" // ScheduleKind, schedule_check

typedef struct {
    Mesh mesh;
    ModelConfig config;  // of the whole model
    ModelConfig local;   // the same with the heads, kv_heads, ffn and vocab of this rank
    int64_t vocab_begin; // first row of this rank's vocabulary
    int kv_replicas;     // neighbouring tp ranks that hold the same k/v heads
    bool sp;
    int zero;              // stage 0 to 3; 0 where there is nobody to share with
    int shards, shard;     // ranks that share the state, and this one's place; 1, 0 for stage 0
    int replicas, replica; // of that group
    ScheduleKind schedule;
    int virtual_stages;   // V: chunks of a stage
    int64_t *chunk_begin; // (P*V + 1) first layer of every virtual stage; then L
} Layout;

// Sums over ranks that a gradient needs besides those over data-parallel ranks.
typedef enum { GRADIENT_WHOLE, GRADIENT_SUM_TP, GRADIENT_SUM_KV } GradientSum;

// What a rank holds of a tensor: a box of it, stored row-major without gaps.
typedef struct {
    bool held;
    int64_t begin[2], shape[2]; // rows, columns of the global tensor
    int64_t elements;
    bool counts;     // the first of its copies over tensor-parallel ranks and stages: counts in norms, is saved
    GradientSum sum; // over the copies, when tokens or heads are divided among them
} Part;

typedef enum { LAYOUT_TP, LAYOUT_KV, LAYOUT_PP, LAYOUT_DP, LAYOUT_SHARD, LAYOUT_REPLICA, LAYOUT_EMBEDDING, LAYOUT_GROUPS } LayoutGroup;
static const char *const layout_group_names[LAYOUT_GROUPS] = {"tp", "kv", "pp", "dp", "shard", "replica", "embedding"};

static inline int layout_virtual_count(const Layout *l) { return l->mesh.pp * l->virtual_stages; }
static inline int layout_virtual_stage(const Layout *l, int chunk) { return chunk * l->mesh.pp + l->mesh.at.pp; }
static inline bool layout_is_first(const Layout *l, int chunk) { return layout_virtual_stage(l, chunk) == 0; }
static inline bool layout_is_last(const Layout *l, int chunk) { return layout_virtual_stage(l, chunk) == layout_virtual_count(l) - 1; }
static inline bool layout_has_embedding(const Layout *l) { return l->mesh.at.pp == 0; }
static inline bool layout_has_head(const Layout *l) { return l->mesh.at.pp == l->mesh.pp - 1; }
// The rank of a replica of the model that speaks for it: it knows the loss.
static inline bool layout_speaks(const Layout *l) { return layout_has_head(l) && l->mesh.at.tp == 0; }

static inline int64_t layout_first_layer(const Layout *l, int chunk) { return l->chunk_begin[layout_virtual_stage(l, chunk)]; }
static inline int64_t layout_chunk_layers(const Layout *l, int chunk) {
    return l->chunk_begin[layout_virtual_stage(l, chunk) + 1] - layout_first_layer(l, chunk);
}
// Layers of the largest chunk of this stage.
static inline int64_t layout_slot_layers(const Layout *l) {
    int64_t layers = 0;
    for (int c = 0; c < l->virtual_stages; c++) layers = max_i64(layers, layout_chunk_layers(l, c));
    return layers;
}

static inline bool layout_holds_unit(const Layout *l, int unit) {
    if (unit == 0) return layout_has_embedding(l) || (l->config.tied && layout_has_head(l));
    if (unit == l->config.layers + 1) return layout_has_head(l);
    for (int c = 0; c < l->virtual_stages; c++) {
        const int64_t first = layout_first_layer(l, c) + 1;
        if (unit >= first && unit < first + layout_chunk_layers(l, c)) return true;
    }
    return false;
}

// Tokens of a micro-batch of N that this rank's norms, residual and dropout work on, and the first of them.
static inline int64_t layout_own_tokens(const Layout *l, int64_t N) { return l->sp ? N / l->mesh.tp : N; }
static inline int64_t layout_own_first(const Layout *l, int64_t N) { return l->sp ? N / l->mesh.tp * l->mesh.at.tp : 0; }

static inline int64_t layout_vocab_begin_(int64_t vocab, int tp, int rank) { return vocab * rank / tp; }

static inline Part layout_part(const Layout *l, const Tensor *t) {
    const Mesh *m = &l->mesh;
    const int tp = m->tp, r = m->at.tp;
    const bool kv = t->kind == TENSOR_K_WEIGHT || t->kind == TENSOR_V_WEIGHT || t->kind == TENSOR_K_BIAS || t->kind == TENSOR_V_BIAS;
    Part part = {.held = layout_holds_unit(l, t->unit), .shape = {t->shape[0], t->shape[1]}, .counts = r == 0};
    if (t->kind == TENSOR_WTE || t->kind == TENSOR_HEAD) {
        part.begin[0] = l->vocab_begin;
        part.shape[0] = l->local.vocab;
        part.counts = true;
    } else if (kv && tp > 1) {
        part.shape[0] = l->local.kv_heads * l->config.head_size;
        part.begin[0] = r / l->kv_replicas * part.shape[0];
        part.counts = r % l->kv_replicas == 0;
        part.sum = l->kv_replicas > 1 ? GRADIENT_SUM_KV : GRADIENT_WHOLE;
    } else if (t->shard != SHARD_NONE) {
        const int axis = t->shard == SHARD_ROWS ? 0 : 1;
        part.shape[axis] = t->shape[axis] / tp;
        part.begin[axis] = r * part.shape[axis];
        part.counts = true;
    } else if (tp > 1) {
        const bool heads = t->kind == TENSOR_Q_NORM || t->kind == TENSOR_K_NORM; // each rank sees its own heads
        const bool norm = t->kind == TENSOR_NORM1_WEIGHT || t->kind == TENSOR_NORM1_BIAS || t->kind == TENSOR_NORM2_WEIGHT ||
                          t->kind == TENSOR_NORM2_BIAS || t->kind == TENSOR_NORM_WEIGHT || t->kind == TENSOR_NORM_BIAS;
        part.sum = heads || (norm && l->sp) ? GRADIENT_SUM_TP : GRADIENT_WHOLE; // with sp each rank's norms see their own tokens
    }
    if (t->unit == 0 && !layout_has_embedding(l)) part.counts = false; // the last stage's copy of a tied embedding
    part.elements = part.held ? part.shape[0] * part.shape[1] : 0;
    part.counts = part.counts && part.held;
    return part;
}

// Where element `at` of a part is in the global tensor; *run: how many of the `count` elements from there lie together in both.
static inline int64_t layout_global_element(const Tensor *t, const Part *part, int64_t at, int64_t count, int64_t *run) {
    const int64_t width = part->shape[1], row = at / width, column = at % width;
    *run = width == t->shape[1] ? count : min_i64(count, width - column);
    return (part->begin[0] + row) * t->shape[1] + part->begin[1] + column;
}

// Members of one of this rank's groups, ascending (NULL: only counts); 0 when it is in none.
static inline int layout_members(const Layout *l, LayoutGroup group, int *members) {
    static const MeshGroup axes[LAYOUT_GROUPS] = {MESH_TP, MESH_TP, MESH_PP, MESH_DP_CP, MESH_DP_CP, MESH_DP_CP, MESH_EMBEDDING};
    int all = mesh_members(&l->mesh, axes[group], NULL), count = 0;
    int *ranks = base_new((size_t)max_i64(all, 1), sizeof *ranks);
    (void)mesh_members(&l->mesh, axes[group], ranks);
    const int run = group == LAYOUT_KV ? l->kv_replicas : l->shards;
    int own = 0;
    while (own < all && ranks[own] != l->mesh.rank) own++;
    for (int k = 0; k < all; k++) {
        if ((group == LAYOUT_KV || group == LAYOUT_SHARD) && k / run != own / run) continue;
        if (group == LAYOUT_REPLICA && k % run != own % run) continue;
        if (members != NULL) members[count] = ranks[k];
        count++;
    }
    free(ranks);
    return count;
}

// First layers of the virtual stages: every one has a layer, and the most expensive one costs the least that is possible. The head costs as
// much as the blocks whose matrix products have as many weights; the embedding, a look-up, nothing. Among equals later stages get more: in a
// 1f1b pipeline earlier ones hold more micro-batches.
static inline void layout_divide_layers_(const ModelConfig *m, int parts, int64_t *begin) {
    const double block =
        (double)m->channels * (double)(model_q_width(m) + model_qkv_width(m) + m->ffn + model_mlp_in_width(m)); // weights of a block's products
    const double head = (double)m->channels * (double)m->vocab / block;                                         // in blocks
    const int others = parts - 1;                                                                               // than the last
    int64_t last = 1, left = m->layers - parts, level = 1, ahead = 0; // the others have `level` layers, the last `ahead` of them one more
    while (left > 0) {
        for (; left > 0 && (others == 0 || (double)last + head <= (double)level); left--) last++;
        ahead = min_i64(left, others);
        left -= ahead;
        if (ahead == others) level++, ahead = 0;
    }
    begin[0] = 0;
    for (int p = 0; p < others; p++) begin[p + 1] = begin[p] + level + (p >= others - ahead);
    begin[parts] = begin[others] + last;
}

static inline bool layout_check_(const ModelConfig *m, const Options *o, Error *error) {
    const int64_t tp = o->tp;
    if (m->heads % tp != 0) return fail(error, CODE_USAGE, "--tp %lld: does not divide --heads %lld", (long long)tp, (long long)m->heads);
    if (m->kv_heads % tp != 0 && tp % m->kv_heads != 0) {
        return fail(error, CODE_USAGE, "--tp %lld: wanted a divisor or a multiple of --kv-heads %lld", (long long)tp, (long long)m->kv_heads);
    }
    if (m->ffn % tp != 0) return fail(error, CODE_USAGE, "--tp %lld: does not divide --ffn %lld", (long long)tp, (long long)m->ffn);
    if (m->vocab < tp) return fail(error, CODE_USAGE, "--tp %lld: more ranks than the vocabulary of %lld", (long long)tp, (long long)m->vocab);
    if (o->pp * o->virtual_stages > m->layers) {
        return fail(error, CODE_USAGE, "--pp %lld x --virtual-stages %lld: more stages than the %lld layers", (long long)o->pp,
                    (long long)o->virtual_stages, (long long)m->layers);
    }
    if (o->given[OPTION_bucket_mb] && o->zero >= 2) {
        return fail(error, CODE_USAGE, "--bucket-mb: --zero %lld reduces each block by itself (wanted --zero 0 or 1, or no --bucket-mb)",
                    (long long)o->zero);
    }
    if (o->given[OPTION_shard_group] && o->zero == 0) {
        return fail(error, CODE_USAGE, "--shard-group: --zero 0 shards nothing (wanted --zero 1, 2 or 3)");
    }
    return true;
}

// The layout of a rank, or false with the flag that makes it impossible. To be given to layout_free().
static inline bool layout_create(Layout *l, const ModelConfig *m, const Options *o, int world, int rank, Error *error) {
    *l = (Layout){.config = *m, .local = *m, .kv_replicas = 1, .zero = (int)o->zero, .schedule = (ScheduleKind)o->pp_schedule};
    if (!mesh_create(world, rank, (int)o->tp, 1, (int)o->pp, 1, &l->mesh, error) || !layout_check_(m, o, error)) return false;
    const Mesh *mesh = &l->mesh;
    l->virtual_stages = (int)o->virtual_stages;
    const ScheduleShape shape = {l->schedule, mesh->pp, 1, l->virtual_stages};
    if (!schedule_check(&shape, error)) return false;
    const int dp = mesh->dp * mesh->cp;
    l->shards = o->zero == 0 ? 1 : o->given[OPTION_shard_group] ? (int)o->shard_group : dp;
    if (dp % l->shards != 0) {
        return fail(error, CODE_USAGE, "--shard-group %d: does not divide the %d data-parallel ranks", l->shards, dp);
    }
    if (l->shards == 1) l->zero = 0; // nobody to share with
    const int place = mesh->at.cp + mesh->cp * mesh->at.dp;
    l->shard = place % l->shards, l->replica = place / l->shards, l->replicas = dp / l->shards;
    l->sp = o->sp && mesh->tp > 1;
    l->local.heads = m->heads / mesh->tp;
    l->local.kv_heads = max_i64(1, m->kv_heads / mesh->tp);
    l->kv_replicas = (int)max_i64(1, mesh->tp / m->kv_heads);
    l->local.ffn = m->ffn / mesh->tp;
    l->vocab_begin = layout_vocab_begin_(m->vocab, mesh->tp, mesh->at.tp);
    l->local.vocab = layout_vocab_begin_(m->vocab, mesh->tp, mesh->at.tp + 1) - l->vocab_begin;
    l->chunk_begin = base_new((size_t)layout_virtual_count(l) + 1, sizeof *l->chunk_begin);
    layout_divide_layers_(m, layout_virtual_count(l), l->chunk_begin);
    return true;
}

// Sequences of a step: --global-batch, or a micro-batch on every data-parallel rank.
static inline int64_t layout_global_batch(const Layout *l, const Options *o) {
    return o->global_batch > 0 ? o->global_batch : o->micro_batch * l->mesh.dp * l->mesh.cp;
}

// The pipeline schedule of a step, or false with the flag that makes it impossible.
static inline bool layout_schedule(const Layout *l, const Options *o, ScheduleShape *shape, Error *error) {
    const int64_t ranks = (int64_t)l->mesh.dp * l->mesh.cp, batch = layout_global_batch(l, o);
    if (batch % (o->micro_batch * ranks) != 0) {
        return fail(error, CODE_USAGE, "--global-batch: got %lld, wanted a multiple of --micro-batch %lld x %lld data-parallel rank%s",
                    (long long)batch, (long long)o->micro_batch, (long long)ranks, ranks == 1 ? "" : "s");
    }
    *shape = (ScheduleShape){l->schedule, l->mesh.pp, (int)(batch / (o->micro_batch * ranks)), l->virtual_stages};
    return schedule_check(shape, error);
}

static inline void layout_free(Layout *l) {
    free(l->chunk_begin);
    *l = (Layout){0};
}

#endif
