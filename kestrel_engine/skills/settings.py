"""The settings dictionary of a call, checked: how to sample, how much to generate, and what to return."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from numbers import Real
from typing import Any, cast

from ..errors import InvalidRequest
from ..types.constraint import Constraint
from ..types.requests import SAMPLING_SETTINGS, SamplingParams, is_number
from ..types.step import MAX_TOP
from .base import SkillContext, SkillDefaults
from .constraints.setting import read_constraint
from .text.penalties import read_penalties
from .text.stop_strings import read_stop_strings

_OF_TEXT = ("sampling", "max_tokens", "stop", "logprobs", "top_logprobs", "constraint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """``max_tokens``, ``max_reasoning_tokens`` and ``max_objects`` are None where the caller set none;
    ``stop`` is empty.

    ``min_score``: the least score of an object that is returned, in [0, 1]. ``max_overlap``: of two boxes that overlap
    more, the better one is returned; None returns both. ``max_absence``: the limit on the probability that an object is
    absent with which a question that presupposes it is answered, in [0, 1].
    """

    sampling: SamplingParams
    max_tokens: int | None
    max_reasoning_tokens: int | None = None
    max_objects: int | None
    min_score: float = 0.0
    max_overlap: float | None = None
    max_absence: float = 0.5
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    """With ``logprobs``: the alternatives of each token."""
    constraint: Constraint | None = None


def read_settings(
    settings: Mapping[str, Any],
    defaults: SkillDefaults,
    *,
    greedy: bool,
    extra: Set[str] = frozenset({"max_tokens"}),
) -> Settings:
    """Checks ``settings``; None values count as absent. ``greedy``: temperature defaults to 0, top_p to 1.

    Raises InvalidRequest naming the key: one that is unknown, or a value out of range.
    """
    if not isinstance(settings, Mapping):
        raise InvalidRequest("settings", "must be a mapping of names to values")
    known = SAMPLING_SETTINGS.keys() | extra
    for key in settings:
        if key not in known:
            raise InvalidRequest(
                str(key), f"is not a setting of this skill; known: {', '.join(sorted(known))}"
            )
    values = {k: v for k, v in settings.items() if v is not None}
    logprobs = values.get("logprobs", False)
    if not isinstance(logprobs, bool):
        raise InvalidRequest("logprobs", f"{logprobs!r} is not true or false")
    top = values.get("top_logprobs", 0)
    if not isinstance(top, int) or isinstance(top, bool) or not 0 <= top <= MAX_TOP:
        raise InvalidRequest("top_logprobs", f"{top!r} is not a whole number from 0 to {MAX_TOP}")
    if top and not logprobs:
        raise InvalidRequest("top_logprobs", f"is {top} without logprobs; set logprobs to true")
    sampling = {name: values[name] for name in SAMPLING_SETTINGS if name in values}
    if not greedy:
        sampling = {"temperature": defaults.temperature, "top_p": defaults.top_p, **sampling}
    if "seed" not in sampling:
        sampling["seed"] = defaults.draw_seed()
    return Settings(
        sampling=SamplingParams(**sampling),
        max_tokens=_positive("max_tokens", values.get("max_tokens")),
        max_reasoning_tokens=_positive("max_reasoning_tokens", values.get("max_reasoning_tokens")),
        max_objects=_positive("max_objects", values.get("max_objects")),
        min_score=_share("min_score", values.get("min_score", defaults.min_score)),
        max_overlap=_inner_share("max_overlap", values.get("max_overlap")),
        max_absence=_share("max_absence", values.get("max_absence", defaults.max_absence)),
        stop=read_stop_strings(values.get("stop")),
        logprobs=logprobs,
        top_logprobs=top,
        constraint=read_constraint(values.get("constraint")),
    )


def read_text_settings(
    settings: Mapping[str, Any], context: SkillContext, known: Set[str]
) -> tuple[Settings, dict[str, Any]]:
    """As ``read_settings``, for a skill that writes text, and the fields of its TextRequest that follow from them."""
    read = read_settings(settings, context.defaults, greedy=False, extra=known)
    fields = {name: getattr(read, name) for name in _OF_TEXT}
    fields["penalties"] = read_penalties(settings, context.model.text.vocab_size)
    return read, fields


def _positive(name: str, value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InvalidRequest(name, f"{value!r} is not a whole number of at least 1")
    return value


def _share(name: str, value: object) -> float:
    """A number in [0, 1]."""
    # numpy's numbers are registered as Real. NaN fails the comparison.
    if isinstance(value, Real) and not isinstance(value, bool) and 0 <= cast(float, value) <= 1:
        return float(value)
    raise InvalidRequest(name, f"{value!r} is not a number in [0, 1]")


def _inner_share(name: str, value: object) -> float | None:
    """A number in (0, 1), or None."""
    if value is None or (is_number(value) and 0 < value < 1):
        return value
    raise InvalidRequest(name, f"{value!r} is not a number above 0 and below 1")


def reject_unknown(arguments: Mapping[str, Any], known: Set[str]) -> None:
    """Raises InvalidRequest for an argument that the skill does not take."""
    for name in arguments:
        if name not in known:
            raise InvalidRequest(
                name, f"is not an argument of this skill; known: {', '.join(sorted(known))}"
            )
