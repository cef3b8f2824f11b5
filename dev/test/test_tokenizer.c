// test_tokenizer.c: the byte tokenizer keeps every byte; names of tokenizers are resolved.
#include "dev/test/token_files.h" // check, temp_create
#include "llmc/tokenizer.h"       // the module

static bool decodes(Tokenizer *tokenizer, int32_t id, const char *wanted) {
    int64_t bytes;
    const char *text = tokenizer_decode(tokenizer, id, &bytes);
    return bytes == (int64_t)strlen(wanted) && memcmp(text, wanted, (size_t)bytes) == 0;
}

int main(void) {
    Tokenizer tokenizer;
    Error error = {0};
    check(tokenizer_open(&tokenizer, "byte", &error) && tokenizer.vocab == 257 && tokenizer.eot == 256, "byte: 257 ids, eot 256");
    char text[256 + 13], joined[sizeof text + 16];
    for (int i = 0; i < 256; i++) text[i] = (char)i;
    memcpy(text + 256, "<|endoftext|>", 13);
    TokenIds ids = {0};
    tokenizer_encode(&tokenizer, text, sizeof text, true, &ids);
    int64_t at = 0;
    bool small = true;
    for (int64_t i = 0; i < ids.count; i++) {
        int64_t bytes;
        small = small && ids.ids[i] >= 0 && ids.ids[i] < 256;
        const char *piece = tokenizer_decode(&tokenizer, ids.ids[i], &bytes);
        memcpy(joined + at, piece, (size_t)bytes);
        at += bytes;
    }
    check(ids.count == sizeof text && small, "a byte is a token; text never makes an eot");
    check(at == sizeof text && memcmp(joined, text, sizeof text) == 0, "decode gives every byte back");
    check(decodes(&tokenizer, 256, "<|endoftext|>") && tokenizer_special(&tokenizer, "<|endoftext|>") == 256, "eot has a name");
    check(tokenizer_special(&tokenizer, "a") == -1, "nothing else is special");
    const int32_t outside[] = {257, 50256, -1, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 5; i++) check(decodes(&tokenizer, outside[i], "\xEF\xBF\xBD"), "id %d: U+FFFD", outside[i]);
    tokenizer_close(&tokenizer);
    check(!tokenizer_open(&tokenizer, "/no/such\n", &error) && error.code == CODE_INPUT && strstr(error.text, "/no/such?: cannot open"),
          "unknown: %s", error.text);
    ids.count = 0;
    tokenizer_encode(&tokenizer, "a", 1, false, &ids);
    check(decodes(&tokenizer, 65, "\xEF\xBF\xBD") && ids.count == 0, "without a tokenizer nothing is text");
    token_ids_free(&ids);

    const TempDir dir = temp_create();
    const Path beside = write_text(&dir, "t.json", "{}"), data = temp_path(&dir, "data.bin");
    char path[4300];
    check(tokenizer_resolve("t.json", data.text, path) && strcmp(path, beside.text) == 0, "a name is looked for beside the token file: %s", path);
    check(tokenizer_resolve(beside.text, "elsewhere/x.bin", path) && strcmp(path, beside.text) == 0, "a path is taken as it is: %s", path);
    check(tokenizer_resolve("byte", data.text, path) && strcmp(path, "byte") == 0, "byte is byte");
    check(!tokenizer_resolve("none.json", data.text, path) && !tokenizer_resolve("", data.text, path), "no such file, no name");
    temp_remove(&dir);
    printf("byte tokenizer: 256 bytes, eot, ids outside; names\n");
    return finish();
}
