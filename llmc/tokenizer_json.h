// tokenizer_json.h: reads byte-level BPE tokenizers: tokenizer.json as the tokenizers library writes it, or GPT-2's vocab.json with
// merges.txt. What is accepted gives the ids of the library with add_special_tokens=False: post-processors, which only add tokens then, are
// passed over; everything else that would change ids or text and is not built in is refused by name.
#ifndef LLMC_TOKENIZER_JSON_H
#define LLMC_TOKENIZER_JSON_H

#include "llmc/tokenizer_bpe.h" // Bpe
#include <jansson.h>            // json_loadb

enum { BPE_FILE_LIMIT_BYTES = 32 << 20, BPE_VOCAB_LIMIT = 1 << 24, BPE_ADDED_LIMIT = 1 << 16 };

// ----------------------------------------------------------------------------
// The alphabet: a byte is written as the character of its own code where that is visible, else as one from U+0100 on.

static inline bool bpe_byte_visible_(int byte) { return (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174; }

// The byte of a character of the alphabet, or -1.
static inline int bpe_byte_of_(uint32_t code) {
    if (code < 256) return bpe_byte_visible_((int)code) ? (int)code : -1;
    if (code >= 256 + 68) return -1;
    int hidden = (int)code - 256;
    for (int byte = 0;; byte++) {
        if (!bpe_byte_visible_(byte) && hidden-- == 0) return byte;
    }
}

// bytes of a token that is written in the alphabet (at most as many as it is written with), or -1 when it has other characters.
static inline int64_t bpe_unwrite_(const char *written, int64_t length, char *out) {
    int64_t bytes = 0;
    for (int64_t at = 0; at < length;) {
        uint32_t code;
        at += utf8_next(written + at, length - at, &code);
        const int byte = bpe_byte_of_(code);
        if (byte < 0) return -1;
        out[bytes++] = (char)(unsigned char)byte;
    }
    return bytes;
}

// ----------------------------------------------------------------------------
// Vocabulary and added tokens

static inline bool bpe_flag_(const json_t *object, const char *name) { return json_is_true(json_object_get(object, name)); }

// Empty or absent: as the library writes what is not used.
static inline bool bpe_unused_(const json_t *value) {
    return value == NULL || json_is_null(value) || json_is_false(value) || (json_is_string(value) && json_string_length(value) == 0) ||
           (json_is_array(value) && json_array_size(value) == 0);
}

static inline int bpe_compare_added_(const void *a, const void *b) {
    const BpeAdded *x = a, *y = b;
    const int first = (int)(unsigned char)x->text[0] - (int)(unsigned char)y->text[0];
    if (first != 0) return first;
    return x->bytes != y->bytes ? (x->bytes < y->bytes ? 1 : -1) : memcmp(x->text, y->text, (size_t)x->bytes);
}

// Adds one; `written` (vocab) gets its text when the vocabulary lacks it.
static inline bool bpe_add_(Bpe *bpe, const json_t *entry, const json_t *vocab, const char **written, const char *name, Error *error) {
    const json_t *content = json_object_get(entry, "content"), *id = json_object_get(entry, "id");
    if (!json_is_string(content) || json_string_length(content) == 0 || !json_is_integer(id)) {
        return fail(error, CODE_INPUT, "%.300s: added_tokens: entry %lld: wanted an object with a content that is not empty and an id", name,
                    (long long)bpe->added_count);
    }
    const char *text = json_string_value(content);
    static const char *const foreign[] = {"single_word", "lstrip", "rstrip"};
    for (int i = 0; i < 3; i++) {
        if (bpe_flag_(entry, foreign[i]))
            return fail(error, CODE_INPUT, "%.300s: added_tokens: '%.60s': %s is not built in, wanted false", name, text, foreign[i]);
    }
    const json_t *known = json_object_get(vocab, text);
    const int64_t wanted = known != NULL ? json_integer_value(known) : bpe->vocab;
    if (json_integer_value(id) != wanted) {
        return fail(error, CODE_INPUT, "%.300s: added_tokens: '%.60s': got id %lld, wanted %lld (%s)", name, text,
                    (long long)json_integer_value(id), (long long)wanted,
                    known != NULL ? "as in the vocabulary" : "the next one: ids are numbered without gaps");
    }
    if (known == NULL) written[bpe->vocab++] = text;
    BpeAdded *added = &bpe->added[bpe->added_count++];
    *added = (BpeAdded){.id = (int32_t)wanted,
                        .text = base_copy_text(text),
                        .bytes = (int64_t)json_string_length(content),
                        .special = bpe_flag_(entry, "special"),
                        .normalized = bpe_flag_(entry, "normalized")};
    bpe->added_blank = bpe->added_blank || strpbrk(text, " \n") != NULL;
    for (int64_t i = 0; bpe->nfc && added->normalized && i < added->bytes; i++) {
        if ((unsigned char)text[i] >= 0x80)
            return fail(error, CODE_INPUT, "%.300s: added_tokens: '%.60s': beyond ASCII with normalized true is not built in", name, text);
    }
    return true;
}

static inline bool bpe_added_(Bpe *bpe, const json_t *list, const json_t *vocab, const char **written, const char *name, Error *error) {
    const size_t count = json_array_size(list);
    bpe->added = base_new(count, sizeof *bpe->added);
    for (size_t i = 0; i < count; i++) {
        if (!bpe_add_(bpe, json_array_get(list, i), vocab, written, name, error)) return false;
    }
    qsort(bpe->added, count, sizeof *bpe->added, bpe_compare_added_);
    for (size_t i = 0; i < count; i++) {
        if (i > 0 && bpe_compare_added_(&bpe->added[i - 1], &bpe->added[i]) == 0)
            return fail(error, CODE_INPUT, "%.300s: added_tokens: '%.60s' twice", name, bpe->added[i].text);
        bpe->added_first[(unsigned char)bpe->added[i].text[0] + 1] = (int64_t)i + 1;
    }
    for (int i = 1; i <= 256; i++) bpe->added_first[i] = max_i64(bpe->added_first[i], bpe->added_first[i - 1]);
    return true;
}

static inline int bpe_bits_(int64_t entries) {
    int bits = 4;
    while (((int64_t)1 << bits) < 2 * entries) bits++;
    return bits;
}

// written (vocab) = tokens by id, as they are written: ids are 0 to n-1, each once.
static inline bool bpe_vocabulary_(const json_t *vocab, const char **written, const char *name, Error *error) {
    const int64_t count = (int64_t)json_object_size(vocab);
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)vocab, key, value) {
        const int64_t id = json_is_integer(value) ? json_integer_value(value) : -1;
        if (id < 0 || id >= count) {
            return fail(error, CODE_INPUT, "%.300s: vocab: '%.60s': wanted an id from 0 to %lld (as many as there are tokens)", name, key,
                        (long long)count - 1);
        }
        if (written[id] != NULL)
            return fail(error, CODE_INPUT, "%.300s: vocab: '%.60s' and '%.60s' have the same id %lld", name, key, written[id], (long long)id);
        written[id] = key;
    }
    return true;
}

