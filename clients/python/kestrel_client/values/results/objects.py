"""The results of point and detect: one list of the objects of all names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ..._pb.kestrel.v1 import vision_service_pb2
from ...drawing.marks import Marks, labelled
from ...errors import RpcError
from ...geometry import DetectedBox, DetectedPoint, to_detected_box, to_detected_point
from ...images.image_forms import ImageInput
from . import exports
from .base import ImageResult, common_fields, read_finish_reasons, shortened, shown_scores
from .searches import ObjectSearch, read_search

if TYPE_CHECKING:
    import pandas
    import supervision


class ResultObject(Protocol):
    """What a result of objects has of each."""

    @property
    def label(self) -> str: ...
    @property
    def score(self) -> float: ...


F = TypeVar("F", bound=ResultObject)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ObjectsResult(ImageResult, Generic[F]):
    """What the results of ``point``, ``detect`` and ``segment`` share. Iteration gives what was found."""

    searches: tuple[ObjectSearch, ...] = ()
    """One for each name of the call, in order."""

    @property
    def absences(self) -> dict[str, float]:
        """By name, the probability that the image has no such object, in [0, 1]."""
        return {each.object: each.absence for each in self.searches if each.absence is not None}

    @property
    def errors(self) -> dict[str, RpcError]:
        """By name, the errors of the searches that failed."""
        return {each.object: each.error for each in self.searches if each.error is not None}

    @property
    def _found(self) -> tuple[F, ...]:
        raise AssertionError

    def __iter__(self) -> Iterator[F]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        counts = Counter(each.label for each in self._found)
        names = dict.fromkeys([each.object for each in self.searches] + list(counts))
        shown = ", ".join(f"{counts[name]} x {name!r}" for name in names) or "0 objects"
        return self._short(shortened(shown) + shown_scores([each.score for each in self._found]))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PointResult(ObjectsResult[DetectedPoint]):
    """The centres of objects. Iteration gives the points."""

    points: tuple[DetectedPoint, ...]
    """In the order of the names, and for each name in the order in which the model found them."""

    @property
    def marks(self) -> Marks:
        """The points."""
        return Marks(points=self.points)

    @property
    def _found(self) -> tuple[DetectedPoint, ...]:
        return self.points

    def to_supervision(self) -> supervision.KeyPoints:
        """Returns the points in pixels for the package ``supervision`` (0.29 or later): each is an object with one key
        point. ``keypoint_confidence`` has the scores, and ``data["class_name"]`` the labels.

        Raises MissingDependencyError without supervision.
        """
        return exports.points_to_supervision(self.points, self.searches, self.image_size)

    def to_frame(self) -> pandas.DataFrame:
        """Returns a pandas DataFrame with a row per point: label, x, y, score, x_px, y_px.

        Raises MissingDependencyError without pandas.
        """
        return exports.points_frame(self.points, self.image_size)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class DetectResult(ObjectsResult[DetectedBox]):
    """The bounding boxes of objects. Iteration gives the boxes."""

    objects: tuple[DetectedBox, ...]
    """In the order of the names, and for each name in the order in which the model found them."""

    @property
    def marks(self) -> Marks:
        """The boxes with their labels."""
        return Marks(boxes=labelled((each, each.label, each.score) for each in self.objects))

    @property
    def _found(self) -> tuple[DetectedBox, ...]:
        return self.objects

    def to_supervision(self) -> supervision.Detections:
        """Returns the boxes in pixels for the package ``supervision``. ``confidence`` has the scores, and
        ``data["class_name"]`` the labels.

        Raises MissingDependencyError without supervision.
        """
        return exports.to_supervision(self.objects, self.searches, self.image_size)

    def to_coco(self, image_id: int = 1, category_id: int = 1) -> list[dict[str, Any]]:
        """Returns a COCO annotation for each box, with ids from 1, ``bbox`` [x, y, width, height] in pixels, and
        ``score``, as COCO's tools read it in results. ``category_id``: of the first name; the next name has the next
        number."""
        names = exports.numbers(self.searches, category_id)
        return exports.to_coco(self.objects, names, self.image_size, image_id)

    def to_frame(self) -> pandas.DataFrame:
        """Returns a pandas DataFrame with a row per box: label, edges, score, and the edges in pixels.

        Raises MissingDependencyError without pandas.
        """
        return exports.boxes_frame(self.objects, self.image_size)


def point_result(
    response: vision_service_pb2.PointResponse, source: ImageInput | None
) -> PointResult:
    points = tuple(map(to_detected_point, response.detections))
    return PointResult(points=points, **searched_fields(response, source))


def detect_result(
    response: vision_service_pb2.DetectResponse, source: ImageInput | None
) -> DetectResult:
    objects = tuple(map(to_detected_box, response.detections))
    return DetectResult(objects=objects, **searched_fields(response, source))


def searched_fields(response: Any, source: ImageInput | None) -> dict[str, Any]:
    """The fields of ObjectsResult, from the response of its skill."""
    return {
        "searches": tuple(map(read_search, response.searches)),
        "finish_reason": read_finish_reasons(each.finish_reason for each in response.searches),
        **common_fields(response, source),
    }
