"""Text for terminals: styles, unless NO_COLOR is set, and numbers of things."""

from __future__ import annotations

import os
from typing import IO, Any, Literal, TypeAlias

Style: TypeAlias = Literal["bold", "dim", "red", "green", "yellow", "cyan"]
_CODES: dict[Style, int] = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "cyan": 36}


def styled(text: str, style: Style, stream: IO[Any]) -> str:
    """``text`` in a style if ``stream`` shows colours, otherwise unchanged (https://no-color.org)."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if _shows_colours(stream) else text


def counted(number: int, noun: str) -> str:
    """ "1 step", "2 steps"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _shows_colours(stream: IO[Any]) -> bool:
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return False
    return bool(os.environ.get("FORCE_COLOR")) or stream.isatty()
