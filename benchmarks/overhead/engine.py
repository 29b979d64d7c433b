"""Measures the real engine's streams and calls through gRPC, against the engine alone and an echo of the same messages.

It includes the service, the engine, the tokenizer and the step thread, on a device that only waits (paced_device.py).
"""

from __future__ import annotations

from multiprocessing.connection import Connection

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb

from ..reports.report import Report, median, quantile
from ..traffic.processes import ChildProcess
from .callers import Callers, Heard, gaps_ms, tokens_of
from .cpu_window import Window
from .echo_server import STREAM, UNARY, run_echo
from .servers import QUESTION, Load, Pace, run_alone, run_asked, run_server

STREAM_LIMIT_US, UNARY_LIMIT_US, RATE_LIMIT = 15.0, 150.0, 0.90


def streamed(load: Load) -> tuple[Window, list[Heard]]:
    """Measures streams through the server."""
    with ChildProcess(run_server, load) as server, Callers(load.streams) as callers:
        heard = callers.read_streams(server.recv(), load.tokens)
        server.send("window")
        return server.recv(), heard


def echoed(load: Load, messages: list[bytes], pause_s: float) -> float:
    """Returns the CPU seconds that a bare server needs to send ``messages`` to every stream, one every ``pause_s``."""
    echo = ChildProcess(run_echo, STREAM, messages, load.streams, pause_s)
    with echo as server, Callers(load.streams) as callers:
        callers.read_streams(server.recv(), load.tokens)
        server.send("streamed")
        return float(server.recv())


def measure_streams(report: Report, load: Load) -> None:
    title = f"{load.streams} streams, {1e3 * load.step_s:g} ms a step"
    with ChildProcess(run_alone, load) as engine:
        engine.send("window")
        alone: Window = engine.recv()
    rate = alone.steps / alone.wall_s
    report.add(title, _row("engine alone", load, alone, rate, []))
    window, heard = streamed(load)
    report.add(title, _row("as it is", load, window, rate, heard))
    messages = heard[0].messages
    num_tokens = max(map(tokens_of, messages))
    pause_s = window.wall_s / window.steps * num_tokens / len(messages)
    echo_us = 1e6 * echoed(load, messages, pause_s) / (num_tokens * load.streams)
    ours_us = 1e6 * window.cpu_s / (window.steps * load.streams)
    alone_us = 1e6 * alone.cpu_s / (alone.steps * load.streams)
    added = ours_us - echo_us - alone_us
    report.add(
        "CPU a streamed token, us",
        {"server": ours_us, "echo": echo_us, "engine alone": alone_us, "added": added},
    )
    report.bar("us of CPU that a streamed token adds to engine and echo", added, STREAM_LIMIT_US)
    ratio = window.steps / window.wall_s / rate
    report.bar("tokens/s through gRPC over the engine alone", ratio, RATE_LIMIT, at_least=True)


def _row(
    name: str, load: Load, window: Window, alone: float, heard: list[Heard]
) -> dict[str, float | int | str]:
    rate = window.steps / window.wall_s
    num_tokens = sum(max(map(tokens_of, h.messages), default=0) for h in heard)
    gaps = gaps_ms(heard)
    per_token = 1e6 / (window.steps * load.streams)
    return {
        "setting": name,
        "steps/s": rate,
        "of alone": rate / alone,
        "busy": rate * load.step_s,
        "messages/token": sum(len(h.messages) for h in heard) / max(1, num_tokens),
        "us/token": window.cpu_s * per_token,
        **{thread: seconds * per_token for thread, seconds in sorted(window.by_thread.items())},
        "late us p50": 1e6 * median(window.late_s),
        "late us p99": 1e6 * quantile(window.late_s, 0.99),
        "host us p50": 1e6 * median(window.host_s),
        "host us p99": 1e6 * quantile(window.host_s, 0.99),
        "gap p50": median(gaps),
        "gap p99": quantile(gaps, 0.99),
        "gap max": max(gaps, default=0.0),
    }


def measure_unary(report: Report, load: Load, pace: Pace) -> None:
    """Measures questions without an image at a fixed rate, one token each.

    The device has the same pace as for streams. A device without a pace would run a step for every call, and the
    engine's cost in the server would differ from its cost alone.
    """
    task = {"question": QUESTION, "max_tokens": 1}
    request = pb.QueryRequest(query=task).SerializeToString()
    num_calls, rate = pace.calls * pace.callers, pace.callers / pace.pause_s
    with ChildProcess(run_asked, load, pace) as engine:
        costs = {"engine alone": 1e6 * engine.recv() / num_calls}
    with ChildProcess(run_server, load) as server:
        costs["server"], answer, times = _asked(server, request, pace)
    with ChildProcess(run_echo, UNARY, [answer], load.streams, 0.0) as server:
        costs["echo"], _, echo_times = _asked(server, request, pace)
    seen = {"server": times, "echo": echo_times}
    for name, cost in costs.items():
        ms = [1e3 * t for t in seen.get(name, [])]
        row = {"us": cost, "p50 ms": median(ms), "p99 ms": quantile(ms, 0.99), "of": name}
        report.add(f"CPU of a unary call at {rate:g} a second", row)
    added = costs["server"] - costs["echo"] - costs["engine alone"]
    report.bar("us of CPU that a unary call adds to engine and echo", added, UNARY_LIMIT_US)


def _asked(server: Connection, request: bytes, pace: Pace) -> tuple[float, bytes, list[float]]:
    """Returns the server's CPU microseconds a call, an answer, and the seconds of each call."""
    address = server.recv()
    with Callers(pace.callers) as callers:
        callers.call(address, request, Pace(pace.callers, 2, 0.01))
        server.send("cpu")
        before = server.recv()
        answer, times = callers.call(address, request, pace)
        server.send("cpu")
    cost = 1e6 * (server.recv().cpu - before.cpu) / (pace.calls * pace.callers)
    return cost, answer, times
