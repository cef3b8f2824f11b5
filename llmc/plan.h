// plan.h: what a run will need and do, before it is started: memory by category, communication, counts, time, warnings, for any number of ranks.
// Pure: it is given flags and sizes and prints; it allocates nothing of the run's and asks the system only for its memory size.
// plan_layout.h knows what a rank holds, plan_comm.h what it sends.
#ifndef LLMC_PLAN_H
#define LLMC_PLAN_H

#include "llmc/base.h"        // Error, fail, size_multiply
#include "llmc/model.h"       // Model, model_flops_per_token
#include "llmc/plan_comm.h"   // PlanComm, plan_comm
#include "llmc/plan_layout.h" // PlanMemory, plan_memory
#include <math.h>             // fmax

enum { PLAN_ROWS = 24, PLAN_COLUMNS = 4, PLAN_WARNINGS = 12, PLAN_WARNING_BYTES = 256 };

typedef struct {
    const char *name;
    bool host; // host memory, also where the device has its own
    size_t bytes[PLAN_COLUMNS];
} PlanRow;

// A rank of a pipeline stage.
typedef struct {
    int stage;
    PlanComm comm;
} PlanColumn;

typedef struct {
    const Model *model;
    // plan_create fills these from the flags
    int64_t seq, micro_batch, global_batch; // T; B; sequences per optimizer step
    int64_t steps, warmup;
    double lr;
    Mesh mesh;
    bool sp;
    int zero, shards, replicas;
    ScheduleShape schedule;           // of a step
    char stages[128];                 // layers of each, as text
    PlanColumn columns[PLAN_COLUMNS]; // every stage; of more than PLAN_COLUMNS the first, the largest of those between, and the last
    int column_count;
    PlanRow rows[PLAN_ROWS];
    int row_count;
    // the caller knows these
    int local_ranks;       // that share this machine; 0 = the ranks are elsewhere
    int64_t train_tokens;  // in the training files; 0 = no data given
    int64_t train_samples; // sequences in an epoch; 0 = no data given
    double rate_flops;     // FLOP/s of a large matrix product on this machine; 0 = not measured
    double machine_bytes;  // memory of this machine; 0 = unknown
    double device_bytes;   // free memory of this rank's device; 0 = unknown
    bool device_memory;    // the device has memory of its own
} PlanInput;

typedef struct {
    int64_t parameters, non_embedding; // non-embedding: without token and position tables and an untied head
    int64_t tokens_per_step;
    double total_tokens, tokens_per_parameter;
    double steps_per_epoch, epochs; // 0 without data
    double flops_per_token, total_flops;
    double bubble;         // share of a step in which a stage has nothing to do
    size_t total_bytes;    // of the largest rank
    double machine_needed; // bytes of this machine's memory for all its ranks
    size_t device_needed;  // bytes of a device's own memory
} PlanFacts;

static inline size_t plan_column_bytes(const PlanInput *plan, int column) {
    size_t total = 0;
    for (int i = 0; i < plan->row_count; i++) total += plan->rows[i].bytes[column]; // whoever added a row has checked the sum
    return total;
}

// Of that, host memory.
static inline size_t plan_column_host_bytes_(const PlanInput *plan, int column) {
    size_t total = 0;
    for (int i = 0; i < plan->row_count; i++) total += plan->rows[i].host || !plan->device_memory ? plan->rows[i].bytes[column] : 0;
    return total;
}

// Adds a category of `count` elements of `element_bytes` of host memory to every rank; an absurd size is an error, not a wrapped number.
static inline bool plan_add(PlanInput *plan, const char *name, size_t count, size_t element_bytes, Error *error) {
    size_t bytes, total;
    PlanRow row = {.name = name, .host = true};
    for (int c = 0; c < PLAN_COLUMNS; c++) {
        if (!size_multiply(count, element_bytes, &bytes) || !size_add(plan_column_bytes(plan, c), bytes, &total) || total > SIZE_MAX / 2) {
            return fail(error, CODE_USAGE, "%s: %zu x %zu bytes are more than any machine holds (smaller --micro-batch, --seq or model)", name,
                        count, element_bytes);
        }
        row.bytes[c] = bytes;
    }
    if (plan->row_count == PLAN_ROWS) return fail(error, CODE_USAGE, "%s: the plan holds only %d categories", name, (int)PLAN_ROWS);
    plan->rows[plan->row_count++] = row;
    return true;
}

// ----------------------------------------------------------------------------
// The plan of a layout

