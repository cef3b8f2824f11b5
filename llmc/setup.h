// setup.h: what a run is made of, checked before the first large allocation: files, vocabulary, model, layout, the checkpoint to go on from, the
// memory plan, the device. Flags alone are checked by options.h. Trains nothing, and allocates no arenas.
#ifndef LLMC_SETUP_H
#define LLMC_SETUP_H

#include "llmc/base.h"            // Error, fail
#include "llmc/checkpoint.h"      // Checkpoint, checkpoint_find, checkpoint_open
#include "llmc/checkpoint_save.h" // checkpoint_clean
#include "llmc/comm.h"            // Comm, comm_all_reduce
#include "llmc/devices.h"         // devices_open, devices_check
#include "llmc/hf_export.h"       // hf_export_check
#include "llmc/layout.h"          // Layout, layout_create
#include "llmc/loader.h"          // Loader, loader_open
#include "llmc/model.h"           // Model, model_configure_over
#include "llmc/model_source.h"    // ModelWeights, weights_open, model_source_shape
#include "llmc/monitor.h"         // monitor_finished
#include "llmc/options.h"         // Options
#include "llmc/plan.h"            // PlanInput, plan_create, plan_print
#include "llmc/tokenizer.h"       // Tokenizer, tokenizer_open
#include "llmc/tokens.h"          // TokenSet, tokens_open
#include "llmc/trace.h"           // trace_parse
#include "llmc/zero.h"            // zero_config

// Must not move once loaders are open.
typedef struct {
    Comm *comm;
    Options options;
    ModelShape shape; // that the flags override, where they or weights name one
    ModelConfig config;
    Model model;
    Layout layout; // of this rank, or with --world of a rank of another job
    TokenSet train_set, val_set;
    Loader train, val;
    Tokenizer tokenizer;
    bool has_tokenizer;              // --tokenizer, or the token files name one that is there
    int lock;                        // of --out; -1 without
    int64_t trace_first, trace_last; // steps of --trace
    Checkpoint checkpoint;           // to go on from
    bool resumes;                    // there is one, and the run goes on:
    int64_t step, tokens;            // after this step, trained on so many tokens
    LoaderPosition start;            // there in the training data
    ModelWeights weights;            // of --init-from
    PlanInput plan;
    Device device; // opened and checked, until a trainer takes it over
} Setup;

// What every rank must have managed before the run goes on. Where one has not, all get the error of the first that has not.
static inline bool setup_agree(Comm *comm, bool good, Error *error) {
    int64_t failing = good ? 0 : comm->size - comm->rank; // the largest is that of the first rank
    comm_all_reduce(comm->world, &failing, 1, COMM_I64, COMM_MAX);
    if (failing == 0) return true;
    comm_broadcast(comm->world, error, (int64_t)sizeof *error, COMM_BYTE, comm->size - (int)failing);
    return false;
}

// The token between documents, or -1: as said, else of the data, else of the tokenizer.
static inline int64_t setup_eot(const Setup *setup) {
    if (setup->options.given[OPTION_eot]) return setup->options.eot;
    if (setup->train_set.info.eot >= 0) return setup->train_set.info.eot;
    if (setup->val_set.info.eot >= 0) return setup->val_set.info.eot;
    return setup->has_tokenizer ? setup->tokenizer.eot : -1;
}

static inline LoaderConfig setup_loader_config(const Setup *setup, bool training) {
    const Options *o = &setup->options;
    return (LoaderConfig){.tokens = training ? &setup->train_set : &setup->val_set,
                          .flag = training ? "--train" : "--val",
                          .seq = o->seq,
                          .micro_batch = o->micro_batch,
                          .global_batch = training ? o->global_batch : o->micro_batch * setup->layout.mesh.dp,
                          .rank = setup->layout.mesh.at.dp,
                          .ranks = setup->layout.mesh.dp,
                          .seed = (uint64_t)o->seed,
                          .shuffle = training && o->shuffle,
                          .pack = o->pack,
                          .eot = setup_eot(setup),
                          .once = !training};
}

static inline bool setup_tokens_(TokenSet *set, const char *pattern, const char *flag, Error *error) {
    set->info = (TokenInfo){.eot = -1, .documents = -1};
    return pattern == NULL || tokens_open(set, pattern, flag, error);
}

