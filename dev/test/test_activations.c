// test_activations.c: the arena of activations: every buffer has the room that its shape comment names, none overlaps another, counting without
// memory gives the same bytes, sequence parallelism makes smaller what it says.
#include "llmc/activations.h" // what is tested
#include "dev/test/test.h"    // check, test_end

typedef struct {
    uintptr_t at;
    size_t bytes;
    const char *name;
} Place;

typedef struct {
    Place *places;
    int count, faults;
    const char *first; // fault
} Walk;

// A buffer that must be there, alone in its memory, or must not.
static void walk(Walk *w, const char *name, bool wanted, Buffer buffer, int64_t elements, Dtype dtype) {
    const bool good = (buffer.data != NULL) == wanted && (!wanted || buffer.dtype == dtype) && (uintptr_t)buffer.data % 64 == 0;
    if (!good && w->faults++ == 0) w->first = name;
    if (wanted) w->places[w->count++] = (Place){(uintptr_t)buffer.data, (size_t)elements * dtype_bytes(dtype), name};
}

static int by_address(const void *a, const void *b) {
    const Place *x = a, *y = b;
    return (x->at > y->at) - (x->at < y->at);
}

static void walk_block(Walk *w, const BlockActs *b, const ModelConfig *m, Dtype D, int64_t N, int64_t S, bool first) {
    const int64_t C = m->channels, QKV = (m->heads + 2 * m->kv_heads) * m->head_size, fc = m->activation == ACTIVATION_SWIGLU ? 2 * m->ffn : m->ffn;
    walk(w, "in", !first, b->in, S * C, D);
    walk(w, "mean1", true, b->mean1, S, DTYPE_F32);
    walk(w, "rstd1", true, b->rstd1, S, DTYPE_F32);
    walk(w, "norm1", true, b->norm1, N * C, D);
    walk(w, "qkv", true, b->qkv, N * QKV, D);
    if (m->qk_norm) walk(w, "qkv_raw", true, b->qkv_raw, N * QKV, D);
    if (!m->qk_norm && b->qkv_raw.data != b->qkv.data && w->faults++ == 0) w->first = "qkv_raw";
    walk(w, "qk_rstd", m->qk_norm, b->qk_rstd, N * (m->heads + m->kv_heads), DTYPE_F32);
    walk(w, "lse", true, b->lse, m->heads * N, DTYPE_F32);
    walk(w, "att", true, b->att, N * m->heads * m->head_size, D);
    walk(w, "mid", true, b->mid, S * C, D);
    walk(w, "mean2", true, b->mean2, S, DTYPE_F32);
    walk(w, "rstd2", true, b->rstd2, S, DTYPE_F32);
    walk(w, "norm2", true, b->norm2, N * C, D);
    walk(w, "fc", true, b->fc, N * fc, D);
    walk(w, "act", true, b->act, N * m->ffn, D);
}

// Gradients of a block: `whole` buffers for the branches' gradients, each its own in a stash.
static void walk_grads(Walk *w, const BlockGrads *g, const ModelConfig *m, Dtype D, int64_t N, bool whole, bool stash) {
    const int64_t C = m->channels, QKV = (m->heads + 2 * m->kv_heads) * m->head_size, fc = m->activation == ACTIVATION_SWIGLU ? 2 * m->ffn : m->ffn;
    walk(w, "dmlp", whole, g->dmlp, N * C, D);
    if (stash) walk(w, "datt_out", true, g->datt_out, N * C, D);
    if (!stash && g->datt_out.data != g->dmlp.data && w->faults++ == 0) w->first = "datt_out";
    walk(w, "dfc", true, g->dfc, N * fc, D);
    walk(w, "dqkv", true, g->dqkv, N * QKV, D);
    for (int i = 0; i < 6; i++) walk(w, "norms", stash, g->norms[i], i < 4 ? C : m->head_size, DTYPE_F32);
}

typedef struct {
    size_t kept, slot, boundary, head, scratch;
} Sizes;

static size_t rounded(const Walk *w, int from) {
    size_t bytes = 0;
    for (int i = from; i < w->count; i++) bytes += (w->places[i].bytes + 63) / 64 * 64;
    return bytes;
}

