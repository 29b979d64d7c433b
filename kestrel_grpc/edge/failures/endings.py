"""Ends calls that fail: sends their status and trailers, and drops references to their data."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from kestrel_engine import EngineOverloaded, RuntimeFailure

from ...security.admission.refusal_pace import RefusalPace
from ...security.identity.front_headers import NOT_BEGUN
from ...security.identity.peers import address_of
from ..calls.call import Call
from ..calls.call_watcher import CallWatcher
from .errors import ModelNotReady
from .statuses import row_of, status_of

logger = logging.getLogger(__name__)

Trailers = tuple[tuple[str, str | bytes], ...]

_LAST_WORD_S = 2.0
"""Seconds that a failed call waits until its status is sent."""


class Endings:
    """Ends calls with an error. ``pace`` delays refusals of callers that get too many. ``trailers``: returns additional
    trailers for a method's calls."""

    def __init__(
        self, pace: RefusalPace, trailers: Callable[[str], Trailers] | None = None
    ) -> None:
        self._pace, self._trailers = pace, trailers

    async def fail(self, call: Call, error: Exception) -> None:
        """Ends the call with the status of ``error``. Never returns. The caller holds no reference to the call's
        message."""
        note(call, error)
        await delay_refusal(self._pace, call, error)
        _, message, trailers = status_of(error, call.request_id)
        if isinstance(error, ModelNotReady):
            trailers = (*trailers, (NOT_BEGUN, "1"))
        await self.abort(call, message, trailers)

    async def abort(self, call: Call, message: str, trailers: Trailers) -> None:
        """Ends the call with its code. Never returns."""
        extra = () if self._trailers is None else self._trailers(call.method)
        trailers = (*trailers, *call.ids, *extra)
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await call.context.abort(call.code, message, trailers)
        except (TimeoutError, grpc.aio.InternalError):
            # The client does not read, or its connection is closed. gRPC has the status and sends it after the unread
            # messages, or drops it with the connection. gRPC would log the traceback of any other exception.
            raise asyncio.CancelledError from None


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


def finish(
    call: Call,
    end_call: Callable[[Call], None],
    watcher: CallWatcher | None,
    failed: Exception | None,
) -> None:
    """Counts and reports a call that has ended, and drops its large objects and the frames of its error.

    The caller must not keep ``failed``, because its own frame may be in a reference cycle.
    """
    end_call(call)
    if watcher is not None:
        watcher.end(call)
    call.release()
    if failed is not None:
        forget_frames(failed)


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
