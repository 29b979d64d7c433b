"""Paints results on pictures. The only module that needs Pillow; loaded when somebody draws."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from .errors import MissingDependencyError
from .geometry import Box, Point
from .images import ImageInput, to_pillow
from .rasterise import fill
from .results import DetectResult, Mask, PointResult, QueryResult, Result, SegmentResult
from .svg_path import polygons

try:
    from PIL import Image, ImageDraw, ImageFont
except ImportError as error:
    raise MissingDependencyError(
        "drawing needs Pillow: pip install 'kestrel-client[images]'"
    ) from error

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw as Canvas
    from PIL.ImageFont import FreeTypeFont
    from PIL.ImageFont import ImageFont as BitmapFont

Colour = tuple[int, int, int]

# Told apart by most colour-blind people (Okabe and Ito, 2008).
COLOURS: tuple[Colour, ...] = (
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (240, 228, 66),
    (0, 114, 178),
    (230, 159, 0),
    (86, 180, 233),
)
MASK_OPACITY = 0.45


def draw(result: Result, picture: ImageInput) -> Image.Image:
    """The picture upright, in RGB, with the result painted on it; the input is left as it is."""
    image = to_pillow(picture)
    if isinstance(result, PointResult):
        _points(image, result.points)
    elif isinstance(result, DetectResult):
        _boxes(image, result.objects, result.object)
    elif isinstance(result, SegmentResult):
        _outline(image, result)
    elif isinstance(result, QueryResult):
        _points(image, tuple(p for span in result.grounding for p in span.points))
    return image


def mask_image(result: SegmentResult, size: tuple[int, int]) -> Image.Image:
    """The outline filled: mode "L", 255 inside and 0 outside, of ``size`` (width, height)."""
    if result.mask is not None and (result.mask.width, result.mask.height) == size:
        drawn = _drawn_mask(result.mask)
        if drawn is not None:
            return drawn
    if result.box is None:
        return Image.new("L", size, 0)
    outlines = [_in_picture(polygon, result.box, size) for polygon in polygons(result.svg_path)]
    return Image.frombytes("L", size, fill(outlines, *size))


def _drawn_mask(mask: Mask) -> Image.Image | None:
    """The server's own mask; None for SVG, which Pillow can't read."""
    if mask.format == "png":
        with Image.open(io.BytesIO(mask.png)) as image:
            return image.convert("L")
    if mask.format == "rle":
        runs = (bytes([255 * (i % 2)]) * count for i, count in enumerate(mask.rle))
        # Column by column is row by row of the transposed picture.
        columns = Image.frombytes("L", (mask.height, mask.width), b"".join(runs))
        return columns.transpose(Image.Transpose.TRANSPOSE)
    return None


def _points(image: Image.Image, points: tuple[Point, ...]) -> None:
    canvas = ImageDraw.Draw(image)
    radius = max(3, round(min(image.size) * 0.015))
    ring = max(1, radius // 3)
    for i, point in enumerate(points):
        x, y = point.to_pixels(image.size)
        # White around colour: visible on any ground.
        canvas.ellipse(
            (x - radius - ring, y - radius - ring, x + radius + ring, y + radius + ring),
            fill=(255, 255, 255),
        )
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_colour(i))


def _boxes(image: Image.Image, boxes: tuple[Box, ...], label: str) -> None:
    canvas = ImageDraw.Draw(image)
    for i, box in enumerate(boxes):
        _box(canvas, image, box, _colour(i), f"{label} {i + 1}" if len(boxes) > 1 else label)


def _outline(image: Image.Image, result: SegmentResult) -> None:
    colour = _colour(0)
    mask = mask_image(result, image.size)
    tint = Image.new("RGB", image.size, colour)
    opacity = mask.point([round(value * MASK_OPACITY) for value in range(256)])
    image.paste(tint, mask=opacity)
    canvas = ImageDraw.Draw(image)
    if result.box is not None:
        for polygon in polygons(result.svg_path):
            corners = _in_picture(polygon, result.box, image.size)
            canvas.line([*corners, corners[0]], fill=colour, width=_line_width(image))
        _box(canvas, image, result.box, colour, result.object)


def _box(canvas: Canvas, image: Image.Image, box: Box, colour: Colour, label: str) -> None:
    left, top, right, bottom = box.to_pixels(image.size)
    # Edges lie behind the last pixel; Pillow's rectangle includes its corner.
    right, bottom = max(left, right - 1), max(top, bottom - 1)
    canvas.rectangle((left, top, right, bottom), outline=colour, width=_line_width(image))
    if not label:
        return
    font = _font(image)
    _, _, width, height = canvas.textbbox((0, 0), label, font=font)
    pad = max(2, round(height * 0.15))
    # Above the box, or inside where there is no room; never beyond the right edge.
    x = max(0, min(left, image.width - round(width) - 2 * pad))
    y = top - round(height) - 2 * pad
    y = top if y < 0 else y
    canvas.rectangle((x, y, x + width + 2 * pad, y + height + 2 * pad), fill=colour)
    dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 140
    canvas.text((x + pad, y + pad), label, fill=(255,) * 3 if dark else (0,) * 3, font=font)


def _in_picture(
    polygon: list[tuple[float, float]], box: Box, size: tuple[int, int]
) -> list[tuple[float, float]]:
    """Corners relative to the box as pixels of the picture."""
    width, height = size
    return [
        ((box.x_min + x * box.width) * width, (box.y_min + y * box.height) * height)
        for x, y in polygon
    ]


def _colour(index: int) -> Colour:
    return COLOURS[index % len(COLOURS)]


def _line_width(image: Image.Image) -> int:
    return max(2, round(min(image.size) * 0.005))


def _font(image: Image.Image) -> FreeTypeFont | BitmapFont:
    return ImageFont.load_default(size=max(11, round(min(image.size) * 0.03)))
