// test_plan.c: the plan's numbers for published models, sizes beyond 2^31 and 2^64, and every warning; of many ranks: bytes per parameter, the
// memory of every rank of every small layout, schedules counted without their lists, gathers, communication, impossible layouts.
#include "dev/test/test.h" // check, test_end
#include "llmc/plan.h"     // what is tested

static Model preset_(const char *name) {
    const ModelConfig config = model_preset_config_(model_preset_find(name));
    return model_create(&config);
}

static PlanInput input_(const Model *model) {
    return (PlanInput){.model = model,
                       .seq = model->config.max_seq,
                       .micro_batch = 4,
                       .global_batch = 8,
                       .steps = 1000000,
                       .warmup = 100,
                       .lr = 3e-5,
                       .mesh = {.world = 1, .tp = 1, .pp = 1, .dp = 1},
                       .column_count = 1,
                       .local_ranks = 1};
}

// A case: flags, and what follows from them. They must be good flags; the layout may be impossible.
typedef struct {
    char words[64][64];
    Options options;
    Model model;
    PlanInput plan;
} Case;

static bool open_(Case *c, int world, const char *flags, Error *error) {
    char *argv[64] = {c->words[0]};
    int argc = 1;
    for (const char *at = flags; *at != '\0' && argc < 63; at += strspn(at, " ")) {
        const size_t length = strcspn(at, " ");
        snprintf(c->words[argc], sizeof c->words[argc], "%.*s", (int)length, at);
        argv[argc] = c->words[argc], argc++;
        at += length;
    }
    ModelConfig config;
    Error flaw = {0};
    const bool good = options_parse(&c->options, argc, argv, &flaw) && model_configure(&config, &c->options, 0, &flaw);
    check(good, "%s: %s", flags, flaw.text);
    c->model = good ? model_create(&config) : preset_("gpt-nano");
    return plan_create(&c->plan, &c->model, &c->options, world, error);
}
static void close_(Case *c) {
    model_free(&c->model);
    options_free(&c->options);
}

static size_t row_(const PlanInput *plan, PlanCategory category, int column) {
    for (int i = 0; i < plan->row_count; i++) {
        if (plan->rows[i].name == plan_category_names[category]) return plan->rows[i].bytes[column];
    }
    return 0;
}
// Parameters, master weights, gradients, optimizer state.
static size_t state_(const PlanInput *plan, int column) {
    size_t bytes = 0;
    for (int i = PLAN_PARAMETERS; i <= PLAN_OPTIMIZER; i++) bytes += row_(plan, (PlanCategory)i, column);
    return bytes;
}

static double relative_(size_t got, double wanted) { return fabs((double)got / wanted - 1); }

