"""A server with the bundled model, for tools that ask it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.code_blocks import ROOT
from tests.forking.process import ForkedProcess
from tests.service.command_line import environment


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Its address."""
    flags = ("--device", "cpu", "--listen", "127.0.0.1:0")
    process = ForkedProcess(
        [sys.executable, "-m", "kestrel_grpc", "serve", *flags],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        ready = re.search(r"listening on ([\d.:]+)", process.stdout.readline())
        assert ready is not None
        yield ready[1]
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
