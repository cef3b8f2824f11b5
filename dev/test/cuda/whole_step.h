// whole_step.h: whole training steps of the CUDA device against the CPU device, for test_gpt.cu; the trainer is C.
#ifndef TEST_CUDA_WHOLE_STEP_H
#define TEST_CUDA_WHOLE_STEP_H

#include <stdbool.h> // bool

// Takes one comparison: the row it belongs to, the case it is of, and an error that may be as large as the bound.
typedef void WholeStepRecord(void *context, const char *row, const char *where, double error, double bound);

#ifdef __cplusplus
extern "C" {
#endif
// All cases, or with `small` few and short ones.
void whole_step_test(bool small, WholeStepRecord *record, void *context);
#ifdef __cplusplus
}
#endif

#endif
