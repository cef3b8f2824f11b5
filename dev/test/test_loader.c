// test_loader.c: the stream of batches: cut by ranks and micro-batches, saved and resumed, validation, errors, closing.
#include "dev/test/token_files.h" // write_tokens, check
#include "llmc/loader.h"          // the module

enum { T = 8, EOT = 256, VOCAB = 70000 };

static const char *const pack_names[] = {"none", "varlen", "fit"};

// Four files, 0, T, 5T+1 and 20T+3 tokens, with documents of 1 to 12 tokens.
static TokenSet standard_set(const TempDir *dir) {
    const int64_t sizes[] = {5 * T + 1, 0, 20 * T + 3, T};
    int32_t ids[20 * T + 3];
    for (int f = 0; f < 4; f++) {
        for (int64_t i = 0; i < sizes[f]; i++) {
            ids[i] = philox(rng_key(3, RNG_TEST), (uint64_t)i, (uint64_t)f).x[0] % 6 == 0 ? EOT : (int32_t)(1000 + f * 10000 + i);
        }
        char name[30];
        snprintf(name, sizeof name, "standard_%d.bin", f);
        write_tokens(dir, name, ids, sizes[f], 4);
    }
    return open_tokens(temp_path(dir, "standard_*.bin").text, VOCAB);
}

static LoaderConfig config_of(const TokenSet *set, int64_t B, int64_t GB, int pack, bool shuffle) {
    return (LoaderConfig){.tokens = set,
                          .flag = "--train",
                          .seq = T,
                          .micro_batch = B,
                          .global_batch = GB,
                          .ranks = 1,
                          .seed = 17,
                          .shuffle = shuffle,
                          .pack = pack,
                          .eot = EOT};
}

static Loader *open_loader(const LoaderConfig *config, LoaderPosition start) {
    Loader *loader = base_new(1, sizeof *loader);
    Error error = {0};
    if (!loader_open(loader, config, start, &error)) die_error(&error);
    return loader;
}

static void close_loader(Loader *loader) {
    loader_close(loader);
    free(loader);
}

// A step's content, sequence by sequence of the global batch, independent of ranks and micro-batches.
typedef struct {
    int64_t id, tokens;
    int32_t ids[T], targets[T], positions[T], index[T];
} Row;

// Appends the rows of a step. Rows are told apart by token_index / T.
static int64_t take_rows(const StepBatch *step, Row *rows) {
    int64_t count = 0;
    for (int64_t m = 0; m < step->micro_count; m++) {
        const MicroBatch *b = &step->micros[m];
        int64_t previous = -1;
        for (int64_t n = 0; n < b->tokens; n++) {
            const int64_t sequence = b->token_index[n] / T;
            if (sequence != previous) {
                memset(&rows[count], 0, sizeof *rows);
                rows[count].id = step->sample_ids[count];
                count++;
            }
            previous = sequence;
            Row *row = &rows[count - 1];
            row->ids[row->tokens] = b->ids[n];
            row->targets[row->tokens] = b->targets[n];
            row->positions[row->tokens] = b->positions[n];
            row->index[row->tokens++] = b->token_index[n];
        }
    }
    return count;
}

