"""Embed and StreamEmbed: through the SDK and the command line, with the server's limits, admission and traces."""

import asyncio
import json

import grpc
import numpy as np
import pytest
import torch

from kestrel_client import (
    AsyncKestrelClient,
    Embedding,
    EmbedResult,
    ImageHandle,
    InvalidArgumentError,
    InvalidRequestError,
    KestrelError,
)
from kestrel_client._pb.kestrel.v1 import common_pb2, model_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import ConfigError, InferenceEngine, RuntimeConfig, SkillRegistry
from kestrel_engine.skills import DetectSkill
from tests.client.commands.test_stored_images import IMAGE
from tests.client.commands.test_stored_images import kestrel as kestrel
from tests.engine.inside import inside
from tests.fake_runtime import FakeRuntime
from tests.service.conftest import LIMITS, HeldRuntime, raw_image
from tests.service.statuses import failure
from tests.tiny import TINY
from tests.waiting import until

WIDE = np.full((200, 300, 3), 200, np.uint8)
OTHER = np.full((200, 300, 3), 90, np.uint8)


@pytest.fixture
async def client(serve):
    served = await serve()
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        yield client


async def test_whole_image_and_crops(client):
    result = await client.embed(WIDE, crops=True)
    assert result.whole_image.rows == 1 and result.whole_image.dtype == "float32"
    vector = result.whole_image.array
    assert vector.shape == (2,) and vector.dtype == np.float32 and not vector.flags.writeable
    np.testing.assert_array_equal(np.asarray(result.whole_image), vector)
    assert np.asarray(result.whole_image, np.float64).dtype == np.float64
    # The overview, then the tiles, which cover the image and overlap.
    boxes = [crop.box for crop in result.crops]
    assert (boxes[0].x_min, boxes[0].y_min, boxes[0].x_max, boxes[0].y_max) == (0, 0, 1, 1)
    assert len(boxes) > 2 and boxes[1].x_min == 0 and boxes[-1].x_max == 1
    assert boxes[1].x_max > boxes[2].x_min > 0
    assert len({tuple(crop.array) for crop in result.crops}) == len(result.crops)
    assert result.image_size == (300, 200) and result.model == "fake" and result.request_id
    assert result.timings.total_ms > 0
    assert result.usage.input_tokens == result.usage.image_tokens > result.usage.output_tokens == 0
    again = await client.embed(
        ImageHandle(result.image_id), whole_image=False, crops=True, dtype="float16"
    )
    assert (
        not any(each.crop is None for each in again.embeddings)
        and again.crops[0].array.dtype == np.float16
    )
    plain = result.to_dict()
    assert plain["whole_image"]["vector"] == vector.tolist() and len(plain["crops"]) == len(boxes)
    json.dumps(plain)


async def test_a_small_image_has_one_crop(client):
    result = await client.embed(np.zeros((40, 60, 3), np.uint8), crops=True, pooling="none")
    assert len(result.crops) == 1 and result.crops[0].array.shape == (2, 2)


async def test_the_stream_gives_the_same_one_by_one(client):
    whole = await client.embed(WIDE, crops=True)
    async with client.stream_embed(WIDE, crops=True) as stream:
        events = [event async for event in stream]
        result = await stream.result()
    assert all(isinstance(event, Embedding) for event in events)
    assert events == [whole.whole_image, *whole.crops]
    assert (result.whole_image, result.crops) == (whole.whole_image, whole.crops)
    assert result.image_id == whole.image_id and result.image_size == whole.image_size


async def test_an_image_that_is_kept_is_not_encoded_again(serve):
    served = await serve(FakeRuntime(LIMITS), embedding_cache_bytes=4 << 20)
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        await client.detect(WIDE, "cat", max_objects=1)
        first = sum(len(plan.encode) for plan in served.runtime.plans)
        await client.embed(WIDE)
        assert sum(len(plan.encode) for plan in served.runtime.plans) == first > 0
        await client.embed(WIDE, crops=True)
        assert sum(len(plan.encode) for plan in served.runtime.plans) > first
    assert served.engine.num_requests == 0


async def test_many_images_in_one_call_of_the_client(client):
    done = []
    found = await client.embed_many(
        [WIDE, b"no image", OTHER], progress=lambda *counts: done.append(counts)
    )
    assert [isinstance(each, EmbedResult) for each in found] == [True, False, True]
    assert isinstance(found[1], KestrelError)
    assert done[-1] == (3, 3)
    assert found[0].whole_image != found[2].whole_image


async def test_what_is_refused(serve):
    served = await serve()
    cases = [
        ({"parts": 9}, "embed.parts", "9 is not a value of EmbeddingParts"),
        ({"pooling": 9}, "embed.pooling", "9 is not a value of EmbeddingPooling"),
        ({"dtype": 9}, "embed.dtype", "9 is not a value of EmbeddingDtype"),
    ]
    for fields, field, text in cases:
        request = pb.EmbedRequest(image=raw_image(), embed=fields)
        error = await failure(served.vision.Embed(request))
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        assert (error.fields, text in error.message) == ([field], True), error
    error = await failure(served.vision.Embed(pb.EmbedRequest()))
    assert error.fields == ["image"]
    stream = served.vision.StreamEmbed(pb.EmbedRequest())
    error = await failure(stream)
    assert error.fields == ["image"]
    options = common_pb2.RequestOptions(model="another")
    error = await failure(served.vision.Embed(pb.EmbedRequest(image=raw_image(), options=options)))
    assert error.code is grpc.StatusCode.NOT_FOUND


