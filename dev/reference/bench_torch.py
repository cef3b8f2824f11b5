#!/usr/bin/env python3
"""Tokens per second of PyTorch (eager, transformers' GPT2LMHeadModel) on this machine's CPU, for comparison with the trainer.

    pip install torch transformers
    python3 dev/reference/bench_torch.py [--threads 2] [--steps 5] [--case WORD]

A step is forward, backward, clipping and AdamW (fused where PyTorch has it for the CPU), on random tokens; bf16 means autocast with
fp32 parameters. Prints the median of --steps steps after two that do not count. Nothing is downloaded.
"""
import argparse
import platform
import statistics
import time

import torch
import transformers

# name, layers, channels, heads, vocabulary, B, T
CASES = [
    ("gpt2-124m", 12, 768, 12, 50257, 4, 64),
    ("gpt2-124m", 12, 768, 12, 50257, 4, 256),
    ("6x384-words", 6, 384, 6, 50257, 8, 256),
    ("6x384-bytes", 6, 384, 6, 256, 8, 256),
]


def measure(case, precision, steps):
    _, layers, channels, heads, vocab, B, T = case
    torch.manual_seed(1)
    config = transformers.GPT2Config(n_layer=layers, n_embd=channels, n_head=heads, vocab_size=vocab, n_positions=T, resid_pdrop=0.0,
                                     embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0)
    config._attn_implementation = "sdpa"
    model = transformers.GPT2LMHeadModel(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, vocab, (B, T + 1))
    times = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            logits = model(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:]), min(times[2:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {arguments.threads} threads, {platform.machine()}")
    print(f"{'case':12} {'B':>3} {'T':>5} {'precision':>9} {'median ms':>10} {'tokens/s':>9} {'best':>9}")
    for case in CASES:
        if arguments.case not in case[0]:
            continue
        for precision in ("fp32", "bf16"):
            median, best = measure(case, precision, arguments.steps)
            tokens = case[5] * case[6]
            print(f"{case[0]:12} {case[5]:3} {case[6]:5} {precision:>9} {median * 1e3:10.1f} {tokens / median:9.0f} {tokens / best:9.0f}", flush=True)


if __name__ == "__main__":
    main()
