"""Parsers of numbers for flags. An error names the value and the limit.

The parsers of a request's numbers accept what its field can hold; the server checks its own limits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from .flags import reported

MAX_UINT32 = 2**32 - 1
MAX_INT64 = 2**63 - 1


def whole(low: int = 0, high: int = MAX_UINT32) -> Callable[[str], int]:
    """A parser of whole numbers from ``low`` to ``high``."""

    def parse(text: str) -> int:
        # int() would also accept signs, underscores and other scripts, and refuses thousands of digits differently.
        value = int(text) if re.fullmatch(r"[0-9]{1,20}", text) else -1
        if not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return reported(parse)


def between(low: float, high: float, what: str, *, above: bool = False) -> Callable[[str], float]:
    """A parser of numbers from ``low``, or ``above`` it, to ``high``. ``what``: how errors name them."""

    def parse(text: str) -> float:
        value = _float(text)
        if not low <= value <= high or (above and value == low):
            raise ValueError(f"must be {what}")
        return value

    return reported(parse)


def seconds(low: float = 0.0, high: float = math.inf) -> Callable[[str], float]:
    """A parser of durations in seconds, from ``low`` to ``high``."""
    most = "" if math.isinf(high) else f" to {high:g}"
    return between(low, high, f"a number of seconds from {low:g}{most}")


def timeout(text: str) -> float:
    """A number of seconds above 0. Raises ValueError."""
    value = _float(text)
    if not value > 0:
        raise ValueError("must be a number of seconds above 0")
    return value


def _number(text: str) -> float:
    value = _float(text)
    if not math.isfinite(value):
        raise ValueError("must be a number")
    return value


number = reported(_number)
"""A parser of finite numbers."""


def _float(text: str) -> float:
    """NaN for a text that is no number."""
    try:
        return float(text)
    except ValueError:
        return math.nan