// "8 8 7", or for many stages "30 x 4, 6".
static inline void plan_stages_text_(const Layout *layout, char *text, size_t room) {
    size_t at = 0;
    const int P = layout->mesh.pp;
    for (int s = 0, run; s < P && at < room; s += run) {
        const Layout view = plan_layout_at(layout, s);
        const int64_t blocks = plan_blocks(&view);
        run = 1;
        for (; P > 12 && s + run < P; run++) {
            const Layout next = plan_layout_at(layout, s + run);
            if (plan_blocks(&next) != blocks) break;
        }
        if (run > 1) at += (size_t)snprintf(text + at, room - at, "%s%d x ", s ? ", " : "", run);
        if (at < room) at += (size_t)snprintf(text + at, room - at, "%s%lld", run > 1 || s == 0 ? "" : P > 12 ? ", " : " ", (long long)blocks);
    }
}

// Do neighbouring stages between the first and the last hold as many blocks, in chunks as large?
static inline bool plan_alike_(const Layout *layout, int stage, int other) {
    if (other < 1 || other > layout->mesh.pp - 2) return false;
    const Layout a = plan_layout_at(layout, stage), b = plan_layout_at(layout, other);
    return plan_blocks(&a) == plan_blocks(&b) && layout_slot_layers(&a) == layout_slot_layers(&b);
}

// Adds the memory of a stage as a column.
static inline bool plan_column_(PlanInput *plan, const Layout *layout, const ZeroConfig *config, int stage, int column, Error *error) {
    PlanMemory memory;
    size_t total;
    const Layout view = plan_layout_at(layout, stage);
    if (!plan_memory(&memory, plan->model, &view, config, plan->micro_batch, plan->seq, &plan->schedule, plan->device_memory, error)) return false;
    plan->columns[column] = (PlanColumn){stage, plan_comm(plan->model, &view, config, plan->micro_batch, plan->seq, &plan->schedule)};
    for (int i = 0; i < PLAN_CATEGORIES; i++) {
        plan->rows[i].name = plan_category_names[i], plan->rows[i].bytes[column] = memory.bytes[i];
        plan->rows[i].host = plan_category_on_host((PlanCategory)i);
    }
    return plan_memory_total(&memory, &total, error);
}

// The stage between the first and the last whose rank holds most. In a run of stages that hold alike, activation slots grow or shrink from
// end to end: only ends can be the largest, so that thousands of stages are as soon planned as three.
static inline bool plan_middle_(const PlanInput *plan, const Layout *layout, const ZeroConfig *config, int *middle, Error *error) {
    size_t largest = 0;
    *middle = 1;
    for (int s = 1; s < layout->mesh.pp - 1; s++) {
        PlanMemory memory;
        size_t total;
        if (plan_alike_(layout, s, s - 1) && plan_alike_(layout, s, s + 1)) continue;
        const Layout view = plan_layout_at(layout, s);
        if (!plan_memory(&memory, plan->model, &view, config, plan->micro_batch, plan->seq, &plan->schedule, plan->device_memory, error) ||
            !plan_memory_total(&memory, &total, error)) {
            return false;
        }
        if (total > largest) largest = total, *middle = s;
    }
    return true;
}

static inline bool plan_columns_(PlanInput *plan, const Layout *layout, const ZeroConfig *config, Error *error) {
    const int P = layout->mesh.pp;
    int middle = 1;
    plan->column_count = P <= PLAN_COLUMNS ? P : 3;
    if (P > PLAN_COLUMNS && !plan_middle_(plan, layout, config, &middle, error)) return false;
    for (int c = 0; c < plan->column_count; c++) {
        const int stage = P <= PLAN_COLUMNS || c == 0 ? c : c == 1 ? middle : P - 1;
        if (!plan_column_(plan, layout, config, stage, c, error)) return false;
    }
    for (int i = 0; i < PLAN_CATEGORIES; i++) { // what no rank has is left out
        bool any = false;
        for (int c = 0; c < plan->column_count; c++) any = any || plan->rows[i].bytes[c] > 0;
        if (any) plan->rows[plan->row_count++] = plan->rows[i];
    }
    return true;
}

