"""Supervisor: starts the workers, waits until all are ready, starts anew those that end, and ends them all.

Serves nothing itself and loads neither grpc nor torch. It owns which workers there are; connections are the kernel's to
spread, requests the workers' own.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Sequence

from kestrel_engine import ConfigError, RuntimeConfig

from ..logs.records import tell_lifecycle
from ..process.ready_line import say_ready
from ..process.systemd import Notifier
from ..settings.addresses import close_address
from ..settings.flags import SettingsError
from ..settings.server import ServerConfig
from .child import Child
from .line import Ready
from .plan import WorkerTask, plan_workers, shared_addresses, shared_http_addresses
from .port import HeldPorts
from .restarts import WINDOW_S, Restarts

logger = logging.getLogger(__name__)

BEAT_S = 1.0
SILENT_BEATS = 30
"""A worker whose event loop says nothing for so many beats hangs, and is killed. Beats instead of time: where all of us
were stopped, nobody has been silent."""
PATIENCE_S = 60.0
"""How much longer than the grace period workers may take to end."""
START_GRACE_S = 5.0
"""For workers that still load when one of them can't."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_DRAINED = (0, -signal.SIGTERM, -signal.SIGINT)
"""How a worker ends that was told to, the last two if it had hardly begun."""


class WorkersError(Exception):
    """Workers can't be started, or not kept running; the message is one line."""


async def supervise(config: ServerConfig, runtime: RuntimeConfig) -> int:
    """Serves by workers until a signal; returns the exit status. Raises SettingsError, AddressError, ConfigError and
    WorkersError."""
    shared, http = shared_addresses(config), shared_http_addresses(config)
    with HeldPorts(shared) as ports, HeldPorts(http) as http_ports:
        tasks = plan_workers(config, runtime, ports.addresses, os.environ, http_ports.addresses)
        return await Supervisor(tasks, config, ports.addresses).run()


