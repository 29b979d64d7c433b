"""Images sent once and named afterwards, over a real socket: put, upload, use, dropped ones, delete."""

import asyncio
import contextlib
import hashlib

import grpc
import numpy as np
import pytest
import pyvips

from kestrel_client._pb.kestrel.v1 import common_pb2, image_service_pb2, model_service_pb2
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import ImageLimits
from kestrel_grpc.images.store import RECORD_BYTES
from kestrel_grpc.monitoring.load import LoadMeter
from tests.service.conftest import raw_image
from tests.service.services.answers.test_image_budget import requests
from tests.service.statuses import failure
from tests.waiting import outlived, until

INVALID = grpc.StatusCode.INVALID_ARGUMENT
GREEDY = common_pb2.Sampling(temperature=0)


def picture(seed=0, width=60, height=40):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    return pyvips.Image.new_from_array(pixels).pngsave_buffer()


PNG = picture()
UPLOAD = "ImageService/UploadImage"


def by_id(image_id):
    return common_pb2.Image(image_id=image_id)


def query(image, **fields):
    return pb.QueryRequest(
        images=[image],
        query=pb.QueryTask(question="what?", max_tokens=2, sampling=GREEDY),
        **fields,
    )


def id_of(response):
    """The id of the image that a response is about."""
    return response.info.images[0].image_id


async def put(served, data=PNG):
    request = image_service_pb2.PutImageRequest(image=common_pb2.Image(encoded=data))
    return (await served.images.PutImage(request)).image


def messages(data, *, chunk=1000, **info):
    yield image_service_pb2.UploadImageRequest(info=image_service_pb2.UploadInfo(**info))
    for start in range(0, len(data), chunk):
        yield image_service_pb2.UploadImageRequest(chunk=data[start : start + chunk])


def upload(served, data=PNG, **kwargs):
    return served.images.UploadImage(iter(messages(data, **kwargs)))


@pytest.mark.parametrize("image", [common_pb2.Image(encoded=PNG), raw_image()], ids=["png", "raw"])
async def test_a_image_put_is_named_afterwards(serve, image):
    served = await serve()
    put = await served.images.PutImage(image_service_pb2.PutImageRequest(image=image))
    stored = put.image
    assert (stored.size.width, stored.size.height) == (60, 40)
    assert stored.size_bytes == (len(PNG) if image.encoded else 60 * 40 * 3)
    sent = await served.vision.Query(query(image))
    named = await served.vision.Query(query(by_id(stored.image_id)))
    assert named.answers[0].text == sent.answers[0].text
    assert id_of(named) == id_of(sent) == stored.image_id
    assert (named.info.images[0].size.width, named.info.images[0].size.height) == (60, 40)
    again = await served.images.PutImage(
        image_service_pb2.PutImageRequest(image=by_id(stored.image_id))
    )
    assert again.image == stored


async def test_every_reply_names_the_image_that_came_with_it(serve):
    served = await serve()
    asked = requests(common_pb2.Image(encoded=PNG)).items()
    replies = [await getattr(served.vision, method)(each) for method, each in asked]
    stream = served.vision.StreamQuery(query(common_pb2.Image(encoded=PNG)))
    replies += [event.final async for event in stream if event.HasField("final")]
    assert len(set(map(id_of, replies))) == 1
    assert id_of(replies[0]).startswith("img_")
    text = await served.vision.Query(
        pb.QueryRequest(query=pb.QueryTask(question="?", max_tokens=2, sampling=GREEDY))
    )
    assert not text.info.images
    assert len(served.server.images) == 1


async def test_what_failed_is_not_kept(serve):
    served = await serve()
    broken = common_pb2.Image(encoded=PNG[:60])
    assert (await failure(served.vision.Query(query(broken)))).reason == "IMAGE_BROKEN"
    told = await failure(served.images.PutImage(image_service_pb2.PutImageRequest(image=broken)))
    assert (told.code, told.reason, told.fields) == (INVALID, "IMAGE_BROKEN", ["image"])
    assert len(served.server.images) == 0


