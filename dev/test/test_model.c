// test_model.c: the tensor table of every preset and of every combination of switches: counts, names, order, joins,
// decay, initialisation; and how flags become a configuration.
#include "dev/test/switches.h" // switches_config
#include "dev/test/test.h"     // check, test_end
#include "llmc/model.h"        // what is tested
#include "llmc/zero.h"         // zero_layout

// Parameter counts of the published models (the sums of their files' tensors).
static void test_presets(void) {
    static const struct {
        const char *name;
        int64_t parameters;
    } published[] = {{"gpt2-124m", 124439808},      {"gpt2-355m", 354823168},    {"gpt2-774m", 774030080},  {"gpt2-1558m", 1557611200},
                     {"llama2-7b", 6738415616},     {"llama2-70b", 68976648192}, {"llama3-8b", 8030261248}, {"llama3-70b", 70553706496},
                     {"llama3-405b", 405853388800}, {"mistral-7b", 7241732096},  {"qwen3-0.6b", 596049920}, {"qwen3-8b", 8190735360}};
    for (size_t i = 0; i < sizeof published / sizeof published[0]; i++) {
        const ModelPreset *preset = model_preset_find(published[i].name);
        check(preset != NULL, "preset %s exists", published[i].name);
        if (preset == NULL) continue;
        const ModelConfig config = model_preset_config_(preset);
        Model model = model_create(&config);
        check(model_parameters(&model) == published[i].parameters, "%s: %lld parameters, wanted %lld", published[i].name,
              (long long)model_parameters(&model), (long long)published[i].parameters);
        model_free(&model);
    }
    check(model_preset_find("gpt2") == NULL && model_preset_find("") == NULL && model_preset_find("gpt2-124m ") == NULL, "names match whole");
    for (int i = 0; i < MODEL_PRESET_COUNT; i++) { // --model NAME alone gives exactly the preset
        char *argv[] = {"train_gpt", "--model", (char *)model_presets[i].name};
        Options options;
        Error error = {0};
        ModelConfig config;
        check(options_parse(&options, 3, argv, &error) && model_configure(&config, &options, 0, &error), "%s: %s", argv[2], error.text);
        const ModelConfig wanted = model_preset_config_(&model_presets[i]);
        check(config.layers == wanted.layers && config.channels == wanted.channels && config.heads == wanted.heads &&
                  config.kv_heads == wanted.kv_heads && config.head_size == wanted.head_size && config.ffn == wanted.ffn &&
                  config.vocab == wanted.vocab && config.max_seq == wanted.max_seq && config.norm == wanted.norm &&
                  config.position == wanted.position && config.activation == wanted.activation && config.bias == wanted.bias &&
                  config.tied == wanted.tied && config.qk_norm == wanted.qk_norm && config.norm_eps == wanted.norm_eps &&
                  config.rope_theta == wanted.rope_theta,
              "%s comes out as it is in the table", argv[2]);
        options_free(&options);
    }
    printf("presets: %d published counts exact, %d configurations\n", (int)(sizeof published / sizeof published[0]), MODEL_PRESET_COUNT);
}

static int find_(const Model *model, const char *name) {
    for (int i = 0; i < model->count; i++) {
        if (strcmp(model->tensors[i].name, name) == 0) return i;
    }
    return -1;
}

