// monitor.h: what a run tells: the console line, log.jsonl, run.json, and at the end what every rank held and sent. It observes: nothing here
// changes training. It does not create or lock OUT (checkpoints do) and decides no exit code.
//
// log.jsonl holds a JSON object per line, each written by one write(): a crash can tear only the last line. Floats are
// %.9g (every fp32 value survives), non-finite ones null.
#ifndef LLMC_MONITOR_H
#define LLMC_MONITOR_H

#include "llmc/base.h"         // Error, fail, clock_ms
#include "llmc/comm.h"         // CommCount, comm_kind_names
#include "llmc/model.h"        // ModelConfig
#include "llmc/monitor_json.h" // MonitorJson
#include "llmc/options.h"      // Options, options_rows
#include <fcntl.h>             // open
#include <jansson.h>           // json_loadb
#include <omp.h>               // omp_get_max_threads
#include <stddef.h>            // offsetof
#include <sys/ioctl.h>         // TIOCGWINSZ
#if defined(USE_DNNL)
#include <dnnl.h> // dnnl_version
#elif defined(USE_OPENBLAS)
#include <cblas.h> // openblas_get_config
#endif

// ----------------------------------------------------------------------------
// The monitor of a run

typedef struct {
    int64_t step;               // from 1
    double loss, grad_norm, lr; // before the update of this step; lr of this update
    int64_t tokens;             // that this step trained on
    double ms;                  // wall time of the step
    const int64_t *samples;     // (sample_count) ids of the step's sequences; NULL: not logged
    int64_t sample_count;
} StepRecord;

// What a rank held and sent. Of fixed size: it travels between ranks as bytes.
typedef struct {
    int tp, pp, dp; // place in the mesh
    size_t param_bytes, grad_bytes, optim_bytes, activation_peak_bytes;
    size_t device_own_bytes;                          // of a GPU's memory, beside tensors: workspace and scratch
    size_t buffer_bytes;                              // gathered parameters, gradients on their way, messages, the copy of a checkpoint
    size_t resident_start_bytes, resident_peak_bytes; // of the process, as the kernel counts; 0: unknown
    CommCount comm[COMM_KINDS];                       // calls and bytes by kind
    CommCount step_comm[COMM_KINDS];                  // of these in training steps: not at the start, in validation, saving
} MonitorRank;

enum { MONITOR_PATH_BYTES = 4096 + 32 };

typedef struct {
    // console
    FILE *console;   // stdout
    bool terminal;   // the console line is rewritten in place; otherwise lines are rationed
    bool line_open;  // the cursor stands behind a console line
    bool pending;    // line[] was held back by the rationing
    bool started;    // a console line was shown
    double shown_ms; // when
    char line[256];
    // rates
    int64_t total_steps, step;                     // step: the last one recorded
    double flops_per_token, peak_flops;            // peak_flops 0: MFU unknown
    double recent_tokens, recent_ms, recent_steps; // sums that forget with a factor of 0.9 per step
    // log
    int log; // file descriptor, -1 without OUT
    char path[MONITOR_PATH_BYTES];
    MonitorJson json; // the record being written; its memory is kept
} Monitor;

// Flushes, syncs, closes and renames TMP to PATH, so that PATH is either the old file or the whole new one.
static inline bool monitor_commit_(FILE *file, const char *tmp, const char *path, Error *error) {
    bool good = !ferror(file) && fflush(file) == 0 && fsync(fileno(file)) == 0;
    int cause = errno;
    if (fclose(file) != 0 && good) {
        good = false;
        cause = errno;
    }
    if (good && rename(tmp, path) != 0) {
        good = false;
        cause = errno;
    }
    if (!good) {
        (void)unlink(tmp); // it may not even exist; the error that matters is reported
        return fail(error, CODE_IO, "cannot write '%s': %s", path, strerror(cause));
    }
    char parent[MONITOR_PATH_BYTES];
    snprintf(parent, sizeof parent, "%.*s", (int)(strrchr(path, '/') - path), path);
    int directory = open(parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0) return fail(error, CODE_IO, "cannot open '%s': %s", parent, strerror(errno));
    good = fsync(directory) == 0 || errno == EINVAL; // some file systems have no fsync of directories
    if (!good) (void)fail(error, CODE_IO, "cannot sync '%s': %s", parent, strerror(errno));
    close(directory);
    return good;
}