// Texts of all ids, and the tables that find the first `model` of them, those that words can become. Tokens with characters outside the
// alphabet stay as they are written: no word becomes one.
static inline bool bpe_texts_(Bpe *bpe, const char **written, int64_t model, const char *name, Error *error) {
    size_t room = 1;
    for (int64_t id = 0; id < bpe->vocab; id++) room += strlen(written[id]);
    bpe->text = base_new(room, 1);
    bpe->begin = base_new((size_t)bpe->vocab + 1, sizeof *bpe->begin);
    bpe->word_bits = bpe_bits_(model);
    bpe->words = base_new((size_t)1 << bpe->word_bits, sizeof *bpe->words);
    memset(bpe->words, -1, ((size_t)1 << bpe->word_bits) * sizeof *bpe->words);
    memset(bpe->byte, -1, sizeof bpe->byte);
    for (int64_t id = 0; id < bpe->vocab; id++) {
        char *text = bpe->text + bpe->begin[id];
        const int64_t length = (int64_t)strlen(written[id]), bytes = bpe_unwrite_(written[id], length, text);
        bpe->begin[id + 1] = bpe->begin[id] + (bytes >= 0 ? bytes : length);
        if (bytes < 0) memcpy(text, written[id], (size_t)length);
        if (bytes < 0 || id >= model) continue;
        if (bytes == 1) bpe->byte[(unsigned char)text[0]] = (int32_t)id;
        uint64_t at = XXH3_64bits(text, (size_t)bytes);
        while (bpe->words[at &= (UINT64_C(1) << bpe->word_bits) - 1] >= 0) at++;
        bpe->words[at] = (int32_t)id;
    }
    for (int byte = 0; byte < 256; byte++) {
        if (bpe->byte[byte] < 0) return fail(error, CODE_INPUT, "%.300s: vocab: no token for the byte 0x%02X: not a byte-level BPE?", name, byte);
    }
    return true;
}

