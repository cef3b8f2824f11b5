// fuzz_sidecar.c: the .json beside a token file with any bytes: an error, or facts within their bounds.
#include "llmc/tokens.h" // tokens_parse_info
#include <stddef.h>      // size_t

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    TokenInfo info;
    Error error = {0};
    if (tokens_parse_info((const char *)data, size, "fuzz.json", &info, &error)) {
        const bool bounded = info.vocab >= 0 && info.vocab <= INT32_MAX && info.eot >= -1 && (info.vocab == 0 || info.eot < info.vocab) &&
                             info.documents >= -1 && memchr(info.tokenizer, '\0', sizeof info.tokenizer) != NULL;
        if (!bounded) abort();
    } else if (error.code != CODE_INPUT || strchr(error.text, '\n') != NULL) {
        abort();
    }
    return 0;
}
