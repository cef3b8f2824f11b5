// test_zero_ranks.c: what moves between ranks that share or copy parameters (zero_comm.h), without a model: every rank brings known gradients, the
// shards must hold the exact sums; parameters that owners change must be everywhere after zero_publish. Runs on any number of ranks: alone, or
// under mpirun from dev/test/zero.sh.
#include "llmc/cpu/cast.h"   // cpu_cast, cpu_accumulate
#include "llmc/cpu/memory.h" // cpu_alloc, cpu_copy_in
#include "llmc/zero_comm.h"  // what is tested
#include "dev/test/test.h"   // check

enum { MICROBATCHES = 3 };

typedef struct {
    int tp, pp, V, zero, group;
    bool sp;
    int64_t kv_heads;
} Case;

typedef struct {
    Model model;
    Layout layout;
    CommGroup *groups[LAYOUT_GROUPS];
    Device device;
    Zero zero;
    char text[160];
} Job;

// Small integers, so that sums are exact in every format that travels: parameters, and what a rank's micro-batch adds to a gradient.
static float parameter(const Tensor *t, int64_t element, int step) {
    return (float)((int64_t)(rng_mix((uint64_t)t->id * 1000003 + (uint64_t)element) % 100) + 100 * (step % 2));
}
static float addend(const Tensor *t, int64_t element, int place, int micro, int step) {
    return (
        float)((int64_t)(rng_mix(((uint64_t)t->id * 64 + (uint64_t)place) * 16 + (uint64_t)(micro * 4 + step) + (uint64_t)element * 1000003) % 7) -
               3);
}

// Which of the ranks that hold a tensor's element bring something of their own. Where all of a tensor-parallel group compute the same, it does not
// depend on the rank; where each sees only its tokens or heads, it does.
static int place_of(const Part *part, const Mesh *mesh, MeshAt at) {
    return at.dp * 8 + (part->sum == GRADIENT_WHOLE ? 0 : at.tp) + (at.pp == mesh->pp - 1 ? 32 : 0);
}

static float expected(const Job *job, const Tensor *t, const Part *part, int64_t element, int step) {
    const Mesh *m = &job->layout.mesh;
    const bool copies = t->unit == 0 && job->model.config.tied && m->pp > 1;
    double sum = 0;
    for (int d = 0; d < m->dp; d++) {
        for (int pp = 0; pp < m->pp; pp++) {
            if (pp != m->at.pp && !(copies && (pp == 0 || pp == m->pp - 1))) continue;
            for (int tp = 0; tp < m->tp; tp++) {
                if (part->sum == GRADIENT_WHOLE && tp != m->at.tp) continue;
                if (part->sum == GRADIENT_SUM_KV && tp / job->layout.kv_replicas != m->at.tp / job->layout.kv_replicas) continue;
                for (int micro = 0; micro < MICROBATCHES; micro++)
                    sum += (double)addend(t, element, place_of(part, m, (MeshAt){tp, 0, pp, d}), micro, step);
            }
        }
    }
    return (float)sum;
}

static float load(Buffer buffer, int64_t i) {
    return buffer.dtype == DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)buffer.data)[i]) : ((const float *)buffer.data)[i];
}
static void store(Buffer buffer, int64_t i, float x) {
    if (buffer.dtype == DTYPE_BF16) {
        ((uint16_t *)buffer.data)[i] = bf16_from_f32(x);
    } else {
        ((float *)buffer.data)[i] = x;
    }
}

// What the trainer's backward does with a unit of a micro-batch. What is not accumulated starts as NaN: nothing old may come through.
static void backward(Job *job, int unit, int micro, int step, bool again) {
    Zero *z = &job->zero;
    Buffer g[TENSOR_KINDS];
    zero_gradients(z, unit, g);
    const bool accumulate = zero_accumulates(z, micro);
    if (again) return; // the second visit of a tied embedding finds what the first one left
    for (int i = 0; i < job->model.count; i++) {
        const Tensor *t = &job->model.tensors[i];
        const Part *part = &z->part[i];
        if (t->unit != unit) continue;
        float *to = g[t->kind].data;
        for (int64_t k = 0; k < part->elements; k++) {
            int64_t run;
            const int64_t e = layout_global_element(t, part, k, 1, &run);
            const float x = addend(t, e, place_of(part, &job->layout.mesh, job->layout.mesh.at), micro, step);
            to[k] = accumulate ? to[k] + x : x;
        }
    }
}

