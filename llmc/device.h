// device.h: the device interface: one struct of function pointers. The trainer and every parallel mechanism are written
// once against it. The CPU device (llmc/cpu/) is the oracle; an op without a CPU implementation does not exist.
//
// Conventions. Tokens are a flat axis N; matrices are row-major; weights are [out, in]. A Buffer carries its dtype:
// weights and activations are F32 or BF16 (one of them in a run), gradients of weights, statistics and losses F32,
// token ids I32. Every output says `=` or `+=`. A Buffer with data == NULL is "absent" where the comment says optional.
// Ops never allocate and never fail: whatever can be wrong was checked before.
#ifndef LLMC_DEVICE_H
#define LLMC_DEVICE_H

#include "llmc/precision.h" // Dtype, dtype_bytes
#include <stdbool.h>        // bool
#include <stddef.h>         // size_t
#include <stdint.h>         // int64_t

typedef struct {
    void *data; // device memory
    Dtype dtype;
    int64_t row; // elements from a row to the next; 0: rows lie side by side. Honoured only where an op's comment says "rows may be apart": what
                 // lies between them is never read as a value and never changed
} Buffer;

static inline Buffer buffer_of(void *data, Dtype dtype) {
    const Buffer buffer = {data, dtype, 0};
    return buffer;
}

// Elements from a row of `columns` to the next.
static inline int64_t buffer_row(Buffer buffer, int64_t columns) { return buffer.row > 0 ? buffer.row : columns; }

static inline Buffer buffer_at(Buffer buffer, int64_t elements) {
    if (buffer.data != NULL) buffer.data = (char *)buffer.data + elements * (int64_t)dtype_bytes(buffer.dtype);
    return buffer;
}

// Packed attention: sequence (document) s owns the tokens cu_seqlens[s] .. cu_seqlens[s+1]-1. Attention is causal inside
// a document and absent between documents.
typedef struct {
    Buffer cu_seqlens; // (documents+1) I32, starts with 0, ends with N, never decreases
    int64_t documents;
    int64_t tokens;     // N
    int64_t max_length; // of a document
} Packing;

// Where dropout draws its numbers (rng.h). keep_threshold of 65536 keeps everything; NULL or 65536 = no dropout.
typedef struct {
    const uint64_t *key;     // device memory: rng_dropout_key(seed, step)
    uint32_t site;           // place in the network
    uint32_t keep_threshold; // rng_dropout_threshold(p)
    Buffer token_index;      // (N) I32: index of the token in the step's global batch
} Dropout;

static inline bool dropout_active(const Dropout *dropout) { return dropout != NULL && dropout->keep_threshold < 65536; }

// Kinds of norm, in the order of --norm's choices.
enum { NORM_LAYERNORM, NORM_RMSNORM };

typedef struct {
    int64_t heads, kv_heads, head_size; // NH NKV HS, of this rank
} AttentionShape;

// State of a step in device memory, so that a host that reads it late can still skip a bad step.
typedef struct {
    double loss_sum;         // sum over valid tokens of loss / valid tokens of the global batch: the loss
    double grad_squares;     // sum of squares of the gradient
    double grad_norm;        // set by step_decide
    double lr;               // set by the host before the step
    double loss_scale;       // derivative of loss_sum by a token's loss; set by the host before the first micro-batch
    uint64_t dropout_key;    // rng_dropout_key(seed, step); set by the host before the step
    double clip_coefficient; // min(1, clip/(norm + 1e-6)), set by step_decide
    int64_t skip;            // 1: loss or norm is not finite; the update changes nothing
    int64_t optimizer_steps; // updates applied; a skipped step does not count. Stays from step to step, the others begin anew
} StepState;

// A run of elements of a flat buffer that share their treatment. Segments are sorted and do not overlap; gaps are padding.
typedef struct {
    int64_t begin, count; // elements
    bool decay;           // weight decay applies
} Segment;

// Where stochastic rounding draws its numbers (rng.h): by the place of a parameter, the same however its unit is divided into shards.
typedef struct {
    uint64_t key;  // rng_round_key(seed, step)
    uint64_t unit; // of the model
    int64_t first; // place in the unit of the buffers' element 0, a multiple of 8
} Rounding;

