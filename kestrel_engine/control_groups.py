"""Control groups of Linux: the folders whose files limit this process, in versions 1 and 2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def group_folders(controller: str, *, proc: Path, cgroups: Path) -> Iterator[Path]:
    """The folders of this process's groups with ``controller``, from its own group up to the root. A folder may be
    missing: in a container, a group's path may be the host's."""
    mounts = _mounts(proc, controller)
    seen = set[Path]()
    for line in _lines(proc / "self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if not group or (controllers and controller not in controllers.split(",")):
            continue
        names = (controllers, controller) if controllers else ("",)
        bases = [
            (point, root) for is_second, root, point in mounts if is_second != bool(controllers)
        ]
        for base, root in (*bases, *((cgroups / name, "/") for name in names)):
            path = PurePosixPath(group)
            if path.is_relative_to(root):
                own = base / path.relative_to(root)
            elif root.startswith("/.."):  # A group above this namespace.
                own = base
            else:  # The group of others, for instance of a container, seen from outside.
                continue
            for folder in (own, *own.parents):
                if folder not in seen:
                    seen.add(folder)
                    yield folder
                if folder == base:
                    break


def _mounts(proc: Path, controller: str) -> list[tuple[bool, str, Path]]:
    """The mounted hierarchies with ``controller``: whether of version 2, the group that is mounted, and where."""
    found = []
    for line in _lines(proc / "self/mountinfo"):
        head, _, tail = line.partition(" - ")
        fields, (kind, *others) = head.split(" "), tail.split(" ")
        has_it = kind == "cgroup2" or (
            kind == "cgroup" and controller in "".join(others[-1:]).split(",")
        )
        if has_it and len(fields) > 4:
            root, point = (re.sub(r"\\([0-7]{3})", _character, each) for each in fields[3:5])
            found.append((kind == "cgroup2", root, Path(point)))
    return found


def _character(escaped: re.Match[str]) -> str:
    return chr(int(escaped[1], 8))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text("utf-8", "surrogateescape").splitlines()  # A name may have any bytes.
    except OSError:
        return []
