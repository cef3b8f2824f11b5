// options.h: the command line. ONE table of flags drives parsing, --help, config files, the banner and run.json.
// A flag exists here only when its mechanism is built. What a combination of flags means is decided elsewhere.
#ifndef LLMC_OPTIONS_H
#define LLMC_OPTIONS_H

#include "llmc/base.h"   // Error, fail
#include "llmc/device.h" // NORM_*
#include <ctype.h>       // isspace
#include <stddef.h>      // offsetof
#include <strings.h>     // strcasecmp

// What the program was built with.
#ifdef USE_CUDA
#define OPTIONS_DEVICE "cuda"
#define OPTIONS_DEVICES "cpu|cuda"
#else
#define OPTIONS_DEVICE "cpu"
#define OPTIONS_DEVICES "cpu"
#endif

// X(kind, field, flag, default, minimum, maximum or choices, help)
//   INT    int64_t field   decimal integer in [minimum, maximum]
//   AUTO   int64_t field   the same, or 'auto': OPTIONS_AUTO
//   REAL   double field    finite decimal number in [minimum, maximum]
//   CHOICE int field       index into "a|b|c"
//   TEXT   const char *    anything (minimum, maximum: allowed length)
//   BARE   bool field      takes no value
// A default of "" leaves the field at 0 (NULL text): "decided by something else", named in the help.
// S(name) opens a section.
#define OPTIONS_TABLE(S, X)                                                                                                                        \
    S("run")                                                                                                                                       \
    X(BARE, help, "help", "", 0, 0, "print this list and exit")                                                                                    \
    X(BARE, version, "version", "", 0, 0, "print version and libraries and exit")                                                                  \
    X(TEXT, config, "config", "", 1, 4096, "read flags from FILE: a line each, 'name value' or 'name = value', # starts a comment")                \
    X(TEXT, out, "out", "", 1, 4096, "directory for log.jsonl, run.json and checkpoints (none: nothing is written)")                               \
    X(CHOICE, device, "device", OPTIONS_DEVICE, 0, OPTIONS_DEVICES, "where to compute: on GPUs every rank of a host takes one")                    \
    X(INT, seed, "seed", "1337", 0, 9007199254740992., "seed of initialisation, data order, dropout and sampling")                                 \
    X(INT, steps, "steps", "1000", 0, 1e12, "optimizer steps in total; 0 only validates and samples")                                              \
    X(TEXT, resume, "resume", "no", 1, 4096,                                                                                                       \
      "auto: newest good checkpoint in --out, if any; no: refuse to start over one; or a checkpoint directory")                                    \
    X(BARE, dry_run, "dry-run", "", 0, 0, "check everything, print parameters, memory, data and steps; allocate nothing, train nothing")           \
    X(INT, world, "world", "", 1, 1048576, "with --dry-run: the number of ranks to plan for (default: those that were started)")                   \
    S("model")                                                                                                                                     \
    X(TEXT, model, "model", "", 1, 4096,                                                                                                           \
      "a preset ('list' shows them) or a Hugging Face config.json to start from; the flags below override it (default: --resume, --init-from)")    \
    X(INT, layers, "layers", "", 1, 100000, "transformer blocks (L; 12 without --model)")                                                          \
    X(INT, channels, "channels", "", 1, 262144, "width of the residual stream (C; 768 without --model)")                                           \
    X(INT, heads, "heads", "", 1, 8192, "query heads (NH; channels/64 without --model)")                                                           \
    X(INT, kv_heads, "kv-heads", "", 1, 8192, "key/value heads (NKV; default: as --heads); divides --heads")                                       \
    X(INT, head_size, "head-size", "", 1, 128, "channels of a head (HS; default channels/heads)")                                                  \
    X(INT, ffn, "ffn", "", 1, 1048576, "hidden width of the MLP (FF; default 4*channels, for swiglu 8/3*channels rounded up to 64)")               \
    X(INT, vocab, "vocab", "", 2, 16777216, "vocabulary size (V; default: from the token file's .json, else 50257)")                               \
    X(CHOICE, norm, "norm", "", 0, "layernorm|rmsnorm", "normalisation before attention, MLP and head (default layernorm)")                        \
    X(REAL, norm_eps, "norm-eps", "", 1e-12, 1e-1, "added to the variance inside the norms (default 1e-5)")                                        \
    X(CHOICE, position, "position", "", 0, "learned|rope", "how positions enter (default learned)")                                                \
    X(REAL, rope_theta, "rope-theta", "", 1, 1e12, "base of the rotary frequencies (default 10000)")                                               \
    X(CHOICE, activation, "activation", "", 0, "gelu|swiglu", "MLP: gelu (tanh form) or swiglu (default gelu)")                                    \
    X(CHOICE, bias, "bias", "", 0, "off|on|qkv", "biases of linear layers and layernorms: all, none, or q, k, v only (default on)")                \
    X(CHOICE, tied, "tied", "", 0, "off|on", "the head shares the embedding's weights (default on)")                                               \
    X(CHOICE, qk_norm, "qk-norm", "", 0, "off|on", "rmsnorm on every head of q and k (default off)")                                               \
    X(REAL, dropout, "dropout", "0", 0, 0.95, "probability of dropping an element after the embedding, attention and MLP")                         \
    X(TEXT, init_from, "init-from", "", 1, 4096,                                                                                                   \
      "start from the weights (only) of this checkpoint or Hugging Face directory; without --model also from its shape")                           \
    S("data")                                                                                                                                      \
    X(TEXT, train, "train", "", 1, 4096,                                                                                                           \
      "token files to train on: a path or a quoted glob (.bin of llm.c, or .bin with Megatron's .idx beside it)")                                  \
    X(TEXT, val, "val", "", 1, 4096, "token files to validate on (optional)")                                                                      \
    X(CHOICE, shuffle, "shuffle", "on", 0, "off|on", "a new random order every epoch, or the order of the files")                                  \
    X(CHOICE, pack, "pack", "none", 0, "none|varlen|fit",                                                                                          \
      "none: windows of T tokens; varlen: the same, attention stays inside documents; fit: whole documents packed into rows of T")                 \
    X(INT, eot, "eot", "", 0, 2147483647, "id of the token that ends a document (default: from the token file's .json)")                           \
    X(TEXT, tokenizer, "tokenizer", "", 1, 4096,                                                                                                   \
      "tokenizer.json, or a directory with it or with vocab.json and merges.txt, or byte (default: as the token file's .json says)")               \
    S("batch")                                                                                                                                     \
    X(INT, seq, "seq", "256", 1, 1073741824, "tokens in a sequence (T)")                                                                           \
    X(INT, micro_batch, "micro-batch", "4", 1, 1048576, "sequences computed at once (B)")                                                          \
    X(INT, global_batch, "global-batch", "", 1, 1048576, "sequences in an optimizer step over all ranks (default: --micro-batch)")                 \
    S("optim")                                                                                                                                     \
    X(REAL, lr, "lr", "3e-4", 0, 1e3, "peak learning rate")                                                                                        \
    X(REAL, min_lr_frac, "min-lr-frac", "0.1", 0, 1, "learning rate at the end as a fraction of --lr")                                             \
    X(INT, warmup, "warmup", "0", 0, 1e12, "steps of linear warm-up")                                                                              \
    X(CHOICE, schedule, "schedule", "cosine", 0, "cosine|linear|wsd|constant", "learning rate after warm-up (wsd: constant, then linear decay)")   \
    X(REAL, wsd_frac, "wsd-frac", "0.2", 0, 1, "share of --steps that wsd spends decaying")                                                        \
    X(REAL, weight_decay, "weight-decay", "0.1", 0, 1e3, "decoupled weight decay of matrices (never of biases and norms)")                         \
    X(REAL, beta1, "beta1", "0.9", 0, 0.9999999, "AdamW: decay of the first moment")                                                               \
    X(REAL, beta2, "beta2", "0.95", 0, 0.9999999, "AdamW: decay of the second moment")                                                             \
    X(REAL, eps, "eps", "1e-8", 1e-30, 1, "AdamW: added to the root of the second moment")                                                         \
    X(REAL, clip, "clip", "1", 0, 1e9, "largest global norm of the gradient; larger ones are scaled down (0 = off)")                               \
    X(INT, bad_steps, "bad-steps", "10", 1, 1e9, "stop (exit 4) after so many steps in a row with a non-finite loss or norm")                      \
    S("precision")                                                                                                                                 \
    X(CHOICE, precision, "precision", "fp32", 0, "fp32|bf16", "storage of weights and activations (gradients and the optimizer's state are fp32)") \
    X(CHOICE, master, "master", "fp32", 0, "fp32|none",                                                                                            \
      "exact copy of bf16 weights; none: they are all there is, and updates are rounded at random")                                                \
    X(CHOICE, grad_reduce, "grad-reduce", "fp32", 0, "fp32|bf16", "format in which gradients travel between ranks (sums are fp32)")                \
    S("parallel")                                                                                                                                  \
    X(INT, tp, "tp", "1", 1, 1048576, "tensor parallel: ranks that share every layer (neighbours: keep them on one host)")                         \
    X(CHOICE, sp, "sp", "off", 0, "off|on", "sequence parallel: norms, residual and dropout on 1/tp of the tokens")                                \
    X(INT, pp, "pp", "1", 1, 65536, "pipeline stages: runs of layers; what --tp and --pp leave of the ranks is data parallel")                     \
    X(CHOICE, pp_schedule, "pp-schedule", "1f1b", 0, "gpipe|1f1b|interleaved|zb", "order of forwards and backwards in the pipeline")               \
    X(INT, virtual_stages, "virtual-stages", "1", 1, 1024, "runs of layers on each stage, for --pp-schedule interleaved")                          \
    X(INT, zero, "zero", "0", 0, 3, "sharded over data-parallel ranks: 1 optimizer state, 2 also gradients, 3 also parameters")                    \
    X(INT, shard_group, "shard-group", "", 1, 1048576, "shard inside groups of N data-parallel ranks, replicate across them (default: all)")       \
    X(REAL, bucket_mb, "bucket-mb", "25", 0.0001, 1e6,                                                                                             \
      "gradients that are reduced together, in MB, whole blocks (--zero 0 and 1; 2 and 3: each block)")                                            \
    X(CHOICE, overlap, "overlap", "on", 0, "off|on", "reduce gradients and gather parameters while computing")                                     \
    X(CHOICE, graph, "graph", "off", 0, "off|on",                                                                                                  \
      "on GPUs: launch a micro-batch's kernels as one CUDA graph (no --tp, --zero 2|3, --pack; not the backward in which ranks reduce)")           \
    X(INT, watchdog, "watchdog", "600", 0, 1e9,                                                                                                    \
      "end the job when a rank shows no sign of life for so many seconds; when a process is stopped or all ranks wait: for 20 at most (0 = off)")  \
    S("eval")                                                                                                                                      \
    X(INT, val_every, "val-every", "0", 0, 1e12, "validate every N steps and after the last (0 = only after the last)")                            \
    X(INT, val_batches, "val-batches", "20", 1, 1e9, "micro-batches of a validation (at most the whole --val set)")                                \
    X(INT, sample_every, "sample-every", "0", 0, 1e12,                                                                                             \
      "print generated text every N steps and after the last (0 = off, unless --prompt is given: then after the last)")                            \
    X(INT, sample_tokens, "sample-tokens", "128", 1, 1048576, "tokens to generate")                                                                \
    X(TEXT, prompt, "prompt", "", 0, 65536, "text that the generated text continues")                                                              \
    X(REAL, temperature, "temperature", "0.8", 0, 100, "sampling temperature (0 = always the likeliest token)")                                    \
    X(INT, top_k, "top-k", "0", 0, 16777216, "sample from the K likeliest tokens only (0 = off)")                                                  \
    X(REAL, top_p, "top-p", "1", 0.0001, 1, "sample from the likeliest tokens that hold this much probability")                                    \
    S("save")                                                                                                                                      \
    X(AUTO, save_every, "save-every", "1000", 0, 1e12,                                                                                             \
      "checkpoint every N steps and after the last, into --out (0 = off); auto: as often as --mtbf and the cost of a save make best")              \
    X(REAL, mtbf, "mtbf", "", 1e-6, 1e6, "hours from failure to failure of the whole job, for --save-every auto")                                  \
    X(CHOICE, async_save, "async-save", "on", 0, "off|on", "write checkpoints while training goes on (takes memory for a copy of what is saved)")  \
    X(INT, keep, "keep", "2", 1, 1e9, "checkpoints to keep in --out")                                                                              \
    X(TEXT, export_hf, "export-hf", "", 1, 4096,                                                                                                   \
      "write the model to DIR for Hugging Face's transformers, after the last step; --steps 0 with --resume or --init-from: only convert")         \
    X(REAL, export_shard_mb, "export-shard-mb", "5000", 0.0001, 1e9, "largest file of --export-hf, in MB; a tensor is never divided")              \
    S("debug")                                                                                                                                     \
    X(TEXT, dump_grads, "dump-grads", "", 1, 4096, "write step 1's full unclipped gradients to DIR/grads.safetensors")                             \
    X(TEXT, trace, "trace", "", 1, 64, "A:B: write what every rank did in steps A to B to OUT/trace.json (chrome://tracing, Perfetto)")            \
    X(CHOICE, log_samples, "log-samples", "off", 0, "off|on", "put the ids of a step's sequences into its log record")

