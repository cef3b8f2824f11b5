// zero.h: where parameters, gradients and optimizer state live: flat arenas, laid out by the tensor table, and divided over the
// data-parallel ranks that share them (ZeRO, Rajbhandari et al. 2020). This file: layout, sizes, allocation, and where things are;
// zero_comm.h moves them between ranks.
//
// A unit (embedding, a block, the head) is the piece that is divided, gathered, reduced and freed. Every unit of this rank follows the previous
// one in the order of the table, padded so that it divides evenly over the shards; element e of an arena of shards is element e - k*count/D of
// the k-th part of its unit. So whether an arena is whole or a shard, offsets follow from one function.
//   stage 0   everything is whole; all-reduce of gradients
//   stage 1   master weights and moments are shards; reduce-scatter of gradients once a step, all-gather of parameters
//   stage 2   gradients too: each block's are made in a slot and reduce-scattered in every micro-batch
//   stage 3   parameters too: each block's are gathered into a slot before use. The units that are used at both ends of a pass, embedding and
//             head, have slots of their own, gathered once a step.
#ifndef LLMC_ZERO_H
#define LLMC_ZERO_H

#include "llmc/comm.h"   // comm_alloc, CommHandle
#include "llmc/device.h" // Device, Buffer, Segment
#include "llmc/layout.h" // Layout, Part
#include "llmc/model.h"  // Model, Tensor

// Tensors, and every rank's part of a unit, start at multiples of this many elements (64 bytes of bf16), unless joined to their predecessor.
enum { ZERO_ALIGN_ELEMENTS = 32 };

typedef struct {
    int64_t begin, count; // elements of a whole arena, padding included; count 0: another rank's
} ZeroRange;

// What of the flags decides sizes besides the layout.
typedef struct {
    Dtype dtype;    // of parameters
    bool no_master; // bf16 parameters are all there is: updates are rounded at random
    bool overlap;
    bool reduce_bf16; // gradients travel in bf16
    double bucket_bytes;
    bool snapshot; // room in host memory for a copy of what this rank saves: for a checkpoint that is written while training goes on
    bool piece;    // room for a piece of it: for one that training waits for, on a device whose memory the host cannot read
} ZeroConfig;

static inline ZeroConfig zero_config(const Options *o) {
    return (ZeroConfig){.dtype = o->precision == PRECISION_BF16 ? DTYPE_BF16 : DTYPE_F32,
                        .no_master = o->master == MASTER_NONE,
                        .overlap = o->overlap,
                        .reduce_bf16 = o->grad_reduce == GRAD_REDUCE_BF16,
                        .bucket_bytes = o->bucket_mb * 1e6,
                        .snapshot = o->out != NULL && o->steps > 0 && o->save_every != 0 && o->async_save,
                        .piece = o->out != NULL && o->steps > 0 && o->device != DEVICE_CPU};
}

// A place for one unit's gathered parameters or new gradients.
typedef struct {
    int unit; // -1: nothing yet
    Buffer buffer;
} ZeroSlot;

// Units that are reduced together (stages 0 and 1), or one unit (2 and 3).
typedef struct {
    int first, last; // units, both held
    int pending;     // units whose gradients of this step are not complete
    bool started, finished;
    int wire; // bf16 messages: which buffer
} ZeroBucket;

typedef struct {
    size_t param_bytes, master_bytes, grad_bytes, optim_bytes; // optim: both moments
    size_t buffer_bytes;                                       // slots and messages
    size_t snapshot_bytes;                                     // host memory of saves: the copy, the piece
} ZeroBytes;

enum { ZERO_BLOCK_SLOTS = 2, ZERO_WIRES = 2 };
enum { ZERO_PIECE_BYTES = 8 << 20 }; // of a save's data on its way

