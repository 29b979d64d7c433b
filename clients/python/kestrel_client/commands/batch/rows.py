"""The rows of a batch: images that are named on the command line, and the rows of CSV and JSONL files."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kestrel_client.images.fetching import is_url

from ..files import json_lines
from ..parser import CommandError
from ..requests.inputs import Input, Source, open_inputs, unique_stems

_COLUMN = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class Row:
    """One image to ask about."""

    image: str
    """The user's name of the image."""
    source: Source
    number: int | None = None
    """The row's number in its file, from 1; None for an image of the command line."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """All columns of the row."""

    @property
    def identity(self) -> tuple[str, int | None]:
        """Distinguishes the row from all others of the batch."""
        return self.image, self.number

    @property
    def input(self) -> Input:
        return Input(self.image, self.source)

    def filled(self, text: str) -> str:
        """Returns ``text`` with the row's value in place of each {column}.

        Text of an image of the command line stays as it is. Raises CommandError for a column that the row lacks.
        """
        if self.number is None:
            return text

        def value(match: re.Match[str]) -> str:
            if match[1] not in self.columns:
                known = ", ".join(self.columns)
                raise CommandError(
                    f"row {self.number} has no column {match[1]!r}; its columns are {known}"
                )
            return self.columns[match[1]]

        return _COLUMN.sub(value, text)


def open_rows(names: Sequence[str], files: Sequence[str], column: str) -> list[Row]:
    """Returns the rows of the images ``names`` and of the ``files``, in order, each identity once.

    ``column``: the column of the files that names the image. Raises CommandError.
    """
    rows = [Row(each.name, each.source) for each in open_inputs(names)]
    if len(files) > 1:
        raise CommandError(f"--rows is given {len(files)} times; a batch has one file of rows")
    for name in files:
        rows += _rows_of(Path(name), column)
    return list({row.identity: row for row in rows}.values())


def file_names(rows: Sequence[Row]) -> dict[tuple[str, int | None], str]:
    """A file name without suffix for each row, by identity. The same rows have the same names in every run."""
    names = unique_stems([row.input for row in rows])
    return dict(zip((row.identity for row in rows), names, strict=True))


def _rows_of(file: Path, column: str) -> Iterator[Row]:
    read = _READERS.get(file.suffix.lower())
    if read is None:
        raise CommandError(f"--rows {str(file)!r}: must end with {' or '.join(_READERS)}")
    for number, values in enumerate(read(file), 1):
        image = values.get(column, "")
        if not image:
            raise CommandError(
                f"{file}: row {number} has no image in the column {column!r}; its columns are {', '.join(values)}. "
                "--image-column names another one"
            )
        source = image if is_url(image) else str(file.parent / image)
        yield Row(image, source, number, values)


def _csv_rows(file: Path) -> Iterator[dict[str, str]]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            for row in csv.DictReader(opened):
                yield {name: value or "" for name, value in row.items() if isinstance(name, str)}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        why = getattr(error, "strerror", None) or error
        raise CommandError(f"cannot read {str(file)!r}: {why}") from None


def _json_rows(file: Path) -> Iterator[dict[str, str]]:
    for row in json_lines(file):
        yield {
            name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            for name, value in row.items()
        }


_READERS = {".csv": _csv_rows, ".jsonl": _json_rows}