#define OPTIONS_FIELD_INT(f) int64_t f;
#define OPTIONS_FIELD_AUTO(f) int64_t f;
#define OPTIONS_FIELD_REAL(f) double f;
#define OPTIONS_FIELD_CHOICE(f) int f;
#define OPTIONS_FIELD_TEXT(f) const char *f;
#define OPTIONS_FIELD_BARE(f) bool f;

// One index per flag: OPTION_layers, ... for given[].
enum {
#define OPTIONS_NOTHING(name)
#define OPTIONS_INDEX(kind, field, flag, preset, low, high, help) OPTION_##field,
    OPTIONS_TABLE(OPTIONS_NOTHING, OPTIONS_INDEX) OPTION_COUNT
#undef OPTIONS_INDEX
};

typedef struct {
#define OPTIONS_MEMBER(kind, field, flag, preset, low, high, help) OPTIONS_FIELD_##kind(field)
    OPTIONS_TABLE(OPTIONS_NOTHING, OPTIONS_MEMBER)
#undef OPTIONS_MEMBER
    bool given[OPTION_COUNT];  // set by the user, on the command line or in a config file
    char *owned[OPTION_COUNT]; // texts that came from a config file
} Options;

// Values of the CHOICE fields, in the order of the table's strings; NORM_* are those of device.h.
enum { POSITION_LEARNED, POSITION_ROPE };
enum { ACTIVATION_GELU, ACTIVATION_SWIGLU };
enum { BIAS_OFF, BIAS_ON, BIAS_QKV };
enum { PACK_NONE, PACK_VARLEN, PACK_FIT };
enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_WSD, SCHEDULE_CONSTANT };
enum { DEVICE_CPU, DEVICE_CUDA };
enum { PRECISION_FP32, PRECISION_BF16 };
enum { MASTER_FP32, MASTER_NONE };
enum { GRAD_REDUCE_FP32, GRAD_REDUCE_BF16 };

