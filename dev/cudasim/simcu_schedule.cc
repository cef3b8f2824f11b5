// simcu_schedule.cc: runs the threads of one block, one at a time, in the order that the settings ask for, until all have left the kernel. What
// threads wait for is in simcu_sync.cc.
//
// The random order is a priority schedule (probabilistic concurrency testing, Burckhardt et al. 2010): warps get random priorities, the ready warp
// of the highest priority runs, now and then two priorities change places; inside a warp any lane is taken. A fair choice would keep all warps in
// step, and with it hide missing barriers.
#include "simcu_block.h" // Block
#include <algorithm>     // std::swap
#include <cstdio>        // fprintf
#include <map>           // std::map

extern uint3 threadIdx;
extern dim3 blockDim;
extern uint3 blockIdx;

namespace simcu {

Thread *current;
Block block;

namespace {

struct Queue {
    Thread *thread[32];
    int count;
};
Queue lanes[32];      // of each warp: ready ones, random order
unsigned ready_ranks; // bit r: the warp of rank r has ready lanes
uint8_t rank_of[32], at_rank[32];
Thread *ring[MAX_THREADS * 2]; // ready threads, first in, first out
unsigned ring_head, ring_tail;

bool random_order; // what the settings say, looked up once a block
int warp_count() { return (block.count + 31) / 32; }

void swap_ranks(int a, int b) {
    const unsigned bit_a = ready_ranks >> a & 1, bit_b = ready_ranks >> b & 1;
    std::swap(at_rank[a], at_rank[b]);
    rank_of[at_rank[a]] = (uint8_t)a, rank_of[at_rank[b]] = (uint8_t)b;
    ready_ranks = (ready_ranks & ~(1u << a) & ~(1u << b)) | bit_b << a | bit_a << b;
}

Thread *pop() {
    if (!random_order) return ring_head == ring_tail ? nullptr : ring[ring_head++ % (2 * MAX_THREADS)];
    if (ready_ranks == 0) return nullptr;
    const uint64_t r = random64();
    if ((r & 255) == 0) swap_ranks((int)(r >> 8 & 0xffff) % warp_count(), (int)(r >> 24 & 0xffff) % warp_count());
    const int rank = __builtin_ctz(ready_ranks);
    Queue &queue = lanes[at_rank[rank]];
    const int i = (int)((r >> 40) % (unsigned)queue.count);
    Thread *thread = queue.thread[i];
    queue.thread[i] = queue.thread[--queue.count];
    if (queue.count == 0) ready_ranks &= ~(1u << rank);
    return thread;
}

// Where nothing can run, an asynchronous copy may complete and wake someone.
Thread *next_ready() {
    Thread *next;
    while ((next = pop()) == nullptr && async_progress()) {
    }
    return next;
}

void set_current(Thread *thread) {
    current = thread;
    threadIdx = thread->id;
}

void fiber_main();
void resume(Thread *thread) {
    if (thread->fiber == nullptr) {
        thread->fiber = fiber_take(fiber_main);
        thread->fiber->thread = thread;
    }
    set_current(thread);
    fiber_switch(thread->fiber);
}

void fiber_main() {
    for (;;) {
        Fiber *me = fiber_current();
        if (me->thread != nullptr) {
            run_thread();
            me->thread->state = State::DONE;
            block.done++;
            sync_thread_exits(me->thread);
        }
        Thread *next = next_ready();
        if (next != nullptr && next->fiber == nullptr) { // a new thread takes over this stack: no switch
            next->fiber = me, me->thread = next;
            set_current(next);
            continue;
        }
        if (next == nullptr && block.done != block.count) deadlock();
        me->thread = nullptr;
        fiber_give(me);
        if (next != nullptr)
            resume(next);
        else
            fiber_switch(nullptr);
        // here again when fiber_take has given this stack to another thread
    }
}

} // namespace

void make_ready(Thread *thread) {
    thread->state = State::READY;
    if (!random_order) {
        ring[ring_tail++ % (2 * MAX_THREADS)] = thread;
        return;
    }
    Queue &queue = lanes[thread->linear / 32];
    queue.thread[queue.count++] = thread;
    ready_ranks |= 1u << rank_of[thread->linear / 32];
}

void switch_away() {
    Thread *me = current, *next = next_ready();
    if (next == nullptr) deadlock();
    if (next == me)
        set_current(me);
    else
        resume(next);
}

void wait_as(const char *what, unsigned mask, const char *file, int line) {
    current->state = State::WAITING;
    current->what = what, current->mask = mask, current->file = file, current->line = line;
    switch_away();
}

void yield() {
    if (!in_kernel) return;
    make_ready(current);
    switch_away();
}

void deadlock() {
    fprintf(stderr, "simcu: error: deadlock in kernel %s, block (%u,%u,%u): %d of %d threads exited, the rest wait for each other:\n",
            running_kernel(), blockIdx.x, blockIdx.y, blockIdx.z, block.done, block.count);
    std::map<std::string, std::vector<int>> groups;
    for (int i = 0; i < block.count; i++) {
        const Thread &t = block.threads[(size_t)i];
        if (t.state == State::DONE) groups["exit"].push_back(i);
        if (t.state != State::WAITING) continue;
        char text[400];
        snprintf(text, sizeof text, "%s (mask %08x) at %s:%d", t.what, t.mask, t.file, t.line);
        groups[text].push_back(i);
    }
    for (const auto &[what, ids] : groups) {
        fprintf(stderr, "  %zu thread(s) in %s: linear ids", ids.size(), what.c_str());
        for (size_t i = 0; i < ids.size() && i < 8; i++) fprintf(stderr, " %d", ids[i]);
        fprintf(stderr, "%s\n", ids.size() > 8 ? " ..." : "");
    }
    end_process(EXIT_FAULT);
}

void run_block() {
    ring_head = ring_tail = 0, ready_ranks = 0, block.done = 0;
    random_order = settings().threads == Order::RANDOM;
    if (random_order) {
        for (int i = 0; i < warp_count(); i++) at_rank[i] = (uint8_t)i, lanes[i].count = 0;
        for (int i = warp_count(); i > 1; i--) std::swap(at_rank[i - 1], at_rank[random64() % (unsigned)i]);
        for (int i = 0; i < warp_count(); i++) rank_of[at_rank[i]] = (uint8_t)i;
    }
    sync_reset();
    int i = 0;
    for (unsigned z = 0; z < blockDim.z; z++) {
        for (unsigned y = 0; y < blockDim.y; y++) {
            for (unsigned x = 0; x < blockDim.x; x++, i++) {
                Thread &t = block.threads[(size_t)i];
                t.id = uint3{x, y, z}, t.linear = i, t.fiber = nullptr, t.segment = t.warp_epoch = 0, t.copy_group = 0;
                t.copies.clear();
            }
        }
    }
    for (i = 0; i < block.count; i++) make_ready(&block.threads[(size_t)(settings().threads == Order::REVERSE ? block.count - 1 - i : i)]);
    block.epoch++;
    resume(pop());
    current = nullptr;
}

} // namespace simcu
