// test_sim.cu: tests of the simulated device itself, in one program; test.sh runs it in every form, and its part nccl on 1 to 4 ranks.
//
// usage: test_sim [WORD]   only the parts whose name contains WORD
#include "dev/cudasim/test_cublaslt.cuh" // test_cublaslt
#include "dev/cudasim/test_nccl.cuh"     // test_nccl
#include "dev/cudasim/test_runtime.cuh"  // test_runtime
#include "dev/cudasim/test_warp.cuh"     // test_warp

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*test)();
    } parts[] = {{"runtime", test_runtime}, {"warp", test_warp}, {"cublaslt", test_cublaslt}, {"nccl", test_nccl}};
    for (const auto &part : parts)
        if (argc < 2 || strstr(part.name, argv[1]) != nullptr) part.test();
    return test_end();
}