// ----------------------------------------------------------------------------
// Merges

// Merge number `rank` of two texts; `joined` is scratch for them. A pair that comes again takes its last rank, as in the library.
static inline bool bpe_merge_(Bpe *bpe, const json_t *vocab, const char *left, size_t left_bytes, const char *right, size_t right_bytes,
                              int64_t rank, char *joined, const char *name, Error *error) {
    int32_t ids[3];
    for (int i = 0; i < 3; i++) { // left, right, both
        size_t length = 0;
        if (i != 1) memcpy(joined, left, left_bytes), length = left_bytes;
        if (i != 0) memcpy(joined + length, right, right_bytes), length += right_bytes;
        joined[length] = '\0';
        const json_t *id = json_object_get(vocab, joined);
        if (id == NULL)
            return fail(error, CODE_INPUT, "%.300s: merges: number %lld: '%.60s' is not in the vocabulary", name, (long long)rank, joined);
        ids[i] = (int32_t)json_integer_value(id);
    }
    BpeMerge *place = (BpeMerge *)bpe_merge_of(bpe, ids[0], ids[1]);
    *place = (BpeMerge){(uint64_t)(uint32_t)ids[0] << 32 | (uint32_t)ids[1], (int32_t)rank, ids[2]};
    return true;
}

static inline void bpe_merge_table_(Bpe *bpe, int64_t count) {
    bpe->merge_bits = bpe_bits_(count);
    bpe->merges = base_new((size_t)1 << bpe->merge_bits, sizeof *bpe->merges);
    for (int64_t i = 0; i < (int64_t)1 << bpe->merge_bits; i++) bpe->merges[i].rank = -1;
}

// The two parts of "a b"; false when it is something else.
static inline bool bpe_halves_(const char *line, size_t length, size_t *left) {
    const char *space = memchr(line, ' ', length);
    if (space == NULL || memchr(space + 1, ' ', length - (size_t)(space + 1 - line)) != NULL) return false;
    *left = (size_t)(space - line);
    return *left > 0 && *left + 1 < length;
}

static inline bool bpe_merges_(Bpe *bpe, const json_t *merges, const json_t *vocab, const char *name, Error *error) {
    const size_t count = json_array_size(merges);
    bpe_merge_table_(bpe, (int64_t)count);
    char *joined = NULL;
    bool good = true;
    for (size_t i = 0, room = 0; good && i < count; i++) {
        const json_t *merge = json_array_get(merges, i), *a = json_array_get(merge, 0), *b = json_array_get(merge, 1);
        const bool pair = json_array_size(merge) == 2 && json_is_string(a) && json_is_string(b);
        size_t left = 0;
        if (!pair && !(json_is_string(merge) && bpe_halves_(json_string_value(merge), json_string_length(merge), &left))) {
            good = fail(error, CODE_INPUT, "%.300s: merges: number %zu: wanted two tokens, 'a b' or [\"a\", \"b\"]", name, i);
            break;
        }
        const char *first = pair ? json_string_value(a) : json_string_value(merge), *second = pair ? json_string_value(b) : first + left + 1;
        if (pair) left = json_string_length(a);
        const size_t right = strlen(second);
        if (room <= left + right) joined = base_grow(joined, room = 2 * (left + right) + 64, 1);
        good = bpe_merge_(bpe, vocab, first, left, second, right, (int64_t)i, joined, name, error);
    }
    free(joined);
    return good;
}

