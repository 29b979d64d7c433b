"""``kestrel-grpc serve`` with the fake runtime: starts in a second, and answers or hangs for as long as a request asks.

python -m tests.abuse.fake_server FLAGS OF SERVE…

A step takes STEP_S; no step ends while the file named by HANG_FILE exists, or one with the process's number as its
suffix. While a step hangs, each file with the suffix .passed lets 100 s pass, also for the event loop with MOVES_TIMERS
set. With FAIL set no engine can be made. MODEL names the model. WALL is what the wall clock of all processes shows. The
template of workers runs this module too, as a fork of the fork server.
"""

import asyncio
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from kestrel_engine import InferenceEngine, ModelLoadError, RuntimeConfig, clock, engine
from kestrel_engine.processes.template import confined
from kestrel_engine.types.step import RuntimeLimits, StepPlan
from kestrel_grpc.cli import program
from kestrel_grpc.workers import forks, worker
from kestrel_grpc.workers import template as worker_template
from tests.clock import MovedClock
from tests.engine.fakes import fake_build, never_ends
from tests.fake_runtime import FakeRuntime
from tests.forking.process import ForkedProcess

STEP_S = 0.005
HANG_FILE = "ABUSE_HANG_FILE"
MOVES_TIMERS = "ABUSE_MOVES_TIMERS"
FAIL = "ABUSE_FAIL"
MODEL = "ABUSE_MODEL"
WALL = "ABUSE_WALL"
TEMPLATE = "--template"
LIMITS = RuntimeLimits(
    num_pages=40_000, page_size=2, max_batch_size=4, max_seq_length=20_000, vocab_size=400
)
NO_END = 18_000
"""So many tokens take minutes, which is longer than any test waits."""


def serve() -> int:
    return program.main(["serve", *sys.argv[1:]])


def main(run: Callable[[], Any] = serve) -> Any:
    """Runs ``run``, whose engines have the fake runtime."""
    hang = Path(os.environ.get(HANG_FILE, "/nonexistent"))
    if os.environ.get(MOVES_TIMERS):
        sys.modules["uvloop"] = None  # type: ignore[assignment]  # Only asyncio's timers go by the moved clock.
    if shown := os.environ.get(WALL):
        clock.wall = lambda: float(shown)
    for_ever = hang.with_suffix(".forever")
    device_thread, (never, _) = ThreadPoolExecutor(1), os.pipe()
    moved = MovedClock()

    def pass_time() -> None:
        if (passed := hang.with_suffix(".passed")).exists():
            passed.unlink()
            moved.advance(100)

    def cost(plan: StepPlan) -> float:
        # A file that comes between two looks must not hang the step before .hung says so.
        while (hangs := for_ever.exists() or hang.exists()) or Path(
            f"{hang}.{os.getpid()}"
        ).exists():
            if hangs:
                hang.with_suffix(".hung").touch()
                engine.STOP_PATIENCE_S = 0.1  # Nothing comes of patience now.
            pass_time()
            if for_ever.exists():
                # A system call without end, in a thread for which the interpreter waits at its end, as torch's.
                device_thread.submit(os.read, never, 1).result()
            time.sleep(0.02)
        return STEP_S

    async def create(config: RuntimeConfig, **options: Any) -> InferenceEngine:
        moved.follow(asyncio.get_running_loop())
        if os.environ.get(FAIL):
            raise ModelLoadError(os.environ[FAIL])
        built = fake_build(config, FakeRuntime(LIMITS, never_ends, cost=cost))
        info = replace(built.info, model=os.environ.get(MODEL, built.info.model))
        built = replace(built, info=info)
        return InferenceEngine(config, built, options["skills"], observer=options["observer"])

    InferenceEngine.create = create  # type: ignore[assignment, method-assign]
    confined.start = lambda load: None  # type: ignore[method-assign]  # Most of these servers see no image.
    forks.COMMAND = (sys.executable, "-m", "tests.abuse.fake_server", TEMPLATE)
    if sys.argv[1] == TEMPLATE:
        return worker_template.main(
            sys.argv[2:],
            ("kestrel_grpc.workers.worker",),
            lambda arguments: worker.main(arguments, create),
        )
    if sys.platform == "linux":
        forks.START = ForkedProcess  # type: ignore[misc]
    with clock.installed(now=moved.now):
        return run()


if __name__ == "__main__":
    sys.exit(main())
