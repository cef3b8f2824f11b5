// test_tokenizer_bpe.c: byte-level BPE against ids of the tokenizers library (dev/fixtures/tokenizer, written by
// dev/reference/tokenizer_fixtures.py); any bytes come back; cutting and threads change nothing; long words take no quadratic time; foreign
// and damaged files are refused with the line that says why.
#include "dev/test/token_files.h" // check, temp_create
#include "llmc/rng.h"             // philox
#include "llmc/tokenizer.h"       // the module

#define FIXTURES "dev/fixtures/tokenizer/"

static Tokenizer open_fixture(const char *name) {
    char path[300];
    Tokenizer tokenizer;
    Error error = {0};
    snprintf(path, sizeof path, FIXTURES "%s", name);
    if (!tokenizer_open(&tokenizer, path, &error)) die_error(&error);
    return tokenizer;
}

static char *read_all(const char *path, size_t *bytes) {
    Error error = {0};
    char *text = bpe_read_file_(path, bytes, &error);
    if (text == NULL) die_error(&error);
    return text;
}

// Bytes of the ids, one behind the other, in out; returns their number.
static int64_t decode(Tokenizer *tokenizer, const TokenIds *ids, char *out, int64_t room) {
    int64_t total = 0;
    for (int64_t i = 0; i < ids->count; i++) {
        int64_t bytes;
        const char *text = tokenizer_decode(tokenizer, ids->ids[i], &bytes);
        if (total + bytes > room) return -1;
        memcpy(out + total, text, (size_t)bytes);
        total += bytes;
    }
    return total;
}

static bool same_ids(const TokenIds *got, const json_t *wanted) {
    bool same = got->count == (int64_t)json_array_size(wanted);
    for (int64_t i = 0; same && i < got->count; i++) same = got->ids[i] == json_integer_value(json_array_get(wanted, (size_t)i));
    return same;
}

static json_t *load(const char *name) {
    char path[300];
    snprintf(path, sizeof path, FIXTURES "%s", name);
    json_t *root = json_load_file(path, JSON_ALLOW_NUL, NULL);
    if (root == NULL) die(1, "cannot read %s", path);
    return root;
}

static void test_ids(const char *name, const char *ids_name, bool exact) {
    Tokenizer tokenizer = open_fixture(name);
    json_t *texts = load("texts.json"), *wanted = load(ids_name), *text;
    size_t i, wrong = 0, tokens = 0, differ = 0;
    TokenIds ids = {0};
    static char back[1 << 16];
    json_array_foreach(texts, i, text) {
        const int64_t bytes = (int64_t)json_string_length(text);
        for (int special = 0; special < 2; special++) {
            ids.count = 0;
            tokenizer_encode(&tokenizer, json_string_value(text), bytes, special, &ids);
            const json_t *plain = json_array_get(json_array_get(wanted, 0), i), *found = json_array_get(json_array_get(wanted, 1), i);
            const bool other = json_is_array(found); // null: as without
            const bool good = same_ids(&ids, special && other ? found : plain);
            differ += special && other;
            wrong += !good;
            check(good, "%s: text %zu, special %d: other ids than the library's", name, i, special);
            tokens += (size_t)ids.count;
            const int64_t got = decode(&tokenizer, &ids, back, sizeof back);
            check(!exact || (got == bytes && memcmp(back, json_string_value(text), (size_t)bytes) == 0), "%s: text %zu: other bytes come back",
                  name, i);
        }
    }
    check(i >= 60 && differ >= 3, "%s: %zu texts, %zu with special tokens", name, i, differ);
    printf("  %-28s %zu texts, %zu tokens: %zu differ from the library's\n", name, i, tokens, wrong);
    json_decref(texts);
    json_decref(wanted);
    token_ids_free(&ids);
    tokenizer_close(&tokenizer);
}

