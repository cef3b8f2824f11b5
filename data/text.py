#!/usr/bin/env python3
"""Text files or .jsonl -> BPE token files for train_gpt. Bytes, and a BPE that is there, need no Python: ./tokenize.

  data/text.py --out NAME FILE...                  trains a BPE on the text, saves it as NAME.tokenizer.json
  data/text.py --out NAME --tokenizer T.json ...   uses an existing one (the format of Hugging Face's tokenizers)
  data/text.py --out NAME --tokenizer gpt2 ...     GPT-2's BPE by tiktoken, which fetches its vocabulary once

A file is a document; --lines: a line; --split-on-blank: blank lines separate; .jsonl: a line is an object with --field.
Writes NAME.bin and NAME.json, or with --val-fraction X NAME_train and NAME_val (every 1/X-th document is held out).
Needs numpy and tokenizers (or tiktoken).
"""

import argparse
import json
import os
import sys

EOT = "<|endoftext|>"
LONGEST_NAME = 256  # bytes, that train_gpt reads


def stop(message, code=3):
    print(f"text.py: {message}", file=sys.stderr)
    sys.exit(code)


def read_json_lines(path, field):
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[field]
            except (ValueError, KeyError, TypeError) as error:
                stop(f"{path}: line {number}: wanted an object with a text '{field}': {error!r}")
            if not isinstance(text, str):
                stop(f"{path}: line {number}: {field}: wanted a text")
            yield text


def read_text(path, split):
    """Documents of a text file; newlines as they are in the file."""
    with open(path, encoding="utf-8", newline="") as file:
        if split == "file":
            yield file.read()
        elif split == "lines":
            for line in file:
                yield line.removesuffix("\n")
        else:
            lines = []
            for line in file:
                if line.strip("\r\n"):
                    lines.append(line)
                else:
                    yield "".join(lines)
                    lines = []
            yield "".join(lines)


def documents(options):
    """All documents that are not empty, in order."""
    for path in options.inputs:
        try:
            texts = read_json_lines(path, options.field) if path.endswith(".jsonl") else read_text(path, options.split)
            yield from (text for text in texts if text)
        except OSError as error:
            stop(f"{path}: cannot read: {error.strerror}")
        except UnicodeDecodeError as error:
            stop(f"{path}: not UTF-8: {error} (./tokenize takes any bytes)")


def train_bpe(options):
    """A byte-level BPE of --vocab entries, trained on the documents themselves."""
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=options.vocab,
        special_tokens=[EOT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(documents(options), trainer)
    path = options.out + ".tokenizer.json"
    bpe.save(path)
    print(f"{path}: {bpe.get_vocab_size()} entries, trained on the text")
    return bpe


def open_tokenizer(options):
    """(encode, vocabulary size, eot id, name)"""
    if options.tokenizer == "gpt2":
        try:
            import tiktoken

            gpt2 = tiktoken.get_encoding("gpt2")
        except ImportError:
            stop("--tokenizer gpt2: the package tiktoken is missing: pip install tiktoken, or leave the flag out to train a BPE")
        except Exception as error:  # tiktoken passes on what its HTTP library raises
            stop(f"--tokenizer gpt2: cannot fetch the vocabulary ({error}): leave the flag out to train a BPE on the text")
        return gpt2.encode_ordinary, gpt2.n_vocab, gpt2.eot_token, "gpt2"
    try:
        import tokenizers
    except ImportError:
        stop("the package tokenizers is missing: pip install tokenizers")
    if options.tokenizer is None:
        bpe = train_bpe(options)
    else:
        try:
            bpe = tokenizers.Tokenizer.from_file(options.tokenizer)
        except Exception as error:  # the library raises plain Exception for missing and damaged files alike
            stop(f"--tokenizer {options.tokenizer}: {error}")
    eot = bpe.token_to_id(options.eot)
    if eot is None:
        stop(f"--eot {options.eot}: not in the tokenizer's vocabulary", 2)
    # Text that spells a special token is text: it must not end documents.
    bpe.encode_special_tokens = True
    vocab = bpe.get_vocab_size(with_added_tokens=True)
    return lambda text: bpe.encode(text, add_special_tokens=False).ids, vocab, eot, name_of(options.tokenizer or options.out + ".tokenizer.json", options.out)


def name_of(path, out):
    """How the .json names a tokenizer: by its path from the token file's directory when it lies there or below, else by its absolute path."""
    path, folder = os.path.realpath(path), os.path.realpath(os.path.dirname(out) or ".")
    name = os.path.relpath(path, folder) if path.startswith(folder + os.sep) else path
    return name if len(name.encode()) < LONGEST_NAME else "bpe"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="+", metavar="FILE")
    parser.add_argument("--out", required=True, metavar="NAME", help="files to write, without .bin")
    parser.add_argument("--tokenizer", metavar="T", help="a tokenizer.json, or gpt2; default: train one")
    parser.add_argument("--vocab", type=int, default=8192, metavar="N", help="entries of a trained BPE (default %(default)s)")
    parser.add_argument("--eot", default=EOT, help="token that ends a document (default %(default)s)")
    split = parser.add_mutually_exclusive_group()
    split.add_argument("--lines", dest="split", action="store_const", const="lines", default="file", help="a line is a document")
    split.add_argument("--split-on-blank", dest="split", action="store_const", const="blank", help="blank lines separate documents")
    parser.add_argument("--field", default="text", help="text of a .jsonl object (default %(default)s)")
    parser.add_argument("--val-fraction", type=float, default=0.0, metavar="X", help="share of documents held out")
    parser.add_argument("--shard-tokens", type=int, default=2**31 - 1, metavar="N", help="most tokens of a file")
    options = parser.parse_args()
    if not 0 <= options.val_fraction < 1:
        parser.error("--val-fraction: wanted 0 to 1")
    if options.vocab < 257 and options.tokenizer is None:
        parser.error("--vocab: wanted at least 257 (the bytes and the end of text)")
    if not 0 < options.shard_tokens < 2**31:
        parser.error("--shard-tokens: wanted 1 to 2147483647")
    if next(documents(options), None) is None:
        stop("no text in the input")
    try:
        from tokenfile import TokenWriter, held_out
    except ImportError as error:
        stop(f"the package numpy is missing ({error}): pip install numpy")
    try:
        os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
        encode, vocab, eot, name = open_tokenizer(options)
        arguments = {"vocab": vocab, "eot": eot, "tokenizer": name, "shard_tokens": options.shard_tokens}
        if options.val_fraction == 0:
            with TokenWriter(options.out, **arguments) as writer:
                for text in documents(options):
                    writer.add(encode(text))
            return
        with TokenWriter(options.out + "_train", **arguments) as train, TokenWriter(options.out + "_val", **arguments) as val:
            for number, text in enumerate(documents(options)):
                (val if held_out(number, options.val_fraction) else train).add(encode(text))
            if val.all_documents == 0 or train.all_documents == 0:
                stop(f"--val-fraction {options.val_fraction:g} leaves one side empty: too few documents (--lines or --split-on-blank?)")
    except OSError as error:
        stop(f"cannot write {options.out}: {error.strerror}", 5)


if __name__ == "__main__":
    main()
