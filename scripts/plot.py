#!/usr/bin/env python3
"""Plots one or several runs of train_gpt: loss, validation loss, gradient norm, learning rate, throughput.

usage: plot.py [--out FILE.png] [--smooth STEPS] [--x step|tokens|hours] [--label NAME]... LOG...
LOG is a log.jsonl or a directory that holds one. Torn lines, nulls and unknown records are passed over.
"""
import argparse
import json
import math
import os
import sys


def number(value):
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def read_log(path):
    """Returns {"steps": {field: array}, "val": (step, loss)}; a step that was written again (a resumed run) counts once, the last time."""
    steps, val, damaged = {}, {}, 0
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                damaged += 1
                continue
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                continue
            if "val_loss" in record:
                val[record["step"]] = number(record["val_loss"])
            elif "loss" in record:
                steps[record["step"]] = record
    if damaged:
        print(f"plot: {path}: {damaged} damaged line{'s' if damaged > 1 else ''} passed over", file=sys.stderr)
    order = sorted(steps)
    fields = {name: np.array([number(steps[s].get(name)) for s in order]) for name in ("loss", "grad_norm", "lr", "tokens", "ms", "tok_per_s", "mfu")}
    fields["step"] = np.array(order, dtype=float)
    fields["hours"] = np.nancumsum(fields["ms"]) / 3.6e6
    fields["total_tokens"] = np.nancumsum(fields["tokens"])
    return {"steps": fields, "val": (np.array(sorted(val), dtype=float), np.array([val[s] for s in sorted(val)]))}


def smooth(values, window):
    """Mean over `window` steps around each (fewer at the ends), over what is finite."""
    if window <= 1 or len(values) == 0:
        return values
    finite = np.isfinite(values)
    sums = np.concatenate(([0.0], np.cumsum(np.where(finite, values, 0.0))))
    counts = np.concatenate(([0], np.cumsum(finite)))
    at = np.arange(len(values))
    begin, end = np.maximum(at - window // 2, 0), np.minimum(at + window // 2 + 1, len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        return (sums[end] - sums[begin]) / (counts[end] - counts[begin])


def loss_limits(curves):
    """Limits that show the whole descent; a few wild values do not decide them."""
    values = np.concatenate([c[np.isfinite(c)] for c in curves] or [np.array([])])
    if len(values) == 0:
        return None
    low, high = values.min(), np.percentile(values, 99.5)
    margin = 0.05 * max(high - low, 1e-3)
    return low - margin, high + margin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("logs", nargs="+", metavar="LOG")
    parser.add_argument("--out", default="curves.png", help="PNG to write [curves.png]")
    parser.add_argument("--smooth", type=int, default=0, help="steps to average over [a fiftieth of the run]")
    parser.add_argument("--x", choices=("step", "tokens", "hours"), default="step", help="horizontal axis [step]")
    parser.add_argument("--label", action="append", default=[], help="name of a run, in the order of the logs [its directory]")
    options = parser.parse_args()
    global plt, np  # after the arguments: --help needs no library
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        import numpy as np
    except ImportError as error:
        sys.exit(f"plot.py: {error}: wanted matplotlib and numpy (Debian: apt-get install python3-matplotlib; then /usr/bin/python3 scripts/plot.py ...)")

    runs = []
    for i, path in enumerate(options.logs):
        path = os.path.join(path, "log.jsonl") if os.path.isdir(path) else path
        try:
            run = read_log(path)
        except OSError as error:
            sys.exit(f"plot: {path}: {error.strerror}")
        if len(run["steps"]["step"]) == 0:
            sys.exit(f"plot: {path}: no step records")
        name = os.path.basename(os.path.dirname(os.path.abspath(path)))
        run["label"] = options.label[i] if i < len(options.label) else name
        runs.append(run)

    figure, axes = plt.subplot_mosaic([["loss", "loss", "loss"], ["grad_norm", "lr", "tok_per_s"]], figsize=(12, 8), dpi=110,
                                      gridspec_kw={"height_ratios": [1.7, 1]}, constrained_layout=True)
    x_names = {"step": "step", "tokens": "tokens", "hours": "hours of training"}
    shown = []
    for i, run in enumerate(runs):
        color = f"C{i % 10}"
        fields, (val_steps, val_loss) = run["steps"], run["val"]
        x = {"step": fields["step"], "tokens": fields["total_tokens"], "hours": fields["hours"]}[options.x]
        window = options.smooth if options.smooth > 0 else max(1, len(x) // 50)
        loss = smooth(fields["loss"], window)
        axes["loss"].plot(x, fields["loss"], color=color, alpha=0.25, linewidth=0.8)
        axes["loss"].plot(x, loss, color=color, linewidth=1.8, label=f"{run['label']}: training ({loss[-1]:.4f})")
        shown.append(fields["loss"])
        if len(val_steps):
            at = np.interp(val_steps, fields["step"], x)
            axes["loss"].plot(at, val_loss, color=color, linestyle="--", marker="o", markersize=4, markerfacecolor="white",
                              label=f"{run['label']}: validation ({val_loss[-1]:.4f})")
            shown.append(val_loss)
        for name in ("grad_norm", "tok_per_s"):
            axes[name].plot(x, fields[name], color=color, alpha=0.25, linewidth=0.8)
            axes[name].plot(x, smooth(fields[name], window), color=color, linewidth=1.5)
        axes["lr"].plot(x, fields["lr"], color=color, linewidth=1.5)
    limits = loss_limits(shown)
    if limits:
        axes["loss"].set_ylim(*limits)
    axes["loss"].set_ylabel("loss (nats per token)")
    axes["loss"].legend(loc="upper right")
    for name, title in (("loss", "loss"), ("grad_norm", "gradient norm"), ("lr", "learning rate"), ("tok_per_s", "tokens per second")):
        axes[name].set_title(title)
        axes[name].set_xlabel(x_names[options.x])
        axes[name].grid(alpha=0.3)
        axes[name].margins(x=0.01)
    for name in ("tok_per_s", "lr"):
        axes[name].set_ylim(0, axes[name].get_ylim()[1] * 1.05)
    norms = np.concatenate([run["steps"]["grad_norm"] for run in runs])
    norms = norms[np.isfinite(norms) & (norms > 0)]
    if len(norms) and norms.max() > 50 * np.median(norms):
        axes["grad_norm"].set_yscale("log")
    try:
        figure.savefig(options.out)
    except OSError as error:
        sys.exit(f"plot: {options.out}: {error.strerror}")
    print(f"plot: {options.out}")


if __name__ == "__main__":
    main()