// Random bytes, mostly not UTF-8: encoding and decoding gives them back.
static void test_bytes(const char *name) {
    Tokenizer tokenizer = open_fixture(name);
    TokenIds ids = {0};
    int wrong = 0;
    for (uint64_t n = 0; n < 2000; n++) {
        char text[64], back[64];
        const int64_t bytes = (int64_t)(philox(rng_key(1, RNG_TEST), n, 99).x[0] % 64);
        for (int64_t i = 0; i < bytes; i++) {
            const Philox r = philox(rng_key(1, RNG_TEST), n, (uint64_t)i);
            static const unsigned char often[] = {0xE2, 0x80, 0x99, 0xF0, 0x9F, ' ', '\n', '\''};
            text[i] = (char)(r.x[0] % 2 ? often[r.x[1] % 8] : r.x[1] % 256);
        }
        ids.count = 0;
        tokenizer_encode(&tokenizer, text, bytes, false, &ids);
        wrong += decode(&tokenizer, &ids, back, sizeof back) != bytes || memcmp(text, back, (size_t)bytes) != 0;
    }
    check(wrong == 0, "%s: %d of 2000 random byte strings do not come back", name, wrong);
    token_ids_free(&ids);
    tokenizer_close(&tokenizer);
}

// The README many times, as one text, in pieces by tokenizer_cut, and by several threads.
static void test_cuts(const char *name) {
    Tokenizer tokenizer = open_fixture(name);
    size_t bytes;
    char *text = read_all("README.md", &bytes);
    const int64_t copies = 40, total = copies * (int64_t)bytes; // long enough for all threads
    char *many = base_new((size_t)total, 1);
    for (int64_t i = 0; i < copies; i++) memcpy(many + i * (int64_t)bytes, text, bytes);
    TokenIds whole = {0}, pieces = {0}, shared = {0};
    BpeWork work = {0};
    bpe_encode(tokenizer.bpe, &work, many, total, false, &whole);
    int64_t cuts = 0;
    for (int64_t at = 0, step; at < total; at += step, cuts++) {
        int64_t room = min_i64(total - at, 100 + cuts % 1000); // doubled until there is a place
        while ((step = room < total - at ? tokenizer_cut(&tokenizer, many + at, room) : room) == 0) room = min_i64(total - at, 2 * room);
        bpe_encode(tokenizer.bpe, &work, many + at, step, false, &pieces);
    }
    tokenizer_encode(&tokenizer, many, total, false, &shared);
    const size_t size = (size_t)whole.count * sizeof(int32_t);
    check(cuts > 100 && pieces.count == whole.count && memcmp(pieces.ids, whole.ids, size) == 0, "%s: %lld pieces: other ids", name,
          (long long)cuts);
    check(shared.count == whole.count && memcmp(shared.ids, whole.ids, size) == 0, "%s: %d threads: other ids", name, tokenizer.threads);
    char *back = base_new((size_t)total, 1);
    check(decode(&tokenizer, &whole, back, total) == total && memcmp(back, many, (size_t)total) == 0, "%s: other text comes back", name);
    printf("  %-28s %lld bytes, %lld tokens: the same in %lld pieces and with %d threads\n", name, (long long)total, (long long)whole.count,
           (long long)cuts, tokenizer.threads);
    bpe_work_free(&work);
    token_ids_free(&whole), token_ids_free(&pieces), token_ids_free(&shared);
    free(text), free(many), free(back);
    tokenizer_close(&tokenizer);
}

// Words of a million bytes; runs of spaces and of marks.
static void test_long(const char *name) {
    Tokenizer tokenizer = open_fixture(name);
    enum { BYTES = 1 << 20 };
    char *text = base_new(BYTES, 1), *back = base_new(BYTES, 1);
    static const char *const units[] = {"a", "th", " ", "\n ", "=", "\xCC\x81", "\xE6\x97\xA5", "1", "'s"};
    TokenIds ids = {0};
    const double start = clock_ms();
    for (int u = 0; u < 9; u++) {
        for (int64_t i = 0; i < BYTES; i++) text[i] = units[u][(size_t)i % strlen(units[u])];
        ids.count = 0;
        tokenizer_encode(&tokenizer, text, BYTES, false, &ids);
        check(decode(&tokenizer, &ids, back, BYTES) == BYTES && memcmp(text, back, BYTES) == 0, "%s: a long run does not come back", name);
    }
    const double ms = clock_ms() - start;
    check(ms < 60000, "%s: %.0f ms for nine runs of a million bytes", name, ms);
    printf("  %-28s nine runs of a million bytes: %.0f ms\n", name, ms);
    token_ids_free(&ids);
    free(text), free(back);
    tokenizer_close(&tokenizer);
}

