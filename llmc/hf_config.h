// hf_config.h: a Hugging Face model's config.json: hostile text -> ModelConfig, and ModelConfig -> text. What would change logits and has no
// counterpart here is refused by name; what only concerns training or generation is left aside. Works on memory and is fuzzed; the one
// function that touches a file reads it whole.
#ifndef LLMC_HF_CONFIG_H
#define LLMC_HF_CONFIG_H

#include "llmc/base.h"      // Error, fail
#include "llmc/files.h"     // file_read_whole
#include "llmc/model.h"     // ModelConfig
#include "llmc/options.h"   // options_rows: the range of a size
#include "llmc/precision.h" // Dtype
#include <jansson.h>        // json_*

enum { HF_CONFIG_MAX_BYTES = 1 << 20 };

typedef enum { HF_GPT2, HF_LLAMA, HF_MISTRAL, HF_QWEN2, HF_QWEN3, HF_FAMILIES } HfFamily;

typedef struct {
    const char *model_type, *architecture;
} HfFamilyRow_;

static const HfFamilyRow_ hf_family_rows_[HF_FAMILIES] = {
    [HF_GPT2] = {"gpt2", "GPT2LMHeadModel"},    [HF_LLAMA] = {"llama", "LlamaForCausalLM"}, [HF_MISTRAL] = {"mistral", "MistralForCausalLM"},
    [HF_QWEN2] = {"qwen2", "Qwen2ForCausalLM"}, [HF_QWEN3] = {"qwen3", "Qwen3ForCausalLM"},
};

typedef struct {
    HfFamily family;
    ModelConfig model;
    int64_t sliding_window; // every token sees at most so many; 0: all. Then model.max_seq is no longer than that
    json_t *ids;            // object of bos_token_id, eos_token_id, pad_token_id where they are there; handed on by exports
} HfConfig;

static inline void hf_config_free(HfConfig *config) {
    json_decref(config->ids);
    *config = (HfConfig){0};
}

// ----------------------------------------------------------------------------
// Reading

typedef struct {
    const char *file;
    const json_t *root; // an object
    Error *error;
} HfJson_;

// A member, or NULL where it is missing or null.
static inline const json_t *hf_member_(const HfJson_ *json, const char *key) {
    const json_t *value = json_object_get(json->root, key);
    return json_is_null(value) ? NULL : value;
}

enum { HF_REQUIRED_ = -1 }; // in place of a default

// A whole number that the option's range allows; `fallback` where there is none.
static inline bool hf_int_(const HfJson_ *json, const char *key, int64_t fallback, int option, int64_t *out) {
    const OptionRow *row = &options_rows()[option];
    const json_t *value = hf_member_(json, key);
    *out = value != NULL ? json_integer_value(value) : fallback;
    if (value == NULL && fallback == HF_REQUIRED_) return fail(json->error, CODE_INPUT, "%s: %s: is missing", json->file, key);
    if (value != NULL && !json_is_integer(value)) return fail(json->error, CODE_INPUT, "%s: %s: wanted a whole number", json->file, key);
    if (value != NULL && ((double)*out < row->low || (double)*out > row->high)) {
        return fail(json->error, CODE_INPUT, "%s: %s: got %lld, wanted %.0f to %.0f", json->file, key, (long long)*out, row->low, row->high);
    }
    return true;
}

static inline bool hf_real_(const HfJson_ *json, const char *key, double fallback, double low, double high, double *out) {
    const json_t *value = hf_member_(json, key);
    *out = value != NULL ? json_number_value(value) : fallback;
    if (value == NULL && fallback == HF_REQUIRED_) return fail(json->error, CODE_INPUT, "%s: %s: is missing", json->file, key);
    if (value != NULL && !json_is_number(value)) return fail(json->error, CODE_INPUT, "%s: %s: wanted a number", json->file, key);
    if (value != NULL && !(*out >= low && *out <= high)) {
        return fail(json->error, CODE_INPUT, "%s: %s: got %g, wanted %g to %g", json->file, key, *out, low, high);
    }
    return true;
}

static inline bool hf_bool_(const HfJson_ *json, const char *key, bool fallback, bool *out) {
    const json_t *value = hf_member_(json, key);
    *out = value != NULL ? json_is_true(value) : fallback;
    return value == NULL || json_is_boolean(value) || fail(json->error, CODE_INPUT, "%s: %s: wanted true or false", json->file, key);
}

