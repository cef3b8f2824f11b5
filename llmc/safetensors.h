// safetensors.h: reading and writing safetensors files: 8 bytes little-endian header length, a JSON header
// {NAME: {dtype, shape, data_offsets: [begin, end)}, "__metadata__": {text: text}}, then the data without holes.
// Everything in a header is taken as hostile: the parser works on memory and is fuzzed. Converts nothing.
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H

#include "llmc/base.h"  // Error, fail, size_multiply
#include "llmc/files.h" // FileWriter, file_open, file_read_at, directory_sync
#include <jansson.h>    // json_*

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "files hold little-endian numbers, and are read without conversion"
#endif

enum { SAFETENSORS_MAX_RANK = 8 };
enum { SAFETENSORS_MAX_HEADER_BYTES = 100000000 }; // the published limit

typedef struct {
    const char *name;
    int bits; // of an element
} SafetensorsType;

static const SafetensorsType safetensors_types[] = {
    {"F32", 32},        {"BF16", 16},   {"F16", 16},    {"F64", 64},    {"I64", 64}, {"I32", 32},    {"I16", 16},    {"I8", 8},
    {"U64", 64},        {"U32", 32},    {"U16", 16},    {"U8", 8},      {"BOOL", 8}, {"F8_E4M3", 8}, {"F8_E5M2", 8}, {"F8_E4M3FNUZ", 8},
    {"F8_E5M2FNUZ", 8}, {"F8_E8M0", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},   {"C64", 64},
};

static inline const SafetensorsType *safetensors_type(const char *name) {
    for (size_t i = 0; i < sizeof safetensors_types / sizeof safetensors_types[0]; i++) {
        if (strcmp(safetensors_types[i].name, name) == 0) return &safetensors_types[i];
    }
    return NULL;
}

// Elements and bytes of a shape; false when they do not fit 63 bits or do not fill whole bytes.
static inline bool safetensors_size(const SafetensorsType *type, int rank, const int64_t *shape, int64_t *elements, int64_t *bytes) {
    int64_t count = 1, bits;
    *elements = *bytes = 0;
    for (int i = 0; i < rank; i++) {
        if (shape[i] < 0 || __builtin_mul_overflow(count, shape[i], &count)) return false;
    }
    if (__builtin_mul_overflow(count, (int64_t)type->bits, &bits) || bits % 8 != 0) return false;
    *elements = count;
    *bytes = bits / 8;
    return true;
}

// ----------------------------------------------------------------------------
// Reading

typedef struct {
    char *name;
    const SafetensorsType *type;
    int rank;
    int64_t shape[SAFETENSORS_MAX_RANK];
    int64_t elements;
    int64_t offset, bytes; // in the file
} SafetensorsTensor;

typedef struct {
    SafetensorsTensor *tensors; // sorted by name
    size_t count;
    json_t *metadata; // object of texts, or NULL
} SafetensorsIndex;

static inline void safetensors_index_free(SafetensorsIndex *index) {
    for (size_t i = 0; i < index->count; i++) free(index->tensors[i].name);
    free(index->tensors);
    json_decref(index->metadata);
    *index = (SafetensorsIndex){0};
}

static inline int safetensors_by_name_(const void *a, const void *b) {
    return strcmp(((const SafetensorsTensor *)a)->name, ((const SafetensorsTensor *)b)->name);
}

static inline int safetensors_by_offset_(const void *a, const void *b) {
    const SafetensorsTensor *x = a, *y = b;
    if (x->offset != y->offset) return x->offset < y->offset ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes); // empty tensors stand before the one that starts there
}

// NULL when there is none of that name.
static inline const SafetensorsTensor *safetensors_find(const SafetensorsIndex *index, const char *name) {
    const SafetensorsTensor key = {.name = (char *)name};
    return index->count == 0 ? NULL : bsearch(&key, index->tensors, index->count, sizeof key, safetensors_by_name_);
}

