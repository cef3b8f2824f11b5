// model_source.h: where a run's model comes from. Its shape: of a preset or config.json (--model), else of the weights that --resume or
// --init-from name. Its weights: of a checkpoint of ours or of a Hugging Face directory, read by parts as fp32. Allocates no model.
#ifndef LLMC_MODEL_SOURCE_H
#define LLMC_MODEL_SOURCE_H

#include "llmc/checkpoint.h"      // Checkpoint, checkpoint_open, checkpoint_find
#include "llmc/checkpoint_read.h" // checkpoint_read
#include "llmc/hf_tensors.h"      // HfModel, hf_open, hf_read
#include "llmc/model.h"           // ModelShape, Model

static inline bool model_source_has_(const char *directory, const char *name) {
    char *path = path_join(directory, name);
    const bool there = access(path, F_OK) == 0;
    free(path);
    return there;
}

// Is this a Hugging Face directory, not a checkpoint of ours?
static inline bool model_source_is_hf(const char *directory) {
    return !model_source_has_(directory, CHECKPOINT_MANIFEST) && model_source_has_(directory, "config.json");
}

// ----------------------------------------------------------------------------
// The shape

static inline bool model_source_config_(const char *path, bool fixed, const char *name, ModelShape *shape, Error *error) {
    HfConfig config;
    if (!hf_config_read(path, &config, error)) return false;
    *shape = (ModelShape){.known = true, .fixed = fixed, .config = config.model, .sliding_window = config.sliding_window};
    snprintf(shape->name, sizeof shape->name, "%s", name);
    hf_config_free(&config);
    return true;
}

// Of a checkpoint's manifest; its files are verified when it is opened.
static inline bool model_source_manifest_(const char *directory, ModelShape *shape, Error *error) {
    char *path = path_join(directory, CHECKPOINT_MANIFEST);
    size_t bytes;
    Manifest manifest = {0};
    char *text = file_read_whole(path, MANIFEST_MAX_BYTES, &bytes, error);
    bool good = text != NULL && manifest_check_seal(path, text, bytes, error) && manifest_parse(path, text, bytes, &manifest, error) &&
                checkpoint_model_config(path, manifest.state.model, &shape->config, error);
    shape->known = shape->fixed = good;
    snprintf(shape->name, sizeof shape->name, "%s", directory);
    manifest_free(&manifest);
    free(text);
    free(path);
    return good;
}

// Of the newest checkpoint of OUT whose manifest is good. None is no error here: who opens one tells.
static inline bool model_source_newest_(const char *out, ModelShape *shape, Error *error) {
    CheckpointList_ list;
    if (!checkpoint_list_(out, &list, error)) return false;
    for (int64_t i = 0; !shape->known && i < list.count; i++) {
        char name[48];
        Error ignored = {0};
        checkpoint_name_(list.steps[i], "", name);
        char *path = path_join(out, name);
        (void)model_source_manifest_(path, shape, &ignored);
        free(path);
    }
    free(list.steps);
    return true;
}

static inline bool model_source_find_(const Options *o, ModelShape *shape, Error *error) {
    const bool automatic = strcmp(o->resume, "auto") == 0, resumes = !automatic && strcmp(o->resume, "no") != 0;
    if (o->model != NULL) {
        return model_preset_find(o->model) != NULL || access(o->model, F_OK) != 0 || model_source_config_(o->model, false, o->model, shape, error);
    }
    if (resumes) return !model_source_has_(o->resume, CHECKPOINT_MANIFEST) || model_source_manifest_(o->resume, shape, error);
    if (automatic && o->out != NULL && !model_source_newest_(o->out, shape, error)) return false;
    if (shape->known || o->init_from == NULL) return true;
    if (model_source_has_(o->init_from, CHECKPOINT_MANIFEST)) return model_source_manifest_(o->init_from, shape, error);
    char *path = path_join(o->init_from, "config.json");
    const bool good = access(path, F_OK) == 0
                          ? model_source_config_(path, true, o->init_from, shape, error)
                          : fail(error, CODE_INPUT,
                                 "--init-from: %s has neither %s nor config.json: wanted a checkpoint directory, OUT/step_N, or a "
                                 "Hugging Face model",
                                 o->init_from, CHECKPOINT_MANIFEST);
    free(path);
    return good;
}

static inline bool model_source_window_(const char *name, int64_t window, int64_t seq, Error *error) {
    return window == 0 || seq <= window ||
           fail(error, CODE_USAGE, "--seq: got %lld, %s has a sliding_window of %lld: windows are not supported, wanted sequences inside one",
                (long long)seq, name, (long long)window);
}

// The shape that --model, --resume or --init-from name, if they name one; without --seq, sequences become no longer than it allows. Collective:
// rank 0 reads.
static inline bool model_source_shape(Comm *comm, Options *o, ModelShape *shape, Error *error) {
    Error own = {0};
    *shape = (ModelShape){0};
    if (!checkpoint_agree_(comm, comm->rank != 0 || model_source_find_(o, shape, &own), &own, error)) return false;
    comm_broadcast(comm->world, shape, (int64_t)sizeof *shape, COMM_BYTE, 0);
    const bool bounded = shape->known && (shape->config.position == POSITION_LEARNED || shape->sliding_window > 0);
    if (bounded && !o->given[OPTION_seq]) o->seq = min_i64(o->seq, shape->config.max_seq);
    return model_source_window_(shape->name, shape->sliding_window, o->seq, error);
}

