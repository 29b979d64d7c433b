"""Write a trained kestrel-small as the engine loads it: model.safetensors (bfloat16), config.json, tokenizer.json.

python -m training.export CHECKPOINT_FOLDER OUT_FOLDER
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.kestrel_small import FOLDER
from training.learning import checkpoints


def export(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the three files into ``folder``."""
    shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
    tensors = {
        f"model.{name}": tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in weights.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    export(checkpoints.load_quantised(Path(sys.argv[1]))["model"], Path(sys.argv[2]))