// Does a line of an old log belong to the first `step` steps? Damaged lines and the record of an end do not.
static inline bool monitor_keeps_line_(const char *line, size_t length, int64_t step) {
    json_error_t ignored;
    json_t *record = json_loadb(line, length, JSON_ALLOW_NUL, &ignored);
    const json_t *at = json_object_get(record, "step");
    const char *event = json_string_value(json_object_get(record, "event"));
    const bool keep = json_is_object(record) && (at == NULL || (json_is_number(at) && json_number_value(at) <= (double)step)) &&
                      (event == NULL || strcmp(event, "end") != 0);
    json_decref(record);
    return keep;
}

static inline bool monitor_cut_log_(const char *path, int64_t step, Error *error) {
    FILE *old = base_open_regular(path);
    if (old == NULL) return errno == ENOENT || fail(error, CODE_IO, "cannot read '%s': %s", path, strerror(errno));
    char tmp[MONITOR_PATH_BYTES + 8];
    snprintf(tmp, sizeof tmp, "%s.tmp", path);
    FILE *cut = base_create_file(tmp);
    if (cut == NULL) {
        (void)fail(error, CODE_IO, "cannot write '%s': %s", tmp, strerror(errno));
        fclose(old);
        return false;
    }
    char *line = NULL;
    size_t room = 0;
    for (ssize_t length; (length = getline(&line, &room, old)) > 0;) {
        if (line[length - 1] == '\n') length--;
        if (!monitor_keeps_line_(line, (size_t)length, step)) continue;
        fwrite(line, 1, (size_t)length, cut); // errors are sticky: monitor_commit_ looks at ferror
        fputc('\n', cut);
    }
    free(line);
    const bool read = !ferror(old) || fail(error, CODE_IO, "cannot read '%s': %s", path, strerror(errno));
    fclose(old);
    return monitor_commit_(cut, tmp, path, error) && read;
}

// Does the log of OUT end with the record of a finished run?
static inline bool monitor_finished(const char *out) {
    char path[MONITOR_PATH_BYTES], *line = NULL;
    size_t room = 0;
    bool finished = false;
    snprintf(path, sizeof path, "%s/log.jsonl", out);
    FILE *log = base_open_regular(path);
    if (log == NULL) return false;
    while (getline(&line, &room, log) > 0) finished = strncmp(line, "{\"event\":\"end\",", 15) == 0;
    free(line);
    fclose(log);
    return finished;
}

// OUT may be NULL: then there is no log. With `resumed` the log is cut back to `resumed_step`; otherwise it starts anew.
static inline bool monitor_open(Monitor *monitor, const char *out, int64_t total_steps, bool resumed, int64_t resumed_step, Error *error) {
    *monitor =
        (Monitor){.console = stdout, .terminal = isatty(STDOUT_FILENO), .total_steps = total_steps, .step = resumed ? resumed_step : 0, .log = -1};
    if (out == NULL) return true;
    if (snprintf(monitor->path, sizeof monitor->path, "%s/log.jsonl", out) >= (int)sizeof monitor->path) {
        return fail(error, CODE_USAGE, "--out: got a name of %zu bytes, wanted at most %d", strlen(out), MONITOR_PATH_BYTES - 16);
    }
    if (resumed && !monitor_cut_log_(monitor->path, resumed_step, error)) return false;
    monitor->log = open(monitor->path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | (resumed ? 0 : O_TRUNC), 0666);
    if (monitor->log < 0) return fail(error, CODE_IO, "cannot write '%s': %s", monitor->path, strerror(errno));
    return true;
}

// What MFU is measured against: the model's FLOPs per token and the device's rate of large matrix products (0 = unknown).
static inline void monitor_rates(Monitor *monitor, double flops_per_token, double peak_flops) {
    monitor->flops_per_token = flops_per_token;
    monitor->peak_flops = peak_flops;
}

// ----------------------------------------------------------------------------
// Console

// Makes room for a message: a console line in place is erased, one that was held back is shown first.
static inline void monitor_clear_(Monitor *monitor) {
    if (monitor->line_open) fputs("\r\033[K", monitor->console);
    if (monitor->pending) fprintf(monitor->console, "%s\n", monitor->line);
    monitor->line_open = monitor->pending = false;
}

// A message on lines of its own.
LLMC_PRINTF(2, 3) static inline void monitor_say(Monitor *monitor, const char *format, ...) {
    monitor_clear_(monitor);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(monitor->console, format, arguments);
    va_end(arguments);
    fputc('\n', monitor->console);
    fflush(monitor->console);
}

