// train_gpt.c: the trainer. Reads top to bottom: the trainer's state, forward, backward, one optimizer step, validation, generation,
// checkpoints, main. Started by mpirun, every rank runs it for its part of the model (tensor parallelism, pipeline stages: llmc/layout.h), of the
// batch (data parallelism) and of the state (ZeRO: llmc/zero.h). Every op is a call through the device table (llmc/device.h); shapes are in the
// legend of llmc/model.h. Under tensor parallelism the widths are this rank's (layout.local). N counts the tokens of a micro-batch, S those of them
// whose residual stream this rank holds: N/tp with sequence parallelism, else all.

#include "llmc/activations.h"  // Activations, activations_layout
#include "llmc/base.h"         // Error, die, clock_ms
#include "llmc/checkpoint.h"   // Checkpoint, checkpoint_close
#include "llmc/comm.h"         // Comm, comm_all_reduce
#include "llmc/cpu/threads.h"  // threads_wait_briefly
#include "llmc/device.h"       // Device, Buffer
#include "llmc/devices.h"      // devices_join, devices_leave
#include "llmc/export.h"       // export_model, export_gradients
#include "llmc/hf_convert.h"   // hf_convert
#include "llmc/layout.h"       // Layout, layout_create
#include "llmc/loader.h"       // StepBatch, MicroBatch, loader_next
#include "llmc/model.h"        // Model, tensor table
#include "llmc/model_source.h" // ModelWeights, weights_close
#include "llmc/monitor.h"      // Monitor
#include "llmc/optimizer.h"    // learning_rate, optimizer_config
#include "llmc/options.h"      // Options
#include "llmc/report.h"       // report_begin, report_end
#include "llmc/rope.h"         // rope_table_fill
#include "llmc/sampling.h"     // sampling_choose
#include "llmc/saving.h"       // Saving, saving_begin, saving_finish
#include "llmc/schedule.h"     // Schedule, Action
#include "llmc/setup.h"        // Setup, setup_check
#include "llmc/signals.h"      // signals_block, signals_stop_requested
#include "llmc/state.h"        // state_draw, state_read
#include "llmc/tokenizer.h"    // tokenizer_encode, tokenizer_decode
#include "llmc/trace.h"        // Trace, trace_begin
#include "llmc/zero_comm.h"    // Zero, zero_weights, zero_gradients

typedef struct {
    const Options *options;
    Comm *comm;
    Layout layout;                    // what of the model this rank holds
    CommGroup *groups[LAYOUT_GROUPS]; // NULL: this rank is in none
    CommGroup *downstream, *upstream; // the stages again: activations go down, gradients up
    Model model;
    Device device;
    Dtype dtype;       // of weights and activations
    Zero zero;         // parameters, gradients, optimizer state
    Schedule schedule; // what this stage does in a step
    Activations acts;
    void *arena; // of acts
    size_t arena_bytes;
    const MicroBatch *uploaded; // whose tokens the device holds, as:
    Packing packing;
    int32_t *filler;                        // (2 * granularity) zeros, then -1s
    CommHandle *input_received, *slot_sent; // messages on their way, by the buffer that they use
    CommHandle *gradient_received, *gradient_sent;
    Trace trace;
    StepState *state;        // device memory: of the running step
    StepState *look_state;   // of a validation
    StepState *results;      // (DEVICE_SLOTS) host memory: what the last steps came to
    int64_t optimizer_steps; // updates applied so far
    uint32_t keep_threshold; // 65536 outside of training: nothing is dropped
    uint64_t init_hash;
} Trainer;

static const Buffer ABSENT = {0};

// ----------------------------------------------------------------------------
// Creation

// Brings the parameters of every unit in line with what their owners hold, and tells the other ranks.
static void publish_parameters(Trainer *t, bool round) {
    for (int u = 0; u < t->model.units; u++) {
        if (t->zero.range[u].count == 0) continue;
        const ZeroShard shard = zero_shard(&t->zero, u);
        if (round && shard.master.data != NULL) t->device.cast(&t->device, shard.param, shard.master, shard.count);
        zero_publish(&t->zero, u);
    }
    zero_publish_finish(&t->zero);
}

// Initial parameters: the same for every layout.
static void trainer_init_parameters(Trainer *t) {
    t->init_hash = state_draw(&t->zero, (uint64_t)t->options->seed);
    publish_parameters(t, true);
}

// Tokens that a micro-batch's number is rounded up to a multiple of: 64, so that packed batches have few different shapes; with sequence
// parallelism of all ranks' shares.
static int64_t granularity(const Layout *layout) {
    int64_t g = 64;
    while (layout->sp && g % layout->mesh.tp != 0) g += 64;
    return g;
}

static void create_groups(Trainer *t) {
    int *members = base_new((size_t)t->comm->size, sizeof *members);
    for (int g = 0; g < LAYOUT_GROUPS; g++) {
        const int count = layout_members(&t->layout, g, members);
        t->groups[g] = comm_group(t->comm, members, count, layout_group_names[g]);
    }
    const int stages = layout_members(&t->layout, LAYOUT_PP, members);
    t->downstream = comm_pipe(t->comm, members, stages, 1, "pp downstream");
    t->upstream = comm_pipe(t->comm, members, stages, -1, "pp upstream");
    free(members);
}

static ActivationShape activation_shape(const Options *o, const Schedule *schedule) {
    return (ActivationShape){.dtype = o->precision == PRECISION_BF16 ? DTYPE_BF16 : DTYPE_F32,
                             .micro_batch = o->micro_batch,
                             .seq = o->seq,
                             .slots = schedule->slots,
                             .inputs = schedule->inputs,
                             .gradients = schedule->gradients,
                             .stashes = schedule->stashes};
}

// Activations and the messages that use them.
static void create_activations(Trainer *t) {
    const Options *o = t->options;
    Device *device = &t->device;
    Error error = {0};
    ScheduleShape shape = {0};
    if (!layout_schedule(&t->layout, o, &shape, &error) || !schedule_build(&t->schedule, &shape, t->layout.mesh.at.pp, &error)) die_error(&error);
    const ActivationShape sizes = activation_shape(o, &t->schedule);
    activations_create(&t->acts, &t->layout, &sizes);
    t->arena_bytes = activations_layout(&t->acts, NULL, &t->layout, &sizes);
    t->arena = comm_alloc(t->comm, t->arena_bytes); // other ranks read what is summed over tensor-parallel ones
    (void)activations_layout(&t->acts, t->arena, &t->layout, &sizes);
    t->input_received = base_new((size_t)max_i64(sizes.inputs, 1), sizeof(CommHandle));
    t->slot_sent = base_new((size_t)max_i64(sizes.slots, 1), sizeof(CommHandle));
    t->gradient_received = base_new((size_t)max_i64(sizes.gradients, 1), sizeof(CommHandle));
    t->gradient_sent = base_new((size_t)max_i64(sizes.gradients, 1), sizeof(CommHandle));
    const int64_t g = granularity(&t->layout);
    t->filler = base_new((size_t)(2 * g), sizeof *t->filler);
    for (int64_t i = g; i < 2 * g; i++) t->filler[i] = -1;
    const ModelConfig *config = &t->model.config;
    if (config->position == POSITION_ROPE) {
        const size_t count = (size_t)(o->seq * config->head_size);
        float *table = base_new(count, sizeof *table);
        rope_table_fill(table, o->seq, config->head_size, config->rope_theta, &config->rope_scaling);
        device->copy_in(device, t->acts.rope.data, table, count * sizeof *table);
        free(table);
    }
}

// Fills a Trainer, which must not move afterwards: its parts point at each other, and takes the device over. Collective; the flags were checked.
static void trainer_create(Trainer *t, const Options *options, const ModelConfig *config, Comm *comm, Device device) {
    *t = (Trainer){.options = options, .comm = comm, .model = model_create(config), .device = device, .keep_threshold = 65536};
    Error error = {0};
    if (!layout_create(&t->layout, config, options, comm->size, comm->rank, &error)) die_error(&error);
    const ZeroConfig sizes = zero_config(options);
    t->dtype = sizes.dtype;
    devices_join(&t->device, comm);
    create_groups(t);
    t->zero = zero_create(&t->device, comm, t->groups, &t->model, &t->layout, &sizes);
    create_activations(t);
    t->state = t->device.alloc(&t->device, sizeof *t->state);
    t->look_state = t->device.alloc(&t->device, sizeof *t->look_state);
    t->results = t->device.host_alloc(&t->device, DEVICE_SLOTS * sizeof *t->results);
}

// The updates that were applied before this process began.
static void trainer_set_steps(Trainer *t, int64_t optimizer_steps) {
    t->optimizer_steps = optimizer_steps;
    t->device.copy_in(&t->device, &t->state->optimizer_steps, &optimizer_steps, sizeof optimizer_steps);
}