// A legal header is at most three deep, its arrays hold nothing but up to 8 numbers. Checked before the JSON parser runs,
// so that a hostile header cannot make it use a hundred times its own size in memory.
static inline bool safetensors_scan_(const char *text, size_t bytes) {
    bool quoted = false, array = false;
    int depth = 0, commas = 0;
    for (size_t i = 0; i < bytes; i++) {
        if (quoted) {
            if (text[i] == '\\')
                i++;
            else if (text[i] == '"')
                quoted = false;
            continue;
        }
        switch (text[i]) {
        case '"': quoted = true; break;
        case '{':
        case '[':
            if (array || ++depth > 3) return false;
            array = text[i] == '[';
            commas = 0;
            break;
        case '}':
        case ']':
            array = false;
            depth--;
            break;
        case ',':
            if (array && ++commas >= SAFETENSORS_MAX_RANK) return false;
            break;
        }
    }
    return true;
}

// One entry of the header; offsets are still relative to the data.
static inline bool safetensors_parse_tensor_(const char *file, const char *name, const json_t *value, int64_t data_bytes, SafetensorsTensor *t,
                                             Error *error) {
    const json_t *dtype = json_object_get(value, "dtype"), *shape = json_object_get(value, "shape");
    const json_t *offsets = json_object_get(value, "data_offsets");
    if (!json_is_string(dtype) || !json_is_array(shape) || !json_is_array(offsets) || json_array_size(offsets) != 2) {
        return fail(error, CODE_INPUT, "%s: tensor '%.200s': wanted {dtype: text, shape: [...], data_offsets: [begin, end]}", file, name);
    }
    t->type = safetensors_type(json_string_value(dtype));
    if (t->type == NULL) return fail(error, CODE_INPUT, "%s: tensor '%.200s': unknown dtype '%.40s'", file, name, json_string_value(dtype));
    if (json_array_size(shape) > SAFETENSORS_MAX_RANK) {
        return fail(error, CODE_INPUT, "%s: tensor '%.200s': got %zu axes, wanted at most %d", file, name, json_array_size(shape),
                    SAFETENSORS_MAX_RANK);
    }
    t->rank = (int)json_array_size(shape);
    for (int i = 0; i < t->rank; i++) {
        const json_t *axis = json_array_get(shape, (size_t)i);
        t->shape[i] = json_integer_value(axis);
        if (!json_is_integer(axis) || t->shape[i] < 0) {
            return fail(error, CODE_INPUT, "%s: tensor '%.200s': shape[%d]: wanted a whole number from 0", file, name, i);
        }
    }
    const json_t *begin = json_array_get(offsets, 0), *end = json_array_get(offsets, 1);
    const long long from = json_integer_value(begin), to = json_integer_value(end);
    if (!json_is_integer(begin) || !json_is_integer(end) || from < 0 || to < from || to > data_bytes) {
        return fail(error, CODE_INPUT,
                    "%s: tensor '%.200s': data_offsets: got [%lld, %lld], wanted a range in the file's %lld bytes of data (truncated?)", file, name,
                    from, to, (long long)data_bytes);
    }
    if (!safetensors_size(t->type, t->rank, t->shape, &t->elements, &t->bytes) || t->bytes != to - from) {
        return fail(error, CODE_INPUT, "%s: tensor '%.200s': data_offsets hold %lld bytes, shape and dtype %s want another size", file, name,
                    to - from, t->type->name);
    }
    t->offset = from;
    return true;
}

// Offsets are relative to the data here; the tensors must tile it.
static inline bool safetensors_check_tiling_(const char *file, SafetensorsIndex *index, int64_t data_bytes, Error *error) {
    if (index->count > 0) qsort(index->tensors, index->count, sizeof *index->tensors, safetensors_by_offset_);
    int64_t at = 0;
    for (size_t i = 0; i < index->count; i++) {
        const SafetensorsTensor *t = &index->tensors[i];
        if (t->offset != at) {
            return fail(error, CODE_INPUT, "%s: tensor '%.200s': starts at byte %lld of the data, wanted %lld (%s)", file, t->name,
                        (long long)t->offset, (long long)at, t->offset < at ? "tensors overlap" : "a hole");
        }
        at += t->bytes;
    }
    if (at != data_bytes) {
        return fail(error, CODE_INPUT, "%s: got %lld bytes of data, wanted %lld (bytes behind the last tensor)", file, (long long)data_bytes,
                    (long long)at);
    }
    return true;
}

