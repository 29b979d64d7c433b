"""The files of a checkpoint: config.json, the header of model.safetensors and tokenizer.json, as ``serve`` opens them.

An input is a JSON object with the contents of the files, or else the bytes of model.safetensors.
"""

import tempfile
from pathlib import Path

from kestrel_engine import RuntimeConfig
from kestrel_engine.checkpoint.open import open_model
from kestrel_engine.errors import KestrelError

from ..json_mutator import mutated
from ..stored_files import parts, write, write_safetensors

_FILES = {"config": "config.json", "tokenizer": "tokenizer.json"}


def take(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=memory()) as name:
        folder = Path(name)
        found = parts(data)
        write_safetensors(folder / "model.safetensors", data, found)
        write(folder, found, _FILES)
        try:
            open_model(RuntimeConfig(model_path=folder, offline=True))
        except KestrelError:
            return


def memory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def mutate(data: bytes, most: int, seed: int) -> bytes:
    return mutated(data, most, seed)
