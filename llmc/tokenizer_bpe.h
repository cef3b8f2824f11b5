// tokenizer_bpe.h: byte-level BPE: text to ids and back, the ids that the tokenizers library gives with add_special_tokens=False. Three
// pre-tokenizers, NFC, added tokens. Text may be any bytes: one that is not UTF-8 is a symbol (neither letter, number nor space), so that
// decoding gives every byte back. Reading tokenizers from files: tokenizer_json.h.
#ifndef LLMC_TOKENIZER_BPE_H
#define LLMC_TOKENIZER_BPE_H

#include "llmc/tokenizer_unicode.h" // Unicode, unicode_nfc, utf8_next
#include <xxhash.h>                 // XXH3_64bits

// How text is cut into words before merging, by the regular expressions of GPT-2 and of its successors:
//   BPE_GPT2       's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//   BPE_DIGITS_3   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
//   BPE_DIGITS_1   the same with \p{N} for \p{N}{1,3}
typedef enum { BPE_GPT2, BPE_DIGITS_3, BPE_DIGITS_1 } BpePattern;

typedef struct {
    uint64_t pair; // left id in the upper half, right id in the lower
    int32_t rank;  // the lowest is merged first; -1: a free place
    int32_t id;    // of the two together
} BpeMerge;

// A token that is found in the text itself, before words and merges.
typedef struct {
    int32_t id;
    const char *text;
    int64_t bytes;
    bool special;    // found only when asked for
    bool normalized; // looked for after NFC
} BpeAdded;

typedef struct {
    int64_t vocab;
    int32_t eot;       // -1: none
    char *text;        // of all ids, one behind the other
    int64_t *begin;    // (vocab + 1): where each begins
    int32_t byte[256]; // id of each byte
    BpeMerge *merges;  // hash table by pair
    int merge_bits;    // log2 of its places
    int32_t *words;    // hash table by text: ids that text can reach; -1: a free place
    int word_bits;
    BpeAdded *added; // sorted by the first byte, longer ones first
    int64_t added_count, added_first[257];
    Unicode *unicode;
    BpePattern pattern;
    bool prefix_space; // text that does not begin with a space gets one
    bool nfc;
    bool ignore_merges; // a word that is in the vocabulary is that token
    bool added_blank;   // an added token contains a space or newline
} Bpe;

static inline void bpe_close(Bpe *bpe) {
    if (bpe == NULL) return;
    for (int64_t i = 0; i < bpe->added_count; i++) free((char *)bpe->added[i].text);
    free(bpe->text);
    free(bpe->begin);
    free(bpe->merges);
    free(bpe->words);
    free(bpe->added);
    free(bpe->unicode);
    free(bpe);
}

// ----------------------------------------------------------------------------
// Tables

static inline const BpeMerge *bpe_merge_of(const Bpe *bpe, int32_t left, int32_t right) {
    const uint64_t pair = (uint64_t)(uint32_t)left << 32 | (uint32_t)right, mask = (UINT64_C(1) << bpe->merge_bits) - 1;
    for (uint64_t at = (pair ^ pair >> 31) * 0x9E3779B97F4A7C15u >> (64 - bpe->merge_bits);; at = (at + 1) & mask) {
        const BpeMerge *merge = &bpe->merges[at];
        if (merge->pair == pair || merge->rank < 0) return merge; // rank < 0: there is none, and here is its place
    }
}

// The id of a word, or -1.
static inline int32_t bpe_word_id(const Bpe *bpe, const char *word, int64_t bytes) {
    const uint64_t mask = (UINT64_C(1) << bpe->word_bits) - 1;
    for (uint64_t at = XXH3_64bits(word, (size_t)bytes) & mask; bpe->words[at] >= 0; at = (at + 1) & mask) {
        const int32_t id = bpe->words[at];
        if (bpe->begin[id + 1] - bpe->begin[id] == bytes && memcmp(bpe->text + bpe->begin[id], word, (size_t)bytes) == 0) return id;
    }
    return -1;
}

// ----------------------------------------------------------------------------
// Results and scratch

typedef struct {
    int32_t *ids;
    int64_t count, capacity;
} TokenIds;

