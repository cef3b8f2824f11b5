// test_checkpoint_async.c: a save whose file a thread writes: the caller may change what it copied from, errors of the thread are told by the
// end of the save and harm nothing, signals do not reach the thread, what was saved is what was handed over, also where the thread must ask for
// it. Also runs under ThreadSanitizer.
#include "llmc/checkpoint.h"      // what is tested
#include "llmc/checkpoint_read.h" // and
#include "llmc/checkpoint_save.h" // and
#include "test.h"                 // check
#include <sys/resource.h>         // setrlimit

enum { ELEMENTS = 6 << 20, SAVES = 6 }; // 24 MB: three chunks of the writer

static Comm *comm_; // of one rank
static char out_[64];
static pthread_t main_thread_;
static atomic_int signals_elsewhere_, signals_here_;

static void on_signal(int number) {
    (void)number;
    atomic_fetch_add(pthread_equal(pthread_self(), main_thread_) ? &signals_here_ : &signals_elsewhere_, 1);
}

static void fill(float *data, int64_t step) {
    for (int64_t i = 0; i < ELEMENTS; i++) data[i] = (float)((i * 31 + step * 1000003) % 65536);
}

static bool begin(CheckpointSave *save, int64_t step, float *data, Error *error) {
    const CheckpointDataFile files[] = {{"a.bin", 100}};
    const CheckpointState state = {
        .step = step, .tokens = step, .data_files = files, .data_file_count = 1, .model = json_object(), .flags = json_object()};
    const int64_t shape[2] = {ELEMENTS, 1};
    const CheckpointSlice slice = checkpoint_whole("", "w", DTYPE_F32, 1, shape, data);
    const bool good = checkpoint_save_begin(save, comm_, out_, &state, &slice, 1, 2, error);
    json_decref(state.model);
    json_decref(state.flags);
    return good;
}

// The newest checkpoint's step when every element is that step's; -1 otherwise, 0 when there is none.
static int64_t newest(float *data) {
    Checkpoint checkpoint;
    Error error = {0};
    bool found = false;
    if (!checkpoint_find(comm_, out_, &checkpoint, &found, NULL, &error)) return -1;
    if (!found) return 0;
    const int64_t step = checkpoint.manifest.state.step, shape[2] = {ELEMENTS, 1};
    float *wanted = base_new(ELEMENTS, sizeof *wanted);
    const CheckpointSlice slice = checkpoint_whole("", "w", DTYPE_F32, 1, shape, data);
    fill(wanted, step);
    const bool good = checkpoint_read(&checkpoint, &slice, 1, false, &error) && memcmp(wanted, data, ELEMENTS * sizeof *data) == 0;
    free(wanted);
    checkpoint_close(&checkpoint);
    return good ? step : -1;
}

// Saves from a copy while the caller writes to the original, as training does.
static void test_overlap(float *live, float *copy) {
    CheckpointSave save;
    Error error = {0};
    memset(&save, 0, sizeof save);
    int64_t good = 0, while_written = 0;
    for (int64_t step = 1; step <= SAVES; step++) {
        fill(live, step);
        memcpy(copy, live, ELEMENTS * sizeof *copy);
        if (!begin(&save, step, copy, &error)) break;
        for (int64_t k = 0; !checkpoint_save_written(&save) || k == 0; k++) {
            live[k % ELEMENTS] = -1;
            while_written++;
        }
        const bool finished = checkpoint_save_finish(&save, &error);
        good += finished && save.comm == NULL && newest(live) == step;
    }
    check(good == SAVES, "%lld of %d saves are those of their step %s", (long long)good, SAVES, error.text);
    check(while_written > SAVES, "the caller went on while files were written: %lld", (long long)while_written);
    printf("  %d saves of %d MB, %lld writes to the original meanwhile\n", SAVES, ELEMENTS >> 18, (long long)while_written);
}

