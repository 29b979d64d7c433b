"""The call that the current task handles. This module does not import gRPC, so that logging can use it everywhere."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .call import Call

current: contextvars.ContextVar[Call] = contextvars.ContextVar("kestrel_call")
"""Only CallLife sets it. ``get`` raises LookupError outside a call."""
