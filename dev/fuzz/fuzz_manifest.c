// fuzz_manifest.c: any bytes as a manifest (behind its seal). What is accepted must have slices that cover every element
// once (counted one by one where tensors are small), and text that reads back the same.
#include "llmc/manifest.h" // what is fuzzed

static void require(bool ok) {
    if (!ok) abort();
}

static void count_elements(const ManifestTensor *tensor) {
    enum { LIMIT = 4096 };
    if (tensor->shape[0] > LIMIT || tensor->shape[1] > LIMIT || tensor->shape[0] * tensor->shape[1] > LIMIT) return;
    unsigned char seen[LIMIT] = {0};
    for (int64_t i = 0; i < tensor->slice_count; i++) {
        const ManifestSlice *s = &tensor->slices[i];
        const int64_t width = s->end[1] - s->begin[1];
        for (int64_t e = s->from; e < s->to; e++) {
            const int64_t row = s->begin[0] + e / width, column = s->begin[1] + e % width;
            require(row < tensor->shape[0] && column < tensor->shape[1] && seen[row * tensor->shape[1] + column]++ == 0);
        }
    }
    for (int64_t i = 0; i < tensor->shape[0] * tensor->shape[1]; i++) require(seen[i] == 1);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    Manifest manifest, again;
    Error error = {0};
    (void)manifest_check_seal("fuzz", (const char *)data, bytes, &error);
    error = (Error){0};
    if (!manifest_parse("fuzz", (const char *)data, bytes, &manifest, &error)) {
        require(error.code == CODE_INPUT && error.text[0] != '\0' && manifest.root == NULL);
        return 0;
    }
    for (int64_t i = 0; i < manifest.tensor_count; i++) {
        require(manifest_tensor(&manifest, manifest.tensors[i].name) == &manifest.tensors[i]);
        count_elements(&manifest.tensors[i]);
    }
    for (int64_t i = 0; i < manifest.file_count; i++) require(strchr(manifest.files[i].name, '/') == NULL && manifest.files[i].name[0] != '.');
    const ModelConfig config = {.layers = 1};
    Error ignored = {0};
    (void)checkpoint_model_check("fuzz", manifest.state.model, &config, &ignored);
    char *text = manifest_text(&manifest), *twice;
    require(text != NULL && manifest_check_seal("fuzz", text, strlen(text), &error));
    require(manifest_parse("fuzz", text, strlen(text), &again, &error) && again.tensor_count == manifest.tensor_count);
    twice = manifest_text(&again);
    require(twice != NULL && strcmp(text, twice) == 0);
    free(text);
    free(twice);
    manifest_free(&again);
    manifest_free(&manifest);
    return 0;
}
