// test_checkpoint_ranks.c: checkpoints of several ranks: saved in one division, read in another, bit by bit; slices that do not tile; ranks
// whose disk fails; damage. Runs on any number of ranks: alone, or under mpirun from dev/test/checkpoint_ranks.sh, which also calls the
// other forms:
//   test_checkpoint_ranks pass DIR    reads the newest checkpoint in DIR, left by a job of any number of ranks, and saves the next
//   test_checkpoint_ranks faults      with shim_io.so: system calls that fail on one rank's files
//   test_checkpoint_ranks slow        with shim_io.so: files so slow that the watchdog would end a job in which somebody waits in silence
//   test_checkpoint_ranks die DIR MS  saves into DIR until the last rank is killed, after MS ms
#include "dev/test/test.h"
#include "llmc/checkpoint.h"
#include "llmc/checkpoint_read.h"
#include "llmc/checkpoint_save.h"
#include <limits.h>       // PATH_MAX
#include <signal.h>       // signal, SIGXFSZ
#include <sys/resource.h> // setrlimit
#include <sys/time.h>     // setitimer

enum { TENSORS = 10, RANKS_MAX = 16 };

static const struct {
    const char *name;
    Dtype dtype;
    int rank;
    int64_t shape[2];
} tensors[TENSORS] = {{"scalar", DTYPE_F32, 1, {1, 1}},           {"zz.bias", DTYPE_F32, 1, {17, 1}},
                      {"a.weight", DTYPE_F32, 2, {5, 3}},         {"m.weight", DTYPE_BF16, 2, {13, 7}},
                      {"adam_m/m.weight", DTYPE_F32, 2, {13, 7}}, {"wte.weight", DTYPE_BF16, 2, {200, 333}},
                      {"master/wte", DTYPE_F32, 2, {200, 333}},   {"row", DTYPE_F32, 2, {1, 4001}},
                      {"column", DTYPE_F32, 2, {4001, 1}},        {"ids", DTYPE_I32, 1, {5000, 1}}};

static int64_t draw(uint64_t *state, int64_t limit) { return (int64_t)((*state = rng_mix(*state)) % (uint64_t)limit); }

// How `ranks` ranks divide tensor t: boxes by rows or columns, and the elements of a box among the ranks that share it; slices may be empty.
static void divide(uint64_t seed, int ranks, int t, CheckpointSlice out[RANKS_MAX]) {
    uint64_t random = rng_mix(rng_mix(seed * 64 + (uint64_t)t) + (uint64_t)ranks);
    const int axis = tensors[t].rank == 2 ? (int)draw(&random, 2) : 0;
    const int64_t n = tensors[t].shape[axis], boxes = min_i64(n, 1 + draw(&random, ranks)), turn = draw(&random, ranks);
    const bool alone = draw(&random, 4) == 0; // one rank has all of a box
    int64_t at[RANKS_MAX + 1];                // (members + 1) cuts of a box
    for (int64_t b = 0; b < boxes; b++) {
        const int64_t begin = n * b / boxes, end = n * (b + 1) / boxes, elements = (end - begin) * tensors[t].shape[1 - axis];
        const int members = (int)((ranks - b + boxes - 1) / boxes);
        at[0] = 0, at[members] = elements;
        for (int k = 1; k < members; k++) at[k] = alone ? elements : draw(&random, elements + 1);
        for (int k = 1; k < members; k++) {
            for (int j = k; j > 1 && at[j] < at[j - 1]; j--) {
                const int64_t swap = at[j];
                at[j] = at[j - 1], at[j - 1] = swap;
            }
        }
        for (int k = 0; k < members; k++) {
            CheckpointSlice *s = &out[(b + k * boxes + turn) % ranks];
            *s = checkpoint_whole("", tensors[t].name, tensors[t].dtype, tensors[t].rank, tensors[t].shape, NULL);
            s->begin[axis] = begin, s->end[axis] = end;
            s->from = at[k], s->to = at[k + 1];
        }
    }
}

