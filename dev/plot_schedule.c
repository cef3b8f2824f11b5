// plot_schedule: draws a pipeline schedule as an SVG timeline, a row per stage: forwards blue, backwards and input gradients green,
// weight gradients orange, the second and later chunks darker; numbers are micro-batches. F, B and W take the same time, messages none.
//
// The same for one step of a trace that a run has written (llmc/trace.h): a row per rank, with what took time between the computations.
//
// usage: plot_schedule KIND STAGES MICROBATCHES VIRTUAL_STAGES > schedule.svg
//        plot_schedule --trace OUT/trace.json --step N > step.svg
#include "llmc/base.h"              // Error, die, base_open_regular
#include "llmc/schedule.h"          // schedule_build
#include "llmc/schedule_simulate.h" // schedule_simulate
#include "llmc/trace.h"             // TRACE_STEP_MAX
#include <jansson.h>                // json_loadf

enum { LEFT = 64, TOP = 62, ROW = 34, BOX = 26, WIDTH = 1150, BOTTOM = 34 }; // pixels

static const char style[] =
    "<style>text{font-size:12px;text-anchor:middle;fill:#111}.l{text-anchor:start}.h{text-anchor:start;font-size:16px;font-weight:bold}"
    "rect{stroke:#fff}.f{fill:#8ab8ea}.f2{fill:#4a86cf}.b{fill:#8fcf94}.b2{fill:#4ea559}.i{fill:#8fcf94}.w{fill:#f4b266}.n{fill:#f0f0f0}</style>";

// A box of a row with a number in it (-1: none).
static void box_(const char *class, double x, int y, double width, int number) {
    printf("<rect class=\"%s\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\"/>", class, x, y, width, (int)BOX);
    if (number >= 0) printf("<text x=\"%.1f\" y=\"%d\">%d</text>", x + width / 2, y + BOX / 2 + 4, number);
    putchar('\n');
}

// An entry of the legend at x; returns where the next one goes.
static int entry_(const char *class, const char *text, int x, int width) {
    printf("<rect class=\"%s\" x=\"%d\" y=\"36\" width=\"16\" height=\"14\"/><text class=\"l\" x=\"%d\" y=\"48\">%s</text>\n", class, x, x + 22,
           text);
    return x + width;
}

static int number_(const char *text, const char *name) {
    char *end;
    const long value = strtol(text, &end, 10);
    if (*text == '\0' || *end != '\0' || value < 1 || value > 1000) die(CODE_USAGE, "%s: got '%s', wanted 1 to 1000", name, text);
    return (int)value;
}

static const char *class_(ActionKind kind, int chunk) {
    switch (kind) {
    case ACTION_FORWARD: return chunk > 0 ? "f2" : "f";
    case ACTION_BACKWARD: return chunk > 0 ? "b2" : "b";
    case ACTION_BACKWARD_INPUT: return "i";
    case ACTION_BACKWARD_WEIGHT: return "w";
    default: return NULL; // messages are not drawn
    }
}

static void legend_(const ScheduleShape *shape) {
    const bool split = shape->kind == SCHEDULE_ZB, chunks = shape->chunks > 1;
    const struct {
        const char *class, *text;
        bool shown;
    } entries[] = {
        {"f", chunks ? "forward, first chunk" : "forward", true},
        {"f2", "later chunks", chunks},
        {"b", "backward (B and W)", !split},
        {"b2", "later chunks", chunks},
        {"i", "input gradient (B)", split},
        {"w", "weight gradient (W)", split},
    };
    int x = LEFT;
    for (size_t i = 0; i < sizeof entries / sizeof entries[0]; i++) {
        if (entries[i].shown) x = entry_(entries[i].class, entries[i].text, x, 175);
    }
}

