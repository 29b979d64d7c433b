"""``demo``: starts a server, calls the skills that its model was taught, prints the answers and draws them on images.

Its image, which bench uses too, is scene 0 of the evaluation set (training/scenes/evaluation_set.py). The model never
saw it in training.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

from kestrel_client import KestrelClient, KestrelError, Result
from kestrel_client.drawing.marks import Marks

from . import DEMO_IMAGE
from .files import file_errors
from .flag_table import add_flags
from .own_server import own_server
from .parser import CommandError
from .requests.output import print_result

_FLAGS = """
    --output FOLDER  folder for the drawn images [=out]
    --model NAME     model to serve [=kestrel-tiny]
"""
_QUESTION, _OBJECTS, _OBJECT = "How many green crescents are there?", "green crescent", "pink star"
_GREEDY = {"temperature": 0.0}
_CALLS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("query", _QUESTION, _GREEDY),
    ("query", _QUESTION, {**_GREEDY, "reasoning": True}),
    ("caption", "short", _GREEDY),
    ("caption", "normal", _GREEDY),
    ("point", _OBJECTS, {}),
    ("detect", _OBJECTS, {}),
    ("segment", _OBJECT, {"mask": "png"}),
)


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = "Exits with 1 if an answer is empty."
    add_flags(parser, _FLAGS)


def run(args: argparse.Namespace) -> int:
    folder = Path(args.output)
    with file_errors("create the folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
    # SIGTERM then ends the server too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"$ kestrel-grpc serve --model {args.model}", flush=True)
    with own_server(["--model", args.model]) as (address, ready):
        print(ready, flush=True)
        try:
            with KestrelClient(address) as client:
                empty = _call_skills(client, folder)
        except KestrelError as error:
            raise CommandError(str(error)) from None
    if empty:
        raise CommandError(f"empty results: {', '.join(empty)}")
    print(f"\nThe drawn images are in {folder}/.")
    return 0


def _call_skills(client: KestrelClient, folder: Path) -> list[str]:
    """Calls every skill. Returns the calls whose results are empty."""
    for model in client.list_models():
        print(f"{model.name} on {model.device_name or model.device}")
    empty = []
    for skill, argument, options in _CALLS:
        print(f"\n{skill}: {argument}{' (thinking)' if 'reasoning' in options else ''}")
        result: Result = getattr(client, skill)(DEMO_IMAGE, argument, **options)
        print_result(result)
        print(
            f"  first token {result.timings.ttft_ms:.0f} ms, all {result.timings.total_ms:.0f} ms"
        )
        if result.marks == Marks() or getattr(result, "answer", "answered") == "":
            empty.append(f"{skill} {argument!r}")
        if skill != "caption":
            result.save(folder / f"{skill}.png")
    return empty
