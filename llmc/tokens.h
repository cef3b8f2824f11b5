// tokens.h: token files. Opens the files of a path or glob, checks their headers against their sizes, and reads ids by
// position as int32, each checked against the vocabulary. Two forms: llm.c's .bin (256 x int32 header, then uint16 or
// uint32 ids) and Megatron-LM's pair (.bin of plain ids, .idx of lengths, offsets and documents beside it). A .json
// beside a .bin may name tokenizer, vocabulary size, end-of-text id and document count.
// Does not choose what to read (sampler.h) and does not know documents inside llm.c files (packing.h looks for the eot id).
#ifndef LLMC_TOKENS_H
#define LLMC_TOKENS_H

#include "llmc/base.h" // Error, fail, base_new
#include <fcntl.h>     // open
#include <glob.h>      // glob
#include <jansson.h>   // json_loadb
#include <sys/mman.h>  // mmap
#include <sys/stat.h>  // fstat

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "token files are little-endian and read as they are");

enum {
    TOKENS_HEADER_BYTES = 1024, // 256 x int32: [0] magic, [1] version, [2] tokens
    TOKENS_MAGIC_U16 = 20240520,
    TOKENS_VERSION_U16 = 1,
    TOKENS_MAGIC_U32 = 20240801,
    TOKENS_VERSION_U32 = 7,
    TOKENS_SMALL_BYTES = 16 << 20,  // files up to this size are checked whole at the start
    TOKENS_SIDECAR_BYTES = 1 << 20, // largest .json
};

// How an id is stored: the codes of Megatron's .idx, and one more for llm.c's second form.
typedef enum {
    TOKEN_U8 = 1,
    TOKEN_I8 = 2,
    TOKEN_I16 = 3,
    TOKEN_I32 = 4,
    TOKEN_I64 = 5,
    TOKEN_U16 = 8,
    TOKEN_U32 = 9,
} TokenType;

// What the .json says; each field may be unknown.
typedef struct {
    char tokenizer[256]; // "byte", or where its file is (from this one's directory, or absolute); "" unknown
    int64_t vocab;       // 0 unknown
    int64_t eot;         // -1 unknown
    int64_t documents;   // -1 unknown
} TokenInfo;

// Tokens from `token` on, up to the next run, lie at `byte` and following. An llm.c file is one run; so is a Megatron
// file whose sequences follow each other.
typedef struct {
    int64_t token, byte;
} TokenRun;

typedef struct {
    char *path;
    int fd;
    TokenType type;
    int64_t tokens;
    int64_t start;          // index in the whole set of the file's first token
    TokenRun *runs;         // (run_count)
    int64_t run_count;      // 0 when the file is empty
    int64_t *documents;     // (document_count + 1) first token of each, ends with `tokens`; NULL: ended by the eot id
    int64_t document_count; // known only with an .idx
} TokenFile;

typedef struct {
    TokenFile *files; // sorted by name
    int64_t count;    // files
    int64_t tokens;   // of all files
    TokenInfo info;   // agreed on by all that have a .json; documents is their sum, -1 when one does not say
    int64_t vocab;    // ids must be smaller; 0 until tokens_check
} TokenSet;

static inline int64_t tokens_width_(TokenType type) {
    switch (type) {
    case TOKEN_U8:
    case TOKEN_I8: return 1;
    case TOKEN_I16:
    case TOKEN_U16: return 2;
    case TOKEN_I32:
    case TOKEN_U32: return 4;
    case TOKEN_I64: return 8;
    }
    return 0;
}

static inline void tokens_file_close_(TokenFile *file) {
    if (file->fd >= 0) close(file->fd); // opened for reading: closing cannot lose anything
    free(file->path);
    free(file->runs);
    free(file->documents);
    *file = (TokenFile){.fd = -1};
}

