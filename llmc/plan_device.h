// plan_device.h: what a GPU and its host hold beside tensors, on paper: workspace and scratch of kernels, by the formulas that the kernels' host
// code asks with (llmc/cuda/scratch.h), parts of sums in the order of ranks, the pinned ring of copies, and what NCCL takes, which is an estimate.
// Not in it: memory of an output's size in which products that accumulate are timed once; where there is none, they are not timed.
#ifndef LLMC_PLAN_DEVICE_H
#define LLMC_PLAN_DEVICE_H

#include "llmc/activations.h"  // activations_capacity
#include "llmc/cuda/scratch.h" // scratch_*_bytes
#include "llmc/layout.h"       // Layout, layout_members
#include "llmc/zero.h"         // ZeroConfig

enum {
    PLAN_DEVICE_SMS = 132, // multiprocessors of a Hopper GPU; fewer need less
    // NCCL, for each communicator of several ranks: 16 channels to two neighbours with buffers of 4 MiB (NCCL_BUFFSIZE). It depends on wires and
    // version
    PLAN_DEVICE_NCCL_BYTES = 2 * 16 * (4 << 20)
};

static inline size_t plan_device_larger_(size_t a, size_t b) { return a > b ? a : b; }

// The most scratch that an op of a training step asks for. N: tokens at most.
static inline size_t plan_device_scratch_bytes(const Layout *l, Dtype dtype, int64_t N) {
    const ModelConfig *m = &l->local;
    const int64_t sms = PLAN_DEVICE_SMS, C = m->channels, S = layout_own_tokens(l, N);
    const ScratchNorm norm = scratch_norm_plan(C, C % 8 == 0, dtype == DTYPE_F32);
    size_t bytes = plan_device_larger_(scratch_squares_bytes(), scratch_norm_bytes(scratch_norm_parts(sms, S, C, &norm), C));
    if (layout_has_embedding(l)) bytes = plan_device_larger_(bytes, scratch_embedding_bytes(N, C));
    if (m->qk_norm) bytes = plan_device_larger_(bytes, scratch_rope_bytes(sms, N, m->head_size));
    const int64_t widths[] = {model_qkv_width(m), model_mlp_in_width(m), C}; // of products whose bias gradient is summed by a kernel
    for (int i = 0; i < 3 && m->bias != BIAS_OFF; i++) bytes = plan_device_larger_(bytes, scratch_column_bytes(sms, N, widths[i]));
    return bytes;
}

// Of the groups that sum in the order of ranks, as they do what is in bf16: partial sums over tensor-parallel ranks, gradients on their way.
static inline size_t plan_device_reduce_bytes(const Layout *l, const ZeroConfig *config) {
    size_t bytes = 0;
    if (l->mesh.tp > 1 && config->dtype == DTYPE_BF16) bytes += scratch_reduce_bytes(l->mesh.tp);
    if (config->reduce_bf16 && l->shards > 1) bytes += scratch_reduce_bytes(l->shards);
    if (config->reduce_bf16 && l->replicas > 1) bytes += scratch_reduce_bytes(l->replicas);
    return bytes;
}

static inline size_t plan_device_workspace_bytes(const Layout *l, const ZeroConfig *config, int64_t micro_batch, int64_t seq) {
    const int64_t N = activations_capacity(l, micro_batch, seq);
    return PRODUCT_WORKSPACE_BYTES + plan_device_scratch_bytes(l, config->dtype, N) + plan_device_reduce_bytes(l, config);
}

static inline size_t plan_device_nccl_bytes(const Layout *l) {
    size_t groups = l->mesh.world > 1; // all ranks
    for (int g = 0; g < LAYOUT_GROUPS; g++) groups += layout_members(l, (LayoutGroup)g, NULL) > 1;
    if (l->mesh.pp > 1) groups += 2; // the stages again: activations go down, gradients up
    return groups * (size_t)PLAN_DEVICE_NCCL_BYTES;
}

static inline size_t plan_device_pinned_bytes(void) { return (size_t)COPY_PIECES * COPY_PIECE_BYTES; }

#endif
