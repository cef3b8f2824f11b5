// tokenizer.h: between text and ids. Built in are bytes (ids 0..255, and 256 for <|endoftext|>) and byte-level BPE from files. Text is taken
// as it is: NUL, CR and bytes that are not UTF-8 survive, and "<|endoftext|>" in a text is thirteen bytes of text unless asked for.
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include "llmc/base.h"           // Error, fail
#include "llmc/tokenizer_json.h" // bpe_open, bpe_encode
#include <omp.h>                 // omp_get_max_threads

enum { TOKENIZER_BYTE_EOT = 256, TOKENIZER_BYTE_VOCAB = 257 };

typedef enum { TOKENIZER_NONE, TOKENIZER_BYTE, TOKENIZER_BPE } TokenizerKind;

typedef struct {
    TokenizerKind kind;
    int64_t vocab;
    int32_t eot; // -1: it has none
    Bpe *bpe;    // TOKENIZER_BPE
    int threads;
    BpeWork *work;   // (threads)
    TokenIds *parts; // (threads)
    char letter;     // text of the last byte that was decoded
} Tokenizer;

static inline Tokenizer tokenizer_byte(void) {
    return (Tokenizer){.kind = TOKENIZER_BYTE, .vocab = TOKENIZER_BYTE_VOCAB, .eot = TOKENIZER_BYTE_EOT};
}

// "byte", or the path of a tokenizer.json or of a directory with one or with vocab.json and merges.txt. tokenizer_close when true.
static inline bool tokenizer_open(Tokenizer *tokenizer, const char *name, Error *error) {
    *tokenizer = (Tokenizer){0};
    if (strcmp(name, "byte") == 0) return *tokenizer = tokenizer_byte(), true;
    Bpe *bpe;
    if (!bpe_open(&bpe, name, error)) return false;
    const int threads = omp_get_max_threads();
    *tokenizer = (Tokenizer){.kind = TOKENIZER_BPE, .vocab = bpe->vocab, .eot = bpe->eot, .bpe = bpe, .threads = threads};
    tokenizer->work = base_new((size_t)threads, sizeof *tokenizer->work);
    tokenizer->parts = base_new((size_t)threads, sizeof *tokenizer->parts);
    return true;
}

static inline void tokenizer_close(Tokenizer *tokenizer) {
    for (int i = 0; i < tokenizer->threads; i++) {
        bpe_work_free(&tokenizer->work[i]);
        token_ids_free(&tokenizer->parts[i]);
    }
    free(tokenizer->work);
    free(tokenizer->parts);
    bpe_close(tokenizer->bpe);
    *tokenizer = (Tokenizer){0};
}

// The path that a token file's .json means by `name`: beside the token file unless it is absolute. "byte" stays. False: no such file.
static inline bool tokenizer_resolve(const char *name, const char *token_file, char path[4300]) {
    const char *slash = name[0] == '/' ? NULL : strrchr(token_file, '/');
    const int folder = slash != NULL ? (int)(slash + 1 - token_file) : 0;
    if (strcmp(name, "byte") == 0) return strcpy(path, name), true;
    return name[0] != '\0' && folder < 4300 && snprintf(path, 4300, "%.*s%s", folder, token_file, name) < 4300 && access(path, R_OK) == 0;
}

// Appends the ids of a text of at most BPE_TEXT_LIMIT bytes, but no eot. `special`: special tokens that the text spells are those tokens.
// Long texts are cut where that changes nothing, and the parts shared by the threads: the ids do not depend on their number.
static inline void tokenizer_encode(Tokenizer *tokenizer, const char *text, int64_t bytes, bool special, TokenIds *out) {
    enum { PART_BYTES = 1 << 15 };
    if (tokenizer->kind == TOKENIZER_BYTE) {
        token_ids_reserve(out, bytes);
        for (int64_t i = 0; i < bytes; i++) out->ids[out->count++] = (unsigned char)text[i];
    }
    if (tokenizer->kind != TOKENIZER_BPE) return;
    const int parts = (int)max_i64(1, min_i64(tokenizer->threads, bytes / PART_BYTES));
    if (parts == 1) {
        bpe_encode(tokenizer->bpe, &tokenizer->work[0], text, bytes, special, out);
        return;
    }
    int64_t *begin = base_new((size_t)parts + 1, sizeof *begin);
    for (int p = 1; p < parts; p++) { // a part that finds no place to be cut at is empty
        const int64_t from = begin[p - 1], until = bytes * p / parts;
        begin[p] = from + (until > from ? bpe_cut(tokenizer->bpe, text + from, until - from) : 0);
    }
    begin[parts] = bytes;
#pragma omp parallel for schedule(static, 1) num_threads(parts)
    for (int p = 0; p < parts; p++) {
        tokenizer->parts[p].count = 0;
        bpe_encode(tokenizer->bpe, &tokenizer->work[p], text + begin[p], begin[p + 1] - begin[p], special, &tokenizer->parts[p]);
    }
    for (int p = 0; p < parts; p++) token_ids_append(out, tokenizer->parts[p].ids, tokenizer->parts[p].count);
    free(begin);
}

// The last place in (0, bytes) where the text may be cut and each part encoded alone with the same result; 0: none.
static inline int64_t tokenizer_cut(const Tokenizer *tokenizer, const char *text, int64_t bytes) {
    return tokenizer->kind == TOKENIZER_BPE ? bpe_cut(tokenizer->bpe, text, bytes) : bytes - 1;
}

// The text of one id, not terminated, until the next call. It may end inside a UTF-8 sequence. Ids outside the vocabulary, which a model with
// padded rows may produce, become U+FFFD.
static inline const char *tokenizer_decode(Tokenizer *tokenizer, int32_t id, int64_t *bytes) {
    const char *text = tokenizer->kind == TOKENIZER_BPE ? bpe_text(tokenizer->bpe, id, bytes) : NULL;
    if (text != NULL) return text;
    if (tokenizer->kind == TOKENIZER_BYTE && id >= 0 && id < 256) {
        tokenizer->letter = (char)(unsigned char)id;
        return *bytes = 1, &tokenizer->letter;
    }
    text = tokenizer->kind == TOKENIZER_BYTE && id == TOKENIZER_BYTE_EOT ? "<|endoftext|>" : "\xEF\xBF\xBD";
    return *bytes = (int64_t)strlen(text), text;
}

// The id of a special token by its text, or -1.
static inline int32_t tokenizer_special(const Tokenizer *tokenizer, const char *text) {
    if (tokenizer->kind == TOKENIZER_BPE) return bpe_special_id(tokenizer->bpe, text);
    return tokenizer->kind == TOKENIZER_BYTE && strcmp(text, "<|endoftext|>") == 0 ? TOKENIZER_BYTE_EOT : -1;
}

#endif
