// whole_step.c: the trainer of train_gpt.c on the CPU device and on the CUDA device, in one process, with the same parameters and the same
// micro-batches: what single ops cannot show, such as a buffer that is stale, a gradient that is not added to, a scale or a place of dropout that
// differs. Logits, the first step's gradient of every tensor, losses and norms of all steps, the logits after their updates. Says nothing of ranks
// (dev/test/train_cuda.sh) and of what the results should be (test_gpt.c).
//
// fp32: relative error against the CPU device. bf16: the CPU device's fp32 trainer is the reference of both; the error of the CUDA device may be
// twice that of the CPU device in bf16.
#define TRAIN_GPT_NO_MAIN
#define USE_CUDA       // for llmc/devices.h: memory of the device is communicated by the device
#include "train_gpt.c" // Trainer

#include "dev/test/cuda/whole_step.h" // whole_step_test
#include "dev/test/reference.h"       // RandomCase, reference_error
#include "dev/test/subject.h"         // Subject

// A run of the trainer: which model, which micro-batches, how many steps.
typedef struct {
    const char *name;
    RandomCase random; // its batches
    int steps;
    bool last_empty;     // the last micro-batch has not a single token
    bool empty_document; // every micro-batch begins with a document of no tokens
} Case;

// What came of it.
typedef struct {
    Model model;
    int64_t logit_count, total, steps;
    double *logits, *after; // (logit_count) of the first step's first micro-batch, before and after all updates
    double *gradient;       // (total) of the first step, tensor after tensor
    double *losses, *norms; // (steps)
} Outcome;

static void outcome_free(Outcome *r) {
    free(r->logits);
    free(r->after);
    free(r->gradient);
    free(r->losses);
    free(r->norms);
    model_free(&r->model);
}

// ----------------------------------------------------------------------------
// Running

static double *logits_of(Subject *s, const NaiveBatch *batch) {
    const int64_t count = batch->tokens * s->config.vocab;
    float *logits = base_new((size_t)count, sizeof *logits);
    subject_logits(s, batch, logits);
    double *copy = reference_doubles(logits, count);
    free(logits);
    return copy;
}

static double *gradient_of(Subject *s, const Model *model) {
    const int64_t total = model_parameters(model);
    float *values = base_new((size_t)total, sizeof *values);
    int64_t at = 0;
    for (int i = 0; i < model->count; at += model->tensors[i++].elements) subject_gradient(s, &model->tensors[i], values + at);
    double *copy = reference_doubles(values, total);
    free(values);
    return copy;
}

// The micro-batches of the next step, into random and batches (micros).
static void next_step(const Case *c, RandomCase *draws, int step, RandomBatch *random, NaiveBatch *batches) {
    reference_random_step(draws, step, random);
    for (int i = 0; i < draws->micros; i++) {
        NaiveBatch *batch = &random[i].batch;
        if (c->empty_document && batch->documents < batch->tokens) {
            memmove(random[i].cu_seqlens + 1, random[i].cu_seqlens, (size_t)(batch->documents + 1) * sizeof(int32_t));
            batch->documents++;
        }
        if (c->last_empty && i > 0 && i == draws->micros - 1) batch->tokens = batch->documents = 0;
        batches[i] = *batch;
    }
}

