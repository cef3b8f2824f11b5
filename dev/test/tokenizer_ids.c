// tokenizer_ids.c: ids of many texts, for comparison with other programs (dev/reference/tokenizer_fuzz.py).
//   build/tokenizer_ids TOKENIZER [special] < texts > ids
// A text is its length in bytes (uint32) and the bytes; the answer the number of ids (uint32), the ids (int32), and, decoded again, length
// and bytes.
#include "llmc/tokenizer.h" // tokenizer_open, tokenizer_encode

int main(int argc, char **argv) {
    Tokenizer tokenizer;
    Error error = {0};
    if (argc < 2 || argc > 3) die(CODE_USAGE, "usage: tokenizer_ids TOKENIZER [special]");
    if (!tokenizer_open(&tokenizer, argv[1], &error)) die_error(&error);
    TokenIds ids = {0};
    char *text = NULL;
    for (uint32_t bytes; fread(&bytes, sizeof bytes, 1, stdin) == 1;) {
        text = base_grow(text, (size_t)bytes + 1, 1);
        if (bytes > BPE_TEXT_LIMIT || fread(text, 1, bytes, stdin) != bytes) die(CODE_INPUT, "the last text is cut off");
        ids.count = 0;
        tokenizer_encode(&tokenizer, text, bytes, argc == 3, &ids);
        const uint32_t count = (uint32_t)ids.count;
        fwrite(&count, sizeof count, 1, stdout);
        if (count > 0) fwrite(ids.ids, sizeof *ids.ids, count, stdout);
        uint32_t total = 0;
        for (int pass = 0; pass < 2; pass++) {
            if (pass == 1) fwrite(&total, sizeof total, 1, stdout);
            for (int64_t i = 0; i < ids.count; i++) {
                int64_t piece_bytes;
                const char *piece = tokenizer_decode(&tokenizer, ids.ids[i], &piece_bytes);
                if (pass == 0) total += (uint32_t)piece_bytes;
                if (pass == 1) fwrite(piece, 1, (size_t)piece_bytes, stdout);
            }
        }
    }
    free(text);
    token_ids_free(&ids);
    tokenizer_close(&tokenizer);
    return fflush(stdout) == 0 ? CODE_OK : CODE_IO;
}
