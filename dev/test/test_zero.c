// test_zero.c: the flat arenas: offsets and sizes beyond 2^31, segments, what zero_unit() hands to the ops.
#include "dev/test/test.h" // check, test_end
#include "llmc/zero.h"     // what is tested

// The part of a device that arenas need; counts what is allocated.
static void *alloc_(Device *device, size_t bytes) {
    ++*(int *)device->state;
    return base_alloc(bytes);
}
static void release_(Device *device, void *pointer) {
    *(int *)device->state -= pointer != NULL;
    free(pointer);
}
static void copy_in_(Device *device, void *to, const void *from, size_t bytes) {
    (void)device;
    memcpy(to, from, bytes);
}

// Widths whose products are no multiples of the alignment, so that gaps would show.
static ModelConfig config_(int bits) {
    return (ModelConfig){.layers = 3,
                         .channels = 36,
                         .heads = 4,
                         .kv_heads = bits & 1 ? 2 : 4,
                         .head_size = 9,
                         .ffn = 88,
                         .vocab = 101,
                         .max_seq = 17,
                         .norm = bits >> 1 & 1,
                         .position = bits >> 2 & 1,
                         .activation = bits >> 3 & 1,
                         .tied = bits >> 4 & 1,
                         .qk_norm = bits >> 5 & 1,
                         .bias = bits >> 6,
                         .norm_eps = 1e-5,
                         .rope_theta = 1e4};
}

static void test_units(void) {
    int live = 0;
    Comm *comm = comm_init(NULL, NULL);
    Device device = {.name = "test", .state = &live, .alloc = alloc_, .release = release_, .copy_in = copy_in_};
    for (int bits = 0; bits < 2 * 3 * 64; bits++) {
        const Dtype dtype = bits % 2 ? DTYPE_BF16 : DTYPE_F32;
        const ModelConfig config = config_(bits / 2);
        Model model = model_create(&config);
        Zero zero = zero_create(&device, comm, &model, dtype);
        const ZeroBytes bytes = zero_bytes(&model, dtype);
        const size_t n = (size_t)zero.elements, element = dtype == DTYPE_BF16 ? 2 : 4;
        check(bytes.param_bytes == n * element && bytes.master_bytes == (dtype == DTYPE_BF16 ? n * 4 : 0) && bytes.grad_bytes == n * 4 &&
                  bytes.optim_bytes == n * 8,
              "switches %d: bytes of the arenas", bits);
        check((zero.master.data == NULL) == (dtype == DTYPE_F32) && zero.param.dtype == dtype && zero.grad.dtype == DTYPE_F32 &&
                  zero.adam_m.dtype == DTYPE_F32,
              "switches %d: master weights exist for bf16 only", bits);
        // every tensor is handed out by exactly one unit, as the place that its offset says
        int handed = 0, wrong = 0;
        for (int u = 0; u < model.units; u++) {
            const Unit unit = zero_unit(&zero, u);
            for (int kind = 0; kind < TENSOR_KINDS; kind++) {
                wrong += (unit.weight[kind].data == NULL) != (unit.grad[kind].data == NULL);
                if (unit.weight[kind].data == NULL) continue;
                handed++;
                const ptrdiff_t weight_at = (char *)unit.weight[kind].data - (char *)zero.param.data,
                                grad_at = (char *)unit.grad[kind].data - (char *)zero.grad.data;
                int owners = 0;
                for (int i = 0; i < model.count; i++) {
                    owners += model.tensors[i].unit == u && model.tensors[i].kind == (TensorKind)kind &&
                              zero.offset[i] * (int64_t)element == weight_at && zero.offset[i] * 4 == grad_at;
                }
                wrong += owners != 1 || unit.weight[kind].dtype != dtype || unit.grad[kind].dtype != DTYPE_F32;
            }
            // one matrix product reads q, k and v; another gate and up
            if (u == 0 || u == model.units - 1) continue;
            const int64_t C = config.channels, Q = model_q_width(&config), KV = model_kv_width(&config);
            wrong += buffer_at(unit.weight[TENSOR_Q_WEIGHT], Q * C).data != unit.weight[TENSOR_K_WEIGHT].data;
            wrong += buffer_at(unit.weight[TENSOR_K_WEIGHT], KV * C).data != unit.weight[TENSOR_V_WEIGHT].data;
            wrong += buffer_at(unit.grad[TENSOR_Q_WEIGHT], (Q + KV) * C).data != unit.grad[TENSOR_V_WEIGHT].data;
            wrong += buffer_at(unit.weight[TENSOR_Q_BIAS], Q + KV).data != unit.weight[TENSOR_V_BIAS].data && config.bias != BIAS_OFF;
            wrong += buffer_at(unit.weight[TENSOR_GATE_WEIGHT], config.ffn * C).data != unit.weight[TENSOR_UP_WEIGHT].data &&
                     config.activation == ACTIVATION_SWIGLU;
        }
        check(handed == model.count && wrong == 0, "switches %d: %d of %d tensors handed out, %d faults", bits, handed, model.count, wrong);
        // segments: sorted, apart, decay as in the table, and nothing but alignment between them
        int64_t at = 0, covered = 0;
        int faults = zero.segment_count != model.count;
        for (int64_t i = 0; i < zero.segment_count; i++) {
            const Segment *s = &zero.segments[i];
            faults += s->begin < at || s->begin - at >= ZERO_ALIGN_ELEMENTS || s->count != model.tensors[i].elements ||
                      s->decay != model.tensors[i].decay;
            at = s->begin + s->count;
            covered += s->count;
        }
        check(faults == 0 && covered == model_parameters(&model) && at <= zero.elements, "switches %d: %d faulty segments", bits, faults);
        zero_free(&zero, &device, comm);
        check(live == 0, "switches %d: %d allocations are left", bits, live);
        model_free(&model);
    }
    printf("units: 384 configurations and dtypes: pointers, joins, segments, bytes\n");
    comm_finish(comm);
}

static void test_big(void) {
    static const struct {
        const char *name;
        int64_t parameters;
    } models[] = {{"llama2-7b", 6738415616}, {"llama2-70b", 68976648192}, {"llama3-8b", 8030261248}, {"llama3-405b", 405853388800}};
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        const ModelConfig config = model_preset_config_(model_preset_find(models[i].name));
        Model model = model_create(&config);
        int64_t *offset = base_new((size_t)model.count, sizeof *offset);
        const int64_t elements = zero_layout(&model, offset);
        // all widths are multiples of the alignment: there is no padding, and the offsets are running sums
        int64_t sum = 0;
        int wrong = 0;
        for (int t = 0; t < model.count; t++) wrong += offset[t] != sum, sum += model.tensors[t].elements;
        check(wrong == 0 && elements == models[i].parameters, "%s: %lld elements, wanted %lld, %d offsets differ", models[i].name,
              (long long)elements, (long long)models[i].parameters, wrong);
        check(offset[model.count - 1] > (int64_t)1 << 32 && zero_layout(&model, NULL) == elements, "%s: the last offset passes 2^32",
              models[i].name);
        const ZeroBytes bytes = zero_bytes(&model, DTYPE_BF16); // 2 + 4 + 4 + 8 bytes per parameter
        check(bytes.param_bytes + bytes.master_bytes + bytes.grad_bytes + bytes.optim_bytes == (size_t)models[i].parameters * 18,
              "%s: 18 bytes per parameter", models[i].name);
        free(offset);
        model_free(&model);
    }
    printf("big: offsets of 7B, 8B, 70B and 405B models, 18 bytes per parameter in bf16\n");
}

int main(void) {
    test_units();
    test_big();
    return test_end();
}