static Sizes test_layout(const Layout *l, const ActivationShape *shape, const char *text) {
    const ModelConfig *m = &l->local;
    const Dtype D = shape->dtype;
    const bool head = l->mesh.at.pp == l->mesh.pp - 1, embedding = l->mesh.at.pp == 0, sp = l->sp;
    const int tp = l->mesh.tp;
    const int64_t N = sp ? (shape->micro_batch * shape->seq + tp - 1) / tp * tp : shape->micro_batch * shape->seq, S = sp ? N / tp : N;
    const int64_t C = m->channels, layers = layout_slot_layers(l), row = (m->vocab + 63) / 64 * 64; // of logits
    Activations a, counted = {0};
    activations_create(&a, l, shape);
    const size_t bytes = activations_layout(&counted, NULL, l, shape);
    char *arena = base_alloc(bytes);
    check(activations_layout(&a, arena, l, shape) == bytes && activations_layout(&a, NULL, l, shape) == bytes, "%s: counted and laid out alike",
          text);
    (void)activations_layout(&a, arena, l, shape); // the count above has emptied what it found
    check(a.kept_bytes == counted.kept_bytes && a.head_bytes == counted.head_bytes && a.boundary_bytes == counted.boundary_bytes &&
              a.scratch_bytes == counted.scratch_bytes && a.capacity == N && counted.capacity == N && a.chunk == counted.chunk,
          "%s: by purpose alike", text);
    Walk w = {.places = base_new((size_t)(shape->slots + shape->stashes + 1) * (size_t)(layers * 16 + 8) + 256, sizeof(Place))};
    Sizes sizes = {0};
    for (int i = 0; i < shape->slots; i++) {
        const ChunkActs *slot = &a.slots[i];
        walk(&w, "embedding", embedding, slot->embedding, S * C, D);
        for (int64_t k = 0; k < layers; k++) walk_block(&w, &slot->blocks[k], m, D, N, S, k == 0);
        walk(&w, "last", true, slot->last, S * C, D);
        walk(&w, "mean", head, slot->mean, S, DTYPE_F32);
        walk(&w, "rstd", head, slot->rstd, S, DTYPE_F32);
        walk(&w, "norm", head, slot->norm, N * C, D);
        if (i == 0) sizes.slot = rounded(&w, 0);
    }
    const size_t slots_bytes = rounded(&w, 0);
    check(slots_bytes == sizes.slot * (size_t)shape->slots, "%s: all slots are alike", text);
    for (int i = 0; i < shape->stashes; i++) {
        for (int64_t k = 0; k < layers; k++) walk_grads(&w, &a.stashes[i][k], m, D, N, true, true);
    }
    sizes.kept = rounded(&w, 0);
    int mark = w.count;
    for (int i = 0; i < shape->inputs; i++) walk(&w, "inputs", true, a.inputs[i], S * C, D);
    for (int i = 0; i < shape->gradients; i++) walk(&w, "gradients", true, a.gradients[i], S * C, D);
    sizes.boundary = rounded(&w, mark), mark = w.count;
    walk(&w, "losses", true, a.losses, N, DTYPE_F32);
    walk(&w, "logits", head, a.logits, a.chunk * row, D);
    check(!head || a.logits.row == row, "%s: rows of logits are %lld elements apart, wanted %lld", text, (long long)a.logits.row, (long long)row);
    walk(&w, "stats", head && tp > 1, a.stats, a.chunk * 3, DTYPE_F32);
    walk(&w, "all_stats", head && tp > 1, a.all_stats, tp * a.chunk * 3, DTYPE_F32);
    sizes.head = rounded(&w, mark), mark = w.count;
    walk(&w, "branch", true, a.branch, N * C, D);
    if (shape->stashes == 0) walk_grads(&w, &a.grads, m, D, N, m->dropout > 0 || sp, false);
    walk(&w, "dnorm", true, a.dnorm, N * C, D);
    walk(&w, "datt", true, a.datt, N * m->heads * m->head_size, D);
    walk(&w, "delta", true, a.delta, m->heads * N, DTYPE_F32);
    walk(&w, "dact", m->activation == ACTIVATION_SWIGLU, a.dact, N * m->ffn, D);
    walk(&w, "ids", true, a.ids, N, DTYPE_I32);
    walk(&w, "targets", true, a.targets, N, DTYPE_I32);
    walk(&w, "positions", true, a.positions, N, DTYPE_I32);
    walk(&w, "token_index", true, a.token_index, N, DTYPE_I32);
    walk(&w, "cu_seqlens", true, a.cu_seqlens, N + 1, DTYPE_I32);
    walk(&w, "rope", m->position == POSITION_ROPE, a.rope, shape->seq * m->head_size, DTYPE_F32);
    sizes.scratch = rounded(&w, mark);
    check(w.faults == 0, "%s: %d buffers are missing, too many, or of the wrong type, first %s", text, w.faults, w.first);
    check(sizes.kept == a.kept_bytes && sizes.boundary == a.boundary_bytes && sizes.head == a.head_bytes && sizes.scratch == a.scratch_bytes &&
              rounded(&w, 0) == bytes,
          "%s: kept %zu (got %zu), messages %zu (%zu), head %zu (%zu), scratch %zu (%zu)", text, sizes.kept, a.kept_bytes, sizes.boundary,
          a.boundary_bytes, sizes.head, a.head_bytes, sizes.scratch, a.scratch_bytes);
    qsort(w.places, (size_t)w.count, sizeof *w.places, by_address);
    int overlaps = 0;
    const char *where = "";
    for (int i = 0; i < w.count; i++) {
        const uintptr_t end = i + 1 < w.count ? w.places[i + 1].at : (uintptr_t)arena + bytes;
        const bool good = w.places[i].at >= (uintptr_t)arena && w.places[i].at + w.places[i].bytes <= end;
        if (!good && overlaps++ == 0) where = w.places[i].name;
    }
    check(overlaps == 0, "%s: %d of %d buffers reach into the next, first %s", text, overlaps, w.count, where);
    free(w.places);
    free(arena);
    activations_free(&a);
    return sizes;
}

