"""OutlineOutput: an output with an outline that the engine's refiner can sharpen."""

from __future__ import annotations

import abc
from typing import TypeAlias

from ..base import SkillOutput

Outline: TypeAlias = tuple[str, tuple[float, float, float, float]]
"""An SVG path relative to a box, and the box: x_min, y_min, x_max, y_max as fractions of the image."""


class OutlineOutput(SkillOutput):
    """Its ``finish`` is called twice if the engine's refiner sharpens the outline: before that, and after it."""

    refines = False
    """Whether the outline is refined. The engine has a refiner then."""

    @property
    @abc.abstractmethod
    def outline(self) -> Outline | None:
        """The coarse outline of the finished output; None without a path or a box."""

    @abc.abstractmethod
    def set_outline(self, path: str, box: tuple[float, float, float, float]) -> None:
        """Sets the refined outline of the result. ``path`` is relative to ``box``."""
