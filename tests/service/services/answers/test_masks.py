"""Outlines drawn as masks, against an independent rasteriser. tests/client/drawing has what paths mean."""

import io
import math
import random

import numpy as np
import pytest
from PIL import Image, ImageDraw

from kestrel_grpc.services.answers.masks import (
    MAX_MASK_PIXELS,
    draw_mask,
    mask_png,
    run_lengths,
    svg_document,
)

WHOLE = (0.0, 0.0, 1.0, 1.0)
CIRCLE = "M0 .5a.5.5 0 111 0a.5.5 0 11-1 0z"


@pytest.mark.parametrize("seed", range(2))
def test_random_polygons_agree_with_an_independent_rasteriser(seed):
    """At 16 samples a pixel's side, in Pillow; only pixels that the outline touches may differ."""
    rng = random.Random(seed)
    angles = sorted(rng.uniform(0, 2 * math.pi) for _ in range(12))
    corners = [
        (0.5 + rng.uniform(0.1, 0.5) * math.cos(a), 0.5 + rng.uniform(0.1, 0.5) * math.sin(a))
        for a in angles
    ]
    path = "M " + " L ".join(f"{x:.4f} {y:.4f}" for x, y in corners) + " Z"
    fine = Image.new("L", (16 * 120, 16 * 90))
    ImageDraw.Draw(fine).polygon([(x * 16 * 120, y * 16 * 90) for x, y in corners], fill=255)
    coverage = np.asarray(fine.resize((120, 90), Image.Resampling.BOX), float) / 255
    drawn = draw_mask(path, WHOLE, 120, 90)
    assert drawn[coverage > 0.99].all()
    assert not drawn[coverage < 0.01].any()
    assert drawn.sum() == pytest.approx(coverage.sum(), rel=0.01)


def test_large_masks_are_drawn_in_bands_like_small_ones():
    path = CIRCLE
    large = draw_mask(path, WHOLE, 4000, 4000)
    assert large.sum() == pytest.approx(math.pi * 2000**2, rel=0.001)
    assert (large == large.T).mean() > 0.999


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (4001, 4000)])
def test_a_mask_has_a_largest_size(width, height):
    with pytest.raises(ValueError, match=str(MAX_MASK_PIXELS)):
        draw_mask("M 0 0 L 1 0 L 1 1 Z", WHOLE, width, height)


def test_a_png_holds_the_mask():
    drawn = draw_mask(CIRCLE, WHOLE, 61, 47)
    with Image.open(io.BytesIO(mask_png(drawn))) as image:
        assert (image.mode, image.size, image.format) == ("L", (61, 47), "PNG")
        assert (np.asarray(image) == np.where(drawn, 255, 0)).all()


@pytest.mark.parametrize("fill", ["shape", "nothing", "everything"])
def test_run_lengths_are_column_by_column_and_begin_outside(fill):
    drawn = draw_mask(CIRCLE, WHOLE, 31, 17)
    if fill != "shape":
        drawn = np.full((17, 31), fill == "everything")
    counts = run_lengths(drawn)
    assert sum(counts) == drawn.size
    assert all(count > 0 for count in counts[1:])
    inside = np.arange(len(counts)) % 2 == 1
    assert (np.repeat(inside, counts).reshape(31, 17).T == drawn).all()


def test_an_svg_document_draws_the_same():
    """Read back by its own numbers: the transform takes the path's units to pixels."""
    document = svg_document("M 0 0 L 1 0 L 1 1 Z", (0.25, 0.5, 0.75, 1.0), 100, 80)
    assert 'viewBox="0 0 100 80"' in document
    assert 'transform="translate(25 40) scale(50 40)"' in document
    assert 'd="M 0 0 L 1 0 L 1 1 Z"' in document
    assert "&lt;" in svg_document("<", WHOLE, 1, 1)
