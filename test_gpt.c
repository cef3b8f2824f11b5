// test_gpt.c: the trainer against recorded PyTorch and transformers results (dev/reference/README.md), and against the
// double-precision model of dev/test/naive_gpt.h for random configurations. Says nothing of speed, files or the command line.
#define TRAIN_GPT_NO_MAIN
#include "train_gpt.c" // Trainer

#include "dev/test/reference.h" // Fixture, NaiveGpt, reference_*
#include "dev/test/test.h"      // check, test_end

// ----------------------------------------------------------------------------
// The adapter: all that is known here of the trainer's functions.

typedef struct {
    Options options; // the trainer points to it
    ModelConfig config;
    Trainer trainer;
    int64_t step;
} Subject;

// A trainer that holds micro-batches of at most B*T tokens. Its parameters are not set yet.
static Subject *subject_open(const ModelConfig *config, int precision, int64_t B, int64_t T, const NaiveAdamW *optimizer) {
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
    static Comm *comm; // of one rank, for all subjects
    if (comm == NULL) comm = comm_init(NULL, NULL);
    trainer_create(&s->trainer, o, &s->config, comm, device_cpu());
    return s;
}

static void subject_close(Subject *s) {
    trainer_free(&s->trainer);
    options_free(&s->options);
    free(s);
}

// Logits of fewer tokens at a time than the trainer would take: its own choice only matters for large vocabularies.
static void subject_chunk(Subject *s, int64_t tokens) { s->trainer.acts.chunk = min_i64(s->trainer.acts.chunk, tokens); }

static int64_t subject_offset(const Subject *s, const Tensor *tensor) { return s->trainer.zero.offset[tensor->id]; }

