// saving.h: when a run saves, and from what: every so many steps, or as rarely as failures allow (--mtbf); from a copy, so that training goes on
// meanwhile, or from where the state lives. What is measured of a save is what it cost training. checkpoint_save.h writes and commits.
#ifndef LLMC_SAVING_H
#define LLMC_SAVING_H

#include "llmc/base.h"            // Error, clock_ms
#include "llmc/checkpoint_save.h" // CheckpointSave, checkpoint_save_begin, checkpoint_interval
#include "llmc/model.h"           // ModelConfig
#include "llmc/options.h"         // Options, OPTIONS_AUTO
#include "llmc/setup.h"           // Setup, setup_data_files
#include "llmc/state.h"           // state_slices, state_snapshot
#include <math.h>                 // fmax, fmin

// Checkpoints of a run, one at a time under way.
typedef struct {
    const Setup *setup;
    Zero *zero;
    int64_t first_step; // done before this process began
    CheckpointSave save;
    bool written;          // on all ranks, at the end of the last step: the save under way waits for nothing
    bool measured;         // the save under way tells what one costs: not the last of a run, for which training waits
    double began_ms;       // of the save under way
    double cost_ms;        // time of the main thread that it took
    double slower_ms;      // what the steps since took longer than step_ms/steps
    double step_ms, steps; // of steps without a save: sums that forget with a factor of 0.9 per step
    double interval_s;     // what --mtbf makes of price_s, the last measured cost; 0: not known
    double price_s;
    int64_t interval_steps;
    int64_t next_step; // with --save-every auto
    int64_t last_step; // of the last save that was begun
} Saving;

// Where a run is: what a checkpoint says besides the values.
typedef struct {
    int64_t step, tokens, optimizer_steps;
    LoaderPosition data;
} SavingPoint;

static inline bool saving_is_under_way(const Saving *saving) { return saving->save.comm != NULL; }

// Whether a checkpoint is due after this step. With --save-every auto the first comes early, to know what one costs.
static inline bool saving_is_due(const Saving *saving, int64_t step) {
    enum { FIRST = 10 };
    const int64_t every = saving->setup->options.save_every;
    if (every != OPTIONS_AUTO) return every > 0 && step % every == 0;
    if (saving_is_under_way(saving)) return false; // what it costs decides
    return saving->next_step > 0 ? step >= saving->next_step : step >= saving->first_step + FIRST;
}

// Whether a save is written while training goes on, from a copy.
static inline bool saving_is_async(const Saving *saving) { return saving->setup->options.async_save && saving->zero->config.snapshot; }

// What a step's time tells of the cost of saving.
static inline void saving_time_step(Saving *saving, double ms) {
    if (!saving_is_under_way(saving)) {
        saving->step_ms = 0.9 * saving->step_ms + ms;
        saving->steps = 0.9 * saving->steps + 1;
    } else if (saving->steps > 0) {
        saving->slower_ms += ms - saving->step_ms / saving->steps;
    }
}

// Begins a save of this point. Where there is a snapshot it is written while training goes on; otherwise, and with `wait`, nothing of the state may
// change before saving_finish. Collective, and all ranks get the same error; none is under way before.
static inline bool saving_begin(Saving *saving, const SavingPoint *point, bool wait, Error *error) {
    const Setup *setup = saving->setup;
    Zero *zero = saving->zero;
    int count;
    saving->began_ms = clock_ms();
    saving->last_step = point->step;
    CheckpointSlice *slices = state_slices(zero, true, &count);
    saving->measured = !wait || !saving_is_async(saving);
    if ((!wait && saving_is_async(saving)) || !zero->device->on_host) state_snapshot(zero, slices, count);
    CheckpointDataFile *files = setup_data_files(&setup->train_set);
    const CheckpointState state = {.step = point->step,
                                   .tokens = point->tokens,
                                   .optimizer_steps = point->optimizer_steps,
                                   .seed = setup->options.seed,
                                   .epoch = point->data.epoch,
                                   .position = point->data.position,
                                   .row = point->data.row,
                                   .data_files = files,
                                   .data_file_count = setup->train_set.count,
                                   .model = checkpoint_model_json(&setup->config),
                                   .flags = checkpoint_flags_json(&setup->options)};
    const bool good = checkpoint_save_begin(&saving->save, setup->comm, setup->options.out, &state, slices, count, setup->options.keep, error);
    json_decref(state.model);
    json_decref(state.flags);
    free(files);
    free(slices);
    saving->written = false;
    saving->cost_ms = clock_ms() - saving->began_ms, saving->slower_ms = 0;
    return good;
}

// When to save next, by the clock of rank 0, after a save of which the cost is known; step: the one that is done.
static inline void saving_plan_next_(Saving *saving, int64_t step) {
    const Options *o = &saving->setup->options;
    const double step_s = saving->steps > 0 ? saving->step_ms / saving->steps * 1e-3 : 0;
    if (!saving->measured) return;
    if (o->mtbf > 0 && step_s > 0) {
        saving->price_s = saving->cost_ms * 1e-3;
        saving->interval_s = checkpoint_interval(saving->price_s, o->mtbf * 3600);
        saving->interval_steps = (int64_t)fmin(fmax(saving->interval_s / step_s, 1), 1e12);
    }
    if (o->save_every != OPTIONS_AUTO) return;
    saving->next_step = step + saving->interval_steps;
    comm_broadcast(saving->setup->comm->world, &saving->next_step, 1, COMM_I64, 0);
}

// Finishes the save under way: commits what the ranks have written. After a failure what was there before stays.
static inline bool saving_finish(Saving *saving, int64_t step, Error *error) {
    const double begin = clock_ms();
    if (!checkpoint_save_finish(&saving->save, error)) return false;
    saving->cost_ms += clock_ms() - begin + fmax(0, saving->slower_ms);
    saving_plan_next_(saving, step);
    return true;
}

// What --mtbf makes of the measured cost of a save.
static inline void saving_say_interval(const Saving *saving, Monitor *monitor) {
    if (saving->interval_steps == 0) return;
    monitor_say(monitor, "a save costs %.3g s of training; at a failure every %.3g hours one every %lld step%s (%.3g s) loses the least",
                saving->price_s, saving->setup->options.mtbf, (long long)saving->interval_steps, saving->interval_steps == 1 ? "" : "s",
                saving->interval_s);
}

#endif
