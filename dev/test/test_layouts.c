// test_layouts.c: every division of the trainer against one rank. Runs many layouts in one job of any number of ranks (dev/test/layouts.sh),
// each for a few steps on the same data: losses, norms, initial hash and the whole gradient are those of a trainer of one rank in the same
// process, every copy of a parameter has the same bits on every rank, messages are as many and as large as the formulas below, memory holds
// no more micro-batches than the schedule promises. Then: what may not change a single bit.
//
// usage: test_layouts [--full | --bits | WORD...]   the covering list; every legal layout; only lines of bits, to compare between jobs;
//                                                   one layout, by the words of layout_cases.h
#define TRAIN_GPT_NO_MAIN
#include "train_gpt.c" // Trainer

#include "dev/test/gradients.h"    // gradient_error
#include "dev/test/layout_cases.h" // Case, case_covering
#include "dev/test/test.h"         // check

enum { STEPS = 5 };

// ----------------------------------------------------------------------------
// Data: sequence g of step s is a function of (s, g) alone.

typedef struct {
    int kind; // BATCH_*
    int64_t vocab, global_batch, micro_batch;
    int dp, at; // data-parallel ranks, this one
} Data;

static uint64_t draw(int64_t step, int64_t sequence, int64_t what) {
    return rng_mix((uint64_t)step * 1000003 + (uint64_t)sequence * 4099 + (uint64_t)what * 0x9E3779B97F4A7C15ull);
}

// Tokens of a sequence: with fit they differ, and few fill their row.
static int64_t sequence_tokens(const Data *data, int64_t step, int64_t g) {
    return data->kind == BATCH_FIT ? 1 + (int64_t)(draw(step, g, -1) % CASE_SEQ) : CASE_SEQ;
}

// Target of token i, or -1. Packed batches mask what ends a document and some more; some sequences have no target at all.
static int32_t target_of(const Data *data, int64_t step, int64_t g, int64_t i, bool last) {
    const bool packed = data->kind == BATCH_VARLEN || data->kind == BATCH_FIT;
    if (packed && (last || g % 4 == 2 || draw(step, g, 5000 + i) % 6 == 0)) return -1;
    return (int32_t)(draw(step, g, 1000 + i) % (uint64_t)data->vocab);
}

static void add_sequence(MicroBatch *b, const Data *data, int64_t step, int64_t g) {
    const bool packed = data->kind == BATCH_VARLEN || data->kind == BATCH_FIT;
    const int64_t tokens = sequence_tokens(data, step, g);
    int32_t place = 0;
    for (int64_t i = 0; i < tokens; i++) {
        const int64_t n = b->tokens++;
        const bool last = packed && draw(step, g, 3000 + i) % 9 == 0;
        b->ids[n] = (int32_t)(draw(step, g, i) % (uint64_t)data->vocab);
        b->targets[n] = target_of(data, step, g, i, last);
        b->positions[n] = place++;
        b->token_index[n] = (int32_t)(g * CASE_SEQ + i);
        b->valid += b->targets[n] >= 0;
        if (last) microbatch_end_document_(b), place = 0;
    }
    microbatch_end_document_(b);
    b->rows++;
}

static StepBatch batch_create(const Data *data) {
    const int64_t share = data->global_batch / data->dp;
    StepBatch batch = {.micro_count = share / data->micro_batch};
    batch.micros = base_new((size_t)batch.micro_count, sizeof *batch.micros);
    for (int64_t m = 0; m < batch.micro_count; m++) microbatch_create(&batch.micros[m], data->micro_batch * CASE_SEQ);
    return batch;
}

static void batch_free(StepBatch *batch) {
    for (int64_t m = 0; m < batch->micro_count; m++) microbatch_free(&batch->micros[m]);
    free(batch->micros);
}

// Data-parallel rank k has the k-th run of sequences, as from a Loader. Of varlen batches nobody knows all valid tokens.
static void batch_fill(StepBatch *batch, const Data *data, int64_t step) {
    const int64_t share = data->global_batch / data->dp;
    batch->valid = batch->tokens = batch->valid_global = 0;
    for (int64_t m = 0; m < batch->micro_count; m++) {
        microbatch_clear(&batch->micros[m]);
        for (int64_t k = 0; k < data->micro_batch; k++) add_sequence(&batch->micros[m], data, step, data->at * share + m * data->micro_batch + k);
        batch->valid += batch->micros[m].valid, batch->tokens += batch->micros[m].tokens;
    }
    if (data->kind == BATCH_VARLEN && data->dp > 1) {
        batch->valid_global = -1;
        return;
    }
    MicroBatch other;
    microbatch_create(&other, CASE_SEQ);
    for (int64_t g = 0; g < data->global_batch; g++) {
        microbatch_clear(&other);
        add_sequence(&other, data, step, g);
        batch->valid_global += other.valid;
    }
    microbatch_free(&other);
}

// ----------------------------------------------------------------------------
// One run

typedef struct {
    double losses[STEPS], norms[STEPS];
    uint64_t init_hash;
    int64_t elements;
    float *gradient;   // (elements) of step 1, tensor after tensor
    float *parameters; // (elements) after the last step
    float *rows;       // (tensors) sums over sequences of the norms of their gradients, or NULL
} Outcome;

static void outcome_free(Outcome *outcome) {
    free(outcome->gradient);
    free(outcome->parameters);
    free(outcome->rows);
    *outcome = (Outcome){0};
}

