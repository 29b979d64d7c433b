"""Measures the cost of the service itself: a server with canned_engine.py, against an echo of the same messages.

Server and echo run in turn, so that other load on the machine affects both. Figures are medians over rounds. Both
answer at a device's pace. The time of the canned engine's thread is not part of the service's cost.

A unary call is compared with two echoes. The service sends a request's id before the answer, for which grpc.aio needs a
separate exchange with its core. "echo, headers too" does the same, and the bar is relative to it, in the column
"headers too". The column "added" is relative to the echo without headers.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb

from ..reports.report import Report, Row
from ..traffic.processes import ChildProcess
from ..traffic.random_images import jpeg
from .callers import Callers, tokens_of
from .cpu_window import Snapshot
from .echo_server import STREAM, UNARY, run_echo
from .servers import QUESTION, Load, Pace, run_canned

STREAM_LIMIT_US, UNARY_LIMIT_US = 15.0, 150.0
ROUTES = "all routes"
SERVERS = {"as it is": (False, False), ROUTES: (False, True), "watched": (True, False)}
"""Whether each server's optional monitoring is on, and whether it has an HTTP port and batches, which nobody uses."""
MOST_OF_ROUTES = 1.03
"""Limit on the CPU time with all routes, of the time without them."""
ECHO, HEADERS_ECHO = "echo", "echo, headers too"


@dataclass
class _Side:
    """A process that is measured in turn with others. ``seen``: for each turn, the CPU microseconds of the process and
    those of its canned engine."""

    name: str
    pipe: Connection
    address: str
    seen: list[tuple[float, float]] = field(default_factory=list)

    @property
    def is_echo(self) -> bool:
        return self.name.startswith(ECHO)

    @property
    def grpc(self) -> str:
        """The address by gRPC. ``address`` may have one by HTTP after it."""
        return self.address.partition(",")[0]

    def ask(self, question: str) -> Any:
        self.pipe.send(question)
        return self.pipe.recv()

    def cost(self, turn: int) -> float:
        """The CPU microseconds of a turn without the canned engine."""
        cpu, engine = self.seen[turn]
        return cpu - engine


class _Processes(contextlib.ExitStack):
    """Starts each side in a process, and ends them with the context."""

    def add(self, name: str, target: Any, *arguments: Any) -> _Side:
        pipe = self.enter_context(ChildProcess(target, *arguments))
        return _Side(name, pipe, pipe.recv())


def measure_streams(
    report: Report, load: Load, rounds: int, servers: Mapping[str, tuple[bool, bool]] = SERVERS
) -> None:
    """Measures the streams of ``load``, which start at the same time, from the first full step to the last."""

    def measure(side: _Side) -> tuple[float, float]:
        callers.read_streams(side.grpc, load.tokens)
        if side.is_echo:
            return 1e6 * float(side.ask("streamed")) / (load.tokens * load.streams), 0.0
        window = side.ask("window")
        per_token = 1e6 / (window.steps * load.streams)
        return per_token * window.cpu_s, per_token * window.engine_s

    with Callers(load.streams) as callers, _Processes() as processes:
        sides = [processes.add(name, run_canned, load, *on) for name, on in servers.items()]
        first = sides[0]
        messages = callers.read_streams(first.grpc, load.tokens)[0].messages
        assert max(map(tokens_of, messages)) == load.tokens, "a stream ended early"
        window = first.ask("window")
        pause_s = window.wall_s / window.steps * load.tokens / len(messages)
        sides.append(processes.add(ECHO, run_echo, STREAM, messages, load.streams, pause_s))
        _take_turns(sides, rounds, measure)
    title = f"service alone: a token of {load.streams} streams"
    _report_sides(report, sides, title, "a streamed token", STREAM_LIMIT_US)


def measure_wires(report: Report, load: Load, rounds: int) -> None:
    """Compares the streams of ``load`` by gRPC and by Connect, of one server, in turn."""
    rates: dict[str, list[float]] = {"gRPC": [], "Connect": []}
    costs: dict[str, list[float]] = {"gRPC": [], "Connect": []}
    with Callers(load.streams) as callers, _Processes() as processes:
        side = processes.add("both", run_canned, load, False, True)
        grpc, http = side.address.split(",")
        for number in range(rounds + 1):
            for name, address in (("gRPC", grpc), ("Connect", f"http://{http}")):
                heard = callers.read_streams(address, load.tokens)
                assert {max(map(tokens_of, each.messages)) for each in heard} == {load.tokens}
                seconds = max(each.times[-1] for each in heard) - min(
                    each.times[0] for each in heard
                )
                window = side.ask("window")
                own = window.cpu_s - window.engine_s
                if number:  # The first round warms up.
                    rates[name].append(load.tokens * load.streams / seconds)
                    costs[name].append(1e6 * own / (window.steps * load.streams))
    for name, seen in rates.items():
        row: Row = {
            "tokens/s": statistics.median(seen),
            "least": min(seen),
            "most": max(seen),
            "us of CPU": statistics.median(costs[name]),
            "of": name,
        }
        report.add(f"service alone: {load.streams} streams by each wire", row)
    ratio = statistics.median(b / a for a, b in zip(*rates.values(), strict=True))
    report.bar("tokens/s by Connect, of gRPC's", ratio, 0.9, at_least=True)


