"""The five skills and what a skill is."""

from .base import SkillContext, SkillControl, SkillOutput, SkillRequest, SkillSpec
from .caption import CaptionSkill
from .detect import DetectSkill
from .point import PointSkill
from .query import QuerySkill
from .registry import SkillRegistry
from .segment import SegmentSkill

__all__ = [
    "CaptionSkill",
    "DetectSkill",
    "PointSkill",
    "QuerySkill",
    "SegmentSkill",
    "SkillContext",
    "SkillControl",
    "SkillOutput",
    "SkillRegistry",
    "SkillRequest",
    "SkillSpec",
]