// ----------------------------------------------------------------------------
// tokenizer.json

static inline const char *bpe_type_(const json_t *object) {
    const char *type = json_string_value(json_object_get(object, "type"));
    return type != NULL ? type : "unknown";
}

static inline bool bpe_is_(const json_t *object, const char *type) { return strcmp(bpe_type_(object), type) == 0; }

static inline bool bpe_normalizer_(Bpe *bpe, const json_t *normalizer, const char *name, Error *error) {
    if (bpe_is_(normalizer, "Sequence")) {
        const json_t *list = json_object_get(normalizer, "normalizers");
        for (size_t i = 0; i < json_array_size(list); i++) {
            if (bpe_is_(json_array_get(list, i), "Sequence")) return fail(error, CODE_INPUT, "%.300s: normalizer: a Sequence in a Sequence", name);
            if (!bpe_normalizer_(bpe, json_array_get(list, i), name, error)) return false;
        }
        return json_is_array(list) || fail(error, CODE_INPUT, "%.300s: normalizer: Sequence without normalizers", name);
    }
    if (normalizer == NULL || json_is_null(normalizer)) return true;
    if (!bpe_is_(normalizer, "NFC"))
        return fail(error, CODE_INPUT, "%.300s: normalizer: got '%.60s', wanted none or NFC", name, bpe_type_(normalizer));
    bpe->nfc = true;
    return true;
}

#define BPE_CONTRACTIONS_ "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|"
#define BPE_OTHERS_ "| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"

static inline bool bpe_pattern_(Bpe *bpe, const json_t *split, const char *name, Error *error) {
    static const struct {
        const char *text;
        BpePattern pattern;
    } known[] = {{"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+", BPE_GPT2},
                 {BPE_CONTRACTIONS_ "\\p{N}{1,3}" BPE_OTHERS_, BPE_DIGITS_3},
                 {BPE_CONTRACTIONS_ "\\p{N}" BPE_OTHERS_, BPE_DIGITS_1}};
    const char *text = json_string_value(json_object_get(json_object_get(split, "pattern"), "Regex"));
    const char *behavior = json_string_value(json_object_get(split, "behavior"));
    if (text == NULL || behavior == NULL || strcmp(behavior, "Isolated") != 0 || bpe_flag_(split, "invert")) {
        return fail(error, CODE_INPUT, "%.300s: pre_tokenizer: Split: wanted a Regex, behavior Isolated, invert false", name);
    }
    for (int i = 0; i < 3; i++) {
        if (strcmp(text, known[i].text) == 0) return bpe->pattern = known[i].pattern, true;
    }
    return fail(error, CODE_INPUT, "%.300s: pre_tokenizer: Split: the pattern '%.150s' is not built in, wanted that of GPT-2, Llama 3 or Qwen 2",
                name, text);
}

static inline bool bpe_pre_tokenizer_(Bpe *bpe, const json_t *pre, const char *name, Error *error) {
    if (bpe_is_(pre, "ByteLevel")) {
        // absent: true, as in files that were written before there was the choice
        if (json_is_false(json_object_get(pre, "use_regex")))
            return fail(error, CODE_INPUT, "%.300s: pre_tokenizer: ByteLevel: got use_regex false and no Split before it", name);
        bpe->pattern = BPE_GPT2;
        bpe->prefix_space = bpe_flag_(pre, "add_prefix_space");
        return true;
    }
    const json_t *list = json_object_get(pre, "pretokenizers");
    if (bpe_is_(pre, "Sequence") && json_array_size(list) == 1 && bpe_is_(json_array_get(list, 0), "ByteLevel"))
        return bpe_pre_tokenizer_(bpe, json_array_get(list, 0), name, error);
    const json_t *split = json_array_get(list, 0), *level = json_array_get(list, 1);
    if (!bpe_is_(pre, "Sequence") || json_array_size(list) != 2 || !bpe_is_(split, "Split") || !bpe_is_(level, "ByteLevel")) {
        return fail(error, CODE_INPUT, "%.300s: pre_tokenizer: got '%.60s'%s, wanted ByteLevel or a Sequence of Split and ByteLevel", name,
                    bpe_type_(pre), bpe_is_(pre, "Sequence") ? " of others" : "");
    }
    if (!json_is_false(json_object_get(level, "use_regex")) || bpe_flag_(level, "add_prefix_space")) {
        return fail(error, CODE_INPUT, "%.300s: pre_tokenizer: ByteLevel behind Split: wanted use_regex and add_prefix_space false", name);
    }
    return bpe_pattern_(bpe, split, name, error);
}

