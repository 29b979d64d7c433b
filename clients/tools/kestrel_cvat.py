"""Kestrel as an auto-annotation function of CVAT: ``cvat-cli task auto-annotate --function-file``. docs/use/tools.md
shows its use."""

from __future__ import annotations

import os
from typing import Any

import cvat_sdk.auto_annotation as cvataa
import numpy as np
import PIL.Image
from cvat_sdk import models
from cvat_sdk.masks import encode_mask

from kestrel_client import DetectedBox, ImageSize, KestrelClient, Segment
from kestrel_client.drawing import paint

_SKILLS = {"rectangle": "detect", "points": "point", "polygon": "segment", "mask": "segment"}
_MOST_NAMES = 256
"""Objects that one call asks for. More take several calls."""


def create(
    labels: str = "",
    shape: str = "rectangle",
    server: str = "",
    tls: bool = False,
    timeout: float = 300.0,
) -> KestrelFunction:
    """Returns the function.

    ``labels``: the task's labels, separated by commas, such as ``car,person``. The model looks for the label's name, or
    for what stands behind an equals sign: ``Vehicle=car``. ``shape``: rectangle, points, polygon or mask. ``server``:
    address; default: the variable KESTREL_SERVER, or else 127.0.0.1:50051. The variable KESTREL_TOKEN may hold a token.
    ``timeout``: seconds that a call may take. Raises BadFunctionError.
    """
    if shape not in _SKILLS:
        raise cvataa.BadFunctionError(f"shape: must be one of {', '.join(_SKILLS)}, not {shape!r}")
    pairs = [part.partition("=") for part in labels.split(",") if part.strip()]
    names = {label.strip(): name.strip() or label.strip() for label, _, name in pairs}
    if not names or "" in names:
        raise cvataa.BadFunctionError(f"labels: must name labels, like car,person, not {labels!r}")
    client = KestrelClient(
        server or os.environ.get("KESTREL_SERVER", "127.0.0.1:50051"),
        tls=tls,
        token=os.environ.get("KESTREL_TOKEN") or os.environ.get("KESTREL_API_KEY"),
        timeout=timeout,
    )
    return KestrelFunction(client, names, shape)


class KestrelFunction:
    """``names``: what the model looks for, by label."""

    def __init__(self, client: KestrelClient, names: dict[str, str], shape: str) -> None:
        self._client, self._shape = client, shape
        self._labels: dict[str, list[int]] = {}
        for number, name in enumerate(names.values()):
            self._labels.setdefault(name, []).append(number)
        self.spec = cvataa.DetectionFunctionSpec(
            labels=[
                cvataa.label_spec(label, number, type=shape) for number, label in enumerate(names)
            ]
        )

    def detect(
        self, context: cvataa.DetectionFunctionContext, image: PIL.Image.Image
    ) -> list[models.LabeledShapeRequest]:
        """Raises the client's KestrelError."""
        is_mask = self._shape == "mask" and not context.conv_mask_to_poly
        look, names, shapes = getattr(self._client, _SKILLS[self._shape]), list(self._labels), []
        for start in range(0, len(names), _MOST_NAMES):
            part = names[start : start + _MOST_NAMES]
            result = look(image, part, min_score=context.conf_threshold)
            for error in result.errors.values():
                raise error
            for each in result:
                for label in self._labels[each.label]:
                    shapes += _shapes(label, each, result.image_size, is_mask)
        return shapes


def _shapes(
    label: int, found: Any, size: ImageSize, is_mask: bool
) -> list[models.LabeledShapeRequest]:
    """CVAT has pixels of the image, as fractions."""
    width, height = size
    if isinstance(found, DetectedBox):
        corners = [found.x_min * width, found.y_min * height]
        corners += [found.x_max * width, found.y_max * height]
        return [cvataa.rectangle(label, corners)]
    if not isinstance(found, Segment):
        return [cvataa.shape(label, type="points", points=[found.x * width, found.y * height])]
    if is_mask:
        inside = np.asarray(found.to_mask(size)) > 127
        return [cvataa.mask(label, encode_mask(inside))] if inside.any() else []
    return [
        cvataa.polygon(label, [edge for corner in part for edge in corner])
        for part in paint.corners(found.outline, size)
        if len(part) > 2
    ]
