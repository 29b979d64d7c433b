"""config.json of a checkpoint: reading it, and checking what the user asked for against the model's limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import RuntimeConfig
from ..errors import ConfigError
from ..types.model_config import ModelConfig

NAME = "config.json"


def read_config(file: Path) -> Mapping[str, Any]:
    """Contents of a config.json. Raises ConfigError if it isn't an object of JSON."""
    try:
        raw = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("config.json", str(file), f"can't be read ({error})") from error
    if not isinstance(raw, Mapping):
        raise ConfigError("config.json", str(file), "must hold an object")
    return raw


def config_beside(weights: Path) -> Mapping[str, Any] | None:
    """Contents of the config.json in the folder of a weight file; None if there is none."""
    file = weights.parent / NAME
    return read_config(file) if file.is_file() else None


def check_fits(runtime: RuntimeConfig, model: ModelConfig) -> None:
    """Raises ConfigError for a runtime setting that this model can't have."""
    limit = model.text.max_context
    length = runtime.max_seq_length
    if length is not None and not model.image_prefix < length <= limit:
        raise ConfigError(
            "max_seq_length",
            length,
            f"must exceed the image prefix of {model.image_prefix} positions and fit the model's context of {limit}",
        )
    if runtime.page_size is not None and model.image_prefix % runtime.page_size:
        raise ConfigError(
            "page_size",
            runtime.page_size,
            f"must divide the image prefix of {model.image_prefix} positions",
        )
