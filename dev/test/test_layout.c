// test_layout.c: what every rank of a layout holds: parts tile every tensor, heads and their k/v heads stay together, layers are divided as well
// as they can be, groups are those of the coordinates, impossible layouts are refused by the flag's name.
#include "llmc/layout.h"   // what is tested
#include "dev/test/test.h" // check, test_end

typedef struct {
    int tp, pp, V, dp, zero, group; // group 0: no --shard-group
    bool sp;
} Case;

static Options options_of(const Case *c) {
    Options o = {.tp = c->tp,
                 .pp = c->pp,
                 .virtual_stages = c->V,
                 .sp = c->sp,
                 .zero = c->zero,
                 .shard_group = c->group,
                 .pp_schedule = c->V > 1 ? SCHEDULE_INTERLEAVED : SCHEDULE_1F1B,
                 .overlap = 1,
                 .bucket_mb = 25};
    o.given[OPTION_shard_group] = c->group > 0;
    return o;
}

// Widths that differ from each other, so that a mixed-up one shows.
static ModelConfig model_of(int bits, int64_t layers, int64_t kv_heads, int64_t vocab) {
    return (ModelConfig){.layers = layers,
                         .channels = 20,
                         .heads = 8,
                         .kv_heads = kv_heads,
                         .head_size = 6,
                         .ffn = 24,
                         .vocab = vocab,
                         .max_seq = 7,
                         .norm = bits & 1,
                         .position = bits >> 1 & 1,
                         .activation = bits >> 2 & 1,
                         .tied = bits >> 3 & 1,
                         .qk_norm = bits >> 4 & 1,
                         .bias = bits >> 5,
                         .norm_eps = 1e-5,
                         .rope_theta = 1e4};
}

static char case_text_[128];
static const char *text_of(const Case *c) {
    snprintf(case_text_, sizeof case_text_, "tp %d pp %d V %d dp %d zero %d group %d sp %d", c->tp, c->pp, c->V, c->dp, c->zero, c->group, c->sp);
    return case_text_;
}

// The layouts of all ranks.
static Layout *layouts_of(const ModelConfig *m, const Case *c, int *world) {
    const Options o = options_of(c);
    *world = c->tp * c->pp * c->dp;
    Layout *all = base_new((size_t)*world, sizeof *all);
    for (int r = 0; r < *world; r++) {
        Error error = {0};
        check(layout_create(&all[r], m, &o, *world, r, &error), "%s: %s", text_of(c), error.text);
    }
    return all;
}

// Every element of a tensor is held by one counting rank of a replica; each data-parallel rank holds what its like in replica 0 does; who holds
// an element without counting has a copy of a counting rank's, and sums where it sees only a share of the gradient.
static int64_t tile_faults(const Layout *all, int world, const Tensor *t, int64_t *element_of) {
    int64_t faults = 0;
    char *counted = base_new((size_t)t->elements, 1), *held = base_new((size_t)t->elements, 1);
    const int replica = all[0].mesh.tp * all[0].mesh.pp;
    for (int r = 0; r < world; r++) {
        const Layout *l = &all[r];
        const Part part = layout_part(l, t), like = layout_part(&all[r % replica], t);
        faults += part.held != like.held || part.begin[0] != like.begin[0] || part.begin[1] != like.begin[1] || part.shape[0] != like.shape[0] ||
                  part.shape[1] != like.shape[1] || part.counts != like.counts || part.sum != like.sum || part.elements != like.elements;
        faults += part.elements != (part.held ? part.shape[0] * part.shape[1] : 0) || (part.counts && !part.held);
        if (!part.held) continue;
        for (int axis = 0; axis < 2; axis++) {
            faults += part.begin[axis] < 0 || part.shape[axis] < 1 || part.begin[axis] + part.shape[axis] > t->shape[axis];
        }
        if (r >= replica || faults > 0) continue;
        // element by element: the box by definition against layout_global_element from any place on
        int64_t at = 0;
        for (int64_t row = 0; row < part.shape[0]; row++) {
            for (int64_t column = 0; column < part.shape[1]; column++, at++) {
                const int64_t e = (part.begin[0] + row) * t->shape[1] + part.begin[1] + column;
                element_of[at] = e;
                counted[e] = (char)(counted[e] + part.counts), held[e] = (char)(held[e] + 1);
            }
        }
        for (int64_t from = 0; from < at; from += 1 + at / 5) {
            for (int64_t next = from, run; next < at; next += run) {
                const int64_t e = layout_global_element(t, &part, next, at - next, &run);
                faults += run < 1 || next + run > at;
                if (run < 1 || next + run > at) break;
                for (int64_t k = 0; k < run; k++) faults += element_of[next + k] != e + k;
                faults += next + run < at && element_of[next + run] == e + run; // a run ends only where the elements part
            }
        }
    }
    for (int64_t e = 0; e < t->elements; e++) faults += counted[e] != 1;
    // how many copies there are: of a tensor that is cut, one; of k and v, as many as ranks share a head; of the others, one on each rank of the
    // stage; of a tied embedding on two stages, twice as many
    const bool vocabulary = t->kind == TENSOR_WTE || t->kind == TENSOR_HEAD;
    const bool kv = t->kind == TENSOR_K_WEIGHT || t->kind == TENSOR_V_WEIGHT || t->kind == TENSOR_K_BIAS || t->kind == TENSOR_V_BIAS;
    const int tp = all[0].mesh.tp;
    int copies = kv ? (int)max_i64(1, tp / all[0].config.kv_heads) : vocabulary || t->shard != SHARD_NONE ? 1 : tp;
    if (t->unit == 0 && all[0].config.tied && all[0].mesh.pp > 1) copies *= 2;
    for (int64_t e = 0; e < t->elements; e++) faults += held[e] != copies;
    free(counted);
    free(held);
    return faults;
}