// What follows from the flags, for `world` ranks, or false with the flag that makes it impossible. The caller adds what it knows of data and
// machine.
static inline bool plan_create(PlanInput *plan, const Model *model, const Options *o, int world, Error *error) {
    *plan = (PlanInput){.model = model, .seq = o->seq, .micro_batch = o->micro_batch, .steps = o->steps, .warmup = o->warmup, .lr = o->lr};
    Layout layout;
    Mesh mesh;
    // The last rank of the first tensor-parallel group: see plan_layout.h. A bad --tp is told by layout_create.
    const int rank = mesh_create(world, 0, (int)o->tp, 1, (int)o->pp, 1, &mesh, &(Error){0}) ? mesh.tp - 1 : 0;
    if (!layout_create(&layout, &model->config, o, world, rank, error)) return false;
    plan->local_ranks = world == 1 ? 1 : 0;
    plan->device_memory = o->device != DEVICE_CPU;
    plan->global_batch = layout_global_batch(&layout, o);
    plan->mesh = layout.mesh, plan->sp = layout.sp;
    plan->zero = layout.zero, plan->shards = layout.shards, plan->replicas = layout.replicas;
    plan_stages_text_(&layout, plan->stages, sizeof plan->stages);
    const ZeroConfig config = zero_config(o);
    const bool good = layout_schedule(&layout, o, &plan->schedule, error) && plan_columns_(plan, &layout, &config, error);
    layout_free(&layout);
    return good;
}