class Supervisor:
    """``run`` is its life."""

    def __init__(
        self, tasks: Sequence[WorkerTask], config: ServerConfig, addresses: tuple[str, ...]
    ) -> None:
        self._tasks, self._config, self._addresses = tasks, config, addresses
        self._children: dict[int, Child] = {}
        """Those whose process lives, by index."""
        self._stopping = asyncio.Event()
        self._all_ready = asyncio.Event()
        """All have been ready at one time."""
        self._orderly = True
        """All workers ended as they were told to."""
        self._began = time.monotonic()
        self._systemd = Notifier(os.environ)

    async def run(self) -> int:
        """Returns the exit status. Raises ConfigError, SettingsError, WorkersError."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        logger.info("starting %d workers on %s", len(self._tasks), ", ".join(self._addresses))
        keepers = [asyncio.create_task(self._keep(task)) for task in self._tasks]
        clocks = [
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._systemd.keep_alive(lambda: False)),
        ]
        try:
            await asyncio.gather(*keepers)
        except (ConfigError, SettingsError, WorkersError):
            self._stop(self._config.grace_s if self._all_ready.is_set() else START_GRACE_S)
            await asyncio.gather(*keepers, return_exceptions=True)
            raise
        finally:
            for clock in clocks:
                clock.cancel()
            self._remove_sockets()
        return 0 if self._orderly else 1

    async def _keep(self, task: WorkerTask) -> None:
        """Keeps one worker running until all are to stop. Raises ConfigError, SettingsError, WorkersError."""
        restarts = Restarts(self._config.workers.restarts)
        while not self._stopping.is_set():
            child = await self._start(task)
            status = await child.wait()
            del self._children[task.index]
            if self._stopping.is_set():
                if status not in _DRAINED:
                    self._orderly = False
                    # One error ends a start: what stops the other workers then is rarely news.
                    level = logging.ERROR if self._all_ready.is_set() else logging.INFO
                    how = child.how_it_ended(status)
                    logger.log(level, "%s, pid %d: %s", child.name, child.pid, how)
                return
            if not self._all_ready.is_set():
                _raise_start_failure(child, status)
            if status == 0:  # Somebody drained it, to have it anew.
                tell_lifecycle("worker_ended", worker=task.index, pid=child.pid)
                continue
            how = child.how_it_ended(status)
            delay_s = restarts.next_delay(time.monotonic())
            tell_lifecycle("worker_ended", worker=task.index, pid=child.pid, error=how)
            if delay_s is None:
                raise WorkersError(
                    f"{child.name} ended {self._config.workers.restarts + 1} times within "
                    f"{WINDOW_S / 60:g} minutes, at last: {how}"
                )
            self._tell_status()
            logger.info("%s is started anew in %g s", child.name, delay_s)
            try:
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            except TimeoutError:
                continue

    async def _start(self, task: WorkerTask) -> Child:
        try:
            child = await Child.start(task, self._on_ready)
        except OSError as error:
            raise WorkersError(
                f"worker {task.index} can't be started: {error.strerror or error}"
            ) from None
        self._children[task.index] = child
        if self._stopping.is_set():  # Meanwhile.
            child.drain()
        return child

    def _on_ready(self, child: Child, ready: Ready) -> None:
        tell_lifecycle(
            "worker_ready",
            worker=child.task.index,
            pid=child.pid,
            device=child.task.device,
            load_s=round(ready.load_s, 3),
            addresses=ready.addresses,
        )
        if self._all_ready.is_set():
            self._tell_status()
        elif self._num_ready == len(self._tasks):
            self._all_ready.set()
            served = f"{ready.model} on {_named(self._tasks)} ({ready.dtype})"
            say_ready(served, self._addresses, time.monotonic() - self._began)
            self._systemd.tell("READY=1", f"STATUS={served}")

    @property
    def _num_ready(self) -> int:
        return sum(child.ready is not None for child in self._children.values())

    def _tell_status(self) -> None:
        self._systemd.tell(f"STATUS={self._num_ready} of {len(self._tasks)} workers serve")

    async def _watch(self) -> None:
        """Kills workers whose event loop hangs."""
        while True:
            await asyncio.sleep(BEAT_S)
            for child in self._children.values():
                if child.ready is None:  # Loading may hold the interpreter for long.
                    continue
                child.silent_for += 1
                if child.silent_for == SILENT_BEATS:
                    logger.error(
                        "%s, pid %d, has been silent for %g s: killed",
                        child.name,
                        child.pid,
                        SILENT_BEATS * BEAT_S,
                    )
                    child.kill()

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stopping.is_set():
            logger.info("%s: stopping; once more ends it at once", number.name)
            self._systemd.tell("STOPPING=1", "STATUS=requests that run may end")
            self._stop(self._config.grace_s, number)
            return
        logger.warning("%s again: ended at once", number.name)
        self._kill()
        self._remove_sockets()
        logging.shutdown()
        os._exit(128 + number)

    def _stop(self, grace_s: float, number: signal.Signals = signal.SIGTERM) -> None:
        """Passes the signal on, so that workers end their requests within ``grace_s``, which they know; then kills what
        is left."""
        self._stopping.set()
        for child in self._children.values():
            child.drain(number)
        if self._all_ready.is_set():
            grace_s += self._config.leaving_s + PATIENCE_S
        asyncio.get_running_loop().call_later(grace_s, self._kill)

    def _kill(self) -> None:
        for child in self._children.values():
            child.kill()

    def _remove_sockets(self) -> None:
        """Of workers that could not do it."""
        for task in self._tasks:
            for address in task.server.listen:
                close_address(address)


def _raise_start_failure(child: Child, status: int) -> None:
    """Why the server can't start."""
    failure = child.failure
    if failure is not None and failure.field:
        raise ConfigError(failure.field, failure.value, f"{failure.message} ({child.name})")
    if failure is not None and failure.setting:
        raise SettingsError(failure.message)
    how = child.how_it_ended(status)
    raise WorkersError(
        f"{child.name} failed: {how}"
        if failure is not None
        else f"{child.name} ended while loading: {how}"
    )


def _named(tasks: Sequence[WorkerTask]) -> str:
    """Their devices."""
    devices = list(dict.fromkeys(task.device for task in tasks))
    counts = [sum(task.device == device for task in tasks) for device in devices]
    return ", ".join(
        device if count == 1 else f"{count} x {device}"
        for device, count in zip(devices, counts, strict=True)
    )
