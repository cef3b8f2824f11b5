// tokenize.c: text or .jsonl -> token files for train_gpt, with the byte tokenizer (ids 0..255, 256 ends a document) or a byte-level BPE
// from a file. Streams: memory is bounded but for one line of .jsonl and, with a BPE, for text without spaces and newlines to cut it at. Writes
// NAME.bin (llm.c's uint16 form, or uint32 for large vocabularies) and NAME.json beside it, first under a temporary name. Text is taken
// verbatim: CR, NUL and bytes that are not UTF-8 are kept. Also shows what a token file holds. Training a BPE: data/text.py.

#include "llmc/base.h"      // Error, fail, CODE_*
#include "llmc/files.h"     // directory_create
#include "llmc/tokenizer.h" // tokenizer_open, tokenizer_encode
#include "llmc/tokens.h"    // TOKENS_*, tokens_open
#include <jansson.h>        // json_loadb, json_pack, json_dumpf

typedef enum { SPLIT_FILE, SPLIT_BLANK, SPLIT_LINES } TextSplit;

typedef struct {
    const char *out, *show, *field, *tokenizer, *eot;
    char **inputs;
    int input_count;
    TextSplit split;
    bool jsonl, tail, tokenizer_given;
    double val_fraction;
    int64_t shard_tokens, from, count;
} Config;

static void usage(FILE *file) {
    fprintf(file, "tokenize: text -> token files\n"
                  "  ./tokenize [flags] --out NAME INPUT...   writes NAME.bin and NAME.json (- reads the standard input)\n"
                  "  ./tokenize --show FILE.bin [--from N] [--count N]   writes the text of tokens N.. to the standard output\n\n"
                  "documents: each input is one, unless\n"
                  "  --lines             a line is a document (without its newline)\n"
                  "  --split-on-blank    blank lines separate documents\n"
                  "  --jsonl             a line is a JSON object with a text (assumed for names ending in .jsonl)\n"
                  "  --field NAME        its field [text]\n\n"
                  "tokens\n"
                  "  --tokenizer PATH    a byte-level BPE: tokenizer.json, or a directory with it or with vocab.json and merges.txt [byte]\n"
                  "  --eot TEXT          the special token that ends a document [<|endoftext|>, <|end_of_text|>, ...: what the tokenizer has]\n"
                  "                      text that spells special tokens stays text\n\n"
                  "output\n"
                  "  --val-fraction X    writes NAME_train and NAME_val: every 1/X-th document is held out\n"
                  "  --val-tail          holds out the last X of the input bytes instead (a single input is cut in two)\n"
                  "  --shard-tokens N    at most N tokens a file, NAME_000000.bin and following [2147483647]\n\n"
                  "exit codes: 0 done, 2 usage, 3 input, 5 cannot write\n");
}

// ----------------------------------------------------------------------------
// Writing one token file after the other

typedef struct {
    char name[4200]; // without .bin
    int64_t shard_tokens;
    const Tokenizer *tokenizer;
    const char *tokenizer_name; // for the .json
    FILE *file;                 // the current shard, under its temporary name
    int64_t tokens;             // of the shard
    int64_t documents;          // that end in the shard
    int shard;
    int64_t all_tokens, all_documents;
} Writer;

static bool writer_path_(const Writer *writer, bool numbered, const char *suffix, char path[4300]) {
    if (numbered) return snprintf(path, 4300, "%s_%06d%s", writer->name, writer->shard, suffix) < 4300;
    return snprintf(path, 4300, "%s%s", writer->name, suffix) < 4300;
}

static bool writer_failed_(const char *path, Error *error) { return fail(error, CODE_IO, "cannot write %.300s: %s", path, strerror(errno)); }

