"""Logit bias, and penalties for tokens that a text repeats: read from settings, and applied to the text's rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import FieldPath, InvalidRequest
from ...types.events import FinishReason
from ...types.requests import is_number
from ...types.step import LogitEdit, RuleWait, StepToken, TokenRule
from ..base import SkillContext, SkillControl

KEYS = frozenset({"repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"})
MAX_BIASED = 300
"""Ids with a logit bias."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """How logits change, before temperature: first by ``logit_bias``, then by the penalties.

    ``repetition``: a logit above 0 is divided by it, and another is multiplied, if its token is in the prompt's text or
    in the text so far. ``presence``: subtracted once for a token in the text so far. ``frequency``: subtracted for each
    time that the token is there.
    """

    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def needs_text(self) -> bool:
        """Whether a rule depends on the tokens before it."""
        return (self.repetition, self.presence, self.frequency) != (1.0, 0.0, 0.0)

    def edits(self, prompt: frozenset[int], said: Mapping[int, int]) -> tuple[LogitEdit, ...]:
        """``prompt``: the ids of its text. ``said``: how often each id is in the text so far."""
        bias = dict(self.logit_bias)
        repeated = said.keys() | prompt if self.repetition != 1.0 else said.keys()
        return tuple(
            LogitEdit(
                token,
                bias.get(token, 0.0),
                self.repetition if token in repeated else 1.0,
                self.presence * (token in said) + self.frequency * said.get(token, 0),
            )
            for token in sorted(bias.keys() | repeated)
        )


class PenalizingControl:
    """Changes the rules of ``inner``, which writes text."""

    def __init__(
        self,
        inner: SkillControl,
        penalties: Penalties,
        prompt: Iterable[object],
        context: SkillContext,
    ) -> None:
        """``prompt``: the tokens; those that are no ids are left out. Special tokens in it are left out."""
        self._inner, self._penalties = inner, penalties
        texts = (t for t in prompt if isinstance(t, int) and context.codec.token_bytes(t))
        self._prompt = frozenset(texts) if penalties.repetition != 1.0 else frozenset()
        self._said: Counter[int] = Counter()
        self._num_accepted = 0
        self._edits = penalties.edits(self._prompt, {})

    def rule(self, index: int) -> TokenRule | RuleWait | None:
        if self._penalties.needs_text and index > self._num_accepted:
            return None
        rule = self._inner.rule(index)
        return replace(rule, edits=self._edits) if isinstance(rule, TokenRule) else rule

    def accept(self, token: StepToken) -> FinishReason | None:
        self._num_accepted += 1
        if self._penalties.needs_text:
            self._said[token.id] += 1
            self._edits = self._penalties.edits(self._prompt, self._said)
        return self._inner.accept(token)


def read_penalties(settings: Mapping[str, Any], vocab_size: int) -> Penalties | None:
    """The penalties in ``settings``; None if they change nothing. Raises InvalidRequest."""
    values = {name: value for name, value in settings.items() if value is not None}
    penalties = Penalties(
        repetition=_number(values, "repetition_penalty", 1.0, 0.01, 10.0),
        presence=_number(values, "presence_penalty", 0.0, -2.0, 2.0),
        frequency=_number(values, "frequency_penalty", 0.0, -2.0, 2.0),
        logit_bias=_bias(values.get("logit_bias"), vocab_size),
    )
    return penalties if penalties != Penalties() else None


def _number(
    values: Mapping[str, Any], name: str, default: float, least: float, most: float
) -> float:
    value = values.get(name, default)
    if not is_number(value) or not least <= value <= most:
        raise InvalidRequest(name, f"{value!r} is not in [{least:g}, {most:g}]")
    return float(value)


def _part(key: object) -> str | int:
    return key if isinstance(key, int) else str(key)[:20]


def _bias(value: object, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """Of a mapping from ids to numbers, or a list of such pairs. An id may be a text of digits, as in JSON."""
    if value is None:
        return ()
    pairs: list[Any]
    names: list[FieldPath]
    if isinstance(value, Mapping):
        pairs, names = [*value.items()], [("logit_bias", _part(key)) for key in value]
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        pairs, names = [*value], [("logit_bias", index) for index in range(len(value))]
    else:
        raise InvalidRequest("logit_bias", "must be an object from ids to numbers")
    if len(pairs) > MAX_BIASED:
        raise InvalidRequest(
            "logit_bias",
            f"has {len(pairs)} ids, the limit is {MAX_BIASED}",
            value=len(pairs),
            limit=MAX_BIASED,
        )
    read: dict[int, float] = {}
    for field, pair in zip(names, pairs, strict=True):
        if not isinstance(pair, Sequence) or len(pair) != 2:
            raise InvalidRequest(field, "must be an id and a number")
        token, bias = pair
        if isinstance(token, str) and token.isascii() and token.isdigit() and len(token) < 10:
            token = int(token)
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise InvalidRequest(
                field, f"{token!r} is not an id of the model; its ids are 0 to {vocab_size - 1}"
            )
        if not is_number(bias) or not -100 <= bias <= 100:
            raise InvalidRequest(field, f"{bias!r} is not in [-100, 100]")
        read[token] = float(bias)
    return tuple(read.items())