static Outcome run_case(const Case *c, int precision, Device device) {
    const NaiveAdamW optimizer = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1, .clip = 1.0};
    RandomCase draws = c->random;
    Outcome r = {.model = model_create(&draws.config), .steps = c->steps, .logit_count = draws.B * draws.T * draws.config.vocab};
    r.total = model_parameters(&r.model);
    r.losses = base_new((size_t)c->steps, sizeof *r.losses);
    r.norms = base_new((size_t)c->steps, sizeof *r.norms);
    Subject *s = subject_open(&draws.config, precision, draws.B + draws.room, draws.T, &optimizer, device);
    subject_chunk(s, draws.chunk);
    subject_randomize(s, draws.draw.key);
    RandomBatch random[RANDOM_MICROS], first[RANDOM_MICROS];
    NaiveBatch batches[RANDOM_MICROS], looked_at = {0};
    for (int step = 0; step < c->steps; step++) {
        RandomBatch *arrays = step == 0 ? first : random;
        next_step(c, &draws, step, arrays, batches);
        if (step == 0) looked_at = batches[0], r.logits = logits_of(s, &looked_at);
        subject_gradients(s, batches, draws.micros);
        if (step == 0) r.gradient = gradient_of(s, &r.model);
        r.losses[step] = subject_loss(s);
        r.norms[step] = subject_update(s);
        for (int i = 0; i < draws.micros && step > 0; i++) reference_random_batch_free(&random[i]);
    }
    r.after = logits_of(s, &looked_at);
    for (int i = 0; i < draws.micros; i++) reference_random_batch_free(&first[i]);
    subject_close(s);
    return r;
}

// ----------------------------------------------------------------------------
// Comparing

typedef struct {
    double logits, gradient, global, loss, norm, after;
} Bounds;

// Both devices round in fp32, differently: about twice what test_gpt.c allows one of them against double precision.
static const Bounds bounds_fp32 = {4e-6, 2e-5, 5e-6, 1e-5, 5e-5, 1e-4};

// In bf16: what is rounded once, with all else exact, is off by up to half a unit in the last place of 8 bits. An error of the CPU device below
// that is luck, which the CUDA device need not have.
#define FLOOR_BF16 0x1p-9

typedef struct {
    const char *name; // of the case
    WholeStepRecord *record;
    void *context;
    const Outcome *want, *rounded, *have; // CPU in fp32; CPU in bf16, or NULL: all is fp32; CUDA
} Comparison;

static void record(const Comparison *c, const char *what, const char *tensor, double error, double bound) {
    char row[120], where[160];
    snprintf(row, sizeof row, "step: %s %s", what, c->rounded != NULL ? "bf16" : "fp32");
    snprintf(where, sizeof where, "%s%s%s", c->name, tensor[0] != '\0' ? ", " : "", tensor);
    c->record(c->context, row, where, error, bound);
}

// n values: `floor` is what an error is measured against at least.
static void compare_part(const Comparison *c, const char *what, const char *tensor, const double *want, const double *rounded, const double *have,
                         int64_t n, double floor, double bound) {
    const double error = reference_error(have, want, n, floor);
    if (c->rounded == NULL) {
        record(c, what, tensor, error, bound);
    } else {
        record(c, what, tensor, error / fmax(reference_error(rounded, want, n, floor), FLOOR_BF16), 2);
    }
}

// "gradient of h.*.attn.q.weight": one row for all layers
static void gradient_row(const Tensor *tensor, char *row, size_t size) {
    const char *name = tensor->name, *rest = name;
    if (strncmp(name, "h.", 2) == 0) rest += 2 + strspn(name + 2, "0123456789");
    snprintf(row, size, "gradient of %s%s", rest != name ? "h.*" : "", rest);
}

static void compare_gradients(const Comparison *c) {
    const Outcome *want = c->want;
    const double *rounded = c->rounded != NULL ? c->rounded->gradient : want->gradient;
    const double global = reference_norm(want->gradient, want->total);
    int64_t at = 0;
    for (int i = 0; i < want->model.count; at += want->model.tensors[i++].elements) {
        const Tensor *t = &want->model.tensors[i];
        char row[96];
        gradient_row(t, row, sizeof row);
        const double floor = reference_floor(global, reference_norm(want->gradient + at, t->elements), t->elements, want->total, REFERENCE_FLOAT);
        compare_part(c, row, t->name, want->gradient + at, rounded + at, c->have->gradient + at, t->elements, floor, bounds_fp32.gradient);
    }
    compare_part(c, "gradient", "", want->gradient, rounded, c->have->gradient, want->total, 0, bounds_fp32.global);
}

