// state.h: the state of a run in the arenas of zero.h: drawn at the start, or read from weights or a checkpoint; the slices of it that a checkpoint
// holds; the whole of a tensor. Every rank draws, reads and gives the pieces that its shards hold: where they live when that is host memory, else
// by way of a copy. Does not write files (checkpoint_save.h), nor tell the other ranks what has changed (zero_publish).
#ifndef LLMC_STATE_H
#define LLMC_STATE_H

#include "llmc/base.h"            // Error, base_new
#include "llmc/checkpoint.h"      // CheckpointSlice
#include "llmc/checkpoint_read.h" // checkpoint_read
#include "llmc/model.h"           // Tensor, model_init_values, model_hash_values
#include "llmc/model_source.h"    // ModelWeights, weights_read, weights_slice
#include "llmc/zero_comm.h"       // Zero, zero_piece, zero_exact, zero_whole

// values (count), fp32, to where they live, rounded to the nearest where that is bf16.
static inline void state_put_(const Zero *zero, Buffer to, const float *values, int64_t count) {
    if (to.dtype == DTYPE_F32) {
        zero->device->copy_in(zero->device, to.data, values, (size_t)count * sizeof *values);
        return;
    }
    uint16_t *bits = base_new((size_t)count, sizeof *bits);
    for (int64_t i = 0; i < count; i++) bits[i] = bf16_from_f32(values[i]);
    zero->device->copy_in(zero->device, to.data, bits, (size_t)count * sizeof *bits);
    free(bits);
}

// ----------------------------------------------------------------------------
// Initial values

// Initial values of elements [from, from+count) of a tensor's part. Returns their contribution to the init hash.
static inline uint64_t state_draw_values_(const Tensor *tensor, const Part *part, uint64_t key, int64_t from, int64_t count, float *values) {
    uint64_t hash = 0;
    for (int64_t done = 0, run; done < count; done += run) {
        const int64_t element = layout_global_element(tensor, part, from + done, count - done, &run);
        model_init_values(tensor, key, element, run, values + done);
        hash += model_hash_values(tensor, element, run, values + done);
    }
    return hash;
}

// Draws the parameters on the host from (seed, tensor, element), a piece at a time: the same for every layout. Returns the init hash, of all ranks
// together.
static inline uint64_t state_draw(Zero *zero, uint64_t seed) {
    enum { SLICE = 1 << 14, PIECE = 256 * SLICE };
    const uint64_t key = rng_key(seed, RNG_INIT);
    float *values = base_new(PIECE, sizeof *values);
    uint64_t sum = 0;
    for (int i = 0; i < zero->model->count; i++) {
        const Tensor *tensor = &zero->model->tensors[i];
        const Part *part = &zero->part[i];
        const ZeroPiece piece = zero_piece(zero, i);
        uint64_t hash = 0;
        for (int64_t begin = piece.from; begin < piece.to; begin += PIECE) {
            const int64_t count = min_i64(PIECE, piece.to - begin);
#pragma omp parallel for schedule(static) reduction(+ : hash)
            for (int64_t slice = 0; slice < ceil_div(count, SLICE); slice++) {
                const int64_t first = slice * SLICE, length = min_i64(SLICE, count - first);
                hash += state_draw_values_(tensor, part, key, begin + first, length, values + first);
            }
            state_put_(zero, buffer_at(zero_exact(zero, tensor->unit), piece.at + begin - piece.from), values, count);
            comm_progress(zero->comm);
        }
        if (part->counts && zero->layout->replica == 0) sum += hash;
    }
    free(values);
    comm_all_reduce(zero->comm->world, &sum, 1, COMM_I64, COMM_SUM);
    return sum;
}

