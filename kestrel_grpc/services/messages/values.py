"""Single values of messages: the numbers of enums, and the floats that a caller meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kestrel_engine import FieldPath, InvalidRequest


def known_value(name: str | FieldPath, number: int, enum: Any, meanings: Mapping[Any, Any]) -> Any:
    """The meaning of an enum's number. Raises InvalidRequest for a number that this version does not define."""
    if number not in meanings:
        raise InvalidRequest(name, f"{number} is not a value of {enum.DESCRIPTOR.name}")
    return meanings[number]


def meant_float(value: float) -> float:
    """The number that the caller meant: 0.1 for the float32 next to it."""
    return float(str(np.float32(value)))
