// fixture.h: reads the reference results in dev/fixtures (dev/reference/README.md says what they hold). For tests only: the
// files belong to the repository, so a damaged one ends the program; sizes are checked all the same.
#ifndef DEV_TEST_FIXTURE_H
#define DEV_TEST_FIXTURE_H

#include "llmc/base.h"  // die, base_new
#include "llmc/model.h" // ModelConfig
#include <jansson.h>    // json_loadb

typedef struct {
    char *bytes; // the file
    size_t size;
    json_t *header;
    const char *data; // behind the header
    const char *path;
} Fixture;

typedef enum { FIXTURE_F64, FIXTURE_F32, FIXTURE_I32, FIXTURE_DTYPES } FixtureDtype;

typedef struct {
    FixtureDtype dtype;
    int rank;
    int64_t shape[4];
    int64_t elements;
    const void *data; // aligned for its type
} FixtureTensor;

static inline Fixture fixture_open(const char *path) {
    Fixture f = {.path = path};
    FILE *file = fopen(path, "rb");
    if (file == NULL) die(CODE_INPUT, "cannot open '%s': %s (run tests from the root of the repository)", path, strerror(errno));
    if (fseek(file, 0, SEEK_END) != 0) die(CODE_INPUT, "%s: cannot seek", path);
    const long size = ftell(file);
    if (size < 8 || fseek(file, 0, SEEK_SET) != 0) die(CODE_INPUT, "%s: got %ld bytes, wanted a safetensors file", path, size);
    f.size = (size_t)size;
    f.bytes = base_alloc(f.size);
    if (fread(f.bytes, 1, f.size, file) != f.size) die(CODE_INPUT, "%s: cannot read", path);
    fclose(file);
    uint64_t header_bytes;
    memcpy(&header_bytes, f.bytes, 8);
    if (header_bytes > f.size - 8 || header_bytes % 8 != 0) die(CODE_INPUT, "%s: header of %llu bytes", path, (unsigned long long)header_bytes);
    json_error_t error;
    f.header = json_loadb(f.bytes + 8, (size_t)header_bytes, JSON_REJECT_DUPLICATES, &error);
    if (!json_is_object(f.header)) die(CODE_INPUT, "%s: header is not JSON: %s", path, error.text);
    f.data = f.bytes + 8 + header_bytes;
    return f;
}

static inline void fixture_close(Fixture *f) {
    json_decref(f->header);
    free(f->bytes);
    *f = (Fixture){0};
}

static inline FixtureTensor fixture_tensor(const Fixture *f, const char *name) {
    static const char *const names[FIXTURE_DTYPES] = {"F64", "F32", "I32"};
    FixtureTensor t = {.dtype = FIXTURE_DTYPES, .elements = 1};
    const json_t *entry = json_object_get(f->header, name);
    const json_t *shape = json_object_get(entry, "shape"), *offsets = json_object_get(entry, "data_offsets");
    const char *dtype = json_string_value(json_object_get(entry, "dtype"));
    if (dtype == NULL || json_array_size(offsets) != 2 || json_array_size(shape) > 4) die(CODE_INPUT, "%s: no usable tensor '%s'", f->path, name);
    for (int i = 0; i < FIXTURE_DTYPES; i++) {
        if (strcmp(names[i], dtype) == 0) t.dtype = (FixtureDtype)i;
    }
    t.rank = (int)json_array_size(shape);
    for (int i = 0; i < t.rank; i++) {
        t.shape[i] = json_integer_value(json_array_get(shape, (size_t)i));
        if (t.shape[i] < 0 || t.shape[i] > INT32_MAX || (t.elements *= t.shape[i]) > INT32_MAX) die(CODE_INPUT, "%s: shape of '%s'", f->path, name);
    }
    const int64_t begin = json_integer_value(json_array_get(offsets, 0)), end = json_integer_value(json_array_get(offsets, 1));
    const int64_t width = t.dtype == FIXTURE_F64 ? 8 : 4, available = (int64_t)f->size - (f->data - f->bytes);
    if (t.dtype == FIXTURE_DTYPES || begin < 0 || begin % width != 0 || end > available || end - begin != t.elements * width) {
        die(CODE_INPUT, "%s: '%s' is %s at [%lld, %lld) of %lld bytes", f->path, name, dtype, (long long)begin, (long long)end,
            (long long)available);
    }
    t.data = f->data + begin;
    return t;
}

// The same with the type the caller is going to read.
static inline const void *fixture_data(const Fixture *f, const char *name, FixtureDtype dtype, int64_t elements) {
    const FixtureTensor t = fixture_tensor(f, name);
    if (t.dtype != dtype || t.elements != elements) {
        die(CODE_INPUT, "%s: '%s' has %lld elements of type %d, wanted %lld of %d", f->path, name, (long long)t.elements, (int)t.dtype,
            (long long)elements, (int)dtype);
    }
    return t.data;
}

static inline const char *fixture_text(const Fixture *f, const char *key) {
    const char *text = json_string_value(json_object_get(json_object_get(f->header, "__metadata__"), key));
    if (text == NULL) die(CODE_INPUT, "%s: no metadata '%s'", f->path, key);
    return text;
}

static inline double fixture_number(const Fixture *f, const char *key) {
    char *end;
    const char *text = fixture_text(f, key);
    const double number = strtod(text, &end);
    if (end == text || *end != '\0') die(CODE_INPUT, "%s: metadata '%s' is '%s', wanted a number", f->path, key, text);
    return number;
}

// A choice, spelled as on the command line.
static inline int fixture_choice(const Fixture *f, const char *key, int option) {
    const char *text = fixture_text(f, key);
    const int choice = options_choice_(options_rows()[option].choices, text);
    if (choice < 0) die(CODE_INPUT, "%s: metadata '%s' is '%s'", f->path, key, text);
    return choice;
}

static inline ModelConfig fixture_config(const Fixture *f) {
    return (ModelConfig){.layers = (int64_t)fixture_number(f, "layers"),
                         .channels = (int64_t)fixture_number(f, "channels"),
                         .heads = (int64_t)fixture_number(f, "heads"),
                         .kv_heads = (int64_t)fixture_number(f, "kv_heads"),
                         .head_size = (int64_t)fixture_number(f, "head_size"),
                         .ffn = (int64_t)fixture_number(f, "ffn"),
                         .vocab = (int64_t)fixture_number(f, "vocab"),
                         .max_seq = (int64_t)fixture_number(f, "max_seq"),
                         .norm = fixture_choice(f, "norm", OPTION_norm),
                         .position = fixture_choice(f, "position", OPTION_position),
                         .activation = fixture_choice(f, "activation", OPTION_activation),
                         .bias = fixture_choice(f, "bias", OPTION_bias),
                         .tied = fixture_choice(f, "tied", OPTION_tied) == 1,
                         .qk_norm = fixture_choice(f, "qk_norm", OPTION_qk_norm) == 1,
                         .norm_eps = fixture_number(f, "norm_eps"),
                         .rope_theta = fixture_number(f, "rope_theta")};
}

#endif