// What rank r of `ranks` has, with room for its data. Half of the empty slices are left out.
static int slices_of(uint64_t seed, int ranks, int r, CheckpointSlice out[TENSORS]) {
    int count = 0;
    for (int t = 0; t < TENSORS; t++) {
        CheckpointSlice all[RANKS_MAX];
        divide(seed, ranks, t, all);
        if (all[r].from == all[r].to && (t + r) % 2 == 0) continue;
        out[count] = all[r];
        out[count++].data = base_new((size_t)(all[r].to - all[r].from), 4);
    }
    return count;
}

static void free_slices(CheckpointSlice *slices, int count) {
    for (int i = 0; i < count; i++) free(slices[i].data);
}

// The bytes of a slice's elements that are not those of the step; fills them instead when told to.
static int64_t compare(const CheckpointSlice *s, int64_t step, bool fill) {
    const int64_t width = s->end[1] - s->begin[1];
    const size_t bytes = dtype_bytes(s->dtype);
    uint64_t key = rng_mix((uint64_t)step);
    int64_t wrong = 0;
    for (const char *c = s->name; *c != '\0'; c++) key = rng_mix(key ^ (unsigned char)*c);
    for (int64_t e = s->from; e < s->to; e++) {
        const uint64_t bits = rng_mix(key + (uint64_t)((s->begin[0] + e / width) * s->shape[1] + s->begin[1] + e % width));
        char *at = (char *)s->data + (size_t)(e - s->from) * bytes;
        if (fill) memcpy(at, &bits, bytes);
        wrong += memcmp(at, &bits, bytes) != 0;
    }
    return wrong;
}

// The same on all ranks?
static bool everywhere(Comm *comm, bool good) {
    int64_t bad = !good;
    comm_all_reduce(comm->world, &bad, 1, COMM_I64, COMM_MAX);
    return bad == 0;
}
static bool same_text(Comm *comm, const Error *error) {
    Error first = *error;
    comm_broadcast(comm->world, &first, (int64_t)sizeof first, COMM_BYTE, 0);
    return everywhere(comm, first.code == error->code && strcmp(first.text, error->text) == 0);
}

typedef struct {
    Comm *comm;
    char out[PATH_MAX];
    CheckpointState state;
} Job;

static bool save_slices(Job *job, int64_t step, const CheckpointSlice *slices, int count, int64_t keep, Error *error) {
    job->state.step = step;
    job->state.seed = 11;
    return checkpoint_save(job->comm, job->out, &job->state, slices, count, keep, error);
}

static bool save(Job *job, int64_t step, uint64_t seed, int64_t keep, Error *error) {
    CheckpointSlice slices[TENSORS];
    const int count = slices_of(seed, job->comm->size, job->comm->rank, slices);
    for (int i = 0; i < count; i++) (void)compare(&slices[i], step, true);
    const bool good = save_slices(job, step, slices, count, keep, error);
    free_slices(slices, count);
    return good;
}

// Finds the newest checkpoint and reads it as `readers` ranks would, each rank here for some of them; its step, 0 when there is none, or -1.
static int64_t load(Job *job, uint64_t seed, int readers, FILE *notices, Error *error) {
    Checkpoint checkpoint;
    bool found;
    if (!checkpoint_find(job->comm, job->out, &checkpoint, &found, notices, error)) return -1;
    if (!found) return 0;
    const int64_t step = checkpoint.manifest.state.step;
    int64_t wrong = 0;
    for (int r = job->comm->rank; r < readers; r += job->comm->size) {
        CheckpointSlice slices[TENSORS];
        const int count = slices_of(seed, readers, r, slices);
        wrong += !checkpoint_read(&checkpoint, slices, count, false, error);
        for (int i = 0; i < count; i++) wrong += compare(&slices[i], step, false);
        free_slices(slices, count);
    }
    checkpoint_close(&checkpoint);
    return everywhere(job->comm, wrong == 0) ? step : -1;
}