// The tokenizer that the token files name, where it is there: without it a run only lacks text.
static inline bool setup_data_tokenizer_(Setup *setup, Error *error) {
    const Options *o = &setup->options;
    const TokenSet *set = setup->train_set.info.tokenizer[0] != '\0' ? &setup->train_set : &setup->val_set;
    const char *name = set->info.tokenizer[0] == '\0' && setup->config.vocab == TOKENIZER_BYTE_VOCAB ? "byte" : set->info.tokenizer;
    char path[4300];
    Error unknown = {0};
    setup->has_tokenizer =
        tokenizer_resolve(name, set->count > 0 ? set->files[0].path : "", path) && tokenizer_open(&setup->tokenizer, path, &unknown);
    if (o->prompt == NULL || o->prompt[0] == '\0' || setup->has_tokenizer) return true;
    if (unknown.code != 0) return fail(error, unknown.code, "--prompt: the tokenizer of the data: %s", unknown.text);
    return fail(error, CODE_USAGE, "--prompt: the tokenizer of the data (%.100s) is not there, wanted --tokenizer",
                name[0] != '\0' ? name : "unknown");
}

// Vocabulary and tokenizer, of --tokenizer or of the token files, checked against each other and against --vocab.
static inline bool setup_vocabulary_(Setup *setup, Error *error) {
    const TokenInfo *train = &setup->train_set.info, *val = &setup->val_set.info;
    const char *path = setup->options.tokenizer;
    int64_t named = train->vocab > 0 ? train->vocab : val->vocab;
    if (train->vocab > 0 && val->vocab > 0 && train->vocab != val->vocab) {
        return fail(error, CODE_INPUT, "--val: its vocabulary has %lld tokens, that of --train %lld: not made by the same tokenizer",
                    (long long)val->vocab, (long long)train->vocab);
    }
    if (path != NULL) {
        if (!tokenizer_open(&setup->tokenizer, path, error)) return false;
        setup->has_tokenizer = true;
    }
    if (!model_configure_over(&setup->config, &setup->options, &setup->shape, named > 0 ? named : setup->tokenizer.vocab, error)) return false;
    if (path == NULL && !setup_data_tokenizer_(setup, error)) return false;
    if (setup->tokenizer.kind == TOKENIZER_BPE && named > 0 && named != setup->tokenizer.vocab) {
        return fail(error, CODE_INPUT, "--tokenizer: has %lld tokens, the token files say %lld: not the tokenizer that made them",
                    (long long)setup->tokenizer.vocab, (long long)named);
    }
    if (setup->config.vocab < named) {
        return fail(error, CODE_USAGE, "--vocab: got %lld, the token files need %lld", (long long)setup->config.vocab, (long long)named);
    }
    if (setup->config.vocab < setup->tokenizer.vocab) {
        return fail(error, CODE_USAGE, "--vocab: got %lld, the tokenizer has %lld", (long long)setup->config.vocab,
                    (long long)setup->tokenizer.vocab);
    }
    if (setup->options.given[OPTION_eot] && setup->options.eot >= setup->config.vocab) {
        return fail(error, CODE_USAGE, "--eot: got %lld, wanted an id below the vocabulary of %lld", (long long)setup->options.eot,
                    (long long)setup->config.vocab);
    }
    return true;
}

// Which part of the model and the batch this rank takes.
static inline bool setup_layout_(Setup *setup, Error *error) {
    Options *o = &setup->options;
    const bool other = o->given[OPTION_world];
    if (other && !o->dry_run) return fail(error, CODE_USAGE, "--world: plans for another number of ranks: wanted --dry-run with it");
    if (!layout_create(&setup->layout, &setup->config, o, other ? (int)o->world : setup->comm->size, other ? 0 : setup->comm->rank, error))
        return false;
    ScheduleShape shape;
    o->global_batch = layout_global_batch(&setup->layout, o);
    return layout_schedule(&setup->layout, o, &shape, error) && devices_check(o, &setup->layout.local, error);
}

