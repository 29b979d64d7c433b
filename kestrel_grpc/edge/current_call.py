"""Which call a task handles. Imports nothing of gRPC, so that logs can name a call wherever they are written."""

from __future__ import annotations

import contextvars
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .call import Call

current: contextvars.ContextVar[Call] = contextvars.ContextVar("kestrel_call")
"""Set by the interceptor alone."""


def current_call() -> Call:
    """The call that this task handles."""
    return current.get()


def find_call() -> Call | None:
    """The call that this task handles; None outside of one."""
    return current.get(None)
