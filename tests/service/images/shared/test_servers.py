"""Two servers that share images in a real Redis: ids, owners, and a store that dies or hangs."""

import asyncio
import contextlib

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import common_pb2, image_service_pb2
from kestrel_grpc.images.shared import shared_images
from kestrel_grpc.security.identity.principal import ANONYMOUS, Principal
from kestrel_grpc.settings.shared_images import PASSWORD_VARIABLE, SharedImagesConfig
from kestrel_grpc.settings.telemetry import TelemetryConfig
from tests.service.conftest import raw_image
from tests.service.images.shared.conftest import PASSWORD
from tests.service.images.test_images import PNG, by_id, id_of, picture, put, query, upload
from tests.service.statuses import failure
from tests.waiting import until


@pytest.fixture
def shared(redis_server, monkeypatch):
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)

    def config(**fields):
        made = SharedImagesConfig(url=redis_server.url, **{"timeout_s": 60, **fields})
        return {"server_config": {"shared_images": made}}

    return config


def delete(served, image_id):
    return served.images.DeleteImage(image_service_pb2.DeleteImageRequest(image_id=image_id))


@pytest.mark.parametrize("image", [common_pb2.Image(encoded=PNG), raw_image()], ids=["png", "raw"])
async def test_an_image_put_at_one_server_is_known_at_the_other(serve, shared, image):
    config = shared()
    config["server_config"]["telemetry"] = TelemetryConfig(prometheus="127.0.0.1:0")
    first, second = await serve(**shared()), await serve(**config)
    request = image_service_pb2.PutImageRequest(image=image)
    stored = (await first.images.PutImage(request)).image
    sent = await first.vision.Query(query(image))
    calls = [second.vision.Query(query(by_id(stored.image_id))) for _ in range(3)]
    for named in await asyncio.gather(*calls):
        assert named.answers[0].text == sent.answers[0].text and id_of(named) == stored.image_id
        assert (named.info.images[0].size.width, named.info.images[0].size.height) == (60, 40)
    assert len(second.server.images) == 1
    second.server.images.check()
    again = await second.images.PutImage(
        image_service_pb2.PutImageRequest(image=by_id(stored.image_id))
    )
    assert again.image == stored
    metrics, _ = second.server.telemetry.exposition("")
    read = b'operations_total{kestrel_operation="get",kestrel_outcome="hit"'
    assert metrics.count(read) == 1 and b"kestrel_shared_images_used" in metrics
    # An image that the other server has dropped comes back from the store.
    first.server.images.clear()
    assert (await first.vision.Query(query(by_id(stored.image_id)))).answers[
        0
    ].text == sent.answers[0].text


async def test_uploads_are_shared_and_deletions_too(serve, shared, monkeypatch, caplog):
    first, second = await serve(**shared()), await serve(**shared())
    stored = (await upload(first)).image
    assert (await second.vision.Query(query(by_id(stored.image_id)))).answers[0].text
    assert (await delete(first, stored.image_id)).existed
    # The other server has a copy, which the next use after a minute finds deleted.
    assert (await second.vision.Query(query(by_id(stored.image_id)))).answers[0].text
    monkeypatch.setattr(shared_images, "_CHECK_INTERVAL_S", 0.0)

    async def has_gone():
        try:
            await second.vision.Query(query(by_id(stored.image_id)))
        except grpc.aio.AioRpcError:
            return True

    await until(has_gone)
    assert len(second.server.images) == 0
    third = await serve(**shared())
    told = await failure(third.vision.Query(query(by_id(stored.image_id))))
    assert told.code is grpc.StatusCode.NOT_FOUND and "send the image again" in told.message
    assert not (await delete(third, stored.image_id)).existed
    for strange in ("../../x", "img_*", "img_" + "0" * 31 + "G"):
        told = await failure(third.vision.Query(query(by_id(strange))))
        assert told.reason == "IMAGE_NOT_FOUND"
    assert PASSWORD not in caplog.text


async def test_another_caller_does_not_find_the_image(serve, shared, monkeypatch):
    first, second = await serve(**shared()), await serve(**shared())
    stored = await put(first)
    with monkeypatch.context() as patched:
        somebody_else = Principal("somebody else", ANONYMOUS.scopes)
        patched.setattr(second.server.guard, "principal", lambda *_: somebody_else)
        told = await failure(second.vision.Query(query(by_id(stored.image_id))))
        assert told.reason == "IMAGE_NOT_FOUND"
        assert not (await delete(second, stored.image_id)).existed
    assert (await second.vision.Query(query(by_id(stored.image_id)))).answers[0].text


@pytest.mark.slow
async def test_a_store_that_is_killed_fails_no_call_that_has_its_image(
    serve, shared, redis_server, caplog
):
    first, second = await serve(**shared()), await serve(**shared())
    stored = [await put(first, picture(seed)) for seed in range(3)]
    ended, answers = asyncio.Event(), 0

    async def traffic():
        nonlocal answers
        seed = 10
        while not ended.is_set():
            image = common_pb2.Image(encoded=picture(seed := seed + 1))
            answers += bool((await first.vision.Query(query(image))).answers[0].text)
            kept = await put(first, picture(seed))
            answers += bool((await first.vision.Query(query(by_id(kept.image_id)))).answers[0].text)

    running = [asyncio.create_task(traffic()) for _ in range(2)]
    try:
        assert (await second.vision.Query(query(by_id(stored[0].image_id)))).answers[0].text
        redis_server.kill()
        before = answers
        for _ in range(4):
            told = await failure(second.vision.Query(query(by_id(stored[1].image_id))))
            assert told.code is grpc.StatusCode.NOT_FOUND
            assert "does not answer" in told.message and "send the image again" in told.message
        # What is in the server's own memory needs no store.
        assert (await second.vision.Query(query(by_id(stored[0].image_id)))).answers[0].text
        await until(lambda: answers >= before + 10)
        assert not second.server.shares_images
        redis_server.start()

        async def is_shared():  # The servers leave a store that failed alone for a while.
            kept = await put(first, picture(99))
            with contextlib.suppress(grpc.aio.AioRpcError):
                return await second.vision.Query(query(by_id(kept.image_id)))

        await until(is_shared)
    finally:
        ended.set()
        await asyncio.gather(*running)
    assert "the shared image store failed" in caplog.text and PASSWORD not in caplog.text


async def test_a_store_that_hangs_costs_a_call_its_own_time_only_once(serve, shared, redis_server):
    served = await serve(**shared(timeout_s=0.2))
    kept = await put(served)
    redis_server.freeze()
    try:
        calls = [
            failure(served.vision.Query(query(by_id(f"img_{n:032x}")), timeout=60))
            for n in range(20)
        ]
        for told in await asyncio.gather(*calls):
            assert told.code is grpc.StatusCode.NOT_FOUND and "does not answer" in told.message
        assert not served.server.shares_images
        assert (await put(served, picture(5))).image_id
        assert (await served.vision.Query(query(by_id(kept.image_id)))).answers[0].text
    finally:
        redis_server.thaw()