// Larger weights than those of a fresh model, and biases and gains that differ: so that every term matters.
static void spread_parameters(Trainer *t) {
    for (int i = 0; i < t->model.count; i++) {
        const Tensor *tensor = &t->model.tensors[i];
        const ZeroPiece piece = zero_piece(&t->zero, i);
        const Buffer to = buffer_at(zero_exact(&t->zero, tensor->unit), piece.at);
        const double scale = tensor->init != INIT_NORMAL ? 0.3 : tensor->unit == 0 ? 0.5 : 1.5 / sqrt((double)tensor->shape[1]);
        for (int64_t at = piece.from, run; at < piece.to; at += run) {
            const int64_t element = layout_global_element(tensor, &t->zero.part[i], at, piece.to - at, &run);
            for (int64_t k = 0; k < run; k++) {
                const double value = scale * test_uniform((uint64_t)i, (uint64_t)(element + k)) + (tensor->init == INIT_ONES ? 1 : 0);
                ((float *)to.data)[at - piece.from + k] = (float)value;
            }
        }
    }
    publish_parameters(t, true);
}

// The whole fp32 values of a tensor on every rank, from the ranks that count for it.
static void whole_parameter(Trainer *t, int i, float *whole) {
    const Tensor *tensor = &t->model.tensors[i];
    const Part *part = &t->zero.part[i];
    const ZeroPiece piece = zero_piece(&t->zero, i);
    memset(whole, 0, (size_t)tensor->elements * sizeof *whole);
    if (part->counts && t->layout.replica == 0) {
        const float *own = buffer_at(zero_exact(&t->zero, tensor->unit), piece.at).data;
        for (int64_t at = piece.from, run; at < piece.to; at += run) {
            const int64_t element = layout_global_element(tensor, part, at, piece.to - at, &run);
            memcpy(whole + element, own + at - piece.from, (size_t)run * sizeof *whole);
        }
    }
    comm_all_reduce(t->comm->world, whole, tensor->elements, COMM_F32, COMM_SUM);
}

// Elements [from, to) of this rank's part of a tensor, at `own`, that differ from the whole by more than `relative`.
static int64_t differing(const Trainer *t, int i, int64_t from, int64_t to, Buffer own, const float *whole, double relative) {
    int64_t count = 0;
    for (int64_t at = from, run; at < to; at += run) {
        const int64_t element = layout_global_element(&t->model.tensors[i], &t->zero.part[i], at, to - at, &run);
        for (int64_t k = 0; k < run; k++) {
            float value = whole[element + k];
            if (own.dtype == DTYPE_F32) {
                value = ((const float *)own.data)[at - from + k];
            } else {
                const uint32_t bits = (uint32_t)((const uint16_t *)own.data)[at - from + k] << 16;
                memcpy(&value, &bits, sizeof value);
            }
            count += !(fabs((double)value - (double)whole[element + k]) <= relative * fabs((double)whole[element + k]));
        }
    }
    return count;
}

// All copies of every parameter are those of the rank that counts: data-parallel ones, replicas under tensor parallelism, both copies of a
// tied embedding, the bf16 weights next to their master copy.
static void check_copies(Trainer *t, const char *name, float *parameters) {
    int64_t wrong = 0;
    for (int i = 0; i < t->model.count; parameters += t->model.tensors[i++].elements) {
        whole_parameter(t, i, parameters);
        const ZeroPiece piece = zero_piece(&t->zero, i);
        const ZeroShard shard = zero_shard(&t->zero, t->model.tensors[i].unit);
        wrong += differing(t, i, piece.from, piece.to, buffer_at(zero_exact(&t->zero, t->model.tensors[i].unit), piece.at), parameters, 0);
        const double relative = t->dtype == DTYPE_F32 ? 0 : 0x1p-8;
        if (t->layout.zero == 3) {
            wrong += differing(t, i, piece.from, piece.to, buffer_at(shard.param, piece.at), parameters, relative);
        } else if (t->zero.part[i].held) {
            const Buffer own = buffer_at(t->zero.param, t->zero.offset[i]);
            wrong += differing(t, i, 0, t->zero.part[i].elements, own, parameters, relative);
        }
    }
    check(wrong == 0, "%s: rank %d: %lld parameters differ from their copies", name, t->comm->rank, (long long)wrong);
}

// ----------------------------------------------------------------------------
// What a step must send, from the design's table of communication: g and p are the bytes of a rank's gradients and parameters, M micro-batches.

enum { DOWNSTREAM = LAYOUT_GROUPS, UPSTREAM, WORLD, COUNTED_GROUPS };
typedef struct {
    CommCount of[COUNTED_GROUPS][COMM_KINDS];
} Traffic;

static const CommGroup *counted_group(const Trainer *t, int g) {
    return g < LAYOUT_GROUPS ? t->groups[g] : g == DOWNSTREAM ? t->downstream : g == UPSTREAM ? t->upstream : t->comm->world;
}

static Traffic traffic_now(const Trainer *t) {
    Traffic now = {0};
    for (int g = 0; g < COUNTED_GROUPS; g++) {
        const CommGroup *group = counted_group(t, g);
        if (group != NULL) memcpy(now.of[g], group->counts, sizeof now.of[g]);
    }
    return now;
}