static inline bool bpe_model_(Bpe *bpe, const json_t *root, const char *name, Error *error) {
    const json_t *model = json_object_get(root, "model");
    if (!json_is_object(model)) return fail(error, CODE_INPUT, "%.300s: no model: not a tokenizer.json", name);
    if (json_object_get(model, "type") != NULL && !bpe_is_(model, "BPE")) {
        return fail(error, CODE_INPUT, "%.300s: model: got '%.60s', wanted BPE (byte-level, as GPT-2, Llama 3 and Qwen have)", name,
                    bpe_type_(model));
    }
    static const char *const unused[] = {"continuing_subword_prefix", "end_of_word_suffix", "dropout"};
    for (int i = 0; i < 3; i++) {
        const json_t *value = json_object_get(model, unused[i]);
        if (!bpe_unused_(value) && !(json_is_number(value) && json_number_value(value) == 0))
            return fail(error, CODE_INPUT, "%.300s: model: %s is not built in, wanted none", name, unused[i]);
    }
    const json_t *vocab = json_object_get(model, "vocab"), *merges = json_object_get(model, "merges"),
                 *added = json_object_get(root, "added_tokens");
    if (!json_is_object(vocab) || !json_is_array(merges))
        return fail(error, CODE_INPUT, "%.300s: model: wanted an object vocab and a list merges", name);
    if (!bpe_unused_(added) && !json_is_array(added)) return fail(error, CODE_INPUT, "%.300s: added_tokens: wanted a list", name);
    if (json_object_size(vocab) > BPE_VOCAB_LIMIT || json_array_size(merges) > BPE_VOCAB_LIMIT || json_array_size(added) > BPE_ADDED_LIMIT) {
        return fail(error, CODE_INPUT, "%.300s: got %zu tokens, %zu merges and %zu added tokens, wanted at most %d, %d and %d", name,
                    json_object_size(vocab), json_array_size(merges), json_array_size(added), BPE_VOCAB_LIMIT, BPE_VOCAB_LIMIT, BPE_ADDED_LIMIT);
    }
    bpe->ignore_merges = bpe_flag_(model, "ignore_merges");
    const int64_t count = bpe->vocab = (int64_t)json_object_size(vocab);
    const char **written = base_new((size_t)count + json_array_size(added), sizeof *written);
    const bool good = bpe_vocabulary_(vocab, written, name, error) && bpe_added_(bpe, added, vocab, written, name, error) &&
                      bpe_texts_(bpe, written, count, name, error) && bpe_merges_(bpe, merges, vocab, name, error);
    free(written);
    return good;
}

// The id of an added token, or without any of a token of the vocabulary, with this text; -1: there is none.
static inline int32_t bpe_special_id(const Bpe *bpe, const char *text) {
    const int64_t bytes = (int64_t)strlen(text);
    for (int64_t i = 0; i < bpe->added_count; i++) {
        if (strcmp(bpe->added[i].text, text) == 0) return bpe->added[i].id;
    }
    return bpe_word_id(bpe, text, bytes);
}

// The token that ends a document, by the names that are in use.
static inline int32_t bpe_find_eot_(const Bpe *bpe) {
    static const char *const names[] = {"<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        const int32_t id = bpe_special_id(bpe, names[i]);
        if (id >= 0) return id;
    }
    return -1;
}

