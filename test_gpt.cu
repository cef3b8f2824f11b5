// test_gpt.cu: every op of the CUDA device, and whole training steps, against the CPU device, in one process, on the same inputs. Prints a table of
// the worst errors; the exit code says whether all are within their bounds. Runs on a GPU (make test_gptcu) and on the simulated device (make
// test_gptcu_sim).
//
// usage: test_gptcu [WORD...]   only the families whose name contains one of the words
#include "dev/test/cuda/compare.cuh"          // Compare
#include "dev/test/cuda/cpu_device.h"         // cpu_device_open
#include "dev/test/cuda/test_adamw.cuh"       // test_adamw
#include "dev/test/cuda/test_algorithms.cuh"  // test_algorithms
#include "dev/test/cuda/test_attention.cuh"   // test_attention
#include "dev/test/cuda/test_cast.cuh"        // test_cast
#include "dev/test/cuda/test_classifier.cuh"  // test_classifier
#include "dev/test/cuda/test_dropout.cuh"     // test_dropout
#include "dev/test/cuda/test_embedding.cuh"   // test_embedding
#include "dev/test/cuda/test_global_norm.cuh" // test_global_norm
#include "dev/test/cuda/test_graph.cuh"       // test_graph
#include "dev/test/cuda/test_matmul.cuh"      // test_matmul
#include "dev/test/cuda/test_memory.cuh"      // test_memory
#include "dev/test/cuda/test_mlp.cuh"         // test_mlp
#include "dev/test/cuda/test_norm.cuh"        // test_norm
#include "dev/test/cuda/test_rope.cuh"        // test_rope
#include "dev/test/cuda/test_step.cuh"        // test_step
#include "llmc/cuda/device.h"                 // device_cuda

struct Family {
    const char *name;
    void (*test)(Compare *);
    bool named; // only when its whole name is given: a short form, for slow forms of the simulated device
};
static const Family families[] = {
    {"adamw", test_adamw, false},
    {"algorithms", test_algorithms, false},
    {"attention", test_attention, false},
    {"attention_small", test_attention_small, true},
    {"cast", test_cast, false},
    {"classifier", test_classifier, false},
    {"dropout", test_dropout, false},
    {"embedding", test_embedding, false},
    {"global_norm", test_global_norm, false},
    {"graph", test_graph, false},
    {"matmul", test_matmul, false},
    {"memory", test_memory, false},
    {"mlp", test_mlp, false},
    {"norm", test_norm, false},
    {"rope", test_rope, false},
    {"step", test_step, false},
    {"step_small", test_step_small, true},
};

static bool chosen(const Family *family, int count, char **words) {
    for (int i = 0; i < count; i++) {
        if (family->named ? strcmp(family->name, words[i]) == 0 : strstr(family->name, words[i]) != nullptr) return true;
    }
    return count == 0 && !family->named;
}

int main(int argc, char **argv) {
    Device cpu = cpu_device_open(), cuda = device_cuda(0);
    Compare t;
    t.device[0] = &cpu, t.device[1] = &cuda;
    for (const Family &family : families) {
        if (!chosen(&family, argc - 1, argv + 1)) continue;
        fprintf(stderr, "%s\n", family.name);
        t.stream = 0; // a family's numbers are the same whichever others run
        for (const char *c = family.name; *c != '\0'; c++) t.stream = t.stream * 31 + (uint64_t)*c;
        t.stream <<= 32;
        family.test(&t);
    }
    const bool good = compare_report(&t);
    cuda.close(&cuda);
    cpu.close(&cpu);
    return good ? 0 : 1;
}
