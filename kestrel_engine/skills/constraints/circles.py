"""Finds the part of a constraint that requires itself without end, so that no finite text matches.

A part ends if all that it requires ends: a least fixed point. The library accepts a part that does not end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self, TypeVar


@dataclass(slots=True, eq=False)
class Part:
    """``needs``: it ends if of each list one part ends. ``refers``: whether it is, or is reached by, a reference."""

    needs: list[list[Self]] = field(default_factory=list, kw_only=True)
    refers: bool = field(default=False, kw_only=True)
    ends: bool = field(default=False, kw_only=True)


AnyPart = TypeVar("AnyPart", bound=Part)


def closing(found: Sequence[AnyPart]) -> AnyPart | None:
    """The part whose reference closes a circle of requirements; None if every part of ``found`` ends."""
    _settle(found)
    # A part that is not required may be begun all the same.
    part = next((each for each in found if not each.ends), None)
    seen, last = set[int](), part
    while part is not None and id(part) not in seen:
        seen.add(id(part))
        index = next(i for i, options in enumerate(part.needs) if not any(o.ends for o in options))
        if part.refers:
            last = part
        part = part.needs[index][0]
    return last


def _settle(found: Sequence[Part]) -> None:
    users: dict[int, list[tuple[Part, int]]] = {}
    left = {id(part): set(range(len(part.needs))) for part in found}
    for part in found:
        for index, options in enumerate(part.needs):
            for option in options:
                users.setdefault(id(option), []).append((part, index))
    waiting = [part for part in found if not part.needs]
    while waiting:
        ended = waiting.pop()
        ended.ends = True
        for user, index in users.get(id(ended), ()):
            left[id(user)].discard(index)
            if not left[id(user)] and not user.ends:
                user.ends = True
                waiting.append(user)
