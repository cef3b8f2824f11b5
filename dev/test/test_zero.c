// test_zero.c: the flat arenas of every rank of a layout: offsets and units, shards that tile, segments, buckets, slots, and the bytes of all of
// it. One process plays every rank in turn; test_zero_ranks.c is what moves between them.
#include "llmc/cpu/memory.h"   // cpu_copy_in
#include "llmc/zero.h"         // what is tested
#include "dev/test/switches.h" // switches_config
#include "dev/test/test.h"     // check, test_end

// A device that counts what is allocated.
typedef struct {
    int live;
    size_t bytes;
} Counts;
static void *alloc_(Device *device, size_t bytes) {
    Counts *counts = device->state;
    counts->live++, counts->bytes += bytes;
    return base_alloc(bytes);
}
static void release_(Device *device, void *pointer) {
    ((Counts *)device->state)->live -= pointer != NULL;
    free(pointer);
}

typedef struct {
    int tp, pp, V, dp, zero, group;
    bool sp;
} Case;

static bool layout_of_(Layout *layout, const ModelConfig *m, const Case *c, int rank) {
    Options o = {.tp = c->tp, .pp = c->pp, .virtual_stages = c->V, .sp = c->sp, .zero = c->zero, .shard_group = c->group, .overlap = 1};
    o.pp_schedule = c->V > 1 ? SCHEDULE_INTERLEAVED : SCHEDULE_1F1B;
    o.given[OPTION_shard_group] = c->group > 0;
    Error error = {0};
    const bool good = layout_create(layout, m, &o, c->tp * c->pp * c->dp, rank, &error);
    check(good, "layout: %s", error.text);
    return good;
}

static char text_[160];
static const char *text_of(const Case *c, int bits, int rank) {
    snprintf(text_, sizeof text_, "model %d, tp %d pp %d V %d dp %d zero %d group %d, rank %d", bits, c->tp, c->pp, c->V, c->dp, c->zero, c->group,
             rank);
    return text_;
}

// Offsets: in the table's order, aligned or joined, nothing but alignment between them; units follow each other and divide evenly.
static int offset_faults(const Zero *z) {
    const Model *model = z->model;
    const int64_t step = (int64_t)z->layout->shards * 32;
    int faults = 0;
    int64_t at = 0;
    for (int u = 0; u < model->units; u++) {
        const ZeroRange range = z->range[u];
        if (!layout_holds_unit(z->layout, u)) {
            faults += range.count != 0;
            for (int i = 0; i < model->count; i++) faults += model->tensors[i].unit == u && z->offset[i] != -1;
            continue;
        }
        faults += range.begin != at || range.count <= 0 || range.count % step != 0;
        int64_t end = range.begin;
        for (int i = 0; i < model->count; i++) {
            const Tensor *t = &model->tensors[i];
            if (t->unit != u) continue;
            const int64_t gap = z->offset[i] - end;
            faults += t->joined ? gap != 0 : z->offset[i] % 32 != 0 || gap < 0 || gap >= 32;
            end = z->offset[i] + layout_part(z->layout, t).elements;
        }
        faults += end > range.begin + range.count || range.begin + range.count - end >= step;
        at = range.begin + range.count;
    }
    return faults + (at != z->elements || z->elements % step != 0);
}

// What the ops get for a unit in memory that holds it whole: q, k, v and gate, up are one matrix each, of this rank's widths.
static int pointer_faults(const Zero *z, int unit, Buffer base) {
    const Model *model = z->model;
    const ModelConfig *m = &z->layout->local;
    Buffer w[TENSOR_KINDS];
    int faults = 0, handed = 0, wanted = 0;
    zero_point_(z, unit, base, w);
    for (int i = 0; i < model->count; i++) {
        if (model->tensors[i].unit != unit) continue;
        wanted++;
        faults += w[model->tensors[i].kind].data != buffer_at(base, z->offset[i] - z->range[unit].begin).data;
    }
    for (int k = 0; k < TENSOR_KINDS; k++) handed += w[k].data != NULL;
    faults += handed != wanted;
    if (unit == 0 || unit == model_head_unit(model)) return faults;
    const int64_t C = m->channels, Q = model_q_width(m), KV = model_kv_width(m);
    faults += buffer_at(w[TENSOR_Q_WEIGHT], Q * C).data != w[TENSOR_K_WEIGHT].data;
    faults += buffer_at(w[TENSOR_K_WEIGHT], KV * C).data != w[TENSOR_V_WEIGHT].data;
    faults += m->bias != BIAS_OFF && buffer_at(w[TENSOR_Q_BIAS], Q + KV).data != w[TENSOR_V_BIAS].data;
    faults += m->activation == ACTIVATION_SWIGLU && buffer_at(w[TENSOR_GATE_WEIGHT], m->ffn * C).data != w[TENSOR_UP_WEIGHT].data;
    return faults;
}

