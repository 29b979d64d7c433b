"""Starts a server for one command, which ends with the command."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .parser import CommandError

_OTHERS = ("KESTREL_API_KEY", "KESTREL_AUTH_TOKENS", "KESTREL_CONFIG")
"""Variables that are meant for another server, such as the credentials that it asks for."""
_STOP_S = 15.0
_LONGEST = 64
"""The longest TMPDIR that leaves room for the name of a socket, whose path has 103 bytes at most."""


@contextmanager
def own_server(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Starts ``serve`` with ``flags`` behind a socket of its own. Yields its address and the line that it prints when
    it is ready.

    The server ends with the context, at the latest with this process. Raises CommandError if it does not start.
    """
    if importlib.util.find_spec("kestrel_grpc") is None:
        raise CommandError(
            "a server of this command's own needs the server's package, kestrel-grpc, beside the client's"
        )
    parent = "/tmp" if len(os.fsencode(tempfile.gettempdir())) > _LONGEST else None
    with (
        tempfile.TemporaryDirectory(prefix="kestrel-own-", dir=parent) as folder,
        _pipe() as watched,
    ):
        address = f"unix:{folder}/server.sock"
        command = [
            *(sys.executable, "-m", "kestrel_grpc.cli.own_server_process", str(watched)),
            *("--listen", address, "--log-level", "warning", "--drain-delay", "0", *flags),
        ]
        environ = {k: v for k, v in os.environ.items() if k not in _OTHERS}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environ, pass_fds=(watched,)
        )
        try:
            assert process.stdout is not None
            ready = process.stdout.readline().strip()
            if not ready:
                raise CommandError(f"the server did not start (exit status {process.wait()})")
            yield address, ready
        finally:
            process.terminate()
            try:
                process.communicate(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


@contextmanager
def _pipe() -> Iterator[int]:
    """The read end of a pipe whose write end closes when this process ends."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)
