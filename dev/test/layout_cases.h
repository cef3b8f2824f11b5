// layout_cases.h: which layouts are tested. A case is a value on every axis (model, batch, mesh, ZeRO stage, ...); layout_create and
// schedule_check say which are legal. A covering list holds a legal case for every pair of values that occurs in one, and for every
// triple of some axes. All is computed and deterministic. Runs nothing.
#ifndef DEV_TEST_LAYOUT_CASES_H
#define DEV_TEST_LAYOUT_CASES_H

#include "llmc/layout.h"   // layout_create
#include "llmc/model.h"    // ModelConfig
#include "llmc/options.h"  // Options
#include "llmc/schedule.h" // schedule_check

typedef enum {
    AXIS_MESH, // these eight decide what is legal
    AXIS_MODEL,
    AXIS_SP,
    AXIS_ZERO,
    AXIS_SCHEDULE,
    AXIS_MICROS,
    AXIS_GROUP,
    AXIS_BUCKET,
    AXIS_BATCH, // these go with everything
    AXIS_OVERLAP,
    AXIS_CHUNK,
    AXIS_REDUCE, // these have wider bounds: named cases only
    AXIS_PRECISION,
    AXES
} Axis;
enum { AXES_LEGAL = AXIS_BATCH, AXES_COVERED = AXIS_REDUCE, AXIS_VALUES = 9, CASE_NAME = 128 };

// Names of values; that of an axis's first value may be empty: nothing is said.
static const char *const case_values[AXES][AXIS_VALUES + 1] = {
    [AXIS_MESH] = {"tp1.pp1", "tp2.pp1", "tp4.pp1", "tp1.pp2", "tp2.pp2", "tp4.pp2", "tp1.pp4", "tp2.pp4", "tp4.pp4"},
    [AXIS_MODEL] = {"gpt2", "gpt2-untied", "llama", "llama-tied", "qk-norm", "mixed", "deep"},
    [AXIS_SP] = {"", "sp"},
    [AXIS_ZERO] = {"z0", "z1", "z2", "z3"},
    [AXIS_SCHEDULE] = {"1f1b", "gpipe", "iv2", "iv3", "zb"},
    [AXIS_MICROS] = {"m1", "m2", "m3", "m4", "m8"},
    [AXIS_GROUP] = {"", "group1", "group2"},
    [AXIS_BUCKET] = {"", "tiny", "odd"},
    [AXIS_BATCH] = {"plain", "dropout", "varlen", "fit"},
    [AXIS_OVERLAP] = {"", "serial"},
    [AXIS_CHUNK] = {"", "chunk"},
    [AXIS_REDUCE] = {"", "reduce16"},
    [AXIS_PRECISION] = {"", "bf16"},
};

enum { BATCH_PLAIN, BATCH_DROPOUT, BATCH_VARLEN, BATCH_FIT };
enum { CASE_SEQ = 27 }; // odd: no number of tokens divides evenly

typedef struct {
    int at[AXES];
} Case;

static inline int case_value_count(Axis axis) {
    int count = 0;
    while (case_values[axis][count] != NULL) count++;
    return count;
}
static inline int case_tp(const Case *c) { return 1 << c->at[AXIS_MESH] % 3; }
static inline int case_pp(const Case *c) { return 1 << c->at[AXIS_MESH] / 3; }
static inline int case_dp(const Case *c, int world) { return world / (case_tp(c) * case_pp(c)); }
static inline int case_micros(const Case *c) { return atoi(case_values[AXIS_MICROS][c->at[AXIS_MICROS]] + 1); }

// Sequences of a step: few different numbers, so that layouts share references.
static inline int case_global_batch(const Case *c, int world) {
    const int own = case_dp(c, world) * case_micros(c), least = case_micros(c) == 3 ? 12 : 8;
    return own > least ? own : least;
}