static bool is_at(Buffer buffer, Buffer arena, int64_t element) {
    return arena.data == NULL ? buffer.data == NULL : buffer.data == (char *)arena.data + element * (int64_t)dtype_bytes(arena.dtype);
}

// A rank's shard of every unit: where the arenas are whole, this rank's place in them; else the unit's place in an arena of shards.
static int shard_faults(const Zero *z) {
    const int D = z->layout->shards, stage = z->layout->zero;
    int faults = 0;
    for (int u = 0; u < z->model->units; u++) {
        if (z->range[u].count == 0) continue;
        const ZeroShard s = zero_shard(z, u);
        const int64_t count = z->range[u].count / D, whole = z->range[u].begin + z->layout->shard * count, shard = z->range[u].begin / D;
        faults += s.count != count || !is_at(s.param, z->param, stage == 3 ? shard : whole) || !is_at(s.grad, z->grad, stage >= 2 ? shard : whole);
        faults += !is_at(s.master, z->master, shard) || !is_at(s.adam_m, z->adam_m, shard) || !is_at(s.adam_v, z->adam_v, shard);
        faults += (uintptr_t)s.param.data % 64 != 0 || (uintptr_t)s.grad.data % 64 != 0;
        faults += pointer_faults(z, u, z->param);
    }
    return faults;
}

// Segments are the pieces of tensors in a shard, with the table's decay; `counted` those that this rank answers for. A tensor's pieces of all
// shards tile its part: covered[i] adds them up, all from the left; counted_sum what counts.
static int segment_faults(const Zero *z, int64_t *covered, int64_t *counted_sum, int *both) {
    int faults = 0;
    for (int u = 0; u < z->model->units; u++) {
        if (z->range[u].count == 0) {
            faults += z->segment_first[u + 1] != z->segment_first[u] || z->counted_first[u + 1] != z->counted_first[u];
            continue;
        }
        const ZeroShard s = zero_shard(z, u);
        int64_t next = 0, next_counted = 0, at = 0;
        bool decayed = false, kept = false;
        for (int i = 0; i < z->model->count; i++) {
            const Tensor *t = &z->model->tensors[i];
            if (t->unit != u) continue;
            const ZeroPiece p = zero_piece(z, i);
            if (p.from == p.to) continue;
            // the piece by the definition of a shard: elements shard*count.. of the unit
            const int64_t in_unit = z->offset[i] - z->range[u].begin + p.from;
            faults += in_unit != z->layout->shard * s.count + p.at || p.at < at || p.at + p.to - p.from > s.count;
            faults += p.from != covered[i] || p.to > z->part[i].elements;
            covered[i] = p.to;
            at = p.at + p.to - p.from;
            faults += next >= s.segment_count;
            if (faults > 0) return faults;
            const Segment *g = &s.segments[next++];
            faults += g->begin != p.at || g->count != p.to - p.from || g->decay != (t->rank == 2);
            decayed |= g->decay, kept |= !g->decay;
            if (!z->part[i].counts || z->layout->replica != 0) continue;
            faults += next_counted >= s.counted_count;
            if (faults > 0) return faults;
            g = &s.counted[next_counted++];
            faults += g->begin != p.at || g->count != p.to - p.from;
            *counted_sum += g->count;
        }
        faults += next != s.segment_count || next_counted != s.counted_count;
        *both += decayed && kept;
    }
    return faults;
}

