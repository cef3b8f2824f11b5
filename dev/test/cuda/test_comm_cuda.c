// test_comm_cuda.c: collectives and messages on device memory, through comm.h, against plain sums. Runs on any number of ranks, on the simulated
// device, from dev/test/comm_cuda.sh, which also calls the forms that must end the job: test_comm_cuda FORM [FILE].
#include "dev/test/test.h"    // check
#include "llmc/comm.h"        // Comm
#include "llmc/cuda/device.h" // device_cuda
#include "llmc/signals.h"     // signals_block

typedef struct {
    Device *device;
    Comm *comm;
    CommCount wanted[COMM_KINDS]; // what the counters should say
    char *host;                   // (room) to compare with
    void *a, *b;                  // (room) device memory
    size_t room;                  // bytes
} Test;

static uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Element i of what rank (of the world) brings: magnitudes differ so much that the order of a sum shows.
static double value(int rank, int64_t i) {
    const uint64_t h = mix((uint64_t)i * 64 + (uint64_t)rank + 12345);
    return ((double)(h >> 40) - 8388608.0) * ((h & 7) == 0 ? 1e3 : (h & 7) == 1 ? 1e-3 : 0.25);
}
static void put(void *buffer, CommType type, int64_t at, double x) {
    if (type == COMM_F32) ((float *)buffer)[at] = (float)x;
    if (type == COMM_BF16) ((uint16_t *)buffer)[at] = bf16_from_f32((float)x);
    if (type == COMM_F64) ((double *)buffer)[at] = x * 1.1;
    if (type == COMM_I64) ((int64_t *)buffer)[at] = (int64_t)(x * 1e12);
    if (type == COMM_BYTE) ((uint8_t *)buffer)[at] = (uint8_t)(int64_t)x;
}
static double get(const void *buffer, CommType type, int64_t at) {
    if (type == COMM_F32) return ((const float *)buffer)[at];
    if (type == COMM_BF16) return bf16_to_f32(((const uint16_t *)buffer)[at]);
    if (type == COMM_F64) return ((const double *)buffer)[at];
    return (double)((const int64_t *)buffer)[at];
}

// Fills device memory at element `at` with rank's values i, i+1, ...
static void give(Test *t, void *to, CommType type, int64_t at, int64_t n, int rank, int64_t i) {
    const size_t bytes = comm_type_bytes(type);
    for (int64_t k = 0; k < n; k++) put(t->host, type, k, value(rank, i + k));
    t->device->copy_in(t->device, (char *)to + (size_t)at * bytes, t->host, (size_t)n * bytes);
}
// NaN, so that what is not written is seen.
static void spoil(Test *t, void *to, size_t bytes) {
    memset(t->host, 0xff, bytes);
    t->device->copy_in(t->device, to, t->host, bytes);
}
static const char *take(Test *t, const void *from, size_t bytes) {
    t->device->copy_out(t->device, t->host, from, bytes);
    return t->host;
}

// Is got[at] the reduction of what the ranks bring as element i? Exactly, in the order of ranks, for bf16, maxima and integers; within the rounding
// of any order for sums of F32 and F64.
static bool reduced(const CommGroup *g, const void *got, CommType out_type, int64_t at, CommType type, int64_t i, CommReduce how) {
    float f = 0;
    double d = 0, size = 0;
    int64_t whole = 0;
    for (int k = 0; k < g->size; k++) {
        int64_t bits = 0;
        put(&bits, type, 0, value(g->members[k], i));
        const double x = get(&bits, type, 0);
        f = k == 0 ? (float)x : how == COMM_SUM ? f + (float)x : fmaxf(f, (float)x);
        d = k == 0 ? x : how == COMM_SUM ? d + x : fmax(d, x);
        size += fabs(x);
        whole = k == 0 ? bits : how == COMM_SUM ? (int64_t)((uint64_t)whole + (uint64_t)bits) : max_i64(whole, bits);
    }
    if (type == COMM_I64) return ((const int64_t *)got)[at] == whole;
    const double have = get(got, out_type, at);
    if (type == COMM_BF16) return have == (double)(out_type == COMM_BF16 ? bf16_to_f32(bf16_from_f32(f)) : f);
    if (how == COMM_MAX) return have == d;
    return fabs(have - d) <= size * g->size * (type == COMM_F32 ? 0x1p-24 : 0x1p-53);
}
static bool all_reduced(const CommGroup *g, const void *got, CommType out_type, CommType type, int64_t first, int64_t n, CommReduce how) {
    for (int64_t i = 0; i < n; i++) {
        if (!reduced(g, got, out_type, i, type, first + i, how)) return false;
    }
    return true;
}
static bool same(const void *got, CommType type, int64_t at, int64_t n, int rank, int64_t i) {
    for (int64_t k = 0; k < n; k++) {
        char wanted[8];
        put(wanted, type, 0, value(rank, i + k));
        if (memcmp((const char *)got + (size_t)(at + k) * comm_type_bytes(type), wanted, comm_type_bytes(type)) != 0) return false;
    }
    return true;
}

