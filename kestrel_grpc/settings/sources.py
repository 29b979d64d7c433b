"""The configuration file, one of the sources of a setting's value.

It is TOML. Its keys are the flags' names, grouped in sections. One file serves all commands.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from kestrel_client.commands.flags import Parser
from kestrel_client.commands.sources import FlagSetting as FlagSetting
from kestrel_client.commands.sources import SettingsError as SettingsError
from kestrel_client.commands.sources import Source
from kestrel_client.commands.sources import name_of as name_of
from kestrel_client.commands.sources import variable_of as variable_of

CONFIG_FLAG = "--config"
CONFIG_VARIABLE = "KESTREL_CONFIG"


def read_config_file(parser: Parser, known: Callable[[], Sequence[FlagSetting]]) -> None:
    """Lets ``--config`` of ``parser``, or the variable, name a file. ``known`` returns the settings of all commands."""

    def opened(args: argparse.Namespace) -> ConfigFile | None:
        source = CONFIG_FLAG if args.config else CONFIG_VARIABLE
        args.config = args.config or parser.sources.environ.get(CONFIG_VARIABLE) or None
        if args.config is None:
            return None
        file = read_file(args.config, source)
        file.check(known())
        return file

    parser.sources.file = opened


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A parsed configuration file. ``tables``: its sections."""

    name: str
    tables: Mapping[str, Any]

    def value(self, setting: FlagSetting) -> tuple[Any, Source] | None:
        """The setting's value in the file; None if the file does not set it. Raises SettingsError."""
        if setting.section is None:
            return None
        table = self.tables.get(setting.section, {})
        if setting.key not in table:
            return None
        return setting.from_file(table[setting.key], f"{self.name}:{setting.section}.{setting.key}")

    def check(self, known: Sequence[FlagSetting]) -> None:
        """Raises SettingsError for an unknown section or key. The message suggests the closest known name."""
        places = {each.key: each.section for each in known if each.section is not None}
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
                hint = (
                    f"; did you mean [{near[0]}]?"
                    if near
                    else f"; the sections are {', '.join(sections)}"
                )
                raise SettingsError(f"{self.name}: unknown section [{section}]{hint}")


def read_file(name: str, source: str) -> ConfigFile:
    """Reads and parses a TOML file. ``source``: the flag or variable that named it. Raises SettingsError."""
    # Commands say what the engine lacks before they load it.
    from kestrel_engine import read_small_file

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
