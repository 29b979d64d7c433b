"""The packages that an installation with some extras brings, from the metadata of what is installed here."""

import re
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def dependencies_of(*requirements: str) -> set[str]:
    """The canonical names of the packages of ``requirements`` and of all that they need on this machine."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        found.add(name)
        for extra in ("", *wanted.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            try:
                needs = [Requirement(text) for text in requires(name) or ()]
            except PackageNotFoundError:  # It is another platform's, or another Python's.
                continue
            waiting += [
                each
                for each in needs
                if each.marker is None or each.marker.evaluate({"extra": extra})
            ]
    return found


def extras_in(command: str) -> tuple[str, ...]:
    """What ``pip install`` of this repository's folders installs, as requirements."""
    server = re.search(r"(?<![\w/])\.\[([\w,]+)\]", command)
    client = re.search(r"clients/python(?:\[([\w,]+)\])?", command)
    assert server and client, command
    return f"kestrel-grpc[{server[1]}]", f"kestrel-client[{client[1] or ''}]"
