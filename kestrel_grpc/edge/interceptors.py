"""CallInterceptor: chooses the handler of each call by gRPC.

A method of kestrel.v1 or of KServe's protocol is a GrpcMethod, or a StreamMethod if its stream carries many requests.
visitors.py has the others. All of them lead their calls by call_life.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

import grpc

from ..security.admission.message_limits import ADAPTED_COPIES, COPIES
from ..service_names import KSERVE_METHODS
from .call_life import CallLife
from .calls.call import UNKNOWN_METHOD
from .calls.call_limit import CallLimit
from .failures.errors import SlowSender
from .grpc_method import GrpcMethod, Trailers
from .lost_connections import silence_lost_connections
from .request_streams import StreamKind, StreamMethod
from .visitors import UnknownMethod, Visit, refuse_metadata

_OF_THE_MODEL = ("/kestrel.v1.", KSERVE_METHODS)
_ENTRY_BYTES = 32
"""Bytes that an entry of the metadata counts in addition to its name and value, as in HTTP/2 (RFC 9113, 6.5.2)."""


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Wraps the handlers of all methods. ``trailers`` returns additional trailers for the calls of a method.
    ``streams``: the methods whose streams carry many requests."""

    def __init__(
        self,
        life: CallLife,
        trailers: Callable[[str], Trailers] | None = None,
        streams: Mapping[str, StreamKind] = MappingProxyType({}),
    ) -> None:
        silence_lost_connections()
        self._life, self._trailers, self._streams = life, trailers, streams
        self._pulls = CallLimit(life.guard.limits.read_s, _too_slow)
        self._most_metadata_bytes = life.guard.connections.most_metadata_bytes
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
            known = UNKNOWN_METHOD if handler is None else method
            return refuse_metadata(self._life, known, num_bytes)
        if handler is None:
            return UnknownMethod(self._life, method).handler
        made = self._made.get(id(handler))
        if made is None:
            made = self._made[id(handler)] = (handler, self._method(method, handler).handler)
        return made[1]

    def _method(self, method: str, handler: Any) -> GrpcMethod:
        if not method.startswith(_OF_THE_MODEL):
            return Visit(self._life, method, handler)
        write_s, trailers = self._life.guard.limits.write_s, self._trailers
        if handler.stream_stream:
            kind = self._streams.get(method, StreamKind())
            return StreamMethod(self._life, method, handler, kind, write_s, trailers)
        copies = ADAPTED_COPIES if method.startswith(KSERVE_METHODS) else COPIES
        return GrpcMethod(
            *(self._life, method, handler),
            pulls=self._pulls,
            write_s=write_s,
            copies=copies,
            trailers=trailers,
        )


def _too_slow(limit_s: float) -> Exception:
    return SlowSender(f"the request message did not arrive within {limit_s:g} s")
