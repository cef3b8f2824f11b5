// attention_place.cuh: what the attention kernels share that is not arithmetic: their operands' shape, and which block does which tile of which
// document.
//
// The documents' lengths lie on the device and the host does not wait for them. Two ways to number the blocks, both with the head fastest, so that
// blocks that run together read the same keys and values:
//   listed    (head, document) x tile, for the tiles of the longest document; blocks past the end of a shorter one have no work. The tiles with the
//   most
//             work of all documents come first, so that the last blocks to start are short (Graham 1969: longest processing time first).
//   searched  (head, slot). Document d owns the slots from cu_seqlens[d]/TILE + d on: at least as many as it has tiles, and at most one more. A
//   warp finds the
//             document of a slot by a search with 32 branches. Used where lengths differ so much that the list would be mostly empty.
#ifndef LLMC_CUDA_ATTENTION_PLACE_CUH
#define LLMC_CUDA_ATTENTION_PLACE_CUH

#include "llmc/cuda/launch.cuh" // launch, CudaDevice
#include <cmath>                // sqrt, M_LOG2E

enum { ATTENTION_THREADS = 128, ATTENTION_MAX_HEAD = 128 };

// Whether attention of this shape exists: any head size up to 128 in fp32, multiples of 16 in bf16.
static bool cuda_attention_supports(Dtype dtype, AttentionShape shape) {
    const int64_t size = shape.head_size;
    if (shape.heads < 1 || shape.kv_heads < 1 || shape.heads % shape.kv_heads != 0 || size < 1 || size > ATTENTION_MAX_HEAD) return false;
    return dtype == DTYPE_F32 || (dtype == DTYPE_BF16 && size % 16 == 0);
}

// One call's shape. Elements of qkv: (tokens, heads + 2*kv_heads, head_size); of out: (tokens, heads, head_size).
struct AttentionCall {
    const int32_t *cu_seqlens; // (documents+1)
    int documents, heads, kv_heads, head_size;
    int group;                  // query heads of a key/value head
    int listed;                 // tiles of the longest document; 0: blocks are searched
    int qkv_stride, out_stride; // elements between tokens
    int64_t tokens;
    float scale, scale2; // 1/sqrt(head_size); scores in powers of two: that times log2(e)
};

static AttentionCall attention_call_(const Packing *packing, AttentionShape shape) {
    AttentionCall c = {};
    c.cu_seqlens = (const int32_t *)packing->cu_seqlens.data;
    c.documents = (int)packing->documents;
    c.heads = (int)shape.heads, c.kv_heads = (int)shape.kv_heads, c.head_size = (int)shape.head_size;
    c.group = c.heads / c.kv_heads;
    c.tokens = packing->tokens;
    c.qkv_stride = (c.heads + 2 * c.kv_heads) * c.head_size;
    c.out_stride = c.heads * c.head_size;
    c.scale = (float)(1.0 / sqrt((double)shape.head_size));
    c.scale2 = (float)(1.0 / sqrt((double)shape.head_size) * M_LOG2E);
    return c;
}

// Grid of a kernel whose blocks take `tile` tokens of one of `heads` heads each; sets c->listed.
static dim3 attention_grid_(AttentionCall *c, const Packing *packing, int tile, int heads) {
    const int64_t slots = c->tokens / tile + c->documents, longest = (packing->max_length + tile - 1) / tile;
    const bool list = longest * c->documents <= 2 * slots && longest < 65536;
    c->listed = list ? (int)longest : 0;
    return c->listed > 0 ? dim3((unsigned)(heads * packing->documents), (unsigned)longest) : dim3((unsigned)(heads * slots));
}

// Launches KERNEL, allowing it its dynamic shared memory first, once per process.
template <auto KERNEL, class... Arguments>
static void attention_launch_(CudaDevice *device, dim3 grid, size_t shared_bytes, Arguments... arguments) {
    static const cudaError_t allowed = cudaFuncSetAttribute((const void *)KERNEL, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes);
    cuda_check(allowed, "cudaFuncSetAttribute (attention)");
    launch(device, device->compute, {grid, ATTENTION_THREADS, shared_bytes}, KERNEL, arguments...);
}

// ----------------------------------------------------------------------------
// On the device

struct AttentionPlace {
    int begin, length; // of the document, in tokens
    int tile, head;    // tile < 0: this block has no work
};

// The last document whose first slot is not after `slot`. The first slots rise strictly, so that document is the only one that can own it. All
// lanes call.
template <int TILE> static __device__ __forceinline__ int attention_document(const AttentionCall &c, int slot) {
    const int lane = threadIdx.x % 32;
    int low = 0, count = c.documents; // it is one of low .. low+count-1
    while (count > 1) {
        const int step = (count + 31) / 32, at = low + lane * step;
        const bool before = lane * step < count && c.cu_seqlens[at] / TILE + at <= slot;
        const int skip = (__popc(__ballot_sync(0xffffffffu, before)) - 1) * step;
        low += skip, count = min(step, count - skip);
    }
    return low;
}

// The same for every thread of a block. last_first: a document's last tiles are those with the most work.
template <int TILE> static __device__ __forceinline__ AttentionPlace attention_place(const AttentionCall &c, int heads, bool last_first) {
    AttentionPlace place;
    place.head = (int)(blockIdx.x % heads);
    const int number = (int)(blockIdx.x / heads), document = c.listed > 0 ? number : attention_document<TILE>(c, number);
    place.begin = c.cu_seqlens[document];
    place.length = c.cu_seqlens[document + 1] - place.begin;
    const int tiles = (place.length + TILE - 1) / TILE;
    const int rank = c.listed > 0 ? (int)blockIdx.y : number - (place.begin / TILE + document);
    place.tile = last_first ? (c.listed > 0 ? c.listed : tiles) - 1 - rank : rank;
    if (place.tile >= tiles) place.tile = -1;
    return place;
}

// Elements of qkv (and dqkv), and of out (and dout), where a head of a token of the document begins.
static __device__ __forceinline__ int64_t attention_q_at(const AttentionCall &c, const AttentionPlace &place, int token, int head) {
    return (int64_t)(place.begin + token) * c.qkv_stride + head * c.head_size;
}
static __device__ __forceinline__ int64_t attention_k_at(const AttentionCall &c, const AttentionPlace &place, int token, int kv) {
    return attention_q_at(c, place, token, c.heads + kv);
}
static __device__ __forceinline__ int64_t attention_v_at(const AttentionCall &c, const AttentionPlace &place, int token, int kv) {
    return attention_q_at(c, place, token, c.heads + c.kv_heads + kv);
}
static __device__ __forceinline__ int64_t attention_out_at(const AttentionCall &c, const AttentionPlace &place, int token, int head) {
    return (int64_t)(place.begin + token) * c.out_stride + head * c.head_size;
}
// Element of lse and delta (heads, tokens).
static __device__ __forceinline__ int64_t attention_row_at(const AttentionCall &c, const AttentionPlace &place, int token, int head) {
    return head * c.tokens + place.begin + token;
}

#endif
