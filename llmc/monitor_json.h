// monitor_json.h: JSON text, written piece by piece. Jansson's own writer cannot print %.9g without adding ".0", so the records of monitor.h are
// written here. Knows no record.
#ifndef LLMC_MONITOR_JSON_H
#define LLMC_MONITOR_JSON_H

#include "llmc/base.h" // base_grow, min_i64

typedef struct {
    char *text; // ends with a NUL
    size_t length, room;
} MonitorJson;

static inline void monitor_json_bytes(MonitorJson *json, const char *bytes, size_t count) {
    if (json->room - json->length < count + 1) {
        json->room = 2 * (json->length + count + 1) + 1024;
        json->text = base_grow(json->text, json->room, 1);
    }
    memcpy(json->text + json->length, bytes, count);
    json->length += count;
    json->text[json->length] = '\0';
}

static inline void monitor_json_free(MonitorJson *json) {
    free(json->text);
    *json = (MonitorJson){0};
}

// Punctuation and numbers, as they are (short).
LLMC_PRINTF(2, 3) static inline void monitor_json_raw(MonitorJson *json, const char *format, ...) {
    char buffer[128];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    monitor_json_bytes(json, buffer, (size_t)min_i64(length, sizeof buffer - 1));
}

// Length of the UTF-8 sequence at `at`, 0 when it is not one (RFC 3629: no overlong forms, no surrogates, at most U+10FFFF).
static inline size_t monitor_utf8_(const unsigned char *at, size_t left) {
    if (at[0] < 0x80) return 1;
    const size_t need = at[0] >= 0xc2 && at[0] <= 0xdf ? 2 : (at[0] & 0xf0) == 0xe0 ? 3 : at[0] >= 0xf0 && at[0] <= 0xf4 ? 4 : 0;
    if (need == 0 || need > left) return 0;
    for (size_t i = 1; i < need; i++) {
        if ((at[i] & 0xc0) != 0x80) return 0;
    }
    const unsigned char low = at[0] == 0xe0 ? 0xa0 : at[0] == 0xf0 ? 0x90 : 0x80, high = at[0] == 0xed ? 0x9f : at[0] == 0xf4 ? 0x8f : 0xbf;
    return at[1] >= low && at[1] <= high ? need : 0;
}

// A quoted string; every byte that is not UTF-8 becomes U+FFFD.
static inline void monitor_json_text(MonitorJson *json, const char *text, size_t length) {
    monitor_json_bytes(json, "\"", 1);
    for (size_t i = 0; i < length;) {
        const unsigned char *at = (const unsigned char *)text + i;
        const size_t span = monitor_utf8_(at, length - i);
        if (span == 0) {
            monitor_json_bytes(json, "\xef\xbf\xbd", 3);
        } else if (*at == '"' || *at == '\\') {
            monitor_json_raw(json, "\\%c", *at);
        } else if (*at < 32 || *at == 127) {
            monitor_json_raw(json, "\\u%04x", *at);
        } else {
            monitor_json_bytes(json, (const char *)at, span);
        }
        i += span ? span : 1;
    }
    monitor_json_bytes(json, "\"", 1);
}

static inline void monitor_json_real(MonitorJson *json, double value) {
    if (isfinite(value)) {
        monitor_json_raw(json, "%.9g", value);
    } else {
        monitor_json_raw(json, "null");
    }
}

// Between the members of an object or array.
static inline void monitor_json_next(MonitorJson *json) {
    const char last = json->length > 0 ? json->text[json->length - 1] : '{';
    if (last != '{' && last != '[') monitor_json_bytes(json, ",", 1);
}

static inline void monitor_json_key(MonitorJson *json, const char *key) {
    monitor_json_next(json);
    monitor_json_text(json, key, strlen(key));
    monitor_json_bytes(json, ":", 1);
}

static inline void monitor_put_int(MonitorJson *json, const char *key, int64_t value) {
    monitor_json_key(json, key);
    monitor_json_raw(json, "%lld", (long long)value);
}
static inline void monitor_put_real(MonitorJson *json, const char *key, double value) {
    monitor_json_key(json, key);
    monitor_json_real(json, value);
}
// NULL is null.
static inline void monitor_put_text(MonitorJson *json, const char *key, const char *value) {
    monitor_json_key(json, key);
    if (value == NULL) {
        monitor_json_raw(json, "null");
    } else {
        monitor_json_text(json, value, strlen(value));
    }
}
static inline void monitor_put_bool(MonitorJson *json, const char *key, bool value) {
    monitor_json_key(json, key);
    monitor_json_raw(json, value ? "true" : "false");
}

#endif
