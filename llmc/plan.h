// plan.h: what a run will need and do, before it is started: memory by category, counts, time, warnings. Pure: it is given
// sizes and prints; it allocates nothing and asks the system only for its memory size.
#ifndef LLMC_PLAN_H
#define LLMC_PLAN_H

#include "llmc/activations.h" // activations_layout
#include "llmc/base.h"        // Error, fail, size_multiply
#include "llmc/model.h"       // Model, model_flops_per_token
#include "llmc/zero.h"        // zero_bytes

enum { PLAN_ROWS = 24, PLAN_WARNINGS = 12, PLAN_WARNING_BYTES = 256 };

typedef struct {
    const char *name;
    size_t bytes;
} PlanRow;

typedef struct {
    const Model *model;
    int64_t seq, micro_batch, global_batch; // T; B; sequences per optimizer step
    int64_t steps, warmup;
    double lr;
    int64_t train_tokens;  // in the training files; 0 = no data given
    int64_t train_samples; // sequences in an epoch; 0 = no data given
    double rate_flops;     // FLOP/s of a large matrix product on this machine; 0 = not measured
    double machine_bytes;  // memory of this machine; 0 = unknown
    PlanRow rows[PLAN_ROWS];
    int row_count;
} PlanInput;

typedef struct {
    int64_t parameters, non_embedding; // non-embedding: without token and position tables and an untied head
    int64_t tokens_per_step;
    double total_tokens, tokens_per_parameter;
    double steps_per_epoch, epochs; // 0 without data
    double flops_per_token, total_flops;
    size_t total_bytes;
} PlanFacts;

// Adds a category of `count` elements of `element_bytes`; an absurd size is an error, not a wrapped number.
static inline bool plan_add(PlanInput *plan, const char *name, size_t count, size_t element_bytes, Error *error) {
    size_t bytes, total = 0;
    bool fits = size_multiply(count, element_bytes, &bytes);
    for (int i = 0; i < plan->row_count && fits; i++) fits = size_add(total, plan->rows[i].bytes, &total);
    if (!fits || !size_add(total, bytes, &total) || total > SIZE_MAX / 2) {
        return fail(error, CODE_USAGE, "%s: %zu x %zu bytes are more than any machine holds (smaller --micro-batch, --seq or model)", name, count,
                    element_bytes);
    }
    if (plan->row_count == PLAN_ROWS) return fail(error, CODE_USAGE, "%s: the plan holds only %d categories", name, (int)PLAN_ROWS);
    plan->rows[plan->row_count++] = (PlanRow){name, bytes};
    return true;
}

// The categories that follow from the tensor table.
static inline bool plan_add_model(PlanInput *plan, const Layout *l, const ZeroConfig *z, Error *error) {
    const ZeroBytes bytes = zero_bytes(plan->model, l, z);
    return plan_add(plan, "parameters", bytes.param_bytes, 1, error) &&
           (bytes.master_bytes == 0 || plan_add(plan, "master weights", bytes.master_bytes, 1, error)) &&
           plan_add(plan, "gradients", bytes.grad_bytes, 1, error) && plan_add(plan, "optimizer state", bytes.optim_bytes, 1, error);
}

// The activation arena, sized by the function that lays it out. Its 64-bit sums are bounded here first: flags alone can ask for 2^70 bytes.
static inline bool plan_add_activations(PlanInput *plan, const Layout *l, const ActivationShape *as, Error *error) {
    const ModelConfig *m = &plan->model->config;
    const double widths =
        8.0 * (double)m->channels + 3.0 * (double)(model_qkv_width(m) + model_q_width(m) + model_mlp_in_width(m) + m->ffn + m->heads) + 16;
    const double bound_bytes = 4 * (double)plan->micro_batch * (double)plan->seq * (double)(m->layers + 4) * (widths + (double)m->head_size);
    if (bound_bytes > 0x1p62) {
        return fail(error, CODE_USAGE, "--micro-batch, --seq: activations of %lld x %lld tokens are more than any machine holds",
                    (long long)plan->micro_batch, (long long)plan->seq);
    }
    Activations a;
    (void)activations_layout(&a, NULL, l, as);
    return plan_add(plan, "activations", a.kept_bytes, 1, error) && plan_add(plan, "logits of a chunk", a.head_bytes, 1, error) &&
           plan_add(plan, "scratch and batch", a.scratch_bytes, 1, error);
}

