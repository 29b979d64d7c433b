"""The results of point and detect."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..._pb.kestrel.v1 import vision_service_pb2
from ...drawing.marks import Marks, labelled
from ...geometry import Box, Point, from_box, from_point
from ...images.images import ImageInput
from .base import Result, common_fields, shown_scores

if TYPE_CHECKING:
    import pandas
    import supervision


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PointResult(Result):
    """The centres of objects. Iteration gives the points. ``object``: the kind of object of the call."""

    object: str
    points: tuple[Point, ...]
    absence: float | None = None
    """The probability that the image has no such object, in [0, 1]; None from a server that does not give it."""

    @property
    def marks(self) -> Marks:
        return Marks(points=self.points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    def __len__(self) -> int:
        return len(self.points)

    def __repr__(self) -> str:
        return self._short(f"{len(self.points)} x {self.object!r}{shown_scores(self.points)}")

    def to_supervision(self) -> supervision.KeyPoints:
        """Returns the points in pixels for the package ``supervision`` (0.29 or later): each is an object with one key
        point. ``keypoint_confidence`` has the scores, and ``data["class_name"]`` the object.

        Raises MissingDependencyError without supervision.
        """
        from . import exports

        size = exports.size_of(self.image_size)
        return exports.points_to_supervision(self.object, self.points, size)

    def to_frame(self) -> pandas.DataFrame:
        """Returns a pandas DataFrame with a row per point: object, x, y, score, and x_px, y_px if the image's size is
        known.

        Raises MissingDependencyError without pandas.
        """
        from . import exports

        return exports.points_frame(self.object, self.points, self.image_size)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DetectResult(Result):
    """The bounding boxes of objects. Iteration gives the boxes. ``object``: the kind of object of the call."""

    object: str
    objects: tuple[Box, ...]
    absence: float | None = None
    """The probability that the image has no such object, in [0, 1]; None from a server that does not give it."""

    @property
    def marks(self) -> Marks:
        return Marks(boxes=labelled(self.objects, self.object))

    def __iter__(self) -> Iterator[Box]:
        return iter(self.objects)

    def __len__(self) -> int:
        return len(self.objects)

    def __repr__(self) -> str:
        return self._short(f"{len(self.objects)} x {self.object!r}{shown_scores(self.objects)}")

    def to_supervision(self) -> supervision.Detections:
        """Returns the boxes in pixels for the package ``supervision``. ``confidence`` has the scores, and
        ``data["class_name"]`` the object.

        Raises MissingDependencyError without supervision.
        """
        from . import exports

        return exports.to_supervision(self.object, self.objects, exports.size_of(self.image_size))

    def to_coco(self, image_id: int = 1, category_id: int = 1) -> list[dict[str, Any]]:
        """Returns a COCO annotation for each box, with ids from 1, ``bbox`` [x, y, width, height] in pixels, and
        ``score``, as COCO's tools read it in results."""
        from . import exports

        size = exports.size_of(self.image_size)
        return exports.to_coco(self.objects, size, image_id, category_id)

    def to_frame(self) -> pandas.DataFrame:
        """Returns a pandas DataFrame with a row per box: object, edges, score, and the edges in pixels if the image's
        size is known.

        Raises MissingDependencyError without pandas.
        """
        from . import exports

        return exports.boxes_frame(self.object, self.objects, self.image_size)


def point_result(
    response: vision_service_pb2.PointResponse, source: ImageInput | None, object: str
) -> PointResult:
    points = tuple(map(from_point, response.points))
    return PointResult(
        object=object, points=points, absence=_absence(response), **common_fields(response, source)
    )


def detect_result(
    response: vision_service_pb2.DetectResponse, source: ImageInput | None, object: str
) -> DetectResult:
    boxes = tuple(map(from_box, response.objects))
    return DetectResult(
        object=object, objects=boxes, absence=_absence(response), **common_fields(response, source)
    )


def _absence(
    response: vision_service_pb2.PointResponse | vision_service_pb2.DetectResponse,
) -> float | None:
    return response.absence if response.HasField("absence") else None
