"""Fleet: the client processes of a run. With one, the requests are sent from this process. Each has a Client."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from ...parser import CommandError
from ..tally import Tally
from .client_health import ClientHealth
from .sample_images import ImageSource
from .sender import ClientPlan, Connections, Sender, Stage

_PER_CONNECTION = 64
"""Calls in progress on one connection. A server allows 100 by default; further ones would wait in the client."""
_OPTIONS = (
    # Clients with the same target would otherwise share a connection.
    ("grpc.use_local_subchannel_pool", 1),
    # A retry would hide a refusal, and add to the load.
    ("grpc.enable_retries", 0),
)
_LEAD_S = 0.3
"""From giving a stage to the processes until it begins."""
_END_PATIENCE_S = 3.0
"""An interrupted process may be in the middle of a stage."""


class Client:
    """A context manager. Its methods block; they run an event loop of this process."""

    def __init__(self, plan: ClientPlan) -> None:
        self._runner = asyncio.Runner()
        count = 1 + (plan.most_in_flight - 1) // _PER_CONNECTION
        self._clients = [plan.connect(channel_options=_OPTIONS) for _ in range(count)]
        self._images = ImageSource(plan.images, plan.unique_share)
        self._sender = Sender(plan, Connections(self._clients, _PER_CONNECTION), self._images)

    def describe(self) -> dict[str, Any]:
        """Connects, and describes the server and its model. Raises the SDK's KestrelError."""
        server = self._runner.run(self._clients[0].server_info())
        model = self._runner.run(self._clients[0].get_model())
        facts = ("device", "device_name", "dtype", "max_batch_size", "weights_fingerprint")
        return {**server.to_dict(), **{name: getattr(model, name) for name in facts}}

    def run(self, stage: Stage) -> tuple[Tally, ClientHealth]:
        """Raises CommandError."""
        return self._runner.run(self._sender.run(stage))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exc_info: object) -> None:
        async def close_all() -> None:
            for client in self._clients:
                await client.aclose()

        self._images.close()
        self._runner.run(close_all())
        self._runner.close()


@dataclass(frozen=True)
class Fleet:
    """Runs stages one after the other. ``pipes``: to the processes that send; without one, ``client`` sends."""

    client: Client
    pipes: Sequence[Connection] = ()

    def run(self, stage: Stage) -> tuple[Tally, ClientHealth]:
        """Runs a stage of the whole load, from now on: its ``begins_at`` is replaced. Raises CommandError."""
        now = time.monotonic()
        if not self.pipes:
            return self.client.run(replace(stage, begins_at=now))
        parts = divided(replace(stage, begins_at=now + _LEAD_S), len(self.pipes))
        busy = self.pipes[: len(parts)]
        for pipe, part in zip(busy, parts, strict=True):
            pipe.send(part)
        tally, health = Tally(), ClientHealth()
        for part_tally, part_health in [_received(pipe) for pipe in busy]:
            tally.merge(part_tally)
            health.merge(part_health)
        return tally, health


@contextmanager
def open_fleet(plan: ClientPlan, processes: int) -> Iterator[Fleet]:
    with Client(plan) as client, contextlib.ExitStack() as stack:
        pipes = [
            stack.enter_context(_child(plan)) for _ in range(processes if processes > 1 else 0)
        ]
        for pipe in pipes:
            _received(pipe)  # It has started.
        yield Fleet(client, pipes)


def divided(stage: Stage, processes: int) -> list[Stage]:
    """The parts of a stage, each with a seed of its own; fewer than ``processes`` if fewer requests are in flight."""
    if stage.loop == "open":
        levels = [stage.level / processes] * processes
    else:
        each, more = divmod(round(stage.level), processes)
        levels = [float(each + (i < more)) for i in range(processes) if each + (i < more)]
    most = max(1, stage.most_in_flight // processes)
    return [
        replace(stage, level=level, most_in_flight=most, seed=f"{stage.seed} {i}")
        for i, level in enumerate(levels)
    ]


@contextmanager
def _child(plan: ClientPlan) -> Iterator[Connection]:
    """A client process. It is spawned, not forked, because gRPC does not support forks."""
    context = multiprocessing.get_context("spawn")
    pipe, childs_end = context.Pipe()
    process: BaseProcess = context.Process(target=_serve, args=(childs_end, plan), daemon=True)
    process.start()
    childs_end.close()
    try:
        yield pipe
    finally:
        pipe.close()  # The child ends when it reads this.
        process.join(_END_PATIENCE_S)
        if process.is_alive():
            process.kill()
            process.join()


def _received(pipe: Connection) -> tuple[Tally, ClientHealth]:
    """Raises CommandError if the process ended or failed."""
    try:
        answer = pipe.recv()
    except (EOFError, OSError):
        raise CommandError("a client process has ended; is there enough memory?") from None
    if isinstance(answer, str):
        raise CommandError(answer)
    tally, health = answer
    assert isinstance(tally, Tally) and isinstance(health, ClientHealth)
    return tally, health


def _serve(pipe: Connection, plan: ClientPlan) -> None:
    """Runs the stages that arrive, until the pipe is closed. Sends a text if one fails."""
    # The parent is interrupted too, and closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Client(plan) as client, contextlib.suppress(EOFError, ConnectionError):
        pipe.send((Tally(), ClientHealth()))
        while True:
            stage: Stage = pipe.recv()
            try:
                pipe.send(client.run(stage))
            except CommandError as error:
                pipe.send(str(error))