// Buckets: from the last unit down, every held unit in one; none larger than it may be unless it is one unit; none that the next unit could join.
static int bucket_faults(const Zero *z) {
    const bool single = z->layout->zero >= 2, tie = z->layout->config.tied && z->layout->mesh.pp > 1;
    int faults = 0, *times = base_new((size_t)z->model->units, sizeof *times);
    for (int b = 0; b < z->bucket_count; b++) {
        const ZeroBucket *k = &z->buckets[b];
        double bytes = 0;
        int units = 0;
        for (int u = k->first; u <= k->last; u++) {
            bytes += (double)z->range[u].count * 4;
            units += z->range[u].count > 0;
            times[u] += z->range[u].count > 0;
            faults += z->bucket_of[u] != b;
        }
        faults += units < 1 || z->range[k->first].count == 0 || z->range[k->last].count == 0;
        faults += units > 1 && (single || bytes > z->config.bucket_bytes || (tie && k->first == 0));
        faults += zero_bucket_elements_(z->range, k) * 4 != (int64_t)bytes;
        if (b == 0) continue;
        faults += k->last >= z->buckets[b - 1].first;
        double before = 0;
        for (int u = z->buckets[b - 1].first; u <= z->buckets[b - 1].last; u++) before += (double)z->range[u].count * 4;
        const bool fits = before + (double)z->range[k->last].count * 4 <= z->config.bucket_bytes;
        faults += fits && !single && !(tie && k->last == 0);
    }
    for (int u = 0; u < z->model->units; u++) faults += times[u] != (z->range[u].count > 0);
    free(times);
    return faults;
}

// Slots and wires: apart from each other, aligned, inside their memory, large enough for what they hold.
static int slot_faults(const Zero *z) {
    const int stage = z->layout->zero, head = model_head_unit(z->model);
    const bool wires = z->config.reduce_bf16 && z->layout->shards * z->layout->replicas > 1;
    int64_t largest = 0, bucket = 0;
    int faults = 0, blocks = 0;
    for (int u = 1; u < head; u++) largest = max_i64(largest, z->range[u].count), blocks += z->range[u].count > 0;
    for (int b = 0; b < z->bucket_count; b++) bucket = max_i64(bucket, zero_bucket_elements_(z->range, &z->buckets[b]));
    faults += z->block_slots != min_i64(z->config.overlap ? 2 : 1, blocks);
    const char *at = z->exchange_slots;
    for (int kind = 0; kind < 3; kind++) { // parameters, gradients, wires
        const bool slots = kind == 0 ? stage == 3 : stage >= 2;
        for (int s = 0; s < 2 + ZERO_BLOCK_SLOTS; s++) {
            const Buffer buffer = kind == 0 ? z->param_slots[s].buffer : kind == 1 ? z->grad_slots[s].buffer : z->wires[s];
            int64_t count = s == 0 ? z->range[0].count : s == 1 ? z->range[head].count : largest;
            bool wanted = slots && s < 2 + z->block_slots;
            if (kind == 2 && stage < 2) wanted = s < ZERO_WIRES, count = bucket;
            if (kind == 2) wanted = wanted && wires;
            faults += (buffer.data != NULL) != wanted;
            if (!wanted) continue;
            faults += buffer.data != (const void *)at || (uintptr_t)at % 64 != 0;
            faults += buffer.dtype != (kind == 0 ? z->config.dtype : kind == 1 ? DTYPE_F32 : DTYPE_BF16);
            at += (size_t)count * dtype_bytes(buffer.dtype);
        }
    }
    return faults + (at != (const char *)z->exchange_slots + z->bytes.buffer_bytes);
}