// A rank's rows of q are those of its query heads; its rows of k and v those of the heads that these heads attend to.
static int head_faults(const Layout *l, const Model *model) {
    const ModelConfig *m = &l->config;
    const int64_t HS = m->head_size, group = m->heads / m->kv_heads; // query heads of a k/v head
    const int64_t first = l->mesh.at.tp * (m->heads / l->mesh.tp), count = m->heads / l->mesh.tp;
    const int64_t kv_first = first / group, kv_last = (first + count - 1) / group;
    int faults = l->local.heads != count || l->local.kv_heads != kv_last - kv_first + 1 || l->local.head_size != HS ||
                 l->local.heads % l->local.kv_heads != 0 || l->local.channels != m->channels;
    // the k/v head of a local query head is the one that it has in the whole model
    for (int64_t h = 0; h < count; h++) faults += kv_first + h / (l->local.heads / l->local.kv_heads) != (first + h) / group;
    for (int i = 0; i < model->count; i++) {
        const Tensor *t = &model->tensors[i];
        const Part p = layout_part(l, t);
        if (t->kind == TENSOR_Q_WEIGHT || t->kind == TENSOR_Q_BIAS) faults += p.begin[0] != first * HS || p.shape[0] != count * HS;
        if (t->kind == TENSOR_O_WEIGHT) faults += p.begin[1] != first * HS || p.shape[1] != count * HS || p.shape[0] != m->channels;
        if (t->kind == TENSOR_K_WEIGHT || t->kind == TENSOR_V_WEIGHT || t->kind == TENSOR_K_BIAS || t->kind == TENSOR_V_BIAS) {
            faults += p.begin[0] != kv_first * HS || p.shape[0] != (kv_last - kv_first + 1) * HS;
        }
    }
    return faults;
}

// Whose gradients must be summed over whom: those of replicated parameters that see a rank's own tokens or heads only.
static int sum_faults(const Layout *l, const Model *model) {
    int faults = 0;
    for (int i = 0; i < model->count; i++) {
        const Tensor *t = &model->tensors[i];
        const bool kv = strstr(t->name, "attn.k.") != NULL || strstr(t->name, "attn.v.") != NULL;
        const bool qk_norm = strstr(t->name, "q_norm") != NULL || strstr(t->name, "k_norm") != NULL;
        const bool norm = !qk_norm && strstr(t->name, "norm") != NULL;
        const int tp = l->mesh.tp;
        const GradientSum wanted = kv && tp > l->config.kv_heads            ? GRADIENT_SUM_KV
                                   : tp > 1 && (qk_norm || (norm && l->sp)) ? GRADIENT_SUM_TP
                                                                            : GRADIENT_WHOLE;
        faults += layout_part(l, t).sum != wanted;
    }
    return faults;
}

