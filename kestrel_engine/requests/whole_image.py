"""Conversions between coordinates of a region and those of its whole image, for requests about a region. Owns no state.

A place in an output is a dict with x and y or with the four edges of a box, a dict of only width and height, or a tuple
of 2 or 4 numbers. A list is none.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import FieldPath, InvalidRequest
from ..types.events import StreamUpdate
from ..types.requests import Coord, ImagePlace, ImageRegion, Size, Token

_EDGES = ("x_min", "y_min", "x_max", "y_max")


def output_in_image(output: Any, region: ImageRegion) -> Any:
    """Returns ``output`` with all places in coordinates of the whole image. Boxes end at the region's edges, because
    the model saw nothing beyond."""
    if isinstance(output, dict):
        if output.keys() >= set(_EDGES):
            edges = _box(tuple(output[name] for name in _EDGES), region)
            return {**output, **dict(zip(_EDGES, edges, strict=True))}
        if output.keys() >= {"x", "y"}:
            return {
                **output,
                "x": region.x_to_image(output["x"]),
                "y": region.y_to_image(output["y"]),
            }
        if output.keys() == {"width", "height"}:
            return {
                "width": output["width"] * region.width / region.image_width,
                "height": output["height"] * region.height / region.image_height,
            }
        return {name: output_in_image(value, region) for name, value in output.items()}
    if isinstance(output, tuple) and len(output) == 2:
        return region.x_to_image(output[0]), region.y_to_image(output[1])
    if isinstance(output, tuple) and len(output) == 4:
        return _box(output, region)
    if isinstance(output, list):
        return [output_in_image(value, region) for value in output]
    return output


def update_in_image(update: StreamUpdate, region: ImageRegion) -> StreamUpdate:
    """Returns ``update`` with its object, if it has one, in coordinates of the whole image."""
    if update.object is None:
        return update
    return dataclasses.replace(update, object=output_in_image(update.object, region))


def prompt_in_region(
    tokens: Sequence[Token | ImagePlace],
    region: ImageRegion,
    path_of: Callable[[int], FieldPath],
) -> tuple[Token | ImagePlace, ...]:
    """Returns a prompt whose spatial references, which have coordinates of the whole image, are in those of the region.

    A box is clipped to the region. Raises InvalidRequest for a reference outside the region. ``path_of``: of the
    reference with a number, counted from 0.
    """
    found: list[Token | ImagePlace] = []
    number, index = 0, 0
    while index < len(tokens):
        token = tokens[index]
        if not isinstance(token, Coord):
            found.append(token)
            index += 1
            continue
        y, size = tokens[index + 1], tokens[index + 2] if index + 2 < len(tokens) else None
        assert isinstance(y, Coord), "spatial_tokens makes pairs"
        if isinstance(size, Size):
            found += _box_tokens(token.value, y.value, size, region, path_of(number))
        else:
            point = region.x_to_region(token.value), region.y_to_region(y.value)
            if not all(0 <= value <= 1 for value in point):
                raise _outside(path_of(number))
            found += [Coord(value) for value in point]
        index += 3 if isinstance(size, Size) else 2
        number += 1
    return tuple(found)


def _box_tokens(
    x: float, y: float, size: Size, region: ImageRegion, path: FieldPath
) -> list[Token]:
    width, height = size.width / 2, size.height / 2
    x0, x1 = _clip(region.x_to_region(x - width)), _clip(region.x_to_region(x + width))
    y0, y1 = _clip(region.y_to_region(y - height)), _clip(region.y_to_region(y + height))
    if (x0 == x1 and width > 0) or (y0 == y1 and height > 0):
        raise _outside(path)
    return [Coord((x0 + x1) / 2), Coord((y0 + y1) / 2), Size(x1 - x0, y1 - y0)]


def _outside(path: FieldPath) -> InvalidRequest:
    return InvalidRequest(
        path, "is outside image.region; references have coordinates of the whole image"
    )


def _box(edges: tuple[Any, ...], region: ImageRegion) -> tuple[float, ...]:
    x0, y0, x1, y1 = map(_clip, edges)
    return (
        region.x_to_image(x0),
        region.y_to_image(y0),
        region.x_to_image(x1),
        region.y_to_image(y1),
    )


def _clip(value: float) -> float:
    return min(1.0, max(0.0, value))
