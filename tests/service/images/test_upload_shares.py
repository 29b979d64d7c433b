"""Unfinished uploads: their bytes are shared by principal, and one that stalls ends soon."""

import grpc
import pytest

from kestrel_client._pb.kestrel.v1 import image_service_pb2
from kestrel_engine import ImageLimits
from kestrel_grpc.edge.failures.errors import UploadsFull
from kestrel_grpc.images.upload import Upload, UploadRoom
from kestrel_grpc.settings.security import SecurityConfig
from tests.service.images.test_images import PNG, messages
from tests.service.security.identity.test_tokens import TokenFile, bearer
from tests.service.statuses import failure
from tests.waiting import until


class Uploads:
    """Uploads by hand; each waits for a message. ``ended``: those that gave way, in order."""

    def __init__(self, max_bytes):
        self.room, self.ended = UploadRoom(max_bytes), []

    def begin(self, principal="", num_bytes=0, weight=1.0):
        upload = Upload(1000, self.room, principal=principal, weight=weight)
        upload.add(image_service_pb2.UploadImageRequest(info=image_service_pb2.UploadInfo()))
        upload.displace_with = lambda: self.ended.append(upload)
        return self.append(upload, num_bytes) if num_bytes else upload

    @staticmethod
    def append(upload, num_bytes):
        upload.add(image_service_pb2.UploadImageRequest(chunk=bytes(num_bytes)))
        return upload


def test_one_principal_may_hold_all_the_room():
    uploads = Uploads(100)
    first = uploads.begin("a", 60)
    uploads.begin("a", 40)
    with pytest.raises(
        UploadsFull, match="hold 100 of 100 bytes, of which a used 100 with a share of 100"
    ):
        uploads.append(first, 1)
    first.close()
    first.close()
    assert uploads.room.used_bytes == 40


def test_another_principal_within_its_share_ends_the_upload_that_waited_longest():
    uploads = Uploads(100)
    old, active = uploads.begin("a", 40), uploads.begin("a", 40)
    uploads.append(old, 20)
    uploads.begin("b", 30)
    assert uploads.ended == [active]
    assert active.displaced is not None and active.displaced.quota.held == 100
    assert uploads.room.used_bytes == 90
    with pytest.raises(UploadsFull, match="a share of 50"):
        uploads.append(old, 20)
    assert uploads.ended == [active]
    active.close()
    assert uploads.room.used_bytes == 90


def test_weights_set_the_shares():
    uploads = Uploads(100)
    uploads.begin("a", 100)
    uploads.begin("b", 75, weight=3.0)
    assert len(uploads.ended) == 1
    assert uploads.room.used_bytes == 75


async def held(served, num_bytes):
    await until(lambda: served.server.uploads.used_bytes == num_bytes)


async def test_eight_stalled_uploads_of_one_principal_keep_no_other_out(
    moved_clock, serve, tmp_path
):
    tokens = TokenFile(tmp_path / "tokens")
    rude, polite = tokens.add("rude"), tokens.add("polite")
    limit = 8 * len(PNG)
    served = await serve(
        server_config={
            "image_store_bytes": limit,
            "upload_idle_s": 60,
            "security": SecurityConfig(auth_tokens=str(tokens.path)),
        },
        image_limits=ImageLimits(max_bytes=limit),
    )
    calls = []
    for _ in range(8):
        call = served.images.UploadImage(metadata=bearer(rude))
        for message in messages(PNG):
            await call.write(message)
        calls.append(call)
    await held(served, limit)
    stored = await served.images.UploadImage(messages(PNG), metadata=bearer(polite))
    assert stored.image.image_id
    told = await failure(calls[0])
    assert (told.code, told.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "UPLOADS_FULL")
    assert "to make room" in told.message and told.retry_after_s is not None
    moved_clock.advance(60)
    for call in calls[1:]:
        assert (await failure(call)).code is grpc.StatusCode.DEADLINE_EXCEEDED
    await held(served, 0)