static void trainer_free(Trainer *t) {
    zero_free(&t->zero);
    comm_release(t->comm, t->arena);
    t->device.release(&t->device, t->state);
    t->device.release(&t->device, t->look_state);
    t->device.host_release(&t->device, t->results);
    activations_free(&t->acts);
    schedule_free(&t->schedule);
    free(t->input_received);
    free(t->slot_sent);
    free(t->gradient_received);
    free(t->gradient_sent);
    free(t->filler);
    trace_free(&t->trace);
    comm_group_free(t->upstream);
    comm_group_free(t->downstream);
    for (int g = LAYOUT_GROUPS - 1; g >= 0; g--) comm_group_free(t->groups[g]);
    layout_free(&t->layout);
    model_free(&t->model);
    devices_leave(&t->device, t->comm);
    t->device.close(&t->device);
}

// Tokens that this rank computes for a micro-batch: N rounded up, where the capacity allows. Never none: other ranks may wait for this one.
static int64_t padded_tokens(const Trainer *t, const MicroBatch *batch) {
    return min_i64(round_up(max_i64(batch->tokens, 1), granularity(&t->layout)), t->acts.capacity);
}

// Copies a micro-batch to the device, if it is not there. The extra tokens are a document of their own without targets.
static Packing upload(Trainer *t, const MicroBatch *batch) {
    if (t->uploaded == batch) return t->packing;
    Device *device = &t->device;
    Activations *a = &t->acts;
    const int64_t N = batch->tokens, padded = padded_tokens(t, batch), extra = padded - N;
    const size_t bytes = (size_t)N * sizeof(int32_t);
    device->copy_in(device, a->ids.data, batch->ids, bytes);
    device->copy_in(device, a->targets.data, batch->targets, bytes);
    device->copy_in(device, a->positions.data, batch->positions, bytes);
    device->copy_in(device, a->token_index.data, batch->token_index, bytes);
    device->copy_in(device, a->cu_seqlens.data, batch->cu_seqlens, (size_t)(batch->documents + 1) * sizeof(int32_t));
    Packing packing = {a->cu_seqlens, batch->documents, padded, batch->max_length};
    if (extra > 0) {
        const int32_t end = (int32_t)padded;
        const size_t extra_bytes = (size_t)extra * sizeof(int32_t);
        device->copy_in(device, buffer_at(a->ids, N).data, t->filler, extra_bytes);
        device->copy_in(device, buffer_at(a->token_index, N).data, t->filler, extra_bytes);
        device->copy_in(device, buffer_at(a->positions, N).data, t->filler, extra_bytes); // 0: T may be smaller than `extra`
        device->copy_in(device, buffer_at(a->targets, N).data, t->filler + granularity(&t->layout), extra_bytes);
        device->copy_in(device, buffer_at(a->cu_seqlens, ++packing.documents).data, &end, sizeof end);
        packing.max_length = max_i64(packing.max_length, extra);
    }
    t->uploaded = batch;
    t->packing = packing;
    return packing;
}

// ----------------------------------------------------------------------------
// Tensor parallelism. Every rank computes a partial sum of what row-parallel products (o, proj, down; the embedding) write, and of the
// gradient of what column-parallel ones read. With sequence parallelism (Korthikanti et al. 2022) each sum leaves every rank its own tokens,
// and they are gathered where a matrix product needs all.

static int64_t own_tokens(const Trainer *t, int64_t N) { return layout_own_tokens(&t->layout, N); }

// Where this rank's tokens of an (N, C) buffer begin.
static Buffer own_part(const Trainer *t, Buffer buffer, int64_t N) {
    return buffer_at(buffer, layout_own_first(&t->layout, N) * t->model.config.channels);
}

// (N, C) = everyone's own tokens
static void gather_tokens(Trainer *t, Buffer buffer, int64_t N) {
    if (!t->layout.sp) return;
    const int64_t count = own_tokens(t, N) * t->model.config.channels;
    comm_all_gather(t->groups[LAYOUT_TP], buffer.data, own_part(t, buffer, N).data, count, comm_type_of(buffer.dtype));
}

// (N, C) = sum over tensor-parallel ranks; with sequence parallelism only the own tokens of it
static void sum_partials(Trainer *t, Buffer buffer, int64_t N) {
    const int64_t C = t->model.config.channels;
    const CommType type = comm_type_of(buffer.dtype);
    CommGroup *tp = t->groups[LAYOUT_TP];
    if (t->layout.sp) {
        comm_reduce_scatter(tp, own_part(t, buffer, N).data, type, buffer.data, own_tokens(t, N) * C, type, COMM_SUM);
    } else if (t->layout.mesh.tp > 1) {
        comm_all_reduce(tp, buffer.data, N * C, type, COMM_SUM);
    }
}

// A bias that follows a partial sum is added by one rank.
static Buffer bias_once(const Trainer *t, Buffer bias) { return t->layout.mesh.at.tp == 0 ? bias : ABSENT; }

// ----------------------------------------------------------------------------
// Forward

static AttentionShape attention_shape(const ModelConfig *m) { return (AttentionShape){m->heads, m->kv_heads, m->head_size}; }

// Places where dropout acts: after the embedding, and after attention (2l) and MLP (2l+1) of every block.
enum { SITE_EMBEDDING = 0xffffff };
static Dropout dropout_at(const Trainer *t, int64_t site, int64_t first_token) {
    return (Dropout){&t->state->dropout_key, (uint32_t)site, t->keep_threshold, buffer_at(t->acts.token_index, first_token)};
}
static Dropout own_dropout(const Trainer *t, int64_t site, int64_t N) { return dropout_at(t, site, layout_own_first(&t->layout, N)); }

// The weights of block l; the block that is used next is gathered meanwhile where parameters are shards.
static void block_weights(Trainer *t, int64_t l, int64_t next, Buffer w[TENSOR_KINDS]) {
    zero_weights(&t->zero, (int)l + 1, w);
    if (next >= 0) zero_prefetch(&t->zero, (int)next + 1);
}

// One block. In: a->in for the first of a chunk, else the previous block's mid and, in acts.branch, its MLP's output. Out: a->mid, acts.branch.
static void block_forward(Trainer *t, int64_t l, int64_t next, BlockActs *a, const BlockActs *previous, const Packing *packing) {
    const ModelConfig *m = &t->layout.local;
    const int64_t N = packing->tokens, S = own_tokens(t, N), C = m->channels;
    Device *d = &t->device;
    const Buffer branch = t->acts.branch, own_branch = own_part(t, branch, N);
    Buffer w[TENSOR_KINDS];
    block_weights(t, l, next, w);

    // residual (+ the previous block's MLP), norm
    if (previous == NULL) {
        d->norm_forward(d, own_part(t, a->norm1, N), a->mean1, a->rstd1, ABSENT, a->in, ABSENT, w[TENSOR_NORM1_WEIGHT], w[TENSOR_NORM1_BIAS], NULL,
                        m->norm, m->norm_eps, S, C);
    } else {
        const Dropout dropout = own_dropout(t, 2 * (l - 1) + 1, N);
        d->norm_forward(d, own_part(t, a->norm1, N), a->mean1, a->rstd1, a->in, previous->mid, own_branch, w[TENSOR_NORM1_WEIGHT],
                        w[TENSOR_NORM1_BIAS], &dropout, m->norm, m->norm_eps, S, C);
    }
    gather_tokens(t, a->norm1, N);
    // attention: q, k, v by one product (their weights are neighbours)
    d->linear_forward(d, a->qkv_raw, ABSENT, a->norm1, w[TENSOR_Q_WEIGHT], w[TENSOR_Q_BIAS], N, C, model_qkv_width(m));
    if (m->qk_norm || m->position == POSITION_ROPE) {
        d->qk_forward(d, a->qkv, a->qk_rstd, a->qkv_raw, w[TENSOR_Q_NORM], w[TENSOR_K_NORM], m->norm_eps, t->acts.rope, t->acts.positions,
                      attention_shape(m), N);
    }
    d->attention_forward(d, a->att, a->lse, a->qkv, packing, attention_shape(m));
    d->linear_forward(d, branch, ABSENT, a->att, w[TENSOR_O_WEIGHT], bias_once(t, w[TENSOR_O_BIAS]), N, model_q_width(m), C);
    sum_partials(t, branch, N);
    // residual, norm
    const Dropout dropout = own_dropout(t, 2 * l, N);
    d->norm_forward(d, own_part(t, a->norm2, N), a->mean2, a->rstd2, a->mid, a->in, own_branch, w[TENSOR_NORM2_WEIGHT], w[TENSOR_NORM2_BIAS],
                    &dropout, m->norm, m->norm_eps, S, C);
    gather_tokens(t, a->norm2, N);
    // MLP
    if (m->activation == ACTIVATION_GELU) {
        d->linear_forward(d, a->fc, a->act, a->norm2, w[TENSOR_FC_WEIGHT], w[TENSOR_FC_BIAS], N, C, m->ffn);
        d->linear_forward(d, branch, ABSENT, a->act, w[TENSOR_PROJ_WEIGHT], bias_once(t, w[TENSOR_PROJ_BIAS]), N, m->ffn, C);
    } else {
        d->linear_forward(d, a->fc, ABSENT, a->norm2, w[TENSOR_GATE_WEIGHT], w[TENSOR_GATE_BIAS], N, C, 2 * m->ffn);
        d->swiglu_forward(d, a->act, a->fc, N, m->ffn);
        d->linear_forward(d, branch, ABSENT, a->act, w[TENSOR_DOWN_WEIGHT], bias_once(t, w[TENSOR_DOWN_BIAS]), N, m->ffn, C);
    }
    sum_partials(t, branch, N);
}

