// checkpoint_save.h: saving a checkpoint by all ranks of a job, with an atomic commit, and deleting old ones. A thread of each rank writes while
// the caller goes on; it touches host memory and files only. When to save is decided elsewhere.
//
// Commit: every rank writes and syncs its file in step_N.tmp/; sizes and hashes come to rank 0, which writes the manifest there, syncs
// it, renames the directory to step_N and syncs OUT. Deleting comes after, through step_M.old. Leftovers are removed by the next save, and by a run
// that goes on. So a crash at any instant leaves the newest committed checkpoint whole.
#ifndef LLMC_CHECKPOINT_SAVE_H
#define LLMC_CHECKPOINT_SAVE_H

#include "llmc/checkpoint.h"  // CheckpointSlice, checkpoint_agree_, checkpoint_pulse_
#include "llmc/safetensors.h" // safetensors_write_*
#include <pthread.h>          // pthread_create
#include <signal.h>           // pthread_sigmask
#include <stdatomic.h>        // atomic_bool
#include <sys/statvfs.h>      // statvfs

enum { CHECKPOINT_SYNC_BYTES = 256 << 20 }; // no sync has more to write than this, so none takes as long as a watchdog waits

static inline bool checkpoint_clean_visit_(const char *directory, const char *name, void *context, Error *error) {
    (void)context;
    if (checkpoint_name_step_(name, ".tmp") < 0 && checkpoint_name_step_(name, ".old") < 0) return true;
    char *path = path_join(directory, name);
    bool good = directory_remove(path, error);
    free(path);
    return good;
}

// Removes what an interrupted save or deletion left.
static inline bool checkpoint_clean(const char *out, Error *error) { return directory_visit(out, checkpoint_clean_visit_, NULL, error); }

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

static inline bool checkpoint_is_whole_(const CheckpointSlice *s) {
    return s->begin[0] == 0 && s->begin[1] == 0 && s->end[0] == s->shape[0] && s->end[1] == s->shape[1] && s->from == 0 &&
           s->to == s->shape[0] * s->shape[1];
}

// What all ranks hold together, as the manifest tells it; on rank 0.
typedef struct {
    CheckpointSlice *slices; // (count) without data, rank by rank in their order
    int64_t count;
    ManifestSlice *placed;                // (count) by tensor
    char (*names)[CHECKPOINT_NAME_CHARS]; // (files)
    int *file_of;                         // (ranks) index of its file, or -1
    Manifest manifest;                    // without state
} CheckpointPlan_;

static inline void checkpoint_plan_free_(CheckpointPlan_ *plan) {
    free(plan->slices);
    free(plan->placed);
    free(plan->names);
    free(plan->file_of);
    free(plan->manifest.tensors); // their slices are in placed
    free(plan->manifest.files);
}

static inline void checkpoint_file_name_(int rank, char name[CHECKPOINT_NAME_CHARS]) {
    snprintf(name, CHECKPOINT_NAME_CHARS, "rank_%05d.safetensors", rank);
}

// Brings the ranks' slices, but for empty ones, to rank 0; counts: (ranks) how many each has.
static inline void checkpoint_gather_(Comm *comm, const CheckpointSlice *slices, int count, int64_t *counts, CheckpointPlan_ *plan) {
    CheckpointSlice *own = base_new((size_t)count, sizeof *own);
    int64_t kept = 0;
    for (int i = 0; i < count; i++) {
        if (slices[i].from == slices[i].to) continue;
        own[kept] = slices[i];
        own[kept++].data = NULL;
    }
    comm_all_gather(comm->world, counts, &kept, 1, COMM_I64);
    if (comm->rank == 0) {
        for (int r = 0; r < comm->size; r++) plan->count += counts[r];
        plan->slices = base_new((size_t)plan->count, sizeof *plan->slices);
        memcpy(plan->slices, own, (size_t)kept * sizeof *own);
    }
    int64_t at = counts[0];
    for (int r = 1; r < comm->size; at += counts[r++]) {
        const int64_t bytes = counts[r] * (int64_t)sizeof *own;
        if (bytes > 0 && comm->rank == 0) comm_recv(comm->world, &plan->slices[at], bytes, COMM_BYTE, r, 0);
        if (bytes > 0 && comm->rank == r) comm_send(comm->world, own, bytes, COMM_BYTE, 0, 0);
    }
    free(own);
}

typedef struct {
    const CheckpointSlice *slice;
    int file;
} CheckpointPlace_;

