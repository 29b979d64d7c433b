"""TokenBudget: how many tokens a principal may use in a minute and a day, and what each kind of token counts."""

from __future__ import annotations

import re
from dataclasses import dataclass

MOST_TOKENS = 10**15
MOST_WEIGHT = 1000.0
_WHOLE = re.compile(r"[0-9]{1,16}")
_NUMBER = re.compile(r"[0-9]{1,9}(\.[0-9]{0,9})?")
SHADOW = "shadow"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """``minute``, ``day``: weighted tokens; 0 for no limit. The others: what one token of a kind counts."""

    minute: int = 0
    day: int = 0
    prompt: float = 1.0
    """Positions of text that no cache had."""
    image: float = 1.0
    """Positions of images that no cache had."""
    cached: float = 1.0
    output: float = 1.0
    shadow: bool = False
    """Counts and logs what would be refused, and refuses nothing."""
    file: str = ""
    """Stores what principals have used, so that a restart gives nothing back; "" for none."""


def token_budget(text: str) -> TokenBudget:
    """Parses a value of --token-budget, such as "minute=60000,day=2000000,output=4,shadow". Raises ValueError."""
    values: dict[str, int | float | bool | str] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, value = part.partition("=")
        if name in values:
            raise ValueError(f"{name} is given twice")
        if part == SHADOW:
            values[SHADOW] = True
        elif name in ("minute", "day"):
            values[name] = parsed_tokens(name, value)
        elif name in ("prompt", "image", "cached", "output"):
            values[name] = _weight(name, value)
        elif name == "file" and value:
            values[name] = value
        else:
            raise ValueError(
                f"{part!r} is none of minute=N, day=N, prompt=W, image=W, cached=W, output=W, file=PATH and {SHADOW}"
            )
    return TokenBudget(**values)  # type: ignore[arg-type]


def parsed_tokens(name: str, text: str) -> int:
    """A number of tokens. ``name``: of the field, for errors. Raises ValueError."""
    if _WHOLE.fullmatch(text) is None or int(text) > MOST_TOKENS:
        raise ValueError(
            f"{name}={text[:40]}: must be a whole number from 0 (no limit) to {MOST_TOKENS}"
        )
    return int(text)


def _weight(name: str, text: str) -> float:
    if _NUMBER.fullmatch(text) is None or float(text) > MOST_WEIGHT:
        raise ValueError(f"{name}={text[:40]}: must be a number from 0 to {MOST_WEIGHT:g}")
    return float(text)
