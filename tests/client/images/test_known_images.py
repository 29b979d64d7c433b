"""What the client remembers of stored images, its limits, and the header that selects a server."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kestrel_client import ImageHandle, InvalidRequestError, KestrelClient
from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_client.connection import IMAGE_HEADER
from kestrel_client.images import known
from kestrel_client.images.known import KnownImages, digest_of

FILE = b"a file"
DIGEST = hashlib.sha256(FILE).hexdigest()[:32]


def encoded(data: bytes) -> common_pb2.Image:
    return common_pb2.Image(encoded=data)


def test_every_call_names_its_image(client: KestrelClient, peer: Any) -> None:
    handle = client.put_image(FILE)
    pixels = np.zeros((4, 8, 3), np.uint8)
    client.query(FILE, "?")
    client.query(handle, "?")
    client.query(ImageHandle("img_unknown"), "?")
    client.query(pixels, "?")
    client.query(pixels.reshape(8, 4, 3), "?")
    client.query(None, "?")
    client.query(FILE, "?", session="me")
    client.query(FILE, "?", session="me", metadata={IMAGE_HEADER: "mine"})
    client.query(None, "?", history=[("?", "!", [FILE])])
    with client.stream_query(FILE, "?") as stream:
        stream.result()
    named = [each.get(IMAGE_HEADER) for each in peer.vision.metadata]
    assert named[:3] == [DIGEST, DIGEST, "img_unknown"]
    assert named[3] != named[4] and len(named[3]) == 32
    assert named[5:] == [None, "me", "mine", DIGEST, DIGEST]
    for name in ("", "a b", "a" * 129, 7):
        with pytest.raises(InvalidRequestError, match="session"):
            client.query(FILE, "?", session=name)  # type: ignore[arg-type]


def test_contents_are_kept_up_to_the_limit() -> None:
    images = KnownImages(10)
    for n in range(3):
        images.learn(f"img_{n}", encoded(b"%d" % n * 5))
    assert images.contents("img_0", None) is None
    assert images.contents("img_1", None) == encoded(b"11111")
    images.learn("img_3", encoded(b"33333"))
    assert images.contents("img_2", None) is None, "used least recently"
    assert images.contents("img_1", None) is not None
    images.learn("img_4", encoded(b"larger than the limit"))
    assert images.contents("img_4", None) is None and images.contents("img_3", None) is not None
    assert images.key(common_pb2.Image(image_id="img_0")) == digest_of(encoded(b"00000"))
    raw = common_pb2.Image(raw=common_pb2.RawImage(data=b"123456", width=2, height=1, format=2))
    images.learn("img_5", raw)
    assert images.contents("img_5", None) == raw and images.contents("img_1", None) is None


def test_ids_are_remembered_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_MAX_IDS", 2)
    images = KnownImages(0)
    for n in range(3):
        images.learn(f"img_{n}", encoded(b"%d" % n))
    assert images.key(common_pb2.Image(image_id="img_0")) == "img_0"
    assert images.key(common_pb2.Image(image_id="img_1")) == digest_of(encoded(b"1"))


def test_a_file_that_has_changed_is_not_put_in_place_of_another(tmp_path: Path) -> None:
    images = KnownImages(0)
    (path := tmp_path / "image").write_bytes(FILE)
    images.learn("img_1", encoded(FILE))
    assert images.contents("img_1", path) == encoded(FILE)
    path.write_bytes(b"another")
    assert images.contents("img_1", path) is None


def test_a_deleted_image_is_not_put_again() -> None:
    images = KnownImages(100, source=lambda image_id: FILE)
    images.learn("img_1", encoded(FILE))
    images.forget("img_1")
    assert images.contents("img_1", FILE) is None
    assert images.contents("img_2", None) == encoded(FILE)


def test_an_id_that_moved_and_came_back() -> None:
    images = KnownImages(100)
    images.learn("img_1", encoded(FILE))
    images.replace("img_1", "img_2")
    assert images.current_id("img_1") == "img_2"
    images.replace("img_1", "img_1")
    assert images.current_id("img_1") == "img_1"