static void test_shapes(void) {
    int shapes = 0;
    for (int bits = 0; bits < 64; bits++) {
        const ModelConfig m = {.layers = 7,
                               .channels = 24,
                               .heads = 4,
                               .kv_heads = bits & 1 ? 2 : 4,
                               .head_size = 5,
                               .ffn = 28,
                               .vocab = 97,
                               .max_seq = 11,
                               .norm = bits >> 1 & 1,
                               .position = bits >> 2 & 1,
                               .activation = bits >> 3 & 1,
                               .tied = bits >> 4 & 1,
                               .qk_norm = bits >> 5 & 1,
                               .dropout = bits % 3 == 0 ? 0.1 : 0};
        for (int turn = 0; turn < 24; turn++) {
            const int tp = 1 << turn % 3, pp = 1 + turn / 3 % 4, kind = (turn + bits) % SCHEDULE_KINDS,
                      V = kind == SCHEDULE_INTERLEAVED && pp == 3 ? 2 : 1;
            Options o = {.tp = tp, .pp = pp, .virtual_stages = V, .sp = turn / 12, .pp_schedule = kind};
            for (int stage = 0; stage < pp; stage++) {
                Layout l;
                Schedule s;
                Error error = {0};
                const int M = 1 + (turn + bits) % 5;
                check(layout_create(&l, &m, &o, tp * pp, tp * stage + (turn + stage) % tp, &error), "%s", error.text);
                const ScheduleShape shape = {(ScheduleKind)kind, pp, M, V};
                check(schedule_build(&s, &shape, stage, &error), "%s", error.text);
                const ActivationShape sizes = {turn & 1 ? DTYPE_BF16 : DTYPE_F32, 1 + bits % 3, 11, s.slots, s.inputs, s.gradients, s.stashes};
                char text[128];
                snprintf(text, sizeof text, "model %d, tp %d, pp %d, V %d, %s, sp %d, stage %d", bits, tp, pp, V, schedule_kind_names[kind], l.sp,
                         stage);
                const Sizes got = test_layout(&l, &sizes, text);
                check((sizes.stashes > 0) == (kind == SCHEDULE_ZB) && got.kept >= got.slot * (size_t)s.slots &&
                          (got.kept > got.slot * (size_t)s.slots) == (kind == SCHEDULE_ZB),
                      "%s: stashes where the parts of backward are apart", text);
                schedule_free(&s);
                layout_free(&l);
                shapes++;
            }
        }
    }
    printf("shapes: %d stages of layouts and schedules: every buffer, none overlaps, counted bytes are those laid out\n", shapes);
}

