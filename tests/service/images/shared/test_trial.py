"""What ``doctor`` says of a store of shared images: real ones that work, refuse, hang or are not there."""

import base64
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kestrel_grpc.cli.operation.doctor_checks import check_shared_images
from kestrel_grpc.settings.shared_images import PASSWORD_VARIABLE, SharedImagesConfig
from tests.s3_server import BUCKET, start_s3
from tests.service.images.shared.conftest import PASSWORD, RedisServer


def test_without_a_store() -> None:
    assert check_shared_images(SharedImagesConfig()).status == "ok"


def test_redis(redis_server: RedisServer, monkeypatch, tmp_path) -> None:
    config = SharedImagesConfig(url=redis_server.url, timeout_s=60)
    told = check_shared_images(config)
    assert told.status == "warn" and "can't write: AuthenticationError" in told.message, told
    assert "KESTREL_SHARED_IMAGES_PASSWORD" in told.remedy
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    told = check_shared_images(config)
    assert told.status == "ok" and "not encrypted" in told.message, told
    redis_server.freeze()
    told = check_shared_images(replace(config, timeout_s=0.3))
    redis_server.thaw()
    assert told.status == "warn" and "whether the store runs" in told.remedy, told
    redis_server.kill()
    told = check_shared_images(config)
    assert (told.status, PASSWORD in told.message) == ("warn", False), told
    assert "can't write: ConnectionError" in told.message


def test_redis_with_keys_keeps_nothing(redis_server: RedisServer, monkeypatch, tmp_path) -> None:
    pytest.importorskip("cryptography")
    import redis

    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    (keys := tmp_path / "keys").write_text(f"a {base64.b64encode(os.urandom(32)).decode()}\n")
    keys.chmod(0o600)
    config = SharedImagesConfig(url=redis_server.url, key_file=str(keys), timeout_s=60)
    told = check_shared_images(config)
    assert told.status == "ok" and ", encrypted" in told.message, told
    with redis.Redis(port=redis_server.port, password=PASSWORD) as store:
        assert not [key for key in store.keys() if b"img_" in key]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    pytest.importorskip("obstore")
    yield from start_s3()


def test_a_bucket(s3: str, monkeypatch) -> None:
    # The time limit is not what is tested, and beside other tests the stand-in is slow.
    here = SharedImagesConfig(url=f"s3://{BUCKET}/images", timeout_s=60)
    told = check_shared_images(here)
    assert told.status == "ok", told
    told = check_shared_images(replace(here, url="s3://no-such-bucket-here/images"))
    assert told.status == "warn" and "create the bucket" in told.remedy, told
    assert told.message.endswith("can't write: GenericError: the store answered 404 NoSuchBucket")
    with monkeypatch.context() as patched:
        patched.delenv("AWS_ALLOW_HTTP")
        told = check_shared_images(here)
        assert told.status == "warn" and "set AWS_ALLOW_HTTP=true" in told.remedy, told
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    told = check_shared_images(replace(here, timeout_s=0.5))
    assert told.status == "warn" and "whether the store runs" in told.remedy, told


IDS = "<RequestId>auth-403-denied</RequestId>"


@pytest.mark.parametrize(
    ("status", "body", "answer", "remedy"),
    [
        (403, f"<Error><Code>AccessDenied</Code>{IDS}</Error>", "403 AccessDenied", "AWS_ACCESS"),
        (401, "", "401", "AWS_ACCESS"),
        (404, "", "404", "create the bucket"),
        (404, f"<Error><Code>NoSuchBucket</Code>{IDS}</Error>", "404 NoSuchBucket", "create the"),
        (500, f"<Error><Code>InternalError</Code>{IDS}</Error>", "500 InternalError", "store runs"),
    ],
)
def test_the_answer_of_a_store(status, body, answer, remedy, s3: str, monkeypatch) -> None:
    """The status decides the remedy. Words in the ids of an answer have no effect."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        told = check_shared_images(SharedImagesConfig(url="s3://images/here", timeout_s=60))
        server.shutdown()
    assert told.status == "warn" and remedy in told.remedy, told
    assert told.message.endswith(f"the store answered {answer}"), told
