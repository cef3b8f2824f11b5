// test_tokenizer.c: the byte tokenizer keeps every byte.
#include "dev/test/token_files.h" // check
#include "llmc/tokenizer.h"       // the module

int main(void) {
    Tokenizer tokenizer;
    Error error = {0};
    check(tokenizer_open(&tokenizer, "byte", &error) && tokenizer.vocab == 257 && tokenizer.eot == 256, "byte: 257 ids, eot 256");
    char text[256 + 13], back[16], joined[sizeof text + 16];
    for (int i = 0; i < 256; i++) text[i] = (char)i;
    memcpy(text + 256, "<|endoftext|>", 13);
    int32_t ids[sizeof text];
    const int64_t count = tokenizer_encode(&tokenizer, text, sizeof text, ids);
    int64_t at = 0;
    bool small = true;
    for (int64_t i = 0; i < count; i++) {
        small = small && ids[i] >= 0 && ids[i] < 256;
        const int bytes = tokenizer_decode(&tokenizer, ids[i], back);
        memcpy(joined + at, back, (size_t)bytes);
        at += bytes;
    }
    check(count == sizeof text && small, "a byte is a token; text never makes an eot");
    check(at == sizeof text && memcmp(joined, text, sizeof text) == 0, "decode gives every byte back");
    check(tokenizer_decode(&tokenizer, 256, back) == 13 && memcmp(back, "<|endoftext|>", 13) == 0, "eot has a name");
    const int32_t outside[] = {257, 50256, -1, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 5; i++)
        check(tokenizer_decode(&tokenizer, outside[i], back) == 3 && memcmp(back, "\xEF\xBF\xBD", 3) == 0, "id %d: U+FFFD", outside[i]);
    check(!tokenizer_open(&tokenizer, "gpt2\n", &error) && error.code == CODE_INPUT && strstr(error.text, "got 'gpt2?'"), "unknown: %s",
          error.text);
    check(tokenizer_decode(&tokenizer, 65, back) == 3 && tokenizer_encode(&tokenizer, "a", 1, ids) == 0, "without a tokenizer nothing is text");
    printf("byte tokenizer: 256 bytes, eot, ids outside\n");
    return finish();
}