static inline void tokens_close(TokenSet *set) {
    for (int64_t i = 0; i < set->count; i++) tokens_file_close_(&set->files[i]);
    free(set->files);
    *set = (TokenSet){0};
}

// ----------------------------------------------------------------------------
// Headers. The parsers work on memory, so that fuzzers can call them.

// `header` holds the first `size` bytes of a file of `file_bytes`.
static inline bool tokens_parse_header(const void *header, size_t size, int64_t file_bytes, TokenFile *file, Error *error) {
    int32_t words[3];
    if (size < sizeof words) {
        return fail(error, CODE_INPUT, "%.300s: not a token file: got %lld bytes, wanted a header of %d", file->path, (long long)file_bytes,
                    TOKENS_HEADER_BYTES);
    }
    memcpy(words, header, sizeof words);
    if (words[0] == TOKENS_MAGIC_U16) {
        file->type = TOKEN_U16;
    } else if (words[0] == TOKENS_MAGIC_U32) {
        file->type = TOKEN_U32;
    } else {
        return fail(error, CODE_INPUT, "%.300s: not a token file: magic: got %d, wanted %d (uint16) or %d (uint32), or an .idx beside the .bin",
                    file->path, words[0], TOKENS_MAGIC_U16, TOKENS_MAGIC_U32);
    }
    const int32_t version = file->type == TOKEN_U16 ? TOKENS_VERSION_U16 : TOKENS_VERSION_U32;
    if (words[1] != version) return fail(error, CODE_INPUT, "%.300s: version: got %d, wanted %d", file->path, words[1], version);
    if (words[2] < 0)
        return fail(error, CODE_INPUT, "%.300s: token count: got %d, wanted 0 to 2147483647 (split larger sets into files)", file->path, words[2]);
    const int64_t wanted = TOKENS_HEADER_BYTES + words[2] * tokens_width_(file->type);
    if (file_bytes != wanted) {
        return fail(error, CODE_INPUT, "%.300s: %s: got %lld bytes, wanted %lld for the %d tokens of its header", file->path,
                    file_bytes < wanted ? "truncated" : "bytes after the last token", (long long)file_bytes, (long long)wanted, words[2]);
    }
    file->tokens = words[2];
    if (file->tokens > 0) {
        file->runs = base_new(1, sizeof(TokenRun));
        file->runs[0] = (TokenRun){0, TOKENS_HEADER_BYTES};
        file->run_count = 1;
    }
    return true;
}

