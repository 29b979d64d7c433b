"""Reads the rows of a data set: a file, or a folder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from kestrel_client.images.fetching import is_url

from ..files import file_errors, json_lines
from ..parser import CommandError
from .benchmark import Benchmark
from .records import Record

_IMAGE = "image"
_DOCS = "docs/use/evaluation.md describes the layouts"


def open_records(benchmark: Benchmark, place: str, limit: int | None) -> Iterator[Record]:
    """The rows of a file or folder. Raises CommandError."""
    path = Path(place)
    if not path.exists():
        raise CommandError(f"there is no file or folder {place!r}")
    with file_errors("read", place):
        rows = benchmark.layout(path) if benchmark.layout is not None and path.is_dir() else None
        if rows is None:
            path = _file_of(path, benchmark)
            return _file_records(path, path.parent, list(islice(json_lines(path), limit)))
        try:
            return _file_records(path, path, list(islice(rows, limit)))
        except (TypeError, ValueError, AttributeError) as error:  # A list as an id, for example.
            raise CommandError(
                f"{place!r} is not in the layout of {benchmark.title}: {error}; {_DOCS}"
            ) from None


def objects_of(value: Any, path: Path, key: str | None = None) -> list[dict[str, Any]]:
    """``value`` or its ``key`` as a list of objects. Raises CommandError."""
    if key is not None:
        value = value.get(key) if isinstance(value, dict) else None
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        where = "" if key is None else f"{key!r} of "
        raise CommandError(f"{where}{str(path)!r} must be a list of objects")
    return value


def image_file(folder: Path, name: object, *subfolders: str) -> str:
    """The path of an image that a set names, in ``folder`` or in one of its ``subfolders``. Raises CommandError."""
    if not isinstance(name, str) or not name:
        raise CommandError(f"a row of {str(folder)!r} names no image, but {name!r}")
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise CommandError(f"a row of {str(folder)!r} names an image outside of it: {name!r}")
    for sub in (*subfolders, ""):
        path = folder / sub / name
        if path.is_file():
            return str(path)
    where = " or ".join(repr(str(folder / sub)) for sub in (*subfolders, ""))
    raise CommandError(f"there is no image {name!r} in {where}")


def _file_of(path: Path, benchmark: Benchmark) -> Path:
    """The file of rows that ``path`` is or has."""
    if path.is_file():
        if path.suffix != ".jsonl":
            raise CommandError(f"{str(path)!r} must end with .jsonl; {_DOCS}")
        return path
    files = sorted(each for each in path.iterdir() if each.suffix == ".jsonl")
    if len(files) != 1:
        found = f"{len(files)} files" if files else "no file"
        raise CommandError(
            f"the folder {str(path)!r} has {found} of rows (.jsonl) and not the layout of {benchmark.title}; {_DOCS}"
        )
    return files[0]


def _file_records(place: Path, folder: Path, rows: list[dict[str, Any]]) -> Iterator[Record]:
    """Rows whose column image names a file of ``folder``, or an address. Every file is looked for now."""
    records = []
    for number, row in enumerate(rows, 1):
        name = row.pop(_IMAGE, None)
        if not isinstance(name, str) or not name:
            raise CommandError(
                f"{place}: row {number} has no image in the column {_IMAGE!r}; its columns are {', '.join(row)}"
            )
        source = name if is_url(name) else str(folder / name)
        if source is not name and not Path(source).is_file():
            raise CommandError(f"{place}: row {number}: there is no image {source!r}")
        records.append(Record(str(place), number, row, name, partial(str, source)))
    return iter(records)
