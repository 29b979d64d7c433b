"""BatchesConfig: where the server keeps batches, and how many. The default is nowhere."""

from __future__ import annotations

from dataclasses import dataclass

from kestrel_engine import SettingGroup, check_settings, checked

BATCHES = SettingGroup("batches", "batches")
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchesConfig:
    """Raises ConfigError."""

    path: str | None = BATCHES.setting(
        None,
        "SQLite file in which the server keeps batches of callers (BatchService, /v1/batches) and their files; needs "
        "one server process",
        flag="--batches",
        metavar="FILE",
        shown="none: the server takes no batches",
    )
    max_bytes: int = checked(4096 * _MIB, low=_MIB)
    """Bytes of all files and requests; a caller may have a quarter of them."""
    days: float = checked(30.0, low=0.01)
    """How long a file or a batch is kept."""
    at_once: int = checked(8, low=1)
    """Requests of batches that are answered at one time."""

    def __post_init__(self) -> None:
        check_settings(self)
