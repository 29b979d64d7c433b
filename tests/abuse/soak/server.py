"""The server of soak.py: ``kestrel-grpc serve``, with a thread that reports the resources of the process on request.

python -m tests.abuse.soak.server FLAGS OF SERVE…

For each line "probe" on standard input, it collects garbage and writes one JSON object (Held) to standard output.
"""

import asyncio
import ctypes
import dataclasses
import gc
import json
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.traffic.processes import ServerProcess
from kestrel_grpc.cli import program
from kestrel_grpc.process import serving
from kestrel_grpc.process.server import KestrelServer


@dataclass(frozen=True)
class Held:
    """The resources of the process."""

    rss_kib: int
    in_use_kib: int
    """Memory that the C library's allocator has given out. Unlike resident memory, it holds nothing that was freed."""
    blocks: int
    """Blocks that Python's own allocator has given out."""
    objects: int
    """The objects that the garbage collector tracks."""
    tasks: int
    threads: int
    descriptors: int
    calls: int
    admitted: int
    held_bytes: int
    stored_kib: int
    """Images that later requests may name by their ids."""
    requests: int
    lost_pages: int
    """Pages that are neither free nor cached. Without running requests, this must be 0."""
    open_traces: int


def held_by(server: ServerProcess) -> Held:
    """Returns what a server of this module holds now, after a garbage collection."""
    return Held(**json.loads(server.ask("probe")))


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
        engine, admission = self.served.default.loaded, self.guard.admission
        assert engine is not None
        stats = engine.stats
        return Held(
            rss_kib=_resident_kib(),
            in_use_kib=_in_use_kib(),
            blocks=sys.getallocatedblocks(),
            objects=len(gc.get_objects()),
            tasks=len(asyncio.all_tasks()) - 1,
            threads=threading.active_count(),
            descriptors=len(list(Path("/proc/self/fd").iterdir())) - 1,
            calls=self.in_flight.count,
            admitted=admission.calls,
            held_bytes=self.guard.held_bytes,
            stored_kib=self.images.size_bytes // 1024,
            requests=engine.num_requests,
            lost_pages=stats.pages_held,
            open_traces=0 if self.telemetry is None else self.telemetry.num_open_traces,
        )


def _resident_kib() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1])
    raise AssertionError("no line Rss in smaps_rollup")


class _AllocatorInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def _in_use_kib() -> int:
    mallinfo2 = ctypes.CDLL(None).mallinfo2  # In glibc since 2.33, of 2021.
    mallinfo2.restype = _AllocatorInfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd) // 1024


def main(arguments: list[str] | None = None) -> Any:
    # Check that the name is still in this module. Otherwise, no thread would answer probes.
    assert vars(serving)["KestrelServer"] is KestrelServer
    serving.KestrelServer = ProbedServer  # type: ignore[attr-defined, misc]
    return program.main(["serve", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
