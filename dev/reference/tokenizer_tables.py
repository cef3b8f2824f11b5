#!/usr/bin/env python3
"""Writes llmc/tokenizer_unicode_tables.h: which characters the tokenizers library takes for letters, numbers and spaces, and how its NFC
composes. The classes are asked of the library's own regular expressions, one character at a time, since its Unicode is newer than that of
most Pythons; decompositions are Python's, each checked against the library's NFD and NFC.

  dev/reference/tokenizer_tables.py > llmc/tokenizer_unicode_tables.h
"""

import sys
import unicodedata

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

CODES = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
HANGUL = range(0xAC00, 0xAC00 + 11172)


def members(pattern):
    """Codes whose character the library's \\pattern matches."""
    rest = pre_tokenizers.Split(Regex(pattern), "removed").pre_tokenize_str("".join(map(chr, CODES)))
    others = {ord(c) for piece, _ in rest for c in piece}
    return [c for c in CODES if c not in others]


def ranges(items):
    """(first, last, value) of runs of equal values; items: sorted (code, value)."""
    found = []
    for code, value in items:
        if found and found[-1][1] == code - 1 and found[-1][2] == value:
            found[-1][1] = code
        else:
            found.append([code, code, value])
    return found


def show(name, comment, columns, rows):
    print(f"\n// {comment}\nstatic const uint32_t {name}[][{columns}] = {{")
    line = "   "
    for row in rows:
        text = " {" + ",".join(f"0x{v:X}" for v in row) + "},"
        if len(line) + len(text) > 148:
            print(line)
            line = "   "
        line += text
    print(line + "\n};")


def decompositions():
    """(code, first, second or 0, is never composed): one step of each canonical decomposition but Hangul's."""
    nfc, nfd = normalizers.NFC(), normalizers.NFD()
    rows = []
    for code in CODES:
        char = chr(code)
        if code in HANGUL or nfd.normalize_str(char) == char:
            continue
        step = unicodedata.decomposition(char).split()
        if not 1 <= len(step) <= 2 or nfd.normalize_str(char) != unicodedata.normalize("NFD", char):
            sys.exit(f"U+{code:04X}: the library's decomposition is not Python's: another Python?")
        first, second = (int(x, 16) for x in (step + ["0"])[:2])
        rows.append((code, first, second, int(second == 0 or nfc.normalize_str(char) != char)))
    return rows


def combining():
    """(code, combining class) of the marks that the library sorts; its NFC knows fewer than Python's. A class counts when the library sorts by
    it beside marks of the classes 240 and 1."""
    nfd = normalizers.NFD()
    rows = []
    for code in CODES:
        pairs = (chr(code) + "\u0345", "\u0345" + chr(code), chr(code) + "\u0334", "\u0334" + chr(code))
        if unicodedata.combining(chr(code)) and all(nfd.normalize_str(t) == unicodedata.normalize("NFD", t) for t in pairs):
            rows.append((code, unicodedata.combining(chr(code))))
    return rows


def main():
    print("// tokenizer_unicode_tables.h: character classes and canonical decompositions as the tokenizers library has them. Written by")
    print(f"// dev/reference/tokenizer_tables.py (tokenizers {tokenizers.__version__}, decompositions: Unicode {unicodedata.unidata_version}).")
    print("#ifndef LLMC_TOKENIZER_UNICODE_TABLES_H\n#define LLMC_TOKENIZER_UNICODE_TABLES_H\n\n#include <stdint.h> // uint32_t\n\n// clang-format off")
    for name, pattern, words in (
        ("unicode_letters", r"\p{L}+", "letters"),
        ("unicode_numbers", r"\p{N}+", "numbers"),
        ("unicode_spaces", r"\s+", "white space"),
    ):
        show(name, f"{words}: first, last", 2, [(a, b) for a, b, _ in ranges([(c, 0) for c in members(pattern)])])
    show("unicode_combining", "characters that are sorted behind a base: first, last, combining class", 3, ranges(combining()))
    show("unicode_decompositions", "character, the one or two that it decomposes to, 1 when these never compose", 4, decompositions())
    print("// clang-format on\n\n#endif")


if __name__ == "__main__":
    main()
