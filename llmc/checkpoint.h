// checkpoint.h: checkpoints OUT/step_%08d/: saving with an atomic commit, finding the newest good one, reading tensors
// whatever slices they lie in, keeping the last few. Host memory only: the trainer copies to and from devices.
//
// Commit: everything is written and synced in step_N.tmp/, which is then renamed to step_N, and OUT synced. Deleting comes
// after, through step_M.old. Names with .tmp and .old are never read, and are removed by the next save. So a crash at any
// instant leaves the newest committed checkpoint whole.
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include "llmc/base.h"        // Error, fail
#include "llmc/files.h"       // file_*, directory_*, path_join
#include "llmc/manifest.h"    // Manifest, CheckpointState, manifest_*
#include "llmc/precision.h"   // Dtype, dtype_names, bf16_*
#include "llmc/safetensors.h" // safetensors_*
#include <sys/file.h>         // flock
#include <sys/statvfs.h>      // statvfs

#define CHECKPOINT_MANIFEST "manifest.json"
#define CHECKPOINT_DATA "rank_00000.safetensors"
#define CHECKPOINT_LOCK ".lock"

// A tensor in host memory, by its name in the checkpoint: NAME, adam_m/NAME, adam_v/NAME, master/NAME.
typedef struct {
    char name[64];
    Dtype dtype;
    int rank;         // 1 or 2
    int64_t shape[2]; // [n, 1] for rank 1
    void *data;
} CheckpointTensor;

// ----------------------------------------------------------------------------
// OUT: lock and names

// Creates OUT when needed and takes its lock; *fd holds it until closed or the process ends.
static inline bool checkpoint_lock(const char *out, int *fd, Error *error) {
    *fd = -1;
    if (!directory_create(out, error)) return false;
    char *path = path_join(out, CHECKPOINT_LOCK);
    *fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    bool good = *fd >= 0 || fail(error, CODE_IO, "%s: cannot open: %s", path, strerror(errno));
    if (good && flock(*fd, LOCK_EX | LOCK_NB) != 0) {
        good = errno == EWOULDBLOCK ? fail(error, CODE_IO, "--out: %s is in use by another run (it holds the lock %s)", out, path)
                                    : fail(error, CODE_IO, "%s: cannot lock: %s", path, strerror(errno));
        (void)close(*fd); // nothing was written
        *fd = -1;
    }
    free(path);
    return good;
}

static inline void checkpoint_name_(int64_t step, const char *suffix, char name[48]) {
    snprintf(name, 48, "step_%08lld%s", (long long)step, suffix);
}

// The step of a directory's name with this suffix, or -1 when it is another name.
static inline int64_t checkpoint_name_step_(const char *name, const char *suffix) {
    if (strncmp(name, "step_", 5) != 0 || name[5] < '0' || name[5] > '9') return -1;
    errno = 0;
    long long step = strtoll(name + 5, NULL, 10);
    char canonical[48];
    checkpoint_name_(step, suffix, canonical);
    return errno == 0 && strcmp(name, canonical) == 0 ? step : -1;
}

typedef struct {
    int64_t *steps; // newest first
    int64_t count;
} CheckpointList_;

static inline bool checkpoint_list_visit_(const char *directory, const char *name, void *context, Error *error) {
    (void)directory;
    (void)error;
    CheckpointList_ *list = context;
    const int64_t step = checkpoint_name_step_(name, "");
    if (step < 0) return true;
    list->steps = base_grow(list->steps, (size_t)list->count + 1, sizeof *list->steps);
    list->steps[list->count++] = step;
    return true;
}

static inline int checkpoint_newest_first_(const void *a, const void *b) {
    const int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x < y) - (x > y);
}

// Committed checkpoints in OUT; none when OUT does not exist.
static inline bool checkpoint_list_(const char *out, CheckpointList_ *list, Error *error) {
    *list = (CheckpointList_){0};
    struct stat status;
    if (stat(out, &status) != 0 && errno == ENOENT) return true;
    if (!directory_visit(out, checkpoint_list_visit_, list, error)) {
        free(list->steps);
        *list = (CheckpointList_){0};
        return false;
    }
    if (list->count > 0) qsort(list->steps, (size_t)list->count, sizeof *list->steps, checkpoint_newest_first_);
    return true;
}

// How many checkpoints OUT holds, good or not.
static inline bool checkpoint_count(const char *out, int64_t *count, Error *error) {
    CheckpointList_ list;
    bool good = checkpoint_list_(out, &list, error);
    *count = list.count;
    free(list.steps);
    return good;
}

