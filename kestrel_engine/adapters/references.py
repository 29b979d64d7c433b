"""The names by which requests name adapters. A name can never choose a host or a folder: its pattern is strict.

``scratches`` and ``ID@STEP`` are files of the operator's folder, and ``ID@STEP`` may be a fine-tune of the tuning API.
``ORG/REPO`` and ``ORG/REPO@REVISION`` are repositories of the hub.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ..errors import InvalidRequest

_PLAIN = r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}(?:@[0-9]{1,18})?"
_WORD = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB = re.compile(rf"({_WORD}/{_WORD})(?:@({_WORD}))?")
_FINE_TUNE = re.compile(r"([A-Za-z0-9][A-Za-z0-9_-]{0,63})@([0-9]{1,18})")
_NAME = re.compile(rf"(?:{_PLAIN}|{_WORD}/{_WORD}(?:@{_WORD})?)")


class Repository(NamedTuple):
    repo: str
    revision: str


class FineTune(NamedTuple):
    finetune: str
    step: str


def is_adapter_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def checked_adapter_name(name: object) -> str:
    """Returns ``name`` if an adapter may have it. Raises InvalidRequest."""
    if not isinstance(name, str) or not is_adapter_name(name):
        raise InvalidRequest(
            "adapter",
            f"{shortened(name)} is not the name of an adapter: 1 to 128 letters, digits and any of . _ + -, and "
            "possibly @ and the number of a step behind them; or ORG/REPO or ORG/REPO@REVISION of the hub",
        )
    return name


def repository_of(name: str) -> Repository | None:
    """The repository of the hub that a checked name means; None for a name of another form."""
    found = _HUB.fullmatch(name)
    return None if found is None else Repository(found[1], found[2] or "main")


def fine_tune_of(name: str) -> FineTune | None:
    """The fine-tune that a checked name may mean; None for a name of another form."""
    found = _FINE_TUNE.fullmatch(name)
    return None if found is None else FineTune(found[1], found[2])


def shortened(value: object) -> str:
    """A value in an error's text, at most 101 characters."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"
