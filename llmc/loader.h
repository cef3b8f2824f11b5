// loader.h: the stream of optimizer-step batches of one data-parallel rank. A thread prepares the next step while the
// current one is used; it touches host memory and files only. The stream of sequences is a function of (files, T, pack,
// seed, shuffle); ranks, global batch and micro-batch only cut it.
#ifndef LLMC_LOADER_H
#define LLMC_LOADER_H

#include "llmc/base.h"    // Error, fail
#include "llmc/options.h" // PACK_*
#include "llmc/packing.h" // MicroBatch, Pieces, FitBuffer
#include "llmc/sampler.h" // Sampler, Windows
#include "llmc/tokens.h"  // TokenSet
#include <pthread.h>      // pthread_create
#include <signal.h>       // pthread_sigmask

typedef struct {
    const TokenSet *tokens; // open and checked; stays so while the loader lives
    const char *flag;       // names the set in messages: "--train"
    int64_t seq;            // T
    int64_t micro_batch;    // B
    int64_t global_batch;   // sequences of a step over all ranks
    int64_t rank, ranks;    // data-parallel
    uint64_t seed;
    bool shuffle;
    int pack;    // PACK_*
    int64_t eot; // -1 unknown
    bool once;   // validation: ends after one epoch; the last steps may have fewer rows, or none on some ranks
} LoaderConfig;

// Where the stream goes on: all that a checkpoint needs.
typedef struct {
    int64_t epoch;
    int64_t position; // none, varlen: windows consumed of the epoch; fit: buffers of PACK_BUFFER pieces consumed
    int64_t row;      // fit: rows consumed of the current buffer; else 0
} LoaderPosition;

// This rank's share of a step: sequences rank*GB/ranks.. of the global batch, B to a micro-batch.
typedef struct {
    MicroBatch *micros;   // (micro_count)
    int64_t micro_count;  // GB / ranks / B
    int64_t *sample_ids;  // (sequences) none, varlen: window in file order; fit: first piece of the row in file order
    int64_t sequences;    // of this rank
    int64_t tokens;       // computed by this rank
    int64_t valid;        // of this rank; 0 is possible when every target is masked
    int64_t valid_global; // of all ranks where it is known without reading their tokens (none, fit, one rank); else -1
    double padding;       // share of this rank's sequences*T positions that hold no token
    LoaderPosition next;  // position after this step
} StepBatch;

typedef struct {
    LoaderConfig config;
    Windows windows; // none, varlen
    Pieces pieces;   // fit
    Sampler sampler; // of windows or pieces
    FitBuffer fit;
    int32_t *scratch; // (T + 1)
    StepBatch slots[2];
    LoaderPosition start, position; // at open or rewind; after the last step handed out

    pthread_t thread;
    bool running; // the thread exists
    pthread_mutex_t lock;
    pthread_cond_t changed;
    // Under the lock. Step k lives in slots[k % 2]; the user holds step taken-1.
    int64_t produced, taken;
    bool busy;         // the thread fills slots[produced % 2] and owns `at`, `fit`, `scratch`
    bool ended;        // the thread met the end or an error and waits for a rewind
    bool stop;         // asks the thread to return
    Error error;       // what ended it; code 0 = end of the epoch
    LoaderPosition at; // where the thread goes on
} Loader;

// Host bytes of a loader's batches. With fit comes the list of pieces, PIECE_BYTES each: an upper estimate from the document
// count, when the files name it.
static inline int64_t loader_bytes(const LoaderConfig *config) {
    const int64_t share = config->global_batch / config->ranks, micros = share / config->micro_batch;
    int64_t bytes = 2 * (micros * microbatch_bytes(config->micro_batch * config->seq) + share * (int64_t)sizeof(int64_t));
    bytes += (config->seq + 1) * (int64_t)sizeof(int32_t) + (int64_t)sizeof(Loader);
    if (config->pack == PACK_FIT && config->tokens->info.documents >= 0) {
        bytes += (config->tokens->info.documents + config->tokens->tokens / config->seq) * PIECE_BYTES;
    }
    return bytes;
}

// Sequences of an epoch; with fit a lower estimate: the rows that packing without any padding would need.
static inline int64_t loader_sequences_per_epoch(const Loader *loader) {
    if (loader->config.pack == PACK_FIT) return ceil_div(loader->pieces.positions, loader->config.seq);
    return loader->windows.count;
}

// ----------------------------------------------------------------------------
// Filling a step (the thread; before it starts, loader_open)

static inline int64_t loader_units_(const Loader *loader) {
    return loader->config.pack == PACK_FIT ? fit_buffers(&loader->pieces) : loader->windows.count;
}

// Moves `at` over one sequence. With fit the current buffer is loaded.
static inline void loader_advance_(const Loader *loader, LoaderPosition *at) {
    if (loader->config.pack == PACK_FIT && ++at->row < loader->fit.rows) return;
    at->row = 0;
    if (++at->position < loader_units_(loader)) return;
    at->position = 0;
    at->epoch++;
}

