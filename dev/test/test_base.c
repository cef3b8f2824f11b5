// test_base.c: errors keep to one line and the first wins, sizes overflow visibly, allocations are aligned and zero.
#include "dev/test/test.h" // check, test_end
#include "llmc/base.h"     // what is tested
#include <sys/wait.h>      // waitpid

static void test_errors(void) {
    Error error = {0};
    check(!fail(&error, CODE_INPUT, "a %s\n\tb%c", "x\x1b[2J", 127), "fail returns false");
    check(error.code == CODE_INPUT && strcmp(error.text, "a x?[2J??b?") == 0, "control bytes become '?': '%s'", error.text);
    check(!fail(&error, CODE_IO, "second") && error.code == CODE_INPUT && strstr(error.text, "second") == NULL, "the first error wins");
    check(!fail(NULL, CODE_IO, "nobody listens"), "a NULL error is allowed");
    char *longest = base_new(5000, 1);
    memset(longest, 'y', 4999);
    error = (Error){0};
    check(!fail(&error, CODE_IO, "%s", longest) && strlen(error.text) == sizeof error.text - 1, "long texts are cut, not overrun");
    free(longest);
    error = (Error){0};
    check(!fail(&error, CODE_IO, "caf\xc3\xa9") && strcmp(error.text, "caf\xc3\xa9") == 0, "UTF-8 stays");
    printf("errors: one line, the first wins, cut at %zu bytes\n", sizeof error.text - 1);
}

// Exit code and stderr of die(), in a child.
static void test_die(void) {
    int pipes[2];
    if (pipe(pipes) != 0) die(CODE_IO, "pipe");
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0) {
        if (dup2(pipes[1], STDERR_FILENO) < 0) _exit(99);
        Error error = {0};
        (void)fail(&error, CODE_NUMERIC, "what %d", 7);
        die_error(&error);
    }
    close(pipes[1]);
    char text[256] = "";
    size_t length = 0;
    for (ssize_t n; length < sizeof text - 1 && (n = read(pipes[0], text + length, sizeof text - 1 - length)) > 0;) length += (size_t)n;
    close(pipes[0]);
    int status = 0;
    check(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == CODE_NUMERIC, "die_error exits with the error's code");
    check(strcmp(text, "train_gpt: what 7\n") == 0, "die writes one line: '%s'", text);
    printf("die: one line on stderr, the error's exit code\n");
}

static void test_sizes(void) {
    size_t r = 0;
    check(size_multiply((size_t)1 << 31, (size_t)1 << 31, &r) && r == (size_t)1 << 62, "2^31 * 2^31");
    check(!size_multiply((size_t)1 << 32, (size_t)1 << 32, &r), "2^64 overflows");
    check(size_multiply(SIZE_MAX, 1, &r) && r == SIZE_MAX && !size_multiply(SIZE_MAX, 2, &r) && size_multiply(0, SIZE_MAX, &r) && r == 0, "edges");
    check(size_add(SIZE_MAX - 1, 1, &r) && r == SIZE_MAX && !size_add(SIZE_MAX, 1, &r), "addition");
    const int64_t big = (int64_t)5 << 40;
    check(ceil_div(big + 1, 64) == big / 64 + 1 && ceil_div(big, 64) == big / 64 && ceil_div(1, 64) == 1 && ceil_div(0, 64) == 0, "ceil_div");
    check(round_up(big + 1, 64) == big + 64 && round_up(big, 64) == big, "round_up");
    check(min_i64(-1, big) == -1 && max_i64(-1, big) == big, "min, max");
    printf("sizes: products and sums at the edge of 64 bits\n");
}

static void test_memory(void) {
    static const size_t sizes[] = {0, 1, 63, 64, 65, 4096, BASE_HUGE_BYTES - 1, BASE_HUGE_BYTES, BASE_HUGE_BYTES + 1, 3 * BASE_HUGE_BYTES};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        unsigned char *memory = base_alloc(sizes[i]);
        size_t set = 0;
        for (size_t j = 0; j < sizes[i]; j++) set += memory[j] != 0;
        check((uintptr_t)memory % 64 == 0 && set == 0, "%zu bytes: aligned to 64, zero (%zu are not)", sizes[i], set);
        memset(memory, 0xa5, sizes[i]); // dirties what the next one may get
        free(memory);
    }
    int *numbers = base_new(10, sizeof *numbers);
    check(numbers[0] == 0 && numbers[9] == 0, "base_new is zero");
    numbers[9] = 5;
    numbers = base_grow(numbers, 10000, sizeof *numbers);
    check(numbers[9] == 5, "base_grow keeps");
    free(numbers);
    free(base_new(0, 0));
    char *copy = base_copy_text("text");
    check(strcmp(copy, "text") == 0, "base_copy_text");
    free(copy);
    printf("memory: alignment, zero, growth\n");
}

int main(void) {
    test_errors();
    test_die();
    test_sizes();
    test_memory();
    const double before = clock_ms();
    usleep(2000);
    const double waited = clock_ms() - before;
    check(waited >= 1.9 && waited < 60e3, "2 ms measured as %.3f", waited);
    return test_end();
}
