"""``bench``: a quick load test of a running server: requests/s, time to first token, gaps between tokens.

The client measures times from sending to receiving, so they include the network. The repository's benchmarks measure
more, with less noise. This command shows how a server performs from the client's place.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from kestrel_client import AsyncKestrelClient, KestrelError, TextDelta

from ..connection import add_connection_flags, open_async_client, sdk_errors
from ..parser import CommandError
from ..values import seconds, whole
from .flags import request_options
from .inputs import IMAGE_HELP, open_inputs


@dataclass
class Measured:
    """The measurements, in seconds."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    """For each answer, the time from its first text to its last, divided by the number of further tokens."""
    total: list[float] = field(default_factory=list)
    tokens: int = 0
    errors: dict[str, int] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Sends real requests to the server. Do not use it with a server that others need."
    )
    parser.add_argument("words", metavar="IMAGE", nargs="*", help=f"{IMAGE_HELP} [a sample image]")
    parser.add_argument(
        "--question",
        default="What is in this image?",
        help="question about each image [%(default)s]",
    )
    parser.add_argument(
        "--concurrency",
        type=whole(1, 1024),
        default=8,
        metavar="N",
        help="requests in flight, 1 to 1024 [%(default)s]",
    )
    parser.add_argument(
        "--seconds",
        type=seconds(0.1, 3600),
        default=10.0,
        metavar="S",
        help="how long to send requests, 0.1 to 3600 [%(default)s]",
    )
    parser.add_argument(
        "--max-tokens",
        type=whole(),
        default=32,
        help="limit on the tokens of an answer [%(default)s]",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, times in milliseconds")
    parser.set_defaults(
        request_id=None, priority="low", cache_salt=None, background=None, region=None
    )
    parser.add_argument("--model", help="name of the model that must answer")
    parser.add_argument("--adapter", metavar="NAME", help="adapter to apply [none]")
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    images = [each.source for each in open_inputs(args.words)] or [_sample()]
    with sdk_errors(args):
        measured, seconds = asyncio.run(_measure(args, images))
    if not measured.total:
        ((error, _),) = list(measured.errors.items())[:1] or [("no request ended in time", 0)]
        raise CommandError(f"no request succeeded: {error}")
    summary = _summary(measured, seconds, args.concurrency)
    if args.json:
        print(json.dumps(summary))
    else:
        _print(summary)
    return 0


async def _measure(args: argparse.Namespace, images: Sequence[object]) -> tuple[Measured, float]:
    measured = Measured()
    async with open_async_client(args) as client:
        await client.server_info()  # Connects, and fails if there is no server.
        began = time.perf_counter()
        end = began + args.seconds

        async def caller(number: int) -> None:
            index = number
            while time.perf_counter() < end:
                try:
                    await _one(client, args, images[index % len(images)], measured)
                except KestrelError as error:
                    words = str(error).splitlines()[0]
                    measured.errors[words] = measured.errors.get(words, 0) + 1
                    await asyncio.sleep(0.05)
                index += args.concurrency

        await asyncio.gather(*(caller(number) for number in range(args.concurrency)))
        return measured, time.perf_counter() - began


async def _one(
    client: AsyncKestrelClient, args: argparse.Namespace, image: object, measured: Measured
) -> None:
    sent = time.perf_counter()
    first = last = None
    options = {**request_options(args), "max_tokens": args.max_tokens}
    async with client.stream_query(image, args.question, **options) as stream:  # type: ignore[arg-type]
        async for event in stream:
            if isinstance(event, TextDelta):
                last = time.perf_counter()
                first = first or last
        result = await stream.result()
    tokens = result.usage.output_tokens
    if first is not None and last is not None:
        measured.ttft.append(first - sent)
        if tokens > 1:
            measured.gaps.append((last - first) / (tokens - 1))
    measured.total.append(time.perf_counter() - sent)
    measured.tokens += tokens


def _summary(measured: Measured, seconds: float, concurrency: int) -> dict[str, object]:
    return {
        "seconds": round(seconds, 3),
        "concurrency": concurrency,
        "requests": len(measured.total),
        "errors": measured.errors,
        "requests_per_second": round(len(measured.total) / seconds, 3),
        "output_tokens_per_second": round(measured.tokens / seconds, 3),
        "ttft_ms": _spread(measured.ttft),
        "itl_ms": _spread(measured.gaps),
        "total_ms": _spread(measured.total),
    }


def _spread(times: list[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None if nothing was measured. Each percentile is a measured time."""
    if not times:
        return None
    ordered = sorted(times)
    percentiles = {
        f"p{percent}": ordered[math.ceil(percent / 100 * len(ordered)) - 1]
        for percent in (50, 90, 99)
    }
    spread = {"mean": statistics.fmean(ordered), **percentiles}
    return {name: round(1e3 * value, 3) for name, value in spread.items()}


def _print(summary: dict[str, object]) -> None:
    print(
        f"{summary['requests']} requests in {summary['seconds']} s, {summary['concurrency']} at once: "
        f"{summary['requests_per_second']} requests/s, "
        f"{summary['output_tokens_per_second']} tokens/s"
    )
    print(f"{'ms':24}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}")
    for name, title in (
        ("ttft_ms", "first token (TTFT)"),
        ("itl_ms", "between tokens (ITL)"),
        ("total_ms", "whole answer"),
    ):
        spread = summary[name]
        if isinstance(spread, dict):
            print(f"{title:24}" + "".join(f"{value:10.1f}" for value in spread.values()))
    errors = summary["errors"]
    assert isinstance(errors, dict)
    for words, count in errors.items():
        print(f"{count} failed: {words}")


def _sample() -> bytes:
    """The demo's image."""
    from importlib.resources import files

    return files("kestrel_grpc.cli").joinpath("demo.jpg").read_bytes()
