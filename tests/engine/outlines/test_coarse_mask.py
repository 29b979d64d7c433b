"""Coarse masks against the SDK's drawing, which is another implementation of SVG paths."""

import random

import numpy as np
import pytest

from kestrel_client.drawing.rasterise import fill
from kestrel_client.drawing.svg_path import polygons
from kestrel_engine.outlines.coarse_mask import draw, flatten
from kestrel_engine.outlines.region import Region

BOX = (0.25, 0.25, 0.75, 0.75)
REGION = Region(0.125, 0.125, 0.875, 0.875)


def drawn_by_the_sdk(path: str, side: int) -> np.ndarray:
    """The mask at four times the size, averaged."""
    scale = 4 * side
    corner, extent = (0.25 - 0.125) / 0.75 * scale, 0.5 / 0.75 * scale
    outline = [
        [(corner + u * extent, corner + v * extent) for u, v in polygon]
        for polygon in polygons(path, extent)
    ]
    covered = fill(outline, scale, scale).reshape(side, 4, side, 4).mean((1, 3))
    return covered


def test_a_rectangle_covers_exactly_its_box():
    mask = draw("M 0 0 L 1 0 L 1 1 L 0 1 z", BOX, REGION, 60)
    assert mask.dtype == np.uint8 and mask.sum() == 40 * 40
    assert mask[10:50, 10:50].all()


@pytest.mark.parametrize(
    "path",
    [
        "M 0.5 0 C 0.776 0 1 0.224 1 0.5 C 1 0.776 0.776 1 0.5 1 C 0.224 1 0 0.776 0 0.5 C 0 0.224 0.224 0 0.5 0 z",
        "M 0 0.5 Q 0.5 -0.5 1 0.5 T 0 0.5 z",
        "M 0.1 0.1 S 0.9 0 0.9 0.9 S 0.2 1 0.1 0.1 z",
        "m 0.2 0.2 l 0.6 0 l 0 0.6 l -0.6 0 z m 0.2 0.2 l 0 0.2 l 0.2 0 l 0 -0.2 z",
        "M 0 0 H 1 0.5 V 1 0.5 z",
        "M 0 0 1 0 1 1 z L 0 1",
        "M 0.2 0.2 L 0.8 0.2 L 0.8 0.8 Z L 0.1 0.9 L 0.5 0.9 Z",
    ],
)
def test_every_command_is_drawn_as_the_sdk_draws_it(path):
    mask = draw(path, BOX, REGION, 90)
    covered = drawn_by_the_sdk(path, 90)
    assert mask.any()
    unsure = (covered > 0.2) & (covered < 0.8)
    assert (mask[~unsure] == (covered[~unsure] > 0.5)).all()


def test_random_paths_are_drawn_as_the_sdk_draws_them():
    rng = random.Random(3)
    arguments = {"L": 2, "C": 6, "Q": 4, "S": 4, "T": 2, "l": 2, "c": 6}
    for _ in range(30):
        words = ["M 0.5 0.5"]
        for _ in range(rng.randint(2, 7)):
            command = rng.choice(list(arguments))
            low = -0.4 if command.islower() else 0.0
            numbers = [f"{rng.uniform(low, low + 1):.3f}" for _ in range(arguments[command])]
            words.append(" ".join([command, *numbers]))
        path = " ".join([*words, "z"])
        mask, covered = draw(path, BOX, REGION, 60), drawn_by_the_sdk(path, 60)
        sure = (covered < 0.05) | (covered > 0.95)
        assert (mask[sure] != (covered[sure] > 0.5)).mean() < 0.01, path


@pytest.mark.parametrize(
    ("path", "corners"),
    [
        ("", 0),
        ("L 0 0 L 1 1 L 1 0", 0),
        ("M 0 0 L 1 0 L 1 1 A 1 1 0 0 1 0 1 L 0 1", 3),
        ("M 0 0 L 1 0 L 1 1 L 0", 3),
        ("M 0 0 L 1 0", 0),
        ("M 0 0 L 1 0 L 1 1 z 0.5", 3),
    ],
)
def test_a_path_with_an_error_counts_up_to_the_error(path, corners):
    assert sum(map(len, flatten(path))) == corners


def test_a_path_far_outside_draws_nothing():
    assert not draw("M 900 900 L 901 900 L 900 901 z", BOX, REGION, 40).any()
    assert not draw("M -9 -9 L 0 0", BOX, REGION, 40).any()
