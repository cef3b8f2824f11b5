// checkpoint_read.h: reads tensors of an open checkpoint into any layout: what a rank wants and what the files hold may be cut
// differently. Reads the bytes that are wanted, from the files that hold them; each rank by itself.
#ifndef LLMC_CHECKPOINT_READ_H
#define LLMC_CHECKPOINT_READ_H

#include "llmc/checkpoint.h" // Checkpoint, CheckpointSlice
#include "llmc/precision.h"  // bf16_to_f32, bf16_from_f32

enum { CHECKPOINT_DIRECT_BYTES = 64 << 10 }; // pieces from this size on go straight to where they are wanted
enum { CHECKPOINT_GAP_BYTES = 4 << 10 };     // holes between smaller pieces that are read over: a page costs less than a call
enum { CHECKPOINT_RUNS = 1024 };

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

// Elements that lie together in a file's slice and in a wanted one.
typedef struct {
    int64_t from, to; // first element in the stored slice, and in the wanted one
    int64_t count;
} CheckpointRun_;

// Reads runs of one stored slice into one wanted slice. Small ones that are close together are read at once.
typedef struct {
    Comm *comm;
    const SafetensorsFile *file;
    const SafetensorsTensor *stored;
    Dtype from;
    const CheckpointSlice *wanted;
    char *chunk;                          // (FILES_CHUNK_BYTES)
    CheckpointRun_ runs[CHECKPOINT_RUNS]; // not yet read; ascending, together at most a chunk
    int run_count;
} CheckpointReader_;

static inline bool checkpoint_flush_(CheckpointReader_ *reader, Error *error) {
    if (reader->run_count == 0) return true;
    const CheckpointRun_ *runs = reader->runs, *last = &runs[reader->run_count - 1];
    const int64_t from_bytes = (int64_t)dtype_bytes(reader->from), to_bytes = (int64_t)dtype_bytes(reader->wanted->dtype);
    const int64_t span = last->from + last->count - runs[0].from;
    comm_progress(reader->comm);
    if (!safetensors_read(reader->file, reader->stored, runs[0].from * from_bytes, span * from_bytes, reader->chunk, error)) return false;
    for (int i = 0; i < reader->run_count; i++) {
        const char *at = reader->chunk + (runs[i].from - runs[0].from) * from_bytes;
        checkpoint_convert_((char *)reader->wanted->data + runs[i].to * to_bytes, reader->wanted->dtype, at, reader->from, runs[i].count);
    }
    reader->run_count = 0;
    return true;
}

// Can a run be read together with those before it?
static inline bool checkpoint_fits_(const CheckpointReader_ *reader, int64_t from, int64_t count) {
    if (reader->run_count == 0) return true;
    const CheckpointRun_ *first = &reader->runs[0], *last = &reader->runs[reader->run_count - 1];
    const int64_t bytes = (int64_t)dtype_bytes(reader->from);
    return reader->run_count < CHECKPOINT_RUNS && (from + count - first->from) * bytes <= FILES_CHUNK_BYTES &&
           (from - last->from - last->count) * bytes <= CHECKPOINT_GAP_BYTES;
}

// Takes a run behind those before it.
static inline bool checkpoint_take_(CheckpointReader_ *reader, CheckpointRun_ run, Error *error) {
    const int64_t bytes = (int64_t)dtype_bytes(reader->from), chunk = FILES_CHUNK_BYTES / bytes;
    const bool direct = reader->from == reader->wanted->dtype && run.count * bytes >= CHECKPOINT_DIRECT_BYTES;
    while (run.count > 0) {
        const int64_t span = min_i64(run.count, chunk);
        if (direct) {
            comm_progress(reader->comm);
            if (!safetensors_read(reader->file, reader->stored, run.from * bytes, span * bytes, (char *)reader->wanted->data + run.to * bytes,
                                  error)) {
                return false;
            }
        } else {
            if (!checkpoint_fits_(reader, run.from, span) && !checkpoint_flush_(reader, error)) return false;
            reader->runs[reader->run_count++] = (CheckpointRun_){run.from, run.to, span};
        }
        run.from += span, run.to += span, run.count -= span;
    }
    return true;
}

