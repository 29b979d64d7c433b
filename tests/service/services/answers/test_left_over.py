"""A call leaves no reference cycles, which would hold its image until the garbage collector runs."""

import gc

import pytest

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import PreparedImage
from kestrel_grpc.images.request_images import RequestImage
from tests.service.conftest import raw_image
from tests.waiting import until

HELD = (PreparedImage, RequestImage)
NAMES = pb.DetectTask(objects=["cat", " "], max_objects=1)
REQUESTS = {
    "a lone name": (
        "Detect",
        pb.DetectRequest(image=raw_image(), detect=pb.DetectTask(objects=["cat"])),
    ),
    "a name that fails": ("Detect", pb.DetectRequest(image=raw_image(), detect=NAMES)),
    "a task that fails": (
        "Analyze",
        pb.AnalyzeRequest(
            image=raw_image(),
            tasks=[
                pb.Task(detect=NAMES),
                pb.Task(detect=pb.DetectTask(objects=[" "])),
                pb.Task(detect=pb.DetectTask(objects=["cat", "dog"], max_objects=0)),
                pb.Task(query=pb.QueryTask(question="?", num_samples=2, sampling={"top_p": 2})),
                pb.Task(skill=pb.SkillTask(name="detect", arguments={"object": " "})),
            ],
        ),
    ),
}


def num_held():
    return sum(isinstance(each, HELD) for each in gc.get_objects())


@pytest.mark.slow_with("a lone name", "a name that fails")
@pytest.mark.parametrize("streamed", [False, True], ids=["unary", "stream"])
@pytest.mark.parametrize("kind", REQUESTS)
async def test_what_has_ended_holds_no_image(serve, kind, streamed):
    served = await serve(image_cache_bytes=0)
    method, request = REQUESTS[kind]
    gc.collect()
    before = num_held()
    gc.disable()
    try:
        if streamed:
            assert [event async for event in getattr(served.vision, f"Stream{method}")(request)]
        else:
            await getattr(served.vision, method)(request)
        await until(lambda: not served.engine.num_requests)
        served.runtime.plans.clear()
        after = num_held()
    finally:
        gc.enable()
    assert after == before