// out (S, C) = dropout(token vectors + position vectors). Each tensor-parallel rank looks up its share of the vocabulary.
static void embedding_forward(Trainer *t, Buffer out, const Packing *packing) {
    const int64_t N = packing->tokens, C = t->model.config.channels;
    const ModelConfig *m = &t->layout.local;
    Device *d = &t->device;
    const Activations *a = &t->acts;
    const Dropout dropout = own_dropout(t, SITE_EMBEDDING, N);
    Buffer w[TENSOR_KINDS];
    zero_weights(&t->zero, 0, w);
    if (t->layout.mesh.tp == 1) {
        d->embedding_forward(d, out, a->ids, a->positions, w[TENSOR_WTE], w[TENSOR_WPE], &dropout, N, C, 0, m->vocab);
        return;
    }
    d->embedding_forward(d, a->branch, a->ids, a->positions, w[TENSOR_WTE], bias_once(t, w[TENSOR_WPE]), NULL, N, C, t->layout.vocab_begin,
                         m->vocab);
    sum_partials(t, a->branch, N);
    if (dropout_active(&dropout)) {
        d->dropout_backward(d, out, own_part(t, a->branch, N), &dropout, own_tokens(t, N), C);
    } else {
        d->cast(d, out, own_part(t, a->branch, N), own_tokens(t, N) * C);
    }
}

// A chunk of layers, from its input (the first chunk: from the tokens) to the residual stream behind it (the last chunk: to what the head reads).
static void chunk_forward(Trainer *t, int chunk, ChunkActs *acts, Buffer input, const Packing *packing) {
    const ModelConfig *m = &t->model.config;
    const int64_t N = packing->tokens, S = own_tokens(t, N), C = m->channels;
    const int64_t first = layout_first_layer(&t->layout, chunk), layers = layout_chunk_layers(&t->layout, chunk);
    Device *d = &t->device;

    if (layout_is_first(&t->layout, chunk)) embedding_forward(t, acts->embedding, packing);
    acts->blocks[0].in = layout_is_first(&t->layout, chunk) ? acts->embedding : input;
    for (int64_t k = 0; k < layers; k++) {
        block_forward(t, first + k, k + 1 < layers ? first + k + 1 : -1, &acts->blocks[k], k > 0 ? &acts->blocks[k - 1] : NULL, packing);
        comm_progress(t->comm);
    }
    const Dropout dropout = own_dropout(t, 2 * (first + layers - 1) + 1, N);
    const Buffer mid = acts->blocks[layers - 1].mid, own_branch = own_part(t, t->acts.branch, N);
    if (!layout_is_last(&t->layout, chunk)) {
        d->residual_forward(d, acts->last, mid, own_branch, &dropout, S, C);
        return;
    }
    Buffer w[TENSOR_KINDS];
    zero_weights(&t->zero, model_head_unit(&t->model), w);
    d->norm_forward(d, own_part(t, acts->norm, N), acts->mean, acts->rstd, acts->last, mid, own_branch, w[TENSOR_NORM_WEIGHT], w[TENSOR_NORM_BIAS],
                    &dropout, m->norm, m->norm_eps, S, C);
    gather_tokens(t, acts->norm, N);
}

// ----------------------------------------------------------------------------
// Head and backward. Gradients of weights are = in a step's first micro-batch and += in the others (zero_accumulates).

static int unit_of_head_weight(const Trainer *t) { return t->model.config.tied ? 0 : model_head_unit(&t->model); }

// Cross-entropy of a chunk of tokens from this rank's share of the logits; dlogits optional: the logits' own memory.
static void chunk_losses(Trainer *t, int64_t first, int64_t count, Buffer dlogits, const double *dloss) {
    Device *d = &t->device;
    const Activations *a = &t->acts;
    const int64_t V = t->layout.local.vocab, begin = t->layout.vocab_begin;
    const int tp = t->layout.mesh.tp;
    const Buffer losses = buffer_at(a->losses, first), targets = buffer_at(a->targets, first);
    if (tp == 1) {
        d->cross_entropy(d, losses, dlogits, a->logits, targets, dloss, count, V);
        return;
    }
    d->cross_entropy_local(d, a->stats, a->logits, targets, begin, count, V);
    comm_all_gather(t->groups[LAYOUT_TP], a->all_stats.data, a->stats.data, count * 3, COMM_F32);
    d->cross_entropy_merge(d, losses, dlogits, a->logits, a->all_stats, tp, targets, dloss, begin, count, V);
}

// Losses of all tokens; with `train` also the gradient of the final norm's output (own tokens, in acts.dnorm) and of the head's weight. Logits
// exist for a chunk of tokens at a time. dloss: device memory, StepState.loss_scale; not read without `train`.
static void head(Trainer *t, const ChunkActs *acts, int64_t N, const double *dloss, bool train, int microbatch) {
    const int64_t C = t->model.config.channels, V = t->layout.local.vocab;
    Device *d = &t->device;
    Activations *a = &t->acts;
    const TensorKind kind = model_head_kind(&t->model.config);
    const int unit = unit_of_head_weight(t);
    Buffer w[TENSOR_KINDS], g[TENSOR_KINDS];
    zero_weights(&t->zero, unit, w);
    if (train) zero_gradients(&t->zero, unit, g);
    const bool accumulate = zero_accumulates(&t->zero, microbatch);
    for (int64_t n = 0; n < N; n += a->chunk) {
        const int64_t count = min_i64(a->chunk, N - n);
        const Buffer norm = buffer_at(acts->norm, n * C);
        d->linear_forward(d, a->logits, ABSENT, norm, w[kind], ABSENT, count, C, V);
        chunk_losses(t, n, count, train ? a->logits : ABSENT, dloss);
        if (train) {
            d->linear_backward_input(d, buffer_at(a->dnorm, n * C), a->logits, w[kind], ABSENT, count, C, V);
            d->linear_backward_weight(d, g[kind], ABSENT, accumulate || n > 0, a->logits, norm, count, C, V);
        }
        comm_progress(t->comm);
    }
    if (!train) return;
    sum_partials(t, a->dnorm, N);
    if (unit != 0 || layout_has_embedding(&t->layout)) return; // done by backward
    // A tied head far from the embedding: the copy's positions have no gradient here.
    if (!accumulate && g[TENSOR_WPE].data != NULL) d->zero(d, g[TENSOR_WPE].data, (size_t)(t->model.config.max_seq * C) * sizeof(float));
    zero_gradients_done(&t->zero, 0, microbatch + 1 == t->schedule.shape.microbatches);
}

// What of a backward pass is wanted: gradients of the input, of the weights, or both (they are apart in zero-bubble schedules).
enum { BACKWARD_INPUT = 1, BACKWARD_WEIGHT = 2, BACKWARD_BOTH = 3 };

// Gradient (N, C) of a branch's output from that of the residual stream (S, C): the same, or what dropout leaves of it, of all tokens. It is
// put into `to` where the residual stream's own memory cannot serve, because other tokens must join it or because it must be kept.
static Buffer branch_gradient(Trainer *t, Buffer to, Buffer dresidual, int64_t site, int64_t N) {
    const Dropout dropout = own_dropout(t, site, N);
    Device *d = &t->device;
    const int64_t S = own_tokens(t, N), C = t->model.config.channels;
    if (dropout_active(&dropout)) {
        d->dropout_backward(d, own_part(t, to, N), dresidual, &dropout, S, C);
    } else if (t->layout.sp || t->schedule.stashes > 0) {
        d->cast(d, own_part(t, to, N), dresidual, S * C);
    } else {
        return dresidual;
    }
    gather_tokens(t, to, N);
    return to;
}

// The gradients of a block that fall out of the gradient of its input; where weights' gradients are made later they wait in a stash.
static const TensorKind norm_kinds[6] = {TENSOR_NORM1_WEIGHT, TENSOR_NORM1_BIAS, TENSOR_NORM2_WEIGHT,
                                         TENSOR_NORM2_BIAS,   TENSOR_Q_NORM,     TENSOR_K_NORM};

static void block_norm_gradients(Trainer *t, const BlockGrads *s, const Buffer g[TENSOR_KINDS], bool accumulate) {
    Device *d = &t->device;
    for (int i = 0; i < 6; i++) {
        const int64_t count = i < 4 ? t->model.config.channels : t->model.config.head_size;
        if (g[norm_kinds[i]].data == NULL) continue;
        if (accumulate) {
            d->accumulate(d, g[norm_kinds[i]], s->norms[i], count);
        } else {
            d->cast(d, g[norm_kinds[i]], s->norms[i], count);
        }
    }
}

