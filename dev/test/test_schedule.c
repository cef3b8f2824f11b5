// Pipeline schedules: every list of every small shape is complete, deadlock-free when nothing is buffered, keeps to its buffers and reaches the
// bubble and the memory its kind promises; the simulator finds lists that are wrong.
#include "dev/test/test.h"          // check, check_error, test_end
#include "llmc/schedule.h"          // schedule_build
#include "llmc/schedule_simulate.h" // schedule_simulate

enum { STAGES = 8, MICROBATCHES = 24, CHUNKS = 4 };

static const ScheduleTimes unit_times = {1, 1, 1, 0};

static void free_all_(Schedule *lists, int stages) {
    for (int s = 0; s < stages; s++) schedule_free(&lists[s]);
}

static bool build_all_(Schedule *lists, const ScheduleShape *shape, Error *error) {
    for (int s = 0; s < shape->stages; s++) {
        if (!schedule_build(&lists[s], shape, s, error)) return false;
    }
    return true;
}

// Every micro-batch and chunk is computed exactly once, and a chunk's weight gradients are added in the order of micro-batches. Counted here
// without the simulator.
static bool complete_(const Schedule *s) {
    const int M = s->shape.microbatches, V = s->shape.chunks;
    int counts[ACTION_KINDS][MICROBATCHES * CHUNKS] = {{0}}, last[CHUNKS] = {-1, -1, -1, -1};
    for (int64_t i = 0; i < s->count; i++) {
        const Action *a = &s->actions[i];
        counts[a->kind][a->microbatch * V + a->chunk]++;
        if (a->kind != ACTION_BACKWARD && a->kind != ACTION_BACKWARD_WEIGHT) continue;
        if (a->microbatch != last[a->chunk] + 1) return false;
        last[a->chunk] = a->microbatch;
    }
    const bool split = s->shape.kind == SCHEDULE_ZB;
    for (int part = 0; part < M * V; part++) {
        const int v = part % V * s->shape.stages + s->stage;
        const int first = v == 0, final = v == s->shape.stages * V - 1;
        for (int kind = 0; kind < ACTION_KINDS; kind++) {
            int wanted = 1;
            if (kind == ACTION_BACKWARD) wanted = !split;
            if (kind == ACTION_BACKWARD_INPUT || kind == ACTION_BACKWARD_WEIGHT) wanted = split;
            if (kind == ACTION_RECV_FORWARD || kind == ACTION_WAIT_RECV_FORWARD) wanted = !first;
            if (kind == ACTION_SEND_BACKWARD || kind == ACTION_WAIT_SEND_BACKWARD) wanted = !first;
            if (kind == ACTION_RECV_BACKWARD || kind == ACTION_WAIT_RECV_BACKWARD) wanted = !final;
            if (kind == ACTION_SEND_FORWARD || kind == ACTION_WAIT_SEND_FORWARD) wanted = !final;
            if (counts[kind][part] != wanted) return false;
        }
    }
    return true;
}

// Slots of a stage, written out anew.
static int slots_bound_(const ScheduleShape *shape, int stage) {
    const int P = shape->stages, M = shape->microbatches, V = shape->chunks, groups = M < P ? 1 : M / P, group = M / groups + (M % groups != 0);
    switch (shape->kind) {
    case SCHEDULE_GPIPE: return M;
    case SCHEDULE_ZB: return M < P ? M : P;
    case SCHEDULE_1F1B: return M < P - stage ? M : P - stage;
    default: break;
    }
    const int bound = V == 1 ? P - stage : 2 * (P - 1 - stage) + (V - 1) * group + 1;
    return bound < M * V ? bound : M * V;
}

static double bubble_formula_(const ScheduleShape *shape) {
    const double P = shape->stages, M = shape->microbatches, V = shape->chunks;
    if (shape->kind == SCHEDULE_ZB) return (P - 1) / (3 * M + P - 1); // F = B = W
    return (P - 1) / (V * M + P - 1);
}

