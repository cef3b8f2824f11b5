// test_safetensors.c: files written and read back, a file of the published library, hostile headers, every truncation,
// flipped bits, data beyond 4 GiB.
#include "llmc/rng.h"         // rng_mix
#include "llmc/safetensors.h" // what is tested
#include <limits.h>           // PATH_MAX

static int passed_, failed_;
LLMC_PRINTF(2, 3) static void check(bool ok, const char *format, ...) {
    ok ? passed_++ : failed_++;
    printf("%s ", ok ? "ok  " : "FAIL");
    va_list arguments;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    putchar('\n');
}

static char directory_[] = "/tmp/test_safetensors_XXXXXX";
static const char *temporary(const char *name) {
    static char path[4][PATH_MAX];
    static int next;
    next = (next + 1) % 4;
    snprintf(path[next], PATH_MAX, "%s/%s", directory_, name);
    return path[next];
}

static void put_file(const char *path, const void *data, size_t bytes) {
    FILE *file = fopen(path, "wb");
    if (file == NULL || fwrite(data, 1, bytes, file) != bytes || fclose(file) != 0) die(CODE_IO, "cannot write %s", path);
}

// A file in memory: length, header, `data_bytes` zero bytes.
static char *make_file(const char *header, size_t header_bytes, size_t data_bytes, size_t *bytes) {
    char *file = base_new(8 + header_bytes + data_bytes, 1);
    const uint64_t length = header_bytes;
    memcpy(file, &length, 8);
    memcpy(file + 8, header, header_bytes);
    *bytes = 8 + header_bytes + data_bytes;
    return file;
}

static unsigned char byte_of(size_t tensor, size_t i) { return (unsigned char)rng_mix(tensor * 1000003 + i); }

static void test_round_trip(void) {
    enum { TYPES = sizeof safetensors_types / sizeof safetensors_types[0], COUNT = TYPES + 5 };
    SafetensorsEntry entries[COUNT];
    char names[COUNT][32];
    for (int i = 0; i < COUNT; i++) {
        snprintf(names[i], sizeof names[i], "tensor.%d", i);
        entries[i] = (SafetensorsEntry){names[i], i < TYPES ? safetensors_types[i].name : "F32", i % 9, {4, 3, 1, 2, 1, 1, 1, 1}, NULL};
        if (i < TYPES && safetensors_types[i].bits % 8 != 0 && entries[i].rank == 0) entries[i].rank = 1; // a scalar of 4 bits fills no byte
    }
    entries[TYPES] = (SafetensorsEntry){"empty", "F32", 2, {0, 7}, NULL};
    entries[TYPES + 1] = (SafetensorsEntry){"one odd byte", "U8", 1, {1}, NULL};                 // what follows is not aligned
    entries[TYPES + 2] = (SafetensorsEntry){"big \xc3\xa9\"\\\n", "F32", 2, {3000, 1111}, NULL}; // over one chunk of the writer
    entries[TYPES + 3] = (SafetensorsEntry){"exactly one chunk", "U8", 1, {FILES_CHUNK_BYTES}, NULL};
    entries[TYPES + 4] = (SafetensorsEntry){"empty at the end", "BF16", 1, {0}, NULL};
    for (size_t i = 0; i < COUNT; i++) {
        int64_t elements, bytes = 0;
        if (!safetensors_size(safetensors_type(entries[i].dtype), entries[i].rank, entries[i].shape, &elements, &bytes)) die(1, "size of %zu", i);
        unsigned char *data = base_new((size_t)bytes, 1);
        for (size_t j = 0; j < (size_t)bytes; j++) data[j] = byte_of(i, j);
        entries[i].data = data;
    }
    Error error = {0};
    char hash[FILES_HASH_CHARS], again[FILES_HASH_CHARS] = "";
    int64_t bytes = 0, disk_bytes = 0;
    json_t *metadata = json_pack("{s:s}", "format", "pt");
    const char *path = temporary("round.safetensors");
    check(safetensors_write_file(path, entries, COUNT, metadata, &bytes, hash, &error), "write %d tensors of all dtypes, ranks 0 to 8: %s", COUNT,
          error.text);
    json_decref(metadata);
    int fd = -1;
    if (file_open(path, &fd, &disk_bytes, &error)) file_hash(fd, disk_bytes, path, NULL, NULL, again, &error);
    close(fd);
    check(disk_bytes == bytes && strcmp(hash, again) == 0, "hash while writing is that of the file: %s, %lld bytes", hash, (long long)bytes);
    size_t whole_bytes;
    char *whole = file_read_whole(path, 1 << 30, &whole_bytes, &error), once[FILES_HASH_CHARS] = "";
    if (whole != NULL) files_hash_text(XXH3_128bits(whole, whole_bytes), once);
    check(strcmp(hash, once) == 0, "and that of XXH3-128 in one call");
    free(whole);

    SafetensorsFile file;
    bool opened = safetensors_open(path, &file, &error);
    check(opened && file.index.count == COUNT, "open: %zu tensors %s", file.index.count, error.text);
    size_t wrong = 0, missing = 0;
    bool aligned = true;
    for (size_t i = 0; opened && i < COUNT; i++) {
        const SafetensorsTensor *t = safetensors_find(&file.index, entries[i].name);
        if (t == NULL || strcmp(t->type->name, entries[i].dtype) != 0 || t->rank != entries[i].rank ||
            memcmp(t->shape, entries[i].shape, (size_t)t->rank * 8) != 0) {
            missing++;
            continue;
        }
        if (i == 0) aligned = t->offset % 8 == 0;
        unsigned char *data = base_new((size_t)t->bytes, 1);
        if (!safetensors_read(&file, t, 0, t->bytes, data, &error)) missing++;
        for (size_t j = 0; j < (size_t)t->bytes; j++) wrong += data[j] != byte_of(i, j);
        if (t->bytes > 3) { // a slice
            unsigned char two[2];
            if (!safetensors_read(&file, t, t->bytes - 2, 2, two, &error) || two[1] != byte_of(i, (size_t)t->bytes - 1)) wrong++;
            Error outside = {0};
            if (safetensors_read(&file, t, t->bytes - 1, 2, two, &outside) || safetensors_read(&file, t, -1, 2, two, &outside)) missing++;
        }
        free(data);
    }
    check(missing == 0 && wrong == 0, "read back: %zu tensors lost, %zu bytes wrong (bound 0)", missing, wrong);
    check(aligned, "data starts at a multiple of 8");
    check(opened && safetensors_find(&file.index, "tensor") == NULL && safetensors_find(&file.index, "__metadata__") == NULL,
          "unknown names are not found");
    check(opened && strcmp(json_string_value(json_object_get(file.index.metadata, "format")), "pt") == 0, "metadata");
    if (opened) safetensors_close(&file);
    for (int i = 0; i < COUNT; i++) free((void *)entries[i].data);
}

