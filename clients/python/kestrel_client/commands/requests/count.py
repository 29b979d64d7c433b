"""``count``: what tasks would take of the model's context, before they run."""

from __future__ import annotations

import argparse

from kestrel_client import KestrelClient, QueryTask, TaskTokens, TokenCount

from ..connection import add_connection_flags, ask_each
from ..flag_table import add_flags
from ..flags import SettingsError
from .analyze import add_task_flags, tasks_of, title_of
from .features import FLAG as FEATURES_FLAG
from .flags import add_request_flags, request_options
from .inputs import IMAGE_HELP, Input, image_names, open_inputs
from .output import print_json

ESSENTIAL = (
    *("--query", "--caption", "--point", "--detect", "--segment", "--together", "--json"),
    *("--model", "--server"),
)


_FLAGS = """
    --together  count one question about all images together, instead of about each
    --json      print JSON
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "The model computes nothing. Without an image, a question is counted from its text alone."
    )
    parser.usage = f"{parser.prog} [IMAGE ...] TASK [TASK ...] [flags]"
    parser.add_argument("words", metavar="IMAGE", nargs="*", help=IMAGE_HELP)
    add_flags(parser, FEATURES_FLAG)
    add_task_flags(parser)
    add_flags(parser, _FLAGS)
    add_request_flags(parser)
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    tasks = tasks_of(args)
    inputs: list[Input | None] = [*open_inputs(image_names(args))] or [None]
    if inputs == [None] and not all(isinstance(task, QueryTask) for task in tasks):
        raise SettingsError(
            f"no image is given, and only --query needs none: {args.program.name} count IMAGE TASK ..."
        )
    together = ", ".join(each.name for each in inputs if each is not None)
    if args.together:
        (question,) = tasks if len(tasks) == 1 else (None,)
        if not isinstance(question, QueryTask):
            raise SettingsError("--together: needs one --query, and no other task")
        others = [each.source for each in inputs[1:] if each is not None]
        tasks = [QueryTask(question.question, images=others)]
        del inputs[1:]

    def count(client: KestrelClient, image: Input | None) -> bool:
        source = None if image is None else image.source
        counted = client.count_tokens(source, tasks, **request_options(args))
        name = together if args.together else "" if image is None else image.name
        if args.json:
            print_json({"image": name, **counted.to_dict()})
        else:
            _print(name, counted, [title_of(*task) for task in args.tasks])
        return True

    return ask_each(args, inputs, count)


def _print(name: str, counted: TokenCount, titles: list[str]) -> None:
    for image in counted.images:
        width, height = image.size
        print(f"image of {width}x{height}: {image.positions} positions, {image.num_crops} crops")
    for title, task in zip(titles, counted.tasks.values(), strict=True):
        print(f"{title}: {_positions(task)}; room for an answer: {task.room_tokens} positions")
    whose = f"{name}: " if name else ""
    print(
        f"{whose}{counted.input_tokens} input tokens; the context has {counted.context_positions} positions"
    )


def _positions(task: TaskTokens) -> str:
    text = task.input_tokens - task.image_tokens
    prompts = f" in {task.num_prompts} prompts" if task.num_prompts > 1 else ""
    return f"{task.input_tokens} positions{prompts} ({task.image_tokens} of images, {text} of text)"
