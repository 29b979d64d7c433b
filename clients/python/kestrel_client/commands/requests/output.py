"""Prints results and the events of streams."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from kestrel_client import (
    Answer,
    CaptionResult,
    DetectedBox,
    DetectedPoint,
    DetectResult,
    Gaze,
    GazeResult,
    ImageSize,
    Logprobs,
    ObjectSearch,
    PathPiece,
    PointResult,
    QueryResult,
    ReasoningDelta,
    Result,
    Segment,
    SegmentResult,
    TextDelta,
)
from kestrel_client.drawing.marks import Marks
from kestrel_client.values.plain import plain_value

from ..terminal import styled
from .inputs import Input
from .painted import Painter


class Output:
    """Where a command's results go: lines of text or JSON, and with --save images. Raises CommandError if an image
    could not be written."""

    def __init__(self, args: argparse.Namespace, inputs: list[Input]) -> None:
        self._painter = None if args.save is None else Painter(args.save, inputs, args.save_on)
        self._several = len(inputs) > 1
        self.silent = self._painter is not None and self._painter.takes_output
        self.as_json, self.streams = args.json, args.stream and not self.silent

    def title(self, image: Input) -> None:
        """Prints the image's name, if it is one of several."""
        if self._several and not self.as_json and not self.silent:
            print(styled(f"{image.name}:", "bold", sys.stdout), flush=True)

    def line(self, image: Input | None, fields: dict[str, Any]) -> None:
        """Prints JSON, which begins with the image's name if it is one of several."""
        print_json({**({"image": image.name} if self._several and image else {}), **fields})

    def paint(self, marks: Marks, image: Input | None) -> None:
        if self._painter is not None and image is not None:
            self._painter.write(marks, image)


def print_json(fields: dict[str, Any]) -> None:
    print(json.dumps(fields, ensure_ascii=False), flush=True)


def event_dict(event: object) -> dict[str, Any]:
    match event:
        case TextDelta():
            tokens = {"tokens": plain_value(event.tokens)} if event.tokens else {}
            return {"text": event.text, "output_tokens": event.output_tokens, **tokens}
        case ReasoningDelta():
            return {"reasoning": event.text, "output_tokens": event.output_tokens}
        case PathPiece():
            return {
                "path": event.path,
                "output_tokens": event.output_tokens,
                "label": event.label,
            }
        case DetectedPoint():
            return {"point": plain_value(event)}
        case Gaze():
            return {"gaze": plain_value(event)}
        case DetectedBox():
            return {"box": plain_value(event)}
    raise AssertionError(f"an unknown event {event!r}")


def print_event(event: object, *, labelled: bool = False) -> None:
    """``labelled``: the label of an object stands before it."""
    match event:
        case TextDelta():
            print(event.text, end="", flush=True)
        case ReasoningDelta():
            print(styled(event.text, "dim", sys.stdout), end="", flush=True)
        case PathPiece():
            print(event.path, flush=True)
        case Gaze():
            _print_gaze(event, None)
        case DetectedPoint() | DetectedBox():
            label = f"{event.label}: " if labelled else ""
            print(f"{label}{_place(event, None)}", flush=True)


def print_result(result: Result) -> None:
    match result:
        case QueryResult():
            _print_answers(result.answers, result.abstained)
        case CaptionResult():
            _print_answers(result.captions, False)
        case GazeResult():
            for gaze in result:
                _print_gaze(gaze, result.image_size)
        case PointResult() | DetectResult() | SegmentResult():
            several = len(result.searches) > 1
            for search in result.searches:
                if several:
                    print(styled(f"{search.object}:", "cyan", sys.stdout))
                for found in result:
                    if found.label == search.object:
                        _print_object(found, result.image_size)
    print_nothing(result)


def _print_answers(answers: tuple[Answer, ...], abstained: bool) -> None:
    """Prints several samples one after the other, each below a line with its seed."""
    for each in answers:
        if len(answers) > 1:
            print(styled(f"seed {each.seed}:", "cyan", sys.stdout))
        if each.reasoning is not None:
            print(styled(each.reasoning.text, "dim", sys.stdout) + "\n")
        if not abstained:
            print(each.text)
        print_logprobs(each.logprobs)


def _print_object(found: DetectedPoint | DetectedBox | Segment, size: ImageSize) -> None:
    if isinstance(found, Segment):
        print(_place(found.labelled_box, size))
        if found.svg_path:
            print(found.svg_path)
    else:
        print(_place(found, size))


def _print_gaze(gaze: Gaze, size: ImageSize | None) -> None:
    target = "none"
    if gaze.target is not None:
        target = _place(DetectedPoint(gaze.target.x, gaze.target.y, "", gaze.score), size)
    print(f"from {gaze.eye.x:.4f} {gaze.eye.y:.4f}: {target}", flush=True)


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
    if isinstance(result, QueryResult) and result.abstained:
        for each in result.presupposed:
            print(f"{each.object}: absent with probability {each.absence:.3f}", file=sys.stderr)
        print("not answered: the image does not show it", file=sys.stderr)
    if isinstance(result, (PointResult, DetectResult, SegmentResult)):
        found = {each.label for each in result}
        for search in result.searches:
            if search.error is not None:
                why = f"{search.error.message} [{search.error.code.name}]"
                print(f"{search.object} failed: {why}", file=sys.stderr)
            elif search.object not in found:
                print(f"no {search.object} found{_absence(search)}", file=sys.stderr)
    if isinstance(result, SegmentResult):
        for segment in result:
            if segment.parse_error is not None:
                print(f"the outline cannot be parsed: {segment.parse_error}", file=sys.stderr)
    if isinstance(result, GazeResult):
        if result.search is not None and not result.gazes:
            print(f"no face found{_absence(result.search)}", file=sys.stderr)
        for gaze in result:
            if gaze.target is None and gaze.absence is not None and gaze.finish_reason == "stop":
                where = f"the gaze from {gaze.eye.x:.4f} {gaze.eye.y:.4f}"
                print(
                    f"{where} leaves the image with probability {gaze.absence:.3f}", file=sys.stderr
                )
    if result.finish_reason == "length":
        print("a limit was reached; the result may be incomplete", file=sys.stderr)


def _absence(search: ObjectSearch) -> str:
    """What the model itself says about an object of which there is nothing in the result."""
    if search.absence is None:
        return ""
    if search.absence < 0.5:  # The model found it, and a limit of the request left nothing.
        return f"; present with probability {1 - search.absence:.3f}, but omitted by its score or overlap"
    return f"; absent with probability {search.absence:.3f}"


def _place(place: DetectedPoint | DetectedBox, size: ImageSize | None) -> str:
    """Coordinates as fractions of the image, in pixels if its size is known, and the score."""
    if isinstance(place, DetectedPoint):
        numbers = [place.x, place.y]
    else:
        numbers = [place.x_min, place.y_min, place.x_max, place.y_max]
    parts = [" ".join(f"{number:.4f}" for number in numbers)]
    if size is not None:
        parts.append(f"({', '.join(map(str, place.to_pixels(size)))} px)")
    return "  ".join([*parts, f"score {place.score:.3f}"])