static inline bool safetensors_parse_root_(const char *file, json_t *root, int64_t data_bytes, SafetensorsIndex *index, Error *error) {
    if (!json_is_object(root)) return fail(error, CODE_INPUT, "%s: the header is no JSON object", file);
    index->tensors = base_new(json_object_size(root), sizeof *index->tensors);
    const char *key;
    json_t *value;
    json_object_foreach(root, key, value) {
        if (strcmp(key, "__metadata__") == 0) {
            const char *name;
            json_t *text;
            if (!json_is_object(value)) return fail(error, CODE_INPUT, "%s: __metadata__: wanted an object of texts", file);
            json_object_foreach(value, name, text) {
                if (!json_is_string(text)) return fail(error, CODE_INPUT, "%s: __metadata__.%.200s: wanted a text", file, name);
            }
            index->metadata = json_incref(value);
            continue;
        }
        SafetensorsTensor tensor = {0};
        if (!safetensors_parse_tensor_(file, key, value, data_bytes, &tensor, error)) return false;
        tensor.name = base_copy_text(key);
        index->tensors[index->count++] = tensor;
    }
    return safetensors_check_tiling_(file, index, data_bytes, error);
}

// Header length of a file of `file_bytes` whose first 8 bytes are `start`.
static inline bool safetensors_header_bytes(const char *file, const void *start, int64_t file_bytes, size_t *header_bytes, Error *error) {
    *header_bytes = 0;
    if (file_bytes < 8) return fail(error, CODE_INPUT, "%s: got %lld bytes, wanted at least 8 (truncated?)", file, (long long)file_bytes);
    uint64_t length;
    memcpy(&length, start, 8);
    if (length > SAFETENSORS_MAX_HEADER_BYTES) {
        return fail(error, CODE_INPUT, "%s: header length: got %llu, wanted at most %d (not a safetensors file?)", file, (unsigned long long)length,
                    SAFETENSORS_MAX_HEADER_BYTES);
    }
    if ((int64_t)length > file_bytes - 8) {
        return fail(error, CODE_INPUT, "%s: header length: got %llu, wanted at most the file's %lld bytes (truncated?)", file,
                    (unsigned long long)length, (long long)file_bytes - 8);
    }
    *header_bytes = (size_t)length;
    return true;
}

// Parses the first `available` bytes (length and header at least) of a file of `file_bytes`. `file` is for messages.
static inline bool safetensors_parse(const char *file, const void *start, size_t available, int64_t file_bytes, SafetensorsIndex *index,
                                     Error *error) {
    *index = (SafetensorsIndex){0};
    size_t header_bytes;
    if (available < 8) return fail(error, CODE_INPUT, "%s: got %zu bytes, wanted at least 8 (truncated?)", file, available);
    if (!safetensors_header_bytes(file, start, file_bytes, &header_bytes, error)) return false;
    if (header_bytes > available - 8)
        return fail(error, CODE_INPUT, "%s: got %zu bytes of the header, wanted %zu", file, available - 8, header_bytes);
    const char *text = (const char *)start + 8;
    if (header_bytes == 0 || text[0] != '{')
        return fail(error, CODE_INPUT, "%s: the header does not start with '{' (not a safetensors file?)", file);
    if (!safetensors_scan_(text, header_bytes)) {
        return fail(error, CODE_INPUT, "%s: the header nests deeper or holds longer lists than tensors of at most %d axes need", file,
                    SAFETENSORS_MAX_RANK);
    }
    json_error_t reason;
    json_t *root = json_loadb(text, header_bytes, JSON_REJECT_DUPLICATES, &reason);
    if (root == NULL) return fail(error, CODE_INPUT, "%s: header at byte %d: %s", file, reason.position + 8, reason.text);
    const int64_t data_offset = 8 + (int64_t)header_bytes;
    bool good = safetensors_parse_root_(file, root, file_bytes - data_offset, index, error);
    json_decref(root);
    if (!good) {
        safetensors_index_free(index);
        return false;
    }
    for (size_t i = 0; i < index->count; i++) index->tensors[i].offset += data_offset;
    if (index->count > 0) qsort(index->tensors, index->count, sizeof *index->tensors, safetensors_by_name_);
    return true;
}

typedef struct {
    int fd;
    char *path;
    SafetensorsIndex index;
} SafetensorsFile;

static inline void safetensors_close(SafetensorsFile *file) {
    if (file->fd >= 0) (void)close(file->fd); // opened for reading: nothing can be lost
    free(file->path);
    safetensors_index_free(&file->index);
    file->fd = -1;
    file->path = NULL;
}

