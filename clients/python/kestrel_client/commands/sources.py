"""The sources of a setting's value, in order of precedence: flag, environment variable, configuration file, default.

The same parser reads the value from every source. An error names the source: ``--max-queue``, ``KESTREL_MAX_QUEUE`` or
``kestrel.toml:requests.max-queue``. The file is TOML. Its keys are the flags' names, grouped in sections.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

ON, OFF = ("1", "on", "true", "yes"), ("0", "off", "false", "no")


class SettingsError(Exception):
    """A flag, a variable or a key of the file is invalid. The message is one line."""


class _Unset:
    """The value that argparse stores for a flag that is not given."""

    def __repr__(self) -> str:
        return "unset"


UNSET: Final = _Unset()


@dataclass(frozen=True, slots=True)
class Source:
    """Where a value came from. ``name`` is the flag, variable or key as errors name it."""

    kind: Literal["flag", "variable", "file", "default"]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FlagSetting:
    """One flag with its variable and key. ``section`` is None for a flag of a client, which no file can set.
    ``repeated``: ``parse`` returns lists, which are joined."""

    flag: str
    dest: str
    section: str | None
    parse: Callable[[str], Any]
    default: Any
    shown: str
    """The default in words."""
    environ: Mapping[str, str]
    choices: Sequence[str] | None = None
    repeated: bool = False

    @property
    def key(self) -> str:
        return self.flag.removeprefix("--")

    def from_variables(self) -> tuple[Any, Source] | None:
        """The variable's value; None if the variable is empty or not set. Raises SettingsError."""
        name = variable_of(self.flag)
        if not (text := self.environ.get(name)):
            return None
        return self._read(text, f"{name}={text!r}"), Source("variable", name)

    def from_file(self, raw: object, name: str) -> tuple[Any, Source]:
        """``raw``: the parsed TOML value. Raises SettingsError."""
        where = f"{name}={raw!r}"
        if isinstance(raw, list):
            if not self.repeated:
                raise SettingsError(f"{where}: must be one value, not a list")
            values = [value for item in raw for value in self._read(self._text(item, where), where)]
            return values, Source("file", name)
        return self._read(self._text(raw, where), where), Source("file", name)

    def _text(self, raw: object, where: str) -> str:
        """A TOML value as the text that a flag would hold. ``where``: name and value, for errors."""
        if isinstance(raw, str):
            return raw
        if isinstance(raw, bool):
            if self.choices is not None and "off" in self.choices:
                return "on" if raw else "off"
        elif isinstance(raw, (int, float)) and self.parse not in (str, in_list):
            return repr(raw)
        raise SettingsError(f"{where}: must be {_kind(self)}")

    def _read(self, text: str, where: str) -> Any:
        try:
            value = self.parse(text)
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise SettingsError(f"{where}: {error}") from None
        if self.choices is not None and value not in self.choices:
            raise SettingsError(f"{where}: must be one of {', '.join(self.choices)}")
        return value


def in_list(text: str) -> list[str]:
    """Parses one of several texts."""
    return [text]


def variable_of(flag: str) -> str:
    """The variable of a flag: ``KESTREL_MAX_QUEUE`` for ``--max-queue``."""
    return "KESTREL_" + flag.removeprefix("--").upper().replace("-", "_")


def name_of(args: argparse.Namespace, flag: str) -> str:
    """The source of a flag's value (flag, variable or key), for errors about that value."""
    source = args.sources.get(flag.removeprefix("--").replace("-", "_"))
    return flag if source is None or source.kind == "default" else source.name


class ValuesFile(Protocol):
    """A configuration file."""

    def value(self, setting: FlagSetting) -> tuple[Any, Source] | None: ...


@dataclass(slots=True)
class Sources:
    """The settings of one command. ``settle`` decides their values. ``file`` opens the file that the arguments name."""

    settings: list[FlagSetting] = field(default_factory=list)
    file: Callable[[argparse.Namespace], ValuesFile | None] = lambda args: None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def settle(self, args: argparse.Namespace) -> None:
        """Fills in the settings that no flag gave. Sets ``args.sources``: the Source of each value, by dest. Raises
        SettingsError."""
        file = self.file(args)
        args.sources = sources = {}
        for setting in self.settings:
            value_of_flag = getattr(args, setting.dest)
            value, source = setting.default, Source("default", setting.flag)
            # File and variable are checked even if a flag overrides them, so that a mistake shows at once.
            if file is not None and (found := file.value(setting)) is not None:
                value, source = found
            if (found := setting.from_variables()) is not None:
                value, source = found
            if value_of_flag is not UNSET:
                value, source = value_of_flag, Source("flag", setting.flag)
            setattr(args, setting.dest, value)
            sources[setting.dest] = source


def _kind(setting: FlagSetting) -> str:
    if setting.choices is not None:
        return f"one of {', '.join(setting.choices)}"
    return "a string" if setting.parse in (str, in_list) else "a string or a number"
