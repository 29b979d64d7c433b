"""OutlineOutput: an output with an outline that the engine's refiner can sharpen."""

from __future__ import annotations

import abc

from ...types.requests import Outline
from ..base import SkillOutput


class OutlineOutput(SkillOutput):
    """Its ``finish`` is called twice if the engine's refiner sharpens the outline: before that, and after it."""

    refines = False
    """Whether the outline is refined. The engine has a refiner then."""

    @property
    @abc.abstractmethod
    def outline(self) -> Outline | None:
        """The coarse outline of the finished output; None without a path or a box."""

    @abc.abstractmethod
    def set_outline(self, outline: Outline) -> None:
        """Sets the refined outline of the result."""
