"""Calibration: from raw scores to the share of results with such a score that are right (docs/use/scores.md).

Owns the format of the file in which a calibration is stored.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ..errors import ConfigError

FILE_NAME = "score_calibration.json"
"""The name of the file beside the weights."""
FORMAT = 1
ABSENCE = "absence"
"""The curve of the probability that an image has no such object. The other curves have the names of skills."""
CURVES = ("point", "detect", "segment", ABSENCE)
MOST_POINTS = 1000


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve through points (``raw``, ``score``), which both never fall. It is straight between points, and constant
    before the first and after the last."""

    raw: tuple[float, ...]
    score: tuple[float, ...]

    def __call__(self, raw: float) -> float:
        after = bisect_right(self.raw, raw)
        if after == 0:
            return self.score[0]
        if after == len(self.raw):
            return self.score[-1]
        left, right = self.raw[after - 1], self.raw[after]
        low, high = self.score[after - 1], self.score[after]
        return low + (high - low) * (raw - left) / (right - left)


@dataclass(frozen=True, slots=True)
class Calibration:
    """The curves of a model, by name. A score without a curve stays raw."""

    curves: Mapping[str, Curve] = field(default_factory=dict)

    def score(self, name: str, raw: float) -> float:
        """Returns the calibrated score of a result of skill ``name`` whose raw score is ``raw``."""
        curve = self.curves.get(name)
        return raw if curve is None else curve(raw)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the curves, in the order of CURVES."""
        return tuple(name for name in CURVES if name in self.curves)


UNCALIBRATED = Calibration()


def to_text(calibration: Calibration, fingerprint: str, fitted: Mapping[str, Any]) -> str:
    """Returns the text of a calibration file. ``fingerprint``: of the weights. ``fitted``: facts for readers only."""
    curves = {
        name: [[raw, score] for raw, score in zip(curve.raw, curve.score, strict=True)]
        for name, curve in calibration.curves.items()
    }
    fields = {"format": FORMAT, "weights": fingerprint, "curves": curves, "fitted": fitted}
    return json.dumps(fields, indent=1) + "\n"


def from_text(text: str, path: str, fingerprint: str) -> Calibration:
    """Returns the calibration that ``text`` holds. Raises ConfigError, which names ``path``, if ``text`` is no valid
    calibration file or is for weights with another fingerprint."""

    def invalid(why: str) -> ConfigError:
        return ConfigError("calibration", path, why)

    try:
        fields = json.loads(text)
    except ValueError as error:
        raise invalid(f"is not JSON: {error}") from None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise invalid(f'is not a calibration of scores: needs "format": {FORMAT}')
    if fields.get("weights") != fingerprint:
        raise invalid(
            f"is for weights {fields.get('weights')!r}, but the model has {fingerprint!r}; "
            "fit it anew with 'kestrel-grpc calibrate', or set calibration to off"
        )
    curves = fields.get("curves")
    if not isinstance(curves, dict) or not set(curves) <= set(CURVES):
        raise invalid(f'"curves" must hold curves of {", ".join(CURVES)} only')
    found = {}
    for name, points in curves.items():
        curve = _curve(points)
        if curve is None:
            raise invalid(
                f"{name}: needs 1 to {MOST_POINTS} points [raw, score] in [0, 1]; raw must rise, and score must not "
                "fall"
            )
        found[name] = curve
    return Calibration(found)


def _curve(points: Any) -> Curve | None:
    """None if ``points`` is no valid curve."""
    if not isinstance(points, list) or not 1 <= len(points) <= MOST_POINTS:
        return None
    if not all(isinstance(point, list) and len(point) == 2 for point in points):
        return None
    raw, score = (tuple(each) for each in zip(*points, strict=True))
    if not all(_is_share(value) for value in (*raw, *score)):
        return None
    rises = all(a < b for a, b in pairwise(raw))
    never_falls = all(a <= b for a, b in pairwise(score))
    return Curve(raw, score) if rises and never_falls else None


def _is_share(value: Any) -> bool:
    # The comparison is false for NaN, which Python's JSON accepts.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1
