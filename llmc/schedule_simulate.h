// schedule_simulate.h: runs the action lists of all stages of a pipeline on paper: when each action starts and ends, how much of the time is idle,
// how many activation slots are in use; finds deadlocks, actions out of order and buffers used twice. Messages are rendezvous: one is on its way
// from the moment both sides have posted it. Links carry any number of messages at once.
#ifndef LLMC_SCHEDULE_SIMULATE_H
#define LLMC_SCHEDULE_SIMULATE_H

#include "llmc/base.h"     // Error, fail, base_new
#include "llmc/schedule.h" // Schedule, Action

// Times of all chunks of a stage for one micro-batch (a chunk takes a V-th), in any unit, and of a message.
typedef struct {
    double forward, backward_input, backward_weight, message;
} ScheduleTimes;

typedef struct {
    int stages;
    double **start, **end; // (stages)(count of the stage's list)
    double time;           // until the last stage is done
    double bubble;         // share of time x stages in which nothing is computed
    int *peak_slots;       // (stages)
} ScheduleRun;

static inline void schedule_run_free(ScheduleRun *run) {
    for (int s = 0; s < run->stages; s++) {
        free(run->start[s]);
        free(run->end[s]);
    }
    free(run->start);
    free(run->end);
    free(run->peak_slots);
    *run = (ScheduleRun){0};
}

// A message, found by its receiver's virtual stage and micro-batch. Ranks count the messages of its direction into the receiving stage.
typedef struct {
    double sent, received;        // when posted; valid where the rank is not 0
    int64_t sent_rank, recv_rank; // from 1; 0 = not posted
} ScheduleMessage_;

typedef struct {
    const Schedule *lists;
    ScheduleShape shape;
    ScheduleTimes times;
    ScheduleRun *run;
    ScheduleMessage_ *messages;       // (2, P*V, M) forward, backward
    int64_t *sent_ranks, *recv_ranks; // (2, P) last rank given
    unsigned *done;                   // (P*V, M) bits of ActionKind
    int **owners[4];                  // (P)(size) of slots, inputs, gradients, stashes: 1 + id of the part that holds the buffer; 0 = free
    int *live_slots;                  // (P)
    double *clocks, *busy;            // (P)
    int64_t *at;                      // (P) next action
} ScheduleSimulation_;

enum { SCHEDULE_DONE_, SCHEDULE_BLOCKED_, SCHEDULE_BAD_ };

#define SCHEDULE_BIT_(kind) (1u << (kind))

// What must have happened to the micro-batch in this chunk before.
static inline unsigned schedule_needs_(ActionKind kind) {
    switch (kind) {
    case ACTION_WAIT_RECV_FORWARD: return SCHEDULE_BIT_(ACTION_RECV_FORWARD);
    case ACTION_FORWARD: return SCHEDULE_BIT_(ACTION_WAIT_RECV_FORWARD);
    case ACTION_SEND_FORWARD: return SCHEDULE_BIT_(ACTION_FORWARD);
    case ACTION_WAIT_SEND_FORWARD: return SCHEDULE_BIT_(ACTION_SEND_FORWARD);
    case ACTION_WAIT_RECV_BACKWARD: return SCHEDULE_BIT_(ACTION_RECV_BACKWARD);
    case ACTION_BACKWARD:
    case ACTION_BACKWARD_INPUT:
        return SCHEDULE_BIT_(ACTION_FORWARD) | SCHEDULE_BIT_(ACTION_WAIT_RECV_BACKWARD) | SCHEDULE_BIT_(ACTION_WAIT_SEND_FORWARD);
    case ACTION_BACKWARD_WEIGHT: return SCHEDULE_BIT_(ACTION_BACKWARD_INPUT);
    case ACTION_SEND_BACKWARD: return SCHEDULE_BIT_(ACTION_BACKWARD) | SCHEDULE_BIT_(ACTION_BACKWARD_INPUT);
    case ACTION_WAIT_SEND_BACKWARD: return SCHEDULE_BIT_(ACTION_SEND_BACKWARD);
    default: return 0; // receives are posted at any time
    }
}

