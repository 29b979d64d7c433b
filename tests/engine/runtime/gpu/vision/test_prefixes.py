"""Prefixes of images that the device has no room for go to the host, and come back unchanged."""

from __future__ import annotations

import random

import pytest
import torch

from kestrel_engine.errors import InsufficientMemoryError
from kestrel_engine.runtime.gpu.vision import prefixes as module
from kestrel_engine.runtime.gpu.vision.prefixes import ImagePrefixes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPE = (5, 8)


def store(on_device: int, on_host: int) -> ImagePrefixes:
    return ImagePrefixes(SHAPE, torch.float32, DEVICE, on_device=on_device, on_host=on_host)


def prefix(number: int) -> torch.Tensor:
    return torch.full(SHAPE, float(number), device=DEVICE)


def there(kept: ImagePrefixes) -> list[str]:
    return list(kept._there)


def test_the_least_recently_used_go_to_the_host_and_come_back() -> None:
    kept = store(2, 3)
    for number in range(4):
        kept.add(str(number), prefix(number))
    assert there(kept) == ["2", "3"] and len(kept) == 4 and "0" in kept
    assert torch.equal(kept.on_device("0"), prefix(0))
    assert there(kept) == ["3", "0"] and kept.on_device("0").device.type == DEVICE.type
    assert torch.equal(kept.on_device("3"), prefix(3)) and there(kept) == ["0", "3"]
    for number in (1, 2):
        assert torch.equal(kept.on_device(str(number)), prefix(number))


def test_without_a_place_on_the_host_they_stay_on_the_device() -> None:
    kept = store(1, 1)
    for number in range(4):
        kept.add(str(number), prefix(number))
    assert there(kept) == ["1", "2", "3"] and torch.equal(kept.on_device("0"), prefix(0))
    kept.drop("1")
    none = store(1, 0)
    for number in range(3):
        none.add(str(number), prefix(number))
    assert len(there(none)) == 3


def test_one_place_changes_hands() -> None:
    """The place that an image leaves is the place of the one that goes."""
    kept = store(1, 1)
    kept.add("a", prefix(1))
    kept.add("b", prefix(2))
    for _ in range(5):
        assert torch.equal(kept.on_device("a"), prefix(1)) and there(kept) == ["a"]
        assert torch.equal(kept.on_device("b"), prefix(2)) and there(kept) == ["b"]


def test_what_is_dropped_leaves_its_place() -> None:
    kept = store(1, 2)
    for number in range(3):
        kept.add(str(number), prefix(number))
    for key in ("0", "2", "never"):
        kept.drop(key)
    assert "0" not in kept and len(kept) == 1
    with pytest.raises(KeyError):
        kept.on_device("0")
    for number in range(5, 8):
        kept.add(str(number), prefix(number))
    kept.add("6", prefix(60))
    assert torch.equal(kept.on_device("6"), prefix(60))
    kept.clear()
    assert len(kept) == 0 and sorted(kept._free) == [0, 1]


def test_whatever_happens_an_image_has_its_own_prefix() -> None:
    rng = random.Random(7)
    kept, wanted = store(3, 4), dict[str, float]()
    for step in range(2000):
        key = str(rng.randrange(12))
        if rng.random() < 0.4:
            wanted[key] = float(step)
            kept.add(key, prefix(step))
            assert len(kept._there) <= 3 or not kept._free
        elif rng.random() < 0.3:
            wanted.pop(key, None)
            kept.drop(key)
        elif key in wanted:
            assert torch.equal(kept.on_device(key), prefix(int(wanted[key])))
        assert len(kept) == len(wanted) and all(key in kept for key in wanted)
        assert len(kept._away) + len(kept._free) == 4


def test_memory_that_cannot_be_pinned_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore lines")

    monkeypatch.setattr(module.torch, "empty", refuse)
    with pytest.raises(InsufficientMemoryError, match="embedding_host_bytes") as error:
        store(1, 1)
    assert "more lines" not in str(error.value)