def measure_unary(
    report: Report,
    load: Load,
    paces: Sequence[Pace],
    rounds: int,
    servers: Mapping[str, tuple[bool, bool]] = SERVERS,
) -> None:
    """Measures questions of one token each, without an image and with a small cached image. Without a pause, each
    caller calls again after each answer."""
    num = load.streams
    few = Pace(num, 2, 0.01)
    with Callers(num) as callers, _Processes() as processes:
        served = [processes.add(name, run_canned, load, *on) for name, on in servers.items()]
        for name, image in (("a unary call", None), ("a call with an image", jpeg(1, 64, 64))):
            request = pb.QueryRequest(query={"question": QUESTION, "max_tokens": 1})
            if image is not None:
                request.images.add(encoded=image)
            data = request.SerializeToString()
            answers = [callers.call(side.grpc, data, few) for side in served]
            echo = (run_echo, UNARY, answers[:1], num)
            echoes = [
                processes.add(ECHO, *echo, load.step_s),
                processes.add(HEADERS_ECHO, *echo, load.step_s, True),
            ]
            for side in echoes:
                callers.call(side.grpc, data, few)
            for pace in paces:
                sides = [replace(side, seen=[]) for side in (*served, *echoes)]
                _take_turns(sides, rounds, lambda side: _asked(side, callers, data, pace))  # noqa: B023
                when = f"{num / pace.pause_s:g} a second" if pace.pause_s else "without a pause"
                label = f"{name}, {num} callers, {when}"
                _report_sides(report, sides, f"service alone: {label}", label, UNARY_LIMIT_US)


def _take_turns(
    sides: Sequence[_Side], rounds: int, measure: Callable[[_Side], tuple[float, float]]
) -> None:
    for number in range(rounds):
        for side in sides[:: -1 if number % 2 else 1]:  # Other load may change during a round.
            side.seen.append(measure(side))


def _report_sides(
    report: Report, sides: Sequence[_Side], title: str, what: str, limit_us: float
) -> None:
    """Reports a row for each side, and a bar for the server's default relative to the echo with the same headers."""
    echoes = {side.name: side for side in sides if side.is_echo}
    bare = echoes[ECHO]
    same = echoes.get(HEADERS_ECHO, bare)  # A stream's headers are one message of hundreds.
    for side in sides:
        added = _added(side, bare)
        row: Row = {
            "us of CPU": statistics.median(cpu for cpu, _ in side.seen),
            "its engine": statistics.median(engine for _, engine in side.seen),
            "added": statistics.median(added),
            "least": min(added),
            "most": max(added),
            "headers too": statistics.median(_added(side, same)),
            "of": side.name,
        }
        report.add(title, row)
    served = sides[0]
    label = f"us of CPU that the service adds to {what}"
    report.bar(label, statistics.median(_added(served, same)), limit_us)
    for each in sides:
        if each.name == ROUTES:
            turns = range(len(each.seen))
            ratio = statistics.median(each.cost(turn) / served.cost(turn) for turn in turns)
            report.bar(f"CPU of {what} with all routes, of without", ratio, MOST_OF_ROUTES)


def _added(side: _Side, echo: _Side) -> list[float]:
    """Returns the added cost of each turn."""
    return [side.cost(turn) - echo.cost(turn) for turn in range(len(side.seen))]


def _asked(side: _Side, callers: Callers, request: bytes, pace: Pace) -> tuple[float, float]:
    # The other sides have had the processors' caches. A short turn would measure that.
    callers.call(side.grpc, request, replace(pace, calls=1))
    before: Snapshot = side.ask("cpu")
    callers.call(side.grpc, request, pace)
    after: Snapshot = side.ask("cpu")
    per_call = 1e6 / (pace.calls * pace.callers)
    return per_call * (after.cpu - before.cpu), per_call * (after.engine - before.engine)
