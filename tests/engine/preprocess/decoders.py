"""Decoder processes as tests see them: which there are, held up, ended."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from kestrel_engine.processes.template import confined


def decoders() -> set[int]:
    """Processes that the template of this process has forked and that live."""
    children = Path(f"/proc/{confined.pid}/task/{confined.pid}/children")
    found = {int(pid) for pid in children.read_text().split()} if children.exists() else set()
    return {pid for pid in found if state(pid) not in ("Z", "")}


def state(pid: int) -> str:
    """The letter of proc(5), "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def nice_of(pid: int) -> int | None:
    """None if the process has ended meanwhile."""
    try:
        return os.getpriority(os.PRIO_PROCESS, pid)
    except ProcessLookupError:
        return None


@contextlib.contextmanager
def held_up(pids: set[int]) -> Iterator[None]:
    """Stops those processes that live, which then take as long as the test wants."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
