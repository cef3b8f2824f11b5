// test_options.c: parsing of flags and config files: values, limits, messages that name the flag, and the table's own sanity.
#include "dev/test/test.h" // check, test_end
#include "llmc/options.h"  // what is tested

enum { WORDS = 8 };

// Parses up to WORDS words.
static bool parse_(Options *options, const char *const *words, Error *error) {
    char *argv[WORDS + 2] = {"train_gpt"};
    int argc = 1;
    for (; argc <= WORDS && words[argc - 1] != NULL; argc++) argv[argc] = (char *)words[argc - 1];
    *error = (Error){0};
    return options_parse(options, argc, argv, error);
}

static void test_table(void) {
    const OptionRow *rows = options_rows();
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionRow *row = &rows[i];
        check(strlen(row->flag) > 0 && strspn(row->flag, "abcdefghijklmnopqrstuvwxyz-0123456789") == strlen(row->flag), "name of flag %d: '%s'", i,
              row->flag);
        check(strlen(row->help) > 10 && row->section != NULL && strlen(row->section) > 0, "--%s has help and a section", row->flag);
        check(row->low <= row->high || row->kind == OPTION_CHOICE, "--%s: range %g to %g", row->flag, row->low, row->high);
        check(row->offset < sizeof(Options), "--%s: offset", row->flag);
        for (int j = 0; j < i; j++) check(strcmp(rows[j].flag, row->flag) != 0 && rows[j].offset != row->offset, "--%s stands twice", row->flag);
    }
    check(rows[OPTION_layers].kind == OPTION_INT && strcmp(rows[OPTION_layers].flag, "layers") == 0, "OPTION_* index the rows");
    check(strcmp(rows[0].section, "run") == 0 && strcmp(rows[OPTION_COUNT - 1].section, "debug") == 0, "sections");
    Options options;
    options_defaults(&options);
    check(options.lr == 3e-4 && options.beta2 == 0.95 && options.steps == 1000 && options.seq == 256 && options.top_p == 1 &&
              options.shuffle == 1 && options.layers == 0 && options.out == NULL && !options.help && strcmp(options.resume, "no") == 0,
          "defaults");
    for (int i = 0; i < OPTION_COUNT; i++) check(!options.given[i], "--%s is not given", rows[i].flag);
    options_free(&options);
    printf("table: %d flags, names, ranges, help, defaults\n", OPTION_COUNT);
}

