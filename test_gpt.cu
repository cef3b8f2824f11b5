// test_gpt.cu: every op of the CUDA device against the CPU device, in one process, on the same inputs. Prints a table of the worst errors; the exit code
// says whether all are within their bounds. Runs on a GPU (make test_gptcu) and on the simulated device (make test_gptcu_sim).
//
// usage: test_gptcu [WORD]   only the families whose name contains WORD
#include "dev/test/cuda/compare.cuh"   // Compare
#include "dev/test/cuda/cpu_device.h"  // cpu_device_open
#include "dev/test/cuda/test_cast.cuh" // test_cast
#include "dev/test/cuda/test_dropout.cuh" // test_dropout
#include "dev/test/cuda/test_mlp.cuh"  // test_mlp
#include "dev/test/cuda/test_norm.cuh" // test_norm
#include "dev/test/cuda/test_rope.cuh" // test_rope
#include "llmc/cuda/device.h"          // device_cuda

struct Family {
    const char *name;
    void (*test)(Compare *);
};
static const Family families[] = {
    {"cast", test_cast},
    {"dropout", test_dropout},
    {"mlp", test_mlp},
    {"norm", test_norm},
    {"rope", test_rope},
};

int main(int argc, char **argv) {
    Device cpu = cpu_device_open(), cuda = device_cuda(0);
    Compare t;
    t.device[0] = &cpu, t.device[1] = &cuda;
    for (const Family &family : families) {
        if (argc > 1 && strstr(family.name, argv[1]) == nullptr) continue;
        fprintf(stderr, "%s\n", family.name);
        family.test(&t);
    }
    const bool good = compare_report(&t);
    device_cuda_close(&cuda);
    cpu_device_close(&cpu);
    return good ? 0 : 1;
}
