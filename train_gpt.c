// train_gpt.c: the trainer. Reads top to bottom: the trainer's state, forward, backward, one optimizer step, validation,
// generation, checkpoints, main. Started by mpirun, every rank runs it on its share of the global batch (data parallel). Every op is a call through
// the device table (llmc/device.h); shapes are in the legend of llmc/model.h.

#include "llmc/activations.h" // Activations, activations_layout
#include "llmc/base.h"        // Error, die, clock_ms
#include "llmc/checkpoint.h"  // checkpoint_save, checkpoint_load
#include "llmc/comm.h"        // Comm, comm_all_reduce
#include "llmc/cpu/cpu.h"     // device_cpu
#include "llmc/cpu/threads.h" // threads_wait_briefly
#include "llmc/device.h"      // Device, Buffer
#include "llmc/loader.h"      // Loader, StepBatch, MicroBatch
#include "llmc/model.h"       // Model, tensor table
#include "llmc/monitor.h"     // Monitor
#include "llmc/optimizer.h"   // learning_rate, optimizer_update
#include "llmc/options.h"     // Options
#include "llmc/plan.h"        // plan_print
#include "llmc/rope.h"        // rope_table_fill
#include "llmc/sampling.h"    // sampling_choose
#include "llmc/signals.h"     // signals_block, signals_stop_requested
#include "llmc/tokenizer.h"   // tokenizer_encode, tokenizer_decode
#include "llmc/zero.h"        // Zero, Unit

typedef struct {
    const Options *options;
    Comm *comm; // all ranks are replicas: each holds the whole model
    Model model;
    Device device;
    Dtype dtype; // of weights and activations
    Zero zero;   // parameters, gradients, optimizer state
    Activations acts;
    void *arena; // of acts
    size_t arena_bytes;
    StepState *state;        // device memory
    int64_t optimizer_steps; // updates applied so far
    uint64_t dropout_key;    // of the running step
    uint32_t keep_threshold; // 65536 outside of training: nothing is dropped
    CommHandle *reductions;  // (units) of gradients, in flight
    uint64_t init_hash;
    double peak_flops; // rate of a large matrix product: what MFU is a share of
} Trainer;

static const Buffer ABSENT = {NULL, DTYPE_F32};

// ----------------------------------------------------------------------------
// Creation

// Where the exact fp32 value of a parameter lives: the parameter itself, or its master copy.
static Buffer full_precision(const Trainer *t, int tensor) {
    return buffer_at(t->dtype == DTYPE_F32 ? t->zero.param : t->zero.master, t->zero.offset[tensor]);
}

// Brings the parameters of a tensor in line with their master copy.
static void round_to_storage(Trainer *t, int tensor) {
    if (t->dtype == DTYPE_F32) return;
    t->device.cast(&t->device, buffer_at(t->zero.param, t->zero.offset[tensor]), full_precision(t, tensor), t->model.tensors[tensor].elements);
}

// Initial parameters are drawn on the host from (seed, tensor, element), a piece at a time: the same for every layout.
static void trainer_init_parameters(Trainer *t) {
    enum { SLICE = 1 << 14, PIECE = 256 * SLICE };
    const uint64_t key = rng_key((uint64_t)t->options->seed, RNG_INIT);
    float *values = base_new(PIECE, sizeof *values);
    uint64_t hash = 0;
    for (int i = 0; i < t->model.count; i++) {
        const Tensor *tensor = &t->model.tensors[i];
        for (int64_t begin = 0; begin < tensor->elements; begin += PIECE) {
            const int64_t count = min_i64(PIECE, tensor->elements - begin);
#pragma omp parallel for schedule(static) reduction(+ : hash)
            for (int64_t slice = 0; slice < ceil_div(count, SLICE); slice++) {
                const int64_t first = slice * SLICE, length = min_i64(SLICE, count - first);
                model_init_values(tensor, key, begin + first, length, values + first);
                hash += model_hash_values(tensor, begin + first, length, values + first);
            }
            t->device.copy_in(&t->device, buffer_at(full_precision(t, i), begin).data, values, (size_t)count * sizeof *values);
        }
        round_to_storage(t, i);
    }
    free(values);
    t->init_hash = hash;
}

// Fills a Trainer, which must not move afterwards: its parts point at each other.
static void trainer_create(Trainer *t, const Options *options, const ModelConfig *config, Comm *comm) {
    *t = (Trainer){.options = options, .comm = comm, .model = model_create(config), .device = device_cpu(), .keep_threshold = 65536};
    Device *device = &t->device;
    t->dtype = options->precision == PRECISION_BF16 ? DTYPE_BF16 : DTYPE_F32;
    t->zero = zero_create(device, comm, &t->model, t->dtype);
    t->reductions = base_new((size_t)t->model.units, sizeof *t->reductions);
    BlockActs *blocks = base_new((size_t)config->layers, sizeof *blocks);
    t->arena_bytes = activations_layout(&t->acts, NULL, NULL, config, t->dtype, options->micro_batch, options->seq);
    t->arena = device->alloc(device, t->arena_bytes);
    activations_layout(&t->acts, blocks, t->arena, config, t->dtype, options->micro_batch, options->seq);
    t->state = device->alloc(device, sizeof *t->state);
    if (config->position == POSITION_ROPE) {
        const size_t count = (size_t)(options->seq * config->head_size);
        float *table = base_new(count, sizeof *table);
        rope_table_fill(table, options->seq, config->head_size, config->rope_theta);
        device->copy_in(device, t->acts.rope.data, table, count * sizeof *table);
        free(table);
    }
}

static void trainer_free(Trainer *t) {
    Device *device = &t->device;
    zero_free(&t->zero, device, t->comm);
    free(t->reductions);
    device->release(device, t->arena);
    device->release(device, t->state);
    free(t->acts.blocks);
    model_free(&t->model);
    cpu_close(device);
}

// Copies a micro-batch to the device. N is rounded up to a multiple of 64 (where the capacity allows), so that packed
// batches have few different shapes: the extra tokens are a document of their own without targets.
static Packing upload(Trainer *t, const MicroBatch *batch) {
    Device *device = &t->device;
    Activations *a = &t->acts;
    const int64_t N = batch->tokens, padded = min_i64(round_up(N, 64), a->capacity), extra = padded - N;
    const size_t bytes = (size_t)N * sizeof(int32_t);
    device->copy_in(device, a->ids.data, batch->ids, bytes);
    device->copy_in(device, a->targets.data, batch->targets, bytes);
    device->copy_in(device, a->positions.data, batch->positions, bytes);
    device->copy_in(device, a->token_index.data, batch->token_index, bytes);
    device->copy_in(device, a->cu_seqlens.data, batch->cu_seqlens, (size_t)(batch->documents + 1) * sizeof(int32_t));
    Packing packing = {a->cu_seqlens, batch->documents, padded, batch->max_length};
    if (extra > 0) {
        int32_t filler[64], end = (int32_t)padded;
        const size_t extra_bytes = (size_t)extra * sizeof(int32_t);
        memset(filler, 0, sizeof filler);
        device->copy_in(device, buffer_at(a->ids, N).data, filler, extra_bytes);
        device->copy_in(device, buffer_at(a->token_index, N).data, filler, extra_bytes);
        device->copy_in(device, buffer_at(a->positions, N).data, filler, extra_bytes); // 0: T may be smaller than `extra`
        memset(filler, 0xff, sizeof filler);                                           // -1: no target
        device->copy_in(device, buffer_at(a->targets, N).data, filler, extra_bytes);
        device->copy_in(device, buffer_at(a->cu_seqlens, ++packing.documents).data, &end, sizeof end);
        packing.max_length = max_i64(packing.max_length, extra);
    }
    return packing;
}

