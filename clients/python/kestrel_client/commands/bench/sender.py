"""Sends the requests of a stage from one event loop and measures them.

In an open loop, a request's times count from the instant at which it should have been sent. If the client or its
connection hold it back, that is part of the latency, as it is for a caller (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from kestrel_client import AsyncKestrelClient, KestrelError

from .client_health import ClientHealth, watch_health
from .mix import Ask, Mix
from .sample_images import Image, next_image
from .tally import Slo, Tally

Loop: TypeAlias = Literal["closed", "open"]
"""Closed: a fixed number of requests is in flight. Open: requests begin at a rate, whether or not others ended."""
PER_CONNECTION = 64
"""Calls in progress on one connection. A server allows 100 by default; further ones would wait in the client."""
_PAUSE_AFTER_ERROR_S = 0.05
"""A caller of a closed loop waits after an error, because a server refuses requests faster than it answers them."""
UNFINISHED = "unfinished when the stage's time to drain was over"


@dataclass(frozen=True)
class Stage:
    """``level``: requests in flight, or requests per second, whose gaps are exponential (independent callers).

    The window, in which requests are measured, begins ``warm_up_s`` after the start and is ``window_s`` long.
    ``drain_s``: how long unfinished requests may take after it. ``most_in_flight``: the bound of an open loop; the
    requests above it are not sent and count as failed. ``seed``: of arrivals and of what is asked.
    """

    loop: Loop
    level: float
    window_s: float
    warm_up_s: float = 0.0
    drain_s: float = 30.0
    most_in_flight: int = 1024
    seed: str = "0"


@dataclass(frozen=True)
class Plan:
    """What requests ask. ``unique_share``: of the requests, with an image that no cache knows. ``options``: of every
    call. ``streaming``: whether answers are streamed."""

    mix: Mix
    images: Sequence[Image]
    unique_share: float = 0.0
    slo: Slo = field(default_factory=Slo)
    options: Mapping[str, Any] = field(default_factory=dict)
    streaming: bool = True


async def run_stage(
    clients: Sequence[AsyncKestrelClient], plan: Plan, stage: Stage
) -> tuple[Tally, ClientHealth]:
    """Sends a stage's requests, waits for them until the time to drain is over, and measures them."""
    run = _StageRun(clients, plan, stage)
    health = asyncio.create_task(run.watch())
    try:
        await run.send()
        return run.tally, await health
    finally:
        health.cancel()


