"""Segment: a box and an SVG path around one object (Moondream 3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..errors import InvalidRequest, SkillUnavailable
from ..types.events import FinishReason, StreamUpdate
from ..types.model_config import ModelConfig
from ..types.requests import Coord, Outline, Size, check_spatial_refs, spatial_tokens
from ..types.step import StepToken, TokenRule
from .base import SkillContext, SkillControl, SkillOutput, SkillRequest, checked_text
from .declaration import (
    FLAG,
    SCORE_SETTINGS,
    SPATIAL_REFS,
    TEXT,
    names_of,
    object_schema,
    settings_schema,
)
from .objects.outline import OutlineOutput
from .objects.scores import raw_score, rounded
from .objects.svg_path import PathError, SvgPathDecoder
from .settings import read_settings, reject_unknown

LAST_NON_TEXT_ID = 20
"""Ids up to here are no part of a path (moondream.md section 9.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRequest(SkillRequest):
    """``object``: its name. ``min_score``: the least score of a box whose outline is returned. ``refines``: whether the
    engine's refiner sharpens the outline."""

    object: str
    min_score: float
    refines: bool

    @property
    def pixels_field(self) -> str | None:
        return "refine" if self.refines else None


class SegmentSkill:
    """Arguments: object, spatial_refs, refine. Output: {"segments": [one]} (moondream.md section 9.7), with its
    "score".

    ``refine``: None refines the outline if the engine has a refiner, False does not, and True needs a refiner.
    """

    name = "segment"
    description = "Outlines an object."
    arguments = object_schema(
        {"object": TEXT, "spatial_refs": SPATIAL_REFS, "refine": FLAG}, required=("object",)
    )
    settings = settings_schema(SCORE_SETTINGS)

    def can_run(self, model: ModelConfig) -> bool:
        return model.templates.segment_prefix is not None

    def build(
        self, arguments: Mapping[str, Any], settings: Mapping[str, Any], context: SkillContext
    ) -> SegmentRequest:
        reject_unknown(arguments, names_of(self.arguments))
        templates = context.model.templates
        if templates.segment_prefix is None:
            raise SkillUnavailable("segment", "this model can't segment; Moondream 3 models can")
        text = checked_text("object", arguments.get("object"), context)
        refs = check_spatial_refs(arguments.get("spatial_refs"))
        refine = _checked_refine(arguments.get("refine"), context)
        read = read_settings(settings, context.defaults, greedy=True, extra=names_of(self.settings))
        return SegmentRequest(
            skill=self.name,
            prompt_field="object",
            prompt_suffix=(
                *templates.segment_prefix,
                *spatial_tokens(refs),
                *context.codec.encode(text),
                *templates.segment_suffix,
            ),
            sampling=read.sampling,
            max_tokens=read.max_tokens,
            object=text,
            min_score=read.min_score,
            refines=refine,
        )

    def new_control(
        self, request: SegmentRequest, max_tokens: int, context: SkillContext
    ) -> SkillControl:
        return SegmentControl(context)

    def new_output(self, request: SegmentRequest, context: SkillContext) -> SkillOutput:
        return SegmentOutput(
            request.object, context, min_score=request.min_score, refines=request.refines
        )


class SegmentControl:
    """Coordinates, sizes and path tokens in whatever order they come, up to the end token; nothing is enforced."""

    def __init__(self, context: SkillContext) -> None:
        self._eos = context.model.ids.eos_id
        self._rule = _rule(self._eos)

    def rule(self, index: int) -> TokenRule:
        return self._rule

    def accept(self, token: StepToken) -> FinishReason | None:
        return "stop" if token.id == self._eos else None


@lru_cache(maxsize=64)
def _rule(eos_id: int) -> TokenRule:
    """The rule of every token. All requests share it, as those of objects (locate.py)."""
    return TokenRule(stop=eos_id, read_coord=True, read_size=True)


class SegmentOutput(OutlineOutput):
    """The box is streamed first, then the coarse path command by command; pieces are held back until the box is there.
    After a parse error the final path is empty and ``parse_error`` says why, whatever was streamed before. A refined
    outline is not streamed: the result has it as ``svg_path`` and ``bbox``.

    The score is that of the box. If it is below ``min_score``, the request ends at the box, and the result has the
    score, but neither box nor path.
    """

    def __init__(
        self, name: str, context: SkillContext, *, min_score: float = 0.0, refines: bool = False
    ) -> None:
        self.refines = refines
        self._name, self._codec, self._min_score = name, context.codec, min_score
        self._calibration = context.calibration
        self._ids: list[int] = []
        self._placing: list[StepToken] = []
        """The tokens that determine the box: two coordinates and a size."""
        self._score: float | None = None
        self._is_dropped = False
        self._coordinates: list[float] = []
        self._sizes: list[Size] = []
        self._path_tokens: list[str] = []
        self._decoder = SvgPathDecoder()
        self._error: str | None = None
        self._box: dict[str, float] | None = None
        self._held: list[StreamUpdate] = []
        self._refined: Outline | None = None

    def push(self, token: StepToken) -> list[StreamUpdate]:
        self._ids.append(token.id)
        if isinstance(token.value, Coord):
            if len(self._coordinates) < 2:
                self._placing.append(token)
            self._coordinates.append(_clamp(token.value.value))
            return self._box_updates()
        if isinstance(token.value, Size):
            if not self._sizes:
                self._placing.append(token)
            self._sizes.append(Size(_clamp(token.value.width), _clamp(token.value.height)))
            return self._box_updates()
        text = "" if token.id <= LAST_NON_TEXT_ID else self._codec.decode([token.id]).strip()
        if not text:
            return []
        self._path_tokens.append(text)
        if self._error is not None:
            return []
        try:
            return self._path_updates(self._decoder.push(text))
        except PathError as error:
            self._error = str(error)
            return []

    def finish(self) -> list[StreamUpdate]:
        if self._is_dropped:
            return []
        updates = [] if self._error is not None else self._path_updates(self._decoder.finish())
        held, self._held = self._held, []
        return [*held, *updates]

    @property
    def is_complete(self) -> bool:
        return self._is_dropped

    @property
    def outline(self) -> Outline | None:
        if self._error is not None or self._box is None or not self._decoder.path:
            return None
        box = self._box
        edges = box["x_min"], box["y_min"], box["x_max"], box["y_max"]
        return Outline(self._decoder.path, edges)

    def set_outline(self, outline: Outline) -> None:
        self._refined = outline

    def output(self) -> dict[str, Any]:
        if self._is_dropped:
            return {"segments": [{"object": self._name, "svg_path": "", "score": self._score}]}
        path = "" if self._error is not None else self._decoder.path
        pairs = zip(self._coordinates[::2], self._coordinates[1::2], strict=False)
        segment: dict[str, Any] = {
            "object": self._name,
            "text": self._codec.decode([i for i in self._ids if i > LAST_NON_TEXT_ID]),
            "svg_path": path,
            "path_tokens": list(self._path_tokens),
            "token_ids": list(self._ids),
            "points": [{"x": x, "y": y} for x, y in pairs],
            "coarse_path": path,
        }
        if self._box is not None:
            segment["bbox"] = dict(self._box)
            segment["coarse_bbox"] = dict(self._box)
        if self._score is not None:
            segment["score"] = self._score
        if self._refined is not None:
            segment["svg_path"], box = self._refined
            segment["bbox"] |= dict(zip(("x_min", "y_min", "x_max", "y_max"), box, strict=True))
        segment["refined"] = self._refined is not None
        if self._sizes:
            segment["sizes"] = [{"width": s.width, "height": s.height} for s in self._sizes]
        if self._error is not None:
            segment["parse_error"] = self._error
        return {"segments": [segment]}

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(self._ids)

    def _box_updates(self) -> list[StreamUpdate]:
        if self._box is not None or len(self._coordinates) < 2 or not self._sizes:
            return []
        raw = raw_score(self._placing)
        if raw is not None:
            self._score = rounded(self._calibration.score("segment", raw))
        if self._score is not None and self._score < self._min_score:
            self._is_dropped, self._held = True, []
            return []
        (x, y), size = self._coordinates[:2], self._sizes[0]
        self._box = {
            "x_min": _clamp(x - size.width / 2),
            "y_min": _clamp(y - size.height / 2),
            "x_max": _clamp(x + size.width / 2),
            "y_max": _clamp(y + size.height / 2),
        }
        if self._score is not None:
            self._box["score"] = self._score
        held, self._held = self._held, []
        return [StreamUpdate(object=self._box), *held]

    def _path_updates(self, piece: str) -> list[StreamUpdate]:
        if not piece:
            return []
        update = StreamUpdate(path=piece)
        if self._box is None:
            self._held.append(update)
            return []
        return [update]


def _checked_refine(value: object, context: SkillContext) -> bool:
    if value is None:
        return context.refines
    if not isinstance(value, bool):
        raise InvalidRequest("refine", f"{value!r} is not true, false or absent")
    if value and not context.refines:
        raise SkillUnavailable(
            "refine",
            "this server has no refiner for its model; set refine to false or leave it out",
        )
    return value


def _clamp(value: float) -> float:
    return min(1.0, max(0.0, value))
