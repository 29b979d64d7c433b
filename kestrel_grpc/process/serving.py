"""One process that serves: its signals, its ready line, and what systemd hears. See workers/ for several."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal

from kestrel_engine import InferenceEngine, KestrelError, RuntimeConfig, SkillRegistry

from ..security.identity.tls import TlsError
from ..security.identity.tokens import TokenFileError
from ..served_model import State
from ..settings.addresses import AddressError, close_address
from ..settings.server import ServerConfig
from .ready_line import say_ready
from .running import leave_now, load_unless_stopped, stop, until_failed
from .server import KestrelServer
from .startup_progress import LoadingProgress
from .systemd import Notifier

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FAILURES = (AddressError, TlsError, TokenFileError, KestrelError)
"""What a start fails with: a port, certificates, tokens, or the model, which can't be loaded or failed its warm-up."""


async def serve_alone(config: ServerConfig, runtime: RuntimeConfig, skills: SkillRegistry) -> None:
    """Runs until a signal or until the engine has failed. Leaves the process at once if the signal comes while a thread
    still loads the model, or if a step hangs. Raises FAILURES."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    delay_s = config.leaving_s
    systemd = Notifier(os.environ)

    with LoadingProgress() as progress:
        server = KestrelServer(
            config,
            runtime,
            lambda: InferenceEngine.create(
                runtime, skills=skills, progress=progress, observer=server.telemetry
            ),
        )

        def on_signal(number: signal.Signals) -> None:
            nonlocal delay_s
            if not stopping.is_set():
                logger.info("%s: stopping; once more ends it at once", number.name)
                if number == signal.SIGINT:
                    delay_s = 0.0  # A person at a terminal waits.
                stopping.set()
                return
            logger.warning("%s again: ended at once", number.name)
            for address in server.addresses:
                close_address(address)
            leave_now(128 + number)

        for number in SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
        loaded = await load_unless_stopped(server, stopping)
    if not loaded:
        systemd.tell("STOPPING=1")
        await server.stop(config.grace_s)
        leave_now(0)
    gc.freeze()  # What was loaded stays: no collection need walk it.
    systemd.tell("READY=1", f"STATUS={_announce(server)}")
    alive = asyncio.create_task(systemd.keep_alive(lambda: server.served.state is State.FAILED))
    failed = asyncio.create_task(until_failed(server))
    told = asyncio.create_task(stopping.wait())
    await asyncio.wait({failed, told}, return_when=asyncio.FIRST_COMPLETED)
    if failed.done() and not stopping.is_set():
        # Callers have their status. Health says NOT_SERVING for a while, so that balancers turn to others.
        logger.error("the engine has failed: the server ends in %g s", config.grace_s)
        systemd.tell("STATUS=the engine has failed")
        await asyncio.wait({told}, timeout=config.grace_s)
    systemd.tell("STOPPING=1", "STATUS=requests that run may end")
    await stop(server, config.grace_s, delay_s)
    failed.cancel()
    told.cancel()
    alive.cancel()


def _announce(server: KestrelServer) -> str:
    """Says that it is ready; returns what is served in few words."""
    engine = server.served.loaded
    assert engine is not None, "loaded"
    info = engine.info
    served = f"{info.model} on {info.device} ({info.dtype})"
    say_ready(served, server.addresses, server.load_seconds)
    return served
