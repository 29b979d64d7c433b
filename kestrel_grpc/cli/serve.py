"""``serve``: the server as a process. Owns its signals, its log and its exit status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading

from kestrel_engine import ConfigError, InferenceEngine, KestrelError, RuntimeConfig, SkillRegistry

from .. import __version__
from ..addresses import AddressError, close_address
from ..configuration import add_flags, configuration, print_configuration
from ..logs import set_up_logging
from ..model_settings import config_error
from ..security.tls import TlsError
from ..security.tokens import TokenFileError
from ..served_model import State
from ..server import KestrelServer
from ..settings import Parser, ServerConfig
from ..skill_plugins import skill_registry
from ..sources import name_of
from ..systemd import Notifier
from .loading import LoadingProgress
from .parser import CommandError

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

GC_THRESHOLDS = (50_000, 20, 100)
"""A step makes a handful of objects for every row and drops them two steps later. By Python's default of 700 the
collector runs several times a step at large batches, promotes what is about to die, and host time grows faster than
the batch: 3.1 against 1.9 ms at 512 rows (benchmarks.engine_host). Cycles are few, and still found."""

SWITCH_INTERVAL_S = 0.0005
"""How long a thread may keep the interpreter while another waits for it. Python's default of 5 ms is longer than a step
of a GPU: the step thread, which gives the interpreter up whenever it waits for the device, got it back too late."""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Each setting is taken from its flag, else from the environment variable named with it, else from the file of\n"
        "--config (a key named like the flag, in the section named with its group), else it has its default.\n"
        "The first SIGTERM or Ctrl-C lets running requests end, the second does not."
    )
    add_flags(parser)
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print the settings as TOML, with each one's source and without secrets, and exit",
    )
    assert isinstance(parser, Parser)
    parser.set_defaults(settings=parser.sources.settings)
    parser.add_argument("--version", action="version", version=f"kestrel-grpc {__version__}")


def run(args: argparse.Namespace) -> int:
    settled = configuration(args)
    config, runtime = settled.server, settled.runtime
    if args.print_config:
        print(print_configuration(args.settings, args, os.environ))
        return 0
    skills = skill_registry(config.skills, name_of(args, "--skill"))
    set_up_logging(config.log_level, config.log_format, buffer_bytes=config.log_buffer_bytes)
    gc.set_threshold(*GC_THRESHOLDS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        asyncio.run(_serve(config, runtime, skills))
    except (AddressError, TlsError, TokenFileError) as error:
        raise CommandError(str(error)) from None
    except ConfigError as error:
        raise config_error(error, args) from None
    except KestrelError as error:  # The model can't be loaded, or failed its warm-up.
        raise CommandError(str(error)) from None
    return 0


async def _serve(config: ServerConfig, runtime: RuntimeConfig, skills: SkillRegistry) -> None:
    """Runs until a signal. Leaves the process at once if that comes while a thread still loads the model."""
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
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
            if not stopping.is_set():
                logger.info("%s: stopping; once more ends it at once", number.name)
                stopping.set()
                return
            logger.warning("%s again: ended at once", number.name)
            for address in server.addresses:
                close_address(address)
            _leave_now(128 + number)

        for number in _SIGNALS:
            loop.add_signal_handler(number, on_signal, number)
        await server.start()
        loading = asyncio.create_task(server.load())
        stop_asked = asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait({loading, stop_asked}, return_when=asyncio.FIRST_COMPLETED)
            loaded = loading.done()
            if loaded:
                loading.result()
        except BaseException:
            await server.stop(grace_s=0)
            raise
    if loaded:
        gc.freeze()  # What was loaded stays: no collection need walk it.
        systemd.tell("READY=1", f"STATUS={_announce(server)}")
        alive = asyncio.create_task(systemd.keep_alive(lambda: server.served.state is State.FAILED))
        await stop_asked
        systemd.tell("STOPPING=1", "STATUS=requests that run may end")
    else:
        loading.cancel()
        systemd.tell("STOPPING=1")
        with contextlib.suppress(asyncio.CancelledError):
            await loading
    await server.stop(config.grace_s)
    if not loaded:
        _leave_now(0)
    alive.cancel()


def _announce(server: KestrelServer) -> str:
    """Says on standard output that it is ready; returns what is served in few words."""
    engine = server.served.loaded
    assert engine is not None
    info = engine.info
    served = f"{info.model} on {info.device} ({info.dtype})"
    ready = (
        f"kestrel-grpc ready: {served}, listening on {', '.join(server.addresses)}, "
        f"loaded in {server.load_seconds:.1f} s\n"
    )
    # A thread that nobody waits for: a pipe that nobody reads may be full.
    threading.Thread(target=_say, args=(ready,), name="kestrel-ready", daemon=True).start()
    return served


def _say(text: str) -> None:
    """On standard output, but for its buffer: what stays there would fail once more at the end, and change the exit
    status."""
    try:
        os.write(sys.stdout.fileno(), text.encode())
    except OSError as error:  # A full disk, or nobody who reads: no reason not to serve.
        logger.warning("can't write the ready line: %s", error.strerror)


def _leave_now(status: int) -> None:
    """Ends the process without waiting for its threads: one that reads weights can't be interrupted."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
