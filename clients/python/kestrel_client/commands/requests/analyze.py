"""``analyze``: runs several tasks on one image in one request to a running server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any

from kestrel_client import (
    AnalyzeResult,
    CaptionTask,
    DetectTask,
    GazeTask,
    KestrelClient,
    Outcome,
    PointTask,
    QueryTask,
    RpcError,
    SegmentTask,
    Stream,
    Task,
    TaskDone,
    TaskEvent,
)
from kestrel_client.values.tasks import outcome_dict

from ..connection import add_connection_flags, ask_each, failure_text
from ..flag_table import add_flags
from ..flags import SettingsError
from ..terminal import styled
from ..values import whole
from .features import FLAG as FEATURES_FLAG
from .flags import (
    add_min_score_flag,
    add_request_flags,
    add_save_flags,
    numbers,
    request_options,
)
from .inputs import IMAGE_HELP, Input, image_names, open_inputs
from .output import Output, event_dict, print_result

_KINDS: dict[str, type[Task]] = {
    "query": QueryTask,
    "caption": CaptionTask,
    "point": PointTask,
    "detect": DetectTask,
    "segment": SegmentTask,
}


class _AddTask(argparse.Action):
    """Collects the tasks of all kinds in the order of the command line, as (kind, text)."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        kind = str(option).removeprefix("--")
        namespace.tasks = [*(namespace.tasks or []), (kind, values)]


ESSENTIAL = (
    *("--query", "--caption", "--point", "--detect", "--segment", "--gaze", "--max-tokens"),
    *("--min-score", "--stream", "--json", "--save", "--model", "--server"),
)


_OUTPUT = """
    --stream  print results as they arrive
    --json    print JSON; with --stream one object per line
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = "Each kind of task may be given several times. Exits with 1 if a task fails."
    parser.usage = f"{parser.prog} IMAGE [IMAGE ...] TASK [TASK ...] [flags]"
    parser.add_argument("words", metavar="IMAGE", nargs="*", help=IMAGE_HELP)
    add_flags(parser, FEATURES_FLAG)
    add_task_flags(parser)
    output = parser.add_argument_group("output")
    add_flags(output, _OUTPUT)
    add_save_flags(output)
    add_request_flags(parser)
    add_connection_flags(parser)


def add_task_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `tasks_of` reads."""
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
        help="describe the image",
    )
    tasks.add_argument(
        "--gaze",
        action=_AddTask,
        dest="tasks",
        nargs="?",
        const="",
        metavar="X,Y",
        help="find what people look at: from the place of an eye, or from every face",
    )
    add_flags(parser, "--max-tokens N  limit on the tokens of each task [the server's]", N=whole())
    add_min_score_flag(parser)


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """The tasks of the command line, in order. Raises SettingsError if there is none."""
    if not args.tasks:
        raise SettingsError(
            "give at least one task: --query, --caption, --point, --detect, --segment, --gaze"
        )
    return [task_of(kind, argument, args) for kind, argument in args.tasks]


def run(args: argparse.Namespace) -> int:
    tasks = tasks_of(args)
    if not (names := image_names(args)):
        raise SettingsError(f"no image is given: {args.program.name} analyze IMAGE TASK ...")
    inputs = open_inputs(names)
    output, options = Output(args, inputs), request_options(args)
    titles = {str(n): title_of(kind, argument) for n, (kind, argument) in enumerate(args.tasks)}

    def ask(client: KestrelClient, image: Input) -> bool:
        output.title(image)
        if output.streams:
            with client.stream_analyze(image.source, tasks, **options) as events:
                analysis = _print_stream(events, titles, output, image, args)
        else:
            analysis = client.analyze(image.source, tasks, **options)
            if args.json and not output.silent:
                output.line(image, analysis.to_dict())
            elif not output.silent:
                for key, outcome in analysis.outcomes.items():
                    _print_outcome(titles[key], outcome, args)
        output.paint(analysis.marks, image)
        return not analysis.errors

    return ask_each(args, inputs, ask)


def title_of(kind: str, argument: str) -> str:
    return f"{kind} {argument!r}" if argument else kind


def task_of(kind: str, argument: Any, args: argparse.Namespace) -> Task:
    """The task of one flag. ``argument``: its question, object or length, or an eye. Raises SettingsError."""
    if kind == "gaze":
        try:
            return GazeTask(numbers(2)(argument) if argument else (), max_tokens=args.max_tokens)
        except ValueError as error:
            raise SettingsError(f"--gaze {argument}: {error}") from None
    scored = {} if kind in ("query", "caption") else {"min_score": args.min_score}
    return _KINDS[kind](argument, max_tokens=args.max_tokens, **scored)


def _print_stream(
    events: Stream[AnalyzeResult, TaskEvent | TaskDone],
    titles: Mapping[str, str],
    output: Output,
    image: Input,
    args: argparse.Namespace,
) -> AnalyzeResult:
    """Prints a stream: with --json every event, otherwise the result of each task as soon as it is complete.

    Texts of several tasks, printed piece by piece, could not be read.
    """
    for item in events:
        if not output.as_json:
            if isinstance(item, TaskDone):
                _print_outcome(titles[item.key], item.outcome, args)
        elif isinstance(item, TaskEvent):
            output.line(image, {"key": item.key, **event_dict(item.event)})
        else:
            output.line(image, {"key": item.key, "result": outcome_dict(item.outcome)})
    analysis = events.result()
    if output.as_json:
        output.line(image, {"final": analysis.to_dict()})
    return analysis


def _print_outcome(title: str, outcome: Outcome, args: argparse.Namespace) -> None:
    print(styled(f"{title}:", "cyan", sys.stdout), flush=True)
    if isinstance(outcome, RpcError):
        why = failure_text(outcome, args.server, args.timeout, args)
        print(f"failed: {why}", file=sys.stderr, flush=True)
    else:
        print_result(outcome)
    sys.stdout.flush()