static void expect(const Trainer *t, Traffic *traffic, int g, CommKind kind, int64_t calls, int64_t bytes) {
    const CommGroup *group = counted_group(t, g);
    if (group == NULL || group->size == 1) return; // counts nothing
    traffic->of[g][kind].calls += calls;
    traffic->of[g][kind].bytes += bytes;
}

// Forwards and backwards that follow one of their own kind: the block they begin with is not the one just used. 1f1b and zero-bubble
// pipelines begin with a forward for every stage below, and end alike.
static int64_t repeated_passes(const Schedule *s) {
    const int64_t M = s->shape.microbatches, warmup = s->shape.kind == SCHEDULE_GPIPE ? M - 1 : s->shape.stages - 1 - s->stage;
    return 2 * min_i64(warmup, M - 1);
}

// Gathers of blocks in a step under stage 3: all of a pass, but those k that are still in their slots when it turns round.
static int64_t block_gathers(const Trainer *t, int64_t blocks) {
    const int64_t M = t->schedule.shape.microbatches, k = min_i64(t->options->overlap ? 2 : 1, blocks), repeated = repeated_passes(&t->schedule);
    return blocks + (2 * M - 1 - repeated) * (blocks - k) + repeated * (blocks > k ? blocks : 0);
}

static void expect_shards(const Trainer *t, Traffic *x) {
    const Layout *l = &t->layout;
    const int64_t M = t->schedule.shape.microbatches, wire = t->options->grad_reduce == GRAD_REDUCE_BF16 ? 2 : 4;
    const int64_t D = l->shards, weight = (int64_t)dtype_bytes(t->dtype);
    int64_t blocks = 0, units = 0, whole_bytes = 0;
    for (int u = 0; u < t->model.units; u++) {
        const int64_t elements = t->zero.range[u].count;
        if (elements == 0) continue;
        const bool block = u > 0 && u < model_head_unit(&t->model);
        blocks += block, units++, whole_bytes += elements * wire;
        const int64_t times = l->zero >= 2 ? M : 1;
        if (D > 1) {
            expect(t, x, LAYOUT_SHARD, COMM_REDUCE_SCATTER, times, times * elements * wire);
            if (l->zero < 3 || !block) expect(t, x, LAYOUT_SHARD, COMM_ALL_GATHER, 1, elements * weight);
            expect(t, x, LAYOUT_REPLICA, COMM_ALL_REDUCE, 1, elements / D * wire);
        } else if (l->zero >= 2) {
            expect(t, x, LAYOUT_REPLICA, COMM_ALL_REDUCE, times, times * elements * wire);
        }
        if (u == 0 && l->config.tied && l->mesh.pp > 1) expect(t, x, LAYOUT_EMBEDDING, COMM_ALL_REDUCE, 1, elements / D * 4);
    }
    if (D == 1 && l->zero < 2) {
        // One bucket; or one for every unit; a tied embedding that two stages hold never shares its own.
        const bool apart = l->config.tied && l->mesh.pp > 1 && t->zero.range[0].count > 0 && units > 1;
        expect(t, x, LAYOUT_REPLICA, COMM_ALL_REDUCE, t->options->bucket_mb < 0.01 ? units : 1 + apart, whole_bytes);
    }
    if (l->zero == 3 && D > 1 && l->virtual_stages == 1) {
        const int64_t gathers = block_gathers(t, blocks);
        expect(t, x, LAYOUT_SHARD, COMM_ALL_GATHER, gathers, gathers * t->zero.range[layout_first_layer(l, 0) + 1].count * weight);
    }
}

// Sums of gradients over tensor-parallel ranks: norms whose tokens are divided, qk-norms whose heads are, k and v whose heads are copied.
static void expect_copies(const Trainer *t, Traffic *x) {
    const Layout *l = &t->layout;
    const ModelConfig *m = &l->config;
    const int64_t times = l->zero >= 2 ? t->schedule.shape.microbatches : 1, C = m->channels, HS = m->head_size;
    const int64_t tensors = m->norm == NORM_LAYERNORM && m->bias == BIAS_ON ? 2 : 1; // of a norm
    int64_t blocks = 0;
    for (int c = 0; c < l->virtual_stages; c++) blocks += layout_chunk_layers(l, c);
    const int64_t norms = (2 * blocks + layout_has_head(l)) * tensors;
    if (l->sp) expect(t, x, LAYOUT_TP, COMM_ALL_REDUCE, times * norms, times * norms * C * 4);
    if (m->qk_norm) expect(t, x, LAYOUT_TP, COMM_ALL_REDUCE, times * blocks * 2, times * blocks * 2 * HS * 4);
    if (m->kv_heads < l->mesh.tp) { // one head on each
        expect(t, x, LAYOUT_KV, COMM_ALL_REDUCE, times * blocks, times * blocks * 2 * HS * C * 4);
        if (m->bias != BIAS_OFF) expect(t, x, LAYOUT_KV, COMM_ALL_REDUCE, times * blocks, times * blocks * 2 * HS * 4);
    }
}