static void test_sizes(void) {
    static const struct {
        const char *name;
        int64_t parameters, non_embedding;
    } models[] = {{"gpt2-124m", 124439808, 85056000},
                  {"llama2-7b", 6738415616, 6738415616 - 2 * (int64_t)32000 * 4096},
                  {"llama2-70b", 68976648192, 68976648192 - 2 * (int64_t)32000 * 8192},
                  {"llama3-8b", 8030261248, 8030261248 - 2 * (int64_t)128256 * 4096},
                  {"llama3-405b", 405853388800, 405853388800 - 2 * (int64_t)128256 * 16384}};
    static Case c;
    char flags[256];
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        Error error = {0};
        snprintf(flags, sizeof flags, "--model %s --precision bf16", models[i].name);
        check(open_(&c, 1, flags, &error), "%s: %s", models[i].name, error.text);
        const PlanFacts f = plan_facts(&c.plan);
        check(f.parameters == models[i].parameters && f.non_embedding == models[i].non_embedding, "%s: %lld parameters, %lld without embeddings",
              models[i].name, (long long)f.parameters, (long long)f.non_embedding);
        check(c.plan.row_count == 7 && relative_(state_(&c.plan, 0), 18.0 * (double)f.parameters) < 1e-3,
              "%s: bf16 takes 18 bytes per parameter: %zu in %d rows", models[i].name, state_(&c.plan, 0), c.plan.row_count);
        close_(&c);
        snprintf(flags, sizeof flags, "--model %s", models[i].name);
        check(open_(&c, 1, flags, &error) && c.plan.row_count == 6 && row_(&c.plan, PLAN_MASTER, 0) == 0, "%s: fp32 has no master weights",
              models[i].name);
        check(relative_(state_(&c.plan, 0), 16.0 * (double)f.parameters) < 1e-3, "%s: fp32 takes 16 bytes per parameter", models[i].name);
        close_(&c);
    }
    // B*T*V passes 2^31 and 2^32 elements; larger things are refused, not wrapped
    Model model = preset_("llama3-8b");
    PlanInput plan = input_(&model);
    Error error = {0};
    check(plan_add(&plan, "logits", (size_t)4 * 8192 * 128256, 4, &error) && plan.rows[0].bytes[0] == 16810770432u, "B*T*V: %zu bytes",
          plan.rows[0].bytes[0]);
    check(!plan_add(&plan, "wide", (size_t)1 << 62, 4, &error) && error.code == CODE_USAGE && strstr(error.text, "wide") != NULL,
          "2^64 bytes: '%s'", error.text);
    error = (Error){0};
    check(plan_add(&plan, "half", ((size_t)1 << 62) - 1, 1, &error) && !plan_add(&plan, "sum", (size_t)1 << 62, 1, &error),
          "the sum is checked too");
    check(plan.row_count == 2, "refused categories are not added");
    PlanMemory memory = {{1, 2, 3, 4, 5, 6, 7, 8, 9}};
    size_t total = 0;
    error = (Error){0};
    check(plan_memory_total(&memory, &total, &error) && total == 45, "the sum of a rank: %zu", total);
    memory.bytes[PLAN_PARAMETERS] = SIZE_MAX / 2 - 10, memory.bytes[PLAN_MASTER] = SIZE_MAX - 5;
    check(!plan_memory_total(&memory, &total, &error) && strncmp(error.text, "master weights:", 15) == 0, "an absurd one: '%s'", error.text);
    // the bound that guards the arena's own sums lies above them: everything up to 2^62 is laid out without overflow
    for (int i = 0; i < MODEL_PRESET_COUNT; i++) {
        Model other = preset_(model_presets[i].name);
        for (int pipeline = 0; pipeline < 2; pipeline++) {
            Options options;
            options_defaults(&options);
            options.pp = pipeline ? 4 : 1, options.pp_schedule = SCHEDULE_GPIPE;
            for (int64_t tokens = 64; tokens <= (int64_t)1 << 50; tokens *= 2) {
                PlanInput big;
                options.micro_batch = max_i64(1, tokens >> 30), options.seq = tokens / options.micro_batch;
                options.global_batch = options.micro_batch * (pipeline ? 1000 : 1);
                error = (Error){0};
                if (!plan_create(&big, &other, &options, pipeline ? 4 : 1, &error)) {
                    check(error.code == CODE_USAGE && strncmp(error.text, "--micro-batch, --seq:", 21) == 0 && tokens > 1 << 24,
                          "%s: %lld tokens: '%s'", model_presets[i].name, (long long)tokens, error.text);
                    break;
                }
                const double residual = (double)tokens * (double)other.config.channels * 4 * 4 * (double)other.config.layers / (pipeline ? 4 : 1);
                check((double)row_(&big, PLAN_ACTIVATIONS, 0) > residual * (pipeline ? 990 : 1), "%s: %lld tokens take %zu bytes",
                      model_presets[i].name, (long long)tokens, row_(&big, PLAN_ACTIVATIONS, 0));
            }
            options_free(&options);
        }
        model_free(&other);
    }
    error = (Error){0};
    plan.row_count = 0;
    for (int i = 0; i < PLAN_ROWS; i++) check(plan_add(&plan, "row", 1, 1, &error), "row %d", i);
    error = (Error){0};
    check(!plan_add(&plan, "one more", 1, 1, &error), "more than %d categories are refused", (int)PLAN_ROWS);
    model_free(&model);
    printf("sizes: counts and bytes of 5 models, overflow refused\n");
}

static void test_facts(void) {
    Model model = preset_("gpt2-124m");
    PlanInput plan = input_(&model);
    plan.seq = 1024, plan.global_batch = 512, plan.steps = 19073, plan.train_samples = 1000000, plan.train_tokens = 1024000000;
    PlanFacts f = plan_facts(&plan);
    check(f.tokens_per_step == 524288 && f.total_tokens == 524288.0 * 19073, "tokens: %lld a step, %.0f", (long long)f.tokens_per_step,
          f.total_tokens);
    check(fabs(f.tokens_per_parameter - 80.36) < 0.01, "%.2f tokens per parameter", f.tokens_per_parameter);
    check(f.steps_per_epoch == 1953.125 && fabs(f.epochs - 9.7654) < 1e-3, "%.3f steps an epoch, %.3f epochs", f.steps_per_epoch, f.epochs);
    check(f.flops_per_token == model_flops_per_token(&model, 1024) && fabs(f.total_flops / 8e18 - 1) < 0.1, "%.3g FLOP",
          f.total_flops); // 80 tokens x 6 x 124M^2, about
    plan.global_batch = 1048576, plan.seq = 1073741824, plan.steps = 1000000000000;
    f = plan_facts(&plan);
    check(f.tokens_per_step == (int64_t)1 << 50 && f.total_tokens > 1e27 && isfinite(f.total_flops), "the largest flags: %.3g tokens",
          f.total_tokens);
    plan.train_samples = 0, plan.steps = 0;
    f = plan_facts(&plan);
    check(f.epochs == 0 && f.total_tokens == 0 && f.tokens_per_parameter == 0, "no data, no steps");
    model_free(&model);
    char text[32];
    check(strcmp(plan_bytes_text(1023, text), "1023 bytes") == 0 && strcmp(plan_bytes_text(1536, text), "1.50 KiB") == 0 &&
              strcmp(plan_bytes_text(18446744073709551615.0, text), "16.00 EiB") == 0 && strcmp(plan_count_text(999, text), "999") == 0 &&
              strcmp(plan_count_text(1.5e9, text), "1.50 G") == 0 && strcmp(plan_count_text(1e30, text), "1000000000.00 Z") == 0,
          "units");
    check(plan_machine_bytes() > 1e8, "this machine has %.3g bytes", plan_machine_bytes());
    printf("facts: tokens, epochs, FLOPs\n");
}

