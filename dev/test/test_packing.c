// test_packing.c: micro-batches against a slow reconstruction from the documents; isolation; whole documents in fit.
#include "dev/test/token_files.h" // write_tokens, check
#include "llmc/packing.h"         // the module

enum { EOT = 256, VOCAB = 300 };

// Checks what holds in every micro-batch: shapes, cu_seqlens, positions, counts.
static bool well_formed(const MicroBatch *b, int64_t B, int64_t T) {
    bool good = b->tokens <= B * T && b->cu_seqlens[0] == 0 && b->cu_seqlens[b->documents] == b->tokens;
    int64_t longest = 0, valid = 0;
    for (int64_t d = 0; good && d < b->documents; d++) {
        const int64_t length = b->cu_seqlens[d + 1] - b->cu_seqlens[d];
        good = length > 0 && length <= T;
        longest = max_i64(longest, length);
        for (int64_t i = 0; good && i < length; i++) good = b->positions[b->cu_seqlens[d] + i] == i;
    }
    for (int64_t n = 0; n < b->tokens; n++) valid += b->targets[n] >= 0;
    return good && longest == b->max_length && valid == b->valid;
}

static void test_windows(const TempDir *dir) {
    enum { T = 8, COUNT = 41 };
    // empty documents first, in the middle, last; a document that ends with a row; one of many rows
    int32_t ids[COUNT] = {EOT, EOT, 1, 2, EOT, 3, 4, EOT, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, EOT, EOT, EOT, 16, EOT};
    for (int i = 24; i < 38; i++) ids[i] = i;
    ids[38] = ids[39] = ids[40] = EOT;
    int64_t starts[COUNT + 1], documents = 0; // the same boundaries for an .idx, with an extra empty document
    starts[documents++] = 0;
    for (int i = 0; i < COUNT - 1; i++) {
        if (ids[i] == EOT) starts[documents++] = i + 1;
    }
    int32_t lengths[COUNT];
    int64_t firsts[COUNT + 2], entries = 0;
    for (int64_t d = 0; d < documents; d++) lengths[d] = (int32_t)((d + 1 < documents ? starts[d + 1] : COUNT) - starts[d]);
    for (int64_t d = 0; d <= documents; d++) {
        firsts[entries++] = d;
        if (d == 2) firsts[entries++] = d;
    }
    uint16_t raw[COUNT];
    for (int i = 0; i < COUNT; i++) raw[i] = (uint16_t)ids[i];
    const Path plain = write_tokens(dir, "windows.bin", ids, COUNT, 2);
    const Path mega = write_megatron(dir, "mega", raw, TOKEN_U16, 2, lengths, documents, firsts, entries, 0);
    int32_t scratch[T + 1];
    for (int form = 0; form < 2; form++) {
        TokenSet set = open_tokens(form ? mega.text : plain.text, VOCAB);
        for (int pack = PACK_NONE; pack <= PACK_VARLEN; pack++) {
            MicroBatch batch;
            microbatch_create(&batch, 5 * T);
            microbatch_clear(&batch);
            Error error = {0};
            bool good = true;
            for (int64_t g = 0; good && g < 5; g++) {
                good = packing_add_window(&batch, &set, g * T, T, g + 3, pack, form ? -1 : EOT, scratch, &error);
            }
            check(good && batch.rows == 5 && batch.tokens == 5 * T && well_formed(&batch, 5, T), "form %d, pack %d: well formed", form, pack);
            bool same = true;
            int64_t d = 0;
            for (int64_t n = 0; n < batch.tokens; n++) {
                const bool last = pack == PACK_VARLEN && ids[n] == EOT;
                same = same && batch.ids[n] == ids[n] && batch.targets[n] == (last ? -1 : ids[n + 1]) && batch.token_index[n] == 3 * T + n;
                const bool begins = n % T == 0 || (pack == PACK_VARLEN && ids[n - 1] == EOT);
                same = same && (batch.positions[n] == 0) == begins;
                if (begins) same = same && batch.cu_seqlens[d++] == n;
            }
            check(same && d == batch.documents, "form %d, pack %d: ids, targets, boundaries", form, pack);
            if (pack == PACK_NONE) check(batch.valid == 5 * T && batch.documents == 5 && batch.max_length == T, "none: everything is valid");
            microbatch_free(&batch);
        }
        tokens_close(&set);
    }
    printf("windows: none and varlen, eot and .idx, empty documents first, middle, last\n");
}

