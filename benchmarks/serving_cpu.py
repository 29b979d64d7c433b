"""Measures serving the tests' model on a CPU: concurrent callers, batched decoding, fresh and repeated images.

python -m benchmarks.serving_cpu [--quick] [--grpc] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from kestrel_engine import RuntimeConfig

from .models import TINY
from .reports.program import Flag, Program
from .reports.report import Report, median, quantile
from .traffic.callers import Answer, EngineTarget, Target, engine_target, served_target
from .traffic.random_images import jpeg

PROGRAM = Program(
    "serving_cpu",
    __doc__,
    Flag("--model", TINY, "name or path"),
    Flag("--threads", None, "threads of one operator [torch's choice]", type=int),
    Flag("--max-batch-size", 64, "sequences a step"),
    Flag("--grpc", False, "call a server through the SDK; no RPC has forced decoding"),
)
Call = Callable[[], Awaitable[Answer]]
NUM_CALLERS = (1, 4, 16, 64)
QUESTIONS = ("What is this?", "How many red circles are there?", "Is there a star?")
OBJECTS = ("red circle", "star")
SIZE = (850, 600)
"""Of the images, in pixels."""


async def closed_loop(num_callers: int, calls: Sequence[Call]) -> tuple[float, list[Answer]]:
    """Makes ``calls`` from ``num_callers`` callers, which call again after each answer. Returns (seconds, answers)."""
    waiting = iter(calls)
    answers: list[Answer] = []

    async def caller() -> None:
        for call in waiting:
            answers.append(await call())

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(num_callers)))
    return time.perf_counter() - began, answers


def mixed_calls(target: Target, rng: random.Random, images: list[bytes], count: int) -> list[Call]:
    """Returns captions, questions and detections about a few images that repeat."""

    def call() -> Call:
        image, kind = rng.choice(images), rng.random()
        if kind < 0.4:
            return partial(target.caption, image, 48)
        if kind < 0.8:
            return partial(target.query, image, rng.choice(QUESTIONS))
        return partial(target.detect, image, rng.choice(OBJECTS))

    return [call() for _ in range(count)]


async def measure_callers(target: Target, report: Report, *, quick: bool) -> None:
    """Measures mixed skills. Each number of callers has different images, one for every four requests."""
    for num_callers in NUM_CALLERS[:2] if quick else NUM_CALLERS:
        count = 2 if quick else max(24, 3 * num_callers)
        images = [jpeg(1000 * num_callers + i, *SIZE) for i in range(-(-count // 4))]
        calls = mixed_calls(target, random.Random(num_callers), images, count)
        seconds, answers = await closed_loop(num_callers, calls)
        ttft = [a.ttft_ms for a in answers]
        gaps = [1e3 * gap for a in answers for gap in a.gaps_s]
        hits = sum(a.cached_tokens for a in answers) / sum(a.input_tokens for a in answers)
        report.add(
            "Mixed skills, an image for every four requests (ms)",
            {
                "callers": num_callers,
                "requests": count,
                "requests/s": count / seconds,
                "tokens/s": sum(a.output_tokens for a in answers) / seconds,
                "ttft p50": median(ttft),
                "ttft p95": quantile(ttft, 0.95),
                "itl p50": median(gaps),
                "itl p95": quantile(gaps, 0.95),
                "itl p99": quantile(gaps, 0.99),
                "hit rate": hits,
            },
        )


async def measure_decode(target: EngineTarget, report: Report, *, quick: bool) -> None:
    """Measures decoding with a forced number of tokens on one cached image, with one caller and many in turn."""
    image, num_tokens, rounds = jpeg(1, *SIZE), (4 if quick else 64), (1 if quick else 5)
    await target.forced(image, num_tokens)
    rates: dict[int, list[float]] = {n: [] for n in (1, 4, 16)}
    for _ in range(rounds):
        for num_callers, found in rates.items():
            calls = [partial(target.forced, image, num_tokens)] * num_callers
            seconds, answers = await closed_loop(num_callers, calls)
            found.append(sum(a.output_tokens for a in answers) / seconds)
    for num_callers, found in rates.items():
        report.add(
            f"Decoding on a cached image, {num_tokens} forced tokens, median of {rounds}",
            {
                "callers": num_callers,
                "tokens/s": median(found),
                "of one": median(found) / median(rates[1]),
            },
        )
    report.bar(
        "decoded tokens/s, 16 callers over one",
        median([many / one for many, one in zip(rates[16], rates[1], strict=True)]),
        3.0,
        at_least=True,
    )


async def measure_fresh(target: Target, report: Report, *, quick: bool) -> None:
    """Measures preprocessing, vision and prefill: new images, with one token each."""
    count, rounds = (1 if quick else 16), (1 if quick else 3)
    rates: dict[int, list[float]] = {1: [], 16: []}
    seeds = iter(range(50_000, 60_000))
    for _ in range(rounds):
        for num_callers, found in rates.items():
            images = [jpeg(next(seeds), *SIZE) for _ in range(count)]
            calls = [partial(target.caption, image, 1) for image in images]
            seconds, _ = await closed_loop(num_callers, calls)
            found.append(count / seconds)
    for num_callers, found in rates.items():
        report.add(
            f"Fresh images of {SIZE[0]}x{SIZE[1]}, one token, median of {rounds}",
            {"callers": num_callers, "images/s": median(found)},
        )
    report.bar(
        "fresh images/s, 16 callers over one",
        median([many / one for many, one in zip(rates[16], rates[1], strict=True)]),
        1.0,
        at_least=True,
    )


async def measure_repeated(target: Target, report: Report, *, quick: bool) -> None:
    """Measures the TTFT of an image's first and second question, which differ, on an idle server."""
    first, again = [], []
    for i in range(1 if quick else 10):
        image = jpeg(70_000 + i, *SIZE)
        first.append((await target.query(image, QUESTIONS[0])).ttft_ms)
        again.append((await target.query(image, QUESTIONS[1])).ttft_ms)
    report.add(
        f"A second question about the same image of {SIZE[0]}x{SIZE[1]}, TTFT in ms",
        {"first": median(first), "second": median(again), "ratio": median(first) / median(again)},
    )
    report.bar(
        "TTFT of the first question over that of the second",
        median(first) / median(again),
        5.0,
        at_least=True,
    )


async def measure(args: argparse.Namespace, report: Report) -> None:
    config = RuntimeConfig(
        model=args.model,
        device="cpu",
        max_batch_size=args.max_batch_size,
        max_seq_length=1024,
        cpu_threads=args.threads,
    )
    opening: Callable[[RuntimeConfig], AbstractAsyncContextManager[Target]]
    opening = served_target if args.grpc else engine_target
    async with opening(config) as target:
        await target.caption(jpeg(0, *SIZE), 8)
        if isinstance(target, EngineTarget):
            await measure_decode(target, report, quick=args.quick)
        await measure_fresh(target, report, quick=args.quick)
        await measure_repeated(target, report, quick=args.quick)
        await measure_callers(target, report, quick=args.quick)


def main(arguments: Sequence[str] | None = None) -> Report:
    with PROGRAM.reporting(arguments) as (args, _, report):
        asyncio.run(measure(args, report))
    return report


if __name__ == "__main__":
    main()