static bool writer_open_(Writer *writer, Error *error) {
    char path[4300];
    writer_path_(writer, false, ".bin.tmp", path);
    char *slash = strrchr(path, '/');
    if (slash != NULL && slash != path) {
        *slash = '\0';
        if (!directory_create(path, error)) return false;
        *slash = '/';
    }
    writer->file = fopen(path, "wb");
    if (writer->file == NULL) return writer_failed_(path, error);
    const int32_t header[TOKENS_HEADER_BYTES / 4] = {0}; // not a token file until it is complete
    writer->tokens = writer->documents = 0;
    return fwrite(header, sizeof header, 1, writer->file) == 1 || writer_failed_(path, error);
}

static bool writer_sidecar_(const Writer *writer, const char *path, Error *error) {
    FILE *file = fopen(path, "wb");
    if (file == NULL) return writer_failed_(path, error);
    json_t *facts = json_pack("{s:s, s:I, s:i, s:I}", "tokenizer", writer->tokenizer_name, "vocab_size", (json_int_t)writer->tokenizer->vocab,
                              "eot_id", (int)writer->tokenizer->eot, "documents", (json_int_t)writer->documents);
    bool good = facts != NULL && json_dumpf(facts, file, 0) == 0 && fputc('\n', file) != EOF;
    json_decref(facts);
    good = fclose(file) == 0 && good;
    return good || writer_failed_(path, error);
}

// Ids of small vocabularies take two bytes.
static bool writer_narrow_(const Writer *writer) { return writer->tokenizer->vocab <= 65536; }

// Completes the current shard: header, sidecar, final names. `more`: another one follows, so that this one is numbered.
static bool writer_finish_(Writer *writer, bool more, Error *error) {
    char temporary[4300], sidecar_temporary[4300], final[4300], sidecar[4300];
    const bool numbered = more || writer->shard > 0;
    writer_path_(writer, false, ".bin.tmp", temporary);
    writer_path_(writer, false, ".json.tmp", sidecar_temporary);
    writer_path_(writer, numbered, ".bin", final);
    writer_path_(writer, numbered, ".json", sidecar);
    const bool narrow = writer_narrow_(writer);
    const int32_t header[3] = {narrow ? TOKENS_MAGIC_U16 : TOKENS_MAGIC_U32, narrow ? TOKENS_VERSION_U16 : TOKENS_VERSION_U32,
                               (int32_t)writer->tokens};
    bool good = fseek(writer->file, 0, SEEK_SET) == 0 && fwrite(header, sizeof header, 1, writer->file) == 1;
    good = fclose(writer->file) == 0 && good;
    writer->file = NULL;
    if (!good) return writer_failed_(temporary, error);
    if (!writer_sidecar_(writer, sidecar_temporary, error)) return false;
    if (rename(sidecar_temporary, sidecar) != 0) return writer_failed_(sidecar, error);
    if (rename(temporary, final) != 0) return writer_failed_(final, error);
    printf("%s: %lld tokens, %lld documents\n", final, (long long)writer->tokens, (long long)writer->documents);
    writer->shard++;
    return true;
}

// Removes what an error left half done.
static void writer_abandon_(Writer *writer) {
    char path[4300];
    if (writer->file != NULL) fclose(writer->file); // the file is thrown away
    writer->file = NULL;
    writer_path_(writer, false, ".bin.tmp", path);
    remove(path);
    writer_path_(writer, false, ".json.tmp", path);
    remove(path);
}

static bool writer_put_(Writer *writer, const int32_t *ids, int64_t count, Error *error) {
    while (count > 0) {
        if (writer->file != NULL && writer->tokens == writer->shard_tokens && !writer_finish_(writer, true, error)) return false;
        if (writer->file == NULL && !writer_open_(writer, error)) return false;
        uint16_t packed[4096];
        const int64_t n = min_i64(min_i64(count, 4096), writer->shard_tokens - writer->tokens);
        const bool narrow = writer_narrow_(writer);
        for (int64_t i = 0; narrow && i < n; i++) packed[i] = (uint16_t)ids[i];
        const void *from = narrow ? (const void *)packed : ids;
        if (fwrite(from, narrow ? 2 : 4, (size_t)n, writer->file) != (size_t)n) return writer_failed_(writer->name, error);
        writer->tokens += n;
        writer->all_tokens += n;
        ids += n;
        count -= n;
    }
    return true;
}