// Everything that must hold for any table.
static void check_table_(const Model *model, const char *what) {
    const ModelConfig *m = &model->config;
    int64_t *offset = base_new((size_t)model->count, sizeof *offset);
    const Options options = {.tp = 1, .pp = 1, .virtual_stages = 1, .pp_schedule = SCHEDULE_1F1B};
    Layout layout;
    Error error = {0};
    check(layout_create(&layout, m, &options, 1, 0, &error), "%s: %s", what, error.text);
    const int64_t elements = zero_layout(model, &layout, offset, NULL);
    layout_free(&layout);
    int bad_id = 0, bad_unit = 0, bad_size = 0, bad_decay = 0, bad_init = 0, bad_offset = 0, bad_order = 0;
    for (int i = 0; i < model->count; i++) {
        const Tensor *t = &model->tensors[i], *before = i > 0 ? &model->tensors[i - 1] : NULL;
        bad_id += t->id != i || strlen(t->name) == 0 || strlen(t->name) >= sizeof t->name - 1;
        bad_unit += t->unit < 0 || t->unit >= model->units || (before != NULL && t->unit < before->unit);
        bad_order += before != NULL && t->unit == before->unit && t->kind <= before->kind;
        bad_size += t->elements != t->shape[0] * t->shape[1] || t->elements <= 0 || (t->rank == 1) != (t->shape[1] == 1 && m->channels > 1);
        const bool is_bias = strstr(t->name, ".bias") != NULL, is_norm = strstr(t->name, "norm") != NULL;
        bad_decay += t->decay != (t->rank == 2) || (t->decay && (is_bias || is_norm));
        bad_init += t->init != (is_bias ? INIT_ZEROS : is_norm ? INIT_ONES : INIT_NORMAL) || (t->init == INIT_NORMAL) != (t->init_std > 0);
        const bool joined = strstr(t->name, "attn.k.") || strstr(t->name, "attn.v.") || strstr(t->name, "mlp.up.");
        bad_offset += t->joined != joined || (!joined && offset[i] % ZERO_ALIGN_ELEMENTS != 0);
        if (before != NULL) {
            const int64_t end = offset[i - 1] + before->elements;
            bad_offset += joined ? offset[i] != end : offset[i] < end || offset[i] >= end + ZERO_ALIGN_ELEMENTS;
        }
    }
    const Tensor *last = &model->tensors[model->count - 1];
    bad_offset += offset[0] != 0 || elements < offset[model->count - 1] + last->elements || elements % ZERO_ALIGN_ELEMENTS != 0;
    free(offset);
    check(bad_id + bad_unit + bad_size + bad_decay + bad_init + bad_offset + bad_order == 0,
          "%s: faulty ids %d, units %d, sizes %d, decay %d, init %d, offsets %d, order %d", what, bad_id, bad_unit, bad_size, bad_decay, bad_init,
          bad_offset, bad_order);
}

// Number of parameters by formula, independent of the table.
static int64_t formula_(const ModelConfig *m) {
    const int64_t C = m->channels, Q = m->heads * m->head_size, KV = m->kv_heads * m->head_size, FF = m->ffn;
    const bool all = m->bias == BIAS_ON, gelu = m->activation == ACTIVATION_GELU;
    const int64_t norm = C + (m->norm == NORM_LAYERNORM && all ? C : 0);
    int64_t block =
        2 * norm + Q * C + 2 * KV * C + C * Q + (m->bias != BIAS_OFF ? Q + 2 * KV : 0) + (all ? C : 0) + (m->qk_norm ? 2 * m->head_size : 0);
    block += (gelu ? 2 : 3) * C * FF + (all ? (gelu ? FF : 2 * FF) + C : 0);
    return m->vocab * C * (m->tied ? 1 : 2) + (m->position == POSITION_LEARNED ? m->max_seq * C : 0) + m->layers * block + norm;
}

static void test_switches(void) {
    int built = 0;
    for (int bits = 0; bits < SWITCHES; bits++) {
        const ModelConfig m = switches_config(bits);
        Model model = model_create(&m);
        char what[64];
        snprintf(what, sizeof what, "switches %d", bits);
        check_table_(&model, what);
        check(model_parameters(&model) == formula_(&m), "%s: %lld parameters, by formula %lld", what, (long long)model_parameters(&model),
              (long long)formula_(&m));
        // names that must be there exactly when their switch is on
        const bool all = m.bias == BIAS_ON, gelu = m.activation == ACTIVATION_GELU;
        const struct {
            const char *name;
            bool wanted;
        } names[] = {{"wte.weight", true},
                     {"wpe.weight", m.position == POSITION_LEARNED},
                     {"h.0.norm1.weight", true},
                     {"h.2.norm1.bias", all && m.norm == NORM_LAYERNORM},
                     {"h.1.attn.q.weight", true},
                     {"h.1.attn.k.weight", true},
                     {"h.1.attn.v.weight", true},
                     {"h.1.attn.o.weight", true},
                     {"h.1.attn.q.bias", m.bias != BIAS_OFF},
                     {"h.1.attn.k.bias", m.bias != BIAS_OFF},
                     {"h.1.attn.v.bias", m.bias != BIAS_OFF},
                     {"h.1.attn.o.bias", all},
                     {"h.0.attn.q_norm.weight", m.qk_norm},
                     {"h.0.attn.k_norm.weight", m.qk_norm},
                     {"h.2.norm2.weight", true},
                     {"h.2.norm2.bias", all && m.norm == NORM_LAYERNORM},
                     {"h.0.mlp.fc.weight", gelu},
                     {"h.0.mlp.fc.bias", gelu && all},
                     {"h.0.mlp.proj.weight", gelu},
                     {"h.0.mlp.proj.bias", gelu && all},
                     {"h.0.mlp.gate.weight", !gelu},
                     {"h.0.mlp.up.weight", !gelu},
                     {"h.0.mlp.down.weight", !gelu},
                     {"h.0.mlp.gate.bias", !gelu && all},
                     {"h.0.mlp.up.bias", !gelu && all},
                     {"h.0.mlp.down.bias", !gelu && all},
                     {"norm.weight", true},
                     {"norm.bias", all && m.norm == NORM_LAYERNORM},
                     {"head.weight", !m.tied},
                     {"h.5.norm1.weight", false}};
        for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
            check((find_(&model, names[i].name) >= 0) == names[i].wanted, "%s: %s", what, names[i].name);
        }
        model_free(&model);
        built++;
    }
    printf("switches: %d combinations, counts by formula, names, order, joins, decay\n", built);
}

