"""Template: the parent's handle of a process that forks others (forking.py), which it starts and starts again.

``confined`` is the template of this process for everything that untrusted bytes may control. It runs until the process
ends, because it takes a third of a second to start.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from ..confinement import children
from .forking import FORK, KILL, LOAD
from .lines import Line

Start = Callable[[socket.socket], "subprocess.Popen[bytes]"]
"""Starts the process with its end of the link. Raises OSError."""


class Template:
    """A process that forks others. It starts at its first use, and again if it has been killed. Thread-safe.
    ``outlives``: whether the forks outlive the template."""

    def __init__(self, start: Start, *, outlives: bool = False) -> None:
        self._start_process, self._outlives = start, outlives
        self._lock = threading.Lock()
        self._link: Line | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._numbers = itertools.count(1)
        self._loads: list[str] = []
        self._has_forked = False

    @property
    def pid(self) -> int | None:
        """The number of the process that runs now, or has run last."""
        process = self._process
        return None if process is None else process.pid

    def fork(self, line: socket.socket, *, confine: str = "off", nice: int = 0, **job: Any) -> int:
        """Starts a process with ``line``. Returns its number, for ``kill``. ``confine``: one of ``confinement.MODES``.
        ``job``: more values for the process. The process gets no answer to its line if the template is killed
        meanwhile. Raises OSError."""
        job |= {"confine": confine, "nice": nice, "outlives": self._outlives}
        with self._lock:
            number = next(self._numbers)
            request = {FORK: number, "job": job}
            try:
                if self._link is None:
                    raise BrokenPipeError
                self._link.send(request, (line.fileno(),))
            except OSError:
                self._start().send(request, (line.fileno(),))
            self._has_forked = True
            return number

    def kill(self, number: int) -> None:
        """Kills a fork that may have ended already."""
        with self._lock, contextlib.suppress(OSError):
            if self._link is not None:
                self._link.send({KILL: number})

    def start(self, load: str | None = None) -> None:
        """Starts the template if it does not run. Does not wait until it is ready. ``load``: a module that it imports
        now and at each start, and whose function of this name it calls. Raises OSError."""
        with self._lock:
            is_new = load is not None and load not in self._loads
            if load is not None and is_new:
                self._loads.append(load)
            if self._link is None or self._process is None or self._process.poll() is not None:
                self._start()
            elif is_new:
                with contextlib.suppress(OSError):  # It has been killed.
                    self._link.send({LOAD: load})

    def wait(self) -> int | None:
        """Waits for the end of the process that runs now, or has run last. Returns its exit status, negative for a
        signal; None if none has run."""
        process = self._process
        return None if process is None else process.wait()

    def forget(self) -> None:
        """Releases the template in a process that was forked from this one. That process starts its own template."""
        self._lock = threading.Lock()
        if self._link is not None:
            self._link.close()
        self._link = self._process = None

    def stop(self) -> None:
        """Ends the template, and all forks that do not outlive it. No end of another is reported afterwards."""
        with self._lock:
            if self._link is not None:
                self._link.close()
            if self._process is not None:
                # It has nothing to end, and may still be loading.
                if self._outlives or not self._has_forked:
                    self._process.kill()
                self._process.wait()
            self._link = self._process = None

    def _start(self) -> Line:
        self._has_forked = False
        if self._link is not None:
            self._link.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = self._start_process(theirs)
        # If it is killed, it is no zombie until it is needed again.
        threading.Thread(target=self._process.wait, name="template-end", daemon=True).start()
        self._link = Line(ours)
        for module in self._loads:
            self._link.send({LOAD: module})
        return self._link


def start_confined(link: socket.socket) -> subprocess.Popen[bytes]:
    """Starts a template without an environment, which imports the modules that it is named. Raises OSError."""
    return children.start("kestrel_engine.processes.forking", stdin=link.fileno())


confined = Template(start_confined)
os.register_at_fork(after_in_child=confined.forget)
atexit.register(confined.stop)