static void subject_load(Subject *s, const Tensor *tensor, const float *values) {
    Trainer *t = &s->trainer;
    const Buffer param = buffer_at(t->zero.param, subject_offset(s, tensor));
    const Buffer full = t->dtype == DTYPE_F32 ? param : buffer_at(t->zero.master, subject_offset(s, tensor));
    t->device.copy_in(&t->device, full.data, values, (size_t)tensor->elements * sizeof *values);
    if (t->dtype != DTYPE_F32) t->device.cast(&t->device, param, full, tensor->elements);
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

// ----------------------------------------------------------------------------
// Comparison

typedef struct {
    double logits, gradient, global, loss, norm, after;
} Errors; // or bounds: logits, worst tensor, the gradient as one vector, losses, norms, logits after the updates

// An element rounds by up to 6e-8 in fp32, 4e-3 in bf16; layers and products of gradients grow that. Random models are as narrow
// as 8 channels with gradients that nearly cancel, so that bf16 says less there. Updates grow rounding too: AdamW's
// first steps follow the sign of an element, also of one that is all but zero.
static const Errors bounds_fp32 = {2e-6, 2e-5, 5e-6, 1e-5, 5e-5, 1e-4};
static const Errors bounds_bf16 = {2e-2, 8e-2, 4e-2, 5e-3, 2e-2, 3e-2};
static const Errors bounds_bf16_random = {5e-2, 3e-1, 1e-1, 1e-2, 5e-2, 5e-2};

typedef struct {
    Worst logits, gradient, global, loss, norm, after;
} Result;

static void add_logits(Worst *worst, Subject *s, const NaiveBatch *batch, const double *wanted) {
    const int64_t count = batch->tokens * s->config.vocab;
    float *logits = base_new((size_t)count, sizeof *logits);
    subject_logits(s, batch, logits);
    double *got = reference_doubles(logits, count);
    worst_add(worst, reference_error(got, wanted, count, 0.0), "logits");
    free(logits);
    free(got);
}

// Gradient by tensor and as one vector. wanted(context, tensor) returns doubles that are freed here.
static void add_gradients(Result *r, Subject *s, const Model *model, double *(*wanted)(const void *context, const Tensor *tensor),
                          const void *context) {
    const int64_t total = model_parameters(model);
    double *ours = base_new((size_t)total, sizeof *ours), *theirs = base_new((size_t)total, sizeof *theirs);
    float *values = base_new((size_t)total, sizeof *values);
    int64_t at = 0;
    for (int i = 0; i < model->count; at += model->tensors[i++].elements) {
        const Tensor *t = &model->tensors[i];
        subject_gradient(s, t, values);
        for (int64_t e = 0; e < t->elements; e++) ours[at + e] = values[e];
        double *reference = wanted(context, t);
        memcpy(theirs + at, reference, (size_t)t->elements * sizeof *theirs);
        free(reference);
    }
    const double global = reference_norm(theirs, total);
    at = 0;
    for (int i = 0; i < model->count; at += model->tensors[i++].elements) {
        const Tensor *t = &model->tensors[i];
        const double floor = reference_floor(global, reference_norm(theirs + at, t->elements), t->elements, total);
        worst_add(&r->gradient, reference_error(ours + at, theirs + at, t->elements, floor), t->name);
    }
    worst_add(&r->global, reference_error(ours, theirs, total, 0.0), "all");
    free(ours);
    free(theirs);
    free(values);
}

static void print_heading(const char *title) {
    printf("\n%-22s %9s %9s %9s %9s %9s %9s  worst tensor\n", title, "logits", "tensor", "gradient", "losses", "norms", "after");
}
static void print_bounds(const char *name, const Errors *b) {
    printf("%-22s %9.1e %9.1e %9.1e %9.1e %9.1e %9.1e\n", name, b->logits, b->gradient, b->global, b->loss, b->norm, b->after);
}
static void report(const char *name, const Result *r, const Errors *bound) {
    printf("%-22s %9.1e %9.1e %9.1e %9.1e %9.1e %9.1e  %s\n", name, r->logits.error, r->gradient.error, r->global.error, r->loss.error,
           r->norm.error, r->after.error, r->gradient.name);
    check(r->logits.error <= bound->logits, "%s: logits %g", name, r->logits.error);
    check(r->gradient.error <= bound->gradient, "%s: gradient of %s %g", name, r->gradient.name, r->gradient.error);
    check(r->global.error <= bound->global, "%s: gradient %g", name, r->global.error);
    check(r->loss.error <= bound->loss, "%s: loss of %s %g", name, r->loss.name, r->loss.error);
    check(r->norm.error <= bound->norm, "%s: gradient norm of %s %g", name, r->norm.name, r->norm.error);
    check(r->after.error <= bound->after, "%s: logits after the updates %g", name, r->after.error);
}

// ----------------------------------------------------------------------------
// Recorded results: first step's logits and gradients, ten steps' losses and norms, the logits afterwards.

static double *fixture_gradient(const void *context, const Tensor *tensor) {
    return reference_tensor((const Fixture *)context, "grad/", tensor->name, tensor->elements);
}

static void test_fixture(int index, int precision) {
    Fixture f = reference_open(index);
    const ModelConfig config = fixture_config(&f);
    const NaiveAdamW optimizer = reference_optimizer(&f);
    const int64_t steps = (int64_t)fixture_number(&f, "steps"), batches = (int64_t)fixture_number(&f, "batches");
    Subject *s = subject_open(&config, precision, (int64_t)fixture_number(&f, "batch"), (int64_t)fixture_number(&f, "seq"), &optimizer);
    Model model = model_create(&config);
    for (int i = 0; i < model.count; i++) {
        char name[64];
        snprintf(name, sizeof name, "param/%s", model.tensors[i].name);
        subject_load(s, &model.tensors[i], fixture_data(&f, name, FIXTURE_F32, model.tensors[i].elements));
    }
    const double *losses = fixture_data(&f, "losses", FIXTURE_F64, steps), *norms = fixture_data(&f, "grad_norms", FIXTURE_F64, steps);
    const NaiveBatch first = reference_batch(&f, 0);
    Result r = {0};
    double *logits = reference_tensor(&f, "", "logits", first.tokens * config.vocab);
    double *after = reference_tensor(&f, "", "logits_after", first.tokens * config.vocab);
    add_logits(&r.logits, s, &first, logits);
    for (int64_t step = 0; step < steps; step++) {
        char name[32];
        snprintf(name, sizeof name, "step %d", (int)step + 1);
        const NaiveBatch batch = reference_batch(&f, step % batches);
        subject_gradients(s, &batch, 1);
        if (step == 0) add_gradients(&r, s, &model, fixture_gradient, &f);
        worst_add(&r.loss, reference_difference(subject_loss(s), losses[step]), name);
        worst_add(&r.norm, reference_difference(subject_update(s), norms[step]), name);
    }
    add_logits(&r.after, s, &first, after);
    char name[64];
    snprintf(name, sizeof name, "%s %s", reference_fixtures[index], precision == PRECISION_BF16 ? "bf16" : "fp32");
    report(name, &r, precision == PRECISION_BF16 ? &bounds_bf16 : &bounds_fp32);
    free(logits);
    free(after);
    model_free(&model);
    subject_close(s);
    fixture_close(&f);
}

// ----------------------------------------------------------------------------
// Random configurations against the double-precision model: every switch, odd sizes, packed documents, dropout, masked targets,
// one to three micro-batches per step (the last without a single target in some), trainers with room for more tokens than come,
// logits by small chunks.

static double *naive_gradient(const void *context, const Tensor *tensor) {
    const NaiveGpt *gpt = context;
    double *copy = base_new((size_t)tensor->elements, sizeof *copy);
    return memcpy(copy, gpt->grad + gpt->offset[tensor->id], (size_t)tensor->elements * sizeof *copy);
}

static void naive_step_gradients(NaiveGpt *gpt, const NaiveBatch *batches, int count, double *loss) {
    int64_t valid = 0;
    for (int i = 0; i < count; i++) valid += reference_valid(&batches[i]);
    naive_zero_grad(gpt);
    *loss = 0.0;
    for (int i = 0; i < count; i++) {
        *loss += naive_forward(gpt, &batches[i]) / (double)valid;
        naive_backward(gpt, &batches[i], 1.0 / (double)valid);
    }
}

static void random_parameters(Subject *s, NaiveGpt *gpt, uint64_t key) {
    for (int i = 0; i < gpt->model.count; i++) {
        const Tensor *t = &gpt->model.tensors[i];
        float *values = base_new((size_t)t->elements, sizeof *values);
        for (int64_t e = 0; e < t->elements; e++) {
            values[e] = reference_random_value(t, key, e);
            gpt->param[gpt->offset[i] + e] = values[e];
        }
        subject_load(s, t, values);
        free(values);
    }
}

static void test_random(uint64_t index, int precision, Result *worst) {
    enum { STEPS = 3, MICROS = 3 };
    const NaiveAdamW optimizer = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1, .clip = 1.0};
    const Errors *bound = precision == PRECISION_BF16 ? &bounds_bf16_random : &bounds_fp32;
    Draw draw = draw_create(2, index);
    ModelConfig config = reference_random_config(&draw, precision == PRECISION_BF16 ? 16 : 2);
    const int64_t B = draw_between(&draw, 1, 5, 1), T = draw_between(&draw, 1, config.max_seq, 1), room = draw_between(&draw, 0, 2, 1);
    const bool packed = draw_between(&draw, 0, 1, 1) == 1, last_masked = draw_between(&draw, 0, 3, 1) == 0;
    const int micros = (int)draw_between(&draw, 1, MICROS, 1);
    Subject *s = subject_open(&config, precision, B + room, T, &optimizer);
    NaiveGpt gpt = naive_create(&config, B * T);
    if (draw_between(&draw, 0, 1, 1) == 1) subject_chunk(s, draw_between(&draw, 1, 20, 1));
    random_parameters(s, &gpt, draw.key);
    Result r = {0};
    for (int step = 0; step < STEPS; step++) {
        RandomBatch random[MICROS];
        NaiveBatch batches[MICROS];
        for (int i = 0; i < micros; i++) {
            random[i] = reference_random_batch(&draw, &config, B, T, packed, i * B * T);
            random[i].batch.dropout_key = rng_dropout_key(draw.key, (uint64_t)step + 1);
            for (int64_t n = 0; n < B * T && i > 0 && i == micros - 1 && last_masked; n++) random[i].targets[n] = -1;
            batches[i] = random[i].batch;
        }
        double loss;
        if (step == 0 || step == STEPS - 1) {
            const double dropout = gpt.model.config.dropout;
            gpt.model.config.dropout = 0.0;
            naive_forward(&gpt, &batches[0]);
            gpt.model.config.dropout = dropout;
            add_logits(step == 0 ? &r.logits : &r.after, s, &batches[0], gpt.logits);
        }
        subject_gradients(s, batches, micros);
        naive_step_gradients(&gpt, batches, micros, &loss);
        if (step == 0) add_gradients(&r, s, &gpt.model, naive_gradient, &gpt);
        worst_add(&r.loss, reference_difference(subject_loss(s), loss), "step");
        worst_add(&r.norm, reference_difference(subject_update(s), naive_update(&gpt, &optimizer)), "step");
        for (int i = 0; i < micros; i++) reference_random_batch_free(&random[i]);
    }
    char layout[140], name[200];
    reference_describe(&config, layout, sizeof layout);
    snprintf(name, sizeof name, "%d%s: %s, %d x %d x %d (room %d)%s", (int)index, precision == PRECISION_BF16 ? " bf16" : "", layout, micros,
             (int)B, (int)T, (int)(B + room), packed ? " packed" : "");
    const double errors[] = {r.logits.error, r.gradient.error, r.global.error, r.loss.error, r.norm.error, r.after.error};
    const double bounds[] = {bound->logits, bound->gradient, bound->global, bound->loss, bound->norm, bound->after};
    bool good = true;
    for (int i = 0; i < 6; i++) good = good && errors[i] <= bounds[i];
    check(good, "random %s: logits %.1e, %s %.1e, gradient %.1e, loss %.1e, norm %.1e, after %.1e", name, errors[0], r.gradient.name, errors[1],
          errors[2], errors[3], errors[4], errors[5]);
    snprintf(name, sizeof name, "%s of %d", r.gradient.name, (int)index);
    worst_add(&worst->logits, r.logits.error, name);
    worst_add(&worst->gradient, r.gradient.error, name);
    worst_add(&worst->global, r.global.error, name);
    worst_add(&worst->loss, r.loss.error, name);
    worst_add(&worst->norm, r.norm.error, name);
    worst_add(&worst->after, r.after.error, name);
    naive_free(&gpt);
    subject_close(s);
}