// ----------------------------------------------------------------------------
// Saving

static inline bool checkpoint_clean_visit_(const char *directory, const char *name, void *context, Error *error) {
    (void)context;
    if (checkpoint_name_step_(name, ".tmp") < 0 && checkpoint_name_step_(name, ".old") < 0) return true;
    char *path = path_join(directory, name);
    bool good = directory_remove(path, error);
    free(path);
    return good;
}

// Removes what an interrupted save or deletion left.
static inline bool checkpoint_clean_(const char *out, Error *error) { return directory_visit(out, checkpoint_clean_visit_, NULL, error); }

// Deletes the checkpoints before `step` but for the newest keep-1 (keep 0: all stay). Later ones are of a course of the run
// that was left by resuming from before them: they are the user's to delete.
static inline bool checkpoint_prune_(const char *out, int64_t step, int64_t keep, Error *error) {
    CheckpointList_ list;
    if (keep == 0) return true;
    if (!checkpoint_list_(out, &list, error)) return false;
    bool good = true;
    int64_t kept = 0;
    for (int64_t i = 0; good && i < list.count; i++) {
        if (list.steps[i] > step || kept++ < keep) continue;
        char name[48], old_name[48];
        checkpoint_name_(list.steps[i], "", name);
        checkpoint_name_(list.steps[i], ".old", old_name);
        char *path = path_join(out, name), *old_path = path_join(out, old_name);
        good = file_rename(path, old_path, error) && directory_sync(out, error) && directory_remove(old_path, error);
        free(path);
        free(old_path);
    }
    free(list.steps);
    return good;
}

static inline bool checkpoint_check_space_(const char *out, int64_t bytes, Error *error) {
    struct statvfs status;
    int result;
    do {
        result = statvfs(out, &status);
    } while (result != 0 && errno == EINTR);
    if (result != 0) return fail(error, CODE_IO, "%s: cannot read the free space: %s", out, strerror(errno));
    const double available = (double)status.f_bavail * (double)status.f_frsize;
    if (available >= (double)bytes) return true;
    return fail(error, CODE_IO, "%s: %.1f MB are free, a checkpoint needs %.1f MB", out, available * 1e-6, (double)bytes * 1e-6);
}

// Writes both files into an empty directory and syncs it.
static inline bool checkpoint_write_(const char *directory, const CheckpointState *state, const CheckpointTensor *tensors, int count,
                                     Error *error) {
    SafetensorsEntry *entries = base_new((size_t)count, sizeof *entries);
    ManifestTensor *rows = base_new((size_t)count, sizeof *rows);
    ManifestSlice *slices = base_new((size_t)count, sizeof *slices);
    for (int i = 0; i < count; i++) {
        const CheckpointTensor *t = &tensors[i];
        entries[i] = (SafetensorsEntry){t->name, dtype_names[t->dtype], t->rank, {t->shape[0], t->shape[1]}, t->data};
        slices[i] = (ManifestSlice){.end = {t->shape[0], t->shape[1]}, .to = t->shape[0] * t->shape[1]};
        rows[i] = (ManifestTensor){t->name, safetensors_type(dtype_names[t->dtype]), t->rank, {t->shape[0], t->shape[1]}, &slices[i], 1};
    }
    ManifestFile file = {.name = CHECKPOINT_DATA};
    char *data_path = path_join(directory, CHECKPOINT_DATA), *manifest_path = path_join(directory, CHECKPOINT_MANIFEST);
    bool good = safetensors_write_file(data_path, entries, count, NULL, &file.bytes, file.xxh3, error);
    if (good) {
        const Manifest manifest = {.state = *state, .tensors = rows, .tensor_count = count, .files = &file, .file_count = 1};
        char *text = manifest_text(&manifest);
        FileWriter writer;
        good = text != NULL || fail(error, CODE_IO, "%s: cannot be put into JSON (out of memory, or a name is not UTF-8)", manifest_path);
        if (good && (good = file_writer_open(&writer, manifest_path, error))) {
            good = file_writer_add(&writer, text, strlen(text), error);
            if (good)
                good = file_writer_finish(&writer, NULL, error);
            else
                file_writer_free(&writer);
        }
        free(text);
    }
    free(data_path);
    free(manifest_path);
    free(entries);
    free(rows);
    free(slices);
    return good && directory_sync(directory, error);
}