typedef struct {
    const Model *model;
    const Layout *layout;
    Device *device;
    Comm *comm;
    CommGroup **groups; // (LAYOUT_GROUPS)
    ZeroConfig config;
    int64_t *offset;                            // (tensors) first element of a tensor in a whole arena; -1: another rank's
    ZeroRange *range;                           // (units)
    int *unit_tensor;                           // (units + 1) first tensor of a unit in the table
    int64_t elements;                           // of a whole arena; that of an arena of shards is elements/D
    Part *part;                                 // (tensors)
    Segment *segments, *counted;                // of this rank's parts, device memory; begin counts from the part
    int64_t *segment_first, *counted_first;     // (units + 1)
    Buffer param, master, grad, adam_m, adam_v; // master is absent when parameters are fp32
    // slots: [0] embedding, [1] head, then those of the blocks
    ZeroSlot param_slots[2 + ZERO_BLOCK_SLOTS], grad_slots[2 + ZERO_BLOCK_SLOTS];
    int block_slots, param_current, grad_current;
    Buffer wires[2 + ZERO_BLOCK_SLOTS]; // bf16 gradients on their way: one for each slot, or ZERO_WIRES for buckets
    int wire_next, wire_bucket[ZERO_WIRES];
    ZeroBucket *buckets;
    int bucket_count;
    int *bucket_of;           // (units)
    CommHandle *reductions;   // (units) of gradients
    CommHandle *gathers;      // (units) of parameters
    bool *has_gradient_shard; // (units) stages 2 and 3: something was added in this step
    void *exchange_slots;     // where slots and wires lie
    void *snapshot;           // host memory for all that this rank saves; NULL: none
    void *piece;              // (ZERO_PIECE_BYTES) host memory; NULL: none
    ZeroBytes bytes;          // allocated
} Zero;

// ----------------------------------------------------------------------------
// Layout, sizes: pure

// Fills offset (tensors) and range (units), each optional, and returns the elements of a whole arena.
static inline int64_t zero_layout(const Model *model, const Layout *layout, int64_t *offset, ZeroRange *range) {
    const int64_t unit_align = (int64_t)layout->shards * ZERO_ALIGN_ELEMENTS;
    int64_t at = 0, begin = 0;
    for (int u = 0; range != NULL && u < model->units; u++) range[u] = (ZeroRange){0, 0};
    for (int i = 0; i < model->count; i++) {
        const Tensor *t = &model->tensors[i];
        const Part part = layout_part(layout, t);
        if (i == 0 || t->unit != model->tensors[i - 1].unit) begin = at;
        if (!t->joined) at = round_up(at, ZERO_ALIGN_ELEMENTS);
        if (offset != NULL) offset[i] = part.held ? at : -1;
        at += part.elements;
        if (part.held && (i + 1 == model->count || model->tensors[i + 1].unit != t->unit)) {
            at = begin + round_up(at - begin, unit_align);
            if (range != NULL) range[t->unit] = (ZeroRange){begin, at - begin};
        }
    }
    return at;
}

// Elements of the largest block.
static inline int64_t zero_largest_block_(const Model *model, const ZeroRange *range, int *blocks) {
    int64_t largest = 0;
    *blocks = 0;
    for (int u = 1; u < model_head_unit(model); u++) {
        largest = max_i64(largest, range[u].count);
        *blocks += range[u].count > 0;
    }
    return largest;
}

// Elements of all slots of one kind, and the number of those for blocks.
static inline int64_t zero_slot_elements_(const Model *model, const ZeroRange *range, bool overlap, int *block_slots) {
    int blocks;
    const int64_t largest = zero_largest_block_(model, range, &blocks);
    *block_slots = (int)min_i64(overlap ? ZERO_BLOCK_SLOTS : 1, blocks);
    return range[0].count + range[model_head_unit(model)].count + *block_slots * largest;
}

