"""Exchange with the published safetensors library (needs torch and safetensors).

  safetensors_file.py write FILE   writes the fixture that dev/test/test_safetensors.c reads
  safetensors_file.py check FILE   opens a file of ours, prints name, dtype, shape and sum of every tensor
"""
import sys

import torch
from safetensors import safe_open
from safetensors.torch import save_file


def tensors():
    count = lambda n, dtype: torch.arange(n).to(dtype)
    return {
        "f32": torch.arange(12, dtype=torch.float32).reshape(3, 4) * 0.5 - 1,
        "f64": torch.arange(3, dtype=torch.float64) * 0.25,
        "bf16": count(5, torch.bfloat16) - 2,
        "f16": count(4, torch.float16),
        "i64": count(4, torch.int64) - 2,
        "i32": count(6, torch.int32).reshape(1, 2, 3),
        "i16": count(3, torch.int16),
        "i8": count(3, torch.int8) - 1,
        "u8": count(7, torch.uint8),
        "u16": count(3, torch.uint16),
        "u32": count(3, torch.uint32),
        "u64": count(3, torch.uint64),
        "bool": torch.tensor([True, False, True]),
        "f8": count(3, torch.float8_e4m3fn),
        "f8b": count(3, torch.float8_e5m2),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(7.5),
        'spaß "quoted"': torch.tensor([1.0, 2.0]),
    }


if __name__ == "__main__":
    what, path = sys.argv[1:]
    if what == "write":
        save_file(tensors(), path, metadata={"format": "pt", "note": "written by the published library"})
    else:
        with safe_open(path, framework="pt") as file:
            print("metadata", file.metadata())
            for name in file.keys():
                tensor = file.get_tensor(name)
                print(name, tensor.dtype, list(tensor.shape), tensor.double().sum().item())