static void test_big(void) {
    const ModelConfig config = model_preset_config_(model_preset_find("llama3-405b"));
    Model model = model_create(&config);
    check_table_(&model, "llama3-405b");
    const Tensor *down = &model.tensors[find_(&model, "h.125.mlp.down.weight")];
    check(down->shape[0] == 16384 && down->shape[1] == 53248 && down->unit == 126 && down->elements == (int64_t)16384 * 53248,
          "[out, in] of the last block");
    check(model_head_unit(&model) == 127 && model.units == 128 && model.tensors[model.count - 1].unit == 127, "the head is the last unit");
    check(down->shard == SHARD_COLUMNS && model.tensors[find_(&model, "h.0.attn.q.weight")].shard == SHARD_ROWS &&
              model.tensors[find_(&model, "h.0.norm1.weight")].shard == SHARD_NONE,
          "row- and column-parallel cuts");
    model_free(&model);
    // 6 FLOPs per weight of matrix products and 6*L*Q*T for causal attention
    const ModelConfig gpt2 = model_preset_config_(model_preset_find("gpt2-124m"));
    model = model_create(&gpt2);
    const double flops = model_flops_per_token(&model, 1024), wanted = 6.0 * (12 * 12.0 * 768 * 768 + 50257.0 * 768) + 6.0 * 12 * 768 * 1024;
    check(fabs(flops / wanted - 1) < 1e-12, "gpt2-124m: %.0f FLOPs per token, wanted %.0f", flops, wanted);
    model_free(&model);
    ModelConfig untied = gpt2;
    untied.tied = false;
    model = model_create(&untied);
    check(model_flops_per_token(&model, 1024) == flops && model_head_kind(&untied) == TENSOR_HEAD && model_head_kind(&gpt2) == TENSOR_WTE,
          "tied or not, the head costs the same");
    model_free(&model);
    printf("big: llama3-405b's table, FLOPs per token\n");
}

