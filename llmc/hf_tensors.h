// hf_tensors.h: the tensors of a Hugging Face directory by those of the tensor table. Names, transposes and joined tensors are rows of one
// table; a rank reads the ranges that its parts need, in F32, BF16 or F16, out of one file or of those of an index. Opening checks
// everything that headers tell; hf_export.h writes such directories.
#ifndef LLMC_HF_TENSORS_H
#define LLMC_HF_TENSORS_H

#include "llmc/base.h"        // Error, fail
#include "llmc/files.h"       // path_join, file_read_whole
#include "llmc/hf_config.h"   // HfConfig, HfFamily
#include "llmc/layout.h"      // Part, layout_global_element
#include "llmc/model.h"       // Model, Tensor, TensorKind
#include "llmc/precision.h"   // bf16_to_f32
#include "llmc/safetensors.h" // SafetensorsFile

enum { HF_INDEX_MAX_BYTES = 16 << 20 };
enum { HF_JOINED = 3 }; // tensors of the table in one of the files, at most

// ----------------------------------------------------------------------------
// The mapping

// A tensor in the files: `parts` of the table, the rows of one under those of the other. %d is the layer.
typedef struct {
    const char *name; // without the prefix that the whole model's tensors may have
    int parts;
    TensorKind kinds[HF_JOINED];
    bool transposed; // stored as [in, out]: GPT-2's "Conv1D"
    bool bare;       // has no prefix
} HfTensorRow_;

static const HfTensorRow_ hf_gpt2_rows_[] = {
    {"wte.weight", 1, {TENSOR_WTE}, false, false},
    {"wpe.weight", 1, {TENSOR_WPE}, false, false},
    {"h.%d.ln_1.weight", 1, {TENSOR_NORM1_WEIGHT}, false, false},
    {"h.%d.ln_1.bias", 1, {TENSOR_NORM1_BIAS}, false, false},
    {"h.%d.attn.c_attn.weight", 3, {TENSOR_Q_WEIGHT, TENSOR_K_WEIGHT, TENSOR_V_WEIGHT}, true, false},
    {"h.%d.attn.c_attn.bias", 3, {TENSOR_Q_BIAS, TENSOR_K_BIAS, TENSOR_V_BIAS}, false, false},
    {"h.%d.attn.c_proj.weight", 1, {TENSOR_O_WEIGHT}, true, false},
    {"h.%d.attn.c_proj.bias", 1, {TENSOR_O_BIAS}, false, false},
    {"h.%d.ln_2.weight", 1, {TENSOR_NORM2_WEIGHT}, false, false},
    {"h.%d.ln_2.bias", 1, {TENSOR_NORM2_BIAS}, false, false},
    {"h.%d.mlp.c_fc.weight", 1, {TENSOR_FC_WEIGHT}, true, false},
    {"h.%d.mlp.c_fc.bias", 1, {TENSOR_FC_BIAS}, false, false},
    {"h.%d.mlp.c_proj.weight", 1, {TENSOR_PROJ_WEIGHT}, true, false},
    {"h.%d.mlp.c_proj.bias", 1, {TENSOR_PROJ_BIAS}, false, false},
    {"ln_f.weight", 1, {TENSOR_NORM_WEIGHT}, false, false},
    {"ln_f.bias", 1, {TENSOR_NORM_BIAS}, false, false},
    {"lm_head.weight", 1, {TENSOR_HEAD}, false, true},
};

