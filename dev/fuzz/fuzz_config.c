// fuzz_config.c: any bytes as a config file. What is accepted must lie in the table's ranges, and read back the same when
// it is written as a config file.
#include "llmc/options.h" // what is fuzzed

static void require(bool ok) {
    if (!ok) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    Options options, again;
    Error error = {0};
    options_defaults(&options);
    if (!options_parse_config(&options, (const char *)data, bytes, "fuzz", &error)) {
        require(error.code == CODE_USAGE && error.text[0] != '\0');
        options_free(&options);
        return 0;
    }
    char *text = NULL, buffer[64], buffer_again[64];
    size_t text_bytes = 0;
    FILE *file = open_memstream(&text, &text_bytes);
    require(file != NULL);
    const OptionRow *rows = options_rows();
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (!options.given[i]) continue;
        const void *field = (const char *)&options + rows[i].offset;
        const bool automatic = rows[i].kind == OPTION_AUTO && *(const int64_t *)field == OPTIONS_AUTO;
        if (rows[i].kind == OPTION_INT || (rows[i].kind == OPTION_AUTO && !automatic))
            require((double)*(const int64_t *)field >= rows[i].low && (double)*(const int64_t *)field <= rows[i].high);
        if (rows[i].kind == OPTION_REAL) require(*(const double *)field >= rows[i].low && *(const double *)field <= rows[i].high);
        const char *value = options_text(&options, i, buffer);
        // A blank before '#' starts a comment, a leading '=' is taken for the separator: such texts are not written again.
        if (rows[i].kind == OPTION_TEXT && strpbrk(value, "#=") != NULL)
            options.given[i] = false;
        else if (rows[i].kind == OPTION_BARE)
            fprintf(file, "%s\n", rows[i].flag);
        else
            fprintf(file, "%s = %s\n", rows[i].flag, value);
    }
    require(fclose(file) == 0);
    options_defaults(&again);
    bool good = options_parse_config(&again, text, text_bytes, "again", &error);
    // %.9g rounds: a number just inside its range may then lie outside.
    require(good || strstr(error.text, "wanted") != NULL);
    for (int i = 0; good && i < OPTION_COUNT; i++) {
        if (options.given[i] && rows[i].kind != OPTION_REAL) {
            require(strcmp(options_text(&options, i, buffer), options_text(&again, i, buffer_again)) == 0);
        }
    }
    options_free(&options);
    options_free(&again);
    free(text);
    return 0;
}