// Appends sequence g of the global batch, at loader->at. `batch` NULL: another rank's, only counted.
static inline bool loader_add_(Loader *loader, StepBatch *step, MicroBatch *batch, int64_t g, Error *error) {
    const LoaderConfig *c = &loader->config;
    const LoaderPosition *at = &loader->at;
    if (c->pack == PACK_FIT) {
        fit_load(&loader->fit, &loader->pieces, &loader->sampler, c->seq, at->epoch, at->position);
        step->valid_global += loader->fit.row_tokens[at->row];
        if (batch == NULL) return true;
        step->sample_ids[step->sequences++] = loader->fit.piece[loader->fit.row_begin[at->row]];
        return packing_add_row(batch, c->tokens, &loader->pieces, &loader->fit, at->row, c->seq, g, loader->scratch, error);
    }
    step->valid_global += c->seq;
    if (batch == NULL) return true;
    const int64_t window = sampler_index(&loader->sampler, at->epoch, at->position);
    step->sample_ids[step->sequences++] = window;
    return packing_add_window(batch, c->tokens, windows_position(&loader->windows, window), c->seq, g, c->pack, c->eot, loader->scratch, error);
}

// Fills the step at loader->at and moves it. Returns false at the end of a `once` stream (error->code 0) or on an error.
static inline bool loader_fill_(Loader *loader, StepBatch *step, Error *error) {
    const LoaderConfig *c = &loader->config;
    const int64_t share = c->global_batch / c->ranks, first = c->rank * share;
    if (c->once && loader->at.epoch > 0) return false;
    step->sequences = step->tokens = step->valid = step->valid_global = 0;
    for (int64_t m = 0; m < step->micro_count; m++) microbatch_clear(&step->micros[m]);
    for (int64_t g = 0; g < c->global_batch; g++) {
        if (c->once && loader->at.epoch > 0) break;
        const bool own = g >= first && g < first + share;
        if (!loader_add_(loader, step, own ? &step->micros[(g - first) / c->micro_batch] : NULL, g, error)) return false;
        loader_advance_(loader, &loader->at);
    }
    for (int64_t m = 0; m < step->micro_count; m++) {
        step->tokens += step->micros[m].tokens;
        step->valid += step->micros[m].valid;
    }
    if (c->pack == PACK_VARLEN) step->valid_global = c->ranks == 1 ? step->valid : -1;
    step->padding = step->sequences > 0 ? 1.0 - (double)step->tokens / ((double)step->sequences * (double)c->seq) : 0.0;
    step->next = loader->at;
    return true;
}

static inline void *loader_thread_(void *argument) {
    Loader *loader = argument;
    pthread_mutex_lock(&loader->lock);
    while (!loader->stop) {
        if (loader->ended || loader->produced > loader->taken) { // one step ahead: the other slot is in use
            pthread_cond_wait(&loader->changed, &loader->lock);
            continue;
        }
        loader->busy = true;
        StepBatch *step = &loader->slots[loader->produced % 2];
        pthread_mutex_unlock(&loader->lock);
        Error error = {0};
        const bool good = loader_fill_(loader, step, &error);
        pthread_mutex_lock(&loader->lock);
        loader->busy = false;
        loader->produced += good;
        loader->ended = !good;
        loader->error = error;
        pthread_cond_broadcast(&loader->changed);
    }
    pthread_mutex_unlock(&loader->lock);
    return NULL;
}

// ----------------------------------------------------------------------------
// The user's side (one thread)

// Stops the thread, once it has finished the step it is preparing, and frees everything. The token set stays open. Harmless on a zeroed Loader.
static inline void loader_close(Loader *loader) {
    if (loader->running) {
        pthread_mutex_lock(&loader->lock);
        loader->stop = true;
        pthread_cond_broadcast(&loader->changed);
        pthread_mutex_unlock(&loader->lock);
        pthread_join(loader->thread, NULL);
        pthread_mutex_destroy(&loader->lock);
        pthread_cond_destroy(&loader->changed);
    }
    for (int s = 0; s < 2; s++) {
        for (int64_t m = 0; m < loader->slots[s].micro_count; m++) microbatch_free(&loader->slots[s].micros[m]);
        free(loader->slots[s].micros);
        free(loader->slots[s].sample_ids);
    }
    free(loader->scratch);
    windows_free(&loader->windows);
    pieces_free(&loader->pieces);
    memset(loader, 0, sizeof *loader);
}

