"""StepProfile: records steps of the step thread with torch.profiler. Owns the profiler and the file it writes.

The step thread calls ``begin``, ``step`` and ``end``, because the profiler records the thread that started it, and the
whole device. Another thread writes the file. The profile ends after a number of steps; its creator limits its time. Its
memory grows with the steps. A failed measurement never fails a step: ``begun`` or ``ended`` holds the error.
"""

from __future__ import annotations

import gzip
import logging
import os
import shutil
import warnings
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .. import clock

logger = logging.getLogger(__name__)

_COMPRESSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A written profile. ``seconds``: the duration of the recording. ``steps``: the steps that ended meanwhile."""

    path: str
    file_bytes: int
    seconds: float
    steps: int


class StepProfile:
    """Records once. Create it on another thread than the step thread, because importing torch's profiler is slow."""

    def __init__(self, max_steps: int, *, cuda: bool, python_functions: bool) -> None:
        from torch.profiler import ProfilerActivity, profile

        # Some releases of torch warn at every first start that events of earlier cycles are lost. There is one cycle.
        warnings.filterwarnings("ignore", message=".*Profiler clears events", category=UserWarning)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profiler: Any = profile(activities=activities, with_stack=python_functions)
        self._max_steps, self._cuda = max_steps, cuda
        self._began_at = 0.0
        self.begun: Future[None] = Future()
        """Done once the profiler records, or failed to start."""
        self.ended: Future[None] = Future()
        """Done once the profiler has stopped."""
        for future in (self.begun, self.ended):
            future.set_running_or_notify_cancel()  # A waiting task may be cancelled, but not the future.
        self.steps = 0
        self.seconds = 0.0

    def begin(self) -> None:
        """Starts to record. The step thread calls this method, `step` and `end`."""
        try:
            self._profiler.start()
        except Exception as error:  # A failed measurement must not fail a step.
            self.begun.set_exception(error)
            self.ended.set_result(None)
            return
        self._began_at = clock.now()
        self.begun.set_result(None)

    def step(self) -> None:
        """Counts a step that has ended, and ends the profile after the last one."""
        self.steps += 1
        if self.steps >= self._max_steps:
            self.end()

    def end(self) -> None:
        """Stops to record. Has no effect on an ended profile."""
        if self.ended.done():
            return
        self.seconds = clock.now() - self._began_at
        try:
            if self._cuda:
                import torch

                torch.cuda.synchronize()  # The profile includes all work that is launched already.
            self._profiler.stop()
        except Exception as error:  # A failed measurement must not fail a step.
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def write(self, path: str, max_bytes: int) -> Profile:
        """Writes the trace to ``path`` as gzipped JSON for Perfetto, readable by its owner only.

        Call it after the end, and not on the step thread, because it is slow. Raises OSError, also for a file of more
        than ``max_bytes``. After an error, no file remains.
        """
        part = f"{path}.part"
        try:
            for name in (part, path):  # torch would create files that others can read.
                os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            self._profiler.export_chrome_trace(part)
            with open(part, "rb") as plain, gzip.open(path, "wb", _COMPRESSION) as packed:
                shutil.copyfileobj(plain, packed)
            size = os.path.getsize(path)
            if not 0 < size <= max_bytes:
                raise OSError(f"the profile has {size} bytes, the limit is {max_bytes}")
        except BaseException:
            with suppress(OSError):
                os.unlink(path)
            raise
        finally:
            self._profiler = None
            with suppress(OSError):
                os.unlink(part)
        return Profile(path=path, file_bytes=size, seconds=self.seconds, steps=self.steps)