// Activations of one micro-batch.
static void expect_micro_batch(const Trainer *t, Traffic *x, int64_t tokens) {
    const Layout *l = &t->layout;
    const int64_t tp = l->mesh.tp, capacity = round_up(t->options->micro_batch * CASE_SEQ, l->sp ? tp : 1);
    const int64_t N = min_i64(round_up(max_i64(tokens, 1), 64), capacity), whole = N * l->config.channels * (int64_t)dtype_bytes(t->dtype);
    int64_t blocks = 0;
    const int64_t first = layout_has_embedding(l), last = layout_has_head(l);
    for (int c = 0; c < l->virtual_stages; c++) {
        const int64_t own = whole / (l->sp ? tp : 1);
        blocks += layout_chunk_layers(l, c);
        if (!layout_is_last(l, c)) expect(t, x, DOWNSTREAM, COMM_SEND, 1, own), expect(t, x, UPSTREAM, COMM_RECV, 1, own);
        if (!layout_is_first(l, c)) expect(t, x, DOWNSTREAM, COMM_RECV, 1, own), expect(t, x, UPSTREAM, COMM_SEND, 1, own);
    }
    // Two sums forward and two backward in a block; the embedding's output; the gradient of what the head reads. With sequence
    // parallelism every sum is a reduce-scatter, and has its all-gather.
    const int64_t sums = 4 * blocks + first + last;
    expect(t, x, LAYOUT_TP, l->sp ? COMM_REDUCE_SCATTER : COMM_ALL_REDUCE, sums, sums * whole);
    if (l->sp) expect(t, x, LAYOUT_TP, COMM_ALL_GATHER, sums, sums * whole);
    if (last) expect(t, x, LAYOUT_TP, COMM_ALL_GATHER, ceil_div(N, t->acts.chunk), tp * N * 3 * 4); // maximum, sum, target's logit
}

static void check_traffic(const Trainer *t, const char *name, const StepBatch *batch, const Traffic *before, const Traffic *after) {
    Traffic wanted = {0};
    expect_shards(t, &wanted);
    expect_copies(t, &wanted);
    for (int64_t m = 0; m < batch->micro_count; m++) expect_micro_batch(t, &wanted, batch->micros[m].tokens);
    if (batch->valid_global < 0) expect(t, &wanted, LAYOUT_DP, COMM_ALL_REDUCE, 1, 8);
    expect(t, &wanted, WORLD, COMM_ALL_REDUCE, 1, 16); // loss and squares
    for (int g = 0; g < COUNTED_GROUPS; g++) {
        for (int kind = 0; kind < COMM_KINDS; kind++) {
            const CommCount w = wanted.of[g][kind];
            const int64_t calls = after->of[g][kind].calls - before->of[g][kind].calls,
                          bytes = after->of[g][kind].bytes - before->of[g][kind].bytes;
            // Where it depends on more than M: buckets of some units; gathers with several chunks, at most every block in every pass.
            const bool some = g == LAYOUT_REPLICA && t->options->bucket_mb > 0.01 && t->options->bucket_mb < 1;
            const bool gathers = g == LAYOUT_SHARD && kind == COMM_ALL_GATHER && t->layout.zero == 3 && t->layout.virtual_stages > 1;
            const bool good = gathers ? calls >= w.calls && bytes >= w.bytes : bytes == w.bytes && (calls == w.calls || (some && calls >= w.calls));
            check(good, "%s: rank %d: %s on %s: got %lld calls, %lld bytes, wanted %lld, %lld", name, t->comm->rank, comm_kind_names[kind],
                  counted_group(t, g) != NULL ? counted_group(t, g)->name : "none", (long long)calls, (long long)bytes, (long long)w.calls,
                  (long long)w.bytes);
        }
    }
}

// Micro-batches (times chunks) in flight, and the memory that holds them.
static void check_slots(const Trainer *t, const char *name) {
    const Schedule *s = &t->schedule;
    const int64_t P = s->shape.stages, M = s->shape.microbatches, V = s->shape.chunks, below = P - 1 - s->stage;
    const int64_t group = M < P ? M : ceil_div(M, M / P); // of micro-batches that go through a chunk together
    const bool good = s->shape.kind == SCHEDULE_GPIPE  ? s->slots == M
                      : s->shape.kind == SCHEDULE_1F1B ? s->slots == min_i64(M, P - s->stage)
                      : s->shape.kind == SCHEDULE_ZB   ? s->slots == min_i64(M, P)
                                                       : s->slots <= min_i64(M * V, 2 * below + (V - 1) * group + 1);
    check(good, "%s: rank %d: %d micro-batches in flight", name, t->comm->rank, s->slots);
    ActivationShape one = t->acts.shape, none = one;
    Activations counted = {0};
    none.slots = none.stashes = 0, one.slots = 1, one.stashes = 0;
    (void)activations_layout(&counted, NULL, &t->layout, &none);
    const size_t empty = counted.kept_bytes;
    (void)activations_layout(&counted, NULL, &t->layout, &one);
    const size_t slot = counted.kept_bytes - empty;
    one.slots = 0, one.stashes = 1;
    (void)activations_layout(&counted, NULL, &t->layout, &one);
    const size_t stash = counted.kept_bytes - empty, wanted = (size_t)s->slots * slot + (size_t)s->stashes * stash;
    check(empty == 0 && t->acts.kept_bytes == wanted, "%s: rank %d: %zu bytes of kept activations, wanted %zu", name, t->comm->rank,
          t->acts.kept_bytes, wanted);
}

