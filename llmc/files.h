// files.h: durable files: writing with every return value checked and XXH3-128 computed on the way, reading at offsets,
// hashing, creating, syncing and removing directories. Knows no file format. Host only; nothing here is atomic by itself:
// writers write beside the target, sync, and rename (the caller decides when).
#ifndef LLMC_FILES_H
#define LLMC_FILES_H

#include "llmc/base.h" // Error, fail, base_new
#include <dirent.h>    // fdopendir, readdir
#include <fcntl.h>     // open, O_*
#include <sys/stat.h>  // fstat, mkdir
#include <xxhash.h>    // XXH3_128bits_*

enum { FILES_CHUNK_BYTES = 8 << 20 }; // of a write, a read, a step of hashing

enum { FILES_HASH_CHARS = 33 }; // 32 hexadecimal digits (as xxh128sum prints them) and the NUL

static inline void files_hash_text(XXH128_hash_t hash, char text[FILES_HASH_CHARS]) {
    snprintf(text, FILES_HASH_CHARS, "%016llx%016llx", (unsigned long long)hash.high64, (unsigned long long)hash.low64);
}

// "directory/name", to be freed by the caller.
static inline char *path_join(const char *directory, const char *name) {
    size_t bytes = strlen(directory) + strlen(name) + 2;
    char *path = base_new(bytes, 1);
    const size_t length = strlen(directory);
    snprintf(path, bytes, "%s%s%s", directory, length > 0 && directory[length - 1] == '/' ? "" : "/", name);
    return path;
}

// ----------------------------------------------------------------------------
// Reading

// Opens a regular file for reading and tells its size.
static inline bool file_open(const char *path, int *fd, int64_t *bytes, Error *error) {
    *bytes = 0;
    *fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); // O_NONBLOCK: a FIFO must not hang the open
    if (*fd < 0) return fail(error, CODE_INPUT, "%s: cannot open: %s", path, strerror(errno));
    struct stat status;
    bool good = fstat(*fd, &status) == 0 || fail(error, CODE_INPUT, "%s: cannot read its size: %s", path, strerror(errno));
    good = good && (S_ISREG(status.st_mode) || fail(error, CODE_INPUT, "%s: not a regular file", path));
    if (!good) {
        (void)close(*fd); // opened for reading: nothing can be lost
        *fd = -1;
        return false;
    }
    *bytes = status.st_size;
    return true;
}

