// launch.cuh: the one way to start a kernel. Typed, over cudaLaunchKernelEx, so that the simulated device (dev/cudasim) can take its place; counts
// the launches. No kernels here.
#ifndef LLMC_CUDA_LAUNCH_CUH
#define LLMC_CUDA_LAUNCH_CUH

#include "llmc/cuda/cuda.cuh" // CudaDevice, cuda_check

struct LaunchShape {
    dim3 grid;               // blocks
    unsigned threads;        // of a block, a multiple of 32
    size_t shared_bytes = 0; // dynamic shared memory (DYN_SHARED of ptx.cuh)
};

// Enqueues kernel(arguments...) on a stream. An empty grid starts nothing. Arguments are converted to the kernel's parameter types.
template <class... Parameters, class... Arguments>
static inline void launch(CudaDevice *device, cudaStream_t stream, const LaunchShape &shape, void (*kernel)(Parameters...),
                          Arguments... arguments) {
    if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
    cudaLaunchConfig_t config = {};
    config.gridDim = shape.grid;
    config.blockDim = dim3(shape.threads);
    config.dynamicSmemBytes = shape.shared_bytes;
    config.stream = stream;
    if (device->capturing && stream == device->compute)
        device->captured++;
    else
        device->launches++;
    cuda_check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "cudaLaunchKernelEx");
}

// Blocks for n elements, `each` per block; capped, for kernels that stride over the grid.
static inline unsigned launch_blocks(const CudaDevice *device, int64_t n, int64_t each, int per_sm) {
    const int64_t blocks = (n + each - 1) / each, cap = (int64_t)device->sm_count * per_sm;
    return (unsigned)(blocks < cap ? blocks : cap);
}

#endif