// Sums over the sequences of step 1 of the norms of their gradients: what rounding them one by one can do at most.
static float *row_norms(Trainer *t, const Data *data) {
    float *sums = base_new((size_t)t->model.count, sizeof *sums);
    Data single = *data;
    StepBatch all = batch_create(data), row;
    batch_fill(&all, data, 1);
    single.global_batch = single.micro_batch = 1;
    row = batch_create(&single);
    for (int64_t g = 0; g < data->global_batch; g++) {
        microbatch_clear(&row.micros[0]);
        add_sequence(&row.micros[0], data, 1, g);
        row.valid = row.micros[0].valid, row.valid_global = all.valid_global;
        step_begin(t, 1);
        accumulate_gradients(t, &row);
        for (int i = 0; i < t->model.count; i++) {
            float *whole = state_whole(&t->zero, i, true);
            sums[i] += (float)gradient_norm(whole, t->model.tensors[i].elements);
            free(whole);
        }
    }
    batch_free(&all);
    batch_free(&row);
    return sums;
}

static Outcome run_case(Comm *comm, const Case *c, int global_batch, uint64_t late, bool rows) {
    static Trainer trainer; // must not move
    Trainer *t = &trainer;
    char name[CASE_NAME];
    case_name(c, name);
    const ModelConfig config = case_model(c);
    Options options = case_options(c, global_batch, comm->size);
    options.dropout = config.dropout;
    trainer_create(t, &options, &config, comm, device_cpu());
    const Layout *l = &t->layout;
    if (c->at[AXIS_CHUNK] > 0) t->acts.chunk = min_i64(t->acts.chunk, 20);
    check_slots(t, name);
    comm_late(comm, late);
    trainer_init_parameters(t);
    spread_parameters(t);
    const Data data = {c->at[AXIS_BATCH], config.vocab, global_batch, options.micro_batch, l->mesh.dp, l->mesh.at.dp};
    StepBatch batch = batch_create(&data);
    Outcome outcome = {.init_hash = t->init_hash, .elements = model_parameters(&t->model)};
    outcome.gradient = base_new((size_t)outcome.elements, sizeof(float));
    outcome.parameters = base_new((size_t)outcome.elements, sizeof(float));
    if (rows) outcome.rows = row_norms(t, &data);
    for (int64_t step = 1; step <= STEPS; step++) {
        batch_fill(&batch, &data, step);
        const Traffic before = traffic_now(t);
        step_begin(t, step);
        accumulate_gradients(t, &batch);
        float *to = outcome.gradient;
        for (int i = 0; step == 1 && i < t->model.count; to += t->model.tensors[i++].elements) {
            float *whole = state_whole(&t->zero, i, true);
            memcpy(to, whole, (size_t)t->model.tensors[i].elements * sizeof *whole);
            free(whole);
        }
        step_end(t, step);
        const StepState result = step_result(t, step);
        outcome.losses[step - 1] = result.loss_sum;
        outcome.norms[step - 1] = result.grad_norm;
        const Traffic after = traffic_now(t);
        if (step == 2) check_traffic(t, name, &batch, &before, &after);
    }
    check_copies(t, name, outcome.parameters);
    comm_late(comm, 0);
    batch_free(&batch);
    trainer_free(t);
    return outcome;
}

// ----------------------------------------------------------------------------
// References: the same model, data and global batch on one rank, shared by many layouts. Each is computed by one of the ranks.

typedef struct {
    Case c; // on one rank
    int global_batch;
    Outcome outcome;
} Reference;

typedef struct {
    Comm *world, *alone;
    Reference *references;
    int count;
    double worst_gradient, worst_loss, worst_norm;
} Test;

static Case reference_case(const Case *c) {
    Case one = {{0}};
    const Axis same[] = {AXIS_MODEL, AXIS_BATCH, AXIS_PRECISION};
    for (int i = 0; i < 3; i++) one.at[same[i]] = c->at[same[i]];
    return one;
}

static int find_reference(const Test *test, const Case *c) {
    const Case one = reference_case(c);
    const int global_batch = case_global_batch(c, test->world->size);
    int k = 0;
    while (k < test->count && (test->references[k].global_batch != global_batch || memcmp(&test->references[k].c, &one, sizeof one) != 0)) k++;
    return k;
}

static void want_reference(Test *test, const Case *c) {
    const int k = find_reference(test, c);
    if (k < test->count) return;
    test->references = base_grow(test->references, (size_t)test->count + 1, sizeof *test->references);
    test->references[test->count++] = (Reference){.c = reference_case(c), .global_batch = case_global_batch(c, test->world->size)};
}

static void compute_references(Test *test, int from) {
    for (int k = from; k < test->count; k++) {
        Reference *r = &test->references[k];
        if (k % test->world->size == test->world->rank) r->outcome = run_case(test->alone, &r->c, r->global_batch, 0, true);
    }
    comm_barrier(test->world->world);
}

// A reference on every rank, from the one that has it. To be freed.
static Outcome get_reference(Test *test, int k, int tensors) {
    const Outcome *own = &test->references[k].outcome;
    Comm *comm = test->world;
    const int root = k % comm->size;
    Outcome r = *own;
    comm_broadcast(comm->world, &r, (int64_t)sizeof r, COMM_BYTE, root);
    r.parameters = NULL;
    r.gradient = base_new((size_t)r.elements, sizeof(float));
    r.rows = base_new((size_t)tensors, sizeof(float));
    if (comm->rank == root) memcpy(r.gradient, own->gradient, (size_t)r.elements * sizeof(float));
    if (comm->rank == root) memcpy(r.rows, own->rows, (size_t)tensors * sizeof(float));
    comm_broadcast(comm->world, r.gradient, r.elements, COMM_F32, root);
    comm_broadcast(comm->world, r.rows, tensors, COMM_F32, root);
    return r;
}

