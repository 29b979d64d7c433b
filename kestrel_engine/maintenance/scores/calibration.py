"""Calibrates the scores of a model on labelled images: asks, judges, fits, and measures on held-out images."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...config.runtime import RuntimeConfig
from ...engine import InferenceEngine
from ...errors import ConfigError
from ...types.calibration import CURVES, Calibration, Curve, to_text
from ...types.progress import Progress
from .fit import Judged, calibration_error, fit
from .judged_results import collect, together
from .labelled_images import LabelledImage


@dataclass(frozen=True, slots=True)
class FittedCurve:
    """A curve fitted on all images, and how far scores are off: ``raw_error`` without it, ``error`` on held-out images:
    each half of the images is scored by a curve that is fitted on the other half."""

    curve: Curve
    count: int
    correct: float
    """The share of correct results."""
    raw_error: float
    error: float


@dataclass(frozen=True, slots=True)
class CalibrationReport:
    """The fitted curves by name. ``fingerprint``: of the weights."""

    model: str
    fingerprint: str
    num_images: int
    curves: dict[str, FittedCurve]

    @property
    def text(self) -> str:
        calibration = Calibration({name: fitted.curve for name, fitted in self.curves.items()})
        facts = {
            name: {
                "results": fitted.count,
                "correct": round(fitted.correct, 4),
                "raw_error": round(fitted.raw_error, 4),
                "error": round(fitted.error, 4),
            }
            for name, fitted in self.curves.items()
        }
        fitted_on = {"model": self.model, "images": self.num_images, "curves": facts}
        return to_text(calibration, self.fingerprint, fitted_on)


async def calibrate(
    config: RuntimeConfig,
    images: Sequence[LabelledImage],
    *,
    progress: Progress | None = None,
) -> CalibrationReport:
    """Loads the model, asks about all images, and fits the curves. ``progress``: also of finished images. Raises
    KestrelError; ConfigError if there are fewer than 2 images."""
    if len(images) < 2:
        raise ConfigError(
            "annotations", len(images), "needs at least 2 images, to fit and to measure"
        )
    raw = replace(config, calibration="off", min_score=0.0)
    async with await InferenceEngine.create(raw, progress=progress) as engine:
        results = await collect(engine, images, progress)
        info = engine.info
    order = list(range(len(results)))
    random.Random(0).shuffle(order)
    middle = len(order) // 2
    halves = [together([results[i] for i in part]) for part in (order[:middle], order[middle:])]
    curves = {name: _fitted(*(half.get(name, []) for half in halves)) for name in CURVES}
    return CalibrationReport(
        info.model,
        info.weights_fingerprint,
        len(images),
        {name: curve for name, curve in curves.items() if curve is not None},
    )


def _fitted(first: Sequence[Judged], second: Sequence[Judged]) -> FittedCurve | None:
    """The curve of two halves; None if a half has no result."""
    if not first or not second:
        return None
    held_out = [
        (curve(raw), correct)
        for curve, other in ((fit(first), second), (fit(second), first))
        for raw, correct in other
    ]
    every = [*first, *second]
    return FittedCurve(
        curve=fit(every),
        count=len(every),
        correct=sum(correct for _, correct in every) / len(every),
        raw_error=calibration_error(every),
        error=calibration_error(held_out),
    )
