// shim_io.c: a library to preload that makes system calls on chosen paths fail, to test what happens when a disk is full
// or broken. By environment:
//   SHIM_PATH   calls count when their path, or that of their descriptor, contains this text
//   SHIM_CALL   open write fsync close rename renameat2 mkdir unlink rmdir pread statvfs
//   SHIM_AT     the k-th such call fails (from 1)
//   SHIM_ALL    if set, so do all after it
//   SHIM_ERROR  number of the error; "short" makes write and pread move half of the bytes; statvfs then tells 0 bytes free;
//               "slow" makes the call take 0.4 s longer, and nothing else; "hang" a minute; "kill" kills the process before the call
//   SHIM_NO_EXCHANGE  if set, renameat2 always fails with EINVAL, as where a file system cannot exchange names
//   SHIM_MARK   a file that is created when the fault happens
//   SHIM_LOG    a file that gets a line "CALL LAST-PART-OF-PATH" for each fsync, rename and rmdir on such a path
// Real calls go to the kernel directly, so that it works under sanitizers, whatever the order of loading.
#include <dlfcn.h>       // dlsym
#include <errno.h>       // errno
#include <fcntl.h>       // O_CREAT, AT_*
#include <signal.h>      // kill
#include <stdarg.h>      // va_list
#include <stdatomic.h>   // atomic_int
#include <stdbool.h>     // bool
#include <stdio.h>       // snprintf
#include <stdlib.h>      // getenv, atoi
#include <string.h>      // strcmp, strstr
#include <sys/statvfs.h> // statvfs
#include <sys/syscall.h> // SYS_*
#include <time.h>        // nanosleep
#include <unistd.h>      // syscall

// Whether this call is to fail: errno is set then, and *half tells that it should do half of its work instead.
static bool shim_fails(const char *call, const char *path, bool *half) {
    static atomic_int seen;
    const char *wanted = getenv("SHIM_CALL"), *part = getenv("SHIM_PATH"), *at = getenv("SHIM_AT"), *error = getenv("SHIM_ERROR");
    *half = false;
    const char *log = getenv("SHIM_LOG"), *slash = strrchr(path, '/');
    if (log != NULL && part != NULL && slash != NULL && strstr(path, part) != NULL &&
        (strcmp(call, "fsync") == 0 || strcmp(call, "rename") == 0 || strcmp(call, "rmdir") == 0)) {
        char line[512];
        const int length = snprintf(line, sizeof line, "%s %s\n", call, slash + 1);
        long fd = syscall(SYS_openat, AT_FDCWD, log, O_CREAT | O_WRONLY | O_APPEND, 0666);
        if (fd >= 0 && syscall(SYS_write, (int)fd, line, length) == length) syscall(SYS_close, (int)fd);
    }
    if (wanted == NULL || part == NULL || at == NULL || error == NULL || strcmp(wanted, call) != 0 || strstr(path, part) == NULL) return false;
    const int number = atomic_fetch_add(&seen, 1) + 1;
    if (number != atoi(at) && !(getenv("SHIM_ALL") != NULL && number > atoi(at))) return false;
    const char *mark = getenv("SHIM_MARK");
    if (mark != NULL) {
        long fd = syscall(SYS_openat, AT_FDCWD, mark, O_CREAT | O_WRONLY, 0666);
        if (fd >= 0) syscall(SYS_close, (int)fd);
    }
    if (strcmp(error, "kill") == 0) kill(getpid(), SIGKILL);
    if (strcmp(error, "slow") == 0 || strcmp(error, "hang") == 0) {
        const struct timespec pause = {.tv_sec = error[0] == 'h' ? 60 : 0, .tv_nsec = 400000000};
        nanosleep(&pause, NULL);
        return false;
    }
    *half = strcmp(error, "short") == 0;
    errno = atoi(error);
    return !*half;
}

static bool shim_fails_fd(const char *call, int fd, bool *half) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = '\0';
    return shim_fails(call, path, half);
}

static size_t shim_half(bool half, size_t bytes) { return half ? (bytes + 1) / 2 : bytes; }

int open(const char *path, int flags, ...) {
    bool half;
    va_list arguments;
    va_start(arguments, flags);
    int mode = flags & O_CREAT ? va_arg(arguments, int) : 0;
    va_end(arguments);
    return shim_fails("open", path, &half) ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}
ssize_t write(int fd, const void *data, size_t bytes) {
    bool half;
    return shim_fails_fd("write", fd, &half) ? -1 : syscall(SYS_write, fd, data, shim_half(half, bytes));
}
ssize_t pread(int fd, void *data, size_t bytes, off_t offset) {
    bool half;
    return shim_fails_fd("pread", fd, &half) ? -1 : syscall(SYS_pread64, fd, data, shim_half(half, bytes), offset);
}
int fsync(int fd) {
    bool half;
    return shim_fails_fd("fsync", fd, &half) ? -1 : (int)syscall(SYS_fsync, fd);
}
int close(int fd) {
    bool half;
    const bool fails = shim_fails_fd("close", fd, &half);
    const int reason = errno;
    int result = (int)syscall(SYS_close, fd); // a close that fails has closed nevertheless
    if (fails) errno = reason;
    return fails ? -1 : result;
}
int rename(const char *from, const char *to) {
    bool half;
    return shim_fails("rename", from, &half) ? -1 : (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}
int renameat2(int from_fd, const char *from, int to_fd, const char *to, unsigned flags) {
    bool half;
    if (getenv("SHIM_NO_EXCHANGE") != NULL) {
        errno = EINVAL;
        return -1;
    }
    return shim_fails("renameat2", from, &half) ? -1 : (int)syscall(SYS_renameat2, from_fd, from, to_fd, to, flags);
}
int mkdir(const char *path, mode_t mode) {
    bool half;
    return shim_fails("mkdir", path, &half) ? -1 : (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}
int unlink(const char *path) {
    bool half;
    return shim_fails("unlink", path, &half) ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, 0);
}
int rmdir(const char *path) {
    bool half;
    return shim_fails("rmdir", path, &half) ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR);
}
int statvfs(const char *path, struct statvfs *status) {
    bool half;
    if (shim_fails("statvfs", path, &half)) return -1;
    int (*real)(const char *, struct statvfs *) = (int (*)(const char *, struct statvfs *))dlsym(RTLD_NEXT, "statvfs");
    int result = real(path, status);
    if (half) status->f_bavail = 0;
    return result;
}