// Worst |bubble - formula| where the formula holds; largest idle time over 1f1b's (zb), over the ideal one where P does not divide M (interleaved).
typedef struct {
    double worst, third, excess;
    int shapes;
} Seen;

static void test_shape_(const ScheduleShape *shape, Seen *seen) {
    Schedule lists[STAGES] = {0};
    Error error = {0};
    const char *name = schedule_kind_names[shape->kind];
    const int P = shape->stages, M = shape->microbatches, V = shape->chunks;
    if (!build_all_(lists, shape, &error)) {
        check(false, "%s P %d M %d V %d: %s", name, P, M, V, error.text);
        return;
    }
    for (int s = 0; s < P; s++) {
        const Schedule *list = &lists[s];
        const int split = shape->kind == SCHEDULE_ZB;
        check(complete_(list), "%s P %d M %d V %d stage %d: incomplete, or weight gradients out of order", name, P, M, V, s);
        check(list->slots == schedule_slots(shape, s) && list->slots == slots_bound_(shape, s),
              "%s P %d M %d V %d stage %d: %d slots, told %d, bound %d", name, P, M, V, s, list->slots, schedule_slots(shape, s),
              slots_bound_(shape, s));
        check(list->stashes == (split ? (M < s + 1 ? M : s + 1) : 0), "%s P %d M %d stage %d: %d stashes", name, P, M, s, list->stashes);
        check(list->inputs <= list->slots + 1 && list->gradients <= 3 && list->gradients >= 1,
              "%s P %d M %d V %d stage %d: %d inputs, %d gradients", name, P, M, V, s, list->inputs, list->gradients);
    }
    // the times of messages change nothing in whether the lists fit together
    for (int round = 0; round < 2; round++) {
        const ScheduleTimes times = {1, 1, 1, round == 0 ? 0 : 0.25};
        ScheduleRun run;
        error = (Error){0};
        const bool good = schedule_simulate(lists, times, &run, &error);
        check(good, "%s P %d M %d V %d: %s", name, P, M, V, error.text);
        if (!good) break;
        for (int s = 0; s < P; s++)
            check(run.peak_slots[s] == lists[s].slots, "%s P %d M %d V %d stage %d: peak %d", name, P, M, V, s, run.peak_slots[s]);
        const bool exact = (shape->kind != SCHEDULE_INTERLEAVED || V == 1 || M % P == 0) && (shape->kind != SCHEDULE_ZB || M > P);
        const double difference = fabs(run.bubble - bubble_formula_(shape));
        if (round == 0 && exact && !(difference <= seen->worst)) seen->worst = difference; // NaN too
        if (round == 0 && shape->kind == SCHEDULE_INTERLEAVED && P > 1) {
            check(run.time <= 3 * (M + P - 1) + 1e-9, "interleaved P %d M %d V %d: time %g, more than 1f1b", P, M, V, run.time);
            if (M >= P) seen->excess = fmax(seen->excess, (run.time - 3 * M) / (3.0 * (P - 1) / V));
        }
        if (round == 0 && !exact) check(run.bubble >= bubble_formula_(shape) - 1e-12, "%s P %d M %d V %d: bubble %g", name, P, M, V, run.bubble);
        if (round == 0 && shape->kind == SCHEDULE_ZB && P > 1) {
            const double idle = run.time - 3 * M, idle_1f1b = 3 * (P - 1);
            check(idle <= idle_1f1b, "zb P %d M %d: idle %g, 1f1b %g", P, M, idle, idle_1f1b);
            if (M > P) seen->third = fmax(seen->third, idle / idle_1f1b);
        }
        schedule_run_free(&run);
    }
    seen->shapes++;
    free_all_(lists, P);
}

