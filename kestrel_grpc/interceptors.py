"""The edge of every call: its id, its errors, its line in the access log, and the count of calls in flight.

Around each method of kestrel.v1; health and reflection pass untouched. Handlers raise; only here an exception becomes a
status. The request's id: the request's own field, else ``x-request-id`` metadata, else made here; it is echoed in the
initial metadata of an accepted call and in the trailers of a failed one. Initial metadata waits until the engine has
accepted the request, because a client's retry policy gives up once it has seen them.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from kestrel_engine import EngineResult, InvalidRequest, RuntimeFailure

from . import convert
from .errors import row_of, status_of

logger = logging.getLogger(__name__)

REQUEST_ID_KEY = "x-request-id"
_INTERCEPTED = "/kestrel.v1."
_FOREVER_S = 10 * 365 * 86_400.0
"""A deadline beyond this is how grpc says that there is none."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class Call:
    """One call as the access log tells of it."""

    method: str
    peer: str
    context: Context
    request_id: str = ""
    owner: str = ""
    """Who calls, to whom stored pictures belong; "" for all, as callers aren't told apart."""
    started_at: float = field(default_factory=time.monotonic)
    code: grpc.StatusCode = grpc.StatusCode.OK
    result: EngineResult | None = None
    _greeted: bool = False

    async def accept(self) -> None:
        """Tells the caller the request's id; the call can't be retried transparently from here on."""
        if not self._greeted:
            self._greeted = True
            await self.context.send_initial_metadata(((REQUEST_ID_KEY, self.request_id),))

    @property
    def timeout_s(self) -> float | None:
        """Seconds until the caller's deadline; None without one."""
        left: float | None = self.context.time_remaining()
        return None if left is None or left > _FOREVER_S else left

    @property
    def duration_ms(self) -> float:
        return 1e3 * (time.monotonic() - self.started_at)


_current: contextvars.ContextVar[Call] = contextvars.ContextVar("kestrel_call")


def current_call() -> Call:
    """The call that this task handles."""
    return _current.get()


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


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request that is no message of its type."""


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """``log_call`` is called once at the end of every call."""

    def __init__(self, in_flight: InFlight, log_call: Callable[[Call], None]) -> None:
        self._in_flight = in_flight
        self._log_call = log_call

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_INTERCEPTED):
            return handler
        wrap, behaviour = _KINDS[handler.request_streaming, handler.response_streaming](handler)
        return wrap(
            self._edge(method, behaviour, streaming=handler.response_streaming),
            request_deserializer=_tolerant(handler.request_deserializer),
            response_serializer=handler.response_serializer,
        )

    def _edge(
        self, method: str, behaviour: Callable[[Any, Context], Awaitable[Any]], *, streaming: bool
    ) -> Callable[[Any, Context], Awaitable[Any]]:
        async def handle(request: Any, context: Context) -> Any:
            call = Call(method=method, peer=context.peer(), context=context)
            call.request_id = _id_from_metadata(context) or uuid.uuid4().hex
            _current.set(call)
            with self._in_flight:
                try:
                    if isinstance(request, _Malformed):
                        raise InvalidRequest("", _NOT_A_MESSAGE)
                    if isinstance(request, AsyncIterator):
                        request = _well_formed(request)
                    call.request_id = _id_from_request(request) or call.request_id
                    response = await behaviour(request, context)
                    await call.accept()
                    return response
                except asyncio.CancelledError:
                    left = context.time_remaining()
                    expired = left is not None and left <= 0
                    call.code = (
                        grpc.StatusCode.DEADLINE_EXCEEDED if expired else grpc.StatusCode.CANCELLED
                    )
                    raise  # Swallowing it leaks memory inside grpc.
                except (
                    Exception
                ) as error:  # The servicer's edge: the one place where errors become statuses.
                    inside = streaming and not isinstance(request, _Malformed)
                    await self._fail(call, error, prefix="request." if inside else "")
                finally:
                    self._log_call(call)

        return handle

    @staticmethod
    async def _fail(call: Call, error: Exception, prefix: str) -> None:
        call.code, message, trailers = status_of(error, call.request_id, prefix)
        if isinstance(error, RuntimeFailure):
            logger.error("request %s: %s", call.request_id, error)
        elif not row_of(error).public:
            logger.error("request %s failed", call.request_id, exc_info=error)
        await call.context.abort(call.code, message, (*trailers, (REQUEST_ID_KEY, call.request_id)))


_KINDS: dict[tuple[bool, bool], Callable[[Any], tuple[Callable[..., Any], Any]]] = {
    (False, False): lambda handler: (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
    (False, True): lambda handler: (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
    (True, False): lambda handler: (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
}
"""By whether request and response are streams: how to make a handler, and what the given one calls."""

_NOT_A_MESSAGE = "the request is not a valid message of its type"


async def _well_formed(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if isinstance(request, _Malformed):
            raise InvalidRequest("", _NOT_A_MESSAGE)
        yield request


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Left alone, grpc would answer a malformed message with INTERNAL and log a traceback."""

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except DecodeError:
            return _Malformed()

    return parse


def _id_from_metadata(context: Context) -> str | None:
    """An unusable id is passed over: proxies set this header, not the caller."""
    for key, value in context.invocation_metadata() or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and convert.valid_request_id(value):
            return value
    return None


def _id_from_request(request: Any) -> str | None:
    inner = getattr(request, "request", request)
    return convert.request_id(inner.options) if hasattr(inner, "options") else None
