"""A Ray cluster of several nodes on this machine, and callers that count what they lose."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil

from kestrel_client import AsyncKestrelClient, KestrelError, UnavailableError
from kestrel_grpc.cluster.follow import DirectoryError, ask
from tests.service.command_line import ROOT, environment

PATIENCE_S = 240.0


class LocalRay:
    """The head runs no servers. Each other node runs at most ``servers``. A context manager."""

    def __init__(self, folder: Path, nodes: int, servers: int = 1) -> None:
        from ray.cluster_utils import Cluster

        # Before it starts: all processes of Ray inherit the path of the packages.
        self._path = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{ROOT}:{ROOT}/clients/python"
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self.folder, self._servers = folder, servers
        self.ray = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
        )
        for _ in range(nodes):
            self.add_node()

    def add_node(self):
        return self.ray.add_node(num_cpus=self._servers)

    def kill_node(self, node_id: str) -> None:
        """SIGKILL for every process of the node at the same time, as if it lost its power."""
        (node,) = (each for each in self.ray.worker_nodes if each.node_id == node_id)
        (raylet,) = node.all_processes["raylet"]
        root = psutil.Process(raylet.process.pid)
        doomed = [*root.children(recursive=True), root]
        for process in doomed:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.ray.remove_node(node, allow_graceful=False)

    def command(self, *arguments: object) -> str:
        """``kestrel-grpc cluster ARGUMENTS``. Returns what it prints."""
        done = subprocess.run(
            self.words(*arguments), capture_output=True, timeout=PATIENCE_S, **self.surroundings()
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
        return done.stdout

    def words(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "kestrel_grpc", "cluster", *map(str, arguments)]

    def surroundings(self):
        variables = environment(RAY_ADDRESS=self.ray.address)
        del variables["KESTREL_DRAIN_DELAY"]  # The file says how long.
        return {"env": variables, "text": True, "cwd": self.folder}

    def __enter__(self) -> LocalRay:
        return self

    def __exit__(self, *_: object) -> None:
        self.ray.shutdown()
        os.environ.pop("PYTHONPATH")
        if self._path is not None:
            os.environ["PYTHONPATH"] = self._path


def until(url: str, wanted) -> list:
    """Waits until the directory lists servers that ``wanted`` accepts."""
    deadline, found = time.monotonic() + PATIENCE_S, []
    while time.monotonic() < deadline:
        with contextlib.suppress(DirectoryError):
            found = ask(url)
            if wanted(found):
                return found
        time.sleep(0.2)
    raise AssertionError(found)


class Callers:
    """Callers of ``target`` who ask again ``pause_s`` after each answer, each about images of its own."""

    def __init__(
        self, target, image: bytes, unary: int = 6, streams: int = 2, pause_s: float = 0.0
    ) -> None:
        self._target, self._image, self._pause_s = target, image, pause_s
        self._unary, self._streams = unary, streams
        self.models: Counter[str] = Counter()
        self.lost: list[str] = []
        self.streams: Counter[str] = Counter()
        self.slowest_s = 0.0
        self._stopping = asyncio.Event()

    async def __aenter__(self) -> Callers:
        self._client = AsyncKestrelClient(self._target, timeout=120)
        await self._client.wait_ready(60)
        callers = [self._ask(number) for number in range(self._unary)]
        callers += [self._watch(number) for number in range(self._streams)]
        self._tasks = [asyncio.create_task(each) for each in callers]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stopping.set()
        await asyncio.gather(*self._tasks)
        await self._client.aclose()

    async def some_more(self, count: int = 30) -> None:
        """Until as many more calls have had an answer."""
        before = sum(self.models.values())
        async with asyncio.timeout(PATIENCE_S):
            while sum(self.models.values()) < before + count:
                await asyncio.sleep(0.05)

    async def _ask(self, number: int) -> None:
        async for count in self._until_stopped():
            began = time.monotonic()
            try:
                result = await self._client.query(
                    self._image,
                    "How many?",
                    temperature=0.0,
                    max_tokens=3,
                    session=f"{number}-{count}",
                )
                self.models[result.model] += 1
            except KestrelError as error:
                self.lost.append(repr(error)[:300])
                await asyncio.sleep(0.1)
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)

    async def _watch(self, number: int) -> None:
        async for count in self._until_stopped():
            try:
                session = f"stream-{number}-{count}"
                async with self._client.stream_caption(
                    self._image, temperature=0.0, session=session
                ) as stream:
                    await stream.result()
                self.streams["whole"] += 1
            except UnavailableError as error:
                retry = "" if error.retry_after_s is None else ", when to retry"
                self.streams[f"UNAVAILABLE{retry}"] += 1
            except KestrelError as error:
                self.streams[repr(error)[:300]] += 1

    async def _until_stopped(self):
        count = 0
        while not self._stopping.is_set():
            yield count
            count += 1
            await asyncio.sleep(self._pause_s)
