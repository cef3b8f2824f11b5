// test_monitor.c: log.jsonl (records, escapes, cutting back on resume, full disk), run.json, the console line, what ranks held.
#include "dev/test/test.h" // check, test_end
#include "llmc/monitor.h"  // what is tested
#include <sys/stat.h>      // mkdir

static char out_[64]; // directory of the test

static const char *path_(const char *name) {
    static char path[2][256];
    static int turn;
    turn ^= 1;
    snprintf(path[turn], sizeof path[turn], "%s/%s", out_, name);
    return path[turn];
}

static char *read_(const char *name) {
    FILE *file = fopen(path_(name), "rb");
    char *text = base_new(1 << 16, 1);
    if (file == NULL) return text;
    text[fread(text, 1, (1 << 16) - 1, file)] = '\0';
    fclose(file);
    return text;
}

static void write_(const char *name, const char *text, size_t length) {
    FILE *file = fopen(path_(name), "wb");
    if (file == NULL || fwrite(text, 1, length, file) != length || fclose(file) != 0) die(CODE_IO, "cannot write %s", path_(name));
}

static Monitor open_(int64_t steps, bool resumed, int64_t from, FILE *console) {
    Monitor monitor;
    Error error = {0};
    check(monitor_open(&monitor, out_, steps, resumed, from, &error), "monitor_open: %s", error.text);
    monitor.console = console;
    monitor.terminal = false;
    return monitor;
}

static StepRecord step_(int64_t step) {
    return (StepRecord){.step = step, .loss = 1.0 / (double)(step + 2), .grad_norm = 0.5, .lr = 3e-4, .tokens = 2048, .ms = 100};
}

static void test_records(FILE *console) {
    Error error = {0};
    Monitor monitor = open_(3, false, 0, console);
    monitor_rates(&monitor, 1e6, 1e11);
    StepRecord r = step_(1);
    const int64_t samples[] = {7, 0, 9007199254740993};
    r.samples = samples, r.sample_count = 3;
    check(monitor_step(&monitor, &r, &error), "step: %s", error.text);
    r = step_(2);
    r.loss = (double)NAN, r.grad_norm = (double)INFINITY, r.lr = -(double)INFINITY;
    check(monitor_step(&monitor, &r, &error), "step: %s", error.text);
    check(monitor_val(&monitor, 2, 0.1, &error), "val: %s", error.text);
    const char hostile[] = "a\"b\\c\n\t\x01\x7f\xff\xc3\xa9\xc0\x80\xed\xa0\x80\xf0\x9f\x98\x80\xf4\x90\x80\x80\xe2\x82\xe0\x80\xaf";
    check(monitor_sample(&monitor, hostile, sizeof hostile - 1, &error), "sample: %s", error.text);
    monitor_put_text(monitor_event_begin(&monitor, "save"), "path", "x");
    check(monitor_event_end(&monitor, &error), "event: %s", error.text);
    const MonitorRank rank = {.param_bytes = 1,
                              .grad_bytes = 2,
                              .optim_bytes = 3,
                              .activation_peak_bytes = (size_t)5 << 40,
                              .buffer_bytes = 4,
                              .resident_start_bytes = 5,
                              .resident_peak_bytes = 6,
                              .tp = 7,
                              .pp = 8,
                              .dp = 9};
    check(monitor_end(&monitor, 0xfedcba9876543210u, "cpu", -1, &rank, 1, &error), "end: %s", error.text);
    check(monitor_close(&monitor, &error) && monitor_close(&monitor, &error), "close, twice: %s", error.text);
    char *log = read_("log.jsonl");
    const char *wanted =
        "{\"step\":1,\"loss\":0.333333333,\"grad_norm\":0.5,\"lr\":0.0003,\"tokens\":2048,\"ms\":100,\"tok_per_s\":20480,\"mfu\":0.2048,"
        "\"samples\":[7,0,9007199254740993]}\n"
        "{\"step\":2,\"loss\":null,\"grad_norm\":null,\"lr\":null,\"tokens\":2048,\"ms\":100,\"tok_per_s\":20480,\"mfu\":0.2048}\n"
        "{\"step\":2,\"val_loss\":0.1}\n"
        "{\"event\":\"sample\",\"step\":2,\"text\":\"a\\\"b\\\\c\\u000a\\u0009\\u0001\\u007f\xef\xbf\xbd\xc3\xa9"
        "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xf0\x9f\x98\x80\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"
        "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\"}\n"
        "{\"event\":\"save\",\"step\":2,\"path\":\"x\"}\n"
        "{\"event\":\"end\",\"step\":2,\"init_hash\":\"fedcba9876543210\",\"device\":\"cpu\",\"ranks\":[{\"tp\":7,\"pp\":8,\"dp\":9,\"param_"
        "bytes\":1,\"grad_bytes\":2,"
        "\"optim_bytes\":3,\"activation_peak_bytes\":5497558138880,\"buffer_bytes\":4,\"resident_start_bytes\":5,\"resident_peak_bytes\":6,"
        "\"comm\":{}}]}\n";
    check(strcmp(log, wanted) == 0, "log.jsonl is\n%swanted\n%s", log, wanted);
    int lines = 0;
    for (char *line = strtok(log, "\n"); line != NULL; line = strtok(NULL, "\n"), lines++) {
        json_t *record = json_loads(line, 0, NULL);
        check(json_is_object(record), "line %d parses", lines);
        json_decref(record);
    }
    check(lines == 6, "6 lines, got %d", lines);
    free(log);
    // no peak: mfu null; no time: rate null; without OUT nothing is written and nothing fails
    monitor = open_(2, false, 0, console);
    r = step_(1);
    check(monitor_step(&monitor, &r, &error), "step");
    r.step = 2, r.ms = 0;
    check(monitor_step(&monitor, &r, &error) && monitor_close(&monitor, &error), "step, close");
    log = read_("log.jsonl");
    check(strstr(log, "\"mfu\":null") != NULL && strstr(log, "\"tok_per_s\":null,\"mfu\":null") != NULL && strstr(log, "sample") == NULL,
          "mfu is null without a peak, the log starts anew:\n%s", log);
    free(log);
    check(monitor_open(&monitor, NULL, 2, false, 0, &error), "no OUT");
    monitor.console = console;
    check(monitor_step(&monitor, &r, &error) && monitor_close(&monitor, &error), "no OUT: step, close");
    printf("records: fields, %%.9g, null, escapes, UTF-8\n");
}

