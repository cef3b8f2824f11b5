// simcu_memory.cc: memory of the simulated device and pinned memory of the host: who owns which address, checks of whole ranges, and protection of
// device memory from the host. Races and single accesses of kernels are the business of AddressSanitizer (form asan) and of simcu_race.cc (form
// race).
//
// Plain and race form: device memory comes from one reserved region and is never given out twice, so a use after free is always seen. The host
// cannot touch the region: it is opened while operations run and closed before the host goes on. Form asan: every buffer is an allocation of its
// own, of the exact size. A gap behind every buffer holds a pattern that is checked at synchronisations.
#include "simcu_block.h" // in_kernel
#include <csignal>       // sigaction
#include <cstdio>        // snprintf
#include <cstdlib>       // posix_memalign
#include <cstring>       // memset
#include <map>           // std::map
#include <sys/mman.h>    // mmap
#include <unistd.h>      // _exit
#ifdef SIMCU_ASAN
#include <sanitizer/asan_interface.h> // __asan_region_is_poisoned
extern "C" void __asan_report_error(void *pc, void *bp, void *sp, void *address, int is_write, size_t bytes);
#endif

namespace simcu {
namespace {

std::map<char *, Allocation> &allocations = *new std::map<char *, Allocation>; // by begin; freed ones stay until their address is given out again
size_t used_bytes;
int open_depth;
bool unchecked; // the device was open since the ends were checked

constexpr size_t arena_bytes = 1ull << 38, granule = 256;
char *arena; // none under AddressSanitizer

size_t rounded(size_t bytes) { return (bytes + granule - 1) / granule * granule; }

#ifndef SIMCU_ASAN
constexpr unsigned char pattern = 0xa5;
char *arena_next; // not given out yet

struct Guard {
    char *begin, *end;
};
std::vector<Guard> &guards = *new std::vector<Guard>;

void on_fault(int signal, siginfo_t *info, void *) {
    char *address = (char *)info->si_addr;
    if (address >= arena && address < arena + arena_bytes) {
        fprintf(stderr, "simcu: error: host code touches device memory at %p%s\n  in %s\n", (void *)address, memory_describe(address).c_str(),
                where());
        end_process(EXIT_RACE);
    }
    for (const Guard &guard : guards) {
        if (!in_kernel || address < guard.begin || address >= guard.end) continue;
        fprintf(stderr, "simcu: error: the stack of a thread overflows\n  in %s\n", where());
        end_process(EXIT_FAULT);
    }
    (void)sigaction(signal, nullptr, nullptr);
    struct sigaction plain = {};
    plain.sa_handler = SIG_DFL;
    (void)sigaction(signal, &plain, nullptr); // the instruction faults again, as it would without us
}

void catch_faults() {
    static char stack[64 << 10];
    stack_t alternative = {};
    alternative.ss_sp = stack, alternative.ss_size = sizeof stack;
    struct sigaction action = {}, old;
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    if (sigaltstack(&alternative, nullptr) != 0 || sigaction(SIGSEGV, &action, &old) != 0) fail(nullptr, 0, "no handler for faults");
}

void open_arena() {
    const int access = settings().protect ? PROT_NONE : PROT_READ | PROT_WRITE;
    void *region = mmap(nullptr, arena_bytes, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (region == MAP_FAILED) fail(nullptr, 0, "cannot reserve %zu GiB of addresses for device memory", arena_bytes >> 30);
    arena = arena_next = (char *)region;
    catch_faults();
}

void set_access(int access) {
    if (arena == nullptr || !settings().protect || arena_next == arena) return;
    const size_t bytes = (size_t)(arena_next - arena + 4095) / 4096 * 4096;
    if (mprotect(arena, bytes, access) != 0) fail(nullptr, 0, "mprotect of device memory failed");
}
#endif

void remember(char *begin, size_t bytes, MemoryKind kind) {
    auto at = allocations.lower_bound(begin);
    if (at != allocations.begin() && std::prev(at)->second.end > begin) at = std::prev(at);
    while (at != allocations.end() && at->first < begin + bytes + 1)
        at = allocations.erase(at); // freed before: the host's allocator gave it out again
    int device = 0;
    (void)cudaGetDevice(&device);
    allocations[begin] = {begin, begin + bytes, kind, true, device};
}

const char *kind_name(MemoryKind kind) { return kind == MemoryKind::DEVICE ? "device" : kind == MemoryKind::PINNED ? "pinned" : "registered"; }

} // namespace

const Allocation *memory_find(const void *pointer) {
    auto at = allocations.upper_bound((char *)pointer);
    if (at == allocations.begin()) return nullptr;
    const Allocation &a = std::prev(at)->second;
#ifdef SIMCU_ASAN
    if (!a.live && __asan_address_is_poisoned(pointer) == 0) return nullptr; // the host's allocator has given it out again
#endif
    return (char *)pointer < a.end || (a.begin == a.end && pointer == a.begin) ? &a : nullptr;
}

std::string memory_describe(const void *pointer) {
    auto at = allocations.upper_bound((char *)pointer);
    if (at == allocations.begin()) return "";
    const Allocation &a = std::prev(at)->second;
    if ((char *)pointer > a.end + 4096) return "";
    char text[160];
    snprintf(text, sizeof text, " (%td bytes into a %s buffer of %td bytes%s)", (char *)pointer - a.begin, kind_name(a.kind), a.end - a.begin,
             a.live ? "" : ", freed");
    return text;
}

size_t memory_used_bytes() { return used_bytes; }
bool in_device_arena(const void *pointer) { return arena != nullptr && (char *)pointer >= arena && (char *)pointer < arena + arena_bytes; }

size_t device_arena_offset(const void *pointer) { return (size_t)((char *)pointer - arena); }

void *device_alloc(size_t bytes) {
    if (used_bytes + rounded(bytes) > settings().memory_bytes) return nullptr;
#ifdef SIMCU_ASAN
    void *pointer = nullptr;
    if (posix_memalign(&pointer, granule, bytes > 0 ? bytes : 1) != 0) return nullptr;
    memset(pointer, 0xff, bytes);
#else
    if (arena == nullptr) open_arena();
    const size_t room = rounded(bytes) + granule; // the gap
    if (room > (size_t)(arena + arena_bytes - arena_next)) return nullptr;
    char *pointer = arena_next;
    arena_next += room;
    set_access(PROT_READ | PROT_WRITE);
    memset(pointer, 0xff, bytes);
    memset(pointer + bytes, pattern, room - bytes);
    if (open_depth == 0) set_access(PROT_NONE);
#endif
    used_bytes += rounded(bytes);
    remember((char *)pointer, bytes, MemoryKind::DEVICE);
    return pointer;
}

void *pinned_alloc(size_t bytes) {
    void *pointer = nullptr;
    if (posix_memalign(&pointer, 4096, bytes > 0 ? bytes : 1) != 0) return nullptr;
    memset(pointer, 0xff, bytes);
    remember((char *)pointer, bytes, MemoryKind::PINNED);
    return pointer;
}

void host_register(void *pointer, size_t bytes) { remember((char *)pointer, bytes, MemoryKind::REGISTERED); }

static void check_end(const Allocation &a) {
#ifdef SIMCU_ASAN
    (void)a;
#else
    if (a.kind != MemoryKind::DEVICE || !a.live) return;
    const size_t gap = rounded((size_t)(a.end - a.begin)) + granule - (size_t)(a.end - a.begin);
    for (size_t i = 0; i < gap; i++) {
        if ((unsigned char)a.end[i] != pattern)
            fail(nullptr, 0, "out of bounds: something wrote %zu bytes behind the end of a device buffer of %td bytes since the last check", i,
                 a.end - a.begin);
    }
#endif
}

void memory_check_ends() {
    if (!unchecked) return;
    device_open();
    for (const auto &[begin, a] : allocations) check_end(a);
    device_close();
    unchecked = false;
}

void memory_free(void *pointer, MemoryKind kind, const char *call) {
    const auto at = allocations.find((char *)pointer);
    if (at == allocations.end() || at->second.kind != kind)
        fail(nullptr, 0, "%s: %p is not the begin of a %s buffer%s", call, pointer, kind_name(kind), memory_describe(pointer).c_str());
    Allocation &a = at->second;
    if (!a.live) fail(nullptr, 0, "%s: double free of a %s buffer of %td bytes", call, kind_name(kind), a.end - a.begin);
    device_open();
    check_end(a);
    device_close(); // open already where a stream frees it
    a.live = false;
    if (kind == MemoryKind::DEVICE) used_bytes -= rounded((size_t)(a.end - a.begin));
#ifdef SIMCU_ASAN
    if (kind != MemoryKind::REGISTERED) free(pointer);
#else
    if (kind == MemoryKind::PINNED) free(pointer);
    if (kind == MemoryKind::DEVICE) { // whole pages go back to the system, the addresses stay taken
        const uintptr_t first = ((uintptr_t)a.begin + 4095) / 4096 * 4096, last = (uintptr_t)a.end / 4096 * 4096;
        if (last > first) (void)madvise((void *)first, last - first, MADV_DONTNEED);
    }
#endif
}

void device_open() {
    unchecked = true;
    if (open_depth++ > 0) return;
#ifndef SIMCU_ASAN
    set_access(PROT_READ | PROT_WRITE);
#endif
}
void device_close() {
    if (--open_depth > 0) return;
#ifndef SIMCU_ASAN
    set_access(PROT_NONE);
#endif
}

void guard_stack(char *begin, char *end) {
#ifdef SIMCU_ASAN
    (void)begin, (void)end;
#else
    guards.push_back({begin, end});
#endif
}

// The part of range_note that every form has. True: device memory.
bool range_check(const void *pointer, size_t bytes, bool write, const char *what) {
    const Allocation *a = memory_find(pointer);
    const bool device = a != nullptr ? a->kind == MemoryKind::DEVICE : in_device_arena(pointer);
    if (bytes == 0 || (!device && (a == nullptr || !a->live))) return false;
    const char *verb = write ? "writes" : "reads";
    if (a == nullptr) fail(nullptr, 0, "out of bounds: %s %s %zu bytes at %p, where no buffer is", what, verb, bytes, pointer);
    if (!a->live) fail(nullptr, 0, "use after free: %s %s %zu bytes%s", what, verb, bytes, memory_describe(pointer).c_str());
    if ((char *)pointer + bytes > a->end) fail(nullptr, 0, "out of bounds: %s %s %zu bytes%s", what, verb, bytes, memory_describe(pointer).c_str());
    return device;
}

// ---------------------------------------------------------------------------- accesses and clocks where there is no race checker
#ifndef SIMCU_RACE
#ifdef SIMCU_ASAN
void check_lane(int lane, const void *p, size_t bytes, bool write, const char *file, int line) {
    void *bad = bytes > 0 ? __asan_region_is_poisoned((void *)p, bytes) : nullptr;
    if (bad == nullptr) return;
    fprintf(stderr, "simcu: lane %d: %s of %zu bytes at %p touches poisoned %p, %s:%d\n", lane, write ? "write" : "read", bytes, p, bad, file,
            line);
    __asan_report_error(__builtin_return_address(0), __builtin_frame_address(0), __builtin_frame_address(0), bad, write, 1);
}
#else
void check_lane(int, const void *, size_t, bool, const char *, int) {}
#endif
void range_note(const void *pointer, size_t bytes, bool write, const char *what) {
    (void)range_check(pointer, bytes, write, what);
#ifdef SIMCU_ASAN
    check_lane(0, pointer, bytes, write, what, 0);
#endif
}
void atomic_note(const void *, size_t) {}
Clock race_host_clock() { return {}; }
void race_operation(int, const Clock &, const std::vector<int> &, const char *, uint64_t *) {}
void race_host_waited(int) {}
void race_event(const void *, bool) {}
void race_host_event(const void *) {}
void race_async_copy(const void *, size_t, bool) {}
#endif

} // namespace simcu

#ifdef SIMCU_ASAN
extern "C" void __asan_on_error() {
    fprintf(stderr, "simcu: AddressSanitizer error in %s\n  replay: %s\n", simcu::where(), simcu::replay().c_str());
}
#endif