static inline bool file_read_at(int fd, void *out, size_t bytes, int64_t offset, const char *path, Error *error) {
    for (char *at = out; bytes > 0;) {
        ssize_t got = pread(fd, at, bytes < ((size_t)1 << 30) ? bytes : (size_t)1 << 30, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return fail(error, CODE_INPUT, "%s: cannot read at byte %lld: %s", path, (long long)offset, strerror(errno));
        if (got == 0) return fail(error, CODE_INPUT, "%s: ends at byte %lld, wanted %zu bytes more (truncated?)", path, (long long)offset, bytes);
        at += got, offset += got, bytes -= (size_t)got;
    }
    return true;
}

// The whole file, NUL-terminated, to be freed by the caller; NULL with the error filled.
static inline char *file_read_whole(const char *path, int64_t limit_bytes, size_t *bytes, Error *error) {
    int fd;
    int64_t size;
    *bytes = 0;
    if (!file_open(path, &fd, &size, error)) return NULL;
    char *text = NULL;
    if (size > limit_bytes) {
        fail(error, CODE_INPUT, "%s: got %lld bytes, wanted at most %lld", path, (long long)size, (long long)limit_bytes);
    } else {
        text = base_new((size_t)size + 1, 1);
        if (!file_read_at(fd, text, (size_t)size, 0, path, error)) {
            free(text);
            text = NULL;
        }
    }
    (void)close(fd); // opened for reading: nothing can be lost
    *bytes = (size_t)size;
    return text;
}

// Calls alive (optional) between chunks.
static inline bool file_hash(int fd, int64_t bytes, const char *path, void (*alive)(void *context), void *context, char hash[FILES_HASH_CHARS],
                             Error *error) {
    XXH3_state_t *state = XXH3_createState();
    char *chunk = base_new((size_t)min_i64(bytes, FILES_CHUNK_BYTES), 1);
    if (state == NULL) die(CODE_USAGE, "out of memory: hash state");
    XXH3_128bits_reset(state);
    bool good = true;
    for (int64_t at = 0; good && at < bytes; at += FILES_CHUNK_BYTES) {
        size_t span = (size_t)min_i64(FILES_CHUNK_BYTES, bytes - at);
        good = file_read_at(fd, chunk, span, at, path, error);
        if (good) XXH3_128bits_update(state, chunk, span);
        if (alive != NULL) alive(context);
    }
    if (good) files_hash_text(XXH3_128bits_digest(state), hash);
    XXH3_freeState(state);
    free(chunk);
    return good;
}

// ----------------------------------------------------------------------------
// Writing: sequential; small pieces are gathered, big ones go out directly; hashed on the way.
typedef struct {
    int fd; // -1: closed
    char *path;
    char *stage; // (FILES_CHUNK_BYTES) pieces not yet written
    size_t staged;
    XXH3_state_t *hash;
    int64_t bytes; // accepted so far
} FileWriter;

static inline bool file_sync(int fd, const char *path, Error *error) {
    while (fsync(fd) != 0) {
        if (errno != EINTR) return fail(error, CODE_IO, "%s: cannot sync: %s", path, strerror(errno));
    }
    return true;
}

static inline bool file_close(int fd, const char *path, Error *error) {
    // On Linux the descriptor is gone even when EINTR is reported, so close is never repeated.
    if (close(fd) != 0 && errno != EINTR) return fail(error, CODE_IO, "%s: cannot close: %s", path, strerror(errno));
    return true;
}

static inline bool file_write_all(int fd, const void *data, size_t bytes, const char *path, Error *error) {
    for (const char *at = data; bytes > 0;) {
        ssize_t put = write(fd, at, bytes);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) {
            const char *reason = put < 0 ? strerror(errno) : "wrote nothing";
            return fail(error, CODE_IO, "%s: cannot write %zu bytes: %s", path, bytes, reason);
        }
        at += put, bytes -= (size_t)put;
    }
    return true;
}

static inline bool file_writer_open(FileWriter *writer, const char *path, Error *error) {
    *writer = (FileWriter){.fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)};
    if (writer->fd < 0) return fail(error, CODE_IO, "%s: cannot create: %s", path, strerror(errno));
    writer->path = base_copy_text(path);
    writer->stage = base_new(FILES_CHUNK_BYTES, 1); // pages that are not touched cost nothing
    writer->hash = XXH3_createState();
    if (writer->hash == NULL) die(CODE_USAGE, "out of memory: hash state");
    XXH3_128bits_reset(writer->hash);
    return true;
}

static inline bool file_writer_put_(FileWriter *writer, const char *data, size_t bytes, Error *error) {
    XXH3_128bits_update(writer->hash, data, bytes);
    return file_write_all(writer->fd, data, bytes, writer->path, error);
}

static inline bool file_writer_flush_(FileWriter *writer, Error *error) {
    size_t staged = writer->staged;
    writer->staged = 0;
    return staged == 0 || file_writer_put_(writer, writer->stage, staged, error);
}

static inline bool file_writer_add(FileWriter *writer, const void *data, size_t bytes, Error *error) {
    writer->bytes += (int64_t)bytes;
    if (bytes > FILES_CHUNK_BYTES - writer->staged && !file_writer_flush_(writer, error)) return false;
    const char *at = data;
    for (; bytes >= FILES_CHUNK_BYTES; at += FILES_CHUNK_BYTES, bytes -= FILES_CHUNK_BYTES) {
        if (!file_writer_put_(writer, at, FILES_CHUNK_BYTES, error)) return false;
    }
    if (bytes > 0) memcpy(writer->stage + writer->staged, at, bytes);
    writer->staged += bytes;
    return true;
}

// Frees everything; closes the descriptor without looking when it is still open (after an error that is already told).
static inline void file_writer_free(FileWriter *writer) {
    if (writer->fd >= 0) (void)close(writer->fd);
    XXH3_freeState(writer->hash);
    free(writer->stage);
    free(writer->path);
    *writer = (FileWriter){.fd = -1};
}

