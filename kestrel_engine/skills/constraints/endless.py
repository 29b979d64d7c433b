"""Finds the part of a schema that requires itself without end, so that no finite text matches.

All schemas that hold for a value are read together: one may require a property that another one defines.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import unquote

from .circles import Part, closing
from .schemas import escaped

_LEADING = (
    "$ref", "anyOf", "oneOf", "allOf", "properties", "patternProperties", "additionalProperties", "items",
    "prefixItems", "additionalItems",
)  # fmt: skip
"""Keywords with other schemas."""
_MOST_STEPS = 50_000
"""Schemas and properties that are read. Beyond them, nothing is looked for."""
_REST = "additionalProperties"
_MOST_CHOICES = 64
"""Ways to choose of all anyOf of a value. Beyond them, each anyOf is read by itself."""


class _Member(NamedTuple):
    """A schema that holds for a value. ``above``: the ids of those that led to it without a step into the value."""

    place: str
    schema: Mapping[str, Any]
    above: frozenset[int] = frozenset()
    reference: str = ""


@dataclass(slots=True, eq=False)
class _Part(Part):
    """A value, or one way to choose of the anyOf that hold for it. ``place``: of the reference that led to it."""

    members: Sequence[_Member] = ()
    place: str = ""


@dataclass(slots=True)
class _Choice:
    """``left``: members to read. ``loose``: an anyOf that is read by itself."""

    left: list[_Member]
    members: list[_Member] = field(default_factory=list)
    loose: list[list[_Member]] = field(default_factory=list)
    reference: str = ""


def endless_place(schema: Mapping[str, Any]) -> str | None:
    """The JSON pointer of the reference that closes a circle of requirements; None if every part ends."""
    try:
        part = closing(_Values(schema).parts())
    except _TooLarge:
        return None
    return part.place if part is not None else None


class _TooLarge(Exception):
    """The search takes too long."""


class _Values:
    """The values that a text may reach, each known by the schemas that hold for it."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._whole = schema
        self._plain = _Part()
        """Ends."""
        self._found = [self._plain]
        self._known: dict[frozenset[int], _Part] = {}
        self._values: list[_Part] = []
        self._steps = 0

    def parts(self) -> list[_Part]:
        """Raises _TooLarge."""
        self._value([_Member("", self._whole)])
        for value in self._values:  # It grows meanwhile.
            self._found.append(value)
            choices, circle = self._choices(value.members)
            if not choices:
                value.place, value.refers, value.needs = circle, True, [[value]]
                continue
            # Nothing is known of a value that can have no type.
            ways = [self._way(choice) for choice in choices if _kinds(choice.members) != set()]
            if ways:
                value.needs.append(ways)
                self._found += ways
        return self._found

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > _MOST_STEPS:
            raise _TooLarge

    def _value(self, members: Iterable[_Member]) -> _Part:
        leading = [each for each in members if any(key in each.schema for key in _LEADING)]
        if not leading:
            return self._plain
        # What only restricts, such as a type, makes a difference beside others.
        members = [*members]
        key = frozenset(id(each.schema) for each in members)
        if key not in self._known:
            self._known[key] = _Part(members=members)
            self._values.append(self._known[key])
        return self._known[key]

    def _choices(self, members: Iterable[_Member]) -> tuple[list[_Choice], str]:
        """All ways to choose of each anyOf, without those that lead back to themselves; and a reference that does."""
        waiting, found, circle = [_Choice([*members])], list[_Choice](), ""
        while waiting:
            choice = waiting.pop()
            while choice.left:
                member = choice.left.pop(0)
                self._count(1)
                place, schema, above, reference = member
                if id(schema) in above:
                    circle = circle or reference
                    break
                choice.reference = choice.reference or reference
                choice.members.append(member)
                above |= {id(schema)}
                if (target := _target(self._whole, schema.get("$ref"))) is not None:
                    pointer = schema["$ref"][1:]
                    choice.left.append(_Member(pointer, target, above, f"{place}/$ref"))
                choice.left += _branches(place, schema, "allOf", above)
                for key in ("anyOf", "oneOf"):
                    branches = _branches(place, schema, key, above)
                    if not branches:
                        continue
                    if len(branches) * (len(waiting) + len(found) + 1) > _MOST_CHOICES:
                        choice.loose.append(branches)
                        continue
                    for branch in reversed(branches[1:]):
                        left, others = [*choice.left, branch], [*choice.members]
                        self._count(len(left) + len(others))
                        waiting.append(_Choice(left, others, [*choice.loose], choice.reference))
                    choice.left.append(branches[0])
            else:
                found.append(choice)
        return found, circle

    def _way(self, choice: _Choice) -> _Part:
        part = _Part(place=choice.reference, refers=bool(choice.reference))
        members = {id(each.schema): each for each in choice.members}.values()
        self._count(len(members) + sum(map(len, choice.loose)))
        if any("const" in each.schema or "enum" in each.schema for each in members):
            return part
        part.needs += [[self._value([branch]) for branch in each] for each in choice.loose]
        kinds = _kinds(members)
        shapes = list[_Part]()
        for kind, needs_of in (("object", self._of_object), ("array", self._of_array)):
            if kinds is None or kind in kinds:
                shapes.append(_Part(needs=[*needs_of(members)]))
        if kinds is not None and len(kinds) == len(shapes):
            part.needs.append(shapes)
            self._found += shapes
        return part

    def _of_object(self, members: Iterable[_Member]) -> Iterator[list[_Part]]:
        named, patterns, others = dict[str, list[_Member]](), list[_Member](), list[_Member]()
        for each in members:
            for name, schema in _mapping(each.schema, "properties").items():
                pointer = f"{each.place}/properties/{escaped(name)}"
                named.setdefault(name, []).extend(_member(pointer, schema))
            for pattern, schema in _mapping(each.schema, "patternProperties").items():
                patterns += _member(f"{each.place}/patternProperties/{escaped(pattern)}", schema)
            others += _member(f"{each.place}/{_REST}", each.schema.get(_REST))
        names = (name for each in members for name in _list(each.schema, "required"))
        required = dict.fromkeys(name for name in names if isinstance(name, str))
        ruling = [
            each for each in members if "patternProperties" in each.schema or _REST in each.schema
        ]
        properties = {
            name: self._value([*named.get(name, ()), *self._of_other_names(ruling, name)])
            for name in {**named, **required}
        }
        self._count(len(properties))
        yield from ([properties[name]] for name in required)
        options = [properties[name] for name in named]
        options += [self._value([each]) for each in patterns]
        if all(each.schema.get(_REST) is not False for each in members):
            options.append(self._value(others))
        if not required and options and any(each.schema.get("minProperties") for each in members):
            yield options

    def _of_other_names(self, members: Iterable[_Member], name: str) -> Iterator[_Member]:
        """What patternProperties and additionalProperties demand of the property ``name``."""
        for place, schema, *_ in members:
            patterns = _mapping(schema, "patternProperties")
            self._count(1 + len(patterns))
            matched = {pattern: _matches(pattern, name) for pattern in patterns}
            for pattern, matches in matched.items():
                if matches:
                    pointer = f"{place}/patternProperties/{escaped(pattern)}"
                    yield from _member(pointer, patterns[pattern])
            is_named = name in _mapping(schema, "properties")
            if not is_named and all(each is False for each in matched.values()):
                yield from _member(f"{place}/{_REST}", schema.get(_REST))

    def _of_array(self, members: Collection[_Member]) -> Iterator[list[_Part]]:
        counts = [each.schema.get("minItems") for each in members]
        least = max((each for each in counts if isinstance(each, int)), default=0)
        longest = max((len(_first_items(each.schema)[1]) for each in members), default=0)
        for index in range(longest + 1):
            self._count(len(members))
            found = list[_Member]()
            for each in members:
                key, first = _first_items(each.schema)
                if index < len(first):
                    found += _member(f"{each.place}/{key}/{index}", first[index])
                else:
                    rest = "additionalItems" if key == "items" and first else "items"
                    found += _member(f"{each.place}/{rest}", each.schema.get(rest))
            item = self._value(found)
            if index < least:
                yield [item]


