"""GenericMethods: registers all methods of a grpc.aio server as generic handlers, which makes calls cheaper.

Generated code adds each method to a server twice: as a generic handler of its service, and as a registered method.
grpc.aio waits for the next call of every registered method with a separate task. With all methods of this server, that
took a third of a small call's Python time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import grpc


class GenericMethods:
    """Takes the place of ``server`` when generated code adds a servicer."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    @property
    def as_server(self) -> grpc.aio.Server:
        """This object with the type that generated code expects."""
        return cast(grpc.aio.Server, self)

    def add_generic_rpc_handlers(
        self, handlers: Sequence[grpc.GenericRpcHandler[Any, Any]]
    ) -> None:
        self._server.add_generic_rpc_handlers(handlers)  # type: ignore[arg-type]  # takes any sequence

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Does nothing: the service's generic handler has all methods already."""
