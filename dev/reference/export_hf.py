#!/usr/bin/env python3
"""Hugging Face directories: makes the fixtures of dev/fixtures/hf, and checks exports by loading them with transformers.

    pip install torch transformers safetensors numpy
    python3 dev/reference/export_hf.py                        # writes every fixture
    python3 dev/reference/export_hf.py --verify [./train_gpt] # converts the fixtures, and trains and exports models of every kind,
                                                              # with the trainer; transformers must compute the same logits and losses

A fixture is a directory NAME as transformers (or one of its older versions) writes it, with random weights, and NAME.safetensors: tokens (B, T),
targets (B, T; -1 at the end of a row), logits (B*T, V) and the loss that the library computes in float32.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
import transformers
from make_fixtures import safetensors_bytes
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent.parent
OUT = ROOT / "dev" / "fixtures" / "hf"
BATCH, SEQ = 2, 12

LLAMA = dict(vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24,
             max_position_embeddings=64, bos_token_id=1, eos_token_id=2, pad_token_id=None)
GPT2 = dict(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=60, eos_token_id=60)
ROPE = {"rope_type": "default", "rope_theta": 100.0}
# All three kinds of frequency occur: divided, mixed, kept.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 1.5,
          "original_max_position_embeddings": 16}
MODELS = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, layer_norm_epsilon=1e-3)),
    "gpt2_untied": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, "n_inner": 40}, tie_word_embeddings=False)),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**LLAMA, "head_dim": 8}, rms_norm_eps=1e-3, rope_parameters=LLAMA3)),
    "llama_bias": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_parameters=ROPE)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**LLAMA, rms_norm_eps=1e-5, sliding_window=32, rope_parameters={"rope_type": "default", "rope_theta": 1000.0})),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**LLAMA, rms_norm_eps=1e-6, tie_word_embeddings=True, rope_parameters=ROPE)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**{**LLAMA, "head_dim": 6}, rms_norm_eps=1e-3, tie_word_embeddings=False, rope_parameters=ROPE)),
}
DTYPES = {"gpt2": torch.float16, "mistral": torch.bfloat16, "qwen2": torch.bfloat16}


def fill(model, seed, dtype):
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            gain = parameter.dim() == 1 and "bias" not in name
            values = random.normal(1.0 if gain else 0.0, 0.2 if parameter.dim() == 1 else 0.25, parameter.shape)
            parameter.copy_(torch.from_numpy(values.astype(np.float32)).to(dtype))


def results(model, tokens, targets):
    """Logits (B*T, V) and the mean loss, in float32."""
    model = model.eval()
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens.astype(np.int64))).logits.flatten(0, 1)
        wanted = torch.from_numpy(np.where(targets < 0, -100, targets).astype(np.int64).reshape(-1))
        loss = torch.nn.functional.cross_entropy(logits.double(), wanted, ignore_index=-100)
    return logits.numpy(), loss.item()


def as_published(name, directory):
    """The forms in which older versions and other tools have written the same."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.pop("transformers_version", None)
    if name in ("mistral", "qwen2"):  # before rope_parameters
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["rope_scaling"] = None
        config["torch_dtype"] = config.pop("dtype", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    if name == "gpt2":  # as GPT-2 was first published: no prefix, the causal mask stored with the weights
        tensors = {n.removeprefix("transformer."): t for n, t in load_file(directory / "model.safetensors").items()}
        for layer in range(config["n_layer"]):
            tensors[f"h.{layer}.attn.bias"] = torch.tril(torch.ones(4, 4, dtype=torch.uint8)).reshape(1, 1, 4, 4)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if name == "llama_bias":  # a tied head that is stored as well
        tensors = load_file(directory / "model.safetensors")
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def make():
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    for seed, (name, build) in enumerate(MODELS.items()):
        dtype = DTYPES.get(name, torch.float32)
        model = build()
        fill(model, 100 + seed, dtype)
        random = np.random.default_rng(200 + seed)
        stream = random.integers(0, 61, (BATCH, SEQ + 1))
        tokens, targets = stream[:, :-1].astype(np.int32), stream[:, 1:].astype(np.int32)
        targets[:, -1] = -1
        directory = OUT / name
        model.to(dtype).save_pretrained(directory, max_shard_size="6KB" if name == "mistral" else "1GB")
        (directory / "generation_config.json").unlink(missing_ok=True)
        logits, loss = results(load(directory), tokens, targets)  # reloaded: casting a model casts its rotary frequencies too
        as_published(name, directory)
        expected = {"tokens": tokens, "targets": targets, "logits": logits.astype(np.float32), "loss": np.array([loss])}
        made = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
        (OUT / f"{name}.safetensors").write_bytes(safetensors_bytes({"name": name, "made_with": made}, expected))
        size = sum(p.stat().st_size for p in directory.iterdir())
        print(f"{name:12} {sum(p.numel() for p in model.parameters()):6} parameters, {size:6} bytes, loss {loss:.6f}")


# ----------------------------------------------------------------------------
# Exports of ours


def load(directory):
    """In float32; the type that config.json asks for is left in `stored`."""
    model, told = transformers.AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, dtype=torch.float32)
    problems = {k: v for k, v in told.items() if v}
    assert not problems, f"{directory}: {problems}"
    model.stored = transformers.AutoConfig.from_pretrained(directory).dtype
    return model


