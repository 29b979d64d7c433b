"""Supervisor: starts the workers, reports when all are ready, restarts those that end, and stops them all.

The supervisor serves no requests and imports neither grpc nor torch. Its front distributes calls to the workers, or the
kernel connections.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kestrel_engine import ConfigError, RuntimeConfig, clock, processors

from ..logs.records import log_lifecycle
from ..process.ready_line import print_ready
from ..process.systemd import Notifier
from ..security.identity.tls_files import TlsError
from ..security.listening import check_exposure
from ..settings.addresses import close_address, parse_address
from ..settings.flags import SettingsError
from ..settings.server import ServerConfig
from ..settings.workers import MOST_WORKERS
from .child import Child
from .forks import WorkerTemplate, ending
from .front.bootstrap import FrontPlan
from .front.front import Front, check_installed, is_installed
from .line import Ready
from .plan import WorkerTask, plan_workers, shared_addresses, shared_http_addresses, with_ledger
from .port import HeldPorts
from .restarts import Restarts, WorkersError, gave_up

logger = logging.getLogger(__name__)

BEAT_S = 1.0
SILENT_BEATS = 30
"""A worker that sends no message for this many beats hangs, and is killed. Beats are counted instead of seconds, so
that a pause of all processes (SIGSTOP, suspend) does not count."""
PATIENCE_S = 60.0
"""Seconds that workers may take to end in addition to the grace period."""
START_GRACE_S = 5.0
"""Seconds that loading workers have to end after one worker has failed to start."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_DRAINED = (0, -signal.SIGTERM, -signal.SIGINT, None)
"""Exit statuses of a worker that was asked to stop. A worker that has hardly started ends by the signal. None: not
known, because the template was killed."""


async def supervise(config: ServerConfig, runtime: RuntimeConfig) -> int:
    """Serves with workers until a signal arrives. Returns the exit status.

    Raises SettingsError, AddressError, ConfigError and WorkersError.
    """
    shared, http = shared_addresses(config), shared_http_addresses(config)
    has_front = config.workers.spread == "calls" or (
        config.workers.spread is None and is_installed()
    )
    if has_front:
        check_installed()
        check_exposure(shared, config.security)
    with ExitStack() as stack:
        ports, http_ports = (stack.enter_context(HeldPorts(each)) for each in (shared, http))
        # Only this user may open the folder, so only the front can connect to the workers' sockets in it.
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="kestrel-"))
        front, folder = None, Path(name) if has_front else None
        config = with_ledger(config, name)
        if folder is not None:
            _check_length(folder)
        tasks = plan_workers(
            config, runtime, ports.addresses, os.environ, http_ports.addresses, folder
        )
        if folder is not None:
            sockets = [str(folder / str(task.index)) for task in tasks]
            plan = FrontPlan(folder=folder, sockets=ports.sockets, workers=sockets, server=config)
            try:
                front = Front(plan, processors())
            except TlsError as error:
                raise WorkersError(str(error)) from None
        return await Supervisor(tasks, config, ports.addresses, front).run()


def _check_length(folder: Path) -> None:
    """Raises SettingsError if the sockets of the front cannot be in ``folder``."""
    try:
        parse_address(f"unix:{folder}/{MOST_WORKERS}")
    except ValueError as error:
        raise SettingsError(
            f"TMPDIR: the front keeps its sockets in {folder}, and {error}; set a shorter TMPDIR"
        ) from None


