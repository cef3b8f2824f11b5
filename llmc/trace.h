// trace.h: what every rank did in a few steps, as a file for chrome://tracing and Perfetto (--trace A:B). It records spans that the trainer
// marks, on its main thread, and gathers them into one JSON file; it knows nothing of what a span means. dev/plot_schedule.c draws such files.
//
//     trace_open(&trace, comm, first, last);         // all ranks; a Trace of zeros records nothing, whatever is called on it
//     trace_label(&trace, "tp 0, pp 1, dp 0");
//     trace_step(&trace, step);                      // every step; spans are kept inside [first, last] only
//     trace_begin(&trace, "forward", microbatch, chunk); ... trace_end(&trace);
//     trace_write(&trace, comm, "OUT/trace.json", &error);
//
// Devices that run behind the host keep the time themselves (trace_clock): a span is then when the device was at it.
//
// Clocks. Ranks of a host share a clock. Between hosts time 0 is the end of a barrier: every rank leaves it after the last one entered, so
// no two clocks differ by more than the longest time that a rank spent in it. The best of several barriers counts, and the file tells its
// bound ("clock_error_us" in "otherData", 0 on one host).
#ifndef LLMC_TRACE_H
#define LLMC_TRACE_H

#include "llmc/base.h" // Error, fail, base_grow
#include "llmc/comm.h" // Comm, comm_barrier, comm_send
#include <math.h>      // fmax

enum {
    TRACE_SPANS_MAX = 1 << 20, // of a rank: 40 MB; further ones are counted and dropped
    TRACE_DEPTH = 32,          // open spans
    TRACE_MARKS = 1 << 13,     // so many are timed at the next step's begin; fewer at the end
    TRACE_PIECE_BYTES = 1 << 20,
    TRACE_BARRIERS = 8,
};
#define TRACE_STEP_MAX ((int64_t)1000000000000) // as --steps

typedef struct {
    const char *name;         // a string constant
    int64_t begin_ns, end_ns; // since time 0; from Trace.timed on numbers of marks
    int64_t step;
    int microbatch, chunk; // -1: none
} TraceSpan;

// mark: a point in the order of a device's work, and its number, from 0. times: when each of the `count` marks so far was passed, ns of
// CLOCK_MONOTONIC; they count anew. A clock of zeros is the host's.
typedef struct {
    void *context;
    int64_t (*mark)(void *context);
    void (*times)(void *context, int64_t *ns, int64_t count);
} TraceClock;

typedef struct Trace {
    bool recording; // the step is one of [first, last]
    int64_t first, last, step;
    int64_t zero_ns;        // clock of this host at time 0
    int64_t clock_error_ns; // between hosts
    char label[96];
    TraceSpan *spans;
    int64_t count, room, room_max;
    TraceClock clock;
    int64_t timed, marks;      // spans whose times are known; marks since
    int64_t open[TRACE_DEPTH]; // indices of open spans, outermost first; -1: dropped
    int depth;                 // may exceed TRACE_DEPTH
    int64_t dropped;
    int64_t all_spans, all_dropped; // of all ranks, after trace_write
} Trace;

// "A:B", 1 <= A <= B
static inline bool trace_parse(const char *text, int64_t *first, int64_t *last, Error *error) {
    int64_t bounds[2] = {0, 0};
    const char *at = text;
    for (int i = 0; i < 2; i++) {
        const char *digits = at;
        for (; *at >= '0' && *at <= '9' && bounds[i] <= TRACE_STEP_MAX; at++) bounds[i] = 10 * bounds[i] + (*at - '0');
        if (at == digits || bounds[i] > TRACE_STEP_MAX || *at != (i == 0 ? ':' : '\0')) {
            return fail(error, CODE_USAGE, "--trace: got '%.64s', wanted A:B, two steps", text);
        }
        at++;
    }
    if (bounds[0] < 1 || bounds[1] < bounds[0]) {
        return fail(error, CODE_USAGE, "--trace: got '%.64s', wanted A:B with 1 <= A <= B (steps count from 1)", text);
    }
    *first = bounds[0], *last = bounds[1];
    return true;
}

