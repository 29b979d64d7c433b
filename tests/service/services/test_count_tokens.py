"""CountTokens: the count equals the usage of the same request, for all skills and pictures, and nothing is computed."""

import io
from dataclasses import replace

import grpc
import numpy as np
import pytest
from PIL import Image

from kestrel_client import (
    AsyncKestrelClient,
    CaptionTask,
    DetectTask,
    GazeTask,
    ImageHandle,
    InvalidArgumentError,
    PointTask,
    QueryTask,
    SegmentTask,
    SkillTask,
    Tiles,
)
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, raw_image
from tests.service.statuses import failure

ROOMY = replace(LIMITS, num_pages=2000, max_seq_length=1500)


def pixels(width: int, height: int) -> np.ndarray:
    return np.full((height, width, 3), 200, np.uint8)


def jpeg(width: int, height: int, orientation: int = 1) -> bytes:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels(width, height)).save(file, "JPEG", exif=exif)
    return file.getvalue()


PICTURES = {
    "small": pixels(40, 30),
    "wide": pixels(300, 200),
    "long": pixels(50, 900),
    "file": jpeg(310, 190),
    "turned": jpeg(310, 90, orientation=6),
}
REF = (0.1, 0.2, 0.3, 0.4)
TASKS = {
    "question": QueryTask("What is it?"),
    "all parts": QueryTask(
        "What?", True, [REF, (0.5, 0.5)], [("Who?", "Me."), ("Why?", "")], system="Be short."
    ),
    "samples": QueryTask("What?", num_samples=3, presupposes=["cat", "a dog"], max_absence=1.0),
    "caption": CaptionTask("long", num_samples=2),
    "points": PointTask(["cat", "a big dog"], spatial_refs=[REF]),
    "boxes": DetectTask(["cat", "a big dog"]),
    "tiles": DetectTask(["cat", "a big dog"], tiles=Tiles(2, 2, 0.1, True)),
    "outline": SegmentTask(["cat", "a big dog"], [REF]),
    "gazes": GazeTask(eyes=[(0.2, 0.3), (0.5, 0.5)]),
    "accurate gaze": GazeTask(faces=[REF], accurate=True),
    "named": SkillTask("query", {"question": "What?", "presupposes": ["cat"]}),
}


@pytest.fixture
async def client(serve):
    served = await serve(FakeRuntime(ROOMY), max_images=8)
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        client.served = served
        yield client


CASES = [
    pytest.param(p, t, marks=() if p == "wide" or t == "question" else pytest.mark.slow)
    for p in PICTURES
    for t in TASKS
]


@pytest.mark.parametrize(("picture", "task"), CASES)
async def test_the_count_is_the_usage(client, task, picture):
    image, asked = PICTURES[picture], TASKS[task]
    count = await client.count_tokens(image, asked)
    assert not client.served.runtime.plans, "nothing is computed"
    (used,) = await client.map([image], replace(asked, max_tokens=4))
    assert (count.input_tokens, count.image_tokens) == (
        used.usage.input_tokens,
        used.usage.image_tokens,
    )
    assert count.images[0].size == used.image_size
    (only,) = count.tasks.values()
    assert only.input_tokens == count.input_tokens
    assert count.room_tokens == count.context_positions - only.longest_prompt_tokens > 0
    crops = (await client.embed(image, crops=True)).crops
    assert count.images[0].num_crops == len(crops)
    assert (only.num_crops > len(crops)) is (task == "tiles")


async def test_several_pictures_and_none(client):
    images = [PICTURES[name] for name in ("small", "wide", "turned")]
    earlier = ("And before?", "Nothing.", [PICTURES["file"]])
    question = QueryTask("Which?", history=[("First?", "Yes."), earlier], images=images)
    count = await client.count_tokens(PICTURES["wide"], question)
    used = await client.query(
        PICTURES["wide"], "Which?", history=question.history, images=images, max_tokens=2
    )
    assert count.input_tokens == used.usage.input_tokens
    assert count.image_tokens == used.usage.image_tokens == 5 * count.images[0].positions
    assert [tuple(each.size) for each in count.images] == [
        *((300, 200), (310, 190), (40, 30), (300, 200), (90, 310))
    ]
    alone = await client.count_tokens(None, QueryTask("Which?"))
    used = await client.query(None, "Which?", max_tokens=2)
    assert alone.input_tokens == used.usage.input_tokens and alone.image_tokens == 0


async def test_several_tasks_are_those_of_analyze(client):
    tasks = {"a": QueryTask("What?", system="Be short."), "b": DetectTask(["cat", "dog"])}
    count = await client.count_tokens(PICTURES["wide"], tasks)
    used = await client.analyze(PICTURES["wide"], tasks)
    assert count.input_tokens == used.usage.input_tokens
    assert {key: each.input_tokens for key, each in count.tasks.items()} == {
        key: outcome.usage.input_tokens for key, outcome in used.outcomes.items()
    }
    plain = await client.count_tokens(PICTURES["wide"], QueryTask("What?"))
    assert count.tasks["a"].system_tokens == (count.tasks["a"].input_tokens - plain.input_tokens)
    assert [each.num_prompts for each in count.tasks.values()] == [1, 2]