// A file that may not grow: the beginning is good, the end tells, and what was there is there.
static void test_failure(float *live, float *copy) {
    CheckpointSave save;
    Error error = {0}, after = {0};
    struct rlimit before;
    memset(&save, 0, sizeof save);
    getrlimit(RLIMIT_FSIZE, &before);
    const struct rlimit small = {1 << 20, before.rlim_max};
    signal(SIGXFSZ, SIG_IGN); // a write beyond the limit then fails with EFBIG
    setrlimit(RLIMIT_FSIZE, &small);
    fill(copy, 100);
    const bool began = begin(&save, 100, copy, &error);
    while (began && !checkpoint_save_written(&save)) sched_yield();
    setrlimit(RLIMIT_FSIZE, &before);
    const bool finished = began && checkpoint_save_finish(&save, &error);
    check(began && !finished && error.code == CODE_IO && strstr(error.text, "rank_00000.safetensors") && strstr(error.text, strerror(EFBIG)),
          "a write that fails: %s", error.text);
    printf("  told: %s\n", strrchr(error.text, '/') != NULL ? strrchr(error.text, '/') : error.text);
    char *left = path_join(out_, "step_00000100.tmp");
    check(access(left, F_OK) != 0 && newest(live) == SAVES, "nothing is left, and the checkpoint before is whole");
    free(left);
    check(begin(&save, 101, copy, &after) && checkpoint_save_finish(&save, &after), "the next save is good: %s", after.text);
}

// The main thread blocks a signal only after the save began: it must not be taken by the thread that writes.
static void test_signals(float *copy) {
    CheckpointSave save;
    Error error = {0};
    sigset_t set, mask;
    memset(&save, 0, sizeof save);
    signal(SIGUSR1, on_signal);
    for (int64_t step = 201; step <= 203; step++) {
        fill(copy, step);
        if (!begin(&save, step, copy, &error)) break;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR1);
        pthread_sigmask(SIG_BLOCK, &set, &mask);
        kill(getpid(), SIGUSR1);
        const bool good = checkpoint_save_finish(&save, &error);
        pthread_sigmask(SIG_SETMASK, &mask, NULL);
        check(good && newest(copy) == step, "step %lld is saved: %s", (long long)step, error.text);
    }
    check(atomic_load(&signals_elsewhere_) == 0 && atomic_load(&signals_here_) == 3, "signals: %d for the main thread, %d for others",
          atomic_load(&signals_here_), atomic_load(&signals_elsewhere_));
}

// Data that means nothing until the main thread has copied it: every bit is turned.
typedef struct {
    int64_t copies;
    bool elsewhere; // another thread than the main one copied, or more than a piece was asked for
} Fetched;

static void fetch(void *context, void *to, const void *from, size_t bytes) {
    Fetched *fetched = context;
    fetched->copies++;
    if (!pthread_equal(pthread_self(), main_thread_) || bytes > FILES_CHUNK_BYTES) fetched->elsewhere = true;
    for (size_t i = 0; i < bytes; i++) ((unsigned char *)to)[i] = (unsigned char)~((const unsigned char *)from)[i];
}

static void test_fetch(float *live, float *turned) {
    CheckpointSave save;
    Error error = {0};
    Fetched fetched = {0};
    memset(&save, 0, sizeof save);
    void *piece = base_alloc(FILES_CHUNK_BYTES);
    save.fetch = (CheckpointFetch){fetch, &fetched, piece};
    fill(live, 301);
    for (size_t i = 0; i < ELEMENTS * sizeof *live; i++) ((unsigned char *)turned)[i] = (unsigned char)~((unsigned char *)live)[i];
    const bool good = begin(&save, 301, turned, &error) && checkpoint_save_finish(&save, &error);
    check(good && newest(live) == 301, "a save by pieces: %s", error.text);
    check(fetched.copies >= 3 && !fetched.elsewhere && save.fetch.copy == NULL, "%lld pieces, copied by the main thread",
          (long long)fetched.copies);
    free(piece);
}

int main(int argc, char **argv) {
    comm_ = comm_init(&argc, &argv);
    main_thread_ = pthread_self();
    struct statvfs space;
    const bool memory = statvfs("/dev/shm", &space) == 0 && (double)space.f_bavail * (double)space.f_frsize > 256e6;
    snprintf(out_, sizeof out_, "%s/test_checkpoint_async_XXXXXX", memory ? "/dev/shm" : "/tmp");
    if (mkdtemp(out_) == NULL) die(CODE_IO, "cannot create %s", out_);
    float *live = base_new(ELEMENTS, sizeof *live), *copy = base_new(ELEMENTS, sizeof *copy);
    test_overlap(live, copy);
    test_failure(live, copy);
    test_signals(copy);
    test_fetch(live, copy);
    check(checkpoint_interval(0.5, 24 * 3600) > 293.9 && checkpoint_interval(0.5, 24 * 3600) < 294, "Young's interval: %g s",
          checkpoint_interval(0.5, 24 * 3600));
    free(live);
    free(copy);
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", out_);
    check(system(command) == 0, "%s", command);
    comm_finish(comm_);
    return test_end();
}
