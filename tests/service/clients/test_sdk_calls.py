"""The SDK against the real server: images put and named, several tasks at once, skills by name, priority and salt."""

import asyncio
import dataclasses
import json

import grpc
import numpy as np
import pytest
from PIL import Image

from kestrel_client import (
    AnalyzeResult,
    AsyncKestrelClient,
    Box,
    CaptionResult,
    CaptionTask,
    DetectResult,
    DetectTask,
    ImageHandle,
    InvalidArgumentError,
    InvalidImageError,
    InvalidRequestError,
    KestrelClient,
    NotFoundError,
    Point,
    PointTask,
    QueryTask,
    SegmentTask,
    TaskDone,
    TaskEvent,
    TextDelta,
)
from kestrel_client.calls.prepared_call import PreparedCall
from kestrel_client.calls.requests import stored_images
from tests.threaded import Threaded

GREEDY = {"temperature": 0.0, "max_tokens": 4}


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "picture.png"
    pixels = np.random.default_rng(1).integers(0, 256, (40, 60, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def both(check):
    """Runs an async check with the async client, and with the sync one behind the same interface."""

    async def test(serve, picture):
        served = await serve()
        target = served.server.addresses[0]
        async with AsyncKestrelClient(target, timeout=60) as client:
            await check(client, picture, served)
        async with Threaded(KestrelClient(target, timeout=60)) as client:
            await check(client, picture, served)

    return test


def comparable(result):
    """Without what differs from one request to the next."""
    neutral = dict.fromkeys(("timings", "request_id", "seed", "usage"))
    for name in ("answers", "captions"):
        if hasattr(result, name):
            texts = getattr(result, name)
            neutral[name] = tuple(dataclasses.replace(each, seed=0) for each in texts)
    return dataclasses.replace(result, **neutral)


@both
async def test_a_image_put_goes_wherever_a_image_goes(client, picture, served):
    handle = await client.put_image(picture)
    assert handle.size == (60, 40) and handle.source == picture
    named = await client.query(handle, "what?", **GREEDY)
    sent = await client.query(picture, "what?", **GREEDY)
    assert comparable(named) == comparable(sent)
    assert named.image_id == sent.image_id == handle.image_id
    assert named.to_dict()["image_id"] == handle.image_id
    assert named.draw().width == 60
    by_id = ImageHandle(sent.image_id)
    assert (await client.caption(by_id, "short", **GREEDY)).caption
    assert await client.put_image(by_id) == handle
    assert await client.delete_image(handle)
    assert not await client.delete_image(sent.image_id)
    with pytest.raises(NotFoundError, match="send the image again") as caught:
        await client.query(handle, "what?")
    assert caught.value.reason == "IMAGE_NOT_FOUND"
    assert [v.field for v in caught.value.field_violations] == ["images[0].image_id"]
    assert len(served.server.images) == 0


@both
async def test_every_kind_of_image_can_be_put(client, picture, served):
    opened = Image.open(picture).convert("RGB")
    for image in (str(picture), picture.read_bytes(), np.asarray(opened), opened):
        assert (await client.put_image(image)).size == (60, 40)
    with pytest.raises(InvalidArgumentError):
        await client.put_image(b"no picture")
    with pytest.raises(InvalidImageError):
        await client.put_image("/nowhere.png")
    with pytest.raises(InvalidImageError):
        await client.query(ImageHandle(""), "what?")
    with pytest.raises(InvalidImageError):
        await client.delete_image("")


async def test_large_files_go_in_pieces(serve, picture, monkeypatch):
    served = await serve()
    async with AsyncKestrelClient(served.server.addresses[0], timeout=60) as client:
        whole = await client.put_image(picture)
        monkeypatch.setattr(stored_images, "UPLOAD_THRESHOLD_BYTES", 1000)
        monkeypatch.setattr(stored_images, "CHUNK_BYTES", 900)
        pieces = client._requests.images.put(picture, None, None).request()
        info, *chunks = pieces
        assert info.info.size_bytes == sum(len(each.chunk) for each in chunks)
        assert len(chunks[0].chunk) == 900 and len(chunks) > 1
        assert await client.put_image(picture) == whole
        with KestrelClient(served.server.addresses[0]) as sync:
            assert await asyncio.to_thread(sync.put_image, picture) == whole
        with pytest.raises(InvalidArgumentError) as caught:
            await client.put_image(picture.read_bytes()[:-900])
        assert caught.value.reason == "IMAGE_BROKEN"
    small = AsyncKestrelClient(served.server.addresses[0], max_message_bytes=6000, timeout=60)
    async with small as client:
        assert await client.put_image(picture) == whole, "larger than a message"


async def test_an_upload_whose_status_grpc_drops_is_sent_again(serve, picture, monkeypatch):
    """On an asyncio channel, where the server refuses an upload while its pieces are sent."""
    served = await serve()
    monkeypatch.setattr(stored_images, "UPLOAD_THRESHOLD_BYTES", 1000)
    monkeypatch.setattr(stored_images, "CHUNK_BYTES", 900)
    sent = []

    def send(self, stub):
        sent.append(self)
        if len(sent) % 2:
            raise grpc.aio.AioRpcError(
                grpc.StatusCode.INTERNAL,
                grpc.aio.Metadata(),
                grpc.aio.Metadata(),
                details="Internal error from Core",
            )
        return whole_call(self, stub)

    whole_call = PreparedCall.send
    monkeypatch.setattr(PreparedCall, "send", send)
    async with AsyncKestrelClient(served.server.addresses[0], timeout=60) as client:
        assert (await client.put_image(picture)).size == (60, 40)
        with pytest.raises(InvalidArgumentError) as caught:
            await client.put_image(picture.read_bytes()[:-900])
    assert caught.value.reason == "IMAGE_BROKEN" and len(sent) == 4


TASKS = {
    "question": QueryTask("what?", **GREEDY),
    "words": CaptionTask("short", **GREEDY),
    "points": PointTask("cat", max_objects=2, spatial_refs=[Point(0.5, 0.5)]),
    "boxes": DetectTask("cat", max_objects=2),
    "outline": SegmentTask("cat", **GREEDY, mask="rle"),
}


@both
async def test_several_tasks_at_once(client, picture, served):
    analysis = await client.analyze(picture, TASKS, request_id="mine")
    assert isinstance(analysis, AnalyzeResult)
    assert list(analysis.outcomes) == list(TASKS) and not analysis.errors
    assert analysis.request_id == analysis["words"].request_id == "mine"
    assert isinstance(analysis["words"], CaptionResult)
    alone = {
        "question": await client.query(picture, "what?", **GREEDY),
        "words": await client.caption(picture, "short", **GREEDY),
        "points": await client.point(picture, "cat", max_objects=2, spatial_refs=[Point(0.5, 0.5)]),
        "boxes": await client.detect(picture, "cat", max_objects=2),
        "outline": await client.segment(picture, "cat", mask="rle", **GREEDY),
    }
    for key, result in alone.items():
        assert comparable(analysis[key]) == comparable(result)
    plain = json.loads(json.dumps(analysis.to_dict()))
    assert plain["tasks"]["boxes"]["objects"] == analysis["boxes"].to_dict()["objects"]
    assert plain["image_id"] == analysis.image_id and "source" not in plain
    positions = await client.analyze(ImageHandle(analysis.image_id), list(TASKS.values()))
    assert list(positions.outcomes) == ["0", "1", "2", "3", "4"]
    assert comparable(positions[3]) == comparable(alone["boxes"])


@both
async def test_a_failed_task_raises_when_it_is_asked_for(client, picture, served):
    analysis = await client.analyze(picture, [DetectTask("cat"), QueryTask("?", top_p=1.5)])
    assert analysis[0].finish_reason
    assert set(analysis.errors) == {"1"}
    with pytest.raises(InvalidArgumentError) as caught:
        analysis[1]
    assert caught.value.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [v.field for v in caught.value.field_violations] == ["tasks[1].query.sampling.top_p"]
    with pytest.raises(KeyError):
        analysis[2]
    assert analysis.result(0, DetectResult) is analysis["0"]
    with pytest.raises(TypeError, match="DetectResult, not a CaptionResult"):
        analysis.result(0, CaptionResult)
    assert analysis.to_dict()["tasks"]["1"]["error"]["reason"] == "INVALID_REQUEST"


@both
async def test_a_stream_of_tasks(client, picture, served):
    async with client.stream_analyze(picture, TASKS) as stream:
        events = [event async for event in stream]
        analysis = await stream.result()
    done = {e.key: e.outcome for e in events if isinstance(e, TaskDone)}
    assert done == dict(analysis.outcomes)
    seen = [e for e in events if isinstance(e, TaskEvent)]
    assert len(seen) + len(done) == len(events)
    text = "".join(e.event.text for e in seen if e.key == "words")
    assert text == analysis["words"].caption
    boxes = [e.event for e in seen if e.key == "boxes"]
    assert tuple(boxes) == analysis["boxes"].objects and isinstance(boxes[0], Box)


@both
async def test_tasks_that_are_none(client, picture, served):
    for tasks, words in (
        ("caption", "sequence of tasks"),
        (["caption"], "is not a task"),
        ([CaptionTask("tiny")], "length"),
        ([QueryTask(7)], "question"),
        ([QueryTask("?", seed=2**63)], "seed"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            await client.analyze(picture, tasks)
    for tasks in ([], {"a b": CaptionTask()}, [CaptionTask()] * 33):
        with pytest.raises(InvalidArgumentError, match="tasks"):
            await client.analyze(picture, tasks)
    with pytest.raises(TypeError, match="temperature"):
        await client.analyze(picture, [CaptionTask()], temperature=0)


@both
async def test_skills_by_name(client, picture, served):
    result = await client.run_skill("query", picture, {"question": "what?"}, **GREEDY)
    typed = await client.query(picture, "what?", **GREEDY)
    assert result.output == {"answer": typed.answer}
    assert (result.skill, result.image_id, result.image_size) == (
        "query",
        typed.image_id,
        (60, 40),
    )
    assert json.dumps(result.to_dict())
    refs = {"object": "cat", "spatial_refs": ((0.5, 0.5),)}
    async with client.stream_skill("point", picture, refs, {"max_objects": 2}) as stream:
        points = [event async for event in stream]
        found = (await stream.result()).output["points"]
    assert all(isinstance(point, Point) for point in points)
    assert [(p.x, p.y) for p in points] == [pytest.approx((p["x"], p["y"])) for p in found]
    async with client.stream_skill("query", None, {"question": "?"}, **GREEDY) as stream:
        assert all([isinstance(event, TextDelta) async for event in stream])
    with pytest.raises(NotFoundError, match="query, caption, point") as caught:
        await client.run_skill("dream", picture)
    assert caught.value.reason == "SKILL_NOT_FOUND"
    with pytest.raises(InvalidArgumentError) as bad:
        await client.run_skill("query", arguments={"question": ""})
    assert [v.field for v in bad.value.field_violations] == ["skill.arguments.question"]
    for arguments in ({"x": object()}, {"x": {1, 2}}, {7: "x"}, 7):
        with pytest.raises(InvalidRequestError, match="arguments"):
            await client.run_skill("query", arguments=arguments)


async def test_priority_and_salt_reach_the_engine(serve):
    served = await serve()
    seen = []
    start = served.engine.start

    async def spy(request):
        seen.append((request.priority, request.cache_salt))
        return await start(request)

    served.engine.start = spy
    async with AsyncKestrelClient(served.server.addresses[0], timeout=60) as client:
        await client.query(None, "?", max_tokens=1)
        await client.query(None, "?", max_tokens=1, priority="low", cache_salt="mine")
        await client.run_skill("query", None, {"question": "?"}, priority="high", max_tokens=1)
        pixels = np.zeros((40, 60), np.uint8)
        await client.analyze(pixels, [QueryTask("?")] * 2, priority="high", cache_salt="x")
        with pytest.raises(InvalidArgumentError, match="cache_salt"):
            await client.query(None, "?", cache_salt="x" * 129)
        with pytest.raises(InvalidRequestError, match="priority"):
            await client.query(None, "?", priority="urgent")
    assert seen == [("normal", ""), ("low", "mine"), ("high", ""), ("high", "x"), ("high", "x")]
