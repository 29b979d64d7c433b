"""The scores of points, boxes and segments (docs/use/scores.md).

The raw score of an object is the product of its tokens' probabilities: that of each id, and that of the values near
each value. It is in [0, 1].
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

from ...types.step import StepToken


def raw_score(tokens: Iterable[StepToken]) -> float | None:
    """Returns the raw score of the object that ``tokens`` describe; None if a probability is unknown."""
    score = 1.0
    for token in tokens:
        if token.logprob is None or token.near is None:
            return None
        score *= math.exp(min(token.logprob, 0.0)) * token.near
    return min(max(score, 0.0), 1.0)


def rounded(score: float) -> float:
    """Returns the nearest float32, so that the score that a caller reads from a message works as a threshold."""
    nearest: float = struct.unpack("f", struct.pack("f", score))[0]
    return nearest
