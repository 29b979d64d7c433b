"""Flags from a table: names, values, defaults, and what argparse would refuse."""

import argparse

import pytest

from kestrel_client.commands.flag_table import add_flags
from kestrel_client.commands.values import whole

TABLE = """
    --rate, --start-rps R  requests per second, at 100 % load
    --object NAME...       names, of which there may
        be several [none]
    --mix NAME=SHARE,...   shares [=a=1]
    --kind {a,b}           one of these [=b]
    --seed N               a number [=7]
    --json                 print JSON
"""


def parsed(*words):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, TABLE, N=whole(), R=float)
    return parser, parser.parse_args(words)


def test_values_and_defaults():
    _, args = parsed()
    assert vars(args) == {
        "rate": None, "object": None, "mix": "a=1", "kind": "b", "seed": 7, "json": False
    }  # fmt: skip
    _, args = parsed("--start-rps", "2", "--object", "x", "--object", "y", "--json", "--seed=1")
    assert (args.rate, args.object, args.json, args.seed) == (2.0, ["x", "y"], True, 1)


def test_the_help_says_what_the_table_says():
    text = " ".join(parsed()[0].format_help().split())
    for words in (
        "--rate R, --start-rps R",
        "at 100 % load",
        "may be several [none]",
        "[7]",
        "{a,b}",
    ):
        assert words in text


@pytest.mark.parametrize("words", [["--seed", "x"], ["--rate", "x"], ["--kind", "c"]])
def test_other_values_are_refused(words):
    with pytest.raises(argparse.ArgumentError):
        parsed(*words)


def test_a_required_flag_and_a_line_that_is_not_one():
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_flags(parser, "--output FILE  where [required]")
    assert parser._actions[-1].required
    with pytest.raises(AssertionError, match="not a line of a table"):
        add_flags(parser, "output")
