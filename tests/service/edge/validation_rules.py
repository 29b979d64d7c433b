"""The limits that the .proto files state as `buf.validate` rules, and values around each of them.

The stubs that the client ships are generated without the rules, so that no package needs `buf.validate`. These messages
are made from the files themselves. They have the same wire format, and protovalidate can evaluate their rules.
"""

import math
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import protovalidate
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

REPOSITORY = Path(__file__).parents[3]
RELATIONS: dict[str, list[dict[str, float]]] = {
    "box.order": [
        {"x_min": 0.5, "x_max": 0.25},
        {"y_min": 0.5, "y_max": 0.25},
        {"x_min": 0.5, "x_max": 0.5, "y_min": 1, "y_max": 1},
        {"x_min": math.nan},
    ]
}
"""Values of the fields that a rule between several fields compares, by the rule's id."""


def messages_with_rules() -> descriptor_pool.DescriptorPool:
    """All messages of the contract, with their rules."""
    program = shutil.which("buf", path=Path(sys.executable).parent) or shutil.which("buf")
    if program is None:
        pytest.skip("buf is not installed (dev extra: buf-bin)")
    built = subprocess.run(
        [program, "build", "--path", "protos/kestrel", "-o", "-#format=binpb"],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
        timeout=60,
    )
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(built.stdout).file:
        pool.Add(file)
    return pool


@dataclass(frozen=True)
class Change:
    """A change of one field. ``path``: of the message that has the field, as names and indices."""

    path: tuple[str | int, ...]
    rule: str
    """The field's or oneof's full name, or the id of a rule between fields."""
    value: str
    edit: Callable[[Any], None]

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for changes with the same effect."""
        return self.path, self.rule, self.value

    def apply_to(self, message: Message) -> None:
        """Changes the message. Does nothing if another change has removed the field's message."""
        for step in self.path:
            if isinstance(step, str) and isinstance(message, Message):
                field = message.DESCRIPTOR.fields_by_name[step]
                if not field.is_repeated and not message.HasField(step):
                    return
                message = getattr(message, step)
            elif len(message) > step:  # type: ignore[arg-type, operator]
                message = message[step]  # type: ignore[index]
            else:
                return
        self.edit(message)

    def __str__(self) -> str:
        return f"{'.'.join(map(str, self.path))} {self.rule} = {self.value[:80]}"


class Rules:
    """Reads the rules of a message, and makes changes that reach or exceed the limits."""

    def __init__(self) -> None:
        self.pool = messages_with_rules()
        self._extensions = {
            kind: self.pool.FindExtensionByName(f"buf.validate.{kind}")
            for kind in ("message", "oneof", "field")
        }

    def message(self, plain: Message) -> Any:
        """The same message, with rules."""
        cls = message_factory.GetMessageClass(
            self.pool.FindMessageTypeByName(plain.DESCRIPTOR.full_name)
        )
        return cls.FromString(plain.SerializeToString())

    def refused(self, message: Message) -> list[str]:
        """The paths of the fields that protovalidate refuses."""
        return [
            "".join(
                f".{element.field_name}"
                + ("" if element.subscript is None else f"[{element.subscript.value}]")
                for element in (violation.proto.field.elements if violation.proto.field else ())
            ).removeprefix(".")
            for violation in protovalidate.collect_violations(message)
        ]

    def stated(self, root: Descriptor) -> set[str]:
        """The names of all fields, oneofs and relations with rules that a message of this type may hold."""
        found: set[str] = set()
        waiting, seen = [root], {root.full_name}
        while waiting:
            message = waiting.pop()
            found |= {rule for rule, _ in self._changes(message)}
            for field in message.fields:
                if field.message_type is not None and field.message_type.full_name not in seen:
                    seen.add(field.message_type.full_name)
                    waiting.append(field.message_type)
        return found

    def changes(self, message: Message, path: tuple[str | int, ...] = ()) -> Iterator[Change]:
        """Changes of every field with rules in ``message`` and in the messages that it holds."""
        for rule, values in self._changes(message.DESCRIPTOR):
            yield from (Change(path, rule, value, edit) for value, edit in values)
        for field, value in message.ListFields():
            if (
                is_map(field)
                or field.message_type is None
                or not field.full_name.startswith("kestrel.")
            ):
                continue
            if field.is_repeated:
                for index, item in enumerate(value):
                    yield from self.changes(item, (*path, field.name, index))
            else:
                yield from self.changes(value, (*path, field.name))

    def _changes(
        self, message: Descriptor
    ) -> Iterator[tuple[str, list[tuple[str, Callable[[Any], None]]]]]:
        if not message.full_name.startswith("kestrel."):
            return
        for relation in self._rules("message", message).cel:
            yield (
                relation.id,
                [(repr(values), setter(**values)) for values in RELATIONS[relation.id]],
            )
        for oneof in message.oneofs:
            if self._rules("oneof", oneof).required:
                yield oneof.full_name, [("unset", clearer(oneof.name))]
        for field in message.fields:
            rules = self._rules("field", field)
            if rules.ListFields():
                yield field.full_name, list(field_changes(field, rules))

    def _rules(self, kind: str, descriptor: Any) -> Any:
        # An option that this pool defines: the options must be read again with the pool's own class.
        options = descriptor.GetOptions()
        cls = message_factory.GetMessageClass(
            self.pool.FindMessageTypeByName(options.DESCRIPTOR.full_name)
        )
        return cls.FromString(options.SerializeToString()).Extensions[self._extensions[kind]]


