#!/usr/bin/env python3
"""Records what PyTorch and Hugging Face transformers compute for small random models: dev/fixtures/NAME.safetensors.

    pip install torch transformers safetensors numpy
    python3 dev/reference/make_fixtures.py            # writes every fixture (about 10 seconds)
    python3 dev/reference/make_fixtures.py --check    # compares with the files that are there, writes nothing

Nothing is downloaded: models are built from a configuration and filled from a seed. Everything is computed in float64,
from parameters that are exact in float32; README.md beside this file lists what a fixture holds.
"""
import argparse
import copy
import json
import struct
import sys
import types
from pathlib import Path

import numpy as np
import safetensors.numpy
import torch
import transformers

STEPS = 10
BATCHES = 3  # of a fixture; step s uses batch s % BATCHES
OPTIMIZER = {"lr": 2e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}

# A fixture: the layout (spelled like the command line's flags), sizes, and the norm above which gradients are clipped (0 = never;
# most of these values clip some of the ten steps).
# norm_eps is above the published values where it would otherwise be invisible next to the variance.
GPT2 = {"family": "gpt2", "norm": "layernorm", "position": "learned", "activation": "gelu", "bias": "on", "tied": "on", "qk_norm": "off",
        "rope_theta": 10000.0}
LLAMA = {"family": "llama", "norm": "rmsnorm", "position": "rope", "activation": "swiglu", "bias": "off", "tied": "off", "qk_norm": "off"}
FIXTURES = {
    "gpt2": {**GPT2, "seed": 11, "layers": 2, "channels": 48, "heads": 3, "kv_heads": 3, "head_size": 16, "ffn": 96, "vocab": 97,
             "max_seq": 20, "batch": 3, "seq": 16, "norm_eps": 1e-5, "clip": 4.0},
    "gpt2_odd": {**GPT2, "seed": 12, "layers": 7, "channels": 40, "heads": 5, "kv_heads": 5, "head_size": 8, "ffn": 33, "vocab": 131,
                 "max_seq": 7, "batch": 3, "seq": 7, "norm_eps": 1e-3, "clip": 1.0},
    "llama": {**LLAMA, "seed": 13, "layers": 2, "channels": 48, "heads": 3, "kv_heads": 1, "head_size": 16, "ffn": 64, "vocab": 101,
              "max_seq": 16, "batch": 3, "seq": 16, "norm_eps": 1e-3, "rope_theta": 500.0, "clip": 2.5},
    "qwen3": {**LLAMA, "family": "qwen3", "tied": "on", "qk_norm": "on", "seed": 14, "layers": 2, "channels": 40, "heads": 4, "kv_heads": 2,
              "head_size": 16, "ffn": 56, "vocab": 97, "max_seq": 16, "batch": 3, "seq": 16, "norm_eps": 1e-3, "rope_theta": 10000.0,
              "clip": 5.0},
    "qwen2": {**LLAMA, "family": "qwen2", "bias": "qkv", "seed": 15, "layers": 2, "channels": 32, "heads": 2, "kv_heads": 1, "head_size": 16,
              "ffn": 48, "vocab": 113, "max_seq": 16, "batch": 3, "seq": 16, "norm_eps": 1e-4, "rope_theta": 100.0, "clip": 0.0},
    "gpt2_packed": {**GPT2, "seed": 16, "layers": 2, "channels": 32, "heads": 2, "kv_heads": 2, "head_size": 16, "ffn": 64, "vocab": 97,
                    "max_seq": 16, "batch": 3, "seq": 16, "norm_eps": 1e-5, "clip": 1.0, "packed": True},
    "llama_packed": {**LLAMA, "seed": 17, "layers": 2, "channels": 32, "heads": 4, "kv_heads": 2, "head_size": 16, "ffn": 48, "vocab": 101,
                     "max_seq": 16, "batch": 3, "seq": 16, "norm_eps": 1e-3, "rope_theta": 500.0, "clip": 1.7, "packed": True},
}
# Documents of the packed fixtures, one list per batch; the third has documents that cross the rows of 16 tokens.
DOCUMENTS = [[5, 11, 16, 1, 9, 6], [16, 16, 2, 1, 1, 12], [7, 14, 3, 13, 11]]


# ----------------------------------------------------------------------------
# Models


def build_model(spec):
    common = dict(vocab_size=spec["vocab"], bos_token_id=0, eos_token_id=0, tie_word_embeddings=spec["tied"] == "on", use_cache=False)
    if spec["family"] == "gpt2":
        config = transformers.GPT2Config(
            n_layer=spec["layers"], n_embd=spec["channels"], n_head=spec["heads"], n_inner=spec["ffn"], n_positions=spec["max_seq"],
            layer_norm_epsilon=spec["norm_eps"], activation_function="gelu_new", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **common)
        kind = transformers.GPT2LMHeadModel
    else:
        shared = dict(
            num_hidden_layers=spec["layers"], hidden_size=spec["channels"], num_attention_heads=spec["heads"],
            num_key_value_heads=spec["kv_heads"], head_dim=spec["head_size"], intermediate_size=spec["ffn"],
            max_position_embeddings=spec["max_seq"], rms_norm_eps=spec["norm_eps"], pad_token_id=None,
            rope_parameters={"rope_type": "default", "rope_theta": spec["rope_theta"]}, **common)
        config, kind = {
            "llama": lambda: (transformers.LlamaConfig(**shared), transformers.LlamaForCausalLM),
            "qwen2": lambda: (transformers.Qwen2Config(**shared), transformers.Qwen2ForCausalLM),
            "qwen3": lambda: (transformers.Qwen3Config(**shared), transformers.Qwen3ForCausalLM),
        }[spec["family"]]()
    config._attn_implementation = "sdpa"
    return kind(config).eval()