// Changing every token of document A leaves what belongs to document B unchanged, bit for bit.
static void test_isolation(const TempDir *dir) {
    enum { T = 16 };
    int32_t scratch[T + 1], ids[2][49];
    for (int i = 0; i < 49; i++) ids[0][i] = ids[1][i] = i % 11 == 10 ? EOT : 40 + i;
    for (int i = 22; i < 32; i++) ids[1][i] = 200 + i % 7; // document 2, tokens 22..31, its eot stays
    MicroBatch batch[2];
    for (int k = 0; k < 2; k++) {
        TokenSet set = open_tokens(write_tokens(dir, k ? "changed.bin" : "original.bin", ids[k], 49, 2).text, VOCAB);
        microbatch_create(&batch[k], 3 * T);
        microbatch_clear(&batch[k]);
        Error error = {0};
        for (int64_t g = 0; g < 3; g++) check(packing_add_window(&batch[k], &set, g * T, T, g, PACK_VARLEN, EOT, scratch, &error), "window");
        tokens_close(&set);
    }
    int64_t differ_inside = 0, differ_outside = 0;
    for (int64_t n = 0; n < 3 * T; n++) {
        const bool differ =
            batch[0].ids[n] != batch[1].ids[n] || batch[0].targets[n] != batch[1].targets[n] || batch[0].positions[n] != batch[1].positions[n];
        *(n >= 22 && n <= 32 ? &differ_inside : &differ_outside) += differ;
    }
    check(batch[0].documents == batch[1].documents && memcmp(batch[0].cu_seqlens, batch[1].cu_seqlens, (size_t)(batch[0].documents + 1) * 4) == 0,
          "boundaries");
    check(differ_inside == 10 && differ_outside == 0, "%lld changes inside, %lld outside", (long long)differ_inside, (long long)differ_outside);
    microbatch_free(&batch[0]);
    microbatch_free(&batch[1]);
    printf("isolation: %lld positions differ inside the changed document, %lld outside (wanted 10, 0)\n", (long long)differ_inside,
           (long long)differ_outside);
}

// Writes `count` documents of the given lengths (with eot; -1 at the end: no last eot) where token = its index in the file.
static TokenSet write_documents(const TempDir *dir, const int64_t *lengths, int64_t count, int64_t *total) {
    *total = 0;
    for (int64_t d = 0; d < count; d++) *total += lengths[d];
    int32_t *ids = base_new((size_t)*total, sizeof *ids);
    int64_t at = 0;
    for (int64_t d = 0; d < count; d++) {
        for (int64_t i = 0; i < lengths[d]; i++, at++) ids[at] = i + 1 == lengths[d] ? 0 : (int32_t)at + 1; // eot is 0
    }
    Path path = write_tokens(dir, "documents.bin", ids, *total, 4);
    free(ids);
    return open_tokens(path.text, INT32_MAX);
}

static void test_fit(const TempDir *dir) {
    enum { COUNT = 3000 };
    int64_t lengths[COUNT];
    for (int64_t d = 0; d < COUNT; d++) {
        const uint32_t r = philox(rng_key(5, RNG_TEST), (uint64_t)d, 0).x[0];
        lengths[d] = r % 10 == 0 ? 1 : r % 10 == 1 ? 40 + r / 16 % 200 : 2 + r / 16 % 30;
    }
    lengths[0] = lengths[1] = lengths[1500] = lengths[COUNT - 1] = 1;                                      // empty documents
    lengths[2] = 2, lengths[3] = 65, lengths[4] = 66, lengths[5] = 129, lengths[6] = 130, lengths[7] = 64; // around T + 1
    int64_t total;
    TokenSet set = write_documents(dir, lengths, COUNT, &total);
    const int64_t Ts[] = {1, 7, 64, 4096};
    for (int k = 0; k < 4; k++) {
        const int64_t T = Ts[k];
        Pieces pieces;
        Error error = {0};
        check(pieces_create(&pieces, &set, T, 0, "--train", &error), "pieces: %s", error.text);
        int64_t trained = 0;
        for (int64_t d = 0; d < COUNT; d++) trained += lengths[d] - 1;
        check(pieces.positions == trained, "T %lld: trained positions", (long long)T);
        for (int shuffle = 0; shuffle < 2; shuffle++) {
            const Sampler sampler = sampler_create(9, pieces.count, shuffle);
            static FitBuffer fit;
            fit.rows = 0;
            unsigned char *seen = base_new((size_t)total + 1, 1);
            int32_t *scratch = base_new((size_t)T + 1, 4);
            MicroBatch batch;
            microbatch_create(&batch, T);
            int64_t rows = 0, tokens = 0, wrong = 0, ill = 0;
            for (int64_t buffer = 0; buffer < fit_buffers(&pieces); buffer++) {
                fit_load(&fit, &pieces, &sampler, T, 3, buffer);
                for (int row = 0; row < fit.rows; row++) {
                    microbatch_clear(&batch);
                    ill += !packing_add_row(&batch, &set, &pieces, &fit, row, T, 1, scratch, &error);
                    ill += !well_formed(&batch, 1, T) || batch.valid != batch.tokens || batch.tokens != fit.row_tokens[row] || batch.rows != 1;
                    for (int64_t n = 0; n < batch.tokens; n++) {
                        const int32_t id = batch.ids[n], target = batch.targets[n];
                        // the target is the token that follows in the same document, or its eot
                        wrong += id <= 0 || id > total || seen[id]++ || (target != 0 && target != id + 1) || batch.token_index[n] != T + n;
                    }
                    rows++;
                    tokens += batch.tokens;
                }
            }
            int64_t eots = 0;
            for (int64_t i = 0; i <= total; i++) eots += seen[i];
            const double padding = 1 - (double)tokens / ((double)rows * (double)T);
            check(wrong == 0 && ill == 0 && tokens == trained && eots == trained, "T %lld, shuffle %d: %lld wrong, %lld ill, %lld of %lld tokens",
                  (long long)T, shuffle, (long long)wrong, (long long)ill, (long long)tokens, (long long)trained);
            check(padding < (T == 4096 ? 0.5 : 0.04), "T %lld: padding %.4f", (long long)T, padding);
            printf("fit: T %lld, shuffle %s: %lld pieces, %lld rows, every trained position once, padding %.2f%%\n", (long long)T,
                   shuffle ? "on" : "off", (long long)pieces.count, (long long)rows, 100 * padding);
            microbatch_free(&batch);
            free(scratch);
            free(seen);
        }
        pieces_free(&pieces);
    }
    tokens_close(&set);

    int32_t alone[3] = {0, 0, 0};
    set = open_tokens(write_tokens(dir, "eots.bin", alone, 3, 2).text, VOCAB);
    Pieces pieces;
    Error error = {0};
    check(!pieces_create(&pieces, &set, 8, 0, "--train", &error) && error.code == CODE_INPUT && strstr(error.text, "no document"), "only eots: %s",
          error.text);
    tokens_close(&set);
    const int32_t id = 299;
    set = open_tokens(write_tokens(dir, "bad.bin", &id, 1, 2).text, VOCAB);
    set.vocab = 299;
    error.code = 0;
    check(!pieces_create(&pieces, &set, 8, 0, "--train", &error) && strstr(error.text, "got id 299"), "the scan checks ids: %s", error.text);
    tokens_close(&set);
}