enum { OPTIONS_AUTO = -1 }; // an AUTO field that holds no number

typedef enum { OPTION_INT, OPTION_AUTO, OPTION_REAL, OPTION_CHOICE, OPTION_TEXT, OPTION_BARE } OptionKind;

typedef struct {
    OptionKind kind;
    const char *section, *flag, *preset;
    double low, high;
    const char *choices, *help;
    size_t offset; // of the field in Options
} OptionRow;

// `high` is a number for all kinds but CHOICE, where it is the text of the choices.
#define OPTIONS_HIGH_INT(x) (double)(x), NULL
#define OPTIONS_HIGH_AUTO(x) (double)(x), NULL
#define OPTIONS_HIGH_REAL(x) (double)(x), NULL
#define OPTIONS_HIGH_TEXT(x) (double)(x), NULL
#define OPTIONS_HIGH_BARE(x) (double)(x), NULL
#define OPTIONS_HIGH_CHOICE(x) 0, x

static inline const OptionRow *options_rows(void) {
    static const struct {
        const char *section; // NULL: a flag
        OptionRow row;
    } lines[] = {
#define OPTIONS_SECTION(name) {name, {0}},
#define OPTIONS_ROW(kind, field, flag, preset, low, high, help)                                                                                    \
    {NULL, {OPTION_##kind, NULL, flag, preset, low, OPTIONS_HIGH_##kind(high), help, offsetof(Options, field)}},
        OPTIONS_TABLE(OPTIONS_SECTION, OPTIONS_ROW)
#undef OPTIONS_SECTION
#undef OPTIONS_ROW
    };
    static OptionRow rows[OPTION_COUNT + 1];
    if (rows[0].flag == NULL) {
        const char *section = "";
        size_t count = 0;
        for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
            if (lines[i].section != NULL) {
                section = lines[i].section;
            } else {
                rows[count] = lines[i].row;
                rows[count++].section = section;
            }
        }
    }
    return rows;
}

static inline int options_find_(const char *name, size_t length) {
    const OptionRow *rows = options_rows();
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (strlen(rows[i].flag) == length && strncmp(rows[i].flag, name, length) == 0) return i;
    }
    return -1;
}