def fill(model, random):
    """Numbers large enough that every path matters: gains around 1, biases and positions far from 0."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 0.25 if "wte" in name or "embed_tokens" in name else 0.12
            values = random.normal(0.0, std, parameter.shape)
        elif "bias" in name:
            values = random.normal(0.0, 0.1, parameter.shape)
        else:
            values = 1.0 + random.normal(0.0, 0.2, parameter.shape)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))


def rms_norm_float64(self, x):
    return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def to_float64(model, spec):
    """A float64 copy. The library's RMSNorm and rotary tables go through float32 whatever the model's type is; the same
    formulas replace them here. make_fixture() checks the copy against the untouched float32 model."""
    model = copy.deepcopy(model).double()

    def rotary_float64(self, x, position_ids):
        half = torch.arange(0, spec["head_size"], 2, dtype=torch.float64) / spec["head_size"]
        angles = position_ids[..., None].double() * spec["rope_theta"] ** -half
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    for module in model.modules():
        kind = type(module).__name__
        if kind.endswith("RMSNorm"):
            module.forward = types.MethodType(rms_norm_float64, module)
        elif kind.endswith("RotaryEmbedding"):
            module.forward = types.MethodType(rotary_float64, module)
    return model


def our_tensors(spec, named):
    """Hugging Face names and layouts -> the tensor table's. `named` maps names to arrays (parameters or gradients)."""
    result = {}
    for name, value in named.items():
        parts = name.split(".")
        if spec["family"] == "gpt2":
            short = {"transformer.wte.weight": "wte.weight", "transformer.wpe.weight": "wpe.weight",
                     "transformer.ln_f.weight": "norm.weight", "transformer.ln_f.bias": "norm.bias"}.get(name)
            if short is None:
                layer, module, leaf = parts[2], ".".join(parts[3:-1]), parts[-1]
                if leaf == "weight" and value.ndim == 2:
                    value = value.T  # Conv1D keeps [in, out]
                if module == "attn.c_attn":
                    for part, piece in zip("qkv", np.split(value, 3, axis=0)):
                        result[f"h.{layer}.attn.{part}.{leaf}"] = piece
                    continue
                ours = {"ln_1": "norm1", "attn.c_proj": "attn.o", "ln_2": "norm2", "mlp.c_fc": "mlp.fc", "mlp.c_proj": "mlp.proj"}[module]
                short = f"h.{layer}.{ours}.{leaf}"
        else:
            short = {"model.embed_tokens.weight": "wte.weight", "model.norm.weight": "norm.weight", "lm_head.weight": "head.weight"}.get(name)
            if short is None:
                layer, module, leaf = parts[2], ".".join(parts[3:-1]), parts[-1]
                ours = {"input_layernorm": "norm1", "post_attention_layernorm": "norm2"}.get(module)
                if ours is None:
                    ours = module.replace("self_attn.", "attn.").replace("_proj", "")
                short = f"h.{layer}.{ours}.{leaf}"
        result[short] = value
    return {name: np.ascontiguousarray(value) for name, value in result.items()}


# ----------------------------------------------------------------------------
# Data, forward, training


def make_data(spec, random):
    """tokens and targets (BATCHES, B, T): targets are the next tokens, about one in eight masked with -1; lengths: lists."""
    shape = (BATCHES, spec["batch"], spec["seq"])
    stream = random.integers(0, spec["vocab"], (BATCHES, spec["batch"] * spec["seq"] + 1))
    tokens = stream[:, :-1].reshape(shape)
    targets = np.where(random.random(shape) < 0.125, -1, stream[:, 1:].reshape(shape))
    lengths = DOCUMENTS if spec.get("packed") else [[spec["seq"]] * spec["batch"]] * BATCHES
    assert all(sum(row) == spec["batch"] * spec["seq"] for row in lengths)
    return tokens, targets, lengths


def logits_of(model, tokens, lengths):
    """(N, V). Every document goes through the model alone: attention stays inside and positions start at 0 by construction."""
    pieces = torch.split(torch.from_numpy(tokens.reshape(-1)), lengths)
    if len(set(lengths)) == 1:
        return model(input_ids=torch.stack(pieces)).logits.flatten(0, 1)
    return torch.cat([model(input_ids=piece[None]).logits[0] for piece in pieces])


def loss_of(logits, targets):
    targets = torch.from_numpy(np.where(targets < 0, -100, targets).reshape(-1))
    return torch.nn.functional.cross_entropy(logits, targets, ignore_index=-100, reduction="mean")


