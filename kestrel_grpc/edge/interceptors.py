"""The edge of every call: who calls, its id, its errors, its line in the access log, the count of calls in flight.

Around each method of kestrel.v1; of health and reflection only the door is watched. A message is decoded once its
caller is known and admitted, and here. Handlers raise; only here an exception becomes a status. The request's id: the
request's own field, else ``x-request-id`` metadata, else made here; it is echoed in the initial metadata of an accepted
call and in the trailers of a failed one, with ``x-trace-id`` where calls are traced. Initial metadata waits until the
engine has accepted the request, because a client's retry policy gives up once it has seen them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_engine import EngineResult, InvalidRequest, RuntimeFailure

from ..security.guard import Guard
from ..security.principal import ANONYMOUS, NotAuthenticated, Principal, Scope
from ..services import convert
from .bounded_context import BoundedContext
from .call_limit import CallLimit
from .current_call import current
from .statuses import row_of, status_of

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-request-id"
TRACE_ID_KEY = "x-trace-id"
_INTERCEPTED = "/kestrel.v1."
_FOREVER_S = 10 * 365 * 86_400.0
"""A deadline beyond this is how grpc says that there is none."""

_LAST_WORD_S = 2.0
"""How long a failed call waits for its status to be sent."""

Context = grpc.aio.ServicerContext[Any, Any]
Metadata = tuple[tuple[str, str | bytes], ...]


@dataclass(slots=True)
class Call:
    """One call as the access log tells of it."""

    method: str
    peer: str
    context: Context
    metadata: Metadata = ()
    """What came with it."""
    request_id: str = ""
    owner: str = ""
    """To whom stored pictures belong: the principal's name."""
    principal: Principal = ANONYMOUS
    """Who calls."""
    longest_s: float | None = None
    """Seconds that the server lets it take."""
    started_at: float = field(default_factory=time.monotonic)
    code: grpc.StatusCode = grpc.StatusCode.OK
    message: Any = None
    """Its request, once that is read. Of an upload that failed what came of it; else None where it is a stream."""
    stored: bytes | np.ndarray | None = None
    """The picture that its request names by id, once that is found."""
    result: EngineResult | None = None
    error: Exception | None = None
    """What ended it, where that is the server's fault."""
    trace_id: str = ""
    trace: object = None
    """The watcher's own."""
    _greeted: bool = False

    def release(self) -> None:
        """Lets go of what is large, once the call has ended: a cancelled timer keeps its task's context, and so this
        object, until the time that it was set for."""
        self.context = cast(Context, None)
        self.message = self.stored = self.result = self.error = self.trace = None

    async def accept(self) -> None:
        """Tells the caller the request's id; the call can't be retried transparently from here on."""
        if not self._greeted:
            self._greeted = True
            await self.context.send_initial_metadata(self.ids)

    @property
    def ids(self) -> tuple[tuple[str, str], ...]:
        """The call's ids as metadata."""
        request = (REQUEST_ID_KEY, self.request_id)
        return (request, (TRACE_ID_KEY, self.trace_id)) if self.trace_id else (request,)

    @property
    def timeout_s(self) -> float | None:
        """Seconds until the caller's deadline or the server's, whichever comes first; None without any."""
        left: float | None = self.context.time_remaining()
        own = None if left is None or left > _FOREVER_S else left
        if self.longest_s is None:
            return own
        most = max(0.0, self.longest_s - (time.monotonic() - self.started_at))
        return most if own is None else min(own, most)

    @property
    def duration_ms(self) -> float:
        return 1e3 * (time.monotonic() - self.started_at)


