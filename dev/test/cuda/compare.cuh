// compare.cuh: runs an op on the CPU device and on the CUDA device with the same inputs and compares what they write. Knows no op.
//
// The CPU device always computes in fp32: it is the reference. For a case in bf16 the inputs are values that bf16 can hold, the CUDA device gets
// them as bf16, and its error may be at most `factor` times that of the reference rounded to bf16. Outputs start as NaN on both: what an op forgets
// to write is seen.
#ifndef TEST_CUDA_COMPARE_CUH
#define TEST_CUDA_COMPARE_CUH

#include "llmc/device.h"    // Device, Buffer
#include "llmc/precision.h" // bf16_from_f32
#include "llmc/rng.h"       // rng_mix
#include <cmath>            // fabs, isfinite
#include <cstdarg>          // va_list
#include <cstdint>          // int64_t
#include <cstdio>           // printf
#include <cstring>          // memcpy
#include <map>              // std::map
#include <string>           // std::string
#include <vector>           // std::vector

struct CompareRow {
    double worst = 0, bound = 0; // error in units as said by `unit`
    int64_t checks = 0, failed = 0;
    std::string where; // of the worst
};

struct Compare {
    Device *device[2];              // CPU, CUDA
    std::string name;               // of the running case
    std::vector<std::string> order; // of rows
    std::map<std::string, CompareRow> rows;
    std::vector<Buffer> owned[2];
    uint64_t stream = 0; // of random numbers
};

// The same values on both devices: [0] on the CPU, [1] on CUDA.
struct Both {
    Buffer at[2];
    int64_t n;
    Buffer operator[](int which) const { return at[which]; }
};

__attribute__((format(printf, 2, 3))) static inline void compare_case(Compare *t, const char *format, ...) {
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    t->name = text;
}

static inline Buffer compare_buffer_(Compare *t, int which, const void *host, int64_t n, Dtype dtype) {
    Device *device = t->device[which];
    const size_t bytes = (size_t)n * dtype_bytes(dtype);
    Buffer buffer = buffer_of(device->alloc(device, bytes), dtype);
    device->copy_in(device, buffer.data, host, bytes);
    t->owned[which].push_back(buffer);
    return buffer;
}

static inline float compare_round(Dtype dtype, double value) {
    return dtype == DTYPE_BF16 ? bf16_to_f32(bf16_from_f32((float)value)) : (float)value;
}

// dtype is CUDA's: F32 or BF16.
static inline Both both_values(Compare *t, const std::vector<float> &values, Dtype dtype) {
    std::vector<float> rounded(values.size());
    std::vector<uint16_t> narrow(values.size());
    for (size_t i = 0; i < values.size(); i++) rounded[i] = compare_round(dtype, values[i]), narrow[i] = bf16_from_f32(rounded[i]);
    const int64_t n = (int64_t)values.size();
    const void *cuda = dtype == DTYPE_BF16 ? (const void *)narrow.data() : rounded.data();
    return {{compare_buffer_(t, 0, rounded.data(), n, DTYPE_F32), compare_buffer_(t, 1, cuda, n, dtype)}, n};
}

static inline Both both_ints(Compare *t, const std::vector<int32_t> &values) {
    const int64_t n = (int64_t)values.size();
    return {{compare_buffer_(t, 0, values.data(), n, DTYPE_I32), compare_buffer_(t, 1, values.data(), n, DTYPE_I32)}, n};
}

// A number in device memory.
template <class T> struct BothScalar {
    const T *at[2];
    const T *operator[](int which) const { return at[which]; }
};
template <class T> static inline BothScalar<T> both_scalar(Compare *t, T value) {
    BothScalar<T> scalar;
    for (int w = 0; w < 2; w++) {
        void *data = t->device[w]->alloc(t->device[w], sizeof value);
        t->device[w]->copy_in(t->device[w], data, &value, sizeof value);
        t->owned[w].push_back(buffer_of(data, DTYPE_F32));
        scalar.at[w] = (const T *)data;
    }
    return scalar;
}

// uniform in (-1, 1)
static inline double compare_uniform(Compare *t) { return (double)(rng_mix(++t->stream) >> 11) * 0x1p-52 - 1; }

// centre + scale * uniform(-1, 1)
static inline Both both_random(Compare *t, int64_t n, Dtype dtype, double centre, double scale) {
    std::vector<float> values((size_t)n);
    for (float &value : values) value = (float)(centre + scale * compare_uniform(t));
    return both_values(t, values, dtype);
}

// An output: NaN.
static inline Both both_output(Compare *t, int64_t n, Dtype dtype) { return both_values(t, std::vector<float>((size_t)n, NAN), dtype); }

// Matrices whose rows (columns) begin `row` elements apart, with NaN between them; values (rows, columns).
static inline Both both_rows(Compare *t, const std::vector<float> &values, int64_t columns, int64_t row, Dtype dtype) {
    const size_t rows = values.size() / (size_t)columns;
    std::vector<float> apart(rows * (size_t)row, NAN);
    for (size_t i = 0; i < values.size(); i++) apart[i / (size_t)columns * (size_t)row + i % (size_t)columns] = values[i];
    Both both = both_values(t, apart, dtype);
    for (Buffer &buffer : both.at) buffer.row = row;
    return both;
}

