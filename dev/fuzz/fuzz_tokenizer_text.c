// fuzz_tokenizer_text.c: any bytes as text for tokenizers of every form. Without NFC and a space in front they come back, cut or whole; with
// NFC a second pass changes nothing.
#include "llmc/tokenizer_json.h" // bpe_parse, bpe_encode

static void require(bool ok) {
    if (!ok) abort();
}

#define DIGITS_3                                                                                                                                   \
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?\\\\p{L}+|\\\\p{N}{1,3}| "                                                         \
    "?[^\\\\s\\\\p{L}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|\\\\s+(?!\\\\S)|\\\\s+"
#define LEVEL "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":"
#define SPLIT                                                                                                                                      \
    "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"behavior\":\"Isolated\",\"pattern\":{\"Regex\":\"" DIGITS_3 "\"}}," LEVEL     \
    "false}]}"

// A tokenizer whose ids are the bytes and a few merges of them.
static Bpe *create(const char *pre_tokenizer, const char *normalizer) {
    static char text[1 << 15];
    size_t at = 0;
    at += (size_t)snprintf(text + at, sizeof text - at, "{\"pre_tokenizer\":%s,\"normalizer\":%s,\"decoder\":{\"type\":\"ByteLevel\"},",
                           pre_tokenizer, normalizer);
    at += (size_t)snprintf(text + at, sizeof text - at,
                           "\"added_tokens\":[{\"id\":264,\"content\":\"<x>\",\"special\":true},{\"id\":265,\"content\":\"<x\"}],"
                           "\"model\":{\"merges\":[\"a a\",\"aa aa\",\"\xC4\xA0 a\",\"\xC3\xA2 \xC4\xA2\",\"' s\",\"aa a\",\"\xC4\xA0 "
                           "\xC4\x8A\",\"\xC4\x8D \xC4\x8A\"],\"vocab\":{\"aa\":256,\"aaaa\":257,"
                           "\"\xC4\xA0"
                           "a\":258,\"\xC3\xA2\xC4\xA2\":259,\"'s\":260,\"aaa\":261,\"\xC4\xA0\xC4\x8A\":262,\"\xC4\x8D\xC4\x8A\":263");
    for (uint32_t code = 0, id = 0; id < 256; code++) {
        char letter[5] = {0};
        if (bpe_byte_of_(code) < 0) continue;
        utf8_put(code, letter);
        at += (size_t)snprintf(text + at, sizeof text - at, ",\"%s%s\":%u", code == '"' || code == '\\' ? "\\" : "", letter, id++);
    }
    at += (size_t)snprintf(text + at, sizeof text - at, "}}}");
    Bpe *bpe;
    Error error = {0};
    if (!bpe_parse(&bpe, text, at, "synthetic", &error)) die_error(&error);
    return bpe;
}

static void check_text(const Bpe *bpe, BpeWork *work, const char *text, int64_t bytes) {
    TokenIds whole = {0}, parts = {0};
    bpe_encode(bpe, work, text, bytes, true, &whole);
    const int64_t cut = bpe_cut(bpe, text, bytes);
    bpe_encode(bpe, work, text, cut, true, &parts);
    bpe_encode(bpe, work, text + cut, bytes - cut, true, &parts);
    require(parts.count == whole.count && (whole.count == 0 || memcmp(parts.ids, whole.ids, (size_t)whole.count * sizeof *whole.ids) == 0));
    const char *wanted = text;
    if (bpe->nfc) wanted = unicode_nfc(bpe->unicode, &work->nfc, text, &bytes);
    char *copy = base_new((size_t)bytes + 1, 1);
    memcpy(copy, wanted, (size_t)bytes);
    int64_t at = 0;
    for (int64_t i = 0; i < whole.count; i++) {
        int64_t length;
        const char *piece = bpe_text(bpe, whole.ids[i], &length);
        require(piece != NULL);
        // an added token parts what NFC would join
        if (!bpe->nfc) require(at + length <= bytes && memcmp(piece, copy + at, (size_t)length) == 0);
        at += length;
    }
    require(bpe->nfc || at == bytes);
    int64_t again = bytes;
    const char *twice = unicode_nfc(bpe->unicode, &work->nfc, copy, &again);
    require(!bpe->nfc || (again == bytes && memcmp(twice, copy, (size_t)bytes) == 0));
    free(copy);
    token_ids_free(&whole);
    token_ids_free(&parts);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static Bpe *forms[3];
    static BpeWork work[3];
    if (forms[0] == NULL) {
        forms[0] = create(LEVEL "true}", "null");
        forms[1] = create(SPLIT, "null");
        forms[2] = create(SPLIT, "{\"type\":\"NFC\"}");
    }
    for (int i = 0; i < 3; i++) check_text(forms[i], &work[i], (const char *)data, (int64_t)bytes);
    return 0;
}