static void test_ranks(Comm *comm) {
    static const Case cases[] = {{1, 1, 1, 1, 0, 0, 0}, {1, 1, 1, 1, 3, 0, 0},  {1, 1, 1, 3, 1, 0, 0}, {1, 1, 1, 5, 2, 0, 0},
                                 {1, 1, 1, 4, 3, 0, 0}, {2, 1, 1, 1, 0, 0, 1},  {4, 1, 1, 2, 2, 0, 1}, {1, 2, 1, 2, 1, 0, 0},
                                 {1, 3, 1, 1, 0, 0, 0}, {2, 2, 1, 2, 3, 0, 1},  {1, 2, 2, 2, 1, 0, 0}, {1, 2, 2, 3, 3, 0, 0},
                                 {1, 1, 1, 6, 1, 2, 0}, {1, 1, 1, 6, 2, 3, 0},  {2, 2, 1, 4, 3, 2, 0}, {4, 2, 1, 2, 1, 0, 1},
                                 {1, 5, 1, 2, 2, 0, 0}, {1, 1, 1, 64, 3, 0, 0}, {1, 1, 1, 2, 0, 0, 0}, {4, 1, 1, 4, 0, 0, 0}};
    enum { CASES = sizeof cases / sizeof cases[0] };
    static const double bucket_bytes[] = {1, 60e3, 150e3, 1e9};
    Counts counts = {0, 0};
    Device device = {.name = "test", .state = &counts, .alloc = alloc_, .release = release_, .copy_in = cpu_copy_in};
    int ranks = 0, both = 0;
    for (int bits = 0; bits < 192; bits++) {
        for (int k = bits % 3; k < CASES; k += 3) {
            const Case *c = &cases[k];
            const int world = c->tp * c->pp * c->dp, run = c->zero == 0 ? 1 : c->group > 0 ? c->group : c->dp;
            const ModelConfig config = switches_config(bits);
            Model model = model_create(&config);
            const int turn = bits / 3 + k;
            const ZeroConfig settings = {turn % 2 ? DTYPE_BF16 : DTYPE_F32, turn / 2 % 2, turn / 4 % 2, bucket_bytes[turn / 8 % 4], false, false};
            int64_t counted_sum = 0;
            for (int tp = 0; tp < c->tp * c->pp; tp++) { // members of a shard group one after the other: their pieces follow each other
                for (int d = 0; d < c->dp; d++) {
                    const int rank = tp + c->tp * c->pp * d;
                    static int64_t covered[512];
                    if (d % run == 0) memset(covered, 0, sizeof covered);
                    Layout layout;
                    if (!layout_of_(&layout, &config, c, rank)) return;
                    counts.bytes = 0;
                    Zero z = zero_create(&device, comm, NULL, &model, &layout, &settings);
                    const ZeroBytes bytes = zero_bytes(&model, &layout, &settings);
                    check(memcmp(&bytes, &z.bytes, sizeof bytes) == 0, "%s: bytes of the plan are those allocated", text_of(c, bits, rank));
                    check(counts.bytes == bytes.master_bytes + bytes.optim_bytes + 2 * sizeof(Segment) * (size_t)model.count,
                          "%s: the device gave %zu bytes", text_of(c, bits, rank), counts.bytes);
                    const size_t n = (size_t)z.elements, own = n / (size_t)run, width = settings.dtype == DTYPE_BF16 ? 2 : 4;
                    check(bytes.param_bytes == (c->zero == 3 ? own : n) * width && bytes.grad_bytes == (c->zero >= 2 ? own : n) * 4 &&
                              bytes.optim_bytes == own * 8 && bytes.master_bytes == (width == 2 ? own * 4 : 0),
                          "%s: what is whole and what a shard", text_of(c, bits, rank));
                    check((z.master.data == NULL) == (width == 4) && z.param.dtype == settings.dtype && z.grad.dtype == DTYPE_F32,
                          "%s: master weights for bf16 only", text_of(c, bits, rank));
                    const int offsets = offset_faults(&z), shards = shard_faults(&z), buckets = bucket_faults(&z), slots = slot_faults(&z);
                    const int segments = segment_faults(&z, covered, &counted_sum, &both);
                    check(offsets + shards + buckets + slots + segments == 0,
                          "%s: faults: offsets %d, shards %d, buckets %d, slots %d, segments %d", text_of(c, bits, rank), offsets, shards, buckets,
                          slots, segments);
                    if (d % run == run - 1) {
                        int holes = 0;
                        for (int i = 0; i < model.count; i++) holes += covered[i] != z.part[i].elements;
                        check(holes == 0, "%s: the pieces of a shard group leave %d tensors unfinished", text_of(c, bits, rank), holes);
                    }
                    // the last byte of everything is there
                    memset(z.param.data, 1, bytes.param_bytes), memset(z.grad.data, 1, bytes.grad_bytes);
                    memset(z.exchange_slots, 1, bytes.buffer_bytes), memset(z.adam_m.data, 1, bytes.optim_bytes / 2);
                    memset(z.adam_v.data, 1, bytes.optim_bytes / 2);
                    zero_free(&z);
                    layout_free(&layout);
                    check(counts.live == 0, "%s: %d allocations are left", text_of(c, bits, rank), counts.live);
                    ranks++;
                }
            }
            check(counted_sum == model_parameters(&model), "%s: %lld elements count in norms, wanted %lld", text_of(c, bits, world),
                  (long long)counted_sum, (long long)model_parameters(&model));
            model_free(&model);
        }
    }
    check(both > 1000, "%d shards hold decayed and undecayed elements", both);
    printf("ranks: %d ranks of %d layouts: offsets, shards, segments, buckets, slots, bytes; %d units' shards span decayed and undecayed\n", ranks,
           CASES, both);
}

