// graph.cuh: runs of ops that come again and again, as CUDA graphs: captured from the compute stream once, then launched as a whole, in the time
// that a launch takes instead of that of all its kernels. The caller names a run by a key (device.h); what its ops are, this file does not know.
//
// A key's first use runs its ops as ever: cuBLASLt times its algorithms, scratch grows. The second captures them, which runs nothing, and launches
// what it captured; so do all later ones. A graph holds the address of scratch: after scratch has moved it is captured anew.
#ifndef LLMC_CUDA_GRAPH_CUH
#define LLMC_CUDA_GRAPH_CUH

#include "llmc/cuda/cuda.cuh" // CudaDevice, cuda_check
#include <cstring>            // memcmp

// Of more runs than these the one that was not used for longest is forgotten: a graph takes memory of host and device for every kernel in it.
enum { CUDA_GRAPH_LIMIT = 64 };

struct CudaGraph {
    GraphKey key;
    cudaGraphExec_t executable; // nullptr: not captured
    int64_t kernels;            // launches that it stands for
    int64_t scratch_moves;      // CudaDevice.scratch_moves when it was captured
    int64_t used;               // the number of its last use
};

// CudaDevice.graphs
struct CudaGraphs {
    CudaGraph kept[CUDA_GRAPH_LIMIT];
    int count;
    CudaGraph *begun; // that is being captured, else nullptr
    int64_t uses;     // of all
    GraphCounts counts;
};

static CudaGraphs *cuda_graphs_open() { return new CudaGraphs(); }

static void cuda_graph_drop_(CudaGraph *graph) {
    if (graph->executable != nullptr) cuda_check(cudaGraphExecDestroy(graph->executable), "cudaGraphExecDestroy"); // goes when it has run
    graph->executable = nullptr;
}

static void cuda_graphs_close(CudaGraphs *graphs) {
    for (int i = 0; i < graphs->count; i++) cuda_graph_drop_(&graphs->kept[i]);
    delete graphs;
}

static CudaGraph *cuda_graph_find_(CudaGraphs *graphs, const GraphKey *key) {
    for (int i = 0; i < graphs->count; i++) {
        if (memcmp(&graphs->kept[i].key, key, sizeof *key) == 0) return &graphs->kept[i];
    }
    return nullptr;
}

// A place for a key that is used for the first time.
static CudaGraph *cuda_graph_take_(CudaGraphs *graphs, const GraphKey *key) {
    CudaGraph *graph = &graphs->kept[graphs->count];
    if (graphs->count < CUDA_GRAPH_LIMIT) {
        graphs->count++;
    } else {
        graph = &graphs->kept[0];
        for (CudaGraph &other : graphs->kept) {
            if (other.used < graph->used) graph = &other;
        }
        cuda_graph_drop_(graph);
    }
    graph->key = *key;
    return graph;
}

static void cuda_graph_launch_(CudaDevice *device, const CudaGraph *graph) {
    cuda_check(cudaGraphLaunch(graph->executable, device->compute), "cudaGraphLaunch");
    device->launches += graph->kernels;
    device->graphs->counts.launched++;
}

// True: the graph of this key was launched. False: the caller enqueues the ops, then calls cuda_graph_end.
static bool cuda_graph_begin(Device *device, const GraphKey *key) {
    CudaDevice *c = cuda_of(device);
    CudaGraphs *graphs = c->graphs;
    CudaGraph *graph = cuda_graph_find_(graphs, key);
    const bool first = graph == nullptr;
    if (first) graph = cuda_graph_take_(graphs, key);
    graph->used = ++graphs->uses;
    if (first) return false;
    if (graph->executable != nullptr && graph->scratch_moves == c->scratch_moves) {
        cuda_graph_launch_(c, graph);
        return true;
    }
    cuda_graph_drop_(graph);
    // Relaxed: communication goes on meanwhile, on streams of its own.
    cuda_check(cudaStreamBeginCapture(c->compute, cudaStreamCaptureModeRelaxed), "cudaStreamBeginCapture");
    c->capturing = true;
    c->captured = 0;
    graphs->begun = graph;
    return false;
}

static void cuda_graph_end(Device *device) {
    CudaDevice *c = cuda_of(device);
    CudaGraph *graph = c->graphs->begun;
    cudaGraph_t nodes = nullptr;
    if (graph == nullptr) return;
    c->graphs->begun = nullptr;
    c->capturing = false;
    cuda_check(cudaStreamEndCapture(c->compute, &nodes), "cudaStreamEndCapture");
    cuda_check(cudaGraphInstantiate(&graph->executable, nodes, 0), "cudaGraphInstantiate");
    cuda_check(cudaGraphDestroy(nodes), "cudaGraphDestroy");
    graph->kernels = c->captured;
    graph->scratch_moves = c->scratch_moves;
    c->graphs->counts.captured++;
    cuda_graph_launch_(c, graph);
}

static GraphCounts cuda_graph_counts(Device *device) { return cuda_of(device)->graphs->counts; }

#endif
