// test_hf.c: Hugging Face directories: config.json both ways and hostile ones; every fixture's logits and loss through the trainer (recorded by
// dev/reference/export_hf.py); reading by parts; export and import again, every bit; directories that must be refused, by name.
#define TRAIN_GPT_NO_MAIN
#include "train_gpt.c" // Trainer, Run, load_weights

#include "dev/test/fixture.h" // fixture_open, fixture_data
#include "dev/test/test.h"    // check, check_error, test_end

static const char *const fixtures[] = {"gpt2", "gpt2_untied", "llama", "llama_bias", "mistral", "qwen2", "qwen3"};
enum { FIXTURES = sizeof fixtures / sizeof fixtures[0] };
static Comm *comm; // of one rank
static char scratch[] = "/tmp/test_hf.XXXXXX";

static char *fixture_path(const char *name, char path[256]) {
    snprintf(path, 256, "dev/fixtures/hf/%s", name);
    return path;
}

static char *scratch_path(const char *name, char path[256]) {
    snprintf(path, 256, "%s/%s", scratch, name);
    return path;
}

static void scratch_write(const char *directory, const char *name, const void *data, size_t bytes) {
    char *path = path_join(directory, name);
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0) die(CODE_IO, "%s: cannot write", path);
    free(path);
}

static ModelConfig directory_config(const char *directory) {
    char path[300];
    HfConfig config;
    Error error = {0};
    snprintf(path, sizeof path, "%s/config.json", directory);
    if (!hf_config_read(path, &config, &error)) die_error(&error);
    const ModelConfig model = config.model;
    hf_config_free(&config);
    return model;
}

static bool same_config(const ModelConfig *a, const ModelConfig *b) {
    json_t *x = checkpoint_model_json(a), *y = checkpoint_model_json(b);
    const bool same = json_equal(x, y) == 1;
    json_decref(x);
    json_decref(y);
    return same;
}

// ----------------------------------------------------------------------------
// config.json

#define GPT2 "\"model_type\": \"gpt2\", \"n_layer\": 3, \"n_embd\": 32, \"n_head\": 4, \"vocab_size\": 67, \"n_positions\": 48"
#define SIZES                                                                                                                                      \
    "\"num_hidden_layers\": 2, \"hidden_size\": 32, \"num_attention_heads\": 4, \"intermediate_size\": 40, \"vocab_size\": 67, "                   \
    "\"max_position_embeddings\": 96"
#define LLAMA "\"model_type\": \"llama\", " SIZES
#define MISTRAL "\"model_type\": \"mistral\", \"num_key_value_heads\": 2, " SIZES
#define QWEN2 "\"model_type\": \"qwen2\", \"num_key_value_heads\": 2, " SIZES
#define QWEN3 "\"model_type\": \"qwen3\", \"num_key_value_heads\": 2, " SIZES
#define LLAMA3(more)                                                                                                                               \
    "{\"rope_type\": \"llama3\", \"factor\": 8.0, \"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0, "                                           \
    "\"original_max_position_embeddings\": 8192" more "}"

static const ModelConfig gpt2_config = {.layers = 3,
                                        .channels = 32,
                                        .heads = 4,
                                        .kv_heads = 4,
                                        .head_size = 8,
                                        .ffn = 128,
                                        .vocab = 67,
                                        .max_seq = 48,
                                        .norm = NORM_LAYERNORM,
                                        .position = POSITION_LEARNED,
                                        .activation = ACTIVATION_GELU,
                                        .bias = BIAS_ON,
                                        .tied = true,
                                        .norm_eps = 1e-5,
                                        .rope_theta = 1e4};
static const ModelConfig llama_config = {.layers = 2,
                                         .channels = 32,
                                         .heads = 4,
                                         .kv_heads = 4,
                                         .head_size = 8,
                                         .ffn = 40,
                                         .vocab = 67,
                                         .max_seq = 96,
                                         .norm = NORM_RMSNORM,
                                         .position = POSITION_ROPE,
                                         .activation = ACTIVATION_SWIGLU,
                                         .bias = BIAS_OFF,
                                         .norm_eps = 1e-6,
                                         .rope_theta = 1e4};

static void expect_config(const char *text, const ModelConfig *wanted, int64_t window) {
    HfConfig got;
    Error error = {0};
    const bool good = hf_config_parse("c", text, strlen(text), &got, &error);
    check(good, "%s: %s", text, error.text);
    if (!good) return;
    check(same_config(&got.model, wanted), "%s: is another model", text);
    check(got.sliding_window == window, "%s: window %lld", text, (long long)got.sliding_window);
    hf_config_free(&got);
}
#define EXPECT(base, text, window, ...)                                                                                                            \
    do {                                                                                                                                           \
        ModelConfig wanted = base;                                                                                                                 \
        __VA_ARGS__;                                                                                                                               \
        expect_config("{" text "}", &wanted, window);                                                                                              \
    } while (0)

