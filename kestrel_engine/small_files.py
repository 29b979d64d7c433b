"""Reads the small files that settings name: regular files only, up to a number of bytes."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

MIB = 1 << 20


def read_small_file(path: str | Path, most_bytes: int = MIB) -> bytes:
    """The contents of a regular file. A device, a FIFO and a larger file are not read, so that the server neither waits
    nor fills its memory.

    Raises OSError, whose ``strerror`` says what is wrong.
    """
    # Without O_NONBLOCK, opening a FIFO waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(
                errno.EINVAL, "is not a regular file; copy its contents to a file", str(path)
            )
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes} bytes", str(path))
    return data


def read_small_json(path: str | Path, most_bytes: int = MIB) -> Any:
    """The value in a JSON file. Raises OSError, and ValueError if the file is not JSON or is nested too deeply."""
    try:
        return json.loads(read_small_file(path, most_bytes))
    except RecursionError:
        raise ValueError("is nested too deeply") from None
