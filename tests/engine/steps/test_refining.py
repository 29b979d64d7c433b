"""Refined outlines on the fake runtime, which refines a mask by removing its first row."""

import asyncio
import dataclasses
import threading
import time

import numpy as np
import pytest

from kestrel_engine import InferenceEngine, InvalidRequest, RuntimeConfig, SkillUnavailable
from kestrel_engine.scheduler.budget import StepBudget
from kestrel_engine.scheduler.policy import SchedulerPolicy
from kestrel_engine.scheduler.scheduler import Scheduler
from kestrel_engine.skills import SkillContext
from kestrel_engine.skills.segment import SegmentOutput
from kestrel_engine.steps.refining import Refining
from kestrel_engine.types.model_config import parse_model_config
from kestrel_engine.types.requests import PreparedImage, SamplingParams
from kestrel_engine.types.step import MOST_REFINED, RefineRow, StepResult, StepToken, TokenRule
from kestrel_engine.types.submission import Submission
from tests.engine.fakes import IMAGE, SMALL, ByteCodec, Listener, fake_build
from tests.fake_runtime import FakeRuntime

PATH = "M 0 0 L 960 0 L 960 960 L 0 960 z".split()
"""The whole box."""


class PathCodec:
    """Id 100 + n is word n of PATH; every object is called by one id."""

    def encode(self, text: str) -> list[int]:
        return [90]

    def decode(self, ids: list[int] | tuple[int, ...]) -> str:
        return "".join(PATH[i - 100] for i in ids if i >= 100)

    def token_bytes(self, token_id: int) -> bytes:
        return self.decode([token_id]).encode()


def outline(fed, *, box=True):
    """A script: centre, size, the path, the end."""
    generated = len(fed) - 1 - max(i for i, token in enumerate(fed) if token == 3)
    head = [5, 5, 6] if box else []
    ids = [*head, *range(100, 100 + len(PATH)), 0]
    return ids[min(generated, len(ids) - 1)]  # A step may be launched before the end is known.


@pytest.fixture
async def make(fake_limits):
    engines = []

    def make(script=outline, *, refines=True, observer=None, cost=None, **limits):
        limits = dataclasses.replace(fake_limits, refines=refines, **limits)
        runtime = FakeRuntime(limits, script, cost=cost)
        config = RuntimeConfig(max_batch_size=limits.max_batch_size)
        built = dataclasses.replace(fake_build(config, runtime), codec=PathCodec())
        engine = InferenceEngine(config, built, observer=observer)
        engines.append(engine)
        return engine, runtime

    yield make
    for engine in engines:
        await engine.shutdown(grace_s=0)


def segment_of(result):
    return result.output["segments"][0]


@pytest.mark.parametrize("lanes", [False, True])
async def test_the_box_then_the_coarse_path_then_the_refined_result(make, lanes):
    engine, runtime = make(decodes_beside=lanes)
    stream = await engine.segment(IMAGE, "cat", stream=True)
    updates = [update async for update in stream]
    segment = segment_of(await stream.result())
    assert segment["refined"]
    assert updates[0].object == segment["coarse_bbox"]
    pieces = " ".join(update.path for update in updates[1:])
    assert pieces == segment["coarse_path"] == "M 0 0 L 1 0 L 1 1 L 0 1 z"
    assert segment["svg_path"] != segment["coarse_path"]
    box, coarse = segment["bbox"], segment["coarse_bbox"]
    assert box["y_min"] > coarse["y_min"] + 0.001
    assert box["x_min"] == pytest.approx(coarse["x_min"], abs=0.01)
    assert box["y_max"] == pytest.approx(coarse["y_max"], abs=0.01)
    (refining,) = [plan for plan in runtime.plans if plan.refine]
    (row,) = refining.refine
    assert row.pixels.shape == (126, 126, 3) and (row.pixels == 200).all()
    assert row.mask.shape == (126, 126)


async def test_refining_takes_neither_pages_nor_a_place_in_the_batch(make):
    seen = []
    engine, runtime = make(cost=lambda plan: seen.append(len(plan.decode)) or 0.0)
    await engine.segment(IMAGE, "cat")
    plan = next(plan for plan in runtime.plans if plan.refine)
    assert not plan.decode and not plan.prefill
    stats = engine.stats
    assert stats.running == stats.waiting == 0


async def test_many_requests_at_once_are_all_refined(make):
    engine, runtime = make()
    results = await asyncio.gather(*(engine.segment(IMAGE, "cat") for _ in range(9)))
    assert all(segment_of(result)["refined"] for result in results)
    assert sum(len(plan.refine) for plan in runtime.plans) == 9


def masks(count):
    pixels, mask = np.zeros((2, 2, 3), np.uint8), np.zeros((2, 2), np.uint8)
    return [RefineRow(100 + number, pixels, mask) for number in range(count)]


def test_masks_of_several_requests_share_a_step(fake_limits):
    scheduler = Scheduler(dataclasses.replace(fake_limits, refines=True))
    for row in masks(MOST_REFINED + 3):
        scheduler.refine(row)
    scheduler.abort_refinement(101)
    steps = []
    while scheduler.has_work:
        plan = scheduler.schedule()
        assert plan is not None and scheduler.is_refining
        steps.append([row.sequence_id for row in plan.refine])
        scheduler.commit(plan, StepResult())
    assert steps == [[100, 102, 103, 104], [105, 106]]
    assert not scheduler.is_refining