// Do ranks a and b share a group?
static bool together(const Layout *a, const Layout *b, LayoutGroup group, int run) {
    const MeshAt x = a->mesh.at, y = b->mesh.at;
    const bool tp = x.tp == y.tp, pp = x.pp == y.pp, dp = x.dp == y.dp;
    const int last = a->mesh.pp - 1, shared = (int)max_i64(1, a->mesh.tp / a->config.kv_heads);
    switch (group) {
    case LAYOUT_TP: return pp && dp;
    case LAYOUT_KV: return pp && dp && x.tp / shared == y.tp / shared;
    case LAYOUT_PP: return tp && dp;
    case LAYOUT_DP: return tp && pp;
    case LAYOUT_SHARD: return tp && pp && x.dp / run == y.dp / run;
    case LAYOUT_REPLICA: return tp && pp && x.dp % run == y.dp % run;
    case LAYOUT_EMBEDDING: return tp && dp && (x.pp == 0 || x.pp == last) && (y.pp == 0 || y.pp == last);
    case LAYOUT_GROUPS: break;
    }
    return false;
}

static int group_faults(const Layout *all, int world, const Case *c) {
    int faults = 0, *members = base_new((size_t)world, sizeof *members);
    const int run = c->zero == 0 ? 1 : c->group > 0 ? c->group : c->dp;
    for (int r = 0; r < world; r++) {
        const Layout *l = &all[r];
        faults += l->shards != run || l->replicas != c->dp / run || l->shard != l->mesh.at.dp % run || l->replica != l->mesh.at.dp / run;
        faults += l->sp != (c->sp && c->tp > 1) || l->zero != (run == 1 ? 0 : c->zero);
        for (int g = 0; g < LAYOUT_GROUPS; g++) {
            const int count = layout_members(l, (LayoutGroup)g, members);
            int next = 0;
            faults += count != layout_members(l, (LayoutGroup)g, NULL);
            for (int k = 0; k < world; k++) {
                if (!together(l, &all[k], (LayoutGroup)g, run)) continue;
                faults += next >= count || members[next] != k;
                next++;
            }
            faults += next != count;
        }
        // a rank's place in its groups is its shard and its replica
        const int shards = layout_members(l, LAYOUT_SHARD, members);
        faults += shards != run || members[l->shard] != r;
        faults += layout_members(l, LAYOUT_REPLICA, members) != c->dp / run || members[l->replica] != r;
    }
    free(members);
    return faults;
}

// Chunks, own units, who speaks: against the division of layers.
static int stage_faults(const Layout *all, int world, const Case *c, const Model *model) {
    const int64_t L = model->config.layers;
    const int parts = c->pp * c->V;
    int faults = 0, *holders = base_new((size_t)model->units, sizeof *holders), speakers = 0;
    for (int r = 0; r < world; r++) {
        const Layout *l = &all[r];
        const int stage = r / c->tp % c->pp;
        faults += l->chunk_begin[0] != 0 || l->chunk_begin[parts] != L || layout_virtual_count(l) != parts;
        for (int p = 0; p < parts; p++) {
            faults += l->chunk_begin[p + 1] <= l->chunk_begin[p] || l->chunk_begin[p] != all[0].chunk_begin[p];
        }
        int64_t largest = 0;
        for (int k = 0; k < c->V; k++) {
            const int at = k * c->pp + stage;
            const int64_t first = all[0].chunk_begin[at], layers = all[0].chunk_begin[at + 1] - first;
            faults += layout_first_layer(l, k) != first || layout_chunk_layers(l, k) != layers;
            faults += layout_is_first(l, k) != (stage == 0 && k == 0) || layout_is_last(l, k) != (stage == c->pp - 1 && k == c->V - 1);
            largest = max_i64(largest, layers);
        }
        faults += layout_slot_layers(l) != largest;
        faults += layout_speaks(l) != (stage == c->pp - 1 && r % c->tp == 0);
        speakers += layout_speaks(l);
        if (r >= c->tp * c->pp || r % c->tp != 0) continue;
        for (int u = 0; u < model->units; u++) holders[u] += layout_holds_unit(l, u);
    }
    faults += speakers != c->dp;
    for (int u = 0; u < model->units; u++) faults += holders[u] != (u == 0 && model->config.tied && c->pp > 1 ? 2 : 1);
    free(holders);
    return faults;
}