static inline const char *monitor_duration_(double seconds, char text[32]) {
    if (!(seconds < 3.6e9)) return "?";
    const long long s = (long long)(seconds + 0.5);
    if (s >= 86400) {
        snprintf(text, 32, "%lldd%02lldh", s / 86400, s / 3600 % 24);
    } else if (s >= 3600) {
        snprintf(text, 32, "%lld:%02lld:%02lld", s / 3600, s / 60 % 60, s % 60);
    } else {
        snprintf(text, 32, "%lld:%02lld", s / 60, s % 60);
    }
    return text;
}

static inline double monitor_mfu_(const Monitor *monitor, double tokens, double ms) {
    return monitor->peak_flops > 0 && ms > 0 ? tokens * monitor->flops_per_token / (ms * 1e-3) / monitor->peak_flops : (double)NAN;
}

// Shows the console line: in place on a terminal, else at most one a second, always the first and the last.
static inline void monitor_show_(Monitor *monitor, const StepRecord *r) {
    const double loss = isnan(r->loss) ? (double)NAN : r->loss, norm = isnan(r->grad_norm) ? (double)NAN : r->grad_norm; // never "-nan"
    char mfu[16] = "n/a", left[32];
    const double tokens = monitor->recent_tokens, ms = monitor->recent_ms;
    const double share = monitor_mfu_(monitor, tokens, ms);
    if (isfinite(share)) snprintf(mfu, sizeof mfu, "%.1f%%", 100 * share);
    const double seconds = (double)max_i64(0, monitor->total_steps - r->step) * ms / monitor->recent_steps * 1e-3;
    snprintf(monitor->line, sizeof monitor->line, "step %lld/%lld | loss %.4f | norm %.3f | lr %.2e | %.1f ms | %.0f tok/s | MFU %s | ETA %s",
             (long long)r->step, (long long)monitor->total_steps, loss, norm, r->lr, r->ms, ms > 0 ? tokens / (ms * 1e-3) : 0, mfu,
             monitor_duration_(seconds, left));
    const double now = clock_ms();
    if (monitor->terminal) {
        struct winsize size = {0}; // a line that wraps could not be rewritten
        const bool known = ioctl(fileno(monitor->console), TIOCGWINSZ, &size) == 0 && size.ws_col > 1;
        fprintf(monitor->console, "\r\033[K%.*s", known ? size.ws_col - 1 : 255, monitor->line);
        monitor->line_open = true;
    } else if (!monitor->started || r->step >= monitor->total_steps || now - monitor->shown_ms >= 1000) {
        fprintf(monitor->console, "%s\n", monitor->line);
        monitor->pending = false;
        monitor->shown_ms = now;
    } else {
        monitor->pending = true;
    }
    monitor->started = true;
    fflush(monitor->console);
}

// ----------------------------------------------------------------------------
// Records

static inline MonitorJson *monitor_begin_(Monitor *monitor) {
    monitor->json.length = 0;
    monitor_json_raw(&monitor->json, "{");
    return &monitor->json;
}

static inline bool monitor_write_(Monitor *monitor, Error *error) {
    monitor_json_raw(&monitor->json, "}\n");
    if (monitor->log < 0) return true;
    for (size_t done = 0; done < monitor->json.length;) {
        const ssize_t count = write(monitor->log, monitor->json.text + done, monitor->json.length - done);
        if (count < 0 && errno == EINTR) continue;
        if (count <= 0) return fail(error, CODE_IO, "cannot write '%s': %s", monitor->path, strerror(count < 0 ? errno : ENOSPC));
        done += (size_t)count;
    }
    return true;
}

