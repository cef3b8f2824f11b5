// test_comm.c: collectives against a serial sum in rank order, bit for bit. Runs on any number of ranks: alone, or under mpirun from
// dev/test/comm.sh, which also calls the forms that must end the job: test_comm kill|stall|lone|compute|busy|ring|die|changed|leak|hold FILE
#include "llmc/comm.h"
#include "dev/test/test.h"
#include "llmc/signals.h"

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
// The reduction as the header defines it, one element at a time.
static void expect(const CommGroup *g, void *out, CommType out_type, int64_t at, CommType type, int64_t i, CommReduce how) {
    float f = 0;
    double d = 0;
    int64_t n = 0;
    for (int k = 0; k < g->size; k++) {
        const double x = value(g->members[k], i);
        float fx = 0;
        double dx = 0;
        int64_t nx = 0;
        uint16_t bits = 0;
        if (type == COMM_F32) put(&fx, type, 0, x);
        if (type == COMM_F64) put(&dx, type, 0, x);
        if (type == COMM_I64) put(&nx, type, 0, x);
        if (type == COMM_BF16) put(&bits, type, 0, x), fx = bf16_to_f32(bits);
        f = k == 0 ? fx : how == COMM_SUM ? f + fx : fmaxf(f, fx);
        d = k == 0 ? dx : how == COMM_SUM ? d + dx : fmax(d, dx);
        n = k == 0 ? nx : how == COMM_SUM ? (int64_t)((uint64_t)n + (uint64_t)nx) : max_i64(n, nx);
    }
    if (out_type == COMM_F32) ((float *)out)[at] = f;
    if (out_type == COMM_BF16) ((uint16_t *)out)[at] = bf16_from_f32(f);
    if (out_type == COMM_F64) ((double *)out)[at] = d;
    if (out_type == COMM_I64) ((int64_t *)out)[at] = n;
}

static const char *const type_names[] = {"F32", "BF16", "F64", "I64", "BYTE"};
static CommCount wanted[COMM_KINDS]; // what the counters should say

static void count(const CommGroup *g, CommKind kind, size_t bytes) {
    if (g->size == 1) return;
    wanted[kind].calls++;
    wanted[kind].bytes += (int64_t)bytes;
}

