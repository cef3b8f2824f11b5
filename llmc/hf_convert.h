// hf_convert.h: --steps 0 --export-hf from a checkpoint or a Hugging Face directory: no trainer, no optimizer, no data; in memory is one tensor
// at a time. One rank.
#ifndef LLMC_HF_CONVERT_H
#define LLMC_HF_CONVERT_H

#include "llmc/hf_export.h"    // HfExport, hf_export_write
#include "llmc/model_source.h" // ModelWeights, model_source_shape
#include "llmc/options.h"      // Options
#include "llmc/tokenizer.h"    // tokenizer_open

// Is there nothing to do but to convert?
static inline bool hf_convert_wanted(const Options *o) {
    const bool computes = o->steps > 0 || o->val != NULL || o->prompt != NULL || o->sample_every > 0 || o->dry_run;
    return o->export_hf != NULL && !computes && (o->init_from != NULL || strcmp(o->resume, "no") != 0);
}

static inline json_t *hf_eot_ids_(int64_t eot) {
    if (eot < 0) return json_object();
    return json_pack("{s:I, s:I}", "bos_token_id", (json_int_t)eot, "eos_token_id", (json_int_t)eot);
}

// What an export says of special tokens: the same as the Hugging Face model that the weights came from (--init-from, may be NULL), else the end of
// document (-1: none).
static inline json_t *hf_export_ids(const char *init_from, int64_t eot) {
    HfConfig config;
    Error ignored = {0};
    if (init_from == NULL || !model_source_is_hf(init_from)) return hf_eot_ids_(eot);
    char *path = path_join(init_from, "config.json");
    json_t *ids = hf_config_read(path, &config, &ignored) ? json_incref(config.ids) : hf_eot_ids_(eot); // it may be gone by now
    free(path);
    hf_config_free(&config);
    return ids;
}

static inline int64_t hf_export_shard_bytes(const Options *o) { return (int64_t)(o->export_shard_mb * 1e6); }

typedef struct {
    const ModelWeights *weights;
    const Model *model;
} HfConversion_;

static inline float *hf_convert_whole_(void *context, int tensor, Error *error) {
    const HfConversion_ *conversion = context;
    const Tensor *t = &conversion->model->tensors[tensor];
    const Part part = {.held = true, .shape = {t->shape[0], t->shape[1]}, .elements = t->elements, .counts = true};
    float *values = base_alloc_raw((size_t)t->elements * sizeof *values);
    if (weights_read(conversion->weights, t, &part, 0, t->elements, values, error)) return values;
    free(values);
    return NULL;
}

// A flag of the run that saved a checkpoint; NULL: none, or no checkpoint.
static inline const char *hf_convert_flag_(const ModelWeights *weights, const char *flag) {
    return weights->hf ? NULL : json_string_value(json_object_get(weights->checkpoint.manifest.state.flags, flag));
}

// The id that ends documents: of --eot, of the tokenizer, or of the checkpoint's flags; -1: not known.
static inline bool hf_convert_eot_(const Options *o, const Model *model, const ModelWeights *weights, int64_t *eot, Error *error) {
    Tokenizer tokenizer = {.eot = -1};
    const char *flag = hf_convert_flag_(weights, "eot");
    if (o->tokenizer != NULL && !tokenizer_open(&tokenizer, o->tokenizer, error)) return false;
    const int64_t vocab = tokenizer.vocab;
    *eot = o->given[OPTION_eot] ? o->eot : tokenizer.eot >= 0 ? tokenizer.eot : flag != NULL ? strtoll(flag, NULL, 10) : -1;
    tokenizer_close(&tokenizer);
    if (vocab > model->config.vocab) {
        return fail(error, CODE_USAGE, "--tokenizer: has %lld tokens, the model %lld", (long long)vocab, (long long)model->config.vocab);
    }
    return *eot < model->config.vocab ||
           fail(error, CODE_USAGE, "--eot: got %lld, wanted an id below the vocabulary of %lld", (long long)*eot, (long long)model->config.vocab);
}

static inline bool hf_convert_write_(const Options *o, const Model *model, const ModelWeights *weights, Error *error) {
    const Dtype wanted = o->precision == PRECISION_BF16 ? DTYPE_BF16 : DTYPE_F32;
    const Dtype dtype = o->given[OPTION_precision] ? wanted : weights_dtype(weights, model);
    HfConversion_ conversion = {weights, model};
    int64_t eot;
    if (!hf_convert_eot_(o, model, weights, &eot, error) || !hf_export_check(o->export_hf, model, dtype, error)) return false;
    json_t *ids = hf_export_ids(weights->hf ? weights->model.directory : hf_convert_flag_(weights, "init-from"), eot);
    const HfExport export = {
        .directory = o->export_hf, .dtype = dtype, .shard_bytes = hf_export_shard_bytes(o), .tokenizer = o->tokenizer, .ids = ids};
    const bool good = hf_export_write(&export, model, true, hf_convert_whole_, &conversion, error);
    json_decref(ids);
    if (good) printf("%s holds the model in %s\n", o->export_hf, dtype_names[dtype]);
    return good;
}

static inline bool hf_convert_open_(Comm *comm, const Options *o, const Model *model, Error *error) {
    ModelWeights weights;
    bool found;
    if (!weights_find(comm, o, model, &weights, &found, error)) return false;
    const bool good =
        found ? hf_convert_write_(o, model, &weights, error) : fail(error, CODE_INPUT, "--resume auto: '%s' holds no checkpoint to export", o->out);
    weights_close(&weights);
    return good;
}

static inline bool hf_convert(Comm *comm, Options *o, Error *error) {
    ModelShape shape;
    ModelConfig config;
    if (comm->size > 1) {
        return fail(error, CODE_USAGE, "--export-hf: --steps 0 only converts, on one rank: got %d (without mpirun; or --val, to validate as well)",
                    comm->size);
    }
    if (o->tp > 1 || o->pp > 1 || o->zero > 0 || o->sp) {
        return fail(error, CODE_USAGE, "--export-hf: --steps 0 only converts, on one rank: wanted no --tp, --pp, --sp or --zero");
    }
    if (!hf_export_is_free(o->export_hf)) { // before anything is read
        return fail(error, CODE_USAGE, "--export-hf: '%s' is there already, or cannot be: wanted a new or empty directory", o->export_hf);
    }
    if (!model_source_shape(comm, o, &shape, error) || !model_configure_over(&config, o, &shape, 0, error)) return false;
    Model model = model_create(&config);
    const bool good = hf_convert_open_(comm, o, &model, error);
    model_free(&model);
    return good;
}

#endif