static void count(Test *t, const CommGroup *g, CommKind kind, size_t bytes) {
    if (g->size == 1) return;
    t->wanted[kind].calls++;
    t->wanted[kind].bytes += (int64_t)bytes;
}

static const char *const type_names[] = {"F32", "BF16", "F64", "I64", "BYTE"};

static void reductions(Test *t, CommGroup *g, CommType type, int64_t n) {
    const size_t bytes = comm_type_bytes(type), part = (size_t)n * bytes;
    const int me = g->members[g->rank];
    const char *name = type_names[type];
    for (int how = 0; how < 2; how++) {
        give(t, t->a, type, 0, n, me, 0);
        comm_all_reduce(g, t->a, n, type, (CommReduce)how);
        count(t, g, COMM_ALL_REDUCE, part);
        check(all_reduced(g, take(t, t->a, part), type, type, 0, n, (CommReduce)how), "all_reduce %d of %lld %s on %s", how, (long long)n, name,
              g->name);
        for (int wide = 0; wide < (type == COMM_BF16 ? 2 : 1); wide++) {
            const CommType out_type = wide ? COMM_F32 : type;
            give(t, t->a, type, 0, g->size * n, me, 0);
            spoil(t, t->b, (size_t)n * comm_type_bytes(out_type));
            comm_reduce_scatter(g, t->b, out_type, t->a, n, type, (CommReduce)how);
            count(t, g, COMM_REDUCE_SCATTER, (size_t)g->size * part);
            const void *got = take(t, t->b, (size_t)n * comm_type_bytes(out_type));
            check(all_reduced(g, got, out_type, type, g->rank * n, n, (CommReduce)how), "reduce_scatter %d of %lld %s to %s on %s", how,
                  (long long)n, name, type_names[out_type], g->name);
            check(same(take(t, t->a, (size_t)g->size * part), type, 0, g->size * n, me, 0), "reduce_scatter leaves its input");
        }
        char *own = (char *)t->a + (size_t)g->rank * part; // into its own input
        comm_reduce_scatter(g, own, type, t->a, n, type, (CommReduce)how);
        count(t, g, COMM_REDUCE_SCATTER, (size_t)g->size * part);
        check(all_reduced(g, take(t, own, part), type, type, g->rank * n, n, (CommReduce)how), "reduce_scatter %d in place of %lld %s on %s", how,
              (long long)n, name, g->name);
    }
}

