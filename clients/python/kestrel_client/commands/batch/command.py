"""The arguments of ``batch``, and what it prints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from kestrel_client import Task

from ..connection import add_connection_flags
from ..files import file_errors
from ..flag_table import add_flags
from ..flags import SettingsError
from ..parser import EXIT_FAILED
from ..requests.analyze import add_task_flags, task_of
from ..requests.flags import add_request_flags, request_options
from ..requests.inputs import IMAGE_HELP
from ..terminal import counted
from .exports import Export, parse_export
from .journal import Journal
from .on_server import check_on_server, run_on_server
from .overlays import Overlays
from .rows import Row, open_rows
from .running import Summary, add_running_flags, check_running_flags, run_rows, server_of

ESSENTIAL = (
    *("--rows", "--query", "--caption", "--point", "--detect", "--segment", "--output"),
    *("--export", "--overlays", "--fresh", "--retry-failed", "--concurrency"),
    *("--in-process", "--model", "--server"),
)


_ROWS = """
    --rows FILE...  CSV or JSONL file with a row for each image; paths of images are relative to the file
    --image-column NAME  column of --rows with the path or the http(s) address of the image [=image]
"""
_OUTPUT = """
    --output FILE   file of results (JSONL) [required]
    --export TARGET...  also write FILE.csv, FILE.parquet, coco:FILE or yolo:FOLDER at the end; may be given several
        times
    --overlays FOLDER  draw each result on its image, finished ones too (needs Pillow)
    --fresh         delete the results that there are
    --retry-failed  run the images again that failed before
    --on-server     leave the requests with the server (serve --batches), which answers them at low priority, also when
        this command has ended
    --off-peak      with --on-server: answer only while nobody else has asked the server for a minute
    --batch ID      with --on-server: go on with the batch that this command has left before [a new one]
    --quiet         show no progress
    --json          print the summary as JSON
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.usage = f"{parser.prog} [IMAGE ...] TASK [TASK ...] --output FILE [flags]"
    parser.epilog = (
        "Writes a line of JSON for each image, in the order in which they end. The same command continues where an\n"
        "interrupted one ended. In the tasks, {COLUMN} stands for a column of --rows:\n"
        "  %(prog)s --rows questions.csv --query '{question}' --output answers.jsonl\n"
        "  %(prog)s 'photos/**/*.jpg' --detect person --output found.jsonl --export coco:coco.json\n"
        "Exits with 1 if an image or a task failed."
    )
    parser.add_argument("words", metavar="IMAGE", nargs="*", help=IMAGE_HELP)
    add_flags(parser, _ROWS)
    add_task_flags(parser)
    add_flags(parser.add_argument_group("output"), _OUTPUT)
    add_running_flags(parser)
    add_request_flags(parser)
    parser.set_defaults(priority="low")
    add_connection_flags(parser)


def run(args: argparse.Namespace) -> int:
    if not args.tasks:
        raise SettingsError(
            "give at least one task: --query, --caption, --point, --detect, --segment"
        )
    check_running_flags(args)
    check_on_server(args)
    exports = [parse_export(text) for text in args.export or ()]
    rows = open_rows(args.words, args.rows or [], args.image_column)
    if not rows:
        raise SettingsError("no image is given: name images, or a file with --rows")
    keys = _keys(args)
    for row in rows:
        _tasks(row, keys, args)  # Raises an error before the first request.
    overlays = None if args.overlays is None else Overlays(args.overlays, rows)
    options = {name: value for name, value in request_options(args).items() if value is not None}
    described = {
        "tasks": [[kind, argument] for kind, argument in args.tasks],
        "max_tokens": args.max_tokens,
        "min_score": args.min_score,
        "options": {name: value for name, value in options.items() if name != "priority"},
    }
    if args.weights is not None:
        described["weights"] = args.weights
    with Journal(
        Path(args.output), described, fresh=args.fresh, without_failed=args.retry_failed
    ) as journal:
        left = [row for row in rows if row.identity not in journal.done]
        summary, before = Summary(), len(rows) - len(left)
        if left and args.on_server:
            summary = run_on_server(
                args, journal, rows, lambda row: _tasks(row, keys, args), options
            )
        elif left:
            with server_of(args):
                summary = run_rows(
                    args,
                    journal,
                    left,
                    lambda row: _tasks(row, keys, args),
                    options,
                    total=len(rows),
                    before=before,
                )
        if overlays is not None:
            overlays.write(journal, {row.identity for row in left})
        _export(journal, exports)
        _print(args, summary, journal, len(rows), before)
        return EXIT_FAILED if journal.failed else 0


def _keys(args: argparse.Namespace) -> list[str]:
    """A name for each task: its kind, with a number from the second of a kind on."""
    keys: list[str] = []
    for kind, _ in args.tasks:
        count = sum(each.partition("_")[0] == kind for each in keys)
        keys.append(kind if count == 0 else f"{kind}_{count + 1}")
    return keys


def _tasks(row: Row, keys: list[str], args: argparse.Namespace) -> Mapping[str, Task]:
    return {
        key: task_of(kind, row.filled(argument), args)
        for key, (kind, argument) in zip(keys, args.tasks, strict=True)
    }


def _export(journal: Journal, exports: list[Export]) -> None:
    for export in exports:
        with file_errors("write", export.path):
            export.path.parent.mkdir(parents=True, exist_ok=True)
            export.write(journal.lines(), export.path)


def _print(
    args: argparse.Namespace, summary: Summary, journal: Journal, total: int, before: int
) -> None:
    if args.json:
        plain = {**asdict(summary), "errors": dict(summary.errors), "failed": journal.failed}
        print(json.dumps({**plain, "images": total, "done_before": before}))
        return
    rate = summary.rows / summary.seconds if summary.seconds else 0.0
    most = summary.most_in_flight
    print(
        f"{counted(summary.rows, 'image')} in {summary.seconds:.1f} s ({rate:.2f}/s), {before} were done before, "
        f"{counted(summary.output_tokens, 'token')}{f', at most {most} in flight' if most else ''}; "
        f"results in {args.output}"
    )
    if summary.refused:
        print(
            f"{counted(summary.refused, 'request')} asked again, because the server was busy or away"
        )
    for code, count in summary.errors.most_common():
        print(f"{count} failed: {code}")
    if journal.failed:
        print(f"{journal.failed} of all images failed; --retry-failed runs them again")
