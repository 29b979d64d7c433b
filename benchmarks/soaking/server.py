"""The server of soak.py: ``kestrel-grpc serve``, with a thread that reports the resources of the process on request.

python -m benchmarks.soaking.server FLAGS OF SERVE…

For each line "probe" on standard input, it collects garbage and writes one JSON object (Held) to standard output.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kestrel_grpc.cli import parser
from kestrel_grpc.process import serving
from kestrel_grpc.process.server import KestrelServer


@dataclass(frozen=True)
class Held:
    """The resources of the process. Memory in KiB: all resident memory, and the anonymous part of it."""

    rss_kib: int
    anonymous_kib: int
    objects: int
    """The objects that the garbage collector tracks."""
    tasks: int
    threads: int
    descriptors: int
    calls: int
    admitted: int
    held_bytes: int
    requests: int
    lost_pages: int
    """Pages that are neither free nor cached. Without running requests, this must be 0."""
    open_traces: int


class ProbedServer(KestrelServer):
    """A server that answers probes once it listens."""

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._answer, args=(loop,), name="probe", daemon=True).start()

    def _answer(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in sys.stdin:
            assert line == "probe\n", line
            held = asyncio.run_coroutine_threadsafe(self._probe(), loop).result()
            print(json.dumps(dataclasses.asdict(held)), flush=True)

    async def _probe(self) -> Held:
        gc.collect()
        memory = _memory()
        engine, admission = self.served.loaded, self.guard.admission
        assert engine is not None
        stats = engine.stats
        return Held(
            rss_kib=memory["Rss"],
            anonymous_kib=memory["Anonymous"],
            objects=len(gc.get_objects()),
            tasks=len(asyncio.all_tasks()) - 1,
            threads=threading.active_count(),
            descriptors=len(list(Path("/proc/self/fd").iterdir())) - 1,
            calls=self._in_flight.count,
            admitted=admission.calls,
            held_bytes=self.guard.held_bytes,
            requests=engine.num_requests,
            lost_pages=stats.pages_held,
            open_traces=0 if self.telemetry is None else self.telemetry.num_open_traces,
        )


def _memory() -> dict[str, int]:
    """Returns the memory of the process by kind, in KiB."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    return {name: int(value.split()[0]) for name, _, value in (x.partition(":") for x in lines)}


def main(arguments: list[str] | None = None) -> Any:
    # Check that the name is still in this module. Otherwise, no thread would answer probes.
    assert vars(serving)["KestrelServer"] is KestrelServer
    serving.KestrelServer = ProbedServer  # type: ignore[attr-defined, misc]
    return parser.main(["serve", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
