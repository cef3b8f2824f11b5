// manifest.h: a checkpoint's manifest.json: its text from structures, structures from hostile text, and the comparison of
// the model and flags in it with those of this run. Works on memory and is fuzzed; touches no file (checkpoint.h does).
//
//   {format, version, step, tokens, optimizer_steps, model, flags, data: {seed, epoch, position, row, files: [{path, tokens}]},
//    rng: {kind, seed}, scaler: null, tensors: {NAME: {dtype, shape, slices: [{file, box: [[begin, end] per axis],
//    range: [from, to)}]}}, files: {FILE: {bytes, xxh3}}, xxh3}
// A slice is the tensor NAME in FILE: the elements [from, to) of the box, in the box's row-major order. Slices tile their
// tensor. The last member seals the text: the XXH3-128 of every byte before its line.
#ifndef LLMC_MANIFEST_H
#define LLMC_MANIFEST_H

#include "llmc/base.h"        // Error, fail
#include "llmc/files.h"       // files_hash_text, FILES_HASH_CHARS
#include "llmc/model.h"       // ModelConfig
#include "llmc/options.h"     // Options, options_text
#include "llmc/safetensors.h" // SafetensorsType, json_*

#define MANIFEST_FORMAT "train_gpt checkpoint"
#define MANIFEST_RNG "philox4x32-10"
enum { MANIFEST_VERSION = 1 };
enum { MANIFEST_MAX_BYTES = 256 << 20 };
enum { MANIFEST_MAX_RANK = 2 };

// A file of tokens, as the run saw it: order and sizes decide what a position means.
typedef struct {
    const char *path;
    int64_t tokens;
} CheckpointDataFile;

// What a run needs besides tensors to go on where it stopped.
typedef struct {
    int64_t step;            // of the trainer; updates that were skipped count
    int64_t tokens;          // trained on so far
    int64_t optimizer_steps; // updates applied
    int64_t seed;
    int64_t epoch, position, row;         // of the loader (loader.h)
    const CheckpointDataFile *data_files; // (data_file_count)
    int64_t data_file_count;
    json_t *model; // checkpoint_model_json()
    json_t *flags; // checkpoint_flags_json()
} CheckpointState;

typedef struct {
    int file;                                                 // index in the manifest's files
    int64_t begin[MANIFEST_MAX_RANK], end[MANIFEST_MAX_RANK]; // the box; axis 1 is [0, 1) in tensors of rank 1
    int64_t from, to;
} ManifestSlice;

typedef struct {
    const char *name;
    const SafetensorsType *type;
    int rank;                         // 1 or 2
    int64_t shape[MANIFEST_MAX_RANK]; // [n, 1] for rank 1
    ManifestSlice *slices;            // sorted by file
    int64_t slice_count;
} ManifestTensor;

typedef struct {
    const char *name;
    int64_t bytes;
    char xxh3[FILES_HASH_CHARS];
} ManifestFile;

typedef struct {
    CheckpointState state;
    ManifestTensor *tensors; // sorted by name
    int64_t tensor_count;
    ManifestFile *files; // sorted by name
    int64_t file_count;
    json_t *root; // owns the texts that the structures point to
} Manifest;

static inline void manifest_free(Manifest *manifest) {
    for (int64_t i = 0; i < manifest->tensor_count; i++) free(manifest->tensors[i].slices);
    free(manifest->tensors);
    free(manifest->files);
    free((void *)manifest->state.data_files);
    json_decref(manifest->root);
    *manifest = (Manifest){0};
}

static inline int manifest_tensor_order_(const void *a, const void *b) {
    return strcmp(((const ManifestTensor *)a)->name, ((const ManifestTensor *)b)->name);
}
static inline int manifest_file_order_(const void *a, const void *b) {
    return strcmp(((const ManifestFile *)a)->name, ((const ManifestFile *)b)->name);
}

// NULL when there is none of that name.
static inline const ManifestTensor *manifest_tensor(const Manifest *manifest, const char *name) {
    const ManifestTensor key = {.name = name};
    return manifest->tensor_count == 0 ? NULL
                                       : bsearch(&key, manifest->tensors, (size_t)manifest->tensor_count, sizeof key, manifest_tensor_order_);
}

// ----------------------------------------------------------------------------
// Model and flags