// ----------------------------------------------------------------------------
// The same run twice has the same bits.

static void test_repeat(int index, int precision) {
    Fixture f = reference_open(index);
    const ModelConfig config = fixture_config(&f);
    const NaiveAdamW optimizer = reference_optimizer(&f);
    Model model = model_create(&config);
    const int64_t total = model_parameters(&model);
    float *gradients[2];
    double losses[2];
    for (int run = 0; run < 2; run++) {
        Subject *s = subject_open(&config, precision, (int64_t)fixture_number(&f, "batch"), (int64_t)fixture_number(&f, "seq"), &optimizer);
        for (int i = 0; i < model.count; i++) {
            char name[64];
            snprintf(name, sizeof name, "param/%s", model.tensors[i].name);
            subject_load(s, &model.tensors[i], fixture_data(&f, name, FIXTURE_F32, model.tensors[i].elements));
        }
        for (int64_t step = 0; step < 3; step++) {
            if (step > 0) subject_update(s);
            const NaiveBatch batches[2] = {reference_batch(&f, step % 2), reference_batch(&f, 2)};
            subject_gradients(s, batches, 2);
        }
        losses[run] = subject_loss(s);
        gradients[run] = base_new((size_t)total, sizeof(float));
        int64_t at = 0;
        for (int i = 0; i < model.count; at += model.tensors[i++].elements) subject_gradient(s, &model.tensors[i], gradients[run] + at);
        subject_close(s);
    }
    check(memcmp(gradients[0], gradients[1], (size_t)total * sizeof(float)) == 0, "%s: two runs, different gradients", reference_fixtures[index]);
    check(losses[0] == losses[1], "%s: two runs, different losses: %.17g and %.17g", reference_fixtures[index], losses[0], losses[1]);
    free(gradients[0]);
    free(gradients[1]);
    model_free(&model);
    fixture_close(&f);
}

