"""The closed lists of things that kestrel-small names, and what lies outside them."""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from training.sources import icon_names

FOLDER = Path(__file__).parent
UNKNOWN = "I don't know."
OTHER = "unknown"


@dataclass(frozen=True)
class Name:
    """What the model says of a folder of photographs; "" outside the list. kept: only the figures show it.

    label: the helper head's class, which may be finer.
    """

    text: str
    kind: str
    group: str
    kept: bool
    label: str


@cache
def photographs() -> tuple[dict[str, Name], dict[str, list[str]]]:
    """The name of each folder, and the words that may be asked for instead of a name."""
    names: dict[str, Name] = {}
    words: dict[str, list[str]] = {}
    joined: dict[str, str] = {}
    group = ""
    for line in (FOLDER / "names.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            group = line.strip("[]")
        elif line.startswith("+"):
            joint, *parts = line.removeprefix("+ ").split(", ")
            joined |= dict.fromkeys(parts, joint)
        elif line.startswith("="):
            name, word = line.removeprefix("= ").split(", ")
            words.setdefault(name, []).append(word)
        elif line and not line.startswith("#"):
            folder, _, said = line.partition(": ")
            name, _, kind = said.partition(", ")
            bare = name.strip("- ")
            spoken = "" if name.startswith("-") else bare
            names[folder] = Name(spoken, kind, group, name == "--", bare or OTHER)
    for folder, _, _ in others():
        names[folder] = Name("", "", "things", False, OTHER)
    for folder, each in names.items():
        if each.text in joined:
            joint = joined[each.text]
            own = each.kind or (each.text if each.text != joint else "")
            names[folder] = replace(each, text=joint, kind=own)
    return names, words


def others() -> list[tuple[str, str, list[str]]]:
    """Photographs of other things: the archive's folder, the folder of the clones, and the files there."""
    lines = (FOLDER / "others.txt").read_text(encoding="utf-8").splitlines()
    divided = (line.partition(": ") for line in lines if not line.startswith("#"))
    return [(*where.split(), files.split()) for where, _, files in divided]  # type: ignore[misc]


@cache
def emoji() -> dict[str, list[str]]:
    """The spoken name of each emoji, and the names that emoji sets use for it."""
    return icon_names(FOLDER / "emoji.txt")


def labels() -> list[str]:
    """Classes for the helper head."""
    photo = {name.label: None for name in photographs()[0].values()}
    return [*(f"photo {name}" for name in photo), *(f"emoji {name}" for name in (*emoji(), OTHER))]
