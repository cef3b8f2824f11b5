// zero_comm.h: what moves between the ranks that share or copy parameters: gradients are reduced while backward runs, parameters are gathered
// before use (stage 3) or after the update (1, 2). zero.h says where things are. Every rank of a group calls these functions for
// the same units in the same order, which follows from the schedule alone.
//
//     zero_step_begin(zero);
//     per micro-batch: zero_weights(zero, u, w) ... zero_gradients(zero, u, g) ... zero_gradients_done(zero, u, last)
//     zero_gradients_finish(zero);
//     per unit: update; zero_publish(zero, u)
//     zero_publish_finish(zero);
#ifndef LLMC_ZERO_COMM_H
#define LLMC_ZERO_COMM_H

#include "llmc/zero.h" // Zero, zero_place, zero_point_

// ----------------------------------------------------------------------------
// Slots

// The slot that a unit is in, or must be put into: embedding and head have their own; a block takes the one that was not used last.
static inline int zero_slot_(const Zero *zero, const ZeroSlot *slots, int current, int unit) {
    if (unit == 0) return 0;
    if (unit == model_head_unit(zero->model)) return 1;
    for (int s = 2; s < 2 + zero->block_slots; s++) {
        if (slots[s].unit == unit) return s;
    }
    return zero->block_slots > 1 && current == 2 ? 3 : 2;
}

// ----------------------------------------------------------------------------
// Parameters

static inline void zero_gather_start_(Zero *zero, int unit) {
    ZeroSlot *slot = &zero->param_slots[zero_slot_(zero, zero->param_slots, zero->param_current, unit)];
    if (slot->unit == unit) return;
    if (slot->unit >= 0) comm_wait(&zero->gathers[slot->unit]); // prefetched and not used: the next pass begins elsewhere
    slot->unit = unit;
    const ZeroPlace place = zero_place(zero, unit);
    zero->gathers[unit] = comm_all_gather_start(zero->groups[LAYOUT_SHARD], slot->buffer.data, buffer_at(zero->param, place.shard_begin).data,
                                                place.count, comm_type_of(zero->param.dtype));
}

// Fills the weights of a unit by kind (absent where this rank or the configuration has none). In stage 3 they stay until another block takes the
// slot.
static inline void zero_weights(Zero *zero, int unit, Buffer weights[TENSOR_KINDS]) {
    if (zero->layout->zero < 3) {
        zero_point_(zero, unit, buffer_at(zero->param, zero->range[unit].begin), weights);
        return;
    }
    zero_gather_start_(zero, unit);
    comm_wait(&zero->gathers[unit]);
    const int slot = zero_slot_(zero, zero->param_slots, zero->param_current, unit);
    if (slot >= 2) zero->param_current = slot;
    zero_point_(zero, unit, zero->param_slots[slot].buffer, weights);
}

// Starts to gather the block that is used next; the one in use stays where it is.
static inline void zero_prefetch(Zero *zero, int unit) {
    if (zero->layout->zero == 3 && zero->block_slots > 1) zero_gather_start_(zero, unit);
}

// After a unit's parameters have changed on the ranks that own the shards: starts to tell the others.
static inline void zero_publish(Zero *zero, int unit) {
    const int stage = zero->layout->zero;
    if (stage != 1 && stage != 2) return;
    const ZeroPlace place = zero_place(zero, unit);
    zero->gathers[unit] = comm_all_gather_start(zero->groups[LAYOUT_SHARD], buffer_at(zero->param, zero->range[unit].begin).data,
                                                buffer_at(zero->param, place.whole_begin).data, place.count, comm_type_of(zero->param.dtype));
    if (!zero->config.overlap) comm_wait(&zero->gathers[unit]);
}