// Every flag takes its bounds, in both forms, and nothing beyond them.
static void test_bounds(void) {
    const OptionRow *rows = options_rows();
    int tried = 0;
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionRow *row = &rows[i];
        Options options;
        Error error;
        char flag[64], joined[128], value[64], buffer[64];
        snprintf(flag, sizeof flag, "--%s", row->flag);
        const bool whole = row->kind == OPTION_INT || row->kind == OPTION_AUTO;
        if (whole || row->kind == OPTION_REAL) {
            for (int high = 0; high < 2; high++) {
                const double bound = high ? row->high : row->low;
                snprintf(value, sizeof value, whole ? "%.0f" : "%.17g", bound);
                snprintf(joined, sizeof joined, "%s=%s", flag, value);
                check(parse_(&options, (const char *[]){flag, value, NULL}, &error) && options.given[i], "%s %s: %s", flag, value, error.text);
                const void *field = (const char *)&options + row->offset;
                check((whole ? (double)*(const int64_t *)field : *(const double *)field) == bound, "%s %s is stored", flag, value);
                check(strlen(options_text(&options, i, buffer)) > 0, "%s as text", flag);
                options_free(&options);
                check(parse_(&options, (const char *[]){joined, NULL}, &error), "%s: %s", joined, error.text);
                options_free(&options);
                const double beyond = high ? row->high * (whole ? 1 : 1.0001) + (whole ? 2 : 0)
                                           : row->low - (whole           ? 1
                                                         : row->low == 0 ? 0.1
                                                                         : row->low * 0.01);
                snprintf(value, sizeof value, whole ? "%.0f" : "%.17g", beyond);
                const bool refused = !parse_(&options, (const char *[]){flag, value, NULL}, &error);
                check(refused && error.code == CODE_USAGE && strstr(error.text, row->flag) != NULL && strstr(error.text, "wanted") != NULL,
                      "%s %s must be refused: '%s'", flag, value, error.text);
                options_free(&options);
                tried += 3;
            }
            const bool automatic = parse_(&options, (const char *[]){flag, "auto", NULL}, &error);
            check(automatic == (row->kind == OPTION_AUTO), "%s auto: %s", flag, error.text);
            if (automatic) {
                const int64_t stored = *(const int64_t *)((const char *)&options + row->offset);
                check(stored == OPTIONS_AUTO && strcmp(options_text(&options, i, buffer), "auto") == 0, "%s auto as text: %s", flag, buffer);
            }
            options_free(&options);
            static const char *const wrong[] = {
                "", "abc", "3x", "x3", " 3", "3 ", "0x10", "1e", "--", "nan", "inf", "1,5", "99999999999999999999999999e999", "-"};
            for (size_t w = 0; w < sizeof wrong / sizeof wrong[0]; w++) {
                const bool refused = !parse_(&options, (const char *[]){flag, wrong[w], NULL}, &error);
                check(refused && error.code == CODE_USAGE && strstr(error.text, row->flag) != NULL, "%s '%s' must be refused: '%s'", flag, wrong[w],
                      error.text);
                options_free(&options);
                tried++;
            }
        } else if (row->kind == OPTION_CHOICE) {
            int choice = 0;
            for (const char *at = row->choices; *at != '\0'; choice++, at += strcspn(at, "|"), at += *at == '|') {
                snprintf(value, sizeof value, "%.*s", (int)strcspn(at, "|"), at);
                check(parse_(&options, (const char *[]){flag, value, NULL}, &error), "%s %s: %s", flag, value, error.text);
                check(*(const int *)((const char *)&options + row->offset) == choice, "%s %s is choice %d", flag, value, choice);
                check(strcmp(options_text(&options, i, buffer), value) == 0, "%s as text: '%s'", flag, buffer);
                options_free(&options);
                tried++;
            }
            const char *wrong[] = {"", "bogus", row->choices, "|"};
            for (size_t w = choice > 1 ? 0 : 3; w < sizeof wrong / sizeof wrong[0]; w++) {
                const bool refused = !parse_(&options, (const char *[]){flag, wrong[w], NULL}, &error);
                check(refused && strstr(error.text, row->flag) != NULL && strstr(error.text, row->choices) != NULL, "%s '%s': '%s'", flag, wrong[w],
                      error.text);
                options_free(&options);
                tried++;
            }
        } else if (row->kind == OPTION_TEXT) {
            const bool empty = parse_(&options, (const char *[]){flag, "", NULL}, &error);
            check(empty == (row->low == 0), "%s '': %s", flag, error.text);
            options_free(&options);
            char *longest = base_new((size_t)row->high + 2, 1);
            memset(longest, 'a', (size_t)row->high);
            check(parse_(&options, (const char *[]){flag, longest, NULL}, &error) || i == OPTION_config, "%s of %.0f characters: %s", flag,
                  row->high, error.text);
            options_free(&options);
            longest[(size_t)row->high] = 'a';
            check(!parse_(&options, (const char *[]){flag, longest, NULL}, &error) && strstr(error.text, row->flag) != NULL, "%s too long", flag);
            options_free(&options);
            free(longest);
            tried += 3;
        } else {
            snprintf(joined, sizeof joined, "%s=1", flag);
            check(parse_(&options, (const char *[]){flag, NULL}, &error) && options.given[i], "%s", flag);
            options_free(&options);
            check(!parse_(&options, (const char *[]){joined, NULL}, &error) && strstr(error.text, "no value") != NULL, "%s: '%s'", joined,
                  error.text);
            options_free(&options);
            tried += 2;
        }
        if (row->kind != OPTION_BARE) {
            check(!parse_(&options, (const char *[]){flag, NULL}, &error) && strstr(error.text, row->flag) != NULL, "%s without a value: '%s'",
                  flag, error.text);
            options_free(&options);
        }
    }
    printf("bounds: %d values accepted or refused\n", tried);
}

static void test_command_line(void) {
    Options options;
    Error error;
    check(parse_(&options, (const char *[]){"--lr", "1e-3", "--lr=2e-3", "--prompt", "--x", "--prompt=a=b", NULL}, &error), "repeats: %s",
          error.text);
    check(options.lr == 2e-3 && strcmp(options.prompt, "a=b") == 0, "the last of repeated flags wins; a value may hold '='");
    options_free(&options);
    check(parse_(&options, (const char *[]){"--prompt", "--lr", NULL}, &error) && strcmp(options.prompt, "--lr") == 0, "a value may start with --");
    options_free(&options);
    check(parse_(&options, (const char *[]){"--lr", "1e-400", NULL}, &error) && options.lr == 0, "an underflow is zero: %s", error.text);
    options_free(&options);
    static const struct {
        const char *word, *wanted;
    } wrong[] = {{"--bogus", "--bogus"},
                 {"--bogus=3", "'--bogus'"},
                 {"lr", "'lr'"},
                 {"-lr", "'-lr'"},
                 {"--", "'--'"},
                 {"", "''"},
                 {"--l", "'--l'"},
                 {"--lrx=1", "--lrx"},
                 {"--=3", "'--'"},
                 {"--LR=1", "--LR"},
                 {"--seq=9223372036854775808", "seq"},
                 {"--seq=-9223372036854775809", "seq"}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        const bool refused = !parse_(&options, (const char *[]){wrong[i].word, NULL}, &error);
        check(refused && error.code == CODE_USAGE && strstr(error.text, wrong[i].wanted) != NULL, "'%s': '%s'", wrong[i].word, error.text);
        options_free(&options);
    }
    char *longest = base_new(100000, 1);
    memset(longest, '-', 99999);
    check(!parse_(&options, (const char *[]){longest, NULL}, &error) && strlen(error.text) < 200, "a long unknown flag makes a short message");
    options_free(&options);
    free(longest);
    printf("command line: both forms, repeats, unknown flags\n");
}

