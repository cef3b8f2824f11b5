// gpus.h: what the makers say of GPUs' dense matrix products: the unit of MFU. Only a table; what a GPU really does is measured by
// dev/bench_cuda.cu.
#ifndef LLMC_GPUS_H
#define LLMC_GPUS_H

#include "llmc/precision.h" // Dtype
#include <string.h>         // strstr

// Tera-FLOP/s without sparsity, from the makers' data sheets: bf16 products with fp32 sums, and fp32 without tensor cores.
typedef struct {
    const char *name; // part of what CUDA calls it; the first that fits counts
    double bf16, fp32;
} Gpu;

static const Gpu gpus[] = {
    {"GB200", 2500, 80},           //
    {"B200", 2250, 80},            //
    {"H200", 989.4, 66.9},         // also GH200
    {"H100 PCIe", 756, 51.2},      //
    {"H100 NVL", 835, 60},         //
    {"H100", 989.4, 66.9},         //
    {"H800", 989.4, 66.9},         //
    {"H20", 148, 44},              //
    {"A100", 312, 19.5},           //
    {"A800", 312, 19.5},           //
    {"A30", 165, 10.3},            //
    {"A10G", 70, 31.2},            //
    {"A10", 125, 31.2},            //
    {"A40", 149.7, 37.4},          //
    {"RTX A6000", 154.8, 38.7},    //
    {"RTX 6000 Ada", 364.2, 91.1}, //
    {"L40S", 362, 91.6},           //
    {"L40", 181, 90.5},            //
    {"L4", 121, 30.3},             //
    {"RTX 5090", 209.5, 104.8},    //
    {"RTX 4090", 165.2, 82.6},     //
    {"RTX 4080", 97.5, 48.7},      //
    {"RTX 3090", 71, 35.6},        //
};

// FLOP/s; 0 for one that is not in the table: MFU is then unknown.
static inline double gpus_peak_flops(const char *model, Dtype dtype) {
    for (size_t i = 0; i < sizeof gpus / sizeof gpus[0]; i++) {
        if (strstr(model, gpus[i].name) != NULL) return 1e12 * (dtype == DTYPE_BF16 ? gpus[i].bf16 : gpus[i].fp32);
    }
    return 0;
}

#endif
