"""``query``, ``caption``, ``point``, ``detect``, ``segment``: one request per image to a running server."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kestrel_client import (
    Box,
    CaptionResult,
    Constraint,
    DetectResult,
    ImageSize,
    KestrelClient,
    Logprobs,
    PathPiece,
    Point,
    PointResult,
    QueryResult,
    ReasoningDelta,
    Result,
    SegmentResult,
    TextDelta,
    Tiles,
)
from kestrel_client.values.results import plain_value

from ...settings.flags import SettingsError
from ..connection import add_connection_flags, connected, reported_failures
from ..parser import EXIT_FAILED, suggestion
from ..terminal import styled
from ..values import MAX_UINT64, number, whole
from .inputs import IMAGE_HELP, Input, Source, open_inputs, split_words
from .painted import SAVE_HELP, Painter

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "stop", "logprobs",
    "top_logprobs", *_PENALTIES
)  # fmt: skip
_OPTIONS = ("model", "adapter", "request_id", "priority", "cache_salt", "background", "region")
_LENGTHS = ("short", "normal", "long")
_TEXT_COMMANDS = ("query", "caption")
_OWN_WORD = {"query": "QUESTION", "caption": "[short|normal|long]"}


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    images = "[IMAGE ...]" if command == "query" else "IMAGE [IMAGE ...]"
    parser.usage = f"{parser.prog} {images} {_OWN_WORD.get(command, 'OBJECT')} [flags]"
    parser.epilog = _EPILOGS.get(command)
    parser.add_argument("words", metavar="IMAGE", nargs="*", help=IMAGE_HELP)
    _add_own(parser, command)
    writes_text = command in _TEXT_COMMANDS
    add_sampling_flags(parser, text=writes_text)
    output = parser.add_argument_group("output")
    if writes_text:
        output.add_argument(
            "--samples",
            type=whole(1, 16),
            metavar="N",
            help="generate N answers, at most 16, with the seeds SEED, SEED+1 and so on",
        )
        add_logprobs_flags(output)
    output.add_argument("--stream", action="store_true", help="print the answer as it arrives")
    output.add_argument(
        "--json",
        action="store_true",
        help="print JSON, with usage and timings; with --stream one object per line",
    )
    add_save_flags(output)
    add_request_flags(parser)
    add_connection_flags(parser)


def add_sampling_flags(
    parser: argparse.ArgumentParser, *, text: bool, has_seed: bool = False
) -> None:
    """``text``: the skill writes text. ``has_seed``: the command has a flag --seed of its own."""
    group = parser.add_argument_group("sampling (default: the server's)")
    group.add_argument("--temperature", type=number, help="0 always takes the most likely token")
    group.add_argument(
        "--top-p",
        type=number,
        help="sample from the most likely tokens, up to this total probability",
    )
    group.add_argument(
        "--top-k",
        type=whole(),
        help="sample from this many of the most likely tokens; 0: from all tokens",
    )
    group.add_argument(
        "--min-p",
        type=number,
        help="sample from tokens with at least this part of the largest probability",
    )
    group.add_argument(
        "--max-tokens",
        type=whole(),
        help="limit on the generated tokens; a point takes 2 tokens, a box 3",
    )
    if not has_seed:
        group.add_argument(
            "--seed",
            type=whole(0, MAX_UINT64),
            help="seed of sampling; the same seed gives the same answer",
        )
    if text:
        group.add_argument(
            "--stop",
            action="append",
            metavar="TEXT",
            help="end the answer before this text; may be given several times",
        )
        group.add_argument(
            "--repetition-penalty",
            type=number,
            help="above 1: repeat less of the question and of the text so far; 1: no penalty",
        )
        group.add_argument(
            "--presence-penalty",
            type=number,
            help="above 0: avoid tokens of the text so far; from -2 to 2",
        )
        group.add_argument(
            "--frequency-penalty",
            type=number,
            help="above 0: avoid frequent tokens of the text so far; from -2 to 2",
        )
        group.add_argument(
            "--logit-bias",
            action="append",
            type=_bias,
            metavar="ID=NUMBER",
            help="add a number to the logit of a token; may be given several times",
        )
        _add_constraint_flags(parser)


def add_logprobs_flags(output: Any) -> None:
    output.add_argument(
        "--logprobs",
        action="store_true",
        default=None,
        help="print the log-probability of each token too, and their sum and mean",
    )
    output.add_argument(
        "--top-logprobs",
        type=whole(0, 20),
        metavar="N",
        help="with --logprobs: print the N likeliest tokens beside each token, at most 20",
    )


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r}: must be an id and a number, like 17=-100"
        ) from None


def _add_constraint_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("form of the answer (one of these; default: any text)")
    kinds = group.add_mutually_exclusive_group()
    kinds.add_argument(
        "--choice",
        action="append",
        metavar="TEXT",
        help="answer with this text, or with that of another --choice",
    )
    kinds.add_argument(
        "--regex", metavar="PATTERN", help="answer with a text that matches this regular expression"
    )
    kinds.add_argument(
        "--grammar",
        metavar="FILE",
        help="answer with a text of the Lark grammar in this file",
    )
    kinds.add_argument(
        "--json-schema",
        metavar="FILE",
        help="answer with JSON that is valid under the JSON Schema in this file",
    )


def _constraint(args: argparse.Namespace) -> Constraint | None:
    """Raises SettingsError if a file cannot be read."""
    given = {
        "choices": getattr(args, "choice", None),
        "regex": getattr(args, "regex", None),
        "grammar": _text_of("--grammar", getattr(args, "grammar", None)),
        "json_schema": _text_of("--json-schema", getattr(args, "json_schema", None)),
    }
    return Constraint(**given) if any(value is not None for value in given.values()) else None


def _text_of(flag: str, path: str | None) -> str | None:
    if path is None:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{flag}: {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"{flag}: {path}: is not UTF-8 text") from error


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the flags of ``add_sampling_flags``, as keyword arguments of the client's methods."""
    biases = getattr(args, "logit_bias", None)
    return {name: getattr(args, name, None) for name in _SAMPLING} | {
        "constraint": _constraint(args),
        "logit_bias": None if biases is None else dict(biases),
    }


