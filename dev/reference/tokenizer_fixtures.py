#!/usr/bin/env python3
"""Writes dev/fixtures/tokenizer: small byte-level BPE tokenizers in every form that llmc/tokenizer_json.h accepts, texts.json, and for each
tokenizer NAME.ids.json: the ids that the tokenizers library gives for each text, with special tokens as text, and with them found
(null: the same).

Merges are learnt from the texts themselves without cutting these into words, so that a word that ends at the wrong place shows in the ids."""

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


def train(pre_tokenizer, vocab, texts, special=()):
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = level(use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=list(special), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    # a plain text too, for words that take several merges
    readme = open(os.path.join(ROOT, "README.md"), encoding="utf-8").read()
    bpe.train_from_iterator(texts + readme.splitlines(keepends=True), trainer)
    bpe.pre_tokenizer = pre_tokenizer
    return bpe


def gpt2(vocab, texts):
    return train(level(), vocab, texts, ["<|endoftext|>"])


def llama3(vocab, texts):
    """Special tokens behind the vocabulary; words that no merge makes, which ignore_merges finds."""
    data = json.loads(train(split(LLAMA3), vocab, texts).to_str())
    data["model"]["ignore_merges"] = True
    longest = [(a, b) for a, b in map(tuple, data["model"]["merges"]) if len(a + b) > 4]
    data["model"]["merges"] = [list(m) for m in map(tuple, data["model"]["merges"]) if m not in longest[::3]]
    bpe = tokenizers.Tokenizer.from_str(json.dumps(data))
    bpe.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    bpe.post_processor = tokenizers.processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=[("<|begin_of_text|>", vocab)])
    return bpe


def qwen(vocab, texts):
    """NFC; added tokens that are not special, one the beginning of another, one inside a special one, one looked for after NFC."""
    bpe = train(split(QWEN2), vocab, texts)
    bpe.normalizer = normalizers.NFC()
    bpe.add_special_tokens(["<|endoftext|>", "<|im_start|>"])
    bpe.add_tokens([AddedToken(t, normalized=False) for t in ("<tool", "<toolbox>", "im_st", "café>", "e\u0301>")])
    bpe.add_tokens([AddedToken("hello", normalized=True)])
    return bpe


def prefix(vocab, texts):
    """A space in front; merges written as 'a b'."""
    bpe = train(level(prefix=True), vocab, texts)
    bpe.add_special_tokens(["<|endoftext|>"])
    return bpe


def ids(bpe, texts, special):
    bpe.encode_special_tokens = not special
    return [bpe.encode(text, add_special_tokens=False).ids for text in texts]


def write(path, value):
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, ensure_ascii=False, separators=(",", ":"))
        file.write("\n")


def create(folder, vocab, texts):
    """Writes the tokenizers; returns their paths."""
    paths = []
    for make in (gpt2, llama3, qwen, prefix):
        bpe = make(vocab, texts)
        data = json.loads(bpe.to_str())
        if make is prefix:
            data["model"]["merges"] = [" ".join(m) for m in data["model"]["merges"]]
        paths.append(f"{folder}/{make.__name__}.json")
        write(paths[-1], data)
        if make is gpt2:
            os.makedirs(folder + "/pair", exist_ok=True)
            bpe.model.save(folder + "/pair")
    return paths


def main():
    shutil.rmtree(OUT, ignore_errors=True)
    texts = tokenizer_texts.fixed() + [t for t in tokenizer_texts.random_texts(7, 60) if len(t) < 300]
    os.makedirs(OUT)
    write(OUT + "/texts.json", texts)
    for path in create(OUT, 600, texts):
        bpe = tokenizers.Tokenizer.from_file(path)
        plain, special = ids(bpe, texts, False), ids(bpe, texts, True)
        write(path.removesuffix(".json") + ".ids.json", [plain, [b if b != a else None for a, b in zip(plain, special)]])


if __name__ == "__main__":
    main()
