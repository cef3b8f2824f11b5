// hf_export.h: writes a Hugging Face directory: config.json, model*.safetensors with an index where there are several, tokenizer.json. Whole
// tensors come one at a time from the caller, who gathers or reads them. It appears under its name when it is complete.
#ifndef LLMC_HF_EXPORT_H
#define LLMC_HF_EXPORT_H

#include "llmc/base.h"        // Error, fail
#include "llmc/files.h"       // FileWriter, directory_*, path_join
#include "llmc/hf_config.h"   // hf_config_text, hf_config_family
#include "llmc/hf_tensors.h"  // HfTensor, hf_tensors
#include "llmc/model.h"       // Model
#include "llmc/precision.h"   // Dtype, bf16_from_f32
#include "llmc/safetensors.h" // SafetensorsWriter
#include <sys/statvfs.h>      // statvfs

typedef struct {
    const char *directory;
    Dtype dtype;           // F32 or BF16
    int64_t shard_bytes;   // of a file's tensors, unless one alone has more
    const char *tokenizer; // the path of --tokenizer, or NULL
    const json_t *ids;     // bos_token_id and the like; optional
} HfExport;

// The whole of a tensor of the table, fp32, to be freed by the caller; NULL with the error filled. May be collective.
typedef float *(*HfWhole)(void *context, int tensor, Error *error);

// ----------------------------------------------------------------------------
// Before anything is computed

static inline bool hf_export_visit_(const char *directory, const char *name, void *context, Error *error) {
    (void)directory, (void)name, (void)error;
    *(bool *)context = true;
    return true;
}

// There is nothing of that name, or an empty directory.
static inline bool hf_export_is_free(const char *directory) {
    struct stat status;
    bool holds = false;
    Error ignored = {0};
    if (stat(directory, &status) != 0) return errno == ENOENT;
    return S_ISDIR(status.st_mode) && directory_visit(directory, hf_export_visit_, &holds, &ignored) && !holds;
}

static inline int64_t hf_export_bytes_(const Model *model, Dtype dtype) { return model_parameters(model) * (int64_t)dtype_bytes(dtype); }

// Refuses what would fail after hours: a layout without a name there, a directory in use, a disk that is too small.
static inline bool hf_export_check(const char *directory, const Model *model, Dtype dtype, Error *error) {
    HfFamily family;
    struct statvfs disk;
    if (!hf_config_family(&model->config, &family, error)) return false;
    if (!hf_export_is_free(directory)) {
        return fail(error, CODE_USAGE, "--export-hf: '%s' is there already, or cannot be: wanted a new or empty directory", directory);
    }
    char *above = base_copy_text(directory); // the nearest that is there
    bool known = statvfs(above, &disk) == 0;
    while (!known && errno == ENOENT && strcmp(above, ".") != 0) {
        char *slash = strrchr(above, '/');
        strcpy(slash == NULL ? above : slash == above ? slash + 1 : slash, slash == NULL ? "." : "");
        known = statvfs(above, &disk) == 0;
    }
    const bool writable =
        access(above, W_OK | X_OK) == 0 || fail(error, CODE_IO, "--export-hf: %s: cannot write there: %s", above, strerror(errno));
    free(above);
    if (!writable) return false;
    const double has = known ? (double)disk.f_bavail * (double)disk.f_frsize : 0, needs = (double)hf_export_bytes_(model, dtype);
    return !known || needs <= has ||
           fail(error, CODE_IO, "--export-hf: %s: needs %.4g MB, the disk has %.4g MB left", directory, needs * 1e-6, has * 1e-6);
}

// ----------------------------------------------------------------------------
// Writing

// Files of an earlier export that was interrupted; nothing else is touched.
static inline bool hf_export_clean_visit_(const char *directory, const char *name, void *context, Error *error) {
    (void)context;
    const bool own = strcmp(name, "config.json") == 0 || strcmp(name, "tokenizer.json") == 0 || strcmp(name, "model.safetensors") == 0 ||
                     strcmp(name, "model.safetensors.index.json") == 0 || strncmp(name, "model-", 6) == 0;
    if (!own) return fail(error, CODE_IO, "%s: holds '%.100s', which is not of an export: wanted it moved away", directory, name);
    char *path = path_join(directory, name);
    const bool good = unlink(path) == 0 || fail(error, CODE_IO, "%s: cannot remove: %s", path, strerror(errno));
    free(path);
    return good;
}

