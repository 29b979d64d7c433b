"""Converts results for other tools: supervision, COCO, pandas. Each package is imported when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ...drawing.marks import Outline
from ...errors import InvalidImageError, MissingDependencyError
from ...geometry import Box, ImageSize, Point

if TYPE_CHECKING:
    import PIL.Image


def size_of(size: ImageSize | None) -> ImageSize:
    """Returns the size, or raises InvalidImageError for a result without an image."""
    if size is None:
        raise InvalidImageError("the result has no image_size, so it can't be given in pixels")
    return size


def to_supervision(
    name: str, boxes: tuple[Box, ...], size: ImageSize, mask: PIL.Image.Image | None = None
) -> Any:
    """Returns a supervision.Detections. With a ``mask`` there is only one box."""
    supervision, numpy = package("supervision"), package("numpy")
    corners = numpy.array([box.to_pixels(size) for box in boxes], numpy.float32).reshape(-1, 4)
    return supervision.Detections(
        xyxy=corners,
        mask=None if mask is None or not boxes else numpy.asarray(mask)[None] > 127,
        class_id=numpy.zeros(len(boxes), int),
        confidence=_confidence(boxes, numpy),
        data={"class_name": numpy.array([name] * len(boxes), str)},
    )


def points_to_supervision(name: str, points: tuple[Point, ...], size: ImageSize) -> Any:
    """Returns a supervision.KeyPoints: each point is an object with one key point."""
    supervision, numpy = package("supervision"), package("numpy")
    places = [(point.x * size.width, point.y * size.height) for point in points]
    confidence = _confidence(points, numpy)
    return supervision.KeyPoints(
        xy=numpy.array(places, numpy.float32).reshape(-1, 1, 2),
        class_id=numpy.zeros(len(points), int),
        keypoint_confidence=None if confidence is None else confidence[:, None],
        detection_confidence=confidence,
        data={"class_name": numpy.array([name] * len(points), str)},
    )


def _confidence(found: tuple[Box, ...] | tuple[Point, ...], numpy: Any) -> Any:
    """The scores; None if one is missing, as from a server without scores."""
    scores = [each.score for each in found]
    return None if None in scores else numpy.array(scores, numpy.float32)


def to_coco(
    boxes: Iterable[Box], size: ImageSize, image_id: int, category_id: int
) -> list[dict[str, Any]]:
    annotations = []
    for number, box in enumerate(boxes, 1):
        left, top = box.x_min * size.width, box.y_min * size.height
        width, height = box.width * size.width, box.height * size.height
        annotation: dict[str, Any] = {
            "id": number,
            "image_id": image_id,
            "category_id": category_id,
            "bbox": [left, top, width, height],
            "area": width * height,
            "iscrowd": 0,
        }
        if box.score is not None:
            annotation["score"] = box.score
        annotations.append(annotation)
    return annotations


def outline_to_coco(
    outline: Outline, size: ImageSize, image_id: int, category_id: int
) -> list[dict[str, Any]]:
    from ...drawing import paint

    if outline.box is None:
        return []
    (annotation,) = to_coco([outline.box], size, image_id, category_id)
    polygons = paint.corners(outline, size)
    annotation["segmentation"] = [[edge for corner in each for edge in corner] for each in polygons]
    # The last of the 256 counts is the number of pixels inside.
    annotation["area"] = paint.mask_image(outline, size).histogram()[255]
    return [annotation]


def points_frame(name: str, points: tuple[Point, ...], size: ImageSize | None) -> Any:
    rows = []
    for point in points:
        row: dict[str, Any] = {"object": name, "x": point.x, "y": point.y, "score": point.score}
        if size is not None:
            row["x_px"], row["y_px"] = point.to_pixels(size)
        rows.append(row)
    columns = ["object", "x", "y", "score", *(["x_px", "y_px"] if size is not None else [])]
    return package("pandas").DataFrame(rows, columns=columns)


def boxes_frame(name: str, boxes: tuple[Box, ...], size: ImageSize | None) -> Any:
    edges = ("x_min", "y_min", "x_max", "y_max")
    rows = []
    for box in boxes:
        row: dict[str, Any] = {"object": name, **{edge: getattr(box, edge) for edge in edges}}
        row["score"] = box.score
        if size is not None:
            pixels = zip(edges, box.to_pixels(size), strict=True)
            row.update((f"{edge}_px", pixel) for edge, pixel in pixels)
        rows.append(row)
    in_pixels = [f"{edge}_px" for edge in edges] if size is not None else []
    return package("pandas").DataFrame(rows, columns=["object", *edges, "score", *in_pixels])


def package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(f"this needs {name}: pip install {name}") from error