static inline const char *case_name(const Case *c, char name[CASE_NAME]) {
    size_t length = 0;
    name[0] = '\0';
    for (int a = 0; a < AXES; a++) {
        const char *value = case_values[a][c->at[a]];
        if (value[0] != '\0') length += (size_t)snprintf(name + length, CASE_NAME - length, "%s%s", length > 0 ? " " : "", value);
    }
    return name;
}

// The case of a name; what it does not say has the first value. Ends the program on an unknown word.
static inline Case case_parse(const char *name) {
    Case c = {{0}};
    while (*name != '\0') {
        const size_t length = strcspn(name, " ");
        bool known = false;
        for (int a = 0; a < AXES; a++) {
            for (int v = 0; case_values[a][v] != NULL && length > 0; v++) {
                if (strlen(case_values[a][v]) == length && strncmp(case_values[a][v], name, length) == 0) c.at[a] = v, known = true;
            }
        }
        if (!known && length > 0) die(CODE_USAGE, "no layout word '%.*s'", (int)length, name);
        name += length + (name[length] == ' ');
    }
    return c;
}

// A vocabulary that no tp divides; layers that no number of stages divides, but the deep model's fourth chunk count.
static inline ModelConfig case_model(const Case *c) {
    const ModelConfig gpt2 = {.layers = 5,
                              .channels = 32,
                              .heads = 4,
                              .kv_heads = 4,
                              .head_size = 8,
                              .ffn = 72,
                              .vocab = 61,
                              .max_seq = CASE_SEQ,
                              .norm = NORM_LAYERNORM,
                              .position = POSITION_LEARNED,
                              .activation = ACTIVATION_GELU,
                              .bias = BIAS_ON,
                              .tied = true,
                              .norm_eps = 1e-5,
                              .rope_theta = 1e4};
    ModelConfig m = gpt2, llama = gpt2;
    llama.norm = NORM_RMSNORM, llama.position = POSITION_ROPE, llama.activation = ACTIVATION_SWIGLU, llama.bias = BIAS_OFF, llama.kv_heads = 2;
    switch (c->at[AXIS_MODEL]) {
    case 1: m.tied = false, m.layers = 4; break;
    case 2: m = llama, m.tied = false; break;
    case 3: m = llama, m.kv_heads = 1, m.layers = 7, m.vocab = 103; break;
    case 4: m = llama, m.qk_norm = true, m.bias = BIAS_QKV, m.layers = 4, m.head_size = 10; break;
    case 5: m.activation = ACTIVATION_SWIGLU, m.qk_norm = true, m.kv_heads = 2, m.tied = false, m.layers = 6; break;
    case 6: m = llama, m.activation = ACTIVATION_GELU, m.position = POSITION_LEARNED, m.layers = 13, m.channels = 16, m.ffn = 36; break;
    default: break;
    }
    m.dropout = c->at[AXIS_BATCH] == BATCH_DROPOUT || c->at[AXIS_BATCH] == BATCH_FIT ? 0.2 : 0;
    return m;
}

// The flags of a case with this global batch. eps is larger than usual: where a gradient's element is rounding noise, AdamW would make its
// sign a whole step.
static inline Options case_options(const Case *c, int global_batch, int world) {
    static const int kinds[] = {SCHEDULE_1F1B, SCHEDULE_GPIPE, SCHEDULE_INTERLEAVED, SCHEDULE_INTERLEAVED, SCHEDULE_ZB}, stages[] = {1, 1, 2, 3, 1};
    static const double bucket_mb[] = {25, 0.001, 0.077};
    Options o;
    options_defaults(&o);
    o.tp = case_tp(c), o.pp = case_pp(c), o.sp = c->at[AXIS_SP], o.zero = c->at[AXIS_ZERO];
    o.pp_schedule = kinds[c->at[AXIS_SCHEDULE]], o.virtual_stages = stages[c->at[AXIS_SCHEDULE]];
    o.shard_group = c->at[AXIS_GROUP], o.given[OPTION_shard_group] = c->at[AXIS_GROUP] > 0;
    o.bucket_mb = bucket_mb[c->at[AXIS_BUCKET]], o.given[OPTION_bucket_mb] = c->at[AXIS_BUCKET] > 0;
    o.overlap = c->at[AXIS_OVERLAP] == 0, o.grad_reduce = c->at[AXIS_REDUCE], o.precision = c->at[AXIS_PRECISION];
    o.seq = CASE_SEQ, o.global_batch = global_batch, o.micro_batch = global_batch / max_i64(1, case_dp(c, world) * case_micros(c));
    o.schedule = SCHEDULE_CONSTANT, o.lr = 1e-3, o.eps = 1e-5;
    return o;
}

