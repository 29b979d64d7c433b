"""Serving with one process: signals, the ready line, and messages to systemd. See workers/ for several processes."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Sequence

from kestrel_engine import InferenceEngine, KestrelError, Observer, RuntimeConfig, SkillRegistry

from ..security.identity.tls_files import TlsError
from ..security.identity.tokens import TokenFileError
from ..served_model import State
from ..settings.addresses import AddressError, close_address
from ..settings.server import ServerConfig
from .ready_line import print_ready
from .server import KestrelServer
from .start_and_stop import leave_now, load_unless_stopped, stop, until_failed
from .startup_progress import LoadingProgress, Progress, shown_by
from .systemd import Notifier

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FAILURES = (AddressError, TlsError, TokenFileError, KestrelError)
"""The errors of a failed start: of a port, of certificates, of tokens, or of the model's loading or warm-up."""


async def serve_alone(
    config: ServerConfig, runtimes: Sequence[RuntimeConfig], skills: SkillRegistry
) -> None:
    """Serves the models of ``runtimes`` until a signal arrives or the engine of the first one, the default, fails.
    Raises FAILURES.

    Ends the process at once if the signal arrives while a thread still loads the model, or if a step hangs.
    """
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    delay_s = config.leaving_s
    systemd = Notifier(os.environ)

    with LoadingProgress() as progress:

        def load(
            runtime: RuntimeConfig, observer: Observer | None, shown: Progress | None = None
        ) -> Awaitable[InferenceEngine]:
            return InferenceEngine.create(
                runtime, skills=skills, progress=shown or progress, observer=observer
            )

        def load_default() -> Awaitable[InferenceEngine]:
            shown = shown_by(progress, server.served.default.note_progress)
            return load(default, server.telemetry, shown)

        default, *others = runtimes
        server = KestrelServer(config, default, load_default, others=others, load_model=load)

        def on_signal(number: signal.Signals) -> None:
            nonlocal delay_s
            if not stopping.is_set():
                logger.info("%s: stopping; a second signal ends the server at once", number.name)
                if number == signal.SIGINT:
                    delay_s = 0.0  # A user at a terminal waits.
                stopping.set()
                return
            logger.warning("%s again: ending at once", number.name)
            for address in server.addresses:
                close_address(address)
            leave_now(128 + number)

        for number in SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
        loaded = await load_unless_stopped(server, stopping)
    if not loaded:
        systemd.send("STOPPING=1")
        await server.stop(config.grace_s)
        leave_now(0)
    gc.freeze()  # Loaded objects stay, so collections need not visit them.
    systemd.send("READY=1", f"STATUS={_announce(server)}")
    alive = asyncio.create_task(systemd.keep_alive(lambda: server.served.state is State.FAILED))
    failed = asyncio.create_task(until_failed(server))
    signalled = asyncio.create_task(stopping.wait())
    await asyncio.wait({failed, signalled}, return_when=asyncio.FIRST_COMPLETED)
    if failed.done() and not stopping.is_set():
        # All calls have ended. Health reports NOT_SERVING for a while, so that load balancers use other servers.
        logger.error("the engine has failed: the server ends in %g s", config.grace_s)
        systemd.send("STATUS=the engine has failed")
        await asyncio.wait({signalled}, timeout=config.grace_s)
    systemd.send("STOPPING=1", "STATUS=waiting for running requests")
    await stop(server, config.grace_s, delay_s)
    failed.cancel()
    signalled.cancel()
    alive.cancel()


def _announce(server: KestrelServer) -> str:
    """Prints the ready line. Returns models and devices in one line."""
    infos = [engine.info for engine in server.served.engines]
    served = " and ".join(f"{info.model} on {info.device} ({info.precision})" for info in infos)
    print_ready(served, server.addresses, server.load_seconds)
    return served