static const HfTensorRow_ hf_llama_rows_[] = {
    {"embed_tokens.weight", 1, {TENSOR_WTE}, false, false},
    {"layers.%d.input_layernorm.weight", 1, {TENSOR_NORM1_WEIGHT}, false, false},
    {"layers.%d.self_attn.q_proj.weight", 1, {TENSOR_Q_WEIGHT}, false, false},
    {"layers.%d.self_attn.k_proj.weight", 1, {TENSOR_K_WEIGHT}, false, false},
    {"layers.%d.self_attn.v_proj.weight", 1, {TENSOR_V_WEIGHT}, false, false},
    {"layers.%d.self_attn.q_proj.bias", 1, {TENSOR_Q_BIAS}, false, false},
    {"layers.%d.self_attn.k_proj.bias", 1, {TENSOR_K_BIAS}, false, false},
    {"layers.%d.self_attn.v_proj.bias", 1, {TENSOR_V_BIAS}, false, false},
    {"layers.%d.self_attn.q_norm.weight", 1, {TENSOR_Q_NORM}, false, false},
    {"layers.%d.self_attn.k_norm.weight", 1, {TENSOR_K_NORM}, false, false},
    {"layers.%d.self_attn.o_proj.weight", 1, {TENSOR_O_WEIGHT}, false, false},
    {"layers.%d.self_attn.o_proj.bias", 1, {TENSOR_O_BIAS}, false, false},
    {"layers.%d.post_attention_layernorm.weight", 1, {TENSOR_NORM2_WEIGHT}, false, false},
    {"layers.%d.mlp.gate_proj.weight", 1, {TENSOR_GATE_WEIGHT}, false, false},
    {"layers.%d.mlp.up_proj.weight", 1, {TENSOR_UP_WEIGHT}, false, false},
    {"layers.%d.mlp.gate_proj.bias", 1, {TENSOR_GATE_BIAS}, false, false},
    {"layers.%d.mlp.up_proj.bias", 1, {TENSOR_UP_BIAS}, false, false},
    {"layers.%d.mlp.down_proj.weight", 1, {TENSOR_DOWN_WEIGHT}, false, false},
    {"layers.%d.mlp.down_proj.bias", 1, {TENSOR_DOWN_BIAS}, false, false},
    {"norm.weight", 1, {TENSOR_NORM_WEIGHT}, false, false},
    {"lm_head.weight", 1, {TENSOR_HEAD}, false, true},
};

// What else files hold that is no parameter: names by their ends.
static const char *const hf_buffer_ends_[] = {".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"};

static inline const char *hf_prefix(HfFamily family) { return family == HF_GPT2 ? "transformer." : "model."; }

typedef struct {
    char name[96]; // in the files
    int parts;
    int tensor[HF_JOINED];  // in the table
    int64_t row[HF_JOINED]; // of the joined matrix [out, in] at which each begins
    bool transposed;
    int rank;
    int64_t shape[2]; // in the files; [n, 1] for rank 1
} HfTensor;

static inline HfTensor hf_tensor_(const Model *model, const HfTensorRow_ *row, const char *prefix, int64_t layer, int first) {
    HfTensor t = {.parts = row->parts, .transposed = row->transposed};
    char pattern[96];
    snprintf(pattern, sizeof pattern, "%s%s", row->bare ? "" : prefix, row->name);
    const char *number = strstr(pattern, "%d");
    if (number != NULL) {
        snprintf(t.name, sizeof t.name, "%.*s%lld%s", (int)(number - pattern), pattern, (long long)layer, number + 2);
    } else {
        snprintf(t.name, sizeof t.name, "%s", pattern);
    }
    int64_t rows = 0;
    for (int p = 0; p < row->parts; p++) {
        t.tensor[p] = first;
        while (model->tensors[t.tensor[p]].kind != row->kinds[p]) t.tensor[p]++;
        t.row[p] = rows;
        rows += model->tensors[t.tensor[p]].shape[0];
    }
    const Tensor *tensor = &model->tensors[t.tensor[0]];
    t.rank = tensor->rank;
    t.shape[0] = row->transposed ? tensor->shape[1] : rows;
    t.shape[1] = row->transposed ? rows : tensor->shape[1];
    return t;
}

