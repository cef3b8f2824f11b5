// algorithms.cuh: the file that keeps which algorithm won for which matrix product, so that a second run need not time them and repeats the first
// one's bits. Knows nothing of cuBLASLt but the size of its algorithms.
//
// Two kinds of file. One that the user names, in the environment (TRAIN_GPT_ALGORITHMS): of another device or version, or when it does not parse,
// it is ignored with one line and never written. And a run's own, in --out: then it is set aside (renamed, one line) and begun anew.
//
// Text. The first line names format, library version and device. Every other line is a choice; of several for one product the first counts that the
// library still offers. Ranks of one host may share a file: lines are appended under a lock.
#ifndef LLMC_CUDA_ALGORITHMS_CUH
#define LLMC_CUDA_ALGORITHMS_CUH

#include <cerrno>     // errno
#include <cinttypes>  // PRId64
#include <climits>    // PATH_MAX
#include <cmath>      // isfinite
#include <cstdint>    // int64_t
#include <cstdio>     // rename, snprintf, sscanf
#include <cstdlib>    // malloc
#include <cstring>    // memcmp, strdup, strerror
#include <fcntl.h>    // open
#include <sys/file.h> // flock
#include <sys/stat.h> // fstat
#include <unistd.h>   // read, write

// What decides the algorithm of a product (cublaslt.cuh). Only 8-byte integers: compared as bytes.
struct ProductKey {
    int64_t form, in, out; // ProductForm; Dtype of left and right, of out
    int64_t M, N, K;
    int64_t left_row, out_row; // elements from row to row
    int64_t accumulate, epilogue;
    int64_t align[5]; // bytes: of right, left, out, bias, aux: 256, 16 or less, 0 = absent
};

// Whether a product that does more beats the plain way.
enum Verdict { VERDICT_NONE, VERDICT_YES, VERDICT_NO };

struct AlgorithmEntry {
    ProductKey key;
    int64_t verdict; // Verdict; NONE where there is nothing to decide
    float ms;
    uint64_t algorithm[8]; // opaque
};

struct AlgorithmFile {
    char *path;       // null: off
    bool own;         // a run's: is set aside when it is of no use
    char header[384]; // first line, with its newline
    AlgorithmEntry *entries;
    int64_t count;
};

enum { ALGORITHMS_MAX_BYTES = 8 << 20, ALGORITHMS_LINE = 640 };

static void algorithms_close(AlgorithmFile *file) {
    free(file->entries);
    free(file->path);
    *file = AlgorithmFile();
}

static void algorithms_off_(AlgorithmFile *file, const char *what) {
    fprintf(stderr, "train_gpt: algorithms %s: %s; goes on without it\n", file->path, what);
    algorithms_close(file);
}

// A run's file that is of no use: it is renamed, and the run begins another.
static void algorithms_set_aside_(AlgorithmFile *file, const char *what) {
    char aside[PATH_MAX];
    free(file->entries);
    file->entries = nullptr, file->count = 0;
    const int length = snprintf(aside, sizeof aside, "%s.old", file->path);
    if (length >= (int)sizeof aside || rename(file->path, aside) != 0) {
        algorithms_off_(file, what);
        return;
    }
    fprintf(stderr, "train_gpt: algorithms %s: %s; set aside as %s, chosen anew\n", file->path, what, aside);
}

static int algorithms_format_(char *line, const AlgorithmEntry *e) {
    const ProductKey *k = &e->key;
    const uint64_t *a = e->algorithm;
    return snprintf(line, ALGORITHMS_LINE,
                    "%" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64
                    " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %" PRId64 " %.6g %" PRIx64 " %" PRIx64 " %" PRIx64 " %" PRIx64
                    " %" PRIx64 " %" PRIx64 " %" PRIx64 " %" PRIx64 "\n",
                    k->form, k->in, k->out, k->M, k->N, k->K, k->left_row, k->out_row, k->accumulate, k->epilogue, k->align[0], k->align[1],
                    k->align[2], k->align[3], k->align[4], e->verdict, (double)e->ms, a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
}

// A line without its newline.
static bool algorithms_parse_(const char *line, AlgorithmEntry *e) {
    ProductKey *k = &e->key;
    uint64_t *a = e->algorithm;
    int end = -1;
    const int fields =
        sscanf(line,
               "%" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64
               " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %" SCNd64 " %f %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64 " %" SCNx64
               " %" SCNx64 " %" SCNx64 " %" SCNx64 "%n",
               &k->form, &k->in, &k->out, &k->M, &k->N, &k->K, &k->left_row, &k->out_row, &k->accumulate, &k->epilogue, &k->align[0], &k->align[1],
               &k->align[2], &k->align[3], &k->align[4], &e->verdict, &e->ms, &a[0], &a[1], &a[2], &a[3], &a[4], &a[5], &a[6], &a[7], &end);
    return fields == 25 && end >= 0 && line[end] == 0 && e->verdict >= VERDICT_NONE && e->verdict <= VERDICT_NO && std::isfinite(e->ms) &&
           e->ms >= 0;
}

// The whole file, ended by 0; null: `what` says why. An absent file is an empty one.
static char *algorithms_read_(const char *path, size_t *bytes, const char **what) {
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    struct stat status;
    char *text = nullptr;
    *bytes = 0;
    if (fd < 0) {
        *what = strerror(errno);
        return errno == ENOENT ? (char *)calloc(1, 1) : nullptr;
    }
    if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) {
        *what = "not a regular file";
    } else if (status.st_size > ALGORITHMS_MAX_BYTES) {
        *what = "larger than any that train_gpt writes";
    } else if ((text = (char *)malloc((size_t)status.st_size + 1)) != nullptr) {
        ssize_t got = 1;
        while (*bytes < (size_t)status.st_size && (got = read(fd, text + *bytes, (size_t)status.st_size - *bytes)) > 0) *bytes += (size_t)got;
        text[*bytes] = 0;
        if (*bytes < (size_t)status.st_size) {
            *what = got < 0 ? strerror(errno) : "changed while it was read";
            free(text);
            text = nullptr;
        }
    } else {
        *what = "out of memory";
    }
    close(fd);
    return text;
}

