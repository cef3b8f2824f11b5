// plan_layout.h: the memory of any rank of any layout, by category, and how a pipeline uses its buffers, without building its whole schedule.
// Pure: it takes flags and sizes, and allocates no more than lists of units. plan.h adds it up, compares and prints.
//
// What a rank holds depends on its stage alone; the plan looks at the first data-parallel replica, and there at the last tensor-parallel rank,
// whose share of the vocabulary is never the smaller one.
#ifndef LLMC_PLAN_LAYOUT_H
#define LLMC_PLAN_LAYOUT_H

#include "llmc/activations.h" // activations_layout, ActivationShape
#include "llmc/base.h"        // Error, fail, size_multiply
#include "llmc/layout.h"      // Layout
#include "llmc/options.h"     // Options
#include "llmc/plan_device.h" // plan_device_*_bytes
#include "llmc/schedule.h"    // Schedule, schedule_build
#include "llmc/zero.h"        // zero_bytes, ZeroConfig

// The layout seen from another stage. It borrows the arrays of `l`: not to be given to layout_free().
static inline Layout plan_layout_at(const Layout *l, int stage) {
    Layout view = *l;
    view.mesh.at.pp = stage;
    view.mesh.rank = mesh_rank(&l->mesh, view.mesh.at);
    return view;
}

static inline int64_t plan_blocks(const Layout *l) {
    int64_t blocks = 0;
    for (int c = 0; c < l->virtual_stages; c++) blocks += layout_chunk_layers(l, c);
    return blocks;
}

// ----------------------------------------------------------------------------
// Long schedules. In the middle of a step a stage repeats itself: with one chunk from micro-batch to micro-batch, with more from group to group
// of P. So what is counted over a list grows by the same amount with every such period, and two short lists tell about a long one.

typedef struct {
    ScheduleShape shape; // to count instead
    int64_t periods;     // that it leaves out
    int period;          // micro-batches
} PlanShort_;

static inline PlanShort_ plan_short_(const ScheduleShape *shape) {
    const int P = shape->stages, M = shape->microbatches;
    // Beginning and end of a step take P micro-batches; with chunks there are M mod P larger groups, which must stay as many.
    const int period = shape->chunks == 1 ? 1 : P, least = shape->chunks == 1 ? P + 4 : (int)min_i64(M, (int64_t)P * (M % P + 6));
    const int periods = M > least ? (M - least) / period : 0;
    PlanShort_ result = {*shape, periods, period};
    result.shape.microbatches -= periods * period;
    return result;
}

// What a stage's list uses, as schedule_build would count it.
typedef struct {
    int slots, inputs, gradients, stashes;
} PlanBuffers;

static inline PlanBuffers plan_buffers_of_(const ScheduleShape *shape, int stage) {
    Schedule schedule;
    Error error = {0};
    if (!schedule_build(&schedule, shape, stage, &error)) die_error(&error); // a part of a shape that was checked
    const PlanBuffers buffers = {schedule.slots, schedule.inputs, schedule.gradients, schedule.stashes};
    schedule_free(&schedule);
    return buffers;
}

// shape: checked.
static inline PlanBuffers plan_buffers(const ScheduleShape *shape, int stage) {
    PlanShort_ part = plan_short_(shape);
    PlanBuffers b = plan_buffers_of_(&part.shape, stage);
    if (part.periods == 0) return b;
    part.shape.microbatches += part.period;
    const PlanBuffers next = plan_buffers_of_(&part.shape, stage);
    b.slots += (int)part.periods * (next.slots - b.slots), b.inputs += (int)part.periods * (next.inputs - b.inputs);
    b.gradients += (int)part.periods * (next.gradients - b.gradients), b.stashes += (int)part.periods * (next.stashes - b.stashes);
    return b;
}

// ----------------------------------------------------------------------------
// Memory

typedef enum {
    PLAN_PARAMETERS,
    PLAN_MASTER,
    PLAN_GRADIENTS,
    PLAN_OPTIMIZER,
    PLAN_BUFFERS,
    PLAN_ACTIVATIONS,
    PLAN_BOUNDARIES,
    PLAN_LOGITS,
    PLAN_SCRATCH,
    PLAN_SNAPSHOT,
    PLAN_WORKSPACE,
    PLAN_NCCL,
    PLAN_PINNED,
    PLAN_CATEGORIES
} PlanCategory;
static const char *const plan_category_names[PLAN_CATEGORIES] = {
    "parameters",           "master weights",    "gradients",         "optimizer state",   "gathers and messages",
    "activations",          "stage boundaries",  "logits of a chunk", "scratch and batch", "checkpoint snapshot",
    "workspace of kernels", "NCCL, an estimate", "pinned for copies"};

