"""Imports the skills that --skill names as ``package.module:SkillClass``, and checks them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from kestrel_engine import ConfigError, SkillRegistry, SkillSpec

from ..settings.flags import SettingsError

_PARTS = ("build", "new_control", "new_output")
MAX_NAME = 128


def skill_registry(names: Sequence[str], source: str = "--skill") -> SkillRegistry:
    """The six skills and the skills of ``names``.

    Python's import path and the current folder are searched for modules. ``source`` is the flag, variable or key that
    gave ``names``. Raises SettingsError, which names the invalid skill and ``source``.
    """
    if names and "" not in sys.path:
        sys.path.append("")
    skills = list(SkillRegistry.default())
    for name in names:
        skills.append(_load(name, source))
        try:
            SkillRegistry(skills)
        except ConfigError as error:
            raise SettingsError(
                f"{source}={name}: the skill {error.value!r} {error.limit}"
            ) from None
    return SkillRegistry(skills)


def _load(name: str, source: str) -> SkillSpec[Any]:
    module_name, _, class_name = name.partition(":")
    try:
        skill = getattr(importlib.import_module(module_name), class_name)()
    except Exception as error:  # The import runs any code of the module.
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise SettingsError(f"{source}={name}: {reason}") from error
    own = getattr(skill, "name", None)
    if not isinstance(own, str) or not 1 <= len(own) <= MAX_NAME:
        raise SettingsError(
            f"{source}={name}: its name must be a str of 1 to {MAX_NAME} characters"
        )
    missing = [part for part in _PARTS if not callable(getattr(skill, part, None))]
    if missing:
        raise SettingsError(f"{source}={name}: is not a skill; it lacks {', '.join(missing)}")
    loaded: SkillSpec[Any] = skill
    return loaded