// The owners set their shards; everyone is told.
static void update(Job *job, int step) {
    Zero *z = &job->zero;
    for (int u = 0; u < job->model.units; u++) {
        if (z->range[u].count == 0) continue;
        const ZeroShard shard = zero_shard(z, u);
        for (int i = 0; i < job->model.count; i++) {
            const ZeroPiece piece = zero_piece(z, i);
            if (job->model.tensors[i].unit != u) continue;
            for (int64_t k = piece.from; k < piece.to; k++) {
                int64_t run;
                const int64_t e = layout_global_element(&job->model.tensors[i], &z->part[i], k, 1, &run);
                store(shard.param, piece.at + k - piece.from, parameter(&job->model.tensors[i], e, step));
            }
        }
        zero_publish(z, u);
        comm_progress(z->comm);
    }
    zero_publish_finish(z);
}

static int64_t weight_faults(Job *job, int unit, int step, const Buffer w[TENSOR_KINDS]) {
    int64_t faults = 0;
    for (int i = 0; i < job->model.count; i++) {
        const Tensor *t = &job->model.tensors[i];
        const Part *part = &job->zero.part[i];
        if (t->unit != unit) continue;
        faults += w[t->kind].data == NULL || w[t->kind].dtype != job->zero.config.dtype;
        for (int64_t k = 0; k < part->elements && faults == 0; k++) {
            int64_t run;
            faults += load(w[t->kind], k) != parameter(t, layout_global_element(t, part, k, 1, &run), step);
        }
    }
    return faults;
}

// The held unit that follows, or -1.
static int next_block(const Job *job, int unit, int direction) {
    for (int u = unit + direction; u > 0 && u < model_head_unit(&job->model); u += direction) {
        if (job->zero.range[u].count > 0) return u;
    }
    return -1;
}

// One step in the trainer's order: per micro-batch forward through the blocks with the next one prefetched, head, and back again.
static int64_t step_faults(Job *job, int step) {
    Zero *z = &job->zero;
    const int head = model_head_unit(&job->model);
    const bool has_head = z->range[head].count > 0, tied = job->model.config.tied, first = layout_has_embedding(&job->layout);
    int64_t faults = 0;
    Buffer w[TENSOR_KINDS], embedding[TENSOR_KINDS];
    zero_step_begin(z);
    for (int micro = 0; micro < MICROBATCHES; micro++) {
        const bool last = micro + 1 == MICROBATCHES;
        if (z->range[0].count > 0) zero_weights(z, 0, embedding), faults += weight_faults(job, 0, step, embedding);
        for (int u = next_block(job, 0, 1); u > 0; u = next_block(job, u, 1)) {
            const int next = next_block(job, u, 1);
            zero_weights(z, u, w);
            if (next > 0) zero_prefetch(z, next);
            comm_progress(z->comm);
            faults += weight_faults(job, u, step, w);
        }
        if (has_head) {
            zero_weights(z, head, w);
            faults += weight_faults(job, head, step, w);
            if (tied) {
                backward(job, 0, micro, step, false);
                if (!first) zero_gradients_done(z, 0, last);
            }
            backward(job, head, micro, step, false);
            zero_gradients_done(z, head, last);
        }
        for (int u = next_block(job, head, -1); u > 0; u = next_block(job, u, -1)) {
            const int next = next_block(job, u, -1);
            zero_weights(z, u, w);
            if (next > 0) zero_prefetch(z, next);
            backward(job, u, micro, step, false);
            faults += weight_faults(job, u, step, w);
            zero_gradients_done(z, u, last);
            comm_progress(z->comm);
        }
        if (first) {
            backward(job, 0, micro, step, tied && has_head);
            zero_gradients_done(z, 0, last);
        }
        if (z->range[0].count > 0) faults += weight_faults(job, 0, step, embedding); // it stays where it is
    }
    zero_gradients_finish(z);
    return faults;
}