// Text for JSON: bytes that are not UTF-8 (in paths) become '?'.
static inline json_t *manifest_text_json_(const char *text) {
    json_t *value = json_string(text);
    if (value != NULL) return value;
    char *copy = base_copy_text(text);
    for (char *c = copy; *c != '\0'; c++) {
        if ((unsigned char)*c >= 0x80) *c = '?';
    }
    value = json_string(copy);
    free(copy);
    return value;
}

typedef enum { MANIFEST_INT, MANIFEST_CHOICE, MANIFEST_BOOL, MANIFEST_REAL } ManifestFieldKind_;
typedef struct {
    const char *name;
    ManifestFieldKind_ kind;
    size_t offset;
    int option;    // whose choices name the value; also the flag named in messages
    bool compared; // decides what the weights mean
    bool optional; // 0 where it is missing: files of older versions
} ManifestField_;

// The model's fields by name. Dropout is a setting of training: it is recorded, and may change.
static inline const ManifestField_ *manifest_fields_(size_t *count) {
    static const ManifestField_ fields[] = {
        {"layers", MANIFEST_INT, offsetof(ModelConfig, layers), OPTION_layers, true, false},
        {"channels", MANIFEST_INT, offsetof(ModelConfig, channels), OPTION_channels, true, false},
        {"heads", MANIFEST_INT, offsetof(ModelConfig, heads), OPTION_heads, true, false},
        {"kv_heads", MANIFEST_INT, offsetof(ModelConfig, kv_heads), OPTION_kv_heads, true, false},
        {"head_size", MANIFEST_INT, offsetof(ModelConfig, head_size), OPTION_head_size, true, false},
        {"ffn", MANIFEST_INT, offsetof(ModelConfig, ffn), OPTION_ffn, true, false},
        {"vocab", MANIFEST_INT, offsetof(ModelConfig, vocab), OPTION_vocab, true, false},
        {"norm", MANIFEST_CHOICE, offsetof(ModelConfig, norm), OPTION_norm, true, false},
        {"position", MANIFEST_CHOICE, offsetof(ModelConfig, position), OPTION_position, true, false},
        {"activation", MANIFEST_CHOICE, offsetof(ModelConfig, activation), OPTION_activation, true, false},
        {"bias", MANIFEST_CHOICE, offsetof(ModelConfig, bias), OPTION_bias, true, false},
        {"tied", MANIFEST_BOOL, offsetof(ModelConfig, tied), OPTION_tied, true, false},
        {"qk_norm", MANIFEST_BOOL, offsetof(ModelConfig, qk_norm), OPTION_qk_norm, true, false},
        {"max_seq", MANIFEST_INT, offsetof(ModelConfig, max_seq), OPTION_seq, true, false},
        {"norm_eps", MANIFEST_REAL, offsetof(ModelConfig, norm_eps), OPTION_norm_eps, true, false},
        {"rope_theta", MANIFEST_REAL, offsetof(ModelConfig, rope_theta), OPTION_rope_theta, true, false},
        {"rope_factor", MANIFEST_REAL, offsetof(ModelConfig, rope_scaling.factor), OPTION_rope_theta, true, true},
        {"rope_low_freq_factor", MANIFEST_REAL, offsetof(ModelConfig, rope_scaling.low_freq_factor), OPTION_rope_theta, true, true},
        {"rope_high_freq_factor", MANIFEST_REAL, offsetof(ModelConfig, rope_scaling.high_freq_factor), OPTION_rope_theta, true, true},
        {"rope_original_seq", MANIFEST_INT, offsetof(ModelConfig, rope_scaling.original_seq), OPTION_rope_theta, true, true},
        {"dropout", MANIFEST_REAL, offsetof(ModelConfig, dropout), OPTION_dropout, false, false},
    };
    *count = sizeof fields / sizeof fields[0];
    return fields;
}

static inline json_t *manifest_field_json_(const ManifestField_ *field, const ModelConfig *config) {
    const void *at = (const char *)config + field->offset;
    char name[32];
    switch (field->kind) {
    case MANIFEST_INT: return json_integer(*(const int64_t *)at);
    case MANIFEST_CHOICE: return json_string(options_choice_name(&options_rows()[field->option], *(const int *)at, name));
    case MANIFEST_BOOL: return json_boolean(*(const bool *)at);
    case MANIFEST_REAL: return json_real(*(const double *)at);
    }
    return NULL;
}

static inline json_t *checkpoint_model_json(const ModelConfig *config) {
    size_t count;
    const ManifestField_ *fields = manifest_fields_(&count);
    json_t *model = json_object();
    for (size_t i = 0; i < count; i++) json_object_set_new(model, fields[i].name, manifest_field_json_(&fields[i], config));
    return model;
}

