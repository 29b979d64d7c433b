"""How a call ends that fails: its status, what goes with it, and what must not outlive it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc

from kestrel_engine import RuntimeFailure

from .call import Call
from .statuses import row_of, status_of

logger = logging.getLogger(__name__)

Trailers = tuple[tuple[str, str | bytes], ...]

_LAST_WORD_S = 2.0
"""How long a failed call waits for its status to be sent."""


class Endings:
    """``trailers`` gives what goes with the status of a method's calls."""

    def __init__(self, trailers: Callable[[str], Trailers] | None = None) -> None:
        self._trailers = trailers

    async def fail(self, call: Call, error: Exception, prefix: str = "") -> None:
        """Ends the call with the status of ``error``. Never returns. ``prefix``: as in statuses.status_of."""
        note(call, error)
        _, message, trailers = status_of(error, call.request_id, prefix)
        await self.abort(call, message, trailers)

    async def abort(self, call: Call, message: str, trailers: Trailers) -> None:
        """Ends the call with its code. Never returns."""
        extra = () if self._trailers is None else self._trailers(call.method)
        trailers = (*trailers, *call.ids, *extra)
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await call.context.abort(call.code, message, trailers)
        except (TimeoutError, grpc.aio.InternalError):
            # A reader who doesn't read: gRPC has the status, and sends it after what is unread, or drops both with the
            # connection; or who has gone. Of any other exception than this gRPC would log a traceback.
            raise asyncio.CancelledError from None


def note(call: Call, error: Exception) -> None:
    """Writes into the call how it failed, and logs what is the server's fault."""
    row = row_of(error)
    call.code, call.reason = row.code, row.reason
    if isinstance(error, RuntimeFailure):
        logger.error("request %s: %s", call.request_id, error)
    elif not row.public:
        logger.error("request %s failed", call.request_id, exc_info=error)
    if not row.public:
        call.error = error


def forget_frames(error: BaseException) -> None:
    """Tracebacks hold frames, and these the request and its picture: with a cycle among them, until the garbage
    collector comes, and ours comes seldom."""
    chain: list[BaseException | None] = [error]
    while chain:
        if (each := chain.pop()) is not None:
            chain += (each.__cause__, each.__context__)
            each.__cause__ = each.__context__ = each.__traceback__ = None