// Divides the held units into buckets, from the last unit down. buckets (units) optional; returns how many. A tied embedding that two stages
// hold has one of its own, so that both divide it alike.
static inline int zero_bucket_units_(const Model *model, const Layout *layout, const ZeroRange *range, double bucket_bytes, ZeroBucket *buckets) {
    int count = 0;
    double bytes = 0;
    bool open = false, closed_by_tie = false;
    for (int u = model->units - 1; u >= 0; u--) {
        if (range[u].count == 0) continue;
        const bool alone = layout->zero >= 2 || (u == 0 && layout->config.tied && layout->mesh.pp > 1);
        const double own = (double)range[u].count * 4;
        if (!open || alone || closed_by_tie || bytes + own > bucket_bytes) {
            if (buckets != NULL) buckets[count] = (ZeroBucket){.first = u, .last = u, .wire = -1};
            count++;
            bytes = 0;
        } else if (buckets != NULL) {
            buckets[count - 1].first = u;
        }
        bytes += own;
        open = true;
        closed_by_tie = alone;
    }
    return count;
}

static inline int64_t zero_bucket_elements_(const ZeroRange *range, const ZeroBucket *bucket) {
    return range[bucket->last].begin + range[bucket->last].count - range[bucket->first].begin;
}

static inline bool zero_uses_wires_(const Layout *layout, const ZeroConfig *config) {
    return config->reduce_bf16 && layout->shards * layout->replicas > 1;
}

// Elements of one wire of stages 0 and 1: the largest bucket.
static inline int64_t zero_wire_elements_(const Model *model, const Layout *layout, const ZeroRange *range, double bucket_bytes) {
    ZeroBucket *buckets = base_new((size_t)model->units, sizeof *buckets);
    const int count = zero_bucket_units_(model, layout, range, bucket_bytes, buckets);
    int64_t largest = 0;
    for (int b = 0; b < count; b++) largest = max_i64(largest, zero_bucket_elements_(range, &buckets[b]));
    free(buckets);
    return largest;
}

// Elements, padding included, of this rank's shards of the units that it saves: all but a tied embedding's copy on the last stage. (What
// tensor-parallel ranks hold copies of is saved by one of them and counted for each: norms.)
static inline int64_t zero_saved_elements_(const Model *model, const Layout *layout, const ZeroRange *range) {
    int64_t elements = 0;
    for (int u = 0; layout->replica == 0 && u < model->units; u++) {
        if (u > 0 || layout_has_embedding(layout)) elements += range[u].count / layout->shards;
    }
    return elements;
}

// Bytes that a rank of this layout will allocate.
static inline ZeroBytes zero_bytes(const Model *model, const Layout *layout, const ZeroConfig *config) {
    ZeroRange *range = base_new((size_t)model->units, sizeof *range);
    const size_t whole = (size_t)zero_layout(model, layout, NULL, range), shard = whole / (size_t)layout->shards;
    const size_t param_bytes = dtype_bytes(config->dtype);
    int block_slots;
    const size_t slot = (size_t)zero_slot_elements_(model, range, config->overlap, &block_slots);
    ZeroBytes bytes = {.param_bytes = (layout->zero == 3 ? shard : whole) * param_bytes,
                       .master_bytes = config->dtype == DTYPE_F32 || config->no_master ? 0 : shard * 4,
                       .grad_bytes = (layout->zero >= 2 ? shard : whole) * 4,
                       .optim_bytes = shard * 8};
    if (layout->zero == 3) bytes.buffer_bytes += slot * param_bytes;
    if (layout->zero >= 2) bytes.buffer_bytes += slot * 4;
    if (zero_uses_wires_(layout, config)) {
        bytes.buffer_bytes +=
            layout->zero >= 2 ? slot * 2 : ZERO_WIRES * 2 * (size_t)zero_wire_elements_(model, layout, range, config->bucket_bytes);
    }
    const size_t saved = config->snapshot ? (size_t)zero_saved_elements_(model, layout, range) : 0;
    bytes.snapshot_bytes = saved * (param_bytes + (bytes.master_bytes > 0 ? 4 : 0) + 8) + (config->piece ? ZERO_PIECE_BYTES : 0);
    free(range);
    return bytes;
}

// ----------------------------------------------------------------------------
// Where things are

// This rank's part of a unit: begin and count of the elements, in arenas that are whole and in those of shards.
typedef struct {
    int64_t whole_begin, shard_begin, count;
} ZeroPlace;

