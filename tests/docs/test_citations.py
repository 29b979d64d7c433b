"""The documents and sections that code cites exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DEVELOP = ROOT / "docs/develop"
CODE = sorted(
    path
    for top in (
        "kestrel_engine",
        "kestrel_grpc",
        "clients",
        "tests",
        "training",
        "benchmarks",
        "protos",
    )
    for kind in ("*.py", "*.proto")
    for path in (ROOT / top).rglob(kind)
    if "_pb" not in path.parts and "node_modules" not in path.parts
)
_WRITTEN = {"table.md"}
"""Names of files that a command in a docstring writes."""
_PAGE = re.compile(r"(?<![\w/.*{])((?:[\w.-]+/)*[\w.-]+\.md)\b")
_SECTIONS = re.compile(r"moondream\.md sections? (\d+(?:\.\d+)?)(?: (?:and|to) (\d+(?:\.\d+)?))?")


def heading_numbers(page: Path) -> set[str]:
    """The numbers of headings; "9.1 to 9.3" stands for all three."""
    found: set[str] = set()
    for first, last in re.findall(
        r"^#+ (\d+(?:\.\d+)?)(?: to (\d+\.\d+))?", page.read_text(), re.M
    ):
        found.add(first)
        if last:
            chapter, _, begin = first.partition(".")
            found |= {f"{chapter}.{n}" for n in range(int(begin), int(last.split(".")[1]) + 1)}
    return found


def test_cited_documents_exist():
    missing = []
    for path in CODE:
        for name in _PAGE.findall(path.read_text()):
            places = (ROOT / name, DEVELOP / name, path.parent / name)
            if name not in _WRITTEN and not any(place.exists() for place in places):
                missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert missing == []


def test_cited_sections_of_the_models_facts_exist():
    numbers = heading_numbers(DEVELOP / "moondream.md")
    cited = [
        (path, number)
        for path in CODE
        for pair in _SECTIONS.findall(path.read_text())
        for number in pair
        if number
    ]
    assert len(cited) > 20
    assert [f"{p.relative_to(ROOT)}: {n}" for p, n in cited if n not in numbers] == []