def _member(place: str, schema: object) -> list[_Member]:
    """None for true and false, which have no parts."""
    return [_Member(place, schema)] if isinstance(schema, Mapping) else []


def _branches(
    place: str, schema: Mapping[str, Any], key: str, above: frozenset[int]
) -> list[_Member]:
    """None for an anyOf with a branch that is true or false."""
    several = _list(schema, key)
    found = [
        _Member(f"{place}/{key}/{index}", each, above)
        for index, each in enumerate(several)
        if isinstance(each, Mapping)
    ]
    return found if key == "allOf" or len(found) == len(several) else []


def _kinds(members: Iterable[_Member]) -> set[str] | None:
    """The types that a value may have; None for all."""
    found: set[str] | None = None
    for each in members:
        kind = each.schema.get("type")
        if kind is not None:
            own = (
                {kind}
                if isinstance(kind, str)
                else set(filter(_is_text, _list(each.schema, "type")))
            )
            found = own if found is None else found & own
    return found


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _first_items(schema: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """The keyword, and the schemas of the first items."""
    key = "prefixItems" if "prefixItems" in schema else "items"
    return key, _list(schema, key)


def _mapping(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}


def _list(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def _matches(pattern: str, name: str) -> bool | None:
    """None for a pattern that is more than a text between anchors."""
    if re.fullmatch(r"\^?[A-Za-z0-9 _-]*\$?", pattern) is None:
        return None
    return re.search(pattern, name) is not None


def _target(whole: Mapping[str, Any], reference: object) -> Mapping[str, Any] | None:
    """What a JSON pointer names; None if that is no object."""
    if not isinstance(reference, str) or reference[:1] != "#":
        return None
    found: Any = whole
    for step in unquote(reference[1:]).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        key = int(name) if isinstance(found, list) and name.isdecimal() else name
        try:
            found = found[key]
        except (LookupError, TypeError):
            return None
    is_pointer = reference == "#" or reference.startswith("#/")
    return found if is_pointer and isinstance(found, Mapping) else None