// Puts the finished directory under its name. A checkpoint of the same step (damaged, or of another course of the run) is
// exchanged in one operation where the file system can; it is then in the .tmp directory.
static inline bool checkpoint_commit_(const char *temporary, const char *final, const char *old, Error *error) {
    struct stat status;
    if (stat(final, &status) != 0) return file_rename(temporary, final, error);
    if (renameat2(AT_FDCWD, temporary, AT_FDCWD, final, RENAME_EXCHANGE) == 0) return true;
    if (errno != EINVAL && errno != ENOSYS) return fail(error, CODE_IO, "%s: cannot exchange with %s: %s", temporary, final, strerror(errno));
    if (!file_rename(final, old, error)) return false;
    if (file_rename(temporary, final, error)) return true;
    (void)rename(old, final); // back as it was, if that is possible; the error is already told
    return false;
}

// Writes OUT/step_N and deletes old ones so that `keep` remain (0: all). OUT exists and is locked by the caller. After a
// failure the checkpoints that were there are as they were.
static inline bool checkpoint_save(const char *out, const CheckpointState *state, const CheckpointTensor *tensors, int count, int64_t keep,
                                   Error *error) {
    int64_t bytes = 1 << 20; // headers, manifest, directories
    for (int i = 0; i < count; i++) bytes += tensors[i].shape[0] * tensors[i].shape[1] * (int64_t)dtype_bytes(tensors[i].dtype) + 1024;
    if (!checkpoint_clean_(out, error) || !checkpoint_check_space_(out, bytes, error)) return false;
    char name[48], temporary_name[48], old_name[48];
    checkpoint_name_(state->step, "", name);
    checkpoint_name_(state->step, ".tmp", temporary_name);
    checkpoint_name_(state->step, ".old", old_name);
    char *final = path_join(out, name), *temporary = path_join(out, temporary_name), *old = path_join(out, old_name);
    bool good = mkdir(temporary, 0777) == 0 || fail(error, CODE_IO, "%s: cannot create the directory: %s", temporary, strerror(errno));
    good = good && checkpoint_write_(temporary, state, tensors, count, error) && checkpoint_commit_(temporary, final, old, error);
    if (good) {
        good = directory_sync(out, error) && checkpoint_clean_(out, error) && checkpoint_prune_(out, state->step, keep, error);
    } else {
        Error ignored = {0}; // the first error is the one to tell; what is left takes space that others may need now
        (void)directory_remove(temporary, &ignored);
    }
    free(final);
    free(temporary);
    free(old);
    return good;
}

// ----------------------------------------------------------------------------
// Opening: a checkpoint that is open has been verified: manifest, sizes, hashes, every slice present.

typedef struct {
    char *directory;
    Manifest manifest;         // manifest.state is the state
    SafetensorsIndex *indices; // (manifest.file_count)
} Checkpoint;

static inline void checkpoint_close(Checkpoint *checkpoint) {
    for (int64_t i = 0; checkpoint->indices != NULL && i < checkpoint->manifest.file_count; i++) safetensors_index_free(&checkpoint->indices[i]);
    free(checkpoint->indices);
    free(checkpoint->directory);
    manifest_free(&checkpoint->manifest);
    *checkpoint = (Checkpoint){0};
}

static inline bool checkpoint_verify_file_(const char *directory, const ManifestFile *file, SafetensorsIndex *index, Error *error) {
    char *path = path_join(directory, file->name), hash[FILES_HASH_CHARS];
    int fd;
    int64_t bytes;
    bool good = file_open(path, &fd, &bytes, error);
    if (good) {
        good = bytes == file->bytes ||
               fail(error, CODE_INPUT, "%s: got %lld bytes, wanted %lld (truncated?)", path, (long long)bytes, (long long)file->bytes);
        good = good && file_hash(fd, bytes, path, hash, error);
        good =
            good && (strcmp(hash, file->xxh3) == 0 || fail(error, CODE_INPUT, "%s: XXH3-128: got %s, wanted %s (damaged)", path, hash, file->xxh3));
        good = good && safetensors_read_index(fd, bytes, path, index, error);
        (void)close(fd); // opened for reading: nothing can be lost
    }
    free(path);
    return good;
}

static inline bool checkpoint_verify_slices_(const Checkpoint *checkpoint, Error *error) {
    const Manifest *manifest = &checkpoint->manifest;
    for (int64_t i = 0; i < manifest->tensor_count; i++) {
        const ManifestTensor *tensor = &manifest->tensors[i];
        for (int64_t j = 0; j < tensor->slice_count; j++) {
            const ManifestSlice *slice = &tensor->slices[j];
            const char *file = manifest->files[slice->file].name;
            const SafetensorsTensor *stored = safetensors_find(&checkpoint->indices[slice->file], tensor->name);
            if (stored == NULL) return fail(error, CODE_INPUT, "%s/%s: tensor '%.100s' is missing", checkpoint->directory, file, tensor->name);
            if (stored->type != tensor->type || stored->elements != slice->to - slice->from) {
                return fail(error, CODE_INPUT, "%s/%s: tensor '%.100s': got %lld elements of %s, the manifest wants %lld of %s",
                            checkpoint->directory, file, tensor->name, (long long)stored->elements, stored->type->name,
                            (long long)(slice->to - slice->from), tensor->type->name);
            }
        }
    }
    return true;
}