// ----------------------------------------------------------------------------
// Forward

static AttentionShape attention_shape(const ModelConfig *m) { return (AttentionShape){m->heads, m->kv_heads, m->head_size}; }

// Places where dropout acts: after the embedding, and after attention (2l) and MLP (2l+1) of every block.
enum { SITE_EMBEDDING = 0xffffff };
static Dropout dropout_at(const Trainer *t, int64_t site) {
    return (Dropout){t->dropout_key, (uint32_t)site, t->keep_threshold, t->acts.token_index};
}

// One block. In: block l-1's mid and, in acts.branch, its MLP's output (the embedding for l = 0). Out: mid, acts.branch.
static void block_forward(Trainer *t, int64_t l, const Packing *packing) {
    const ModelConfig *m = &t->model.config;
    const int64_t N = packing->tokens, C = m->channels;
    Device *d = &t->device;
    const Unit u = zero_unit(&t->zero, (int)l + 1);
    const Buffer *w = u.weight;
    BlockActs *a = &t->acts.blocks[l];
    const Buffer branch = t->acts.branch;

    // residual (+ the previous block's MLP), norm
    if (l == 0) {
        d->norm_forward(d, a->norm1, a->mean1, a->rstd1, ABSENT, a->in, ABSENT, w[TENSOR_NORM1_WEIGHT], w[TENSOR_NORM1_BIAS], NULL, m->norm,
                        m->norm_eps, N, C);
    } else {
        const Dropout dropout = dropout_at(t, 2 * (l - 1) + 1);
        d->norm_forward(d, a->norm1, a->mean1, a->rstd1, a->in, a[-1].mid, branch, w[TENSOR_NORM1_WEIGHT], w[TENSOR_NORM1_BIAS], &dropout, m->norm,
                        m->norm_eps, N, C);
    }
    // attention: q, k, v by one product (their weights are neighbours)
    d->linear_forward(d, a->qkv_raw, ABSENT, a->norm1, w[TENSOR_Q_WEIGHT], w[TENSOR_Q_BIAS], N, C, model_qkv_width(m));
    if (m->qk_norm || m->position == POSITION_ROPE) {
        d->qk_forward(d, a->qkv, a->qk_rstd, a->qkv_raw, w[TENSOR_Q_NORM], w[TENSOR_K_NORM], m->norm_eps, t->acts.rope, t->acts.positions,
                      attention_shape(m), N);
    }
    d->attention_forward(d, a->att, a->lse, a->qkv, packing, attention_shape(m));
    d->linear_forward(d, branch, ABSENT, a->att, w[TENSOR_O_WEIGHT], w[TENSOR_O_BIAS], N, model_q_width(m), C);
    // residual, norm
    const Dropout dropout = dropout_at(t, 2 * l);
    d->norm_forward(d, a->norm2, a->mean2, a->rstd2, a->mid, a->in, branch, w[TENSOR_NORM2_WEIGHT], w[TENSOR_NORM2_BIAS], &dropout, m->norm,
                    m->norm_eps, N, C);
    // MLP
    if (m->activation == ACTIVATION_GELU) {
        d->linear_forward(d, a->fc, a->act, a->norm2, w[TENSOR_FC_WEIGHT], w[TENSOR_FC_BIAS], N, C, m->ffn);
        d->linear_forward(d, branch, ABSENT, a->act, w[TENSOR_PROJ_WEIGHT], w[TENSOR_PROJ_BIAS], N, m->ffn, C);
    } else {
        d->linear_forward(d, a->fc, ABSENT, a->norm2, w[TENSOR_GATE_WEIGHT], w[TENSOR_GATE_BIAS], N, C, 2 * m->ffn);
        d->swiglu_forward(d, a->act, a->fc, N, m->ffn);
        d->linear_forward(d, branch, ABSENT, a->act, w[TENSOR_DOWN_WEIGHT], w[TENSOR_DOWN_BIAS], N, m->ffn, C);
    }
}

// Embedding, blocks, final norm: fills acts.norm, which the head reads.
static void forward(Trainer *t, const Packing *packing) {
    const ModelConfig *m = &t->model.config;
    const int64_t N = packing->tokens, C = m->channels, L = m->layers;
    Device *d = &t->device;
    Activations *a = &t->acts;
    const Unit embedding = zero_unit(&t->zero, 0), head = zero_unit(&t->zero, model_head_unit(&t->model));
    const Dropout dropout = dropout_at(t, SITE_EMBEDDING), dropout_last = dropout_at(t, 2 * (L - 1) + 1);

    d->embedding_forward(d, a->blocks[0].in, a->ids, a->positions, embedding.weight[TENSOR_WTE], embedding.weight[TENSOR_WPE], &dropout, N, C);
    for (int64_t l = 0; l < L; l++) block_forward(t, l, packing);
    d->norm_forward(d, a->norm, a->mean, a->rstd, a->last, a->blocks[L - 1].mid, a->branch, head.weight[TENSOR_NORM_WEIGHT],
                    head.weight[TENSOR_NORM_BIAS], &dropout_last, m->norm, m->norm_eps, N, C);
}

// ----------------------------------------------------------------------------
// Head and backward. `accumulate`: gradients += (not the first micro-batch of a step), else =.

static Unit unit_of_head_weight(const Trainer *t) { return zero_unit(&t->zero, t->model.config.tied ? 0 : model_head_unit(&t->model)); }

