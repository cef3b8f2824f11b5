// plan_comm.h: how much a rank will communicate in an optimizer step, by purpose and kind, as the counters of comm.h count it (elements times
// their size of the local input or output), and what of it a rank sends. Pure. Validation, sampling and checkpoints are not in it.
//
// With N ranks in a group, g and p the bytes of this rank's gradients and parameters (whole, in the formats they travel in), M micro-batches:
//   zero 0   all-reduce g                                    zero 1   reduce-scatter g, all-gather p
//   zero 2   reduce-scatter M*g, all-gather p                zero 3   reduce-scatter M*g, all-gather p for every time that blocks are not at hand
// and where shards have replicas (--shard-group) an all-reduce of a shard's g. Tensor parallelism works on (tokens, C) in the compute format:
// two sums forward and two backward for each block and micro-batch; with sequence parallelism a sum is a reduce-scatter and an all-gather.
#ifndef LLMC_PLAN_COMM_H
#define LLMC_PLAN_COMM_H

#include "llmc/comm.h"        // CommKind, COMM_KINDS
#include "llmc/plan_layout.h" // PlanShort_, plan_short_, plan_blocks

// ----------------------------------------------------------------------------
// Gathers of blocks in stage 3

// The block slots of zero_comm.h on paper.
typedef struct {
    int64_t unit[ZERO_BLOCK_SLOTS];
    int slots, current;
    int64_t gathers;
} PlanSlots_;

static inline int plan_slot_take_(PlanSlots_ *s, int64_t unit) {
    for (int k = 0; k < s->slots; k++) {
        if (s->unit[k] == unit) return k;
    }
    const int k = s->slots > 1 && s->current == 0 ? 1 : 0; // the one that was not used last
    s->unit[k] = unit;
    s->gathers++;
    return k;
}

// The blocks of a chunk in turn; with two slots the next one is gathered ahead, into the other.
static inline void plan_slots_pass_(PlanSlots_ *s, const Layout *l, const Action *a) {
    const int64_t first = layout_first_layer(l, a->chunk) + 1, layers = layout_chunk_layers(l, a->chunk);
    for (int64_t i = 0; i < layers; i++) {
        const int64_t unit = a->kind == ACTION_FORWARD ? first + i : first + layers - 1 - i;
        s->current = plan_slot_take_(s, unit);
        if (s->slots > 1 && i + 1 < layers) (void)plan_slot_take_(s, a->kind == ACTION_FORWARD ? unit + 1 : unit - 1);
    }
}

static inline PlanSlots_ plan_slots_begin_(const Layout *l, int slots) {
    PlanSlots_ s = {.slots = (int)min_i64(min_i64(slots, ZERO_BLOCK_SLOTS), plan_blocks(l)), .current = -1};
    for (int k = 0; k < ZERO_BLOCK_SLOTS; k++) s.unit[k] = -1;
    return s;
}

// Blocks that a rank gathers in a step in stage 3, by walking its list: `slots` blocks are kept, 2 with --overlap, else 1. Gradients of weights
// alone (zb) need no parameters. layout: of a rank of the list's stage.
static inline int64_t plan_block_gathers(const Schedule *schedule, const Layout *layout, int slots) {
    PlanSlots_ s = plan_slots_begin_(layout, slots);
    for (int64_t i = 0; i < schedule->count; i++) {
        const Action *a = &schedule->actions[i];
        if (a->kind == ACTION_FORWARD || a->kind == ACTION_BACKWARD || a->kind == ACTION_BACKWARD_INPUT) plan_slots_pass_(&s, layout, a);
    }
    return s.gathers;
}

static inline int64_t plan_gathers_of_(const ScheduleShape *shape, const Layout *layout, int slots) {
    Schedule schedule;
    Error error = {0};
    if (!schedule_build(&schedule, shape, layout->mesh.at.pp, &error)) die_error(&error); // a part of a shape that was checked
    const int64_t gathers = plan_block_gathers(&schedule, layout, slots);
    schedule_free(&schedule);
    return gathers;
}