// Does a plan warn with a line that starts with `flag`? Other lines count too, so that a warning never comes unasked.
static void check_warning_(const PlanInput *plan, const char *flag) {
    char lines[PLAN_WARNINGS][PLAN_WARNING_BYTES];
    const PlanFacts facts = plan_facts(plan);
    const int count = plan_warnings(plan, &facts, lines);
    check(count == (flag != NULL) && (flag == NULL || strncmp(lines[0], flag, strlen(flag)) == 0), "wanted warning '%s', got %d: '%s'",
          flag ? flag : "none", count, count ? lines[0] : "");
}

static void test_warnings(void) {
    Model model = preset_("gpt2-124m");
    Error error = {0};
    PlanInput good = input_(&model);
    good.steps = 100000, good.lr = 6e-4, good.train_samples = 400000, good.train_tokens = 409600000, good.machine_bytes = 16e9;
    check(plan_add(&good, "parameters", 1991036928, 1, &error), "%s", error.text);
    check_warning_(&good, NULL);
    PlanInput plan = good;
    plan.machine_bytes = 1.9e9; // needs 1.99e9
    check_warning_(&plan, "memory");
    check(!plan_fits(&plan, &error) && error.code == CODE_USAGE && strstr(error.text, "needs 1.8") != NULL, "too large: '%s'", error.text);
    error = (Error){0};
    check(plan_fits(&good, &error), "fits: %s", error.text);
    plan.machine_bytes = 0;
    check(plan_fits(&plan, &error), "unknown memory holds everything");
    plan = good, plan.local_ranks = 8; // 15.93e9
    check(plan_fits(&plan, &error), "8 ranks fit: %s", error.text);
    check_warning_(&plan, NULL);
    plan.local_ranks = 9;
    check_warning_(&plan, "memory: the 9 ranks here need 16.69 GiB");
    check(!plan_fits(&plan, &error) && strstr(error.text, "9 ranks") != NULL, "9 do not: '%s'", error.text);
    error = (Error){0}, plan.local_ranks = 0;
    check(plan_fits(&plan, &error), "ranks elsewhere are not this machine's");
    check_warning_(&plan, NULL);
    plan = good, plan.schedule = (ScheduleShape){SCHEDULE_1F1B, 8, 7, 1};
    check_warning_(&plan, NULL);
    plan.schedule.microbatches = 6;
    check_warning_(&plan, "--pp: stages are idle 54% of a step of 6");
    plan = good, plan.train_samples = 7, plan.steps = 0;
    check_warning_(&plan, "--global-batch");
    plan = good, plan.train_samples = 190000;
    check_warning_(&plan, "data: every token");
    plan = good, plan.steps = 15000;
    check_warning_(&plan, "data: 122.88 M tokens");
    plan = good, plan.lr = 5e-3;
    check_warning_(&plan, "--lr");
    plan = good, plan.warmup = 100000;
    check_warning_(&plan, "--warmup");
    plan = good, plan.seq = 512, plan.steps = 200000, plan.train_samples = 800000;
    check_warning_(&plan, "--seq");
    // all at once fits into the lines
    plan.machine_bytes = 1, plan.train_samples = 1, plan.lr = 1000, plan.warmup = plan.steps = 2;
    char lines[PLAN_WARNINGS][PLAN_WARNING_BYTES];
    const PlanFacts facts = plan_facts(&plan);
    const int count = plan_warnings(&plan, &facts, lines);
    check(count == 7, "%d warnings at once", count);
    FILE *file = tmpfile();
    plan.rate_flops = 1e11;
    plan_print(file, &plan);
    rewind(file);
    char text[8192];
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    static const char *const wanted[] = {"parameters   124439808 (85056000 ",
                                         "4096 tokens = 8 sequences of 512, 4 at once",
                                         "  parameters",
                                         "  total ",
                                         "warning: memory",
                                         "warning: --lr: 1000",
                                         "this machine: 1 bytes",
                                         "at least"};
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) check(strstr(text, wanted[i]) != NULL, "'%s' is printed in\n%s", wanted[i], text);
    model_free(&model);
    printf("warnings: each alone, none for a sound run\n");
}

// ----------------------------------------------------------------------------
// Many ranks