static void test_ranks(const TokenSet *set) {
    enum { GB = 8, STEPS = 12 };
    static Row whole[STEPS * GB], part[STEPS * GB];
    for (int pack = PACK_NONE; pack <= PACK_FIT; pack++) {
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            LoaderConfig config = config_of(set, GB, GB, pack, shuffle);
            Error error = {0};
            Loader *loader = open_loader(&config, (LoaderPosition){0});
            int64_t valid[STEPS], valid_global[STEPS];
            for (int s = 0; s < STEPS; s++) {
                const StepBatch *step = loader_next(loader, &error);
                check(step != NULL && take_rows(step, whole + s * GB) == GB, "step %d", s);
                valid[s] = step->valid;
                check(step->valid_global == step->valid, "valid targets of one rank are all");
            }
            close_loader(loader);
            for (int64_t ranks = 1; ranks <= 4; ranks *= 2) {
                for (int64_t B = 1; B * ranks <= GB; B *= 2) {
                    int64_t sums[STEPS] = {0};
                    for (int64_t rank = 0; rank < ranks; rank++) {
                        config.micro_batch = B, config.ranks = ranks, config.rank = rank;
                        loader = open_loader(&config, (LoaderPosition){0});
                        for (int s = 0; s < STEPS; s++) {
                            const StepBatch *step = loader_next(loader, &error);
                            const int64_t got = take_rows(step, part + s * GB + rank * GB / ranks);
                            check(got == GB / ranks && step->micro_count == GB / ranks / B && step->sequences == GB / ranks, "share");
                            for (int64_t m = 0; m < step->micro_count; m++) check(step->micros[m].rows == B, "rows");
                            sums[s] += step->valid;
                            valid_global[s] = step->valid_global;
                        }
                        close_loader(loader);
                    }
                    check(memcmp(whole, part, sizeof whole) == 0, "%s, shuffle %d: %lld ranks, B %lld: the same rows", pack_names[pack], shuffle,
                          (long long)ranks, (long long)B);
                    bool counted = true;
                    for (int s = 0; s < STEPS; s++) {
                        const bool known = pack != PACK_VARLEN || ranks == 1;
                        counted = counted && sums[s] == valid[s] && valid_global[s] == (known ? valid[s] : -1);
                    }
                    check(counted, "%s: valid targets add up", pack_names[pack]);
                }
            }
        }
    }
    printf("ranks: 1, 2, 4 ranks x micro-batches 1 to 8 give the rows of one rank, 3 packs, shuffle on and off\n");
}

static void test_epochs(const TokenSet *set) {
    static Row rows[25];
    for (int pack = PACK_NONE; pack <= PACK_VARLEN; pack++) {
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            const LoaderConfig config = config_of(set, 5, 5, pack, shuffle);
            Loader *loader = open_loader(&config, (LoaderPosition){0});
            Error error = {0};
            check(loader_sequences_per_epoch(loader) == 25, "25 windows");
            int64_t first_epoch[25];
            for (int epoch = 0; epoch < 3; epoch++) {
                int64_t seen[25] = {0}, sorted = 0, same = 0, twice = 0;
                for (int s = 0; s < 5; s++) {
                    const StepBatch *step = loader_next(loader, &error);
                    take_rows(step, rows + 5 * s);
                    for (int i = 0; i < 5; i++) {
                        const int64_t id = step->sample_ids[i];
                        twice += seen[id]++ > 0;
                        sorted += id == 5 * s + i;
                        if (epoch == 0) first_epoch[5 * s + i] = id;
                        same += id == first_epoch[5 * s + i];
                        // windows 0..4 lie in file 0, the rest in file 2
                        const int64_t file = id < 5 ? 0 : 2, at = (id < 5 ? id : id - 5) * T;
                        for (int t = 0; t < T; t++) {
                            const int32_t token = rows[5 * s + i].ids[t];
                            if (token != EOT) twice += token != 1000 + file * 10000 + at + t;
                        }
                    }
                }
                check(twice == 0, "%s, shuffle %d, epoch %d: every window once, at its place", pack_names[pack], shuffle, epoch);
                check(shuffle ? sorted < 15 : sorted == 25, "order: %lld in place", (long long)sorted);
                if (shuffle && epoch > 0) check(same < 15, "another order in epoch %d", epoch);
                const LoaderPosition at = loader_position(loader);
                check(at.epoch == epoch + 1 && at.position == 0 && at.row == 0, "the epoch boundary is the next epoch's start");
            }
            close_loader(loader);
        }
    }
    printf("epochs: every window exactly once, 3 epochs\n");
}