// Written by dev/reference/safetensors_file.py with the published library.
static void test_published(void) {
    Error error = {0};
    SafetensorsFile file;
    if (!safetensors_open("dev/fixtures/safetensors/published.safetensors", &file, &error)) {
        check(false, "published library's file: %s (run from the root of the repository)", error.text);
        return;
    }
    static const struct {
        const char *name, *dtype;
        int rank;
        int64_t elements;
    } wanted[] = {
        {"f32", "F32", 2, 12},  {"f64", "F64", 1, 3},    {"bf16", "BF16", 1, 5},
        {"f16", "F16", 1, 4},   {"i64", "I64", 1, 4},    {"i32", "I32", 3, 6},
        {"i16", "I16", 1, 3},   {"i8", "I8", 1, 3},      {"u8", "U8", 1, 7},
        {"u16", "U16", 1, 3},   {"u32", "U32", 1, 3},    {"u64", "U64", 1, 3},
        {"bool", "BOOL", 1, 3}, {"f8", "F8_E4M3", 1, 3}, {"f8b", "F8_E5M2", 1, 3},
        {"empty", "F32", 2, 0}, {"scalar", "F32", 0, 1}, {"spa\xc3\x9f \"quoted\"", "F32", 1, 2},
    };
    size_t good = 0, count = sizeof wanted / sizeof wanted[0];
    for (size_t i = 0; i < count; i++) {
        const SafetensorsTensor *t = safetensors_find(&file.index, wanted[i].name);
        good += t != NULL && strcmp(t->type->name, wanted[i].dtype) == 0 && t->rank == wanted[i].rank && t->elements == wanted[i].elements;
    }
    check(good == count && file.index.count == count, "published library's file: %zu of %zu tensors as written", good, count);
    float f32[12], scalar = 0;
    int64_t i64[4];
    uint16_t bf16[5];
    bool read = safetensors_read(&file, safetensors_find(&file.index, "f32"), 0, 48, f32, &error) &&
                safetensors_read(&file, safetensors_find(&file.index, "i64"), 0, 32, i64, &error) &&
                safetensors_read(&file, safetensors_find(&file.index, "bf16"), 0, 10, bf16, &error) &&
                safetensors_read(&file, safetensors_find(&file.index, "scalar"), 0, 4, &scalar, &error);
    int wrong = 0;
    for (int i = 0; read && i < 12; i++) wrong += !(f32[i] == (float)i * 0.5f - 1);
    for (int i = 0; read && i < 4; i++) wrong += i64[i] != i - 2;
    const uint16_t bf16_wanted[5] = {0xc000, 0xbf80, 0, 0x3f80, 0x4000};
    check(read && wrong == 0 && scalar == 7.5f && memcmp(bf16, bf16_wanted, 10) == 0, "its values: %d wrong (bound 0)", wrong);
    safetensors_close(&file);
}