// Rows [*first, *last) and columns [*left, *right) of the tensor outside which two slices have nothing in common.
static inline bool checkpoint_meet_(const ManifestSlice *s, const CheckpointSlice *w, int64_t *first, int64_t *last, int64_t *left,
                                    int64_t *right) {
    const int64_t s_width = s->end[1] - s->begin[1], w_width = w->end[1] - w->begin[1];
    *first = max_i64(s->begin[0] + s->from / s_width, w->begin[0] + w->from / w_width);
    *last = min_i64(s->begin[0] + ceil_div(s->to, s_width), w->begin[0] + ceil_div(w->to, w_width));
    *left = max_i64(s->begin[1], w->begin[1]);
    *right = min_i64(s->end[1], w->end[1]);
    return *first < *last && *left < *right;
}

// Reads what a stored slice has of the wanted one; *got += its elements.
static inline bool checkpoint_read_slice_(CheckpointReader_ *reader, const ManifestSlice *s, int64_t *got, Error *error) {
    const CheckpointSlice *w = reader->wanted;
    const int64_t s_width = s->end[1] - s->begin[1], w_width = w->end[1] - w->begin[1];
    int64_t first, last, left, right;
    if (!checkpoint_meet_(s, w, &first, &last, &left, &right)) return true;
    if (s->begin[1] == w->begin[1] && s_width == w_width) {          // whole rows of both boxes are the same: one run
        const int64_t shift = (w->begin[0] - s->begin[0]) * s_width; // element of the stored box - element of the wanted box
        const int64_t a = max_i64(s->from, w->from + shift), b = min_i64(s->to, w->to + shift);
        *got += max_i64(0, b - a);
        return (a >= b || checkpoint_take_(reader, (CheckpointRun_){a - s->from, a - shift - w->from, b - a}, error)) &&
               checkpoint_flush_(reader, error);
    }
    for (int64_t row = first; row < last; row++) {
        const int64_t s_zero = (row - s->begin[0]) * s_width - s->begin[1],
                      w_zero = (row - w->begin[0]) * w_width - w->begin[1]; // element of column 0
        const int64_t a = max_i64(left, max_i64(s->from - s_zero, w->from - w_zero)), b = min_i64(right, min_i64(s->to - s_zero, w->to - w_zero));
        if (a >= b) continue;
        *got += b - a;
        if (!checkpoint_take_(reader, (CheckpointRun_){s_zero + a - s->from, w_zero + a - w->from, b - a}, error)) return false;
    }
    return checkpoint_flush_(reader, error);
}

// Finds a wanted tensor and checks its shape and dtype; *from is the dtype in the files.
static inline const ManifestTensor *checkpoint_match_(const Checkpoint *checkpoint, const CheckpointSlice *wanted, bool convert, Dtype *from,
                                                      Error *error) {
    const ManifestTensor *row = manifest_tensor(&checkpoint->manifest, wanted->name);
    if (row == NULL) {
        fail(error, CODE_INPUT, "%s: tensor '%s' is missing", checkpoint->directory, wanted->name);
        return NULL;
    }
    if (row->rank != wanted->rank || row->shape[0] != wanted->shape[0] || row->shape[1] != wanted->shape[1]) {
        fail(error, CODE_INPUT, "%s: tensor '%s': shape: got rank %d [%lld, %lld], wanted rank %d [%lld, %lld]", checkpoint->directory,
             wanted->name, row->rank, (long long)row->shape[0], (long long)row->shape[1], wanted->rank, (long long)wanted->shape[0],
             (long long)wanted->shape[1]);
        return NULL;
    }
    for (*from = 0; *from < DTYPE_COUNT && strcmp(dtype_names[*from], row->type->name) != 0; (*from)++) continue;
    const bool floats = (*from == DTYPE_F32 || *from == DTYPE_BF16) && (wanted->dtype == DTYPE_F32 || wanted->dtype == DTYPE_BF16);
    if (*from != wanted->dtype && !(convert && floats)) {
        fail(error, CODE_INPUT, "%s: tensor '%s': dtype: got %s, wanted %s", checkpoint->directory, wanted->name, row->type->name,
             dtype_names[wanted->dtype]);
        return NULL;
    }
    return checkpoint_slice_check_(wanted, error) ? row : NULL;
}

