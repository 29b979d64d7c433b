"""The arguments of ``eval``, and the course of an evaluation."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kestrel_client import AsyncKestrelClient

from ..batch.journal import Journal
from ..batch.rows import Row
from ..batch.running import add_running_flags, check_running_flags, run_rows, server_of
from ..connection import add_connection_flags
from ..files import file_errors
from ..flag_table import add_flags
from ..flags import SettingsError
from ..parser import EXIT_FAILED, CommandError
from ..requests.flags import add_min_score_flag, add_request_flags, request_options
from ..values import number, whole
from .benchmark import Asking, Benchmark, Item, items_of
from .comparison import compare
from .reading import open_records
from .report import Report, print_report, write_report
from .scored import score_lines
from .sets import DRAWN, NAMES, benchmark
from .statistics import totals

_COMPARE = "compare"

ESSENTIAL = (
    *("--limit", "--reasoning", "--output", "--fresh", "--json"),
    *("--in-process", "--model", "--weights", "--server"),
)


_HUB = "; write rows of your own (docs/use/evaluation.md)"
REMOVED = {**dict.fromkeys(("--hub", "--split", "--subset"), _HUB), "--worst": "; see scores.jsonl"}
"""What to give in place of flags that were removed."""
_QUESTIONS = """
    --limit N       use only the first N rows; -1: all [-1]
    --prompt TEXT   text of each question; {question} stands for the row's question [the set's own]
    --reasoning     let the model reason before it answers
    --temperature TEMPERATURE  0 always takes the most likely token [=0]
    --max-tokens MAX  limit on the tokens of each answer [the server's]
    --skills LIST   ask only requests of these skills, with commas between them [all of the set]
    --absent N      coco: also ask for N objects that each image does not show [=0]
"""
_OUTPUT = """
    --output PATH   folder of results and reports [eval-SET]
    --fresh         delete the results that there are
    --retry-failed  ask again what failed before
    --quiet         show no progress
    --json          print the report as JSON
"""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.usage = (
        f"{parser.prog} SET [FOLDER] [flags]\n       {parser.prog} {_COMPARE} FOLDER FOLDER [flags]"
    )
    parser.epilog = (
        "Asks about every row of a data set, and scores the answers with the set's own metric. Writes results,\n"
        "scores and a report into the folder --output. The same command continues where an interrupted one ended.\n"
        f"{', '.join(DRAWN[:-1])} and {DRAWN[-1]} are built in; with FOLDER they score rows of your own.\n"
        "  %(prog)s screens --server one:50051\n"
        "  %(prog)s text rows.jsonl --weights model.safetensors --limit 200\n"
        "  %(prog)s coco coco/ --server one:50051 --output eval-a\n"
        f"  %(prog)s {_COMPARE} eval-a eval-b\n"
        "Exits with 1 if a request failed. docs/use/evaluation.md describes sets, layouts and metrics."
    )
    parser.add_argument("words", metavar="SET", nargs="*", help="data set, and its folder or file")
    asking = parser.add_argument_group("questions")
    add_flags(
        asking, _QUESTIONS, limit=_limit, TEMPERATURE=number, MAX=whole(), absent=whole(0, 1000), LIST=_skills,
    )  # fmt: skip
    add_min_score_flag(asking)
    add_flags(parser.add_argument_group("output"), _OUTPUT)
    add_running_flags(parser)
    add_request_flags(parser)
    parser.set_defaults(priority="low")
    add_connection_flags(parser)


def _skills(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _limit(text: str) -> int:
    return -1 if text == "-1" else whole(1)(text)


def run(args: argparse.Namespace) -> int:
    name, *places = args.words or [""]
    if not name:
        raise SettingsError(f"no data set is given; the sets are {', '.join(NAMES)}")
    if name == _COMPARE:
        return compare(places, as_json=args.json)
    chosen = benchmark(name)
    if len(places) > 1:
        raise SettingsError(f"eval {name} takes one folder, not {len(places)}")
    check_running_flags(args)
    if args.prompt is not None and "{question}" not in args.prompt:
        raise SettingsError("--prompt: must have {question}, which stands for the row's question")
    unknown = [skill for skill in args.skills or () if skill not in chosen.skills]
    if unknown:
        raise SettingsError(
            f"--skills: eval {name} has no requests of {', '.join(map(repr, unknown))}; "
            f"its skills are {', '.join(chosen.skills)}"
        )
    asking = Asking(**{name: getattr(args, name) for name in Asking.__slots__})
    if not places and chosen.built_in is None:
        raise SettingsError(f"eval {name} needs a folder of its data")
    place = places[0] if places else str(chosen.built_in)
    records = open_records(chosen, place, None if args.limit == -1 else args.limit)
    data = place if places else "built in"
    return _evaluate(args, chosen, data, items_of(records, chosen, asking), asking)


def _evaluate(
    args: argparse.Namespace, chosen: Benchmark, data: str, found: Iterator[Item], asking: Asking
) -> int:
    folder = Path(args.output or f"eval-{chosen.name}")
    with file_errors("create the folder", folder):
        folder.mkdir(parents=True, exist_ok=True)
    options = {key: value for key, value in request_options(args).items() if value is not None}
    described = {
        "set": chosen.name,
        "data": data,
        "questions": {name: getattr(asking, name) for name in asking.__slots__},
        "options": {key: value for key, value in options.items() if key != "priority"},
        "weights": args.weights,
    }
    items: dict[Any, Item] = {item.identity: item for item in found}
    if not items:
        raise CommandError(f"{data} has no row")
    with Journal(
        folder / "results.jsonl", described, fresh=args.fresh, without_failed=args.retry_failed
    ) as journal:
        left = [item for item in items.values() if item.identity not in journal.done]
        if left:
            with server_of(args):
                run_rows(
                    args,
                    journal,
                    (Row(item.image, item.load(), item.number) for item in left),
                    lambda row: {k: c.task for k, c in items[row.identity].cases.items()},
                    options,
                    total=len(items),
                    before=len(items) - len(left),
                    check=lambda client: _check_skills(client, args, chosen),
                )
        answered = list(score_lines(journal.lines(), items, chosen))
        models = sorted({line["model"] for line in journal.lines() if line.get("model")})
    scores = [each.scored for each in answered]
    report = Report(
        benchmark=chosen,
        described=described,
        models=models,
        num_images=len(items),
        totals=totals(scores),
        whole=chosen.whole(answered) if chosen.whole is not None else None,
        answered=answered,
    )
    write_report(report, folder)
    print_report(report, as_json=args.json)
    return EXIT_FAILED if report.failed else 0


async def _check_skills(
    client: AsyncKestrelClient, args: argparse.Namespace, chosen: Benchmark
) -> None:
    """Raises CommandError if the model lacks a skill that the data set needs."""
    model = await client.get_model(args.model)
    names = model.skill_names
    needed = args.skills or chosen.skills
    missing = [skill for skill in needed if names and skill not in names]
    if missing:
        raise CommandError(
            f"the model {model.name!r} has no skill {' and '.join(map(repr, missing))}, which eval {chosen.name} "
            f"needs; its skills are {', '.join(names)}, and --skills chooses among them"
        )