// ----------------------------------------------------------------------------
// Words and NFC by themselves

static void test_words(void) {
    static const struct {
        BpePattern pattern;
        const char *words; // with | between
    } rows[] = {
        {BPE_GPT2, "it|'s| we|'ll|x| I|'|M| '|s|'t|a"},
        {BPE_GPT2, "1234| 12|  \n| x|\r|\n|y|  "},
        {BPE_GPT2, "a|\xC2\xA0|b|\xE2\x80\x83|\xE2\x80\x83|c| \xE6\x97\xA5"
                   "a|!?"},
        {BPE_DIGITS_3, "it|'S|ab|'RE|b|'Ll|c|'vE|d|'M|e|'T|f|'D|g|'xh|'l"},
        {BPE_DIGITS_3, "'\xC5\xBF|ab|'\xC5\xBF|'re"},
        {BPE_DIGITS_3, "123|45| |123|4|a|.b| c|!!|\td|\xC2\xA0"
                       "e"},
        {BPE_DIGITS_3, "a| !\n\r\n|x|  \n\n|  | y|\n|z|  \r| "},
        {BPE_DIGITS_3, "\xC2\x85y|\xFFz|\xF0\x9F\x98\x80q|\xE1\xA0\x8Er|\xE2\x85\xA7|a"},
        {BPE_DIGITS_1, "1|2|3| |4|a|'Ve"},
    };
    Bpe bpe = {.unicode = unicode_create()};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        char text[200], got[400];
        int64_t bytes = 0, length = 0;
        bpe.pattern = rows[i].pattern;
        for (const char *c = rows[i].words; *c != '\0'; c++) {
            if (*c != '|') text[bytes++] = *c;
        }
        for (int64_t at = 0, next; at < bytes; at = next) {
            next = bpe.pattern == BPE_GPT2 ? bpe_next_gpt2_(&bpe, text, at, bytes) : bpe_next_digits_(&bpe, text, at, bytes);
            if (at > 0) got[length++] = '|';
            memcpy(got + length, text + at, (size_t)(next - at));
            length += next - at;
        }
        got[length] = '\0';
        check(strcmp(got, rows[i].words) == 0, "words %zu: got %s, wanted %s", i, got, rows[i].words);
    }
    free(bpe.unicode);
}