// Every collective with n elements (a part, or the whole for all_reduce) on memory a, b (ranks * n elements each) and a reference c.
static void collectives(CommGroup *g, CommType type, int64_t n, void *a, void *b, void *c) {
    const size_t bytes = comm_type_bytes(type), part = (size_t)n * bytes;
    const int me = g->members[g->rank];
    const char *name = type_names[type];
    for (int how = 0; how < 2 && type != COMM_BYTE; how++) {
        for (int64_t i = 0; i < n; i++) put(a, type, i, value(me, i)), expect(g, c, type, i, type, i, (CommReduce)how);
        comm_all_reduce(g, a, n, type, (CommReduce)how);
        count(g, COMM_ALL_REDUCE, part);
        check(memcmp(a, c, part) == 0, "all_reduce %d of %lld %s on %s", how, (long long)n, name, g->name);
    }
    if (type != COMM_BYTE) {
        const CommType out_type = type == COMM_BF16 && n % 2 == 1 ? COMM_F32 : type;
        for (int64_t i = 0; i < g->size * n; i++) put(a, type, i, value(me, i));
        for (int64_t i = 0; i < n; i++) expect(g, c, out_type, i, type, g->rank * n + i, COMM_SUM);
        if (out_type == type) { // into its own input
            char *own = (char *)a + (size_t)g->rank * part;
            comm_reduce_scatter(g, own, type, a, n, type, COMM_SUM);
            check(memcmp(own, c, part) == 0, "reduce_scatter in place of %lld %s on %s", (long long)n, name, g->name);
            count(g, COMM_REDUCE_SCATTER, (size_t)g->size * part);
            for (int64_t i = 0; i < n; i++) put(own, type, i, value(me, g->rank * n + i));
        }
        comm_reduce_scatter(g, b, out_type, a, n, type, COMM_SUM);
        count(g, COMM_REDUCE_SCATTER, (size_t)g->size * part);
        check(memcmp(b, c, (size_t)n * comm_type_bytes(out_type)) == 0, "reduce_scatter of %lld %s on %s", (long long)n, name, g->name);
    }
    for (int k = 0; k < g->size; k++) {
        for (int64_t i = 0; i < n; i++) put(c, type, k * n + i, value(g->members[k], i));
    }
    for (int64_t i = 0; i < n; i++) put(b, type, i, value(me, i));
    memset(a, 0, (size_t)g->size * part);
    comm_all_gather(g, a, b, n, type);
    check(memcmp(a, c, (size_t)g->size * part) == 0, "all_gather of %lld %s on %s", (long long)n, name, g->name);
    memset(a, 0, (size_t)g->size * part);
    for (int64_t i = 0; i < n; i++) put(a, type, g->rank * n + i, value(me, i));
    comm_all_gather(g, a, (char *)a + (size_t)g->rank * part, n, type);
    check(memcmp(a, c, (size_t)g->size * part) == 0, "all_gather in place of %lld %s on %s", (long long)n, name, g->name);
    count(g, COMM_ALL_GATHER, (size_t)g->size * part);
    count(g, COMM_ALL_GATHER, (size_t)g->size * part);

    const int root = g->size - 1;
    for (int64_t i = 0; i < n; i++) put(a, type, i, value(me, i)), put(c, type, i, value(g->members[root], i));
    comm_broadcast(g, a, n, type, root);
    count(g, COMM_BROADCAST, part);
    check(memcmp(a, c, part) == 0, "broadcast of %lld %s on %s", (long long)n, name, g->name);

    for (int k = 0; k < g->size; k++) {
        for (int64_t i = 0; i < n; i++) {
            put(a, type, k * n + i, value(me, k * n + i));
            put(c, type, k * n + i, value(g->members[k], g->rank * n + i));
        }
    }
    comm_all_to_all(g, b, a, n, type);
    count(g, COMM_ALL_TO_ALL, (size_t)g->size * part);
    check(memcmp(b, c, (size_t)g->size * part) == 0, "all_to_all of %lld %s on %s", (long long)n, name, g->name);

    // Rank j sends (j + 2k) % 3 * n / 4 elements to rank k.
    int64_t in_counts[64], out_counts[64], in_at = 0, out_at = 0;
    for (int k = 0; k < g->size; k++) {
        in_counts[k] = (g->rank + 2 * k) % 3 * n / 4, out_counts[k] = (k + 2 * g->rank) % 3 * n / 4;
        for (int64_t i = 0; i < in_counts[k]; i++) put(a, type, in_at + i, value(me, i + k));
        for (int64_t i = 0; i < out_counts[k]; i++) put(c, type, out_at + i, value(g->members[k], i + g->rank));
        in_at += in_counts[k], out_at += out_counts[k];
    }
    comm_all_to_allv(g, b, out_counts, a, in_counts, type);
    count(g, COMM_ALL_TO_ALL, (size_t)in_at * bytes);
    check(memcmp(b, c, (size_t)out_at * bytes) == 0, "all_to_allv of %lld %s on %s", (long long)n, name, g->name);

    if (g->size > 1) { // round a ring, two messages of different tags, received in the other order
        const int next = (g->rank + 1) % g->size, before = (g->rank + g->size - 1) % g->size;
        for (int64_t i = 0; i < n; i++) put(a, type, i, value(me, i)), put(c, type, i, value(g->members[before], i));
        CommHandle sent[2] = {comm_send_start(g, a, n, type, next, 7), comm_send_start(g, a, n / 2, type, next, 16383)};
        memset(b, 0, part);
        comm_recv(g, b, n / 2, type, before, 16383);
        check(memcmp(b, c, (size_t)(n / 2) * bytes) == 0, "recv of %lld %s on %s, second tag", (long long)n / 2, name, g->name);
        comm_recv(g, b, n, type, before, 7);
        check(memcmp(b, c, part) == 0, "recv of %lld %s on %s", (long long)n, name, g->name);
        comm_wait(&sent[0]), comm_wait(&sent[1]);
        count(g, COMM_SEND, part), count(g, COMM_RECV, part);
        count(g, COMM_SEND, (size_t)(n / 2) * bytes), count(g, COMM_RECV, (size_t)(n / 2) * bytes);
    }
    comm_barrier(g);
    count(g, COMM_BARRIER, 0);
}

