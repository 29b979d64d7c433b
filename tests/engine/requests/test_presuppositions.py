"""Questions that presuppose objects: looks at the images, abstention, and what surrounds them."""

import asyncio
import math
from dataclasses import replace

import pytest

from kestrel_engine import EngineOverloaded, InferenceEngine, RequestError, RuntimeConfig
from kestrel_engine.types.calibration import Calibration, Curve
from tests.engine.fakes import GREEDY, IMAGE, Gate, Listener, fake_build, never_ends
from tests.fake_runtime import FakeRuntime

POINT = 2581
"""An id of the template of point (moondream.md section 3)."""


def shows(*names):
    """A script: the images show these objects, and the answer is "yes"."""

    def script(fed):
        said = fed[max(i for i, t in enumerate(fed) if t == 3) + 1 :]
        if POINT in fed:
            asked = bytes(t - 100 for t in fed if isinstance(t, int) and 100 < t < 356).decode()
            return 5 if asked.strip() in names else 0
        return [*(100 + letter for letter in b"yes"), 0][min(len(said), 3)]

    return script


def runtime(limits, script, decisions):
    """``decisions``: collects the first decision of each look."""
    made = FakeRuntime(limits, script)
    sample = made.sample

    def recorded(row):
        token = sample(row)
        if row.sample is not None and row.sample.rule.read_coord:
            decisions.append(token)
        return token

    made.sample = recorded
    return made


async def test_an_absent_object_gives_no_answer_and_a_present_one_does(make_engine, fake_limits):
    decisions = []
    engine = make_engine(runtime(fake_limits, shows("dog"), decisions))
    seen = await engine.query(IMAGE, "Is it?", presupposes=["dog"], settings=GREEDY)
    (there,) = decisions
    assert (seen.output, seen.abstained, seen.finish_reason) == ({"answer": "yes"}, False, "stop")
    assert seen.absences == (("dog", pytest.approx(1 - math.exp(there.logprob))),)
    missed = await engine.query(IMAGE, "Is it?", presupposes=[" dog ", "cat"], settings=GREEDY)
    assert (missed.output, missed.abstained, missed.finish_reason) == ({"answer": ""}, True, "stop")
    absent = math.exp(decisions[-1].logprob)
    assert absent > 0.5 and missed.absences[1] == ("cat", pytest.approx(absent))
    assert missed.token_ids == () and [each.object for each in missed.absences] == ["dog", "cat"]
    any_way = {**GREEDY, "max_absence": 1.0}
    answered = await engine.query(IMAGE, "Is it?", presupposes=["cat"], settings=any_way)
    assert answered.output == {"answer": "yes"} and not answered.abstained
    plain = await engine.query(IMAGE, "Is it?", settings=GREEDY)
    assert (plain.absences, plain.abstained) == ((), False)
    assert plain.output == seen.output


async def test_the_default_of_the_threshold_is_a_setting_and_scores_are_calibrated(
    make_engine, fake_limits
):
    engine = make_engine(FakeRuntime(fake_limits, shows()), max_absence=1.0)
    assert not (await engine.query(IMAGE, "?", presupposes=["cat"], settings=GREEDY)).abstained
    curve = Calibration({"absence": Curve((0.0, 1.0), (0.25, 0.25))})
    config = RuntimeConfig(max_batch_size=3)
    built = replace(fake_build(config, FakeRuntime(fake_limits, shows())), calibration=curve)
    async with InferenceEngine(config, built) as engine:
        asked = await engine.query(IMAGE, "?", presupposes=["cat"], settings=GREEDY)
    assert asked.absences == (("cat", 0.25),) and not asked.abstained


async def test_an_object_is_there_if_one_of_several_images_shows_it(make_engine, fake_limits):
    looks = []

    def script(fed):
        if POINT in fed:
            looks.append(fed)
            return 5 if len(looks) == 2 else 0
        return shows()(fed)

    engine = make_engine(FakeRuntime(fake_limits, script))
    other = IMAGE // 2
    result = await engine.query([IMAGE, other], "?", presupposes=["cat"], settings=GREEDY)
    assert len(looks) == 2 and result.absences[0].absence < 0.5 and not result.abstained
    assert result.num_looks == 2 and len(result.images) == 2


