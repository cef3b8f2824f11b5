"""Nasty texts for tokenizers: pieces of every kind, in random order."""

import random

PIECES = (
    [" ", "  ", "   ", "\n", "\r\n", "\r", "\n\n", "\t", " \n", "\n ", " \t\n \n  ", "\x0b", "\x0c", "\x85", "\xa0", "\u1680", "\u180e", "\u2003", "\u2028", "\u3000", "\u200b", "\ufeff"]
    + ["'s", "'S", "'t", "'T", "'re", "'RE", "'Re", "'ve", "'vE", "'m", "'M", "'ll", "'LL", "'lL", "'d", "'D", "'", "''", "'x", "'\u017f", "\u2019s", "'l", "'r", "'L", "'\u212a"]
    + ["0", "1", "12", "123", "1234", "12345678901", "3.14", "\u0663\u0664", "\u2167", "\u00bd", "\u00b2", "\U0001d7d8", "\u4e09", "\u3007", "\U00010d40"]
    + ["a", "I", "the", "The", "hello", "tokens", "AdamW", "zero", "and", "x" * 40, "supercalifragilistic", "e\u0301", "\u00e9", "na\u00efve", "\u00df", "\u0130", "\u01c5", "\u02b0", "\u00aa", "\u1c89", "\ua7cb"]
    + ["\u0300", "\u0301\u0327", "\u0327\u0301", "\u0323\u0307", "\u0345\u0301", "s\u0323\u0307", "s\u0307\u0323", "\u1e9b\u0323", "q\u0307\u0323", "\u0344", "\u0958", "\ufb2c", "\U0001d15e", "\u212b", "\u2126", "A\u030a", "\u0b47\u0b56", "\u0c3c", "\U00011935"]
    + ["\u65e5\u672c\u8a9e", "\u4e2d\u6587", "\uf900", "\ud55c\uae00", "\u1112\u1161\u11ab", "\u1100\u1161", "\uac00\u11a8", "\uac01\u11a8", "\u11a8", "\u1161", "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0e44\u0e17\u0e22", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629", "\u05e9\u05dc\u05d5\u05dd", "\u0430\u0431\u0432"]
    + ["\U0001f600", "\U0001f469\u200d\U0001f4bb", "\U0001f1e9\U0001f1ea", "\u2764\ufe0f", "\U0001f44d\U0001f3fd", "\u20ac", "\u2014", "\u2026", "\ufffd", "\ue000", "\U0010ffff", "\ufdd0", "\x00", "\x01", "\x7f"]
    + [".", ",", "!", "!!!", "...", "--", "==", "()", "{\n", "};\n", "//", "#", "$", "%d", "\\n", "\"", "<", ">", "<|", "|>", "_", "a_b", "http://x.y/?z=1"]
    + ["<|endoftext|>", "<|endoftext", "<|end_of_text|>", "<tool>", "<toolbox>", "</tool>", "<|im_start|>", "caf\u00e9>", "cafe\u0301>"]
)  # fmt: skip


def any_character(r):
    limit = r.choice((0x80, 0x250, 0x800, 0x3100, 0x10000, 0x110000))
    while True:
        code = r.randrange(limit)
        if not 0xD800 <= code < 0xE000:
            return chr(code)


def text(r):
    """A random text of up to about 60 pieces; r: random.Random."""
    out = []
    for _ in range(r.choice((1, 2, 3, 5, 8, 13, 60))):
        kind = r.random()
        if kind < 0.75:
            out.append(r.choice(PIECES))
        elif kind < 0.9:
            out.append(any_character(r))
        elif kind < 0.93:
            out.append(r.choice(PIECES) * r.randrange(2, 40))
        else:
            out.append("".join(r.choice("etaoin shrdlu'ABC \n19") for _ in range(r.randrange(20))))
    return "".join(out)


def fixed():
    """Every piece beside several others, and runs."""
    r = random.Random(3)
    texts = ["", " ", "\n", "a"]
    for between in ("", " ", "'", "1", "a", "\n"):
        pieces = list(PIECES)
        r.shuffle(pieces)
        texts += [between.join(pieces[i : i + 20]) for i in range(0, len(pieces), 20)]
    runs = (" " * 60 + "x", "\n" * 30, "a" * 70, "ab" * 40, "1" * 40, "!" * 30, "\u0301" * 20, "a" + "\u0327\u0301" * 10, "\u65e5" * 20, " \n" * 9 + " x")
    return [*texts, *runs]


def random_texts(seed, count):
    r = random.Random(seed)
    return [text(r) for _ in range(count)]
