// subject.h: the trainer of train_gpt.c on one rank of any device, as tests see it: parameters in, micro-batches in, logits, losses, gradients and
// norms out. All that tests of whole steps know of the trainer's functions. Compares nothing. Included behind train_gpt.c (with TRAIN_GPT_NO_MAIN).
#ifndef DEV_TEST_SUBJECT_H
#define DEV_TEST_SUBJECT_H

#include "dev/test/reference.h" // NaiveBatch, NaiveAdamW, reference_random_value

typedef struct {
    Options options; // the trainer points to it
    ModelConfig config;
    Comm *comm; // of one rank
    Trainer trainer;
    int64_t step;
} Subject;

// A trainer that holds micro-batches of at most B*T tokens, and has the device from now on. Its parameters are not set yet.
static Subject *subject_open(const ModelConfig *config, int precision, int64_t B, int64_t T, const NaiveAdamW *optimizer, Device device) {
    Subject *s = base_new(1, sizeof *s);
    Options *o = &s->options;
    options_defaults(o);
    o->precision = precision;
    o->micro_batch = o->global_batch = B;
    o->seq = T;
    o->schedule = SCHEDULE_CONSTANT;
    o->lr = optimizer->lr;
    o->beta1 = optimizer->beta1;
    o->beta2 = optimizer->beta2;
    o->eps = optimizer->eps;
    o->weight_decay = optimizer->weight_decay;
    o->clip = optimizer->clip;
    s->config = *config;
    s->comm = comm_init(NULL, NULL);
    trainer_create(&s->trainer, o, &s->config, s->comm, device);
    return s;
}

static void subject_close(Subject *s) {
    trainer_free(&s->trainer);
    comm_finish(s->comm);
    options_free(&s->options);
    free(s);
}

// Logits of fewer tokens at a time than the trainer would take: its own choice only matters for large vocabularies. 0: as the trainer would.
static void subject_chunk(Subject *s, int64_t tokens) {
    if (tokens > 0) s->trainer.acts.chunk = min_i64(s->trainer.acts.chunk, tokens);
}

static int64_t subject_offset(const Subject *s, const Tensor *tensor) { return s->trainer.zero.offset[tensor->id]; }

static void subject_load(Subject *s, const Tensor *tensor, const float *values) {
    Trainer *t = &s->trainer;
    const Buffer param = buffer_at(t->zero.param, subject_offset(s, tensor));
    const Buffer full = t->dtype == DTYPE_F32 ? param : buffer_at(t->zero.master, subject_offset(s, tensor));
    t->device.copy_in(&t->device, full.data, values, (size_t)tensor->elements * sizeof *values);
    if (t->dtype != DTYPE_F32) t->device.cast(&t->device, param, full, tensor->elements);
}

// Random values of every parameter, the same on every device.
static void subject_randomize(Subject *s, uint64_t key) {
    const Model *model = &s->trainer.model;
    for (int i = 0; i < model->count; i++) {
        const Tensor *tensor = &model->tensors[i];
        float *values = base_new((size_t)tensor->elements, sizeof *values);
        for (int64_t e = 0; e < tensor->elements; e++) values[e] = reference_random_value(tensor, key, e);
        subject_load(s, tensor, values);
        free(values);
    }
}

static MicroBatch subject_batch(const NaiveBatch *batch) {
    MicroBatch micro;
    microbatch_create(&micro, max_i64(batch->tokens, batch->documents));
    micro.tokens = batch->tokens;
    micro.documents = batch->documents;
    micro.valid = reference_valid(batch);
    for (int64_t d = 0; d < batch->documents; d++) {
        micro.max_length = max_i64(micro.max_length, batch->cu_seqlens[d + 1] - batch->cu_seqlens[d]);
    }
    memcpy(micro.cu_seqlens, batch->cu_seqlens, (size_t)(batch->documents + 1) * sizeof(int32_t));
    memcpy(micro.ids, batch->ids, (size_t)batch->tokens * sizeof(int32_t));
    memcpy(micro.targets, batch->targets, (size_t)batch->tokens * sizeof(int32_t));
    memcpy(micro.positions, batch->positions, (size_t)batch->tokens * sizeof(int32_t));
    for (int64_t n = 0; n < batch->tokens; n++) micro.token_index[n] = (int32_t)(batch->first_token + n);
    return micro;
}

// Starts a step and computes its gradients from `count` micro-batches.
static void subject_gradients(Subject *s, const NaiveBatch *batches, int count) {
    enum { LIMIT = 8 };
    MicroBatch micros[LIMIT];
    StepBatch step = {.micros = micros, .micro_count = count};
    for (int i = 0; i < count; i++) {
        micros[i] = subject_batch(&batches[i]);
        step.tokens += micros[i].tokens;
        step.valid += micros[i].valid;
    }
    step.valid_global = step.valid;
    Error error = {0};
    const ScheduleShape shape = {SCHEDULE_1F1B, 1, count, 1};
    schedule_free(&s->trainer.schedule);
    if (!schedule_build(&s->trainer.schedule, &shape, 0, &error)) die_error(&error);
    step_begin(&s->trainer, ++s->step);
    StepState *state = s->trainer.state;
    s->trainer.device.copy_in(&s->trainer.device, &state->dropout_key, &batches[0].dropout_key, sizeof state->dropout_key);
    accumulate_gradients(&s->trainer, &step);
    for (int i = 0; i < count; i++) microbatch_free(&micros[i]);
}

// Loss of the running step.
static double subject_loss(Subject *s) {
    StepState state;
    s->trainer.device.copy_out(&s->trainer.device, &state, s->trainer.state, sizeof state);
    return state.loss_sum;
}

static void subject_gradient(Subject *s, const Tensor *tensor, float *values) {
    Trainer *t = &s->trainer;
    t->device.copy_out(&t->device, values, buffer_at(t->zero.grad, subject_offset(s, tensor)).data, (size_t)tensor->elements * sizeof *values);
}

// Ends the step; returns the norm of its gradient before clipping.
static double subject_update(Subject *s) {
    step_end(&s->trainer, s->step);
    return step_result(&s->trainer, s->step).grad_norm;
}

// logits (N, V) of a batch, without dropout; between steps.
static void subject_logits(Subject *s, const NaiveBatch *batch, float *logits) {
    Trainer *t = &s->trainer;
    Device *d = &t->device;
    const int64_t C = s->config.channels, V = s->config.vocab, N = batch->tokens;
    MicroBatch micro = subject_batch(batch);
    Buffer w[TENSOR_KINDS];
    (void)forward_only(t, &micro);
    zero_weights(&t->zero, unit_of_head_weight(t), w);
    for (int64_t n = 0; n < N; n += t->acts.chunk) {
        const int64_t count = min_i64(t->acts.chunk, N - n);
        d->linear_forward(d, t->acts.logits, ABSENT, buffer_at(t->acts.slots[0].norm, n * C), w[model_head_kind(&s->config)], ABSENT, count, C, V);
        read_logits(t, count, logits + n * V);
    }
    microbatch_free(&micro);
}

#endif