// --init-from: weights only, of a checkpoint of either precision or of a Hugging Face model. An error is of this rank alone.
static inline bool state_read_weights(Zero *zero, ModelWeights *weights, Error *error) {
    enum { PIECE = 1 << 24 };
    bool good = true;
    for (int i = 0; good && i < zero->model->count; i++) {
        const Tensor *tensor = &zero->model->tensors[i];
        const ZeroPiece piece = zero_piece(zero, i);
        float *values = base_new((size_t)min_i64(PIECE, piece.to - piece.from), sizeof *values);
        for (int64_t begin = piece.from; good && begin < piece.to; begin += PIECE) {
            const int64_t count = min_i64(PIECE, piece.to - begin);
            good =
                weights_read(weights, tensor, &zero->part[i], begin, begin + count, values, error) && weights_finite(tensor, values, count, error);
            if (good) state_put_(zero, buffer_at(zero_exact(zero, tensor->unit), piece.at + begin - piece.from), values, count);
            comm_progress(zero->comm);
        }
        free(values);
    }
    return good;
}

// ----------------------------------------------------------------------------
// Slices of checkpoints

// This rank's piece of a tensor in one of its shards' arenas.
static inline CheckpointSlice state_slice_(const Zero *zero, int i, const char *prefix, Buffer shard) {
    const ZeroPiece piece = zero_piece(zero, i);
    return weights_slice(&zero->model->tensors[i], &zero->part[i], prefix, shard.dtype, piece.from, piece.to, buffer_at(shard, piece.at).data);
}

// Everything that a run needs to go on: a row per tensor and kind of state that this rank holds a piece of; with `own` only of what no other
// rank writes. The caller frees it.
static inline CheckpointSlice *state_slices(const Zero *zero, bool own, int *count) {
    CheckpointSlice *rows = base_new((size_t)zero->model->count * 4, sizeof *rows);
    *count = 0;
    for (int i = 0; i < zero->model->count; i++) {
        const ZeroPiece piece = zero_piece(zero, i);
        if (piece.from == piece.to || (own && !(zero->part[i].counts && zero->layout->replica == 0))) continue;
        const ZeroShard shard = zero_shard(zero, zero->model->tensors[i].unit);
        rows[(*count)++] = state_slice_(zero, i, "", shard.param);
        if (shard.master.data != NULL) rows[(*count)++] = state_slice_(zero, i, "master/", shard.master);
        rows[(*count)++] = state_slice_(zero, i, "adam_m/", shard.adam_m);
        rows[(*count)++] = state_slice_(zero, i, "adam_v/", shard.adam_v);
    }
    return rows;
}

static inline size_t state_slice_bytes_(const CheckpointSlice *slice) { return (size_t)(slice->to - slice->from) * dtype_bytes(slice->dtype); }

// Starts to copy what the slices hold to the snapshot, and points them there. The device's snapshot_wait says when it is complete.
static inline void state_snapshot(Zero *zero, CheckpointSlice *slices, int count) {
    char *at = zero->snapshot;
    zero->device->snapshot_begin(zero->device);
    for (int i = 0; i < count; i++) {
        const size_t bytes = state_slice_bytes_(&slices[i]);
        zero->device->snapshot_copy(zero->device, at, slices[i].data, bytes);
        slices[i].data = at;
        at += bytes;
        comm_progress(zero->comm);
    }
}

// Reads slices to where they live, one at a time where the way is by a copy. An error is of this rank alone.
static inline bool state_read(Zero *zero, const Checkpoint *checkpoint, const CheckpointSlice *slices, int count, Error *error) {
    Device *d = zero->device;
    if (d->on_host) return checkpoint_read(checkpoint, slices, count, false, error);
    bool good = true;
    for (int i = 0; good && i < count; i++) {
        CheckpointSlice copy = slices[i];
        copy.data = base_new(state_slice_bytes_(&copy), 1);
        good = checkpoint_read(checkpoint, &copy, 1, false, error);
        if (good) d->copy_in(d, slices[i].data, copy.data, state_slice_bytes_(&copy));
        free(copy.data);
    }
    return good;
}

// ----------------------------------------------------------------------------
// The whole of a tensor, or of its gradient, on every rank. The caller frees it.
static inline float *state_whole(const Zero *zero, int tensor, bool gradient) {
    const int unit = zero->model->tensors[tensor].unit;
    return zero_whole(zero, tensor, gradient ? zero_shard(zero, unit).grad : zero_exact(zero, unit));
}

#endif