// Headers that are refused, and what the message must name. `data` bytes follow.
static void test_headers(void) {
    static const struct {
        const char *header;
        size_t data;
        const char *message; // NULL: accepted
    } cases[] = {
        {"{}", 0, NULL},
        {"{}   ", 0, NULL},
        {"{\"__metadata__\":{\"a\":\"b\"}}", 0, NULL},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}", 3, NULL},
        {"{\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]},\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 3, NULL},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[1,5]},\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 5, NULL},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[0,9223372036854775807],\"data_offsets\":[0,0]}}", 0, NULL},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1, NULL},
        {"", 0, "start with '{'"},
        {" {}", 0, "start with '{'"},
        {"[]", 0, "start with '{'"},
        {"{", 0, "header at byte"},
        {"{}x", 0, "header at byte"},
        {"{}", 1, "behind the last tensor"},
        {"{\"a\":1}", 0, "tensor 'a'"},
        {"{\"a\":[]}", 0, "tensor 'a'"},
        {"{\"a\":{}}", 0, "tensor 'a'"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3]}}", 3, "data_offsets"},
        {"{\"a\":{\"dtype\":8,\"shape\":[3],\"data_offsets\":[0,3]}}", 3, "dtype"},
        {"{\"a\":{\"dtype\":\"U9\",\"shape\":[3],\"data_offsets\":[0,3]}}", 3, "unknown dtype 'U9'"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3,3]}}", 3, "data_offsets"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,4]}}", 4, "another size"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]}}", 2, "truncated"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[3,0]}}", 3, "data_offsets"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[-3,0]}}", 3, "data_offsets"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0.0,3]}}", 3, "data_offsets"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-3],\"data_offsets\":[0,3]}}", 3, "shape[0]"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[3.0],\"data_offsets\":[0,3]}}", 3, "shape[0]"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[\"3\"],\"data_offsets\":[0,3]}}", 3, "shape[0]"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[99999999999999999999],\"data_offsets\":[0,3]}}", 3, "header at byte"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0, "another size"}, // product 2^64
        {"{\"a\":{\"dtype\":\"F64\",\"shape\":[2305843009213693952],\"data_offsets\":[0,0]}}", 0, "another size"},  // bytes 2^64
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[3],\"data_offsets\":[0,1]}}", 1, "another size"},                     // 12 bits
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1, "longer lists"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[[3]],\"data_offsets\":[0,3]}}", 3, "nests deeper"},
        {"{\"a\":{\"b\":{\"c\":{}}}}", 0, "nests deeper"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}", 3,
         "overlap"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2,
         "overlap"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}", 3,
         "a hole"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", 2, "a hole"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", 2,
         "duplicate"},
        {"{\"a\":{\"dtype\":\"U8\",\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "duplicate"},
        {"{\"__metadata__\":[]}", 0, "__metadata__"},
        {"{\"__metadata__\":{\"a\":1}}", 0, "__metadata__.a"},
        {"{\"\xff\":{}}", 0, "header at byte"},
        {"{\"a\\u0000b\":{}}", 0, "header at byte"},
    };
    int wrong = 0, count = (int)(sizeof cases / sizeof cases[0]);
    for (int i = 0; i < count; i++) {
        size_t bytes;
        char *file = make_file(cases[i].header, strlen(cases[i].header), cases[i].data, &bytes);
        SafetensorsIndex index;
        Error error = {0};
        bool good = safetensors_parse("F", file, bytes, (int64_t)bytes, &index, &error);
        bool right = cases[i].message == NULL ? good : !good && error.code == CODE_INPUT && strstr(error.text, cases[i].message) != NULL;
        if (!right)
            printf("     header %s: %s, wanted %s\n", cases[i].header, good ? "accepted" : error.text,
                   cases[i].message ? cases[i].message : "acceptance");
        wrong += !right;
        if (good) safetensors_index_free(&index);
        free(file);
    }
    check(wrong == 0, "%d headers, legal and hostile: %d wrong", count, wrong);

    // Deep nesting, and a list as long as a header may be: refused before the JSON parser takes memory for it.
    const size_t many = 1 << 20;
    char *deep = base_new(many, 1);
    memset(deep, '[', many);
    memcpy(deep, "{\"a\":", 5);
    size_t bytes;
    char *file = make_file(deep, many, 0, &bytes);
    SafetensorsIndex index;
    Error nested = {0}, too_long = {0}, beyond = {0};
    bool good = safetensors_parse("F", file, bytes, (int64_t)bytes, &index, &nested);
    free(file);
    const uint64_t limit = SAFETENSORS_MAX_HEADER_BYTES + 1;
    memcpy(deep, &limit, 8);
    good = good || safetensors_parse("F", deep, many, INT64_MAX, &index, &too_long);
    const uint64_t huge = UINT64_MAX;
    memcpy(deep, &huge, 8);
    good = good || safetensors_parse("F", deep, many, INT64_MAX, &index, &beyond);
    free(deep);
    check(!good && strstr(nested.text, "nests deeper") && strstr(too_long.text, "header length") && strstr(beyond.text, "header length"),
          "a million brackets, a header over 100 MB, a length of 2^64-1: refused");
}

