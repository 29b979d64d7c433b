"""Regions, tiles and suppression through gRPC and the SDK; the engine's tests have the details."""

import grpc
import numpy as np

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import best_boxes
from kestrel_grpc.services.answers import frames
from kestrel_grpc.services.answers.several import MAX_SEQUENCES
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS
from tests.service.statuses import failure, of_message

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
    request = pb.DetectRequest(
        image=image(region=RIGHT), detect=pb.DetectTask(objects=["cat"], max_objects=3)
    )
    first = await served.vision.Detect(request)
    assert (first.info.images[0].size.width, first.info.images[0].size.height) == (100, 60)
    assert all(0.5 <= found.box.x_min <= found.box.x_max <= 1 for found in first.detections)
    image_id = first.info.images[0].image_id
    request.image.image_id = image_id
    again = await served.vision.Detect(request)
    assert again.detections == first.detections
    assert (again.info.images[0].image_id, again.usage.cached_tokens > 81) == (image_id, True)
    whole = await served.vision.Detect(
        pb.DetectRequest(image=image(), detect=pb.DetectTask(objects=["cat"], max_objects=3))
    )
    assert whole.info.images[0].image_id == image_id
    assert whole.detections != first.detections
    tasks = [pb.Task(detect=pb.DetectTask(objects=["cat"], max_objects=3))]
    analysis = await served.vision.Analyze(
        pb.AnalyzeRequest(image=image(region=RIGHT), tasks=tasks)
    )
    assert analysis.results[0].detect.detections == first.detections


async def test_tiles_are_merged_and_streamed(serve):
    served = await serve(FakeRuntime(LIMITS, always))
    request = pb.DetectRequest(
        image=image(), detect=pb.DetectTask(objects=["cat"], max_objects=2, tiles=TWO)
    )
    merged = await served.vision.Detect(request)
    scores = [found.score for found in merged.detections]
    assert 1 <= len(scores) <= 2
    assert scores == sorted(scores, reverse=True)
    alone = await served.vision.Detect(
        pb.DetectRequest(image=image(), detect=pb.DetectTask(objects=["cat"], max_objects=2))
    )
    assert merged.usage.input_tokens == 3 * alone.usage.input_tokens
    assert merged.usage.image_tokens == 3 * alone.usage.image_tokens
    assert (merged.info.images[0].num_crops, alone.info.images[0].num_crops) == (3, 1)
    assert merged.info.images[0].image_id == alone.info.images[0].image_id
    events = [event async for event in served.vision.StreamDetect(request)]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", *["detection"] * 6, "search", "final"]
    assert events[-1].final.detections == merged.detections


async def test_tiles_and_suppression_for_several_names(serve):
    runtime = FakeRuntime(LIMITS, always)
    served = await serve(runtime)
    names = ["cat", "dog", "cow"]
    request = pb.DetectRequest(
        image=image(), detect=pb.DetectTask(objects=names, max_objects=4, tiles=TWO)
    )
    every = await served.vision.Detect(request)
    assert len({piece.image.key for plan in runtime.plans for piece in plan.encode}) == 3
    request.detect.max_overlap = 0.05
    kept = await served.vision.Detect(request)
    assert 0 < len(kept.detections) < len(every.detections)
    boxes = [found.box for found in kept.detections]
    edges = [(box.x_min, box.y_min, box.x_max, box.y_max) for box in boxes]
    assert all(best_boxes(edges, [found.score for found in kept.detections], 0.05))