// Bytes per parameter of a rank, by stage of ZeRO and number of ranks (Rajbhandari et al. 2020), gradients in fp32.
static void test_bytes_per_parameter(void) {
    static const char *const names[] = {"gpt2-124m", "gpt2-1558m", "llama2-7b", "llama3-405b"};
    static const struct {
        const char *precision;
        double whole[4], shared[4]; // + shared/N, of stages 0 to 3
    } rows[] = {{"bf16", {18, 6, 2, 0}, {0, 12, 16, 18}}, {"fp32", {16, 8, 4, 0}, {0, 8, 12, 16}}};
    static Case c;
    double worst = 0, worst_tp = 0;
    for (size_t n = 0; n < sizeof names / sizeof names[0]; n++) {
        for (int p = 0; p < 2; p++) {
            for (int zero = 0; zero < 4; zero++) {
                for (int ranks = 1; ranks <= 512; ranks *= 8) {
                    if (n == 0 && ranks > 64) continue; // padding is more than a percent of a small model's shards
                    char flags[256];
                    Error error = {0};
                    snprintf(flags, sizeof flags, "--model %s --precision %s --zero %d", names[n], rows[p].precision, zero);
                    check(open_(&c, ranks, flags, &error), "%s: %s", flags, error.text);
                    const double wanted = rows[p].whole[zero] + rows[p].shared[zero] / ranks;
                    worst = fmax(worst, relative_(state_(&c.plan, 0), wanted * (double)model_parameters(&c.model)));
                    close_(&c);
                    // a slice of a rank of tensor parallelism: an 8th, norms and the like apart
                    if (n < 2) continue;
                    snprintf(flags, sizeof flags, "--model %s --precision %s --zero %d --tp 8", names[n], rows[p].precision, zero);
                    check(open_(&c, ranks * 8, flags, &error), "%s: %s", flags, error.text);
                    worst_tp = fmax(worst_tp, relative_(state_(&c.plan, 0), wanted * (double)model_parameters(&c.model) / 8));
                    close_(&c);
                }
            }
        }
    }
    printf("bytes per parameter: bf16 18, 6+12/N, 2+16/N, 18/N; fp32 16, 8+8/N, 4+12/N, 16/N\n");
    check_error(worst, 0.01, "4 models, N = 1, 8, 64, 512");
    check_error(worst_tp, 0.01, "with tp 8");
}

// Elements of the model that a rank of this layout saves.
static int64_t saved_elements_(const Model *model, const Layout *layout) {
    Zero zero = {.model = model, .layout = layout};
    int64_t elements = 0;
    zero.offset = base_new((size_t)model->count, sizeof *zero.offset);
    zero.range = base_new((size_t)model->units, sizeof *zero.range);
    zero.part = base_new((size_t)model->count, sizeof *zero.part);
    zero.elements = zero_layout(model, layout, zero.offset, zero.range);
    for (int i = 0; i < model->count; i++) {
        zero.part[i] = layout_part(layout, &model->tensors[i]);
        const ZeroPiece piece = zero_piece(&zero, i);
        if (zero.part[i].counts && layout->replica == 0) elements += piece.to - piece.from;
    }
    free(zero.offset);
    free(zero.range);
    free(zero.part);
    return elements;
}

// The columns against what a rank would allocate: its arenas with the buffers that its schedule uses, for every rank of every layout.
static void test_every_rank(void) {
    static const char *const models[] = {"--layers 7 --channels 64 --heads 4 --ffn 256 --vocab 303 --seq 32",
                                         "--layers 6 --channels 64 --heads 8 --kv-heads 2 --ffn 192 --vocab 301 --seq 16 --norm rmsnorm --position "
                                         "rope --activation swiglu --bias off "
                                         "--tied off --qk-norm on --dropout 0.1 --precision bf16 --grad-reduce bf16"};
    static Case c;
    static const int pipelines[] = {1, 2, 3, 6};
    int layouts = 0, ranks = 0, wrong = 0;
    for (int i = 0; i < 768; i++) {
        const int kind = i % 4, zero = i / 4 % 4, tp = 1 << i / 16 % 3, pp = pipelines[i / 48 % 4], dp = 1 << i / 192 % 2, model = i / 384;
        const int sp = i % 3 == 0, chunks = kind == SCHEDULE_INTERLEAVED && pp > 1 && pp < 6 ? 2 : 1, microbatches = 1 + i % 7;
        char flags[1024];
        Error error = {0};
        snprintf(flags, sizeof flags,
                 "%s --out x --tp %d --sp %s --pp %d --zero %d --pp-schedule %s --virtual-stages %d --micro-batch 2 --global-batch %d",
                 models[model], tp, sp ? "on" : "off", pp, zero, schedule_kind_names[kind], chunks, 2 * dp * microbatches);
        check(open_(&c, tp * pp * dp, flags, &error), "%s: %s", flags, error.text);
        check(c.plan.column_count == (pp == 6 ? 3 : pp), "%s: %d columns", flags, c.plan.column_count);
        size_t largest[6] = {0};
        int64_t saved = 0, small = 0, large = 0;
        const ZeroConfig config = zero_config(&c.options);
        for (int rank = 0; rank < tp * pp * dp; rank++) {
            Layout layout;
            Schedule schedule;
            if (!layout_create(&layout, &c.model.config, &c.options, tp * pp * dp, rank, &error)) break;
            const int stage = layout.mesh.at.pp;
            if (!schedule_build(&schedule, &c.plan.schedule, stage, &error)) break;
            Activations a;
            const ActivationShape shape = {config.dtype,    c.options.micro_batch, c.options.seq,   schedule.slots,
                                           schedule.inputs, schedule.gradients,    schedule.stashes};
            const ZeroBytes zb = zero_bytes(&c.model, &layout, &config);
            const size_t bytes = activations_layout(&a, NULL, &layout, &shape) + zb.param_bytes + zb.master_bytes + zb.grad_bytes + zb.optim_bytes +
                                 zb.buffer_bytes + zb.snapshot_bytes;
            if (bytes > largest[stage]) largest[stage] = bytes;
            const int64_t pieces = saved_elements_(&c.model, &layout), state_bytes = config.dtype == DTYPE_BF16 ? 14 : 12;
            saved += pieces;
            // room for all of it, and not for much more: padding, and copies of norms
            small += (size_t)(pieces * state_bytes) > zb.snapshot_bytes;
            large += zb.snapshot_bytes > (size_t)((pieces + pieces / 8 + 8192) * state_bytes) || (layout.replica > 0 && zb.snapshot_bytes > 0);
            schedule_free(&schedule);
            layout_free(&layout);
            ranks++;
        }
        for (int k = 0; k < c.plan.column_count; k++) {
            const int stage = c.plan.columns[k].stage;
            wrong += plan_column_bytes(&c.plan, k) != largest[stage] || (pp < 6 && stage != k) || (k == 2 && stage != pp - 1);
            for (int s = 1; k == 1 && s < pp - 1; s++) wrong += largest[s] > largest[stage]; // the middle one is the largest of its kind
        }
        check(error.code == 0 && wrong == 0, "%s: %d columns differ from the largest rank %s", flags, wrong, error.text);
        check(saved == model_parameters(&c.model) && small == 0 && large == 0,
              "%s: checkpoints hold %lld elements; %lld ranks have no room for their copies, %lld more than needed", flags, (long long)saved,
              (long long)small, (long long)large);
        layouts++;
        close_(&c);
    }
    printf("every rank: %d layouts, %d ranks: columns are the largest rank of a stage\n", layouts, ranks);
}