static void test_float_round_trip(void) {
    MonitorJson json = {0};
    int wrong = 0;
    uint32_t bits = 12345;
    for (int i = 0; i < 20000; i++) {
        bits = bits * 1664525u + 1013904223u;
        float value;
        memcpy(&value, &bits, 4);
        if (!isfinite(value)) continue;
        json.length = 0;
        monitor_json_real(&json, (double)value);
        wrong += strtof(json.text, NULL) != value;
    }
    check(wrong == 0, "%d of 20000 floats changed", wrong);
    monitor_json_free(&json);
    printf("floats: 20000 random fp32 values read back bit for bit\n");
}

static void test_resume(FILE *console) {
    static const char old[] =
        "{\"step\":1,\"loss\":3.25}\n{\"event\":\"start\",\"step\":0}\n{\"step\":2,\"loss\":3}\n{\"step\":2,\"val_loss\":3}\n"
        "{\"event\":\"end\",\"step\":2}\n{\"event\":\"note\"}\n"
        "not json\n[1]\n{\"step\":\"2\"}\n\n{\"step\":3,\"loss\":2}\n{\"event\":\"save\",\"step\":3}\n{\"step\":3,\"val_loss\":2}\n";
    static const char kept[] =
        "{\"step\":1,\"loss\":3.25}\n{\"event\":\"start\",\"step\":0}\n{\"step\":2,\"loss\":3}\n{\"step\":2,\"val_loss\":3}\n"
        "{\"event\":\"note\"}\n";
    Error error = {0};
    // every possible tear of the last line
    static const char last[] = "{\"step\":2,\"loss\":12.5}\n";
    for (size_t cut = 0; cut < sizeof last; cut++) {
        char text[2048], wanted[2048];
        const int length = snprintf(text, sizeof text, "%s%.*s", old, (int)cut, last);
        write_("log.jsonl", text, (size_t)length);
        Monitor monitor = open_(5, true, 2, console);
        snprintf(wanted, sizeof wanted, "%s%s", kept, cut + 2 >= sizeof last ? last : "");
        char *log = read_("log.jsonl");
        check(strcmp(log, wanted) == 0, "last line cut to %zu bytes: log is\n%swanted\n%s", cut, log, wanted);
        free(log);
        StepRecord r = step_(3);
        check(monitor_step(&monitor, &r, &error) && monitor_close(&monitor, &error), "step after resume: %s", error.text);
        log = read_("log.jsonl");
        check(strncmp(log, wanted, strlen(wanted)) == 0 && strncmp(log + strlen(wanted), "{\"step\":3,", 10) == 0, "records are appended:\n%s",
              log);
        free(log);
    }
    check(access(path_("log.jsonl.tmp"), F_OK) != 0, "no .tmp is left");
    unlink(path_("log.jsonl"));
    Monitor monitor = open_(5, true, 2, console); // a checkpoint without its log
    check(monitor_close(&monitor, &error), "close");
    printf("resume: records after the resumed step, torn and foreign lines and old ends are cut\n");
}