static int64_t gradient_faults(const Job *job, int step) {
    const Zero *z = &job->zero;
    int64_t faults = 0;
    for (int i = 0; i < job->model.count; i++) {
        const Tensor *t = &job->model.tensors[i];
        const ZeroPiece piece = zero_piece(z, i);
        if (piece.from == piece.to) continue;
        const ZeroShard shard = zero_shard(z, t->unit);
        for (int64_t k = piece.from; k < piece.to; k++) {
            int64_t run;
            const int64_t e = layout_global_element(t, &z->part[i], k, 1, &run);
            faults += load(shard.grad, piece.at + k - piece.from) != expected(job, t, &z->part[i], e, step);
        }
    }
    return faults;
}

// Bytes of a step, per group: fact of ZeRO's paper: stage 0 g; 1 g + p; 2 M*g + p; what an all-reduce moves twice, it counts once.
static void check_bytes(const Job *job, const CommCount before[3]) {
    const Zero *z = &job->zero;
    const CommGroup *shard = z->groups[LAYOUT_SHARD], *replica = z->groups[LAYOUT_REPLICA];
    const int stage = z->layout->zero;
    const bool wires = z->config.reduce_bf16;
    const int64_t gradient = z->elements * (wires ? 2 : 4), parameters = z->elements * (int64_t)dtype_bytes(z->config.dtype);
    const int64_t reduced = replica->counts[COMM_ALL_REDUCE].bytes - before[0].bytes;
    const int64_t scattered = shard->counts[COMM_REDUCE_SCATTER].bytes - before[1].bytes,
                  gathered = shard->counts[COMM_ALL_GATHER].bytes - before[2].bytes;
    if (replica->size > 1) check(reduced == gradient / z->layout->shards, "%s: %lld bytes all-reduced", job->text, (long long)reduced);
    if (shard->size == 1) return;
    check(scattered == gradient * (stage >= 2 ? MICROBATCHES : 1), "%s: %lld bytes reduce-scattered", job->text, (long long)scattered);
    if (stage < 3) check(gathered == parameters, "%s: %lld bytes gathered", job->text, (long long)gathered);
}