static inline void token_ids_free(TokenIds *out) {
    free(out->ids);
    *out = (TokenIds){0};
}

static inline void token_ids_reserve(TokenIds *out, int64_t more) {
    if (out->capacity - out->count >= more) return;
    out->capacity = 2 * (out->count + more) + 256;
    out->ids = base_grow(out->ids, (size_t)out->capacity, sizeof *out->ids);
}

static inline void token_ids_append(TokenIds *out, const int32_t *ids, int64_t count) {
    token_ids_reserve(out, count);
    if (count > 0) memcpy(out->ids + out->count, ids, (size_t)count * sizeof *ids);
    out->count += count;
}

enum { BPE_CACHED_BYTES = 24, BPE_CACHED_IDS = 8, BPE_CACHE_BITS = 15 };

typedef struct {
    uint32_t hash;
    uint8_t bytes, ids; // 0 bytes: free
    char word[BPE_CACHED_BYTES];
    int32_t id[BPE_CACHED_IDS];
} BpeCached;

// Part of a word while it is merged.
typedef struct {
    int32_t id; // -1: merged into the one before
    uint32_t previous, next;
} BpeSymbol;

// Scratch of one thread; zero it to begin with.
typedef struct {
    BpeCached *cache; // last result of the words that share a place; 2 MB
    BpeSymbol *symbols;
    uint64_t *heap; // rank in the upper half, place of the left symbol in the lower: the smallest comes first
    int64_t symbol_capacity, heap_count, heap_capacity;
    UnicodeNfc nfc;
    char *prefixed;
    int64_t prefixed_capacity;
} BpeWork;

static inline void bpe_work_free(BpeWork *work) {
    free(work->cache);
    free(work->symbols);
    free(work->heap);
    free(work->prefixed);
    unicode_nfc_free(&work->nfc);
    *work = (BpeWork){0};
}

// ----------------------------------------------------------------------------
// Merging a word: always the pair of lowest rank, of equal ones the leftmost

static inline void bpe_heap_push_(BpeWork *work, uint64_t key) {
    if (work->heap_count == work->heap_capacity) {
        work->heap_capacity = 2 * work->heap_capacity + 64;
        work->heap = base_grow(work->heap, (size_t)work->heap_capacity, sizeof *work->heap);
    }
    int64_t at = work->heap_count++;
    for (; at > 0 && work->heap[(at - 1) / 2] > key; at = (at - 1) / 2) work->heap[at] = work->heap[(at - 1) / 2];
    work->heap[at] = key;
}

static inline uint64_t bpe_heap_pop_(BpeWork *work) {
    const uint64_t top = work->heap[0], last = work->heap[--work->heap_count];
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < work->heap_count; at = child) {
        if (child + 1 < work->heap_count && work->heap[child + 1] < work->heap[child]) child++;
        if (work->heap[child] >= last) break;
        work->heap[at] = work->heap[child];
    }
    work->heap[at] = last;
    return top;
}

static const uint32_t BPE_NO_SYMBOL = UINT32_MAX;

// Pushes the pair that begins at `left`, when it has a merge.
static inline void bpe_push_pair_(const Bpe *bpe, BpeWork *work, uint32_t left) {
    if (left == BPE_NO_SYMBOL || work->symbols[left].next == BPE_NO_SYMBOL) return;
    const BpeMerge *merge = bpe_merge_of(bpe, work->symbols[left].id, work->symbols[work->symbols[left].next].id);
    if (merge->rank >= 0) bpe_heap_push_(work, (uint64_t)(uint32_t)merge->rank << 32 | left);
}

