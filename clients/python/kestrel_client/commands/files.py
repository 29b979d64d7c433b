"""Files that users name: JSON that is read, and files that are written as a whole."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .parser import CommandError


@contextmanager
def file_errors(doing: str, path: object) -> Iterator[None]:
    """Raises an OSError as CommandError: cannot ``doing`` what ``path`` names."""
    try:
        yield
    except OSError as error:
        raise CommandError(f"cannot {doing} {str(path)!r}: {error.strerror or error}") from None


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON that UTF-8 can encode. From what is escaped in it, a reader gets the same name of a file."""
    return escaped(json.dumps(value, ensure_ascii=False, indent=indent))


def escaped(text: str) -> str:
    """The text, with JSON's escapes for what UTF-8 cannot encode: other bytes in the name of a file."""
    return text.encode(errors="backslashreplace").decode()


def json_file(path: Path) -> Any:
    """The content of a JSON file. Raises CommandError."""
    with file_errors("read", path):
        data = path.read_bytes()
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{str(path)!r} is not JSON: {error}") from None


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file. Raises CommandError."""
    number = 1
    try:
        with file_errors("read", path), path.open(encoding="utf-8") as opened:
            for number, line in enumerate(filter(str.strip, opened), 1):
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise CommandError(f"{path}: row {number} is not an object of JSON")
                yield row
    except UnicodeDecodeError:
        raise CommandError(f"{str(path)!r} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path}: row {number} is not JSON: {error}") from None


def check_writable(path: str) -> None:
    """Raises CommandError if a file cannot be written there. Before a run, because a run may take hours."""
    folder = Path(path).parent
    if Path(path).is_dir():
        raise CommandError(f"cannot write {path!r}: it is a folder")
    with file_errors("write", path):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


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
