// fuzz_safetensors.c: any bytes as a safetensors file. What is accepted must tile the file, and be written back the same.
#include "llmc/safetensors.h" // what is fuzzed

static void require(bool ok) {
    if (!ok) abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    SafetensorsIndex index;
    Error error = {0};
    if (!safetensors_parse("fuzz", data, bytes, (int64_t)bytes, &index, &error)) {
        require(error.code == CODE_INPUT && error.text[0] != '\0' && index.tensors == NULL);
        return 0;
    }
    int64_t total = 0;
    SafetensorsEntry *entries = base_new(index.count, sizeof *entries);
    for (size_t i = 0; i < index.count; i++) {
        const SafetensorsTensor *t = &index.tensors[i];
        require(t->offset >= 8 && t->bytes >= 0 && t->offset + t->bytes <= (int64_t)bytes);
        require(safetensors_find(&index, t->name) == t);
        total += t->bytes;
        entries[i] = (SafetensorsEntry){.name = t->name, .dtype = t->type->name, .rank = t->rank};
        memcpy(entries[i].shape, t->shape, sizeof t->shape);
    }
    // Its own header, with the tensors in the order of names.
    size_t header_bytes;
    int64_t data_bytes;
    char *header = safetensors_header("fuzz", entries, (int)index.count, index.metadata, &header_bytes, &data_bytes, &error);
    require(header != NULL && data_bytes == total);
    SafetensorsIndex again;
    require(safetensors_parse("fuzz", header, header_bytes, (int64_t)header_bytes + data_bytes, &again, &error) && again.count == index.count);
    for (size_t i = 0; i < index.count; i++) {
        require(strcmp(again.tensors[i].name, index.tensors[i].name) == 0 && again.tensors[i].bytes == index.tensors[i].bytes);
    }
    safetensors_index_free(&again);
    safetensors_index_free(&index);
    free(header);
    free(entries);
    return 0;
}
