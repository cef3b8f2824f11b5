// make_tokens.c: writes a token file (llm.c v1) of pseudo-random ids, for benchmarks and tests that need no text.
// usage: make_tokens FILE TOKENS VOCAB [SEED]; a document ends (id VOCAB-1) every 100 to 400 tokens.
#include "llmc/base.h" // die
#include "llmc/rng.h"  // philox

int main(int argc, char **argv) {
    if (argc < 4) die(CODE_USAGE, "usage: make_tokens FILE TOKENS VOCAB [SEED]");
    const int64_t count = atoll(argv[2]), vocab = atoll(argv[3]);
    const uint64_t key = rng_key(argc > 4 ? (uint64_t)atoll(argv[4]) : 1, RNG_TEST);
    if (count < 0 || count >= 1LL << 31 || vocab < 2 || vocab > 65536) die(CODE_USAGE, "make_tokens: TOKENS under 2^31, VOCAB 2 to 65536");
    FILE *file = fopen(argv[1], "wb");
    if (file == NULL) die(CODE_IO, "make_tokens: cannot write '%s': %s", argv[1], strerror(errno));
    int32_t header[256] = {20240520, 1, (int32_t)count};
    bool good = fwrite(header, sizeof header, 1, file) == 1;
    int64_t left = 100;
    uint32_t previous = 0;
    for (int64_t i = 0; i < count && good; i++) {
        const Philox r = philox(key, (uint64_t)i, 0);
        // Half of the tokens follow from the one before, so that there is something to learn.
        uint32_t id = r.x[1] & 1 ? (previous * 7 + 3) % (uint32_t)(vocab - 1) : r.x[0] % (uint32_t)(vocab - 1);
        if (left-- == 0) id = (uint32_t)vocab - 1, left = 100 + r.x[2] % 300;
        const uint16_t token = (uint16_t)id;
        previous = id;
        good = fwrite(&token, sizeof token, 1, file) == 1;
    }
    if (fclose(file) != 0 || !good) die(CODE_IO, "make_tokens: cannot write '%s': %s", argv[1], strerror(errno));
    return 0;
}
