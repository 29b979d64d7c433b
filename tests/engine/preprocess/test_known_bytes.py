"""Encoded images are recognised by all of their bytes, within their namespace and a limit."""

import contextlib
import os

import pyvips

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.preprocess.known_bytes import RECORD_BYTES, KnownBytes
from kestrel_engine.preprocess.pool import HASHED_AT_ONCE_BYTES, PreprocessPool
from kestrel_engine.preprocess.prepared_cache import source_digest
from kestrel_engine.types.model_config import VisionConfig


def test_only_all_of_the_same_bytes_are_known():
    known, image = KnownBytes(10_000), os.urandom(1000)
    known.keep(image, "", b"digest")
    assert known.find(bytes(bytearray(image)), "") == b"digest"
    for place in range(len(image)):
        changed = bytearray(image)
        changed[place] ^= 1
        assert known.find(bytes(changed), "") is None, place
    assert known.find(image[:-1], "") is None
    assert known.find(image + b"\0", "") is None
    assert known.find(b"", "") is None


def test_namespaces_share_nothing():
    known = KnownBytes(10_000)
    known.keep(b"image", "a", b"digest")
    assert known.find(b"image", "a") == b"digest"
    assert known.find(b"image", "") is known.find(b"image", "b") is None


def test_images_with_one_mark_replace_one_another():
    """The mark is the length, the middle and the end."""
    known = KnownBytes(10_000)
    first, second = (bytes([i]) * 100 + bytes(900) for i in (1, 2))
    for _ in range(3):
        for image, digest in ((first, b"1"), (second, b"2")):
            known.keep(image, "", digest)
            assert known.find(image, "") == digest
            assert known.num_bytes == 1000 + RECORD_BYTES
    assert known.find(first, "") is None


def test_images_of_a_few_bytes_count_with_their_records():
    known = KnownBytes(100_000)
    for number in range(1000):
        known.keep(number.to_bytes(2, "big"), "", b"digest")
        assert known.num_bytes <= 100_000
    found = [known.find(n.to_bytes(2, "big"), "") is not None for n in range(1000)]
    assert sum(found) == 100_000 // (RECORD_BYTES + 2)


def test_nothing_is_kept_without_a_limit():
    known = KnownBytes(0)
    known.keep(b"image", "", b"digest")
    assert known.find(b"image", "") is None
    known.keep(b"", "", b"digest of nothing")
    assert known.num_bytes == 0


async def test_a_repeat_is_not_hashed_again(monkeypatch):
    pool, hashed = PreprocessPool(1, ImageLimits(), VisionConfig(), cache_bytes=2**26), []
    digest_of = source_digest

    def noted(source):
        hashed.append(len(source))
        return digest_of(source)

    monkeypatch.setattr("kestrel_engine.preprocess.pool.source_digest", noted)
    small = pyvips.Image.black(60, 40, bands=3).cast("uchar").jpegsave_buffer()
    large = small + bytes(HASHED_AT_ONCE_BYTES)
    with contextlib.closing(pool):
        for _ in range(3):
            assert (await pool.prepare(small)).image.source_digest == digest_of(small)
            assert (await pool.prepare(large)).image.source_digest == digest_of(large)
        assert hashed == [len(small), len(large)]
        await pool.prepare(small, "tenant")
        pool.flush()
        await pool.prepare(small)
        assert hashed == [len(small), len(large), len(small), len(small)]
