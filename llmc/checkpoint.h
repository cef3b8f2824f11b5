// checkpoint.h: checkpoints OUT/step_%08d/ of all ranks of a job: their names and slices, the lock of OUT, opening with verification,
// finding the newest good one. checkpoint_save.h writes them, checkpoint_read.h reads tensors into any layout. Host memory only:
// the trainer copies to and from devices. All ranks see one file system.
//
// Files: a rank that holds something has rank_%05d.safetensors; the manifest tells which slices of which tensor lie where. Names with
// .tmp and .old are of a save that is under way or was interrupted, and are never read.
//
// Functions with a Comm are collective: all ranks call them and get the same verdict, with the error of the first rank that failed.
#ifndef LLMC_CHECKPOINT_H
#define LLMC_CHECKPOINT_H

#include "llmc/base.h"        // Error, fail
#include "llmc/comm.h"        // comm_all_reduce, comm_broadcast, comm_send
#include "llmc/files.h"       // file_*, directory_*, path_join
#include "llmc/manifest.h"    // Manifest, CheckpointState, manifest_*
#include "llmc/precision.h"   // Dtype, dtype_names
#include "llmc/safetensors.h" // safetensors_*
#include <sys/file.h>         // flock

#define CHECKPOINT_MANIFEST "manifest.json"
#define CHECKPOINT_LOCK ".lock"
enum { CHECKPOINT_NAME_CHARS = 32 };
enum { CHECKPOINT_PULSE_MS = 200 };

// What one rank holds of one tensor, by its name in the checkpoint: NAME, adam_m/NAME, adam_v/NAME, master/NAME.
typedef struct {
    char name[64];
    Dtype dtype;
    int rank;                 // 1 or 2 (of the tensor)
    int64_t shape[2];         // of the whole tensor; [n, 1] for rank 1
    int64_t begin[2], end[2]; // the box of the tensor that from, to count in, row-major
    int64_t from, to;         // elements of the box, [from, to); none is fine
    void *data;               // (to - from) host memory, no gaps
} CheckpointSlice;

// The whole of a tensor.
static inline CheckpointSlice checkpoint_whole(const char *prefix, const char *name, Dtype dtype, int rank, const int64_t shape[2], void *data) {
    CheckpointSlice slice = {.dtype = dtype, .rank = rank, .shape = {shape[0], shape[1]}, .end = {shape[0], shape[1]}};
    snprintf(slice.name, sizeof slice.name, "%s%s", prefix, name);
    slice.to = shape[0] * shape[1];
    slice.data = data;
    return slice;
}

// A box inside its tensor, a range inside the box.
static inline bool checkpoint_slice_check_(const CheckpointSlice *s, Error *error) {
    bool good = (int)s->dtype >= 0 && s->dtype < DTYPE_COUNT && (s->rank == 2 || (s->rank == 1 && s->shape[1] == 1));
    for (int axis = 0; axis < 2; axis++) good = good && s->begin[axis] >= 0 && s->begin[axis] < s->end[axis] && s->end[axis] <= s->shape[axis];
    good = good && s->from >= 0 && s->from <= s->to && s->to <= (s->end[0] - s->begin[0]) * (s->end[1] - s->begin[1]);
    if (good) return true;
    return fail(error, CODE_IO, "tensor '%.63s': got elements [%lld, %lld) of the box [%lld, %lld) x [%lld, %lld), wanted a part of [%lld, %lld]",
                s->name, (long long)s->from, (long long)s->to, (long long)s->begin[0], (long long)s->end[0], (long long)s->begin[1],
                (long long)s->end[1], (long long)s->shape[0], (long long)s->shape[1]);
}

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
// Ranks together

// True when every rank is good; otherwise all get the error of the first rank that is not.
static inline bool checkpoint_agree_(Comm *comm, bool good, const Error *own, Error *error) {
    int64_t failing = good ? 0 : comm->size - comm->rank; // the largest is that of the first rank
    comm_all_reduce(comm->world, &failing, 1, COMM_I64, COMM_MAX);
    if (failing == 0) return true;
    const int first = comm->size - (int)failing;
    Error told = *own;
    comm_broadcast(comm->world, &told, (int64_t)sizeof told, COMM_BYTE, first);
    if (comm->size == 1) return fail(error, told.code, "%s", told.text);
    return fail(error, told.code, "rank %d: %.1000s", first, told.text);
}

