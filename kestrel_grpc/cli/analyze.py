"""``analyze``: several tasks on one picture in one request to a running server."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from kestrel_client import (
    CaptionTask,
    DetectTask,
    KestrelClient,
    Outcome,
    PointTask,
    QueryTask,
    RpcError,
    SegmentTask,
    Task,
    TaskEvent,
)
from kestrel_client.tasks import outcome_dict

from ..settings.flags import SettingsError
from .connection import add_connection_flags, connected
from .parser import EXIT_FAILED
from .skills import add_request_flags, event_dict, print_result, read_image, request_options

_KINDS: dict[str, type[Task]] = {
    "query": QueryTask,
    "caption": CaptionTask,
    "point": PointTask,
    "detect": DetectTask,
    "segment": SegmentTask,
}


class _AddTask(argparse.Action):
    """Gathers the tasks of all kinds in the order of the command line, as (kind, words)."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        kind = str(option).removeprefix("--")
        namespace.tasks = [*(namespace.tasks or []), (kind, values)]


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Each kind of task may be given several times. Exits with 1 if one of them fails."
    )
    parser.add_argument(
        "image", metavar="IMAGE", help="picture: a file, - for standard input, or the id of one put"
    )
    tasks = parser.add_argument_group("tasks")
    tasks.set_defaults(tasks=None)
    for kind, metavar, help in (
        ("query", "QUESTION", "ask a question"),
        ("point", "OBJECT", "find the centres of objects"),
        ("detect", "OBJECT", "find the bounding boxes of objects"),
        ("segment", "OBJECT", "outline an object"),
    ):
        tasks.add_argument(f"--{kind}", action=_AddTask, dest="tasks", metavar=metavar, help=help)
    tasks.add_argument(
        "--caption",
        action=_AddTask,
        dest="tasks",
        nargs="?",
        const="normal",
        choices=("short", "normal", "long"),
        help="describe the picture",
    )
    parser.add_argument("--max-tokens", type=int, help="most tokens of each task")
    output = parser.add_argument_group("output")
    output.add_argument("--stream", action="store_true", help="print what comes as it comes")
    output.add_argument("--json", action="store_true", help="print JSON; with --stream a line each")
    add_request_flags(parser)
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    if not args.tasks:
        raise SettingsError(
            "give at least one task: --query, --caption, --point, --detect, --segment"
        )
    tasks = [_KINDS[kind](words, max_tokens=args.max_tokens) for kind, words in args.tasks]
    image = read_image(args.image)
    assert image is not None, "argparse asks for it"
    titles = {str(n): f"{kind} {words!r}" for n, (kind, words) in enumerate(args.tasks)}
    with connected(args) as client:
        if args.stream:
            return _stream(client, args, image, tasks, titles)
        analysis = client.analyze(image, tasks, **request_options(args))
    if args.json:
        print(json.dumps(analysis.to_dict(), ensure_ascii=False))
    else:
        for key, outcome in analysis.outcomes.items():
            _print_outcome(titles[key], outcome)
    return EXIT_FAILED if analysis.errors else 0


def _stream(
    client: KestrelClient,
    args: argparse.Namespace,
    image: Any,
    tasks: list[Task],
    titles: dict[str, str],
) -> int:
    """Events as JSON; else each task's result as soon as it is there, since several texts at once can't be read."""
    with client.stream_analyze(image, tasks, **request_options(args)) as stream:
        for item in stream:
            if isinstance(item, TaskEvent):
                if args.json:
                    _print_json({"key": item.key, **event_dict(item.event)})
            elif args.json:
                _print_json({"key": item.key, "result": outcome_dict(item.outcome)})
            else:
                _print_outcome(titles[item.key], item.outcome)
        analysis = stream.result()
    if args.json:
        _print_json({"final": analysis.to_dict()})
    return EXIT_FAILED if analysis.errors else 0


def _print_json(line: dict[str, Any]) -> None:
    print(json.dumps(line, ensure_ascii=False), flush=True)


def _print_outcome(title: str, outcome: Outcome) -> None:
    print(f"{title}:", flush=True)
    if isinstance(outcome, RpcError):
        print(f"failed: {outcome.message} [{outcome.code.name}]", file=sys.stderr, flush=True)
    else:
        print_result(outcome)
    sys.stdout.flush()
