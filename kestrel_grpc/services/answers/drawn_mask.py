"""Adds the drawn mask to an outline, in the requested format. Decides whether a thread draws it."""

from __future__ import annotations

import asyncio

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import InvalidRequest

from . import masks

_INLINE_PIXELS = 200_000
"""Masks of up to this many pixels are drawn on the event loop, which takes about a millisecond: less than using a
thread."""


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
        mask.svg = masks.svg_document(path, box, width, height)
    elif mask_format == pb.MASK_FORMAT_POLYGONS:
        corners = masks.corners(path, box, width, height)
        mask.polygons.polygons.extend(pb.Polygon(coordinates=each) for each in corners)
        mask.polygons.SetInParent()
    elif width * height > masks.MAX_MASK_PIXELS:
        raise InvalidRequest(
            "mask_format",
            f"the image has {width}x{height} = {width * height} pixels; PNG and RLE masks are limited to images of "
            f"{masks.MAX_MASK_PIXELS}; request SVG, polygons or no mask",
        )
    elif width * height <= _INLINE_PIXELS:
        _encode(mask, path, box, size, mask_format)
    else:
        await asyncio.to_thread(_encode, mask, path, box, size, mask_format)
    mask.width, mask.height = size


def _encode(
    mask: pb.Mask,
    path: str,
    box: masks.Box,
    size: tuple[int, int],
    mask_format: pb.MaskFormat.ValueType,
) -> None:
    drawn = masks.draw_mask(path, box, *size)
    if mask_format == pb.MASK_FORMAT_PNG:
        mask.MergeFrom(pb.Mask(png=masks.mask_png(drawn)))
    else:
        mask.rle.counts.extend(masks.run_lengths(drawn))