static inline bool case_legal(const Case *c, int world) {
    const ModelConfig m = case_model(c);
    const Options o = case_options(c, case_global_batch(c, world), world);
    Layout layout;
    Error error = {0};
    if (!layout_create(&layout, &m, &o, world, 0, &error)) return false;
    const ScheduleShape shape = {layout.schedule, layout.mesh.pp, case_micros(c), layout.virtual_stages};
    layout_free(&layout);
    return schedule_check(&shape, &error);
}

// ----------------------------------------------------------------------------
// Lists

typedef struct {
    Case *cases;
    int count, capacity, refused;
} CaseList;

static inline void case_add(CaseList *list, const Case *c) {
    if (list->count == list->capacity) {
        list->capacity = 2 * list->capacity + 64;
        list->cases = base_grow(list->cases, (size_t)list->capacity, sizeof *list->cases);
    }
    list->cases[list->count++] = *c;
}

// Every legal combination of the axes that decide legality; values of axes not wanted (NULL: all are) stay at the first.
static inline CaseList case_product(int world, const bool wanted[AXES_LEGAL]) {
    CaseList list = {0};
    Case c = {{0}};
    for (int axis = 0; axis >= 0;) {
        if (case_legal(&c, world)) {
            case_add(&list, &c);
        } else {
            list.refused++;
        }
        for (axis = AXES_LEGAL - 1; axis >= 0; axis--) { // an odometer
            if ((wanted == NULL || wanted[axis]) && ++c.at[axis] < case_value_count((Axis)axis)) break;
            c.at[axis] = 0;
        }
    }
    return list;
}

// What must occur together in some case: all pairs, and these triples.
static const int case_triples_[][3] = {
    {AXIS_MESH, AXIS_SP, AXIS_ZERO},      {AXIS_MESH, AXIS_SCHEDULE, AXIS_ZERO},   {AXIS_MESH, AXIS_MODEL, AXIS_ZERO},
    {AXIS_MESH, AXIS_MODEL, AXIS_SP},     {AXIS_MESH, AXIS_MODEL, AXIS_SCHEDULE},  {AXIS_MESH, AXIS_ZERO, AXIS_GROUP},
    {AXIS_MESH, AXIS_ZERO, AXIS_MICROS},  {AXIS_MESH, AXIS_SCHEDULE, AXIS_MICROS}, {AXIS_MESH, AXIS_MODEL, AXIS_BATCH},
    {AXIS_ZERO, AXIS_MICROS, AXIS_BATCH}, {AXIS_MESH, AXIS_SP, AXIS_BATCH}};
enum {
    CASE_TRIPLES = sizeof case_triples_ / sizeof case_triples_[0],
    CASE_SETS = AXES_COVERED * AXES_COVERED,
    CASE_CELLS = AXIS_VALUES * AXIS_VALUES * AXIS_VALUES
};

typedef struct {
    int axes[3], count; // of a set: 2 or 3
    char wanted[CASE_CELLS];
} CaseSet;

typedef struct {
    CaseSet sets[CASE_SETS];
    int count;
    int64_t wanted, all; // cells not yet covered; at the beginning
} Coverage;

static inline int case_cell_(const CaseSet *set, const Case *c) {
    int cell = 0;
    for (int i = 0; i < set->count; i++) cell = cell * AXIS_VALUES + c->at[set->axes[i]];
    return cell;
}