// ----------------------------------------------------------------------------
// Documents: which output they go to

typedef struct {
    const Config *config;
    Tokenizer tokenizer;
    char *text; // of the current document, not yet encoded
    int64_t text_bytes, text_capacity;
    TokenIds ids;
    Writer train, val;
    Writer *current; // of the document that is being read
    bool open;       // it has bytes
    int64_t documents;
    int64_t bytes_read, bytes_total; // of all inputs; total only with --val-tail
} Job;

static bool job_in_tail_(const Job *job) {
    return job->config->tail && (double)job->bytes_read >= (1.0 - job->config->val_fraction) * (double)job->bytes_total;
}

// Encodes the first `bytes` of the text that waits, and keeps the rest.
static bool job_encode_(Job *job, int64_t bytes, Error *error) {
    job->ids.count = 0;
    tokenizer_encode(&job->tokenizer, job->text, bytes, false, &job->ids);
    job->text_bytes -= bytes;
    memmove(job->text, job->text + bytes, (size_t)job->text_bytes);
    return writer_put_(job->current, job->ids.ids, job->ids.count, error);
}

static bool job_end_document_(Job *job, Error *error) {
    if (!job->open) return true; // empty documents leave nothing
    job->open = false;
    job->documents++;
    if (!job_encode_(job, job->text_bytes, error) || !writer_put_(job->current, &job->tokenizer.eot, 1, error)) return false;
    job->current->documents++;
    job->current->all_documents++;
    return true;
}

// Appends text to the current document.
static bool job_text_(Job *job, const char *text, int64_t bytes, Error *error) {
    const Config *c = job->config;
    if (bytes > 0 && !job->open) {
        const double k = (double)job->documents;
        const bool spread = !c->tail && floor((k + 1) * c->val_fraction) > floor(k * c->val_fraction);
        job->current = spread || job_in_tail_(job) ? &job->val : &job->train;
        job->open = true;
    }
    // Text waits until there is enough for all threads; where it can be cut is looked for every so many bytes.
    enum { AT_ONCE_BYTES = 1 << 22, PIECE_BYTES = 1 << 16 };
    while (bytes > 0) {
        const int64_t n = min_i64(bytes, PIECE_BYTES), before = job->text_bytes, whole = before + n;
        if (whole > BPE_TEXT_LIMIT)
            return fail(error, CODE_INPUT, "more than %d bytes of text without a space or newline to cut it at", BPE_TEXT_LIMIT);
        if (whole > job->text_capacity) job->text = base_grow(job->text, (size_t)(job->text_capacity = 2 * whole), 1);
        memcpy(job->text + before, text, (size_t)n);
        job->text_bytes = whole;
        text += n;
        bytes -= n;
        if (whole / AT_ONCE_BYTES == before / AT_ONCE_BYTES) continue;
        const int64_t cut = tokenizer_cut(&job->tokenizer, job->text, whole);
        if (cut > 0 && !job_encode_(job, cut, error)) return false;
    }
    return true;
}

// Whole inputs are documents. With --val-tail one may be cut where the held-out bytes begin.
static bool job_file_block_(Job *job, const char *block, int64_t bytes, Error *error) {
    const Config *c = job->config;
    if (c->tail && job->open && job->current == &job->train) {
        const int64_t border = (int64_t)ceil((1.0 - c->val_fraction) * (double)job->bytes_total);
        const int64_t before = max_i64(0, min_i64(bytes, border - job->bytes_read));
        if (before < bytes) {
            if (!job_text_(job, block, before, error)) return false;
            job->bytes_read += before;
            if (!job_end_document_(job, error) || !job_text_(job, block + before, bytes - before, error)) return false;
            job->bytes_read += bytes - before;
            return true;
        }
    }
    const bool good = job_text_(job, block, bytes, error);
    job->bytes_read += bytes;
    return good;
}

