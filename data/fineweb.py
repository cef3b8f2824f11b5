#!/usr/bin/env python3
"""FineWeb or FineWeb-Edu -> GPT-2 BPE token files for train_gpt, streamed: neither the text nor the tokens are kept whole.

  data/fineweb.py --out data/out/fineweb                        the 10-billion-token sample of FineWeb
  data/fineweb.py --edu --config sample-100BT --out NAME        the 100-billion-token sample of FineWeb-Edu

Writes NAME_val.bin (the first --val-tokens) and NAME_train_000000.bin and following, 100 million tokens each, every document
closed with the end-of-text id 50256. Needs the network, and the packages numpy, datasets and tiktoken. The data set is
Hugging Face's (HuggingFaceFW/fineweb); what it contains can change there. No recorded checksum guards against that.
"""

import argparse
import itertools
import os
import sys


def stop(message, code=3):
    print(f"fineweb.py: {message}", file=sys.stderr)
    sys.exit(code)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="NAME", help="files to write, without _train.bin")
    parser.add_argument("--edu", action="store_true", help="FineWeb-Edu instead of FineWeb")
    parser.add_argument("--config", default="sample-10BT", help="part of the data set (default %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=0, metavar="N", help="stop after N tokens of training text (default: all)")
    parser.add_argument("--val-tokens", type=int, default=10_000_000, metavar="N", help="tokens held out (default %(default)s)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N", help="tokens of a file (default %(default)s)")
    options = parser.parse_args()
    if not 0 < options.shard_tokens < 2**31 or options.val_tokens < 1 or options.max_tokens < 0:
        parser.error("--shard-tokens: wanted 1 to 2147483647; --val-tokens: at least 1; --max-tokens: at least 0")
    try:
        import datasets
        import tiktoken
        from tokenfile import TokenWriter
    except ImportError as error:
        stop(f"{error}: pip install numpy datasets tiktoken")
    repository = "HuggingFaceFW/fineweb-edu" if options.edu else "HuggingFaceFW/fineweb"
    try:
        bpe = tiktoken.get_encoding("gpt2")
        rows = iter(datasets.load_dataset(repository, name=options.config, split="train", streaming=True))
        rows = itertools.chain([next(rows)], rows)  # the first one shows whether the network is there
    except Exception as error:  # both libraries pass on what their HTTP libraries raise
        stop(f"cannot reach {repository} or GPT-2's vocabulary ({error}): this needs the network; data/kjv.sh does not")
    arguments = {"vocab": bpe.n_vocab, "eot": bpe.eot_token, "tokenizer": "gpt2"}
    try:
        os.makedirs(os.path.dirname(options.out) or ".", exist_ok=True)
        with TokenWriter(options.out + "_val", **arguments) as val:
            for row in rows:
                val.add(bpe.encode_ordinary(row["text"]))
                if val.all_tokens >= options.val_tokens:
                    break
        with TokenWriter(options.out + "_train", shard_tokens=options.shard_tokens, **arguments) as train:
            for row in rows:
                train.add(bpe.encode_ordinary(row["text"]))
                if 0 < options.max_tokens <= train.all_tokens:
                    break
    except OSError as error:
        stop(f"cannot write {options.out}, or the connection broke: {error}", 5)


if __name__ == "__main__":
    main()
