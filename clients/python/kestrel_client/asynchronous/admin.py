"""The asynchronous client of AdminService, for one event loop. synchronous/admin.py is generated from this file."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from ..administration.messages import (
    DEFAULT_TIMEOUT_S,
    STUBS,
    AdminRequests,
    Captures,
    LoadedModel,
    LoadingProgress,
    LogLevel,
    Profile,
    ServerStatistics,
)
from ..calls.streams import AsyncStream
from ..connection import DEFAULT_TARGET, ChannelOptions, Connection, Metadata, Tls
from ..values.description import Adapter
from .channel import AsyncChannel


class AsyncKestrelAdmin:
    """Administers one running Kestrel server from one event loop. Use it in ``async with``, or call ``await aclose()``.

    ``token`` needs the scope admin; for ``statistics``, metrics is enough. The other arguments are those of
    AsyncKestrelClient. The client does not retry these calls. Every method raises the errors that errors.py lists, and
    takes a ``timeout`` in seconds, by default the client's.
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
        connection = Connection(
            target=target,
            tls=tls,
            token=token,
            timeout=timeout,
            metadata=metadata,
            channel_options=channel_options,
        )
        self._requests = AdminRequests(connection)
        self._channel = AsyncChannel(connection, STUBS)

    async def drain(self, *, timeout: float | None = None) -> int:
        """Makes the server refuse new requests, permanently. Returns the number of requests that still run."""
        return await self._channel.send(self._requests.drain(timeout))

    async def cancel(self, request_id: str, *, timeout: float | None = None) -> int:
        """Ends the requests with this id, of all callers; they return what they have so far.

        Returns the number of requests.
        """
        return await self._channel.send(self._requests.cancel(request_id, timeout))

    async def flush_caches(
        self, *, stored_images: bool = False, timeout: float | None = None
    ) -> int:
        """Clears the server's caches, and with ``stored_images`` the images that it stores by id.

        Returns the number of stored images that were dropped.
        """
        return await self._channel.send(self._requests.flush_caches(stored_images, timeout))

    async def set_log_level(
        self, level: LogLevel, module: str = "", *, timeout: float | None = None
    ) -> LogLevel | None:
        """Changes the log level of the server, or of one ``module`` like "kestrel_engine.steps.loop", until it stops.

        Returns the level before, or None if the module had no level of its own.
        """
        return await self._channel.send(self._requests.set_log_level(level, module, timeout))

    async def statistics(self, *, timeout: float | None = None) -> ServerStatistics:
        """Returns the present state of the server, and counts since its start."""
        return await self._channel.send(self._requests.statistics(timeout))

    async def start_profile(
        self,
        *,
        seconds: float | None = None,
        steps: int | None = None,
        python_functions: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Starts a profile of the step thread and the device.

        Returns the name of its file in the server's --profile-dir. The profile ends after ``seconds`` (default 10) or
        ``steps`` (default 500), or with ``stop_profile``. Raises FailedPreconditionError if the server has no
        --profile-dir, or a profile already runs.
        """
        request = self._requests.start_profile(seconds, steps, python_functions, timeout)
        return await self._channel.send(request)

    async def stop_profile(self, *, timeout: float | None = None) -> Profile:
        """Ends the running profile and returns it.

        Waits for a profile that is about to end by itself. If none runs, returns the last one.
        """
        return await self._channel.send(self._requests.stop_profile(timeout))

    async def start_capture(
        self,
        *,
        requests: int | None = None,
        images: bool = False,
        timeout: float | None = None,
    ) -> int:
        """Writes the next ``requests`` (default 10) that fail through the server's fault into its --capture-dir.

        ``images``: whether to write their images too. Returns the number of requests that will be written. Raises
        FailedPreconditionError if the server has no --capture-dir, or may not write images.
        """
        return await self._channel.send(self._requests.start_capture(requests, images, timeout))

    async def stop_capture(self, *, timeout: float | None = None) -> Captures:
        """Stops the capture. Returns the files that were written since its start."""
        return await self._channel.send(self._requests.stop_capture(timeout))

    def load_model(
        self,
        source: str,
        settings: Mapping[str, str] | None = None,
        *,
        make_default: bool = False,
        timeout: float | None = None,
    ) -> AsyncStream[LoadedModel, LoadingProgress]:
        """Loads another model. ``source``: as ``--model`` names it. ``settings``: the model's own, by the names of
        their flags, like {"device": "cuda:1"}; other settings are those of the server.

        The stream gives the progress and ends with the loaded model. Loading continues if the stream is closed.
        ``make_default``: whether the model answers requests that name none, once it is loaded. Raises
        FailedPreconditionError if it cannot be loaded.
        """
        return self._channel.stream(
            self._requests.load_model, source, settings, make_default, timeout
        )

    async def unload_model(
        self, name: str, *, grace_s: float | None = None, timeout: float | None = None
    ) -> None:
        """Unloads a model that is not the default. Returns when its running requests have ended, after ``grace_s``
        seconds at the latest (default: the server's), and its memory is free."""
        await self._channel.send(self._requests.unload_model(name, grace_s, timeout))

    async def set_default_model(self, name: str, *, timeout: float | None = None) -> str:
        """Makes a loaded model the default. Returns the name of the default before."""
        return await self._channel.send(self._requests.set_default_model(name, timeout))

    async def load_adapter(
        self, name: str, *, model: str | None = None, timeout: float | None = None
    ) -> Adapter:
        """Loads an adapter of ``model`` (default: the default model), so that its first request does not wait for it.

        Returns the adapter with the bytes that it takes. It stays until its memory is needed for another one. Raises
        what a request with ``adapter=name`` raises.
        """
        return await self._channel.send(self._requests.load_adapter(name, model, timeout))

    async def unload_adapter(
        self, name: str, *, model: str | None = None, timeout: float | None = None
    ) -> bool:
        """Drops an adapter of ``model`` (default: the default model) from memory. Running requests keep it, and a later
        request loads it again. Returns whether it was loaded."""
        return await self._channel.send(self._requests.unload_adapter(name, model, timeout))

    async def aclose(self) -> None:
        """Closes the connection and cancels the calls that still run. May be called again."""
        await self._channel.aclose()

    async def __aenter__(self) -> AsyncKestrelAdmin:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()
