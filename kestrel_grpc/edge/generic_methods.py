"""GenericMethods: all methods of a grpc.aio server behind one request for the next call.

Generated code offers each method to a server twice, by its service and registered by name. grpc.aio asks for the next
call of every registered method separately, and waits for the first of all these tasks anew for each call: with all our
methods that was a third of a small call's Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import grpc


class GenericMethods:
    """Stands for ``server`` where generated code adds a servicer to it."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server

    @property
    def as_server(self) -> grpc.aio.Server:
        """Itself, by the type that generated code asks for."""
        return cast(grpc.aio.Server, self)

    def add_generic_rpc_handlers(
        self, handlers: Sequence[grpc.GenericRpcHandler[Any, Any]]
    ) -> None:
        self._server.add_generic_rpc_handlers(handlers)  # type: ignore[arg-type]  # takes any sequence

    def add_registered_method_handlers(
        self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """They were given by their service before."""