static inline ZeroPlace zero_place(const Zero *zero, int unit) {
    const ZeroRange range = zero->range[unit];
    const int64_t shards = zero->layout->shards, count = range.count / shards;
    return (ZeroPlace){range.begin + zero->layout->shard * count, range.begin / shards, count};
}

// This rank's part of a unit, in every arena.
typedef struct {
    Buffer param, master, grad, adam_m, adam_v; // (count)
    int64_t count, first;                       // elements; place in the unit of the first
    const Segment *segments, *counted;          // device memory; counted: what enters norms
    int64_t segment_count, counted_count;
} ZeroShard;

static inline ZeroShard zero_shard(const Zero *zero, int unit) {
    const ZeroPlace place = zero_place(zero, unit);
    const int stage = zero->layout->zero;
    const int64_t first = zero->segment_first[unit], counted = zero->counted_first[unit];
    return (ZeroShard){.param = buffer_at(zero->param, stage == 3 ? place.shard_begin : place.whole_begin),
                       .grad = buffer_at(zero->grad, stage >= 2 ? place.shard_begin : place.whole_begin),
                       .master = buffer_at(zero->master, place.shard_begin),
                       .adam_m = buffer_at(zero->adam_m, place.shard_begin),
                       .adam_v = buffer_at(zero->adam_v, place.shard_begin),
                       .count = place.count,
                       .first = place.whole_begin - zero->range[unit].begin,
                       .segments = zero->segments + first,
                       .segment_count = zero->segment_first[unit + 1] - first,
                       .counted = zero->counted + counted,
                       .counted_count = zero->counted_first[unit + 1] - counted};
}

// Where the values of this rank's shard of a unit are as exact as they get: the fp32 master copy, where there is one, else the parameters.
static inline Buffer zero_exact(const Zero *zero, int unit) {
    const ZeroShard shard = zero_shard(zero, unit);
    return shard.master.data != NULL ? shard.master : shard.param;
}

// Elements [from, to) of a tensor's part that this rank's shard holds, and where the first of them is in the shard; empty when from == to.
typedef struct {
    int64_t from, to, at;
} ZeroPiece;

static inline ZeroPiece zero_piece(const Zero *zero, int tensor) {
    if (zero->offset[tensor] < 0) return (ZeroPiece){0, 0, 0};
    const ZeroPlace place = zero_place(zero, zero->model->tensors[tensor].unit);
    const int64_t begin = zero->offset[tensor], end = begin + zero->part[tensor].elements;
    const int64_t from = max_i64(begin, place.whole_begin), to = min_i64(end, place.whole_begin + place.count);
    if (from >= to) return (ZeroPiece){0, 0, 0};
    return (ZeroPiece){from - begin, to - begin, from - place.whole_begin};
}

// Fills the pointers of a unit's tensors in memory that holds the whole unit.
static inline void zero_point_(const Zero *zero, int unit, Buffer base, Buffer kinds[TENSOR_KINDS]) {
    memset(kinds, 0, TENSOR_KINDS * sizeof *kinds);
    for (int i = zero->unit_tensor[unit]; i < zero->unit_tensor[unit + 1] && zero->offset[i] >= 0; i++) {
        kinds[zero->model->tensors[i].kind] = buffer_at(base, zero->offset[i] - zero->range[unit].begin);
    }
}

// ----------------------------------------------------------------------------
// Creation