static bool leftovers(const Job *job) {
    char command[PATH_MAX + 64];
    comm_barrier(job->comm->world); // rank 0 may still be removing
    snprintf(command, sizeof command, "ls -d '%s'/step_*.* >/dev/null 2>&1", job->out);
    return system(command) == 0;
}

// A directory for all ranks, in memory where that is shared.
static void make_directory(Job *job) {
    if (job->comm->rank == 0) {
        struct statvfs space;
        const bool memory = statvfs("/dev/shm", &space) == 0 && (double)space.f_bavail * (double)space.f_frsize > 512e6;
        snprintf(job->out, sizeof job->out, "%s/test_checkpoint_ranks_XXXXXX", memory ? "/dev/shm" : "/tmp");
        if (mkdtemp(job->out) == NULL) comm_abort(job->comm, CODE_IO, "cannot create %s", job->out);
    }
    comm_broadcast(job->comm->world, job->out, (int64_t)sizeof job->out, COMM_BYTE, 0);
}

static void remove_directory(const Job *job) {
    char command[PATH_MAX + 16];
    comm_barrier(job->comm->world);
    snprintf(command, sizeof command, "rm -rf '%s'", job->out);
    if (job->comm->rank == 0 && system(command) != 0) printf("cannot remove %s\n", job->out);
}

// ----------------------------------------------------------------------------

static void test_divisions(Job *job) {
    enum { ROUNDS = 12 };
    int bad = 0;
    for (int64_t step = 1; step <= ROUNDS; step++) {
        Error error = {0};
        const int readers = 1 + (int)(step * 5 % 11);
        const bool saved = save(job, step, (uint64_t)step, 2, &error);
        const int64_t got = load(job, (uint64_t)step + 1000, readers, NULL, &error),
                      same = load(job, (uint64_t)step, job->comm->size, NULL, &error);
        if (!saved || got != step || same != step) {
            printf("  step %lld, %d readers: %s\n", (long long)step, readers, error.text);
            bad++;
        }
    }
    check(bad == 0, "%d divisions of %d tensors over %d ranks, read in others: %d were wrong", ROUNDS, TENSORS, job->comm->size, bad);
    int64_t count = 0;
    Error error = {0};
    check(checkpoint_count(job->out, &count, &error) && count == 2 && !leftovers(job), "2 are kept (%lld)", (long long)count);
}

// What the ranks hold does not tile the tensors: told on all ranks, nothing is written.
static void test_tiling(Job *job) {
    static const char *const messages[] = {"is in 0 slices, wanted 1",       "is in 2 slices, wanted 1", "disagree on its shape",
                                           "disagree on its shape or dtype", "two slices of it",         "wanted a part of"};
    const int last = job->comm->size - 1;
    for (int fault = 0; fault < 6; fault++) {
        CheckpointSlice slices[TENSORS + 2];
        Error error = {0};
        int count = slices_of(5, job->comm->size, job->comm->rank, slices);
        float value[2] = {0};
        const int64_t shape[2] = {2, 1}, turned[2] = {1, 2};
        const int first_count = count;
        const bool own = job->comm->rank == 0 || job->comm->rank == last;
        CheckpointSlice extra = checkpoint_whole("", "extra", DTYPE_F32, 2, shape, value);
        if (fault == 0 && job->comm->rank == last) extra.to = 1, slices[count++] = extra;
        if ((fault == 1 || fault == 4) && own) slices[count++] = extra;
        if (fault == 4 && job->comm->rank == last) slices[count++] = extra;
        if (fault == 2 && own) slices[count++] = job->comm->rank == 0 ? extra : checkpoint_whole("", "extra", DTYPE_F32, 2, turned, value);
        if (fault == 3 && own) slices[count++] = job->comm->rank == 0 ? extra : checkpoint_whole("", "extra", DTYPE_I32, 2, shape, value);
        if (fault == 5 && job->comm->rank == last) extra.to = 3, slices[count++] = extra;
        if (job->comm->size == 1 && fault >= 1 && fault <= 3) {
            free_slices(slices, first_count);
            continue; // takes two ranks
        }
        const bool saved = save_slices(job, 100, slices, count, 2, &error);
        const bool alike = same_text(job->comm, &error), left = leftovers(job);
        check(!saved && alike && error.code == CODE_IO && strstr(error.text, messages[fault]) && strstr(error.text, "extra") && !left,
              "fault %d of tiling, wanted '%s': %s", fault, messages[fault], error.text);
        free_slices(slices, first_count);
    }
    Error error = {0}, none = {0};
    const bool saved = save_slices(job, 100, NULL, 0, 2, &none);
    check(!saved && same_text(job->comm, &none) && strstr(none.text, "no rank holds anything"), "nothing to save: %s", none.text);
    check(load(job, 5, 3, NULL, &error) == 12 && !leftovers(job), "after them: the checkpoint before is found %s", error.text);
}

