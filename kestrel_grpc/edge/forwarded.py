"""FrontCalls: gives the calls that the front forwards the client's address and certificate instead of the front's.

It is the outermost interceptor of the socket on which only the front connects. So everything behind it works as if the
client were connected itself.

A unary call's initial metadata waits for its response. If the worker ends first, the front can still send a status,
with which every client knows that it may send the call again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from ..security.identity.callers import AuthContext
from ..security.identity.certificates import certificate_of, peer_of
from ..security.identity.front_headers import PEER_HEADER, is_of_front
from .grpc_method import WrappedContext, reading_handler

_CHECK, _WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class FrontCalls(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """``is_serving``: the answer to the front's own health checks, which need no credentials."""

    def __init__(self, is_serving: Callable[[], bool]) -> None:
        kind = health_pb2.HealthCheckResponse

        async def check(_request: bytes, _context: Any) -> Any:
            return kind(status=kind.SERVING if is_serving() else kind.NOT_SERVING)

        self._own_check = grpc.unary_unary_rpc_method_handler(
            check, response_serializer=kind.SerializeToString
        )

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        metadata = tuple(handler_call_details.invocation_metadata or ())
        if method == _CHECK and not any(key == PEER_HEADER for key, _ in metadata):
            return self._own_check
        own = tuple(pair for pair in metadata if not is_of_front(pair[0]))
        details: Any = type(handler_call_details)  # gRPC takes only this type.
        handler = await continuation(details(method, own))
        streams = handler.response_streaming
        behaviour: Any = handler.stream_stream if streams else handler.stream_unary
        assert behaviour is not None, "all methods are registered like this"

        async def handle(messages: Any, context: Any) -> Any:
            forwarded = ForwardedContext(context, own)
            if streams:
                watched = _WatchContext(forwarded) if method == _WATCH else forwarded
                return await behaviour(messages, watched)
            late = _LateContext(forwarded)
            response = await behaviour(messages, late)
            await late.greet()
            return response

        return reading_handler(handle, streams=streams, serializer=handler.response_serializer)


class ForwardedContext(WrappedContext):
    """Of a forwarded call. ``metadata``: what the caller sent."""

    def __init__(self, context: Any, metadata: tuple[tuple[str, str | bytes], ...]) -> None:
        super().__init__(context)
        self._metadata = metadata
        self._front = {
            key: str(value) for key, value in context.invocation_metadata() if is_of_front(key)
        }

    def peer(self) -> str:
        return peer_of(self._front[PEER_HEADER])

    def auth_context(self) -> AuthContext:
        return certificate_of(self._front)

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._metadata


class _WatchContext(WrappedContext):
    """Of a call that watches health. Another worker may serve while this one does not, so the call ends and the client
    asks again."""

    async def write(self, message: Any) -> None:
        if message.status == _NOT_SERVING:
            await self._context.abort(
                grpc.StatusCode.UNAVAILABLE, "this worker does not serve; another one may"
            )
        await self._context.write(message)


class _LateContext(WrappedContext):
    """Of a unary call. Keeps its initial metadata until ``greet``."""

    _initial: Any = None

    async def send_initial_metadata(self, metadata: Any) -> None:
        self._initial = metadata

    async def greet(self) -> None:
        if self._initial is not None:
            await self._context.send_initial_metadata(self._initial)