class _Times:
    """When the events of an answer came."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.gaps: list[tuple[float, int]] = []
        """Seconds between tokens, and how many tokens came together. They share the gap before them."""
        self._last: tuple[float, int] | None = None

    def note(self, num_tokens: int) -> None:
        """``num_tokens``: generated so far; 0 if the event does not say."""
        now = _now()
        if self.first is None:
            self.first = now
        if not num_tokens:
            return
        if self._last is not None and (came := num_tokens - self._last[1]) > 0:
            self.gaps.append(((now - self._last[0]) / came, came))
        self._last = now, num_tokens

    @property
    def mean_gap_s(self) -> float | None:
        count = sum(came for _, came in self.gaps)
        return sum(gap * came for gap, came in self.gaps) / count if count else None


class _StageRun:
    """The requests of one stage, from now on."""

    def __init__(self, clients: Sequence[AsyncKestrelClient], plan: Plan, stage: Stage) -> None:
        self.tally = Tally()
        self._clients, self._plan, self._stage = clients, plan, stage
        self._calls = [0] * len(clients)
        self._begins = _now()
        self._opens = self._begins + stage.warm_up_s
        self._closes = self._opens + stage.window_s
        self._rng = random.Random(stage.seed)
        self._in_flight = 0

    async def watch(self) -> ClientHealth:
        await _until(self._opens)
        return await watch_health(self._closes)

    async def send(self) -> None:
        """Raises an error that is not the failure of a request."""
        send = self._closed_loop if self._stage.loop == "closed" else self._open_loop
        try:
            async with asyncio.timeout_at(self._closes + self._stage.drain_s):
                async with asyncio.TaskGroup() as tasks:
                    await send(tasks)
        except TimeoutError:
            pass  # The requests that were in flight have counted themselves.
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _closed_loop(self, tasks: asyncio.TaskGroup) -> None:
        for _ in range(round(self._stage.level)):
            tasks.create_task(self._caller())

    async def _caller(self) -> None:
        while (wanted := _now()) < self._closes:
            ask = await self._draw()
            sent = _now()
            # Without an intended instant, the time from wanting to send until sending is the client's own.
            if not await self._one(ask, sent, lateness_s=sent - wanted):
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    async def _open_loop(self, tasks: asyncio.TaskGroup) -> None:
        """Sends a request at each arrival until the window closes."""
        intended = self._begins
        while (intended := intended + self._rng.expovariate(self._stage.level)) < self._closes:
            ask = await self._draw()
            await _until(intended)  # Also if it has passed, the tasks of sent requests run now.
            if self._in_flight < self._stage.most_in_flight:
                self._in_flight += 1
                tasks.create_task(self._arrival(ask, intended))
            elif intended >= self._opens:
                self.tally.fail(f"not sent: {self._stage.most_in_flight} were in flight")

    async def _arrival(self, ask: Ask, intended: float) -> None:
        await self._one(ask, intended, lateness_s=_now() - intended)
        self._in_flight -= 1

    async def _draw(self) -> Ask:
        """Chooses what the next request asks."""
        skill, words = self._plan.mix.draw(self._rng)
        image = await next_image(self._plan.images, self._plan.unique_share, self._rng)
        return Ask(skill, words, image)

    async def _one(self, ask: Ask, began: float, lateness_s: float) -> bool:
        """Sends a request whose times count from ``began``. Returns whether it succeeded."""
        times = _Times()
        if self._opens <= began < self._closes:
            self.tally.lateness.record(lateness_s)
        try:
            result = await self._answer(ask, times)
        except KestrelError as error:
            if self._counts(began):
                self.tally.fail((str(error).splitlines() or [type(error).__name__])[0][:200])
            return False
        except asyncio.CancelledError:
            if self._counts(began):
                self.tally.fail(UNFINISHED)
            raise
        self._count(ask.skill, result, times, began)
        return True

    async def _answer(self, ask: Ask, times: _Times) -> Any:
        """Sends one request, notes when its tokens come, and returns its result."""
        options = self._plan.options
        with self._connection() as client:
            if not self._plan.streaming:
                return await getattr(client, ask.skill)(ask.image, ask.words, **options)
            method = getattr(client, f"stream_{ask.skill}")
            async with method(ask.image, ask.words, **options) as stream:
                async for event in stream:
                    times.note(getattr(event, "output_tokens", 0))
                return await stream.result()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[AsyncKestrelClient]:
        """The first client with room for a call, so that few calls use one connection; else the one with the fewest."""
        number = min(
            range(len(self._clients)), key=lambda i: max(self._calls[i], PER_CONNECTION - 1)
        )
        self._calls[number] += 1
        try:
            yield self._clients[number]
        finally:
            self._calls[number] -= 1

    def _counts(self, began: float) -> bool:
        """Whether a request that ends now is measured.

        Of an open loop, those that were due in the window. Of a closed loop, also those that were in flight when the
        window opened: if answers take longer than the window, there are no others.
        """
        last = began if self._stage.loop == "open" else _now()
        return last >= self._opens and began < self._closes

    def _count(self, skill: str, result: Any, times: _Times, began: float) -> None:
        """Counts a request that succeeded now."""
        tally, usage, timings, ended = self.tally, result.usage, result.timings, _now()
        latency_s = ended - began
        ttft_s = None if times.first is None else times.first - began
        good = self._plan.slo.is_met(latency_s, ttft_s, times.mean_gap_s)
        if self._opens <= ended < self._closes:
            tally.ended += 1
            tally.ended_good += good
            tally.input_tokens += usage.input_tokens
            tally.output_tokens += usage.output_tokens
            tally.cached_tokens += usage.cached_tokens
        if not self._counts(began):
            return
        tally.total += 1
        tally.succeeded += 1
        tally.good += good
        tally.latency.record(latency_s)
        tally.by_skill[skill].record(latency_s)
        if ttft_s is not None:
            tally.ttft.record(ttft_s)
        for gap_s, came in times.gaps:
            tally.itl.record(gap_s, came)
        tally.decode_latency.record(timings.decode_ms / 1e3)
        tally.processing_latency.record(timings.processing_ms / 1e3)
        tally.queue_latency.record(timings.queue_ms / 1e3)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _until(instant: float) -> None:
    await asyncio.sleep(max(0.0, instant - _now()))