static void draw_(const Schedule *lists, const ScheduleRun *run) {
    const ScheduleShape *shape = &lists[0].shape;
    const double unit = (WIDTH - LEFT - 14) / run->time;
    const int height = TOP + ROW * shape->stages + BOTTOM;
    int slots = 0;
    for (int s = 0; s < shape->stages; s++) slots = run->peak_slots[s] > slots ? run->peak_slots[s] : slots;
    printf("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\">\n", (int)WIDTH, height);
    printf("%s\n", style);
    printf("<rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n<text class=\"h\" x=\"%d\" y=\"22\">%s: %d stages", (int)WIDTH, height, (int)LEFT,
           schedule_kind_names[shape->kind], shape->stages);
    if (shape->chunks > 1) printf(" of %d chunks", shape->chunks);
    printf(", %d micro-batches, bubble %.1f %%, at most %d activation slots%s</text>\n", shape->microbatches, 100 * run->bubble, slots,
           shape->chunks > 1 ? " (of a chunk)" : "");
    legend_(shape);
    for (int s = 0; s < shape->stages; s++) {
        const int y = TOP + ROW * s, text_y = y + BOX / 2 + 4;
        printf("<text class=\"l\" x=\"8\" y=\"%d\">stage %d</text><rect class=\"n\" x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\"/>\n", text_y, s,
               (int)LEFT, y, unit * run->time, (int)BOX);
        for (int64_t i = 0; i < lists[s].count; i++) {
            const Action *a = &lists[s].actions[i];
            const char *class = class_(a->kind, a->chunk);
            if (class == NULL) continue;
            const double x = LEFT + unit * run->start[s][i], width = unit * (run->end[s][i] - run->start[s][i]);
            box_(class, x, y, width, a->microbatch);
        }
    }
    const int axis_y = TOP + ROW * shape->stages + 14;
    printf("<text class=\"l\" x=\"%d\" y=\"%d\">time; grey is idle; F, B and W of a stage take the same time, messages none</text>\n</svg>\n",
           (int)LEFT, axis_y);
}

// ----------------------------------------------------------------------------
// A measured step

enum { TRACE_RANKS_MAX = 1 << 16, TRACE_ROWS_MAX = 512, TRACE_LEFT = 190, TRACE_NUMBER_WIDTH = 13 };

typedef struct {
    const char *class, *text;
} Sort;
// In the order of the legend; the first ones compute.
typedef enum { FORWARD, BACKWARD, INPUT, WEIGHT, OPTIMIZER, COMMUNICATION, LOADER, WAITING, SORTS, NOT_DRAWN = SORTS } SortIndex;
static const Sort sorts[SORTS] = {
    {"f", "forward"},       {"b", "backward"}, {"i", "backward, input"}, {"w", "backward, weight"}, {"o", "optimizer"},
    {"c", "communication"}, {"d", "data"},     {"x", "waiting"},
};

typedef struct {
    SortIndex sort;
    int rank, microbatch, chunk; // -1: none
    double begin_us, end_us;
} Span;

typedef struct {
    json_t *root;
    int64_t step;
    Span *spans;
    size_t count;
    int rows;
    const char **labels; // (rows) NULL: none
    double begin_us, end_us;
} Measured;

static SortIndex sort_(const char *name) {
    static const struct {
        const char *name;
        SortIndex sort;
    } names[] = {{"update", OPTIMIZER}, {"reduce gradients", COMMUNICATION}, {"gather parameters", COMMUNICATION}, {"loader", LOADER}};
    static const ActionKind kinds[] = {ACTION_FORWARD, ACTION_BACKWARD, ACTION_BACKWARD_INPUT, ACTION_BACKWARD_WEIGHT};
    for (int i = 0; i < 4; i++) {
        if (strcmp(name, action_kind_names[kinds[i]]) == 0) return (SortIndex)(FORWARD + i);
        if (strcmp(name, names[i].name) == 0) return names[i].sort;
    }
    return strncmp(name, "wait-", 5) == 0 ? WAITING : NOT_DRAWN;
}

// An integer member in [low, high]; `missing` where there is none and that is allowed (missing < low).
static bool member_(const json_t *object, const char *key, int64_t low, int64_t high, int64_t missing, int64_t *value) {
    const json_t *member = json_object_get(object, key);
    *value = member == NULL ? missing : json_integer_value(member);
    return (member == NULL && missing < low) || (json_is_integer(member) && *value >= low && *value <= high);
}