static void test_damage(void) {
    const float data[6] = {1, 2, 3, 4, 5, 6};
    const SafetensorsEntry entries[] = {
        {"a", "F32", 2, {2, 2}, data}, {"b", "BF16", 1, {3}, data}, {"e", "U8", 1, {0}, data}, {"c", "U8", 1, {5}, data}};
    Error error = {0};
    const char *path = temporary("small.safetensors"), *cut = temporary("cut.safetensors");
    size_t bytes = 0, kept_bytes = 0;
    check(safetensors_write_simple(path, entries, 4, &error) && access(temporary("small.safetensors.tmp"), F_OK) != 0,
          "write_simple leaves only the file");
    char *file = file_read_whole(path, 1 << 20, &bytes, &error);
    if (file == NULL) die_error(&error);
    int opened = 0;
    for (size_t length = 0; length < bytes; length++) {
        put_file(cut, file, length);
        SafetensorsFile read;
        Error reason = {0};
        if (safetensors_open(cut, &read, &reason)) {
            opened++;
            safetensors_close(&read);
        } else if (reason.code != CODE_INPUT || strstr(reason.text, cut) == NULL) {
            opened++;
        }
    }
    check(opened == 0, "all %zu truncations of a small file are refused by name: %d were not", bytes, opened);
    // A flipped bit either makes the header illegal or leaves a legal one: it must never lead outside the file.
    int outside = 0, accepted = 0;
    for (size_t i = 0; i < bytes * 8; i++) {
        file[i / 8] ^= (char)(1 << i % 8);
        SafetensorsIndex index;
        Error reason = {0};
        if (safetensors_parse("F", file, bytes, (int64_t)bytes, &index, &reason)) {
            accepted++;
            for (size_t t = 0; t < index.count; t++) {
                outside +=
                    index.tensors[t].offset < 8 || index.tensors[t].bytes < 0 || index.tensors[t].offset + index.tensors[t].bytes > (int64_t)bytes;
            }
            safetensors_index_free(&index);
        }
        file[i / 8] ^= (char)(1 << i % 8);
    }
    check(outside == 0 && accepted > 0, "%zu flipped bits: %d give another legal file, %d tensors outside the file (bound 0)", bytes * 8, accepted,
          outside);

    Error blocked = {0};
    bool replaced = mkdir(temporary("small.safetensors.tmp"), 0700) != 0 || safetensors_write_simple(path, entries, 2, &blocked);
    char *kept = file_read_whole(path, 1 << 20, &kept_bytes, &error);
    check(!replaced && blocked.code == CODE_IO && kept != NULL && kept_bytes == bytes && memcmp(kept, file, bytes) == 0,
          "a write that fails leaves the file that was there");
    free(kept);
    free(file);
    (void)rmdir(temporary("small.safetensors.tmp"));

    Error refused[4] = {{0}};
    const SafetensorsEntry twice[] = {{"a", "U8", 1, {1}, data}, {"a", "U8", 1, {1}, data}}, reserved[] = {{"__metadata__", "U8", 1, {1}, data}};
    const SafetensorsEntry foreign[] = {{"a", "F33", 1, {1}, data}}, latin[] = {{"\xe9", "U8", 1, {1}, data}};
    const char *bad = temporary("bad.safetensors");
    bool any = safetensors_write_simple(bad, twice, 2, &refused[0]) || safetensors_write_simple(bad, reserved, 1, &refused[1]) ||
               safetensors_write_simple(bad, foreign, 1, &refused[2]) || safetensors_write_simple(bad, latin, 1, &refused[3]);
    check(!any && access(bad, F_OK) != 0, "a name twice, __metadata__, a foreign dtype, a name that is not UTF-8: not written");
    SafetensorsWriter writer;
    Error more = {0}, less = {0}, none = {0};
    bool begun = safetensors_write_begin(&writer, bad, entries, 1, NULL, &none);
    any = safetensors_write(&writer, data, 17, &more);
    any = any || safetensors_write_end(&writer, NULL, NULL, &less);
    check(begun && !any && more.code == CODE_IO && less.code == CODE_IO, "more or less data than announced: refused");
    Error where = {0};
    any = safetensors_write_simple(temporary("no/such/file"), entries, 1, &where);
    check(!any && where.code == CODE_IO && strstr(where.text, "No such file") && strstr(where.text, "no/such/file"), "no directory: %s",
          where.text);
    SafetensorsFile read;
    Error directory = {0}, absent = {0}, fifo = {0};
    any = safetensors_open(directory_, &read, &directory) || safetensors_open(temporary("absent"), &read, &absent);
    any = any || mkfifo(temporary("fifo"), 0600) != 0 || safetensors_open(temporary("fifo"), &read, &fifo);
    check(!any && strstr(directory.text, "regular") && strstr(absent.text, "No such file") && strstr(fifo.text, "regular"),
          "a directory, nothing, a pipe: refused, and no hang");
}