static void test_nfc(void) {
    static const char *const rows[][2] = {
        {"abc \xC3\xA9", "abc \xC3\xA9"},
        {"e\xCC\x81", "\xC3\xA9"},
        {"xe\xCC\x81y", "x\xC3\xA9y"},
        {"a\xCC\x85\xCC\x81", "a\xCC\x85\xCC\x81"},                           // a mark of the same class stands between
        {"a\xCC\xA7\xCC\x81", "\xC3\xA1\xCC\xA7"},                            // one of another does not
        {"s\xCC\x87\xCC\xA3", "\xE1\xB9\xA9"},                                // sorted, then two steps
        {"\xE1\x84\x92\xE1\x85\xA5\xE1\x86\xAB", "\xED\x97\x8C"},             // three letters of Hangul
        {"\xEA\xB0\x80\xE1\x86\xA8\xE1\x86\xA8", "\xEA\xB0\x81\xE1\x86\xA8"}, // a syllable takes one more, not two
        {"\xE2\x84\xAB", "\xC3\x85"},                                         // the sign of Angstrom
        {"\xE0\xA5\x98", "\xE0\xA4\x95\xE0\xA4\xBC"},                         // never composed
        {"\xCC\x81"
         "a",
         "\xCC\x81"
         "a"},
        {"e\xFF\xCC\x81", "e\xFF\xCC\x81"},
    };
    Unicode *unicode = unicode_create();
    UnicodeNfc nfc = {0};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        int64_t bytes = (int64_t)strlen(rows[i][0]);
        const char *got = unicode_nfc(unicode, &nfc, rows[i][0], &bytes);
        check(bytes == (int64_t)strlen(rows[i][1]) && memcmp(got, rows[i][1], (size_t)bytes) == 0, "NFC %zu: got %.*s, wanted %s", i, (int)bytes,
              got, rows[i][1]);
    }
    unicode_nfc_free(&nfc);
    free(unicode);
    // every code there and back; what is no UTF-8
    int64_t wrong = 0;
    for (uint32_t code = 0, back; code < UNICODE_BYTES; code++) {
        char text[4];
        const int size = utf8_put(code, text);
        const bool surrogate = code >= 0xD800 && code < 0xE000;
        wrong += surrogate ? utf8_next(text, size, &back) != 1 : utf8_next(text, size, &back) != size || back != code;
    }
    check(wrong == 0, "UTF-8: %lld codes do not come back", (long long)wrong);
    static const char *const bad[] = {"\x80",
                                      "\xC0\x80",
                                      "\xC1\xBF",
                                      "\xE0\x80\x80",
                                      "\xE0\x9F\xBF",
                                      "\xF0\x80\x80\x80",
                                      "\xF0\x8F\xBF\xBF",
                                      "\xF4\x90\x80\x80",
                                      "\xF5\x80\x80\x80",
                                      "\xED\xA0\x80",
                                      "\xE2\x82",
                                      "\xC3"
                                      "a",
                                      "\xFF"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        uint32_t code;
        check(utf8_next(bad[i], (int64_t)strlen(bad[i]), &code) == 1 && code == (uint32_t)UNICODE_BYTES + (unsigned char)bad[i][0],
              "not UTF-8: %zu", i);
    }
}

// ----------------------------------------------------------------------------
// Refusals: a fixture with one text replaced

static void refused(const char *file, const char *find, const char *replace, const char *wanted) {
    char path[300];
    size_t bytes;
    snprintf(path, sizeof path, FIXTURES "%s", file);
    char *text = read_all(path, &bytes), *at = strstr(text, find);
    if (at == NULL) die(1, "%s has no %s", path, find);
    const size_t before = (size_t)(at - text), rest = bytes - before - strlen(find), total = before + strlen(replace) + rest;
    char *changed = base_new(total + 1, 1);
    memcpy(changed, text, before);
    memcpy(changed + before, replace, strlen(replace));
    memcpy(changed + before + strlen(replace), at + strlen(find), rest);
    Bpe *bpe;
    Error error = {0};
    const bool good = bpe_parse(&bpe, changed, total, file, &error);
    check(!good && bpe == NULL && error.code == CODE_INPUT && strncmp(error.text, file, strlen(file)) == 0 && strstr(error.text, wanted) != NULL,
          "'%s' for '%s': wanted a refusal with '%s', got '%s'", replace, find, wanted, good ? "none" : error.text);
    bpe_close(bpe);
    free(text), free(changed);
}