static void test_failures(FILE *console) {
    // a full disk: /dev/full refuses every write
    Error error = {0};
    unlink(path_("log.jsonl"));
    check(symlink("/dev/full", path_("log.jsonl")) == 0, "symlink");
    Monitor monitor = open_(5, false, 0, console);
    StepRecord r = step_(1);
    check(!monitor_step(&monitor, &r, &error) && error.code == CODE_IO && strstr(error.text, "log.jsonl") && strstr(error.text, "No space"),
          "full disk: code %d '%s'", error.code, error.text);
    Error ignored = {0};
    (void)monitor_close(&monitor, &ignored);
    unlink(path_("log.jsonl"));
    // a directory that is not there; a directory in the place of the log
    error = (Error){0};
    check(!monitor_open(&monitor, "/nonexistent/dir", 5, false, 0, &error) && error.code == CODE_IO &&
              strstr(error.text, "/nonexistent/dir/log.jsonl"),
          "missing directory: code %d '%s'", error.code, error.text);
    check(monitor_close(&monitor, &ignored), "close after a failed open");
    mkdir(path_("log.jsonl"), 0777);
    for (int resumed = 0; resumed < 2; resumed++) {
        error = (Error){0};
        check(!monitor_open(&monitor, out_, 5, resumed, 1, &error) && error.code == CODE_IO, "log is a directory, resumed %d: code %d '%s'",
              resumed, error.code, error.text);
    }
    rmdir(path_("log.jsonl"));
    unlink(path_("log.jsonl.tmp"));
    printf("failures: full disk, missing directory, directory in place of the log: code %d, one line\n", CODE_IO);
}

// What the console got, as text.
static char *console_text_(FILE *console) {
    char *text = base_new(1 << 16, 1);
    rewind(console);
    text[fread(text, 1, (1 << 16) - 1, console)] = '\0';
    return text;
}

static void test_console(void) {
    Error error = {0};
    for (int terminal = 0; terminal < 2; terminal++) {
        FILE *console = tmpfile();
        Monitor monitor;
        check(monitor_open(&monitor, NULL, 40, false, 0, &error), "open");
        monitor.console = console;
        monitor.terminal = terminal;
        monitor_rates(&monitor, 1e6, terminal ? 1e11 : 0);
        for (int i = 1; i <= 40; i++) {
            StepRecord r = step_(i);
            check(monitor_step(&monitor, &r, &error), "step");
            monitor.shown_ms = clock_ms() + (i == 9 ? -1001 : 1e6); // a second has passed after step 9 only, however slow the test is
            if (i == 20) check(monitor_val(&monitor, i, 2.5, &error), "val");
            if (i == 30) check(monitor_sample(&monitor, "he\x1b[2Jllo\xff", 10, &error), "sample");
        }
        check(monitor_close(&monitor, &error), "close");
        char *text = console_text_(console);
        const size_t length = strlen(text);
        check(length > 0 && text[length - 1] == '\n', "the console ends with a newline");
        check(strstr(text, "step 1/40 | loss 0.3333 | norm 0.500 | lr 3.00e-04 | 100.0 ms | 20480 tok/s | MFU ") != NULL,
              "line of step 1 in '%.200s'", text);
        check(strstr(text, terminal ? "MFU 20.5% | ETA 0:04" : "MFU n/a | ETA 0:04") != NULL, "MFU and ETA in '%.200s'", text);
        check(strstr(text, "step 40/40") != NULL && strstr(text, "ETA 0:00") != NULL, "the last step is shown");
        check(strstr(text, "he?[2Jllo?\n") != NULL, "control bytes of samples are not shown");
        const char *val = strstr(text, "step 20/40 | val loss 2.5000\n");
        check(val != NULL, "validation line");
        const char *before = terminal ? "\r\033[K" : "\n";
        check(val != NULL && strncmp(val - strlen(before), before, strlen(before)) == 0, "the validation line starts on a clean line");
        int shown = 0;
        for (const char *at = text; (at = strstr(at, "| loss")) != NULL; at++) shown++;
        check(terminal ? shown == 40 : shown == 5, "%d step lines shown (terminal %d)", shown, terminal); // plain: 1, 10, 20, 30, 40
        check((strchr(text, '\r') != NULL) == (terminal == 1), "carriage returns only on a terminal");
        free(text);
        fclose(console);
    }
    // stopped between rationed lines: close shows the last step
    FILE *console = tmpfile();
    Monitor monitor;
    check(monitor_open(&monitor, NULL, 40, false, 0, &error), "open");
    monitor.console = console;
    monitor.terminal = false;
    for (int i = 1; i <= 5; i++) {
        StepRecord r = step_(i);
        check(monitor_step(&monitor, &r, &error), "step");
        monitor.shown_ms = clock_ms() + 1e6;
    }
    check(monitor_close(&monitor, &error), "close");
    char *text = console_text_(console);
    check(strstr(text, "step 5/40") != NULL && strstr(text, "step 4/40") == NULL, "a stopped run shows its last step: '%s'", text);
    free(text);
    fclose(console);
    char duration[32];
    check(strcmp(monitor_duration_(59.6, duration), "1:00") == 0 && strcmp(monitor_duration_(3661, duration), "1:01:01") == 0 &&
              strcmp(monitor_duration_(90000, duration), "1d01h") == 0 && strcmp(monitor_duration_((double)NAN, duration), "?") == 0,
          "durations");
    printf("console: in place on a terminal, rationed elsewhere, messages on clean lines\n");
}

