"""Finds the file of a model's segmentation refiner: ``refiner.safetensors`` beside its weights, or a named one."""

from __future__ import annotations

import os
from pathlib import Path

from ..config.runtime import RuntimeConfig
from ..errors import ConfigError
from ..types.model_config import ModelConfig
from .catalog import HubFile
from .hub import Hub

NAME = "refiner.safetensors"
RELEASED = HubFile("moondream/SegHeadRefiner", "main", "model.pt", flag="--refiner")
"""The refiner of the released Moondream 3 models. Its repository may need permission."""


def find_refiner(
    runtime: RuntimeConfig, model: ModelConfig, files: tuple[Path, ...], hub: Hub
) -> Path | None:
    """Returns the file of the refiner that ``runtime`` names, downloaded if necessary; None for none. ``files``: the
    weights. Raises DownloadError, and ConfigError if it doesn't exist or the model can't segment.
    """
    choice = str(runtime.refiner)
    can_segment = "segment" in model.skills
    if choice == "off":
        return None
    if choice == "auto":
        beside = files[0].parent / NAME if files else None
        return beside if can_segment and beside is not None and beside.is_file() else None
    if not can_segment:
        raise ConfigError("refiner", choice, f"is for models that segment, unlike {model.family}")
    if choice == RELEASED.repo:
        return hub.fetch(RELEASED)
    path = Path(os.path.expanduser(choice))
    if path.is_dir():
        path = path / NAME
    if not path.is_file():
        raise ConfigError(
            "refiner",
            choice,
            f"must be auto, off, {RELEASED.repo} or the path of a file that exists",
        )
    return path