// All tensors of a model as a family's files have them, in the order of the model; the caller frees them.
static inline HfTensor *hf_tensors(const Model *model, HfFamily family, const char *prefix, int *count) {
    const HfTensorRow_ *rows = family == HF_GPT2 ? hf_gpt2_rows_ : hf_llama_rows_;
    const int row_count = family == HF_GPT2 ? (int)(sizeof hf_gpt2_rows_ / sizeof *rows) : (int)(sizeof hf_llama_rows_ / sizeof *rows);
    HfTensor *tensors = base_new((size_t)model->count, sizeof *tensors);
    *count = 0;
    for (int first = 0, end; first < model->count; first = end) { // a unit
        const int unit = model->tensors[first].unit;
        for (end = first; end < model->count && model->tensors[end].unit == unit; end++) continue;
        for (int r = 0; r < row_count; r++) {
            int at = first;
            while (at < end && model->tensors[at].kind != rows[r].kinds[0]) at++;
            if (at < end) tensors[(*count)++] = hf_tensor_(model, &rows[r], prefix, unit - 1, first);
        }
    }
    return tensors;
}

// ----------------------------------------------------------------------------
// Opening

typedef struct {
    int tensor, part; // of HfModel.tensors
} HfPlace_;

typedef struct {
    char *directory;
    HfConfig config;
    const Model *model;
    HfTensor *tensors; // (count)
    int count;
    HfPlace_ *place;                  // (model->count)
    SafetensorsFile *files;           // (file_count)
    const SafetensorsTensor **stored; // (count) where tensors lie
    int *file_of;                     // (count)
    int file_count;
} HfModel;

static inline void hf_close(HfModel *hf) {
    for (int f = 0; f < hf->file_count; f++) safetensors_close(&hf->files[f]);
    free(hf->files);
    free(hf->stored);
    free(hf->file_of);
    free(hf->place);
    free(hf->tensors);
    free(hf->directory);
    hf_config_free(&hf->config);
    *hf = (HfModel){0};
}

static inline const SafetensorsTensor *hf_find_(const HfModel *hf, const char *name, int *file) {
    for (*file = 0; *file < hf->file_count; ++*file) {
        const SafetensorsTensor *found = safetensors_find(&hf->files[*file].index, name);
        if (found != NULL) return found;
    }
    return NULL;
}

static inline bool hf_open_file_(HfModel *hf, const char *name, Error *error) {
    for (int f = 0; f < hf->file_count; f++) {
        const char *open = strrchr(hf->files[f].path, '/') + 1;
        if (strcmp(open, name) == 0) return true;
    }
    const size_t length = strlen(name);
    if (strchr(name, '/') != NULL || name[0] == '.' || length < 13 || strcmp(name + length - 12, ".safetensors") != 0) {
        return fail(error, CODE_INPUT, "%s/model.safetensors.index.json: weight_map: got the file '%.200s', wanted NAME.safetensors", hf->directory,
                    name);
    }
    char *path = path_join(hf->directory, name);
    hf->files = base_grow(hf->files, (size_t)hf->file_count + 1, sizeof *hf->files);
    const bool good = safetensors_open(path, &hf->files[hf->file_count], error);
    hf->file_count += good;
    free(path);
    return good;
}