static inline int64_t tokens_load_i64_(const unsigned char *at) {
    int64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline bool tokens_parse_idx_sequences_(const unsigned char *lengths, const unsigned char *pointers, int64_t sequences, int64_t bin_bytes,
                                               int64_t *first_token, TokenFile *file, Error *error) {
    const int64_t width = tokens_width_(file->type);
    int64_t end_byte = -1, capacity = 0;
    for (int64_t s = 0; s < sequences; s++) {
        int32_t length;
        memcpy(&length, lengths + 4 * s, sizeof length);
        const int64_t byte = tokens_load_i64_(pointers + 8 * s);
        if (length < 0) return fail(error, CODE_INPUT, "%.300s: .idx: length of sequence %lld: got %d", file->path, (long long)s, length);
        if (byte < 0 || byte > bin_bytes || length * width > bin_bytes - byte) {
            return fail(error, CODE_INPUT, "%.300s: .idx: sequence %lld: %d tokens at byte %lld reach past the file's %lld bytes (truncated?)",
                        file->path, (long long)s, length, (long long)byte, (long long)bin_bytes);
        }
        first_token[s] = file->tokens;
        if (length > 0 && byte != end_byte) {
            if (file->run_count == capacity) {
                capacity = 2 * capacity + 1;
                file->runs = base_grow(file->runs, (size_t)capacity, sizeof(TokenRun));
            }
            file->runs[file->run_count++] = (TokenRun){file->tokens, byte};
        }
        if (length > 0) end_byte = byte + length * width;
        if (__builtin_add_overflow(file->tokens, length, &file->tokens))
            return fail(error, CODE_INPUT, "%.300s: .idx: too many tokens", file->path);
    }
    first_token[sequences] = file->tokens;
    return true;
}

// Layout: "MMIDIDX\0\0", u64 version, u8 type, u64 sequences, u64 entries of the document index, int32 lengths[sequences],
// int64 byte offsets[sequences], int64 document index[entries]: first sequence of each document, ends with `sequences`.
static inline bool tokens_parse_idx(const void *data, size_t size, int64_t bin_bytes, TokenFile *file, Error *error) {
    enum { MAGIC = 9, FIXED = MAGIC + 8 + 1 + 8 + 8 };
    const unsigned char *bytes = data;
    if (size < FIXED) return fail(error, CODE_INPUT, "%.300s: .idx: truncated: got %zu bytes, wanted at least %d", file->path, size, FIXED);
    if (memcmp(bytes, "MMIDIDX\0\0", MAGIC) != 0) {
        return fail(error, CODE_INPUT, "%.300s: .idx: not an index: got '%.7s', wanted 'MMIDIDX'", file->path, (const char *)bytes);
    }
    const int64_t version = tokens_load_i64_(bytes + MAGIC), sequences = tokens_load_i64_(bytes + MAGIC + 9);
    const int64_t entries = tokens_load_i64_(bytes + MAGIC + 17);
    if (version != 1) return fail(error, CODE_INPUT, "%.300s: .idx: version: got %lld, wanted 1", file->path, (long long)version);
    file->type = (TokenType)bytes[MAGIC + 8];
    if (tokens_width_(file->type) == 0 || file->type == TOKEN_U32) {
        return fail(error, CODE_INPUT, "%.300s: .idx: type code: got %d, wanted 1 to 5 or 8 (integers)", file->path, bytes[MAGIC + 8]);
    }
    const int64_t limit = (int64_t)(size / 8);
    if (sequences < 0 || sequences > limit || entries < 1 || entries > limit || (size_t)(FIXED + 12 * sequences + 8 * entries) != size) {
        return fail(error, CODE_INPUT, "%.300s: .idx: got %zu bytes, which do not fit its %lld sequences and %lld document entries", file->path,
                    size, (long long)sequences, (long long)entries);
    }
    const unsigned char *lengths = bytes + FIXED, *pointers = lengths + 4 * sequences, *documents = pointers + 8 * sequences;
    int64_t *first_token = base_new((size_t)sequences + 1, sizeof(int64_t));
    bool good = tokens_parse_idx_sequences_(lengths, pointers, sequences, bin_bytes, first_token, file, error);
    file->document_count = entries - 1;
    file->documents = base_new((size_t)entries, sizeof(int64_t));
    int64_t previous = 0;
    for (int64_t d = 0; good && d < entries; d++) {
        const int64_t sequence = tokens_load_i64_(documents + 8 * d);
        if (sequence < previous || sequence > sequences || (d == 0 && sequence != 0) || (d == entries - 1 && sequence != sequences)) {
            good = fail(error, CODE_INPUT, "%.300s: .idx: document entry %lld: got sequence %lld, wanted a rising order from 0 to %lld", file->path,
                        (long long)d, (long long)sequence, (long long)sequences);
            break;
        }
        previous = sequence;
        file->documents[d] = first_token[sequence];
    }
    free(first_token);
    return good;
}

static inline bool tokens_info_number_(const json_t *root, const char *field, int64_t low, int64_t high, const char *name, int64_t *value,
                                       Error *error) {
    const json_t *item = json_object_get(root, field);
    if (item == NULL || json_is_null(item)) return true;
    if (!json_is_integer(item) || json_integer_value(item) < low || json_integer_value(item) > high) {
        return fail(error, CODE_INPUT, "%.300s: %s: wanted a whole number, %lld to %lld", name, field, (long long)low, (long long)high);
    }
    *value = json_integer_value(item);
    return true;
}

// The .json beside a token file: {"tokenizer": "byte", "vocab_size": 257, "eot_id": 256, "documents": 12}; other fields
// are somebody else's.
static inline bool tokens_parse_info(const char *text, size_t size, const char *name, TokenInfo *info, Error *error) {
    *info = (TokenInfo){.eot = -1, .documents = -1};
    json_error_t where;
    json_t *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &where);
    if (root == NULL) return fail(error, CODE_INPUT, "%.300s: line %d: not JSON: %.100s", name, where.line, where.text);
    bool good = json_is_object(root) || fail(error, CODE_INPUT, "%.300s: wanted a JSON object", name);
    const json_t *tokenizer = good ? json_object_get(root, "tokenizer") : NULL;
    if (tokenizer != NULL && !json_is_null(tokenizer)) {
        if (!json_is_string(tokenizer) || json_string_length(tokenizer) >= sizeof info->tokenizer) {
            good = fail(error, CODE_INPUT, "%.300s: tokenizer: wanted a name of at most %zu bytes", name, sizeof info->tokenizer - 1);
        } else {
            memcpy(info->tokenizer, json_string_value(tokenizer), json_string_length(tokenizer) + 1);
        }
    }
    good = good && tokens_info_number_(root, "vocab_size", 1, INT32_MAX, name, &info->vocab, error);
    good = good && tokens_info_number_(root, "eot_id", 0, (info->vocab > 0 ? info->vocab : INT32_MAX) - 1, name, &info->eot, error);
    good = good && tokens_info_number_(root, "documents", 0, INT64_MAX, name, &info->documents, error);
    json_decref(root);
    return good;
}

