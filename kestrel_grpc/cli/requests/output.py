"""Prints results and the events of streams."""

from __future__ import annotations

import sys
from typing import Any

from kestrel_client import (
    Box,
    CaptionResult,
    DetectResult,
    ImageSize,
    Logprobs,
    PathPiece,
    Point,
    PointResult,
    QueryResult,
    ReasoningDelta,
    Result,
    SegmentResult,
    TextDelta,
)
from kestrel_client.values.results.base import plain_value

from ..terminal import styled


def event_dict(event: object) -> dict[str, Any]:
    match event:
        case TextDelta():
            tokens = {"tokens": plain_value(event.tokens)} if event.tokens else {}
            return {"text": event.text, "output_tokens": event.output_tokens, **tokens}
        case ReasoningDelta():
            return {"reasoning": event.text, "output_tokens": event.output_tokens}
        case PathPiece():
            return {"path": event.path, "output_tokens": event.output_tokens}
        case Point():
            return {"point": plain_value(event)}
        case Box():
            return {"box": plain_value(event)}
    raise AssertionError(f"an unknown event {event!r}")


def print_event(event: object) -> None:
    match event:
        case TextDelta():
            print(event.text, end="", flush=True)
        case ReasoningDelta():
            print(styled(event.text, "dim", sys.stdout), end="", flush=True)
        case PathPiece():
            print(event.path, flush=True)
        case Point() | Box():
            print(_place(event, None), flush=True)


def print_result(result: Result) -> None:
    """Prints several samples one after the other, each below a line with its seed."""
    match result:
        case QueryResult(samples=(_, *_) as samples) | CaptionResult(samples=(_, *_) as samples):
            for each in samples:
                print(styled(f"seed {each.seed}:", "cyan", sys.stdout))
                print_result(each)
            return
        case QueryResult():
            if result.reasoning is not None:
                print(styled(result.reasoning.text, "dim", sys.stdout) + "\n")
            if not result.abstained:
                print(result.answer)
            print_logprobs(result.logprobs)
        case CaptionResult():
            print(result.caption)
            print_logprobs(result.logprobs)
        case PointResult():
            for point in result.points:
                print(_place(point, result.image_size))
        case DetectResult():
            for box in result.objects:
                print(_place(box, result.image_size))
        case SegmentResult():
            if result.box is not None:
                print(_place(result.box, result.image_size))
            if result.svg_path:
                print(result.svg_path)
    print_nothing(result)


def print_logprobs(logprobs: Logprobs | None) -> None:
    """Prints a line for each token, and one for the whole text."""
    if logprobs is None:
        return
    for token in logprobs:
        others = "".join(f"  {each.text!r} {each.logprob:.4f}" for each in token.top)
        print(f"{token.logprob:10.4f}  {token.text!r}{styled(others, 'dim', sys.stdout)}")
    print(f"{logprobs.sum:10.4f}  in all, {logprobs.mean:.4f} a token")


def print_nothing(result: Result) -> None:
    """Reports on standard error that nothing was found or that the result is incomplete."""
    match result:
        case PointResult(points=()) | DetectResult(objects=()):
            print(f"no {result.object} found{_absence(result)}", file=sys.stderr)
        case QueryResult(abstained=True):
            for each in result.absences:
                shown = f"{each.object}: absent with probability {each.absence:.3f}"
                print(shown, file=sys.stderr)
            print("not answered: the image does not show it", file=sys.stderr)
        case SegmentResult(box=None):
            print(f"no {result.object} found", file=sys.stderr)
        case SegmentResult(parse_error=str() as why):
            print(f"the outline cannot be parsed: {why}", file=sys.stderr)
    if result.finish_reason == "length":
        print("a limit was reached; the result may be incomplete", file=sys.stderr)


def _absence(result: PointResult | DetectResult) -> str:
    """What the model itself says about an object of which there is nothing in the result."""
    if result.absence is None:
        return ""
    if result.absence < 0.5:  # The model found it, and a limit of the request left nothing.
        return f"; present with probability {1 - result.absence:.3f}, but omitted by its score or overlap"
    return f"; absent with probability {result.absence:.3f}"


def _place(place: Point | Box, size: ImageSize | None) -> str:
    """Coordinates as fractions of the image, in pixels if its size is known, and the score if there is one."""
    numbers = [place.x, place.y] if isinstance(place, Point) else list(_edges(place).values())
    parts = [" ".join(f"{number:.4f}" for number in numbers)]
    if size is not None:
        sides = (size.width, size.height) * 2
        pixels = ", ".join(str(round(n * side)) for n, side in zip(numbers, sides, strict=False))
        parts.append(f"({pixels} px)")
    if place.score is not None:
        parts.append(f"score {place.score:.3f}")
    return "  ".join(parts)


def _edges(box: Box) -> dict[str, float]:
    return {name: getattr(box, name) for name in ("x_min", "y_min", "x_max", "y_max")}
