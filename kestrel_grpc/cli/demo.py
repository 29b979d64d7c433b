"""``demo``: a server of its own, every method called once, the answers printed and painted. Owns that server's process.

The image beside this file is scene 0 of the evaluation set (training/scoring/evaluation_set.py). The model never saw it
in training.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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

from .parser import CommandError

PICTURE = Path(__file__).with_name("demo.jpg")
_CREDENTIALS = ("KESTREL_API_KEY", "KESTREL_AUTH_TOKENS", "KESTREL_CONFIG")
_STOP_S = 15.0
_SHOWN = 300
"""Characters of an answer that are printed."""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = "Exits with 1 if an answer is empty, or a stream tells another."
    parser.add_argument(
        "--output", metavar="FOLDER", default="out", help="where the painted pictures go [out]"
    )
    parser.add_argument("--model", default="kestrel-tiny", help="what to serve [kestrel-tiny]")
    parser.add_argument(
        "--image", metavar="FILE", default=str(PICTURE), help="picture to ask about [our own]"
    )
    parser.add_argument(
        "--question",
        default="How many green crescents are there?",
        help="what query asks",
    )
    parser.add_argument("--objects", default="green crescent", help="what point and detect find")
    parser.add_argument("--object", default="pink star", help="what segment outlines")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"can't make the folder {args.output!r}: {error.strerror}") from None
    if not Path(args.image).is_file():
        raise CommandError(f"there is no picture {args.image!r}")
    # As Ctrl-C does: the server must not outlive us.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _server(args.model) as address:
        try:
            with KestrelClient(address) as client:
                bad = _call_everything(client, args, folder)
        except KestrelError as error:
            raise CommandError(str(error)) from None
    if bad:
        raise CommandError(f"empty or contradicted: {', '.join(bad)}")
    print(f"\nThe painted pictures are in {folder}/.")
    return 0


@contextmanager
def _server(model: str) -> Iterator[str]:
    """The address of a server that runs as long as the context, and no longer than this process."""
    with tempfile.TemporaryDirectory(prefix="kestrel-demo-") as folder, _pipe() as watched:
        command = [
            *(sys.executable, "-m", "kestrel_grpc.cli.demo_server", str(watched)),
            *("--model", model, "--listen", f"unix:{folder}/demo.sock", "--log-level", "warning"),
            *("--drain-delay", "0"),
        ]
        print(f"$ kestrel-grpc serve --model {model}", flush=True)
        # Its own server asks nobody, whatever is set up for another.
        environ = {k: v for k, v in os.environ.items() if k not in _CREDENTIALS}
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environ, pass_fds=(watched,)
        )
        try:
            assert process.stdout is not None
            ready = process.stdout.readline().strip()
            if not ready:
                raise CommandError(f"the server did not start (exit status {process.wait()})")
            print(ready)
            yield f"unix:{folder}/demo.sock"
        finally:
            process.terminate()
            try:
                process.communicate(timeout=_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


@contextmanager
def _pipe() -> Iterator[int]:
    """The read end of a pipe whose other end closes with this process."""
    ours, theirs = os.pipe()
    try:
        yield ours
    finally:
        os.close(ours)
        os.close(theirs)


def _call_everything(client: KestrelClient, args: argparse.Namespace, folder: Path) -> list[str]:
    """Calls every skill, as one answer and as a stream; returns which were empty or contradicted each other."""
    image, greedy = args.image, {"temperature": 0.0}
    info = client.server_info()
    print(f"{', '.join(m.name for m in client.list_models())} on {info.device_name or info.device}")
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
        told = _told(result)
        timings = result.timings
        print(f"\n{skill}: {asked}\n  {_shortened(told) or 'nothing'}")
        print(f"  first token {timings.ttft_ms:.0f} ms, all {timings.total_time_ms:.0f} ms")
        if not told:
            bad.append(f"{skill} {asked!r}")
        if not isinstance(result, (CaptionResult, QueryResult)) or _points_somewhere(result):
            result.save(folder / f"{skill}.png")
        with getattr(client, f"stream_{skill}")(image, *arguments, **options) as stream:
            events = list(stream)
            same = _told(stream.result()) == told
        print(f"  stream: {len(events)} events, {'the same' if same else 'ANOTHER'} result")
        if not same:
            bad.append(f"stream_{skill} {asked!r}")
    return bad + _call_all_at_once(client, args)


def _call_all_at_once(client: KestrelClient, args: argparse.Namespace) -> list[str]:
    """Puts the picture, does several tasks on it in one call, runs a skill by its name, forgets the picture."""
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
        _told(result) == _told(analysis[kind]) for kind, result in zip(tasks, alone, strict=True)
    ]
    print(f"\nanalyze: {', '.join(tasks)}\n  {'the same' if all(same) else 'ANOTHER'} result")
    print(f"  all {analysis.total_time_ms:.0f} ms; {analysis.usage.cached_tokens} positions cached")
    named = client.run_skill("caption", handle, {"length": "short"}, temperature=0.0)
    agrees = named.output["caption"] == _told(analysis["caption"])
    print(f"run: caption\n  {'the same' if agrees else 'ANOTHER'} result")
    forgotten = client.delete_image(handle)
    return [
        name
        for name, good in (("analyze", all(same)), ("run", agrees), ("forget", forgotten))
        if not good
    ]


def _told(result: Result) -> str:
    """The result in one line."""
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