// Refuses another model than `wanted`, naming the first field that differs and both values. `where` is the checkpoint.
static inline bool checkpoint_model_check(const char *where, const json_t *model, const ModelConfig *wanted, Error *error) {
    size_t count;
    const ManifestField_ *fields = manifest_fields_(&count);
    bool good = true;
    for (size_t i = 0; good && i < count; i++) {
        // Only learned positions make the length part of the weights; only rotary ones use theta.
        if (!fields[i].compared || (strcmp(fields[i].name, "max_seq") == 0 && wanted->position != POSITION_LEARNED) ||
            (strncmp(fields[i].name, "rope_", 5) == 0 && wanted->position != POSITION_ROPE)) {
            continue;
        }
        json_t *want = manifest_field_json_(&fields[i], wanted);
        const json_t *got = json_object_get(model, fields[i].name);
        const bool none = got == NULL && fields[i].optional && json_number_value(want) == 0;
        if (!none && (got == NULL || !json_equal(got, want))) {
            char *got_text = got != NULL ? json_dumps(got, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
            char *want_text = json_dumps(want, JSON_ENCODE_ANY | JSON_COMPACT);
            good = fail(error, CODE_USAGE, "%s: model.%s: got %.100s in the checkpoint, wanted %.100s by the flags (--%s, --model)", where,
                        fields[i].name, got_text != NULL ? got_text : "nothing", want_text != NULL ? want_text : "?",
                        options_rows()[fields[i].option].flag);
            free(got_text);
            free(want_text);
        }
        json_decref(want);
    }
    return good;
}

// A field's value from a manifest; false when it is none that the field's flag could have.
static inline bool manifest_field_parse_(const ManifestField_ *field, const json_t *value, ModelConfig *config) {
    const OptionRow *row = &options_rows()[field->option];
    void *at = (char *)config + field->offset;
    switch (field->kind) {
    case MANIFEST_INT:
        *(int64_t *)at = json_integer_value(value);
        return json_is_integer(value) && (field->optional || ((double)json_integer_value(value) >= row->low)) &&
               (double)json_integer_value(value) <= row->high && json_integer_value(value) >= 0;
    case MANIFEST_CHOICE: return json_is_string(value) && (*(int *)at = options_choice_(row->choices, json_string_value(value))) >= 0;
    case MANIFEST_BOOL: *(bool *)at = json_is_true(value); return json_is_boolean(value);
    case MANIFEST_REAL:
        *(double *)at = json_number_value(value);
        return json_is_number(value) && json_number_value(value) <= row->high && json_number_value(value) >= (field->optional ? 0 : row->low);
    }
    return false;
}

// The model that a manifest tells of.
static inline bool checkpoint_model_config(const char *where, const json_t *model, ModelConfig *config, Error *error) {
    size_t count;
    const ManifestField_ *fields = manifest_fields_(&count);
    *config = (ModelConfig){0};
    for (size_t i = 0; i < count; i++) {
        const json_t *value = json_object_get(model, fields[i].name);
        if ((value != NULL || !fields[i].optional) && !manifest_field_parse_(&fields[i], value, config)) {
            return fail(error, CODE_INPUT, "%s: model.%s: got no value that --%s could have", where, fields[i].name,
                        options_rows()[fields[i].option].flag);
        }
    }
    const RopeScaling *rope = &config->rope_scaling;
    const bool scaled = rope->factor == 0 || (rope->low_freq_factor < rope->high_freq_factor && rope->original_seq > 0);
    return (scaled && config->heads % config->kv_heads == 0) || fail(error, CODE_INPUT, "%s: model: heads or rope scaling do not fit", where);
}

// Every flag that has a value, as text.
static inline json_t *checkpoint_flags_json(const Options *options) {
    json_t *flags = json_object();
    char buffer[64];
    for (int i = 0; i < OPTION_COUNT; i++) {
        const char *text = options_text(options, i, buffer);
        if (text[0] != '\0') json_object_set_new(flags, options_rows()[i].flag, manifest_text_json_(text));
    }
    return flags;
}

// Refuses when one of the flags in which[] (OPTION_*) has another value than in the checkpoint: those that decide what a
// data position means, so that going on from it would train on other sequences than the run would have.
static inline bool checkpoint_flags_check(const char *where, const json_t *flags, const Options *options, const int *which, int count,
                                          Error *error) {
    Options defaults; // of a flag that did not exist yet
    bool good = true;
    options_defaults(&defaults);
    for (int i = 0; good && i < count; i++) {
        char buffer[64], fallback[64];
        const char *flag = options_rows()[which[i]].flag, *want = options_text(options, which[i], buffer);
        const char *got = json_string_value(json_object_get(flags, flag));
        if (got == NULL) got = options_text(&defaults, which[i], fallback);
        if (strcmp(got, want) == 0) continue;
        good = fail(error, CODE_USAGE, "--%s: got '%.200s', the checkpoint %s was made with '%.200s'", flag, want, where, got);
    }
    options_free(&defaults);
    return good;
}

// Refuses other token files than the checkpoint's: number, order and sizes; the paths may have moved.
static inline bool checkpoint_data_check(const char *where, const CheckpointState *state, const CheckpointDataFile *files, int64_t count,
                                         Error *error) {
    if (count != state->data_file_count) {
        return fail(error, CODE_USAGE, "--train: got %lld token files, the checkpoint %s was made with %lld", (long long)count, where,
                    (long long)state->data_file_count);
    }
    for (int64_t i = 0; i < count; i++) {
        if (files[i].tokens != state->data_files[i].tokens) {
            return fail(error, CODE_USAGE, "--train: %s: got %lld tokens, the checkpoint %s was made with %lld (%s)", files[i].path,
                        (long long)files[i].tokens, where, (long long)state->data_files[i].tokens, state->data_files[i].path);
        }
    }
    return true;
}

// ----------------------------------------------------------------------------
// Structures -> text

static inline json_t *manifest_tensor_json_(const ManifestTensor *tensor, const ManifestFile *files) {
    json_t *shape = json_array(), *slices = json_array();
    for (int axis = 0; axis < tensor->rank; axis++) json_array_append_new(shape, json_integer(tensor->shape[axis]));
    for (int64_t i = 0; i < tensor->slice_count; i++) {
        const ManifestSlice *slice = &tensor->slices[i];
        json_t *box = json_array();
        for (int axis = 0; axis < tensor->rank; axis++) {
            json_array_append_new(box, json_pack("[I, I]", (json_int_t)slice->begin[axis], (json_int_t)slice->end[axis]));
        }
        json_array_append_new(slices, json_pack("{s:s, s:o, s:[I, I]}", "file", files[slice->file].name, "box", box, "range",
                                                (json_int_t)slice->from, (json_int_t)slice->to));
    }
    return json_pack("{s:s, s:o, s:o}", "dtype", tensor->type->name, "shape", shape, "slices", slices);
}

// The last lines: `hash` is that of all before.
static inline void manifest_seal_(const char *text, size_t bytes, char seal[64]) {
    char hash[FILES_HASH_CHARS];
    files_hash_text(XXH3_128bits(text, bytes), hash);
    snprintf(seal, 64, ",\n\"xxh3\": \"%s\"\n}\n", hash);
}

// The text of a manifest (tensors and files in any order), a line per tensor; to be freed by the caller. NULL when a text is not UTF-8.
static inline char *manifest_text(const Manifest *manifest) {
    const CheckpointState *state = &manifest->state;
    json_t *files = json_array(), *tensors = json_object(), *sizes = json_object();
    for (int64_t i = 0; i < state->data_file_count; i++) {
        json_array_append_new(files, json_pack("{s:o, s:I}", "path", manifest_text_json_(state->data_files[i].path), "tokens",
                                               (json_int_t)state->data_files[i].tokens));
    }
    bool good = true;
    for (int64_t i = 0; i < manifest->tensor_count; i++) {
        json_t *tensor = manifest_tensor_json_(&manifest->tensors[i], manifest->files);
        if (json_object_set_new(tensors, manifest->tensors[i].name, tensor) != 0) good = false;
    }
    for (int64_t i = 0; i < manifest->file_count; i++) {
        const ManifestFile *file = &manifest->files[i];
        json_t *size = json_pack("{s:I, s:s}", "bytes", (json_int_t)file->bytes, "xxh3", file->xxh3);
        if (json_object_set_new(sizes, file->name, size) != 0) good = false;
    }
    json_t *root =
        json_pack("{s:s, s:i, s:I, s:I, s:I, s:O, s:O, s:{s:I, s:I, s:I, s:I, s:o}, s:{s:s, s:I}, s:n, s:o, s:o}", "format", MANIFEST_FORMAT,
                  "version", MANIFEST_VERSION, "step", (json_int_t)state->step, "tokens", (json_int_t)state->tokens, "optimizer_steps",
                  (json_int_t)state->optimizer_steps, "model", state->model, "flags", state->flags, "data", "seed", (json_int_t)state->seed,
                  "epoch", (json_int_t)state->epoch, "position", (json_int_t)state->position, "row", (json_int_t)state->row, "files", files, "rng",
                  "kind", MANIFEST_RNG, "seed", (json_int_t)state->seed, "scaler", "tensors", tensors, "files", sizes);
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = good && root != NULL ? open_memstream(&text, &bytes) : NULL;
    if (out == NULL) {
        json_decref(root);
        return NULL;
    }
    const char *key, *separator = "{\n";
    json_t *value;
    json_object_foreach(root, key, value) {
        const bool lines = strcmp(key, "tensors") == 0 || strcmp(key, "files") == 0;
        fprintf(out, "%s\"%s\": ", separator, key); // keys of the root need no escapes
        if (lines) {
            const char *name, *between = "{\n ";
            json_t *entry;
            json_object_foreach(value, name, entry) {
                json_t *quoted = json_string(name);
                fputs(between, out);
                json_dumpf(quoted, out, JSON_ENCODE_ANY);
                fputs(": ", out);
                json_dumpf(entry, out, JSON_COMPACT);
                json_decref(quoted);
                between = ",\n ";
            }
            fputs(json_object_size(value) > 0 ? "}" : "{}", out);
        } else {
            json_dumpf(value, out, JSON_ENCODE_ANY);
        }
        separator = ",\n";
    }
    json_decref(root);
    good = fflush(out) == 0;
    if (good) {
        char seal[64];
        manifest_seal_(text, bytes, seal);
        fputs(seal, out);
    }
    good = !ferror(out) && good;
    if (fclose(out) != 0 || !good) {
        free(text);
        return NULL;
    }
    return text;
}

// ----------------------------------------------------------------------------
// Text -> structures

// Refuses a text whose seal does not fit: truncated, damaged, edited, or something else.
static inline bool manifest_check_seal(const char *file, const char *text, size_t bytes, Error *error) {
    char seal[64] = "";
    manifest_seal_("", 0, seal);
    const size_t length = strlen(seal);
    if (bytes >= length) manifest_seal_(text, bytes - length, seal);
    if (bytes < length || memcmp(text + bytes - length, seal, length) != 0) {
        return fail(error, CODE_INPUT,
                    "%s: %zu bytes that do not end with their checksum: truncated, damaged or edited, or not a checkpoint of train_gpt", file,
                    bytes);
    }
    return true;
}

static inline bool manifest_int_(const char *file, const json_t *object, const char *path, const char *key, int64_t low, int64_t high, int64_t *out,
                                 Error *error) {
    const json_t *value = json_object_get(object, key);
    *out = json_integer_value(value);
    if (json_is_integer(value) && *out >= low && *out <= high) return true;
    return fail(error, CODE_INPUT, "%s: %s%s: %s %lld, wanted a whole number from %lld to %lld", file, path, key,
                json_is_integer(value) ? "got" : "missing or not an integer;", (long long)*out, (long long)low, (long long)high);
}

// [from, to) inside [0, limit), not empty.
static inline bool manifest_range_(const json_t *pair, int64_t limit, int64_t *from, int64_t *to) {
    const json_t *a = json_array_get(pair, 0), *b = json_array_get(pair, 1);
    if (json_array_size(pair) != 2 || !json_is_integer(a) || !json_is_integer(b)) return false;
    *from = json_integer_value(a);
    *to = json_integer_value(b);
    return *from >= 0 && *from < *to && *to <= limit;
}

// A plain name: a path in a manifest must not lead out of the checkpoint's directory.
static inline bool manifest_name_good_(const char *name) {
    const size_t length = strlen(name);
    if (length == 0 || length > 100 || name[0] == '.') return false;
    return strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == length;
}

static inline bool manifest_parse_files_(const char *file, const json_t *files, Manifest *manifest, Error *error) {
    if (!json_is_object(files) || json_object_size(files) == 0) return fail(error, CODE_INPUT, "%s: files: wanted an object with entries", file);
    manifest->files = base_new(json_object_size(files), sizeof *manifest->files);
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)files, name, value) {
        ManifestFile *entry = &manifest->files[manifest->file_count];
        if (!manifest_name_good_(name)) {
            return fail(error, CODE_INPUT, "%s: files: got the name '%.120s', wanted up to 100 of [A-Za-z0-9._-], not starting with '.'", file,
                        name);
        }
        char path[160];
        snprintf(path, sizeof path, "files.%s.", name);
        const char *hash = json_string_value(json_object_get(value, "xxh3"));
        if (!manifest_int_(file, value, path, "bytes", 0, INT64_MAX, &entry->bytes, error)) return false;
        if (hash == NULL || strlen(hash) != FILES_HASH_CHARS - 1 || strspn(hash, "0123456789abcdef") != FILES_HASH_CHARS - 1) {
            return fail(error, CODE_INPUT, "%s: %sxxh3: wanted 32 hexadecimal digits", file, path);
        }
        entry->name = name;
        memcpy(entry->xxh3, hash, FILES_HASH_CHARS);
        manifest->file_count++;
    }
    qsort(manifest->files, (size_t)manifest->file_count, sizeof *manifest->files, manifest_file_order_);
    return true;
}