async def test_each_task_of_analyze_has_its_own_tiles(serve):
    runtime = FakeRuntime(LIMITS, always)
    served = await serve(runtime)
    shared = {"objects": ["cat", "dog"], "max_objects": 3, "tiles": TWO}
    tall = pb.Tiles(rows=3, columns=1, tiles_only=True)
    tasks = [
        pb.Task(detect=pb.DetectTask(**shared, max_overlap=0.05)),
        pb.Task(point=pb.PointTask(**shared)),
        pb.Task(point=pb.PointTask(**shared | {"tiles": tall})),
        pb.Task(detect=pb.DetectTask(**shared | {"tiles": None})),
        pb.Task(
            detect=pb.DetectTask(**shared | {"tiles": pb.Tiles(rows=1, columns=16, overlap=0)})
        ),
    ]
    asked = pb.AnalyzeRequest(image=image(), tasks=tasks)
    *found, small = (await served.vision.Analyze(asked)).results
    # The image, its two halves and its three thirds are encoded, each once.
    assert len({piece.image.key for plan in runtime.plans for piece in plan.encode}) == 6
    for task, result in zip(tasks, found, strict=False):
        kind = task.WhichOneof("task")
        alone = getattr(pb, f"{kind.capitalize()}Request")(image=image())
        getattr(alone, kind).CopyFrom(getattr(task, kind))
        response = await getattr(served.vision, kind.capitalize())(alone)
        assert getattr(result, kind).detections == response.detections
        assert getattr(result, kind).usage.image_tokens == response.usage.image_tokens
    assert of_message(small.error).fields == ["tasks[4].detect.tiles"]


async def test_a_late_frame_has_no_tiles(serve, monkeypatch):
    served = await serve(FakeRuntime(LIMITS, always))
    late = iter((False, True))
    monkeypatch.setattr(frames.FrameStream, "is_late", lambda stream, waited_s: next(late))
    task = pb.DetectTask(objects=["cat"], max_objects=3, tiles=TWO)
    config = pb.FramesConfig(
        tasks=[pb.Task(detect=task)],
        latency_budget_ms=60_000,
        late=pb.LATE_FRAMES_OVERVIEW,
        max_in_flight=1,
    )
    call = served.vision.StreamFrames()
    await call.write(pb.StreamFramesRequest(config=config))
    told = []
    images = [image(), image(region=RIGHT)]
    for number, shown in enumerate(images, 1):
        frame = pb.Frame(frame_id=number, image=shown)
        await call.write(pb.StreamFramesRequest(frame=frame))
        told.append(await call.read())
    call.cancel()
    assert [each.work.overview_only for each in told] == [False, True]
    assert [each.work.crops for each in told] == [4, 1]
    alone = pb.DetectRequest(detect=task)
    for each, shown in zip(told, images, strict=True):
        alone.image.CopyFrom(shown)
        response = await served.vision.Detect(alone)
        assert each.results.results[0].detect.detections == response.detections
        alone.detect.ClearField("tiles")


async def test_a_call_with_tiles_takes_a_bounded_number_of_places(serve):
    most = 0

    def watch(plan):
        nonlocal most
        most = max(most, served.engine.places.held)
        return 0.0

    served = await serve(FakeRuntime(LIMITS, always, cost=watch), max_queue=2 * MAX_SEQUENCES)
    names = [f"object {number}" for number in range(30)]
    response = await served.vision.Point(
        pb.PointRequest(image=image(), point=pb.PointTask(objects=names, max_objects=1, tiles=TWO))
    )
    assert not any(search.HasField("error") for search in response.searches)
    assert 3 < most <= MAX_SEQUENCES


async def test_errors_name_the_field(serve):
    served = await serve()
    task, box = pb.DetectTask, common_pb2.Box
    for asked, region, path, reason in (
        (task(tiles={"rows": 2}), None, "detect.tiles.columns", "whole number from 1 up"),
        (task(tiles={"rows": 4, "columns": 5}), None, "detect.tiles", "are 20 tiles; must be 2 to 16"),
        (task(tiles={"rows": 2, "columns": 2, "overlap": 0.75}), None, "detect.tiles.overlap", "in [0, 0.5]"),
        (task(tiles={"rows": 1, "columns": 16, "overlap": 0}), None, "detect.tiles", "the least is 8x8: ask for fewer"),
        (task(max_overlap=1.0), None, "detect.max_overlap", "above 0 and below 1"),
        (task(), box(x_max=1), "image.region", "needs x_min < x_max"),
        (task(), box(x_max=0.01, y_max=1), "image.region", "covers 1x60 of the image's 100x60 pixels"),
    ):  # fmt: skip
        for names in (["cat"], ["cat", "dog"]):
            asked.ClearField("objects")
            asked.objects.extend(names)
            request = pb.DetectRequest(image=image(region=region), detect=asked)
            failed = await failure(served.vision.Detect(request))
            assert (failed.code, failed.fields) == (INVALID, [path])
            assert reason in failed.message