// A switch that must have one value, because the other is another architecture.
static inline bool hf_must_be_(const HfJson_ *json, const char *key, bool wanted) {
    bool got;
    if (!hf_bool_(json, key, wanted, &got)) return false;
    return got == wanted || fail(json->error, CODE_INPUT, "%s: %s: got %s, wanted %s: that architecture is not supported", json->file, key,
                                 got ? "true" : "false", wanted ? "true" : "false");
}

// A text that must be one of two.
static inline bool hf_one_of_(const HfJson_ *json, const char *key, const char *fallback, const char *a, const char *b) {
    const json_t *value = hf_member_(json, key);
    const char *got = value == NULL ? fallback : json_is_string(value) ? json_string_value(value) : "no text";
    return strcmp(got, a) == 0 || strcmp(got, b) == 0 ||
           fail(json->error, CODE_INPUT, "%s: %s: got '%.60s', wanted %s or %s", json->file, key, got, a, b);
}

// "llama3" scaling of rotary frequencies, from rope_parameters or rope_scaling.
static inline bool hf_parse_llama3_(const HfJson_ *rope, RopeScaling *scaling) {
    if (!hf_real_(rope, "factor", HF_REQUIRED_, 1, 1e6, &scaling->factor) ||
        !hf_real_(rope, "low_freq_factor", HF_REQUIRED_, 1e-6, 1e6, &scaling->low_freq_factor) ||
        !hf_real_(rope, "high_freq_factor", HF_REQUIRED_, 1e-6, 1e6, &scaling->high_freq_factor) ||
        !hf_int_(rope, "original_max_position_embeddings", HF_REQUIRED_, OPTION_seq, &scaling->original_seq)) {
        return false;
    }
    return scaling->low_freq_factor < scaling->high_freq_factor ||
           fail(rope->error, CODE_INPUT, "%s: low_freq_factor: got %g, wanted less than high_freq_factor, %g", rope->file, scaling->low_freq_factor,
                scaling->high_freq_factor);
}

// Where a file has both forms, the older one must not say something else.
static inline bool hf_same_scaling_(const HfJson_ *json, const json_t *parameters, const json_t *scaling) {
    const char *key;
    json_t *value;
    if (!json_is_object(scaling)) return fail(json->error, CODE_INPUT, "%s: rope_scaling: wanted an object", json->file);
    json_object_foreach((json_t *)scaling, key, value) {
        const bool type = strcmp(key, "type") == 0 || strcmp(key, "rope_type") == 0;
        const json_t *other = json_object_get(parameters, type ? "rope_type" : key);
        if (other == NULL && type) other = json_object_get(parameters, "type");
        const bool numbers = json_is_number(value) && json_is_number(other);
        if (numbers ? json_number_value(value) != json_number_value(other) : !json_equal(value, other)) {
            return fail(json->error, CODE_INPUT, "%s: rope_scaling: %.60s is not what rope_parameters says", json->file, key);
        }
    }
    return true;
}

// Base and scaling of the rotary frequencies. Newer files have both in rope_parameters, older ones rope_theta beside rope_scaling.
static inline bool hf_parse_rope_(const HfJson_ *json, ModelConfig *m) {
    const OptionRow *range = &options_rows()[OPTION_rope_theta];
    const json_t *parameters = hf_member_(json, "rope_parameters"), *scaling = hf_member_(json, "rope_scaling");
    const HfJson_ rope = {json->file, parameters != NULL ? parameters : scaling, json->error};
    double older;
    if (!hf_real_(json, "rope_theta", 0, range->low, range->high, &older)) return false;
    m->rope_theta = older > 0 ? older : 1e4;
    if (rope.root == NULL) return true;
    const char *place = parameters != NULL ? "rope_parameters" : "rope_scaling";
    if (!json_is_object(rope.root)) return fail(json->error, CODE_INPUT, "%s: %s: wanted an object", json->file, place);
    if (parameters != NULL && scaling != NULL && !hf_same_scaling_(json, parameters, scaling)) return false;
    double theta, share;
    if (!hf_real_(&rope, "rope_theta", m->rope_theta, range->low, range->high, &theta)) return false;
    if (older > 0 && theta != older) {
        return fail(json->error, CODE_INPUT, "%s: rope_theta: got %g, and %g in %s", json->file, older, theta, place);
    }
    m->rope_theta = theta;
    if (!hf_real_(&rope, "partial_rotary_factor", 1, 1, 1, &share)) return false;
    const json_t *newer = hf_member_(&rope, "rope_type"), *value = newer != NULL ? newer : hf_member_(&rope, "type");
    const char *type = value == NULL ? "" : json_is_string(value) ? json_string_value(value) : "no text";
    if (strcmp(type, "llama3") == 0) return hf_parse_llama3_(&rope, &m->rope_scaling);
    return strcmp(type, "default") == 0 || (value == NULL && parameters != NULL && hf_member_(&rope, "rope_theta") != NULL) ||
           fail(json->error, CODE_INPUT, "%s: %s.rope_type: got '%.60s', wanted default or llama3", json->file, place, type);
}

