// token_files.h: writes small token files into a temporary directory, good ones and damaged ones, for the data tests.
#ifndef TOKEN_FILES_H
#define TOKEN_FILES_H

#include "llmc/tokens.h" // TOKENS_MAGIC_*, TokenSet
#include <stdarg.h>      // va_list
#include <stdio.h>       // fopen, snprintf

static int passed_, failed_;

LLMC_PRINTF(2, 3) static void check(bool ok, const char *format, ...) {
    ok ? passed_++ : failed_++;
    if (ok) return;
    va_list arguments;
    va_start(arguments, format);
    printf("FAILED: ");
    vprintf(format, arguments);
    printf("\n");
    va_end(arguments);
}

static int finish(void) {
    printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ > 0;
}

typedef struct {
    char path[256];
} TempDir;

static TempDir temp_create(void) {
    TempDir dir;
    const char *root = getenv("TMPDIR");
    snprintf(dir.path, sizeof dir.path, "%.200s/llmc_data_XXXXXX", root ? root : "/tmp");
    if (mkdtemp(dir.path) == NULL) die(1, "mkdtemp: %s", strerror(errno));
    return dir;
}

// Only the flat files that the tests write.
static void temp_remove(const TempDir *dir) {
    char pattern[300];
    snprintf(pattern, sizeof pattern, "%s/*", dir->path);
    glob_t found;
    if (glob(pattern, 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++) remove(found.gl_pathv[i]);
        globfree(&found);
    }
    rmdir(dir->path);
}

typedef struct {
    char text[400];
} Path;

static Path temp_path(const TempDir *dir, const char *name) {
    Path path;
    snprintf(path.text, sizeof path.text, "%s/%s", dir->path, name);
    return path;
}

static Path write_bytes(const TempDir *dir, const char *name, const void *bytes, size_t size) {
    Path path = temp_path(dir, name);
    FILE *file = fopen(path.text, "wb");
    if (file == NULL || fwrite(bytes, 1, size, file) != size || fclose(file) != 0) die(1, "cannot write %s", path.text);
    return path;
}

static Path write_text(const TempDir *dir, const char *name, const char *text) { return write_bytes(dir, name, text, strlen(text)); }

// A .bin of llm.c's form; width 2 or 4.
static Path write_tokens(const TempDir *dir, const char *name, const int32_t *ids, int64_t count, int width) {
    Path path = temp_path(dir, name);
    FILE *file = fopen(path.text, "wb");
    if (file == NULL) die(1, "cannot write %s", path.text);
    int32_t header[256] = {width == 2 ? TOKENS_MAGIC_U16 : TOKENS_MAGIC_U32, width == 2 ? TOKENS_VERSION_U16 : TOKENS_VERSION_U32, (int32_t)count};
    size_t done = fwrite(header, sizeof header, 1, file);
    for (int64_t i = 0; i < count; i++) done += fwrite(&ids[i], (size_t)width, 1, file);
    if (done != (size_t)count + 1 || fclose(file) != 0) die(1, "cannot write %s", path.text);
    return path;
}

// A Megatron pair NAME.bin, NAME.idx: a sequence per entry of lengths, documents as first sequences (entries of them).
// gap_bytes of noise stand before each sequence.
static Path write_megatron(const TempDir *dir, const char *name, const void *ids, int type, int width, const int32_t *lengths, int64_t sequences,
                           const int64_t *documents, int64_t entries, int64_t gap_bytes) {
    char file_name[100];
    snprintf(file_name, sizeof file_name, "%s.bin", name);
    Path bin = temp_path(dir, file_name);
    snprintf(file_name, sizeof file_name, "%s.idx", name);
    Path idx = temp_path(dir, file_name);
    FILE *data = fopen(bin.text, "wb"), *index = fopen(idx.text, "wb");
    if (data == NULL || index == NULL) die(1, "cannot write %s", bin.text);
    const int64_t version = 1;
    const unsigned char code = (unsigned char)type;
    fwrite("MMIDIDX\0\0", 9, 1, index);
    fwrite(&version, 8, 1, index);
    fwrite(&code, 1, 1, index);
    fwrite(&sequences, 8, 1, index);
    fwrite(&entries, 8, 1, index);
    fwrite(lengths, 4, (size_t)sequences, index);
    const char *from = ids;
    for (int64_t s = 0; s < sequences; s++) {
        for (int64_t g = 0; g < gap_bytes; g++) fputc(0xAB, data);
        const int64_t at = ftell(data);
        fwrite(&at, 8, 1, index);
        fwrite(from, (size_t)width, (size_t)lengths[s], data);
        from += lengths[s] * width;
    }
    fwrite(documents, 8, (size_t)entries, index);
    if (fclose(data) != 0 || fclose(index) != 0) die(1, "cannot write %s", bin.text);
    return bin;
}

// Opens and checks, or dies: for tests of what comes after.
static TokenSet open_tokens(const char *pattern, int64_t vocab) {
    TokenSet set;
    Error error = {0};
    if (!tokens_open(&set, pattern, "--train", &error) || !tokens_check(&set, vocab, &error)) die_error(&error);
    return set;
}

#endif