static inline bool hf_export_text_(const char *directory, const char *name, const char *text, size_t bytes, Error *error) {
    char *path = path_join(directory, name);
    FileWriter writer = {.fd = -1};
    bool good = file_writer_open(&writer, path, error);
    if (good && !file_writer_add(&writer, text, bytes, error)) {
        file_writer_free(&writer);
        good = false;
    }
    good = good && file_writer_finish(&writer, NULL, error);
    free(path);
    return good;
}

// The tokenizer.json that --tokenizer names or holds, if it does.
static inline bool hf_export_tokenizer_(const HfExport *export, const char *directory, Error *error) {
    struct stat status;
    size_t bytes;
    if (export->tokenizer == NULL || stat(export->tokenizer, &status) != 0) return true; // "byte"
    char *path = S_ISDIR(status.st_mode) ? path_join(export->tokenizer, "tokenizer.json") : base_copy_text(export->tokenizer);
    bool good = true;
    if (access(path, F_OK) == 0) { // else vocab.json and merges.txt
        char *text = file_read_whole(path, (int64_t)1 << 30, &bytes, error);
        good = text != NULL && hf_export_text_(directory, "tokenizer.json", text, bytes, error);
        free(text);
    }
    free(path);
    return good;
}

// A directory under way.
typedef struct {
    const HfExport *export;
    const Model *model;
    HfTensor *tensors; // (count)
    int count, files;
    int *file; // (count) of a tensor, ascending
    char *directory;
    SafetensorsWriter writer;
    bool open; // the writer
} HfWriter_;

// Which tensors go together.
static inline void hf_export_divide_(HfWriter_ *w) {
    int64_t filled = 0;
    w->file = base_new((size_t)w->count, sizeof *w->file);
    for (int i = 0; i < w->count; i++) {
        const int64_t bytes = w->tensors[i].shape[0] * w->tensors[i].shape[1] * (int64_t)dtype_bytes(w->export->dtype);
        if (i > 0 && filled + bytes > w->export->shard_bytes) w->files++, filled = 0;
        w->file[i] = w->files;
        filled += bytes;
    }
    w->files++;
}

static inline void hf_export_name_(const HfWriter_ *w, int file, char name[64]) {
    if (w->files == 1) {
        snprintf(name, 64, "model.safetensors");
    } else {
        snprintf(name, 64, "model-%05d-of-%05d.safetensors", file + 1, w->files);
    }
}

static inline bool hf_export_begin_file_(HfWriter_ *w, int first, Error *error) {
    int count = 0;
    char name[64];
    SafetensorsEntry *entries = base_new((size_t)w->count, sizeof *entries);
    for (int i = first; i < w->count && w->file[i] == w->file[first]; i++) {
        const HfTensor *t = &w->tensors[i];
        entries[count++] =
            (SafetensorsEntry){.name = t->name, .dtype = dtype_names[w->export->dtype], .rank = t->rank, .shape = {t->shape[0], t->shape[1]}};
    }
    hf_export_name_(w, w->file[first], name);
    char *path = path_join(w->directory, name);
    json_t *metadata = json_pack("{s:s}", "format", "pt");
    w->open = safetensors_write_begin(&w->writer, path, entries, count, metadata, error);
    json_decref(metadata);
    free(path);
    free(entries);
    return w->open;
}

// out: the tensor as the files have it; `values` (rows, columns) belong at `row` of what is joined, or, transposed, at that column.
static inline void hf_export_place_(const HfTensor *t, int64_t row, int64_t rows, const float *values, Dtype dtype, void *out) {
    const int64_t columns = t->transposed ? t->shape[0] : t->shape[1], width = t->shape[1];
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        for (int64_t c = 0; c < columns; c++) {
            const int64_t at = t->transposed ? c * width + row + r : (row + r) * width + c;
            const float value = values[r * columns + c];
            if (dtype == DTYPE_BF16) {
                ((uint16_t *)out)[at] = bf16_from_f32(value);
            } else {
                ((float *)out)[at] = value;
            }
        }
    }
}

// Asks for the parts of a tensor, and writes it on the rank that writes (`w` not NULL).
static inline bool hf_export_tensor_(HfWriter_ *w, const Model *model, const HfTensor *t, HfWhole whole, void *context, Error *error) {
    const size_t bytes = w != NULL ? (size_t)(t->shape[0] * t->shape[1]) * dtype_bytes(w->export->dtype) : 0;
    void *out = w != NULL ? base_alloc_raw(bytes) : NULL;
    bool good = true;
    for (int p = 0; good && p < t->parts; p++) {
        float *values = whole(context, t->tensor[p], error);
        good = values != NULL;
        if (good && w != NULL) hf_export_place_(t, t->row[p], model->tensors[t->tensor[p]].shape[0], values, w->export->dtype, out);
        free(values);
    }
    good = good && (w == NULL || safetensors_write(&w->writer, out, bytes, error));
    free(out);
    return good;
}

