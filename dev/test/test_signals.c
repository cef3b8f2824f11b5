// test_signals.c: wishes to stop: signals, and the file OUT/stop.
#include "llmc/signals.h"  // what is tested
#include "dev/test/test.h" // check, test_end
#include <sys/wait.h>      // waitpid

// What signals_stop_requested says within two seconds: signals are taken by another thread.
static StopReason awaited_(void) {
    StopReason reason = STOP_NONE;
    for (double end_ms = clock_ms() + 2000; reason == STOP_NONE && clock_ms() < end_ms; usleep(1000)) reason = signals_stop_requested(NULL);
    return reason;
}

// A child listens, sends itself `numbers`, and exits with what signals_stop_requested says. No signal may reach another thread.
static int signalled_(const int *numbers, int count) {
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        Error error = {0};
        if (!signals_block(&error) || signals_stop_requested(NULL) != STOP_NONE) _exit(99);
        StopReason reason = STOP_NONE;
        for (int i = 0; i < count; i++) {
            kill(getpid(), numbers[i]);
            reason = awaited_();
            if (i > 0) usleep(200000); // a second SIGINT has no answer to wait for
        }
        _exit((int)reason);
    }
    int status = 0;
    if (child < 0 || waitpid(child, &status, 0) != child) die(CODE_IO, "fork");
    return WIFSIGNALED(status) ? 100 + WTERMSIG(status) : WEXITSTATUS(status);
}

int main(void) {
    char out[] = "/tmp/test_signals_XXXXXX", path[64];
    if (mkdtemp(out) == NULL) die(CODE_IO, "cannot make %s", out);
    snprintf(path, sizeof path, "%s/stop", out);
    check(signalled_((int[]){SIGTERM}, 1) == STOP_TERM, "SIGTERM");
    check(signalled_((int[]){SIGTERM, SIGTERM}, 2) == STOP_TERM, "SIGTERM twice");
    check(signalled_((int[]){SIGUSR1}, 1) == STOP_USR1, "SIGUSR1");
    check(signalled_((int[]){SIGINT}, 1) == STOP_INT, "SIGINT");
    check(signalled_((int[]){SIGINT, SIGINT}, 2) == 100 + SIGINT, "the second SIGINT kills");
    sigset_t blocked;
    Error error = {0};
    check(signals_block(&error) && pthread_sigmask(SIG_BLOCK, NULL, &blocked) == 0 && sigismember(&blocked, SIGTERM) == 1 &&
              sigismember(&blocked, SIGUSR1) == 1 && sigismember(&blocked, SIGINT) == 1,
          "the threads that compute never see a signal");
    check(signals_stop_requested(out) == STOP_NONE, "nothing asks to stop");
    const int file = open(path, O_WRONLY | O_CREAT, 0666);
    check(file >= 0 && close(file) == 0, "cannot write %s", path);
    check(signals_stop_requested(out) == STOP_FILE, "OUT/stop asks to stop");
    check(signals_stop_requested(out) == STOP_NONE && access(path, F_OK) != 0, "and is removed");
    printf("signals: SIGTERM, SIGUSR1, SIGINT, a second SIGINT, OUT/stop\n");
    check(rmdir(out) == 0, "nothing is left in the directory");
    return test_end();
}
