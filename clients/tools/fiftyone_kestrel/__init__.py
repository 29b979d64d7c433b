"""Kestrel's skills as models of FiftyOne's zoo. docs/use/tools.md shows their use.

FiftyOne copies this folder and imports this file alone. The model itself stays on the server, so nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import fiftyone as fo
import fiftyone.core.models as fom
import numpy as np

from kestrel_client import DetectedBox, DetectedPoint, ImageSize, KestrelClient, Segment
from kestrel_client.drawing import paint

_SKILLS = ("detect", "point", "segment", "caption", "query")
_MOST_NAMES = 256
"""Objects that one call asks for. More take several calls."""


def download_model(model_name: str, model_path: str) -> None:
    """Writes the file by which FiftyOne knows that a model is at hand."""
    with open(model_path, "w", encoding="utf-8") as file:
        file.write("{}")


def load_model(model_name: str, model_path: str, **settings: Any) -> KestrelModel:
    """Returns the model. ``settings``: the fields of ``Settings``. Raises ValueError."""
    skill = model_name.removeprefix("kestrel-")
    if skill not in _SKILLS:
        raise ValueError(f"{model_name}: is no model of this source")
    return KestrelModel(Settings(skill, **settings))


@dataclass
class Settings:
    """What a model is asked, and where."""

    skill: str
    server: str = field(default_factory=lambda: os.environ.get("KESTREL_SERVER", "127.0.0.1:50051"))
    tls: bool = False
    timeout: float = 300.0
    """Seconds that a call may take."""
    objects: Sequence[str] = ()
    """For detect, point and segment: the names of the objects."""
    question: str = ""
    """For query."""
    length: str = "normal"
    """For caption: short, normal or long."""
    outlines: str = "masks"
    """For segment: masks gives Detections, polylines gives Polylines."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the call, such as temperature and max_tokens."""
    concurrency: int = 8
    """Images of a batch that are in flight at the same time."""
    confidence_thresh: float | None = None
    """The lowest score of a result. ``apply_model`` sets it."""
    filter_classes: Iterable[str] | None = None
    """Objects that replace ``objects``. ``apply_model`` sets it from ``classes``."""

    def __post_init__(self) -> None:
        if isinstance(self.objects, str):
            self.objects = [self.objects]
        if self.outlines not in ("masks", "polylines"):
            raise ValueError(f"outlines: must be masks or polylines, not {self.outlines!r}")
        if not 1 <= self.concurrency <= 256:
            raise ValueError(f"concurrency: must be from 1 to 256, not {self.concurrency}")

    @property
    def names(self) -> list[str]:
        """The names of the objects. Raises ValueError if there are none."""
        names = self.objects if self.filter_classes is None else sorted(self.filter_classes)
        if not names:
            raise ValueError(f"objects: {self.skill} needs the names of objects, like ['car']")
        return list(dict.fromkeys(names))