async def test_streams_metrics_and_observers_know_the_looks(make_engine, fake_limits):
    listener = Listener()
    engine = make_engine(FakeRuntime(fake_limits, shows("dog")), observer=listener)
    ask = {"question": "?", "settings": GREEDY, "request_id": "mine"}
    plain = await engine.query(IMAGE, **ask)
    stream = await engine.query(IMAGE, presupposes=["dog", "cat"], stream=True, **ask)
    assert [update async for update in stream] == []
    result = await stream.result()
    assert result.abstained and result.num_looks == 2 and result.metrics.output_tokens == 1
    stream = await engine.query(IMAGE, presupposes=["dog"], stream=True, **ask)
    assert "".join([update.text async for update in stream]) == "yes"
    result = await stream.result()
    assert result.metrics.output_tokens == plain.metrics.output_tokens + 1
    assert result.metrics.input_tokens > 2 * engine.info.image_positions
    assert result.metrics.queue_time_ms <= result.metrics.total_time_ms
    skills = [event.skill for event in listener.requests]
    assert skills == ["query", "point", "point", "query", "point", "query"]
    assert {event.request_id for event in listener.requests} == {"mine"}
    abstained = listener.requests[3]
    assert (abstained.finish_reason, abstained.metrics.input_tokens) == ("stop", 0)
    assert engine.num_requests == 0 and engine.places.held == 0


async def test_with_reasoning_and_log_probabilities_an_abstention_has_them_empty(
    make_engine, fake_limits
):
    engine = make_engine(FakeRuntime(fake_limits, shows()))
    settings = {**GREEDY, "logprobs": True}
    result = await engine.query(IMAGE, "?", reasoning=True, presupposes=["cat"], settings=settings)
    assert result.output["reasoning"]["text"] == "" and result.logprobs == ()


@pytest.mark.parametrize(
    ("image", "presupposes", "settings", "field"),
    [
        (None, ["cat"], {}, "image"),
        (IMAGE, "cat", {}, "presupposes"),
        (IMAGE, 3, {}, "presupposes"),
        (IMAGE, ["cat"] * 9, {}, "presupposes"),
        (IMAGE, ["cat", " "], {}, "presupposes[1]"),
        (IMAGE, ["cat", 3], {}, "presupposes[1]"),
        (IMAGE, ["x" * 40_000], {}, "presupposes[0]"),
        (IMAGE, ["cat", "x" * 300], {}, "presupposes[1]"),
        (IMAGE, ["cat"], {"max_absence": 1.5}, "max_absence"),
        (IMAGE, ["cat"], {"max_absence": math.nan}, "max_absence"),
    ],
)
async def test_errors_name_their_place(
    make_engine, fake_limits, image, presupposes, settings, field
):
    engine = make_engine(FakeRuntime(fake_limits, shows("cat")))
    with pytest.raises(RequestError) as caught:
        await engine.query(image, "?", presupposes=presupposes, settings=settings)
    assert caught.value.field == field
    assert engine.num_requests == 0 and engine.places.held == 0


async def test_cancelled_looks_cancel_the_question(make_engine, fake_limits):
    gate = Gate()
    engine = make_engine(FakeRuntime(fake_limits, gate))
    asking = asyncio.create_task(
        engine.query(IMAGE, "?", presupposes=["cat"], settings=GREEDY, request_id="mine")
    )
    await asyncio.to_thread(gate.entered.wait, 60)
    assert engine.cancel("mine") == 1
    gate.open.set()
    result = await asking
    assert (result.finish_reason, result.abstained) == ("cancelled", False)
    assert engine.places.held == 0


async def test_a_caller_that_leaves_ends_the_looks(make_engine, fake_limits):
    gate = Gate()
    engine = make_engine(FakeRuntime(fake_limits, gate))
    asking = asyncio.create_task(engine.query(IMAGE, "?", presupposes=["cat"], settings=GREEDY))
    await asyncio.to_thread(gate.entered.wait, 60)
    asking.cancel()
    gate.open.set()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert engine.num_requests == 0 and engine.places.held == 0


async def test_each_look_takes_a_place_in_the_queue(make_engine, fake_limits):
    engine = make_engine(FakeRuntime(fake_limits, never_ends), max_queue=1)
    objects = [f"object {number}" for number in range(8)]
    with pytest.raises(EngineOverloaded):
        await engine.query(IMAGE, "?", presupposes=objects, settings=GREEDY)
    assert engine.num_requests == 0 and engine.places.held == 0
    assert RuntimeConfig().max_absence == 0.5
