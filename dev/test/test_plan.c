// test_plan.c: the plan's numbers for published models, sizes beyond 2^31 and 2^64, and every warning.
#include "dev/test/test.h" // check, test_end
#include "llmc/plan.h"     // what is tested

static Model preset_(const char *name) {
    const ModelConfig config = model_preset_config_(model_preset_find(name));
    return model_create(&config);
}

static PlanInput input_(const Model *model) {
    return (PlanInput){
        .model = model, .seq = model->config.max_seq, .micro_batch = 4, .global_batch = 8, .steps = 1000000, .warmup = 100, .lr = 3e-5};
}

static void test_sizes(void) {
    static const struct {
        const char *name;
        int64_t parameters, non_embedding;
    } models[] = {{"gpt2-124m", 124439808, 85056000},
                  {"llama2-7b", 6738415616, 6738415616 - 2 * (int64_t)32000 * 4096},
                  {"llama2-70b", 68976648192, 68976648192 - 2 * (int64_t)32000 * 8192},
                  {"llama3-8b", 8030261248, 8030261248 - 2 * (int64_t)128256 * 4096},
                  {"llama3-405b", 405853388800, 405853388800 - 2 * (int64_t)128256 * 16384}};
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        Model model = preset_(models[i].name);
        PlanInput plan = input_(&model);
        Error error = {0};
        check(plan_add_model(&plan, DTYPE_BF16, &error), "%s: %s", models[i].name, error.text);
        const PlanFacts f = plan_facts(&plan);
        check(f.parameters == models[i].parameters && f.non_embedding == models[i].non_embedding, "%s: %lld parameters, %lld without embeddings",
              models[i].name, (long long)f.parameters, (long long)f.non_embedding);
        check(plan.row_count == 4 && f.total_bytes == (size_t)zero_layout(&model, NULL) * 18, "%s: bf16 takes 18 bytes per element: %zu",
              models[i].name, f.total_bytes);
        plan.row_count = 0;
        check(plan_add_model(&plan, DTYPE_F32, &error) && plan.row_count == 3, "%s: fp32 has no master weights", models[i].name);
        check(plan_facts(&plan).total_bytes == (size_t)zero_layout(&model, NULL) * 16, "%s: fp32 takes 16 bytes per element", models[i].name);
        model_free(&model);
    }
    // B*T*V passes 2^31 and 2^32 elements; larger things are refused, not wrapped
    Model model = preset_("llama3-8b");
    PlanInput plan = input_(&model);
    Error error = {0};
    check(plan_add(&plan, "logits", (size_t)4 * 8192 * 128256, 4, &error) && plan.rows[0].bytes == 16810770432u, "B*T*V: %zu bytes",
          plan.rows[0].bytes);
    check(!plan_add(&plan, "wide", (size_t)1 << 62, 4, &error) && error.code == CODE_USAGE && strstr(error.text, "wide") != NULL,
          "2^64 bytes: '%s'", error.text);
    error = (Error){0};
    check(plan_add(&plan, "half", ((size_t)1 << 62) - 1, 1, &error) && !plan_add(&plan, "sum", (size_t)1 << 62, 1, &error),
          "the sum is checked too");
    check(plan.row_count == 2, "refused categories are not added");
    // the bound that guards the arena's own sums lies above them: everything up to 2^62 is laid out without overflow
    for (int i = 0; i < MODEL_PRESET_COUNT; i++) {
        Model other = preset_(model_presets[i].name);
        for (int64_t tokens = 64; tokens <= (int64_t)1 << 50; tokens *= 2) {
            PlanInput big = input_(&other);
            big.micro_batch = max_i64(1, tokens >> 30), big.seq = tokens / big.micro_batch;
            error = (Error){0};
            if (!plan_add_activations(&big, DTYPE_F32, &error)) {
                check(error.code == CODE_USAGE && strncmp(error.text, "--micro-batch, --seq:", 21) == 0 && tokens > 1 << 24,
                      "%s: %lld tokens: '%s'", model_presets[i].name, (long long)tokens, error.text);
                break;
            }
            const double residual = (double)tokens * (double)other.config.channels * 4 * 4 * (double)other.config.layers;
            check(big.row_count == 3 && (double)big.rows[0].bytes > residual, "%s: %lld tokens take %zu bytes", model_presets[i].name,
                  (long long)tokens, big.rows[0].bytes);
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
    check(plan_add_model(&good, DTYPE_F32, &error), "%s", error.text);
    check_warning_(&good, NULL);
    PlanInput plan = good;
    plan.machine_bytes = 1.9e9; // needs 1.99e9
    check_warning_(&plan, "memory");
    check(!plan_fits(&plan, &error) && error.code == CODE_USAGE && strstr(error.text, "needs 1.8") != NULL, "too large: '%s'", error.text);
    error = (Error){0};
    check(plan_fits(&good, &error), "fits: %s", error.text);
    plan.machine_bytes = 0;
    check(plan_fits(&plan, &error), "unknown memory holds everything");
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
                                         "  gradients",
                                         "  total ",
                                         "warning: memory",
                                         "warning: --lr: 1000",
                                         "this machine: 1 bytes",
                                         "at least"};
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) check(strstr(text, wanted[i]) != NULL, "'%s' is printed in\n%s", wanted[i], text);
    model_free(&model);
    printf("warnings: each alone, none for a sound run\n");
}

int main(void) {
    test_sizes();
    test_facts();
    test_warnings();
    return test_end();
}