static inline void zero_create_segments_(Zero *zero) {
    const Model *model = zero->model;
    const size_t room = (size_t)model->count * sizeof(Segment);
    Segment *segments = base_new((size_t)model->count, sizeof *segments), *counted = base_new((size_t)model->count, sizeof *counted);
    zero->segment_first = base_new((size_t)model->units + 1, sizeof *zero->segment_first);
    zero->counted_first = base_new((size_t)model->units + 1, sizeof *zero->counted_first);
    int64_t segment_count = 0, counted_count = 0;
    int i = 0;
    for (int u = 0; u < model->units; u++) {
        zero->segment_first[u] = segment_count;
        zero->counted_first[u] = counted_count;
        for (; i < model->count && model->tensors[i].unit == u; i++) {
            const ZeroPiece piece = zero_piece(zero, i);
            if (piece.from == piece.to) continue;
            const Segment segment = {piece.at, piece.to - piece.from, model->tensors[i].decay};
            segments[segment_count++] = segment;
            if (zero->part[i].counts && zero->layout->replica == 0) counted[counted_count++] = segment;
        }
    }
    zero->segment_first[model->units] = segment_count;
    zero->counted_first[model->units] = counted_count;
    zero->segments = zero->device->alloc(zero->device, room);
    zero->counted = zero->device->alloc(zero->device, room);
    zero->device->copy_in(zero->device, zero->segments, segments, room);
    zero->device->copy_in(zero->device, zero->counted, counted, room);
    free(segments);
    free(counted);
}

static inline Buffer zero_alloc_(Zero *zero, size_t bytes, Dtype dtype, size_t *category_bytes) {
    if (bytes == 0) return buffer_of(NULL, dtype);
    *category_bytes += bytes;
    return buffer_of(zero->device->alloc(zero->device, bytes), dtype);
}

// Memory that other ranks read. Every rank of a host calls it alike, whatever the size.
static inline void *zero_alloc_exchange_(Zero *zero, size_t bytes, size_t *category_bytes) {
    *category_bytes += bytes;
    return comm_alloc(zero->comm, bytes);
}

// Cuts slots out of `base` (NULL: none are wanted). Returns the byte behind them.
static inline char *zero_cut_slots_(const Zero *zero, ZeroSlot *slots, char *base, Dtype dtype) {
    int blocks;
    const int64_t largest = zero_largest_block_(zero->model, zero->range, &blocks);
    for (int s = 0; s < 2 + ZERO_BLOCK_SLOTS; s++) slots[s] = (ZeroSlot){-1, buffer_of(NULL, dtype)};
    for (int s = 0; base != NULL && s < 2 + zero->block_slots; s++) {
        const int64_t count = s == 0 ? zero->range[0].count : s == 1 ? zero->range[model_head_unit(zero->model)].count : largest;
        slots[s].buffer.data = base;
        base += (size_t)count * dtype_bytes(dtype);
    }
    return base;
}

static inline void zero_create_buffers_(Zero *zero) {
    const Layout *layout = zero->layout;
    const ZeroBytes sizes = zero_bytes(zero->model, layout, &zero->config);
    zero->param = buffer_of(zero_alloc_exchange_(zero, sizes.param_bytes, &zero->bytes.param_bytes), zero->config.dtype);
    zero->grad = buffer_of(zero_alloc_exchange_(zero, sizes.grad_bytes, &zero->bytes.grad_bytes), DTYPE_F32);
    zero->master = zero_alloc_(zero, sizes.master_bytes, DTYPE_F32, &zero->bytes.master_bytes);
    zero->adam_m = zero_alloc_(zero, sizes.optim_bytes / 2, DTYPE_F32, &zero->bytes.optim_bytes);
    zero->adam_v = zero_alloc_(zero, sizes.optim_bytes / 2, DTYPE_F32, &zero->bytes.optim_bytes);
    zero->bytes.snapshot_bytes = sizes.snapshot_bytes;
    const size_t piece_bytes = zero->config.piece ? ZERO_PIECE_BYTES : 0, copy_bytes = sizes.snapshot_bytes - piece_bytes;
    if (copy_bytes > 0) zero->snapshot = zero->device->host_alloc(zero->device, copy_bytes);
    if (piece_bytes > 0) zero->piece = zero->device->host_alloc(zero->device, piece_bytes);
    char *at = zero->exchange_slots = zero_alloc_exchange_(zero, sizes.buffer_bytes, &zero->bytes.buffer_bytes);
    (void)zero_slot_elements_(zero->model, zero->range, zero->config.overlap, &zero->block_slots);
    char *grads = zero_cut_slots_(zero, zero->param_slots, layout->zero == 3 ? at : NULL, zero->config.dtype);
    if (layout->zero == 3) at = grads;
    char *wires = zero_cut_slots_(zero, zero->grad_slots, layout->zero >= 2 ? at : NULL, DTYPE_F32);
    if (layout->zero >= 2) at = wires;
    if (!zero_uses_wires_(layout, &zero->config)) return;
    if (layout->zero >= 2) {
        ZeroSlot slots[2 + ZERO_BLOCK_SLOTS];
        (void)zero_cut_slots_(zero, slots, at, DTYPE_BF16);
        for (int s = 0; s < 2 + ZERO_BLOCK_SLOTS; s++) zero->wires[s] = slots[s].buffer;
    } else {
        const int64_t count = zero_wire_elements_(zero->model, layout, zero->range, zero->config.bucket_bytes);
        for (int w = 0; w < ZERO_WIRES; w++) zero->wires[w] = buffer_of(at + (size_t)w * (size_t)count * 2, DTYPE_BF16);
    }
}

