// step_state.cuh: the step's scalars and lists of segments on both devices, for tests of the ops that read them in device memory. Knows no op.
#ifndef TEST_CUDA_STEP_STATE_CUH
#define TEST_CUDA_STEP_STATE_CUH

#include "dev/test/cuda/compare.cuh" // Compare

struct BothState {
    StepState *at[2]; // device memory
};

static inline BothState both_state(Compare *t, StepState value) {
    BothState state;
    for (int w = 0; w < 2; w++) {
        state.at[w] = (StepState *)t->device[w]->alloc(t->device[w], sizeof value);
        t->device[w]->copy_in(t->device[w], state.at[w], &value, sizeof value);
        t->owned[w].push_back(buffer_of(state.at[w], DTYPE_F32));
    }
    return state;
}

static inline StepState state_read(Compare *t, const BothState &state, int w) {
    StepState value;
    t->device[w]->copy_out(t->device[w], &value, state.at[w], sizeof value);
    return value;
}

static inline void state_write(Compare *t, const BothState &state, int w, StepState value) {
    t->device[w]->copy_in(t->device[w], state.at[w], &value, sizeof value);
}

struct BothSegments {
    const Segment *at[2]; // (count) device memory
    int64_t count;
};

static inline BothSegments both_segments(Compare *t, const std::vector<Segment> &segments) {
    BothSegments both = {{nullptr, nullptr}, (int64_t)segments.size()};
    for (int w = 0; w < 2; w++) {
        void *data = t->device[w]->alloc(t->device[w], segments.size() * sizeof(Segment));
        t->device[w]->copy_in(t->device[w], data, segments.data(), segments.size() * sizeof(Segment));
        t->owned[w].push_back(buffer_of(data, DTYPE_F32));
        both.at[w] = (const Segment *)data;
    }
    return both;
}

static inline double relative_error(double got, double want) { return want == 0 ? fabs(got) : fabs(got / want - 1); }

static inline void compare_check(Compare *t, const char *what, bool good) { compare_record(t, what, good ? 0 : 1, 0); }

#endif
