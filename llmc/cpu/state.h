// state.h: what the CPU device keeps between ops (Device.state). Holds library handles and scratch, no model data.
#ifndef LLMC_CPU_STATE_H
#define LLMC_CPU_STATE_H

#include "llmc/base.h"     // base_new
#include "llmc/cpu/blas.h" // BlasState

typedef struct {
    BlasState blas;
} CpuState;

static inline CpuState *cpu_state_create(void) {
    CpuState *state = base_new(1, sizeof *state);
    state->blas = blas_create();
    return state;
}

static inline void cpu_state_destroy(CpuState *state) {
    if (state == NULL) return;
    blas_destroy(&state->blas);
    free(state);
}

#endif
