"""The integer formulas, added up by numpy, against libvips: every byte."""

import numpy as np
import pytest
import pyvips

from kestrel_engine.exact_resize import ONE_BITS, AxisPass, is_exact, passes
from kestrel_engine.preprocess.crops import cut_crops, select_tiling
from kestrel_engine.preprocess.decoding.decoded_image import DecodedImage
from kestrel_engine.types.model_config import VisionConfig

FULL = VisionConfig()
TINY = VisionConfig(crop_size=252, max_crops=6, overlap_margin=4)
SMALL = VisionConfig(crop_size=56, max_crops=12, overlap_margin=1)


def test_the_libvips_of_these_formulas():
    """8.19 is to compute other bytes: then crops made on a GPU would differ from those of a CPU."""
    assert (pyvips.version(0), pyvips.version(1)) == (8, 18)


def run(step: AxisPass, image: np.ndarray) -> np.ndarray:
    """One pass over [rows, columns, 3], int32 in and out."""
    if not step.vertical:
        image = image.swapaxes(0, 1)
    assert len(image) == step.size
    if step.whole > 1:
        within = np.minimum(np.arange(step.groups * step.whole), step.size - 1)
        sums = image[within].reshape(step.groups, step.whole, *image.shape[1:]).sum(1)
        means = (sums.astype(np.int64) + step.whole // 2) * (2**24 // step.whole) >> 24
        image = means.astype(np.int32)
    first, phase = step.positions >> 6, step.positions & 63
    total = np.full((step.target, *image.shape[1:]), 1 << ONE_BITS - 1, np.int32)
    for tap in range(step.taps):
        at = np.clip(first + tap, 0, len(image) - 1)
        total += image[at] * step.weights[phase, tap].astype(np.int32)[:, None, None]
    total >>= ONE_BITS
    if not step.wide_out:
        total = np.clip(total, 0, 255)
    assert -(2**15) <= total.min() and total.max() < 2**15
    return total if step.vertical else total.swapaxes(0, 1)


def resize(image: np.ndarray, width: int, height: int) -> np.ndarray:
    found = image.astype(np.int32)
    for step in passes(image.shape[1], image.shape[0], width, height):
        found = run(step, found)
    assert found.shape == (height, width, 3)
    return found


def tiles(plane: np.ndarray, tiling: tuple[int, int], vision: VisionConfig) -> np.ndarray:
    side, window = vision.crop_size, vision.crop_window
    places = [(r * window, c * window) for r in range(tiling[0]) for c in range(tiling[1])]
    return np.stack([plane[y : y + side, x : x + side] for y, x in places])


def check(width: int, height: int, vision: VisionConfig) -> None:
    pixels = np.random.default_rng(width * 9001 + height).integers(
        0, 256, (height, width, 3), np.uint8
    )
    wanted = cut_crops(DecodedImage(pixels), vision)
    side, window, (rows, columns) = vision.crop_size, vision.crop_window, wanted.tiling
    assert wanted.crops is not None
    assert np.array_equal(resize(pixels, side, side), wanted.crops[0]), (width, height)
    to_width, to_height = window * (columns - 1) + side, window * (rows - 1) + side
    if is_exact(width, height, to_width, to_height):
        plane = resize(pixels, to_width, to_height)
        assert np.array_equal(tiles(plane, wanted.tiling, vision), wanted.crops[1:]), (
            width,
            height,
        )


@pytest.mark.slow_with((1600, 2300), (3100, 400))
@pytest.mark.parametrize(
    "size",
    [
        (850, 600), (378, 378), (378, 500), (644, 910), (1, 1), (1, 20), (37, 700), (2000, 130),
        (1600, 2300), (3100, 400), (200, 4000),
    ],
)  # fmt: skip
def test_sizes_of_every_kind(size):
    check(*size, FULL)


def test_random_sizes():
    check_random_sizes(4, FULL, seed=1)
    check_random_sizes(4, TINY, seed=2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_random_sizes():
    """Most of them are of small images for small crops, which shrink and grow as much as large ones do."""
    check_random_sizes(100, FULL, seed=3)
    check_random_sizes(100, TINY, seed=4)
    check_random_sizes(800, SMALL, seed=5)


def check_random_sizes(count: int, vision: VisionConfig, *, seed: int) -> None:
    rng = np.random.default_rng(seed)
    largest = 450 if vision is SMALL else 3000
    while count:
        width, height = (int(side) for side in np.exp(rng.uniform(0, np.log(largest), 2)))
        if max(width, height) <= 20 * min(width, height):
            check(width, height, vision)
            count -= 1


def test_positions_halfway_between_two_phases():
    """Rows shrunk to 2240 have some: libvips' own rounding errors decide, and where columns grow at the same time not
    even the strips are known."""
    vision = VisionConfig(max_crops=40)
    assert select_tiling(3000, 2300, vision)[0] == 5
    assert is_exact(850, 600, 1176, 644)
    assert is_exact(2247, 2247, 2240, 2240)
    assert not is_exact(300, 2247, 378, 2240)


@pytest.mark.slow
def test_an_image_whose_rows_have_such_positions():
    check(3000, 2300, VisionConfig(max_crops=40))


def test_an_unchanged_image_is_copied():
    image = np.arange(378 * 378 * 3, dtype=np.uint32).astype(np.uint8).reshape(378, 378, 3)
    assert np.array_equal(resize(image, 378, 378), image)
    assert len(passes(378, 378, 378, 378)) == 1