// Appends the ids of a word of less than 2^31 bytes.
static inline void bpe_merge_word_(const Bpe *bpe, BpeWork *work, const char *word, int64_t bytes, TokenIds *out) {
    if (work->symbol_capacity < bytes) {
        work->symbol_capacity = 2 * bytes + 64;
        work->symbols = base_grow(work->symbols, (size_t)work->symbol_capacity, sizeof *work->symbols);
    }
    BpeSymbol *symbols = work->symbols;
    work->heap_count = 0;
    for (int64_t i = 0; i < bytes; i++) {
        symbols[i] = (BpeSymbol){bpe->byte[(unsigned char)word[i]], i > 0 ? (uint32_t)i - 1 : BPE_NO_SYMBOL,
                                 i + 1 < bytes ? (uint32_t)i + 1 : BPE_NO_SYMBOL};
    }
    for (int64_t i = 0; i + 1 < bytes; i++) bpe_push_pair_(bpe, work, (uint32_t)i);
    while (work->heap_count > 0) {
        const uint64_t key = bpe_heap_pop_(work);
        BpeSymbol *left = &symbols[(uint32_t)key];
        if (left->id < 0 || left->next == BPE_NO_SYMBOL) continue; // merged since it was pushed
        BpeSymbol *right = &symbols[left->next];
        const BpeMerge *merge = bpe_merge_of(bpe, left->id, right->id);
        if (merge->rank < 0 || (uint64_t)merge->rank != key >> 32) continue; // another pair by now
        left->id = merge->id;
        right->id = -1;
        left->next = right->next;
        if (left->next != BPE_NO_SYMBOL) symbols[left->next].previous = (uint32_t)key;
        bpe_push_pair_(bpe, work, left->previous);
        bpe_push_pair_(bpe, work, (uint32_t)key);
    }
    token_ids_reserve(out, bytes);
    for (uint32_t at = 0; at != BPE_NO_SYMBOL; at = symbols[at].next) out->ids[out->count++] = symbols[at].id;
}

// Appends the ids of a word (bytes > 0): from the cache, the vocabulary or by merging.
static inline void bpe_word_(const Bpe *bpe, BpeWork *work, const char *word, int64_t bytes, TokenIds *out) {
    BpeCached *cached = NULL;
    uint32_t hash = 0;
    if (bytes <= BPE_CACHED_BYTES) {
        const uint64_t full = XXH3_64bits(word, (size_t)bytes);
        hash = (uint32_t)(full >> 32);
        cached = &work->cache[full & ((1 << BPE_CACHE_BITS) - 1)];
        if (cached->hash == hash && cached->bytes == bytes && memcmp(cached->word, word, (size_t)bytes) == 0) {
            token_ids_append(out, cached->id, cached->ids);
            return;
        }
    }
    const int64_t before = out->count;
    const int32_t whole = bpe->ignore_merges ? bpe_word_id(bpe, word, bytes) : -1;
    if (whole >= 0) {
        token_ids_append(out, &whole, 1);
    } else {
        bpe_merge_word_(bpe, work, word, bytes, out);
    }
    if (cached == NULL || out->count - before > BPE_CACHED_IDS) return;
    cached->hash = hash;
    cached->bytes = (uint8_t)bytes;
    cached->ids = (uint8_t)(out->count - before);
    memcpy(cached->word, word, (size_t)bytes);
    memcpy(cached->id, out->ids + before, (size_t)(out->count - before) * sizeof *cached->id);
}

// ----------------------------------------------------------------------------
// Words: the regular expressions by hand. Each alternative is tried in turn at a place, as a matcher would.

static inline int bpe_class_(const Bpe *bpe, const char *text, int64_t bytes, int *size) {
    uint32_t code;
    *size = utf8_next(text, bytes, &code);
    return bpe->unicode->classes[code] & UNICODE_CLASS;
}

// The end of the run of a class that begins at `at`, of at most `most` characters.
static inline int64_t bpe_run_(const Bpe *bpe, const char *text, int64_t at, int64_t end, int class, int64_t most) {
    for (int size; at < end && most > 0 && bpe_class_(bpe, text + at, end - at, &size) == class; at += size) most--;
    return at;
}

// Bytes of 's 't 're 've 'm 'll 'd at text[0], else 0. Without case "'S", and the long s, which folds to s, are such.
static inline int64_t bpe_contraction_(const char *text, int64_t bytes, bool any_case) {
    if (bytes < 2 || text[0] != '\'') return 0;
    const char fold = any_case ? 0x20 : 0;
    const bool upper = text[1] >= 'A' && text[1] <= 'Z', upper_2 = bytes > 2 && text[2] >= 'A' && text[2] <= 'Z';
    const char a = upper ? text[1] | fold : text[1], b = bytes > 2 ? (upper_2 ? text[2] | fold : text[2]) : '\0';
    if (a == 's' || a == 't' || a == 'm' || a == 'd') return 2;
    if ((a == 'r' && b == 'e') || (a == 'v' && b == 'e') || (a == 'l' && b == 'l')) return 3;
    return any_case && bytes > 2 && memcmp(text + 1, "\xC5\xBF", 2) == 0 ? 3 : 0;
}

