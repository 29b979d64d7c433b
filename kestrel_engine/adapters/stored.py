"""The tensors that the files of an adapter hold: what the files say of them, bounded, and their values.

Files of the operator's folder come and go while the server reads them. So no values are read from mapped memory: the
kernel kills a process that reads a part of a mapped file that was cut off. A .safetensors file is opened once for its
header and its values, so both are of one file, also if another one takes its name.

The unpickler of torch (``weights_only``) runs no code of a file, but calls what it allows with the file's arguments:
``bytearray(10**12)`` takes the memory of the host. So only the calls that make dense tensors may be in a .pt file.
"""

from __future__ import annotations

import json
import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint.files import StoredTensor, is_pickle, load_pickle, read_headers
from ..errors import CheckpointError

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 4 << 20
"""Of one file. The longest names of all modules of a released model take 0.2 MB."""
ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
"""By the name of a dtype that an adapter may have."""

_MOST_REST = 4
"""Times the bytes of its tensors that a .pt file may have: beside them, it may hold the state of an optimiser."""
_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_ALLOWED = re.compile(
    r"collections OrderedDict|_codecs encode"
    r"|torch\._utils _rebuild_(?:tensor_v2|parameter)"
    r"|torch (?:\w+Storage|Size|device|[a-z]*(?:float|int)\d+|bool)"
)


@dataclass(frozen=True, slots=True)
class Description:
    """What a file says of its tensors. ``begins``: where the values of each begin, in a .safetensors file.
    ``metadata``: what it says of itself."""

    tensors: Mapping[str, StoredTensor]
    begins: Mapping[str, int]
    metadata: Mapping[str, Any]


def describe(file: Path) -> Description:
    """Reads no values. Raises OSError, and CheckpointError if the file is damaged, has a too large header, or is a .pt
    file that holds other objects than dense tensors and plain values."""
    if is_pickle(file):
        _check_pickle(file)
        tensors = read_headers((file,))
        _check_rest(file, tensors.values())
        return Description(tensors, {}, {})
    with file.open("rb") as opened:
        return _described(file, opened)


@contextmanager
def opened_tensors(files: Sequence[Path]) -> Iterator[Callable[[StoredTensor], torch.Tensor]]:
    """Gives what reads a tensor that ``describe`` found. It raises CheckpointError and KeyError if the file is another
    one by now."""
    with ExitStack() as stack:
        readers: dict[Path, Callable[[StoredTensor], torch.Tensor]] = {}
        for file in files:
            if is_pickle(file):
                _check_pickle(file)
                readers[file] = partial(_unpickled, load_pickle(file, mmap=False))
            else:
                opened = stack.enter_context(file.open("rb"))
                readers[file] = partial(_read, opened, _described(file, opened))
        yield lambda stored: readers[stored.file](stored)


def _unpickled(pickled: Mapping[str, torch.Tensor], stored: StoredTensor) -> torch.Tensor:
    return pickled[stored.name]


def _read(opened: BufferedReader, found: Description, stored: StoredTensor) -> torch.Tensor:
    import torch

    dtypes = {
        "F64": torch.float64,
        "F32": torch.float32,
        "BF16": torch.bfloat16,
        "F16": torch.float16,
    }
    if found.tensors[stored.name] != stored:
        raise CheckpointError("the files have changed while they were read")
    data = bytearray(prod(stored.shape) * ITEM_BYTES[stored.dtype])
    opened.seek(found.begins[stored.name])
    if opened.readinto(data) != len(data):
        raise CheckpointError(f"{stored.file}: is damaged: {stored.name} is cut")
    return torch.frombuffer(data, dtype=dtypes[stored.dtype]).reshape(stored.shape)


def _described(file: Path, opened: BufferedReader) -> Description:
    """The description of a .safetensors file."""
    room = opened.seek(0, 2) - _LENGTH_BYTES
    opened.seek(0)
    size = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
    try:
        if size > room:
            raise ValueError(size)
        _check_size(file, size)
        header = json.loads(opened.read(size))
        metadata = header.pop(_METADATA, {})
        if not isinstance(metadata, dict):
            raise TypeError(_METADATA)
        tensors, begins = {}, {}
        base = _LENGTH_BYTES + size
        for name, told in header.items():
            shape, (begin, end) = tuple(told["shape"]), told["data_offsets"]
            dtype = str(told["dtype"])
            if (
                not all(type(n) is int and n >= 0 for n in (*shape, begin, end))
                or end > room - size
            ):
                raise ValueError(name)
            if dtype in ITEM_BYTES and end - begin != prod(shape) * ITEM_BYTES[dtype]:
                raise ValueError(name)
            tensors[name] = StoredTensor(name, shape, dtype, file)
            begins[name] = base + begin
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file}: is damaged, or no safetensors file") from error
    return Description(tensors, begins, metadata)


def _check_pickle(file: Path) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            entries = [
                each for each in archive.infolist() if each.filename.lower().endswith("data.pkl")
            ]
            if len(entries) != 1 or entries[0].compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(f"{file}: is not a file of torch.save")
            _check_size(file, entries[0].file_size)
            data = archive.read(entries[0])
        for operation, argument, _ in pickletools.genops(data):
            if operation.name in ("GLOBAL", "INST") and not _ALLOWED.fullmatch(str(argument)):
                name = str(argument).replace(" ", ".")
                raise CheckpointError(
                    f"{file}: holds {name[:100]}; expected dense tensors and plain values only"
                )
    except zipfile.BadZipFile:
        raise CheckpointError(
            f"{file}: is damaged, or in the old format of torch; write it again with torch.save"
        ) from None
    except (ValueError, pickle.UnpicklingError, EOFError, RuntimeError) as error:
        raise CheckpointError(f"{file}: is damaged ({type(error).__name__})") from error


def _check_rest(file: Path, tensors: Iterable[StoredTensor]) -> None:
    """Raises CheckpointError if a .pt file, which is read as a whole, holds much more than the tensors."""
    held = sum(prod(each.shape) * ITEM_BYTES.get(each.dtype, 0) for each in tensors)
    size = file.stat().st_size
    if size > _MOST_REST * held + MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: has {size} bytes, and the adapter's tensors take {held}; write these alone with torch.save"
        )


def _check_size(file: Path, size: int) -> None:
    if size > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: describes its tensors in {size} bytes; the limit is {MAX_HEADER_BYTES}"
        )
