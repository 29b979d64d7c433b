"""The synchronous client of AdminService: what whoever runs a server may do to it while it runs. Safe to share between
threads."""

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


class KestrelAdmin:
    """Manages one running Kestrel server. Usable in ``with``; else ``close()`` it.

    ``token`` needs the scope admin; for ``statistics`` metrics is enough. The other arguments are those of
    KestrelClient. A call is never repeated by itself. Every method raises what errors.py lists, and takes a
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
        credentials, options = self._connection.credentials(), self._connection.options
        self._channel = (
            grpc.insecure_channel(self._connection.address, options)
            if credentials is None
            else grpc.secure_channel(self._connection.address, credentials, options)
        )
        self._stub = admin_service_pb2_grpc.AdminServiceStub(self._channel)

    def drain(self, *, timeout: float | None = None) -> int:
        """Makes the server take no more requests, for good; those that run go on, and are counted here."""
        return self._do(administration.drain(), timeout)

    def cancel(self, request_id: str, *, timeout: float | None = None) -> int:
        """Ends the requests of this id, whoever made them, with what they have so far; how many there were."""
        return self._do(administration.cancel(request_id), timeout)

    def flush_caches(self, *, stored_images: bool = False, timeout: float | None = None) -> int:
        """Forgets what is kept to save work, and with ``stored_images`` pictures kept by id: how many there were."""
        return self._do(administration.flush_caches(stored_images), timeout)

    def set_log_level(
        self, level: LogLevel, module: str = "", *, timeout: float | None = None
    ) -> LogLevel | None:
        """Changes what the server logs, or one ``module`` of it like "kestrel_engine.steps.loop", until it ends.

        What held before; None if the module had no level of its own.
        """
        return self._do(administration.set_log_level(level, module), timeout)

    def statistics(self, *, timeout: float | None = None) -> ServerStatistics:
        """What the server is doing now, and how much it has done."""
        return self._do(administration.statistics(), timeout)

    def start_profile(
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
        return self._do(administration.start_profile(seconds, steps, python_functions), timeout)

    def stop_profile(self, *, timeout: float | None = None) -> Profile:
        """Ends the profile that runs, or waits for one that ends by itself; else the last one."""
        return self._do(administration.stop_profile(), timeout)

    def start_capture(
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
        return self._do(administration.start_capture(requests, pictures), timeout)

    def stop_capture(self, *, timeout: float | None = None) -> Captures:
        """Captures no more; what was captured since the last start."""
        return self._do(administration.stop_capture(), timeout)

    def close(self) -> None:
        """Closes the connection; calls that still run are cancelled. Idempotent."""
        self._channel.close()

    def __enter__(self) -> KestrelAdmin:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _do(self, operation: Operation[R], timeout: float | None) -> R:
        call: Any = getattr(self._stub, operation.method)
        try:
            told = call(
                operation.request,
                timeout=self._connection.call_timeout(timeout),
                metadata=self._connection.call_metadata(None),
            )
        except grpc.RpcError as error:
            raise from_rpc_error(error) from error
        return operation.read(told)
