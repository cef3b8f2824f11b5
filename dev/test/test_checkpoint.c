// test_checkpoint.c: saving and reading back, foreign models, sharded checkpoints, damage at every byte, failing system
// calls (through shim_io.so, preloaded into children), kills at random moments of a loop of saves.
#include "llmc/checkpoint.h"      // what is tested
#include "llmc/checkpoint_read.h" // and
#include "llmc/checkpoint_save.h" // and
#include "llmc/rng.h"             // rng_mix
#include <limits.h>               // PATH_MAX
#include <signal.h>               // kill, SIGKILL
#include <sys/wait.h>             // waitpid

#define CHECKPOINT_DATA "rank_00000.safetensors"

static Comm *comm_; // of one rank
static int passed_, failed_;
LLMC_PRINTF(2, 3) static void check(bool ok, const char *format, ...) {
    ok ? passed_++ : failed_++;
    printf("%s ", ok ? "ok  " : "FAIL");
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
    fflush(stdout); // children must not print it again
}

static char directory_[64];
static const char *temporary(const char *name) {
    static char path[8][PATH_MAX];
    static int next;
    next = (next + 1) % 8;
    snprintf(path[next], PATH_MAX, "%s/%s", directory_, name);
    return path[next];
}

static void shell(const char *format, const char *a, const char *b) {
    char command[3 * PATH_MAX];
    snprintf(command, sizeof command, format, a, b);
    if (system(command) != 0) die(CODE_IO, "failed: %s", command);
}

static void put_file(const char *path, const void *data, size_t bytes) {
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0) die(CODE_IO, "cannot write %s", path);
}

static CheckpointSlice whole(const char *name, Dtype dtype, int rank, int64_t rows, int64_t columns, void *data) {
    return checkpoint_whole("", name, dtype, rank, (const int64_t[2]){rows, columns}, data);
}

// ----------------------------------------------------------------------------
// A run in miniature: a model, its tensors filled from the step, a state.

typedef struct {
    Model model;
    CheckpointSlice *tensors;
    int count;
    CheckpointState state;
    CheckpointDataFile files[2];
} Run;

static void fill_tensor(const CheckpointSlice *t, int64_t step) {
    unsigned char *data = t->data;
    uint64_t key = rng_mix((uint64_t)step);
    for (const char *c = t->name; *c != '\0'; c++) key = rng_mix(key ^ (unsigned char)*c);
    const size_t bytes = (size_t)(t->shape[0] * t->shape[1]) * dtype_bytes(t->dtype);
    for (size_t i = 0; i < bytes; i++) data[i] = (unsigned char)rng_mix(key + i);
}

static ModelConfig small_config(void) {
    return (ModelConfig){.layers = 1,
                         .channels = 4,
                         .heads = 2,
                         .kv_heads = 2,
                         .head_size = 2,
                         .ffn = 6,
                         .vocab = 5,
                         .max_seq = 3,
                         .norm = NORM_LAYERNORM,
                         .position = POSITION_LEARNED,
                         .activation = ACTIVATION_GELU,
                         .bias = BIAS_ON,
                         .tied = true,
                         .norm_eps = 1e-5,
                         .rope_theta = 1e4};
}

static void add_tensor(Run *run, const char *prefix, const Tensor *t, Dtype dtype) {
    CheckpointSlice *out = &run->tensors[run->count++];
    *out = checkpoint_whole(prefix, t->name, dtype, t->rank, t->shape, base_new((size_t)t->elements, dtype_bytes(dtype)));
}

// As the trainer would hand it over: parameters, moments, and master weights under bf16.
static Run make_run(const ModelConfig *config, Dtype dtype, int64_t step) {
    Run run = {.model = model_create(config)};
    run.tensors = base_new((size_t)run.model.count * 4, sizeof *run.tensors);
    for (int i = 0; i < run.model.count; i++) {
        add_tensor(&run, "", &run.model.tensors[i], dtype);
        add_tensor(&run, "adam_m/", &run.model.tensors[i], DTYPE_F32);
        add_tensor(&run, "adam_v/", &run.model.tensors[i], DTYPE_F32);
        if (dtype != DTYPE_F32) add_tensor(&run, "master/", &run.model.tensors[i], DTYPE_F32);
    }
    Options options;
    Error error = {0};
    char *arguments[] = {"train_gpt", "--lr", "0.001", "--seq", "64", "--prompt", "caf\xe9"};
    if (!options_parse(&options, 7, arguments, &error)) die_error(&error);
    run.state = (CheckpointState){.step = step,
                                  .tokens = step * 4096,
                                  .optimizer_steps = step - 1,
                                  .seed = 9007199254740992,
                                  .epoch = 2,
                                  .position = 5000000001,
                                  .row = 7,
                                  .model = checkpoint_model_json(config),
                                  .flags = checkpoint_flags_json(&options)};
    options_free(&options);
    return run;
}

// Pointers into the run itself, once it lies where it stays.
static void set_step(Run *run, int64_t step) {
    run->files[0] = (CheckpointDataFile){"data/a.bin", 3000000000};
    run->files[1] = (CheckpointDataFile){"data/caf\xe9.bin", 17};
    run->state.data_files = run->files;
    run->state.data_file_count = 2;
    run->state.step = step;
    run->state.tokens = step * 4096;
    run->state.optimizer_steps = step - 1;
    for (int i = 0; i < run->count; i++) fill_tensor(&run->tensors[i], step);
}

static void free_run(Run *run) {
    for (int i = 0; i < run->count; i++) free(run->tensors[i].data);
    free(run->tensors);
    model_free(&run->model);
    json_decref(run->state.model);
    json_decref(run->state.flags);
}

static int64_t tensor_bytes(const CheckpointSlice *t) { return t->shape[0] * t->shape[1] * (int64_t)dtype_bytes(t->dtype); }

// Bytes of the open checkpoint that differ from what step `step` must hold; -1 when it cannot be read.
static int64_t wrong_bytes(const Checkpoint *checkpoint, const Run *run, int64_t step, Error *error) {
    int64_t wrong = 0;
    for (int i = 0; i < run->count; i++) memset(run->tensors[i].data, 0x55, (size_t)tensor_bytes(&run->tensors[i]));
    if (!checkpoint_read(checkpoint, run->tensors, run->count, false, error)) return -1;
    for (int i = 0; i < run->count; i++) {
        CheckpointSlice wanted = run->tensors[i];
        wanted.data = base_new((size_t)tensor_bytes(&wanted), 1);
        fill_tensor(&wanted, step);
        for (int64_t j = 0; j < tensor_bytes(&wanted); j++) wrong += ((char *)wanted.data)[j] != ((char *)run->tensors[i].data)[j];
        free(wanted.data);
    }
    return wrong;
}

