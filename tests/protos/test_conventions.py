"""The conventions of the contract that buf's lint does not know; protos/README.md states them.

Each rule reads all messages, so it holds for a field that is added later, too.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field

REPOSITORY = Path(__file__).parents[2]
DESCRIPTORS = REPOSITORY / "kestrel_grpc/services/kestrel.v1.binpb"
"""With comments and validation rules; test_contract.py holds that they are those of the .proto files."""
PACKAGE = ".kestrel.v1."
TIMESTAMP = ".google.protobuf.Timestamp"
WIDTH = 120


@dataclass(frozen=True)
class Place:
    """A field with its comment. ``name`` is MESSAGE.FIELD."""

    name: str
    field: Field
    comment: str
    in_required_oneof: bool

    @property
    def type(self) -> str:
        """The name of the type: "bool", "double", or that of the message or enum."""
        return self.field.type_name or Field.Type.Name(self.field.type)[5:].lower()


class Contract:
    """The fields of all messages by the message's full name, and the methods of all services."""

    def __init__(self, descriptors: bytes) -> None:
        self.fields: dict[str, list[Place]] = {}
        self.methods: dict[str, list[descriptor_pb2.MethodDescriptorProto]] = {}
        self.comments: list[str] = []
        for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
            if file.package != "kestrel.v1":
                continue
            comments = {tuple(p.path): p.leading_comments for p in file.source_code_info.location}
            for place in file.source_code_info.location:
                self.comments += [place.leading_comments, *place.leading_detached_comments]
            for service in file.service:
                self.methods[service.name] = list(service.method)
            for index, message in enumerate(file.message_type):
                assert not [
                    nested for nested in message.nested_type if not nested.options.map_entry
                ]
                self.fields[PACKAGE + message.name] = [
                    Place(
                        f"{message.name}.{field.name}",
                        field,
                        " ".join(comments.get((4, index, 2, place), "").split()),
                        field.HasField("oneof_index")
                        and message.oneof_decl[field.oneof_index].options.ByteSize() > 0,
                    )
                    for place, field in enumerate(message.field)
                ]

    def all(self) -> Iterator[Place]:
        for fields in self.fields.values():
            yield from fields

    def sent(self) -> Iterator[Place]:
        """The fields of all messages that a client sends."""
        waiting = [method.input_type for methods in self.methods.values() for method in methods]
        seen: set[str] = set()
        while waiting:
            name = waiting.pop()
            if name in seen or name not in self.fields:
                continue
            seen.add(name)
            yield from self.fields[name]
            waiting += [place.field.type_name for place in self.fields[name]]

    def answers(self, *, stream: bool) -> Iterator[tuple[str, Place]]:
        """The fields of the responses of VisionService, each with the message. The stream of frames has no events."""
        for method in self.methods["VisionService"]:
            if method.server_streaming == stream and not method.client_streaming:
                for place in self.fields[method.output_type]:
                    yield method.output_type, place


def numbers_of_results(contract: Contract) -> Iterator[str]:
    """A number from 10 up means the same in every result."""
    yield from different(
        (place.field.number, f"{place.field.name}: {place.type}", place.name)
        for _, place in contract.answers(stream=False)
        if place.field.number >= 10
    )


def numbers_of_events(contract: Contract) -> Iterator[str]:
    """A number means the same in every stream event. The result, `final`, has the type of the method."""
    yield from different(
        (
            place.field.number,
            place.field.name + (f": {place.type}" if place.field.name != "final" else ""),
            place.name,
        )
        for _, place in contract.answers(stream=True)
    )


def different(meanings: Iterator[tuple[int, str, str]]) -> Iterator[str]:
    found: dict[int, dict[str, str]] = defaultdict(dict)
    for number, meaning, name in meanings:
        found[number][meaning] = name
    for number, names in found.items():
        if len(names) > 1:
            yield f"{number} means {names}"


def durations(contract: Contract) -> Iterator[str]:
    """Milliseconds, whole ones only in requests."""
    sent = {place.name for place in contract.sent()}
    for place in contract.all():
        name = place.field.name
        if re.search(r"(^|_)(s|sec|seconds|us|micros|ns|nanos|minutes|hours)$", name):
            yield f"{place.name}: the unit of a duration is _ms"
        if (
            name.endswith("_ms")
            and place.type not in ("double", "int32")[: 1 + (place.name in sent)]
        ):
            yield f"{place.name} is {place.type}"
        if place.type == ".google.protobuf.Duration":
            yield f"{place.name}: a duration is a number of milliseconds"