// Whether it is the host's memory, also where the device has its own.
static inline bool plan_category_on_host(PlanCategory category) { return category == PLAN_SNAPSHOT || category == PLAN_PINNED; }

typedef struct {
    size_t bytes[PLAN_CATEGORIES];
} PlanMemory;

// The activation arena, sized by the function that lays it out. Its 64-bit sums are bounded here first: flags alone can ask for 2^70 bytes.
static inline bool plan_activations_(PlanMemory *memory, const Layout *l, const ActivationShape *shape, Error *error) {
    const ModelConfig *m = &l->local;
    const double widths =
        8.0 * (double)m->channels + 3.0 * (double)(model_qkv_width(m) + model_q_width(m) + model_mlp_in_width(m) + m->ffn + m->heads) + 16;
    const double places = ((double)shape->slots + shape->stashes) * (double)(layout_slot_layers(l) + 4) + shape->inputs + shape->gradients;
    const double bound_bytes = 4 * (double)activations_capacity(l, shape->micro_batch, shape->seq) * places * (widths + (double)m->head_size);
    if (bound_bytes > 0x1p62) {
        return fail(error, CODE_USAGE, "--micro-batch, --seq: activations of %lld x %lld tokens%s are more than any machine holds",
                    (long long)shape->micro_batch, (long long)shape->seq, shape->slots > 1 ? ", in several micro-batches at once," : "");
    }
    Activations a;
    (void)activations_layout(&a, NULL, l, shape);
    const bool pipeline = l->mesh.pp > 1; // else nothing crosses a boundary: the gradient of the residual stream is scratch
    memory->bytes[PLAN_ACTIVATIONS] = a.kept_bytes, memory->bytes[PLAN_BOUNDARIES] = pipeline ? a.boundary_bytes : 0;
    memory->bytes[PLAN_LOGITS] = a.head_bytes, memory->bytes[PLAN_SCRATCH] = a.scratch_bytes + (pipeline ? 0 : a.boundary_bytes);
    return true;
}

static inline void plan_state_(PlanMemory *memory, const ZeroBytes *bytes) {
    memory->bytes[PLAN_PARAMETERS] = bytes->param_bytes, memory->bytes[PLAN_MASTER] = bytes->master_bytes;
    memory->bytes[PLAN_GRADIENTS] = bytes->grad_bytes, memory->bytes[PLAN_OPTIMIZER] = bytes->optim_bytes;
    memory->bytes[PLAN_BUFFERS] = bytes->buffer_bytes, memory->bytes[PLAN_SNAPSHOT] = bytes->snapshot_bytes;
}

// The sum, or false with the categories' first that makes it absurd.
static inline bool plan_memory_total(const PlanMemory *memory, size_t *total, Error *error) {
    *total = 0;
    for (int i = 0; i < PLAN_CATEGORIES; i++) {
        if (!size_add(*total, memory->bytes[i], total) || *total > SIZE_MAX / 2) {
            return fail(error, CODE_USAGE, "%s: %zu bytes more are more than any machine holds (smaller --micro-batch, --seq or model)",
                        plan_category_names[i], memory->bytes[i]);
        }
    }
    return true;
}

// Memory of the layout's rank. gpu: of a device with memory of its own.
static inline bool plan_memory(PlanMemory *memory, const Model *model, const Layout *layout, const ZeroConfig *config, int64_t micro_batch,
                               int64_t seq, const ScheduleShape *schedule, bool gpu, Error *error) {
    const ZeroBytes bytes = zero_bytes(model, layout, config);
    const PlanBuffers b = plan_buffers(schedule, layout->mesh.at.pp);
    const ActivationShape shape = {.dtype = config->dtype,
                                   .micro_batch = micro_batch,
                                   .seq = seq,
                                   .slots = b.slots,
                                   .inputs = b.inputs,
                                   .gradients = b.gradients,
                                   .stashes = b.stashes};
    *memory = (PlanMemory){{0}};
    plan_state_(memory, &bytes);
    if (gpu) {
        memory->bytes[PLAN_WORKSPACE] = plan_device_workspace_bytes(layout, config, micro_batch, seq);
        memory->bytes[PLAN_NCCL] = plan_device_nccl_bytes(layout), memory->bytes[PLAN_PINNED] = plan_device_pinned_bytes();
    }
    return plan_activations_(memory, layout, &shape, error);
}

#endif
