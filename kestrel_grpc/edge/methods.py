"""Methods: what a gRPC port has for each of its methods, made once when generated code adds a servicer.

A method of kestrel.v1 or of KServe's protocol is a GrpcMethod, or a StreamMethod if its stream carries many requests.
A Visit is a method of health, reflection or load reports. All of them lead their calls by call_life.py.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, cast

import grpc

from ..security.admission.message_room import ADAPTED_COPIES, COPIES, Hold
from ..service_names import KSERVE_METHODS
from .call_life import CallLife
from .calls.call import UNKNOWN_METHOD, Call, CallLimit, Context
from .failures.errors import MethodNotFound, SlowSender
from .grpc_method import GrpcMethod, Trailers, write_limit
from .messages.incoming import Incoming
from .request_streams import StreamKind, StreamMethod

_OF_THE_MODEL = ("/kestrel.v1.", KSERVE_METHODS)
_GRPC_LOGGER = "grpc._cython.cygrpc"
_READ_S = 5.0
"""Seconds in which a message must arrive. The messages are small, and the memory for them is limited."""
_LOGGED_CHARS = 100


class Methods:
    """Takes the place of a server when generated code adds a servicer. ``trailers`` returns additional trailers for the
    calls of a method. ``streams``: the methods whose streams carry many requests.

    Generated code adds each method twice: as a generic handler of its service, and as a registered method. grpc.aio
    waits for the next call of every registered method with a separate task. So only generic handlers are added.
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


class Visit(GrpcMethod):
    """A method of health, reflection or load reports. Most may be called without credentials.

    A call has a line in the access log only if it is refused. It does not count among the calls in flight, because a
    stream that watches health or load never ends by itself.
    """

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
        return await self._respond(call, request)


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


def _too_slow(limit_s: float) -> Exception:
    return SlowSender(f"the request message did not arrive within {limit_s:g} s")


def _is_other_record(record: logging.LogRecord) -> bool:
    """Whether a record of gRPC is not about a response that cannot be sent because the connection is lost.

    gRPC sends the end of a call after its handler has returned. If that fails before gRPC has noticed the lost
    connection, gRPC logs a traceback for each call. This happens with clients that open no window and disappear.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, grpc.aio.InternalError)
