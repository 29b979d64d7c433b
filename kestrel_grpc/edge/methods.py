"""Methods: what a gRPC port has for each of its methods, made once when generated code adds a servicer.

A method of kestrel.v1 or of KServe's protocol is a GrpcMethod, or a StreamMethod if its stream carries many requests.
visitors.py has the others. All of them lead their calls by call_life.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import grpc

from ..security.admission.message_room import ADAPTED_COPIES, COPIES
from ..service_names import KSERVE_METHODS
from .call_life import CallLife
from .calls.call import CallLimit
from .failures.errors import SlowSender
from .grpc_method import GrpcMethod, Trailers, write_limit
from .request_streams import StreamKind, StreamMethod
from .visitors import UnknownMethod, Visit

_OF_THE_MODEL = ("/kestrel.v1.", KSERVE_METHODS)
_GRPC_LOGGER = "grpc._cython.cygrpc"


class Methods:
    """Takes the place of a server when generated code adds a servicer. ``trailers`` returns additional trailers for the
    calls of a method. ``streams``: the methods whose streams carry many requests.

    Generated code adds each method twice: as a generic handler of its service, and as a registered method. grpc.aio
    waits for the next call of every registered method with a separate task. With all methods of this server, that took
    a third of a small call's Python time. So only generic handlers are added.
    """

    def __init__(
        self,
        life: CallLife,
        trailers: Callable[[str], Trailers] | None = None,
        streams: Mapping[str, StreamKind] = MappingProxyType({}),
    ) -> None:
        logging.getLogger(_GRPC_LOGGER).addFilter(_is_other_record)
        self._life, self._trailers, self._streams = life, trailers, streams
        limits = life.guard.limits
        self._pulls, self._writes = CallLimit(limits.read_s, _too_slow), write_limit(limits.write_s)
        self._services: list[grpc.GenericRpcHandler[Any, Any]] = []

    @property
    def as_server(self) -> grpc.aio.Server:
        """This object with the type that generated code expects."""
        return cast(grpc.aio.Server, self)

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Does nothing: the handlers of a service follow one by one."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Adds the methods of a service, by name."""
        led = {name: self._method(f"/{service}/{name}", each) for name, each in handlers.items()}
        made = {name: method.handler for name, method in led.items()}
        self._services.append(grpc.method_handlers_generic_handler(service, made))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds all methods to a server, and what refuses the calls of unknown ones."""
        handlers: Any = (*self._services, _Others(self._life))
        server.add_generic_rpc_handlers(handlers)

    def _method(self, method: str, handler: Any) -> GrpcMethod:
        life = self._life
        if not method.startswith(_OF_THE_MODEL):
            return Visit(life, method, handler)
        if handler.stream_stream:
            kind = self._streams.get(method, StreamKind())
            return StreamMethod(life, method, handler, kind, self._writes, self._trailers)
        copies = ADAPTED_COPIES if method.startswith(KSERVE_METHODS) else COPIES
        return GrpcMethod(
            *(life, method, handler),
            pulls=self._pulls,
            writes=self._writes,
            copies=copies,
            trailers=self._trailers,
        )


class _Others(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The methods that no service has."""

    def __init__(self, life: CallLife) -> None:
        self._life = life

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return UnknownMethod(self._life, handler_call_details.method).handler


def _too_slow(limit_s: float) -> Exception:
    return SlowSender(f"the request message did not arrive within {limit_s:g} s")


def _is_other_record(record: logging.LogRecord) -> bool:
    """Whether a record of gRPC is not about a response that cannot be sent because the connection is lost.

    gRPC sends the end of a call after its handler has returned. If that fails before gRPC has noticed the lost
    connection, gRPC logs a traceback for each call. This happens with clients that open no window and disappear.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, grpc.aio.InternalError)
