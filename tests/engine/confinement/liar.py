"""A decoder that an image controls: it answers its job with the bytes that are the image, and does not end."""

import os
import threading

from kestrel_engine.processes import Fork


def load() -> None:
    pass


def main(fork: Fork) -> None:
    while (message := fork.line.wait()) is not None:
        if "granted" in message:
            os.write(fork.line.fileno(), os.pread(fork.line.descriptors[-1], 2**20, 0))
    threading.Event().wait()  # It does not end by itself.
