"""EarlyKernels: compiles a model's kernels in a process of its own while this process reads the weights.

Otherwise a first start compiles each kernel at its first launch, one after the other: half a minute on an H100. The
process runs compiling/models.py on all processors, into Triton's own cache. Its failure costs time only. A file in the
cache notes that it was done, for the same code, libraries, card and settings.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import IO, TYPE_CHECKING

from .. import clock
from ..config.runtime import RuntimeConfig
from ..runtime.gpu.device import Capabilities
from ..types.model_config import ModelConfig

if TYPE_CHECKING:
    from ..types.progress import Progress

logger = logging.getLogger(__name__)

LEAST_PROCESSORS = 4
"""With fewer, the process would hardly be faster than the launches."""
PATIENCE_S = 60.0
"""After this, kernels are compiled at their launches."""
_LOOK_S = 0.1
_SHOWN = 400

_START = "from kestrel_engine.compiling.early import main; main()"
_CODE = ("kernels", "runtime/gpu", "models", "compiling")
"""Folders of this package that decide which kernels are launched."""
_SETTINGS = (
    "precision",
    "dtype",
    "fp8_experts",
    "fp8_gemms",
    "weights",
    "kv_cache_dtype",
    "attention",
    "cuda_graphs",
    "has_adapters",
)
"""Those of RuntimeConfig that decide most of the kernels. Others, such as the size of a batch, add a few, for which no
start should wait."""


class EarlyKernels:
    """A running compilation, of this process or of another one with the same cache. Made by `begin`."""

    def __init__(self, lock: IO[bytes], errors: IO[bytes], mark: Path) -> None:
        self._lock, self.errors, self._mark = lock, errors, mark
        self.process: subprocess.Popen[bytes] | None = None
        self._began = clock.now()

    @classmethod
    def begin(
        cls,
        config: RuntimeConfig,
        model: ModelConfig,
        card: Capabilities,
        folder: Path,
        *,
        processors: int | None = None,
    ) -> EarlyKernels | None:
        """Starts compiling for ``card`` into Triton's cache ``folder``. ``model``: the configuration of that of
        ``config``. None: it was done before, is not worth while, or the cache cannot be written."""
        if (processors or os.cpu_count() or 1) < LEAST_PROCESSORS:
            return None
        mark = folder / f"kestrel-{_key(config, model, card)}.compiled"
        if mark.exists():
            return None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock, errors = mark.with_suffix(".lock").open("ab"), tempfile.TemporaryFile()
        except OSError:
            return None
        found = cls(lock, errors, mark)
        try:
            # Another process may have done it since the first look.
            if found._takes_lock() and not mark.exists():
                found._start(config, card, folder)
        except OSError as error:
            logger.info("no process can be started to compile kernels: %s", error.strerror)
            found.close()
            return None
        return found

    def wait(self, progress: Progress | None = None) -> None:
        """Returns when the compilation has ended, or after PATIENCE_S."""
        until = self._began + PATIENCE_S
        if progress is not None:
            progress(0, 0, "kernels, which are compiled once")
        while clock.now() < until and not self.has_ended():
            clock.sleep(_LOOK_S)
        process = self.process
        if process is None:
            return
        if process.poll() == 0:
            with contextlib.suppress(OSError):  # The next start looks once more.
                self._mark.touch()
            logger.info("kernels were compiled in %.1f s", clock.now() - self._began)
            return
        why = "it took too long"
        if process.poll() is not None:
            self.errors.seek(0)
            text = self.errors.read().decode(errors="replace").strip()
            why = f"status {process.returncode}: {text[-_SHOWN:]}"
        logger.info("kernels are compiled when they are launched, not before: %s", why)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdin is not None
            with contextlib.suppress(OSError):  # It may not have read all.
                self.process.stdin.close()
        self.errors.close()
        self._lock.close()

    def _takes_lock(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _start(self, config: RuntimeConfig, card: Capabilities, folder: Path) -> None:
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join(filter(None, map(str, sys.path))),
        }
        self.process = subprocess.Popen(
            # Without -P, modules of the working directory would come first.
            [sys.executable, "-P", "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env=environment,
        )
        assert self.process.stdin is not None
        # The pipe stays open: its end is that of this process.
        with contextlib.suppress(BrokenPipeError):  # It has ended, and `wait` says why.
            pickle.dump((config, asdict(card), folder), self.process.stdin)
            self.process.stdin.flush()

    def has_ended(self) -> bool:
        """Whether the process has ended, or the other process that had the lock."""
        return self._takes_lock() if self.process is None else self.process.poll() is not None


def _key(config: RuntimeConfig, model: ModelConfig, card: Capabilities) -> str:
    """Names what decides which kernels are launched, and how Triton compiles them."""
    import torch
    import triton

    known = hashlib.sha256()
    root = Path(__file__).parents[1]
    for folder in _CODE:
        for file in sorted((root / folder).rglob("*.py")):
            known.update(file.read_bytes())
    settings = {name: str(getattr(config, name)) for name in _SETTINGS}
    known.update(repr((sys.version, torch.__version__, triton.__version__)).encode())
    known.update(repr((model, sorted(asdict(card).items()), settings)).encode())
    return known.hexdigest()[:32]