// State of the line splitters across blocks: the bytes of a line so far are blank ("" or "\r"), not yet given to a document.
typedef struct {
    bool line_start, held_cr;
} LineState;

static bool job_blank_block_(Job *job, LineState *state, const char *block, int64_t bytes, Error *error) {
    for (int64_t at = 0; at < bytes;) {
        if (state->line_start) {
            const char c = block[at];
            if (c == '\n') { // a blank line
                at++;
                state->held_cr = false;
                job->bytes_read++;
                if (!job_end_document_(job, error)) return false;
                continue;
            }
            if (c == '\r' && !state->held_cr) { // blank if a newline follows
                at++;
                state->held_cr = true;
                job->bytes_read++;
                continue;
            }
            if (state->held_cr && !job_text_(job, "\r", 1, error)) return false;
            state->held_cr = state->line_start = false;
        }
        const char *newline = memchr(block + at, '\n', (size_t)(bytes - at));
        const int64_t n = newline != NULL ? newline + 1 - (block + at) : bytes - at;
        if (!job_text_(job, block + at, n, error)) return false;
        job->bytes_read += n;
        at += n;
        state->line_start = newline != NULL;
    }
    return true;
}

static bool job_lines_block_(Job *job, const char *block, int64_t bytes, Error *error) {
    for (int64_t at = 0; at < bytes;) {
        const char *newline = memchr(block + at, '\n', (size_t)(bytes - at));
        const int64_t n = newline != NULL ? newline - (block + at) : bytes - at;
        if (!job_text_(job, block + at, n, error)) return false;
        if (newline != NULL && !job_end_document_(job, error)) return false;
        job->bytes_read += n + (newline != NULL);
        at += n + (newline != NULL);
    }
    return true;
}

static bool job_text_file_(Job *job, FILE *file, const char *name, Error *error) {
    static char block[1 << 16];
    LineState state = {.line_start = true};
    for (size_t got; (got = fread(block, 1, sizeof block, file)) > 0;) {
        bool good = false;
        switch (job->config->split) {
        case SPLIT_FILE: good = job_file_block_(job, block, (int64_t)got, error); break;
        case SPLIT_BLANK: good = job_blank_block_(job, &state, block, (int64_t)got, error); break;
        case SPLIT_LINES: good = job_lines_block_(job, block, (int64_t)got, error); break;
        }
        if (!good) return false;
    }
    if (ferror(file)) return fail(error, CODE_INPUT, "%.300s: cannot read: %s", name, strerror(errno));
    if (state.held_cr && !job_text_(job, "\r", 1, error)) return false;
    return job_end_document_(job, error);
}

static bool job_jsonl_file_(Job *job, FILE *file, const char *name, Error *error) {
    char *line = NULL;
    size_t capacity = 0;
    int64_t number = 0;
    bool good = true;
    for (ssize_t got; good && (got = getline(&line, &capacity, file)) >= 0; job->bytes_read += got) {
        number++;
        ssize_t used = 0;
        while (used < got && memchr(" \t\r\n", line[used], 4) != NULL) used++;
        if (used == got) continue; // a blank line
        json_error_t where;
        json_t *root = json_loadb(line, (size_t)got, JSON_ALLOW_NUL, &where);
        const json_t *text = json_object_get(root, job->config->field); // NULL also when root is NULL or no object
        if (root == NULL) {
            good = fail(error, CODE_INPUT, "%.300s: line %lld: not JSON: %.150s", name, (long long)number, where.text);
        } else if (!json_is_string(text)) {
            good = fail(error, CODE_INPUT, "%.300s: line %lld: %.100s: wanted an object with a text in this field (--field)", name,
                        (long long)number, job->config->field);
        } else {
            good = job_text_(job, json_string_value(text), (int64_t)json_string_length(text), error) && job_end_document_(job, error);
        }
        json_decref(root);
    }
    free(line);
    if (good && ferror(file)) good = fail(error, CODE_INPUT, "%.300s: cannot read: %s", name, strerror(errno));
    return good;
}