// Finds the newest good checkpoint; its step when its bits are right, 0 when there is none, -1 when something is wrong.
static int64_t found_step(const char *out, const Run *run, char *notices, size_t notices_bytes, Error *error) {
    Checkpoint checkpoint;
    bool found;
    FILE *file = notices != NULL ? fmemopen(notices, notices_bytes, "w") : NULL;
    bool good = checkpoint_find(comm_, out, &checkpoint, &found, file, error);
    if (file != NULL) fclose(file);
    if (!good) return -1;
    if (!found) return 0;
    int64_t step = checkpoint.manifest.state.step;
    if (wrong_bytes(&checkpoint, run, step, error) != 0) step = -1;
    checkpoint_close(&checkpoint);
    return step;
}

// ----------------------------------------------------------------------------

static void test_round_trip(void) {
    for (int bf16 = 0; bf16 < 2; bf16++) {
        ModelConfig config = small_config();
        config.channels = 96; // some MB: more than one chunk of the writer
        config.vocab = 9000;
        Run run = make_run(&config, bf16 ? DTYPE_BF16 : DTYPE_F32, 7);
        set_step(&run, 7);
        Error error = {0};
        char out[PATH_MAX];
        strcpy(out, temporary(bf16 ? "bf16" : "fp32"));
        int lock = -1;
        bool saved = checkpoint_lock(out, &lock, &error) && checkpoint_save(comm_, out, &run.state, run.tensors, run.count, 2, &error);
        check(saved, "%s: save %d tensors %s", bf16 ? "bf16" : "fp32", run.count, error.text);
        Checkpoint checkpoint;
        bool found = false;
        bool good = checkpoint_find(comm_, out, &checkpoint, &found, NULL, &error);
        if (!good || !found) {
            check(false, "find: %s", error.text);
            return;
        }
        const CheckpointState *s = &checkpoint.manifest.state, *w = &run.state;
        check(s->step == 7 && s->tokens == w->tokens && s->optimizer_steps == 6 && s->seed == w->seed && s->epoch == 2 &&
                  s->position == w->position && s->row == w->row && s->data_file_count == 2 && strcmp(s->data_files[0].path, "data/a.bin") == 0 &&
                  s->data_files[0].tokens == 3000000000 && strcmp(s->data_files[1].path, "data/caf?.bin") == 0,
              "state comes back (a byte that is not UTF-8 in a path: '%s')", s->data_files[1].path);
        check(json_equal(s->model, w->model) && json_equal(s->flags, w->flags), "model and flags come back");
        Error other = {0};
        ModelConfig foreign = config;
        foreign.norm_eps = nextafter(config.norm_eps, 1);
        check(checkpoint_model_check("C", s->model, &config, &error) && !checkpoint_model_check("C", s->model, &foreign, &other),
              "doubles survive to the last bit");
        const int64_t wrong = wrong_bytes(&checkpoint, &run, 7, &error);
        check(wrong == 0, "tensors come back: %lld bytes wrong (bound 0) %s", (long long)wrong, error.text);
        checkpoint_close(&checkpoint);
        close(lock);
        free_run(&run);
    }
}