// Ranks that may not write: all are told the first one's error.
static void test_limits(Job *job) {
    Comm *comm = job->comm;
    signal(SIGXFSZ, SIG_IGN); // a write beyond the limit then fails with EFBIG
    for (int k = 0; k < 3; k++) {
        const int failing = k == 0 ? comm->size - 1 : k == 1 ? 0 : comm->size / 2; // the first of those that fail
        struct rlimit before;
        getrlimit(RLIMIT_FSIZE, &before);
        const struct rlimit small = {64, before.rlim_max};
        const bool fails = comm->rank == failing || (k == 2 && comm->rank > failing);
        Error error = {0}, after = {0};
        CheckpointSlice slices[TENSORS + 1];
        float value[100] = {0};
        int count = slices_of(9, comm->size, comm->rank, slices); // and something on each rank, so that it has a file
        const int64_t shape[2] = {comm->size, 100};
        slices[count] = checkpoint_whole("", "each", DTYPE_F32, 2, shape, value);
        slices[count].begin[0] = comm->rank, slices[count].end[0] = comm->rank + 1, slices[count].to = 100;
        if (fails) setrlimit(RLIMIT_FSIZE, &small);
        const bool saved = save_slices(job, 200, slices, count + 1, 2, &error);
        if (fails) setrlimit(RLIMIT_FSIZE, &before);
        free_slices(slices, count);
        char file[48], who[24] = "";
        snprintf(file, sizeof file, "rank_%05d.safetensors", failing);
        if (comm->size > 1) snprintf(who, sizeof who, "rank %d: ", failing);
        const bool alike = same_text(comm, &error), left = leftovers(job);
        check(!saved && alike && !left && error.code == CODE_IO && strncmp(error.text, who, strlen(who)) == 0 && strstr(error.text, file) &&
                  strstr(error.text, strerror(EFBIG)),
              "rank %d cannot write: %s", failing, error.text);
        check(load(job, 9, 2, NULL, &after) == 12, "and the checkpoint before is found: %s", after.text);
    }
}

static void flip(const char *path, int64_t at) {
    const int fd = open(path, O_RDWR);
    char byte = 0;
    if (fd < 0 || pread(fd, &byte, 1, (off_t)at) != 1) die(CODE_IO, "cannot read %s", path);
    byte ^= 1;
    if (pwrite(fd, &byte, 1, (off_t)at) != 1 || close(fd) != 0) die(CODE_IO, "cannot write %s", path);
}