// Opens and verifies a checkpoint directory: reads every file once.
static inline bool checkpoint_open(const char *directory, Checkpoint *checkpoint, Error *error) {
    *checkpoint = (Checkpoint){.directory = base_copy_text(directory)};
    char *path = path_join(directory, CHECKPOINT_MANIFEST);
    size_t bytes = 0;
    bool good = access(path, F_OK) == 0 || errno != ENOENT ||
                fail(error, CODE_INPUT, "%s: no %s in it: wanted a checkpoint directory, OUT/step_N", directory, CHECKPOINT_MANIFEST);
    char *text = good ? file_read_whole(path, MANIFEST_MAX_BYTES, &bytes, error) : NULL;
    good = text != NULL && manifest_check_seal(path, text, bytes, error) && manifest_parse(path, text, bytes, &checkpoint->manifest, error);
    free(text);
    free(path);
    if (good) checkpoint->indices = base_new((size_t)checkpoint->manifest.file_count, sizeof *checkpoint->indices);
    for (int64_t i = 0; good && i < checkpoint->manifest.file_count; i++) {
        good = checkpoint_verify_file_(directory, &checkpoint->manifest.files[i], &checkpoint->indices[i], error);
    }
    good = good && checkpoint_verify_slices_(checkpoint, error);
    if (!good) checkpoint_close(checkpoint);
    return good;
}

// Opens the newest checkpoint of OUT that verifies. *found is false when OUT holds none at all. Those that do not verify
// are told on `notices` (optional), a line each; when there are only such, that is an error: a run that silently starts
// anew would overwrite what may still be saved.
static inline bool checkpoint_find(const char *out, Checkpoint *checkpoint, bool *found, FILE *notices, Error *error) {
    CheckpointList_ list;
    *checkpoint = (Checkpoint){0};
    *found = false;
    if (!checkpoint_list_(out, &list, error)) return false;
    Error newest = {0};
    for (int64_t i = 0; !*found && i < list.count; i++) {
        char name[48];
        checkpoint_name_(list.steps[i], "", name);
        char *path = path_join(out, name);
        Error reason = {0};
        *found = checkpoint_open(path, checkpoint, &reason);
        if (*found && checkpoint->manifest.state.step != list.steps[i]) {
            *found = fail(&reason, CODE_INPUT, "%s: holds step %lld (renamed?)", path, (long long)checkpoint->manifest.state.step);
            checkpoint_close(checkpoint);
        }
        if (!*found && notices != NULL) fprintf(notices, "skipping checkpoint %s: %s\n", name, reason.text);
        if (!*found && i == 0) newest = reason;
        free(path);
    }
    const int64_t count = list.count;
    free(list.steps);
    if (*found || count == 0) return true;
    return fail(error, CODE_INPUT, "%s: none of its %lld checkpoints is good; the newest: %.800s", out, (long long)count, newest.text);
}

// ----------------------------------------------------------------------------
// Reading tensors

// dst (count) = src (count), F32 or BF16 to the other, or a copy.
static inline void checkpoint_convert_(void *dst, Dtype to, const void *src, Dtype from, int64_t count) {
    if (from == to) {
        memcpy(dst, src, (size_t)count * dtype_bytes(to));
    } else if (to == DTYPE_F32) {
        for (int64_t i = 0; i < count; i++) ((float *)dst)[i] = bf16_to_f32(((const uint16_t *)src)[i]);
    } else {
        for (int64_t i = 0; i < count; i++) ((uint16_t *)dst)[i] = bf16_from_f32(((const float *)src)[i]);
    }
}