typedef struct {
    double beta1, beta2, eps, weight_decay;
    Rounding rounding; // where param is BF16 without a master
} AdamW;

enum { DEVICE_SLOTS = 2 };

// Names a run of ops: numbers that decide every pointer, shape and flag of all of them, unused ones 0. What is left to differ lies in device
// memory.
typedef struct {
    int64_t number[12];
} GraphKey;

typedef struct {
    int64_t captured, launched;
} GraphCounts;

typedef struct Device Device;
struct Device {
    const char *name;
    char model[64]; // what the machine calls it; "" for the CPU
    bool on_host;   // its memory is the host's, which reads and writes it like its own
    void *state;    // the implementation's own

    void (*close)(Device *device);
    // --- memory (bytes); alloc returns zeroed, 64-byte aligned memory or dies; copies are ordered with ops
    void *(*alloc)(Device *device, size_t bytes);
    void (*release)(Device *device, void *pointer);
    void (*copy_in)(Device *device, void *to_device, const void *from_host, size_t bytes);
    void (*copy_out)(Device *device, void *to_host, const void *from_device, size_t bytes);
    void (*zero)(Device *device, void *pointer, size_t bytes);
    void (*synchronize)(Device *device);
    // Reads that are waited for later, so that the device is never idle: host_alloc's memory at `to` holds what device memory held in the order of
    // ops once copy_out_finish of the same slot (below DEVICE_SLOTS) has returned
    void *(*host_alloc)(Device *device, size_t bytes);
    void (*host_release)(Device *device, void *pointer);
    void (*copy_out_start)(Device *device, int slot, void *to, const void *from_device, size_t bytes);
    void (*copy_out_finish)(Device *device, int slot);
    // Times for people; absent where on_host, whose clock tells. mark: a point in the order of ops, and its number, from 0. mark_times: waits for
    // all of them, tells when each was passed, in ns of CLOCK_MONOTONIC, and begins to count anew
    int64_t (*mark)(Device *device);
    void (*mark_times)(Device *device, int64_t *ns, int64_t count);
    // A copy that is made while ops go on, for a save. What snapshot_copy puts into host_alloc's memory is what device memory held, in the order of
    // ops, when snapshot_begin was called: before the first op that may change what is copied, snapshot_fence lets the ops that follow (not the
    // host) wait for the copies. They are there once snapshot_wait has returned, which waits for nothing after any op behind the fence is known to
    // be done
    void (*snapshot_begin)(Device *device);
    void (*snapshot_copy)(Device *device, void *to, const void *from_device, size_t bytes);
    void (*snapshot_fence)(Device *device); // without copies that it has not fenced yet: nothing
    void (*snapshot_wait)(Device *device);
    // Rate of a large matrix product in this dtype, FLOP/s, measured now (some ten milliseconds)
    double (*matmul_rate)(Device *device, Dtype dtype);
    // What MFU is a share of, FLOP/s: the maker's figure for dense matrix products in this dtype; on the CPU matmul_rate. 0: unknown
    double (*peak_flops)(Device *device, Dtype dtype);
    // Bytes of its memory that it holds beside what alloc gave: workspace and scratch; 0: none
    size_t (*own_bytes)(Device *device);
    // Bytes that can still be allocated; 0: unknown
    double (*free_bytes)(Device *device);
    // Kernels started so far, those of graphs too; -1: it has none
    int64_t (*kernel_launches)(Device *device);

    // --- graphs: a run of ops that comes again and again is launched at once, where the device can.
    //     if (!d->graph_begin(d, &key)) { the ops; d->graph_end(d); }
    // graph_begin. true: the run of this key was launched. false: its ops are to be enqueued, then graph_end, which does nothing where graph_begin
    // was not called before. In between nothing is copied from or to the host, allocated or waited for.
    bool (*graph_begin)(Device *device, const GraphKey *key);
    void (*graph_end)(Device *device);
    GraphCounts (*graph_counts)(Device *device); // so far

    // --- casts: to (n) = from (n), any mix of F32 and BF16
    void (*cast)(Device *device, Buffer to, Buffer from, int64_t n);
    // to (n) += from (n), both F32
    void (*accumulate)(Device *device, Buffer to, Buffer from, int64_t n);

