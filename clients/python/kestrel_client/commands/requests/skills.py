"""``query``, ``caption``, ``point``, ``detect``, ``segment``, ``gaze``: one request per image to a running server."""

from __future__ import annotations

import argparse
from typing import Any

from kestrel_client import (
    CaptionResult,
    KestrelClient,
    QueryResult,
    ReasoningDelta,
    Result,
    Stream,
    TextDelta,
)
from kestrel_client.values.results.objects import ObjectsResult

from ..connection import add_connection_flags, ask_each
from ..flag_table import add_flags
from ..flags import SettingsError
from ..parser import suggestion
from ..values import number, whole
from .features import FLAG as FEATURES_FLAG
from .flags import (
    add_logprobs_flags,
    add_min_score_flag,
    add_question_flags,
    add_request_flags,
    add_sampling_flags,
    add_save_flags,
    numbers,
    object_options,
    question_options,
    request_options,
    sampling,
    tile_grid,
)
from .inputs import IMAGE_HELP, Input, image_names, may_name_images, open_inputs, split_words
from .output import Output, event_dict, print_event, print_logprobs, print_nothing, print_result

_LENGTHS = ("short", "normal", "long")
_TEXT_COMMANDS = ("query", "caption")
_OWN_WORD = {"query": "QUESTION", "caption": "[short|normal|long]", "gaze": "[--eye X,Y]"}

ESSENTIAL = (
    *("--object", "--reasoning", "--temperature", "--max-tokens", "--max-objects"),
    *(
        "--min-score",
        "--tiles",
        "--eye",
        "--accurate",
        "--json-schema",
        "--stream",
        "--json",
        "--save",
    ),
    *("--model", "--region", "--server"),
)