// A corner of a rectangle, with the sign that it has in the rectangle's second difference.
typedef struct {
    int64_t row, column;
    int sign;
} ManifestCorner_;

static inline int manifest_corner_order_(const void *a, const void *b) {
    const ManifestCorner_ *x = a, *y = b;
    if (x->row != y->row) return x->row < y->row ? -1 : 1;
    return (x->column > y->column) - (x->column < y->column);
}

static inline void manifest_rectangle_(ManifestCorner_ *corners, int64_t *count, int64_t row, int64_t row_end, int64_t column, int64_t column_end,
                                       int sign) {
    if (row >= row_end || column >= column_end) return;
    corners[(*count)++] = (ManifestCorner_){row, column, sign};
    corners[(*count)++] = (ManifestCorner_){row, column_end, -sign};
    corners[(*count)++] = (ManifestCorner_){row_end, column, -sign};
    corners[(*count)++] = (ManifestCorner_){row_end, column_end, sign};
}

// Slices must cover every element once. A slice is up to three rectangles (a partial row, whole rows, a partial row). The
// sum of rectangles equals the whole exactly when their second differences, +1 and -1 at the corners, do: no bitmap and no
// comparison of pairs is needed. At the first corner (row by row) where they differ, the excess tells how often the element
// there is covered too much.
static inline bool manifest_check_cover_(const char *file, const ManifestTensor *tensor, Error *error) {
    ManifestCorner_ *corners = base_new((size_t)tensor->slice_count * 12 + 4, sizeof *corners);
    int64_t count = 0;
    manifest_rectangle_(corners, &count, 0, tensor->shape[0], 0, tensor->shape[1], -1);
    for (int64_t i = 0; i < tensor->slice_count; i++) {
        const ManifestSlice *s = &tensor->slices[i];
        const int64_t width = s->end[1] - s->begin[1], first = s->begin[0] + s->from / width, last = s->begin[0] + s->to / width;
        const int64_t head = s->begin[1] + s->from % width, tail = s->begin[1] + s->to % width;
        if (first == last) { // inside one row
            manifest_rectangle_(corners, &count, first, first + 1, head, tail, 1);
            continue;
        }
        manifest_rectangle_(corners, &count, first, first + 1, head, s->end[1], 1);
        manifest_rectangle_(corners, &count, first + 1, last, s->begin[1], s->end[1], 1);
        manifest_rectangle_(corners, &count, last, last + 1, s->begin[1], tail, 1);
    }
    qsort(corners, (size_t)count, sizeof *corners, manifest_corner_order_);
    bool good = true;
    for (int64_t i = 0; good && i < count;) {
        const ManifestCorner_ at = corners[i];
        int64_t excess = 0;
        for (; i < count && corners[i].row == at.row && corners[i].column == at.column; i++) excess += corners[i].sign;
        if (excess != 0) {
            good = fail(error, CODE_INPUT, "%s: tensors.%.100s.slices: element [%lld, %lld] is in %lld slices, wanted 1", file, tensor->name,
                        (long long)at.row, (long long)at.column, (long long)excess + 1);
        }
    }
    free(corners);
    return good;
}

