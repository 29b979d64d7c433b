"""Image.max_crops in every call that takes an image, through gRPC and the SDK: its crops, what it shares, errors."""

import grpc
import numpy as np
import pytest

from kestrel_client import (
    AsyncKestrelClient,
    CaptionTask,
    DetectTask,
    InvalidArgumentError,
    InvalidRequestError,
    KestrelClient,
)
from kestrel_client._pb.kestrel.v1 import common_pb2, image_service_pb2, model_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.service.services.test_run_skill import struct
from tests.service.statuses import failure

PIXELS = np.random.default_rng(3).integers(0, 256, (400, 1600, 3), np.uint8)
"""Four tiles, the limit of the fake model."""
QUESTION = pb.QueryTask(question="what?", max_tokens=3, sampling={"temperature": 0})
CATS = pb.DetectTask(objects=["cat"], max_objects=1)


def image(max_crops=None, **fields):
    raw = common_pb2.RawImage(data=PIXELS.tobytes(), width=1600, height=400)
    return common_pb2.Image(raw=raw, max_crops=max_crops, **fields)


def query(*images):
    return pb.QueryRequest(images=images, query=QUESTION)


def requests(seen):
    """One of each method, about ``seen``."""
    task = pb.SkillTask(name="query", arguments=struct(question="what?"), max_tokens=3)
    tasks = [pb.Task(query=QUESTION), pb.Task(detect=CATS)]
    return {
        "Query": query(seen),
        "Caption": pb.CaptionRequest(image=seen, caption=pb.CaptionTask(max_tokens=3)),
        "Point": pb.PointRequest(image=seen, point=pb.PointTask(objects=["cat"], max_objects=1)),
        "Detect": pb.DetectRequest(image=seen, detect=CATS),
        "Segment": pb.SegmentRequest(image=seen, segment=pb.SegmentTask(objects=["cat"])),
        "Analyze": pb.AnalyzeRequest(image=seen, tasks=tasks),
        "RunSkill": pb.RunSkillRequest(image=seen, skill=task),
        "Gaze": pb.GazeRequest(image=seen, gaze=pb.GazeTask(eyes=[common_pb2.Point(x=0.5)])),
        "Embed": pb.EmbedRequest(image=seen),
    }


@pytest.mark.parametrize(("budget", "crops"), [(None, 5), (4, 5), (2, 3), (1, 1)])
async def test_every_call_keeps_the_budget_and_says_what_it_used(serve, budget, crops):
    served = await serve()
    for method, request in requests(image(budget)).items():
        response = await getattr(served.vision, method)(request)
        assert [each.num_crops for each in response.info.images] == [crops], method
        events = [event async for event in getattr(served.vision, f"Stream{method}")(request)]
        assert [each.num_crops for each in events[-1].final.info.images] == [crops], method
    encoded = {piece.image.num_distinct for plan in served.runtime.plans for piece in plan.encode}
    assert encoded == {crops}


async def test_each_image_of_a_question_has_a_budget_of_its_own(serve):
    served = await serve()
    response = await served.vision.Query(query(image(1), image(), image(2)))
    assert [each.num_crops for each in response.info.images] == [1, 5, 3]


@pytest.mark.parametrize("crop_cache_bytes", [0, 1 << 24])
async def test_two_budgets_of_one_image_share_its_id_only(serve, crop_cache_bytes):
    served = await serve(crop_cache_bytes=crop_cache_bytes)
    found = {}
    for budget in (None, 1, 2):
        first = await served.vision.Query(query(image(budget)))
        assert first.usage.cached_tokens == 0
        (seen,) = first.info.images
        named = common_pb2.Image(image_id=seen.image_id, max_crops=budget)
        again = await served.vision.Query(query(named))
        # The pages of the whole image: it is the same one, by its id.
        assert again.usage.cached_tokens > 81
        assert again.info.images == first.info.images
        assert again.answers[0].text == first.answers[0].text
        found[budget] = first
    assert len({each.info.images[0].image_id for each in found.values()}) == 1
    # The fake's texts follow from the keys of the images.
    assert len({each.answers[0].text for each in found.values()}) == len(found)
    # This budget has the tiles that the image has without one.
    same = await served.vision.Query(query(image(4)))
    assert same.usage.cached_tokens > 81 and same.answers[0].text == found[None].answers[0].text