static inline int options_choice_(const char *choices, const char *value) {
    size_t length = strlen(value);
    int index = 0;
    for (const char *at = choices; *at != '\0'; index++) {
        size_t span = strcspn(at, "|");
        if (span == length && length > 0 && strncmp(at, value, span) == 0) return index;
        at += span + (at[span] == '|');
    }
    return -1;
}

// Name of choice `index`, into `name`.
static inline const char *options_choice_name(const OptionRow *row, int index, char name[32]) {
    const char *at = row->choices;
    while (index-- > 0) at += strcspn(at, "|") + 1;
    snprintf(name, 32, "%.*s", (int)strcspn(at, "|"), at);
    return name;
}

// Sets one field from text. `where` names the source in messages: "--" or "FILE:LINE: ".
static inline bool options_set_(Options *options, int index, const char *value, const char *where, Error *error) {
    const OptionRow *row = &options_rows()[index];
    void *field = (char *)options + row->offset;
    char *end = NULL;
    errno = 0;
    switch (row->kind) {
    case OPTION_AUTO:
    case OPTION_INT: {
        const char *wanted = row->kind == OPTION_AUTO ? "a whole number or auto" : "a whole number";
        if (row->kind == OPTION_AUTO && strcmp(value, "auto") == 0) {
            *(int64_t *)field = OPTIONS_AUTO;
            return true;
        }
        bool digits = value[0] == '-' ? (value[1] >= '0' && value[1] <= '9') : (value[0] >= '0' && value[0] <= '9');
        long long number = digits ? strtoll(value, &end, 10) : 0;
        if (!digits || *end != '\0') {
            return fail(error, CODE_USAGE, "%s%s: got '%s', wanted %s", where, row->flag, value, wanted);
        }
        if (errno == ERANGE || (double)number < row->low || (double)number > row->high) {
            return fail(error, CODE_USAGE, "%s%s: got %s, wanted %.0f to %.0f", where, row->flag, value, row->low, row->high);
        }
        *(int64_t *)field = number;
        return true;
    }
    case OPTION_REAL: {
        bool plain = value[0] != '\0' && strspn(value, "0123456789.eE+-") == strlen(value); // no hex, inf, nan, spaces
        double number = plain ? strtod(value, &end) : 0;
        if (!plain || end == value || *end != '\0' || !isfinite(number)) {
            return fail(error, CODE_USAGE, "%s%s: got '%s', wanted a number", where, row->flag, value);
        }
        if (number < row->low || number > row->high) {
            return fail(error, CODE_USAGE, "%s%s: got %s, wanted %g to %g", where, row->flag, value, row->low, row->high);
        }
        *(double *)field = number;
        return true;
    }
    case OPTION_CHOICE: {
        int choice = options_choice_(row->choices, value);
        if (choice < 0) return fail(error, CODE_USAGE, "%s%s: got '%s', wanted %s", where, row->flag, value, row->choices);
        *(int *)field = choice;
        return true;
    }
    case OPTION_TEXT: {
        size_t length = strlen(value);
        if ((double)length < row->low) return fail(error, CODE_USAGE, "%s%s: got nothing, wanted a value", where, row->flag);
        if ((double)length > row->high) {
            return fail(error, CODE_USAGE, "%s%s: got %zu characters, wanted at most %.0f", where, row->flag, length, row->high);
        }
        *(const char **)field = value;
        return true;
    }
    case OPTION_BARE: *(bool *)field = true; return true;
    }
    return false;
}

