"""Forks: the loop of a template, a process with one thread that forks others in milliseconds and reports their ends.

The template executes the requests on its link. LOAD imports a module, so that forks need not. FORK starts a process,
whose line comes with the request. KILL kills one. When a process has ended, the template reports this on the line. A
process may confine itself. If it then makes a system call that is not allowed, the template kills it and reports the
call. The link is closed when the template's parent stops or is killed. The template then ends, and all forks that do
not outlive it. If the template ends in another way, the Linux kernel kills these.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass
from typing import Any

from ..confinement.own_confinement import close_all_but, confine, leave_surroundings, next_call
from .lines import Line

LOAD, FORK, KILL = "load", "fork", "kill"

_PR_SET_PDEATHSIG = 1
_FROM_OUTSIDE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
"""Ctrl-C and systemd signal all processes of a service. Its main process decides when a template ends."""


@dataclass(slots=True)
class Fork:
    """What a fork of the template has. ``job``: what its parent wrote (`Template.fork`). ``alone``: threads of the
    template did not survive the fork, so the process may only start another program."""

    line: Line
    job: dict[str, Any]
    alone: bool
    _reports: socket.socket | None
    """To the template, unless the job says that nothing confines the process."""
    _namespaces: bool

    def confine(self, num_bytes: int, *kept: int) -> None:
        """Closes all descriptors but the line and ``kept``, and confines this process as the job says. Ends it if the
        job requires more than the kernel offers. Open and import before; read untrusted bytes only afterwards.
        ``num_bytes``: private memory that the work takes."""
        reports = self._reports
        own = () if reports is None else (reports.fileno(),)
        close_all_but(self.line.fileno(), *own, *kept)
        if self.job["confine"] != "off":
            found, listener = confine(num_bytes, self._namespaces, reports=reports is not None)
            if self.job["confine"] == "require" and not found.suffices:
                os._exit(1)
            if reports is not None and listener >= 0:
                socket.send_fds(reports, [b"l"], [listener])
                os.close(listener)
        if reports is not None:
            reports.close()


@dataclass(slots=True)
class _Child:
    pid: int
    line: Line
    outlives: bool
    channel: socket.socket | None = None
    """Gives the listener once the child is confined."""
    listener: int = -1
    """Gives the system calls that are not allowed; -1 without."""
    refused: int | None = None
    """The number of such a call."""

    def close(self) -> None:
        self.line.close()
        if self.channel is not None:
            self.channel.close()
        if self.listener >= 0:
            os.close(self.listener)


class Forks:
    """The template's side. Owns the children. ``link``: to the parent."""

    def __init__(self, link: socket.socket) -> None:
        self._link = Line(link, trusts=True)
        self._children: dict[int, _Child] = {}
        self._namespaces: bool | None = None
        self._ended, self._wakes = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._ended, False)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()
        self._poll.register(self._link, select.POLLIN)
        self._poll.register(self._ended, select.POLLIN)

    def run(self) -> Fork | None:
        """Executes requests until the link is closed, then returns None. Also returns in each fork. A fork keeps no
        descriptor of the template open but its line."""
        while True:
            ready = dict(self._poll.poll())
            with contextlib.suppress(BlockingIOError):
                os.read(self._ended, 4096)
            for child in self._children.values():
                self._watch(child, ready)
            self._reap()
            if self._link.fileno() in ready:
                is_open = self._link.read()
                for request in self._link.messages():
                    if (fork := self._execute(request)) is not None:
                        return fork
                if not is_open:
                    break
        for child in self._children.values():
            if not child.outlives:
                os.kill(child.pid, signal.SIGKILL)
        return None

    def _execute(self, request: dict[str, Any]) -> Fork | None:
        """Returns what a fork has, in the fork."""
        if LOAD in request:
            with contextlib.suppress(Exception):  # The forks report what they miss.
                importlib.import_module(request[LOAD]).load()
        elif FORK in request:
            if self._link.descriptors:  # Else this process may open no more.
                end = socket.socket(fileno=self._link.descriptors.pop(0))
                line = Line(end, trusts=True)
                return self._fork(request[FORK], line, request["job"])
        elif (child := self._children.get(request[KILL])) is not None:
            os.kill(child.pid, signal.SIGKILL)
        return None

    def _fork(self, number: int, line: Line, job: dict[str, Any]) -> Fork | None:
        is_confined = job["confine"] != "off"
        if is_confined and self._namespaces is None:
            self._namespaces = leave_surroundings()
        template, alone = os.getpid(), num_threads() > 1
        try:
            channel, reports = socket.socketpair() if is_confined else (None, None)
            pid = os.fork()
        except OSError:  # The parent learns it from the end of the line.
            line.close()
            return None
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if not job["outlives"]:
                _end_with(template)
            os.nice(job["nice"])
            if channel is not None:
                channel.close()
            self._close()
            return Fork(line, job, alone, reports, bool(self._namespaces))
        if channel is not None and reports is not None:
            reports.close()
            self._poll.register(channel, select.POLLIN)
        self._children[number] = _Child(pid, line, job["outlives"], channel)
        if job[
            "outlives"
        ]:  # A signal through the descriptor reaches no other process that got its number.
            process = os.pidfd_open(pid)
            with contextlib.suppress(OSError):  # The parent may have ended.
                line.send({"pid": pid}, (process,))
            os.close(process)
        return None

    def _watch(self, child: _Child, ready: dict[int, int]) -> None:
        """Kills a process that made a call that is not allowed. ``ready``: events of ``poll`` by descriptor."""
        if child.channel is not None and child.channel.fileno() in ready:
            _, listeners, _, _ = socket.recv_fds(child.channel, 1, 1)
            self._poll.unregister(child.channel)
            child.channel.close()
            child.channel = None
            for child.listener in listeners:
                self._poll.register(child.listener, select.POLLIN)
        elif event := ready.get(child.listener, 0):
            # The kernel also tells that the process has ended.
            self._poll.unregister(child.listener)
            if event & select.POLLIN:
                with contextlib.suppress(OSError):  # Another has killed it.
                    child.refused = next_call(child.listener)
                os.kill(child.pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Detects processes that have ended, and reports it on their lines."""
        for number, child in list(self._children.items()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if not pid:
                continue
            del self._children[number]
            code = os.waitstatus_to_exitcode(status) if child.refused is None else -signal.SIGSYS
            # A parent that does not read learns it from the end of the line.
            with contextlib.suppress(OSError):
                child.line.send({"ended": code, "call": child.refused}, (), socket.MSG_DONTWAIT)
            for watched in (child.channel, child.listener):
                if watched is not None and watched != -1:
                    with contextlib.suppress(KeyError):
                        self._poll.unregister(watched)
            child.close()

    def _close(self) -> None:
        """Closes in a fork what the template has open."""
        self._link.close()
        os.close(self._ended)
        os.close(self._wakes)
        for child in self._children.values():
            child.close()


def ignore_signals() -> None:
    """Lets this process ignore the signals that a service manager or a terminal sends to all processes."""
    for number in _FROM_OUTSIDE:
        signal.signal(number, signal.SIG_IGN)


def num_threads() -> int:
    """The number of threads of this process; 1 on a system without /proc."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def main(argument: str) -> None:
    """A template whose link is its standard input. Its forks call ``main`` of the module that their job names."""
    ignore_signals()
    fork = Forks(socket.socket(fileno=0)).run()
    if fork is not None:
        with contextlib.suppress(OSError):  # The line was closed.
            importlib.import_module(fork.job["module"]).main(fork)
        os._exit(0)


def _end_with(template: int) -> None:
    """Lets the kernel end this process when the template ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != template:
        os._exit(0)
