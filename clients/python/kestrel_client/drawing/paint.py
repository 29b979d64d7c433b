"""Draws marks on images. This module needs Pillow and numpy, and is loaded when something is drawn."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..errors import MissingDependencyError
from ..geometry import Box, Point
from ..images.image_forms import ImageInput, to_pillow
from .marks import Marks, Mask, Outline
from .svg_path import polygons

try:
    from PIL import Image, ImageChops, ImageDraw, ImageFont

    from .rasterise import fill
except ImportError as error:
    raise MissingDependencyError(
        "drawing needs Pillow and numpy: pip install './clients/python[images]'"
    ) from error

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw as Canvas
    from PIL.ImageFont import FreeTypeFont
    from PIL.ImageFont import ImageFont as BitmapFont

Colour = tuple[int, int, int]

# Most colour-blind people can distinguish these colours (Okabe and Ito, 2008).
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


Area = tuple[int, int, int, int]
"""Left, top, right, bottom in pixels."""


def draw(marks: Marks, source: ImageInput) -> Image.Image:
    """Returns the image upright, in RGB, with the marks drawn on it. The input is not changed."""
    image = to_pillow(source)
    for number, outline in enumerate(marks.outlines):
        _outline(image, outline, _colour(number))
    _boxes(image, marks.boxes)
    _points(image, marks.points)
    return _with_text(image, marks.text) if marks.text else image


def png(image: Image.Image, max_side: int) -> bytes:
    """Returns the image as a PNG file, reduced to ``max_side`` pixels if it is larger."""
    image.thumbnail((max_side, max_side))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def mask_image(outlines: Iterable[Outline], size: tuple[int, int]) -> Image.Image:
    """Returns the filled outlines: mode "L", 255 inside and 0 outside, of ``size`` (width, height)."""
    whole = Image.new("L", size)
    for outline in outlines:
        whole = ImageChops.lighter(whole, _filled(outline, size))
    return whole


def _filled(outline: Outline, size: tuple[int, int]) -> Image.Image:
    mask = outline.mask
    if mask is not None and (mask.width, mask.height) == size:
        drawn = _drawn_mask(mask)
        if drawn is not None:
            return drawn
    return Image.fromarray(fill(corners(outline, size), *size).astype("uint8") * 255)


def corners(outline: Outline, size: tuple[int, int]) -> list[list[tuple[float, float]]]:
    """Returns the outline's polygons, in pixels of an image of ``size`` (width, height)."""
    if outline.box is None:
        return []
    pixels = max(outline.box.width * size[0], outline.box.height * size[1])
    return [_in_image(each, outline.box, size) for each in polygons(outline.svg_path, pixels)]


def _drawn_mask(mask: Mask) -> Image.Image | None:
    """The server's mask; None for SVG, which Pillow can't read, and for polygons, which are no
    finer than the path."""
    if mask.format == "png":
        with Image.open(io.BytesIO(mask.png)) as image:
            return image.convert("L")
    if mask.format == "rle":
        runs = (bytes([255 * (i % 2)]) * count for i, count in enumerate(mask.rle))
        # Columns of the image are rows of the transposed image.
        columns = Image.frombytes("L", (mask.height, mask.width), b"".join(runs))
        return columns.transpose(Image.Transpose.TRANSPOSE)
    return None


def _points(image: Image.Image, points: tuple[Point, ...]) -> None:
    canvas = ImageDraw.Draw(image)
    radius = max(3, round(min(image.size) * 0.015))
    ring = max(1, radius // 3)
    for i, point in enumerate(points):
        x, y = point.to_pixels(image.size)
        # A white ring makes the point visible on any background.
        canvas.ellipse(
            (x - radius - ring, y - radius - ring, x + radius + ring, y + radius + ring),
            fill=(255, 255, 255),
        )
        canvas.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_colour(i))


