"""The sources of a setting's value, in order of precedence: flag, environment variable, configuration file, default.

The same parser reads the value from every source. An error names the source: ``--max-queue``, ``KESTREL_MAX_QUEUE`` or
``kestrel.toml:requests.max-queue``. The file is TOML. Its keys are the flags' names, grouped in sections.
"""

from __future__ import annotations

import argparse
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final, Literal

CONFIG_FLAG = "--config"
CONFIG_VARIABLE = "KESTREL_CONFIG"
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
class Setting:
    """One flag with its variable and key. ``section`` is None for a flag of a client, which no file can set.
    ``repeated``: ``parse`` returns lists, which are joined."""

    flags: tuple[str, ...]
    """The flag, then its other names."""
    dest: str
    section: str | None
    parse: Callable[[str], Any]
    default: Any
    shown: str
    """The default in words."""
    environ: Mapping[str, str]
    choices: Sequence[str] | None = None
    repeated: bool = False
    switch: bool = False

    @property
    def key(self) -> str:
        return self.flags[0].removeprefix("--")

    def from_variables(self) -> tuple[Any, Source] | None:
        """The variable's value; None if the variable is empty or not set. Raises SettingsError."""
        given = [name for flag in self.flags if self.environ.get(name := variable_of(flag))]
        values = {self.environ[name] for name in given}
        if not given:
            return None
        if len(values) > 1:
            raise SettingsError(f"{' and '.join(given)} differ, but both name the same setting")
        name, text = given[0], self.environ[given[0]]
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
            words = self.switch or (self.choices is not None and "off" in self.choices)
            if words:
                return "on" if raw else "off"
        elif isinstance(raw, (int, float)) and self.parse not in (str, in_list) and not self.switch:
            return repr(raw)
        raise SettingsError(f"{where}: must be {_kind(self)}")

    def _read(self, text: str, where: str) -> Any:
        if self.switch:
            if text.strip().lower() not in (*ON, *OFF):
                raise SettingsError(f"{where}: must be on or off")
            return text.strip().lower() in ON
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


@dataclass(slots=True)
class Sources:
    """The settings of one command. ``settle`` decides their values.

    ``known`` returns the settings of all commands, because one file serves them all. If it is None, no file is read.
    """

    settings: list[Setting] = field(default_factory=list)
    known: Callable[[], Sequence[Setting]] | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)

    def settle(self, args: argparse.Namespace) -> None:
        """Fills in the settings that no flag gave. Sets ``args.sources``: the Source of each value, by dest. Raises
        SettingsError."""
        file = self._open(args)
        args.sources = sources = {}
        for setting in self.settings:
            given = getattr(args, setting.dest)
            value, source = setting.default, Source("default", setting.flags[0])
            # File and variable are checked even if a flag overrides them, so that a mistake shows at once.
            if (found := file.value(setting)) is not None:
                value, source = found
            if (found := setting.from_variables()) is not None:
                value, source = found
            if given is not UNSET:
                value, source = given, Source("flag", setting.flags[0])
            setattr(args, setting.dest, value)
            sources[setting.dest] = source

    def _open(self, args: argparse.Namespace) -> ConfigFile:
        if self.known is None:
            return ConfigFile("", {})
        source = CONFIG_FLAG if args.config else CONFIG_VARIABLE
        args.config = args.config or self.environ.get(CONFIG_VARIABLE) or None
        if args.config is None:
            return ConfigFile("", {})
        file = read_file(args.config, source)
        file.check(self.known())
        return file


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A parsed configuration file. ``tables``: its sections."""

    name: str
    tables: Mapping[str, Any]

    def value(self, setting: Setting) -> tuple[Any, Source] | None:
        """The setting's value in the file; None if the file does not set it. Raises SettingsError."""
        if setting.section is None:
            return None
        table = self.tables.get(setting.section, {})
        keys = [key for flag in setting.flags if (key := flag.removeprefix("--")) in table]
        if len(keys) > 1:
            raise SettingsError(
                f"{self.name}:{setting.section}: {' and '.join(keys)} name the same setting; give only one"
            )
        if not keys:
            return None
        return setting.from_file(table[keys[0]], f"{self.name}:{setting.section}.{keys[0]}")

    def check(self, known: Sequence[Setting]) -> None:
        """Raises SettingsError for an unknown section or key. The message suggests the closest known name."""
        places: dict[str, str] = {}
        for setting in known:
            if setting.section is not None:
                places |= {flag.removeprefix("--"): setting.section for flag in setting.flags}
        sections = tuple(dict.fromkeys(places.values()))
        for section, table in self.tables.items():
            if section in sections and isinstance(table, Mapping):
                for key in table:
                    if places.get(key) != section:
                        raise SettingsError(
                            f"{self.name}:{section}.{key}: {_unknown(key, section, places)}"
                        )
            elif not isinstance(table, Mapping):
                where = places.get(section)
                hint = f"it belongs in [{where}]" if where else _unknown(section, "", places)
                raise SettingsError(f"{self.name}:{section}: a key must stand in a section; {hint}")
            else:
                near = get_close_matches(section, sections, n=1)
                hint = f"; did you mean [{near[0]}]?" if near else f": {', '.join(sections)}"
                raise SettingsError(f"{self.name}: unknown section [{section}]{hint}")


def read_file(name: str, source: str) -> ConfigFile:
    """Reads and parses a TOML file. ``source``: the flag or variable that named it. Raises SettingsError."""
    from kestrel_engine import read_small_file  # Commands of clients do without the engine.

    try:
        return ConfigFile(name, tomllib.loads(read_small_file(name).decode()))
    except OSError as error:
        raise SettingsError(f"{source}={name}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{name}: is not valid TOML: {error}") from None
    except RecursionError:
        raise SettingsError(f"{name}: is not valid TOML: it is nested too deeply") from None


def _unknown(key: str, section: str, places: Mapping[str, str]) -> str:
    if key == "api-key":
        return "a secret cannot stand in the file; set the variable KESTREL_API_KEY"
    if key == "adapter-api-key":
        return "a secret cannot stand in the file; set MOONDREAM_API_KEY or adapter-api-key-file"
    if key in places:
        return f"it belongs in [{places[key]}]"
    near = get_close_matches(key.replace("_", "-"), places, n=1)
    if not near:
        return "unknown key"
    where = "" if places[near[0]] == section else f" in [{places[near[0]]}]"
    return f"unknown key; did you mean {near[0]}{where}?"


def _kind(setting: Setting) -> str:
    if setting.switch:
        return "true or false"
    if setting.choices is not None:
        return f"one of {', '.join(setting.choices)}"
    return "a string" if setting.parse in (str, in_list) else "a string or a number"
