"""One row of a data set, whose columns are checked when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..parser import CommandError
from ..requests.inputs import Source

Edges = tuple[float, float, float, float]
"""Left, upper, right and lower edge."""
_LARGEST = 10**9
"""Of a number of a row, whatever its sign. Areas of larger boxes would lose their digits."""


@dataclass(frozen=True, slots=True)
class Record:
    """A row. The methods return the value of a column, or raise CommandError with the row, the column and the value."""

    place: str
    """The file or set that has the row."""
    number: int
    """The row's number, from 1."""
    values: Mapping[str, Any]
    image: str
    """The name of its image."""
    load: Callable[[], Source]
    """Returns the image."""

    def value(self, name: str) -> Any:
        if self.values.get(name) is not None:
            return self.values[name]
        columns = ", ".join(n for n, value in self.values.items() if value is not None) or "none"
        raise CommandError(
            f"{self.place}: row {self.number} has no column {name!r}; its columns are {columns}"
        )

    def within(self, values: Mapping[str, Any]) -> Record:
        """A part of the row."""
        return Record(self.place, self.number, values, self.image, self.load)

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def text(self, name: str) -> str:
        value = self.value(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str) or not value.strip() or not is_unicode(value):
            self.refuse(name, value, "a text")
        return value

    def number_of(self, name: str, least: float = 0) -> float:
        value = self.value(name)
        if not is_number(value) or value < least:
            self.refuse(name, value, f"a number of at least {least:g}")
        return float(value)

    def numbers(self, name: str, count: int) -> list[float]:
        value = self.value(name)
        is_list = isinstance(value, (list, tuple)) and len(value) == count
        if not is_list or not all(map(is_number, value)):
            self.refuse(name, value, f"{count} numbers")
        return [float(number) for number in value]

    def box(self, name: str) -> Edges:
        """The edges of a box that is given by its upper left corner, its width and its height."""
        x, y, width, height = self.numbers(name, 4)
        if width < 0 or height < 0:
            self.refuse(name, self.value(name), "a width and a height of at least 0")
        return x, y, x + width, y + height

    def rows(self, name: str) -> list[Mapping[str, Any]]:
        """A list of objects."""
        value = self.value(name)
        if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
            self.refuse(name, value, "a list of objects")
        return value

    def refuse(self, name: str, value: Any, needed: str) -> NoReturn:
        raise CommandError(
            f"{self.place}: row {self.number}: {name} is {str(value)[:80]!a}, needs {needed}"
        )


def is_unicode(text: str) -> bool:
    """Whether a text can be written: JSON may have halves of characters."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def is_number(value: Any) -> bool:
    """Whether a value is a number that metrics can be computed from."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    return abs(value) <= _LARGEST  # False for NaN too.
