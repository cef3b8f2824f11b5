// fuzz_tokenizer.c: any bytes as a tokenizer.json. What is accepted must have ids that decode, and encode within its vocabulary.
#include "llmc/tokenizer_json.h" // what is fuzzed

static void require(bool ok) {
    if (!ok) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    Bpe *bpe;
    Error error = {0};
    if (!bpe_parse(&bpe, (const char *)data, bytes, "fuzz", &error)) {
        require(error.code == CODE_INPUT && error.text[0] != '\0' && bpe == NULL);
        return 0;
    }
    require(bpe->vocab >= 256 && bpe->eot >= -1 && bpe->eot < bpe->vocab);
    int64_t length, total = 0;
    for (int32_t id = 0; id < bpe->vocab; id++) {
        require(bpe_text(bpe, id, &length) != NULL && length >= 0);
        total += length;
    }
    require(total == bpe->begin[bpe->vocab] && bpe_text(bpe, (int32_t)bpe->vocab, &length) == NULL);
    BpeWork work = {0};
    TokenIds ids = {0};
    const size_t tail = bytes < 2000 ? bytes : 2000;
    for (int special = 0; special < 2; special++) bpe_encode(bpe, &work, (const char *)data + bytes - tail, (int64_t)tail, special, &ids);
    for (int64_t i = 0; i < ids.count; i++) require(ids.ids[i] >= 0 && ids.ids[i] < bpe->vocab);
    token_ids_free(&ids);
    bpe_work_free(&work);
    bpe_close(bpe);
    return 0;
}