// By name; those of a tensor by rank.
static inline int checkpoint_place_order_(const void *a, const void *b) {
    const CheckpointPlace_ *x = a, *y = b;
    const int order = strcmp(x->slice->name, y->slice->name);
    return order != 0 ? order : (x->slice > y->slice) - (x->slice < y->slice);
}

// As they come first in the ranks' lists: names point into that of all slices.
static inline int checkpoint_row_order_(const void *a, const void *b) {
    const ManifestTensor *x = a, *y = b;
    return (x->name > y->name) - (x->name < y->name);
}

// The rows of the manifest from the slices of all ranks, which must tile every tensor.
static inline bool checkpoint_plan_rows_(CheckpointPlan_ *plan, const CheckpointPlace_ *places, const char *where, Error *error) {
    Manifest *manifest = &plan->manifest;
    for (int64_t i = 0; i < plan->count; i++) {
        const CheckpointSlice *s = places[i].slice;
        if (!checkpoint_slice_check_(s, error)) return false;
        if (i == 0 || strcmp(s->name, places[i - 1].slice->name) != 0) {
            manifest->tensors[manifest->tensor_count++] =
                (ManifestTensor){s->name, safetensors_type(dtype_names[s->dtype]), s->rank, {s->shape[0], s->shape[1]}, &plan->placed[i], 0};
        } else if (places[i].file == places[i - 1].file) {
            return fail(error, CODE_IO, "%s: tensor '%.63s': a rank holds two slices of it, wanted one", where, s->name);
        }
        ManifestTensor *row = &manifest->tensors[manifest->tensor_count - 1];
        if (row->rank != s->rank || row->shape[0] != s->shape[0] || row->shape[1] != s->shape[1] ||
            strcmp(row->type->name, dtype_names[s->dtype])) {
            return fail(error, CODE_IO, "%s: tensor '%.63s': ranks disagree on its shape or dtype", where, s->name);
        }
        plan->placed[i] = (ManifestSlice){places[i].file, {s->begin[0], s->begin[1]}, {s->end[0], s->end[1]}, s->from, s->to};
        row->slice_count++;
    }
    for (int64_t i = 0; i < manifest->tensor_count; i++) {
        Error cover = {0};
        if (!manifest_check_cover_(where, &manifest->tensors[i], &cover)) return fail(error, CODE_IO, "%s", cover.text);
    }
    if (manifest->tensor_count > 0) {
        qsort(manifest->tensors, (size_t)manifest->tensor_count, sizeof *manifest->tensors, checkpoint_row_order_);
    }
    return true;
}

static inline bool checkpoint_plan_(CheckpointPlan_ *plan, const int64_t *counts, int ranks, const char *where, Error *error) {
    CheckpointPlace_ *places = base_new((size_t)plan->count, sizeof *places);
    Manifest *manifest = &plan->manifest;
    plan->placed = base_new((size_t)plan->count, sizeof *plan->placed);
    plan->names = base_new((size_t)ranks, sizeof *plan->names);
    plan->file_of = base_new((size_t)ranks, sizeof *plan->file_of);
    manifest->files = base_new((size_t)ranks, sizeof *manifest->files);
    manifest->tensors = base_new((size_t)plan->count, sizeof *manifest->tensors);
    int64_t at = 0;
    for (int r = 0; r < ranks; r++) {
        plan->file_of[r] = counts[r] > 0 ? (int)manifest->file_count : -1;
        for (int64_t i = 0; i < counts[r]; i++, at++) places[at] = (CheckpointPlace_){&plan->slices[at], plan->file_of[r]};
        if (counts[r] == 0) continue;
        checkpoint_file_name_(r, plan->names[manifest->file_count]);
        manifest->files[manifest->file_count].name = plan->names[manifest->file_count];
        manifest->file_count++;
    }
    if (plan->count > 0) qsort(places, (size_t)plan->count, sizeof *places, checkpoint_place_order_);
    const bool good =
        (plan->count > 0 || fail(error, CODE_IO, "%s: no rank holds anything to save", where)) && checkpoint_plan_rows_(plan, places, where, error);
    free(places);
    return good;
}

