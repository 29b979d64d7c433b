"""The SDK against the real server: golden answers through the whole path, and how failures arrive at a user."""

import asyncio
import json

import pytest

from kestrel_client import (
    AsyncKestrelClient,
    FailedPreconditionError,
    InvalidArgumentError,
    KestrelClient,
    NotFoundError,
    UnavailableError,
)
from kestrel_engine import InferenceEngine, RuntimeConfig
from kestrel_grpc.process.server import KestrelServer
from kestrel_grpc.settings.server import ServerConfig
from tests.fake_runtime import FakeRuntime
from tests.golden.checkpoint import DATA
from tests.service.conftest import LIMITS
from tests.waiting import until


def arguments(case, images):
    """A golden case as the SDK's method, its positional arguments and its keywords."""
    image = next(images.glob(f"{case['image']}.*")) if "image" in case else None
    keys = ("max_tokens", "max_objects", "spatial_refs")
    options = {key: case[key] for key in keys if case.get(key) is not None} | {"temperature": 0.0}
    skill = case["skill"]
    if skill.startswith("query"):
        if skill == "query_reasoning":
            options["reasoning"] = True
        return "query", [image, case["question"]], options
    if skill == "caption":
        return "caption", [image, case["length"]], options
    return skill, [image, case["object"]], options


def pixels(case):
    """Of the image; its name ends in its size."""
    width, _, height = case.get("image", "0x0").rpartition("_")[2].partition("x")
    return int(width) * int(height or width)


def check(case, result):
    match case["skill"]:
        case "query_reasoning":
            assert result.reasoning.text == case["reasoning_text"]
            spans = [
                {"start_idx": s.start, "end_idx": s.end, "points": [(p.x, p.y) for p in s.points]}
                for s in result.grounding
            ]
            assert len(spans) == len(case["grounding"])
            for have, want in zip(spans, case["grounding"], strict=True):
                assert (have["start_idx"], have["end_idx"]) == (want["start_idx"], want["end_idx"])
                assert have["points"] == [pytest.approx(point) for point in want["points"]]
        case "point":
            assert [(p.x, p.y) for p in result.points] == [
                pytest.approx((p["x"], p["y"])) for p in case["objects"]
            ]
        case "detect":
            edges = ("x_min", "y_min", "x_max", "y_max")
            assert [[getattr(box, edge) for edge in edges] for box in result.objects] == [
                pytest.approx([min(1.0, max(0.0, box[edge])) for edge in edges], abs=1e-6)
                for box in case["objects"]
            ]
        case "segment":
            assert result.usage.output_tokens == len(case["tokens"])
        case _:
            text = result.caption if case["skill"] == "caption" else result.answer
            assert text == case["decode_all"]
            assert result.usage.output_tokens == len(case["ids"])


@pytest.mark.slow
@pytest.mark.golden
@pytest.mark.parametrize("chosen", ["smallest images", "every case"])
@pytest.mark.parametrize("model", ["md2", "md3"])
async def test_golden_cases_over_the_wire(model, chosen, golden_folder, golden_images):
    """Cases as an answer and as a stream, in one mixed batch: all, or one of each kind with the smallest image."""
    config = RuntimeConfig(model_path=golden_folder(model), device="cpu", max_batch_size=8)
    server = KestrelServer(
        ServerConfig(listen=("127.0.0.1:0",)), config, lambda: InferenceEngine.create(config)
    )
    await server.start()
    try:
        await server.load()
        recorded = json.loads((DATA / model / "expected.json").read_text())["cases"]
        if chosen == "smallest images":
            recorded.sort(key=pixels, reverse=True)
            recorded = {case["skill"]: case for case in recorded}.values()
        async with AsyncKestrelClient(server.addresses[0]) as client:
            await asyncio.gather(*(both(client, case, golden_images) for case in recorded))
        assert server.served.default.loaded.num_requests == 0
    finally:
        await server.stop(grace_s=0)


async def both(client, case, images):
    skill, positional, options = arguments(case, images)
    check(case, await getattr(client, skill)(*positional, **options))
    async with getattr(client, f"stream_{skill}")(*positional, **options) as stream:
        async for _ in stream:
            pass
        check(case, await stream.result())


async def test_failures_arrive_as_the_sdks_own_errors(serve, golden_images):
    image = golden_images / "small_120x90.png"
    served = await serve(family="moondream2")
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        with pytest.raises(InvalidArgumentError) as caught:
            await client.query(None, "?", top_p=1.5)
        assert [v.field for v in caught.value.field_violations] == ["query.sampling.top_p"]
        assert caught.value.reason == "INVALID_REQUEST"
        with pytest.raises(InvalidArgumentError) as caught:
            async with client.stream_query(None, "?", top_p=1.5) as stream:
                await stream.result()
        assert [v.field for v in caught.value.field_violations] == ["query.sampling.top_p"]
        with pytest.raises(NotFoundError):
            await client.query(None, "?", model="other")
        with pytest.raises(FailedPreconditionError):
            await client.segment(image, "cat")
        assert [model.name for model in await client.list_models()] == ["fake"]
        assert (await client.server_info()).limits.max_queue == 512
    starting = await serve(load=False)
    async with AsyncKestrelClient(starting.server.addresses[0]) as client:
        with pytest.raises(UnavailableError, match="loading"):
            await client.query(None, "?")
        ready = asyncio.create_task(client.wait_ready(60))
        await asyncio.sleep(0)
        await starting.server.load()
        await ready
        assert (await client.query(None, "?", max_tokens=2)).usage.output_tokens == 2


async def test_leaving_a_stream_early_frees_the_engine(serve):
    served = await serve(FakeRuntime(LIMITS, lambda fed: 197, cost=lambda plan: 0.005))

    def leave_early():
        with (
            KestrelClient(served.server.addresses[0]) as client,
            client.stream_query(None, "?", max_tokens=200) as stream,
        ):
            next(iter(stream))

    await asyncio.to_thread(leave_early)
    await until(lambda: served.engine.num_requests == 0)
