"""Fractions of an image become pixels."""

import pytest

from kestrel_client import Box, ImageSize, Point

SIZE = ImageSize(200, 100)


@pytest.mark.parametrize(
    ("point", "pixel"),
    [
        (Point(0, 0), (0, 0)),
        (Point(0.5, 0.5), (100, 50)),
        (Point(1, 1), (199, 99)),  # the edge belongs to the last pixel
        (Point(0.9999, 0.0099), (199, 0)),
    ],
)
def test_point(point: Point, pixel: tuple[int, int]) -> None:
    assert point.to_pixels(SIZE) == point.to_pixels((200, 100)) == pixel


def test_box() -> None:
    box = Box(0.25, 0.1, 0.75, 1)
    assert box.to_pixels(SIZE) == (50, 10, 150, 100)
    assert (box.width, box.height, box.center) == (0.5, 0.9, Point(0.5, 0.55))
    assert Box(0, 0, 1, 1).to_pixels(SIZE) == (0, 0, *SIZE)