class KestrelModel(fom.SamplesMixin, fom.Model):  # type: ignore[misc]  # FiftyOne has no types
    """A skill of a server. ``apply_model(model, prompt_field="FIELD")`` reads objects or question from a field of each
    sample."""

    media_type = "image"
    ragged_batches = False  # Batches may hold images of several sizes.
    transforms = None
    preprocess = False

    def __init__(self, settings: Settings) -> None:
        fom.SamplesMixin.__init__(self)
        self.config = settings
        self._client = KestrelClient(
            settings.server,
            tls=settings.tls,
            token=os.environ.get("KESTREL_TOKEN") or os.environ.get("KESTREL_API_KEY"),
            timeout=settings.timeout,
        )

    def predict(self, arg: np.ndarray, sample: Any = None) -> fo.Label:
        """``arg``: pixels, uint8 [height, width, channels]. Raises the client's KestrelError."""
        image, settings = _source(arg, sample), self.config
        prompt = self._prompt(sample)
        match settings.skill:
            case "caption":
                return fo.Classification(
                    label=self._client.caption(image, settings.length, **settings.options).caption
                )
            case "query":
                question = settings.question if prompt is None else str(prompt)
                if not question:
                    raise ValueError("question: query needs a question")
                answered = self._client.query(image, question, **settings.options)
                return fo.Classification(label=answered.answer)
        if prompt is None:
            names = settings.names
        else:
            names = [prompt] if isinstance(prompt, str) else list(dict.fromkeys(prompt))
        return self._label(*self._found(image, names))

    def predict_all(self, args: Iterable[Any], samples: Iterable[Any] | None = None) -> list[Any]:
        """In the order of ``args``, several at the same time."""
        args = list(args)
        given = [None] * len(args) if samples is None else list(samples)
        with ThreadPoolExecutor(self.config.concurrency) as pool:
            return list(pool.map(self.predict, args, given))

    def _prompt(self, sample: Any) -> Any:
        """What the sample's own field asks; None if no field is named or the field is empty."""
        name = self.needs_fields.get("prompt_field")
        return None if name is None or sample is None else sample.get_field(name) or None

    def _found(self, image: Any, names: list[str]) -> tuple[list[Any], ImageSize]:
        """What the model finds, in the order of the names, and the image's size."""
        settings = self.config
        options = {"min_score": settings.confidence_thresh, **settings.options}
        found: list[Any] = []
        for start in range(0, len(names), _MOST_NAMES):
            look = getattr(self._client, settings.skill)
            result = look(image, names[start : start + _MOST_NAMES], **options)
            for error in result.errors.values():
                raise error
            found += result
        return found, result.image_size

    def _label(self, found: list[Any], size: ImageSize) -> fo.Label:
        match self.config.skill, self.config.outlines:
            case "detect", _:
                return fo.Detections(detections=[_box(each) for each in found])
            case "point", _:
                by_name: dict[str, list[DetectedPoint]] = {}
                for point in found:
                    by_name.setdefault(point.label, []).append(point)
                return fo.Keypoints(keypoints=[_points(n, each) for n, each in by_name.items()])
            case _, "masks":
                masks = (_mask(segment, size) for segment in found)
                return fo.Detections(detections=[each for each in masks if each is not None])
        return fo.Polylines(
            polylines=[_outline(segment, size) for segment in found if segment.svg_path]
        )


def _source(pixels: np.ndarray, sample: Any) -> Any:
    """The sample's file, so that the server decodes what the camera wrote. A frame of a video has its pixels only."""
    path = getattr(sample, "filepath", None)
    if path and getattr(sample, "media_type", None) == "image" and os.path.isfile(path):
        return path
    return pixels


def _box(box: DetectedBox) -> fo.Detection:
    edges = [box.x_min, box.y_min, box.width, box.height]
    return fo.Detection(label=box.label, bounding_box=edges, confidence=box.score)


def _points(name: str, points: list[DetectedPoint]) -> fo.Keypoint:
    return fo.Keypoint(
        label=name,
        points=[(point.x, point.y) for point in points],
        confidence=[point.score for point in points],
    )


def _mask(segment: Segment, size: ImageSize) -> fo.Detection | None:
    """FiftyOne's mask covers the box only. So the box is that of whole pixels around the mask."""
    width, height = size
    inside = np.asarray(segment.to_mask(size)) > 127
    rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
    if not len(rows):
        return None
    (top, bottom), (left, right) = rows[[0, -1]] + [0, 1], columns[[0, -1]] + [0, 1]
    sides = [left / width, top / height, (right - left) / width, (bottom - top) / height]
    return fo.Detection(
        label=segment.label,
        bounding_box=[float(side) for side in sides],
        mask=inside[top:bottom, left:right],
        confidence=segment.score,
    )


def _outline(segment: Segment, size: ImageSize) -> fo.Polyline:
    width, height = size
    parts = paint.corners(segment.outline, size)
    return fo.Polyline(
        label=segment.label,
        points=[[(x / width, y / height) for x, y in part] for part in parts],
        confidence=segment.score,
        closed=True,
        filled=True,
    )