// Reads one slice into its place in the whole tensor, through `chunk` (FILES_CHUNK_BYTES).
static inline bool checkpoint_read_slice_(const SafetensorsFile *file, const ManifestSlice *slice, Dtype from, const CheckpointTensor *tensor,
                                          char *chunk, Error *error) {
    const SafetensorsTensor *stored = safetensors_find(&file->index, tensor->name);
    const int64_t width = slice->end[1] - slice->begin[1], from_bytes = (int64_t)dtype_bytes(from), to_bytes = (int64_t)dtype_bytes(tensor->dtype);
    const int64_t chunk_elements = FILES_CHUNK_BYTES / 4, count = slice->to - slice->from;
    if (stored == NULL || stored->elements != count) return fail(error, CODE_INPUT, "%s: changed while it was read", file->path);
    if (width == tensor->shape[1] && from == tensor->dtype) { // lies in the tensor without gaps
        char *at = (char *)tensor->data + (slice->begin[0] * width + slice->from) * to_bytes;
        return safetensors_read(file, stored, 0, count * from_bytes, at, error);
    }
    for (int64_t done = 0; done < count; done += chunk_elements) {
        const int64_t span = min_i64(chunk_elements, count - done);
        if (!safetensors_read(file, stored, done * from_bytes, span * from_bytes, chunk, error)) return false;
        for (int64_t i = 0; i < span;) { // pieces of rows of the box
            const int64_t element = slice->from + done + i, row = slice->begin[0] + element / width, column = element % width;
            const int64_t piece = min_i64(width - column, span - i);
            char *at = (char *)tensor->data + (row * tensor->shape[1] + slice->begin[1] + column) * to_bytes;
            checkpoint_convert_(at, tensor->dtype, chunk + i * from_bytes, from, piece);
            i += piece;
        }
    }
    return true;
}

// Finds a wanted tensor and checks its shape and dtype; *from is the dtype in the files.
static inline const ManifestTensor *checkpoint_match_(const Checkpoint *checkpoint, const CheckpointTensor *wanted, bool convert, Dtype *from,
                                                      Error *error) {
    const ManifestTensor *row = manifest_tensor(&checkpoint->manifest, wanted->name);
    if (row == NULL) {
        fail(error, CODE_INPUT, "%s: tensor '%s' is missing", checkpoint->directory, wanted->name);
        return NULL;
    }
    const int64_t columns = wanted->rank == 2 ? wanted->shape[1] : 1;
    if (row->rank != wanted->rank || row->shape[0] != wanted->shape[0] || row->shape[1] != columns) {
        fail(error, CODE_INPUT, "%s: tensor '%s': shape: got rank %d [%lld, %lld], wanted rank %d [%lld, %lld]", checkpoint->directory,
             wanted->name, row->rank, (long long)row->shape[0], (long long)row->shape[1], wanted->rank, (long long)wanted->shape[0],
             (long long)columns);
        return NULL;
    }
    for (*from = 0; *from < DTYPE_COUNT && strcmp(dtype_names[*from], row->type->name) != 0; (*from)++) continue;
    const bool floats = (*from == DTYPE_F32 || *from == DTYPE_BF16) && (wanted->dtype == DTYPE_F32 || wanted->dtype == DTYPE_BF16);
    if (*from != wanted->dtype && !(convert && floats)) {
        fail(error, CODE_INPUT, "%s: tensor '%s': dtype: got %s, wanted %s", checkpoint->directory, wanted->name, row->type->name,
             dtype_names[wanted->dtype]);
        return NULL;
    }
    return row;
}

// Fills the data of the wanted tensors; others in the checkpoint are left alone. `convert` allows F32 <-> BF16.
// All are checked before the first is read.
static inline bool checkpoint_read(const Checkpoint *checkpoint, const CheckpointTensor *tensors, int count, bool convert, Error *error) {
    Dtype from;
    for (int i = 0; i < count; i++) {
        if (checkpoint_match_(checkpoint, &tensors[i], convert, &from, error) == NULL) return false;
    }
    char *chunk = base_new(FILES_CHUNK_BYTES, 1);
    SafetensorsFile file = {.fd = -1};
    int opened = -1; // the file that is open: consecutive slices mostly lie in the same one
    bool good = true;
    for (int i = 0; good && i < count; i++) {
        const ManifestTensor *row = checkpoint_match_(checkpoint, &tensors[i], convert, &from, error);
        for (int64_t j = 0; good && j < row->slice_count; j++) {
            const ManifestSlice *slice = &row->slices[j];
            if (slice->file != opened) {
                safetensors_close(&file);
                char *path = path_join(checkpoint->directory, checkpoint->manifest.files[slice->file].name);
                good = safetensors_open(path, &file, error);
                free(path);
                opened = slice->file;
            }
            good = good && checkpoint_read_slice_(&file, slice, from, &tensors[i], chunk, error);
        }
    }
    safetensors_close(&file);
    free(chunk);
    return good;
}

#endif
