// zero.h: where parameters, gradients and optimizer state live: one flat arena each, laid out by the tensor table.
// A unit (embedding, a block, the head) is the piece that would be sharded, gathered and freed; ops get their pointers
// from zero_unit() only. Every rank owns everything: data-parallel ranks are replicas.
#ifndef LLMC_ZERO_H
#define LLMC_ZERO_H

#include "llmc/comm.h"   // comm_alloc
#include "llmc/device.h" // Device, Buffer, Segment
#include "llmc/model.h"  // Model, Tensor

// Tensors start at multiples of this many elements (64 bytes of bf16), unless joined to their predecessor.
enum { ZERO_ALIGN_ELEMENTS = 32 };

typedef struct {
    const Model *model;
    int64_t *offset;   // (tensors) first element of a tensor in the flat arenas
    int64_t elements;  // of an arena, padding included
    Segment *segments; // (tensors) in arena order, device memory
    int64_t segment_count;
    Dtype dtype;                                // of the parameters
    Buffer param, master, grad, adam_m, adam_v; // (elements); master is absent when parameters are fp32
} Zero;

typedef struct {
    int64_t begin, count; // elements of an arena, padding included
} ZeroRange;

// The weights of a unit by kind, and their gradients; absent where the configuration has none.
typedef struct {
    Buffer weight[TENSOR_KINDS];
    Buffer grad[TENSOR_KINDS];
} Unit;

// Fills offset[] (tensors) and returns the elements of an arena. Pure: serves allocation and --dry-run.
static inline int64_t zero_layout(const Model *model, int64_t *offset) {
    int64_t at = 0;
    for (int i = 0; i < model->count; i++) {
        if (!model->tensors[i].joined) at = round_up(at, ZERO_ALIGN_ELEMENTS);
        if (offset != NULL) offset[i] = at;
        at += model->tensors[i].elements;
    }
    return round_up(at, ZERO_ALIGN_ELEMENTS);
}

typedef struct {
    size_t param_bytes, master_bytes, grad_bytes, optim_bytes; // optim: both moments
} ZeroBytes;

static inline ZeroBytes zero_bytes(const Model *model, Dtype dtype) {
    const size_t elements = (size_t)zero_layout(model, NULL);
    return (ZeroBytes){.param_bytes = elements * dtype_bytes(dtype),
                       .master_bytes = dtype == DTYPE_F32 ? 0 : elements * 4,
                       .grad_bytes = elements * 4,
                       .optim_bytes = elements * 8};
}

static inline Zero zero_create(Device *device, Comm *comm, const Model *model, Dtype dtype) {
    Zero zero = {.model = model, .dtype = dtype, .segment_count = model->count};
    zero.offset = base_new((size_t)model->count, sizeof *zero.offset);
    zero.elements = zero_layout(model, zero.offset);
    const ZeroBytes bytes = zero_bytes(model, dtype);
    zero.param = (Buffer){device->alloc(device, bytes.param_bytes), dtype};
    if (bytes.master_bytes > 0) zero.master = (Buffer){device->alloc(device, bytes.master_bytes), DTYPE_F32};
    zero.grad = (Buffer){comm_alloc(comm, bytes.grad_bytes), DTYPE_F32}; // the other ranks read it
    zero.adam_m = (Buffer){device->alloc(device, bytes.optim_bytes / 2), DTYPE_F32};
    zero.adam_v = (Buffer){device->alloc(device, bytes.optim_bytes / 2), DTYPE_F32};
    Segment *segments = base_new((size_t)model->count, sizeof *segments);
    for (int i = 0; i < model->count; i++) {
        segments[i] = (Segment){zero.offset[i], model->tensors[i].elements, model->tensors[i].decay};
    }
    const size_t segment_bytes = (size_t)model->count * sizeof *segments;
    zero.segments = device->alloc(device, segment_bytes);
    device->copy_in(device, zero.segments, segments, segment_bytes);
    free(segments);
    return zero;
}

static inline void zero_free(Zero *zero, Device *device, Comm *comm) {
    Buffer *buffers[] = {&zero->param, &zero->master, &zero->adam_m, &zero->adam_v};
    for (size_t i = 0; i < sizeof buffers / sizeof buffers[0]; i++) device->release(device, buffers[i]->data);
    comm_release(comm, zero->grad.data);
    device->release(device, zero->segments);
    free(zero->offset);
    *zero = (Zero){0};
}

// Where a unit lies in the arenas: its tensors follow each other.
static inline ZeroRange zero_unit_range(const Zero *zero, int unit) {
    ZeroRange range = {-1, 0};
    int64_t end = zero->elements;
    for (int i = 0; i < zero->model->count; i++) {
        if (zero->model->tensors[i].unit == unit && range.begin < 0) range.begin = zero->offset[i];
        if (zero->model->tensors[i].unit > unit) {
            end = zero->offset[i];
            break;
        }
    }
    range.count = end - range.begin;
    return range;
}

static inline Unit zero_unit(const Zero *zero, int unit) {
    Unit u;
    memset(&u, 0, sizeof u);
    const Model *model = zero->model;
    for (int i = 0; i < model->count; i++) {
        const Tensor *tensor = &model->tensors[i];
        if (tensor->unit != unit) continue;
        u.weight[tensor->kind] = buffer_at(zero->param, zero->offset[i]);
        u.grad[tensor->kind] = buffer_at(zero->grad, zero->offset[i]);
    }
    return u;
}

#endif