async def test_an_unknown_id_says_what_to_do(serve):
    served = await serve(server_config={"image_store_bytes": 50_000})
    told = await failure(served.vision.Query(query(by_id("img_" + 32 * "0"))))
    assert told.code is grpc.StatusCode.NOT_FOUND
    assert (told.reason, told.fields) == ("IMAGE_NOT_FOUND", ["images[0].image_id"])
    assert "send the image again" in told.message and "50000 bytes" in told.message
    stream = served.vision.StreamQuery(query(by_id("x")))
    assert (await failure(stream)).fields == ["images[0].image_id"]
    put = served.images.PutImage(image_service_pb2.PutImageRequest(image=by_id("x")))
    assert (await failure(put)).code is grpc.StatusCode.NOT_FOUND


async def test_a_server_may_keep_none(serve):
    served = await serve(server_config={"image_store_bytes": 0})
    reply = await served.vision.Query(query(common_pb2.Image(encoded=PNG)))
    assert reply.answers[0].text and not id_of(reply)
    request = image_service_pb2.PutImageRequest(image=common_pb2.Image(encoded=PNG))
    told = await failure(served.images.PutImage(request))
    assert (told.code, told.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "IMAGES_NOT_KEPT")
    assert (await served.refusal(UPLOAD, messages(PNG))).reason == "IMAGES_NOT_KEPT"
    told = await failure(served.vision.Query(query(by_id("img_1"))))
    assert "stores no images" in told.message


async def test_a_image_larger_than_the_store_is_answered_and_not_kept(serve):
    served = await serve(server_config={"image_store_bytes": 100})
    assert not id_of(await served.vision.Query(query(common_pb2.Image(encoded=PNG))))
    request = image_service_pb2.PutImageRequest(image=common_pb2.Image(encoded=PNG))
    told = await failure(served.images.PutImage(request))
    assert (told.reason, told.fields) == ("IMAGE_TOO_LARGE", ["image"])
    assert "100" in told.message


async def test_delete(serve):
    served = await serve()
    stored = await put(served)
    request = image_service_pb2.DeleteImageRequest(image_id=stored.image_id)
    assert (await served.images.DeleteImage(request)).existed
    assert not (await served.images.DeleteImage(request)).existed
    told = await failure(served.vision.Query(query(by_id(stored.image_id))))
    assert told.reason == "IMAGE_NOT_FOUND"
    told = await failure(served.images.DeleteImage(image_service_pb2.DeleteImageRequest()))
    assert told.fields == ["image_id"]


async def test_an_upload_in_pieces_gives_what_a_put_gives(serve):
    served = await serve()
    stored = (await upload(served, size_bytes=len(PNG), sha256=hashlib.sha256(PNG).digest())).image
    assert stored == await put(served)
    assert (await upload(served, chunk=7)).image == stored
    assert served.server.images.size_bytes == len(PNG) + RECORD_BYTES


async def test_an_upload_is_stopped_as_soon_as_it_is_too_large(serve):
    served = await serve(image_limits=ImageLimits(max_bytes=5000))
    sent = 0

    def EndlessRuntime():
        nonlocal sent
        yield from messages(b"")
        while sent < 1000:
            sent += 1
            yield image_service_pb2.UploadImageRequest(chunk=bytes(1000))

    told = await served.refusal(UPLOAD, EndlessRuntime())
    assert (told.code, told.reason, told.fields) == (INVALID, "IMAGE_TOO_LARGE", ["chunk"])
    assert "6000 bytes; the limit is 5000" in told.message
    assert sent < 1000
    told = await served.refusal(UPLOAD, messages(PNG, size_bytes=5001))
    assert (told.reason, told.fields) == ("IMAGE_TOO_LARGE", ["info.size_bytes"])
    assert len(served.server.images) == 0