static inline int manifest_slice_order_(const void *a, const void *b) {
    const ManifestSlice *x = a, *y = b;
    return (x->file > y->file) - (x->file < y->file);
}

static inline bool manifest_parse_slices_(const char *file, const Manifest *manifest, const json_t *slices, ManifestTensor *tensor, Error *error) {
    if (!json_is_array(slices) || json_array_size(slices) == 0) {
        return fail(error, CODE_INPUT, "%s: tensors.%.100s.slices: wanted a list with entries", file, tensor->name);
    }
    const size_t count = json_array_size(slices);
    tensor->slices = base_new(count, sizeof *tensor->slices);
    for (size_t i = 0; i < count; i++) {
        const json_t *value = json_array_get(slices, i), *box = json_object_get(value, "box");
        ManifestSlice *slice = &tensor->slices[tensor->slice_count++];
        *slice = (ManifestSlice){.end = {1, 1}};
        const char *name = json_string_value(json_object_get(value, "file"));
        const ManifestFile key = {.name = name}, *found = NULL;
        if (name != NULL) found = bsearch(&key, manifest->files, (size_t)manifest->file_count, sizeof key, manifest_file_order_);
        if (found == NULL) {
            return fail(error, CODE_INPUT, "%s: tensors.%.100s.slices[%zu].file: got '%.100s', wanted a name from files", file, tensor->name, i,
                        name != NULL ? name : "nothing");
        }
        slice->file = (int)(found - manifest->files);
        bool good = json_array_size(box) == (size_t)tensor->rank;
        for (int axis = 0; good && axis < tensor->rank; axis++) {
            good = manifest_range_(json_array_get(box, (size_t)axis), tensor->shape[axis], &slice->begin[axis], &slice->end[axis]);
        }
        if (!good) {
            return fail(error, CODE_INPUT, "%s: tensors.%.100s.slices[%zu].box: wanted [begin, end] for each axis, inside the shape", file,
                        tensor->name, i);
        }
        const int64_t elements = (slice->end[0] - slice->begin[0]) * (slice->end[1] - slice->begin[1]); // at most the tensor's, which fits
        if (!manifest_range_(json_object_get(value, "range"), elements, &slice->from, &slice->to)) {
            return fail(error, CODE_INPUT, "%s: tensors.%.100s.slices[%zu].range: wanted [from, to) inside the box's %lld elements", file,
                        tensor->name, i, (long long)elements);
        }
    }
    qsort(tensor->slices, count, sizeof *tensor->slices, manifest_slice_order_);
    for (size_t i = 1; i < count; i++) {
        if (tensor->slices[i].file == tensor->slices[i - 1].file) {
            return fail(error, CODE_INPUT, "%s: tensors.%.100s.slices: two of them in %s, wanted at most one in a file", file, tensor->name,
                        manifest->files[tensor->slices[i].file].name);
        }
    }
    return manifest_check_cover_(file, tensor, error);
}