def train(model, spec, tokens, targets, lengths):
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER["lr"], betas=(OPTIMIZER["beta1"], OPTIMIZER["beta2"]), eps=OPTIMIZER["eps"])
    losses, norms = [], []
    for step in range(STEPS):
        batch = step % BATCHES
        optimizer.zero_grad()
        loss = loss_of(logits_of(model, tokens[batch], lengths[batch]), targets[batch])
        loss.backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters()))
        coefficient = min(1.0, spec["clip"] / (norm.item() + 1e-6)) if spec["clip"] > 0 else 1.0
        for p in model.parameters():
            p.grad *= coefficient
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return np.array(losses), np.array(norms)


def make_fixture(name, spec):
    """Returns (metadata, tensors, error): what goes into the file, and how far the library's float32 logits are from it."""
    random = np.random.default_rng(spec["seed"])
    original = build_model(spec)
    fill(original, random)
    tokens, targets, lengths = make_data(spec, random)
    model = to_float64(original, spec)

    tensors = {}
    named = {n: p.detach().numpy() for n, p in original.named_parameters()}
    tensors.update({f"param/{n}": v for n, v in our_tensors(spec, named).items()})

    logits = logits_of(model, tokens[0], lengths[0])
    with torch.no_grad():
        untouched = logits_of(original, tokens[0], lengths[0])
    error = ((untouched - logits).norm() / logits.norm()).item()
    assert error < 2e-6, f"{name}: the float64 copy is another model than the library's float32 one: {error}"
    loss = loss_of(logits, targets[0])
    loss.backward()
    named = {n: p.grad.numpy() for n, p in model.named_parameters()}
    tensors.update({f"grad/{n}": v.astype(np.float32) for n, v in our_tensors(spec, named).items()})
    tensors["logits"] = logits.detach().numpy().astype(np.float32)

    losses, norms = train(model, spec, tokens, targets, lengths)
    assert abs(losses[0] - loss.item()) < 1e-14
    tensors["losses"], tensors["grad_norms"] = losses, norms
    with torch.no_grad():
        tensors["logits_after"] = logits_of(model, tokens[0], lengths[0]).numpy().astype(np.float32)

    tensors["tokens"], tensors["targets"] = tokens.astype(np.int32), targets.astype(np.int32)
    widest = max(len(row) for row in lengths) + 1
    bounds = [np.cumsum([0] + row) for row in lengths]
    tensors["cu_seqlens"] = np.stack([np.pad(b, (0, widest - len(b)), mode="edge") for b in bounds]).astype(np.int32)
    positions = [np.concatenate([np.arange(length) for length in row]) for row in lengths]
    tensors["positions"] = np.stack(positions).reshape(tokens.shape).astype(np.int32)

    metadata = {key: str(value) for key, value in spec.items() if key != "packed"}
    metadata.update({key: repr(value) for key, value in OPTIMIZER.items()})
    metadata.update({"name": name, "steps": str(STEPS), "batches": str(BATCHES)})
    metadata["made_with"] = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    return metadata, tensors, error


# ----------------------------------------------------------------------------
# Files


def safetensors_bytes(metadata, tensors):
    """Written here because the library orders the metadata differently from run to run. 8-byte types come first, so that
    every tensor is aligned."""
    kinds = {"float64": "F64", "float32": "F32", "int32": "I32"}
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header, at = {"__metadata__": dict(sorted(metadata.items()))}, 0
    for name in order:
        value = tensors[name]
        header[name] = {"dtype": kinds[value.dtype.name], "shape": list(value.shape), "data_offsets": [at, at + value.nbytes]}
        at += value.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(np.ascontiguousarray(tensors[name]).tobytes() for name in order)


def differs(path, tensors):
    """Worst relative difference from the file that is there; another machine rounds differently in the last bits."""
    there = safetensors.numpy.load_file(path)
    if set(there) != set(tensors):
        return float("inf")
    worst = 0.0
    for name, value in tensors.items():
        scale = max(np.abs(value).max(), 1e-3)
        worst = max(worst, float(np.abs(value.astype(np.float64) - there[name]).max() / scale))
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent.parent / "fixtures")
    parser.add_argument("--check", action="store_true", help="compare with the files in --out; write nothing")
    arguments = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    total, good = 0, True
    for name, spec in FIXTURES.items():
        metadata, tensors, error = make_fixture(name, spec)
        path = arguments.out / f"{name}.safetensors"
        content = safetensors_bytes(metadata, tensors)
        total += len(content)
        text = f"{name:12} {len(content) / 1e3:6.1f} KB, float32 logits differ by {error:.1e}"
        if arguments.check:
            worst = differs(path, tensors)
            good = good and worst < 1e-6
            print(f"{text}; from the file by {worst:.1e}")
        else:
            arguments.out.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            assert differs(path, tensors) == 0  # the safetensors library reads back what was meant
            losses, norms = tensors["losses"], tensors["grad_norms"]
            print(f"{text}; loss {losses[0]:.6f} -> {losses[-1]:.6f}, norms {norms.min():.3f} to {norms.max():.3f}")
    print(f"{total / 1e6:.2f} MB in total")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
