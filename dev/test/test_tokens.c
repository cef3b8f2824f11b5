// test_tokens.c: token files: both forms, sidecars, globs, sizes 0 to 5 GB, and every kind of damage.
#include "dev/test/token_files.h" // write_tokens, check
#include "llmc/tokens.h"          // the module

static void expect_error(const char *pattern, int64_t vocab, int code, const char *part, const char *what) {
    TokenSet set;
    Error error = {0};
    bool good = tokens_open(&set, pattern, "--train", &error);
    if (good) {
        good = tokens_check(&set, vocab, &error);
        tokens_close(&set);
    }
    check(!good && error.code == code && strstr(error.text, part) != NULL && strchr(error.text, '\n') == NULL,
          "%s: got code %d '%s', wanted %d and '%s'", what, error.code, error.text, code, part);
}

static void test_forms(const TempDir *dir) {
    int32_t ids[1000], got[1000];
    for (int i = 0; i < 1000; i++) ids[i] = (i * 7919) % 50257;
    for (int width = 2; width <= 4; width += 2) {
        Path path = write_tokens(dir, width == 2 ? "form_u16.bin" : "form_u32.bin", ids, 1000, width);
        TokenSet set = open_tokens(path.text, 50257);
        Error error = {0};
        check(set.tokens == 1000 && tokens_read(&set, 0, 1000, got, &error) && memcmp(ids, got, sizeof ids) == 0, "width %d: all ids", width);
        check(tokens_read(&set, 999, 1, got, &error) && got[0] == ids[999], "width %d: the last id", width);
        check(!tokens_read(&set, 999, 2, got, &error) && error.code == CODE_INPUT, "width %d: past the end is refused", width);
        tokens_close(&set);
    }
    int32_t wide = 70000;
    Path path = write_tokens(dir, "form_wide.bin", &wide, 1, 4);
    TokenSet set = open_tokens(path.text, 128256);
    Error error = {0};
    check(tokens_read(&set, 0, 1, got, &error) && got[0] == 70000, "an id above 65535");
    tokens_close(&set);
    printf("llm.c forms: uint16 and uint32\n");
}

static void test_sizes(const TempDir *dir) {
    int32_t ids[20000] = {0};
    const int64_t sizes[] = {0, 1, 8, 9, TOKENS_CHUNK_ - 1, TOKENS_CHUNK_, TOKENS_CHUNK_ + 1, 20000};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        for (int64_t k = 0; k < sizes[i]; k++) ids[k] = (int32_t)((k * 31 + 5) % 300);
        Path path = write_tokens(dir, "size.bin", ids, sizes[i], 2);
        TokenSet set = open_tokens(path.text, 300);
        static int32_t got[20000];
        Error error = {0};
        check(set.tokens == sizes[i] && tokens_read(&set, 0, sizes[i], got, &error) && memcmp(ids, got, (size_t)sizes[i] * 4) == 0, "%lld tokens",
              (long long)sizes[i]);
        tokens_close(&set);
    }
    printf("sizes: 0 to 20000 tokens, around the chunk of %d\n", TOKENS_CHUNK_);
}