// One block. dresidual: gradient of the residual stream (own tokens) behind the block becomes that before it. s holds the gradients of matrix
// products' outputs.
static void block_backward(Trainer *t, int64_t l, int64_t next, BlockActs *a, BlockGrads *s, Buffer dresidual, const Packing *packing,
                           int microbatch, int parts) {
    const ModelConfig *m = &t->layout.local;
    const int64_t N = packing->tokens, S = own_tokens(t, N), C = m->channels, Q = model_q_width(m), QKV = model_qkv_width(m), FF = m->ffn;
    const bool input = parts & BACKWARD_INPUT, weight = parts & BACKWARD_WEIGHT;
    const bool accumulate = weight && zero_accumulates(&t->zero, microbatch);
    Device *d = &t->device;
    Activations *x = &t->acts;
    const Buffer own_dnorm = own_part(t, x->dnorm, N);
    Buffer w[TENSOR_KINDS] = {{0}}, g[TENSOR_KINDS] = {{0}};
    if (input) block_weights(t, l, next, w);
    if (weight) zero_gradients(&t->zero, (int)l + 1, g);
    for (int i = 0; i < 6 && !weight; i++) g[norm_kinds[i]] = w[norm_kinds[i]].data != NULL ? s->norms[i] : ABSENT;

    // MLP
    Buffer dbranch = input ? branch_gradient(t, s->dmlp, dresidual, 2 * l + 1, N) : s->dmlp;
    if (m->activation == ACTIVATION_GELU) {
        if (weight) d->linear_backward_weight(d, g[TENSOR_PROJ_WEIGHT], g[TENSOR_PROJ_BIAS], accumulate, dbranch, a->act, N, FF, C);
        if (input) d->linear_backward_input(d, s->dfc, dbranch, w[TENSOR_PROJ_WEIGHT], a->fc, N, FF, C);
        if (weight) d->linear_backward_weight(d, g[TENSOR_FC_WEIGHT], g[TENSOR_FC_BIAS], accumulate, s->dfc, a->norm2, N, C, FF);
        if (input) d->linear_backward_input(d, x->dnorm, s->dfc, w[TENSOR_FC_WEIGHT], ABSENT, N, C, FF);
    } else {
        if (weight) d->linear_backward_weight(d, g[TENSOR_DOWN_WEIGHT], g[TENSOR_DOWN_BIAS], accumulate, dbranch, a->act, N, FF, C);
        if (input) d->linear_backward_input(d, x->dact, dbranch, w[TENSOR_DOWN_WEIGHT], ABSENT, N, FF, C);
        if (input) d->swiglu_backward(d, s->dfc, x->dact, a->fc, N, FF);
        if (weight) d->linear_backward_weight(d, g[TENSOR_GATE_WEIGHT], g[TENSOR_GATE_BIAS], accumulate, s->dfc, a->norm2, N, C, 2 * FF);
        if (input) d->linear_backward_input(d, x->dnorm, s->dfc, w[TENSOR_GATE_WEIGHT], ABSENT, N, C, 2 * FF);
    }
    if (input) {
        sum_partials(t, x->dnorm, N);
        d->norm_backward(d, dresidual, true, g[TENSOR_NORM2_WEIGHT], g[TENSOR_NORM2_BIAS], accumulate, own_dnorm, a->mid, a->mean2, a->rstd2,
                         w[TENSOR_NORM2_WEIGHT], m->norm, S, C);
    }
    // attention
    dbranch = input ? branch_gradient(t, s->datt_out, dresidual, 2 * l, N) : s->datt_out;
    if (weight) d->linear_backward_weight(d, g[TENSOR_O_WEIGHT], g[TENSOR_O_BIAS], accumulate, dbranch, a->att, N, Q, C);
    if (input) {
        d->linear_backward_input(d, x->datt, dbranch, w[TENSOR_O_WEIGHT], ABSENT, N, Q, C);
        d->attention_backward(d, s->dqkv, x->delta, x->datt, a->att, a->qkv, a->lse, packing, attention_shape(m));
        if (m->qk_norm || m->position == POSITION_ROPE) {
            d->qk_backward(d, s->dqkv, g[TENSOR_Q_NORM], g[TENSOR_K_NORM], accumulate, a->qkv_raw, a->qk_rstd, w[TENSOR_Q_NORM], w[TENSOR_K_NORM],
                           x->rope, x->positions, attention_shape(m), N);
        }
    }
    if (weight) d->linear_backward_weight(d, g[TENSOR_Q_WEIGHT], g[TENSOR_Q_BIAS], accumulate, s->dqkv, a->norm1, N, C, QKV);
    if (input) {
        d->linear_backward_input(d, x->dnorm, s->dqkv, w[TENSOR_Q_WEIGHT], ABSENT, N, C, QKV);
        sum_partials(t, x->dnorm, N);
        d->norm_backward(d, dresidual, true, g[TENSOR_NORM1_WEIGHT], g[TENSOR_NORM1_BIAS], accumulate, own_dnorm, a->in, a->mean1, a->rstd1,
                         w[TENSOR_NORM1_WEIGHT], m->norm, S, C);
    }
    if (weight && !input) block_norm_gradients(t, s, g, accumulate);
    if (weight) zero_gradients_done(&t->zero, (int)l + 1, microbatch + 1 == t->schedule.shape.microbatches);
}

// Gradients of the embedding from that of its output (own tokens).
static void embedding_backward(Trainer *t, Buffer dresidual, const Packing *packing, int microbatch) {
    const ModelConfig *m = &t->layout.local;
    const int64_t N = packing->tokens, C = m->channels;
    Device *d = &t->device;
    const Activations *a = &t->acts;
    Buffer g[TENSOR_KINDS], dout = dresidual;
    zero_gradients(&t->zero, 0, g);
    if (t->layout.sp) {
        dout = a->branch;
        d->cast(d, own_part(t, dout, N), dresidual, own_tokens(t, N) * C);
        gather_tokens(t, dout, N);
    }
    // Always +=: a tied head on this stage has left its gradient here, all others start from zero.
    const bool holds_head = m->tied && layout_has_head(&t->layout), accumulate = zero_accumulates(&t->zero, microbatch);
    if (!accumulate && !holds_head) d->zero(d, g[TENSOR_WTE].data, (size_t)(m->vocab * C) * sizeof(float));
    if (!accumulate && g[TENSOR_WPE].data != NULL) d->zero(d, g[TENSOR_WPE].data, (size_t)(m->max_seq * C) * sizeof(float));
    const Dropout dropout = dropout_at(t, SITE_EMBEDDING, 0);
    d->embedding_backward(d, g[TENSOR_WTE], g[TENSOR_WPE], dout, a->ids, a->positions, &dropout, N, C, t->layout.vocab_begin, m->vocab, m->max_seq);
    zero_gradients_done(&t->zero, 0, microbatch + 1 == t->schedule.shape.microbatches);
}

// A chunk of layers. dresidual: gradient of its output (the last chunk: head() has left that of the final norm's output in acts.dnorm) becomes
// that of its input. stash: one per layer where the parts of backward are apart.
static void chunk_backward(Trainer *t, int chunk, ChunkActs *acts, Buffer input, BlockGrads *stash, Buffer dresidual, const Packing *packing,
                           int microbatch, int parts) {
    const ModelConfig *m = &t->model.config;
    const int64_t N = packing->tokens, S = own_tokens(t, N), C = m->channels;
    const int64_t first = layout_first_layer(&t->layout, chunk), layers = layout_chunk_layers(&t->layout, chunk);
    const bool last_micro_batch = microbatch + 1 == t->schedule.shape.microbatches;
    Device *d = &t->device;
    if ((parts & BACKWARD_INPUT) && layout_is_last(&t->layout, chunk)) {
        const int unit = model_head_unit(&t->model);
        Buffer w[TENSOR_KINDS], g[TENSOR_KINDS];
        zero_weights(&t->zero, unit, w);
        zero_gradients(&t->zero, unit, g);
        d->norm_backward(d, dresidual, false, g[TENSOR_NORM_WEIGHT], g[TENSOR_NORM_BIAS], zero_accumulates(&t->zero, microbatch),
                         own_part(t, t->acts.dnorm, N), acts->last, acts->mean, acts->rstd, w[TENSOR_NORM_WEIGHT], m->norm, S, C);
        zero_gradients_done(&t->zero, unit, last_micro_batch);
    }
    acts->blocks[0].in = layout_is_first(&t->layout, chunk) ? acts->embedding : input;
    for (int64_t k = layers - 1; k >= 0; k--) {
        BlockGrads *grads = stash != NULL ? &stash[k] : &t->acts.grads;
        block_backward(t, first + k, k > 0 ? first + k - 1 : -1, &acts->blocks[k], grads, dresidual, packing, microbatch, parts);
        comm_progress(t->comm);
    }
    if ((parts & BACKWARD_INPUT) && layout_is_first(&t->layout, chunk)) embedding_backward(t, dresidual, packing, microbatch);
}

// ----------------------------------------------------------------------------
// One optimizer step

