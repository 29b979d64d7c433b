"""What settings name beside the weights: the calibration of scores, where adapters come from, and compiled kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ..adapters.origins.origins import Origins
from ..config.runtime import RuntimeConfig
from ..errors import ConfigError
from ..small_files import MIB, read_small_file
from ..types.calibration import FILE_NAME, UNCALIBRATED, Calibration, from_text

_MOST_DESCRIPTION = 1 << 20


def read_calibration(choice: str | Path, weights: Sequence[Path], fingerprint: str) -> Calibration:
    """The calibration that the setting ``choice`` names, for ``weights`` with this fingerprint. Raises ConfigError."""
    path = Path(os.path.expanduser(choice))
    if choice == "off":
        return UNCALIBRATED
    if choice == "auto":
        if not weights:
            return UNCALIBRATED
        path = weights[0].parent / FILE_NAME
        if not path.is_file():
            return UNCALIBRATED
    return from_text(_calibration_text(path), str(path), fingerprint)


def _calibration_text(path: Path) -> str:
    try:
        return read_small_file(path, 16 * MIB).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("calibration", str(path), f"cannot be read: {error}") from None


def adapter_origins(config: RuntimeConfig) -> Origins | None:
    """Where requests' adapters come from; None if requests may name none. Raises ConfigError."""
    if not config.has_adapters:
        return None
    # A file may hold each tensor twice, in a type of twice the bytes.
    most = 4 * config.adapter_cache_bytes + _MOST_DESCRIPTION
    return Origins(
        _folder(config, "adapters_dir"),
        config.adapter_sources,
        downloads=Path(os.path.expanduser(config.cache_dir)) / "adapters",
        offline=config.offline,
        most_bytes=most,
    )


def kernel_cache_folder(config: RuntimeConfig) -> Path | None:
    """The folder of compiled kernels. Raises ConfigError."""
    return _folder(config, "kernel_cache_dir")


def check_folders(config: RuntimeConfig) -> None:
    """Checks that the folders exist, and that the calibration can be read. Raises ConfigError."""
    for field in ("adapters_dir", "kernel_cache_dir"):
        _folder(config, field)
    if config.calibration not in ("auto", "off"):
        _calibration_text(Path(os.path.expanduser(config.calibration)))


def _folder(config: RuntimeConfig, field: str) -> Path | None:
    named = getattr(config, field)
    if named is None:
        return None
    folder = Path(os.path.expanduser(named))
    if not folder.is_dir():
        raise ConfigError(field, str(named), "is not a folder")
    return folder
