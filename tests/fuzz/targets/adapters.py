"""The files of an adapter: adapter_config.json and adapter_model.safetensors, in PEFT's names or ours.

An input is a JSON object with ``config``, ``tensors`` and ``metadata``, or else the bytes of the weight file.
"""

import tempfile
from pathlib import Path

import torch

from kestrel_engine import RuntimeConfig
from kestrel_engine.adapters import files
from kestrel_engine.adapters.targets import targets
from kestrel_engine.checkpoint.open import open_model
from kestrel_engine.errors import KestrelError
from tests.tiny import TINY

from ..json_mutator import mutated
from ..stored_files import parts, write, write_safetensors
from .weights import memory

_CONFIG = open_model(RuntimeConfig(model_path=TINY, offline=True)).config
_SHAPES = targets(_CONFIG)


def take(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=memory()) as name:
        folder = Path(name)
        found = parts(data)
        write_safetensors(folder / "adapter_model.safetensors", data, found)
        write(folder, found, {"config": "adapter_config.json"})
        try:
            checked = files.check(files.found_in(folder, "mine"), _SHAPES, _CONFIG.text)
            files.read(checked, torch.float32)
        except KestrelError:
            return


def mutate(data: bytes, most: int, seed: int) -> bytes:
    return mutated(data, most, seed)