// Bytes per parameter with N shards: fp32 gradients, both moments, fp32 master copies of bf16.
static double per_parameter(int stage, bool bf16, double n) {
    if (bf16) return stage == 0 ? 18 : stage == 1 ? 6 + 12 / n : stage == 2 ? 2 + 16 / n : 18 / n;
    return stage == 0 ? 16 : stage == 1 ? 8 + 8 / n : stage == 2 ? 4 + 12 / n : 16 / n;
}

static void test_big(void) {
    static const char *const names[] = {"gpt-nano", "gpt2-124m", "llama2-7b", "llama3-8b", "llama2-70b", "llama3-405b"};
    double worst = 0;
    for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
        const ModelConfig config = model_preset_config_(model_preset_find(names[k]));
        Model model = model_create(&config);
        int64_t *offset = base_new((size_t)model.count, sizeof *offset);
        ZeroRange *range = base_new((size_t)model.units, sizeof *range);
        const double parameters = (double)model_parameters(&model);
        for (int stage = 0; stage < 4; stage++) {
            for (int n = 1; n <= 64; n *= 4) {
                const Case c = {1, 1, 1, n, stage, 0, false};
                Layout layout;
                if (!layout_of_(&layout, &config, &c, n - 1)) return;
                const int64_t elements = zero_layout(&model, &layout, offset, range);
                const ZeroRange *head = &range[model.units - 1];
                check(zero_layout(&model, &layout, NULL, NULL) == elements && head->begin + head->count == elements, "%s: the head ends the arena",
                      names[k]);
                if (k >= 3) check(offset[model.count - 1] > (int64_t)1 << 32, "%s: the last offset passes 2^32", names[k]);
                for (int bf16 = 0; bf16 < 2; bf16++) {
                    const ZeroConfig settings = {bf16 ? DTYPE_BF16 : DTYPE_F32, true, false, 25e6, false, false};
                    const ZeroBytes b = zero_bytes(&model, &layout, &settings);
                    const double sum = (double)b.param_bytes + (double)b.master_bytes + (double)b.grad_bytes + (double)b.optim_bytes;
                    worst = fmax(worst, fabs(sum / parameters / per_parameter(stage, bf16, n) - 1));
                    // slots: embedding, head and two blocks, as gradients, and in stage 3 also as parameters
                    int64_t block = 0;
                    for (int u = 1; u < model.units - 1; u++) block = max_i64(block, range[u].count);
                    const size_t slot = (size_t)(range[0].count + head->count + 2 * block);
                    check(b.buffer_bytes == (stage < 2 || n == 1 ? 0 : slot * 4 + (stage == 3 ? slot * (bf16 ? 2 : 4) : 0)),
                          "%s, zero %d: %zu bytes of slots", names[k], stage, b.buffer_bytes);
                }
                layout_free(&layout);
            }
        }
        // 70B and 405B as they are trained: tp 8, pp 4 or 16: the parts of a replica are the whole, and copies of what is not cut
        if (k >= 4) {
            const Case c = {8, k == 4 ? 4 : 16, 1, 16, 1, 0, true};
            int64_t sum = 0;
            for (int r = 0; r < c.tp * c.pp; r++) {
                Layout layout;
                if (!layout_of_(&layout, &config, &c, r)) return;
                sum += zero_layout(&model, &layout, NULL, NULL);
                layout_free(&layout);
            }
            worst = fmax(worst, fabs((double)sum / parameters - 1));
        }
        free(offset);
        free(range);
        model_free(&model);
    }
    check_error(worst, 0.05, "bytes per parameter against 18, 6+12/N, 2+16/N, 18/N; 16, ...");
}

int main(void) {
    Comm *comm = comm_init(NULL, NULL);
    test_ranks(comm);
    test_big();
    comm_finish(comm);
    return test_end();
}