// The row order of a shuffled buffer says nothing about row contents: first rows are not the long or the crowded ones.
static void test_fit_order(const TempDir *dir) {
    enum { COUNT = 1024, T = 64 };
    int64_t lengths[COUNT], total;
    for (int64_t d = 0; d < COUNT; d++) lengths[d] = d % 4 == 0 ? 2 + (d * 37) % 63 : 2 + (d * 11) % 12;
    TokenSet set = write_documents(dir, lengths, COUNT, &total);
    Pieces pieces;
    Error error = {0};
    check(pieces_create(&pieces, &set, T, 0, "--train", &error), "pieces");
    const Sampler sampler = sampler_create(11, pieces.count, true);
    static FitBuffer fit;
    fit.rows = 0;
    double first = 0, all = 0;
    for (int64_t epoch = 0; epoch < 40; epoch++) {
        fit_load(&fit, &pieces, &sampler, T, epoch, 0);
        first += (fit.row_begin[fit.rows / 4] - fit.row_begin[0]) / (double)(fit.rows / 4) / 40;
        all += fit.row_begin[fit.rows] / (double)fit.rows / 40;
    }
    check(fabs(first / all - 1) < 0.05, "documents per row: %.3f in the first quarter, %.3f in all", first, all);
    printf("fit order: documents per row %.3f in the first quarter, %.3f in all (bound 5%%)\n", first, all);
    pieces_free(&pieces);
    tokens_close(&set);
}

// Pieces that fill rows exactly leave no padding.
static void test_fit_exact(const TempDir *dir) {
    enum { COUNT = 512, T = 64 };
    int64_t lengths[COUNT], total;
    for (int64_t d = 0; d < COUNT; d++) lengths[d] = 1 + (d % 3 == 0 ? 40 : d % 3 == 1 ? 24 : 32); // 40 + 24 or 32 + 32
    TokenSet set = write_documents(dir, lengths, COUNT - COUNT % 6, &total);
    Pieces pieces;
    Error error = {0};
    check(pieces_create(&pieces, &set, T, 0, "--train", &error), "pieces");
    const Sampler sampler = sampler_create(11, pieces.count, true);
    static FitBuffer fit;
    fit.rows = 0;
    fit_load(&fit, &pieces, &sampler, T, 0, 0);
    check(fit.rows == (COUNT - COUNT % 6) / 2, "rows: got %d, wanted %d", fit.rows, (COUNT - COUNT % 6) / 2);
    printf("fit exact: %d rows of two pieces each, no padding\n", fit.rows);
    pieces_free(&pieces);
    tokens_close(&set);
}

int main(void) {
    TempDir dir = temp_create();
    test_fit_exact(&dir);
    test_windows(&dir);
    test_isolation(&dir);
    test_fit(&dir);
    test_fit_order(&dir);
    temp_remove(&dir);
    return finish();
}
