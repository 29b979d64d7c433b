"""Regions and tiles through the engine on the fake runtime: coordinates, keys, merging, places, one outcome."""

import asyncio
import dataclasses

import numpy as np
import pytest

from kestrel_engine import (
    EngineOverloaded,
    InRegion,
    InvalidRequest,
    PreparedTiles,
    RuntimeFailure,
    Tiled,
    Tiles,
)
from kestrel_engine.requests.whole_image import output_in_image
from kestrel_engine.types.requests import Coord, ImageRegion, Size
from tests.engine.fakes import GREEDY, Listener
from tests.fake_runtime import FakeRuntime

PIXELS = np.random.default_rng(5).integers(0, 256, (60, 100, 3), np.uint8)
HALF = InRegion(PIXELS, (0.5, 0.0, 1.0, 1.0))
TWO = Tiles(rows=1, columns=2, overlap=0.2)


def always(fed):
    """Objects without end."""
    return 5


@pytest.fixture
def runtime(fake_limits):
    return FakeRuntime(fake_limits, always)


async def test_results_about_a_region_have_coordinates_of_the_image(make_engine, runtime):
    engine = make_engine(runtime)
    cut = np.ascontiguousarray(PIXELS[:, 50:])
    settings = {"max_objects": 3}
    for skill, key in (("point", "points"), ("detect", "objects")):
        stream = await engine.submit(skill, HALF, {"object": "cat"}, settings)
        updates = [update.object async for update in stream]
        result = await stream.result()
        assert result.image_size == (100, 60)
        assert result.output[key] == updates
        # The fake's values follow from the image's key, so only the map is compared.
        for found in updates:
            xs = [found[name] for name in ("x", "x_min", "x_max") if name in found]
            assert all(0.5 <= x <= 1 for x in xs)
    alone = await engine.query(cut, "what?", settings=GREEDY)
    assert alone.image_size == (50, 60)


async def test_a_region_has_a_key_and_a_prefix_of_its_own(make_engine, runtime):
    engine = make_engine(runtime)
    whole = await engine.prepare_image(PIXELS)
    part = await engine.prepare_image(HALF)
    same = await engine.prepare_image(InRegion(PIXELS.copy(), (0.5, 0, 1, 1)))
    other = await engine.prepare_image(InRegion(PIXELS, (0.4, 0, 1, 1)))
    tenant = await engine.prepare_image(HALF, cache_salt="tenant")
    everything = await engine.prepare_image(InRegion(PIXELS, (0, 0, 1, 1)))
    assert part.key == same.key
    assert len({whole.key, part.key, other.key, tenant.key}) == 4
    assert (everything.key, everything.region) == (whole.key, None)
    assert (part.width, part.height) == (50, 60)
    assert part.image_size == (100, 60)
    assert part.crops is not None
    first = await engine.query(HALF, "what?", settings=GREEDY)
    second = await engine.query(HALF, "where?", settings=GREEDY)
    assert (first.metrics.cached_tokens, second.metrics.cached_tokens >= 82) == (0, True)


async def test_spatial_references_are_mapped_into_the_region(make_engine, runtime):
    engine = make_engine(runtime)
    refs = [(0.75, 0.5), (0.25, 0.0, 0.75, 0.5)]
    await engine.query(HALF, "what?", spatial_refs=refs, settings=GREEDY)
    fed = [token for plan in runtime.plans for row in plan.prefill for token in row.tokens]
    places = [token for token in fed if isinstance(token, (Coord, Size))]
    assert places == [Coord(0.5), Coord(0.5), Coord(0.25), Coord(0.25), Size(0.5, 0.5)]
    for outside in ((0.4, 0.5), (0.1, 0.1, 0.5, 0.9)):
        with pytest.raises(InvalidRequest, match=r"is outside image\.region") as caught:
            await engine.query(HALF, "what?", spatial_refs=[(0.7, 0.5), outside], settings=GREEDY)
        assert caught.value.field == "spatial_refs[1]"


async def test_outlines_are_mapped_too(make_engine, fake_limits):
    path = [5, 5, 6, *(100 + letter for letter in b"M48L90"), 0]
    engine = make_engine(
        FakeRuntime(fake_limits, lambda fed: path[min(len(fed) - 1 - fed.index(3), 9)])
    )
    segment = (await engine.segment(HALF, "cat")).output["segments"][0]
    assert 0.5 <= segment["bbox"]["x_min"] <= segment["bbox"]["x_max"] <= 1
    assert segment["coarse_bbox"] == segment["bbox"]
    assert all(0.5 <= point["x"] <= 1 for point in segment["points"])


