"""Which requests get a place in the engine's queue, and which lose one: shares by weight, unused ones lent, none
lost."""

import asyncio
import random

import pytest

from kestrel_engine import Displaced, EngineOverloaded, InvalidRequest
from kestrel_engine.preprocess.pool import PreprocessPool
from kestrel_engine.requests.queue_places import QueuePlaces, until_displaced
from tests.engine.fakes import GREEDY, IMAGE, Gate
from tests.fake_runtime import FakeRuntime
from tests.waiting import until

HIGH, NORMAL, LOW = 0, 1, 2


class Held:
    """Places taken in order; ``lost``: those that were displaced, with the error that they were given."""

    def __init__(self, max_queue=6, max_batch_size=2):
        self.places = QueuePlaces(max_queue, max_batch_size)
        self.taken, self.lost, self.running = [], {}, set()

    def take(self, principal="", priority=NORMAL, weight=1.0):
        place = self.places.take(principal, weight, priority)
        number = len(self.taken)
        self.taken.append(place)
        place.pass_to(Held.Occupant(self, number))
        return number

    class Occupant:
        def __init__(self, held, number):
            self.held, self.number = held, number

        @property
        def is_waiting(self):
            return self.number not in self.held.running

        def displace(self, error):
            self.held.lost.setdefault(self.number, error)

    def fill(self, principal="", priority=NORMAL, weight=1.0):
        numbers = []
        while self.places.held < self.places.bound:
            numbers.append(self.take(principal, priority, weight))
        return numbers


def test_one_principal_may_hold_all_places_and_no_more():
    held = Held()
    assert len(held.fill("a")) == 8
    with pytest.raises(EngineOverloaded, match=r"max_queue=6 \+ max_batch_size=2\); a holds 8"):
        held.take("a")
    with pytest.raises(EngineOverloaded):
        held.places.check("a", 1.0, NORMAL)
    held.places.give_back(held.taken[0])
    held.places.check("a", 1.0, NORMAL)
    assert not held.lost


def test_the_newest_waiting_request_gives_way_to_a_principal_below_its_share():
    held = Held()
    held.fill("a")
    held.running = {0, 1, 7}
    for expected in ([6], [6, 5], [6, 5, 4], [6, 5, 4, 3]):
        held.places.check("b", 1.0, NORMAL)
        held.take("b")
        assert list(held.lost) == expected
    error = held.lost[6]
    assert isinstance(error, Displaced) and error.quota is not None
    assert (error.quota.principal, error.quota.held, error.quota.share) == ("a", 8, 4)
    for principal in "ab":
        with pytest.raises(EngineOverloaded, match="the share is 4"):
            held.take(principal)
    assert held.places.held == held.places.bound


def test_a_request_with_several_images_holds_a_place_for_each_and_loses_all_together():
    held = Held()
    first = held.taken[held.take("a")]
    held.places.take_more(first, 3)
    assert held.places.held == 4
    held.fill("a")
    with pytest.raises(EngineOverloaded, match="a holds 8"):
        held.places.take_more(first, 1)
    held.running = {1, 2, 3, 4}
    held.take("b")  # The newest place that waits is one of the first request's.
    assert list(held.lost) == [0] and held.places.held == 8
    held.places.give_back(first)
    held.places.give_back(first)
    assert held.places.held == 5
    alone = Held(max_queue=1, max_batch_size=1)
    alone.places.take_more(alone.taken[alone.take()], 63)
    assert alone.places.held == 2


def test_what_runs_keeps_its_place():
    held = Held()
    held.running = set(held.fill("a"))
    with pytest.raises(EngineOverloaded, match="b holds 0, the share is 4"):
        held.take("b")
    assert not held.lost


def test_weights_set_the_shares():
    held = Held()
    held.fill("a")
    for _ in range(6):
        held.take("b", weight=3.0)
    with pytest.raises(EngineOverloaded, match="b holds 6, the share is 6"):
        held.take("b", weight=3.0)


def test_of_several_the_one_furthest_above_its_share_gives_way():
    held = Held()
    for principal in "aaaaabbb":
        held.take(principal)
    held.take("c")
    assert list(held.lost) == [4]


def test_the_best_priority_displaces_lesser_work_of_its_own_the_least_first():
    held = Held()
    for priority in (LOW, NORMAL, NORMAL, LOW, NORMAL, HIGH, NORMAL, NORMAL):
        held.take(priority=priority)
    for _ in range(held.places.reserved):
        held.take(priority=HIGH)
    assert not held.lost, "places are kept for it"
    for _ in range(7):
        held.take(priority=HIGH)
    assert list(held.lost) == [3, 0, 7, 6, 4, 2, 1]
    with pytest.raises(EngineOverloaded):
        held.take(priority=HIGH)


def test_the_best_priority_of_a_principal_above_its_share_leaves_others_alone():
    held = Held()
    for principal in "aaaab":
        held.take(principal, HIGH if principal == "a" else NORMAL)
    while held.places.held < held.places.bound + held.places.reserved:
        held.take("a", HIGH)
    with pytest.raises(EngineOverloaded):
        held.take("a", HIGH)
    assert not held.lost