// Everything about a configuration that can be checked without reading tokens.
static inline bool loader_check(const LoaderConfig *c, Error *error) {
    if (c->global_batch % (c->micro_batch * c->ranks) != 0) {
        return fail(error, CODE_USAGE, "--global-batch: got %lld, wanted a multiple of --micro-batch %lld x %lld data-parallel rank%s",
                    (long long)c->global_batch, (long long)c->micro_batch, (long long)c->ranks, c->ranks == 1 ? "" : "s");
    }
    if (c->global_batch > INT32_MAX / c->seq) {
        return fail(error, CODE_USAGE, "--global-batch: got %lld x --seq %lld tokens, wanted at most %d", (long long)c->global_batch,
                    (long long)c->seq, INT32_MAX);
    }
    if (c->pack != PACK_NONE && c->tokens->vocab > 0 && c->eot >= c->tokens->vocab) {
        return fail(error, CODE_USAGE, "--eot: got %lld, wanted less than the vocabulary of %lld", (long long)c->eot, (long long)c->tokens->vocab);
    }
    for (int64_t f = 0; c->pack != PACK_NONE && c->eot < 0 && f < c->tokens->count; f++) {
        if (c->tokens->files[f].documents != NULL) continue;
        return fail(error, CODE_USAGE, "--eot: not given, and no .json beside %.300s names it: --pack %s needs the id that ends a document",
                    c->tokens->files[f].path, c->pack == PACK_FIT ? "fit" : "varlen");
    }
    return true;
}

static inline bool loader_check_position_(Loader *loader, Error *error) {
    const LoaderPosition at = loader->start;
    bool good = at.epoch >= 0 && at.position >= 0 && at.position < loader_units_(loader) && at.row >= 0;
    int64_t rows = 1;
    if (good && loader->config.pack == PACK_FIT) {
        fit_load(&loader->fit, &loader->pieces, &loader->sampler, loader->config.seq, at.epoch, at.position);
        rows = loader->fit.rows;
    }
    if (good && at.row < rows) return true;
    return fail(error, CODE_INPUT,
                "%s: position to resume at: got epoch %lld, position %lld of %lld, row %lld: other files, --seq or --pack than the checkpoint's?",
                loader->config.flag, (long long)at.epoch, (long long)at.position, (long long)loader_units_(loader), (long long)at.row);
}

// Opens a stream at `start` ({0} is the beginning) and starts preparing its first step. The Loader must not move.
static inline bool loader_open(Loader *loader, const LoaderConfig *config, LoaderPosition start, Error *error) {
    memset(loader, 0, sizeof *loader);
    loader->config = *config;
    loader->start = loader->position = loader->at = start;
    if (!loader_check(config, error)) return false;
    int64_t samples;
    if (config->pack == PACK_FIT) {
        if (!pieces_create(&loader->pieces, config->tokens, config->seq, config->eot, config->flag, error)) return false;
        samples = loader->pieces.count;
    } else {
        if (!windows_create(&loader->windows, config->tokens, config->seq, config->flag, error)) return false;
        samples = loader->windows.count;
    }
    loader->sampler = sampler_create(config->seed, samples, config->shuffle);
    if (!loader_check_position_(loader, error)) {
        loader_close(loader);
        return false;
    }
    const int64_t share = config->global_batch / config->ranks;
    loader->scratch = base_new((size_t)config->seq + 1, sizeof(int32_t));
    for (int s = 0; s < 2; s++) {
        StepBatch *step = &loader->slots[s];
        step->micro_count = share / config->micro_batch;
        step->micros = base_new((size_t)step->micro_count, sizeof(MicroBatch));
        step->sample_ids = base_new((size_t)share, sizeof(int64_t));
        for (int64_t m = 0; m < step->micro_count; m++) microbatch_create(&step->micros[m], config->micro_batch * config->seq);
    }
    pthread_mutex_init(&loader->lock, NULL);
    pthread_cond_init(&loader->changed, NULL);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); // signals are the main thread's
    const int status = pthread_create(&loader->thread, NULL, loader_thread_, loader);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    loader->running = status == 0;
    if (status != 0) {
        loader_close(loader);
        return fail(error, CODE_IO, "%s: cannot start the loader's thread: %s", config->flag, strerror(status));
    }
    return true;
}

// The next step, valid until the next call; waits when it is not ready. NULL: an error of the thread, or with error->code 0
// the end of a `once` stream. Afterwards loader_rewind starts over.
static inline const StepBatch *loader_next(Loader *loader, Error *error) {
    pthread_mutex_lock(&loader->lock);
    while (loader->produced == loader->taken && !loader->ended) pthread_cond_wait(&loader->changed, &loader->lock);
    const StepBatch *step = NULL;
    if (loader->produced > loader->taken) {
        step = &loader->slots[loader->taken % 2];
        loader->position = step->next;
        loader->taken++;
        pthread_cond_broadcast(&loader->changed);
    } else if (loader->error.code != 0) {
        fail(error, loader->error.code, "%s", loader->error.text);
    }
    pthread_mutex_unlock(&loader->lock);
    return step;
}

// What a checkpoint saves: the position after the last step that loader_next returned.
static inline LoaderPosition loader_position(const Loader *loader) { return loader->position; }

// Starts over where loader_open started. Batches handed out before are gone.
static inline void loader_rewind(Loader *loader) {
    pthread_mutex_lock(&loader->lock);
    while (loader->busy) pthread_cond_wait(&loader->changed, &loader->lock);
    loader->produced = loader->taken = 0;
    loader->ended = false;
    loader->error = (Error){0};
    loader->position = loader->at = loader->start;
    pthread_cond_broadcast(&loader->changed);
    pthread_mutex_unlock(&loader->lock);
}

#endif
