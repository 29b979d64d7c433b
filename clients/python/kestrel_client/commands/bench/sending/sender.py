"""Sender: sends the requests of stages from one event loop and measures them.

In an open loop, a request's times count from the instant at which it should have been sent. If the client or its
connection hold it back, that is part of the latency, as it is for a caller (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from kestrel_client import AsyncKestrelClient, KestrelError

from ..stages import Loop, Slo
from ..tally import Tally
from .client_health import ClientHealth, watch_health
from .mix import Ask, Mix
from .sample_images import Image, ImageSource

Arrivals: TypeAlias = Literal["poisson", "steady"]
_PAUSE_AFTER_ERROR_S = 0.05
"""A caller of a closed loop waits after an error, because a server refuses requests faster than it answers them."""
UNFINISHED = "unfinished when the stage's time to drain was over"


def arrival_times(kind: Arrivals, rate: float, rng: random.Random) -> Iterator[float]:
    """Seconds from the start, ascending, without end. ``rate``: requests per second on average.

    "poisson": independent callers; the gaps are exponential. The arrivals of several processes with a share of the rate
    each add up to a Poisson process of the whole rate. "steady": equal gaps after a random first one.
    """
    at = 0.0 if kind == "poisson" else rng.random() / rate - 1 / rate
    while True:
        at += rng.expovariate(rate) if kind == "poisson" else 1 / rate
        yield at


@dataclass(frozen=True)
class Stage:
    """The part of a stage that one process sends.

    ``level``: requests in flight, or requests per second. ``begins_at``: when sending begins, by the clock of
    asyncio, ``time.monotonic``, which the processes of a machine share. The window, in which requests are measured,
    begins ``warm_up_s`` later and is ``window_s`` long. ``drain_s``: how long unfinished requests may take after it.
    ``most_in_flight``: the bound of an open loop; the requests above it are not sent and count as failed. ``seed``: of
    arrivals and of what is asked.
    """

    loop: Loop
    level: float
    window_s: float
    arrivals: Arrivals = "poisson"
    begins_at: float = math.nan
    warm_up_s: float = 0.0
    drain_s: float = 30.0
    most_in_flight: int = 1024
    seed: str = "0"

    @property
    def window(self) -> tuple[float, float]:
        opens = self.begins_at + self.warm_up_s
        return opens, opens + self.window_s


@dataclass(frozen=True)
class ClientPlan:
    """What every client process needs.

    ``connect``: makes a client with the given ``channel_options``; it can be pickled. ``most_in_flight``: requests in
    flight of one process, at most. ``unique_share``: of the requests, with an image that no cache knows. ``options``:
    of every call. ``streaming``: whether answers are streamed.
    """

    connect: Callable[..., AsyncKestrelClient]
    most_in_flight: int
    mix: Mix
    images: Sequence[Image]
    unique_share: float = 0.0
    slo: Slo = field(default_factory=Slo)
    options: Mapping[str, Any] = field(default_factory=dict)
    streaming: bool = True


@dataclass(frozen=True)
class Sender:
    """Sends the requests of a plan over ``connections``."""

    plan: ClientPlan
    connections: Connections
    images: ImageSource

    async def run(self, stage: Stage) -> tuple[Tally, ClientHealth]:
        """Sends one stage and waits until its requests have ended."""
        run = _StageRun(self, stage)
        self.images.make_ahead()
        health = asyncio.create_task(_watch(stage))
        try:
            await run.send()
            return run.tally, await health
        finally:
            health.cancel()

    async def draw(self, rng: random.Random) -> Ask:
        """Chooses what the next request asks."""
        skill, words = self.plan.mix.draw(rng)
        return Ask(skill, words, await self.images.next(rng))

    async def send(self, ask: Ask, times: _Times) -> Any:
        """Sends one request, notes when its tokens come, and returns its result."""
        plan = self.plan
        with self.connections.taken() as client:
            if not plan.streaming:
                method = getattr(client, ask.skill)
                return await method(ask.image, ask.words, **plan.options)
            method = getattr(client, f"stream_{ask.skill}")
            async with method(ask.image, ask.words, **plan.options) as stream:
                async for event in stream:
                    times.note(getattr(event, "output_tokens", 0))
                return await stream.result()


class Connections:
    """Connections to the server. A call takes the first one with room, so few calls use one connection only.

    ``room``: calls in progress on one connection.
    """

    def __init__(self, clients: Sequence[AsyncKestrelClient], room: int) -> None:
        self._clients, self._room = clients, room
        self._in_use = [0] * len(clients)

    @contextlib.contextmanager
    def taken(self) -> Iterator[AsyncKestrelClient]:
        """The connection for one call. If none has room, the one with the fewest calls."""
        number = min(range(len(self._clients)), key=self._calls)
        self._in_use[number] += 1
        try:
            yield self._clients[number]
        finally:
            self._in_use[number] -= 1

    def _calls(self, number: int) -> int:
        return max(self._in_use[number], self._room - 1)


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
    """The requests of one stage."""

    def __init__(self, sender: Sender, stage: Stage) -> None:
        self.tally = Tally()
        self._sender, self._stage = sender, stage
        self._opens, self._closes = stage.window
        self._rng = random.Random(stage.seed)
        self._in_flight = 0

    async def send(self) -> None:
        """Sends the requests and waits for them, until the time to drain is over. Raises an error that is not the
        failure of a request."""
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
        """Keeps requests in flight until the window closes."""
        await _until(self._stage.begins_at)
        for _ in range(round(self._stage.level)):
            tasks.create_task(self._caller(random.Random(self._rng.random())))

    async def _caller(self, rng: random.Random) -> None:
        while (wanted := _now()) < self._closes:
            ask = await self._sender.draw(rng)
            sent = _now()
            # Without an intended instant, the time from wanting to send until sending is the client's own.
            if not await self._one(ask, sent, lateness_s=sent - wanted):
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)

    async def _open_loop(self, tasks: asyncio.TaskGroup) -> None:
        """Sends a request at each arrival until the window closes."""
        for after_s in arrival_times(self._stage.arrivals, self._stage.level, self._rng):
            intended = self._stage.begins_at + after_s
            if intended >= self._closes:
                break
            await _until(intended)  # Also if it has passed, the tasks of sent requests run now.
            if self._in_flight < self._stage.most_in_flight:
                self._in_flight += 1
                tasks.create_task(self._arrival(random.Random(self._rng.random()), intended))
            elif intended >= self._opens:
                self.tally.fail(f"not sent: {self._stage.most_in_flight} were in flight")

    async def _arrival(self, rng: random.Random, intended: float) -> None:
        try:
            ask = await self._sender.draw(rng)
        except asyncio.CancelledError:
            if intended >= self._opens:
                self.tally.fail(UNFINISHED)
            raise
        await self._one(ask, intended, lateness_s=_now() - intended)
        self._in_flight -= 1

    async def _one(self, ask: Ask, began: float, lateness_s: float) -> bool:
        """Sends a request whose times count from ``began``. Returns whether it succeeded."""
        times = _Times()
        if self._opens <= began < self._closes:
            self.tally.lateness.record(lateness_s)
        try:
            result = await self._sender.send(ask, times)
        except KestrelError as error:
            if self._counts(began):
                self.tally.fail((str(error).splitlines() or [type(error).__name__])[0][:200])
            return False
        except asyncio.CancelledError:
            if self._counts(began):
                self.tally.fail(UNFINISHED)
            raise
        ended = _now()
        ttft_s = None if times.first is None else times.first - began
        good = self._sender.plan.slo.is_met(ended - began, ttft_s, times.mean_gap_s)
        if self._opens <= ended < self._closes:
            self._count_ended(result, good)
        if self._counts(began):
            self._count(ask.skill, result, times, ended - began, ttft_s, good)
        return True

    def _counts(self, began: float) -> bool:
        """Whether a request that ends now is measured.

        Of an open loop, those that were due in the window. Of a closed loop, also those that were in flight when the
        window opened: if answers take longer than the window, there are no others.
        """
        last = began if self._stage.loop == "open" else _now()
        return last >= self._opens and began < self._closes

    def _count_ended(self, result: Any, good: bool) -> None:
        tally = self.tally
        tally.ended += 1
        tally.ended_good += good
        tally.input_tokens += result.usage.input_tokens
        tally.output_tokens += result.usage.output_tokens
        tally.cached_tokens += result.usage.cached_tokens

    def _count(
        self,
        skill: str,
        result: Any,
        times: _Times,
        latency_s: float,
        ttft_s: float | None,
        good: bool,
    ) -> None:
        tally, timings = self.tally, result.timings
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


async def _watch(stage: Stage) -> ClientHealth:
    """Measures this process in the stage's window."""
    opens, closes = stage.window
    await _until(opens)
    return await watch_health(closes)