static void test_parts(void) {
    static const int dps[] = {1, 2, 6};
    int layouts = 0;
    int64_t *element_of = base_new(1 << 16, sizeof *element_of);
    for (int bits = 0; bits < 96; bits++) {
        for (int tp = 1; tp <= 8; tp *= 2) {
            for (int pp = 1; pp <= 4; pp++) {
                for (int V = 1; V <= (pp > 1 ? 2 : 1); V++) {
                    const int random = bits * 31 + tp * 7 + pp * 5 + V; // the other switches turn along
                    const int zero = random % 4, dp = dps[random / 4 % 3];
                    const int group = zero == 0 || dp == 1 ? 0 : (int[]){0, 2, dp}[random / 12 % 3];
                    const Case c = {tp, pp, V, dp, zero, group, random % 2 == 0};
                    const int64_t kv = (int64_t[]){1, 2, 4, 8}[random / 3 % 4], vocab = (int64_t[]){8, 29, 101}[random % 3];
                    const ModelConfig m = model_of(bits, 8 + random % 3, kv, vocab);
                    Model model = model_create(&m);
                    int world;
                    Layout *all = layouts_of(&m, &c, &world);
                    int64_t tiles = 0, smallest = vocab, largest = 0, next = 0;
                    for (int i = 0; i < model.count; i++) tiles += tile_faults(all, world, &model.tensors[i], element_of);
                    int heads = 0, sums = 0;
                    for (int r = 0; r < world; r++) heads += head_faults(&all[r], &model), sums += sum_faults(&all[r], &model);
                    int shares = 0;
                    for (int r = 0; r < tp; r++) {
                        shares += all[r].vocab_begin != next;
                        next += all[r].local.vocab;
                        smallest = min_i64(smallest, all[r].local.vocab), largest = max_i64(largest, all[r].local.vocab);
                    }
                    shares += next != vocab || smallest < 1 || largest > smallest + 1;
                    const int groups = group_faults(all, world, &c), stages = stage_faults(all, world, &c, &model);
                    check(tiles + heads + sums + shares + groups + stages == 0,
                          "%s, model %d, kv %lld, vocabulary %lld: faults: tiles %lld, heads %d, sums %d, shares %d, groups %d, stages %d",
                          text_of(&c), bits, (long long)kv, (long long)vocab, (long long)tiles, heads, sums, shares, groups, stages);
                    for (int r = 0; r < world; r++) {
                        const int64_t N = 16, own = all[r].sp ? N / tp : N;
                        check(layout_own_tokens(&all[r], N) == own && layout_own_first(&all[r], N) == (all[r].sp ? r % tp * own : 0),
                              "%s: own tokens", text_of(&c));
                        layout_free(&all[r]);
                    }
                    free(all);
                    model_free(&model);
                    layouts++;
                }
            }
        }
    }
    free(element_of);
    printf("parts: %d layouts: every element once, heads with their k/v heads, shares of the vocabulary, sums, groups, stages\n", layouts);
}

// The least that the most expensive of `parts` runs can cost, by trying every division.
static double least_cost(int64_t layers, int parts, double head) {
    if (parts == 1) return (double)layers + head;
    double least = INFINITY;
    for (int64_t first = 1; first + parts - 1 <= layers; first++)
        least = fmin(least, fmax((double)first, least_cost(layers - first, parts - 1, head)));
    return least;
}

static void test_division(void) {
    int cases = 0, wrong = 0;
    double worst = 0;
    for (int64_t layers = 1; layers <= 12; layers++) {
        for (int parts = 1; parts <= layers && parts <= 6; parts++) {
            for (int64_t vocab = 16; vocab < 40000; vocab = vocab * 3 + 1) {
                ModelConfig m = model_of(0, layers, 4, vocab);
                const double block = (double)m.channels * (double)(2 * m.heads * m.head_size + 2 * m.kv_heads * m.head_size + 2 * m.ffn);
                const double head = (double)(vocab * m.channels) / block;
                int64_t begin[16];
                layout_divide_layers_(&m, parts, begin);
                double cost = 0;
                for (int p = 0; p < parts; p++) {
                    wrong += begin[p + 1] <= begin[p];
                    cost = fmax(cost, (double)(begin[p + 1] - begin[p]) + (p == parts - 1 ? head : 0));
                    // among equals later stages get more
                    wrong += p > 0 && p < parts - 1 && begin[p + 1] - begin[p] < begin[p] - begin[p - 1];
                }
                wrong += begin[0] != 0 || begin[parts] != layers;
                worst = fmax(worst, cost - least_cost(layers, parts, head));
                cases++;
            }
        }
    }
    check(wrong == 0, "division of layers: %d faults", wrong);
    check_error(worst, 1e-9, "cost of the dearest stage above the least possible");
    // a large head takes layers away from its stage
    const ModelConfig llama = model_preset_config_(model_preset_find("llama3-8b"));
    int64_t begin[5];
    layout_divide_layers_(&llama, 4, begin);
    check(begin[4] - begin[3] < begin[3] - begin[2], "llama3-8b on 4 stages: %lld layers beside the head", (long long)(begin[4] - begin[3]));
    printf("division: %d cases against every possible one\n", cases);
}