static inline bool setup_flags(Setup *setup, Error *error) {
    Options *o = &setup->options;
    if (o->master == MASTER_NONE && o->precision == PRECISION_FP32)
        return fail(error, CODE_USAGE, "--master none: fp32 weights have no copy to leave out (wanted --precision bf16, or --master fp32)");
    if (o->save_every == OPTIONS_AUTO && o->mtbf == 0) return fail(error, CODE_USAGE, "--save-every auto: wanted --mtbf HOURS with it");
    if (o->dump_grads != NULL && o->steps == 0)
        return fail(error, CODE_USAGE, "--dump-grads: writes the gradients of step 1, --steps 0 makes none (wanted --steps 1 or more)");
    const bool looks = o->val != NULL || o->prompt != NULL || o->sample_every > 0 || o->export_hf != NULL;
    if (o->steps == 0 && !looks && !o->dry_run) {
        return fail(error, CODE_USAGE, "--steps 0: trains nothing: wanted something to do (--val, --prompt, --sample-every, --export-hf)");
    }
    if (o->trace != NULL && !trace_parse(o->trace, &setup->trace_first, &setup->trace_last, error)) return false;
    if (o->trace != NULL && o->out == NULL) return fail(error, CODE_USAGE, "--trace: wanted --out, the directory that gets trace.json");
    if (o->trace != NULL && setup->trace_first > o->steps) {
        return fail(error, CODE_USAGE, "--trace: got '%.64s', wanted steps of this run (--steps %lld)", o->trace, (long long)o->steps);
    }
    if (o->train == NULL && o->steps > 0 && !o->dry_run) {
        return fail(error, CODE_USAGE, "--train: got nothing, wanted token files (data/kjv.sh makes some; --steps 0 only validates and samples)");
    }
    return setup_tokens_(&setup->train_set, o->train, "--train", error) && setup_tokens_(&setup->val_set, o->val, "--val", error) &&
           setup_vocabulary_(setup, error) && setup_layout_(setup, error) &&
           (o->train == NULL || tokens_check(&setup->train_set, setup->config.vocab, error)) &&
           (o->val == NULL || tokens_check(&setup->val_set, setup->config.vocab, error));
}

static inline bool setup_open_loaders(Setup *setup, Error *error) {
    const Options *o = &setup->options;
    const LoaderConfig train = setup_loader_config(setup, true), val = setup_loader_config(setup, false);
    const LoaderPosition beginning = {0};
    return (o->train == NULL || loader_open(&setup->train, &train, o->steps > 0 ? setup->start : beginning, error)) &&
           (o->val == NULL || loader_open(&setup->val, &val, beginning, error));
}

// Sizes of everything that will be allocated.
static inline bool setup_plan_(Setup *setup, Error *error) {
    const Options *o = &setup->options;
    PlanInput *plan = &setup->plan;
    const LoaderConfig train = setup_loader_config(setup, true), val = setup_loader_config(setup, false);
    if (!plan_create(plan, &setup->model, o, setup->layout.mesh.world, error)) return false;
    plan->train_tokens = setup->train_set.tokens;
    plan->machine_bytes = plan_machine_bytes();
    plan->local_ranks = o->given[OPTION_world] ? 0 : setup->comm->local_size;
    if (o->train != NULL) plan->train_samples = loader_sequences_per_epoch(&setup->train);
    const int64_t data_bytes = (o->train != NULL ? loader_bytes(&train) : 0) + (o->val != NULL ? loader_bytes(&val) : 0);
    return data_bytes == 0 || plan_add(plan, "data", (size_t)data_bytes, 1, error);
}

// Opens the device. What it has taken by then is in the plan, too.
static inline bool setup_device_(Setup *setup, Error *error) {
    Device *d = &setup->device;
    if (!devices_open(d, &setup->options, setup->comm, error)) return false;
    const double left = d->free_bytes(d);
    setup->plan.device_bytes = left > 0 ? left + (double)d->own_bytes(d) : 0;
    return true;
}

// As checkpoints name them. The caller frees the list; the paths are the set's.
static inline CheckpointDataFile *setup_data_files(const TokenSet *set) {
    CheckpointDataFile *files = base_new((size_t)set->count, sizeof *files);
    for (int64_t i = 0; i < set->count; i++) files[i] = (CheckpointDataFile){set->files[i].path, set->files[i].tokens};
    return files;
}