static void moves(Test *t, CommGroup *g, CommType type, int64_t n) {
    const size_t bytes = comm_type_bytes(type), part = (size_t)n * bytes, all = (size_t)g->size * part;
    const int me = g->members[g->rank], root = g->size - 1;
    const char *name = type_names[type];
    for (int in_place = 0; in_place < 2; in_place++) {
        spoil(t, t->a, all);
        void *in = in_place ? (char *)t->a + (size_t)g->rank * part : t->b;
        give(t, in, type, 0, n, me, 0);
        comm_all_gather(g, t->a, in, n, type);
        count(t, g, COMM_ALL_GATHER, all);
        const void *got = take(t, t->a, all);
        bool good = true;
        for (int k = 0; k < g->size; k++) good = good && same(got, type, k * n, n, g->members[k], 0);
        check(good, "all_gather%s of %lld %s on %s", in_place ? " in place" : "", (long long)n, name, g->name);
    }
    give(t, t->a, type, 0, n, me, 0);
    comm_broadcast(g, t->a, n, type, root);
    count(t, g, COMM_BROADCAST, part);
    check(same(take(t, t->a, part), type, 0, n, g->members[root], 0), "broadcast of %lld %s on %s", (long long)n, name, g->name);

    give(t, t->a, type, 0, g->size * n, me, 0);
    spoil(t, t->b, all);
    comm_all_to_all(g, t->b, t->a, n, type);
    count(t, g, COMM_ALL_TO_ALL, all);
    const void *got = take(t, t->b, all);
    bool good = true;
    for (int k = 0; k < g->size; k++) good = good && same(got, type, k * n, n, g->members[k], g->rank * n);
    check(good, "all_to_all of %lld %s on %s", (long long)n, name, g->name);

    int64_t in_counts[64], out_counts[64], in_at = 0, out_at = 0; // rank j sends (j + 2k) % 3 * n / 4 elements to rank k
    for (int k = 0; k < g->size; k++) {
        in_counts[k] = (g->rank + 2 * k) % 3 * n / 4, out_counts[k] = (k + 2 * g->rank) % 3 * n / 4;
        give(t, t->a, type, in_at, in_counts[k], me, 7 * k);
        in_at += in_counts[k], out_at += out_counts[k];
    }
    spoil(t, t->b, (size_t)out_at * bytes);
    comm_all_to_allv(g, t->b, out_counts, t->a, in_counts, type);
    count(t, g, COMM_ALL_TO_ALL, (size_t)in_at * bytes);
    got = take(t, t->b, (size_t)out_at * bytes);
    good = true;
    for (int64_t k = 0, at = 0; k < g->size; at += out_counts[k++]) good = good && same(got, type, at, out_counts[k], g->members[k], 7 * g->rank);
    check(good, "all_to_allv of %lld %s on %s", (long long)n, name, g->name);
}

// Not `all`: with fewer types.
static void collectives(Test *t, CommGroup *g, int64_t n, bool all) {
    for (int type = COMM_F32; type < COMM_BYTE; type++) {
        if (all || type == COMM_BF16) reductions(t, g, (CommType)type, n);
    }
    moves(t, g, COMM_F32, n);
    if (all) moves(t, g, COMM_F64, n), moves(t, g, COMM_BYTE, n);
    comm_barrier(g);
    count(t, g, COMM_BARRIER, 0);
}

static void special_values(Test *t, CommGroup *g) {
    const CommType types[] = {COMM_F32, COMM_BF16, COMM_F64};
    for (int i = 0; i < 3; i++) {
        const double x[3] = {g->rank == g->size - 1 ? NAN : 1, g->rank == 0 ? NAN : 2, g->rank == 0 ? -INFINITY : 3};
        for (int k = 0; k < 3; k++) put(t->host, types[i], k, x[k]);
        t->device->copy_in(t->device, t->a, t->host, 3 * comm_type_bytes(types[i]));
        comm_all_reduce(g, t->a, 3, types[i], COMM_MAX);
        count(t, g, COMM_ALL_REDUCE, 3 * comm_type_bytes(types[i]));
        const void *got = take(t, t->a, 3 * comm_type_bytes(types[i]));
        check(isnan(get(got, types[i], 0)) && isnan(get(got, types[i], 1)) &&
                  (g->size == 1 ? isinf(get(got, types[i], 2)) : get(got, types[i], 2) > 2),
              "the maximum of %s keeps NaN wherever it comes from", type_names[types[i]]);
    }
}

