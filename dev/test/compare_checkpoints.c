// compare_checkpoints.c: are the tensors of two checkpoints the same, bit by bit, whoever wrote which part of them?
// usage: compare_checkpoints A B; exit 1 when a tensor differs or is in one of them only.
#include "llmc/checkpoint.h"      // checkpoint_open, checkpoint_whole
#include "llmc/checkpoint_read.h" // checkpoint_read

static void *read_(const Checkpoint *checkpoint, const ManifestTensor *tensor, size_t *bytes) {
    Error error = {0};
    Dtype dtype = 0;
    while (dtype < DTYPE_COUNT && strcmp(dtype_names[dtype], tensor->type->name) != 0) dtype++;
    if (dtype == DTYPE_COUNT) die(CODE_INPUT, "%s: %s: got dtype %s", checkpoint->directory, tensor->name, tensor->type->name);
    *bytes = (size_t)(tensor->shape[0] * tensor->shape[1]) * dtype_bytes(dtype);
    void *values = base_alloc(*bytes);
    const CheckpointSlice slice = checkpoint_whole("", tensor->name, dtype, tensor->rank, tensor->shape, values);
    if (!checkpoint_read(checkpoint, &slice, 1, false, &error)) die_error(&error);
    return values;
}

int main(int argc, char **argv) {
    if (argc != 3) die(CODE_USAGE, "usage: compare_checkpoints A B");
    Comm *comm = comm_init(NULL, NULL);
    Checkpoint a, b;
    Error error = {0};
    if (!checkpoint_open(comm, argv[1], &a, &error) || !checkpoint_open(comm, argv[2], &b, &error)) die_error(&error);
    int64_t different = 0, bytes = 0;
    for (int64_t i = 0; i < a.manifest.tensor_count; i++) {
        const ManifestTensor *in_a = &a.manifest.tensors[i], *in_b = manifest_tensor(&b.manifest, in_a->name);
        if (in_b == NULL) die(CODE_INPUT, "%s: missing in %s", in_a->name, argv[2]);
        size_t a_bytes, b_bytes;
        void *x = read_(&a, in_a, &a_bytes), *y = read_(&b, in_b, &b_bytes);
        const bool same = a_bytes == b_bytes && memcmp(x, y, a_bytes) == 0;
        if (!same && different++ == 0) printf("%s differs; ", in_a->name);
        bytes += (int64_t)a_bytes;
        free(x);
        free(y);
    }
    printf("%lld and %lld tensors, %lld bytes, %lld different\n", (long long)a.manifest.tensor_count, (long long)b.manifest.tensor_count,
           (long long)bytes, (long long)different);
    const bool good = different == 0 && bytes > 0 && a.manifest.tensor_count == b.manifest.tensor_count && a.manifest.state.step > 0;
    checkpoint_close(&a);
    checkpoint_close(&b);
    comm_finish(comm);
    return good ? 0 : 1;
}