static void test_refused(void) {
    const ModelConfig config = small_config();
    Run run = make_run(&config, DTYPE_F32, 3);
    set_step(&run, 3);
    Error error = {0};
    char out[PATH_MAX];
    strcpy(out, temporary("refused"));
    Checkpoint checkpoint;
    if (!directory_create(out, &error) || !checkpoint_save(comm_, out, &run.state, run.tensors, run.count, 0, &error) ||
        !checkpoint_open(comm_, temporary("refused/step_00000003"), &checkpoint, &error)) {
        die_error(&error);
    }
    const json_t *model = checkpoint.manifest.state.model;
    int wrong = 0, count = 0;
#define OTHER(field, value, message)                                                                                                               \
    do {                                                                                                                                           \
        ModelConfig other = config;                                                                                                                \
        Error told = {0};                                                                                                                          \
        other.field = value;                                                                                                                       \
        count++;                                                                                                                                   \
        if (checkpoint_model_check("C", model, &other, &told) || told.code != CODE_USAGE || strstr(told.text, message) == NULL) {                  \
            printf("     %s: %s\n", #field, told.text);                                                                                            \
            wrong++;                                                                                                                               \
        }                                                                                                                                          \
    } while (0)
    OTHER(layers, 2, "model.layers: got 1 in the checkpoint, wanted 2 by the flags (--layers");
    OTHER(channels, 8, "model.channels: got 4 in the checkpoint, wanted 8");
    OTHER(heads, 1, "model.heads: got 2");
    OTHER(kv_heads, 1, "model.kv_heads: got 2");
    OTHER(head_size, 4, "model.head_size: got 2");
    OTHER(ffn, 7, "model.ffn: got 6");
    OTHER(vocab, 6, "model.vocab: got 5");
    OTHER(max_seq, 4, "model.max_seq: got 3 in the checkpoint, wanted 4 by the flags (--seq");
    OTHER(norm, NORM_RMSNORM, "model.norm: got \"layernorm\" in the checkpoint, wanted \"rmsnorm\"");
    OTHER(position, POSITION_ROPE, "model.position: got \"learned\"");
    OTHER(activation, ACTIVATION_SWIGLU, "model.activation: got \"gelu\"");
    OTHER(bias, BIAS_QKV, "model.bias: got \"on\" in the checkpoint, wanted \"qkv\"");
    OTHER(tied, false, "model.tied: got true");
    OTHER(qk_norm, true, "model.qk_norm: got false");
    OTHER(norm_eps, 1e-6, "model.norm_eps: got 1");
#undef OTHER
    check(wrong == 0, "%d fields of another model are refused with both values: %d were not", count, wrong);
    ModelConfig same = config;
    same.dropout = 0.5;
    same.rope_theta = 5e5; // has no meaning with learned positions
    check(checkpoint_model_check("C", model, &same, &error), "another dropout is not another model %s", error.text);

    Options options;
    char *arguments[] = {"train_gpt", "--lr", "0.002", "--seq", "64"};
    if (!options_parse(&options, 5, arguments, &error)) die_error(&error);
    const int position_flags[] = {OPTION_seq, OPTION_shuffle, OPTION_pack, OPTION_eot}, lr_flag[] = {OPTION_lr};
    Error lr = {0};
    bool same_flags = checkpoint_flags_check("C", checkpoint.manifest.state.flags, &options, position_flags, 4, &error);
    bool other_lr = checkpoint_flags_check("C", checkpoint.manifest.state.flags, &options, lr_flag, 1, &lr);
    check(same_flags && !other_lr && strcmp(lr.text, "--lr: got '0.002', the checkpoint C was made with '0.001'") == 0, "flags: %s", lr.text);
    options_free(&options);
    const CheckpointDataFile moved[] = {{"elsewhere/a.bin", 3000000000}, {"b.bin", 17}}, grown[] = {{"a.bin", 3000000000}, {"b.bin", 18}};
    Error fewer = {0}, longer = {0};
    check(checkpoint_data_check("C", &checkpoint.manifest.state, moved, 2, &error) &&
              !checkpoint_data_check("C", &checkpoint.manifest.state, moved, 1, &fewer) &&
              !checkpoint_data_check("C", &checkpoint.manifest.state, grown, 2, &longer) && strstr(longer.text, "b.bin: got 18 tokens") != NULL,
          "data: files may move, not change: %s", longer.text);

    Error missing = {0}, shape = {0}, dtype = {0};
    float data[64] = {0};
    uint16_t narrow[64] = {0};
    const CheckpointSlice absent = whole("h.1.norm1.weight", DTYPE_F32, 1, 4, 1, data), turned = whole("wpe.weight", DTYPE_F32, 2, 4, 3, data);
    const CheckpointSlice flat = whole("wpe.weight", DTYPE_F32, 1, 12, 1, data), half = whole("wpe.weight", DTYPE_BF16, 2, 3, 4, narrow);
    Error rank = {0};
    check(!checkpoint_read(&checkpoint, &absent, 1, true, &missing) && strstr(missing.text, "'h.1.norm1.weight' is missing") &&
              !checkpoint_read(&checkpoint, &turned, 1, true, &shape) && strstr(shape.text, "shape: got rank 2 [3, 4], wanted rank 2 [4, 3]") &&
              !checkpoint_read(&checkpoint, &flat, 1, true, &rank) && !checkpoint_read(&checkpoint, &half, 1, false, &dtype) &&
              strstr(dtype.text, "dtype: got F32, wanted BF16"),
          "a missing tensor, another shape, rank or dtype: refused by name");
    // Weights only, in the other precision.
    CheckpointSlice wide = whole("wpe.weight", DTYPE_F32, 2, 3, 4, data);
    bool read = checkpoint_read(&checkpoint, &wide, 1, true, &error) && checkpoint_read(&checkpoint, &half, 1, true, &error);
    int differ = 0;
    for (int i = 0; i < 12; i++) differ += bf16_from_f32(data[i]) != narrow[i];
    check(read && differ == 0, "some tensors only, F32 read as BF16: %d differ from rounding (bound 0) %s", differ, error.text);
    checkpoint_close(&checkpoint);

    Checkpoint none;
    Error parent = {0}, nothing = {0};
    check(!checkpoint_open(comm_, out, &none, &parent) && strstr(parent.text, "wanted a checkpoint directory, OUT/step_N") &&
              parent.code == CODE_INPUT && !checkpoint_open(comm_, temporary("absent"), &none, &nothing),
          "not a checkpoint: %s", parent.text);
    free_run(&run);
}

// ----------------------------------------------------------------------------
// Sharded checkpoints, as many ranks would write them.

// Writes a checkpoint of one tensor (rows, columns) of F32 0, 1, 2, ... in the given slices, a file for each.
static void put_sharded(const char *directory, int rank, int64_t rows, int64_t columns, Dtype dtype, const ManifestSlice *slices, int count,
                        const Run *run) {
    Error error = {0};
    ManifestFile *files = base_new((size_t)count, sizeof *files);
    ManifestSlice *placed = base_new((size_t)count, sizeof *placed);
    char(*names)[40] = base_new((size_t)count, 40);
    if (access(directory, F_OK) == 0 && !directory_remove(directory, &error)) die_error(&error);
    if (!directory_create(directory, &error)) die_error(&error);
    for (int i = 0; i < count; i++) {
        const ManifestSlice *s = &slices[i];
        const int64_t width = s->end[1] - s->begin[1];
        float *data = base_new((size_t)(s->to - s->from), 4);
        for (int64_t e = s->from; e < s->to; e++) {
            const float value = (float)((s->begin[0] + e / width) * columns + s->begin[1] + e % width);
            if (dtype == DTYPE_BF16)
                ((uint16_t *)data)[e - s->from] = bf16_from_f32(value);
            else
                data[e - s->from] = value;
        }
        snprintf(names[i], 40, "rank_%05d.safetensors", i);
        files[i].name = names[i];
        placed[i] = *s;
        placed[i].file = i;
        const SafetensorsEntry entry = {"w", dtype_names[dtype], 1, {s->to - s->from}, data};
        char *path = path_join(directory, names[i]);
        if (!safetensors_write_file(path, &entry, 1, NULL, &files[i].bytes, files[i].xxh3, &error)) die_error(&error);
        free(path);
        free(data);
    }
    ManifestTensor tensor = {"w", safetensors_type(dtype_names[dtype]), rank, {rows, columns}, placed, count};
    const Manifest manifest = {.state = run->state, .tensors = &tensor, .tensor_count = 1, .files = files, .file_count = count};
    char *text = manifest_text(&manifest), *path = path_join(directory, CHECKPOINT_MANIFEST);
    put_file(path, text, strlen(text));
    free(path);
    free(text);
    free(files);
    free(placed);
    free(names);
}

static int64_t random_below(uint64_t *state, int64_t limit) { return (int64_t)((*state = rng_mix(*state)) % (uint64_t)limit); }

// Cuts a box into slices at random: by rows, by columns, or into ranges of its elements.
static void cut_box(uint64_t *random, int64_t r0, int64_t r1, int64_t c0, int64_t c1, int depth, ManifestSlice *slices, int *count) {
    const int64_t elements = (r1 - r0) * (c1 - c0), choice = random_below(random, 3);
    if (depth > 0 && choice == 0 && r1 - r0 > 1) {
        const int64_t middle = r0 + 1 + random_below(random, r1 - r0 - 1);
        cut_box(random, r0, middle, c0, c1, depth - 1, slices, count);
        cut_box(random, middle, r1, c0, c1, depth - 1, slices, count);
    } else if (depth > 0 && choice == 1 && c1 - c0 > 1) {
        const int64_t middle = c0 + 1 + random_below(random, c1 - c0 - 1);
        cut_box(random, r0, r1, c0, middle, depth - 1, slices, count);
        cut_box(random, r0, r1, middle, c1, depth - 1, slices, count);
    } else {
        for (int64_t from = 0; from < elements;) {
            const int64_t to = min_i64(elements, from + 1 + random_below(random, elements));
            slices[(*count)++] = (ManifestSlice){.begin = {r0, c0}, .end = {r1, c1}, .from = from, .to = to};
            from = to;
        }
    }
}

// Reads boxes and ranges drawn at random, several in one call, from the tensor "w" (rows, columns) of 0, 1, 2, ...; the elements that are
// wrong, those around a slice included; -1 when it could not be read.
static int64_t read_random(const Checkpoint *checkpoint, uint64_t *random, int rank, int64_t rows, int64_t columns, Error *error) {
    enum { WANTED = 4 };
    CheckpointSlice wanted[WANTED];
    for (int i = 0; i < WANTED; i++) {
        CheckpointSlice *w = &wanted[i];
        *w = whole("w", random_below(random, 2) ? DTYPE_F32 : DTYPE_BF16, rank, rows, columns, NULL);
        w->begin[0] = random_below(random, rows), w->end[0] = w->begin[0] + 1 + random_below(random, rows - w->begin[0]);
        w->begin[1] = random_below(random, columns), w->end[1] = w->begin[1] + 1 + random_below(random, columns - w->begin[1]);
        if (random_below(random, 3) == 0) w->begin[1] = 0, w->end[1] = columns;
        const int64_t elements = (w->end[0] - w->begin[0]) * (w->end[1] - w->begin[1]);
        w->from = random_below(random, elements + 1), w->to = w->from + random_below(random, elements - w->from + 1);
        if (random_below(random, 3) == 0) w->from = 0, w->to = elements;
        char *data = base_new((size_t)(w->to - w->from) + 2, 4);
        memset(data, 0x55, (size_t)(w->to - w->from + 2) * 4);
        w->data = data + dtype_bytes(w->dtype);
    }
    int64_t wrong = checkpoint_read(checkpoint, wanted, WANTED, true, error) ? 0 : -1;
    for (int i = 0; i < WANTED; i++) {
        const CheckpointSlice *w = &wanted[i];
        const int64_t width = w->end[1] - w->begin[1], count = w->to - w->from;
        for (int64_t e = -1; wrong >= 0 && e <= count; e++) {
            const int64_t at = w->from + e;
            const float value = (float)((w->begin[0] + at / width) * columns + w->begin[1] + at % width);
            const bool outside = e < 0 || e == count;
            if (w->dtype == DTYPE_F32) {
                uint32_t bits, want = 0x55555555;
                memcpy(&bits, (const float *)w->data + e, 4);
                if (!outside) memcpy(&want, &value, 4);
                wrong += bits != want;
            } else {
                wrong += ((const uint16_t *)w->data)[e] != (outside ? 0x5555 : bf16_from_f32(value));
            }
        }
        free((char *)w->data - dtype_bytes(w->dtype));
    }
    return wrong;
}

static void test_sharded(void) {
    const ModelConfig config = small_config();
    Run run = make_run(&config, DTYPE_F32, 3);
    set_step(&run, 3);
    char directory[PATH_MAX];
    strcpy(directory, temporary("sharded"));
    uint64_t random = 20240601;
    int64_t wrong = 0, refused = 0, uncaught = 0, slices_seen = 0, parts_wrong = 0, silent = 0;
    for (int round = 0; round < 60; round++) {
        const int rank = 1 + (round % 3 != 0);
        const int64_t rows = 1 + random_below(&random, 12), columns = rank == 2 ? 1 + random_below(&random, 12) : 1;
        ManifestSlice slices[600];
        int count = 0;
        cut_box(&random, 0, rows, 0, columns, 4, slices, &count);
        const Dtype dtype = round % 4 == 1 ? DTYPE_BF16 : DTYPE_F32;
        put_sharded(directory, rank, rows, columns, dtype, slices, count, &run);
        slices_seen += count;
        Error error = {0};
        Checkpoint checkpoint;
        float data[144];
        const CheckpointSlice wanted = whole("w", DTYPE_F32, rank, rows, columns, data);
        if (!checkpoint_open(comm_, directory, &checkpoint, &error) || !checkpoint_read(&checkpoint, &wanted, 1, true, &error)) {
            printf("     round %d: %s\n", round, error.text);
            refused++;
            continue;
        }
        for (int64_t i = 0; i < rows * columns; i++) wrong += !(data[i] == (float)i);
        for (int i = 0; i < 10; i++) {
            const int64_t part_wrong = read_random(&checkpoint, &random, rank, rows, columns, &error);
            if (part_wrong < 0) printf("     round %d: %s\n", round, error.text);
            parts_wrong += part_wrong != 0;
        }
        Error lacking = {0};
        checkpoint.manifest.tensors[0].slice_count--; // as no manifest is that was parsed
        silent += checkpoint_read(&checkpoint, &wanted, 1, true, &lacking) || strstr(lacking.text, "tensor 'w': its files hold") == NULL;
        checkpoint_close(&checkpoint);
        // Without one of its slices, with one of them moved, or with one twice, it must be refused.
        ManifestSlice spoilt[601];
        for (int fault = 0; fault < 3; fault++) {
            int spoilt_count = count;
            memcpy(spoilt, slices, sizeof slices);
            ManifestSlice *victim = &spoilt[random_below(&random, count)];
            if (fault == 0) *victim = spoilt[--spoilt_count];
            if (fault == 1) {
                if (victim->from == 0) continue;
                victim->from--, victim->to--;
            }
            if (fault == 2) spoilt[spoilt_count++] = *victim;
            if (spoilt_count == 0) continue;
            put_sharded(directory, rank, rows, columns, dtype, spoilt, spoilt_count, &run);
            Error told = {0};
            if (checkpoint_open(comm_, directory, &checkpoint, &told)) {
                checkpoint_close(&checkpoint);
                uncaught++;
            } else if (strstr(told.text, "slices, wanted 1") == NULL) {
                printf("     %s\n", told.text);
                uncaught++;
            }
        }
    }
    check(refused == 0 && wrong == 0, "60 random cuts into %lld slices by row, column and range: %lld refused, %lld elements wrong (bound 0)",
          (long long)slices_seen, (long long)refused, (long long)wrong);
    check(parts_wrong == 0, "2400 random boxes and ranges of them, F32 and BF16: %lld calls of 4 were wrong (bound 0)", (long long)parts_wrong);
    check(silent == 0, "elements that no slice holds: %lld not told", (long long)silent);
    check(uncaught == 0, "holes and overlaps of slices: %lld not refused by element", (long long)uncaught);

    // Pieces of every size: more than a chunk of the reader, rows that go straight to their place, holes that are read over or not.
    static const struct {
        int64_t rows, columns, cut; // stored as columns [0, cut) and [cut, columns)
        int64_t begin[2], end[2];   // wanted
        Dtype dtype;
        const char *what;
    } cases[] = {
        {6001, 1003, 500, {0, 0}, {6001, 1003}, DTYPE_F32, "the whole of two halves of the columns"},
        {6001, 1003, 500, {0, 0}, {6001, 500}, DTYPE_BF16, "one half, converted: more than a chunk"},
        {6001, 1003, 500, {0, 0}, {6001, 500}, DTYPE_F32, "one half: more than a chunk"},
        {6001, 1003, 500, {7, 400}, {5990, 700}, DTYPE_F32, "columns of both, small holes"},
        {600, 9001, 4500, {7, 4400}, {590, 4700}, DTYPE_BF16, "columns of both, large holes"},
        {40, 70001, 30000, {1, 10000}, {39, 60000}, DTYPE_F32, "long pieces of rows"},
        {40, 70001, 30000, {1, 10000}, {39, 60000}, DTYPE_BF16, "long pieces of rows, converted"},
        {3, 5000001, 5000000, {0, 1}, {3, 5000001}, DTYPE_BF16, "pieces of rows longer than a chunk, converted"},
    };
    for (size_t k = 0; k < sizeof cases / sizeof cases[0]; k++) {
        const int64_t rows = cases[k].rows, columns = cases[k].columns, cut = cases[k].cut;
        const ManifestSlice halves[] = {{.begin = {0, 0}, .end = {rows, cut}, .to = rows * cut},
                                        {.begin = {0, cut}, .end = {rows, columns}, .to = rows * (columns - cut)}};
        if (k == 0 || cut != cases[k - 1].cut || rows != cases[k - 1].rows) put_sharded(directory, 2, rows, columns, DTYPE_F32, halves, 2, &run);
        const int64_t width = cases[k].end[1] - cases[k].begin[1], count = (cases[k].end[0] - cases[k].begin[0]) * width;
        float *data = base_new((size_t)count, 4);
        CheckpointSlice wanted = whole("w", cases[k].dtype, 2, rows, columns, data);
        for (int axis = 0; axis < 2; axis++) wanted.begin[axis] = cases[k].begin[axis], wanted.end[axis] = cases[k].end[axis];
        wanted.to = count;
        Checkpoint checkpoint;
        Error error = {0};
        const bool opened = checkpoint_open(comm_, directory, &checkpoint, &error);
        const bool read = opened && checkpoint_read(&checkpoint, &wanted, 1, true, &error);
        wrong = 0;
        for (int64_t i = 0; i < count; i++) {
            const float value = (float)((wanted.begin[0] + i / width) * columns + wanted.begin[1] + i % width);
            wrong += !(wanted.dtype == DTYPE_F32 ? data[i] == value : ((uint16_t *)data)[i] == bf16_from_f32(value));
        }
        check(read && wrong == 0, "%s, %lld elements: %lld wrong (bound 0) %s", cases[k].what, (long long)count, (long long)wrong, error.text);
        if (opened) checkpoint_close(&checkpoint);
        free(data);
    }
    free_run(&run);
}

// ----------------------------------------------------------------------------
// Hostile manifests: a good one with one text replaced.

static void test_hostile(void) {
    const ModelConfig config = small_config();
    Run run = make_run(&config, DTYPE_F32, 3);
    set_step(&run, 3);
    ManifestSlice slices[] = {{.file = 0, .begin = {0, 0}, .end = {2, 3}, .to = 6}, {.file = 1, .begin = {2, 0}, .end = {4, 3}, .to = 6}};
    ManifestTensor tensor = {"w", safetensors_type("F32"), 2, {4, 3}, slices, 2};
    ManifestFile files[] = {{"a.safetensors", 100, "00112233445566778899aabbccddeeff"}, {"b.safetensors", 100, "00112233445566778899aabbccddeeff"}};
    const Manifest manifest = {.state = run.state, .tensors = &tensor, .tensor_count = 1, .files = files, .file_count = 2};
    char *text = manifest_text(&manifest);
    static const struct {
        const char *from, *to, *message;
    } cases[] = {
        {"train_gpt checkpoint", "other", "format: got 'other'"},
        {"\"format\"", "\"formal\"", "format: got 'nothing'"},
        {"\"version\": 1", "\"version\": 2", "version: got 2"},
        {"\"version\": 1", "\"version\": 1.0", "version: missing or not an integer"},
        {"\"step\": 3", "\"step\": -3", "step: got -3"},
        {"\"step\": 3", "\"step\": 1e3", "step: missing or not an integer"},
        {"\"step\": 3", "\"step\": 99999999999999999999", "too big"},
        {"\"step\": 3", "\"step\": 3, \"step\": 3", "duplicate"},
        {"\"optimizer_steps\": 2", "\"optimizer_steps\": 4", "optimizer_steps: got 4"},
        {"\"tokens\": 12288", "\"tokens\": null", "tokens: missing"},
        {"\"epoch\": 2", "\"epoch\": []", "data.epoch"},
        {"\"position\": 5000000001", "\"position\": -1", "data.position"},
        {"\"model\": {", "\"model\": 1, \"m\": {", "model: wanted an object"},
        {"\"flags\": {", "\"flags\": [], \"m\": {", "flags: wanted an object"},
        {"\"data\": {", "\"data\": 1, \"m\": {", "data.seed"},
        {"\"kind\": \"philox", "\"kind\": \"mt19937", "rng.kind"},
        {"\"scaler\": null", "\"scaler\": 2", "scaler"},
        {"\"tokens\": 17", "\"tokens\": \"17\"", "data.files[].tokens"},
        {"\"a.safetensors\": {", "\"../a.safetensors\": {", "files: got the name '../a"},
        {"\"a.safetensors\": {", "\"/etc/passwd\": {", "files: got the name '/etc"},
        {"\"a.safetensors\": {", "\"..\": {", "files: got the name '..'"},
        {"\"a.safetensors\": {", "\"\": {", "files: got the name ''"},
        {"\"a.safetensors\": {", "\"a\\nb\": {", "files: got the name"},
        {"\"bytes\":100", "\"bytes\":-1", "files.a.safetensors.bytes"},
        {"aabbccddeeff", "aabbccddeefg", "files.a.safetensors.xxh3"},
        {"aabbccddeeff", "aabbccddeef", "files.a.safetensors.xxh3"},
        {"\"tensors\": {", "\"tensors\": [], \"m\": {", "tensors: wanted an object"},
        {"\"dtype\":\"F32\"", "\"dtype\":\"F31\"", "tensors.w.dtype: got 'F31'"},
        {"\"shape\":[4,3]", "\"shape\":[4,3,1]", "tensors.w.shape"},
        {"\"shape\":[4,3]", "\"shape\":[]", "tensors.w.shape"},
        {"\"shape\":[4,3]", "\"shape\":[4,0]", "tensors.w.shape"},
        {"\"shape\":[4,3]", "\"shape\":[4,-3]", "tensors.w.shape"},
        {"\"shape\":[4,3]", "\"shape\":[4294967296,4294967296]", "tensors.w.shape"},
        {"\"shape\":[4,3]", "\"shape\":[12]", "slices[0].box"},
        {"\"shape\":[4,3]", "\"shape\":[5,3]", "element [4, 0] is in 0 slices"},
        {"\"shape\":[4,3]", "\"shape\":[4,2]", "slices[0].box"},
        {"\"file\":\"a.safetensors\"", "\"file\":\"c.safetensors\"", "slices[0].file: got 'c.safe"},
        {"\"file\":\"a.safetensors\"", "\"file\":\"b.safetensors\"", "two of them in b.safetensors"},
        {"\"file\":\"a.safetensors\"", "\"file\":1", "slices[0].file: got 'nothing'"},
        {"[[0,2],[0,3]]", "[[0,2],[3,0]]", "slices[0].box"},
        {"[[0,2],[0,3]]", "[[0,2],[0,3,3]]", "slices[0].box"},
        {"[[0,2],[0,3]]", "[[-1,1],[0,3]]", "slices[0].box"},
        {"[[0,2],[0,3]]", "[[0,2.0],[0,3]]", "slices[0].box"},
        {"[[0,2],[0,3]]", "[[0,4],[0,3]]", "element [1, 0]"}, // 6 of its 12 elements: rows 0 and 1, as before
        {"[[0,2],[0,3]]", "[[1,3],[0,3]]", "element [0, 0] is in 0 slices"},
        {"[[2,4],[0,3]]", "[[1,3],[0,3]]", "element [1, 0] is in 2 slices"},
        {"\"range\":[0,6]", "\"range\":[0,7]", "slices[0].range"},
        {"\"range\":[0,6]", "\"range\":[6,0]", "slices[0].range"},
        {"\"range\":[0,6]", "\"range\":[0,5]", "element [1, 2] is in 0 slices"},
        {"\"range\":[0,6]", "\"range\":6", "slices[0].range"},
        {"\"slices\":[{", "\"slices\":[],\"m\":[{", "slices: wanted a list"},
        {"{\n\"format\"", "[{\n\"format\"", "line"},
    };
    int wrong = 0, count = (int)(sizeof cases / sizeof cases[0]);
    for (int i = 0; i < count; i++) {
        char *at = strstr(text, cases[i].from), *changed = NULL;
        if (at == NULL || asprintf(&changed, "%.*s%s%s", (int)(at - text), text, cases[i].to, at + strlen(cases[i].from)) < 0) {
            printf("     not in the text: %s\n", cases[i].from);
            wrong++;
            continue;
        }
        Manifest parsed;
        Error error = {0};
        bool good = manifest_parse("M", changed, strlen(changed), &parsed, &error);
        if (strcmp(cases[i].to, "[[0,4],[0,3]]") == 0 && good) {
            manifest_free(&parsed); // the same elements, described by a larger box: legal
        } else if (good || error.code != CODE_INPUT || strstr(error.text, cases[i].message) == NULL) {
            printf("     %s -> %s: %s\n", cases[i].from, cases[i].to, good ? "accepted" : error.text);
            wrong++;
            if (good) manifest_free(&parsed);
        }
        free(changed);
    }
    check(wrong == 0, "%d hostile manifests: %d not refused by field", count, wrong);
    Manifest parsed;
    Error error = {0};
    bool good = manifest_parse("M", text, strlen(text), &parsed, &error);
    char *again = good ? manifest_text(&parsed) : NULL;
    check(again != NULL && strcmp(again, text) == 0 && manifest_check_seal("M", text, strlen(text), &error),
          "text -> structures -> the same text %s", error.text);
    free(again);
    if (good) manifest_free(&parsed);
    free(text);
    free_run(&run);
}

// ----------------------------------------------------------------------------

// Every byte of both files flipped, every truncation, files removed: refused, and the file named.
static void test_damage(void) {
    const ModelConfig config = small_config();
    Run run = make_run(&config, DTYPE_F32, 3);
    set_step(&run, 3);
    const int all = run.count;
    run.count = 6; // a small one: every byte is tried
    char out[PATH_MAX];
    strcpy(out, temporary("damage"));
    Error error = {0};
    if (!directory_create(out, &error) || !checkpoint_save(comm_, out, &run.state, run.tensors, run.count, 0, &error)) die_error(&error);
    char directory[PATH_MAX];
    strcpy(directory, temporary("damage/step_00000003"));
    const char *names[2] = {CHECKPOINT_DATA, CHECKPOINT_MANIFEST};
    for (int f = 0; f < 2; f++) {
        char *path = path_join(directory, names[f]);
        size_t bytes;
        char *good = file_read_whole(path, 1 << 20, &bytes, &error);
        if (good == NULL) die_error(&error);
        int64_t accepted = 0, unnamed = 0;
        int fd = open(path, O_RDWR);
        for (size_t i = 0; i < bytes; i++) {
            const char flipped = good[i] ^ (char)(1 << i % 8);
            if (pwrite(fd, &flipped, 1, (off_t)i) != 1) die(CODE_IO, "pwrite");
            Checkpoint checkpoint;
            Error told = {0};
            if (checkpoint_open(comm_, directory, &checkpoint, &told)) {
                checkpoint_close(&checkpoint);
                accepted++;
            }
            unnamed += told.code != CODE_INPUT || strstr(told.text, names[f]) == NULL;
            if (pwrite(fd, &good[i], 1, (off_t)i) != 1) die(CODE_IO, "pwrite");
        }
        check(accepted == 0 && unnamed == 0, "%s: a bit flipped in each of its %zu bytes: %lld accepted, %lld without its name (bound 0)", names[f],
              bytes, (long long)accepted, (long long)unnamed);
        accepted = 0;
        for (size_t length = bytes; length-- > 0;) {
            Checkpoint checkpoint;
            Error told = {0};
            if (ftruncate(fd, (off_t)length) != 0) die(CODE_IO, "ftruncate");
            accepted += checkpoint_open(comm_, directory, &checkpoint, &told) || told.code != CODE_INPUT || strstr(told.text, names[f]) == NULL;
        }
        check(accepted == 0, "%s: all %zu truncations are refused: %lld were not", names[f], bytes, (long long)accepted);
        Checkpoint checkpoint;
        Error longer = {0}, absent = {0};
        if (pwrite(fd, good, bytes, 0) != (ssize_t)bytes || pwrite(fd, " ", 1, (off_t)bytes) != 1) die(CODE_IO, "pwrite");
        bool opened = checkpoint_open(comm_, directory, &checkpoint, &longer);
        close(fd);
        unlink(path);
        opened = opened || checkpoint_open(comm_, directory, &checkpoint, &absent);
        check(!opened && strstr(longer.text, names[f]) && strstr(absent.text, names[f]), "%s: a byte more, or no such file: refused", names[f]);
        put_file(path, good, bytes);
        free(good);
        free(path);
    }
    Checkpoint checkpoint;
    bool opened = checkpoint_open(comm_, directory, &checkpoint, &error);
    check(opened && wrong_bytes(&checkpoint, &run, 3, &error) == 0, "mended, it opens again %s", error.text);
    if (opened) checkpoint_close(&checkpoint);
    run.count = all;
    free_run(&run);
}

static bool exists(const char *name) { return access(temporary(name), F_OK) == 0; }

static void test_directory(void) {
    const ModelConfig config = small_config();
    Run run = make_run(&config, DTYPE_F32, 1);
    Error error = {0};
    char out[PATH_MAX];
    strcpy(out, temporary("dir/ectory"));
    int64_t count = -1;
    Checkpoint checkpoint;
    bool found = true;
    check(checkpoint_find(comm_, out, &checkpoint, &found, NULL, &error) && !found && checkpoint_count(out, &count, &error) && count == 0,
          "no OUT: nothing found");
    int lock = -1, second = -1;
    Error busy = {0};
    check(checkpoint_lock(out, &lock, &error) && !checkpoint_lock(out, &second, &busy) && busy.code == CODE_IO && second == -1, "lock: %s",
          busy.text);
    close(lock);
    check(checkpoint_lock(out, &lock, &error), "lock taken again after it was released %s", error.text);
    bool good = true;
    for (int64_t step = 10; good && step <= 50; step += 10) {
        set_step(&run, step);
        if (step == 30) { // what a crash leaves: must be removed by the next save, and never be read
            shell("cp -r '%s/step_00000020' '%s/step_00000025.tmp'", out, out);
            shell("cp -r '%s/step_00000020' '%s/step_00000090.old'", out, out);
            shell("mkdir '%s/step_00000030.tmp'; echo x > '%s/step_00000030.tmp/rank_00000.safetensors'", out, out);
            shell("mkdir '%s/step_99'; touch '%s/step_'", out, out); // names that are not ours
            good = found_step(out, &run, NULL, 0, &error) == 20;
            set_step(&run, step);
        }
        good = good && checkpoint_save(comm_, out, &run.state, run.tensors, run.count, 3, &error);
    }
    check(good && !exists("dir/ectory/step_00000025.tmp") && !exists("dir/ectory/step_00000090.old") && !exists("dir/ectory/step_00000030.tmp") &&
              exists("dir/ectory/step_99"),
          "leftovers of a crash are not read, and are removed by the next save; other names stay %s", error.text);
    check(!exists("dir/ectory/step_00000010") && !exists("dir/ectory/step_00000020") && exists("dir/ectory/step_00000030") &&
              exists("dir/ectory/step_00000040") && exists("dir/ectory/step_00000050") && checkpoint_count(out, &count, &error) && count == 3,
          "--keep 3 leaves the newest 3 of 5");
    char notices[4096] = "";
    shell("printf x | dd of='%s/step_00000050/%s' bs=1 seek=700 conv=notrunc 2>/dev/null", out, CHECKPOINT_DATA);
    shell("rm '%s/step_00000040/%s'", out, CHECKPOINT_MANIFEST);
    int64_t step = found_step(out, &run, notices, sizeof notices, &error);
    check(step == 30 && strstr(notices, "skipping checkpoint step_00000050: ") && strstr(notices, "damaged") &&
              strstr(notices, "skipping checkpoint step_00000040: ") && strstr(notices, "no manifest.json"),
          "auto falls back to the newest good one (step %lld) and says why:\n%s", (long long)step, notices);
    // Going on from there: the damaged ones that are newer neither count as kept nor displace good ones.
    set_step(&run, 45);
    good = checkpoint_save(comm_, out, &run.state, run.tensors, run.count, 1, &error);
    check(good && exists("dir/ectory/step_00000045") && exists("dir/ectory/step_00000050") && !exists("dir/ectory/step_00000030"),
          "keep 1 keeps the one just saved, whatever stands behind it %s", error.text);
    set_step(&run, 50);
    good = checkpoint_save(comm_, out, &run.state, run.tensors, run.count, 2, &error);
    step = found_step(out, &run, notices, sizeof notices, &error);
    check(good && step == 50 && !exists("dir/ectory/step_00000050.tmp"), "a damaged checkpoint of the same step is replaced %s", error.text);
    shell("mv '%s/step_00000050' '%s/step_00000060'", out, out);
    notices[0] = '\0';
    step = found_step(out, &run, notices, sizeof notices, &error);
    check(step == 45 && strstr(notices, "holds step 50 (renamed?)"), "a renamed checkpoint is not taken for another step");
    shell("rm '%s/step_00000045/%s'", out, CHECKPOINT_DATA);
    Error none = {0};
    step = found_step(out, &run, NULL, 0, &none);
    check(step == -1 && none.code == CODE_INPUT && strstr(none.text, "none of its 2 checkpoints is good; the newest: "), "only bad ones: %s",
          none.text);
    close(lock);
    Error file = {0};
    put_file(temporary("file"), "x", 1);
    check(!checkpoint_lock(temporary("file"), &lock, &file) && file.code == CODE_IO, "OUT is a file: %s", file.text);
    free_run(&run);
}

// ----------------------------------------------------------------------------
// Failing system calls. The child is this program with three arguments: save OUT STEP.

static int child_save(const char *out, const char *step) {
    const ModelConfig config = small_config();
    Run run = make_run(&config, DTYPE_F32, 1);
    set_step(&run, atoll(step));
    Error error = {0};
    bool good = checkpoint_save(comm_, out, &run.state, run.tensors, run.count, 1, &error);
    fputs(error.text, stderr);
    free_run(&run);
    return good ? 0 : error.code;
}

// Runs the child under the shim; its exit code, and what it said in text.
static int run_child(const char *out, const char *step, const char *call, int at, const char *how, bool all, bool no_exchange, char text[2048]) {
    char self[PATH_MAX], shim[PATH_MAX + 16], number[16];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length < 0) die(CODE_IO, "readlink");
    self[length] = '\0';
    snprintf(shim, sizeof shim, "%.*s/shim_io.so", (int)(strrchr(self, '/') - self), self);
    if (access(shim, R_OK) != 0) die(CODE_INPUT, "%s is missing: make build/shim_io.so", shim);
    snprintf(number, sizeof number, "%d", at);
    const char *mark = temporary("mark"), *said = temporary("said"), *log = temporary("log");
    unlink(mark);
    unlink(log);
    pid_t child = fork();
    if (child == 0) {
        int fd = open(said, O_WRONLY | O_CREAT | O_TRUNC, 0600);
        dup2(fd, 2);
        setenv("LD_PRELOAD", shim, 1);
        setenv("ASAN_OPTIONS", "verify_asan_link_order=0", 1);
        setenv("SHIM_PATH", out, 1);
        setenv("SHIM_CALL", call, 1);
        setenv("SHIM_AT", number, 1);
        setenv("SHIM_ERROR", how, 1);
        setenv("SHIM_MARK", mark, 1);
        setenv("SHIM_LOG", log, 1);
        if (no_exchange) setenv("SHIM_NO_EXCHANGE", "1", 1);
        all ? setenv("SHIM_ALL", "1", 1) : unsetenv("SHIM_ALL");
        execl(self, self, "save", out, step, (char *)NULL);
        _exit(99);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) die(CODE_IO, "fork");
    size_t bytes;
    Error error = {0};
    char *whole = file_read_whole(said, 1 << 20, &bytes, &error);
    snprintf(text, 2048, "%s", whole != NULL ? whole : "");
    free(whole);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

static void test_failing_calls(void) {
    static const struct {
        const char *call;
        int error; // 0: "short"
        bool all, harmless;
        enum { NEW, EXCHANGED, RENAMED } place; // a new step, or one that is there and is replaced, with or without exchange of names
    } kinds[] = {
        {"write", ENOSPC, true, false, NEW},
        {"write", EIO, false, false, NEW},
        {"write", 0, true, true, NEW},
        {"write", EINTR, false, true, NEW},
        {"fsync", EIO, false, false, NEW},
        {"fsync", EINTR, false, true, NEW},
        {"rename", ENOSPC, false, false, NEW},
        {"open", EMFILE, false, false, NEW},
        {"close", EIO, false, false, NEW},
        {"mkdir", ENOSPC, false, false, NEW},
        {"unlink", EIO, true, false, NEW},
        {"rmdir", EIO, true, false, NEW},
        {"statvfs", 0, true, false, NEW},
        {"statvfs", EIO, true, false, NEW},
        {"renameat2", EIO, false, false, EXCHANGED},
        {"renameat2", EINVAL, false, true, EXCHANGED},
        {"rename", EIO, false, false, RENAMED},
    };
    const ModelConfig config = small_config();
    Run run = make_run(&config, DTYPE_F32, 1);
    char out[PATH_MAX];
    strcpy(out, temporary("failing"));
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++) {
        int faults = 0, silent = 0, lost = 0, unnamed = 0;
        char how[16], text[2048] = "";
        snprintf(how, sizeof how, "%d", kinds[k].error);
        if (kinds[k].error == 0) snprintf(how, sizeof how, "short");
        const char *step = kinds[k].place != NEW ? "1" : "2";
        for (int at = 1; at < 100; at++) {
            shell("rm -rf '%s'; mkdir '%s'", out, out);
            set_step(&run, 1);
            Error error = {0};
            if (!checkpoint_save(comm_, out, &run.state, run.tensors, run.count, 1, &error)) die_error(&error);
            const int code = run_child(out, step, kinds[k].call, at, how, kinds[k].all, kinds[k].place == RENAMED, text);
            if (!exists("mark")) break; // there is no at-th call
            faults++;
            const bool space = strcmp(kinds[k].call, "statvfs") == 0 && kinds[k].error == 0;
            if (kinds[k].harmless ? code != 0 : code != CODE_IO) {
                printf("     %s %d: exit %d, '%s'\n", kinds[k].call, at, code, text);
                silent++;
            }
            if (!kinds[k].harmless && (strstr(text, out) == NULL || strstr(text, space ? "are free" : strerror(kinds[k].error)) == NULL)) {
                printf("     %s %d: '%s'\n", kinds[k].call, at, text);
                unnamed++;
            }
            const int64_t found = found_step(out, &run, NULL, 0, &error);
            if (found < 1 || (kinds[k].harmless && found != atoll(step))) {
                printf("     %s %d: found step %lld: %s\n", kinds[k].call, at, (long long)found, error.text);
                lost++;
            }
            Error after = {0}; // and the next save works
            set_step(&run, 3);
            if (!checkpoint_save(comm_, out, &run.state, run.tensors, run.count, 1, &after) || found_step(out, &run, NULL, 0, &after) != 3) {
                printf("     %s %d: the next save: %s\n", kinds[k].call, at, after.text);
                lost++;
            }
        }
        check(faults > 0 && silent == 0 && lost == 0 && unnamed == 0,
              "%s, %s%s, at each of its %d calls: %d not told, %d without path and reason, %d lost", kinds[k].call,
              kinds[k].error ? strerror(kinds[k].error) : "short or no space", kinds[k].all ? " from then on" : "", faults, silent, unnamed, lost);
    }
    free_run(&run);
}

