// test_step.cuh: the trainer itself on both devices (dev/test/cuda/whole_step.c): rows of the table for whole training steps. Knows no op.
#ifndef TEST_CUDA_TEST_STEP_CUH
#define TEST_CUDA_TEST_STEP_CUH

#include "dev/test/cuda/compare.cuh"  // Compare, compare_record
#include "dev/test/cuda/whole_step.h" // whole_step_test

static void step_record_(void *context, const char *row, const char *where, double error, double bound) {
    Compare *t = (Compare *)context;
    compare_case(t, "%s", where);
    compare_record(t, row, error, bound);
}

static void test_step(Compare *t) { whole_step_test(false, step_record_, t); }
static void test_step_small(Compare *t) { whole_step_test(true, step_record_, t); }

#endif
