"""Finds the tokenizer.json of a model: the given file, the file beside the weights, or the released file."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..small_files import MIB, read_small_json
from ..types.model_config import ModelConfig
from .catalog import BUNDLED, STARMIE, HubFile, ModelSource, tokenizer_file

if TYPE_CHECKING:
    from .hub import Hub

logger = logging.getLogger(__name__)

NAME = "tokenizer.json"
_RELEASED_VOCABULARY = 51200
_END_OF_TEXT = "<|endoftext|>"


def find_tokenizer(source: ModelSource, beside: Path | None, config: ModelConfig, hub: Hub) -> Path:
    """``beside``: the file next to the weights, if it exists. Raises ConfigError if there is no file or it is another
    model's, and DownloadError if a download fails."""
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
        # vikhyatk/moondream2 contains the files of an older vocabulary.
        if config.text.vocab_size != _RELEASED_VOCABULARY:
            raise ConfigError("tokenizer_path", str(beside), problem)
        logger.warning("%s %s; using %s instead", beside, problem, STARMIE.repo)
    if config.text.vocab_size == _RELEASED_VOCABULARY:
        return hub.fetch(STARMIE)
    raise ConfigError(
        "tokenizer_path", None, f"no {NAME} beside the weights of {source.name}; give its path"
    )


def stand_in_tokenizer(path: str | Path | None, config_file: Path | None) -> Path:
    """Returns the tokenizer.json for generated weights: the given one, the one beside config.json, or the bundled one,
    which has few of a released vocabulary's ids. The others decode to an empty text. Raises ConfigError.
    """
    if path is not None:
        return tokenizer_file(path)
    if config_file is not None and (beside := config_file.parent / NAME).is_file():
        return beside
    return BUNDLED / "kestrel_small" / NAME


def _problem(file: Path, config: ModelConfig) -> str:
    try:
        added = read_small_json(file, 64 * MIB).get("added_tokens") or []
        ids = {token["content"]: token["id"] for token in added}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        return f"is not a readable {NAME} ({error})"
    if ids.get(_END_OF_TEXT, config.ids.bos_id) != config.ids.bos_id:
        return f"is another model's: {_END_OF_TEXT} is {ids[_END_OF_TEXT]}, not {config.ids.bos_id}"
    return ""