// \s+(?!\S)|\s+ at a space: the run of spaces, but the last one is left to the word that follows, when there are more.
static inline int64_t bpe_spaces_(const Bpe *bpe, const char *text, int64_t at, int64_t end) {
    int64_t last = at, next = at;
    for (int size; next < end && bpe_class_(bpe, text + next, end - next, &size) == UNICODE_SPACE; next += size) last = next;
    return next == end || last == at ? next : last;
}

static inline int64_t bpe_next_gpt2_(const Bpe *bpe, const char *text, int64_t at, int64_t end) {
    const int64_t contraction = bpe_contraction_(text + at, end - at, false);
    if (contraction > 0) return at + contraction;
    const int64_t from = at + (text[at] == ' ');
    int size;
    const int class = from < end ? bpe_class_(bpe, text + from, end - from, &size) : UNICODE_SPACE;
    return class == UNICODE_SPACE ? bpe_spaces_(bpe, text, at, end) : bpe_run_(bpe, text, from, end, class, end);
}

static inline int64_t bpe_next_digits_(const Bpe *bpe, const char *text, int64_t at, int64_t end) {
    const int64_t contraction = bpe_contraction_(text + at, end - at, true);
    if (contraction > 0) return at + contraction;
    int size, next_size;
    const int class = bpe_class_(bpe, text + at, end - at, &size);
    if (class == UNICODE_LETTER) return bpe_run_(bpe, text, at, end, UNICODE_LETTER, end);
    if (class == UNICODE_NUMBER) return bpe_run_(bpe, text, at, end, UNICODE_NUMBER, bpe->pattern == BPE_DIGITS_3 ? 3 : 1);
    if (text[at] != '\r' && text[at] != '\n' && at + size < end &&
        bpe_class_(bpe, text + at + size, end - at - size, &next_size) == UNICODE_LETTER) {
        return bpe_run_(bpe, text, at + size, end, UNICODE_LETTER, end);
    }
    const int64_t from = at + (text[at] == ' ');
    int64_t next = bpe_run_(bpe, text, from, end, UNICODE_OTHER, end);
    if (next > from) {
        while (next < end && (text[next] == '\r' || text[next] == '\n')) next++;
        return next;
    }
    // \s*[\r\n]+: spaces up to the last newline among them
    int64_t newline = -1;
    for (next = at; next < end && bpe_class_(bpe, text + next, end - next, &size) == UNICODE_SPACE; next += size) {
        if (text[next] == '\r' || text[next] == '\n') newline = next;
    }
    return newline >= 0 ? newline + 1 : bpe_spaces_(bpe, text, at, end);
}

static inline void bpe_words_(const Bpe *bpe, BpeWork *work, const char *text, int64_t bytes, TokenIds *out) {
    if (bpe->prefix_space && text[0] != ' ') {
        if (work->prefixed_capacity < bytes + 1) {
            work->prefixed_capacity = 2 * bytes + 64;
            work->prefixed = base_grow(work->prefixed, (size_t)work->prefixed_capacity, 1);
        }
        work->prefixed[0] = ' ';
        memcpy(work->prefixed + 1, text, (size_t)bytes);
        text = work->prefixed;
        bytes++;
    }
    for (int64_t at = 0, next; at < bytes; at = next) {
        next = bpe->pattern == BPE_GPT2 ? bpe_next_gpt2_(bpe, text, at, bytes) : bpe_next_digits_(bpe, text, at, bytes);
        bpe_word_(bpe, work, text + at, next - at, out);
    }
}

// ----------------------------------------------------------------------------
// Added tokens: of those that begin at the leftmost place the longest. One that is special and not asked for is text, and hides others in it.

