"""A world: an engine with its device, decoders and callers, all of which a seed decides. It runs in one thread.

``python -m tests.simulation SEED`` runs one world, and does the same each time.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any
from unittest.mock import patch

from kestrel_engine import EngineResult, InferenceEngine, KestrelError, RuntimeConfig, clock
from kestrel_engine.callers import watchdog
from kestrel_engine.preprocess import pool
from kestrel_engine.skills.constraints import grammars
from kestrel_engine.steps.delivery import Delivery
from kestrel_engine.steps.loop import EngineLoop
from kestrel_engine.types.step import RuntimeLimits
from kestrel_grpc.security.admission import message_room
from tests.clock import STARTED, StillClock, still
from tests.engine.fakes import fake_build
from tests.engine.inside import inside

from . import invariants
from .callers import Caller, Habits, random_habits
from .decoders import Decoders
from .device import Device, Rates
from .invariants import PATIENCE_S, Faults, Watch
from .masks import Masks, Untried
from .one_thread import OneThread, Turns
from .questions import Question, image, random_question
from .service import HttpCaller, Service, simple_question

LIMITS = RuntimeLimits(
    num_pages=200, page_size=2, max_batch_size=3, max_seq_length=300, vocab_size=400
)
_SHOWN = 25
"""Lines of the trace that a failure shows."""


class Broken(AssertionError):
    """A world in which something does not hold. The message says how to see it again."""


class TurnedEngine(InferenceEngine):
    """An engine whose threads are turns of ``loop``."""

    def __init__(
        self, config: RuntimeConfig, device: Device, loop: OneThread, world: World, seed: int
    ) -> None:
        self._turned_by, self._device, self._world = loop, device, world
        self._own_rng = random.Random(seed)
        self._aborted: set[int] = set()
        super().__init__(config, fake_build(config, device), observer=world.watch)

    def _start(self) -> None:
        rng, steps, delivery = self._own_rng, self._loop, self._delivery

        def next_step() -> float | None:
            if steps.is_idle:
                return None
            # As a rule the thread waits for the device; it may also launch a step before.
            return self._device.first_done_at

        def step() -> bool:
            goes_on = steps.turn()
            assert not self._device.is_awaited_for_ever, "a turn waits for a step that hangs"
            self._world.stepped()
            return goes_on

        def abort(sequence_id: int) -> None:
            self._aborted.add(sequence_id)
            EngineLoop.abort(steps, sequence_id)

        steps.abort = abort  # type: ignore[method-assign]
        steps.thread = Turns(step, next_step, rng)  # type: ignore[assignment]
        delivery.thread = Turns(delivery.turn, lambda: delivery.next_at, rng)  # type: ignore[assignment]
        self._turned_by.turns += [steps.thread, delivery.thread]  # type: ignore[list-item]

    def goes_on(self, request_id: str) -> bool:
        """Whether a request of this id is open, and nobody has ended it."""
        return any(
            request.stream.request_id == request_id and sequence_id not in self._aborted
            for sequence_id, request in self._open._open.items()
        )

    def _deliver_threadsafe(self, deliveries: list[Delivery]) -> None:
        self._world.watch.delivered(deliveries)
        super()._deliver_threadsafe(deliveries)


@dataclass(frozen=True, slots=True)
class WorldPlan:
    """What a world is like."""

    limits: RuntimeLimits
    config: dict[str, Any]
    rates: Rates
    habits: tuple[Habits, ...]
    lost: float = 0.0
    stuck: float = 0.0
    lost_masks: float = 0.0
    slow_masks: float = 0.0
    grace_s: float | None = None
    """Seconds after which requests end with the engine, which is shut down while callers ask; None: they end first."""


def random_setting(rng: random.Random) -> WorldPlan:
    """Each kind of fault is there in some worlds only, so that none hides others."""

    def often(*rates: float) -> float:
        return rng.choice([0.0, 0.0, *rates])

    two = rng.random() < 0.3
    limits = replace(
        LIMITS,
        num_pages=rng.choice([155, 200, 600]),
        max_batch_size=rng.choice([2, 3, 6]),
        decodes_beside=two,
    )
    config = {
        "max_queue": rng.choice([2, 10, 60]),
        "max_queue_wait_s": rng.choice([None, 20.0]),
        "prefix_cache": rng.random() < 0.8,
        "image_cache_bytes": rng.choice([0, 2**18, 2**24]),
        "preprocess_threads": rng.choice([1, 3]),
        "decode_timeout_s": 3.0,
        "step_timeout_s": 60.0,
    }
    rates = Rates(
        failing=often(0.02),
        refused=often(0.02),
        out_of_memory=often(0.01),
        not_finite=often(0.01, 0.05),
        slow=often(0.02),
        hangs_after=rng.choice([float("inf")] * 9 + [rng.randrange(300)]),
    )
    habits = tuple(random_habits(rng, name) for name in "abcde"[: rng.randint(1, 5)])
    return WorldPlan(
        limits,
        config,
        rates,
        habits,
        lost=often(0.05),
        stuck=often(0.03),
        grace_s=rng.choice([None, None, 0.0, 5.0]),
        lost_masks=often(0.02),
        slow_masks=often(0.1),
    )


class World:
    """``run`` it once."""

    def __init__(
        self,
        seed: int,
        minutes: float,
        setting: WorldPlan | None = None,
        questions: Sequence[Question] | None = None,
    ) -> None:
        """``setting``, ``questions``: None for those that the seed chooses."""
        self.seed, self.minutes = seed, minutes
        self.rng = random.Random(seed)
        self.setting = setting or random_setting(self.rng)
        self.faults = Faults()
        self.watch = Watch(self.faults, PATIENCE_S)
        self.questions = questions or [random_question(self.rng) for _ in range(25)]
        self.simple = [simple_question(self.rng) for _ in range(10)]
        self.answers = answers_alone([*self.questions, *self.simple])
        self.is_open = True
        self._living: set[asyncio.Task[None]] = set()
        self._hash = blake2b(digest_size=8)
        self._lines: deque[str] = deque(maxlen=_SHOWN)
        self._num_turns = 0
        own = self.setting
        self._decoders = Decoders(self.rng, own.lost, own.stuck, self._fault)
        self._masks = Masks(self.rng, own.lost_masks, own.slow_masks, self._fault)

    @property
    def trace(self) -> str:
        """A hash of all that happened, and when."""
        return self._hash.hexdigest()

    def note(self, *what: object) -> None:
        line = f"{clock.now() - STARTED:.6f} {' '.join(map(str, what))}"
        self._hash.update(line.encode())
        self._lines.append(line)

    def stepped(self) -> None:
        """After each turn of the step loop."""
        self._num_turns += 1
        stats = self.engine.stats
        self.note("turn", stats.running, stats.waiting, stats.pages_free)
        if self._num_turns % 30 == 0 and inside(self.engine).loop.alive:
            invariants.check_now(self.engine)

    def run(self) -> World:
        """Raises Broken."""
        with one_thread(self.rng, self._decoders, self._masks) as (runner, loop):
            try:
                runner.run(self._live(loop))
            except BaseException as error:
                if not isinstance(error, Exception):
                    raise
                raise Broken(self._report(error)) from error
        return self

    def _fault(self, name: str, sequences: object = ()) -> None:
        self.faults.at.append((clock.now(), name))
        self.note("fault", name, sequences)

    async def _live(self, loop: OneThread) -> None:
        setting = self.setting
        device = Device(setting.limits, self.rng, setting.rates, self._fault)
        config = RuntimeConfig(
            max_batch_size=setting.limits.max_batch_size,
            seed=self.seed,
            decode_beside="slices" if self.seed % 2 else "auto",
            **setting.config,
        )
        self.engine = TurnedEngine(config, device, loop, self, self.seed)
        self.service = Service(self.engine, config)
        self._broken = asyncio.get_running_loop().create_future()
        for habits in setting.habits:
            kind = HttpCaller if habits.by_http else Caller
            self.begin(kind(self, habits).run(), habits.name)
        watching = asyncio.create_task(self._watch())
        await self._pass(60 * self.minutes)
        self.is_open = False
        if setting.grace_s is not None:
            self._fault("shutdown")
            await self.engine.shutdown(grace_s=setting.grace_s)
        while self._living:
            await self._pass(1)
        watching.cancel()
        assert not self.watch.open, self.watch.open
        if inside(self.engine).lifetime.is_running and setting.rates.hangs_after == float("inf"):
            await self._pass(10)  # The decoders end what nobody waits for.
            invariants.check_idle(self.engine)
            await self.engine.flush_caches()
            await self._pass(1)
            invariants.check_flushed(self.engine)
            self._fault("shutdown")
            await self.engine.shutdown()
            assert not self.engine.is_stuck and device.closed
        elif not inside(self.engine).lifetime.is_running:
            assert self.engine.num_requests == 0 and self.engine.places.held == 0
        else:
            self._fault("hang")
            await self.engine.shutdown()
            assert self.engine.num_requests == 0 and self.engine.places.held == 0
        self.service.check_idle()
        assert self._decoders.num_open == 0, "a decoder is left"
        self.note("over", sorted(self.watch.ends.items()))

    def begin(self, living: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts what must end by itself and without an error."""
        task = asyncio.get_running_loop().create_task(living, name=name)
        self._living.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._living.discard(task)
        if task.cancelled():
            self._break(AssertionError(f"{task.get_name()} was cancelled, and by nobody"))
        elif (error := task.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if not self._broken.done():
            self._broken.set_exception(error)

    async def _pass(self, seconds: float) -> None:
        """Lets time pass. Raises what has gone wrong meanwhile."""
        if (await asyncio.wait({self._broken}, timeout=seconds))[0]:
            self._broken.result()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(10)
            try:
                self.watch.overdue(clock.now())
            except AssertionError as error:
                self._break(error)
                return

    def _report(self, error: BaseException) -> str:
        lines = "\n  ".join(self._lines)
        return (
            f"seed {self.seed}: {type(error).__name__}: {error}\nThe last events, with seconds:\n  {lines}\n"
            f"To see it again: python -m tests.simulation {self.seed} --minutes {self.minutes:g}"
        )


@contextmanager
def one_thread(
    rng: random.Random, decoders: Decoders, masks: Masks
) -> Iterator[tuple[asyncio.Runner, OneThread]]:
    """An event loop in whose time nothing but this thread acts."""

    def loop_of(clock: StillClock) -> OneThread:
        return OneThread(clock, rng)

    logging.disable(logging.CRITICAL)
    try:
        with (
            still() as own,
            patch.object(pool, "DecoderProcess", decoders),
            patch.object(pool, "confined"),
            patch.object(grammars, "MaskThreads", masks),
            patch.object(grammars, "GrammarProcess", Untried),
            patch.object(watchdog, "log_stacks"),
            patch.object(message_room, "copy_s_per_byte", lambda: 1e-8),  # Measured otherwise.
            asyncio.Runner(loop_factory=lambda: loop_of(own)) as runner,
        ):
            loop = runner.get_loop()
            assert isinstance(loop, OneThread)
            try:
                yield runner, loop
            finally:
                loop.end_tasks()
    finally:
        logging.disable(logging.NOTSET)


_alone: dict[Question, EngineResult | Exception] = {}


def answers_alone(questions: Sequence[Question]) -> dict[Question, EngineResult | Exception]:
    """The answers to ``questions`` of an engine that has one request at a time and room for all."""
    missing = [question for question in dict.fromkeys(questions) if question not in _alone]
    if missing:
        _alone.update(_Alone(missing).answers)
    return _alone


class _Alone:
    def __init__(self, questions: Sequence[Question]) -> None:
        rng = random.Random(0)
        self.watch = Watch(Faults(), 0.0)
        self.answers: dict[Question, EngineResult | Exception] = {}
        decoders = Decoders(rng, 0.0, 0.0, lambda name: None)
        masks = Masks(rng, 0.0, 0.0, lambda name: None)
        with one_thread(rng, decoders, masks) as (runner, loop):
            runner.run(self._ask(questions, loop, rng))

    def stepped(self) -> None: ...

    async def _ask(
        self, questions: Sequence[Question], loop: OneThread, rng: random.Random
    ) -> None:
        limits = replace(LIMITS, num_pages=2000)
        device = Device(limits, rng, Rates(), lambda name, sequences: None)
        config = RuntimeConfig(max_batch_size=limits.max_batch_size, seed=0, prefix_cache=False)
        engine = TurnedEngine(config, device, loop, self, 0)  # type: ignore[arg-type]
        for each in questions:
            source = image(each.image) if each.image else None
            try:
                stream = await engine.submit(
                    each.skill, source, dict(each.arguments), each.wanted, cache_salt=each.salt
                )
                self.answers[each] = await stream.result()
            except KestrelError as error:
                self.answers[each] = error
        await engine.shutdown()
