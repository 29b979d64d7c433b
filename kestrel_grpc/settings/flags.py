"""The flags of configuration classes. ``add_settings`` adds them, as the fields of a class describe them.
``configured`` makes the object from parsed flags. This module does not import the engine when it is imported, because
doctor reports what the engine lacks. pydantic-settings would read the three sources, but its errors name fields: the
flag, variable or key of an error, the suggestions and --print-config would stay ours."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from kestrel_client.commands.flags import Flags
from kestrel_client.commands.flags import Parser as Parser
from kestrel_client.commands.sources import OFF, ON, in_list, name_of
from kestrel_client.commands.sources import SettingsError as SettingsError

if TYPE_CHECKING:
    from kestrel_engine import ConfigError, Setting

ON_OFF = ("on", "off")
_SIZE = re.compile(r"(\d+)\s*(?:([KMG])(i?)B?|B)?", re.IGNORECASE)

C = TypeVar("C")


def add_settings(
    parser: argparse.ArgumentParser,
    *configs: type,
    only: Iterable[str] | None = None,
    several: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
) -> None:
    """Adds flags for the settings of configuration classes, in the groups that the settings name. ``only``: the titles
    of the groups to add; None adds all. ``several``: fields of one text whose flags give lists of texts here."""
    from kestrel_engine import default_of, settings_of

    assert isinstance(parser, Parser), "only a Parser fills in flags that are not given"
    for config in configs:
        for field, setting in settings_of(config).items():
            group = setting.group
            if only is not None and group.title not in only:
                continue
            flags = parser.groups.get(group.title)
            if flags is None:
                flags = Flags(parser, group.title, section=group.section or None, environ=environ)
                parser.groups[group.title] = flags
            _add(flags, setting, default_of(config, field), several=field in several)


def configured(config: type[C], args: argparse.Namespace, **others: Any) -> C:
    """The configuration that the parsed flags give.

    ``others`` are values of fields, which override flags. A field whose flag the command does not have keeps its
    default. Raises SettingsError, which names the flag, variable or key.
    """
    from kestrel_engine import ConfigError, settings_of

    values: dict[str, Any] = {}
    for field, setting in settings_of(config).items():
        dest = dest_of(setting.flag)
        value = getattr(args, dest, None)
        if field not in others and (value is not None or setting.zero_is_none):
            values[field] = field_value(setting, value)
    try:
        return config(**values, **others)
    except ConfigError as error:
        raise settings_error(error, args, config, precision=others.get("precision")) from None


def settings_error(
    error: ConfigError, args: argparse.Namespace, *configs: type, precision: str | None = None
) -> SettingsError:
    """A ConfigError as a SettingsError that names the flag, variable or key that gave the value. A field of a model's
    config.json keeps its name."""
    from kestrel_engine import settings_of

    field, value, limit = error.field.rpartition(".")[2], error.value, error.limit
    if field in ("fp8_gemms", "kv_cache_dtype", "weights"):  # --precision gave the value.
        limit = f"sets {field} to {value}: {limit}"
        field, value = "precision", precision or args.precision
    flags = [made[field].flag for config in configs if field in (made := settings_of(config))]
    flag = flags[0] if flags else "--" + field.replace("_", "-")
    if "." in error.field and not flags:
        return SettingsError(str(error))
    shown = "" if value is None else f"={value}"
    return SettingsError(f"{name_of(args, flag)}{shown}: {limit}")


def dest_of(flag: str) -> str:
    """The attribute of a flag's value in the parsed namespace: ``max_queue`` for ``--max-queue``."""
    return flag.removeprefix("--").replace("-", "_")


def _add(flags: Flags, setting: Setting, default: Any, *, several: bool) -> None:
    options: dict[str, Any] = {}
    choices = ON_OFF if setting.kind == "bool" else setting.choices
    if choices:
        options["choices"] = choices
    if setting.bare is not None:
        options |= {"nargs": "?", "const": setting.bare}
    if setting.metavar is not None:
        options["metavar"] = setting.metavar
    if setting.kind == "bool":
        default = "on" if default is not setting.negated else "off"
    elif setting.repeated:
        default = None
    help, parse, shown = setting.help, parser_of(setting), setting.shown
    if several:
        assert setting.kind == "text" and setting.parse is None, setting
        help += "; may be given several times, each with settings of its own: NAME,SETTING=VALUE"
        default, shown, parse = [default], str(default), in_list
    elif setting.repeated and setting.distinct:
        help += "; repeat the flag or separate with commas"
    elif shown is None and setting.kind == "bytes":
        shown = _shown_size(default)
    if default is None and setting.zero_is_none:
        default = 0
    options |= {"type": parse, "default": default, "shown": shown}
    flags.add(setting.flag, help=help, repeated=several or setting.repeated, **options)


def parser_of(setting: Setting) -> Callable[[str], Any]:
    """The function that reads the setting's value from text: of a repeated setting, a list. It raises ValueError."""
    read = setting.parse or _PARSERS[setting.kind]
    if setting.repeated:
        return lambda text: [read(part.strip()) for part in text.split(",")]
    return read


def matching(pattern: str, limit: str) -> Callable[[str], str]:
    """A ``parse`` for texts that the whole ``pattern`` matches. ``limit``: what they must be, for the error."""
    compiled = re.compile(pattern)

    def checked_text(text: str) -> str:
        if not compiled.fullmatch(text):
            raise ValueError(f"must be {limit}")
        return text

    return checked_text


def readable(read: Callable[[str], object]) -> Callable[[str], str]:
    """A ``parse`` for texts that ``read`` can parse, and that stay as they are."""

    def checked_text(text: str) -> str:
        read(text)
        return text

    return checked_text


def field_value(setting: Setting, value: Any) -> Any:
    """The field's value for the flag's value ``value``."""
    if setting.kind == "bool":
        return (value == "on") is not setting.negated
    if setting.repeated:
        values = tuple(value or ())
        return tuple(dict.fromkeys(values)) if setting.distinct else values
    return None if setting.zero_is_none and not value else value


def on_or_off(text: str) -> str:
    """ "on" or "off". Raises ValueError."""
    for word, words in zip(ON_OFF, (ON, OFF), strict=True):
        if text.strip().lower() in words:
            return word
    raise ValueError("must be on or off")


def size(text: str) -> int:
    """A number of bytes: K, M and G are powers of 1000; KiB, MiB and GiB powers of 1024. Raises ValueError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("must be a number of bytes, like 1000000, 64MiB or 2G")
    power: int = " KMG".index(match[2].upper()) if match[2] else 0
    unit: int = (1024 if match[3] else 1000) ** power
    return int(match[1]) * unit


def _shown_size(num_bytes: int) -> str:
    """A number of bytes in the form that ``size`` parses."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes and num_bytes % (1 << power) == 0:
            return f"{num_bytes >> power}{unit}"
    return str(num_bytes)


def whole(text: str) -> int:
    """A whole number. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        raise ValueError("must be a whole number") from None


def number(text: str) -> float:
    """A finite number without exponent. Raises ValueError. The settings check its limits."""
    if not re.fullmatch(r"-?(\d+(\.\d*)?|\.\d+)", text.strip()):
        raise ValueError("must be a number, like 2 or 0.5")
    return float(text)


_PARSERS: dict[str, Callable[[str], Any]] = {
    "text": str,
    "bool": on_or_off,
    "whole": whole,
    "bytes": size,
    "number": number,
    "seconds": number,
}
