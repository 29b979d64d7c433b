"""Measures several workers behind one port: tokens a second of one worker, of all workers by their own addresses, and
of all workers by the shared address, for which the kernel distributes connections.

python -m benchmarks.service.workers --model moondream2 --random-weights --device cuda --workers 2 --json F

It starts ``kestrel-grpc serve --workers N`` once. First, all workers must give the same answer to the same question.
Callers run in separate processes. Each connection has --streams divided by --connections calls in progress.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from kestrel_client import AsyncKestrelClient, KestrelClient
from kestrel_engine import RuntimeConfig
from kestrel_engine.checkpoint.open import open_model

from ..models.made_up_tokenizer import tokenizer_file
from ..reports.report import Report, benchmark_parser
from ..traffic.images import jpeg
from ..traffic.processes import START_PATIENCE_S, ChildProcess, serve

WARM_S = 2.0
QUESTION = "What is in the middle of the picture?"


@dataclass(frozen=True)
class Load:
    """The load of one process of callers, with a connection to each of ``addresses``."""

    addresses: tuple[str, ...]
    streams: int
    """Calls in progress on each connection."""
    tokens: int
    seconds: float
    image: bytes


def call(pipe: Connection, load: Load) -> None:
    """Sends the tokens a second of a window that begins WARM_S after the start time from ``pipe``."""
    pipe.send(asyncio.run(_call(load, pipe)))


async def _call(load: Load, pipe: Connection) -> float:
    options = [("grpc.use_local_subchannel_pool", 1)]  # a connection for each client
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(AsyncKestrelClient(each, channel_options=options))
            for each in load.addresses
        ]
        for client in clients:
            await client.server_load()
        pipe.send("connected")
        return await _ask(load, clients, pipe)


async def _ask(load: Load, clients: Sequence[AsyncKestrelClient], pipe: Connection) -> float:
    began = pipe.recv()  # A time of the monotonic clock, which all processes share.
    first, last = began + WARM_S, began + WARM_S + load.seconds
    tokens = 0.0

    async def ask(client: AsyncKestrelClient) -> None:
        nonlocal tokens
        while (start := time.monotonic()) < last:
            answer = await client.query(
                load.image, QUESTION, temperature=1.0, max_tokens=load.tokens
            )
            end = time.monotonic()
            within = max(0.0, min(end, last) - max(start, first))
            tokens += answer.usage.output_tokens * within / (end - start)

    await asyncio.gather(*(ask(client) for client in clients for _ in range(load.streams)))
    return tokens / load.seconds


def tokens_a_second(loads: Sequence[Load]) -> float:
    """Returns the tokens a second of all processes of callers together."""
    with ExitStack() as stack:
        pipes = [stack.enter_context(ChildProcess(call, load)) for load in loads]
        for pipe in pipes:
            assert pipe.recv() == "connected"
        began = time.monotonic()
        for pipe in pipes:
            pipe.send(began)
        return float(sum(pipe.recv() for pipe in pipes))


def dealt(addresses: Sequence[str], processes: int) -> list[tuple[str, ...]]:
    """Distributes the connections to ``addresses`` over ``processes`` in turn."""
    return [tuple(addresses[index::processes]) for index in range(processes)]


def check_answers(addresses: Sequence[str], image: bytes) -> None:
    """Raises AssertionError unless all workers give the same answer."""
    answers = set()
    for address in addresses:
        with KestrelClient(address) as client:
            answer = client.query(image, QUESTION, temperature=0.0, max_tokens=48)
            answers.add(answer.answer)
    assert len(answers) == 1, f"workers differ: {answers}"
    print(f"{len(addresses)} workers answer alike: {answers.pop()[:60]!r}", flush=True)


def measure(report: Report, args: argparse.Namespace, folder: Path, shared: str) -> None:
    own = [f"unix:{folder}/{index}" for index in range(args.workers)]
    image = jpeg(1, 756, 756)
    check_answers(own, image)
    per_connection = args.streams // args.connections

    def loads(addresses: Sequence[str], processes: int) -> list[Load]:
        return [
            Load(part, per_connection, args.tokens, args.seconds, image)
            for part in dealt(addresses, processes)
        ]

    alone = tokens_a_second(loads(own[:1] * args.connections, args.callers))
    many = args.connections * args.workers
    for way, addresses in (
        ("one worker", None),
        ("own addresses", own * args.connections),
        ("shared port", [shared] * many),
    ):
        rate = (
            alone
            if addresses is None
            else tokens_a_second(loads(addresses, args.callers * args.workers))
        )
        shares = []
        for address in own:
            with KestrelClient(address) as client:
                shares.append(client.server_load().output_tokens_per_second)
        total = sum(shares) or 1.0
        report.add(
            f"{args.model} on {args.device}, {args.streams} streams a worker",
            {
                "calls by": way,
                "tokens/s": rate,
                "x one": rate / alone,
                "least share": 0.0 if addresses is None else min(shares) / total,
            },
        )


def main(arguments: Sequence[str] | None = None) -> Report:
    parser = benchmark_parser("service.workers", __doc__)
    parser.add_argument("--model", default="kestrel-tiny")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--streams", type=int, default=64, help="calls in progress for each worker [64]"
    )
    parser.add_argument(
        "--connections", type=int, default=16, help="connections for each worker [16]"
    )
    parser.add_argument(
        "--callers", type=int, default=4, help="processes of callers for each worker [4]"
    )
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer [128]")
    parser.add_argument(
        "--seconds", type=float, default=8.0, help="seconds of each of three runs [8]"
    )
    args = parser.parse_args(arguments)
    if args.quick:
        args.callers = 1
        args.streams, args.connections, args.tokens, args.seconds = 4, 4, 8, 1.0
    flags = ["--model", args.model, "--device", args.device, "--workers", str(args.workers)]
    if args.random_weights:
        config = RuntimeConfig(model=args.model, random_weights=True)
        vocabulary = open_model(config).config.text.vocab_size
        flags += ["--random-weights", "--seed", "1", "--tokenizer", str(tokenizer_file(vocabulary))]
    report = Report("workers", vars(args))
    with (
        tempfile.TemporaryDirectory() as name,
        serve(
            [*flags, "--spread", "connections", "--worker-listen", f"unix:{name}/{{index}}"],
            log=Path(name) / "log",
            end_patience_s=START_PATIENCE_S,
        ) as server,
    ):
        print(server.ready_line, end="", flush=True)
        measure(report, args, Path(name), server.address)
    report.finish(args.json)
    return report


if __name__ == "__main__":
    main()
