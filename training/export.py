"""Write a trained kestrel-small as the engine loads it: model.safetensors (bfloat16), config.json, tokenizer.json.

python -m training.export CHECKPOINT_FOLDER OUT_FOLDER
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from training.kestrel_small import SIZES, TOKENIZER_FILE
from training.learning import checkpoints
from training.learning.model import Moondream, Sizes
from training.prompts import PromptWriter


def config_json(config: Sizes, writer: PromptWriter) -> dict[str, object]:
    """config.json in the layout of the Moondream 3 release, with the prompt templates of our tokenizer."""
    tokenizer = {
        "bos_id": 0,
        "eos_id": 0,
        "answer_id": 3,
        "thinking_id": 4,
        "coord_id": 5,
        "size_id": 6,
        "start_ground_points_id": 7,
        "end_ground_id": 9,
        "templates": writer.templates.as_config(),
    }
    return {
        "architectures": ["Moondream3ForCausalLM"],
        "model_type": "moondream3",
        "torch_dtype": "bfloat16",
        "config": {**config.as_json(), "tokenizer": tokenizer},
    }


def export(model: Moondream, folder: Path, tokenizer: Path) -> None:
    """Write the three files into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"model.{name}": tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = config_json(model.config, PromptWriter.of(tokenizer))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(tokenizer, folder / "tokenizer.json")


if __name__ == "__main__":
    trained = Moondream(SIZES)
    trained.load_state_dict(checkpoints.load_quantised(Path(sys.argv[1]))["model"])
    export(trained, Path(sys.argv[2]), TOKENIZER_FILE)