static double largest(double a, double b) { return b <= a ? a : b; } // NaN stays

static void compare(Test *test, const Case *c, const Outcome *got, const Outcome *wanted, const Model *model) {
    char name[CASE_NAME];
    case_name(c, name);
    const bool reduce16 = c->at[AXIS_REDUCE] > 0, bf16 = c->at[AXIS_PRECISION] > 0;
    const double norm = gradient_norm(wanted->gradient, wanted->elements);
    double loss = 0, norms = 0, gradient = 0;
    const char *where = "";
    int64_t at = 0;
    for (int i = 0; i < model->count; at += model->tensors[i++].elements) {
        const int64_t n = model->tensors[i].elements;
        const float *a = got->gradient + at, *b = wanted->gradient + at;
        double error = gradient_error(a, b, n, norm, wanted->elements);
        // A value rounds by at most 2^-8 of itself on its way, twice where replicas sum what shards have summed, and the two copies of a tied
        // embedding each for itself: errors are measured in that bound.
        if (reduce16) error = gradient_distance(a, b, n) / (2 * 0x1p-8 * (double)wanted->rows[i] + 1e-5 * norm);
        if (!(error <= gradient)) gradient = error, where = model->tensors[i].name;
        check(gradient_norm(a, n) > 0 || !(gradient_norm(b, n) > 0), "%s: the gradient of %s is zero", name, model->tensors[i].name);
    }
    for (int s = 0; s < STEPS; s++) {
        loss = largest(loss, fabs(got->losses[s] - wanted->losses[s]) / fabs(wanted->losses[s]));
        norms = largest(norms, fabs(got->norms[s] - wanted->norms[s]) / wanted->norms[s]);
    }
    // bf16: every op rounds by 2^-9 or so, and partial sums over tensor-parallel ranks differ by that in each of some ten ops of a block.
    const double gradient_bound = reduce16 ? 1 : bf16 ? 8e-2 : 1e-5, loss_bound = bf16 ? 2e-3 : reduce16 ? 1e-4 : 1e-5;
    const double norm_bound = bf16 ? 1e-2 : reduce16 ? 1e-3 : 1e-5;
    check(got->init_hash == wanted->init_hash, "%s: init hash", name);
    check(gradient <= gradient_bound, "%s: gradient of %s: error %g, bound %g", name, where, gradient, gradient_bound);
    check(loss <= loss_bound, "%s: losses: error %g, bound %g", name, loss, loss_bound);
    check(norms <= norm_bound, "%s: norms: error %g, bound %g", name, norms, norm_bound);
    printf("  %-72s %8.1e %8.1e %8.1e\n", name, gradient, loss, norms);
    if (reduce16 || bf16) return;
    test->worst_gradient = largest(test->worst_gradient, gradient);
    test->worst_loss = largest(test->worst_loss, loss), test->worst_norm = largest(test->worst_norm, norms);
}

// late: seed of late completion, or 0.
static void test_case(Test *test, const Case *c, uint64_t late) {
    const ModelConfig config = case_model(c);
    Model model = model_create(&config);
    Outcome wanted = get_reference(test, find_reference(test, c), model.count);
    Outcome got = run_case(test->world, c, case_global_batch(c, test->world->size), late, false);
    if (test->world->rank == 0) compare(test, c, &got, &wanted, &model);
    outcome_free(&got);
    outcome_free(&wanted);
    model_free(&model);
}

static void test_list(Test *test, const CaseList *list, const char *title) {
    const double begin = clock_ms();
    const int from = test->count;
    for (int i = 0; i < list->count; i++) want_reference(test, &list->cases[i]);
    compute_references(test, from);
    const double referenced = clock_ms();
    if (test->world->rank == 0) printf("%s: %d layouts; errors of gradient, losses, norms\n", title, list->count);
    for (int i = 0; i < list->count; i++) test_case(test, &list->cases[i], i % 2 == 0 ? 0 : (uint64_t)i); // every other one with late completion
    if (test->world->rank == 0) {
        printf("%s: %.1f s, and %.1f s for %d references\n", title, (clock_ms() - referenced) * 1e-3, (referenced - begin) * 1e-3,
               test->count - from);
    }
}

// ----------------------------------------------------------------------------
// Bits

static bool same_bits(const Outcome *a, const Outcome *b) {
    const size_t bytes = (size_t)a->elements * sizeof(float);
    return memcmp(a->losses, b->losses, sizeof a->losses) == 0 && memcmp(a->norms, b->norms, sizeof a->norms) == 0 &&
           memcmp(a->gradient, b->gradient, bytes) == 0 && memcmp(a->parameters, b->parameters, bytes) == 0;
}

static uint64_t hash_floats(uint64_t hash, const float *values, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        hash = rng_mix(hash ^ bits);
    }
    return hash;
}

typedef struct {
    int world;
    const char *name;
} NamedCase;