// Buckets in flight on two groups, with sums of the host between them, waited for in another order on every rank, while the device goes on
// computing. Every bucket's input is made by an op just before its start and used by an op just after its wait: only events order them.
static void overlap(Test *t, CommGroup *g, CommGroup *other) {
    enum { BUCKETS = 6, N = 500 };
    Device *d = t->device;
    Comm *comm = t->comm;
    float *sum = d->alloc(d, BUCKETS * N * sizeof *sum), *ones = d->alloc(d, N * sizeof *ones), *x = t->a, *y = t->b;
    CommHandle sums[BUCKETS], gathers[BUCKETS], scalars[BUCKETS];
    double scalar[BUCKETS];
    float host[N];
    for (int i = 0; i < N; i++) host[i] = 1;
    d->copy_in(d, ones, host, sizeof host);
    d->zero(d, x, BUCKETS * N * sizeof *x);
    for (int round = 0; round < 2; round++) {
        for (int b = 0; b < BUCKETS; b++) {
            const Buffer bucket = buffer_of(x + b * N, DTYPE_F32);
            for (int i = 0; i <= b % 3; i++) d->accumulate(d, bucket, buffer_of(ones, DTYPE_F32), N);
            sums[b] = comm_all_reduce_start(g, bucket.data, N, COMM_F32, COMM_SUM);
            scalar[b] = b + comm->rank;
            scalars[b] = comm_all_reduce_start(comm->world, &scalar[b], 1, COMM_F64, COMM_SUM);
            gathers[b] = comm_all_gather_start(other, y + b * other->size * N, ones, N, COMM_F32);
            count(t, g, COMM_ALL_REDUCE, N * 4), count(t, comm->world, COMM_ALL_REDUCE, 8),
                count(t, other, COMM_ALL_GATHER, (size_t)other->size * N * 4);
            if (b % 2 == 0) comm_progress(comm);
        }
        for (int i = 0; i < BUCKETS; i++) {
            const int b = (i * 5 + comm->rank) % BUCKETS;
            if (b % 3 == 0) {
                while (!comm_test(&sums[b])) sched_yield();
            } else {
                comm_wait(&sums[b]);
            }
            d->accumulate(d, buffer_of(sum + b * N, DTYPE_F32), buffer_of(x + b * N, DTYPE_F32), N);
            d->zero(d, x + b * N, N * sizeof *x);
            comm_wait(&gathers[b]);
            for (int k = 0; k < other->size; k++)
                d->accumulate(d, buffer_of(sum + b * N, DTYPE_F32), buffer_of(y + (b * other->size + k) * N, DTYPE_F32), N);
            comm_wait(&scalars[b]);
            check(scalar[b] == b * comm->size + comm->size * (comm->size - 1) / 2, "scalar %d in flight", b);
        }
    }
    bool good = true;
    for (int b = 0; b < BUCKETS; b++) {
        d->copy_out(d, host, sum + b * N, sizeof host);
        for (int i = 0; i < N; i++) good = good && host[i] == 2.0f * (float)((b % 3 + 1) * g->size + other->size);
    }
    check(good, "buckets in flight on %s and %s, between ops", g->name, other->name);
    d->release(d, sum);
    d->release(d, ones);
}

// Many messages in both directions of a ring at once. Receives start long before they are needed, and everybody sends what it has received, one
// higher: a send that stands behind a receive in some queue would never go.
static void pipes(Test *t, CommGroup *down, CommGroup *up) {
    enum { ROUNDS = 8, N = 100 };
    if (down->size == 1) return;
    Device *d = t->device;
    const int next = (down->rank + 1) % down->size, before = (down->rank + down->size - 1) % down->size;
    const size_t bytes = N * sizeof(float);
    float *in[2][2], *out[2], *ones = d->alloc(d, bytes), host[N]; // [direction][parity]
    for (int i = 0; i < N; i++) host[i] = 1;
    d->copy_in(d, ones, host, bytes);
    for (int way = 0; way < 2; way++) in[way][0] = d->alloc(d, bytes), in[way][1] = d->alloc(d, bytes), out[way] = d->alloc(d, bytes);
    for (int way = 0; way < 2; way++) {
        for (int i = 0; i < N; i++) host[i] = (float)(100 * way + down->rank);
        d->copy_in(d, out[way], host, bytes);
    }
    CommHandle received[2][2], sent[2] = {NULL, NULL};
    for (int way = 0; way < 2; way++) {
        for (int p = 0; p < 2; p++) received[way][p] = comm_recv_start(way ? up : down, in[way][p], N, COMM_F32, way ? next : before, 0);
    }
    for (int round = 0; round < ROUNDS; round++) {
        for (int way = 0; way < 2; way++) {
            const int last = (round + 1) % 2; // where the message of the round before is
            const Buffer to = buffer_of(out[way], DTYPE_F32), from = buffer_of(in[way][last], DTYPE_F32);
            if (round > 0) {
                comm_wait(&received[way][last]);
                comm_wait(&sent[way]); // its buffer is used again
                d->cast(d, to, from, N);
                d->accumulate(d, to, buffer_of(ones, DTYPE_F32), N);
                if (round + 1 < ROUNDS) received[way][last] = comm_recv_start(way ? up : down, from.data, N, COMM_F32, way ? next : before, 0);
            }
            sent[way] = comm_send_start(way ? up : down, to.data, N, COMM_F32, way ? before : next, 0);
            count(t, down, COMM_SEND, bytes), count(t, down, COMM_RECV, bytes);
        }
    }
    for (int way = 0; way < 2; way++) {
        comm_wait(&sent[way]);
        comm_wait(&received[way][(ROUNDS - 1) % 2]);
        d->copy_out(d, host, in[way][(ROUNDS - 1) % 2], bytes);
        const int start = ((way ? down->rank + ROUNDS : down->rank - ROUNDS) % down->size + down->size) % down->size;
        bool good = true;
        for (int i = 0; i < N; i++) good = good && host[i] == (float)(100 * way + start + ROUNDS - 1);
        check(good, "%d messages %s", ROUNDS, way ? "up" : "down");
    }
    for (int way = 0; way < 2; way++) d->release(d, in[way][0]), d->release(d, in[way][1]), d->release(d, out[way]);
    d->release(d, ones);
}