class Supervisor:
    """Runs the workers of ``tasks``. Call ``run`` once."""

    def __init__(
        self,
        tasks: Sequence[WorkerTask],
        config: ServerConfig,
        addresses: tuple[str, ...],
        front: Front | None,
    ) -> None:
        self._tasks, self._config, self._addresses = tasks, config, addresses
        self._front = front
        self._template = _template_for(tasks)
        self._announcing: asyncio.Task[None] | None = None
        self._children: dict[int, Child] = {}
        """The running workers, by index."""
        self._stopping = asyncio.Event()
        self._all_ready = asyncio.Event()
        """Set once all workers have been ready at the same time."""
        self._orderly = True
        """Whether all workers have ended with a status in _DRAINED."""
        self._began = clock.now()
        self._systemd = Notifier(os.environ)

    async def run(self) -> int:
        """Runs until a signal arrives. Returns the exit status. Raises ConfigError, SettingsError, WorkersError."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        logger.info("starting %d workers on %s", len(self._tasks), ", ".join(self._addresses))
        keepers = [asyncio.create_task(self._keep(task)) for task in self._tasks]
        timers = [
            asyncio.create_task(self._keep_template()),
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._systemd.keep_alive(lambda: False)),
        ]
        try:
            await self._until_ended(keepers)
        except (ConfigError, SettingsError, WorkersError):
            self._stop(self._config.grace_s if self._all_ready.is_set() else START_GRACE_S)
            await asyncio.gather(*keepers, return_exceptions=True)
            raise
        finally:
            if self._front is not None:
                await self._front.stop()
            for timer in timers if self._announcing is None else (*timers, self._announcing):
                timer.cancel()
            self._template.stop()
            self._remove_sockets()
        return 0 if self._orderly else 1

    async def _until_ended(self, keepers: Sequence[asyncio.Task[None]]) -> None:
        """Waits for the end of all workers. Raises their errors, and those of the front."""
        workers = asyncio.ensure_future(asyncio.gather(*keepers))
        if self._front is None:
            await workers
            return
        front = asyncio.create_task(self._front.run())
        both: set[asyncio.Future[Any]] = {workers, front}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if front.done():
            front.result()  # Raises.
        await workers
        await self._front.stop()
        await front

    async def _keep(self, task: WorkerTask) -> None:
        """Keeps one worker running until the server stops. Raises ConfigError, SettingsError, WorkersError."""
        restarts = Restarts(self._config.workers.restarts)
        while not self._stopping.is_set():
            child = await self._start(task)
            if child is None:
                return
            status = await child.wait()
            del self._children[task.index]
            if self._stopping.is_set():
                if status not in _DRAINED:
                    self._orderly = False
                    # A start that fails reports one error. The ends of the other workers are rarely of interest.
                    level = logging.ERROR if self._all_ready.is_set() else logging.INFO
                    how = child.how_it_ended(status)
                    logger.log(level, "%s, pid %d: %s", child.name, child.pid, how)
                return
            if not self._all_ready.is_set():
                _raise_start_failure(child, status)
            if status == 0:  # An administrator drained the worker, which restarts it.
                log_lifecycle("worker_ended", worker=task.index, pid=child.pid)
                continue
            how = child.how_it_ended(status)
            delay_s = restarts.next_delay(clock.now())
            log_lifecycle("worker_ended", worker=task.index, pid=child.pid, error=how)
            if delay_s is None:
                raise WorkersError(gave_up(child.name, restarts, how))
            self._send_status()
            logger.info("restarting %s in %g s", child.name, delay_s)
            try:
                await asyncio.wait_for(self._stopping.wait(), delay_s)
            except TimeoutError:
                continue

    async def _start(self, task: WorkerTask) -> Child | None:
        """Returns None if the server stops meanwhile. Raises WorkersError."""
        starting = asyncio.create_task(Child.start(task, self._template, self._on_ready))
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not starting.done():  # The template imports, or waits for a processor.
            starting.cancel()
            return None
        try:
            child = starting.result()
        except OSError as error:
            raise WorkersError(
                f"worker {task.index} cannot be started: {error.strerror or error}"
            ) from None
        self._children[task.index] = child
        if self._stopping.is_set():  # The signal arrived during the start.
            child.drain()
        return child

    async def _keep_template(self) -> None:
        """Starts the template again when it has ended, before a worker needs it."""
        restarts = Restarts(self._config.workers.restarts)
        while True:
            self._template.start()
            status = await asyncio.to_thread(self._template.wait)
            log_lifecycle("template_ended", error=ending(status))
            delay_s = restarts.next_delay(clock.now())
            if delay_s is None:  # The next worker that starts tries it again.
                return
            await asyncio.sleep(delay_s)

    def _on_ready(self, child: Child, ready: Ready) -> None:
        self._children[child.task.index] = child  # Its start may not have been noticed yet.
        log_lifecycle(
            "worker_ready",
            worker=child.task.index,
            pid=child.pid,
            device=child.task.device,
            load_s=round(ready.load_s, 3),
            addresses=ready.addresses,
        )
        if self._all_ready.is_set():
            self._send_status()
        elif self._num_ready == len(self._tasks):
            self._all_ready.set()
            self._announcing = asyncio.create_task(self._announce(ready))

    async def _announce(self, ready: Ready) -> None:
        """Reports that all workers are ready, once the front has found them."""
        if self._front is not None:
            await self._front.until_sees(len(self._tasks))
        served = f"{ready.model} on {_device_names(self._tasks)} ({ready.dtype})"
        print_ready(served, self._addresses, clock.now() - self._began)
        self._systemd.send("READY=1", f"STATUS={served}")

    @property
    def _num_ready(self) -> int:
        return sum(child.ready is not None for child in self._children.values())

    def _send_status(self) -> None:
        self._systemd.send(f"STATUS={self._num_ready} of {len(self._tasks)} workers serve")

    async def _watch(self) -> None:
        """Kills workers whose event loop hangs."""
        while True:
            await asyncio.sleep(BEAT_S)
            for child in self._children.values():
                if child.ready is None:  # Loading may hold the interpreter lock for a long time.
                    continue
                child.silent_for += 1
                if child.silent_for == SILENT_BEATS:
                    logger.error(
                        "%s, pid %d, has sent nothing for %g s: killed",
                        child.name,
                        child.pid,
                        SILENT_BEATS * BEAT_S,
                    )
                    child.kill()

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stopping.is_set():
            logger.info("%s: stopping; a second signal ends the server at once", number.name)
            self._systemd.send("STOPPING=1", "STATUS=waiting for running requests")
            self._stop(self._config.grace_s, number)
            return
        logger.warning("%s again: ending at once", number.name)
        self._kill()
        if self._front is not None:
            self._front.kill()
        self._remove_sockets()
        logging.shutdown()
        os._exit(128 + number)

    def _stop(self, grace_s: float, number: signal.Signals = signal.SIGTERM) -> None:
        """Passes the signal to the workers, which then end within their grace period. Kills those that do not.

        ``grace_s``: the grace period, which the workers know too.
        """
        self._stopping.set()
        for child in self._children.values():
            child.drain(number)
        if self._all_ready.is_set():
            grace_s += self._config.leaving_s + PATIENCE_S
        asyncio.get_running_loop().call_later(grace_s, self._kill)

    def _kill(self) -> None:
        self._orderly = self._orderly and not self._children
        for child in self._children.values():
            child.kill()

    def _remove_sockets(self) -> None:
        """Removes the unix sockets that killed workers have left behind."""
        for task in self._tasks:
            for address in task.server.listen:
                close_address(address)


def _template_for(tasks: Sequence[WorkerTask]) -> WorkerTemplate:
    shared = set.intersection(*(set(task.environ.items()) for task in tasks))
    cuda = any(task.device != "cpu" for task in tasks)
    return WorkerTemplate(dict(shared), "cuda" if cuda else "cpu")


def _raise_start_failure(child: Child, status: int | None) -> None:
    """Raises the error of a start that failed because of ``child``."""
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


def _device_names(tasks: Sequence[WorkerTask]) -> str:
    """The devices of all workers, such as ``2 x cpu``."""
    counts = Counter(task.device for task in tasks)
    return ", ".join(each if n == 1 else f"{n} x {each}" for each, n in counts.items())