static void test_kinds(void) {
    for (int kind = 0; kind < SCHEDULE_KINDS; kind++) {
        Seen seen = {0};
        for (int P = 1; P <= STAGES; P++) {
            for (int M = 1; M <= MICROBATCHES; M++) {
                for (int V = 1; V <= (kind == SCHEDULE_INTERLEAVED && P > 1 ? CHUNKS : 1); V++) {
                    test_shape_(&(ScheduleShape){(ScheduleKind)kind, P, M, V}, &seen);
                }
            }
        }
        char what[128];
        snprintf(what, sizeof what, "%s: bubble against formula, %d shapes", schedule_kind_names[kind], seen.shapes);
        check_error(seen.worst, 1e-12, what);
        if (kind == SCHEDULE_INTERLEAVED) check_error(seen.excess, 1.5, "interleaved: idle time over the formula's, any M >= P");
        if (kind == SCHEDULE_ZB) check_error(seen.third, 1.0 / 3 + 1e-12, "zb: idle time over that of 1f1b, M > P");
    }
}

// Unequal times: the formulas in F, B, W.
static void test_times(void) {
    double worst = 0;
    for (int P = 1; P <= STAGES; P++) {
        for (int M = 1; M <= MICROBATCHES; M++) {
            const ScheduleTimes t = {1, 1.25, 0.75, 0};
            const double work = M * (t.forward + t.backward_input + t.backward_weight);
            for (int kind = 0; kind < SCHEDULE_KINDS; kind++) {
                Schedule lists[STAGES] = {0};
                Error error = {0};
                ScheduleRun run = {0};
                const ScheduleShape shape = {(ScheduleKind)kind, P, M, 1};
                const bool good = build_all_(lists, &shape, &error) && schedule_simulate(lists, t, &run, &error);
                check(good, "%s P %d M %d: %s", schedule_kind_names[kind], P, M, error.text);
                const double idle = kind == SCHEDULE_ZB ? (P - 1) * (t.forward + t.backward_input - t.backward_weight)
                                                        : (P - 1) * (t.forward + t.backward_input + t.backward_weight);
                if (kind != SCHEDULE_ZB || M > P) worst = fmax(worst, fabs(run.time - work - idle));
                schedule_run_free(&run);
                free_all_(lists, P);
            }
        }
    }
    check_error(worst, 1e-9, "time of a step, F 1, B 1.25, W 0.75");
}

// Messages that take as long as half a forward: with receives posted ahead they cost something only where a stage waits for them anyway.
static void test_messages(void) {
    Schedule lists[STAGES] = {0};
    Error error = {0};
    ScheduleRun run = {0};
    const ScheduleShape shape = {SCHEDULE_GPIPE, 4, 24, 1};
    const bool good = build_all_(lists, &shape, &error) && schedule_simulate(lists, (ScheduleTimes){1, 1, 1, 0.5}, &run, &error);
    check(good, "gpipe: %s", error.text);
    // 3 messages down, 3 up: the other 23 micro-batches' are hidden
    check_error(fabs(run.time - (3 * (24 + 3) + 6 * 0.5)), 1e-9, "gpipe: only the first and last messages are visible");
    schedule_run_free(&run);
    free_all_(lists, shape.stages);
}

static void test_large(void) {
    const ScheduleShape shapes[] = {
        {SCHEDULE_1F1B, 64, 512, 1}, {SCHEDULE_ZB, 64, 130, 1}, {SCHEDULE_INTERLEAVED, 16, 131, 5}, {SCHEDULE_INTERLEAVED, 33, 7, 8}};
    for (size_t i = 0; i < sizeof shapes / sizeof shapes[0]; i++) {
        Schedule lists[64] = {0};
        Error error = {0};
        ScheduleRun run = {0};
        const bool good = build_all_(lists, &shapes[i], &error) && schedule_simulate(lists, unit_times, &run, &error);
        check(good, "%s P %d M %d: %s", schedule_kind_names[shapes[i].kind], shapes[i].stages, shapes[i].microbatches, error.text);
        for (int s = 0; good && s < shapes[i].stages; s++) check(run.peak_slots[s] == schedule_slots(&shapes[i], s), "slots of stage %d", s);
        schedule_run_free(&run);
        free_all_(lists, shapes[i].stages);
    }
    printf("4 large shapes\n");
}