static void test_config(void) {
    printf("config.json: what it means\n");
    EXPECT(gpt2_config, GPT2, 0, );
    EXPECT(gpt2_config, GPT2 ", \"n_inner\": 80, \"layer_norm_epsilon\": 1e-3, \"tie_word_embeddings\": false", 0,
           (wanted.ffn = 80, wanted.norm_eps = 1e-3, wanted.tied = false));
    EXPECT(gpt2_config, GPT2 ", \"n_inner\": null, \"activation_function\": \"gelu_pytorch_tanh\", \"scale_attn_weights\": true", 0, );
    EXPECT(llama_config, LLAMA, 0, );
    EXPECT(llama_config, LLAMA ", \"num_key_value_heads\": 2, \"rms_norm_eps\": 1e-5, \"rope_theta\": 500000, \"tie_word_embeddings\": true", 0,
           (wanted.kv_heads = 2, wanted.norm_eps = 1e-5, wanted.rope_theta = 5e5, wanted.tied = true));
    EXPECT(llama_config, LLAMA ", \"num_key_value_heads\": null, \"head_dim\": 12, \"rope_scaling\": null", 0, (wanted.head_size = 12));
    EXPECT(llama_config, LLAMA ", \"attention_bias\": true, \"mlp_bias\": true, \"sliding_window\": 8", 0, (wanted.bias = BIAS_ON));
    const RopeScaling scaling = {8, 1, 4, 8192};
    EXPECT(llama_config, LLAMA ", \"rope_theta\": 500000.0, \"rope_scaling\": " LLAMA3(""), 0,
           (wanted.rope_theta = 5e5, wanted.rope_scaling = scaling));
    EXPECT(llama_config, LLAMA ", \"rope_parameters\": " LLAMA3(", \"rope_theta\": 500000.0"), 0,
           (wanted.rope_theta = 5e5, wanted.rope_scaling = scaling));
    EXPECT(llama_config, LLAMA ", \"rope_theta\": 100.0, \"rope_parameters\": {\"rope_theta\": 100.0, \"rope_type\": \"default\"}", 0,
           (wanted.rope_theta = 100));
    EXPECT(llama_config, LLAMA ", \"rope_scaling\": {\"type\": \"default\"}", 0, );
    EXPECT(llama_config,
           LLAMA ", \"rope_scaling\": {\"type\": \"default\"}, \"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 1e4}", 0, );
    EXPECT(llama_config, MISTRAL ", \"sliding_window\": null", 0, (wanted.kv_heads = 2));
    EXPECT(llama_config, MISTRAL ", \"sliding_window\": 16", 16, (wanted.kv_heads = 2, wanted.max_seq = 16));
    EXPECT(llama_config, MISTRAL, 4096, (wanted.kv_heads = 2)); // the library's default
    EXPECT(llama_config, QWEN2 ", \"sliding_window\": 16, \"use_sliding_window\": false, \"max_window_layers\": 1", 0,
           (wanted.kv_heads = 2, wanted.bias = BIAS_QKV));
    EXPECT(llama_config, QWEN2 ", \"sliding_window\": 16, \"use_sliding_window\": true, \"max_window_layers\": 1", 16,
           (wanted.kv_heads = 2, wanted.bias = BIAS_QKV, wanted.max_seq = 16));
    EXPECT(llama_config, QWEN2 ", \"sliding_window\": 16, \"use_sliding_window\": true, \"max_window_layers\": 2", 0,
           (wanted.kv_heads = 2, wanted.bias = BIAS_QKV));
    EXPECT(llama_config, QWEN2 ", \"sliding_window\": 16, \"use_sliding_window\": true, \"layer_types\": [\"full_attention\", \"full_attention\"]",
           0, (wanted.kv_heads = 2, wanted.bias = BIAS_QKV));
    EXPECT(llama_config, QWEN3, 0, (wanted.kv_heads = 2, wanted.qk_norm = true, wanted.head_size = 128));
    EXPECT(llama_config, QWEN3 ", \"head_dim\": 16", 0, (wanted.kv_heads = 2, wanted.qk_norm = true, wanted.head_size = 16));
}

