// simcu_fiber.cc: stacks of simulated threads and the switch between them, for x86-64 and System V calling conventions. No scheduling.
#include "simcu_block.h" // Fiber
#include <pthread.h>     // pthread_getattr_np
#include <sys/mman.h>    // mmap
#ifdef SIMCU_ASAN
#include <sanitizer/common_interface_defs.h> // __sanitizer_start_switch_fiber
#endif

// Saves the registers that a function must preserve and the stack pointer, takes over another stack.
extern "C" void simcu_switch(void **save, void *to);
asm(R"(
.text
.globl simcu_switch
.type simcu_switch,@function
simcu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simcu_switch,.-simcu_switch
)");

namespace simcu {
namespace {

#ifdef SIMCU_ASAN
constexpr size_t stack_bytes = 256 << 10; // redzones round every variable
#else
constexpr size_t stack_bytes = 128 << 10;
#endif
constexpr size_t page = 4096;

Fiber host, *running = &host;
std::vector<Fiber *> &spare = *new std::vector<Fiber *>; // never destroyed: LeakSanitizer finds the fibers through it
int made;
uint64_t switches;
void (*entry_point)();

void finish_switch(void *fake_stack) {
#ifdef SIMCU_ASAN
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#else
    (void)fake_stack;
#endif
}

void begin() { // first code on a new stack
    finish_switch(nullptr);
    entry_point();
}

#ifdef SIMCU_ASAN
void announce_switch(Fiber *from, Fiber *to) {
    static const void *host_stack;
    static size_t host_bytes;
    if (host_stack == nullptr) {
        pthread_attr_t attributes;
        void *lowest;
        pthread_getattr_np(pthread_self(), &attributes);
        pthread_attr_getstack(&attributes, &lowest, &host_bytes);
        pthread_attr_destroy(&attributes);
        host_stack = lowest;
    }
    __sanitizer_start_switch_fiber(&from->fake_stack, to == &host ? host_stack : to->stack, to == &host ? host_bytes : stack_bytes);
}
#endif

} // namespace

Fiber *fiber_current() { return running; }
uint64_t fiber_switches() { return switches; }
void fiber_give(Fiber *fiber) { spare.push_back(fiber); }

void fiber_switch(Fiber *to) {
    if (to == nullptr) to = &host;
    Fiber *from = running;
    running = to;
    switches++;
#ifdef SIMCU_ASAN
    announce_switch(from, to);
#endif
    simcu_switch(&from->stack_pointer, to->stack_pointer);
    finish_switch(from->fake_stack);
}

Fiber *fiber_take(void (*entry)()) {
    if (!spare.empty()) {
        Fiber *fiber = spare.back();
        spare.pop_back();
        return fiber;
    }
    entry_point = entry;
    if (block.stack_begin == nullptr) {
        void *stacks = mmap(nullptr, stack_bytes * MAX_THREADS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stacks == MAP_FAILED) fail(nullptr, 0, "no memory for the stacks of %d threads", MAX_THREADS);
        block.stack_begin = (char *)stacks, block.stack_end = block.stack_begin + stack_bytes * MAX_THREADS;
    }
    Fiber *fiber = new Fiber;
    fiber->stack = block.stack_begin + stack_bytes * (size_t)made;
    if (mprotect(fiber->stack, page, PROT_NONE) != 0) fail(nullptr, 0, "mprotect of a stack's guard page failed");
    guard_stack(fiber->stack, fiber->stack + page);
    // stacks start at different offsets: equal ones would fall into the same sets of the cache
    const uintptr_t top = (uintptr_t)(fiber->stack + stack_bytes - (size_t)(made % 61) * 192) & ~63ull;
    void **stack = (void **)top;
    *--stack = nullptr;
    *--stack = (void *)begin;
    for (int i = 0; i < 6; i++) *--stack = nullptr; // registers
    fiber->stack_pointer = stack;
    made++;
    return fiber;
}

} // namespace simcu