static inline void options_defaults(Options *options) {
    memset(options, 0, sizeof *options);
    const OptionRow *rows = options_rows();
    for (int i = 0; i < OPTION_COUNT; i++) {
        Error error = {0};
        if (rows[i].preset[0] != '\0' && !options_set_(options, i, rows[i].preset, "default of ", &error)) die_error(&error);
    }
}

static inline void options_free(Options *options) {
    for (int i = 0; i < OPTION_COUNT; i++) free(options->owned[i]);
    memset(options, 0, sizeof *options);
}

// Reads flags from the text of a config file; `name` is for messages. Config files do not nest.
static inline bool options_parse_config(Options *options, const char *text, size_t length, const char *name, Error *error) {
    size_t line_number = 0;
    for (size_t at = 0; at < length;) {
        const char *line = text + at, *newline = memchr(line, '\n', length - at);
        size_t span = newline ? (size_t)(newline - line) : length - at;
        at += span + 1;
        line_number++;
        char where[300], copy[8192];
        snprintf(where, sizeof where, "%.250s:%zu: ", name, line_number);
        if (memchr(line, '\0', span) != NULL) return fail(error, CODE_USAGE, "%sgot a NUL byte, wanted text", where);
        if (span >= sizeof copy) return fail(error, CODE_USAGE, "%sgot a line of %zu bytes, wanted at most %zu", where, span, sizeof copy - 1);
        memcpy(copy, line, span);
        copy[span] = '\0';
        char *start = copy, *end = copy + span;
        for (char *c = copy; *c != '\0'; c++) { // a comment starts the line or follows a blank: '#' may stand in a path
            if (*c == '#' && (c == copy || isspace((unsigned char)c[-1]))) {
                end = c;
                break;
            }
        }
        while (start < end && isspace((unsigned char)*start)) start++;
        while (end > start && isspace((unsigned char)end[-1])) end--;
        *end = '\0';
        if (start == end) continue;
        char *value = start + strcspn(start, " \t=");
        size_t name_length = (size_t)(value - start);
        while (isspace((unsigned char)*value)) value++;
        if (*value == '=') value++;
        while (isspace((unsigned char)*value)) value++;
        int index = options_find_(start, name_length);
        if (index < 0 || index == OPTION_config) {
            return fail(error, CODE_USAGE, "%sunknown flag '%.*s' (see --help; names stand without --)", where,
                        (int)min_i64((int64_t)name_length, 60), start);
        }
        bool bare = options_rows()[index].kind == OPTION_BARE;
        if (bare && *value != '\0') return fail(error, CODE_USAGE, "%s%s: takes no value, got '%s'", where, options_rows()[index].flag, value);
        char *owned = base_copy_text(value);
        if (!options_set_(options, index, owned, where, error)) {
            free(owned);
            return false;
        }
        free(options->owned[index]);
        options->owned[index] = owned;
        options->given[index] = true;
    }
    return true;
}

