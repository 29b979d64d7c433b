"""The map of the rooms, made from the code: docs/images/rooms.svg and the list in docs/develop/architecture.md.

A room is a folder with an ``__init__.py``, whose docstring begins with its purpose in one sentence. The order of the
layers is that of the import rules in pyproject.toml. ``make docs`` writes both; ``--check`` fails if they are stale.
"""

import ast
import re
import sys
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/develop/architecture.md"
PICTURE = ROOT / "docs/images/rooms.svg"
BEGIN = "<!-- rooms: written by `make docs` -->\n"
END = "<!-- end of rooms -->\n"
STACKS = {
    "clients/python/kestrel_client": "the SDK",
    "kestrel_grpc": "the service",
    "kestrel_engine": "the engine",
}
BESIDE = ("training", "benchmarks")
"""Packages whose rooms neither the list nor the picture has."""


def purpose(room: Path) -> str:
    """The first sentence of a room's docstring."""
    docstring = ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or ""
    text = " ".join(docstring.partition("\n\n")[0].split()).replace("``", "`")
    if not text:
        raise SystemExit(f"{room.relative_to(ROOT)}/__init__.py does not say what the room is for")
    return re.split(r"(?<=\.) ", text)[0].rstrip(".")


def rooms(parent: Path) -> list[Path]:
    return sorted(
        path.parent for path in parent.glob("*/__init__.py") if not path.parent.name.startswith("_")
    )


def listing() -> str:
    """An item for each package and each of its rooms, with the names of the rooms inside."""
    lines = []
    for name in (*STACKS, *BESIDE):
        package = ROOT / name
        lines.append(f"- [{name}](../../{name}): {purpose(package)}")
        for room in rooms(package) if name in STACKS else ():
            inner = ", ".join(f"`{each.name}`" for each in rooms(room))
            lines.append(f"  - `{room.name}`: {purpose(room)}" + (f" ({inner})" if inner else ""))
    return "\n".join(lines) + "\n"


def layers(package: str) -> list[list[str]]:
    """The rooms and modules of a package, from the top layer to the lowest; each once, where it stands first."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    name = Path(package).name
    found, seen = [], {"__main__"}
    for contract in contracts:
        if contract["type"] != "layers":
            continue
        prefix = "" if contract.get("containers") == [name] else f"{name}."
        for layer in contract["layers"] if prefix == "" or "containers" not in contract else ():
            parts = [part.strip() for part in layer.split("|")]
            names = [
                part.removeprefix(prefix).split(".")[0] for part in parts if part.startswith(prefix)
            ]
            new = [each for each in dict.fromkeys(names) if each not in seen]
            seen |= set(new)
            if new:
                found.append(new)
    return found


def picture() -> str:
    """Three stacks of rooms. A room may import what is below it, and nothing above or beside it."""
    width, height, gap, left = 340, 30, 8, 20
    drawn: list[str] = []
    lowest = 0
    for column, (package, title) in enumerate(STACKS.items()):
        x0 = left + column * (width + 40)
        rows = [row[i : i + 3] for row in layers(package) for i in range(0, len(row), 3)]
        drawn.append(
            f'<text class="t" x="{x0}" y="34">{escape(title)}: {escape(Path(package).name)}</text>'
        )
        for number, row in enumerate(rows):
            y, box = 50 + number * (height + gap), (width - gap * (len(row) - 1)) / len(row)
            for place, name in enumerate(row):
                x = x0 + place * (box + gap)
                kind = "r" if (ROOT / package / name).is_dir() else "m"
                drawn.append(
                    f'<rect class="{kind}" x="{x:.0f}" y="{y}" width="{box:.0f}" height="{height}" rx="5"/>'
                    f'<text x="{x + box / 2:.0f}" y="{y + 20}" text-anchor="middle">{escape(name)}</text>'
                )
        lowest = max(lowest, 50 + len(rows) * (height + gap))
    middle = 28
    for column, label in enumerate(("gRPC, HTTP", "requests")):
        x = left + (column + 1) * (width + 40) - 38
        drawn.append(f'<path class="a" d="M{x} {middle}h30m-7 -5l7 5l-7 5"/>')
        drawn.append(f'<text class="s" x="{x - 8}" y="{middle - 10}">{label}</text>')
    wide, high = left * 2 + 3 * width + 80, lowest + 12
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" font-family="system-ui, sans-serif" '
        f'font-size="13" role="img" aria-label="The rooms of Kestrel, by layers">\n'
        "<style>.r{fill:#f6f8fa;stroke:#57606a}.m{fill:#fff;stroke:#8c959f;stroke-dasharray:4 3}"
        ".t{font-weight:600;font-size:15px}.s{font-size:11px}text{fill:#1f2328}.a{stroke:#0969da;stroke-width:2;fill:none}"
        f'</style>\n<rect width="{wide}" height="{high}" fill="#fff"/>\n'
        + "\n".join(drawn)
        + "\n</svg>\n"
    )


def page_with(rooms: str) -> str:
    """The page with ``rooms`` between its marks."""
    head, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    assert begin and end, f"{PAGE.name} lacks its marks"
    return f"{head}{BEGIN}\n{rooms}\n{END}{tail}"


def main(arguments: list[str]) -> int:
    for name in (*STACKS, *BESIDE):
        for each in sorted((ROOT / name).rglob("__init__.py")):
            if "_pb" not in each.parts:
                purpose(each.parent)
    written = {PICTURE: picture(), PAGE: page_with(listing())}
    if "--check" in arguments:
        stale = [
            path.name
            for path, text in written.items()
            if not path.exists() or path.read_text() != text
        ]
        print(
            *(f"{name} is stale: run make docs" for name in stale),
            sep="\n",
            end="\n" if stale else "",
        )
        return len(stale)
    for path, text in written.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