// Rank 0, before anything is written: leftovers are removed, the slices tile the tensors, the disk has room, the directory is there.
static inline bool checkpoint_prepare_(CheckpointPlan_ *plan, const int64_t *counts, int ranks, const char *out, const char *temporary,
                                       Error *error) {
    int64_t bytes = 1 << 20; // headers, manifest, directories
    for (int64_t i = 0; i < plan->count; i++) {
        const CheckpointSlice *s = &plan->slices[i];
        bytes += (s->to - s->from) * (int64_t)dtype_bytes(s->dtype) + 1024;
    }
    return checkpoint_plan_(plan, counts, ranks, temporary, error) && checkpoint_clean(out, error) && checkpoint_check_space_(out, bytes, error) &&
           (mkdir(temporary, 0777) == 0 || fail(error, CODE_IO, "%s: cannot create the directory: %s", temporary, strerror(errno)));
}

// ----------------------------------------------------------------------------
// A save: begun by all ranks, written by a thread of each, finished by all ranks

// How the slices' data comes where the thread cannot read it: the caller's thread copies it, a piece at a time, when it waits for the thread.
typedef struct {
    void (*copy)(void *context, void *to, const void *from, size_t bytes); // NULL: the data is host memory
    void *context;
    void *piece; // (FILES_CHUNK_BYTES) host memory
} CheckpointFetch;

typedef struct {
    Comm *comm;                // NULL: no save is under way
    char *out, *temporary;     // temporary: OUT/step_N.tmp
    CheckpointState state;     // with a copy of the list of data files
    CheckpointDataFile *files; // that list; the paths are the caller's
    int64_t keep;
    int64_t *counts;       // (ranks) slices that are not empty
    CheckpointPlan_ plan;  // on rank 0
    CheckpointSlice *mine; // (count)
    int count;
    CheckpointFetch fetch;
    const void *wanted; // by the thread: so many bytes
    size_t wanted_bytes;
    atomic_bool wants; // the thread waits for them
    pthread_t thread;
    bool joinable;
    atomic_llong progress; // of the thread: chunks written, syncs done
    atomic_bool written;   // until then, what follows is the thread's
    ManifestFile file;
    bool good;
    Error error;
} CheckpointSave;

// The thread: bytes of a slice, where it can read them.
static inline const void *checkpoint_fetch_(CheckpointSave *save, const void *data, size_t bytes) {
    const struct timespec nap = {.tv_nsec = 20000};
    if (save->fetch.copy == NULL) return data;
    save->wanted = data, save->wanted_bytes = bytes;
    atomic_store(&save->wants, true);
    while (atomic_load(&save->wants)) nanosleep(&nap, NULL);
    return save->fetch.piece;
}

// The caller's thread: copies what the other waits for. False: it waits for nothing.
static inline bool checkpoint_serve_(CheckpointSave *save) {
    if (!atomic_load(&save->wants)) return false;
    save->fetch.copy(save->fetch.context, save->fetch.piece, save->wanted, save->wanted_bytes);
    atomic_store(&save->wants, false);
    return true;
}

// A slice's data; a sync where much is not on the disk yet.
static inline bool checkpoint_write_slice_(CheckpointSave *save, SafetensorsWriter *writer, const CheckpointSlice *s, int64_t *unsynced,
                                           Error *error) {
    const int64_t bytes = (s->to - s->from) * (int64_t)dtype_bytes(s->dtype);
    for (int64_t at = 0; at < bytes; at += FILES_CHUNK_BYTES) {
        const int64_t span = min_i64(FILES_CHUNK_BYTES, bytes - at);
        const void *data = checkpoint_fetch_(save, (const char *)s->data + at, (size_t)span);
        if (!safetensors_write(writer, data, (size_t)span, error)) return false;
        atomic_fetch_add(&save->progress, 1);
        *unsynced += span;
        if (*unsynced < CHECKPOINT_SYNC_BYTES) continue;
        if (!file_sync(writer->file.fd, writer->file.path, error)) return false;
        atomic_fetch_add(&save->progress, 1);
        *unsynced = 0;
    }
    return true;
}

// This rank's file, synced: whole tensors keep their shape, parts are rows of elements.
static inline bool checkpoint_write_(CheckpointSave *save, const char *path, Error *error) {
    const CheckpointSlice *slices = save->mine;
    const int count = save->count;
    SafetensorsEntry *entries = base_new((size_t)count, sizeof *entries);
    int entry_count = 0;
    for (int i = 0; i < count; i++) {
        const CheckpointSlice *s = &slices[i];
        if (s->from == s->to) continue;
        SafetensorsEntry *entry = &entries[entry_count++];
        *entry = (SafetensorsEntry){.name = s->name, .dtype = dtype_names[s->dtype], .rank = 1, .shape = {s->to - s->from}};
        if (checkpoint_is_whole_(s)) entry->rank = s->rank, entry->shape[0] = s->shape[0], entry->shape[1] = s->shape[1];
    }
    SafetensorsWriter writer;
    bool good = safetensors_write_begin(&writer, path, entries, entry_count, NULL, error);
    free(entries);
    if (!good) return false;
    int64_t unsynced = 0;
    for (int i = 0; good && i < count; i++) good = checkpoint_write_slice_(save, &writer, &slices[i], &unsynced, error);
    if (good) return safetensors_write_end(&writer, &save->file.bytes, save->file.xxh3, error);
    safetensors_write_abandon(&writer);
    return false;
}