// Ranks that work on their files for as long as it takes, some longer than others. Those that are done wait in rounds of a small
// all-reduce, which those that still work join now and then: so nobody waits in one operation for longer than a watchdog allows,
// and a rank that hangs is still noticed.
typedef struct {
    Comm *comm;
    CommHandle round;
    int64_t working; // some rank, in this round
    double began_ms;
} CheckpointPulse_;

// A sign of life of a rank that works (context: CheckpointPulse_).
static inline void checkpoint_pulse_(void *context) {
    CheckpointPulse_ *pulse = context;
    comm_progress(pulse->comm);
    if (!comm_test(&pulse->round) || clock_ms() - pulse->began_ms < CHECKPOINT_PULSE_MS) return;
    pulse->began_ms = clock_ms();
    pulse->working = 1;
    pulse->round = comm_all_reduce_start(pulse->comm->world, &pulse->working, 1, COMM_I64, COMM_MAX);
}

// This rank is done; returns when all are.
static inline void checkpoint_pulse_end_(CheckpointPulse_ *pulse) {
    comm_wait(&pulse->round);
    do {
        pulse->working = 0;
        comm_all_reduce(pulse->comm->world, &pulse->working, 1, COMM_I64, COMM_MAX);
    } while (pulse->working != 0);
}

// ----------------------------------------------------------------------------
// Opening: a checkpoint that is open has been verified: manifest, sizes, hashes, every slice present.

typedef struct {
    char *directory;
    Manifest manifest; // manifest.state is the state
    Comm *comm;        // for signs of life while it is read
} Checkpoint;

static inline void checkpoint_close(Checkpoint *checkpoint) {
    free(checkpoint->directory);
    manifest_free(&checkpoint->manifest);
    *checkpoint = (Checkpoint){0};
}

static inline bool checkpoint_verify_file_(const char *directory, const ManifestFile *file, SafetensorsIndex *index, CheckpointPulse_ *pulse,
                                           Error *error) {
    char *path = path_join(directory, file->name), hash[FILES_HASH_CHARS];
    int fd;
    int64_t bytes;
    bool good = file_open(path, &fd, &bytes, error);
    if (good) {
        good = bytes == file->bytes ||
               fail(error, CODE_INPUT, "%s: got %lld bytes, wanted %lld (truncated?)", path, (long long)bytes, (long long)file->bytes);
        good = good && file_hash(fd, bytes, path, checkpoint_pulse_, pulse, hash, error);
        good =
            good && (strcmp(hash, file->xxh3) == 0 || fail(error, CODE_INPUT, "%s: XXH3-128: got %s, wanted %s (damaged)", path, hash, file->xxh3));
        good = good && safetensors_read_index(fd, bytes, path, index, error);
        (void)close(fd); // opened for reading: nothing can be lost
    }
    free(path);
    return good;
}