// A damaged file of each rank in turn: told alike on all ranks, and the one before is taken.
static void test_damage(Job *job) {
    Comm *comm = job->comm;
    Error error = {0};
    check(save(job, 20, 3, 0, &error) && save(job, 21, 4, 0, &error), "two good ones: %s", error.text);
    char directory[PATH_MAX], *manifest;
    if (snprintf(directory, sizeof directory, "%s/step_00000021", job->out) >= (int)sizeof directory) die(CODE_IO, "path");
    manifest = path_join(directory, CHECKPOINT_MANIFEST);
    for (int r = 0; r <= comm->size; r++) {
        char name[CHECKPOINT_NAME_CHARS], said[4096] = "";
        snprintf(name, sizeof name, "rank_%05d.safetensors", r);
        char *path = r < comm->size ? path_join(directory, name) : base_copy_text(manifest);
        if (access(path, F_OK) == 0) { // a rank may hold nothing
            comm_barrier(comm->world);
            if (comm->rank == 0) flip(path, 300);
            comm_barrier(comm->world);
            Checkpoint checkpoint;
            Error told = {0}, after = {0};
            FILE *notices = fmemopen(said, sizeof said, "w");
            const bool opened = checkpoint_open(comm, directory, &checkpoint, &told);
            const bool alike = same_text(comm, &told);
            const int64_t step = load(job, 77, 3, notices, &after);
            fclose(notices);
            check(!opened && alike && told.code == CODE_INPUT && strstr(told.text, strrchr(path, '/')) &&
                      (comm->size == 1 || strncmp(told.text, "rank ", 5) == 0),
                  "a damaged file: %s", told.text);
            check(step == 20 && (said[0] != '\0') == (comm->rank == 0), "the one before is taken (step %lld), told once: %s %s", (long long)step,
                  said, after.text);
            comm_barrier(comm->world);
            if (comm->rank == 0) flip(path, 300);
            comm_barrier(comm->world);
        }
        free(path);
    }
    check(load(job, 78, 4, NULL, &error) == 21, "mended: %s", error.text);
    Checkpoint checkpoint;
    Error none = {0};
    if (comm->rank == 0) unlink(manifest);
    comm_barrier(comm->world);
    check(!checkpoint_open(comm, directory, &checkpoint, &none) && same_text(comm, &none) && strstr(none.text, "no manifest.json"), "none: %s",
          none.text);
    free(manifest);
}

// ----------------------------------------------------------------------------
// Under shim_io.so, which looks at the environment at every call.

static void shim(const char *call, const char *path, const char *how) {
    setenv("SHIM_PATH", path, 1);
    setenv("SHIM_CALL", call, 1);
    setenv("SHIM_AT", "1", 1);
    setenv("SHIM_ALL", "1", 1);
    setenv("SHIM_ERROR", how, 1);
}
static void shim_off(void) { unsetenv("SHIM_CALL"); }

