"""The header of a .safetensors file: its tensors, and where their values begin. Nothing of it is trusted."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import CheckpointError
from .files import DTYPES, StoredTensor

_LENGTH_BYTES = 8
_MOST_BYTES = 100_000_000
"""Of a header, as in the safetensors library."""


@dataclass(frozen=True, slots=True)
class Header:
    """``begins``: the offset in the file of each tensor's values. ``metadata``: what the file says of itself."""

    tensors: Mapping[str, StoredTensor]
    begins: Mapping[str, int]
    metadata: Mapping[str, Any]

    def begin(self, stored: StoredTensor) -> int:
        """The offset of the values of ``stored``. Raises CheckpointError if it is not in the file (any more)."""
        if self.tensors.get(stored.name) != stored:
            raise CheckpointError("the files have changed while they were read")
        return self.begins[stored.name]


def read_header(file: Path, opened: BinaryIO, most_bytes: int = _MOST_BYTES) -> Header:
    """Reads the header of ``opened``. Raises OSError, and CheckpointError if damaged or above ``most_bytes``."""
    room = opened.seek(0, 2) - _LENGTH_BYTES
    opened.seek(0)
    size = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
    try:
        if size > room:
            raise ValueError(size)
        check_header_size(file, size, most_bytes)
        header = json.loads(opened.read(size))
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict):
            raise TypeError("__metadata__")
        tensors, begins = {}, {}
        for name, entry in header.items():
            shape, (begin, end) = tuple(entry["shape"]), entry["data_offsets"]
            stored = StoredTensor(name, shape, str(entry["dtype"]), file)
            if (
                not all(type(n) is int and n >= 0 for n in (*shape, begin, end))
                or end > room - size
            ):
                raise ValueError(name)
            if stored.dtype in DTYPES and end - begin != stored.num_bytes:
                raise ValueError(name)
            tensors[name], begins[name] = stored, _LENGTH_BYTES + size + begin
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: is damaged, or no safetensors file") from error
    return Header(tensors, begins, metadata)


def check_header_size(file: Path, size: int, most_bytes: int) -> None:
    """Raises CheckpointError for a description of tensors that has more than ``most_bytes``."""
    if size > most_bytes:
        raise CheckpointError(
            f"{file}: describes its tensors in {size} bytes; the limit is {most_bytes}"
        )
