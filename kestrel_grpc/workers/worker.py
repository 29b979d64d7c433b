"""The process of a worker: a whole server, which a supervisor controls.

SIGTERM, SIGINT and the end of the supervisor each make the worker drain: running requests may finish. A second signal
does not end the worker at once. If the engine fails, the process ends, and the supervisor restarts it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

from kestrel_engine import ConfigError, InferenceEngine, KestrelError, SkillRegistry, maintenance

from ..logs.records import set_up_logging
from ..process.event_loop import run as run_loop
from ..process.interpreter import set_up_interpreter
from ..process.server import KestrelServer
from ..process.skill_plugins import skill_registry
from ..process.start_and_stop import leave_now, load_unless_stopped, stop, until_failed
from ..process.startup_progress import LoadingProgress, shown_by
from ..security.identity.tls_files import TlsError
from ..security.identity.tokens import TokenFileError
from ..settings.addresses import AddressError
from ..settings.sources import SettingsError
from .line import ALIVE_INTERVAL_S, Alive, Failed, Ready, WorkerEnd
from .plan import WorkerTask

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
CreateEngine = Callable[..., Awaitable[InferenceEngine]]
"""As InferenceEngine.create."""


def main(arguments: Sequence[str], create: CreateEngine | None = None) -> int:
    """Runs the worker. ``arguments``: the number of the socket to the supervisor. ``create``: makes the engine in place
    of InferenceEngine.create. Returns the exit status."""
    line = WorkerEnd(int(arguments[0]))
    try:
        task = line.task()
    except EOFError:
        return EXIT_FAILED
    config = task.server
    set_up_logging(
        config.log_level, config.log_format, buffer_bytes=config.log_buffer_bytes, worker=task.index
    )
    set_up_interpreter()
    if task.runtime.confine != "off":
        maintenance.hide_memory()
    try:
        return run_loop(_serve(task, skill_registry(config.skills), line, create))
    except ConfigError as error:
        line.send(Failed(error.limit, error.field, str(error.value)))
    except SettingsError as error:
        line.send(Failed(str(error), setting=True))
    except (AddressError, TlsError, TokenFileError, KestrelError) as error:
        line.send(Failed(str(error)))
    except Exception as error:  # The log gets the traceback, the supervisor the error.
        logger.exception("the worker failed")
        line.send(Failed(f"{type(error).__name__}: {error}"))
    return EXIT_FAILED


async def _serve(
    task: WorkerTask, skills: SkillRegistry, line: WorkerEnd, create: CreateEngine | None
) -> int:
    """Serves until a signal arrives, the supervisor ends or the engine fails. Returns the exit status."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    delay_s = task.server.leaving_s

    def on_line() -> None:
        nonlocal delay_s
        if line.has_ended():
            delay_s = 0.0  # Another server may want the port.
            loop.remove_reader(line.fileno())
            if not stopping.is_set():
                logger.warning("the supervisor has ended: stopping")
            stopping.set()

    def on_signal(number: signal.Signals) -> None:
        nonlocal delay_s
        if number == signal.SIGINT:
            delay_s = 0.0  # A user at a terminal waits.
        stopping.set()

    loop.add_reader(line.fileno(), on_line)
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    alive = asyncio.create_task(_keep_alive(line))
    with LoadingProgress(draws=False) as progress:
        server = KestrelServer(
            task.server,
            task.runtime,
            lambda: (create or InferenceEngine.create)(
                task.runtime,
                skills=skills,
                progress=shown_by(progress, server.served.default.note_progress),
                observer=server.telemetry,
            ),
        )
        if not await load_unless_stopped(server, stopping):
            await server.stop(task.server.grace_s)
            leave_now(0)
    gc.freeze()  # Loaded objects stay, so collections need not visit them.
    line.send(_ready(server))
    failed = asyncio.create_task(until_failed(server))
    signalled = asyncio.create_task(stopping.wait())
    await asyncio.wait({failed, signalled}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.is_set():
        line.send(Failed("the engine has died"))
        await stop(server, 0)
    failed.cancel()
    await stop(server, task.server.grace_s, delay_s)
    alive.cancel()
    return 0


def _ready(server: KestrelServer) -> Ready:
    engine = server.served.default.loaded
    assert engine is not None, "loaded"
    info = engine.info
    return Ready(
        model=info.model,
        device_name=info.device_name,
        dtype=info.dtype,
        load_s=server.load_seconds,
        addresses=server.own_addresses,
    )


async def _keep_alive(line: WorkerEnd) -> None:
    while True:
        line.send(Alive())
        await asyncio.sleep(ALIVE_INTERVAL_S)


if __name__ == "__main__":  # The template could not fork this worker.
    sys.exit(main(sys.argv[1:]))
