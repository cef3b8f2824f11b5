// test_naive.c: the double-precision model (naive_gpt.h) against recorded PyTorch and transformers results, and against
// finite differences for random configurations.
#include "dev/test/reference.h" // Fixture, NaiveGpt, reference_*
#include "dev/test/test.h"      // check, test_end

LLMC_PRINTF(3, 4) static void report(Worst worst, double bound, const char *format, ...) {
    char what[160];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(what, sizeof what, format, arguments);
    va_end(arguments);
    check_error(worst.error, bound, what);
}

static void test_fixture(int index) {
    const double bound = 1e-7, scalar_bound = 1e-12; // tensors are recorded in fp32, scalars in double
    Fixture f = reference_open(index);
    const ModelConfig config = fixture_config(&f);
    const NaiveAdamW optimizer = reference_optimizer(&f);
    const int64_t steps = (int64_t)fixture_number(&f, "steps"), batches = (int64_t)fixture_number(&f, "batches");
    NaiveBatch batch = reference_batch(&f, 0);
    NaiveGpt gpt = naive_create(&config, batch.tokens);
    for (int i = 0; i < gpt.model.count; i++) {
        double *values = reference_tensor(&f, "param/", gpt.model.tensors[i].name, gpt.model.tensors[i].elements);
        memcpy(gpt.param + gpt.offset[i], values, (size_t)gpt.model.tensors[i].elements * sizeof *values);
        free(values);
    }
    const double *losses = fixture_data(&f, "losses", FIXTURE_F64, steps), *norms = fixture_data(&f, "grad_norms", FIXTURE_F64, steps);
    Worst logits = {0}, gradient = {0}, loss = {0}, norm = {0}, after = {0};
    for (int64_t step = 0; step < steps; step++) {
        char name[32];
        snprintf(name, sizeof name, "step %d", (int)step + 1);
        batch = reference_batch(&f, step % batches);
        const double valid = (double)reference_valid(&batch);
        worst_add(&loss, reference_difference(naive_forward(&gpt, &batch) / valid, losses[step]), name);
        naive_zero_grad(&gpt);
        naive_backward(&gpt, &batch, 1.0 / valid);
        for (int i = 0; i < gpt.model.count && step == 0; i++) {
            const Tensor *t = &gpt.model.tensors[i];
            double *wanted = reference_tensor(&f, "grad/", t->name, t->elements);
            worst_add(&gradient,
                      reference_error(gpt.grad + gpt.offset[i], wanted, t->elements,
                                      reference_floor(norms[0], reference_norm(wanted, t->elements), t->elements, gpt.elements, REFERENCE_DOUBLE)),
                      t->name);
            free(wanted);
        }
        if (step == 0) {
            double *wanted = reference_tensor(&f, "", "logits", batch.tokens * config.vocab);
            worst_add(&logits, reference_error(gpt.logits, wanted, batch.tokens * config.vocab, 0.0), "logits");
            free(wanted);
        }
        worst_add(&norm, reference_difference(naive_update(&gpt, &optimizer), norms[step]), name);
    }
    batch = reference_batch(&f, 0);
    naive_forward(&gpt, &batch);
    double *wanted = reference_tensor(&f, "", "logits_after", batch.tokens * config.vocab);
    worst_add(&after, reference_error(gpt.logits, wanted, batch.tokens * config.vocab, 0.0), "logits");
    free(wanted);
    const char *fixture = reference_fixtures[index];
    report(logits, bound, "%s: logits", fixture);
    report(gradient, bound, "%s: gradients, worst %s", fixture, gradient.name);
    report(loss, scalar_bound, "%s: losses of %d steps, worst %s", fixture, (int)steps, loss.name);
    report(norm, scalar_bound, "%s: gradient norms, worst %s", fixture, norm.name);
    report(after, bound, "%s: logits after the updates", fixture);
    naive_free(&gpt);
    fixture_close(&f);
}

// Two directions per tensor: random signs of length 1. A wrong gradient differs from the difference quotient by about its error / sqrt(n).
static void test_differences(void) {
    enum { CONFIGURATIONS = 40, DIRECTIONS = 2 };
    const double bound = 1e-6, h = 1e-4;
    Worst worst = {0};
    int64_t quotients = 0;
    for (int index = 0; index < CONFIGURATIONS; index++) {
        Draw draw = draw_create(1, (uint64_t)index);
        ModelConfig config = reference_random_config(&draw, 2);
        config.channels = min_i64(config.channels, 20); // finite differences run the model often
        config.layers = min_i64(config.layers, 2);
        const int64_t B = draw_between(&draw, 1, 2, 1), T = min_i64(config.max_seq, draw_between(&draw, 1, 8, 1));
        RandomBatch random = reference_random_batch(&draw, &config, B, T, draw_between(&draw, 0, 1, 1) == 1, 0);
        NaiveGpt gpt = naive_create(&config, B * T);
        for (int i = 0; i < gpt.model.count; i++) {
            for (int64_t e = 0; e < gpt.model.tensors[i].elements; e++) {
                gpt.param[gpt.offset[i] + e] = reference_random_value(&gpt.model.tensors[i], draw.key, e);
            }
        }
        naive_forward(&gpt, &random.batch);
        naive_backward(&gpt, &random.batch, 1.0);
        const double global = reference_norm(gpt.grad, gpt.elements);
        for (int i = 0; i < gpt.model.count; i++) {
            const Tensor *t = &gpt.model.tensors[i];
            double *param = gpt.param + gpt.offset[i], *grad = gpt.grad + gpt.offset[i];
            double *saved = base_new((size_t)t->elements, sizeof *saved), *direction = base_new((size_t)t->elements, sizeof *direction);
            memcpy(saved, param, (size_t)t->elements * sizeof *saved);
            for (int d = 0; d < DIRECTIONS; d++, quotients++) {
                double slope = 0.0, loss[2];
                for (int64_t e = 0; e < t->elements; e++) {
                    direction[e] = (philox(draw.key, (uint64_t)e, (uint64_t)(1000 * i + d)).x[0] & 1 ? 1.0 : -1.0) / sqrt((double)t->elements);
                    slope += direction[e] * grad[e];
                }
                for (int side = 0; side < 2; side++) {
                    for (int64_t e = 0; e < t->elements; e++) param[e] = saved[e] + (side ? h : -h) * direction[e];
                    loss[side] = naive_forward(&gpt, &random.batch);
                }
                memcpy(param, saved, (size_t)t->elements * sizeof *saved);
                const double quotient = (loss[1] - loss[0]) / (2 * h);
                const double size = reference_norm(grad, t->elements);
                const double scale = fmax(size, reference_floor(global, size, t->elements, gpt.elements, REFERENCE_DOUBLE));
                const double error = fabs(quotient - slope) * sqrt((double)t->elements) / scale;
                char name[80], layout[140];
                reference_describe(&config, layout, sizeof layout);
                snprintf(name, sizeof name, "%s of %d", t->name, index);
                worst_add(&worst, isfinite(error) ? error : INFINITY, name);
                if (!(error <= bound)) printf("      %s: quotient %.9g, gradient %.9g (%s)\n", name, quotient, slope, layout);
            }
            free(saved);
            free(direction);
        }
        naive_free(&gpt);
        reference_random_batch_free(&random);
    }
    report(worst, bound, "%d configurations, %d quotients, worst %s", CONFIGURATIONS, (int)quotients, worst.name);
}

int main(void) {
    for (int i = 0; i < REFERENCE_FIXTURES; i++) test_fixture(i);
    test_differences();
    return test_end();
}
