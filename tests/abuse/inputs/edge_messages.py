"""Strategies for messages whose fields have extreme values, made from the descriptors, so that they cover new
fields."""

from collections.abc import Callable
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)
Draw = Callable[[st.SearchStrategy[Any]], Any]

MOST_CHANGES = 4
_DEEPEST = 3

_TEXTS = (
    "", " ", "a", "\0", "\n", "\r\n", "é", "\u202e", "\ufffd", "\U0010ffff", "<|endoftext|>", "%s%n{}",
    "../../etc/passwd", "a" * 64, "a" * 65, "a" * 128, "a" * 129, "é" * 64, "é" * 65, "a" * 512, "a" * 513, "a" * 32767,
    "a" * 32768, "\U0001f600" * 8192, "a" * 300_000, "query", "segment", "fake",
)  # fmt: skip
_BYTES = (b"", b"\0", b"\xff" * 31, b"\xff" * 32, b"\xff" * 33, b"\xff\xd8\xff", bytes(100_000))
_FLOATS = (
    0.0, -0.0, 5e-324, 1e-9, 0.5, 1.0, 1.0000001, -1e-9, 100.0, 100.1, 1e308,
    *map(float, ("inf", "-inf", "nan")),
)  # fmt: skip

_kinds = FieldDescriptor
_NUMBERS: dict[int, tuple[int, ...]] = {
    _kinds.CPPTYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    _kinds.CPPTYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
    _kinds.CPPTYPE_UINT32: (0, 1, 2, 40, 60, 1023, 65536, 2**31, 2**32 - 1),
    _kinds.CPPTYPE_UINT64: (0, 1, 2, 2**32, 2**53 + 1, 2**63, 2**64 - 1),
    _kinds.CPPTYPE_ENUM: (0, 1, 2, 3, 4, 5, 99, -1, 2**31 - 1, -(2**31)),
}

_json = st.recursive(
    st.none() | st.booleans() | st.sampled_from(_FLOATS) | st.sampled_from(_TEXTS[:14]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


@st.composite
def near(draw: Draw, valid: M) -> M:
    """``valid`` with up to MOST_CHANGES of its fields, at any depth, at an edge, absent, or many."""
    message = type(valid)()
    message.CopyFrom(valid)
    for _ in range(draw(st.integers(0, MOST_CHANGES))):
        _change(draw, message, 0)
    return message


def _change(draw: Draw, message: Message, depth: int) -> None:
    if isinstance(message, Struct):
        _fill(message, draw(_json))
        return
    if not message.DESCRIPTOR.fields:
        return
    field = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        _change(draw, getattr(message, field.name)[draw(st.text(max_size=20))], depth + 1)
    elif field.is_repeated:
        many = getattr(message, field.name)
        if draw(st.booleans()):
            del many[:]
        count = draw(st.sampled_from((0, 1, 2, 33, 100) if depth < 2 else (0, 1)))
        if field.cpp_type != _kinds.CPPTYPE_MESSAGE:
            many.extend([draw(_value(field)) for _ in range(count)])
            return
        one = many.add()
        _change(draw, one, depth + 1)
        for _ in range(count):
            many.add().CopyFrom(one)
    elif field.cpp_type == _kinds.CPPTYPE_MESSAGE:
        inner = getattr(message, field.name)
        how = draw(st.sampled_from(("change", "change", "change", "empty", "absent")))
        if how == "change" and depth < _DEEPEST:
            inner.SetInParent()
            _change(draw, inner, depth + 1)
        elif how == "absent":
            message.ClearField(field.name)
        else:
            inner.Clear()
            inner.SetInParent()
    elif draw(st.integers(0, 9)) == 0:
        message.ClearField(field.name)
    else:
        setattr(message, field.name, draw(_value(field)))


def _value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    match field.cpp_type:
        case _kinds.CPPTYPE_STRING:
            if field.type == _kinds.TYPE_BYTES:
                return st.sampled_from(_BYTES) | st.binary(max_size=64)
            return st.sampled_from(_TEXTS) | st.text(max_size=20)
        case _kinds.CPPTYPE_BOOL:
            return st.booleans()
        case _kinds.CPPTYPE_DOUBLE | _kinds.CPPTYPE_FLOAT:
            return st.sampled_from(_FLOATS) | st.floats(width=32)
        case kind:
            return st.sampled_from(_NUMBERS[kind])


def _fill(struct: Struct, value: Any) -> None:
    struct.Clear()
    struct.update(value if isinstance(value, dict) else {"question": value, "": value})


@st.composite
def mangled(draw: Draw, data: bytes) -> bytes:
    """A message's bytes, a few of them changed, cut, repeated, or followed by fields that nobody knows."""
    out = bytearray(data)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(out)))
        match draw(st.integers(0, 4)):
            case 0:
                out[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case 1:
                del out[at:]
            case 2:
                del out[at : at + draw(st.integers(1, 8))]
            case 3:
                out[at:at] = draw(st.binary(min_size=1, max_size=12))
            case 4:
                out += out[at:]
    return bytes(out)


def nested(depth: int) -> bytes:
    """A RunSkillRequest whose arguments hold a Struct of ``depth`` lists within each other."""
    value = b"\x11" + bytes(8)  # Value.number_value
    for _ in range(depth):
        inner = length_delimited(1, value)  # ListValue.values
        value = length_delimited(6, inner)  # Value.list_value
    entry = length_delimited(1, b"question") + length_delimited(2, value)
    arguments = length_delimited(2, length_delimited(1, entry))
    return length_delimited(2, length_delimited(1, b"query") + arguments)


def length_delimited(number: int, data: bytes) -> bytes:
    """A field of the wire format."""
    length, size = bytearray(), len(data)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2]) + bytes([*length, size]) + data