// The manifest's slices in this rank's share of the files (the others' indices are empty).
static inline bool checkpoint_verify_slices_(const Checkpoint *checkpoint, const SafetensorsIndex *indices, Error *error) {
    const Manifest *manifest = &checkpoint->manifest;
    for (int64_t i = 0; i < manifest->tensor_count; i++) {
        const ManifestTensor *tensor = &manifest->tensors[i];
        for (int64_t j = 0; j < tensor->slice_count; j++) {
            const ManifestSlice *slice = &tensor->slices[j];
            if (slice->file % checkpoint->comm->size != checkpoint->comm->rank) continue;
            const char *file = manifest->files[slice->file].name;
            const SafetensorsTensor *stored = safetensors_find(&indices[slice->file], tensor->name);
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

// The text of the manifest, which rank 0 reads and has checked, on all ranks; NULL when it is not good. The caller frees it.
static inline char *checkpoint_manifest_text_(Comm *comm, const char *directory, const char *path, int64_t *length, Error *error) {
    char *text = NULL;
    size_t bytes = 0;
    Error own = {0};
    bool good = true;
    if (comm->rank == 0) {
        good = access(path, F_OK) == 0 || errno != ENOENT ||
               fail(&own, CODE_INPUT, "%s: no %s in it: wanted a checkpoint directory, OUT/step_N", directory, CHECKPOINT_MANIFEST);
        if (good) text = file_read_whole(path, MANIFEST_MAX_BYTES, &bytes, &own);
        good = text != NULL && manifest_check_seal(path, text, bytes, &own);
    }
    if (!checkpoint_agree_(comm, good, &own, error)) {
        free(text);
        return NULL;
    }
    *length = (int64_t)bytes;
    comm_broadcast(comm->world, length, 1, COMM_I64, 0);
    if (comm->rank != 0) text = base_new((size_t)*length, 1);
    comm_broadcast(comm->world, text, *length, COMM_BYTE, 0);
    return text;
}

// Opens and verifies a checkpoint directory: every file is read once, by one of the ranks.
static inline bool checkpoint_open(Comm *comm, const char *directory, Checkpoint *checkpoint, Error *error) {
    *checkpoint = (Checkpoint){.directory = base_copy_text(directory), .comm = comm};
    Manifest *manifest = &checkpoint->manifest;
    char *path = path_join(directory, CHECKPOINT_MANIFEST);
    int64_t length = 0;
    char *text = checkpoint_manifest_text_(comm, directory, path, &length, error);
    bool good = text != NULL;
    if (good) {
        CheckpointPulse_ pulse = {.comm = comm, .began_ms = clock_ms()};
        Error own = {0};
        good = manifest_parse(path, text, (size_t)length, manifest, &own);
        SafetensorsIndex *indices = base_new((size_t)manifest->file_count, sizeof *indices);
        for (int64_t i = comm->rank; good && i < manifest->file_count; i += comm->size) {
            good = checkpoint_verify_file_(directory, &manifest->files[i], &indices[i], &pulse, &own);
        }
        good = good && checkpoint_verify_slices_(checkpoint, indices, &own);
        for (int64_t i = 0; i < manifest->file_count; i++) safetensors_index_free(&indices[i]);
        free(indices);
        checkpoint_pulse_end_(&pulse);
        good = checkpoint_agree_(comm, good, &own, error);
    }
    free(text);
    free(path);
    if (!good) checkpoint_close(checkpoint);
    return good;
}

// The checkpoints in OUT as rank 0 sees them, on all ranks.
static inline bool checkpoint_list_all_(Comm *comm, const char *out, CheckpointList_ *list, Error *error) {
    Error own = {0};
    *list = (CheckpointList_){0};
    if (!checkpoint_agree_(comm, comm->rank != 0 || checkpoint_list_(out, list, &own), &own, error)) return false;
    comm_broadcast(comm->world, &list->count, 1, COMM_I64, 0);
    if (comm->rank != 0) list->steps = base_new((size_t)list->count, sizeof *list->steps);
    comm_broadcast(comm->world, list->steps, list->count, COMM_I64, 0);
    return true;
}

// Opens the newest checkpoint of OUT that verifies. *found is false when OUT holds none at all. Those that do not verify
// are told on rank 0's `notices` (optional), a line each; when there are only such, that is an error: a run that silently
// starts anew would overwrite what may still be saved.
static inline bool checkpoint_find(Comm *comm, const char *out, Checkpoint *checkpoint, bool *found, FILE *notices, Error *error) {
    CheckpointList_ list;
    *checkpoint = (Checkpoint){0};
    *found = false;
    if (!checkpoint_list_all_(comm, out, &list, error)) return false;
    Error newest = {0};
    for (int64_t i = 0; !*found && i < list.count; i++) {
        char name[48];
        checkpoint_name_(list.steps[i], "", name);
        char *path = path_join(out, name);
        Error reason = {0};
        *found = checkpoint_open(comm, path, checkpoint, &reason);
        if (*found && checkpoint->manifest.state.step != list.steps[i]) {
            *found = fail(&reason, CODE_INPUT, "%s: holds step %lld (renamed?)", path, (long long)checkpoint->manifest.state.step);
            checkpoint_close(checkpoint);
        }
        if (!*found && notices != NULL && comm->rank == 0) fprintf(notices, "skipping checkpoint %s: %s\n", name, reason.text);
        if (!*found && i == 0) newest = reason;
        free(path);
    }
    const int64_t count = list.count;
    free(list.steps);
    if (*found || count == 0) return true;
    return fail(error, CODE_INPUT, "%s: none of its %lld checkpoints is good; the newest: %.800s", out, (long long)count, newest.text);
}

#endif