// What the index says of every tensor must be so, and it must name all there are. Its metadata.total_size is not looked at, by others neither:
// published ones count differently.
static inline bool hf_check_index_(HfModel *hf, const char *path, const json_t *root, Error *error) {
    const json_t *map = json_object_get(root, "weight_map");
    const char *name;
    json_t *file;
    if (!json_is_object(map)) return fail(error, CODE_INPUT, "%s: weight_map: wanted an object", path);
    json_object_foreach((json_t *)map, name, file) {
        if (!json_is_string(file)) return fail(error, CODE_INPUT, "%s: weight_map: '%.200s': wanted the name of a file", path, name);
        if (!hf_open_file_(hf, json_string_value(file), error)) return false;
    }
    for (int f = 0; f < hf->file_count; f++) {
        const SafetensorsIndex *index = &hf->files[f].index;
        for (size_t i = 0; i < index->count; i++) {
            const char *claim = json_string_value(json_object_get(map, index->tensors[i].name));
            const char *own = strrchr(hf->files[f].path, '/') + 1;
            if (claim == NULL || strcmp(claim, own) != 0) {
                return fail(error, CODE_INPUT, "%s: weight_map: '%.200s' is in %s, the index says %.200s", path, index->tensors[i].name, own,
                            claim != NULL ? claim : "nothing of it");
            }
        }
    }
    json_object_foreach((json_t *)map, name, file) {
        int at;
        if (hf_find_(hf, name, &at) == NULL) {
            return fail(error, CODE_INPUT, "%s: weight_map: '%.200s' is not in %.200s", path, name, json_string_value(file));
        }
    }
    return true;
}

// model.safetensors, or the files of model.safetensors.index.json.
static inline bool hf_open_files_(HfModel *hf, Error *error) {
    char *single = path_join(hf->directory, "model.safetensors"), *path = path_join(hf->directory, "model.safetensors.index.json");
    size_t bytes = 0;
    bool good;
    if (access(single, F_OK) == 0) {
        good = hf_open_file_(hf, "model.safetensors", error);
    } else if (access(path, F_OK) != 0) {
        good = fail(error, CODE_INPUT, "%s: has neither model.safetensors nor model.safetensors.index.json (other formats are not read)",
                    hf->directory);
    } else {
        char *text = file_read_whole(path, HF_INDEX_MAX_BYTES, &bytes, error);
        json_error_t reason;
        json_t *root = text != NULL ? json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &reason) : NULL;
        good = text != NULL && (root != NULL || fail(error, CODE_INPUT, "%s: line %d: %s", path, reason.line, reason.text)) &&
               hf_check_index_(hf, path, root, error);
        json_decref(root);
        free(text);
    }
    free(single);
    free(path);
    return good;
}

// Every parameter is there, in a shape and dtype that can be read.
static inline bool hf_match_(HfModel *hf, Error *error) {
    for (int i = 0; i < hf->count; i++) {
        const HfTensor *t = &hf->tensors[i];
        const SafetensorsTensor *s = hf->stored[i] = hf_find_(hf, t->name, &hf->file_of[i]);
        if (s == NULL) return fail(error, CODE_INPUT, "%s: tensor '%s' is missing", hf->directory, t->name);
        if (s->rank != t->rank || s->shape[0] != t->shape[0] || (t->rank == 2 && s->shape[1] != t->shape[1])) {
            char got[64] = "", wanted[64];
            for (int axis = 0; axis < s->rank && axis < 3; axis++) {
                snprintf(got + strlen(got), sizeof got - strlen(got), "%s%lld", axis > 0 ? ", " : "", (long long)s->shape[axis]);
            }
            snprintf(wanted, sizeof wanted, t->rank == 2 ? "%lld, %lld" : "%lld", (long long)t->shape[0], (long long)t->shape[1]);
            return fail(error, CODE_INPUT, "%s: tensor '%s': shape: got [%s], wanted [%s]", hf->files[hf->file_of[i]].path, t->name, got, wanted);
        }
        if (strcmp(s->type->name, "F32") != 0 && strcmp(s->type->name, "BF16") != 0 && strcmp(s->type->name, "F16") != 0) {
            return fail(error, CODE_INPUT, "%s: tensor '%s': dtype: got %s, wanted F32, BF16 or F16", hf->files[hf->file_of[i]].path, t->name,
                        s->type->name);
        }
    }
    return true;
}

static inline bool hf_is_buffer_(const char *name) {
    for (size_t i = 0; i < sizeof hf_buffer_ends_ / sizeof hf_buffer_ends_[0]; i++) {
        const size_t length = strlen(name), end = strlen(hf_buffer_ends_[i]);
        if (length > end && strcmp(name + length - end, hf_buffer_ends_[i]) == 0) return true;
    }
    return false;
}

