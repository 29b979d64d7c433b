"""``demo``: starts a server, calls every method once, prints the answers and draws them on images.

Its image, which bench uses too, is scene 0 of the evaluation set (training/scenes/evaluation_set.py). The model never
saw it in training.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from typing import Any

from kestrel_client import (
    CaptionResult,
    CaptionTask,
    DetectResult,
    DetectTask,
    KestrelClient,
    KestrelError,
    PointResult,
    QueryResult,
    QueryTask,
    Reasoning,
    Result,
    SegmentResult,
    Task,
)

from . import DEMO_IMAGE
from .own_server import own_server
from .parser import CommandError

_SHOWN = 300
"""Number of characters of an answer that are printed."""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = "Exits with 1 if an answer is empty, or if a stream gives another result."
    parser.add_argument(
        "--output", metavar="FOLDER", default="out", help="folder for the drawn images [out]"
    )
    parser.add_argument("--model", default="kestrel-tiny", help="model to serve [kestrel-tiny]")
    parser.add_argument(
        "--image",
        metavar="FILE",
        default=str(DEMO_IMAGE),
        help="image to ask about [the bundled image]",
    )
    parser.add_argument(
        "--question",
        default="How many green crescents are there?",
        help="question for query [%(default)s]",
    )
    parser.add_argument(
        "--objects",
        default="green crescent",
        help="objects that point and detect find [%(default)s]",
    )
    parser.add_argument(
        "--object", default="pink star", help="object that segment outlines [%(default)s]"
    )


def run(args: argparse.Namespace) -> int:
    folder = Path(args.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"cannot create the folder {args.output!r}: {error.strerror}") from None
    if not Path(args.image).is_file():
        raise CommandError(f"there is no image {args.image!r}")
    # SIGTERM then ends the server too, as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"$ kestrel-grpc serve --model {args.model}", flush=True)
    with own_server(["--model", args.model]) as (address, ready):
        print(ready, flush=True)
        try:
            with KestrelClient(address) as client:
                bad = _call_everything(client, args, folder)
        except KestrelError as error:
            raise CommandError(str(error)) from None
    if bad:
        raise CommandError(f"empty or contradictory results: {', '.join(bad)}")
    print(f"\nThe drawn images are in {folder}/.")
    return 0


def _call_everything(client: KestrelClient, args: argparse.Namespace, folder: Path) -> list[str]:
    """Calls every skill, unary and as a stream. Returns the calls whose results are empty or contradict each other."""
    image, greedy = args.image, {"temperature": 0.0}
    for model in client.list_models():
        print(f"{model.name} on {model.device_name or model.device}")
    calls: tuple[tuple[str, str, list[Any], dict[str, Any]], ...] = (
        ("query", args.question, [args.question], greedy),
        ("query", f"{args.question} (thinking)", [args.question], {**greedy, "reasoning": True}),
        ("caption", "short", ["short"], greedy),
        ("caption", "normal", ["normal"], greedy),
        ("point", args.objects, [args.objects], {}),
        ("detect", args.objects, [args.objects], {}),
        ("segment", args.object, [args.object], {"mask": "png"}),
    )
    bad = []
    for skill, asked, arguments, options in calls:
        result: Result = getattr(client, skill)(image, *arguments, **options)
        text = _result_text(result)
        timings = result.timings
        print(f"\n{skill}: {asked}\n  {_shortened(text) or 'nothing'}")
        print(f"  first token {timings.ttft_ms:.0f} ms, all {timings.total_ms:.0f} ms")
        if not text:
            bad.append(f"{skill} {asked!r}")
        if not isinstance(result, (CaptionResult, QueryResult)) or _points_somewhere(result):
            result.save(folder / f"{skill}.png")
        with getattr(client, f"stream_{skill}")(image, *arguments, **options) as stream:
            events = list(stream)
            same = _result_text(stream.result()) == text
        print(f"  stream: {len(events)} events, {'the same' if same else 'ANOTHER'} result")
        if not same:
            bad.append(f"stream_{skill} {asked!r}")
    return bad + _call_all_at_once(client, args)


def _call_all_at_once(client: KestrelClient, args: argparse.Namespace) -> list[str]:
    """Puts the image, runs several tasks on it in one call, runs a skill by its name, and deletes the image."""
    handle = client.put_image(args.image)
    tasks: dict[str, Task] = {
        "query": QueryTask(args.question, temperature=0.0),
        "caption": CaptionTask("short", temperature=0.0),
        "detect": DetectTask(args.objects),
    }
    analysis = client.analyze(handle, tasks)
    alone: list[Result] = [
        client.query(handle, args.question, temperature=0.0),
        client.caption(handle, "short", temperature=0.0),
        client.detect(handle, args.objects),
    ]
    same = [
        _result_text(result) == _result_text(analysis[kind])
        for kind, result in zip(tasks, alone, strict=True)
    ]
    print(f"\nanalyze: {', '.join(tasks)}\n  {'the same' if all(same) else 'ANOTHER'} result")
    print(
        f"  all {analysis.timings.total_ms:.0f} ms; {analysis.usage.cached_tokens} positions cached"
    )
    named = client.run_skill("caption", handle, {"length": "short"}, temperature=0.0)
    agrees = named.output["caption"] == _result_text(analysis["caption"])
    print(f"run: caption\n  {'the same' if agrees else 'ANOTHER'} result")
    deleted = client.delete_image(handle)
    return [
        name
        for name, good in (("analyze", all(same)), ("run", agrees), ("forget", deleted))
        if not good
    ]


def _result_text(result: Result) -> str:
    """The result as one line of text."""
    match result:
        case QueryResult(reasoning=None):
            return result.answer
        case QueryResult(reasoning=Reasoning() as reasoning):
            return f"{result.answer}  ({reasoning.text})" if result.answer else ""
        case CaptionResult():
            return result.caption
        case PointResult():
            return "  ".join(f"({point.x:.3f}, {point.y:.3f})" for point in result.points)
        case DetectResult():
            return "  ".join(
                f"({b.x_min:.3f}, {b.y_min:.3f})-({b.x_max:.3f}, {b.y_max:.3f})"
                for b in result.objects
            )
        case SegmentResult():
            return result.svg_path
    raise AssertionError(f"an unknown result {result!r}")


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _points_somewhere(result: Result) -> bool:
    return isinstance(result, QueryResult) and bool(result.grounding)
