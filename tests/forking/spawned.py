"""fork_what_is_spawned: processes that multiprocessing spawns, and those of benchmarks, as forks of the fork server."""

import os
import sys
from multiprocessing import popen_spawn_posix, resource_tracker, util
from multiprocessing.context import SpawnProcess
from typing import Any

import pytest

from benchmarks.traffic import processes
from tests.forking.process import ForkedProcess


def fork_what_is_spawned(patch: pytest.MonkeyPatch) -> None:
    """Until ``patch`` is undone. Such a process needs no seconds to import torch and gRPC. Linux only."""
    if sys.platform == "linux":
        patch.setattr(processes, "START", ForkedProcess)
        patch.setattr(SpawnProcess, "_Popen", staticmethod(_Spawned))


class _Spawned(popen_spawn_posix.Popen):
    """Multiprocessing's own, but for how the process starts and how its end is known: it is no child of this one."""

    _forked: ForkedProcess

    def _launch(self, process_obj: Any) -> None:
        def start(_: bytes, command: list[str], fds: list[int]) -> int:
            how = command.index("-c")  # Options of the interpreter come first.
            self._forked = ForkedProcess([sys.executable, *command[how:]], pass_fds=fds)
            return self._forked.pid

        resource_tracker.ensure_running()  # It starts as usual.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(util, "spawnv_passfds", start)
            super()._launch(process_obj)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            self.returncode = self._forked.poll() if flag else self._forked.wait()
        return self.returncode
