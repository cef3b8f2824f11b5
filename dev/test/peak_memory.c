// peak_memory.c: runs a command and appends the most memory that it held at once, in bytes, to a file.
// usage: peak_memory FILE COMMAND...; exits as the command does
#include "llmc/base.h"    // die
#include <fcntl.h>        // open, O_APPEND
#include <sys/resource.h> // getrusage
#include <sys/wait.h>     // waitpid

int main(int argc, char **argv) {
    if (argc < 3) die(CODE_USAGE, "usage: peak_memory FILE COMMAND...");
    int status = 0;
    struct rusage usage;
    char line[32];
    const pid_t child = fork();
    if (child == 0) {
        execvp(argv[2], argv + 2);
        die(CODE_IO, "cannot run '%s': %s", argv[2], strerror(errno));
    }
    if (child < 0 || waitpid(child, &status, 0) < 0 || getrusage(RUSAGE_CHILDREN, &usage) != 0) die(CODE_IO, "fork: %s", strerror(errno));
    const int length = snprintf(line, sizeof line, "%lld\n", (long long)usage.ru_maxrss * 1024);
    const int fd = open(argv[1], O_WRONLY | O_APPEND | O_CREAT, 0666); // one write each: lines of several ranks do not mix
    if (fd < 0 || write(fd, line, (size_t)length) != length || close(fd) != 0) die(CODE_IO, "'%s': %s", argv[1], strerror(errno));
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
