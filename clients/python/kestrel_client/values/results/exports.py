"""Converts results for other tools: supervision, COCO, pandas. Each package is imported when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...drawing.marks import Outline
from ...errors import MissingDependencyError
from ...geometry import DetectedBox, DetectedPoint, ImageSize, edges
from .searches import ObjectSearch

if TYPE_CHECKING:
    import PIL.Image


def numbers(searches: Iterable[ObjectSearch], first: int) -> dict[str, int]:
    """Numbers the names of a call."""
    return {each.object: number for number, each in enumerate(searches, first)}


def to_supervision(
    boxes: Sequence[DetectedBox],
    searches: Iterable[ObjectSearch],
    size: ImageSize,
    masks: Sequence[PIL.Image.Image] | None = None,
) -> Any:
    """Returns a supervision.Detections. ``masks``: one for each box."""
    supervision, numpy = package("supervision"), package("numpy")
    corners = numpy.array([box.to_pixels(size) for box in boxes], numpy.float32).reshape(-1, 4)
    return supervision.Detections(
        xyxy=corners,
        mask=numpy.stack([numpy.asarray(mask) > 127 for mask in masks]) if masks else None,
        confidence=numpy.array([box.score for box in boxes], numpy.float32),
        **_classes(boxes, searches, numpy),
    )


def points_to_supervision(
    points: Sequence[DetectedPoint], searches: Iterable[ObjectSearch], size: ImageSize
) -> Any:
    """Returns a supervision.KeyPoints: each point is an object with one key point."""
    supervision, numpy = package("supervision"), package("numpy")
    places = [(point.x * size.width, point.y * size.height) for point in points]
    confidence = numpy.array([point.score for point in points], numpy.float32)
    return supervision.KeyPoints(
        xy=numpy.array(places, numpy.float32).reshape(-1, 1, 2),
        keypoint_confidence=confidence[:, None],
        detection_confidence=confidence,
        **_classes(points, searches, numpy),
    )


def _classes(
    found: Sequence[DetectedBox] | Sequence[DetectedPoint],
    searches: Iterable[ObjectSearch],
    numpy: Any,
) -> dict[str, Any]:
    ids = numbers(searches, 0)
    labels = [each.label for each in found]
    return {
        "class_id": numpy.array([ids[label] for label in labels], int),
        "data": {"class_name": numpy.array(labels, str)},
    }


def to_coco(
    boxes: Iterable[DetectedBox], categories: Mapping[str, int], size: ImageSize, image_id: int
) -> list[dict[str, Any]]:
    """``categories``: the number of each label."""
    annotations = []
    for number, box in enumerate(boxes, 1):
        left, top = box.x_min * size.width, box.y_min * size.height
        width, height = box.width * size.width, box.height * size.height
        annotations.append(
            {
                "id": number,
                "image_id": image_id,
                "category_id": categories[box.label],
                "bbox": [left, top, width, height],
                "area": width * height,
                "iscrowd": 0,
                "score": box.score,
            }
        )
    return annotations


def outlines_to_coco(
    outlines: Iterable[tuple[DetectedBox, Outline]],
    categories: Mapping[str, int],
    size: ImageSize,
    image_id: int,
) -> list[dict[str, Any]]:
    from ...drawing import paint

    outlines = tuple(outlines)
    annotations = to_coco((box for box, _ in outlines), categories, size, image_id)
    for annotation, (_, outline) in zip(annotations, outlines, strict=True):
        polygons = paint.corners(outline, size)
        annotation["segmentation"] = [[edge for corner in p for edge in corner] for p in polygons]
        # The last of the 256 counts is the number of pixels inside.
        annotation["area"] = paint.mask_image([outline], size).histogram()[255]
    return annotations


def points_frame(points: Iterable[DetectedPoint], size: ImageSize) -> Any:
    columns = ["label", "x", "y", "score", "x_px", "y_px"]
    rows = [(p.label, p.x, p.y, p.score, *p.to_pixels(size)) for p in points]
    return package("pandas").DataFrame(rows, columns=columns)


def boxes_frame(boxes: Iterable[DetectedBox], size: ImageSize) -> Any:
    names = ["x_min", "y_min", "x_max", "y_max"]
    columns = ["label", *names, "score", *(f"{name}_px" for name in names)]
    rows = [(box.label, *edges(box), box.score, *box.to_pixels(size)) for box in boxes]
    return package("pandas").DataFrame(rows, columns=columns)


def package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingDependencyError(f"this needs {name}: pip install {name}") from error