static inline bool options_read_config_(Options *options, const char *path, Error *error) {
    enum { LIMIT = 1 << 20 };
    FILE *file = base_open_regular(path);
    if (file == NULL) return fail(error, CODE_INPUT, "--config: cannot open '%s': %s", path, strerror(errno));
    char *text = base_new(LIMIT + 1, 1);
    size_t length = fread(text, 1, LIMIT + 1, file);
    bool good = !ferror(file) || fail(error, CODE_INPUT, "--config: cannot read '%s': %s", path, strerror(errno));
    fclose(file);
    if (good && length > LIMIT) good = fail(error, CODE_INPUT, "--config: '%s' is over %d bytes: not a config file", path, LIMIT);
    good = good && options_parse_config(options, text, length, path, error);
    free(text);
    return good;
}

// Parses argv[1..]. The last of repeated flags wins; --config takes effect where it stands.
static inline bool options_parse(Options *options, int argc, char **argv, Error *error) {
    options_defaults(options);
    for (int i = 1; i < argc; i++) {
        const char *word = argv[i];
        if (strncmp(word, "--", 2) != 0 || word[2] == '\0') {
            return fail(error, CODE_USAGE, "got '%s', wanted a flag starting with -- (see --help)", word);
        }
        size_t length = strcspn(word + 2, "=");
        const char *value = word[2 + length] == '=' ? word + 3 + length : NULL;
        int index = options_find_(word + 2, length);
        if (index < 0) return fail(error, CODE_USAGE, "unknown flag '%.*s' (see --help)", (int)min_i64((int64_t)length + 2, 80), word);
        const OptionRow *row = &options_rows()[index];
        if (row->kind == OPTION_BARE) {
            if (value != NULL) return fail(error, CODE_USAGE, "--%s: takes no value, got '%s'", row->flag, value);
            value = "";
        } else if (value == NULL) {
            if (i + 1 >= argc) return fail(error, CODE_USAGE, "--%s: got nothing, wanted a value", row->flag);
            value = argv[++i];
        }
        if (!options_set_(options, index, value, "--", error)) return false;
        options->given[index] = true;
        if (index == OPTION_config && !options_read_config_(options, options->config, error)) return false;
    }
    return true;
}

