"""Painted results, checked by their pixels."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from kestrel_client import (
    Answer,
    Box,
    CaptionResult,
    DetectedBox,
    DetectedPoint,
    DetectResult,
    GroundingSpan,
    ImageSize,
    InvalidImageError,
    Mask,
    ObjectSearch,
    Point,
    PointResult,
    QueryResult,
    Reasoning,
    Result,
    Segment,
    SegmentResult,
    Timings,
    Usage,
)
from kestrel_client.drawing.paint import COLOURS

GREY = (128, 128, 128)
CIRCLE = "M 0 0.5 A 0.5 0.5 0 0 1 1 0.5 A 0.5 0.5 0 0 1 0 0.5 z"


def picture(width: int = 400, height: int = 200) -> Image.Image:
    return Image.new("RGB", (width, height), GREY)


def made(kind: type[Result], **own: Any) -> Any:
    common: dict[str, Any] = {
        "finish_reason": "stop",
        "usage": Usage(),
        "timings": Timings(),
        "model": "m",
        "request_id": "r",
        "image_size": ImageSize(400, 200),
        "seed": 0,
        "source": picture(),
    }
    return kind(**{**common, **own})


def detected(label: str, *boxes: tuple[float, float, float, float], score: float = 1) -> Any:
    objects = tuple(DetectedBox(*edges, label, score) for edges in boxes)
    return made(DetectResult, objects=objects, searches=(ObjectSearch(object=label),))


def pointed(label: str, *places: tuple[float, float], score: float = 1) -> Any:
    points = tuple(DetectedPoint(*place, label, score) for place in places)
    return made(PointResult, points=points, searches=(ObjectSearch(object=label),))


def outlined(label: str, svg_path: str, box: Box, **own: Any) -> Any:
    segment = Segment(label=label, score=1, box=box, svg_path=svg_path, **own)
    return made(SegmentResult, segments=(segment,), searches=(ObjectSearch(object=label),))


def answer(text: str, reasoning: Reasoning | None = None) -> Answer:
    return Answer(text=text, reasoning=reasoning, finish_reason="stop", seed=0)


def changed(image: Image.Image) -> np.ndarray:
    """Where the image isn't grey any more."""
    different: np.ndarray = (np.asarray(image) != GREY).any(-1)
    return different


def test_points_lie_where_they_should() -> None:
    result = pointed("x", (0.25, 0.5), (0.75, 0.25))
    image = result.draw()
    assert image.getpixel((100, 100)) == COLOURS[0]
    assert image.getpixel((300, 50)) == COLOURS[1]
    spots = changed(image)
    rows, columns = np.nonzero(spots[:, :200])
    assert abs(columns.mean() - 100) < 1 and abs(rows.mean() - 100) < 1
    assert columns.max() - columns.min() < 12 and image.getpixel((95, 100)) != COLOURS[0]
    assert not spots[:, 150:250].any()
    assert not changed(result.source).any()  # the caller's image is left as it was


def test_a_point_on_the_edge() -> None:
    image = pointed("x", (1, 1)).draw()
    assert image.getpixel((399, 199)) == COLOURS[0]


