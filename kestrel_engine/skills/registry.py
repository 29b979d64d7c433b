"""SkillRegistry: the skills an engine serves, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import ConfigError, SkillUnavailable
from .base import SkillSpec
from .caption import CaptionSkill
from .detect import DetectSkill
from .point import PointSkill
from .query import QuerySkill
from .segment import SegmentSkill


class SkillRegistry:
    """Immutable. A later skill of the same name is an error: nobody replaces a skill by accident."""

    def __init__(self, skills: Iterable[SkillSpec]) -> None:
        self._skills: dict[str, SkillSpec] = {}
        for skill in skills:
            if skill.name in self._skills:
                raise ConfigError("skills", skill.name, "is registered twice")
            self._skills[skill.name] = skill

    @classmethod
    def default(cls) -> SkillRegistry:
        """query, caption, point, detect and segment."""
        return cls([QuerySkill(), CaptionSkill(), PointSkill(), DetectSkill(), SegmentSkill()])

    def get(self, name: str) -> SkillSpec:
        """Raises SkillUnavailable naming the skills there are."""
        if name not in self._skills:
            raise SkillUnavailable(
                "skill", f"{name!r} is not registered; there are {', '.join(self._skills)}"
            )
        return self._skills[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._skills)

    def __iter__(self) -> Iterator[SkillSpec]:
        return iter(self._skills.values())
