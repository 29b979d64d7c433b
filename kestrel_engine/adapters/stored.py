"""The tensors that the files of an adapter hold: what the files say of them, bounded, and their values.

Files of the operator's folder change while the server reads them. So no values are read from mapped memory: the kernel
kills a process that reads a part of a mapped file that was cut off. Each .safetensors file is opened once.

The unpickler of torch (``weights_only``) calls what it allows with the file's arguments: ``bytearray(10**12)`` takes
the memory of the host. So only the calls that make dense tensors may be in a .pt file.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint.files import DTYPES, StoredTensor, is_pickle, load_pickle, read_headers
from ..checkpoint.safetensors_header import Header, check_header_size, read_header
from ..errors import CheckpointError

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 4 << 20
"""Of one file. The longest names of all modules of a released model take 0.2 MB."""

_MOST_REST = 4
"""Times the bytes of its tensors that a .pt file may have: beside them, it may hold the state of an optimiser."""
_ALLOWED = re.compile(
    r"collections OrderedDict|_codecs encode"
    r"|torch\._utils _rebuild_(?:tensor_v2|parameter)"
    r"|torch (?:\w+Storage|Size|device|[a-z]*(?:float|int)\d+|bool)"
)


def describe(file: Path) -> Header:
    """Reads no values. Raises OSError, and CheckpointError for a damaged file, a too large header, or a .pt file with
    other objects than dense tensors and plain values."""
    if is_pickle(file):
        _check_pickle(file)
        tensors = read_headers((file,))
        _check_rest(file, tensors.values())
        return Header(tensors, {}, {})
    with file.open("rb") as opened:
        return read_header(file, opened, MAX_HEADER_BYTES)


@contextmanager
def opened_tensors(files: Sequence[Path]) -> Iterator[Callable[[StoredTensor], torch.Tensor]]:
    """Gives what reads a tensor of ``describe``. It raises CheckpointError and KeyError if the file has changed."""
    with ExitStack() as stack:
        readers: dict[Path, Callable[[StoredTensor], torch.Tensor]] = {}
        for file in files:
            if is_pickle(file):
                _check_pickle(file)
                readers[file] = partial(_unpickled, load_pickle(file, mmap=False))
            else:
                opened = stack.enter_context(file.open("rb"))
                readers[file] = partial(_read, opened, read_header(file, opened, MAX_HEADER_BYTES))
        yield lambda stored: readers[stored.file](stored)


def _unpickled(pickled: Mapping[str, torch.Tensor], stored: StoredTensor) -> torch.Tensor:
    return pickled[stored.name]


def _read(opened: BufferedReader, found: Header, stored: StoredTensor) -> torch.Tensor:
    import torch

    begin = found.begin(stored)
    data = bytearray(stored.num_bytes)
    opened.seek(begin)
    if opened.readinto(data) != len(data):
        raise CheckpointError(f"{stored.file}: is damaged: {stored.name} is cut")
    return torch.frombuffer(data, dtype=stored.torch_dtype).reshape(stored.shape)


def _check_pickle(file: Path) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            entries = [
                each for each in archive.infolist() if each.filename.lower().endswith("data.pkl")
            ]
            if len(entries) != 1 or entries[0].compress_type != zipfile.ZIP_STORED:
                raise CheckpointError(f"{file}: is not a file of torch.save")
            check_header_size(file, entries[0].file_size, MAX_HEADER_BYTES)
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
    held = sum(each.num_bytes for each in tensors if each.dtype in DTYPES)
    size = file.stat().st_size
    if size > _MOST_REST * held + MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: has {size} bytes, and the adapter's tensors take {held}; write these alone with torch.save"
        )
