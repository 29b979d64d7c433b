"""Tensors of a ModelInferRequest as Python values. Owns datatypes, shapes and the raw form of their elements.

The raw form of a BYTES element is its length in four bytes, little-endian, then its bytes. Other elements are packed
without gaps, little-endian.

It uses no library: tritonclient's functions make an array of all elements before anything is checked.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kestrel_client._pb.inference import grpc_service_pb2 as pb
from kestrel_client.images.base64_images import decoded_image
from kestrel_engine import InvalidRequest

BYTES = "BYTES"
_DATATYPES = {
    "BOOL": ("?", "bool_contents"),
    "INT8": ("b", "int_contents"),
    "INT16": ("h", "int_contents"),
    "INT32": ("i", "int_contents"),
    "INT64": ("q", "int64_contents"),
    "UINT8": ("B", "uint_contents"),
    "UINT16": ("H", "uint_contents"),
    "UINT32": ("I", "uint_contents"),
    "UINT64": ("Q", "uint64_contents"),
    "FP16": ("e", ""),
    "FP32": ("f", "fp32_contents"),
    "FP64": ("d", "fp64_contents"),
    BYTES: ("", "bytes_contents"),
}
"""struct's letter of a datatype with elements of a fixed size, and its field of InferTensorContents, if it has one."""
FORMATS = {datatype: letter for datatype, (letter, _) in _DATATYPES.items() if letter}
_LENGTH = struct.Struct("<I")
_MOST_DIMENSIONS = 8
_SHARED_MEMORY = "shared_memory_region"
CONTENT_TYPE = "content_type"
"""MLServer's parameter of an input."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One input. ``content``: all elements in the raw form, or a sequence of them. They are decoded on demand.
    ``is_base64``: whether its bytes are text in base64, as MLServer's content type says."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: bytes | Sequence[Any]
    is_base64: bool = False

    def only(self) -> Any:
        """The element of a tensor with one: bytes, bool, int or float. Raises InvalidRequest."""
        if math.prod(self.shape) != 1:
            raise InvalidRequest(self.name, f"must have one element, got shape {list(self.shape)}")
        content = self.content
        if not isinstance(content, bytes):
            self._check(len(content), 1, "elements")
            return self._decoded(content[0])
        if self.datatype == BYTES:
            self._check(len(content), _LENGTH.size, "bytes", at_least=True)
            (length,) = _LENGTH.unpack_from(content)
            self._check(len(content), _LENGTH.size + length, "bytes")
            return self._decoded(content[_LENGTH.size :])
        format = struct.Struct(f"<{FORMATS[self.datatype]}")
        self._check(len(content), format.size, "bytes")
        return format.unpack(content)[0]

    def _decoded(self, element: Any) -> Any:
        if not self.is_base64 or not isinstance(element, bytes):
            return element
        try:
            return decoded_image(element.decode("latin-1"))
        except ValueError as error:
            raise InvalidRequest(self.name, str(error)) from None

    def octets(self) -> bytes:
        """The elements of a UINT8 tensor. Raises InvalidRequest."""
        if not isinstance(self.content, bytes):
            raise InvalidRequest(self.name, "UINT8 must be in raw_input_contents")
        self._check(len(self.content), math.prod(self.shape), "bytes")
        return self.content

    def _check(self, has: int, needed: int, what: str, *, at_least: bool = False) -> None:
        if has < needed or (has > needed and not at_least):
            raise InvalidRequest(
                self.name,
                f"has {has} {what}; {self.datatype} of shape {list(self.shape)} needs "
                f"{'at least ' if at_least else ''}{needed}",
            )


def tensors(request: pb.ModelInferRequest) -> dict[str, Tensor]:
    """The inputs of a request by name. Raises InvalidRequest."""
    raws = request.raw_input_contents
    if raws and len(raws) != len(request.inputs):
        raise InvalidRequest(
            "raw_input_contents",
            f"has {len(raws)} elements for {len(request.inputs)} inputs; each input needs one, in their order",
        )
    found: dict[str, Tensor] = {}
    for index, tensor in enumerate(request.inputs):
        name = tensor.name
        if name in found:
            raise InvalidRequest(name, "is given twice")
        if _SHARED_MEMORY in tensor.parameters:
            raise InvalidRequest(name, "this server shares no memory; send the tensor's bytes")
        if raws and tensor.HasField("contents"):
            raise InvalidRequest(name, "has contents beside raw_input_contents; send only one")
        content = raws[index] if raws else _typed(tensor)
        form = (
            tensor.parameters[CONTENT_TYPE].string_param
            if CONTENT_TYPE in tensor.parameters
            else ""
        )
        shape = _shape(tensor.shape, name)
        found[name] = Tensor(name, tensor.datatype, shape, content, form == "base64")
    return found


def raw_bytes(elements: Sequence[bytes]) -> bytes:
    """The raw form of a BYTES tensor."""
    return b"".join(_LENGTH.pack(len(element)) + element for element in elements)


def _shape(shape: Sequence[int], name: str) -> tuple[int, ...]:
    if len(shape) > _MOST_DIMENSIONS:
        raise InvalidRequest(name, f"has {len(shape)} dimensions; the limit is {_MOST_DIMENSIONS}")
    if any(side < 0 for side in shape):
        raise InvalidRequest(name, f"has shape {list(shape)}; sides must be 0 or more")
    return tuple(shape)


def _typed(tensor: pb.ModelInferRequest.InferInputTensor) -> Sequence[Any]:
    _, field = _DATATYPES.get(tensor.datatype, ("", ""))
    if not field:
        raise InvalidRequest(tensor.name, f"{tensor.datatype!r} must be in raw_input_contents")
    content: Sequence[Any] = getattr(tensor.contents, field)
    return content