static void test_damage(const TempDir *dir) {
    int32_t ids[100] = {1, 2, 3};
    Path good = write_tokens(dir, "damage.bin", ids, 100, 2);
    unsigned char bytes[1024 + 200];
    FILE *file = fopen(good.text, "rb");
    check(file != NULL && fread(bytes, 1, sizeof bytes, file) == sizeof bytes, "read back");
    fclose(file);
    struct {
        const char *what, *part;
        int32_t word, value;
        size_t size;
    } cases[] = {
        {"empty file", "wanted a header", -1, 0, 0},
        {"seven bytes", "wanted a header", -1, 0, 7},
        {"half a header", "truncated", -1, 0, 512},
        {"one byte short", "truncated: got 1223 bytes, wanted 1224", -1, 0, sizeof bytes - 1},
        {"foreign magic", "magic: got 1179403647, wanted 20240520", 0, 0x464c457f, sizeof bytes},
        {"wrong version", "version: got 2, wanted 1", 1, 2, sizeof bytes},
        {"uint32 magic with version 1", "version: got 1, wanted 7", 0, TOKENS_MAGIC_U32, sizeof bytes},
        {"negative count", "token count: got -5", 2, -5, sizeof bytes},
        {"count too large", "truncated", 2, INT32_MAX, sizeof bytes},
        {"count too small", "after the last token", 2, 99, sizeof bytes},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        unsigned char copy[sizeof bytes];
        memcpy(copy, bytes, sizeof copy);
        if (cases[i].word >= 0) memcpy(copy + 4 * cases[i].word, &cases[i].value, 4);
        Path path = write_bytes(dir, "damaged.bin", copy, cases[i].size);
        expect_error(path.text, 300, CODE_INPUT, cases[i].part, cases[i].what);
        expect_error(path.text, 300, CODE_INPUT, "damaged.bin", cases[i].what);
    }
    expect_error(temp_path(dir, "nothing*.bin").text, 300, CODE_INPUT, "--train: no file matches", "glob without a match");
    expect_error(temp_path(dir, "nothing.bin").text, 300, CODE_INPUT, "--train: no file matches", "missing file");
    expect_error(dir->path, 300, CODE_INPUT, "not a regular file", "a directory");
    ids[77] = 300;
    expect_error(write_tokens(dir, "id.bin", ids, 100, 2).text, 300, CODE_INPUT,
                 "id.bin: token 77: got id 300, wanted less than the vocabulary of 300", "id at the vocabulary");
    ids[77] = -1;
    expect_error(write_tokens(dir, "id.bin", ids, 100, 4).text, 300, CODE_INPUT, "token 77: got id 4294967295", "huge id");
    printf("damage: %zu headers, names, ids\n", sizeof cases / sizeof cases[0]);
}

static void test_glob(const TempDir *dir) {
    int32_t ids[4] = {1, 2, 3, 4};
    write_tokens(dir, "glob_b.bin", ids + 1, 2, 2);
    write_tokens(dir, "glob_a.bin", ids, 1, 2);
    write_tokens(dir, "glob_B.bin", ids, 0, 2);
    write_tokens(dir, "glob_c.bin", ids + 3, 1, 4);
    write_text(dir, "glob_a.json", "{\"tokenizer\": \"byte\", \"vocab_size\": 257, \"eot_id\": 256, \"documents\": 3, \"other\": [1]}");
    TokenSet set = open_tokens(temp_path(dir, "glob_*").text, 257);
    check(set.count == 4 && set.tokens == 4 && strstr(set.files[0].path, "glob_B") && strstr(set.files[1].path, "glob_a"),
          "four files in byte order");
    bool order = true;
    for (int i = 0; i < 4; i++) {
        int32_t got = 0;
        Error error = {0};
        order = order && tokens_read(&set, i, 1, &got, &error) && got == i + 1;
    }
    check(order, "tokens of all files in order");
    check(strcmp(set.info.tokenizer, "byte") == 0 && set.info.vocab == 257 && set.info.eot == 256 && set.info.documents == -1,
          "facts of the one .json");
    tokens_close(&set);
    write_text(dir, "glob_b.json", "{\"vocab_size\": 300}");
    expect_error(temp_path(dir, "glob_*").text, 300, CODE_INPUT, "vocab_size: got 300, wanted 257", "files that disagree");
    Path odd = write_tokens(dir, "odd[1]*.bin", ids, 4, 2);
    set = open_tokens(odd.text, 257);
    check(set.tokens == 4, "a name with glob characters");
    tokens_close(&set);
    printf("glob: order, sidecars beside, odd names\n");
}