static inline json_t *bpe_json_(const char *text, size_t bytes, const char *name, Error *error) {
    json_error_t where;
    json_t *root = json_loadb(text, bytes, JSON_REJECT_DUPLICATES, &where);
    if (root == NULL) fail(error, CODE_INPUT, "%.300s: line %d: not JSON: %.150s", name, where.line, where.text);
    if (root == NULL || json_is_object(root)) return root;
    json_decref(root);
    fail(error, CODE_INPUT, "%.300s: wanted a JSON object", name);
    return NULL;
}

// Completes a tokenizer, or drops it.
static inline bool bpe_done_(Bpe **out, Bpe *bpe, bool good) {
    *out = good ? bpe : NULL;
    if (!good) return bpe_close(bpe), false;
    bpe->unicode = unicode_create();
    bpe->eot = bpe_find_eot_(bpe);
    return true;
}

// From the text of a tokenizer.json; `name` is for messages. bpe_close when true.
static inline bool bpe_parse(Bpe **out, const char *text, size_t bytes, const char *name, Error *error) {
    *out = NULL;
    json_t *root = bpe_json_(text, bytes, name, error);
    if (root == NULL) return false;
    Bpe *bpe = base_new(1, sizeof *bpe);
    const json_t *decoder = json_object_get(root, "decoder");
    bool good = true;
    static const char *const unused[] = {"truncation", "padding"};
    for (int i = 0; i < 2 && good; i++) {
        good = bpe_unused_(json_object_get(root, unused[i])) || fail(error, CODE_INPUT, "%.300s: %s is not built in, wanted none", name, unused[i]);
    }
    good = good && bpe_normalizer_(bpe, json_object_get(root, "normalizer"), name, error) && bpe_model_(bpe, root, name, error) &&
           bpe_pre_tokenizer_(bpe, json_object_get(root, "pre_tokenizer"), name, error);
    if (good && !bpe_is_(decoder, "ByteLevel"))
        good = fail(error, CODE_INPUT, "%.300s: decoder: got '%.60s', wanted ByteLevel", name, bpe_type_(decoder));
    json_decref(root);
    return bpe_done_(out, bpe, good);
}

// ----------------------------------------------------------------------------
// vocab.json and merges.txt

// A line a merge; lines that begin with #version are passed over.
static inline bool bpe_merge_lines_(Bpe *bpe, const json_t *vocab, const char *text, size_t bytes, const char *name, Error *error) {
    int64_t count = 1, rank = 0, number = 0;
    for (size_t i = 0; i < bytes; i++) count += text[i] == '\n';
    if (count > BPE_VOCAB_LIMIT) return fail(error, CODE_INPUT, "%.300s: %lld lines, wanted at most %d", name, (long long)count, BPE_VOCAB_LIMIT);
    bpe_merge_table_(bpe, count);
    char *joined = base_new(bytes + 1, 1);
    bool good = true;
    for (size_t at = 0; good && at < bytes;) {
        const char *line = text + at, *newline = memchr(line, '\n', bytes - at);
        size_t length = newline != NULL ? (size_t)(newline - line) : bytes - at, left = 0;
        at += length + 1;
        number++;
        if (length > 0 && line[length - 1] == '\r') length--;
        if (length >= 8 && memcmp(line, "#version", 8) == 0) continue;
        if (!bpe_halves_(line, length, &left) || memchr(line, '\0', length) != NULL) {
            good = fail(error, CODE_INPUT, "%.300s: line %lld: wanted two tokens with a space between", name, (long long)number);
        } else {
            good = bpe_merge_(bpe, vocab, line, left, line + left + 1, length - left - 1, rank++, joined, name, error);
        }
    }
    free(joined);
    return good;
}

