"""RuleCheck: rejects impossible rules and prompts of a skill, before they share a step with other requests.

A runtime trusts its plan: a rule that allows no id, or an id beyond the vocabulary, would fail the whole step. Skills
come from plug-ins too, so the engine checks every prompt and rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..errors import SkillFault
from ..types.model_config import ModelConfig
from ..types.requests import Coord, ImagePlace, Size, Token
from ..types.step import MAX_TOP, TokenRule

_MAX_REMEMBERED = 4096


class RuleCheck:
    """Checks rules against one model, each object once: skills give the same few again and again. For one thread."""

    def __init__(self, model: ModelConfig) -> None:
        self._vocab_size = model.text.vocab_size
        self._coord_id, self._size_id = model.ids.coord_id, model.ids.size_id
        self.passed: dict[int, TokenRule] = {}
        """Rules that passed, by identity."""

    def __call__(self, rule: TokenRule | None) -> None:
        """Raises SkillFault."""
        if rule is not None and self.passed.get(id(rule)) is rule:
            return
        if not isinstance(rule, TokenRule):
            raise SkillFault(f"the skill gave {rule!r} as a rule; a rule is a TokenRule")
        self._check(rule)
        if rule.mask is not None or rule.edits:  # Used once, and large.
            return
        if len(self.passed) == _MAX_REMEMBERED:
            self.passed.clear()
        self.passed[id(rule)] = rule  # Kept, so that no other rule gets its identity.

    def _check(self, rule: TokenRule) -> None:
        lists = {"allowed": rule.allowed or (), "suppressed": rule.suppressed}
        for name, ids in lists.items():
            if not isinstance(ids, tuple):
                raise SkillFault(f"{name} of the skill's rule is {ids!r}, not a tuple of ids")
            self._check_ids(name, ids)
        single = {"forced": rule.forced, "otherwise": rule.otherwise, "stop": rule.stop}
        for name, token in single.items():
            if token is not None:
                self._check_ids(name, (token,))
        self._check_ids("edits", tuple(edit.id for edit in rule.edits))
        if not isinstance(rule.top, int) or not 0 <= rule.top <= MAX_TOP:
            raise SkillFault(f"top of the skill's rule is {rule.top!r}; the limit is {MAX_TOP}")
        if rule.mask is not None and rule.forced is None:
            self._check_mask(rule, rule.mask)
            return
        possible = self._possible(rule)
        if possible is not None and not possible:
            raise SkillFault(f"the skill's rule leaves no id to sample: {rule}")
        values = {
            token
            for token, reads in (
                (self._coord_id, rule.read_coord),
                (self._size_id, rule.read_size),
            )
            if reads
        }
        if values and possible is not None and not values & possible:
            raise SkillFault(
                f"the skill's rule reads a value with id {_listed(values)}, but can only give id "
                f"{_listed(possible)}: {rule}"
            )

    def _check_mask(self, rule: TokenRule, mask: bytes) -> None:
        expected = TokenRule.mask_bytes(self._vocab_size)
        if not isinstance(mask, bytes) or len(mask) != expected:
            raise SkillFault(f"the mask of the skill's rule must be {expected} bytes")
        if rule.allowed is not None or rule.suppressed:
            raise SkillFault("a rule with a mask has no allowed and no suppressed ids")
        if not any(mask):
            raise SkillFault("the mask of the skill's rule leaves no id to sample")

    def _possible(self, rule: TokenRule) -> set[int] | None:
        """The ids that a rule allows; None for most of the vocabulary."""
        if rule.forced is not None:
            return {rule.forced}
        suppressed = set(rule.suppressed)
        if rule.allowed is not None:
            drawn = set(rule.allowed) - suppressed
        elif len(suppressed) == self._vocab_size:
            drawn = set()
        elif rule.otherwise is None:
            return None
        else:
            return {rule.stop, rule.otherwise}
        if rule.otherwise is None:
            return drawn
        return {token if token == rule.stop else rule.otherwise for token in drawn}

    def _check_ids(self, name: str, ids: tuple[object, ...]) -> None:
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool):
                raise SkillFault(f"{name} of the skill's rule has {token!r}, which is no id")
            if not 0 <= token < self._vocab_size:
                raise SkillFault(
                    f"{name} of the skill's rule has id {token}; the model's ids are 0 to "
                    f"{self._vocab_size - 1}"
                )


def check_prompt(tokens: Sequence[Token | ImagePlace], model: ModelConfig) -> None:
    """Raises SkillFault for a token of a skill's prompt that the model can't embed, and for an image at its end."""
    if tokens and isinstance(tokens[-1], ImagePlace):
        raise SkillFault(
            "the skill's prompt ends with an image; it must end with an id, a Coord or a Size"
        )
    vocab_size = model.text.vocab_size
    for token in tokens:
        if type(token) is int and 0 <= token < vocab_size:  # Nearly all of a prompt.
            continue
        match token:
            case Coord(value):
                good = math.isfinite(value)
            case Size(width, height):
                good = math.isfinite(width) and math.isfinite(height)
            case ImagePlace():
                good = True
            case int() if not isinstance(token, bool):
                good = 0 <= token < vocab_size
            case _:
                good = False
        if not good:
            raise SkillFault(
                f"the skill's prompt holds {token!r}; a token is an id from 0 to {vocab_size - 1}, a Coord or a Size"
            )


def _listed(ids: set[int]) -> str:
    return ", ".join(str(token) for token in sorted(ids)[:8])
