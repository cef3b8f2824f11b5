// compare_grads.c: compares two files of --dump-grads, tensor by tensor (dev/test/gradients.h).
// usage: compare_grads A B BOUND; exit 1 when a tensor's error is over BOUND.
#include "dev/test/gradients.h" // gradient_error
#include "llmc/base.h"          // die
#include "llmc/safetensors.h"   // safetensors_open

static float *read_(const SafetensorsFile *file, const SafetensorsTensor *tensor) {
    Error error = {0};
    if (strcmp(tensor->type->name, "F32") != 0) die(CODE_INPUT, "%s: %s: got %s, wanted F32", file->path, tensor->name, tensor->type->name);
    float *values = base_new((size_t)tensor->elements, sizeof *values);
    if (!safetensors_read(file, tensor, 0, tensor->bytes, values, &error)) die_error(&error);
    return values;
}

int main(int argc, char **argv) {
    if (argc != 4) die(CODE_USAGE, "usage: compare_grads A B BOUND");
    const double bound = atof(argv[3]);
    SafetensorsFile a, b;
    Error error = {0};
    if (!safetensors_open(argv[1], &a, &error) || !safetensors_open(argv[2], &b, &error)) die_error(&error);
    const size_t count = a.index.count;
    if (count != b.index.count || count == 0) die(CODE_INPUT, "got %zu and %zu tensors", count, b.index.count);
    double squares = 0;
    int64_t elements = 0;
    for (size_t t = 0; t < count; t++) {
        const SafetensorsTensor *in_b = &b.index.tensors[t];
        float *y = read_(&b, in_b);
        const double norm = gradient_norm(y, in_b->elements);
        squares += norm * norm;
        elements += in_b->elements;
        free(y);
    }
    double worst = 0;
    const char *where = "";
    int over = 0;
    for (size_t t = 0; t < count; t++) {
        const SafetensorsTensor *in_a = &a.index.tensors[t], *in_b = safetensors_find(&b.index, in_a->name);
        if (in_b == NULL || in_a->elements != in_b->elements) die(CODE_INPUT, "%s: missing, or of another size, in %s", in_a->name, argv[2]);
        float *x = read_(&a, in_a), *y = read_(&b, in_b);
        const double e = gradient_error(x, y, in_a->elements, sqrt(squares), elements);
        over += !(e <= bound); // also NaN
        if (!(e <= worst) && !isnan(worst)) worst = e, where = in_a->name;
        free(x);
        free(y);
    }
    printf("%zu tensors, worst error %.3g (%s), bound %g, norm %.9g\n", count, worst, where, bound, sqrt(squares));
    const bool good = over == 0 && squares > 0;
    safetensors_close(&a);
    safetensors_close(&b);
    return good ? 0 : 1;
}