def test_boxes_have_edges_and_labels() -> None:
    image = detected("red circle", (0.25, 0.5, 0.5, 1), (0.75, 0.5, 0.875, 0.75)).draw()
    for (left, top, right, bottom), colour in zip(
        [(100, 100, 200, 200), (300, 100, 350, 150)], COLOURS, strict=False
    ):
        for x, y in [
            (left, bottom - 10),
            (right - 1, bottom - 10),
            (left + 5, top),
            (left + 5, bottom - 1),
        ]:
            assert image.getpixel((x, y)) == colour
        assert image.getpixel(((left + right) // 2, (top + bottom) // 2)) == GREY
        assert image.getpixel((left - 2, bottom - 10)) == GREY
    label = np.asarray(image)[80:100, 100:150]
    assert (label == COLOURS[0]).all(-1).mean() > 0.3  # its ground
    assert ((label == 255).all(-1) | (label == 0).all(-1)).any()  # its letters


def test_labels_have_scores() -> None:
    boxes = (Box(0.25, 0.5, 0.5, 1), Box(0.75, 0.5, 0.875, 0.75), Box(0, 0, 0.1, 0.1))
    given = zip(boxes, ("car", "dog", "car"), (0.987, 1, 0.5), strict=True)
    objects = tuple(
        DetectedBox(b.x_min, b.y_min, b.x_max, b.y_max, label, score) for b, label, score in given
    )
    labels = [label for _, label in made(DetectResult, objects=objects).marks.boxes]
    assert labels == ["car 1 (0.99)", "dog (1.00)", "car 2 (0.50)"]
    assert [label for _, label in outlined("car", CIRCLE, boxes[0]).marks.boxes] == ["car (1.00)"]


def test_a_label_stays_inside_the_image() -> None:
    image = detected("a rather long description", (0.9, 0, 1, 0.5)).draw()
    ground = (np.asarray(image) == COLOURS[0]).all(-1)
    assert ground[102:112, 150:360].any()  # below the box, as there is no room above


def test_labels_hide_no_small_object() -> None:
    """Ten small boxes in a column: each stays visible."""
    found = detected("button", *((0.4, n / 10 + 0.02, 0.44, n / 10 + 0.06) for n in range(10)))
    pixels = np.asarray(found.draw())
    for i, box in enumerate(found):
        left, top, _, bottom = box.to_pixels((400, 200))
        edge = pixels[top:bottom, left]
        assert (edge == COLOURS[i % len(COLOURS)]).all(-1).mean() > 0.7, i


def test_a_box_without_extent() -> None:
    image = detected("", (0.5, 0.5, 0.5, 0.5)).draw()
    assert image.getpixel((200, 100)) == COLOURS[0]


def test_an_outline_is_filled_and_lies_in_its_box() -> None:
    result = outlined("circle", CIRCLE, Box(0.25, 0.25, 0.5, 0.75))
    image = result.draw()
    mixed = tuple(g + 0.45 * (c - g) for g, c in zip(GREY, COLOURS[0], strict=True))
    assert image.getpixel((150, 100)) == pytest.approx(mixed, abs=2)
    assert image.getpixel((106, 56)) == GREY  # in the box, outside the circle
    assert image.getpixel((250, 100)) == GREY


def test_mask_of_a_circle_has_its_area() -> None:
    result = outlined("o", CIRCLE, Box(0.25, 0.25, 0.5, 0.75))
    mask = np.asarray(result.to_mask())
    assert mask.shape == (200, 400) and set(np.unique(mask)) == {0, 255}
    assert (mask > 0).sum() == pytest.approx(math.pi * 50 * 50, rel=0.01)
    rows, columns = np.nonzero(mask)
    assert abs(columns.mean() - 149.5) < 0.1 and abs(rows.mean() - 99.5) < 0.1
    small = np.asarray(result.to_mask((40, 20)))
    assert small.shape == (20, 40) and (small > 0).sum() == pytest.approx(math.pi * 25, rel=0.05)


def test_an_inner_outline_of_the_other_direction_is_a_hole() -> None:
    hole, island = "M0 0H1V1H0z M.25 .25V.75H.75V.25z", "M0 0H1V1H0z M.25 .25H.75V.75H.25z"
    box = Box(0, 0, 1, 1)
    with_hole = np.asarray(outlined("", hole, box).to_mask())
    without = np.asarray(outlined("", island, box).to_mask())
    assert with_hole[100, 200] == 0 and with_hole[20, 20] == 255
    assert without.min() == 255


def test_a_pixel_is_inside_if_its_centre_is() -> None:
    result = outlined("", "M0 0H1V1H0z", Box(0.1, 0.25, 0.6, 1))
    # Edges at 1, 2, 6 and 8 of 10 x 8 pixels, then at 0.6 and 3.6 of 6 columns.
    assert np.argwhere(np.asarray(result.to_mask((10, 8)))).tolist() == [
        [y, x] for y in range(2, 8) for x in range(1, 6)
    ]
    assert np.asarray(result.to_mask((6, 4)))[3].tolist() == [0, 255, 255, 255, 0, 0]


def test_an_outline_beyond_its_box_is_clipped() -> None:
    path = "M -9 -9 H 9 V 9 H -9 z"
    result = outlined("", path, Box(0.25, 0.25, 0.5, 0.5))
    assert np.asarray(result.to_mask()).min() == 255


def test_nothing_found_draws_nothing() -> None:
    result = made(SegmentResult, segments=())
    assert not changed(result.draw()).any() and (result.svg_path, result.box) == ("", None)
    assert np.asarray(result.to_mask()).max() == 0


def test_the_servers_mask_is_taken_as_it_is() -> None:
    # COCO's example of order: column by column. 3 wide, 2 high; the second column and the last pixel are set.
    rle = outlined("x", "", Box(0, 0, 1, 1), mask=Mask("rle", 3, 2, rle=(2, 2, 1, 1)))
    assert np.asarray(rle.to_mask((3, 2))).tolist() == [[0, 255, 0], [0, 255, 255]]
    (segment,) = rle.to_dict()["segments"]
    assert segment["mask"] == {"format": "rle", "width": 3, "height": 2, "rle": [2, 2, 1, 1]}


def test_several_outlines_have_colours_of_their_own() -> None:
    halves = {"a": Box(0, 0, 0.5, 1), "b": Box(0.5, 0, 1, 1)}
    segments = tuple(
        Segment(label=label, score=1, box=box, svg_path="M0 0H1V1H0z")
        for label, box in halves.items()
    )
    result = made(SegmentResult, segments=segments)
    image = result.draw()
    assert image.getpixel((100, 100)) != image.getpixel((300, 100))
    assert np.asarray(result.to_mask()).min() == 255 and len(result) == 2
    assert np.asarray(segments[0].to_mask((4, 1))).tolist() == [[255, 255, 0, 0]]


def test_grounding_is_painted_and_text_is_not() -> None:
    span = GroundingSpan(0, 3, (Point(0.5, 0.5),))
    query = made(QueryResult, answers=(answer("a", Reasoning("abc", (span,))),))
    assert query.draw().getpixel((200, 100)) == COLOURS[0]
    texts = (answer("A very long answer. " * 9),)
    answered = made(QueryResult, question="What is this?", answers=texts)
    for result in (answered, made(CaptionResult, captions=(answer("a circle"),))):
        image = result.draw()
        assert not changed(image)[:200].any()
        below = np.asarray(image)[200:]
        assert (below == 255).all(-1).mean() > 0.5 and (below == 0).all(-1).any()
        assert (below[:, -4:] == 255).all()  # nothing is cut off


def test_save_and_another_image(tmp_path: Path) -> None:
    result = dataclasses.replace(pointed("x", (0.5, 0.5)), source=None)
    with pytest.raises(InvalidImageError, match="no image to draw on"):
        result.draw()
    source = tmp_path / "in.png"
    picture(100, 50).save(source)
    result.save(tmp_path / "out.png", source)
    with Image.open(tmp_path / "out.png") as saved:
        assert saved.size == (100, 50) and saved.convert("RGB").getpixel((50, 25)) == COLOURS[0]