def add_save_flags(output: Any) -> None:
    output.add_argument("--save", metavar="FILE", help=SAVE_HELP)
    output.add_argument(
        "--save-on", metavar="FILE", help="with --save: the image to draw on if IMAGE is an id"
    )


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    request = parser.add_argument_group("request")
    request.add_argument("--model", help="name of the model that must answer")
    request.add_argument(
        "--adapter", metavar="NAME", help="adapter, a fine-tune of the model, to apply [none]"
    )
    request.add_argument(
        "--request-id",
        help="id of the request, for logs and for 'admin cancel' [the server makes one]",
    )
    request.add_argument(
        "--priority", choices=("low", "normal", "high"), help="priority among waiting requests"
    )
    request.add_argument(
        "--cache-salt",
        metavar="TEXT",
        help="share cached computation only with requests that have the same salt",
    )
    request.add_argument(
        "--background",
        type=_colour,
        metavar="COLOUR",
        help="background for a transparent image: white, black or RRGGBB [alpha is dropped]",
    )
    request.add_argument(
        "--region",
        type=_region,
        metavar="X0,Y0,X1,Y1",
        help="part of the image that the model sees: left, upper, right and lower edge as fractions [the whole image]",
    )


def _region(text: str) -> tuple[float, ...]:
    numbers = tuple(map(number, text.split(",")))
    if len(numbers) != 4:
        raise argparse.ArgumentTypeError(f"{text!r}: must be four numbers, like 0,0,0.5,0.5")
    return numbers