// Now every rank has the new parameters, or will gather them when it needs them.
static inline void zero_publish_finish(Zero *zero) {
    for (int u = 0; u < zero->model->units; u++) comm_wait(&zero->gathers[u]);
    for (int s = 0; s < 2 + ZERO_BLOCK_SLOTS; s++) zero->param_slots[s].unit = -1;
    zero->param_current = -1;
}

// ----------------------------------------------------------------------------
// Gradients

// Where a unit's new gradients are, whole.
static inline Buffer zero_gradient_base_(const Zero *zero, int unit) {
    if (zero->layout->zero < 2) return buffer_at(zero->grad, zero->range[unit].begin);
    return zero->grad_slots[zero_slot_(zero, zero->grad_slots, zero->grad_current, unit)].buffer;
}

// Waits for a bucket's sum and puts it where it belongs.
static inline void zero_bucket_finish_(Zero *zero, ZeroBucket *bucket) {
    Device *d = zero->device;
    const Layout *layout = zero->layout;
    if (!bucket->started || bucket->finished) return;
    for (int u = bucket->last; u >= bucket->first; u--) comm_wait(&zero->reductions[u]);
    bucket->finished = true;
    if (layout->zero >= 2) {
        const ZeroPlace place = zero_place(zero, bucket->first);
        const Buffer own = buffer_at(zero_gradient_base_(zero, bucket->first), layout->shard * place.count);
        const Buffer sum = buffer_at(zero->grad, place.shard_begin);
        if (zero->has_gradient_shard[bucket->first]) {
            d->accumulate(d, sum, own, place.count);
        } else {
            d->cast(d, sum, own, place.count);
        }
        zero->has_gradient_shard[bucket->first] = true;
    } else if (bucket->wire >= 0 && layout->shards == 1) {
        const Buffer whole = buffer_at(zero->grad, zero->range[bucket->first].begin);
        d->cast(d, whole, zero->wires[bucket->wire], zero_bucket_elements_(zero->range, bucket));
    }
    if (bucket->wire >= 0 && layout->zero < 2) zero->wire_bucket[bucket->wire] = -1;
}

// Rounds a bucket's gradients to bf16 for the way; returns them, or the gradients themselves where they travel in fp32.
static inline Buffer zero_wire_(Zero *zero, ZeroBucket *bucket) {
    const Buffer whole = zero_gradient_base_(zero, bucket->first);
    bucket->wire = -1;
    if (!zero_uses_wires_(zero->layout, &zero->config)) return whole;
    if (zero->layout->zero >= 2) {
        bucket->wire = zero_slot_(zero, zero->grad_slots, zero->grad_current, bucket->first);
    } else {
        bucket->wire = zero->wire_next;
        zero->wire_next = (zero->wire_next + 1) % ZERO_WIRES;
        const int before = zero->wire_bucket[bucket->wire];
        if (before >= 0) zero_bucket_finish_(zero, &zero->buckets[before]);
        zero->wire_bucket[bucket->wire] = (int)(bucket - zero->buckets);
    }
    const Buffer wire = zero->wires[bucket->wire];
    zero->device->cast(zero->device, wire, whole, zero_bucket_elements_(zero->range, bucket));
    return wire;
}

static inline void zero_bucket_start_(Zero *zero, ZeroBucket *bucket) {
    const Layout *layout = zero->layout;
    bucket->started = true, bucket->finished = false;
    if (layout->shards * layout->replicas == 1) return;
    const Buffer in = zero_wire_(zero, bucket);
    const CommType type = comm_type_of(in.dtype);
    if (layout->shards == 1) {
        zero->reductions[bucket->first] =
            comm_all_reduce_start(zero->groups[LAYOUT_REPLICA], in.data, zero_bucket_elements_(zero->range, bucket), type, COMM_SUM);
        return;
    }
    const int64_t begin = zero->range[bucket->first].begin;
    for (int u = bucket->last; u >= bucket->first; u--) {
        if (zero->range[u].count == 0) continue;
        const int64_t count = zero_place(zero, u).count;
        const Buffer out = buffer_at(zero_gradient_base_(zero, u), layout->shard * count);
        zero->reductions[u] = comm_reduce_scatter_start(zero->groups[LAYOUT_SHARD], out.data, COMM_F32,
                                                        buffer_at(in, zero->range[u].begin - begin).data, count, type, COMM_SUM);
    }
}

