"""The pages name flags that a command has."""

import argparse
import re
from collections.abc import Iterator

import pytest

from kestrel_grpc.cli.program import COMMANDS, whole_parser
from tests.code_blocks import PAGES, ROOT

OTHERS = {
    "--conv-mask-to-poly": "cvat-cli",
    "--fetch-allow": "label_studio_kestrel",
    "--label-studio": "label_studio_kestrel",
}
"""Flags of other programs, and whose they are."""
NAMED = re.compile(r"(?<=`)--[a-z][a-z0-9-]+(?=[ =`])")
"""A flag with which a code span begins: the command lines of other programs begin with their names."""


def flags_of(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from flags_of(below)


@pytest.mark.slow  # It imports all commands.
def test_every_named_flag_exists():
    _, parsers, _ = whole_parser(tuple(COMMANDS))
    known = {*OTHERS, *(flag for parser in parsers.values() for flag in flags_of(parser))}
    named = {
        (page.relative_to(ROOT).as_posix(), flag)
        for page in PAGES
        if page.parent.name not in ("lab", "python")
        for flag in NAMED.findall(page.read_text("utf-8"))
    }
    assert {(page, flag) for page, flag in named if flag not in known} == set()
    assert {flag for _, flag in named} >= set(OTHERS), "an exception that no page needs"