async def test_of_the_gazes_of_every_face_the_search_is_counted(client):
    count = await client.count_tokens(PICTURES["wide"], GazeTask(accurate=True))
    search = await client.count_tokens(PICTURES["wide"], DetectTask("face"))
    assert count.tasks["0"].num_prompts == 1 and count.input_tokens == search.input_tokens


async def test_a_region_a_stored_picture_and_an_adapter(client):
    image = PICTURES["wide"]
    whole = await client.count_tokens(image, CaptionTask())
    part = await client.count_tokens(image, CaptionTask(), region=(0, 0, 0.1, 0.1), adapter="any")
    assert part.input_tokens == whole.input_tokens and part.images[0].size == (300, 200)
    assert (part.images[0].num_crops, whole.images[0].num_crops > 1) == (1, True)
    few = await client.count_tokens(image, CaptionTask(), max_crops=1)
    assert few.images[0].num_crops == 1 and few.input_tokens == whole.input_tokens
    handle = ImageHandle((await client.caption(image)).image_id)
    assert (await client.count_tokens(handle, CaptionTask())).images == whole.images


async def test_a_prompt_that_exceeds_the_context_is_counted(client):
    long = QueryTask("a" * 3000)
    count = await client.count_tokens(PICTURES["small"], long)
    assert count.input_tokens > count.context_positions and count.room_tokens == 0
    with pytest.raises(InvalidArgumentError, match="positions"):
        await client.query(PICTURES["small"], long.question)


async def test_what_is_refused(serve):
    served = await serve()
    question, cat = pb.QueryTask(question="?"), pb.DetectTask(objects=["cat"])
    one, two = raw_image(), [raw_image(), raw_image()]
    damaged = {"encoded": b"no image"}
    cases = [
        ({"images": [one]}, "tasks", "has 0 tasks"),
        ({"tasks": [pb.Task()]}, "tasks[0]", "holds no task"),
        ({"tasks": [pb.Task(detect=cat)]}, "images[0]", "is required"),
        ({"images": two, "tasks": [pb.Task(detect=cat)]}, "images", "detect takes at most 1"),
        ({"images": [one, damaged], "tasks": [pb.Task(query=question)]}, "images[1]", "format"),
        (
            {"tasks": [pb.Task(query=question), pb.Task(query={"question": " "})]},
            "tasks[1].query.question",
            "must not be empty",
        ),
        (
            {"images": [one], "tasks": [pb.Task(detect={"objects": ["cat", " "]})]},
            "tasks[0].detect.objects[1]",
            "must not be empty",
        ),
        (
            {"images": [one], "tasks": [pb.Task(gaze={"eyes": [{"x": 1}, {"x": 2}]})]},
            "tasks[0].gaze.eyes[1]",
            "2.0 is not a number in [0, 1]",
        ),
        (
            {"images": [one], "tasks": [pb.Task(detect={"objects": ["a"], "tiles": {"rows": 9}})]},
            "tasks[0].detect.tiles.columns",
            "not a whole number",
        ),
        (
            {"images": [{"raw": one.raw, "region": {"x_max": 0.01, "y_max": 0.01}}],
             "tasks": [pb.Task(query=question)]},
            "images[0].region",
            "least is 8x8",
        ),
    ]  # fmt: skip
    for fields, field, text in cases:
        error = await failure(served.vision.CountTokens(pb.CountTokensRequest(**fields)))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT, error
        assert (error.fields, text in error.message) == ([field], True), error
    request = pb.CountTokensRequest(images=[{"image_id": "img_0"}], tasks=[pb.Task(query=question)])
    error = await failure(served.vision.CountTokens(request))
    assert error.code is grpc.StatusCode.NOT_FOUND and error.fields == ["images[0].image_id"]
    assert served.engine.num_requests == 0 and not served.runtime.plans


async def test_headers_are_read_once_for_all_tasks_without_tiles(serve, monkeypatch):
    served = await serve()
    read, measure = [], served.engine.measure_image

    async def counted(image, **options):
        read.append(image)
        return await measure(image, **options)

    monkeypatch.setattr(served.engine, "measure_image", counted)
    tiled = pb.PointTask(objects=["cat"], tiles=pb.Tiles(rows=2, columns=2))
    captions = [pb.Task(caption=pb.CaptionTask()) for _ in range(31)]
    told = await served.vision.CountTokens(
        pb.CountTokensRequest(images=[raw_image()], tasks=[*captions, pb.Task(point=tiled)])
    )
    assert len(told.tasks) == 32 and told.tasks[-1].num_prompts == 5
    assert len(read) == 2