def field_changes(
    field: FieldDescriptor, rules: Any
) -> Iterator[tuple[str, Callable[[Any], None]]]:
    if rules.required:
        yield "unset", clearer(field.name)
    kind = rules.WhichOneof("type")
    if kind is None:
        return
    if kind == "repeated":
        for limit in {rules.repeated.min_items, rules.repeated.max_items} - {0}:
            for count in (limit - 1, limit, limit + 1):
                yield f"{count} items", repeater(field.name, count)
        if rules.repeated.unique:
            yield "two equal items", repeater(field.name, 2, equal=True)
        rules = rules.repeated.items
        kind = rules.WhichOneof("type")
        if kind is not None:
            for value in VALUES[kind](getattr(rules, kind), field):
                yield f"[{value!r}]", item_setter(field.name, value)
        return
    if kind == "map":
        yield from map_changes(field, rules.map)
        return
    for value in VALUES[kind](getattr(rules, kind), field):
        yield repr(value), setter(**{field.name: value})


def map_changes(field: FieldDescriptor, rules: Any) -> Iterator[tuple[str, Callable[[Any], None]]]:
    """Of a map of texts. The maps have no other keys, because a server may know only some."""

    def only(entries: dict[str, str]) -> Callable[[Any], None]:
        def apply(message: Any) -> None:
            getattr(message, field.name).clear()
            getattr(message, field.name).update(entries)

        return apply

    for count in (rules.max_pairs, rules.max_pairs + 1):
        yield f"{count} pairs", only({f"key{i}": "1" for i in range(count)})
    for key in texts(rules.keys.string, field):
        yield f"key {key!r}", only({key: "1"})
    for value in texts(rules.values.string, field):
        yield f"value {value!r}", only({"key": value})


def is_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and kind.GetOptions().map_entry


def setter(**values: Any) -> Callable[[Any], None]:
    def apply(message: Any) -> None:
        for name, value in values.items():
            setattr(message, name, value)

    return apply


def item_setter(name: str, value: Any) -> Callable[[Any], None]:
    def apply(message: Any) -> None:
        getattr(message, name)[:] = [value]

    return apply


def clearer(name: str) -> Callable[[Any], None]:
    return lambda message: message.ClearField(name)


def repeater(name: str, count: int, *, equal: bool = False) -> Callable[[Any], None]:
    """``equal``: the items are equal texts. Otherwise texts differ."""

    def apply(message: Any) -> None:
        items = getattr(message, name)
        if not items:
            return
        first = items[0]
        if isinstance(first, Message):
            first = type(first).FromString(first.SerializeToString())
            if "key" in first.DESCRIPTOR.fields_by_name:
                first.ClearField("key")  # Keys differ.
        del items[:]
        if isinstance(first, str) and not equal:
            items.extend(f"{first}{index}" for index in range(count))
        else:
            items.extend([first] * count)

    return apply


def limits(rules: Message) -> list[Any]:
    return [value for _, value in rules.ListFields()]


def texts(rules: Any, field: FieldDescriptor) -> Iterator[str]:
    eagle = "\N{EAGLE}"  # One character, four bytes in UTF-8.
    yield from ("", " ", "a", "a\n", eagle)
    if rules.HasField("pattern"):
        yield from ("!~", "a b", "é", "\x7f", "a" * 128, "a" * 129)
        yield from ("#ffffff", "#0aF9c3", "#FFF", "#0123456", "0123456", "#ffffff\n")
    for limit in {rules.max_len, rules.max_bytes} - {0}:
        yield from ("a" * limit, "a" * (limit + 1), "a" * limit + "\n")
        yield from (eagle * (limit // 4) + "a" * (limit % 4), eagle * (limit // 4 + 1))
    if rules.HasField("max_len"):
        yield from (eagle * rules.max_len, eagle * (rules.max_len + 1))


def blobs(rules: Any, field: FieldDescriptor) -> Iterator[bytes]:
    for limit in limits(rules):
        yield from (bytes(max(0, limit + difference)) for difference in (-1, 0, 1))


def whole_numbers(rules: Any, field: FieldDescriptor) -> Iterator[int]:
    most = 2 ** (31 if "int32" in rules.DESCRIPTOR.name.lower() else 63) - 1
    yield from (-1, -1 - most, most)
    for limit in limits(rules):
        yield from (limit + difference for difference in (-1, 0, 1))


def real_numbers(
    number: type[np.floating[Any]],
) -> Callable[[Any, FieldDescriptor], Iterator[float]]:
    def values(rules: Any, field: FieldDescriptor) -> Iterator[float]:
        yield from (math.nan, math.inf, -math.inf, -0.0, 1e-30)
        for limit in map(number, limits(rules)):
            yield from map(
                float, (limit, np.nextafter(limit, number(-1e9)), np.nextafter(limit, number(1e9)))
            )

    return values


def enum_values(rules: Any, field: FieldDescriptor) -> Iterator[int]:
    assert field.enum_type is not None
    known = [value.number for value in field.enum_type.values]
    yield from (*known, max(known) + 1, -1, 2**31 - 1)


VALUES: dict[str, Callable[[Any, FieldDescriptor], Iterator[Any]]] = {
    "string": texts,
    "bytes": blobs,
    "int32": whole_numbers,
    "int64": whole_numbers,
    "float": real_numbers(np.float32),
    "double": real_numbers(np.float64),
    "enum": enum_values,
}