static void test_init(void) {
    enum { LIMIT = 20001 };
    const ModelConfig config = model_preset_config_(model_preset_find("gpt-micro"));
    Model model = model_create(&config);
    const uint64_t key = rng_key(1337, RNG_INIT);
    float *values = base_new(LIMIT, sizeof *values), *slice = base_new(LIMIT, sizeof *slice);
    double worst = 0;
    for (int i = 0; i < model.count; i++) {
        const Tensor *t = &model.tensors[i];
        const int64_t n = min_i64(t->elements, LIMIT);
        double sum = 0, squares = 0;
        model_init_values(t, key, 0, n, values);
        for (int64_t e = 0; e < n; e++) sum += (double)values[e], squares += (double)values[e] * (double)values[e];
        // any cut into slices gives the same numbers and the same hash
        uint64_t hash = 0;
        int different = 0;
        for (int64_t begin = 0, count = 1; begin < n; begin += count, count = count % 7 + 1) {
            const int64_t part = min_i64(count, n - begin);
            model_init_values(t, key, begin, part, slice);
            for (int64_t e = 0; e < part; e++) different += slice[e] != values[begin + e];
            hash += model_hash_values(t, begin, part, slice);
        }
        check(different == 0 && hash == model_hash_values(t, 0, n, values), "%s: %d of %lld values depend on the slice", t->name, different,
              (long long)n);
        if (t->init != INIT_NORMAL) {
            check(sum == (t->init == INIT_ONES ? (double)n : 0), "%s is constant", t->name);
            continue;
        }
        const bool residual = strstr(t->name, "attn.o") || strstr(t->name, "mlp.proj");
        const double std = residual ? 0.02 / sqrt(12.0) : 0.02, error = fabs(sqrt(squares / (double)n) / std - 1);
        worst = fmax(worst, error);
        check(error < 5 / sqrt(2.0 * (double)n) && fabs(sum / (double)n) < 5 * std / sqrt((double)n), "%s: std off by %.3f", t->name, error);
    }
    printf("init: std of every matrix within %.1e (bound %.1e), gains 1, biases 0, slices agree\n", worst, 5 / sqrt(2.0 * LIMIT));
    const Tensor *q = &model.tensors[find_(&model, "h.0.attn.q.weight")], *k = &model.tensors[find_(&model, "h.0.attn.k.weight")];
    float a[4], b[4];
    model_init_values(q, key, 0, 4, a);
    model_init_values(k, key, 0, 4, b);
    check(memcmp(a, b, sizeof a) != 0, "tensors draw different numbers");
    model_init_values(q, rng_key(1338, RNG_INIT), 0, 4, b);
    check(memcmp(a, b, sizeof a) != 0, "seeds draw different numbers");
    model_init_values(q, key, ((int64_t)1 << 33) + 1, 4, b); // elements beyond 2^32: no wrap-around
    model_init_values(q, key, 1, 4, a);
    check(memcmp(a, b, sizeof a) != 0, "element 2^33 + 1 is not element 1");
    const uint64_t hash = model_hash_values(q, 0, 4, a);
    const float swapped[4] = {a[1], a[0], a[2], a[3]}, negated[4] = {a[0], a[1], a[2], -a[3]};
    check(model_hash_values(k, 0, 4, a) != hash && model_hash_values(q, 1, 4, a) != hash && model_hash_values(q, 0, 4, swapped) != hash &&
              model_hash_values(q, 0, 4, negated) != hash,
          "the hash sees name, place, order and sign");
    free(values);
    free(slice);
    model_free(&model);
}

// Flags, as one string, to a configuration.
static bool configure_(const char *flags, int64_t data_vocab, ModelConfig *config, Error *error) {
    char text[512], *argv[40] = {"train_gpt"};
    snprintf(text, sizeof text, "%s", flags);
    int argc = 1;
    for (char *word = strtok(text, " "); word != NULL; word = strtok(NULL, " ")) argv[argc++] = word;
    Options options;
    *error = (Error){0};
    const bool good = options_parse(&options, argc, argv, error) && model_configure(config, &options, data_vocab, error);
    options_free(&options);
    return good;
}

