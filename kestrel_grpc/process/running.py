"""What every process that serves does: listen, load unless told to stop meanwhile, and leave without waiting."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from typing import NoReturn

from .server import KestrelServer


async def load_unless_stopped(server: KestrelServer, stopping: asyncio.Event) -> bool:
    """Starts ``server`` and loads its model. False: it was told to stop first, and a thread may go on loading. Raises
    as ``start`` and ``load`` do, with the server stopped."""
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


def leave_now(status: int) -> NoReturn:
    """Ends the process without waiting for its threads: one that reads weights, or a device that hangs, can't be
    interrupted."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
