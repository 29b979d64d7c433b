"""Image budgets: the tiles that they leave, the crops beside those of an image that was resized and cut here, keys."""

import asyncio
import math

import numpy as np
import pytest
import pyvips
from hypothesis import given, settings
from hypothesis import strategies as st

from kestrel_engine.config.image_limits import ImageLimits
from kestrel_engine.errors import InvalidRequest
from kestrel_engine.preprocess.crops import select_tiling
from kestrel_engine.preprocess.decoding.open_image import OnBackground
from kestrel_engine.preprocess.looks import InCrops, InRegion, Tiled, Tiles
from kestrel_engine.preprocess.pool import PreprocessPool
from kestrel_engine.types.model_config import VisionConfig
from tests.engine.preprocess.encoded import encoded

VISION = VisionConfig()
PIXELS = np.random.default_rng(3).integers(0, 256, (620, 1100, 3), dtype=np.uint8)
ENCODED = encoded(PIXELS, compress_level=1)


def prepared(*sources, **options):
    """The looks of each source."""

    async def run():
        pool = PreprocessPool(1, ImageLimits(max_aspect_ratio=1000), VISION, **options)
        try:
            return [(await pool.prepare(source)).looks for source in sources]
        finally:
            pool.close()

    return asyncio.run(run())


def plain_tiling(width: int, height: int, most: int) -> tuple[int, int]:
    """Rows and columns as the reference's select_tiling gives them with max_crops=most (moondream.md section 4)."""
    if height - 112 <= 266 or width - 112 <= 266:
        return 1, 1
    least = math.ceil((height - 112) / 266), math.ceil((width - 112) / 266)
    if least[0] * least[1] > most:
        ratio = math.sqrt(most / (least[0] * least[1]))
        return max(1, math.floor(least[0] * ratio)), max(1, math.floor(least[1] * ratio))
    rows = max(math.floor(math.sqrt(most * (height - 112) / (width - 112))), least[0])
    columns = max(math.floor(math.sqrt(most * (width - 112) / (height - 112))), least[1])
    if rows * columns > most:
        rows, columns = (rows, most // rows) if columns > rows else (most // columns, columns)
    return max(1, rows), max(1, columns)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 12))
def test_the_tiles_are_those_of_the_reference_with_the_budget_as_its_limit(width, height, most):
    found = select_tiling(width, height, VISION.within(most))
    plain = plain_tiling(width, height, most)
    assert math.prod(found) <= most
    # The reference exceeds its limit in a single row or column, and a budget cuts it.
    assert found == plain or found == (min(plain[0], most), min(plain[1], most))
    assert found == plain or (math.prod(plain) > most and min(plain) == 1)


def test_few_crops_of_usual_shapes():
    tilings = {most: select_tiling(1600, 1200, VISION.within(most)) for most in range(13)}
    assert [math.prod(tilings[most]) for most in (1, 2, 4, 6, 9)] == [1, 1, 2, 4, 6]
    square = [select_tiling(1500, 1500, VISION.within(most)) for most in (1, 2, 3, 4, 12, 0)]
    assert square == [(1, 1), (1, 1), (1, 1), (2, 2), (3, 3), (3, 3)]
    assert tilings[0] == tilings[12] == select_tiling(1600, 1200, VISION)
    assert select_tiling(20_000, 400, VISION) == (1, 21)
    assert select_tiling(20_000, 400, VISION.within(12)) == (1, 12)
    assert select_tiling(20_000, 400, VISION.within(1)) == (1, 1)


