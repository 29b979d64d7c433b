"""The result of segment: an outline, its box and its mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..._pb.kestrel.v1 import vision_service_pb2
from ...drawing.marks import Marks, Mask, Outline, labelled
from ...geometry import Box, from_box, read_score
from ...images.images import ImageInput
from .base import Result, common_fields, shown_scores

if TYPE_CHECKING:
    import PIL.Image
    import supervision


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SegmentResult(Result):
    """The outline of an object. ``object``: the object of the call."""

    object: str
    svg_path: str
    """SVG path data in coordinates relative to ``box``, from 0 to 1; empty if the model found no object."""
    box: Box | None
    mask: Mask | None = None
    """Set if a mask was requested and there is an outline."""
    score: float | None = None
    """How sure the model is of the object, in [0, 1]; None if it gave no box. Set for an outline below ``min_score``
    too, which has neither box nor path."""
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
    def marks(self) -> Marks:
        boxes = () if self.box is None else labelled((self.box,), self.object)
        return Marks(outline=self.outline, boxes=boxes)

    def __repr__(self) -> str:
        found = (
            f"{self.object!r}{shown_scores((self.box,))}"
            if self.svg_path
            else f"no {self.object!r}"
        )
        return self._short(found)

    def to_supervision(self) -> supervision.Detections:
        """Returns box and mask for the package ``supervision``.

        Raises MissingDependencyError without supervision or Pillow.
        """
        from . import exports

        size = exports.size_of(self.image_size)
        boxes = () if self.box is None else (self.box,)
        return exports.to_supervision(self.object, boxes, size, self.to_mask(size))

    def to_coco(self, image_id: int = 1, category_id: int = 1) -> list[dict[str, Any]]:
        """Returns the outline as a COCO annotation with polygons in pixels, or an empty list if there is no outline.

        Raises MissingDependencyError without Pillow.
        """
        from . import exports

        size = exports.size_of(self.image_size)
        return exports.outline_to_coco(self.outline, size, image_id, category_id)

    def to_mask(self, size: tuple[int, int] | None = None) -> PIL.Image.Image:
        """Returns the outline as a Pillow image of mode "L": 255 inside, 0 outside.

        ``size``: width and height in pixels; default: those of the image. Raises MissingDependencyError without Pillow.
        """
        from ...drawing import paint

        return paint.mask_image(self.outline, size or self.image_size or (0, 0))


def segment_result(
    response: vision_service_pb2.SegmentResponse, source: ImageInput | None, object: str
) -> SegmentResult:
    return SegmentResult(
        object=object,
        svg_path=response.svg_path,
        box=from_box(response.box) if response.HasField("box") else None,
        score=read_score(response),
        mask=_mask(response.mask) if response.HasField("mask") else None,
        parse_error=response.parse_error if response.HasField("parse_error") else None,
        coarse_path=response.coarse_path if response.HasField("coarse_path") else None,
        coarse_box=from_box(response.coarse_box) if response.HasField("coarse_box") else None,
        **common_fields(response, source),
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
