// schedule.h: pipeline schedules as data. For one stage of a pipeline: the list of what it computes, sends, receives and waits for, in order, and
// which buffer each action uses. Pure: no devices, no messages, no clock. schedule_simulate.h runs the lists of all stages on paper.
//
// A pipeline of P stages works through M micro-batches; each stage holds V chunks of layers. Chunk c of stage s is virtual stage c*P + s, the place
// of its layers in the model; virtual stage 0 has the embedding, V*P-1 the head and the loss.
//
// The kinds. Bubble: share of idle time when all stages take the same F (forward), B (gradient of the input) and W (of the weights) and messages
// take none; a backward that is not split takes B+W. Slots: micro-batches (times chunks) of a stage whose activations exist at once.
//   gpipe        all forwards, then all backwards (Huang et al. 2019). Bubble (P-1)/(M+P-1). Slots M.
//   1f1b         P-1-s forwards, then forward and backward in turn (Narayanan et al. 2019). Same bubble. Slots min(M, P-s).
//   interleaved  1f1b over V chunks (Narayanan et al. 2021, "Megatron-LM"): a group of G = P micro-batches goes through a chunk before the next
//                chunk's turn. Bubble (P-1)/(V*M+P-1), at the price of V times the messages. Slots min(M*V, 2*(P-1-s) + (V-1)*G + 1), each of a
//                V-th of the layers. Where P does not divide M the largest group has G = ceil(M / floor(M/P)), and the idle time is up to half as
//                much again; M < P is one group of G = M. Never more idle time than 1f1b, which it is for V = 1.
//   zb           ZB-H1 (Qi et al. 2023, "Zero bubble pipeline parallelism"): 1f1b in which only B stands between the stages; stage s does each W s
//                backwards later, into what was idle at the end. Time M*(F+B+W) + (P-1)*(F+B-W) for M > P and W not above F or B: with F = B = W
//                a third of 1f1b's idle time. Slots min(M, P) on every stage: the bound of 1f1b's first stage, reached by all, since activations
//                live until W. Each delayed W also keeps the gradients of its layers' outputs: a stash, min(M, s+1) of them.
// Every kind adds a weight's gradients in the order of micro-batches: the sums have the same bits whatever the kind.
//
// Messages. SEND_* and RECV_* post and return at once (MPI_Issend, MPI_Irecv; on a GPU: enqueue); only WAIT_* waits, for exactly one posted
// message. No order of completion is assumed and nothing is buffered: a message needs both sides posted. Receives are posted one computation ahead,
// so that they overlap it. The output of a chunk is sent out of its activation slot; that send is over long before its WAIT_SEND_FORWARD in front
// of the backward, which frees the slot. A gradient's send is waited for when the next one is due, and at the end. From one stage to another,
// messages of one direction (forward: activations; backward: gradients) are posted in the same order on both sides, so that a tag or communicator
// per direction is enough. But a send must not queue behind a receive: with NCCL, that is a communicator (and stream) per boundary and direction.
#ifndef LLMC_SCHEDULE_H
#define LLMC_SCHEDULE_H

#include "llmc/base.h" // Error, fail, base_new, min_i64

typedef enum { SCHEDULE_GPIPE, SCHEDULE_1F1B, SCHEDULE_INTERLEAVED, SCHEDULE_ZB, SCHEDULE_KINDS } ScheduleKind;
static const char *const schedule_kind_names[SCHEDULE_KINDS] = {"gpipe", "1f1b", "interleaved", "zb"};

typedef struct {
    ScheduleKind kind;
    int stages;       // P
    int microbatches; // M
    int chunks;       // V; 1 unless interleaved
} ScheduleShape;

typedef enum {
    ACTION_RECV_FORWARD,       // post: from peer into `input`
    ACTION_WAIT_RECV_FORWARD,  // `input` holds the chunk's input
    ACTION_FORWARD,            // input (or tokens) -> slot
    ACTION_SEND_FORWARD,       // post: the output in `slot` to peer
    ACTION_WAIT_SEND_FORWARD,  // `slot` may be overwritten
    ACTION_RECV_BACKWARD,      // post: from peer into `gradient`
    ACTION_WAIT_RECV_BACKWARD, // `gradient` holds the gradient of the chunk's output
    ACTION_BACKWARD,           // slot, input, gradient -> weight gradients (+=); gradient = that of the input, in place
    ACTION_BACKWARD_INPUT,     // slot, input, gradient -> stash (=); gradient = that of the input, in place
    ACTION_BACKWARD_WEIGHT,    // slot, input, stash -> weight gradients (+=)
    ACTION_SEND_BACKWARD,      // post: `gradient` to peer
    ACTION_WAIT_SEND_BACKWARD, // `gradient` may be overwritten
    ACTION_KINDS
} ActionKind;
static const char *const action_kind_names[ACTION_KINDS] = {
    "recv-forward",       "wait-recv-forward", "forward",        "send-forward",    "wait-send-forward", "recv-backward",
    "wait-recv-backward", "backward",          "backward-input", "backward-weight", "send-backward",     "wait-send-backward",
};

