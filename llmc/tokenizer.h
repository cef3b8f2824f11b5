// tokenizer.h: between text and ids. One tokenizer is built in: bytes, ids 0..255, and 256 for <|endoftext|>. Text is
// taken verbatim: NUL, CR and bytes that are not UTF-8 survive, and "<|endoftext|>" in a text is thirteen bytes of text.
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include "llmc/base.h" // Error, fail

enum { TOKENIZER_BYTE_EOT = 256, TOKENIZER_BYTE_VOCAB = 257 };

typedef enum { TOKENIZER_NONE, TOKENIZER_BYTE } TokenizerKind;

typedef struct {
    TokenizerKind kind;
    int64_t vocab;
    int32_t eot;
} Tokenizer;

static inline Tokenizer tokenizer_byte(void) { return (Tokenizer){TOKENIZER_BYTE, TOKENIZER_BYTE_VOCAB, TOKENIZER_BYTE_EOT}; }

// `name` as in a token file's .json; fails for a tokenizer that is not built in.
static inline bool tokenizer_open(Tokenizer *tokenizer, const char *name, Error *error) {
    *tokenizer = (Tokenizer){0};
    if (strcmp(name, "byte") != 0) return fail(error, CODE_INPUT, "tokenizer: got '%.100s', wanted 'byte' (the one that is built in)", name);
    *tokenizer = tokenizer_byte();
    return true;
}

// ids (bytes) = text; returns their number. Appends no eot.
static inline int64_t tokenizer_encode(const Tokenizer *tokenizer, const char *text, int64_t bytes, int32_t *ids) {
    if (tokenizer->kind != TOKENIZER_BYTE) return 0;
    for (int64_t i = 0; i < bytes; i++) ids[i] = (unsigned char)text[i];
    return bytes;
}

// Text of one id, not terminated; returns its bytes (at most 13). Ids outside the vocabulary, which a model with padded
// rows may produce, become U+FFFD.
static inline int tokenizer_decode(const Tokenizer *tokenizer, int32_t id, char text[16]) {
    if (tokenizer->kind == TOKENIZER_BYTE && id >= 0 && id < 256) {
        text[0] = (char)(unsigned char)id;
        return 1;
    }
    const char *special = tokenizer->kind == TOKENIZER_BYTE && id == TOKENIZER_BYTE_EOT ? "<|endoftext|>" : "\xEF\xBF\xBD";
    memcpy(text, special, strlen(special));
    return (int)strlen(special);
}

#endif
