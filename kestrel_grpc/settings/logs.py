"""The levels of --log-level, and the limits of the log's buffer."""

from __future__ import annotations

import re

DEFAULT_BUFFER_BYTES = 4 * 1024 * 1024
"""About ten thousand lines."""
LEAST_BUFFER_BYTES = 4096
LEVELS = ("debug", "info", "warning", "error")
_MODULE = re.compile(r"\w+(\.\w+)*")


def log_levels(text: str) -> dict[str, str]:
    """The level of each module; the key "" stands for all other modules. Raises ValueError."""
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
