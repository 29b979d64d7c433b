"""The flags that several commands share: sampling, the form of an answer, handling of the request; and their values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kestrel_client import Constraint, Tiles

from ..flag_table import add_flags
from ..flags import SettingsError
from ..values import MAX_INT64, number, whole
from .painted import SAVE_HELP

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "max_reasoning_tokens", "seed", "stop",
    "logprobs", "top_logprobs", *_PENALTIES
)  # fmt: skip
_OPTIONS = (
    *("model", "adapter", "request_id", "priority", "cache_salt"),
    *("background", "region", "max_crops"),
)


_OF_OBJECTS = ("max_objects", "min_score", "max_overlap", "max_absence", "tiles", "max_faces")
_FORMS = ("regex", "grammar", "json_schema", "logit_bias")
_FIELDS = {name: name for name in (*_SAMPLING, *_OPTIONS, *_OF_OBJECTS, *_FORMS)} | {
    "choices": "choice",
    "overlap": "tile_overlap",
    "eyes": "eye",
    "faces": "face",
    "num_samples": "samples",
}
"""The arguments of the command line, by the fields of requests that they fill."""
_SAMPLING_FLAGS = """
    --temperature NUMBER  from 0 to 100; 0 always takes the most likely token
    --top-p NUMBER   sample from the most likely tokens, up to this total probability; above 0, at most 1
    --top-k N        sample from this many of the most likely tokens; 0: from all tokens
    --min-p NUMBER   sample from tokens with at least this part of the largest probability; from 0 to 1
    --max-tokens N   limit on the generated tokens; a point takes 2 tokens, a box 3
"""
_SEED = "--seed SEED  seed of sampling, from 0 to 2^63 - 1; the same seed gives the same answer"
_PENALTY_FLAGS = """
    --stop TEXT...   end the answer before this text; may be given several times
    --repetition-penalty NUMBER  above 1: repeat less of the question and of the text so far; from 0.01 to 10; 1: no
        penalty
    --presence-penalty NUMBER   above 0: avoid tokens of the text so far; from -2 to 2
    --frequency-penalty NUMBER  above 0: avoid frequent tokens of the text so far; from -2 to 2
    --logit-bias ID=NUMBER...   add a number from -100 to 100 to the logit of a token; may be given several times
"""
_CONSTRAINT_FLAGS = """
    --choice TEXT...    answer with this text, or with the text of another --choice
    --regex PATTERN     answer with a text that matches this regular expression
    --grammar FILE      answer with a text of the Lark grammar in this file
    --json-schema FILE  answer with JSON that is valid under the JSON Schema in this file
"""
_QUESTION = """
    --reasoning      let the model reason before it answers
    --max-reasoning-tokens N  with --reasoning: limit on the tokens of the reasoning [that of --max-tokens]
    --system TEXT    instructions that precede the first question [none]
    --presupposes OBJECT...  answer only if the image shows this object; may be given several times