def test_more_principals_than_places_get_one_each():
    held = Held()
    held.fill("a")
    for number in range(7):
        held.take(f"p{number}")
    assert sorted(held.lost) == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(EngineOverloaded):
        held.take("one too many")


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_keep_the_bound_and_lose_no_place(seed):
    rng = random.Random(seed)
    held = Held(rng.randint(0, 12), rng.randint(1, 5))
    alive = set()
    for _ in range(400):
        choice = rng.random()
        if choice < 0.6:
            principal = rng.choice("aaaabcd")
            try:
                alive.add(held.take(principal, rng.randrange(3), {"b": 0.3}.get(principal, 1.0)))
            except EngineOverloaded as refusal:
                assert refusal.quota is not None and refusal.quota.principal == principal
        elif alive and choice < 0.8:
            held.running.add(rng.choice(sorted(alive)))
        elif alive:
            held.places.give_back(held.taken[rng.choice(sorted(alive))])
        alive = {n for n in alive if held.taken[n].holder is not None}
        assert not held.lost.keys() & alive
        assert not held.lost.keys() & held.running
        assert held.places.held == len(alive) <= held.places.bound + held.places.reserved
        assert held.places.counts.principals == len({held.taken[n].principal for n in alive})


async def ask(engine, principal, **options):
    return await engine.submit(
        "query", None, {"question": "a"}, GREEDY, principal=principal, **options
    )


async def test_a_waiting_request_is_refused_for_another_principals(make_engine, fake_limits):
    gate = Gate()
    engine = make_engine(FakeRuntime(fake_limits, gate), max_queue=2)
    streams = [await ask(engine, "a") for _ in range(5)]
    await asyncio.to_thread(gate.entered.wait, 60)
    with pytest.raises(EngineOverloaded, match="a holds 5"):
        await ask(engine, "a")
    other = await ask(engine, "b")
    gate.open.set()
    with pytest.raises(Displaced, match="a holds 5, the share is 2"):
        await streams[4].result()
    for stream in [*streams[:4], other]:
        assert (await stream.result()).output
    assert engine.num_requests == 0


async def test_a_request_that_loses_two_of_its_places_hears_why_once():
    """The simulation found it: the request ended as if its caller had cancelled it."""
    places = QueuePlaces(2, 2)
    place = places.take("a", 1.0, NORMAL)
    places.take_more(place, 3)
    waiting = asyncio.create_task(until_displaced(place, asyncio.Event().wait()))
    await asyncio.sleep(0)
    places.take("b", 1.0, NORMAL)
    places.take("c", 1.0, NORMAL)
    with pytest.raises(Displaced, match="a holds 4, the share is 2"):
        await waiting
    assert not waiting.cancelling()


async def test_an_image_that_waits_gives_way_too(make_engine, fake_limits, monkeypatch):
    """Its preparation is cancelled, and its caller hears why at once."""
    ended = []

    async def never(self, source, namespace="", *, principal="", is_high=False):
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(principal)

    monkeypatch.setattr(PreprocessPool, "prepare", never)
    engine = make_engine(FakeRuntime(fake_limits), max_queue=2)
    tasks = [
        asyncio.create_task(
            engine.submit("query", IMAGE, {"question": "a"}, GREEDY, principal="a", timeout_s=60)
        )
        for _ in range(4)
    ]
    tasks.append(asyncio.create_task(engine.prepare_image(IMAGE, principal="a")))
    while engine.num_requests < len(tasks):
        await asyncio.sleep(0)
    assert (await (await ask(engine, "b")).result()).output
    assert ended == ["a"]
    with pytest.raises(Displaced):
        await tasks[4]
    assert not any(task.done() for task in tasks[:4])
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    for task in tasks[1:4]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert engine.num_requests == 0
    engine.check_admission("a")


async def test_a_request_that_is_refused_for_its_arguments_keeps_no_place(make_engine):
    engine = make_engine(max_queue=1)
    for _ in range(10):
        with pytest.raises(InvalidRequest, match="weight"):
            await ask(engine, "a", weight=0.0)
        with pytest.raises(InvalidRequest):
            await engine.submit("query", None, {"question": ""})
    assert (await (await ask(engine, "a")).result()).output


async def test_beside_a_flood_every_request_of_another_principal_is_answered(
    make_engine, fake_limits
):
    """700 in flight for as long as the other calls. A displaced one is asked again at once, a refused one after an
    answer."""
    engine = make_engine(
        FakeRuntime(fake_limits, cost=lambda plan: 0.0005), max_queue=64, default_max_tokens=8
    )
    stop, outcomes = asyncio.Event(), {"answered": 0, "displaced": 0, "refused": 0}
    again: asyncio.Queue[None] = asyncio.Queue()

    async def flood():
        while not stop.is_set():
            try:
                await (await ask(engine, "flood")).result()
                outcomes["answered"] += 1
                again.put_nowait(None)
            except Displaced:
                outcomes["displaced"] += 1
            except EngineOverloaded:
                outcomes["refused"] += 1
                await again.get()

    callers = [asyncio.create_task(flood()) for _ in range(700)]
    await until(lambda: outcomes["refused"])
    number = 0
    while number < 20 or not outcomes["displaced"]:  # A place may be free when this one asks.
        priority, number = ("normal", "high")[number % 2], number + 1
        result = await (await ask(engine, "other", priority=priority)).result()
        assert result.output
    stop.set()
    for _ in callers:
        again.put_nowait(None)
    await asyncio.gather(*callers)
    assert outcomes["answered"] > 20
    assert outcomes["refused"] > 0
    assert engine.num_requests == 0
