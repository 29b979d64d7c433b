"""What settings name beside the weights: the calibration of scores, where adapters come from, and compiled kernels."""

from __future__ import annotations

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
    path = Path(choice).expanduser()
    if choice == "off":
        return UNCALIBRATED
    if choice == "auto":
        if not weights:
            return UNCALIBRATED
        path = weights[0].parent / FILE_NAME
        if not path.is_file():
            return UNCALIBRATED
    try:
        text = read_small_file(path, 16 * MIB).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("calibration", str(path), f"cannot be read: {error}") from None
    return from_text(text, str(path), fingerprint)


def adapter_origins(config: RuntimeConfig) -> Origins | None:
    """Where requests' adapters come from; None if requests may name none. Raises ConfigError."""
    if not config.has_adapters:
        return None
    folder = None
    if config.adapters_dir is not None:
        folder = Path(config.adapters_dir).expanduser()
        if not folder.is_dir():
            raise ConfigError("adapters_dir", str(config.adapters_dir), "is not a folder")
    # A file may hold each tensor twice, in a type of twice the bytes.
    most = 4 * config.adapter_cache_bytes + _MOST_DESCRIPTION
    return Origins(
        folder,
        config.adapter_sources,
        downloads=Path(config.cache_dir).expanduser() / "adapters",
        offline=config.offline,
        most_bytes=most,
    )


def kernel_cache_folder(config: RuntimeConfig) -> Path | None:
    """The folder of compiled kernels. Raises ConfigError."""
    if config.kernel_cache_dir is None:
        return None
    folder = Path(config.kernel_cache_dir).expanduser()
    if not folder.is_dir():
        raise ConfigError("kernel_cache_dir", str(config.kernel_cache_dir), "is not a folder")
    return folder
