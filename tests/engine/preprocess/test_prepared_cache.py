import os

import numpy as np

from kestrel_engine.preprocess.looks import InRegion, Selection, Tiled, Tiles
from kestrel_engine.preprocess.prepared_cache import (
    RECORD_BYTES,
    PreparedCache,
    in_namespace,
    source_digest,
    source_key,
)
from kestrel_engine.types.requests import PreparedImage


def picture(key="p", size=10):
    return PreparedImage(key, np.zeros((1, size, 1, 1), np.uint8), (1, 1), 1, 1)


def test_equal_bytes_have_one_digest():
    region = InRegion(b"abc", (0, 0, 1, 0.5))
    tiled = Tiled(region, Tiles(rows=1, columns=2))
    views = (memoryview(b"abc"), memoryview(b"a-b-c")[::2])
    sources = (b"abc", bytearray(b"abc"), *views, region, tiled)
    assert len({source_digest(source) for source in sources}) == 1
    assert source_digest(b"abd") != source_digest(b"abc")


def test_namespaces_and_looks_share_nothing():
    keys = {source_key(bytes(32), namespace) for namespace in ("", "a", "b" * 200, "a", "")}
    assert len(keys) == 3
    parts = [Selection((0, 0, 0.5, 1), None), Selection(None, Tiles(rows=1, columns=2))]
    keys |= {source_key(bytes(32), selection=part) for part in parts}
    assert len(keys) == 5
    images = [in_namespace(picture(), namespace) for namespace in ("", "a", "b" * 200)]
    assert images[0].key == "p"
    assert len({image.key for image in images}) == 3


def test_what_differs_has_another_digest(tmp_path):
    array = np.arange(12, dtype=np.uint8)
    path = tmp_path / "a"
    path.write_bytes(b"x")
    keys = [
        source_digest(b"x"),
        source_digest(array.reshape(3, 4)),
        source_digest(array.reshape(4, 3)),
        source_digest(path),
    ]
    path.write_bytes(b"xy")
    keys.append(source_digest(str(path)))
    assert len(set(keys)) == len(keys)
    assert None not in keys
    assert source_digest(array.reshape(3, 4)) == source_digest(
        np.asfortranarray(array.reshape(3, 4))
    )
    assert source_digest(os.fspath(tmp_path / "none")) is None
    assert source_digest(object()) is None


def test_memory_is_bounded_and_the_least_recently_used_goes():
    image, huge = 10 + RECORD_BYTES, 13 + RECORD_BYTES
    cache, made = PreparedCache(2 * huge - 1), []
    for name in (b"a", b"b", b"a", b"c", b"a", b"b"):
        if cache.find(name) is None:
            made.append(name)
            cache.keep_looks(name, (picture(),))
    assert made == [b"a", b"b", b"c", b"b"]
    assert cache.num_bytes == 2 * image
    cache.keep_looks(b"huge", (picture(size=13), picture(size=13)))
    cache.keep_looks(b"b", (picture(),))
    assert cache.num_bytes == 2 * image
    cache.flush()
    assert (cache.num_bytes, cache.find(b"b")) == (0, None)
