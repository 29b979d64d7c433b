"""``query``, ``caption``, ``point``, ``detect``, ``segment``: one request to a running server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kestrel_client import (
    Box,
    CaptionResult,
    DetectResult,
    ImageHandle,
    ImageSize,
    KestrelClient,
    PathPiece,
    Point,
    PointResult,
    QueryResult,
    ReasoningDelta,
    Result,
    SegmentResult,
    TextDelta,
)

from .connection import add_connection_flags, connected
from .parser import CommandError

_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed")
_OPTIONS = ("model", "request_id", "priority", "cache_salt")
_ID_PREFIX = "img_"


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.add_argument(
        "image",
        metavar="IMAGE",
        nargs="?" if command == "query" else None,
        help="picture: a file, - for standard input, or the id of one put",
    )
    _add_own(parser, command)
    sampling = parser.add_argument_group("sampling (default: the server's)")
    sampling.add_argument("--temperature", type=float, help="0 always takes the likeliest token")
    sampling.add_argument(
        "--top-p", type=float, help="draw among the likeliest tokens of this total"
    )
    sampling.add_argument("--top-k", type=int, help="draw among this many tokens; 0: all")
    sampling.add_argument(
        "--max-tokens", type=int, help="most tokens to generate; a point takes 2, a box 3"
    )
    sampling.add_argument("--seed", type=int, help="makes the draw repeatable")
    output = parser.add_argument_group("output")
    output.add_argument("--stream", action="store_true", help="print the answer while it comes")
    output.add_argument(
        "--json",
        action="store_true",
        help="print JSON, with usage and timings; with --stream a line each",
    )
    output.add_argument(
        "--save", metavar="FILE", help="paint the answer on the picture (needs Pillow)"
    )
    add_request_flags(parser)
    add_connection_flags(parser)


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    request = parser.add_argument_group("request")
    request.add_argument("--model", help="name of the model that must answer")
    request.add_argument("--request-id", help="your name for the request")
    request.add_argument(
        "--priority", choices=("low", "normal", "high"), help="which of those that wait goes first"
    )
    request.add_argument(
        "--cache-salt",
        metavar="TEXT",
        help="share cached computation with this salt's requests only",
    )


def request_options(args: argparse.Namespace) -> dict[str, Any]:
    """What ``add_request_flags`` added, as keywords of the client's methods."""
    return {name: getattr(args, name) for name in _OPTIONS}


def _add_own(parser: argparse.ArgumentParser, command: str) -> None:
    if command == "query":
        parser.add_argument("question", metavar="QUESTION")
        parser.add_argument(
            "--reasoning", action="store_true", help="let the model think aloud first"
        )
    elif command == "caption":
        parser.add_argument("--length", choices=("short", "normal", "long"), default="normal")
    else:
        parser.add_argument("object", metavar="OBJECT", help='what to find, like "red circle"')
    if command in ("point", "detect"):
        parser.add_argument("--max-objects", type=int, metavar="N", help="most objects to find")
    if command == "segment":
        parser.add_argument(
            "--mask", choices=("none", "svg", "png", "rle"), default="none",
            help="mask to ask for beside the outline; --json prints it",
        )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    image = read_image(args.image)
    if args.save is not None and (image is None or isinstance(image, ImageHandle)):
        raise CommandError("--save paints on a picture: give its file, not an id or none")
    arguments, options = _arguments(args)
    with connected(args) as client:
        if args.stream:
            result = _stream(client, args, image, arguments, options)
        else:
            result = getattr(client, args.command)(image, *arguments, **options)
            if args.json:
                print(json.dumps(result.to_dict(), ensure_ascii=False))
            else:
                print_result(result)
        if args.save is not None:
            _save(result, args.save)
    return 0


def read_image(name: str | None) -> str | bytes | ImageHandle | None:
    """A path for the SDK to read, the bytes on standard input, or a picture that the server has."""
    if name == "-":
        return sys.stdin.buffer.read()
    if name is not None and not Path(name).is_file():
        if name.startswith(_ID_PREFIX):
            return ImageHandle(name)
        if Path(name).is_dir():
            raise CommandError(f"{name!r} is a folder, not a picture")
        raise CommandError(f"there is no picture {name!r}")
    return name