static void test_run_json(void) {
    Options options;
    Error error = {0};
    char *argv[] = {"./train_gpt", "--lr=5e-4", "--model", "llama-nano", "--prompt", "a\"\n\xff", "--kv-heads=2"};
    check(options_parse(&options, 7, argv, &error), "parse: %s", error.text);
    ModelConfig config;
    check(model_configure(&config, &options, 300, &error), "configure: %s", error.text);
    check(monitor_run_json(out_, 7, argv, &options, &config, 123, &error), "run.json: %s", error.text);
    char *text = read_("run.json");
    json_error_t where;
    json_t *run = json_loads(text, JSON_REJECT_DUPLICATES, &where);
    check(run != NULL, "run.json parses: %s", where.text);
    const json_t *flags = json_object_get(run, "flags");
    check((int)json_object_size(flags) == OPTION_COUNT, "%d flags of %d", (int)json_object_size(flags), OPTION_COUNT);
    check(json_real_value(json_object_get(flags, "lr")) == 5e-4, "lr");
    check(json_integer_value(json_object_get(flags, "kv-heads")) == 2, "kv-heads");
    check(json_integer_value(json_object_get(flags, "vocab")) == 300, "vocab comes from the data");
    check(json_integer_value(json_object_get(flags, "layers")) == 4, "layers come from the preset");
    check(strcmp(json_string_value(json_object_get(flags, "norm")), "rmsnorm") == 0, "norm comes from the preset");
    check(strcmp(json_string_value(json_object_get(flags, "prompt")), "a\"\n\xef\xbf\xbd") == 0, "prompt");
    check(json_is_null(json_object_get(flags, "train")) && json_is_false(json_object_get(flags, "dry-run")),
          "unset flags are null, bare ones false");
    check(json_array_size(json_object_get(run, "command")) == 7 && json_array_size(json_object_get(run, "given")) == 4, "command and given");
    const char *started = json_string_value(json_object_get(run, "started"));
    check(started != NULL && strlen(started) == 20 && started[10] == 'T' && started[19] == 'Z', "start time in ISO 8601");
    static const char *const texts[] = {"commit", "host", "cpu", "compiler"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) check(json_string_length(json_object_get(run, texts[i])) > 0, "%s", texts[i]);
    check(json_integer_value(json_object_get(run, "cores")) > 0 && json_integer_value(json_object_get(run, "threads")) > 0, "cores, threads");
    check(json_string_length(json_object_get(json_object_get(run, "libraries"), "blas")) > 0, "libraries");
    json_decref(run);
    free(text);
    check(!monitor_run_json("/nonexistent", 7, argv, &options, &config, 123, &error) && error.code == CODE_IO, "unwritable: '%s'", error.text);
    options_free(&options);
    printf("run.json: every flag resolved, machine, libraries\n");
}

