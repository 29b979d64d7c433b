"""Traced outlines: finer than the mask's pixels, cleaned, and drawn back to the same mask."""

import numpy as np
import pytest

from kestrel_client.drawing.svg_path import polygons
from kestrel_engine.outlines.coarse_mask import draw
from kestrel_engine.outlines.region import Region
from kestrel_engine.outlines.trace import trace

WHOLE = Region(0.0, 0.0, 1.0, 1.0)
SIDE = 100


def disc(x: float, y: float, radius: float, side: int = SIDE) -> np.ndarray:
    """A soft mask whose probability is one half on the circle."""
    at = np.arange(side) + 0.5
    distance = np.hypot(at[None, :] - x, at[:, None] - y)
    return 1 / (1 + np.exp(np.clip(2 * (distance - radius), -50, 50)))


def area(path: str) -> float:
    total = 0.0
    for polygon in polygons(path):
        x, y = np.array([*polygon, polygon[0]]).T
        total += float(x[:-1] @ y[1:] - x[1:] @ y[:-1]) / 2
    return abs(total)


def test_a_disc_has_its_box_and_area_within_a_fraction_of_a_pixel():
    outline = trace(disc(40.3, 55.7, 20.25), WHOLE)
    assert outline is not None
    wanted = np.array([40.3 - 20.25, 55.7 - 20.25, 40.3 + 20.25, 55.7 + 20.25]) / SIDE
    assert np.abs(np.array(outline.box) - wanted).max() < 0.15 / SIDE
    assert area(outline.path) * 40.5**2 == pytest.approx(np.pi * 20.25**2, rel=0.02)
    assert len(outline.path.split()) < 80


def test_a_region_scales_the_box_and_not_the_path():
    mask = disc(50, 50, 30)
    whole, part = trace(mask, WHOLE), trace(mask, Region(0.5, 0.2, 0.75, 0.4))
    assert whole is not None and part is not None and whole.path == part.path
    x_min, y_min, x_max, y_max = whole.box
    assert part.box == pytest.approx(
        (0.5 + 0.25 * x_min, 0.2 + 0.2 * y_min, 0.5 + 0.25 * x_max, 0.2 + 0.2 * y_max)
    )


def test_the_drawn_outline_is_the_mask():
    mask = np.maximum(disc(40, 40, 22), disc(60, 60, 18))
    outline = trace(mask, WHOLE)
    assert outline is not None
    drawn, inside = draw(outline.path, outline.box, WHOLE, SIDE) > 0, mask > 0.5
    assert (drawn & inside).sum() / (drawn | inside).sum() > 0.985


def test_holes_are_filled_with_what_lies_in_them():
    ring = np.minimum(disc(50, 50, 40), 1 - disc(50, 50, 30))
    with_core = np.maximum(ring, disc(50, 50, 15))
    outline = trace(with_core, WHOLE)
    assert outline is not None and outline.path.count("M") == 1
    assert area(outline.path) * 80**2 == pytest.approx(np.pi * 40**2, rel=0.02)


def test_small_islands_are_removed_unless_all_are_small():
    large, small = disc(40, 50, 20), disc(80, 20, 1.5)
    outline = trace(np.maximum(large, small), WHOLE)
    assert outline is not None and outline.path.count("M") == 1
    assert outline.box[2] < 0.62
    # In a small region of an image all islands are below the limit.
    alone = trace(
        np.maximum(disc(80, 20, 5.0), small * 0 + disc(20, 80, 3.0)), Region(0, 0, 0.1, 0.1)
    )
    assert alone is not None and alone.path.count("M") == 1
    assert alone.box[0] > 0.07


def test_two_large_islands_stay():
    outline = trace(np.maximum(disc(25, 50, 15), disc(75, 50, 15)), WHOLE)
    assert outline is not None and outline.path.count("M") == 2


def test_a_mask_may_meet_the_edges():
    outline = trace(np.ones((SIDE, SIDE)), WHOLE)
    assert outline is not None
    assert outline.box == pytest.approx((0, 0, 1, 1), abs=0.006)
    assert area(outline.path) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("mask", [np.zeros((30, 30)), np.full((30, 30), 0.4)])
def test_nothing_inside_has_no_outline(mask):
    assert trace(mask.astype(np.float32), WHOLE) is None


def test_gaps_of_one_pixel_are_closed():
    mask = np.zeros((SIDE, SIDE))
    mask[30:70, 30:70] = 1
    mask[:, 50] = 0
    outline = trace(mask, WHOLE)
    assert outline is not None and outline.path.count("M") == 1


def test_masks_of_many_islands_have_bounded_outlines():
    squares = np.kron(np.eye(2).repeat(10, 0).repeat(10, 1) % 2, np.ones((5, 5)))
    squares[2::5] = squares[:, 2::5] = 0
    noise = np.random.default_rng(2).random((SIDE, SIDE)) ** 8
    for mask in (squares, noise):
        outline = trace(mask, WHOLE)
        assert outline is None or outline.path.count("M") <= 64
        assert outline is None or len(outline.path) < 100_000