// A tensor of 5 GB in a sparse file, and one behind it.
static void test_big(void) {
    const SafetensorsEntry entries[] = {{"big", "F32", 2, {1250000, 1000}, NULL}, {"after", "F32", 1, {2}, NULL}};
    Error error = {0};
    size_t header_bytes = 0;
    int64_t data_bytes = 0;
    char *header = safetensors_header("big", entries, 2, NULL, &header_bytes, &data_bytes, &error);
    const char *path = temporary("big.safetensors");
    int fd = open(path, O_RDWR | O_CREAT, 0600);
    const float last = 3.25f, after[2] = {-1.5f, 8.0f}, low = 77.0f;
    const int64_t end = (int64_t)header_bytes + 5000000000;
    bool made = header != NULL && fd >= 0 && pwrite(fd, header, header_bytes, 0) == (ssize_t)header_bytes && pwrite(fd, &last, 4, end - 4) == 4 &&
                pwrite(fd, after, 8, end) == 8 && pwrite(fd, &low, 4, end - 4 - ((int64_t)1 << 32)) == 4; // where a 32-bit offset would land
    close(fd);
    free(header);
    check(made && data_bytes == 5000000008, "sparse file of %lld bytes of data", (long long)data_bytes);
    SafetensorsFile file;
    if (!safetensors_open(path, &file, &error)) {
        check(false, "open: %s", error.text);
        return;
    }
    float got = 0, got_after[2] = {0}, got_low = 0;
    const SafetensorsTensor *big = safetensors_find(&file.index, "big");
    bool read = safetensors_read(&file, big, 4999999996, 4, &got, &error) &&
                safetensors_read(&file, big, 4999999996 - ((int64_t)1 << 32), 4, &got_low, &error) &&
                safetensors_read(&file, safetensors_find(&file.index, "after"), 0, 8, got_after, &error);
    check(read && got == last && got_low == low && got_after[0] == after[0] && got_after[1] == after[1],
          "its last bytes and what follows are exact: %g %g %g", got, got_after[0], got_after[1]);
    safetensors_close(&file);
}

int main(void) {
    if (mkdtemp(directory_) == NULL) die(CODE_IO, "cannot create %s", directory_);
    test_round_trip();
    test_published();
    test_headers();
    test_damage();
    test_big();
    Error error = {0};
    if (!directory_remove(directory_, &error)) check(false, "%s", error.text);
    printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ != 0;
}