static void test_configure(void) {
    static const struct {
        const char *flags;
        int64_t data_vocab, layers, channels, heads, kv_heads, head_size, ffn, vocab, max_seq;
    } good[] = {{"", 0, 12, 768, 12, 12, 64, 3072, 50257, 256},
                {"--seq 100", 300, 12, 768, 12, 12, 64, 3072, 300, 100},
                {"--vocab 400", 300, 12, 768, 12, 12, 64, 3072, 400, 256},
                {"--channels 256 --layers 2", 0, 2, 256, 4, 4, 64, 1024, 50257, 256},
                {"--channels 32", 0, 12, 32, 1, 1, 32, 128, 50257, 256},
                {"--channels 256 --activation swiglu", 0, 12, 256, 4, 4, 64, 704, 50257, 256},                          // 8*256/3 = 682.7 -> 704
                {"--channels 192 --activation swiglu", 0, 12, 192, 3, 3, 64, 512, 50257, 256},                          // 512 exactly
                {"--channels 193 --heads 1 --head-size 64 --activation swiglu", 0, 12, 193, 1, 1, 64, 576, 50257, 256}, // 514.7 -> 576
                {"--channels 100 --heads 3 --head-size 30 --kv-heads 1", 0, 12, 100, 3, 1, 30, 400, 50257, 256},
                {"--model llama3-8b --layers 2", 0, 2, 4096, 32, 8, 128, 14336, 128256, 8192},
                {"--model llama3-8b --vocab 257", 0, 32, 4096, 32, 8, 128, 14336, 257, 8192},
                {"--model llama3-8b", 257, 32, 4096, 32, 8, 128, 14336, 257, 8192},
                {"--model llama3-8b --heads 64", 0, 32, 4096, 64, 64, 64, 14336, 128256, 8192},
                {"--model llama3-8b --heads 64 --kv-heads 4 --head-size 16", 0, 32, 4096, 64, 4, 16, 14336, 128256, 8192},
                {"--model llama3-8b --channels 2048", 0, 32, 2048, 32, 8, 64, 5504, 128256, 8192}, // 5461.3 -> 5504
                {"--model gpt2-124m --seq 1024", 0, 12, 768, 12, 12, 64, 3072, 50257, 1024},
                {"--model gpt2-124m --seq 64", 0, 12, 768, 12, 12, 64, 3072, 50257, 1024},
                {"--model gpt2-124m --seq 2048 --position rope", 0, 12, 768, 12, 12, 64, 3072, 50257, 1024},
                {"--model gpt2-124m --activation swiglu", 0, 12, 768, 12, 12, 64, 2048, 50257, 1024},
                {"--model qwen3-0.6b --seq 65536", 0, 28, 1024, 16, 8, 128, 3072, 151936, 32768}};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        ModelConfig m;
        Error error;
        check(configure_(good[i].flags, good[i].data_vocab, &m, &error), "'%s': %s", good[i].flags, error.text);
        check(m.layers == good[i].layers && m.channels == good[i].channels && m.heads == good[i].heads && m.kv_heads == good[i].kv_heads &&
                  m.head_size == good[i].head_size && m.ffn == good[i].ffn && m.vocab == good[i].vocab && m.max_seq == good[i].max_seq,
              "'%s' is L %lld C %lld NH %lld NKV %lld HS %lld FF %lld V %lld T %lld", good[i].flags, (long long)m.layers, (long long)m.channels,
              (long long)m.heads, (long long)m.kv_heads, (long long)m.head_size, (long long)m.ffn, (long long)m.vocab, (long long)m.max_seq);
    }
    ModelConfig m;
    Error error;
    check(configure_("--norm rmsnorm --position rope --bias qkv --tied off --qk-norm on --norm-eps 1e-6 --rope-theta 5e5 --dropout 0.1", 0, &m,
                     &error) &&
              m.norm == NORM_RMSNORM && m.position == POSITION_ROPE && m.bias == BIAS_QKV && !m.tied && m.qk_norm && m.norm_eps == 1e-6 &&
              m.rope_theta == 5e5 && m.dropout == 0.1,
          "switches: %s", error.text);
    check(configure_("--model llama-nano --tied off --bias on", 0, &m, &error) && !m.tied && m.bias == BIAS_ON && m.norm == NORM_RMSNORM,
          "flags override presets");
    static const struct {
        const char *flags, *wanted;
    } wrong[] = {{"--model nothing", "--model"},
                 {"--channels 768 --heads 7", "--heads"},
                 {"--channels 100 --heads 3", "--heads"},
                 {"--heads 1", "--head-size"},
                 {"--heads 12 --kv-heads 5", "--kv-heads"},
                 {"--heads 4 --kv-heads 8 --channels 256", "--kv-heads"},
                 {"--model gpt2-124m --seq 1025", "--seq"},
                 {"--channels 63 --heads 3 --position rope", "--head-size"},
                 {"--model llama3-8b --channels 4097", "--heads"},
                 {"--model llama3-8b --head-size 7", "--head-size"}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        check(!configure_(wrong[i].flags, 0, &m, &error) && error.code == CODE_USAGE &&
                  strncmp(error.text, wrong[i].wanted, strlen(wrong[i].wanted)) == 0,
              "'%s' must be refused, naming %s: '%s'", wrong[i].flags, wrong[i].wanted, error.text);
    }
    // the largest numbers that the table of flags lets through must not overflow 64 bits
    check(configure_("--channels 262144 --heads 8192 --head-size 128 --ffn 1048576 --vocab 16777216 --layers 1000 --seq 1073741824 --activation "
                     "swiglu --tied off",
                     0, &m, &error),
          "largest: %s", error.text);
    Model model = model_create(&m);
    check(model_parameters(&model) == formula_(&m) && model_parameters(&model) > (int64_t)1 << 49, "largest: %lld parameters",
          (long long)model_parameters(&model));
    model_free(&model);
    printf("configure: %d configurations, %d refusals\n", (int)(sizeof good / sizeof good[0]) + 3, (int)(sizeof wrong / sizeof wrong[0]));
}

int main(void) {
    test_presets();
    test_switches();
    test_big();
    test_init();
    test_configure();
    FILE *nowhere = fopen("/dev/null", "w");
    model_list(nowhere);
    fclose(nowhere);
    return test_end();
}
