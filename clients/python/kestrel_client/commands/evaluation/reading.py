"""Reads the rows of a data set: a file or folder, or a data set of the hub."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from kestrel_client.images.fetching import is_url

from ..files import file_errors, json_lines
from ..parser import CommandError
from ..requests.inputs import Source
from .benchmark import Benchmark, Hub
from .records import Record

_IMAGE = "image"
_DOCS = "docs/use/evaluation.md describes the layouts"


Records = tuple[str, Iterator[Record]]
"""The name of a data set, and its rows."""


def open_records(benchmark: Benchmark, origin: str | Hub, limit: int | None) -> Records:
    """Returns the rows of a file or folder, or of a data set of the hub. Raises CommandError."""
    if isinstance(origin, str):
        with file_errors("read", origin):
            return origin, _local_rows(benchmark, Path(origin), limit)
    named = origin.repo if origin.config is None else f"{origin.repo} ({origin.config})"
    name = f"{named} {origin.split}"
    return name, _loaded(name, limit, origin.repo, origin.config, split=origin.split)


def _local_rows(benchmark: Benchmark, path: Path, limit: int | None) -> Iterator[Record]:
    if not path.exists():
        raise CommandError(
            f"there is no file or folder {str(path)!r}; --hub REPO reads a hub's set"
        )
    rows = benchmark.layout(path) if benchmark.layout is not None and path.is_dir() else None
    if rows is not None:
        try:
            return _file_records(path, path, list(islice(rows, limit)))
        except (TypeError, ValueError, AttributeError) as error:  # A list as an id, for example.
            raise CommandError(
                f"{str(path)!r} is not in the layout of {benchmark.title}: {error}; {_DOCS}"
            ) from None
    file = _file_of(path, benchmark)
    if file.suffix == ".parquet":
        return _loaded(str(file), limit, "parquet", data_files=str(file), split="train")
    return _file_records(file, file.parent, list(islice(json_lines(file), limit)))


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
    suffixes = (".jsonl", ".parquet")
    if path.is_file():
        if path.suffix not in suffixes:
            raise CommandError(f"{str(path)!r} must end with {' or '.join(suffixes)}; {_DOCS}")
        return path
    files = sorted(each for each in path.iterdir() if each.suffix in suffixes)
    if len(files) > 1 and all(each.suffix == ".parquet" for each in files):
        return path / "*.parquet"
    if len(files) != 1:
        found = f"{len(files)} files" if files else "no file"
        raise CommandError(
            f"the folder {str(path)!r} has {found} of rows (.jsonl, .parquet) and not the layout of "
            f"{benchmark.title}; {_DOCS}"
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


def _loaded(name: str, limit: int | None, *args: Any, **options: Any) -> Iterator[Record]:
    """Rows of the package datasets."""
    if importlib.util.find_spec("datasets") is None:
        raise CommandError(
            f"{name!r} needs the package datasets: pip install './clients/python[cli,eval]'"
        )
    import datasets

    try:
        data = datasets.load_dataset(*args, **options)
        columns = data.column_names
        if _IMAGE in columns:
            data = data.cast_column(_IMAGE, datasets.Image(decode=False))
    except Exception as error:  # It raises errors of many kinds: of the hub, of files, of its own.
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CommandError(f"cannot read {name!r}: {why[:300]}") from None
    if _IMAGE not in columns:
        raise CommandError(f"{name} has no column {_IMAGE!r}; its columns are {', '.join(columns)}")
    plain = data.remove_columns(_IMAGE)
    count = len(data) if limit is None else min(limit, len(data))
    return (
        Record(name, i + 1, plain[i], f"row {i + 1}", partial(_image_at, data, name, i))
        for i in range(count)
    )


def _image_at(data: Any, name: str, index: int) -> Source:
    image = data[index][_IMAGE]
    found = (image.get("bytes") or image.get("path")) if isinstance(image, dict) else None
    if not found:
        raise CommandError(f"{name}: row {index + 1} has no image")
    source: Source = found
    return source
