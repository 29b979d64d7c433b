"""Outlines drawn, against areas known from geometry, against an independent rasteriser, and at the edges."""

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
CIRCLE = math.pi * 100**2
PATHS = {
    "lines": ("M 0 0 L 1 0 L 1 1 L 0 1 Z", 200 * 200),
    "implied lines": ("M 0 0 1 0 1 1 0 1", 200 * 200),
    "relative lines": ("m 0.25 0.25 l 0.5 0 0 0.5 -0.5 0 z", 100 * 100),
    "horizontals": ("M 0 0 H 1 V 1 H 0 Z", 200 * 200),
    "relative horizontals": ("M .5 .5 h .5 v .5 h -.5 z", 100 * 100),
    "paired horizontals": ("M 0 0 H 0.5 1 V 0.5 1 H 0.5 0", 200 * 200),
    "arcs": ("M 0 0.5 A 0.5 0.5 0 1 1 1 0.5 A 0.5 0.5 0 1 1 0 0.5 Z", CIRCLE),
    "packed arcs": ("M0 .5a.5.5 0 111 0a.5.5 0 11-1 0z", CIRCLE),
    "an arc whose radii are too small": ("M 0 .5 A .1 .1 0 0 1 1 .5 A .1 .1 0 0 1 0 .5", CIRCLE),
    "a turned ellipse": ("M .5 .25 A .5 .25 90 0 1 .5 .75 A .5 .25 90 0 1 .5 .25", None),
    "cubics": ("M.5,0C.776,0 1,.224 1,.5S.776,1 .5,1 0,.776 0,.5 .224,0 .5,0z", CIRCLE),
    "relative cubics": ("M.5,0c.276,0 .5,.224 .5,.5s-.224,.5 -.5,.5 -.5,-.224 -.5,-.5 .224,-.5 .5,-.5z", CIRCLE),
    "a quadratic": ("M 0 1 Q 0.5 -1 1 1 Z", 2 / 3 * 200 * 200),
    "smooth quadratics": ("M 0 .5 Q .25 0 .5 .5 T 1 .5 Z", None),
    "exponents": ("M 0 0 L 1e0 0 L 1E0 1 L 0 10e-1 Z", 200 * 200),
}  # fmt: skip


@pytest.mark.parametrize("name", PATHS)
def test_areas_are_those_of_geometry(name):
    path, area = PATHS[name]
    if name == "a turned ellipse":
        # Half axes .5 and .25 through points .5 apart along the long one, which lies upright.
        area = abs(_ellipse_area(path))
    if name == "smooth quadratics":
        # A hill and, reflected, a valley: two parabola segments of a third of a rectangle each.
        area = 2 * (2 / 3 * 0.5 * 0.25) * 200 * 200
    drawn = draw_mask(path, WHOLE, 200, 200)
    assert drawn.shape == (200, 200)
    assert drawn.dtype == bool
    assert drawn.sum() == pytest.approx(area, rel=0.01, abs=20)


def _ellipse_area(path):
    """Two equal segments of the ellipse with half axes 100 and 50 pixels, cut by chords of 100 along the long axis."""
    # The chord is parallel to the long axis, at half its length: the angle from the centre is 2 asin(0.5).
    angle = 2 * math.asin(0.5)
    return 2 * (angle - math.sin(angle)) / 2 * 100 * 50


def test_a_path_lies_in_its_box():
    drawn = draw_mask("M 0 0 L 1 0 L 1 1 L 0 1 Z", (0.25, 0.5, 0.75, 1.0), 100, 80)
    expected = np.zeros((80, 100), bool)
    expected[40:80, 25:75] = True
    assert (drawn == expected).all()


def test_what_reaches_beyond_the_image_is_cut_off():
    drawn = draw_mask("M -2 -2 L 3 -2 L 3 3 L -2 3 Z", (0.2, 0.2, 0.8, 0.8), 30, 20)
    assert drawn.all()
    drawn = draw_mask("M -1 0 L 0.5 0 L 0.5 1 L -1 1 Z", WHOLE, 30, 20)
    assert drawn[:, :15].all()
    assert not drawn[:, 15:].any()


def test_the_nonzero_rule_fills_what_turns_the_same_way_and_spares_what_turns_back():
    outer = "M 0 0 h 1 v 1 h -1 z "
    same, back = "M .25 .25 h .5 v .5 h -.5 z", "M .25 .25 v .5 h .5 v -.5 z"
    assert draw_mask(outer + same, WHOLE, 100, 100).sum() == 10_000
    assert draw_mask(outer + back, WHOLE, 100, 100).sum() == 7_500
    # After z a relative move starts from where the outline began.
    assert draw_mask(outer + "m .25 .25 v .5 h .5 v -.5 z", WHOLE, 100, 100).sum() == 7_500


@pytest.mark.parametrize(
    "path",
    [
        "",
        "   ",
        "Z",
        "L 1 1",
        "0 0 M 1 1",
        "M",
        "M 0",
        "hello",
        "M 0 0",
        "M 0 0 L 1 1 Z",
        "M nan 0 L 1 1",
    ],
)
def test_what_encloses_nothing_gives_nothing(path):
    assert not draw_mask(path, WHOLE, 50, 50).any()


def test_drawing_stops_at_the_first_error_and_keeps_what_came_before():
    square = "M 0 0 L 1 0 L 1 1 L 0 1"
    whole = draw_mask(square, WHOLE, 50, 50)
    for rest in (" A 1 1 0 0 0 5", " L 0.5", " C 1 2 3 4", " Z 7 7 L 0.5 0.5", " L x y", " H"):
        assert (draw_mask(square + rest, WHOLE, 50, 50) == whole).all(), rest


@pytest.mark.parametrize("seed", range(5))
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
    path = PATHS["cubics"][0]
    large = draw_mask(path, WHOLE, 4000, 4000)
    assert large.sum() == pytest.approx(math.pi * 2000**2, rel=0.001)
    assert (large == large.T).mean() > 0.999


@pytest.mark.parametrize(("width", "height"), [(0, 5), (5, 0), (4001, 4000)])
def test_a_mask_has_a_largest_size(width, height):
    with pytest.raises(ValueError, match=str(MAX_MASK_PIXELS)):
        draw_mask("M 0 0 L 1 0 L 1 1 Z", WHOLE, width, height)


def test_a_png_holds_the_mask():
    drawn = draw_mask(PATHS["arcs"][0], WHOLE, 61, 47)
    with Image.open(io.BytesIO(mask_png(drawn))) as image:
        assert (image.mode, image.size, image.format) == ("L", (61, 47), "PNG")
        assert (np.asarray(image) == np.where(drawn, 255, 0)).all()


@pytest.mark.parametrize("fill", ["shape", "nothing", "everything"])
def test_run_lengths_are_column_by_column_and_begin_outside(fill):
    drawn = draw_mask(PATHS["arcs"][0], WHOLE, 31, 17)
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
