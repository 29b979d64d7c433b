"""The edge of calls to health, reflection, load reports and unknown methods. Most may come without credentials.

Such a call has a line in the access log only if it is refused. It does not count among the calls in flight, because a
stream that watches health or load never ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import grpc

from kestrel_engine import KestrelError

from ..security.admission.guard import Guard
from ..security.identity.peers import address_of
from .calls.call import UNKNOWN_METHOD, Call, Context, new_id
from .calls.call_limit import CallLimit
from .failures.endings import Endings, forget_frames
from .failures.errors import MethodNotFound, SlowSender
from .failures.statuses import row_of, status_of
from .messages.bounded_context import BoundedContext
from .messages.incoming import Incoming

_READ_S = 5.0
"""Seconds in which a message must arrive. The messages are small, and the memory for them is limited."""
_LOGGED_CHARS = 100


class Visitors:
    """Wraps the handlers of health, reflection and load reports. ``end_call`` is called with every refused call."""

    def __init__(self, guard: Guard, endings: Endings, end_call: Callable[[Call], None]) -> None:
        self._guard, self._endings, self._end_call = guard, endings, end_call
        self._pulls = CallLimit(
            _READ_S, lambda limit_s: SlowSender(f"no message arrived within {limit_s:g} s")
        )

    def edge(self, method: str, handler: Any) -> Any:
        """A handler that wraps ``handler``."""
        behaviour = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        streaming = handler.response_streaming

        async def answer(call: Call, context: Context) -> Any:
            guard = self._guard
            call.principal = guard.visitor(method, call.metadata, context)
            who = call.principal.name or address_of(call.peer)
            with (
                guard.visits.admit(who, stream=streaming),
                contextlib.closing(guard.hold_visit(who)) as hold,
            ):
                incoming = Incoming(
                    *(context, handler.request_deserializer, hold, guard.messages, self._pulls),
                    guard.connections.use(call.peer),
                )
                request: Any
                if handler.request_streaming:
                    request = _until_idle(incoming)
                else:
                    request = await incoming.only()
                if not streaming:
                    return await behaviour(request, context)
                with contextlib.closing(BoundedContext(context, _READ_S)) as writer:
                    answered = behaviour(request, cast(Context, writer))
                    if not isinstance(answered, AsyncIterator):
                        return await answered
                    async for message in answered:
                        await writer.write(message)

        wrap = (
            grpc.stream_stream_rpc_method_handler
            if streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return wrap(
            self._answering(method, "", answer), response_serializer=handler.response_serializer
        )

    def unknown(self, method: str) -> Any:
        """A handler for a method that no service has. It raises MethodNotFound for callers with valid credentials."""

        async def refuse(call: Call, context: Context) -> None:
            call.principal = self._guard.visitor(method, call.metadata, context)
            shown = method[:_LOGGED_CHARS]
            raise MethodNotFound(f"there is no method {shown!r}; reflection lists all services")

        return grpc.stream_unary_rpc_method_handler(
            self._answering(UNKNOWN_METHOD, method[:_LOGGED_CHARS], refuse)
        )

    def refuse_metadata(self, method: str, num_bytes: int) -> Any:
        """A handler that refuses a call with ``num_bytes`` of metadata, which exceed the limit. It does not read the
        metadata again. ``method``: "" for a method that no service has."""

        async def refuse(_messages: Any, context: Context) -> None:
            peer = context.peer()
            call = Call(method or UNKNOWN_METHOD, peer=peer, context=context, request_id=new_id())
            error = self._guard.connections.refuse_headers(peer, num_bytes)
            call.reason = row_of(error).reason
            call.code, message, trailers = status_of(error, call.request_id)
            # An exception would keep the context in a reference cycle, and so the metadata that the core holds.
            context.set_code(call.code)
            context.set_details(message)
            context.set_trailing_metadata((*trailers, *call.ids))
            self._end_call(call)
            call.release()

        return grpc.stream_unary_rpc_method_handler(refuse)

    def _answering(
        self,
        method: str,
        asked: str,
        answer: Callable[[Call, Context], Any],
    ) -> Callable[[Any, Context], Any]:
        async def handle(_messages: Any, context: Context) -> Any:
            call = Call.begin(method, context, asked=asked)
            failed: KestrelError | None = None
            try:
                with self._guard.connections.use(call.peer):
                    return await answer(call, context)
            except grpc.aio.InternalError:
                # A message could not be sent, because the connection is lost. gRPC logs the traceback of any other
                # exception.
                raise asyncio.CancelledError from None
            except KestrelError as error:
                failed = error
                await self._endings.fail(call, error)
            finally:
                if failed is not None:
                    self._end_call(call)
                    forget_frames(failed)
                    failed = None
                call.release()

        return handle


async def _until_idle(incoming: Incoming) -> AsyncIterator[Any]:
    """The messages of a stream. Ends when none arrives for some time, because a stream that waits reserves memory."""
    with contextlib.suppress(SlowSender):
        async for message in incoming.all():
            yield message