// A planted missing wait: an op reads the result too early. With late completion it reads NaN, whatever the timing.
static void missing_wait(Test *t) {
    enum { N = 100 };
    Device *d = t->device;
    float *early = d->alloc(d, N * sizeof *early), host[2][N];
    const uint64_t late = t->comm->late;
    comm_late(t->comm, 99);
    for (int i = 0; i < N; i++) host[0][i] = 1;
    d->copy_in(d, t->a, host[0], sizeof host[0]);
    CommHandle handle = comm_all_reduce_start(t->comm->world, t->a, N, COMM_F32, COMM_SUM);
    count(t, t->comm->world, COMM_ALL_REDUCE, N * 4);
    d->cast(d, buffer_of(early, DTYPE_F32), buffer_of(t->a, DTYPE_F32), N);
    comm_wait(&handle);
    d->copy_out(d, host[0], early, sizeof host[0]);
    d->copy_out(d, host[1], t->a, sizeof host[1]);
    bool good = true;
    for (int i = 0; i < N; i++) good = good && isnan(host[0][i]) && host[1][i] == (float)t->comm->size;
    check(good, "late completion: NaN before the wait, the sum after it");
    comm_late(t->comm, late);
    d->release(d, early);
}

// Forms that must not end well. What happens is comm_cuda.sh's to check.
static void ill(Test *t, const char *form, const char *file) {
    Comm *comm = t->comm;
    Device *d = t->device;
    float *x = t->a, *y = t->b, host[1000] = {0};
    const int size = comm->size, before = (comm->rank + size - 1) % size;
    int list[64];
    for (int r = 0; r < size; r++) list[r] = r;
    CommGroup *pipe = comm_pipe(comm, list, size, 1, "pipe");
    const bool stall = strcmp(form, "stall") == 0, ring = strcmp(form, "ring") == 0;
    comm_watchdog(comm, 20);
    if (stall || ring) atomic_store(&comm->watch.silence_ms, 1000); // found without the limit of the main thread
    comm_heartbeat(comm, 17, "backward");
    d->copy_in(d, x, host, sizeof host);
    comm_all_reduce(comm->world, x, 1000, COMM_F32, COMM_SUM);
    d->copy_out(d, host, x, sizeof host);
    comm_barrier(comm->world);
    if (strcmp(form, "die") == 0 && comm->rank == 1) die(CODE_NUMERIC, "planted");
    if (strcmp(form, "kill") == 0 && comm->rank == 1) raise(SIGKILL);
    if (stall && comm->rank == 1) raise(SIGSTOP);
    if (strcmp(form, "hold") == 0 && comm->rank == 1) { // until comm_cuda.sh kills it from outside
        FILE *to = fopen(file, "w");
        if (to == NULL || fprintf(to, "%d\n", (int)getpid()) < 0 || fclose(to) != 0) die(CODE_IO, "cannot write %s", file);
        for (;;) comm_progress(comm), sched_yield();
    }
    CommHandle handle = NULL;
    if (ring) { // each waits for the one before
        handle = comm_recv_start(pipe, x, 10, COMM_F32, before, 0);
        comm_wait(&handle);
    }
    if (strcmp(form, "mixed") == 0) comm_all_gather(comm->world, x, host, 10, COMM_F32);
    if (strcmp(form, "peer") == 0) comm_send(comm->world, x, 10, COMM_F32, before, 0);
    if (strcmp(form, "changed") == 0) comm_late(comm, 5);
    if (strcmp(form, "nothing") != 0) handle = comm_all_gather_start(comm->world, y, x, 1000 / size, COMM_F32);
    if (strcmp(form, "changed") == 0) d->zero(d, y, 4);
    if (strcmp(form, "race") == 0) d->accumulate(d, buffer_of(x + 1000, DTYPE_F32), buffer_of(y, DTYPE_F32), 1000 / size * size);
    if (strcmp(form, "leak") == 0) handle = NULL;
    comm_wait(&handle);
    d->copy_out(d, host, y, sizeof host);
}