// Long schedules are counted by two short ones.
static void test_long_schedules(void) {
    int shapes = 0, wrong = 0;
    ModelConfig config = model_preset_config_(model_preset_find("gpt2-1558m")); // 48 layers
    Model model = model_create(&config);
    Options options;
    options_defaults(&options);
    for (int kind = 0; kind < SCHEDULE_KINDS; kind++) {
        for (int P = 1; P <= 6; P++) {
            for (int V = 1; V <= (kind == SCHEDULE_INTERLEAVED && P > 1 ? 4 : 1); V++) {
                for (int M = 1; M <= 120; M += M < 40 ? 1 : 7) {
                    for (int stage = 0; stage < P; stage++) {
                        const ScheduleShape shape = {(ScheduleKind)kind, P, M, V};
                        Error error = {0};
                        Layout layout;
                        Schedule schedule;
                        options.pp = P, options.virtual_stages = V, options.pp_schedule = kind;
                        if (!layout_create(&layout, &config, &options, P, stage, &error) || !schedule_build(&schedule, &shape, stage, &error)) {
                            check(false, "%s", error.text);
                            continue;
                        }
                        const PlanBuffers b = plan_buffers(&shape, stage);
                        wrong += b.slots != schedule.slots || b.inputs != schedule.inputs || b.gradients != schedule.gradients ||
                                 b.stashes != schedule.stashes || b.slots != schedule_slots(&shape, stage);
                        for (int slots = 1; slots <= 2; slots++) {
                            const int64_t gathers = plan_block_gathers(&schedule, &layout, slots), blocks = plan_blocks(&layout);
                            wrong += plan_step_gathers(&shape, &layout, slots) != gathers;
                            // one stage: passes alternate in direction, and each begins with the blocks that are still there
                            if (P == 1 && (kind == SCHEDULE_1F1B || kind == SCHEDULE_ZB)) {
                                wrong += gathers != blocks + (2 * M - 1) * (blocks - min_i64(slots, blocks));
                            }
                            // gpipe: forwards follow one another and find nothing, unless all is kept; backwards too
                            if (P == 1 && kind == SCHEDULE_GPIPE) wrong += gathers != 2 * M * blocks - slots;
                        }
                        schedule_free(&schedule);
                        layout_free(&layout);
                        shapes++;
                    }
                    check(wrong == 0, "%s, P %d, M %d, V %d: %d differences", schedule_kind_names[kind], P, M, V, wrong);
                }
            }
        }
    }
    model_free(&model);
    printf("long schedules: buffers and gathers of %d lists\n", shapes);
    // by hand: 3 blocks a stage in 2 stages, 2 micro-batches; stage 0 does F0 F1 B0 B1, stage 1 F0 B0 F1 B1
    config.layers = 6, config.vocab = 2;
    static const struct {
        int kind, stage, slots;
        int64_t gathers;
    } rows[] = {{SCHEDULE_1F1B, 0, 1, 3 + 3 + 2 + 3}, {SCHEDULE_1F1B, 0, 2, 3 + 3 + 1 + 3}, {SCHEDULE_1F1B, 1, 1, 3 + 2 + 2 + 2},
                {SCHEDULE_1F1B, 1, 2, 3 + 1 + 1 + 1}, {SCHEDULE_ZB, 1, 2, 3 + 1 + 1 + 1},   {SCHEDULE_GPIPE, 1, 2, 3 + 3 + 1 + 3}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const ScheduleShape shape = {(ScheduleKind)rows[i].kind, 2, 2, 1};
        Error error = {0};
        Layout layout;
        options.pp = 2, options.virtual_stages = 1, options.pp_schedule = rows[i].kind;
        check(layout_create(&layout, &config, &options, 2, rows[i].stage, &error) && plan_blocks(&layout) == 3, "3 blocks: %s", error.text);
        const int64_t gathers = plan_step_gathers(&shape, &layout, rows[i].slots);
        check(gathers == rows[i].gathers, "%s, stage %d, %d slots: %lld gathers, wanted %lld", schedule_kind_names[rows[i].kind], rows[i].stage,
              rows[i].slots, (long long)gathers, (long long)rows[i].gathers);
        layout_free(&layout);
    }
    options_free(&options);
}

