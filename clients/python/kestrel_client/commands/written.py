"""Files that a command writes as a whole."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from .parser import CommandError


def check_writable(path: str) -> None:
    """Raises CommandError if a file cannot be written there. Before a run, because a run may take hours."""
    folder = Path(path).parent
    if Path(path).is_dir():
        raise CommandError(f"cannot write {path!r}: it is a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CommandError(f"cannot write {path!r}: {error.strerror}") from None


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """Replaces ``file`` by what ``write`` writes, once that is complete. Raises CommandError."""
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write(draft)
        draft.replace(file)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CommandError(f"cannot write {str(file)!r}: {error.strerror or error}") from None
