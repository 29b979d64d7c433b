"""When streams get their tokens: together under load, at once when there is little to do, ends without delay."""

import asyncio

import pytest

from kestrel_engine.errors import RuntimeFailure
from kestrel_engine.skills import SkillOutput
from kestrel_engine.steps import delivery
from kestrel_engine.steps.delivery import DeliveryThread, SequenceEnd, StepReport
from kestrel_engine.types.events import StreamUpdate
from kestrel_engine.types.step import StepToken
from kestrel_engine.types.stream import EngineStream
from kestrel_engine.types.timings import StepTimings

ENDED = StepTimings(scheduled_at=1.0, first_token_at=2.0, last_token_at=3.0, finished_at=4.0)


class Letters(SkillOutput):
    """Every token is its id as a letter."""

    def __init__(self):
        self.text = ""

    def push(self, token):
        self.text += chr(token.id)
        return [StreamUpdate(text=chr(token.id))]

    def finish(self):
        return [StreamUpdate(text="!")]

    def output(self):
        return {"text": self.text + "!"}

    token_ids = (1, 2)


class Told:
    """What a delivery thread delivers, which takes its turns in this thread."""

    def __init__(self):
        self.deliveries = []
        self.aborted = []
        self.thread = DeliveryThread(self.deliveries.append, self.aborted.append)

    def put(self, batch):
        """Returns what is delivered at once, if anything."""
        self.thread.put(batch)
        self.thread.turn()
        return self.deliveries.pop(0) if self.deliveries else None

    def next(self):
        """Returns what is delivered at the end of the pause."""
        self.thread.turn()
        (delivered,) = self.deliveries
        self.deliveries.clear()
        return delivered


@pytest.fixture
def told(still_clock):
    return Told()


def step(outputs, index, end=None):
    token = StepToken(ord("a") + index)
    end = None if end is None else SequenceEnd(end, ENDED)
    return [StepReport(i, output, index + 1, token, end) for i, output in outputs.items()]


def texts(deliveries):
    return {d.sequence_id: [(n, u.text) for n, u in d.updates] for d in deliveries}


def test_what_comes_within_the_pause_is_told_together(told, still_clock, monkeypatch):
    monkeypatch.setattr(delivery, "PAUSE_PER_STREAM_S", 0.05)
    monkeypatch.setattr(delivery, "LONGEST_PAUSE_S", 0.1)
    outputs = {1: Letters(), 2: Letters()}
    assert texts(told.put(step(outputs, 1))) == {1: [(2, "b")], 2: [(2, "b")]}
    assert told.put(step(outputs, 2)) is told.put(step(outputs, 3)) is None
    began = still_clock.now()
    assert texts(told.next()) == {1: [(3, "c"), (4, "d")], 2: [(3, "c"), (4, "d")]}
    assert still_clock.now() - began == pytest.approx(0.1)
    still_clock.advance(0.1)
    assert texts(told.put(step(outputs, 4))) == {1: [(5, "e")], 2: [(5, "e")]}


def test_the_pause_has_a_bound(told, still_clock, monkeypatch):
    monkeypatch.setattr(delivery, "PAUSE_PER_STREAM_S", 60.0)
    outputs, began = {1: Letters()}, still_clock.now()
    assert texts(told.put(step(outputs, 1))) == {1: [(2, "b")]}
    assert told.put(step(outputs, 2)) is None
    assert texts(told.next()) == {1: [(3, "c")]}
    assert still_clock.now() - began == pytest.approx(delivery.LONGEST_PAUSE_S)


def test_first_tokens_and_ends_do_not_wait_and_others_go_on_waiting(told):
    patient, ending, new = {1: Letters()}, {2: Letters()}, {3: Letters()}
    assert texts(told.put(step(patient | ending, 1))) == {1: [(2, "b")], 2: [(2, "b")]}
    assert told.put(step(patient | ending, 2)) is None
    deliveries = told.put(step(patient, 3) + step(ending, 3, "length") + step(new, 0))
    assert texts(deliveries) == {2: [(3, "c"), (4, "d"), (4, "!")], 3: [(1, "a")]}
    assert deliveries[0].end.outcome.reason == "length"
    assert deliveries[0].end.outcome.output == {"text": "bcd!"}
    assert deliveries[0].end.timings is ENDED
    told.thread.stop()
    assert texts(told.next()) == {1: [(3, "c"), (4, "d")]}, (
        "the end of the thread is no reason to lose it"
    )


def test_a_failure_comes_after_what_was_made_before_it(told):
    output = Letters()
    told.put(step({1: output}, 1))
    told.put(step({1: output}, 2))
    error = RuntimeFailure("the step failed")
    (last,) = told.put([StepReport(1, output, 3, None, SequenceEnd(error, ENDED))])
    assert [u.text for _, u in last.updates] == ["c"]
    assert last.end.outcome is error


def test_an_admission_does_not_wait(told):
    told.put(step({1: Letters()}, 1))
    (admitted,) = told.put([StepReport(2, Letters(), 0, admitted_at=1.5)])
    assert (admitted.sequence_id, admitted.admitted_at, admitted.end) == (2, 1.5, None)


def test_a_skill_that_raises_ends_its_request_once_with_the_times_of_the_step_thread(told):
    """The step thread ends the sequence; the reports that it had made before are dropped."""

    class Broken(Letters):
        def push(self, token):
            raise ValueError("no letter")

    output = Broken()
    assert told.put(step({7: output}, 0)) is None and told.aborted == [7]
    assert told.put(step({7: output}, 1)) is None
    (last,) = told.put([StepReport(7, output, 2, None, SequenceEnd("cancelled", ENDED))])
    assert isinstance(last.end.outcome, RuntimeFailure) and last.end.timings is ENDED
    assert told.aborted == [7] and not told.deliveries


async def test_a_stream_joins_text_that_waits_and_keeps_the_order_of_kinds():
    stream = EngineStream("r", lambda: None)
    box = {"x": 0.5, "y": 0.5}
    stream.push([(1, StreamUpdate(reasoning="so ")), (2, StreamUpdate(reasoning="then"))])
    stream.push([(3, StreamUpdate(text="a")), (4, StreamUpdate(text="b"))])
    stream.push([(6, StreamUpdate(object=box)), (9, StreamUpdate(object=box))])
    stream.push([(10, StreamUpdate(path="M 1")), (11, StreamUpdate(path="L 2"))])
    stream.push([(12, StreamUpdate(text="c"))])
    stream.fail(asyncio.CancelledError())
    updates = []
    with pytest.raises(asyncio.CancelledError):
        async for update in stream:
            updates.append(update)
    assert updates == [
        StreamUpdate("r", 2, reasoning="so then"),
        StreamUpdate("r", 4, text="ab"),
        StreamUpdate("r", 6, object=box),
        StreamUpdate("r", 9, object=box),
        StreamUpdate("r", 10, path="M 1"),
        StreamUpdate("r", 11, path="L 2"),
        StreamUpdate("r", 12, text="c"),
    ]
