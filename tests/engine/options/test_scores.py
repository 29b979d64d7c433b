"""Scores of points, boxes and segments in the engine on the fake runtime: values, thresholds, streams."""

import math
from dataclasses import replace

import pytest

from kestrel_engine import InferenceEngine, InvalidRequest, RuntimeConfig
from kestrel_engine.skills.objects.scores import raw_score
from kestrel_engine.types.calibration import Calibration, Curve
from kestrel_engine.types.requests import Coord
from kestrel_engine.types.step import StepToken
from tests.engine.fakes import GREEDY, IMAGE, fake_build, listening
from tests.fake_runtime import FakeRuntime

SEVERAL = {"max_objects": 6}


def product(tokens):
    return math.prod(math.exp(token.logprob) * token.near for token in tokens)


@pytest.mark.parametrize(
    ("skill", "key", "per_object"), [("point", "points", 2), ("detect", "objects", 3)]
)
async def test_a_score_is_the_product_of_its_tokens(
    make_engine, fake_limits, skill, key, per_object
):
    runtime = FakeRuntime(fake_limits, lambda fed: 5)
    sampled = listening(runtime)
    result = await getattr(make_engine(runtime), skill)(IMAGE, "cat", settings=SEVERAL)
    scores = [found["score"] for found in result.output[key]]
    groups = [sampled[i : i + per_object] for i in range(0, 6 * per_object, per_object)]
    assert scores == pytest.approx([product(group) for group in groups])
    assert len(set(scores)) > 1 and all(0 < score < 1 for score in scores)


def test_probabilities_beyond_one_by_rounding_give_no_score_beyond_one():
    tokens = [StepToken(5, Coord(0.5), 1e-7, 1.0), StepToken(5, Coord(0.5), 0.0, 1.0)]
    assert raw_score(tokens) == 1.0


@pytest.mark.parametrize(
    "unknown", [StepToken(5, Coord(0.5), -0.5), StepToken(5, Coord(0.5), None, 0.5)]
)
def test_an_unknown_probability_gives_no_score(unknown):
    assert raw_score([StepToken(5, Coord(0.5), 0.0, 1.0), unknown]) is None


@pytest.mark.parametrize(("skill", "key"), [("point", "points"), ("detect", "objects")])
async def test_objects_below_the_threshold_are_omitted_everywhere(
    make_engine, fake_limits, skill, key
):
    engine = make_engine(FakeRuntime(fake_limits, lambda fed: 5))
    call = getattr(engine, skill)
    every = await call(IMAGE, "cat", settings=SEVERAL)
    found = every.output[key]
    threshold = sorted(each["score"] for each in found)[2]
    settings = {**SEVERAL, "min_score": threshold}
    kept = [each for each in found if each["score"] >= threshold]
    assert 0 < len(kept) < len(found)
    stream = await call(IMAGE, "cat", settings=settings, stream=True)
    assert [update.object async for update in stream] == kept
    result = await stream.result()
    assert result.output == {key: kept}
    assert (result.token_ids, result.finish_reason) == (every.token_ids, every.finish_reason)
    by_default = make_engine(FakeRuntime(fake_limits, lambda fed: 5), min_score=threshold)
    assert (await getattr(by_default, skill)(IMAGE, "cat", settings=SEVERAL)).output[key] == kept
    own = {**SEVERAL, "min_score": 0.0}
    assert (await getattr(by_default, skill)(IMAGE, "cat", settings=own)).output[key] == found


def outlining(fed):
    """A box, then a path of six tokens."""
    said = len(fed) - 1 - fed.index(3)
    return [5, 5, 6, *(100 + letter for letter in b"M48L90"), 0][min(said, 9)]


async def test_a_segment_below_the_threshold_ends_at_its_box(make_engine, fake_limits):
    runtime = FakeRuntime(fake_limits, outlining)
    sampled = listening(runtime)
    engine = make_engine(runtime)
    whole = (await engine.segment(IMAGE, "cat")).output["segments"][0]
    assert whole["score"] == whole["bbox"]["score"] == pytest.approx(product(sampled[:3]))
    assert whole["svg_path"]
    kept = await engine.segment(IMAGE, "cat", settings={"min_score": whole["score"]})
    assert kept.output["segments"][0] == whole
    above = math.nextafter(whole["score"], 1)
    stream = await engine.segment(IMAGE, "cat", settings={"min_score": above}, stream=True)
    assert [update async for update in stream] == []
    result = await stream.result()
    assert result.output == {
        "segments": [{"object": "cat", "svg_path": "", "score": whole["score"]}]
    }
    assert (result.finish_reason, len(result.token_ids)) == ("stop", 3)


@pytest.mark.parametrize("value", [-0.1, 1.1, math.nan, math.inf, "0.5", True, [0.5]])
@pytest.mark.parametrize("skill", ["point", "detect", "segment"])
async def test_other_thresholds_are_refused(make_engine, fake_limits, skill, value):
    engine = make_engine(FakeRuntime(fake_limits))
    with pytest.raises(InvalidRequest, match=r"is not a number in \[0, 1\]") as caught:
        await getattr(engine, skill)(IMAGE, "cat", settings={"min_score": value})
    assert caught.value.field == "min_score"


@pytest.mark.parametrize(("skill", "key"), [("point", "points"), ("detect", "objects")])
async def test_a_calibration_applies_before_the_threshold(fake_limits, skill, key):
    """Each skill has a curve of its own; what lacks one stays raw."""
    config = RuntimeConfig(max_batch_size=3)
    raw = fake_build(config, FakeRuntime(fake_limits, lambda fed: 5))
    curve = Curve((0.0, 1.0), (0.5, 1.0))
    async with InferenceEngine(config, raw) as engine:
        before = await getattr(engine, skill)(IMAGE, "cat", settings=SEVERAL)
        other = await engine.point(IMAGE, "dog", settings=SEVERAL)
    built = replace(raw, runtime=FakeRuntime(fake_limits, lambda fed: 5))
    built = replace(built, calibration=Calibration({skill: curve}))
    async with InferenceEngine(config, built) as engine:
        settings = {**SEVERAL, "min_score": 0.5}
        after = await getattr(engine, skill)(IMAGE, "cat", settings=settings)
        same = await engine.point(IMAGE, "dog", settings=SEVERAL)
    assert [found["score"] for found in after.output[key]] == pytest.approx(
        [curve(found["score"]) for found in before.output[key]]
    )
    assert after.absence == before.absence
    assert (same.output == other.output) == (skill == "detect")


@pytest.mark.parametrize("skill", ["point", "detect"])
async def test_the_first_decision_gives_the_absence(make_engine, fake_limits, skill):
    for script, is_there in ((lambda fed: 5, True), (lambda fed: 0, False)):
        runtime = FakeRuntime(fake_limits, script)
        sampled = listening(runtime)
        result = await getattr(make_engine(runtime), skill)(IMAGE, "cat", settings=SEVERAL)
        decided = math.exp(sampled[0].logprob)
        assert result.absence == pytest.approx(1 - decided if is_there else decided)
        assert bool(next(iter(result.output.values()))) == is_there
    text = await make_engine(FakeRuntime(fake_limits)).query(question="a", settings=GREEDY)
    assert text.absence is None