// Many buckets in flight on two groups, waited for in another order on every rank, some tested: the same bits as in one piece.
static void overlap(Comm *comm, CommGroup *g, float *a, float *c, int64_t n) {
    enum { BUCKETS = 21 };
    for (int64_t i = 0; i < n; i++) put(a, COMM_F32, i, value(comm->rank, i)), expect(g, c, COMM_F32, i, COMM_F32, i, COMM_SUM);
    CommHandle handles[BUCKETS];
    double scalars[BUCKETS];
    CommHandle small[BUCKETS];
    for (int b = 0; b < BUCKETS; b++) {
        const int64_t begin = n * b / BUCKETS, end = n * (b + 1) / BUCKETS;
        handles[b] = comm_all_reduce_start(g, a + begin, end - begin, COMM_F32, COMM_SUM);
        scalars[b] = b + comm->rank;
        small[b] = comm_all_reduce_start(comm->world, &scalars[b], 1, COMM_F64, COMM_SUM);
        count(g, COMM_ALL_REDUCE, (size_t)(end - begin) * 4), count(comm->world, COMM_ALL_REDUCE, 8);
        comm_progress(comm);
    }
    for (int i = 0; i < BUCKETS; i++) {
        const int b = (i * 5 + comm->rank) % BUCKETS;
        if (b % 3 == 0) {
            while (!comm_test(&handles[b])) sched_yield();
        } else {
            comm_wait(&handles[b]);
        }
        check(handles[b] == NULL, "a finished handle is NULL");
    }
    for (int b = 0; b < BUCKETS; b++) {
        comm_wait(&small[b]);
        check(scalars[b] == b * comm->size + comm->size * (comm->size - 1) / 2, "scalar %d in flight", b);
    }
    check(memcmp(a, c, (size_t)n * 4) == 0, "%d buckets on %s in flight have the bits of one piece", BUCKETS, g->name);
}

// Broadcasts from every root in flight, by messages where the memory is plain.
static void broadcasts(CommGroup *g, int32_t *a) {
    enum { COUNT = 12, SIZE = 400 };
    CommHandle handles[COUNT];
    for (int b = 0; b < COUNT; b++) {
        for (int i = 0; i < SIZE; i++) a[b * SIZE + i] = g->rank == b % g->size ? b * SIZE + i : -7;
        handles[b] = comm_broadcast_start(g, a + b * SIZE, SIZE * 4, COMM_BYTE, b % g->size);
        count(g, COMM_BROADCAST, SIZE * 4);
    }
    for (int b = 0; b < COUNT; b++) comm_wait(&handles[(b * 5 + g->rank) % COUNT]);
    bool same = true;
    for (int i = 0; i < COUNT * SIZE; i++) same = same && a[i] == i;
    check(same, "%d broadcasts in flight on %s", COUNT, g->name);
}

// A planted missing wait: reads the result too early. With late completion it reads NaN, whatever the timing.
static void missing_wait(Comm *comm, float *a) {
    if (comm->late == 0) comm_late(comm, 99);
    bool seen = true;
    for (int trial = 0; trial < 5; trial++) {
        for (int i = 0; i < 100; i++) a[i] = 1;
        CommHandle handle = comm_all_reduce_start(comm->world, a, 100, COMM_F32, COMM_SUM);
        count(comm->world, COMM_ALL_REDUCE, 400);
        for (int i = 0; i < 20; i++) comm_progress(comm), sched_yield();
        for (int i = 0; i < 100; i++) seen = seen && isnan(a[i]);
        comm_wait(&handle);
        for (int i = 0; i < 100; i++) seen = seen && a[i] == (float)comm->size;
    }
    check(seen, "late completion: NaN before the wait, the sum after it");
    comm_late(comm, 0);
}

static void special_values(CommGroup *g) {
    float x[3] = {g->rank == g->size - 1 ? NAN : 1, g->rank == 0 ? NAN : 2, g->rank == 0 ? -INFINITY : 3};
    comm_all_reduce(g, x, 3, COMM_F32, COMM_MAX);
    count(g, COMM_ALL_REDUCE, 12);
    check(isnan(x[0]) && isnan(x[1]) && (g->size == 1 ? x[2] == -INFINITY : x[2] == 3), "the maximum keeps NaN wherever it comes from");
    float zero = -0.0f;
    comm_all_reduce(g, &zero, 1, COMM_F32, COMM_SUM);
    count(g, COMM_ALL_REDUCE, 4);
    check(zero == 0 && signbit(zero), "a sum of -0 is -0");
}

