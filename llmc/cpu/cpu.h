// cpu.h: the CPU device: gathers the families of ops into the device table. C11, OpenMP and one BLAS.
#ifndef LLMC_CPU_CPU_H
#define LLMC_CPU_CPU_H

#include "llmc/cpu/adamw.h"       // cpu_adamw, cpu_step_decide
#include "llmc/cpu/attention.h"   // cpu_attention_forward, cpu_attention_backward
#include "llmc/cpu/cast.h"        // cpu_cast, cpu_accumulate
#include "llmc/cpu/classifier.h"  // cpu_cross_entropy*, cpu_loss_sum
#include "llmc/cpu/dropout.h"     // cpu_dropout_backward
#include "llmc/cpu/embedding.h"   // cpu_embedding_forward, cpu_embedding_backward
#include "llmc/cpu/global_norm.h" // cpu_grad_squares
#include "llmc/cpu/matmul.h"      // cpu_linear_*, cpu_matmul_rate
#include "llmc/cpu/memory.h"      // cpu_alloc, cpu_copy_*
#include "llmc/cpu/mlp.h"         // cpu_swiglu_*
#include "llmc/cpu/norm.h"        // cpu_norm_*, cpu_residual_forward
#include "llmc/cpu/rope.h"        // cpu_qk_*
#include "llmc/cpu/state.h"       // CpuState
#include "llmc/device.h"          // Device

static inline void cpu_close(Device *device) {
    cpu_state_destroy(device->state);
    device->state = NULL;
}

static inline size_t cpu_own_bytes(Device *device) { return (void)device, 0; }
static inline double cpu_free_bytes(Device *device) { return (void)device, 0; } // the plan looks at the machine's memory
static inline int64_t cpu_kernel_launches(Device *device) { return (void)device, -1; }

// An op is a call and has run when that returns: there is nothing to keep.
static inline bool cpu_graph_begin(Device *device, const GraphKey *key) { return (void)device, (void)key, false; }
static inline void cpu_graph_end(Device *device) { (void)device; }
static inline GraphCounts cpu_graph_counts(Device *device) { return (void)device, (GraphCounts){0}; }

// Fills the table; close gives back what the libraries hold.
static inline Device device_cpu(void) {
    return (Device){
        .name = "cpu",
        .on_host = true,
        .state = cpu_state_create(),
        .alloc = cpu_alloc,
        .release = cpu_release,
        .copy_in = cpu_copy_in,
        .copy_out = cpu_copy_out,
        .zero = cpu_zero,
        .synchronize = cpu_synchronize,
        .host_alloc = cpu_alloc,
        .host_release = cpu_release,
        .copy_out_start = cpu_copy_out_start,
        .copy_out_finish = cpu_copy_out_finish,
        .snapshot_begin = cpu_snapshot_begin,
        .snapshot_copy = cpu_snapshot_copy,
        .snapshot_fence = cpu_snapshot_fence,
        .snapshot_wait = cpu_snapshot_wait,
        .close = cpu_close,
        .matmul_rate = cpu_matmul_rate,
        .peak_flops = cpu_matmul_rate,
        .own_bytes = cpu_own_bytes,
        .free_bytes = cpu_free_bytes,
        .kernel_launches = cpu_kernel_launches,
        .graph_begin = cpu_graph_begin,
        .graph_end = cpu_graph_end,
        .graph_counts = cpu_graph_counts,
        .cast = cpu_cast,
        .accumulate = cpu_accumulate,
        .embedding_forward = cpu_embedding_forward,
        .embedding_backward = cpu_embedding_backward,
        .norm_forward = cpu_norm_forward,
        .norm_backward = cpu_norm_backward,
        .residual_forward = cpu_residual_forward,
        .dropout_backward = cpu_dropout_backward,
        .linear_forward = cpu_linear_forward,
        .linear_backward_input = cpu_linear_backward_input,
        .linear_backward_weight = cpu_linear_backward_weight,
        .swiglu_forward = cpu_swiglu_forward,
        .swiglu_backward = cpu_swiglu_backward,
        .qk_forward = cpu_qk_forward,
        .qk_backward = cpu_qk_backward,
        .attention_forward = cpu_attention_forward,
        .attention_backward = cpu_attention_backward,
        .cross_entropy = cpu_cross_entropy,
        .cross_entropy_local = cpu_cross_entropy_local,
        .cross_entropy_merge = cpu_cross_entropy_merge,
        .loss_sum = cpu_loss_sum,
        .grad_squares = cpu_grad_squares,
        .step_decide = cpu_step_decide,
        .adamw = cpu_adamw,
    };
}

#endif
