// plot_schedule: draws a pipeline schedule as an SVG timeline, a row per stage: forwards blue, backwards and input gradients green,
// weight gradients orange, the second and later chunks darker; numbers are micro-batches. F, B and W take the same time, messages none.
//
// usage: plot_schedule KIND STAGES MICROBATCHES VIRTUAL_STAGES > schedule.svg
#include "llmc/base.h"              // Error, die
#include "llmc/schedule.h"          // schedule_build
#include "llmc/schedule_simulate.h" // schedule_simulate

enum { LEFT = 64, TOP = 62, ROW = 34, BOX = 26, WIDTH = 1150, BOTTOM = 34 }; // pixels

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
        if (!entries[i].shown) continue;
        printf("<rect class=\"%s\" x=\"%d\" y=\"36\" width=\"16\" height=\"14\"/><text class=\"l\" x=\"%d\" y=\"48\">%s</text>\n", entries[i].class,
               x, x + 22, entries[i].text);
        x += 175;
    }
}

static void draw_(const Schedule *lists, const ScheduleRun *run) {
    const ScheduleShape *shape = &lists[0].shape;
    const double unit = (WIDTH - LEFT - 14) / run->time;
    const int height = TOP + ROW * shape->stages + BOTTOM;
    int slots = 0;
    for (int s = 0; s < shape->stages; s++) slots = run->peak_slots[s] > slots ? run->peak_slots[s] : slots;
    printf("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %d %d\" font-family=\"sans-serif\">\n", (int)WIDTH, height);
    printf("<style>text{font-size:12px;text-anchor:middle;fill:#111}.l{text-anchor:start}.h{text-anchor:start;font-size:16px;font-weight:bold}"
           "rect{stroke:#fff}.f{fill:#8ab8ea}.f2{fill:#4a86cf}.b{fill:#8fcf94}.b2{fill:#4ea559}.i{fill:#8fcf94}.w{fill:#f4b266}.n{fill:#f0f0f0}</"
           "style>\n");
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
            printf("<rect class=\"%s\" x=\"%.1f\" y=\"%d\" width=\"%.1f\" height=\"%d\"/><text x=\"%.1f\" y=\"%d\">%d</text>\n", class, x, y, width,
                   (int)BOX, x + width / 2, text_y, a->microbatch);
        }
    }
    const int axis_y = TOP + ROW * shape->stages + 14;
    printf("<text class=\"l\" x=\"%d\" y=\"%d\">time; grey is idle; F, B and W of a stage take the same time, messages none</text>\n</svg>\n",
           (int)LEFT, axis_y);
}

int main(int argc, char **argv) {
    if (argc != 5) die(CODE_USAGE, "usage: plot_schedule gpipe|1f1b|interleaved|zb STAGES MICROBATCHES VIRTUAL_STAGES > schedule.svg");
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
    if (fflush(stdout) != 0 || ferror(stdout)) die(CODE_IO, "cannot write the drawing: %s", strerror(errno));
    return CODE_OK;
}
