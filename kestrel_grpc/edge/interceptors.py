"""The edge of every call: identifies the caller, sets the request's id, converts errors, and counts and reports calls.

CallInterceptor wraps each method of kestrel.v1 and of KServe's protocol. visitors.py wraps those of health, reflection
and load reports, and request_streams.py those whose stream carries many requests. A message is
read after its caller is identified and admitted, and after memory is reserved for it. Handlers raise exceptions, and
only this module converts them to statuses.

The request's id comes from the request's field, or else from ``x-request-id`` metadata, or else it is made here. It is
returned in the initial metadata of an accepted call and in the trailers of a failed call, with ``x-trace-id`` if calls
are traced. Initial metadata is sent only after the engine has accepted the request, because a client does not retry a
call after it has received initial metadata.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import grpc

from ..security.admission.guard import Guard
from ..security.admission.message_limits import ADAPTED_COPIES, COPIES
from ..service_names import KSERVE_METHODS
from .calls.call import Call, Context, code_of_cancellation
from .calls.call_limit import CallLimit
from .calls.call_watcher import CallWatcher
from .calls.current_call import current
from .calls.in_flight import InFlight
from .failures.endings import Endings, Trailers, finish
from .failures.errors import SlowSender
from .lost_connections import silence_lost_connections
from .messages.bounded_context import BoundedContext
from .messages.incoming import Incoming
from .messages.request_options import check_priority, options_of, take_id
from .request_streams import RequestStreams, StreamKind
from .visitors import Visitors

_INTERCEPTED = ("/kestrel.v1.", KSERVE_METHODS)
_ENTRY_BYTES = 32
"""Bytes that an entry of the metadata counts in addition to its name and value, as in HTTP/2 (RFC 9113, 6.5.2)."""


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps the handlers of all methods. ``end_call`` is called once at the end of every call. ``trailers`` returns
    additional trailers for the calls of a method. ``streams``: the methods whose streams carry many requests."""

    def __init__(
        self,
        in_flight: InFlight,
        guard: Guard,
        end_call: Callable[[Call], None],
        watcher: CallWatcher | None = None,
        trailers: Callable[[str], Trailers] | None = None,
        streams: Mapping[str, StreamKind] = MappingProxyType({}),
    ) -> None:
        silence_lost_connections()
        self._in_flight, self._guard = in_flight, guard
        self._end_call, self._watcher = end_call, watcher
        self._trailers, self._endings = trailers, Endings(guard.refusals, trailers)
        self._limit = CallLimit(guard.limits.deadline_s)
        self._pulls = CallLimit(guard.limits.read_s, _too_slow)
        self._visitors = Visitors(guard, self._endings, self._end_visit)
        self._streams = RequestStreams(guard, self._endings, in_flight, end_call, watcher, streams)
        self._most_metadata_bytes = guard.connections.most_metadata_bytes
        self._made: dict[int, tuple[Any, Any]] = {}
        """The handler of each method and its wrapped handler, by the identity of the handler."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        # gRPC's core applies its limit only to clients that have acknowledged its settings, and to complete headers.
        num_bytes = sum(
            len(key) + len(value) + _ENTRY_BYTES
            for key, value in handler_call_details.invocation_metadata or ()
        )
        if num_bytes > self._most_metadata_bytes:
            return self._visitors.refuse_metadata("" if handler is None else method, num_bytes)
        if handler is None:
            return self._visitors.unknown(method)
        made = self._made.get(id(handler))
        if made is None:
            make: Callable[[str, Any], Any] = self._visitors.edge
            if method.startswith(_INTERCEPTED):
                make = self._streams.edge if handler.stream_stream else self._edge
            made = self._made[id(handler)] = (handler, make(method, handler))
        return made[1]

    def _end_visit(self, call: Call) -> None:
        self._end_call(call)
        if self._watcher is not None:
            self._watcher.end(call)

    def _edge(self, method: str, handler: Any) -> Any:
        """A handler that wraps ``handler``. It is registered as a method with a stream of requests, so that it decides
        when to read them."""
        guard, limits, decode = self._guard, self._guard.limits, handler.request_deserializer
        streaming, limit, watcher = handler.response_streaming, self._limit, self._watcher
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary
        takes_stream, empty = handler.request_streaming, _empty(decode)
        copies = ADAPTED_COPIES if method.startswith(KSERVE_METHODS) else COPIES

        async def handle(_messages: Any, context: Context) -> Any:
            call = Call.begin(method, context, longest_s=limits.deadline_s)
            current.set(call)
            if watcher is not None:
                watcher.begin(call)
            failed: Exception | None = None
            incoming: Incoming | None
            request: Any
            use = guard.connections.use(call.peer)
            with self._in_flight, use:
                try:
                    call.principal = principal = guard.principal(call.metadata, context)
                    call.owner = principal.name or call.owner
                    use.is_known = True
                    with (
                        guard.admit(principal, method),
                        contextlib.closing(guard.hold(principal, call.peer)) as hold,
                    ):
                        guard.check_room(method)
                        incoming = Incoming(
                            *(context, decode, hold, guard.messages, self._pulls, use),
                            copies=copies,
                        )
                        if takes_stream:
                            request = incoming.all()
                            if watcher is not None:
                                watcher.on_message(call)
                        else:
                            request = await incoming.only() if empty is None else empty()
                            call.message, call.streams = request, streaming
                            options = options_of(request)
                            take_id(call, options)
                            if watcher is not None:
                                watcher.on_message(call)
                            check_priority(options, principal)
                        if streaming and limits.write_s is not None:
                            writer = BoundedContext(context, limits.write_s)
                            with contextlib.closing(writer):
                                response = await limit.within(
                                    behaviour(request, cast(Context, writer))
                                )
                        else:
                            response = await limit.within(behaviour(request, context))
                    await call.accept()
                    if self._trailers is not None:
                        context.set_trailing_metadata(self._trailers(method))
                    return response
                except asyncio.CancelledError:
                    call.code = code_of_cancellation(context)
                    raise  # Without this, grpc leaks memory.
                except grpc.aio.InternalError as error:
                    # A message could not be sent, because the connection is lost.
                    failed, call.code = error, grpc.StatusCode.CANCELLED
                    await self._endings.abort(call, "the connection was lost", ())
                except Exception as error:  # This is the one place where errors become statuses.
                    failed = error
                    incoming = request = response = options = None
                    await self._endings.fail(call, error)
                finally:
                    # gRPC keeps the exception that aborts a call, and so this frame, in a reference cycle with its
                    # context.
                    incoming = request = response = options = None
                    finish(call, self._end_call, watcher, failed)
                    failed = None

        wrap = (
            grpc.stream_stream_rpc_method_handler
            if streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return wrap(handle, response_serializer=handler.response_serializer)


def _too_slow(limit_s: float) -> Exception:
    return SlowSender(f"the request message did not arrive within {limit_s:g} s")


def _empty(decode: Callable[[bytes], Any]) -> Callable[[], Any] | None:
    """The type of a method's request if it has no fields, like GetLoad's, so that nothing must be read; otherwise
    None."""
    kind: Any = getattr(decode, "__self__", None)
    return None if kind is None or kind.DESCRIPTOR.fields else cast(Callable[[], Any], kind)
