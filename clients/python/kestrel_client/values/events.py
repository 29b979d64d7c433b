"""What a stream gives while it runs, read from the messages; points and boxes come as Point and Box."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .._pb.kestrel.v1 import common_pb2, vision_service_pb2
from .geometry import Box, Point, from_box, from_point


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer or description. ``output_tokens``: tokens generated so far."""

    text: str
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks, before it answers. ``output_tokens``: tokens generated so far."""

    text: str
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PathPiece:
    """More of an outline: one SVG command with its arguments. Joined with single spaces they are the whole path."""

    path: str
    output_tokens: int = 0


Event: TypeAlias = TextDelta | ReasoningDelta | Point | Box | PathPiece


def read_event(payload: object) -> Event | None:
    """What is shown to the caller of a stream event's payload; None for the start, the end and the unknown."""
    match payload:
        case vision_service_pb2.TextDelta():
            return TextDelta(payload.text, payload.output_tokens)
        case vision_service_pb2.ReasoningDelta():
            return ReasoningDelta(payload.text, payload.output_tokens)
        case vision_service_pb2.PathPiece():
            return PathPiece(payload.path, payload.output_tokens)
        case common_pb2.Point():
            return from_point(payload)
        case common_pb2.Box():
            return from_box(payload)
        case _:
            return None
