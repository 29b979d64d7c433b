"""The template: a process with libvips loaded, which forks decoders in milliseconds. Reports the ends of decoders.

It has one thread and decodes nothing. It executes the requests on its link. FORK starts a decoder with a number and a
nice value; the message carries the descriptor of the decoder's link. The decoder opens what it needs, and confines
itself before it reads its link. KILL kills the decoder with a number. When a decoder has ended, the template reports
this on the decoder's link. If a decoder makes a system call that is not allowed, the template kills it and reports the
call. The template's own link is closed when the server stops or is killed. The template then kills all decoders and
ends. If the template ends in another way, the Linux kernel kills the decoders.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import sys
from dataclasses import dataclass

from ...confinement.own_memory import open_count
from ...confinement.steps import close_all_but, confine, leave_surroundings, next_call
from ..decoding.bmp import load_reader
from .decoder import serve
from .segments import send_message

REQUEST = struct.Struct("<ccxxiQQ")
"""A request: FORK or KILL, how to confine the decoder, its nice value, its number, and the bytes of its images."""

FORK, KILL = b"F", b"K"
AUTO, REQUIRE, OFF = b"a", b"r", b"o"
"""As ``confinement.MODES``."""

_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class _Child:
    pid: int
    link: socket.socket
    channel: socket.socket
    """Gives the listener once the child is confined."""
    listener: int = -1
    """Gives the system calls that are not allowed; -1 without."""
    refused: int | None = None
    """The number of such a call."""


class _Template:
    """Owns the children. ``link``: to the server."""

    def __init__(self, link: socket.socket) -> None:
        self._libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._link = link
        self._children: dict[int, _Child] = {}
        self._namespaces: bool | None = None
        self._ended, wakes = os.pipe()
        os.set_blocking(wakes, False)
        os.set_blocking(self._ended, False)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._poll = select.poll()
        self._poll.register(link, select.POLLIN)
        self._poll.register(self._ended, select.POLLIN)

    def run(self) -> None:
        """Executes requests until the link is closed."""
        while True:
            ready = dict(self._poll.poll())
            with contextlib.suppress(BlockingIOError):
                os.read(self._ended, 4096)
            for child in self._children.values():
                self._watch(child, ready)
            self._reap()
            request, descriptors = _receive(self._link) if _is_readable(self._link) else (b"", [])
            if request is None:
                break
            if not request:
                continue
            what, mode, nice, number, num_bytes = REQUEST.unpack(request)
            if what == FORK:
                self._fork(socket.socket(fileno=descriptors[0]), mode, nice, number, num_bytes)
            elif number in self._children:
                os.kill(self._children[number].pid, signal.SIGKILL)
        for child in self._children.values():
            os.kill(child.pid, signal.SIGKILL)

    def _fork(
        self, link: socket.socket, mode: bytes, nice: int, number: int, num_bytes: int
    ) -> None:
        if mode != OFF and self._namespaces is None:
            self._namespaces = leave_surroundings()
        channel, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _begin_decoder(self._libc, nice)
            memory = open_count()
            close_all_but(link.fileno(), theirs.fileno(), memory)
            if mode != OFF:
                found, listener = confine(num_bytes, bool(self._namespaces), reports=True)
                if mode == REQUIRE and not found.suffices:
                    os._exit(1)
                if listener >= 0:
                    socket.send_fds(theirs, [b"l"], [listener])
                    os.close(listener)
            theirs.close()
            with contextlib.suppress(OSError):
                serve(link, memory)
            os._exit(0)
        theirs.close()
        self._poll.register(channel, select.POLLIN)
        self._children[number] = _Child(pid, link, channel)

    def _watch(self, child: _Child, ready: dict[int, int]) -> None:
        """Kills the decoder if it made a call that is not allowed. ``ready``: events of ``poll`` by descriptor."""
        if child.channel.fileno() in ready:
            _, listeners, _, _ = socket.recv_fds(child.channel, 1, 1)
            self._poll.unregister(child.channel)
            child.channel.close()
            for child.listener in listeners:
                self._poll.register(child.listener, select.POLLIN)
        elif event := ready.get(child.listener, 0):
            self._poll.unregister(
                child.listener
            )  # The kernel also tells that the decoder has ended.
            if event & select.POLLIN:
                with contextlib.suppress(OSError):  # Another has killed it.
                    child.refused = next_call(child.listener)
                os.kill(child.pid, signal.SIGKILL)

    def _reap(self) -> None:
        """Detects decoders that have ended, and reports it on their links."""
        for number, child in list(self._children.items()):
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if not pid:
                continue
            del self._children[number]
            code = os.waitstatus_to_exitcode(status) if child.refused is None else -signal.SIGSYS
            with contextlib.suppress(OSError):
                send_message(child.link, {"ended": code, "call": child.refused}, ())
            child.link.close()
            for watched in (child.channel.fileno(), child.listener):
                if watched >= 0:
                    with contextlib.suppress(KeyError):
                        self._poll.unregister(watched)
            child.channel.close()
            if child.listener >= 0:
                os.close(child.listener)


def main(argument: str) -> None:
    """Serves the link, which is this process's standard input, until it is closed."""
    # Ctrl-C and systemd signal all processes, but only the server reacts: it drains.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    load_reader()
    _Template(socket.socket(fileno=0)).run()


def _is_readable(link: socket.socket) -> bool:
    return bool(select.select([link], [], [], 0)[0])


def _receive(link: socket.socket) -> tuple[bytes | None, list[int]]:
    """Returns a request with its descriptors; None if the link is closed."""
    request, descriptors = b"", list[int]()
    while len(request) < REQUEST.size:
        data, found, _, _ = socket.recv_fds(link, REQUEST.size - len(request), 1)
        if not data:
            return None, []
        request += data
        descriptors += found
    return request, descriptors


def _begin_decoder(libc: ctypes.CDLL | None, nice: int) -> None:
    """Prepares a forked process: sets its nice value, and lets the kernel end it when the template ends."""
    template = os.getppid()
    if libc is not None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != template or template == 1:
        os._exit(0)
    if nice:
        os.nice(nice)
