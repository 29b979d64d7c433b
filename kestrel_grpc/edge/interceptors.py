"""The edge of every call: who calls, its id, its errors, its line in the access log, the count of calls in flight.

Around each method of kestrel.v1; calls of health and reflection are visitors'. A message is asked for once its caller
is known and admitted and there is room for it. Handlers raise; only here an exception becomes a status. The request's
id: the request's own field, else ``x-request-id`` metadata, else made here; it is echoed in the initial metadata of an
accepted call and in the trailers of a failed one, with ``x-trace-id`` where calls are traced. Initial metadata waits
until the engine has accepted the request, because a client's retry policy gives up once it has seen them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, cast

import grpc

from kestrel_client._pb.kestrel.v1 import common_pb2

from ..security.admission.guard import Guard
from ..security.identity.principal import Principal, Scope
from .bounded_context import BoundedContext
from .call import Call, Context, id_from_metadata, new_id
from .call_limit import CallLimit
from .current_call import current
from .endings import Endings, Trailers, forget_frames
from .errors import SlowSender
from .incoming import Incoming
from .inner_request import inner_request
from .lost_connections import silence_lost_connections
from .request_ids import id_from_options
from .visitors import Visitors

_INTERCEPTED = "/kestrel.v1."
_ENTRY_BYTES = 32
"""What an entry of the metadata counts beside its name and value, as in HTTP/2 (RFC 9113, 6.5.2)."""


class CallWatcher(Protocol):
    """Notified of every call: ``begin``, ``take`` once its request is read (None for one that comes as a stream) and
    its id known, ``end``. Must not raise."""

    def begin(self, call: Call) -> None: ...

    def take(self, call: Call, message: Any) -> None: ...

    def end(self, call: Call) -> None: ...


class InFlight:
    """How many calls are being handled, so that a stopping server can wait for the last."""

    def __init__(self) -> None:
        self._count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def count(self) -> int:
        return self._count

    def __enter__(self) -> None:
        self._count += 1
        self._idle.clear()

    def __exit__(self, *exc_info: object) -> None:
        self._count -= 1
        if self._count == 0:
            self._idle.set()

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether all calls ended within ``timeout_s`` seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """``end_call`` is called once at the end of every call; what ``trailers`` gives for its method goes with its
    status."""

    def __init__(
        self,
        in_flight: InFlight,
        guard: Guard,
        end_call: Callable[[Call], None],
        watcher: CallWatcher | None = None,
        trailers: Callable[[str], Trailers] | None = None,
    ) -> None:
        silence_lost_connections()
        self._in_flight, self._guard = in_flight, guard
        self._end_call, self._watcher = end_call, watcher
        self._trailers, self._endings = trailers, Endings(trailers)
        self._limit = CallLimit(guard.limits.deadline_s)
        self._pulls = CallLimit(guard.limits.read_s, _too_slow)
        self._visitors = Visitors(guard, self._endings, self._end_visit)
        self._most_metadata_bytes = guard.connections.most_metadata_bytes
        self._made: dict[int, tuple[Any, Any]] = {}
        """By the identity of a method's handler: itself, and what is called in its place."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        # The core applies its limit to clients only that have acknowledged its settings, and to complete headers.
        num_bytes = sum(
            len(key) + len(value) + _ENTRY_BYTES
            for key, value in handler_call_details.invocation_metadata or ()
        )
        if num_bytes > self._most_metadata_bytes:
            return self._visitors.crammed("" if handler is None else method, num_bytes)
        if handler is None:
            return self._visitors.unknown(method)
        made = self._made.get(id(handler))
        if made is None:
            make = self._edge if method.startswith(_INTERCEPTED) else self._visitors.edge
            made = self._made[id(handler)] = (handler, make(method, handler))
        return made[1]

    def _end_visit(self, call: Call) -> None:
        self._end_call(call)
        if self._watcher is not None:
            self._watcher.end(call)

    def _edge(self, method: str, handler: Any) -> Any:
        """What is called in the place of ``handler``. gRPC takes it for a method with a stream of requests, and so
        leaves it to us to ask for them."""
        guard, limits, decode = self._guard, self._guard.limits, handler.request_deserializer
        streaming, limit, watcher = handler.response_streaming, self._limit, self._watcher
        behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary
        takes_stream, empty = handler.request_streaming, _empty(decode)

        async def handle(_messages: Any, context: Context) -> Any:
            metadata = tuple(context.invocation_metadata() or ())
            call = Call(
                method=method,
                peer=context.peer(),
                context=context,
                metadata=metadata,
                request_id=id_from_metadata(metadata) or new_id(),
                longest_s=limits.deadline_s,
            )
            current.set(call)
            if watcher is not None:
                watcher.begin(call)
            prefix = ""
            failed: Exception | None = None
            incoming: Incoming | None
            request: Any
            use = guard.connections.use(call.peer)
            with self._in_flight, use:
                try:
                    call.principal = principal = guard.principal(metadata, context)
                    call.owner = principal.name or call.owner
                    with (
                        guard.admit(principal, method),
                        contextlib.closing(guard.hold(principal, call.peer)) as hold,
                    ):
                        guard.check_room(method)
                        incoming = Incoming(context, decode, hold, guard.messages, self._pulls, use)
                        if takes_stream:
                            request = incoming.all()
                            if watcher is not None:
                                watcher.take(call, None)
                        else:
                            request = await incoming.only() if empty is None else empty()
                            call.message = request
                            prefix = "request." if streaming else ""
                            options = _options(request)
                            if options is not None:
                                call.request_id = id_from_options(options) or call.request_id
                            if watcher is not None:
                                watcher.take(call, request)
                            if options is not None:
                                _check_priority(options, principal)
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
                    left = context.time_remaining()
                    expired = left is not None and left <= 0
                    call.code = (
                        grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED
                    )
                    raise  # Swallowing it leaks memory inside grpc.
                except grpc.aio.InternalError as error:
                    # What was written can't be sent: the connection went, and this call hears of it only now.
                    failed, call.code = error, grpc.StatusCode.CANCELLED
                    await self._endings.abort(call, "the connection was lost", ())
                except (
                    Exception
                ) as error:  # The servicer's edge: the one place where errors become statuses.
                    failed = error
                    await self._endings.fail(call, error, prefix)
                finally:
                    self._end_call(call)
                    if watcher is not None:
                        watcher.end(call)
                    call.release()
                    # gRPC keeps the exception that aborts a call, and with it this frame, in a cycle with its context.
                    incoming = request = response = options = None
                    if failed is not None:
                        forget_frames(failed)
                        failed = None

        wrap = (
            grpc.stream_stream_rpc_method_handler
            if streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return wrap(handle, response_serializer=handler.response_serializer)


def _too_slow(limit_s: float) -> Exception:
    return SlowSender(f"the request's message did not arrive within {limit_s:g} s")


def _empty(decode: Callable[[bytes], Any]) -> Callable[[], Any] | None:
    """The type of a method's messages if it has no fields, like GetLoad's: there is nothing to ask for. Else None."""
    kind: Any = getattr(decode, "__self__", None)
    return None if kind is None or kind.DESCRIPTOR.fields else cast(Callable[[], Any], kind)


def _check_priority(options: common_pb2.RequestOptions, principal: Principal) -> None:
    """Raises ScopeMissing."""
    if options.priority == common_pb2.PRIORITY_HIGH:
        principal.check(Scope.HIGH)


def _options(request: Any) -> common_pb2.RequestOptions | None:
    """The options of the request; None if it has none."""
    holder = inner_request(request)
    kind: Any = type(holder)
    return holder.options if _takes_options(kind) and holder.HasField("options") else None


@functools.cache
def _takes_options(kind: Any) -> bool:
    return "options" in kind.DESCRIPTOR.fields_by_name