// Before a step's first micro-batch.
static inline void zero_step_begin(Zero *zero) {
    for (int b = 0; b < zero->bucket_count; b++) {
        ZeroBucket *bucket = &zero->buckets[b];
        bucket->started = bucket->finished = false;
        bucket->pending = 0;
        for (int u = bucket->first; u <= bucket->last; u++) bucket->pending += zero->range[u].count > 0;
    }
    for (int u = 0; u < zero->model->units; u++) zero->has_gradient_shard[u] = false;
    for (int w = 0; w < ZERO_WIRES; w++) zero->wire_bucket[w] = -1;
    for (int s = 0; s < 2 + ZERO_BLOCK_SLOTS; s++) zero->grad_slots[s].unit = -1;
    zero->wire_next = 0, zero->grad_current = -1;
}

// Do a micro-batch's gradients join those of the ones before? In stages 2 and 3 they are added after they were reduced.
static inline bool zero_accumulates(const Zero *zero, int microbatch) { return zero->layout->zero < 2 && microbatch > 0; }

// Does a micro-batch's backward start to reduce gradients, which then goes on meanwhile?
static inline bool zero_reduces(const Zero *zero, bool last) {
    if (zero->layout->zero >= 2) return true;
    return last && zero->config.overlap && zero->layout->shards * zero->layout->replicas > 1;
}

// Fills the places of a unit's gradients by kind.
static inline void zero_gradients(Zero *zero, int unit, Buffer grads[TENSOR_KINDS]) {
    if (zero->layout->zero >= 2) {
        const int s = zero_slot_(zero, zero->grad_slots, zero->grad_current, unit);
        ZeroSlot *slot = &zero->grad_slots[s];
        if (slot->unit >= 0) zero_bucket_finish_(zero, &zero->buckets[zero->bucket_of[slot->unit]]);
        slot->unit = unit;
        if (s >= 2) zero->grad_current = s;
    }
    zero_point_(zero, unit, zero_gradient_base_(zero, unit), grads);
}

// Sums the gradients of parameters that tensor-parallel ranks hold copies of, where each has seen only its tokens or heads.
static inline void zero_sum_copies_(Zero *zero, int unit) {
    const Tensor *tensors = zero->model->tensors;
    const int end = zero->unit_tensor[unit + 1];
    CommHandle handles[TENSOR_KINDS];
    int count = 0;
    const Buffer base = zero_gradient_base_(zero, unit);
    for (int i = zero->unit_tensor[unit]; i < end; i++) {
        const GradientSum sum = zero->part[i].sum;
        if (sum == GRADIENT_WHOLE) continue;
        const int first = i;
        int64_t elements = zero->part[i].elements;
        while (i + 1 < end && tensors[i + 1].joined && zero->part[i + 1].sum == sum) {
            elements += zero->part[++i].elements;
        }
        CommGroup *group = zero->groups[sum == GRADIENT_SUM_TP ? LAYOUT_TP : LAYOUT_KV];
        handles[count++] =
            comm_all_reduce_start(group, buffer_at(base, zero->offset[first] - zero->range[unit].begin).data, elements, COMM_F32, COMM_SUM);
    }
    for (int k = 0; k < count; k++) comm_wait(&handles[k]);
}

// A micro-batch's gradients of a unit are complete; `last`: none follows in this step. Stages 0 and 1 talk once a step.
static inline void zero_gradients_done(Zero *zero, int unit, bool last) {
    ZeroBucket *bucket = &zero->buckets[zero->bucket_of[unit]];
    const bool each = zero->layout->zero >= 2;
    if (!each && !last) return;
    zero_sum_copies_(zero, unit);
    bucket->pending--;
    if (each || (bucket->pending == 0 && zero->config.overlap)) zero_bucket_start_(zero, bucket);
    if (each && !zero->config.overlap) zero_bucket_finish_(zero, bucket);
}

