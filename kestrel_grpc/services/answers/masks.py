"""Draws the outline of a segment as a mask of the image, in the requested format. Decides whether a thread draws it.

The SDK's parser and fill draw the mask (svg_path and rasterise in kestrel_client.drawing), so a client that draws the
path with the SDK gets the same pixels.
"""

from __future__ import annotations

import asyncio
from xml.sax.saxutils import quoteattr

import numpy as np
import pyvips

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_client.drawing.rasterise import fill
from kestrel_client.drawing.svg_path import Polygon, polygons
from kestrel_engine import InvalidRequest

MAX_MASK_PIXELS = 16_000_000
"""Largest image that a mask is drawn for, in pixels. The bool array takes 16 MB."""

_INLINE_PIXELS = 200_000
"""Masks of up to this many pixels are drawn on the event loop, in about a millisecond: a thread takes longer."""

Box = tuple[float, float, float, float]
"""x_min, y_min, x_max, y_max, as fractions of the image."""


async def add_mask(
    found: pb.Detection, mask_format: pb.MaskFormat.ValueType, size: tuple[int, int]
) -> None:
    """Sets the mask of an outline, if one is requested and there is a path. ``size``: width and height of the image in
    pixels. Raises InvalidRequest if the image is too large."""
    path, (width, height) = found.outline.svg_path, size
    if mask_format == pb.MASK_FORMAT_UNSPECIFIED or not path or not found.HasField("box"):
        return
    mask = found.outline.mask
    box = (found.box.x_min, found.box.y_min, found.box.x_max, found.box.y_max)
    if mask_format == pb.MASK_FORMAT_SVG:
        mask.svg = svg_document(path, box, width, height)
    elif mask_format == pb.MASK_FORMAT_POLYGONS:
        outline = corners(path, box, width, height)
        mask.polygons.polygons.extend(pb.Polygon(coordinates=each) for each in outline)
        mask.polygons.SetInParent()
    elif width * height > MAX_MASK_PIXELS:
        raise InvalidRequest(
            "mask_format",
            f"the image has {width}x{height} = {width * height} pixels; PNG and RLE masks are limited to images of "
            f"{MAX_MASK_PIXELS}; request SVG, polygons or no mask",
        )
    elif width * height <= _INLINE_PIXELS:
        _encode(mask, path, box, size, mask_format)
    else:
        await asyncio.to_thread(_encode, mask, path, box, size, mask_format)
    mask.width, mask.height = size


def _encode(
    mask: pb.Mask, path: str, box: Box, size: tuple[int, int], mask_format: pb.MaskFormat.ValueType
) -> None:
    drawn = draw_mask(path, box, *size)
    if mask_format == pb.MASK_FORMAT_PNG:
        mask.MergeFrom(pb.Mask(png=mask_png(drawn)))
    else:
        mask.rle.counts.extend(run_lengths(drawn))


def draw_mask(svg_path: str, box: Box, width: int, height: int) -> np.ndarray:
    """The filled outline: [height, width] bool.

    ``svg_path`` is relative to ``box``: (0, 0) is its upper left corner, (1, 1) its lower right one.
    Raises ValueError for an image of more than MAX_MASK_PIXELS, or an empty one.
    """
    if width < 1 or height < 1 or width * height > MAX_MASK_PIXELS:
        raise ValueError(f"{width}x{height} pixels: a mask has 1 to {MAX_MASK_PIXELS}")
    return fill(_outline(svg_path, box, width, height), width, height)


def corners(svg_path: str, box: Box, width: int, height: int) -> list[list[float]]:
    """The outline as COCO's polygons: x and y of each corner in turn, in pixels, rounded to hundredths."""
    return [
        [round(value, 2) for corner in polygon for value in corner]
        for polygon in _outline(svg_path, box, width, height)
    ]


def _outline(svg_path: str, box: Box, width: int, height: int) -> list[Polygon]:
    """The outline's polygons in pixels of the image."""
    x, y = box[0] * width, box[1] * height
    w, h = (box[2] - box[0]) * width, (box[3] - box[1]) * height
    return [
        [(x + u * w, y + v * h) for u, v in polygon]
        for polygon in polygons(svg_path, max(abs(w), abs(h)))
    ]


def mask_png(mask: np.ndarray) -> bytes:
    """A PNG file of [height, width] bool: one channel of 8 bits, 255 inside and 0 outside."""
    height, width = mask.shape
    pixels = np.where(mask, np.uint8(255), np.uint8(0))
    image = pyvips.Image.new_from_memory(pixels.data, width, height, 1, "uchar")
    return bytes(image.copy(interpretation="b-w").pngsave_buffer(compression=4))


def run_lengths(mask: np.ndarray) -> list[int]:
    """COCO's uncompressed run lengths of [height, width] bool, column by column.

    The first run counts pixels outside the mask, and may be 0.
    """
    flat = mask.ravel(order="F")
    starts = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    counts = np.diff(np.concatenate(([0], starts, [flat.size]))).tolist()
    return [0, *counts] if flat[0] else counts


def svg_document(svg_path: str, box: Box, width: int, height: int) -> str:
    """An SVG document of the image's size: the outline filled white on a transparent background."""
    x, y = box[0] * width, box[1] * height
    w, h = (box[2] - box[0]) * width, (box[3] - box[1]) * height
    transform = f"translate({x:.6g} {y:.6g}) scale({w:.6g} {h:.6g})"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}">'
        f'<path fill="white" transform="{transform}" d={quoteattr(svg_path)}/></svg>'
    )
