"""Worlds of random callers and faults, in which all invariants hold, and each of which can be run again.

KESTREL_WORLDS=200 asks for so many worlds of an hour each.
"""

import asyncio
import os
from dataclasses import replace

import pytest

from tests.simulation import world
from tests.simulation.one_thread import OneThread
from tests.simulation.world import Broken, World

MINUTES = 10
HOUR = 60


@pytest.mark.parametrize("seed", range(4))
def test_a_world(seed):
    World(seed, MINUTES).run()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1000 + int(os.environ.get("KESTREL_WORLDS", "60"))))
def test_many_worlds(seed):
    World(seed, HOUR).run()


def test_a_world_repeats_itself():
    """To the microsecond and the last token."""
    first, again = World(21, 5).run(), World(21, 5).run()
    assert sum(first.watch.ends.values()) > 25
    assert (first.trace, first.watch.ends) == (again.trace, again.watch.ends)
    assert World(22, 5).run().trace != first.trace


@pytest.mark.slow
def test_worlds_have_all_kinds_of_ends():
    """Otherwise the worlds would show less than they seem to. The faults of a world depend on its seed."""
    ends = set()
    for seed in (*range(30, 38), 3002):
        ends |= World(seed, 20).run().watch.ends.keys()
    assert ends >= {"stop", "length", "cancelled", "dropped", "Displaced", "RuntimeFailure"}
    assert ends >= {"EngineOverloaded", "DeadlineExceeded", "EngineClosed", "ImageTooSlowError"}


@pytest.mark.parametrize("steps", [108, 128, 176])
def test_requests_end_when_a_device_with_two_lanes_hangs(steps):
    setting = World(21, 5).setting
    assert setting.limits.decodes_beside
    rates = replace(setting.rates, hangs_after=steps)
    ends = World(21, 5, replace(setting, rates=rates)).run().watch.ends
    assert ends["RuntimeFailure"] > 0


def test_nothing_of_a_broken_world_goes_on(monkeypatch):
    """Otherwise a task would end within another test."""
    broken, loops = World(0, 5), list[OneThread]()

    class Found(OneThread):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            loops.append(self)

    monkeypatch.setattr(world, "OneThread", Found)
    monkeypatch.setattr(World, "stepped", lambda self: self._break(AssertionError("planted")))
    with pytest.raises(Broken, match="planted"):
        broken.run()
    assert [asyncio.all_tasks(loop) for loop in loops] == [set()]