def test_every_kind_of_place_is_mapped():
    region = ImageRegion(50, 0, 50, 30, 100, 60)
    grounding = [{"start_idx": 1, "end_idx": 4, "points": [(0.5, 1.0), (0.0, 0.0)]}]
    output = {
        "answer": "(0.5, 0.5)",
        "reasoning": {"text": "two", "grounding": grounding},
        "segments": [{"sizes": [{"width": 0.5, "height": 1.0}], "token_ids": [5, 6], "score": 0.5}],
        "boxes": [(-0.5, 0.0, 1.0, 1.0)],
        "crops": None,
    }
    mapped = output_in_image(output, region)
    assert mapped["reasoning"]["grounding"][0]["points"] == [(0.75, 0.5), (0.5, 0.0)]
    assert mapped["segments"][0]["sizes"] == [{"width": 0.25, "height": 0.5}]
    assert mapped["boxes"] == [(0.5, 0.0, 1.0, 0.5)]
    assert (mapped["answer"], mapped["crops"]) == (output["answer"], None)
    assert mapped["segments"][0]["token_ids"] == [5, 6]


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        ((0.5, 0, 0.5, 1), "needs x_min < x_max"),
        ((0, 0, 1.5, 1), "number in"),
        ((0, 0, float("nan"), 1), "number in"),
        ((0, 0, 1), "x_min, y_min, x_max and y_max"),
        ((0.5, 0.5, 0.55, 0.9), "covers 5x24 of the image's 100x60 pixels; the least is 8x8"),
    ],
)
async def test_other_regions_are_refused(make_engine, runtime, box, reason):
    with pytest.raises(InvalidRequest, match=reason) as caught:
        await make_engine(runtime).query(InRegion(PIXELS, box), "what?", settings=GREEDY)
    assert caught.value.field == "image.region"


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"rows": 0, "columns": 2}, "tiles.rows"),
        ({"rows": 1, "columns": 1}, "tiles"),
        ({"rows": 4, "columns": 5}, "tiles"),
        ({"rows": 2, "columns": 2, "overlap": 0.6}, "tiles.overlap"),
        ({"rows": 2, "columns": 2, "overlap": float("nan")}, "tiles.overlap"),
    ],
)
def test_other_tiles_are_refused(values, field):
    with pytest.raises(InvalidRequest) as caught:
        Tiles(**values)
    assert caught.value.field == field


async def test_only_skills_that_find_objects_take_tiles(make_engine, runtime):
    engine = make_engine(runtime)
    image = Tiled(PIXELS, TWO)
    for call in (engine.query(image, "what?"), engine.embed(image)):
        with pytest.raises(InvalidRequest, match="looks at an image once"):
            await call
    with pytest.raises(InvalidRequest, match="must be empty for a tiled image"):
        await engine.point(image, "cat", spatial_refs=[(0.5, 0.5)])
    with pytest.raises(InvalidRequest, match="the least is 8x8: ask for fewer"):
        await engine.point(Tiled(PIXELS[:20], Tiles(rows=4, columns=4)), "cat")
    assert engine.num_requests == engine.places.held == 0


async def test_a_tiled_request_is_one_request(make_engine, runtime):
    listener = Listener()
    engine = make_engine(runtime, observer=listener)
    stream = await engine.submit(
        "detect", Tiled(PIXELS, TWO), {"object": "cat"}, {"max_objects": 2}, request_id="mine"
    )
    assert (engine.num_requests, engine.places.held) == (1, 3)
    updates = [update async for update in stream]
    result = await stream.result()
    assert (engine.num_requests, engine.places.held) == (0, 0)
    assert len(updates) == 6
    tokens = [update.token_index for update in updates]
    assert (tokens, tokens[-1]) == (sorted(tokens), len(result.token_ids))
    scores = [found["score"] for found in result.output["objects"]]
    assert 1 <= len(scores) <= 2
    assert scores == sorted(scores, reverse=True)
    assert all(found in [update.object for update in updates] for found in result.output["objects"])
    assert (result.finish_reason, result.image_size) == ("length", (100, 60))
    assert (len(result.images), result.num_looks) == (1, 3)
    one = await engine.detect(PIXELS, "cat", settings={"max_objects": 2})
    assert result.metrics.input_tokens == 3 * one.metrics.input_tokens
    (event,) = [event for event in listener.requests if event.request_id == "mine"]
    assert (event.finish_reason, event.image_size) == ("length", (100, 60))
    assert event.metrics.output_tokens == 18
    assert result.metrics.encoded_crops == 3
    keys = {piece.image.key for plan in runtime.plans for piece in plan.encode}
    assert len(keys) == 3, "the whole image is one of the looks"