static inline PlanFacts plan_facts(const PlanInput *plan) {
    PlanFacts f = {.parameters = model_parameters(plan->model)};
    f.non_embedding = f.parameters;
    for (int i = 0; i < plan->model->count; i++) {
        const Tensor *t = &plan->model->tensors[i];
        if (t->kind == TENSOR_WTE || t->kind == TENSOR_WPE || t->kind == TENSOR_HEAD) f.non_embedding -= t->elements;
    }
    f.tokens_per_step = plan->global_batch * plan->seq;
    f.total_tokens = (double)f.tokens_per_step * (double)plan->steps; // double: the product may pass 2^63
    f.tokens_per_parameter = f.total_tokens / (double)f.parameters;
    f.steps_per_epoch = (double)plan->train_samples / (double)plan->global_batch;
    f.epochs = f.steps_per_epoch > 0 ? (double)plan->steps / f.steps_per_epoch : 0;
    f.flops_per_token = model_flops_per_token(plan->model, plan->seq);
    f.total_flops = f.flops_per_token * f.total_tokens;
    for (int i = 0; i < plan->row_count; i++) f.total_bytes += plan->rows[i].bytes; // plan_add checked the sum
    return f;
}

// 1536 -> "1.50 KiB"; 1e12 -> "1.00 T".
static inline const char *plan_bytes_text(double bytes, char text[32]) {
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    int unit = 0;
    while (bytes >= 1024 && unit < 6) bytes /= 1024, unit++;
    snprintf(text, 32, unit ? "%.2f %s" : "%.0f %s", bytes, units[unit]);
    return text;
}
static inline const char *plan_count_text(double count, char text[32]) {
    static const char *const units[] = {"", " K", " M", " G", " T", " P", " E", " Z"};
    int unit = 0;
    while (count >= 1000 && unit < 7) count /= 1000, unit++;
    snprintf(text, 32, unit ? "%.2f%s" : "%.0f%s", count, units[unit]);
    return text;
}

// Memory that this process can have: the machine's, or less where a container limits it; 0 when unknown.
static inline double plan_machine_bytes(void) {
    const long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    double bytes = pages > 0 && page_bytes > 0 ? (double)pages * (double)page_bytes : 0;
    FILE *file = fopen("/sys/fs/cgroup/memory.max", "r"); // holds a number or "max"
    double limit = 0;
    if (file != NULL) {
        if (fscanf(file, "%lf", &limit) == 1 && limit > 0 && (bytes == 0 || limit < bytes)) bytes = limit;
        fclose(file);
    }
    return bytes;
}

// Refuses a run that this machine cannot hold, before it allocates.
static inline bool plan_fits(const PlanInput *plan, Error *error) {
    const PlanFacts facts = plan_facts(plan);
    char need[32], have[32];
    if (plan->machine_bytes == 0 || (double)facts.total_bytes <= plan->machine_bytes) return true;
    return fail(error, CODE_USAGE, "memory: this run needs %s, this machine has %s: a smaller --micro-batch, --seq or model, or --precision bf16",
                plan_bytes_text((double)facts.total_bytes, need), plan_bytes_text(plan->machine_bytes, have));
}