static inline Both both_absent() { return {{buffer_of(nullptr, DTYPE_F32), buffer_of(nullptr, DTYPE_F32)}, 0}; }

// `run(device, which)` on both.
template <class Run> static inline void on_both(Compare *t, Run run) {
    for (int which = 0; which < 2; which++) run(t->device[which], which);
}

static inline std::vector<float> compare_read(Compare *t, int which, Buffer buffer, int64_t n) {
    Device *device = t->device[which];
    std::vector<float> values((size_t)n);
    if (buffer.dtype == DTYPE_BF16) {
        std::vector<uint16_t> narrow((size_t)n);
        device->copy_out(device, narrow.data(), buffer.data, (size_t)n * 2);
        for (int64_t i = 0; i < n; i++) values[(size_t)i] = bf16_to_f32(narrow[(size_t)i]);
    } else {
        device->copy_out(device, values.data(), buffer.data, (size_t)n * 4);
    }
    return values;
}

static inline void compare_record(Compare *t, const std::string &what, double error, double bound) {
    if (t->rows.count(what) == 0) t->order.push_back(what);
    CompareRow &row = t->rows[what];
    const bool bad = !(error <= bound); // also NaN
    if (row.checks == 0 || bad || (error > row.worst && row.failed == 0)) row.worst = error, row.where = t->name, row.bound = bound;
    row.checks++;
    row.failed += bad;
}

// Compares what the CUDA device has, stored as dtype, with what the CPU device wants: in fp32 the largest difference over the largest reference
// against `bound`; in bf16 the largest difference over the largest rounding error of the reference (and the fp32 bound) against `factor`. Of few
// elements that may be small by luck: half of the largest possible one counts at least.
static inline void compare_values(Compare *t, const char *what, const std::vector<float> &want, const std::vector<float> &have, Dtype dtype,
                                  double bound, double factor = 2) {
    double difference = 0, rounding = 0, size = 0;
    for (size_t i = 0; i < want.size(); i++) {
        const double d = fabs((double)have[i] - want[i]), r = fabs((double)compare_round(DTYPE_BF16, want[i]) - want[i]);
        if (!(d <= difference)) difference = d; // NaN stays
        if (!(r <= rounding)) rounding = r;
        if (!(fabs(want[i]) <= size)) size = fabs(want[i]);
        if (std::isnan(d)) difference = NAN;
        if (std::isnan(difference)) break;
    }
    if (size == 0) size = 1;
    if (dtype == DTYPE_BF16) {
        if (rounding < 0x1p-10 * size) rounding = 0x1p-10 * size;
        compare_record(t, std::string(what) + " bf16", difference == 0 ? 0 : difference / (rounding + bound * size), factor);
    } else {
        compare_record(t, std::string(what) + " fp32", difference / size, bound);
    }
}

// Compares (n) elements of both devices.
static inline void compare(Compare *t, const char *what, const Both &got, double bound, double factor = 2) {
    compare_values(t, what, compare_read(t, 0, got.at[0], got.n), compare_read(t, 1, got.at[1], got.n), got.at[1].dtype, bound, factor);
}

// Columns of rows that are apart, without what lies between them.
static inline std::vector<float> compare_read_rows(Compare *t, int which, const Both &both, int64_t columns) {
    const std::vector<float> apart = compare_read(t, which, both[which], both.n);
    std::vector<float> values;
    for (size_t i = 0; i < apart.size(); i++) {
        if ((int64_t)i % both[which].row < columns) values.push_back(apart[i]);
    }
    return values;
}

// Compares the columns of rows that are apart; what lies between them must still be NaN.
static inline void compare_rows(Compare *t, const char *what, const Both &got, int64_t columns, double bound, double factor = 2) {
    compare_values(t, what, compare_read_rows(t, 0, got, columns), compare_read_rows(t, 1, got, columns), got[1].dtype, bound, factor);
    int64_t changed = 0;
    for (int which = 0; which < 2; which++) {
        const std::vector<float> apart = compare_read(t, which, got[which], got.n);
        for (size_t i = 0; i < apart.size(); i++) changed += (int64_t)i % got[which].row >= columns && !std::isnan(apart[i]);
    }
    compare_record(t, std::string(what) + ", changed between rows", (double)changed, 0);
}

// Gives back the buffers of a case.
static inline void compare_release(Compare *t) {
    for (int which = 0; which < 2; which++) {
        for (const Buffer &buffer : t->owned[which]) t->device[which]->release(t->device[which], buffer.data);
        t->owned[which].clear();
    }
}

// The table; true when all is well.
static inline bool compare_report(const Compare *t) {
    int64_t failed = 0, checks = 0;
    printf("%-44s %8s %12s %10s  %s\n", "op and tensor", "checks", "worst error", "bound", "worst case");
    for (const std::string &what : t->order) {
        const CompareRow &row = t->rows.at(what);
        printf("%-44s %8lld %12.3g %10.3g  %s%s\n", what.c_str(), (long long)row.checks, row.worst, row.bound, row.where.c_str(),
               row.failed > 0 ? "  FAILED" : "");
        failed += row.failed, checks += row.checks;
    }
    printf("%lld passed, %lld failed\n", (long long)(checks - failed), (long long)failed);
    return failed == 0 && checks > 0;
}

#endif