async def test_requests_share_prepared_tiles(make_engine, runtime):
    engine = make_engine(runtime)
    prepared = await engine.prepare_image(Tiled(PIXELS, TWO))
    assert isinstance(prepared, PreparedTiles)
    assert [look.region and look.region.left for look in prepared.looks] == [None, 0, 44]
    results = await asyncio.gather(
        *(engine.point(prepared, name, settings={"max_objects": 1}) for name in ("cat", "dog"))
    )
    assert [len(result.output["points"]) for result in results] == [1, 1]
    assert sum(result.metrics.cached_tokens for result in results) >= 3 * 82


async def test_cancelling_ends_all_looks(make_engine, fake_limits):
    runtime = FakeRuntime(fake_limits, always, cost=lambda plan: 0.002)
    engine = make_engine(runtime)
    settings = {"max_objects": 60}
    stream = await engine.submit(
        "point", Tiled(PIXELS, TWO), {"object": "cat"}, settings, request_id="mine"
    )
    await anext(stream)
    assert engine.cancel("mine") == 1
    result = await stream.result()
    assert result.finish_reason == "cancelled"
    assert engine.places.held == engine.num_requests == 0


async def test_the_failure_of_a_look_fails_the_request_once(make_engine, runtime):
    listener = Listener()
    engine = make_engine(runtime, observer=listener)
    tile = (await engine.prepare_image(Tiled(PIXELS, TWO))).looks[2]
    runtime.bad_images.add(tile.key)
    with pytest.raises(RuntimeFailure):
        await engine.detect(Tiled(PIXELS, TWO), "cat", settings={"max_objects": 2})
    assert [event.error for event in listener.requests] == ["RuntimeFailure"]
    assert engine.places.held == engine.num_requests == 0
    good = await engine.detect(Tiled(PIXELS, TWO), "cat", settings={"max_objects": 2})
    assert good.output["objects"]


async def test_a_fault_in_merging_fails_its_request_only(make_engine, runtime, monkeypatch):
    engine = make_engine(runtime)

    def fail(looks):
        raise ValueError("a fault")

    monkeypatch.setattr("kestrel_engine.requests.merging.merge", fail)
    with pytest.raises(RuntimeFailure, match="could not be merged"):
        await engine.detect(Tiled(PIXELS, TWO), "cat", settings={"max_objects": 1})
    assert engine.num_requests == 0


async def test_each_look_takes_a_place(make_engine, fake_limits):
    limits = dataclasses.replace(fake_limits, max_batch_size=1)
    engine = make_engine(FakeRuntime(limits, always, cost=lambda plan: 0.01), max_queue=3)
    settings = {"max_objects": 20}
    held = [await engine.submit("point", PIXELS, {"object": n}, settings) for n in "ab"]
    with pytest.raises(EngineOverloaded):
        await engine.submit("point", Tiled(PIXELS, TWO), {"object": "cat"}, settings)
    assert engine.places.held == 2
    for stream in held:
        await stream.aclose()


async def test_boxes_that_overlap_are_suppressed_on_request(make_engine, runtime):
    engine = make_engine(runtime)
    every = (await engine.detect(PIXELS, "cat", settings={"max_objects": 40})).output["objects"]
    settings = {"max_objects": 40, "max_overlap": 0.1}
    stream = await engine.submit("detect", PIXELS, {"object": "cat"}, settings)
    assert [update.object async for update in stream] == every
    kept = (await stream.result()).output["objects"]
    assert 0 < len(kept) < len(every)
    assert all(box in every for box in kept)
    assert max(every, key=lambda box: box["score"]) in kept
    for value in (0, 1, -1, float("nan"), True, "0.5"):
        with pytest.raises(InvalidRequest, match="above 0 and below 1"):
            await engine.detect(PIXELS, "cat", settings={"max_overlap": value})
    with pytest.raises(InvalidRequest, match="not a setting"):
        await engine.point(PIXELS, "cat", settings={"max_overlap": 0.5})
