"""ServerProcess: one ``kestrel-grpc serve`` as a child process, from its start to its end.

The process ends with its parent: when the pipe between them closes, it drains and ends (cli/cluster/server_process.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kestrel_client import AsyncKestrelClient, KestrelError

from ..settings.addresses import unix_path
from ..workers.forks import ending
from .plan import ServerTask, server_address
from .scaling import KV_USE, QUEUE_WAIT_S, UTILIZATION

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "kestrel_grpc.cli.cluster.server_process")
_CALL_S, _HEALTH_S = 5.0, 2.0
_MOST_WAIT_S = 60.0
"""The wait in the queue that is reported if requests wait and none ends."""
_KEY = "KESTREL_API_KEY"
_RESOURCE = "OTEL_RESOURCE_ATTRIBUTES"


class ServerError(Exception):
    """The server cannot be started, or has ended. The message is one line."""


class ServerProcess:
    """Create it with ``start``. ``address``: at which clients reach it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        address: str,
        client: AsyncKestrelClient,
        stack: contextlib.ExitStack,
    ) -> None:
        self.address, self.pid = address, process.pid
        self._process, self._client, self._stack = process, client, stack

    @classmethod
    async def start(
        cls, task: ServerTask, host: str, name: str, environ: Mapping[str, str] = os.environ
    ) -> ServerProcess:
        """Starts a server at ``host`` and waits until it has loaded its model. ``name``: tells it from others in
        telemetry. Raises ServerError."""
        missing = [each for each in task.secrets if not environ.get(each)]
        if missing:
            raise ServerError(
                f"{' and '.join(missing)}: not set on the node {host}; set it before ray start, because secrets are "
                "not sent to nodes"
            )
        with contextlib.ExitStack() as stack:
            # Only this user may open the folder, so only this process reaches the socket in it.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kestrel-")))
            (file := folder / "kestrel.toml").write_text(task.settings)
            own = f"unix:{folder}/socket"
            read_end, write_end = os.pipe()
            stack.callback(os.close, write_end)
            variables = _variables(environ, task, name)
            try:
                process = await asyncio.create_subprocess_exec(
                    *(*COMMAND, str(read_end), "--config", str(file)),
                    *("--listen", server_address(host, task.port), "--listen", own),
                    *("--drain-delay", f"{task.drain_delay_s:g}"),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    pass_fds=(read_end,),
                    env=variables,
                    start_new_session=True,
                )
            except OSError as error:
                raise ServerError(f"cannot be started: {error.strerror or error}") from None
            finally:
                os.close(read_end)
            stack.callback(_kill, process)
            address = await _ready_address(process, host)
            client = AsyncKestrelClient(own, token=variables.get(_KEY), timeout=_CALL_S)
            return cls(process, address, client, stack.pop_all())

    def has_ended(self) -> str | None:
        """How the process ended; None while it runs."""
        return None if self._process.returncode is None else ending(self._process.returncode)

    async def is_serving(self) -> bool:
        """Whether it takes calls. False also if it does not answer."""
        with contextlib.suppress(KestrelError):
            await self._client.wait_ready(_HEALTH_S)
            return True
        return False

    async def load(self) -> dict[str, float]:
        """The figures that LoadPolicy needs. Raises KestrelError."""
        load = await self._client.server_load()
        waiting, rate = load.waiting_requests, load.requests_per_second
        # Little's law: those that wait, at the rate at which they end.
        wait_s = 0.0 if not waiting else min(waiting / rate if rate else _MOST_WAIT_S, _MOST_WAIT_S)
        used = load.pages - load.free_pages - load.cached_pages
        return {
            UTILIZATION: load.utilization,
            QUEUE_WAIT_S: wait_s,
            KV_USE: max(0.0, used / load.pages) if load.pages else 0.0,
        }

    async def stop(self, within_s: float) -> None:
        """Lets running requests end. Kills the process if it takes longer than ``within_s``. Idempotent."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self._process.wait(), within_s)
            except TimeoutError:
                logger.error(
                    "the server, pid %d, did not end within %g s: killed", self.pid, within_s
                )
                _kill(self._process)
                await self._process.wait()
        await self._client.aclose()
        self._stack.close()


async def _ready_address(process: asyncio.subprocess.Process, host: str) -> str:
    """The address in the line that the server prints when it is ready. Raises ServerError."""
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode(errors="replace")
    if not line:
        how = ending(await process.wait())
        raise ServerError(
            f"the server did not start: {how}; its log, in Ray's log of this replica, says why"
        )
    listed = line.partition("listening on ")[2].partition(", loaded in")[0].split(", ")
    (address,) = (each for each in listed if unix_path(each) is None)
    return address


def _variables(environ: Mapping[str, str], task: ServerTask, name: str) -> dict[str, str]:
    """The settings are decided already: variables of the node do not change them, except secrets."""
    kept = {k: v for k, v in environ.items() if not k.startswith("KESTREL_") or k in task.secrets}
    if task.needs_token and _KEY not in kept:
        kept[_KEY] = secrets.token_urlsafe(32)  # For this process, to read the load.
    own = f"service.instance.id={name}"
    before = environ.get(_RESOURCE)
    return {**kept, _RESOURCE: f"{before},{own}" if before else own}


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
