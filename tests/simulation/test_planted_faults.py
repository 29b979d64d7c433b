"""Faults that are put into the engine are found by worlds, which then say how to see them again."""

import asyncio
import re

import pytest

from kestrel_engine.requests import unsubmitted
from kestrel_engine.requests.queue_places import QueuePlace, QueuePlaces
from kestrel_engine.scheduler.batch import Batch
from kestrel_engine.scheduler.sequence import Phase
from kestrel_engine.skills.constraints import grammars
from kestrel_engine.steps.active import ActiveRequests
from kestrel_engine.types import stream
from kestrel_grpc.security.admission.message_room import Hold
from kestrel_grpc.services.answers import several
from tests.simulation.world import Broken, World

MINUTES = 10


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
        # A further place has the first one as its occupant.
        if not isinstance(place.occupant, QueuePlace):
            place.more.clear()
        give_back(self, place)

    monkeypatch.setattr(QueuePlaces, "give_back", only_the_first)


def the_memory_of_a_message_is_kept(monkeypatch):
    """If the client has disconnected."""
    close = Hold.close

    def forget(self):
        if not asyncio.current_task().cancelling():
            close(self)

    monkeypatch.setattr(Hold, "close", forget)


def a_request_that_loses_two_places_is_cancelled(monkeypatch):
    """As it was until the simulation found it."""

    async def until_displaced(place, work):
        task, displaced = asyncio.current_task(), []
        cancelling = task.cancelling()

        class Occupant:
            is_waiting = True

            def displace(self, error):
                displaced.append(error)
                task.cancel()

        place.pass_to(Occupant())
        try:
            return await work
        except asyncio.CancelledError:
            if not displaced or task.uncancel() > cancelling:
                raise
            raise displaced[0] from None

    monkeypatch.setattr(unsubmitted, "until_displaced", until_displaced)


def other_samples_go_on_when_one_has_ended(monkeypatch):
    """If it failed, or the client has disconnected."""

    async def all_of(runs):
        return await asyncio.gather(*map(asyncio.shield, runs))

    monkeypatch.setattr(several, "all_of", all_of)


def the_error_of_a_mask_wakes_nobody(monkeypatch):
    done = grammars.Matcher.done

    def asleep(self, error):
        if error is None:
            done(self, error)

    monkeypatch.setattr(grammars.Matcher, "done", asleep)


FAULTS = [
    (pages_of_a_cancelled_request_are_kept, 14, "AssertionError"),
    (an_end_is_reported_twice, 0, "AssertionError"),
    (a_wake_up_is_lost, 0, "did not end within"),
    (the_places_of_several_looks_are_kept, 0, "held"),
    (the_memory_of_a_message_is_kept, 2, "bytes of messages are held"),
    (a_request_that_loses_two_places_is_cancelled, 74, "was cancelled, and by nobody"),
    (other_samples_go_on_when_one_has_ended, 2, "ended, and a request of it goes on"),
    (the_error_of_a_mask_wakes_nobody, 126, "no step ended for"),
]
"""With the first seed that is tried, as those before find nothing, and with what the world says."""

SLOW = [
    an_end_is_reported_twice,
    the_places_of_several_looks_are_kept,
    the_memory_of_a_message_is_kept,
    a_request_that_loses_two_places_is_cancelled,
]


def broken_by(plant, monkeypatch, seed):
    """What the world says; "" if it finds nothing. What questions give alone is asked without the fault."""
    world = World(seed, MINUTES)
    with monkeypatch.context() as planted:
        plant(planted)
        try:
            world.run()
        except Broken as broken:
            return str(broken)
    return ""


@pytest.mark.slow_with(*SLOW)
@pytest.mark.parametrize(("plant", "first", "said"), FAULTS)
def test_a_planted_fault_is_found_by_seed(monkeypatch, plant, first, said):
    for seed in range(first, first + 40):
        if found := broken_by(plant, monkeypatch, seed):
            assert re.search(said, found), found
            assert f"python -m tests.simulation {seed} --minutes {MINUTES}" in found
            assert broken_by(plant, monkeypatch, seed) == found
            return
    raise AssertionError("no world found it")
