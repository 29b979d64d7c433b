"""The calls of health, reflection, load reports and unknown methods. Most may come without credentials.

Such a call has a line in the access log only if it is refused. It does not count among the calls in flight, because a
stream that watches health or load never ends by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any

import grpc

from ..security.admission.message_room import Hold
from .call_life import CallLife
from .calls.call import UNKNOWN_METHOD, Call, CallLimit, Context
from .failures.errors import MethodNotFound, SlowSender
from .grpc_method import GrpcMethod, write_limit
from .messages.incoming import Incoming

_READ_S = 5.0
"""Seconds in which a message must arrive. The messages are small, and the memory for them is limited."""
_LOGGED_CHARS = 100


class Visit(GrpcMethod):
    """A method of health, reflection or load reports."""

    is_visit = True

    def __init__(self, life: CallLife, method: str, handler: Any) -> None:
        pulls = CallLimit(
            _READ_S, lambda limit_s: SlowSender(f"no message arrived within {limit_s:g} s")
        )
        super().__init__(life, method, handler, pulls=pulls, writes=write_limit(_READ_S))

    def _enter(self, call: Call) -> AbstractContextManager[Hold]:
        guard = self.life.guard
        call.principal = guard.visitor(self.method, call.metadata, call.context)
        return guard.admit_visit(call.principal, call.peer, stream=self._streams)

    async def read(self, call: Call, hold: Hold) -> Any:
        if self._takes_stream:
            return _until_idle(self.incoming(call, hold))
        return await self.incoming(call, hold).only()

    async def answer(self, call: Call, request: Any) -> Any:
        return await self._respond(call.context, request)


async def _until_idle(incoming: Incoming) -> AsyncIterator[Any]:
    """The messages of a stream. Ends when none arrives for some time, because a stream that waits reserves memory."""
    with contextlib.suppress(SlowSender):
        async for message in incoming.all():
            yield message


class UnknownMethod(Visit):
    """A method that no service has. It raises MethodNotFound for callers with valid credentials."""

    def __init__(self, life: CallLife, method: str) -> None:
        no_service: Any = None
        super().__init__(life, method, grpc.stream_unary_rpc_method_handler(no_service))

    def _begin(self, context: Context) -> Call:
        shown = self.method[:_LOGGED_CHARS]
        return self.life.begin(UNKNOWN_METHOD, context, is_visit=True, asked=shown)

    async def read(self, call: Call, hold: Hold) -> Any:
        raise MethodNotFound(f"there is no method {call.asked!r}; reflection lists all services")
