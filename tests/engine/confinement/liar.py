"""A decoder that an image controls: it answers its job with the bytes that are the image, and does not end."""

from __future__ import annotations

import os
import socket
import threading

from kestrel_engine.preprocess.processes import template
from kestrel_engine.preprocess.processes.segments import take_message


def serve(link: socket.socket, memory: int) -> None:
    received, segments = bytearray(), list[int]()
    while True:
        data, found, _, _ = socket.recv_fds(link, 64 * 1024, 2)
        segments += found
        received += data
        while (message := take_message(received)) is not None:
            if "granted" in message:
                link.sendall(os.pread(segments[-1], 2**20, 0))
        if not data:
            threading.Event().wait()  # It does not end by itself.


def main(argument: str) -> None:
    template.serve = serve
    template.main(argument)