// Finds the checkpoint that --resume names and checks that this run may go on from it.
static inline bool setup_find_checkpoint(Setup *setup, Error *error) {
    const Options *o = &setup->options;
    Checkpoint *checkpoint = &setup->checkpoint;
    if (strcmp(o->resume, "no") == 0) {
        int64_t existing = 0;
        if (o->out == NULL || !checkpoint_count(o->out, &existing, error) || existing == 0) return error->code == 0;
        return fail(error, CODE_USAGE, "--out: '%s' holds %lld checkpoint%s; wanted --resume auto to go on, or another directory", o->out,
                    (long long)existing, existing == 1 ? "" : "s");
    }
    if (strcmp(o->resume, "auto") == 0) {
        if (o->out == NULL) return fail(error, CODE_USAGE, "--resume auto: wanted --out, the directory to look in");
        if (!checkpoint_find(setup->comm, o->out, checkpoint, &setup->resumes, stderr, error)) return false;
    } else {
        if (!checkpoint_open(setup->comm, o->resume, checkpoint, error)) return false;
        setup->resumes = true;
    }
    if (!setup->resumes) return true;
    const CheckpointState *state = &checkpoint->manifest.state;
    // What decides which sequences come next, and how the tensors are stored.
    const int fixed[] = {OPTION_precision, OPTION_master, OPTION_seed, OPTION_shuffle, OPTION_pack, OPTION_seq, OPTION_eot};
    CheckpointDataFile *files = setup_data_files(&setup->train_set);
    const bool trains = o->steps > 0; // only then does the data position matter
    const bool good = checkpoint_model_check(checkpoint->directory, state->model, &setup->config, error) &&
                      checkpoint_flags_check(checkpoint->directory, state->flags, o, fixed, trains ? 7 : 2, error) &&
                      (!trains || checkpoint_data_check(checkpoint->directory, state, files, setup->train_set.count, error));
    free(files);
    setup->start = (LoaderPosition){state->epoch, state->position, state->row};
    if (good && trains && o->dump_grads != NULL && state->step > 0) {
        return fail(error, CODE_USAGE, "--dump-grads: writes the gradients of step 1, this run goes on after step %lld", (long long)state->step);
    }
    setup->step = state->step;
    setup->tokens = state->tokens;
    return good;
}

// Whether the run that it would go on with is over, with all its files.
static inline bool setup_is_finished_(const Setup *setup) {
    const Options *o = &setup->options;
    const bool exported = o->export_hf == NULL || !hf_export_is_free(o->export_hf);
    return setup->resumes && o->steps > 0 && setup->step >= o->steps && exported && (o->out == NULL || monitor_finished(o->out));
}

// Checks files, model, layout, place on disk, checkpoint to go on from, memory. *idle: all is well, and there is nothing to do. Collective: all
// ranks get the same error.
static inline bool setup_check(Setup *setup, bool *idle, Error *error) {
    Comm *comm = setup->comm;
    Options *o = &setup->options;
    const bool first = comm->rank == 0, writes = first && o->out != NULL && !o->dry_run;
    *idle = false;
    if (!model_source_shape(comm, o, &setup->shape, error)) return false;
    if (!setup_agree(comm, setup_flags(setup, error), error)) return false;
    if (!setup_agree(comm, !writes || checkpoint_lock(o->out, &setup->lock, error), error)) return false;
    if (!setup_agree(comm, setup_find_checkpoint(setup, error), error)) return false;
    const bool cleans = writes && setup->resumes; // there is a good one: leftovers are not needed
    if (!setup_agree(comm, !cleans || checkpoint_clean(o->out, error), error)) return false;
    if ((*idle = setup_is_finished_(setup))) {
        if (first) printf("%s is at step %lld of %lld: nothing to do\n", setup->checkpoint.directory, (long long)setup->step, (long long)o->steps);
        return true;
    }
    if (!setup_agree(comm, setup_open_loaders(setup, error), error)) return false;
    setup->model = model_create(&setup->config);
    if (!setup_agree(comm, setup_plan_(setup, error), error)) return false;
    if (o->dry_run && first) plan_print(stdout, &setup->plan);
    if ((*idle = o->dry_run)) return true;
    if (!setup_agree(comm, setup_device_(setup, error) && plan_fits(&setup->plan, error), error)) return false;
    const bool exports = first && o->export_hf != NULL;
    if (!setup_agree(comm, !exports || hf_export_check(o->export_hf, &setup->model, zero_config(o).dtype, error), error)) return false;
    return setup->resumes || o->init_from == NULL || weights_open(comm, o->init_from, &setup->model, &setup->weights, error);
}

// What was opened stays open until now, but for the checkpoint and the weights that were read and the device.
static inline void setup_free(Setup *setup) {
    loader_close(&setup->train);
    loader_close(&setup->val);
    tokens_close(&setup->train_set);
    tokens_close(&setup->val_set);
    tokenizer_close(&setup->tokenizer);
    if (setup->lock >= 0) close(setup->lock);
    layout_free(&setup->layout);
    model_free(&setup->model);
    options_free(&setup->options);
}

#endif