// only: a part, or NULL for all of it.
static void well(Test *t, const char *only) {
    Comm *comm = t->comm;
    // Groups: even and odd ranks, alone, first and last, pairs; every rank of the world comes to each.
    int list[64], n = 0;
    for (int r = comm->rank % 2; r < comm->size; r += 2) list[n++] = r;
    CommGroup *half = comm_group(comm, list, n, "half");
    CommGroup *alone = comm_group(comm, &comm->rank, 1, "alone");
    const int ends[2] = {0, comm->size - 1};
    const bool at_end = comm->size > 1 && (comm->rank == 0 || comm->rank == comm->size - 1);
    CommGroup *outer = comm_group(comm, ends, at_end ? 2 : 0, "ends");
    n = 0;
    for (int r = comm->rank / 2 * 2; r < comm->size && r < comm->rank / 2 * 2 + 2; r++) list[n++] = r;
    CommGroup *pair = comm_group(comm, list, n, "pair");
    for (int r = 0; r < comm->size; r++) list[r] = r;
    CommGroup *down = comm_pipe(comm, list, comm->size, 1, "down"), *up = comm_pipe(comm, list, comm->size, -1, "up");
    CommGroup *groups[] = {comm->world, half, alone, outer, pair, down};
    const bool every = only == NULL;
    const int64_t sizes[] = {0, 7, 64, 1001};
    for (int i = 0; i < 6; i++) {
        if (groups[i] == NULL || !(every || strcmp(only, i == 0 ? "world" : "groups") == 0)) continue;
        for (int s = 0; s < 4; s++) {
            if (i == 0 || s == 1) collectives(t, groups[i], sizes[s], i == 0);
        }
        special_values(t, groups[i]);
    }
    if (every || strcmp(only, "overlap") == 0) {
        overlap(t, comm->world, half);
        overlap(t, half, comm->world);
        overlap(t, alone, pair);
    }
    if (every || strcmp(only, "pipes") == 0) {
        pipes(t, down, up);
        comm_group_free(up);
        pipes(t, down, comm_pipe(comm, list, comm->size, -1, "up again"));
    }
    if (every || strcmp(only, "late") == 0) missing_wait(t);
    bool counted = true, small = true;
    for (int kind = 0; kind < COMM_KINDS; kind++) {
        counted = counted && comm->counts[kind].calls == t->wanted[kind].calls && comm->counts[kind].bytes == t->wanted[kind].bytes;
        small = small && alone->counts[kind].calls == 0;
    }
    check(counted, "counters: calls and bytes of every kind are exact");
    check(small, "counters: a group of one counts nothing");
}

int main(int argc, char **argv) {
    Error error = {0};
    if (!signals_block(&error)) die_error(&error); // as in the trainer: a launcher's SIGTERM leaves time to tell what was seen
    Comm *comm = comm_init(&argc, &argv);
    char why[256];
    const int ordinal = device_cuda_ordinal(comm->local_rank, comm->local_size, comm->size, why, sizeof why);
    if (ordinal < 0) die(CODE_USAGE, "%s", why);
    Device device = device_cuda(ordinal);
    const CommDevice table = device_cuda_comm(&device);
    comm_set_device(comm, &table);
    comm_watchdog(comm, 60);
    comm_heartbeat(comm, 0, "test");
    Test t = {.device = &device, .comm = comm, .room = (size_t)comm->size * 1001 * 8 + 100000};
    t.host = base_alloc(t.room);
    t.a = comm_alloc(comm, t.room), t.b = device.alloc(&device, t.room); // both kinds of device memory
    const bool part = argc > 2 && strcmp(argv[1], "only") == 0;
    if (argc > 1 && !part)
        ill(&t, argv[1], argv[argc - 1]);
    else
        well(&t, part ? argv[2] : NULL);
    int64_t totals[2] = {passed_, failed_};
    comm_all_reduce(comm->world, totals, 2, COMM_I64, COMM_SUM); // host memory
    comm_release(comm, t.a);
    device.release(&device, t.b);
    free(t.host);
    const int rank = comm->rank;
    comm_finish(comm);
    device.close(&device);
    if (rank == 0) printf("%lld passed, %lld failed\n", (long long)totals[0], (long long)totals[1]);
    return totals[1] > 0 || (totals[0] == 0 && (argc == 1 || part));
}