def _arguments(args: argparse.Namespace) -> tuple[list[Any], dict[str, Any]]:
    """The skill's positional arguments and all keywords, for the client's method."""
    options = {name: getattr(args, name) for name in _SAMPLING} | request_options(args)
    if args.command == "query":
        return [args.question], {**options, "reasoning": args.reasoning or None}
    if args.command == "caption":
        return [args.length], options
    if args.command == "segment":
        return [args.object], {**options, "mask": args.mask}
    return [args.object], {**options, "max_objects": args.max_objects}


def _stream(
    client: KestrelClient,
    args: argparse.Namespace,
    image: str | bytes | ImageHandle | None,
    arguments: list[Any],
    options: dict[str, Any],
) -> Result:
    method: Callable[..., Any] = getattr(client, f"stream_{args.command}")
    with method(image, *arguments, **options) as stream:
        thinking = False
        for event in stream:
            if args.json:
                print(json.dumps(event_dict(event), ensure_ascii=False), flush=True)
                continue
            if thinking and isinstance(event, TextDelta):
                print("\n")
            thinking = isinstance(event, ReasoningDelta)
            print_event(event)
        result: Result = stream.result()
    if args.json:
        print(json.dumps({"final": result.to_dict()}, ensure_ascii=False), flush=True)
    elif isinstance(result, (QueryResult, CaptionResult)):
        print()
    else:
        _print_nothing(result)
    return result


def event_dict(event: object) -> dict[str, Any]:
    match event:
        case TextDelta():
            return {"text": event.text, "output_tokens": event.output_tokens}
        case ReasoningDelta():
            return {"reasoning": event.text, "output_tokens": event.output_tokens}
        case PathPiece():
            return {"path": event.path, "output_tokens": event.output_tokens}
        case Point():
            return {"point": {"x": event.x, "y": event.y}}
        case Box():
            return {"box": _edges(event)}
    raise AssertionError(f"an unknown event {event!r}")


def print_event(event: object) -> None:
    match event:
        case TextDelta() | ReasoningDelta():
            print(event.text, end="", flush=True)
        case PathPiece():
            print(event.path, flush=True)
        case Point() | Box():
            print(_place(event, None), flush=True)


def print_result(result: Result) -> None:
    match result:
        case QueryResult():
            if result.reasoning is not None:
                print(f"{result.reasoning.text}\n")
            print(result.answer)
        case CaptionResult():
            print(result.caption)
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
    _print_nothing(result)


def _print_nothing(result: Result) -> None:
    """Silence would look like a failure."""
    match result:
        case PointResult(points=()) | DetectResult(objects=()) | SegmentResult(box=None):
            print(f"no {result.object} found", file=sys.stderr)
        case SegmentResult(parse_error=str() as why):
            print(f"the outline can't be read: {why}", file=sys.stderr)
    if result.finish_reason == "length":
        print("a limit was reached; there may be more", file=sys.stderr)


def _place(place: Point | Box, size: ImageSize | None) -> str:
    """Fractions of the picture, and pixels where its size is known."""
    numbers = [place.x, place.y] if isinstance(place, Point) else list(_edges(place).values())
    text = " ".join(f"{number:.4f}" for number in numbers)
    if size is None:
        return text
    sides = (size.width, size.height) * 2
    pixels = ", ".join(str(round(n * side)) for n, side in zip(numbers, sides, strict=False))
    return f"{text}  ({pixels} px)"


def _edges(box: Box) -> dict[str, float]:
    return {name: getattr(box, name) for name in ("x_min", "y_min", "x_max", "y_max")}


def _save(result: Result, name: str) -> None:
    try:
        result.save(name)
    except (OSError, ValueError) as error:
        raise CommandError(f"can't write {name!r}: {error}") from None
