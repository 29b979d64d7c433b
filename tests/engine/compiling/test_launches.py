"""The compiler's threads, as far as a test can provoke what they do to each other."""

import gc
import threading
import time

import pytest

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from kestrel_engine.compiling.launches import compiled_launches
from kestrel_engine.kernels.attention.paged_decode import _decode


def test_kernels_are_parsed_one_at_a_time() -> None:
    """Python 3.11 fails to parse in two threads if the garbage collector lets them take turns."""
    kernel = JITFunction(_decode.fn)
    errors: list[BaseException] = []

    def parse() -> None:
        try:
            for _ in range(10):
                kernel.parse()
        except BaseException as error:
            errors.append(error)

    def take_turns(*_: object) -> None:
        time.sleep(0)

    thresholds = gc.get_threshold()
    gc.callbacks.append(take_turns)
    gc.set_threshold(50)
    try:
        with compiled_launches((9, 0)):
            threads = [threading.Thread(target=parse) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        gc.callbacks.remove(take_turns)
        gc.set_threshold(*thresholds)
    assert not errors
