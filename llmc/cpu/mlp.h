// mlp.h: SwiGLU on the CPU (Shazeer 2020). GELU is fused into the matrix products (matmul.h).
#ifndef LLMC_CPU_MLP_H
#define LLMC_CPU_MLP_H

#include "llmc/cpu/block.h" // cpu_block_in, CPU_SCRATCH
#include "llmc/cpu/math.h"  // cpu_sigmoid

// out (N, FF) = gate * sigmoid(gate) * up, gate_up (N, 2*FF) = gate | up
static inline void cpu_swiglu_forward(Device *device, Buffer out, Buffer gate_up, int64_t N, int64_t FF) {
    (void)device;
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t n = 0; n < N; n++) {
        for (int64_t f = 0; f < FF; f += CPU_BLOCK) {
            CPU_SCRATCH(scratch_gate);
            CPU_SCRATCH(scratch_up);
            CPU_SCRATCH(scratch_out);
            const int64_t at = n * FF + f, gate_at = n * 2 * FF + f, width = min_i64(CPU_BLOCK, FF - f);
            const float *gate = cpu_block_in(gate_up, gate_at, width, scratch_gate);
            const float *up = cpu_block_in(gate_up, gate_at + FF, width, scratch_up);
            float *to = cpu_block_out(out, at, scratch_out);
#pragma omp simd
            for (int64_t i = 0; i < width; i++) to[i] = gate[i] * cpu_sigmoid(gate[i]) * up[i];
            cpu_block_store(out, at, width, to);
        }
    }
}

// dgate_up (N, 2*FF) =: dgate = dout * up * s * (1 + gate * (1 - s)), dup = dout * gate * s, s = sigmoid(gate).
// May be in place of gate_up.
static inline void cpu_swiglu_backward(Device *device, Buffer dgate_up, Buffer dout, Buffer gate_up, int64_t N, int64_t FF) {
    (void)device;
#pragma omp parallel for collapse(2) schedule(static)
    for (int64_t n = 0; n < N; n++) {
        for (int64_t f = 0; f < FF; f += CPU_BLOCK) {
            CPU_SCRATCH(scratch_gate);
            CPU_SCRATCH(scratch_up);
            CPU_SCRATCH(scratch_dout);
            CPU_SCRATCH(scratch_dgate);
            CPU_SCRATCH(scratch_dup);
            const int64_t gate_at = n * 2 * FF + f, up_at = gate_at + FF, width = min_i64(CPU_BLOCK, FF - f);
            const float *gate = cpu_block_in(gate_up, gate_at, width, scratch_gate), *up = cpu_block_in(gate_up, up_at, width, scratch_up);
            const float *d = cpu_block_in(dout, n * FF + f, width, scratch_dout);
            float *dgate = cpu_block_out(dgate_up, gate_at, scratch_dgate), *dup = cpu_block_out(dgate_up, up_at, scratch_dup);
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                const float g = gate[i], u = up[i], s = cpu_sigmoid(g);
                dgate[i] = d[i] * u * s * (1.0f + g * (1.0f - s));
                dup[i] = d[i] * g * s;
            }
            cpu_block_store(dgate_up, gate_at, width, dgate);
            cpu_block_store(dgate_up, up_at, width, dup);
        }
    }
}

#endif