// All that must happen, once, to every micro-batch in a chunk.
static inline unsigned schedule_all_(const ScheduleShape *shape, int virtual_stage) {
    unsigned all = SCHEDULE_BIT_(ACTION_KINDS) - 1;
    const unsigned split = SCHEDULE_BIT_(ACTION_BACKWARD_INPUT) | SCHEDULE_BIT_(ACTION_BACKWARD_WEIGHT);
    all &= ~(shape->kind == SCHEDULE_ZB ? SCHEDULE_BIT_(ACTION_BACKWARD) : split);
    if (virtual_stage == 0) {
        all &= ~(SCHEDULE_BIT_(ACTION_RECV_FORWARD) | SCHEDULE_BIT_(ACTION_WAIT_RECV_FORWARD) | SCHEDULE_BIT_(ACTION_SEND_BACKWARD) |
                 SCHEDULE_BIT_(ACTION_WAIT_SEND_BACKWARD));
    }
    if (virtual_stage == shape->stages * shape->chunks - 1) {
        all &= ~(SCHEDULE_BIT_(ACTION_SEND_FORWARD) | SCHEDULE_BIT_(ACTION_WAIT_SEND_FORWARD) | SCHEDULE_BIT_(ACTION_RECV_BACKWARD) |
                 SCHEDULE_BIT_(ACTION_WAIT_RECV_BACKWARD));
    }
    return all;
}

enum { SCHEDULE_SLOT_, SCHEDULE_INPUT_, SCHEDULE_GRADIENT_, SCHEDULE_STASH_ };

// Marks a buffer as held by a part, or demands that it is, or frees it.
static inline bool schedule_hold_(ScheduleSimulation_ *sim, int stage, int sort, int index, int part, bool acquire, bool release, Error *error) {
    static const char *const names[] = {"slot", "input", "gradient", "stash"};
    const Schedule *s = &sim->lists[stage];
    const int sizes[] = {s->slots, s->inputs, s->gradients, s->stashes};
    if (index < 0 || index >= sizes[sort]) {
        return fail(error, CODE_COMM, "schedule: stage %d, action %lld: %s %d of %d", stage, (long long)sim->at[stage], names[sort], index,
                    sizes[sort]);
    }
    int *owner = &sim->owners[sort][stage][index];
    if (*owner != (acquire ? 0 : part + 1)) {
        return fail(error, CODE_COMM, "schedule: stage %d, action %lld: %s %d %s", stage, (long long)sim->at[stage], names[sort], index,
                    *owner == 0 ? "holds nothing" : "is in use for another micro-batch");
    }
    *owner = release ? 0 : part + 1;
    if (sort == SCHEDULE_SLOT_) {
        sim->live_slots[stage] += (acquire ? 1 : 0) - (release ? 1 : 0);
        if (sim->live_slots[stage] > sim->run->peak_slots[stage]) sim->run->peak_slots[stage] = sim->live_slots[stage];
    }
    return true;
}

// The buffers of an action.
static inline bool schedule_buffers_(ScheduleSimulation_ *sim, int stage, const Action *a, bool first, bool last, Error *error) {
    const int part = a->microbatch * sim->shape.chunks + a->chunk;
    const bool backward = a->kind == ACTION_BACKWARD || a->kind == ACTION_BACKWARD_INPUT, weight = a->kind == ACTION_BACKWARD_WEIGHT;
    const bool forward = a->kind == ACTION_FORWARD, ends = a->kind == ACTION_BACKWARD || weight;
    bool good = true;
    if (forward || backward || weight || a->kind == ACTION_SEND_FORWARD || a->kind == ACTION_WAIT_SEND_FORWARD) {
        good = good && schedule_hold_(sim, stage, SCHEDULE_SLOT_, a->slot, part, forward, ends, error);
    }
    if (!first && (forward || backward || weight || a->kind == ACTION_RECV_FORWARD || a->kind == ACTION_WAIT_RECV_FORWARD)) {
        good = good && schedule_hold_(sim, stage, SCHEDULE_INPUT_, a->input, part, a->kind == ACTION_RECV_FORWARD, ends, error);
    }
    if (backward || a->kind == ACTION_RECV_BACKWARD || a->kind == ACTION_WAIT_RECV_BACKWARD || a->kind == ACTION_SEND_BACKWARD ||
        a->kind == ACTION_WAIT_SEND_BACKWARD) {
        good = good && schedule_hold_(sim, stage, SCHEDULE_GRADIENT_, a->gradient, part, a->kind == ACTION_RECV_BACKWARD || (backward && last),
                                      a->kind == ACTION_WAIT_SEND_BACKWARD || (backward && first), error);
    }
    if (a->kind == ACTION_BACKWARD_INPUT || weight) {
        good = good && schedule_hold_(sim, stage, SCHEDULE_STASH_, a->stash, part, !weight, weight, error);
    }
    return good;
}