static void test_config_hostile(void) {
    printf("config.json: what is refused\n");
    static const struct {
        const char *text, *message;
    } cases[] = {
        {"", "line"},
        {"[]", "wanted an object"},
        {"{", "line 1"},
        {"{" LLAMA "} x", "line"},
        {"{\"vocab_size\": 1, \"vocab_size\": 2}", "duplicate"},
        {"{}", "model_type: got 'nothing'"},
        {"{\"model_type\": 3}", "model_type"},
        {"{\"model_type\": \"bert\"}", "got 'bert', wanted gpt2, llama"},
        {"{\"model_type\": \"gpt2\"}", "n_layer: is missing"},
        {"{\"model_type\": \"llama\"}", "num_hidden_layers: is missing"},
        {"{" GPT2 ", \"n_inner\": 0}", "n_inner: got 0, wanted 1 to"},
        {"{" GPT2 ", \"n_inner\": 1.5}", "n_inner: wanted a whole number"},
        {"{" GPT2 ", \"n_inner\": 9223372036854775807}", "n_inner: got 9223372036854775807"},
        {"{" GPT2 ", \"activation_function\": \"relu\"}", "activation_function: got 'relu', wanted gelu_new"},
        {"{" GPT2 ", \"activation_function\": 1}", "activation_function"},
        {"{" GPT2 ", \"scale_attn_weights\": false}", "scale_attn_weights: got false, wanted true"},
        {"{" GPT2 ", \"scale_attn_by_inverse_layer_idx\": true}", "scale_attn_by_inverse_layer_idx"},
        {"{" GPT2 ", \"add_cross_attention\": true}", "add_cross_attention"},
        {"{" GPT2 ", \"tie_word_embeddings\": 1}", "tie_word_embeddings: wanted true or false"},
        {"{" GPT2 ", \"layer_norm_epsilon\": 0}", "layer_norm_epsilon: got 0"},
        {"{" GPT2 ", \"layer_norm_epsilon\": \"1e-5\"}", "layer_norm_epsilon: wanted a number"},
        {"{\"model_type\": \"gpt2\", \"n_layer\": 1, \"n_embd\": 30, \"n_head\": 4, \"vocab_size\": 9, \"n_positions\": 8}", "n_head: got 4"},
        {"{\"model_type\": \"gpt2\", \"n_layer\": 1, \"n_embd\": 512, \"n_head\": 1, \"vocab_size\": 9, \"n_positions\": 8}", "n_head: got 1"},
        {"{" LLAMA ", \"num_key_value_heads\": 3}", "num_key_value_heads: got 3, wanted a divisor"},
        {"{" LLAMA ", \"num_key_value_heads\": 0}", "num_key_value_heads: got 0"},
        {"{" LLAMA ", \"num_key_value_heads\": -4}", "num_key_value_heads: got -4"},
        {"{" LLAMA ", \"head_dim\": 256}", "head_dim: got 256"},
        {"{" LLAMA ", \"head_dim\": 7}", "head_dim: got 7, wanted an even number"},
        {"{" LLAMA ", \"hidden_act\": \"gelu\"}", "hidden_act: got 'gelu'"},
        {"{" LLAMA ", \"mlp_bias\": true}", "attention_bias: got false with mlp_bias true"},
        {"{" LLAMA ", \"attention_bias\": true}", "attention_bias: got true with mlp_bias false"},
        {"{" QWEN3 ", \"attention_bias\": true}", "attention_bias"},
        {"{" LLAMA ", \"quantization_config\": {}}", "quantization_config"},
        {"{" LLAMA ", \"partial_rotary_factor\": 0.5}", "partial_rotary_factor: got 0.5"},
        {"{" LLAMA ", \"rope_theta\": 0}", "rope_theta: got 0"},
        {"{" LLAMA ", \"rope_scaling\": 2}", "rope_scaling: wanted an object"},
        {"{" LLAMA ", \"rope_scaling\": {\"type\": \"yarn\"}, \"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 1e4}}",
         "rope_scaling: type is not what rope_parameters says"},
        {"{" LLAMA ", \"rope_scaling\": {\"factor\": 2}, \"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 1e4}}",
         "rope_scaling: factor is not what rope_parameters says"},
        {"{" LLAMA ", \"rope_scaling\": {\"type\": \"linear\", \"factor\": 2}}", "rope_type: got 'linear', wanted default or llama3"},
        {"{" LLAMA ", \"rope_scaling\": {\"factor\": 2}}", "rope_type"},
        {"{" LLAMA ", \"rope_parameters\": {\"full_attention\": {\"rope_theta\": 1e4}}}", "rope_type"},
        {"{" LLAMA ", \"rope_theta\": 1e4, \"rope_parameters\": {\"rope_type\": \"default\", \"rope_theta\": 2e4}}",
         "rope_theta: got 10000, and 20000"},
        {"{" LLAMA ", \"rope_parameters\": {\"rope_type\": \"default\", \"partial_rotary_factor\": 0.25}}", "partial_rotary_factor"},
        {"{" LLAMA ", \"rope_scaling\": {\"rope_type\": \"llama3\"}}", "factor: is missing"},
        {"{" LLAMA ", \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 2, \"low_freq_factor\": 4, \"high_freq_factor\": 4, "
         "\"original_max_position_embeddings\": 64}}",
         "low_freq_factor: got 4, wanted less"},
        {"{" MISTRAL ", \"sliding_window\": 0}", "sliding_window: got 0"},
        {"{" MISTRAL ", \"sliding_window\": \"all\"}", "sliding_window: wanted a whole number"},
        {"{" QWEN2 ", \"use_sliding_window\": 1}", "use_sliding_window: wanted true or false"},
        {"{\"model_type\": \"qwen2\", " SIZES "}", "num_key_value_heads: got 32, wanted a divisor"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        HfConfig config;
        Error error = {0};
        const bool good = hf_config_parse("c", cases[i].text, strlen(cases[i].text), &config, &error);
        check(!good && error.code == CODE_INPUT && strstr(error.text, cases[i].message) != NULL, "%s: %s, got '%s', wanted '%s'", cases[i].text,
              good ? "accepted" : "refused", error.text, cases[i].message);
        if (good) hf_config_free(&config);
    }
}

// The layouts that exports can have, as bits: tied, k/v heads, heads of another width, then family and scaling.
enum { LAYOUTS = 5 * 8 };
static ModelConfig layout_of(int index) {
    const int family = index / 8;
    ModelConfig m = family == 0 ? gpt2_config : llama_config;
    m.tied = index & 1;
    m.norm_eps = 1.25e-4;
    if (family == 0) m.ffn = index & 2 ? 100 : 128;
    if (family > 0) m.kv_heads = index & 2 ? 2 : 4, m.head_size = index & 4 ? 6 : 8, m.rope_theta = 12345.678;
    if (family == 2) m.bias = BIAS_ON, m.rope_scaling = (RopeScaling){4.5, 1.25, 3, 77};
    if (family == 3) m.bias = BIAS_QKV;
    if (family == 4) m.qk_norm = true;
    return m;
}

static void test_config_round_trip(void) {
    printf("config.json: written and read again\n");
    static const char *const types[] = {"gpt2", "llama", "llama", "qwen2", "qwen3"};
    for (int i = 0; i < LAYOUTS; i++) {
        const ModelConfig m = layout_of(i);
        HfFamily family;
        HfConfig again;
        Error error = {0};
        json_t *ids = json_pack("{s:i, s:[i,i]}", "bos_token_id", 3, "eos_token_id", 4, 5);
        check(hf_config_family(&m, &family, &error) && strcmp(hf_family_rows_[family].model_type, types[i / 8]) == 0, "layout %d: %s", i,
              error.text);
        char *text = hf_config_text(&m, family, DTYPE_BF16, ids);
        const bool good = hf_config_parse("again", text, strlen(text), &again, &error);
        check(good, "layout %d: %s", i, error.text);
        check(good && again.family == family && same_config(&again.model, &m) && again.sliding_window == 0 && json_equal(again.ids, ids),
              "layout %d is another one: %s", i, text);
        check(strstr(text, "\"torch_dtype\": \"bfloat16\"") != NULL && strstr(text, "\"pad_token_id\": null") != NULL, "layout %d: %s", i, text);
        if (good) hf_config_free(&again);
        free(text);
        json_decref(ids);
    }
    ModelConfig strange[] = {gpt2_config, gpt2_config, gpt2_config, gpt2_config, llama_config, llama_config, llama_config, llama_config};
    strange[0].kv_heads = 2, strange[1].head_size = 16, strange[2].bias = BIAS_OFF, strange[3].norm = NORM_RMSNORM;
    strange[4].activation = ACTIVATION_GELU, strange[5].position = POSITION_LEARNED, strange[6].qk_norm = true, strange[6].bias = BIAS_QKV;
    strange[7].norm = NORM_LAYERNORM;
    for (int i = 0; i < 8; i++) {
        HfFamily family;
        Error error = {0};
        check(!hf_config_family(&strange[i], &family, &error) && error.code == CODE_USAGE && strstr(error.text, "--export-hf: norm ") != NULL,
              "layout that has no name %d: '%s'", i, error.text);
    }
}

// The same through a checkpoint's manifest, and from one of before there was scaling.
static void test_manifest_config(void) {
    printf("a manifest's model\n");
    for (int i = 0; i < LAYOUTS; i++) {
        const ModelConfig m = layout_of(i);
        ModelConfig again;
        Error error = {0};
        json_t *json = checkpoint_model_json(&m);
        check(checkpoint_model_config("c", json, &again, &error) && same_config(&m, &again), "layout %d: %s", i, error.text);
        json_object_del(json, "rope_factor");
        const bool scaled = m.rope_scaling.factor > 0;
        check(checkpoint_model_check("c", json, &m, &error) != scaled, "layout %d without rope_factor: %s", i, error.text);
        json_object_del(json, "heads");
        error = (Error){0};
        check(!checkpoint_model_config("c", json, &again, &error) && strstr(error.text, "model.heads") != NULL, "layout %d: '%s'", i, error.text);
        json_decref(json);
    }
    static const struct {
        const char *field, *value;
    } wrong[] = {{"heads", "0"},     {"heads", "3"},       {"heads", "1e3"},        {"norm", "\"batchnorm\""}, {"tied", "1"},
                 {"norm_eps", "-1"}, {"channels", "\"\""}, {"layers", "100000000"}, {"rope_factor", "8.0"},    {"rope_original_seq", "-1"}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        ModelConfig m = layout_of(8 + 2), again; // 2 k/v heads
        Error error = {0};
        json_t *json = checkpoint_model_json(&m);
        json_object_set_new(json, wrong[i].field, json_loads(wrong[i].value, JSON_DECODE_ANY, NULL));
        check(!checkpoint_model_config("c", json, &again, &error) && error.code == CODE_INPUT, "model.%s %s: accepted", wrong[i].field,
              wrong[i].value);
        json_decref(json);
    }
}

// ----------------------------------------------------------------------------
// Fixtures through the trainer

// logits (N, V) and the mean loss of a batch of whole rows.
static double trainer_results(Trainer *t, const int32_t *tokens, const int32_t *targets, int64_t B, int64_t T, float *logits) {
    Device *d = &t->device;
    const int64_t C = t->model.config.channels, V = t->model.config.vocab, N = B * T;
    MicroBatch micro;
    microbatch_create(&micro, N);
    micro.rows = B, micro.tokens = N, micro.documents = B, micro.max_length = T;
    int64_t valid = 0;
    for (int64_t n = 0; n < N; n++) {
        micro.ids[n] = tokens[n], micro.targets[n] = targets[n], micro.positions[n] = (int32_t)(n % T), micro.token_index[n] = (int32_t)n;
        valid += targets[n] >= 0;
    }
    for (int64_t b = 0; b <= B; b++) micro.cu_seqlens[b] = (int32_t)(b * T);
    const double loss = losses_of(t, &micro) / (double)valid;
    Buffer w[TENSOR_KINDS];
    zero_weights(&t->zero, unit_of_head_weight(t), w);
    for (int64_t n = 0; n < N; n += t->acts.chunk) {
        const int64_t count = min_i64(t->acts.chunk, N - n);
        d->linear_forward(d, t->acts.logits, ABSENT, buffer_at(t->acts.slots[0].norm, n * C), w[model_head_kind(&t->model.config)], ABSENT, count,
                          C, V);
        read_logits(t, count, logits + n * V);
    }
    microbatch_free(&micro);
    return loss;
}

static void test_fixture(const char *name) {
    enum { B = 2, T = 12 };
    static Run run;
    char directory[256], path[300];
    Error error = {0};
    ModelWeights weights;
    run = (Run){.comm = comm, .setup = {.config = directory_config(fixture_path(name, directory))}};
    Options *o = &run.setup.options;
    ModelConfig *config = &run.setup.config;
    snprintf(path, sizeof path, "%s.safetensors", directory);
    Fixture f = fixture_open(path);
    const int64_t count = B * T * config->vocab;
    const float *wanted = fixture_data(&f, "logits", FIXTURE_F32, count);
    const double *loss = fixture_data(&f, "loss", FIXTURE_F64, 1);
    options_defaults(o);
    o->micro_batch = o->global_batch = B, o->seq = T;
    trainer_create(&run.trainer, o, config, comm, device_cpu());
    const bool good = weights_open(comm, directory, &run.trainer.model, &weights, &error);
    check(good, "%s: %s", name, error.text);
    if (good) {
        float *logits = base_new((size_t)count, sizeof *logits);
        double worst = 0;
        load_weights(&run, &weights);
        const double got = trainer_results(&run.trainer, fixture_data(&f, "tokens", FIXTURE_I32, B * T),
                                           fixture_data(&f, "targets", FIXTURE_I32, B * T), B, T, logits);
        for (int64_t i = 0; i < count; i++) worst = isfinite(logits[i]) ? fmax(worst, fabs((double)logits[i] - (double)wanted[i])) : INFINITY;
        char label[80];
        snprintf(label, sizeof label, "%s: logits of transformers", name);
        check_error(worst, 1e-5, label);
        snprintf(label, sizeof label, "%s: loss", name);
        check_error(fabs(got - *loss), 1e-6, label);
        free(logits);
    }
    trainer_free(&run.trainer);
    fixture_close(&f);
}

// Every rank's parts of every layout, read in odd pieces, are those of the whole tensors.
static void test_parts(const char *name) {
    char directory[256];
    Error error = {0};
    ModelWeights weights;
    const ModelConfig config = directory_config(fixture_path(name, directory));
    Model model = model_create(&config);
    if (!weights_open(comm, directory, &model, &weights, &error)) die_error(&error);
    int64_t wrong = 0, seen = 0;
    for (int tp = 1; tp <= 2; tp++) {
        for (int rank = 0; rank < tp; rank++) {
            Options options;
            Layout layout;
            options_defaults(&options);
            options.tp = tp;
            if (!layout_create(&layout, &config, &options, tp, rank, &error)) die_error(&error);
            for (int i = 0; i < model.count; i++) {
                const Tensor *t = &model.tensors[i];
                const Part part = layout_part(&layout, t), all = {.held = true, .shape = {t->shape[0], t->shape[1]}, .elements = t->elements};
                float *whole = base_new((size_t)t->elements, 4), *values = base_new((size_t)part.elements, 4);
                bool good = weights_read(&weights, t, &all, 0, t->elements, whole, &error);
                for (int64_t from = 0, step = 1; good && from < part.elements; from += step, step = step * 3 + 1) {
                    const int64_t to = min_i64(part.elements, from + step);
                    good = weights_read(&weights, t, &part, from, to, values + from, &error);
                }
                for (int64_t e = 0; e < part.elements; e++) {
                    int64_t run;
                    wrong += memcmp(&values[e], &whole[layout_global_element(t, &part, e, 1, &run)], 4) != 0;
                    seen += whole[layout_global_element(t, &part, e, 1, &run)] != 0;
                }
                check(good, "%s: %s", t->name, error.text);
                free(whole);
                free(values);
            }
            layout_free(&layout);
        }
    }
    check(wrong == 0 && seen > 0, "%s: %lld elements of parts are not those of the whole", name, (long long)wrong);
    weights_close(&weights);
    model_free(&model);
}

// ----------------------------------------------------------------------------
// Export and import

typedef struct {
    const Model *model;
    Dtype dtype;
} Source;

// Random bits that survive the export's dtype: also infinities, NaN, -0 and subnormals.
static float *source_whole(void *context, int tensor, Error *error) {
    (void)error;
    const Source *source = context;
    const Tensor *t = &source->model->tensors[tensor];
    float *values = base_new((size_t)t->elements, sizeof *values);
    for (int64_t e = 0; e < t->elements; e++) {
        uint32_t bits = (uint32_t)rng_mix((uint64_t)tensor * 1000003 + (uint64_t)e);
        if (source->dtype == DTYPE_BF16) bits &= 0xffff0000u;
        if ((bits & 0x7fffffff) > 0x7f800000) bits |= 0x400000; // quiet
        memcpy(&values[e], &bits, 4);
    }
    return values;
}

static void test_round_trip(int index, Dtype dtype, int64_t shard_bytes) {
    const ModelConfig config = layout_of(index);
    Model model = model_create(&config);
    Source source = {&model, dtype};
    char directory[256], name[32];
    Error error = {0};
    ModelWeights weights;
    snprintf(name, sizeof name, "trip_%d_%d", index, (int)dtype);
    const HfExport export = {.directory = scratch_path(name, directory), .dtype = dtype, .shard_bytes = shard_bytes};
    check(hf_export_check(directory, &model, dtype, &error) && hf_export_write(&export, &model, true, source_whole, &source, &error), "export: %s",
          error.text);
    check(!hf_export_check(directory, &model, dtype, &error) && error.code == CODE_USAGE && strstr(error.text, "is there already") != NULL,
          "a second export: '%s'", error.text);
    check(model_source_has_(directory, "model.safetensors") == (shard_bytes > 1 << 20), "layout %d: one file or several", index);
    error = (Error){0};
    const bool good = weights_open(comm, directory, &model, &weights, &error);
    check(good, "layout %d: import: %s", index, error.text);
    int64_t wrong = 0;
    for (int i = 0; good && i < model.count; i++) {
        const Tensor *t = &model.tensors[i];
        const Part all = {.held = true, .shape = {t->shape[0], t->shape[1]}, .elements = t->elements};
        float *wanted = source_whole(&source, i, &error), *got = base_new((size_t)t->elements, sizeof *got);
        check(weights_read(&weights, t, &all, 0, t->elements, got, &error), "%s: %s", t->name, error.text);
        wrong += memcmp(got, wanted, (size_t)t->elements * 4) != 0;
        free(wanted);
        free(got);
    }
    check(wrong == 0, "layout %d, %s: %lld tensors are not what was exported", index, dtype_names[dtype], (long long)wrong);
    check(!good || weights_dtype(&weights, &model) == dtype, "layout %d: dtype", index);
    if (good) weights_close(&weights);
    model_free(&model);
}

static void test_half(void) {
    printf("half precision\n");
    static const struct {
        uint16_t bits;
        float value;
    } cases[] = {{0x0000, 0.0f},
                 {0x3c00, 1.0f},
                 {0xc000, -2.0f},
                 {0x7bff, 65504.0f},
                 {0x0400, 0x1p-14f},
                 {0x0001, 0x1p-24f},
                 {0x83ff, -1023 * 0x1p-24f},
                 {0x3555, 0.333251953125f},
                 {0x7c00, INFINITY},
                 {0xfc00, -INFINITY}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        check(hf_f16_to_f32_(cases[i].bits) == cases[i].value, "%04x is %g, wanted %g", cases[i].bits, (double)hf_f16_to_f32_(cases[i].bits),
              (double)cases[i].value);
    }
    check(isnan(hf_f16_to_f32_(0x7e00)) && isnan(hf_f16_to_f32_(0x7c01)), "NaN");
    check(signbit(hf_f16_to_f32_(0x8000)), "-0");
}

// ----------------------------------------------------------------------------
// Directories that must be refused

typedef struct {
    SafetensorsFile file;
    SafetensorsEntry entries[64];
    char *data[64];
    int count;
} Tensors;

static Tensors *tensors_open(const char *name) {
    char directory[256], path[300];
    Error error = {0};
    Tensors *t = base_new(1, sizeof *t);
    snprintf(path, sizeof path, "%s/model.safetensors", fixture_path(name, directory));
    if (!safetensors_open(path, &t->file, &error)) die_error(&error);
    for (size_t i = 0; i < t->file.index.count; i++) {
        const SafetensorsTensor *s = &t->file.index.tensors[i];
        SafetensorsEntry *e = &t->entries[t->count];
        t->data[t->count] = base_new((size_t)s->bytes * 2, 1); // room to grow
        if (!safetensors_read(&t->file, s, 0, s->bytes, t->data[t->count], &error)) die_error(&error);
        *e = (SafetensorsEntry){.name = s->name, .dtype = s->type->name, .rank = s->rank, .data = t->data[t->count]};
        memcpy(e->shape, s->shape, sizeof e->shape);
        t->count++;
    }
    return t;
}

static SafetensorsEntry *tensors_find(Tensors *t, const char *name) {
    for (int i = 0; i < t->count; i++) {
        if (strcmp(t->entries[i].name, name) == 0) return &t->entries[i];
    }
    die(CODE_INPUT, "no tensor '%s'", name);
}

static void tensors_write(Tensors *t, const char *directory, const char *file) {
    Error error = {0};
    char *path = path_join(directory, file);
    if (!safetensors_write_simple(path, t->entries, t->count, &error)) die_error(&error);
    free(path);
}

static void tensors_close(Tensors *t) {
    for (size_t i = 0; i < t->file.index.count; i++) free(t->data[i]);
    safetensors_close(&t->file);
    free(t);
}

// A scratch directory with a fixture's config.json.
static char *variant(const char *fixture, const char *name, char directory[256]) {
    char from[256];
    size_t bytes;
    Error error = {0};
    char *path = path_join(fixture_path(fixture, from), "config.json");
    char *text = file_read_whole(path, 1 << 20, &bytes, &error);
    if (text == NULL || !directory_create(scratch_path(name, directory), &error)) die_error(&error);
    scratch_write(directory, "config.json", text, bytes);
    free(text);
    free(path);
    return directory;
}

static void expect_open(const char *directory, const char *message) {
    const ModelConfig config = directory_config(directory);
    Model model = model_create(&config);
    ModelWeights weights;
    Error error = {0};
    const bool good = weights_open(comm, directory, &model, &weights, &error);
    if (message == NULL) {
        check(good, "%s: %s", directory, error.text);
    } else {
        check(!good && error.code == CODE_INPUT && strstr(error.text, message) != NULL, "%s: got '%s', wanted '%s'", directory, error.text,
              message);
    }
    if (good) weights_close(&weights);
    model_free(&model);
}

static void test_refused_tensors(void) {
    printf("tensors that are missing, extra, of another shape or dtype\n");
    char directory[256];
    expect_open(variant("llama", "empty", directory), "has neither model.safetensors nor");
    static const struct {
        const char *what, *fixture, *tensor, *message;
    } cases[] = {
        {"missing", "llama", "model.layers.1.self_attn.k_proj.weight", "tensor 'model.layers.1.self_attn.k_proj.weight' is missing"},
        {"missing", "gpt2_untied", "lm_head.weight", "tensor 'lm_head.weight' is missing"},
        {"missing", "gpt2", "ln_f.bias", "tensor 'ln_f.bias' is missing"},
        {"missing", "llama", "model.embed_tokens.weight", "tensor 'model.embed_tokens.weight' is missing"},
        {"extra", "llama", "model.layers.0.mlp.gate_proj.bias", "tensor 'model.layers.0.mlp.gate_proj.bias': is no parameter"},
        {"extra", "llama", "model.layers.2.mlp.gate_proj.weight", "tensor 'model.layers.2.mlp.gate_proj.weight': is no parameter"},
        {"extra", "llama", "model.layers.0.self_attn.rotary_emb.inv_freq", NULL},
        {"extra", "gpt2", "h.1.attn.masked_bias", NULL},
        {"extra", "gpt2", "lm_head.weight", "tensor 'lm_head.weight' is not the embedding"},
        {"transpose", "llama", "model.layers.0.mlp.up_proj.weight",
         "tensor 'model.layers.0.mlp.up_proj.weight': shape: got [16, 24], wanted [24, 16]"},
        {"transpose", "gpt2", "h.0.attn.c_attn.weight", "tensor 'h.0.attn.c_attn.weight': shape: got [48, 16], wanted [16, 48]"},
        {"flat", "llama", "model.layers.0.mlp.up_proj.weight", "shape: got [384], wanted [24, 16]"},
        {"type", "llama", "model.norm.weight", "tensor 'model.norm.weight': dtype: got I32, wanted F32, BF16 or F16"},
        {"copy", "llama_bias", "lm_head.weight", NULL},
        {"damage", "llama_bias", "lm_head.weight", "is not the embedding"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char name[32];
        snprintf(name, sizeof name, "refused_%zu", i);
        variant(cases[i].fixture, name, directory);
        Tensors *t = tensors_open(cases[i].fixture);
        const char what = cases[i].what[0];
        if (what == 'e') t->entries[t->count] = t->entries[0], t->entries[t->count++].name = cases[i].tensor;
        SafetensorsEntry *e = tensors_find(t, cases[i].tensor);
        const int64_t rows = e->shape[0];
        if (what == 'm') *e = t->entries[--t->count];
        if (cases[i].what[1] == 'r') e->shape[0] = e->shape[1], e->shape[1] = rows;
        if (what == 'f') e->rank = 1, e->shape[0] *= e->shape[1];
        if (cases[i].what[1] == 'y') e->dtype = "I32";
        if (what == 'd') ((char *)e->data)[17] ^= 1;
        tensors_write(t, directory, "model.safetensors");
        expect_open(directory, cases[i].message);
        tensors_close(t);
    }
}

static void test_refused_index(void) {
    printf("an index that says what is not so\n");
    char directory[256], from[256];
    size_t bytes;
    Error error = {0};
    static const char *const files[] = {"model.safetensors.index.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"};
    char *text[3];
    size_t sizes[3];
    for (int i = 0; i < 3; i++) {
        char *path = path_join(fixture_path("mistral", from), files[i]);
        text[i] = file_read_whole(path, 1 << 20, &bytes, &error);
        if (text[i] == NULL) die_error(&error);
        sizes[i] = bytes;
        free(path);
    }
    static const struct {
        const char *key, *value, *message; // of weight_map; value NULL: removed; key "": total_size
    } cases[] = {
        {"model.norm.weight", "\"model-00002-of-00002.safetensors\"", NULL},
        {"model.norm.weight", "\"model-00001-of-00002.safetensors\"", "'model.norm.weight' is in model-00002-of-00002.safetensors, the index says"},
        {"model.norm.weight", NULL, "'model.norm.weight' is in model-00002-of-00002.safetensors, the index says nothing"},
        {"model.norm.weight", "1", "'model.norm.weight': wanted the name of a file"},
        {"model.more.weight", "\"model-00001-of-00002.safetensors\"", "'model.more.weight' is not in model-00001"},
        {"model.more.weight", "\"model-00003-of-00003.safetensors\"", "model-00003-of-00003.safetensors: cannot open"},
        {"model.more.weight", "\"../model.safetensors\"", "got the file '../model.safetensors'"},
        {"model.more.weight", "\".safetensors\"", "got the file '.safetensors'"},
        {"model.more.weight", "\"config.json\"", "got the file 'config.json'"},
        {"", "1", NULL},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char name[32];
        snprintf(name, sizeof name, "index_%zu", i);
        variant("mistral", name, directory);
        json_t *root = json_loadb(text[0], sizes[0], 0, NULL);
        const bool total = cases[i].key[0] == '\0';
        json_t *object = json_object_get(root, total ? "metadata" : "weight_map");
        if (cases[i].value == NULL) {
            json_object_del(object, cases[i].key);
        } else {
            json_object_set_new(object, total ? "total_size" : cases[i].key, json_loads(cases[i].value, JSON_DECODE_ANY, NULL));
        }
        char *changed = json_dumps(root, 0);
        scratch_write(directory, files[0], changed, strlen(changed));
        for (int k = 1; k < 3; k++) scratch_write(directory, files[k], text[k], sizes[k]);
        expect_open(directory, cases[i].message);
        free(changed);
        json_decref(root);
    }
    scratch_write(variant("mistral", "index_text", directory), files[0], "{\"weight_map\": [", 16);
    expect_open(directory, "index.json: line 1");
    scratch_write(variant("mistral", "index_map", directory), files[0], "{\"weight_map\": []}", 18);
    expect_open(directory, "weight_map: wanted an object");
    for (int i = 0; i < 3; i++) free(text[i]);
}

int main(void) {
    if (mkdtemp(scratch) == NULL) die(CODE_IO, "%s: %s", scratch, strerror(errno));
    comm = comm_init(NULL, NULL);
    test_config();
    test_config_hostile();
    test_config_round_trip();
    test_manifest_config();
    test_half();
    printf("fixtures of transformers\n");
    for (int i = 0; i < FIXTURES; i++) test_fixture(fixtures[i]);
    printf("parts of tensors\n");
    for (int i = 0; i < FIXTURES; i++) test_parts(fixtures[i]);
    printf("export and import\n");
    for (int i = 0; i < LAYOUTS; i++) test_round_trip(i, i % 3 == 0 ? DTYPE_BF16 : DTYPE_F32, i % 2 == 0 ? 5000 : (int64_t)1 << 30);
    test_refused_tensors();
    test_refused_index();
    char command[64];
    snprintf(command, sizeof command, "rm -rf %s", scratch);
    check(system(command) == 0, "%s", command);
    return test_end();
}