// ----------------------------------------------------------------------------

static bool job_sizes_(Job *job, Error *error) {
    for (int i = 0; i < job->config->input_count; i++) {
        struct stat status;
        const char *name = job->config->inputs[i];
        const bool standard = strcmp(name, "-") == 0;
        if (!standard && stat(name, &status) != 0) return fail(error, CODE_INPUT, "%.300s: cannot open: %s", name, strerror(errno));
        if (!standard && S_ISDIR(status.st_mode)) return fail(error, CODE_INPUT, "%.300s: is a directory, wanted a file", name);
        if (!job->config->tail) continue;
        if (standard || !S_ISREG(status.st_mode))
            return fail(error, CODE_USAGE, "--val-tail: the size of '%.300s' is not known, wanted a regular file", name);
        job->bytes_total += (int64_t)status.st_size;
    }
    return true;
}

static bool job_run_(Job *job, Error *error) {
    const Config *c = job->config;
    if (!job_sizes_(job, error)) return false;
    for (int i = 0; i < c->input_count; i++) {
        const char *name = c->inputs[i];
        FILE *file = strcmp(name, "-") == 0 ? stdin : fopen(name, "rb");
        if (file == NULL) return fail(error, CODE_INPUT, "%.300s: cannot open: %s", name, strerror(errno));
        const bool jsonl = c->jsonl || tokens_ends_with_(name, ".jsonl");
        const bool good = jsonl ? job_jsonl_file_(job, file, name, error) : job_text_file_(job, file, name, error);
        if (file != stdin) fclose(file); // opened for reading
        if (!good) return false;
    }
    if (job->documents == 0) return fail(error, CODE_INPUT, "no text in the input%s: nothing to write", c->input_count > 1 ? "s" : "");
    if (c->val_fraction > 0 && (job->val.all_tokens == 0 || job->train.all_tokens == 0)) {
        return fail(error, CODE_INPUT, "--val-fraction %g of %lld document%s leaves no text to %s%s", c->val_fraction, (long long)job->documents,
                    job->documents == 1 ? "" : "s", job->val.all_tokens == 0 ? "validate" : "train", c->tail ? "" : " (--val-tail cuts by bytes)");
    }
    if (!writer_finish_(&job->train, false, error)) return false;
    return c->val_fraction == 0 || writer_finish_(&job->val, false, error);
}

static bool open_tokenizer(const Config *config, Tokenizer *tokenizer, Error *error) {
    if (!tokenizer_open(tokenizer, config->tokenizer, error)) return false;
    if (config->eot != NULL) tokenizer->eot = tokenizer_special(tokenizer, config->eot);
    if (tokenizer->eot >= 0) return true;
    if (config->eot != NULL) {
        fail(error, CODE_USAGE, "--eot: got '%.100s', wanted a special token of the tokenizer", config->eot);
    } else {
        fail(error, CODE_USAGE, "--eot: %.300s has no token with a usual name, such as <|endoftext|>: wanted the text of one that ends a document",
             config->tokenizer);
    }
    return tokenizer_close(tokenizer), false;
}

// How the .json names the tokenizer: by its path from the token file's directory when it lies there or below, else by its absolute path, or,
// when that is too long for a token file, "bpe".
static void tokenizer_name_for(const Config *config, char name[4300]) {
    snprintf(name, 4300, "%s", config->tokenizer);
    if (strcmp(name, "byte") == 0) return;
    char folder[4300];
    snprintf(folder, sizeof folder, "%s", config->out);
    char *slash = strrchr(folder, '/');
    snprintf(slash != NULL ? slash + 1 : folder, 2, ".");
    char *path = realpath(config->tokenizer, NULL), *beside = realpath(folder, NULL);
    if (path != NULL) {
        const size_t length = beside != NULL ? strlen(beside) : 0;
        const bool below = length > 1 && strncmp(path, beside, length) == 0 && path[length] == '/';
        snprintf(name, 4300, "%s", below ? path + length + 1 : path);
    }
    free(path);
    free(beside);
    if (strlen(name) >= sizeof((TokenInfo *)0)->tokenizer || strcmp(name, "byte") == 0) strcpy(name, "bpe");
}

