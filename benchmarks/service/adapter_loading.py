"""Measures what loading adapters costs running streams: their gaps between tokens, with and without loads beside them.

python -m benchmarks.service.adapter_loading --model moondream2 --random-weights --device cuda --json F

Streams about one image run without adapters. Phases without and with loads alternate. In a phase with loads, an adapter
is loaded every ``--every`` seconds, and none is applied, so that the loads alone are measured. Its file changes before
each load, so it is read, checked, converted and copied to the device each time. With ``--paced-ms`` the device has the
shape of Moondream 2, and only waits so long for each step (overhead/paced_device.py). This shows, without a GPU, what
loads take of the interpreter and the processors of its host.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from kestrel_engine import ImageEvent, RequestEvent, RuntimeConfig, StepEvent
from kestrel_engine.adapters.library import AdapterLibrary
from kestrel_engine.adapters.origins.origins import Origins
from kestrel_engine.runtime.gpu.adapters.layout import SlabLayout

from ..models.opening import Opened, engine_on, model_arguments, open_model, parse, server_gc
from ..models.random_adapters import write_random_adapters
from ..overhead.paced_device import paced_build
from ..reports.report import Report, benchmark_parser, median, quantile
from ..traffic.callers import EngineTarget
from ..traffic.images import jpeg

STAGING_S = 0.0005
"""For which a launch of the paced device holds the interpreter."""
MOST_MORE = 10.0
"""Bar: by how many percent the p99 of the gaps may grow."""


@dataclass
class Gaps:
    """The observer of the engine: keeps the gaps of the current phase."""

    found: list[float] = field(default_factory=list)

    def on_step(self, event: StepEvent) -> None:
        for gap_s, count in event.token_gaps:
            self.found += [gap_s] * count

    def on_request(self, event: RequestEvent) -> None:
        pass

    def on_image(self, event: ImageEvent) -> None:
        pass

    def taken(self) -> list[float]:
        found, self.found = self.found, []
        return found


def open_paced(folder: Path, streams: int, step_s: float) -> Opened:
    """A device that only waits, with adapters in the form of the GPU's kernels, in the memory of the host."""
    config = RuntimeConfig(max_batch_size=streams, max_seq_length=2048, preprocess_threads=1)
    built = paced_build(config, step_s=step_s, staging_s=STAGING_S)
    host = torch.device("cpu")
    library = AdapterLibrary(
        Origins(folder),
        built.model,
        dtype=torch.bfloat16,
        max_bytes=1 << 30,
        packer=SlabLayout(built.model, torch.bfloat16, host),
    )
    return Opened(config, replace(built, adapters=library), 0.0)


async def keep_streaming(target: EngineTarget, image: bytes, tokens: int) -> None:
    """Runs a stream, and another one when it has ended."""
    while True:
        await target.forced(image, tokens)


async def load_for(
    seconds: float, every_s: float, library: AdapterLibrary, file: Path
) -> list[float]:
    """Loads the adapter of ``file`` every ``every_s`` seconds. Returns the seconds of each load."""
    took, end = list[float](), time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        os.utime(file)
        (await library.acquire(file.stem)).give_back()
        took.append(time.perf_counter() - began)
        left = min(began + every_s, end) - time.perf_counter()
        await asyncio.sleep(max(0.0, left))
    return took


async def measure(opened: Opened, file: Path, args: argparse.Namespace, report: Report) -> None:
    library, gaps = opened.built.adapters, Gaps()
    assert library is not None
    image = jpeg(1, 850, 600)
    quiet, loading, took, more = (list[float]() for _ in range(4))
    async with engine_on(opened, gaps) as running:
        await running.target.forced(image, 2)
        streams = [
            asyncio.create_task(keep_streaming(running.target, image, args.tokens))
            for _ in range(args.streams)
        ]
        try:
            while running.engine.stats.running < args.streams:
                await asyncio.sleep(0.05)
            await load_for(0.01, 0.0, library, file)  # The first load imports and allocates.
            for _ in range(args.rounds):
                gaps.taken()
                await asyncio.sleep(args.seconds)
                without = gaps.taken()
                took += await load_for(args.seconds, args.every, library, file)
                beside = gaps.taken()
                more.append(100 * (quantile(beside, 0.99) / quantile(without, 0.99) - 1))
                quiet += without
                loading += beside
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    for phases, found in (("without loads", quiet), ("with loads", loading)):
        report.add(
            f"Gaps between tokens of {args.streams} streams (ms)",
            {
                "phases": phases,
                "gaps": len(found),
                "p50": 1e3 * median(found),
                "p99": 1e3 * quantile(found, 0.99),
                "p99.9": 1e3 * quantile(found, 0.999),
                "max": 1e3 * max(found, default=0.0),
            },
        )
    report.add(
        f"Loads of an adapter of rank {args.rank}, one every {args.every:g} s (ms)",
        {
            "loads": len(took),
            "MB": library.counts.num_bytes / 1e6,
            "p50": 1e3 * median(took),
            "max": 1e3 * max(took),
        },
    )
    report.bar("p99 of the gaps with loads, % more (median of rounds)", median(more), MOST_MORE)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = benchmark_parser("service.adapter_loading", __doc__)
    add = parser.add_argument
    add("--streams", type=int, default=64, metavar="N", help="streams that run [64]")
    add("--tokens", type=int, default=700, metavar="N", help="tokens of a stream [700]")
    add("--rank", type=int, default=16, metavar="R", help="rank of the adapter [16]")
    add("--every", type=float, default=1.0, metavar="S", help="seconds between loads [1]")
    add("--seconds", type=float, default=5.0, metavar="S", help="seconds of a phase [5]")
    add("--rounds", type=int, default=5, metavar="N", help="phases of each kind [5]")
    add(
        "--paced-ms",
        type=float,
        default=0.0,
        metavar="MS",
        help="ms of a step of a device that waits [0: a real one]",
    )
    args, of_model = parse(parser, arguments)
    if args.quick:
        args.streams, args.tokens, args.seconds, args.every, args.rounds = 2, 60, 0.3, 0.1, 1
    report = Report("adapter_loading", {**vars(args), "model": of_model})
    with ExitStack() as held:
        folder = Path(held.enter_context(TemporaryDirectory()))
        if args.paced_ms:
            opened = open_paced(folder, args.streams, args.paced_ms / 1e3)
        else:
            config = model_arguments(of_model, quick=args.quick)
            opened = open_model(replace(config, adapters_dir=folder))
        held.callback(opened.runtime.close)
        (name,) = write_random_adapters(opened, folder, 1, args.rank)
        held.enter_context(server_gc())
        asyncio.run(measure(opened, folder / f"{name}.safetensors", args, report))
    report.finish(args.json)


if __name__ == "__main__":
    main()
