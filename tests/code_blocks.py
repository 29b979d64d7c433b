"""The code blocks of the documentation, indented and fenced, as the tests run them."""

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "clients/python/README.md", *sorted(ROOT.glob("docs/**/*.md"))]


class Block(NamedTuple):
    """``language``: the word after the fence, empty for an indented block."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def code_blocks(page: Path) -> list[Block]:
    """In order. An indented block follows a blank line and is not part of a list."""
    blocks: list[Block] = []
    lines = page.read_text("utf-8").splitlines()
    name = page.relative_to(ROOT).as_posix()
    number = 0
    while number < len(lines):
        start = number
        if fence := re.match(r"```(\w*)", lines[number]):
            number += 1
            while not lines[number].startswith("```"):
                number += 1
            text = "\n".join(lines[start + 1 : number]) + "\n"
            blocks.append(Block(name, start + 1, fence[1], text))
        elif lines[number].startswith("    ") and not _in_list(lines, number):
            while number < len(lines) and (lines[number].startswith("    ") or not lines[number]):
                number += 1
            text = textwrap.dedent("\n".join(lines[start:number])).strip("\n") + "\n"
            blocks.append(Block(name, start + 1, "", text))
            continue
        number += 1
    return blocks


def _in_list(lines: list[str], number: int) -> bool:
    """Whether an indented line continues a list's item, or a paragraph."""
    if number == 0 or lines[number - 1]:
        return True
    before = next(line for line in reversed(lines[:number]) if line)
    return before.startswith(("- ", "  ", "1. "))
