"""WorkerTask: what one worker is to do, and its environment; made from the settings of the whole server."""

from __future__ import annotations

import dataclasses
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from kestrel_engine import RuntimeConfig

from ..settings.addresses import unix_path
from ..settings.http import HttpConfig
from ..settings.server import ServerConfig
from ..settings.sources import SettingsError
from ..settings.workers import address_of
from .devices import environment_for, worker_devices

_NOT_THEIRS = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
"""What systemd tells the supervisor alone."""
_RESOURCE = "OTEL_RESOURCE_ATTRIBUTES"
_INSTANCE = "service.instance.id"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    """Crosses to the worker's process as it is, but for ``environ``, in which that is started."""

    index: int
    server: ServerConfig
    runtime: RuntimeConfig
    device: str
    """As this process numbers it; the worker sees its own alone, as the first."""
    environ: Mapping[str, str] = field(repr=False)


def shared_addresses(server: ServerConfig) -> tuple[str, ...]:
    """The addresses that all workers listen on. Raises SettingsError where there can't be any."""
    count = server.workers.count
    if sys.platform != "linux":
        raise SettingsError(
            f"--workers={count}: only Linux spreads one port's connections over processes"
        )
    shared = tuple(address for address in server.listen if unix_path(address) is None)
    if not shared:
        raise SettingsError(
            f"--workers={count}: needs a TCP address (--listen): a unix socket can't be shared by processes; "
            "--worker-listen gives each worker one of its own"
        )
    return shared


def shared_http_addresses(server: ServerConfig) -> tuple[str, ...]:
    """The addresses that all workers listen on for HTTP."""
    return tuple(each for each in server.http.http_listen if unix_path(each) is None)


def plan_workers(
    server: ServerConfig,
    runtime: RuntimeConfig,
    shared: tuple[str, ...],
    environ: Mapping[str, str],
    shared_http: tuple[str, ...] = (),
) -> tuple[WorkerTask, ...]:
    """``shared`` and ``shared_http``: with their ports. Raises SettingsError."""
    devices = worker_devices(server.workers, runtime.device)
    threads = max(1, _processors() // len(devices))
    return tuple(
        WorkerTask(
            index=index,
            server=_server_of(server, shared, shared_http, index),
            runtime=_runtime_of(runtime, device, threads),
            device=device,
            environ=_environ_of(index, device, environ),
        )
        for index, device in enumerate(devices)
    )


def _server_of(
    server: ServerConfig, shared: tuple[str, ...], shared_http: tuple[str, ...], index: int
) -> ServerConfig:
    own = server.workers.own_address(index)
    # A unix socket that was asked for beside the shared addresses can only be one worker's.
    unix = [address for address in server.listen if unix_path(address) is not None]
    telemetry = server.telemetry
    if telemetry.prometheus is not None:
        address = address_of(telemetry.prometheus, index)
        telemetry = dataclasses.replace(telemetry, prometheus=address, worker=index)
    return dataclasses.replace(
        server,
        listen=(*([own] if own is not None else []), *(unix if index == 0 else [])),
        shared_listen=shared,
        telemetry=telemetry,
        http=_http_of(server.http, shared_http, index),
    )


def _http_of(http: HttpConfig, shared: tuple[str, ...], index: int) -> HttpConfig:
    """A unix socket can only be one worker's."""
    unix = [each for each in http.http_listen if unix_path(each) is not None]
    listen = (*shared, *(unix if index == 0 else []))
    return dataclasses.replace(http, http_listen=listen, is_shared=True)


def _runtime_of(runtime: RuntimeConfig, device: str, threads: int) -> RuntimeConfig:
    """``threads``: a worker's share of the processors, where the settings leave it to us."""
    cuda = device != "cpu"
    chosen = runtime.sizes(cuda=cuda).preprocess_threads
    if runtime.preprocess_threads is None and cuda:
        chosen = max(2, min(chosen, threads - 2))
    return dataclasses.replace(
        runtime,
        device="cuda" if cuda else "cpu",
        cpu_threads=runtime.cpu_threads or threads,
        preprocess_threads=chosen,
    )


def _environ_of(index: int, device: str, environ: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if name not in _NOT_THEIRS}
    # Each is an instance of its own to whoever gathers telemetry; of attributes named twice the last holds.
    given = environ.get(_RESOURCE, "")
    attributes = dict(part.split("=", 1) for part in given.split(",") if "=" in part)
    instance = attributes.get(_INSTANCE, socket.gethostname())
    own = f"{_INSTANCE}={instance}-{index},kestrel.worker={index}"
    return {
        **kept,
        _RESOURCE: f"{given},{own}" if given else own,
        **environment_for(device, environ),
    }


def _processors() -> int:
    """Those that we may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
