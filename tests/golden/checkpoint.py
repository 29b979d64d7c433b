"""Unpacks the golden checkpoints of tests/data/goldens (see tests/data/make_goldens.py for the format)."""

import json
import lzma
import shutil
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

DATA = Path(__file__).parents[1] / "data" / "goldens"
MODELS = ("md2", "md3")


def read_packed(path: Path) -> dict[str, Tensor]:
    """The bf16 tensors of a ``model.bf16.xz``, under their released names."""
    raw = lzma.decompress(path.read_bytes())
    (header_size,) = struct.unpack_from("<I", raw)
    shapes = json.loads(raw[4 : 4 + header_size])
    planes = torch.frombuffer(bytearray(raw[4 + header_size :]), dtype=torch.uint8).view(2, -1)
    values = torch.stack([planes[1], planes[0]], dim=-1).view(torch.bfloat16).flatten()
    tensors, begin = {}, 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        tensors[name] = values[begin : begin + count].view(shape)
        begin += count
    assert begin == len(values), (begin, len(values))
    return tensors


def unpack(model: str, target: Path) -> Path:
    """Makes ``target`` the checkpoint folder of golden ``model`` ("md2" or "md3"): weights, config, tokenizer."""
    target.mkdir(parents=True, exist_ok=True)
    save_file(read_packed(DATA / model / "model.bf16.xz"), target / "model.safetensors")
    shutil.copyfile(DATA / model / "config.json", target / "config.json")
    shutil.copyfile(DATA / "tokenizer.json", target / "tokenizer.json")
    return target