// Sizes and switches of GPT-2.
static inline bool hf_parse_gpt2_(const HfJson_ *json, HfConfig *config) {
    ModelConfig *m = &config->model;
    const OptionRow *eps = &options_rows()[OPTION_norm_eps];
    m->norm = NORM_LAYERNORM, m->position = POSITION_LEARNED, m->activation = ACTIVATION_GELU, m->bias = BIAS_ON, m->rope_theta = 1e4;
    if (!hf_int_(json, "n_layer", HF_REQUIRED_, OPTION_layers, &m->layers) ||
        !hf_int_(json, "n_embd", HF_REQUIRED_, OPTION_channels, &m->channels) || !hf_int_(json, "n_head", HF_REQUIRED_, OPTION_heads, &m->heads) ||
        !hf_int_(json, "vocab_size", HF_REQUIRED_, OPTION_vocab, &m->vocab) ||
        !hf_int_(json, "n_positions", HF_REQUIRED_, OPTION_seq, &m->max_seq) || !hf_int_(json, "n_inner", 4 * m->channels, OPTION_ffn, &m->ffn) ||
        !hf_real_(json, "layer_norm_epsilon", 1e-5, eps->low, eps->high, &m->norm_eps) || !hf_bool_(json, "tie_word_embeddings", true, &m->tied) ||
        !hf_one_of_(json, "activation_function", "gelu_new", "gelu_new", "gelu_pytorch_tanh") || !hf_must_be_(json, "scale_attn_weights", true) ||
        !hf_must_be_(json, "scale_attn_by_inverse_layer_idx", false) || !hf_must_be_(json, "add_cross_attention", false)) {
        return false;
    }
    m->kv_heads = m->heads;
    if (m->channels % m->heads != 0) {
        return fail(json->error, CODE_INPUT, "%s: n_head: got %lld, wanted a divisor of n_embd %lld", json->file, (long long)m->heads,
                    (long long)m->channels);
    }
    m->head_size = m->channels / m->heads;
    return m->head_size <= 128 || fail(json->error, CODE_INPUT, "%s: n_head: got %lld for n_embd %lld: heads of %lld channels, wanted at most 128",
                                       json->file, (long long)m->heads, (long long)m->channels, (long long)m->head_size);
}

// Query, key and value heads. Where a file leaves out their number or width, the library's own defaults hold.
static inline bool hf_parse_heads_(const HfJson_ *json, HfConfig *config) {
    ModelConfig *m = &config->model;
    static const int64_t default_kv[HF_FAMILIES] = {[HF_MISTRAL] = 8, [HF_QWEN2] = 32, [HF_QWEN3] = 32};
    if (!hf_int_(json, "num_attention_heads", HF_REQUIRED_, OPTION_heads, &m->heads)) return false;
    const bool null_kv = json_is_null(json_object_get(json->root, "num_key_value_heads")); // null: as many as query heads
    const int64_t kv = config->family == HF_LLAMA || null_kv ? m->heads : default_kv[config->family];
    if (!hf_int_(json, "num_key_value_heads", kv, OPTION_kv_heads, &m->kv_heads)) return false;
    if (m->heads % m->kv_heads != 0) {
        return fail(json->error, CODE_INPUT, "%s: num_key_value_heads: got %lld, wanted a divisor of num_attention_heads %lld", json->file,
                    (long long)m->kv_heads, (long long)m->heads);
    }
    if (!hf_int_(json, "head_dim", config->family == HF_QWEN3 ? 128 : m->channels / m->heads, OPTION_head_size, &m->head_size)) return false;
    if (config->family != HF_QWEN3 && hf_member_(json, "head_dim") == NULL && m->channels % m->heads != 0) {
        return fail(json->error, CODE_INPUT, "%s: num_attention_heads: got %lld, wanted a divisor of hidden_size %lld (or head_dim)", json->file,
                    (long long)m->heads, (long long)m->channels);
    }
    return (m->head_size <= 128 && m->head_size % 2 == 0) ||
           fail(json->error, CODE_INPUT, "%s: head_dim: got %lld, wanted an even number up to 128", json->file, (long long)m->head_size);
}