    // --- embedding: out (N, C) = dropout(wte[ids] + wpe[positions]); wpe and dropout optional. wte (V, C) holds the vocabulary from vocab_begin
    // on: other ids contribute nothing (tensor parallelism: they are another rank's)
    void (*embedding_forward)(Device *device, Buffer out, Buffer ids, Buffer positions, Buffer wte, Buffer wpe, const Dropout *dropout, int64_t N,
                              int64_t C, int64_t vocab_begin, int64_t V);
    // dwte (V, C) += where ids are in its range, dwpe (positions, C) += (optional); deterministic
    void (*embedding_backward)(Device *device, Buffer dwte, Buffer dwpe, Buffer dout, Buffer ids, Buffer positions, const Dropout *dropout,
                               int64_t N, int64_t C, int64_t vocab_begin, int64_t V, int64_t max_positions);

    // --- residual + norm: x = in + dropout(branch); sum (N, C) = x; out (N, C) = norm(x) * weight + bias
    // branch and sum are absent together (then x = in); bias optional; rmsnorm has no mean (mean optional then).
    // mean, rstd (N) F32 =. layernorm: biased variance (Ba et al. 2016); rmsnorm: Zhang & Sennrich 2019. kind: NORM_*.
    void (*norm_forward)(Device *device, Buffer out, Buffer mean, Buffer rstd, Buffer sum, Buffer in, Buffer branch, Buffer weight, Buffer bias,
                         const Dropout *dropout, int kind, double eps, int64_t N, int64_t C);
    // dx (N, C) = or += (accumulate_x); dweight, dbias (C) F32 = or += (accumulate_w), dbias optional; x is the norm's input
    void (*norm_backward)(Device *device, Buffer dx, bool accumulate_x, Buffer dweight, Buffer dbias, bool accumulate_w, Buffer dout, Buffer x,
                          Buffer mean, Buffer rstd, Buffer weight, int kind, int64_t N, int64_t C);
    // out (N, C) = in + dropout(branch): the residual stream where no norm follows, at the end of a pipeline stage
    void (*residual_forward)(Device *device, Buffer out, Buffer in, Buffer branch, const Dropout *dropout, int64_t N, int64_t C);
    // out (N, C) = in with dropout's mask and scale; may be in place
    void (*dropout_backward)(Device *device, Buffer out, Buffer in, const Dropout *dropout, int64_t N, int64_t C);

    // --- linear: out (N, OC) = in (N, IC) x weight (OC, IC)^T + bias (OC, optional).
    // gelu_out (N, OC), optional: = gelu(out), tanh form (Hendrycks & Gimpel 2016). out may be F32 when in is BF16; its rows may be apart, without
    // gelu_out.
    void (*linear_forward)(Device *device, Buffer out, Buffer gelu_out, Buffer in, Buffer weight, Buffer bias, int64_t N, int64_t IC, int64_t OC);
    // din (N, IC) = dout (N, OC; rows may be apart) x weight; with gelu_in (N, IC), optional: = that * gelu'(gelu_in)
    void (*linear_backward_input)(Device *device, Buffer din, Buffer dout, Buffer weight, Buffer gelu_in, int64_t N, int64_t IC, int64_t OC);
    // dweight (OC, IC) F32 = or += dout^T x in; dbias (OC) F32, optional: = or += column sums of dout (N, OC; rows may be apart)
    void (*linear_backward_weight)(Device *device, Buffer dweight, Buffer dbias, bool accumulate, Buffer dout, Buffer in, int64_t N, int64_t IC,
                                   int64_t OC);

    // --- swiglu (Shazeer 2020): out (N, FF) = silu(gate) * up, gate_up (N, 2*FF) = gate | up
    void (*swiglu_forward)(Device *device, Buffer out, Buffer gate_up, int64_t N, int64_t FF);
    // dgate_up (N, 2*FF) =
    void (*swiglu_backward)(Device *device, Buffer dgate_up, Buffer dout, Buffer gate_up, int64_t N, int64_t FF);