def compare(what, got, wanted, bound):
    error = float(np.abs(np.asarray(got, dtype=np.float64) - wanted).max())
    good = error <= bound
    print(f"{'ok' if good else 'FAILED':6} {what:58} error {error:.2e}, bound {bound:.0e}")
    return good


def run(trainer, *flags):
    done = subprocess.run([trainer, *map(str, flags)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, flags))}: exit {done.returncode}: {done.stderr}")


def verify_fixtures(trainer, scratch):
    good = True
    for name in MODELS:
        expected = safetensors.numpy.load_file(OUT / f"{name}.safetensors")
        out = scratch / name
        run(trainer, "--steps", 0, "--init-from", OUT / name, "--precision", "fp32", "--export-shard-mb", 0.02, "--export-hf", out)
        model = load(out)
        assert model.config.model_type == {"llama_bias": "llama", "gpt2_untied": "gpt2", "mistral": "llama"}.get(name, name)
        logits, loss = results(model, expected["tokens"], expected["targets"])
        good &= compare(f"{name}: logits of our export, {model.config.model_type}", logits, expected["logits"], 1e-5)
        good &= compare(f"{name}: loss", loss, expected["loss"][0], 1e-6)
        original = transformers.AutoConfig.from_pretrained(OUT / name)
        good &= (model.config.bos_token_id, model.config.eos_token_id) == (original.bos_token_id, original.eos_token_id)
    return good


TRAINED = {
    "gpt2": [],
    "gpt2, untied, dropout": ["--tied", "off", "--dropout", "0.1"],
    "llama": ["--norm", "rmsnorm", "--position", "rope", "--activation", "swiglu", "--bias", "off", "--tied", "off", "--kv-heads", "2"],
    "llama, biases, heads of 6": ["--norm", "rmsnorm", "--position", "rope", "--activation", "swiglu", "--bias", "on", "--head-size", "6"],
    "qwen2": ["--norm", "rmsnorm", "--position", "rope", "--activation", "swiglu", "--bias", "qkv", "--kv-heads", "2", "--norm-eps", "1e-4"],
    "qwen2, heads of 6": ["--norm", "rmsnorm", "--position", "rope", "--activation", "swiglu", "--bias", "qkv", "--head-size", "6"],
    "qwen3": ["--norm", "rmsnorm", "--position", "rope", "--activation", "swiglu", "--bias", "off", "--qk-norm", "on", "--rope-theta", "500"],
}


def verify_trained(trainer, scratch):
    """Trains a little on random tokens; the validation loss is that of transformers on the same windows."""
    good = True
    seq, count, vocab = 16, 20, 67
    tokens = np.random.default_rng(5).integers(0, vocab, seq * count + 1).astype(np.uint16)
    header = np.zeros(256, dtype=np.int32)
    header[:3] = 20240520, 1, len(tokens)
    (scratch / "tokens.bin").write_bytes(header.tobytes() + tokens.tobytes())
    rows = tokens[:-1].reshape(count, seq).astype(np.int64), tokens[1:].reshape(count, seq).astype(np.int64)
    for precision in ("fp32", "bf16"):
        for name, flags in TRAINED.items():
            out = scratch / f"{name}_{precision}".replace(", ", "_").replace(" ", "_")  # a name for Python: some versions warn otherwise
            log = scratch / f"{out.name}_run"
            shape = ["--layers", 2, "--channels", 32, "--heads", 4, "--vocab", vocab, "--seq", seq, "--micro-batch", 4, "--lr", "1e-2"]
            data = ["--train", scratch / "tokens.bin", "--val", scratch / "tokens.bin", "--steps", 10, "--save-every", 0]
            run(trainer, *shape, *data, "--precision", precision, "--export-hf", out, "--out", log, *flags)
            losses = [json.loads(line)["val_loss"] for line in (log / "log.jsonl").read_text().splitlines() if "val_loss" in line]
            model = load(out)
            assert model.stored == (torch.bfloat16 if precision == "bf16" else torch.float32)
            bound = 1e-6 if precision == "fp32" else 2e-3  # the library computes in float32 from bf16 weights, we in bf16
            good &= compare(f"{name}, {precision}: val loss of a trained model", results(model, *rows)[1], losses[-1], bound)
    return good


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verify", nargs="?", const="./train_gpt", metavar="TRAINER", help="check what this trainer exports")
    arguments = parser.parse_args()
    if arguments.verify is None:
        make()
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as scratch:
        fixtures, trained = verify_fixtures(arguments.verify, Path(scratch)), verify_trained(arguments.verify, Path(scratch))
    print("every export is what transformers reads" if fixtures and trained else "FAILED")
    return 0 if fixtures and trained else 1


if __name__ == "__main__":
    sys.exit(main())