static inline int64_t trace_clock_ns_(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

// Called by all ranks, with the same steps.
static inline void trace_open(Trace *trace, Comm *comm, int64_t first, int64_t last) {
    *trace = (Trace){.first = first, .last = last, .room_max = TRACE_SPANS_MAX};
    int host = 0; // the first rank of this host: its clock reading counts for all of them
    while (comm->local_of[host] < 0) host++;
    const bool one_host = comm->local_size == comm->size;
    int64_t *zeros = base_new((size_t)comm->size, sizeof *zeros);
    int64_t best = INT64_MAX;
    comm_barrier(comm->world);
    for (int i = 0; i < TRACE_BARRIERS; i++) {
        const int64_t entered = trace_clock_ns_();
        comm_barrier(comm->world);
        const int64_t left = trace_clock_ns_();
        int64_t longest = left - entered;
        comm_all_reduce(comm->world, &longest, 1, COMM_I64, COMM_MAX);
        comm_all_gather(comm->world, zeros, &left, 1, COMM_I64);
        if (longest < best) {
            best = longest;
            trace->zero_ns = zeros[host];
        }
    }
    trace->clock_error_ns = one_host ? 0 : best;
    free(zeros);
}

// After trace_open.
static inline void trace_clock(Trace *trace, TraceClock clock) { trace->clock = clock; }

// Now, or the number of a mark.
static inline int64_t trace_now_(Trace *trace) {
    if (trace->clock.mark == NULL) return trace_clock_ns_() - trace->zero_ns;
    trace->marks++;
    return trace->clock.mark(trace->clock.context);
}

// Replaces marks by their times. No span is open.
static inline void trace_settle_(Trace *trace) {
    if (trace->marks == 0) return;
    int64_t *ns = base_new((size_t)trace->marks, sizeof *ns);
    trace->clock.times(trace->clock.context, ns, trace->marks);
    for (; trace->timed < trace->count; trace->timed++) {
        TraceSpan *span = &trace->spans[trace->timed];
        span->begin_ns = ns[span->begin_ns] - trace->zero_ns;
        span->end_ns = ns[span->end_ns] - trace->zero_ns;
    }
    free(ns);
    trace->marks = 0;
}

// Which rank this is, for people; shown behind its number and host.
static inline void trace_label(Trace *trace, const char *label) { snprintf(trace->label, sizeof trace->label, "%s", label); }

static inline void trace_close_spans_(Trace *trace) {
    if (trace->depth == 0) return;
    const int64_t now = trace_now_(trace);
    for (int i = 0; i < trace->depth && i < TRACE_DEPTH; i++) {
        if (trace->open[i] >= 0) trace->spans[trace->open[i]].end_ns = now;
    }
    trace->depth = 0;
}

// What follows belongs to this step. Spans that are open when the steps of the trace are over end here.
static inline void trace_step(Trace *trace, int64_t step) {
    const bool inside = step >= trace->first && step <= trace->last && trace->first > 0;
    if (trace->recording && !inside) trace_close_spans_(trace);
    if (trace->depth == 0 && trace->marks >= TRACE_MARKS) trace_settle_(trace);
    trace->recording = inside;
    trace->step = step;
}

// Spans nest: trace_end ends the last one that was begun.
static inline void trace_begin(Trace *trace, const char *name, int microbatch, int chunk) {
    if (!trace->recording) return;
    int64_t index = -1;
    if (trace->count < trace->room_max && trace->depth < TRACE_DEPTH) {
        if (trace->count == trace->room) {
            trace->room = min_i64(trace->room_max, 2 * trace->room + 1024);
            trace->spans = base_grow(trace->spans, (size_t)trace->room, sizeof *trace->spans);
        }
        index = trace->count++;
        trace->spans[index] =
            (TraceSpan){.name = name, .begin_ns = trace_now_(trace), .step = trace->step, .microbatch = microbatch, .chunk = chunk};
    } else {
        trace->dropped++;
    }
    if (trace->depth < TRACE_DEPTH) trace->open[trace->depth] = index;
    trace->depth++;
}
static inline void trace_end(Trace *trace) {
    if (!trace->recording || trace->depth == 0) return; // begun before the first step of the trace
    trace->depth--;
    if (trace->depth >= TRACE_DEPTH || trace->open[trace->depth] < 0) return;
    trace->spans[trace->open[trace->depth]].end_ns = trace_now_(trace);
}

// ----------------------------------------------------------------------------
// The file. Ranks print their own events and send them to rank 0 in pieces, one rank after the other: memory stays bounded.

typedef struct {
    Comm *comm;
    FILE *file; // of rank 0; NULL there: it could not be created
    char *text; // (TRACE_PIECE_BYTES)
    int64_t length;
} TraceOutput_;

enum { TRACE_TAG = 0 };

static inline void trace_flush_(TraceOutput_ *output) {
    if (output->comm->rank == 0) {
        if (output->file != NULL) fwrite(output->text, 1, (size_t)output->length, output->file); // errors are sticky: trace_write looks at ferror
    } else if (output->length > 0) {
        comm_send(output->comm->world, &output->length, 1, COMM_I64, 0, TRACE_TAG);
        comm_send(output->comm->world, output->text, output->length, COMM_BYTE, 0, TRACE_TAG);
    }
    output->length = 0;
}

LLMC_PRINTF(2, 3) static inline void trace_print_(TraceOutput_ *output, const char *format, ...) {
    enum { EVENT_BYTES = 1024 }; // more than any event
    if (output->length > TRACE_PIECE_BYTES - EVENT_BYTES) trace_flush_(output);
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(output->text + output->length, EVENT_BYTES, format, arguments);
    va_end(arguments);
    output->length += min_i64(length, EVENT_BYTES - 1);
}

static inline void trace_print_rank_(TraceOutput_ *output, const Trace *trace) {
    const Comm *comm = output->comm;
    char name[256];
    snprintf(name, sizeof name, "rank %d on %s%s%s%s", comm->rank, comm->host, trace->label[0] ? " (" : "", trace->label,
             trace->label[0] ? ")" : "");
    for (char *c = name; *c != '\0'; c++) {
        if (*c < 32 || *c > 126 || *c == '"' || *c == '\\') *c = '?'; // a label, not data: needs no escapes
    }
    trace_print_(output, "%s{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"args\":{\"name\":\"%s\"}},\n",
                 comm->rank > 0 ? ",\n" : "", comm->rank, name);
    trace_print_(output, "{\"name\":\"process_sort_index\",\"ph\":\"M\",\"pid\":%d,\"tid\":0,\"args\":{\"sort_index\":%d}}", comm->rank,
                 comm->rank);
    for (int64_t i = 0; i < trace->count; i++) {
        const TraceSpan *span = &trace->spans[i];
        const long long begin = span->begin_ns, length = span->end_ns - span->begin_ns; // printed in us, exactly, so that spans still nest
        trace_print_(output,
                     ",\n{\"name\":\"%.256s\",\"ph\":\"X\",\"pid\":%d,\"tid\":0,\"ts\":%lld.%03lld,\"dur\":%lld.%03lld,"
                     "\"args\":{\"step\":%lld",
                     span->name, comm->rank, begin / 1000, begin % 1000, length / 1000, length % 1000, (long long)span->step);
        if (span->microbatch >= 0) trace_print_(output, ",\"microbatch\":%d", span->microbatch);
        if (span->chunk >= 0) trace_print_(output, ",\"chunk\":%d", span->chunk);
        trace_print_(output, "}}");
    }
    trace_flush_(output);
}

// On rank 0: passes on what the others send; 0 bytes end a rank's part.
static inline void trace_receive_(TraceOutput_ *output) {
    Comm *comm = output->comm;
    for (int r = 1; r < comm->size; r++) {
        for (;;) {
            comm_recv(comm->world, &output->length, 1, COMM_I64, r, TRACE_TAG);
            if (output->length == 0) break;
            comm_recv(comm->world, output->text, output->length, COMM_BYTE, r, TRACE_TAG);
            trace_flush_(output);
        }
    }
}

// Called by all ranks; rank 0 writes, beside the file, and renames. All get the same verdict, with the same error.
static inline bool trace_write(Trace *trace, Comm *comm, const char *path, Error *error) {
    if (trace->first == 0) return true;
    trace_close_spans_(trace);
    trace_settle_(trace);
    trace->recording = false;
    int64_t sums[2] = {trace->count, trace->dropped};
    comm_all_reduce(comm->world, sums, 2, COMM_I64, COMM_SUM);
    trace->all_spans = sums[0], trace->all_dropped = sums[1];
    TraceOutput_ output = {.comm = comm, .text = base_new(TRACE_PIECE_BYTES, 1)};
    Error verdict = {0};
    if (comm->rank == 0) {
        const size_t bytes = strlen(path) + 8;
        char *tmp = base_new(bytes, 1);
        snprintf(tmp, bytes, "%s.tmp", path);
        output.file = base_create_file(tmp);
        if (output.file == NULL) fail(&verdict, CODE_IO, "cannot write '%s': %s", tmp, strerror(errno));
        trace_print_(
            &output,
            "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"ranks\":%d,\"first_step\":%lld,\"last_step\":%lld,\"clock_error_us\":%lld.%03lld,"
            "\"spans_dropped\":%lld},\n\"traceEvents\":[\n",
            comm->size, (long long)trace->first, (long long)trace->last, (long long)trace->clock_error_ns / 1000,
            (long long)trace->clock_error_ns % 1000, (long long)trace->all_dropped);
        trace_print_rank_(&output, trace);
        trace_receive_(&output);
        trace_print_(&output, "\n]}\n");
        trace_flush_(&output);
        if (output.file != NULL) {
            bool good = fflush(output.file) == 0 && !ferror(output.file);
            good = fclose(output.file) == 0 && good && rename(tmp, path) == 0;
            if (!good) fail(&verdict, CODE_IO, "cannot write '%s': %s", path, strerror(errno));
            if (!good) (void)unlink(tmp); // the error that matters is reported
        }
        free(tmp);
    } else {
        trace_print_rank_(&output, trace);
        comm_send(comm->world, &output.length, 1, COMM_I64, 0, TRACE_TAG); // 0
    }
    free(output.text);
    comm_broadcast(comm->world, &verdict, sizeof verdict, COMM_BYTE, 0);
    return verdict.code == 0 || fail(error, verdict.code, "%s", verdict.text);
}

// A line for the end of a run, after trace_write.
static inline const char *trace_summary(const Trace *trace, const char *path, char text[256]) {
    const int length = snprintf(text, 256, "trace of steps %lld to %lld: %lld spans in %.128s", (long long)trace->first, (long long)trace->last,
                                (long long)trace->all_spans, path);
    if (trace->all_dropped > 0) {
        snprintf(text + length, (size_t)(256 - length), "; %lld more were dropped (at most %lld a rank)", (long long)trace->all_dropped,
                 (long long)trace->room_max);
    }
    return text;
}

// Where the time of a step went on this rank: the outermost spans by name, longest first, as "forward 12.3, update 1.2, other 0.4 ms a step".
// `other`: between them, from the first to the last of a step. After trace_write; "" when nothing was recorded.
static inline const char *trace_phases(const Trace *trace, char text[512]) {
    enum { NAMES = 24 };
    struct {
        const char *name;
        double ms;
    } phase[NAMES + 1];
    int names = 0;
    double steps = 0, whole = 0, within = 0;
    int64_t until = 0, step = -1, begin = 0; // end of the last outermost span; of its step
    text[0] = '\0';
    for (int64_t i = 0; i < trace->count; i++) {
        const TraceSpan *span = &trace->spans[i];
        if (span->step == step && span->end_ns <= until) continue; // inside another
        if (span->step != step) steps++, whole += (double)(until - begin) * 1e-6, begin = span->begin_ns, step = span->step;
        until = span->end_ns;
        int k = 0;
        while (k < names && strcmp(phase[k].name, span->name) != 0) k++;
        if (k == names && names < NAMES) phase[names].name = span->name, phase[names++].ms = 0;
        if (k < names) phase[k].ms += (double)(until - span->begin_ns) * 1e-6, within += (double)(until - span->begin_ns) * 1e-6;
    }
    if (steps == 0) return text;
    phase[names].name = "other", phase[names++].ms = fmax(0, whole + (double)(until - begin) * 1e-6 - within);
    for (size_t length = 0; names > 0 && length < 512;) {
        int most = 0;
        for (int k = 1; k < names; k++) most = phase[k].ms > phase[most].ms ? k : most;
        length += (size_t)snprintf(text + length, 512 - length, "%s%s %.2f", length > 0 ? ", " : "", phase[most].name, phase[most].ms / steps);
        phase[most] = phase[--names];
    }
    return text;
}

static inline void trace_free(Trace *trace) {
    free(trace->spans);
    *trace = (Trace){0};
}

#endif
