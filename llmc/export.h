// export.h: files that hold whole tensors, gathered from all ranks and written by the first: the model for Hugging Face (--export-hf), the
// gradients of a step (--dump-grads).
#ifndef LLMC_EXPORT_H
#define LLMC_EXPORT_H

#include "llmc/base.h"        // Error
#include "llmc/hf_convert.h"  // hf_export_ids, hf_export_shard_bytes
#include "llmc/hf_export.h"   // HfExport, hf_export_write
#include "llmc/options.h"     // Options
#include "llmc/safetensors.h" // SafetensorsEntry, safetensors_write_simple
#include "llmc/state.h"       // state_whole

// DIRECTORY/grads.safetensors: the gradients as they are, fp32, by the names of the tensor table. Errors are of the first rank alone.
static inline bool export_gradients(const Zero *zero, const char *directory, Error *error) {
    const Model *model = zero->model;
    const bool writes = zero->comm->rank == 0;
    bool good = true;
    SafetensorsEntry *entries = base_new((size_t)model->count, sizeof *entries);
    float **gradients = base_new((size_t)model->count, sizeof *gradients);
    for (int i = 0; i < model->count; i++) {
        const Tensor *tensor = &model->tensors[i];
        gradients[i] = state_whole(zero, i, true);
        entries[i] = (SafetensorsEntry){
            .name = tensor->name, .dtype = "F32", .rank = tensor->rank, .shape = {tensor->shape[0], tensor->shape[1]}, .data = gradients[i]};
        if (!writes) free(gradients[i]);
    }
    if (writes) {
        char *path = path_join(directory, "grads.safetensors");
        good = directory_create(directory, error) && safetensors_write_simple(path, entries, model->count, error);
        free(path);
        for (int i = 0; i < model->count; i++) free(gradients[i]);
    }
    free(gradients);
    free(entries);
    return good;
}

typedef struct {
    const Zero *zero;
    int64_t step;
} ExportModel_;

static inline float *export_whole_(void *context, int tensor, Error *error) {
    (void)error;
    const ExportModel_ *export = context;
    comm_heartbeat(export->zero->comm, export->step, "export");
    return state_whole(export->zero, tensor, false);
}

// --export-hf, after this step. eot: the token between documents, or -1. Errors are of this rank alone.
static inline bool export_model(const Zero *zero, const Options *o, int64_t eot, int64_t step, Error *error) {
    ExportModel_ context = {zero, step};
    json_t *ids = hf_export_ids(o->init_from, eot);
    const HfExport export = {
        .directory = o->export_hf, .dtype = zero->config.dtype, .shard_bytes = hf_export_shard_bytes(o), .tokenizer = o->tokenizer, .ids = ids};
    const bool good = hf_export_write(&export, zero->model, zero->comm->rank == 0, export_whole_, &context, error);
    json_decref(ids);
    return good;
}

#endif