// A stored slice that has something of a wanted one.
typedef struct {
    const ManifestSlice *slice;
    int wanted;
    Dtype from;
} CheckpointMeeting_;

static inline int checkpoint_meeting_order_(const void *a, const void *b) {
    const CheckpointMeeting_ *x = a, *y = b;
    if (x->slice->file != y->slice->file) return x->slice->file < y->slice->file ? -1 : 1;
    return (x->wanted > y->wanted) - (x->wanted < y->wanted);
}

// All meetings, file by file; false when something wanted is not there as wanted. The caller frees them.
static inline bool checkpoint_meetings_(const Checkpoint *checkpoint, const CheckpointSlice *wanted, int count, bool convert,
                                        CheckpointMeeting_ **meetings, size_t *meeting_count, Error *error) {
    size_t room = 0;
    *meetings = NULL;
    *meeting_count = 0;
    for (int i = 0; i < count; i++) {
        Dtype from;
        const ManifestTensor *row = checkpoint_match_(checkpoint, &wanted[i], convert, &from, error);
        if (row == NULL) return false;
        for (int64_t j = 0; j < row->slice_count; j++) {
            int64_t first, last, left, right;
            if (!checkpoint_meet_(&row->slices[j], &wanted[i], &first, &last, &left, &right)) continue;
            if (*meeting_count == room) {
                room = 2 * room + 64;
                *meetings = base_grow(*meetings, room, sizeof **meetings);
            }
            (*meetings)[(*meeting_count)++] = (CheckpointMeeting_){&row->slices[j], i, from};
        }
    }
    if (*meeting_count > 0) qsort(*meetings, *meeting_count, sizeof **meetings, checkpoint_meeting_order_);
    return true;
}

// Reads the meetings, opening each file once; got[i] += elements of wanted[i].
static inline bool checkpoint_read_meetings_(const Checkpoint *checkpoint, const CheckpointSlice *wanted, const CheckpointMeeting_ *meetings,
                                             size_t count, int64_t *got, Error *error) {
    CheckpointReader_ *reader = base_new(1, sizeof *reader);
    SafetensorsFile file = {.fd = -1};
    reader->comm = checkpoint->comm;
    reader->file = &file;
    reader->chunk = base_new(FILES_CHUNK_BYTES, 1);
    bool good = true;
    for (size_t i = 0; good && i < count; i++) {
        const ManifestSlice *slice = meetings[i].slice;
        if (i == 0 || slice->file != meetings[i - 1].slice->file) {
            safetensors_close(&file);
            char *path = path_join(checkpoint->directory, checkpoint->manifest.files[slice->file].name);
            good = safetensors_open(path, &file, error);
            free(path);
            if (!good) break;
        }
        reader->wanted = &wanted[meetings[i].wanted];
        reader->from = meetings[i].from;
        reader->stored = safetensors_find(&file.index, reader->wanted->name);
        good = (reader->stored != NULL && reader->stored->elements == slice->to - slice->from) ||
               fail(error, CODE_INPUT, "%s: changed while it was read", file.path);
        good = good && checkpoint_read_slice_(reader, slice, &got[meetings[i].wanted], error);
    }
    safetensors_close(&file);
    free(reader->chunk);
    free(reader);
    return good;
}

// Fills the data of the wanted slices; the rest of the checkpoint is left alone. `convert` allows F32 <-> BF16.
// All are checked before the first is read.
static inline bool checkpoint_read(const Checkpoint *checkpoint, const CheckpointSlice *wanted, int count, bool convert, Error *error) {
    CheckpointMeeting_ *meetings;
    size_t meeting_count;
    int64_t *got = base_new((size_t)count, sizeof *got);
    bool good = checkpoint_meetings_(checkpoint, wanted, count, convert, &meetings, &meeting_count, error) &&
                checkpoint_read_meetings_(checkpoint, wanted, meetings, meeting_count, got, error);
    for (int i = 0; good && i < count; i++) {
        good = got[i] == wanted[i].to - wanted[i].from ||
               fail(error, CODE_INPUT, "%s: tensor '%s': its files hold %lld elements for the %lld that are wanted of it", checkpoint->directory,
                    wanted[i].name, (long long)got[i], (long long)(wanted[i].to - wanted[i].from));
    }
    free(meetings);
    free(got);
    return good;
}

#endif
