// compare_grads.c: compares two files of --dump-grads, tensor by tensor.
// usage: compare_grads A B BOUND; exit 1 when a tensor's error is over BOUND.
//
// Error of a tensor = |a-b| / max(|b|, 1e-3 * |g| * sqrt(n_tensor/n_total)), g the whole gradient of B: some tensors have a true
// gradient of zero (the key bias of GPT-2), and their rounding noise must not decide.
#include "llmc/base.h"        // die
#include "llmc/safetensors.h" // safetensors_open

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
    if (a.index.count != b.index.count || a.index.count == 0) die(CODE_INPUT, "got %zu and %zu tensors", a.index.count, b.index.count);
    double whole = 0, elements = 0;
    double *difference = base_new(a.index.count, sizeof *difference), *size = base_new(a.index.count, sizeof *size);
    for (size_t t = 0; t < a.index.count; t++) {
        const SafetensorsTensor *in_a = &a.index.tensors[t], *in_b = safetensors_find(&b.index, in_a->name);
        if (in_b == NULL || in_a->elements != in_b->elements) die(CODE_INPUT, "%s: missing, or of another size, in %s", in_a->name, argv[2]);
        float *x = read_(&a, in_a), *y = read_(&b, in_b);
        for (int64_t i = 0; i < in_a->elements; i++) {
            const double d = (double)x[i] - (double)y[i];
            difference[t] += d * d;
            size[t] += (double)y[i] * (double)y[i];
        }
        whole += size[t];
        elements += (double)in_a->elements;
        free(x);
        free(y);
    }
    double worst = 0;
    const char *where = "";
    int over = 0;
    for (size_t t = 0; t < a.index.count; t++) {
        const double floor = 1e-3 * sqrt(whole) * sqrt((double)a.index.tensors[t].elements / elements);
        const double e = sqrt(difference[t]) / fmax(sqrt(size[t]), floor);
        over += !(e <= bound); // also NaN
        if (!(e <= worst) && !isnan(worst)) worst = e, where = a.index.tensors[t].name;
    }
    printf("%zu tensors, worst error %.3g (%s), bound %g, norm %.9g\n", a.index.count, worst, where, bound, sqrt(whole));
    const bool good = over == 0 && whole > 0;
    free(difference);
    free(size);
    safetensors_close(&a);
    safetensors_close(&b);
    return good ? 0 : 1;
}