// Losses of all tokens; with `train` also the gradient of acts.norm (into acts.dnorm) and of the head's weight. Logits
// exist for a chunk of tokens at a time. dloss: derivative of the step's loss by a token's loss.
static void head(Trainer *t, int64_t N, double dloss, bool train, bool accumulate) {
    const ModelConfig *m = &t->model.config;
    const int64_t C = m->channels, V = m->vocab;
    Device *d = &t->device;
    Activations *a = &t->acts;
    const Unit u = unit_of_head_weight(t);
    const TensorKind kind = model_head_kind(m);
    for (int64_t n = 0; n < N; n += a->chunk) {
        const int64_t count = min_i64(a->chunk, N - n);
        const Buffer norm = buffer_at(a->norm, n * C);
        d->linear_forward(d, a->logits, ABSENT, norm, u.weight[kind], ABSENT, count, C, V);
        d->cross_entropy(d, buffer_at(a->losses, n), train ? a->dlogits : ABSENT, a->logits, buffer_at(a->targets, n), dloss, count, V);
        if (train) {
            d->linear_backward_input(d, buffer_at(a->dnorm, n * C), a->dlogits, u.weight[kind], ABSENT, count, C, V);
            d->linear_backward_weight(d, u.grad[kind], ABSENT, accumulate || n > 0, a->dlogits, norm, count, C, V);
        }
    }
}

// Gradient of a branch's output from that of the residual stream: the same, or masked by dropout.
static Buffer branch_gradient(Trainer *t, int64_t site, int64_t N) {
    const Dropout dropout = dropout_at(t, site);
    if (!dropout_active(&dropout)) return t->acts.dresidual;
    t->device.dropout_backward(&t->device, t->acts.dbranch, t->acts.dresidual, &dropout, N, t->model.config.channels);
    return t->acts.dbranch;
}

// One block. acts.dresidual: gradient of the residual stream behind the block becomes that before it.
static void block_backward(Trainer *t, int64_t l, const Packing *packing, bool accumulate) {
    const ModelConfig *m = &t->model.config;
    const int64_t N = packing->tokens, C = m->channels, Q = model_q_width(m), QKV = model_qkv_width(m), FF = m->ffn;
    Device *d = &t->device;
    const Unit u = zero_unit(&t->zero, (int)l + 1);
    const Buffer *w = u.weight, *g = u.grad;
    BlockActs *a = &t->acts.blocks[l];
    Activations *s = &t->acts;

    // MLP
    Buffer dbranch = branch_gradient(t, 2 * l + 1, N);
    if (m->activation == ACTIVATION_GELU) {
        d->linear_backward_weight(d, g[TENSOR_PROJ_WEIGHT], g[TENSOR_PROJ_BIAS], accumulate, dbranch, a->act, N, FF, C);
        d->linear_backward_input(d, s->dfc, dbranch, w[TENSOR_PROJ_WEIGHT], a->fc, N, FF, C);
        d->linear_backward_weight(d, g[TENSOR_FC_WEIGHT], g[TENSOR_FC_BIAS], accumulate, s->dfc, a->norm2, N, C, FF);
        d->linear_backward_input(d, s->dnorm, s->dfc, w[TENSOR_FC_WEIGHT], ABSENT, N, C, FF);
    } else {
        d->linear_backward_weight(d, g[TENSOR_DOWN_WEIGHT], g[TENSOR_DOWN_BIAS], accumulate, dbranch, a->act, N, FF, C);
        d->linear_backward_input(d, s->dact, dbranch, w[TENSOR_DOWN_WEIGHT], ABSENT, N, FF, C);
        d->swiglu_backward(d, s->dfc, s->dact, a->fc, N, FF);
        d->linear_backward_weight(d, g[TENSOR_GATE_WEIGHT], g[TENSOR_GATE_BIAS], accumulate, s->dfc, a->norm2, N, C, 2 * FF);
        d->linear_backward_input(d, s->dnorm, s->dfc, w[TENSOR_GATE_WEIGHT], ABSENT, N, C, 2 * FF);
    }
    d->norm_backward(d, s->dresidual, true, g[TENSOR_NORM2_WEIGHT], g[TENSOR_NORM2_BIAS], accumulate, s->dnorm, a->mid, a->mean2, a->rstd2,
                     w[TENSOR_NORM2_WEIGHT], m->norm, N, C);
    // attention
    dbranch = branch_gradient(t, 2 * l, N);
    d->linear_backward_weight(d, g[TENSOR_O_WEIGHT], g[TENSOR_O_BIAS], accumulate, dbranch, a->att, N, Q, C);
    d->linear_backward_input(d, s->datt, dbranch, w[TENSOR_O_WEIGHT], ABSENT, N, Q, C);
    d->attention_backward(d, s->dqkv, s->delta, s->datt, a->att, a->qkv, a->lse, packing, attention_shape(m));
    if (m->qk_norm || m->position == POSITION_ROPE) {
        d->qk_backward(d, s->dqkv, g[TENSOR_Q_NORM], g[TENSOR_K_NORM], accumulate, a->qkv_raw, a->qk_rstd, w[TENSOR_Q_NORM], w[TENSOR_K_NORM],
                       s->rope, s->positions, attention_shape(m), N);
    }
    d->linear_backward_weight(d, g[TENSOR_Q_WEIGHT], g[TENSOR_Q_BIAS], accumulate, s->dqkv, a->norm1, N, C, QKV);
    d->linear_backward_input(d, s->dnorm, s->dqkv, w[TENSOR_Q_WEIGHT], ABSENT, N, C, QKV);
    d->norm_backward(d, s->dresidual, true, g[TENSOR_NORM1_WEIGHT], g[TENSOR_NORM1_BIAS], accumulate, s->dnorm, a->in, a->mean1, a->rstd1,
                     w[TENSOR_NORM1_WEIGHT], m->norm, N, C);
}

// Starts the sum over all ranks of a unit's gradients, which are complete. It goes on while backward does.
static void reduce_unit(Trainer *t, int unit) {
    const ZeroRange range = zero_unit_range(&t->zero, unit);
    if (t->comm->size == 1) return;
    t->reductions[unit] = comm_all_reduce_start(t->comm->world, buffer_at(t->zero.grad, range.begin).data, range.count, COMM_F32, COMM_SUM);
}

// From the gradient of the final norm's output (acts.dnorm, by head()) to all the others. last_micro_batch: none follows
// in this step, so each unit's gradients go to the other ranks as soon as they are complete.
static void backward(Trainer *t, const Packing *packing, bool accumulate, bool last_micro_batch) {
    const ModelConfig *m = &t->model.config;
    const int64_t N = packing->tokens, C = m->channels;
    Device *d = &t->device;
    Activations *a = &t->acts;
    const Unit embedding = zero_unit(&t->zero, 0), last = zero_unit(&t->zero, model_head_unit(&t->model));
    const Dropout dropout = dropout_at(t, SITE_EMBEDDING);

    d->norm_backward(d, a->dresidual, false, last.grad[TENSOR_NORM_WEIGHT], last.grad[TENSOR_NORM_BIAS], accumulate, a->dnorm, a->last, a->mean,
                     a->rstd, last.weight[TENSOR_NORM_WEIGHT], m->norm, N, C);
    if (last_micro_batch) reduce_unit(t, model_head_unit(&t->model));
    for (int64_t l = m->layers - 1; l >= 0; l--) {
        block_backward(t, l, packing, accumulate);
        if (last_micro_batch) reduce_unit(t, (int)l + 1);
        comm_progress(t->comm);
    }
    // The embedding's gradients are always +=: a tied one already holds the head's, others start from zero.
    if (!accumulate && !m->tied) d->zero(d, embedding.grad[TENSOR_WTE].data, (size_t)(m->vocab * C) * sizeof(float));
    if (!accumulate && m->position == POSITION_LEARNED) {
        d->zero(d, embedding.grad[TENSOR_WPE].data, (size_t)(m->max_seq * C) * sizeof(float));
    }
    d->embedding_backward(d, embedding.grad[TENSOR_WTE], embedding.grad[TENSOR_WPE], a->dresidual, a->ids, a->positions, &dropout, N, C, m->vocab,
                          m->max_seq);
    if (last_micro_batch) reduce_unit(t, 0);
}