// Biases of linear layers: all, none, or those of q, k, v.
static inline bool hf_parse_bias_(const HfJson_ *json, HfConfig *config) {
    bool attention, mlp;
    if (config->family == HF_MISTRAL || config->family == HF_QWEN2) { // fixed: files that say something are not listened to
        config->model.bias = config->family == HF_QWEN2 ? BIAS_QKV : BIAS_OFF;
        return true;
    }
    if (!hf_bool_(json, "attention_bias", false, &attention) || !hf_bool_(json, "mlp_bias", false, &mlp)) return false;
    if (config->family == HF_QWEN3) mlp = false; // it has no such switch
    config->model.bias = attention ? BIAS_ON : BIAS_OFF;
    return attention == mlp || fail(json->error, CODE_INPUT, "%s: attention_bias: got %s with mlp_bias %s: wanted both alike", json->file,
                                    attention ? "true" : "false", mlp ? "true" : "false");
}

// Does any layer see a window only?
static inline bool hf_has_window_(const HfJson_ *json, const HfConfig *config, bool use) {
    if (config->family == HF_MISTRAL) return true;
    if (config->family == HF_LLAMA || !use) return false;
    const json_t *types = hf_member_(json, "layer_types");
    if (!json_is_array(types)) { // layers from max_window_layers on
        const json_t *first = hf_member_(json, "max_window_layers");
        return (json_is_integer(first) ? json_integer_value(first) : 28) < config->model.layers;
    }
    for (size_t i = 0; i < json_array_size(types); i++) {
        const char *type = json_string_value(json_array_get(types, i));
        if (type == NULL || strcmp(type, "full_attention") != 0) return true;
    }
    return false;
}

// Attention windows are not supported: up to their length they change nothing, so that is how long sequences may be.
static inline bool hf_parse_window_(const HfJson_ *json, HfConfig *config) {
    bool use;
    int64_t window;
    const bool missing = json_object_get(json->root, "sliding_window") == NULL;
    if (!hf_bool_(json, "use_sliding_window", false, &use) ||
        !hf_int_(json, "sliding_window", missing ? 4096 : 0, OPTION_seq, &window)) { // the library's default; null: none
        return false;
    }
    config->sliding_window = hf_has_window_(json, config, use) ? window : 0;
    if (config->sliding_window > 0) config->model.max_seq = min_i64(config->model.max_seq, config->sliding_window);
    return true;
}

// Sizes and switches of Llama, Mistral, Qwen2 and Qwen3.
static inline bool hf_parse_llama_(const HfJson_ *json, HfConfig *config) {
    ModelConfig *m = &config->model;
    const OptionRow *eps = &options_rows()[OPTION_norm_eps];
    double share;
    m->norm = NORM_RMSNORM, m->position = POSITION_ROPE, m->activation = ACTIVATION_SWIGLU, m->qk_norm = config->family == HF_QWEN3;
    return hf_int_(json, "num_hidden_layers", HF_REQUIRED_, OPTION_layers, &m->layers) &&
           hf_int_(json, "hidden_size", HF_REQUIRED_, OPTION_channels, &m->channels) && hf_parse_heads_(json, config) &&
           hf_int_(json, "intermediate_size", HF_REQUIRED_, OPTION_ffn, &m->ffn) &&
           hf_int_(json, "vocab_size", HF_REQUIRED_, OPTION_vocab, &m->vocab) &&
           hf_int_(json, "max_position_embeddings", HF_REQUIRED_, OPTION_seq, &m->max_seq) &&
           hf_real_(json, "rms_norm_eps", 1e-6, eps->low, eps->high, &m->norm_eps) && hf_bool_(json, "tie_word_embeddings", false, &m->tied) &&
           hf_one_of_(json, "hidden_act", "silu", "silu", "swish") && hf_real_(json, "partial_rotary_factor", 1, 1, 1, &share) &&
           hf_parse_bias_(json, config) && hf_parse_rope_(json, m) && hf_parse_window_(json, config);
}

