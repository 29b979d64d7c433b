"""The style of the pages: sentences of at most 30 words, and none of the habits of HABITS. ``make check`` runs it.

Checks README, CONTRIBUTING, docs/ and the pages of clients, protos and training, or the files that are given. Of
Markdown it reads prose, lists and the parts of tables' cells. It leaves out code, generated tables and the addresses of
links. Of protos it reads comments.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(
        ROOT / name
        for name in ("README.md", "CONTRIBUTING.md", "protos/README.md", "training/README.md")
    ),
    *sorted((ROOT / "clients").glob("*/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MOST_WORDS = 30
HABITS = {
    "a pronoun for a noun": r"\bthose (?:of|with|without|in|from|for|on|at|by|that|who|which|after|before|like)\b"
    r"|\b(?:the|this|that) ones? (?:that|of|in|with|without|from|for|which)\b"
    r"|\b(?:is|are|as|by|than|like|with|from|to|and|or|of|in) that (?:of|from)\b",
    "a participle for a noun": r"\bthe (?:asked|given|told|owed)\b(?=[.,;:)]|$| (?:is|are|of|by|in|to|and)\b)",
    '"is no X" for "is not an X"': r"(?<!there )\b(?:is|are|was|were) no"
    r" (?!longer\b|more\b|less\b|such\b|\w+er\b)\w+",
    '"a server more" for "another server"': r"\b(?:an?|one|two|three|\d+) (?!little |bit |lot |few |or |and )"
    r"[a-z]+ more\b(?=[.,;:)]|$| (?:is|are|has|takes|costs|gets|at|in|for|to|and|that|which|before|after)\b)",
    '"behind" for "after"': r"\bbehind (?:an?|the|its|their|each|one|other|cached) ?(?:\w+ )?"
    r"(?:images?|prompts?|questions?|steps?|names?|texts?|tokens?|ones)\b(?! of the server)",
}
_MARKS = re.compile(r"<!-- \w+: written by `make docs` -->.*?<!-- end of \w+ -->", re.DOTALL)
_FENCES = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_BEGINS = re.compile(r"^(?:[-*] |\d+\. |#+ |\||> )")
"""A line that begins a new text."""
_END = re.compile(r"(?<=[.!?])[\"')*]*\s+|(?<=[.!?][\"')*])\s+")


def texts(page: str) -> Iterator[str]:
    """The paragraphs, items and cells of a Markdown page, each in one line."""
    paragraph: list[str] = []
    after_blank = False
    for line in (*_FENCES.sub("", _MARKS.sub("", page)).splitlines(), ""):
        is_code = line.startswith("    ") and after_blank and not paragraph
        if (not line.strip() or _BEGINS.match(line.strip())) and paragraph:
            yield " ".join(paragraph)
            paragraph = []
        if line.startswith("|"):
            yield from (part.strip() for part in re.split(r"(?<!\\)\||; ", line) if part.strip())
        elif line.strip() and not is_code:
            paragraph.append(_BEGINS.sub("", line.strip()))
        after_blank = not line.strip() or is_code


def comments(proto: str) -> Iterator[str]:
    """The comments of a proto, each in one line; an empty line or a list's item begins a new one."""
    found: list[str] = []
    for line in (*proto.splitlines(), ""):
        comment = re.match(r"\s*//\s?(.*)$", line)
        if (not comment or not comment[1].strip() or comment[1].startswith("- ")) and found:
            yield " ".join(found)
            found = []
        if comment and comment[1].strip():
            found.append(comment[1].strip())


def sentences(text: str) -> Iterator[str]:
    plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    plain = re.sub(r"`+[^`]*`+", "`code`", plain)
    yield from _END.split(plain)


def faults(text: str) -> Iterator[str]:
    """What is wrong with a text, a line each."""
    for sentence in sentences(text):
        if (words := len(re.findall(r"\S*\w\S*", sentence))) > MOST_WORDS:
            yield f"{words} words: {sentence}"
        for name, pattern in HABITS.items():
            yield from (
                f"{name}: {found[0]!r} in: {sentence}"
                for found in re.finditer(pattern, sentence, re.IGNORECASE)
            )


def check(path: Path) -> list[str]:
    read = comments if path.suffix == ".proto" else texts
    return [fault for text in read(path.read_text("utf-8")) for fault in faults(text)]


def main(names: list[str]) -> int:
    count = 0
    for path in [Path(name).resolve() for name in names] or PAGES:
        for fault in check(path):
            count += 1
            print(f"{path.relative_to(ROOT)}: {fault}")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
