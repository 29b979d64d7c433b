"""``run``: runs any skill of a running server by its name, with the skill's own arguments and settings."""

from __future__ import annotations

import argparse
import json
from typing import Any

from ..connection import add_connection_flags, connected
from ..flag_table import add_flags
from ..flags import SettingsError
from .flags import add_request_flags, add_save_flags, request_options
from .inputs import IMAGE_HELP, open_input
from .output import Output, event_dict, print_event, print_json

ESSENTIAL = ("--argument", "--setting", "--stream", "--json", "--save", "--model", "--server")


_FLAGS = """
    --argument NAME=VALUE...  an argument of the skill; may be given several times
    --setting NAME=VALUE...   a setting of the skill; may be given several times
    --stream  print results as they arrive
    --json    print the whole result as JSON; with --stream one object per line
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        'A VALUE that is valid JSON (a number, true, [0.5, 0.5], "text") is read as JSON, any other as text.\n'
        "The command models lists the skills."
    )
    parser.add_argument("skill", metavar="SKILL", help="name of the skill")
    parser.add_argument("image", metavar="IMAGE", nargs="?", help=IMAGE_HELP)
    add_flags(parser, _FLAGS, **{"NAME=VALUE": _pair})
    add_save_flags(parser)
    add_request_flags(parser)
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    image = None if args.image is None else open_input(args.image)
    output = Output(args, [] if image is None else [image])
    source = None if image is None else image.source
    arguments = (
        args.skill,
        source,
        _once("argument", args.argument),
        _once("setting", args.setting),
    )
    with connected(args) as client:
        if output.streams:
            with client.stream_skill(*arguments, **request_options(args)) as stream:
                for event in stream:
                    if args.json:
                        print_json(event_dict(event))
                    else:
                        print_event(event)
                result = stream.result()
            if args.json:
                print_json({"final": result.to_dict()})
            else:
                print()
        else:
            result = client.run_skill(*arguments, **request_options(args))
            if not output.silent:
                print_json(result.to_dict() if args.json else result.output)
        output.paint(result.marks, image)
    return 0


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ValueError("must be NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _once(flag: str, pairs: list[tuple[str, Any]] | None) -> dict[str, Any]:
    """The pairs by name. Raises SettingsError if a name is given twice."""
    values: dict[str, Any] = {}
    for name, value in pairs or ():
        if name in values:
            raise SettingsError(f"--{flag} {name!r} is given twice")
        values[name] = value
    return values