static void test_refusals(void) {
    refused("qwen.json", "\"type\":\"NFC\"", "\"type\":\"NFKC\"", "normalizer: got 'NFKC', wanted none or NFC");
    refused("gpt2.json", "\"normalizer\":null", "\"normalizer\":{\"type\":\"Lowercase\"}", "normalizer: got 'Lowercase'");
    refused("gpt2.json", "\"truncation\":null", "\"truncation\":{\"max_length\":9}", "truncation is not built in");
    refused("gpt2.json", "\"padding\":null", "\"padding\":{\"length\":9}", "padding is not built in");
    refused("gpt2.json", "\"type\":\"BPE\"", "\"type\":\"Unigram\"", "model: got 'Unigram', wanted BPE");
    refused("gpt2.json", "\"pre_tokenizer\":{\"type\":\"ByteLevel\"", "\"pre_tokenizer\":{\"type\":\"Metaspace\"",
            "pre_tokenizer: got 'Metaspace'");
    refused("gpt2.json", "\"use_regex\":true", "\"use_regex\":false", "use_regex false and no Split");
    refused("llama3.json", "\\\\p{N}{1,3}", "\\\\p{N}{1,2}", "is not built in, wanted that of GPT-2, Llama 3 or Qwen 2");
    refused("llama3.json", "\"Isolated\"", "\"Removed\"", "Split: wanted a Regex, behavior Isolated");
    refused("llama3.json", "\"invert\":false", "\"invert\":true", "invert false");
    refused("llama3.json", "\"use_regex\":false", "\"use_regex\":true", "behind Split");
    refused("gpt2.json", "\"decoder\":{\"type\":\"ByteLevel\"", "\"decoder\":{\"type\":\"Metaspace\"",
            "decoder: got 'Metaspace', wanted ByteLevel");
    refused("gpt2.json", "\"dropout\":null", "\"dropout\":0.1", "model: dropout is not built in");
    refused("gpt2.json", "\"continuing_subword_prefix\":null", "\"continuing_subword_prefix\":\"##\"", "continuing_subword_prefix");
    refused("gpt2.json", "\"end_of_word_suffix\":null", "\"end_of_word_suffix\":\"</w>\"", "end_of_word_suffix");
    refused("gpt2.json", "\"lstrip\":false", "\"lstrip\":true", "lstrip is not built in");
    refused("gpt2.json", "\"single_word\":false", "\"single_word\":true", "single_word is not built in");
    refused("gpt2.json", "\"id\":0", "\"id\":7", "got id 7, wanted 0 (as in the vocabulary)");
    refused("llama3.json", "\"id\":601", "\"id\":602", "got id 602, wanted 601 (the next one");
    refused("qwen.json", "\"content\":\"im_st\"", "\"content\":\"café>\"", "twice");
    refused("gpt2.json", "\"!\":1,", "\"!\":2,", "have the same id 2");
    refused("gpt2.json", "\"!\":1,", "\"!\":1000,", "'!': wanted an id from 0 to 599");
    refused("gpt2.json", "\"!\":1,", "\"!\":-1,", "wanted an id from 0 to 599");
    refused("gpt2.json", "\"!\":1,", "\"!\":\"1\",", "wanted an id from 0 to 599");
    refused("gpt2.json", "\"!\":1,", "\"!!!!!!\":1,", "no token for the byte 0x21");
    refused("gpt2.json", "\"!\":1,", "\"!\":1,\"!\":1,", "not JSON: duplicate object key");
    refused("gpt2.json", "\"!\":1,", "", "wanted an id from 0 to 598");
    refused("gpt2.json", "\"merges\":[[", "\"merges\":[[\"a\",\"\xF0\x9F\x98\x80\"],[",
            "merges: number 0: '\xF0\x9F\x98\x80' is not in the vocabulary");
    refused("gpt2.json", "\"merges\":[[", "\"merges\":[[\"~\",\"~\"],[", "merges: number 0: '~~' is not in the vocabulary");
    refused("gpt2.json", "\"merges\":[[", "\"merges\":[[\"a\"],[", "merges: number 0: wanted two tokens");
    refused("gpt2.json", "\"merges\":[[", "\"merges\":[5,[", "merges: number 0: wanted two tokens");
    refused("prefix.json", "\"merges\":[\"", "\"merges\":[\"a b c\",\"", "merges: number 0: wanted two tokens");
    refused("gpt2.json", "{", "[", "not JSON");
    refused("gpt2.json", "\"model\"", "\"mode\"", "no model: not a tokenizer.json");

    const TempDir dir = temp_create();
    Bpe *bpe;
    Error error = {0};
    check(!bpe_open(&bpe, dir.path, &error) && strstr(error.text, "holds no tokenizer.json, and not both of vocab.json and merges.txt"), "%s",
          error.text);
    write_text(&dir, "vocab.json", "{\"a\": 0}");
    write_text(&dir, "merges.txt", "a a\n");
    error = (Error){0};
    check(!bpe_open(&bpe, dir.path, &error) && strstr(error.text, "vocab.json: vocab: no token for the byte 0x00"), "%s", error.text);
    const Path huge = write_text(&dir, "huge.json", "");
    check(truncate(huge.text, BPE_FILE_LIMIT_BYTES + 1) == 0, "a file of 32 MiB");
    error = (Error){0};
    check(!bpe_open(&bpe, huge.text, &error) && error.code == CODE_INPUT && strstr(error.text, "wanted a tokenizer of at most"), "%s", error.text);
    temp_remove(&dir);
}