// With --graph on the device keeps what a micro-batch's action is made of, and launches it as a whole: true, nothing is left to do. Everything that
// decides a pointer, a shape or a flag is in the key; the key of dropout, the scale of the loss and the tokens are in device memory.
static bool launched_as_graph(Trainer *t, const Action *a, const Packing *packing) {
    const bool backward = a->kind != ACTION_FORWARD, last = a->microbatch + 1 == t->schedule.shape.microbatches;
    if (!t->options->graph || (backward && zero_reduces(&t->zero, last))) return false;
    const bool accumulate = backward && zero_accumulates(&t->zero, a->microbatch);
    const GraphKey key = {{a->kind, a->chunk, a->slot, a->input, a->gradient, a->stash, accumulate, t->keep_threshold, packing->tokens,
                           packing->documents, packing->max_length}};
    return t->device.graph_begin(&t->device, &key);
}

// What this stage does, in the order of its schedule.
static void run_action(Trainer *t, const Action *a, const StepBatch *batch) {
    const MicroBatch *micro = &batch->micros[a->microbatch];
    const int64_t count = own_tokens(t, padded_tokens(t, micro)) * t->model.config.channels; // elements of a message
    const CommType type = comm_type_of(t->dtype);
    Activations *x = &t->acts;
    const Buffer input = a->input >= 0 ? x->inputs[a->input] : ABSENT, gradient = a->gradient >= 0 ? x->gradients[a->gradient] : ABSENT;
    BlockGrads *stash = a->stash >= 0 ? x->stashes[a->stash] : NULL;
    ChunkActs *acts = a->slot >= 0 ? &x->slots[a->slot] : NULL;
    switch (a->kind) {
    case ACTION_RECV_FORWARD: t->input_received[a->input] = comm_recv_start(t->downstream, input.data, count, type, a->peer, 0); break;
    case ACTION_WAIT_RECV_FORWARD: comm_wait(&t->input_received[a->input]); break;
    case ACTION_SEND_FORWARD: t->slot_sent[a->slot] = comm_send_start(t->downstream, acts->last.data, count, type, a->peer, 0); break;
    case ACTION_WAIT_SEND_FORWARD: comm_wait(&t->slot_sent[a->slot]); break;
    case ACTION_RECV_BACKWARD: t->gradient_received[a->gradient] = comm_recv_start(t->upstream, gradient.data, count, type, a->peer, 0); break;
    case ACTION_WAIT_RECV_BACKWARD: comm_wait(&t->gradient_received[a->gradient]); break;
    case ACTION_SEND_BACKWARD: t->gradient_sent[a->gradient] = comm_send_start(t->upstream, gradient.data, count, type, a->peer, 0); break;
    case ACTION_WAIT_SEND_BACKWARD: comm_wait(&t->gradient_sent[a->gradient]); break;
    case ACTION_FORWARD: {
        const Packing packing = upload(t, micro);
        if (launched_as_graph(t, a, &packing)) break;
        chunk_forward(t, a->chunk, acts, input, &packing);
        t->device.graph_end(&t->device);
        break;
    }
    case ACTION_BACKWARD:
    case ACTION_BACKWARD_INPUT:
    case ACTION_BACKWARD_WEIGHT: {
        const int parts = a->kind == ACTION_BACKWARD ? BACKWARD_BOTH : a->kind == ACTION_BACKWARD_INPUT ? BACKWARD_INPUT : BACKWARD_WEIGHT;
        const Packing packing = upload(t, micro);
        if (launched_as_graph(t, a, &packing)) break;
        if ((parts & BACKWARD_INPUT) && layout_is_last(&t->layout, a->chunk)) {
            head(t, acts, packing.tokens, &t->state->loss_scale, true, a->microbatch);
            t->device.loss_sum(&t->device, t->state, x->losses, &t->state->loss_scale, packing.tokens);
        }
        chunk_backward(t, a->chunk, acts, input, stash, gradient, &packing, a->microbatch, parts);
        t->device.graph_end(&t->device);
        break;
    }
    case ACTION_KINDS: break;
    }
}

// Gradients of the whole step: every micro-batch forward and backward; the loss is the mean over all valid tokens.
static void accumulate_gradients(Trainer *t, const StepBatch *batch) {
    int64_t valid = batch->valid_global;
    if (valid < 0) { // only the data-parallel ranks together know
        valid = batch->valid;
        comm_all_reduce(t->groups[LAYOUT_DP], &valid, 1, COMM_I64, COMM_SUM);
    }
    const double scale = valid > 0 ? 1.0 / (double)valid : 0.0;
    t->device.copy_in(&t->device, &t->state->loss_scale, &scale, sizeof scale);
    zero_step_begin(&t->zero);
    t->uploaded = NULL;
    for (int64_t i = 0; i < t->schedule.count; i++) {
        const Action *a = &t->schedule.actions[i];
        trace_begin(&t->trace, action_kind_names[a->kind], a->microbatch, a->chunk);
        run_action(t, a, batch);
        trace_end(&t->trace);
        comm_progress(t->comm);
    }
    trace_begin(&t->trace, "reduce gradients", -1, -1);
    zero_gradients_finish(&t->zero);
    trace_end(&t->trace);
}

// Starts step n (from 1): the scalars that live on the device, and the key of its dropout.
static void step_begin(Trainer *t, int64_t step) {
    const StepState fresh = {.lr = learning_rate(t->options, step), .dropout_key = rng_dropout_key((uint64_t)t->options->seed, (uint64_t)step)};
    t->device.copy_in(&t->device, t->state, &fresh, offsetof(StepState, optimizer_steps));
    t->keep_threshold = rng_dropout_threshold(t->model.config.dropout);
}

// Sums the loss and the squares of the gradient over all ranks, where they are: each token and each parameter counts once.
static void sum_scalars(Trainer *t) {
    static_assert(offsetof(StepState, grad_squares) == offsetof(StepState, loss_sum) + sizeof(double), "neighbours, summed together");
    if (!layout_speaks(&t->layout)) t->device.zero(&t->device, &t->state->loss_sum, sizeof t->state->loss_sum);
    comm_all_reduce(t->comm->world, &t->state->loss_sum, 2, COMM_F64, COMM_SUM);
}

// Ends it: norm, clipping and update of this rank's shards, new parameters for all. The device may still be at work: step_result waits for it.
static void step_end(Trainer *t, int64_t step) {
    Device *d = &t->device;
    Zero *zero = &t->zero;
    AdamW config = optimizer_config(t->options);
    trace_begin(&t->trace, "update", -1, -1);
    for (int u = 0; u < t->model.units; u++) {
        if (zero->range[u].count == 0) continue;
        const ZeroShard shard = zero_shard(zero, u);
        d->grad_squares(d, t->state, shard.grad, shard.counted, shard.counted_count);
    }
    if (t->comm->size > 1) sum_scalars(t);
    d->step_decide(d, t->state, t->options->clip);
    d->snapshot_fence(d); // a save may still be reading what the updates write
    for (int u = 0; u < t->model.units; u++) {
        if (zero->range[u].count == 0) continue;
        const ZeroShard shard = zero_shard(zero, u);
        config.rounding = (Rounding){rng_round_key((uint64_t)t->options->seed, (uint64_t)step), (uint64_t)u, shard.first};
        d->adamw(d, t->state, shard.param, shard.master, shard.adam_m, shard.adam_v, shard.grad, shard.segments, shard.segment_count, config);
        zero_publish(zero, u);
        comm_progress(t->comm);
    }
    trace_end(&t->trace);
    trace_begin(&t->trace, "gather parameters", -1, -1);
    zero_publish_finish(zero);
    trace_end(&t->trace);
    const int slot = (int)(step % DEVICE_SLOTS);
    d->copy_out_start(d, slot, &t->results[slot], t->state, sizeof *t->state);
    t->keep_threshold = 65536;
}

// What happened in one of the last DEVICE_SLOTS steps, the same on every rank; asked for in their order.
static StepState step_result(Trainer *t, int64_t step) {
    const int slot = (int)(step % DEVICE_SLOTS);
    t->device.copy_out_finish(&t->device, slot);
    t->optimizer_steps = t->results[slot].optimizer_steps;
    return t->results[slot];
}

// ----------------------------------------------------------------------------
// Validation and generation: forward only, no state of training is touched.

// A micro-batch through all stages. Returns its tokens on this rank; on the last stage the first slot then holds what the head reads.
static int64_t forward_only(Trainer *t, const MicroBatch *batch) {
    t->uploaded = NULL; // the caller's memory may hold another one than last time
    const Packing packing = upload(t, batch);
    const int64_t count = own_tokens(t, packing.tokens) * t->model.config.channels;
    const CommType type = comm_type_of(t->dtype);
    const int stages = t->layout.mesh.pp, stage = t->layout.mesh.at.pp;
    ChunkActs *acts = &t->acts.slots[0];
    for (int chunk = 0; chunk < t->layout.virtual_stages; chunk++) {
        const Buffer input = layout_is_first(&t->layout, chunk) ? ABSENT : t->acts.inputs[0];
        if (input.data != NULL) comm_recv(t->downstream, input.data, count, type, (stage + stages - 1) % stages, 0);
        chunk_forward(t, chunk, acts, input, &packing);
        if (!layout_is_last(&t->layout, chunk)) comm_send(t->downstream, acts->last.data, count, type, (stage + 1) % stages, 0);
    }
    t->uploaded = NULL;
    return packing.tokens;
}