static void compare_outcomes(const Comparison *c) {
    const Outcome *want = c->want, *have = c->have, *rounded = c->rounded != NULL ? c->rounded : c->want;
    compare_part(c, "logits", "", want->logits, rounded->logits, have->logits, want->logit_count, 0, bounds_fp32.logits);
    compare_gradients(c);
    compare_part(c, "losses", "", want->losses, rounded->losses, have->losses, want->steps, 0, bounds_fp32.loss);
    compare_part(c, "norms", "", want->norms, rounded->norms, have->norms, want->steps, 0, bounds_fp32.norm);
    compare_part(c, "logits after the updates", "", want->after, rounded->after, have->after, want->logit_count, 0, bounds_fp32.after);
}

// One case in one precision.
static void test_case(const Case *c, int precision, WholeStepRecord *record, void *context) {
    Outcome want = run_case(c, PRECISION_FP32, device_cpu()), have = run_case(c, precision, device_cuda(0)), rounded = {0};
    if (precision == PRECISION_BF16) rounded = run_case(c, precision, device_cpu());
    const Comparison comparison = {c->name, record, context, &want, precision == PRECISION_BF16 ? &rounded : NULL, &have};
    compare_outcomes(&comparison);
    outcome_free(&want);
    outcome_free(&have);
    if (precision == PRECISION_BF16) outcome_free(&rounded);
}

// ----------------------------------------------------------------------------
// Cases

// The two families of models, with sizes that no tile divides, several micro-batches, masked targets.
static Case gpt2_case(int steps) {
    const ModelConfig config = {.layers = 2,
                                .channels = 48,
                                .heads = 3,
                                .kv_heads = 3,
                                .head_size = 16,
                                .ffn = 100,
                                .vocab = 131,
                                .max_seq = 13,
                                .norm = NORM_LAYERNORM,
                                .position = POSITION_LEARNED,
                                .activation = ACTIVATION_GELU,
                                .bias = BIAS_ON,
                                .tied = true,
                                .norm_eps = 1e-5,
                                .dropout = 0.1};
    return (Case){.name = "GPT-2",
                  .random = {.draw = draw_create(3, 1), .config = config, .B = 2, .T = 13, .room = 1, .micros = 3},
                  .steps = steps,
                  .last_empty = true};
}

static Case llama_case(int steps) {
    const ModelConfig config = {.layers = 2,
                                .channels = 40,
                                .heads = 4,
                                .kv_heads = 2,
                                .head_size = 16,
                                .ffn = 72,
                                .vocab = 97,
                                .max_seq = 19,
                                .norm = NORM_RMSNORM,
                                .position = POSITION_ROPE,
                                .activation = ACTIVATION_SWIGLU,
                                .bias = BIAS_OFF,
                                .qk_norm = true,
                                .norm_eps = 1e-5,
                                .rope_theta = 1e4};
    return (Case){
        .name = "Llama",
        .random = {.draw = draw_create(3, 2), .config = config, .B = 2, .T = 19, .chunk = 11, .micros = 3, .packed = true, .last_masked = true},
        .steps = steps,
        .empty_document = true};
}

// Every switch and odd sizes, as test_gpt.c has them.
static void test_random(uint64_t index, int precision, WholeStepRecord *record, void *context) {
    enum { STEPS = 3 };
    char layout[140], name[200];
    Case c = {.name = name, .random = reference_random_case(index, precision == PRECISION_BF16 ? 16 : 2), .steps = STEPS};
    reference_describe(&c.random.config, layout, sizeof layout);
    snprintf(name, sizeof name, "%d: %s", (int)index, layout);
    test_case(&c, precision, record, context);
}

void whole_step_test(bool small, WholeStepRecord *record, void *context) {
    enum { RANDOM = 3 };
    const int steps = small ? 2 : 10;
    for (int precision = PRECISION_FP32; precision <= PRECISION_BF16; precision++) {
        const Case cases[] = {gpt2_case(steps), llama_case(small ? 1 : steps)};
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) test_case(&cases[i], precision, record, context);
        for (int i = 0; i < RANDOM && !small; i++) test_random((uint64_t)i, precision, record, context);
    }
}