static void test_sidecar(void) {
    struct {
        const char *text, *part; // NULL: good
    } cases[] = {
        {"{}", NULL},
        {"{\"tokenizer\": null, \"documents\": 0}", NULL},
        {"", "not JSON"},
        {"[1]", "wanted a JSON object"},
        {"{\"vocab_size\": 0}", "vocab_size"},
        {"{\"vocab_size\": 1e3}", "vocab_size"},
        {"{\"vocab_size\": 99999999999999999999}", "not JSON"},
        {"{\"vocab_size\": 10, \"eot_id\": 10}", "eot_id: wanted a whole number, 0 to 9"},
        {"{\"eot_id\": \"7\"}", "eot_id"},
        {"{\"documents\": -1}", "documents"},
        {"{\"tokenizer\": 5}", "tokenizer"},
        {"{\"tokenizer\": \"0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789"
         "0123456789012345678901234567890123456789012345678901234567890123456789012345678901234567890123456789"
         "01234567890123456789012345678901234567890123456789012345\"}",
         "tokenizer"},
        {"{\"eot_id\": 1, \"eot_id\": 2}", "not JSON"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        TokenInfo info;
        Error error = {0};
        const bool good = tokens_parse_info(cases[i].text, strlen(cases[i].text), "x.json", &info, &error);
        check(good == (cases[i].part == NULL) && (good || strstr(error.text, cases[i].part)), "sidecar '%s': '%s'", cases[i].text, error.text);
    }
    printf("sidecar: %zu texts\n", sizeof cases / sizeof cases[0]);
}

static void test_megatron(const TempDir *dir) {
    const int32_t lengths[] = {3, 0, 2, 1};
    const int64_t documents[] = {0, 1, 2, 4, 4};
    const int64_t expected[] = {0, 3, 3, 6, 6};
    static const struct {
        int code, width;
    } types[] = {{TOKEN_U8, 1}, {TOKEN_I8, 1}, {TOKEN_I16, 2}, {TOKEN_I32, 4}, {TOKEN_I64, 8}, {TOKEN_U16, 2}};
    for (size_t k = 0; k < sizeof types / sizeof types[0]; k++) {
        for (int64_t gap = 0; gap < 6; gap += 5) {
            unsigned char raw[6 * 8] = {0};
            for (int i = 0; i < 6; i++) raw[i * types[k].width] = (unsigned char)(100 + i);
            Path path = write_megatron(dir, "mega", raw, types[k].code, types[k].width, lengths, 4, documents, 5, gap);
            TokenSet set = open_tokens(path.text, 200);
            int32_t got[6];
            Error error = {0};
            bool same = set.tokens == 6 && tokens_read(&set, 0, 6, got, &error);
            for (int i = 0; same && i < 6; i++) same = got[i] == 100 + i;
            same = same && tokens_read(&set, 4, 2, got, &error) && got[0] == 104 && got[1] == 105;
            check(same, "type %d, gaps of %lld", types[k].code, (long long)gap);
            check(set.files[0].document_count == 4 && memcmp(set.files[0].documents, expected, sizeof expected) == 0, "documents");
            check(set.files[0].run_count == (gap ? 3 : 1), "runs: got %lld", (long long)set.files[0].run_count);
            tokens_close(&set);
        }
    }
    const int32_t one = -1;
    const int64_t whole[] = {0, 1}, backwards[] = {0, 2, 1, 4}, short_end[] = {0, 3};
    Path path = write_megatron(dir, "mega", &one, TOKEN_I32, 4, &(int32_t){1}, 1, whole, 2, 0);
    expect_error(path.text, 200, CODE_INPUT, "got id -1", "a negative id");
    const int16_t ids[6] = {1, 2, 3, 4, 5, 6};
    path = write_megatron(dir, "mega", ids, 7, 2, lengths, 4, documents, 5, 0);
    expect_error(path.text, 200, CODE_INPUT, "type code: got 7", "floating point ids");
    path = write_megatron(dir, "mega", ids, TOKEN_I16, 2, lengths, 4, backwards, 4, 0);
    expect_error(path.text, 200, CODE_INPUT, "document entry 2", "documents out of order");
    path = write_megatron(dir, "mega", ids, TOKEN_I16, 2, lengths, 4, short_end, 2, 0);
    expect_error(path.text, 200, CODE_INPUT, "document entry 1", "documents that end early");
    path = write_megatron(dir, "mega", ids, TOKEN_I16, 2, lengths, 4, documents, 5, 0);
    check(truncate(path.text, 11) == 0, "cut");
    expect_error(path.text, 200, CODE_INPUT, "reach past the file's 11 bytes", "a cut .bin");
    path = write_megatron(dir, "mega", ids, TOKEN_I16, 2, lengths, 4, documents, 5, 0);
    const Path idx = temp_path(dir, "mega.idx");
    unsigned char bytes[200];
    FILE *file = fopen(idx.text, "rb");
    const size_t size = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    bool refused = true;
    for (size_t cut = 0; cut < size; cut++) {
        TokenSet set;
        Error error = {0};
        write_bytes(dir, "mega.idx", bytes, cut);
        refused = refused && !tokens_open(&set, path.text, "--train", &error) && error.code == CODE_INPUT;
    }
    check(refused, "an .idx cut anywhere is refused");
    bytes[26] = 0x7f; // top byte of the sequence count, at 18
    bytes[25] = 0xff;
    write_bytes(dir, "mega.idx", bytes, size);
    expect_error(path.text, 200, CODE_INPUT, "do not fit", "a huge sequence count");
    printf("Megatron pairs: 6 integer types, contiguous and not, empty documents, damage\n");
}

// Sparse files: nothing is written but the last batch.
static void test_large(const TempDir *dir) {
    const struct {
        const char *name;
        int64_t tokens;
        int width;
    } cases[] = {{"large_u16.bin", INT32_MAX, 2}, {"large_u32.bin", 1400000000, 4}};
    for (int k = 0; k < 3; k++) {
        Path path;
        const int width = k < 2 ? cases[k].width : 2;
        const int64_t tokens = k < 2 ? cases[k].tokens : 2700000000, header = k < 2 ? TOKENS_HEADER_BYTES : 0;
        if (k < 2) {
            path = write_tokens(dir, cases[k].name, NULL, 0, width);
        } else { // more than 2^31 tokens: only a Megatron pair holds them
            const int32_t lengths[2] = {2000000000, 700000000};
            path = write_megatron(dir, "large_mega", "", TOKEN_U16, 2, (int32_t[2]){0, 0}, 2, (int64_t[2]){0, 2}, 2, 0);
            FILE *idx = fopen(temp_path(dir, "large_mega.idx").text, "r+b");
            const int64_t second = 2 * (int64_t)lengths[0];
            check(fseek(idx, 34, SEEK_SET) == 0 && fwrite(lengths, 4, 2, idx) == 2 && fseek(idx, 8, SEEK_CUR) == 0 &&
                      fwrite(&second, 8, 1, idx) == 1 && fclose(idx) == 0,
                  "index of the large pair");
        }
        const int32_t last[4] = {11, 22, 33, 44}, count = (int32_t)tokens;
        int fd = open(path.text, O_WRONLY);
        bool written = fd >= 0 && ftruncate(fd, header + tokens * width) == 0;
        if (k < 2) written = written && pwrite(fd, &count, 4, 8) == 4;
        for (int i = 0; i < 4; i++) written = written && pwrite(fd, &last[i], (size_t)width, header + (tokens - 4 + i) * width) == width;
        close(fd);
        check(written, "sparse file %s", path.text);
        if (!written) continue;
        TokenSet set = open_tokens(path.text, 50257); // too large to be read whole: this is quick
        int32_t got[6];
        Error error = {0};
        const bool read = tokens_read(&set, set.tokens - 6, 6, got, &error);
        check(read && set.tokens == tokens && got[1] == 0 && memcmp(got + 2, last, sizeof last) == 0, "last tokens of %lld: %s", (long long)tokens,
              error.text);
        tokens_close(&set);
        remove(path.text);
    }
    printf("large: sparse files of 4.3, 5.6 and 5.4 GB\n");
}

int main(void) {
    TempDir dir = temp_create();
    test_forms(&dir);
    test_sizes(&dir);
    test_damage(&dir);
    test_glob(&dir);
    test_sidecar();
    test_megatron(&dir);
    test_large(&dir);
    temp_remove(&dir);
    return finish();
}