// ----------------------------------------------------------------------------
// One optimizer step

// Gradients of the whole step: every micro-batch forward and backward; the loss is the mean over all valid tokens.
static void accumulate_gradients(Trainer *t, const StepBatch *batch) {
    int64_t valid = batch->valid_global;
    if (valid < 0) { // only the ranks together know
        valid = batch->valid;
        comm_all_reduce(t->comm->world, &valid, 1, COMM_I64, COMM_SUM);
    }
    const double scale = valid > 0 ? 1.0 / (double)valid : 0.0;
    for (int64_t i = 0; i < batch->micro_count; i++) {
        const Packing packing = upload(t, &batch->micros[i]);
        forward(t, &packing);
        head(t, packing.tokens, scale, true, i > 0);
        t->device.loss_sum(&t->device, t->state, t->acts.losses, scale, packing.tokens);
        backward(t, &packing, i > 0, i + 1 == batch->micro_count);
    }
    for (int unit = 0; unit < t->model.units; unit++) comm_wait(&t->reductions[unit]);
}

// Starts step n (from 1): the scalars that live on the device, and the key of its dropout.
static void step_begin(Trainer *t, int64_t step) {
    const StepState fresh = {.lr = learning_rate(t->options, step), .optimizer_steps = t->optimizer_steps};
    t->device.copy_in(&t->device, t->state, &fresh, sizeof fresh);
    t->dropout_key = rng_dropout_key((uint64_t)t->options->seed, (uint64_t)step);
    t->keep_threshold = rng_dropout_threshold(t->model.config.dropout);
}

// Ends it: the loss of all ranks, norm, clipping and update; returns what happened, the same on every rank.
static StepState step_end(Trainer *t) {
    StepState result;
    if (t->comm->size > 1) {
        t->device.copy_out(&t->device, &result, t->state, sizeof result);
        comm_all_reduce(t->comm->world, &result.loss_sum, 1, COMM_F64, COMM_SUM);
        t->device.copy_in(&t->device, t->state, &result, sizeof result);
    }
    optimizer_update(&t->zero, &t->device, t->state, t->options->clip, optimizer_config(t->options));
    t->device.copy_out(&t->device, &result, t->state, sizeof result);
    t->optimizer_steps = result.optimizer_steps;
    t->keep_threshold = 65536;
    return result;
}

// ----------------------------------------------------------------------------
// Validation and generation: forward only, no state of training is touched.

// Adds the losses of a micro-batch to *sum; the scalars of the step are not needed between steps.
static double losses_of(Trainer *t, const MicroBatch *batch) {
    StepState state = {0};
    const Packing packing = upload(t, batch);
    t->device.copy_in(&t->device, t->state, &state, sizeof state);
    forward(t, &packing);
    head(t, packing.tokens, 0, false, false);
    t->device.loss_sum(&t->device, t->state, t->acts.losses, 1.0, packing.tokens);
    t->device.copy_out(&t->device, &state, t->state, sizeof state);
    return state.loss_sum;
}

// ----------------------------------------------------------------------------
// A run: the trainer with its data, its place on disk and its log

typedef struct {
    Comm *comm;
    Options options;
    ModelConfig config;
    TokenSet train_set, val_set;
    Loader train, val;
    Tokenizer tokenizer;
    bool has_tokenizer; // the token files name one that is built in
    Trainer trainer;
    Monitor monitor;
    int lock;        // of --out; -1 without
    int64_t step;    // done
    int64_t tokens;  // trained on
    int64_t skipped; // steps in a row whose loss or norm was not finite
    bool resumed;
    LoaderPosition start; // where the training data goes on
} Run;

static bool is_first(const Run *run) { return run->comm->rank == 0; } // the rank that speaks and writes

// Ends the run with an error that every rank has met alike; one of them tells it.
static void end_with(Run *run, const Error *error) __attribute__((noreturn));
static void end_with(Run *run, const Error *error) {
    Error ignored = {0};
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
    int64_t failing = good ? 0 : run->comm->size - run->comm->rank; // the largest is that of the first rank
    comm_all_reduce(run->comm->world, &failing, 1, COMM_I64, COMM_MAX);
    if (failing == 0) return;
    const int root = run->comm->size - (int)failing;
    comm_broadcast(run->comm->world, error, (int64_t)sizeof *error, COMM_BYTE, root);
    end_with(run, error);
}

static bool due(int64_t every, int64_t step) { return every > 0 && step % every == 0; }

// Mean loss over the valid tokens of at most --val-batches micro-batches (a multiple of the ranks), the same ones every time.
static void validate(Run *run) {
    Error error = {0};
    double sums[3] = {0, 0, 0}; // of losses, of valid tokens, of ranks that were asked to stop meanwhile
    if (run->options.val == NULL) return;
    comm_heartbeat(run->comm, run->step, "validation");
    loader_rewind(&run->val);
    for (int64_t i = 0; i < ceil_div(run->options.val_batches, run->comm->size); i++) {
        const StepBatch *batch = loader_next(&run->val, &error);
        require(run, error.code == 0, &error);
        if (batch == NULL) break;
        if (batch->micros[0].tokens > 0) sums[0] += losses_of(&run->trainer, &batch->micros[0]);
        sums[1] += (double)batch->valid;
        comm_progress(run->comm);
        if (signals_stop_requested(NULL) != NULL) {
            sums[2] = 1;
            break;
        }
    }
    comm_all_reduce(run->comm->world, sums, 3, COMM_F64, COMM_SUM);
    if (sums[2] > 0) return; // half a validation says nothing
    const double loss = sums[1] > 0 ? sums[0] / sums[1] : (double)NAN;
    require(run, !is_first(run) || monitor_val(&run->monitor, run->step, loss, &error), &error);
}