static inline bool monitor_step(Monitor *monitor, const StepRecord *r, Error *error) {
    monitor->step = r->step;
    monitor->recent_tokens = 0.9 * monitor->recent_tokens + (double)r->tokens;
    monitor->recent_ms = 0.9 * monitor->recent_ms + r->ms;
    monitor->recent_steps = 0.9 * monitor->recent_steps + 1;
    monitor_show_(monitor, r);
    MonitorJson *json = monitor_begin_(monitor);
    monitor_put_int(json, "step", r->step);
    monitor_put_real(json, "loss", r->loss);
    monitor_put_real(json, "grad_norm", r->grad_norm);
    monitor_put_real(json, "lr", r->lr);
    monitor_put_int(json, "tokens", r->tokens);
    monitor_put_real(json, "ms", r->ms);
    monitor_put_real(json, "tok_per_s", r->ms > 0 ? (double)r->tokens / (r->ms * 1e-3) : (double)NAN);
    monitor_put_real(json, "mfu", monitor_mfu_(monitor, (double)r->tokens, r->ms));
    if (r->samples != NULL) {
        monitor_json_key(json, "samples");
        monitor_json_raw(json, "[");
        for (int64_t i = 0; i < r->sample_count; i++) {
            monitor_json_next(json);
            monitor_json_raw(json, "%lld", (long long)r->samples[i]);
        }
        monitor_json_raw(json, "]");
    }
    return monitor_write_(monitor, error);
}

static inline bool monitor_val(Monitor *monitor, int64_t step, double val_loss, Error *error) {
    monitor_say(monitor, "step %lld/%lld | val loss %.4f", (long long)step, (long long)monitor->total_steps, val_loss);
    MonitorJson *json = monitor_begin_(monitor);
    monitor_put_int(json, "step", step);
    monitor_put_real(json, "val_loss", val_loss);
    return monitor_write_(monitor, error);
}

// An event: begin, put members with monitor_put_*, end. It carries the last step, so that a resumed run can cut it away.
static inline MonitorJson *monitor_event_begin(Monitor *monitor, const char *event) {
    MonitorJson *json = monitor_begin_(monitor);
    monitor_put_text(json, "event", event);
    monitor_put_int(json, "step", monitor->step);
    return json;
}
static inline bool monitor_event_end(Monitor *monitor, Error *error) { return monitor_write_(monitor, error); }

// Generated text: shown without control characters (a model may emit escape sequences), logged whole.
static inline bool monitor_sample(Monitor *monitor, const char *text, size_t length, Error *error) {
    monitor_say(monitor, "step %lld/%lld | sample:", (long long)monitor->step, (long long)monitor->total_steps);
    for (size_t i = 0; i < length;) {
        const unsigned char *at = (const unsigned char *)text + i;
        const size_t span = monitor_utf8_(at, length - i);
        const bool control = (*at < 32 && *at != '\n' && *at != '\t') || *at == 127 || (span == 2 && at[0] == 0xc2 && at[1] < 0xa0);
        fwrite(span == 0 || control ? (const unsigned char *)"?" : at, 1, span == 0 || control ? 1 : span, monitor->console);
        i += span ? span : 1;
    }
    fputs("\n", monitor->console);
    fflush(monitor->console);
    MonitorJson *json = monitor_event_begin(monitor, "sample");
    monitor_json_key(json, "text");
    monitor_json_text(json, text, length);
    return monitor_event_end(monitor, error);
}

// The last record of a finished run. kernel_launches: of the first rank's device; -1: it has no kernels.
static inline bool monitor_end(Monitor *monitor, uint64_t init_hash, const char *device, int64_t kernel_launches, const MonitorRank *ranks,
                               int64_t rank_count, Error *error) {
    MonitorJson *json = monitor_event_begin(monitor, "end");
    monitor_json_key(json, "init_hash"); // text: numbers of JSON hold only 53 bits
    monitor_json_raw(json, "\"%016llx\"", (unsigned long long)init_hash);
    monitor_put_text(json, "device", device);
    if (kernel_launches >= 0) monitor_put_int(json, "kernel_launches", kernel_launches);
    monitor_json_key(json, "ranks");
    monitor_json_raw(json, "[");
    for (int64_t i = 0; i < rank_count; i++) {
        monitor_json_next(json);
        monitor_json_raw(json, "{");
        monitor_put_int(json, "tp", ranks[i].tp);
        monitor_put_int(json, "pp", ranks[i].pp);
        monitor_put_int(json, "dp", ranks[i].dp);
        monitor_put_int(json, "param_bytes", (int64_t)ranks[i].param_bytes);
        monitor_put_int(json, "grad_bytes", (int64_t)ranks[i].grad_bytes);
        monitor_put_int(json, "optim_bytes", (int64_t)ranks[i].optim_bytes);
        monitor_put_int(json, "activation_peak_bytes", (int64_t)ranks[i].activation_peak_bytes);
        if (ranks[i].device_own_bytes > 0) monitor_put_int(json, "device_own_bytes", (int64_t)ranks[i].device_own_bytes);
        monitor_put_int(json, "buffer_bytes", (int64_t)ranks[i].buffer_bytes);
        monitor_put_int(json, "resident_start_bytes", (int64_t)ranks[i].resident_start_bytes);
        monitor_put_int(json, "resident_peak_bytes", (int64_t)ranks[i].resident_peak_bytes);
        monitor_json_key(json, "comm");
        monitor_json_raw(json, "{");
        for (int kind = 0; kind < COMM_KINDS; kind++) {
            if (ranks[i].comm[kind].calls == 0) continue;
            monitor_json_key(json, comm_kind_names[kind]);
            monitor_json_raw(json, "{\"calls\":%lld,\"bytes\":%lld}", (long long)ranks[i].comm[kind].calls, (long long)ranks[i].comm[kind].bytes);
        }
        monitor_json_raw(json, "}}");
    }
    monitor_json_raw(json, "]");
    return monitor_write_(monitor, error);
}

