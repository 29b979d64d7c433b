"""SkillRegistry: the skills an engine serves, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import ConfigError, SkillUnavailable
from ..types.info import SkillDescription
from ..types.model_config import ModelConfig
from .base import NeedsModel, SkillSpec
from .caption import CaptionSkill
from .declaration import describe
from .embed import EMBED, EmbedSkill
from .finding import DetectSkill, PointSkill
from .gaze import GazeSkill
from .query import QuerySkill
from .segment import SegmentSkill

_OWN: dict[str, SkillSpec[Any]] = {EMBED: EmbedSkill()}
"""The engine's own skills, which RunSkill does not serve."""


class SkillRegistry:
    """Immutable. Two skills of one name are an error, so that no skill replaces another by accident."""

    def __init__(self, skills: Iterable[SkillSpec[Any]]) -> None:
        self._skills: dict[str, SkillSpec[Any]] = {}
        for skill in skills:
            if skill.name in self._skills:
                raise ConfigError("skills", skill.name, "is registered twice")
            if skill.name in _OWN:
                raise ConfigError(
                    "skills", skill.name, "is the engine's own skill; choose another name"
                )
            self._skills[skill.name] = skill
        self._descriptions = {skill.name: describe(skill) for skill in self}

    @classmethod
    def default(cls) -> SkillRegistry:
        """query, caption, point, detect, segment and gaze."""
        finding = (PointSkill(), DetectSkill(), SegmentSkill(), GazeSkill())
        return cls([QuerySkill(), CaptionSkill(), *finding])

    def get(self, name: str) -> SkillSpec[Any]:
        """The skill called ``name``, also one of the engine's own. Raises SkillUnavailable, which names the registered
        skills."""
        if name in _OWN:
            return _OWN[name]
        if name not in self._skills:
            raise SkillUnavailable(
                "skill", f"{name!r} is not registered; there are {', '.join(self._skills)}"
            )
        return self._skills[name]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._skills)

    def available(self, model: ModelConfig) -> tuple[str, ...]:
        """Names of the skills that ``model`` can do. A skill may have ``can_run``; without it, any model will do."""
        return tuple(
            name
            for name, skill in self._skills.items()
            if not isinstance(skill, NeedsModel) or skill.can_run(model)
        )

    def descriptions(self, model: ModelConfig) -> tuple[SkillDescription, ...]:
        """What the skills that ``model`` can do take."""
        return tuple(self._descriptions[name] for name in self.available(model))

    def __iter__(self) -> Iterator[SkillSpec[Any]]:
        return iter(self._skills.values())
