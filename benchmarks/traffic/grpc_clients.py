"""ClientProcesses: callers of one or several servers in separate processes, which do not load a server's process.

Each process has its own connection, every n-th question of a run and its share of the callers. All use the SDK's
streams. They read the images from a file.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

from kestrel_client import AsyncKestrelClient

from .callers import ServedTarget
from .chart_trace import ChartTrace, Question, load_images, store_images
from .processes import ChildProcess
from .trace_run import Exchange, RunPlan, run_trace

Target = str | tuple[str, ...]
"""The target of a client: an address, or those of several servers."""


class ClientProcesses(ExitStack):
    """A context manager that runs the processes. ``folder``: for the file with the images."""

    def __init__(
        self, targets: Target | list[Target], trace: ChartTrace, *, count: int, folder: Path
    ) -> None:
        """``targets``: what the processes call; of a list, each process in turn has one."""
        super().__init__()
        dealt = targets if isinstance(targets, list) else [targets]
        path = folder / "images.npz"
        store_images(path, trace.images)
        children = (
            ChildProcess(_client, dealt[index % len(dealt)], path, trace.questions)
            for index in range(count)
        )
        self._pipes = [self.enter_context(child) for child in children]
        for pipe in self._pipes:
            assert pipe.recv() == "ready"

    def begin(self, plan: RunPlan, numbers: Sequence[int]) -> None:
        """Starts a run. Distributes questions and callers over the processes in turn."""
        count = len(self._pipes)
        for index, pipe in enumerate(self._pipes):
            callers = len(range(index, plan.in_flight, count))
            own = numbers[index::count] if plan.in_flight >= count else ()
            if plan.in_flight < count and index < plan.in_flight:
                own = numbers[index :: plan.in_flight]
            pipe.send((replace(plan, in_flight=callers), list(own)))

    def collect(self) -> list[Exchange]:
        """Waits for the end of the run and returns all answers. Raises RuntimeError if a call failed."""
        asked: list[Exchange] = []
        for pipe in self._pipes:
            found = pipe.recv()
            if isinstance(found, str):
                raise RuntimeError(f"a client failed: {found}")
            asked += found
        return asked

    def run(self, plan: RunPlan, numbers: Sequence[int]) -> list[Exchange]:
        self.begin(plan, numbers)
        return self.collect()


def _client(pipe: Connection, target: Target, path: Path, questions: tuple[Question, ...]) -> None:
    """The function of a client process: executes runs from ``pipe`` until None arrives."""
    trace = ChartTrace(load_images(path), questions)

    async def main() -> None:
        async with AsyncKestrelClient(target) as client:
            await client.wait_ready()
            pipe.send("ready")
            while (order := await asyncio.to_thread(pipe.recv)) is not None:
                plan, numbers = order
                served = ServedTarget(client, plan.namespace)
                try:
                    found = await run_trace(served, trace, plan, numbers) if numbers else []
                except (
                    Exception
                ) as error:  # Report every error, because the parent waits for a result.
                    pipe.send(f"{type(error).__name__}: {error}")
                else:
                    pipe.send(found)

    asyncio.run(main())
