"""Finding: what one check found, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """``warn``: it works, and something is lost or can't be told. ``remedy`` is what a person would do about it."""

    check: str
    status: Status
    message: str
    remedy: str = ""
