"""Writes token files for train_gpt: llm.c's .bin forms and the .json beside them. Needs numpy.

A file is 256 int32 (magic, version, number of tokens, zeros) and then the ids, little-endian: uint16 when the vocabulary
allows, else uint32. Files are written under a temporary name and renamed when complete.
"""

import json
import os

import numpy

HEADER_INTS = 256
LARGEST_SHARD = 2**31 - 1  # the header counts tokens in an int32


class TokenWriter:
    """Appends documents to NAME.bin, or to NAME_000000.bin and following when one file of `shard_tokens` is not enough.

    Every document is closed with `eot`. Use as a context manager: leaving it with an exception keeps no partial file.
    """

    def __init__(self, name, vocab, eot, tokenizer, shard_tokens=LARGEST_SHARD):
        if not 0 <= eot < vocab:
            raise ValueError(f"eot id: got {eot}, wanted less than the vocabulary of {vocab}")
        if not 0 < shard_tokens <= LARGEST_SHARD:
            raise ValueError(f"tokens of a shard: got {shard_tokens}, wanted 1 to {LARGEST_SHARD}")
        self.name, self.vocab, self.eot, self.tokenizer, self.shard_tokens = name, vocab, eot, tokenizer, shard_tokens
        self.dtype, self.magic, self.version = ("<u2", 20240520, 1) if vocab <= 65536 else ("<u4", 20240801, 7)
        self.file, self.shard = None, 0
        self.tokens = self.documents = 0  # of the current shard
        self.all_tokens = self.all_documents = 0

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        if kind is None and (self.file is not None or self.shard == 0):
            self._open()
            self._finish(more=False)
        elif self.file is not None:
            self.file.close()
            os.remove(self.name + ".bin.tmp")

    def _open(self):
        if self.file is None:
            self.file = open(self.name + ".bin.tmp", "wb")
            self.file.write(bytes(4 * HEADER_INTS))
            self.tokens = self.documents = 0

    def _finish(self, more):
        """Completes the shard; `more`: another follows, so that this one gets a number."""
        header = numpy.zeros(HEADER_INTS, dtype="<i4")
        header[:3] = self.magic, self.version, self.tokens
        self.file.seek(0)
        self.file.write(header.tobytes())
        self.file.close()
        self.file = None
        final = f"{self.name}_{self.shard:06d}" if more or self.shard else self.name
        facts = {"tokenizer": self.tokenizer, "vocab_size": self.vocab, "eot_id": self.eot, "documents": self.documents}
        with open(self.name + ".json.tmp", "w", encoding="utf-8") as file:
            json.dump(facts, file)
            file.write("\n")
        os.replace(self.name + ".json.tmp", final + ".json")
        os.replace(self.name + ".bin.tmp", final + ".bin")
        print(f"{final}.bin: {self.tokens} tokens, {self.documents} documents")
        self.shard += 1

    def add(self, ids):
        """Appends one document; an empty one leaves nothing."""
        if len(ids) == 0:
            return
        ids = numpy.append(numpy.asarray(ids, dtype=numpy.int64), self.eot)
        if ids.min() < 0 or ids.max() >= self.vocab:
            raise ValueError(f"got ids {ids.min()} to {ids.max()}, wanted 0 to {self.vocab - 1}")
        while len(ids) > 0:
            if self.file is not None and self.tokens == self.shard_tokens:
                self._finish(more=True)
            self._open()
            part, ids = ids[: self.shard_tokens - self.tokens], ids[self.shard_tokens - self.tokens :]
            self.file.write(part.astype(self.dtype).tobytes())
            self.tokens += len(part)
            self.all_tokens += len(part)
        self.documents += 1
        self.all_documents += 1


def held_out(document, fraction):
    """Whether document number `document` goes to validation: evenly spread, the same on every run."""
    return int((document + 1) * fraction) > int(document * fraction)