static inline bool manifest_parse_tensors_(const char *file, const json_t *tensors, Manifest *manifest, Error *error) {
    if (!json_is_object(tensors)) return fail(error, CODE_INPUT, "%s: tensors: wanted an object", file);
    manifest->tensors = base_new(json_object_size(tensors), sizeof *manifest->tensors);
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)tensors, name, value) {
        ManifestTensor *tensor = &manifest->tensors[manifest->tensor_count++];
        *tensor = (ManifestTensor){.name = name, .shape = {1, 1}};
        const char *dtype = json_string_value(json_object_get(value, "dtype"));
        const json_t *shape = json_object_get(value, "shape");
        tensor->type = dtype != NULL ? safetensors_type(dtype) : NULL;
        if (tensor->type == NULL) {
            return fail(error, CODE_INPUT, "%s: tensors.%.100s.dtype: got '%.40s', wanted a safetensors type", file, name,
                        dtype != NULL ? dtype : "nothing");
        }
        tensor->rank = (int)min_i64((int64_t)json_array_size(shape), MANIFEST_MAX_RANK + 1);
        bool good = tensor->rank >= 1 && tensor->rank <= MANIFEST_MAX_RANK;
        for (int axis = 0; good && axis < tensor->rank; axis++) {
            const json_t *length = json_array_get(shape, (size_t)axis);
            tensor->shape[axis] = json_integer_value(length);
            good = json_is_integer(length) && tensor->shape[axis] > 0;
        }
        int64_t elements, bytes;
        if (!good || !safetensors_size(tensor->type, 2, tensor->shape, &elements, &bytes)) {
            return fail(error, CODE_INPUT, "%s: tensors.%.100s.shape: wanted 1 or 2 lengths from 1, a size that fits 63 bits", file, name);
        }
        if (!manifest_parse_slices_(file, manifest, json_object_get(value, "slices"), tensor, error)) return false;
    }
    if (manifest->tensor_count > 0) qsort(manifest->tensors, (size_t)manifest->tensor_count, sizeof *manifest->tensors, manifest_tensor_order_);
    return true;
}