// Reads the index of an open file of known size.
static inline bool safetensors_read_index(int fd, int64_t file_bytes, const char *path, SafetensorsIndex *index, Error *error) {
    *index = (SafetensorsIndex){0};
    char length[8];
    size_t header_bytes;
    if (file_bytes >= 8 && !file_read_at(fd, length, 8, 0, path, error)) return false;
    if (!safetensors_header_bytes(path, length, file_bytes, &header_bytes, error)) return false;
    char *start = base_new(8 + header_bytes, 1);
    bool good =
        file_read_at(fd, start, 8 + header_bytes, 0, path, error) && safetensors_parse(path, start, 8 + header_bytes, file_bytes, index, error);
    free(start);
    return good;
}

static inline bool safetensors_open(const char *path, SafetensorsFile *file, Error *error) {
    *file = (SafetensorsFile){.fd = -1};
    int64_t file_bytes = 0;
    if (!file_open(path, &file->fd, &file_bytes, error)) return false;
    file->path = base_copy_text(path);
    if (safetensors_read_index(file->fd, file_bytes, path, &file->index, error)) return true;
    safetensors_close(file);
    return false;
}

// Reads bytes [from, from + bytes) of a tensor.
static inline bool safetensors_read(const SafetensorsFile *file, const SafetensorsTensor *tensor, int64_t from, int64_t bytes, void *out,
                                    Error *error) {
    if (from < 0 || bytes < 0 || from > tensor->bytes || bytes > tensor->bytes - from) {
        return fail(error, CODE_INPUT, "%s: tensor '%.200s': wanted bytes %lld to %lld of %lld", file->path, tensor->name, (long long)from,
                    (long long)from + (long long)bytes, (long long)tensor->bytes);
    }
    return file_read_at(file->fd, out, (size_t)bytes, tensor->offset + from, file->path, error);
}

// ----------------------------------------------------------------------------
// Writing

typedef struct {
    const char *name;
    const char *dtype; // a name of safetensors_types
    int rank;
    int64_t shape[SAFETENSORS_MAX_RANK];
    const void *data; // used by safetensors_write_file only
} SafetensorsEntry;

typedef struct {
    FileWriter file;
    int64_t expected_bytes; // of the whole file
} SafetensorsWriter;

// Length and header of a file, padded with blanks so that the data starts at a multiple of 8; to be freed by the caller.
static inline char *safetensors_header(const char *file, const SafetensorsEntry *entries, int count, const json_t *metadata, size_t *bytes,
                                       int64_t *data_bytes, Error *error) {
    json_t *root = json_object();
    int64_t at = 0;
    bool good = root != NULL || fail(error, CODE_IO, "%s: out of memory", file);
    if (good && metadata != NULL)
        good = json_object_set(root, "__metadata__", (json_t *)metadata) == 0 || fail(error, CODE_IO, "%s: bad metadata", file);
    for (int i = 0; good && i < count; i++) {
        const SafetensorsEntry *e = &entries[i];
        const SafetensorsType *type = safetensors_type(e->dtype);
        int64_t elements, size, end;
        if (type == NULL || e->rank < 0 || e->rank > SAFETENSORS_MAX_RANK || !safetensors_size(type, e->rank, e->shape, &elements, &size) ||
            __builtin_add_overflow(at, size, &end)) {
            good = fail(error, CODE_IO, "%s: tensor '%.200s': dtype '%.40s' or shape cannot be written", file, e->name, e->dtype);
            break;
        }
        json_t *shape = json_array();
        for (int axis = 0; axis < e->rank; axis++) json_array_append_new(shape, json_integer(e->shape[axis]));
        json_t *value = json_pack("{s:s, s:o, s:[I, I]}", "dtype", e->dtype, "shape", shape, "data_offsets", (json_int_t)at, (json_int_t)end);
        const bool taken = json_object_get(root, e->name) != NULL || strcmp(e->name, "__metadata__") == 0;
        if (json_object_set_new(root, e->name, value) != 0 || taken) {
            good = fail(error, CODE_IO, "%s: tensor '%.200s': the name is taken or is not UTF-8", file, e->name);
        }
        at = end;
    }
    char *json = good ? json_dumps(root, JSON_COMPACT) : NULL, *header = NULL;
    json_decref(root);
    if (good && json == NULL) fail(error, CODE_IO, "%s: out of memory", file);
    if (json != NULL) {
        const size_t length = strlen(json);
        const uint64_t padded = (uint64_t)round_up((int64_t)length, 8);
        if (padded > SAFETENSORS_MAX_HEADER_BYTES) {
            fail(error, CODE_IO, "%s: the header would have %zu bytes, the format allows %d", file, length, SAFETENSORS_MAX_HEADER_BYTES);
        } else {
            header = base_new(8 + padded, 1);
            memcpy(header, &padded, 8);
            memcpy(header + 8, json, length);
            memset(header + 8 + length, ' ', padded - length);
            *bytes = 8 + padded;
            *data_bytes = at;
        }
    }
    free(json);
    return header;
}