// bits: switches of the model and of what is sent.
static void run(Comm *comm, const Case *c, uint64_t bits, uint64_t late) {
    static Job job;
    Error error = {0};
    const ModelConfig config = {.layers = 5,
                                .channels = 12,
                                .heads = 4,
                                .kv_heads = c->kv_heads,
                                .head_size = 3,
                                .ffn = 20,
                                .vocab = 37,
                                .max_seq = 5,
                                .position = bits & 1,
                                .activation = bits >> 1 & 1,
                                .tied = bits >> 2 & 1,
                                .qk_norm = bits >> 3 & 1,
                                .bias = BIAS_ON};
    Options o = {.tp = c->tp, .pp = c->pp, .virtual_stages = c->V, .sp = c->sp, .zero = c->zero, .shard_group = c->group};
    o.pp_schedule = c->V > 1 ? SCHEDULE_INTERLEAVED : SCHEDULE_1F1B;
    o.given[OPTION_shard_group] = c->group > 0;
    job = (Job){
        .model = model_create(&config),
        .device = {
            .name = "test", .alloc = cpu_alloc, .release = cpu_release, .copy_in = cpu_copy_in, .cast = cpu_cast, .accumulate = cpu_accumulate}};
    if (!layout_create(&job.layout, &config, &o, comm->size, comm->rank, &error)) comm_abort(comm, CODE_USAGE, "%s", error.text);
    int *members = base_new((size_t)comm->size, sizeof *members);
    for (int g = 0; g < LAYOUT_GROUPS; g++) {
        job.groups[g] = comm_group(comm, members, layout_members(&job.layout, (LayoutGroup)g, members), layout_group_names[g]);
    }
    free(members);
    const double sizes[] = {1, 4000, 1e9};
    const ZeroConfig settings = {bits >> 4 & 1 ? DTYPE_BF16 : DTYPE_F32, bits >> 5 & 1, bits >> 6 & 1, sizes[(bits >> 7) % 3], false, false};
    job.zero = zero_create(&job.device, comm, job.groups, &job.model, &job.layout, &settings);
    snprintf(job.text, sizeof job.text,
             "tp %d pp %d V %d zero %d group %d sp %d kv %d, %s, overlap %d, wires %s, bucket %g, tied %d, late %d, rank %d", c->tp, c->pp, c->V,
             c->zero, c->group, c->sp, (int)c->kv_heads, dtype_names[settings.dtype], settings.overlap, settings.reduce_bf16 ? "bf16" : "fp32",
             settings.bucket_bytes, config.tied, late > 0, comm->rank);
    comm_late(comm, late);
    memset(job.zero.grad.data, 0xff, job.zero.bytes.grad_bytes); // NaN: what is never written must not be read
    memset(job.zero.exchange_slots, 0xff, job.zero.bytes.buffer_bytes);
    update(&job, 0);
    for (int step = 0; step < 2; step++) {
        CommCount before[3] = {job.groups[LAYOUT_REPLICA]->counts[COMM_ALL_REDUCE], job.groups[LAYOUT_SHARD]->counts[COMM_REDUCE_SCATTER],
                               job.groups[LAYOUT_SHARD]->counts[COMM_ALL_GATHER]};
        const int64_t weights = step_faults(&job, step), gradients = gradient_faults(&job, step);
        check(weights == 0, "%s: step %d: %lld wrong weights", job.text, step, (long long)weights);
        check(gradients == 0, "%s: step %d: %lld elements of gradients are not the sum", job.text, step, (long long)gradients);
        update(&job, step + 1);
        check_bytes(&job, before);
    }
    // forward only, as in validation: the last block's prefetch is followed by another pass
    int64_t faults = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (int u = 0; u < job.model.units; u++) {
            Buffer w[TENSOR_KINDS];
            if (job.zero.range[u].count == 0) continue;
            zero_weights(&job.zero, u, w);
            const int next = u > 0 ? next_block(&job, u, 1) : -1;
            if (next > 0 && u < model_head_unit(&job.model)) zero_prefetch(&job.zero, next);
            faults += weight_faults(&job, u, 2, w);
            if (pass == 0 && u == 1) break; // what was prefetched is not used: the next pass begins elsewhere
        }
    }
    check(faults == 0, "%s: passes without backward: %lld wrong weights", job.text, (long long)faults);
    zero_publish_finish(&job.zero);
    comm_late(comm, 0);
    zero_free(&job.zero);
    for (int g = LAYOUT_GROUPS - 1; g >= 0; g--) comm_group_free(job.groups[g]);
    layout_free(&job.layout);
    model_free(&job.model);
}

int main(int argc, char **argv) {
    Comm *comm = comm_init(&argc, &argv);
    const int world = comm->size;
    comm_watchdog(comm, 60);
    comm_heartbeat(comm, 0, "test");
    int cases = 0;
    for (int tp = 1; tp <= 4 && tp <= world; tp *= 2) {
        for (int pp = 1; pp <= 4 && tp * pp <= world; pp++) {
            if (world % (tp * pp) != 0) continue;
            const int dp = world / (tp * pp);
            for (int zero = 0; zero < 4; zero++) {
                for (int group = 0; group <= (zero > 0 && dp > 1 ? dp / 2 : 0); group++) {
                    if (group > 0 && dp % group != 0) continue;
                    for (int k = 0; k < 8; k++) { // the other switches at random
                        const uint64_t bits = rng_mix((uint64_t)++cases);
                        const Case c = {tp, pp, pp == 2 && bits & 1 ? 2 : 1, zero, group, bits >> 1 & 1, (int64_t[]){1, 2, 4}[(bits >> 2) % 3]};
                        run(comm, &c, bits >> 8, k % 3 == 2 ? (uint64_t)cases : 0);
                    }
                }
            }
        }
    }
    int64_t totals[2] = {passed_, failed_};
    comm_all_reduce(comm->world, totals, 2, COMM_I64, COMM_SUM);
    const int rank = comm->rank;
    comm_finish(comm);
    if (rank == 0)
        printf("zero: %d layouts and settings of %d ranks\n%lld passed, %lld failed\n", cases, world, (long long)totals[0], (long long)totals[1]);
    return totals[1] > 0 || totals[0] == 0;
}