// By number of ranks: all stages of ZeRO, all schedules, both kinds of sums.
static const NamedCase bits_cases[] = {
    {2, "tp1.pp1 gpt2 z0 m2 varlen"},      {2, "tp1.pp1 llama-tied z1 m2 fit"},          {2, "tp1.pp1 qk-norm z2 m3 dropout"},
    {2, "tp1.pp1 deep z3 m2 fit"},         {2, "tp2.pp1 qk-norm sp z0 m2 varlen chunk"}, {2, "tp1.pp2 gpt2 z0 1f1b m4 plain"},
    {4, "tp1.pp1 gpt2 z1 m2 fit group2"},  {4, "tp1.pp1 llama z3 m2 varlen group2"},     {4, "tp1.pp2 llama-tied z1 gpipe m4 fit"},
    {4, "tp1.pp2 deep z2 zb m3 dropout"},  {4, "tp1.pp4 gpt2 z0 1f1b m2 varlen"},        {4, "tp2.pp2 llama-tied sp z0 iv2 m3 fit"},
    {4, "tp4.pp1 mixed sp z0 m2 dropout"}, {8, "tp2.pp2 llama-tied sp z3 iv3 m4 fit"},   {8, "tp2.pp2 gpt2 z0 zb m3 varlen"},
};

static void expect_bits(Test *test, const Case *c, const Outcome *first, uint64_t late, const char *what) {
    char name[CASE_NAME];
    Outcome again = run_case(test->world, c, case_global_batch(c, test->world->size), late, false);
    check(same_bits(first, &again), "%s: other bits: %s", case_name(c, name), what);
    outcome_free(&again);
}

static void test_bits_of(Test *test, const Case *c) {
    char name[CASE_NAME];
    Outcome first = run_case(test->world, c, case_global_batch(c, test->world->size), 0, false);
    int runs = 3;
    expect_bits(test, c, &first, 0, "a second run");
    for (uint64_t seed = 1; seed <= 2; seed++) expect_bits(test, c, &first, seed * 7, "late completion");
    Case other = *c;
    const bool buckets = c->at[AXIS_ZERO] < 2;
    for (int bucket = 0; bucket < (buckets ? case_value_count(AXIS_BUCKET) : 1); bucket++) {
        for (int overlap = 0; overlap < 2; overlap++, runs++) {
            other.at[AXIS_BUCKET] = bucket, other.at[AXIS_OVERLAP] = overlap;
            if (memcmp(&other, c, sizeof other) != 0) expect_bits(test, &other, &first, 0, case_name(&other, name));
        }
    }
    if (test->world->rank == 0) printf("  %-72s %d runs\n", case_name(c, name), runs);
    outcome_free(&first);
}

static void test_bits(Test *test) {
    const double begin = clock_ms();
    for (size_t i = 0; i < sizeof bits_cases / sizeof bits_cases[0]; i++) {
        const Case c = case_parse(bits_cases[i].name);
        if (bits_cases[i].world == test->world->size) test_bits_of(test, &c);
    }
    if (test->world->rank == 0) printf("bits: %.1f s\n", (clock_ms() - begin) * 1e-3);
}

// Lines to compare with those of a job whose ranks talk in another way.
static void print_bits(Test *test) {
    for (size_t i = 0; i < sizeof bits_cases / sizeof bits_cases[0]; i++) {
        if (bits_cases[i].world != test->world->size) continue;
        const Case c = case_parse(bits_cases[i].name);
        Outcome o = run_case(test->world, &c, case_global_batch(&c, test->world->size), 0, false);
        uint64_t hash = hash_floats(hash_floats(0, o.gradient, o.elements), o.parameters, o.elements);
        for (int s = 0; s < STEPS; s++) hash = rng_mix(hash ^ (uint64_t)(o.losses[s] * 1e12) ^ rng_mix((uint64_t)(o.norms[s] * 1e12)));
        if (test->world->rank == 0) printf("bits of %s: %016llx\n", bits_cases[i].name, (unsigned long long)hash);
        outcome_free(&o);
    }
}

// ----------------------------------------------------------------------------

// Wider bounds: gradients that travel in bf16, weights and activations in bf16.
static const NamedCase wide_cases[] = {
    {2, "tp1.pp1 gpt2 z0 m2 varlen reduce16"},         {2, "tp1.pp1 llama z1 m2 fit reduce16 tiny"},
    {2, "tp1.pp1 qk-norm z2 m3 dropout reduce16"},     {2, "tp1.pp1 deep z3 m2 plain reduce16 serial"},
    {2, "tp2.pp1 qk-norm sp z0 m2 fit bf16"},          {2, "tp1.pp2 gpt2 z0 m2 plain bf16"},
    {2, "tp1.pp1 llama-tied z1 m1 plain bf16"},        {4, "tp1.pp2 gpt2 z1 m4 varlen reduce16 odd"},
    {4, "tp2.pp1 llama-tied sp z2 m2 fit reduce16"},   {4, "tp1.pp1 gpt2 z1 m2 plain group2 reduce16"},
    {4, "tp1.pp1 mixed z3 m2 varlen group2 reduce16"}, {4, "tp1.pp1 mixed z2 m2 varlen group1 reduce16"},
    {4, "tp2.pp2 llama-tied sp z0 iv2 m3 fit bf16"},   {4, "tp1.pp2 qk-norm z3 zb m4 dropout bf16"},
    {4, "tp1.pp1 gpt2 z2 m1 varlen bf16 reduce16"},    {8, "tp2.pp2 gpt2 sp z2 zb m3 fit reduce16"},
    {8, "tp2.pp2 llama z3 iv2 m2 varlen bf16"},
};

