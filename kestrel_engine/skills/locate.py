"""LocateState: the fixed cycle in which point and detect name objects (moondream.md section 7).

Decision and x come from one hidden state: any token but the end means "another object" and reads the coordinate head.
Then y is forced, for boxes the size too, and the next decision follows.
"""

from __future__ import annotations

from typing import Any

from ..events import FinishReason, StreamUpdate
from ..model_config import ModelConfig
from ..requests import Coord, Size
from ..step import StepToken, TokenRule
from .base import Advance


class LocateState:
    """Emits each point or box when it is complete; ends on the end token ("stop") or at ``max_objects`` ("length")."""

    def __init__(self, key: str, *, boxes: bool, max_objects: int, model: ModelConfig) -> None:
        ids = model.ids
        self._key, self._boxes, self._max_objects = key, boxes, max_objects
        self._eos = ids.eos_id
        self._first = TokenRule(otherwise=ids.coord_id, stop=ids.eos_id, read_coord=True)
        # Moondream 2 decides over the whole vocabulary every time, Moondream 3 between these two after the first.
        self._next = (
            self._first
            if model.family == "moondream2"
            else TokenRule(allowed=(ids.coord_id, ids.eos_id), stop=ids.eos_id, read_coord=True)
        )
        self._y = TokenRule(forced=ids.coord_id, read_coord=True)
        self._size = TokenRule(forced=ids.size_id, read_size=True)
        self._ids: list[int] = []
        self._coordinates: list[float] = []
        self._objects: list[dict[str, float]] = []

    def rule(self) -> TokenRule:
        if len(self._coordinates) == 1:
            return self._y
        if len(self._coordinates) == 2:
            return self._size
        return self._next if self._objects else self._first

    def consume(self, token: StepToken) -> Advance:
        if not self._coordinates and token.id == self._eos:
            return Advance(finish="stop")
        self._ids.append(token.id)
        if isinstance(token.value, Coord):
            self._coordinates.append(token.value.value)
            if self._boxes or len(self._coordinates) < 2:
                return Advance()
            x, y = self._coordinates
            return self._complete({"x": x, "y": y})
        assert isinstance(token.value, Size), f"no value came with id {token.id}"
        x, y = self._coordinates
        w, h = token.value.width, token.value.height
        return self._complete(
            {"x_min": x - w / 2, "y_min": y - h / 2, "x_max": x + w / 2, "y_max": y + h / 2}
        )

    def stop_at_limit(self) -> Advance:
        return Advance(finish="length")

    def output(self) -> dict[str, Any]:
        return {self._key: list(self._objects)}

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._ids)

    def _complete(self, found: dict[str, float]) -> Advance:
        self._objects.append(found)
        self._coordinates = []
        finish: FinishReason | None = "length" if len(self._objects) == self._max_objects else None
        return Advance([StreamUpdate(object=found)], finish)