@pytest.mark.parametrize(("crops", "most"), [(3, 1), (8, 2), (48, MOST_REFINED)])
def test_rows_that_decode_wait_for_as_many_masks_as_the_allowance_has_crops(
    fake_limits, crops, most
):
    policy = SchedulerPolicy(budget=StepBudget(crops=crops))
    scheduler = Scheduler(dataclasses.replace(fake_limits, refines=True), policy)
    sampling = SamplingParams(temperature=0.0, seed=0)
    submission = Submission(
        sequence_id=1, prompt=(0, 50), images=(), sampling=sampling, rule=TokenRule(), max_tokens=9
    )
    scheduler.add(submission)
    prefill = scheduler.schedule()
    assert prefill is not None
    scheduler.commit(prefill, StepResult(tokens={1: StepToken(60)}))
    scheduler.resume(1, TokenRule())
    for row in masks(MOST_REFINED + 1):
        scheduler.refine(row)
    plan = scheduler.schedule()
    assert plan is not None and len(plan.decode) == 1 and len(plan.refine) == most


async def test_the_coarse_outline_on_request_and_without_a_refiner(make):
    engine, runtime = make()
    arguments = {"object": "cat", "refine": False}
    stream = await engine.submit("segment", IMAGE, arguments)
    segment = segment_of(await stream.result())
    assert not segment["refined"] and segment["svg_path"] == segment["coarse_path"]
    other, _ = make(refines=False)
    assert segment_of(await other.segment(IMAGE, "cat")) == segment
    assert not any(plan.refine for plan in runtime.plans)


async def test_refine_is_checked(make):
    engine, _ = make()
    with pytest.raises(InvalidRequest, match="refine"):
        await engine.submit("segment", IMAGE, {"object": "cat", "refine": "yes"})
    other, _ = make(refines=False)
    with pytest.raises(SkillUnavailable, match="no refiner"):
        await other.submit("segment", IMAGE, {"object": "cat", "refine": True})


async def test_an_outline_without_a_box_is_not_refined(make):
    engine, runtime = make(lambda fed: outline(fed, box=False))
    segment = segment_of(await engine.segment(IMAGE, "cat"))
    assert not segment["refined"] and segment["svg_path"] and "bbox" not in segment
    assert not any(plan.refine for plan in runtime.plans)


def test_a_path_that_would_take_long_to_draw_is_not_refined():
    class Output(SegmentOutput):
        outline = "", (0.2, 0.2, 0.8, 0.8)

    model = parse_model_config(SMALL, family="moondream3")
    output, vision = Output("cat", SkillContext(model=model, codec=ByteCodec())), model.vision
    refining, side = Refining(vision), vision.crop_size
    image = PreparedImage("key", np.zeros((2, side, side, 3), np.uint8), (1, 1), 60, 40)
    square, curve = "M 0 0 L 1 0 L 1 1 L 0 1", " C 0.111 0.222 0.333 0.444 0.555 0.666"
    for curves in (0, 200, 240):
        Output.outline = square + curves * curve + " z", Output.outline[1]
        began = time.process_time()
        row = refining.begin(1, output, image)
        assert (row is None) == (curves == 240)
        assert time.process_time() - began < 1


async def test_an_outline_cut_off_by_max_tokens_is_refined(make):
    engine, _ = make()
    # The corner (0, 1) is missing: a triangle.
    result = await engine.segment(IMAGE, "cat", settings={"max_tokens": 3 + 9})
    assert result.finish_reason == "length" and len(result.token_ids) == 12
    assert segment_of(result)["refined"]


async def test_a_step_that_fails_leaves_the_coarse_outline(make, caplog):
    listener = Listener()

    def cost(plan):
        if plan.refine:
            runtime.fail_next = RuntimeError("the refiner is broken")
        return 0.0

    engine, runtime = make(cost=cost, observer=listener)
    segment = segment_of(await engine.segment(IMAGE, "cat"))
    assert not segment["refined"] and segment["svg_path"] == segment["coarse_path"]
    assert "the refiner failed" in caplog.text
    assert [event.finish_reason for event in listener.requests] == ["stop"]
    assert (await engine.segment(IMAGE, "dog")).finish_reason == "stop"


def held_refinement():
    """A cost whose refinements wait: (cost, set by the first one, lets them go on)."""
    entered, go_on = threading.Event(), threading.Event()

    def cost(plan):
        if plan.refine:
            entered.set()
            assert go_on.wait(60)
        return 0.0

    return cost, entered, go_on


async def test_a_request_is_cancelled_while_its_mask_is_refined(make):
    cost, entered, go_on = held_refinement()
    engine, _ = make(cost=cost)
    first = await engine.segment(IMAGE, "cat", stream=True)
    assert await asyncio.to_thread(entered.wait, 60)
    second = await engine.segment(IMAGE, "dog", stream=True)
    assert engine.cancel(first.request_id) == 1
    go_on.set()
    cancelled = await first.result()
    # The step that refines it may come back before the cancellation is read.
    assert cancelled.finish_reason == ("stop" if segment_of(cancelled)["refined"] else "cancelled")
    assert segment_of(await second.result())["refined"]
    assert engine.num_requests == 0


async def test_shutdown_ends_requests_that_are_being_refined(make):
    cost, entered, go_on = held_refinement()
    engine, runtime = make(cost=cost)
    stream = await engine.segment(IMAGE, "cat", stream=True)
    assert await asyncio.to_thread(entered.wait, 60)
    ending = asyncio.create_task(engine.shutdown(grace_s=60))
    await asyncio.sleep(0)
    go_on.set()
    await ending
    assert segment_of(await stream.result())["refined"]
    assert runtime.closed
