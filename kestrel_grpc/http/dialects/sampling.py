"""The settings of sampling in HTTP requests: one table for each dialect, and how a value of each setting is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kestrel_client._pb.kestrel.v1 import common_pb2
from kestrel_engine import FieldPath, InvalidRequest

from ...services.messages.task_fields import holder
from ..fields import Fields, positive

_MOST = 2**31 - 1
_NO_LIMIT = range(0)


@dataclass(frozen=True, slots=True)
class SamplingFields:
    """``names``: for each field of a dialect, the setting of a task; of two for the same setting the first
    counts. ``hottest``: the highest temperature. ``unlimited``: limits on the tokens that mean none. ``no_seed``: the
    seed that means none."""

    names: Mapping[str, str]
    hottest: float | None = None
    unlimited: range = _NO_LIMIT
    no_seed: int | None = None

    def fill(self, task: Any, fields: Fields) -> dict[FieldPath, FieldPath]:
        """Returns the request's path for each setting, and for the items of lists. Raises InvalidRequest."""
        sent: dict[FieldPath, FieldPath] = {}
        for key, name in self.names.items():
            if fields.values.get(key) is None or (name,) in sent:
                continue
            sent[name,] = fields.at(key)
            value = _READERS.get(name, _number)(fields, key, self)
            if value in _NOTHING or value == _NEUTRAL.get(name):
                continue
            has_it = holder(task, name, fields.at(key))
            if isinstance(value, dict):
                getattr(has_it, name).extend(value.values())
                sent |= {(name, index): path for index, path in enumerate(value)}
            else:
                setattr(has_it, name, value)
        if task.sampling.HasField("top_p") and task.sampling.top_p == 0:
            # The likeliest token alone. kestrel.v1 has one way to say that.
            task.sampling.ClearField("top_p")
            task.sampling.temperature = 0
        return {(name,): fields.at(key) for key, name in reversed([*self.names.items()])} | sent


NO_SAMPLING = SamplingFields({})
"""For requests that generate nothing."""
_NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "top_k": 0,
}
"""Values that change nothing. Clients send them for all requests, and skills that find objects refuse the penalties."""

_NOTHING: tuple[Any, ...] = (None, {})
"""Values of a seed and of lists that set nothing."""

_Reader = Callable[[Fields, str, SamplingFields], Any]


def _number(fields: Fields, key: str, dialect: SamplingFields) -> float | None:
    return fields.number(key)


def _temperature(fields: Fields, key: str, dialect: SamplingFields) -> float | None:
    value, most = fields.number(key), dialect.hottest
    if value is not None and most is not None and not 0 <= value <= most:
        raise InvalidRequest(fields.at(key), f"must be in [0, {most:g}], got {value:g}")
    return value


def _top_k(fields: Fields, key: str, dialect: SamplingFields) -> int:
    return min(max(fields.whole(key) or 0, 0), _MOST)  # Below 0 keeps all, too.


def _seed(fields: Fields, key: str, dialect: SamplingFields) -> int | None:
    seed = fields.whole(key)
    return None if seed is None or seed == dialect.no_seed else seed % 2**63


def _max_tokens(fields: Fields, key: str, dialect: SamplingFields) -> int:
    value = fields.whole(key) or 0
    if value in dialect.unlimited:
        return _MOST
    if value < 1:
        raise InvalidRequest(fields.at(key), f"must be in [1, {_MOST}], got {value}")
    return min(value, _MOST)


def _stop(fields: Fields, key: str, dialect: SamplingFields) -> dict[FieldPath, str]:
    """The texts by their paths."""
    texts, is_one = fields.texts(key), isinstance(fields.values[key], str)
    # Forms send "" where the user wrote none.
    return {
        fields.at(key) if is_one else fields.at(key, index): text
        for index, text in enumerate(texts)
        if text
    }


def _logit_bias(
    fields: Fields, key: str, dialect: SamplingFields
) -> dict[FieldPath, common_pb2.LogitBias]:
    """The biases by their paths."""
    biases, found = fields.inner(key), dict[FieldPath, common_pb2.LogitBias]()
    for token in biases.values:
        bias = biases.number(token)
        if not (token.isascii() and token.isdigit() and len(token) < 10) or bias is None:
            raise InvalidRequest(biases.at(token), "must be a number for the id of a token")
        found[biases.at(token)] = common_pb2.LogitBias(id=int(token), bias=bias)
    return found


_READERS: Mapping[str, _Reader] = {
    "temperature": _temperature,
    "top_k": _top_k,
    "seed": _seed,
    "stop": _stop,
    "logit_bias": _logit_bias,
    "max_tokens": _max_tokens,
    "max_reasoning_tokens": lambda fields, key, dialect: positive(fields, key),
}
"""Of the settings that are not numbers of any size."""