static inline const BpeAdded *bpe_added_at_(const Bpe *bpe, const char *text, int64_t bytes, bool normalized) {
    const int first = (unsigned char)text[0];
    for (int64_t i = bpe->added_first[first]; i < bpe->added_first[first + 1]; i++) {
        const BpeAdded *added = &bpe->added[i];
        if (added->normalized == normalized && added->bytes <= bytes && memcmp(added->text, text, (size_t)added->bytes) == 0) return added;
    }
    return NULL;
}

// Text between added tokens: those that are looked for as it is written have been found, the others come now.
static inline void bpe_parts_(const Bpe *bpe, BpeWork *work, const char *text, int64_t bytes, bool special, bool normalized, TokenIds *out) {
    if (normalized && bpe->nfc) text = unicode_nfc(bpe->unicode, &work->nfc, text, &bytes);
    int64_t from = 0;
    for (int64_t at = 0; bpe->added_count > 0 && at < bytes;) {
        const BpeAdded *added = bpe_added_at_(bpe, text + at, bytes - at, normalized);
        const int64_t next = at + (added != NULL ? added->bytes : 1);
        if (added != NULL && (special || !added->special)) {
            if (at > from && normalized) bpe_words_(bpe, work, text + from, at - from, out);
            if (at > from && !normalized) bpe_parts_(bpe, work, text + from, at - from, special, true, out);
            token_ids_append(out, &added->id, 1);
            from = next;
        }
        at = next;
    }
    if (from == bytes) return;
    if (normalized) {
        bpe_words_(bpe, work, text + from, bytes - from, out);
    } else {
        bpe_parts_(bpe, work, text + from, bytes - from, special, true, out);
    }
}

enum { BPE_TEXT_LIMIT = 1 << 29 }; // bytes of a text that is encoded at once: NFC and a space may lengthen it, up to four times

// Appends the ids of a text of at most BPE_TEXT_LIMIT bytes. `special`: special tokens in it are those tokens, else text.
static inline void bpe_encode(const Bpe *bpe, BpeWork *work, const char *text, int64_t bytes, bool special, TokenIds *out) {
    if (work->cache == NULL) work->cache = base_new((size_t)1 << BPE_CACHE_BITS, sizeof *work->cache);
    if (bytes > 0) bpe_parts_(bpe, work, text, bytes, special, false, out);
}

// Whether what stands before text[at] is a character that is no space.
static inline bool bpe_word_before_(const Bpe *bpe, const char *text, int64_t at) {
    int64_t from = at - 1;
    while (from > 0 && at - from < 4 && (text[from] & 0xC0) == 0x80) from--;
    int size;
    const int class = bpe_class_(bpe, text + from, at - from, &size);
    return size != at - from || class != UNICODE_SPACE; // another size: a byte that is not UTF-8
}

// The last place in (0, bytes) where the text may be cut and each part encoded alone with the same result, or 0. Between a character that is
// no space and a space a word always ends, and neither NFC nor the look-ahead of \s+(?!\S) goes across it; for BPE_GPT2 also before a newline,
// for the others, whose words may end in newlines, between these and what is no space.
static inline int64_t bpe_cut(const Bpe *bpe, const char *text, int64_t bytes) {
    if (bpe->prefix_space || bpe->added_blank) return 0;
    for (int64_t at = bytes - 1; at > 0; at--) {
        int size;
        if ((text[at] == ' ' || (text[at] == '\n' && bpe->pattern == BPE_GPT2)) && bpe_word_before_(bpe, text, at)) return at;
        if (text[at - 1] != '\n' || bpe->pattern == BPE_GPT2 || bytes - at < 4) continue; // 4: the character is all there
        if (bpe_class_(bpe, text + at, bytes - at, &size) != UNICODE_SPACE) return at;
    }
    return 0;
}

// Text of an id, not terminated; NULL for ids outside the vocabulary. It may end inside a UTF-8 sequence.
static inline const char *bpe_text(const Bpe *bpe, int32_t id, int64_t *bytes) {
    if (id < 0 || id >= bpe->vocab) return NULL;
    *bytes = bpe->begin[id + 1] - bpe->begin[id];
    return bpe->text + bpe->begin[id];
}

#endif
