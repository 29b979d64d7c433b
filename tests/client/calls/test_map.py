"""map: many images, a few at a time, in order, with errors beside results."""

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kestrel_client import (
    CaptionTask,
    DetectTask,
    InvalidArgumentError,
    InvalidImageError,
    InvalidRequestError,
    KestrelError,
    PointTask,
    QueryTask,
    SegmentTask,
)
from kestrel_client.calls.mapping import gather_bounded, run_bounded

IMAGE = np.zeros((4, 8, 3), np.uint8)


@pytest.mark.parametrize(
    "task", [QueryTask("how many?"), CaptionTask("long"), PointTask("cat"), SegmentTask("cat")]
)
def test_every_task(client: Any, task: Any) -> None:
    (result,) = client.map([IMAGE], task)
    assert type(result).__name__ == type(task).__name__.replace("Task", "Result")


def test_errors_stand_beside_results(client: Any) -> None:
    told: list[tuple[int, int | None]] = []
    images = [IMAGE, b"", IMAGE]
    done = client.map(images, DetectTask("cat"), progress=lambda *now: told.append(now))
    assert [type(each).__name__ for each in done] == [
        "DetectResult",
        "InvalidImageError",
        "DetectResult",
    ]
    assert sorted(told) == [(1, 3), (2, 3), (3, 3)]
    (refused,) = client.map([IMAGE], DetectTask("bad"))
    assert isinstance(refused, InvalidArgumentError)
    assert client.map([], DetectTask("cat")) == []
    with pytest.raises(InvalidRequestError, match="concurrency=0"):
        client.map([IMAGE], DetectTask("cat"), concurrency=0)
    with pytest.raises(InvalidRequestError, match="not one"):
        client.map("picture.jpg", DetectTask("cat"))


async def test_the_same_from_an_event_loop(async_client: Any) -> None:
    done = await async_client.map([IMAGE, b""], DetectTask("cat"), concurrency=2)
    assert len(done[0].objects) == 2 and isinstance(done[1], InvalidImageError)


def test_few_run_at_once_and_an_iterator_is_read_no_faster() -> None:
    running, most, read = 0, 0, 0
    lock = threading.Lock()

    def numbers() -> Iterator[int]:
        nonlocal read
        for number in range(20):
            read = number
            yield number

    def work(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            assert read - number <= 3
        time.sleep(0.001 * (number % 3))
        with lock:
            running -= 1
        if number == 5:
            raise KestrelError("five")
        return number

    done = run_bounded(numbers(), work, 3, None)
    assert [each for each in done if isinstance(each, int)] == [n for n in range(20) if n != 5]
    assert isinstance(done[5], KestrelError) and 1 < most <= 3


async def test_few_run_at_once_on_an_event_loop() -> None:
    running, most = 0, 0

    async def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001 * (number % 3))
        running -= 1
        return number

    assert await gather_bounded(iter(range(9)), work, 4, None) == list(range(9))
    assert most == 4

    async def broken(number: int) -> int:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        await gather_bounded([1, 2], broken, 2, None)


def test_the_task_has_the_sampling_options(client: Any) -> None:
    with pytest.raises(TypeError, match="temperature"):
        client.map([IMAGE], CaptionTask(), temperature=0.5)