BAD_UPLOADS = {
    "no message": ([], "info"),
    "no info": (list(messages(PNG))[1:], "info"),
    "info twice": ([*messages(b""), *messages(b"")], "info"),
    "nothing in it": ([image_service_pb2.UploadImageRequest()], ""),
    "cut short": (list(messages(PNG[:-9], size_bytes=len(PNG))), "info.size_bytes"),
    "too long": (list(messages(PNG, size_bytes=99)), "chunk"),
    "size of 0": (list(messages(b"", size_bytes=0)), "info.size_bytes"),
    "half a digest": (list(messages(PNG, sha256=bytes(16))), "info.sha256"),
    "another digest": (list(messages(PNG, sha256=bytes(32))), "info.sha256"),
    "empty": (list(messages(b"")), "image"),
    "half a picture": (list(messages(PNG[: len(PNG) // 2])), "image"),
}


async def test_bad_uploads_are_told_and_leave_nothing(serve):
    served = await serve()
    for case, (sent, field) in BAD_UPLOADS.items():
        told = await served.refusal(UPLOAD, sent)
        assert told.code is INVALID, case
        assert told.fields == ([field] if field else []), case
    assert len(served.server.images) == 0
    assert (await upload(served)).image.image_id


async def holds(room, num_bytes):
    await until(lambda: room.used_bytes == num_bytes)


async def begun(served, data):
    """An upload of which all but the end has come."""
    call = served.images.UploadImage()
    for message in messages(data):
        await call.write(message)
    return call


async def test_an_upload_that_is_cancelled_or_stalls_leaves_nothing(serve):
    served = await serve(server_config={"upload_idle_s": 0.5})
    call = await begun(served, PNG[:2000])
    await holds(served.server.uploads, 2000)
    call.cancel()
    await holds(served.server.uploads, 0)
    call = await begun(served, PNG[:2000])
    await holds(served.server.uploads, 2000)
    told = await failure(call)
    assert told.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "the upload received no data for 0.5 s, the limit" in told.message
    await holds(served.server.uploads, 0)
    assert len(served.server.images) == 0


async def test_unfinished_uploads_are_bounded_together(serve):
    limit = 2 * len(PNG)
    served = await serve(
        server_config={"image_store_bytes": limit}, image_limits=ImageLimits(max_bytes=limit)
    )
    held = await begun(served, bytes(limit - 100))
    await holds(served.server.uploads, limit - 100)
    told = await served.refusal(UPLOAD, messages(PNG))
    assert told.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert told.reason == "UPLOADS_FULL" and told.retry_after_s is not None
    held.cancel()
    await holds(served.server.uploads, 0)
    assert (await upload(served)).image.image_id


async def test_images_wait_for_the_model(serve):
    served = await serve(load=False)
    request = image_service_pb2.PutImageRequest(image=raw_image())
    assert (await failure(served.images.PutImage(request))).reason == "MODEL_NOT_READY"


async def test_server_info_tells_the_bounds(serve):
    served = await serve(server_config={"image_store_bytes": 12345})
    info = await served.models.GetServerInfo(model_service_pb2.GetServerInfoRequest())
    assert info.limits.image_store_bytes == 12345
    assert info.limits.max_analyze_tasks == 32


@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_an_upload_that_is_given_up_is_no_bad_upload(serve, monkeypatch, how):
    codes = []
    monkeypatch.setattr(LoadMeter, "on_call", lambda _, call: codes.append(call.code))
    served = await serve()

    async def given_up(timeout):
        call = served.images.UploadImage(timeout=timeout if how == "deadline" else None)
        for message in messages(PNG[:2000], size_bytes=len(PNG)):
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(message)
        if how == "cancel":
            await holds(served.server.uploads, 2000)
            call.cancel()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await call
        await holds(served.server.uploads, 0)

    await outlived(given_up, lambda _: codes)
    ends = {"deadline": grpc.StatusCode.DEADLINE_EXCEEDED, "cancel": grpc.StatusCode.CANCELLED}
    assert codes == [ends[how]]
