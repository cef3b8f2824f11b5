// test_memory.cuh: copies to the CUDA device: the host's buffer is overwritten as soon as a copy returns, and every byte must arrive all the same.
// Copies for a save: they hold what was there when they were asked for, whatever ops have been enqueued since.
#ifndef TEST_CUDA_TEST_MEMORY_CUH
#define TEST_CUDA_TEST_MEMORY_CUH

#include "dev/test/cuda/compare.cuh" // Compare
#include <ctime>                     // clock_gettime

// Bytes of one copy, and of all copies, of a case. The ring of llmc/cuda/memory.cuh has 4 pieces of 4 MiB.
struct MemoryCase {
    const char *what;
    size_t copy_bytes, total_bytes;
};
static const MemoryCase memory_cases[] = {
    {"one byte at a time", 1, 300},
    {"many small copies", 1001, 1 << 20},
    {"odd pieces, the ring goes round", (3 << 20) + 17, 30 << 20},
    {"a piece exactly", 4 << 20, 20 << 20},
    {"larger than the ring", (18 << 20) + 5, (18 << 20) + 5},
};

static uint8_t memory_byte_(size_t i) { return (uint8_t)(i * 2654435761u >> 13); }

// All of a case's copies to one device buffer, from one host buffer that is overwritten in between; the bytes that differ in the end.
static int64_t memory_run_(Device *device, const MemoryCase &c) {
    std::vector<uint8_t> host(c.copy_bytes), back(c.total_bytes);
    uint8_t *memory = (uint8_t *)device->alloc(device, c.total_bytes);
    for (size_t done = 0; done < c.total_bytes; done += c.copy_bytes) {
        const size_t bytes = c.copy_bytes < c.total_bytes - done ? c.copy_bytes : c.total_bytes - done;
        for (size_t i = 0; i < bytes; i++) host[i] = memory_byte_(done + i);
        device->copy_in(device, memory + done, host.data(), bytes);
        memset(host.data(), 0xee, host.size());
    }
    device->copy_out(device, back.data(), memory, c.total_bytes);
    device->release(device, memory);
    int64_t wrong = 0;
    for (size_t i = 0; i < c.total_bytes; i++) wrong += back[i] != memory_byte_(i);
    return wrong;
}

// A copy must not overtake the ops before it, nor be overtaken by those after it.
static void memory_order_(Compare *t) {
    compare_case(t, "copy, cast, copy, cast");
    Device *d = t->device[1];
    const int64_t n = 5000;
    std::vector<float> host((size_t)n);
    const Both in = both_output(t, n, DTYPE_F32), first = both_output(t, n, DTYPE_F32), second = both_output(t, n, DTYPE_F32);
    const Both outs[2] = {first, second};
    for (int round = 0; round < 2; round++) {
        for (int64_t i = 0; i < n; i++) host[(size_t)i] = (float)(i + round);
        d->copy_in(d, in[1].data, host.data(), (size_t)n * 4);
        d->cast(d, outs[round][1], in[1], n);
    }
    for (int round = 0; round < 2; round++) {
        const std::vector<float> got = compare_read(t, 1, outs[round][1], n);
        int64_t wrong = 0;
        for (int64_t i = 0; i < n; i++) wrong += !(got[(size_t)i] == (float)(i + round));
        compare_record(t, "copy_in, order with ops", (double)wrong, 0);
    }
    compare_release(t);
}

// Marks pass in the order of ops, before now, and are counted anew after they were told.
static void memory_marks_(Compare *t) {
    enum { MARKS = 200 };
    Device *d = t->device[1];
    compare_case(t, "marks");
    const Both x = both_output(t, 1000, DTYPE_F32);
    int64_t wrong = 0, ns[MARKS];
    for (int round = 0; round < 2; round++) {
        struct timespec now;
        for (int64_t i = 0; i < MARKS; i++) {
            wrong += d->mark(d) != i;
            d->zero(d, x[1].data, 4000);
        }
        d->mark_times(d, ns, MARKS);
        clock_gettime(CLOCK_MONOTONIC, &now);
        for (int i = 1; i < MARKS; i++) wrong += ns[i] < ns[i - 1];
        wrong += ns[MARKS - 1] > (int64_t)now.tv_sec * 1000000000 + now.tv_nsec || ns[0] <= 0;
    }
    d->mark_times(d, ns, 0);
    compare_record(t, "marks out of order", (double)wrong, 0);
    compare_release(t);
}

// Elements of a copy that are not those of a round.
static int64_t memory_wrong_(const float *got, int64_t n, int round) {
    int64_t wrong = 0;
    for (int64_t i = 0; i < n; i++) wrong += !(got[i] == (float)(i + 10000 * round));
    return wrong;
}

// Rounds of: an op makes values, a copy of them starts, other ops read them, the next round's op overwrites them behind a fence. What came behind
// the fence tells in odd rounds that the copy of the round before is there; for that of an odd round the host waits.
static void memory_snapshot_(Compare *t) {
    compare_case(t, "copies for a save");
    Device *d = t->device[1];
    const int64_t n = 5000, first = 1237;
    const int rounds = 5;
    float *copy = (float *)d->host_alloc(d, (size_t)n * 4);
    const Both made = both_output(t, n, DTYPE_F32), values = both_output(t, n, DTYPE_F32), read = both_output(t, n, DTYPE_F32);
    std::vector<float> host((size_t)n), back((size_t)n);
    d->snapshot_fence(d); // nothing to wait for
    for (int round = 0; round < rounds; round++) {
        for (int64_t i = 0; i < n; i++) host[(size_t)i] = (float)(i + 10000 * round);
        d->copy_in(d, made[1].data, host.data(), (size_t)n * 4);
        d->snapshot_fence(d);
        d->cast(d, values[1], made[1], n);
        if (round % 2 == 1) {
            d->copy_out(d, back.data(), values[1].data, (size_t)n * 4); // behind the fence: the copy of the round before is there
            compare_record(t, "snapshot, behind the fence", (double)memory_wrong_(copy, n, round - 1), 0);
            compare_record(t, "snapshot, values", (double)memory_wrong_(back.data(), n, round), 0);
        }
        d->snapshot_begin(d);
        d->snapshot_copy(d, copy, values[1].data, (size_t)first * 4);
        d->snapshot_copy(d, copy + first, buffer_at(values[1], first).data, (size_t)(n - first) * 4);
        d->snapshot_copy(d, copy, values[1].data, 0);
        d->cast(d, read[1], values[1], n);
        if (round % 2 == 0) continue;
        d->snapshot_wait(d);
        compare_record(t, "snapshot, waited for", (double)memory_wrong_(copy, n, round), 0);
    }
    d->snapshot_wait(d);
    d->host_release(d, copy);
    compare_release(t);
}

static void test_memory(Compare *t) {
    for (const MemoryCase &c : memory_cases) {
        compare_case(t, "%s", c.what);
        compare_record(t, "copy_in, bytes that differ", (double)memory_run_(t->device[1], c), 0);
    }
    Device *d = t->device[1];
    compare_case(t, "no bytes");
    d->copy_in(d, nullptr, nullptr, 0);
    d->copy_out(d, nullptr, nullptr, 0);
    compare_record(t, "copy_in, bytes that differ", 0, 0);
    memory_order_(t);
    memory_marks_(t);
    memory_snapshot_(t);
}

#endif