def _tiles(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    try:
        return int(rows), int(columns)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be rows and columns, like 2x3") from None


def _colour(text: str) -> str:
    named = {"white": "ffffff", "black": "000000"}
    digits = named.get(text, text.removeprefix("#"))
    if re.fullmatch(r"[0-9a-fA-F]{6}", digits) is None:
        raise argparse.ArgumentTypeError(f"{text!r}: must be white, black or RRGGBB, like ffeedd")
    return f"#{digits}"


def request_options(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the flags of ``add_request_flags``, as keyword arguments of the client's methods."""
    return {name: getattr(args, name) for name in _OPTIONS}


def add_min_score_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--min-score",
        type=number,
        metavar="SCORE",
        help="omit what has a lower score, in [0, 1] [the server's default]",
    )


def object_options(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the flags of ``point`` and ``detect`` alone, as keyword arguments of the client's methods. Raises
    SettingsError."""
    options = {name: getattr(args, name) for name in ("max_objects", "min_score")}
    if args.command == "detect":
        options["max_overlap"] = args.max_overlap
    if args.tiles is None:
        for flag in ("tile_overlap", "tiles_only"):
            if getattr(args, flag):
                raise SettingsError(f"--{flag.replace('_', '-')}: needs --tiles, like --tiles 2x3")
        return options
    whole_image = False if args.tiles_only else None
    rows, columns = args.tiles
    return {**options, "tiles": Tiles(rows, columns, args.tile_overlap, whole_image)}


_EPILOGS = {
    "query": "The last word is the question. Without an image the model answers from the text alone.",
    "caption": "The last word may be the length: short, normal (the default) or long.",
    **dict.fromkeys(
        ("point", "detect", "segment"), 'The last word names the object to find, like "red circle".'
    ),
}


def _add_own(parser: argparse.ArgumentParser, command: str) -> None:
    if command == "query":
        parser.add_argument(
            "--reasoning", action="store_true", help="let the model reason before it answers"
        )
        parser.add_argument(
            "--together",
            action="store_true",
            help="ask one question about all images together, instead of about each",
        )
    elif command == "caption":
        parser.add_argument(
            "--length", choices=_LENGTHS, help="length of the caption, instead of the last word"
        )
    if command in ("point", "detect"):
        parser.add_argument(
            "--max-objects", type=whole(), metavar="N", help="limit on the number of objects"
        )
        parser.add_argument(
            "--object",
            action="append",
            dest="objects",
            metavar="OBJECT",
            help="object to find, instead of the last word; may be given several times",
        )
        parser.add_argument(
            "--tiles",
            type=_tiles,
            metavar="RxC",
            help="look for small objects in R rows and C columns of tiles too, like 2x3; at most 16 tiles",
        )
        parser.add_argument(
            "--tile-overlap",
            type=number,
            metavar="PART",
            help="with --tiles: the part of a tile that it shares with its neighbour, in [0, 0.5] [0.2]",
        )
        parser.add_argument(
            "--tiles-only",
            action="store_true",
            help="with --tiles: leave out the look at the whole image",
        )
    if command == "detect":
        parser.add_argument(
            "--max-overlap",
            type=number,
            metavar="PART",
            help="of two boxes that overlap more, keep the one with the higher score [keep both]",
        )
    if command in ("point", "detect", "segment"):
        add_min_score_flag(parser)
    if command == "segment":
        parser.add_argument(
            "--mask", choices=("none", "svg", "png", "rle", "polygons"), default="none",
            help="mask to request in addition to the outline; --json prints it",
        )  # fmt: skip
        parser.add_argument(
            "--coarse",
            action="store_true",
            help="give the model's own outline, which a refiner would sharpen",
        )


def run(args: argparse.Namespace) -> int:
    if getattr(args, "objects", None):
        from . import several_objects  # Imports this module.

        return several_objects.run(args)
    if args.stream and (getattr(args, "samples", None) or 1) > 1:
        raise SettingsError("--samples: a stream has one sample; leave out --stream")
    names, word = _words(args)
    inputs: list[Input | None] = [*open_inputs(names)] or [None]
    more: list[Input | None] = []
    if getattr(args, "together", False):
        inputs, more = inputs[:1], inputs[1:]
    given = [each for each in inputs if each is not None]
    painter = None if args.save is None else Painter(args.save, given, args.save_on)
    arguments, options = _arguments(args, word)
    if more:
        options["images"] = [each.source for each in more if each is not None]
    failed = 0
    with connected(args) as client:
        for each in inputs:
            # If one of several images fails, the command continues with the others.
            with reported_failures(each.name if each else "", alone=len(inputs) == 1) as attempt:
                _ask(client, args, each, len(inputs) > 1, arguments, options, painter)
            failed += attempt.failed
    return EXIT_FAILED if failed else 0


def _words(args: argparse.Namespace) -> tuple[list[str], str]:
    """The images, and the question, object or length. Raises SettingsError."""
    command, words = args.command, args.words
    usage = f"kestrel-grpc {command} IMAGE {_OWN_WORD.get(command, 'OBJECT')}"
    if command != "caption":
        what = "question" if command == "query" else "object"
        images, word = split_words(words, what, usage)
    elif words and words[-1] in _LENGTHS and not args.length:
        images, word = words[:-1], words[-1]
    else:
        images, word = words, args.length or "normal"
        if len(words) > 1 and not os.path.exists(words[-1]):
            hint = suggestion(words[-1], _LENGTHS)
            if hint:
                raise SettingsError(f"{words[-1]!r} is neither an image nor a length{hint}")
    if not images and command != "query":
        raise SettingsError(f"no image is given: {usage}")
    return images, word


def _ask(
    client: KestrelClient,
    args: argparse.Namespace,
    given: Input | None,
    several: bool,
    arguments: list[Any],
    options: dict[str, Any],
    painter: Painter | None,
) -> None:
    silent = painter is not None and painter.takes_output
    source = None if given is None else given.source
    if several and not args.json and not silent:
        assert given is not None
        print(styled(f"{given.name}:", "bold", sys.stdout), flush=True)
    named = {"image": given.name} if several and given is not None else {}
    if args.stream and not silent:
        result = _stream(client, args, source, arguments, options, named)
    else:
        result = getattr(client, args.command)(source, *arguments, **options)
        if silent:
            print_nothing(result)
        elif args.json:
            print(json.dumps({**named, **result.to_dict()}, ensure_ascii=False), flush=True)
        else:
            print_result(result)
    if painter is not None and given is not None:
        painter.write(result, given)


def _arguments(args: argparse.Namespace, word: str) -> tuple[list[Any], dict[str, Any]]:
    """The skill's positional arguments and all keywords, for the client's method."""
    options = sampling(args) | request_options(args)
    if args.command in _TEXT_COMMANDS and (args.samples or 1) > 1:
        options["num_samples"] = args.samples
    if args.command == "query":
        return [word], {**options, "reasoning": args.reasoning or None}
    if args.command == "caption":
        return [word], options
    if args.command == "segment":
        own = {"mask": args.mask, "refine": False if args.coarse else None}
        return [word], {**options, **own, "min_score": args.min_score}
    return [word], {**options, **object_options(args)}


def _stream(
    client: KestrelClient,
    args: argparse.Namespace,
    image: Source | None,
    arguments: list[Any],
    options: dict[str, Any],
    named: dict[str, str],
) -> Result:
    """Prints a stream. ``named``: the first fields of each JSON object."""
    method: Callable[..., Any] = getattr(client, f"stream_{args.command}")
    with method(image, *arguments, **options) as stream:
        thinking = False
        for event in stream:
            if args.json:
                print(json.dumps({**named, **event_dict(event)}, ensure_ascii=False), flush=True)
                continue
            if thinking and isinstance(event, TextDelta):
                print("\n")
            thinking = isinstance(event, ReasoningDelta)
            print_event(event)
        result: Result = stream.result()
    if args.json:
        final = {**named, "final": result.to_dict()}
        print(json.dumps(final, ensure_ascii=False), flush=True)
    elif isinstance(result, (QueryResult, CaptionResult)):
        print()
        _print_logprobs(result.logprobs)
    else:
        print_nothing(result)
    return result


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
            print(result.answer)
            _print_logprobs(result.logprobs)
        case CaptionResult():
            print(result.caption)
            _print_logprobs(result.logprobs)
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


def _print_logprobs(logprobs: Logprobs | None) -> None:
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
            absence = (
                "" if result.absence is None else f"; absent with probability {result.absence:.3f}"
            )
            print(f"no {result.object} found{absence}", file=sys.stderr)
        case SegmentResult(box=None):
            print(f"no {result.object} found", file=sys.stderr)
        case SegmentResult(parse_error=str() as why):
            print(f"the outline cannot be parsed: {why}", file=sys.stderr)
    if result.finish_reason == "length":
        print("a limit was reached; the result may be incomplete", file=sys.stderr)


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