static void test_faults(Job *job) {
    static const struct {
        const char *call;
        int where; // 0: the last rank's file, 1: the manifest, 2: the directory that is written
        int error;
    } kinds[] = {{"open", 0, EMFILE}, {"write", 0, ENOSPC}, {"fsync", 0, EIO}, {"close", 0, EIO},  {"open", 1, EMFILE}, {"write", 1, ENOSPC},
                 {"fsync", 1, EIO},   {"close", 1, EIO},    {"mkdir", 2, EIO}, {"rename", 2, EIO}, {"fsync", 2, EIO}};
    Comm *comm = job->comm;
    Error error = {0};
    check(save(job, 1, 1, 2, &error), "the first: %s", error.text);
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        const int failing = kinds[k].where == 0 ? comm->size - 1 : 0;
        char file[48] = CHECKPOINT_MANIFEST, number[16], who[24];
        if (kinds[k].where == 0) snprintf(file, sizeof file, "rank_%05d.safetensors", failing);
        if (kinds[k].where == 2) snprintf(file, sizeof file, "step_00000002.tmp");
        snprintf(number, sizeof number, "%d", kinds[k].error);
        snprintf(who, sizeof who, "rank %d: ", failing);
        Error told = {0}, after = {0};
        // Each rank holds something: so every division does whose boxes are not held by one rank alone.
        CheckpointSlice slices[TENSORS + 1];
        float value = 1;
        int count = slices_of(2, comm->size, comm->rank, slices);
        const int64_t shape[2] = {comm->size, 1};
        slices[count] = checkpoint_whole("", "each", DTYPE_F32, 1, shape, &value);
        slices[count].begin[0] = comm->rank, slices[count].end[0] = comm->rank + 1, slices[count].to = 1;
        shim(kinds[k].call, file, number);
        const bool saved = save_slices(job, 2, slices, count + 1, 2, &told);
        const bool alike = same_text(comm, &told);
        shim_off();
        free_slices(slices, count);
        const bool left = leftovers(job);
        check(!saved && alike && !left && told.code == CODE_IO && strncmp(told.text, who, strlen(who)) == 0 && strstr(told.text, file) &&
                  strstr(told.text, strerror(kinds[k].error)),
              "%s of %s on rank %d, left over: %d: %s", kinds[k].call, file, failing, left, told.text);
        check(load(job, 3, 3, NULL, &after) == 1, "the one before is found: %s", after.text);
    }
    Error after = {0};
    check(save(job, 2, 4, 2, &after) && load(job, 5, 3, NULL, &after) == 2, "and the next save is good: %s", after.text);
}

// The last rank's file takes seconds to write, to verify and to read; a watchdog of 1.5 s looks on.
static void test_slow(Job *job) {
    Comm *comm = job->comm;
    const int last = comm->size - 1;
    const int64_t elements = 6 * (int64_t)FILES_CHUNK_BYTES / 4, shape[2] = {elements, 1};
    float *data = base_new((size_t)elements, 4), small = 3;
    CheckpointSlice slices[2] = {checkpoint_whole("", "big", DTYPE_F32, 1, shape, data),
                                 checkpoint_whole("", "small", DTYPE_F32, 1, shape, &small)};
    slices[1].shape[0] = slices[1].end[0] = slices[1].to = 1;
    for (int64_t i = 0; i < elements; i++) data[i] = (float)(i % 1000);
    char file[CHECKPOINT_NAME_CHARS];
    snprintf(file, sizeof file, "rank_%05d.safetensors", last);
    comm_watchdog(comm, 1.5);
    comm_heartbeat(comm, 1, "saving");
    Error error = {0};
    shim("write", file, "slow");
    const double begin = clock_ms();
    const bool saved =
        save_slices(job, 1, comm->rank == last ? slices : &slices[1], comm->rank == last ? 1 + (comm->size == 1) : comm->rank == 0, 2, &error);
    const double saved_ms = clock_ms() - begin;
    check(saved && saved_ms > 2000, "saved in %.0f ms %s", saved_ms, error.text);
    shim("pread", file, "slow");
    Checkpoint checkpoint;
    bool found = false;
    const bool good = checkpoint_find(comm, job->out, &checkpoint, &found, NULL, &error);
    const double opened_ms = clock_ms() - begin - saved_ms;
    check(good && found && opened_ms > 2000, "verified in %.0f ms %s", opened_ms, error.text);
    memset(data, 0, (size_t)elements * 4);
    const bool read = good && found && checkpoint_read(&checkpoint, slices, 1, false, &error);
    int64_t wrong = 0;
    for (int64_t i = 0; i < elements; i++) wrong += data[i] != (float)(i % 1000);
    check(read && wrong == 0, "read in %.0f ms: %lld wrong %s", clock_ms() - begin - saved_ms - opened_ms, (long long)wrong, error.text);
    shim_off();
    if (good && found) checkpoint_close(&checkpoint);
    free(data);
}

