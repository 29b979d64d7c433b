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

from kestrel_client import (
    DetectResult,
    DetectTask,
    ImageSize,
    KestrelClient,
    PointResult,
    PointTask,
    SegmentResult,
    SegmentTask,
)
from kestrel_client.drawing import paint

_TASKS = {
    "rectangle": DetectTask,
    "points": PointTask,
    "polygon": SegmentTask,
    "mask": SegmentTask,
}
_MOST_TASKS = 32
"""Labels that one call asks for. More take several calls."""


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
    if shape not in _TASKS:
        raise cvataa.BadFunctionError(f"shape: must be one of {', '.join(_TASKS)}, not {shape!r}")
    pairs = [part.partition("=") for part in labels.split(",") if part.strip()]
    names = {label.strip(): asked.strip() or label.strip() for label, _, asked in pairs}
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
        self._client, self._asked, self._shape = client, list(names.values()), shape
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
        shapes = []
        for start in range(0, len(self._asked), _MOST_TASKS):
            asked = self._asked[start : start + _MOST_TASKS]
            task = _TASKS[self._shape]
            tasks = [task(name, min_score=context.conf_threshold) for name in asked]
            answered = self._client.analyze(image, tasks)
            for number in range(len(asked)):
                result = answered[number]
                shapes += _shapes(start + number, result, answered.image_size, is_mask)
        return shapes


def _shapes(
    label: int, result: Any, size: ImageSize, is_mask: bool
) -> list[models.LabeledShapeRequest]:
    """CVAT has pixels of the image, as fractions."""
    match result:
        case DetectResult():
            return [
                cvataa.rectangle(
                    label,
                    [
                        box.x_min * size.width,
                        box.y_min * size.height,
                        box.x_max * size.width,
                        box.y_max * size.height,
                    ],
                )
                for box in result
            ]
        case PointResult():
            return [
                cvataa.shape(label, type="points", points=[p.x * size.width, p.y * size.height])
                for p in result
            ]
        case SegmentResult() if is_mask:
            inside = np.asarray(result.to_mask(size)) > 127
            return [cvataa.mask(label, encode_mask(inside))] if inside.any() else []
    return [
        cvataa.polygon(label, [edge for corner in part for edge in corner])
        for segment in result
        for part in paint.corners(segment.outline, size)
        if len(part) > 2
    ]