static void test_resume(const TokenSet *set) {
    enum { GB = 4, STEPS = 40 };
    static Row rows[STEPS * GB], again[GB];
    static LoaderPosition after[STEPS];
    int64_t positions = 0;
    for (int pack = PACK_NONE; pack <= PACK_FIT; pack++) {
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            LoaderConfig config = config_of(set, 2, GB, pack, shuffle);
            Loader *loader = open_loader(&config, (LoaderPosition){0});
            Error error = {0};
            int64_t boundaries = 0, epochs = 0;
            for (int s = 0; s < STEPS; s++) {
                take_rows(loader_next(loader, &error), rows + s * GB);
                after[s] = loader_position(loader);
                boundaries += after[s].position == 5 && after[s].row == 0; // none, varlen without shuffle: file 0 ends here
                epochs = after[s].epoch;
            }
            close_loader(loader);
            check(epochs >= 2, "several epochs");
            if (pack != PACK_FIT) check(boundaries > 0, "a position at a file boundary");
            bool same = true;
            for (int s = 0; s + 1 < STEPS; s++, positions++) {
                config.micro_batch = s % 2 ? 4 : 1; // another micro-batch does not matter
                loader = open_loader(&config, after[s]);
                same = same && take_rows(loader_next(loader, &error), again) == GB && memcmp(again, rows + (s + 1) * GB, sizeof again) == 0;
                const LoaderPosition at = loader_position(loader);
                same = same && at.epoch == after[s + 1].epoch && at.position == after[s + 1].position && at.row == after[s + 1].row;
                close_loader(loader);
            }
            check(same, "%s, shuffle %d: resumed streams", pack_names[pack], shuffle);
            const LoaderPosition bad[] = {{-1, 0, 0}, {0, -1, 0}, {0, 25, 0}, {0, 0, -1}, {0, 0, 1000}};
            for (int i = 0; i < 5; i++) {
                Loader *refused = base_new(1, sizeof *refused);
                Error why = {0};
                check(!loader_open(refused, &config, bad[i], &why) && why.code == CODE_INPUT && strstr(why.text, "position to resume at"),
                      "bad position %d", i);
                loader_close(refused);
                free(refused);
            }
        }
    }
    printf("resume: %lld positions, in epochs, at file and epoch boundaries, bit for bit\n", (long long)positions);
}

// Several buffers of documents, so that fit's position moves over buffers, and every trained position once per epoch.
static void test_fit(const TempDir *dir) {
    enum { COUNT = 30000 };
    int32_t *ids = base_new(COUNT, 4);
    int64_t trained = 0;
    for (int i = 0; i < COUNT; i++) {
        ids[i] = i == 0 || i == COUNT - 1 || philox(rng_key(8, RNG_TEST), (uint64_t)i, 0).x[0] % 6 == 0 ? 0 : i;
        trained += i + 1 < COUNT && ids[i] != 0;
    }
    TokenSet set = open_tokens(write_tokens(dir, "fit.bin", ids, COUNT, 4).text, VOCAB);
    LoaderConfig config = config_of(&set, 4, 8, PACK_FIT, true);
    config.eot = 0;
    config.once = true;
    unsigned char *seen = base_new(COUNT, 1);
    Error error = {0};
    Loader *loader = open_loader(&config, (LoaderPosition){0});
    check(fit_buffers(&loader->pieces) > 3, "%lld buffers", (long long)fit_buffers(&loader->pieces));
    int64_t tokens = 0, rows = 0, wrong = 0, steps = 0;
    static Row row[8], again[8];
    LoaderPosition middle = {0};
    double padding = 0;
    for (const StepBatch *step; (step = loader_next(loader, &error)) != NULL; steps++) {
        const int64_t count = take_rows(step, row);
        for (int64_t r = 0; r < count; r++) {
            for (int64_t t = 0; t < row[r].tokens; t++) {
                const int32_t id = row[r].ids[t];
                wrong += id <= 0 || seen[id]++ || row[r].targets[t] != ids[id + 1];
            }
        }
        tokens += step->tokens;
        rows += step->sequences;
        padding += step->padding * (double)step->sequences;
        wrong += step->valid != step->tokens || step->valid_global != step->tokens;
        if (steps == 200) middle = loader_position(loader);
        if (steps == 201) memcpy(again, row, sizeof row);
    }
    check(error.code == 0 && wrong == 0 && tokens == trained, "%lld wrong, %lld of %lld positions", (long long)wrong, (long long)tokens,
          (long long)trained);
    check(fabs(padding / (double)rows - (1 - (double)tokens / (double)(rows * T))) < 1e-12, "padding adds up");
    check(middle.position > 0 && middle.row > 0 && rows >= loader_sequences_per_epoch(loader), "a position inside a later buffer");
    close_loader(loader);
    config.once = false;
    loader = open_loader(&config, middle);
    check(take_rows(loader_next(loader, &error), row) == 8 && memcmp(row, again, sizeof row) == 0, "resume inside a later buffer");
    close_loader(loader);
    printf("fit: %lld trained positions, each once, in %lld rows, padding %.2f%%\n", (long long)tokens, (long long)rows,
           100 * padding / (double)rows);
    tokens_close(&set);
    free(seen);
    free(ids);
}