// The same for a shape with any number of micro-batches.
static inline int64_t plan_step_gathers(const ScheduleShape *shape, const Layout *layout, int slots) {
    PlanShort_ part = plan_short_(shape);
    const int64_t gathers = plan_gathers_of_(&part.shape, layout, slots);
    if (part.periods == 0) return gathers;
    part.shape.microbatches += part.period;
    return gathers + part.periods * (plan_gathers_of_(&part.shape, layout, slots) - gathers);
}

// ----------------------------------------------------------------------------
// Volumes

typedef enum {
    PLAN_COMM_GRADIENTS,  // over data-parallel ranks
    PLAN_COMM_PARAMETERS, // over the ranks that share them
    PLAN_COMM_LAYERS,     // activations and their gradients over tensor-parallel ranks
    PLAN_COMM_COPIES,     // gradients of parameters that tensor-parallel ranks hold copies of
    PLAN_COMM_PIPELINE,   // activations and their gradients between stages
    PLAN_COMM_EMBEDDING,  // gradients of the two copies of a tied embedding
    PLAN_COMM_OTHER,      // loss, norm, tokens, whether to stop
    PLAN_COMM_PURPOSES
} PlanPurpose;
static const char *const plan_purpose_names[PLAN_COMM_PURPOSES] = {
    "gradients", "parameters", "tensor parallel", "gradients of copies", "pipeline", "tied embedding", "other"};

// Numbers of 8 bytes that all ranks sum in a step: loss, norm, tokens, whether to stop, whether a checkpoint is written.
enum { PLAN_COMM_SCALARS = 5 };

// Double: exact up to 2^53, and no flags make it wrap.
typedef struct {
    double bytes[PLAN_COMM_PURPOSES][COMM_KINDS]; // as counted
    double sent[PLAN_COMM_PURPOSES];              // by this rank, without what it keeps for itself
} PlanComm;

// `bytes` on a group of `size` ranks; groups of one count nothing.
static inline void plan_comm_add_(PlanComm *comm, PlanPurpose purpose, CommKind kind, int size, double bytes) {
    if (size < 2) return;
    const double share = (double)(size - 1) / size;
    comm->bytes[purpose][kind] += bytes;
    comm->sent[purpose] += kind == COMM_RECV ? 0 : kind == COMM_SEND ? bytes : kind == COMM_ALL_REDUCE ? 2 * share * bytes : share * bytes;
}

static inline double plan_comm_counted(const PlanComm *comm) {
    double bytes = 0;
    for (int p = 0; p < PLAN_COMM_PURPOSES; p++) {
        for (int k = 0; k < COMM_KINDS; k++) bytes += comm->bytes[p][k];
    }
    return bytes;
}
static inline double plan_comm_sent(const PlanComm *comm) {
    double bytes = 0;
    for (int p = 0; p < PLAN_COMM_PURPOSES; p++) bytes += comm->sent[p];
    return bytes;
}

