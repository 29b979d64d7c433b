"""kestrel-small's sizes and files; training/README.md says why they are what they are."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from kestrel_engine.preprocess.crops import select_tiling
from kestrel_engine.types.model_config import parse_model_config

FOLDER = Path(__file__).parent / "model"
"""config.json and tokenizer.json, as the engine reads them."""
TOKENIZER_FILE = FOLDER / "tokenizer.json"
CONFIG = parse_model_config(json.loads((FOLDER / "config.json").read_text(encoding="utf-8")))


def num_crops(width: int, height: int) -> int:
    """How many crops the model encodes of a picture."""
    rows, columns = select_tiling(width, height, CONFIG.vision)
    return 1 if rows * columns == 1 else 1 + rows * columns


def export(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the three files into ``folder``."""
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    tensors = {
        f"model.{name}": tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in weights.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