class CallWatcher(Protocol):
    """Is told of every call: ``begin``, ``take`` once its request is read (None for one that comes as a stream) and
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
    """``log_call`` is called once at the end of every call; what ``trailers`` gives for its method goes with its
    status."""

    def __init__(
        self,
        in_flight: InFlight,
        guard: Guard,
        log_call: Callable[[Call], None],
        watcher: CallWatcher | None = None,
        trailers: Callable[[str], tuple[tuple[str, str | bytes], ...]] | None = None,
    ) -> None:
        self._in_flight, self._guard = in_flight, guard
        self._log_call, self._watcher = log_call, watcher
        self._trailers = trailers
        self._limit = CallLimit(guard.limits.deadline_s)
        self._made: dict[int, tuple[Any, Any]] = {}
        """By the identity of a method's handler: itself, and what is called in its place."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_INTERCEPTED):
            refusal = self._guard.door(handler_call_details)
            if handler is None or (refusal is None and not self._guard.asks_connections):
                return handler
            return _refusing(handler, refusal) if refusal else _asked(handler, self._guard)
        made = self._made.get(id(handler))
        if made is None:
            wrap, behaviour = _KINDS[handler.request_streaming, handler.response_streaming](handler)
            edge = wrap(
                self._edge(method, behaviour, handler),
                request_deserializer=None,
                response_serializer=handler.response_serializer,
            )
            made = self._made[id(handler)] = (handler, edge)
        return made[1]

    def _edge(
        self, method: str, behaviour: Callable[[Any, Context], Awaitable[Any]], handler: Any
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        guard, limits, decode = self._guard, self._guard.limits, handler.request_deserializer
        streaming, limit, watcher = handler.response_streaming, self._limit, self._watcher

        async def handle(data: Any, context: Context) -> Any:
            metadata = tuple(context.invocation_metadata() or ())
            call = Call(
                method=method,
                peer=context.peer(),
                context=context,
                metadata=metadata,
                request_id=_id_from_metadata(metadata) or new_id(),
                longest_s=limits.deadline_s,
            )
            current.set(call)
            if watcher is not None:
                watcher.begin(call)
            prefix = ""
            failed: Exception | None = None
            with self._in_flight:
                try:
                    call.principal = principal = guard.principal(method, metadata, context)
                    call.owner = principal.name or call.owner
                    size = len(data) if isinstance(data, bytes) else 0
                    with guard.admit(principal, size):
                        guard.check_room(method)
                        if isinstance(data, bytes):
                            call.message = request = _message(data, decode)
                            prefix = "request." if streaming else ""
                            options = _options(request)
                            if options is not None:
                                call.request_id = convert.request_id(options) or call.request_id
                            if watcher is not None:
                                watcher.take(call, request)
                            if options is not None:
                                _check_priority(options, principal)
                        else:
                            request = _decoded(data, decode, guard)
                            if watcher is not None:
                                watcher.take(call, None)
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
                    await self._abort(call, "the connection was lost", ())
                except (
                    Exception
                ) as error:  # The servicer's edge: the one place where errors become statuses.
                    failed = error
                    await self._fail(call, error, prefix)
                finally:
                    self._log_call(call)
                    if watcher is not None:
                        watcher.end(call)
                    call.release()
                    # gRPC keeps the exception that aborts a call, and with it this frame, in a cycle with its context.
                    data = request = response = options = None
                    if failed is not None:
                        _forget_frames(failed)
                        failed = None

        return handle

    async def _fail(self, call: Call, error: Exception, prefix: str) -> None:
        call.code, message, trailers = status_of(error, call.request_id, prefix)
        if isinstance(error, RuntimeFailure):
            logger.error("request %s: %s", call.request_id, error)
        elif not row_of(error).public:
            logger.error("request %s failed", call.request_id, exc_info=error)
        if not row_of(error).public:
            call.error = error
        await self._abort(call, message, trailers)

    async def _abort(
        self, call: Call, message: str, trailers: tuple[tuple[str, str | bytes], ...]
    ) -> None:
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


_KINDS: dict[tuple[bool, bool], Callable[[Any], tuple[Callable[..., Any], Any]]] = {
    (False, False): lambda handler: (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
    (False, True): lambda handler: (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
    (True, False): lambda handler: (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
}
"""By whether request and response are streams: how to make a handler, and what the given one calls."""

_NOT_A_MESSAGE = "the request is not a valid message of its type"


async def _decoded(
    messages: AsyncIterator[bytes], decode: Callable[[bytes], Any], guard: Guard
) -> AsyncIterator[Any]:
    async for data in messages:
        guard.admission.check_size(len(data))
        yield _message(data, decode)


def _message(data: bytes, decode: Callable[[bytes], Any]) -> Any:
    """Left alone, grpc would answer a malformed message with INTERNAL and log a traceback. Raises InvalidRequest."""
    try:
        return decode(data)
    except DecodeError:
        raise InvalidRequest("", _NOT_A_MESSAGE) from None


def _forget_frames(error: BaseException) -> None:
    """Tracebacks hold frames, and these the request and its picture: with a cycle among them, until the garbage
    collector comes, and ours comes seldom."""
    chain: list[BaseException | None] = [error]
    while chain:
        if (each := chain.pop()) is not None:
            chain += (each.__cause__, each.__context__)
            each.__cause__ = each.__context__ = each.__traceback__ = None


def _refusing(handler: Any, error: Exception) -> Any:
    """A handler for the same kind of call that refuses it."""

    async def refuse(request: Any, context: Context) -> None:
        await _refuse(context, error)

    return _MADE_BY[handler.request_streaming, handler.response_streaming](refuse)


def _asked(handler: Any, guard: Guard) -> Any:
    """``handler``, for callers whose connection is let in."""
    behaviour = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )

    async def ask(request: Any, context: Context) -> Any:
        try:
            guard.check_connection(context)
        except NotAuthenticated as error:
            await _refuse(context, error)
        answered = behaviour(request, context)
        if not isinstance(answered, AsyncIterator):
            return await answered
        async for message in answered:
            await context.write(message)

    return _MADE_BY[handler.request_streaming, handler.response_streaming](
        ask,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


async def _refuse(context: Context, error: Exception) -> None:
    code, message, trailers = status_of(
        error, _id_from_metadata(context.invocation_metadata() or ()) or new_id()
    )
    await context.abort(code, message, trailers)


_MADE_BY: dict[tuple[bool, bool], Callable[..., Any]] = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
"""By whether request and response are streams."""


def new_id() -> str:
    """Of a request that nobody named. Random bytes are fetched for many at once: each time is a system call."""
    if not _random:
        data = os.urandom(16 * 256)
        _random.extend(data[i : i + 16] for i in range(0, len(data), 16))
    return _random.pop().hex()


_random: list[bytes] = []
os.register_at_fork(after_in_child=_random.clear)


def _check_priority(options: common_pb2.RequestOptions, principal: Principal) -> None:
    """Raises ScopeMissing."""
    if options.priority == common_pb2.PRIORITY_HIGH:
        principal.check(Scope.HIGH)


def _id_from_metadata(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """An unusable id is passed over: proxies set this header, not the caller."""
    for key, value in metadata:
        if key == REQUEST_ID_KEY and isinstance(value, str) and convert.valid_request_id(value):
            return value
    return None


def _options(request: Any) -> common_pb2.RequestOptions | None:
    """Those of the request, which streaming methods take one message deeper; None where there are none."""
    kind: Any = type(request)
    nested, has_options = _shape(kind)
    if not has_options:
        return None
    holder = request.request if nested else request
    return holder.options if holder.HasField("options") else None


@functools.cache
def _shape(kind: Any) -> tuple[bool, bool]:
    """Of a type of messages: whether the request lies within it, and whether that has options."""
    descriptor = kind.DESCRIPTOR
    nested = "request" in descriptor.fields_by_name
    inner = descriptor.fields_by_name["request"].message_type if nested else descriptor
    return nested, "options" in inner.fields_by_name
