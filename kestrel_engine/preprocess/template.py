"""The template: a process with libvips loaded, from which decoders are forked in milliseconds. Owns their ends.

It has one thread, decodes nothing, and does what its link says: b"F" forks a decoder whose link is the descriptor that
comes along, with a number and a nice value; b"K" kills the decoder of a number. When a decoder has ended, the template
writes that on the decoder's link. When its own link is closed, which is also how it notices that the server has been
killed, it kills all of them and ends. On Linux a decoder is killed by the kernel if the template ends in another way.
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
"""What is to be done, a nice value and the number of a decoder."""

FORK, KILL = b"F", b"K"

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class _Child:
    pid: int
    link: socket.socket


def main(descriptor: int) -> None:
    """Serves the link of ``descriptor`` until it is closed."""
    # A drain is the server's to do: Ctrl-C and systemd signal all processes.
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
    """A request with its descriptors; None once the link is closed."""
    request, descriptors = b"", list[int]()
    while len(request) < REQUEST.size:
        data, found, _, _ = socket.recv_fds(link, REQUEST.size - len(request), 1)
        if not data:
            return None, []
        request += data
        descriptors += found
    return request, descriptors


def _begin_decoder(libc: ctypes.CDLL | None, nice: int) -> None:
    """In a forked process: less important than others by ``nice``, and not to outlive the template."""
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