// ----------------------------------------------------------------------------
// The weights

typedef struct {
    bool hf; // which of the two is open
    Checkpoint checkpoint;
    HfModel model;
} ModelWeights;

static inline void weights_close(ModelWeights *weights) {
    if (weights->hf) hf_close(&weights->model);
    if (!weights->hf && weights->checkpoint.directory != NULL) checkpoint_close(&weights->checkpoint);
    *weights = (ModelWeights){0};
}

// Refuses another model than the run's.
static inline bool weights_check_(const ModelWeights *weights, const ModelConfig *config, Error *error) {
    if (!weights->hf) return checkpoint_model_check(weights->checkpoint.directory, weights->checkpoint.manifest.state.model, config, error);
    json_t *own = checkpoint_model_json(&weights->model.config.model);
    const bool good = checkpoint_model_check(weights->model.directory, own, config, error);
    json_decref(own);
    return good;
}

// Opens a checkpoint or a Hugging Face directory that must hold this model; verifies all there is to verify. Collective. The model lives longer.
// To be given to weights_close() when true.
static inline bool weights_open(Comm *comm, const char *directory, const Model *model, ModelWeights *weights, Error *error) {
    *weights = (ModelWeights){.hf = model_source_is_hf(directory)};
    bool good;
    if (weights->hf) {
        Error own = {0};
        good = checkpoint_agree_(comm,
                                 hf_open_config(&weights->model, directory, &own) && weights_check_(weights, &model->config, &own) &&
                                     hf_open(&weights->model, model, comm->rank == 0, &own),
                                 &own, error);
    } else {
        good = checkpoint_open(comm, directory, &weights->checkpoint, error) && weights_check_(weights, &model->config, error);
    }
    if (!good) weights_close(weights);
    return good;
}

// The weights that --resume or --init-from name. *found: they name some. Collective, as weights_open().
static inline bool weights_find(Comm *comm, const Options *o, const Model *model, ModelWeights *weights, bool *found, Error *error) {
    const bool automatic = strcmp(o->resume, "auto") == 0, named = !automatic && strcmp(o->resume, "no") != 0;
    *weights = (ModelWeights){0};
    *found = named;
    if (automatic && o->out == NULL) return fail(error, CODE_USAGE, "--resume auto: wanted --out, the directory to look in");
    if (automatic && !checkpoint_find(comm, o->out, &weights->checkpoint, found, stderr, error)) return false;
    if (named && !checkpoint_open(comm, o->resume, &weights->checkpoint, error)) return false;
    if (*found) {
        const bool good = weights_check_(weights, &model->config, error);
        if (!good) weights_close(weights);
        return good;
    }
    *found = o->init_from != NULL;
    return o->init_from == NULL || weights_open(comm, o->init_from, model, weights, error);
}

// What a rank holds of a tensor's part, as a row of a checkpoint.
static inline CheckpointSlice weights_slice(const Tensor *tensor, const Part *part, const char *prefix, Dtype dtype, int64_t from, int64_t to,
                                            void *data) {
    CheckpointSlice slice = {.dtype = dtype, .rank = tensor->rank, .from = from, .to = to, .data = data};
    snprintf(slice.name, sizeof slice.name, "%s%s", prefix, tensor->name);
    for (int axis = 0; axis < 2; axis++) {
        slice.shape[axis] = tensor->shape[axis];
        slice.begin[axis] = part->begin[axis];
        slice.end[axis] = part->begin[axis] + part->shape[axis];
    }
    return slice;
}

// out (to - from) = elements [from, to) of a tensor's part; of the master copy where there is one.
static inline bool weights_read(const ModelWeights *weights, const Tensor *tensor, const Part *part, int64_t from, int64_t to, float *out,
                                Error *error) {
    if (weights->hf) return hf_read(&weights->model, tensor->id, part, from, to, out, error);
    CheckpointSlice slice = weights_slice(tensor, part, "master/", DTYPE_F32, from, to, out);
    if (manifest_tensor(&weights->checkpoint.manifest, slice.name) == NULL) slice = weights_slice(tensor, part, "", DTYPE_F32, from, to, out);
    return checkpoint_read(&weights->checkpoint, &slice, 1, true, error);
}

// Weights that a run begins with must be numbers.
static inline bool weights_finite(const Tensor *tensor, const float *values, int64_t count, Error *error) {
    for (int64_t i = 0; i < count; i++) {
        if (!isfinite(values[i])) return fail(error, CODE_INPUT, "--init-from: tensor '%s' holds %g", tensor->name, (double)values[i]);
    }
    return true;
}

// The dtype that the embedding is stored in: BF16 or else F32.
static inline Dtype weights_dtype(const ModelWeights *weights, const Model *model) {
    const Tensor *embedding = &model->tensors[0];
    const ManifestTensor *row = weights->hf ? NULL : manifest_tensor(&weights->checkpoint.manifest, embedding->name);
    const SafetensorsType *type = weights->hf ? hf_stored_type(&weights->model, embedding->id) : row != NULL ? row->type : NULL;
    return type != NULL && strcmp(type->name, "BF16") == 0 ? DTYPE_BF16 : DTYPE_F32;
}

#endif
