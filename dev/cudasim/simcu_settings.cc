// simcu_settings.cc: what the environment chooses, the random numbers of the orders, and how the simulator reports a fault and ends. No CUDA here.
#include "simcu_rt.h" // Settings
#include <cstdarg>    // va_list
#include <cstdio>     // fprintf
#include <cstdlib>    // getenv
#include <cstring>    // strcmp
#include <unistd.h>   // _exit
#ifdef SIMCU_ASAN
#include <sanitizer/common_interface_defs.h> // __sanitizer_print_stack_trace
#endif

namespace simcu {
namespace {

constexpr uint64_t golden = 0x9E3779B97F4A7C15ull;
uint64_t thread_state = 88172645463325252ull, stream_state = thread_state, library_state = thread_state;
void (*end_hook)(int);

uint64_t next(uint64_t *state) { // xorshift64 (Marsaglia 2003)
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

[[noreturn]] void bad(const char *name, const char *value, const char *wanted) {
    fprintf(stderr, "simcu: %s=%s: wanted %s\n", name, value, wanted);
    _exit(2);
}
bool number(const char *name, uint64_t low, uint64_t high, uint64_t *value) {
    const char *text = getenv(name);
    if (text == nullptr) return false;
    char *end;
    *value = strtoull(text, &end, 0);
    if (*text == 0 || *text == '-' || *end != 0 || *value < low || *value > high) bad(name, text, "a number in its range");
    return true;
}
bool number(const char *name, int low, int high, int *value) {
    uint64_t wide;
    if (!number(name, (uint64_t)low, (uint64_t)high, &wide)) return false;
    *value = (int)wide;
    return true;
}

Settings read() {
    Settings s;
    uint64_t seed = 0;
    if (number("SIMCU_SEED", 0, ~0ull, &seed) && seed != 0) s.threads = Order::RANDOM, thread_state = seed * golden, library_state = ~thread_state;
    if (const char *text = getenv("SIMCU_SCHED")) {
        if (strcmp(text, "fwd") == 0)
            s.threads = Order::FORWARD;
        else if (strcmp(text, "rev") == 0)
            s.threads = Order::REVERSE;
        else if (strcmp(text, "rand") == 0)
            s.threads = Order::RANDOM;
        else
            bad("SIMCU_SCHED", text, "fwd, rev or rand");
    }
    if (const char *text = getenv("SIMCU_STREAMS")) {
        if (strcmp(text, "eager") == 0)
            s.eager_streams = true;
        else if (strcmp(text, "rev") == 0)
            s.streams = Order::REVERSE;
        else if (strcmp(text, "fwd") != 0) {
            (void)number("SIMCU_STREAMS", 0, ~0ull, &seed);
            if (seed != 0) s.streams = Order::RANDOM, stream_state = seed * golden;
        }
    }
    if (const char *text = getenv("SIMCU_CPASYNC")) {
        if (strcmp(text, "eager") == 0)
            s.copies = AsyncCopy::EAGER;
        else if (strcmp(text, "late") == 0)
            s.copies = AsyncCopy::LATE;
        else if (strcmp(text, "random") != 0)
            bad("SIMCU_CPASYNC", text, "eager, late or random");
    }
    s.allow_exited = getenv("SIMCU_ALLOW_EXITED") != nullptr;
    s.race = getenv("SIMCU_NORACE") == nullptr;
    s.keep_going = getenv("SIMCU_KEEP_GOING") != nullptr;
    s.protect = getenv("SIMCU_PROTECT") != nullptr;
    (void)number("SIMCU_TIMES", 0, 1 << 20, &s.times);
    (void)number("SIMCU_DEVICES", 0, 64, &s.devices);
    (void)number("SIMCU_SMS", 1, 1024, &s.sm_count);
    (void)number("SIMCU_TIMEOUT", 1, 100000, &s.timeout_s);
    if (number("SIMCU_MEMORY_MB", 1, 1 << 22, &seed)) s.memory_bytes = seed << 20;
    return s;
}

} // namespace

const Settings &settings() {
    static const Settings s = read();
    return s;
}

std::string replay() {
    std::string line;
    for (const char *name : {"SIMCU_SCHED", "SIMCU_SEED", "SIMCU_STREAMS", "SIMCU_CPASYNC"}) {
        const char *value = getenv(name);
        const char *fallback = strcmp(name, "SIMCU_SEED") == 0 ? "0" : strcmp(name, "SIMCU_CPASYNC") == 0 ? "random" : "fwd";
        if (value == nullptr && strcmp(name, "SIMCU_SCHED") == 0 && getenv("SIMCU_SEED") != nullptr) continue; // a seed alone means rand
        line += std::string(line.empty() ? "" : " ") + name + "=" + (value != nullptr ? value : fallback);
    }
    return line;
}

uint64_t random64() { return next(&thread_state); }
uint64_t stream_random64() { return next(&stream_state); }
uint64_t unordered64() { return next(&library_state); }

void note(const char *format, ...) {
    char text[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "simcu: %s\n", text);
}

void on_end(void (*hook)(int)) { end_hook = hook; }

void end_process(int code) {
    fprintf(stderr, "  replay: %s\n", replay().c_str());
    fflush(stderr);
    fflush(stdout);
#ifdef SIMCU_ASAN
    __sanitizer_print_stack_trace();
#endif
    if (end_hook != nullptr) end_hook(code);
    _exit(code);
}

void fail(const char *file, int line, const char *format, ...) {
    char text[600];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "simcu: error: %s\n", text);
    if (file != nullptr) fprintf(stderr, "  at %s:%d\n", file, line);
    fprintf(stderr, "  in %s\n", where());
    end_process(EXIT_FAULT);
}

} // namespace simcu
