// tokenizer_unicode.h: what the pre-tokenizers ask of a character (letter, number, space) and canonical composition (NFC), both as the
// tokenizers library has them. A byte that is not part of valid UTF-8 is a character of its own: neither letter, number nor space, never
// changed by NFC. Knows no tokenizer.
#ifndef LLMC_TOKENIZER_UNICODE_H
#define LLMC_TOKENIZER_UNICODE_H

#include "llmc/base.h"                     // base_new, base_grow
#include "llmc/tokenizer_unicode_tables.h" // unicode_letters, unicode_numbers, unicode_spaces, unicode_combining, unicode_decompositions

// Codes from UNICODE_BYTES on are bytes that are not UTF-8.
enum { UNICODE_BYTES = 0x110000, UNICODE_CODES = UNICODE_BYTES + 256 };

// A character's class; the flag says that NFC may change it, or what stands before it.
enum { UNICODE_OTHER, UNICODE_LETTER, UNICODE_NUMBER, UNICODE_SPACE, UNICODE_CLASS = 3, UNICODE_MAY_CHANGE = 4 };

// A decomposition's row, found by code or, for composition, by its two parts.
typedef struct {
    uint64_t key;
    uint32_t row; // + 1; 0: free
} UnicodeSlot;

enum { UNICODE_SLOT_BITS = 13, UNICODE_SLOTS = 1 << UNICODE_SLOT_BITS }; // for about 3000 entries

typedef struct {
    uint8_t classes[UNICODE_CODES];   // class and flag
    uint8_t combining[UNICODE_BYTES]; // combining class
    UnicodeSlot slots[UNICODE_SLOTS];
} Unicode;

static inline uint64_t unicode_pair_(uint32_t first, uint32_t second) { return (uint64_t)first << 32 | second; }
static inline uint32_t unicode_hash_(uint64_t key) { return (uint32_t)((key ^ key >> 29) * 0x9E3779B97F4A7C15u >> (64 - UNICODE_SLOT_BITS)); }

static inline void unicode_insert_(Unicode *unicode, uint64_t key, uint32_t row) {
    uint32_t at = unicode_hash_(key);
    while (unicode->slots[at].row != 0) at = (at + 1) % UNICODE_SLOTS;
    unicode->slots[at] = (UnicodeSlot){key, row + 1};
}

// A row of unicode_decompositions, or NULL. Key: a code, or unicode_pair_ of the parts (never below 2^32).
static inline const uint32_t *unicode_find_(const Unicode *unicode, uint64_t key) {
    for (uint32_t at = unicode_hash_(key); unicode->slots[at].row != 0; at = (at + 1) % UNICODE_SLOTS) {
        if (unicode->slots[at].key == key) return unicode_decompositions[unicode->slots[at].row - 1];
    }
    return NULL;
}

enum {
    HANGUL_S = 0xAC00, // the first syllable; then the first leading consonant, vowel, and the code before the first trailing consonant
    HANGUL_L = 0x1100,
    HANGUL_V = 0x1161,
    HANGUL_T = 0x11A7,
    HANGUL_LS = 19, // their numbers
    HANGUL_VS = 21,
    HANGUL_TS = 28,
    HANGUL_SS = HANGUL_LS * HANGUL_VS * HANGUL_TS,
};

static inline void unicode_fill_(uint8_t *table, const uint32_t (*rows)[2], size_t count, uint8_t value) {
    for (size_t i = 0; i < count; i++) memset(table + rows[i][0], value, rows[i][1] - rows[i][0] + 1);
}

// 2.3 MB; free() it.
static inline Unicode *unicode_create(void) {
    Unicode *u = base_new(1, sizeof *u);
    unicode_fill_(u->classes, unicode_letters, sizeof unicode_letters / sizeof unicode_letters[0], UNICODE_LETTER);
    unicode_fill_(u->classes, unicode_numbers, sizeof unicode_numbers / sizeof unicode_numbers[0], UNICODE_NUMBER);
    unicode_fill_(u->classes, unicode_spaces, sizeof unicode_spaces / sizeof unicode_spaces[0], UNICODE_SPACE);
    for (size_t i = 0; i < sizeof unicode_combining / sizeof unicode_combining[0]; i++) {
        for (uint32_t c = unicode_combining[i][0]; c <= unicode_combining[i][1]; c++) {
            u->combining[c] = (uint8_t)unicode_combining[i][2];
            u->classes[c] |= UNICODE_MAY_CHANGE;
        }
    }
    for (uint32_t i = 0; i < sizeof unicode_decompositions / sizeof unicode_decompositions[0]; i++) {
        const uint32_t *row = unicode_decompositions[i];
        unicode_insert_(u, row[0], i);
        if (row[3]) {
            u->classes[row[0]] |= UNICODE_MAY_CHANGE;
        } else {
            unicode_insert_(u, unicode_pair_(row[1], row[2]), i);
            u->classes[row[2]] |= UNICODE_MAY_CHANGE;
        }
    }
    for (uint32_t c = HANGUL_V; c < HANGUL_V + HANGUL_VS; c++) u->classes[c] |= UNICODE_MAY_CHANGE;
    for (uint32_t c = HANGUL_T + 1; c < HANGUL_T + HANGUL_TS; c++) u->classes[c] |= UNICODE_MAY_CHANGE;
    return u;
}

