"""Faults that are put into the engine are found by worlds, which then say how to see them again."""

import asyncio
import re

import pytest

from kestrel_engine.front.submitting import preparing
from kestrel_engine.front.submitting.queue_places import QueuePlaces
from kestrel_engine.scheduler.batch import Batch
from kestrel_engine.scheduler.sequence import Phase
from kestrel_engine.steps.active import ActiveRequests
from kestrel_engine.types import stream
from tests.simulation.world import Broken, World

MINUTES = 20


def pages_of_a_cancelled_request_are_kept(monkeypatch):
    """If a step writes to them when the request ends."""
    free = Batch._free

    def forget(self, sequence):
        if sequence.phase is Phase.FINISHED:
            self._leaving.pop(sequence.sequence_id)
        else:
            free(self, sequence)

    monkeypatch.setattr(Batch, "_free", forget)


def an_end_is_reported_twice(monkeypatch):
    """If the report is the last of its turn."""
    take = ActiveRequests.take_reports

    def twice(self):
        reports = take(self)
        return [*reports, reports[-1]] if len(reports) > 1 and reports[-1].end else reports

    monkeypatch.setattr(ActiveRequests, "take_reports", twice)


def a_wake_up_is_lost(monkeypatch):
    """If the stream has updates that nobody has read."""
    end = stream.EngineStream._end

    def asleep(self, outcome):
        enders = self._enders
        if self._updates:
            self._enders = []
        end(self, outcome)
        self._enders = enders

    monkeypatch.setattr(stream.EngineStream, "_end", asleep)


def the_places_of_several_looks_are_kept(monkeypatch):
    give_back = QueuePlaces.give_back

    def only_the_first(self, place):
        if place.displace.__name__ != "<lambda>" or place.more:
            place.more.clear()
        give_back(self, place)

    monkeypatch.setattr(QueuePlaces, "give_back", only_the_first)


def a_request_that_loses_two_places_is_cancelled(monkeypatch):
    """As it was until the simulation found it."""

    async def until_displaced(place, work):
        task, displaced = asyncio.current_task(), []
        cancelling = task.cancelling()

        def displace(error):
            displaced.append(error)
            task.cancel()

        place.displace = displace
        try:
            return await work
        except asyncio.CancelledError:
            if not displaced or task.uncancel() > cancelling:
                raise
            raise displaced[0] from None

    monkeypatch.setattr(preparing, "until_displaced", until_displaced)


FAULTS = [
    (pages_of_a_cancelled_request_are_kept, "AssertionError"),
    (an_end_is_reported_twice, "more comes|RuntimeFailure"),
    (a_wake_up_is_lost, "did not end within"),
    (the_places_of_several_looks_are_kept, "held"),
    pytest.param(
        a_request_that_loses_two_places_is_cancelled,
        "was cancelled, and by nobody",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("plant", "said"), FAULTS)
def test_a_planted_fault_is_found_by_seed(monkeypatch, plant, said):
    plant(monkeypatch)
    for seed in range(40):
        try:
            World(seed, MINUTES).run()
        except Broken as broken:
            assert re.search(said, str(broken)), broken
            assert f"python -m tests.simulation {seed} --minutes {MINUTES}" in str(broken)
            with pytest.raises(Broken) as again:
                World(seed, MINUTES).run()
            assert str(again.value) == str(broken)
            return
    raise AssertionError("no world found it")
