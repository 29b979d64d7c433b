"""The template: a process with libvips loaded, which forks decoders in milliseconds. Reports the ends of decoders.

It has one thread and decodes nothing. It executes the requests on its link. FORK starts a decoder with a number and a
nice value; the message carries the descriptor of the decoder's link. KILL kills the decoder with a number. When a
decoder has ended, the template reports this on the decoder's link. The template's own link is closed when the server
stops or is killed. The template then kills all decoders and ends. If the template ends in another way, the Linux kernel
kills the decoders.
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

from .decoder import serve
from .segments import send_message

REQUEST = struct.Struct("<cxxxiQ")
"""A request: FORK or KILL, a nice value, and the number of a decoder."""

FORK, KILL = b"F", b"K"

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Child:
    pid: int
    link: socket.socket


def main(descriptor: int) -> None:
    """Serves the link of ``descriptor`` until it is closed."""
    # Ctrl-C and systemd signal all processes, but only the server reacts: it drains.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    link = socket.socket(fileno=descriptor)
    children: dict[int, _Child] = {}
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    os.set_blocking(ended, False)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(link, select.POLLIN)
    poll.register(ended, select.POLLIN)
    while True:
        poll.poll()
        with contextlib.suppress(BlockingIOError):
            os.read(ended, 4096)
        _reap(children)
        request, descriptors = _receive(link) if _is_readable(link) else (b"", [])
        if request is None:
            break
        if not request:
            continue
        what, nice, number = REQUEST.unpack(request)
        if what == FORK:
            [theirs] = descriptors
            child_link = socket.socket(fileno=theirs)
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                _begin_decoder(libc, nice)
                link.close()
                for other in children.values():
                    other.link.close()
                with contextlib.suppress(OSError):
                    serve(child_link)
                os._exit(0)
            children[number] = _Child(pid, child_link)
        elif number in children:
            os.kill(children[number].pid, signal.SIGKILL)
    for child in children.values():
        os.kill(child.pid, signal.SIGKILL)


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


def _reap(children: dict[int, _Child]) -> None:
    """Detects decoders that have ended, and reports it on their links."""
    for number, child in list(children.items()):
        pid, status = os.waitpid(child.pid, os.WNOHANG)
        if pid:
            del children[number]
            with contextlib.suppress(OSError):
                send_message(child.link, {"ended": os.waitstatus_to_exitcode(status)}, ())
            child.link.close()