static inline bool hf_parse_root_(const HfJson_ *json, HfConfig *config) {
    const json_t *type = json_object_get(json->root, "model_type");
    const char *name = json_is_string(type) ? json_string_value(type) : "nothing";
    if (!json_is_object(json->root)) return fail(json->error, CODE_INPUT, "%s: wanted an object", json->file);
    while (config->family < HF_FAMILIES && strcmp(name, hf_family_rows_[config->family].model_type) != 0) config->family++;
    if (config->family == HF_FAMILIES) {
        return fail(json->error, CODE_INPUT, "%s: model_type: got '%.60s', wanted gpt2, llama, mistral, qwen2 or qwen3", json->file, name);
    }
    if (hf_member_(json, "quantization_config") != NULL) {
        return fail(json->error, CODE_INPUT, "%s: quantization_config: quantized weights are not supported (dequantize them first)", json->file);
    }
    if (!(config->family == HF_GPT2 ? hf_parse_gpt2_(json, config) : hf_parse_llama_(json, config))) return false;
    static const char *const keys[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
    config->ids = json_object();
    for (int i = 0; i < 3; i++) {
        const json_t *value = hf_member_(json, keys[i]);
        if (value != NULL) json_object_set(config->ids, keys[i], (json_t *)value);
    }
    return true;
}

// `file` is for messages. To be given to hf_config_free() when true.
static inline bool hf_config_parse(const char *file, const char *text, size_t bytes, HfConfig *config, Error *error) {
    json_error_t reason;
    *config = (HfConfig){0};
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &reason);
    if (root == NULL) return fail(error, CODE_INPUT, "%s: line %d: %s", file, reason.line, reason.text);
    const HfJson_ json = {file, root, error};
    const bool good = hf_parse_root_(&json, config);
    json_decref(root);
    if (!good) hf_config_free(config);
    return good;
}

static inline bool hf_config_read(const char *path, HfConfig *config, Error *error) {
    size_t bytes;
    *config = (HfConfig){0};
    char *text = file_read_whole(path, HF_CONFIG_MAX_BYTES, &bytes, error);
    const bool good = text != NULL && hf_config_parse(path, text, bytes, config, error);
    free(text);
    return good;
}

// ----------------------------------------------------------------------------
// Writing

// The family that computes what this configuration does. Mistral without its window is Llama.
static inline bool hf_config_family(const ModelConfig *m, HfFamily *family, Error *error) {
    const bool gpt2 = m->norm == NORM_LAYERNORM && m->position == POSITION_LEARNED && m->activation == ACTIVATION_GELU && m->bias == BIAS_ON &&
                      !m->qk_norm && m->kv_heads == m->heads && m->heads * m->head_size == m->channels;
    const bool llama = m->norm == NORM_RMSNORM && m->position == POSITION_ROPE && m->activation == ACTIVATION_SWIGLU;
    *family = HF_FAMILIES;
    if (gpt2) return *family = HF_GPT2, true;
    if (llama && !m->qk_norm) return *family = m->bias == BIAS_QKV ? HF_QWEN2 : HF_LLAMA, true;
    if (llama && m->bias == BIAS_OFF) return *family = HF_QWEN3, true;
    const OptionRow *rows = options_rows();
    char norm[32], position[32], activation[32], bias[32];
    return fail(error, CODE_USAGE,
                "--export-hf: norm %s, position %s, activation %s, bias %s, qk-norm %s, %lld heads of %lld for %lld channels: no model of "
                "transformers computes this (wanted that of gpt2, llama, qwen2 or qwen3)",
                options_choice_name(&rows[OPTION_norm], m->norm, norm), options_choice_name(&rows[OPTION_position], m->position, position),
                options_choice_name(&rows[OPTION_activation], m->activation, activation), options_choice_name(&rows[OPTION_bias], m->bias, bias),
                m->qk_norm ? "on" : "off", (long long)m->heads, (long long)m->head_size, (long long)m->channels);
}

