// base.h: errors, exit codes, allocation, checked sizes, clock. Knows nothing of models, data or devices.
#ifndef LLMC_BASE_H
#define LLMC_BASE_H

#include <errno.h>    // errno
#include <fcntl.h>    // open
#include <math.h>     // isfinite
#include <stdarg.h>   // va_list
#include <stdbool.h>  // bool
#include <stdint.h>   // int64_t
#include <stdio.h>    // fprintf, vsnprintf
#include <stdlib.h>   // exit, free
#include <string.h>   // memcpy, strerror
#include <sys/mman.h> // mmap, madvise
#include <sys/stat.h> // fstat
#include <time.h>     // clock_gettime
#include <unistd.h>   // sysconf

// ----------------------------------------------------------------------------
// Exit codes: the contract with launchers and scripts.
enum {
    CODE_OK = 0,
    CODE_USAGE = 2,     // wrong flag, impossible configuration
    CODE_INPUT = 3,     // missing, truncated, foreign or damaged file
    CODE_NUMERIC = 4,   // too many non-finite steps
    CODE_IO = 5,        // cannot write, disk full
    CODE_COMM = 6,      // a rank or the network failed
    CODE_PREEMPTED = 7, // asked to stop; state is saved
};

// An error is one line: what, which field or file, got, wanted, hint. Functions that meet bad input return false and
// fill it; only main() turns it into a message and an exit code, so that tests and fuzzers can call every parser.
typedef struct {
    int code;        // one of CODE_*; 0 = no error
    char text[1024]; // one line, no newline at the end
} Error;

#if defined(__GNUC__)
#define LLMC_PRINTF(f, a) __attribute__((format(printf, f, a)))
#else
#define LLMC_PRINTF(f, a)
#endif

// Fills the error (the first one wins) and returns false, so that a check reads `return fail(error, CODE_INPUT, ...)`.
LLMC_PRINTF(3, 4) static inline bool fail(Error *error, int code, const char *format, ...) {
    if (error != NULL && error->code == 0) {
        error->code = code;
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(error->text, sizeof error->text, format, arguments);
        va_end(arguments);
        for (char *c = error->text; *c != '\0'; c++) {
            if ((unsigned char)*c < 32 || *c == 127) *c = '?'; // hostile names must not break the one line
        }
    }
    return false;
}

LLMC_PRINTF(2, 3) static inline void die(int code, const char *format, ...) __attribute__((noreturn));
// Prints one line on stderr and exits.
static inline void die(int code, const char *format, ...) {
    fflush(stdout);
    fputs("train_gpt: ", stderr);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    exit(code);
}

static inline void die_error(const Error *error) __attribute__((noreturn));
static inline void die_error(const Error *error) { die(error->code ? error->code : 1, "%s", error->text); }

// ----------------------------------------------------------------------------
// Sizes: every product of dimensions that may come from a file or a flag goes through these.

static inline bool size_multiply(size_t a, size_t b, size_t *product) { return !__builtin_mul_overflow(a, b, product); }
static inline bool size_add(size_t a, size_t b, size_t *sum) { return !__builtin_add_overflow(a, b, sum); }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t round_up(int64_t a, int64_t multiple) { return ceil_div(a, multiple) * multiple; }
static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

// ----------------------------------------------------------------------------
// Allocation. base_alloc is for big buffers (64-byte aligned, zero, huge pages where the kernel gives them: first touch
// of 4 KiB pages costs more than a step's attention); base_new is for small host structures. Both die when refused:
// running out of memory is not an input error that anyone can handle.

#define BASE_HUGE_BYTES ((size_t)2 << 20)

// base_alloc without the zeroing, for callers that zero with all threads.
static inline void *base_alloc_raw(size_t bytes) {
    if (bytes == 0) bytes = 1;
    size_t rounded = (bytes + BASE_HUGE_BYTES - 1) / BASE_HUGE_BYTES * BASE_HUGE_BYTES;
    const bool huge = bytes >= BASE_HUGE_BYTES, absurd = bytes > SIZE_MAX / 2; // whose rounding could wrap
    void *pointer = absurd ? NULL : huge ? aligned_alloc(BASE_HUGE_BYTES, rounded) : aligned_alloc(64, (bytes + 63) / 64 * 64);
#ifdef MADV_HUGEPAGE
    if (pointer != NULL && huge) (void)madvise(pointer, rounded, MADV_HUGEPAGE); // a wish; its failure changes only speed
#endif
    if (pointer == NULL) die(CODE_USAGE, "out of memory: wanted %zu bytes", bytes);
    return pointer;
}

static inline void *base_alloc(size_t bytes) {
    void *pointer = base_alloc_raw(bytes);
    memset(pointer, 0, bytes); // not `return memset(...)`: gcc 12 takes that for a dangling pointer
    return pointer;
}

static inline void *base_new(size_t count, size_t size) {
    void *pointer = calloc(count ? count : 1, size ? size : 1);
    if (pointer == NULL) die(CODE_USAGE, "out of memory: wanted %zu x %zu bytes", count, size);
    return pointer;
}

static inline void *base_grow(void *old, size_t count, size_t size) {
    size_t bytes;
    if (!size_multiply(count ? count : 1, size, &bytes)) die(CODE_USAGE, "out of memory: %zu x %zu bytes", count, size);
    void *pointer = realloc(old, bytes);
    if (pointer == NULL) die(CODE_USAGE, "out of memory: wanted %zu bytes", bytes);
    return pointer;
}

static inline char *base_copy_text(const char *text) {
    size_t bytes = strlen(text) + 1;
    return memcpy(base_new(bytes, 1), text, bytes);
}

// ----------------------------------------------------------------------------
// Files that are read or written as streams. A FIFO or device under an expected name must not hang a run: only regular files are read
// (errno EINVAL otherwise), and a new file takes the place of whatever has its name.

static inline FILE *base_open_regular(const char *path) {
    struct stat status;
    const int fd = open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return NULL;
    if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode)) return fdopen(fd, "rb");
    close(fd);
    errno = EINVAL;
    return NULL;
}

static inline FILE *base_create_file(const char *path) {
    if (unlink(path) != 0 && errno != ENOENT) return NULL;
    const int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return fd < 0 ? NULL : fdopen(fd, "wb");
}

// ----------------------------------------------------------------------------
// Clock

static inline double clock_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

#endif