// ----------------------------------------------------------------------------
// Opening

static inline bool tokens_ends_with_(const char *path, const char *suffix) {
    const size_t length = strlen(path), tail = strlen(suffix);
    return length >= tail && strcmp(path + length - tail, suffix) == 0;
}

// PATH.bin -> PATH + suffix; other names get the suffix behind.
static inline char *tokens_beside_(const char *path, const char *suffix) {
    const size_t stem = strlen(path) - (tokens_ends_with_(path, ".bin") ? 4 : 0);
    char *name = base_new(stem + strlen(suffix) + 1, 1);
    memcpy(name, path, stem);
    strcpy(name + stem, suffix);
    return name;
}

// Reads exactly `bytes` at `offset`; 0 done, -1 failed (errno), 1 the file ends before.
static inline int tokens_pread_(int fd, void *to, size_t bytes, int64_t offset) {
    for (size_t done = 0; done < bytes;) {
        ssize_t got = pread(fd, (char *)to + done, bytes - done, (off_t)(offset + (int64_t)done));
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return got < 0 ? -1 : 1;
        done += (size_t)got;
    }
    return 0;
}

// Opens a regular file for reading; -1 and an error when it cannot be one.
static inline int tokens_open_regular_(const char *path, int64_t *bytes, Error *error) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // O_NONBLOCK: a FIFO must not hang the open
    if (fd < 0) {
        fail(error, CODE_INPUT, "%.300s: cannot open: %s%s", path, strerror(errno), errno == EMFILE ? " (raise 'ulimit -n')" : "");
        return -1;
    }
    struct stat status;
    if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
        fail(error, CODE_INPUT, "%.300s: not a regular file", path);
        close(fd);
        return -1;
    }
    *bytes = (int64_t)status.st_size;
    return fd;
}

