"""The configuration of a model: its shape and its prompts."""

from __future__ import annotations

import os
from pathlib import Path

from ..checkpoint.config_file import read_config
from ..types.model_config import ModelConfig, parse_model_config

__all__ = ["ModelConfig", "load_config"]


def load_config(path: str | Path | None = None) -> ModelConfig:
    """Reads a model's config.json. None: the released Moondream 3. Raises ConfigError."""
    if path is None:
        return parse_model_config({}, family="moondream3")
    return parse_model_config(read_config(Path(os.path.expanduser(path))))
