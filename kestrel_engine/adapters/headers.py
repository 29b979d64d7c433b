"""What the files of an adapter say before a tensor is read. Bounds it, because reading it takes memory and time.

The unpickler of torch (``weights_only``) runs no code of a file, but calls what it allows with the file's arguments:
``bytearray(10**12)`` takes the memory of the host. So only the calls that make dense tensors may be in a .pt file.
"""

from __future__ import annotations

import pickle
import pickletools
import re
import zipfile
from pathlib import Path

from ..checkpoint.files import is_pickle
from ..errors import CheckpointError

MAX_HEADER_BYTES = 4 << 20
"""Of one file. The longest names of all modules of a released model take 0.2 MB."""

_LENGTH_BYTES = 8
_ALLOWED = re.compile(
    r"collections OrderedDict"
    r"|torch\._utils _rebuild_(?:tensor_v2|parameter)"
    r"|torch (?:\w+Storage|Size|device|float32|float16|bfloat16)"
)


def check_header(file: Path) -> None:
    """Raises CheckpointError if the header of a .safetensors file is too large, or a .pt file holds other objects than
    dense tensors and plain values. Raises OSError."""
    if is_pickle(file):
        _check_pickle(file)
        return
    with file.open("rb") as opened:
        _check_size(file, int.from_bytes(opened.read(_LENGTH_BYTES), "little"))


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


def _check_size(file: Path, size: int) -> None:
    if size > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{file}: describes its tensors in {size} bytes; the limit is {MAX_HEADER_BYTES}"
        )
