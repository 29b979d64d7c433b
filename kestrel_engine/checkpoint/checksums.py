"""Checksums of files: SHA256SUMS in the format of coreutils, and the checksums that the hub's cache records.

The hub identifies a large file by its SHA-256, and a small file by git's SHA-1 of the blob. Its cache uses these names.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError
from ..small_files import read_small_file

if TYPE_CHECKING:
    from ..types.progress import Progress

NAME = "SHA256SUMS"
_LINE = re.compile(r"(?P<sum>[0-9a-f]{64}) [ *](?P<name>[^/\\]+)")
HUB_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""The hub's name of a file's contents: SHA-1 or SHA-256."""
_PIECE = 8 * 2**20


def read_sums(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file name in ``folder``'s SHA256SUMS; empty without one. Raises CheckpointError."""
    file = folder / NAME
    if not file.is_file():
        return {}
    try:
        text = read_small_file(file).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: can't be read ({error})") from None
    return parse_sums(text, str(file))


def parse_sums(text: str, where: str) -> dict[str, str]:
    """Returns the SHA-256 of each file name in the text of SHA256SUMS. Raises CheckpointError."""
    sums = {}
    for number, line in enumerate(text.splitlines(), 1):
        match = _LINE.fullmatch(line)
        if match is None:
            raise CheckpointError(f"{where}: line {number} must be a SHA-256 and a file name")
        sums[match["name"]] = match["sum"]
    return sums


def format_sums(sums: Mapping[str, str]) -> str:
    return "".join(f"{total}  {name}\n" for name, total in sorted(sums.items()))


def write_sums(folder: Path, sums: Mapping[str, str]) -> None:
    """Writes ``sums``, a SHA-256 for each file name, to SHA256SUMS in ``folder``. Raises OSError."""
    (folder / NAME).write_text(format_sums(sums), "utf-8")


def recorded_by_hub(file: Path) -> str | None:
    """Returns the hub's checksum of a file in the hub's cache; None for other files."""
    if not file.is_symlink():
        return None
    target = Path(os.readlink(file))
    known = target.parent.name == "blobs" and HUB_NAME.fullmatch(target.name)
    return target.name if known else None


def checksum(file: Path, *, like: str = "", progress: Progress | None = None) -> str:
    """Returns the SHA-256 of a file's contents, or git's SHA-1 of the blob if ``like`` is a SHA-1. Raises OSError."""
    size = file.stat().st_size
    if len(like) == 40:
        digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    else:
        digest = hashlib.sha256()
    done = 0
    with file.open("rb") as stream:
        while piece := stream.read(_PIECE):
            digest.update(piece)
            done += len(piece)
            if progress is not None:
                progress(done, size, f"checking {file.name}")
    return digest.hexdigest()