static bool tokenize(const Config *config, Error *error) {
    Job *job = base_new(1, sizeof *job);
    char name[4300];
    *job = (Job){.config = config};
    if (!open_tokenizer(config, &job->tokenizer, error)) return free(job), false;
    tokenizer_name_for(config, name);
    job->train.tokenizer = job->val.tokenizer = &job->tokenizer;
    job->train.tokenizer_name = job->val.tokenizer_name = name;
    job->train.shard_tokens = job->val.shard_tokens = config->shard_tokens;
    snprintf(job->train.name, sizeof job->train.name, "%s%s", config->out, config->val_fraction > 0 ? "_train" : "");
    snprintf(job->val.name, sizeof job->val.name, "%s_val", config->out);
    const bool good = job_run_(job, error);
    if (!good) {
        writer_abandon_(&job->train);
        if (config->val_fraction > 0) writer_abandon_(&job->val);
    }
    tokenizer_close(&job->tokenizer);
    token_ids_free(&job->ids);
    free(job->text);
    free(job);
    return good;
}

// Text when the tokenizer is known, by --tokenizer or beside the token file; else ids, a line each.
static bool show(const Config *config, Error *error) {
    TokenSet set;
    Tokenizer tokenizer = {0};
    char path[4300];
    if (!tokens_open(&set, config->show, "--show", error)) return false;
    const char *name = config->tokenizer_given ? config->tokenizer : tokenizer_resolve(set.info.tokenizer, set.files[0].path, path) ? path : NULL;
    if (name != NULL && !tokenizer_open(&tokenizer, name, error)) return tokens_close(&set), false;
    bool good = config->from <= set.tokens ||
                fail(error, CODE_USAGE, "--from: got %lld, wanted at most the file's %lld tokens", (long long)config->from, (long long)set.tokens);
    int64_t left = good ? min_i64(config->count, set.tokens - config->from) : 0;
    for (int64_t at = config->from; good && left > 0;) {
        int32_t ids[4096];
        const TokenFile *file = tokens_file_at(&set, at);
        const int64_t n = min_i64(min_i64(left, 4096), file->start + file->tokens - at);
        good = tokens_read(&set, at, n, ids, error);
        for (int64_t i = 0; good && i < n; i++) {
            int64_t bytes;
            const char *text = name != NULL ? tokenizer_decode(&tokenizer, ids[i], &bytes) : NULL;
            if (text != NULL) {
                fwrite(text, 1, (size_t)bytes, stdout);
            } else {
                printf("%d\n", ids[i]);
            }
        }
        at += n;
        left -= n;
    }
    tokens_close(&set);
    tokenizer_close(&tokenizer);
    return good;
}

// ----------------------------------------------------------------------------
// Flags

static bool parse_number(const char *flag, const char *text, int64_t low, int64_t high, int64_t *value, Error *error) {
    char *end = NULL;
    errno = 0;
    const long long number = text[0] >= '0' && text[0] <= '9' ? strtoll(text, &end, 10) : 0;
    if (end == NULL || *end != '\0' || errno != 0 || number < low || number > high) {
        return fail(error, CODE_USAGE, "%s: got '%.60s', wanted a whole number, %lld to %lld", flag, text, (long long)low, (long long)high);
    }
    *value = number;
    return true;
}

