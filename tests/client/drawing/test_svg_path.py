"""Path data to polygons: every command, both cases, and the odd spellings that the grammar allows."""

import math

import pytest

from kestrel_client.drawing.svg_path import Polygon, polygons


def signed_area(polygon: Polygon) -> float:
    """The shoelace formula; its sign tells the direction."""
    corners = zip(polygon, [*polygon[1:], polygon[0]], strict=True)
    return sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in corners) / 2


SQUARE = [(0, 0), (1, 0), (1, 1), (0, 1)]


@pytest.mark.parametrize(
    "path",
    [
        "M 0 0 L 1 0 L 1 1 L 0 1 Z",
        "M0,0L1,0L1,1L0,1z",
        "M 0 0 1 0 1 1 0 1 z",
        "m 0 0 1 0 0 1 -1 0 z",
        "m0 0l1 0l0 1l-1 0z",
        "M0 0H1V1H0Z",
        "m0 0h1v1h-1z",
        "M0 0 H.5 1 V.25 1 H0",
        "M0-0L1e0,0L+1.,1L0 1",
        "M 5 5 m -5 -5 h1v1h-1z",
    ],
)
def test_spellings_of_a_square(path: str) -> None:
    (polygon,) = polygons(path)
    corners = [c for c in polygon if c not in [(0.5, 0), (1, 0.25)]]
    assert corners == SQUARE
    assert signed_area(polygon) == pytest.approx(1)


def test_numbers_without_anything_between() -> None:
    (polygon,) = polygons("M.1.2L.3-.4L-.5.6z")
    assert polygon == [(0.1, 0.2), (0.3, -0.4), (-0.5, 0.6)]


def test_subpaths_and_direction() -> None:
    outer, inner = polygons("M0 0H4V4H0ZM1 1v2h2v-2z")
    assert signed_area(outer) == 16 and signed_area(inner) == -4


def test_drawing_on_after_a_closepath() -> None:
    first, second = polygons("M1 1h1v1zl-1 0l0 -1z")
    assert first == [(1, 1), (2, 1), (2, 2)]
    assert second == [(1, 1), (0, 1), (0, 0)]


@pytest.mark.parametrize("path", ["M0 0C0 1 1 1 1 0z", "m0 0c0 1 1 1 1 0z"])
def test_cubic(path: str) -> None:
    (polygon,) = polygons(path)
    assert polygon[0] == (0, 0) and polygon[-1] == pytest.approx((1, 0))
    assert max(y for _, y in polygon) == pytest.approx(0.75)  # de Casteljau at t = 1/2
    assert signed_area(polygon) == pytest.approx(-0.6, rel=0.01)


def test_smooth_cubic_mirrors_the_last_control() -> None:
    (short,) = polygons("M0 0C0 1 1 1 1 0S2 -1 2 0z")
    (spelt,) = polygons("M0 0C0 1 1 1 1 0C1 -1 2 -1 2 0z")
    assert short == spelt
    (after_line,) = polygons("M0 0L1 0S2 -1 2 0z")
    (plain,) = polygons("M0 0L1 0C1 0 2 -1 2 0z")
    assert after_line == plain


def test_quadratic_and_smooth() -> None:
    (polygon,) = polygons("M0 0Q.5 1 1 0z")
    assert max(y for _, y in polygon) == pytest.approx(0.5)
    assert signed_area(polygon) == pytest.approx(-1 / 3, rel=0.01)
    assert polygons("M0 0q.5 1 1 0t1 0z") == polygons("M0 0Q.5 1 1 0Q1.5 -1 2 0z")


@pytest.mark.parametrize(
    "path",
    [
        "M0 .5A.5.5 0 0 1 1 .5A.5.5 0 0 1 0 .5z",
        "M0 .5a.5.5 0 011 0a.5.5 0 01-1 0z",  # flags need nothing between them
        "M0 .5a.1.1 0 1 1 1 0a.1.1 0 1 1 -1 0z",  # radii too small are scaled up
        "M0 .5A.5.5 30 0 1 1 .5A.5.5 -20 0 1 0 .5z",  # a circle doesn't mind being turned
    ],
)
def test_arcs_make_a_circle(path: str) -> None:
    (polygon,) = polygons(path)
    assert all(math.hypot(x - 0.5, y - 0.5) == pytest.approx(0.5) for x, y in polygon)
    assert signed_area(polygon) == pytest.approx(math.pi / 4, rel=0.01)


def test_large_arc_and_sweep() -> None:
    areas = {
        (large, sweep): signed_area(polygons(f"M1 0A1 1 0 {large} {sweep} 0 1z")[0])
        for large in (0, 1)
        for sweep in (0, 1)
    }
    segment = math.pi / 4 - 0.5
    assert areas[0, 1] == pytest.approx(segment, rel=0.02)
    assert areas[0, 0] == pytest.approx(-segment, rel=0.02)
    assert areas[1, 1] == pytest.approx(math.pi - segment, rel=0.02)
    assert areas[1, 0] == pytest.approx(-(math.pi - segment), rel=0.02)


def test_an_ellipse_is_turned() -> None:
    """Two segments of the ellipse with half axes 1/2 and 1/4, each cut by a chord of half the long axis."""
    (polygon,) = polygons("M.5 .25A.5 .25 90 0 1 .5 .75A.5 .25 90 0 1 .5 .25")
    angle = 2 * math.asin(0.5)
    assert signed_area(polygon) == pytest.approx((angle - math.sin(angle)) / 8, rel=0.01)


def test_an_arc_of_no_radius_is_a_line() -> None:
    assert polygons("M0 0A0 1 0 0 1 1 0L1 1z") == [[(0, 0), (1, 0), (1, 1)]]


@pytest.mark.parametrize(
    ("path", "corners"),
    [
        ("", 0),
        ("Z", 0),
        ("hello", 0),
        ("M 0", 0),
        ("0 0 M 1 1", 0),
        ("M nan 0 L 1 1 L 0 1", 0),
        ("M0 0L1 0L1 1L0 1Z 7 7L.5 .5", 4),
        ("M 0 0 L 1 0 z", 0),  # two corners enclose nothing
        ("L 0 0 1 0 1 1 z", 0),  # no moveto
        ("M0 0L1 0L1 1L0 1L5", 4),  # drawn up to the error
        ("M0 0H1V1 nonsense", 3),
        ("M0 0L1 0L1 1C0 0 1", 3),
        ("M0 0L1 0L1 1A1 1 0 2 0 3 3", 3),
    ],
)
def test_malformed_paths_are_drawn_up_to_the_error(path: str, corners: int) -> None:
    assert sum(len(polygon) for polygon in polygons(path)) == corners