// Groups come and go, far more than there are places for, at different places on every rank and given back in another order: what follows in a
// place must not see what was there before.
static void groups_come_and_go(Comm *comm, void *a, void *b, void *c) {
    enum { ROUNDS = 60, OWN = 5 };
    int list[64];
    bool shared = true;
    const int places = comm->group_count;
    for (int round = 0; round < ROUNDS; round++) {
        CommGroup *own[OWN] = {NULL}, *made[2];
        const int before = (comm->rank + round) % OWN; // groups of one, so that the ranks' next places differ
        for (int i = 0; i < before; i++) own[i] = comm_group(comm, &comm->rank, 1, "own");
        int n = 0;
        const int parts = 1 + round % 3; // the ranks r, r + parts, ...; then all of them
        for (int r = comm->rank % parts; r < comm->size; r += parts) list[n++] = r;
        made[0] = comm_group(comm, list, n, "part");
        for (int r = 0; r < comm->size; r++) list[r] = r;
        made[1] = comm_group(comm, list, comm->size, "all");
        for (int i = 0; i < 2; i++) {
            shared = shared && (!made[i]->shared) == (made[i]->size == 1 || comm->slots == NULL);
            collectives(made[i], round % 2 ? COMM_F32 : COMM_BF16, 1 + round, a, b, c);
            for (int k = 0; k < round % 11; k++) comm_barrier(made[i]), count(made[i], COMM_BARRIER, 0); // the number of collectives differs
        }
        for (int i = 0; i < before; i += 2) comm_group_free(own[i]);
        comm_group_free(made[round / 2 % 2]);
        if (round % 4 == 0) collectives(comm->world, COMM_F32, 65, a, b, c); // the others go on
        for (int i = 1; i < before; i += 2) comm_group_free(own[i]);
        comm_group_free(made[1 - round / 2 % 2]);
    }
    comm_group_free(NULL);
    check(shared || comm->local_size < comm->size, "a new group takes a place in shared memory that another has left");
    check(comm->group_count <= places + OWN + 2, "%d places of groups after %d groups", comm->group_count, 2 * ROUNDS);
}

// Forms that must not end well. What happens is comm.sh's to check.
static int ill(Comm *comm, const char *form, const char *file) {
    float x[1000] = {0};
    const bool stall = strcmp(form, "stall") == 0, lone = strcmp(form, "lone") == 0; // one rank is stopped
    comm_watchdog(comm, lone || strcmp(form, "compute") == 0 ? 1 : strcmp(form, "busy") == 0 ? 600 : 20);
    if (stall || strcmp(form, "ring") == 0) atomic_store(&comm->watch.silence_ms, 1000); // found without the limit of the main thread
    comm_heartbeat(comm, 17, "backward");
    comm_barrier(comm->world);
    if (strcmp(form, "die") == 0 && comm->rank == 1) die(CODE_NUMERIC, "planted");
    if (strcmp(form, "kill") == 0 && comm->rank == 1) raise(SIGKILL);
    if ((stall || lone) && comm->rank == 1) raise(SIGSTOP);
    if (strcmp(form, "compute") == 0) {
        for (;;) sched_yield();
    }
    if (strcmp(form, "ring") == 0) { // each waits for the one before
        comm_recv(comm->world, x, 10, COMM_F32, (comm->rank + comm->size - 1) % comm->size, 3);
    }
    if (strcmp(form, "busy") == 0 && comm->rank == 1) { // healthy: longer than a silent process is given
        for (const double end_ms = clock_ms() + COMM_SILENCE_MS + 3000; clock_ms() < end_ms;) sched_yield();
    }
    if (strcmp(form, "hold") == 0 && comm->rank == 1) { // until comm.sh kills it from outside
        FILE *to = fopen(file, "w");
        if (to == NULL || fprintf(to, "%d\n", (int)getpid()) < 0 || fclose(to) != 0) die(CODE_IO, "cannot write %s", file);
        for (;;) comm_progress(comm), sched_yield();
    }
    if (strcmp(form, "changed") == 0) {
        comm_late(comm, 5);
        CommHandle handle = comm_all_gather_start(comm->world, x + 100, x, 100, COMM_F32);
        x[3] = 1;
        comm_wait(&handle);
    }
    if (strcmp(form, "leak") == 0)
        comm_barrier_start(comm->world);
    else
        comm_all_reduce(comm->world, x, 1000, COMM_F32, COMM_SUM);
    comm_finish(comm);
    return 0;
}

