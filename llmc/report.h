// report.h: what a run says of itself, on the console and in its log: at the beginning what it is made of, at the end what every rank held and
// sent. What it says on the way is in monitor.h.
#ifndef LLMC_REPORT_H
#define LLMC_REPORT_H

#include "llmc/base.h"      // Error
#include "llmc/model.h"     // model_list
#include "llmc/monitor.h"   // Monitor, MonitorRank, monitor_end, monitor_ranks
#include "llmc/plan.h"      // plan_facts, plan_count_text, plan_bytes_text
#include "llmc/options.h"   // options_help
#include "llmc/schedule.h"  // schedule_kind_names
#include "llmc/setup.h"     // Setup
#include "llmc/tokenizer.h" // tokenizer_decode
#include "llmc/zero.h"      // Zero
#include <omp.h>            // omp_get_max_threads
#include <stdio.h>          // printf

// --help, --version, --model list
static inline void report_information(const Options *o) {
    if (o->help) {
        options_help(stdout);
    } else if (o->version) {
        printf("train_gpt for %s, commit %s, matrix products by %s, compiler %s\n", DEVICES_BUILT, BUILD_COMMIT, BUILD_BLAS, __VERSION__);
    } else {
        model_list(stdout);
    }
}

// Model, batch, ranks, device, data. d: the device that the trainer has taken over.
static inline void report_begin(const Setup *setup, const Device *d) {
    const Options *o = &setup->options;
    const ModelConfig *m = &setup->config;
    const PlanInput *plan = &setup->plan;
    const PlanFacts facts = plan_facts(plan);
    char parameters[32], memory[32];
    printf("model   %s: %s parameters, %lld layers, %lld channels, %lld heads (%lld kv), ffn %lld, vocabulary %lld\n",
           o->model != NULL     ? o->model
           : setup->shape.known ? setup->shape.name
                                : "custom",
           plan_count_text((double)facts.parameters, parameters), (long long)m->layers, (long long)m->channels, (long long)m->heads,
           (long long)m->kv_heads, (long long)m->ffn, (long long)m->vocab);
    printf("batch   %lld sequences of %lld tokens = %lld tokens a step (%lld at once); %lld steps\n", (long long)o->global_batch, (long long)o->seq,
           (long long)facts.tokens_per_step, (long long)o->micro_batch, (long long)o->steps);
    if (setup->comm->size > 1) {
        const Mesh *mesh = &setup->layout.mesh;
        printf("ranks   %d = tp %d%s x pp %d (layers %s, %s) x dp %d (zero %d), %d on this host\n", mesh->world, mesh->tp,
               setup->layout.sp ? " sp" : "", mesh->pp, plan->stages, schedule_kind_names[plan->schedule.kind], mesh->dp, setup->layout.zero,
               setup->comm->local_size);
    }
    char products[64];
    snprintf(products, sizeof products, "%d threads, matrix products by %s", omp_get_max_threads(), BUILD_BLAS);
    printf("device  %s, %s, %s; %s of memory planned\n", d->name, d->model[0] != '\0' ? d->model : products,
           o->precision == PRECISION_FP32 ? "fp32"
           : o->master == MASTER_NONE     ? "bf16, rounded at random"
                                          : "bf16 with fp32 master weights",
           plan_bytes_text((double)facts.total_bytes, memory));
    if (o->train != NULL) {
        printf("data    %lld tokens in %lld file%s, %.4g epochs of %lld sequences\n", (long long)setup->train_set.tokens,
               (long long)setup->train_set.count, setup->train_set.count == 1 ? "" : "s", facts.epochs, (long long)plan->train_samples);
    }
    if (setup->resumes) printf("resumed at step %lld\n", (long long)setup->step);
    fflush(stdout);
}

// A generated text: that of the tokens where there is a tokenizer, else their numbers. Shown and logged.
static inline bool report_sample(Monitor *monitor, Setup *setup, const int32_t *ids, int64_t count, Error *error) {
    MonitorJson text = {0}; // all of it at once: a character may lie across tokens
    for (int64_t i = 0; i < count; i++) {
        char number[16];
        int64_t bytes;
        const char *piece = setup->has_tokenizer ? tokenizer_decode(&setup->tokenizer, ids[i], &bytes) : number;
        if (!setup->has_tokenizer) bytes = snprintf(number, sizeof number, "%d ", ids[i]);
        monitor_json_bytes(&text, piece, (size_t)bytes);
    }
    const bool good = monitor_sample(monitor, text.text, text.length, error);
    monitor_json_free(&text);
    return good;
}

// What --graph on came to on this rank.
static inline bool report_graphs(Monitor *monitor, GraphCounts counts, Error *error) {
    monitor_say(monitor, "%lld graphs were captured, and launched %lld times", (long long)counts.captured, (long long)counts.launched);
    MonitorJson *event = monitor_event_begin(monitor, "graphs");
    monitor_put_int(event, "captured", counts.captured);
    monitor_put_int(event, "launched", counts.launched);
    return monitor_event_end(monitor, error);
}

// The last record of a finished run and the same as a table; closes the log. own: what this rank's trainer says of itself (activations, memory at
// the start, communication of steps); the rest is filled in here. Collective; errors are of the first rank alone.
static inline bool report_end(Monitor *monitor, const Zero *zero, MonitorRank own, uint64_t init_hash, int64_t steps, bool finished, Error *error) {
    Comm *comm = zero->comm;
    const MeshAt at = zero->layout->mesh.at;
    const ZeroBytes *bytes = &zero->bytes;
    size_t now_bytes;
    own.device_own_bytes = zero->device->own_bytes(zero->device);
    own.tp = at.tp, own.pp = at.pp, own.dp = at.dp;
    own.param_bytes = bytes->param_bytes, own.grad_bytes = bytes->grad_bytes;
    own.optim_bytes = bytes->optim_bytes + bytes->master_bytes, own.buffer_bytes = bytes->buffer_bytes + bytes->snapshot_bytes;
    monitor_resident(&now_bytes, &own.resident_peak_bytes);
    memcpy(own.comm, comm->counts, sizeof own.comm);
    MonitorRank *ranks = base_new((size_t)comm->size, sizeof *ranks);
    comm_all_gather(comm->world, ranks, &own, (int64_t)sizeof own, COMM_BYTE);
    bool good = true;
    if (comm->rank == 0) {
        const int64_t launches = zero->device->kernel_launches(zero->device);
        good = !finished || monitor_end(monitor, init_hash, zero->device->name, launches, ranks, comm->size, error);
        if (good && finished) monitor_ranks(monitor, ranks, comm->size, steps);
        good = good && monitor_close(monitor, error);
    }
    free(ranks);
    return good;
}

#endif
