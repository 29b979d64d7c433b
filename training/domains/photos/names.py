"""The closed lists of things that kestrel-small names, and what lies outside them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from training.sources import icon_names

FOLDER = Path(__file__).parent
UNKNOWN = "I don't know."
OTHER = "unknown"


@dataclass(frozen=True)
class Name:
    """What the model says of a folder of photographs; "" outside the list. kept: only the figures show it."""

    text: str
    kind: str
    group: str
    kept: bool


@cache
def photographs() -> tuple[dict[str, Name], dict[str, list[str]]]:
    """The name of each folder, and the words that may be asked for instead of a name."""
    names: dict[str, Name] = {}
    words: dict[str, list[str]] = {}
    group = ""
    for line in (FOLDER / "names.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            group = line.strip("[]")
        elif line.startswith("="):
            name, word = line.removeprefix("= ").split(", ")
            words.setdefault(name, []).append(word)
        elif line and not line.startswith("#"):
            folder, _, said = line.partition(": ")
            name, _, kind = said.partition(", ")
            names[folder] = Name(name.strip("-"), kind, group, name == "--")
    return names, words


@cache
def emoji() -> dict[str, list[str]]:
    """The spoken name of each emoji, and the names that emoji sets use for it."""
    return icon_names(FOLDER / "emoji.txt")


def labels() -> list[str]:
    """Classes for the helper head."""
    photo = {name.text or OTHER: None for name in photographs()[0].values()}
    return [*(f"photo {name}" for name in photo), *(f"emoji {name}" for name in (*emoji(), OTHER))]