// Takes the lines of `text` into file->entries; null when all are good, otherwise what is wrong (in `room`).
static const char *algorithms_load_(AlgorithmFile *file, char *text, size_t bytes, char room[128]) {
    const size_t header = strlen(file->header);
    if (bytes == 0) return nullptr;
    if (strlen(text) != bytes) return "holds a zero byte";
    if (strncmp(text, file->header, header) != 0) return "is of another device, library version or format";
    int64_t lines = 0;
    for (const char *at = text + header; (at = strchr(at, '\n')) != nullptr; at++) lines++;
    file->entries = (AlgorithmEntry *)calloc((size_t)lines + 1, sizeof *file->entries);
    if (file->entries == nullptr) return "out of memory";
    char *line = text + header;
    for (int64_t number = 2; *line != 0; number++) {
        char *end = strchr(line, '\n');
        if (end != nullptr) *end = 0;
        if (end == nullptr || !algorithms_parse_(line, &file->entries[file->count])) {
            snprintf(room, 128, "line %lld is not one that train_gpt writes", (long long)number);
            return room;
        }
        file->count++;
        line = end + 1;
    }
    return nullptr;
}

// path may be null: off. own: a run's.
static void algorithms_open(AlgorithmFile *file, const char *path, bool own, const char *device_name, size_t library_version) {
    *file = AlgorithmFile();
    if (path == nullptr || *path == 0) return;
    file->path = strdup(path), file->own = own;
    if (file->path == nullptr) return;
    snprintf(file->header, sizeof file->header, "train_gpt algorithms 2, cuBLASLt %zu, %s\n", library_version, device_name);
    size_t bytes;
    const char *what = "";
    char room[128];
    char *text = algorithms_read_(path, &bytes, &what);
    if (text == nullptr) {
        algorithms_off_(file, what);
        return;
    }
    what = algorithms_load_(file, text, bytes, room);
    free(text);
    if (what != nullptr && own) algorithms_set_aside_(file, what);
    if (what != nullptr && !own) algorithms_off_(file, what);
}

// The next entry for a product after `last` (null: the first), or null.
static const AlgorithmEntry *algorithms_next(const AlgorithmFile *file, const ProductKey *key, const AlgorithmEntry *last) {
    for (int64_t i = last == nullptr ? 0 : last - file->entries + 1; i < file->count; i++)
        if (memcmp(&file->entries[i].key, key, sizeof *key) == 0) return &file->entries[i];
    return nullptr;
}

// Appends to a file that is locked: the header first when it is empty. Null, or what is wrong.
static const char *algorithms_write_(const AlgorithmFile *file, int fd, const AlgorithmEntry *entry) {
    char text[sizeof file->header + ALGORITHMS_LINE];
    const size_t header = strlen(file->header);
    size_t length = 0;
    const ssize_t got = pread(fd, text, header, 0);
    if (got < 0) return strerror(errno);
    if (got == 0) {
        memcpy(text, file->header, header);
        length = header;
    } else if ((size_t)got != header || memcmp(text, file->header, header) != 0) {
        return "has become another device's";
    }
    length += (size_t)algorithms_format_(text + length, entry);
    errno = 0;
    return write(fd, text, length) == (ssize_t)length ? nullptr : errno != 0 ? strerror(errno) : "is cut short: the disk is full?";
}

static void algorithms_append(AlgorithmFile *file, const AlgorithmEntry *entry) {
    if (file->path == nullptr) return;
    const int fd = open(file->path, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) {
        algorithms_off_(file, strerror(errno));
        return;
    }
    const char *what = flock(fd, LOCK_EX) != 0 ? strerror(errno) : algorithms_write_(file, fd, entry);
    if (close(fd) != 0 && what == nullptr) what = strerror(errno);
    if (what != nullptr) algorithms_off_(file, what);
}

#endif