// One action of a stage, if it can happen yet.
static inline int schedule_step_(ScheduleSimulation_ *sim, int stage, Error *error) {
    const ScheduleShape *shape = &sim->shape;
    const int P = shape->stages, V = shape->chunks;
    const int64_t at = sim->at[stage];
    const Action *a = &sim->lists[stage].actions[at];
    if ((int)a->kind < 0 || a->kind >= ACTION_KINDS || a->microbatch < 0 || a->microbatch >= shape->microbatches || a->chunk < 0 || a->chunk >= V) {
        fail(error, CODE_COMM, "schedule: stage %d, action %lld: no action %d of micro-batch %d, chunk %d", stage, (long long)at, (int)a->kind,
             a->microbatch, a->chunk);
        return SCHEDULE_BAD_;
    }
    const char *name = action_kind_names[a->kind];
    const int virtual_stage = a->chunk * P + stage, end = P * V - 1;
    unsigned *done = &sim->done[(int64_t)virtual_stage * shape->microbatches + a->microbatch];
    const unsigned all = schedule_all_(shape, virtual_stage), bit = SCHEDULE_BIT_(a->kind);
    if ((all & bit) == 0 || (*done & bit) != 0 || (schedule_needs_(a->kind) & all & ~*done) != 0) {
        fail(error, CODE_COMM, "schedule: stage %d, action %lld: %s of micro-batch %d, chunk %d %s", stage, (long long)at, name, a->microbatch,
             a->chunk,
             (all & bit) == 0     ? "has no place there"
             : (*done & bit) != 0 ? "comes twice"
                                  : "comes before what it needs");
        return SCHEDULE_BAD_;
    }

    double duration = 0, now = sim->clocks[stage];
    const bool sending = a->kind == ACTION_SEND_FORWARD || a->kind == ACTION_WAIT_SEND_FORWARD || a->kind == ACTION_SEND_BACKWARD ||
                         a->kind == ACTION_WAIT_SEND_BACKWARD;
    switch (a->kind) {
    case ACTION_FORWARD: duration = sim->times.forward / V; break;
    case ACTION_BACKWARD: duration = (sim->times.backward_input + sim->times.backward_weight) / V; break;
    case ACTION_BACKWARD_INPUT: duration = sim->times.backward_input / V; break;
    case ACTION_BACKWARD_WEIGHT: duration = sim->times.backward_weight / V; break;
    default: { // a message: from virtual stage v to v+1, or back
        const bool backward = a->kind > ACTION_WAIT_SEND_FORWARD, downward = backward != sending;
        const int other = downward ? virtual_stage + 1 : virtual_stage - 1, receiver = sending ? other : virtual_stage;
        const bool posting =
            a->kind == ACTION_SEND_FORWARD || a->kind == ACTION_RECV_FORWARD || a->kind == ACTION_SEND_BACKWARD || a->kind == ACTION_RECV_BACKWARD;
        if (a->peer != other % P) {
            fail(error, CODE_COMM, "schedule: stage %d, action %lld: %s with stage %d, wanted %d", stage, (long long)at, name, a->peer, other % P);
            return SCHEDULE_BAD_;
        }
        ScheduleMessage_ *message = &sim->messages[((int64_t)(backward ? end + 1 : 0) + receiver) * shape->microbatches + a->microbatch];
        const int64_t channel = (backward ? P : 0) + receiver % P;
        if (posting && sending) message->sent = now, message->sent_rank = ++sim->sent_ranks[channel];
        if (posting && !sending) message->received = now, message->recv_rank = ++sim->recv_ranks[channel];
        if (message->sent_rank != 0 && message->recv_rank != 0 && message->sent_rank != message->recv_rank) {
            fail(error, CODE_COMM,
                 "schedule: stage %d, action %lld: %s of micro-batch %d, chunk %d is message %lld for its sender, %lld for its receiver", stage,
                 (long long)at, name, a->microbatch, a->chunk, (long long)message->sent_rank, (long long)message->recv_rank);
            return SCHEDULE_BAD_;
        }
        if (!posting && (message->sent_rank == 0 || message->recv_rank == 0)) return SCHEDULE_BLOCKED_;
        if (!posting) now = fmax(now, fmax(message->sent, message->received) + sim->times.message);
    }
    }
    if (!schedule_buffers_(sim, stage, a, virtual_stage == 0, virtual_stage == end, error)) return SCHEDULE_BAD_;
    *done |= bit;
    sim->run->start[stage][at] = duration > 0 ? now : sim->clocks[stage];
    sim->run->end[stage][at] = sim->clocks[stage] = now + duration;
    sim->busy[stage] += duration;
    sim->at[stage]++;
    return SCHEDULE_DONE_;
}