def _boxes(image: Image.Image, boxes: tuple[tuple[Box, str], ...]) -> None:
    canvas = ImageDraw.Draw(image)
    areas = [_area(box, image.size) for box, _ in boxes]
    for i, area in enumerate(areas):
        canvas.rectangle(area, outline=_colour(i), width=_line_width(image))
    # Labels are drawn last and avoid all boxes and each other, so that no label hides a small object.
    taken = list(areas)
    for i, ((_, label), area) in enumerate(zip(boxes, areas, strict=True)):
        if label:
            taken.append(_label(canvas, image, area, taken, _colour(i), label))


def _outline(image: Image.Image, outline: Outline, colour: Colour) -> None:
    mask = _filled(outline, image.size)
    tint = Image.new("RGB", image.size, colour)
    opacity = mask.point([round(value * MASK_OPACITY) for value in range(256)])
    image.paste(tint, mask=opacity)
    canvas = ImageDraw.Draw(image)
    for polygon in corners(outline, image.size):
        canvas.line([*polygon, polygon[0]], fill=colour, width=_line_width(image))


def _area(box: Box, size: tuple[int, int]) -> Area:
    """The pixels of a box. Its right and lower edge lie behind the last pixel; Pillow includes the corner."""
    left, top, right, bottom = box.to_pixels(size)
    return left, top, max(left, right - 1), max(top, bottom - 1)


def _label(
    canvas: Canvas, image: Image.Image, area: Area, taken: list[Area], colour: Colour, label: str
) -> Area:
    """Writes a label beside its box, where it hides the least. Returns the pixels that the label covers."""
    font = _font(image)
    _, _, right, bottom = canvas.textbbox((0, 0), label, font=font)
    pad = max(2, round(bottom * 0.15))
    width, height = round(right) + 2 * pad, round(bottom) + 2 * pad
    places = [
        (area[0], area[1] - height),  # above the box
        (area[0], area[3] + 1),  # below
        (area[2] + 1, area[1]),  # to the right
        (area[0] - width, area[1]),  # to the left
        (area[0], area[1]),  # in its upper left corner
    ]
    inside = [
        (min(max(x, 0), max(image.width - width, 0)), min(max(y, 0), max(image.height - height, 0)))
        for x, y in places
    ]
    areas = [(x, y, x + width, y + height) for x, y in inside]
    best = min(areas, key=lambda place: sum(_hidden_share(place, other) for other in taken))
    canvas.rectangle(best, fill=colour)
    dark = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] < 140
    ink = (255,) * 3 if dark else (0,) * 3
    canvas.text((best[0] + pad, best[1] + pad), label, fill=ink, font=font)
    return best


def _hidden_share(place: Area, other: Area) -> float:
    """The fraction of ``other`` that ``place`` covers."""
    across = min(place[2], other[2]) - max(place[0], other[0])
    down = min(place[3], other[3]) - max(place[1], other[1])
    if across <= 0 or down <= 0:
        return 0.0
    return across * down / ((other[2] - other[0] + 1) * (other[3] - other[1] + 1))


def _with_text(image: Image.Image, text: tuple[str, ...]) -> Image.Image:
    """Returns the image with black text on white below it, wrapped to the width of the image."""
    font = _font(image)
    canvas = ImageDraw.Draw(image)
    _, _, width, _ = canvas.textbbox((0, 0), "n" * 20, font=font)
    columns = max(8, round(20 * (image.width - 16) / width))
    lines = [line for part in text for line in textwrap.wrap(part, columns) or [""]]
    # The first wrap assumes a mean letter width. A line of wide letters is wrapped again.
    lines = [
        piece
        for line in lines
        for piece in (
            [line]
            if canvas.textbbox((0, 0), line, font=font)[2] <= image.width - 16
            else textwrap.wrap(line, max(4, columns * 2 // 3))
        )
    ]
    _, top, _, bottom = canvas.multiline_textbbox((0, 0), "\n".join(lines), font=font)
    taller = Image.new("RGB", (image.width, image.height + round(bottom - top) + 16), "white")
    taller.paste(image)
    ImageDraw.Draw(taller).multiline_text(
        (8, image.height + 8 - top), "\n".join(lines), fill="black", font=font
    )
    return taller


def _in_image(
    polygon: list[tuple[float, float]], box: Box, size: tuple[int, int]
) -> list[tuple[float, float]]:
    """Converts corners relative to the box to pixels of the image."""
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