// Indices of buffers are -1 where the action does not use one.
typedef struct {
    ActionKind kind;
    int microbatch, chunk;
    int slot;     // activations of a chunk for a micro-batch, from FORWARD to the last backward
    int input;    // (N, C) a received input, until the last backward; -1 on virtual stage 0
    int gradient; // (N, C) of the output, then of the input
    int stash;    // gradients of the layers' outputs, from BACKWARD_INPUT to BACKWARD_WEIGHT
    int peer;     // the other stage of a message; -1 for computations
} Action;

typedef struct {
    ScheduleShape shape;
    int stage;
    int64_t count;
    Action *actions;                       // (count)
    int slots, inputs, gradients, stashes; // how many of each buffer the list uses
} Schedule;

static inline bool schedule_check(const ScheduleShape *shape, Error *error) {
    const bool interleaved = shape->kind == SCHEDULE_INTERLEAVED;
    if ((int)shape->kind < 0 || shape->kind >= SCHEDULE_KINDS) return fail(error, CODE_USAGE, "--pp-schedule: no schedule %d", (int)shape->kind);
    if (shape->stages < 1 || shape->stages > 1 << 16) return fail(error, CODE_USAGE, "--pp: got %d stages, wanted 1 to 65536", shape->stages);
    if (shape->microbatches < 1) return fail(error, CODE_USAGE, "--global-batch: got %d micro-batches, wanted at least 1", shape->microbatches);
    if (shape->chunks < 1) return fail(error, CODE_USAGE, "--virtual-stages: got %d, wanted at least 1", shape->chunks);
    if (shape->chunks > 1 && !interleaved) {
        return fail(error, CODE_USAGE,
                    "--virtual-stages: got %d, but --pp-schedule %s has one chunk a stage (wanted 1, or --pp-schedule interleaved)", shape->chunks,
                    schedule_kind_names[shape->kind]);
    }
    if (shape->chunks > 1 && shape->stages == 1) {
        return fail(error, CODE_USAGE, "--virtual-stages: got %d with one pipeline stage (wanted 1, or --pp above 1)", shape->chunks);
    }
    if ((int64_t)shape->microbatches * shape->chunks > 1 << 24) {
        return fail(error, CODE_USAGE, "--global-batch: %d micro-batches of %d chunks are more than a schedule's 2^24 (larger --micro-batch)",
                    shape->microbatches, shape->chunks);
    }
    return true;
}

// Interleaved: M micro-batches go in max(1, M/P) groups of P or slightly more (of M, if that is less); the larger ones first. A group of fewer than
// P behind another would deadlock: its stages wait for one another's next chunk.
static inline int schedule_groups_(const ScheduleShape *shape) {
    return shape->microbatches < shape->stages ? 1 : shape->microbatches / shape->stages;
}

// Forwards of a stage before its first backward.
static inline int schedule_warmup_(const ScheduleShape *shape, int stage) {
    const int64_t M = shape->microbatches, V = shape->chunks, below = shape->stages - 1 - stage;
    if (shape->kind == SCHEDULE_GPIPE) return (int)M;
    if (V == 1) return (int)min_i64(below, M);
    // 2*below and not below: the first backward has to come back through the stages below while their forwards go on.
    return (int)min_i64(2 * below + (V - 1) * ceil_div(M, schedule_groups_(shape)), M * V);
}

// Activation slots of a stage: exactly what its list uses.
static inline int schedule_slots(const ScheduleShape *shape, int stage) {
    if (shape->kind == SCHEDULE_ZB) return (int)min_i64(shape->stages, shape->microbatches);
    return (int)min_i64((int64_t)schedule_warmup_(shape, stage) + 1, (int64_t)shape->microbatches * shape->chunks);
}

// The k-th forward (or backward) of every stage: group by group, in a group chunk by chunk, backward from the last chunk.
static inline Action schedule_nth_(const ScheduleShape *shape, int k, ActionKind kind) {
    const int V = shape->chunks, groups = schedule_groups_(shape), small = shape->microbatches / groups;
    const int large_count = shape->microbatches % groups, in_large = large_count * (small + 1); // groups, micro-batches
    const bool large = k < in_large * V;
    const int size = large ? small + 1 : small, start = large ? 0 : in_large;
    const int first = start + (k - start * V) / (size * V) * size, within = k - first * V, turn = within / size;
    return (Action){kind, first + within % size, kind == ACTION_FORWARD ? turn : V - 1 - turn, -1, -1, -1, -1, -1};
}

