// simcu_block.h: the block of threads that runs: its threads, warps and barriers, and how a thread waits and is woken. For the simulator's own
// files.
#pragma once
#include "simcu_rt.h" // Settings

namespace simcu {

enum class State { READY, WAITING, DONE };

// A copy by cp.async that its thread has not waited for.
struct CopyAsync {
    void *to;
    const void *from;
    int bytes, from_bytes, group; // the rest becomes zero
    bool done;
    const char *file;
    int line;
};

struct Fiber;
struct Thread {
    uint3 id;
    int linear;
    State state;
    Fiber *fiber;
    const char *what, *file; // where it waits
    int line;
    unsigned mask;
    uint32_t segment;    // race checker: number of this thread's run between two synchronisations; 0: not given yet
    uint32_t warp_epoch; // __syncwarp passed
    int copy_group;
    std::vector<CopyAsync> copies;
};

typedef void (*WarpFunction)(void **slots, unsigned mask, const char *file, int line);
struct WarpOperation {
    unsigned mask = 0, arrived = 0;
    const char *what = nullptr, *file = nullptr;
    WarpFunction function = nullptr;
    int line = 0;
    void *slot[32];
    Thread *thread[32];
};
struct Warp {
    WarpOperation pending[16];
    unsigned used;        // bits of pending
    unsigned live, exist; // lanes
};
struct Barrier {
    int arrived = 0, count = 0, line = 0, result = 0;
    const char *file = nullptr;
    std::vector<Thread *> waiting;
};

constexpr int MAX_THREADS = 1024;
struct Block {
    std::vector<Thread> threads = std::vector<Thread>(MAX_THREADS);
    Warp warps[MAX_THREADS / 32];
    Barrier barriers[16];
    int count = 0, done = 0;                               // threads
    uint32_t linear = 0;                                   // of the grid
    uint32_t epoch = 0;                                    // barriers passed, over all blocks
    char *dynamic_begin = nullptr, *dynamic_end = nullptr; // dynamic shared memory
    char *static_begin = nullptr,
         *static_end = nullptr; // static shared memory: the executable's thread-local storage; nothing under AddressSanitizer
    char *stack_begin = nullptr, *stack_end = nullptr; // of all fibers
};
extern Block block;
extern Thread *current; // nullptr in host code
extern bool in_kernel;

typedef void (*Thunk)(const void *kernel, void *arguments);
void run_grid(dim3 grid, dim3 threads, size_t shared_bytes, const void *kernel, Thunk thunk, const char *arguments, size_t argument_bytes);
const char *kernel_name(const void *kernel);
const char *running_kernel();
void traffic_note(size_t bytes, bool write); // an access of the running kernel to device memory

// --- scheduling (simcu_schedule.cc)
void make_ready(Thread *thread);
void wait_as(const char *what, unsigned mask, const char *file, int line); // until someone calls make_ready
void switch_away();                                                        // the current thread is registered where it will be woken, or is ready
void yield();
void run_block();
void run_thread(); // the kernel, as the current thread (simcu_launch.cc)
[[noreturn]] void deadlock();

// --- synchronisation (simcu_sync.cc)
void sync_reset();
void sync_thread_exits(Thread *thread);
void park(const void *key, const char *what, const char *file, int line);
void unpark(const void *key);
typedef void (*WarpgroupFunction)(void **slots, int warpgroup, void *context, const char *file, int line);
void warpgroup_collective(const char *what, void *slot, WarpgroupFunction function, void *context, const char *file, int line);

// --- asynchronous copies of Hopper (simcu_hopper.cc)
bool async_progress(); // completes one; false: there is none
void async_reset();

// --- fibers (simcu_fiber.cc)
struct Fiber {
    void *stack_pointer = nullptr;
    char *stack = nullptr;
    void *fake_stack = nullptr; // AddressSanitizer's
    Thread *thread = nullptr;
};
Fiber *fiber_take(void (*entry)());
void fiber_give(Fiber *fiber);
void fiber_switch(Fiber *to); // nullptr: to the host
Fiber *fiber_current();
uint64_t fiber_switches();

} // namespace simcu