static bool read_event_(Measured *m, size_t index, const json_t *event, const char *path, Error *error) {
    const char *kind = json_string_value(json_object_get(event, "ph")), *name = json_string_value(json_object_get(event, "name"));
    const json_t *args = json_object_get(event, "args"), *begin = json_object_get(event, "ts"), *duration = json_object_get(event, "dur");
    int64_t rank = -1, step = 0, microbatch = -1, chunk = -1;
    if (kind == NULL || name == NULL) return fail(error, CODE_INPUT, "%s: event %zu: no text in \"ph\" or \"name\"", path, index);
    const bool span = strcmp(kind, "X") == 0;
    if (!span && strcmp(name, "process_name") != 0) return true;
    if (json_object_get(event, "pid") == NULL || !member_(event, "pid", 0, TRACE_RANKS_MAX - 1, -1, &rank)) {
        return fail(error, CODE_INPUT, "%s: event %zu: \"pid\": wanted a rank from 0 to %d", path, index, TRACE_RANKS_MAX - 1);
    }
    if (!span) {
        if (rank < TRACE_ROWS_MAX) m->labels[rank] = json_string_value(json_object_get(args, "name"));
        return true;
    }
    if (!member_(args, "step", 1, TRACE_STEP_MAX, 0, &step) || !member_(args, "microbatch", 0, INT32_MAX, -1, &microbatch) ||
        !member_(args, "chunk", 0, INT32_MAX, -1, &chunk)) {
        return fail(error, CODE_INPUT, "%s: event %zu: \"args\": wanted integers step, microbatch, chunk", path, index);
    }
    const double begin_us = json_number_value(begin), end_us = begin_us + json_number_value(duration);
    if (!json_is_number(begin) || !json_is_number(duration) || !(begin_us >= 0 && end_us >= begin_us && end_us < 1e18)) {
        return fail(error, CODE_INPUT, "%s: event %zu: \"ts\", \"dur\": wanted microseconds from 0", path, index);
    }
    const SortIndex sort = sort_(name);
    if (step != m->step || sort == NOT_DRAWN) return true;
    if (rank >= TRACE_ROWS_MAX) return fail(error, CODE_INPUT, "%s: got rank %lld, can draw %d", path, (long long)rank, TRACE_ROWS_MAX);
    if (m->count == 0 || begin_us < m->begin_us) m->begin_us = begin_us;
    if (m->count == 0 || end_us > m->end_us) m->end_us = end_us;
    m->rows = rank >= m->rows ? (int)rank + 1 : m->rows;
    m->spans[m->count++] = (Span){sort, (int)rank, (int)microbatch, (int)chunk, begin_us, end_us};
    return true;
}

static bool read_trace_(Measured *m, const char *path, int64_t step, Error *error) {
    *m = (Measured){.step = step, .labels = base_new(TRACE_ROWS_MAX, sizeof *m->labels)};
    FILE *file = base_open_regular(path);
    if (file == NULL) return fail(error, CODE_INPUT, "%s: cannot open: %s", path, strerror(errno));
    json_error_t where;
    m->root = json_loadf(file, JSON_REJECT_DUPLICATES, &where);
    fclose(file);
    if (m->root == NULL) return fail(error, CODE_INPUT, "%s: line %d: %s", path, where.line, where.text);
    const json_t *events = json_object_get(m->root, "traceEvents");
    if (!json_is_array(events)) return fail(error, CODE_INPUT, "%s: no list \"traceEvents\" (wanted a file of --trace)", path);
    m->spans = base_new(json_array_size(events), sizeof *m->spans);
    for (size_t i = 0; i < json_array_size(events); i++) {
        if (!read_event_(m, i, json_array_get(events, i), path, error)) return false;
    }
    const json_t *other = json_object_get(m->root, "otherData");
    return m->count > 0 || fail(error, CODE_INPUT, "%s: nothing to draw of step %lld, wanted a step of the trace (%lld to %lld)", path,
                                (long long)step, (long long)json_integer_value(json_object_get(other, "first_step")),
                                (long long)json_integer_value(json_object_get(other, "last_step")));
}

static void measured_free_(Measured *m) {
    json_decref(m->root);
    free(m->spans);
    free(m->labels);
}

// Text from a file, without its host ("rank 0 on HOST (tp 0)"), cut to the margin.
static void print_label_(const char *label, int rank) {
    char text[32];
    const char *place = label != NULL ? strrchr(label, '(') : NULL;
    snprintf(text, sizeof text, "rank %d %s", rank, place != NULL ? place : "");
    for (const char *c = text; *c != '\0'; c++) {
        if ((unsigned char)*c < 32 || (unsigned char)*c > 126 || *c == '<' || *c == '&') {
            putchar('?');
        } else {
            putchar(*c);
        }
    }
}

