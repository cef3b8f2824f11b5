// test_gpt.c: the trainer against recorded PyTorch and transformers results (dev/reference/README.md), and against the
// double-precision model of dev/test/naive_gpt.h for random configurations. Says nothing of speed, files or the command line.
#define TRAIN_GPT_NO_MAIN
#include "train_gpt.c" // Trainer

#include "dev/test/reference.h" // Fixture, NaiveGpt, reference_*
#include "dev/test/subject.h"   // Subject
#include "dev/test/test.h"      // check, test_end

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
        const double floor = reference_floor(global, reference_norm(theirs + at, t->elements), t->elements, total, REFERENCE_DOUBLE);
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
    Subject *s =
        subject_open(&config, precision, (int64_t)fixture_number(&f, "batch"), (int64_t)fixture_number(&f, "seq"), &optimizer, device_cpu());
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
    subject_randomize(s, key);
    for (int i = 0; i < gpt->model.count; i++) {
        const Tensor *t = &gpt->model.tensors[i];
        for (int64_t e = 0; e < t->elements; e++) gpt->param[gpt->offset[i] + e] = reference_random_value(t, key, e);
    }
}

static void test_random(uint64_t index, int precision, Result *worst) {
    enum { STEPS = 3 };
    const NaiveAdamW optimizer = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1, .clip = 1.0};
    const Errors *bound = precision == PRECISION_BF16 ? &bounds_bf16_random : &bounds_fp32;
    RandomCase c = reference_random_case(index, precision == PRECISION_BF16 ? 16 : 2);
    Subject *s = subject_open(&c.config, precision, c.B + c.room, c.T, &optimizer, device_cpu());
    NaiveGpt gpt = naive_create(&c.config, c.B * c.T);
    subject_chunk(s, c.chunk);
    random_parameters(s, &gpt, c.draw.key);
    Result r = {0};
    for (int step = 0; step < STEPS; step++) {
        RandomBatch random[RANDOM_MICROS];
        NaiveBatch batches[RANDOM_MICROS];
        reference_random_step(&c, step, random);
        for (int i = 0; i < c.micros; i++) batches[i] = random[i].batch;
        double loss;
        if (step == 0 || step == STEPS - 1) {
            const double dropout = gpt.model.config.dropout;
            gpt.model.config.dropout = 0.0;
            naive_forward(&gpt, &batches[0]);
            gpt.model.config.dropout = dropout;
            add_logits(step == 0 ? &r.logits : &r.after, s, &batches[0], gpt.logits);
        }
        subject_gradients(s, batches, c.micros);
        naive_step_gradients(&gpt, batches, c.micros, &loss);
        if (step == 0) add_gradients(&r, s, &gpt.model, naive_gradient, &gpt);
        worst_add(&r.loss, reference_difference(subject_loss(s), loss), "step");
        worst_add(&r.norm, reference_difference(subject_update(s), naive_update(&gpt, &optimizer)), "step");
        for (int i = 0; i < c.micros; i++) reference_random_batch_free(&random[i]);
    }
    char layout[140], name[200];
    reference_describe(&c.config, layout, sizeof layout);
    snprintf(name, sizeof name, "%d%s: %s, %d x %d x %d (room %d)%s", (int)index, precision == PRECISION_BF16 ? " bf16" : "", layout, c.micros,
             (int)c.B, (int)c.T, (int)(c.B + c.room), c.packed ? " packed" : "");
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
        Subject *s =
            subject_open(&config, precision, (int64_t)fixture_number(&f, "batch"), (int64_t)fixture_number(&f, "seq"), &optimizer, device_cpu());
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