_TOGETHER = "--together  ask one question about all images together, instead of about each"
_LENGTH = "--length {short,normal,long}  length of the caption, instead of the last word [normal]"
_OBJECTS = """
    --max-objects N  limit on the number of objects [the server's]
    --tiles RxC      look for small objects in R rows and C columns of tiles too, like 2x3; at most 16 tiles
    --tile-overlap PART  with --tiles: the part of a tile that it shares with its neighbour, in [0, 0.5] [0.2]
    --tiles-only     with --tiles: leave out the look at the whole image
"""
_DETECT = "--max-overlap PART  of two boxes that overlap more, keep the box with the higher score [keep both]"
_SEGMENT = """
    --mask {none,svg,png,rle,polygons}  mask to request in addition to the outline; --json prints it [=none]
    --coarse  give the model's own outline, which a refiner would sharpen
"""
_GAZE = """
    --eye X,Y...      place of an eye, as fractions of the image; may be given several times [the centre of each face]
    --face X0,Y0,X1,Y1...  edges of a face; may be given several times [all faces that the model finds]
    --max-faces N     limit on the number of faces that the model finds, at most 256 [the server's]
    --accurate        look 20 times for each face, and take the mean without outliers
"""
_SAMPLES = "--samples N  generate N answers, at most 16, with the seeds SEED, SEED+1 and so on [1]"
_OUTPUT = """
    --stream  print the answer as it arrives
    --json    print JSON, with usage and timings; with --stream one object per line
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    images = "[IMAGE ...]" if command == "query" else "IMAGE [IMAGE ...]"
    parser.usage = f"{parser.prog} {images} {_OWN_WORD.get(command, 'OBJECT')} [flags]"
    parser.epilog = _EPILOGS.get(command)
    parser.add_argument("words", metavar="IMAGE", nargs="*", help=IMAGE_HELP)
    add_flags(parser, FEATURES_FLAG)
    _add_own(parser, command)
    writes_text = command in _TEXT_COMMANDS
    add_sampling_flags(parser, text=writes_text)
    output = parser.add_argument_group("output")
    if writes_text:
        add_flags(output, _SAMPLES, N=whole(1, 16))
        add_logprobs_flags(output)
    add_flags(output, _OUTPUT)
    add_save_flags(output)
    add_request_flags(parser)
    add_connection_flags(parser)


_EPILOGS = {
    "query": "The last word is the question. Without an image the model answers from the text alone.",
    "caption": "The last word may be the length: short, normal (the default) or long.",
    "gaze": "A target of none means that the person looks at something outside the image.",
    **dict.fromkeys(
        ("point", "detect", "segment"), 'The last word names the object to find, like "red circle".'
    ),
}


def _add_own(parser: argparse.ArgumentParser, command: str) -> None:
    if command == "query":
        add_question_flags(parser)
        add_flags(parser, _TOGETHER)
    elif command == "caption":
        add_flags(parser, _LENGTH)
    elif command == "segment":
        add_flags(parser, _SEGMENT)
    elif command == "gaze":
        add_flags(parser, _GAZE, eye=numbers(2), face=numbers(4), N=whole(1, 256))
    else:
        parser.add_argument(
            "--object",
            action="append",
            dest="objects",
            metavar="OBJECT",
            help="object to find, instead of the last word; may be given several times",
        )
        add_flags(parser, _OBJECTS, N=whole(), RxC=tile_grid, PART=number)
    if command == "detect":
        add_flags(parser, _DETECT, PART=number)
    if command not in (*_TEXT_COMMANDS, "gaze"):
        add_min_score_flag(parser)


def run(args: argparse.Namespace) -> int:
    if args.stream and (getattr(args, "samples", None) or 1) > 1:
        raise SettingsError("--samples: a stream has one sample; leave out --stream")
    names, word = _words(args)
    inputs: list[Input | None] = [*open_inputs(names)] or [None]
    arguments, options = _arguments(args, word)
    if getattr(args, "together", False):
        options["images"] = [each.source for each in inputs[1:] if each is not None]
        del inputs[1:]
    output = Output(args, [each for each in inputs if each is not None])

    def ask(client: KestrelClient, image: Input | None) -> bool:
        if image is not None:
            output.title(image)
        method = getattr(client, f"stream_{args.command}" if output.streams else args.command)
        answer = method(None if image is None else image.source, *arguments, **options)
        result: Result = answer
        if output.streams:
            with answer as stream:
                result = _print_stream(args, stream, output, image)
        elif output.silent:
            print_nothing(result)
        elif args.json:
            output.line(image, result.to_dict())
        else:
            print_result(result)
        output.paint(result.marks, image)
        return not (isinstance(result, ObjectsResult) and result.errors)

    return ask_each(args, inputs, ask)


def _words(args: argparse.Namespace) -> tuple[list[str], str | list[str]]:
    """The images, and the question, the object or objects, or the length. Raises SettingsError."""
    program, command, words = args.program.name, args.command, image_names(args)
    usage = f"{program} {command} IMAGE {_OWN_WORD.get(command, 'OBJECT')}"
    images: list[str]
    word: str | list[str]
    if getattr(args, "objects", None):
        images, word = words, args.objects
        usage = f"{program} {command} IMAGE --object NAME"
    elif command == "gaze":
        images, word = words, []
    elif command != "caption":
        what = "question" if command == "query" else "object"
        images, word = split_words(words, what, usage)
    elif words and words[-1] in _LENGTHS and not args.length:
        images, word = words[:-1], words[-1]
    else:
        images, word = words, args.length or "normal"
        if len(words) > 1 and not may_name_images(words[-1]):
            hint = f"the lengths are {', '.join(_LENGTHS)}{suggestion(words[-1], _LENGTHS)}"
            raise SettingsError(f"{words[-1]!r} is neither an image nor a length; {hint}")
    if not images and command != "query":
        raise SettingsError(f"no image is given: {usage}")
    return images, word


def _arguments(args: argparse.Namespace, word: str | list[str]) -> tuple[list[Any], dict[str, Any]]:
    """The skill's positional arguments and all keywords, for the client's method."""
    options = sampling(args) | request_options(args)
    if args.command in _TEXT_COMMANDS and (args.samples or 1) > 1:
        options["num_samples"] = args.samples
    if args.command == "query":
        return [word], {**options, **question_options(args)}
    if args.command == "caption":
        return [word], options
    if args.command == "gaze":
        own = {"faces": args.face or (), "max_faces": args.max_faces, "accurate": args.accurate}
        return [args.eye or ()], {**options, **own}
    if args.command == "segment":
        own = {"mask": args.mask, "refine": False if args.coarse else None}
        return [word], {**options, **own, "min_score": args.min_score}
    return [word], {**options, **object_options(args)}


def _print_stream(
    args: argparse.Namespace, stream: Stream[Any, Any], output: Output, image: Input | None
) -> Result:
    thinking, labelled = False, len(getattr(args, "objects", None) or ()) > 1
    for event in stream:
        if args.json:
            output.line(image, event_dict(event))
            continue
        if thinking and isinstance(event, TextDelta):
            print("\n")
        thinking = isinstance(event, ReasoningDelta)
        print_event(event, labelled=labelled)
    result: Result = stream.result()
    if args.json:
        output.line(image, {"final": result.to_dict()})
    elif isinstance(result, (QueryResult, CaptionResult)):
        print()
        print_logprobs(result.logprobs)
    else:
        print_nothing(result)
    return result