int main(void) {
    enum { RANDOM_FP32 = 60, RANDOM_BF16 = 30 };
    static const char *const titles[] = {[PRECISION_FP32] = "fp32", [PRECISION_BF16] = "bf16"};
    for (int precision = PRECISION_FP32; precision <= PRECISION_BF16; precision++) {
        print_heading(titles[precision]);
        for (int i = 0; i < REFERENCE_FIXTURES; i++) {
            Fixture f = reference_open(i);
            const bool fits = precision == PRECISION_FP32 || fixture_config(&f).head_size % 16 == 0; // what bf16 attention takes
            fixture_close(&f);
            if (fits) test_fixture(i, precision);
        }
        print_bounds("bound", precision == PRECISION_BF16 ? &bounds_bf16 : &bounds_fp32);
        Result worst = {0};
        const int count = precision == PRECISION_BF16 ? RANDOM_BF16 : RANDOM_FP32;
        for (int i = 0; i < count; i++) test_random((uint64_t)i, precision, &worst);
        printf("%-3d %-18s %9.1e %9.1e %9.1e %9.1e %9.1e %9.1e  %s\n", count, "random, worst", worst.logits.error, worst.gradient.error,
               worst.global.error, worst.loss.error, worst.norm.error, worst.after.error, worst.gradient.name);
        print_bounds("bound", precision == PRECISION_BF16 ? &bounds_bf16_random : &bounds_fp32);
        for (int i = 0; i < 3; i++) test_repeat(i == 0 ? 0 : i == 1 ? 3 : 6, precision);
    }
    printf("\n");
    return test_end();
}
