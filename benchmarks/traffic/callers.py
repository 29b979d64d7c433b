"""The targets of requests: the engine in this process, or a server through the SDK. Both return the same Answer."""

from __future__ import annotations

import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from kestrel_client import AsyncKestrelClient
from kestrel_client.calls.streams import AsyncStream
from kestrel_engine import InferenceEngine, PreparedImage, RuntimeConfig, SkillRegistry

from ..models.forced_skill import ForcedCaption, ForcedQuery
from .processes import serve

GREEDY = {"temperature": 0.0}


@dataclass(frozen=True)
class Answer:
    """The measurements of one answer. ``seen``: times of the monotonic clock, with the number of tokens that had
    arrived."""

    seconds: float
    ttft_ms: float
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    seen: list[tuple[float, int]] = field(default_factory=list)

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between tokens for the caller; tokens that arrive together share their gap."""
        return [
            (at - before_at) / (count - before)
            for (before_at, before), (at, count) in pairwise(self.seen)
            for _ in range(before, count)
        ]


class Target(Protocol):
    """A model that answers requests. With a ``max_tokens`` of None, the model decides when to end."""

    async def caption(self, image: bytes, max_tokens: int | None = None) -> Answer: ...

    async def query(self, image: bytes, question: str) -> Answer: ...

    async def detect(self, image: bytes, what: str) -> Answer: ...

    async def forced_query(self, image: bytes, question: str, max_tokens: int) -> Answer:
        """Answers a question with exactly ``max_tokens`` tokens."""
        ...


class EngineTarget:
    """An engine in this process."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine

    async def caption(self, image: bytes, max_tokens: int | None = None) -> Answer:
        settings = GREEDY | ({} if max_tokens is None else {"max_tokens": max_tokens})
        return await self._run("caption", image, {}, settings)

    async def query(self, image: bytes, question: str) -> Answer:
        return await self._run("query", image, {"question": question}, {**GREEDY, "max_tokens": 48})

    async def detect(self, image: bytes, what: str) -> Answer:
        return await self._run("detect", image, {"object": what}, {"max_objects": 8})

    async def forced(self, image: bytes, max_tokens: int) -> Answer:
        """Answers with exactly ``max_tokens`` tokens."""
        return await self._run("forced", image, {}, {"max_tokens": max_tokens})

    async def forced_query(self, image: bytes, question: str, max_tokens: int) -> Answer:
        settings = {"max_tokens": max_tokens}
        return await self._run("forced_query", image, {"question": question}, settings)

    async def forced_detect(self, image: bytes | PreparedImage, what: str, boxes: int) -> Answer:
        """Finds exactly ``boxes`` boxes."""
        return await self._run("forced_detect", image, {"object": what}, {"max_objects": boxes})

    async def _run(
        self,
        skill: str,
        image: bytes | PreparedImage,
        arguments: dict[str, Any],
        settings: dict[str, Any],
    ) -> Answer:
        began = time.perf_counter()
        seen: list[tuple[float, int]] = []
        async with await self._engine.submit(skill, image, arguments, settings) as stream:
            async for update in stream:
                _note(seen, update.token_index)
            metrics = (await stream.result()).metrics
        return Answer(
            seconds=time.perf_counter() - began,
            ttft_ms=metrics.ttft_ms,
            input_tokens=metrics.input_tokens,
            output_tokens=metrics.output_tokens,
            cached_tokens=metrics.cached_tokens,
            seen=seen,
        )


class ServedTarget:
    """A server, called through the SDK's streams. Questions of a forced length share caches within ``namespace``."""

    def __init__(self, client: AsyncKestrelClient, namespace: str = "") -> None:
        self._client, self._namespace = client, namespace

    async def caption(self, image: bytes, max_tokens: int | None = None) -> Answer:
        return await self._read(
            self._client.stream_caption(image, temperature=0.0, max_tokens=max_tokens)
        )

    async def query(self, image: bytes, question: str) -> Answer:
        return await self._read(
            self._client.stream_query(image, question, temperature=0.0, max_tokens=48)
        )

    async def detect(self, image: bytes, what: str) -> Answer:
        return await self._read(self._client.stream_detect(image, what, max_objects=8))

    async def forced_query(self, image: bytes, question: str, max_tokens: int) -> Answer:
        """The server must have loaded the skill."""
        settings, arguments = {"max_tokens": max_tokens}, {"question": question}
        return await self._read(
            self._client.stream_skill(
                "forced_query", image, arguments, settings, cache_salt=self._namespace or None
            )
        )

    async def _read(self, stream: AsyncStream[Any, Any]) -> Answer:
        began = time.perf_counter()
        seen: list[tuple[float, int]] = []
        async for event in stream:
            _note(seen, getattr(event, "output_tokens", 0))
        result = await stream.result()
        return Answer(
            seconds=time.perf_counter() - began,
            ttft_ms=result.timings.ttft_ms,
            input_tokens=result.usage.input_tokens,
            output_tokens=result.usage.output_tokens,
            cached_tokens=result.usage.cached_tokens,
            seen=seen,
        )


@asynccontextmanager
async def engine_target(config: RuntimeConfig) -> AsyncIterator[EngineTarget]:
    skills = SkillRegistry([*SkillRegistry.default(), ForcedCaption(), ForcedQuery()])
    async with await InferenceEngine.create(config, skills=skills) as engine:
        yield EngineTarget(engine)


@asynccontextmanager
async def served_target(config: RuntimeConfig) -> AsyncIterator[ServedTarget]:
    """Runs a server with ``config``'s model, batch size, context and threads for the duration of the context."""
    with tempfile.TemporaryDirectory(prefix="kestrel-bench-") as folder:
        address = f"unix:{Path(folder) / 's.sock'}"
        flags = {
            "--model": config.model,
            "--listen": address,
            "--log-level": "warning",
            "--max-batch-size": config.max_batch_size,
            "--max-seq-length": config.max_seq_length,
            "--threads": config.cpu_threads,
        }
        given = [str(part) for item in flags.items() if item[1] is not None for part in item]
        with serve(given):
            async with AsyncKestrelClient(address) as client:
                yield ServedTarget(client)


def _note(seen: list[tuple[float, int]], num_tokens: int) -> None:
    """Records an event after ``num_tokens`` tokens; 0 for an event without text."""
    if num_tokens:
        seen.append((time.monotonic(), num_tokens))
