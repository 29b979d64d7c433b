"""Which tokenizer.json belongs to a model: the given one, the one beside the weights, or the released one.

Looks into the file only to refuse another model's vocabulary; prompts and decoding are elsewhere.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..types.model_config import ModelConfig
from .catalog import BUNDLED, STARMIE, HubFile, ModelSource, tokenizer_file

if TYPE_CHECKING:
    from .hub import Hub

logger = logging.getLogger(__name__)

NAME = "tokenizer.json"
_RELEASED_VOCABULARY = 51200
_END_OF_TEXT = "<|endoftext|>"


def find_tokenizer(source: ModelSource, beside: Path | None, config: ModelConfig, hub: Hub) -> Path:
    """The tokenizer.json to use; ``beside`` is the one next to the weights, if there is one.

    Raises ConfigError when there is none or it is another model's, DownloadError when the hub is needed and fails.
    """
    if isinstance(source.tokenizer, Path):
        if problem := _problem(source.tokenizer, config):
            raise ConfigError("tokenizer_path", str(source.tokenizer), problem)
        return source.tokenizer
    if isinstance(source.tokenizer, HubFile):
        return hub.fetch(source.tokenizer)
    if beside is not None:
        problem = _problem(beside, config)
        if not problem:
            return beside
        # vikhyatk/moondream2 itself ships an older vocabulary's files.
        if config.text.vocab_size != _RELEASED_VOCABULARY:
            raise ConfigError("tokenizer_path", str(beside), problem)
        logger.warning("%s %s; using %s instead", beside, problem, STARMIE.repo)
    if config.text.vocab_size == _RELEASED_VOCABULARY:
        return hub.fetch(STARMIE)
    raise ConfigError(
        "tokenizer_path", None, f"no {NAME} beside the weights of {source.name}; give its path"
    )


def stand_in_tokenizer(given: str | Path | None, config_file: Path | None) -> Path:
    """For weights that are made up: the given tokenizer.json, the one beside config.json, else the bundled model's.

    The bundled one knows few of a released vocabulary's ids; the others decode to nothing. Raises ConfigError.
    """
    if given is not None:
        return tokenizer_file(given)
    if config_file is not None and (beside := config_file.parent / NAME).is_file():
        return beside
    return BUNDLED / "kestrel_tiny" / NAME


def _problem(file: Path, config: ModelConfig) -> str:
    try:
        added = json.loads(file.read_text("utf-8")).get("added_tokens") or []
        ids = {token["content"]: token["id"] for token in added}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        return f"is not a readable {NAME} ({error})"
    if ids.get(_END_OF_TEXT, config.ids.bos_id) != config.ids.bos_id:
        return f"is another model's: {_END_OF_TEXT} is {ids[_END_OF_TEXT]}, not {config.ids.bos_id}"
    return ""