// From the texts of GPT-2's two files. <|endoftext|>, when it is in the vocabulary, is a special token; nothing else is added.
static inline bool bpe_parse_pair(Bpe **out, const char *vocab_text, size_t vocab_bytes, const char *vocab_name, const char *merges_text,
                                  size_t merges_bytes, const char *merges_name, Error *error) {
    *out = NULL;
    json_t *vocab = bpe_json_(vocab_text, vocab_bytes, vocab_name, error);
    if (vocab == NULL) return false;
    Bpe *bpe = base_new(1, sizeof *bpe);
    const json_t *eot = json_object_get(vocab, "<|endoftext|>");
    json_t *added = eot != NULL ? json_pack("[{s:s, s:O, s:b}]", "content", "<|endoftext|>", "id", eot, "special", 1) : json_array();
    const int64_t count = bpe->vocab = (int64_t)json_object_size(vocab);
    const char **written = base_new((size_t)count + 1, sizeof *written);
    bool good = count <= BPE_VOCAB_LIMIT ||
                fail(error, CODE_INPUT, "%.300s: %lld tokens, wanted at most %d", vocab_name, (long long)count, BPE_VOCAB_LIMIT);
    good = good && bpe_vocabulary_(vocab, written, vocab_name, error) && bpe_added_(bpe, added, vocab, written, vocab_name, error) &&
           bpe_texts_(bpe, written, count, vocab_name, error) && bpe_merge_lines_(bpe, vocab, merges_text, merges_bytes, merges_name, error);
    free(written);
    json_decref(added);
    json_decref(vocab);
    return bpe_done_(out, bpe, good);
}

// ----------------------------------------------------------------------------
// Files

// The bytes of a file, free() them; NULL with an error.
static inline char *bpe_read_file_(const char *path, size_t *bytes, Error *error) {
    FILE *file = base_open_regular(path);
    struct stat status;
    if (file == NULL || fstat(fileno(file), &status) != 0) {
        fail(error, CODE_INPUT, "%.300s: cannot open: %s", path, strerror(errno));
        if (file != NULL) fclose(file);
        return NULL;
    }
    char *text = NULL;
    if (status.st_size > BPE_FILE_LIMIT_BYTES) {
        fail(error, CODE_INPUT, "%.300s: %lld bytes, wanted a tokenizer of at most %d", path, (long long)status.st_size, BPE_FILE_LIMIT_BYTES);
    } else {
        text = base_new((size_t)status.st_size + 1, 1);
        *bytes = fread(text, 1, (size_t)status.st_size, file);
        if (ferror(file)) fail(error, CODE_INPUT, "%.300s: cannot read: %s", path, strerror(errno)), free(text), text = NULL;
    }
    fclose(file);
    return text;
}

// A tokenizer.json, or a directory that holds one, or vocab.json and merges.txt. bpe_close when true.
static inline bool bpe_open(Bpe **out, const char *path, Error *error) {
    *out = NULL;
    char name[4200], second[4200];
    struct stat status;
    if (stat(path, &status) != 0) return fail(error, CODE_INPUT, "%.300s: cannot open: %s", path, strerror(errno));
    const bool directory = S_ISDIR(status.st_mode);
    if (snprintf(name, sizeof name, directory ? "%s/tokenizer.json" : "%s", path) >= (int)sizeof name)
        return fail(error, CODE_INPUT, "%.300s...: the path is too long", path);
    size_t bytes = 0, second_bytes = 0;
    if (!directory || access(name, F_OK) == 0) {
        char *text = bpe_read_file_(name, &bytes, error);
        const bool good = text != NULL && bpe_parse(out, text, bytes, name, error);
        free(text);
        return good;
    }
    if (snprintf(name, sizeof name, "%s/vocab.json", path) >= (int)sizeof name ||
        snprintf(second, sizeof second, "%s/merges.txt", path) >= (int)sizeof second)
        return fail(error, CODE_INPUT, "%.300s...: the path is too long", path);
    if (access(name, F_OK) != 0 || access(second, F_OK) != 0)
        return fail(error, CODE_INPUT, "%.300s: holds no tokenizer.json, and not both of vocab.json and merges.txt", path);
    char *vocab = bpe_read_file_(name, &bytes, error), *merges = vocab != NULL ? bpe_read_file_(second, &second_bytes, error) : NULL;
    const bool good = merges != NULL && bpe_parse_pair(out, vocab, bytes, name, merges, second_bytes, second, error);
    free(vocab);
    free(merges);
    return good;
}

#endif