static inline bool tokens_open_idx_(TokenFile *file, const char *idx_path, int64_t bin_bytes, Error *error) {
    int64_t bytes;
    int fd = tokens_open_regular_(idx_path, &bytes, error);
    if (fd < 0) return false;
    void *data = bytes > 0 ? mmap(NULL, (size_t)bytes, PROT_READ, MAP_PRIVATE, fd, 0) : NULL;
    bool good = data != MAP_FAILED || fail(error, CODE_INPUT, "%.300s: cannot read: %s", idx_path, strerror(errno));
    good = good && tokens_parse_idx(data != NULL ? data : "", (size_t)bytes, bin_bytes, file, error);
    if (data != NULL && data != MAP_FAILED) munmap(data, (size_t)bytes);
    close(fd);
    return good;
}

// Opens what `file->fd` and `file->path` name: .bin of `file_bytes`, with an .idx or alone.
static inline bool tokens_open_data_(TokenFile *file, int64_t file_bytes, Error *error) {
    char *idx = tokens_beside_(file->path, ".idx");
    bool good;
    if (tokens_ends_with_(file->path, ".bin") && access(idx, F_OK) == 0) {
        good = tokens_open_idx_(file, idx, file_bytes, error);
    } else {
        unsigned char header[TOKENS_HEADER_BYTES];
        const size_t size = (size_t)min_i64(file_bytes, TOKENS_HEADER_BYTES);
        good = tokens_pread_(file->fd, header, size, 0) == 0 || fail(error, CODE_INPUT, "%.300s: cannot read: %s", file->path, strerror(errno));
        good = good && tokens_parse_header(header, size, file_bytes, file, error);
    }
    free(idx);
    return good;
}

// Reads the .json beside `path`, if there is one; *info says "unknown" otherwise.
static inline bool tokens_read_info(const char *path, TokenInfo *info, Error *error) {
    *info = (TokenInfo){.eot = -1, .documents = -1};
    char *name = tokens_beside_(path, ".json");
    if (access(name, F_OK) != 0) {
        free(name);
        return true;
    }
    int64_t bytes = 0;
    int fd = tokens_open_regular_(name, &bytes, error);
    bool good = fd >= 0;
    if (good && bytes > TOKENS_SIDECAR_BYTES)
        good = fail(error, CODE_INPUT, "%.300s: got %lld bytes, wanted a short .json", name, (long long)bytes);
    if (good) {
        char *text = base_new((size_t)bytes + 1, 1);
        good = tokens_pread_(fd, text, (size_t)bytes, 0) == 0 || fail(error, CODE_INPUT, "%.300s: cannot read: %s", name, strerror(errno));
        good = good && tokens_parse_info(text, (size_t)bytes, name, info, error);
        free(text);
    }
    if (fd >= 0) close(fd);
    free(name);
    return good;
}

// Folds one file's .json into the set's: files of one set must agree.
static inline bool tokens_merge_info_(TokenSet *set, const TokenFile *file, const TokenInfo *info, Error *error) {
    TokenInfo *all = &set->info;
    if (all->tokenizer[0] == '\0') memcpy(all->tokenizer, info->tokenizer, sizeof all->tokenizer);
    if (all->vocab == 0) all->vocab = info->vocab;
    if (all->eot < 0) all->eot = info->eot;
    if (info->tokenizer[0] != '\0' && strcmp(all->tokenizer, info->tokenizer) != 0) {
        return fail(error, CODE_INPUT, "%.300s: tokenizer: got '%s', wanted '%s' as in the files before it", file->path, info->tokenizer,
                    all->tokenizer);
    }
    if (info->vocab > 0 && info->vocab != all->vocab) {
        return fail(error, CODE_INPUT, "%.300s: vocab_size: got %lld, wanted %lld as in the files before it", file->path, (long long)info->vocab,
                    (long long)all->vocab);
    }
    if (info->eot >= 0 && info->eot != all->eot) {
        return fail(error, CODE_INPUT, "%.300s: eot_id: got %lld, wanted %lld as in the files before it", file->path, (long long)info->eot,
                    (long long)all->eot);
    }
    const int64_t documents = file->documents != NULL ? file->document_count : info->documents;
    if (documents < 0 || all->documents < 0 || __builtin_add_overflow(all->documents, documents, &all->documents)) all->documents = -1;
    return true;
}

