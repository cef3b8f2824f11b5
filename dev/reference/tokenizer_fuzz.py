#!/usr/bin/env python3
"""Compares ids and decoded text of llmc/tokenizer.h with the tokenizers library's on random texts (make build/tokenizer_ids first).

  dev/reference/tokenizer_fuzz.py [--count N] [--seed S] TOKENIZER.json...    default: new ones of 6000 tokens, in the forms of the fixtures
"""

import argparse
import os
import random
import struct
import subprocess
import sys
import tempfile

import tokenizer_fixtures
import tokenizer_texts
import tokenizers

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def ours(path, texts, special):
    """(ids, decoded bytes) of each text, from build/tokenizer_ids."""
    sent = b"".join(struct.pack("<I", len(t)) + t for t in texts)
    words = [os.path.join(ROOT, "build/tokenizer_ids"), path] + ["special"] * special
    got = subprocess.run(words, input=sent, stdout=subprocess.PIPE, check=True).stdout
    at = 0
    for _ in texts:
        (count,) = struct.unpack_from("<I", got, at)
        ids = list(struct.unpack_from(f"<{count}i", got, at + 4))
        at += 4 + 4 * count
        (size,) = struct.unpack_from("<I", got, at)
        yield ids, got[at + 4 : at + 4 + size]
        at += 4 + size


def compare(path, texts):
    """The number of texts that differ."""
    bpe = tokenizers.Tokenizer.from_file(path)
    wrong = 0
    for special in (False, True):
        bpe.encode_special_tokens = not special
        wanted = [e.ids for e in bpe.encode_batch(texts, add_special_tokens=False)]
        for text, ids, (got, decoded) in zip(texts, wanted, ours(path, [t.encode() for t in texts], special)):
            if got != ids or decoded.decode(errors="replace") != bpe.decode(ids, skip_special_tokens=False):
                wrong += 1
                if wrong <= 5:
                    print(f"{path}: special {special}: {text!a}\n  got    {got}\n  wanted {ids}\n  decoded {decoded!r}")
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100000, help="texts (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("tokenizers", nargs="*")
    options = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    paths = options.tokenizers or tokenizer_fixtures.create(folder.name, 6000, tokenizer_texts.random_texts(options.seed + 1, 4000))
    wrong = 0
    for path in paths:
        texts = tokenizer_texts.fixed() + tokenizer_texts.random_texts(options.seed, options.count)
        bad = compare(path, texts)
        r = random.Random(options.seed)
        blobs = [bytes(r.choice((r.randrange(256), 0x41, 0xE2, 0x80)) for _ in range(r.randrange(40))) for _ in range(options.count // 10)]
        for blob, (_, decoded) in zip(blobs, ours(path, blobs, False)):
            if "prefix" not in path and '"NFC"' not in open(path, encoding="utf-8").read() and blob != decoded:
                bad += 1
                print(f"{path}: {blob!r} came back as {decoded!r}")
        print(f"{path}: {2 * len(texts)} encodings of {sum(map(len, texts))} characters, {len(blobs)} blobs of bytes: {bad} differ")
        wrong += bad
    return wrong != 0


if __name__ == "__main__":
    sys.exit(main())