// What survives a loss of power depends on the order of the calls: data, manifest and names are synced before the rename
// that commits, that rename before anything is deleted.
static void test_order(void) {
    const ModelConfig config = small_config();
    Run run = make_run(&config, DTYPE_F32, 1);
    char out[PATH_MAX], text[2048];
    strcpy(out, temporary("order"));
    set_step(&run, 1);
    Error error = {0};
    size_t bytes;
    if (!directory_create(out, &error) || !checkpoint_save(comm_, out, &run.state, run.tensors, run.count, 1, &error)) die_error(&error);
    const int code = run_child(out, "2", "none", 1, "0", false, false, text);
    char *log = file_read_whole(temporary("log"), 1 << 20, &bytes, &error);
    const char *wanted = "fsync rank_00000.safetensors\nfsync manifest.json\nfsync step_00000002.tmp\nrename step_00000002.tmp\nfsync order\n"
                         "rename step_00000001\nfsync order\nrmdir step_00000001.old\n";
    check(code == 0 && log != NULL && strcmp(log, wanted) == 0, "order of syncs and renames%s%s",
          log != NULL && strcmp(log, wanted) == 0 ? "" : ":\n", log != NULL && strcmp(log, wanted) == 0 ? "" : log);
    free(log);
    free_run(&run);
}

