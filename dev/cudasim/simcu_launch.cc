// simcu_launch.cc: launching a kernel: checks of the configuration, attributes of functions, and running the blocks of a grid one after another.
// Blocks never run at the same time: a kernel in which one waits for another hangs here.
#include "simcu_block.h" // Block
#include <algorithm>     // std::swap
#include <cstdio>        // snprintf
#include <cstdlib>       // posix_memalign
#include <cstring>       // memcpy
#include <cxxabi.h>      // __cxa_demangle
#include <dlfcn.h>       // dladdr
#include <link.h>        // dl_iterate_phdr
#include <map>           // std::map
#include <string>        // std::string

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace simcu {

bool in_kernel;

namespace {

constexpr size_t shared_default = 48 << 10, shared_optin = 227 << 10; // bytes of a block: without and with cudaFuncSetAttribute

struct Launch {
    Thunk thunk;
    const void *kernel;
    const char *arguments;
    size_t argument_bytes;
    const char *name;
} launch;
std::map<const void *, int> &shared_limits = *new std::map<const void *, int>; // of kernels that asked for more than the default

struct KernelCount {
    uint64_t launches = 0, threads = 0, switches = 0;
    uint64_t read_bytes = 0, written_bytes = 0; // of device memory; only the race form sees accesses
};

struct Statistics {
    uint64_t launches = 0, blocks = 0, threads = 0;
    std::map<std::string, KernelCount> kernels;
    KernelCount *running = nullptr; // with SIMCU_STATS
    ~Statistics() {
        if (getenv("SIMCU_STATS") == nullptr) return;
        fprintf(stderr, "simcu: %llu launches, %llu blocks, %llu threads, %llu switches\n", (unsigned long long)launches,
                (unsigned long long)blocks, (unsigned long long)threads, (unsigned long long)fiber_switches());
        for (const auto &[name, count] : kernels) {
            fprintf(stderr, "simcu: %8llu launches %10llu threads %10llu switches %12llu bytes read %12llu written  %s\n",
                    (unsigned long long)count.launches, (unsigned long long)count.threads, (unsigned long long)count.switches,
                    (unsigned long long)count.read_bytes, (unsigned long long)count.written_bytes, name.c_str());
        }
    }
} statistics;

// The executable's thread-local storage lies right below the thread pointer; __shared__ variables are in it (simcu.h).
int find_static_shared(dl_phdr_info *info, size_t, void *) {
    for (int k = 0; k < info->dlpi_phnum; k++) {
        const auto &header = info->dlpi_phdr[k];
        if (header.p_type != PT_TLS) continue;
        const size_t align = std::max<size_t>(header.p_align, 1), bytes = (header.p_memsz + align - 1) & ~(align - 1);
        char *thread_pointer;
        asm("movq %%fs:0,%0" : "=r"(thread_pointer));
        block.static_begin = thread_pointer - bytes, block.static_end = thread_pointer;
    }
    return 1; // the first entry is the executable
}

// __launch_bounds__ puts a one-byte nop for every 32 threads at the entry of the kernel (simcu.h). 0: none.
unsigned launch_bound(const void *kernel) {
    const unsigned char *code = (const unsigned char *)kernel;
    if (code[0] == 0xf3 && code[1] == 0x0f && code[2] == 0x1e && code[3] == 0xfa) code += 4; // endbr64
    unsigned count = 0;
    while (count < 32 && code[count] == 0x90) count++;
    return count * 32;
}

cudaError_t check_shape(const char *name, dim3 grid, dim3 threads, size_t shared_bytes, const void *kernel) {
    const size_t count = (size_t)threads.x * threads.y * threads.z;
    if (count == 0 || count > 1024 || threads.x > 1024 || threads.y > 1024 || threads.z > 64) {
        note("launch of %s: a block of %u x %u x %u threads: wanted 1 to 1024", name, threads.x, threads.y, threads.z);
        return cudaErrorInvalidConfiguration;
    }
    if (grid.x == 0 || grid.y == 0 || grid.z == 0 || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
        note("launch of %s: a grid of %u x %u x %u blocks: wanted 1 to 2147483647 x 65535 x 65535", name, grid.x, grid.y, grid.z);
        return cudaErrorInvalidConfiguration;
    }
    const unsigned bound = launch_bound(kernel);
    if (bound > 0 && count > bound) {
        note("launch of %s: %zu threads per block, its __launch_bounds__ allow %u", name, count, bound);
        return cudaErrorLaunchFailure;
    }
    const auto limit = shared_limits.find(kernel);
    const size_t allowed = limit == shared_limits.end() ? shared_default : (size_t)limit->second;
    if (shared_bytes > allowed) {
        note("launch of %s: %zu bytes of dynamic shared memory, %zu are allowed (cudaFuncSetAttribute?)", name, shared_bytes, allowed);
        return cudaErrorInvalidValue;
    }
    return cudaSuccess;
}

// Its own frame: the alloca must end with the thread. Every thread has its own copy of the arguments.
__attribute__((noinline)) void call_kernel() {
    void *arguments = __builtin_alloca_with_align(launch.argument_bytes + 1, 1024);
    memcpy(arguments, launch.arguments, launch.argument_bytes);
    launch.thunk(launch.kernel, arguments);
}

void prepare_shared(char *dynamic, size_t bytes) {
    if (bytes > 0) memset(dynamic, 0xff, bytes);
    if (block.static_begin != nullptr) memset(block.static_begin, 0xff, (size_t)(block.static_end - block.static_begin));
}

} // namespace

void run_thread() { call_kernel(); }
const char *running_kernel() { return launch.name; }

void traffic_note(size_t bytes, bool write) {
    if (statistics.running != nullptr) (write ? statistics.running->written_bytes : statistics.running->read_bytes) += bytes;
}

const char *kernel_name(const void *kernel) {
    static std::map<const void *, std::string> &known = *new std::map<const void *, std::string>;
    const auto found = known.find(kernel);
    if (found != known.end()) return found->second.c_str();
    Dl_info info;
    std::string name;
    if (dladdr(kernel, &info) != 0 && info.dli_sname != nullptr && info.dli_saddr == kernel) {
        int status;
        char *plain = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
        name = plain != nullptr ? plain : info.dli_sname;
        free(plain);
        if (name.compare(0, 5, "void ") == 0) name.erase(0, 5); // templates have their type in front
        size_t end = 0;
        for (int depth = 0; end < name.size() && (depth > 0 || name[end] != '('); end++) depth += (name[end] == '<') - (name[end] == '>');
        name.resize(end);
    } else {
        char text[64];
        snprintf(text, sizeof text, "kernel at %p (link with -rdynamic)", kernel);
        name = text;
    }
    return (known[kernel] = name).c_str();
}

const char *where() {
    static char text[500];
    if (!in_kernel) return "host code";
    const int n = snprintf(text, 400, "kernel %s, block (%u,%u,%u)", launch.name, blockIdx.x, blockIdx.y, blockIdx.z);
    if (current != nullptr) snprintf(text + n, sizeof text - (size_t)n, ", thread (%u,%u,%u)", current->id.x, current->id.y, current->id.z);
    return text;
}

void run_grid(dim3 grid, dim3 threads, size_t shared_bytes, const void *kernel, Thunk thunk, const char *arguments, size_t argument_bytes) {
#ifndef SIMCU_ASAN
    if (block.static_begin == nullptr) dl_iterate_phdr(find_static_shared, nullptr);
#endif
    launch = {thunk, kernel, arguments, argument_bytes, kernel_name(kernel)};
    gridDim = grid, blockDim = threads, block.count = (int)(threads.x * threads.y * threads.z);
    // A new allocation of the exact size for every launch: AddressSanitizer sees every overrun of dynamic shared memory.
    void *dynamic = nullptr;
    if (shared_bytes > 0 && posix_memalign(&dynamic, 1024, shared_bytes) != 0)
        fail(nullptr, 0, "no memory for %zu bytes of shared memory", shared_bytes);
    block.dynamic_begin = (char *)dynamic, block.dynamic_end = (char *)dynamic + shared_bytes;
    const size_t blocks = (size_t)grid.x * grid.y * grid.z;
    static const bool counting = getenv("SIMCU_STATS") != nullptr;
    statistics.launches++, statistics.blocks += blocks, statistics.threads += blocks * (size_t)block.count;
    const uint64_t switches_before = fiber_switches();
    if (counting) {
        statistics.running = &statistics.kernels[launch.name];
        statistics.running->launches++, statistics.running->threads += blocks * (size_t)block.count;
    }
    std::vector<uint32_t> order;
    if (settings().threads == Order::RANDOM) {
        order.resize(blocks);
        for (size_t i = 0; i < blocks; i++) order[i] = (uint32_t)i;
        for (size_t i = blocks; i > 1; i--) std::swap(order[i - 1], order[random64() % i]);
    }
    in_kernel = true;
    for (size_t i = 0; i < blocks; i++) {
        const size_t k = !order.empty() ? order[i] : settings().threads == Order::REVERSE ? blocks - 1 - i : i;
        blockIdx = uint3{(unsigned)(k % grid.x), (unsigned)(k / grid.x % grid.y), (unsigned)(k / grid.x / grid.y)};
        block.linear = (uint32_t)k;
        prepare_shared(block.dynamic_begin, shared_bytes);
        run_block();
    }
    in_kernel = false;
    if (counting) statistics.running->switches += fiber_switches() - switches_before;
    free(dynamic);
    block.dynamic_begin = block.dynamic_end = nullptr;
}

cudaError_t enqueue_kernel(const cudaLaunchConfig_t *config, const void *kernel, Thunk thunk, const void *arguments, size_t bytes) {
    const dim3 grid = config->gridDim, threads = config->blockDim;
    const size_t shared_bytes = config->dynamicSmemBytes;
    const cudaError_t result = check_shape(kernel_name(kernel), grid, threads, shared_bytes, kernel);
    if (result != cudaSuccess) return set_error(result);
    if (bytes > 32764) {
        note("launch of %s: %zu bytes of arguments, 32764 are allowed", kernel_name(kernel), bytes);
        return set_error(cudaErrorInvalidValue);
    }
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const auto &value = config->attrs[i].val;
        if (config->attrs[i].id == cudaLaunchAttributeClusterDimension && value.clusterDim.x * value.clusterDim.y * value.clusterDim.z != 1) {
            note("launch of %s: clusters are not simulated", kernel_name(kernel));
            return set_error(cudaErrorNotSupported);
        }
    }
    const std::vector<char> copy((const char *)arguments, (const char *)arguments + bytes);
    return enqueue(config->stream, kernel_name(kernel), [=] {
        run_grid(grid, threads, shared_bytes, kernel, thunk, copy.data(), copy.size());
        return true;
    });
}

} // namespace simcu

