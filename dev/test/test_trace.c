// test_trace.c: traces, read back with a JSON parser: window of steps, nesting, caps, errors, clocks. Runs on any number of ranks: alone,
// or under mpirun from dev/test/trace.sh. `test_trace FILE` only writes the trace of a made-up pipeline step (to be drawn).
#include "llmc/trace.h"    // what is tested
#include "dev/test/test.h" // check, test_end
#include <jansson.h>       // json_load_file
#include <signal.h>        // SIGXFSZ
#include <sys/resource.h>  // setrlimit

static char out_[64] = "/tmp/none"; // directory of the test, on rank 0

static const char *path_(const char *name) {
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", out_, name);
    return path;
}

static void test_parse(void) {
    static const struct {
        const char *text;
        int64_t first, last; // 0: refused
    } cases[] = {
        {"1:1", 1, 1},
        {"2:10", 2, 10},
        {"1:1000000000000", 1, 1000000000000},
        {"007:8", 7, 8},
        {"", 0, 0},
        {"1", 0, 0},
        {"1:", 0, 0},
        {":1", 0, 0},
        {"0:3", 0, 0},
        {"3:2", 0, 0},
        {"1:2:3", 0, 0},
        {"a:b", 0, 0},
        {"1:2x", 0, 0},
        {" 1:2", 0, 0},
        {"-1:2", 0, 0},
        {"+1:2", 0, 0},
        {"1:2 ", 0, 0},
        {"1-2", 0, 0},
        {"1.5:2", 0, 0},
        {"1::2", 0, 0},
        {"1:99999999999999999999999", 0, 0},
        {"1:1000000000001", 0, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        Error error = {0};
        int64_t first = -1, last = -1;
        const bool good = trace_parse(cases[i].text, &first, &last, &error);
        check(good == (cases[i].first > 0), "'%s': %s", cases[i].text, good ? "taken" : error.text);
        if (good) check(first == cases[i].first && last == cases[i].last, "'%s': got %lld:%lld", cases[i].text, (long long)first, (long long)last);
        if (!good)
            check(error.code == CODE_USAGE && strncmp(error.text, "--trace: ", 9) == 0 && first == -1, "'%s': '%s'", cases[i].text, error.text);
    }
}

static void test_zeros(Comm *comm) {
    Trace trace = {0};
    Error error = {0};
    for (int step = 0; step < 3; step++) {
        trace_step(&trace, step);
        trace_begin(&trace, "forward", 0, 0);
        trace_end(&trace);
        trace_end(&trace);
    }
    trace_label(&trace, "");
    check(trace_write(&trace, comm, path_("zeros.json"), &error) && error.code == 0, "a trace of zeros writes nothing: %s", error.text);
    check(trace.count == 0 && trace.dropped == 0 && trace.spans == NULL && access(path_("zeros.json"), F_OK) != 0, "and holds nothing");
    trace_free(&trace);
}

// One span among those of a file.
typedef struct {
    const char *name;
    int rank, microbatch, chunk;
    int64_t step;
    double begin, end;
} Seen;

typedef struct {
    json_t *root;
    Seen *spans;
    size_t count;
    double clock_error, dropped;
} Read;

static Read read_(const char *path, int ranks) {
    json_error_t where = {0};
    Read read = {.root = json_load_file(path, JSON_REJECT_DUPLICATES, &where)};
    check(read.root != NULL, "%s: line %d: %s", path, where.line, where.text);
    const json_t *events = json_object_get(read.root, "traceEvents"), *other = json_object_get(read.root, "otherData");
    check(json_is_array(events) && json_integer_value(json_object_get(other, "ranks")) == ranks, "events of %d ranks", ranks);
    read.clock_error = json_number_value(json_object_get(other, "clock_error_us"));
    read.dropped = json_number_value(json_object_get(other, "spans_dropped"));
    read.spans = base_new(json_array_size(events), sizeof *read.spans);
    int names = 0;
    for (size_t i = 0; i < json_array_size(events); i++) {
        const json_t *event = json_array_get(events, i), *args = json_object_get(event, "args");
        const char *kind = json_string_value(json_object_get(event, "ph")), *name = json_string_value(json_object_get(event, "name"));
        const json_t *rank = json_object_get(event, "pid");
        if (kind == NULL || name == NULL || !json_is_integer(rank) || !json_is_object(args) || json_integer_value(rank) >= ranks) {
            check(false, "event %zu lacks something", i);
            continue;
        }
        if (strcmp(kind, "M") == 0) {
            char wanted[32];
            snprintf(wanted, sizeof wanted, "rank %d on ", (int)json_integer_value(rank));
            const char *process = json_string_value(json_object_get(args, "name"));
            if (strcmp(name, "process_name") == 0) names += process != NULL && strncmp(process, wanted, strlen(wanted)) == 0;
            continue;
        }
        const json_t *microbatch = json_object_get(args, "microbatch"), *chunk = json_object_get(args, "chunk");
        const double begin = json_number_value(json_object_get(event, "ts")), duration = json_number_value(json_object_get(event, "dur"));
        check(strcmp(kind, "X") == 0 && json_is_number(json_object_get(event, "ts")) && json_is_number(json_object_get(event, "dur")) &&
                  begin >= 0 && duration >= 0,
              "event %zu: %s, %g us for %g us", i, kind, begin, duration);
        read.spans[read.count++] = (Seen){.name = name,
                                          .rank = (int)json_integer_value(rank),
                                          .microbatch = microbatch ? (int)json_integer_value(microbatch) : -1,
                                          .chunk = chunk ? (int)json_integer_value(chunk) : -1,
                                          .step = json_integer_value(json_object_get(args, "step")),
                                          .begin = begin,
                                          .end = begin + duration};
    }
    check(names == ranks, "%d processes are named, wanted %d", names, ranks);
    return read;
}
static void read_free_(Read *read) {
    free(read->spans);
    json_decref(read->root);
}

static void spin_(double ms) {
    for (const double end = clock_ms() + ms; clock_ms() < end;) sched_yield();
}

// Steps 1 to 6, of which 3 and 4 are traced; a span from before the window, one across two steps, one that is open when the window ends.
static void test_window(Comm *comm) {
    Trace trace;
    Error error = {0};
    trace_open(&trace, comm, 3, 4);
    trace_label(&trace, "tp 0, \"pp\\ 1");
    trace_begin(&trace, "setup", -1, -1);
    for (int step = 1; step <= 6; step++) {
        if (step == 3) trace_begin(&trace, "early", -1, -1); // the step is not told yet
        trace_step(&trace, step);
        if (step == 3) trace_end(&trace); // of early
        trace_begin(&trace, "step", -1, -1);
        for (int m = 0; m < 2; m++) {
            trace_begin(&trace, "forward", m, comm->rank);
            trace_begin(&trace, "wait", -1, 0);
            spin_(0.2);
            trace_end(&trace);
            trace_end(&trace);
        }
        trace_end(&trace);
        if (step == 3) trace_begin(&trace, "across", 7, -1);
        if (step == 4) trace_end(&trace), trace_begin(&trace, "left open", -1, -1);
        if (step == 5) trace_end(&trace);
    }
    check(trace.depth == 0 && trace.count == 12, "%lld spans, depth %d", (long long)trace.count, trace.depth);
    check(trace_write(&trace, comm, path_("window.json"), &error), "write: %s", error.text);
    check(trace.all_spans == 12 * comm->size && trace.all_dropped == 0, "spans of all ranks: %lld", (long long)trace.all_spans);
    trace_free(&trace);
    if (comm->rank > 0) return;
    check(access(path_("window.json.tmp"), F_OK) != 0, "no .tmp is left");
    Read read = read_(path_("window.json"), comm->size);
    check(read.count == (size_t)(12 * comm->size), "%zu spans in the file, wanted %d", read.count, 12 * comm->size);
    check(comm->local_size < comm->size ? read.clock_error > 0 && read.clock_error < 1e6 : read.clock_error == 0, "clock error %g us",
          read.clock_error);
    for (int r = 0; r < comm->size; r++) {
        static const struct {
            const char *name;
            int step, microbatch, chunk; // chunk 99: the rank
        } wanted[] = {{"step", 3, -1, -1}, {"forward", 3, 0, 99}, {"wait", 3, -1, 0},  {"forward", 3, 1, 99},
                      {"wait", 3, -1, 0},  {"across", 3, 7, -1},  {"step", 4, -1, -1}, {"forward", 4, 0, 99},
                      {"wait", 4, -1, 0},  {"forward", 4, 1, 99}, {"wait", 4, -1, 0},  {"left open", 4, -1, -1}};
        const Seen *s = &read.spans[12 * r];
        for (int i = 0; i < 12 && read.count == (size_t)(12 * comm->size); i++) {
            check(strcmp(s[i].name, wanted[i].name) == 0 && s[i].rank == r && s[i].step == wanted[i].step &&
                      s[i].microbatch == wanted[i].microbatch && s[i].chunk == (wanted[i].chunk == 99 ? r : wanted[i].chunk),
                  "rank %d, span %d: %s, step %lld, micro-batch %d, chunk %d", r, i, s[i].name, (long long)s[i].step, s[i].microbatch, s[i].chunk);
        }
        const double slack = 1e-6; // of adding two printed numbers
        for (int i = 0; i < 12; i += 6) {
            const double length = s[i].end - s[i].begin;
            check(length >= 400 && length < 5e5, "the step took %g us", length);
            for (int k = 1; k < 5; k++) {
                check(s[i + k].begin >= s[i].begin - slack && s[i + k].end <= s[i].end + slack, "rank %d, span %d lies in the step", r, i + k);
            }
            for (int k = 2; k < 5; k += 2) {
                check(s[i + k].begin >= s[i + k - 1].begin - slack && s[i + k].end <= s[i + k - 1].end + slack &&
                          s[i + k].end - s[i + k].begin >= 200,
                      "rank %d, span %d lies in the forward", r, i + k);
            }
            check(s[i + 3].begin >= s[i + 1].end - slack, "rank %d: one forward after the other", r);
        }
        check(s[5].end >= s[10].end - slack && s[11].end >= s[11].begin, "rank %d: a span across steps", r);
    }
    read_free_(&read);
    printf("window: steps, nesting, arguments\n");
}

// Ranks take turns, passed on by messages: begins and ends are in this order on the common clock.
static void test_clocks(Comm *comm) {
    Trace trace;
    Error error = {0};
    trace_open(&trace, comm, 1, 1);
    trace_step(&trace, 1);
    char token = 0;
    if (comm->rank > 0) comm_recv(comm->world, &token, 1, COMM_BYTE, comm->rank - 1, 1);
    trace_begin(&trace, "turn", comm->rank, -1);
    spin_(3);
    trace_end(&trace);
    if (comm->rank + 1 < comm->size) comm_send(comm->world, &token, 1, COMM_BYTE, comm->rank + 1, 1);
    check(trace_write(&trace, comm, path_("clocks.json"), &error), "write: %s", error.text);
    trace_free(&trace);
    if (comm->rank > 0) return;
    Read read = read_(path_("clocks.json"), comm->size);
    check(read.count == (size_t)comm->size, "a span of every rank");
    for (int r = 1; r < (int)read.count; r++) {
        check(read.spans[r].begin >= read.spans[r - 1].end - read.clock_error, "rank %d begins at %g us, rank %d ended at %g (error %g)", r,
              read.spans[r].begin, r - 1, read.spans[r - 1].end, read.clock_error);
    }
    check(read.count > 0 && read.spans[read.count - 1].end < 3e7, "times count from the beginning of the trace");
    printf("clocks: %d turns in order, within %.1f us\n", comm->size, read.clock_error);
    read_free_(&read);
}

// More spans than fit a message, than may be open at once, and than are kept.
static void test_caps(Comm *comm) {
    enum { MANY = 15000, DEEP = TRACE_DEPTH + 5 };
    Trace trace;
    Error error = {0};
    char text[256];
    trace_open(&trace, comm, 1, 2);
    trace.room_max = MANY + DEEP;
    trace_step(&trace, 1);
    for (int i = 0; i < MANY - comm->rank; i++) {
        trace_begin(&trace, "short", i, 0);
        trace_end(&trace);
    }
    for (int i = 0; i < DEEP; i++) trace_begin(&trace, "deep", i, 0);
    for (int i = 0; i < DEEP; i++) trace_end(&trace);
    check(trace.depth == 0 && trace.dropped == DEEP - TRACE_DEPTH, "%lld deep spans dropped", (long long)trace.dropped);
    const int64_t left = trace.room_max - trace.count;
    trace_begin(&trace, "outer", -1, -1);
    for (int i = 0; i < left + 9; i++) {
        trace_begin(&trace, "last", i, 0);
        trace_end(&trace);
    }
    trace_end(&trace);
    check(trace.count == trace.room_max && trace.depth == 0, "the room is used: %lld", (long long)trace.count);
    const int64_t dropped = (DEEP - TRACE_DEPTH) + 10;
    check(trace_write(&trace, comm, path_("caps.json"), &error), "write: %s", error.text);
    check(trace.all_dropped == dropped * comm->size && strstr(trace_summary(&trace, "OUT/trace.json", text), "more were dropped") != NULL, "%s",
          text);
    const size_t wanted = (size_t)(trace.room_max * comm->size);
    trace_free(&trace);
    if (comm->rank > 0) return;
    Read read = read_(path_("caps.json"), comm->size);
    check(read.count == wanted && read.dropped == (double)(dropped * comm->size), "%zu spans, wanted %zu; dropped %g", read.count, wanted,
          read.dropped);
    bool nested = true;
    for (size_t i = 1; i < read.count; i++) {
        const Seen *s = &read.spans[i], *outer = s - 1;
        if (strcmp(s->name, "deep") == 0 && strcmp(outer->name, "deep") == 0)
            nested = nested && s->begin >= outer->begin && s->end <= outer->end + 1e-6;
        if (strcmp(s->name, "short") == 0 && s->microbatch > 0)
            nested = nested && s->microbatch == outer->microbatch + 1 && s->begin >= outer->end - 1e-6;
    }
    check(nested, "deep spans nest, short ones follow each other");
    read_free_(&read);
    printf("caps: %zu spans, pieces, depth, room\n", wanted);
}

// A device that passes a mark every 10 us, from 1 s after the trace's begin on, and tells only when it is asked.
typedef struct {
    int64_t begin_ns, passed, marks, asked;
} FakeDevice;
static int64_t fake_mark(void *context) { return ((FakeDevice *)context)->marks++; }
static void fake_times(void *context, int64_t *ns, int64_t count) {
    FakeDevice *fake = context;
    check(count == fake->marks && count > 0, "times of %lld marks are asked for, %lld were made", (long long)count, (long long)fake->marks);
    for (int64_t i = 0; i < count; i++) ns[i] = fake->begin_ns + 10000 * fake->passed++;
    fake->marks = 0, fake->asked++;
}

static void test_device_clock(Comm *comm) {
    enum { STEPS = 40, MICROS = 100 }; // 4 * MICROS + 2 marks a step
    Trace trace;
    Error error = {0};
    char text[512];
    trace_open(&trace, comm, 1, STEPS);
    FakeDevice fake = {.begin_ns = trace.zero_ns + 1000000000};
    trace_clock(&trace, (TraceClock){&fake, fake_mark, fake_times});
    for (int step = 1; step <= STEPS; step++) {
        trace_step(&trace, step);
        for (int m = 0; m < MICROS; m++) {
            trace_begin(&trace, "forward", m, 0);
            trace_begin(&trace, "inner", m, 0), trace_end(&trace);
            trace_end(&trace);
        }
        trace_begin(&trace, "update", -1, -1), trace_end(&trace);
    }
    check(trace_write(&trace, comm, path_("device.json"), &error), "write: %s", error.text);
    check(fake.asked == 2 && trace.count == STEPS * (2 * MICROS + 1), "times were asked for %lld times: once on the way, once at the end",
          (long long)fake.asked);
    int64_t mark = 0, wrong = 0;
    for (int64_t i = 0; i < trace.count; i++) {
        const TraceSpan *span = &trace.spans[i];
        const bool outer = strcmp(span->name, "forward") == 0;
        wrong += span->begin_ns != 1000000000 + 10000 * mark || span->end_ns != span->begin_ns + (outer ? 30000 : 10000);
        mark += outer ? 1 : span->microbatch < 0 ? 2 : 3; // behind an inner one comes the end of its outer one
    }
    check(wrong == 0, "%lld of %lld spans have the device's times", (long long)(trace.count - wrong), (long long)trace.count);
    // a step: 100 forwards of 30 us, an update of 10 us, 10 us between two of them
    check(strcmp(trace_phases(&trace, text), "forward 3.00, other 1.00, update 0.01") == 0, "phases: %s", text);
    trace_free(&trace);
    check(trace_phases(&trace, text)[0] == '\0', "phases of nothing: %s", text);
}

static void test_errors(Comm *comm) {
    Trace trace;
    Error error = {0}, first;
    trace_open(&trace, comm, 1, 1);
    trace_step(&trace, 1);
    for (int i = 0; i < 2000; i++) trace_begin(&trace, "span", i, 0), trace_end(&trace);
    check(!trace_write(&trace, comm, "/nonexistent/trace.json", &error) && error.code == CODE_IO && strstr(error.text, "/nonexistent/trace.json"),
          "missing directory: code %d '%s'", error.code, error.text);
    first = error;
    comm_broadcast(comm->world, &first, sizeof first, COMM_BYTE, 0);
    check(strcmp(first.text, error.text) == 0, "all ranks have the error of rank 0");
    // a full disk
    struct rlimit before, small = {.rlim_cur = 50000};
    signal(SIGXFSZ, SIG_IGN);
    check(getrlimit(RLIMIT_FSIZE, &before) == 0, "getrlimit");
    small.rlim_max = before.rlim_max;
    check(comm->rank > 0 || setrlimit(RLIMIT_FSIZE, &small) == 0, "setrlimit");
    error = (Error){0};
    check(!trace_write(&trace, comm, path_("full.json"), &error) && error.code == CODE_IO && strstr(error.text, "full.json"),
          "full disk: code %d '%s'", error.code, error.text);
    check(setrlimit(RLIMIT_FSIZE, &before) == 0, "setrlimit");
    check(comm->rank > 0 || (access(path_("full.json"), F_OK) != 0 && access(path_("full.json.tmp"), F_OK) != 0), "nothing is left of it");
    error = (Error){0};
    check(trace_write(&trace, comm, path_("again.json"), &error), "a second try: %s", error.text);
    trace_free(&trace);
}

// A pipeline step, a stage a rank: forwards down, backwards up.
static void drawing(Comm *comm, const char *path) {
    Trace trace;
    Error error = {0};
    char label[64], token = 0;
    const CommGroup *world = comm->world;
    CommGroup *group = comm->world;
    trace_open(&trace, comm, 1, 2);
    snprintf(label, sizeof label, "tp 0, pp %d, dp 0", comm->rank);
    trace_label(&trace, label);
    for (int step = 1; step <= 3; step++) {
        trace_step(&trace, step);
        trace_begin(&trace, "loader", -1, -1), spin_(0.5), trace_end(&trace);
        for (int m = 0; m < 4; m++) {
            trace_begin(&trace, "wait-recv-forward", m, 0);
            if (world->rank > 0) comm_recv(group, &token, 1, COMM_BYTE, world->rank - 1, 1);
            trace_end(&trace);
            trace_begin(&trace, "forward", m, 0), spin_(2), trace_end(&trace);
            if (world->rank + 1 < world->size) comm_send(group, &token, 1, COMM_BYTE, world->rank + 1, 1);
        }
        for (int m = 0; m < 4; m++) {
            trace_begin(&trace, "wait-recv-backward", m, 0);
            if (world->rank + 1 < world->size) comm_recv(group, &token, 1, COMM_BYTE, world->rank + 1, 1);
            trace_end(&trace);
            trace_begin(&trace, "backward", m, 0), spin_(4), trace_end(&trace);
            if (world->rank > 0) comm_send(group, &token, 1, COMM_BYTE, world->rank - 1, 1);
        }
        trace_begin(&trace, "reduce gradients", -1, -1), comm_barrier(group), trace_end(&trace);
        trace_begin(&trace, "update", -1, -1), spin_(1), trace_end(&trace);
    }
    if (!trace_write(&trace, comm, path, &error)) die_error(&error);
    trace_free(&trace);
}

int main(int argc, char **argv) {
    Comm *comm = comm_init(&argc, &argv);
    comm_watchdog(comm, 120); // rank 0 reads long files while the others wait
    if (argc > 1) {
        drawing(comm, argv[1]);
        comm_finish(comm);
        return 0;
    }
    if (comm->rank == 0) {
        snprintf(out_, sizeof out_, "/tmp/test_trace_XXXXXX");
        if (mkdtemp(out_) == NULL) die(CODE_IO, "cannot make %s", out_);
    }
    test_parse();
    test_zeros(comm);
    test_window(comm);
    test_clocks(comm);
    test_caps(comm);
    test_device_clock(comm);
    test_errors(comm);
    if (comm->rank == 0) {
        static const char *const files[] = {"window.json", "clocks.json", "caps.json", "device.json", "again.json"};
        for (int i = 0; i < 5; i++) unlink(path_(files[i]));
        check(rmdir(out_) == 0, "nothing else is left in the directory");
    }
    int64_t failures = failed_;
    comm_all_reduce(comm->world, &failures, 1, COMM_I64, COMM_SUM);
    const int code = comm->rank == 0 || failed_ > 0 ? test_end() : 0;
    comm_finish(comm);
    return code || failures > 0;
}