async def test_embeddings_larger_than_a_message_need_a_stream(serve):
    # 81 patches of 2048 numbers: 664 kB an embedding.
    served = await serve(server_config={"max_message_bytes": 1024 * 1024})
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        with pytest.raises(InvalidArgumentError) as refused:
            await client.embed(WIDE, crops=True, pooling="none")
        assert "embed.pooling: 4 embeddings take 2654208 bytes, the limit is" in str(refused.value)
        assert "use a stream" in str(refused.value)
        assert not any(plan.reads for plan in served.runtime.plans)
        assert (
            len((await client.stream_embed(WIDE, crops=True, pooling="none").result()).crops) == 3
        )
        await client.embed(WIDE, crops=True)


async def test_a_full_queue_and_a_deadline(serve):
    runtime = HeldRuntime()
    served = await serve(runtime, max_queue=2)
    images = [raw_image(60 + i) for i in range(12)]
    calls = [served.vision.Embed(pb.EmbedRequest(image=image)) for image in images]
    running = asyncio.gather(*calls, return_exceptions=True)
    await until(lambda: sum(each.done() for each in calls) + served.engine.num_requests == 12)
    runtime.gate.set()
    refused = [each for each in await running if isinstance(each, grpc.aio.AioRpcError)]
    assert 0 < len(refused) < len(images)
    assert {each.code() for each in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    runtime.gate.clear()
    late = pb.EmbedRequest(image=raw_image(90))
    told = await served.overdue(lambda timeout: served.vision.Embed(late, timeout=timeout))
    assert told.code is grpc.StatusCode.DEADLINE_EXCEEDED
    runtime.gate.set()
    await until(lambda: not served.engine.num_requests)


async def test_a_failed_step_fails_the_call_and_the_next_one_works(serve):
    runtime = FakeRuntime(LIMITS)
    served = await serve(runtime)
    runtime.fail_next = RuntimeError("scripted")
    request = pb.EmbedRequest(
        image=raw_image(), embed={"parts": pb.EMBEDDING_PARTS_IMAGE_AND_CROPS}
    )
    assert (await failure(served.vision.Embed(request))).code is grpc.StatusCode.INTERNAL
    response = await served.vision.Embed(request)
    assert [each.rows for each in response.embeddings] == [1, 1]
    assert [each.HasField("crop") for each in response.embeddings] == [False, True]
    assert not response.info.seed and response.info.images[0].image_id
    events = [event async for event in served.vision.StreamEmbed(request)]
    assert events[0].started.images == response.info.images
    assert [event.embedding for event in events[1:-1]] == list(response.embeddings)
    assert not events[-1].final.embeddings and [e.sequence for e in events] == [0, 1, 2, 3]


async def test_it_is_no_skill_of_the_registry(serve):
    served = await serve()
    model = (await served.models.GetModel(model_service_pb2.GetModelRequest())).model
    assert "embed" not in {skill.name for skill in model.skills}
    error = await failure(
        served.vision.RunSkill(
            pb.RunSkillRequest(image=raw_image(), skill=pb.SkillTask(name="embed"))
        )
    )
    assert error.code is grpc.StatusCode.NOT_FOUND

    class Own(DetectSkill):
        name = "embed"

    with pytest.raises(ConfigError, match="the engine's own skill"):
        SkillRegistry([Own()])


async def test_arguments_are_checked_by_the_client(client):
    for arguments in ({"pooling": "max"}, {"dtype": "bfloat16"}, {"crops": "yes"}):
        with pytest.raises(InvalidRequestError, match=next(iter(arguments))):
            await client.embed(WIDE, **arguments)


async def test_the_command_prints_json_or_writes_a_file(kestrel, tmp_path):
    status, told, errors = await kestrel("embed", IMAGE, "--crops", "--dtype", "float16")
    assert (status, errors) == (0, "")
    line = json.loads(told)
    assert line["image"] == str(IMAGE) and len(line["whole_image"]["vector"]) == 2
    assert line["crops"][0]["box"] == {"x_min": 0, "y_min": 0, "x_max": 1, "y_max": 1}
    file = tmp_path / "vectors.npz"
    status, _, errors = await kestrel("embed", IMAGE, IMAGE, "--crops", "--save", file)
    assert status == 0 and errors.startswith("wrote ")
    with np.load(file) as saved:
        assert saved["names"].tolist() == [str(IMAGE)] and saved["vectors"].shape == (1, 2)
        assert len(saved["crops"]) == len(saved["crop_of"]) == len(saved["boxes"]) > 1
    status, _, errors = await kestrel("embed", IMAGE, "--save", "vectors.txt")
    assert status == 2 and "must end in .npz" in errors


async def test_with_a_model():
    """Results equal the tower's output, in the engine with other requests."""
    engine = await InferenceEngine.create(RuntimeConfig(model_path=TINY, device="cpu"))
    async with engine:
        image = str(IMAGE)
        embedded, _ = await asyncio.gather(
            engine.embed(image, crops=True, pooling="none"), engine.detect(image, "circle")
        )
        prepared = await engine.prepare_image(image)
        vision = inside(engine).built.runtime.model.vision
        with torch.inference_mode():
            crops = torch.from_numpy(prepared.crops)
            wanted = vision.encode_images([(crops, prepared.tiling)])[0].numpy()
        np.testing.assert_array_equal(embedded.output["image"], wanted)
        pooled = (await engine.embed(image)).output["image"]
        mean = wanted.mean(axis=0)
        np.testing.assert_allclose(pooled, mean / np.linalg.norm(mean), atol=1e-6)