// The sum of the losses of a micro-batch, on the rank that speaks for its replica; elsewhere 0.
static double losses_of(Trainer *t, const MicroBatch *batch) {
    StepState state;
    const int64_t N = forward_only(t, batch);
    if (!layout_has_head(&t->layout)) return 0;
    t->device.zero(&t->device, t->look_state, sizeof *t->look_state);
    head(t, &t->acts.slots[0], N, NULL, false, 0);
    t->device.loss_sum(&t->device, t->look_state, t->acts.losses, NULL, N);
    t->device.copy_out(&t->device, &state, t->look_state, sizeof state);
    return layout_speaks(&t->layout) ? state.loss_sum : 0;
}

// ----------------------------------------------------------------------------
// A run: the trainer with its data, its place on disk and its log

typedef struct {
    Comm *comm;
    Setup setup; // what it is made of
    Trainer trainer;
    Monitor monitor;
    Saving saving;
    int64_t step;                    // done
    int64_t first_step;              // done before this process began
    size_t resident_start_bytes;     // of the process, everything allocated and no step done
    bool traced;                     // the trace is written
    CommCount step_comm[COMM_KINDS]; // what this rank communicated in training steps
    int64_t tokens;                  // trained on
    int64_t skipped;                 // steps in a row whose loss or norm was not finite
    StepRecord record;               // of the last step, as long as its result is not known; step 0: none
    double started_ms, recorded_ms;  // when that step began; when the last one was recorded
    Error outcome;                   // what it came to, the same on all ranks: CODE_NUMERIC when the last results are no numbers
    int64_t *sample_ids;             // (global batch) of --log-samples
} Run;

static bool is_first(const Run *run) { return run->comm->rank == 0; } // the rank that speaks and writes

// Ends the run with an error that every rank has met alike; one of them tells it.
static void end_with(Run *run, const Error *error) __attribute__((noreturn));
static void end_with(Run *run, const Error *error) {
    Error ignored = {0};
    Saving *saving = &run->saving;
    if (run->record.step > 0) saving_step_closed(saving, run->record.step, step_result(&run->trainer, run->record.step).optimizer_steps, 0);
    if (saving_is_under_way(saving)) (void)saving_finish(saving, run->step, &ignored); // what is begun may still become one
    if (run->comm->size == 1) monitor_close(&run->monitor, &ignored), die_error(error);
    if (is_first(run)) monitor_close(&run->monitor, &ignored), fprintf(stderr, "train_gpt: %s\n", error->text);
    comm_finish(run->comm);
    exit(error->code);
}

// Ends the run with an error of this rank alone; the console line is ended first.
static void require(Run *run, bool good, const Error *error) {
    if (good) return;
    if (run->comm->size == 1) end_with(run, error);
    Error ignored = {0};
    monitor_close(&run->monitor, &ignored);
    comm_abort(run->comm, error->code, "%s", error->text);
}

// What every rank must have managed before the run goes on: the first rank that has not tells why, and all end.
static void require_all(Run *run, bool good, Error *error) {
    if (!setup_agree(run->comm, good, error)) end_with(run, error);
}

static bool due(int64_t every, int64_t step) { return every > 0 && step % every == 0; }

// Why any rank was asked to stop (else NULL), the tokens of all ranks (optional), and whether all have written what they save: told between two
// steps, so that all ranks stop, or commit, at the same one, and give the same reason. `out`: where a file `stop` asks too.
static const char *agree_on_stop(Run *run, const char *out, int64_t *tokens) {
    const StopReason own = signals_stop_requested(is_first(run) ? out : NULL);
    const CheckpointSave *save = &run->saving.save;
    int64_t sums[2 + STOP_REASONS] = {tokens != NULL && layout_speaks(&run->setup.layout) ? *tokens : 0,
                                      saving_is_under_way(&run->saving) && !checkpoint_save_written(save)}; // then how many ranks have a reason
    sums[2 + own]++;
    comm_all_reduce(run->comm->world, sums, 2 + STOP_REASONS, COMM_I64, COMM_SUM);
    if (tokens != NULL) *tokens = sums[0];
    run->saving.written = sums[1] == 0;
    int reason = STOP_REASONS - 1;
    while (reason > STOP_NONE && sums[2 + reason] == 0) reason--;
    return stop_reason_names[reason];
}

// Mean loss over the valid tokens of at most --val-batches micro-batches, the same ones every time and on any number of ranks. False: it is no
// number.
static bool validate(Run *run) {
    Error error = {0};
    double sums[2] = {0, 0}; // of losses, of valid tokens
    const Trainer *t = &run->trainer;
    if (run->setup.options.val == NULL) return true;
    comm_heartbeat(run->comm, run->step, "validation");
    loader_rewind(&run->setup.val);
    for (int64_t i = 0; i < ceil_div(run->setup.options.val_batches, t->layout.mesh.dp); i++) {
        const StepBatch *batch = loader_next(&run->setup.val, &error);
        require(run, error.code == 0, &error);
        if (batch == NULL) break;
        const double losses = losses_of(&run->trainer, &batch->micros[0]); // also of one too many: other ranks wait for this one's part
        if (layout_speaks(&t->layout) && i * t->layout.mesh.dp + t->layout.mesh.at.dp < run->setup.options.val_batches) {
            sums[0] += losses;
            sums[1] += (double)batch->valid;
        }
        if (agree_on_stop(run, NULL, NULL) != NULL) return true; // half a validation says nothing
    }
    comm_all_reduce(run->comm->world, sums, 2, COMM_F64, COMM_SUM);
    const double loss = sums[1] > 0 ? sums[0] / sums[1] : (double)NAN;
    require(run, !is_first(run) || monitor_val(&run->monitor, run->step, loss, &error), &error);
    return isfinite(loss) || sums[1] == 0;
}

// This rank's share (count, V) of the first logits of a chunk, into host memory.
static void read_logits(Trainer *t, int64_t count, float *logits) {
    const int64_t V = t->layout.local.vocab;
    const Buffer from = t->acts.logits;
    uint16_t *narrow = base_new((size_t)V, sizeof *narrow);
    for (int64_t n = 0; n < count; n++) {
        const void *row = buffer_at(from, n * buffer_row(from, V)).data;
        if (from.dtype == DTYPE_F32) {
            t->device.copy_out(&t->device, logits + n * V, row, (size_t)V * sizeof *logits);
        } else {
            t->device.copy_out(&t->device, narrow, row, (size_t)V * sizeof *narrow);
            for (int64_t v = 0; v < V; v++) logits[n * V + v] = bf16_to_f32(narrow[v]);
        }
    }
    free(narrow);
}

// Logits of the token that follows `count` tokens, into host memory (V), on the ranks of the last stage. Recomputes the whole context.
static void next_logits(Trainer *t, const int32_t *context, int64_t count, float *logits) {
    const ModelConfig *m = &t->layout.local;
    const int64_t V = t->model.config.vocab;
    int32_t *numbers = base_new((size_t)(3 * count), sizeof *numbers), *targets = numbers + count, *positions = numbers + 2 * count;
    int32_t ends[2] = {0, (int32_t)count};
    for (int64_t i = 0; i < count; i++) numbers[i] = context[i], targets[i] = -1, positions[i] = (int32_t)i;
    const MicroBatch batch = {.rows = 1,
                              .tokens = count,
                              .documents = 1,
                              .max_length = count,
                              .ids = numbers,
                              .targets = targets,
                              .positions = positions,
                              .token_index = positions,
                              .cu_seqlens = ends};
    (void)forward_only(t, &batch);
    free(numbers);
    if (!layout_has_head(&t->layout)) return;
    Buffer w[TENSOR_KINDS];
    zero_weights(&t->zero, unit_of_head_weight(t), w);
    const Buffer norm = buffer_at(t->acts.slots[0].norm, (count - 1) * m->channels);
    t->device.linear_forward(&t->device, t->acts.logits, ABSENT, norm, w[model_head_kind(m)], ABSENT, 1, m->channels, m->vocab);
    memset(logits, 0, (size_t)V * sizeof *logits); // other ranks' shares of the vocabulary
    read_logits(t, 1, logits + t->layout.vocab_begin);
    comm_all_reduce(t->groups[LAYOUT_TP], logits, V, COMM_F32, COMM_SUM);
}

// The token that follows, drawn by the rank that speaks for the first replica and told to all. The other replicas compute along
// only where they hold shards of the parameters.
enum { STOPPED = -1, NOT_FINITE = -2 }; // instead of a token: that rank was asked to stop; the logits are no numbers
static int32_t next_token(Run *run, const int32_t *context, int64_t count, int64_t number, float *logits) {
    const Options *o = &run->setup.options;
    Trainer *t = &run->trainer;
    const Mesh *mesh = &t->layout.mesh;
    const int speaker = mesh_rank(mesh, (MeshAt){0, 0, mesh->pp - 1, 0});
    const SamplingConfig sampling = {o->temperature, o->top_k, o->top_p};
    int64_t id = STOPPED;
    if (mesh->at.dp == 0 || t->layout.zero == 3) next_logits(t, context, count, logits);
    if (mesh->rank == speaker && signals_stop_requested(NULL) == STOP_NONE) {
        const Philox r = philox(rng_key((uint64_t)o->seed, RNG_SAMPLE), (uint64_t)run->step, (uint64_t)number);
        id = sampling_choose(logits, run->setup.config.vocab, sampling, (double)r.x[0] / 4294967296.0);
        for (int64_t v = 0; v < run->setup.config.vocab && id >= 0; v++) id = isfinite(logits[v]) ? id : NOT_FINITE;
    }
    comm_broadcast(run->comm->world, &id, 1, COMM_I64, speaker);
    return (int32_t)id;
}

