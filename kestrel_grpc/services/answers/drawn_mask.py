"""Adds the drawn mask to a segment response, in the requested format. Decides whether a thread draws it."""

from __future__ import annotations

import asyncio

from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import InvalidRequest

from . import masks

_INLINE_PIXELS = 200_000
"""Masks of up to this many pixels are drawn on the event loop, which takes about a millisecond: less than using a
thread."""


async def add_mask(response: pb.SegmentResponse, mask_format: pb.MaskFormat.ValueType) -> None:
    """Sets ``response.mask`` if a mask is requested and the response has an outline. Raises InvalidRequest if the image
    is too large."""
    if mask_format in (pb.MASK_FORMAT_UNSPECIFIED, pb.MASK_FORMAT_NONE):
        return
    if not response.svg_path or not response.HasField("box"):
        return
    size = response.image_size
    box = (response.box.x_min, response.box.y_min, response.box.x_max, response.box.y_max)
    if mask_format == pb.MASK_FORMAT_SVG:
        document = masks.svg_document(response.svg_path, box, size.width, size.height)
        response.mask.CopyFrom(pb.Mask(width=size.width, height=size.height, svg=document))
        return
    if mask_format == pb.MASK_FORMAT_POLYGONS:
        corners = masks.corners(response.svg_path, box, size.width, size.height)
        found = pb.Polygons(polygons=[pb.Polygon(coordinates=each) for each in corners])
        response.mask.CopyFrom(pb.Mask(width=size.width, height=size.height, polygons=found))
        return
    if size.width * size.height > masks.MAX_MASK_PIXELS:
        raise InvalidRequest(
            "mask_format",
            f"the image has {size.width}x{size.height} = {size.width * size.height} pixels; PNG and RLE masks are "
            f"limited to images of {masks.MAX_MASK_PIXELS}; request SVG, polygons or no mask",
        )
    if size.width * size.height <= _INLINE_PIXELS:
        mask = _encoded(response.svg_path, box, size.width, size.height, mask_format)
    else:
        mask = await asyncio.to_thread(
            _encoded, response.svg_path, box, size.width, size.height, mask_format
        )
    response.mask.CopyFrom(mask)


def _encoded(
    path: str, box: masks.Box, width: int, height: int, mask_format: pb.MaskFormat.ValueType
) -> pb.Mask:
    drawn = masks.draw_mask(path, box, width, height)
    if mask_format == pb.MASK_FORMAT_PNG:
        return pb.Mask(width=width, height=height, png=masks.mask_png(drawn))
    runs = pb.RunLengths(counts=masks.run_lengths(drawn))
    return pb.Mask(width=width, height=height, rle=runs)