def resized(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    image = pyvips.Image.new_from_array(pixels)
    image = image.resize(width / image.width, vscale=height / image.height)
    return np.frombuffer(image.write_to_memory(), np.uint8).reshape(height, width, 3)


@pytest.mark.slow_with(4, 12)
@pytest.mark.parametrize("most", [1, 4, 7, 12])
def test_the_crops_are_cut_from_the_image_at_the_size_of_its_tiles(most):
    part, box = np.ascontiguousarray(PIXELS[:, 550:]), (0.5, 0, 1, 1)
    sources = [ENCODED, PIXELS, OnBackground(ENCODED, (1, 2, 3))]
    looks = prepared(*(InCrops(source, most) for source in sources))
    looks += prepared(InRegion(InCrops(ENCODED, most), box), InCrops(InRegion(PIXELS, box), most))
    for (look,), pixels in zip(looks, [PIXELS] * 3 + [part] * 2, strict=True):
        rows, columns = plain_tiling(look.width, look.height, most)
        assert look.tiling == (rows, columns)
        assert look.num_distinct == (1 if rows * columns == 1 else 1 + rows * columns)
        grid = resized(pixels, 266 * columns + 112, 266 * rows + 112)
        tiles = [
            grid[top : top + 378, left : left + 378]
            for top in range(0, 266 * rows, 266)
            for left in range(0, 266 * columns, 266)
        ]
        assert np.array_equal(look.crops, [resized(pixels, 378, 378), *tiles])


def test_each_look_at_a_tiled_image_has_the_budget():
    tiles = Tiles(rows=1, columns=2)
    (bounded,), (free,) = prepared(InCrops(PIXELS, 1)), prepared(PIXELS)
    (looks,) = prepared(Tiled(InCrops(PIXELS, 1), tiles))
    assert [look.tiling for look in looks] == [(1, 1)] * 3
    assert bounded[0].num_distinct == 1 < free[0].num_distinct


@pytest.mark.parametrize("device_pixels", [0, 10**6])
@pytest.mark.parametrize("source", [PIXELS, ENCODED], ids=["pixels", "encoded"])
def test_budgets_of_one_image_share_what_has_the_same_crops(device_pixels, source):
    sources = [InCrops(source, most) for most in (1, 2, 3, 8, 12)]
    options = {"cache_bytes": 2**27, "device_pixels": device_pixels, "with_crop_keys": True}
    looks = [look for (look,) in prepared(*sources, source, *sources, **options)]
    first, plain, again = looks[:5], looks[5], looks[6:]
    assert [look.tiling for look in first] == [(1, 1), (1, 2), (1, 2), (2, 4), (2, 4)]
    assert [look.key for look in first] == [look.key for look in again]
    if source is not PIXELS or not device_pixels:
        # Pixels whose crops the device makes have another key than those that a decoder prepares.
        assert first[-1].key == plain.key
    keys = {look.tiling: look.key for look in first}
    assert len(set(keys.values())) == len(keys) == 3
    assert all(look.key == keys[look.tiling] for look in first)
    assert len({look.source_digest for look in looks}) == 1
    for look in looks:
        assert len(look.crop_keys) == look.num_distinct
        assert (look.pixels is None) == (device_pixels == 0)


@pytest.mark.parametrize("value", [0, 13, 2**40, True, 1.5, "2", None])
def test_a_budget_beyond_the_limits_is_refused(value):
    with pytest.raises(InvalidRequest) as caught:
        prepared(InCrops(PIXELS, value))
    assert caught.value.path == ("image", "max_crops")
    assert caught.value.message == f"is {value!r}; must be from 1 to 12, the model's own limit"
    assert caught.value.limit == 12


def test_the_budget_of_a_server_is_that_of_images_without_one(monkeypatch):
    (own,), (smaller,) = prepared(InCrops(PIXELS, 4), InCrops(PIXELS, 2))
    monkeypatch.setattr("tests.engine.preprocess.test_image_budget.VISION", VISION.within(4))
    (found,), (set_,) = prepared(PIXELS, InCrops(PIXELS, 2))
    assert (found.tiling, found.key) == (own.tiling, own.key)
    assert (set_.tiling, set_.key) == (smaller.tiling, smaller.key)


def test_a_budget_is_set_once():
    with pytest.raises(InvalidRequest, match=r"image\.max_crops: is set twice"):
        prepared(InCrops(InCrops(PIXELS, 1), 1))
    with pytest.raises(InvalidRequest, match=r"image\.region: is set twice"):
        prepared(InCrops(Tiled(PIXELS, Tiles(rows=1, columns=2)), 1))