static void test_pair_lines(void) {
    size_t bytes;
    char *vocab = read_all(FIXTURES "pair/vocab.json", &bytes);
    static const char *const bad[] = {"#version: 0.2\ni n\nin\n", "i n\n\nt h\n", "i n x\n", "i  n\n", " n\n", "i n\ni zzz\n"};
    static const char *const wanted[] = {"line 3: wanted", "line 2: wanted", "line 1: wanted",
                                         "line 1: wanted", "line 1: wanted", "number 1: 'zzz'"};
    for (int i = 0; i < 6; i++) {
        Bpe *bpe;
        Error error = {0};
        check(!bpe_parse_pair(&bpe, vocab, bytes, "v", bad[i], strlen(bad[i]), "m", &error) && strstr(error.text, wanted[i]), "line %d: %s", i,
              error.text);
    }
    Bpe *bpe;
    Error error = {0};
    check(bpe_parse_pair(&bpe, vocab, bytes, "v", "i n\r\n", 5, "m", &error), "lines may end in CR LF: %s", error.text);
    bpe_close(bpe);
    free(vocab);
}

static void test_eot(void) {
    static const struct {
        const char *name, *eot;
        int32_t id;
    } rows[] = {{"gpt2.json", "<|endoftext|>", 0},
                {"pair", "<|endoftext|>", 0},
                {"llama3.json", "<|end_of_text|>", 601},
                {"prefix.json", "<|endoftext|>", 600}};
    for (int i = 0; i < 4; i++) {
        Tokenizer tokenizer = open_fixture(rows[i].name);
        int64_t bytes;
        const char *text = tokenizer_decode(&tokenizer, tokenizer.eot, &bytes);
        check(tokenizer.eot == rows[i].id && bytes == (int64_t)strlen(rows[i].eot) && memcmp(text, rows[i].eot, (size_t)bytes) == 0,
              "%s: eot %d, wanted %d", rows[i].name, tokenizer.eot, rows[i].id);
        text = tokenizer_decode(&tokenizer, (int32_t)tokenizer.vocab, &bytes);
        check(bytes == 3 && memcmp(text, "\xEF\xBF\xBD", 3) == 0, "%s: an id outside is U+FFFD", rows[i].name);
        check(tokenizer_special(&tokenizer, "<no such>") == -1, "%s: no such token", rows[i].name);
        tokenizer_close(&tokenizer);
    }
}

int main(void) {
    test_words();
    test_nfc();
    test_ids("gpt2.json", "gpt2.ids.json", true);
    test_ids("pair", "gpt2.ids.json", true);
    test_ids("llama3.json", "llama3.ids.json", true);
    test_ids("qwen.json", "qwen.ids.json", false);     // NFC changes text
    test_ids("prefix.json", "prefix.ids.json", false); // a space comes in front
    static const char *const exact[] = {"gpt2.json", "llama3.json"};
    for (int i = 0; i < 2; i++) {
        test_bytes(exact[i]);
        test_cuts(exact[i]);
        test_long(exact[i]);
    }
    test_cuts("qwen.json");
    test_refusals();
    test_pair_lines();
    test_eot();
    return finish();
}