int main(int argc, char **argv) {
    Error error = {0};
    if (!signals_block(&error)) die_error(&error); // as in the trainer: a launcher's SIGTERM leaves time to tell what was seen
    Comm *comm = comm_init(&argc, &argv);
    const bool little = argc > 1 && strcmp(argv[1], "small") == 0; // shared memory that holds one of two buffers
    if (argc > 1 && !little) return ill(comm, argv[1], argv[argc - 1]);
    comm_watchdog(comm, 20);
    comm_heartbeat(comm, 0, "test");
    if (comm->rank == 0) {
        printf("comm: %d ranks, %d on a host, %s, late completion %s\n", comm->size, comm->local_size, comm->slots ? "shared memory" : "messages",
               comm->late ? "on" : "off");
    }
    // Groups: the world, alone, even and odd ranks, first and last, made in another order by different ranks.
    int list[64], n = 0;
    for (int r = comm->rank % 2; r < comm->size; r += 2) list[n++] = r;
    CommGroup *half = comm_group(comm, list, n, "half");
    CommGroup *alone = comm_group(comm, &comm->rank, 1, "alone");
    const int ends[2] = {0, comm->size - 1};
    const bool at_end = comm->size > 1 && (comm->rank == 0 || comm->rank == comm->size - 1);
    CommGroup *outer = comm_group(comm, ends, at_end ? 2 : 0, "ends");
    n = 0; // consecutive pairs
    for (int r = comm->rank / 2 * 2; r < comm->size && r < comm->rank / 2 * 2 + 2; r++) list[n++] = r;
    CommGroup *pair = comm_group(comm, list, n, "pair");
    check(at_end == (outer != NULL), "no members, no group");

    const int64_t largest = 1000003, room = comm->size * largest;
    void *a = comm_alloc(comm, (size_t)room * 4), *b = comm_alloc(comm, (size_t)room * 4 + (size_t)comm->rank * 4096),
         *c = base_alloc_raw((size_t)room * 4);
    void *plain_a = base_alloc((size_t)comm->size * 5000 * 8), *plain_b = base_alloc((size_t)comm->size * 5000 * 8);
    check(comm_is_shared(comm, b) == (comm->slots != NULL && !little), "where shared memory is too small, comm_alloc gives plain memory");
    check(comm_is_shared(comm, a) == (comm->slots != NULL) && !comm_is_shared(comm, plain_a), "comm_alloc is shared where memory can be");
    check((uintptr_t)a % 64 == 0 && ((char *)b)[room * 4 - 1] == 0, "comm_alloc is aligned and zero");

    CommGroup *groups[] = {comm->world, half, alone, outer, pair};
    const int64_t sizes[] = {0, 1, 7, 64, 65, 2001};
    for (int i = 0; i < 5; i++) {
        for (int s = 0; s < 6 && groups[i] != NULL; s++) {
            for (int type = COMM_F32; type <= COMM_BYTE; type++) {
                const bool mixed = i == 0 || i == 4; // also plain memory
                collectives(groups[i], (CommType)type, sizes[s], a, b, c);
                if (mixed && (s == 2 || s == 5)) collectives(groups[i], (CommType)type, sizes[s], plain_a, plain_b, c);
                if (mixed && s == 5)
                    collectives(groups[i], (CommType)type, sizes[s], comm->rank % 2 ? plain_a : a, plain_b, c); // not the same everywhere
            }
        }
        if (groups[i] != NULL) special_values(groups[i]);
    }
    collectives(comm->world, COMM_F32, largest / comm->size, a, b, c); // parts; then the whole
    collectives(half, COMM_BF16, 100003 / comm->size, a, b, c);
    overlap(comm, comm->world, a, c, largest);
    overlap(comm, half, a, c, 100003);
    overlap(comm, pair, plain_a, c, 5000);
    broadcasts(comm->world, a);
    broadcasts(comm->world, plain_a);
    broadcasts(half, plain_a);
    missing_wait(comm, a);
    groups_come_and_go(comm, a, b, c);
    collectives(half, COMM_F32, 2001, a, b, c);

    bool counted = true, small = true;
    for (int kind = 0; kind < COMM_KINDS; kind++) {
        counted = counted && comm->counts[kind].calls == wanted[kind].calls && comm->counts[kind].bytes == wanted[kind].bytes;
        small = small && alone->counts[kind].calls == 0;
    }
    check(counted, "counters: calls and bytes of every kind are exact");
    check(small, "counters: a group of one counts nothing");
    comm_release(comm, a);
    void *again = comm_alloc(comm, 12345); // takes the released place
    for (int i = 0; i < 1000; i++) ((float *)again)[i] = 1;
    comm_all_reduce(comm->world, again, 1000, COMM_F32, COMM_SUM);
    check(((float *)again)[999] == (float)comm->size, "memory that was released and allocated again");
    comm_release(comm, again);
    comm_release(comm, b);
    free(c), free(plain_a), free(plain_b);

    int64_t totals[2] = {passed_, failed_};
    comm_all_reduce(comm->world, totals, 2, COMM_I64, COMM_SUM);
    const int rank = comm->rank;
    comm_finish(comm);
    if (rank == 0) printf("%lld passed, %lld failed\n", (long long)totals[0], (long long)totals[1]);
    return totals[1] > 0 || totals[0] == 0;
}