static inline bool manifest_parse_state_(const char *file, const json_t *root, CheckpointState *state, Error *error) {
    const json_t *data = json_object_get(root, "data"), *rng = json_object_get(root, "rng"), *files = json_object_get(data, "files");
    const char *kind = json_string_value(json_object_get(rng, "kind"));
    int64_t rng_seed = 0;
    state->model = json_object_get(root, "model");
    state->flags = json_object_get(root, "flags");
    if (!json_is_object(state->model)) return fail(error, CODE_INPUT, "%s: model: wanted an object", file);
    if (!json_is_object(state->flags)) return fail(error, CODE_INPUT, "%s: flags: wanted an object", file);
    if (kind == NULL || strcmp(kind, MANIFEST_RNG) != 0) {
        return fail(error, CODE_INPUT, "%s: rng.kind: got '%.60s', wanted '%s'", file, kind != NULL ? kind : "nothing", MANIFEST_RNG);
    }
    if (!json_is_null(json_object_get(root, "scaler"))) return fail(error, CODE_INPUT, "%s: scaler: wanted null", file);
    if (!manifest_int_(file, root, "", "step", 0, INT64_MAX, &state->step, error) ||
        !manifest_int_(file, root, "", "tokens", 0, INT64_MAX, &state->tokens, error) ||
        !manifest_int_(file, root, "", "optimizer_steps", 0, state->step, &state->optimizer_steps, error) ||
        !manifest_int_(file, data, "data.", "seed", 0, INT64_MAX, &state->seed, error) ||
        !manifest_int_(file, data, "data.", "epoch", 0, INT64_MAX, &state->epoch, error) ||
        !manifest_int_(file, data, "data.", "position", 0, INT64_MAX, &state->position, error) ||
        !manifest_int_(file, data, "data.", "row", 0, INT64_MAX, &state->row, error) ||
        !manifest_int_(file, rng, "rng.", "seed", state->seed, state->seed, &rng_seed, error)) {
        return false;
    }
    if (!json_is_array(files)) return fail(error, CODE_INPUT, "%s: data.files: wanted a list", file);
    CheckpointDataFile *data_files = base_new(json_array_size(files), sizeof *data_files);
    state->data_files = data_files;
    for (size_t i = 0; i < json_array_size(files); i++) {
        const json_t *value = json_array_get(files, i);
        data_files[i].path = json_string_value(json_object_get(value, "path"));
        if (data_files[i].path == NULL) return fail(error, CODE_INPUT, "%s: data.files[%zu].path: wanted a text", file, i);
        if (!manifest_int_(file, value, "data.files[].", "tokens", 0, INT64_MAX, &data_files[i].tokens, error)) return false;
        state->data_file_count++;
    }
    return true;
}