// ----------------------------------------------------------------------------
// What ranks held and sent, for people

// Memory of this process that is resident now, and the most that ever was; 0 where the kernel does not tell. Memory that the ranks of a
// host share counts in each rank that has touched it.
static inline void monitor_resident(size_t *now_bytes, size_t *peak_bytes) {
    *now_bytes = *peak_bytes = 0;
    FILE *file = fopen("/proc/self/status", "r");
    if (file == NULL) return;
    char line[256];
    while (fgets(line, sizeof line, file) != NULL) {
        unsigned long long kib;
        if (sscanf(line, "VmRSS: %llu kB", &kib) == 1) *now_bytes = (size_t)kib * 1024;
        if (sscanf(line, "VmHWM: %llu kB", &kib) == 1) *peak_bytes = (size_t)kib * 1024;
    }
    fclose(file);
    if (*peak_bytes < *now_bytes) *peak_bytes = *now_bytes; // the kernel counts the two at different moments
}

typedef struct {
    const char *name;
    size_t offset, start_offset; // of the bytes at most, and at the start, in MonitorRank
} MonitorMemory_;
enum { MONITOR_MEMORY_KINDS = 6 };
static const MonitorMemory_ monitor_memory_[MONITOR_MEMORY_KINDS] = {
    {"parameters", offsetof(MonitorRank, param_bytes), offsetof(MonitorRank, param_bytes)},
    {"gradients", offsetof(MonitorRank, grad_bytes), offsetof(MonitorRank, grad_bytes)},
    {"optimizer", offsetof(MonitorRank, optim_bytes), offsetof(MonitorRank, optim_bytes)},
    {"activations", offsetof(MonitorRank, activation_peak_bytes), SIZE_MAX}, // none at the start
    {"buffers", offsetof(MonitorRank, buffer_bytes), offsetof(MonitorRank, buffer_bytes)},
    {"resident", offsetof(MonitorRank, resident_peak_bytes), offsetof(MonitorRank, resident_start_bytes)},
};

static inline double monitor_mb_(const MonitorRank *rank, size_t offset) {
    size_t bytes = 0;
    if (offset != SIZE_MAX) memcpy(&bytes, (const char *)rank + offset, sizeof bytes);
    return (double)bytes * 1e-6;
}

// The rank with the most of something, the first of equals.
static inline int64_t monitor_largest_(const MonitorRank *ranks, int64_t rank_count, size_t offset) {
    int64_t largest = 0;
    for (int64_t i = 1; i < rank_count; i++) {
        if (monitor_mb_(&ranks[i], offset) > monitor_mb_(&ranks[largest], offset)) largest = i;
    }
    return largest;
}

static inline void monitor_say_memory_(Monitor *monitor, const MonitorRank *ranks, int64_t rank_count) {
    monitor_say(monitor, "%-16s%12s%12s   largest", "memory, MB", "start", "peak");
    for (int kind = 0; kind < MONITOR_MEMORY_KINDS; kind++) {
        const MonitorMemory_ *memory = &monitor_memory_[kind];
        const int64_t i = monitor_largest_(ranks, rank_count, memory->offset);
        const MonitorRank *rank = &ranks[i];
        monitor_say(monitor, "  %-14s%12.1f%12.1f   rank %lld (tp %d, pp %d, dp %d)", memory->name, monitor_mb_(rank, memory->start_offset),
                    monitor_mb_(rank, memory->offset), (long long)i, rank->tp, rank->pp, rank->dp);
    }
}