// The computations of a stage, in order. Returns how many.
static inline int64_t schedule_order_(const ScheduleShape *shape, int stage, Action *order) {
    const int total = shape->microbatches * shape->chunks, warmup = schedule_warmup_(shape, stage);
    const bool split = shape->kind == SCHEDULE_ZB;
    int64_t count = 0;
    for (int k = 0; k < warmup; k++) order[count++] = schedule_nth_(shape, k, ACTION_FORWARD);
    for (int k = 0; k < total; k++) {
        if (k + warmup < total) order[count++] = schedule_nth_(shape, k + warmup, ACTION_FORWARD);
        order[count++] = schedule_nth_(shape, k, split ? ACTION_BACKWARD_INPUT : ACTION_BACKWARD);
        if (split && k >= stage) order[count++] = schedule_nth_(shape, k - stage, ACTION_BACKWARD_WEIGHT);
    }
    for (int k = total > stage ? total - stage : 0; split && k < total; k++) order[count++] = schedule_nth_(shape, k, ACTION_BACKWARD_WEIGHT);
    return count;
}

// A pool of buffers of one sort; the lowest free index is taken, so that the pool is never larger than what is in use at once.
typedef struct {
    bool *taken;
    int size; // indices ever taken
    int free; // none below this one is
} SchedulePool_;
static inline int schedule_take_(SchedulePool_ *pool) {
    while (pool->free < pool->size && pool->taken[pool->free]) pool->free++;
    if (pool->free == pool->size) pool->size++;
    pool->taken[pool->free] = true;
    return pool->free;
}
static inline void schedule_release_(SchedulePool_ *pool, int index) {
    if (index < 0) return;
    pool->taken[index] = false;
    if (index < pool->free) pool->free = index;
}

// A list under construction.
typedef struct {
    Schedule *schedule;
    Action *parts; // (M, V) the buffers of a micro-batch in a chunk
    SchedulePool_ slots, inputs, gradients, stashes;
} ScheduleBuild_;

static inline Action *schedule_part_(ScheduleBuild_ *build, const Action *a) {
    return &build->parts[(int64_t)a->microbatch * build->schedule->shape.chunks + a->chunk];
}
// Appends an action of a micro-batch and chunk with those of its buffers that the kind uses.
static inline void schedule_append_(ScheduleBuild_ *build, ActionKind kind, const Action *part) {
    Schedule *s = build->schedule;
    const int P = s->shape.stages;
    const bool upward =
        kind == ACTION_RECV_FORWARD || kind == ACTION_WAIT_RECV_FORWARD || kind == ACTION_SEND_BACKWARD || kind == ACTION_WAIT_SEND_BACKWARD;
    const bool downward =
        kind == ACTION_SEND_FORWARD || kind == ACTION_WAIT_SEND_FORWARD || kind == ACTION_RECV_BACKWARD || kind == ACTION_WAIT_RECV_BACKWARD;
    const bool forward = kind <= ACTION_WAIT_SEND_FORWARD, compute = !upward && !downward;
    Action a = {kind, part->microbatch, part->chunk, -1, -1, -1, -1, -1};
    if (compute || (forward && downward)) a.slot = part->slot;
    if (compute || (forward && upward)) a.input = part->input;
    if (!forward && kind != ACTION_BACKWARD_WEIGHT) a.gradient = part->gradient;
    if (kind == ACTION_BACKWARD_INPUT || kind == ACTION_BACKWARD_WEIGHT) a.stash = part->stash;
    if (upward) a.peer = (s->stage + P - 1) % P;
    if (downward) a.peer = (s->stage + 1) % P;
    s->actions[s->count++] = a;
}

static inline bool schedule_is_first_(const Schedule *s, const Action *a) { return s->stage == 0 && a->chunk == 0; }
static inline bool schedule_is_last_(const Schedule *s, const Action *a) {
    return s->stage == s->shape.stages - 1 && a->chunk == s->shape.chunks - 1;
}