static void check_comm_(const PlanInput *plan, int column, PlanPurpose purpose, CommKind kind, double wanted, const char *what) {
    const double got = plan->columns[column].comm.bytes[purpose][kind];
    check(got == wanted, "%s, column %d, %s %s: %.0f bytes, wanted %.0f", what, column, plan_purpose_names[purpose], comm_kind_names[kind], got,
          wanted);
}

// Bytes of all kinds and purposes but the wanted ones must be 0: so the counted sum is checked, too.
static void test_communication(void) {
    // Sizes that leave no padding: 8 blocks, unit sizes are multiples of 32*8.
    static const char base[] = "--layers 8 --channels 256 --heads 8 --kv-heads 2 --ffn 512 --vocab 1024 --seq 64 --norm rmsnorm --position rope "
                               "--activation swiglu --bias off --tied off";
    const double C = 256, KV = 64, FF = 512, V = 1024, NTOK = 2 * 64;
    const double block = C * C * 2 + 2 * KV * C + 3 * FF * C + 2 * C, embedding = V * C, head = V * C + C, all = 8 * block + embedding + head;
    static Case c;
    Error error = {0};
    char flags[1024];
#define OPEN(world, ...)                                                                                                                           \
    snprintf(flags, sizeof flags, "%s --micro-batch 2 ", base);                                                                                    \
    snprintf(flags + strlen(flags), sizeof flags - strlen(flags), __VA_ARGS__);                                                                    \
    check(open_(&c, world, flags, &error), "%s: %s", flags, error.text)
#define COMM(column, purpose, kind, wanted) check_comm_(&c.plan, column, PLAN_COMM_##purpose, COMM_##kind, wanted, flags)
#define SUM(column, wanted)                                                                                                                        \
    check(plan_comm_counted(&c.plan.columns[column].comm) == (wanted) + 40, "%s: counted in all: %.0f, wanted %.0f", flags,                        \
          plan_comm_counted(&c.plan.columns[column].comm) - 40, (double)(wanted))
    // data parallel, 8 ranks, 3 micro-batches each
    OPEN(8, "--global-batch 48 --zero 0");
    check(c.plan.schedule.microbatches == 3 && model_parameters(&c.model) == (int64_t)all, "a model of %.0f parameters", all);
    COMM(0, GRADIENTS, ALL_REDUCE, 4 * all);
    SUM(0, 4 * all);
    check(fabs(c.plan.columns[0].comm.sent[PLAN_COMM_GRADIENTS] - 8 * all * 7 / 8) < 1, "an all-reduce sends 2(N-1)/N");
    close_(&c);
    OPEN(8, "--global-batch 48 --zero 0 --precision bf16 --grad-reduce bf16");
    COMM(0, GRADIENTS, ALL_REDUCE, 2 * all);
    SUM(0, 2 * all);
    close_(&c);
    OPEN(8, "--global-batch 48 --zero 1 --precision bf16");
    COMM(0, GRADIENTS, REDUCE_SCATTER, 4 * all);
    COMM(0, PARAMETERS, ALL_GATHER, 2 * all);
    SUM(0, 6 * all);
    check(fabs(plan_comm_sent(&c.plan.columns[0].comm) - (6 * all + 80) * 7 / 8) < 1, "g + p are sent, in units of (N-1)/N");
    close_(&c);
    OPEN(8, "--global-batch 48 --zero 2");
    COMM(0, GRADIENTS, REDUCE_SCATTER, 3 * 4 * all);
    COMM(0, PARAMETERS, ALL_GATHER, 4 * all);
    SUM(0, 16 * all);
    close_(&c);
    for (int slots = 1; slots <= 2; slots++) { // M*(g+2p) less what is kept
        OPEN(8, "--global-batch 48 --zero 3 --precision bf16 --grad-reduce bf16 --overlap %s", slots == 2 ? "on" : "off");
        COMM(0, GRADIENTS, REDUCE_SCATTER, 3 * 2 * all);
        COMM(0, PARAMETERS, ALL_GATHER, 2 * (embedding + head + (8 + 5 * (8 - slots)) * block));
        SUM(0, 6 * all + 2 * (embedding + head + (8 + 5 * (8 - slots)) * block));
        close_(&c);
    }
    // shards inside groups of 2, whose 4 copies are summed once
    for (int zero = 1; zero <= 3; zero++) {
        OPEN(8, "--global-batch 48 --zero %d --shard-group 2", zero);
        COMM(0, GRADIENTS, REDUCE_SCATTER, (zero == 1 ? 1 : 3) * 4 * all);
        COMM(0, GRADIENTS, ALL_REDUCE, 4 * all / 2);
        check(c.plan.shards == 2 && c.plan.replicas == 4, "%d shards, %d replicas", c.plan.shards, c.plan.replicas);
        check(fabs(c.plan.columns[0].comm.sent[PLAN_COMM_GRADIENTS] - 4 * all * ((zero == 1 ? 1 : 3) / 2.0 + 2 * 0.75 / 2)) < 1, "hybrid: sent");
        close_(&c);
    }
    OPEN(8, "--global-batch 48 --zero 2 --shard-group 1"); // shards of one are no shards: as with --zero 0
    COMM(0, GRADIENTS, ALL_REDUCE, 4 * all);
    SUM(0, 4 * all);
    close_(&c);
    // tensor parallel 4 (k and v on pairs), 3 micro-batches
    const double whole = 3 * NTOK * C * 4, stats = 3 * 4 * NTOK * 3 * 4, kv_sums = 8 * 4 * 2 * (KV / 2) * C, norms = (8 * 2 + 1) * C * 4;
    OPEN(4, "--global-batch 6 --tp 4");
    COMM(0, LAYERS, ALL_REDUCE, (8 * 4 + 2) * whole);
    COMM(0, LAYERS, ALL_GATHER, stats);
    COMM(0, COPIES, ALL_REDUCE, kv_sums);
    SUM(0, 34 * whole + stats + kv_sums);
    check(fabs(c.plan.columns[0].comm.sent[PLAN_COMM_COPIES] - kv_sums) < 1, "sums over pairs send what they sum");
    close_(&c);
    OPEN(4, "--global-batch 6 --tp 4 --sp on");
    COMM(0, LAYERS, REDUCE_SCATTER, (8 * 4 + 2) * whole);
    COMM(0, LAYERS, ALL_GATHER, (8 * 4 + 2) * whole + stats);
    COMM(0, COPIES, ALL_REDUCE, kv_sums + norms);
    SUM(0, 68 * whole + stats + kv_sums + norms);
    close_(&c);
    OPEN(8, "--global-batch 12 --tp 4 --sp on --zero 2"); // sums of copies in every micro-batch
    COMM(0, COPIES, ALL_REDUCE, 3 * (kv_sums + norms));
    close_(&c);
    // pipeline of 4, 5 micro-batches; (S, C) a message
    const double message = 5 * NTOK * C * 2;
    OPEN(4, "--global-batch 10 --pp 4 --precision bf16");
    for (int s = 0; s < 4; s++) {
        COMM(s, PIPELINE, SEND, (s == 0 || s == 3 ? 1 : 2) * message);
        COMM(s, PIPELINE, RECV, (s == 0 || s == 3 ? 1 : 2) * message);
        SUM(s, (s == 0 || s == 3 ? 2 : 4) * message);
    }
    close_(&c);
    OPEN(16, "--global-batch 10 --pp 4 --pp-schedule interleaved --virtual-stages 2 --precision bf16 --tp 4 --sp on");
    for (int s = 0; s < 4; s++) COMM(s, PIPELINE, SEND, (s == 0 || s == 3 ? 3 : 4) * message / 4);
    close_(&c);
    // a tied embedding on two stages of three, each divided over 2 ranks
    OPEN(6, "--global-batch 4 --pp 3 --zero 1 --tied on");
    for (int s = 0; s < 3; s++) {
        COMM(s, EMBEDDING, ALL_REDUCE, s == 1 ? 0 : 4 * embedding / 2);
        COMM(s, GRADIENTS, REDUCE_SCATTER, 4 * ((s == 0 ? 3 : s == 1 ? 3 : 2) * block + (s == 1 ? 0 : embedding) + (s == 2 ? C : 0)));
    }
    close_(&c);
    OPEN(1, "--global-batch 4 --zero 3");
    check(plan_comm_counted(&c.plan.columns[0].comm) == 0, "one rank has nobody to talk to");
    close_(&c);
#undef OPEN
#undef COMM
#undef SUM
    printf("communication: every purpose and kind by formula\n");
}

