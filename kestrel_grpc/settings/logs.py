"""What is logged, in which form: the flags, and the levels that one of them holds. Imports no engine."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from .server import Flags

DEFAULT_BUFFER_BYTES = 4 * 1024 * 1024
"""Some ten thousand lines."""
LEAST_BUFFER_BYTES = 4096
LEVELS = ("debug", "info", "warning", "error")
_MODULE = re.compile(r"\w+(\.\w+)*")


def add_log_flags(flags: Flags, size: Callable[[str], int]) -> None:
    """``size``: how bytes are read."""
    flags.add(
        "--access-log",
        nargs="?",
        const="text",
        choices=("off", "text", "json"),
        default="off",
        help="write a line for each request: text (also if no format is named) or json",
    )
    flags.add(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="form of all that is logged; json has one object a line",
    )
    flags.add(
        "--log-level",
        type=checked_levels,
        metavar="LEVELS",
        default="info",
        help="least urgent messages to log, on standard error: debug, info, warning or error, then other levels for "
        "single modules, like info,kestrel_engine.loop=debug",
    )
    flags.add(
        "--log-buffer-bytes",
        type=lambda text: _buffer(size(text)),
        metavar="SIZE",
        default=DEFAULT_BUFFER_BYTES,
        shown="4MiB",
        help="lines that may wait for whoever reads or stores the log; more are dropped and counted",
    )


def _buffer(num_bytes: int) -> int:
    """Raises ValueError where hardly a line would fit."""
    if num_bytes < LEAST_BUFFER_BYTES:
        raise ValueError(f"must be at least {LEAST_BUFFER_BYTES}")
    return num_bytes


def log_levels(text: str) -> dict[str, str]:
    """Level by module; "" is all others. Raises ValueError."""
    levels: dict[str, str] = {}
    for part in text.split(","):
        module, named, level = part.strip().rpartition("=")
        level = level.lower()
        if level not in LEVELS:
            raise ValueError(f"{level!r} is not one of {', '.join(LEVELS)}")
        if named and not _MODULE.fullmatch(module):
            raise ValueError(f"{module!r} is not the name of a module")
        if module in levels:
            raise ValueError(f"{module or 'the level of all modules'} is named twice")
        levels[module] = level
    return {"": "info", **levels}


def checked_levels(text: str) -> str:
    """``text``, if it holds levels. Raises ValueError."""
    log_levels(text)
    return text