    // --- q and k before attention: rmsnorm per head (q_norm, k_norm (HS), optional together), then rotation of the halves
    // (Su et al. 2021, in Hugging Face's rotate-half order; rope optional). rope (positions, HS): cos (HS/2) | sin (HS/2), F32.
    // qkv_out (N, QKV) =, rows are q heads | k heads | v heads; may be qkv_in when there is no qk-norm. rstd (N, NH+NKV) F32 =,
    // absent without qk-norm.
    void (*qk_forward)(Device *device, Buffer qkv_out, Buffer rstd, Buffer qkv_in, Buffer q_norm, Buffer k_norm, double eps, Buffer rope,
                       Buffer positions, AttentionShape shape, int64_t N);
    // dqkv (N, QKV) in place: gradient of qkv_out becomes that of qkv_in. dq_norm, dk_norm (HS) F32 = or += (accumulate)
    void (*qk_backward)(Device *device, Buffer dqkv, Buffer dq_norm, Buffer dk_norm, bool accumulate, Buffer qkv_in, Buffer rstd, Buffer q_norm,
                        Buffer k_norm, Buffer rope, Buffer positions, AttentionShape shape, int64_t N);

    // --- attention: out (N, NH*HS) = softmax(q k^T / sqrt(HS), causal, per document) v; lse (NH, N) F32 = log-sum-exp of the
    // scaled scores. Blocked with online softmax (Dao 2023, FlashAttention-2); nothing of size T x T exists.
    void (*attention_forward)(Device *device, Buffer out, Buffer lse, Buffer qkv, const Packing *packing, AttentionShape shape);
    // dqkv (N, QKV) =; delta (NH, N) F32 is scratch: row sums of dout*out
    void (*attention_backward)(Device *device, Buffer dqkv, Buffer delta, Buffer dout, Buffer out, Buffer qkv, Buffer lse, const Packing *packing,
                               AttentionShape shape);

    // --- classifier on a chunk of tokens: losses (N) F32 = -log softmax(logits)[target], 0 where target < 0.
    // dlogits (N, V), optional: = (softmax - onehot) * *dloss (device memory), 0 where target < 0; may be logits itself when the dtypes agree.
    // Rows of logits and of dlogits may be apart, here and in the two parts below.
    void (*cross_entropy)(Device *device, Buffer losses, Buffer dlogits, Buffer logits, Buffer targets, const double *dloss, int64_t N, int64_t V);

    // The same with the vocabulary divided over R ranks (Shoeybi et al. 2019, section 3), in two parts. Here logits (N, V) are those from
    // vocab_begin on. First stats (N, 3) F32 = largest logit, sum of exp(logit - largest), logit of the target (0 when it is another
    // rank's); the ranks' stats are then gathered, in rank order, into all (R, N, 3).
    void (*cross_entropy_local)(Device *device, Buffer stats, Buffer logits, Buffer targets, int64_t vocab_begin, int64_t N, int64_t V);
    // losses (N) F32 =, the same bits on every rank; dlogits (N, V), optional: =, may be logits itself. Targets < 0 as above.
    void (*cross_entropy_merge)(Device *device, Buffer losses, Buffer dlogits, Buffer logits, Buffer all, int64_t R, Buffer targets,
                                const double *dloss, int64_t vocab_begin, int64_t N, int64_t V);

    // --- the step's scalars
    // state->loss_sum += *scale (device memory; NULL: 1) * sum of losses (N), in a fixed order, in double
    void (*loss_sum)(Device *device, StepState *state, Buffer losses, const double *scale, int64_t N);
    // state->grad_squares += sum of squares of the segments (count, device memory), in a fixed order, in double
    void (*grad_squares)(Device *device, StepState *state, Buffer grad, const Segment *segments, int64_t count);
    // grad_norm, clip_coefficient (clip 0 = off), skip; advances optimizer_steps unless skipped
    void (*step_decide)(Device *device, StepState *state, double clip);
    // AdamW (Loshchilov & Hutter 2019) on a flat shard, gradients scaled by clip_coefficient; nothing when state->skip.
    // param (F32 or BF16) and master (F32, absent when param is F32), m, v, grad F32: indexed by the segments. BF16 without a master: the update is
    // rounded at random
    void (*adamw)(Device *device, const StepState *state, Buffer param, Buffer master, Buffer m, Buffer v, Buffer grad, const Segment *segments,
                  int64_t count, AdamW config);
};

#endif