// Logits of the token that follows `count` tokens, into host memory (V). Recomputes the whole context.
static void next_logits(Trainer *t, const int32_t *context, int64_t count, float *logits) {
    const ModelConfig *m = &t->model.config;
    int32_t *numbers = base_new((size_t)(3 * count), sizeof *numbers), *targets = numbers + count, *positions = numbers + 2 * count;
    int32_t ends[2] = {0, (int32_t)count}, *ids = base_new((size_t)count, sizeof *ids);
    memcpy(ids, context, (size_t)count * sizeof *ids);
    for (int64_t i = 0; i < count; i++) targets[i] = -1, positions[i] = (int32_t)i;
    const MicroBatch batch = {.rows = 1,
                              .tokens = count,
                              .documents = 1,
                              .max_length = count,
                              .ids = ids,
                              .targets = targets,
                              .positions = positions,
                              .token_index = positions,
                              .cu_seqlens = ends};
    const Packing packing = upload(t, &batch);
    const Unit u = unit_of_head_weight(t);
    forward(t, &packing);
    t->device.linear_forward(&t->device, t->acts.logits, ABSENT, buffer_at(t->acts.norm, (count - 1) * m->channels), u.weight[model_head_kind(m)],
                             ABSENT, 1, m->channels, m->vocab);
    t->device.copy_out(&t->device, logits, t->acts.logits.data, (size_t)m->vocab * sizeof *logits);
    free(numbers);
    free(ids);
}

// Prints --sample-tokens tokens after the prompt (or after an end of document). Text when the tokenizer is built in, else ids.
static void generate(Run *run) {
    if (!is_first(run)) return;
    comm_heartbeat(run->comm, run->step, "generation");
    const Options *o = &run->options;
    const int64_t V = run->config.vocab, limit = o->seq;
    const SamplingConfig sampling = {o->temperature, o->top_k, o->top_p};
    const uint64_t key = rng_key((uint64_t)o->seed, RNG_SAMPLE);
    const int64_t prompt_bytes = o->prompt == NULL ? 0 : (int64_t)strlen(o->prompt);
    int32_t *ids = base_new((size_t)(prompt_bytes + 1 + o->sample_tokens), sizeof *ids);
    float *logits = base_new((size_t)V, sizeof *logits);
    int64_t count = prompt_bytes > 0 ? tokenizer_encode(&run->tokenizer, o->prompt, prompt_bytes, ids) : 0;
    const int64_t shown = count;
    if (count == 0) ids[count++] = run->train_set.info.eot >= 0 && run->train_set.info.eot < V ? (int32_t)run->train_set.info.eot : 0;
    const int64_t begin = count;
    MonitorJson text = {0};
    for (int64_t i = 0; i < shown; i++) {
        char piece[16];
        monitor_json_bytes_(&text, piece, (size_t)tokenizer_decode(&run->tokenizer, ids[i], piece));
    }
    for (int64_t i = 0; i < o->sample_tokens && signals_stop_requested(NULL) == NULL; i++) {
        const int64_t from = max_i64(0, count - limit);
        next_logits(&run->trainer, ids + from, count - from, logits);
        const Philox r = philox(key, (uint64_t)run->step, (uint64_t)i);
        comm_progress(run->comm);
        ids[count++] = sampling_choose(logits, V, sampling, (double)r.x[0] / 4294967296.0);
    }
    for (int64_t i = begin; i < count; i++) {
        char piece[16];
        const int bytes = run->has_tokenizer ? tokenizer_decode(&run->tokenizer, ids[i], piece) : snprintf(piece, sizeof piece, "%d ", ids[i]);
        monitor_json_bytes_(&text, piece, (size_t)bytes);
    }
    Error error = {0};
    require(run, monitor_sample(&run->monitor, text.text, text.length, &error), &error);
    monitor_json_free(&text);
    free(logits);
    free(ids);
}

// ----------------------------------------------------------------------------
// Checkpoints. The CPU device's memory is host memory: tensors are written and read where they live.

static CheckpointTensor checkpoint_tensor(const Zero *zero, int i, const char *prefix, Buffer arena) {
    const Tensor *tensor = &zero->model->tensors[i];
    CheckpointTensor row = {.dtype = arena.dtype, .rank = tensor->rank, .shape = {tensor->shape[0], tensor->shape[1]}};
    snprintf(row.name, sizeof row.name, "%s%s", prefix, tensor->name);
    row.data = buffer_at(arena, zero->offset[i]).data;
    return row;
}

// Everything that a run needs to go on: a row per tensor and kind of state. The caller frees it.
static CheckpointTensor *checkpoint_tensors(const Zero *zero, int *count) {
    CheckpointTensor *rows = base_new((size_t)zero->model->count * 4, sizeof *rows);
    *count = 0;
    for (int i = 0; i < zero->model->count; i++) {
        rows[(*count)++] = checkpoint_tensor(zero, i, "", zero->param);
        if (zero->master.data != NULL) rows[(*count)++] = checkpoint_tensor(zero, i, "master/", zero->master);
        rows[(*count)++] = checkpoint_tensor(zero, i, "adam_m/", zero->adam_m);
        rows[(*count)++] = checkpoint_tensor(zero, i, "adam_v/", zero->adam_v);
    }
    return rows;
}

static CheckpointDataFile *data_files(const TokenSet *set) {
    CheckpointDataFile *files = base_new((size_t)set->count, sizeof *files);
    for (int64_t i = 0; i < set->count; i++) files[i] = (CheckpointDataFile){set->files[i].path, set->files[i].tokens};
    return files;
}

static void save(Run *run) {
    if (!is_first(run)) return; // replicas are equal
    comm_heartbeat(run->comm, run->step, "saving");
    Trainer *t = &run->trainer;
    Error error = {0};
    int count;
    const LoaderPosition at = loader_position(&run->train);
    CheckpointTensor *tensors = checkpoint_tensors(&t->zero, &count);
    CheckpointDataFile *files = data_files(&run->train_set);
    CheckpointState state = {.step = run->step,
                             .tokens = run->tokens,
                             .optimizer_steps = t->optimizer_steps,
                             .seed = run->options.seed,
                             .epoch = at.epoch,
                             .position = at.position,
                             .row = at.row,
                             .data_files = files,
                             .data_file_count = run->train_set.count,
                             .model = checkpoint_model_json(&run->config),
                             .flags = checkpoint_flags_json(&run->options)};
    const double begin = clock_ms();
    const bool good = checkpoint_save(run->options.out, &state, tensors, count, run->options.keep, &error);
    json_decref(state.model);
    json_decref(state.flags);
    free(files);
    free(tensors);
    require(run, good, &error);
    MonitorJson *event = monitor_event_begin(&run->monitor, "save");
    monitor_put_real(event, "ms", clock_ms() - begin);
    require(run, monitor_event_end(&run->monitor, &error), &error);
}

