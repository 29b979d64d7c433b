"""CHANGELOG.md: what has come since a release stands above it, and a change has a line, which may be wrapped once."""

import re
from pathlib import Path

CHANGELOG = Path(__file__).parents[2] / "CHANGELOG.md"


def test_each_change_since_the_first_release_has_one_line() -> None:
    text, _, first = CHANGELOG.read_text().partition("\n## [0.1.0]")
    _, _, unreleased = text.partition("\n## [Unreleased]\n")
    assert re.sub(r"- .+\n(  .+\n)?|#.+\n|\n", "", f"{unreleased}\n") == ""
    assert len(first.splitlines()) < 45
