"""The start and stop that all server processes share, with and without a supervisor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from typing import NoReturn

from ..served_model import State
from ..settings.addresses import close_address
from .server import KestrelServer

logger = logging.getLogger(__name__)

EXIT_ENGINE_FAILED = 70
"""Exit status of a process whose engine failed while it served, because the device hung or the step thread died.
sysexits.h names it EX_SOFTWARE."""

_CHECK_S = 1.0
_STOP_S = 20.0
"""Seconds that an orderly stop may take in addition to grace and delay. A hung step is abandoned after 5 s, and callers
have 2 s to read their status."""


async def load_unless_stopped(server: KestrelServer, stopping: asyncio.Event) -> bool:
    """Starts ``server`` and loads its model.

    Returns False if ``stopping`` was set first; a thread may still be loading then. Raises the errors of ``start`` and
    ``load`` after it has stopped the server.
    """
    await server.start()
    loading = asyncio.create_task(server.load())
    stop_asked = asyncio.create_task(stopping.wait())
    try:
        await asyncio.wait({loading, stop_asked}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            return True
    except BaseException:
        await server.stop(grace_s=0)
        raise
    finally:
        stop_asked.cancel()
    loading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await loading
    return False


async def until_failed(server: KestrelServer) -> None:
    """Waits until the engine has failed: its step thread died, or no step ended within the step timeout."""
    while server.served.state is not State.FAILED:
        await asyncio.sleep(_CHECK_S)


async def stop(server: KestrelServer, grace_s: float, delay_s: float = 0.0) -> None:
    """Stops the server, as ``KestrelServer.stop`` does.

    If a step or the stop itself hangs, this function ends the process, because a return from ``main`` would wait for
    the hung thread. The exit status is EXIT_ENGINE_FAILED if the engine had failed, otherwise 0.
    """
    failed = server.served.state is State.FAILED
    is_stuck = False
    try:
        await asyncio.wait_for(server.stop(grace_s, delay_s), grace_s + delay_s + _STOP_S)
    except TimeoutError:
        is_stuck = True
        for address in server.addresses:
            close_address(address)
    if failed or is_stuck or any(engine.is_stuck for engine in server.served.engines):
        logger.error("the process ends without waiting for its threads")
        leave_now(EXIT_ENGINE_FAILED if failed else 0)


def leave_now(status: int) -> NoReturn:
    """Ends the process without waiting for its threads, because a thread that reads weights or waits for a hung device
    cannot be interrupted."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