// groups (LAYOUT_GROUPS), of which NULL are those this rank is not in. Collective over the ranks of a host. Everything given lives longer.
static inline Zero zero_create(Device *device, Comm *comm, CommGroup **groups, const Model *model, const Layout *layout, const ZeroConfig *config) {
    Zero zero = {.model = model,
                 .layout = layout,
                 .device = device,
                 .comm = comm,
                 .groups = groups,
                 .config = *config,
                 .param_current = -1,
                 .grad_current = -1};
    const size_t units = (size_t)model->units, tensors = (size_t)model->count;
    zero.offset = base_new(tensors, sizeof *zero.offset);
    zero.range = base_new(units, sizeof *zero.range);
    zero.part = base_new(tensors, sizeof *zero.part);
    for (int i = 0; i < model->count; i++) zero.part[i] = layout_part(layout, &model->tensors[i]);
    zero.unit_tensor = base_new(units + 1, sizeof *zero.unit_tensor);
    for (int i = 0; i < model->count; i++) zero.unit_tensor[model->tensors[i].unit + 1] = i + 1;
    zero.elements = zero_layout(model, layout, zero.offset, zero.range);
    zero_create_segments_(&zero);
    zero_create_buffers_(&zero);
    zero.buckets = base_new(units, sizeof *zero.buckets);
    zero.bucket_of = base_new(units, sizeof *zero.bucket_of);
    zero.bucket_count = zero_bucket_units_(model, layout, zero.range, config->bucket_bytes, zero.buckets);
    for (int b = 0; b < zero.bucket_count; b++) {
        for (int u = zero.buckets[b].first; u <= zero.buckets[b].last; u++) zero.bucket_of[u] = b;
    }
    zero.reductions = base_new(units, sizeof *zero.reductions);
    zero.gathers = base_new(units, sizeof *zero.gathers);
    zero.has_gradient_shard = base_new(units, sizeof *zero.has_gradient_shard);
    return zero;
}

// Collective over the ranks of a host.
static inline void zero_free(Zero *zero) {
    Device *device = zero->device;
    Buffer *buffers[] = {&zero->master, &zero->adam_m, &zero->adam_v};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++) device->release(device, buffers[i]->data);
    comm_release(zero->comm, zero->param.data);
    comm_release(zero->comm, zero->grad.data);
    comm_release(zero->comm, zero->exchange_slots);
    device->release(device, zero->segments);
    device->release(device, zero->counted);
    if (zero->snapshot != NULL) device->host_release(device, zero->snapshot);
    if (zero->piece != NULL) device->host_release(device, zero->piece);
    free(zero->segment_first);
    free(zero->counted_first);
    free(zero->offset);
    free(zero->range);
    free(zero->unit_tensor);
    free(zero->part);
    free(zero->buckets);
    free(zero->bucket_of);
    free(zero->reductions);
    free(zero->gathers);
    free(zero->has_gradient_shard);
    *zero = (Zero){0};
}

#endif