// The thread: files and host memory only.
static inline void *checkpoint_thread_(void *argument) {
    CheckpointSave *save = argument;
    char name[CHECKPOINT_NAME_CHARS];
    checkpoint_file_name_(save->comm->rank, name);
    char *path = path_join(save->temporary, name);
    save->good = checkpoint_write_(save, path, &save->error);
    free(path);
    atomic_store(&save->written, true);
    return NULL;
}

// Writes the manifest and syncs it and the names.
static inline bool checkpoint_write_manifest_(const char *directory, const Manifest *manifest, Error *error) {
    char *path = path_join(directory, CHECKPOINT_MANIFEST), *text = manifest_text(manifest);
    FileWriter writer;
    bool good = text != NULL || fail(error, CODE_IO, "%s: cannot be put into JSON (out of memory, or a name is not UTF-8)", path);
    good = good && (strlen(text) <= MANIFEST_MAX_BYTES ||
                    fail(error, CODE_IO, "%s: would have %zu bytes, at most %d can be read", path, strlen(text), MANIFEST_MAX_BYTES));
    if (good && (good = file_writer_open(&writer, path, error))) {
        good = file_writer_add(&writer, text, strlen(text), error);
        if (good)
            good = file_writer_finish(&writer, NULL, error);
        else
            file_writer_free(&writer);
    }
    free(text);
    free(path);
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

// Size and hash of a rank's file, as ranks tell them.
typedef struct {
    int64_t bytes;
    char xxh3[FILES_HASH_CHARS];
} CheckpointWritten_;

// Puts the sizes and hashes of all ranks' files into rank 0's plan; an error where a rank could not write.
static inline bool checkpoint_gather_files_(CheckpointSave *save, Error *error) {
    Comm *comm = save->comm;
    CheckpointWritten_ written, *all = base_new((size_t)comm->size, sizeof *all);
    memset(&written, 0, sizeof written); // padding travels too
    written.bytes = save->file.bytes;
    memcpy(written.xxh3, save->file.xxh3, sizeof written.xxh3);
    comm_all_gather(comm->world, all, &written, (int64_t)sizeof written, COMM_BYTE);
    for (int r = 0; comm->rank == 0 && r < comm->size; r++) {
        if (save->counts[r] == 0) continue;
        ManifestFile *entry = &save->plan.manifest.files[save->plan.file_of[r]];
        entry->bytes = all[r].bytes;
        memcpy(entry->xxh3, all[r].xxh3, sizeof entry->xxh3);
    }
    free(all);
    return checkpoint_agree_(comm, save->good, &save->error, error);
}

static inline void checkpoint_save_free_(CheckpointSave *save) {
    checkpoint_plan_free_(&save->plan);
    json_decref(save->state.model);
    json_decref(save->state.flags);
    free(save->files);
    free(save->counts);
    free(save->mine);
    free(save->out);
    free(save->temporary);
    memset(save, 0, sizeof *save);
}

// Begins a save of OUT/step_N from the ranks' slices, which together tile every tensor (at most one of a tensor on a rank): a thread writes
// this rank's file while the caller goes on. The slices' data and the paths of the state stay as they are, and `save`, all zero before but for
// `fetch`, stays where it is, until checkpoint_save_finish, which brings the data to the thread where `fetch` says how. OUT exists and is locked by
// the caller. After an error nothing is under way.
static inline bool checkpoint_save_begin(CheckpointSave *save, Comm *comm, const char *out, const CheckpointState *state,
                                         const CheckpointSlice *slices, int count, int64_t keep, Error *error) {
    char name[48];
    checkpoint_name_(state->step, ".tmp", name);
    save->comm = comm, save->state = *state, save->keep = keep, save->count = count;
    save->out = base_copy_text(out), save->temporary = path_join(out, name);
    json_incref(save->state.model);
    json_incref(save->state.flags);
    save->files = base_new((size_t)state->data_file_count, sizeof *save->files);
    for (int64_t i = 0; i < state->data_file_count; i++) save->files[i] = state->data_files[i];
    save->state.data_files = save->files;
    save->counts = base_new((size_t)comm->size, sizeof *save->counts);
    save->mine = base_new((size_t)count, sizeof *save->mine);
    for (int i = 0; i < count; i++) save->mine[i] = slices[i];
    checkpoint_gather_(comm, slices, count, save->counts, &save->plan);
    Error own = {0};
    const bool prepared = comm->rank != 0 || checkpoint_prepare_(&save->plan, save->counts, comm->size, out, save->temporary, &own);
    if (!checkpoint_agree_(comm, prepared, &own, error)) {
        checkpoint_save_free_(save);
        return false;
    }
    save->good = true;
    if (save->counts[comm->rank] == 0) {
        atomic_store(&save->written, true);
        return true;
    }
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // signals are the main thread's
    const int status = pthread_create(&save->thread, NULL, checkpoint_thread_, save);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    save->joinable = status == 0;
    if (status != 0) { // told at the end, like any failure of one rank's
        save->good = fail(&save->error, CODE_IO, "%s: cannot start the thread that writes it: %s", save->temporary, strerror(status));
        atomic_store(&save->written, true);
    }
    return true;
}

// Is this rank's file written, or has writing failed? When that is so on all ranks, finishing takes no time.
static inline bool checkpoint_save_written(const CheckpointSave *save) { return atomic_load(&save->written); }

// Waits until all ranks' files are written, bringing the thread what it asks for. A rank shows signs of life as long as its file grows: a disk that
// hangs is seen by a watchdog.
static inline void checkpoint_save_wait_(CheckpointSave *save) {
    CheckpointPulse_ pulse = {.comm = save->comm, .began_ms = clock_ms()};
    for (long long seen = -1; !atomic_load(&save->written);) {
        const long long now = atomic_load(&save->progress);
        const struct timespec nap = {.tv_nsec = save->fetch.copy != NULL ? 20000 : 200000};
        if (now != seen) checkpoint_pulse_(&pulse);
        seen = now;
        if (!checkpoint_serve_(save)) nanosleep(&nap, NULL); // an interrupted one is as good
    }
    if (save->joinable) pthread_join(save->thread, NULL);
    checkpoint_pulse_end_(&pulse);
}

// Ends a save: waits for the files, commits, and deletes old checkpoints so that `keep` remain (0: all). After a failure the checkpoints that
// were there are as they were.
static inline bool checkpoint_save_finish(CheckpointSave *save, Error *error) {
    const int64_t step = save->state.step;
    char name[48], old_name[48];
    checkpoint_name_(step, "", name);
    checkpoint_name_(step, ".old", old_name);
    char *final = path_join(save->out, name), *old = path_join(save->out, old_name);
    Error own = {0};
    bool good = true;
    checkpoint_save_wait_(save);
    const bool written = checkpoint_gather_files_(save, error);
    if (save->comm->rank == 0) {
        save->plan.manifest.state = save->state;
        if (written && checkpoint_write_manifest_(save->temporary, &save->plan.manifest, &own) &&
            checkpoint_commit_(save->temporary, final, old, &own)) {
            good = directory_sync(save->out, &own) && checkpoint_clean(save->out, &own) && checkpoint_prune_(save->out, step, save->keep, &own);
        } else {
            Error ignored = {0}; // the first error is the one to tell; what is left takes space that others may need now
            (void)directory_remove(save->temporary, &ignored);
            good = false;
        }
    }
    good = written && checkpoint_agree_(save->comm, good, &own, error);
    checkpoint_save_free_(save);
    free(final);
    free(old);
    return good;
}

// Both at once: returns when the checkpoint is there.
static inline bool checkpoint_save(Comm *comm, const char *out, const CheckpointState *state, const CheckpointSlice *slices, int count,
                                   int64_t keep, Error *error) {
    CheckpointSave save;
    memset(&save, 0, sizeof save);
    return checkpoint_save_begin(&save, comm, out, state, slices, count, keep, error) && checkpoint_save_finish(&save, error);
}

// Seconds between two checkpoints that lose the least of a job that fails every mtbf_s seconds, when a checkpoint costs cost_s seconds (Young
// 1974, "A first order approximation to the optimum checkpoint interval").
static inline double checkpoint_interval(double cost_s, double mtbf_s) { return sqrt(2 * cost_s * mtbf_s); }

#endif
