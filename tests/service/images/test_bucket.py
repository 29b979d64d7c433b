"""A model and the images of two servers in a bucket of a real server that speaks S3."""

import asyncio
import json

import pytest

from kestrel_client._pb.kestrel.v1 import image_service_pb2
from kestrel_grpc.images.shared.shared_images import SharedImages
from kestrel_grpc.images.store import StoredImage
from kestrel_grpc.settings.shared_images import SharedImagesConfig
from tests.s3_server import BUCKET, start_s3
from tests.service.command_line import here
from tests.service.images.test_images import by_id, put, query
from tests.service.statuses import failure

pytest.importorskip("obstore")
pytestmark = pytest.mark.slow
SECRET = "a-secret-that-no-log-shows"


@pytest.fixture(scope="module")
def s3():
    yield from start_s3()


def test_uploads_that_cannot_work_say_why(s3, monkeypatch):
    done = here("download", "kestrel-tiny", "--to", "s3://no-such-bucket/x")
    assert done.returncode == 1 and "the bucket no-such-bucket does not exist" in done.stderr
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    done = here("download", "kestrel-tiny", "--to", f"s3://{BUCKET}/x")
    assert done.returncode == 1 and "http needs AWS_ALLOW_HTTP=true" in done.stderr


def test_a_model_goes_into_a_bucket_and_is_verified_from_it(s3, tmp_path):
    address = f"s3://{BUCKET}/models/kestrel-tiny"
    for _ in range(2):  # The second one finds all files there.
        done = here("download", "kestrel-tiny", "--to", address)
        assert done.returncode == 0, done.stderr
        *files, last = done.stdout.splitlines()
        assert files[0] == f"{address}/model.safetensors"
        assert last == "kestrel-tiny: 5 files, 22.4 MB"
    cache = {"KESTREL_CACHE_DIR": str(tmp_path / "cache")}
    done = here("verify", "--json", "--no-answer", "--model", address, **cache)
    assert done.returncode == 0, done.stderr + done.stdout
    told = {finding["check"]: finding for finding in json.loads(done.stdout)}
    assert "SHA256SUMS" in told["checksums"]["message"]
    assert {finding["status"] for finding in told.values()} == {"ok"}
    # The bucket is not needed any more.
    done = here("verify", "--no-answer", "--model", address, "--offline", **cache)
    assert done.returncode == 0, done.stderr
    done = here("download", f"s3://{BUCKET}/models/absent", **cache)
    assert done.returncode == 1 and "names no model" in done.stderr
    done = here("download", "s3://no-such-bucket/x", **cache)
    assert done.returncode == 1 and "s3://no-such-bucket/x" in done.stderr
    assert SECRET not in done.stderr


async def test_two_servers_share_images_in_a_bucket(s3, serve):
    config = SharedImagesConfig(url=f"s3://{BUCKET}/images", timeout_s=60)
    first, second = [await serve(server_config={"shared_images": config}) for _ in range(2)]
    stored = await put(first)
    sent = await first.vision.Query(query(by_id(stored.image_id)))
    assert (await second.vision.Query(query(by_id(stored.image_id)))).answers[
        0
    ].text == sent.answers[0].text
    request = image_service_pb2.DeleteImageRequest(image_id=stored.image_id)
    assert (await first.images.DeleteImage(request)).existed
    third = await serve(server_config={"shared_images": config})
    told = await failure(third.vision.Query(query(by_id(stored.image_id))))
    assert told.reason == "IMAGE_NOT_FOUND" and third.server.shares_images


async def test_a_callers_images_stay_in_its_bytes(s3):
    events = []
    url = f"s3://{BUCKET}/bounded"
    config = SharedImagesConfig(url=url, timeout_s=60, caller_bytes=2500, value_bytes=2000)
    images = SharedImages.open(config, events.append)
    for number in range(4):
        image = StoredImage(f"img_{number:032x}", bytes([number]) * 1000, 60, 40)
        await images.put("tenant", image)
        await asyncio.sleep(1)  # S3 tells the time of an object in seconds.
    found = [(await images.fetch("tenant", f"img_{n:032x}")).image for n in range(4)]
    assert [n for n, image in enumerate(found) if image is not None] == [2, 3]
    larger = SharedImagesConfig(url=url, timeout_s=60, caller_bytes=50_000, value_bytes=40_000)
    other = SharedImages.open(larger, events.append)
    await other.put("tenant", StoredImage("img_" + "a" * 32, bytes(9000), 60, 40))
    assert (await images.fetch("tenant", "img_" + "a" * 32)).image is None
    assert events[-1].outcome == "too_large"
    await images.close()
    await other.close()


async def test_no_server_and_wrong_keys_are_failures(s3, monkeypatch, caplog):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    events = []
    config = SharedImagesConfig(url=f"s3://{BUCKET}/images", timeout_s=2)
    images = SharedImages.open(config, events.append)
    await images.put("tenant", StoredImage("img_" + "a" * 32, b"x", 60, 40))
    assert not (await images.fetch("tenant", "img_" + "a" * 32)).answered
    assert {event.outcome for event in events} == {"failed"}
    assert "the shared image store failed" in caplog.text and SECRET not in caplog.text
