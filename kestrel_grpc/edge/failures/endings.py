"""What becomes of the error of a failed call, for any transport: its log record, its delay, and its references."""

from __future__ import annotations

import logging

from kestrel_engine import EngineOverloaded, RuntimeFailure

from ...security.admission.refusal_pace import RefusalPace
from ...security.identity.principal import address_of
from ..calls.call import Call
from .statuses import row_of

logger = logging.getLogger(__name__)


def note(call: Call, error: Exception) -> None:
    """Sets the call's code, reason and error. Logs an error that is the server's fault."""
    row = row_of(error)
    call.code, call.reason = row.code, row.reason
    if isinstance(error, RuntimeFailure):
        logger.error("request %s: %s", call.request_id, error)
    elif not row.public:
        logger.error("request %s failed", call.request_id, exc_info=error)
    if not row.public:
        call.error = error


async def delay_refusal(pace: RefusalPace, call: Call, error: Exception) -> None:
    """If ``error`` refuses the call because of a limit, drops the call's message and waits until the call may be
    answered."""
    if isinstance(error, EngineOverloaded):
        forget_frames(error)
        call.message = None
        who = call.principal.name or address_of(call.peer)
        await pace.delay(who, call.timeout_s)


def forget_frames(error: BaseException) -> None:
    """Removes the tracebacks of an exception and its causes.

    A traceback holds frames, and these hold the request and its image. In a reference cycle they would stay until the
    garbage collector runs, which this server configures to run rarely.
    """
    chain: list[BaseException | None] = [error]
    while chain:
        if (each := chain.pop()) is not None:
            chain += (each.__cause__, each.__context__)
            each.__cause__ = each.__context__ = each.__traceback__ = None
