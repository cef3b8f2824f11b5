// packing.h: token windows and documents -> micro-batches on a flat token axis with cu_seqlens.
//   none    rows of T; one "document" per row, every target valid
//   varlen  the same windows; attention and positions restart where a document ends, and the target that lies in the next
//           document is masked, so that nothing of one document influences another
//   fit     whole documents packed into rows of at most T; rows are simply shorter where nothing fits: padding is never computed
// A document ends with its eot id (which belongs to it), or where a Megatron .idx says. Knows nothing of ranks or threads.
#ifndef LLMC_PACKING_H
#define LLMC_PACKING_H

#include "llmc/base.h"    // Error, fail, base_alloc
#include "llmc/options.h" // PACK_*
#include "llmc/sampler.h" // Sampler, Windows
#include "llmc/tokens.h"  // TokenSet, tokens_read

// ----------------------------------------------------------------------------
// Micro-batch, in host memory. All arrays are sized for B*T tokens at creation.

typedef struct {
    int64_t rows;         // sequences, at most B
    int64_t tokens;       // N: tokens computed, at most B*T
    int64_t documents;    // attention runs inside each of these
    int64_t max_length;   // of a document
    int64_t valid;        // targets >= 0
    int32_t *ids;         // (N)
    int32_t *targets;     // (N) next token; -1 masked
    int32_t *positions;   // (N) inside the document
    int32_t *token_index; // (N) index in the step's global batch: sequence g, token t of it -> g*T + t
    int32_t *cu_seqlens;  // (documents + 1)
} MicroBatch;

// Host bytes of a micro-batch of `capacity` = B*T tokens.
static inline int64_t microbatch_bytes(int64_t capacity) { return (5 * capacity + 1) * (int64_t)sizeof(int32_t); }

static inline void microbatch_create(MicroBatch *batch, int64_t capacity) {
    int32_t *memory = base_alloc((size_t)microbatch_bytes(capacity));
    memset(batch, 0, sizeof *batch);
    batch->ids = memory;
    batch->targets = memory + capacity;
    batch->positions = memory + 2 * capacity;
    batch->token_index = memory + 3 * capacity;
    batch->cu_seqlens = memory + 4 * capacity;
}

static inline void microbatch_free(MicroBatch *batch) {
    free(batch->ids);
    *batch = (MicroBatch){0};
}

static inline void microbatch_clear(MicroBatch *batch) {
    batch->rows = batch->tokens = batch->documents = batch->max_length = batch->valid = 0;
    batch->cu_seqlens[0] = 0;
}

// Ends the current document behind the tokens that are there.
static inline void microbatch_end_document_(MicroBatch *batch) {
    const int64_t length = batch->tokens - batch->cu_seqlens[batch->documents];
    if (length == 0) return;
    batch->max_length = max_i64(batch->max_length, length);
    batch->cu_seqlens[++batch->documents] = (int32_t)batch->tokens;
}

// ----------------------------------------------------------------------------
// Windows: none and varlen