def instants(contract: Contract) -> Iterator[str]:
    for place in contract.all():
        if place.field.name.endswith(("_time", "_at")) != (place.type == TIMESTAMP):
            yield f"{place.name} is {place.type}"
        if place.type == TIMESTAMP and not place.field.name.endswith("_time"):
            yield f"{place.name}: the suffix of an instant is _time"


def amounts_of_data(contract: Contract) -> Iterator[str]:
    for place in contract.all():
        if place.field.name.endswith("_bytes") and place.type not in ("int32", "int64"):
            yield f"{place.name} is {place.type}"
        if re.search(r"_(kb|kib|mb|mib|gb|gib)$", place.field.name):
            yield f"{place.name}: the unit of data is _bytes"


def integers(contract: Contract) -> Iterator[str]:
    """AIP-141: not every language has unsigned ones. A number of things is no `*_count`."""
    for place in contract.all():
        if re.match(r"uint|s?fixed|sint", place.type):
            yield f"{place.name} is {place.type}"
        if place.field.name.endswith("_count"):
            yield f"{place.name}: the prefix of a number of things is num_"


def flags(contract: Contract) -> Iterator[str]:
    """What is not set is false."""
    for place in contract.all():
        if place.type == "bool" and (
            place.field.proto3_optional or re.search(r"[Dd]efault:? (is )?true", place.comment)
        ):
            yield f"{place.name}: the default of a flag is false"


def requests(contract: Contract) -> Iterator[str]:
    """What a client sends has a validation rule, or a default that its comment states."""
    for place in contract.sent():
        stated = place.field.options.ByteSize() > 0 or re.search(r"Default\b", place.comment)
        if not stated and not place.in_required_oneof and place.type != "bool":
            yield f"{place.name} has neither a rule nor a default"


def settings(contract: Contract) -> Iterator[str]:
    """A number that a client need not send is `optional`, so that 0 is a value. The origin of coordinates is 0."""
    for place in contract.sent():
        if not re.match(r"u?int|float|double", place.type) or "Required." in place.comment:
            continue
        geometry = place.name.startswith(("Point.", "Box."))
        if not place.field.proto3_optional and not geometry:
            yield f"{place.name} is not optional"


def references(contract: Contract) -> Iterator[str]:
    """MESSAGE.FIELD in a comment names a field, or a oneof, that there is."""
    known = {place.name for place in contract.all()}
    for comment in contract.comments:
        for name in re.findall(r"\b[A-Z]\w+\.[a-z]\w*", comment):
            if name not in known:
                yield name


def lists(contract: Contract) -> Iterator[str]:
    """AIP-158."""
    pages = {("page_size", "int32"), ("page_token", "string")}
    for methods in contract.methods.values():
        for method in methods:
            if not method.name.startswith("List"):
                continue
            asked = {(p.field.name, p.type) for p in contract.fields[method.input_type]}
            first, *rest = contract.fields[method.output_type]
            if not pages <= asked or "next_page_token" not in [p.field.name for p in rest]:
                yield f"{method.name} has no pages"
            if first.field.number != 1 or first.field.label != Field.LABEL_REPEATED:
                yield f"{first.name} is not the list"


def words(contract: Contract) -> Iterator[str]:
    """The glossary of CONTRIBUTING.md."""
    for place in contract.all():
        for text in (place.field.name, place.comment):
            if found := re.search(r"pictures?\b|forgotten|\bdear\b", text):
                yield f"{place.name}: {found[0]}"


RULES: tuple[Callable[[Contract], Iterator[str]], ...] = (
    numbers_of_results, numbers_of_events, durations, instants, amounts_of_data, integers, flags, requests,
    settings, references, lists, words,
)  # fmt: skip


@pytest.fixture(scope="module")
def contract() -> Contract:
    return Contract(DESCRIPTORS.read_bytes())


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_contract_keeps_its(
    rule: Callable[[Contract], Iterator[str]], contract: Contract
) -> None:
    assert list(rule(contract)) == []


def test_lines_have_at_most_120_columns() -> None:
    files = sorted((REPOSITORY / "protos/kestrel").rglob("*.proto"))
    wide = [
        f"{file.name}:{number}"
        for file in files
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1)
        if len(line) > WIDTH
    ]
    assert files and wide == []
