"""Commands of ``kestrel-grpc``: ``here`` runs one in this process, ``kestrel`` in a fork of the fork server, both in
milliseconds; ``executed`` runs one as users do."""

import io
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from unittest import mock

from kestrel_grpc.cli.program import main
from tests.forking.process import run_forked
from tests.tiny import VARIABLES

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "kestrel_grpc"]
Done = subprocess.CompletedProcess


def environment(**variables: str) -> dict[str, str]:
    """This process's variables, less those that would change defaults or lead to a proxy. Torch computes with one
    thread, and the model is kestrel-tiny."""
    changing = re.compile("KESTREL_|https?_proxy$", re.IGNORECASE)
    inherited = {k: v for k, v in os.environ.items() if not changing.match(k)}
    own = {"KESTREL_THREADS": "1", "KESTREL_DRAIN_DELAY": "0"}
    return {**inherited, **VARIABLES, **own, **variables}


def kestrel(*arguments: object, stdin: bytes | None = None, **variables: str) -> Done[str]:
    """The command in a process of its own, which is forked."""
    done = run_forked(_command(arguments), input=stdin, cwd=ROOT, env=environment(**variables))
    return Done(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def executed(*arguments: object, stdin: bytes | None = None, **variables: str) -> Done[str]:
    """The command in a new process."""
    done = subprocess.run(
        _command(arguments),
        input=stdin,
        capture_output=True,
        timeout=120,
        cwd=ROOT,
        env=environment(**variables),
    )
    return Done(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def _command(arguments: tuple[object, ...]) -> list[str]:
    return [*PROGRAM, *map(str, arguments)]


@contextmanager
def _kept_logging() -> Iterator[None]:
    """Undoes what a command does to the process's loggers."""
    root = logging.getLogger()
    handlers = root.handlers[:]
    loggers = [root, *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    levels = {logger: logger.level for logger in loggers}
    disabled = logging.root.manager.disable
    try:
        yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        for logger, level in levels.items():
            if logger.level != level:  # Each change visits all loggers.
                logger.setLevel(level)


def here(*arguments: object, stdin: bytes = b"", **variables: str) -> Done[str]:
    """The command in this process, its standard streams and environment replaced meanwhile."""
    streams = [io.TextIOWrapper(io.BytesIO(data), "utf-8") for data in (stdin, b"", b"")]
    words = [*map(str, arguments)]
    with (
        _kept_logging(),
        chdir(ROOT),
        mock.patch.dict(os.environ, environment(**variables), clear=True),
        mock.patch("sys.stdin", streams[0]),
        redirect_stdout(streams[1]),
        redirect_stderr(streams[2]),
    ):
        try:
            status = main(words)
        except SystemExit as ended:
            status = ended.code if isinstance(ended.code, int) else 1
    for stream in streams[1:]:
        stream.seek(0)
    return Done(words, status, streams[1].read(), streams[2].read())
