"""DecodedImage: rows are told as they come, errors to all who wait."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from kestrel_engine.errors import ImageDecodeError
from kestrel_engine.preprocess.decoding.decoded_image import DecodedImage


def test_a_whole_image_is_waited_for_by_nobody():
    image = DecodedImage(np.zeros((4, 6, 3), np.uint8))
    image.decode()
    image.wait_for(4)
    assert (image.width, image.height) == (6, 4)


def test_rows_are_there_when_they_were_told():
    go = [threading.Event(), threading.Event()]

    def decoding():
        for number, gate in enumerate(go):
            assert gate.wait(60)
            yield 2 * (number + 1)

    image = DecodedImage(np.zeros((4, 6, 3), np.uint8), decoding())
    with ThreadPoolExecutor(4) as threads:
        decoded = threads.submit(image.decode)
        first, second = threads.submit(image.wait_for, 2), threads.submit(image.wait_for, 3)
        assert not first.done()
        go[0].set()
        first.result(60)
        assert not second.done() and not decoded.done()
        go[1].set()
        second.result(60)
        decoded.result(60)
        image.wait_for(4)
        image.decode()


def test_an_error_reaches_all_who_wait_and_who_come_later():
    gate = threading.Event()

    def decoding():
        yield 1
        assert gate.wait(60)
        raise ImageDecodeError("image", "is torn")

    image = DecodedImage(np.zeros((4, 6, 3), np.uint8), decoding())
    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(image.decode), *(threads.submit(image.wait_for, n) for n in (2, 4))]
        gate.set()
        for job in jobs:
            with pytest.raises(ImageDecodeError, match="is torn"):
                job.result(60)
    with pytest.raises(ImageDecodeError, match="is torn"):
        image.wait_for(4)