// Idle share of a pipeline by formula (schedule.h), with forward and both parts of backward equally long.
static inline double plan_bubble(const ScheduleShape *shape) {
    const double P = shape->stages, work = (double)shape->microbatches * shape->chunks;
    if (shape->kind == SCHEDULE_ZB && shape->microbatches >= shape->stages) return (P - 1) / (3 * work + P - 1);
    return (P - 1) / (work + P - 1);
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
    for (int c = 0; c < (int)max_i64(plan->column_count, 1); c++) {
        const size_t bytes = plan_column_bytes(plan, c), host = plan_column_host_bytes_(plan, c);
        if (bytes > f.total_bytes) f.total_bytes = bytes;
        if (bytes - host > f.device_needed) f.device_needed = bytes - host;
        f.machine_needed = fmax(f.machine_needed, (double)host * plan->local_ranks);
    }
    f.bubble = plan->schedule.stages > 1 ? plan_bubble(&plan->schedule) : 0;
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

// One line on what this machine's ranks need and have.
static inline const char *plan_memory_text_(const PlanInput *plan, const PlanFacts *facts, char text[PLAN_WARNING_BYTES]) {
    char need[32], have[32], ranks[40] = "this run needs";
    if (plan->local_ranks > 1) snprintf(ranks, sizeof ranks, "the %d ranks here need", plan->local_ranks);
    snprintf(text, PLAN_WARNING_BYTES, "memory: %s %s, this machine has %s: a smaller --micro-batch, --seq or model, %s--precision bf16", ranks,
             plan_bytes_text(facts->machine_needed, need), plan_bytes_text(plan->machine_bytes, have),
             plan->mesh.dp > 1 && plan->zero < 3 ? "a higher --zero, or " : "or ");
    return text;
}

// Refuses a run that this machine cannot hold, before it allocates.
static inline bool plan_fits(const PlanInput *plan, Error *error) {
    const PlanFacts facts = plan_facts(plan);
    char text[PLAN_WARNING_BYTES], need[32], have[32];
    if (plan->device_bytes > 0 && (double)facts.device_needed > plan->device_bytes) {
        return fail(error, CODE_USAGE,
                    "memory: this run needs %s on a device, where %s are free: a smaller --micro-batch, --seq or model, %s--precision bf16",
                    plan_bytes_text((double)facts.device_needed, need), plan_bytes_text(plan->device_bytes, have),
                    plan->mesh.dp > 1 && plan->zero < 3 ? "a higher --zero, or " : "or ");
    }
    if (plan->machine_bytes == 0 || facts.machine_needed <= plan->machine_bytes) return true;
    return fail(error, CODE_USAGE, "%s", plan_memory_text_(plan, &facts, text));
}

// Things that are allowed but seldom meant. Returns how many lines it wrote.
static inline int plan_warnings(const PlanInput *plan, const PlanFacts *facts, char lines[PLAN_WARNINGS][PLAN_WARNING_BYTES]) {
    const ModelConfig *m = &plan->model->config;
    char a[32], b[32], text[PLAN_WARNING_BYTES];
    int count = 0;
#define WARN(condition, ...)                                                                                                                       \
    if (condition) snprintf(lines[count++], PLAN_WARNING_BYTES, __VA_ARGS__)
    WARN(plan->machine_bytes > 0 && facts->machine_needed > plan->machine_bytes, "%s", plan_memory_text_(plan, facts, text));
    WARN(facts->bubble > 0.5, "--pp: stages are idle %.0f%% of a step of %d micro-batches (a larger --global-batch, or a smaller --micro-batch)",
         100 * facts->bubble, plan->schedule.microbatches);
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

static inline void plan_print_layout_(FILE *file, const PlanInput *plan, const PlanFacts *f) {
    const Mesh *m = &plan->mesh;
    const ScheduleShape *s = &plan->schedule;
    fprintf(file, "layout       %d ranks = tp %d%s x pp %d x dp %d; zero %d", m->world, m->tp, plan->sp ? " (and sequence)" : "", m->pp, m->dp,
            plan->zero);
    if (plan->zero > 0) fprintf(file, " over %d rank%s", plan->shards, plan->shards == 1 ? "" : "s");
    if (plan->zero > 0 && plan->replicas > 1) fprintf(file, ", %d replicas of those", plan->replicas);
    if (m->pp > 1) fprintf(file, "\nstages       %s layers", plan->stages);
    if (s->chunks > 1) fprintf(file, ", in %d chunks each", s->chunks);
    fprintf(file, "\nschedule     %d micro-batch%s of %lld sequence%s a step for each rank", s->microbatches, s->microbatches == 1 ? "" : "es",
            (long long)plan->micro_batch, plan->micro_batch == 1 ? "" : "s");
    if (m->pp > 1) fprintf(file, ", %s: idle %.1f%%", schedule_kind_names[s->kind], 100 * f->bubble);
    fputc('\n', file);
}

// The names of the columns that follow, where there are several.
static inline void plan_print_head_(FILE *file, const PlanInput *plan, const char *title) {
    fprintf(file, plan->column_count > 1 ? "%-38s" : "%s", title);
    for (int c = 0; c < plan->column_count && plan->column_count > 1; c++) fprintf(file, "      stage %4d", plan->columns[c].stage);
    fputc('\n', file);
}

static inline void plan_print_memory_(FILE *file, const PlanInput *plan, const PlanFacts *f) {
    char a[32], b[32];
    const bool table = plan->column_count > 1;
    plan_print_head_(file, plan, plan->mesh.world > 1 ? "memory of a rank" : "memory");
    for (int i = 0; i <= plan->row_count; i++) {
        const bool total = i == plan->row_count;
        fprintf(file, table ? "  %-36s" : "  %-24s", total ? "total" : plan->rows[i].name);
        for (int c = 0; c < plan->column_count || c == 0; c++) {
            const size_t bytes = total ? plan_column_bytes(plan, c) : plan->rows[i].bytes[c];
            fprintf(file, table ? " %15s" : " %12s", plan_bytes_text((double)bytes, a));
            if (!table) fprintf(file, " %20zu bytes", bytes);
        }
        if (!total) fputc('\n', file);
    }
    if (plan->device_memory) fprintf(file, "\n  on the device %s", plan_bytes_text((double)f->device_needed, a));
    if (plan->device_memory && plan->local_ranks == 1) fprintf(file, "\n  in host memory %s", plan_bytes_text(f->machine_needed, a));
    if (plan->local_ranks > 1) {
        fprintf(file, "\n  %d ranks of this machine, the largest of all counted: %s", plan->local_ranks, plan_bytes_text(f->machine_needed, a));
    }
    if (plan->local_ranks > 0 && plan->machine_bytes > 0) fprintf(file, " (this machine: %s)", plan_bytes_text(plan->machine_bytes, b));
    fputc('\n', file);
}

static inline void plan_print_comm_(FILE *file, const PlanInput *plan) {
    char a[32], name[64];
    plan_print_head_(file, plan, "communication of a rank and step");
    for (int p = 0; p < PLAN_COMM_PURPOSES; p++) {
        for (int k = 0; k < COMM_KINDS; k++) {
            bool any = false;
            for (int c = 0; c < plan->column_count; c++) any = any || plan->columns[c].comm.bytes[p][k] > 0;
            if (!any) continue;
            snprintf(name, sizeof name, "%s, %s", plan_purpose_names[p], comm_kind_names[k]);
            fprintf(file, "  %-36s", name);
            for (int c = 0; c < plan->column_count; c++) fprintf(file, " %15s", plan_bytes_text(plan->columns[c].comm.bytes[p][k], a));
            fputc('\n', file);
        }
    }
    fprintf(file, "  %-36s", "it sends, in all");
    for (int c = 0; c < plan->column_count; c++) fprintf(file, " %15s", plan_bytes_text(plan_comm_sent(&plan->columns[c].comm), a));
    fputc('\n', file);
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
    fputc('\n', file);
    if (plan->mesh.world > 1) plan_print_layout_(file, plan, &f);
    plan_print_memory_(file, plan, &f);
    if (plan->mesh.world > 1) plan_print_comm_(file, plan);
    char lines[PLAN_WARNINGS][PLAN_WARNING_BYTES];
    const int warnings = plan_warnings(plan, &f, lines);
    for (int i = 0; i < warnings; i++) fprintf(file, "warning: %s\n", lines[i]);
}

#endif