static void test_large(void) {
    static Case c;
    static const char *const layouts[] = {
        "--model llama3-405b --tp 8 --sp on --pp 16 --zero 1 --precision bf16 --seq 8192 --micro-batch 1 --global-batch 2048",
        "--model llama3-405b --tp 8 --sp on --pp 16 --zero 1 --precision bf16 --seq 8192 --micro-batch 1 --global-batch 1048576 --pp-schedule "
        "gpipe",
        "--model llama3-405b --zero 3 --precision bf16 --seq 8192 --micro-batch 1 --global-batch 1048576",
        "--model llama3-405b --pp 64 --pp-schedule zb --zero 3 --precision bf16 --seq 8192 --micro-batch 1 --global-batch 1048576",
        "--model llama3-405b --pp 8 --pp-schedule interleaved --virtual-stages 15 --zero 3 --precision bf16 --micro-batch 1 --global-batch "
        "1048576"};
    for (size_t i = 0; i < sizeof layouts / sizeof layouts[0]; i++) {
        Error error = {0};
        const double begin = clock_ms();
        const bool good = open_(&c, 16384, layouts[i], &error);
        const double ms = clock_ms() - begin;
        check(good && ms < 1000, "%s: %.0f ms, '%s'", layouts[i], ms, error.text);
        printf("405B on 16384 ranks: %.1f ms\n", ms);
        if (i == 0) {
            check(c.plan.column_count == 3 && c.plan.columns[1].stage > 0 && c.plan.columns[1].stage < 15 && c.plan.columns[2].stage == 15,
                  "first, middle, last");
            check(strcmp(c.plan.stages, "7, 14 x 8, 7") == 0, "stages: '%s'", c.plan.stages);
            check(plan_column_bytes(&c.plan, 1) == plan_facts(&c.plan).total_bytes, "the largest rank is in the middle");
            check(fabs(plan_facts(&c.plan).bubble - 15.0 / 31) < 1e-12, "bubble (P-1)/(M+P-1)");
            FILE *file = tmpfile();
            plan_print(file, &c.plan);
            rewind(file);
            char text[8192];
            text[fread(text, 1, sizeof text - 1, file)] = '\0';
            fclose(file);
            static const char *const wanted[] = {"16384 ranks = tp 8 (and sequence) x pp 16 x dp 128; zero 1 over 128 ranks\n",
                                                 "stages       7, 14 x 8, 7 layers\n",
                                                 "16 micro-batches of 1 sequence a step for each rank, 1f1b: idle 48.4%\n",
                                                 "memory of a rank                            stage    0",
                                                 "stage   15\n",
                                                 "  parameters, all_gather  ",
                                                 "  pipeline, send  "};
            for (size_t w = 0; w < sizeof wanted / sizeof wanted[0]; w++) {
                check(strstr(text, wanted[w]) != NULL, "'%s' is printed in\n%s", wanted[w], text);
            }
        }
        close_(&c);
    }
    const struct {
        ScheduleShape shape;
        double bubble;
    } bubbles[] = {{{SCHEDULE_GPIPE, 4, 8, 1}, 3.0 / 11},
                   {{SCHEDULE_INTERLEAVED, 4, 8, 2}, 3.0 / 19},
                   {{SCHEDULE_ZB, 4, 8, 1}, 3.0 / 27},
                   {{SCHEDULE_1F1B, 1, 8, 1}, 0}};
    for (int i = 0; i < 4; i++) check(plan_bubble(&bubbles[i].shape) == bubbles[i].bubble, "bubble %d: %g", i, plan_bubble(&bubbles[i].shape));
}

