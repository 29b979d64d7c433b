"""Every link of a page leads to a file that exists, and to a heading that it has; the index names every page."""

import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(
    ["git", "-c", "safe.directory=*", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
).stdout.split("\0")  # A container's root may read a clone that another user owns.
PAGES = [
    ROOT / name
    for name in TRACKED
    if name.endswith((".md", ".ipynb")) and not name.startswith("tests/engine/vendor/")
]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CITED = re.compile(r"\bdocs/[\w/]+\.md(?:#[\w-]+)?")
"""A page, or its section, as code, messages and settings name it."""


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def leads_nowhere(target: Path, anchor: str) -> bool:
    return not target.exists() or bool(anchor and anchor not in anchors(target))


def test_every_link_leads_somewhere():
    assert len(PAGES) > 40
    broken = []
    for page in PAGES:
        for link in _LINK.findall(page.read_text()):
            name, _, anchor = link.partition("#")
            if "://" not in link and leads_nowhere(page.parent / name if name else page, anchor):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_every_page_that_a_file_names_exists():
    broken = []
    for name in TRACKED:
        path = ROOT / name
        if name.startswith(("protos/third_party/", "CHANGELOG")) or not path.is_file():
            continue
        content = path.read_bytes()
        if b"docs/" not in content:
            continue
        for cited in _CITED.findall(content.decode(errors="ignore")):
            page, _, anchor = cited.partition("#")
            if leads_nowhere(ROOT / page, anchor):
                broken.append(f"{name}: {cited}")
    assert broken == []


def test_the_index_names_every_page():
    index = ROOT / "docs/README.md"
    named = {(index.parent / link).resolve() for link in _LINK.findall(index.read_text())}
    pages = {page for page in (ROOT / "docs").rglob("*.md") if page != index}
    assert pages - named == set()
