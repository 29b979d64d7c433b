"""A front for the servers of a cluster: Envoy at one address, which gives each call to a server (workers/front/).

It follows the directory. It knows the addresses of clients, and the servers know its own address only.
"""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Awaitable
from contextlib import ExitStack
from pathlib import Path

from kestrel_engine import clock, processors

from ..process.ready_line import print_ready
from ..security.listening import check_exposure
from ..settings.addresses import unix_path
from ..settings.server import ServerConfig
from ..settings.sources import SettingsError
from ..workers.front.bootstrap import FrontPlan
from ..workers.front.front import Front, check_installed
from ..workers.port import HeldPorts
from .follow import Follower


def check_front(config: ServerConfig) -> tuple[str, ...]:
    """The addresses of the front. Raises SettingsError, AddressError."""
    check_installed("--front", "--endpoints-file for an Envoy of your own")
    if config.security.tls is not None:
        raise SettingsError(
            "--tls-cert: the front knows no authority with which to check the servers' certificates; give an Envoy of "
            "your own the file of --endpoints-file"
        )
    addresses = tuple(each for each in config.listen if unix_path(each) is None)
    if not addresses:
        raise SettingsError("--front: needs a TCP address in --listen")
    check_exposure(addresses, config.security)
    return addresses


async def run_front(config: ServerConfig, follower: Follower, stopping: asyncio.Event) -> None:
    """Runs Envoy, once the directory lists a server, until ``stopping``. Another task must let ``follower`` follow.

    Raises SettingsError, AddressError, WorkersError.
    """
    addresses, began = check_front(config), clock.now()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kestrel-")))
        ports = stack.enter_context(HeldPorts(addresses))
        if follower.endpoints_file is None:
            (listed := folder / "servers").mkdir()
            follower.endpoints_file = listed / "servers.json"
        await _first(follower.written.wait(), stopping.wait())
        if stopping.is_set():
            return
        front = Front(
            FrontPlan(
                folder=folder,
                sockets=ports.sockets,
                endpoints=follower.endpoints_file.absolute(),
                server=dataclasses.replace(config, listen=addresses),
            ),
            processors(),
        )
        running = asyncio.create_task(front.run())
        try:
            await _first(asyncio.shield(running), front.until_sees(1), stopping.wait())
            if not running.done() and not stopping.is_set():
                print_ready("a cluster", ports.addresses, clock.now() - began)
            await _first(asyncio.shield(running), stopping.wait())
        finally:
            await front.stop()
            await running


async def _first(*waits: Awaitable[object]) -> None:
    """Waits for the first of ``waits``, and ends the others."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