// Parses a manifest; the seal is checked apart (manifest_check_seal), so that fuzzing and tests reach what lies behind it.
static inline bool manifest_parse(const char *file, const char *text, size_t bytes, Manifest *manifest, Error *error) {
    *manifest = (Manifest){0};
    json_error_t reason;
    manifest->root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &reason);
    if (manifest->root == NULL) return fail(error, CODE_INPUT, "%s: line %d: %s", file, reason.line, reason.text);
    const json_t *root = manifest->root;
    const char *format = json_string_value(json_object_get(root, "format"));
    int64_t version;
    bool good = (format != NULL && strcmp(format, MANIFEST_FORMAT) == 0) ||
                fail(error, CODE_INPUT, "%s: format: got '%.60s', wanted '%s'", file, format != NULL ? format : "nothing", MANIFEST_FORMAT);
    good = good && manifest_int_(file, root, "", "version", MANIFEST_VERSION, MANIFEST_VERSION, &version, error) &&
           manifest_parse_state_(file, root, &manifest->state, error) &&
           manifest_parse_files_(file, json_object_get(root, "files"), manifest, error) &&
           manifest_parse_tensors_(file, json_object_get(root, "tensors"), manifest, error);
    if (!good) manifest_free(manifest);
    return good;
}

#endif
