"""The asynchronous client of AdminService: what whoever runs a server may do to it while it runs."""

from __future__ import annotations

from types import TracebackType
from typing import Any, TypeVar

import grpc

from .._pb.kestrel.v1 import admin_service_pb2_grpc
from ..connection import DEFAULT_TARGET, ChannelOptions, Connection, Metadata, Tls
from ..errors import from_rpc_error
from . import messages as administration
from .messages import DEFAULT_TIMEOUT_S, Captures, LogLevel, Operation, Profile, ServerStatistics

R = TypeVar("R")


class AsyncKestrelAdmin:
    """Manages one running Kestrel server from one event loop. Usable in ``async with``; else ``await aclose()`` it.

    ``token`` needs the scope admin; for ``statistics`` metrics is enough. The other arguments are those of
    AsyncKestrelClient. A call is never repeated by itself. Every method raises what errors.py lists, and takes a
    ``timeout`` in seconds, the client's without one.
    """

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        tls: Tls | bool = False,
        token: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_S,
        metadata: Metadata | None = None,
        channel_options: ChannelOptions = (),
    ) -> None:
        self._connection = Connection(
            target=target,
            tls=tls,
            token=token,
            timeout=timeout,
            metadata=metadata,
            channel_options=channel_options,
        )
        self._credentials = self._connection.credentials()
        # The channel belongs to the loop that first uses it, so it is opened there and not here.
        self._channel: grpc.aio.Channel | None = None

    async def drain(self, *, timeout: float | None = None) -> int:
        """Makes the server take no more requests, for good; those that run go on, and are counted here."""
        return await self._do(administration.drain(), timeout)

    async def cancel(self, request_id: str, *, timeout: float | None = None) -> int:
        """Ends the requests of this id, whoever made them, with what they have so far; how many there were."""
        return await self._do(administration.cancel(request_id), timeout)

    async def flush_caches(
        self, *, stored_images: bool = False, timeout: float | None = None
    ) -> int:
        """Forgets what is kept to save work, and with ``stored_images`` pictures kept by id: how many there were."""
        return await self._do(administration.flush_caches(stored_images), timeout)

    async def set_log_level(
        self, level: LogLevel, module: str = "", *, timeout: float | None = None
    ) -> LogLevel | None:
        """Changes what the server logs, or one ``module`` of it like "kestrel_engine.steps.loop", until it ends.

        What held before; None if the module had no level of its own.
        """
        return await self._do(administration.set_log_level(level, module), timeout)

    async def statistics(self, *, timeout: float | None = None) -> ServerStatistics:
        """What the server is doing now, and how much it has done."""
        return await self._do(administration.statistics(), timeout)

    async def start_profile(
        self,
        *,
        seconds: float | None = None,
        steps: int | None = None,
        python_functions: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Begins to record what step thread and device do; the name that the file will have in the server's folder.

        It ends after ``seconds`` (10) or ``steps`` (500), or by ``stop_profile``. Raises FailedPreconditionError if the
        server has no folder for it, or a profile runs.
        """
        return await self._do(
            administration.start_profile(seconds, steps, python_functions), timeout
        )

    async def stop_profile(self, *, timeout: float | None = None) -> Profile:
        """Ends the profile that runs, or waits for one that ends by itself; else the last one."""
        return await self._do(administration.stop_profile(), timeout)

    async def start_capture(
        self,
        *,
        requests: int | None = None,
        pictures: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Writes the next ``requests`` (10) that fail by the server's fault into its folder; how many it will be.

        ``pictures``: their pictures too, if the server may. Raises FailedPreconditionError if it may not, or has no
        folder for it.
        """
        return await self._do(administration.start_capture(requests, pictures), timeout)

    async def stop_capture(self, *, timeout: float | None = None) -> Captures:
        """Captures no more; what was captured since the last start."""
        return await self._do(administration.stop_capture(), timeout)

    async def aclose(self) -> None:
        """Closes the connection; calls that still run are cancelled. Idempotent."""
        if self._channel is not None:
            await self._channel.close(None)

    async def __aenter__(self) -> AsyncKestrelAdmin:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def _open(self) -> grpc.aio.Channel:
        if self._channel is None:
            target, options = self._connection.address, self._connection.options
            self._channel = (
                grpc.aio.insecure_channel(target, options)
                if self._credentials is None
                else grpc.aio.secure_channel(target, self._credentials, options)
            )
        return self._channel

    async def _do(self, operation: Operation[R], timeout: float | None) -> R:
        # The stub's type doesn't tell a channel's kind at run time.
        call: Any = getattr(admin_service_pb2_grpc.AdminServiceStub(self._open()), operation.method)
        try:
            told = await call(
                operation.request,
                timeout=self._connection.call_timeout(timeout),
                metadata=self._connection.call_metadata(None),
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return operation.read(told)