// A tied head that is stored as well must be the embedding. Read by one rank only.
static inline bool hf_check_duplicate_(const HfModel *hf, const SafetensorsFile *file, const SafetensorsTensor *head, Error *error) {
    int at;
    const SafetensorsTensor *embedding = hf_find_(hf, hf->tensors[0].name, &at);
    bool same = head->type == embedding->type && head->rank == 2 && head->shape[0] == embedding->shape[0] && head->shape[1] == embedding->shape[1];
    char *a = base_new(FILES_CHUNK_BYTES, 1), *b = base_new(FILES_CHUNK_BYTES, 1);
    bool good = true;
    for (int64_t from = 0; good && same && from < head->bytes; from += FILES_CHUNK_BYTES) {
        const int64_t span = min_i64(FILES_CHUNK_BYTES, head->bytes - from);
        good = safetensors_read(file, head, from, span, a, error) && safetensors_read(&hf->files[at], embedding, from, span, b, error);
        same = good && memcmp(a, b, (size_t)span) == 0;
    }
    free(a);
    free(b);
    return good && (same || fail(error, CODE_INPUT, "%s: tensor '%s' is not the embedding '%s', and config.json says tie_word_embeddings",
                                 file->path, head->name, embedding->name));
}

// Nothing is there that would be left aside.
static inline bool hf_check_extra_(const HfModel *hf, bool compare, Error *error) {
    for (int f = 0; f < hf->file_count; f++) {
        const SafetensorsFile *file = &hf->files[f];
        for (size_t i = 0; i < file->index.count; i++) {
            const SafetensorsTensor *s = &file->index.tensors[i];
            bool known = hf_is_buffer_(s->name);
            for (int k = 0; !known && k < hf->count; k++) known = hf->stored[k] == s;
            if (!known && hf->model->config.tied && strcmp(s->name, "lm_head.weight") == 0) {
                if (compare && !hf_check_duplicate_(hf, file, s, error)) return false;
                known = true;
            }
            if (!known) return fail(error, CODE_INPUT, "%s: tensor '%.200s': is no parameter of this model", file->path, s->name);
        }
    }
    return true;
}

// Do tensors have the family's prefix?
static inline const char *hf_own_prefix_(const HfModel *hf) {
    const char *prefix = hf_prefix(hf->config.family);
    int file;
    return hf_find_(hf, hf->config.family == HF_GPT2 ? hf_gpt2_rows_[0].name : hf_llama_rows_[0].name, &file) != NULL ? "" : prefix;
}

// Reads the directory's config.json. To be given to hf_close(), whatever follows.
static inline bool hf_open_config(HfModel *hf, const char *directory, Error *error) {
    char *path = path_join(directory, "config.json");
    *hf = (HfModel){.directory = base_copy_text(directory)};
    const bool good = hf_config_read(path, &hf->config, error);
    free(path);
    return good;
}

// Then its tensors, for the model that config.json describes and which lives longer: all are there, and nothing else. `compare`: what is stored
// twice is read and compared (one rank does).
static inline bool hf_open(HfModel *hf, const Model *model, bool compare, Error *error) {
    hf->model = model;
    if (!hf_open_files_(hf, error)) return false;
    hf->tensors = hf_tensors(model, hf->config.family, hf_own_prefix_(hf), &hf->count);
    hf->stored = base_new((size_t)hf->count, sizeof *hf->stored);
    hf->file_of = base_new((size_t)hf->count, sizeof *hf->file_of);
    hf->place = base_new((size_t)model->count, sizeof *hf->place);
    for (int i = 0; i < hf->count; i++) {
        for (int p = 0; p < hf->tensors[i].parts; p++) hf->place[hf->tensors[i].tensor[p]] = (HfPlace_){i, p};
    }
    return hf_match_(hf, error) && hf_check_extra_(hf, compare, error);
}