// Writes the rest, syncs, closes, tells the hash; the writer is freed whatever happens.
static inline bool file_writer_finish(FileWriter *writer, char hash[FILES_HASH_CHARS], Error *error) {
    bool good = file_writer_flush_(writer, error) && file_sync(writer->fd, writer->path, error);
    if (good) {
        int fd = writer->fd;
        writer->fd = -1;
        good = file_close(fd, writer->path, error);
    }
    if (good && hash != NULL) files_hash_text(XXH3_128bits_digest(writer->hash), hash);
    file_writer_free(writer);
    return good;
}

// ----------------------------------------------------------------------------
// Directories

// Makes names in a directory durable.
static inline bool directory_sync(const char *path, Error *error) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return fail(error, CODE_IO, "%s: cannot open: %s", path, strerror(errno));
    int result;
    do {
        result = fsync(fd);
    } while (result != 0 && errno == EINTR);
    // EINVAL: a file system that cannot sync directories keeps their order by itself or not at all; no retry would help.
    bool good = result == 0 || errno == EINVAL || fail(error, CODE_IO, "%s: cannot sync: %s", path, strerror(errno));
    if (!good) {
        (void)close(fd);
        return false;
    }
    return file_close(fd, path, error);
}

// Creates a directory and its parents; one that exists is fine.
static inline bool directory_create(const char *path, Error *error) {
    char *copy = base_copy_text(path);
    bool good = true;
    for (char *at = copy + 1; good && copy[0] != '\0'; at++) {
        if (*at != '/' && *at != '\0') continue;
        const char kept = *at;
        *at = '\0';
        if (mkdir(copy, 0777) != 0 && errno != EEXIST) good = fail(error, CODE_IO, "%s: cannot create the directory: %s", copy, strerror(errno));
        *at = kept;
        if (kept == '\0') break;
    }
    struct stat status;
    good = good && (stat(path, &status) == 0 || fail(error, CODE_IO, "%s: cannot read: %s", path, strerror(errno)));
    good = good && (S_ISDIR(status.st_mode) || fail(error, CODE_IO, "%s: exists and is not a directory", path));
    free(copy);
    return good;
}

// Calls visit for every name but . and ..; stops at the first that returns false.
static inline bool directory_visit(const char *path, bool (*visit)(const char *directory, const char *name, void *context, Error *error),
                                   void *context, Error *error) {
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return fail(error, CODE_IO, "%s: cannot open: %s", path, strerror(errno));
    DIR *directory = fdopendir(fd);
    if (directory == NULL) {
        int reason = errno;
        (void)close(fd);
        return fail(error, CODE_IO, "%s: cannot list: %s", path, strerror(reason));
    }
    bool good = true;
    while (good) {
        errno = 0;
        const struct dirent *entry = readdir(directory);
        if (entry == NULL) {
            if (errno != 0) good = fail(error, CODE_IO, "%s: cannot list: %s", path, strerror(errno));
            break;
        }
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0) good = visit(path, entry->d_name, context, error);
    }
    (void)closedir(directory); // opened for reading: nothing can be lost
    return good;
}

static inline bool directory_remove_visit_(const char *directory, const char *name, void *context, Error *error) {
    (void)context;
    char *path = path_join(directory, name);
    bool good = unlink(path) == 0 || errno == ENOENT || fail(error, CODE_IO, "%s: cannot remove: %s", path, strerror(errno));
    free(path);
    return good;
}

// Removes a directory of files. Not recursive: a directory inside is not ours, and stops it.
static inline bool directory_remove(const char *path, Error *error) {
    if (!directory_visit(path, directory_remove_visit_, NULL, error)) return false;
    return rmdir(path) == 0 || fail(error, CODE_IO, "%s: cannot remove: %s", path, strerror(errno));
}

static inline bool file_rename(const char *from, const char *to, Error *error) {
    return rename(from, to) == 0 || fail(error, CODE_IO, "%s: cannot rename to %s: %s", from, to, strerror(errno));
}

#endif