// Gradients and parameters: what zero_comm.h moves.
static inline void plan_comm_state_(PlanComm *comm, const Model *model, const Layout *l, const ZeroConfig *config, const ScheduleShape *schedule) {
    ZeroRange *range = base_new((size_t)model->units, sizeof *range);
    const double M = schedule->microbatches, elements = (double)zero_layout(model, l, NULL, range), shard = elements / l->shards;
    const double grad_bytes = config->reduce_bf16 ? 2 : 4, param_bytes = (double)dtype_bytes(config->dtype);
    const double times = l->zero >= 2 ? M : 1; // that gradients travel in a step
    if (l->shards == 1) {
        plan_comm_add_(comm, PLAN_COMM_GRADIENTS, COMM_ALL_REDUCE, l->replicas, times * elements * grad_bytes);
    } else {
        plan_comm_add_(comm, PLAN_COMM_GRADIENTS, COMM_REDUCE_SCATTER, l->shards, times * elements * grad_bytes);
        plan_comm_add_(comm, PLAN_COMM_GRADIENTS, COMM_ALL_REDUCE, l->replicas, shard * grad_bytes);
    }
    if (l->zero == 1 || l->zero == 2) plan_comm_add_(comm, PLAN_COMM_PARAMETERS, COMM_ALL_GATHER, l->shards, elements * param_bytes);
    if (l->zero == 3 && l->shards > 1) {
        int blocks;
        const double block = (double)zero_largest_block_(model, range, &blocks);
        const double gathers = (double)plan_step_gathers(schedule, l, config->overlap ? ZERO_BLOCK_SLOTS : 1);
        const double ends = (double)(range[0].count + range[model_head_unit(model)].count); // once a step
        plan_comm_add_(comm, PLAN_COMM_PARAMETERS, COMM_ALL_GATHER, l->shards, (ends + gathers * block) * param_bytes);
    }
    if (l->config.tied && l->mesh.pp > 1 && layout_holds_unit(l, 0)) {
        plan_comm_add_(comm, PLAN_COMM_EMBEDDING, COMM_ALL_REDUCE, 2, (double)(range[0].count / l->shards) * 4);
    }
    for (int i = 0; i < model->count; i++) {
        const Part part = layout_part(l, &model->tensors[i]);
        if (part.sum == GRADIENT_WHOLE) continue;
        plan_comm_add_(comm, PLAN_COMM_COPIES, COMM_ALL_REDUCE, part.sum == GRADIENT_SUM_TP ? l->mesh.tp : l->kv_replicas,
                       times * (double)part.elements * 4);
    }
    free(range);
}

// Activations and their gradients, for micro-batches of N tokens.
static inline void plan_comm_activations_(PlanComm *comm, const Layout *l, Dtype dtype, int64_t N, const ScheduleShape *schedule) {
    const int tp = l->mesh.tp;
    const double M = schedule->microbatches, blocks = (double)plan_blocks(l), row = (double)l->config.channels * (double)dtype_bytes(dtype);
    const double whole = M * (double)N * row;                          // (N, C) in every micro-batch
    const double boundary = M * (double)layout_own_tokens(l, N) * row; // (S, C)
    const bool first = layout_has_embedding(l), last = layout_has_head(l);
    if (l->sp) {
        // A block: gather, attention, scatter, gather, MLP, scatter; backward the same. Embedding: scatter, backward gather. Head: the reverse.
        const double ends = (first ? 1 : 0) + (last ? 1 : 0);
        plan_comm_add_(comm, PLAN_COMM_LAYERS, COMM_REDUCE_SCATTER, tp, (4 * blocks + ends) * whole);
        plan_comm_add_(comm, PLAN_COMM_LAYERS, COMM_ALL_GATHER, tp, (4 * blocks + ends) * whole);
    } else {
        // A block: behind attention and MLP; backward before both. Embedding: its output. Head: the gradient of its input.
        plan_comm_add_(comm, PLAN_COMM_LAYERS, COMM_ALL_REDUCE, tp, (4 * blocks + (first ? 1 : 0) + (last ? 1 : 0)) * whole);
    }
    if (last) plan_comm_add_(comm, PLAN_COMM_LAYERS, COMM_ALL_GATHER, tp, M * tp * (double)N * 3 * 4); // statistics of logits
    // Every chunk has a boundary on both sides, except that of the embedding and that of the head.
    const double above = l->virtual_stages - (first ? 1 : 0), below = l->virtual_stages - (last ? 1 : 0);
    plan_comm_add_(comm, PLAN_COMM_PIPELINE, COMM_SEND, l->mesh.pp, (above + below) * boundary);
    plan_comm_add_(comm, PLAN_COMM_PIPELINE, COMM_RECV, l->mesh.pp, (above + below) * boundary);
}

// A step of a rank with this layout.
static inline PlanComm plan_comm(const Model *model, const Layout *l, const ZeroConfig *config, int64_t micro_batch, int64_t seq,
                                 const ScheduleShape *schedule) {
    PlanComm comm = {0};
    plan_comm_state_(&comm, model, l, config, schedule);
    plan_comm_activations_(&comm, l, config->dtype, activations_capacity(l, micro_batch, seq), schedule);
    plan_comm_add_(&comm, PLAN_COMM_OTHER, COMM_ALL_REDUCE, l->mesh.world, PLAN_COMM_SCALARS * 8);
    return comm;
}

#endif
