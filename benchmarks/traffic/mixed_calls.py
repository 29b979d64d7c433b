"""Traffic: calls of all skills through the SDK at random times, whether or not earlier ones have ended.

Unary calls and streams, about some images of which a few are popular, and about stored images by their ids. The SDK
sends unary calls again by itself. A stream that ends with UnavailableError is opened once more, as its caller would do.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kestrel_client import AsyncKestrelClient, ConnectionLostError, KestrelError, UnavailableError

DEADLINE_S = 30.0
LATE_S = 1.0
"""Seconds after its deadline in which a call must have reported it, on a busy machine."""
_GREEDY = {"temperature": 0.0, "max_tokens": 12}
_STREAMS = ("stream of query", "stream of detect")
_UNARY = ("query", "caption", "point", "detect", "segment", "query by id", "detect by id")
_POPULAR = 0.8
"""Exponent of a Pareto distribution: the smaller, the more images share the calls."""


@dataclass(frozen=True)
class Ended:
    """A call that has ended. ``status``: the error's class; "" for a result. ``again``: a stream that was opened
    again."""

    kind: str
    began: float
    ended: float
    status: str = ""
    again: bool = False

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass
class Traffic:
    """The calls of a run. ``skills``: those that the model can do."""

    client: AsyncKestrelClient
    images: Sequence[bytes]
    rng: random.Random
    skills: Sequence[str]
    calls: list[Ended] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    handles: dict[int, Any] = field(default_factory=dict)

    @property
    def kinds(self) -> list[str]:
        """Of the calls. A third are streams."""
        unary = [kind for kind in _UNARY if kind.partition(" ")[0] in self.skills]
        return [*unary, *_STREAMS * max(1, len(unary) // 4)]

    async def warm_up(self) -> None:
        """Asks about each image once, and calls each kind a few times."""
        for number in range(len(self.images)):
            await self._ask("query", number, DEADLINE_S)
            await self._ask("query by id", number, DEADLINE_S)
        for kind in self.kinds:
            for number in range(min(8, len(self.images))):
                await self._ask(kind, number, DEADLINE_S)

    async def run(self, rate: float, until: float) -> None:
        """Begins ``rate`` calls a second (Poisson)."""
        kinds = self.kinds
        async with asyncio.TaskGroup() as group:
            at = time.monotonic()
            while at < until:
                at += self.rng.expovariate(rate)
                await asyncio.sleep(max(0.0, at - time.monotonic()))
                group.create_task(self._call(self.rng.choice(kinds)))

    async def _call(self, kind: str) -> None:
        number = min(int(self.rng.paretovariate(_POPULAR)) - 1, len(self.images) - 1)
        began, again, status = time.monotonic(), False, ""
        try:
            async with asyncio.timeout(DEADLINE_S + 2 * LATE_S):
                try:
                    await self._ask(kind, number, DEADLINE_S)
                except UnavailableError as error:
                    again = True
                    self.errors[f"{kind}, sent again: {type(error).__name__}"] += 1
                    if not isinstance(error, ConnectionLostError):
                        await asyncio.sleep(error.retry_after_s or 0.2)
                    await self._ask(kind, number, DEADLINE_S - (time.monotonic() - began))
        except (KestrelError, TimeoutError) as error:
            status = type(error).__name__
            self.errors[f"{kind}: {error}"[:150]] += 1
        self.calls.append(Ended(kind, began, time.monotonic(), status, again))

    async def _ask(self, kind: str, number: int, timeout: float) -> None:
        client, image = self.client, self.images[number]
        match kind:
            case "query":
                await client.query(image, "how many?", timeout=timeout, **_GREEDY)
            case "caption":
                await client.caption(image, "short", timeout=timeout, **_GREEDY)
            case "point":
                await client.point(image, "circle", max_objects=2, timeout=timeout)
            case "detect":
                await client.detect(image, "circle", max_objects=2, timeout=timeout)
            case "segment":
                await client.segment(image, "circle", timeout=timeout, **_GREEDY)
            case "query by id":
                handle = await self._handle(number, timeout)
                await client.query(handle, "which colours?", timeout=timeout, **_GREEDY)
            case "detect by id":
                handle = await self._handle(number, timeout)
                await client.detect(handle, "square", max_objects=2, timeout=timeout)
            case "stream of query":
                async with client.stream_query(
                    image, "what is this?", timeout=timeout, **_GREEDY
                ) as stream:
                    await stream.result()
            case "stream of detect":
                async with client.stream_detect(
                    image, "star", max_objects=2, timeout=timeout
                ) as stream:
                    await stream.result()

    async def _handle(self, number: int, timeout: float) -> Any:
        if number not in self.handles:
            self.handles[number] = await self.client.put_image(self.images[number], timeout=timeout)
        return self.handles[number]