// ----------------------------------------------------------------------------
// UTF-8

// Bytes of the character at text[0] (bytes > 0 are there) and its code. RFC 3629: no overlong forms, no surrogates, at most U+10FFFF.
static inline int utf8_next(const char *text, int64_t bytes, uint32_t *code) {
    const unsigned char *t = (const unsigned char *)text;
    const uint32_t first = t[0];
    if (first < 0x80) return *code = first, 1;
    *code = UNICODE_BYTES + first;
    const int need = first >= 0xC2 && first <= 0xDF ? 2 : (first & 0xF0) == 0xE0 ? 3 : first >= 0xF0 && first <= 0xF4 ? 4 : 0;
    if (need == 0 || need > bytes) return 1;
    uint32_t value = first & (0xFFu >> (need + 1));
    for (int i = 1; i < need; i++) {
        if ((t[i] & 0xC0) != 0x80) return 1;
        value = value << 6 | (t[i] & 0x3F);
    }
    const uint32_t least = need == 2 ? 0x80 : need == 3 ? 0x800 : 0x10000;
    if (value < least || value >= UNICODE_BYTES || (value >= 0xD800 && value < 0xE000)) return 1;
    *code = value;
    return need;
}

// The other way: returns the bytes written (at most 4).
static inline int utf8_put(uint32_t code, char text[4]) {
    if (code >= UNICODE_BYTES) return text[0] = (char)(unsigned char)(code - UNICODE_BYTES), 1;
    if (code < 0x80) return text[0] = (char)code, 1;
    const int need = code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (int i = need - 1; i > 0; i--, code >>= 6) text[i] = (char)(0x80 | (code & 0x3F));
    text[0] = (char)((0xF00u >> need & 0xFF) | code);
    return need;
}

// ----------------------------------------------------------------------------
// NFC

typedef struct {
    char *text; // the result
    int64_t count, capacity;
    uint32_t *codes; // of the piece that is being composed
    uint64_t *order; // to sort marks
    int64_t code_count, code_capacity;
} UnicodeNfc;

static inline void unicode_nfc_free(UnicodeNfc *nfc) {
    free(nfc->text);
    free(nfc->codes);
    free(nfc->order);
    *nfc = (UnicodeNfc){0};
}

static inline void unicode_nfc_append_(UnicodeNfc *nfc, const char *text, int64_t bytes) {
    if (nfc->capacity - nfc->count < bytes) {
        nfc->capacity = 2 * (nfc->count + bytes) + 1024;
        nfc->text = base_grow(nfc->text, (size_t)nfc->capacity, 1);
    }
    if (bytes > 0) memcpy(nfc->text + nfc->count, text, (size_t)bytes);
    nfc->count += bytes;
}

static inline void unicode_nfc_code_(UnicodeNfc *nfc, uint32_t code) {
    if (nfc->code_count == nfc->code_capacity) {
        nfc->code_capacity = 2 * nfc->code_capacity + 64;
        nfc->codes = base_grow(nfc->codes, (size_t)nfc->code_capacity, sizeof *nfc->codes);
        nfc->order = base_grow(nfc->order, (size_t)nfc->code_capacity, sizeof *nfc->order);
    }
    nfc->codes[nfc->code_count++] = code;
}

// Decompositions nest a few levels: their first parts have decompositions, their second parts have none.
static inline void unicode_decompose_(const Unicode *unicode, UnicodeNfc *nfc, uint32_t code) {
    if (code >= HANGUL_S && code < HANGUL_S + HANGUL_SS) {
        const uint32_t s = code - HANGUL_S;
        unicode_nfc_code_(nfc, HANGUL_L + s / (HANGUL_VS * HANGUL_TS));
        unicode_nfc_code_(nfc, HANGUL_V + s / HANGUL_TS % HANGUL_VS);
        if (s % HANGUL_TS != 0) unicode_nfc_code_(nfc, HANGUL_T + s % HANGUL_TS);
        return;
    }
    uint32_t tail[8];
    int tails = 0;
    for (const uint32_t *row; tails < 8 && (row = unicode_find_(unicode, code)) != NULL; code = row[1]) {
        if (row[2] != 0) tail[tails++] = row[2];
    }
    unicode_nfc_code_(nfc, code);
    while (tails > 0) unicode_nfc_code_(nfc, tail[--tails]);
}