// Creates the file and writes its header; the tensors' data follow by safetensors_write in the order of the entries.
static inline bool safetensors_write_begin(SafetensorsWriter *writer, const char *path, const SafetensorsEntry *entries, int count,
                                           const json_t *metadata, Error *error) {
    size_t header_bytes;
    int64_t data_bytes;
    *writer = (SafetensorsWriter){.file = {.fd = -1}};
    char *header = safetensors_header(path, entries, count, metadata, &header_bytes, &data_bytes, error);
    if (header == NULL) return false;
    writer->expected_bytes = (int64_t)header_bytes + data_bytes;
    bool good = file_writer_open(&writer->file, path, error) && file_writer_add(&writer->file, header, header_bytes, error);
    free(header);
    if (!good) file_writer_free(&writer->file);
    return good;
}

static inline bool safetensors_write(SafetensorsWriter *writer, const void *data, size_t bytes, Error *error) {
    if ((int64_t)bytes > writer->expected_bytes - writer->file.bytes) {
        return fail(error, CODE_IO, "%s: more data than the header announced", writer->file.path);
    }
    return file_writer_add(&writer->file, data, bytes, error);
}

// After an error that is already told.
static inline void safetensors_write_abandon(SafetensorsWriter *writer) { file_writer_free(&writer->file); }

// Syncs and closes; tells size and hash (optional). The writer is freed whatever happens.
static inline bool safetensors_write_end(SafetensorsWriter *writer, int64_t *bytes, char hash[FILES_HASH_CHARS], Error *error) {
    if (writer->file.bytes != writer->expected_bytes) {
        fail(error, CODE_IO, "%s: %lld bytes written, the header announced %lld", writer->file.path, (long long)writer->file.bytes,
             (long long)writer->expected_bytes);
        safetensors_write_abandon(writer);
        return false;
    }
    if (bytes != NULL) *bytes = writer->expected_bytes;
    return file_writer_finish(&writer->file, hash, error);
}

// A whole file in place: header, data of the entries, sync, close.
static inline bool safetensors_write_file(const char *path, const SafetensorsEntry *entries, int count, const json_t *metadata, int64_t *bytes,
                                          char hash[FILES_HASH_CHARS], Error *error) {
    SafetensorsWriter writer;
    if (!safetensors_write_begin(&writer, path, entries, count, metadata, error)) return false;
    for (int i = 0; i < count; i++) {
        int64_t elements, size;
        (void)safetensors_size(safetensors_type(entries[i].dtype), entries[i].rank, entries[i].shape, &elements, &size); // header checked it
        if (!safetensors_write(&writer, entries[i].data, (size_t)size, error)) {
            safetensors_write_abandon(&writer);
            return false;
        }
    }
    return safetensors_write_end(&writer, bytes, hash, error);
}

// The same, but the file appears under its name whole or not at all, and stays after a crash.
static inline bool safetensors_write_simple(const char *path, const SafetensorsEntry *entries, int count, Error *error) {
    const size_t bytes = strlen(path) + 5;
    char *beside = base_new(bytes, 1), *directory = base_copy_text(path);
    snprintf(beside, bytes, "%s.tmp", path);
    char *slash = strrchr(directory, '/');
    if (slash != NULL) slash[slash == directory ? 1 : 0] = '\0';
    bool good = safetensors_write_file(beside, entries, count, NULL, NULL, NULL, error) && file_rename(beside, path, error);
    if (!good) (void)unlink(beside); // it may not exist; the error is already told
    good = good && directory_sync(slash != NULL ? directory : ".", error);
    free(beside);
    free(directory);
    return good;
}

#endif