static inline bool schedule_steps_(ScheduleSimulation_ *sim, Error *error) {
    const int P = sim->shape.stages;
    for (bool progress = true; progress;) {
        progress = false;
        for (int s = 0; s < P; s++) {
            int result = SCHEDULE_DONE_;
            while (sim->at[s] < sim->lists[s].count && (result = schedule_step_(sim, s, error)) == SCHEDULE_DONE_) progress = true;
            if (result == SCHEDULE_BAD_) return false;
        }
    }
    for (int s = 0; s < P; s++) {
        if (sim->at[s] == sim->lists[s].count) continue;
        const Action *a = &sim->lists[s].actions[sim->at[s]];
        return fail(error, CODE_COMM, "schedule: deadlock: stage %d, action %lld: %s of micro-batch %d, chunk %d waits for stage %d for ever", s,
                    (long long)sim->at[s], action_kind_names[a->kind], a->microbatch, a->chunk, a->peer);
    }
    for (int v = 0; v < P * sim->shape.chunks; v++) {
        for (int m = 0; m < sim->shape.microbatches; m++) {
            const unsigned missing = schedule_all_(&sim->shape, v) & ~sim->done[(int64_t)v * sim->shape.microbatches + m];
            for (int kind = 0; kind < ACTION_KINDS; kind++) {
                if ((missing & SCHEDULE_BIT_(kind)) == 0) continue;
                return fail(error, CODE_COMM, "schedule: stage %d has no %s of micro-batch %d, chunk %d", v % P, action_kind_names[kind], m, v / P);
            }
        }
    }
    return true;
}

// lists (P): of all stages, by stage. False with an error when they do not fit together. The run is to be given to schedule_run_free().
static inline bool schedule_simulate(const Schedule *lists, ScheduleTimes times, ScheduleRun *run, Error *error) {
    const ScheduleShape shape = lists[0].shape;
    const size_t P = (size_t)shape.stages, parts = P * (size_t)shape.chunks * (size_t)shape.microbatches;
    *run = (ScheduleRun){.stages = shape.stages,
                         .start = base_new(P, sizeof(double *)),
                         .end = base_new(P, sizeof(double *)),
                         .peak_slots = base_new(P, sizeof(int))};
    ScheduleSimulation_ sim = {.lists = lists,
                               .shape = shape,
                               .times = times,
                               .run = run,
                               .messages = base_new(2 * parts, sizeof(ScheduleMessage_)),
                               .sent_ranks = base_new(2 * P, sizeof(int64_t)),
                               .recv_ranks = base_new(2 * P, sizeof(int64_t)),
                               .done = base_new(parts, sizeof(unsigned)),
                               .live_slots = base_new(P, sizeof(int)),
                               .clocks = base_new(P, sizeof(double)),
                               .busy = base_new(P, sizeof(double)),
                               .at = base_new(P, sizeof(int64_t))};
    for (int sort = 0; sort < 4; sort++) sim.owners[sort] = base_new(P, sizeof(int *));
    for (size_t s = 0; s < P; s++) {
        const int sizes[] = {lists[s].slots, lists[s].inputs, lists[s].gradients, lists[s].stashes};
        for (int sort = 0; sort < 4; sort++) sim.owners[sort][s] = base_new((size_t)sizes[sort], sizeof(int));
        run->start[s] = base_new((size_t)lists[s].count, sizeof(double));
        run->end[s] = base_new((size_t)lists[s].count, sizeof(double));
    }
    const bool good = schedule_steps_(&sim, error);
    double busy = 0;
    for (size_t s = 0; s < P; s++) {
        run->time = fmax(run->time, sim.clocks[s]);
        busy += sim.busy[s];
        for (int sort = 0; sort < 4; sort++) free(sim.owners[sort][s]);
    }
    run->bubble = run->time > 0 ? 1 - busy / (run->time * (double)P) : 0;
    for (int sort = 0; sort < 4; sort++) free(sim.owners[sort]);
    free(sim.messages);
    free(sim.sent_ranks);
    free(sim.recv_ranks);
    free(sim.done);
    free(sim.live_slots);
    free(sim.clocks);
    free(sim.busy);
    free(sim.at);
    if (!good) schedule_run_free(run);
    return good;
}

#endif