// Finds the checkpoint that --resume names and checks that this run may go on from it. *found: there is one.
static bool find_checkpoint(Run *run, Checkpoint *checkpoint, bool *found, Error *error) {
    const Options *o = &run->options;
    *found = false;
    if (strcmp(o->resume, "no") == 0) {
        int64_t existing = 0;
        if (o->out == NULL || !checkpoint_count(o->out, &existing, error) || existing == 0) return error->code == 0;
        return fail(error, CODE_USAGE, "--out: '%s' holds %lld checkpoint%s; wanted --resume auto to go on, or another directory", o->out,
                    (long long)existing, existing == 1 ? "" : "s");
    }
    if (strcmp(o->resume, "auto") == 0) {
        if (o->out == NULL) return fail(error, CODE_USAGE, "--resume auto: wanted --out, the directory to look in");
        if (!checkpoint_find(o->out, checkpoint, found, is_first(run) ? stderr : NULL, error)) return false;
    } else {
        if (!checkpoint_open(o->resume, checkpoint, error)) return false;
        *found = true;
    }
    if (!*found) return true;
    const CheckpointState *state = &checkpoint->manifest.state;
    // What decides which sequences come next, and how the tensors are stored.
    const int fixed[] = {OPTION_precision, OPTION_seed, OPTION_shuffle, OPTION_pack, OPTION_seq, OPTION_eot};
    CheckpointDataFile *files = data_files(&run->train_set);
    const bool trains = o->steps > 0; // only then does the data position matter
    const bool good = checkpoint_model_check(checkpoint->directory, state->model, &run->config, error) &&
                      checkpoint_flags_check(checkpoint->directory, state->flags, o, fixed, trains ? 6 : 1, error) &&
                      (!trains || checkpoint_data_check(checkpoint->directory, state, files, run->train_set.count, error));
    free(files);
    run->start = (LoaderPosition){state->epoch, state->position, state->row};
    run->step = state->step;
    run->tokens = state->tokens;
    run->trainer.optimizer_steps = state->optimizer_steps;
    run->resumed = true;
    return good;
}

static void load(Run *run, const Checkpoint *checkpoint) {
    Error error = {0};
    int count;
    CheckpointTensor *tensors = checkpoint_tensors(&run->trainer.zero, &count);
    require(run, checkpoint_read(checkpoint, tensors, count, false, &error), &error);
    free(tensors);
}

// --init-from: weights only, from a checkpoint of either precision; master copies where it has them.
static void load_weights(Run *run) {
    Trainer *t = &run->trainer;
    Error error = {0};
    Checkpoint checkpoint;
    require_all(run,
                checkpoint_open(run->options.init_from, &checkpoint, &error) &&
                    checkpoint_model_check(checkpoint.directory, checkpoint.manifest.state.model, &run->config, &error),
                &error);
    const Buffer arena = t->dtype == DTYPE_F32 ? t->zero.param : t->zero.master;
    for (int i = 0; i < t->model.count; i++) {
        CheckpointTensor row = checkpoint_tensor(&t->zero, i, "master/", arena);
        if (manifest_tensor(&checkpoint.manifest, row.name) == NULL) row = checkpoint_tensor(&t->zero, i, "", arena);
        require(run, checkpoint_read(&checkpoint, &row, 1, true, &error), &error);
        round_to_storage(t, i);
    }
    checkpoint_close(&checkpoint);
}

// --dump-grads: the gradients as they are before clipping, by the names of the tensor table.
static void dump_gradients(Run *run) {
    const Options *o = &run->options;
    const Zero *zero = &run->trainer.zero;
    Error error = {0};
    if (o->dump_grads == NULL || !is_first(run)) return;
    const int count = zero->model->count;
    SafetensorsEntry *entries = base_new((size_t)count, sizeof *entries);
    for (int i = 0; i < count; i++) {
        const Tensor *tensor = &zero->model->tensors[i];
        entries[i] = (SafetensorsEntry){.name = tensor->name,
                                        .dtype = "F32",
                                        .rank = tensor->rank,
                                        .shape = {tensor->shape[0], tensor->shape[1]},
                                        .data = buffer_at(zero->grad, zero->offset[i]).data};
    }
    char *path = path_join(o->dump_grads, "grads.safetensors");
    require(run, directory_create(o->dump_grads, &error) && safetensors_write_simple(path, entries, count, &error), &error);
    free(path);
    free(entries);
}

// ----------------------------------------------------------------------------
// Preparation: everything that can be checked is, before the first large allocation.

static LoaderConfig loader_config(const Run *run, bool training) {
    const Options *o = &run->options;
    return (LoaderConfig){.tokens = training ? &run->train_set : &run->val_set,
                          .flag = training ? "--train" : "--val",
                          .seq = o->seq,
                          .micro_batch = o->micro_batch,
                          .global_batch = training ? o->global_batch : o->micro_batch * run->comm->size,
                          .rank = run->comm->rank,
                          .ranks = run->comm->size,
                          .seed = (uint64_t)o->seed,
                          .shuffle = training && o->shuffle,
                          .pack = o->pack,
                          .eot = o->given[OPTION_eot]           ? o->eot
                                 : run->train_set.info.eot >= 0 ? run->train_set.info.eot
                                                                : run->val_set.info.eot,
                          .once = !training};
}

static bool prepare_tokens(TokenSet *set, const char *pattern, const char *flag, Error *error) {
    set->info = (TokenInfo){.eot = -1, .documents = -1};
    return pattern == NULL || tokens_open(set, pattern, flag, error);
}

// Vocabulary and tokenizer that the token files name, checked against each other and against --vocab.
static bool prepare_vocabulary(Run *run, Error *error) {
    const TokenInfo *train = &run->train_set.info, *val = &run->val_set.info;
    const int64_t named = train->vocab > 0 ? train->vocab : val->vocab;
    if (train->vocab > 0 && val->vocab > 0 && train->vocab != val->vocab) {
        return fail(error, CODE_INPUT, "--val: its vocabulary has %lld tokens, that of --train %lld: not made by the same tokenizer",
                    (long long)val->vocab, (long long)train->vocab);
    }
    if (!model_configure(&run->config, &run->options, named, error)) return false;
    if (run->config.vocab < named) {
        return fail(error, CODE_USAGE, "--vocab: got %lld, the token files need %lld", (long long)run->config.vocab, (long long)named);
    }
    if (run->options.given[OPTION_eot] && run->options.eot >= run->config.vocab) {
        return fail(error, CODE_USAGE, "--eot: got %lld, wanted an id below the vocabulary of %lld", (long long)run->options.eot,
                    (long long)run->config.vocab);
    }
    const char *name = train->tokenizer[0] != '\0' ? train->tokenizer : val->tokenizer;
    if (name[0] == '\0' && run->config.vocab == TOKENIZER_BYTE_VOCAB) name = "byte";
    Error unknown = {0};
    run->has_tokenizer = name[0] != '\0' && tokenizer_open(&run->tokenizer, name, &unknown);
    if (run->options.prompt != NULL && run->options.prompt[0] != '\0' && !run->has_tokenizer) {
        return fail(error, CODE_USAGE, "--prompt: the tokenizer of the data (%s) is not built in, wanted byte-level tokens",
                    name[0] != '\0' ? name : "unknown");
    }
    return true;
}

