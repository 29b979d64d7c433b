"""Finding: the result of one check, and its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of the check named ``check``. A ``status`` of "warn" means that serving works, but something is slower
    or missing, or could not be checked. ``remedy``: what the operator can do."""

    check: str
    status: Status
    message: str
    remedy: str = ""
