"""The rules that keep questions fair hold in every drawn scene."""

import itertools
import random

import pytest

from kestrel_engine.preprocess.crops import select_tiling
from training.scenes.scenes import (
    CENTRE_GAP,
    MAX_FRACTION,
    MAX_OBJECTS,
    MAX_OVERLAP,
    MIN_GLOBAL_PX,
    MIN_VIEW_PX,
    TINY,
    Scene,
    draw_scene,
    draw_size,
    overlap_share,
)
from training.scenes.vocabulary import COLOURS, HELD_OUT, MEASURED_COLOURS, SHAPES


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    rng = random.Random("tests/scenes")
    return [draw_scene(rng, *draw_size(rng), palette=len(COLOURS)) for _ in range(400)]


def test_images_are_120_to_1600_pixels_and_up_to_three_to_one() -> None:
    rng = random.Random(1)
    for _ in range(500):
        width, height = draw_size(rng)
        assert 120 <= min(width, height) and max(width, height) <= 1600
        assert max(width, height) <= 3.02 * min(width, height)


def test_objects_are_large_enough_in_the_view_and_inside_the_image(scenes: list[Scene]) -> None:
    for scene in scenes:
        (tx, ty), (gx, gy) = scene.view.tiled_scale, scene.view.global_scale
        for shape in scene.shapes:
            x0, y0, x1, y1 = shape.box
            assert min((x1 - x0) * tx, (y1 - y0) * ty) >= MIN_VIEW_PX
            assert min((x1 - x0) * gx, (y1 - y0) * gy) >= MIN_GLOBAL_PX
            assert x1 - x0 <= (MAX_FRACTION + 1e-6) * scene.width
            assert 0 <= x0 and 0 <= y0 and x1 <= scene.width and y1 <= scene.height


def test_overlaps_stay_small_and_the_order_from_left_to_right_is_clear(scenes: list[Scene]) -> None:
    for scene in scenes:
        boxes = [s.box for s in scene.shapes]
        centres = [s.centre[0] for s in scene.shapes]
        for i in range(len(boxes)):
            assert all(overlap_share(boxes[i], boxes[j]) <= MAX_OVERLAP for j in range(i))
        gaps = [b - a for a, b in itertools.pairwise(centres)]
        assert all(gap >= 0.999 * CENTRE_GAP * scene.width for gap in gaps)


def test_counts_reach_from_empty_scenes_to_twelve(scenes: list[Scene]) -> None:
    counts = {len(s.shapes) for s in scenes}
    assert counts == set(range(MAX_OBJECTS + 1))


def test_held_out_pairs_never_occur_in_training_scenes(scenes: list[Scene]) -> None:
    found = {(s.colour, s.kind) for scene in scenes for s in scene.shapes}
    assert not found & HELD_OUT
    measured = {pair for pair in found if pair[0] < MEASURED_COLOURS}
    assert len(measured) == MEASURED_COLOURS * len(SHAPES) - len(HELD_OUT)


def test_evaluation_scenes_draw_from_the_measured_colours() -> None:
    rng = random.Random(3)
    assert all(
        s.colour < MEASURED_COLOURS for _ in range(100) for s in draw_scene(rng, 640, 480).shapes
    )


@pytest.mark.parametrize(
    ("size", "tiling"),
    [
        ((640, 480), (2, 2)),
        ((320, 240), (1, 1)),
        ((1600, 533), (1, 4)),
        ((500, 300), (2, 3)),
        ((300, 900), (3, 1)),
    ],
)
def test_tiling(size: tuple[int, int], tiling: tuple[int, int]) -> None:
    assert select_tiling(*size, TINY) == tiling
    assert tiling[0] * tiling[1] <= TINY.max_crops
