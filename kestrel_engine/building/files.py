"""The files beside the weights that settings name: the calibration of scores, and the folder of adapters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..config.runtime import RuntimeConfig
from ..errors import ConfigError
from ..types.calibration import FILE_NAME, UNCALIBRATED, Calibration, from_text


def read_calibration(asked: str | Path, weights: Sequence[Path], fingerprint: str) -> Calibration:
    """The calibration that the setting ``asked`` names, for ``weights`` with this fingerprint. Raises ConfigError."""
    path = Path(asked).expanduser()
    if asked == "off":
        return UNCALIBRATED
    if asked == "auto":
        if not weights:
            return UNCALIBRATED
        path = weights[0].parent / FILE_NAME
        if not path.is_file():
            return UNCALIBRATED
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("calibration", str(path), f"cannot be read: {error}") from None
    return from_text(text, str(path), fingerprint)


def adapters_folder(config: RuntimeConfig) -> Path | None:
    """The folder of adapters. Raises ConfigError."""
    if config.adapters_dir is None:
        return None
    folder = Path(config.adapters_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError("adapters_dir", str(config.adapters_dir), "is not a folder")
    return folder
