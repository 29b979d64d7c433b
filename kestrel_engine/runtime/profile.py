"""StepProfile: torch.profiler around the steps of the step thread. Owns the profiler while it records, and its file.

Begun, told of steps and ended on the step thread, because the profiler records the thread that began it (and the device
as a whole); written elsewhere. Bounded in steps by itself and in time by whoever made it; the memory that it takes
meanwhile grows with the steps. Failing to measure never fails a step: what goes wrong comes out of ``ended``.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import time
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

_COMPRESSION = 3


_TEARS_DOWN_WELL = (12, 6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One that was written. ``seconds``: of the recording; ``steps``: that came back meanwhile."""

    path: str
    file_bytes: int
    seconds: float
    steps: int


class StepProfile:
    """Made off the step thread, since loading torch's profiler takes a while. Used once."""

    def __init__(self, max_steps: int, *, cuda: bool, python_functions: bool) -> None:
        from torch.profiler import ProfilerActivity, profile

        if cuda:
            _keep_cupti()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profiler: Any = profile(activities=activities, with_stack=python_functions)
        self._max_steps, self._cuda = max_steps, cuda
        self._began_at = 0.0
        self.begun: Future[None] = Future()
        """Done once it records; has the error if it could not."""
        self.ended: Future[None] = Future()
        """Done once it records no more."""
        for future in (self.begun, self.ended):
            future.set_running_or_notify_cancel()  # Who waits for it may give up; that must not cancel it.
        self.steps = 0
        self.seconds = 0.0

    def begin(self) -> None:
        """On the step thread, as the next two."""
        try:
            self._profiler.start()
        except Exception as error:  # The measurement's edge.
            self.begun.set_exception(error)
            self.ended.set_result(None)
            return
        self._began_at = time.monotonic()
        self.begun.set_result(None)

    def step(self) -> None:
        """One has come back."""
        self.steps += 1
        if self.steps >= self._max_steps:
            self.end()

    def end(self) -> None:
        """Without effect if it has ended."""
        if self.ended.done():
            return
        self.seconds = time.monotonic() - self._began_at
        try:
            if self._cuda:
                import torch

                torch.cuda.synchronize()  # What was launched meanwhile belongs to it.
            self._profiler.stop()
        except Exception as error:  # The measurement's edge.
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def write(self, path: str, max_bytes: int) -> Profile:
        """The trace as JSON for Perfetto with gzip, readable by its owner only. Off the step thread, once it has ended;
        slow. Raises OSError, also for a file of more than ``max_bytes``; then nothing is left of it."""
        part = f"{path}.part"
        try:
            for name in (part, path):  # torch would make it readable by others.
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            self._profiler.export_chrome_trace(part)
            with open(part, "rb") as plain, gzip.open(path, "wb", _COMPRESSION) as packed:
                shutil.copyfileobj(plain, packed)
            size = os.path.getsize(path)
            if not 0 < size <= max_bytes:
                raise OSError(f"the profile takes {size} bytes, there is room for {max_bytes}")
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise
        finally:
            self._profiler = None
            with suppress(OSError):
                os.unlink(part)
        return Profile(path=path, file_bytes=size, seconds=self.seconds, steps=self.steps)


def _keep_cupti() -> None:
    """Before CUDA 12.6 a process with CUDA graphs crashes at its second profile, unless CUPTI stays once it is there.
    torch sees to that for graphs that its own compiler captured; it can't know of ours."""
    import torch

    version = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    if version < _TEARS_DOWN_WELL:
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        os.environ.setdefault("DISABLE_CUPTI_LAZY_REINIT", "1")