static void test_validation(const TokenSet *set) {
    for (int pack = PACK_NONE; pack <= PACK_FIT; pack++) {
        int64_t windows_seen[2] = {0}, steps_seen[2] = {0};
        for (int64_t rank = 0; rank < 2; rank++) {
            LoaderConfig config = config_of(set, 3, 6, pack, false);
            config.once = true, config.ranks = 2, config.rank = rank;
            Loader *loader = open_loader(&config, (LoaderPosition){0});
            static Row rows[3][6];
            for (int round = 0; round < 3; round++) {
                Error error = {0};
                int64_t sequences = 0, steps = 0;
                for (const StepBatch *step; (step = loader_next(loader, &error)) != NULL; steps++) {
                    if (steps == 0) take_rows(step, rows[round]);
                    sequences += step->sequences;
                    check(step->micros[0].rows == step->sequences && step->micros[0].cu_seqlens[step->micros[0].documents] == step->tokens,
                          "partial rows");
                    if (round == 1 && steps == 1) break; // a rewind in the middle
                }
                check(error.code == 0, "no error");
                if (round != 1) check(loader_next(loader, &error) == NULL && error.code == 0, "the end stays the end");
                if (round == 0) windows_seen[rank] = sequences, steps_seen[rank] = steps;
                if (round == 2) check(windows_seen[rank] == sequences && steps_seen[rank] == steps, "the same again");
                loader_rewind(loader);
            }
            check(memcmp(rows[0], rows[1], sizeof rows[0]) == 0 && memcmp(rows[0], rows[2], sizeof rows[0]) == 0, "from the start each time");
            close_loader(loader);
        }
        check(steps_seen[0] == steps_seen[1], "%s: the ranks make the same number of steps", pack_names[pack]);
        if (pack != PACK_FIT) {
            check(windows_seen[0] == 13 && windows_seen[1] == 12 && steps_seen[0] == 5, "25 windows in 5 steps: got %lld + %lld",
                  (long long)windows_seen[0], (long long)windows_seen[1]);
        }
    }
    printf("validation: once through, last step partial, rewind\n");
}

