"""Writes the files that an input describes."""

import json
import os
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

_MOST_BYTES = 1 << 26
"""Of a file of weights. A header may claim more."""
_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2}


def parts(data: bytes) -> dict[str, Any]:
    """The input as an object with the contents of files; empty if it is something else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def write(folder: Path, found: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Writes each part that is there to the file of its name: a text as it is, all else as JSON."""
    for part, name in names.items():
        if part in found:
            value = found[part]
            text = value if isinstance(value, str) else json.dumps(value)
            (folder / name).write_bytes(text.encode(errors="surrogatepass"))


def write_safetensors(file: Path, data: bytes, found: Mapping[str, Any]) -> None:
    """Writes the file whose header is ``found["tensors"]``: names with dtype and shape ("F32 2x3"), or with an entry.

    Without tensors, the input is the file.
    """
    if "tensors" not in found:
        file.write_bytes(data)
        return
    header, end = {}, 0
    tensors = found["tensors"]
    for name, entry in tensors.items() if isinstance(tensors, dict) else ():
        try:
            kind, _, sides = entry.partition(" ")
            shape = [int(side) for side in sides.split("x") if side]
            size = _ITEM_BYTES.get(kind, 1) * prod(shape)
        except (AttributeError, ValueError):
            header[name] = entry
            continue
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    if "metadata" in found:
        header["__metadata__"] = found["metadata"]
    text = json.dumps(header if isinstance(tensors, dict) else tensors).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    # The numbers are a hole in the file.
    os.truncate(file, 8 + len(text) + max(0, min(end, _MOST_BYTES)))