static inline int unicode_compare_(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static inline uint8_t unicode_combining_(const Unicode *unicode, uint32_t code) { return code < UNICODE_BYTES ? unicode->combining[code] : 0; }

// Sorts every run of marks by class, equal ones in their order.
static inline void unicode_sort_marks_(const Unicode *unicode, UnicodeNfc *nfc) {
    uint32_t *codes = nfc->codes;
    for (int64_t i = 0; i < nfc->code_count; i++) {
        int64_t end = i;
        while (end < nfc->code_count && unicode_combining_(unicode, codes[end]) != 0) end++;
        if (end - i < 2) continue;
        // class 8 bits, place in the run 32 bits, code 24 bits (above the place it would decide the order of equal classes)
        for (int64_t k = i; k < end; k++) {
            nfc->order[k] = (uint64_t)unicode_combining_(unicode, codes[k]) << 56 | (uint64_t)(k - i) << 24 | codes[k];
        }
        qsort(nfc->order + i, (size_t)(end - i), sizeof *nfc->order, unicode_compare_);
        for (int64_t k = i; k < end; k++) codes[k] = (uint32_t)(nfc->order[k] & 0xFFFFFF);
        i = end;
    }
}

// The character that two compose to, or 0.
static inline uint32_t unicode_compose_(const Unicode *unicode, uint32_t a, uint32_t b) {
    if (a - HANGUL_L < HANGUL_LS && b - HANGUL_V < HANGUL_VS) return HANGUL_S + ((a - HANGUL_L) * HANGUL_VS + (b - HANGUL_V)) * HANGUL_TS;
    if (a - HANGUL_S < HANGUL_SS && (a - HANGUL_S) % HANGUL_TS == 0 && b - HANGUL_T - 1 < HANGUL_TS - 1) return a + (b - HANGUL_T);
    const uint32_t *row = unicode_find_(unicode, unicode_pair_(a, b));
    return row != NULL ? row[0] : 0;
}

// Appends the composition of nfc->codes and empties them.
static inline void unicode_compose_piece_(const Unicode *unicode, UnicodeNfc *nfc) {
    unicode_sort_marks_(unicode, nfc);
    uint32_t *codes = nfc->codes;
    int64_t starter = -1, kept = 0;
    int last = -1; // class of the last mark that was kept behind the starter; -1: none
    for (int64_t i = 0; i < nfc->code_count; i++) {
        const int class = unicode_combining_(unicode, codes[i]);
        // A mark reaches its starter unless one of its class, or a starter, stands between.
        const uint32_t composed = starter >= 0 && last < class ? unicode_compose_(unicode, codes[starter], codes[i]) : 0;
        if (composed != 0) {
            codes[starter] = composed;
            continue;
        }
        if (class == 0) {
            starter = kept;
            last = -1;
        } else {
            last = class;
        }
        codes[kept++] = codes[i];
    }
    for (int64_t i = 0; i < kept; i++) {
        char text[4];
        unicode_nfc_append_(nfc, text, utf8_put(codes[i], text));
    }
    nfc->code_count = 0;
}

// The text in NFC: itself when nothing changes, else in nfc->text. *bytes becomes its length.
static inline const char *unicode_nfc(const Unicode *unicode, UnicodeNfc *nfc, const char *text, int64_t *bytes) {
    const int64_t end = *bytes;
    int64_t copied = 0, starter = 0; // of the text; where the last character begins that nothing before it can change
    nfc->count = nfc->code_count = 0;
    for (int64_t at = 0; at < end;) {
        uint32_t code;
        int size = utf8_next(text + at, end - at, &code);
        if (!(unicode->classes[code] & UNICODE_MAY_CHANGE)) {
            starter = at;
            at += size;
            continue;
        }
        unicode_nfc_append_(nfc, text + copied, starter - copied);
        for (at = starter; at < end; at += size) {
            size = utf8_next(text + at, end - at, &code);
            if (at > starter && !(unicode->classes[code] & UNICODE_MAY_CHANGE)) break;
            unicode_decompose_(unicode, nfc, code);
        }
        unicode_compose_piece_(unicode, nfc);
        copied = starter = at;
    }
    if (copied == 0) return text;
    unicode_nfc_append_(nfc, text + copied, end - copied);
    *bytes = nfc->count;
    return nfc->text;
}

#endif
