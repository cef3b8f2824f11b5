// fuzz_tokens.c: a .bin of llm.c's form with any bytes: opening, the whole check and reading never do worse than an error.
#include "llmc/tokens.h" // tokens_open_data_, tokens_check, tokens_read
#include <stddef.h>      // size_t
#include <sys/mman.h>    // memfd_create

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size > 1 << 16) return 0;
    TokenFile file = {.path = base_copy_text("fuzz"), .fd = memfd_create("fuzz", 0)};
    if (file.fd < 0 || write(file.fd, data, size) != (ssize_t)size) abort();
    Error error = {0};
    TokenSet set = {.files = &file, .count = 1};
    if (tokens_open_data_(&file, (int64_t)size, &error)) {
        set.tokens = file.tokens;
        int32_t ids[100];
        const int64_t count = min_i64(100, set.tokens);
        if (tokens_check(&set, 50257, &error) && !tokens_read(&set, set.tokens - count, count, ids, &error)) abort(); // checked, so readable
    }
    if (error.code != 0 && error.code != CODE_INPUT) abort();
    tokens_file_close_(&file);
    return 0;
}
