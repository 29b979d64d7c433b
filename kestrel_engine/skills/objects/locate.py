"""The fixed cycle in which point and detect name objects (moondream.md section 7).

Decision and x come from one hidden state: any token but the end means "another object" and reads the coordinate head.
Then y is forced, for boxes the size too, and the next decision follows. The cycle does not depend on what is sampled,
so every rule is known in advance.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

from ...types.calibration import ABSENCE, UNCALIBRATED, Calibration
from ...types.events import FinishReason, StreamUpdate
from ...types.model_config import Family, ModelConfig, SpecialIds
from ...types.requests import Coord, Size
from ...types.step import StepToken, TokenRule
from ..base import SkillOutput
from .scores import raw_score, rounded


class LocateControl:
    """Ends on the end token ("stop") or at ``max_objects`` ("length"). The engine ends it at ``max_tokens``; an object
    that is not complete by then is left out."""

    def __init__(self, *, boxes: bool, max_objects: int, model: ModelConfig) -> None:
        self._eos = model.ids.eos_id
        self._cycle = 3 if boxes else 2
        self._max_tokens = self._cycle * max_objects
        self._num_accepted = 0
        self._first, self._next, self._y, self._size = _rules(model.family, model.ids)

    def rule(self, index: int) -> TokenRule:
        place = index % self._cycle
        if place == 0:
            return self._next if index else self._first
        return self._y if place == 1 else self._size

    def accept(self, token: StepToken) -> FinishReason | None:
        if self._num_accepted % self._cycle == 0 and token.id == self._eos:
            return "stop"
        self._num_accepted += 1
        return "length" if self._num_accepted == self._max_tokens else None


@lru_cache(maxsize=64)
def _rules(family: Family, ids: SpecialIds) -> tuple[TokenRule, TokenRule, TokenRule, TokenRule]:
    """The rules of the first decision, the later ones, y, and the size. All requests share them, because
    rule_check.py and the runtime read a rule once and then know it by its identity."""
    first = TokenRule(otherwise=ids.coord_id, stop=ids.eos_id, read_coord=True)
    # Moondream 2 decides over the whole vocabulary every time, Moondream 3 between these two after the first.
    both = TokenRule(allowed=(ids.coord_id, ids.eos_id), stop=ids.eos_id, read_coord=True)
    return (
        first,
        first if family == "moondream2" else both,
        TokenRule(forced=ids.coord_id, read_coord=True),
        TokenRule(forced=ids.size_id, read_size=True),
    )


class LocateOutput(SkillOutput):
    """Points, or boxes if a size follows. Each is returned when it is complete, with its ``score``.

    An object whose score is below ``min_score`` is dropped. It still counts towards the limit on objects.
    ``absence``: the probability that there is no such object, which the first decision gives; None if it is unknown.
    """

    def __init__(
        self,
        key: str,
        *,
        boxes: bool,
        min_score: float = 0.0,
        calibration: Calibration = UNCALIBRATED,
    ) -> None:
        self._key, self._boxes, self._min_score = key, boxes, min_score
        self._calibration, self._curve = calibration, "detect" if boxes else "point"
        self._absence: float | None = None
        self._ids: list[int] = []
        self._tokens: list[StepToken] = []
        """Tokens of the incomplete object."""
        self._objects: list[dict[str, float]] = []

    def push(self, token: StepToken) -> list[StreamUpdate]:
        if not self._ids and token.logprob is not None:
            self._set_absence(-math.expm1(token.logprob))
        self._ids.append(token.id)
        self._tokens.append(token)
        values = [each.value for each in self._tokens]
        match values:
            case [Coord(value=x), Coord(value=y)] if not self._boxes:
                return self._complete({"x": x, "y": y})
            case [Coord(value=x), Coord(value=y), Size(width=w, height=h)]:
                return self._complete(
                    {"x_min": x - w / 2, "y_min": y - h / 2, "x_max": x + w / 2, "y_max": y + h / 2}
                )
        assert all(isinstance(value, Coord) for value in values) and len(values) < 3, values
        return []

    def note_stop(self, token: StepToken) -> None:
        if not self._ids and token.logprob is not None:
            self._set_absence(math.exp(token.logprob))

    def finish(self) -> list[StreamUpdate]:
        return []

    def output(self) -> dict[str, Any]:
        return {self._key: list(self._objects)}

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._ids)

    @property
    def absence(self) -> float | None:
        return self._absence

    def _complete(self, found: dict[str, float]) -> list[StreamUpdate]:
        tokens, self._tokens = self._tokens, []
        raw = raw_score(tokens)
        if raw is not None:
            score = rounded(self._calibration.score(self._curve, raw))
            if score < self._min_score:
                return []
            found["score"] = score
        self._objects.append(found)
        return [StreamUpdate(object=found)]

    def _set_absence(self, raw: float) -> None:
        # Rounding may give a little more than 1.
        self._absence = self._calibration.score(ABSENCE, min(max(raw, 0.0), 1.0))