static bool prepare(Run *run, Error *error) {
    Options *o = &run->options;
    if (!o->given[OPTION_global_batch]) o->global_batch = o->micro_batch * run->comm->size;
    if (o->train == NULL && o->steps > 0 && !o->dry_run) {
        return fail(error, CODE_USAGE, "--train: got nothing, wanted token files (data/kjv.sh makes some; --steps 0 only validates and samples)");
    }
    return prepare_tokens(&run->train_set, o->train, "--train", error) && prepare_tokens(&run->val_set, o->val, "--val", error) &&
           prepare_vocabulary(run, error) && (o->train == NULL || tokens_check(&run->train_set, run->config.vocab, error)) &&
           (o->val == NULL || tokens_check(&run->val_set, run->config.vocab, error));
}

static bool open_loaders(Run *run, Error *error) {
    const Options *o = &run->options;
    const LoaderConfig train = loader_config(run, true), val = loader_config(run, false);
    const LoaderPosition beginning = {0};
    return (o->train == NULL || loader_open(&run->train, &train, o->steps > 0 ? run->start : beginning, error)) &&
           (o->val == NULL || loader_open(&run->val, &val, beginning, error));
}

// Sizes of everything that will be allocated.
static bool prepare_plan(const Run *run, const Model *model, PlanInput *plan, Error *error) {
    const Options *o = &run->options;
    const Dtype dtype = o->precision == PRECISION_BF16 ? DTYPE_BF16 : DTYPE_F32;
    const LoaderConfig train = loader_config(run, true), val = loader_config(run, false);
    *plan = (PlanInput){.model = model,
                        .seq = o->seq,
                        .micro_batch = o->micro_batch,
                        .global_batch = o->global_batch,
                        .steps = o->steps,
                        .warmup = o->warmup,
                        .lr = o->lr,
                        .train_tokens = run->train_set.tokens,
                        .machine_bytes = plan_machine_bytes()};
    if (o->train != NULL) plan->train_samples = loader_sequences_per_epoch(&run->train);
    const int64_t data_bytes = (o->train != NULL ? loader_bytes(&train) : 0) + (o->val != NULL ? loader_bytes(&val) : 0);
    return plan_add_model(plan, dtype, error) && plan_add_activations(plan, dtype, error) &&
           (data_bytes == 0 || plan_add(plan, "data", (size_t)data_bytes, 1, error));
}

static void banner(const Run *run, const PlanInput *plan) {
    const Options *o = &run->options;
    const ModelConfig *m = &run->config;
    const PlanFacts facts = plan_facts(plan);
    char parameters[32], memory[32];
    printf("model   %s: %s parameters, %lld layers, %lld channels, %lld heads (%lld kv), ffn %lld, vocabulary %lld\n",
           o->model != NULL ? o->model : "custom", plan_count_text((double)facts.parameters, parameters), (long long)m->layers,
           (long long)m->channels, (long long)m->heads, (long long)m->kv_heads, (long long)m->ffn, (long long)m->vocab);
    printf("batch   %lld sequences of %lld tokens = %lld tokens a step (%lld at once); %lld steps\n", (long long)o->global_batch, (long long)o->seq,
           (long long)facts.tokens_per_step, (long long)o->micro_batch, (long long)o->steps);
    if (run->comm->size > 1) {
        printf("ranks   %d data-parallel replicas, %d on this host\n", run->comm->size, run->comm->local_size);
    }
    printf("device  %s, %d threads, matrix products by %s, %s; %s of memory planned\n", run->trainer.device.name, omp_get_max_threads(), BUILD_BLAS,
           o->precision == PRECISION_BF16 ? "bf16 with fp32 master weights" : "fp32", plan_bytes_text((double)facts.total_bytes, memory));
    if (o->train != NULL) {
        printf("data    %lld tokens in %lld file%s, %.4g epochs of %lld sequences\n", (long long)run->train_set.tokens,
               (long long)run->train_set.count, run->train_set.count == 1 ? "" : "s", facts.epochs, (long long)plan->train_samples);
    }
    if (run->resumed) printf("resumed at step %lld\n", (long long)run->step);
    fflush(stdout);
}

// Whether any rank was asked to stop (why, else NULL), and the tokens of all ranks (optional): told between two steps, so that all
// ranks stop at the same one. `out`: where a file `stop` asks too.
static const char *agree_on_stop(Run *run, const char *out, int64_t *tokens) {
    const char *own = signals_stop_requested(is_first(run) ? out : NULL);
    int64_t sums[2] = {tokens != NULL ? *tokens : 0, own != NULL};
    comm_all_reduce(run->comm->world, sums, 2, COMM_I64, COMM_SUM);
    if (tokens != NULL) *tokens = sums[0];
    return own != NULL ? own : sums[1] > 0 ? "a signal to another rank" : NULL;
}

// The record of a step; a step that was skipped is told, and after --bad-steps in a row the run ends.
static void record_step(Run *run, const StepBatch *batch, const StepState *result, int64_t tokens, double ms) {
    const Options *o = &run->options;
    Error error = {0};
    run->step++;
    run->tokens += tokens;
    const StepRecord record = {.step = run->step,
                               .loss = result->loss_sum,
                               .grad_norm = result->grad_norm,
                               .lr = result->lr,
                               .tokens = tokens,
                               .ms = ms,
                               .samples = o->log_samples ? batch->sample_ids : NULL,
                               .sample_count = batch->sequences};
    require(run, !is_first(run) || monitor_step(&run->monitor, &record, &error), &error);
    run->skipped = result->skip ? run->skipped + 1 : 0;
    if (!result->skip) return;
    if (is_first(run)) {
        MonitorJson *event = monitor_event_begin(&run->monitor, "skipped");
        monitor_put_int(event, "in_a_row", run->skipped);
        require(run, monitor_event_end(&run->monitor, &error), &error);
    }
    if (run->skipped >= o->bad_steps) {
        fail(&error, CODE_NUMERIC, "step %lld: loss %g, gradient norm %g: %lld steps in a row were not finite and were skipped (lower --lr?)",
             (long long)run->step, result->loss_sum, result->grad_norm, (long long)run->skipped);
        end_with(run, &error);
    }
}