// Saves step after step and tells each on a pipe, until it is killed.
static void child_saves_forever(const char *out, Run *run, int64_t step, int pipe_fd) {
    Error error = {0};
    for (;; step++) {
        set_step(run, step);
        if (!checkpoint_save(comm_, out, &run->state, run->tensors, run->count, 2, &error)) die_error(&error);
        if (write(pipe_fd, &step, sizeof step) != sizeof step) _exit(1);
    }
}

static void test_kills(void) {
    enum { KILLS = 50 };
    const uint64_t seed = (uint64_t)getpid() * 1000003u + (uint64_t)clock_ms();
    uint64_t random = seed;
    const ModelConfig config = small_config();
    Run run = make_run(&config, DTYPE_F32, 1);
    char out[PATH_MAX];
    strcpy(out, temporary("kills"));
    Error error = {0};
    if (!directory_create(out, &error)) die_error(&error);
    const double start_ms = clock_ms();
    set_step(&run, 1);
    if (!checkpoint_save(comm_, out, &run.state, run.tensors, run.count, 2, &error)) die_error(&error);
    const int64_t save_us = 200 + (int64_t)((clock_ms() - start_ms) * 1000);
    int64_t step = 1, lost = 0, leftovers = 0;
    for (int kill_index = 0; kill_index < KILLS; kill_index++) {
        int ends[2];
        if (pipe(ends) != 0) die(CODE_IO, "pipe");
        pid_t child = fork();
        if (child == 0) child_saves_forever(out, &run, step + 1, ends[1]);
        close(ends[1]);
        usleep((useconds_t)random_below(&random, save_us * 3));
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
        int64_t told = step, next;
        while (read(ends[0], &next, sizeof next) == sizeof next) told = next;
        close(ends[0]);
        char pattern[2 * PATH_MAX];
        snprintf(pattern, sizeof pattern, "ls -d '%s'/step_*.* >/dev/null 2>&1", out);
        leftovers += system(pattern) == 0;
        Error reason = {0};
        char notices[2048] = "";
        const int64_t found = found_step(out, &run, notices, sizeof notices, &reason);
        if (found < told || notices[0] != '\0') {
            printf("     kill %d: told %lld, found %lld: %s %s\n", kill_index, (long long)told, (long long)found, reason.text, notices);
            lost++;
        }
        step = max_i64(found, told);
    }
    check(lost == 0 && step > 1,
          "%d kills in a loop of saves (seed %llu): %lld steps, %lld kills left something behind, %lld lost a checkpoint (bound 0)", KILLS,
          (unsigned long long)seed, (long long)step, (long long)leftovers, (long long)lost);
    free_run(&run);
}

int main(int argc, char **argv) {
    comm_ = comm_init(&argc, &argv);
    if (argc == 4 && strcmp(argv[1], "save") == 0) return child_save(argv[2], argv[3]);
    // In memory where there is room: a thousand syncs are slow on a busy disk and prove nothing more about killed processes.
    struct statvfs space;
    const bool memory = statvfs("/dev/shm", &space) == 0 && (double)space.f_bavail * (double)space.f_frsize > 256e6;
    snprintf(directory_, sizeof directory_, "%s/test_checkpoint_XXXXXX", memory ? "/dev/shm" : "/tmp");
    if (mkdtemp(directory_) == NULL) die(CODE_IO, "cannot create %s", directory_);
    test_round_trip();
    test_refused();
    test_sharded();
    test_hostile();
    test_damage();
    test_directory();
    test_failing_calls();
    test_order();
    test_kills();
    shell("rm -rf '%s'%s", directory_, "");
    comm_finish(comm_);
    printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ != 0;
}
