"""Regions, tiles and suppression through gRPC and the SDK; the engine's tests have the details."""

import grpc
import numpy as np
import pytest

from kestrel_client import AsyncKestrelClient, Box, ImageHandle, InvalidRequestError, Tiles
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import best_boxes
from kestrel_engine.runtime.fake import FakeRuntime
from kestrel_grpc.services.answers.analysis import MAX_TASKS
from tests.service.conftest import LIMITS
from tests.service.statuses import failure

INVALID = grpc.StatusCode.INVALID_ARGUMENT
PIXELS = np.random.default_rng(3).integers(0, 256, (60, 100, 3), np.uint8)
RIGHT = common_pb2.Box(x_min=0.5, x_max=1, y_max=1)
TWO = pb.Tiles(rows=1, columns=2)


def image(**fields):
    raw = common_pb2.RawImage(data=PIXELS.tobytes(), width=100, height=60)
    return common_pb2.Image(raw=raw, **fields)


def always(fed):
    """Objects without end."""
    return 5


async def test_a_region_of_an_image_and_of_its_stored_form(serve):
    served = await serve(FakeRuntime(LIMITS, always))
    request = pb.DetectRequest(image=image(region=RIGHT), object="cat", max_objects=3)
    first = await served.vision.Detect(request)
    assert (first.image_size.width, first.image_size.height) == (100, 60)
    assert all(0.5 <= box.x_min <= box.x_max <= 1 for box in first.objects)
    request.image.image_id = first.image_id
    again = await served.vision.Detect(request)
    assert again.objects == first.objects
    assert (again.image_id, again.usage.cached_tokens > 81) == (first.image_id, True)
    whole = await served.vision.Detect(pb.DetectRequest(image=image(), object="cat", max_objects=3))
    assert (whole.image_id, whole.objects == first.objects) == (first.image_id, False)
    tasks = [pb.AnalyzeTask(detect=pb.DetectTask(object="cat", max_objects=3))]
    analysis = await served.vision.Analyze(
        pb.AnalyzeRequest(image=image(region=RIGHT), tasks=tasks)
    )
    assert analysis.results[0].detect.objects == first.objects


async def test_tiles_are_merged_and_streamed(serve):
    served = await serve(FakeRuntime(LIMITS, always))
    request = pb.DetectRequest(image=image(), object="cat", max_objects=2, tiles=TWO)
    merged = await served.vision.Detect(request)
    scores = [box.score for box in merged.objects]
    assert 1 <= len(scores) <= 2
    assert scores == sorted(scores, reverse=True)
    alone = await served.vision.Detect(pb.DetectRequest(image=image(), object="cat", max_objects=2))
    assert merged.usage.input_tokens == 3 * alone.usage.input_tokens
    assert merged.usage.image_tokens == 3 * alone.usage.image_tokens
    assert merged.image_id == alone.image_id
    events = [event async for event in served.vision.StreamDetect(request)]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["object"] * 6, "final"]
    assert events[-1].final.objects == merged.objects


async def test_tiles_and_suppression_for_several_names(serve):
    runtime = FakeRuntime(LIMITS, always)
    served = await serve(runtime)
    names = ["cat", "dog", "cow"]
    request = pb.DetectRequest(image=image(), objects=names, max_objects=4, tiles=TWO)
    every = await served.vision.Detect(request)
    assert len({piece.image.key for plan in runtime.plans for piece in plan.encode}) == 3
    request.max_overlap = 0.05
    kept = await served.vision.Detect(request)
    boxes = [box for result in kept.results for box in result.detect.objects]
    assert 0 < len(boxes) < sum(len(result.detect.objects) for result in every.results)
    edges = [(box.x_min, box.y_min, box.x_max, box.y_max) for box in boxes]
    assert all(best_boxes(edges, [box.score for box in boxes], 0.05))


async def test_a_call_with_tiles_takes_a_bounded_number_of_places(serve):
    most = 0

    def watch(plan):
        nonlocal most
        most = max(most, served.engine.places.held)
        return 0.0

    served = await serve(FakeRuntime(LIMITS, always, cost=watch), max_queue=2 * MAX_TASKS)
    names = [f"object {number}" for number in range(30)]
    response = await served.vision.Point(
        pb.PointRequest(image=image(), objects=names, max_objects=1, tiles=TWO)
    )
    assert {result.WhichOneof("outcome") for result in response.results} == {"point"}
    assert 3 < most <= MAX_TASKS


REFUSED = [
    ({"tiles": pb.Tiles(rows=2)}, "tiles.columns", "whole number from 1 up"),
    ({"tiles": pb.Tiles(rows=4, columns=5)}, "tiles", "are 20 tiles; must be 2 to 16"),
    ({"tiles": pb.Tiles(rows=2, columns=2, overlap=0.75)}, "tiles.overlap", "in [0, 0.5]"),
    (
        {"tiles": pb.Tiles(rows=1, columns=16, overlap=0)},
        "tiles",
        "the least is 8x8: ask for fewer",
    ),
    ({"max_overlap": 1.0}, "max_overlap", "above 0 and below 1"),
    ({"image": image(region=common_pb2.Box(x_max=1))}, "image.region", "needs x_min < x_max"),
    (
        {"image": image(region=common_pb2.Box(x_max=0.01, y_max=1))},
        "image.region",
        "covers 1x60 of the image's 100x60 pixels",
    ),
]


@pytest.mark.parametrize(("fields", "path", "reason"), REFUSED)
@pytest.mark.parametrize("names", [{"object": "cat"}, {"objects": ["cat", "dog"]}])
async def test_errors_name_the_field(serve, fields, path, reason, names):
    served = await serve()
    request = pb.DetectRequest(**{"image": image(), **names, **fields})
    failed = await failure(served.vision.Detect(request))
    assert (failed.code, failed.fields) == (INVALID, [path])
    assert reason in failed.message


async def test_the_sdk_takes_regions_and_tiles(serve):
    served = await serve(FakeRuntime(LIMITS, always))
    target = served.server.addresses[0]
    async with AsyncKestrelClient(target) as client:
        left = await client.point(PIXELS, "cat", region=(0, 0, 0.5, 1), max_objects=2)
        assert all(point.x <= 0.5 for point in left.points)
        handle = ImageHandle(left.image_id)
        again = await client.point(handle, "cat", region=Box(0, 0, 0.5, 1), max_objects=2)
        assert again.points == left.points
        forms = ["1x2", (1, 2), Tiles(1, 2, overlap=0.2, whole_image=True)]
        found = [await client.detect(handle, "cat", tiles=f, max_objects=3) for f in forms]
        assert len({result.objects for result in found}) == 1
        several = await client.detect(
            handle, objects=["cat", "dog"], tiles="1x2", max_objects=3, max_overlap=0.5
        )
        assert len(several["cat"].objects) <= 3
        for tiles in ("2", "2 x 2", 4, (1, 2, 3)):
            with pytest.raises(InvalidRequestError, match="tiles"):
                await client.detect(handle, "cat", tiles=tiles)
        with pytest.raises(InvalidRequestError, match="region"):
            await client.detect(handle, "cat", region=(0, 1))