// First entry of a file's document index that is greater than `token`; the index holds at least one entry.
static inline int64_t packing_document_after_(const TokenFile *file, int64_t token) {
    int64_t low = 0, high = file->document_count + 1;
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (file->documents[middle] > token) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

// Appends the window at `position` of the set as sequence `sequence` of the global batch. scratch (T + 1).
// eot is used by varlen in files without a document index.
static inline bool packing_add_window(MicroBatch *batch, const TokenSet *set, int64_t position, int64_t T, int64_t sequence, int pack, int64_t eot,
                                      int32_t *scratch, Error *error) {
    if (!tokens_read(set, position, T + 1, scratch, error)) return false;
    const TokenFile *file = tokens_file_at(set, position);
    const int64_t from = position - file->start;
    const bool indexed = file->documents != NULL;
    int64_t next = pack == PACK_VARLEN && indexed ? packing_document_after_(file, from) : 0;
    int32_t place = 0;
    for (int64_t t = 0; t < T; t++) {
        const int64_t n = batch->tokens++;
        bool last = false; // of its document
        if (pack == PACK_VARLEN && !indexed) last = scratch[t] == eot;
        if (pack == PACK_VARLEN && indexed) {
            while (next < file->document_count && file->documents[next] < from + t + 1) next++; // empty documents share a start
            last = file->documents[next] == from + t + 1;
        }
        batch->ids[n] = scratch[t];
        batch->targets[n] = last ? -1 : scratch[t + 1];
        batch->positions[n] = place++;
        batch->token_index[n] = (int32_t)(sequence * T + t);
        batch->valid += !last;
        if (last) {
            microbatch_end_document_(batch);
            place = 0;
        }
    }
    microbatch_end_document_(batch);
    batch->rows++;
    return true;
}

// ----------------------------------------------------------------------------
// Documents: fit. A document of n tokens has n-1 trained positions (the last token is only a target). It is cut into
// pieces of at most T positions; the target of a piece's last position is the first input of the next piece. Documents
// of fewer than two tokens (an eot that follows an eot) have nothing to train and no piece.

typedef struct {
    int64_t count;
    int64_t positions; // trained, of all pieces
    int64_t *begin;    // (count) first token, in the set
    int32_t *length;   // (count) trained positions, 1..T
    int64_t capacity_;
} Pieces;

enum { PIECE_BYTES = sizeof(int64_t) + sizeof(int32_t) };

static inline void pieces_free(Pieces *pieces) {
    free(pieces->begin);
    free(pieces->length);
    *pieces = (Pieces){0};
}

static inline void pieces_add_document_(Pieces *pieces, int64_t begin, int64_t end, int64_t T) {
    for (; end - begin > 1; begin += T) {
        if (pieces->count == pieces->capacity_) {
            pieces->capacity_ += pieces->capacity_ / 2 + 1024;
            pieces->begin = base_grow(pieces->begin, (size_t)pieces->capacity_, sizeof pieces->begin[0]);
            pieces->length = base_grow(pieces->length, (size_t)pieces->capacity_, sizeof pieces->length[0]);
        }
        const int64_t length = min_i64(T, end - begin - 1);
        pieces->begin[pieces->count] = begin;
        pieces->length[pieces->count++] = (int32_t)length;
        pieces->positions += length;
    }
}

// Lists the pieces of every document of the set, in the order of the files. Files without an index are read once, whole.
static inline bool pieces_create(Pieces *pieces, const TokenSet *set, int64_t T, int64_t eot, const char *flag, Error *error) {
    *pieces = (Pieces){0};
    int32_t ids[TOKENS_CHUNK_];
    for (int64_t f = 0; f < set->count; f++) {
        const TokenFile *file = &set->files[f];
        for (int64_t d = 0; d < file->document_count; d++) {
            pieces_add_document_(pieces, file->start + file->documents[d], file->start + file->documents[d + 1], T);
        }
        if (file->documents != NULL) continue;
        int64_t begin = 0; // of the current document
        for (int64_t at = 0; at < file->tokens; at += TOKENS_CHUNK_) {
            const int64_t count = min_i64(TOKENS_CHUNK_, file->tokens - at);
            if (!tokens_read(set, file->start + at, count, ids, error)) return pieces_free(pieces), false;
            for (int64_t i = 0; i < count; i++) {
                if (ids[i] != eot) continue;
                pieces_add_document_(pieces, file->start + begin, file->start + at + i + 1, T);
                begin = at + i + 1;
            }
        }
        pieces_add_document_(pieces, file->start + begin, file->start + file->tokens, T); // the last may lack its eot
    }
    if (pieces->count == 0) return fail(error, CODE_INPUT, "%s: too short: no document has two tokens (%.300s)", flag, set->files[0].path);
    return true;
}

// Rows are packed by first fit decreasing (Johnson 1973: at most 11/9 of the optimum) over a buffer of consecutive draws of the
// permuted pieces: a pure function of (seed, epoch, buffer number), bounded in memory and in lookahead.
enum { PACK_BUFFER = 1024 };

typedef struct {
    int64_t epoch, buffer;           // which one this is
    int rows;                        // 0: nothing loaded yet
    int row_begin[PACK_BUFFER + 1];  // (rows + 1) into piece
    int32_t row_tokens[PACK_BUFFER]; // (rows)
    int64_t piece[PACK_BUFFER];      // row by row, a row's longest piece first
} FitBuffer;

static inline int64_t fit_buffers(const Pieces *pieces) { return ceil_div(pieces->count, PACK_BUFFER); }

typedef struct {
    int32_t length;
    int draw;
} FitItem_;

static inline int fit_compare_(const void *a, const void *b) { // longest first, ties in the order drawn
    const FitItem_ *x = a, *y = b;
    return x->length != y->length ? (x->length < y->length ? 1 : -1) : (x->draw > y->draw) - (x->draw < y->draw);
}

// Packs buffer `buffer` of an epoch, unless it is the one that is there.
static inline void fit_load(FitBuffer *fit, const Pieces *pieces, const Sampler *sampler, int64_t T, int64_t epoch, int64_t buffer) {
    if (fit->rows > 0 && fit->epoch == epoch && fit->buffer == buffer) return;
    const int64_t first = buffer * PACK_BUFFER;
    const int count = (int)min_i64(PACK_BUFFER, pieces->count - first);
    FitItem_ items[PACK_BUFFER];
    int64_t drawn[PACK_BUFFER];
    for (int i = 0; i < count; i++) {
        drawn[i] = sampler_index(sampler, epoch, first + i);
        items[i] = (FitItem_){pieces->length[drawn[i]], i};
    }
    qsort(items, (size_t)count, sizeof items[0], fit_compare_);

    int bins = 0, bin_of[PACK_BUFFER], opened[PACK_BUFFER]; // of each item; bin that a draw opened, or -1
    int64_t room[PACK_BUFFER];
    for (int i = 0; i < count; i++) opened[i] = -1;
    for (int i = 0; i < count; i++) {
        int bin = 0;
        while (bin < bins && room[bin] < items[i].length) bin++;
        if (bin == bins) {
            room[bins++] = T;
            opened[items[i].draw] = bin;
        }
        room[bin] -= items[i].length;
        bin_of[i] = bin;
    }
    // Rows stand in the order in which their longest piece was drawn, and are shuffled once more: first fit fills the bins of
    // early draws first, so that the order of draws alone would say something about what is in a row.
    int row_of_bin[PACK_BUFFER], fill[PACK_BUFFER + 1] = {0}, rows = 0;
    const Sampler places = sampler_create(rng_mix(sampler->key ^ rng_mix((uint64_t)buffer)), bins, sampler->shuffle);
    for (int draw = 0; draw < count; draw++) {
        if (opened[draw] >= 0) row_of_bin[opened[draw]] = (int)sampler_index(&places, epoch, rows++);
    }
    for (int i = 0; i < count; i++) fill[row_of_bin[bin_of[i]] + 1]++;
    for (int row = 0; row < rows; row++) fill[row + 1] += fill[row];
    memcpy(fit->row_begin, fill, sizeof fill);
    for (int i = 0; i < count; i++) fit->piece[fill[row_of_bin[bin_of[i]]]++] = drawn[items[i].draw];
    for (int bin = 0; bin < bins; bin++) fit->row_tokens[row_of_bin[bin]] = (int32_t)(T - room[bin]);
    fit->rows = rows;
    fit->epoch = epoch;
    fit->buffer = buffer;
}

// Appends row `row` of the buffer as sequence `sequence` of the global batch. scratch (T + 1).
static inline bool packing_add_row(MicroBatch *batch, const TokenSet *set, const Pieces *pieces, const FitBuffer *fit, int64_t row, int64_t T,
                                   int64_t sequence, int32_t *scratch, Error *error) {
    int64_t t = 0; // in the row
    for (int i = fit->row_begin[row]; i < fit->row_begin[row + 1]; i++) {
        const int64_t length = pieces->length[fit->piece[i]];
        if (!tokens_read(set, pieces->begin[fit->piece[i]], length + 1, scratch, error)) return false;
        for (int64_t place = 0; place < length; place++, t++) {
            const int64_t n = batch->tokens++;
            batch->ids[n] = scratch[place];
            batch->targets[n] = scratch[place + 1];
            batch->positions[n] = (int32_t)place;
            batch->token_index[n] = (int32_t)(sequence * T + t);
        }
        batch->valid += length;
        microbatch_end_document_(batch);
    }
    batch->rows++;
    return true;
}

#endif