// Prints --sample-tokens tokens after the prompt (or after an end of document). Text when there is a tokenizer, else ids.
static void generate(Run *run) {
    comm_heartbeat(run->comm, run->step, "generation");
    const Options *o = &run->setup.options;
    const int64_t V = run->setup.config.vocab, limit = o->seq;
    TokenIds prompt = {0};
    if (o->prompt != NULL && run->setup.has_tokenizer)
        tokenizer_encode(&run->setup.tokenizer, o->prompt, (int64_t)strlen(o->prompt), true, &prompt);
    int64_t count = prompt.count;
    token_ids_reserve(&prompt, 1 + o->sample_tokens);
    int32_t *ids = prompt.ids;
    float *logits = base_new((size_t)V, sizeof *logits);
    const int64_t shown = count, eot = run->setup.train_set.info.eot >= 0 ? run->setup.train_set.info.eot : run->setup.tokenizer.eot;
    if (count == 0) ids[count++] = eot >= 0 && eot < V ? (int32_t)eot : 0;
    const int64_t begin = count;
    for (int64_t i = 0; i < o->sample_tokens; i++) {
        const int64_t from = max_i64(0, count - limit);
        ids[count] = next_token(run, ids + from, count - from, i, logits);
        if (ids[count] == NOT_FINITE && run->outcome.code == CODE_OK) {
            fail(&run->outcome, CODE_NUMERIC, "sampling, after step %lld: the logits are not finite", (long long)run->step);
        }
        if (ids[count] < 0) break;
        count++;
    }
    Error error = {0};
    const int64_t first = shown > 0 ? 0 : begin; // the end of document that stands for a prompt is not shown
    require(run, !is_first(run) || report_sample(&run->monitor, &run->setup, ids + first, count - first, &error), &error);
    free(logits);
    token_ids_free(&prompt);
}

// ----------------------------------------------------------------------------
// Checkpoints

// Finishes the save under way, if there is one. A failed one ends the run; what was there before stays.
static void finish_save(Run *run) {
    Saving *saving = &run->saving;
    if (!saving_is_under_way(saving)) return;
    Error error = {0};
    const int64_t step = saving->point.step;
    comm_heartbeat(run->comm, run->step, "saving");
    if (!saving_finish(saving, run->step, &error)) end_with(run, &error);
    if (!is_first(run)) return;
    MonitorJson *event = monitor_event_begin(&run->monitor, "save");
    monitor_put_int(event, "saved_step", step);
    monitor_put_real(event, "cost_ms", saving->cost_ms);
    monitor_put_real(event, "duration_ms", clock_ms() - saving->began_ms);
    require(run, monitor_event_end(&run->monitor, &error), &error);
}

// Goes on with the save under way where that takes no waiting.
static void advance_save(Run *run) {
    Error error = {0};
    if (!saving_advance(&run->saving, &error)) end_with(run, &error);
}

// Begins a save of this step, which is written while training goes on. With `wait`, or where there is no room for a copy, this returns when the
// checkpoint is there.
static void save(Run *run, bool wait) {
    finish_save(run);
    Error error = {0};
    comm_heartbeat(run->comm, run->step, "saving");
    const SavingPoint point = {run->step, run->tokens, run->trainer.optimizer_steps, loader_position(&run->setup.train)};
    if (!saving_begin(&run->saving, &point, wait, &error)) end_with(run, &error);
    if (wait || !saving_is_async(&run->saving)) finish_save(run);
}

static void load(Run *run, const Checkpoint *checkpoint) {
    Trainer *t = &run->trainer;
    Error error = {0};
    int count;
    CheckpointSlice *slices = state_slices(&t->zero, false, &count);
    require(run, state_read(&t->zero, checkpoint, slices, count, &error), &error);
    free(slices);
    trainer_set_steps(t, checkpoint->manifest.state.optimizer_steps);
    publish_parameters(t, false);
}

// --init-from. Closes the weights.
static void load_weights(Run *run, ModelWeights *weights) {
    Error error = {0};
    require(run, state_read_weights(&run->trainer.zero, weights, &error), &error);
    weights_close(weights);
    publish_parameters(&run->trainer, true);
}

// --dump-grads: the gradients as they are before clipping.
static void dump_gradients(Run *run) {
    const char *directory = run->setup.options.dump_grads;
    Error error = {0};
    if (directory == NULL) return;
    require(run, export_gradients(&run->trainer.zero, directory, &error), &error);
}

// --export-hf: rank 0 writes what all gather.
static void export_hf(Run *run) {
    const Options *o = &run->setup.options;
    Error error = {0};
    if (o->export_hf == NULL) return;
    require(run, export_model(&run->trainer.zero, o, setup_eot(&run->setup), run->step, &error), &error);
    if (is_first(run)) monitor_say(&run->monitor, "%s holds the model in %s", o->export_hf, dtype_names[run->trainer.dtype]);
}

// ----------------------------------------------------------------------------
// Records of steps, the trace, the end

// The ids of the whole global batch, in its order: replica after replica.
static void gather_sample_ids(Run *run, const StepBatch *batch) {
    comm_all_gather(run->trainer.groups[LAYOUT_DP], run->sample_ids, batch->sample_ids, batch->sequences, COMM_I64);
}

// Opens the record of a step that was begun at started_ms.
static void open_record(Run *run, const StepBatch *batch, int64_t tokens, double started_ms) {
    run->step++;
    run->tokens += tokens;
    run->started_ms = started_ms;
    saving_step_opened(&run->saving);
    if (run->setup.options.log_samples) gather_sample_ids(run, batch);
    run->record = (StepRecord){.step = run->step, .tokens = tokens, .samples = run->sample_ids, .sample_count = run->setup.options.global_batch};
}

// Whether the result of a step is wanted before the next one begins: where it is there anyway, and by whatever comes between the two.
static bool wants_result(const Run *run, int64_t step, const char *stop) {
    const Options *o = &run->setup.options;
    return run->trainer.device.on_host || stop != NULL || step == o->steps || o->log_samples || due(o->val_every, step) ||
           due(o->sample_every, step) || (saving_is_due(&run->saving, step) && !saving_is_async(&run->saving));
}

// Waits for the result of the step whose record is open, if one is, and logs it. A step that was skipped is told, and after --bad-steps in a row
// the run ends.
static void close_record(Run *run) {
    const Options *o = &run->setup.options;
    Error error = {0};
    StepRecord *record = &run->record;
    if (record->step == 0) return;
    const int64_t step = record->step;
    const StepState result = step_result(&run->trainer, step);
    const double now_ms = clock_ms();
    record->loss = result.loss_sum, record->grad_norm = result.grad_norm, record->lr = result.lr;
    record->ms = now_ms - fmax(run->started_ms, run->recorded_ms); // a step that was begun early has waited for the one before
    run->recorded_ms = now_ms;
    saving_step_closed(&run->saving, step, result.optimizer_steps, record->ms);
    require(run, !is_first(run) || monitor_step(&run->monitor, record, &error), &error);
    record->step = 0;
    run->skipped = result.skip ? run->skipped + 1 : 0;
    if (!result.skip) return;
    if (is_first(run)) {
        MonitorJson *event = monitor_event_begin(&run->monitor, "skipped");
        monitor_put_int(event, "in_a_row", run->skipped);
        require(run, monitor_event_end(&run->monitor, &error), &error);
    }
    if (step == o->steps) {
        fail(&run->outcome, CODE_NUMERIC, "step %lld, the last: loss %g, gradient norm %g: not finite, the step was skipped (lower --lr?)",
             (long long)step, result.loss_sum, result.grad_norm);
    }
    if (run->skipped >= o->bad_steps) {
        fail(&error, CODE_NUMERIC, "step %lld: loss %g, gradient norm %g: %lld steps in a row were not finite and were skipped (lower --lr?)",
             (long long)step, result.loss_sum, result.grad_norm, (long long)run->skipped);
        end_with(run, &error);
    }
}

// The last record of a finished run; closes the log.
static void record_end(Run *run, bool finished) {
    Error error = {0};
    MonitorRank own = {.activation_peak_bytes = run->trainer.arena_bytes, .resident_start_bytes = run->resident_start_bytes};
    memcpy(own.step_comm, run->step_comm, sizeof own.step_comm);
    const bool good = report_end(&run->monitor, &run->trainer.zero, own, run->trainer.init_hash, run->step - run->first_step, finished, &error);
    require(run, good, &error);
}

// Before (-1) and after (1) a step: what it communicated is the difference.
static void count_step(Run *run, int sign) {
    for (int kind = 0; kind < COMM_KINDS; kind++) {
        run->step_comm[kind].calls += sign * run->comm->counts[kind].calls;
        run->step_comm[kind].bytes += sign * run->comm->counts[kind].bytes;
    }
}