// How a tensor of the table is stored.
static inline const SafetensorsType *hf_stored_type(const HfModel *hf, int tensor) { return hf->stored[hf->place[tensor].tensor]->type; }

// ----------------------------------------------------------------------------
// Reading

// IEEE half precision. Subnormals are multiples of 2^-24.
static inline float hf_f16_to_f32_(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = bits >> 10 & 31, fraction = bits & 1023;
    uint32_t wide = sign | (exponent + 112) << 23 | fraction << 13;
    float value;
    if (exponent == 31) wide = sign | 0x7f800000 | fraction << 13;
    memcpy(&value, &wide, 4);
    if (exponent == 0) value = (sign != 0 ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;
    return value;
}

static inline void hf_convert_(float *out, const void *in, const SafetensorsType *type, int64_t count) {
    if (type->bits == 32) {
        memcpy(out, in, (size_t)count * 4);
    } else if (strcmp(type->name, "BF16") == 0) {
        for (int64_t i = 0; i < count; i++) out[i] = bf16_to_f32(((const uint16_t *)in)[i]);
    } else {
        for (int64_t i = 0; i < count; i++) out[i] = hf_f16_to_f32_(((const uint16_t *)in)[i]);
    }
}

// out (count) = elements [from, from + count) of a stored tensor; chunk (FILES_CHUNK_BYTES)
static inline bool hf_read_run_(const HfModel *hf, int tensor, int64_t from, int64_t count, float *out, char *chunk, Error *error) {
    const SafetensorsTensor *s = hf->stored[tensor];
    const int64_t width = s->type->bits / 8;
    for (int64_t done = 0; done < count;) {
        const int64_t span = min_i64(count - done, FILES_CHUNK_BYTES / width);
        if (!safetensors_read(&hf->files[hf->file_of[tensor]], s, (from + done) * width, span * width, chunk, error)) return false;
        hf_convert_(out + done, chunk, s->type, span);
        done += span;
    }
    return true;
}

// The same for a box of a matrix that is stored transposed: a column of the part is a run of the file. column (rows of the part)
static inline bool hf_read_transposed_(const HfModel *hf, const HfTensor *t, int64_t row, int tensor, const Part *part, int64_t from, int64_t to,
                                       float *out, float *column, char *chunk, Error *error) {
    const int64_t width = part->shape[1], first = from / width, last = ceil_div(to, width);
    for (int64_t c = 0; c < width; c++) {
        const int64_t at = (part->begin[1] + c) * t->shape[1] + row + part->begin[0] + first;
        if (!hf_read_run_(hf, tensor, at, last - first, column, chunk, error)) return false;
        for (int64_t r = first; r < last; r++) {
            const int64_t element = r * width + c;
            if (element >= from && element < to) out[element - from] = column[r - first];
        }
    }
    return true;
}

// out (to - from) = elements [from, to) of a part of a tensor of the table.
static inline bool hf_read(const HfModel *hf, int tensor, const Part *part, int64_t from, int64_t to, float *out, Error *error) {
    const HfPlace_ place = hf->place[tensor];
    const HfTensor *t = &hf->tensors[place.tensor];
    const Tensor *own = &hf->model->tensors[tensor];
    const int64_t row = t->row[place.part];
    char *chunk = base_new(FILES_CHUNK_BYTES, 1);
    bool good = true;
    if (t->transposed) {
        float *column = base_new((size_t)part->shape[0], sizeof *column);
        good = hf_read_transposed_(hf, t, row, place.tensor, part, from, to, out, column, chunk, error);
        free(column);
    } else {
        for (int64_t at = from, run; good && at < to; at += run) {
            const int64_t element = layout_global_element(own, part, at, to - at, &run);
            good = hf_read_run_(hf, place.tensor, row * own->shape[1] + element, run, out + (at - from), chunk, error);
        }
    }
    free(chunk);
    return good;
}

#endif
