// simcu_sync.cc: what threads of a block wait for: barriers, warp and warpgroup collectives, asynchronous copies, parking on an address. Misuse
// that hangs or is undefined on a GPU ends the process with a message.
#include "simcu_block.h" // Block
#include <cstring>       // memcpy

namespace simcu {
namespace {

struct WarpgroupOperation {
    int arrived = 0, line = 0;
    WarpgroupFunction function = nullptr;
    const char *file = nullptr;
    void *slot[128];
    Thread *thread[128];
};
WarpgroupOperation warpgroups[MAX_THREADS / 128];
std::vector<std::pair<const void *, Thread *>> &parked = *new std::vector<std::pair<const void *, Thread *>>;

// Almost always one and the same literal: no look at its characters.
bool same_file(const char *a, const char *b) { return a == b || strcmp(a, b) == 0; }

bool reverse() { return settings().threads == Order::REVERSE; }

// All have arrived: those who wait go on.
void release(Barrier &barrier) {
    barrier.arrived = 0;
    block.epoch++;
    std::vector<Thread *> woken;
    woken.swap(barrier.waiting);
    for (size_t i = 0; i < woken.size(); i++) {
        Thread *thread = woken[reverse() ? woken.size() - 1 - i : i];
        thread->segment = 0;
        make_ready(thread);
    }
}

void copy_now(Thread *thread, CopyAsync &copy) {
    check_lane(thread->linear & 31, copy.from, (size_t)copy.from_bytes, false, copy.file, copy.line);
    memcpy(copy.to, copy.from, (size_t)copy.from_bytes);
    memset((char *)copy.to + copy.from_bytes, 0, (size_t)(copy.bytes - copy.from_bytes));
    copy.done = true;
}

bool in_shared(const void *p) {
    const char *c = (const char *)p;
    if (c >= block.dynamic_begin && c < block.dynamic_end) return true;
    if (block.static_begin == nullptr) return memory_find(p) == nullptr; // AddressSanitizer: unknown, not the device's
    return c >= block.static_begin && c < block.static_end;
}

} // namespace

void sync_reset() {
    for (int i = 0; i < (block.count + 31) / 32; i++) {
        const int lanes = block.count - i * 32;
        Warp &warp = block.warps[i];
        warp.exist = warp.live = lanes >= 32 ? ~0u : (1u << lanes) - 1;
        warp.used = 0;
    }
    for (Barrier &barrier : block.barriers) barrier.arrived = 0, barrier.waiting.clear();
    for (WarpgroupOperation &operation : warpgroups) operation.arrived = 0;
    parked.clear();
    async_reset();
}

void sync_thread_exits(Thread *thread) {
    Warp &warp = block.warps[thread->linear / 32];
    const int lane = thread->linear & 31;
    warp.live &= ~(1u << lane);
    for (unsigned used = warp.used; used != 0; used &= used - 1) {
        const WarpOperation &o = warp.pending[__builtin_ctz(used)];
        if (o.mask >> lane & 1) fail(o.file, o.line, "thread %d exits the kernel while its warp waits for it in %s", thread->linear, o.what);
    }
    Barrier &all = block.barriers[0];
    if (all.arrived > 0 && settings().allow_exited && all.arrived == block.count - block.done)
        release(all);
    else if (all.arrived > 0 && !settings().allow_exited)
        fail(all.file, all.line, "thread %d exits the kernel while %d others wait for it in __syncthreads", thread->linear, all.arrived);
    thread->copies.clear();
}

void barrier(int id, int count, const char *file, int line) {
    if (!in_kernel) fail(file, line, "__syncthreads in host code");
    Barrier &b = block.barriers[id];
    if (count < 0) count = block.count;
    if (b.arrived == 0) {
        b.count = count, b.file = file, b.line = line;
        if (id == 0 && block.done > 0 && !settings().allow_exited)
            fail(file, line, "__syncthreads after %d threads of the block have exited", block.done);
    } else if (b.line != line || !same_file(b.file, file)) {
        fail(file, line, "divergent barrier: other threads of the block wait at %s:%d", b.file, b.line);
    }
    b.arrived++;
    current->segment = 0;
    if (b.arrived == b.count - (settings().allow_exited && id == 0 ? block.done : 0)) {
        if (settings().threads != Order::RANDOM) { // the last one goes on: no switch
            release(b);
            return;
        }
        b.waiting.push_back(current);
        release(b);
        switch_away();
        return;
    }
    b.waiting.push_back(current);
    wait_as("__syncthreads", 0, file, line);
}

// kind 0: how many, 1: all, 2: any
int barrier_reduce(int predicate, int kind, const char *file, int line) {
    Barrier &b = block.barriers[0];
    barrier(0, -1, file, line);
    b.result += kind == 1 ? predicate == 0 : predicate != 0;
    barrier(0, -1, file, line);
    const int sum = b.result;
    barrier(0, -1, file, line);
    b.result = 0;
    return kind == 1 ? sum == 0 : kind == 2 ? sum != 0 : sum;
}

void warp_collective(unsigned asked, const char *what, void *slot, WarpFunction function, const char *file, int line) {
    if (!in_kernel) fail(file, line, "%s in host code", what);
    const int lane = current->linear & 31;
    Warp &warp = block.warps[current->linear / 32];
    const unsigned mask = asked & warp.exist;
    if (!(mask >> lane & 1)) fail(file, line, "%s: the calling lane %d is not in its mask %08x", what, lane, asked);
    if (mask & ~warp.live) fail(file, line, "%s: mask %08x names lanes %08x that have already exited", what, asked, mask & ~warp.live);
    WarpOperation *mine = nullptr;
    for (unsigned used = warp.used; used != 0; used &= used - 1) {
        WarpOperation &o = warp.pending[__builtin_ctz(used)];
        if (o.mask != mask) continue; // other lanes' business, or of this lane's later
        if (o.function != function || o.line != line || !same_file(o.file, file))
            fail(file, line, "divergent warp: lane %d reached %s while other lanes wait in %s at %s:%d", lane, what, o.what, o.file, o.line);
        mine = &o;
    }
    if (mine == nullptr) {
        if ((warp.used & 0xffff) == 0xffff) fail(file, line, "more than 16 collectives of a warp are pending");
        const int free_one = __builtin_ctz(~warp.used);
        warp.used |= 1u << free_one;
        mine = &warp.pending[free_one];
        mine->mask = mask, mine->arrived = 0, mine->what = what, mine->function = function, mine->file = file, mine->line = line;
    }
    mine->slot[lane] = slot, mine->thread[lane] = current, mine->arrived |= 1u << lane;
    if (mine->arrived != mine->mask) {
        wait_as(what, asked, file, line);
        return;
    }
    function(mine->slot, mask, file, line); // the last to arrive does the work of all
    warp.used &= ~(1u << (mine - warp.pending));
    const int last = reverse() ? 31 : 0;
    for (int i = 0; i < 32; i++) {
        const int other = i ^ last; // 31 - i in reverse
        if (!(mask >> other & 1)) continue;
        Thread *thread = mine->thread[other];
        if (slot == nullptr) thread->warp_epoch++, thread->segment = 0; // __syncwarp orders memory, shuffles do not
        if (other != lane) make_ready(thread);
    }
}

void warpgroup_collective(const char *what, void *slot, WarpgroupFunction function, void *context, const char *file, int line) {
    WarpgroupOperation &o = warpgroups[current->linear / 128];
    const int at = current->linear & 127;
    if (o.arrived == 0)
        o.function = function, o.file = file, o.line = line;
    else if (o.function != function || o.line != line || !same_file(o.file, file))
        fail(file, line, "divergent warpgroup: other threads wait at %s:%d", o.file, o.line);
    o.slot[at] = slot, o.thread[at] = current;
    if (++o.arrived < 128) {
        wait_as(what, 0, file, line);
        return;
    }
    o.arrived = 0;
    function(o.slot, current->linear / 128, context, file, line);
    for (Thread *thread : o.thread)
        if (thread != current) make_ready(thread);
}

void park(const void *key, const char *what, const char *file, int line) {
    parked.push_back({key, current});
    wait_as(what, 0, file, line);
}

void unpark(const void *key) {
    size_t kept = 0;
    for (const auto &entry : parked) {
        if (entry.first == key)
            make_ready(entry.second);
        else
            parked[kept++] = entry;
    }
    parked.resize(kept);
}

int lane() { return current->linear & 31; }
void *dyn_smem() { return block.dynamic_begin; }

// The copy takes place at issue, at the wait, or at random either: all are legal. Until then the target holds NaN.
void cp_async(void *to, const void *from, int bytes, int from_bytes, const char *file, int line) {
    if (!in_kernel) fail(file, line, "cp.async in host code");
    if (((uintptr_t)to | (uintptr_t)from) & (uintptr_t)(bytes - 1)) fail(file, line, "cp.async: an address is not aligned to %d bytes", bytes);
    if (from_bytes < 0 || from_bytes > bytes) fail(file, line, "cp.async: %d of %d bytes to be read", from_bytes, bytes);
    check_lane(lane(), to, (size_t)bytes, true, file, line);
    if (!in_shared(to)) fail(file, line, "cp.async: the target is not shared memory");
    race_async_copy(to, (size_t)bytes, true);
    CopyAsync copy = {to, from, bytes, from_bytes, current->copy_group, false, file, line};
    const AsyncCopy when = settings().copies;
    if (when == AsyncCopy::EAGER || (when == AsyncCopy::RANDOM && (random64() & 1)))
        copy_now(current, copy);
    else
        memset(to, 0xff, (size_t)bytes);
    current->copies.push_back(copy);
}
void cp_async_commit() { current->copy_group++; }
void cp_async_wait(int keep) {
    size_t kept = 0;
    for (CopyAsync &copy : current->copies) {
        if (copy.group >= current->copy_group - keep) { // also those without a commit
            current->copies[kept++] = copy;
            continue;
        }
        if (!copy.done) copy_now(current, copy);
        race_async_copy(copy.to, (size_t)copy.bytes, false);
        check_lane(lane(), copy.to, (size_t)copy.bytes, true, copy.file, copy.line);
    }
    current->copies.resize(kept);
}

} // namespace simcu