"""
_MAX_ABSENCE = """
    --max-absence P  with --presupposes: largest probability that the object is absent, in [0, 1] [the server's default]
"""
_LOGPROBS = """
    --logprobs        print the log-probability of each token too, and their sum and mean
    --top-logprobs N  with --logprobs: print the N likeliest tokens beside each token, at most 20
"""
_SAVE = f"""
    --save FILE     {SAVE_HELP}
    --save-on FILE  with --save: the image to draw on if IMAGE is an id
"""
_REQUEST = """
    --model MODEL      name of the model that must answer [the server's default model]
    --adapter NAME     adapter, a fine-tune of the model, to apply [none]
    --request-id ID    id of the request, for logs and for 'admin cancel' [the server makes one]
    --priority {low,normal,high}  priority among waiting requests [normal]
    --cache-salt TEXT  share cached computation only with requests that have the same salt [no salt]
    --background COLOUR  background for a transparent image: white, black or RRGGBB [alpha is dropped]
    --region X0,Y0,X1,Y1  part of the image that the model sees: left, upper, right and lower edge as fractions
        [the whole image]
    --max-crops N      limit on the tiles of each image, beside the overview: fewer take less time; 1: the overview
        alone [the model's own limit]
"""
_MIN_SCORE = "--min-score SCORE  omit what has a lower score, in [0, 1] [the server's default]"


def add_sampling_flags(parser: argparse.ArgumentParser, *, text: bool) -> None:
    """``text``: the skill writes text."""
    group = parser.add_argument_group("sampling (default: the server's)")
    add_flags(group, _SAMPLING_FLAGS, NUMBER=number, N=whole())
    add_flags(group, _SEED, SEED=whole(0, MAX_INT64))
    if text:
        add_flags(group, _PENALTY_FLAGS, NUMBER=number, logit_bias=_bias)
        form = "form of the answer (one of these; default: any text)"
        add_flags(parser.add_argument_group(form).add_mutually_exclusive_group(), _CONSTRAINT_FLAGS)


def add_question_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, _QUESTION, N=whole())
    add_flags(parser, _MAX_ABSENCE, P=number)
    parser.set_defaults(system="", presupposes=[])


def question_options(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the flags of questions, as keyword arguments of the client's methods."""
    return {
        "reasoning": args.reasoning,
        "system": args.system,
        "presupposes": args.presupposes,
        "max_absence": args.max_absence,
    }


def add_logprobs_flags(output: Any) -> None:
    add_flags(output, _LOGPROBS, N=whole(0, 20))
    output.set_defaults(logprobs=None)


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise ValueError("must be an id and a number, like 17=-100") from None


def _constraint(args: argparse.Namespace) -> Constraint | None:
    """Raises SettingsError if a file cannot be read."""
    values = {
        "choices": getattr(args, "choice", None),
        "regex": getattr(args, "regex", None),
        "grammar": _text_of("--grammar", getattr(args, "grammar", None)),
        "json_schema": _text_of("--json-schema", getattr(args, "json_schema", None)),
    }
    return Constraint(**values) if any(value is not None for value in values.values()) else None


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
    values = {name: getattr(args, name) for name in _SAMPLING if hasattr(args, name)}
    if not hasattr(args, "logit_bias"):
        return values
    biases = args.logit_bias
    return values | {
        "constraint": _constraint(args),
        "logit_bias": None if biases is None else dict(biases),
    }


def add_save_flags(output: Any) -> None:
    add_flags(output, _SAVE)


def add_request_flags(parser: argparse.ArgumentParser) -> None:
    add_flags(
        parser.add_argument_group("request"), _REQUEST, COLOUR=_colour, region=numbers(4), N=whole()
    )


def numbers(count: int) -> Callable[[str], tuple[float, ...]]:
    """A parser of so many numbers, with commas between."""

    def parse(text: str) -> tuple[float, ...]:
        read = tuple(map(number, text.split(",")))
        if len(read) != count:
            words = {2: "two", 4: "four"}
            example = ",".join(["0", "0", "0.5", "0.5"][-count:])
            raise ValueError(f"must be {words[count]} numbers, like {example}")
        return read

    return parse


def tile_grid(text: str) -> tuple[int, int]:
    rows, _, columns = text.partition("x")
    try:
        return int(rows), int(columns)
    except ValueError:
        raise ValueError("must be rows and columns, like 2x3") from None


def _colour(text: str) -> str:
    named = {"white": "ffffff", "black": "000000"}
    digits = named.get(text, text.removeprefix("#"))
    if re.fullmatch(r"[0-9a-fA-F]{6}", digits) is None:
        raise ValueError("must be white, black or RRGGBB, like ffeedd")
    return f"#{digits}"


def request_options(args: argparse.Namespace) -> dict[str, Any]:
    """The values of the flags of ``add_request_flags``, as keyword arguments of the client's methods."""
    return {name: getattr(args, name) for name in _OPTIONS}


def flag_of(field: str, args: argparse.Namespace) -> str | None:
    """The flag that gave a field of the request, like ``query.sampling.top_p``; None if no flag did."""
    for part in reversed(re.sub(r"\[\d+\]", "", field).split(".")):
        dest = _FIELDS.get(part)
        if dest is not None and getattr(args, dest, None) is not None:
            return f"--{dest.replace('_', '-')}"
    return None


def add_min_score_flag(parser: Any) -> None:
    add_flags(parser, _MIN_SCORE, SCORE=number)


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
    rows, columns = args.tiles
    return {**options, "tiles": Tiles(rows, columns, args.tile_overlap, args.tiles_only)}