// The last rank's disk hangs while all save: a watchdog ends the job.
static void test_hang(Job *job) {
    char file[CHECKPOINT_NAME_CHARS];
    Error error = {0};
    snprintf(file, sizeof file, "rank_%05d.safetensors", job->comm->size - 1);
    comm_watchdog(job->comm, 1.5);
    comm_heartbeat(job->comm, 1, "saving");
    shim("fsync", file, "hang");
    const bool saved = save(job, 1, 1, 2, &error);
    check(false, "a save that cannot end did: %d %s", saved, error.text);
}

// Reads what another job left, and leaves the next.
static void test_pass(Job *job) {
    Error error = {0};
    int64_t told = 0;
    char *path = path_join(job->out, "told"); // by rank 0 after each save
    FILE *file = fopen(path, "rb");
    if (file != NULL && fread(&told, sizeof told, 1, file) != 1) told = -1;
    if (file != NULL) fclose(file);
    const int64_t step = load(job, 31, 1 + job->comm->size % 5, stderr, &error);
    check(step >= told && told >= 0, "told %lld, found step %lld %s", (long long)told, (long long)step, error.text);
    check(save(job, step + 1, (uint64_t)step, 2, &error) && load(job, 32, 7, NULL, &error) == step + 1, "saved the next: %s", error.text);
    if (job->comm->rank == 0) printf("  found step %lld\n", (long long)step);
    free(path);
}

static void save_forever(Job *job, int64_t ms) {
    Error error = {0};
    char *path = path_join(job->out, "told");
    const int64_t found = load(job, 8, 2, stderr, &error);
    if (found < 0) comm_abort(job->comm, CODE_INPUT, "%s", error.text);
    comm_barrier(job->comm->world);
    const struct itimerval timer = {.it_value = {ms / 1000, ms % 1000 * 1000}};
    if (job->comm->rank == job->comm->size - 1) setitimer(ITIMER_REAL, &timer, NULL); // its signal ends the process
    for (int64_t step = found + 1;; step++) {
        if (!save(job, step, (uint64_t)step, 2, &error)) comm_abort(job->comm, CODE_IO, "%s", error.text);
        FILE *file = job->comm->rank == 0 ? fopen(path, "wb") : NULL;
        if (file != NULL && (fwrite(&step, sizeof step, 1, file) != 1 || fclose(file) != 0)) comm_abort(job->comm, CODE_IO, "told");
    }
}

int main(int argc, char **argv) {
    Job job = {.comm = comm_init(&argc, &argv)};
    const char *form = argc > 1 ? argv[1] : "";
    const bool shared = strcmp(form, "pass") == 0 || strcmp(form, "die") == 0 || strcmp(form, "hang") == 0;
    if (job.comm->size > RANKS_MAX || (shared && argc < 3)) comm_abort(job.comm, CODE_USAGE, "usage: at most %d ranks", RANKS_MAX);
    job.state.model = json_object();
    job.state.flags = json_object();
    if (shared)
        snprintf(job.out, sizeof job.out, "%s", argv[2]);
    else
        make_directory(&job);
    if (strcmp(form, "die") == 0) save_forever(&job, argc > 3 ? atoll(argv[3]) : 100);
    if (strcmp(form, "pass") == 0) test_pass(&job);
    if (strcmp(form, "faults") == 0) test_faults(&job);
    if (strcmp(form, "slow") == 0) test_slow(&job);
    if (strcmp(form, "hang") == 0) test_hang(&job);
    if (form[0] == '\0') {
        test_divisions(&job);
        test_tiling(&job);
        test_limits(&job);
        test_damage(&job);
    }
    if (!shared) remove_directory(&job);
    json_decref(job.state.model);
    json_decref(job.state.flags);
    int64_t totals[2] = {passed_, failed_};
    comm_all_reduce(job.comm->world, totals, 2, COMM_I64, COMM_SUM);
    const int rank = job.comm->rank;
    comm_finish(job.comm);
    if (rank == 0) printf("%lld passed, %lld failed\n", (long long)totals[0], (long long)totals[1]);
    return totals[1] > 0 || totals[0] == 0;
}