static void test_errors(const TempDir *dir, const TokenSet *set) {
    struct {
        int64_t B, GB, eot;
        int pack, code;
        const char *part;
    } cases[] = {
        {3, 8, EOT, PACK_NONE, CODE_USAGE, "--global-batch: got 8, wanted a multiple of --micro-batch 3"},
        {1, 1 << 29, EOT, PACK_NONE, CODE_USAGE, "--global-batch: got 536870912 x --seq 8"},
        {1, 1, -1, PACK_VARLEN, CODE_USAGE, "--eot: not given"},
        {1, 1, -1, PACK_FIT, CODE_USAGE, "--pack fit"},
        {1, 1, VOCAB, PACK_FIT, CODE_USAGE, "--eot: got 70000, wanted less"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        LoaderConfig config = config_of(set, cases[i].B, cases[i].GB, cases[i].pack, true);
        config.eot = cases[i].eot;
        Loader *loader = base_new(1, sizeof *loader);
        Error error = {0};
        check(!loader_open(loader, &config, (LoaderPosition){0}, &error) && error.code == cases[i].code && strstr(error.text, cases[i].part),
              "error %zu: %s", i, error.text);
        loader_close(loader);
        free(loader);
    }
    // A file that shrinks while it is read: found by the thread, reported by loader_next after the good steps.
    int32_t ids[10 * T + 1];
    for (int i = 0; i < 10 * T + 1; i++) ids[i] = i;
    const Path path = write_tokens(dir, "shrinks.bin", ids, 10 * T + 1, 4);
    TokenSet shrinking = open_tokens(path.text, VOCAB);
    check(truncate(path.text, TOKENS_HEADER_BYTES + 4 * 5 * T) == 0, "truncate");
    const LoaderConfig config = config_of(&shrinking, 1, 1, PACK_NONE, false);
    Loader *loader = open_loader(&config, (LoaderPosition){0});
    Error error = {0};
    int steps = 0;
    while (loader_next(loader, &error) != NULL) steps++;
    check(steps == 4 && error.code == CODE_INPUT && strstr(error.text, "become shorter"), "after %d steps: %s", steps, error.text);
    Error later = {0};
    check(loader_next(loader, &later) == NULL && later.code == CODE_INPUT, "the error stays");
    close_loader(loader);
    tokens_close(&shrinking);
    printf("errors: %zu configurations, a file that shrinks\n", sizeof cases / sizeof cases[0]);
}

// Closing at once, after some steps, and a prefetched step that must not disturb the one in use.
static void test_close(const TokenSet *set) {
    for (int steps = 0; steps < 30; steps++) {
        const LoaderConfig config = config_of(set, 4, 4, steps % 3, true);
        Loader *loader = open_loader(&config, (LoaderPosition){0});
        Error error = {0};
        for (int s = 0; s < steps; s++) check(loader_next(loader, &error) != NULL, "step");
        close_loader(loader);
    }
    const LoaderConfig config = config_of(set, 4, 4, PACK_NONE, true);
    Loader *loader = open_loader(&config, (LoaderPosition){0});
    Error error = {0};
    const StepBatch *step = loader_next(loader, &error);
    static Row before[4], after[4];
    take_rows(step, before);
    pthread_mutex_lock(&loader->lock);
    while (loader->produced < 2) pthread_cond_wait(&loader->changed, &loader->lock);
    const LoaderPosition ahead = loader->at;
    pthread_mutex_unlock(&loader->lock);
    check(loader_position(loader).position == 4 && ahead.position == 8, "the position to save is that of the step in use, not of the prepared one");
    take_rows(step, after);
    check(memcmp(before, after, sizeof before) == 0, "the step in use stays while the next is prepared");
    const int64_t planned = loader_bytes(&config);
    int64_t counted = (int64_t)sizeof(Loader) + (T + 1) * 4;
    for (int s = 0; s < 2; s++) counted += loader->slots[s].micro_count * microbatch_bytes(4 * T) + 4 * 8;
    check(planned == counted, "loader_bytes: %lld, counted %lld", (long long)planned, (long long)counted);
    Loader zeroed;
    memset(&zeroed, 0, sizeof zeroed);
    loader_close(&zeroed);
    close_loader(loader);
    printf("closing: at every moment; double buffer; bytes\n");
}

int main(void) {
    TempDir dir = temp_create();
    TokenSet set = standard_set(&dir);
    test_ranks(&set);
    test_epochs(&set);
    test_resume(&set);
    test_fit(&dir);
    test_validation(&set);
    test_errors(&dir, &set);
    test_close(&set);
    tokens_close(&set);
    temp_remove(&dir);
    return finish();
}