static void test_refused(void) {
    const struct {
        ScheduleShape shape;
        int stage;
        const char *flag;
    } cases[] = {
        {{SCHEDULE_KINDS, 2, 4, 1}, 0, "--pp-schedule:"},
        {{SCHEDULE_1F1B, 0, 4, 1}, 0, "--pp:"},
        {{SCHEDULE_1F1B, 2, 0, 1}, 0, "--global-batch:"},
        {{SCHEDULE_INTERLEAVED, 2, 4, 0}, 0, "--virtual-stages:"},
        {{SCHEDULE_1F1B, 2, 4, 2}, 0, "--virtual-stages:"},
        {{SCHEDULE_GPIPE, 2, 4, 3}, 0, "--virtual-stages:"},
        {{SCHEDULE_ZB, 2, 4, 2}, 0, "--virtual-stages:"},
        {{SCHEDULE_INTERLEAVED, 1, 4, 2}, 0, "--virtual-stages:"},
        {{SCHEDULE_1F1B, 2, 4, 1}, 2, "--pp:"},
        {{SCHEDULE_1F1B, 2, 4, 1}, -1, "--pp:"},
        {{SCHEDULE_1F1B, 2, 2147483647, 1}, 0, "--global-batch:"},
        {{SCHEDULE_INTERLEAVED, 2, 1 << 20, 2147483647}, 0, "--global-batch:"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Schedule list;
        Error error = {0};
        const bool good = schedule_build(&list, &cases[i].shape, cases[i].stage, &error);
        check(!good && error.code == CODE_USAGE && strncmp(error.text, cases[i].flag, strlen(cases[i].flag)) == 0, "case %zu: '%s', wanted %s", i,
              error.text, cases[i].flag);
        schedule_free(&list);
    }
    printf("%zu impossible shapes refused\n", sizeof cases / sizeof cases[0]);
}

// ----------------------------------------------------------------------------
// Broken lists: each must be refused with its own words.

static int64_t find_(const Schedule *s, ActionKind kind, int microbatch, int chunk) {
    for (int64_t i = 0; i < s->count; i++) {
        if (s->actions[i].kind == kind && s->actions[i].microbatch == microbatch && s->actions[i].chunk == chunk) return i;
    }
    return -1;
}
// Moves action `from` to place `to`.
static void move_(Schedule *s, int64_t from, int64_t to) {
    const Action a = s->actions[from];
    for (int64_t i = from; i < to; i++) s->actions[i] = s->actions[i + 1];
    for (int64_t i = from; i > to; i--) s->actions[i] = s->actions[i - 1];
    s->actions[to] = a;
}
static void drop_(Schedule *s, int64_t at) { move_(s, at, --s->count); }

static void break_(Schedule *l, int fault) {
    Action *a = l[1].actions;
    switch (fault) {
    case 0: move_(&l[1], find_(&l[1], ACTION_BACKWARD, 0, 0), find_(&l[1], ACTION_FORWARD, 0, 0)); break;
    case 1: drop_(&l[1], find_(&l[1], ACTION_FORWARD, 3, 0)); break;
    case 2: a[find_(&l[1], ACTION_FORWARD, 1, 0)].slot = a[find_(&l[1], ACTION_FORWARD, 0, 0)].slot; break;
    case 3: a[find_(&l[1], ACTION_FORWARD, 1, 0)].slot = l[1].slots; break;
    case 4: a[find_(&l[1], ACTION_SEND_FORWARD, 1, 0)].peer = 0; break;
    case 5: // both sides exist, each only after the other's
        move_(&l[1], find_(&l[1], ACTION_SEND_FORWARD, 0, 0), find_(&l[1], ACTION_SEND_BACKWARD, 0, 0));
        move_(&l[1], find_(&l[1], ACTION_WAIT_SEND_FORWARD, 0, 0), find_(&l[1], ACTION_SEND_BACKWARD, 0, 0));
        move_(&l[1], find_(&l[1], ACTION_WAIT_RECV_BACKWARD, 0, 0), find_(&l[1], ACTION_WAIT_SEND_FORWARD, 0, 0) - 2);
        break;
    case 6: drop_(&l[1], l[1].count - 1); break;                          // the last send is never waited for
    case 7: a[find_(&l[1], ACTION_FORWARD, 1, 0)].microbatch = 0; break;  // twice
    case 8: a[find_(&l[1], ACTION_FORWARD, 1, 0)].microbatch = 99; break; // nowhere
    case 9: move_(&l[1], find_(&l[1], ACTION_SEND_FORWARD, 0, 0), find_(&l[1], ACTION_SEND_FORWARD, 1, 0)); break; // overtaken
    case 10: a[find_(&l[1], ACTION_FORWARD, 0, 0)].kind = ACTION_BACKWARD_INPUT; break;
    case 11: a[find_(&l[1], ACTION_RECV_FORWARD, 1, 0)].input = a[find_(&l[1], ACTION_RECV_FORWARD, 0, 0)].input; break;
    case 12: drop_(&l[0], find_(&l[0], ACTION_RECV_BACKWARD, 7, 0)); break; // a message without a receiver
    case 13: a[find_(&l[1], ACTION_BACKWARD, 1, 0)].gradient = a[find_(&l[1], ACTION_BACKWARD, 0, 0)].gradient; break;
    default: break;
    }
}

static void test_broken(void) {
    static const char *const words[] = {"comes before",       "comes before", "in use",    "slot 3 of 3", "with stage 0", "comes before",
                                        "wait-send-backward", "comes twice",  "no action", "is message",  "no place",     "in use",
                                        "comes before",       "gradient"};
    const int faults = (int)(sizeof words / sizeof words[0]);
    for (int fault = -1; fault < faults; fault++) {
        Schedule lists[4] = {0};
        Error error = {0};
        ScheduleRun run = {0};
        const ScheduleShape shape = {SCHEDULE_1F1B, 4, 8, 1};
        check(build_all_(lists, &shape, &error), "%s", error.text);
        break_(lists, fault);
        const bool good = schedule_simulate(lists, unit_times, &run, &error);
        if (fault < 0)
            check(good, "intact: %s", error.text);
        else
            check(!good && error.code == CODE_COMM && strstr(error.text, words[fault]) != NULL, "fault %d: '%s', wanted '%s'", fault, error.text,
                  words[fault]);
        schedule_run_free(&run);
        free_all_(lists, shape.stages);
    }

    // Two stages that wait for each other: stage 1 does not take micro-batch 1 before micro-batch 0 is done, stage 0 does not take the gradient of
    // micro-batch 0 before its second send is over. With buffered sends this would work.
    Schedule lists[2] = {0};
    Error error = {0};
    ScheduleRun run = {0};
    const ScheduleShape shape = {SCHEDULE_1F1B, 2, 2, 1};
    check(build_all_(lists, &shape, &error), "%s", error.text);
    move_(&lists[1], find_(&lists[1], ACTION_RECV_FORWARD, 1, 0), find_(&lists[1], ACTION_WAIT_RECV_FORWARD, 1, 0) - 1);
    move_(&lists[1], find_(&lists[1], ACTION_WAIT_SEND_BACKWARD, 0, 0), find_(&lists[1], ACTION_RECV_FORWARD, 1, 0));
    move_(&lists[0], find_(&lists[0], ACTION_WAIT_SEND_FORWARD, 1, 0), find_(&lists[0], ACTION_SEND_FORWARD, 1, 0) + 1);
    move_(&lists[0], find_(&lists[0], ACTION_RECV_BACKWARD, 0, 0), find_(&lists[0], ACTION_WAIT_SEND_FORWARD, 1, 0));
    const bool good = schedule_simulate(lists, unit_times, &run, &error);
    check(!good && strstr(error.text, "deadlock: stage 0") != NULL, "two stages that wait for each other: '%s'", error.text);
    schedule_run_free(&run);
    free_all_(lists, 2);
    printf("%d broken lists found\n", faults + 1);
}

int main(void) {
    test_kinds();
    test_times();
    test_messages();
    test_large();
    test_refused();
    test_broken();
    return test_end();
}
