"""Callers: each asks in its own rhythm, waits for answers in several ways, and sometimes leaves."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kestrel_engine import EngineResult, KestrelError, clock

from .invariants import CallerRequest, Faults, Watch
from .questions import Question, image


@dataclass(frozen=True, slots=True)
class Habits:
    """How a caller asks. ``think_s``: mean seconds between bursts of ``burst`` requests."""

    name: str
    weight: float = 1.0
    think_s: float = 10.0
    burst: int = 1
    waits: bool = True
    """Asks again only when the burst is answered."""
    high: float = 0.0
    """Share of requests of the best priority."""
    in_time: float = 0.0
    """Share of requests with a deadline."""
    leaves: float = 0.0
    """Share of requests that the caller ends before they are answered."""
    low: float = 0.5
    """Share of the other requests that have the least priority."""
    by_http: bool = False
    """Asks the service instead of the engine."""
    always: int = 0
    """Number of requests that the caller has open all the time. It does not think."""


def random_habits(rng: random.Random, name: str) -> Habits:
    burst = rng.choice([1, 1, 3, 10, 40])
    return Habits(
        name,
        weight=rng.choice([0.5, 1.0, 1.0, 4.0]),
        think_s=rng.choice([20.0, 100.0, 500.0]) * (1 + burst / 3),
        burst=burst,
        waits=rng.random() < 0.8,
        high=rng.choice([0.0, 0.0, 0.1, 0.5]),
        in_time=rng.choice([0.0, 0.2]),
        leaves=rng.choice([0.0, 0.2, 0.5]),
        by_http=rng.random() < 0.4,
    )


class World(Protocol):
    """What callers use of it. ``answers``: what each question gives alone."""

    rng: random.Random
    watch: Watch
    faults: Faults
    engine: Any
    service: Any
    questions: Sequence[Question]
    simple: Sequence[Question]
    """Those for the service."""
    answers: dict[Question, EngineResult | Exception]
    is_open: bool
    note: Callable[..., None]

    def begin(self, living: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]: ...


class Caller:
    def __init__(self, world: World, habits: Habits) -> None:
        self._world, self._habits = world, habits
        self._count = 0

    async def run(self) -> None:
        """Asks until the world closes."""
        world, habits = self._world, self._habits
        for _ in range(habits.always):
            world.begin(self._one_after_the_other(), habits.name)
        if habits.always:
            return
        while True:
            await asyncio.sleep(world.rng.expovariate(1 / habits.think_s))
            if not world.is_open:
                return
            burst = [world.begin(self.ask(), habits.name) for _ in range(habits.burst)]
            if habits.waits:
                await asyncio.wait(burst)

    async def _one_after_the_other(self) -> None:
        while self._world.is_open:
            await self.ask()

    async def ask(self) -> None:
        world, habits, rng = self._world, self._habits, self._world.rng
        asked = self._next(rng.choice(world.questions))
        if rng.random() < habits.in_time:
            asked.timeout_s = rng.uniform(0.05, 20)
        way: Any = self._read if rng.random() < 0.5 else self._wait
        if rng.random() < habits.leaves:
            way = rng.choice([self._leave, self._cancel, self._drop])
        world.watch.began(asked)
        try:
            outcome = await way(asked)
        except KestrelError as error:
            outcome = error
        world.note("ended", asked.request_id, _shown(outcome))
        world.watch.ended(asked, clock.now(), outcome, world.answers[asked.question])

    def _next(self, question: Question) -> CallerRequest:
        self._count += 1
        return CallerRequest(f"{self._habits.name}-{self._count}", question, clock.now())

    async def _submitted(self, asked: CallerRequest) -> Any:
        question, habits = asked.question, self._habits
        stream = await self._world.engine.submit(
            question.skill,
            image(question.image) if question.image else None,
            dict(question.arguments),
            question.wanted,
            request_id=asked.request_id,
            priority=self._priority(),
            timeout_s=asked.timeout_s,
            cache_salt=question.salt,
            principal=habits.name,
            weight=habits.weight,
        )
        asked.is_accepted = True
        return stream

    async def _wait(self, asked: CallerRequest) -> EngineResult:
        async with await self._submitted(asked) as stream:
            return await stream.result()

    async def _read(self, asked: CallerRequest) -> EngineResult:
        """Reads each update, sometimes slowly."""
        slow_s = self._world.rng.choice([0.0, 0.0, 0.01, 1.0])
        async with await self._submitted(asked) as stream:
            async for update in stream:
                asked.text += update.text
                if slow_s:
                    await asyncio.sleep(slow_s)
            asked.has_read_all = True
            return await stream.result()

    async def _leave(self, asked: CallerRequest) -> EngineResult:
        """Reads some updates, and leaves."""
        num_read = self._world.rng.randrange(4)
        async with await self._submitted(asked) as stream:
            async for _ in stream:
                num_read -= 1
                if num_read < 0:
                    break
            asked.left = True
        return await stream.result()

    async def _cancel(self, asked: CallerRequest) -> EngineResult:
        """Cancels by the request's id, if it is submitted by then."""
        asyncio.get_running_loop().call_later(self._soon(), self._cancel_now, asked)
        return await self._wait(asked)

    def _cancel_now(self, asked: CallerRequest) -> None:
        if self._world.engine.cancel(asked.request_id):
            asked.left = True

    async def _drop(self, asked: CallerRequest) -> EngineResult | None:
        """Ends the task that waits."""
        task = asyncio.create_task(self._wait(asked))
        await asyncio.wait({task}, timeout=self._soon())
        asked.left = True
        task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            return None

    def _priority(self) -> str:
        rng, habits = self._world.rng, self._habits
        if rng.random() < habits.high:
            return "high"
        return "low" if rng.random() < habits.low else "normal"

    def _soon(self) -> float:
        return self._world.rng.choice([0.0, 0.01, 0.3, 3.0])


def _shown(outcome: Any) -> str:
    if isinstance(outcome, EngineResult):
        return f"{outcome.finish_reason} {outcome.token_ids} {outcome.metrics.total_time_ms:.3f}"
    return type(outcome).__name__
