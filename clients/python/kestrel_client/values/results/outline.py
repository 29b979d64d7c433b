"""The result of segment: outlines with their boxes and masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..._pb.kestrel.v1 import vision_service_pb2
from ...drawing.marks import Marks, Mask, Outline, labelled
from ...geometry import Box, DetectedBox, edges, from_box
from ...images.image_forms import ImageInput
from . import exports
from .objects import ObjectsResult, searched_fields

if TYPE_CHECKING:
    import PIL.Image
    import supervision


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The outline of an object."""

    label: str
    """The object's name, as in the call."""
    score: float
    """How sure the model is of the object, in [0, 1]."""
    box: Box
    """The bounding box of the object."""
    svg_path: str
    """SVG path data in coordinates relative to ``box``, from 0 to 1; empty if the model's path is unreadable."""
    mask: Mask | None = None
    """Set if a mask was requested and there is a path."""
    parse_error: str | None = None
    """Why the model's path is unreadable; None if it is readable."""
    coarse_path: str | None = None
    """The model's own path, relative to ``coarse_box``, if the server has refined the outline; else None."""
    coarse_box: Box | None = None

    @property
    def outline(self) -> Outline:
        """Path, box and mask together."""
        return Outline(self.svg_path, self.box, self.mask)

    @property
    def labelled_box(self) -> DetectedBox:
        """The box with label and score, as ``detect`` gives it."""
        return DetectedBox(*edges(self.box), self.label, self.score)

    def to_mask(self, size: tuple[int, int]) -> PIL.Image.Image:
        """Returns the outline as a Pillow image of mode "L": 255 inside, 0 outside.

        ``size``: width and height of the image in pixels. Raises MissingDependencyError without Pillow.
        """
        from ...drawing import paint

        return paint.mask_image([self.outline], size)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SegmentResult(ObjectsResult[Segment]):
    """The outlines of objects, at most one for each name. Iteration gives the segments."""

    segments: tuple[Segment, ...]
    """In the order of the names."""

    @property
    def svg_path(self) -> str:
        """The path of the first segment; empty if there is none."""
        return self.segments[0].svg_path if self.segments else ""

    @property
    def box(self) -> Box | None:
        """The box of the first segment; None if there is none."""
        return self.segments[0].box if self.segments else None

    @property
    def mask(self) -> Mask | None:
        """The mask of the first segment, if one was requested."""
        return self.segments[0].mask if self.segments else None

    @property
    def marks(self) -> Marks:
        """Outlines and boxes with their labels."""
        return Marks(
            outlines=tuple(each.outline for each in self.segments),
            boxes=labelled((each.box, each.label, each.score) for each in self.segments),
        )

    @property
    def _found(self) -> tuple[Segment, ...]:
        return self.segments

    def to_supervision(self) -> supervision.Detections:
        """Returns boxes and masks for the package ``supervision``.

        Raises MissingDependencyError without supervision or Pillow.
        """
        size = self.image_size
        boxes = [each.labelled_box for each in self.segments]
        masks = [each.to_mask(size) for each in self.segments]
        return exports.to_supervision(boxes, self.searches, size, masks)

    def to_coco(self, image_id: int = 1, category_id: int = 1) -> list[dict[str, Any]]:
        """Returns the outlines as COCO annotations with polygons in pixels. ``category_id``: as for DetectResult.

        Raises MissingDependencyError without Pillow.
        """
        names = exports.numbers(self.searches, category_id)
        outlines = [(each.labelled_box, each.outline) for each in self.segments]
        return exports.outlines_to_coco(outlines, names, self.image_size, image_id)

    def to_mask(self, size: tuple[int, int] | None = None) -> PIL.Image.Image:
        """Returns all outlines together as a Pillow image of mode "L": 255 inside, 0 outside.

        ``size``: width and height in pixels; default: those of the image. Raises MissingDependencyError without Pillow.
        """
        from ...drawing import paint

        return paint.mask_image((each.outline for each in self.segments), size or self.image_size)


def segment_result(
    response: vision_service_pb2.SegmentResponse, source: ImageInput | None
) -> SegmentResult:
    segments = tuple(map(_segment, response.detections))
    return SegmentResult(segments=segments, **searched_fields(response, source))


def _segment(message: vision_service_pb2.Detection) -> Segment:
    outline = message.outline
    coarse = outline.coarse if outline.HasField("coarse") else None
    return Segment(
        label=message.label,
        score=message.score,
        box=from_box(message.box),
        svg_path=outline.svg_path,
        mask=_mask(outline.mask),
        parse_error=outline.parse_error if outline.HasField("parse_error") else None,
        coarse_path=None if coarse is None else coarse.svg_path,
        coarse_box=None if coarse is None else from_box(coarse.box),
    )


def _mask(message: vision_service_pb2.Mask) -> Mask | None:
    encoding = message.WhichOneof("encoding")
    if encoding is None:
        return None
    return Mask(
        encoding,
        message.width,
        message.height,
        svg=message.svg,
        png=message.png,
        rle=tuple(message.rle.counts),
        polygons=tuple(tuple(each.coordinates) for each in message.polygons.polygons),
    )