// The last record of a finished run, with the bytes of every rank; closes the log.
static void record_end(Run *run, bool finished) {
    Error error = {0};
    Trainer *t = &run->trainer;
    const int size = run->comm->size;
    const ZeroBytes bytes = zero_bytes(&t->model, t->dtype);
    MonitorRank own = {.param_bytes = bytes.param_bytes,
                       .grad_bytes = bytes.grad_bytes,
                       .optim_bytes = bytes.optim_bytes + bytes.master_bytes,
                       .activation_peak_bytes = t->arena_bytes};
    memcpy(own.comm, run->comm->counts, sizeof own.comm);
    MonitorRank *ranks = base_new((size_t)size, sizeof *ranks);
    comm_all_gather(run->comm->world, ranks, &own, (int64_t)sizeof own, COMM_BYTE);
    if (is_first(run)) {
        require(run, !finished || monitor_end(&run->monitor, t->init_hash, t->device.name, ranks, size, &error), &error);
        require(run, monitor_close(&run->monitor, &error), &error);
    }
    free(ranks);
}

// Gives everything back.
static void run_close(Run *run) {
    trainer_free(&run->trainer);
    loader_close(&run->train);
    loader_close(&run->val);
    tokens_close(&run->train_set);
    tokens_close(&run->val_set);
    if (run->lock >= 0) close(run->lock);
    options_free(&run->options);
    comm_finish(run->comm);
}

#ifndef TRAIN_GPT_NO_MAIN
// --help, --version, --model list
static int inform(Run *run) {
    if (is_first(run)) {
        if (run->options.help) {
            options_help(stdout);
        } else if (run->options.version) {
            printf("train_gpt, commit %s, matrix products by %s, compiler %s\n", BUILD_COMMIT, BUILD_BLAS, __VERSION__);
        } else {
            model_list(stdout);
        }
    }
    comm_finish(run->comm);
    return CODE_OK;
}

int main(int argc, char **argv) {
    static Run run; // large, and loaders must not move
    Options *o = &run.options;
    Error error = {0};
    PlanInput plan;
    Checkpoint checkpoint = {0};
    bool found = false;
    run.lock = run.monitor.log = -1;

    threads_wait_briefly(argv);
    if (!signals_block(&error)) die_error(&error); // before MPI starts threads
    run.comm = comm_init(&argc, &argv);
    threads_share_host(run.comm->local_size);
    require_all(&run, options_parse(o, argc, argv, &error), &error);
    if (o->help || o->version || (o->model != NULL && strcmp(o->model, "list") == 0)) return inform(&run);

    // Check: files, model, place on disk, checkpoint to go on from, memory.
    require_all(&run, prepare(&run, &error), &error);
    const bool writes = is_first(&run) && o->out != NULL && !o->dry_run;
    require_all(&run, !writes || checkpoint_lock(o->out, &run.lock, &error), &error);
    require_all(&run, find_checkpoint(&run, &checkpoint, &found, &error), &error);
    if (found && o->steps > 0 && run.step >= o->steps && (o->out == NULL || monitor_finished(o->out))) {
        if (is_first(&run)) printf("%s is at step %lld of %lld: nothing to do\n", checkpoint.directory, (long long)run.step, (long long)o->steps);
        checkpoint_close(&checkpoint);
        comm_finish(run.comm);
        return CODE_OK;
    }
    require_all(&run, open_loaders(&run, &error), &error);
    Model model = model_create(&run.config);
    require_all(&run, prepare_plan(&run, &model, &plan, &error), &error);
    if (o->dry_run) {
        if (is_first(&run)) plan_print(stdout, &plan);
        if (found) checkpoint_close(&checkpoint);
        model_free(&model);
        comm_finish(run.comm);
        return CODE_OK;
    }
    require_all(&run, plan_fits(&plan, &error), &error);

    // Allocate, initialise or load.
    const int64_t optimizer_steps = run.trainer.optimizer_steps;
    trainer_create(&run.trainer, o, &run.config, run.comm);
    run.trainer.optimizer_steps = optimizer_steps;
    Trainer *t = &run.trainer;
    trainer_init_parameters(t);
    if (found) load(&run, &checkpoint);
    if (!found && o->init_from != NULL) load_weights(&run);
    if (found) checkpoint_close(&checkpoint);
    t->peak_flops = t->device.matmul_rate(&t->device, t->dtype);
    // A run that only looks (--steps 0) at an existing checkpoint leaves its log alone.
    const char *log = found && o->steps == 0 ? NULL : o->out;
    require_all(&run, !is_first(&run) || monitor_open(&run.monitor, log, o->steps, found, run.step, &error), &error);
    monitor_rates(&run.monitor, model_flops_per_token(&model, o->seq), t->peak_flops * run.comm->size);
    if (run.comm->mpi) run.monitor.terminal = false; // a launcher's pipe, even where it looks like a terminal
    if (log != NULL && is_first(&run)) require(&run, monitor_run_json(log, argc, argv, o, &run.config, model_parameters(&model), &error), &error);
    if (is_first(&run)) banner(&run, &plan);
    if (run.comm->size > 1) comm_watchdog(run.comm, (double)o->watchdog);

    const char *stop = agree_on_stop(&run, NULL, NULL);
    while (run.step < o->steps && stop == NULL) {
        const double begin = clock_ms();
        const int64_t step = run.step + 1;
        comm_heartbeat(run.comm, step, "training");
        const StepBatch *batch = loader_next(&run.train, &error);
        require(&run, batch != NULL, &error);
        if (batch->valid_global == 0 && is_first(&run))
            monitor_say(&run.monitor, "step %lld: no token of this batch has a target", (long long)step);
        step_begin(t, step);
        accumulate_gradients(t, batch);
        if (step == 1) dump_gradients(&run);
        const StepState result = step_end(t);
        int64_t tokens = batch->tokens;
        stop = agree_on_stop(&run, o->out, &tokens);
        record_step(&run, batch, &result, tokens, clock_ms() - begin);

        const bool last = step == o->steps;
        if (o->out != NULL && (due(o->save_every, step) || (last && o->save_every > 0) || stop != NULL)) save(&run);
        if (due(o->val_every, step) && !last && stop == NULL) validate(&run);
        if (due(o->sample_every, step) && !last && stop == NULL) generate(&run);
    }
    if (stop == NULL) {
        validate(&run);
        if (o->sample_every > 0 || o->prompt != NULL) generate(&run);
    }
    if (stop == NULL) stop = agree_on_stop(&run, NULL, NULL); // in the last validation: the next --resume auto finishes the run
    record_end(&run, stop == NULL);
    if (stop != NULL && is_first(&run)) {
        fprintf(stderr, "train_gpt: stopped by %s after step %lld%s\n", stop, (long long)run.step, o->out != NULL && run.step > 0 ? ", saved" : "");
    }
    run_close(&run);
    model_free(&model);
    return stop != NULL ? CODE_PREEMPTED : CODE_OK;
}
#endif