// Things that are allowed but seldom meant. Returns how many lines it wrote.
static inline int plan_warnings(const PlanInput *plan, const PlanFacts *facts, char lines[PLAN_WARNINGS][PLAN_WARNING_BYTES]) {
    const ModelConfig *m = &plan->model->config;
    char a[32], b[32];
    int count = 0;
#define WARN(condition, ...)                                                                                                                       \
    if (condition) snprintf(lines[count++], PLAN_WARNING_BYTES, __VA_ARGS__)
    WARN(plan->machine_bytes > 0 && (double)facts->total_bytes > plan->machine_bytes,
         "memory: this run needs %s, this machine has %s: a smaller --micro-batch, --seq or model, or --precision bf16",
         plan_bytes_text((double)facts->total_bytes, a), plan_bytes_text(plan->machine_bytes, b));
    WARN(plan->train_samples > 0 && facts->steps_per_epoch < 1, "--global-batch: %lld sequences are more than the %lld of an epoch",
         (long long)plan->global_batch, (long long)plan->train_samples);
    // Muennighoff et al. 2023, "Scaling data-constrained language models": up to about 4 epochs are nearly as good as new data.
    WARN(facts->epochs > 4, "data: every token is seen %.1f times; beyond about 4 epochs little is gained (watch the validation loss)",
         facts->epochs);
    WARN(plan->steps > 0 && facts->total_tokens < (double)facts->parameters,
         "data: %s tokens for %s parameters; compute-optimal is about 20 tokens per parameter (Hoffmann et al. 2022)",
         plan_count_text(facts->total_tokens, a), plan_count_text((double)facts->parameters, b));
    // Peak rates of published runs lie near 0.5/C (GPT-3: 6e-4 at C = 768, 0.6e-4 at 12288).
    WARN(plan->lr * (double)m->channels > 3, "--lr: %g is unusually high for %lld channels (published runs use about %.1g)", plan->lr,
         (long long)m->channels, 0.5 / (double)m->channels);
    WARN(plan->steps > 0 && plan->warmup >= plan->steps, "--warmup: %lld steps of %lld in all: the peak rate is never reached",
         (long long)plan->warmup, (long long)plan->steps);
    WARN(m->position == POSITION_LEARNED && m->max_seq > plan->seq,
         "--seq: positions %lld to %lld of the model stay untrained at %lld tokens a sequence", (long long)plan->seq, (long long)m->max_seq - 1,
         (long long)plan->seq);
#undef WARN
    return count;
}

static inline void plan_print(FILE *file, const PlanInput *plan) {
    const PlanFacts f = plan_facts(plan);
    const ModelConfig *m = &plan->model->config;
    char a[32], b[32];
    fprintf(file, "model        %lld layers, %lld channels, %lld heads (%lld key/value) of %lld, ffn %lld, vocabulary %lld\n", (long long)m->layers,
            (long long)m->channels, (long long)m->heads, (long long)m->kv_heads, (long long)m->head_size, (long long)m->ffn, (long long)m->vocab);
    fprintf(file, "parameters   %lld (%lld without embedding tables and head) in %d tensors\n", (long long)f.parameters, (long long)f.non_embedding,
            plan->model->count);
    fprintf(file, "step         %lld tokens = %lld sequences of %lld, %lld at once\n", (long long)f.tokens_per_step, (long long)plan->global_batch,
            (long long)plan->seq, (long long)plan->micro_batch);
    if (plan->train_samples > 0) {
        fprintf(file, "epoch        %s tokens, %lld sequences, %.2f steps\n", plan_count_text((double)plan->train_tokens, a),
                (long long)plan->train_samples, f.steps_per_epoch);
    }
    fprintf(file, "run          %lld steps, %s tokens, %.3g per parameter", (long long)plan->steps, plan_count_text(f.total_tokens, a),
            f.tokens_per_parameter);
    if (plan->train_samples > 0) fprintf(file, ", %.2f epochs", f.epochs);
    fprintf(file, "\ncompute      %sFLOP per token, %sFLOP in total", plan_count_text(f.flops_per_token, a), plan_count_text(f.total_flops, b));
    if (plan->rate_flops > 0) {
        fprintf(file, "; at least %.3g hours at the %sFLOP/s of this machine's matrix product", f.total_flops / plan->rate_flops / 3600,
                plan_count_text(plan->rate_flops, a));
    }
    fprintf(file, "\nmemory\n");
    for (int i = 0; i < plan->row_count; i++) {
        fprintf(file, "  %-24s %12s %20zu bytes\n", plan->rows[i].name, plan_bytes_text((double)plan->rows[i].bytes, a), plan->rows[i].bytes);
    }
    fprintf(file, "  %-24s %12s %20zu bytes", "total", plan_bytes_text((double)f.total_bytes, a), f.total_bytes);
    if (plan->machine_bytes > 0) fprintf(file, " (this machine: %s)", plan_bytes_text(plan->machine_bytes, b));
    fputc('\n', file);
    char lines[PLAN_WARNINGS][PLAN_WARNING_BYTES];
    const int warnings = plan_warnings(plan, &f, lines);
    for (int i = 0; i < warnings; i++) fprintf(file, "warning: %s\n", lines[i]);
}

#endif