static void refused(const ModelConfig *m, Options o, int world, const char *wanted) {
    Layout l;
    Error error = {0};
    const bool created = layout_create(&l, m, &o, world, world - 1, &error);
    check(!created && error.code == CODE_USAGE && strstr(error.text, wanted) != NULL, "got '%s', wanted '%s'", error.text, wanted);
    if (created) layout_free(&l);
}

static void test_refusals(void) {
    const ModelConfig m = model_of(0, 8, 4, 30);
    const Case plain = {1, 1, 1, 1, 0, 0, false};
    Options o = options_of(&plain);
#define REFUSED(change, world, wanted)                                                                                                             \
    do {                                                                                                                                           \
        Options changed = o;                                                                                                                       \
        ModelConfig model = m;                                                                                                                     \
        change;                                                                                                                                    \
        refused(&model, changed, world, wanted);                                                                                                   \
    } while (0)
    REFUSED(changed.tp = 3, 3, "--tp 3: does not divide --heads 8");
    REFUSED((changed.tp = 4, model.kv_heads = 6, model.heads = 12, model.ffn = 48), 4, "--tp 4: wanted a divisor or a multiple of --kv-heads 6");
    REFUSED((changed.tp = 8, model.ffn = 20), 8, "--tp 8: does not divide --ffn 20");
    REFUSED((changed.tp = 8, model.vocab = 7), 8, "--tp 8: more ranks than the vocabulary of 7");
    REFUSED((changed.pp = 9), 9, "--pp 9 x --virtual-stages 1: more stages than the 8 layers");
    REFUSED((changed.pp = 3, changed.virtual_stages = 3, changed.pp_schedule = SCHEDULE_INTERLEAVED), 3, "--pp 3 x --virtual-stages 3");
    REFUSED((changed.tp = 2), 3, "--tp 2: does not divide the number of ranks, 3");
    REFUSED((changed.tp = 2, changed.pp = 2), 6, "--tp 2 x --cp 1 x --pp 2 = 4: does not divide the number of ranks, 6");
    REFUSED((changed.pp = 4), 2, "--pp 4: more than the number of ranks, 2");
    REFUSED((changed.zero = 1, changed.shard_group = 3, changed.given[OPTION_shard_group] = true), 4, "--shard-group 3: does not divide the 4");
    REFUSED((changed.zero = 1, changed.shard_group = 8, changed.given[OPTION_shard_group] = true), 4, "--shard-group 8: does not divide the 4");
    REFUSED((changed.shard_group = 2, changed.given[OPTION_shard_group] = true), 4, "--shard-group: --zero 0 shards nothing");
    REFUSED((changed.zero = 2, changed.given[OPTION_bucket_mb] = true), 4, "--bucket-mb: --zero 2");
    REFUSED((changed.zero = 3, changed.given[OPTION_bucket_mb] = true), 4, "--bucket-mb: --zero 3");
    REFUSED((changed.pp = 2, changed.virtual_stages = 2), 2, "--virtual-stages: got 2, but --pp-schedule 1f1b has one chunk a stage");
    REFUSED((changed.virtual_stages = 2, changed.pp_schedule = SCHEDULE_INTERLEAVED), 2, "--virtual-stages: got 2 with one pipeline stage");
#undef REFUSED
    // what is next to a refusal is accepted
    const Case edges[] = {
        {8, 1, 1, 1, 0, 0, true}, {1, 8, 1, 1, 0, 0, false}, {1, 4, 2, 2, 1, 0, false}, {1, 1, 1, 4, 1, 4, false}, {1, 1, 1, 4, 3, 1, false}};
    for (size_t i = 0; i < sizeof edges / sizeof edges[0]; i++) {
        int world;
        Layout *all = layouts_of(&m, &edges[i], &world);
        for (int r = 0; r < world; r++) layout_free(&all[r]);
        free(all);
    }
    o.zero = 1, o.given[OPTION_bucket_mb] = true;
    Layout l;
    Error error = {0};
    check(layout_create(&l, &m, &o, 4, 0, &error), "--bucket-mb with --zero 1: %s", error.text);
    layout_free(&l);
    printf("refusals: 16, each by its flag\n");
}

int main(void) {
    test_parts();
    test_division();
    test_refusals();
    return test_end();
}