// All tensors, file after file; other ranks only join in gathering.
static inline bool hf_export_tensors_(HfWriter_ *w, const Model *model, const HfTensor *tensors, int count, HfWhole whole, void *context,
                                      Error *error) {
    for (int i = 0; i < count; i++) {
        if (w != NULL && (i == 0 || w->file[i] != w->file[i - 1]) && !hf_export_begin_file_(w, i, error)) return false;
        if (!hf_export_tensor_(w, model, &tensors[i], whole, context, error)) return false;
        if (w != NULL && (i + 1 == count || w->file[i + 1] != w->file[i])) {
            w->open = false;
            if (!safetensors_write_end(&w->writer, NULL, NULL, error)) return false;
        }
    }
    return true;
}

static inline bool hf_export_index_(const HfWriter_ *w, Error *error) {
    if (w->files == 1) return true;
    json_t *map = json_object();
    for (int i = 0; i < w->count; i++) {
        char name[64];
        hf_export_name_(w, w->file[i], name);
        json_object_set_new(map, w->tensors[i].name, json_string(name));
    }
    json_t *root =
        json_pack("{s:{s:I}, s:o}", "metadata", "total_size", (json_int_t)hf_export_bytes_(w->model, w->export->dtype), "weight_map", map);
    char *text = json_dumps(root, JSON_INDENT(2));
    const bool good = hf_export_text_(w->directory, "model.safetensors.index.json", text, strlen(text), error);
    free(text);
    json_decref(root);
    return good;
}

// Everything has been written: puts the directory in its place.
static inline bool hf_export_commit_(const HfWriter_ *w, const char *target, Error *error) {
    char *above = base_copy_text(target);
    char *slash = strrchr(above, '/');
    if (slash != NULL) slash[slash == above ? 1 : 0] = '\0';
    const bool good = directory_sync(w->directory, error) && file_rename(w->directory, target, error) && // onto an empty directory, if at all
                      directory_sync(slash != NULL ? above : ".", error);
    free(above);
    return good;
}

static inline bool hf_export_run_(HfWriter_ *w, HfFamily family, const char *target, HfWhole whole, void *context, Error *error) {
    Error ignored = {0};
    struct stat status;
    const HfExport *export = w->export;
    if (stat(w->directory, &status) == 0 && !directory_visit(w->directory, hf_export_clean_visit_, NULL, error)) return false;
    char *config = hf_config_text(&w->model->config, family, export->dtype, export->ids);
    bool good = directory_create(w->directory, error) && hf_export_tensors_(w, w->model, w->tensors, w->count, whole, context, error) &&
                hf_export_index_(w, error) && hf_export_text_(w->directory, "config.json", config, strlen(config), error) &&
                hf_export_tokenizer_(export, w->directory, error) && hf_export_commit_(w, target, error);
    free(config);
    if (w->open) safetensors_write_abandon(&w->writer);
    if (!good && directory_visit(w->directory, hf_export_clean_visit_, NULL, &ignored)) (void)rmdir(w->directory); // the error is told
    return good;
}

// Writes the directory from the rank that `writes`; all ranks that hold parts of tensors call it alike. Errors are of this rank alone.
static inline bool hf_export_write(const HfExport *export, const Model *model, bool writes, HfWhole whole, void *context, Error *error) {
    HfFamily family;
    HfWriter_ w = {.export = export, .model = model};
    if (!hf_config_family(&model->config, &family, error)) return false;
    w.tensors = hf_tensors(model, family, hf_prefix(family), &w.count);
    hf_export_divide_(&w);
    char *target = base_copy_text(export->directory);
    for (size_t length = strlen(target); length > 1 && target[length - 1] == '/'; length--) target[length - 1] = '\0';
    w.directory = base_new(strlen(target) + 5, 1);
    snprintf(w.directory, strlen(target) + 5, "%s.tmp", target);
    const bool good = writes ? hf_export_run_(&w, family, target, whole, context, error)
                             : hf_export_tensors_(NULL, model, w.tensors, w.count, whole, context, error);
    free(target);
    free(w.directory);
    free(w.file);
    free(w.tensors);
    return good;
}

#endif