// Every impossible layout is told in one line that begins with the flag.
static void test_impossible(void) {
    static const struct {
        int world;
        const char *flags, *flag, *words;
    } rows[] = {
        {8, "--tp 3", "--tp 3:", "number of ranks, 8"},
        {4, "--tp 8", "--tp 8:", "more than the number of ranks, 4"},
        {8, "--tp 4 --pp 4", "--tp 4 x --cp 1 x --pp 4", "number of ranks, 8"},
        {5, "--tp 5", "--tp 5:", "--heads 12"},
        {8, "--tp 8 --heads 8 --kv-heads 8 --ffn 100", "--tp 8:", "--ffn 100"},
        {6, "--tp 6 --heads 12 --kv-heads 4", "--tp 6:", "--kv-heads 4"},
        {16, "--pp 16", "--pp 16", "12 layers"},
        {4, "--pp 4 --virtual-stages 2", "--virtual-stages:", "interleaved"},
        {1, "--pp-schedule interleaved --virtual-stages 2", "--virtual-stages:", "one pipeline stage"},
        {8, "--zero 1 --shard-group 3", "--shard-group 3:", "8 data-parallel"},
        {8, "--shard-group 4", "--shard-group:", "--zero 0"},
        {8, "--zero 3 --bucket-mb 5", "--bucket-mb:", "--zero 3"},
        {8, "--tp 2 --micro-batch 3 --global-batch 18", "--global-batch:", "3 x 4 data-parallel ranks"},
        {4, "--pp 4 --pp-schedule interleaved --virtual-stages 3 --micro-batch 1 --global-batch 1048576 --layers 99 --seq 1", "", ""},
        {2, "--pp 2 --pp-schedule interleaved --virtual-stages 32 --micro-batch 1 --global-batch 1048576 --layers 99", "--global-batch:", "2^24"},
        {2, "--pp 2 --pp-schedule gpipe --seq 1073741824 --micro-batch 1 --global-batch 1024 --layers 99",
         "--micro-batch, --seq:", "several micro-batches"}};
    static Case c;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        Error error = {0};
        const bool good = open_(&c, rows[i].world, rows[i].flags, &error), wanted = rows[i].flag[0] == '\0';
        check(good == wanted, "%s: %s", rows[i].flags, error.text);
        check(wanted || (error.code == CODE_USAGE && strncmp(error.text, rows[i].flag, strlen(rows[i].flag)) == 0 &&
                         strstr(error.text, rows[i].words) != NULL),
              "%s: wanted '%s ... %s', got '%s'", rows[i].flags, rows[i].flag, rows[i].words, error.text);
        close_(&c);
    }
    // without --global-batch every rank has one micro-batch
    Error error = {0};
    check(open_(&c, 8, "--tp 2 --micro-batch 3", &error) && c.plan.global_batch == 12 && c.plan.schedule.microbatches == 1, "default batch %lld",
          (long long)c.plan.global_batch);
    close_(&c);
    printf("impossible layouts: %zu command lines\n", sizeof rows / sizeof rows[0]);
}

int main(void) {
    test_sizes();
    test_facts();
    test_warnings();
    test_bytes_per_parameter();
    test_every_rank();
    test_long_schedules();
    test_communication();
    test_large();
    test_impossible();
    return test_end();
}
