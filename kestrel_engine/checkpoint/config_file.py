"""Reads a checkpoint's config.json, and checks the user's settings against the model's limits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config.runtime import RuntimeConfig
from ..errors import ConfigError
from ..small_files import read_small_json
from ..types.model_config import ModelConfig

NAME = "config.json"


def read_config(file: Path) -> Mapping[str, Any]:
    """Returns the contents of a config.json. Raises ConfigError if the file is not a JSON object."""
    try:
        raw = read_small_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError("config.json", str(file), f"can't be read ({error})") from error
    if not isinstance(raw, Mapping):
        raise ConfigError("config.json", str(file), "must hold an object")
    return raw


def config_beside(weights: Path) -> Mapping[str, Any] | None:
    """Returns the contents of the config.json beside a weight file; None if there is none. Raises ConfigError."""
    file = weights.parent / NAME
    return read_config(file) if file.is_file() else None


def check_fits(runtime: RuntimeConfig, model: ModelConfig) -> None:
    """Raises ConfigError for a runtime setting that the model does not allow."""
    limit = model.text.max_context
    length = runtime.max_seq_length
    if length is not None and not model.image_prefix < length <= limit:
        raise ConfigError(
            "max_seq_length",
            length,
            f"must be above the image prefix of {model.image_prefix} positions and at most the model's context of "
            f"{limit}",
        )
    most = model.vision.max_crops
    if runtime.max_crops is not None and runtime.max_crops > most:
        raise ConfigError(
            "max_crops", runtime.max_crops, f"must be at most {most}, the model's own"
        )
    if runtime.page_size is not None and model.image_prefix % runtime.page_size:
        raise ConfigError(
            "page_size",
            runtime.page_size,
            f"must divide the image prefix of {model.image_prefix} positions",
        )
