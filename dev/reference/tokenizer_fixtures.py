#!/usr/bin/env python3
"""Writes dev/fixtures/tokenizer: small byte-level BPE tokenizers, trained on this repository's README and trainer, in every form that
llmc/tokenizer_json.h accepts, each with texts and the ids that the tokenizers library gives (NAME.cases.json: hexadecimal bytes; ids with
special tokens as text, and ids with them found where these differ)."""

import json
import os
import shutil

import tokenizer_texts
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
OUT = os.path.join(ROOT, "dev/fixtures/tokenizer")
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace("{1,3}", "")


def level(use_regex=True, prefix=False):
    return pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=use_regex)


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level(use_regex=False)])


def train(pre_tokenizer, vocab, special=()):
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizer
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = [open(os.path.join(ROOT, name), encoding="utf-8").read() for name in ("README.md", "train_gpt.c")]
    bpe.train_from_iterator(texts + ["日本語 中文 한글 naïve café 123 456 it's we'll"] * 20, trainer)
    return bpe


def gpt2():
    return train(level(), 420, ["<|endoftext|>"])


def llama3():
    """Special tokens behind the vocabulary; words that no merge makes, which ignore_merges finds."""
    data = json.loads(train(split(LLAMA3), 420).to_str())
    data["model"]["ignore_merges"] = True
    longest = [(a, b) for a, b in map(tuple, data["model"]["merges"]) if len(a + b) > 4]
    data["model"]["merges"] = [list(m) for m in map(tuple, data["model"]["merges"]) if m not in longest[::3]]
    bpe = tokenizers.Tokenizer.from_str(json.dumps(data))
    bpe.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    bpe.post_processor = tokenizers.processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", 420)])
    return bpe


def qwen():
    """NFC; added tokens that are not special, one inside another, one inside a special one, one looked for after NFC."""
    bpe = train(split(QWEN2), 420)
    bpe.normalizer = normalizers.NFC()
    bpe.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    bpe.add_tokens([AddedToken(t, normalized=False) for t in ("<tool>", "<toolbox>", "im_st", "café>", "e\u0301>")])
    bpe.add_tokens([AddedToken("hello", normalized=True)])
    return bpe


def prefix():
    """A space in front; merges written as 'a b'."""
    bpe = train(level(prefix=True), 300)
    bpe.add_special_tokens(["<|endoftext|>"])
    return bpe


def cases(bpe, texts):
    found = []
    for text in texts:
        bpe.encode_special_tokens = True
        plain = bpe.encode(text, add_special_tokens=False).ids
        bpe.encode_special_tokens = False
        special = bpe.encode(text, add_special_tokens=False).ids
        found.append({"text": text.encode().hex(), "ids": plain} | ({"special": special} if special != plain else {}))
    return found


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    os.makedirs(OUT + "/pair")
    texts = [t for t in tokenizer_texts.fixed() if len(t) < 400] + tokenizer_texts.random_texts(7, 60)
    for make in (gpt2, llama3, qwen, prefix):
        bpe = make()
        data = json.loads(bpe.to_str())
        if make is prefix:
            data["model"]["merges"] = [" ".join(m) for m in data["model"]["merges"]]
        with open(f"{OUT}/{make.__name__}.json", "w", encoding="utf-8") as file:
            json.dump(data, file, ensure_ascii=False, separators=(",", ":"))
            file.write("\n")
        with open(f"{OUT}/{make.__name__}.cases.json", "w", encoding="utf-8") as file:
            rows = cases(tokenizers.Tokenizer.from_str(json.dumps(data)), texts)
            file.write("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n")
        if make is gpt2:
            bpe.model.save(OUT + "/pair")


if __name__ == "__main__":
    main()