// What covering lists cannot promise in one rank's words: words of a list of this job's size.
static CaseList named_list(const NamedCase *named, size_t count, int world) {
    CaseList list = {0};
    for (size_t i = 0; i < count; i++) {
        const Case c = case_parse(named[i].name);
        if (named[i].world == world && case_legal(&c, world)) case_add(&list, &c);
        check(named[i].world != world || case_legal(&c, world), "%s: not legal", named[i].name);
    }
    return list;
}

// Every legal layout; what goes with everything is drawn.
static CaseList full_list(int world) {
    bool wanted[AXES_LEGAL];
    for (int a = 0; a < AXES_LEGAL; a++) wanted[a] = a != AXIS_BUCKET;
    CaseList list = case_product(world, wanted);
    for (int i = 0; i < list.count; i++) {
        for (int a = AXES_LEGAL; a < AXES_COVERED; a++) {
            list.cases[i].at[a] = (int)(rng_mix((uint64_t)(i * AXES + a)) % (uint64_t)case_value_count((Axis)a));
        }
    }
    return list;
}

// The list that rank 0 has made, on every rank.
static void share_list(Comm *comm, CaseList *list) {
    comm_broadcast(comm->world, &list->count, (int64_t)sizeof list->count, COMM_BYTE, 0);
    if (comm->rank != 0) list->cases = base_new((size_t)list->count, sizeof *list->cases);
    comm_broadcast(comm->world, list->cases, (int64_t)sizeof(Case) * list->count, COMM_BYTE, 0);
}

static CaseList covering_list(Comm *comm) {
    CaseList list = {0};
    if (comm->rank == 0) {
        int64_t cells;
        CaseList legal = case_product(comm->size, NULL);
        list = case_covering(comm->size, true, &legal, &cells);
        int illegal = 0;
        for (int i = 0; i < list.count; i++) illegal += !case_legal(&list.cases[i], comm->size);
        check(illegal == 0, "%d layouts of the list are not legal", illegal);
        printf("%d ranks: %d combinations are legal, %d refused; %d layouts cover all %lld pairs and triples of values\n", comm->size, legal.count,
               legal.refused, list.count, (long long)cells);
        free(legal.cases);
    }
    share_list(comm, &list);
    return list;
}

// A communicator of one rank, whatever the launcher has started: made while its variables are out of sight.
static Comm *comm_alone(void) {
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMI_FD", "PMIX_RANK"};
    char *values[5];
    for (int i = 0; i < 5; i++) {
        const char *value = getenv(names[i]);
        values[i] = value != NULL ? base_copy_text(value) : NULL;
        unsetenv(names[i]);
    }
    Comm *comm = comm_init(NULL, NULL);
    for (int i = 0; i < 5; i++) {
        if (values[i] != NULL) setenv(names[i], values[i], 1);
        free(values[i]);
    }
    return comm;
}

// The sums over ranks; the first rank tells them. Returns the exit code.
static int test_finish(Test *test) {
    int64_t sums[2] = {passed_, failed_};
    comm_all_reduce(test->world->world, sums, 2, COMM_I64, COMM_SUM);
    const bool first = test->world->rank == 0;
    for (int k = 0; k < test->count; k++) outcome_free(&test->references[k].outcome);
    free(test->references);
    comm_finish(test->world);
    comm_finish(test->alone);
    passed_ = (int)sums[0], failed_ = (int)sums[1];
    return first ? test_end() : failed_ > 0;
}

static void add_words(CaseList *list, int count, char **words) {
    char name[CASE_NAME] = "";
    for (int i = 0; i < count; i++) snprintf(name + strlen(name), sizeof name - strlen(name), "%s%s", i > 0 ? " " : "", words[i]);
    const Case c = case_parse(name);
    case_add(list, &c);
}

int main(int argc, char **argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    Test test = {.alone = comm_alone()};
    test.world = comm_init(&argc, &argv);
    comm_watchdog(test.world, 120);
    const int ranks = test.world->size;
    const char *word = argc > 1 ? argv[1] : "";
    CaseList list = {0};
    if (strcmp(word, "--bits") == 0) {
        print_bits(&test);
    } else if (strcmp(word, "--full") == 0) {
        list = full_list(ranks);
        test_list(&test, &list, "every layout");
    } else if (argc > 1) {
        add_words(&list, argc - 1, argv + 1);
        if (!case_legal(&list.cases[0], ranks)) die(CODE_USAGE, "not legal on %d ranks", ranks);
        test_list(&test, &list, "one layout");
        test_bits_of(&test, &list.cases[0]);
    } else {
        list = covering_list(test.world);
        test_list(&test, &list, "covering list");
        CaseList wide = named_list(wide_cases, sizeof wide_cases / sizeof wide_cases[0], ranks);
        test_list(&test, &wide, "bf16");
        free(wide.cases);
        test_bits(&test);
    }
    free(list.cases);
    if (test.count > 0 && test.world->rank == 0) {
        printf("worst errors in fp32: gradient %.2g, losses %.2g, norms %.2g; bound 1e-5\n", test.worst_gradient, test.worst_loss, test.worst_norm);
    }
    return test_finish(&test);
}
