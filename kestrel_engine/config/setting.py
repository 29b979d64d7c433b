"""Setting: the description of a configuration field. Owns the kinds of values and their range checks.

A frozen dataclass declares each field that an operator can set with its group's ``setting``, and calls
``check_settings`` in ``__post_init__``. The service builds flags, environment variables, files and reference pages from
these descriptions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from ..errors import ConfigError

Kind = Literal["text", "whole", "number", "bytes", "seconds", "bool"]
"""``bytes`` are whole numbers, ``number`` and ``seconds`` are floats."""

_METADATA_KEY = "setting"
_KINDS = {"int": "whole", "float": "number", "bool": "bool"}
_MOST_SECONDS = 1_000_000
_METAVARS = {"whole": "N", "number": "N", "bytes": "SIZE", "seconds": "SECONDS"}


@dataclass(frozen=True, slots=True)
class SettingGroup:
    """Settings that belong together. ``title``: their heading in a help text. ``section``: the table that holds them in
    a configuration file; "": no file holds them."""

    title: str
    section: str

    def setting(self, default: Any, help: str, **options: Any) -> Any:
        """Returns a dataclass field with ``default`` (dataclasses.MISSING: no default) and a Setting of ``options``."""
        made = {"group": self, "help": help, **options}
        return dataclasses.field(default=default, metadata={_METADATA_KEY: made})


_EMBEDDED = SettingGroup("embedded", "")
"""Of the fields that only a program can set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    group: SettingGroup
    help: str
    """The effect of the setting, in one phrase without a full stop."""
    kind: Kind
    """Without one: of the field's type, ``bytes`` if its name ends with _bytes, ``seconds`` if it ends with _s."""
    flag: str
    """The flag on a command line, such as "--max-queue"; without one, of the field's name."""
    metavar: str | None = None
    """Placeholder of the value in a help text; without one, of the kind."""
    choices: tuple[str, ...] = ()
    """The values that a text may have. Empty: any value."""
    low: float | None = None
    """The smallest number, inclusive."""
    above: float | None = None
    """The lower limit of a number, exclusive."""
    high: float | None = None
    """The largest number, inclusive."""
    shown: str | None = None
    """The default in words, if the value alone does not explain it."""
    negated: bool = False
    """Whether the flag of a bool sets it to False."""
    bare: str | None = None
    """The value of a flag that is given without one; "on" for a bool."""
    zero_is_none: bool
    """Whether an operator writes 0 to set the field to None: without it, of a field that may be None and is a number by
    default."""
    parse: Callable[[str], Any] | None = None
    """Converts a text to the value, or to one of several, if ``kind`` is not enough. Raises ValueError."""
    repeated: bool
    """Whether the field is a tuple: the flag may be given several times, with values between commas."""
    distinct: bool = True
    """Whether each value may occur only once in the tuple."""


def checked(default: Any, **limits: Any) -> Any:
    """Returns a dataclass field that ``check_settings`` checks, but that has no flag. A program that embeds the engine
    may set it. ``limits``: as for ``SettingGroup.setting``."""
    return _EMBEDDED.setting(default, "", **limits)


def settings_of(config: Any) -> Mapping[str, Setting]:
    """Returns the settings of a configuration class or object by field name, in the order of the fields."""
    return _settings_of(config if isinstance(config, type) else type(config))


@cache
def _settings_of(kind: type) -> Mapping[str, Setting]:
    return MappingProxyType({f: s for f, s in _checks_of(kind).items() if s.group is not _EMBEDDED})


@cache
def _checks_of(kind: type) -> Mapping[str, Setting]:
    fields = (each for each in dataclasses.fields(kind) if _METADATA_KEY in each.metadata)
    return MappingProxyType({field.name: _made(field) for field in fields})


def _made(field: dataclasses.Field[Any]) -> Setting:
    name = str(getattr(field.type, "__name__", field.type)).removesuffix(" | None")
    kind = _KINDS.get(name, "text")
    for suffix, of in (("_bytes", "bytes"), ("_s", "seconds")):
        if field.name.endswith(suffix) and kind != "text":
            kind = of
    metadata = field.metadata[_METADATA_KEY]
    options: dict[str, Any] = {
        "kind": kind,
        "flag": _flag(field),
        "metavar": _METAVARS.get(metadata.get("kind", kind)),
        "repeated": name.startswith("tuple"),
        "bare": "on" if kind == "bool" else None,
        "zero_is_none": kind != "text" and name != str(field.type) and field.default is not None,
    }
    if kind == "seconds":
        options |= {"high": _MOST_SECONDS} | ({} if "above" in metadata else {"low": 0})
    return Setting(**options | metadata)


def default_of(config: Any, field: str) -> Any:
    """Returns the default of a field of a configuration class or object; None for a field without a default."""
    default = config.__dataclass_fields__[field].default
    return None if default is dataclasses.MISSING else default


def check_settings(config: Any, prefix: str = "") -> None:
    """Checks kind and range of every setting of ``config``. None is valid if it is the field's default or if an
    operator writes it as 0. ``prefix``: before the name in an error. Raises ConfigError for the first invalid field.
    """
    kind: type = type(config)
    for name, made in _checks_of(kind).items():
        value = getattr(config, name)
        if value is None and (made.zero_is_none or default_of(config, name) is None):
            continue
        limit = _limit(made, value)
        if limit is not None:
            raise ConfigError(prefix + name, value, limit)


def _flag(field: dataclasses.Field[Any]) -> str:
    return "--" + field.name.removesuffix("_s").replace("_", "-")


def _limit(made: Setting, value: object) -> str | None:
    """Returns what the value must be, in words; None if the value is valid."""
    if made.kind == "bool":
        return None if isinstance(value, bool) else "must be True or False"
    if made.kind == "text":
        if made.choices and value not in made.choices:
            return f"must be {one_of(made.choices)}"
        return None
    integral = made.kind in ("whole", "bytes")
    number = isinstance(value, int if integral else (int, float)) and not isinstance(value, bool)
    if number and math.isfinite(value) and _within(made, value):  # type: ignore[arg-type]
        return None
    words = {"whole": "a whole number", "bytes": "a whole number of bytes"}.get(
        made.kind, "a finite number of seconds" if made.kind == "seconds" else "a finite number"
    )
    return f"must be {words}{_range(made)}"


def _within(made: Setting, value: float) -> bool:
    return (
        (made.low is None or value >= made.low)
        and (made.above is None or value > made.above)
        and (made.high is None or value <= made.high)
    )


def _range(made: Setting) -> str:
    if made.low is not None and made.high is not None:
        return f" from {made.low:g} to {_whole(made.high)}"
    parts = []
    if made.above is not None:
        parts.append(f"above {made.above:g}")
    if made.low is not None:
        parts.append(f"of at least {made.low:g}")
    if made.high is not None:
        parts.append(f"of at most {_whole(made.high)}")
    return f" {' and '.join(parts)}" if parts else ""


def _whole(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def one_of(allowed: Sequence[str]) -> str:
    """Returns the values as words: "a, b or c"."""
    return f"{', '.join(allowed[:-1])} or {allowed[-1]}"