static inline Coverage *coverage_create(const CaseList *legal, bool triples) {
    Coverage *v = base_new(1, sizeof *v);
    for (int a = 0; a < AXES_COVERED; a++) {
        for (int b = a + 1; b < AXES_COVERED; b++) v->sets[v->count++] = (CaseSet){.axes = {a, b}, .count = 2};
    }
    for (int i = 0; i < CASE_TRIPLES && triples; i++) {
        v->sets[v->count] = (CaseSet){.count = 3};
        memcpy(v->sets[v->count++].axes, case_triples_[i], sizeof case_triples_[i]);
    }
    for (int s = 0; s < v->count; s++) {
        CaseSet *set = &v->sets[s];
        for (int i = 0; i < legal->count; i++) {
            Case c = legal->cases[i];
            int64_t combinations = 1; // what is free takes every value
            for (int k = 0; k < set->count; k++) combinations *= set->axes[k] >= AXES_LEGAL ? case_value_count((Axis)set->axes[k]) : 1;
            for (int64_t x = 0; x < combinations; x++) {
                int64_t rest = x;
                for (int k = 0; k < set->count; k++) {
                    if (set->axes[k] < AXES_LEGAL) continue;
                    c.at[set->axes[k]] = (int)(rest % case_value_count((Axis)set->axes[k]));
                    rest /= case_value_count((Axis)set->axes[k]);
                }
                char *cell = &set->wanted[case_cell_(set, &c)];
                v->wanted += *cell == 0;
                *cell = 1;
            }
        }
    }
    v->all = v->wanted;
    return v;
}

// Cells that a case would cover; those of free axes only when asked.
static inline int coverage_gain_(const Coverage *v, const Case *c, bool with_free) {
    int gain = 0;
    for (int s = 0; s < v->count; s++) {
        const CaseSet *set = &v->sets[s];
        if (set->axes[set->count - 1] >= AXES_LEGAL && !with_free) continue; // axes ascend
        gain += set->wanted[case_cell_(set, c)];
    }
    return gain;
}

static inline void coverage_add(Coverage *v, const Case *c) {
    for (int s = 0; s < v->count; s++) {
        char *cell = &v->sets[s].wanted[case_cell_(&v->sets[s], c)];
        v->wanted -= *cell;
        *cell = 0;
    }
}

// Best values for the free axes, one after the other.
static inline void coverage_choose_free_(const Coverage *v, Case *c, uint64_t draw) {
    for (int a = AXES_LEGAL; a < AXES_COVERED; a++) {
        const int count = case_value_count((Axis)a), first = (int)(rng_mix(draw + (uint64_t)a) % (uint64_t)count);
        int best = -1, best_gain = -1;
        for (int k = 0; k < count; k++) {
            c->at[a] = (first + k) % count;
            const int gain = coverage_gain_(v, c, true);
            if (gain > best_gain) best = c->at[a], best_gain = gain;
        }
        c->at[a] = best;
    }
}

// Greedy: the case that covers the most, until nothing is left.
static inline CaseList case_covering(int world, bool triples, const CaseList *legal, int64_t *cells) {
    Coverage *v = coverage_create(legal, triples);
    CaseList list = {0};
    while (v->wanted > 0) {
        const uint64_t draw = rng_mix((uint64_t)world * 1000 + (uint64_t)list.count);
        Case best = {{0}};
        int best_gain = 0;
        for (int i = 0; i < legal->count; i++) {
            const Case *c = &legal->cases[(i + (int64_t)(draw % (uint64_t)legal->count)) % legal->count];
            const int gain = coverage_gain_(v, c, false);
            if (gain > best_gain) best = *c, best_gain = gain;
        }
        if (best_gain > 0) coverage_choose_free_(v, &best, draw);
        for (int i = 0; i < legal->count && best_gain == 0; i++) { // only cells of free axes are left
            best = legal->cases[i];
            coverage_choose_free_(v, &best, draw);
            best_gain = coverage_gain_(v, &best, true);
        }
        coverage_add(v, &best);
        case_add(&list, &best);
    }
    *cells = v->all;
    free(v);
    return list;
}

#endif
