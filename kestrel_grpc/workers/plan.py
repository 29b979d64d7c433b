"""WorkerTask: the configuration, device and environment of one worker, made from the settings of the whole server. This
module does not use torch, which the supervisor does not import."""

from __future__ import annotations

import ctypes
import dataclasses
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kestrel_engine import RuntimeConfig, processors

from ..settings.addresses import unix_path
from ..settings.budgets import token_budget
from ..settings.http import HttpConfig
from ..settings.server import ServerConfig
from ..settings.sources import SettingsError
from ..settings.workers import WorkersConfig, address_of

VISIBLE = "CUDA_VISIBLE_DEVICES"
_SUPERVISOR_ONLY = ("NOTIFY_SOCKET", "WATCHDOG_PID", "WATCHDOG_USEC")
"""Variables with which systemd addresses the supervisor. Workers do not get them."""
_RESOURCE = "OTEL_RESOURCE_ATTRIBUTES"
_INSTANCE = "service.instance.id"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTask:
    """The task of one worker. All fields but ``environ`` are sent to the worker; ``environ`` is its environment."""

    index: int
    server: ServerConfig
    runtime: RuntimeConfig
    device: str
    """The device, as the supervisor numbers devices. The worker sees only this device, as its first."""
    environ: Mapping[str, str] = field(repr=False)


def with_ledger(server: ServerConfig, folder: str) -> ServerConfig:
    """The settings with a file of budgets, which the workers share: in ``folder`` if none is named."""
    budget = server.security.calls.token_budget
    if token_budget(budget).file:
        return server
    if "," in folder:
        raise SettingsError(f"TMPDIR: the workers share a file in {folder}; its name has a comma")
    named = ",".join(filter(None, (budget, f"file={folder}/budgets")))
    calls = dataclasses.replace(server.security.calls, token_budget=named)
    security = dataclasses.replace(server.security, calls=calls)
    return dataclasses.replace(server, security=security)


def shared_addresses(server: ServerConfig) -> tuple[str, ...]:
    """The addresses that all workers listen on. Raises SettingsError if the system or --listen allows none."""
    count = server.workers.count
    if sys.platform != "linux":
        raise SettingsError(
            f"--workers={count}: only Linux distributes the connections of a port over processes"
        )
    shared = tuple(address for address in server.listen if unix_path(address) is None)
    if not shared:
        raise SettingsError(
            f"--workers={count}: needs a TCP address in --listen, because processes cannot share a unix socket; "
            "--worker-listen gives each worker its own"
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
    front: Path | None = None,
) -> tuple[WorkerTask, ...]:
    """The tasks of all workers. ``shared`` and ``shared_http``: the shared addresses with their ports. ``front``: the
    folder of the front's sockets; None without a front. Raises SettingsError."""
    devices = worker_devices(server.workers, runtime.device)
    threads = max(1, processors() // len(devices))
    return tuple(
        WorkerTask(
            index=index,
            server=_worker_server(server, shared, shared_http, index, front),
            runtime=_worker_runtime(runtime, device, threads),
            device=device,
            environ=_worker_environ(index, device, environ),
        )
        for index, device in enumerate(devices)
    )


def _worker_server(
    server: ServerConfig,
    shared: tuple[str, ...],
    shared_http: tuple[str, ...],
    index: int,
    front: Path | None,
) -> ServerConfig:
    own = server.workers.own_address(index)
    # Only one worker can listen on a unix socket of --listen: the first.
    unix = [address for address in server.listen if unix_path(address) is not None]
    telemetry = dataclasses.replace(server.telemetry, worker=index)
    if telemetry.prometheus is not None:
        address = address_of(telemetry.prometheus, index)
        telemetry = dataclasses.replace(telemetry, prometheus=address)
    return dataclasses.replace(
        server,
        listen=(*([own] if own is not None else []), *(unix if index == 0 else [])),
        shared_listen=shared if front is None else (),
        front_listen=None if front is None else f"unix:{front}/{index}",
        telemetry=telemetry,
        http=_worker_http(server.http, shared_http, index),
    )


def _worker_http(http: HttpConfig, shared: tuple[str, ...], index: int) -> HttpConfig:
    """The HTTP addresses of one worker. Only the first worker can listen on unix sockets."""
    unix = [each for each in http.http_listen if unix_path(each) is not None]
    listen = (*shared, *(unix if index == 0 else []))
    return dataclasses.replace(http, http_listen=listen, is_shared=True)


def _worker_runtime(runtime: RuntimeConfig, device: str, threads: int) -> RuntimeConfig:
    """The engine's configuration for one worker. ``threads``: the worker's share of the processors, which applies to
    numbers of threads that are not set."""
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


def _worker_environ(index: int, device: str, environ: Mapping[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in environ.items() if name not in _SUPERVISOR_ONLY}
    # Telemetry treats each worker as an instance. If an attribute is named twice, the last value holds.
    attributes_text = environ.get(_RESOURCE, "")
    attributes = dict(part.split("=", 1) for part in attributes_text.split(",") if "=" in part)
    instance = attributes.get(_INSTANCE, socket.gethostname())
    own = f"{_INSTANCE}={instance}-{index},kestrel.worker={index}"
    return {
        **kept,
        _RESOURCE: f"{attributes_text},{own}" if attributes_text else own,
        **environment_for(device, environ),
    }


def worker_devices(config: WorkersConfig, device: str) -> tuple[str, ...]:
    """The device of each worker, as this process numbers devices. ``device``: of --device. Raises SettingsError."""
    if config.devices:
        return config.devices
    kind, _, number = device.partition(":")
    if number:
        raise SettingsError(
            f"--device={device}: {config.count} workers need one device each; set --device {kind}, or name the devices "
            "with --devices"
        )
    if kind == "cpu":
        return ("cpu",) * config.count
    found = count_cuda_devices()
    if kind == "auto" and not found:
        return ("cpu",) * config.count
    if found < config.count:
        raise SettingsError(
            f"--workers={config.count}: each worker needs its own CUDA device; this machine has {found}"
        )
    return tuple(f"cuda:{index}" for index in range(config.count))


def count_cuda_devices() -> int:
    """The number of devices that the driver reports, limited by CUDA_VISIBLE_DEVICES; 0 without a driver."""
    count = ctypes.c_int(0)
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value


def environment_for(device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that make ``device`` the only visible device of a process. Raises SettingsError.

    Libraries that use the first device then use the right one, and create no contexts on other devices.
    """
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return {}
    visible = environ.get(VISIBLE)
    if visible is None:
        return {VISIBLE: number}
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if int(number) >= len(names):
        raise SettingsError(f"{device}: {VISIBLE}={visible!r} allows only {len(names)} devices")
    return {VISIBLE: names[int(number)]}