using namespace simcu;
extern "C" {

cudaError_t cudaFuncSetAttribute(const void *kernel, cudaFuncAttribute attribute, int value) {
    switch (attribute) {
    case cudaFuncAttributeMaxDynamicSharedMemorySize:
        if (value < 0 || (size_t)value > shared_optin) {
            note("cudaFuncSetAttribute of %s: %d bytes of shared memory, a block has %zu at most", kernel_name(kernel), value, shared_optin);
            return set_error(cudaErrorInvalidValue);
        }
        shared_limits[kernel] = value;
        return cudaSuccess;
    case cudaFuncAttributePreferredSharedMemoryCarveout: return value >= -1 && value <= 100 ? cudaSuccess : set_error(cudaErrorInvalidValue);
    default: return set_error(cudaErrorInvalidValue);
    }
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *attributes, const void *kernel) {
    const unsigned bound = launch_bound(kernel);
    *attributes = {};
    attributes->maxThreadsPerBlock = bound > 0 ? (int)bound : 1024;
    attributes->maxDynamicSharedSizeBytes = shared_limits.count(kernel) > 0 ? shared_limits[kernel] : (int)shared_default;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    return cudaSuccess;
}

// Registers are unknown here: only threads and shared memory limit the number.
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int threads, size_t shared_bytes, unsigned) {
    if (threads < 1 || threads > 1024 || shared_bytes > shared_optin) return set_error(cudaErrorInvalidValue);
    const int by_threads = 2048 / ((threads + 31) / 32 * 32), by_shared = (int)((228 << 10) / (shared_bytes + 1024));
    *blocks = std::min({32, by_threads, by_shared});
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared_bytes) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared_bytes, 0);
}
}
