// fuzz_idx.c: a Megatron .idx with any bytes, for a .bin of 4096: what is accepted must be readable at every token.
#include "llmc/packing.h" // pieces_create, packing_document_after_
#include "llmc/tokens.h"  // tokens_parse_idx, tokens_read
#include <stddef.h>       // size_t
#include <sys/mman.h>     // memfd_create

enum { BIN_BYTES = 4096 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size > 1 << 14) return 0;
    TokenFile file = {.path = base_copy_text("fuzz"), .fd = -1};
    Error error = {0};
    if (tokens_parse_idx(data, size, BIN_BYTES, &file, &error) && file.tokens < 1 << 16) {
        file.fd = memfd_create("fuzz", 0);
        if (file.fd < 0 || ftruncate(file.fd, BIN_BYTES) != 0) abort();
        TokenSet set = {.files = &file, .count = 1, .tokens = file.tokens, .vocab = 1};
        static int32_t ids[1 << 16];
        if (file.tokens > 0 && !tokens_read(&set, 0, file.tokens, ids, &error)) abort();
        for (int64_t t = 0; t < file.tokens; t += 97) {
            const int64_t after = packing_document_after_(&file, t);
            if (after < 1 || after > file.document_count || file.documents[after] <= t || file.documents[after - 1] > t) abort();
        }
        Pieces pieces;
        if (pieces_create(&pieces, &set, 64, -1, "--train", &error)) {
            for (int64_t p = 0; p < pieces.count; p++) {
                if (pieces.length[p] < 1 || pieces.length[p] > 64 || pieces.begin[p] + pieces.length[p] >= file.tokens) abort();
            }
        }
        pieces_free(&pieces);
    }
    if (error.code != 0 && error.code != CODE_INPUT) abort();
    tokens_file_close_(&file);
    return 0;
}
