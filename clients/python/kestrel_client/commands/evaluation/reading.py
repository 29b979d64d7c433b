"""Reads the rows of a data set: a file or folder, or a data set of the hub."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from kestrel_client.images.fetching import is_url

from ..parser import CommandError
from ..requests.inputs import Source
from .benchmark import Benchmark, Hub
from .records import Record

_IMAGE = "image"
_DOCS = "docs/use/evaluation.md describes the layouts"


@dataclass(frozen=True, slots=True)
class Records:
    """The rows of a data set."""

    name: str
    rows: Iterator[Record]


def open_records(
    benchmark: Benchmark, place: str | None, hub: Hub | None, limit: int | None
) -> Records:
    """Returns the rows of ``place``, a file or folder, or of ``hub`` if that is None. Raises CommandError."""
    if place is None:
        if hub is None:
            raise CommandError(f"eval {benchmark.name} needs a folder: no hub has this set")
        return _hub_records(hub, limit)
    try:
        return _local_records(benchmark, Path(place), limit)
    except OSError as error:
        raise CommandError(f"cannot read {place!r}: {error.strerror or error}") from None


def _local_records(benchmark: Benchmark, path: Path, limit: int | None) -> Records:
    if not path.exists():
        raise CommandError(
            f"there is no file or folder {str(path)!r}; --hub REPO reads a hub's set"
        )
    if path.is_dir() and benchmark.layout is not None:
        rows = benchmark.layout(path)
        if rows is not None:
            return _file_records(path, path, _laid_out(path, benchmark, rows, limit))
    file = _file_of(path, benchmark)
    if file.suffix == ".parquet":
        return _parquet_records(file, limit)
    return _file_records(file, file.parent, list(islice(json_lines(file), limit)))


def _laid_out(
    path: Path, benchmark: Benchmark, rows: Iterator[dict[str, Any]], limit: int | None
) -> list[dict[str, Any]]:
    try:
        return list(islice(rows, limit))
    except (TypeError, ValueError, AttributeError) as error:  # A list as an id, for example.
        raise CommandError(
            f"{str(path)!r} is not in the layout of {benchmark.title}: {error}; {_DOCS}"
        ) from None


def json_file(path: Path) -> Any:
    """The content of a JSON file. Raises CommandError."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise CommandError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{str(path)!r} is not JSON: {error}") from None


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSONL file. Raises CommandError."""
    number = 1
    try:
        with path.open(encoding="utf-8") as opened:
            for number, line in enumerate(filter(str.strip, opened), 1):
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise CommandError(f"{path}: row {number} is not an object of JSON")
                yield row
    except OSError as error:
        raise CommandError(f"cannot read {str(path)!r}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise CommandError(f"{str(path)!r} is not UTF-8 text") from None
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path}: row {number} is not JSON: {error}") from None


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


def _file_records(place: Path, folder: Path, rows: list[dict[str, Any]]) -> Records:
    """Rows whose column image names a file of ``folder``, or an address. Every file is looked for now."""
    records = []
    for number, row in enumerate(rows, 1):
        given = row.get(_IMAGE)
        if not isinstance(given, str) or not given:
            columns = ", ".join(row)
            raise CommandError(
                f"{place}: row {number} has no image in the column {_IMAGE!r}; its columns are {columns}"
            )
        source = given if is_url(given) else str(folder / given)
        if source is not given and not Path(source).is_file():
            raise CommandError(f"{place}: row {number}: there is no image {source!r}")
        values = {name: value for name, value in row.items() if name != _IMAGE}
        records.append(Record(str(place), number, values, given, _constant(source)))
    return Records(str(place), iter(records))


def _constant(source: Source) -> Callable[[], Source]:
    return lambda: source


def _hub_records(hub: Hub, limit: int | None) -> Records:
    named = hub.repo if hub.config is None else f"{hub.repo} ({hub.config})"
    return _loaded(f"{named} {hub.split}", limit, hub.repo, hub.config, split=hub.split)


def _parquet_records(file: Path, limit: int | None) -> Records:
    return _loaded(str(file), limit, "parquet", data_files=str(file), split="train")


def _loaded(name: str, limit: int | None, *args: Any, **options: Any) -> Records:
    """Rows of the package datasets."""
    if importlib.util.find_spec("datasets") is None:
        raise CommandError(
            f"{name!r} needs the package datasets: pip install './clients/python[cli,eval]'"
        )
    import datasets

    try:
        data = datasets.load_dataset(*args, **options)
        if _IMAGE not in data.column_names:
            raise CommandError(
                f"{name} has no column {_IMAGE!r}; its columns are {', '.join(data.column_names)}"
            )
        data = data.cast_column(_IMAGE, datasets.Image(decode=False))
    except CommandError:
        raise
    except (
        Exception
    ) as error:  # The package raises errors of many kinds: of the hub, of files, of its own.
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise CommandError(f"cannot read {name!r}: {why[:300]}") from None
    plain = data.remove_columns(_IMAGE)
    count = len(data) if limit is None else min(limit, len(data))

    rows = (
        Record(name, index + 1, plain[index], f"row {index + 1}", _image_at(data, name, index))
        for index in range(count)
    )
    return Records(name, rows)


def _image_at(data: Any, name: str, index: int) -> Callable[[], Source]:
    def load() -> Source:
        image = data[index][_IMAGE]
        encoded: bytes | None = image.get("bytes") if isinstance(image, dict) else None
        if encoded:
            return encoded
        path = image.get("path") if isinstance(image, dict) else None
        if path:
            return str(path)
        raise CommandError(f"{name}: row {index + 1} has no image")

    return load