// Flags with a value.
static bool parse_value(Config *config, const char *flag, const char *value, Error *error) {
    if (strcmp(flag, "--out") == 0) {
        const size_t length = strlen(value);
        if (length == 0 || length > 4000) return fail(error, CODE_USAGE, "--out: got %zu characters, wanted 1 to 4000", length);
        config->out = value;
        return true;
    }
    if (strcmp(flag, "--show") == 0) return config->show = value, true;
    if (strcmp(flag, "--field") == 0) return config->field = value, true;
    if (strcmp(flag, "--tokenizer") == 0) return config->tokenizer = value, config->tokenizer_given = true;
    if (strcmp(flag, "--eot") == 0) return config->eot = value, true;
    if (strcmp(flag, "--shard-tokens") == 0) return parse_number(flag, value, 1, INT32_MAX, &config->shard_tokens, error);
    if (strcmp(flag, "--from") == 0) return parse_number(flag, value, 0, INT64_MAX, &config->from, error);
    if (strcmp(flag, "--count") == 0) return parse_number(flag, value, 0, INT64_MAX, &config->count, error);
    char *end = NULL;
    const bool plain = value[0] != '\0' && strspn(value, "0123456789.e-") == strlen(value);
    config->val_fraction = plain ? strtod(value, &end) : 0;
    if (!plain || *end != '\0' || !(config->val_fraction > 0 && config->val_fraction < 1)) {
        return fail(error, CODE_USAGE, "--val-fraction: got '%.60s', wanted a number between 0 and 1", value);
    }
    return true;
}

static bool parse(Config *config, int argc, char **argv, Error *error) {
    static const char *const with_value[] = {"--out",   "--show",         "--field",     "--shard-tokens", "--from",
                                             "--count", "--val-fraction", "--tokenizer", "--eot"};
    *config = (Config){.field = "text", .shard_tokens = INT32_MAX, .count = INT64_MAX, .inputs = argv, .tokenizer = "byte"};
    bool flags = true; // until --
    for (int i = 1; i < argc; i++) {
        char *word = argv[i];
        if (!flags || word[0] != '-' || word[1] == '\0') {
            argv[config->input_count++] = word;
            continue;
        }
        if (strcmp(word, "--") == 0) {
            flags = false;
            continue;
        }
        char name[32], *value = strchr(word, '=');
        snprintf(name, sizeof name, "%.*s", value != NULL ? (int)min_i64(value - word, 31) : 31, word);
        bool takes_value = false;
        for (size_t k = 0; k < sizeof with_value / sizeof with_value[0]; k++) takes_value = takes_value || strcmp(name, with_value[k]) == 0;
        if (takes_value) {
            if (value == NULL && i + 1 >= argc) return fail(error, CODE_USAGE, "%s: got nothing, wanted a value", name);
            if (!parse_value(config, name, value != NULL ? value + 1 : argv[++i], error)) return false;
        } else if (strcmp(word, "--lines") == 0) {
            config->split = SPLIT_LINES;
        } else if (strcmp(word, "--split-on-blank") == 0) {
            config->split = SPLIT_BLANK;
        } else if (strcmp(word, "--jsonl") == 0) {
            config->jsonl = true;
        } else if (strcmp(word, "--val-tail") == 0) {
            config->tail = true;
        } else {
            return fail(error, CODE_USAGE, "unknown flag '%.60s' (see --help)", word);
        }
    }
    if (config->show != NULL) {
        if (config->out != NULL || config->input_count > 0) return fail(error, CODE_USAGE, "--show: takes one token file and no other input");
        return true;
    }
    if (config->out == NULL) return fail(error, CODE_USAGE, "--out: not given, wanted the name of the token file to write (see --help)");
    if (config->input_count == 0) return fail(error, CODE_USAGE, "no input: wanted text files, or - for the standard input (see --help)");
    if (config->tail && config->val_fraction == 0) return fail(error, CODE_USAGE, "--val-tail: wanted together with --val-fraction");
    return true;
}

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0) {
            usage(stdout);
            return CODE_OK;
        }
    }
    Config config;
    Error error = {0};
    bool good = parse(&config, argc, argv, &error) && (config.show != NULL ? show(&config, &error) : tokenize(&config, &error));
    if ((fflush(stdout) != 0 || ferror(stdout)) && good) good = fail(&error, CODE_IO, "cannot write the standard output: %s", strerror(errno));
    if (!good) fprintf(stderr, "tokenize: %s\n", error.text);
    return good ? CODE_OK : error.code;
}