// With sequence parallelism the residual stream and what norms save shrink to 1/tp, and nothing else of what is kept; messages too. Scratch grows
// by the gradient of a branch, which then cannot be the residual stream's own.
static void test_sequence_parallel(void) {
    const ModelConfig m = model_preset_config_(model_preset_find("gpt2-124m"));
    for (int bf16 = 0; bf16 < 2; bf16++) {
        Sizes sizes[2];
        const int64_t tp = 4, N = 2 * 64, C = 768, L = 12, D = bf16 ? 2 : 4;
        for (int sp = 0; sp < 2; sp++) {
            Options o = {.tp = tp, .pp = 1, .virtual_stages = 1, .sp = sp, .pp_schedule = SCHEDULE_1F1B};
            Layout l;
            Error error = {0};
            check(layout_create(&l, &m, &o, (int)tp, 1, &error), "%s", error.text);
            const ActivationShape shape = {bf16 ? DTYPE_BF16 : DTYPE_F32, 2, 64, 1, 0, 1, 0};
            sizes[sp] = test_layout(&l, &shape, sp ? "gpt2-124m with sp" : "gpt2-124m without sp");
            layout_free(&l);
        }
        const int64_t tokens = N - N / tp, streams = 2 * L + 1; // in and mid of every block but the first's in, embedding, last
        const int64_t kept = tokens * (streams * C * D + (4 * L + 2) * 4);
        check((int64_t)(sizes[0].kept - sizes[1].kept) == kept, "kept: %lld bytes less, wanted %lld", (long long)(sizes[0].kept - sizes[1].kept),
              (long long)kept);
        check((int64_t)(sizes[0].boundary - sizes[1].boundary) == tokens * C * D && sizes[0].head == sizes[1].head,
              "gradient of the residual stream");
        check((int64_t)(sizes[1].scratch - sizes[0].scratch) == N * C * D, "scratch: the gradient of a branch");
    }
    // tokens that tp does not divide are rounded up; a rank has its share
    Options o = {.tp = 4, .pp = 1, .virtual_stages = 1, .sp = 1, .pp_schedule = SCHEDULE_1F1B};
    Layout l;
    Error error = {0};
    check(layout_create(&l, &m, &o, 4, 3, &error) && activations_capacity(&l, 3, 7) == 24 && layout_own_tokens(&l, 24) == 6 &&
              layout_own_first(&l, 24) == 18,
          "21 tokens are 24 for 4 ranks");
    layout_free(&l);
    o.sp = 0;
    check(layout_create(&l, &m, &o, 4, 3, &error) && activations_capacity(&l, 3, 7) == 21 && layout_own_first(&l, 21) == 0, "without sp 21");
    layout_free(&l);
    printf("sequence parallelism: what it saves, to the byte\n");
}

// Logits of a chunk of tokens: all of N in equal chunks of 64s, about 256 MiB at most.
static void test_chunks(void) {
    int wrong = 0, cases = 0;
    for (int64_t N = 1; N < 300000; N = N * 5 / 3 + 1) {
        for (int64_t V = 2; V < 300000; V = V * 3 + 1) {
            const int64_t chunk = activations_chunk(N, V), chunks = ceil_div(N, chunk);
            wrong += chunk < 1 || chunk > N || (chunk < N && chunk % 64 != 0) || chunks * chunk - N >= 64 * chunks + 64;
            wrong += chunk > 64 && (chunk - 63) * V > (int64_t)1 << 26;
            cases++;
        }
    }
    check(wrong == 0, "%d of %d chunks of logits are wrong", wrong, cases);
    // 70B on paper: beyond 2^31 elements and bytes
    const ModelConfig m = model_preset_config_(model_preset_find("llama2-70b"));
    Options o = {.tp = 1, .pp = 1, .virtual_stages = 1, .pp_schedule = SCHEDULE_GPIPE};
    Layout l;
    Error error = {0};
    check(layout_create(&l, &m, &o, 1, 0, &error), "%s", error.text);
    Activations a = {0};
    ActivationShape shape = {DTYPE_BF16, 32, 4096, 64, 0, 1, 0};
    const size_t many = activations_layout(&a, NULL, &l, &shape);
    const size_t kept = a.kept_bytes;
    shape.slots = 1;
    const size_t one = activations_layout(&a, NULL, &l, &shape);
    const double C = 8192, QKV = 10240, FF = 28672, N = 32 * 4096, L = 80;
    const double block = N * 2 * (4 * C + QKV + C + 3 * FF) + N * 4 * (4 + 64); // in, norm1, mid, norm2; qkv; att; gate, up, act; statistics
    check(kept == a.kept_bytes * 64 && many - one == 63 * a.kept_bytes, "64 slots are 64 times one");
    check_error(fabs((double)a.kept_bytes / (L * block) - 1), 0.02, "llama2-70b, 131072 tokens: kept bytes against the formula");
    layout_free(&l);
}

int main(void) {
    test_shapes();
    test_sequence_parallel();
    test_chunks();
    return test_end();
}