static inline void monitor_say_comm_(Monitor *monitor, const MonitorRank *ranks, int64_t rank_count, int64_t steps) {
    monitor_say(monitor, "%-16s%12s%12s   largest", "comm per step", "calls", "MB");
    const double share = 1 / (double)max_i64(1, steps), mean = share / (double)rank_count;
    for (int kind = 0; kind < COMM_KINDS; kind++) {
        const size_t offset = offsetof(MonitorRank, step_comm) + (size_t)kind * sizeof(CommCount) + offsetof(CommCount, bytes);
        const int64_t i = monitor_largest_(ranks, rank_count, offset);
        double calls = 0, mb = 0;
        for (int64_t r = 0; r < rank_count; r++) calls += (double)ranks[r].step_comm[kind].calls, mb += monitor_mb_(&ranks[r], offset);
        if (calls == 0) continue;
        monitor_say(monitor, "  %-14s%12.1f%12.3f   %.3f: rank %lld (tp %d, pp %d, dp %d)", comm_kind_names[kind], mean * calls, mean * mb,
                    share * monitor_mb_(&ranks[i], offset), (long long)i, ranks[i].tp, ranks[i].pp, ranks[i].dp);
    }
}

// At the end of a run: the memory of the rank that holds most of it, for each use, and what a rank communicated per step, in the mean of the
// ranks, after `steps` steps. One rank: its memory, on a line.
static inline void monitor_ranks(Monitor *monitor, const MonitorRank *ranks, int64_t rank_count, int64_t steps) {
    if (rank_count > 1) {
        monitor_say_memory_(monitor, ranks, rank_count);
        monitor_say_comm_(monitor, ranks, rank_count, steps);
        return;
    }
    char line[512];
    int length = snprintf(line, sizeof line, "memory, MB:");
    for (int kind = 0; kind < MONITOR_MEMORY_KINDS; kind++) {
        const double mb = monitor_mb_(ranks, monitor_memory_[kind].offset);
        if (mb == 0) continue;
        length += snprintf(line + length, sizeof line - (size_t)length, "%s %s %.1f", length > 11 ? "," : "", monitor_memory_[kind].name, mb);
    }
    monitor_say(monitor, "%s (%.1f at the start)", line, monitor_mb_(ranks, monitor_memory_[MONITOR_MEMORY_KINDS - 1].start_offset));
}

// Ends the console line and closes the log; may be called twice and after a failed monitor_open.
static inline bool monitor_close(Monitor *monitor, Error *error) {
    if (monitor->line_open) fputc('\n', monitor->console);
    if (monitor->pending) fprintf(monitor->console, "%s\n", monitor->line);
    monitor->line_open = monitor->pending = false;
    fflush(monitor->console);
    monitor_json_free(&monitor->json);
    const int log = monitor->log;
    monitor->log = -1;
    if (log < 0) return true;
    bool good = fsync(log) == 0 || errno == EINVAL || fail(error, CODE_IO, "cannot write '%s': %s", monitor->path, strerror(errno));
    if (close(log) != 0) good = fail(error, CODE_IO, "cannot write '%s': %s", monitor->path, strerror(errno));
    return good;
}

// ----------------------------------------------------------------------------
// run.json: how this run was made

static inline const char *monitor_cpu_name_(char name[128]) {
    snprintf(name, 128, "unknown");
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (file == NULL) return name;
    char line[512];
    while (fgets(line, sizeof line, file) != NULL) {
        const char *colon = strchr(line, ':');
        if (strncmp(line, "model name", 10) != 0 || colon == NULL) continue;
        snprintf(name, 128, "%.*s", (int)strcspn(colon + 2, "\n"), colon + 2);
        break;
    }
    fclose(file);
    return name;
}

static inline void monitor_put_flag_(MonitorJson *json, const Options *options, int index) {
    const OptionRow *row = &options_rows()[index];
    char buffer[64];
    const char *text = options_text(options, index, buffer);
    if (row->kind == OPTION_BARE) {
        monitor_put_bool(json, row->flag, text[0] != '\0');
    } else if (text[0] == '\0' && !options->given[index]) {
        monitor_put_text(json, row->flag, NULL);
    } else if (row->kind == OPTION_INT || row->kind == OPTION_REAL || (row->kind == OPTION_AUTO && strcmp(text, "auto") != 0)) {
        monitor_json_key(json, row->flag);
        monitor_json_raw(json, "%s", text);
    } else {
        monitor_put_text(json, row->flag, text);
    }
}

