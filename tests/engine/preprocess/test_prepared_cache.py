import os
import threading
import time

import numpy as np
import pytest

from kestrel_engine.preprocess.prepared_cache import PreparedCache, in_namespace, source_key
from kestrel_engine.requests import PreparedImage


def picture(key="p", size=10):
    return PreparedImage(key, np.zeros((1, size, 1, 1), np.uint8), (1, 1), 1, 1)


def test_equal_bytes_are_made_once():
    cache, made = PreparedCache(100), []
    for source in (b"abc", bytearray(b"abc"), memoryview(b"abc"), memoryview(b"a-b-c")[::2]):
        image = cache.get(source, lambda: made.append(1) or picture())
        assert image.key == "p"
    assert len(made) == 1
    cache.get(b"abd", lambda: made.append(1) or picture())
    assert len(made) == 2


def test_namespaces_share_nothing():
    cache, made = PreparedCache(100), []
    images = {}
    for namespace in ("", "a", "b" * 200, "a", ""):
        images[namespace] = cache.get(
            b"abc", lambda n=namespace: made.append(n) or in_namespace(picture(), n), namespace
        )
    assert made == ["", "a", "b" * 200]
    assert images[""].key == "p"
    assert len({image.key for image in images.values()}) == 3
    assert images["a"].crops.shape == images[""].crops.shape


def test_what_differs_has_another_key(tmp_path):
    array = np.arange(12, dtype=np.uint8)
    path = tmp_path / "a"
    path.write_bytes(b"x")
    keys = [
        source_key(b"x"),
        source_key(array.reshape(3, 4)),
        source_key(array.reshape(4, 3)),
        source_key(path),
    ]
    path.write_bytes(b"xy")
    keys.append(source_key(str(path)))
    assert len(set(keys)) == len(keys)
    assert None not in keys
    assert source_key(array.reshape(3, 4)) == source_key(np.asfortranarray(array.reshape(3, 4)))
    assert source_key(os.fspath(tmp_path / "none")) is None
    assert source_key(object()) is None


def test_memory_is_bounded_and_the_least_recently_used_goes():
    cache, made = PreparedCache(25), []

    def get(name):
        cache.get(name, lambda: made.append(name) or picture())

    for name in (b"a", b"b", b"a", b"c", b"a", b"b"):
        get(name)
    assert made == [b"a", b"b", b"c", b"b"]
    assert cache.size_bytes == 20
    cache.get(b"huge", lambda: picture(size=26))
    assert cache.size_bytes == 20


def test_those_who_ask_together_wait_for_one_and_share_its_error():
    cache, calls = PreparedCache(0), []
    entered, go = threading.Event(), threading.Event()
    results = []

    def make():
        calls.append(1)
        entered.set()
        assert go.wait(10)
        raise ValueError("broken")

    def ask():
        try:
            cache.get(b"x", make)
        except ValueError as error:
            results.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(3)]
    threads[0].start()
    assert entered.wait(10)
    for thread in threads[1:]:
        thread.start()
    deadline = time.monotonic() + 0.2
    while time.monotonic() < deadline:  # Time for the others to begin waiting.
        time.sleep(0.01)
    go.set()
    for thread in threads:
        thread.join()
    assert results == ["broken"] * 3
    assert len(calls) == 1
    with pytest.raises(ValueError, match="again"):
        cache.get(b"x", lambda: (_ for _ in ()).throw(ValueError("again")))