async def test_frames_have_budgets_and_repeat_no_other_budget(serve):
    served = await serve()
    config = pb.FramesConfig(tasks=[pb.Task(detect=CATS)], max_in_flight=1)
    sent = [pb.StreamFramesRequest(config=config)]
    for number, budget in enumerate((None, 1, 1, 2), 1):
        frame = pb.Frame(frame_id=number, image=image(budget))
        sent.append(pb.StreamFramesRequest(frame=frame))
    frames = [each async for each in served.vision.StreamFrames(sent)]
    works = [(each.work.crops, each.work.repeated) for each in frames]
    assert works == [(5, False), (1, False), (1, True), (3, False)]
    seen = [each.results.info.images[0].num_crops for each in frames]
    assert seen == [5, 1, 1, 3]
    sent[1].frame.image.max_crops = 5
    (failed, *_) = [each async for each in served.vision.StreamFrames(sent[:2])]
    assert "frame.image.max_crops: is 5; must be from 1 to 4" in failed.error.message


async def test_put_image_stores_the_image_without_the_budget(serve):
    served = await serve()
    put = await served.images.PutImage(image_service_pb2.PutImageRequest(image=image(1)))
    named = common_pb2.Image(image_id=put.image.image_id)
    response = await served.vision.Query(query(named))
    assert response.info.images[0].num_crops == 5


async def test_a_budget_beyond_the_limits_is_refused_by_every_call(serve):
    served = await serve()
    model = await served.models.GetModel(model_service_pb2.GetModelRequest())
    assert model.model.max_crops == 4
    for budget, why in (
        (5, "is 5; must be from 1 to 4, the model's own limit"),
        (0, "is 0; must be at least 1"),
        (-1, "is -1; must be at least 1"),
    ):
        for method, request in requests(image(budget)).items():
            for name in (method, f"Stream{method}"):
                failed = await failure(getattr(served.vision, name)(request))
                assert failed.code == grpc.StatusCode.INVALID_ARGUMENT
                field = "images[0].max_crops" if method == "Query" else "image.max_crops"
                assert (failed.fields, failed.message) == ([field], f"{field}: {why}"), name
    failed = await failure(served.vision.Query(query(image(1), image(9))))
    assert failed.fields == ["images[1].max_crops"]


async def test_the_sdk(serve):
    served = await serve()
    address = served.server.addresses[0]
    async with AsyncKestrelClient(address) as client:
        for budget, crops in ((None, 5), (1, 1), (2, 3)):
            options = {"max_crops": budget}
            results = [
                await client.query(PIXELS, "what?", max_tokens=2, **options),
                await client.detect(PIXELS, "cat", max_objects=1, **options),
                await client.embed(PIXELS, crops=True, **options),
                await client.analyze(PIXELS, [CaptionTask(max_tokens=2)], **options),
                await client.run_skill("caption", PIXELS, **options),
            ]
            assert {result.num_crops for result in results} == {crops}
            assert len(results[2].crops) == crops
            async with client.frames(
                [DetectTask("cat", max_objects=1)], [PIXELS], **options
            ) as frames:
                assert [frame.num_crops async for frame in frames] == [crops]
            turned = await client.query(PIXELS, "same?", images=[PIXELS], max_tokens=2, **options)
            assert [each.num_crops for each in turned.images] == [crops, crops]
        handle = await client.put_image(PIXELS)
        assert (await client.query(handle, "what?", max_crops=1, max_tokens=2)).num_crops == 1
        assert (await client.list_models())[0].max_crops == 4
        with pytest.raises(
            InvalidArgumentError, match=r"images\[0\]\.max_crops: is 7; must be from 1"
        ):
            await client.query(PIXELS, "what?", max_crops=7)
    with KestrelClient(address) as client:
        for wrong in ("2", 1.5, 2**40):
            with pytest.raises(InvalidRequestError, match=r"^max_crops: "):
                client.caption(PIXELS, max_crops=wrong)


async def test_count_tokens_counts_the_crops_that_a_budget_leaves(serve):
    served = await serve()
    images = [image(1), image(2), image()]
    request = pb.CountTokensRequest(images=images, tasks=[pb.Task(query=QUESTION)])
    counted = await served.vision.CountTokens(request)
    assert [each.num_crops for each in counted.images] == [1, 3, 5]
    assert [each.num_crops for each in counted.info.images] == [1, 3, 5]
    assert counted.tasks[0].num_crops == 9
    request.images[2].max_crops = 5
    failed = await failure(served.vision.CountTokens(request))
    assert failed.fields == ["images[2].max_crops"]