// Sums of shards over their replicas, where there are some.
static inline void zero_sum_replicas_(Zero *zero) {
    Device *d = zero->device;
    const Layout *layout = zero->layout;
    if (layout->shards == 1 || layout->replicas == 1) return;
    for (int u = 0; u < zero->model->units; u++) {
        if (zero->range[u].count == 0) continue;
        const ZeroShard shard = zero_shard(zero, u);
        if (zero->config.reduce_bf16) { // every wire is free now: one after the other through the first
            const Buffer wire = buffer_of(zero->wires[0].data, DTYPE_BF16);
            d->cast(d, wire, shard.grad, shard.count);
            comm_all_reduce(zero->groups[LAYOUT_REPLICA], wire.data, shard.count, COMM_BF16, COMM_SUM);
            d->cast(d, shard.grad, wire, shard.count);
        } else {
            zero->reductions[u] = comm_all_reduce_start(zero->groups[LAYOUT_REPLICA], shard.grad.data, shard.count, COMM_F32, COMM_SUM);
        }
    }
    for (int u = zero->model->units - 1; u >= 0; u--) comm_wait(&zero->reductions[u]);
}

// After the last micro-batch: this rank's shards of all gradients are complete.
static inline void zero_gradients_finish(Zero *zero) {
    for (int b = 0; b < zero->bucket_count; b++) {
        if (!zero->buckets[b].started) zero_bucket_start_(zero, &zero->buckets[b]);
    }
    for (int b = 0; b < zero->bucket_count; b++) zero_bucket_finish_(zero, &zero->buckets[b]);
    zero_sum_replicas_(zero);
    CommGroup *copies = zero->groups[LAYOUT_EMBEDDING];
    if (zero->layout->config.tied && copies != NULL && copies->size > 1) {
        const ZeroShard shard = zero_shard(zero, 0);
        comm_all_reduce(copies, shard.grad.data, shard.count, COMM_F32, COMM_SUM);
    }
}

// ----------------------------------------------------------------------------
// count values of either type, as fp32 in host memory.
static inline void zero_read_(Device *device, float *values, Buffer from, int64_t count) {
    if (from.dtype == DTYPE_F32) {
        device->copy_out(device, values, from.data, (size_t)count * sizeof *values);
        return;
    }
    uint16_t *bits = base_new((size_t)count, sizeof *bits);
    device->copy_out(device, bits, from.data, (size_t)count * sizeof *bits);
    for (int64_t i = 0; i < count; i++) values[i] = bf16_to_f32(bits[i]);
    free(bits);
}

// The whole of a tensor, as fp32, on every rank, to be freed by the caller. own: this rank's shard of its unit.
static inline float *zero_whole(const Zero *zero, int i, Buffer own) {
    const Tensor *tensor = &zero->model->tensors[i];
    const Part *part = &zero->part[i];
    const ZeroPiece piece = zero_piece(zero, i);
    const int64_t pairs = ceil_div(tensor->elements, 2);
    float *whole = base_new((size_t)pairs, 2 * sizeof *whole);
    const bool counts = part->counts && zero->layout->replica == 0;
    for (int64_t at = piece.from, run; counts && at < piece.to; at += run) {
        const int64_t element = layout_global_element(tensor, part, at, piece.to - at, &run);
        zero_read_(zero->device, whole + element, buffer_at(own, piece.at + at - piece.from), run);
    }
    comm_all_reduce(zero->comm->world, whole, pairs, COMM_I64, COMM_SUM); // of one rank's bits and zeros: exact, also for -0 and NaN
    return whole;
}

#endif