static inline json_t *hf_gpt2_json_(const ModelConfig *m) {
    return json_pack("{s:I, s:I, s:I, s:I, s:I, s:f, s:s, s:f, s:f, s:f}", "n_layer", (json_int_t)m->layers, "n_embd", (json_int_t)m->channels,
                     "n_head", (json_int_t)m->heads, "n_positions", (json_int_t)m->max_seq, "n_inner", (json_int_t)m->ffn, "layer_norm_epsilon",
                     m->norm_eps, "activation_function", "gelu_new", "resid_pdrop", m->dropout, "embd_pdrop", m->dropout, "attn_pdrop", 0.0);
}

static inline json_t *hf_llama_json_(const ModelConfig *m, HfFamily family) {
    json_t *root =
        json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:f, s:s, s:f}", "num_hidden_layers", (json_int_t)m->layers, "hidden_size",
                  (json_int_t)m->channels, "num_attention_heads", (json_int_t)m->heads, "num_key_value_heads", (json_int_t)m->kv_heads, "head_dim",
                  (json_int_t)m->head_size, "intermediate_size", (json_int_t)m->ffn, "max_position_embeddings", (json_int_t)m->max_seq,
                  "rms_norm_eps", m->norm_eps, "rope_theta", m->rope_theta, "hidden_act", "silu", "attention_dropout", 0.0);
    const RopeScaling *rope = &m->rope_scaling;
    if (rope->factor > 0) {
        json_object_set_new(root, "rope_scaling",
                            json_pack("{s:s, s:f, s:f, s:f, s:I}", "rope_type", "llama3", "factor", rope->factor, "low_freq_factor",
                                      rope->low_freq_factor, "high_freq_factor", rope->high_freq_factor, "original_max_position_embeddings",
                                      (json_int_t)rope->original_seq));
    } else {
        json_object_set_new(root, "rope_scaling", json_null());
    }
    if (family == HF_LLAMA) json_object_set_new(root, "mlp_bias", json_boolean(m->bias == BIAS_ON));
    if (family != HF_QWEN2) json_object_set_new(root, "attention_bias", json_boolean(m->bias == BIAS_ON));
    if (family != HF_LLAMA) json_object_set_new(root, "use_sliding_window", json_false());
    return root;
}

// The text of an object with as few digits as tell its numbers apart (1e-05, not 1.0000000000000001e-05), to be freed by the caller.
static inline char *hf_json_text_(const json_t *root) {
    char *text = NULL;
    for (int digits = 6; digits <= 17; digits++) {
        free(text);
        text = json_dumps(root, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_REAL_PRECISION(digits));
        json_t *again = json_loads(text, 0, NULL);
        const bool same = json_equal(root, again) == 1;
        json_decref(again);
        if (same) break;
    }
    return text;
}

// The text of config.json, to be freed by the caller. ids: as in HfConfig; what is not in it is null.
static inline char *hf_config_text(const ModelConfig *m, HfFamily family, Dtype dtype, const json_t *ids) {
    static const char *const keys[] = {"bos_token_id", "eos_token_id", "pad_token_id"};
    json_t *root = family == HF_GPT2 ? hf_gpt2_json_(m) : hf_llama_json_(m, family);
    json_object_set_new(root, "architectures", json_pack("[s]", hf_family_rows_[family].architecture));
    json_object_set_new(root, "model_type", json_string(hf_family_rows_[family].model_type));
    json_object_set_new(root, "vocab_size", json_integer(m->vocab));
    json_object_set_new(root, "tie_word_embeddings", json_boolean(m->tied));
    json_object_set_new(root, "torch_dtype", json_string(dtype == DTYPE_BF16 ? "bfloat16" : "float32"));
    for (int i = 0; i < 3; i++) {
        json_t *value = json_object_get(ids, keys[i]);
        json_object_set_new(root, keys[i], value != NULL ? json_incref(value) : json_null());
    }
    char *text = hf_json_text_(root);
    json_decref(root);
    return text;
}

#endif
