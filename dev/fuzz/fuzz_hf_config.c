// fuzz_hf_config.c: any bytes as a Hugging Face config.json. What is accepted must be a model that the trainer can have: sizes in range, a tensor
// table whose tensors all have a place in the files; and where it has a name there, the config.json that is written of it means the same.
#include "llmc/hf_tensors.h" // what is fuzzed
#include "llmc/manifest.h"   // checkpoint_model_json

static void require(bool ok) {
    if (!ok) abort();
}

// Every tensor of the table is in one of the files' tensors, once.
static void require_mapping(const ModelConfig *config, HfFamily family) {
    ModelConfig small = *config;
    small.layers = min_i64(small.layers, 3);
    Model model = model_create(&small);
    int count;
    HfTensor *tensors = hf_tensors(&model, family, hf_prefix(family), &count);
    int *seen = base_new((size_t)model.count, sizeof *seen);
    for (int i = 0; i < count; i++) {
        int64_t elements = 0;
        for (int p = 0; p < tensors[i].parts; p++) {
            seen[tensors[i].tensor[p]]++;
            elements += model.tensors[tensors[i].tensor[p]].elements;
        }
        require(elements == tensors[i].shape[0] * tensors[i].shape[1] && strchr(tensors[i].name, '%') == NULL);
    }
    for (int i = 0; i < model.count; i++) require(seen[i] == 1);
    free(seen);
    free(tensors);
    model_free(&model);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    HfConfig config, again;
    Error error = {0};
    if (!hf_config_parse("fuzz", (const char *)data, bytes, &config, &error)) {
        require(error.code == CODE_INPUT && error.text[0] != '\0' && config.ids == NULL);
        return 0;
    }
    const ModelConfig *m = &config.model;
    require(m->layers > 0 && m->channels > 0 && m->heads > 0 && m->kv_heads > 0 && m->heads % m->kv_heads == 0 && m->head_size > 0);
    require(m->head_size <= 128 && m->ffn > 0 && m->vocab > 1 && m->max_seq > 0 && m->norm_eps > 0 && m->rope_theta >= 1);
    require(config.sliding_window == 0 || m->max_seq <= config.sliding_window);
    require(m->position == POSITION_LEARNED || m->head_size % 2 == 0);
    require_mapping(m, config.family);
    HfFamily family;
    require(hf_config_family(m, &family, &error) && (family == config.family || (config.family == HF_MISTRAL && family == HF_LLAMA)));
    char *text = hf_config_text(m, family, DTYPE_F32, config.ids);
    require(text != NULL && hf_config_parse("again", text, strlen(text), &again, &error));
    json_t *a = checkpoint_model_json(m), *b = checkpoint_model_json(&again.model);
    require(json_equal(a, b) && json_equal(config.ids, again.ids) && again.sliding_window == 0);
    json_decref(a);
    json_decref(b);
    free(text);
    hf_config_free(&again);
    hf_config_free(&config);
    return 0;
}
