"""Finding: the result of one check, and its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of ``check``. ``status``: "warn" if serving works but something is slower, missing or unchecked."""

    check: str
    status: Status
    message: str
    remedy: str = ""
