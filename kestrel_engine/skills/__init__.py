"""The six skills, and all that a further one is made of (docs/develop/skills.md)."""

from ..errors import InvalidRequest
from ..types.events import FinishReason, StreamUpdate, TokenLogprob
from ..types.requests import Coord, Prompt, SamplingParams, Size
from ..types.step import StepToken, TokenRule
from .base import (
    SkillContext,
    SkillControl,
    SkillOutput,
    SkillRequest,
    SkillSpec,
    checked_text,
)
from .caption import CaptionSkill
from .declaration import (
    FLAG,
    OBJECT_SETTINGS,
    TEXT,
    TEXT_SETTINGS,
    object_schema,
    settings_schema,
)
from .finding import DetectSkill, PointSkill
from .gaze import GazeSkill
from .objects.locate import LocateControl, LocateOutput
from .objects.request import Merging, ObjectsRequest
from .presupposed import Presupposed
from .query import QuerySkill
from .registry import SkillRegistry
from .segment import SegmentSkill
from .settings import read_settings, reject_unknown
from .text.answer import AnswerControl, AnswerOutput
from .text.request import TextRequest

__all__ = [
    "FLAG",
    "OBJECT_SETTINGS",
    "TEXT",
    "TEXT_SETTINGS",
    "AnswerControl",
    "AnswerOutput",
    "CaptionSkill",
    "Coord",
    "DetectSkill",
    "FinishReason",
    "GazeSkill",
    "InvalidRequest",
    "LocateControl",
    "LocateOutput",
    "Merging",
    "ObjectsRequest",
    "PointSkill",
    "Presupposed",
    "Prompt",
    "QuerySkill",
    "SamplingParams",
    "SegmentSkill",
    "Size",
    "SkillContext",
    "SkillControl",
    "SkillOutput",
    "SkillRegistry",
    "SkillRequest",
    "SkillSpec",
    "StepToken",
    "StreamUpdate",
    "TextRequest",
    "TokenLogprob",
    "TokenRule",
    "checked_text",
    "object_schema",
    "read_settings",
    "reject_unknown",
    "settings_schema",
]
