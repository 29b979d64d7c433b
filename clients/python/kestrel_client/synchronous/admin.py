# Generated from asynchronous/admin.py by generate_sync.py. Never edit; run `make protos`.
"""The synchronous client of AdminService."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from .._pb.kestrel.v1 import admin_service_pb2 as pb
from .._pb.kestrel.v1.admin_service_pb2_grpc import AdminServiceStub
from ..calls.prepared_call import Method, PreparedCall, prepare_call
from ..calls.requests.building import build, milliseconds, whole
from ..calls.streams import Reading, Stream
from ..connection import DEFAULT_TARGET, ChannelOptions, Connection, Metadata, Tls
from ..errors import InvalidRequestError
from ..values.administration import (
    LEVELS,
    Captures,
    LoadedModel,
    LoadingProgress,
    LogLevel,
    Profile,
    ServerStatistics,
    read_level,
    read_loaded,
    read_profile,
    read_progress,
    read_statistics,
)
from ..values.description import Adapter, read_adapter
from .channel import Channel, Closing

DEFAULT_TIMEOUT_S = 120.0
"""The server writes a profile or capture before it answers, and the first start of a profiler takes seconds."""


class KestrelAdmin(Closing):
    """Administers one running Kestrel server. Safe to share between threads. Use it in ``with``, or call ``close()``.

    ``token`` needs the scope admin; for ``statistics``, metrics is enough. The other arguments are those of
    KestrelClient. The client does not retry these calls. Every method raises the errors that errors.py lists, and
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
        self._connection = Connection(
            target=target,
            tls=tls,
            token=token,
            timeout=timeout,
            metadata=metadata,
            channel_options=channel_options,
        )
        self._channel = Channel(self._connection, (AdminServiceStub,))

    def drain(self, *, timeout: float | None = None) -> int:
        """Makes the server refuse new requests, permanently. Returns the number of requests that still run."""
        response = self._ask("Drain", pb.DrainRequest(), timeout)
        return int(response.remaining_requests)

    def cancel(self, request_id: str, *, timeout: float | None = None) -> int:
        """Ends the requests with this id, of all callers; they return what they have so far.

        Returns the number of requests.
        """
        request = pb.CancelRequestRequest(request_id=request_id)
        return int((self._ask("CancelRequest", request, timeout)).cancelled_requests)

    def flush_caches(self, *, stored_images: bool = False, timeout: float | None = None) -> int:
        """Clears the server's caches, and with ``stored_images`` the images that it stores by id.

        Returns the number of stored images that were dropped.
        """
        request = pb.FlushCachesRequest(stored_images=stored_images)
        return int((self._ask("FlushCaches", request, timeout)).deleted_images)

    def set_log_level(
        self, level: LogLevel, module: str = "", *, timeout: float | None = None
    ) -> LogLevel | None:
        """Changes the log level of the server, or of one ``module`` like "kestrel_engine.steps.loop", until it stops.

        Returns the level before, or None if the module had no level of its own.
        """
        if level not in LEVELS:
            raise InvalidRequestError(f"level={level!r}: must be one of {', '.join(LEVELS)}")
        request = pb.SetLogLevelRequest(level=LEVELS[level], module=module)
        return read_level((self._ask("SetLogLevel", request, timeout)).previous_level)

    def statistics(self, *, timeout: float | None = None) -> ServerStatistics:
        """Returns the present state of the server, and counts since its start."""
        request = pb.GetStatisticsRequest()
        return read_statistics(self._ask("GetStatistics", request, timeout))

    def start_profile(
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
        request = pb.StartProfileRequest(
            duration_ms=milliseconds(seconds),
            steps=whole("steps", steps),
            python_functions=python_functions,
        )
        return str((self._ask("StartProfile", request, timeout)).file)

    def stop_profile(self, *, timeout: float | None = None) -> Profile:
        """Ends the running profile and returns it.

        Waits for a profile that is about to end by itself. If none runs, returns the last one.
        """
        return read_profile(self._ask("StopProfile", pb.StopProfileRequest(), timeout))

    def start_capture(
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
        request = pb.StartCaptureRequest(requests=whole("requests", requests), images=images)
        return int((self._ask("StartCapture", request, timeout)).requests)

    def stop_capture(self, *, timeout: float | None = None) -> Captures:
        """Stops the capture. Returns the files that were written since its start."""
        response = self._ask("StopCapture", pb.StopCaptureRequest(), timeout)
        return Captures(files=tuple(response.files), lost=response.lost)

    def load_model(
        self,
        source: str,
        settings: Mapping[str, str] | None = None,
        *,
        make_default: bool = False,
        timeout: float | None = None,
    ) -> Stream[LoadedModel, LoadingProgress]:
        """Loads another model. ``source``: as ``--model`` names it. ``settings``: the model's own, by the names of
        their flags, like {"device": "cuda:1"}; other settings are those of the server.

        The stream gives the progress and ends with the loaded model. Loading continues if the stream is closed.
        ``make_default``: whether the model answers requests that name none, once it is loaded. Raises
        FailedPreconditionError if it cannot be loaded.
        """

        def prepared() -> PreparedCall[LoadedModel]:
            request = build(
                pb.LoadModelRequest, source=source, settings=settings, make_default=make_default
            )
            method = Method(AdminServiceStub, "", stream="LoadModel")
            reading = Reading(read_loaded, read_progress)
            return prepare_call(self._connection, method, request, reading, timeout=timeout)

        return self._channel.stream(prepared)

    def unload_model(
        self, name: str, *, grace_s: float | None = None, timeout: float | None = None
    ) -> None:
        """Unloads a model that is not the default. Returns when its running requests have ended, after ``grace_s``
        seconds at the latest (default: the server's), and its memory is free."""
        request = pb.UnloadModelRequest(model=name, grace_ms=milliseconds(grace_s))
        self._ask("UnloadModel", request, timeout)

    def set_default_model(self, name: str, *, timeout: float | None = None) -> str:
        """Makes a loaded model the default. Returns the name of the default before."""
        request = pb.SetDefaultModelRequest(model=name)
        return str((self._ask("SetDefaultModel", request, timeout)).previous_model)

    def load_adapter(
        self, name: str, *, model: str | None = None, timeout: float | None = None
    ) -> Adapter:
        """Loads an adapter of ``model`` (default: the default model), so that its first request does not wait for it.

        Returns the adapter with the bytes that it takes. It stays until its memory is needed for another one. Raises
        what a request with ``adapter=name`` raises.
        """
        request = pb.LoadAdapterRequest(adapter=name, model=model)
        return read_adapter((self._ask("LoadAdapter", request, timeout)).adapter)

    def unload_adapter(
        self, name: str, *, model: str | None = None, timeout: float | None = None
    ) -> bool:
        """Drops an adapter of ``model`` (default: the default model) from memory. Running requests keep it, and a later
        request loads it again. Returns whether it was loaded."""
        request = pb.UnloadAdapterRequest(adapter=name, model=model)
        return bool((self._ask("UnloadAdapter", request, timeout)).was_loaded)

    def _ask(self, name: str, request: Message, timeout: float | None) -> Any:
        return self._channel.ask(Method(AdminServiceStub, name), request, timeout)