static void draw_measured_(const Measured *m) {
    const double time_us = m->end_us > m->begin_us ? m->end_us - m->begin_us : 1, unit = (WIDTH - TRACE_LEFT - 14) / time_us;
    const int height = TOP + ROW * m->rows + BOTTOM, axis_y = TOP + ROW * m->rows;
    double sums[SORTS] = {0};
    for (size_t i = 0; i < m->count; i++) sums[m->spans[i].sort] += m->spans[i].end_us - m->spans[i].begin_us;
    double computes = 0;
    for (int sort = 0; sort <= OPTIMIZER; sort++) computes += sums[sort];
    const double all = time_us * m->rows;
    printf("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\">\n", (int)WIDTH, height);
    printf("%s<style>.o{fill:#b9a3dd}.c{fill:#7cc7c9}.d{fill:#d9cf8b}.x{fill:#f2c9c9}.i{fill:#8fcf94}.a{font-size:10px}</style>\n", style);
    printf("<rect width=\"%d\" height=\"%d\" fill=\"#fff\"/>\n<text class=\"h\" x=\"%d\" y=\"22\">", (int)WIDTH, height, 8);
    printf("step %lld, measured: %d ranks, %.1f ms, of which computing %.1f %%, waiting %.1f %%, communication %.1f %%</text>\n",
           (long long)m->step, m->rows, time_us * 1e-3, 100 * computes / all, 100 * sums[WAITING] / all, 100 * sums[COMMUNICATION] / all);
    for (int sort = 0, x = 8; sort < SORTS; sort++) {
        if (sums[sort] > 0) x = entry_(sorts[sort].class, sorts[sort].text, x, 140);
    }
    for (int rank = 0; rank < m->rows; rank++) {
        printf("<text class=\"l\" x=\"8\" y=\"%d\">", TOP + ROW * rank + BOX / 2 + 4);
        print_label_(m->labels[rank], rank);
        printf("</text><rect class=\"n\" x=\"%d\" y=\"%d\" width=\"%.1f\" height=\"%d\"/>\n", (int)TRACE_LEFT, TOP + ROW * rank, unit * time_us,
               (int)BOX);
    }
    for (size_t i = 0; i < m->count; i++) { // outer spans come before those in them
        const Span *span = &m->spans[i];
        const char *class = span->chunk > 0 && span->sort == FORWARD    ? "f2"
                            : span->chunk > 0 && span->sort == BACKWARD ? "b2"
                                                                        : sorts[span->sort].class;
        const double width = unit * (span->end_us - span->begin_us);
        const bool number = span->microbatch >= 0 && span->sort <= WEIGHT && width >= TRACE_NUMBER_WIDTH;
        if (width < 0.05) continue; // nothing to see
        box_(class, TRACE_LEFT + unit * (span->begin_us - m->begin_us), TOP + ROW * span->rank, width, number ? span->microbatch : -1);
    }
    for (int tick = 0; tick <= 10; tick++) {
        printf("<text class=\"a\" x=\"%.1f\" y=\"%d\">%.1f</text>\n", TRACE_LEFT + unit * time_us * tick / 10, axis_y + 8,
               time_us * 1e-3 * tick / 10);
    }
    printf("<text class=\"l\" x=\"8\" y=\"%d\">time in ms; grey: none of these</text>\n</svg>\n", axis_y + 24);
}

static int measured_(const char *path, const char *step_text) {
    Measured m;
    Error error = {0};
    int64_t step = 0, same = 0;
    char range[64];
    snprintf(range, sizeof range, "%.20s:%.20s", step_text, step_text); // a step is a trace's window of one
    if (!trace_parse(range, &step, &same, &error)) die(CODE_USAGE, "--step: got '%.64s', wanted a step (from 1)", step_text);
    if (!read_trace_(&m, path, step, &error)) {
        measured_free_(&m);
        die_error(&error);
    }
    draw_measured_(&m);
    measured_free_(&m);
    return CODE_OK;
}

static int simulated_(char **argv) {
    int kind = 0;
    while (kind < SCHEDULE_KINDS && strcmp(argv[1], schedule_kind_names[kind]) != 0) kind++;
    if (kind == SCHEDULE_KINDS) die(CODE_USAGE, "schedule: got '%s', wanted gpipe, 1f1b, interleaved or zb", argv[1]);
    const ScheduleShape shape = {(ScheduleKind)kind, number_(argv[2], "stages"), number_(argv[3], "micro-batches"),
                                 number_(argv[4], "virtual stages")};
    Error error = {0};
    ScheduleRun run;
    Schedule *lists = base_new((size_t)shape.stages, sizeof *lists);
    for (int s = 0; s < shape.stages; s++) {
        if (!schedule_build(&lists[s], &shape, s, &error)) die_error(&error);
    }
    if (!schedule_simulate(lists, (ScheduleTimes){1, 1, 1, 0}, &run, &error)) die_error(&error);
    draw_(lists, &run);
    for (int s = 0; s < shape.stages; s++) schedule_free(&lists[s]);
    schedule_run_free(&run);
    free(lists);
    return CODE_OK;
}

int main(int argc, char **argv) {
    if (argc != 5) {
        die(CODE_USAGE,
            "usage: plot_schedule gpipe|1f1b|interleaved|zb STAGES MICROBATCHES VIRTUAL_STAGES, or --trace FILE --step N (> drawing.svg)");
    }
    const bool trace = strcmp(argv[1], "--trace") == 0;
    if (trace && strcmp(argv[3], "--step") != 0) die(CODE_USAGE, "--trace FILE: got '%.64s' behind it, wanted --step N", argv[3]);
    const int code = trace ? measured_(argv[2], argv[4]) : simulated_(argv);
    if (fflush(stdout) != 0 || ferror(stdout)) die(CODE_IO, "cannot write the drawing: %s", strerror(errno));
    return code;
}
