"""The events of a stream, read from the messages. Objects are DetectedPoint and DetectedBox, gazes Gaze."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .._pb.kestrel.v1 import vision_service_pb2
from ..geometry import DetectedBox, DetectedPoint, from_detection
from .results.gazes import Gaze, read_gaze
from .results.text import TokenLogprob, read_token


@dataclass(frozen=True, slots=True)
class TextDelta:
    """The next part of an answer or caption. ``output_tokens``: tokens generated so far.

    ``tokens``: with ``logprobs=True``, the tokens since the last part; the text of the last of them may follow in the
    next part.
    """

    text: str
    output_tokens: int = 0
    tokens: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """The next part of the reasoning, before the answer. ``output_tokens``: tokens generated so far."""

    text: str
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PathPiece:
    """The next part of an outline: one SVG command with its arguments. Joined with spaces, the parts of an object form
    its path. ``label``: the object's name."""

    path: str
    output_tokens: int = 0
    label: str = ""


Event: TypeAlias = TextDelta | ReasoningDelta | DetectedPoint | DetectedBox | PathPiece | Gaze


def read_event(payload: object) -> Event | None:
    """Returns the event of a payload; None for the start, the end and unknown payloads."""
    match payload:
        case vision_service_pb2.TextDelta():
            tokens = tuple(map(read_token, payload.tokens))
            return TextDelta(payload.text, payload.output_tokens, tokens)
        case vision_service_pb2.ReasoningDelta():
            return ReasoningDelta(payload.text, payload.output_tokens)
        case vision_service_pb2.PathPiece():
            return PathPiece(payload.path, payload.output_tokens, payload.label)
        case vision_service_pb2.Detection():
            return from_detection(payload)
        case vision_service_pb2.Gaze():
            return read_gaze(payload)
        case _:
            return None