// The value of a field as text, for the banner and run.json; "" when unset.
static inline const char *options_text(const Options *options, int index, char buffer[64]) {
    const OptionRow *row = &options_rows()[index];
    const void *field = (const char *)options + row->offset;
    buffer[0] = '\0';
    switch (row->kind) {
    case OPTION_AUTO:
    case OPTION_INT:
        if (row->preset[0] == '\0' && !options->given[index]) return "";
        if (row->kind == OPTION_AUTO && *(const int64_t *)field == OPTIONS_AUTO) return "auto";
        snprintf(buffer, 64, "%lld", (long long)*(const int64_t *)field);
        return buffer;
    case OPTION_REAL:
        if (row->preset[0] == '\0' && !options->given[index]) return "";
        snprintf(buffer, 64, "%.9g", *(const double *)field);
        return buffer;
    case OPTION_CHOICE:
        if (row->preset[0] == '\0' && !options->given[index]) return "";
        return options_choice_name(row, *(const int *)field, buffer);
    case OPTION_TEXT: return *(const char *const *)field ? *(const char *const *)field : "";
    case OPTION_BARE: return *(const bool *)field ? "yes" : "";
    }
    return "";
}

static inline void options_help(FILE *file) {
    const OptionRow *rows = options_rows();
    fprintf(file, "train_gpt: trains GPT- and Llama-class models. Flags are --name value or --name=value; the last of repeated ones wins.\n");
    for (int i = 0; i < OPTION_COUNT; i++) {
        const OptionRow *row = &rows[i];
        if (i == 0 || strcmp(rows[i - 1].section, row->section) != 0) fprintf(file, "\n%s\n", row->section);
        char left[96];
        const char *kind = row->kind == OPTION_INT    ? "N"
                           : row->kind == OPTION_AUTO ? "N|auto"
                           : row->kind == OPTION_REAL ? "X"
                           : row->kind == OPTION_TEXT ? "TEXT"
                                                      : "";
        snprintf(left, sizeof left, "--%s %s", row->flag, row->choices ? row->choices : kind);
        fprintf(file, "  %-34s %s", left, row->help);
        if (row->preset[0] != '\0') fprintf(file, " [%s]", row->preset);
        fputc('\n', file);
    }
    fprintf(
        file,
        "\nexit codes: 0 done, 2 usage, 3 input, 4 numeric, 5 cannot write, 6 communication, 7 asked to stop (saved, where there is an --out)\n");
}

#endif