// Posts the receive that a computation needs, if it needs one.
static inline void schedule_post_receive_(ScheduleBuild_ *build, const Action *a) {
    Action *part = schedule_part_(build, a);
    if (a->kind == ACTION_FORWARD && !schedule_is_first_(build->schedule, a)) {
        part->input = schedule_take_(&build->inputs);
        schedule_append_(build, ACTION_RECV_FORWARD, part);
    } else if (a->kind != ACTION_FORWARD && a->kind != ACTION_BACKWARD_WEIGHT && !schedule_is_last_(build->schedule, a)) {
        part->gradient = schedule_take_(&build->gradients);
        schedule_append_(build, ACTION_RECV_BACKWARD, part);
    }
}

static inline void schedule_wait_send_(ScheduleBuild_ *build, const Action *sent) {
    if (sent == NULL) return;
    schedule_append_(build, ACTION_WAIT_SEND_BACKWARD, sent);
    schedule_release_(&build->gradients, sent->gradient);
}

static inline void schedule_fill_(ScheduleBuild_ *build, const Action *order, int64_t count) {
    const Schedule *s = build->schedule;
    const Action *sent = NULL; // whose gradient is on its way
    schedule_post_receive_(build, &order[0]);
    for (int64_t i = 0; i < count; i++) {
        const Action *a = &order[i];
        Action *part = schedule_part_(build, a);
        const bool first = schedule_is_first_(s, a), last = schedule_is_last_(s, a), weight = a->kind == ACTION_BACKWARD_WEIGHT;
        const bool forward = a->kind == ACTION_FORWARD;
        if (forward && !first) schedule_append_(build, ACTION_WAIT_RECV_FORWARD, part);
        if (!forward && !weight && !last) {
            schedule_append_(build, ACTION_WAIT_RECV_BACKWARD, part);
            schedule_append_(build, ACTION_WAIT_SEND_FORWARD, part);
        }
        int64_t next = i + 1;
        while (next < count && order[next].kind == ACTION_BACKWARD_WEIGHT) next++;
        if (!weight && next < count) schedule_post_receive_(build, &order[next]);
        if (forward) part->slot = schedule_take_(&build->slots);
        if (!forward && !weight && last) part->gradient = schedule_take_(&build->gradients);
        if (a->kind == ACTION_BACKWARD_INPUT) part->stash = schedule_take_(&build->stashes);
        schedule_append_(build, a->kind, part);
        if (a->kind == ACTION_BACKWARD || weight) {
            schedule_release_(&build->slots, part->slot);
            schedule_release_(&build->inputs, part->input);
            schedule_release_(&build->stashes, part->stash);
        }
        if (forward && !last) schedule_append_(build, ACTION_SEND_FORWARD, part);
        if (!forward && !weight && first) schedule_release_(&build->gradients, part->gradient);
        if (!forward && !weight && !first) {
            schedule_wait_send_(build, sent);
            schedule_append_(build, ACTION_SEND_BACKWARD, part);
            sent = part;
        }
    }
    schedule_wait_send_(build, sent);
}

// The list of a stage; false with an error when the shape is refused. To be given to schedule_free().
static inline bool schedule_build(Schedule *schedule, const ScheduleShape *shape, int stage, Error *error) {
    *schedule = (Schedule){.shape = *shape, .stage = stage};
    if (!schedule_check(shape, error)) return false;
    if (stage < 0 || stage >= shape->stages) return fail(error, CODE_USAGE, "--pp: no stage %d of %d", stage, shape->stages);
    const size_t parts = (size_t)shape->microbatches * (size_t)shape->chunks;
    Action *order = base_new(3 * parts, sizeof *order);
    const int64_t count = schedule_order_(shape, stage, order);
    schedule->actions = base_new(11 * parts, sizeof *schedule->actions); // 3 computations and 4 messages with a post and a wait each
    ScheduleBuild_ build = {.schedule = schedule, .parts = base_new(parts, sizeof(Action))};
    SchedulePool_ *pools[] = {&build.slots, &build.inputs, &build.gradients, &build.stashes};
    for (int i = 0; i < 4; i++) pools[i]->taken = base_new(parts, sizeof(bool));
    for (size_t i = 0; i < parts; i++) {
        build.parts[i] = (Action){ACTION_FORWARD, (int)(i / (size_t)shape->chunks), (int)(i % (size_t)shape->chunks), -1, -1, -1, -1, -1};
    }
    schedule_fill_(&build, order, count);
    schedule->slots = build.slots.size, schedule->inputs = build.inputs.size;
    schedule->gradients = build.gradients.size, schedule->stashes = build.stashes.size;
    for (int i = 0; i < 4; i++) free(pools[i]->taken);
    free(build.parts);
    free(order);
    return true;
}

static inline void schedule_free(Schedule *schedule) {
    free(schedule->actions);
    *schedule = (Schedule){0};
}

#endif