// Writes the trace once its steps are over, or what there is of it when the run ends before. A file that cannot be written does not end the
// training.
static void write_trace(Run *run, bool ending) {
    Trace *trace = &run->trainer.trace;
    Error error = {0};
    if (trace->first == 0 || run->traced || run->step < trace->first || !(ending || run->step >= trace->last)) return;
    run->traced = true;
    char *path = path_join(run->setup.options.out, "trace.json"), text[512];
    const bool good = trace_write(trace, run->comm, path, &error); // of all ranks alike
    if (!good && run->outcome.code == CODE_OK) run->outcome = error;
    if (is_first(run)) monitor_say(&run->monitor, "%s", good ? trace_summary(trace, path, text) : error.text);
    if (good && is_first(run) && trace_phases(trace, text)[0] != '\0') monitor_say(&run->monitor, "ms a step on rank 0: %s", text);
    free(path);
}

// Gives back all but the trainer.
static void run_end(Run *run) {
    free(run->sample_ids);
    setup_free(&run->setup);
    comm_finish(run->comm);
}

#ifndef TRAIN_GPT_NO_MAIN
// --help, --version, --model list
static int inform(Run *run) {
    if (is_first(run)) report_information(&run->setup.options);
    comm_finish(run->comm);
    return CODE_OK;
}

// --steps 0 --export-hf of weights that are there
static int convert(Run *run) {
    Error error = {0};
    if (!hf_convert(run->comm, &run->setup.options, &error)) end_with(run, &error);
    options_free(&run->setup.options);
    comm_finish(run->comm);
    return CODE_OK;
}

// The device's clock, for traces.
static int64_t mark(void *device) { return ((Device *)device)->mark(device); }
static void mark_times(void *device, int64_t *ns, int64_t count) { ((Device *)device)->mark_times(device, ns, count); }

// Allocates, initialises or loads, opens the log and says what is about to happen.
static void begin(Run *run, int argc, char **argv) {
    Setup *setup = &run->setup;
    const Options *o = &setup->options;
    Trainer *t = &run->trainer;
    Error error = {0};
    run->first_step = run->step = setup->step;
    run->tokens = setup->tokens;
    trainer_create(t, o, &setup->config, run->comm, setup->device);
    trainer_init_parameters(t);
    run->saving = (Saving){.setup = setup, .zero = &t->zero, .first_step = run->step};
    if (setup->resumes) load(run, &setup->checkpoint), checkpoint_close(&setup->checkpoint);
    if (!setup->resumes && o->init_from != NULL) load_weights(run, &setup->weights);
    if (o->log_samples) run->sample_ids = base_new((size_t)o->global_batch, sizeof *run->sample_ids);
    const double peak_flops = t->device.peak_flops(&t->device, t->dtype);
    // A run that only looks (--steps 0) at an existing checkpoint leaves its log alone.
    const char *log = setup->resumes && o->steps == 0 ? NULL : o->out;
    require_all(run, !is_first(run) || monitor_open(&run->monitor, log, o->steps, setup->resumes, run->step, &error), &error);
    monitor_rates(&run->monitor, model_flops_per_token(&t->model, o->seq), peak_flops * run->comm->size);
    if (run->comm->mpi) run->monitor.terminal = false; // a launcher's pipe, even where it looks like a terminal
    const int64_t parameters = model_parameters(&t->model);
    if (log != NULL && is_first(run)) require(run, monitor_run_json(log, argc, argv, o, &setup->config, parameters, &error), &error);
    if (is_first(run)) report_begin(setup, &t->device);
    if (run->comm->size > 1) comm_watchdog(run->comm, (double)o->watchdog);
    if (o->trace != NULL && setup->trace_last <= run->step && is_first(run)) {
        monitor_say(&run->monitor, "trace: this run goes on after step %lld, steps %lld to %lld are done", (long long)run->step,
                    (long long)setup->trace_first, (long long)setup->trace_last);
    }
    if (o->trace != NULL && setup->trace_last > run->step) {
        const MeshAt at = t->layout.mesh.at;
        char label[96];
        snprintf(label, sizeof label, "tp %d, pp %d, dp %d", at.tp, at.pp, at.dp);
        trace_open(&t->trace, run->comm, setup->trace_first, setup->trace_last);
        trace_label(&t->trace, label);
        if (!t->device.on_host) trace_clock(&t->trace, (TraceClock){&t->device, mark, mark_times});
    }
    size_t peak_bytes;
    monitor_resident(&run->resident_start_bytes, &peak_bytes);
}

// The validation that a run ends with decides what it came to.
static void validate_last(Run *run) {
    if (!validate(run) && run->outcome.code == CODE_OK) {
        fail(&run->outcome, CODE_NUMERIC, "the last validation, after step %lld: the loss is not finite%s", (long long)run->step,
             run->setup.options.steps > 0 ? " (lower --lr?)" : ", nor are the weights, or they are far too large");
    }
}

// Validates and samples when that is due after a step. A wish to stop that came meanwhile (why, else NULL) saves what the step has left.
static const char *look(Run *run, int64_t step) {
    const Options *o = &run->setup.options;
    const bool validates = due(o->val_every, step) && o->val != NULL, samples = due(o->sample_every, step);
    if (validates) (void)validate(run);
    if (samples) generate(run);
    const char *stop = validates || samples ? agree_on_stop(run, o->out, NULL) : NULL;
    if (stop != NULL && o->out != NULL && run->saving.point.step != step) save(run, true);
    return stop;
}

int main(int argc, char **argv) {
    static Run run; // large, and loaders must not move
    Options *o = &run.setup.options;
    Error error = {0};
    Trainer *t = &run.trainer;
    bool idle;
    run.setup.lock = run.monitor.log = -1;

    threads_wait_briefly(argv);
    if (!signals_block(&error)) die_error(&error); // before MPI starts threads
    run.comm = run.setup.comm = comm_init(&argc, &argv);
    threads_share_host(run.comm->local_size);
    require_all(&run, options_parse(o, argc, argv, &error), &error);
    if (o->help || o->version || (o->model != NULL && strcmp(o->model, "list") == 0)) return inform(&run);

    if (hf_convert_wanted(o)) return convert(&run);
    if (!setup_check(&run.setup, &idle, &error)) end_with(&run, &error);
    if (idle) {
        if (run.setup.resumes) checkpoint_close(&run.setup.checkpoint);
        run_end(&run);
        return CODE_OK;
    }
    begin(&run, argc, argv);

    const char *stop = agree_on_stop(&run, NULL, NULL);
    while (run.step < o->steps && stop == NULL) {
        const double started = clock_ms();
        const int64_t step = run.step + 1;
        comm_heartbeat(run.comm, step, "training");
        trace_step(&t->trace, step);
        trace_begin(&t->trace, "loader", -1, -1);
        const StepBatch *batch = loader_next(&run.setup.train, &error);
        require(&run, batch != NULL, &error);
        trace_end(&t->trace);
        if (batch->valid_global == 0 && is_first(&run))
            monitor_say(&run.monitor, "step %lld: no token of this batch has a target", (long long)step);
        count_step(&run, -1);
        step_begin(t, step);
        accumulate_gradients(t, batch);
        step_end(t, step);
        close_record(&run); // of the step before, where the device was still at it
        int64_t tokens = batch->tokens;
        stop = agree_on_stop(&run, o->out, &tokens);
        count_step(&run, 1);
        if (step == 1) dump_gradients(&run); // the update has left them as they were
        open_record(&run, batch, tokens, started);
        if (wants_result(&run, step, stop)) close_record(&run);
        write_trace(&run, stop != NULL);

        const bool last = step == o->steps;
        advance_save(&run);
        if (run.saving.written || stop != NULL) finish_save(&run);
        if (o->out != NULL && (saving_is_due(&run.saving, step) || (last && o->save_every != 0) || stop != NULL)) save(&run, last || stop != NULL);
        if (stop == NULL && !last) stop = look(&run, step);
    }
    finish_save(&run);
    if (stop == NULL) {
        validate_last(&run);
        if (o->sample_every > 0 || o->prompt != NULL) generate(&run);
        export_hf(&run);
    }
    write_trace(&run, true);
    if (stop == NULL) stop = agree_on_stop(&run, NULL, NULL); // in the last validation: the next --resume auto finishes the run
    if (is_first(&run)) saving_say_interval(&run.saving, &run.monitor);
    require(&run, !is_first(&run) || !o->graph || report_graphs(&run.monitor, t->device.graph_counts(&t->device), &error), &error);
    record_end(&run, stop == NULL);
    if (stop != NULL && is_first(&run)) {
        fprintf(stderr, "train_gpt: stopped by %s after step %lld%s\n", stop, (long long)run.step, o->out != NULL && run.step > 0 ? ", saved" : "");
    }
    if (stop == NULL && run.outcome.code != CODE_OK && is_first(&run)) fprintf(stderr, "train_gpt: %s\n", run.outcome.text);
    trainer_free(t);
    run_end(&run);
    return stop != NULL ? CODE_PREEMPTED : run.outcome.code;
}
#endif