// The table at the end of a run of many ranks: the largest of each sort, the mean of what was communicated; one rank: a line.
static void test_ranks(void) {
    static const char wanted[] = "memory, MB             start        peak   largest\n"
                                 "  parameters             2.0         2.0   rank 1 (tp 1, pp 0, dp 0)\n"
                                 "  gradients            100.5       100.5   rank 0 (tp 0, pp 0, dp 0)\n"
                                 "  optimizer              0.0         0.0   rank 0 (tp 0, pp 0, dp 0)\n"
                                 "  activations            0.0        30.0   rank 2 (tp 0, pp 1, dp 3)\n"
                                 "  buffers                4.0         4.0   rank 1 (tp 1, pp 0, dp 0)\n"
                                 "  resident               7.0   1234567.8   rank 2 (tp 0, pp 1, dp 3)\n"
                                 "comm per step          calls          MB   largest\n"
                                 "  all_reduce             2.0       0.300   0.500: rank 1 (tp 1, pp 0, dp 0)\n"
                                 "  barrier                0.1       0.000   0.000: rank 0 (tp 0, pp 0, dp 0)\n";
    Error error = {0};
    MonitorRank ranks[3] = {{.param_bytes = 1000000, .grad_bytes = 100500000, .resident_start_bytes = 9000000, .resident_peak_bytes = 9000000},
                            {.tp = 1, .param_bytes = 2000000, .buffer_bytes = 4000000},
                            {.pp = 1,
                             .dp = 3,
                             .param_bytes = 2000000,
                             .activation_peak_bytes = 30000000,
                             .resident_start_bytes = 7000000,
                             .resident_peak_bytes = 1234567800000}};
    ranks[0].comm[COMM_ALL_REDUCE] = ranks[0].step_comm[COMM_ALL_REDUCE] = (CommCount){10, 1000000};
    ranks[1].comm[COMM_ALL_REDUCE] = ranks[1].step_comm[COMM_ALL_REDUCE] = (CommCount){20, 5000000};
    ranks[2].comm[COMM_ALL_REDUCE] = ranks[2].step_comm[COMM_ALL_REDUCE] = (CommCount){30, 3000000};
    ranks[2].comm[COMM_BARRIER] = ranks[2].step_comm[COMM_BARRIER] = (CommCount){3, 0};
    for (int one = 0; one < 2; one++) {
        FILE *console = tmpfile();
        Monitor monitor;
        check(monitor_open(&monitor, NULL, 10, false, 0, &error), "open");
        monitor.console = console;
        monitor_ranks(&monitor, ranks, one ? 1 : 3, 10);
        check(monitor_close(&monitor, &error), "close");
        char *text = console_text_(console);
        const char *expected = one ? "memory, MB: parameters 1.0, gradients 100.5, resident 9.0 (9.0 at the start)\n" : wanted;
        check(strcmp(text, expected) == 0, "the console got\n%swanted\n%s", text, expected);
        free(text);
        fclose(console);
    }
    size_t before, after, peak, peak_after;
    monitor_resident(&before, &peak);
    const size_t bytes = (size_t)64 << 20;
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); // malloc may keep what is freed
    if (memory == MAP_FAILED) die(CODE_IO, "cannot map %zu bytes", bytes);
    memset(memory, 1, bytes);
    monitor_resident(&after, &peak_after);
    check(before > 0 && peak >= before && after >= before + bytes / 2 && after < before + 2 * bytes && peak_after >= after,
          "resident: %zu, then %zu (peak %zu)", before, after, peak_after);
    check(memory[bytes - 1] == 1 && munmap(memory, bytes) == 0, "memory holds what was written");
    monitor_resident(&before, &peak);
    check(before < after - bytes / 2 && peak >= after - bytes / 16, "given back: resident %zu, peak %zu", before, peak);
    printf("ranks: table, line, resident memory\n");
}

int main(void) {
    snprintf(out_, sizeof out_, "/tmp/test_monitor_XXXXXX");
    if (mkdtemp(out_) == NULL) die(CODE_IO, "cannot make %s", out_);
    FILE *console = fopen("/dev/null", "w");
    test_records(console);
    test_float_round_trip();
    test_resume(console);
    test_failures(console);
    fclose(console);
    test_console();
    test_run_json();
    test_ranks();
    unlink(path_("log.jsonl"));
    unlink(path_("run.json"));
    check(rmdir(out_) == 0, "nothing else is left in the directory");
    return test_end();
}