static inline bool tokens_add_(TokenSet *set, const char *path, Error *error) {
    TokenFile *file = &set->files[set->count++];
    *file = (TokenFile){.path = base_copy_text(path), .start = set->tokens};
    int64_t bytes;
    file->fd = tokens_open_regular_(path, &bytes, error);
    TokenInfo info;
    if (file->fd < 0 || !tokens_open_data_(file, bytes, error) || !tokens_read_info(path, &info, error)) return false;
    if (__builtin_add_overflow(set->tokens, file->tokens, &set->tokens)) return fail(error, CODE_INPUT, "%.300s: too many tokens", path);
    return tokens_merge_info_(set, file, &info, error);
}

static inline int tokens_compare_paths_(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

// Opens a path, or every file that matches a glob, in the order of their names (bytes, whatever the locale). `flag`
// names the set in messages. Matches that end in .json or .idx belong to a .bin and are passed over.
static inline bool tokens_open(TokenSet *set, const char *pattern, const char *flag, Error *error) {
    *set = (TokenSet){.info = {.eot = -1}};
    if (access(pattern, F_OK) == 0) { // a name that exists is that file, whatever '[' or '*' it contains
        set->files = base_new(1, sizeof(TokenFile));
        if (tokens_add_(set, pattern, error)) return true;
        tokens_close(set);
        return false;
    }
    glob_t found;
    int status = glob(pattern, GLOB_NOSORT, NULL, &found);
    if (status != 0) {
        if (status != GLOB_NOMATCH) globfree(&found);
        return fail(error, CODE_INPUT, "%s: no file matches '%.300s'%s", flag, pattern, status == GLOB_NOMATCH ? "" : " (directory unreadable?)");
    }
    qsort(found.gl_pathv, found.gl_pathc, sizeof found.gl_pathv[0], tokens_compare_paths_);
    set->files = base_new(found.gl_pathc, sizeof(TokenFile));
    bool good = true;
    for (size_t i = 0; good && i < found.gl_pathc; i++) {
        const char *path = found.gl_pathv[i];
        if (!tokens_ends_with_(path, ".json") && !tokens_ends_with_(path, ".idx")) good = tokens_add_(set, path, error);
    }
    globfree(&found);
    if (good && set->count == 0) good = fail(error, CODE_INPUT, "%s: no token file matches '%.300s', only .json or .idx", flag, pattern);
    if (!good) tokens_close(set);
    return good;
}

// ----------------------------------------------------------------------------
// Reading

// The file that holds token `position` of the set.
static inline const TokenFile *tokens_file_at(const TokenSet *set, int64_t position) {
    int64_t low = 0, high = set->count; // the last file whose start is not behind: of equal starts the others are empty
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (set->files[middle].start <= position) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return &set->files[low];
}

// Reads ids of one contiguous piece of a file (at most TOKENS_CHUNK_) from `byte`; `first` is for messages.
enum { TOKENS_CHUNK_ = 8192 };
static inline bool tokens_read_chunk_(const TokenSet *set, const TokenFile *file, int64_t first, int64_t byte, int64_t count, int32_t *out,
                                      Error *error) {
    union {
        uint8_t u8[TOKENS_CHUNK_];
        int8_t i8[TOKENS_CHUNK_];
        uint16_t u16[TOKENS_CHUNK_];
        int16_t i16[TOKENS_CHUNK_];
        uint32_t u32[TOKENS_CHUNK_];
        int32_t i32[TOKENS_CHUNK_];
        int64_t i64[TOKENS_CHUNK_];
    } raw;
    const int status = tokens_pread_(file->fd, &raw, (size_t)(count * tokens_width_(file->type)), byte);
    if (status != 0) {
        return fail(error, CODE_INPUT, "%.300s: token %lld: %s", file->path, (long long)first,
                    status < 0 ? strerror(errno) : "the file has become shorter");
    }
    const uint64_t limit = set->vocab > 0 ? (uint64_t)set->vocab : (uint64_t)INT32_MAX + 1;
    uint64_t largest = 0; // a negative id is a huge one
#define TOKENS_CONVERT(field)                                                                                                                      \
    for (int64_t i = 0; i < count; i++) {                                                                                                          \
        const uint64_t id = (uint64_t)(int64_t)raw.field[i];                                                                                       \
        largest = id > largest ? id : largest;                                                                                                     \
        out[i] = (int32_t)id;                                                                                                                      \
        if (report && id >= limit)                                                                                                                 \
            return fail(error, CODE_INPUT, TOKENS_BAD_ID, file->path, (long long)(first + i), (long long)id, (long long)limit);                    \
    }                                                                                                                                              \
    break
#define TOKENS_BAD_ID "%.300s: token %lld: got id %lld, wanted less than the vocabulary of %lld (--vocab, or another tokenizer's file?)"
    // The first pass only finds the largest id, without branches; the second, on a bad chunk, finds which.
    for (int pass = 0; pass < 2; pass++) {
        const bool report = pass == 1;
        switch (file->type) {
        case TOKEN_U8: TOKENS_CONVERT(u8);
        case TOKEN_I8: TOKENS_CONVERT(i8);
        case TOKEN_I16: TOKENS_CONVERT(i16);
        case TOKEN_U16: TOKENS_CONVERT(u16);
        case TOKEN_I32: TOKENS_CONVERT(i32);
        case TOKEN_U32: TOKENS_CONVERT(u32);
        case TOKEN_I64: TOKENS_CONVERT(i64);
        }
        if (largest < limit) return true;
    }
#undef TOKENS_CONVERT
#undef TOKENS_BAD_ID
    return false;
}

// out (count) = ids `position`.. of the set; the range lies inside one file.
static inline bool tokens_read(const TokenSet *set, int64_t position, int64_t count, int32_t *out, Error *error) {
    const TokenFile *file = tokens_file_at(set, position);
    int64_t at = position - file->start;
    const int64_t end = at + count;
    if (at < 0 || end > file->tokens) {
        return fail(error, CODE_INPUT, "%.300s: tokens %lld to %lld: wanted inside its %lld", file->path, (long long)at, (long long)end,
                    (long long)file->tokens);
    }
    int64_t low = 0, high = file->run_count; // the run of `at`
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        if (file->runs[middle].token <= at) {
            low = middle;
        } else {
            high = middle;
        }
    }
    while (at < end) {
        const int64_t run_end = low + 1 < file->run_count ? file->runs[low + 1].token : file->tokens;
        const int64_t chunk = min_i64(min_i64(end, run_end) - at, TOKENS_CHUNK_);
        const int64_t byte = file->runs[low].byte + (at - file->runs[low].token) * tokens_width_(file->type);
        if (!tokens_read_chunk_(set, file, at, byte, chunk, out, error)) return false;
        at += chunk;
        out += chunk;
        if (at == run_end) low++;
    }
    return true;
}

// Sets the vocabulary that ids are checked against from now on, and checks small files whole, so that a wrong file is
// refused before training and not after hours.
static inline bool tokens_check(TokenSet *set, int64_t vocab, Error *error) {
    set->vocab = vocab;
    int32_t ids[TOKENS_CHUNK_];
    for (int64_t f = 0; f < set->count; f++) {
        const TokenFile *file = &set->files[f];
        if (file->tokens > TOKENS_SMALL_BYTES / tokens_width_(file->type)) continue;
        for (int64_t at = 0; at < file->tokens; at += TOKENS_CHUNK_) {
            if (!tokens_read(set, file->start + at, min_i64(TOKENS_CHUNK_, file->tokens - at), ids, error)) return false;
        }
    }
    return true;
}

#endif