// Flags that describe the model, as the model came out of presets, flags and token files.
static inline void monitor_resolve_(Options *options, const ModelConfig *m) {
#define RESOLVE(field) options->field = m->field, options->given[OPTION_##field] = true
    RESOLVE(layers), RESOLVE(channels), RESOLVE(heads), RESOLVE(kv_heads), RESOLVE(head_size), RESOLVE(ffn), RESOLVE(vocab), RESOLVE(norm);
    RESOLVE(norm_eps), RESOLVE(position), RESOLVE(rope_theta), RESOLVE(activation), RESOLVE(bias), RESOLVE(tied), RESOLVE(qk_norm);
#undef RESOLVE
}

// Writes OUT/run.json atomically. "given" lists the flags that the user gave, "flags" holds the value of every flag.
static inline bool monitor_run_json(const char *out, int argc, char **argv, const Options *options, const ModelConfig *config, int64_t parameters,
                                    Error *error) {
    char host[256] = "unknown", cpu[128], started[32], path[MONITOR_PATH_BYTES], tmp[MONITOR_PATH_BYTES + 8];
    if (gethostname(host, sizeof host - 1) != 0) snprintf(host, sizeof host, "unknown");
    const time_t now = time(NULL);
    struct tm utc;
    gmtime_r(&now, &utc);
    strftime(started, sizeof started, "%Y-%m-%dT%H:%M:%SZ", &utc);
    MonitorJson json = {0};
    monitor_json_raw(&json, "{");
    monitor_put_text(&json, "started", started);
    monitor_put_text(&json, "commit", BUILD_COMMIT);
    monitor_put_text(&json, "compiler", __VERSION__);
    monitor_put_text(&json, "host", host);
    monitor_put_text(&json, "cpu", monitor_cpu_name_(cpu));
    monitor_put_int(&json, "cores", sysconf(_SC_NPROCESSORS_ONLN));
    monitor_put_int(&json, "threads", omp_get_max_threads());
    monitor_json_key(&json, "libraries");
    monitor_json_raw(&json, "{");
    monitor_put_text(&json, "blas", BUILD_BLAS);
#if defined(USE_DNNL)
    const dnnl_version_t *dnnl = dnnl_version();
    char version[48];
    snprintf(version, sizeof version, "%d.%d.%d", dnnl->major, dnnl->minor, dnnl->patch);
    monitor_put_text(&json, "onednn", version);
#elif defined(USE_OPENBLAS)
    monitor_put_text(&json, "openblas", openblas_get_config());
#endif
    monitor_put_text(&json, "jansson", JANSSON_VERSION);
    monitor_json_raw(&json, "}");
    monitor_json_key(&json, "command");
    monitor_json_raw(&json, "[");
    for (int i = 0; i < argc; i++) {
        monitor_json_next(&json);
        monitor_json_text(&json, argv[i], strlen(argv[i]));
    }
    monitor_json_raw(&json, "]");
    monitor_json_key(&json, "given");
    monitor_json_raw(&json, "[");
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (!options->given[i]) continue;
        monitor_json_next(&json);
        monitor_json_text(&json, options_rows()[i].flag, strlen(options_rows()[i].flag));
    }
    monitor_json_raw(&json, "]");
    Options resolved = *options;
    monitor_resolve_(&resolved, config);
    monitor_json_key(&json, "flags");
    monitor_json_raw(&json, "{");
    for (int i = 0; i < OPTION_COUNT; i++) monitor_put_flag_(&json, &resolved, i);
    monitor_json_raw(&json, "}");
    monitor_put_int(&json, "max_seq", config->max_seq);
    monitor_put_int(&json, "parameters", parameters);
    monitor_json_raw(&json, "}\n");

    snprintf(path, sizeof path, "%s/run.json", out);
    snprintf(tmp, sizeof tmp, "%s.tmp", path);
    FILE *file = base_create_file(tmp);
    bool good = file != NULL || fail(error, CODE_IO, "cannot write '%s': %s", tmp, strerror(errno));
    if (good) {
        fwrite(json.text, 1, json.length, file); // errors are sticky: monitor_commit_ looks at ferror
        good = monitor_commit_(file, tmp, path, error);
    }
    monitor_json_free(&json);
    return good;
}

#endif