static bool config_(Options *options, const char *text, size_t length, Error *error) {
    options_defaults(options);
    *error = (Error){0};
    return options_parse_config(options, text, length, "f.cfg", error);
}

static void test_config(void) {
    Options options;
    Error error;
    static const char good[] = "# comment\n\n  lr 1e-3  # why\nlr=2e-3\r\nseq = 128\nprompt = In the beginning # not this\ntrain=a#b\nval\tx "
                               "y\nout = =z\nlog-samples on\ndry-run\ntop-k=5";
    check(config_(&options, good, sizeof good - 1, &error), "config: %s", error.text);
    check(options.lr == 2e-3 && options.seq == 128 && options.dry_run && options.top_k == 5 && options.log_samples == 1, "numbers");
    check(strcmp(options.prompt, "In the beginning") == 0 && strcmp(options.train, "a#b") == 0 && strcmp(options.val, "x y") == 0 &&
              strcmp(options.out, "=z") == 0,
          "texts: '%s' '%s' '%s' '%s'", options.prompt, options.train, options.val, options.out);
    check(options.given[OPTION_lr] && options.given[OPTION_out] && !options.given[OPTION_seed], "given");
    options_free(&options);
    static const struct {
        const char *text;
        size_t length; // 0: of the string
        const char *wanted;
    } wrong[] = {{"seq 3\nbogus 3\n", 0, "f.cfg:2: "},
                 {"--lr 3", 0, "unknown flag '--lr'"},
                 {"lr", 0, "lr"},
                 {"lr=", 0, "lr"},
                 {"lr = abc", 0, "f.cfg:1: lr"},
                 {"config other", 0, "unknown flag 'config'"},
                 {"dry-run yes", 0, "dry-run"},
                 {"\n\n\nseq 0\n", 0, "f.cfg:4: seq"},
                 {"l\0r 3", 6, "NUL"},
                 {"= 3", 0, "unknown flag ''"},
                 {"\xff\xfe 3", 0, "f.cfg:1: "}};
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        const size_t length = wrong[i].length ? wrong[i].length : strlen(wrong[i].text);
        const bool refused = !config_(&options, wrong[i].text, length, &error);
        check(refused && error.code == CODE_USAGE && strstr(error.text, wrong[i].wanted) != NULL && strchr(error.text, '\n') == NULL,
              "config %d: '%s'", (int)i, error.text);
        options_free(&options);
    }
    char *line = base_new(20000, 1);
    memset(line, 'a', 19999);
    check(!config_(&options, line, 19999, &error) && strstr(error.text, "f.cfg:1") != NULL, "a long line: '%s'", error.text);
    options_free(&options);
    free(line);

    // --config takes effect where it stands; texts live until options_free, also when they are replaced
    char path[] = "/tmp/test_options_XXXXXX";
    const int file = mkstemp(path);
    static const char text[] = "lr 5e-3\nprompt one\nprompt two\nseq 64\n";
    check(file >= 0 && write(file, text, sizeof text - 1) == (ssize_t)sizeof text - 1 && close(file) == 0, "writing %s", path);
    check(parse_(&options, (const char *[]){"--lr=1", "--seq=32", "--config", path, "--seq", "16", NULL}, &error), "--config: %s", error.text);
    check(options.lr == 5e-3 && options.seq == 16 && strcmp(options.prompt, "two") == 0, "order: lr %g seq %lld", options.lr,
          (long long)options.seq);
    options_free(&options);
    check(parse_(&options, (const char *[]){"--config", path, "--prompt", "three", "--config", path, NULL}, &error) &&
              strcmp(options.prompt, "two") == 0,
          "the same file twice");
    options_free(&options);
    unlink(path);
    check(!parse_(&options, (const char *[]){"--config", path, NULL}, &error) && error.code == CODE_INPUT && strstr(error.text, path) != NULL,
          "missing: '%s'", error.text);
    options_free(&options);
    check(!parse_(&options, (const char *[]){"--config", "/tmp", NULL}, &error) && error.code == CODE_INPUT, "a directory: '%s'", error.text);
    options_free(&options);
    check(!parse_(&options, (const char *[]){"--config", "/dev/zero", NULL}, &error) && error.code == CODE_INPUT, "endless: '%s'", error.text);
    options_free(&options);
    printf("config files: comments, blanks, both forms, line numbers in messages\n");
}

static void test_help(void) {
    FILE *file = tmpfile();
    options_help(file);
    rewind(file);
    char *text = base_new(1 << 16, 1);
    text[fread(text, 1, (1 << 16) - 1, file)] = '\0';
    fclose(file);
    for (int i = 0; i < OPTION_COUNT; i++) {
        char flag[64];
        snprintf(flag, sizeof flag, "  --%s ", options_rows()[i].flag);
        check(strstr(text, flag) != NULL, "help shows %s", flag);
    }
    check(strstr(text, "exit codes") != NULL, "help shows the exit codes");
    free(text);
    printf("help: every flag\n");
}

int main(void) {
    test_table();
    test_bounds();
    test_command_line();
    test_config();
    test_help();
    return test_end();
}
